"""One training run in one folder: settings, metrics, held-out evaluation, checkpoints, pictures, and resuming it.

    metrics.jsonl        settings in the first line, then one line per iteration (`diffrl.loop`'s names)
    checkpoint/          the newest whole checkpoint (`diffrl.checkpoints`)
    adapter/             the trained LoRA, as the pipeline's own load_lora_weights reads it
    curve.png, before_after.png
    drafts.png, ranks.png   with --draft: what the draft chose, and how well it ranks

At iteration 0, every `eval_every` iterations and the last, a line also has eval/exact_match (where an OCR engine judges),
eval/reward, and eval/iterations: how many iterations lie behind the evaluated weights. At iteration 0 that is 0, the base
model; at a later iteration i it is i + 1. Evaluation seeds are the same in every run and never used in training.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from diffrl.algorithms import live
from diffrl.checks import require_count
from diffrl.contrast import draft_rewards, select_contrastive
from diffrl.engines import check_engine, engine_rows
from diffrl.folders import (
    head_line,
    held_alone,
    json_line,
    prepare_folder,
    read_metrics,
    refuse_folder,
    require_same_files,
)
from diffrl.loop import Checkpoint, load_checkpoint, restore_checkpoint, save_checkpoint, train
from diffrl.plots import last_update, require_matplotlib
from diffrl.ranks import Ranks, alone
from diffrl.sampling import chunked, rollout, sample_seeds
from diffrl.settings import HELD_OUT_SEED, Bench, Evaluation, Settings, build, check_settings, evaluate
from diffrl.tracking import MOST_PICTURES
from diffrl.training_checks import checked_groups
from diffrl.types import Params
from diffrl.windows import Score, encode, score_images


class Interrupted(Exception):
    """SIGINT or SIGTERM came; the iteration was finished and a checkpoint written."""


@contextlib.contextmanager
def _graceful_interrupt() -> Iterator[list[int]]:
    """The first SIGINT or SIGTERM is noted, to stop after the running iteration; a second SIGINT stops at once."""
    noted: list[int] = []

    def note(number: int, frame: Any) -> None:
        if noted and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not noted:
            os.write(2, b"\nfinishing this iteration, then stopping; Ctrl-C again stops at once\n")
        noted.append(number)

    try:
        old = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: no handlers, the caller interrupts in its own way
        old = {}
    try:
        yield noted
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def run(
    folder: str | Path,
    s: Settings | None = None,
    *,
    resume: bool = False,
    iterations: int | None = None,
    overwrite: bool = False,
    progress: Callable[..., Any] | None = None,
    pictures: bool = True,
    ranks: Ranks = alone,
    announce: Callable[[Settings, Bench, int], None] | None = None,
    tracker: Callable[[Path, Settings, int], Any] | None = None,
) -> list[dict[str, Any]]:
    """Train in `folder` and return the rows of its metrics.jsonl. Interrupt it at any moment and go on with resume=True:
    rows (times apart) and weights are those of the uninterrupted run, bit for bit on the same machine.

    ranks: of one of several processes that train together (`ranks.launched()`); the first alone writes, evaluates and draws.
    s: settings of a new run; resume reads them from the folder (iterations may raise the number). progress: a tqdm-like
    factory, None for silence. announce: told (settings, bench, first iteration) once everything is built, before anything is
    evaluated or written. tracker: (folder, settings, first iteration) -> a tracker (`diffrl.tracking`), made once the folder is there,
    told every row and the pictures of evaluations ("eval/pictures"), and closed. ValueError, ImportError: bad settings or
    folder, prompts or images that were changed since, nothing half-written. Interrupted: see above.

    No example: needs a pipeline.
    """
    if ranks.rank > 0:
        return _follow(Path(folder), s, resume, iterations, ranks)
    with held_alone(Path(folder)):
        told = _Told(progress, pictures, announce, tracker)
        return _run(Path(folder), s, resume, iterations, overwrite, told, ranks)


class _Told(NamedTuple):
    """Who is told of a run, see `run`."""

    progress: Callable[..., Any] | None
    pictures: bool
    announce: Callable[[Settings, Bench, int], None] | None
    tracker: Callable[[Path, Settings, int], Any] | None


class _Begun(NamedTuple):
    """What a run is before anything is written: everything is built, a checkpoint is read but not restored."""

    s: Settings
    rows: list[dict[str, Any]]
    bench: Bench
    optimizer: torch.optim.Optimizer
    initial: Params
    checkpoint: Checkpoint | None
    start: int

    def restore(self) -> Params | None:
        """The behaviour params of the checkpoint, the live ones and the optimizer put back; None where there is none."""
        if self.checkpoint is None:
            return None
        return restore_checkpoint(self.checkpoint, params=self.bench.model.params, optimizer=self.optimizer)


def _begun(
    folder: Path, s: Settings | None, resume: bool, iterations: int | None, ranks: Ranks, *, pictures: bool
) -> _Begun:
    rows: list[dict[str, Any]] = []
    if resume:
        s, rows = read_metrics(folder)
        s = s if iterations is None else replace(s, iterations=require_count("--iterations", iterations))
        require_same_files(folder, s)
    assert s is not None
    if pictures:
        require_matplotlib()
    check_settings(s)
    torch.set_num_threads(s.threads)
    bench = build(s)
    check_engine(s, bench.algorithm, ranks=ranks.size)
    checked_groups(s.prompts_per_iteration, len(bench.prompts), ranks.size)  # before a folder is made
    optimizer = torch.optim.AdamW(list(bench.model.params.values()), lr=s.learning_rate, weight_decay=0.0)
    initial = {name: p.detach().clone() for name, p in bench.model.params.items()}
    if not resume or not (folder / "checkpoint" / "checkpoint.json").exists():
        return _Begun(s, rows, bench, optimizer, initial, None, 0)
    checkpoint = load_checkpoint(folder / "checkpoint")
    _same_run(checkpoint.settings, s)
    if checkpoint.iteration > s.iterations:
        raise ValueError(f"--iterations {s.iterations}: the run in {str(folder)!r} already has {checkpoint.iteration}")
    return _Begun(s, rows, bench, optimizer, initial, checkpoint, checkpoint.iteration)


def _run(folder, s, resume, iterations, overwrite, told: _Told, ranks) -> list[dict[str, Any]]:
    if not resume:
        refuse_folder(folder, overwrite=overwrite)
    begun = _begun(folder, s, resume, iterations, ranks, pictures=told.pictures)
    s, rows, bench, optimizer, initial, _, start = begun
    if told.announce is not None:
        told.announce(s, bench, start)
    # Before anything is written: a reward that cannot be used is found out here.
    base, seen = _eval_metrics(bench, s, 0) if start == 0 or _ended_at_once(rows, s) else ({}, {})
    behaviour = begun.restore()
    if not resume:
        prepare_folder(folder, s, overwrite=overwrite)
    with contextlib.nullcontext() if resume else held_alone(folder):
        rows = _rows_before(folder, s, rows, start, base)
        tracker = contextlib.nullcontext() if told.tracker is None else told.tracker(folder, s, start)
        with tracker as log:
            noted = None if log is None else lambda row, more: log({**row, **more}, row["iteration"])
            _iterate(
                folder, s, bench, optimizer, rows, start, behaviour, initial, told.progress, (base, seen), noted, ranks
            )
        if bench.model.export is not None:
            bench.model.export(folder / "adapter")
        if told.pictures:
            save_pictures(folder, s, bench, initial, rows)
    return rows


def _same_run(saved: Mapping[str, Any], s: Settings) -> None:
    differing = {k: (saved.get(k), v) for k, v in asdict(s).items() if k != "iterations" and saved.get(k) != v}
    if differing:
        raise ValueError(f"the checkpoint belongs to another run; settings that differ (saved, here): {differing}")


def _evaluated(i: int, s: Settings) -> bool:
    return i == 0 or i == s.iterations - 1 or (i + 1) % s.eval_every == 0


def evaluations(s: Settings, start: int = 0) -> int:
    """How many evaluations a run from iteration `start` on makes, the base's among them where it begins at 0.

    No example: needs a pipeline.
    """
    last = s.iterations - 1
    later = sum(_evaluated(i, s) and (i > 0 or i == last) for i in range(start, s.iterations))
    return later + (start == 0)


def _ended_at_once(rows: Sequence[Mapping[str, Any]], s: Settings) -> bool:
    """Whether iteration 0 was the last one when it ran and is not any more."""
    return s.iterations > 1 and bool(rows) and rows[0].get("eval/iterations") == 1


def _as_planned(row: dict[str, Any], s: Settings, base: dict[str, Any]) -> dict[str, Any]:
    """The row without the evaluation that it has only because a run of fewer iterations once ended there."""
    if _evaluated(row["iteration"], s) and not _ended_at_once([row], s):
        return row
    kept = {k: v for k, v in row.items() if not k.startswith(("eval/", "base/")) and k != "seconds/evaluation"}
    return kept | base if row["iteration"] == 0 else kept


def _rows_before(
    folder: Path, s: Settings, rows: list[dict[str, Any]], start: int, base: dict[str, Any]
) -> list[dict[str, Any]]:
    """The rows of iterations 0..start-1; metrics.jsonl is rewritten to hold exactly these, so nothing repeats."""
    rows = [_as_planned(row, s, base) for row in rows if row.get("iteration", start) < start]
    if [row["iteration"] for row in rows] != list(range(start)):
        raise ValueError(f"metrics.jsonl lacks iterations before {start}, where the checkpoint stands")
    temporary = folder / ".metrics.jsonl.tmp"
    temporary.write_text(head_line(s) + "".join(json_line(row) for row in rows))
    os.replace(temporary, folder / "metrics.jsonl")
    return rows


def _iterate(folder, s, bench, optimizer, rows, start, behaviour, initial, progress, first, log, ranks) -> None:
    """Iterations start..iterations-1: a line each, a checkpoint every few; raises Interrupted after a whole iteration. first: the
    base's evaluation and its pictures; log: told each row and the pictures of its evaluation."""
    base, seen = first if start == 0 else (first[0], {})
    held: dict[str, Params | None] = {"behaviour": behaviour}
    training = _rows(s, bench, optimizer, start, behaviour, initial, ranks, held)
    save = partial(
        save_checkpoint, folder / "checkpoint", params=bench.model.params, optimizer=optimizer, settings=asdict(s)
    )
    bar = None if progress is None else progress(total=s.iterations, initial=start)
    opened = (folder / "metrics.jsonl").open("a")
    with _graceful_interrupt() as noted, opened as file, contextlib.closing(training):
        latest = next((r["eval/exact_match"] for r in reversed([*rows, base]) if "eval/exact_match" in r), None)
        for i in range(start, s.iterations):
            row: dict[str, Any] = next(training)
            each = ranks.gathered((bench.reward.exact, bool(noted)))  # `_follow` asks at the same point
            exact = [e for e, _ in each if e == e]
            exact = exact if s.engine == "loop" else []  # the last call of an engine's reward saw a fragment
            row["reward/exact_match"] = sum(exact) / len(exact) if exact else float("nan")
            last = i == s.iterations - 1
            if i == 0:  # where the first is the last, its own evaluation takes the names
                row |= base if not last else {f"base/{k.partition('/')[2]}": v for k, v in base.items()}
            if _evaluated(i, s) and (i > 0 or last):
                began = time.perf_counter()
                found, seen = _eval_metrics(bench, s, i + 1)
                row |= found
                row["seconds/evaluation"] = time.perf_counter() - began
            latest = row.get("eval/exact_match", latest)
            line = json_line(row)
            rows.append(json.loads(line))  # as a resumed run would read it
            file.write(line)
            file.flush()
            if log is not None:
                log(rows[-1], seen)
            seen = {}
            stopped = any(stop for _, stop in each)  # all of them after the same iteration
            if last or stopped or (i + 1) % s.checkpoint_every == 0:
                save(iteration=i + 1, behaviour=held["behaviour"])
            if bar is not None:
                bar.set_postfix_str(_postfix(row, latest), refresh=False)
                bar.update(1)
            if stopped and not last:
                raise Interrupted(
                    f"stopped after {i + 1} of {s.iterations} iterations; go on with: diffrl train --resume {folder}"
                )
    if bar is not None:
        bar.close()


def _rows(s, bench, optimizer, start, behaviour, initial, ranks, held: dict[str, Params | None]) -> Any:
    """The engine's iterations; held["behaviour"] is what rolls out next, for checkpoints, or as it was where that is the params."""
    if s.engine != "loop":
        off_policy = bench.algorithm.behaviour is not live
        published = partial(held.__setitem__, "behaviour") if off_policy else (lambda behaviour: None)
        return engine_rows(
            s, bench, optimizer, start=start, behaviour=behaviour, reference=initial, published=published
        )

    # The behaviour params change hands inside the loop; a wrapper is how a checkpoint gets to see them.
    def remembered(old: Params, new: Params, i: int) -> Params:
        held["behaviour"] = now = bench.algorithm.behaviour(old, new, i)
        return now

    # `live` is left as it is: the loop spares it a copy of the params.
    algorithm = bench.algorithm if bench.algorithm.behaviour is live else bench.algorithm._replace(behaviour=remembered)
    return _training(s, bench, algorithm, optimizer, start, behaviour, initial, ranks)


def _training(s, bench, algorithm, optimizer, start, behaviour, initial, ranks) -> Iterator[dict[str, float]]:
    return train(
        bench.model,
        algorithm,
        bench.prompts,
        bench.reward,
        optimizer,
        start=start,
        behaviour=behaviour,
        reference=initial if algorithm.needs_reference else None,  # as it was seeded, also in a resumed run
        group_size=s.group_size,
        steps=s.steps,
        seed=s.seed,
        prompts_per_iteration=s.prompts_per_iteration,
        micro_batch=s.micro_batch,
        pack=s.pack,
        rollout_chunk=s.rollout_chunk,
        images=bench.images,
        ranks=ranks,
    )


def _follow(
    folder: Path, s: Settings | None, resume: bool, iterations: int | None, ranks: Ranks
) -> list[dict[str, Any]]:
    """The same iterations on a rank that writes nothing; returns no rows."""
    begun = _begun(folder, s, resume, iterations, ranks, pictures=False)
    s, _, bench, optimizer, initial, _, start = begun
    training = _training(s, bench, bench.algorithm, optimizer, start, begun.restore(), initial, ranks)
    with _graceful_interrupt() as noted:
        for i in range(start, s.iterations):
            next(training)
            each = ranks.gathered((bench.reward.exact, bool(noted)))
            if any(stop for _, stop in each) and i < s.iterations - 1:
                raise Interrupted(f"stopped after {i + 1} of {s.iterations} iterations")
    return []


def _postfix(row: Mapping[str, Any], latest: float | None) -> str:
    parts = [f"reward {row['reward/mean']:.3f}"]
    if latest is not None:
        parts.append(f"exact {latest:.3f}")
    masked = f"masked_fraction/update_{last_update([row])}"  # as the figure: an update further on drops more
    if row.get(masked) is not None:
        parts.append(f"masked {row[masked]:.2f}")
    return ", ".join(parts)


def save_pictures(folder: Path, s: Settings, bench: Bench, initial: Params, rows: Sequence[Mapping[str, Any]]) -> None:
    """curve.png, and before_after.png: ten prompts at held-out seeds, drawn by the base and by the trained params.

    No example: needs a pipeline.
    """
    from diffrl.plots import save_before_after, save_curve

    save_curve(folder / "curve.png", rows, title=f"{s.task}: {s.algorithm}, reward {s.reward}, seed {s.seed}")
    every = slice(None, None, len(bench.prompts) // 10 + 1)  # of 100: 00, 11, ..., 99
    shown, begun = bench.prompts[every][:10], None if bench.images is None else bench.images[every][:10]
    draw = partial(
        evaluate, bench.model, shown, bench.reward, steps=s.steps, samples=1, images=begun, chunk=s.rollout_chunk or 128
    )
    before, after = draw(params=initial), draw()
    save_before_after(
        folder / "before_after.png",
        stills(before.images),
        stills(after.images),
        titles=shown,
        captions_before=_captions(before),
        captions_after=_captions(after),
        good_before=None if before.exact is None else [bool(e == 1) for e in before.exact],
        good_after=None if after.exact is None else [bool(e == 1) for e in after.exact],
    )
    if s.draft != "none":
        save_draft_pictures(folder, s, bench)


def save_draft_pictures(folder: Path, s: Settings, bench: Bench) -> None:
    """drafts.png: the chosen seeds of one prompt, as the draft and as the trained policy render them; ranks.png: the rank
    scatter of five prompts. Held-out seeds; pools of at most 48.

    No example: needs a pipeline.
    """
    from diffrl.plots import save_draft_pairs, save_rank_scatter

    n, keep = min(s.pool, max(48, s.group_size)), s.group_size // 2
    every = slice(None, None, len(bench.prompts) // 5 + 1)
    prompts, begun = bench.prompts[every][:5], None if bench.images is None else bench.images[every][:5]
    seeds = sample_seeds(HELD_OUT_SEED, 1, range(len(prompts)), n).to(next(iter(bench.model.params.values())).device)
    cond, score = encode(bench.model, prompts, begun), Score(bench.model.decode, bench.reward, prompts)
    policy = (bench.model.velocity, bench.model.params)
    sides = {"draft": (bench.draft(bench.model.params), s.draft_steps), "policy": (policy, s.steps)}
    shape, found = bench.model.latent_shape(), {}
    for name, ((velocity, params), steps) in sides.items():
        how: dict[str, Any] = {"times": bench.model.times(steps), "shape": shape, "chunk": s.rollout_chunk or 128}
        found[name] = draft_rewards(velocity, params, cond, seeds, score, **how)
    save_rank_scatter(folder / "ranks.png", found["draft"], found["policy"], keep=keep, titles=prompts)
    # the prompt whose drafts differ most: where all agree there is nothing to see
    j = int(found["draft"].nan_to_num(0.0).std(1).argmax())
    columns = select_contrastive(found["draft"][j : j + 1], keep=min(keep, 6))[0].to(seeds.device)
    own = {name: value[j : j + 1].repeat_interleave(len(columns), 0) for name, value in cond.items()}
    images = {}
    for name, ((velocity, params), steps) in sides.items():
        times = bench.model.times(steps)
        velocity = chunked(velocity, size=s.rollout_chunk or 128)
        walked = rollout(velocity, params, own, times, seeds=seeds[j, columns], shape=shape, keep=[])
        images[name] = bench.model.decode(walked.x_0)
    rewards = [found[name][j, columns.to(found[name].device)].tolist() for name in sides]
    save_draft_pairs(
        folder / "drafts.png",
        stills(images["draft"]),
        stills(images["policy"]),
        titles=["best"] * (len(columns) // 2) + ["worst"] * (len(columns) // 2),
        draft_rewards=rewards[0],
        rewards=rewards[1],
        title=f"{prompts[j]}: {s.draft} draft of {s.draft_steps} steps above, the policy's {s.steps} below, same seeds; green: the same reward",
    )


def stills(images: torch.Tensor) -> torch.Tensor:
    """Pictures as they are, of videos " b f h w 3" the middle frame.

    >>> stills(torch.zeros(1, 5, 8, 8, 3)).shape
    torch.Size([1, 8, 8, 3])
    """
    return images[:, images.shape[1] // 2] if images.ndim == 5 else images


def _captions(found: Evaluation) -> list[str]:
    if found.readings is None:
        return [f"{float(r):.3g}" for r in found.rewards]
    return [f'"{t or ""}"  {float(r):.2f}' for t, r in zip(found.readings, found.rewards, strict=True)]


def _eval_metrics(bench: Bench, s: Settings, iterations: int) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """The evaluation of these weights, and one picture of each of at most 16 prompts where the samples are pictures."""
    how: dict[str, Any] = {"steps": s.steps, "samples": s.eval_samples, "chunk": s.rollout_chunk or 128}
    found = evaluate(bench.model, bench.prompts, bench.reward, images=bench.images, **how)
    metrics = {"eval/reward": float(found.rewards.nanmean()), "eval/iterations": iterations}
    if found.exact is not None:
        metrics["eval/exact_match"] = float(found.exact.nanmean())
    if bench.held_out is not None:
        metrics["eval/held_out_reward"] = float(score_images(bench.held_out, found.images, found.prompts).nanmean())
    shown = found.images[:: s.eval_samples][:MOST_PICTURES]
    return metrics, {"eval/pictures": stills(shown)} if shown.dtype == torch.uint8 else {}
