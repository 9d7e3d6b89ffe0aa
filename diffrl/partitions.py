"""How a batch is cut: fragments along the sample axis or in whole groups; (sample, timestep) pairs into packs and shards."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable

from diffrl.numbers import listed, require_count, require_number
from diffrl.schedules import Fragment, Pair, sharing


def even_runs(count: int, parts: int) -> tuple[range, ...]:
    """0..count-1 in `parts` contiguous runs whose lengths differ by at most one, longer first.

    >>> even_runs(5, 3)
    (range(0, 2), range(2, 4), range(4, 5))
    """
    short, extra = divmod(count, parts)
    starts = [i * short + min(i, extra) for i in range(parts + 1)]
    return tuple(range(a, b) for a, b in itertools.pairwise(starts))


def _partition(n_prompts: int, group_size: int, fragments: int, unit: int, limit: int) -> tuple[Fragment, ...]:
    fragments = require_count("fragments", fragments)
    if fragments > limit:
        raise ValueError(
            f"fragments must be at most {limit}, got {fragments} for {n_prompts} prompts of {group_size} samples"
        )
    runs = even_runs(limit, fragments)
    return tuple(Fragment(i, tuple(range(run.start * unit, run.stop * unit))) for i, run in enumerate(runs))


def gap_partition(n_prompts: int, group_size: int, *, fragments: int) -> tuple[Fragment, ...]:
    """M contiguous runs of the n = n_prompts group_size rows, lengths differing by at most one, longer first (GAP).

    Generation-axis pipeline: a batch of few prompts still gives many fragments, which may cut groups. 1 <= fragments <= n,
    else ValueError.

    >>> [f.samples for f in gap_partition(1, 5, fragments=2)]
    [(0, 1, 2), (3, 4)]
    """
    n_prompts, group_size = require_count("n_prompts", n_prompts), require_count("group_size", group_size)
    return _partition(n_prompts, group_size, fragments, 1, n_prompts * group_size)


def prompt_partition(n_prompts: int, group_size: int, *, fragments: int) -> tuple[Fragment, ...]:
    """The same in whole groups of group_size rows: no group is cut. 1 <= fragments <= n_prompts, else ValueError.

    >>> [f.samples for f in prompt_partition(3, 2, fragments=2)]
    [(0, 1, 2, 3), (4, 5)]
    """
    n_prompts, group_size = require_count("n_prompts", n_prompts), require_count("group_size", group_size)
    return _partition(n_prompts, group_size, fragments, group_size, n_prompts)


def group_ready_times(fragments: Iterable[Fragment], group_size: int, scored: Iterable[float]) -> tuple[float, ...]:
    """Seconds at which each fragment is trainable: max over all fragments that share a group with it (derived here).

    Exact group statistics need the whole group, so a fragment waits for every group it touches. scored: finite seconds
    per fragment. ValueError: another number of them, not finite, something else than a Fragment, a row twice.

    >>> group_ready_times(gap_partition(2, 2, fragments=4), 2, [1.0, 4.0, 3.0, 2.0])
    (4.0, 4.0, 3.0, 3.0)
    """
    group_size = require_count("group_size", group_size)
    cut, at = listed("fragments", fragments), listed("scored", scored)
    if len(at) != len(cut):
        raise ValueError(f"scored must have one time per fragment, {len(cut)}, got {len(at)}")
    times = [require_number(f"scored[{i}]", t) for i, t in enumerate(at)]
    if not all(isinstance(f, Fragment) for f in cut):
        raise ValueError(f"fragments must be Fragments, got {cut!r:.120}")
    rows = [require_count(f"row of fragments[{i}]", row, low=0) for i, f in enumerate(cut) for row in f.samples]
    if len(set(rows)) != len(rows):
        raise ValueError(f"fragments must hold rows >= 0, each once, got {rows!r:.120}")
    complete: dict[int, float] = {}
    touched = sharing(cut, group_size)
    for groups, time in zip(touched, times, strict=True):
        for group in groups:
            complete[group] = max(time, complete.get(group, -math.inf))
    return tuple(
        max((complete[group] for group in groups), default=time) for groups, time in zip(touched, times, strict=True)
    )


def _pairs(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    checked = []
    for pair in listed("pairs", pairs):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(f"pairs must be (sample, timestep) tuples, got {pair!r}")
        checked.append((require_count("sample", pair[0], low=0), require_count("timestep", pair[1], low=0)))
    if len(set(checked)) != len(checked):
        twice = Counter(checked).most_common(1)[0][0]
        raise ValueError(f"pairs holds {twice} twice")
    return tuple(checked)


def tsp_pack(
    pairs: Iterable[Pair], *, size: int, memory_cap: float = math.inf, bytes_per_pair: float = 0.0
) -> tuple[tuple[Pair, ...], ...]:
    """Pairs that share one forward-backward (TSP): ceil(len/q) packs in order, q = min(size, floor(cap/bytes_per_pair)).

    Lengths differ by at most one, longer first. memory_cap, bytes_per_pair: one unit, any; fixed bytes (model, optimizer)
    are taken off the cap by the caller. ValueError: size < 1, cap <= 0, one pair over the cap, a pair twice.

    >>> [len(pack) for pack in tsp_pack([(0, t) for t in range(7)], size=4, memory_cap=40.0, bytes_per_pair=12.7)]
    [3, 2, 2]
    """
    size = require_count("size", size)
    memory_cap = require_number("memory_cap", memory_cap, low=0, open_low=True, infinite=True)
    bytes_per_pair = require_number("bytes_per_pair", bytes_per_pair, low=0)
    if bytes_per_pair > memory_cap:
        raise ValueError(f"one pair of bytes_per_pair {bytes_per_pair} does not fit under memory_cap {memory_cap}")
    if bytes_per_pair > 0 and size > memory_cap / bytes_per_pair:
        size = math.floor(memory_cap / bytes_per_pair)
    checked = _pairs(pairs)
    runs = even_runs(len(checked), max(1, -(-len(checked) // size)))
    return tuple(tuple(checked[i] for i in run) for run in runs if len(run))


def tsp_shard(pairs: Iterable[Pair], *, ranks: int) -> tuple[tuple[Pair, ...], ...]:
    """Pairs spread over trainer ranks (TSP): exactly `ranks` contiguous runs, longer first, some may be empty.

    ValueError: ranks < 1, a pair twice.

    >>> tsp_shard([(0, 0), (0, 1), (1, 0)], ranks=2)
    (((0, 0), (0, 1)), ((1, 0),))
    """
    ranks = require_count("ranks", ranks)
    checked = _pairs(pairs)
    return tuple(tuple(checked[i] for i in run) for run in even_runs(len(checked), ranks))
