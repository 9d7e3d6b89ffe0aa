"""The table of supported pipeline classes: a family is a NamedTuple of small functions, looked up by `type(pipe).__name__`.

All predict v = eps - x_0. A new family is one row and at most four functions of a few lines (in `families_image` or
`families_video`): packing, templates and VAE arithmetic are the pipeline's own methods, called, never rewritten.
"""

import math
from typing import Any

from diffrl.checks import require_count, require_number
from diffrl.families_image import IMAGES
from diffrl.families_video import VIDEOS
from diffrl.family import Family, Size, call_default

FAMILIES: dict[str, Family] = {**IMAGES, **VIDEOS}


def checked_size(family: Family, height: Any, width: Any, frames: Any) -> Size:
    """The size as counts; ValueError where one is none, or frames do not go with the family.

    >>> checked_size(FAMILIES["StableDiffusion3Pipeline"], 64, 32, None)
    Size(height=64, width=32, frames=None)
    """
    if family.video != (frames is not None):
        raise ValueError(
            f"frames must be {'given for a video' if family.video else 'None for an image'}, got {frames!r}"
        )
    frames = None if frames is None else require_count("frames", frames)
    return Size(require_count("height", height), require_count("width", width), frames)


def checked_length(pipe: Any, family: Family, length: int | None) -> int:
    """Text tokens, None meaning the pipeline's own default; ValueError above what the family accepts.

    >>> checked_length(None, FAMILIES["StableDiffusion3Pipeline"], 77)
    77
    """
    if length is None:
        length = call_default(pipe, "max_sequence_length")
    length = require_count("max_sequence_length", length)
    if family.longest is not None and length > family.longest:
        raise ValueError(f"max_sequence_length must be at most {family.longest} for this pipeline, got {length}")
    return length


def checked_guidance(pipe: Any, family: Family, scale: float | None) -> float:
    """The guidance scale, None meaning the family's default; ValueError below 1 (classifier-free) or 0 (embedded), and
    where it is given to a network that reads none (FLUX.1-schnell).

    >>> checked_guidance(None, FAMILIES["StableDiffusion3Pipeline"], 1)
    1.0
    """
    if family.guide is not None:
        return require_number("guidance_scale", family.guidance if scale is None else scale, low=1.0)
    if not family.guidance_unit(pipe):
        if scale:
            raise ValueError(f"guidance_scale={scale}: this {type(pipe.transformer).__name__} reads no guidance")
        return 0.0
    return require_number("guidance_scale", family.guidance if scale is None else scale, low=0.0)


def scheduler_shift(pipe: Any, tokens: int) -> float:
    """s of t <- s t / (1 + (s - 1) t) as the pipeline's scheduler applies it to a sequence of `tokens`.

    >>> from types import SimpleNamespace
    >>> pipe = SimpleNamespace(scheduler=SimpleNamespace(config={"use_dynamic_shifting": True}))
    >>> round(scheduler_shift(pipe, 256), 4), round(scheduler_shift(pipe, 4096), 4)  # exp(.5), exp(1.15)
    (1.6487, 3.1582)
    """
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
