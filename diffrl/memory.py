"""Bytes before a run: what its tensors will take, by formula, from a pipeline whose weights need not be loaded.

    base weights    sum over parameters and buffers of numel x bytes of their dtype
    LoRA            r (in + out) numbers per adapted layer, float32
    per trained number: 4 bytes itself, 4 gradient, 8 Adam's two moments, 4 per copy (behaviour, reference)
    trajectory      float32: b numel (1 + 3 s) for x_0 and x_t, x_next, v at s kept steps, and a few numbers per state

Activations are not predicted: they depend on kernels, chunks and checkpointing. What is left is theirs.
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from diffrl.checks import require_count, require_number
from diffrl.encoding import TEXT_ENCODERS
from diffrl.families import FAMILIES, checked_size
from diffrl.family import ATTENTION

FLOAT32 = 4
LIBRARIES = ("diffusers", "transformers")


class Memory(NamedTuple):
    """One line of a plan: what, how many bytes, whether on the device that trains."""

    name: str
    bytes: int
    on_device: bool = True


def module_bytes(module: nn.Module, *, dtype: torch.dtype | None = None) -> int:
    """Bytes of a module's parameters and buffers once its floating tensors are in `dtype` (None: as they are), but for
    those that its class keeps in float32: diffusers' `_keep_in_fp32_modules`, of transformers in bfloat16 the `..._strict` ones
    alone. Tensors may be on the meta device.

    >>> module_bytes(nn.Linear(3, 2), dtype=torch.bfloat16)
    16
    """
    strict = type(module).__module__.startswith("transformers.") and dtype == torch.bfloat16
    kept = getattr(module, f"_keep_in_fp32_modules{'_strict' * strict}", None) or ()
    total = 0
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        size = x.element_size()
        if dtype is not None and x.is_floating_point():
            size = FLOAT32 if any(part in name.split(".") for part in kept) else dtype.itemsize
        total += x.numel() * size
    return total


def lora_numbers(module: nn.Module, *, rank: int, targets: Iterable[str] = ATTENTION) -> int:
    """r (in + out), summed over the linear layers whose names end in one of the targets (2106.09685, section 4.1):
    the trained numbers of a LoRA of this rank. ValueError: rank < 1; targets that match nothing.

    >>> lora_numbers(nn.ModuleDict({"to_q": nn.Linear(3, 5)}), rank=2)
    16
    """
    rank, targets = require_count("rank", rank), tuple(targets)
    layers = [
        m
        for name, m in module.named_modules()
        if isinstance(m, nn.Linear) and any(name == t or name.endswith(f".{t}") for t in targets)
    ]
    if not layers:
        raise ValueError(f"targets {targets} match no linear layer of {type(module).__name__}")
    return rank * sum(m.in_features + m.out_features for m in layers)


def training_memory(numbers: int, *, copies: int = 1) -> list[Memory]:
    """What float32 training of so many numbers takes with Adam: themselves, gradients, two moments, and `copies` more of
    them (behaviour policy, reference, an average). ValueError: a negative count.

    >>> sum(line.bytes for line in training_memory(10**9)) / 1e9  # GB
    20.0
    """
    n = FLOAT32 * require_count("numbers", numbers, low=0)
    copies = require_count("copies", copies, low=0)
    return [
        Memory("trained tensors", n),
        Memory("gradients", n),
        Memory("Adam moments", 2 * n),
        Memory("copies of the policy", copies * n),
    ]


def trajectory_bytes(shape: Sequence[int], *, samples: int, kept: int) -> int:
    """A `types.Trajectory` of `samples` rows with `kept` steps: x_0; x_t, x_next, v per kept step; std and log_prob per
    state, t and t_next per step in float32; seeds in int64. ValueError: a count below 1.

    >>> trajectory_bytes((16, 64, 64), samples=1, kept=1) / 4 // (16 * 64 * 64)
    4.0
    """
    b, s = require_count("samples", samples), require_count("kept", kept)
    numel = math.prod(require_count("shape", n) for n in shape)
    return FLOAT32 * (b * numel * (1 + 3 * s) + 2 * b * s + 2 * s) + 8 * b


def plan(
    pipe: Any,
    *,
    height: int,
    width: int,
    frames: int | None = None,
    rank: int | None = 32,
    samples: int = 1,
    kept: int = 1,
    copies: int = 1,
    dtype: torch.dtype | None = torch.bfloat16,
    encoders_on_device: bool = True,
    vae_on_device: bool = True,
) -> list[Memory]:
    """The lines of a run's memory, base weights first. The pipeline may be an `empty_pipeline`.

    height, width, frames: of a sample. rank: of the LoRA; None: all parameters are trained, in float32. samples, kept:
    rows of a rollout and steps kept of it; the start noise is one more latent per row. copies: of the policy beside the
    live one. dtype: of weights that are not trained; None: as they are. encoders_on_device, vae_on_device: False where
    they are moved away after `encode`, between decodes. ValueError: an unsupported pipeline or size, counts below 1.
    No example: needs a pipeline.
    """
    family = FAMILIES.get(type(pipe).__name__)
    if family is None:
        raise ValueError(f"{type(pipe).__name__} is not supported; supported pipelines: {sorted(FAMILIES)}")
    family.check(pipe)
    shape = family.latent_shape(pipe, checked_size(family, height, width, frames))
    lines = []
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module) and not (name == "transformer" and rank is None):
            there = vae_on_device if name == "vae" else encoders_on_device or "encoder" not in name
            lines.append(Memory(name, module_bytes(part, dtype=dtype), there))
    module = pipe.transformer
    targets = [t for t in family.targets if any(name.endswith(f".{t}") for name, _ in module.named_modules())]
    full = sum(p.numel() for p in module.parameters())
    numbers = full if rank is None else lora_numbers(module, rank=rank, targets=targets)
    lines += training_memory(numbers, copies=copies)
    noise = FLOAT32 * samples * math.prod(shape)
    return [*lines, Memory("trajectory", trajectory_bytes(shape, samples=samples, kept=kept) + noise)]


def plan_text(lines: Sequence[Memory], *, gpu_memory: float | None = None) -> str:
    """The plan as a table in GB (10^9 bytes), its sum on the device, and what of `gpu_memory` GB is left for
    activations. ValueError: gpu_memory <= 0.

    >>> print(plan_text([Memory("trained tensors", 2 * 10**9)], gpu_memory=3))
    trained tensors      2.000 GB
    on the device        2.000 GB, without activations
    of 3 GB              1.000 GB left for activations
    """
    width = max(len(line.name) for line in lines)
    rows = [
        f"{line.name:<{width}}  {line.bytes / 1e9:9.3f} GB{'' if line.on_device else '  (off the device)'}"
        for line in lines
    ]
    total = sum(line.bytes for line in lines if line.on_device) / 1e9
    rows.append(f"{'on the device':<{width}}  {total:9.3f} GB, without activations")
    if gpu_memory is not None:
        left = require_number("gpu_memory", gpu_memory, low=0, open_low=True) - total
        fits = "left for activations" if left > 0 else "too much, before any activation"
        rows.append(f"{f'of {gpu_memory:g} GB':<{width}}  {abs(left):9.3f} GB {fits}")
    return "\n".join(rows)


def encoders_off(
    model: Any, pipe: Any, prompts: Sequence[str], images: Sequence[Any] | None = None, *, to: Any = "cpu"
) -> None:
    """Encode every prompt (and image) of a run once, which `model.encode` remembers, then move the text and image encoders off the
    device. A prompt that is new later is encoded where they are then: correct, and slow. ValueError: as `model.encode`.

    No example: needs a pipeline.
    """
    for i, prompt in enumerate(prompts):
        model.encode([prompt]) if images is None else model.encode([prompt], [images[i]])
    for name in (*TEXT_ENCODERS, "image_encoder"):
        if isinstance(part := getattr(pipe, name, None), nn.Module):
            part.to(to)


def vae_off(model: Any, pipe: Any, *, device: Any, to: Any = "cpu") -> Any:
    """The same Model, whose VAE is on `device` while `decode` runs, a failing one too, and on `to` between decodes.

    No example: needs a pipeline.
    """
    vae, decode = pipe.vae, model.decode

    def from_afar(latents: torch.Tensor) -> torch.Tensor:
        vae.to(device)
        try:
            return decode(latents)
        finally:
            vae.to(to)

    vae.to(to)
    return model._replace(decode=from_afar)


def empty_pipeline(folder: str | Path) -> Any:
    """The pipeline saved in a folder, from its configurations alone: modules on the meta device, no weight is read, no
    tokenizer or processor made. ValueError: no such pipeline, one that is not supported, a part of another library.
    No example: needs a pipeline's folder."""
    import diffusers

    path = Path(folder) / "model_index.json"
    if not path.is_file():
        raise ValueError(f"no pipeline in {str(folder)!r}: {path} is not a file")
    index = json.loads(path.read_text())
    kind = index.get("_class_name")
    if kind not in FAMILIES:
        raise ValueError(f"{kind} is not supported; supported pipelines: {sorted(FAMILIES)}")
    parts: dict[str, Any] = {name: value for name, value in index.items() if not name.startswith("_")}
    for name, value in parts.items():
        if isinstance(value, list):
            parts[name] = None if value[0] is None else _empty_part(Path(folder) / name, *value)
    return getattr(diffusers, kind)(**parts)


def _empty_part(folder: Path, library: str, kind: str) -> Any:
    import importlib

    if library not in LIBRARIES:
        raise ValueError(f"{folder.name} is {library}.{kind}: only parts of {' and '.join(LIBRARIES)} can be planned")
    maker = getattr(importlib.import_module(library), kind, None)
    if maker is None:
        raise ValueError(f"{folder.name} is {kind}, which the installed {library} does not have")
    if hasattr(maker, "set_timesteps"):
        return maker.from_pretrained(folder)
    if not (folder / "config.json").is_file():
        return None  # a tokenizer or a processor
    with torch.device("meta"):
        if library == "diffusers":
            return maker.from_config(maker.load_config(folder))
        return maker(maker.config_class.from_pretrained(folder))
