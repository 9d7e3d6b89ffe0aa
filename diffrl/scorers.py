"""Rewards from models that judge images: CLIP score, PickScore, HPS v2.1, the LAION aesthetic score, ImageReward.

Each factory scores with the model it is given; `load_x` in `diffrl.scorer_weights` loads the published one and calls it.
A model is put in eval mode, keeps its dtype and device, and runs without gradient and autocast; embeddings become float32
before they are normalised. By default a model sees one row at a time, texts padded to their full length: a value then
depends on its own row alone, bit for bit. With a larger `batch` matrix products round a row differently in another place
or beside other rows; values then agree up to those last bits. A row that fails is nan and counted (`reward_rows.report`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffrl.checks import require_call, require_count, require_number
from diffrl.reward_rows import Log, one_number_each, report, score_rows
from diffrl.types import Reward

Score = Callable[[Tensor, Sequence[str]], Tensor]
"""(images UInt8 " b h w 3", prompts) -> float " b": a model's answer to one batch."""

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""Of the pixels CLIP was trained on (Radford et al. 2021); ImageReward uses them too."""

IMAGE_REWARD_MEAN, IMAGE_REWARD_STD = 0.16717362830052426, 1.0333394966054072
"""Of ImageReward's raw scores (Xu et al. 2023; THUDM/ImageReward, ImageReward.py)."""

VIDEO_ALIGN: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"VQ": (3.6757, 2.2476), "MQ": (1.1646, 1.3811), "TA": (2.8105, 2.5121)}
)
"""(mean, std) of VideoReward's raw scores (Liu et al. 2025; `inference_config` of KwaiVGI/VideoReward's model_config.json)."""


# ---- what the scorers share -------------------------------------------------------------------------------------------


def pil_pictures(images: Tensor) -> list[Any]:
    """UInt8 " b h w 3" -> b Pillow images: their channel axis cannot be mistaken for another of length 3. ValueError: no
    pixels.

    >>> [picture.size for picture in pil_pictures(torch.zeros(2, 3, 5, 3, dtype=torch.uint8))]
    [(5, 3), (5, 3)]
    """
    from PIL import Image

    if images.numel() == 0:
        raise ValueError(f"pictures without pixels: {tuple(images.shape)}")
    return [Image.fromarray(picture) for picture in images.detach().cpu().numpy()]


def letterboxed(images: Tensor, size: int) -> list[Any]:
    """Pillow images of `size` x `size`: the long side scaled to `size` (bicubic), black in equal parts around the rest.

    An odd pixel of black goes right or below (HPSv2's `ResizeMaxSize`).

    >>> (picture,) = letterboxed(torch.full((1, 2, 4, 3), 255, dtype=torch.uint8), 4)
    >>> [picture.getpixel((0, row))[0] for row in range(4)]
    [0, 255, 255, 0]
    """
    from PIL import Image

    found = []
    for picture in pil_pictures(images):
        scale = size / max(picture.size)
        width, height = (max(1, round(side * scale)) for side in picture.size)
        square = Image.new("RGB", (size, size))
        resized = picture.resize((width, height), Image.Resampling.BICUBIC)
        square.paste(resized, ((size - width) // 2, (size - height) // 2))
        found.append(square)
    return found


def cropped(images: Tensor, size: int) -> list[Any]:
    """Pillow images of `size` x `size`: the short side scaled to `size` (bicubic), the middle of the long one kept.

    >>> image = torch.tensor([0, 255, 255, 0], dtype=torch.uint8).reshape(1, 1, 4, 1).expand(1, 2, 4, 3)
    >>> (picture,) = cropped(image, 2)
    >>> picture.size, picture.getpixel((0, 0)), picture.getpixel((1, 1))
    ((2, 2), (255, 255, 255), (255, 255, 255))
    """
    from PIL import Image

    found = []
    for picture in pil_pictures(images):
        short = min(picture.size)
        width, height = (size if side == short else int(size * side / short) for side in picture.size)
        left, top = round((width - size) / 2), round((height - size) / 2)
        resized = picture.resize((width, height), Image.Resampling.BICUBIC)
        found.append(resized.crop((left, top, left + size, top + size)))
    return found


def clip_pixels(pictures: Sequence[Any]) -> Tensor:
    """b Pillow images of one size -> float32 " b 3 h w", scaled to [0, 1] and normalised with CLIP's mean and std.

    >>> clip_pixels(pil_pictures(torch.zeros(1, 1, 1, 3, dtype=torch.uint8))).flatten()  # black: -mean/std
    tensor([-1.7923, -1.7521, -1.4802])
    """
    pixels = torch.from_numpy(np.stack([np.array(picture) for picture in pictures])).permute(0, 3, 1, 2) / 255
    return (pixels - torch.tensor(CLIP_MEAN)[:, None, None]) / torch.tensor(CLIP_STD)[:, None, None]


def _unit(x: Tensor) -> Tensor:
    """Rows of length 1, in float32 whatever the model's dtype."""
    return torch.nn.functional.normalize(x.float(), dim=-1)


def _like(model: Any, x: Tensor) -> Tensor:
    """x on the model's device, and in its dtype if it is floating."""
    weight = next(model.parameters())
    return x.to(weight.device, weight.dtype if x.is_floating_point() else x.dtype)


def _reward(name: str, models: Sequence[Any], score: Score, *, batch: int, log: Log | None) -> Reward:
    """`score` as a reward: in eval mode, without gradient and autocast, failures counted."""
    require_count("batch", batch)
    for model in models:
        model.eval()
    device = next(models[0].parameters()).device.type

    def checked(images: Tensor, prompts: Sequence[str]) -> Tensor:
        with torch.no_grad(), torch.autocast(device, enabled=False):
            values = one_number_each(score(images, prompts), len(prompts))
        if not bool(torch.isfinite(values).all()):
            raise ArithmeticError(f"the model gave {values.tolist()}")
        return values

    def reward(images: Tensor, prompts: Sequence[str]) -> Tensor:
        require_call(name, images, prompts, ranks=(4,))
        return report(name, score_rows(checked, images, prompts, batch=batch), log)

    return reward


def _cosines(
    model: Any, processor: Any, pictures: Callable[[Tensor], list[Any]], images: Tensor, prompts: Sequence[str]
) -> Tensor:
    """cos of each image's embedding and that of its own prompt, float32 " b"."""
    inputs = processor(
        text=list(prompts),
        images=pictures(images),
        return_tensors="pt",
        padding="max_length",
        truncation=True,
        max_length=model.config.text_config.max_position_embeddings,
    )
    # The whole model is asked: what its `get_text_features` returns changes with the version of transformers.
    found = model(**{name: _like(model, x) for name, x in inputs.items()})
    return (_unit(found.image_embeds) * _unit(found.text_embeds)).sum(-1)


# ---- CLIP and its descendants -----------------------------------------------------------------------------------------


def clip_score(model: Any, processor: Any, *, batch: int = 1, log: Log | None = None) -> Reward:
    """100 max(cos, 0) of image and prompt under CLIP (Hessel et al. 2021, with 100 for their 2.5).

    Args:
        model: a `transformers.CLIPModel`; put in eval mode.
        processor: its `CLIPProcessor`. Prompts are cut at the model's length (77 tokens).
        batch: rows per call of the model, >= 1; more is faster on an accelerator, see the top of this file.
        log: see `reward_rows.report`.

    Returns:
        A reward for images. Values in [0, 100].

    Raises:
        ValueError: batch < 1. The reward: a malformed call.

    No example: needs weights.
    """
    cosines = partial(_cosines, model, processor, pil_pictures)
    return _reward("clip_score", [model], lambda i, p: 100 * cosines(i, p).clamp_min(0), batch=batch, log=log)


def pick_score(model: Any, processor: Any, *, batch: int = 1, log: Log | None = None) -> Reward:
    """exp(logit_scale) cos of image and prompt (PickScore, Kirstain et al. 2023); about 20 with the published weights.

    Arguments, returns and errors: as `clip_score`; `model` holds the trained scale. No example: needs weights.
    """

    def score(images: Tensor, prompts: Sequence[str]) -> Tensor:
        cosines = _cosines(model, processor, pil_pictures, images, prompts)
        return model.logit_scale.detach().float().exp() * cosines  # a scale of 100 in bf16 would be off by 1/256

    return _reward("pick_score", [model], score, batch=batch, log=log)


def hps_v2(model: Any, processor: Any, *, batch: int = 1, log: Log | None = None) -> Reward:
    """cos of image and prompt (HPS v2.1, Wu et al. 2023); about 0.2 to 0.35 with the published weights.

    Images keep their aspect: the long side is scaled to the model's size (224), black is put around the rest.
    Arguments, returns and errors: as `clip_score`; `model`: see `scorer_weights.clip_from_open_clip`.
    No example: needs weights.
    """

    def pictures(images: Tensor) -> list[Any]:
        return letterboxed(images, model.config.vision_config.image_size)

    return _reward("hps_v2", [model], partial(_cosines, model, processor, pictures), batch=batch, log=log)


def aesthetic(model: Any, processor: Any, head: Any, *, batch: int = 1, log: Log | None = None) -> Reward:
    """head(e / |e|), e the CLIP embedding of the image: the LAION aesthetic score, about 1 to 10 (Schuhmann 2022).

    Args:
        model: a `CLIPModel` (published: ViT-L/14 of OpenAI) or `CLIPVisionModelWithProjection`; put in eval mode.
        processor: its `CLIPProcessor` or image processor.
        head: embeddings " b d" -> " b 1", see `scorer_weights.score_head`; runs in its own dtype.
        batch, log: as `clip_score`.

    Returns:
        A reward for images; the prompts do not matter, but there must be one per image.

    Raises:
        ValueError: batch < 1. The reward: a malformed call.

    No example: needs weights.
    """

    def score(images: Tensor, prompts: Sequence[str]) -> Tensor:
        pixels = _like(model, processor(images=pil_pictures(images), return_tensors="pt")["pixel_values"])
        embedding = model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output)
        return head(_like(head, _unit(embedding)))[:, 0]

    return _reward("aesthetic", [model, head], score, batch=batch, log=log)


def image_reward(model: Any, head: Any, tokenizer: Any, *, batch: int = 1, log: Log | None = None) -> Reward:
    """(head(h) - 0.16717) / 1.03334, h the text's first hidden state, which attends to the image (ImageReward, Xu et al.
    2023).

    Args:
        model: a `transformers.BlipForImageTextRetrieval`; its `vision_model` and `text_encoder` are used. Put in eval mode.
        head: hidden states " b d" -> " b 1", see `scorer_weights.score_head`; runs in its own dtype.
        tokenizer: BERT's; texts are cut at and padded to 35 tokens (less, if the model holds fewer).
        batch, log: as `clip_score`.

    Returns:
        A reward for images, which are scaled to the model's size by their short side and cropped to the middle.

    Raises:
        ValueError: batch < 1. The reward: a malformed call.

    No example: needs weights.
    """
    length = min(35, model.config.text_config.max_position_embeddings)
    size = model.config.vision_config.image_size

    def score(images: Tensor, prompts: Sequence[str]) -> Tensor:
        text = tokenizer(list(prompts), padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        pixels = _like(model, clip_pixels(cropped(images, size)))
        seen = model.vision_model(pixel_values=pixels).last_hidden_state
        hidden = model.text_encoder(
            input_ids=_like(model, text["input_ids"]),
            attention_mask=_like(model, text["attention_mask"]),
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=seen.device),
        ).last_hidden_state
        return (head(_like(head, hidden[:, 0].float()))[:, 0].float() - IMAGE_REWARD_MEAN) / IMAGE_REWARD_STD

    return _reward("image_reward", [model, head], score, batch=batch, log=log)


# ---- videos -----------------------------------------------------------------------------------------------------------


def video_reward(
    score: Callable[[Tensor, Sequence[str]], Mapping[str, Any]],
    *,
    weights: Mapping[str, float],
    constants: Mapping[str, tuple[float, float]] | None = None,
    batch: int = 1,
    log: Log | None = None,
) -> Reward:
    """sum over qualities of weight (value - mean) / std, for a scorer of videos (VQ visual, MQ motion, TA text alignment).

    No such scorer is shipped. Values are standardised with constants, never over the batch: a video's reward must not
    depend on its neighbours.

    Args:
        score: (videos UInt8 " b f h w 3", prompts) -> numbers " b" by the names of the qualities.
        weights: finite weights by name, each of which `score` must give.
        constants: (mean, std) by the same names, published with the scorer (`VIDEO_ALIGN` for VideoReward's raw scores);
            None: `score` already standardises.
        batch: videos per call of `score`, >= 1.
        log: see `reward_rows.report`.

    Raises:
        ValueError: no weights, other names, a weight or mean that is no finite number, a std <= 0, batch < 1. The reward: a
            malformed call; images are refused.

    >>> quality = lambda videos, prompts: {"VQ": [3.0] * len(prompts)}
    >>> reward = video_reward(quality, weights={"VQ": 2.0}, constants={"VQ": (1.0, 4.0)})
    >>> reward(torch.zeros(1, 2, 1, 1, 3, dtype=torch.uint8), ["a cat"])  # 2 (3 - 1)/4
    tensor([1.])
    """
    if not isinstance(weights, Mapping) or not weights:
        raise ValueError(f"weights must be a non-empty mapping by the qualities' names, got {weights!r}")
    require_count("batch", batch)
    used = dict.fromkeys(weights, (0.0, 1.0)) if constants is None else dict(constants)
    if missing := sorted(set(weights) - set(used)):
        raise ValueError(f"constants must hold (mean, std) of {sorted(weights)}, not there: {missing}")
    terms = []
    for name in weights:
        mean, std = used[name]
        require_number(f"constants[{name!r}] mean", mean)
        require_number(f"constants[{name!r}] std", std, low=0, open_low=True)
        terms.append((name, require_number(f"weights[{name!r}]", weights[name]), mean, std))

    def total(videos: Tensor, prompts: Sequence[str]) -> Tensor:
        given = score(videos, prompts)
        values = torch.zeros(len(prompts), dtype=torch.float64)
        for name, weight, mean, std in terms:
            values = values + weight * (one_number_each(given[name], len(prompts)).double() - mean) / std
        if not bool(torch.isfinite(values).all()):
            raise ArithmeticError(f"the scorer gave {dict(given)!r:.200}")
        return values

    def reward(videos: Tensor, prompts: Sequence[str]) -> Tensor:
        require_call("video_reward", videos, prompts, ranks=(5,))
        return report("video_reward", score_rows(total, videos, prompts, batch=batch), log)

    return reward
