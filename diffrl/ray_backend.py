"""The stages of a schedule as Ray actors: generators, reward workers, trainer ranks; here, or on a cluster by `ray://`.

Trajectories and snapshots stay in Ray's object store; this process sees rewards, metrics and times, and after each commit
the trainer's state, from which a trainer that died comes back. Ray is imported when a backend is opened: extra `ray`.
"""

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import torch
from torch import Tensor

from diffrl.backends import Call, Lost
from diffrl.checks import require_count
from diffrl.partitions import even_runs
from diffrl.ranks import enter_group, torch_ranks
from diffrl.schedules import Schedule
from diffrl.stages import AlgorithmStages, require_separable_collect, require_separable_objective
from diffrl.trainers import Trainer, concatenated
from diffrl.types import Params


def require_ray() -> Any:
    """The module, or ImportError naming what to install. No example: Ray need not be installed."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("the ray engine needs Ray: pip install 'diffrl[ray]'") from error
    return ray


STARTS = 3  # times an actor is made before its death is an error


class Worker:
    """One actor: stages of its own, and a trainer rank around them. What is timed returns (start, end, value), last or alone."""

    def __init__(self, stages: Any, schedule: Schedule, rank: int, ranks: int):
        self.stages = stages() if callable(stages) else stages
        self.trainer = Trainer(self.stages, schedule, rank, ranks)

    def now(self) -> float:
        """This process's clock."""
        return time.monotonic()

    def generate(self, step: int, params: Any, rows: Sequence[int]) -> tuple[Any, Any]:
        """(trajectory, (start, end, rows))."""
        start = time.monotonic()
        trajectory = self.stages.generate(step, params, rows)
        return trajectory, (start, time.monotonic(), len(rows))

    def score(self, step: int, rows: Sequence[int], *parts: Any) -> Any:
        """(start, end, rewards)."""
        start = time.monotonic()
        rewards = self.stages.score(step, rows, concatenated(parts))
        return start, time.monotonic(), rewards

    def train(
        self, step: int, update: int, fragment: int, rewards: Mapping[int, tuple[Tensor, int]], *parts: Any
    ) -> Any:
        """(start, end, told). rewards: of each fragment, with how many of the parts are its."""
        start, given, place = time.monotonic(), {}, 0
        for index, (values, count) in rewards.items():
            given[index] = (concatenated(parts[place : place + count]), values)
            place += count
        told = self.trainer.train(step, update, fragment, given)
        return start, time.monotonic(), told

    def gradients(self) -> dict[str, Tensor | None]:
        """This rank's accumulated gradient; None where it has none (an empty share)."""
        return {name: p.grad for name, p in self.stages.model.params.items()}

    def address(self) -> str:
        """Where the ranks of a gloo group find rank 0: this node, a port that was free."""
        ray = require_ray()
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def join(self, address: str, rank: int, ranks: int) -> None:
        """Into the gloo group of the trainer ranks; returns when all are there."""
        enter_group("gloo", init_method=address, rank=rank, world_size=ranks)

    def commit(
        self, step: int, update: int, gather: Callable[..., None] | None = None, *ranks: Mapping[str, Tensor | None]
    ) -> Any:
        """(state, (start, end, (metrics, checksum))). gather: sums the gradients of several ranks; ranks: those, if sent."""
        start = time.monotonic()
        if gather is not None:
            gather(self.stages.model.params, *ranks)
        metrics = self.trainer.commit(step, update)
        state = self.stages.state() if hasattr(self.stages, "state") else None
        total = None if state is None else float(sum(p.double().sum() for p in state["params"].values()))
        return state, (start, time.monotonic(), (metrics, total))

    def snapshot(self) -> Any:
        """(params, (start, end, None))."""
        start = time.monotonic()
        params = self.stages.snapshot()
        return params, (start, time.monotonic(), None)

    def do(self, name: str) -> Any:
        """switch, restore or zero of the trainer: (start, end, None)."""
        start = time.monotonic()
        getattr(self.trainer, name)()
        return start, time.monotonic(), None

    def load(self, state: Mapping[str, Any] | None) -> None:
        """The state after the last commit."""
        if state is not None:
            self.stages.load(state)


def summed(gradients: Sequence[Tensor]) -> Tensor | None:
    """Their sum in order, a new tensor; None of none.

    >>> from torch import ones
    >>> summed([ones(2), ones(2)])
    tensor([2., 2.])
    """
    if not gradients:
        return None
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    return total


def ray_sum(params: Params, *ranks: Mapping[str, Tensor | None]) -> None:
    """Each param's gradient becomes the sum of the ranks', which Ray's object store has brought here, in order of rank: the
    same bits on every rank, whatever the network. None where no rank has one.

    >>> w = torch.zeros(2, requires_grad=True)
    >>> ray_sum({"w": w}, {"w": torch.ones(2)}, {"w": None}, {"w": torch.ones(2)})
    >>> w.grad
    tensor([2., 2.])
    """
    for name, p in params.items():
        p.grad = summed([grads[name] for grads in ranks if grads[name] is not None])  # type: ignore[misc]


def gloo_sum(params: Params) -> None:
    """Each param's gradient becomes the sum over the ranks of this process's group, by torch.distributed (gloo). A rank with an
    empty share joins with zeros. The same bits on every rank; of three or more the order of summation is gloo's. None where
    no rank has one: an optimizer does not step a param without a gradient.

    No example: needs a process group.
    """
    there = torch.tensor([p.grad is not None for p in params.values()], dtype=torch.int32)
    torch.distributed.all_reduce(there)
    torch_ranks().add(params)
    for p, known in zip(params.values(), there.tolist(), strict=True):
        p.grad = p.grad if known else None


def joined(futures: Sequence[Future], combine: Callable[[list[Any]], Any]) -> Future:
    """The future of `combine(results)` of several; the first error is its error.

    >>> a, b = Future(), Future()
    >>> whole = joined([a, b], sum)
    >>> a.set_result(1)
    >>> whole.done(), b.set_result(2), whole.result()
    (False, None, 3)
    """
    whole: Future = Future()
    whole.set_running_or_notify_cancel()
    lock, left = threading.Lock(), [len(futures)]

    def done(future: Future) -> None:
        with lock:
            if whole.done():
                return
            error = future.exception()
            error = getattr(error, "cause", None) or error  # what a task raised, without Ray's traceback around it
            left[0] -= 1
            try:
                if error is not None:
                    whole.set_exception(error)
                elif not left[0]:
                    whole.set_result(combine([f.result() for f in futures]))
            except Exception as error:
                whole.set_exception(error)

    for future in futures:
        future.add_done_callback(done)
    return whole


def apart(future: Future) -> Future:
    """The future whose error says that the ranks may have drifted apart: one may have stepped where another failed.

    >>> done: Future = Future()
    >>> done.set_result(7)
    >>> apart(done).result()
    7
    """
    whole: Future = Future()
    whole.set_running_or_notify_cancel()

    def done(future: Future) -> None:
        error = future.exception()
        if error is None:
            whole.set_result(future.result())
            return
        lost = Lost(f"a trainer rank failed to commit: {type(error).__name__}: {error}")
        lost.__cause__ = error
        whole.set_exception(lost)

    future.add_done_callback(done)
    return whole


def spanning(results: Sequence[tuple[float, float, Any]]) -> tuple[float, float, list[Any]]:
    """From the first start to the last end, and all values.

    >>> spanning([(1.0, 2.0, "a"), (0.5, 1.5, "b")])
    (0.5, 2.0, ['a', 'b'])
    """
    return min(r[0] for r in results), max(r[1] for r in results), [r[2] for r in results]


class RayActors:
    """A backend of actors: see `ray_actors`."""

    pick = None

    def __init__(
        self,
        *,
        generators: int,
        rewards: int,
        trainers: int,
        gradients: Callable[..., None],
        build: Any,
        options: Mapping[str, Any],
        bitwise: bool,
    ):
        if gradients not in (gloo_sum, ray_sum):
            raise ValueError(f"gradients must be gloo_sum or ray_sum, got {gradients!r:.80}")
        self.gradients = gradients
        counts = {"generators": generators, "rewards": rewards, "trainers": trainers}
        for name, count in counts.items():
            require_count(name, count)
        self.generators, self.rewards, self.trainers = generators, rewards, trainers
        self.build, self.options, self.bitwise = build, {"num_cpus": 0, **options}, bitwise
        self.actors: dict[str, Any] = {}
        self.offsets: dict[str, float] = {}
        self.loading: dict[str, Any] = {}
        self.state: Any = None

    def open(self, stages: Any, schedule: Schedule) -> None:
        """Start Ray where it does not run yet, and one actor per worker."""
        self.ray = require_ray()
        if self.trainers > 1 and not isinstance(stages, AlgorithmStages):
            raise ValueError(f"trainers={self.trainers}: the gradients of plain Workers cannot be summed over ranks")
        if self.trainers > 1:
            require_separable_objective(stages.algorithm, steps=stages.steps, group_size=stages.k)
        if self.generators > 1 and isinstance(stages, AlgorithmStages):
            require_separable_collect(stages.algorithm, steps=stages.steps, group_size=stages.k, whole_groups=False)
        self.own = not self.ray.is_initialized()
        if self.own:
            self.ray.init(include_dashboard=False, logging_level="ERROR")
        self.stages, self.schedule = stages, schedule
        self.sent = self.ray.put(stages) if self.build is None else self.build
        if hasattr(stages, "state"):
            self.state = self.ray.put(stages.state())
        self.snapshots: dict[int, Any] = {}
        self.commits = 0
        names = [f"generator/{i}" for i in range(self.generators)] + [f"reward/{i}" for i in range(self.rewards)]
        self._start([*names, *self._ranks()])

    def _start(self, names: Sequence[str]) -> None:
        """New actors under these names, built side by side."""
        for name in names:
            self.actors[name] = self._made(name)
        for name in names:
            self._await(name)
        ranks = self._ranks()
        if len(ranks) > 1 and self.gradients is gloo_sum and set(ranks) <= set(names):
            address = self.ray.get(self.actors[ranks[0]].address.remote())
            self.ray.get([self.actors[n].join.remote(address, i, len(ranks)) for i, n in enumerate(ranks)])

    def _await(self, name: str) -> None:
        """Until it is ready. Made again where it never ran: a node that is gone is still given actors for some seconds."""
        for left in reversed(range(STARTS)):
            try:
                self.offsets[name] = self._offset(self.actors[name])
                if name in self.loading:
                    self.ray.get(self.loading.pop(name))
                return
            except self.ray.exceptions.RayActorError as error:
                if not left or error.actor_init_failed:  # what cannot be built here is not built elsewhere
                    raise
                self.ray.kill(self.actors[name], no_restart=True)
                self.actors[name] = self._made(name)

    def _made(self, name: str) -> Any:
        """An actor; a trainer begins with the state after the last commit."""
        kind, _, number = name.partition("/")
        rank = int(number) if kind == "trainer" else 0
        made = self.ray.remote(Worker).options(max_restarts=0, **self.options)
        actor = made.remote(self.sent, self.schedule, rank, self.trainers if kind == "trainer" else 1)
        if kind == "trainer" and self.state is not None:
            self.loading[name] = actor.load.remote(self.state)  # before anything else that this actor is asked
        return actor

    def _offset(self, actor: Any) -> float:
        """Its clock against ours, from the quickest of a few questions; it is ready then."""
        asked = []
        for _ in range(3):
            before = time.monotonic()
            there = self.ray.get(actor.now.remote())
            after = time.monotonic()
            asked.append((after - before, (before + after) / 2 - there))
        return min(asked)[1]

    def _timed(self, name: str, reference: Any) -> Future:
        """The future of a call's times and value, on our clock."""
        offset = self.offsets[name]
        if abs(offset) < 1e-3:  # the same machine has the same clock: what is left is the delay of the question
            offset = 0.0
        return joined([reference.future()], lambda r: (r[0][0] + offset, r[0][1] + offset, r[0][2]))

    def now(self) -> float:
        """Seconds on this process's clock."""
        return time.monotonic()

    def wait(self, futures: Sequence[Future], timeout: float | None) -> set[Future]:
        """Those that are done, once one is or the time is up."""
        return wait(futures, timeout=timeout, return_when=FIRST_COMPLETED).done

    def _generation(self, names: Sequence[str], step: int, fragment: int, version: int) -> Call:
        rows = self.schedule.fragments[fragment].samples
        handles, futures = [], []
        for name, run in zip(names, even_runs(len(rows), min(len(names), len(rows))), strict=False):
            part = [rows[i] for i in run]
            made = self.actors[name].generate.options(num_returns=2).remote(step, self.snapshots[version], part)
            handles.append(made[0])
            futures.append(self._timed(name, made[1]))
        return Call(joined(futures, lambda r: (*spanning(r)[:2], len(rows))), handles)

    def generate(self, step: int, fragment: int, version: int) -> Call:
        """A fragment on all generators together, its rows shared evenly."""
        return self._generation([f"generator/{i}" for i in range(self.generators)], step, fragment, version)

    def help(self, step: int, fragment: int, version: int) -> Call:
        """A fragment on the first trainer."""
        return self._generation(["trainer/0"], step, fragment, version)

    def score(self, worker: int, step: int, fragment: int, handle: Any) -> Call:
        """Rewards of a generated fragment."""
        name, rows = f"reward/{worker}", self.schedule.fragments[fragment].samples
        return Call(self._timed(name, self.actors[name].score.remote(step, rows, *handle)))

    def _ranks(self) -> list[str]:
        return [f"trainer/{i}" for i in range(self.trainers)]

    def train(self, step: int, update: int, fragment: int, parts: Mapping[int, tuple[Any, Any]]) -> Call:
        """Every rank adds its share of the fragment's gradient."""
        rewards = {i: (values, len(handle)) for i, (handle, values) in parts.items()}
        flat = [piece for handle, _ in parts.values() for piece in handle]
        made = {n: self.actors[n].train.remote(step, update, fragment, rewards, *flat) for n in self._ranks()}

        def combine(results: list[Any]) -> Any:
            start, end, told = spanning(results)
            return start, end, [one for of_rank in told for one in of_rank]

        return Call(joined([self._timed(n, ref) for n, ref in made.items()], combine))

    def commit(self, step: int, update: int) -> Call:
        """The same optimizer step on every rank, on the sum of their gradients; their params must agree afterwards."""
        names, given = self._ranks(), []
        if len(names) > 1:
            sent = self.gradients is ray_sum
            given = [self.gradients, *([self.actors[n].gradients.remote() for n in names] if sent else [])]
        made = {n: self.actors[n].commit.options(num_returns=2).remote(step, update, *given) for n in names}

        def combine(results: list[Any]) -> Any:
            start, end, values = spanning(results)
            if len({total for _, total in values}) != 1:
                raise Lost(f"the params of the trainer ranks differ: checksums {[total for _, total in values]}")
            self.state, self.commits = made[names[0]][0], self.commits + 1
            return start, end, values[0][0]

        told = joined([self._timed(n, refs[1]) for n, refs in made.items()], combine)
        return Call(apart(told) if len(names) > 1 else told)

    def publish(self, version: int) -> Call:
        """A snapshot under this version, in the object store; this process's own stages get the committed state."""
        made = self.actors["trainer/0"].snapshot.options(num_returns=2).remote()
        self.snapshots = {v: s for v, s in self.snapshots.items() if v >= version - 1} | {version: made[0]}
        if hasattr(self.stages, "load"):
            try:
                self.stages.load(self.ray.get(self.state))
            except self.ray.exceptions.RayError as error:  # it lay on a node that is gone
                gone: Future = Future()
                gone.set_exception(Lost(f"the state after the commit is lost: {type(error).__name__}: {error}"))
                return Call(gone)
        return Call(self._timed("trainer/0", made[1]))

    def _do(self, what: str, names: Sequence[str]) -> Call:
        futures = [self._timed(n, self.actors[n].do.remote(what)) for n in names]
        return Call(joined(futures, lambda r: (*spanning(r)[:2], None)))

    def switch(self) -> Call:
        """The helping trainer makes room to generate."""
        return self._do("switch", ["trainer/0"])

    def restore(self) -> Call:
        """And goes back to training."""
        return self._do("restore", ["trainer/0"])

    def zero(self) -> Call:
        """Every rank forgets what it accumulated since the last commit."""
        return self._do("zero", self._ranks())

    def lost(self, resource: str, error: BaseException) -> bool:
        """Whether the error says that an actor is gone, or that ranks have drifted apart."""
        return isinstance(error, Lost | self.ray.exceptions.RayActorError)

    def replace(self, resource: str) -> None:
        """New actors in the place of those of a resource; the old ones are killed."""
        names = [n for n in self.actors if n == resource or n.startswith(f"{resource}/")]
        for name in names:
            self.ray.kill(self.actors[name], no_restart=True)
        self._start(names)

    def recover(self) -> None:
        """Every trainer rank anew, as after the last commit. Lost: plain Workers, which cannot say what that was."""
        if self.commits and not hasattr(self.stages, "state"):
            raise Lost(
                f"the trainer died after {self.commits} commits, and plain Workers have no state to come back with: use "
                "AlgorithmStages, or begin anew"
            )
        self.replace("trainer")

    def facts(self) -> dict[str, float]:
        """clock_offset: the largest of an actor's clock against ours, in seconds."""
        return {"clock_offset": max(abs(offset) for offset in self.offsets.values())}

    def close(self, seconds: float = 5.0) -> None:
        """Kill the actors; stop Ray where this backend started it."""
        for actor in self.actors.values():
            self.ray.kill(actor, no_restart=True)
        self.actors = {}
        if getattr(self, "own", False):
            self.ray.shutdown()


def ray_actors(
    *,
    generators: int = 1,
    rewards: int = 1,
    trainers: int = 1,
    gradients: Callable[..., None] = gloo_sum,
    build: Callable[[], Any] | None = None,
    options: Mapping[str, Any] | None = None,
    bitwise: bool = False,
) -> RayActors:
    """Actors on Ray, which is started here unless `ray.init(...)` was called before.

    generators share the rows of each fragment; trainers its pairs or samples, and their gradients are summed: `gloo_sum`
    (torch.distributed) or `ray_sum` (the object store, in order of rank; also where ranks cannot reach each other's ports).
    build: makes the stages in each actor (what cannot be pickled: a pipeline, an OCR engine); None: those given to `run` are
    sent. Plain `Workers` train in their actor alone: a trainer that dies after its first commit ends their run. options: of
    the actors, e.g. {"num_gpus": 1}. ValueError: counts below 1. ImportError: no Ray.
    No example: starts processes.
    """
    require_ray()
    return RayActors(
        generators=generators,
        rewards=rewards,
        trainers=trainers,
        gradients=gradients,
        build=build,
        options=options or {},
        bitwise=bitwise,
    )
