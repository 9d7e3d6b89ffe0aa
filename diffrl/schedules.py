"""What a schedule is, and what one looks like once it ran: fragments, bubbles, schedules, traces. Plain data, no torch.

Words (diffusion RL on two pools of GPUs, after DigenRL): a *global step* s is one batch and the optimizer step it ends with
(an algorithm may make several of a batch); *version* v is what rolls out after v global steps, so step s is on-policy at
version s. A batch has n = g k samples, prompt-major, cut into M *fragments*; a *pair* is (sample, timestep). A *bubble*:
the trainer is free, no fragment is trainable, and a fragment of this step is unclaimed. Times are seconds.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, no_type_check

from diffrl.numbers import require_count, require_number

Pair: TypeAlias = tuple[int, int]
"""(sample, timestep): one state of one sample that is trained on."""

PLACEMENTS = ("split", "engines", "module")
KINDS = ("generate", "help", "reward", "train", "update", "publish", "switch", "restore")
"""`help` is generation on the trainer; `switch` and `restore` lead into it and back (colocated: the engine's swap)."""


class Fragment(NamedTuple):
    """Rows of the batch axis b that are generated, scored and trained together."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    samples: tuple[int, ...]


class Interval(NamedTuple):
    """What one resource did from `start` to `end`. version: the weights used (generate, help, train) or made (publish).

    resource: "generator", "trainer", "reward/<i>", or "cluster" where both share the GPUs; -1: does not apply.
    """

    resource: str
    kind: str
    start: float
    end: float
    step: int
    fragment: int = -1
    version: int = -1


class Bubble(NamedTuple):
    """What is known when the trainer has nothing to train. Times are seconds from now, >= 0.

    unclaimed: fragments of this step nobody has started, in claim order. generating, generator_free: the fragment in
    flight on the generator (-1: none), and when the generator is done. scored_in: (fragment, seconds until scored; 0 =
    already) of those generated but not yet trained. reward_free: ascending seconds until each reward worker is free; ()
    when their number is unlimited.
    """

    unclaimed: tuple[int, ...]
    generating: int = -1
    generator_free: float = 0.0
    scored_in: tuple[tuple[int, float], ...] = ()
    reward_free: tuple[float, ...] = ()


def require_fragments(fragments: Any) -> int:
    """The number of rows; ValueError unless indices are 0..M-1 in order and every row 0..n-1 is there exactly once.

    >>> require_fragments((Fragment(0, (0, 2)), Fragment(1, (1,))))
    3
    """
    if not isinstance(fragments, tuple) or not fragments or not all(isinstance(f, Fragment) for f in fragments):
        raise ValueError(f"fragments must be a non-empty tuple of Fragment, got {fragments!r:.120}")
    seen: set[int] = set()
    for i, (index, samples) in enumerate(fragments):
        if require_count(f"fragments[{i}].index", index, low=0) != i:
            raise ValueError(f"fragments must have indices 0..M-1 in order, got {index!r} at place {i}")
        if not isinstance(samples, tuple) or not samples:
            raise ValueError(f"fragments[{i}].samples must be a non-empty tuple of rows, got {samples!r:.120}")
        for row in samples:
            require_count(f"fragments[{i}].samples", row, low=0)
            if row in seen:
                raise ValueError(f"fragments hold row {row} twice, the second time in fragment {i}")
            seen.add(row)
    if max(seen) != len(seen) - 1:
        missing = next(row for row in range(len(seen) + 1) if row not in seen)
        raise ValueError(f"fragments must hold every row 0..{max(seen)}, row {missing} is missing")
    return len(seen)


def sharing(fragments: Iterable[Fragment], group_size: int, *, barrier: bool = False) -> tuple[tuple[int, ...], ...]:
    """Per fragment, the groups it touches (one common group when `barrier`: nothing is complete before everything is).

    >>> sharing([Fragment(0, (0, 1)), Fragment(1, (2, 3))], 3)  # the second one holds a row of each group
    ((0,), (0, 1))
    """
    if barrier:
        return tuple((0,) for _ in fragments)
    return tuple(tuple(sorted({row // group_size for row in samples})) for _, samples in fragments)


@no_type_check  # it refuses bad values itself
@dataclass(frozen=True)
class Schedule:
    """How one batch becomes one optimizer step. Plain data: `json.dumps(dataclasses.asdict(schedule))` works.

    fragments: indices 0..M-1 in order, every row 0..n-1 exactly once, n a multiple of group_size (k). timesteps: trained
    ones per sample. placement: "split", two pools; "engines", colocated, a rollout engine swapped in and out; "module",
    colocated, the training module samples. barrier: nothing is trained before the whole batch is scored; always True when
    colocated. pack: pairs per forward. shard_pairs: trainer ranks share pairs, not samples. tag: a waiting trainer may
    generate. stale: this many fragments of the next step may start one version early, 0..M. ValueError: anything else;
    tag or stale when colocated.

    >>> Schedule((Fragment(0, (0, 1)), Fragment(1, (2, 3))), 2).rows
    4
    """

    fragments: tuple[Fragment, ...]
    group_size: int
    timesteps: int = 1
    placement: str = "split"
    barrier: bool = False
    pack: int = 1
    shard_pairs: bool = False
    tag: bool = False
    stale: int = 0

    def __post_init__(self) -> None:
        n = require_fragments(self.fragments)
        plain = (Fragment(i, tuple(map(int, f.samples))) for i, f in enumerate(self.fragments))  # json knows no numpy
        object.__setattr__(self, "fragments", tuple(plain))
        for name in ("group_size", "timesteps", "pack"):
            object.__setattr__(self, name, require_count(name, getattr(self, name)))
        if n % self.group_size:
            raise ValueError(f"group_size {self.group_size} must divide the number of rows {n}")
        if self.placement not in PLACEMENTS:
            raise ValueError(f"placement must be one of {PLACEMENTS}, got {self.placement!r}")
        for name in ("barrier", "shard_pairs", "tag"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        object.__setattr__(self, "stale", require_count("stale", self.stale, low=0))
        if self.stale > len(self.fragments):
            raise ValueError(f"stale must be at most the number of fragments {len(self.fragments)}, got {self.stale}")
        if self.placement != "split":
            if self.tag or self.stale:
                raise ValueError(
                    f"placement {self.placement!r} has no tag or stale, got tag {self.tag}, stale {self.stale}"
                )
            object.__setattr__(self, "barrier", True)

    @property
    def rows(self) -> int:
        """n, the samples of one batch."""
        return sum(len(f.samples) for f in self.fragments)


@no_type_check  # it refuses bad values itself
@dataclass(frozen=True)
class Trace:
    """What happened when: what `simulate` predicts and what an executor measures, in one type.

    intervals: by start; zero-length ones left out. ends: seconds at the end of each global step (its publication done).
    ValueError: no tuples; an interval that ends before it starts, out of order, of unknown kind or resource; ends not
    ascending.
    """

    intervals: tuple[Interval, ...]
    ends: tuple[float, ...]

    def __post_init__(self) -> None:
        before = -math.inf
        for name in ("intervals", "ends"):
            if not isinstance(getattr(self, name), tuple):
                raise ValueError(f"{name} must be a tuple, got {getattr(self, name)!r:.120}")
        for interval in self.intervals:
            if not isinstance(interval, Interval):
                raise ValueError(f"intervals must be a tuple of Interval, got {interval!r:.120}")
            resource, kind, start, end, *_ = interval
            for name, seconds in (("start", start), ("end", end)):
                if not isinstance(seconds, int | float):  # numpy's float64 is a float
                    require_number(f"{name} of intervals", seconds)
            if not (before <= start <= end < math.inf) or start == -math.inf:
                raise ValueError(f"intervals must be finite, by start, start <= end, got {interval} after {before}")
            known = resource in ("generator", "trainer", "cluster") or str(resource).startswith("reward/")
            if kind not in KINDS or not known:
                raise ValueError(f"intervals must have a known kind and resource, got {interval}")
            before = start
        if not self.ends:
            raise ValueError(f"ends must hold at least one step, got {self.ends!r}")
        for last, end in zip((0.0, *self.ends), self.ends, strict=False):
            require_number("ends", end, low=last)

    @property
    def makespan(self) -> float:
        """Seconds from the start of step 0 to the end of the last."""
        return self.ends[-1]

    @property
    def period(self) -> float:
        """Seconds per step over the last even window of about half the steps (stale starts may alternate two lengths)."""
        m = 2 * (len(self.ends) // 4)
        return (self.ends[-1] - self.ends[-1 - m]) / m if m else self.ends[-1] / len(self.ends)

    @property
    def idle(self) -> dict[str, float]:
        """Seconds each pool did nothing: {"generator", "trainer"}, or {"cluster"} when colocated."""
        busy: dict[str, list[float]] = {}
        for interval in self.intervals:
            busy.setdefault(interval.resource, []).append(interval.end - interval.start)
        pools = ("cluster",) if "cluster" in busy else ("generator", "trainer")
        return {pool: self.makespan - math.fsum(busy.get(pool, ())) for pool in pools}

    @property
    def versions(self) -> dict[tuple[int, int], int]:
        """{(step, fragment): version of the weights that generated it}."""
        return {(i.step, i.fragment): i.version for i in self.intervals if i.kind in ("generate", "help")}

    @property
    def staleness(self) -> dict[tuple[int, int], int]:
        """{(step, fragment): step - version}: 0 on-policy, 1 one step late, never more."""
        return {(step, fragment): step - version for (step, fragment), version in self.versions.items()}
