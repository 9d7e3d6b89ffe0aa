"""How many fragments a waiting trainer takes: against the enumeration of every sequence of answers."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles import refuses
from scheduling import Ticking, costs, schedules

from diffrl.lending import _Search
from diffrl.parallel import (
    PRESETS,
    Bubble,
    CostModel,
    Pool,
    Schedule,
    TrainCost,
    bts_search,
    gap_partition,
    ladder,
    prompt_partition,
    simulate,
)

COST = CostModel(10.0, TrainCost(0.0, 4.0), Pool(1), Pool(1), helper=1, reward=1.0, switch=1.0, restore=1.0)
EIGHT = Schedule(prompt_partition(8, 1, fragments=8), 1, tag=True)
FIRST = Bubble(unclaimed=(1, 2, 3, 4, 5, 6, 7), generating=0, generator_free=10.0)


class Asked(Exception):
    """The script of answers ran out at a bubble with this many unclaimed fragments."""


def every_play(schedule, cost, script=()):
    """(script, end) of every sequence of answers, by a simulator that shares no code with the search."""
    left = list(script)

    def lend(unclaimed):
        if left:
            return left.pop(0)
        raise Asked(unclaimed)

    try:
        yield tuple(script), Ticking(schedule, cost, lend=lend).ends[-1]
    except Asked as asked:
        for n in range(asked.args[0] + 1):
            yield from every_play(schedule, cost, (*script, n))


def recorded(schedule, cost):
    """(the answers of the search in one step, the end)."""
    answers = []

    def lend(bubble, schedule, cost):
        answers.append(bts_search(bubble, schedule, cost))
        return answers[-1]

    end = simulate(schedule, cost, lend=lend).makespan
    return answers, end


@given(schedules(most=5, tag=True, stale=0), costs(most=9))
def test_the_search_equals_enumeration(schedule, cost):
    answers, end = recorded(schedule, cost)
    plays = dict(every_play(schedule, cost))
    best = min(plays.values())
    assert end == best
    # at every bubble, given the answers before it, the smallest that still reaches the best end
    for i, answer in enumerate(answers):
        before = tuple(answers[:i])
        optimal = {play[i] for play, value in plays.items() if value == best and play[:i] == before}
        assert answer == min(optimal)


@pytest.mark.parametrize(("m", "k", "workers"), [(7, 1, None), (7, 2, 1), (6, 3, 2)])
def test_the_search_equals_enumeration_on_seven_fragments(m, k, workers):
    schedule = Schedule(
        gap_partition(4, k, fragments=m) if 4 * k >= m else gap_partition(7, k, fragments=m), k, tag=True
    )
    for generate, train, switch in ((9.0, 2.0, 1.0), (5.0, 3.0, 0.0), (7.0, 1.0, 3.0)):
        cost = replace(
            COST, generate=generate, train=TrainCost(0.0, train), switch=switch, reward=4.0, reward_workers=workers
        )
        assert recorded(schedule, cost)[1] == min(end for _, end in every_play(schedule, cost))


def test_golden_answer():
    assert bts_search(FIRST, EIGHT, COST) == 3
    assert simulate(EIGHT, COST).makespan == 64
    assert simulate(replace(EIGHT, tag=False), COST).makespan == 85
    guess = (8 * (10 - 4) - 2) / (10 + 10)
    assert guess == pytest.approx(2.3)  # a first guess only: one less than the answer


@given(schedules(most=9, tag=True, stale=0), costs())
def test_never_worse_than_no_help(schedule, cost):
    assert simulate(schedule, cost).makespan <= simulate(replace(schedule, tag=False), cost).makespan


@given(schedules(most=9, tag=True, stale=0), costs(), st.floats(0.1, 10), st.floats(0, 10))
def test_never_worse_than_no_help_whatever_the_seconds(schedule, cost, generate, reward):
    cost = replace(cost, generate=generate, reward=reward)
    helped, alone = simulate(schedule, cost, steps=2), simulate(replace(schedule, tag=False), cost, steps=2)
    assert helped.makespan <= alone.makespan * (1 + 1e-9)


@given(schedules(most=6, tag=True), costs(most=9))
def test_a_running_state_is_planned_as_well_as_a_fresh_one(schedule, cost):
    """Whatever was answered before, from the bubble at hand the search predicts the best end there is."""
    assume(len(schedule.fragments) >= 3)
    script = (1,)
    plays = [(play, end) for play, end in every_play(replace(schedule, stale=0), cost) if play[:1] == script]
    assume(plays)
    left = list(script)
    trace = simulate(replace(schedule, stale=0), cost, lend=lambda *b: left.pop(0) if left else bts_search(*b))
    assert trace.makespan == min(end for _, end in plays)


@given(schedules(most=8, tag=True, stale=0), costs())
def test_no_help_when_the_trainer_is_the_bottleneck_or_the_switch_is_dear(schedule, cost):
    dear = replace(cost, switch=1e6)
    assert not any(i.kind == "help" for i in simulate(schedule, dear).intervals)
    # every fragment scored at once after a generation that takes no longer than training the one before
    bound = replace(
        cost, generate=1.0, generator=Pool(64), train=TrainCost(0.0, 9.0), trainer=Pool(1), helper=1, reward=0.0,
        reward_per_sample=0.0,
    )  # fmt: skip
    whole = Schedule(prompt_partition(4, 2, fragments=4), 2, tag=True)
    assert not any(i.kind == "help" for i in simulate(whole, bound).intervals)


def test_what_is_in_flight_counts():
    # The generator is done soon and one fragment is left: taking it would only add two switches.
    last = Bubble(unclaimed=(7,), generating=6, generator_free=1.0)
    assert bts_search(last, EIGHT, COST) == 0
    # It is blocked for long: the trainer takes what is left.
    assert bts_search(last._replace(generator_free=60.0), EIGHT, COST) == 1
    # Scored fragments to come keep the trainer busy: less help than with an empty hand.
    busy = Bubble((4, 5, 6, 7), 3, 10.0, ((1, 0.5), (2, 0.5)))
    assert bts_search(busy, EIGHT, COST) <= bts_search(busy._replace(scored_in=()), EIGHT, COST)
    # A free generator takes what the trainer leaves.
    assert bts_search(Bubble(unclaimed=(6, 7)), EIGHT, replace(COST, switch=0.0, restore=0.0)) == 1


def test_a_slow_reward_worker_makes_help_useless():
    slow = replace(COST, reward=50.0, reward_workers=1)
    assert bts_search(FIRST._replace(reward_free=(0.0,)), EIGHT, slow) == 0
    assert bts_search(FIRST._replace(reward_free=(0.0,) * 8), EIGHT, replace(slow, reward_workers=8)) > 0


def test_nothing_to_decide():
    assert bts_search(Bubble(unclaimed=()), EIGHT, COST) == 0
    ready = Bubble((3, 4, 5, 6, 7), 2, 90.0, ((1, 0.0),))
    assert bts_search(ready, EIGHT, COST) == 0  # a trainable fragment goes first
    assert bts_search(ready._replace(scored_in=((1, 30.0),)), EIGHT, COST) > 0


def test_training_goes_first_even_where_help_would_end_earlier():
    # help, then train during the long reward: 10 + 100 + 40; train, then help: 40 longer. The rule is not the search's.
    cost = replace(COST, train=TrainCost(0.0, 40.0), reward=100.0, switch=0.0, restore=0.0)
    bubble = Bubble((7,), -1, 1000.0, ((1, 0.0),))  # a generator that is away for long
    assert bts_search(bubble, EIGHT, cost) == 0
    assert bts_search(bubble._replace(scored_in=((1, 1.0),)), EIGHT, cost) == 1


@given(schedules(most=7, tag=True, stale=0), costs(), st.sampled_from([0.25, 2.0, 8.0]))
def test_the_answer_has_no_unit(schedule, cost, scale):
    def scaled(seconds):
        return replace(seconds, **{n: getattr(seconds, n) * scale for n in names})

    names = ("generate", "reward", "reward_per_sample", "optimizer", "publish", "switch", "restore")
    other = replace(scaled(cost), train=TrainCost(cost.train.a * scale, cost.train.b * scale))
    assert recorded(schedule, cost)[0] == recorded(schedule, other)[0]


def test_sixteen_fragments_are_searched_exactly_and_twice_the_same():
    for seed in range(4):
        cost = replace(
            COST, generate=9.0 + seed, switch=0.5 * seed, reward=7.0 * seed, reward_workers=[None, 1, 2, 3][seed]
        )
        schedule = Schedule(gap_partition(8, 3, fragments=16), 3, tag=True)
        first = recorded(schedule, cost)
        assert first == recorded(schedule, cost)
        assert first[1] <= simulate(replace(schedule, tag=False), cost).makespan


def work_of_the_search(bubble, schedule, cost):
    """(the answer, how many states were played to find it)."""
    search, played = _Search(bubble, schedule, cost), 0
    after = search._after

    def counted(*args):
        nonlocal played
        played += 1
        return after(*args)

    search._after = counted
    return search.answer(), played


@pytest.mark.parametrize(
    ("generators", "workers", "reward", "speed"), [(2, 1, 5.92, 0.5), (1, 1, 5.92, 1.0), (3, 3, 10.57, 1.0)]
)
def test_sixteen_ragged_fragments_behind_few_reward_workers_are_searched_in_few_states(
    generators, workers, reward, speed
):
    """No arrival can be early enough for most plays: without bounds on arrivals this took minutes."""
    schedule = Schedule(gap_partition(3, 7, fragments=16), 7, tag=True)  # five of two rows, eleven of one
    cost = CostModel(
        5.33,
        TrainCost(0.69, 2.05),
        Pool(generators, 1, speed),
        Pool(1),
        helper=1,
        reward=reward,
        reward_workers=workers,
    )
    bubble = Bubble(tuple(range(1, 16)), 0, cost.generator_seconds(2), (), (0.0,) * workers)
    answer, played = work_of_the_search(bubble, schedule, cost)
    assert played < 5_000
    assert answer == bts_search(bubble, schedule, cost)


@given(schedules(most=6, tag=True, stale=0), costs(most=9, reward_workers=1), st.integers(0, 5))
def test_no_arrival_is_earlier_than_the_search_allows_for(schedule, cost, seed):
    """Whatever is answered: the m-th fragment handed to the reward is never before the m-th bound of the first bubble."""
    asked, left = [], [seed % 3, seed // 2, 1]

    def lend(bubble, schedule, cost):
        asked.append(bubble)
        return min(left.pop(0) if left else 0, len(bubble.unclaimed))

    trace = simulate(schedule, cost, lend=lend)
    assume(asked)
    search = _Search(asked[0], schedule, cost)
    made = sorted(i.end for i in trace.intervals if i.kind in ("generate", "help"))
    bounds = search._arrivals(search.root)
    assert len(bounds) == len(made)  # the first bubble is at 0
    assert all(bound <= end * (1 + 1e-12) for bound, end in zip(bounds, made, strict=True))


def test_lists_and_numbers_of_another_kind_are_a_bubble_too():
    given = Bubble([np.int64(i) for i in FIRST.unclaimed], np.int64(0), np.float32(10.0), [], [])
    assert bts_search(given, EIGHT, COST) == bts_search(FIRST, EIGHT, COST) == 3
    for name, bad in (("unclaimed", 3), ("unclaimed", (1, None)), ("scored_in", (1,)), ("scored_in", None)):
        with refuses(name):
            bts_search(FIRST._replace(**{name: bad}), EIGHT, COST)


def test_assumed_costs_of_a_video_model_gain_nothing_from_a_dear_switch():
    schedule = ladder(4, 8, fragments=4, timesteps=8, pack=4)["gap+tsp+tag"]
    cost = PRESETS["hunyuanvideo-13b/B"]
    assert simulate(schedule, cost).makespan <= simulate(replace(schedule, tag=False), cost).makespan


def test_the_search_refuses():
    for bubble, *words in (
        (FIRST._replace(unclaimed=(1, 8)), "8", "out of range"),
        (FIRST._replace(unclaimed=(1, -2)), "fragment", "-2"),
        (FIRST._replace(generating=9), "9", "out of range"),
        (FIRST._replace(generating=1), "twice"),
        (FIRST._replace(unclaimed=(1, 1)), "twice"),
        (FIRST._replace(scored_in=((0, 1.0),)), "twice"),
        (FIRST._replace(generator_free=math.nan), "generator_free", "nan"),
        (FIRST._replace(generator_free=-1.0), "generator_free", "-1.0"),
        (Bubble((1, 2), scored_in=((0, math.inf),)), "scored_in", "inf"),
        (FIRST._replace(reward_free=(1.0,)), "reward_free", "(1.0,)"),
    ):
        with refuses(*words):
            bts_search(bubble, EIGHT, COST)
    limited = replace(COST, reward_workers=2)
    for free in ((), (1.0,), (2.0, 1.0)):
        with refuses("reward_free", free):
            bts_search(FIRST._replace(reward_free=free), EIGHT, limited)
    with refuses("cost.helper", 0):
        bts_search(FIRST, EIGHT, replace(COST, helper=0))
    with refuses("Bubble", "None"):
        bts_search(None, EIGHT, COST)


def test_control_a_greedy_rule_is_worse_than_the_search():
    greedy = simulate(EIGHT, COST, lend=lambda bubble, *_: len(bubble.unclaimed)).makespan
    guess = simulate(EIGHT, COST, lend=lambda bubble, *_: min(2, len(bubble.unclaimed))).makespan
    assert greedy > 64
    assert guess > 64
    assert min(end for _, end in every_play(replace(EIGHT, fragments=EIGHT.fragments[:4]), COST)) < gap_without_help(4)


def gap_without_help(m):
    return simulate(Schedule(prompt_partition(m, 1, fragments=m), 1), COST).makespan
