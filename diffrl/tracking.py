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
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffrl.checks import require_count
from diffrl.numbers import nearest

TRACKERS = ("tensorboard", "wandb", "jsonl")
"""What `--track` takes; wandb also as wandb:PROJECT."""
WANDB_MODES = ("offline", "online", "disabled")
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
            if not value.numel():
                raise ValueError(f"metric {name!r}: there are no pixels in pictures of shape {tuple(value.shape)}")
            pictures[name] = (value if value.ndim == 4 else value[:, value.shape[1] // 2]).cpu()
            continue
        if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:  # a scalar of torch or numpy
            value = value.item()
        if value is not None and not isinstance(value, Real):
            told = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
            raise ValueError(f"metric {name!r} must be a number or pictures (uint8 b h w 3 or b f h w 3), got {told}")
        try:
            finite = value is not None and math.isfinite(value)
        except OverflowError:
            raise ValueError(f"metric {name!r} is an integer beyond every float") from None
        if not finite:
            numbers[name] = None
        else:
            numbers[name] = int(value) if isinstance(value, int) else float(value)  # type: ignore[arg-type]
    return numbers, pictures


def require_tracker(kind: str) -> None:
    """ImportError with the command that installs what a tracker of this kind needs; ValueError: there is no such kind, or
    Weights & Biases would refuse its project's name or WANDB_MODE.

    >>> require_tracker("paper")
    Traceback (most recent call last):
    ValueError: --track must be one of tensorboard, wandb, jsonl, got 'paper'
    """
    kind, _, project = kind.partition(":") if kind.startswith("wandb:") else (kind, "", "")
    if kind not in TRACKERS:
        raise ValueError(f"--track must be one of {', '.join(TRACKERS)}, got {kind!r}{nearest(kind, TRACKERS)}")
    _require_package(kind)
    if kind == "wandb":
        if len(project) > 128 or set(project) & set("/\\#?%:"):
            raise ValueError(
                f"--track wandb: a project's name has at most 128 characters, none of /\\#?%:, got {project!r}"
            )
        _require_mode(_wandb_mode(), "WANDB_MODE")


def _require_package(kind: str) -> None:
    if kind in PACKAGES and not _installed(PACKAGES[kind]):
        raise ImportError(f"tracking by {kind} needs {PACKAGES[kind]}: pip install 'diffrl[{kind}]'")


def _require_mode(mode: str, name: str) -> None:
    if mode not in WANDB_MODES:
        raise ValueError(f"{name} must be offline, online or disabled, got {mode!r}")


def _wandb_mode() -> str:
    return os.environ.get("WANDB_MODE") or "offline"


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # a module that was put aside: sys.modules[package] is None
        return False


@contextlib.contextmanager
def _written(path: str | Path) -> Iterator[None]:
    """An OSError while a tracker is made is a ValueError that names its file or folder."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be written: {error.strerror or error}") from None


def to_jsonl(path: str | Path) -> Tracker:
    """One JSON object per call, appended to the file: "step", then the numbers, null where there is none. Pictures are left
    out. Each line is there when the call returns. ValueError: the file cannot be opened.

    No example: writes a file.
    """
    with _written(path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115, closed by the tracker

    def write(numbers: dict[str, Any], pictures: dict[str, Tensor], step: int) -> None:
        file.write(json.dumps({"step": step, **numbers}) + "\n")
        file.flush()

    return Tracker(write, file.close)


def to_tensorboard(folder: str | Path, *, start: int | None = None) -> Tracker:
    """TensorBoard's event files in `folder`: `tensorboard --logdir FOLDER`. Of pictures the first 16 of each name.

    start: the first step of a run that goes on: what an earlier writer noted at it or later is not shown any more.
    ImportError: tensorboard is not installed. ValueError: the folder cannot be written.

    No example: writes a folder.
    """
    _require_package("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with _written(folder):
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
    mode, a folder that cannot be written.

    No example: starts wandb.
    """
    _require_mode(mode, "mode")
    _require_package("wandb")
    import wandb

    with _written(folder):
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


def forgiving(log: Callable[[Mapping[str, Any], int], None], name: str) -> Tracker:
    """`log`, but its first error is a warning that names it, and the last it is told: a full disk or a lost connection of a
    tracker does not end days of training, whose metrics.jsonl has every row. ValueError: one that is no function.

    >>> log = forgiving(lambda metrics, step: 1 / 0, "mine")
    >>> with warnings.catch_warnings(record=True) as told:
    ...     log({"loss": 0.5}, 3)
    >>> str(told[0].message)
    'mine failed and is told nothing more: ZeroDivisionError: division by zero'
    """
    if not callable(log):
        raise ValueError(f"trackers are callables (metrics, step), got {log!r}")
    failed: list[Exception] = []

    def attempt(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            if not failed:
                told = f"{name} failed and is told nothing more: {type(error).__name__}: {error}"
                warnings.warn(told, stacklevel=2)
            failed.append(error)

    def write(numbers: dict[str, Any], pictures: dict[str, Tensor], step: int) -> None:
        if not failed:
            attempt(lambda: log({**numbers, **pictures}, step))

    return Tracker(write, lambda: attempt(getattr(log, "close", lambda: None)))


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
    return to_wandb(project, mode=_wandb_mode(), folder=folder, name=folder.resolve().name, config=config)
