"""Regression objectives: (velocity, params, window) -> (loss " w", keep " w", metrics), w = samples x trained steps.

DiffusionART's guided regression, DiffusionNFT's two branches, AWM's ratio of matching errors. Metrics are floats over the
states that hold numbers: see the table in `diffrl.loop`. Names ending in `/t=0.900` are those of the step that starts there.
"""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from diffrl.checks import column, require_number, shapes
from diffrl.guidance import guided_velocity
from diffrl.losses import advantage_weighted_matching, clipped_ratio, inverse_abs_error, velocity_matching
from diffrl.losses import nft as nft_loss
from diffrl.policy_gradients import clip_fraction
from diffrl.sampling import flow_sde_step, predict_noise
from diffrl.states import (
    Mean,
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
    share_of,
    window_states,
)
from diffrl.trust_region import keep_inside, kl_proxy
from diffrl.types import Metrics, Objective, Params, Step, Velocity, Window

# ---- regression on a guided target (DiffusionART) ---------------------------------------------------------------------


def net_force(v: Tensor, v_old: Tensor, target: Tensor) -> Tensor:
    """The target whose pull `keep_inside` tests: the loss's own, i.e. guidance plus restoration (default).

    >>> v, v_old, target = torch.tensor([[[0.5]], [[0.0]], [[1.0]]])
    >>> net_force(v, v_old, target)
    tensor([[1.]])
    """
    return target


def guidance_force(v: Tensor, v_old: Tensor, target: Tensor) -> Tensor:
    """The alternative reading: guidance alone, <v - v_old, target - v_old> > 0 (it also masks restoring updates).

    >>> v, v_old, target = torch.tensor([[[0.5]], [[0.0]], [[1.0]]])
    >>> guidance_force(v, v_old, target)
    tensor([[1.5000]])
    """
    return v + (target - v_old)


def guided_regression(
    *,
    radius: float | Callable[[Tensor, Tensor], Tensor] = 1e-5,
    reference_kernel: Step = flow_sde_step,
    steps_per_sample: StepsPerSample = None,
    mask_force: Callable[[Tensor, Tensor, Tensor], Tensor] = net_force,
    dead: Literal["drop", "restore"] = "drop",
) -> Objective:
    """ART's objective: velocity_matching(v, v_old - G), kept where the KL proxy is inside `radius` or the force inward.

    Of the credit it reads "direction" (" b *d", or " b s *d" with one per kept step), "weight" (of the loss) where it is
    given, and "alive" and "has_reward" where they are given; else those are: direction not exactly 0, reward finite.
    Latents of a sample without reward may be nan. radius inf: no trust region; a function (step indices " w", kl " w") ->
    radius " w" > 0, kl being nan where a state holds no numbers: e.g. `trust_region.AdaptiveRadius`.
    Metrics: masked_fraction (of the states of live samples), kl_proxy and drift_rms = rms(v - v_old) (all finite states).

    >>> from diffrl.types import Trajectory
    >>> x, t = torch.zeros(1, 1, 1), torch.tensor([0.5])  # one state, v_old = 0, G = 1
    >>> window = Window(Trajectory(x[0], x, x, x, t, t / 2, x[0], x[0], None), t, {}, {"direction": torch.ones(1, 1)})
    >>> guided_regression()(lambda params, x_t, t, cond: x_t + 0.5, {}, window)[:2]  # (.5 + 1)^2; far, and pulled back
    (tensor([2.2500]), tensor([True]))
    """
    if not callable(radius):
        radius = require_number("radius", radius, low=0, infinite=True)
    require_steps_per_sample(steps_per_sample)
    if dead not in ("drop", "restore"):
        raise ValueError(f"dead must be 'drop' (weight 0) or 'restore' (target v_old), got {dead!r}")

    def objective(velocity: Velocity, params: Params, window: Window) -> tuple[Tensor, Tensor, Metrics]:
        rewarded, alive = _trainable(window)
        s, usable = finite_states(window_states(window, steps_per_sample=steps_per_sample), rewarded)
        target = guided_velocity(s.v_old, direction_of(window, s))
        v = velocity(params, s.x_t, s.t, s.cond)
        kl = kl_proxy(v.detach(), s.v_old, s.t, s.t_next, step=reference_kernel)
        trained = (rewarded if dead == "restore" else rewarded & alive)[s.rows]
        pull = mask_force(v.detach(), s.v_old, target)
        if callable(radius):
            limit = radius(s.columns, torch.where(usable, kl, torch.nan))
            if not isinstance(limit, Tensor) or limit.shape != kl.shape or not bool((limit > 0).all()):
                raise ValueError(f"radius must return a radius > 0 for each of {len(kl)} states, got {limit!r:.200}")
            inside = keep_inside(v, s.v_old, pull, kl / limit, radius=1.0)
        else:
            inside = keep_inside(v, s.v_old, pull, kl, radius=radius)
        metrics: Metrics = {
            "masked_fraction": share_of(~inside, trained),
            "kl_proxy": mean_over(kl, usable),
            "drift_rms": drift_rms(v, s.v_old, usable),
        }
        return velocity_matching(v, target), loss_weights(window, inside & trained, s.rows), metrics

    objective.steps_per_sample = steps_per_sample  # type: ignore[attr-defined]
    return objective


def direction_of(window: Window, s: States) -> Tensor:
    """The direction of each state " w *d": its sample's, or where the credit has one per kept step, that of its step.

    ValueError: neither one per sample nor one per sample and kept step.

    >>> from diffrl.types import Trajectory
    >>> x, t = torch.zeros(1, 2, 1), torch.tensor([0.5, 0.25])  # one sample, two kept steps
    >>> walk = Trajectory(x[0], x, x, x, t, t / 2, x[..., 0], x[..., 0], None)
    >>> window = Window(walk, t[:1], {}, {"direction": torch.ones(1, 1)})
    >>> direction_of(window, window_states(window)).tolist()
    [[1.0], [1.0]]
    """
    direction, steps = credit_of(window, "direction").to(s.v_old), window.trajectory.std.shape[1]
    shape = s.v_old.shape[1:]
    if direction.shape[1:] == shape:
        return direction[s.rows]
    if direction.shape[1:] != (steps, *shape):
        raise ValueError(
            f"direction must be (b, *d) or (b, steps, *d) with {steps} kept steps, d {tuple(shape)}: {shapes(direction=direction)}"
        )
    return direction[s.rows, s.columns]


def _trainable(window: Window) -> tuple[Bool[Tensor, " b"], Bool[Tensor, " b"]]:
    """(has_reward, alive) of the credit; a credit of one's own may give the direction alone."""
    alive = window.credit.get("alive")
    if alive is None:
        alive = (credit_of(window, "direction") != 0).reshape(len(window.rewards), -1).any(1)
    return has_reward(window), alive


# ---- forward-process objectives (DiffusionNFT, AWM) -------------------------------------------------------------------


def nft_regression(
    *,
    beta: float = 1.0,
    weight: Callable[[Tensor], Tensor] = inverse_abs_error,
    branches: Callable[..., Tensor] = nft_loss,
    loss_factor: float = 5.0,
    anchor: float = 1e-4,
    steps_per_sample: StepsPerSample = None,
) -> Objective:
    """loss_factor x branches(v, v_old, x_t, x_0, t, r) + anchor x mean_d (v - v_reference)^2 (DiffusionNFT 2509.16117).

    branches: `losses.nft`, `nft_positive` or `nft_negative`; v_old: under the behaviour params, from the rollout. Of the
    credit it reads "optimality" and "has_reward". Metrics: drift_rms, optimality/mean, /min, /max, anchor (before its factor).

    >>> from diffrl.types import Trajectory
    >>> x, t, r = torch.zeros(1, 1, 1), torch.tensor([0.5]), {"optimality": torch.tensor([0.75])}
    >>> window = Window(Trajectory(x[0], x + 2, x, x, t, t / 2, x[0], x[0], None), t, {}, r)
    >>> nft_regression(anchor=0.0)(lambda params, x_t, t, cond: 0 * x_t, {}, window)[0]  # 5 x (.75 x 2 + .25 x 2)
    tensor([10.])
    """
    loss_factor = require_number("loss_factor", loss_factor, low=0, open_low=True)
    anchor = require_number("anchor", anchor, low=0)
    require_steps_per_sample(steps_per_sample)

    def objective(velocity: Velocity, params: Params, window: Window) -> tuple[Tensor, Tensor, Metrics]:
        rewarded = has_reward(window)
        s, usable = finite_states(window_states(window, steps_per_sample=steps_per_sample), rewarded)
        r = credit_of(window, "optimality")
        v = velocity(params, s.x_t, s.t, s.cond)
        values = loss_factor * branches(v, s.v_old, s.x_t, s.x_0, s.t, r.to(s.x_t)[s.rows], beta=beta, weight=weight)
        told, known = (r[rewarded] if bool(rewarded.any()) else r), int(rewarded.sum())
        metrics: Metrics = {
            "drift_rms": drift_rms(v, s.v_old, usable),
            "optimality/mean": Mean(float(told.mean()), known),
            "optimality/min": Mean(float(told.min()), known),
            "optimality/max": Mean(float(told.max()), known),
        }
        if anchor:
            away = velocity_matching(v, reference_velocity(velocity, window, s))
            values = values + anchor * away
            metrics["anchor"] = mean_over(away, usable)
        return values, loss_weights(window, rewarded[s.rows], s.rows), metrics

    objective.steps_per_sample = steps_per_sample  # type: ignore[attr-defined]
    return objective


MatchingScore = Callable[[Tensor, Tensor], Tensor]


def plain_matching(error: Float[Tensor, " w"], t: Float[Tensor, " w"]) -> Tensor:
    """lp = -m, m = mean_d (v - (eps - x_0))^2 (AWM 2509.25050): with it the loss is `advantage_weighted_matching`.

    >>> plain_matching(torch.tensor([4.0]), torch.tensor([0.5]))
    tensor([-4.])
    """
    return -error


def time_weighted_matching(power: float) -> MatchingScore:
    """lp = -m t^power: the published weights t and t^2.

    >>> time_weighted_matching(2.0)(torch.tensor([4.0]), torch.tensor([0.5]))
    tensor([-1.])
    """
    power = require_number("power", power, low=0)
    return lambda error, t: -error * t**power


def huber_matching(error: Float[Tensor, " w"], t: Float[Tensor, " w"]) -> Tensor:
    """lp = -t (sqrt(m + 1e-10) - 1e-5): the published weighting `huber`.

    >>> huber_matching(torch.tensor([4.0]), torch.tensor([0.25]))
    tensor([-0.5000])
    """
    return -t * (torch.sqrt(error + 1e-10) - 1e-5)


def generalised_huber_matching(power: float = 0.25) -> MatchingScore:
    """lp = -(t/p) ((m + 1e-10)^p - 1e-10^p): the published weighting `ghuber`, p = .25 in the SD3.5 recipe. p in (0, 1].

    >>> generalised_huber_matching(0.5)(torch.tensor([4.0]), torch.tensor([0.125]))  # p = 1/2: twice `huber_matching`
    tensor([-0.5000])
    """
    power = require_number("power", power, low=0, high=1, open_low=True)
    return lambda error, t: -t / power * ((error + 1e-10) ** power - 1e-10**power)


def matching_ratio(
    *,
    clip: float = 1e-4,
    score: MatchingScore = plain_matching,
    beta: float = 0.0,
    steps_per_sample: StepsPerSample = None,
) -> Objective:
    """`clipped_ratio` of lp = score(mean_d (v - (eps - x_0))^2, t), old and new at the same (eps, t), + beta x velocity KL
    mean_d (v - v_reference)^2 (AWM 2509.25050). With `plain_matching` it is `losses.advantage_weighted_matching`.

    On-policy its gradient is A x that of the flow-matching loss. Metrics as `policy_gradient`'s where they apply.

    >>> from diffrl.types import Trajectory
    >>> x, t = torch.zeros(1, 1, 1), torch.tensor([0.5])
    >>> window = Window(Trajectory(x[0], x, x, x, t, t / 2, x[0], x[0], None), t, {}, {"advantage": t * 4})
    >>> matching_ratio()(lambda params, x_t, t, cond: 0 * x_t, {}, window)[0]  # on-policy the ratio is 1: -A
    tensor([-2.])
    """
    clip, beta = require_number("clip", clip, low=0, open_low=True), require_number("beta", beta, low=0)
    require_steps_per_sample(steps_per_sample)

    def objective(velocity: Velocity, params: Params, window: Window) -> tuple[Tensor, Tensor, Metrics]:
        rewarded = has_reward(window)
        s, usable = finite_states(window_states(window, steps_per_sample=steps_per_sample), rewarded)
        path = (s.x_t - s.x_0) / column(s.t, s.x_t)  # eps - x_0 of the straight path through x_t and x_0
        a = credit_of(window, "advantage").to(s.x_t)[s.rows]
        v = velocity(params, s.x_t, s.t, s.cond)
        now, old = (score(velocity_matching(u, path), s.t.to(s.x_t)) for u in (v, s.v_old))
        if score is plain_matching:
            noise = predict_noise(s.x_t, path, s.t)
            values = advantage_weighted_matching(v, s.v_old, noise, s.x_0, a, clip=clip)
        else:
            values = clipped_ratio(now, old, a, clip=clip)
        ratio = torch.exp(now.detach() - old.detach())
        gap = (ratio - 1).abs()
        metrics: Metrics = {
            "ratio_deviation": mean_over(gap, usable),
            "drift_rms": drift_rms(v, s.v_old, usable),
            **clip_fraction(ratio, a, clip),
            **by_step("ratio_deviation", gap, s, usable),
        }
        if beta:
            away = velocity_matching(v, reference_velocity(velocity, window, s))
            values = values + beta * away
            metrics["kl_velocity"] = mean_over(away, usable)
        return values, loss_weights(window, rewarded[s.rows], s.rows), metrics

    objective.steps_per_sample = steps_per_sample  # type: ignore[attr-defined]
    return objective
