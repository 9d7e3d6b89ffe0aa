"""Bubble-triggered search: how many fragments a waiting trainer should generate itself.

The rest of the step is a deterministic game with one kind of move (how many fragments to take, at each bubble), so its
predicted end is minimised exactly: depth first, memoised, pruned by bounds that are never above what can be reached.
"""

import heapq
import math
from functools import lru_cache
from typing import no_type_check

from diffrl.costs import CostModel
from diffrl.numbers import require_count, require_number
from diffrl.schedules import Bubble, Schedule, sharing

SAME = 1e-12  # two ends this close, relatively, are equal: they differ by rounding


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
        return owed if owed >= limit else self._least(child, limit)

    def _least(self, state, limit):
        """The least end from a decision on, exactly where it is below `limit`; else a bound that is not."""
        key = state.key()
        known, exact = self.memo.get(key, (0.0, False))
        if exact or known >= limit:
            return known
        if self.limited and (scored := self._scoring_bound(state)) >= limit:
            return scored
        best, least = limit, math.inf
        for bound, n in sorted((self._bound(state, n), n) for n in range(len(self.queue) - state.place + 1)):
            if bound >= best:
                least = min(least, bound)
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

    def _scoring_bound(self, state):
        """No end is earlier: what was not handed to the reward workers yet comes, at best, as fast as a generator and a
        helper that never stop can make it; every one of these fragments takes the shortest reward, and training follows the
        last. (Equal jobs in order of release on equal workers: first come, first served is optimal.)"""
        s = self.stages
        left = [*self.queue[state.place :], *([state.flying] if state.flying >= 0 else [])]
        generate, help_, reward = (min(of[f] for f in left) for of in (s.generate, s.help, s.reward))
        made = state.free if state.flying >= 0 else max(state.free, state.now) + generate
        helped = state.now + s.switch + help_
        workers, scored = state.workers[:], 0.0
        for _ in left:
            if made <= helped:
                arrival, made = made, made + generate
            else:
                arrival, helped = helped, helped + help_
            scored = max(workers[0], arrival) + reward
            heapq.heapreplace(workers, scored)
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
    named = [*bubble.unclaimed, *(fragment for fragment, _ in bubble.scored_in)]
    if require_count("generating", bubble.generating, low=-1) >= 0:
        named.append(bubble.generating)
    for fragment in named:
        if require_count("fragment", fragment, low=0) >= len(schedule.fragments):
            raise ValueError(f"fragment {fragment} of {bubble} is out of range, there are {len(schedule.fragments)}")
    if len(set(named)) != len(named):
        raise ValueError(f"a fragment is twice in {bubble}")
    require_number("generator_free", bubble.generator_free, low=0)
    for _, seconds in bubble.scored_in:
        require_number("scored_in", seconds, low=0)
    free = [require_number("reward_free", seconds, low=0) for seconds in bubble.reward_free]
    if free != sorted(free) or len(free) != (cost.reward_workers or 0):
        raise ValueError(
            f"reward_free must be ascending, one per {cost.reward_workers} workers, got {bubble.reward_free}"
        )
    if not cost.helper:
        raise ValueError(f"the trainer cannot generate: cost.helper must be >= 1, got {cost.helper}")
    return _search(bubble, schedule, cost)
