"""What a family of pipelines is: a NamedTuple of small functions, and the few lines that several families share."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffrl.sampling import classifier_free
from diffrl.types import Velocity

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
    decode: (pipe, Size, latents " b *d") -> numpy pixels in [0, 1], (b, h, w, 3) or (b, f, h, w, 3).
    tokens: (pipe, latent shape) -> sequence length, from which schedulers with dynamic shifting take their shift.
    timestep_scale: the network reads timestep_scale * t.
    guidance: default scale. guide: (velocity, *, scale) -> velocity, for classifier-free families; None: there is none.
    twins: the cond entries that have an `uncond.` twin when guided. encode_negative: `encode` for the negative prompt,
        where it differs. needs: further entries the network cannot do without.
    guidance_unit: (pipe) -> what scale 1 is in the units of an embedded guidance, 0 where the network reads none.
    encode_image: (pipe, image, Size) -> further cond entries, for families that start from an image.
    targets: name endings of the layers LoRA adapts, where the module has them. longest: most text tokens accepted.
    check: (pipe) -> None; ValueError for a variant of the class that cannot be driven correctly.
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
    needs: tuple[str, ...] = ()
    encode_negative: Callable[[Any, str, int], dict[str, Tensor]] | None = None
    guidance_unit: Callable[[Any], float] = lambda pipe: 0.0
    encode_image: Callable[[Any, Any, Size], dict[str, Tensor]] | None = None
    video: bool = False
    targets: tuple[str, ...] = ATTENTION
    longest: int | None = None
    check: Callable[[Any], None] = lambda pipe: None


def require_multiple(factor: int, **lengths: int) -> None:
    """ValueError unless every length is a multiple: pipelines round such sizes silently, to an image of another size.

    >>> require_multiple(16, height=512, width=500)
    Traceback (most recent call last):
    ValueError: width must be a multiple of 16, got 500
    """
    for name, value in lengths.items():
        if value % factor:
            raise ValueError(f"{name} must be a multiple of {factor}, got {value}")


def call_default(pipe: Any, name: str) -> Any:
    """What `pipe(...)` uses for an argument it is not given: some defaults stand in the signature and nowhere else.

    >>> class Pipe:
    ...     def __call__(self, prompt, max_sequence_length=256): ...
    >>> call_default(Pipe(), "max_sequence_length")
    256
    """
    return inspect.signature(type(pipe).__call__).parameters[name].default


def unstandardised(pipe: Any, latents: Tensor) -> Tensor:
    """latents std + mean per channel, " b c f h w", for VAEs that keep `latents_mean` and `latents_std` and no factor.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(latents_mean=[1.0], latents_std=[2.0])
    >>> unstandardised(SimpleNamespace(vae=SimpleNamespace(config=config)), torch.full((1, 1, 1, 1, 1), 3.0)).item()
    7.0
    """
    config = pipe.vae.config
    mean, std = (torch.tensor(x).view(1, -1, 1, 1, 1).to(latents) for x in (config.latents_mean, config.latents_std))
    return latents * std + mean


def picture(image: Any) -> Any:
    """A PIL image in 8-bit RGB of a PIL image, uint8 (h, w, 3) or float (3, h, w) in [0, 1]; ValueError for anything else.

    The CLIP processor divides by 255 whatever it is given, the VAE's does not: one kind of picture for both, and for keys.

    >>> image = picture(torch.ones(3, 2, 4))
    >>> image.size, image.getpixel((0, 0))
    ((4, 2), (255, 255, 255))
    """
    import numpy as np
    from PIL import Image

    if isinstance(image, Image.Image):
        return image.convert("RGB")
    pixels = np.asarray(plain(image) if isinstance(image, Tensor) else image)
    if pixels.ndim == 3 and len(pixels) == 3 and pixels.dtype.kind == "f" and 0 <= pixels.min() <= pixels.max() <= 1:
        pixels = (255 * pixels.transpose(1, 2, 0)).round().astype(np.uint8)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        got = f"{pixels.dtype} {pixels.shape}"
        raise ValueError(f"an image must be a PIL image, uint8 (h, w, 3) or float (3, h, w) in [0, 1], got {got}")
    return Image.fromarray(pixels)


def plain(x: Tensor) -> Tensor:
    """As numpy takes it: detached, on the CPU, floats in float32.

    >>> plain(torch.ones(2, dtype=torch.bfloat16, requires_grad=True))
    tensor([1., 1.])
    """
    return x.detach().to("cpu", torch.float32 if x.is_floating_point() else x.dtype)
