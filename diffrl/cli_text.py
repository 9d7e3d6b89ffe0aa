"""What the command line says: help that fits the shell, refusals with the nearest word, and what a run is going to do.

Widths are those of COLUMNS or of the terminal; colour is for terminals alone, and NO_COLOR switches it off.
"""

import argparse
import math
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from diffrl.numbers import nearest

COLOURS = {"red": 31, "green": 32}
NARROWEST, LABEL = 40, 12


def width() -> int:
    """Columns of text: COLUMNS, or the terminal's, or 100 where there is none; at least 40.

    No example: a terminal's.
    """
    return max(NARROWEST, shutil.get_terminal_size((100, 24)).columns)


def painted(text: str, colour: str, stream: Any) -> str:
    """The text in "red" or "green" where the stream is a terminal that shows it and NO_COLOR (no-color.org) is unset or empty.

    >>> painted("done", "green", None)  # not a terminal
    'done'
    """
    shown = getattr(stream, "isatty", lambda: False)() and os.environ.get("TERM") != "dumb"
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m" if shown and not os.environ.get("NO_COLOR") else text


class Formatter(argparse.HelpFormatter):
    """Paragraphs are filled; an indented line is a command, broken with backslashes, or has a hanging indent."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=width() - 2)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(_fitted(line, width) for line in text.splitlines())


def _fitted(line: str, width: int) -> str:
    if len(line) <= width or not line.startswith("  "):
        return textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
    command = re.match(r"  (\w+=\S+ )*(diffrl|torchrun|python) ", line)
    deep = "      " if command else " " * (len(line) - len(re.sub(r"^  \S+ +", "", line)))
    how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": deep}
    lines = textwrap.wrap(line, width - 2 * bool(command), **how)
    return (" \\\n" if command else "\n").join(lines)


class Parser(argparse.ArgumentParser):
    """One clear line on bad input, with the nearest known word, and exit code 2. elsewhere: options of other commands, and what
    to say of them here. fill: adds the options once words are to be parsed, so that a command costs what it imports alone."""

    def __init__(
        self,
        *arguments: Any,
        elsewhere: Mapping[str, str] | None = None,
        fill: Callable[[Any], None] | None = None,
        **options: Any,
    ):
        super().__init__(*arguments, **{"formatter_class": Formatter, "allow_abbrev": False, **options})
        self.elsewhere, self.given, self.fill = dict(elsewhere or {}), list[str](), fill

    def parse_known_args(self, args=None, namespace=None) -> Any:
        """Unknown options are this parser's error: the command's, which knows the nearest one, not the top parser's."""
        self.given = list(args or ())
        if self.fill is not None:
            fill, self.fill = self.fill, None
            fill(self)
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and one line on stderr."""
        import sys

        known = [option for action in self._actions for option in action.option_strings]
        words = message.replace("'", " ").split()
        words += [] if "unrecognized" in message else [w for w in self.given if w.startswith("--")]
        for word in dict.fromkeys(w.split("=")[0].rstrip(":") for w in words):
            if word.startswith("--") and word not in known:
                message += f" ({self.elsewhere[word]})" if word in self.elsewhere else _near_option(word, known)
        if choice := re.search(r"invalid choice: '([^']*)'", message):
            named = [str(c) for action in self._actions for c in (action.choices or ())]
            message += nearest(choice.group(1), named)
        self.exit(2, f"{self.prog}: {painted('error:', 'red', sys.stderr)} {message}\n")


def _near_option(word: str, known: Sequence[str]) -> str:
    """As `nearest`, of the words behind the dashes, which alone would make any two options alike."""
    bare = {option.lstrip("-").replace("-", "_"): option for option in known if option.startswith("--")}
    found = re.search(r"'(.*)'", nearest(word.lstrip("-"), bare))
    return f" (did you mean {bare[found.group(1)]}?)" if found else ""


# ---- what a run is going to do


def piece(function: Any) -> str:
    """The name a reader knows a piece of an algorithm by: of a closure, the function that made it.

    >>> piece(partial(max, 1)), piece(Formatter)
    ('max', 'Formatter')
    """
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__name__).split(".<locals>")[0]


def size(count: float) -> str:
    """Bytes as one reads them, in powers of 1000.

    >>> size(0), size(5300), size(2.5e9)
    ('0 B', '5.3 kB', '2.5 GB')
    """
    power = min(4, int(math.log10(count) // 3)) if count >= 1 else 0
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


ROW_BYTES, CHECKPOINT_BYTES = 1000, 25_000
"""Of a line of metrics.jsonl, roughly: 30 to 60 names; of a checkpoint apart from its params: names and generators."""


def facts(s: Any, bench: Any, start: int = 0) -> dict[str, Any]:
    """What a run of these settings on this bench will do, counted: see `announcement`, which words it, and `--json`.

    No example: needs a pipeline.
    """
    from diffrl.algorithms import live
    from diffrl.run import evaluations
    from diffrl.settings import make_algorithm
    from diffrl.stages import trained_timesteps

    module, algorithm = bench.model.module, bench.algorithm
    inner = make_algorithm(s) if s.draft != "none" else algorithm
    trained = sum(p.numel() for p in bench.model.params.values())
    every = trained if module is None else sum(p.numel() for p in module.parameters())
    drafted = {} if s.draft == "none" else {"draft": s.draft, "pool": s.pool, "draft_steps": s.draft_steps}
    samples = s.prompts_per_iteration * s.group_size
    copies = 3 if algorithm.behaviour is live else 4  # themselves, Adam's two moments, those that roll out
    return {
        "model": "toy" if module is None else type(module).__name__,
        "parameters": every,
        "trained_parameters": trained,
        "trained_tensors": len(bench.model.params),
        "latent_shape": list(bench.model.latent_shape()),
        "pieces": {name: piece(getattr(inner, name)) for name in ("collect", "credit", "objective", "behaviour")},
        **drafted,
        "trained_steps": trained_timesteps(inner, steps=s.steps),
        "prompts": len(bench.prompts),
        "samples_per_iteration": samples,
        "samples": samples * (s.iterations - start),
        "evaluations": evaluations(s, start),
        "samples_per_evaluation": len(bench.prompts) * s.eval_samples,
        "optimizer_steps_per_iteration": algorithm.updates,
        "optimizer_steps": algorithm.updates * (s.iterations - start),
        "bytes": {
            "metrics.jsonl": ROW_BYTES * (s.iterations + 1),
            "checkpoint": 4 * trained * copies + CHECKPOINT_BYTES,
            "adapter": 4 * trained if bench.model.export is not None else 0,
        },
        "start": start,
    }


def announcement(folder: Path, s: Any, bench: Any, start: int = 0, *, pictures: bool = True) -> str:
    """What a run is going to do, before it does it: a label and a sentence each, as wide as the shell.

    No example: needs a pipeline.
    """
    f = facts(s, bench, start)
    share = f"{f['trained_parameters'] / max(f['parameters'], 1):.2%}"
    how = (
        f"LoRA r {s.lora_rank}, alpha {s.lora_alpha}" if s.lora_rank and bench.model.module is not None else "all of it"
    )
    pieces, off = f["pieces"], [n for n, yes in (("encoders", s.encoders_off), ("VAE", s.vae_off)) if yes]
    steps = f"{f['optimizer_steps_per_iteration']} per iteration, {f['optimizer_steps']:,} in all"
    left = s.iterations - start
    goes_on = f"{left} of {s.iterations}, from {start} on" if start else f"{s.iterations}"
    rows = [
        (
            "model",
            f"{s.model or s.task}: {f['model']}, {f['parameters']:,} parameters, latents {_times(f['latent_shape'])}, on {s.device}",
        ),
        ("trained", f"{how}: {f['trained_parameters']:,} parameters ({share}) in {f['trained_tensors']} tensors"),
        (
            "algorithm",
            f"{s.algorithm}: {', '.join(f'{n} {p}' for n, p in pieces.items())}; {f['trained_steps']} of {s.steps} steps of a sample trained",
        ),
    ]
    if s.draft != "none":
        rows.append(
            (
                "draft",
                f"{s.draft}: {s.pool} seeds per prompt in {s.draft_steps} steps, of which {s.group_size} are trained on",
            )
        )
    rows += [
        ("reward", s.reward + (f"; held out: {s.held_out_reward}" if s.held_out_reward else "")),
        (
            "prompts",
            f"{f['prompts']:,}, {s.prompts_per_iteration} per iteration{f' ({s.prompts})' if s.prompts else ''}",
        ),
        ("sampling", _sampling_text(s, bench.options)),
        (
            "samples",
            f"{s.prompts_per_iteration} x {s.group_size} = {f['samples_per_iteration']:,} per iteration in {s.steps} steps, {f['samples']:,} in all",
        ),
        ("iterations", f"{goes_on}; AdamW, learning rate {s.learning_rate:g}, optimizer steps: {steps}"),
        (
            "evaluation",
            f"{f['evaluations']} times {f['samples_per_evaluation']:,} samples: first, last and every {s.eval_every} iterations",
        ),
        ("engine", _engine_text(s, off)),
        ("writes", f"{folder}: {_written(s, f['bytes'], pictures)}"),
    ]
    return "\n".join(_row(label, text) for label, text in rows)


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _row(label: str, text: str) -> str:
    how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": " " * LABEL}
    return textwrap.fill(f"{label:<{LABEL}}{text}", width(), **how)


def _sampling_text(s: Any, options: Mapping[str, Any]) -> str:
    """What a picture depends on beside its prompt and seed, and export must be sampled with."""
    own = "the pipeline's own"
    pixels = " x ".join(str(options[name]) for name in ("height", "width") if name in options) or own
    frames = f", {options['frames']} frames" if "frames" in options else ""
    guidance, length = (options.get(name, own) for name in ("guidance_scale", "max_sequence_length"))
    return f"{pixels} pixels{frames}, {s.steps} steps, guidance {guidance}, text tokens {length}"


def _engine_text(s: Any, off: Sequence[str]) -> str:
    parts = [s.engine]
    if s.engine != "loop":
        parts.append(f"{s.fragments} fragments, {s.stale} stale")
    if s.engine == "ray":
        parts.append(
            f"{s.generators} generators, {s.trainers} trainers (Ray and their models start first: half a minute or more)"
        )
    parts.append(f"{s.threads} threads, seed {s.seed}")
    parts += [
        f"{name.replace('_', ' ')} {value}"
        for name in ("micro_batch", "pack", "rollout_chunk")
        if (value := getattr(s, name))
    ]
    parts += ["gradient checkpointing"] if s.gradient_checkpointing else []
    return ", ".join([*parts, *(f"{name} off the device" for name in off)])


def _written(s: Any, counts: Mapping[str, int], pictures: bool) -> str:
    names = {
        "metrics.jsonl": "metrics.jsonl",
        "checkpoint": f"checkpoint/ every {s.checkpoint_every}",
        "adapter": "adapter/",
    }
    told = [f"{names[name]} (about {size(count)})" for name, count in counts.items() if count]
    drawn = ["curve.png", "before_after.png"] + (["drafts.png", "ranks.png"] if s.draft != "none" else [])
    return ", ".join(told + (drawn if pictures else []))


# ---- what a run came to


def outcome(folder: Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """First and last evaluations, iterations, seconds and files of a run, by name.

    No example: reads a run's folder.
    """
    told: dict[str, Any] = {}
    for name in ("eval/exact_match", "eval/reward", "eval/held_out_reward"):
        values = [row[name] for row in rows if "eval/reward" in row and row.get(name) is not None]
        values = [row[base] for row in rows[:1] if (base := name.replace("eval/", "base/")) in row] + values
        if values:  # a run that was interrupted may have but one
            told[name] = [values[0], values[-1] if len(values) > 1 else None]
    whole = [f"seconds/{part}" for part in ("rollout", "reward", "update", "evaluation")]  # others are parts of these
    seconds = sum(row.get(name) or 0.0 for row in rows for name in whole)
    files = sorted(p.name for p in folder.iterdir())
    return {**told, "iterations": len(rows), "seconds": seconds, "folder": str(folder), "files": files}


def summary(folder: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """What a run came to: its first and last evaluation, and its files.

    No example: reads a run's folder.
    """
    told = outcome(folder, rows)
    evaluated = [(name, v) for name, v in told.items() if name.startswith("eval/")]
    lines = [f"{name}: {a:.4f}" + (f" -> {b:.4f}" if b is not None else "") for name, (a, b) in evaluated]
    return "\n".join([*lines, f"{len(rows)} iterations, {told['seconds']:.0f} s; written: {', '.join(told['files'])}"])
