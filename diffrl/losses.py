"""Per-sample losses: " b", mean over latent axes, unreduced. `masked_mean` is the only reduction in the library."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor

from diffrl.checks import promote, require_batch, require_number, require_rows, shapes, time_rows
from diffrl.sampling import latent_mean, predict_x_0


def velocity_matching(v: Float[Tensor, " b *d"], target: Float[Tensor, " b *d"]) -> Float[Tensor, " b"]:
    """mean_d (v - target)^2: regression on a frozen target velocity (flow matching 2210.02747; ART's loss 2610.12572).

    With target = v_old - G and v = v_old it is mean(G^2) = 1 for a unit-RMS direction: the first-update wiring check.
    float32 or better. ValueError: shapes differ.

    >>> velocity_matching(torch.zeros(1, 2), torch.tensor([[1.0, 3.0]]))
    tensor([5.])
    """
    require_batch(v=v, target=target)
    v, target = promote(v, target)
    return latent_mean((v - target) ** 2)


def inverse_abs_error(error: Float[Tensor, " b *d"]) -> Float[Tensor, " b *one"]:
    """1/max(mean_d |e|, 1e-5), detached: DiffusionNFT's published self-normalising weight; broadcasts to the error.

    >>> inverse_abs_error(torch.tensor([[1.0, -3.0], [0.0, 0.0]])).tolist()
    [[0.5], [100000.0]]
    """
    size = latent_mean(error.detach().abs()).clamp_min(1e-5)
    return (1 / size).reshape(-1, *[1] * (error.ndim - 1))


def flat_weight(error: Float[Tensor, " b *d"]) -> Float[Tensor, " b *one"]:
    """Weight 1: plain squared error, for which Propositions 1 and 2 hold exactly.

    >>> flat_weight(torch.tensor([[1.0, -3.0]]))
    tensor([[1.]])
    """
    (error,) = promote(error)
    return error.new_ones(len(error), *[1] * (error.ndim - 1))


Weight = Callable[[Tensor], Tensor]


def _weighted(error: Tensor, weight: Weight) -> Float[Tensor, " b"]:
    """mean_d w(e) e^2; ValueError unless w(e) is one number or of the error's rank: a " b" weight would meet the last axis."""
    w = torch.as_tensor(weight(error), dtype=error.dtype, device=error.device)
    if w.ndim and (w.ndim != error.ndim or any(n not in (1, m) for n, m in zip(w.shape, error.shape, strict=True))):
        raise ValueError(
            f"weight(error) must be one number or have the error's rank, every axis 1 or equal: {shapes(weight=w, error=error)}"
        )
    return latent_mean(w * error**2)


def _nft_branches(v, v_old, x_t, x_0, t, r, beta: float, weight: Weight) -> tuple[Tensor, Tensor, Tensor]:
    """(L+ " b", L- " b", r " b"): the two weighted x_0 errors of v(+-) = v_old +- beta (v - v_old), v_old detached."""
    b = require_batch(v=v, v_old=v_old, x_t=x_t, x_0=x_0)
    require_rows(b, r=r)
    beta = require_number("beta", beta, low=0, open_low=True)
    if not bool(((r >= 0) & (r <= 1)).all()):
        raise ValueError(f"r must be in [0, 1], got {r.tolist()}")
    v, v_old, x_t, x_0, r = promote(v, v_old, x_t, x_0, r)
    t, v_old = time_rows("t", t, x_t), v_old.detach()
    shift = beta * (v - v_old)
    plus, minus = predict_x_0(x_t, v_old + shift, t) - x_0, predict_x_0(x_t, v_old - shift, t) - x_0
    return _weighted(plus, weight), _weighted(minus, weight), r


def nft(v, v_old, x_t, x_0, t, r, *, beta: float = 1.0, weight: Weight = inverse_abs_error) -> Float[Tensor, " b"]:
    """[r L(+) + (1 - r) L(-)]/beta, L(+-) = mean_d w(e) e^2, e = x_t - t v(+-) - x_0 (DiffusionNFT 2509.16117 eq. 8).

    v, v_old, x_t, x_0: " b *d"; t in [0, 1]; r " b" in [0, 1] (`optimality`); v(+-) = v_old +- beta (v - v_old), v_old
    detached. weight: `inverse_abs_error` (as published), `flat_weight`, or any function of the error whose value has its
    rank, each axis 1 or equal. The published factor 5 is the algorithm's.
    ValueError: shapes (the weight's too), t or r outside [0, 1], beta <= 0.

    >>> zero, x_t = torch.zeros(1, 1), torch.tensor([[2.0]])  # v = v_old: e = 2 on both branches, w = 1/2
    >>> nft(zero, zero, x_t, zero, 0.5, torch.tensor([0.25]))
    tensor([2.])
    """
    plus, minus, r = _nft_branches(v, v_old, x_t, x_0, t, r, beta, weight)
    return (r * plus + (1 - r) * minus) / beta


def nft_positive(
    v, v_old, x_t, x_0, t, r, *, beta: float = 1.0, weight: Weight = inverse_abs_error
) -> Float[Tensor, " b"]:
    """r L(+)/beta: `nft`'s positive branch alone, whose force is g + q e (it contracts). Arguments as `nft`.

    >>> zero, x_t = torch.zeros(1, 1), torch.tensor([[2.0]])
    >>> nft_positive(zero, zero, x_t, zero, 0.5, torch.tensor([0.25]))
    tensor([0.5000])
    """
    plus, _, r = _nft_branches(v, v_old, x_t, x_0, t, r, beta, weight)
    return r * plus / beta


def nft_negative(
    v, v_old, x_t, x_0, t, r, *, beta: float = 1.0, weight: Weight = inverse_abs_error
) -> Float[Tensor, " b"]:
    """(1 - r) L(-)/beta: `nft`'s negative branch alone, whose force is g - (1 - q) e (it explodes). Arguments as `nft`.

    >>> zero, x_t = torch.zeros(1, 1), torch.tensor([[2.0]])
    >>> nft_negative(zero, zero, x_t, zero, 0.5, torch.tensor([0.25]))
    tensor([1.5000])
    """
    _, minus, r = _nft_branches(v, v_old, x_t, x_0, t, r, beta, weight)
    return (1 - r) * minus / beta


def clipped_ratio(log_prob, log_prob_old, advantages, *, clip: float = 1e-4) -> Float[Tensor, " b"]:
    """max(-A rho, -A clip(rho, 1 - c, 1 + c)), rho = exp(log_prob - log_prob_old): PPO's clipped loss (1707.06347 eq. 7).

    All " b"; log_prob_old and advantages detached. With mean-reduced log-probs rho = exp(log-ratio/D), hence clips of
    1e-4 to 1e-6. A row of advantage 0 has loss and gradient 0 whatever its log-probs, and a row whose gradient the clip
    removes has gradient 0 also where rho overflows. ValueError: shapes differ, clip <= 0.

    >>> clipped_ratio(torch.zeros(1), torch.zeros(1), torch.tensor([2.0]))
    tensor([-2.])
    """
    b = require_batch(log_prob=log_prob, log_prob_old=log_prob_old, advantages=advantages)
    require_rows(b, log_prob=log_prob)
    log_prob, log_prob_old, advantages = promote(log_prob, log_prob_old, advantages)
    return _clipped(log_prob - log_prob_old.detach(), advantages.detach(), clip)


def _clipped(log_ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """PPO's loss of exp(log_ratio), which where the loss does not depend on it is replaced before it can overflow."""
    clip = require_number("clip", clip, low=0, open_low=True)
    beyond = math.log1p(clip) + 1  # A > 0: the clip has removed the gradient before, so the value stays
    settled = (advantages > 0) & (log_ratio > beyond)
    log_ratio = torch.where(advantages == 0, torch.zeros_like(log_ratio), log_ratio)
    ratio = torch.exp(torch.where(settled, torch.full_like(log_ratio, beyond), log_ratio))
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip))


def guard_clipped_ratio(log_prob, log_prob_old, mean, mean_old, std, advantages, *, clip: float) -> Float[Tensor, " b"]:
    """`clipped_ratio` with GRPO-Guard's normalised ratio (2510.22319 eq. 9), bias removed per sample:

        rho = exp((log_prob - log_prob_old + mean_d (mean - mean_old)^2/(2 std^2)) std)

    For a Gaussian step scored by its mean log-density the exponent is mean(z dmu), of zero mean. mean, mean_old " b *d";
    std " b" > 0. The algorithm weighs the loss by 1/(t - t_next). ValueError: shapes, std <= 0, clip <= 0.

    >>> one, zero, mean = torch.ones(1), torch.zeros(1), torch.ones(1, 1)
    >>> guard_clipped_ratio(-one / 2, zero, mean, 0 * mean, one, 3 * one, clip=0.1)  # the bias is 1/2: rho 1
    tensor([-3.])
    """
    b = require_batch(mean=mean, mean_old=mean_old)
    require_rows(b, log_prob=log_prob, log_prob_old=log_prob_old, std=std, advantages=advantages)
    if not bool((torch.isfinite(std) & (std > 0)).all()):
        raise ValueError(f"the guard needs a Gaussian step, std > 0 everywhere, got {std.tolist()}")
    log_prob, log_prob_old, mean, mean_old, std, advantages = promote(
        log_prob, log_prob_old, mean, mean_old, std, advantages
    )
    bias = latent_mean((mean - mean_old.detach()) ** 2) / (2 * std**2)
    return _clipped((log_prob - log_prob_old.detach() + bias) * std, advantages.detach(), clip)


def advantage_weighted_matching(v, v_old, noise, x_0, advantages, *, clip: float = 1e-4) -> Float[Tensor, " b"]:
    """`clipped_ratio` on lp = -mean_d (v - (eps - x_0))^2, old and new on the same (eps, t): AWM (2509.25050).

    v, v_old, noise, x_0 " b *d"; advantages " b". On-policy its gradient is A grad MSE. v_old detached.
    ValueError: shapes differ, clip <= 0.

    >>> v, a = torch.ones(1, 1), torch.tensor([2.0])
    >>> advantage_weighted_matching(v, v, 3 * v, 0 * v, a)  # on-policy the ratio is 1
    tensor([-2.])
    """
    b = require_batch(v=v, v_old=v_old, noise=noise, x_0=x_0)
    require_rows(b, advantages=advantages)
    noise, x_0 = promote(noise, x_0)
    target = (noise - x_0).detach()
    return clipped_ratio(
        -velocity_matching(v, target), -velocity_matching(v_old.detach(), target), advantages, clip=clip
    )


def masked_mean(values: Float[Tensor, " b"], keep: Bool[Tensor, " b"] | Num[Tensor, " b"]) -> Float[Tensor, ""]:
    """sum_i keep_i values_i / b: masked rows stay in the denominator, so a mask never raises the others' step size.

    keep: Bool, or weights >= 0. Rows with keep False or weight 0 may hold nan or inf: they give value 0 and gradient 0.
    b = 0 or all masked: 0, never nan. ValueError: not two " b" tensors of equal length, a weight negative or not finite.

    >>> masked_mean(torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([True, True, False]))
    tensor(1.3333)
    """
    tensors = isinstance(values, Tensor) and isinstance(keep, Tensor)
    if not tensors or values.ndim != 1 or keep.shape != values.shape:
        raise ValueError(f"values and keep must both be (b,): {shapes(values=values, keep=keep)}")
    (values,) = promote(values)
    weight = keep.detach().to(values.dtype)
    if not bool((torch.isfinite(weight) & (weight >= 0)).all()):
        raise ValueError(f"weights must be finite and >= 0, got {keep.tolist()}")
    kept = torch.where(weight > 0, values, torch.zeros_like(values))
    return (kept * weight).sum() / max(len(values), 1)
