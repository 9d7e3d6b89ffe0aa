"""What the network is told: prompts and images to cond, each encoded once, kept in memory and, if asked for, on disk."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diffrl.family import Family, Size, plain

TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")

Rows = dict[str, Tensor]


class Encoder(NamedTuple):
    """What `encode` needs of a model. encoders: text encoders there were when it was made; memory: rows by content;
    folder: where rows are kept from run to run, None for nowhere; weights: digests of the pipeline's parts, once known."""

    pipe: Any
    family: Family
    size: Size
    scale: float
    guided: bool
    negative: str
    length: int
    folder: Path | None
    encoders: tuple[str, ...]
    memory: dict[tuple, Rows]
    weights: dict[tuple[str, ...], str]

    @classmethod
    def of(cls, pipe, family, size, scale, guided, negative, length, folder) -> "Encoder":
        there = tuple(n for n in TEXT_ENCODERS if getattr(pipe, n, None) is not None)
        return cls(pipe, family, size, scale, guided, negative, length, folder, there, {}, {})


def checked_folder(folder: str | Path | None) -> Path | None:
    """The folder as a Path, not created yet; ValueError where it is a file.

    >>> checked_folder(None) is None, checked_folder("embeddings").name
    (True, 'embeddings')
    """
    if folder is None:
        return None
    if Path(folder).is_file():
        raise ValueError(f"embeddings={str(folder)!r} is a file, not a folder")
    return Path(folder)


def encode(encoder: Encoder, prompts: Sequence[str], images: Sequence[Any] | Tensor | None = None) -> Rows:
    """What `pipe(prompt)` would feed its transformer, one row per prompt, as fresh tensors on the module's device.

    prompts: a sequence of str, not a str. images: one per prompt for families that start from an image, else None: PIL
    images, uint8 (h, w, 3) or float (3, h, w) in [0, 1], resized as the pipeline does. Each distinct text and image is
    encoded once, alone, and kept on the CPU. Float entries are in the module's dtype, an embedded `guidance` in float32.
    ValueError: prompts or images of another kind or number; a text not yet encoded after a text encoder was taken out of
    the pipeline. No example: needs a pipeline.
    """
    pipe, family = encoder.pipe, encoder.family
    texts = [] if isinstance(prompts, str) else list(prompts)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"prompts must be a non-empty sequence of str, got {prompts!r}")
    if (images is None) != (family.encode_image is None) or (images is not None and len(images) != len(texts)):
        wanted = "no images" if family.encode_image is None else f"{len(texts)} images, one per prompt"
        got = "none" if images is None else len(images)
        raise ValueError(f"{type(pipe).__name__} takes {wanted}; got {got}")
    rows = [dict(_text(encoder, family.encode, text)) for text in texts]
    for row, image in zip(rows, () if images is None else images):
        row.update(_image(encoder, image))
    if encoder.guided:
        negative = _text(encoder, family.encode_negative or family.encode, encoder.negative)
        for row in rows:
            row.update({f"uncond.{name}": negative[name] for name in family.twins})
    device = pipe.transformer.device
    cond = {name: torch.stack([row[name] for row in rows]).to(device) for name in rows[0]}
    if unit := family.guidance_unit(pipe):
        cond["guidance"] = torch.full((len(texts),), encoder.scale * unit, device=device, dtype=torch.float32)
    return cond


def _text(encoder: Encoder, function: Callable, prompt: str) -> Rows:
    def compute() -> Rows:
        # A pipeline without T5 feeds zeros instead: taken out later, it would silently be another conditioning.
        wanted = encoder.encoders or TEXT_ENCODERS[:1]
        if gone := [name for name in wanted if getattr(encoder.pipe, name, None) is None]:
            raise ValueError(f"{prompt!r} was not encoded while the pipeline had {gone}")
        return function(encoder.pipe, prompt, encoder.length)

    tokenizers = tuple(name.replace("text_encoder", "tokenizer") for name in encoder.encoders)
    return _once(encoder, (function.__name__, encoder.length, prompt), (*encoder.encoders, *tokenizers), compute)


def _image(encoder: Encoder, image: Any) -> Rows:
    import numpy as np

    if hasattr(image, "convert"):
        image = image.convert("RGB")  # first: a palette's indices are not what is seen
    pixels = np.ascontiguousarray(plain(image) if isinstance(image, Tensor) else image)
    digest = hashlib.sha256(f"{pixels.dtype} {pixels.shape} ".encode() + pixels.tobytes()).hexdigest()
    assert encoder.family.encode_image is not None
    compute = partial(encoder.family.encode_image, encoder.pipe, image, encoder.size)
    parts = ("vae", "image_encoder", "image_processor")
    return _once(encoder, ("image", *encoder.size, digest), parts, compute)


def _once(encoder: Encoder, key: tuple, parts: tuple[str, ...], compute: Callable[[], Rows]) -> Rows:
    """The rows of `key` from memory, else from disk, else computed by those `parts` of the pipeline; on the CPU."""
    if key in encoder.memory:
        return encoder.memory[key]
    path = None if encoder.folder is None else _path(encoder, key, parts)
    if path is not None and path.exists():
        encoder.memory[key] = _read(path)
        return encoder.memory[key]
    dtype = encoder.pipe.transformer.dtype
    with torch.no_grad():
        rows = {n: x[0].to(dtype) if x.is_floating_point() else x[0] for n, x in compute().items()}
    encoder.memory[key] = {n: x.detach().to("cpu", copy=True).contiguous() for n, x in rows.items()}
    if path is not None:
        _write(path, encoder.memory[key])
    return encoder.memory[key]


# on disk


def _path(encoder: Encoder, key: tuple, parts: tuple[str, ...]) -> Path | None:
    """The file of these rows: named by the prompt or pixels, the settings, and the weights that encode them. None where
    a part has been taken out of the pipeline before its digest was known: nothing could be checked then."""
    if parts not in encoder.weights:
        if any(getattr(encoder.pipe, name, None) is None for name in parts if name in encoder.encoders):
            return None
        encoder.weights[parts] = _digest_of_parts(encoder.pipe, parts)
    assert encoder.folder is not None
    settings = [type(encoder.pipe).__name__, str(encoder.pipe.transformer.dtype), encoder.weights[parts], *key]
    name = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    return encoder.folder / f"{name}.safetensors"


def _digest_of_parts(pipe: Any, parts: Sequence[str]) -> str:
    """Of configurations, vocabularies and weights."""
    import diffusers
    import transformers

    h = hashlib.sha256(f"{diffusers.__version__} {transformers.__version__}".encode())
    h.update(str(getattr(pipe, "prompt_template_encode", "")).encode())
    for name in parts:
        part: Any = getattr(pipe, name, None)
        h.update(f"{name} {type(part).__name__}".encode())
        if isinstance(part, nn.Module):
            config: Any = part.config
            config = config.to_dict() if hasattr(config, "to_dict") else dict(config)
            h.update(json.dumps(config, default=str, sort_keys=True).encode())
            for key, tensor in part.state_dict().items():
                h.update(key.encode() + _digest_of_tensor(tensor))
        elif hasattr(part, "get_vocab"):
            fast = getattr(part, "backend_tokenizer", None)  # normalisers and the like are not in the vocabulary
            told = [
                part.get_vocab(),
                part.model_max_length,
                part.padding_side,
                fast.to_str() if fast is not None else "",
            ]
            h.update(json.dumps(told, sort_keys=True).encode())
        elif hasattr(part, "to_json_string"):
            h.update(part.to_json_string().encode())
    return h.hexdigest()


def _digest_of_tensor(x: Tensor) -> bytes:
    """Its shape, the sum of each row's bits as integers weighed by the row's place, and its first and last values: exact, equal
    on every device, and no 10 GB are copied to the CPU."""
    flat = x.contiguous().flatten()
    bits = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    ends = torch.cat([bits[:64], bits[-64:]]).tolist()
    rows = bits.view(len(x), -1).sum(1, dtype=torch.int64) if x.ndim > 1 and len(x) else bits.to(torch.int64)
    placed = int((rows * torch.arange(1, len(rows) + 1, device=rows.device)).sum())
    return f"{x.dtype} {tuple(x.shape)} {placed} {ends}".encode()


def _read(path: Path) -> Rows:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}): delete it, and it is computed again") from error


def _write(path: Path, rows: Rows) -> None:
    """Beside its place, then renamed: another process sees all of the file or none."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    try:
        save_file(rows, name)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
