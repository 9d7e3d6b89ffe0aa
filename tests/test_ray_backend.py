"""The parts of the Ray backend, without an actor: ranks, joined futures, refusals. Whole runs are in test_ray.py and test_ray_nodes.py.

Negative controls are the tests with `control` in their names.
"""

import ast
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from executing import Noted, close, reference, stages_of, whole
from oracles import refuses
from toys import same

from diffrl.algorithms import art, dance_grpo, grpo_guard_as_published
from diffrl.backends import Lost
from diffrl.parallel import Schedule, gap_partition
from diffrl.ray_backend import (
    RayActors,
    Worker,
    apart,
    joined,
    ray_actors,
    ray_sum,
    require_ray,
    spanning,
    summed,
)
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
            grads = [ray_sum, *(worker.gradients() for worker in workers)] if len(workers) > 1 else []
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


class GoneError(Exception):
    actor_init_failed = False


@pytest.mark.parametrize(("deaths", "broken", "made"), [(0, False, 1), (2, False, 3), (3, False, 3), (1, True, 1)])
def test_an_actor_that_never_ran_is_made_again_unless_it_cannot_be_built(monkeypatch, deaths, broken, made):
    """As where a node is gone that Ray still gives actors to."""
    backend = RayActors(generators=1, rewards=1, trainers=1, gradients=ray_sum, build=None, options={}, bitwise=False)
    seen, killed, loaded = [], [], []

    def make(name):
        seen.append(name)
        backend.loading[name] = ("load", len(seen))
        return len(seen)

    def ready(actor):
        if actor <= deaths:
            error = GoneError()
            error.actor_init_failed = broken
            raise error
        return 0.5

    ray = SimpleNamespace(exceptions=SimpleNamespace(RayActorError=GoneError), get=loaded.append)
    ray.kill = lambda actor, no_restart: killed.append(actor)
    backend.ray = ray
    monkeypatch.setattr(backend, "_made", make)
    monkeypatch.setattr(backend, "_offset", ready)
    if deaths < 3 and not broken:
        backend._start(["trainer/0"])
        assert (backend.actors, backend.offsets) == ({"trainer/0": made}, {"trainer/0": 0.5})
        assert (loaded, killed) == ([("load", made)], list(range(1, made)))
    else:
        with pytest.raises(GoneError):
            backend._start(["trainer/0"])
    assert seen == ["trainer/0"] * made


def test_counts_and_stages_that_do_not_fit_are_refused(monkeypatch):
    pytest.importorskip("ray")
    for name in ("generators", "rewards", "trainers"):
        with refuses(name):
            ray_actors(**{name: 0})
    with refuses("gradients must be gloo_sum or ray_sum"):
        ray_actors(gradients=sum)
    schedule = Schedule(gap_partition(2, 2, fragments=2), 2, timesteps=2)
    noted = PlainStages(Noted().workers(), {}, torch.arange(4), schedule)
    backend = ray_actors(trainers=2)
    assert isinstance(backend, RayActors)
    with refuses("the gradients of plain Workers cannot be summed"):
        backend.open(noted, schedule)
    with refuses("looks beyond a sample"):
        ray_actors(generators=2).open(stages_of(dance_grpo()), whole(2))


def test_control_one_rank_alone_is_another_gradient():
    """Two ranks share the pairs: without the other's share the sum is another one."""
    workers = [Worker(stages_of(art()), SCHEDULE, rank, 2) for rank in range(2)]
    params, _ = workers[0].snapshot()
    parts = [workers[0].generate(0, params, f.samples)[0] for f in SCHEDULE.fragments]
    scored = [workers[0].score(0, f.samples, part)[2] for f, part in zip(SCHEDULE.fragments, parts, strict=True)]
    for worker in workers:
        worker.train(0, 0, 0, {i: (values, 1) for i, values in enumerate(scored)}, *parts)
    a, b = (worker.gradients()["mean"] for worker in workers)
    assert not torch.allclose(summed([a, b]), a)


OWN = """
import ast
import subprocess
import sys
import torch
sys.path[:0] = [{root!r}]
from diffrl.ranks import enter_group, leave_group
from diffrl.ray_backend import gloo_sum
rank = int(sys.argv[1])
enter_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
made = {{"a": torch.float64, "b": torch.float32, "c": torch.float32, "d": torch.float64}}
params = {{n: torch.zeros(2, 3, dtype=dtype, requires_grad=True) for n, dtype in made.items()}}
params["a"].grad = torch.full((2, 3), 0.1 + rank, dtype=torch.float64)
if rank:
    params["b"].grad = torch.arange(6.0).reshape(2, 3)
gloo_sum(params)
print([None if p.grad is None else [str(p.grad.dtype), p.grad.tolist()] for p in params.values()])
leave_group()
"""


def test_gloo_sums_what_the_ranks_have_and_an_empty_share_joins_with_zeros(tmp_path):
    program = OWN.format(root=str(Path(__file__).parents[1]))
    command = [sys.executable, "-c", program]
    ranks = [
        subprocess.Popen([*command, str(r), str(tmp_path / "meet")], stdout=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    told = [ast.literal_eval(rank.communicate(timeout=200)[0]) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert told[0] == told[1]
    a, b, *absent = told[0]
    assert a == ["torch.float64", [[0.1 + 1.1] * 3] * 2]
    assert b == ["torch.float32", torch.arange(6.0).reshape(2, 3).tolist()]
    assert absent == [None, None]


def test_ray_sums_what_is_sent_in_order_of_rank():
    params = {n: torch.zeros(2, requires_grad=True) for n in "abc"}
    ranks = [
        {"a": torch.tensor([1e8, 1.0]), "b": None, "c": None},
        {"a": torch.tensor([1.0, 2.0]), "b": torch.ones(2), "c": None},
    ]
    ray_sum(params, *ranks, {"a": torch.tensor([-1e8, 3.0]), "b": None, "c": None})
    assert params["a"].grad.tolist() == [0.0, 6.0]  # (1e8 + 1) - 1e8 in float32
    assert params["b"].grad.tolist() == [1.0, 1.0]
    assert params["c"].grad is None
    assert ranks[0]["a"].tolist() == [1e8, 1.0]


class RayError(Exception):
    pass


def without_ray(stages):
    """A backend whose actors answer nothing: what it does by itself."""
    backend = RayActors(generators=1, rewards=1, trainers=1, gradients=ray_sum, build=None, options={}, bitwise=False)
    backend.stages, backend.commits, backend.snapshots, backend.replaced = stages, 0, {}, []
    backend.replace = backend.replaced.append
    return backend


def test_a_trainer_of_plain_workers_that_dies_after_a_commit_does_not_begin_anew_in_silence():
    noted = PlainStages(Noted().workers(), {}, torch.arange(4), Schedule(gap_partition(2, 2, fragments=2), 2))
    backend = without_ray(noted)
    backend.recover()  # nothing is lost yet: it begins with the params that were sent
    backend.commits = 2
    with pytest.raises(Lost, match="the trainer died after 2 commits, and plain Workers have no state"):
        backend.recover()
    assert backend.replaced == ["trainer"]
    other = without_ray(stages_of(art()))
    other.commits = 2
    other.recover()
    assert other.replaced == ["trainer"]


def test_a_state_that_is_lost_with_its_node_is_an_error_of_the_publication():
    backend = without_ray(stages_of(art()))

    def lost(reference):
        raise RayError("its node is gone")

    backend.ray = SimpleNamespace(exceptions=SimpleNamespace(RayError=RayError, RayActorError=GoneError), get=lost)
    snapshot = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=lambda: (None, None)))
    backend.actors = {"trainer/0": SimpleNamespace(snapshot=snapshot)}
    error = backend.publish(3).future.exception(1)
    assert backend.lost("trainer", error)
    assert "the state after the commit is lost: RayError: its node is gone" in str(error)


def test_ranks_of_which_one_failed_to_commit_have_drifted_apart():
    """The other one may have stepped: both begin again from the last common state."""
    first, second = Future(), Future()
    whole_one, other = apart(first), apart(second)
    first.set_exception(ZeroDivisionError("rank 1"))
    second.set_result(7)
    error = whole_one.exception(1)
    assert isinstance(error, Lost)
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert "a trainer rank failed to commit: ZeroDivisionError: rank 1" in str(error)
    assert other.result(1) == 7


def test_ranks_do_not_share_the_forward_of_an_objective_that_looks_at_all_of_it():
    pytest.importorskip("ray")
    with refuses("objective looks at all samples of a forward"):
        ray_actors(trainers=2).open(stages_of(grpo_guard_as_published()), whole(4))
