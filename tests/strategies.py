"""Hypothesis strategies: latents of ranks 1 to 5, times with t = 1 among them, rewards with missing and equal ones."""

import torch
from hypothesis import strategies as st
from oracles import F64, normal
from torch import Tensor

seeds = st.integers(0, 2**20)
ranks = st.integers(1, 5)
rows = st.integers(1, 5)


@st.composite
def latent_shapes(draw, *, min_rank: int = 1) -> tuple[int, ...]:
    """(b, *d) of total rank min_rank to 5."""
    rank = draw(st.integers(min_rank, 5))
    return (draw(rows), *draw(st.lists(st.integers(1, 3), min_size=rank - 1, max_size=rank - 1)))


@st.composite
def pairs_of_latents(draw, *, min_rank: int = 1) -> tuple[Tensor, Tensor]:
    """Two float64 tensors of one shape " b *d"."""
    shape, seed = draw(latent_shapes(min_rank=min_rank)), draw(seeds)
    return normal(*shape, seed=seed), normal(*shape, seed=seed + 1)


@st.composite
def time_pairs(draw, b: int) -> tuple[Tensor, Tensor]:
    """(t, t_next) " b" in float64, 0 <= t_next < t <= 1; t = 1 and t_next = 0 are drawn often."""
    now, then = [], []
    for _ in range(b):
        t = draw(st.one_of(st.just(1.0), st.floats(0.05, 1.0)))
        now.append(t)
        then.append(draw(st.one_of(st.just(0.0), st.floats(0.0, 0.95))) * t)
    return torch.tensor(now, dtype=F64), torch.tensor(then, dtype=F64)


@st.composite
def reward_groups(draw, *, missing: bool = True, min_k: int = 1) -> Tensor:
    """rewards " g k" in float64: small integers (ties are common), nan and both infinities among them."""
    g, k = draw(st.integers(1, 4)), draw(st.integers(min_k, 7))
    value = st.integers(-3, 3).map(float)
    if missing:
        value = st.one_of(value, value, value, st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    return torch.tensor([[draw(value) for _ in range(k)] for _ in range(g)], dtype=F64)


@st.composite
def rewards_and_latents(draw, *, missing: bool = True) -> tuple[Tensor, Tensor]:
    """rewards " g k" and latents " g k *d" with every *d from rank 0 to 3."""
    rewards = draw(reward_groups(missing=missing, min_k=2))
    shape = draw(st.lists(st.integers(1, 3), min_size=0, max_size=3))
    return rewards, normal(*rewards.shape, *shape, seed=draw(seeds))
