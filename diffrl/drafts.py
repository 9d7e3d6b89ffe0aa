"""A four-bit draft of a model's policy, made once and refreshed from the behaviour params before every use: what `sol_rl` asks
for as `draft=`.

    merged_draft    the adapter is merged into its layers in float32, then quantised (as Sol-RL's published code)
    adapter_draft   the base is quantised once for ever, the adapter runs beside it in its own precision

Both are emulated on a device without FP4: slower than the policy they draft for.
"""

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diffrl.fp4 import nvfp4_fake_quantize
from diffrl.quant import ConversionReport, convert_linears, merge_lora, requantize_
from diffrl.types import Cond, Params, Velocity

Refresh = Callable[[Params], Mapping[str, Tensor]]


class Draft:
    """draft(params) writes these params into the four-bit copy, in place, and returns (velocity, params).

    The velocity takes the params that were written and refuses any others, and the same tensors once an optimizer step has
    changed them: a stale draft is an error. Seen are other tensors, torch's count of in-place writes, and, as fused optimizers
    and `tensor.data` are not counted, the values of some 1000 numbers of each tensor. Base weights are those of the model when
    the draft was made. Storage is kept from call to call, so compiled code stays valid. No gradient; not to be copied.

    report: the ConversionReport. module: the converted copy. share: numbers in converted layers / numbers in the module.
    """

    def __init__(self, velocity: Velocity, own: Params, module: nn.Module, report: ConversionReport, refresh: Refresh):
        self.module, self.report = module, report
        self._velocity, self._own, self._refresh = velocity, own, refresh
        self._written: dict[str, tuple[Any, int]] | None = None
        self._values = torch.zeros(0)
        layers = [module.get_submodule(name) for name in report.converted]
        converted = {id(p): p.numel() for layer in layers for p in layer.parameters(recurse=False)}
        if not report.converted:
            why = ", ".join(sorted(set(report.skipped.values()))) or "there are none"
            warnings.warn(f"no linear layer was converted ({why}): this draft is the policy itself", stacklevel=3)
        self.share = sum(converted.values()) / max(sum(p.numel() for p in module.parameters()), 1)

    def __call__(self, params: Params) -> tuple[Velocity, Params]:
        self._written = None  # where refreshing fails, nothing half-written is used
        if not isinstance(params, Mapping) or any(not isinstance(p, Tensor) for p in params.values()):
            raise ValueError(f"a draft is made of params by name, got {params!r:.200}")
        requantize_(self.module, self._refresh(params))
        self._written = {name: (weakref.ref(p), _writes(p)) for name, p in params.items()}
        self._values = _some_values(params)
        return self.velocity, params

    def __copy__(self) -> "Draft":
        raise TypeError("a draft is not copied, as its copy would write one module and run another: make a second one")

    def __deepcopy__(self, memory: Any) -> "Draft":
        return self.__copy__()

    def velocity(self, params: Params, x_t: Tensor, t: Tensor, cond: Cond) -> Tensor:
        """The draft's v " b *d" float32 at the params it was last given. ValueError: other ones, or changed since."""
        if self._written is None:
            raise ValueError("this draft was never given params: call draft(params) first")
        for name in [*self._written, *params]:
            reference, version = self._written.get(name, (lambda: None, 0))
            if name not in params or reference() is not params[name]:
                raise ValueError(f"stale draft: {name!r} is not the tensor it was written from; call draft(params)")
            if _writes(params[name]) != version:
                raise ValueError(f"stale draft: {name!r} was changed in place since it was written; call draft(params)")
        if not torch.equal(_some_values(params), self._values):
            raise ValueError("stale draft: params were changed in place since they were written; call draft(params)")
        with torch.no_grad():
            return self._velocity(self._own, x_t, t, cond)


def merged_draft(
    model: Any,
    *,
    quantize: Callable[[Tensor], Tensor] = nvfp4_fake_quantize,
    skip: Sequence[str] = (),
    min_dim: int = 0,
) -> Draft:
    """A draft whose layers hold quantize(W + alpha/r B A), merged in float32 from the base weight at every refresh.

    model: `models.Model` around a pipeline (it has `module` and `rebind`), LoRA or fully trained; untouched. quantize, skip,
    min_dim: as `quant.convert_linears`; the released models' published lists are `quant.PUBLISHED_SKIP`, `PUBLISHED_MIN_DIM`.
    ValueError: a toy model; adapters other than plain low-rank factors on linear layers; as `convert_linears`.
    No example: needs a pipeline.
    """
    module = _module_of(model)
    layers = _adapted(module, model.params)
    _require_merged(module, model.params, layers)
    copied, report = convert_linears(module, quantize=quantize, skip=skip, min_dim=min_dim)
    for name in layers:
        parent, _, own = name.rpartition(".")
        setattr(copied.get_submodule(parent), own, copied.get_submodule(f"{name}.base_layer"))
    plain = {f"{name}.base_layer": name for name in layers}
    report = report._replace(
        converted=tuple(plain.get(name, name) for name in report.converted),
        skipped={plain.get(n, n): why for n, why in report.skipped.items() if why != "lora"},
    )
    adapters = {f"{name}.lora_{ab}.{layer[2]}.weight" for name, layer in layers.items() for ab in "AB"}

    def refresh(params: Params) -> Mapping[str, Tensor]:
        _require_names(params, model.params)
        layers = _adapted(module, model.params)
        _require_merged(module, model.params, layers)  # again: an adapter may have been fused or scaled since
        written = {name: value for name, value in params.items() if name not in adapters}
        for name, (weight, scale, adapter) in layers.items():
            a, b = (params[f"{name}.lora_{ab}.{adapter}.weight"].detach() for ab in "AB")
            written[f"{name}.weight"] = merge_lora(
                weight.detach(), a.to(weight.device), b.to(weight.device), scale=scale
            )
        return written

    kept = [name for name in model.params if name not in adapters]
    around = model.rebind(copied, names=kept)
    return Draft(around.velocity, around.params, copied, report, refresh)


def adapter_draft(
    model: Any,
    *,
    quantize: Callable[[Tensor], Tensor] = nvfp4_fake_quantize,
    skip: Sequence[str] = (),
    min_dim: int = 0,
) -> Draft:
    """A draft whose base weights are quantised once and whose adapter is copied at every refresh, in its own precision.

    Two thin products more per adapted layer than `merged_draft`, and an adapter that no rounding of four bits can swallow;
    derived here. Arguments and errors as there; without an adapter the two are the same. No example: needs a pipeline.
    """
    copied, report = convert_linears(_module_of(model), quantize=quantize, skip=skip, min_dim=min_dim)
    around = model.rebind(copied)

    def refresh(params: Params) -> Params:
        _require_names(params, model.params)
        return params

    return Draft(around.velocity, around.params, copied, report, refresh)


# ---- parts ------------------------------------------------------------------------------------------------------------


SOME = 1024


def _writes(p: Tensor) -> int:
    """torch's count of in-place writes; tensors made in inference mode have none."""
    return 0 if p.is_inference() else p._version


def _some_values(params: Params) -> Tensor:
    """The bits of up to about a thousand numbers of every tensor, evenly spaced, on the CPU."""
    picked = [p.detach().flatten()[:: max(1, p.numel() // SOME)].double() for p in params.values()]
    return torch.cat(picked).view(torch.int64).cpu() if picked else torch.zeros(0, dtype=torch.int64)


def _module_of(model: Any) -> nn.Module:
    module = getattr(model, "module", None)
    if module is None or getattr(model, "rebind", None) is None:
        raise ValueError("a quantised draft needs a model with a module and rebind (from_pipeline makes one)")
    return module


def _adapted(module: nn.Module, params: Params) -> dict[str, tuple[Tensor, float, str]]:
    """name -> (base weight, alpha/r, adapter) of every layer with a trained low-rank adapter."""
    found: dict[str, tuple[Tensor, float, str]] = {}
    for name, layer in module.named_modules():
        for adapter, scale in getattr(layer, "scaling", {}).items():
            if f"{name}.lora_A.{adapter}.weight" in params:
                base: Any = layer.base_layer
                found[name] = (base.weight, float(scale), adapter)
    return found


def _require_merged(module: nn.Module, params: Params, layers: Mapping[str, tuple[Tensor, float, str]]) -> None:
    """ValueError where a trained factor would not reach the draft, a base layer is no plain matrix, or the module itself
    computes with other adapters than the trained one."""
    for name, (_, _, adapter) in layers.items():
        layer: Any = module.get_submodule(name)
        if layer.merged or layer.disable_adapters or list(layer.active_adapters) != [adapter]:
            state = f"active {list(layer.active_adapters)}, fused {layer.merged_adapters}, disabled {layer.disable_adapters}"
            raise ValueError(f"{name!r} does not compute with its adapter {adapter!r} alone: {state}")
    merged = {f"{name}.lora_{ab}.{layer[2]}.weight" for name, layer in layers.items() for ab in "AB"}
    odd = [n for n in params if any(part.startswith("lora_") for part in n.split(".")) and n not in merged]
    if odd or any(weight.ndim != 2 for weight, _, _ in layers.values()):
        odd += [name for name, (weight, _, _) in layers.items() if weight.ndim != 2]
        raise ValueError(f"only plain low-rank factors of linear layers can be merged; not these: {odd[:8]}")


def _require_names(params: Params, live: Params) -> None:
    if differing := sorted(set(params) ^ set(live)):
        raise ValueError(f"the draft takes the model's {len(live)} params by name; these differ: {differing[:8]}")
