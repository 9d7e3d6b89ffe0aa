"""An Algorithm is a NamedTuple of functions; a variant is `._replace(piece=another_function)`.

batch  = collect(velocity, behaviour params, cond, seeds " g k", score)     rollout and rewards
credit = credit(batch)                                                      what each sample is told
loss " w", keep " w", metrics = objective(velocity, params, window)         one optimizer step's worth of states
behaviour params = behaviour(behaviour params, params, i)                   who rolls out next
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffrl.checks import column, require_count, require_number, shapes
from diffrl.guidance import aggregate_direction, guided_velocity, pair_labels
from diffrl.losses import velocity_matching
from diffrl.sampling import euler_step, flow_sde_step, latent_mean, rollout, seeded_noise
from diffrl.trust_region import keep_inside, kl_proxy
from diffrl.types import Cond, Gridded, Params, Step, Trajectory, Velocity

Score = Callable[[Tensor, Tensor], Tensor]
Metrics = dict[str, float]
TrainedSteps = Callable[[int], Sequence[int]]
SUBSET_STREAM = 2**32  # far from the streams 0..n that a rollout draws


class Batch(NamedTuple):
    """One rollout of g prompts x k samples: its trajectory (b = g k rows, prompt-major), rewards, one cond row per prompt."""

    trajectory: Trajectory
    rewards: Float[Tensor, " g k"]
    cond: Cond


class Window(NamedTuple):
    """The rows of a Batch that one optimizer step sees: everything with one row per sample."""

    trajectory: Trajectory
    rewards: Float[Tensor, " b"]
    cond: Cond
    credit: Mapping[str, Tensor]


class Algorithm(NamedTuple):
    """Five functions and numbers; DESIGN's contract. `updates`: optimizer steps per batch, each on a disjoint window of
    every prompt's samples. `pool`: seeds drawn per prompt where `collect` needs more than group_size of them."""

    collect: Callable[[Velocity, Params, Cond, Int[Tensor, " g k"], Score], Batch]
    credit: Callable[[Batch], Mapping[str, Tensor]]
    objective: Callable[[Velocity, Params, Window], tuple[Tensor, Tensor, Metrics]]
    behaviour: Callable[[Params, Params, int], Params]
    updates: int
    pool: int | None = None


# ---- which steps are trained ------------------------------------------------------------------------------------------


def all_steps(steps: int) -> range:
    """Every step of the rollout is trained."""
    return range(steps)


def noisiest(count: int) -> TrainedSteps:
    """The first `count` steps, where x_t is mostly noise: there G is the exact tilt (MATH: total-covariance caveat).

    >>> noisiest(3)(10)
    range(0, 3)
    """
    count = require_count("noisiest", count)

    def first(steps: int) -> range:
        if count > steps:
            raise ValueError(f"the noisiest {count} steps of a rollout of {steps}")
        return range(count)

    return first


def subset_of_steps(seeds: Int[Tensor, " b"], candidates: int, size: int) -> Int[Tensor, " b {size}"]:
    """Sorted random columns, `size` of `candidates` per trajectory, row i a function of seeds[i] alone."""
    if size > candidates:
        raise ValueError(f"steps_per_sample={size} of {candidates} trained steps")
    draws = seeded_noise(seeds, (candidates,), stream=SUBSET_STREAM)
    return draws.argsort(dim=1)[:, :size].sort(dim=1).values


# ---- collect ----------------------------------------------------------------------------------------------------------


def collect_rollout(*, step: Step | Sequence[Step] = euler_step, trained_steps: TrainedSteps = all_steps) -> Callable:
    """The plain collect: one rollout under the behaviour params on the model's grid, then one score per sample.

    It needs a velocity that knows its grid (`types.Gridded`), which `loop.train` hands in. Kept: `trained_steps` only.
    """

    def collect(velocity: Gridded, params: Params, cond: Cond, seeds: Tensor, score: Score) -> Batch:
        if not isinstance(velocity, Gridded):
            raise ValueError(f"collect needs a types.Gridded velocity (with times, steps, shape), got {velocity!r}")
        kept = trained_steps(velocity.steps)
        if not len(kept):
            raise ValueError(f"trained_steps names none of the {velocity.steps} steps: nothing would be trained")
        g, k = seeds.shape
        rows = torch.arange(g, device=seeds.device).repeat_interleave(k)
        trajectory = rollout(
            velocity.velocity,
            params,
            {name: value[rows.to(value.device)] for name, value in cond.items()},
            velocity.times(velocity.steps),
            seeds=rearrange(seeds, "g k -> (g k)"),
            shape=velocity.shape,
            step=step,
            keep=kept,
        )
        rewards = score(trajectory.x_0, rows)
        return Batch(trajectory, rearrange(rewards, "(g k) -> g k", k=k), cond)

    return collect


# ---- credit -----------------------------------------------------------------------------------------------------------


def _has_reward(rewards: Tensor) -> Tensor:
    return rearrange(torch.isfinite(rewards), "g k -> (g k)")


def scalar_rewards(batch: Batch) -> Float[Tensor, " g k"]:
    """The rewards as they are: labels for `covariance_credit`."""
    return batch.rewards


def random_pairs(batch: Batch) -> Float[Tensor, " g k"]:
    """Win/lose labels of random disjoint pairs, drawn from the batch's own seeds (a new pairing per iteration)."""
    seeds = batch.trajectory.seeds
    generator = None if seeds is None else torch.Generator().manual_seed(int(seeds[0]) % 2**63)
    return pair_labels(batch.rewards, generator=generator)


def best_against_worst(batch: Batch) -> Float[Tensor, " g k"]:
    """Labels of the pairing best-worst, second best-second worst, ...: 1 above, 0 below, 1/2 on ties, nan unpaired."""
    finite = torch.isfinite(batch.rewards)
    labels = torch.full_like(batch.rewards, torch.nan)
    for group, row in enumerate(batch.rewards):
        order = [int(i) for i in row.nan_to_num(-torch.inf).argsort(descending=True) if finite[group, i]]
        for a, b in zip(order[: len(order) // 2], order[::-1]):
            won = 0.5 if row[a] == row[b] else 1.0
            labels[group, a], labels[group, b] = won, 1 - won
    return labels


def covariance_credit(
    *,
    labels: Callable[[Batch], Tensor] = scalar_rewards,
    scale: float = 1.0,
    rms_axes: Sequence[int] | None = None,
) -> Callable[[Batch], dict[str, Tensor]]:
    """credit: {"direction": G of the sample's prompt " b *d", "alive": Bool " b"}, from labels " g k" (nan: no reward).

    alive is False for samples of dead groups; "has_reward" False for samples without a label: neither is trained on.
    ValueError: labels of another shape than the rewards.
    """

    def credit(batch: Batch) -> dict[str, Tensor]:
        values = labels(batch)
        if tuple(values.shape) != tuple(batch.rewards.shape):  # another grouping would mix prompts
            raise ValueError(f"labels must have the rewards' shape: {shapes(labels=values, rewards=batch.rewards)}")
        values = values if values.is_floating_point() else values.float()  # counts and wins are numbers
        g, k = values.shape
        x_0 = rearrange(batch.trajectory.x_0, "(g k) ... -> g k ...", g=g)
        direction = aggregate_direction(values, x_0, scale=scale, rms_axes=rms_axes)
        return {
            "direction": direction.value.repeat_interleave(k, 0),
            "alive": direction.alive.repeat_interleave(k, 0),
            "has_reward": _has_reward(values),
        }

    return credit


# ---- objective --------------------------------------------------------------------------------------------------------


class States(NamedTuple):
    """The trained states of a window, flattened to w = samples x trained steps rows, sample-major."""

    x_t: Float[Tensor, " w *d"]
    x_next: Float[Tensor, " w *d"]
    v_old: Float[Tensor, " w *d"]
    t: Float[Tensor, " w"]
    t_next: Float[Tensor, " w"]
    std: Float[Tensor, " w"]
    log_prob: Float[Tensor, " w"]
    rows: Int[Tensor, " w"]
    cond: Cond


def window_states(window: Window, *, steps_per_sample: int | None = None) -> States:
    """Every kept step of every sample of the window, or a seeded random `steps_per_sample` of them per trajectory."""
    tr = window.trajectory
    b, s = tr.std.shape
    if steps_per_sample is None or steps_per_sample == s:
        columns = repeat(torch.arange(s, device=tr.t.device), "s -> b s", b=b)
    elif tr.seeds is None:
        raise ValueError("a random subset of steps per trajectory needs a trajectory with seeds")
    else:
        columns = subset_of_steps(tr.seeds, s, steps_per_sample)
    columns = rearrange(columns, "b s -> (b s)")
    rows = torch.arange(b, device=columns.device).repeat_interleave(len(columns) // max(b, 1))
    pick = {name: getattr(tr, name)[rows, columns] for name in ("x_t", "x_next", "v", "std", "log_prob")}
    cond = {name: value[rows.to(value.device)] for name, value in window.cond.items()}
    return States(
        x_t=pick["x_t"],
        x_next=pick["x_next"],
        v_old=pick["v"],
        t=tr.t[columns],
        t_next=tr.t_next[columns],
        std=pick["std"],
        log_prob=pick["log_prob"],
        rows=rows,
        cond=cond,
    )


def net_force(v: Tensor, v_old: Tensor, target: Tensor) -> Tensor:
    """The target whose pull `keep_inside` tests: the loss's own, i.e. guidance plus restoration (default)."""
    return target


def guidance_force(v: Tensor, v_old: Tensor, target: Tensor) -> Tensor:
    """The alternative reading: guidance alone, <v - v_old, target - v_old> > 0 (it also masks restoring updates)."""
    return v + (target - v_old)


def guided_regression(
    *,
    radius: float = 1e-5,
    reference_kernel: Step = flow_sde_step,
    steps_per_sample: int | None = None,
    mask_force: Callable[[Tensor, Tensor, Tensor], Tensor] = net_force,
    dead: Literal["drop", "restore"] = "drop",
) -> Callable[[Velocity, Params, Window], tuple[Tensor, Tensor, Metrics]]:
    """ART's objective: velocity_matching(v, v_old - G), kept where the KL proxy is inside `radius` or the force inward.

    Of the credit it reads "direction", and "alive" and "has_reward" where they are given; else those are: direction not
    exactly 0, reward finite. Latents of a sample without reward may be nan. radius inf: no trust region.
    Metrics: masked_fraction (of the states of live samples), kl_proxy and drift_rms = rms(v - v_old) (all finite states).
    """
    radius = require_number("radius", radius, low=0, infinite=True)
    if steps_per_sample is not None:
        require_count("steps_per_sample", steps_per_sample)
    if dead not in ("drop", "restore"):
        raise ValueError(f"dead must be 'drop' (weight 0) or 'restore' (target v_old), got {dead!r}")

    def objective(velocity: Velocity, params: Params, window: Window) -> tuple[Tensor, Tensor, Metrics]:
        rewarded, alive = _trainable(window)
        s, usable = _finite_states(window_states(window, steps_per_sample=steps_per_sample), rewarded)
        target = guided_velocity(s.v_old, window.credit["direction"].to(s.v_old)[s.rows])
        v = velocity(params, s.x_t, s.t, s.cond)
        kl = kl_proxy(v.detach(), s.v_old, s.t, s.t_next, step=reference_kernel)
        inside = keep_inside(v, s.v_old, mask_force(v.detach(), s.v_old, target), kl, radius=radius)
        trained = (rewarded if dead == "restore" else rewarded & alive)[s.rows]
        drift = latent_mean((v.detach() - s.v_old.detach()) ** 2)
        metrics = {
            "masked_fraction": _share(~inside, trained),
            "kl_proxy": float(kl[usable].mean()),
            "drift_rms": float(drift[usable].mean().sqrt()),
        }
        return velocity_matching(v, target), inside & trained, metrics

    return objective


def _trainable(window: Window) -> tuple[Bool[Tensor, " b"], Bool[Tensor, " b"]]:
    """(has_reward, alive) of the credit; a credit of one's own may give the direction alone."""
    credit, b = window.credit, len(window.rewards)
    rewarded = credit.get("has_reward", torch.isfinite(window.rewards))
    return rewarded, credit["alive"] if "alive" in credit else (credit["direction"] != 0).reshape(b, -1).any(1)


def _finite_states(s: States, rewarded: Bool[Tensor, " b"]) -> tuple[States, Bool[Tensor, " w"]]:
    """(states, which of them hold numbers): those of samples without reward that do not become 0, since nan times a
    gradient of 0 is nan."""
    usable = rewarded[s.rows] | (torch.isfinite(s.x_t) & torch.isfinite(s.v_old)).reshape(len(s.rows), -1).all(1)
    x_t, v_old = (torch.where(column(usable, x), x, 0.0) for x in (s.x_t, s.v_old))
    return s._replace(x_t=x_t, v_old=v_old), usable


def _share(what: Bool[Tensor, " w"], among: Bool[Tensor, " w"]) -> float:
    return float((what & among).sum() / among.sum().clamp_min(1))


# ---- behaviour --------------------------------------------------------------------------------------------------------


def live(behaviour: Params, params: Params, i: int) -> Params:
    """On-policy: the live params roll out next (decay 0, no copy)."""
    return params


# ---- DiffusionART -----------------------------------------------------------------------------------------------------


def art(
    *,
    scale: float = 1.0,
    radius: float = 1e-5,
    trained_steps: TrainedSteps = all_steps,
    steps_per_sample: int | None = None,
    updates: int = 2,
    step: Step | Sequence[Step] = euler_step,
    reference_kernel: Step = flow_sde_step,
    rms_axes: Sequence[int] | None = None,
    labels: Callable[[Batch], Tensor] = scalar_rewards,
    mask_force: Callable[[Tensor, Tensor, Tensor], Tensor] = net_force,
    dead: Literal["drop", "restore"] = "drop",
) -> Algorithm:
    """DiffusionART (2610.12572): one unit-RMS covariance direction per prompt, target v_old - G frozen over two updates
    on disjoint halves of each group, a KL-proxy trust region whose mask drops outward updates only. No EMA, no reference.

    scale of G; radius of the trust region; trained_steps: (steps) -> step indices, `all_steps` or `noisiest(n)`;
    steps_per_sample: train a seeded random subset of those per trajectory; updates per rollout; step: the sampler;
    reference_kernel of the KL proxy; rms_axes, labels, mask_force, dead: see `aggregate_direction`,
    `covariance_credit`, `guided_regression`. Assumes a velocity model that an ODE samples well, few-step distilled
    ones included; needs no gradient of the reward and no log-probabilities.
    """
    return Algorithm(
        collect=collect_rollout(step=step, trained_steps=trained_steps),
        credit=covariance_credit(labels=labels, scale=scale, rms_axes=rms_axes),
        objective=guided_regression(
            radius=radius,
            reference_kernel=reference_kernel,
            steps_per_sample=steps_per_sample,
            mask_force=mask_force,
            dead=dead,
        ),
        behaviour=live,
        updates=require_count("updates", updates),
    )


_noisiest = noisiest  # `art_flash` has a keyword of that name


def art_flash(*, noisiest: int = 4, **settings: Any) -> Algorithm:
    """`art` with only the `noisiest` steps trained (the authors' public notes of 2026-10-25: comparable, cheaper)."""
    return art(trained_steps=_noisiest(noisiest), **settings)


def art_pairwise(*, pairing: Callable[[Batch], Tensor] = random_pairs, **settings: Any) -> Algorithm:
    """`art` from preferences only: labels 1/0 (1/2 on a tie) of disjoint pairs inside each group instead of rewards.

    pairing: `random_pairs` (seeded), `best_against_worst`, or any (Batch) -> labels " g k". Other keywords as `art`.
    """
    return art(labels=pairing, **settings)
