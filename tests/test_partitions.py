"""Cuts of a batch: exact covers, group completion by brute force, and the same gradient whatever the cut."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import F64, normal, refuses
from scheduling import fragments_of

from diffrl.parallel import (
    Fragment,
    gap_partition,
    group_ready_times,
    prompt_partition,
    tsp_pack,
    tsp_shard,
)
from diffrl.partitions import even_runs

small = st.integers(1, 6)


def is_even_cover(parts, items):
    """The parts are contiguous runs of items, in order, lengths differing by at most one, longer first."""
    lengths = [len(part) for part in parts]
    return (
        list(itertools.chain(*parts)) == list(items)
        and max(lengths) - min(lengths) <= 1
        and lengths == sorted(lengths, reverse=True)
    )


@given(small, small, st.data())
def test_fragments_cover_the_rows_once_in_order(g, k, data):
    m = data.draw(st.integers(1, g * k))
    fragments = gap_partition(g, k, fragments=m)
    assert [f.index for f in fragments] == list(range(m))
    assert is_even_cover([f.samples for f in fragments], range(g * k))
    m = data.draw(st.integers(1, g))
    whole = prompt_partition(g, k, fragments=m)
    assert [f.index for f in whole] == list(range(m))
    groups = [sorted({row // k for row in f.samples}) for f in whole]
    assert is_even_cover(groups, range(g))
    assert is_even_cover([f.samples for f in whole], range(g * k)) or k > 1
    assert sorted(row for f in whole for row in f.samples) == list(range(g * k))
    assert prompt_partition(g, 1, fragments=m) == gap_partition(g, 1, fragments=m)


def test_golden_partitions():
    assert gap_partition(2, 4, fragments=3) == (
        Fragment(0, (0, 1, 2)),
        Fragment(1, (3, 4, 5)),
        Fragment(2, (6, 7)),
    )
    assert prompt_partition(3, 2, fragments=2) == (Fragment(0, (0, 1, 2, 3)), Fragment(1, (4, 5)))
    assert [len(run) for run in even_runs(7, 4)] == [2, 2, 2, 1]


@pytest.mark.parametrize("partition", [gap_partition, prompt_partition])
def test_partitions_refuse(partition):
    limit = 6 if partition is gap_partition else 2
    for m in (0, limit + 1, 1.0, True):
        with refuses("fragments", m):
            partition(2, 3, fragments=m)
    with refuses("n_prompts", 0):
        partition(0, 3, fragments=1)
    with refuses("group_size", 0):
        partition(2, 0, fragments=1)


# ---- group completion


@given(small, small, st.data())
def test_ready_times_by_brute_force(g, k, data):
    fragments = data.draw(fragments_of(g, k))
    scored = data.draw(st.lists(st.floats(0, 50), min_size=len(fragments), max_size=len(fragments)))
    at = {row: time for f, time in zip(fragments, scored, strict=True) for row in f.samples}
    mates = {row: [row // k * k + i for i in range(k)] for row in at}
    expected = tuple(max(at[mate] for row in f.samples for mate in mates[row]) for f in fragments)
    assert group_ready_times(fragments, k, scored) == expected
    assert all(a >= b for a, b in zip(expected, scored, strict=True))
    if all(len({row // k for row in f.samples}) * k == len(f.samples) for f in fragments):
        assert expected == tuple(scored)  # whole groups wait for nobody


def test_ready_times_refuse():
    fragments = gap_partition(1, 2, fragments=2)
    with refuses("scored", "2", "1"):
        group_ready_times(fragments, 2, [1.0])
    for value in (math.nan, math.inf):
        with refuses("scored[1]", value):
            group_ready_times(fragments, 2, [1.0, value])
    with refuses("rows", "[0, 0]"):
        group_ready_times((Fragment(0, (0,)), Fragment(1, (0,))), 2, [1.0, 1.0])
    with refuses("group_size", 0):
        group_ready_times(fragments, 0, [1.0, 1.0])


def test_any_iterable_will_do_and_nothing_else():
    fragments = gap_partition(1, 2, fragments=2)
    assert group_ready_times(iter(fragments), 2, iter([1.0, 2.0])) == (2.0, 2.0)
    assert tsp_pack(((0, t) for t in range(3)), size=2) == (((0, 0), (0, 1)), ((0, 2),))
    for name, bad in (("fragments", None), ("scored", 3.0)):
        with refuses(name, bad):
            group_ready_times(**{"fragments": fragments, "group_size": 2, "scored": [1.0, 1.0], name: bad})
    for function in (lambda p: tsp_pack(p, size=2), lambda p: tsp_shard(p, ranks=2)):
        with refuses("pairs", 3):
            function(3)
    with refuses("fragments", "(0, (0,))"):
        group_ready_times([(0, (0,))], 1, [1.0])
    for row in (0.5, math.nan, None, [0], -1):
        with refuses("fragments[0]", row):
            group_ready_times((Fragment(0, (row,)),), 1, [1.0])


# ---- packs and shards

some_pairs = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), unique=True, max_size=30)


@given(some_pairs, st.integers(1, 9), st.floats(1, 100), st.floats(0, 1))
def test_packs_cover_the_pairs_and_fit(pairs, size, cap, share):
    each = cap * share
    packs = tsp_pack(pairs, size=size, memory_cap=cap, bytes_per_pair=each)
    q = size if each * size <= cap else math.floor(cap / each)
    assert len(packs) == math.ceil(len(pairs) / q)
    assert not packs or is_even_cover(packs, pairs)
    assert all(1 <= len(pack) <= q and len(pack) * each <= cap * (1 + 1e-12) for pack in packs)


@given(some_pairs, small)
def test_shards_cover_the_pairs_one_per_rank(pairs, ranks):
    shards = tsp_shard(pairs, ranks=ranks)
    assert len(shards) == ranks
    assert is_even_cover(shards, pairs)


def test_published_memory_caps_a_pack_at_six():
    # 13.5, 26.2, 51.6 GB at 1, 2, 4 pairs: 12.7 GB each above 0.8 GB
    pairs = [(i, t) for i in range(2) for t in range(6)]
    packs = tsp_pack(pairs, size=100, memory_cap=80 - 0.8, bytes_per_pair=12.7)
    assert [len(pack) for pack in packs] == [6, 6]
    assert [len(pack) for pack in tsp_pack(pairs, size=100)] == [12]


def test_packs_and_shards_refuse():
    pairs = [(0, 0), (0, 1)]
    for size in (0, 1.5):
        with refuses("size", size):
            tsp_pack(pairs, size=size)
    for cap in (0.0, -1.0, math.nan):
        with refuses("memory_cap", cap):
            tsp_pack(pairs, size=1, memory_cap=cap)
    for each in (-1.0, math.nan, math.inf):
        with refuses("bytes_per_pair", each):
            tsp_pack(pairs, size=1, bytes_per_pair=each)
    with refuses("bytes_per_pair", "2.0", "1.0"):
        tsp_pack(pairs, size=1, memory_cap=1.0, bytes_per_pair=2.0)
    for function in (lambda p: tsp_pack(p, size=2), lambda p: tsp_shard(p, ranks=2)):
        with refuses("(0, 1)", "twice"):
            function([(0, 1), (1, 1), (0, 1)])
        with refuses("pairs", "(0, 1, 2)"):
            function([(0, 1, 2)])
        with refuses("timestep", -1):
            function([(0, -1)])
    for ranks in (0, True):
        with refuses("ranks", ranks):
            tsp_shard(pairs, ranks=ranks)


# ---- the gradient does not depend on the cut

G, K, STEPS = 2, 5, 3


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


def pair_losses(net, pairs):
    """The loss of each (sample, timestep): a group-relative weight times the network's output."""
    x = normal(G * K, STEPS, 4, seed=3)
    weight = normal(G, K, seed=4)
    weight = (weight - weight.mean(1, keepdim=True)).flatten()
    rows, steps = [i for i, _ in pairs], [t for _, t in pairs]
    return weight[rows] * net(x[rows, steps])[:, 0] ** 2


def gradient(packs, *, mean=False):
    """Gradient of the whole batch's mean loss, accumulated pack by pack; `mean`: a mean of the packs' means instead."""
    net = network()
    total = sum(len(pack) for pack in packs)
    for pack in packs:
        if pack:
            loss = pair_losses(net, pack)
            (loss.mean() / len(packs) if mean else loss.sum() / total).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def pairs_of(fragment):
    return [(row, t) for row in fragment.samples for t in range(STEPS)]


WHOLE = gradient([[(row, t) for row in range(G * K) for t in range(STEPS)]])


@given(st.data(), st.integers(1, 7), st.integers(1, 3))
def test_every_cut_pack_and_shard_gives_the_gradient_of_the_whole_batch(data, size, ranks):
    fragments = data.draw(fragments_of(G, K, most=10))
    packs = [pack for f in fragments for pack in tsp_pack(pairs_of(f), size=size)]
    torch.testing.assert_close(gradient(packs), WHOLE, rtol=1e-12, atol=1e-14)
    sharded = [
        pack for f in fragments for shard in tsp_shard(pairs_of(f), ranks=ranks) for pack in tsp_pack(shard, size=size)
    ]
    torch.testing.assert_close(gradient(sharded), WHOLE, rtol=1e-12, atol=1e-14)
    back = packs[::-1]  # in any order of arrival
    torch.testing.assert_close(gradient(back), WHOLE, rtol=1e-12, atol=1e-14)


def test_control_a_mean_of_means_over_ragged_packs_differs():
    fragments = gap_partition(G, K, fragments=3)  # 4, 3, 3 samples
    packs = [tuple(pairs_of(f)) for f in fragments]
    assert not torch.allclose(gradient(packs, mean=True), WHOLE, rtol=1e-3)
    equal = [tuple(pairs_of(f)) for f in gap_partition(G, K, fragments=5)]
    torch.testing.assert_close(gradient(equal, mean=True), WHOLE, rtol=1e-12, atol=1e-14)
    assert not is_even_cover([(0,), (1, 2)], range(3))
    assert not is_even_cover([(0, 1), (1, 2)], range(3))
    assert WHOLE.dtype == F64
