"""Scheduling of diffusion RL on two pools of GPUs: partitions, packs, costs, simulation and search, under one name.

After DigenRL (arXiv 2606.24369, withdrawn by its authors after one day; no code is public). Pure Python: no torch, no
process, no clock, no randomness; `executors` runs a schedule for real. What is where:

- `schedules`: the data - Fragment, Interval, Bubble, Schedule, Trace
- `partitions`: generation-axis and prompt-axis fragments, group completion, time-step packs and shards (GAP, TSP)
- `costs`: seconds of every stage, closed forms, and the bound no schedule can beat
- `simulation`: a schedule played event by event; staleness of at most one version (TCSS)
- `lending`: how many fragments a waiting trainer generates (TAG, BTS)
- `presets`: the named schedules, the split of GPUs, assumed costs of the paper's models
"""

from diffrl.costs import (
    CostModel,
    Pool,
    TrainCost,
    barrier_seconds,
    fit_train_cost,
    gap_seconds,
    lower_bound,
    tcss_seconds,
)
from diffrl.lending import bts_search
from diffrl.partitions import gap_partition, group_ready_times, prompt_partition, tsp_pack, tsp_shard
from diffrl.presets import PRESETS, best_split, ladder
from diffrl.schedules import KINDS, PLACEMENTS, Bubble, Fragment, Interval, Pair, Schedule, Trace
from diffrl.simulation import Lend, chrome_trace, simulate, tcss_admit

__all__ = [
    "KINDS",
    "PLACEMENTS",
    "PRESETS",
    "Bubble",
    "CostModel",
    "Fragment",
    "Interval",
    "Lend",
    "Pair",
    "Pool",
    "Schedule",
    "Trace",
    "TrainCost",
    "barrier_seconds",
    "best_split",
    "bts_search",
    "chrome_trace",
    "fit_train_cost",
    "gap_partition",
    "gap_seconds",
    "group_ready_times",
    "ladder",
    "lower_bound",
    "prompt_partition",
    "simulate",
    "tcss_admit",
    "tcss_seconds",
    "tsp_pack",
    "tsp_shard",
]
