"""From rewards to a training signal: advantages, optimality, and DiffusionART's aggregation-first direction.

Rewards come as " g k" (prompt-major groups, never guessed from a flat batch); latents as " g k *d". A reward that is nan or
inf means "no reward": its sample leaves every group statistic. Statistics are float64 inside, float32 or better outside.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from diffrl.checks import promote, require_number, require_same_shape, require_tensors, shapes

DEAD_RMS = 1e-6  # a covariance this small relative to std(R) rms(x_0) is rounding, not signal


def _groups(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """(float64 rewards with nan where missing, Bool finite); ValueError unless " g k"."""
    require_tensors(rewards=rewards)
    if rewards.ndim != 2:
        raise ValueError(f"rewards must be (g, k), one row per prompt, got {tuple(rewards.shape)}")
    finite = torch.isfinite(rewards)
    return torch.where(finite, rewards.detach().double(), math.nan), finite


def _constant(rewards: Tensor, finite: Tensor) -> Tensor:
    """Bool " g": fewer than two finite rewards, or all of them equal (max == min: a float std of equal numbers may not be 0)."""
    top = torch.where(finite, rewards, -math.inf).amax(1) if rewards.shape[1] else rewards.new_zeros(len(rewards))
    low = torch.where(finite, rewards, math.inf).amin(1) if rewards.shape[1] else rewards.new_zeros(len(rewards))
    return (finite.sum(1) < 2) | (top == low)


def dead_groups(rewards: Float[Tensor, " g k"]) -> Bool[Tensor, " g"]:
    """True where a group of rewards says nothing: fewer than two finite ones, or all of them equal.

    >>> dead_groups(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
    tensor([ True, False])
    """
    return _constant(*_groups(rewards))


def group_std(rewards: Float[Tensor, " g k"]) -> Float[Tensor, " g 1"]:
    """Population std of each group's finite rewards (GRPO, MixGRPO, DanceGRPO up to sqrt((k-1)/k)); missing ones are nan.

    >>> group_std(torch.tensor([[1.0, 3.0, float("nan")]]))
    tensor([[1.]])
    """
    (rewards,) = promote(rewards)
    centred = rewards - rewards.nanmean(1, keepdim=True)
    return (centred**2).nanmean(1, keepdim=True).sqrt()


def batch_std(rewards: Float[Tensor, " g k"]) -> Float[Tensor, " 1 1"]:
    """Population std of all finite rewards of the batch about their common mean (Flow-GRPO, DiffusionNFT, AWM).

    Two to five times the per-group one on many prompts, so advantages shrink by as much.

    >>> batch_std(torch.tensor([[1.0, 3.0], [5.0, 7.0]]))
    tensor([[2.2361]])
    """
    (rewards,) = promote(rewards)
    centred = rewards - rewards.nanmean()
    return (centred**2).nanmean().sqrt().reshape(1, 1)


def no_spread(rewards: Float[Tensor, " g k"]) -> Float[Tensor, " g 1"]:
    """No division at all: with it, `group_advantages` returns R - Rbar exactly, eps unused (Dr. GRPO's form).

    >>> group_advantages(torch.tensor([[1.0, 4.0]]), spread=no_spread)
    tensor([[-1.5000,  1.5000]])
    """
    return torch.ones_like(promote(rewards)[0][:, :1])


def group_advantages(
    rewards: Float[Tensor, " g k"], *, spread: Callable[[Tensor], Tensor] = group_std, eps: float = 1e-4
) -> Float[Tensor, " g k"]:
    """A = (R - Rbar_group)/(spread + eps), the group-relative advantage (GRPO 2402.03300; Flow-GRPO 2505.05470 eq. 6).

    spread: `group_std`, `batch_std`, `no_spread`, or any function of float64 rewards " g k" (nan where missing) that
    returns something broadcasting to " g 1". A sample without reward gets 0 and enters no statistic; a constant group
    or one with a single reward is exactly 0. ValueError: rewards not " g k", eps < 0, a spread of another shape.

    >>> group_advantages(torch.tensor([[1.0, 2.0, 4.0, float("nan")]]))
    tensor([[-1.0690, -0.2672,  1.3362,  0.0000]])
    """
    eps = require_number("eps", eps, low=0)
    values, finite = _groups(rewards)
    dead = _constant(values, finite)
    centred = values - values.nanmean(1, keepdim=True)
    scale: Tensor | float = 1.0
    if spread is not no_spread:
        scale = torch.as_tensor(spread(values), dtype=values.dtype, device=values.device)
        shape = tuple(scale.shape)  # (g,) would meet axis k
        if len(shape) > 2 or shape[-1:] not in ((), (1,)) or shape[:-1] not in ((), (1,), (len(values),)):
            raise ValueError(
                f"spread must return something that broadcasts to ({len(values)}, 1), got {shapes(spread=scale)}"
            )
        scale = scale + eps
    advantages = torch.where(finite & ~dead[:, None], centred / scale, 0.0)
    return advantages.to(torch.promote_types(rewards.dtype, torch.float32))


def optimality(advantages: Float[Tensor, " *b"], *, clip: float = 5.0) -> Float[Tensor, " *b"]:
    """r = clip(A/clip, -1, 1)/2 + 1/2 in [0, 1]: DiffusionNFT's probability of being optimal (2509.16117 eq. 7).

    With |A| well below `clip` every r stays near 1/2: look at its min and max. ValueError: clip <= 0.

    >>> optimality(torch.tensor([-6.0, -1.0, 0.0, 2.5]))
    tensor([0.0000, 0.4000, 0.5000, 0.7500])
    """
    require_tensors(advantages=advantages)
    clip = require_number("clip", clip, low=0, open_low=True)
    (advantages,) = promote(advantages)
    return (advantages / clip).clamp(-1, 1) / 2 + 0.5


def _require_groups(rewards: Tensor, x_0: Tensor) -> tuple[Tensor, Tensor]:
    values, finite = _groups(rewards)
    require_tensors(x_0=x_0)
    if x_0.ndim < 2 or x_0.shape[:2] != rewards.shape:
        raise ValueError(f"x_0 must be (g, k, *d) with rewards' (g, k): {shapes(rewards=rewards, x_0=x_0)}")
    usable = torch.isfinite(x_0).flatten(2).all(2) if x_0.ndim > 2 else torch.isfinite(x_0)
    if bool((finite & ~usable).any()):
        where = (finite & ~usable).nonzero().tolist()
        raise ValueError(f"x_0 is not finite where the reward is, at (group, member) {where[:8]}")
    return values, finite


def _covariance(rewards: Tensor, finite: Tensor, x_0: Tensor) -> tuple[Tensor, Tensor]:
    """One group's (covariance " *d", rms of its x_0) in float64, over the finite rewards only."""
    r, x = rewards[finite], x_0[finite].detach().double()
    if len(r) == 0:
        return torch.zeros_like(x_0[0] if len(x_0) else x_0.sum(0), dtype=torch.float64), r.new_zeros(())
    weight = (r - r.mean()).reshape(-1, *[1] * (x.ndim - 1))
    return (weight * (x - x.mean(0))).mean(0), (x**2).mean().sqrt()


def reward_covariance(rewards: Float[Tensor, " g k"], x_0: Float[Tensor, " g k *d"]) -> Float[Tensor, " g *d"]:
    """C = (1/k) sum_i (R_i - Rbar)(x_0i - xbar_0), k, Rbar, xbar over the finite rewards of the group (2610.12572).

    Cov(R, x_0 | c) is the first-order change of E[x_0] under the tilt p exp(tau R) (Lemma 2). Detached, float32 or
    better. Samples without reward may hold nan latents. ValueError: shapes; x_0 not finite where the reward is.

    >>> reward_covariance(torch.tensor([[1.0, 0.0]]), torch.tensor([[[2.0], [0.0]]]))
    tensor([[0.5000]])
    """
    values, finite = _require_groups(rewards, x_0)
    out = torch.promote_types(x_0.dtype, torch.float32)
    if len(values) == 0:
        return x_0.new_zeros((0, *x_0.shape[2:]), dtype=out)
    return torch.stack([_covariance(r, f, x)[0] for r, f, x in zip(values, finite, x_0)]).to(out)


class Direction(NamedTuple):
    """One direction in data space per prompt. alive False: the group says nothing, and `value` is exactly 0."""

    value: Float[Tensor, " g *d"]
    alive: Bool[Tensor, " g"]


def aggregate_direction(
    rewards: Float[Tensor, " g k"],
    x_0: Float[Tensor, " g k *d"],
    *,
    scale: float = 1.0,
    rms_axes: Sequence[int] | None = None,
) -> Direction:
    """G(c) = scale C/rms(C): DiffusionART's aggregation-first direction, normalised once, after aggregating (2610.12572).

    C = `reward_covariance`. rms over all latent axes jointly, or over `rms_axes` of *d (per frame: every axis but the
    frame's). Invariant under R -> aR + b (a > 0) and x_0 -> a x_0 + const; R -> -R flips it. The whole group must be
    here: directions of parts do not add up.

    Dead groups (value exactly 0, alive False): fewer than two finite rewards, all finite rewards equal, or
    rms(C) <= 1e-6 std(R) rms(x_0). ValueError: shapes, scale not finite, rms_axes outside the latent axes.

    >>> aggregate_direction(torch.tensor([[9.0, 7.0], [1.0, 1.0]]), torch.tensor([[[7.0, 1.0], [0.0, 0.0]]] * 2))
    Direction(value=tensor([[1.4000, 0.2000],
            [0.0000, 0.0000]]), alive=tensor([ True, False]))
    """
    scale = require_number("scale", scale)
    values, finite = _require_groups(rewards, x_0)
    latent_axes = x_0.ndim - 2
    axes = (
        range(latent_axes) if rms_axes is None else [int(a) % latent_axes if latent_axes else int(a) for a in rms_axes]
    )
    if rms_axes is not None and (
        len(set(axes)) != len(rms_axes) or any(not -latent_axes <= a < latent_axes for a in rms_axes)
    ):
        raise ValueError(f"rms_axes must be distinct latent axes of {tuple(x_0.shape[2:])}, got {tuple(rms_axes)}")
    out = torch.promote_types(x_0.dtype, torch.float32)
    value = x_0.new_zeros((len(values), *x_0.shape[2:]), dtype=out)
    alive = ~_constant(values, finite)
    for i in range(len(values)):
        if not alive[i]:
            continue
        c, size = _covariance(values[i], finite[i], x_0[i])
        std = values[i][finite[i]].std(correction=0)
        if not bool((c**2).mean().sqrt() > DEAD_RMS * std * size):
            alive[i] = False
            continue
        rms = (c**2).mean(tuple(axes), keepdim=True).sqrt() if axes else c.abs()
        value[i] = torch.where(rms > 0, scale * c / rms, 0.0).to(out)
    return Direction(value, alive)


def pair_labels(rewards: Float[Tensor, " g k"], *, generator: torch.Generator | None = None) -> Float[Tensor, " g k"]:
    """Win/lose labels of seeded random disjoint pairs inside each group: 1 winner, 0 loser, 1/2 each on a tie (2610.12572).

    Pairs are drawn among the finite rewards; unpaired or missing samples get nan ("no reward"). Used as rewards, the
    labels give C = (1/2k) sum over pairs of (x_w - x_l); at k = 2 the direction equals the scalar one. generator None
    means one seeded with 0, so the function stays pure. ValueError: rewards not " g k".

    >>> pair_labels(torch.tensor([[3.0, 1.0], [2.0, 2.0]])).tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    """
    values, finite = _groups(rewards)
    if generator is None:
        generator = torch.Generator(device=rewards.device).manual_seed(0)
    draws = torch.rand(values.shape, generator=generator, device=generator.device).to(values)
    order = torch.where(finite, draws, math.inf).argsort(dim=1, stable=True)
    labels = torch.full_like(values, math.nan)
    for group, (row, n) in enumerate(zip(order, finite.sum(1).tolist())):
        a, b = row[: n - n % 2 : 2], row[1 : n - n % 2 : 2]
        won = (torch.sign(values[group, a] - values[group, b]) + 1) / 2
        labels[group, a], labels[group, b] = won, 1 - won
    return labels.to(torch.promote_types(rewards.dtype, torch.float32))


def guided_velocity(v_old: Float[Tensor, " b *d"], direction: Float[Tensor, " b *d"]) -> Float[Tensor, " b *d"]:
    """target = v_old - direction: a data-space direction lowers v = eps - x_0 (the sign trap; the paper's u has a plus).

    Moving the predicted x_0 = x_t - t v by t * direction. Detached. ValueError: shapes differ.

    >>> guided_velocity(torch.tensor([[1.0]]), torch.tensor([[0.25]]))
    tensor([[0.7500]])
    """
    require_same_shape(v_old=v_old, direction=direction)
    v_old, direction = promote(v_old, direction)
    return (v_old - direction).detach()
