"""The digits task: a tiny Stable Diffusion 3 pipeline that is asked for a two-digit number and half the time draws it.

Everything is small enough for two CPU cores and nothing is a mock-up: the pipeline is a `StableDiffusion3Pipeline`
with a transformer, two CLIP text encoders and a VAE, and the reward is an OCR engine that reads the picture
(`diffrl.rewards.ocr`).

A picture has HEIGHT x WIDTH pixels, black digits on white. The VAE halves it twice and the transformer takes 2 x 2
patches: 12 image tokens. The proportions are those of the OCR engine's input (48 x 64), so a picture is enlarged
exactly twofold before it is read.
"""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HEIGHT = 24
"""Pixels per column of a picture."""
WIDTH = 32
"""Pixels per row of a picture."""
MAX_SEQUENCE_LENGTH = 1
"""Length of the zeros that stand in for the absent T5 encoder: every text token costs compute, so as few as there
can be.
"""
STEPS = 8
"""Sampling steps: Euler, on the plain time grid with the shift of the pipeline's scheduler."""
FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSerif-Bold", "cmss10")
"""Fonts of the training pictures, from matplotlib's wheel; the OCR engine reads each of them (tests/test_digits.py)."""
SIZES = (18, 19, 20)
"""Font sizes of the training pictures, in pixels per em."""
OFFSETS = (-1, 0, 1)
"""Offsets of the training pictures from the centre, in pixels, on either axis."""

_FOLDER = Path(__file__).parent / "digits_sd3"
_HINT = "the digits task needs {}: pip install 'diffrl[demo]'"


def numbers() -> list[str]:
    """The hundred two-digit numbers "00", "01", ..., "99".

    >>> numbers()[7]
    '07'
    """
    return [f"{i:02d}" for i in range(100)]


def prompts() -> list[str]:
    """The hundred prompts `the number "00"` ... `the number "99"`: the quoted part is what the OCR reward looks for.

    >>> prompts()[7]
    'the number "07"'
    """
    return [f'the number "{text}"' for text in numbers()]


@lru_cache(maxsize=64)
def _font(name: str, size: int):
    try:
        import matplotlib
        from PIL import ImageFont
    except ImportError as error:
        raise ImportError(_HINT.format("pillow and matplotlib (for its fonts)")) from error
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf"
    if not path.is_file():
        raise ValueError(f"font={name!r} is not one of matplotlib's fonts ({path.parent})")
    return ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)


def render(text: str, *, font: str = FONTS[0], size: int = SIZES[-1], offset: tuple[int, int] = (0, 0)) -> Tensor:
    """Draw `text` in black on white, its bounding box in the centre of the picture.

    Args:
        text: what to draw, not empty; it must fit into the picture.
        font: file name without ending of a font in matplotlib's wheel.
        size: pixels per em, > 0.
        offset: (down, right) in pixels, from the centre.

    Returns:
        UInt8 " h w 3" with h = HEIGHT, w = WIDTH.

    Raises:
        ValueError: empty text, unknown font, size <= 0, or ink that would fall outside the picture.
        ImportError: Pillow or matplotlib is missing.

    No example: draws with matplotlib's fonts.
    """
    if not text or size <= 0:
        raise ValueError(f"render needs some text and a positive size, got text={text!r}, size={size}")
    face = _font(font, size)
    from PIL import Image, ImageDraw

    left, top, right, bottom = face.getbbox(text)
    down, across = offset
    y = (HEIGHT - (bottom - top)) // 2 + down
    x = (WIDTH - (right - left)) // 2 + across
    if y < 0 or x < 0 or y + bottom - top > HEIGHT or x + right - left > WIDTH:
        raise ValueError(
            f"text={text!r} in font={font!r}, size={size}, offset={offset} has a box of {bottom - top} x {right - left}"
            f" pixels at row {y}, column {x}: outside the picture of {HEIGHT} x {WIDTH}"
        )
    image = Image.new("L", (WIDTH, HEIGHT), 255)
    ImageDraw.Draw(image).text((x - left, y - top), text, font=face, fill=0)
    return torch.from_numpy(np.array(image)).unsqueeze(-1).repeat(1, 1, 3)


def training_pictures(font: str | None = None) -> tuple[Tensor, list[str]]:
    """Every training picture: numbers x fonts x sizes x offsets, in this order (the last varies fastest).

    Args:
        font: only the pictures in this font; None: all of FONTS.

    Returns:
        (images UInt8 " b h w 3", the number in each, b strings).

    No example: draws all of them.
    """
    images, texts = [], []
    for text in numbers():
        for name in FONTS if font is None else (font,):
            for size in SIZES:
                for down in OFFSETS:
                    for across in OFFSETS:
                        images.append(render(text, font=name, size=size, offset=(down, across)))
                        texts.append(text)
    return torch.stack(images), texts


@contextmanager
def quiet():
    """Loading and saving a pipeline without progress bars and advice; the settings are put back afterwards.

    No example: imports diffusers, which takes seconds.
    """
    try:
        import diffusers
        import transformers
    except ImportError as error:
        raise ImportError(_HINT.format("diffusers and transformers")) from error
    pairs = [diffusers.utils.logging, transformers.utils.logging]
    levels = [module.get_verbosity() for module in pairs]
    bars = [module.is_progress_bar_enabled() for module in pairs]
    for module in pairs:
        module.set_verbosity(logging.CRITICAL)
        module.disable_progress_bar()
    try:
        yield
    finally:
        for module, level, bar in zip(pairs, levels, bars, strict=True):
            module.set_verbosity(level)
            if bar:
                module.enable_progress_bar()


def load_pipeline(path: str | Path | None = None):
    """The tiny `StableDiffusion3Pipeline`, float32 on the CPU, without a progress bar; nothing is downloaded.

    Args:
        path: a folder written by `save_pretrained`; None: the model shipped with diffrl.

    Raises:
        ValueError: `path` is not a folder with a `model_index.json`.
        ImportError: diffusers or transformers is missing.

    No example: imports diffusers, which takes seconds.
    """
    folder = _FOLDER if path is None else Path(path)
    if not (folder / "model_index.json").is_file():
        raise ValueError(f"path={str(folder)!r} has no model_index.json: not a saved pipeline")
    with quiet():
        from diffusers import StableDiffusion3Pipeline

        pipe = StableDiffusion3Pipeline.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            text_encoder_3=None,
            tokenizer_3=None,
        )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pipeline_options() -> dict:
    """Keyword arguments of `diffrl.models.from_pipeline` that fit this pipeline: its size, no guidance, no T5
    tokens to speak of.

    >>> pipeline_options()["guidance_scale"]
    1.0
    """
    return {"height": HEIGHT, "width": WIDTH, "guidance_scale": 1.0, "max_sequence_length": MAX_SEQUENCE_LENGTH}


def generate(pipe, prompts: Sequence[str], *, seeds: Sequence[int], steps: int = STEPS) -> Tensor:
    """Pictures by the pipeline itself: Euler steps on the plain grid t_i = s u / (1 + (s - 1) u), u = 1 - i/n, s the
    scheduler's shift.

    Args:
        pipe: a pipeline of `load_pipeline`.
        prompts: b prompts.
        seeds: b seeds; the noise of row i comes from seeds[i] alone.
        steps: n >= 1.

    Returns:
        UInt8 " b h w 3" with h = HEIGHT, w = WIDTH.

    Raises:
        ValueError: not one seed per prompt, or steps < 1.

    No example: needs a pipeline.
    """
    if len(prompts) != len(seeds) or isinstance(prompts, str) or steps < 1:
        raise ValueError(
            f"generate needs one seed per prompt and steps >= 1, got {len(prompts)} prompts, {len(seeds)} seeds,"
            f" steps={steps}"
        )
    channels, scale = pipe.transformer.config.in_channels, pipe.vae_scale_factor
    shape = (1, channels, HEIGHT // scale, WIDTH // scale)
    noise = [torch.randn(shape, generator=torch.Generator().manual_seed(int(seed))) for seed in seeds]
    # `sigmas` are given because the scheduler's own spacing applies the shift twice at the tail of the grid.
    images = pipe(
        prompt=list(prompts),
        latents=torch.cat(noise),
        sigmas=[1 - i / steps for i in range(steps)],
        num_inference_steps=steps,
        height=HEIGHT,
        width=WIDTH,
        guidance_scale=1.0,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        output_type="pt",
    ).images
    return (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def base_exact_match(
    pipe, read: Callable[[Tensor], Sequence[str | None]], *, seeds_per_prompt: int = 4, steps: int = STEPS
) -> float:
    """Fraction of pictures read as exactly the number asked for, over all hundred prompts and seeds 0 ... 100 k - 1 (k
    per prompt).

    Args:
        pipe: a pipeline of `load_pipeline`.
        read: images UInt8 " b h w 3" -> b strings, for instance `diffrl.rewards.ocr().read`.
        seeds_per_prompt: k >= 1.
        steps: sampling steps, >= 1.

    Returns:
        The fraction, in [0, 1].

    No example: needs a pipeline.
    """
    asked = [prompt for prompt in prompts() for _ in range(seeds_per_prompt)]
    targets = [text for text in numbers() for _ in range(seeds_per_prompt)]
    readings = read(generate(pipe, asked, seeds=range(len(asked)), steps=steps))
    return math.fsum(a == b for a, b in zip(readings, targets, strict=True)) / len(targets)
