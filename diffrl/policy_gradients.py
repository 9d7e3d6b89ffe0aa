"""Policy gradients on stochastic steps: Flow-GRPO and its family.

One objective, `policy_gradient`, with the loss, the log-probability and the KL as pieces; published deviations are pieces
with names of their own.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from diffrl.checks import column, require_number
from diffrl.losses import clipped_ratio, guard_clipped_ratio, velocity_matching
from diffrl.sampling import latent_mean, transition_kl, transition_log_prob
from diffrl.states import (
    States,
    StepsPerSample,
    by_step,
    credit_of,
    drift_rms,
    finite_states,
    has_reward,
    loss_weights,
    mean_over,
    reference_velocity,
    require_steps_per_sample,
    window_states,
)
from diffrl.trust_region import keep_divergence
from diffrl.types import Metrics, Objective, Params, Step, Velocity, Window


class Transition(NamedTuple):
    """What a policy-gradient loss may read of each state: the step as it was taken, and as the params would take it now.

    advantages, std, delta = t - t_next, t, log_prob, log_prob_old, ratio = exp(log_prob - log_prob_old) " w"; mean, mean_old
    " w *d".
    """

    advantages: Float[Tensor, " w"]
    log_prob: Float[Tensor, " w"]
    log_prob_old: Float[Tensor, " w"]
    mean: Float[Tensor, " w *d"]
    mean_old: Float[Tensor, " w *d"]
    std: Float[Tensor, " w"]
    t: Float[Tensor, " w"]
    delta: Float[Tensor, " w"]

    @property
    def ratio(self) -> Tensor:
        """exp(log_prob - log_prob_old) " w"."""
        return torch.exp(self.log_prob - self.log_prob_old.detach())


PolicyLoss = Callable[[Transition], tuple[Tensor, Tensor, Metrics]]
LogProb = Callable[[Tensor, Tensor, Tensor], Tensor]
KL = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def exact_kl(mean_p: Tensor, mean_q: Tensor, std: Tensor, t: Tensor, delta: Tensor) -> Tensor:
    """`transition_kl`: mean_d (mean_p - mean_q)^2/(2 std^2), std of the whole transition. All others deviate from it.

    >>> mean, one = torch.tensor([[2.0]]), torch.ones(1)
    >>> exact_kl(mean, 0 * mean, one, one / 2, one / 4)
    tensor([2.])
    """
    return transition_kl(mean_p, mean_q, std)


def kl_without_delta(mean_p: Tensor, mean_q: Tensor, std: Tensor, t: Tensor, delta: Tensor) -> Tensor:
    """As published in Flow-GRPO's code: the std without its sqrt(D), i.e. D x the exact KL.

    >>> mean, one = torch.tensor([[2.0]]), torch.ones(1)
    >>> kl_without_delta(mean, 0 * mean, one, one / 2, one / 4)  # a quarter of the exact one
    tensor([0.5000])
    """
    return transition_kl(mean_p, mean_q, std / torch.sqrt(delta))


def kl_clamped_sigma(eta: float = 0.7) -> KL:
    """As published in UniRL's Flow-DPPO: std = eta sqrt(t D/(1 - min(t, .99))), while the sampler's has t* = t_next at
    t = 1. Equal to the exact KL for t <= .99; on the first step of 10 with shift 3 it is .28 of it.

    >>> mean, t = torch.tensor([[0.7]]), torch.ones(1)  # t_next = 27/28
    >>> kl_clamped_sigma()(mean, 0 * mean, 0.7 * t, t, t / 28), exact_kl(mean, 0 * mean, 0.7 * t, t, t / 28)
    (tensor([0.1400]), tensor([0.5000]))
    """
    eta = require_number("eta", eta, low=0, open_low=True)

    def kl(mean_p: Tensor, mean_q: Tensor, std: Tensor, t: Tensor, delta: Tensor) -> Tensor:
        return transition_kl(mean_p, mean_q, eta * torch.sqrt(t * delta / (1 - t.clamp_max(0.99))))

    return kl


def cps_surrogate(x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """As published in Flow-GRPO's CPS code: -mean_d (x_next - mean)^2, without 1/(2 std^2) and constants, so that the
    log-ratio of a step is 2 std^2 times the exact one.

    >>> cps_surrogate(torch.tensor([[3.0]]), torch.tensor([[1.0]]), torch.tensor([0.1]))
    tensor([-4.])
    """
    return -velocity_matching(x_next, mean)


def ppo(*, clip: float) -> PolicyLoss:
    """`losses.clipped_ratio`. Metric clip_fraction: states whose gradient the clip removes (0 at ratio 1).

    >>> one, mean = torch.ones(1), torch.zeros(1, 1)
    >>> ppo(clip=0.1)(Transition(2 * one, one, 0 * one, mean, mean, one, one, one))  # rho = e: clipped at 1.1
    (tensor([-2.2000]), tensor([1.]), {'clip_fraction': 1.0})
    """
    clip = require_number("clip", clip, low=0, open_low=True)

    def loss(q: Transition) -> tuple[Tensor, Tensor, Metrics]:
        values = clipped_ratio(q.log_prob, q.log_prob_old, q.advantages, clip=clip)
        return values, torch.ones_like(values), clip_fraction(q.ratio, q.advantages, clip)

    return loss


def clip_fraction(ratio: Tensor, advantages: Tensor, clip: float) -> Metrics:
    """{"clip_fraction": share of states whose gradient the clip removes}: the ratio beyond it on the side A pushes to.

    >>> clip_fraction(torch.tensor([1.5, 1.5]), torch.tensor([1.0, -1.0]), 0.1)
    {'clip_fraction': 0.5}
    """
    up, down = (ratio > 1 + clip) & (advantages > 0), (ratio < 1 - clip) & (advantages < 0)
    return {"clip_fraction": float((up | down).double().mean())}


def guarded_ppo(*, clip: float) -> PolicyLoss:
    """`losses.guard_clipped_ratio`, weighted by 1/D (GRPO-Guard 2510.22319), bias removed per sample.

    >>> one, mean = torch.ones(1), torch.zeros(1, 1)  # nothing moved: -A, weighted by 1/D
    >>> guarded_ppo(clip=0.1)(Transition(2 * one, one, one, mean, mean, one, one, one / 4))
    (tensor([-2.]), tensor([4.]), {'clip_fraction': 0.0})
    """
    clip = require_number("clip", clip, low=0, open_low=True)

    def loss(q: Transition) -> tuple[Tensor, Tensor, Metrics]:
        values = guard_clipped_ratio(q.log_prob, q.log_prob_old, q.mean, q.mean_old, q.std, q.advantages, clip=clip)
        bias = latent_mean((q.mean - q.mean_old) ** 2).detach() / (2 * q.std**2)
        ratio = torch.exp((q.log_prob.detach() - q.log_prob_old + bias) * q.std)
        return values, 1 / q.delta, clip_fraction(ratio, q.advantages, clip)

    loss.needs_density = True  # type: ignore[attr-defined]
    return loss


def guarded_ppo_as_published(*, clip: float) -> PolicyLoss:
    """`guarded_ppo` with the bias averaged over all states of the call, as the published code does (an empty `dim`): the
    loss then depends on who else is in the micro-batch.

    >>> one, mean = torch.ones(2), torch.tensor([[0.0], [2.0]])  # biases 0 and 2, taken as 1 and 1: both ratios are e
    >>> guarded_ppo_as_published(clip=0.1)(Transition(-one, one, one, mean, 0 * mean, one, one, one))[0]
    tensor([2.7183, 2.7183])
    """
    clip = require_number("clip", clip, low=0, open_low=True)

    def loss(q: Transition) -> tuple[Tensor, Tensor, Metrics]:
        bias = ((q.mean - q.mean_old.detach()) ** 2 / (2 * column(q.std, q.mean) ** 2)).mean()
        exponent = (q.log_prob - q.log_prob_old.detach() + bias) * q.std
        values = clipped_ratio(exponent, torch.zeros_like(exponent), q.advantages, clip=clip)
        return values, 1 / q.delta, clip_fraction(torch.exp(exponent.detach()), q.advantages, clip)

    loss.needs_density = True  # type: ignore[attr-defined]
    return loss


def divergence_masked(*, radius: float, kl: KL = exact_kl) -> PolicyLoss:
    """-A rho where `keep_divergence` (Flow-DPPO 2606.11025): no clipping of the ratio; the KL of the step to the one taken
    decides, and only where the ratio already moved the way A pushes. Dropped states stay in the mean.
    Metrics: masked_fraction, kl (mean over the states).

    >>> one, mean = torch.ones(1), torch.ones(1, 1)  # a KL of 1/2, the way A pushes
    >>> divergence_masked(radius=0.1)(Transition(one, one, 0 * one, mean, 0 * mean, one, one, one))[1:]
    (tensor([False]), {'masked_fraction': 1.0, 'kl': 0.5})
    """
    radius = require_number("radius", radius, low=0, infinite=True)

    def loss(q: Transition) -> tuple[Tensor, Tensor, Metrics]:
        divergence = kl(q.mean.detach(), q.mean_old, q.std, q.t, q.delta)
        keep = keep_divergence(divergence, q.ratio, q.advantages, radius=radius)
        metrics = {"masked_fraction": float((~keep).double().mean()), "kl": float(divergence.mean())}
        # exp of a row that says nothing may overflow: its ratio is taken as 1
        exponent = torch.where(keep & (q.advantages != 0), q.log_prob - q.log_prob_old.detach(), 0.0)
        return -q.advantages * torch.exp(exponent), keep, metrics

    return loss


def policy_gradient(
    *,
    kernel: Step,
    loss: PolicyLoss,
    log_prob: LogProb = transition_log_prob,
    beta: float = 0.0,
    kl: KL = exact_kl,
    steps_per_sample: StepsPerSample = None,
) -> Objective:
    """loss(transitions) + beta KL(step under params, step under window.reference), at the states as they were taken.

    kernel: the one that sampled the trained steps; loss: `ppo`, `guarded_ppo`, `divergence_masked`, or one's own
    Transition -> (values " w", keep or weight >= 0 " w", metrics), e.g.
    `lambda q: (-q.advantages * q.ratio, torch.ones_like(q.ratio), {})`;
    log_prob: (x_next, mean, std) -> " w", used for now and then alike (the exact one of then is stored with the states);
    beta: 0, or the weight of kl, which needs window.reference. Of the credit it reads "advantage", "has_reward", "weight".
    Metrics: ratio_deviation = mean |ratio - 1| (0 expected at update 1), drift_rms, kl_reference, and per step of the grid
    ratio_deviation, std and output_grad (rms of d loss/d v). ValueError: a trained step without noise.

    >>> from diffrl.sampling import flow_sde_step, rollout
    >>> v, times = lambda params, x_t, t, cond: x_t, torch.tensor([1.0, 0.5, 0.0])
    >>> walk = rollout(v, {}, {}, times, seeds=torch.arange(2), shape=(3,), step=flow_sde_step, keep=[0])
    >>> window = Window(walk, torch.zeros(2), {}, {"advantage": torch.tensor([1.0, -1.0])})
    >>> policy_gradient(kernel=flow_sde_step, loss=ppo(clip=0.1))(v, {}, window)[0]  # on-policy: -A
    tensor([-1.,  1.])
    """
    beta = require_number("beta", beta, low=0)
    if getattr(loss, "needs_density", False) and log_prob is not transition_log_prob:
        raise ValueError(f"the guard is derived for a Gaussian step scored by transition_log_prob, not by {log_prob!r}")
    require_steps_per_sample(steps_per_sample)

    def objective(velocity: Velocity, params: Params, window: Window) -> tuple[Tensor, Tensor, Metrics]:
        rewarded = has_reward(window)
        s, usable = finite_states(window_states(window, steps_per_sample=steps_per_sample), rewarded)
        v = velocity(params, s.x_t, s.t, s.cond)
        q = _transition(v, s, credit_of(window, "advantage"), kernel, log_prob, usable)
        values, keep, metrics = loss(q)
        if beta:
            mean, _ = kernel(s.x_t, reference_velocity(velocity, window, s), s.t, s.t_next)
            to_reference = kl(q.mean, mean, q.std, q.t, q.delta)
            # the penalty counts for every state alike, also where the policy's own loss is dropped or weighted
            values = torch.where(keep > 0, values * keep, 0.0) + beta * to_reference
            keep = torch.ones_like(values)
            metrics["kl_reference"] = mean_over(to_reference, usable)
        weight = loss_weights(window, rewarded[s.rows] * keep, s.rows)
        gap = (q.ratio.detach() - 1).abs()
        metrics |= {"ratio_deviation": mean_over(gap, usable), "drift_rms": drift_rms(v, s.v_old, usable)}
        metrics |= by_step("ratio_deviation", gap, s, usable) | by_step("std", q.std, s, usable)
        metrics |= _output_grad(values, weight, v, s, usable)
        return values, weight, metrics

    objective.steps_per_sample = steps_per_sample  # type: ignore[attr-defined]
    return objective


def _transition(v: Tensor, s: States, advantage: Tensor, kernel: Step, log_prob: LogProb, usable: Tensor) -> Transition:
    mean, std = kernel(s.x_t, v, s.t, s.t_next)
    with torch.no_grad():  # a state without numbers has not moved: losses that look at all states see 0 of it
        mean_old, _ = kernel(s.x_t, torch.where(column(usable, v), s.v_old, v), s.t, s.t_next)
    if not bool((s.std > 0).all()) or not bool((std > 0).all()):
        here = s.t[~((s.std > 0) & (std > 0))].unique().tolist()
        raise ValueError(f"a policy gradient needs noise in every trained step; std is 0 at t = {here}")
    if not torch.allclose(std, s.std.to(std), rtol=1e-4, atol=0):
        raise ValueError(f"the kernel's std {std.tolist()[:8]} is not that of the rollout {s.std.tolist()[:8]}")
    now = log_prob(s.x_next, mean, std)
    old = s.log_prob if log_prob is transition_log_prob else log_prob(s.x_next, mean_old, std)
    return Transition(
        advantages=advantage.to(mean)[s.rows],
        log_prob=now,
        log_prob_old=torch.where(usable, old.to(mean), now.detach()),
        mean=mean,
        mean_old=mean_old,
        std=std,
        t=s.t.to(mean),
        delta=(s.t - s.t_next).to(mean),
    )


def _output_grad(values: Tensor, weight: Tensor, v: Tensor, s: States, usable: Tensor) -> Metrics:
    """rms of d(weight x loss)/dv per state, by step: the network's graph is not walked. Nothing where v has no graph."""
    if not v.requires_grad:
        return {}
    total = torch.where(weight > 0, values * weight, 0.0).sum()
    (grad,) = torch.autograd.grad(total, v, retain_graph=True)
    return by_step("output_grad", latent_mean(grad**2).sqrt(), s, usable)
