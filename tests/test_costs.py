"""Seconds of every stage against counting, the fit against scipy, closed forms against small loops, and the bound."""

import itertools
import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import refuses
from scheduling import costs, schedules
from scipy.optimize import nnls

from diffrl.parallel import (
    CostModel,
    Pool,
    Schedule,
    TrainCost,
    barrier_seconds,
    fit_train_cost,
    gap_partition,
    gap_seconds,
    lower_bound,
    tcss_seconds,
)

COST = CostModel(3.0, TrainCost(1.0, 2.0), Pool(4, 2, 1.5), Pool(6, 3, 0.5), helper=2)
counts = st.integers(1, 12)


# ---- refusals of the data


def test_pools_and_train_costs_refuse():
    for gpus, per_replica, speed, name in (
        (0, 1, 1.0, "gpus"),
        (3, 2, 1.0, "gpus"),
        (2.0, 1, 1.0, "gpus"),
        (2, 0, 1.0, "per_replica"),
        (2, 1, 0.0, "speed"),
        (2, 1, math.nan, "speed"),
        (2, 1, math.inf, "speed"),
    ):
        with refuses(name):
            Pool(gpus, per_replica, speed)
    for a, b, name in (
        (-1.0, 1.0, "a"),
        (1.0, -1.0, "b"),
        (0.0, 0.0, "a + b"),
        (math.nan, 1.0, "a"),
        (1.0, math.inf, "b"),
    ):
        with refuses(name):
            TrainCost(a, b)
    for q in (0, 1.5):
        with refuses("q", q):
            TrainCost(1.0, 1.0)(q)
    assert Pool(6, 3).replicas == 2
    assert TrainCost(57.0, 337.0)(4) == 1405


NUMBERS = ("generate", "reward", "reward_per_sample", "optimizer", "publish", "switch", "restore")


@pytest.mark.parametrize("name", NUMBERS)
def test_cost_models_refuse_bad_seconds(name):
    for value in (-1.0, math.nan, math.inf, *([0.0] if name == "generate" else [])):
        with refuses(name, value):
            replace(COST, **{name: value})


def test_cost_models_refuse_and_are_frozen():
    for name, value in (
        ("helper", -1),
        ("helper", 7),
        ("helper", 1.0),
        ("reward_workers", 0),
        ("reward_workers", 1.5),
        ("train", 3.0),
        ("generator", 4),
        ("trainer", None),
    ):
        with refuses(name, value):
            replace(COST, **{name: value})
    with pytest.raises(FrozenInstanceError):
        COST.generate = 1.0
    assert hash(COST) == hash(replace(COST))
    assert {COST: 1}[replace(COST, generate=3)] == 1


# ---- stages


def longest_queue(items, workers):
    """Items dealt one by one to the least loaded of the workers: the longest list."""
    load = [0] * workers
    for _ in range(items):
        load[load.index(min(load))] += 1
    return max(load)


@given(counts, counts, counts, st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 4))
def test_stages_by_dealing_work_out(samples, generators, trainers, wide, timesteps, pack, helper):
    cost = CostModel(
        3.0,
        TrainCost(1.0, 2.0),
        Pool(generators * wide, wide, 2.0),
        Pool(trainers, 1, 0.5),
        helper=min(helper, trainers),
        reward=4.0,
        reward_per_sample=0.5,
    )
    assert cost.generator_seconds(samples) == longest_queue(samples, generators) * 3.0 / 2.0
    assert cost.helper_seconds(samples) == longest_queue(samples, trainers // cost.helper) * 3.0 / 0.5
    assert cost.reward_seconds(samples) == 4.0 + 0.5 * samples

    def training(pairs):
        packs = [min(pack, pairs - i) for i in range(0, pairs, pack)]
        return sum(cost.train(q) for q in packs) / 0.5

    fullest = longest_queue(samples, trainers) * timesteps
    assert cost.trainer_seconds(samples, timesteps=timesteps, pack=pack) == pytest.approx(training(fullest))
    fullest = longest_queue(samples * timesteps, trainers)
    sharded = cost.trainer_seconds(samples, timesteps=timesteps, pack=pack, shard_pairs=True)
    assert sharded == pytest.approx(training(fullest))
    assert sharded <= cost.trainer_seconds(samples, timesteps=timesteps, pack=pack)


def test_stages_refuse():
    for samples in (0, 1.5, -1):
        for stage in (COST.generator_seconds, COST.helper_seconds, COST.reward_seconds):
            with refuses("samples", samples):
                stage(samples)
        with refuses("samples", samples):
            COST.trainer_seconds(samples, timesteps=1)
    with refuses("timesteps", 0):
        COST.trainer_seconds(1, timesteps=0)
    with refuses("pack", 0):
        COST.trainer_seconds(1, timesteps=1, pack=0)
    with refuses("helper", 0):
        replace(COST, helper=0).helper_seconds(1)


def test_colocated_holds_all_gpus_in_whole_replicas_at_the_slower_speed():
    both = COST.colocated()
    assert both.generator == Pool(10, 2, 0.5)
    assert both.trainer == Pool(9, 3, 0.5)
    assert replace(both, generator=COST.generator, trainer=COST.trainer) == COST


@given(costs())
def test_colocated_loses_less_than_a_replica(cost):
    both, gpus = cost.colocated(), cost.generator.gpus + cost.trainer.gpus
    for pool in (both.generator, both.trainer):
        assert gpus - pool.per_replica < pool.gpus <= gpus


# ---- fit


@given(st.lists(st.integers(1, 8), min_size=2, max_size=9), st.data())
def test_the_fit_is_least_squares_under_signs(sizes, data):
    sizes = [*sizes, max(sizes) + 1]
    seconds = data.draw(st.lists(st.floats(0.01, 50), min_size=len(sizes), max_size=len(sizes)))
    cost = fit_train_cost(sizes, seconds)
    design = np.stack([np.ones(len(sizes)), sizes], 1).astype(float)
    expected, residual = nnls(design, np.array(seconds))
    np.testing.assert_allclose([cost.a, cost.b], expected, rtol=1e-6, atol=1e-7)
    got = np.linalg.norm(design @ [cost.a, cost.b] - seconds)
    assert got <= residual * (1 + 1e-9) + 1e-9


@given(st.floats(0, 10), st.floats(0.01, 10))
def test_the_fit_finds_an_exact_line(a, b):
    cost = fit_train_cost([1, 2, 4], [a + b, a + 2 * b, a + 4 * b])
    assert cost.a == pytest.approx(a, abs=1e-9)
    assert cost.b == pytest.approx(b, rel=1e-9)


def test_the_fit_of_published_milliseconds():
    cost = fit_train_cost([1, 2, 4], [391.0, 737.0, 1404.0])
    assert (cost.a, cost.b) == (pytest.approx(57.5, abs=0.05), pytest.approx(337.07, abs=0.05))
    assert (cost.a + cost.b) / cost.b == pytest.approx(1.17, abs=0.005)  # all that packing can gain


def test_the_fit_refuses():
    for sizes, seconds, *words in (
        ([1, 1], [1.0, 2.0], "two distinct", "1.0"),
        ([], [], "two distinct"),
        ([1, 2], [1.0], "2", "1"),
        ([0, 2], [1.0, 2.0], "sizes[0]", "0"),
        ([1, math.inf], [1.0, 2.0], "sizes[1]", "inf"),
        ([1, 2], [1.0, 0.0], "seconds[1]", "0.0"),
        ([1, 2], [math.nan, 1.0], "seconds[0]", "nan"),
    ):
        with refuses(*words):
            fit_train_cost(sizes, seconds)


@pytest.mark.parametrize("unit", [1e-300, 1e-160, 1e160, 1e300])
def test_the_fit_has_no_unit(unit):
    cost = fit_train_cost([1, 2, 4], [t * unit for t in (391.0, 737.0, 1404.0)])
    assert (cost.a, cost.b) == (pytest.approx(57.5 * unit, rel=1e-3), pytest.approx(337.07 * unit, rel=1e-3))
    flat = fit_train_cost((q for q in (unit, unit / 2)), (t for t in (1.0, 2.0)))  # fits a constant
    assert (flat.a, flat.b) == (1.5, 0.0)


@pytest.mark.parametrize("value", ["3", b"3", True, 10**400, -(10**400), np.ones(2), torch.ones(2), 1j, None])
def test_what_is_no_number_is_refused_by_name(value):
    for name in ("generate", "switch"):
        with refuses(name):
            replace(COST, **{name: value})
    with refuses("speed"):
        Pool(2, speed=value)
    for function in (barrier_seconds, gap_seconds, lambda m, **s: tcss_seconds(m, 0, **s)):
        with refuses("t"):
            function(2, g=1.0, r=1.0, t=value)
    with refuses("seconds[1]"):
        fit_train_cost([1, 2], [1.0, value])
    with refuses("sizes", 3):
        fit_train_cost(3, [1.0])


def test_numbers_without_a_dimension_are_numbers():
    given = CostModel(np.float32(2), TrainCost(torch.tensor(1.0), np.float64(2)), Pool(np.int64(2)), Pool(2))
    assert given == CostModel(2.0, TrainCost(1.0, 2.0), Pool(2), Pool(2))
    assert {type(x) for x in (given.generate, given.train.a, given.train.b)} == {float}
    for shard_pairs in (None, 1, "yes"):
        with refuses("shard_pairs", shard_pairs):
            COST.trainer_seconds(1, timesteps=1, shard_pairs=shard_pairs)


# ---- closed forms


@st.composite
def stages(draw):
    value = st.integers(0, 12)
    return draw(st.integers(1, 7)), {"g": draw(value) + 1, "t": draw(value) + 1, **{n: draw(value) for n in "ruw"}}


@given(stages())
def test_closed_forms_against_loops(drawn):
    m, s = drawn
    generated, trained, idle = 0, 0, 0
    for _ in range(m):
        generated += s["g"]
        idle += max(0, generated + s["r"] - trained)
        trained = max(trained, generated + s["r"]) + s["t"]
    assert gap_seconds(m, **s) == trained + s["u"] + s["w"]
    assert idle == s["g"] + s["r"] + (m - 1) * max(0, s["g"] - s["t"])
    scored = m * s["g"] + s["r"]
    assert barrier_seconds(m, **s) == scored + m * s["t"] + s["u"] + s["w"]


@given(stages())
def test_staleness_interpolates_from_gap_to_the_slower_pool(drawn):
    m, s = drawn
    periods = [tcss_seconds(m, k, **s) for k in range(m + 1)]
    assert periods[0] == gap_seconds(m, **s)
    assert all(a >= b for a, b in itertools.pairwise(periods))
    assert periods[-1] >= max(m * s["g"], m * s["t"] + s["u"] + s["w"])
    # with everything stale the cycle of any fragment spans two steps
    assert periods[-1] == max(
        m * s["g"],
        m * s["t"] + s["u"] + s["w"],
        *((j * s["g"] + s["r"] + (m - j + 1) * s["t"] + s["u"] + s["w"]) / 2 for j in range(1, m + 1)),
    )


def test_closed_forms_refuse():
    good = {"g": 1.0, "r": 1.0, "t": 1.0}
    for function in (barrier_seconds, gap_seconds, lambda m, **s: tcss_seconds(m, 0, **s)):
        with refuses("m", 0):
            function(0, **good)
        for name in ("g", "r", "t", "u", "w"):
            for value in (-1.0, math.nan):
                with refuses(name, value):
                    function(2, **{**good, name: value})
    for k in (-1, 3, 1.5):
        with refuses("k", k):
            tcss_seconds(2, k, **good)


# ---- the bound


@pytest.mark.parametrize(("g_width", "t_width"), [(1, 1), (1, 3), (3, 1)])
@pytest.mark.parametrize("tag", [False, True])
@given(schedules(), costs())
def test_the_bound_counts_work_sample_by_sample(tag, g_width, t_width, schedule, cost):
    schedule = replace(schedule, tag=tag)
    cost = replace(
        cost, generator=Pool(2 * g_width, g_width, 2.0), trainer=Pool(3 * t_width, t_width, 0.5), helper=t_width
    )
    narrow = min(g_width, t_width) if schedule.tag else g_width
    work = 0.0
    for fragment in schedule.fragments:
        for _ in fragment.samples:
            work += cost.generate * narrow
            for _ in range(schedule.timesteps):
                work += (cost.train.a / schedule.pack + cost.train.b) * t_width
    assert lower_bound(schedule, cost) == pytest.approx(work / (2 * g_width * 2.0 + 3 * t_width * 0.5))
    without = replace(cost, helper=0)
    assert lower_bound(schedule, without) == pytest.approx(lower_bound(replace(schedule, tag=False), cost))


def test_the_bound_refuses():
    with refuses("Schedule", "None"):
        lower_bound(None, COST)
    with refuses("CostModel", "None"):
        lower_bound(Schedule(gap_partition(1, 1, fragments=1), 1), None)


def test_control_wrong_costs_are_noticed():
    assert COST.trainer_seconds(3, timesteps=2) != 3 * 2 * COST.train(1) / 0.5  # ranks and speed do matter
    assert fit_train_cost([1, 2], [3.0, 3.5]) != fit_train_cost([1, 2], [3.5, 3.0])
    assert tcss_seconds(8, 1, g=10, r=2, t=6, u=1, w=3) < tcss_seconds(8, 0, g=10, r=2, t=6, u=1, w=3)
    assert longest_queue(5, 2) == 3 != 5 / 2
