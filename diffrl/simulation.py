"""What a schedule would do on given GPUs: `simulate` plays it event by event and returns a `Trace`.

Events at one instant: completions (the generator's before a helper's), then the generator's claim, then the trainer.
On-policy steps start from an idle machine, so each is played on a clock of its own: equal steps are equal to the last bit.
"""

import heapq
import math
import operator
from collections.abc import Callable
from typing import Any, TypeAlias, no_type_check

from diffrl.costs import CostModel
from diffrl.lending import bts_search
from diffrl.numbers import require_count
from diffrl.schedules import Bubble, Interval, Schedule, Trace, sharing

Lend: TypeAlias = Callable[[Bubble, Schedule, CostModel], int]
"""How many unclaimed fragments the trainer generates in this bubble."""


def tcss_admit(*, step: int, published: int, index: int, stale: int) -> bool:
    """May fragment `index` of `step` start on version `published` (TCSS)? published == step, or one less and index < stale.

    ValueError: a negative number; published > step (the weights of a later step do not exist yet).

    >>> [tcss_admit(step=3, published=2, index=i, stale=1) for i in (0, 1)]
    [True, False]
    """
    step, published = require_count("step", step, low=0), require_count("published", published, low=0)
    index, stale = require_count("index", index, low=0), require_count("stale", stale, low=0)
    if published > step:
        raise ValueError(f"published must be at most step, got published {published}, step {step}")
    return published == step or (published == step - 1 and index < stale)


@no_type_check  # hot
class _Rewards:
    """One FIFO of reward workers: a fragment goes to the lowest free one, else to the one that is free first."""

    def __init__(self, workers: int | None):
        self.workers, self.count, self.idle, self.busy = workers, 0, [], []  # type: ignore[var-annotated]
        if workers is not None:
            self.count, self.idle = workers, list(range(workers))

    def take(self, time, seconds):
        """(worker, start, end) of a fragment that arrives at `time`; arrivals come in order of time."""
        while self.busy and self.busy[0][0] <= time:
            heapq.heappush(self.idle, heapq.heappop(self.busy)[1])
        if self.idle:
            start, worker = time, heapq.heappop(self.idle)
        elif self.workers is None:
            start, worker, self.count = time, self.count, self.count + 1
        else:
            start, worker = heapq.heappop(self.busy)
        heapq.heappush(self.busy, (start + seconds, worker))
        return worker, start, start + seconds

    def free_in(self, now: float) -> tuple[float, ...]:
        """Ascending seconds until each worker is free; () when unlimited."""
        if self.workers is None:
            return ()
        return tuple(sorted([0.0] * len(self.idle) + [max(0.0, free - now) for free, _ in self.busy]))


@no_type_check  # hot
class _Batch:
    """The fragments of one global step: how far they are claimed, scored and trained."""

    def __init__(self, step: int, groups: tuple[tuple[int, ...], ...], members: dict[int, list[int]]):
        self.step, self.place, self.trained = step, 0, 0  # place: the next unclaimed fragment
        self.groups, self.members = groups, members
        self.unscored = {group: len(of) for group, of in members.items()}
        self.complete = dict.fromkeys(members, -math.inf)  # when the last fragment of a group so far is scored
        self.waits = [len(of) for of in groups]  # groups a fragment waits for
        self.ready = [-math.inf] * len(groups)
        self.scored: dict[int, float] = {}
        self.trainable: list[tuple[float, int]] = []  # a heap of (ready, fragment)

    def score(self, fragment, time):
        """The fragment is scored at `time`, which may lie ahead; groups complete with their last fragment."""
        self.scored[fragment] = time
        for group in self.groups[fragment]:
            self.unscored[group] -= 1
            complete = self.complete[group] = max(time, self.complete[group])
            if not self.unscored[group]:
                for other in self.members[group]:
                    self.ready[other] = max(complete, self.ready[other])
                    self.waits[other] -= 1
                    if not self.waits[other]:
                        heapq.heappush(self.trainable, (self.ready[other], other))


@no_type_check  # hot
class _Split:
    """Two pools. `origin` + local time is the trace's clock; `now` is the trainer's local time."""

    def __init__(self, schedule: Schedule, cost: CostModel, steps: int, lend: Lend):
        self.schedule, self.cost, self.lend, self.steps = schedule, cost, lend, steps
        sizes = [len(f.samples) for f in schedule.fragments]
        self.generate, self.reward, self.train = _stage_seconds(schedule, cost)
        self.help = [cost.helper_seconds(n) for n in sizes] if schedule.tag else []
        self.groups = sharing(schedule.fragments, schedule.group_size, barrier=schedule.barrier)
        self.members: dict[int, list[int]] = {}
        for i, of in enumerate(self.groups):
            for group in of:
                self.members.setdefault(group, []).append(i)
        self.rewards = _Rewards(cost.reward_workers)
        self.origin = self.now = self.free = self.since = 0.0  # since: when the newest version was published
        self.published = 0
        self.flying: tuple[_Batch, int] | None = None
        self.this = _Batch(0, self.groups, self.members)
        self.next = _Batch(1, self.groups, self.members)
        self.intervals: list[Interval] = []
        self.ends: list[float] = []

    def record(self, resource, kind, start, end, step, fragment=-1, version=-1):
        """One interval of the trace, unless it takes no time."""
        start, end = self.origin + start, self.origin + end
        if end > start:
            self.intervals.append(Interval(resource, kind, start, end, step, fragment, version))

    def deliver(self, batch, fragment, time):
        """A generated fragment enters the reward queue at `time`."""
        worker, start, end = self.rewards.take(time, self.reward[fragment])
        self.record(f"reward/{worker}", "reward", start, end, batch.step, fragment)
        batch.score(fragment, end)

    def run_generator(self, until, claims_before=math.inf):
        """Completions up to `until`, and the claims that follow them, on the newest published version."""
        count = len(self.groups)
        while True:
            if self.flying is not None:
                if self.free > until:
                    return
                batch, fragment = self.flying
                self.flying = None
                self.deliver(batch, fragment, self.free)
            batch = self.this
            if batch.place == count:  # on to the next step, as far as `tcss_admit` lets it; the last step has no next
                batch = self.next
                if batch.step == self.steps or batch.place >= self.schedule.stale:
                    return
            start = max(self.free, self.since)
            if start >= claims_before:
                return
            fragment, self.free = batch.place, start + self.generate[batch.place]
            batch.place += 1
            self.flying = (batch, fragment)
            self.record("generator", "generate", start, self.free, batch.step, fragment, self.published)

    def trainer(self, kind, seconds, fragment=-1, version=-1):
        """The trainer is occupied for `seconds`."""
        end = self.now + seconds
        self.record("trainer", kind, self.now, end, self.this.step, fragment, version)
        self.now = end

    def bubble(self) -> Bubble:
        """What the search is told now."""
        batch, now = self.this, self.now
        flying = self.flying is not None and self.flying[0] is batch
        return Bubble(
            unclaimed=tuple(range(batch.place, len(self.groups))),
            generating=self.flying[1] if flying and self.flying else -1,
            generator_free=max(0.0, self.free - now) if flying else 0.0,
            scored_in=tuple((i, max(0.0, time - now)) for i, time in sorted(batch.scored.items())),
            reward_free=self.rewards.free_in(now),
        )

    def assist(self) -> bool:
        """Ask `lend`; generate what it answers on the trainer. False: it answered 0."""
        batch, answer = self.this, self.lend(self.bubble(), self.schedule, self.cost)
        left = len(self.groups) - batch.place
        try:
            n = -1 if isinstance(answer, bool) else operator.index(answer)
        except TypeError:
            n = -1
        if not 0 <= n <= left:
            raise ValueError(f"lend must return an integer in 0..{left}, got {answer!r}")
        if not n:
            return False
        claimed = range(batch.place, batch.place + n)
        batch.place += n
        self.trainer("switch", self.cost.switch)
        for fragment in claimed:
            self.trainer("help", self.help[fragment], fragment, self.published)
            self.run_generator(self.now)
            self.deliver(batch, fragment, self.now)
        self.trainer("restore", self.cost.restore)
        return True

    def play(self) -> None:
        """One global step, up to its publication."""
        batch, waiting = self.this, False
        while True:
            self.run_generator(self.now)
            if batch.trained == len(self.groups):
                break
            if batch.trainable and batch.trainable[0][0] <= self.now:
                fragment = heapq.heappop(batch.trainable)[1]
                self.trainer("train", self.train[fragment], fragment, self.published)
                del batch.scored[fragment]
                batch.trained, waiting = batch.trained + 1, False
                continue
            if self.schedule.tag and not waiting and batch.place < len(self.groups):
                waiting = not self.assist()
                continue
            times = [batch.trainable[0][0]] if batch.trainable else []
            self.now = min(times if self.flying is None else [*times, self.free])
        self.trainer("update", self.cost.optimizer)
        self.trainer("publish", self.cost.publish, version=batch.step + 1)
        self.run_generator(self.now, claims_before=self.now)
        self.ends.append(self.origin + self.now)
        self.published, self.since = self.published + 1, self.now
        self.this, self.next = self.next, _Batch(batch.step + 2, self.groups, self.members)
        if not self.schedule.stale:
            self.origin, self.now, self.free, self.since = self.ends[-1], 0.0, 0.0, 0.0
            self.rewards = _Rewards(self.cost.reward_workers)


def _stage_seconds(schedule: Schedule, cost: CostModel) -> tuple[list[float], list[float], list[float]]:
    """Seconds of generation, reward and training of every fragment."""
    how: dict[str, Any] = {
        "timesteps": schedule.timesteps,
        "pack": schedule.pack,
        "shard_pairs": schedule.shard_pairs,
    }
    sizes = [len(f.samples) for f in schedule.fragments]
    each = {n: (cost.generator_seconds(n), cost.reward_seconds(n), cost.trainer_seconds(n, **how)) for n in set(sizes)}
    whole = math.fsum(seconds / len(sizes) for n in sizes for seconds in each[n])
    if not math.isfinite(whole * len(sizes)):
        raise ValueError(f"the seconds of one step must be finite, got {each} per (generate, reward, train) by samples")
    generate, reward, train = zip(*(each[n] for n in sizes), strict=True)
    return list(generate), list(reward), list(train)


def _colocated(schedule: Schedule, cost: CostModel, steps: int) -> Trace:
    """One resource: generate everything, wait for the rewards, train everything; the engine's swaps where there is one."""
    cost = cost.colocated()
    generate, reward, train = _stage_seconds(schedule, cost)
    swaps = schedule.placement == "engines"
    intervals: list[Interval] = []
    ends: list[float] = []
    origin = 0.0
    for step in range(steps):
        now, scored, rewards = 0.0, 0.0, _Rewards(cost.reward_workers)
        work = [("switch", cost.switch, -1, -1)] if swaps else []
        work += [("generate", seconds, i, step) for i, seconds in enumerate(generate)]
        work += [("restore", cost.restore, -1, -1)] if swaps else []
        work += [("train", seconds, i, step) for i, seconds in enumerate(train)]
        work += [("update", cost.optimizer, -1, -1)]
        work += [("publish", cost.publish, -1, step + 1)] if swaps else []
        for kind, seconds, fragment, version in work:
            if kind == "train":
                now = max(now, scored)
            end = now + seconds
            intervals.append(Interval("cluster", kind, origin + now, origin + end, step, fragment, version))
            now = end
            if kind == "generate":
                worker, start, end = rewards.take(now, reward[fragment])
                scored = max(scored, end)
                intervals.append(Interval(f"reward/{worker}", "reward", origin + start, origin + end, step, fragment))
        origin += now
        ends.append(origin)
    return _trace([i for i in intervals if i.end > i.start], ends)


def _trace(intervals: list[Interval], ends: list[float]) -> Trace:
    intervals.sort(key=operator.attrgetter("start"))
    return Trace(tuple(intervals), tuple(ends))


def simulate(schedule: Schedule, cost: CostModel, *, steps: int = 1, lend: Lend = bts_search) -> Trace:
    """The trace of `steps` global steps of a schedule under a cost model (the rules: DigenRL's, as restated here).

    Split: the generator takes fragments in order of (step, index), one at a time, as soon as `tcss_admit` allows, on the
    newest published version; the last step pre-generates nothing. Finished fragments enter one FIFO of reward workers and
    are trainable when every group they touch is scored. The trainer, when free: all trained - update, publish, next
    step; a fragment is trainable - train the earliest trainable, then the lowest index; schedule.tag and a bubble - ask
    `lend(bubble, schedule, cost)`; 0: wait, and do not ask again until a fragment has been trained; n: switch, generate the
    next n unclaimed fragments, restore. Colocated: one resource does it all in order, with `cost.colocated()`.

    ValueError: steps < 1; schedule.tag without cost.helper; an answer of `lend` outside 0..len(unclaimed); seconds whose sum
    is not finite.

    >>> from diffrl.costs import Pool, TrainCost
    >>> from diffrl.schedules import Fragment
    >>> schedule = Schedule((Fragment(0, (0, 1)),), 2)  # one fragment: 2 x 1 s, then 2 x 2 s
    >>> simulate(schedule, CostModel(1.0, TrainCost(0.0, 2.0), Pool(1), Pool(1))).makespan
    6.0
    """
    if not isinstance(schedule, Schedule) or not isinstance(cost, CostModel):
        raise ValueError(f"a Schedule and a CostModel are needed, got {schedule!r:.60} and {cost!r:.60}")
    steps = require_count("steps", steps)
    if schedule.placement != "split":
        return _colocated(schedule, cost, steps)
    if schedule.tag and not cost.helper:
        raise ValueError(f"schedule.tag needs a trainer that can generate: cost.helper >= 1, got {cost.helper}")
    run = _Split(schedule, cost, steps, lend)
    for _ in range(steps):
        run.play()
    return _trace(run.intervals, run.ends)


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """The trace in Chrome's trace event format, for `json.dump`; opens in Perfetto and chrome://tracing.

    One "X" event per interval (ts, dur in microseconds) and one thread_name event per resource.

    >>> chrome_trace(Trace((Interval("trainer", "train", 0.5, 2.0, 0, 3, 0),), (2.0,)))["traceEvents"][1]["dur"]
    1500000.0
    """
    names = {interval.resource for interval in trace.intervals}
    lanes = sorted(names, key=lambda name: (name.startswith("reward/"), len(name) if "/" in name else 0, name))
    thread = {name: i for i, name in enumerate(lanes)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": name}} for name, i in thread.items()
    ]
    for resource, kind, start, end, step, fragment, version in trace.intervals:
        what = {"step": step, "fragment": fragment, "version": version}
        times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
        events.append({"ph": "X", "name": kind, "pid": 0, "tid": thread[resource], **times, "args": what})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
