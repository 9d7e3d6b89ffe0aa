"""Rewards by name, as `diffrl train --reward` and `python -m diffrl.reward_server` take them."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from diffrl.numbers import nearest
from diffrl.remote_rewards import remote
from diffrl.rewards import jpeg_compressibility, jpeg_incompressibility, ocr, tesseract_ocr
from diffrl.scorer_weights import load_aesthetic, load_clip_score, load_hps_v2, load_image_reward, load_pick_score
from diffrl.types import Reward

REWARDS: dict[str, Callable[..., Any]] = {
    "ocr": ocr,
    "tesseract_ocr": tesseract_ocr,
    "jpeg_compressibility": jpeg_compressibility,
    "jpeg_incompressibility": jpeg_incompressibility,
}
"""Factories that need no argument."""

LOADED: dict[str, tuple[Callable[..., Any], str]] = {
    "clip": (load_clip_score, "clip:CLIP"),
    "pick": (load_pick_score, "pick:PICKSCORE[,CLIP]"),
    "hps": (load_hps_v2, "hps:CHECKPOINT[,CLIP]"),
    "aesthetic": (load_aesthetic, "aesthetic:HEAD[,CLIP]"),
    "image_reward": (load_image_reward, "image_reward:CHECKPOINT[,TOKENIZER]"),
}
"""Loaders by name, and how they are asked for: files, folders or hub ids, separated by a comma."""

FORMS = (*REWARDS, *(form for _, form in LOADED.values()), "remote:URL")
"""What a name may look like, for help and errors."""


def is_known(name: str) -> bool:
    """Whether `name`, or what stands before its first colon, is a reward of this package.

    >>> is_known("ocr"), is_known("remote:http://localhost:8000"), is_known("mine:reward")
    (True, True, False)
    """
    return name in REWARDS or name.partition(":")[0] in (*LOADED, "remote")


def make_reward(name: str, *, threads: int = 2, device: Any = "cpu", option: str = "--reward") -> Reward:
    """A reward by its name: see `FORMS`; anything else is MODULE:FUNCTION, a reward itself.

    Args:
        threads: of the OCR engine.
        device: of a loaded model.
        option: what errors call it.

    Raises:
        ValueError: no such reward, a model that cannot be loaded, a function that cannot be imported; names the option.
        ImportError: a package is missing.

    >>> import torch
    >>> make_reward("diffrl.tasks.toy:toward_compass")(torch.zeros(1, 2), ["north"])
    tensor([-1.])
    """
    if name in REWARDS:
        return REWARDS[name](threads=threads) if name == "ocr" else REWARDS[name]()
    before, _, after = name.partition(":")
    if is_known(name):
        try:
            return remote(after) if before == "remote" else _loaded(before, after, device)
        except ValueError as error:
            raise ValueError(f"{option} {name!r}: {error}") from error
    if not after:
        near = nearest(name, (*REWARDS, *LOADED, "remote"))
        raise ValueError(f"{option} must be one of {', '.join(FORMS)}, or MODULE:FUNCTION, got {name!r}{near}")
    try:
        found = getattr(import_module(before), after)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{option} {name!r} cannot be imported: {error} (looked in {Path.cwd()} and in what is installed)"
        ) from None
    except Exception as error:  # whatever the user's module raises when it is imported
        raise ValueError(f"{option} {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"{option} {name!r} is not callable: {found!r}")
    return found


def _loaded(name: str, argument: str, device: Any) -> Reward:
    load, form = LOADED[name]
    given = argument.split(",")
    if not all(given) or len(given) > (2 if "," in form else 1):
        raise ValueError(f"it is written {form}")
    return load(*given, device=device)
