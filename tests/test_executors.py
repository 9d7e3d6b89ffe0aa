"""A schedule that really runs: the params of the plain loop whichever way the batch is cut, packed, lent or in what order
it completes; versions, ledgers, traces; faults at every stage.

Negative controls are the tests with `control` in their names.
"""

import itertools
import math
import threading
import time
from functools import partial

import pytest
import torch
from executing import (
    BATCHWISE,
    GROUP,
    GROUPWISE,
    STEPS,
    WHOLE,
    Noted,
    close,
    executed,
    noted_run,
    plain,
    require_quiet,
    stages_of,
    whole,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import refuses
from scheduling import fragments_of
from toys import TIMES, same, values_of, wide

from diffrl.algorithms import art, art_pairwise, dance_grpo, flow_grpo, flow_grpo_fast, nft, sol_rl
from diffrl.backends import Lost
from diffrl.conductor import ExecutionError
from diffrl.executors import InProcess, Workers, calibrate, folded_seeds, in_process, run
from diffrl.parallel import (
    CostModel,
    Pool,
    Schedule,
    TrainCost,
    gap_partition,
    prompt_partition,
    simulate,
)
from diffrl.rewards import weighted_sum
from diffrl.stages import AlgorithmStages, PlainStages, require_separable_collect, require_separable_credit
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model
from diffrl.trainers import Trainer, concatenated, rows_of

# ---- the params of the plain loop


@pytest.mark.parametrize("name", GROUPWISE)
@pytest.mark.parametrize("backend", [partial(in_process, pick=lambda n: 0), in_process])
def test_one_fragment_in_one_pack_is_the_plain_loop_bit_for_bit(name, backend):
    factory, timesteps = GROUPWISE[name]
    params, rows = plain(factory(), iterations=3)
    found, results = executed(whole(timesteps), stages_of(factory()), steps=3, backend=backend)
    assert same(values_of(found), values_of(params))
    for row, result in zip(rows, results, strict=True):
        told = {n: v for n, v in result.metrics.items() if n in row}
        assert {"reward/mean", "loss", "grad_norm", "drift_rms"} <= set(told)
        assert told == pytest.approx({n: row[n] for n in told}, rel=1e-9, abs=1e-12)
        assert set(row) - set(told) <= {"iteration", "behaviour_distance", *TIMES}


@pytest.mark.parametrize("name", BATCHWISE)
def test_a_credit_of_the_whole_batch_is_the_plain_loop_behind_a_barrier(name):
    """The published spread is the batch's: with barrier=True the credit is told once, to everybody."""
    factory, timesteps = BATCHWISE[name]
    params, _ = plain(factory())
    found, _ = executed(whole(timesteps, barrier=True), stages_of(factory()))
    assert same(values_of(found), values_of(params))
    cut, _ = executed(whole(timesteps, barrier=True, fragments=3, pack=3), stages_of(factory()))
    assert close(cut, params)


def test_control_another_seed_gives_other_params():
    found, _ = executed(whole(5), stages_of(art(), seed=1))
    assert not close(found, plain(art())[0], relative=1e-3)


@st.composite
def drawn_schedules(draw, timesteps, **given):
    drawn = {
        "pack": draw(st.sampled_from([1, 2, 3, 7, WHOLE])),
        "barrier": draw(st.integers(0, 3)) == 0,
        "shard_pairs": draw(st.booleans()),
        "tag": draw(st.booleans()),
    }
    return Schedule(draw(fragments_of(2, GROUP)), GROUP, timesteps=timesteps, **{**drawn, **given})


COST = CostModel(1.0, TrainCost(0.1, 0.2), Pool(1), Pool(1), helper=1, reward=0.5)


@pytest.mark.parametrize("name", ["art", "flow_grpo", "nft"])
@settings(max_examples=6)
@given(st.data())
def test_any_cut_pack_order_and_help_gives_the_plain_loop_s_params(name, data):
    factory, timesteps = GROUPWISE[name]
    schedule = data.draw(drawn_schedules(timesteps))
    randoms = data.draw(st.randoms(use_true_random=False))
    backend = in_process(pick=lambda n: randoms.randrange(n), rewards=data.draw(st.integers(1, 2)))
    lend = lambda bubble, *_: randoms.randint(0, len(bubble.unclaimed))  # noqa: E731
    found, results = executed(schedule, stages_of(factory()), backend=backend, cost=COST, lend=lend)
    assert close(found, REFERENCE[name])
    assert [r.version for r in results] == [1, 2]
    assert set(results[-1].trace.staleness.values()) == {0}


REFERENCE = {name: values_of(plain(GROUPWISE[name][0]())[0]) for name in ("art", "flow_grpo", "nft")}


def test_control_help_happened_in_some_of_these_runs():
    """Generation on the trainer, between suspend and resume, once half of the batch is trained."""
    asked = []

    def lend(bubble, schedule, cost):
        asked.append(bubble)
        return len(bubble.unclaimed)

    last = in_process(pick=lambda n: n - 1)
    found, results = executed(
        whole(5, fragments=8, tag=True, pack=3), stages_of(art()), backend=last, cost=COST, lend=lend
    )
    kinds = [i.kind for i in results[-1].trace.intervals]
    assert asked
    assert kinds.count("help") > 0
    assert kinds.count("help") + kinds.count("generate") == 16
    assert close(found, REFERENCE["art"])


def test_in_order_of_the_index_sums_are_the_same_to_the_bit():
    orders = [lambda n: 0, lambda n: n - 1, lambda n: n // 2]
    schedule = whole(5, fragments=5, pack=3)
    runs = [
        values_of(executed(schedule, stages_of(art()), backend=in_process(bitwise=True, pick=pick))[0])
        for pick in orders
    ]
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])
    threads = values_of(executed(schedule, stages_of(art()), backend=in_process(bitwise=True))[0])
    assert same(runs[0], threads)


def test_bitwise_trains_in_order_of_the_index_where_others_come_first():
    """Rewards of the first fragment arrive last: it is still trained first."""
    for bitwise in (True, False):
        noted = Noted()
        slow = noted.score

        def score(trajectory, cond, slow=slow):
            time.sleep(0.3 if 0 in cond["row"] else 0.0)
            return slow(trajectory, cond)

        workers = noted.workers()._replace(score=score)
        schedule = Schedule(gap_partition(4, 2, fragments=4), 2, timesteps=2)
        backend = in_process(bitwise=bitwise, rewards=4)
        results = list(run(schedule, workers, {"row": torch.arange(8)}, torch.arange(8), steps=1, backend=backend))
        trained = [i.fragment for i in results[0].trace.intervals if i.kind == "train"]
        assert trained == [0, 1, 2, 3] if bitwise else trained[-1] == 0


@pytest.mark.parametrize("placement", ["engines", "module"])
def test_colocated_schedules_are_the_plain_loop_too(placement):
    found, results = executed(whole(5, placement=placement, fragments=2), stages_of(art()))
    assert close(found, REFERENCE["art"])
    trace = results[-1].trace
    assert {i.resource for i in trace.intervals} == {"cluster", "reward/0"}
    swaps = ["switch", "restore", "publish"]
    kinds = [i.kind for i in trace.intervals if i.resource == "cluster"]
    once = ["generate"] * 2 + ["train"] * 2 + ["update"] + ["train"] * 2 + ["update"]
    if placement == "engines":
        once = ["switch", *once[:2], "restore", *once[2:], "publish"]
    assert kinds == once * 2
    assert (set(swaps) <= set(kinds)) == (placement == "engines")


# ---- staleness


def test_stale_fragments_carry_one_version_and_lag_by_one_at_most():
    schedule = whole(5, fragments=4, stale=2)
    _, results = executed(schedule, stages_of(art()), steps=3, backend=in_process(pick=lambda n: n - 1))
    lag = results[-1].trace.staleness
    assert set(lag) == set(itertools.product(range(3), range(4)))
    assert all(lag[0, i] == 0 for i in range(4))
    assert all(lag[s, i] <= (1 if i < 2 else 0) for s, i in lag)
    assert sum(lag.values()) > 0


def test_control_what_is_stale_gives_other_params_than_on_policy():
    always = in_process(pick=lambda n: n - 1)
    schedule = whole(5, fragments=4, stale=4)
    found, results = executed(schedule, stages_of(art()), steps=3, backend=always)
    assert max(results[-1].trace.staleness.values()) == 1
    assert not close(found, plain(art(), iterations=3)[0], relative=1e-6)


def test_the_loss_of_a_stale_fragment_sees_its_own_version_s_velocities():
    """drift rms(v - v_old) is not 0 at the first update where v_old is that of older weights."""
    _, fresh = executed(whole(5, fragments=4), stages_of(art()), steps=3)
    _, stale = executed(
        whole(5, fragments=4, stale=4), stages_of(art()), steps=3, backend=in_process(pick=lambda n: n - 1)
    )
    assert [r.metrics["drift_rms/update_1"] for r in fresh] == [0.0, 0.0, 0.0]
    assert stale[0].metrics["drift_rms/update_1"] == 0.0
    assert any(r.metrics["drift_rms/update_1"] > 0 for r in stale[1:])


# ---- plain workers: what each is asked


def test_seeds_of_a_step_are_folded_from_seed_and_step_and_cut_by_rows():
    noted, schedule = Noted(), Schedule(gap_partition(2, 2, fragments=3), 2, timesteps=2)
    noted_run(schedule, noted, steps=2)
    for step in range(2):
        seeds = folded_seeds(torch.arange(4) + 7, step).tolist()
        asked = noted.of("generate")[3 * step : 3 * step + 3]
        assert [(s, rows) for s, _, rows in asked] == [
            ([seeds[r] for r in f.samples], list(f.samples)) for f in schedule.fragments
        ]
    assert len({s for step in range(5) for s in folded_seeds(torch.arange(4), step).tolist()}) == 20


@given(st.data(), st.integers(1, 3))
def test_every_group_is_told_once_and_every_pair_accumulated_once_over_the_batch_s_number(data, pack):
    schedule = Schedule(data.draw(fragments_of(3, 2)), 2, timesteps=2, pack=pack)
    noted, randoms = Noted(), data.draw(st.randoms(use_true_random=False))
    noted_run(schedule, noted, backend=in_process(pick=lambda n: randoms.randrange(n)))
    assert noted.of("credit") == [((1, 2), (1, 2, 1))] * 3
    packs = noted.of("accumulate")
    assert all(total == 12 and len(pairs) <= pack for pairs, total, _ in packs)
    assert sum(len(pairs) for pairs, *_ in packs) == 12
    assert len(packs) == sum(math.ceil(2 * len(f.samples) / pack) for f in schedule.fragments)
    assert len(noted.of("commit")) == 1


def test_the_gradient_of_plain_workers_is_the_closed_form():
    """Loss of a pair: (theta + x_r) A_r (t + 1): its gradient in theta is the sum of A_r (t + 1) over the pairs, / N."""
    schedule = Schedule(gap_partition(2, 3, fragments=4), 3, timesteps=2, pack=3)
    noted = Noted()
    noted_run(schedule, noted)
    x = (folded_seeds(torch.arange(6) + 7, 0) % 1000).double().reshape(2, 3) / 1000
    a = 2 * (x - x.mean(1, keepdim=True))
    assert noted.of("commit")[0][0] == pytest.approx(float((3 * a).sum() / 12), abs=1e-15)


def test_a_snapshot_of_each_version_and_nothing_generated_under_another():
    noted, schedule = Noted(), Schedule(gap_partition(2, 2, fragments=2), 2, timesteps=2)
    results = noted_run(schedule, noted, steps=3)
    thetas = [0.0, *(r.metrics["theta"] for r in results[:2])]
    assert [theta for _, theta, _ in noted.of("generate")] == [t for t in thetas for _ in range(2)]
    assert len(noted.of("snapshot")) == 4


def test_the_gradient_is_put_away_before_helping_and_comes_back():
    def lend(bubble, *_):
        return min(1, len(bubble.unclaimed))

    noted = Noted()
    schedule = Schedule(prompt_partition(4, 2, fragments=4), 2, timesteps=2, tag=True)
    with_help = noted_run(schedule, noted, cost=COST, lend=lend, backend=in_process(pick=lambda n: n - 1))
    names = [call[0] for call in noted.calls]
    assert names.count("suspend") == names.count("resume") > 0
    for i in [i for i, name in enumerate(names) if name == "suspend"]:
        after = names[i + 1 : names.index("resume", i)]
        assert set(after) <= {"generate", "score"}
    alone = Noted()
    without = noted_run(Schedule(schedule.fragments, 2, timesteps=2), alone)
    assert with_help[0].metrics["theta"] == pytest.approx(without[0].metrics["theta"], rel=1e-13)
    assert any(i.kind == "help" for i in with_help[0].trace.intervals)


# ---- the trace

SLEEPS = {"generate": 0.03, "score": 0.02, "accumulate": 0.05}


def test_generation_reward_and_training_overlap():
    schedule = Schedule(prompt_partition(6, 1, fragments=6), 1, timesteps=2, pack=2)
    trace = noted_run(schedule, Noted(**SLEEPS), backend=in_process)[0].trace
    spans = {
        name: [(i.start, i.end) for i in trace.intervals if i.resource == name]
        for name in ("generator", "trainer", "reward/0")
    }
    for a, b in itertools.combinations(spans.values(), 2):
        assert any(x[0] < y[1] and y[0] < x[1] for x in a for y in b)
    serial = noted_run(Schedule(schedule.fragments, 1, timesteps=2, pack=2, placement="module"), Noted(**SLEEPS))
    lanes = [(i.start, i.end) for i in serial[0].trace.intervals if i.resource == "cluster"]
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(lanes))  # the negative control: one resource, no overlap


def busy_twice(trace):
    """Resources that did two things at once."""
    lanes: dict = {}
    for i in trace.intervals:
        lanes.setdefault(i.resource, []).append((i.start, i.end))
    return [r for r, spans in lanes.items() if any(a[1] > b[0] for a, b in itertools.pairwise(sorted(spans)))]


@settings(max_examples=4)
@given(st.data())
def test_a_trace_holds_every_fragment_once_per_stage_and_no_resource_is_busy_twice(data):
    schedule = data.draw(drawn_schedules(5, tag=False, stale=0))
    _, results = executed(schedule, stages_of(art(updates=1)), backend=in_process)
    trace = results[-1].trace
    count = len(schedule.fragments)
    for kind in ("generate", "reward", "train"):
        found = [(i.step, i.fragment) for i in trace.intervals if i.kind == kind]
        assert sorted(found) == list(itertools.product(range(2), range(count)))
    assert [i.version for i in trace.intervals if i.kind == "publish"] == [1, 2]
    assert busy_twice(trace) == []
    assert trace.ends[-1] == max(i.end for i in trace.intervals)


@pytest.mark.parametrize("options", [{}, {"barrier": True}, {"stale": 2}])
def test_the_measured_makespan_is_the_simulated_one_where_stages_sleep(options):
    require_quiet()
    schedule = Schedule(prompt_partition(4, 2, fragments=4), 2, timesteps=2, pack=4, **options)
    cost = CostModel(0.03, TrainCost(0.05, 0.0), Pool(1), Pool(1), reward=0.02, reward_workers=1)
    results = noted_run(schedule, Noted(**SLEEPS), steps=3, backend=in_process)
    expected, measured = simulate(schedule, cost, steps=3), results[-1].trace
    assert abs(measured.makespan - expected.makespan) < 0.1 * expected.makespan + 0.05
    order = [
        [(i.kind, i.step, i.fragment, i.version) for i in trace.intervals if i.resource in ("generator",)]
        for trace in (measured, expected)
    ]
    assert order[0] == order[1]


def test_a_bubble_is_filled_as_the_search_says_where_stages_sleep():
    """Generation is slow: the trainer lends a hand, on-policy, and the step gets shorter than without."""
    require_quiet()
    slow = {"generate": 0.06, "score": 0.01, "accumulate": 0.01}
    cost = CostModel(0.06, TrainCost(0.01, 0.0), Pool(1), Pool(1), helper=1, reward=0.01, reward_workers=1)
    fragments = prompt_partition(6, 1, fragments=6)
    lent, alone = (
        noted_run(Schedule(fragments, 1, timesteps=2, pack=2, tag=tag), Noted(**slow), backend=in_process, cost=cost)
        for tag in (True, False)
    )
    assert [i.kind for i in lent[0].trace.intervals].count("help") >= 2
    assert lent[0].trace.makespan < 0.8 * alone[0].trace.makespan
    expected = simulate(Schedule(fragments, 1, timesteps=2, pack=2, tag=True), cost)
    assert abs(lent[0].trace.makespan - expected.makespan) < 0.1 * expected.makespan + 0.05


def test_without_a_cost_nobody_helps_before_every_stage_was_seen():
    seen = []

    def lend(bubble, schedule, cost):
        seen.append(cost)
        return 0

    schedule = Schedule(prompt_partition(4, 1, fragments=4), 1, timesteps=2, tag=True)
    results = noted_run(schedule, Noted(**SLEEPS), steps=2, backend=in_process, lend=lend)
    assert len(results) == 2
    assert seen
    assert seen[0].generate == pytest.approx(0.03, rel=0.5)
    assert seen[0].train.b == pytest.approx(0.05, rel=0.5)  # packs of one pair


def test_a_search_that_thinks_too_long_is_not_waited_for():
    thought = threading.Event()

    def lend(bubble, schedule, cost):
        thought.wait(10)
        return len(bubble.unclaimed)

    schedule = Schedule(prompt_partition(3, 1, fragments=3), 1, timesteps=2, tag=True)
    results = noted_run(schedule, Noted(**SLEEPS), backend=in_process, cost=COST, lend=lend)
    thought.set()
    assert not any(i.kind == "help" for i in results[0].trace.intervals)
    assert results[0].trace.makespan < 8


@pytest.mark.parametrize("answer", [-1, 99, 0.5, True, None])
def test_an_answer_that_is_no_number_of_fragments_is_refused(answer):
    schedule = Schedule(prompt_partition(3, 1, fragments=3), 1, timesteps=2, tag=True)
    with refuses("lend must return an integer in 0..", repr(answer)):
        noted_run(schedule, Noted(), cost=COST, lend=lambda *_: answer)


# ---- faults


class Faulty:
    """Stages that fail where and as often as they are told: {(kind, number of the call): error or seconds of sleep}."""

    def __init__(self, stages, faults):
        self.stages, self.faults, self.count = stages, faults, {}

    def __getattr__(self, name):
        return getattr(self.stages, name)

    def fault(self, kind):
        n = self.count[kind] = self.count.get(kind, -1) + 1
        what = self.faults.get((kind, n))
        if isinstance(what, float):
            time.sleep(what)
        elif what is not None:
            raise what

    def generate(self, *args):
        self.fault("generate")
        return self.stages.generate(*args)

    def score(self, *args):
        self.fault("score")
        return self.stages.score(*args)

    def accumulate(self, *args):
        self.fault("accumulate")
        told = self.stages.accumulate(*args)
        self.fault("accumulated")
        return told

    def commit(self, *args):
        self.fault("commit")
        return self.stages.commit(*args)

    def snapshot(self):
        self.fault("snapshot")
        return self.stages.snapshot()


def faulty_run(faults, *, steps=2, timeout=None, retries=2, backend=None, **options):
    """(params, results, how often each stage was called)."""
    inner, held = stages_of(art()), []
    made = backend or in_process(pick=lambda n: 0)
    opened = made.open
    made.open = lambda stages, schedule: held.append(Faulty(stages, faults)) or opened(held[0], schedule)
    schedule = whole(5, fragments=4, pack=3, **options)
    results = list(run(schedule, inner, steps=steps, backend=made, timeout=timeout, retries=retries))
    return inner.model.params, results, held[0].count


BROKEN = RuntimeError("broken")


@pytest.mark.parametrize(
    "where",
    [
        ("generate", 1),
        ("generate", 6),
        ("score", 0),
        ("accumulate", 2),
        ("accumulated", 1),
        ("accumulated", 5),
        ("commit", 0),
        ("commit", 1),
        ("snapshot", 1),
    ],
)
def test_one_failure_anywhere_changes_nothing(where):
    found, results, _ = faulty_run({where: BROKEN})
    assert close(found, REFERENCE["art"])
    assert len(results) == 2


def test_a_reward_that_fails_scores_again_and_does_not_generate_again():
    _, _, count = faulty_run({("score", 1): BROKEN, ("score", 2): BROKEN}, steps=1)
    assert (count["score"], count["generate"]) == (6 - 1, 4 - 1)  # counted from 0: four fragments, two of them again


def test_a_reward_that_hangs_is_given_up_and_its_late_answer_dropped():
    backend = in_process()
    found, results, count = faulty_run({("score", 1): 0.6}, timeout=0.2, backend=backend)
    assert close(found, REFERENCE["art"])
    assert count["score"] == 8
    assert len(results) == 2


def test_a_step_whose_training_failed_is_accumulated_again_from_the_first_fragment():
    """Three fragments were in when the fourth failed: none of them counts twice (SGD shows the gradient itself)."""
    inner = stages_of(art(updates=1), optimizer=torch.optim.SGD)
    backend = in_process(pick=lambda n: 0)
    opened = backend.open
    backend.open = lambda stages, schedule: opened(Faulty(stages, {("accumulated", 3): BROKEN}), schedule)
    list(run(whole(5, fragments=4), inner, steps=1, backend=backend))
    params, _ = plain(art(updates=1), optimizer=torch.optim.SGD, iterations=1)
    assert close(inner.model.params, params)


@pytest.mark.parametrize("kind", ["generate", "score", "accumulate", "commit"])
def test_what_fails_too_often_is_one_clear_error_and_params_of_the_last_commit(kind):
    calls = {"generate": 4, "score": 4, "accumulate": 8, "commit": 2}[kind]  # of one step with two updates
    inner = stages_of(art())
    backend = in_process(pick=lambda n: 0)
    opened = backend.open
    faults = {(kind, n): BROKEN for n in range(calls, calls + 50)}
    backend.open = lambda stages, schedule: opened(Faulty(stages, faults), schedule)
    running = run(whole(5, fragments=4), inner, steps=3, backend=backend, retries=1)
    next(running)
    committed = values_of(inner.model.params)
    with pytest.raises(
        ExecutionError, match=r"of step 1.* failed 2 times, the last time by RuntimeError: broken"
    ) as caught:
        next(running)
    assert caught.value.__cause__ is BROKEN
    assert caught.value.step == 1
    assert caught.value.attempts == 2
    assert same(values_of(inner.model.params), committed)
    assert all(p.grad is None for p in inner.model.params.values())


def test_control_without_a_fault_every_stage_is_called_once_per_fragment():
    found, _, count = faulty_run({})
    assert same(values_of(found), values_of(executed(whole(5, fragments=4, pack=3), stages_of(art()))[0]))
    assert {k: n + 1 for k, n in count.items()} == {
        "generate": 8,
        "score": 8,
        "accumulate": 16,
        "accumulated": 16,
        "commit": 4,
        "snapshot": 3,
    }


def test_help_that_fails_is_done_again_between_the_same_switch_and_restore():
    noted, failures = Noted(), [True]
    generate = noted.generate

    def fails_once(params, seeds, cond):
        if threading.current_thread() and [c[0] for c in noted.calls].count("suspend") and failures:
            failures.clear()
            raise BROKEN
        return generate(params, seeds, cond)

    schedule = Schedule(prompt_partition(4, 1, fragments=4), 1, timesteps=2, tag=True)
    workers = noted.workers()._replace(generate=fails_once)
    options = {"cost": COST, "lend": lambda b, *_: len(b.unclaimed), "backend": in_process(pick=lambda n: n - 1)}
    results = list(run(schedule, workers, {"row": torch.arange(4)}, torch.arange(4), steps=1, **options))
    assert not failures
    alone = Noted()
    without = noted_run(Schedule(schedule.fragments, 1, timesteps=2), alone, seeds=torch.arange(4))
    assert results[0].metrics["theta"] == pytest.approx(without[0].metrics["theta"], abs=1e-15)
    assert len(noted.of("suspend")) == len(noted.of("resume"))


def test_an_interrupt_in_a_worker_ends_the_run_as_itself():
    noted = Noted()

    def interrupted(params, seeds, cond):
        raise KeyboardInterrupt

    workers = noted.workers()._replace(generate=interrupted)
    schedule = Schedule(prompt_partition(2, 1, fragments=2), 1)
    with pytest.raises(KeyboardInterrupt):
        list(run(schedule, workers, {}, torch.arange(2), steps=1))


# ---- ending and going on


def diffrl_threads():
    return [t for t in threading.enumerate() if t.name.startswith("diffrl")]


def test_closing_leaves_params_at_the_last_commit_and_no_thread():
    stages = stages_of(art())
    running = run(whole(5, fragments=4, stale=4), stages, steps=None)
    next(running)
    version = values_of(stages.model.params)
    assert diffrl_threads()
    running.close()
    assert diffrl_threads() == []
    assert same(values_of(stages.model.params), version)
    params, _ = plain(art(), iterations=1)
    assert close(values_of(stages.model.params), params)


def test_a_hanging_worker_does_not_keep_a_closed_run_for_longer_than_5_s():
    backend = InProcess()
    backend.open(stages_of(art()), whole(5))
    backend._call("reward/0", lambda: time.sleep(0.5))
    backend._call("reward/0", lambda: None)
    began = time.perf_counter()
    backend.close(0.1)
    assert time.perf_counter() - began < 0.4


@pytest.mark.parametrize("name", ["art", "nft"])
def test_a_run_goes_on_from_a_step_boundary_as_if_it_had_not_stopped(name):
    factory, timesteps = GROUPWISE[name]
    schedule = whole(timesteps, fragments=3, pack=4)
    straight, _ = executed(schedule, stages_of(factory()), steps=4)
    first = stages_of(factory())
    list(run(schedule, first, steps=2))
    saved = first.state()
    reference = values_of(toy_model(dtype=torch.float64).params)
    second = stages_of(factory(), start=2, reference=reference)
    second.load(saved)
    results = list(run(schedule, second, steps=2, start=2, backend=in_process(pick=lambda n: 0)))
    assert [r.step for r in results] == [2, 3]
    assert close(second.model.params, straight)
    assert results[0].trace.versions[2, 0] == 2


# ---- the trainer


def trainer_and_parts(**options):
    stages, schedule = stages_of(art(updates=1)), whole(5, fragments=2, **options)
    params = stages.snapshot()
    made = {f.index: stages.generate(0, params, f.samples) for f in schedule.fragments}
    parts = {i: (made[i], stages.score(0, schedule.fragments[i].samples, made[i])) for i in made}
    return Trainer(stages, schedule), stages, parts


def test_the_ledger_refuses_a_fragment_twice_and_a_commit_too_early():
    trainer, stages, parts = trainer_and_parts()
    trainer.train(0, 0, 0, parts)
    with refuses("fragment 0 is accumulated already"):
        trainer.train(0, 0, 0, parts)
    before = values_of(stages.model.params)
    with refuses("fragments [1] are not accumulated, nothing is committed"):
        trainer.commit(0, 0)
    assert same(values_of(stages.model.params), before)
    trainer.zero()
    assert all(p.grad is None for p in stages.model.params.values())
    for i in (0, 1):
        trainer.train(0, 0, i, parts)
    trainer.commit(0, 0)
    assert not same(values_of(stages.model.params), before)


def test_suspended_gradients_come_back_bit_for_bit():
    trainer, stages, parts = trainer_and_parts()
    trainer.train(0, 0, 0, parts)
    held = {n: p.grad.clone() for n, p in stages.model.params.items()}
    state = torch.get_rng_state()
    trainer.switch()
    assert all(p.grad is None for p in stages.model.params.values())
    stages.generate(0, stages.snapshot(), [0, 1])
    assert all(p.grad is None for p in stages.model.params.values())
    trainer.restore()
    assert same({n: p.grad for n, p in stages.model.params.items()}, held)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("shard_pairs", [True, False])
def test_shards_over_ranks_add_up_to_the_whole_gradient(ranks, shard_pairs):
    """Ragged shares, an empty one among them: sums, never a mean of means."""
    trainer, stages, parts = trainer_and_parts(pack=3, shard_pairs=shard_pairs)
    for i in (0, 1):
        trainer.train(0, 0, i, parts)
    expected = {n: p.grad.clone() for n, p in stages.model.params.items()}
    stages.zero()
    for rank in range(ranks):
        other = Trainer(stages, trainer.schedule, rank, ranks)
        for i in (0, 1):
            other.train(0, 0, i, parts)
    assert close({n: p.grad for n, p in stages.model.params.items()}, expected)


def test_rows_of_trajectories_and_their_concatenation():
    _, _, parts = trainer_and_parts()
    a, b = (parts[i][0] for i in (0, 1))
    both = concatenated([a, b])
    assert torch.equal(both.x_t, torch.cat([a.x_t, b.x_t]))
    assert torch.equal(rows_of(both, [4, 1]).x_0, torch.stack([b.x_0[0], a.x_0[1]]))
    assert rows_of(both, range(8)) is both
    assert concatenated([a]) is a
    with refuses("kept other steps"):
        concatenated([a, b._replace(t=b.t + 1)])


# ---- what cannot be run


def test_a_credit_of_the_batch_needs_a_barrier():
    for factory in (flow_grpo, nft, art_pairwise):
        with refuses("looks at other groups too", "barrier=True"):
            run(whole(4), stages_of(factory()), steps=1)
        run(whole(4, barrier=True), stages_of(factory()), steps=1)
    require_separable_credit(art(), steps=5, group_size=4)


def test_a_collect_that_looks_at_its_group_or_batch_is_not_cut_there():
    dance = dance_grpo(updates=1)
    with refuses("looks beyond a sample"):
        run(whole(2, fragments=3), stages_of(dance), steps=1)
    groups = Schedule(prompt_partition(2, GROUP, fragments=2), GROUP, timesteps=2, pack=WHOLE)
    found, _ = executed(groups, stages_of(dance))
    assert close(found, plain(dance)[0])
    with refuses("looks beyond a group"):
        require_separable_collect(flow_grpo_fast(), steps=10, group_size=4, whole_groups=True)
    require_separable_collect(flow_grpo(), steps=5, group_size=4, whole_groups=False)


def test_algorithms_and_rewards_that_a_schedule_cannot_cut_are_refused():
    model = toy_model()
    drafted = sol_rl(art(), draft=lambda p: (model.velocity, p), pool=8, keep=2)
    with refuses("an algorithm with a pool (8)"):
        stages_of(drafted)
    with refuses("a reward of several parts"):
        stages_of(art(), reward=weighted_sum({"a": toward_compass, "b": toward_compass}))
    with refuses("steps_per_sample"):
        stages_of(art()._replace(objective=lambda *_: None))
    with refuses("prompts_per_iteration=3 of only 2"):
        stages_of(art(), prompts_per_iteration=3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"start": -1}, "start"),
        ({"retries": -1}, "retries"),
        ({"timeout": 0.0}, "timeout"),
        ({"cost": 3}, "cost must be a CostModel"),
        ({"cond": {}}, "have their own cond and seeds"),
    ],
)
def test_arguments_out_of_range_are_refused_at_the_call(changed, message):
    given = {"steps": 1, **changed}
    with refuses(message):
        run(whole(5), stages_of(art()), given.pop("cond", None), **given)


def test_schedules_and_workers_that_do_not_fit_are_refused_at_the_call():
    with refuses("schedule must be a Schedule"):
        run(None, stages_of(art()), steps=1)
    with refuses("the schedule has 4 rows in groups of 2, the batch 8 in groups of 4"):
        run(Schedule(gap_partition(2, 2, fragments=1), 2), stages_of(art()), steps=1)
    with refuses("cost.helper >= 1"):
        run(whole(5, tag=True), stages_of(art()), steps=1, cost=CostModel(1.0, TrainCost(0, 1), Pool(1), Pool(1)))
    schedule = Schedule(gap_partition(2, 2, fragments=1), 2)
    for workers, cond, seeds, message in (
        (None, {}, torch.arange(4), "workers must be Workers"),
        (Noted().workers(), {}, torch.arange(3), "seeds must be one per row, (4,)"),
        (Noted().workers(), {}, None, "seeds must be one per row, (4,)"),
        (Noted().workers(), {"row": torch.arange(3)}, torch.arange(4), "cond['row'] must have leading axis 4"),
    ):
        with refuses(message):
            run(schedule, workers, cond, seeds, steps=1)
    assert PlainStages(Noted().workers(), {}, torch.arange(4), schedule).windows == [[0, 1, 2, 3]]
    assert isinstance(stages_of(art()), AlgorithmStages)


def test_timesteps_that_are_not_the_objective_s_are_refused():
    with pytest.raises(ExecutionError, match="timesteps 3, but the objective trains 5 per sample"):
        executed(whole(3), stages_of(art()))


def test_rewards_of_a_backend_are_counted():
    with refuses("rewards"):
        in_process(rewards=0)
    assert issubclass(Lost, RuntimeError)
    assert Workers._fields[:4] == ("generate", "score", "credit", "accumulate")
    assert wide(art()).updates == 2
    assert (GROUP, STEPS, len(PROMPTS)) == (4, 5, 4)


# ---- calibration


def test_calibration_finds_the_seconds_that_stages_sleep():
    require_quiet()
    noted = Noted(generate=0.02, score=0.01, commit=0.02, snapshot=0.01)
    accumulate = noted.accumulate

    def by_pairs(trajectory, signal, pairs, total):
        time.sleep(0.01 + 0.01 * len(pairs))
        return accumulate(trajectory, signal, pairs, total)

    workers = noted.workers()._replace(accumulate=by_pairs)
    cost = calibrate(workers, {"row": torch.arange(4)}, torch.arange(4), repeats=2, timesteps=2)
    assert cost.generate == pytest.approx(0.02, rel=0.3)
    assert (cost.train.a, cost.train.b) == (pytest.approx(0.01, abs=0.005), pytest.approx(0.01, abs=0.003))
    assert cost.reward_seconds(2) == pytest.approx(0.01, rel=0.4)
    assert cost.optimizer == pytest.approx(0.02, rel=0.4)
    assert cost.publish == pytest.approx(0.01, rel=0.4)
    assert cost.helper == 1


def test_calibration_leaves_an_algorithm_s_params_and_optimizer_as_they_were():
    stages = stages_of(art())
    before = stages.state()
    cost = calibrate(stages, repeats=1, timesteps=5)
    after = stages.state()
    assert same(before["params"], after["params"])
    assert before["optimizer"]["state"] == after["optimizer"]["state"] == {}
    assert cost.generate > 0
    executed(whole(5, fragments=2, tag=True), stages, cost=cost)
    assert close(stages.model.params, REFERENCE["art"])


def test_calibration_needs_two_sizes_and_as_many_samples():
    with refuses("sizes must hold two distinct counts", "[2, 2]"):
        calibrate(stages_of(art()), sizes=(2, 2))
    with refuses("sizes must be at most the number of samples 8"):
        calibrate(stages_of(art()), sizes=(1, 9))
