"""Real rewards behind one callable: (images, prompts) -> float32 " b" on the CPU.

Images are UInt8 " b h w 3" (a video reward also takes " b f h w 3"), prompts a sequence of b strings. Row i scores
image i against prompt i and nothing else: permuting rows permutes the values, and scoring a part gives that part of
the whole, bit for bit. NaN: no score.

A malformed call (lengths differ, wrong dtype or rank) raises one `ValueError`; a malformed image is a NaN in its row.
There is no gradient, no state that survives a call and, once a factory has returned, no network. Each factory imports
what it needs inside itself. The exceptions are in the names: `preference` and `judged` compare the rows of a group,
`cached` remembers, `remote` asks a server.

Here are the rewards that read text or measure files; the others live in modules of their own and are reached from here:
`scorers` and `scorer_weights` (models), `objects` (GenEval), `reward_tools` (a reward in, a reward out), `remote_rewards`.
"""

import io
import re
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from diffrl.checks import require_call, require_images
from diffrl.objects import Fact, Object, geneval_facts, object_check
from diffrl.remote_rewards import remote
from diffrl.reward_tools import WeightedSum, cached, in_threads, judged, preference, weighted_sum
from diffrl.scorer_weights import load_aesthetic, load_clip_score, load_hps_v2, load_image_reward, load_pick_score
from diffrl.scorers import VIDEO_ALIGN, aesthetic, clip_score, hps_v2, image_reward, pick_score, video_reward

__all__ = [
    "VIDEO_ALIGN",
    "Engine",
    "Fact",
    "Object",
    "TextReward",
    "WeightedSum",
    "aesthetic",
    "cached",
    "clip_score",
    "edit_distance",
    "exact_match",
    "geneval_facts",
    "hps_v2",
    "image_reward",
    "in_threads",
    "jpeg_compressibility",
    "jpeg_incompressibility",
    "judged",
    "load_aesthetic",
    "load_clip_score",
    "load_hps_v2",
    "load_image_reward",
    "load_pick_score",
    "object_check",
    "ocr",
    "pick_score",
    "preference",
    "quoted",
    "rapid_ocr",
    "remote",
    "tesseract_ocr",
    "text_similarity",
    "video_reward",
    "weighted_sum",
]

Engine: TypeAlias = Callable[[np.ndarray], Sequence[str]]
"""UInt8 pictures " b h w 3" in RGB -> b strings; what is read in a picture must not depend on its neighbours."""


def quoted(prompt: str) -> str | None:
    """The first part of `prompt` between double quotes, without them; None when there is none.

    >>> quoted('a shop sign that says "Open" and "Closed"')
    'Open'
    """
    found = re.search(r'"([^"]*)"', prompt)
    return None if found is None else found.group(1)


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance: the fewest insertions, deletions and replacements of one character that turn `a` into `b`.

    >>> edit_distance("kitten", "sitting")
    3
    """
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, start=1):
        previous, row = row, [i]
        for j, right in enumerate(b, start=1):
            row.append(min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (left != right)))
    return row[-1]


def _plain(text: str) -> str:
    return "".join(text.lower().split())


def text_similarity(reading: str | None, target: str | None) -> float:
    """1 - min(d, n)/n with d the edit distance, n the target's length; 1 if the target occurs anywhere in what was
    read.

    Both are lower-cased and lose their white space first (the OCR reward of Flow-GRPO, Liu et al. 2025).

    Args:
        reading: what was read; None: reading failed.
        target: what should have been read; None or nothing but space: there is no target.

    Returns:
        In [0, 1]; NaN when there is no reading or no target.

    >>> text_similarity("Sale 4Z", "42"), text_similarity("4 2!", "42"), text_similarity("7", "42")
    (0.0, 1.0, 0.0)
    """
    if reading is None or target is None or not _plain(target):
        return float("nan")
    read, wanted = _plain(reading), _plain(target)
    if wanted in read:
        return 1.0
    return 1 - min(edit_distance(read, wanted), len(wanted)) / len(wanted)


def exact_match(
    readings: Sequence[str | None],
    prompts: Sequence[str],
    *,
    target: Callable[[str], str | None] = quoted,
) -> Tensor:
    """1 where what was read is the target and nothing else (without case and white space), else 0: stricter than the
    reward.

    Args:
        readings: b strings, or None where reading failed.
        prompts: b prompts.
        target: prompt -> what should be read, or None.

    Returns:
        Float32 " b"; NaN where there is no reading or no target.

    Raises:
        ValueError: not as many readings as prompts, or a bare string for either.

    >>> exact_match([" 12", "123", None], ['the number "12"'] * 3)
    tensor([1., 0., nan])
    """
    if isinstance(readings, str) or isinstance(prompts, str) or len(readings) != len(prompts):
        raise ValueError(f"exact_match needs one reading per prompt, got readings={readings!r} and prompts={prompts!r}")
    values = []
    for reading, prompt in zip(readings, prompts):
        wanted = _plain(target(prompt) or "")
        values.append(float("nan") if reading is None or not wanted else float(_plain(reading) == wanted))
    return torch.tensor(values, dtype=torch.float32)


class TextReward(NamedTuple):
    """The reward `text_similarity(reading, target(prompt))`; `read` gives what the engine reads, for logs and
    pictures.
    """

    target: Callable[[str], str | None]
    engine: Engine

    def read(self, images: Tensor) -> list[str | None]:
        """What the engine reads in each of the images, UInt8 " b h w 3"; None where it raised an exception or there
        are no pixels.
        """
        require_images("ocr", images, ranks=(4,))
        pictures = images.detach().cpu().numpy()
        if pictures.size == 0:
            return [None] * len(images)
        try:
            return self._engine(pictures)
        except Exception:
            # One picture the engine cannot take must not cost its neighbours their scores.
            return [self._read_one(picture) for picture in pictures]

    def _engine(self, pictures: np.ndarray) -> list[str | None]:
        texts: list[str | None] = list(self.engine(pictures))
        if len(texts) != len(pictures):
            raise ValueError(f"ocr: the engine gave {len(texts)} texts for {len(pictures)} pictures")
        return texts

    def _read_one(self, picture: np.ndarray) -> str | None:
        try:
            return self._engine(picture[None])[0]
        except Exception:
            return None

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Float32 " b" in [0, 1]; NaN where the prompt has no target or the picture cannot be read."""
        require_call("ocr", images, prompts, ranks=(4,))
        targets = [self.target(prompt) for prompt in prompts]
        readings = self.read(images)
        values = [text_similarity(reading, wanted) for reading, wanted in zip(readings, targets)]
        return torch.tensor(values, dtype=torch.float32)


def rapid_ocr(*, threads: int = 2, batch: int = 8) -> Engine:
    """RapidOCR's recogniser (PP-OCR) on its own: no search for text in the picture, the whole picture is one line.

    A picture is scaled to 48 pixels in height, small ones up and large ones down, and padded on the right to at least
    64 in width. (The library's default pads to 320, which costs several times as much.)

    Args:
        threads: onnxruntime's threads, >= 1; more than there are cores means all cores.
        batch: pictures per call of the network, >= 2.

    Raises:
        ValueError: threads < 1 or batch < 2.
        ImportError: rapidocr or onnxruntime is missing.

    No example: loads a network.
    """
    if threads < 1 or batch < 2:
        raise ValueError(f"rapid_ocr needs threads >= 1 and batch >= 2, got threads={threads}, batch={batch}")
    try:
        import onnxruntime  # noqa: F401  (rapidocr only misses it when it is first used)
        from rapidocr import RapidOCR
        from rapidocr.ch_ppocr_rec import TextRecInput
    except ImportError as error:
        raise ImportError(f"OCR rewards need rapidocr and onnxruntime: pip install 'diffrl[demo]' ({error})") from error
    library = RapidOCR(
        params={
            "Global.log_level": "critical",
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            "Rec.rec_img_shape": [3, 48, 64],
            "Rec.rec_batch_num": batch,
        }
    )
    # Calling the library itself reads one picture at a time; its recogniser takes a batch, and is loaded when first
    # asked for.
    recogniser = library._load_rec_model()

    def read(pictures: np.ndarray) -> list[str]:
        reversed_channels = [
            np.ascontiguousarray(picture[..., ::-1]) for picture in pictures
        ]  # the network expects BGR
        texts: list[str] = []
        for i in range(0, len(reversed_channels), batch):
            part = reversed_channels[i : i + batch]
            # onnxruntime computes a batch of one along another path, which differs from the rest in the last bits.
            doubled = part * 2 if len(part) == 1 else part
            texts.extend(recogniser(TextRecInput(img=doubled, return_word_box=False)).txts[: len(part)])
        return texts

    return read


def ocr(*, target: Callable[[str], str | None] = quoted, engine: Engine | None = None, threads: int = 2) -> TextReward:
    """How much of the text that the prompt asks for can be read in the picture (`text_similarity`).

    Args:
        target: prompt -> the text to read, or None: no score. By default the first part in double quotes.
        engine: pictures UInt8 " b h w 3" -> b strings; None: `rapid_ocr(threads=threads)`.
        threads: of the default engine, >= 1.

    Returns:
        The reward; its method `read(images)` gives the raw readings.

    Raises:
        ValueError: threads < 1. The reward itself: see the top of this file; videos are refused.
        ImportError: rapidocr or onnxruntime is missing.

    >>> reward = ocr(engine=lambda pictures: ["12"] * len(pictures))
    >>> reward(torch.zeros(2, 8, 8, 3, dtype=torch.uint8), ['the number "12"', 'the number "13"'])
    tensor([1.0000, 0.5000])
    """
    return TextReward(target=target, engine=rapid_ocr(threads=threads) if engine is None else engine)


def tesseract_ocr(*, psm: int = 7, target: Callable[[str], str | None] = quoted) -> TextReward:
    """As `ocr`, read by Tesseract (English), which must be installed together with the package `tesserocr`.

    A picture less than 64 pixels high is enlarged by a whole number, and each gets a margin of 10 pixels that repeats
    its edge.

    Args:
        psm: Tesseract's page segmentation mode, 0 ... 13; 7: the picture is one line of text.
        target: prompt -> the text to read, or None.

    Raises:
        ValueError: psm outside 0 ... 13.
        ImportError: tesserocr or Pillow is missing.

    No example: needs Tesseract.
    """
    if not 0 <= psm <= 13:
        raise ValueError(f"tesseract_ocr needs psm in 0 ... 13, got psm={psm}")
    try:
        import tesserocr
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"tesseract_ocr needs tesserocr: pip install 'diffrl[demo,tesseract]' ({error})") from error
    # Tesseract's API object is not thread-safe: each thread that reads gets its own.
    local = threading.local()

    def read(pictures: np.ndarray) -> list[str]:
        if not hasattr(local, "api"):
            local.api = tesserocr.PyTessBaseAPI(psm=psm, lang="eng")
        texts = []
        for picture in pictures:
            factor = max(1, -(-64 // picture.shape[0]))
            large = picture.repeat(factor, axis=0).repeat(factor, axis=1)
            local.api.SetImage(Image.fromarray(np.pad(large, ((10, 10), (10, 10), (0, 0)), mode="edge")))
            texts.append(local.api.GetUTF8Text())
        return texts

    return TextReward(target=target, engine=read)


def _jpeg_kilobytes(name: str, quality: int, sign: float) -> Callable[[Tensor, Sequence[str]], Tensor]:
    if (
        isinstance(quality, bool) or not hasattr(quality, "__index__") or not 1 <= quality <= 100
    ):  # Pillow takes int only
        raise ValueError(f"{name} needs an integer quality in 1 ... 100, got quality={quality}")
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"{name} needs Pillow: pip install 'diffrl[demo]' ({error})") from error

    def kilobytes(picture: np.ndarray) -> float:
        buffer = io.BytesIO()
        try:
            Image.fromarray(picture).save(buffer, format="JPEG", quality=int(quality))
        except Exception:  # no pixels, or more than the format allows
            return float("nan")
        return buffer.tell() / 1000

    def reward(images: Tensor, prompts: Sequence[str]) -> Tensor:
        require_call(name, images, prompts, ranks=(4, 5))
        pictures = images.detach().cpu().numpy()
        videos = pictures[:, None] if pictures.ndim == 4 else pictures
        values = [
            sign * sum(kilobytes(frame) for frame in video) / len(video) if len(video) else float("nan")
            for video in videos
        ]
        return torch.tensor(values, dtype=torch.float32)

    return reward


def jpeg_compressibility(*, quality: int = 95) -> Callable[[Tensor, Sequence[str]], Tensor]:
    """Minus the size of the picture as a JPEG, in kilobytes of 1000 bytes (Black et al. 2024, DDPO); a video: the mean
    over its frames.

    Args:
        quality: Pillow's JPEG quality, 1 ... 100.

    Returns:
        A reward; the prompts do not matter, but there must be one per image.

    Raises:
        ValueError: quality outside 1 ... 100.
        ImportError: Pillow is missing.

    >>> images = torch.zeros(2, 32, 32, 3, dtype=torch.uint8)
    >>> images[1, ::2] = 255  # stripes take more bytes than black
    >>> black, striped = jpeg_compressibility()(images, ["", ""])
    >>> bool(striped < black < 0)
    True
    """
    return _jpeg_kilobytes("jpeg_compressibility", quality, -1.0)


def jpeg_incompressibility(*, quality: int = 95) -> Callable[[Tensor, Sequence[str]], Tensor]:
    """Plus the size of the picture as a JPEG, in kilobytes: `jpeg_compressibility` with the other sign, otherwise
    the same. No example: `jpeg_compressibility` has one.
    """
    return _jpeg_kilobytes("jpeg_incompressibility", quality, 1.0)
