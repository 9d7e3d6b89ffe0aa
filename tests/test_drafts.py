"""Drafts of a real (tiny) pipeline: equal to a draft converted anew from the merged weights, and never stale."""

import copy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from oracles import refuses

from diffrl.algorithms import nft, sol_rl
from diffrl.drafts import Draft, adapter_draft, merged_draft
from diffrl.fp4 import mxfp4_fake_quantize, nvfp4_fake_quantize
from diffrl.loop import train
from diffrl.models import from_pipeline
from diffrl.quant import convert_linears, merge_lora
from diffrl.tasks.toy import toy_model

PROMPTS = ["a red cat", "two blue birds"]
SKIP = ("context_embedder", "norm_out")
MAKERS = {"merged": merged_draft, "adapter": adapter_draft}


LORA = {"r": 4, "lora_alpha": 16}


def made(lora=LORA, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = from_pipeline(
            tiny.sd3(with_t5=False),
            lora=lora,
            height=16,
            width=16,
            max_sequence_length=8,
            guidance_scale=1.0,
            **options,
        )
    if lora is not None:
        tiny.randomise(model.params, std=0.2)
    return model


def point(model, b=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    x_t = torch.randn(b, *model.latent_shape(), generator=g)
    return x_t, torch.rand(b, generator=g) * 0.9 + 0.05, model.encode(PROMPTS[:b])


def told(draft, params, at):
    velocity, own = draft(params)
    return velocity(own, *at)


def merged_by_hand(model, params):
    """The pipeline's transformer with no adapter and W + scale B A in its place, from plain tensor arithmetic."""
    plain = tiny.sd3(with_t5=False).transformer.eval()
    adapted = dict(model.module.named_modules())
    with torch.no_grad():
        for name, layer in plain.named_modules():
            a, b = (f"{name}.lora_{ab}.default.weight" for ab in "AB")
            if a in params:
                layer.weight += adapted[name].scaling["default"] * (params[b] @ params[a])
    return plain


# ---- what a draft computes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", [nvfp4_fake_quantize, mxfp4_fake_quantize])
def test_a_merged_draft_is_a_conversion_of_the_merged_transformer(quantize):
    model = made()
    draft = merged_draft(model, quantize=quantize, skip=SKIP)
    at = point(model)
    got = told(draft, model.params, at)
    converted, report = convert_linears(merged_by_hand(model, model.params), quantize=quantize, skip=SKIP)
    x_t, t, cond = at
    with torch.no_grad():
        expected = converted(hidden_states=x_t, timestep=1000 * t, return_dict=False, **cond)[0]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert draft.report == report
    assert not torch.allclose(got, model.velocity(model.params, *at), rtol=1e-3, atol=1e-3)


def test_an_adapter_draft_quantises_the_base_and_leaves_the_adapter_alone():
    model = made()
    draft, at = adapter_draft(model, skip=SKIP), point(model)
    got = told(draft, model.params, at)
    by_hand, report = convert_linears(model.module, quantize=nvfp4_fake_quantize, skip=SKIP)
    x_t, t, cond = at
    with torch.no_grad():
        expected = by_hand(hidden_states=x_t, timestep=1000 * t, return_dict=False, **cond)[0]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert draft.report == report
    assert {why for name, why in report.skipped.items() if "lora_" in name} == {"lora"}
    assert not torch.equal(got, told(merged_draft(model, skip=SKIP), model.params, at))


@pytest.mark.parametrize("name", MAKERS)
def test_with_nothing_converted_the_draft_is_the_policy(name):
    model = made()
    with pytest.warns(UserWarning, match=r"no linear layer was converted \(.*min_dim.*\)"):
        draft = MAKERS[name](model, min_dim=10**6)
    at = point(model)
    assert draft.report.converted == ()
    assert draft.share == 0
    got = told(draft, model.params, at)
    torch.testing.assert_close(got, model.velocity(model.params, *at), rtol=1e-5, atol=1e-5)


def test_a_draft_has_no_gradient_whatever_it_is_called_on():
    model = made()
    x_t, t, cond = point(model)
    # quantised activations carry no gradient anyway: the last layer is left as it is
    v = told(merged_draft(model, skip=["proj_out"]), model.params, (x_t.requires_grad_(True), t, cond))
    assert not v.requires_grad
    assert model.velocity(model.params, x_t, t, cond).requires_grad


def test_control_a_zero_adapter_is_not_this_policy():
    model = made()
    zero = {n: torch.zeros_like(p) for n, p in model.params.items()}
    draft, at = merged_draft(model, min_dim=10**6), point(model)
    assert not torch.allclose(told(draft, zero, at), model.velocity(model.params, *at), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_refreshed_in_place_equal_to_a_fresh_draft_and_the_model_untouched(name, lora):
    # nothing is merged into quantised weights: https://github.com/huggingface/diffusers/issues/10492
    model, at = made(lora), point(made(lora))
    before = {n: v.clone() for n, v in model.module.state_dict().items()}
    draft = MAKERS[name](model, skip=SKIP)
    places = {n: p.data_ptr() for n, p in draft.module.named_parameters()}
    a = {n: p.detach().clone() for n, p in model.params.items()}
    b = {n: 1.3 * p for n, p in a.items()}
    first = told(draft, a, at)
    for _ in range(3):
        second = told(draft, b, at)
        assert torch.equal(told(draft, a, at), first)
    assert torch.equal(told(MAKERS[name](model, skip=SKIP), b, at), second)
    assert not torch.equal(first, second)
    assert {n: p.data_ptr() for n, p in draft.module.named_parameters()} == places
    assert all(torch.equal(v, before[n]) for n, v in model.module.state_dict().items())
    assert all(p.requires_grad for p in model.params.values())
    assert not any(p.requires_grad for p in draft.module.parameters())
    ours = {p.data_ptr() for p in model.module.parameters()}
    assert not ours & set(places.values())


def test_share_and_report_say_what_was_converted():
    model = made()
    draft = merged_draft(model, skip=SKIP)
    numbers = {n: p.numel() for n, p in draft.module.named_parameters()}
    ours = sum(v for n, v in numbers.items() if n.rpartition(".")[0] in draft.report.converted)
    assert draft.share == ours / sum(numbers.values())
    assert "transformer_blocks.0.attn.to_q" in draft.report.converted
    assert not any("lora" in n or "base_layer" in n for n in [*draft.report.converted, *draft.report.skipped, *numbers])
    assert set(draft.report.skipped.values()) == {"skip"}
    assert (
        str(draft.report)
        == f"{len(draft.report.converted)} layers converted (emulated), left alone: {len(draft.report.skipped)} skip"
    )


def test_a_small_adapter_survives_a_bfloat16_base():
    pipe = tiny.sd3(with_t5=False)
    pipe.transformer.to(torch.bfloat16)
    model = from_pipeline(
        pipe, lora={"r": 2, "lora_alpha": 2}, height=16, width=16, max_sequence_length=8, guidance_scale=1.0
    )
    tiny.randomise(model.params, std=0.02)
    draft = merged_draft(model)
    draft(model.params)
    name = "transformer_blocks.0.attn.to_q"
    layer = model.module.get_submodule(name)
    a, b = (model.params[f"{name}.lora_{ab}.default.weight"].detach() for ab in "AB")
    merged = merge_lora(layer.base_layer.weight.detach(), a, b, scale=1.0)
    held = draft.module.get_submodule(name).weight
    assert held.dtype == torch.bfloat16
    assert torch.equal(held, nvfp4_fake_quantize(merged).bfloat16())
    assert not torch.equal(held, nvfp4_fake_quantize(merged.bfloat16()))


# ---- staleness --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_a_stale_draft_is_refused(name):
    model, draft = made(), None
    draft = MAKERS[name](model)
    at = point(model)
    with refuses("never given params"):
        draft.velocity(model.params, *at)
    velocity, own = draft(model.params)
    velocity(own, *at)
    other = {n: p.detach().clone() for n, p in own.items()}
    with refuses("stale draft", "is not the tensor"):
        velocity(other, *at)
    with refuses("stale draft"):
        velocity(dict(list(own.items())[1:]), *at)
    optimizer = torch.optim.AdamW(list(model.params.values()), lr=1e-3)
    model.velocity(model.params, *at).square().mean().backward()
    optimizer.step()
    with refuses("stale draft", "changed in place"):
        velocity(own, *at)
    draft(model.params)
    velocity(own, *at)
    bad = next(iter(own))
    with refuses(bad, "differ"):
        draft({n: p for n, p in own.items() if n != bad})
    with refuses("never given params"):
        velocity(own, *at)


@pytest.mark.parametrize("name", MAKERS)
def test_writes_that_torch_does_not_count_are_seen(name):
    model = made()
    draft, at = MAKERS[name](model), point(model)
    optimizer = torch.optim.AdamW(list(model.params.values()), lr=1e-6, fused=True)
    for write in (lambda: next(iter(model.params.values())).data.mul_(1.001), optimizer.step):
        velocity, own = draft(model.params)
        velocity(own, *at)
        model.velocity(model.params, *at).square().mean().backward()
        write()
        with refuses("stale draft"):
            velocity(own, *at)


def test_params_of_inference_mode_are_taken():
    model = made()
    with torch.inference_mode():
        params = {n: p.clone() for n, p in model.params.items()}
    velocity, own = merged_draft(model)(params)
    velocity(own, *point(model))


@pytest.mark.parametrize("name", MAKERS)
def test_a_draft_is_not_copied(name):
    draft = MAKERS[name](made())
    for how in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="make a second one"):
            how(draft)


def test_an_adapter_that_is_not_what_the_module_computes_with_is_refused():
    model = made()
    draft = merged_draft(model, min_dim=10**6)
    at, other = point(model), {"r": 2, "lora_alpha": 2, "target_modules": ["to_q"], "init_lora_weights": False}
    from peft import LoraConfig

    model.module.disable_adapters()
    with refuses("'default' alone", "disabled True"):
        draft(model.params)
    model.module.enable_adapters()
    model.module.add_adapter(LoraConfig(**other), "second")
    with refuses("'default' alone", "['second']"):
        draft(model.params)
    model.module.set_adapter("default")
    model.module.fuse_lora(adapter_names=["default"])
    with refuses("'default' alone", "fused ['default']"):
        draft(model.params)
    model.module.unfuse_lora()
    for layer in model.module.modules():
        if hasattr(layer, "scale_layer"):
            layer.scale_layer(0.5)  # read anew at every refresh
    got = told(draft, model.params, at)
    torch.testing.assert_close(got, model.velocity(model.params, *at), rtol=1e-4, atol=1e-4)


def test_params_that_are_none_are_refused():
    draft = merged_draft(made())
    for params in (None, 5, {"a": 1.0}):
        with refuses("params by name", params):
            draft(params)


def test_a_tensor_that_is_gone_is_not_mistaken_for_a_new_one():
    model = made()
    draft, at = merged_draft(model), point(model)
    params = {n: p.detach().clone() for n, p in model.params.items()}
    draft(params)
    del params
    again = {n: p.detach().clone() for n, p in model.params.items()}  # may lie at the same addresses
    with refuses("stale draft"):
        draft.velocity(again, *at)


def test_what_cannot_be_drafted_is_refused():
    for maker in MAKERS.values():
        with refuses("module and rebind"):
            maker(toy_model())
    model = made()
    with refuses("sequence of non-empty strings"):
        merged_draft(model, skip="norm_out")
    strange = model._replace(params={**model.params, "proj_out.lora_magnitude_vector.default.weight": torch.ones(1)})
    with refuses("plain low-rank", "lora_magnitude_vector"):
        merged_draft(strange)


# ---- in the loop ------------------------------------------------------------------------------------------------------


def brightness(images, prompts):
    return images.float().mean((1, 2, 3))


def test_sol_rl_trains_on_a_four_bit_draft_and_no_draft_reaches_the_graph():
    model = made()
    draft = merged_draft(model, skip=SKIP)
    drafted = []

    def watched(params):
        velocity, own = draft(params)
        return (lambda *args: drafted.append(velocity(*args)) or drafted[-1]), own

    algorithm = sol_rl(nft(), draft=watched, pool=6, keep=1, draft_steps=2)
    inner, leaves = algorithm.objective, []

    def objective(velocity, params, window):
        loss, keep, metrics = inner(velocity, params, window)
        leaves.append(graph_leaves(loss))
        return loss, keep, metrics

    optimizer = torch.optim.AdamW(list(model.params.values()), lr=1e-3)
    training = train(
        model, algorithm._replace(objective=objective), PROMPTS, brightness, optimizer, group_size=2, steps=3, seed=0
    )
    rows = [next(training) for _ in range(2)]
    assert len(drafted) == 4
    assert all(v.shape[0] == 12 and not v.requires_grad for v in drafted)
    ours = {id(p) for p in model.params.values()}
    assert all(found and found <= ours for found in leaves)
    assert not {id(p) for p in draft.module.parameters()} & ours
    assert {"draft/spearman", "draft/gap", "seconds/draft", "seconds/requantise", "seconds/policy"} <= set(rows[0])


def graph_leaves(loss):
    """ids of the leaf tensors that the graph of `loss` ends in."""
    found, seen, open_nodes = set(), set(), [loss.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        open_nodes.extend(n for n, _ in node.next_functions)
    return found


def test_control_a_leaf_of_the_draft_would_be_seen():
    model = made()
    draft = merged_draft(model)
    weight = next(p for n, p in draft.module.named_parameters() if n == "proj_out.weight")
    weight.requires_grad_(True)
    assert id(weight) in graph_leaves(draft._velocity(draft._own, *point(model)).sum())


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_refreshing_does_not_recompile():
    program = """
import copy, torch
from torch._dynamo.testing import CompileCounter
from diffrl.fp4 import nvfp4_fake_quantize
from diffrl.quant import convert_linears, requantize_
net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
draft, _ = convert_linears(net, quantize=nvfp4_fake_quantize)
counter = CompileCounter()
compiled, x = torch.compile(draft, backend=counter, fullgraph=True), torch.randn(4, 32)
with torch.no_grad():
    for scale in (1.0, 2.0, 3.0):
        params = {n: scale * p.detach() for n, p in net.named_parameters()}
        requantize_(draft, params)
        assert torch.equal(compiled(x), draft(x))
print(counter.frame_count)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    assert done.stdout.split() == ["1"], done.stderr[-2000:]


def test_drafts_are_copies_that_can_be_copied():
    model = made()
    draft = merged_draft(model)
    assert isinstance(draft, Draft)
    again = copy.deepcopy(draft.module)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), draft.module.parameters()))
