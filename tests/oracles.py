"""Independent answers: exact sums over atoms, affine recursions and plain numpy, in float64. Nothing here calls diffrl.

The world of the theory tests has M atoms x_j " M d" with prior p_j and reward r_j in [0, 1]. At a state s and time t the
posterior is w_j proportional to p_j exp(-|s - (1 - t) x_j|^2/(2 t^2)), and every conditional expectation is a sum.
"""

import contextlib
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

F64 = torch.float64


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    """Standard normal numbers from a generator of their own."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


class Atoms(NamedTuple):
    """A finite data distribution with rewards in [0, 1]."""

    x: Tensor  # M d
    prior: Tensor  # M
    reward: Tensor  # M


def atoms(m: int = 6, d: int = 3, seed: int = 0) -> Atoms:
    generator = torch.Generator().manual_seed(seed)
    prior = torch.rand(m, generator=generator, dtype=F64) + 0.2
    return Atoms(
        torch.randn(m, d, generator=generator, dtype=F64),
        prior / prior.sum(),
        torch.rand(m, generator=generator, dtype=F64) * 0.9 + 0.05,
    )


def posterior(world: Atoms, s: Tensor, t: float, log_tilt: Tensor | float = 0.0) -> Tensor:
    """w " n M" at the states s " n d": softmax of log prior + log_tilt - |s - (1 - t) x|^2/(2 t^2)."""
    gap = ((s[:, None] - (1 - t) * world.x[None]) ** 2).sum(-1)
    return torch.softmax(world.prior.log() + log_tilt - gap / (2 * t**2), dim=1)


def conditional_velocities(world: Atoms, s: Tensor, t: float) -> Tensor:
    """u_j = eps_j - x_j with eps_j = (s - (1 - t) x_j)/t, " n M d"."""
    return (s[:, None] - (1 - t) * world.x[None]) / t - world.x[None]


def conditional_moments(world: Atoms, s: Tensor, t: float) -> tuple[Tensor, Tensor, Tensor]:
    """(q = E[r|s] " n", v_fwd = E[u|s] " n d", g = Cov(r, u|s) " n d")."""
    w, u = posterior(world, s, t), conditional_velocities(world, s, t)
    q = w @ world.reward
    v_fwd = torch.einsum("nm,nmd->nd", w, u)
    ru = torch.einsum("nm,m,nmd->nd", w, world.reward, u)
    return q, v_fwd, ru - q[:, None] * v_fwd


def tilted_mean(rewards: Tensor, x: Tensor, tau: float) -> Tensor:
    """E[x] under weights exp(tau R) on the rows of x " k d"."""
    return torch.softmax(tau * rewards, 0) @ x


def gaussian_gain(t: Tensor, variance: Tensor | float) -> Tensor:
    """A with exact velocity v = A x for data N(0, S^2): A = (1 - k)/t, k = (1 - t) S^2/((1 - t)^2 S^2 + t^2)."""
    k = (1 - t) * variance / ((1 - t) ** 2 * variance + t**2)
    return (1 - k) / t


def affine_endpoint_std(step, times: Tensor, variance: float) -> float:
    """Endpoint std of N(0, 1) pushed through `step` with the exact velocity of N(0, variance): Var <- a^2 Var + std^2.

    All steps in one call of the kernel, at x = 1, where its mean is the coefficient a.
    """
    t, t_next = times[:-1], times[1:]
    ones = torch.ones(len(t), 1, dtype=times.dtype)
    mean, std = step(ones, gaussian_gain(t, variance)[:, None] * ones, t, t_next)
    total = 1.0
    for a, s in zip(mean[:, 0].tolist(), std.tolist(), strict=True):
        total = a * a * total + s * s
    return math.sqrt(total)


def numpy_advantages(rewards: np.ndarray, *, spread: str, eps: float = 1e-4) -> np.ndarray:
    """Group advantages by plain loops; `spread` is "group", "batch" or "none"."""
    finite = np.isfinite(rewards)
    out = np.zeros_like(rewards, dtype=np.float64)
    everything = rewards[finite].astype(np.float64)
    for i, row in enumerate(rewards.astype(np.float64)):
        values = row[finite[i]]
        if len(values) < 2 or values.max() == values.min():
            continue
        scale = {"group": values.std() + eps, "batch": everything.std() + eps, "none": 1.0}[spread]
        for j in np.flatnonzero(finite[i]):
            out[i, j] = (row[j] - values.mean()) / scale
    return out


def numpy_covariance(rewards: np.ndarray, x_0: np.ndarray) -> np.ndarray:
    """(1/k) sum_i (R_i - Rbar)(x_i - xbar) over the finite rewards, by loops."""
    out = np.zeros((len(rewards), *x_0.shape[2:]))
    for i, row in enumerate(rewards):
        kept = [j for j in range(len(row)) if np.isfinite(row[j])]
        r_mean = sum(row[j] for j in kept) / len(kept)
        x_mean = sum(x_0[i, j] for j in kept) / len(kept)
        out[i] = sum((row[j] - r_mean) * (x_0[i, j] - x_mean) for j in kept) / len(kept)
    return out


def rms(x: Tensor) -> Tensor:
    """Root mean square over all axes but the first."""
    return x.flatten(1).square().mean(1).sqrt()


def spy(function, log: list):
    """The same function, which also appends its arguments to `log`."""

    def call(*args, **kwargs):
        log.append((args, kwargs))
        return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def refuses(*fragments: object):
    """The block raises a ValueError whose message holds every fragment (names, shapes, values)."""
    with pytest.raises(ValueError) as caught:
        yield
    missing = [str(f) for f in fragments if str(f) not in str(caught.value)]
    assert not missing, f"{str(caught.value)!r} does not mention {missing}"
