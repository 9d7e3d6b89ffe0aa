"""The data: what is refused when built, plain JSON, and what a trace says about itself."""

import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from oracles import refuses
from scheduling import costs, schedules

from diffrl.parallel import Bubble, Fragment, Interval, Schedule, Trace, gap_partition, simulate
from diffrl.schedules import require_fragments, sharing

CUT = gap_partition(2, 2, fragments=3)


@pytest.mark.parametrize(
    ("fragments", "words"),
    [
        ((), ("fragments", "()")),
        ([Fragment(0, (0,))], ("fragments", "tuple")),
        (((0, (0,)),), ("fragments", "Fragment")),
        ((Fragment(1, (0,)),), ("indices", "1")),
        ((Fragment(0, (0,)), Fragment(0, (1,))), ("indices", "0")),
        ((Fragment(0, ()),), ("samples", "()")),
        ((Fragment(0, [0]),), ("samples", "[0]")),
        ((Fragment(0, (0.5,)),), ("samples", "0.5")),
        ((Fragment(0, (-1,)),), ("samples", "-1")),
        ((Fragment(0, (0, 0)),), ("row 0", "twice")),
        ((Fragment(0, (0, 1)), Fragment(1, (1, 2))), ("row 1", "twice")),
        ((Fragment(0, (0, 2)),), ("row 1", "missing")),
    ],
)
def test_schedules_refuse_bad_fragments(fragments, words):
    with refuses(*words):
        Schedule(fragments, 1)
    with refuses(*words):
        require_fragments(fragments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("group_size", 0),
        ("group_size", 3),
        ("group_size", 2.0),
        ("timesteps", 0),
        ("pack", 0),
        ("pack", True),
        ("placement", "both"),
        ("placement", None),
        ("barrier", 1),
        ("shard_pairs", "no"),
        ("tag", None),
        ("stale", -1),
        ("stale", 4),
        ("stale", math.nan),
    ],
)
def test_schedules_refuse_bad_settings(name, value):
    with refuses(name, value):
        Schedule(**{"fragments": CUT, "group_size": 2, name: value})


@pytest.mark.parametrize("placement", ["engines", "module"])
def test_colocated_schedules_have_a_barrier_and_no_tag_or_stale(placement):
    assert Schedule(CUT, 2, placement=placement).barrier is True
    with refuses("tag", placement):
        Schedule(CUT, 2, placement=placement, tag=True)
    with refuses("stale", placement):
        Schedule(CUT, 2, placement=placement, stale=1)


@given(schedules(), costs())
def test_schedules_and_costs_are_plain_hashable_data(schedule, cost):
    data = json.loads(json.dumps(dataclasses.asdict(schedule)))
    fragments = tuple(Fragment(i, tuple(rows)) for i, rows in data.pop("fragments"))
    again = Schedule(fragments, **data)
    assert again == schedule
    assert hash(again) == hash(schedule)
    assert hash(cost) == hash(dataclasses.replace(cost))
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.pack = 2
    assert schedule.rows == sum(len(f.samples) for f in schedule.fragments)
    assert json.dumps(dataclasses.asdict(Schedule(fragments, np.int64(schedule.group_size))))


def test_numbers_of_another_kind_become_plain_ones():
    given = Schedule((Fragment(np.int64(0), (np.int64(1), np.int64(0))),), np.int64(2), pack=np.int8(2))
    assert given == Schedule((Fragment(0, (1, 0)),), 2, pack=2)
    assert json.loads(json.dumps(dataclasses.asdict(given)))["fragments"] == [[0, [1, 0]]]
    for index in (0.0, False, None, "0"):
        with refuses("index", index):
            Schedule((Fragment(index, (0,)),), 1)


def test_groups_that_fragments_touch():
    assert sharing(CUT, 2) == ((0,), (1,), (1,))
    assert sharing(CUT, 4) == ((0,), (0,), (0,))
    assert sharing((Fragment(0, (3, 0)),), 2) == ((0, 1),)
    assert sharing(CUT, 2, barrier=True) == ((0,), (0,), (0,))


# ---- traces


def trace_of(*ends):
    return Trace((), ends)


def test_the_period_is_over_an_even_window():
    assert trace_of(3.0).period == 3.0
    assert trace_of(3.0, 5.0, 9.0).period == 3.0
    assert trace_of(3.0, 5.0, 9.0, 12.0).period == (12 - 5) / 2
    assert trace_of(*(float(i) for i in (1, 3, 4, 6, 7, 9, 10, 12))).period == (12 - 6) / 4
    assert trace_of(3.0, 5.0).makespan == 5.0


def test_idle_versions_and_staleness():
    trace = Trace(
        (
            Interval("generator", "generate", 0.0, 3.0, 0, 0, 0),
            Interval("trainer", "help", 1.0, 4.0, 0, 1, 0),
            Interval("generator", "generate", 3.0, 5.0, 1, 0, 0),
            Interval("reward/0", "reward", 3.0, 9.0, 0, 0),
            Interval("trainer", "train", 4.0, 5.0, 0, 1, 0),
        ),
        (10.0,),
    )
    assert trace.idle == {"generator": 5.0, "trainer": 6.0}
    assert trace.versions == {(0, 0): 0, (0, 1): 0, (1, 0): 0}
    assert trace.staleness == {(0, 0): 0, (0, 1): 0, (1, 0): 1}
    assert Trace((Interval("cluster", "update", 0.0, 1.0, 0),), (4.0,)).idle == {"cluster": 3.0}
    assert hash(trace) == hash(dataclasses.replace(trace))


def test_traces_refuse():
    good = Interval("trainer", "train", 1.0, 2.0, 0, 0, 0)
    for bad in (
        good._replace(end=0.5),
        good._replace(start=math.nan),
        good._replace(end=math.inf),
        good._replace(start=0.5),
        good._replace(kind="dream"),
        good._replace(resource="gpu"),
    ):
        with refuses("intervals", bad):
            Trace((good, bad), (3.0,))
    for bad in ([good], "traces", None):
        with refuses("intervals", "tuple"):
            Trace(bad, (3.0,))
    with refuses("ends", "tuple", "[3.0]"):
        Trace((good,), [3.0])
    for bad in (tuple(good), None, good._replace(start=None), good._replace(end="2"), good._replace(resource=3)):
        with refuses("intervals"):
            Trace((bad,), (3.0,))
    with refuses("ends", "()"):
        trace_of()
    for ends in ((2.0, 1.0), (math.nan,), (-1.0,), (math.inf,)):
        with refuses("ends", ends[-1]):
            trace_of(*ends)


def test_defaults_of_the_named_tuples():
    assert Interval("trainer", "update", 0.0, 1.0, 2)[5:] == (-1, -1)
    assert Bubble((1,)) == ((1,), -1, 0.0, (), ())


def test_scheduling_needs_no_torch():
    code = "import sys, diffrl.parallel; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == ["False"] * 2


def test_control_a_trace_tells_schedules_apart():
    from test_simulation import COST

    base = simulate(Schedule(CUT, 2), COST, steps=2)
    assert base != simulate(Schedule(CUT, 2, stale=1), COST, steps=2)
    assert base.idle != simulate(Schedule(CUT, 2, barrier=True), COST, steps=2).idle
    code = "import sys, torch; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == ["True"]
