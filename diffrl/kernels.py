"""One step and its density: conversions along the path, transition kernels, log-probabilities and KLs.

Every kernel is one function `(x_t, v, t, t_next) -> (mean, std)`, used alike by rollout, replay and KL. Equations are in
the library's convention (x_t = (1 - t) x_0 + t eps, v = eps - x_0, D = t - t_next > 0). `diffrl.sampling` offers all of it.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from diffrl.checks import column, promote, require_batch, require_number, require_rows, time_pair, time_rows

Time = Any  # float, 0-d tensor or " b" tensor


def interpolate(x_0: Float[Tensor, " b *d"], noise: Float[Tensor, " b *d"], t: Time) -> Float[Tensor, " b *d"]:
    """x_t = (1 - t) x_0 + t eps: the straight path from data (t = 0) to noise (t = 1), rectified flow 2209.03003 eq. 1.

    t in [0, 1]: float, 0-d or " b". Returns float32 or better. ValueError: shapes differ, t outside [0, 1].

    >>> interpolate(torch.zeros(1, 2), torch.ones(1, 2), 0.25)
    tensor([[0.2500, 0.2500]])
    """
    require_batch(x_0=x_0, noise=noise)
    x_0, noise = promote(x_0, noise)
    t = column(time_rows("t", t, x_0), x_0)
    return (1 - t) * x_0 + t * noise


def predict_x_0(x_t: Float[Tensor, " b *d"], v: Float[Tensor, " b *d"], t: Time) -> Float[Tensor, " b *d"]:
    """x_0 = x_t - t v, the end of the straight path through x_t with velocity v = eps - x_0 (derived from the convention).

    t in [0, 1]: float, 0-d or " b". ValueError: shapes differ, t outside [0, 1].

    >>> predict_x_0(torch.tensor([[0.25]]), torch.tensor([[1.0]]), 0.25)
    tensor([[0.]])
    """
    require_batch(x_t=x_t, v=v)
    x_t, v = promote(x_t, v)
    return x_t - column(time_rows("t", t, x_t), x_t) * v


def predict_noise(x_t: Float[Tensor, " b *d"], v: Float[Tensor, " b *d"], t: Time) -> Float[Tensor, " b *d"]:
    """eps = x_t + (1 - t) v, the noise end of the same path (derived from the convention).

    t in [0, 1]: float, 0-d or " b". ValueError: shapes differ, t outside [0, 1].

    >>> predict_noise(torch.tensor([[0.25]]), torch.tensor([[1.0]]), 0.25)
    tensor([[1.]])
    """
    require_batch(x_t=x_t, v=v)
    x_t, v = promote(x_t, v)
    return x_t + (1 - column(time_rows("t", t, x_t), x_t)) * v


def euler_step(x_t: Float[Tensor, " b *d"], v: Float[Tensor, " b *d"], t: Time, t_next: Time):
    """mean = x_t - D v, std = 0: the first-order step of the probability-flow ODE dx/dt = v.

    Returns (mean " b *d", std " b"). ValueError: shapes differ, not 0 <= t_next < t <= 1.

    >>> euler_step(torch.ones(1, 1), torch.ones(1, 1), 0.5, 0.25)
    (tensor([[0.7500]]), tensor([0.]))
    """
    require_batch(x_t=x_t, v=v)
    x_t, v = promote(x_t, v)
    now, then = time_pair(t, t_next, x_t)
    return x_t - column(now - then, x_t) * v, torch.zeros_like(now)


def flow_sde_step(x_t: Float[Tensor, " b *d"], v: Float[Tensor, " b *d"], t: Time, t_next: Time, *, eta: float = 0.7):
    """Flow-GRPO's SDE (2505.05470 eq. 9): s2 = eta^2 t/(1 - t*), std = eta sqrt(t D/(1 - t*)),

        mean = x_t (1 - s2 D/(2t)) - v (1 + s2 (1 - t)/(2t)) D,      t* = t, but t* = t_next where t = 1.

    std is the whole transition's. At t = 1 it is eta exactly, whatever the grid (the published choice: their sigmas[1]).
    Returns (mean " b *d", std " b"). ValueError: shapes differ, not 0 <= t_next < t <= 1, eta < 0.

    >>> flow_sde_step(torch.ones(1, 1), torch.ones(1, 1), 1.0, 0.5)  # s2 = .98, D = .5
    (tensor([[0.2550]]), tensor([0.7000]))
    """
    require_batch(x_t=x_t, v=v)
    eta = require_number("eta", eta, low=0)
    x_t, v = promote(x_t, v)
    now, then = time_pair(t, t_next, x_t)
    delta = now - then
    rest = 1 - torch.where(now == 1, then, now)
    s2 = eta**2 * now / rest
    on_x = 1 - s2 * delta / (2 * now)
    on_v = (1 + s2 * (1 - now) / (2 * now)) * delta
    return column(on_x, x_t) * x_t - column(on_v, x_t) * v, eta * torch.sqrt(now * delta / rest)


def dance_sde_step(x_t: Float[Tensor, " b *d"], v: Float[Tensor, " b *d"], t: Time, t_next: Time, *, eta: float = 0.3):
    """DanceGRPO's SDE with constant noise (2505.07818 eq. 8): std = eta sqrt(D),

        mean = x_t - D v - (eta^2/2) D (x_t + (1 - t) v)/t.

    Returns (mean " b *d", std " b"). ValueError: shapes differ, not 0 <= t_next < t <= 1, eta < 0.

    >>> dance_sde_step(torch.ones(1, 1), torch.ones(1, 1), 0.5, 0.25, eta=0.4)
    (tensor([[0.6900]]), tensor([0.2000]))
    """
    require_batch(x_t=x_t, v=v)
    eta = require_number("eta", eta, low=0)
    x_t, v = promote(x_t, v)
    now, then = time_pair(t, t_next, x_t)
    delta = now - then
    pull = eta**2 / 2 * delta / now
    mean = column(1 - pull, x_t) * x_t - column(delta + pull * (1 - now), x_t) * v
    return mean, eta * torch.sqrt(delta)


def cps_step(x_t: Float[Tensor, " b *d"], v: Float[Tensor, " b *d"], t: Time, t_next: Time, *, eta: float = 0.8):
    """Coefficients-preserving sampling (2509.05952): std = t_next sin(eta pi/2),

        mean = (1 - t_next) (x_t - t v) + t_next cos(eta pi/2) (x_t + (1 - t) v).

    The coefficient on noise stays t_next; the marginals do not stay p_t (E[eps|x] has less than unit variance). std is 0
    on the step that ends at t = 0. Returns (mean " b *d", std " b"). ValueError: as the others, eta outside [0, 1].

    >>> cps_step(torch.ones(1, 1), torch.ones(1, 1), 0.5, 0.25, eta=1.0)  # all noise is fresh: mean (1 - .25) x_0
    (tensor([[0.3750]]), tensor([0.2500]))
    """
    require_batch(x_t=x_t, v=v)
    eta = require_number("eta", eta, low=0, high=1)
    x_t, v = promote(x_t, v)
    now, then = time_pair(t, t_next, x_t)
    kept = then * math.cos(eta * math.pi / 2)
    x_0 = x_t - column(now, x_t) * v
    noise = x_t + column(1 - now, x_t) * v
    return column(1 - then, x_t) * x_0 + column(kept, x_t) * noise, then * math.sin(eta * math.pi / 2)


class Past(NamedTuple):
    """What a multistep kernel remembers of the step before: its data prediction and its time, one per row.

    t in (the next step's t, 1]; inf marks a row without a past, whose x_0 is not read.
    """

    x_0: Float[Tensor, " b *d"]
    t: Float[Tensor, " b"]


def dpm2_step(
    x_t: Float[Tensor, " b *d"], v: Float[Tensor, " b *d"], t: Time, t_next: Time, *, past: Past | None = None
):
    """DPM-Solver++(2M) with data prediction (2211.01095 algorithm 2), the ODE solver of DiffusionNFT's rollouts; std = 0.

        mean = x_t - D v + (D/t) (h/(2 h_past)) (m - past.x_0),      m = x_t - t v,
        h = lambda(t_next) - lambda(t),  h_past = lambda(t) - lambda(past.t),  lambda(t) = log((1 - t)/t).

    It is the published sigma_next/sigma x - alpha_next (e^-h - 1) (m + (m - past.x_0) h/(2 h_past)) in our convention: the
    Euler step plus what the prediction, extrapolated linearly in lambda to the middle of the step, adds. Global error
    O(D^2) inside the path, O(D^2 log 1/D) on a grid from 1 to 0 (derived: there steps in lambda do not become small).
    The correction is exactly 0, and the step Euler's to the bit, where there is no past (None, or past.t = inf in that
    row), where past.t = 1 (h_past is infinite), and where t_next = 0: the published solver ends by one first-order step
    (its `lower_order_final`), whose result is the data prediction m.

    x_t, v " b *d"; t, t_next: float, 0-d or " b"; past: `Past` of the step before, never across a stochastic step.
    `rollout` hands it over. Returns (mean " b *d", std " b"). ValueError: shapes differ, not 0 <= t_next < t <= 1, past
    of another shape, past.t not in (t, 1] or inf.

    >>> x, v = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    >>> dpm2_step(x, v, 0.5, 0.2, past=Past(x - 1, torch.tensor([0.8])))[0]  # x + (0.3/0.5) (1/2) (1 - 0)
    tensor([[1.3000]], dtype=torch.float64)
    """
    if past is None:
        return euler_step(x_t, v, t, t_next)
    x_t, v, past_x_0 = _checked_past(past, x_t, v)
    mean, std = euler_step(x_t, v, t, t_next)
    now, then = time_pair(t, t_next, x_t)
    before = past.t.to(x_t)
    if not bool(((before > now) & ((before <= 1) | (before == math.inf))).all()):
        raise ValueError(f"past.t must be in (t, 1], or inf for no past: past.t {before.tolist()}, t {now.tolist()}")
    second = (before < 1) & (then > 0)  # elsewhere the correction is 0, its limit or the published choice
    gain = column((now - then) / now * _half_step_ratio(before, now, then, where=second), x_t)
    moved = predict_x_0(x_t, v, now) - past_x_0
    return mean + torch.where(column(second, x_t), gain * moved, torch.zeros_like(moved)), std


def _checked_past(past: Past, x_t: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """(x_t, v, past.x_0) in one dtype; ValueError unless past is a `Past` of their shape."""
    if not isinstance(past, Past):
        raise ValueError(f"past must be None or Past(x_0, t) of the step before, got {past!r}")
    require_rows(require_batch(x_t=x_t, v=v, past_x_0=past.x_0), past_t=past.t)
    return promote(x_t, v, past.x_0)


def _half_step_ratio(before: Tensor, now: Tensor, then: Tensor, *, where: Tensor) -> Tensor:
    """h/(2 h_past) " b" in lambda = log((1 - t)/t); float64 inside, as near logarithms cancel; anything finite off `where`."""
    stand_in = torch.tensor([[0.75], [0.5], [0.25]], dtype=torch.float64, device=now.device)
    past, here, ahead = -torch.logit(torch.where(where, torch.stack([before, now, then]).double(), stand_in))
    return ((ahead - here) / (2 * (here - past))).to(now.dtype)


def latent_mean(x: Float[Tensor, " b *d"]) -> Float[Tensor, " b"]:
    """Mean over all latent axes. What every peer uses for log-probabilities: ratios are then exp(log-ratio / n), n numbers.

    >>> latent_mean(torch.tensor([[[1.0, 3.0], [4.0, 4.0]]]))
    tensor([3.])
    """
    (x,) = promote(x)
    return x.flatten(1).mean(1) if x.ndim > 1 else x


def latent_sum(x: Float[Tensor, " b *d"]) -> Float[Tensor, " b"]:
    """Sum over all latent axes: the exact joint log-density; clip ranges then depend on the resolution.

    >>> latent_sum(torch.tensor([[[1.0, 3.0], [4.0, 4.0]]]))
    tensor([12.])
    """
    (x,) = promote(x)
    return x.flatten(1).sum(1) if x.ndim > 1 else x


def transition_log_prob(
    x_next: Float[Tensor, " b *d"],
    mean: Float[Tensor, " b *d"],
    std: Float[Tensor, " b"],
    *,
    reduce: Callable[[Tensor], Tensor] = latent_mean,
) -> Float[Tensor, " b"]:
    """reduce_d[-(x_next - mean)^2/(2 std^2) - log std - log(2 pi)/2], the exact Normal log-density, constants kept.

    reduce: `latent_mean` (default: does not grow with resolution, so clip ranges carry over) or `latent_sum`.
    nan where std = 0 (a deterministic step has no density). ValueError: shapes differ, std negative or not finite.

    >>> transition_log_prob(torch.zeros(1, 5), torch.zeros(1, 5), torch.ones(1))  # -log(2 pi)/2, whatever the size
    tensor([-0.9189])
    """
    b = require_batch(x_next=x_next, mean=mean)
    require_rows(b, std=std)
    x_next, mean, std = promote(x_next, mean, std)
    safe = column(_positive(std), x_next)
    log_prob = reduce(-((x_next - mean) ** 2) / (2 * safe**2) - torch.log(safe) - math.log(2 * math.pi) / 2)
    return torch.where(std > 0, log_prob, torch.full_like(log_prob, math.nan))


def transition_kl(
    mean_p: Float[Tensor, " b *d"],
    mean_q: Float[Tensor, " b *d"],
    std: Float[Tensor, " b"],
    *,
    reduce: Callable[[Tensor], Tensor] = latent_mean,
) -> Float[Tensor, " b"]:
    """reduce_d[(mean_p - mean_q)^2/(2 std^2)]: KL of two Gaussian transitions with equal std (hence symmetric).

    nan where std = 0. ValueError: shapes differ, std negative or not finite.

    >>> transition_kl(torch.tensor([[2.0]]), torch.tensor([[0.0]]), torch.tensor([1.0]))
    tensor([2.])
    """
    b = require_batch(mean_p=mean_p, mean_q=mean_q)
    require_rows(b, std=std)
    mean_p, mean_q, std = promote(mean_p, mean_q, std)
    kl = reduce((mean_p - mean_q) ** 2 / (2 * column(_positive(std), mean_p) ** 2))
    return torch.where(std > 0, kl, torch.full_like(kl, math.nan))


def _positive(std: Tensor) -> Tensor:
    """std with zeros replaced by 1, so that no nan enters the graph before `where` selects; refuses what is no std."""
    if not bool((torch.isfinite(std) & (std >= 0)).all()):
        raise ValueError(f"std must be finite and >= 0, got {std.tolist()}")
    return torch.where(std > 0, std, torch.ones_like(std))
