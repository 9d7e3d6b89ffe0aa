"""Where metrics go: `log(metrics, step)`, a callable that takes a dictionary and the number of the iteration, anywhere.

    with together(to_jsonl("run.jsonl"), to_tensorboard("board")) as log:
        for row in itertools.islice(train(...), 100):
            log(row, row["iteration"])

A value is a number, None, or pictures: a uint8 tensor " b h w 3", or " b f h w 3" of videos, of which the middle frame is
shown. What is no finite number (None, nan, inf: "there is none", as a reward may say) is null in a file of lines and a gap in a curve of
TensorBoard and Weights & Biases. tensorboard and wandb are imported when a tracker of theirs is made.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffrl.checks import nearest, require_count

TRACKERS = ("tensorboard", "wandb", "jsonl")
"""What `--track` takes; wandb also as wandb:PROJECT."""
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}
MOST_PICTURES = 16


class Tracker:
    """A `log(metrics, step)` with an end: `close()`, or a with block. Made by the functions of this module."""

    def __init__(self, write: Callable[[dict[str, Any], dict[str, Tensor], int], None], close: Callable[[], None]):
        self._write, self._close, self._open = write, close, True

    def __call__(self, metrics: Mapping[str, Any], step: int) -> None:
        """Note the metrics of iteration `step`. ValueError: a closed tracker, step < 0, a value that is neither a number nor
        pictures (named; nothing of the call is noted)."""
        if not self._open:
            raise ValueError(f"this tracker is closed: step {step} cannot be noted")
        step = require_count("step", step, low=0)
        numbers, pictures = split_metrics(metrics)
        self._write(numbers, pictures, step)

    def close(self) -> None:
        """Everything noted is written; a second call does nothing."""
        if self._open:
            self._open = False
            self._close()

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def split_metrics(metrics: Mapping[str, Any]) -> tuple[dict[str, int | float | None], dict[str, Tensor]]:
    """(numbers, pictures) of one call of `log`; a number that is not finite becomes None, one of numpy or torch a plain one.
    Pictures are " b h w 3". ValueError naming what is neither.

    >>> split_metrics({"loss": float("nan"), "seen": torch.tensor(3)})
    ({'loss': None, 'seen': 3}, {})
    """
    if not isinstance(metrics, Mapping):
        raise ValueError(f"metrics must be a mapping of names to values, got {metrics!r:.80}")
    numbers: dict[str, int | float | None] = {}
    pictures: dict[str, Tensor] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"names of metrics are strings, got {name!r}")
        if isinstance(value, Tensor) and value.dtype == torch.uint8 and value.ndim in (4, 5) and value.shape[-1] == 3:
            pictures[name] = (value if value.ndim == 4 else value[:, value.shape[1] // 2]).cpu()
            continue
        if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:  # a scalar of torch or numpy
            value = value.item()
        if value is not None and not isinstance(value, Real):
            told = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
            raise ValueError(f"metric {name!r} must be a number or pictures (uint8 b h w 3 or b f h w 3), got {told}")
        if value is None or not math.isfinite(value):
            numbers[name] = None
        else:
            numbers[name] = int(value) if isinstance(value, int) else float(value)
    return numbers, pictures


def require_tracker(kind: str) -> None:
    """ImportError with the command that installs what a tracker of this kind needs; ValueError: there is no such kind.

    >>> require_tracker("paper")
    Traceback (most recent call last):
    ValueError: --track must be one of tensorboard, wandb, jsonl, got 'paper'
    """
    kind = kind.partition(":")[0] if kind.startswith("wandb:") else kind
    if kind not in TRACKERS:
        raise ValueError(f"--track must be one of {', '.join(TRACKERS)}, got {kind!r}{nearest(kind, TRACKERS)}")
    if kind in PACKAGES and not _installed(PACKAGES[kind]):
        raise ImportError(f"tracking by {kind} needs {PACKAGES[kind]}: pip install 'diffrl[{kind}]'")


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # a module that was put aside: sys.modules[package] is None
        return False


def to_jsonl(path: str | Path) -> Tracker:
    """One JSON object per call, appended to the file: "step", then the numbers, null where there is none. Pictures are left
    out. Each line is there when the call returns. ValueError: the file cannot be opened.

    No example: writes a file.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115, closed by the tracker
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be written: {error.strerror or error}") from None

    def write(numbers: dict[str, Any], pictures: dict[str, Tensor], step: int) -> None:
        file.write(json.dumps({"step": step, **numbers}) + "\n")
        file.flush()

    return Tracker(write, file.close)


def to_tensorboard(folder: str | Path, *, start: int | None = None) -> Tracker:
    """TensorBoard's event files in `folder`: `tensorboard --logdir FOLDER`. Of pictures the first 16 of each name.

    start: the first step of a run that goes on: what an earlier writer noted at it or later is not shown any more.
    ImportError: tensorboard is not installed.

    No example: writes a folder.
    """
    require_tracker("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder), purge_step=start)

    def write(numbers: dict[str, Any], pictures: dict[str, Tensor], step: int) -> None:
        for name, value in numbers.items():
            if value is not None:
                writer.add_scalar(name, value, step)
        for name, images in pictures.items():
            writer.add_images(name, images[:MOST_PICTURES], step, dataformats="NHWC")

    return Tracker(write, writer.close)


def to_wandb(
    project: str,
    *,
    mode: str = "offline",
    folder: str | Path = ".",
    name: str | None = None,
    run_id: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Tracker:
    """A run of Weights & Biases. Offline by default: nothing leaves this machine until `wandb sync FOLDER/wandb/offline-run-...`.

    mode: "offline", "online" or "disabled". folder: where its own folder "wandb" is made. run_id: one that is given again
    goes on with that run once it is synced. config: e.g. the settings. ImportError: wandb is not installed. ValueError: another
    mode.

    No example: starts wandb.
    """
    if mode not in ("offline", "online", "disabled"):
        raise ValueError(f"mode must be offline, online or disabled, got {mode!r}")
    require_tracker("wandb")
    import wandb

    Path(folder).mkdir(parents=True, exist_ok=True)
    going_on: dict[str, Any] = {} if run_id is None else {"id": run_id, "resume": "allow"}
    run = wandb.init(
        project=project,
        mode=mode,  # type: ignore[arg-type]
        dir=str(folder),
        name=name,
        config=dict(config or {}),
        settings=wandb.Settings(silent=True, console="off"),
        **going_on,
    )

    def write(numbers: dict[str, Any], pictures: dict[str, Tensor], step: int) -> None:
        shown: dict[str, Any] = {n: value for n, value in numbers.items() if value is not None}
        for n, images in pictures.items():
            shown[n] = [wandb.Image(image.numpy()) for image in images[:MOST_PICTURES]]
        run.log(shown, step=step)

    return Tracker(write, run.finish)


def together(*logs: Callable[[Mapping[str, Any], int], None]) -> Tracker:
    """One `log` that tells all of them, in this order; plain functions (metrics, step) may be among them. `close` closes those
    that have one, the last first and all of them even where one raises. ValueError: one that is no function.

    >>> told = []
    >>> log = together(lambda metrics, step: told.append(step), lambda metrics, step: told.append(metrics["loss"]))
    >>> log({"loss": 0.5}, 3)
    >>> told
    [3, 0.5]
    """
    if wrong := [log for log in logs if not callable(log)]:
        raise ValueError(f"trackers are callables (metrics, step), got {wrong[0]!r}")

    def write(numbers: dict[str, Any], pictures: dict[str, Tensor], step: int) -> None:
        for log in logs:
            log({**numbers, **pictures}, step)

    def close() -> None:
        with contextlib.ExitStack() as closing:
            for log in logs:
                closing.callback(getattr(log, "close", lambda: None))

    return Tracker(write, close)


def in_folder(kind: str, folder: str | Path, *, start: int = 0, config: Mapping[str, Any] | None = None) -> Tracker:
    """The tracker of `--track KIND` inside a run's folder: tensorboard/, wandb/ or track.jsonl. Weights & Biases: the project is
    "diffrl" or what follows the colon, the run's name is the folder's, and it is offline unless WANDB_MODE says otherwise.
    ValueError, ImportError: as `require_tracker`.

    No example: writes a folder.
    """
    require_tracker(kind)
    folder = Path(folder)
    if kind == "tensorboard":
        return to_tensorboard(folder / "tensorboard", start=start or None)
    if kind == "jsonl":
        return to_jsonl(folder / "track.jsonl")
    project = kind.partition(":")[2] or "diffrl"
    mode = os.environ.get("WANDB_MODE", "offline")
    return to_wandb(project, mode=mode, folder=folder, name=folder.resolve().name, config=config)
