"""The executor's rules are the simulator's: on a clock that takes exactly what a cost model says, the same trace.

Negative controls are the tests with `control` in their names.
"""

import dataclasses

import pytest
from executing import Clocked, Idle, clocked
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import costs, schedules

from diffrl.conductor import THOUGHT, Conductor, Flight, Progress
from diffrl.parallel import CostModel, Pool, Schedule, TrainCost, gap_partition, prompt_partition, simulate


def told(trace):
    """Everything of a trace, in an order of its own."""
    return sorted(
        (i.resource, i.start, i.end, i.kind, i.step, i.fragment, i.version) for i in trace.intervals
    ), trace.ends


def half(bubble, schedule, cost):
    return (len(bubble.unclaimed) + 1) // 2


def timed(data, **given):
    """Whole seconds, none of them 0: what takes no time has no order."""
    cost = data.draw(costs(reward_workers=data.draw(st.integers(1, 2)), **given))
    return dataclasses.replace(
        cost, **{n: getattr(cost, n) + 1 for n in ("reward", "optimizer", "publish", "switch", "restore")}
    )


@settings(max_examples=80)
@given(st.data())
def test_the_executor_s_rules_give_the_simulated_trace(data):
    schedule, cost = data.draw(schedules()), timed(data)
    measured, expected = clocked(schedule, cost, steps=3, lend=half), simulate(schedule, cost, steps=3, lend=half)
    assert told(measured) == told(expected)


@settings(max_examples=40)
@given(st.data())
def test_the_search_is_told_the_same_bubbles(data):
    schedule, cost = data.draw(schedules(most=5, tag=True)), timed(data)
    assert told(clocked(schedule, cost)) == told(simulate(schedule, cost, steps=2))


@settings(max_examples=40)
@given(st.data(), st.sampled_from(["engines", "module"]))
def test_colocated_rules_too(data, placement):
    schedule = data.draw(schedules(placement=placement, tag=False, stale=0))
    cost = timed(data)
    assert told(clocked(schedule, cost)) == told(simulate(schedule, cost, steps=2))


def test_control_another_cost_is_another_trace():
    schedule = Schedule(gap_partition(2, 2, fragments=4), 2)
    cost = CostModel(
        2.0, TrainCost(1.0, 1.0), Pool(1), Pool(1), reward=1.0, reward_workers=1, optimizer=1.0, publish=1.0
    )
    slower = dataclasses.replace(cost, generate=3.0)
    assert told(clocked(schedule, cost)) == told(simulate(schedule, cost, steps=2))
    assert told(clocked(schedule, slower)) != told(simulate(schedule, cost, steps=2))


def test_a_batch_knows_what_can_be_trained():
    batch = Progress(0, Schedule(prompt_partition(2, 2, fragments=2), 2))
    assert batch.ready() == []
    batch.rewards, batch.scored_at = {1: None, 0: None}, {1: 3.0, 0: 5.0}
    assert batch.ready()[0] == (3.0, 1)
    batch.trained.add(1)
    assert batch.ready() == [(5.0, 0)]
    cut = Progress(0, Schedule(gap_partition(1, 4, fragments=2), 4))
    cut.rewards, cut.scored_at = {0: None}, {0: 1.0}
    assert cut.ready() == []


def test_a_schedule_that_stands_still_says_so():
    schedule = Schedule(gap_partition(1, 2, fragments=1), 2)
    cost = CostModel(1.0, TrainCost(1.0, 1.0), Pool(1), Pool(1), reward=1.0, reward_workers=1)
    backend = Clocked(cost)
    backend.open(Idle(), schedule)
    conductor = Conductor(schedule, backend, updates=1, start=0, stop=1, cost=cost, lend=half, retries=0, timeout=None)
    conductor.this.place = 1  # claimed by nobody
    with pytest.raises(RuntimeError, match="step 0 stands still"):
        conductor.play()
    assert THOUGHT == 0.05
    assert Flight._fields[:2] == ("future", "handle")
