"""Where the stages of a schedule run, in this process: on threads, or one call at a time in any order one likes.

A backend answers each request with a `Call`: a future of (start, end, value), measured where the work was done, and a
handle to what is too large to be looked at (a trajectory), which only other requests are given.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple

from diffrl.checks import require_count
from diffrl.schedules import Schedule
from diffrl.trainers import Trainer


class Call(NamedTuple):
    """A request in flight. future: of (start, end, value) on this process's monotonic clock; handle: to the result."""

    future: Future
    handle: Any = None


class Lost(RuntimeError):
    """A worker is gone, or did not answer in time."""


class _Lane:
    """One daemon thread that does one thing after the other; a hung one can be left behind, and dies with the process."""

    def __init__(self, name: str):
        self.tasks: queue.SimpleQueue = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (task := self.tasks.get()) is not None:
            future, function = task
            _answer(future, function)

    def submit(self, future: Future, function: Callable[[], Any]) -> None:
        self.tasks.put((future, function))


def _answer(future: Future, function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        start = time.monotonic()
        value = function()
        future.set_result((start, time.monotonic(), value))
    except BaseException as error:
        future.set_exception(error)


def in_a_thread(name: str, function: Callable[[], Any]) -> Future:
    """The future (start, end, value) of a function that runs in a thread of its own.

    >>> start, end, value = in_a_thread("answer", lambda: 6 * 7).result()
    >>> end >= start, value
    (True, 42)
    """
    future: Future = Future()
    lane = _Lane(name)
    lane.submit(future, function)
    lane.tasks.put(None)
    return future


class InProcess:
    """The reference backend: generator, reward workers and one trainer rank in this process.

    pick None: a thread for each, overlapping. pick, a function of the number of calls in flight: no threads; whenever the
    schedule waits, the call that it picks (oldest first: 0) is run, alone: deterministic, and any order of completion.
    bitwise: fragments are trained in order of their index, so that sums of gradients are the same to the last bit.
    """

    def __init__(self, *, bitwise: bool = False, rewards: int = 1, pick: Callable[[int], int] | None = None):
        self.bitwise, self.rewards, self.pick = bitwise, require_count("rewards", rewards), pick
        self.lanes: dict[str, _Lane] = {}
        self.left: list[_Lane] = []
        self.waiting: list[tuple[Future, Callable[[], Any]]] = []

    def open(self, stages: Any, schedule: Schedule) -> Any:
        """Get ready. Returns the stages whose params live here."""
        self.stages, self.schedule = stages, schedule
        self.trainer = Trainer(stages, schedule)
        self.snapshots: dict[int, Any] = {}
        return stages

    def _call(self, resource: str, function: Callable[[], Any]) -> Future:
        future: Future = Future()
        if self.pick is not None:
            self.waiting.append((future, function))
            return future
        if resource not in self.lanes:
            self.lanes[resource] = _Lane(f"diffrl {resource}")
        self.lanes[resource].submit(future, function)
        return future

    def wait(self, futures: Sequence[Future], timeout: float | None) -> set[Future]:
        """Those that are done, once one is or the time is up."""
        if self.pick is not None:
            done = {future for future in futures if future.done()}
            if not done and self.waiting:
                _answer(*self.waiting.pop(self.pick(len(self.waiting))))
                done = {future for future in futures if future.done()}
            return done
        return wait(futures, timeout=timeout, return_when=FIRST_COMPLETED).done

    def _generation(self, resource: str, step: int, fragment: int, version: int) -> Call:
        snapshot, rows = self.snapshots[version], self.schedule.fragments[fragment].samples
        held: list[Any] = []

        def work() -> int:
            held.append(self.stages.generate(step, snapshot, rows))
            return len(rows)

        return Call(self._call(resource, work), held)

    def generate(self, step: int, fragment: int, version: int) -> Call:
        """A trajectory of the fragment's rows under the version's params, on the generator."""
        return self._generation("generator", step, fragment, version)

    def help(self, step: int, fragment: int, version: int) -> Call:
        """The same on the trainer."""
        return self._generation("trainer", step, fragment, version)

    def score(self, worker: int, step: int, fragment: int, handle: Any) -> Call:
        """Rewards of a generated fragment."""
        rows = self.schedule.fragments[fragment].samples
        return Call(self._call(f"reward/{worker}", lambda: self.stages.score(step, rows, handle[0])))

    def train(self, step: int, update: int, fragment: int, parts: Mapping[int, tuple[Any, Any]]) -> Call:
        """The fragment's gradient is added; parts: handle and rewards of all that share groups with it."""
        given = {i: (handle[0], rewards) for i, (handle, rewards) in parts.items()}
        return Call(self._call("trainer", lambda: self.trainer.train(step, update, fragment, given)))

    def commit(self, step: int, update: int) -> Call:
        """One optimizer step."""
        return Call(self._call("trainer", lambda: self.trainer.commit(step, update)))

    def publish(self, version: int) -> Call:
        """A snapshot of the params under this version; the two newest are kept."""

        def work() -> None:
            snapshot = self.stages.snapshot()
            self.snapshots = {v: s for v, s in self.snapshots.items() if v >= version - 1} | {version: snapshot}

        return Call(self._call("trainer", work))

    def switch(self) -> Call:
        """The trainer makes room to generate."""
        return Call(self._call("trainer", self.trainer.switch))

    def restore(self) -> Call:
        """And goes back to training."""
        return Call(self._call("trainer", self.trainer.restore))

    def zero(self) -> Call:
        """The trainer forgets what it accumulated since the last commit."""
        return Call(self._call("trainer", self.trainer.zero))

    def replace(self, resource: str) -> None:
        """A new worker in the place of one that failed or hangs; a thread that hangs is left behind."""
        if resource in self.lanes:
            lane = self.lanes.pop(resource)
            lane.tasks.put(None)
            self.left.append(lane)

    def now(self) -> float:
        """Seconds on the clock that calls are measured with."""
        return time.monotonic()

    def lost(self, resource: str, error: BaseException) -> bool:
        """Whether the error means that the worker is gone and with it what it held. A thread that raises lives on."""
        return False

    def recover(self) -> None:
        """A lost trainer comes back as it was after the last commit. A thread is never lost."""

    def facts(self) -> dict[str, float]:
        """What is to be known of the measurement."""
        return {}

    def close(self, seconds: float = 5.0) -> None:
        """Drop what is in flight and end the threads; one that hangs for longer than `seconds` is left behind."""
        for future, _ in self.waiting:
            future.cancel()
        self.waiting.clear()
        lanes = [*self.lanes.values(), *self.left]
        self.lanes, self.left = {}, []
        for lane in lanes:
            with contextlib.suppress(queue.Empty):
                while True:
                    task = lane.tasks.get_nowait()
                    if task is not None:
                        task[0].cancel()
            lane.tasks.put(None)
        end = time.monotonic() + seconds
        for lane in lanes:
            lane.thread.join(max(0.0, end - time.monotonic()))


def in_process(*, bitwise: bool = False, rewards: int = 1, pick: Callable[[int], int] | None = None) -> InProcess:
    """The reference backend: see `InProcess`. rewards: reward workers. No example: `executors.run` has one."""
    return InProcess(bitwise=bitwise, rewards=rewards, pick=pick)
