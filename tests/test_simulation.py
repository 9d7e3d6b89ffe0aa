"""Schedules played: against a second simulator, closed forms, invariants of every trace, and the bound."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import refuses
from scheduling import Ticking, costs, schedules

from diffrl.parallel import (
    CostModel,
    Fragment,
    Interval,
    Pool,
    Schedule,
    Trace,
    TrainCost,
    barrier_seconds,
    chrome_trace,
    gap_partition,
    gap_seconds,
    group_ready_times,
    ladder,
    lower_bound,
    prompt_partition,
    simulate,
    tcss_admit,
    tcss_seconds,
)

COST = CostModel(10.0, TrainCost(0.0, 4.0), Pool(1), Pool(1), helper=1, reward=1.0, switch=1.0, restore=1.0)


def whole_groups(m: int, **given) -> Schedule:
    return Schedule(prompt_partition(m, 1, fragments=m), 1, **given)


def stage_cost(g, r, t, u=0.0, w=0.0, **given) -> CostModel:
    """One sample per fragment: g, r, t are its seconds."""
    return CostModel(g, TrainCost(0.0, t), Pool(1), Pool(1), reward=r, optimizer=u, publish=w, **given)


def answering(answers):
    """A `lend` that gives these answers in turn, cut to what is there, then 0."""
    left = list(answers)
    return lambda bubble, schedule, cost: min(left.pop(0), len(bubble.unclaimed)) if left else 0


def lend_answering(answers):
    left = list(answers)
    return lambda unclaimed: min(left.pop(0), unclaimed) if left else 0


# ---- a second simulator


@given(schedules(), costs(), st.integers(1, 4), st.lists(st.integers(0, 3), max_size=8))
def test_simulate_equals_a_simulator_that_ticks(schedule, cost, steps, answers):
    trace = simulate(schedule, cost, steps=steps, lend=answering(answers))
    slow = Ticking(schedule, cost, steps=steps, lend=lend_answering(answers))
    assert trace.ends == tuple(slow.ends)
    assert trace.versions == slow.versions
    trained = [(i.start, i.step, i.fragment) for i in trace.intervals if i.kind == "train"]
    assert trained == slow.trained


# ---- closed forms

seconds = st.floats(0.01, 20)


@given(st.integers(1, 9), seconds, st.floats(0, 30), seconds, st.floats(0, 5), st.floats(0, 5))
def test_closed_forms_of_barrier_and_gap(m, g, r, t, u, w):
    cost = stage_cost(g, r, t, u, w)
    trace = simulate(whole_groups(m), cost, steps=3)
    assert trace.period == pytest.approx(gap_seconds(m, g=g, r=r, t=t, u=u, w=w), rel=1e-9)
    idle = 3 * (g + r + (m - 1) * max(0.0, g - t))
    assert trace.idle["trainer"] == pytest.approx(idle, rel=1e-9, abs=1e-9)
    barrier = simulate(whole_groups(m, barrier=True), cost, steps=2)
    assert barrier.makespan == pytest.approx(2 * barrier_seconds(m, g=g, r=r, t=t, u=u, w=w), rel=1e-9)
    assert barrier.makespan * 3 >= trace.makespan * 2 - 1e-9


@given(st.integers(1, 6), st.data(), seconds, st.floats(0, 30), seconds, st.floats(0, 5), st.floats(0, 5))
def test_closed_form_of_stale_starts(m, data, g, r, t, u, w):
    k = data.draw(st.integers(0, m))
    trace = simulate(whole_groups(m, stale=k), stage_cost(g, r, t, u, w), steps=80)
    assert trace.period == pytest.approx(tcss_seconds(m, k, g=g, r=r, t=t, u=u, w=w), rel=1e-6)


def test_golden_periods():
    assert [simulate(whole_groups(8, stale=k), stage_cost(10, 2, 6, 1, 3), steps=12).period for k in range(4)] == [
        92,
        82,
        80,
        80,
    ]
    assert simulate(whole_groups(8), COST).makespan == 85
    assert simulate(whole_groups(8, tag=True), COST).makespan == 64


def test_colocated_placements_by_hand():
    cost = replace(COST, optimizer=2.0, publish=3.0, switch=5.0, restore=7.0, reward=20.0)
    schedule = Schedule(gap_partition(1, 4, fragments=2), 4, placement="module")
    # two replicas: 2 samples in one wave of 10 s; rewards end at 30 and 40; training 2 x (1 pair) x 4 s; update 2 s
    assert simulate(schedule, cost, steps=2).ends == (50, 100)
    engines = simulate(replace(schedule, placement="engines"), cost, steps=2)
    # switch 5, generation to 25, restore to 32, rewards to 45, training to 53, update 55, publish 58
    assert engines.ends == (58, 116)
    assert [i.kind for i in engines.intervals if i.resource == "cluster" and i.step == 1] == [
        *("switch", "generate", "generate", "restore", "train", "train", "update", "publish"),
    ]
    assert engines.idle == {"cluster": 26}
    assert set(engines.staleness.values()) == {0}
    assert [i.version for i in engines.intervals if i.kind == "publish"] == [1, 2]
    one = simulate(replace(schedule, placement="engines"), replace(cost, reward_workers=1))
    assert one.ends == (68,)  # the second reward waits for the first


# ---- what holds for every trace


def intervals_by_resource(trace):
    lanes = {}
    for interval in trace.intervals:
        lanes.setdefault(interval.resource, []).append(interval)
    return lanes


@given(schedules(), costs(), st.integers(1, 4), st.lists(st.integers(0, 3), max_size=8))
def test_every_trace_is_a_possible_one(schedule, cost, steps, answers):
    trace = simulate(schedule, cost, steps=steps, lend=answering(answers))
    for lane in intervals_by_resource(trace).values():
        assert all(a.end <= b.start for a, b in itertools.pairwise(lane))
    assert [i.start for i in trace.intervals] == sorted(i.start for i in trace.intervals)
    assert all(i.end > i.start for i in trace.intervals)
    everything = [(step, f.index) for step in range(steps) for f in schedule.fragments]
    made = [(i.step, i.fragment) for i in trace.intervals if i.kind in ("generate", "help")]
    trained = [(i.step, i.fragment) for i in trace.intervals if i.kind == "train"]
    assert sorted(made) == sorted(trained) == everything  # nothing lost, nothing twice
    sizes = [len(f.samples) for f in schedule.fragments]
    how = {"timesteps": schedule.timesteps, "pack": schedule.pack, "shard_pairs": schedule.shard_pairs}
    work = {"train": cost.trainer_seconds, "generate": cost.generator_seconds, "help": cost.helper_seconds}
    for i in trace.intervals:  # work is conserved
        if i.kind in work:
            assert i.end - i.start == work[i.kind](sizes[i.fragment], **(how if i.kind == "train" else {}))
    assert trace.makespan >= steps * lower_bound(schedule, cost) * (1 - 1e-12)
    assert trace.ends == tuple(sorted(trace.ends))


@given(schedules(), costs(reward_workers=None), st.integers(1, 3), st.lists(st.integers(0, 3), max_size=8))
def test_causes_come_before_effects_and_the_trainer_is_never_idle_beside_a_trainable_fragment(
    schedule, cost, steps, answers
):
    trace = simulate(schedule, cost, steps=steps, lend=answering(answers))
    published = [0.0, *trace.ends]
    for step in range(steps):
        mine = [i for i in trace.intervals if i.step == step]
        end = {i.fragment: i.end for i in mine if i.kind in ("generate", "help")}
        scored = [end[f.index] + cost.reward_seconds(len(f.samples)) for f in schedule.fragments]
        ready = group_ready_times(schedule.fragments, schedule.group_size, scored)
        if schedule.barrier:
            ready = (max(scored),) * len(scored)
        busy = sorted((i.start, i.end) for i in mine if i.resource == "trainer")
        start = {i.fragment: i.start for i in mine if i.kind == "train"}
        for fragment, time in start.items():
            assert time >= max(ready[fragment], published[step])
            idle = [b - a for (_, a), (b, _) in itertools.pairwise([(0.0, published[step]), *busy])]
            gaps = [(a, b) for (_, a), (b, _) in itertools.pairwise([(0.0, published[step]), *busy]) if b > a]
            assert len(idle) == len(busy)
            for a, b in gaps:  # an idle trainer: this fragment was trained before, or is not yet trainable
                assert time < b or ready[fragment] >= b, (a, b, fragment)
    for i in trace.intervals:
        if i.kind in ("generate", "help", "train"):
            assert published[i.version] <= i.start
            assert i.start < published[i.version + 1] or i.version == len(trace.ends)


@given(schedules(tag=True), costs(), st.integers(1, 5), st.lists(st.integers(0, 3), max_size=8))
def test_one_version_per_trajectory_at_most_one_late(schedule, cost, steps, answers):
    trace = simulate(schedule, cost, steps=steps, lend=answering(answers))
    stale = trace.staleness
    assert set(stale.values()) <= {0, 1}
    assert all(lag == 0 for (step, _), lag in stale.items() if step == 0)  # step 0 is fresh
    for (step, fragment), lag in stale.items():
        version = trace.versions[step, fragment]
        assert tcss_admit(step=step, published=version, index=fragment, stale=schedule.stale)
        assert lag == 0 or fragment < schedule.stale  # at most K lag
    assert all(i.version == i.step for i in trace.intervals if i.kind in ("help", "train"))
    assert all(i.version == i.step + 1 for i in trace.intervals if i.kind == "publish")
    if not schedule.stale:
        assert set(stale.values()) == {0}


@given(schedules(tag=False), costs(), st.data())
def test_makespan_grows_with_every_cost_and_shrinks_with_staleness(schedule, cost, data):
    name = data.draw(st.sampled_from(["generate", "reward", "reward_per_sample", "optimizer", "publish"]))
    base = simulate(schedule, cost, steps=3).makespan
    assert simulate(schedule, replace(cost, **{name: getattr(cost, name) + 1}), steps=3).makespan >= base
    dearer = replace(cost, train=TrainCost(cost.train.a + 1, cost.train.b))
    assert simulate(schedule, dearer, steps=3).makespan >= base
    spans = [simulate(replace(schedule, stale=k), cost, steps=3).makespan for k in range(len(schedule.fragments) + 1)]
    assert spans == sorted(spans, reverse=True)


@given(st.integers(1, 6), seconds, st.floats(0, 30), seconds, st.floats(0, 5), st.integers(1, 6))
def test_more_staleness_never_hurts_equal_fragments(m, g, r, t, w, steps):
    cost = stage_cost(g, r, t, 0.0, w)
    spans = [simulate(whole_groups(m, stale=k), cost, steps=steps).makespan for k in range(m + 1)]
    assert all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(spans))


# ---- no free lunch


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.floats(0.1, 9), st.floats(0.1, 9))
def test_an_ideal_colocated_run_equals_the_bound(generators, trainers, waves, timesteps, generate, b):
    cost = CostModel(generate, TrainCost(0.0, b), Pool(generators), Pool(trainers))
    gpus = generators + trainers
    fragments = gap_partition(gpus, waves, fragments=1)
    for placement in ("module", "engines"):
        schedule = Schedule(fragments, waves, timesteps=timesteps, placement=placement)
        assert simulate(schedule, cost, steps=2).period == pytest.approx(lower_bound(schedule, cost), rel=1e-12)
    split = Schedule(gap_partition(gpus, waves, fragments=gpus), waves, timesteps=timesteps)
    assert simulate(split, cost, steps=4).period >= lower_bound(split, cost) * (1 - 1e-12)


@given(schedules(), costs(), st.integers(1, 3), st.lists(st.integers(0, 3), max_size=8))
def test_nothing_beats_the_bound_on_unequal_gpus(schedule, cost, steps, answers):
    cost = replace(cost, generator=Pool(4, 2, 3.0), trainer=Pool(2, 1, 0.5), helper=1)
    trace = simulate(schedule, cost, steps=steps, lend=answering(answers))
    assert trace.makespan >= steps * lower_bound(schedule, cost) * (1 - 1e-12)


# ---- lending, as the simulator plays it


def test_help_is_handed_to_the_reward_one_by_one_and_training_goes_first():
    trace = simulate(whole_groups(4, tag=True), COST, lend=answering([2]))
    trainer = [(i.kind, i.start, i.end, i.fragment) for i in trace.intervals if i.resource == "trainer"]
    assert trainer == [
        ("switch", 0, 1, -1),
        ("help", 1, 11, 1),
        ("help", 11, 21, 2),
        ("restore", 21, 22, -1),
        ("train", 22, 26, 0),
        ("train", 26, 30, 1),
        ("train", 30, 34, 3),  # scored at 21, before fragment 2 at 22
        ("train", 34, 38, 2),
    ]
    rewards = [(i.fragment, i.start) for i in trace.intervals if i.kind == "reward"]
    assert rewards == [(0, 10), (1, 11), (3, 20), (2, 21)]


def test_one_reward_worker_takes_the_generator_s_fragment_before_a_helper_s():
    cost = replace(COST, switch=0.0, restore=0.0, reward=5.0, reward_workers=1)
    trace = simulate(whole_groups(3, tag=True), cost, lend=answering([1]))  # 0 and 1 are done at 10, both
    assert [(i.fragment, i.start) for i in trace.intervals if i.kind == "reward"] == [(0, 10), (1, 15), (2, 20)]
    slower = replace(cost, switch=3.0)  # 0 at 10, 1 at 13
    trace = simulate(whole_groups(3, tag=True), slower, lend=answering([1]))
    assert [(i.fragment, i.start) for i in trace.intervals if i.kind == "reward"] == [(0, 10), (1, 15), (2, 20)]


def test_a_group_is_complete_with_its_last_score_not_its_last_fragment():
    schedule = Schedule(gap_partition(1, 4, fragments=2), 4)
    uneven = replace(schedule, fragments=(Fragment(0, (0, 1, 2)), Fragment(1, (3,))))
    cost = CostModel(1.0, TrainCost(0.0, 1.0), Pool(4), Pool(4), reward_per_sample=10.0)
    trace = simulate(uneven, cost)  # scored at 1 + 30 and at 2 + 10
    assert [i.start for i in trace.intervals if i.kind == "train"] == [31, 32]


def test_bubbles_say_what_is_known():
    seen = []

    def lend(bubble, schedule, cost):
        seen.append(bubble)
        return 1 if len(seen) == 1 else 0

    schedule = Schedule(gap_partition(1, 5, fragments=5), 5, tag=True)
    simulate(schedule, replace(COST, reward=25.0, reward_workers=2), lend=lend)
    first, second = seen
    assert (first.unclaimed, first.generating, first.generator_free, first.scored_in) == ((1, 2, 3, 4), 0, 10.0, ())
    assert first.reward_free == (0.0, 0.0)
    # at 12: 0 is scored at 35, 1 (helped, done at 11) at 36, 2 in flight until 20
    assert second == ((3, 4), 2, 8.0, ((0, 23.0), (1, 24.0)), (23.0, 24.0))


def test_no_second_question_until_a_fragment_has_been_trained():
    asked = []

    def never(bubble, schedule, cost):
        asked.append(bubble.unclaimed)
        return 0

    simulate(whole_groups(4, tag=True), COST, lend=never)
    assert asked == [(1, 2, 3), (2, 3), (3,)]
    asked.clear()
    simulate(whole_groups(4, tag=True, barrier=True), COST, lend=never, steps=2)
    assert asked == [(1, 2, 3), (1, 2, 3)]


@pytest.mark.parametrize("answer", [-1, 4, 1.0, True, None])
def test_an_impossible_answer_is_refused(answer):
    with refuses("lend", answer, "0..3"):
        simulate(whole_groups(4, tag=True), COST, lend=lambda *_: answer)


def test_an_integer_of_any_kind_is_an_answer():
    answers = [simulate(whole_groups(4, tag=True), COST, lend=lambda *_, n=n: n) for n in (1, np.int64(1))]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_an_answer_of_another_kind_leaves_no_trace_of_it(kind):
    trace = simulate(whole_groups(4, tag=True), COST, lend=lambda bubble, *_: kind(min(1, len(bubble.unclaimed))))
    assert trace == simulate(whole_groups(4, tag=True), COST, lend=lambda bubble, *_: min(1, len(bubble.unclaimed)))
    assert {type(i.fragment) for i in trace.intervals} == {int}
    json.dumps(chrome_trace(trace))
    assert trace.versions[0, 3] == 0


def test_an_answer_that_only_looks_like_an_integer_is_refused():
    for answer in (np.ones(2, dtype=int), torch.ones(2), np.array(1.0), "1"):
        with refuses("lend", "0..3"):
            simulate(whole_groups(4, tag=True), COST, lend=lambda *_, answer=answer: answer)


@pytest.mark.parametrize("name", ["generate", "reward"])
def test_seconds_whose_sum_is_beyond_every_float_are_refused(name):
    for options in ({}, {"tag": True}, {"placement": "module"}):
        with refuses("finite", "1e+308"):
            simulate(whole_groups(4, **options), replace(COST, **{name: 1e308}), steps=2)
    assert simulate(whole_groups(4), replace(COST, **{name: 1e300})).makespan >= 1e300


def test_simulate_refuses():
    for steps in (0, 1.5, True):
        with refuses("steps", steps):
            simulate(whole_groups(2), COST, steps=steps)
    with refuses("cost.helper", 0):
        simulate(whole_groups(2, tag=True), replace(COST, helper=0))
    with refuses("Schedule", "None"):
        simulate(None, COST)
    with refuses("CostModel", "None"):
        simulate(whole_groups(2), None)


# ---- staleness rule


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_admission(step, published, index, stale):
    if published > step:
        with refuses("published", published, step):
            tcss_admit(step=step, published=published, index=index, stale=stale)
        return
    lag = step - published
    expected = lag == 0 or (lag == 1 and index in range(stale))
    assert tcss_admit(step=step, published=published, index=index, stale=stale) is expected


@pytest.mark.parametrize("name", ["step", "published", "index", "stale"])
def test_admission_refuses(name):
    for value in (-1, 0.5):
        with refuses(name, value):
            tcss_admit(**{"step": 1, "published": 1, "index": 0, "stale": 0, name: value})


# ---- Chrome traces


@given(schedules(), costs(), st.integers(1, 3))
def test_chrome_trace_holds_every_interval(schedule, cost, steps):
    trace = simulate(schedule, cost, steps=steps, lend=answering([1, 2]))
    data = json.loads(json.dumps(chrome_trace(trace)))
    names = {e["tid"]: e["args"]["name"] for e in data["traceEvents"] if e["ph"] == "M"}
    assert sorted(names.values()) == sorted({i.resource for i in trace.intervals})
    assert {e["name"] for e in data["traceEvents"] if e["ph"] == "M"} == {"thread_name"}
    events = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert len(events) + len(names) == len(data["traceEvents"])
    for event, i in zip(events, trace.intervals, strict=True):
        assert (names[event["tid"]], event["name"]) == (i.resource, i.kind)
        assert event["ts"] == pytest.approx(i.start * 1e6)
        assert event["dur"] == pytest.approx((i.end - i.start) * 1e6)
        assert event["args"] == {"step": i.step, "fragment": i.fragment, "version": i.version}


def test_chrome_lanes_are_in_reading_order():
    lanes = ("reward/10", "trainer", "reward/2", "generator")
    trace = Trace(tuple(Interval(lane, "reward", 0.0, 1.0, 0) for lane in lanes), (1.0,))
    names = [e["args"]["name"] for e in chrome_trace(trace)["traceEvents"] if e["ph"] == "M"]
    assert names == ["generator", "trainer", "reward/2", "reward/10"]


# ---- many fragments, negative control


def test_many_fragments_cost_no_more_than_their_number():
    schedule = Schedule(gap_partition(1, 20_000, fragments=20_000), 20_000)  # all of them wait for one group
    trace = simulate(schedule, stage_cost(1.0, 0.0, 1.0))
    assert trace.makespan == 40_000
    assert simulate(whole_groups(10), stage_cost(1.0, 0.0, 1.0), steps=200).makespan == 200 * 11


def test_control_the_invariants_can_fail():
    schedule = Schedule((Fragment(0, (0,)), Fragment(1, (1,))), 2)
    trace = simulate(schedule, COST)
    assert trace.makespan != simulate(replace(schedule, group_size=1), COST).makespan  # the cut group does wait
    late = simulate(replace(schedule, stale=1), COST, steps=2)
    assert max(late.staleness.values()) == 1
    assert not tcss_admit(step=1, published=late.versions[1, 0], index=0, stale=0)
    ideal = ladder(2, 4, fragments=2)["genrl"]
    dear = CostModel(1.0, TrainCost(0.5, 1.0), Pool(1), Pool(1))
    assert simulate(ideal, dear).period == lower_bound(ideal, dear)
    assert simulate(ideal, replace(dear, optimizer=1.0)).period > lower_bound(
        ideal, dear
    )  # equality needs no overheads
    with pytest.raises(AssertionError):
        assert Ticking(schedule, replace(COST, reward=2.0)).ends == list(trace.ends)
    assert math.isfinite(trace.period)
