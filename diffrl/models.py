"""A diffusers pipeline turned into a handful of plain functions: `from_pipeline(pipe, ...) -> Model`.

A family of pipelines is one row of `families.FAMILIES`. All predict v = eps - x_0.
diffusers and peft are imported inside the functions that need them.
"""

import contextlib
import io
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from diffrl.checks import require_count, require_number, require_same_keys, time_rows
from diffrl.encoding import Encoder, checked_folder, encode
from diffrl.families import FAMILIES, checked_guidance, checked_length, checked_size, scheduler_shift
from diffrl.family import Family, Size
from diffrl.sampling import time_grid
from diffrl.types import Cond, Params, Velocity


class Model(NamedTuple):
    """What training needs of a generative model. A toy one (a task, a test, a notebook) is the first six and no more.

    velocity: (params, x_t " b *d", t " b", cond) -> v " b *d" float32, v = eps - x_0, guidance already inside.
        `params` holding the live tensors themselves runs the module directly, with autograd; any other tensors under
        the same names are used for this one call, without gradient, and leave the module as it was.
    params: the live trainable tensors by their names in `module.named_parameters()`; float32; what the optimizer steps.
    encode: (prompts[, images]) -> cond, a dict of tensors with leading axis len(prompts).
    decode: (latents " b *d") -> UInt8 " b h w 3" (image) or " b f h w 3" (video) on the CPU. Latents that are not finite
        are decoded as black pixels: one sample that failed does not end a run.
    latent_shape: (*, height=None, width=None, frames=None) -> one sample's shape; what is not given is the model's own.
    times: (steps) -> float32 " {steps}+1", this family's grid at this size: 1 -> 0, strictly decreasing.
    module: the denoiser, in eval mode for ever.
    export: (folder, params=None) -> folder as a Path, with weights the pipeline class loads back; None: the live params.
    rebind: (other module of the same architecture) -> Model around it, with its own live params (`names=`: only these).
    """

    velocity: Velocity
    params: dict[str, Tensor]
    encode: Callable[..., dict[str, Tensor]]
    decode: Callable[[Tensor], Tensor]
    latent_shape: Callable[..., tuple[int, ...]]
    times: Callable[[int], Tensor]
    module: nn.Module | None = None
    export: Callable[..., Path] | None = None
    rebind: "Callable[..., Model] | None" = None


DECODED_TOGETHER, SMALL_PIXELS = 16, 2**15


class _Setup(NamedTuple):
    """What is fixed when a Model is made."""

    pipe: Any
    family: Family
    size: Size
    shape: tuple[int, ...]
    shift: float
    scale: float
    adapter: str | None

    @property
    def guided(self) -> bool:
        return self.family.guide is not None and self.scale > 1


def from_pipeline(
    pipe: Any,
    *,
    height: int,
    width: int,
    frames: int | None = None,
    lora: Mapping[str, Any] | str | None = {"r": 32, "lora_alpha": 64},
    guidance_scale: float | None = None,
    negative_prompt: str = "",
    max_sequence_length: int | None = None,
    shift: float | None = None,
    gradient_checkpointing: bool = False,
    embeddings: str | Path | None = None,
) -> Model:
    """A diffusers pipeline as a Model of one size. See `Model` for what each of its functions takes and returns.

    height, width, frames: pixels and frames of a sample; frames for video families only. Another size is another call
        with `lora="default"`: both models then share the live params.
    lora: `peft.LoraConfig` arguments of a new adapter "default" on the family's attention projections unless
        `target_modules` says otherwise, which starts as exactly the base model; or the name of an adapter loaded in the
        pipeline, which is trained on and becomes the only active one; or None, to train every parameter (float32).
        Factors are float32, whatever the base weights are.
    guidance_scale: None: the family's default. Classifier-free families: >= 1, and 1 is no guidance (one forward).
        Others: the number the network reads.
    negative_prompt: text of the unconditional call.
    max_sequence_length: text tokens; None: the default of the pipeline's own call.
    shift: of the time grid, > 0; None: the scheduler's, at this size.
    gradient_checkpointing: switched on for the module, or off with a new adapter.
    embeddings: a folder in which what `encode` computes is kept from run to run, by content; None: in memory only.

    Afterwards everything in the pipeline is in eval mode and only `params` require grad. ValueError, with nothing
    changed: an unsupported pipeline class or variant of it; a size that cannot be cut exactly; frames missing or not wanted; a number out
    of range; dropout, or target_modules that match nothing; an adapter that is not loaded, that is fused or weighted; a
    mapping or None where there is an adapter already; None with weights that are not float32.
    No example: needs a pipeline.
    """
    family = FAMILIES.get(type(pipe).__name__)
    if family is None:
        raise ValueError(f"{type(pipe).__name__} is not supported; supported pipelines: {sorted(FAMILIES)}")
    family.check(pipe)
    size = checked_size(family, height, width, frames)
    shape = family.latent_shape(pipe, size)
    scale = checked_guidance(pipe, family, guidance_scale)
    if not isinstance(negative_prompt, str):
        raise ValueError(f"negative_prompt must be a str, got {negative_prompt!r}")
    if shift is None:
        shift = scheduler_shift(pipe, family.tokens(pipe, shape))
    shift = require_number("shift", shift, low=0.0, open_low=True)
    length = checked_length(pipe, family, max_sequence_length)
    folder = checked_folder(embeddings)
    if gradient_checkpointing and not getattr(pipe.transformer, "_supports_gradient_checkpointing", False):
        raise ValueError(f"{type(pipe.transformer).__name__} does not support gradient checkpointing")
    with _quiet():
        adapter, config = _checked_lora(pipe.transformer, family, lora)
        # Nothing above this line has changed anything; nothing below it refuses.
        names = _prepare(pipe, adapter, config, gradient_checkpointing)
    setup = _Setup(pipe, family, size, shape, shift, scale, adapter)
    encoder = Encoder.of(pipe, family, size, scale, setup.guided, negative_prompt, length, folder)
    shared: dict[str, Callable] = {
        "encode": partial(encode, encoder),
        "decode": partial(_decode, setup),
        "latent_shape": partial(_latent_shape, setup),
        "times": partial(_times, setup),
    }
    return _around(setup, names, shared, pipe.transformer)


def _around(setup: _Setup, names: Sequence[str], shared: dict[str, Callable], module: Any) -> Model:
    """The Model whose live params are those of `module`; everything but velocity, params and export is shared."""
    # A quantised copy may hold a weight as a buffer: it is found and swapped under its name all the same.
    held = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    if absent := [n for n in names if n not in held]:
        raise ValueError(f"{type(module).__name__} lacks {len(absent)} of {len(names)} trainable tensors: {absent[:8]}")
    live = {n: held[n] for n in names}
    return Model(
        velocity=_velocity(setup, module, live),
        params=dict(live),
        module=module,
        export=partial(_export, setup, module, live),
        rebind=partial(_rebind, setup, live, shared),
        **shared,
    )


def _rebind(
    setup: _Setup, params: Params, shared: dict[str, Callable], module: Any, names: Sequence[str] | None = None
) -> Model:
    """Model around another module of the same architecture; ValueError where names or shapes differ."""
    names = list(params if names is None else names)
    model = _around(setup, names, shared, module)
    require_same_keys(params={name: params[name] for name in names}, module=model.params)
    module.eval()
    for name, tensor in module.named_parameters():
        if name not in params:
            tensor.requires_grad_(False)
    return model


def _velocity(setup: _Setup, module: Any, live: Params) -> Velocity:
    """The velocity of `module`, guided where the model is; which of the two ways is decided by identity, see `Model`."""
    family = setup.family
    keys = [*family.needs, *family.twins, *(f"uncond.{name}" for name in family.twins if setup.guided)]
    keys += ["guidance"] if family.guidance_unit(setup.pipe) else []

    def swapped(values: Params, **inputs: Any) -> Any:
        return torch.func.functional_call(module, dict(values), (), inputs)

    def once(params: Params, x_t: Tensor, t: Tensor, cond: Cond) -> Tensor:
        # float32 up to the network, which casts its sinusoids itself: in bf16 neighbouring times would coincide
        timestep = family.timestep_scale * t
        device, dtype = _place(module, live)
        x = x_t.to(device, dtype)
        cond = {name: value.to(device) for name, value in cond.items()}
        predict = partial(family.predict, pipe=setup.pipe, size=setup.size, x=x, timestep=timestep, cond=cond)
        if all(params[name] is live[name] for name in live):
            v = predict(module)
        else:
            # A checkpointed forward is recomputed in backward, when these values are gone: hence never with a graph.
            with torch.no_grad():
                v = predict(partial(swapped, {name: params[name].to(live[name]) for name in live}))
        if v.shape != x_t.shape:
            raise ValueError(f"{type(module).__name__} returned {tuple(v.shape)} for latents {tuple(x_t.shape)}")
        return v.to(x_t.device, torch.float32)

    guided = family.guide(once, scale=setup.scale) if family.guide is not None and setup.guided else once

    def velocity(params: Params, x_t: Float[Tensor, "..."], t: Any, cond: Cond) -> Float[Tensor, " b *d"]:
        _require_latents(setup, x_t=x_t)
        require_same_keys(params=params, module=live)
        if absent := [name for name in keys if name not in cond]:  # without its twins a guided call would not be guided
            raise ValueError(f"cond lacks {absent}; it has {sorted(cond)}")
        for name, value in cond.items():
            if value.ndim == 0 or len(value) != len(x_t):
                raise ValueError(f"cond[{name!r}] must have leading axis {len(x_t)}, got {tuple(value.shape)}")
        if module.training:  # somebody's habitual .train(): dropout would make rollout and training two policies
            module.eval()
        if not setup.guided:  # twins of a guided model's cond mean nothing to this one
            cond = {name: value for name, value in cond.items() if not name.startswith("uncond.")}
        device, _ = _place(module, live)
        t = time_rows("t", t, torch.empty(len(x_t), device=device, dtype=torch.float32))
        return guided(params, x_t, t, cond)

    return velocity


def _place(module: nn.Module, live: Params) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of the first tensor that is not trained, i.e. of the base weights (diffusers' own look-ups walk
    the whole module, which a small model's every call would feel); Wan keeps some in float32 beside a bf16 rest."""
    kept = getattr(module, "_keep_in_fp32_modules", None) or ()
    base = (p for n, p in module.named_parameters() if n not in live and not any(part in n for part in kept))
    first = next((p for p in base if p.is_floating_point()), None)
    first = next(iter(module.parameters())) if first is None else first
    return first.device, first.dtype


def _require_latents(setup: _Setup, **latents: Tensor) -> None:
    for name, x in latents.items():
        if x.ndim == 0 or tuple(x.shape[1:]) != setup.shape:
            raise ValueError(f"{name} must be (b, {', '.join(map(str, setup.shape))}), got {tuple(x.shape)}")


# decode, size, grid


def _decode(setup: _Setup, latents: Float[Tensor, "..."]) -> UInt8[Tensor, " b *pixels"]:
    """round(255 clamp(x/2 + 1/2)) of the VAE's output: the pixels of the pipeline's PIL images.

    One sample at a time; pictures below 128 x 256 pixels in padded calls of one fixed size, where convolutions of a
    single small picture would take several times as long. Either way a row does not depend on its neighbours.
    latents " b *d" -> UInt8 " b h w 3" or " b f h w 3" on the CPU; the VAE may lie on any device. A sample whose
    latents are not finite is black, and so is a pixel the VAE makes nan. ValueError: latents of another shape.
    """
    _require_latents(setup, latents=latents)
    vae, size = setup.pipe.vae, setup.size
    frames = () if size.frames is None else (size.frames,)
    out = torch.zeros(len(latents), *frames, size.height, size.width, 3, dtype=torch.uint8)
    rows = torch.isfinite(latents.detach()).flatten(1).all(1).nonzero().flatten()
    together = max(1, min(DECODED_TOGETHER, SMALL_PIXELS // (size.height * size.width * (size.frames or 1))))
    for part in rows.split(together) if len(rows) else ():
        padded = torch.cat([part, part[-1:].expand(together - len(part))])
        with torch.no_grad():
            pixels = setup.family.decode(setup.pipe, size, latents[padded].to(vae.device, vae.dtype))[: len(part)]
        pixels = torch.as_tensor(pixels).float().nan_to_num(0.0, 0.0, 0.0).clamp(0, 1)
        out[part.cpu()] = (255 * pixels).round().to(torch.uint8)
    return out


def _latent_shape(setup: _Setup, *, height: int | None = None, width: int | None = None, frames: int | None = None):
    """One sample's latent shape at a size in pixels; what is None is the model's own. ValueError as `from_pipeline`."""
    asked = (height, width, frames)
    size = checked_size(setup.family, *(own if n is None else n for n, own in zip(asked, setup.size)))
    return setup.family.latent_shape(setup.pipe, size)


def _times(setup: _Setup, steps: int) -> Float[Tensor, " {steps}+1"]:
    """1, 1 - 1/n, ..., 1/n warped once by the model's shift, then 0. Where the scheduler has a `shift_terminal` the times
    above 0 are stretched to end there, as it does. ValueError: steps < 1."""
    times = time_grid(steps, shift=setup.shift, dtype=torch.float64)
    last = setup.pipe.scheduler.config.get("shift_terminal")
    if last and steps > 1:  # a single time is 1, and has no tail to stretch
        times[:-1] = 1 - (1 - times[:-1]) * (1 - last) / (1 - times[-2])
    return times.float()


# export


def _export(setup: _Setup, module: Any, live: Params, folder: str | Path, params: Params | None = None) -> Path:
    """Writes what the pipeline class loads back to the same outputs, and returns `folder` as a Path.

    LoRA: `pytorch_lora_weights.safetensors` with the adapter's configuration, for `pipe.load_lora_weights(folder)`; a
    pipeline in bf16 rounds the factors when it loads them. All parameters: `folder/transformer`, for `from_pretrained`.
    params: None, the live ones. ValueError: names or shapes that differ; a folder that is a file.
    """
    folder, params = Path(folder), live if params is None else params
    require_same_keys(params=params, module=live)
    if folder.is_file():
        raise ValueError(f"{folder} is a file, not a folder")
    with _quiet():
        if setup.adapter is None:
            values = {f"module.{name}": params[name].detach().to(live[name]) for name in live}
            torch.func.functional_call(_Saver(module), values, (folder / "transformer",))
            return folder
        from peft import get_peft_model_state_dict

        values = {name: x.detach().cpu().contiguous().clone() for name, x in params.items()}
        type(setup.pipe).save_lora_weights(
            folder,
            # drops the adapter's name: the loading pipeline chooses its own
            transformer_lora_layers=get_peft_model_state_dict(
                module, state_dict=values, adapter_name=setup.adapter, save_embedding_layers=False
            ),
            # without it alpha is lost: the file loads, and is wrong
            transformer_lora_adapter_metadata=module.peft_config[setup.adapter].to_dict(),
        )
    return folder


class _Saver(nn.Module):
    """`save_pretrained` as a forward pass, so that other params can be saved without a second copy of the model."""

    def __init__(self, module: Any):
        super().__init__()
        self.module = module

    def forward(self, folder: Path) -> None:
        self.module.save_pretrained(folder)  # pyright: ignore[reportCallIssue]


# checks, then preparation


def _checked_lora(module: Any, family: Family, lora: Mapping[str, Any] | str | None) -> tuple[str | None, Any]:
    """(name of the adapter to train or None, its LoraConfig if it is to be added); refuses, changes nothing."""
    loaded = sorted(getattr(module, "peft_config", None) or {})
    if isinstance(lora, str):
        _require_trainable(module, lora, loaded)
        return lora, None
    if loaded:
        raise ValueError(
            f"the transformer has adapters {loaded}: train one on by lora={loaded[0]!r}, or unload it first"
        )
    if lora is None:
        if other := [f"{n} {p.dtype}" for n, p in module.named_parameters() if p.dtype != torch.float32]:
            raise ValueError(f"lora=None trains every parameter, in float32; {len(other)} are not: {other[:4]}")
        return None, None
    if not isinstance(lora, Mapping):
        raise ValueError(
            f"lora must be a mapping of peft.LoraConfig arguments, an adapter's name or None, got {lora!r}"
        )
    from peft import LoraConfig

    names = [name for name, _ in module.named_modules()]
    default = [target for target in family.targets if any(name.endswith(f".{target}") for name in names)]
    config = LoraConfig(**{"init_lora_weights": "gaussian", "target_modules": default, **lora})
    _require_plain(config)
    _require_targets(module, config)
    return "default", config


def _require_plain(config: Any) -> None:
    """Low-rank factors and nothing else, which start as the base model and end in one file of factors."""
    for name in (
        "lora_dropout",
        "bias",
        "modules_to_save",
        "target_parameters",
        "layer_replication",
        "trainable_token_indices",
    ):
        if (value := getattr(config, name, None)) not in (None, 0, "none", [], False):
            raise ValueError(f"lora has {name}={value!r}: only low-rank factors are trained, without dropout")
    if config.init_lora_weights not in ("gaussian", True, False):
        raise ValueError(f"init_lora_weights={config.init_lora_weights!r} changes the base weights: not supported")
    for rank in (config.r, *(config.rank_pattern or {}).values()):
        require_count("lora rank r", rank)
    require_number("lora_alpha", config.lora_alpha, low=0, open_low=True)  # 0 would train nothing, and say nothing


def _require_targets(module: nn.Module, config: Any) -> None:
    from peft.tuners.tuners_utils import check_target_module_exists

    hit = {name: m for name, m in module.named_modules() if name and check_target_module_exists(config, name)}
    targets = config.target_modules
    # a name that no longer exists would train less than was asked for, and say nothing
    unmet = [targets] if isinstance(targets, str) and not hit else []
    if not isinstance(targets, str):
        unmet = [t for t in sorted(targets or []) if not any(n == t or n.endswith(f".{t}") for n in hit)]
    if unmet or not hit:
        raise ValueError(f"target_modules {unmet or targets} match nothing in {type(module).__name__}")
    layers = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    if wrong := [f"{name} ({type(m).__name__})" for name, m in hit.items() if not isinstance(m, layers)]:
        raise ValueError(f"target_modules match layers that LoRA cannot adapt: {wrong[:4]}")


def _require_trainable(module: Any, adapter: str, loaded: Sequence[str]) -> None:
    if adapter not in loaded:
        raise ValueError(f"no adapter {adapter!r} in the transformer; loaded: {loaded}")
    if not _factor_names(module, adapter):
        raise ValueError(f"adapter {adapter!r} has no LoRA factors in {type(module).__name__}")
    from peft.tuners.lora import LoraLayer

    for name, layer in module.named_modules():
        if not isinstance(layer, LoraLayer) or adapter not in layer.scaling:
            continue
        if layer.merged_adapters:  # a layer with any fused adapter skips them all
            raise ValueError(
                f"{layer.merged_adapters} are fused into {name}: unfuse them, or {adapter!r} learns nothing"
            )
        rank = layer.r[adapter]
        plain = layer.lora_alpha[adapter] / (math.sqrt(rank) if layer.use_rslora.get(adapter) else rank)
        if not math.isclose(layer.scaling[adapter], plain):
            weight = layer.scaling[adapter] / plain
            raise ValueError(f"adapter {adapter!r} has weight {weight:g}, which no export keeps: set it to 1")


def _factor_names(module: nn.Module, adapter: str) -> list[str]:
    """By the adapter's name: `requires_grad` is flipped by every `set_adapter`, a prefix meets its neighbours."""

    def belongs(name: str) -> bool:
        parts = name.split(".")
        return any(part.startswith("lora_") and key == adapter for part, key in itertools.pairwise(parts))

    return [name for name, _ in module.named_parameters() if belongs(name)]


def _prepare(pipe: Any, adapter: str | None, config: Any, checkpointing: bool) -> list[str]:
    """Adds or activates the adapter, freezes everything else, and returns the names of what is trained."""
    module = pipe.transformer
    if config is not None:
        module.add_adapter(config, adapter)
    elif adapter is not None:
        module.enable_adapters()
        module.set_adapter(adapter)
    for part in pipe.components.values():
        if isinstance(part, nn.Module):  # built from a configuration they start in train mode, with T5's dropout
            part.requires_grad_(False).eval()
    named = dict(module.named_parameters())
    names = list(named) if adapter is None else _factor_names(module, adapter)
    for name in names:
        if named[name].dtype != torch.float32:
            named[name].data = named[name].data.float()  # in bf16 an update below 1/256 of a weight is lost
        named[name].requires_grad_(True)
    if checkpointing:
        module.enable_gradient_checkpointing()
    elif config is not None and getattr(
        module, "is_gradient_checkpointing", False
    ):  # else another Model may count on it
        module.disable_gradient_checkpointing()
    return names


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences what importing and calling peft prints: notes on optional packages, none about the work done here."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
