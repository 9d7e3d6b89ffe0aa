"""Bubble-triggered search: how many fragments a waiting trainer should generate itself.

The rest of the step is a deterministic game with one kind of move (how many fragments to take, at each bubble), so its
predicted end is minimised exactly: depth first, memoised, pruned by bounds that are never above what can be reached.
"""

import heapq
import itertools
import math
from functools import lru_cache
from typing import no_type_check

from diffrl.costs import CostModel
from diffrl.numbers import listed, require_count, require_number
from diffrl.schedules import Bubble, Schedule, sharing

SAME = 1e-12  # two ends this close, relatively, are equal: they differ by rounding
NEAR = 1 + 1e-13  # a bound this close to what was found promises nothing better; well inside SAME


def _running(values) -> list[float]:
    """Sums of the first 0, 1, ... values."""
    return [0.0, *itertools.accumulate(values)]


@no_type_check  # hot
class _Stages:
    """What does not change during a search: seconds per fragment, and who waits for whom."""

    def __init__(self, schedule: Schedule, cost: CostModel):
        sizes = [len(f.samples) for f in schedule.fragments]
        how = {"timesteps": schedule.timesteps, "pack": schedule.pack}
        self.generate = [cost.generator_seconds(n) for n in sizes]
        self.help = [cost.helper_seconds(n) for n in sizes]
        self.reward = [cost.reward_seconds(n) for n in sizes]
        self.train = [cost.trainer_seconds(n, **how, shard_pairs=schedule.shard_pairs) for n in sizes]
        self.switch, self.restore = cost.switch, cost.restore
        touched = sharing(schedule.fragments, schedule.group_size, barrier=schedule.barrier)
        members: dict[int, set[int]] = {}
        for i, groups in enumerate(touched):
            for group in groups:
                members.setdefault(group, set()).add(i)
        self.share = [sorted(set().union(*(members[group] for group in groups))) for groups in touched]
        # once the fragment is generated: its reward, then training of all that waited for it
        self.tail = [self.reward[i] + sum(self.train[j] for j in self.share[i]) for i in range(len(sizes))]


@no_type_check  # hot
class _State:
    """A moment of the step, in seconds since the bubble that is searched: place, flying, free of the generator; missing and
    ready of every fragment (fragments it still waits for; when the last known of them is scored); workers; train owed."""

    __slots__ = ("flying", "free", "missing", "now", "owed", "place", "ready", "untrained", "workers")
    now: float
    place: int
    flying: int
    free: float
    owed: float
    missing: list[int]
    ready: list[float]
    untrained: list[int]
    workers: list[float]

    def copy(self):
        """Another one that may be changed."""
        new = _State.__new__(_State)
        new.now, new.place, new.flying, new.free, new.owed = self.now, self.place, self.flying, self.free, self.owed
        new.missing, new.ready = self.missing[:], self.ready[:]
        new.untrained, new.workers = self.untrained[:], self.workers[:]
        return new

    def key(self):
        """Equal keys, equal futures."""
        left = self.untrained
        readiness = tuple((i, self.missing[i], self.ready[i]) for i in left)
        return self.now, self.place, self.flying, self.free, readiness, tuple(self.workers)


@no_type_check  # hot
class _Search:
    """One bubble, its memo, and the best end found."""

    def __init__(self, bubble: Bubble, schedule: Schedule, cost: CostModel):
        self.stages, self.queue = _Stages(schedule, cost), bubble.unclaimed
        self.limited = cost.reward_workers is not None
        self.memo: dict[tuple, tuple[float, bool]] = {}
        self.claims: dict[int, tuple[list[float], list[list[float]]]] = {}
        self.tables = [self._table(i) for i in range(len(self.queue) + 1)]
        self.root = root = _State()
        count = len(schedule.fragments)
        alive = {*bubble.unclaimed, *(i for i, _ in bubble.scored_in)} | ({bubble.generating} - {-1})
        root.now, root.place, root.flying, root.free = 0.0, 0, bubble.generating, bubble.generator_free
        root.missing = [len(of) for of in self.stages.share]
        root.ready = [0.0] * count
        root.untrained, root.workers = sorted(alive), list(bubble.reward_free)
        root.owed = math.fsum(self.stages.train[i] for i in root.untrained)
        known = dict(bubble.scored_in)
        for i in range(count):
            if i in known or i not in alive:
                self._score(root, i, known.get(i, 0.0))

    def _table(self, i):
        """Of the queue from place i on, for each number x of them that helpers take: (least seconds of help, least seconds
        of generation left, least tail after it)."""
        rest, s = self.queue[i:], self.stages
        helps, gens = sorted(s.help[f] for f in rest), sorted(s.generate[f] for f in rest)
        tail = min((s.tail[f] for f in rest), default=0.0)
        return [(sum(helps[:x]), sum(gens[: len(gens) - x]), tail) for x in range(len(rest) + 1)]

    def _score(self, state, fragment, time):
        missing, ready = state.missing, state.ready
        for i in self.stages.share[fragment]:
            missing[i] -= 1
            if time > ready[i]:
                ready[i] = time

    def _deliver(self, state, fragment, time):
        start = time
        if self.limited:
            start = max(time, state.workers.pop(0))
        end = start + self.stages.reward[fragment]
        if self.limited:
            state.workers.append(end)
            state.workers.sort()
        self._score(state, fragment, end)

    def _run_generator(self, state, until):
        """Completions up to `until`, and the claims that follow them."""
        while state.free <= until:
            if state.flying >= 0:
                self._deliver(state, state.flying, state.free)
                state.flying = -1
            if state.place == len(self.queue):
                return
            state.flying = self.queue[state.place]
            state.place += 1
            state.free += self.stages.generate[state.flying]

    def _take(self, state, n):
        """The trainer generates the next n fragments of the queue."""
        claimed = self.queue[state.place : state.place + n]
        state.place += n
        state.now += self.stages.switch
        for fragment in claimed:
            state.now += self.stages.help[fragment]
            self._run_generator(state, state.now)
            self._deliver(state, fragment, state.now)
        state.now += self.stages.restore

    def _go_on(self, state, waiting):
        """Play to the next decision. True: there is one; False: everything is trained at state.now."""
        train = self.stages.train
        while True:
            if state.free <= state.now:
                self._run_generator(state, state.now)
            if not state.untrained:
                return False
            at, next_ = min(
                ((state.ready[i], i) for i in state.untrained if not state.missing[i]), default=(math.inf, -1)
            )
            if at <= state.now:
                state.now += train[next_]
                state.owed -= train[next_]
                state.untrained.remove(next_)
                waiting = False
            elif not waiting and state.place < len(self.queue):
                return True
            else:  # a free generator with nothing left to claim brings no event
                state.now = min(at, state.free) if state.free > state.now else at

    def _after(self, state, n, limit):
        """The least end once n fragments are taken, exactly where it is below `limit`; else a bound that is not."""
        child = state.copy()
        if n:
            self._take(child, n)
        if not self._go_on(child, waiting=n == 0):
            return child.now
        owed = child.now + child.owed
        return max(owed, limit) if owed * NEAR >= limit else self._least(child, limit)

    def _least(self, state, limit):
        """The least end from a decision on, exactly where it is below `limit`; else a bound that is not."""
        key = state.key()
        known, exact = self.memo.get(key, (0.0, False))
        if exact:
            return known
        if known * NEAR >= limit or (self.limited and self._scoring_bound(state) * NEAR >= limit):
            return max(known, limit)
        best, least = limit, math.inf
        for bound, n in sorted((self._bound(state, n), n) for n in range(len(self.queue) - state.place + 1)):
            if bound * NEAR >= best:
                least = min(least, max(bound, best))
                break
            value = self._after(state, n, best)
            best, least = min(best, value), min(least, value)
        self.memo[key] = (least, least < limit)
        return least

    def _bound(self, state, n):
        """No way to go on with n ends earlier: the trainer owes its training and its help, the generator the rest.

        Whatever number x of the later fragments the trainer takes too, it trains everything and helps with x at least
        (the cheapest), and all but x come from the generator, whose last one is then scored and trained.
        """
        s, i = self.stages, state.place + n
        away = s.switch + s.restore
        begin = state.now + state.owed
        if n:
            begin += away + sum(s.help[f] for f in self.queue[state.place : i])
        free = max(state.free, state.now)
        least, last = math.inf, len(self.tables[i]) - 1
        for x, (helped, made, tail) in enumerate(self.tables[i]):
            trainer = begin + helped + (away if x else 0.0)
            generator = (
                free + made + tail if x < last else state.free + s.tail[state.flying] if state.flying >= 0 else 0.0
            )
            least = min(least, max(trainer, generator))
        return least

    def _claims(self, place):
        """Of the queue from `place` on: sums of its shortest generations, and of the shortest helps in its first m + 1.

        A helper that delivered q fragments while the generator delivered p took them from the first p + q + 1: what lies
        before its last one it delivered itself or left to the generator, which holds at most one that is not done.
        """
        if place not in self.claims:
            s, rest = self.stages, self.queue[place:]
            made = sorted(s.generate[f] for f in rest)
            helped = (sorted(s.help[f] for f in rest[: m + 1]) for m in range(len(rest) + 2))
            self.claims[place] = _running(made), [_running(of) for of in helped]
        return self.claims[place]

    def _arrivals(self, state):
        """Ascending times before which no 1st, 2nd ... fragment can be handed to the reward workers: generator and helper
        never stop, and share the first m as suits best (the more there are, the more of them a helper should take)."""
        made, helped = self._claims(state.place)
        flying, begin = state.flying >= 0, state.now + self.stages.switch
        free = state.free if flying else max(state.free, state.now)
        q, times, latest = 0, [], 0.0

        def shared(m, q):
            return max(free + made[m - q - flying] if m > q else 0.0, begin + helped[m][q] if q else 0.0)

        for m in range(1, len(self.queue) - state.place + flying + 1):
            most = min(m, len(helped[m]) - 1)
            while q < most and shared(m, q + 1) <= shared(m, q):
                q += 1
            latest = max(latest, shared(m, q))
            times.append(latest)
        return times

    def _scoring_bound(self, state):
        """No end is earlier: the reward workers get what is left no faster than `_arrivals` says, and training follows the
        last. They are at least as long at it as with the shortest reward for all (equal jobs in order of arrival: first
        come, first served is optimal), and as with all that comes after any moment shared evenly between them."""
        s = self.stages
        left = [*self.queue[state.place :], *([state.flying] if state.flying >= 0 else [])]
        rewards, arrivals = sorted(s.reward[f] for f in left), self._arrivals(state)
        workers, scored = state.workers[:], 0.0
        for arrival in arrivals:
            scored = max(workers[0], arrival) + rewards[0]
            heapq.heapreplace(workers, scored)
        if rewards[0] < rewards[-1]:
            for arrival, work in zip(arrivals, reversed(_running(rewards)[1:]), strict=True):
                begun = sum(max(worker, arrival) for worker in state.workers)
                scored = max(scored, (begun + work) / len(state.workers))
        return scored + min(s.tail[f] - s.reward[f] for f in left)

    def _unhelped(self, n):
        """The end when n fragments are taken now and none later."""
        state = self.root.copy()
        if n:
            self._take(state, n)
        waiting = n == 0
        while self._go_on(state, waiting):
            waiting = True
        return state.now

    def answer(self):
        """The smallest n among those that end first."""
        ready = any(not self.root.missing[i] and self.root.ready[i] <= 0 for i in self.root.untrained)
        if ready or not self.queue:
            return 0  # a fragment that can be trained goes first
        counts = range(len(self.queue) + 1)
        limit = min(self._unhelped(n) for n in counts) * (1 + SAME)
        limit = min(limit, self._least(self.root, limit) * (1 + SAME))
        return next(n for n in counts if self._bound(self.root, n) < limit and self._after(self.root, n, limit) < limit)


def _plain(bubble: Bubble, count: int, workers: int | None) -> Bubble:
    """The bubble in tuples of int and float, which can be remembered; ValueError where it is impossible."""
    unclaimed = tuple(require_count("fragment of unclaimed", i, low=0) for i in listed("unclaimed", bubble.unclaimed))
    generating = require_count("generating", bubble.generating, low=-1)
    scored = []
    for pair in listed("scored_in", bubble.scored_in):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"scored_in must hold (fragment, seconds), got {pair!r:.120}")
        seconds = require_number("scored_in", pair[1], low=0)
        scored.append((require_count("fragment of scored_in", pair[0], low=0), seconds))
    named = [*unclaimed, *(i for i, _ in scored), *([generating] if generating >= 0 else [])]
    if max(named, default=0) >= count:
        raise ValueError(f"fragment {max(named)} of {bubble} is out of range, there are {count}")
    if len(set(named)) != len(named):
        raise ValueError(f"a fragment is twice in {bubble}")
    busy = require_number("generator_free", bubble.generator_free, low=0)
    free = tuple(require_number("reward_free", x, low=0) for x in listed("reward_free", bubble.reward_free))
    if free != tuple(sorted(free)) or len(free) != (workers or 0):
        raise ValueError(f"reward_free must be ascending, one per {workers} workers, got {bubble.reward_free}")
    return Bubble(unclaimed, generating, busy, tuple(scored), free)


@lru_cache(maxsize=4096)
def _search(bubble: Bubble, schedule: Schedule, cost: CostModel) -> int:
    return _Search(bubble, schedule, cost).answer()


def bts_search(bubble: Bubble, schedule: Schedule, cost: CostModel) -> int:
    """How many unclaimed fragments the trainer should generate now, so that this global step ends first (BTS, DigenRL).

    Minimises the predicted end, this function deciding at later bubbles too; among equals the smallest n, so 0 unless the
    step gets shorter. Ignores what the next step could generate early. Exact; memoised on its three arguments. 0 also where
    a fragment is trainable already (training goes first).

    ValueError: a fragment out of range or twice in the bubble; times not finite and >= 0; reward_free not ascending or not
    one per cost.reward_workers; cost.helper = 0.

    >>> from diffrl.costs import Pool, TrainCost
    >>> from diffrl.partitions import prompt_partition
    >>> schedule = Schedule(prompt_partition(8, 1, fragments=8), 1, tag=True)
    >>> cost = CostModel(10.0, TrainCost(0.0, 4.0), Pool(1), Pool(1), helper=1, reward=1.0, switch=1.0, restore=1.0)
    >>> bts_search(Bubble(unclaimed=(1, 2, 3, 4, 5, 6, 7), generating=0, generator_free=10.0), schedule, cost)
    3
    """
    if not isinstance(schedule, Schedule) or not isinstance(cost, CostModel) or not isinstance(bubble, Bubble):
        raise ValueError(
            f"a Bubble, a Schedule and a CostModel are needed, got {bubble!r:.60}, {schedule!r:.60}, {cost!r:.60}"
        )
    bubble = _plain(bubble, len(schedule.fragments), cost.reward_workers)
    if not cost.helper:
        raise ValueError(f"the trainer cannot generate: cost.helper must be >= 1, got {cost.helper}")
    return _search(bubble, schedule, cost)
