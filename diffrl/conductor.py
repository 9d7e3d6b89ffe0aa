"""The rules of a schedule, played with calls that really run: who claims what next, what failed and is done again.

The same rules as `simulation`'s, with a backend's answers in the place of its clock. Everything here happens on the
caller's thread; a step is over when its publication is.
"""

import heapq
import operator
import statistics
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from diffrl.backends import Lost, in_a_thread
from diffrl.checks import NoReward
from diffrl.costs import CostModel, Pool, TrainCost
from diffrl.schedules import Bubble, Interval, Schedule, Trace, sharing
from diffrl.simulation import Lend, tcss_admit

THOUGHT = 0.05
"""Seconds that `lend` may think about a bubble; beyond it the answer is 0."""


class ExecutionError(RuntimeError):
    """A stage failed more often than it may be retried. The last cause is chained; params are those of the last commit."""

    def __init__(self, stage: str, step: int, fragment: int, attempts: int, cause: BaseException):
        of = f", fragment {fragment}" if fragment >= 0 else ""
        super().__init__(
            f"{stage} of step {step}{of} failed {attempts} times, the last time by {type(cause).__name__}: {cause}"
        )
        self.stage, self.step, self.fragment, self.attempts = stage, step, fragment, attempts


class MeasuredTrace(Trace):
    """The trace up to the end of a step, made of the run's own lists, which only grow, when it is asked for: a run of many
    steps would otherwise copy all of them at each. Intervals that began after the step's end are left out."""

    def __init__(self, intervals: list[Interval], ends: list[float]):
        object.__setattr__(self, "_lists", (intervals, ends, len(intervals), len(ends)))

    def __getattr__(self, name: str) -> Any:
        if name not in ("intervals", "ends"):
            raise AttributeError(name)
        intervals, ends, known, steps = self._lists
        kept = [i for i in intervals[:known] if i.start < ends[steps - 1]]
        whole = Trace(tuple(sorted(kept, key=operator.attrgetter("start"))), tuple(ends[:steps]))
        vars(self).update(vars(whole))
        return getattr(whole, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and (self.intervals, self.ends) == (other.intervals, other.ends)

    def __hash__(self) -> int:
        return hash((self.intervals, self.ends))

    def __reduce__(self) -> tuple[Any, ...]:
        return Trace, (self.intervals, self.ends)


class Flight(NamedTuple):
    """A call in flight: what it is of, where it runs, when it has taken too long."""

    future: Future
    handle: Any
    kind: str
    resource: str
    step: int
    fragment: int
    version: int
    deadline: float | None
    begun: float


class Progress:
    """One batch: how far its fragments are claimed, generated, scored and trained, and in which update."""

    def __init__(self, step: int, schedule: Schedule):
        self.step, self.place, self.update, self.published = step, 0, 0, False
        self.groups = sharing(schedule.fragments, schedule.group_size, barrier=schedule.barrier)
        members: dict[int, set[int]] = {}
        for i, touched in enumerate(self.groups):
            for group in touched:
                members.setdefault(group, set()).add(i)
        self.partners = [sorted(set().union(*(members[g] for g in touched))) for touched in self.groups]
        self.handles: dict[int, Any] = {}
        self.rewards: dict[int, Any] = {}
        self.scored_at: dict[int, float] = {}
        self.trained: set[int] = set()
        self.lent: list[int] = []  # claimed by the trainer, not generated yet
        self.told: list[list] = [[]]  # per update: metrics of its forward-backwards
        self.metrics: list[dict[str, float]] = []
        self.seconds: dict[str, float] = {}  # busy with this batch, by kind
        self.unjudged: dict[int, BaseException] = {}  # fragments for all of whose samples the reward raised
        self.retries, self.replaced = 0, 0

    def ready(self) -> list[tuple[float, int]]:
        """(when it became trainable, fragment) of those that can be trained now, a heap."""
        found = [
            (max(self.scored_at[j] for j in self.partners[i]) if not self.update else 0.0, i)
            for i in range(len(self.groups))
            if i not in self.trained and all(j in self.rewards for j in self.partners[i])
        ]
        heapq.heapify(found)
        return found


class Conductor:
    """Plays global steps on a backend; see `executors.run` for what the arguments mean."""

    def __init__(
        self,
        schedule: Schedule,
        backend: Any,
        *,
        updates: int,
        start: int,
        stop: int | None,
        cost: CostModel | None,
        lend: Lend,
        retries: int,
        timeout: float | None,
    ):
        self.schedule, self.backend, self.updates, self.stop = schedule, backend, updates, stop
        self.cost, self.lend, self.retries, self.timeout = cost, lend, retries, timeout
        self.this, self.next = Progress(start, schedule), Progress(start + 1, schedule)
        self.published, self.split = start, schedule.placement == "split"
        self.generating: Flight | None = None
        self.scoring: dict[int, Flight] = {}
        self.queue: deque[tuple[Progress, int]] = deque()
        self.acting: Flight | None = None
        self.plan: deque[tuple[str, int]] = deque()
        self.asked = False
        self.attempts: dict[tuple[str, int, int], int] = {}
        self.seen: dict[str, deque[float]] = {}
        self.intervals: list[Interval] = []
        self.ends: list[float] = []
        self.thinking: Any = None
        self.begin()

    def begin(self) -> None:
        """Version `start` exists before the clock starts."""
        for attempt in range(1, self.retries + 2):
            first = self.backend.publish(self.published).future
            while not first.done():
                self.backend.wait([first], None)
            error = first.exception()
            if error is None:
                break
            if not isinstance(error, Exception):
                raise error
            if attempt > self.retries:
                raise ExecutionError("publish", self.published, -1, attempt, error) from error
            if self.backend.lost("trainer", error):
                self.backend.recover()
        self.origin = self.backend.now()

    # ---- one step -----------------------------------------------------------------------------------------------------

    def play(self) -> Progress:
        """One global step, up to its publication."""
        batch = self.this
        if not self.split:
            engines = self.schedule.placement == "engines"
            batch.lent = list(range(len(batch.groups)))
            batch.place = len(batch.groups)
            self.plan.extend([("switch", -1)] if engines else [])
            self.plan.extend(("help", i) for i in batch.lent)
            self.plan.extend([("restore", -1)] if engines else [])
        while True:
            self.settle()
            if batch.published:
                break
            self.feed()
            self.act()
            flights = self.flights()
            if not flights:
                raise RuntimeError(f"step {batch.step} stands still with {sorted(batch.trained)} trained")
            limits = [f.deadline for f in flights if f.deadline is not None]
            left = None if not limits else max(0.0, min(limits) - self.backend.now())
            self.backend.wait([f.future for f in flights], left)
        self.this, self.next, self.asked = self.next, Progress(batch.step + 2, self.schedule), False
        self.attempts = {key: n for key, n in self.attempts.items() if key[1] > batch.step}
        return batch

    def flights(self) -> list[Flight]:
        """Everything in flight."""
        single = [f for f in (self.generating, self.acting) if f is not None]
        return [*single, *self.scoring.values()]

    def settle(self) -> None:
        """Take in what is done, by the time it was done; give up on what has taken too long."""
        done = [f for f in self.flights() if f.future.done()]
        for flight in sorted(done, key=lambda f: f.future.result()[1] if f.future.exception() is None else 0.0):
            self.land(flight)
            error = flight.future.exception()
            if error is None:
                self.finish(flight, *flight.future.result())
            else:
                self.fail(flight, error, gone=self.backend.lost(flight.resource, error))
        now = self.backend.now()
        for flight in self.flights():
            if flight.deadline is not None and now > flight.deadline and not flight.future.done():
                self.land(flight)
                self.fail(flight, Lost(f"no answer in {self.timeout} s"), gone=True)

    def land(self, flight: Flight) -> None:
        """It is in flight no more; a late answer goes nowhere."""
        if flight is self.generating:
            self.generating = None
        elif flight is self.acting:
            self.acting = None
        else:
            del self.scoring[int(flight.resource.partition("/")[2])]

    def finish(self, flight: Flight, start: float, end: float, value: Any) -> None:
        """Note what a call has come to."""
        _, handle, kind, _, step, fragment, version, *_ = flight
        batch = self.this if step == self.this.step else self.next
        self.record(flight, start, end, batch)
        if kind in ("generate", "help"):
            batch.handles[fragment] = handle
            batch.lent = [i for i in batch.lent if i != fragment]
            self.queue.append((batch, fragment))
        elif kind == "reward":
            batch.rewards[fragment], batch.scored_at[fragment] = value, end
        elif kind == "train":
            batch.trained.add(fragment)
            batch.told[-1].extend(value)
            self.asked = False
        elif kind == "update":
            batch.metrics.append(value)
            if batch.update + 1 < self.updates:
                batch.update, batch.trained = batch.update + 1, set()
                batch.told.append([])
            else:
                self.plan.append(("publish", -1))
        elif kind == "publish":
            batch.published, self.published = True, version
            self.ends.append(max(end - self.origin, self.ends[-1] if self.ends else 0.0))

    def record(self, flight: Flight, start: float, end: float, batch: Progress) -> None:
        """Its interval, and its seconds for the running cost."""
        kind, resource = flight.kind, flight.resource
        batch.seconds[kind] = batch.seconds.get(kind, 0.0) + end - start
        noted = {kind: end - start}
        if kind in ("generate", "help", "train"):
            rows = len(self.schedule.fragments[flight.fragment].samples)
            pairs = rows * self.schedule.timesteps / self.updates
            noted |= {"pair": (end - start) / pairs} if kind == "train" else {"sample": (end - start) / rows}
        for name, seconds in noted.items():
            self.seen.setdefault(name, deque(maxlen=64)).append(seconds)
        if not self.split and resource == "trainer":
            resource, kind = "cluster", "generate" if kind == "help" else kind
            if kind == "publish" and self.schedule.placement == "module":
                return
        start, end = max(start - self.origin, 0.0), end - self.origin
        if end > start and kind != "zero":
            self.intervals.append(Interval(resource, kind, start, end, flight.step, flight.fragment, flight.version))

    # ---- who does what next -------------------------------------------------------------------------------------------

    def launch(self, call: Any, kind: str, resource: str, step: int, fragment: int = -1, version: int = -1) -> Flight:
        """A call that was just made, as a flight."""
        now = self.backend.now()
        limited = self.timeout is not None and kind in ("generate", "reward") and self.backend.pick is None
        deadline = now + self.timeout if limited and self.timeout is not None else None
        return Flight(call.future, call.handle, kind, resource, step, fragment, version, deadline, now)

    def feed(self) -> None:
        """The generator's next claim, and the reward workers'."""
        if self.generating is None and self.split:
            batch = self.this if self.this.place < len(self.this.groups) else self.next
            exists = self.stop is None or batch.step < self.stop
            if (
                exists
                and batch.place < len(batch.groups)
                and tcss_admit(step=batch.step, published=self.published, index=batch.place, stale=self.schedule.stale)
            ):
                self.generate(batch.step, batch.place, self.published)
                batch.place += 1
        while self.queue and len(self.scoring) < self.backend.rewards:
            batch, fragment = self.queue.popleft()
            worker = next(i for i in range(self.backend.rewards) if i not in self.scoring)
            call = self.backend.score(worker, batch.step, fragment, batch.handles[fragment])
            self.scoring[worker] = self.launch(call, "reward", f"reward/{worker}", batch.step, fragment)

    def generate(self, step: int, fragment: int, version: int) -> None:
        """The generator takes a fragment."""
        call = self.backend.generate(step, fragment, version)
        self.generating = self.launch(call, "generate", "generator", step, fragment, version)

    def act(self) -> None:
        """The trainer's next call, when it is free."""
        if self.acting is not None:
            return
        if not self.plan:
            self.decide()
        if not self.plan:
            return
        kind, fragment = self.plan.popleft()
        batch, backend, version = self.this, self.backend, -1
        if kind == "train":
            parts = {i: (batch.handles[i], batch.rewards[i]) for i in batch.partners[fragment]}
            call, version = backend.train(batch.step, batch.update, fragment, parts), batch.step
        elif kind == "help":
            call, version = backend.help(batch.step, fragment, self.published), self.published
        elif kind == "update":
            call = backend.commit(batch.step, batch.update)
        elif kind == "publish":
            call, version = backend.publish(batch.step + 1), batch.step + 1
        else:
            call = {"switch": backend.switch, "restore": backend.restore, "zero": backend.zero}[kind]()
        self.acting = self.launch(call, kind, "trainer", batch.step, fragment, version)

    def decide(self) -> None:
        """Everything trained: commit; something trainable: train it; a bubble: ask `lend`."""
        batch, count = self.this, len(self.this.groups)
        if len(batch.trained) == count:
            if len(batch.metrics) == batch.update:  # not while its publication is what is left
                self.plan.append(("update", -1))
            return
        ready = batch.ready()
        if self.backend.bitwise:
            first = min(set(range(count)) - batch.trained)
            ready = [pair for pair in ready if pair[1] == first]
        if ready:
            self.plan.append(("train", ready[0][1]))
        elif self.schedule.tag and not self.asked and batch.place < count:
            n = self.ask()
            self.asked = n == 0
            if n:
                lent = list(range(batch.place, batch.place + n))
                batch.place += n
                batch.lent += lent
                self.plan.extend([("switch", -1), *(("help", i) for i in lent), ("restore", -1)])

    # ---- help ---------------------------------------------------------------------------------------------------------

    def running_cost(self) -> CostModel | None:
        """The given cost, or one of medians of what was measured; None until every stage was seen once."""
        if self.cost is not None:
            return replace(self.cost, reward_workers=self.backend.rewards)
        if any(kind not in self.seen for kind in ("sample", "pair", "reward", "update", "publish")):
            return None
        m = {kind: max(statistics.median(values), 1e-9) for kind, values in self.seen.items()}
        return CostModel(
            m["sample"],
            TrainCost(0.0, m["pair"]),
            Pool(1),
            Pool(1),
            helper=1,
            reward=m["reward"],
            reward_workers=self.backend.rewards,
            optimizer=m["update"],
            publish=m["publish"],
            switch=m.get("switch", 0.0),
            restore=m.get("restore", 0.0),
        )

    def bubble(self, cost: CostModel) -> Bubble:
        """What the search is told now: what is in flight is expected to take what the cost says."""
        batch, now = self.this, self.backend.now()
        size = [len(f.samples) for f in self.schedule.fragments]
        flying, generating, free = self.generating, -1, 0.0
        if flying is not None and flying.step == batch.step:
            generating = flying.fragment
            free = max(0.0, flying.begun + cost.generator_seconds(size[generating]) - now)
        scored = {i: 0.0 for i in batch.rewards if i not in batch.trained}
        busy = [0.0] * (self.backend.rewards - len(self.scoring))
        for flight in self.scoring.values():
            left = max(0.0, flight.begun + cost.reward_seconds(size[flight.fragment]) - now)
            busy.append(left)
            if flight.step == batch.step:
                scored[flight.fragment] = left
        for of, fragment in self.queue:
            busy.sort()
            busy[0] += cost.reward_seconds(size[fragment])
            if of is batch:
                scored[fragment] = busy[0]
        unclaimed = tuple(range(batch.place, len(size)))
        return Bubble(unclaimed, generating, free, tuple(sorted(scored.items())), tuple(sorted(busy)))

    def ask(self) -> int:
        """What `lend` answers, within `THOUGHT` seconds; 0 where it takes longer or too little is known."""
        cost = self.running_cost()
        if cost is None:
            return 0
        bubble = self.bubble(cost)
        answer = self._within(lambda: self.lend(bubble, self.schedule, cost))
        left = len(bubble.unclaimed)
        if isinstance(answer, bool) or not hasattr(answer, "__index__") or not 0 <= operator.index(answer) <= left:
            raise ValueError(f"lend must return an integer in 0..{left}, got {answer!r}")
        return operator.index(answer)

    def _within(self, think: Callable[[], Any]) -> Any:
        if self.backend.pick is not None:  # deterministic: no clock
            return think()
        if self.thinking is not None and not self.thinking.done():
            return 0
        self.thinking = in_a_thread("diffrl lend", think)
        wait([self.thinking], timeout=THOUGHT)
        return self.thinking.result()[2] if self.thinking.done() else 0

    # ---- failure ------------------------------------------------------------------------------------------------------

    def fail(self, flight: Flight, error: BaseException, *, gone: bool) -> None:
        """Do it again, whole: a fragment with the same seeds and version, a step's training from its first fragment.

        ExecutionError: once it has failed more than `retries` times.
        """
        if not isinstance(error, Exception):
            raise error
        kind, step, fragment = flight.kind, flight.step, flight.fragment
        of_fragment = kind in ("generate", "reward") or (kind == "help" and not gone)
        stage = kind if of_fragment else "train"
        key = (stage, step, fragment if of_fragment else -1)
        self.attempts[key] = self.attempts.get(key, 0) + 1
        batch = self.this if step == self.this.step else self.next
        if self.attempts[key] > self.retries:
            if isinstance(error, NoReward) and self.judged_nothing(batch, fragment, error):
                return
            raise ExecutionError(kind, step, fragment, self.attempts[key], error) from error
        batch.retries, batch.replaced = batch.retries + 1, batch.replaced + gone
        what = f"{kind} of step {step}" + (f", fragment {fragment}" if fragment >= 0 else "")
        warnings.warn(
            f"{flight.resource}: {what} failed ({type(error).__name__}: {str(error)[:200]}); "
            f"{'replaced and ' * gone}done again, {self.attempts[key]} of {self.retries}",
            stacklevel=2,
        )
        if gone:
            self.renew(flight, self.attempts[key])
        if kind == "generate":
            self.generate(step, fragment, flight.version)
        elif kind == "reward":
            self.queue.appendleft((batch, fragment))
        elif of_fragment:
            self.plan.appendleft(("help", fragment))
        elif kind == "publish" and not gone:
            self.plan.appendleft(("publish", -1))
        else:
            self.train_again(batch, published=kind == "publish")

    def judged_nothing(self, batch: Progress, fragment: int, error: BaseException) -> bool:
        """A reward that raises for all samples of a fragment gives them nan, as it would in the whole batch; False where no
        fragment of the batch is left that it can judge."""
        batch.unjudged[fragment] = error
        if len(batch.unjudged) == len(batch.groups):
            return False
        rows = len(self.schedule.fragments[fragment].samples)
        batch.rewards[fragment], batch.scored_at[fragment] = torch.full((rows,), torch.nan), self.backend.now()
        return True

    def renew(self, flight: Flight, attempts: int) -> None:
        """A worker in the place of the one that is gone. ExecutionError: there is none to be had."""
        try:
            if flight.resource == "trainer":
                self.backend.recover()
            else:
                self.backend.replace(flight.resource)
        except Exception as error:
            raise ExecutionError(flight.kind, flight.step, flight.fragment, attempts, error) from error

    def train_again(self, batch: Progress, *, published: bool) -> None:
        """No commit: the trainer forgets what it accumulated, the step's fragments are kept and accumulated anew."""
        self.plan.clear()
        if published:  # the commit stands, its publication does not yet
            self.plan.append(("publish", -1))
            return
        self.plan.append(("zero", -1))
        batch.trained, batch.told[-1] = set(), []
        if batch.lent:
            swap = self.split or self.schedule.placement == "engines"
            self.plan.extend([("switch", -1)] if swap else [])
            self.plan.extend(("help", i) for i in batch.lent)
            self.plan.extend([("restore", -1)] if swap else [])

    def trace(self) -> Trace:
        """What was measured so far."""
        return MeasuredTrace(self.intervals, self.ends)

    def close(self, seconds: float = 5.0) -> None:
        """No thought goes on: what `lend` still thinks about is waited for so long, then left behind."""
        if self.thinking is not None:
            wait([self.thinking], timeout=seconds)
