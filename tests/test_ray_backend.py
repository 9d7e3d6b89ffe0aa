"""The actors' parts without Ray, and whole runs on Ray (skipped where it is not installed): equal params, faults, endings.

Negative controls are the tests with `control` in their names.
"""

import os
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from executing import Noted, close, reference, stages_of, whole
from mortal import build, builder
from oracles import refuses
from toys import same

from diffrl.algorithms import art, dance_grpo
from diffrl.conductor import ExecutionError
from diffrl.executors import run
from diffrl.parallel import Schedule, gap_partition
from diffrl.ray_backend import RayActors, Worker, joined, ray_actors, require_ray, spanning, summed
from diffrl.stages import PlainStages

SCHEDULE = whole(5, fragments=3, pack=4)

# ---- without Ray


def played(workers, *, steps=2):
    """Global steps by calling the ranks as the backend does."""
    for step in range(steps):
        params, _ = workers[0].snapshot()
        made = [workers[0].generate(step, params, f.samples) for f in SCHEDULE.fragments]
        parts = [part for part, _ in made]
        scored = [workers[0].score(step, f.samples, part) for f, part in zip(SCHEDULE.fragments, parts, strict=True)]
        rewards = {i: (times[2], 1) for i, times in enumerate(scored)}
        for update in range(2):
            for f in SCHEDULE.fragments:
                for worker in workers:
                    worker.train(step, update, f.index, rewards, *parts)
            grads = [worker.gradients() for worker in workers] if len(workers) > 1 else []
            done = [worker.commit(step, update, *grads) for worker in workers]
            assert len({times[2][1] for _, times in done}) == 1
    return done[0][0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_sum_their_gradients_end_with_the_params_of_one(ranks):
    workers = [Worker(lambda: stages_of(art()), SCHEDULE, rank, ranks) for rank in range(ranks)]
    state = played(workers)
    assert close(state["params"], reference("art"))
    assert all(same(w.stages.state()["params"], state["params"]) for w in workers)


def test_a_worker_takes_up_the_state_after_the_last_commit():
    first, second = (Worker(stages_of(art()), SCHEDULE, 0, 1) for _ in range(2))
    state = played([first], steps=1)
    second.load(state)
    second.load(None)
    assert same(second.stages.state()["params"], state["params"])
    start, end, nothing = second.do("zero")
    assert start <= end <= second.now()
    assert nothing is None


def test_parts_of_a_fragment_are_put_together_in_order():
    worker = Worker(stages_of(art()), SCHEDULE, 0, 1)
    params, _ = worker.snapshot()
    rows = SCHEDULE.fragments[0].samples
    (whole_one, times), *parts = (worker.generate(0, params, r) for r in (rows, rows[:1], rows[1:]))
    assert times[2] == len(rows)
    assert torch.equal(worker.score(0, rows, whole_one)[2], worker.score(0, rows, *(p for p, _ in parts))[2])


def test_sums_spans_and_joined_futures():
    assert torch.equal(summed([torch.ones(2), torch.full((2,), 2.0)]), torch.full((2,), 3.0))
    assert summed([]) is None
    alone = torch.ones(2)
    assert summed([alone]) is not alone
    assert spanning([(1.0, 2.0, "a"), (0.5, 3.0, "b")]) == (0.5, 3.0, ["a", "b"])
    futures = [Future(), Future()]
    both = joined(futures, sum)
    futures[1].set_result(2)
    assert not both.done()
    futures[0].set_result(1)
    assert both.result(0) == 3
    failing = [Future(), Future()]
    one = joined(failing, sum)
    failing[0].set_exception(KeyError("x"))
    failing[1].set_result(1)
    with pytest.raises(KeyError):
        one.result(0)
    odd = [Future()]
    wrong = joined(odd, lambda results: results[5])
    odd[0].set_result(1)
    with pytest.raises(IndexError):
        wrong.result(0)


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for call in (require_ray, ray_actors):
        with pytest.raises(ImportError, match=r"Ray: pip install 'diffrl\[ray\]'"):
            call()


def test_counts_and_stages_that_do_not_fit_are_refused(monkeypatch):
    pytest.importorskip("ray")
    for name in ("generators", "rewards", "trainers"):
        with refuses(name):
            ray_actors(**{name: 0})
    schedule = Schedule(gap_partition(2, 2, fragments=2), 2, timesteps=2)
    noted = PlainStages(Noted().workers(), {}, torch.arange(4), schedule)
    backend = ray_actors(trainers=2)
    assert isinstance(backend, RayActors)
    with refuses("the gradients of plain Workers cannot be summed"):
        backend.open(noted, schedule)
    with refuses("looks beyond a sample"):
        ray_actors(generators=2).open(stages_of(dance_grpo()), whole(2))


# ---- on Ray


@pytest.fixture(scope="module")
def ray():
    found = pytest.importorskip("ray")
    folders = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parent)])
    found.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        logging_level="ERROR",
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": folders, "OMP_NUM_THREADS": "1"}},
    )
    yield found
    found.shutdown()


@pytest.mark.ray
def test_generators_and_trainer_ranks_end_with_the_plain_loop_s_params(ray, tmp_path):
    stages = build(tmp_path)
    backend = ray_actors(generators=2, trainers=2, build=builder(tmp_path))
    running = run(SCHEDULE, stages, steps=2, backend=backend)
    results = list(running)
    assert close(stages.model.params, reference("art"))
    trace = results[-1].trace
    assert len([i for i in trace.intervals if i.kind == "generate"]) == 6
    assert {i.resource for i in trace.intervals} == {"generator", "trainer", "reward/0"}
    assert abs(results[-1].metrics["clock_offset"]) < 1.0
    assert backend.actors == {}


@pytest.mark.ray
def test_actors_that_die_are_replaced_and_nothing_is_lost_or_counted_twice(ray, tmp_path):
    """A generator and a reward killed mid-fragment, a trainer killed between accumulate and commit, and while it
    accumulates."""
    faults = [("generate", "die"), ("score", "die"), ("commit", "die")]
    for kind, what in faults:
        (tmp_path / kind).write_text(what)
    stages, backend = build(tmp_path), ray_actors(build=builder(tmp_path))
    running = run(SCHEDULE, stages, steps=3, backend=backend, timeout=60.0)
    next(running)
    assert list(tmp_path.iterdir()) == []  # every fault happened
    (tmp_path / "accumulate").write_text("die")
    next(running)
    running_actors = list(backend.actors.values())
    running.close()
    assert close(stages.model.params, reference("art"))
    for actor in running_actors:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(actor.now.remote(), timeout=20)


@pytest.mark.ray
def test_control_what_fails_for_ever_is_one_error_and_a_state_to_go_on_from(ray, tmp_path):
    stages, backend = build(tmp_path), ray_actors(build=builder(tmp_path))
    running = run(SCHEDULE, stages, steps=2, backend=backend, retries=0, timeout=60.0)
    next(running)
    (tmp_path / "score").write_text("no engine")
    with pytest.raises(
        ExecutionError, match=r"reward of step 1, fragment \d failed 1 times, the last time by RuntimeError: no engine"
    ):
        next(running)
    saved = stages.state()
    assert close(saved["params"], reference("art", iterations=1))
    second = build(tmp_path, start=1)
    second.load(saved)
    list(run(SCHEDULE, second, steps=1, start=1))
    assert close(second.model.params, reference("art"))
