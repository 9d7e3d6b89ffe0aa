"""Directions other than `aggregate_direction`: shrunk, weighted, per noise level; of several rewards: `conflicts`.

Each function of (rewards, x_0) that returns a `Direction` can stand in its place. A covariance of few samples in many
dimensions is mostly noise, and unit RMS hides how much: E cos^2(C, Cov) = (k-1)/(k+n-2) for a linear reward on Gaussian
data. Statistics are float64 inside; a sample whose reward is nan or inf has no reward and its latents may be anything.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from diffrl.checks import require_count, require_number, require_tensors, shapes
from diffrl.conflicts import direction_cosines as direction_cosines
from diffrl.conflicts import min_norm as min_norm
from diffrl.conflicts import pcgrad as pcgrad
from diffrl.conflicts import sum_of_directions as sum_of_directions
from diffrl.conflicts import sum_of_rewards as sum_of_rewards
from diffrl.guidance import (
    DEAD_RMS,
    Direction,
    _constant,
    _covariance,
    _groups,
    _require_groups,
    aggregate_direction,
)


def _flat(x: Tensor, axes: int) -> Tensor:
    """All axes after the first `axes` as one (which a plain flatten does not make where there are none)."""
    return x.reshape(*x.shape[:axes], math.prod(x.shape[axes:]))


def _rows(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.ndim - 1))


def _rms(x: Tensor) -> Tensor:
    """Root mean square over all axes but the first; 0 where there is nothing."""
    return _flat(x, 1).square().mean(1).nan_to_num(0).sqrt()


def _finite_out(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _covariances(values: Tensor, finite: Tensor, x_0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(C " g *d", the rms " g" up to which it is rounding, alive " g") in float64, as `aggregate_direction` does."""
    covariance = torch.zeros((len(values), *x_0.shape[2:]), dtype=torch.float64, device=x_0.device)
    floor, alive = values.new_zeros(len(values)), ~_constant(values, finite)
    for i in alive.nonzero().flatten().tolist():
        covariance[i], size = _covariance(values[i], finite[i], x_0[i])
        floor[i] = DEAD_RMS * values[i][finite[i]].std(correction=0) * size
    alive = alive & (_rms(covariance) > floor)
    return torch.where(_rows(alive, covariance), covariance, 0.0), floor, alive


def _unbiased(covariance: Tensor, finite: Tensor) -> Tensor:
    """Chat = k/(k-1) C."""
    k = finite.sum(1).clamp_min(2).double()
    return covariance * _rows(k / (k - 1), covariance)


def _direction(covariance: Tensor, rms: Tensor, alive: Tensor, scale: float, x_0: Tensor) -> Direction:
    """scale covariance/rms where alive, else exactly 0."""
    value = torch.where(_rows(alive, covariance), scale * covariance / _rows(rms, covariance), 0.0)
    return Direction(value.to(_finite_out(x_0)), alive)


# ---- how much of a covariance is signal


def unbiased_covariance(rewards: Float[Tensor, " g k"], x_0: Float[Tensor, " g k *d"]) -> Float[Tensor, " g *d"]:
    """Chat = k/(k-1) C, C = `reward_covariance`, k the group's finite rewards: E Chat = Cov(R, x_0|c). Derived here.

    In reward units, so that means of it over groups or iterations make sense (those of unit-RMS directions do not):
    what `shrink_toward` pulls towards. Dead groups are exactly 0. ValueError: as `reward_covariance`.

    >>> unbiased_covariance(torch.tensor([[1.0, 0.0]]), torch.tensor([[[2.0], [0.0]]]))
    tensor([[1.]])
    """
    values, finite = _require_groups(rewards, x_0)
    return _unbiased(_covariances(values, finite, x_0)[0], finite).to(_finite_out(x_0))


def _energies(
    rewards: Tensor, x_0: Tensor, pairings: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(S, |Chat|^2, finite rewards per group), each " g"; S is nan below four finite rewards.

    All from the Gram matrix of the centred latents: h_p = (R_i - R_j)(x_i - x_j)/2 is never written out.
    """
    pairings = require_count("pairings", pairings)
    values, finite = _require_groups(rewards, x_0)
    generator = generator or torch.Generator(device=rewards.device).manual_seed(0)
    draws = torch.rand((pairings, values.shape[1]), generator=generator, device=generator.device).to(values)
    signal, total = torch.full_like(values.sum(1), math.nan), values.new_zeros(len(values))
    for group, (row, here) in enumerate(zip(values, finite)):
        n = int(here.sum())
        if n < 2:
            continue
        r, x = row[here] - row[here].mean(), _flat(x_0[group][here].detach().double(), 1)
        x = x - x.mean(0)
        gram = x @ x.T
        total[group] = r @ gram @ r / (n - 1) ** 2
        pairs = n // 2
        if pairs < 2:
            continue
        order = draws[:, here].argsort(dim=1, stable=True)
        a, b = order[:, :pairs], order[:, pairs : 2 * pairs]
        half_gap = (r[a] - r[b]) / 2
        weight = torch.zeros_like(order, dtype=r.dtype).scatter(1, a, half_gap).scatter(1, b, -half_gap)
        whole = torch.einsum("mi,ij,mj->m", weight, gram, weight)  # |sum_p h_p|^2
        own = (half_gap**2 * (gram[a, a] + gram[b, b] - 2 * gram[a, b])).sum(1)  # sum_p |h_p|^2
        signal[group] = ((whole - own) / (pairs * (pairs - 1))).mean()
    return signal, total, finite.sum(1)


def signal_energy(
    rewards: Float[Tensor, " g k"],
    x_0: Float[Tensor, " g k *d"],
    *,
    pairings: int = 4,
    generator: torch.Generator | None = None,
) -> Float[Tensor, " g"]:
    """S = mean of <h_p, h_q>, p != q, h_p = (R_i - R_j)(x_i - x_j)/2 of disjoint pairs: unbiased for |Cov(R, x_0)|^2.

    Derived here: E h_p = Cov and disjoint pairs are independent. S may be negative. floor(k/2) pairs of the finite
    rewards, averaged over `pairings` >= 1 seeded random pairings; over all of them S is the unbiased HSIC with linear
    kernels (Song et al. 2012, JMLR 13), whose spread is the smallest. generator None: one seeded with 0.

    Sum over the latent axes, not a mean. float64 (the square of a small reward leaves float32). nan where a group has
    fewer than four finite rewards. ValueError: as `reward_covariance`; pairings < 1.

    >>> signal_energy(torch.tensor([[0.0, 1.0, 2.0]]), torch.zeros(1, 3, 1))  # one pair alone: no product
    tensor([nan], dtype=torch.float64)
    """
    return _energies(rewards, x_0, pairings, generator)[0]


def noise_energy(
    rewards: Float[Tensor, " g k"],
    x_0: Float[Tensor, " g k *d"],
    *,
    pairings: int = 4,
    generator: torch.Generator | None = None,
) -> Float[Tensor, " g"]:
    """N = |Chat|^2 - S: unbiased for E|Chat - Cov|^2, what sampling adds to `unbiased_covariance`. Derived here.

    Everything as in `signal_energy`, nan and refusals included; a single N may be negative.

    >>> r, x = torch.tensor([[0.0, 1.0, 2.0, 5.0]]), torch.tensor([[[0.0], [1.0], [3.0], [2.0]]])
    >>> torch.allclose(signal_energy(r, x) + noise_energy(r, x), unbiased_covariance(r, x)[:, 0].double() ** 2)
    True
    """
    signal, total, _ = _energies(rewards, x_0, pairings, generator)
    return total - signal


def _fraction(signal: Tensor, total: Tensor, count: Tensor, alive: Tensor) -> Tensor:
    """rho, pooled where the group itself cannot tell."""
    own = alive & (count >= 4)
    pooled = signal[own].sum() / total[own].sum() if bool(own.any()) else signal.new_ones(())
    return torch.where(alive, torch.where(own, signal / total, pooled).clamp(0, 1), 0.0)


def signal_fraction(
    rewards: Float[Tensor, " g k"],
    x_0: Float[Tensor, " g k *d"],
    *,
    pairings: int = 4,
    generator: torch.Generator | None = None,
) -> Float[Tensor, " g"]:
    """rho = clip(S/|Chat|^2, 0, 1): the share of signal in a group's covariance. Derived here.

    The factor of positive-part James-Stein, S as in `signal_energy`. Groups with two or three finite rewards cannot
    tell: they get sum S/sum |Chat|^2 of the alive groups that can, clipped too, or 1 if there are none. Dead groups (as
    `aggregate_direction`'s): 0. Invariant under R -> aR + b and x_0 -> a x_0 + const, a != 0. For a linear reward on
    Gaussian data E S/E|Chat|^2 = (k-1)/(k+n); clipping lifts the mean of rho over pure noise above 0.
    ValueError: as `signal_energy`.

    >>> rewards = torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0], [1.0, 1.0, 1.0, 1.0]])
    >>> x_0 = torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    >>> signal_fraction(rewards, x_0[..., None])
    tensor([1., 0., 0.])
    """
    signal, total, count = _energies(rewards, x_0, pairings, generator)
    alive = _covariances(*_groups(rewards), x_0)[2]
    return _fraction(signal, total, count, alive).to(_finite_out(x_0))


def shrink_scale(
    rewards: Float[Tensor, " g k"], x_0: Float[Tensor, " g k *d"], *, scale: float = 1.0, pairings: int = 4
) -> Direction:
    """rho G: `aggregate_direction` times `signal_fraction`, so that its RMS says how much is known. Derived here.

    alive is that of `aggregate_direction`: a group with rho = 0 keeps its target v_old. ValueError: as those two.

    >>> x_0 = torch.tensor([[[0.0], [1.0], [2.0], [3.0]], [[0.0], [-2.0], [-1.0], [0.0]]])  # rho 1 and 0
    >>> shrink_scale(torch.tensor([[0.0, 1.0, 2.0, 3.0]] * 2), x_0).value.tolist()
    [[1.0], [0.0]]
    """
    value, alive = aggregate_direction(rewards, x_0, scale=scale)
    return Direction(value * _rows(signal_fraction(rewards, x_0, pairings=pairings).to(value), value), alive)


def _shrunk(
    rewards: Tensor, x_0: Tensor, centre: Callable[[Tensor, Tensor], Tensor], scale: float, pairings: int
) -> Direction:
    """(1 - lam) Chat + lam M at unit RMS, M = centre(Chat, alive)."""
    scale = require_number("scale", scale)
    signal, total, count = _energies(rewards, x_0, pairings, None)
    values, finite = _groups(rewards)
    covariance, floor, alive = _covariances(values, finite, x_0)
    unbiased = _unbiased(covariance, finite)
    gap = unbiased - centre(unbiased, alive)
    noise = torch.where(count >= 4, total - signal, total * (1 - _fraction(signal, total, count, alive)))
    distance = _flat(gap, 1).square().sum(1)
    lam = torch.where(distance > 0, noise / distance, 0.0).clamp(0, 1)
    posterior = unbiased - _rows(lam, gap) * gap
    rms = _rms(posterior)
    return _direction(posterior, rms, alive & (rms > floor), scale, x_0)


def shrink_toward_batch(
    rewards: Float[Tensor, " g k"], x_0: Float[Tensor, " g k *d"], *, scale: float = 1.0, pairings: int = 4
) -> Direction:
    """scale Cpost/rms(Cpost), Cpost = (1 - lam) Chat + lam M, M = mean of Chat over the alive groups (derived here).

    lam = clip(N/|Chat - M|^2, 0, 1) with N = `noise_energy` (where a group cannot tell, (1 - rho) |Chat|^2 with the
    pooled rho of `signal_fraction`). Normalised once. Prompts that pull the same way lend each other samples, others
    lose: with k = 8, n = 32 and 8 prompts cos(Cpost, Cov) goes from .42 to .78 if all share one direction, to .23 if
    they share none. One alive group alone: `aggregate_direction`. Dead: that one's dead groups, and where Cpost is 0.
    ValueError: as `signal_energy`; scale not finite.

    >>> r, x_0 = torch.tensor([[0.0, 1.0, 2.0, 4.0]]), torch.tensor([[[0.0], [1.0], [3.0], [2.0]]])
    >>> shrink_toward_batch(r, x_0).value == aggregate_direction(r, x_0).value  # one group alone
    tensor([[True]])
    """

    def centre(unbiased: Tensor, alive: Tensor) -> Tensor:
        return unbiased[alive].mean(0, keepdim=True) if bool(alive.any()) else torch.zeros_like(unbiased)

    return _shrunk(rewards, x_0, centre, scale, pairings)


def shrink_toward(
    rewards: Float[Tensor, " g k"],
    x_0: Float[Tensor, " g k *d"],
    running: Float[Tensor, " g *d"],
    *,
    scale: float = 1.0,
    pairings: int = 4,
) -> Direction:
    """`shrink_toward_batch` with the caller's M = `running`, say a running mean of each prompt's `unbiased_covariance`.

    In units of reward times latent, not a direction at unit RMS (derived here). running 0: `aggregate_direction`, but
    dead where S <= 0. ValueError: as `shrink_toward_batch`; running not " g *d" or not finite.
    No example: `shrink_toward_batch` has one.
    """
    require_tensors(rewards=rewards, x_0=x_0, running=running)
    if running.shape != x_0.shape[:1] + x_0.shape[2:]:
        raise ValueError(f"running must be (g, *d): {shapes(running=running, x_0=x_0)}")
    if not bool(torch.isfinite(running).all()):
        raise ValueError(f"running is not finite at {(~torch.isfinite(running)).nonzero().tolist()[:8]}")
    return _shrunk(rewards, x_0, lambda unbiased, alive: running.detach().to(unbiased), scale, pairings)


# ---- how much a group's rewards spread


def batch_rms(rewards: Float[Tensor, " g k"], x_0: Float[Tensor, " g k *d"], *, scale: float = 1.0) -> Direction:
    """G_g = scale C_g/sqrt(mean over alive g of rms(C_g)^2): one RMS for all, so saturated groups fade (derived here).

    The mean of rms(G_g)^2 over alive groups is scale^2. All groups must be on one reward scale. alive as in
    `aggregate_direction`. ValueError: as `reward_covariance`; scale not finite.

    >>> batch_rms(torch.tensor([[0.0, 7.0], [0.0, 1.0]]), torch.tensor([[[0.0], [1.0]], [[0.0], [1.0]]])).value
    tensor([[1.4000],
            [0.2000]])
    """
    scale = require_number("scale", scale)
    covariance, _, alive = _covariances(*_require_groups(rewards, x_0), x_0)
    rms = _rms(covariance)[alive].square().mean().sqrt()
    return _direction(covariance, rms.expand(len(alive)), alive, scale, x_0)


def signal_weight(
    rewards: Float[Tensor, " g k"], x_0: Float[Tensor, " g k *d"], *, pairings: int = 4
) -> Float[Tensor, " g"]:
    """w = `signal_fraction` as a loss weight per group: unit-RMS targets, but noisy groups count less (derived here).

    In [0, 1], 0 for dead groups. ValueError: as `signal_energy`. No example: `signal_fraction` has one.
    """
    return signal_fraction(rewards, x_0, pairings=pairings)


def spread_weight(
    rewards: Float[Tensor, " g k"], x_0: Float[Tensor, " g k *d"] | None = None, *, typical: float | None = None
) -> Float[Tensor, " g"]:
    """w = s/(s + s0), s the population std of the group's finite rewards: a loss weight that fades with the spread.

    Derived here. s0 = `typical` > 0 (a running median, or the known noise of the evaluator, in reward units), or the
    median of s over the batch's alive groups. In [0, 1), 0 for dead groups (by their rewards; x_0 is only there so that
    this swaps with `signal_weight`, and is not read). ValueError: rewards not " g k"; typical <= 0.

    >>> spread_weight(torch.tensor([[0.0, 2.0], [0.0, 6.0], [1.0, 1.0]]), typical=1.0)
    tensor([0.5000, 0.7500, 0.0000])
    """
    if typical is not None:
        typical = require_number("typical", typical, low=0, open_low=True)
    values, finite = _groups(rewards)
    alive = ~_constant(values, finite)
    spread = (values - values.nanmean(1, keepdim=True)).square().nanmean(1).sqrt()
    middle = (typical if typical is not None else spread[alive].quantile(0.5)) if bool(alive.any()) else 1.0
    return torch.where(alive, spread / (spread + middle), 0.0).to(_finite_out(rewards))


# ---- one direction per noise level


class BinnedDirection(NamedTuple):
    """One direction per prompt and bin of steps. alive False: no bin of the group says anything, `value` is all 0."""

    value: Float[Tensor, " g n_bins *d"]
    alive: Bool[Tensor, " g"]


def joint_rms(covariance: Float[Tensor, " g n_bins *d"]) -> Float[Tensor, " g n_bins *d"]:
    """C_b/rms(C), one RMS over bins and latents: keeps how C_b falls off toward t = 0 (derived here). 0 stays 0.

    The first-order tilt of the velocity at time t is C_b/t: give `binned_direction` a function that divides first.
    ValueError: not " g n_bins *d".

    >>> joint_rms(torch.tensor([[[7.0], [1.0]]]))
    tensor([[[1.4000],
             [0.2000]]])
    """
    return _divided(covariance, 1)


def bin_rms(covariance: Float[Tensor, " g n_bins *d"]) -> Float[Tensor, " g n_bins *d"]:
    """C_b/rms(C_b): RMS 1 in every bin, however little it says (derived here). 0 stays 0.

    ValueError: not " g n_bins *d".

    >>> bin_rms(torch.tensor([[[7.0], [-2.0], [0.0]]])).flatten()
    tensor([ 1., -1.,  0.])
    """
    return _divided(covariance, 2)


def _divided(covariance: Tensor, axes: int) -> Tensor:
    """By the RMS over all axes after the first `axes`."""
    require_tensors(covariance=covariance)
    if covariance.ndim < 2:
        raise ValueError(f"covariance must be (g, n_bins, *d), got {tuple(covariance.shape)}")
    wide = covariance.detach().double()
    rms = _flat(wide, axes).square().mean(-1).sqrt().reshape(*covariance.shape[:axes], *[1] * (wide.ndim - axes))
    return torch.where(rms > 0, wide / rms, 0.0).to(_finite_out(covariance))


def _require_bins(bins: Sequence[int], x_0: Tensor, predicted: Tensor, finite: Tensor) -> list[int]:
    """The bin of each step; ValueError unless each of 0 .. n_bins - 1 is used and predicted is " g k s *d", finite."""
    require_tensors(predicted=predicted)
    if predicted.ndim != x_0.ndim + 1 or predicted.shape[:2] + predicted.shape[3:] != x_0.shape:
        raise ValueError(
            f"predicted must be (g, k, s, *d) with x_0's (g, k, *d): {shapes(x_0=x_0, predicted=predicted)}"
        )
    chosen = [require_count("a bin", b, low=0) for b in bins]
    if not chosen or len(chosen) != predicted.shape[2] or set(chosen) != set(range(max(chosen) + 1)):
        raise ValueError(
            f"bins must give each of {predicted.shape[2]} steps one of 0 .. n - 1, none left out: {chosen}"
        )
    bad = finite & ~_flat(torch.isfinite(predicted), 2).all(2)
    if bool(bad.any()):
        raise ValueError(
            f"predicted is not finite where the reward is, at (group, member) {bad.nonzero().tolist()[:8]}"
        )
    return chosen


def _binned(values: Tensor, finite: Tensor, x_0: Tensor, predicted: Tensor, bins: list[int]) -> Tensor:
    """C_b " g n_bins *d" in float64."""
    shape = (len(values), max(bins) + 1, *x_0.shape[2:])
    covariance = torch.zeros(shape, dtype=torch.float64, device=x_0.device)
    for group, (row, here) in enumerate(zip(values, finite)):
        if not bool(here.any()):
            continue
        weight = (row[here] - row[here].mean()) / here.sum()
        x, guess = x_0[group][here].detach().double(), predicted[group][here].detach()
        for b in range(shape[1]):
            steps = [i for i, mine in enumerate(bins) if mine == b]
            covariance[group, b] = torch.tensordot(weight, x - guess[:, steps].double().mean(1), dims=1)
    return covariance


def binned_covariance(
    rewards: Float[Tensor, " g k"],
    x_0: Float[Tensor, " g k *d"],
    predicted: Float[Tensor, " g k s *d"],
    bins: Sequence[int],
) -> Float[Tensor, " g n_bins *d"]:
    """C_b = mean over samples i and steps in bin b of (R_i - Rbar)(x_0i - predicted_i): the within-state covariance.

    Derived here: E[(R - ER)(x_0 - E[x_0|s])] = E_s Cov(R, x_0|s), what `reward_covariance` is without the part that
    the state s already knows. predicted[:, :, n] = predict_x_0(s, v_old(s), t_n) with s = interpolate(x_0, fresh noise,
    t_n): not a state of the sampler's own ODE path, on which x_0 is a function of s and nothing is left.
    E C_b = (k-1)/k E_s Cov. Where predicted is the same for all members, as at t = 1, C_b is exactly C.

    bins: for each step n its bin, 0 .. n_bins - 1, each used. A sample without reward may hold anything. Detached.
    ValueError: shapes; bins of another length, negative or with a gap; x_0 or predicted not finite where the reward is.

    >>> rewards, x_0 = torch.tensor([[1.0, 0.0]]), torch.tensor([[[2.0], [0.0]]])
    >>> binned_covariance(rewards, x_0, torch.zeros(1, 2, 1, 1), [0])  # nothing predicted: C itself
    tensor([[[0.5000]]])
    """
    values, finite = _require_groups(rewards, x_0)
    bins = _require_bins(bins, x_0, predicted, finite)
    return _binned(values, finite, x_0, predicted, bins).to(_finite_out(x_0))


def binned_direction(
    rewards: Float[Tensor, " g k"],
    x_0: Float[Tensor, " g k *d"],
    predicted: Float[Tensor, " g k s *d"],
    bins: Sequence[int],
    *,
    normalise: Callable[[Tensor], Tensor] = joint_rms,
    scale: float = 1.0,
) -> BinnedDirection:
    """(scale normalise(C_b), alive): a direction per prompt and noise level (derived here), C_b = `binned_covariance`.

    normalise: `joint_rms`, `bin_rms` or any function of C_b " g n_bins *d" that keeps its shape. A bin with
    rms(C_b) <= 1e-6 std(R) rms(x_0) is rounding and set to 0 first; alive False: dead rewards, or no bin left.
    ValueError: as `binned_covariance`; scale not finite; another shape from normalise.

    >>> rewards, x_0 = torch.tensor([[1.0, 0.0]]), torch.tensor([[[2.0], [0.0]]])
    >>> binned_direction(rewards, x_0, x_0[:, :, None], [0]).alive  # the state knows all of x_0
    tensor([False])
    """
    scale = require_number("scale", scale)
    values, finite = _require_groups(rewards, x_0)
    covariance = _binned(values, finite, x_0, predicted, _require_bins(bins, x_0, predicted, finite))
    floor = _covariances(values, finite, x_0)[1]
    says = (_flat(covariance, 2).square().mean(2).sqrt() > floor[:, None]) & ~_constant(values, finite)[:, None]
    says_there = says.reshape(*says.shape, *[1] * (covariance.ndim - 2))
    unit = normalise(torch.where(says_there, covariance, 0.0))
    if unit.shape != covariance.shape:
        raise ValueError(f"normalise must keep the shape {tuple(covariance.shape)}, got {tuple(unit.shape)}")
    return BinnedDirection(torch.where(says_there, scale * unit, 0.0).to(_finite_out(x_0)), says.any(1))
