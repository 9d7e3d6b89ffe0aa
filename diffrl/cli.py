"""`diffrl` on the command line: train, doctor, plan, pretrain.

Exit codes: 0 done, 1 a doctor's check failed, a plan does not fit or a run failed after it had begun, 2 wrong usage or input,
130 interrupted (resumable). Words go to stdout, progress and errors to stderr; with --json stdout is for machines alone.
"""

import os

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # before torch: idle OpenMP threads sleep, not spin beside neighbours

import argparse
import contextlib
import json
import math
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from diffrl.cli_options import make_parser
from diffrl.cli_text import Parser, announcement, facts, outcome, painted, summary

__all__ = ["Parser", "main", "make_parser", "summary"]


class _Began(Exception):
    """A run that had begun came to this: its cause is the error."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code.

    No example: runs a command.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = "diffrl"
    with _streams(), _termination():
        return _called(name, words)


def _called(name: str, words: Sequence[str]) -> int:
    try:
        options = make_parser().parse_args(words)
        sys.path.insert(0, str(Path.cwd()))  # where --reward MODULE:FUNCTION looks first, as with `python -m`
        name = f"diffrl {options.command}"
        command = {"train": _train, "doctor": _doctor, "plan": _plan, "pretrain": _pretrain}[options.command]
        with _machines() if options.json else contextlib.nullcontext(sys.stdout) as machines:
            try:
                return command(options, words, machines)
            except (ValueError, ImportError, OSError, _Began) as error:
                if options.json and not isinstance(error, BrokenPipeError):
                    _tell(machines, {"error": _line(error)})
                raise
    except BrokenPipeError:  # `diffrl train --json | head`: the reader has gone
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, ImportError, OSError) as error:
        return _failed(name, error, 2)
    except _Began as begun:
        return _failed(name, begun, 1)
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


@contextlib.contextmanager
def _streams() -> Iterator[None]:
    """Where the shell has closed stdout or stderr (`>&-`), Python has None there: what is told goes nowhere."""
    with contextlib.ExitStack() as opened:
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:
                setattr(sys, name, opened.enter_context(open(os.devnull, "w")))
                opened.callback(setattr, sys, name, None)
        if getattr(sys.stdout, "errors", "") == "strict" and hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")  # a path that this locale cannot show stops nothing
        yield


@contextlib.contextmanager
def _termination() -> Iterator[None]:
    """SIGTERM is an interrupt, as Ctrl-C is; during the iterations `run` takes it over."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        old = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread
        old = None
    try:
        yield
    finally:
        if old is not None:
            signal.signal(signal.SIGTERM, old)


@contextlib.contextmanager
def _machines() -> Iterator[Any]:
    """stdout for the lines of --json alone: what a reward or a library prints goes to stderr, also from outside of Python."""
    told = sys.stdout
    with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as stack:
        try:
            real, other = told.fileno() == 1, sys.stderr.fileno()
        except (OSError, ValueError):  # a notebook's stream or a test's
            real, other = False, -1
        if real:
            told.flush()
            told = stack.enter_context(open(os.dup(1), "w", encoding="utf-8"))
            stack.callback(os.dup2, told.fileno(), 1)
            os.dup2(other, 1)
        yield told


def _failed(name: str, error: Exception, code: int) -> int:
    print(f"{name}: {painted('error:', 'red', sys.stderr)} {_line(error)}", file=sys.stderr)
    return code


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _tell(machines: Any, record: Any) -> None:
    """One line of JSON: numbers that are not finite are null."""
    machines.write(json.dumps(_plain(record)) + "\n")
    machines.flush()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _settings(options: argparse.Namespace) -> Any:
    """The settings of the options; those that the command does not have are at their defaults."""
    from diffrl.settings import Settings

    return Settings(**{f.name: getattr(options, f.name) for f in fields(Settings) if hasattr(options, f.name)})


def _bar(**numbers: Any) -> Any:
    """A progress bar as wide as the shell; where stderr is no terminal, a line every ten seconds at most."""
    from tqdm import tqdm

    how: dict[str, Any] = {"dynamic_ncols": True} if sys.stderr.isatty() else {"mininterval": 10.0}
    if os.environ.get("COLUMNS", "").isdigit():
        how |= {"dynamic_ncols": False, "ncols": int(os.environ["COLUMNS"])}
    return tqdm(desc="iteration", **how, **numbers)


# ---- train


class _Training:
    """What `train` tells of a run, in words or to machines, and whether the run has begun."""

    def __init__(self, folder: Path, options: argparse.Namespace, machines: Any):
        self.folder, self.options, self.machines, self.begun = folder, options, machines, False

    def announce(self, s: Any, bench: Any, start: int) -> None:
        """Before anything is done."""
        if self.options.json:
            from diffrl.folders import head_line

            plan = {"folder": str(self.folder), **facts(s, bench, start)}
            _tell(self.machines, {**json.loads(head_line(s)), "plan": plan})
        print(announcement(self.folder, s, bench, start, pictures=not self.options.no_pictures), flush=True)

    def tracker(self, folder: Path, s: Any, start: int) -> Any:
        """Once the folder is there: those of --track, and the lines of --json."""
        from dataclasses import asdict

        from diffrl.tracking import forgiving, in_folder, together

        self.begun = True
        with contextlib.ExitStack() as made:  # where the second cannot be made the first is closed
            config = asdict(s)
            logs: list[Any] = []
            for kind in dict.fromkeys(self.options.track):
                try:
                    log = in_folder(kind, folder, start=start, config=config)
                except Exception as error:  # such as a refusal of Weights & Biases to let one in
                    raise ValueError(f"--track {kind}: {error}") from error
                logs.append(made.enter_context(forgiving(log, f"--track {kind}")))
            made.pop_all()
        return together(*logs, *([self.line] if self.options.json else []))

    def line(self, row: Any, step: int) -> None:
        """One iteration, as metrics.jsonl has it."""
        _tell(self.machines, {name: value for name, value in row.items() if not hasattr(value, "shape")})

    def progress(self, **numbers: Any) -> Any:
        """Everything has been accepted: what fails from here on had begun."""
        self.begun = True
        return None if self.options.quiet else _bar(**numbers)

    def summed_up(self, rows: Sequence[dict[str, Any]], **more: Any) -> None:
        """At the end, whichever way it came."""
        if self.options.json:
            _tell(self.machines, {"summary": {**outcome(self.folder, rows), **more}})

    def failure(self, error: Exception) -> str:
        """What went wrong, what helps, and how to go on."""
        text = str(error)
        if _out_of_memory(error):
            text += "; less memory: --micro-batch, --rollout-chunk, --gradient-checkpointing, --encoders-off, --vae-off"
        if (self.folder / "checkpoint" / "checkpoint.json").is_file():
            text += f"; go on from the last checkpoint with: diffrl train --resume {self.folder}"
        elif self.begun and (self.folder / "metrics.jsonl").is_file():
            text += f"; begin again with: diffrl train --resume {self.folder}"
        return text


def _out_of_memory(error: Exception) -> bool:
    """Of an accelerator, of Python, or of torch on the CPU, which has no name of its own for it."""
    cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return cpu or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


WITH_RESUME = {"--resume", "--iterations", "--no-pictures", "--quiet", "--json", "--track"}


def _resumed(options: argparse.Namespace, words: Sequence[str]) -> int | None:
    """The new number of iterations of a run that goes on. ValueError: an option that it reads from its folder."""
    given = [w.split("=")[0] for w in words[1:] if w.startswith("--")]
    if other := sorted(set(given) - WITH_RESUME):
        raise ValueError(f"--resume reads its settings from {options.resume}: {', '.join(other)} cannot be given")
    return options.iterations if "--iterations" in given else None


def _train(options: argparse.Namespace, words: Sequence[str], machines: Any) -> int:
    from diffrl.ranks import launched, leave_group
    from diffrl.run import Interrupted, read_metrics, run
    from diffrl.tracking import require_tracker

    for name in ("output", "resume"):
        if getattr(options, name) == "":  # an unset variable of a shell is not the default folder
            raise ValueError(f"--{name} '' is empty")
    folder = Path(options.resume or options.output or f"runs/{options.task}-{options.algorithm}")
    resume: dict[str, Any] = {}
    if options.resume is not None:
        resume = {"resume": True, "iterations": _resumed(options, words)}
    for kind in options.track:
        require_tracker(kind)
    if len({kind.partition(":")[0] for kind in options.track}) < len(set(options.track)):
        raise ValueError(f"--track wandb has one project, got {', '.join(options.track)}")
    ranks, told = launched(), _Training(folder, options, machines)
    how: dict[str, Any] = {"progress": told.progress, "announce": told.announce, "pictures": not options.no_pictures}
    how |= {"tracker": told.tracker, "ranks": ranks}
    settings = None if resume else _settings(options)
    try:
        rows = run(folder, settings, overwrite=options.overwrite, **resume, **how)
    except Interrupted as stop:
        print(f"\n{stop}" * (ranks.rank == 0), file=sys.stderr)
        if ranks.rank == 0 and options.json:
            told.summed_up(read_metrics(folder)[1], interrupted=True)
        leave_group()  # all stop after the same iteration
        return 130
    except KeyboardInterrupt:  # outside the iterations: while the model loads, or while pictures are drawn
        if not (folder / "metrics.jsonl").is_file():
            raise
        print(f"\ninterrupted; go on with: diffrl train --resume {folder}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:
        if _out_of_memory(error) or (told.begun and isinstance(error, ValueError | ImportError | OSError)):
            raise _Began(told.failure(error)) from error
        raise
    if ranks.rank == 0:
        print(summary(folder, rows))
        told.summed_up(rows, interrupted=False)
    leave_group()
    return 0


# ---- doctor, plan, pretrain


def _doctor(options: argparse.Namespace, words: Sequence[str], machines: Any) -> int:
    import torch

    from diffrl.loop import diagnose
    from diffrl.settings import build, check_settings

    settings = replace(
        _settings(options), prompts_per_iteration=1
    )  # the doctor takes up to eight, however many there are
    check_settings(settings)
    torch.set_num_threads(settings.threads)
    bench = build(settings)
    report = diagnose(
        bench.model,
        bench.algorithm,
        bench.prompts,
        bench.reward,
        images=bench.images,
        micro_batch=settings.micro_batch,
        rollout_chunk=settings.rollout_chunk,
        group_size=settings.group_size,
        steps=settings.steps,
        seed=settings.seed,
        learning_rate=settings.learning_rate,
    )
    if options.json:
        _tell(machines, {"ok": report.ok, "checks": [check._asdict() for check in report.checks]})
    for line in str(report).splitlines():
        mark, rest = line[:4], line[4:]
        print(painted(mark, {"ok  ": "green", "FAIL": "red"}[mark], sys.stdout) + rest if mark != "?   " else line)
    return 0 if report.ok else 1


def _plan(options: argparse.Namespace, words: Sequence[str], machines: Any) -> int:
    import torch

    from diffrl.memory import empty_pipeline, plan, plan_text

    lines = plan(
        empty_pipeline(options.model),
        height=options.height,
        width=options.width,
        frames=options.frames,
        rank=options.lora_rank or None,
        samples=options.group_size * options.prompts_per_iteration,
        kept=options.kept_steps,
        copies=options.copies,
        dtype=getattr(torch, options.dtype) if options.lora_rank else torch.float32,
        encoders_on_device=not options.encoders_off,
        vae_on_device=not options.vae_off,
    )
    text = plan_text(lines, gpu_memory=options.gpu_memory)
    needed = sum(line.bytes for line in lines if line.on_device)
    fits = None if options.gpu_memory is None else needed < 1e9 * options.gpu_memory
    if options.json:
        there = None if options.gpu_memory is None else 1e9 * options.gpu_memory
        told = {
            "lines": [line._asdict() for line in lines],
            "bytes_on_device": needed,
            "gpu_bytes": there,
            "fits": fits,
        }
        _tell(machines, told)
    print(text)
    return 1 if fits is False else 0


def _pretrain(options: argparse.Namespace, words: Sequence[str], machines: Any) -> int:
    from diffrl.tasks.pretrain import pretrain_digits

    folder = Path(options.output)
    if folder.exists():
        raise ValueError(f"--output {options.output!r} exists")
    pretrain_digits(options.output, seed=options.seed)
    if options.json:
        files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        _tell(machines, {"output": str(folder), "task": options.task, "seed": options.seed, "files": files})
    return 0


if __name__ == "__main__":
    sys.exit(main())
