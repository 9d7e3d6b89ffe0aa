"""Converted layers against float64 products, requantised drafts against fresh conversions, on tiny real transformers."""

import copy
import importlib.util
import sys
import types
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import normal, refuses, spy
from strategies import seeds
from torch import nn

from diffrl import contrast, fp4, quant
from diffrl.quant import (
    PUBLISHED_MIN_DIM,
    PUBLISHED_SKIP,
    ConversionReport,
    QuantizedLinear,
    convert_linears,
    merge_lora,
    mxfp4_fake_quantize,
    nvfp4_fake_quantize,
    requantize_,
)

FIXED = partial(nvfp4_fake_quantize, per_tensor_scale=2.0**-8)  # every operand is then a short dyadic number


class Block(nn.Module):
    """Linear layers of every kind that a draft meets."""

    def __init__(self):
        super().__init__()
        self.t_embedder = nn.Linear(16, 32)
        self.context_embedder = nn.Linear(32, 32, bias=False)
        self.norm1_context = nn.ModuleDict({"linear": nn.Linear(32, 32)})
        self.attn = nn.ModuleDict({"qkv": nn.Linear(32, 48), "out": nn.Linear(48, 32)})
        self.mixer = nn.MultiheadAttention(32, 2, batch_first=True)
        self.norm = nn.LayerNorm(32)
        self.register_buffer("table", torch.arange(3))

    def forward(self, x):
        x = self.context_embedder(self.t_embedder(x))
        x = self.attn["out"](self.attn["qkv"](self.norm1_context["linear"](x)))
        return self.norm(x + self.mixer(x, x, x)[0])


def block(*, seed: int = 0) -> Block:
    module = Block()
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(normal(*p.shape, seed=100 * seed + i) / 3)
    return module


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def outputs(module: nn.Module, seed: int = 5) -> torch.Tensor:
    with torch.no_grad():
        return module(normal(2, 3, 16, seed=seed, dtype=torch.float32))


# ---- conversion -------------------------------------------------------------------------------------------------------


@given(seeds, st.booleans())
def test_a_converted_layer_is_the_float64_product_of_its_quantised_operands(seed, bias):
    layer = nn.Linear(48, 16, bias=bias)
    with torch.no_grad():
        layer.weight.copy_(normal(16, 48, seed=seed).round(decimals=1))
        if bias:
            layer.bias.copy_((8 * normal(16, seed=seed + 1)).round() / 8)
    draft, report = convert_linears(layer, quantize=FIXED)
    assert report == ConversionReport(("",), {}, (), "emulated")
    x = normal(5, 48, seed=seed + 2, dtype=torch.float32)
    exact = FIXED(x).double() @ FIXED(layer.weight.detach()).double().T
    exact = exact + layer.bias.detach().double() if bias else exact
    assert torch.equal(draft(x).double(), exact)
    assert not torch.equal(draft(x), layer(x))


def test_control_weights_alone_or_activations_alone_are_another_product():
    layer, x = nn.Linear(32, 16), normal(5, 32, dtype=torch.float32)
    draft, _ = convert_linears(layer, quantize=FIXED)
    assert not torch.equal(draft(x), nn.functional.linear(x, draft.weight, draft.bias))
    assert not torch.equal(draft(x), nn.functional.linear(FIXED(x), layer.weight, layer.bias))


def test_the_report_names_every_linear_and_why():
    module = block()
    module.lora_A = nn.ModuleDict({"default": nn.Linear(16, 16)})
    module.small, module.wide = nn.Linear(16, 16), nn.Linear(16, 64)
    skip = ("norm1", "attn.qkv", "t_embedder", "nothing")
    draft, report = convert_linears(module, quantize=nvfp4_fake_quantize, skip=skip, min_dim=16)
    assert report.converted == ("context_embedder", "attn.out", "wide")
    assert report.skipped == {
        "t_embedder": "skip",
        "norm1_context.linear": "skip",
        "attn.qkv": "skip",
        "mixer.out_proj": "subclass",
        "lora_A.default": "lora",
        "small": "min_dim",
    }
    assert report.unused_skips == ("nothing",)
    kinds = {name: type(m) for name, m in draft.named_modules() if name in report.converted}
    assert kinds == dict.fromkeys(report.converted, QuantizedLinear)
    assert {n for n, m in draft.named_modules() if isinstance(m, nn.Linear)} == set(report.skipped)
    both = convert_linears(module, quantize=nvfp4_fake_quantize, skip=("lora_A", "small"), min_dim=16)[1]
    assert both.skipped["lora_A.default"] == "lora"
    assert both.skipped["small"] == "skip"


@pytest.mark.parametrize(
    ("entry", "name", "hit"),
    [
        ("norm1", "blocks.0.norm1.linear", True),
        ("norm1", "blocks.0.norm1_context.linear", True),
        ("attn.qkv", "blocks.3.attn.qkv", True),
        ("t_embedder", "t_embedder.linear", True),
        ("t_embedder", "context_embedder", False),
        ("norm", "blocks.0.prenorm", False),
        ("blocks.1", "blocks.1.ff", True),
        ("qkv", "blocks.3.attn.qkv", True),
    ],
)
def test_skip_entries_match_at_component_boundaries(entry, name, hit):
    *path, own = name.split(".")
    module = nn.ModuleDict({own: nn.Linear(16, 16)})
    for part in reversed(path):
        module = nn.ModuleDict({part: module})
    _, report = convert_linears(module, quantize=nvfp4_fake_quantize, skip=[entry])
    assert (report.skipped, report.unused_skips) == (({name: "skip"}, ()) if hit else ({}, (entry,)))


def test_the_source_is_untouched_and_shares_nothing():
    module = block()
    outputs(module)
    module.attn["out"].weight.grad = torch.ones(32, 48)
    before, ids = values(module), {name: id(p) for name, p in module.named_parameters()}
    draft, _ = convert_linears(module, quantize=nvfp4_fake_quantize)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), module.state_dict().values()))
    assert {name: id(p) for name, p in module.named_parameters()} == ids
    assert all(p.requires_grad for p in module.parameters())
    assert module.attn["out"].weight.grad is not None
    ours = {t.data_ptr() for t in module.state_dict().values()}
    assert not ours & {t.data_ptr() for t in draft.state_dict().values()}
    assert draft.state_dict().keys() == module.state_dict().keys()
    assert not any(p.requires_grad for p in draft.parameters())
    outputs(module).sum()


def test_one_call_of_quantize_per_weight_and_one_per_activation():
    log = []
    draft, report = convert_linears(block(), quantize=spy(nvfp4_fake_quantize, log), skip=["mixer"])
    assert [tuple(args[0].shape) for args, _ in log] == [(32, 16), (32, 32), (32, 32), (48, 32), (32, 48)]
    log.clear()
    outputs(draft)
    assert len(log) == len(report.converted) == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_layers_dtype_and_mode_are_kept(dtype):
    module = block().to(dtype).eval()
    draft, _ = convert_linears(module, quantize=mxfp4_fake_quantize, skip=["t_embedder", "attn.out"])
    layer = draft.attn["qkv"]
    assert layer.weight.dtype == layer.bias.dtype == dtype
    assert torch.equal(layer.weight, mxfp4_fake_quantize(module.attn["qkv"].weight))
    assert draft.context_embedder.bias is None
    assert not any(m.training for m in draft.modules())
    assert draft(torch.ones(1, 2, 16, dtype=dtype)).dtype == dtype
    assert "in_features=32, out_features=48" in repr(layer)


def test_what_was_one_layer_or_one_weight_stays_one():
    shared = nn.Linear(16, 16)
    module = nn.ModuleDict({"a": shared, "b": nn.ModuleDict({"c": shared}), "d": nn.Linear(16, 16)})
    module["d"].weight = shared.weight
    draft, report = convert_linears(module, quantize=nvfp4_fake_quantize)
    assert report.converted == ("a", "b.c", "d")
    assert draft["a"] is draft["b"]["c"]
    assert draft["a"].weight is draft["d"].weight
    new = normal(16, 16, dtype=torch.float32)
    requantize_(draft, {"a.weight": new})
    assert torch.equal(draft["d"].weight, nvfp4_fake_quantize(new))
    embedding = nn.Embedding(16, 16)
    embedding.weight = shared.weight
    tied = nn.ModuleDict({"a": shared, "e": embedding})
    with refuses("a.weight", "e.weight", "skip"):
        convert_linears(tied, quantize=nvfp4_fake_quantize)
    assert convert_linears(tied, quantize=nvfp4_fake_quantize, skip=["a"])[1].converted == ()


def test_chunks_agree_where_the_scale_is_fixed_per_row_or_one_level():
    def per_row(x):
        return nvfp4_fake_quantize(x, per_tensor_scale=x.abs().amax(-1, keepdim=True).float() / 2688 + 2.0**-100)

    module, x = nn.Linear(32, 16), normal(6, 32, dtype=torch.float32) * torch.logspace(-3, 2, 6)[:, None]
    for quantize, same in (
        (FIXED, True),
        (per_row, True),
        (partial(nvfp4_fake_quantize, two_level=False), True),
        (mxfp4_fake_quantize, True),
        (nvfp4_fake_quantize, False),
    ):
        draft, _ = convert_linears(module, quantize=quantize)
        alone = torch.cat([draft(row) for row in x.split(1)])
        assert torch.allclose(draft(x), alone, rtol=1e-5, atol=1e-6) == same


def test_bad_conversions_are_refused():
    module = nn.ModuleDict({"fine": nn.Linear(16, 4), "odd": nn.Linear(20, 16)})
    with refuses("odd", "(16, 20)", "skip", "whole number of blocks"):
        convert_linears(module, quantize=nvfp4_fake_quantize)
    with refuses("fine", "float64", "skip"):
        convert_linears(module.double(), quantize=nvfp4_fake_quantize)
    for bad in ("odd", ("odd", 3), ("",), {"odd"}, None):
        with refuses("skip", repr(bad)):
            convert_linears(module, quantize=nvfp4_fake_quantize, skip=bad)
    with refuses("min_dim", "-1"):
        convert_linears(module, quantize=nvfp4_fake_quantize, min_dim=-1)
    with refuses("quantize", "'nvfp4'"):
        convert_linears(module, quantize="nvfp4")
    with refuses("module", "dict"):
        convert_linears({}, quantize=nvfp4_fake_quantize)


def test_layers_that_are_more_than_their_weight_are_refused_by_name():
    def hooked():
        layer = nn.Linear(32, 32)
        layer.register_forward_hook(lambda module, inputs, output: output * 0)
        return layer

    def patched():
        layer = nn.Linear(32, 32)
        layer.forward = lambda x: x
        return layer

    def buffered():
        layer = nn.Linear(32, 32)
        layer.register_buffer("scale", torch.ones(1))
        return layer

    def nested():
        layer = nn.Linear(32, 32)
        layer.inner = nn.Linear(32, 32)
        return layer

    def spectral():
        return torch.nn.utils.spectral_norm(nn.Linear(32, 32))

    for make, said in (
        (hooked, "hooks"),
        (patched, "forward"),
        (buffered, "scale"),
        (nested, "inner"),
        (spectral, "weight_orig"),
    ):
        with refuses("'0'", said, "add them to skip"):
            convert_linears(nn.Sequential(make(), nn.Linear(32, 32)), quantize=nvfp4_fake_quantize)
        _, report = convert_linears(nn.Sequential(make(), nn.Linear(32, 32)), quantize=nvfp4_fake_quantize, skip=["0"])
        assert report.converted == ("1",)
    encoder = nn.TransformerEncoderLayer(32, 2, 32, batch_first=True)
    with refuses("'linear1'", "fast path"):  # it reads linear1.weight past the forward: that would be W4A16
        convert_linears(encoder.eval(), quantize=nvfp4_fake_quantize)


def test_a_quantize_of_another_shape_is_refused():
    with refuses("'0.weight'", "(16, 32)", "(4, 32)"):
        convert_linears(nn.Sequential(nn.Linear(32, 16)), quantize=lambda x: x[:4])


def test_control_shared_layers_count_once():
    layer = nn.Linear(32, 32)
    draft, report = convert_linears(nn.Sequential(layer, layer), quantize=nvfp4_fake_quantize)
    assert report.converted == ("0", "1")
    assert len(list(draft.parameters())) == 2


# ---- a real transformer -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformer():
    from tiny import sd3

    return sd3(with_t5=False).transformer.eval()


def denoise(transformer, seed=3):
    inputs = {
        "hidden_states": normal(2, 4, 8, 8, seed=seed, dtype=torch.float32),
        "encoder_hidden_states": normal(2, 5, 32, seed=seed + 1, dtype=torch.float32),
        "pooled_projections": normal(2, 64, seed=seed + 2, dtype=torch.float32),
        "timestep": torch.tensor([300.0, 900.0]),
    }
    with torch.no_grad():
        return transformer(**inputs).sample


def test_published_policies_on_a_tiny_sd3_transformer(transformer):
    skip = PUBLISHED_SKIP["SD3.5-L"]
    draft, report = convert_linears(transformer, quantize=nvfp4_fake_quantize, skip=skip)
    assert set(report.skipped.values()) == {"skip"}
    assert "transformer_blocks.0.attn.to_q" in report.converted
    assert "transformer_blocks.0.ff.net.0.proj" in report.converted
    assert "transformer_blocks.0.norm1.linear" in report.skipped
    assert "transformer_blocks.0.norm1_context.linear" in report.skipped
    assert "context_embedder" in report.skipped
    assert report.unused_skips == ()
    exact, drafted = denoise(transformer), denoise(draft)
    error = float((drafted - exact).norm() / exact.norm())
    assert 0.01 < error < 0.5
    everything = convert_linears(transformer, quantize=nvfp4_fake_quantize)[0]
    assert float((denoise(everything) - exact).norm() / exact.norm()) > error / 2
    small = convert_linears(transformer, quantize=nvfp4_fake_quantize, skip=skip, min_dim=PUBLISHED_MIN_DIM["SD3.5-L"])
    assert small[1].converted == ()
    assert torch.equal(denoise(small[0]), exact)


def test_published_settings_are_as_printed():
    assert PUBLISHED_MIN_DIM == {"SANA": 2240, "SD3.5-L": 2432, "FLUX.1": 1000}
    assert [len(PUBLISHED_SKIP[name]) for name in PUBLISHED_MIN_DIM] == [8, 6, 4]
    assert "attn.qkv" in PUBLISHED_SKIP["SANA"]
    assert "ff_context" in PUBLISHED_SKIP["SD3.5-L"]
    assert "norm_out" in PUBLISHED_SKIP["FLUX.1"]


def test_adapters_stay_and_the_merged_draft_is_near(transformer):
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_v"])
    adapted = inject_adapter_in_model(config, copy.deepcopy(transformer))
    for i, (name, p) in enumerate(adapted.named_parameters()):
        if "lora_" in name:
            p.data.copy_(normal(*p.shape, seed=i) / 4)
    skip = PUBLISHED_SKIP["SD3.5-L"]
    draft, report = convert_linears(adapted, quantize=nvfp4_fake_quantize, skip=skip)
    path = "transformer_blocks.0.attn.to_q"
    assert f"{path}.base_layer" in report.converted
    assert {reason for name, reason in report.skipped.items() if "lora_" in name} == {"lora"}
    params = {name: p for name, p in adapted.named_parameters() if "lora_" in name}
    moved = {name: p.detach() * 1.5 for name, p in params.items()}
    requantize_(draft, moved)
    assert torch.equal(
        dict(draft.named_parameters())[f"{path}.lora_A.default.weight"], moved[f"{path}.lora_A.default.weight"]
    )

    layer = adapted.get_submodule(path)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    merged = merge_lora(layer.base_layer.weight, a, b, scale=layer.scaling["default"])
    x = normal(3, 32, dtype=torch.float32)
    torch.testing.assert_close(x @ merged.T + layer.base_layer.bias, layer(x), rtol=1e-5, atol=1e-5)


# ---- requantising -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", [nvfp4_fake_quantize, mxfp4_fake_quantize])
def test_a_requantised_draft_is_a_fresh_one_and_nothing_accumulates(quantize):
    a, b, skip = block(seed=1), block(seed=2), ["mixer", "t_embedder", "attn.out"]
    draft, _ = convert_linears(a, quantize=quantize, skip=skip)
    fresh = {name: convert_linears(m, quantize=quantize, skip=skip)[0] for name, m in {"a": a, "b": b}.items()}
    pointers = {name: t.data_ptr() for name, t in draft.state_dict().items()}
    for _ in range(10):
        for name, module in (("a", a), ("b", b), ("a", a)):
            assert requantize_(draft, dict(module.state_dict())) is draft
            assert torch.equal(outputs(draft), outputs(fresh[name]))
    assert all(torch.equal(x, y) for x, y in zip(draft.state_dict().values(), fresh["a"].state_dict().values()))
    assert {name: t.data_ptr() for name, t in draft.state_dict().items()} == pointers
    assert not torch.equal(outputs(fresh["a"]), outputs(fresh["b"]))


def test_only_what_is_named_is_written():
    module = block()
    draft, _ = convert_linears(module, quantize=nvfp4_fake_quantize)
    before = values(draft)
    given = {"attn.out.weight": torch.ones(32, 48), "norm.bias": torch.ones(32), "table": torch.tensor([7, 8, 9])}
    requantize_(draft, given)
    after = values(draft)
    assert {name for name in after if not torch.equal(after[name], before[name])} == given.keys()
    assert after["table"].tolist() == [7, 8, 9]
    assert torch.equal(after["attn.out.weight"], nvfp4_fake_quantize(torch.ones(32, 48)))
    assert given["norm.bias"].data_ptr() != draft.norm.bias.data_ptr()


def test_values_are_quantised_as_given_and_cast_last():
    draft, _ = convert_linears(nn.Linear(32, 16).bfloat16(), quantize=nvfp4_fake_quantize)
    value = normal(16, 32, dtype=torch.float32)
    requantize_(draft, {"weight": value.requires_grad_()})
    assert torch.equal(draft.weight, nvfp4_fake_quantize(value).bfloat16())
    assert not torch.equal(draft.weight, nvfp4_fake_quantize(value.bfloat16()))
    assert not draft.weight.requires_grad


def test_a_refused_requantisation_writes_nothing():
    draft, _ = convert_linears(block(), quantize=nvfp4_fake_quantize)
    before = values(draft)
    fine = {"norm.weight": torch.zeros(32)}
    for wrong, said in (
        ({"norm.weights": torch.zeros(32)}, ("norm.weights", "t_embedder.weight")),
        ({"attn.out.weight": torch.zeros(48, 32)}, ("attn.out.weight", "(48, 32)", "(32, 48)")),
        ({"attn.out.weight": torch.zeros(32, 48), "norm.bias": torch.zeros(1)}, ("norm.bias", "(1,)", "(32,)")),
        ({"norm.bias": 0.0}, ("norm.bias", "0.0")),
        ({"attn.out.weight": torch.zeros(32, 48).double()}, ("attn.out.weight", "float64")),
    ):
        with refuses(*said):
            requantize_(draft, {**fine, **wrong})
        assert all(torch.equal(a, b) for a, b in zip(before.values(), draft.state_dict().values()))
    with refuses("module", "dict"):
        requantize_({}, {})
    with refuses("list"):
        requantize_(draft, [])


# ---- LoRA -------------------------------------------------------------------------------------------------------------


@given(seeds, st.integers(1, 4), st.floats(-3, 3))
def test_merged_lora_is_the_float64_sum(seed, r, scale):
    w, a, b = normal(6, 5, seed=seed), normal(r, 5, seed=seed + 1), normal(6, r, seed=seed + 2)
    got = merge_lora(w.float(), a.float(), b.float(), scale=scale)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.double().numpy(), (w + scale * (b @ a)).numpy(), rtol=1e-5, atol=1e-5)
    assert torch.equal(merge_lora(w.float(), a.float(), torch.zeros(6, r), scale=scale), w.float())


def test_small_deltas_survive_a_bfloat16_base():
    w = torch.ones(4, 4, dtype=torch.bfloat16)
    a, b = torch.full((1, 4), 2.0**-6, dtype=torch.bfloat16), torch.full((4, 1), 2.0**-6, dtype=torch.bfloat16)
    assert torch.equal(w + b @ a, w)  # the trap
    assert torch.equal(merge_lora(w, a, b, scale=1.0), torch.full((4, 4), 1 + 2.0**-12))
    assert torch.equal(w, torch.ones_like(w))


def test_bad_merges_are_refused():
    w, a, b = torch.zeros(6, 5), torch.zeros(2, 5), torch.zeros(6, 2)
    for wrong in ((w.T, a, b), (w, b, a), (w, a, b[:, :1]), (w[0], a, b), (w, a[:1], b)):
        with refuses("(out, in)", *[tuple(x.shape) for x in wrong]):
            merge_lora(*wrong, scale=1.0)
    with refuses("scale", "nan"):
        merge_lora(w, a, b, scale=float("nan"))
    with refuses("floating point", "int64"):
        merge_lora(w.long(), a, b, scale=1.0)


# ---- torchao ----------------------------------------------------------------------------------------------------------


class Weight(types.SimpleNamespace):
    """Stands for a weight on a device this machine lacks."""

    def __hash__(self):
        return id(self)


@pytest.mark.parametrize(
    ("dtype", "device", "capability", "installed", "runs"),
    [
        (torch.bfloat16, "cuda", (10, 0), True, True),
        (torch.bfloat16, "cuda", (12, 0), True, True),
        (torch.bfloat16, "cuda", (9, 0), True, False),
        (torch.bfloat16, "cuda", (10, 0), False, False),
        (torch.float32, "cuda", (10, 0), True, False),
        (torch.bfloat16, "cpu", (10, 0), True, False),
    ],
)
def test_torchao_is_chosen_on_blackwell_alone(monkeypatch, dtype, device, capability, installed, runs):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    assert quant._torchao_runs([Weight(dtype=dtype, device=torch.device(device))] * 2) == runs
    assert not quant._torchao_runs([])


def test_torchao_gets_exactly_the_chosen_layers(monkeypatch):
    calls = []

    def quantize_(module, config, filter_fn):
        calls.append((config, [name for name, m in module.named_modules() if filter_fn(m, name)]))

    config = types.ModuleType("torchao.prototype.mx_formats")
    config.NVFP4DynamicActivationNVFP4WeightConfig = dict
    entry = types.ModuleType("torchao.quantization")
    entry.quantize_ = quantize_
    for name in ("torchao", "torchao.prototype"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "torchao.prototype.mx_formats", config)
    monkeypatch.setitem(sys.modules, "torchao.quantization", entry)
    monkeypatch.setattr(quant, "_torchao_runs", lambda weights: len(weights) > 0)
    module = block().bfloat16()
    draft, report = convert_linears(module, quantize=nvfp4_fake_quantize, skip=["attn.qkv"])
    assert report.backend == "torchao"
    assert calls == [({"use_triton_kernel": importlib.util.find_spec("mslk") is not None}, list(report.converted))]
    assert draft is not module
    assert not any(p.requires_grad for p in draft.parameters())
    seen = []
    draft.attn["out"].register_forward_hook(lambda m, inputs, out: seen.append(inputs[0].is_contiguous()))
    draft.attn["out"](torch.ones(2, 48, 3, dtype=torch.bfloat16).transpose(1, 2))
    assert seen == [True]
    emulated = convert_linears(module, quantize=partial(nvfp4_fake_quantize), skip=["attn.qkv"])[1]
    assert emulated.backend == "emulated"
    with refuses("multiples of 16", "odd", "(20, 16)"):
        convert_linears(nn.ModuleDict({"odd": nn.Linear(16, 20)}), quantize=nvfp4_fake_quantize)


def test_torchao_tensors_are_written_in_place():
    pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    def stored(x):
        pts = per_tensor_amax_to_scale(x.abs().amax())
        return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=pts, is_swizzled_scales=True)

    old, new = normal(128, 64, dtype=torch.bfloat16), normal(128, 64, seed=1, dtype=torch.bfloat16)
    layer = nn.Linear(64, 128, dtype=torch.bfloat16)
    layer.weight = nn.Parameter(stored(old), requires_grad=False)
    pointer = layer.weight.qdata.data_ptr()
    requantize_(layer, {"weight": new})
    assert torch.equal(layer.weight.dequantize(), stored(new).dequantize())
    assert layer.weight.qdata.data_ptr() == pointer


def test_everything_is_reachable_from_quant():
    for module, names in (
        (fp4, ("e2m1_round", "nvfp4_fake_quantize", "mxfp4_fake_quantize", "straight_through")),
        (contrast, ("select_contrastive", "RankAgreement", "rank_agreement", "TwoStageRollout", "two_stage_rollout")),
    ):
        assert all(getattr(quant, name) is getattr(module, name) for name in names)
