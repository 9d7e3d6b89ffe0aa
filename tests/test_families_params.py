"""Every family: params are data, gradients, checkpointing, export and resuming, on-policy ratios, half precision."""

import copy

import pytest
import tiny
import torch
from family_cases import each, encoded, gradients, largest_ratio_error, made
from test_models import close, others, point, same_state, state

from diffrl.family import ATTENTION
from diffrl.models import from_pipeline


@each
def test_other_params_are_used_for_one_call_and_leave_no_trace(case):
    # https://github.com/huggingface/peft/issues/3580: switching adapters flipped requires_grad; params are data
    _, model = made(case)
    cond, (x, t), before = encoded(case, model), point(model), None
    live, before = model.velocity(model.params, x, t, cond), state(model.module)
    old = others(model.params)
    swapped = model.velocity(old, x, t, cond)
    assert not close(swapped, live, 1e-2)
    assert not swapped.requires_grad
    assert live.requires_grad
    assert same_state(before, state(model.module))

    def hook(module, args, output):
        raise RuntimeError("in the middle")

    handle = next(m for n, m in model.module.named_modules() if n.endswith("to_q")).register_forward_hook(hook)
    with pytest.raises(RuntimeError, match="in the middle"):
        model.velocity(old, x, t, cond)
    handle.remove()
    assert same_state(before, state(model.module))
    assert torch.equal(live, model.velocity(model.params, x, t, cond))
    with torch.no_grad():  # the oracle: those values written into the module for good
        for name, tensor in model.params.items():
            tensor.copy_(old[name])
    assert not same_state(before, state(model.module))  # negative control
    assert close(swapped, model.velocity(model.params, x, t, cond))


@each
def test_gradient_reaches_lora_factors_only_checkpointed_or_not(case):
    # https://github.com/cloneofsimo/lora/issues/26: with gradient checkpointing the LoRA got no gradient
    pipe, plain = made(case)
    _, model = made(case, gradient_checkpointing=True)
    assert model.module.is_gradient_checkpointing
    cond, (x, t), old = encoded(case, plain), point(plain), others(plain.params)
    wanted = gradients(plain, cond, x, t)
    assert all(g.isfinite().all() for g in wanted.values())
    assert sum(bool(g.any()) for g in wanted.values()) >= len(wanted) / 2
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            assert not any(m.training for m in part.modules())
            trained = {n for n, p in part.named_parameters() if p.requires_grad}
            assert trained == (set(plain.params) if part is plain.module else set())
            assert {n for n, p in part.named_parameters() if p.grad is not None} <= trained
    size = max(float(g.abs().max()) for g in wanted.values())
    for between in (None, lambda: model.velocity(old, x, t, cond)):
        got = gradients(model, cond, x, t, between)
        assert all(torch.allclose(got[k], wanted[k], rtol=1e-3, atol=1e-4 * size) for k in wanted)

    def copy_in_and_forget():
        for k, p in model.params.items():
            p.data = old[k]

    got = gradients(model, cond, x, t, copy_in_and_forget)  # negative control: the recompute sees other values
    assert not all(torch.allclose(got[k], wanted[k], rtol=1e-2, atol=1e-2 * size) for k in wanted)


@each
def test_a_fresh_lora_is_the_base_model_on_every_attention_projection(case):
    # https://github.com/huggingface/peft/issues/493, https://github.com/verl-project/verl-omni/issues/552
    base, model = case.make(), made(case, fill=False)[1]
    full = from_pipeline(base, lora=None, max_sequence_length=case.length, **case.size)
    cond, (x, t) = encoded(case, model), point(model)
    assert close(model.velocity(model.params, x, t, cond), full.velocity(full.params, x, t, cond))
    wanted = {
        n for n, m in base.transformer.named_modules() if n.endswith(ATTENTION) and isinstance(m, torch.nn.Linear)
    }
    assert {k.split(".lora_")[0] for k in model.params} == wanted
    assert len(wanted) >= 4
    assert all(p.dtype == torch.float32 for p in model.params.values())


@each
def test_export_reloads_to_the_same_outputs_and_is_trained_on(case, tmp_path):
    # https://github.com/huggingface/diffusers/issues/11790, https://github.com/huggingface/trl/issues/2505
    pipe, model = made(case)
    cond, (x, t) = encoded(case, model), point(model)
    live, base = model.velocity(model.params, x, t, cond).detach(), None
    old = others(model.params)
    for name, params in (("live", None), ("old", old)):
        folder = model.export(tmp_path / name, params)
        fresh = case.make()
        fresh.load_lora_weights(folder, adapter_name="default")
        _, resumed = made(case, pipe=fresh, lora="default")
        assert set(resumed.params) == set(model.params)
        assert close(resumed.velocity(resumed.params, x, t, cond), model.velocity(params or model.params, x, t, cond))
        assert sum(bool(g.any()) for g in gradients(resumed, cond, x, t).values()) >= len(resumed.params) / 2
        with torch.no_grad():
            fresh.disable_lora()
            base = resumed.velocity(resumed.params, x, t, cond)
    assert not close(base, live, 1e-2)
    from peft import get_peft_model_state_dict

    # without its metadata alpha is lost: the negative control
    type(pipe).save_lora_weights(tmp_path / "bare", transformer_lora_layers=get_peft_model_state_dict(model.module))
    fresh = case.make()
    fresh.load_lora_weights(tmp_path / "bare", adapter_name="default")
    _, resumed = made(case, pipe=fresh, lora="default")
    assert not close(resumed.velocity(resumed.params, x, t, cond), live, 1e-2)


@each
def test_full_fine_tuning_is_saved_as_the_transformer(case, tmp_path):
    pipe, model = made(case, lora=None)
    assert set(model.params) == {n for n, _ in pipe.transformer.named_parameters()}
    cond, (x, t) = encoded(case, model), point(model)
    assert sum(bool(g.any()) for g in gradients(model, cond, x, t).values()) > len(model.params) / 2
    old = {k: p.detach() * 1.1 for k, p in model.params.items()}
    wanted = model.velocity(old, x, t, cond)
    assert not close(wanted, model.velocity(model.params, x, t, cond), 1e-3)
    model.export(tmp_path, old)
    saved = type(pipe.transformer).from_pretrained(tmp_path / "transformer")
    assert all(torch.equal(p, old[n]) for n, p in saved.named_parameters())
    other = case.make(seed=9)
    other.transformer = saved
    _, loaded = made(case, pipe=other, lora=None)
    assert close(loaded.velocity(loaded.params, x, t, cond), wanted)


@each
def test_rebind_gives_an_independent_policy(case):
    _, model = made(case)
    cond, (x, t) = encoded(case, model), point(model)
    copied = model.rebind(copy.deepcopy(model.module))
    v = model.velocity(model.params, x, t, cond)
    assert close(copied.velocity(copied.params, x, t, cond), v)
    tiny.randomise(copied.params, seed=8)
    assert not close(copied.velocity(copied.params, x, t, cond), v, 1e-2)
    assert torch.equal(model.velocity(model.params, x, t, cond), v)


@each
def test_on_policy_ratio_is_one_for_every_chunk_size(case):
    _, model = made(case)
    cond = encoded(case, model)
    for size in (1, 2, 3):
        assert largest_ratio_error(model, cond, size) < 1e-4
    replayed = model._replace(
        velocity=lambda params, x, t, c: model.velocity(params, x, t, c) + 0.1 * (params is model.params)
    )
    assert largest_ratio_error(replayed, cond, 3) > 1e-3  # negative control: a replay that is off by a little


BF16_RATIO = 5e-3


@each
def test_bf16_base_with_float32_factors(case):
    # https://github.com/Tencent-Hunyuan/UniRL/pull/151: bf16 LoRA weights swallowed small updates
    _, exact = made(case)
    pipe = case.make()
    pipe.transformer.to(torch.bfloat16)
    _, model = made(case, pipe=pipe)
    assert {p.dtype for p in model.params.values()} == {torch.float32}
    assert {p.dtype for n, p in model.module.named_parameters() if n not in model.params} == {torch.bfloat16}
    cond, (x, t) = encoded(case, model), point(model)
    assert {c.dtype for k, c in cond.items() if c.is_floating_point() and k != "guidance"} == {torch.bfloat16}
    v = model.velocity(model.params, x, t, cond)
    assert v.dtype == torch.float32
    wanted = exact.velocity(exact.params, x, t, encoded(case, exact))
    assert (v - wanted).norm() < 0.2 * wanted.norm()
    assert {g.dtype for g in gradients(model, cond, x, t).values()} == {torch.float32}
    assert largest_ratio_error(model, cond, 3) == 0  # the same call gives the same bits
    assert max(largest_ratio_error(model, cond, size) for size in (1, 2)) < BF16_RATIO
