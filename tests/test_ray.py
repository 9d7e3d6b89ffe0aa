"""Whole runs on Ray, only with `-m ray` (`make test-ray`) and where it is installed: ranks and generators, actors that die, errors and going on.

Negative controls are the tests with `control` in their names.
"""

import os
import time
from pathlib import Path

import pytest
from executing import close, reference, whole
from mortal import build, builder

from diffrl.conductor import ExecutionError
from diffrl.executors import run
from diffrl.ray_backend import gloo_sum, ray_actors, ray_sum

SCHEDULE = whole(5, fragments=3, pack=4)


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
@pytest.mark.parametrize("gradients", [gloo_sum, ray_sum])
def test_generators_and_trainer_ranks_end_with_the_plain_loop_s_params(ray, tmp_path, gradients):
    stages = build(tmp_path)
    backend = ray_actors(generators=2, trainers=2, gradients=gradients, build=builder(tmp_path))
    running = run(SCHEDULE, stages, steps=2, backend=backend)
    results = list(running)
    assert close(stages.model.params, reference("art"))
    trace = results[-1].trace
    assert len([i for i in trace.intervals if i.kind == "generate"]) == 6
    assert {i.resource for i in trace.intervals} == {"generator", "trainer", "reward/0"}
    assert abs(results[-1].metrics["clock_offset"]) < 1.0
    assert backend.actors == {}


def gone(ray, actor):
    """Whether the actor ends: a kill is on its way when `close` returns, and may be overtaken by a question."""
    for _ in range(100):
        try:
            ray.get(actor.now.remote(), timeout=20)
        except ray.exceptions.RayActorError:
            return True
        time.sleep(0.1)
    return False


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
    assert all(gone(ray, actor) for actor in running_actors)


@pytest.mark.ray
def test_a_reward_that_hangs_is_killed_and_scored_again(ray, tmp_path):
    (tmp_path / "score").write_text("hang")
    stages, backend = build(tmp_path), ray_actors(build=builder(tmp_path))
    running = run(SCHEDULE, stages, steps=2, backend=backend, timeout=40.0)
    next(running)
    assert list(tmp_path.iterdir()) == []  # it did hang
    next(running)
    running.close()
    assert close(stages.model.params, reference("art"))


@pytest.mark.ray
def test_one_of_two_ranks_that_fails_to_commit_takes_the_other_back_with_it(ray, tmp_path):
    """The other rank has stepped already: with one retry there is no second one in which checksums could tell."""
    (tmp_path / "commit").write_text("no memory")
    stages, backend = build(tmp_path), ray_actors(trainers=2, build=builder(tmp_path))
    list(run(SCHEDULE, stages, steps=1, backend=backend, retries=1))
    assert list(tmp_path.iterdir()) == []
    assert close(stages.model.params, reference("art", iterations=1))


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
