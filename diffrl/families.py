"""The table of supported pipeline classes: a family is a NamedTuple of small functions, looked up by `type(pipe).__name__`.

All predict v = eps - x_0. A new family is one row and at most four functions of a few lines: packing, templates and VAE
arithmetic are the pipeline's own methods, called, never rewritten.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from diffrl.checks import require_count
from diffrl.sampling import classifier_free
from diffrl.types import Cond, Velocity

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


class Size(NamedTuple):
    """In pixels; frames is None for an image."""

    height: int
    width: int
    frames: int | None = None


class Family(NamedTuple):
    """One class of pipelines. Every function is given the pipeline, for its configs and methods.

    latent_shape: (pipe, Size) -> one sample's latent shape; ValueError for a size it cannot cut exactly.
    encode: (pipe, prompt, max_sequence_length) -> cond entries with leading axis 1, keyed by the network's own argument
        names, of one trailing shape for all prompts.
    predict: (network, pipe, Size, x, timestep " b", cond) -> v; `network` takes the transformer's keyword arguments.
    decode: (pipe, Size, latents " 1 *d") -> numpy pixels in [0, 1], (1, h, w, 3) or (1, f, h, w, 3).
    tokens: (pipe, latent shape) -> sequence length, from which schedulers with dynamic shifting take their shift.
    timestep_scale: the network reads timestep_scale * t.
    guidance: default scale. guide: (velocity, *, scale) -> velocity, for classifier-free families; None: there is none.
    twins: the cond entries that have an `uncond.` twin when guided. encode_negative: `encode` for the negative prompt,
        where it differs. guidance_unit: (pipe) -> what scale 1 is in the units of an embedded guidance, 0 where the
        network reads none.
    encode_image: (pipe, image, Size) -> further cond entries, for families that start from an image.
    targets: name endings of the layers LoRA adapts, where the module has them. longest: most text tokens accepted.
    """

    latent_shape: Callable[[Any, Size], tuple[int, ...]]
    encode: Callable[[Any, str, int], dict[str, Tensor]]
    predict: Callable[..., Tensor]
    decode: Callable[[Any, Size, Tensor], Any]
    tokens: Callable[[Any, tuple[int, ...]], int]
    timestep_scale: float
    guidance: float
    guide: Callable[..., Velocity] | None = classifier_free
    twins: tuple[str, ...] = ("encoder_hidden_states",)
    encode_negative: Callable[[Any, str, int], dict[str, Tensor]] | None = None
    guidance_unit: Callable[[Any], float] = lambda pipe: 0.0
    encode_image: Callable[[Any, Any, Size], dict[str, Tensor]] | None = None
    video: bool = False
    targets: tuple[str, ...] = ATTENTION
    longest: int | None = None


def _require_multiple(factor: int, **lengths: int) -> None:
    """Pipelines round such sizes silently, to an image of another size."""
    for name, value in lengths.items():
        if value % factor:
            raise ValueError(f"{name} must be a multiple of {factor}, got {value}")


def checked_size(family: Family, height: Any, width: Any, frames: Any) -> Size:
    """The size as counts; ValueError where one is none, or frames do not go with the family."""
    if family.video != (frames is not None):
        raise ValueError(
            f"frames must be {'given for a video' if family.video else 'None for an image'}, got {frames!r}"
        )
    frames = None if frames is None else require_count("frames", frames)
    return Size(require_count("height", height), require_count("width", width), frames)


def checked_length(pipe: Any, family: Family, length: int | None) -> int:
    """Text tokens, None meaning the pipeline's own default; ValueError above what the family accepts."""
    if length is None:
        length = inspect.signature(type(pipe).__call__).parameters["max_sequence_length"].default
    length = require_count("max_sequence_length", length)
    if family.longest is not None and length > family.longest:
        raise ValueError(f"max_sequence_length must be at most {family.longest} for this pipeline, got {length}")
    return length


def scheduler_shift(pipe: Any, tokens: int) -> float:
    """s of t <- s t / (1 + (s - 1) t) as the pipeline's scheduler applies it to a sequence of `tokens`."""
    scheduler, config = pipe.scheduler, pipe.scheduler.config
    if config.get("use_dynamic_shifting"):
        low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
        start, end = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
        mu = start + (end - start) * (tokens - low) / (high - low)
        return mu if config.get("time_shift_type") == "linear" else math.exp(mu)
    own = scheduler.shift if hasattr(type(scheduler), "shift") else config.get("shift")  # follows set_shift()
    shift = config.get("flow_shift", own)
    if shift is None:
        raise ValueError(f"{type(scheduler).__name__} has no flow shift; give shift=")
    return shift


# Stable Diffusion 3, 3.5


def _sd3_shape(pipe: Any, size: Size) -> tuple[int, ...]:
    config, factor = pipe.transformer.config, pipe.vae_scale_factor
    _require_multiple(factor * config.patch_size, height=size.height, width=size.width)
    longest = factor * config.patch_size * config.pos_embed_max_size
    if max(size.height, size.width) > longest:
        raise ValueError(f"height {size.height}, width {size.width}: this transformer has positions up to {longest}")
    return (config.in_channels, size.height // factor, size.width // factor)


def _sd3_encode(pipe: Any, prompt: str, length: int) -> dict[str, Tensor]:
    embeds, _, pooled, _ = pipe.encode_prompt(
        prompt=[prompt],
        prompt_2=None,
        prompt_3=None,
        device=pipe.text_encoder.device,
        do_classifier_free_guidance=False,
        max_sequence_length=length,
    )
    return {"encoder_hidden_states": embeds, "pooled_projections": pooled}


def _sd3_predict(network: Callable, pipe: Any, size: Size, x: Tensor, timestep: Tensor, cond: Cond) -> Tensor:
    return network(
        hidden_states=x,
        timestep=timestep,
        encoder_hidden_states=cond["encoder_hidden_states"],
        pooled_projections=cond["pooled_projections"],
        return_dict=False,
    )[0]


def _sd3_decode(pipe: Any, size: Size, latents: Tensor) -> Any:
    config = pipe.vae.config
    images = pipe.vae.decode(latents / config.scaling_factor + (config.shift_factor or 0.0), return_dict=False)[0]
    return pipe.image_processor.postprocess(images, output_type="np")


def _sd3_tokens(pipe: Any, shape: tuple[int, ...]) -> int:
    patch = pipe.transformer.config.patch_size
    return (shape[1] // patch) * (shape[2] // patch)


FAMILIES: dict[str, Family] = {
    "StableDiffusion3Pipeline": Family(
        latent_shape=_sd3_shape,
        encode=_sd3_encode,
        predict=_sd3_predict,
        decode=_sd3_decode,
        tokens=_sd3_tokens,
        timestep_scale=1000.0,
        guidance=4.5,
        twins=("encoder_hidden_states", "pooled_projections"),
        longest=512,
    ),
}
