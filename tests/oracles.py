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


def close(found: Tensor, expected, *, rtol: float = 1e-10, atol: float = 1e-13) -> None:
    """Float64 numbers, equal but for rounding."""
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=F64), rtol=rtol, atol=atol)


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


def moments(w: Tensor, reward: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(q " n", v_fwd " n d", g " n d") under any weights w " n M" (they sum to 1), as plain sums: E[r], E[u], E[r u] - q E[u]."""
    q = (w * reward).sum(1)
    v_fwd = (w[..., None] * u).sum(1)
    return q, v_fwd, (w[..., None] * reward[None, :, None] * u).sum(1) - q[:, None] * v_fwd


def six_atoms() -> Atoms:
    """Six equally likely atoms on a line, rewards 0, .2, ..., 1. An earlier note printed 1.00, 1.05, .45, .001 without its
    toy: this one, found by a search over half-integers, prints the same."""
    x = torch.tensor([-3.5, -2.0, 0.0, 0.0, 0.0, 2.0], dtype=F64)
    return Atoms(x[:, None], torch.full((6,), 1 / 6, dtype=F64), torch.arange(6, dtype=F64) / 5)


def line_density(world: Atoms, s: Tensor, t: float) -> Tensor:
    """p_t(s) " n" of a world in one dimension: a mixture of N((1 - t) x_j, t^2)."""
    gap = (s[:, None] - (1 - t) * world.x[None, :, 0]) / t
    return (torch.exp(-(gap**2) / 2) / (t * math.sqrt(2 * math.pi))) @ world.prior


def collapse_recursion(
    c: float, iterations: int, *, steps: int = 10, shift: float = 3.0, rate: float = 0.2
) -> list[float]:
    """Endpoint std after 0..iterations updates A += rate c (A_ideal(S^2) - A) in plain floats."""
    u = [1 - i / steps for i in range(steps + 1)]
    t = [shift * x / (1 + (shift - 1) * x) for x in u]

    def ideal(time: float, variance: float) -> float:
        return (1 - (1 - time) * variance / ((1 - time) ** 2 * variance + time**2)) / time

    gain, out = [ideal(time, 1.0) for time in t[:-1]], []
    for _ in range(iterations + 1):
        out.append(abs(math.prod(1 - (now - then) * a for now, then, a in zip(t, t[1:], gain))))
        gain = [a + rate * c * (ideal(time, out[-1] ** 2) - a) for time, a in zip(t, gain)]
    return out


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
