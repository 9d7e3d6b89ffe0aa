"""A run's folder: whether a new run may have it, its metrics.jsonl, what its input files held, and who is writing in it."""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from diffrl.settings import Settings, read_prompts
from diffrl.version import __version__


def refuse_folder(folder: Path, *, overwrite: bool) -> None:
    """ValueError where a new run must not go: a folder that is not empty, unless it is a run to be overwritten.

    No example: looks at a folder.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if not overwrite:
            raise ValueError(
                f"--output {str(folder)!r} exists: resume it (--resume), or choose another, or --overwrite"
            )
        if not (folder / "metrics.jsonl").is_file():
            raise ValueError(f"--output {str(folder)!r} is not a diffrl run: not overwritten")


def prepare_folder(folder: Path, s: Settings, *, overwrite: bool) -> None:
    """Make the run's folder with its settings line, whole or not at all. ValueError: it exists, or cannot be written.

    No example: makes a folder.
    """
    refuse_folder(folder, overwrite=overwrite)
    head = head_line(s)
    temporary = folder.parent / f".{folder.name}.tmp-{os.getpid()}"
    try:
        temporary.mkdir(parents=True)
        (temporary / "metrics.jsonl").write_text(head)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise ValueError(f"--output {str(folder)!r} cannot be written: {error.strerror or error}") from None


def read_metrics(folder: str | Path) -> tuple[Settings, list[dict[str, Any]]]:
    """(settings, rows) of a run's metrics.jsonl; a last line cut off by a kill is dropped. ValueError: not a run.

    >>> read_metrics("absent")
    Traceback (most recent call last):
    ValueError: 'absent' is not a diffrl run: it has no metrics.jsonl
    """
    path = Path(folder) / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{str(folder)!r} is not a diffrl run: it has no metrics.jsonl")
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict):
            break
        rows.append(row)
    if (
        not rows
        or not isinstance(rows[0].get("settings", {}), dict)
        or set(rows[0].get("settings", {})) != {f.name for f in fields(Settings)}
    ):
        raise ValueError(f"{str(path)!r} does not start with the settings of a diffrl run of this version")
    return Settings(**rows[0]["settings"]), rows[1:]


def json_line(row: Mapping[str, Any]) -> str:
    """A row as a line of metrics.jsonl: what is not finite is null.

    >>> json_line({"iteration": 3, "reward/mean": 0.5}).strip()
    '{"iteration": 3, "reward/mean": 0.5}'
    """
    return json.dumps({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}) + "\n"


def file_digests(s: Settings) -> dict[str, dict[str, Any]]:
    """What --prompts and --images held: {"prompts": {"lines": n, "sha256": ...}}, of those that are given. Prompts count as they are
    read, so that an empty line more changes nothing; of pictures the list and every file in it. ValueError: a file that is gone.

    No example: reads files.
    """
    found: dict[str, dict[str, Any]] = {}
    if s.prompts is not None:
        lines = read_prompts(s.prompts)
        found["prompts"] = {"lines": len(lines), "sha256": hashlib.sha256("\n".join(lines).encode()).hexdigest()}
    if s.images is not None:
        digest, listed = hashlib.sha256(), Path(s.images)
        try:
            names = [line.strip() for line in listed.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
            for name in names:
                digest.update(name.encode() + hashlib.sha256((listed.parent / name).read_bytes()).digest())
        except OSError as error:
            raise ValueError(f"--images {s.images!r}: {error.filename!r} cannot be read: {error.strerror}") from None
        found["images"] = {"lines": len(names), "sha256": digest.hexdigest()}
    return found


def require_same_files(folder: Path, s: Settings) -> None:
    """ValueError where --prompts or --images holds something else than when the run began, naming the file and the run, and
    what each says. A run that noted nothing of them passes.

    No example: reads files.
    """
    with (folder / "metrics.jsonl").open(encoding="utf-8", errors="replace") as file:
        noted = json.loads(file.readline()).get("files", {})
    for name, now in file_digests(s).items():
        then = noted.get(name, now)
        if then != now:
            told = [f"{d.get('lines')} lines, sha256 {str(d.get('sha256'))[:12]}" for d in (then, now)]
            raise ValueError(
                f"--{name} {getattr(s, name)!r} was changed since the run in {str(folder)!r} began (then {told[0]}; now "
                f"{told[1]}): put it back, or start a new run"
            )


def head_line(s: Settings) -> str:
    """The first line of metrics.jsonl: version, settings, and what the input files held. ValueError: as `file_digests`.

    No example: reads files.
    """
    files = file_digests(s)
    return json.dumps({"diffrl": __version__, "settings": asdict(s), **({"files": files} if files else {})}) + "\n"


@contextlib.contextmanager
def held_alone(folder: Path) -> Iterator[None]:
    """Hold an existing run's folder: two runs in one would leave metrics of one and a checkpoint of the other. The lock is
    the operating system's, so that a killed process lets go. ValueError: another process holds it.

    No example: locks a folder.
    """
    if not folder.is_dir():
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is training in {str(folder)!r}") from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(handle)
