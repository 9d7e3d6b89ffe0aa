"""Runs a schedule of `diffrl.parallel` for real: fragments are generated, scored and trained as its rules say.

After DigenRL (arXiv 2606.24369, withdrawn by its authors; no code is public). What holds whichever way it is cut:

- a fragment is generated under one snapshot of the params, whose version travels with it: version s for step s, or s - 1
  for the first `stale` fragments; the loss sees that version's velocities and log-probabilities, stored at generation
- credit is told to whole groups, once; gradients are sums over the batch's pairs divided by their number, so that packs,
  fragments and ranks may be ragged; nothing but the commit steps the optimizer, once every fragment is in exactly once
- a fragment that fails is done again whole, with the same seeds and version; a step commits with all its fragments or not

    stages = AlgorithmStages(model, art(), prompts, reward, optimizer, group_size=8, steps=8, seed=0)
    for result in run(schedule, stages, steps=10):
        print(result.metrics["reward/mean"], result.trace.idle)

In float64 the params are those of `loop.train` to 1e-12, and with one fragment and one pack to the bit, when stale = 0.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffrl.backends import InProcess, in_process
from diffrl.checks import require_count, require_number
from diffrl.conductor import Conductor, ExecutionError, Progress
from diffrl.costs import CostModel, Pool, fit_train_cost
from diffrl.lending import bts_search
from diffrl.loop import _note, _over_updates, _together
from diffrl.partitions import gap_partition
from diffrl.ray_backend import gloo_sum, ray_actors, ray_sum
from diffrl.schedules import Schedule, Trace
from diffrl.simulation import Lend
from diffrl.stages import AlgorithmStages, PlainStages, Signal, Workers, folded_seeds, sums_of
from diffrl.trainers import Trainer, rows_of
from diffrl.types import Cond
from diffrl.windows import reward_metrics

__all__ = [
    "AlgorithmStages",
    "ExecutionError",
    "InProcess",
    "Signal",
    "StepResult",
    "Trainer",
    "Workers",
    "calibrate",
    "folded_seeds",
    "gloo_sum",
    "in_process",
    "ray_actors",
    "ray_sum",
    "run",
]


BUSY = {
    "seconds/rollout": ("generate", "help"),
    "seconds/reward": ("reward",),
    "seconds/update": ("train", "update"),
}
"""Metric -> the kinds of intervals whose seconds it sums."""


class StepResult(NamedTuple):
    """A global step that is committed and published: its number, the version it made, its metrics (those of `loop.train`
    that can be told; seconds/step, and the busy seconds of its stages, which overlap), and what was measured from the start
    of the run to its end."""

    step: int
    version: int
    metrics: dict[str, float]
    trace: Trace


def run(
    schedule: Schedule,
    workers: Any,
    cond: Cond | None = None,
    seeds: Tensor | None = None,
    *,
    steps: int | None,
    backend: Any = in_process,
    cost: CostModel | None = None,
    lend: Lend = bts_search,
    retries: int = 2,
    timeout: float | None = None,
    start: int = 0,
) -> Iterator[StepResult]:
    """One result per global step, `start` .. `start + steps - 1` (steps None: endless, the caller closes it).

    workers: `Workers` with cond and seeds, one row per sample; or `AlgorithmStages`, which has its own. backend: one, or a
    function that makes it. cost: what `lend` is told about seconds; None: medians of what was measured, and no help until
    every stage was seen once. retries: of a fragment's stage, and of a step's training. timeout: seconds per fragment and
    stage of generation and reward. Closing the iterator stops claims and drops what is in flight; params are those of the
    last commit. ValueError, at the call: arguments out of range, a schedule that does not fit the workers.
    ExecutionError: a stage failed `retries` + 1 times.

    >>> from diffrl.algorithms import art
    >>> from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model
    >>> model = toy_model()
    >>> optimizer = torch.optim.Adam(model.params.values(), lr=0.1)
    >>> stages = AlgorithmStages(model, art(), PROMPTS, toward_compass, optimizer, group_size=4, steps=4, seed=0)
    >>> schedule = Schedule(gap_partition(4, 4, fragments=2), 4, timesteps=4)
    >>> [(result.step, result.version) for result in run(schedule, stages, steps=2)]
    [(0, 1), (1, 2)]
    """
    if not isinstance(schedule, Schedule):
        raise ValueError(f"schedule must be a Schedule, got {schedule!r:.80}")
    steps = None if steps is None else require_count("steps", steps)
    start, retries = require_count("start", start, low=0), require_count("retries", retries, low=0)
    if timeout is not None:
        timeout = require_number("timeout", timeout, low=0, open_low=True)
    if cost is not None and not isinstance(cost, CostModel):
        raise ValueError(f"cost must be a CostModel, got {cost!r:.80}")
    if schedule.tag and cost is not None and not cost.helper:
        raise ValueError(f"schedule.tag needs a trainer that can generate: cost.helper >= 1, got {cost.helper}")
    stages = _stages(schedule, workers, cond, seeds)
    if not callable(lend):
        raise ValueError(f"lend must be a function (bubble, schedule, cost) -> count, got {lend!r:.80}")
    if isinstance(workers, AlgorithmStages) and start < workers.start:
        raise ValueError(f"start={start} comes before the stages' own start={workers.start}")
    made = backend() if callable(backend) else backend
    if not hasattr(made, "open") or not hasattr(made, "close"):
        raise ValueError(f"backend must be one, such as in_process or ray_actors(), got {made!r:.80}")
    stop = None if steps is None else start + steps
    options = {"cost": cost, "lend": lend, "retries": retries, "timeout": timeout, "start": start, "stop": stop}
    return _steps(schedule, stages, made, options)


def _stages(schedule: Schedule, workers: Any, cond: Cond | None, seeds: Tensor | None) -> Any:
    if isinstance(workers, AlgorithmStages):
        if cond is not None or seeds is not None:
            raise ValueError("AlgorithmStages have their own cond and seeds: give neither")
        workers.check(schedule)
        return workers
    return PlainStages(workers, {} if cond is None else cond, seeds, schedule)  # type: ignore[arg-type]


def _steps(schedule: Schedule, stages: Any, backend: Any, options: dict[str, Any]) -> Iterator[StepResult]:
    if getattr(backend, "running", False):
        raise ValueError(f"this backend runs another schedule now: give each run its own, got {backend!r:.80}")
    clean, conductor = False, None
    try:
        backend.running = True
        backend.open(stages, schedule)
        conductor = Conductor(schedule, backend, updates=len(stages.windows), **options)
        while conductor.stop is None or conductor.this.step < conductor.stop:
            began, clean = conductor.ends[-1] if conductor.ends else 0.0, False
            batch = conductor.play()
            clean = True
            metrics = _metrics(batch, schedule) | {"seconds/step": conductor.ends[-1] - began} | backend.facts()
            yield StepResult(batch.step, batch.step + 1, metrics, conductor.trace())
    finally:
        backend.close()
        backend.running = False
        if conductor is not None:
            conductor.close()
        if not clean:  # a step was interrupted: nothing half-accumulated is left behind
            stages.zero()


def _metrics(batch: Progress, schedule: Schedule) -> dict[str, float]:
    """Those of `loop.train`, from what the forward-backwards and commits of a step told."""
    rewards = torch.empty(schedule.rows, dtype=torch.float64)
    for i, values in batch.rewards.items():
        rewards[list(schedule.fragments[i].samples)] = sums_of(values).detach().double().cpu()
    updates = []
    for told, committed in zip(batch.told, batch.metrics, strict=True):
        named: dict[str, list[tuple[float, int]]] = {}
        for metrics, share in told:
            _note(named, metrics, share)
        updates.append({n: _together(n, *zip(*pairs, strict=True)) for n, pairs in named.items()} | committed)
    seconds = {name: sum(batch.seconds.get(kind, 0.0) for kind in kinds) for name, kinds in BUSY.items()}
    again = {"retries": float(batch.retries), "replaced": float(batch.replaced)}
    return reward_metrics(rewards.reshape(-1, schedule.group_size)) | _over_updates(updates) | seconds | again


# ---- calibration ------------------------------------------------------------------------------------------------------


def _median(function: Callable[[], Any], repeats: int) -> float:
    """Seconds of a call: the median of `repeats`, after one that warms up."""
    taken = []
    for i in range(repeats + 1):
        began = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if i:
            taken.append(time.perf_counter() - began)
    return max(statistics.median(taken), 1e-9)


def _sizes(workers: Any, seeds: Tensor | None) -> tuple[int, int]:
    """Samples of the batch and of a group; plain workers are timed as one group. ValueError: they have no seeds."""
    if isinstance(workers, AlgorithmStages):
        return workers.g * workers.k, workers.k
    if not isinstance(seeds, Tensor):
        raise ValueError(f"plain Workers need cond and seeds (a tensor, one per sample), got seeds {seeds!r:.80}")
    return len(seeds), len(seeds)


def calibrate(
    workers: Any,
    cond: Cond | None = None,
    seeds: Tensor | None = None,
    *,
    sizes: Sequence[int] = (1, 2, 4),
    repeats: int = 3,
    timesteps: int = 1,
    samples: int = 1,
) -> CostModel:
    """The seconds of every stage, measured here on one replica of each: medians of `repeats` after a warm-up.

    generate: a rollout of `samples` samples, divided by their number (a rollout of one may cost nearly what eight cost: time
    the size of the fragments that are planned); train: `fit_train_cost` over packs of `sizes` pairs; reward: the same line over `sizes` samples;
    optimizer, publish, switch, restore: alone. timesteps: trained ones per sample, of which the pairs are made. The optimizer
    is stepped: `AlgorithmStages` come back as they were, the params of plain `Workers` do not. ValueError: fewer samples
    than the largest size, or fewer than two sizes. No example: it measures seconds.
    """
    sizes, repeats = [require_count("sizes", q) for q in sizes], require_count("repeats", repeats)
    if len(set(sizes)) < 2:
        raise ValueError(f"sizes must hold two distinct counts at least, got {sizes}")
    n, k = _sizes(workers, seeds)
    if max(sizes) > n:
        raise ValueError(f"sizes must be at most the number of samples {n}, got {sizes}")
    schedule = Schedule(gap_partition(n // k, k, fragments=1), k, timesteps=timesteps, barrier=True)
    stages = _stages(schedule, workers, cond, seeds)
    held = stages.state() if hasattr(stages, "state") else None
    params, rows = stages.snapshot(), list(range(n))
    trajectory = stages.generate(0, params, rows)
    rewards = stages.score(0, rows, trajectory)
    signal = stages.credit(0, list(range(n // k)), trajectory, rewards.reshape(n // k, k, *rewards.shape[1:]))
    pairs = [(row, t) for row in rows for t in range(timesteps)]
    if not 1 <= require_count("samples", samples) <= n:
        raise ValueError(f"samples must be at most the number of samples {n}, got {samples}")
    generate = _median(lambda: stages.generate(0, params, rows[:samples]), repeats) / samples
    given, total = (0, 0, rows, trajectory, rewards, signal), len(stages.windows[0]) * timesteps
    train = [_median(partial(stages.accumulate, *given, [tuple(pairs[:q])], total), repeats) for q in sizes]
    scored = [_median(partial(stages.score, 0, rows[:q], rows_of(trajectory, rows[:q])), repeats) for q in sizes]
    reward = fit_train_cost(sizes, scored)
    switch = _median(lambda: stages.resume(stages.suspend()), repeats) / 2
    optimizer = _median(lambda: (stages.accumulate(*given, [tuple(pairs[:1])], total), stages.commit(0, 0)), repeats)
    publish = _median(stages.snapshot, repeats)
    if held is not None:
        stages.load(held)
    cost = fit_train_cost(sizes, train)
    return CostModel(
        generate,
        cost,
        Pool(1),
        Pool(1),
        helper=1,
        reward=reward.a,
        reward_per_sample=reward.b,
        reward_workers=1,
        optimizer=max(optimizer - cost(1), 0.0),
        publish=publish,
        switch=switch,
        restore=switch,
    )
