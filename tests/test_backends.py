"""Faults at every stage of a schedule that runs in this process: nothing is lost, nothing counts twice.

Negative controls are the tests with `control` in their names.
"""

import threading
import time

import pytest
import torch
from executing import COST, Noted, close, executed, noted_run, plain, reference, stages_of, whole
from toys import same, values_of

from diffrl.algorithms import art
from diffrl.backends import in_a_thread
from diffrl.conductor import ExecutionError
from diffrl.executors import in_process, run
from diffrl.parallel import (
    Schedule,
    prompt_partition,
)

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
    assert close(found, reference("art"))
    assert len(results) == 2


def test_a_reward_that_fails_scores_again_and_does_not_generate_again():
    _, _, count = faulty_run({("score", 1): BROKEN, ("score", 2): BROKEN}, steps=1)
    assert (count["score"], count["generate"]) == (6 - 1, 4 - 1)  # counted from 0: four fragments, two of them again


def test_a_reward_that_hangs_is_given_up_and_its_late_answer_dropped():
    backend = in_process()
    found, results, count = faulty_run({("score", 1): 0.6}, timeout=0.2, backend=backend)
    assert close(found, reference("art"))
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


def test_a_function_in_a_thread_of_its_own_answers_with_its_times():
    start, end, name = in_a_thread("diffrl one", lambda: threading.current_thread().name).result(20)
    assert start <= end
    assert name == "diffrl one"
    with pytest.raises(ZeroDivisionError):
        in_a_thread("diffrl two", lambda: 1 / 0).result(20)


def test_pick_decides_what_runs_next_and_everything_runs_in_this_thread():
    waiting, threads = [], set()

    def last(n):
        waiting.append(n)
        threads.add(threading.current_thread().name)
        return n - 1

    made = in_process(pick=last)
    schedule = whole(5, fragments=3)
    list(run(schedule, stages_of(art()), steps=1, backend=made))
    assert len(waiting) >= 3 * len(schedule.fragments)  # generated, scored, trained
    assert max(waiting) > 1  # there was something to decide
    assert threads == {threading.main_thread().name}
