"""Named schedules, the split of GPUs between the pools, and assumed costs of four models on three testbeds.

Nothing in PRESETS was measured. Print the preset's name and the word "assumed" beside any number made from it.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from diffrl.costs import CostModel, Pool, TrainCost
from diffrl.numbers import require_count
from diffrl.partitions import gap_partition
from diffrl.schedules import Schedule
from diffrl.simulation import simulate


def ladder(
    n_prompts: int, group_size: int, *, fragments: int, timesteps: int = 1, pack: int = 1, stale: int = 0
) -> dict[str, Schedule]:
    """The named schedules, each with one piece more than the last, on one batch of n_prompts group_size samples.

    `verl-omni`: colocated, one fragment, a rollout engine swapped in and out. `genrl`: colocated, one fragment, the training
    module samples: no swap, no publication. `barrier`: split, one fragment. `gap`: `gap_partition(fragments)`. `+tsp`: with
    `pack`. `+tag`: the trainer assists. `+tcss`: `stale` fragments start early. The baselines are not packed: for a fair
    comparison give them the same pack (`dataclasses.replace(ladder(...)["genrl"], pack=4)`). ValueError: as for `Schedule`
    and `gap_partition`.

    >>> list(ladder(4, 8, fragments=4, pack=4, stale=1))
    ['verl-omni', 'genrl', 'barrier', 'gap', 'gap+tsp', 'gap+tsp+tag', 'gap+tsp+tag+tcss']
    """
    whole = gap_partition(n_prompts, group_size, fragments=1)
    cut = gap_partition(n_prompts, group_size, fragments=fragments)
    group_size = require_count("group_size", group_size)
    one, gap = (Schedule(parts, group_size, timesteps=timesteps) for parts in (whole, cut))
    tsp = replace(gap, pack=pack)
    return {
        "verl-omni": replace(one, placement="engines"),
        "genrl": replace(one, placement="module"),
        "barrier": replace(one, barrier=True),
        "gap": gap,
        "gap+tsp": tsp,
        "gap+tsp+tag": replace(tsp, tag=True),
        "gap+tsp+tag+tcss": replace(tsp, tag=True, stale=stale),
    }


def best_split(gpus: int, schedule: Schedule, cost: CostModel, *, steps: int = 8) -> CostModel:
    """`cost` with the `gpus` divided between generator and trainer so that `simulate(..., steps=steps).period` is least.

    All GPUs are used, in whole replicas, at the pools' own speeds; divisions whose trainer is smaller than `helper` are left
    out. Ties: fewer generator GPUs. ValueError: no division exists.

    >>> cost = CostModel(1.0, TrainCost(0.0, 3.0), Pool(1), Pool(1))
    >>> best_split(8, Schedule(gap_partition(4, 8, fragments=8), 8), cost).generator.gpus
    4
    """
    gpus, steps = require_count("gpus", gpus), require_count("steps", steps)
    if not isinstance(schedule, Schedule) or not isinstance(cost, CostModel):
        raise ValueError(f"a Schedule and a CostModel are needed, got {schedule!r:.60} and {cost!r:.60}")
    g, t = cost.generator, cost.trainer
    smallest = max(t.per_replica, cost.helper)
    divisions = [
        replace(cost, generator=replace(g, gpus=mine), trainer=replace(t, gpus=gpus - mine))
        for mine in range(g.per_replica, gpus - smallest + 1, g.per_replica)
        if (gpus - mine) % t.per_replica == 0
    ]
    if not divisions:
        raise ValueError(
            f"gpus {gpus} cannot be divided: generator replicas of {g.per_replica}, trainer replicas of {t.per_replica}, "
            f"helper {cost.helper}"
        )
    return min(divisions, key=lambda division: simulate(schedule, division, steps=steps).period)


TESTBEDS = MappingProxyType({"A": 32, "B": 32, "C": 16})
"""GPUs: A 32 of 48 GB, 200 Gb/s; B 32 of 80 GB, 400 Gb/s; C 16 of 96 GB, 200 Gb/s."""

_SECONDS = {  # generate per sample (20 steps), a, b, publish, at speed 1
    "flux.1-12b": {"A": (19.4, 0.96, 3.87, 0.96), "B": (3.0, 0.48, 0.61, 0.48), "C": (6.0, 0.96, 1.19, 0.96)},
    "qwenimage-20b": {"A": (64.5, 1.60, 6.45, 1.60), "B": (10.1, 0.80, 1.01, 0.80), "C": (19.9, 1.60, 1.99, 1.60)},
    "hunyuanvideo-13b": {"A": (252.0, 1.04, 50.3, 1.04), "B": (39.4, 0.52, 7.89, 0.52), "C": (77.5, 1.04, 15.5, 1.04)},
    "wan2.1-14b": {"A": (645.0, 1.12, 64.5, 1.12), "B": (101.0, 0.56, 10.1, 0.56), "C": (199.0, 1.12, 19.9, 1.12)},
}


def _preset(gpus: int, generate: float, a: float, b: float, publish: float) -> CostModel:
    return CostModel(
        generate,
        TrainCost(a, b),
        Pool(gpus // 2),
        Pool(gpus // 2),
        helper=1,
        reward=1.0,
        optimizer=0.5,
        publish=publish,
        switch=9.1,
        restore=3.3,
    )


PRESETS: Mapping[str, CostModel] = MappingProxyType(
    {
        f"{model}/{testbed}": _preset(TESTBEDS[testbed], *seconds)
        for model, rows in _SECONDS.items()
        for testbed, seconds in rows.items()
    }
)
"""Assumed costs by "<model>/<testbed>", seconds. Assumptions, none of them measured on these models:

- dense bf16 peaks of 155 (A), 989 (B), 503 (C) TFLOPS, guessed from the published fp32 figures; 40 % of them reached;
- TFLOP per forward of one sample: flux.1-12b 60 and qwenimage-20b 100 at 1024 x 1024; hunyuanvideo-13b 780 and wan2.1-14b
  1000 at 53 frames of 480 x 832. generate = 20 forwards, twice as many with guidance (qwenimage, wan);
- backward with recomputation = 3 forwards, so b = 4 forwards, without guidance;
- a = half of two bf16 all-gathers of the weights over the link (half is hidden); publish = one copy over the link;
- GPUs halved between the pools; one GPU per generator replica, trainer rank and helper replica (false for 20B on 48 GB: use
  per_replica=2 and halve `generate`);
- reward 1.0 s per fragment, unlimited workers; optimizer 0.5 s;
- switch 9.1 s and restore 3.3 s, measured by others on a 5B video model and 3 GPUs (which of the two is which is assumed).
"""
