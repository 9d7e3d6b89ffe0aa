"""Named schedules, the split of GPUs, and the assumed costs: derived again from their assumptions, and what they say."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import refuses
from scheduling import costs, schedules

from diffrl.parallel import (
    PRESETS,
    CostModel,
    Pool,
    Schedule,
    TrainCost,
    best_split,
    gap_partition,
    ladder,
    lower_bound,
    simulate,
)

KEYS = ["verl-omni", "genrl", "barrier", "gap", "gap+tsp", "gap+tsp+tag", "gap+tsp+tag+tcss"]

# ---- the ladder


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_each_rung_adds_one_piece(g, k, data):
    m = data.draw(st.integers(1, g * k))
    stale = data.draw(st.integers(0, m))
    rungs = ladder(g, k, fragments=m, timesteps=3, pack=2, stale=stale)
    assert list(rungs) == KEYS
    assert {s.timesteps for s in rungs.values()} == {3}
    assert {s.group_size for s in rungs.values()} == {k}
    assert [len(s.fragments) for s in rungs.values()] == [1, 1, 1, m, m, m, m]
    assert [s.placement for s in rungs.values()] == ["engines", "module", *["split"] * 5]
    assert [s.barrier for s in rungs.values()] == [True, True, True, False, False, False, False]
    assert [s.pack for s in rungs.values()] == [1, 1, 1, 1, 2, 2, 2]
    assert [s.tag for s in rungs.values()] == [False] * 5 + [True] * 2
    assert [s.stale for s in rungs.values()] == [0] * 6 + [stale]
    assert rungs["gap"].fragments == gap_partition(g, k, fragments=m)
    assert not any(s.shard_pairs for s in rungs.values())


def test_the_ladder_refuses():
    with refuses("fragments", 5):
        ladder(2, 2, fragments=5)
    with refuses("stale", 3):
        ladder(2, 2, fragments=2, stale=3)
    with refuses("pack", 0):
        ladder(2, 2, fragments=2, pack=0)
    with refuses("group_size", 0):
        ladder(2, 0, fragments=2)


# ---- the split


@given(schedules(most=3, tag=False), costs(), st.integers(2, 8), st.integers(1, 2), st.integers(1, 2))
def test_the_best_split_is_the_best_of_all(schedule, cost, gpus, g_width, t_width):
    cost = replace(cost, generator=Pool(g_width, g_width, 2.0), trainer=Pool(t_width, t_width, 0.5), helper=1)
    periods = {}
    for mine in range(1, gpus):
        if mine % g_width == 0 and (gpus - mine) % t_width == 0:
            pools = {"generator": Pool(mine, g_width, 2.0), "trainer": Pool(gpus - mine, t_width, 0.5)}
            periods[mine] = simulate(schedule, replace(cost, **pools), steps=4).period
    if not periods:
        with refuses("gpus", gpus):
            best_split(gpus, schedule, cost, steps=4)
        return
    best = best_split(gpus, schedule, cost, steps=4)
    least = min(periods.values())
    assert best.generator.gpus == min(mine for mine, period in periods.items() if period == least)
    assert best.generator.gpus + best.trainer.gpus == gpus
    assert replace(best, generator=cost.generator, trainer=cost.trainer) == cost


def test_the_split_leaves_room_for_a_helper_and_refuses():
    cost = CostModel(1.0, TrainCost(0.0, 0.01), Pool(1), Pool(4), helper=3)
    schedule = Schedule(gap_partition(1, 6, fragments=1), 6)
    assert best_split(8, schedule, replace(cost, helper=0)).generator.gpus == 6  # one wave of 6
    assert best_split(8, schedule, cost).generator.gpus == 3  # at most 5 GPUs: two waves, which 3 do as well
    for gpus in (0, 1, 3, 2.5):
        with refuses("gpus", gpus):
            best_split(gpus, schedule, cost)
    with refuses("steps", 0):
        best_split(8, schedule, cost, steps=0)
    with refuses("Schedule", "None"):
        best_split(8, None, cost)


# ---- presets

PEAK = {"A": 155e12, "B": 989e12, "C": 503e12}
LINK = {"A": 200e9 / 8, "B": 400e9 / 8, "C": 200e9 / 8}
GPUS = {"A": 32, "B": 32, "C": 16}
MODELS = {
    "flux.1-12b": (12e9, 60e12, 1),
    "qwenimage-20b": (20e9, 100e12, 2),
    "hunyuanvideo-13b": (13e9, 780e12, 1),
    "wan2.1-14b": (14e9, 1000e12, 2),
}


@pytest.mark.parametrize("testbed", PEAK)
@pytest.mark.parametrize("model", MODELS)
def test_presets_follow_from_their_assumptions(model, testbed):
    parameters, work, guided = MODELS[model]
    forward = work / (0.4 * PEAK[testbed])
    gather = parameters * 2 / LINK[testbed]
    cost = PRESETS[f"{model}/{testbed}"]
    assert cost.generate == pytest.approx(20 * guided * forward, rel=0.02)
    assert cost.train.b == pytest.approx(4 * forward, rel=0.02)
    assert cost.train.a == pytest.approx(2 * gather / 2, rel=0.02)
    assert cost.publish == pytest.approx(gather, rel=0.02)
    assert cost.generator == cost.trainer == Pool(GPUS[testbed] // 2)
    assert (cost.helper, cost.reward, cost.reward_per_sample, cost.reward_workers) == (1, 1.0, 0.0, None)
    assert (cost.optimizer, cost.switch, cost.restore) == (0.5, 9.1, 3.3)


def test_presets_cannot_be_changed():
    assert len(PRESETS) == 12
    with pytest.raises(TypeError):
        PRESETS["mine"] = PRESETS["flux.1-12b/B"]


SAID = {  # bound, genrl, genrl with pack 4, verl-omni, best split
    "flux.1-12b/B": (8.8, 13.2, 10.3, 25.1, 12.7),
    "qwenimage-20b/B": (19.8, 26.1, 21.3, 38.3, 20.9),
    "hunyuanvideo-13b/B": (103.6, 108.2, 105.1, 120.1, 129.3),
    "wan2.1-14b/B": (182.9, 187.8, 184.4, 199.7, 202.0),
}


@pytest.mark.parametrize("name", SAID)
def test_what_the_presets_say(name):
    cost = PRESETS[name]
    rungs = ladder(4, 8, fragments=4, timesteps=8, pack=4)
    packed = replace(rungs["genrl"], pack=4)
    said = [lower_bound(packed, cost)]
    said += [simulate(s, cost).period for s in (rungs["genrl"], packed, rungs["verl-omni"])]
    splits = []
    for m in (1, 2, 4, 8):
        for stale in (0, 1):
            schedule = replace(ladder(4, 8, fragments=m, timesteps=8, pack=4)["gap+tsp"], stale=stale)
            splits.append(simulate(schedule, best_split(32, schedule, cost), steps=8).period)
    assert [*said, min(splits)] == pytest.approx(SAID[name], abs=0.051)


def test_separation_wins_on_few_large_samples_and_costly_swaps_only():
    # 4 samples on 8 GPUs: a colocated run leaves half of them idle while it generates
    few = CostModel(60.0, TrainCost(0.0, 10.0), Pool(4), Pool(4))
    rungs = ladder(1, 4, fragments=1, timesteps=8, stale=1)
    late = replace(rungs["gap"], stale=1)
    assert simulate(late, few, steps=8).period < simulate(rungs["genrl"], few).period
    # 32 samples on as many GPUs: it fills them exactly
    many = CostModel(60.0, TrainCost(0.0, 10.0), Pool(16), Pool(16))
    full = ladder(4, 8, fragments=4, timesteps=8)
    assert simulate(full["genrl"], many).period == lower_bound(full["genrl"], many)


def test_control_a_preset_of_other_assumptions_fails():
    cost = PRESETS["wan2.1-14b/B"]
    assert cost.generate != pytest.approx(20 * 1000e12 / (0.4 * PEAK["B"]), rel=0.02)  # guidance doubles it
    assert PRESETS["flux.1-12b/C"].generator != Pool(16)
    assert simulate(ladder(4, 8, fragments=4, timesteps=8)["genrl"], cost).period != pytest.approx(184.4, abs=0.05)
