"""A four-bit draft of a policy: its linear layers converted, its weights written again when the policy has learned.

Everything of Sol-RL (2604.06916) is reachable from here: the numbers (`fp4`), contrastive selection, rank agreement and the
two-stage rollout (`contrast`). On a device without FP4 the draft is emulated, slower than what it drafts for: it is there
for studying agreement.
"""

import copy
import importlib.util
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from diffrl.checks import require_count, require_number, require_tensors, shapes
from diffrl.contrast import (
    RankAgreement,
    RewardCache,
    TwoStageRollout,
    affordable_pool,
    draft_rewards,
    rank_agreement,
    select_contrastive,
    two_stage_rollout,
)
from diffrl.fp4 import e2m1_round, mxfp4_fake_quantize, nvfp4_fake_quantize, straight_through

__all__ = [
    "PUBLISHED_MIN_DIM",
    "PUBLISHED_SKIP",
    "ConversionReport",
    "QuantizedLinear",
    "RankAgreement",
    "RewardCache",
    "TwoStageRollout",
    "affordable_pool",
    "convert_linears",
    "draft_rewards",
    "e2m1_round",
    "merge_lora",
    "mxfp4_fake_quantize",
    "nvfp4_fake_quantize",
    "rank_agreement",
    "requantize_",
    "select_contrastive",
    "straight_through",
    "two_stage_rollout",
]

Quantize = Callable[[Tensor], Tensor]

PUBLISHED_SKIP = {
    "SANA": (
        *("t_embedder", "t_block", "cfg_embedder", "y_embedder", "x_embedder"),
        *("final_layer", "logvar_linear", "attn.qkv"),
    ),
    "SD3.5-L": ("pos_embed", "context_embedder", "time_text_embed", "norm_out", "norm1", "ff_context"),
    "FLUX.1": ("x_embedder", "context_embedder", "time_text_embed", "norm_out"),
}
"""Layers that Sol-RL's published code leaves as they are, by model: `skip` of `convert_linears`."""

PUBLISHED_MIN_DIM = {"SANA": 2240, "SD3.5-L": 2432, "FLUX.1": 1000}
"""`min_dim` of the same code. Its "NVFP4" recipe is per-tensor FP8: its accuracy is not FP4's."""

BLACKWELL = (10, 0)


class ConversionReport(NamedTuple):
    """What `convert_linears` did: names converted, name -> "lora" | "skip" | "min_dim" | "subclass", entries of `skip` that
    met no module, and who computes: "emulated" or "torchao"."""

    converted: tuple[str, ...]
    skipped: dict[str, str]
    unused_skips: tuple[str, ...]
    backend: str

    def __str__(self) -> str:
        """One line of counts; the fields hold the names."""
        why = Counter(self.skipped.values())
        left = ", ".join(f"{count} {reason}" for reason, count in sorted(why.items())) or "none"
        unused = f"; skips that met nothing: {list(self.unused_skips)}" if self.unused_skips else ""
        return f"{len(self.converted)} layers converted ({self.backend}), left alone: {left}{unused}"


class QuantizedLinear(nn.Module):
    """F.linear(quantize(x), weight, bias): four-bit weights and activations. weight holds dequantised values."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, quantize: Quantize):
        super().__init__()
        self.weight, self.quantize = weight, quantize
        self.register_parameter("bias", bias)
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Tensor) -> Tensor:
        """x " ... in" -> " ... out"."""
        return nn.functional.linear(self.quantize(x), self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def convert_linears(
    module: nn.Module, *, quantize: Quantize, skip: Sequence[str] = (), min_dim: int = 0
) -> tuple[nn.Module, ConversionReport]:
    """A copy of `module` whose nn.Linear layers compute F.linear(quantize(x), quantize(W), b), W4A4 (Sol-RL, 2604.06916).

    The module itself is untouched; the copy shares no tensor with it and has requires_grad False everywhere. A converted
    layer keeps its name, weight (quantised once, in the layer's dtype) and bias; activations are quantised at each call.
    Not converted, first reason wins: a name with a component that starts with lora_ ("lora"); an entry of `skip` that is
    a prefix of the name at a component boundary, so `norm1` hits blocks.0.norm1_context.linear ("skip"); max(in, out) <=
    min_dim ("min_dim"); a subclass of nn.Linear, whose owner may read its weight past the forward ("subclass").

    With `quantize is nvfp4_fake_quantize` on bfloat16 CUDA weights, compute capability >= 10.0 and torchao importable,
    torchao's kernels run instead (report.backend); both axes of a weight must then be multiples of 16. Two-level NVFP4
    takes its activation scale over the whole call: a sample then depends on who shares its chunk.
    ValueError: what is no module or function, a bare string as `skip`, min_dim < 0, a layer that `quantize` refuses (its
    name is printed; add it to `skip`) or whose weight another kind of layer shares.

    >>> draft, report = convert_linears(nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 2)), quantize=e2m1_round, skip=["1"])
    >>> report.converted, report.skipped
    (('0',), {'1': 'skip'})
    """
    skip = _checked_skip(module, quantize, skip)
    min_dim = require_count("min_dim", min_dim, low=0)
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    linears = {n: m for n, m in module.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)}
    reasons = {name: _reason(name, layer, skip, min_dim) for name, layer in linears.items()}
    chosen = tuple(name for name, reason in reasons.items() if reason is None)
    skipped = {name: reason for name, reason in reasons.items() if reason is not None}
    unused = tuple(entry for entry in skip if not any(_hits(entry, name) for name in names))
    _refuse_strange(module, chosen)
    _refuse_ties(module, chosen)
    draft = copy.deepcopy(module).requires_grad_(False)
    hardware = quantize is nvfp4_fake_quantize and _torchao_runs([linears[name].weight for name in chosen])
    draft = _on_torchao(draft, chosen) if hardware else _emulated(draft, chosen, quantize)
    return draft, ConversionReport(chosen, skipped, unused, "torchao" if hardware else "emulated")


def requantize_(draft: nn.Module, params: Mapping[str, Tensor]) -> nn.Module:
    """Write `params` into the draft in place and return it: the one function of the library that changes its argument.

    params: name -> tensor, names as in the module that was converted; missing names stay. The weight of a converted layer
    becomes quantize(value), quantised in the dtype given and cast last; any other parameter or buffer is copied. Always
    from the values given, so nothing accumulates; storage is kept, so compiled code and CUDA graphs stay valid. Give the
    behaviour params, not the live ones. ValueError, and nothing written: an unknown name, another shape, a value that
    `quantize` refuses.

    >>> draft, _ = convert_linears(nn.Sequential(nn.Linear(1, 1, bias=False)), quantize=torch.round)
    >>> requantize_(draft, {"0.weight": torch.tensor([[2.6]])})(torch.ones(1, 1)).item()
    3.0
    """
    if not isinstance(draft, nn.Module) or not isinstance(params, Mapping):
        raise ValueError(f"requantize_ takes a module and tensors by name, got {type(draft)} and {type(params)}")
    own = dict(draft.named_parameters(remove_duplicate=False)) | dict(draft.named_buffers(remove_duplicate=False))
    layers = {f"{n}.weight".lstrip("."): m for n, m in draft.named_modules(remove_duplicate=False)}
    if wrong := [str(name) for name in params if name not in own]:
        raise ValueError(f"the draft has no {sorted(wrong)}; it has {sorted(own)[:8]} and {max(len(own) - 8, 0)} more")
    differ = [n for n, x in params.items() if not isinstance(x, Tensor) or x.shape != own[n].shape or x.is_meta]
    if differ:
        raise ValueError("; ".join(f"{n!r}: {shapes(draft=own[n], params=params[n])}" for n in differ))
    with torch.no_grad():
        written = {n: _stored(n, value.detach(), layers.get(n), own[n]) for n, value in params.items()}
        for name, value in written.items():
            own[name].copy_(value)
    return draft


def merge_lora(
    weight: Float[Tensor, " out in"], lora_a: Float[Tensor, " r in"], lora_b: Float[Tensor, " out r"], *, scale: float
) -> Float32[Tensor, " out in"]:
    """W + scale (B A) in float32 (2106.09685 sec. 4.1): what `requantize_` is to be given, from the *base* weight each time.

    Merging into a bfloat16 buffer loses deltas below 2^-9 |W|, early in training all of them, and adding in place drifts.
    scale = alpha/r. ValueError: shapes that do not fit, a scale that is not finite.

    >>> merge_lora(torch.ones(2, 2), torch.ones(1, 2), torch.tensor([[1.0], [0.0]]), scale=0.5)
    tensor([[1.5000, 1.5000],
            [1.0000, 1.0000]])
    """
    require_tensors(weight=weight, lora_a=lora_a, lora_b=lora_b)
    scale = require_number("scale", scale)
    fits = weight.ndim == lora_a.ndim == lora_b.ndim == 2 and lora_a.shape[0] == lora_b.shape[1]
    if not fits or tuple(weight.shape) != (lora_b.shape[0], lora_a.shape[1]):
        raise ValueError(
            f"weight (out, in) needs A (r, in) and B (out, r): {shapes(weight=weight, lora_a=lora_a, lora_b=lora_b)}"
        )
    return weight.float() + scale * (lora_b.float() @ lora_a.float())


# ---- which layers -----------------------------------------------------------------------------------------------------


def _checked_skip(module: Any, quantize: Any, skip: Any) -> tuple[str, ...]:
    if not isinstance(module, nn.Module) or not callable(quantize):
        raise ValueError(f"convert_linears takes a module and quantize, got {type(module).__name__} and {quantize!r}")
    if isinstance(skip, str) or not isinstance(skip, Sequence) or any(not isinstance(s, str) or not s for s in skip):
        raise ValueError(f"skip must be a sequence of non-empty strings such as ('norm_out',), got {skip!r}")
    return tuple(skip)


def _hits(entry: str, name: str) -> bool:
    """Whether `entry` is a prefix of the name at a component boundary."""
    return f".{entry}" in f".{name}"


def _reason(name: str, layer: nn.Linear, skip: Sequence[str], min_dim: int) -> str | None:
    """Why the layer stays as it is, or None."""
    if any(part.startswith("lora_") for part in name.split(".")):
        return "lora"
    if any(_hits(entry, name) for entry in skip):
        return "skip"
    if max(layer.in_features, layer.out_features) <= min_dim:
        return "min_dim"
    return None if type(layer) is nn.Linear else "subclass"


def _refuse_strange(module: nn.Module, chosen: Sequence[str]) -> None:
    """ValueError where a layer computes more than F.linear(x, weight, bias), or its owner reads its weight itself."""
    odd = {}
    for name in chosen:
        layer = module.get_submodule(name)
        hooks = [
            kind for kind in vars(layer) if kind.endswith("_hooks") and "state_dict" not in kind and vars(layer)[kind]
        ]
        own = [n for n, _ in (*layer.named_buffers(), *layer.named_children())]
        own += [n for n, _ in layer.named_parameters() if n not in ("weight", "bias")]
        own += ["forward"] if "forward" in vars(layer) else []
        owner = module.get_submodule(name.rpartition(".")[0])
        owners = (
            ["the fast path of its TransformerEncoderLayer"] if isinstance(owner, nn.TransformerEncoderLayer) else []
        )
        if hooks or own or owners:
            odd[name] = [*hooks, *own, *owners]
    if odd:
        raise ValueError(f"layers that are more than their weight and bias: {odd}; add them to skip")


def _refuse_ties(module: nn.Module, chosen: Sequence[str]) -> None:
    """ValueError where a weight is also something else: written under one name, it would stay stale under the other."""
    ours = {f"{name}.weight".lstrip(".") for name in chosen}
    names: dict[int, set[str]] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), set()).add(name)
    if mixed := [sorted(group) for group in names.values() if group & ours and group - ours]:
        raise ValueError(f"converted weights shared with other layers: {mixed}; add them to skip")


# ---- how they are converted and written -------------------------------------------------------------------------------


def _emulated(draft: nn.Module, chosen: Sequence[str], quantize: Quantize) -> nn.Module:
    """The draft with `QuantizedLinear` in place of its chosen layers; what was one layer or one weight stays one."""
    weights: dict[int, nn.Parameter] = {}
    layers: dict[int, QuantizedLinear] = {}
    for name in chosen:
        linear: Any = draft.get_submodule(name)
        if id(linear) in layers:
            continue
        weight = linear.weight
        if id(weight) not in weights:
            value = _quantized(f"{name}.weight".lstrip("."), weight.detach(), quantize)
            weights[id(weight)] = nn.Parameter(value.to(weight.dtype), requires_grad=False)
        layers[id(linear)] = QuantizedLinear(weights[id(weight)], linear.bias, quantize).train(linear.training)
    for name in chosen:
        draft = _replaced(draft, name, layers)
    return draft


def _replaced(draft: nn.Module, name: str, layers: Mapping[int, nn.Module]) -> nn.Module:
    if not name:
        return layers[id(draft)]
    parent, _, own = name.rpartition(".")
    holder = draft.get_submodule(parent)
    layer = getattr(holder, own)
    setattr(holder, own, layers.get(id(layer), layer))  # a shared holder has it already
    return draft


def _quantized(name: str, value: Tensor, quantize: Quantize) -> Tensor:
    where = f"{name!r} {tuple(value.shape)} {value.dtype}"
    try:
        quantized = quantize(value)
    except ValueError as error:
        raise ValueError(f"quantize refuses {where}: {error}; add the layer to skip") from error
    if not isinstance(quantized, Tensor) or quantized.shape != value.shape:
        raise ValueError(f"quantize must keep the shape of {where}, got {shapes(quantized=quantized)}")
    return quantized


def _stored(name: str, value: Tensor, layer: nn.Module | None, into: Tensor) -> Tensor:
    """What goes into the draft's tensor for this value."""
    if isinstance(layer, QuantizedLinear):
        return _quantized(name, value, layer.quantize)
    if hasattr(into, "to_nvfp4"):  # torchao's own tensor
        kind: Any = into
        from torchao.prototype.mx_formats.nvfp4_tensor import per_tensor_amax_to_scale

        return type(kind).to_nvfp4(
            value.to(into.device, into.dtype).contiguous(),
            per_tensor_scale=per_tensor_amax_to_scale(value.abs().amax()).to(into.device),
            is_swizzled_scales=True,
            act_quant_kwargs=kind.act_quant_kwargs,
        )
    return value


def _torchao_runs(weights: Sequence[Any]) -> bool:
    """Whether torchao's NVFP4 product can run on all of these weights: bfloat16, Blackwell or later, torchao importable."""
    if not weights or any(w.dtype != torch.bfloat16 or w.device.type != "cuda" for w in weights):
        return False
    capable = all(torch.cuda.get_device_capability(device) >= BLACKWELL for device in {w.device for w in weights})
    return capable and importlib.util.find_spec("torchao") is not None


def _on_torchao(draft: nn.Module, chosen: Sequence[str]) -> nn.Module:
    """The draft with torchao's NVFP4 weights in its chosen layers, which make their inputs contiguous first."""
    from torchao.prototype.mx_formats import NVFP4DynamicActivationNVFP4WeightConfig
    from torchao.quantization import quantize_

    layers: dict[str, Any] = {name: draft.get_submodule(name) for name in chosen}
    if odd := {name: tuple(m.weight.shape) for name, m in layers.items() if any(n % 16 for n in m.weight.shape)}:
        raise ValueError(f"torchao needs both weight axes to be multiples of 16: {odd}; add the layers to skip")
    config = NVFP4DynamicActivationNVFP4WeightConfig(use_triton_kernel=importlib.util.find_spec("mslk") is not None)
    quantize_(draft, config, filter_fn=lambda _, name: name in layers)
    for layer in layers.values():
        layer.register_forward_pre_hook(lambda _, inputs: tuple(x.contiguous() for x in inputs))
    return draft.requires_grad_(False)
