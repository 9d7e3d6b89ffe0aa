"""Who runs the iterations of a training run: the plain loop, or a schedule in this process or on Ray.

The params are the loop's whichever engine runs them, to rounding, when nothing is stale: an engine says where and when.
Fragments are trained in order, so that the same settings give the same bits; with stale > 0 which fragments are stale
depends on the clock, and so do the params.
"""

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch

from diffrl.backends import in_process
from diffrl.executors import run
from diffrl.partitions import gap_partition, prompt_partition
from diffrl.ray_backend import ray_actors, require_ray
from diffrl.schedules import Schedule
from diffrl.settings import Bench, Settings, build
from diffrl.stages import (
    AlgorithmStages,
    require_separable_collect,
    require_separable_credit,
    require_separable_objective,
    trained_timesteps,
)
from diffrl.types import Algorithm, Params


def _refused(check: Callable[..., None], *arguments: Any, **options: Any) -> bool:
    try:
        check(*arguments, **options)
    except ValueError:
        return True
    return False


def schedule_for(algorithm: Algorithm, s: Settings) -> Schedule:
    """The run's schedule: --fragments along the sample axis, or in whole groups where the algorithm's collect looks at its
    group; behind a barrier where its credit looks at the batch. ValueError: a collect that looks at the whole batch, in
    more than one fragment; more fragments than there are rows or prompts to cut; --stale above the fragments.

    >>> from diffrl.algorithms import art, flow_grpo  # flow_grpo divides by the std of the whole batch
    >>> [schedule_for(algorithm, Settings(fragments=4)).barrier for algorithm in (art(), flow_grpo())]
    [False, True]
    """
    asked: dict[str, Any] = {"steps": s.steps, "group_size": s.group_size}
    if s.fragments > 1:
        require_separable_objective(algorithm, **asked)
    cut = gap_partition
    if s.fragments > 1 and _refused(require_separable_collect, algorithm, **asked, whole_groups=False):
        require_separable_collect(algorithm, **asked, whole_groups=True)
        cut = prompt_partition
    return Schedule(
        cut(s.prompts_per_iteration, s.group_size, fragments=s.fragments),
        s.group_size,
        timesteps=trained_timesteps(algorithm, steps=s.steps),
        barrier=_refused(require_separable_credit, algorithm, **asked),
        pack=s.pack or s.prompts_per_iteration * s.group_size * s.steps,
        stale=s.stale,
    )


def check_engine(s: Settings, algorithm: Algorithm, *, ranks: int = 1) -> None:
    """ValueError or ImportError before anything is written: an engine that cannot run this algorithm by these settings,
    or that is one of several ranks.

    >>> check_engine(Settings(engine="in_process"), None, ranks=2)
    Traceback (most recent call last):
    ValueError: --engine in_process in one of 2 processes: only --engine loop trains under torchrun
    """
    if s.engine == "loop":
        return
    if ranks > 1:
        raise ValueError(f"--engine {s.engine} in one of {ranks} processes: only --engine loop trains under torchrun")
    if s.images is not None:
        raise ValueError(f"--engine {s.engine}: --images {s.images!r} needs --engine loop")
    if s.engine == "ray":
        require_ray()
    if algorithm.pool is not None:
        asked = f"--draft {s.draft}" if s.draft not in ("", "none") else f"an algorithm with a pool ({algorithm.pool})"
        raise ValueError(f"{asked} needs --engine loop: it scores while it collects, got --engine {s.engine}")
    if algorithm.memory is not None:
        raise ValueError(f"--engine {s.engine}: an algorithm with a memory ({algorithm.memory!r:.60}) is not supported")
    schedule_for(algorithm, s)


def make_stages(
    s: Settings, bench: Bench, optimizer: torch.optim.Optimizer, *, start: int = 0, behaviour: Params | None = None
) -> AlgorithmStages:
    """The run's stages around its bench; its params are those of the fresh adapter, the reference too.

    No example: needs a pipeline.
    """
    return AlgorithmStages(
        bench.model,
        bench.algorithm,
        bench.prompts,
        bench.reward,
        optimizer,
        group_size=s.group_size,
        steps=s.steps,
        seed=s.seed,
        prompts_per_iteration=s.prompts_per_iteration,
        start=start,
        behaviour=behaviour,
        reference=bench.model.params,
    )


def make_optimizer(s: Settings, params: Params) -> torch.optim.Optimizer:
    """AdamW of the run's learning rate, without decay.

    >>> make_optimizer(Settings(learning_rate=0.5), {"w": torch.zeros(1)}).param_groups[0]["lr"]
    0.5
    """
    return torch.optim.AdamW(list(params.values()), lr=s.learning_rate, weight_decay=0.0)


def stages_from_settings(s: Settings, start: int = 0) -> AlgorithmStages:
    """Everything built anew from the settings alone: what an actor in another process does.

    No example: needs a pipeline.
    """
    torch.set_num_threads(s.threads)
    bench = build(s)
    return make_stages(s, bench, make_optimizer(s, bench.model.params), start=start)


def engine_rows(
    s: Settings,
    bench: Bench,
    optimizer: torch.optim.Optimizer,
    *,
    start: int = 0,
    behaviour: Params | None = None,
    reference: Params,
    published: Callable[[Params], None] = lambda behaviour: None,
) -> Generator[dict[str, float], None, None]:
    """One row of metrics per iteration, endless, by the run's engine: `in_process` or `ray`. The bench's model holds the
    params of the last commit; published is told the behaviour params after each. ValueError: as `schedule_for`, `run`.
    No example: needs a pipeline."""
    stages = make_stages(s, bench, optimizer, start=start, behaviour=behaviour)
    stages.reference = None if stages.reference is None else {n: p.detach().clone() for n, p in reference.items()}
    backend: Any = in_process(bitwise=True)
    if s.engine == "ray":
        made = partial(stages_from_settings, s, start)
        backend = ray_actors(generators=s.generators, trainers=s.trainers, build=made, bitwise=True)
    running = run(schedule_for(bench.algorithm, s), stages, steps=None, backend=backend, start=start)
    return _rows(running, stages, published)


def _rows(running: Any, stages: AlgorithmStages, published: Callable[[Params], None]) -> Generator:
    try:
        for result in running:
            published(stages.behaviour)
            yield {"iteration": result.step, **result.metrics}
    finally:
        running.close()
