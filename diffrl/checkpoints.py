"""Checkpoints: everything the next step depends on, written so that an interruption at any moment leaves a whole one.

FOLDER/state-NNNNNN-DIGEST.safetensors holds the tensors (live params, behaviour params where they differ, optimizer, generators);
FOLDER/checkpoint.json names it, with its digest, and is renamed into place last. No pickle.
"""

import hashlib
import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from diffrl.checks import require_count, require_same_keys
from diffrl.types import Params

FORMAT = "diffrl-checkpoint-1"


class Checkpoint(NamedTuple):
    """What `load_checkpoint` returns. behaviour is None where the live params roll out (on-policy algorithms)."""

    params: dict[str, Tensor]
    behaviour: dict[str, Tensor] | None
    optimizer: dict[str, Any]
    rng: dict[str, Any]
    iteration: int
    settings: dict[str, Any]


def save_checkpoint(
    folder: str | Path,
    *,
    params: Params,
    optimizer: torch.optim.Optimizer,
    iteration: int,
    behaviour: Params | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint into `folder` (made if missing) and drop the one it replaces; returns checkpoint.json's path.

    iteration: the next one to run. behaviour: None, or the live mapping itself, means the live params. Changes nothing
    but the folder: no generator, parameter or optimizer state is touched. ValueError, nothing written: iteration < 0,
    behaviour of other names or shapes, settings or optimizer options that are not JSON.
    No example: see `load_checkpoint`.
    """
    folder, iteration = Path(folder), require_count("iteration", iteration, low=0)
    if behaviour is not None:
        require_same_keys(params=params, behaviour=behaviour)
    tensors = {f"params.{name}": p for name, p in params.items()}
    if behaviour is not None and any(behaviour[name] is not p for name, p in params.items()):
        tensors |= {f"behaviour.{name}": p for name, p in behaviour.items()}
    state = optimizer.state_dict()
    plain: dict[str, dict[str, Any]] = {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{name}"] = value
            else:
                plain.setdefault(str(index), {})[name] = value
    try:
        json.dumps([dict(settings or {}), state["param_groups"], plain])
    except TypeError as error:
        raise ValueError(f"settings and optimizer options must be JSON: {error}") from None
    folder.mkdir(parents=True, exist_ok=True)
    tensors["rng.torch"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors |= {f"rng.cuda.{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}

    name, digest = _write_tensors(folder, iteration, tensors)
    record = {
        "format": FORMAT,
        "iteration": iteration,
        "state": name,
        "sha256": digest,
        "optimizer": {"param_groups": state["param_groups"], "plain": plain},
        "rng": _generators(),
        "settings": dict(settings or {}),
    }
    pointer = folder / "checkpoint.json"
    temporary = folder / ".checkpoint.json.tmp"
    temporary.write_text(json.dumps(record))
    _sync_and_digest(temporary)
    os.replace(temporary, pointer)
    for old in folder.glob("state-*.safetensors"):
        if old.name != name:
            old.unlink(missing_ok=True)
    return pointer


def _generators() -> dict[str, list]:
    """The states of Python's and numpy's global generators, as JSON has them."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [legacy[0], legacy[1].tolist(), *[v.item() if hasattr(v, "item") else v for v in legacy[2:]]],
    }


def _write_tensors(folder: Path, iteration: int, tensors: Mapping[str, Tensor]) -> tuple[str, str]:
    """(file name, digest) of the tensors, written whole or not at all. OSError: the folder cannot be written."""
    temporary = folder / ".state.safetensors.tmp"
    try:
        save_file({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, temporary)
    except SafetensorError as error:  # how it reports a full disk
        temporary.unlink(missing_ok=True)
        raise OSError(f"{folder} cannot be written: {error}") from None
    digest = _sync_and_digest(temporary)
    name = f"state-{iteration:06d}-{digest[:12]}.safetensors"  # never over the file that the pointer still names
    os.replace(temporary, folder / name)
    return name, digest


def _sync_and_digest(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_checkpoint(folder: str | Path) -> Checkpoint:
    """Read the checkpoint in `folder`. ValueError naming the file: missing, truncated, changed, or no diffrl checkpoint.

    >>> import tempfile
    >>> params = {"w": torch.ones(2, requires_grad=True)}
    >>> optimizer = torch.optim.SGD(params.values(), lr=0.1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save_checkpoint(folder, params=params, optimizer=optimizer, iteration=3)
    ...     checkpoint = load_checkpoint(folder)
    >>> checkpoint.iteration, checkpoint.params
    (3, {'w': tensor([1., 1.])})
    """
    pointer = Path(folder) / "checkpoint.json"
    if not pointer.is_file():
        raise ValueError(f"no checkpoint: {pointer} does not exist")
    try:
        record = json.loads(pointer.read_text())
        known = record["format"] == FORMAT
        state, digest = Path(folder) / record["state"], record["sha256"]
        kinds = {"optimizer": dict, "rng": dict, "iteration": int, "settings": dict}
        absent = [name for name, kind in kinds.items() if not isinstance(record.get(name), kind)]
        if not absent:
            absent = [f"optimizer.{name}" for name in ("plain", "param_groups") if name not in record["optimizer"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{pointer} is not a diffrl checkpoint ({type(error).__name__}: {error})") from None
    if not known:
        raise ValueError(f"{pointer} has format {record['format']!r}, this version reads {FORMAT!r}")
    if absent:
        raise ValueError(f"{pointer} is not a diffrl checkpoint (it lacks {', '.join(absent)})")
    if not state.is_file():
        raise ValueError(f"{pointer} names {state.name}, which is missing")
    if _sync_and_digest(state) != digest:
        raise ValueError(f"{state} is truncated or was changed: its digest is not the one in {pointer.name}")
    try:
        tensors = load_file(state)
    except SafetensorError as error:
        raise ValueError(f"{state} is no safetensors file ({error})") from None
    optimizer: dict[int, dict[str, Any]] = {
        int(i): dict(entries) for i, entries in record["optimizer"]["plain"].items()
    }
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, index, name = key.split(".", 2)
            optimizer.setdefault(int(index), {})[name] = value
    groups = [{k: tuple(v) if k == "betas" else v for k, v in g.items()} for g in record["optimizer"]["param_groups"]]
    behaviour = _under("behaviour.", tensors)
    return Checkpoint(
        params=_under("params.", tensors),
        behaviour=behaviour or None,
        optimizer={"state": optimizer, "param_groups": groups},
        rng={**record["rng"], **_under("rng.", tensors)},
        iteration=record["iteration"],
        settings=record["settings"],
    )


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def restore_checkpoint(checkpoint: Checkpoint, *, params: Params, optimizer: torch.optim.Optimizer) -> Params | None:
    """Load values into the live params and the optimizer in place, and set the global generators; returns the behaviour
    params on the params' devices, None where they are the live ones. ValueError, nothing changed: names or shapes that
    differ, an optimizer of another kind or with other parameter groups. No example: it sets the global generators.
    """
    require_same_keys(checkpoint=checkpoint.params, model=params)
    saved, groups = checkpoint.optimizer["param_groups"], optimizer.state_dict()["param_groups"]
    if [len(g["params"]) for g in saved] != [len(g["params"]) for g in groups]:
        raise ValueError(
            f"the checkpoint's optimizer has parameter groups of {[len(g['params']) for g in saved]} tensors, "
            f"this one of {[len(g['params']) for g in groups]}"
        )
    options = (
        {name for g in groups for name in g} - {name for g in saved for name in g} - {"initial_lr"}
    )  # a scheduler's
    if options:
        raise ValueError(
            f"the checkpoint is of another optimizer: it has no {sorted(options)} for {type(optimizer).__name__}"
        )
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(checkpoint.params[name])
    optimizer.load_state_dict(checkpoint.optimizer)
    rng = checkpoint.rng
    torch.set_rng_state(rng["torch"])
    cuda = [rng[name] for name in sorted(rng) if name.startswith("cuda.")]
    if cuda and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(cuda)
    random.setstate((rng["python"][0], tuple(rng["python"][1]), rng["python"][2]))
    np.random.set_state(tuple(rng["numpy"]))
    if checkpoint.behaviour is None:
        return None
    return {name: value.to(params[name].device) for name, value in checkpoint.behaviour.items()}
