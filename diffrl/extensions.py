"""Beyond the papers: credits from other directions (`directions`, `conflicts`), the force spectrum, a steadier ART.

Everything here is derived or chosen by us, off by default, and has its ablation with a verdict in docs/results.md.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from diffrl.algorithms import art, lagging
from diffrl.checks import promote, require_count, require_number
from diffrl.conflicts import sum_of_directions
from diffrl.credits import Credit, Labels, covariance_credit, direction_credit, labels_of, scalar_rewards
from diffrl.directions import binned_direction, joint_rms, spread_weight
from diffrl.guidance import Direction, aggregate_direction
from diffrl.objectives import direction_of
from diffrl.rollouts import TrainedSteps, collect_renoised, first_half
from diffrl.sampling import euler_step, predict_x_0
from diffrl.states import has_reward, window_states
from diffrl.types import Algorithm, Batch, Params, Step, Velocity, Window

# ---- credits ----------------------------------------------------------------------------------------------------------


def every_step(steps: int) -> list[int]:
    """One bin per kept step.

    >>> every_step(3)
    [0, 1, 2]
    """
    return list(range(steps))


def binned_credit(
    *,
    bins: Callable[[int], Sequence[int]] = every_step,
    normalise: Callable[[Tensor], Tensor] = joint_rms,
    scale: float = 1.0,
    labels: Labels = scalar_rewards,
) -> Callable[[Batch], Credit]:
    """credit with one direction per noise level, "direction" " b s *d" (derived here; `directions.binned_direction`).

    The model's own prediction x_t - t v is subtracted from x_0, which leaves the covariance *within* the state. That
    needs states of the forward process (`rollouts.collect_renoised`): on the sampler's own path x_0 is a function of the
    state and nothing is left. bins: (kept steps) -> bin of each.

    >>> from diffrl.types import Trajectory
    >>> x_0, x = torch.tensor([[2.0], [0.0]]), torch.ones(2, 1, 1)  # at t = 1, x_t - t v = 0: nothing predicted
    >>> batch = Batch(Trajectory(x_0, x, x, x, torch.ones(1), *[None] * 4), torch.tensor([[1.0, 0.0]]), {})
    >>> binned_credit()(batch)["direction"].tolist()
    [[[1.0]], [[1.0]]]
    """

    def credit(batch: Batch) -> Credit:
        tr, values = batch.trajectory, labels_of(batch, labels)
        (g, k), s = values.shape, len(tr.t)
        flat = predict_x_0(tr.x_t.flatten(0, 1), tr.v.flatten(0, 1), tr.t.repeat(g * k))
        predicted = rearrange(flat, "(g k s) ... -> g k s ...", g=g, s=s)
        x_0 = rearrange(tr.x_0, "(g k) ... -> g k ...", g=g)
        chosen = list(bins(s))
        value, alive = binned_direction(values, x_0, predicted, chosen, normalise=normalise, scale=scale)
        return direction_credit(value[:, chosen], alive, torch.isfinite(values))

    return credit


def art_binned(
    *,
    trained_steps: TrainedSteps = first_half,
    step: Step = euler_step,
    bins: Callable[[int], Sequence[int]] = every_step,
    normalise: Callable[[Tensor], Tensor] = joint_rms,
    scale: float = 1.0,
    labels: Labels = scalar_rewards,
    **settings: Any,
) -> Algorithm:
    """`art` on freshly noised states with one direction per noise level. Other keywords as `art`, but for rms_axes.

    No example: a preset of `art`.
    """
    _refuse_rms_axes(settings)
    return art(**settings)._replace(
        collect=collect_renoised(step=step, trained_steps=trained_steps),
        credit=binned_credit(bins=bins, normalise=normalise, scale=scale, labels=labels),
    )


def _refuse_rms_axes(settings: Mapping[str, Any]) -> None:
    if settings.get("rms_axes") is not None:
        raise ValueError(
            f"rms_axes={settings['rms_axes']} belongs to aggregate_direction's one RMS: give a direction instead"
        )


def several_rewards_credit(
    direction: Callable[[Tensor, Tensor], Direction] = sum_of_directions,
) -> Callable[[Batch], Credit]:
    """credit of a reward with parts: direction (parts " g k j", x_0 " g k *d") -> Direction, from `diffrl.conflicts`.

    Weights other than 1 are handed on as weights=, " j". ValueError: a batch whose reward has no parts (make it with
    `rewards.weighted_sum`), or such weights and a direction without that keyword (`min_norm` has its own).

    >>> from diffrl.types import Trajectory
    >>> parts, walk = torch.tensor([[[1.0, 5.0], [0.0, 2.0]]]), Trajectory(torch.tensor([[2.0], [0.0]]), *[None] * 8)
    >>> several_rewards_credit()(Batch(walk, parts.sum(2), {}, parts))["direction"].tolist()
    [[1.0], [1.0]]
    """
    knows_weights = "weights" in signature(direction).parameters

    def credit(batch: Batch) -> Credit:
        if batch.parts is None:
            raise ValueError("the reward of this batch has no parts: make it with rewards.weighted_sum")
        x_0 = rearrange(batch.trajectory.x_0, "(g k) ... -> g k ...", g=len(batch.parts))
        weights = batch.part_weights
        if weights is None or set(weights) == {1.0}:
            found = direction(batch.parts, x_0)
        elif knows_weights:
            found = direction(batch.parts, x_0, weights=torch.tensor(weights, dtype=torch.float64))  # type: ignore[call-arg]
        else:
            raise ValueError(f"{direction} takes no weights, and the reward has {weights}")
        return direction_credit(found.value, found.alive, torch.isfinite(batch.parts).all(2))

    return credit


# ---- the steadier ART -------------------------------------------------------------------------------------------------


def art_steady(
    *,
    trained_steps: TrainedSteps = first_half,
    weight: Callable[[Tensor, Tensor], Tensor] = spread_weight,
    direction: Callable[..., Direction] = aggregate_direction,
    retention: float = 0.5,
    updates: int = 1,
    scale: float = 1.0,
    labels: Labels = scalar_rewards,
    **settings: Any,
) -> Algorithm:
    """`art` with what held it steady in our ablations: the noisier half of the steps trained, every group weighted by its
    rewards' spread, one update per rollout, and the behaviour policy an EMA of this retention.

    A group whose rewards hardly differ says mostly noise, which unit RMS would bring to full size; the EMA is a restoration
    that does not end with the rollout. Not a guarantee: at k = 2 full fine-tuning at 3e-4 and above still collapses
    (`ablations/stability.py`). Derived here, not the paper's. direction: (labels, x_0, scale=) -> Direction.
    Other keywords as `art`, but for rms_axes.

    >>> art_steady(retention=0.25).behaviour({"w": torch.zeros(1)}, {"w": torch.ones(1)}, 0)
    {'w': tensor([0.7500])}
    """
    _refuse_rms_axes(settings)
    retention = require_number("retention", retention, low=0, high=1)
    credit = covariance_credit(labels=labels, direction=partial(direction, scale=scale), weight=weight)
    steady = art(trained_steps=trained_steps, updates=updates, **settings)
    return steady._replace(credit=credit, behaviour=lagging(lambda i: retention))


# ---- the force spectrum -----------------------------------------------------------------------------------------------


class Force(NamedTuple):
    """A force field F on the states, seen by a group of parameters.

    output: rms of F over states and latent axes; parameter: |grad_p mean_states <v, F>/D|; cancellation:
    |sum_s J_p^T F_s|/sqrt(sum_s |J_p^T F_s|^2), about 1 for unrelated states and sqrt(S) for coherent ones.
    """

    output: float
    parameter: float
    cancellation: float


def force_spectrum(
    velocity: Velocity,
    params: Params,
    window: Window,
    *,
    groups: Mapping[str, Sequence[str]],
    states: int = 32,
    columns: Sequence[int] | None = None,
) -> dict[str, dict[str, Force]]:
    """{group: {"guidance": F = h_G = -G, "restoration": F = d = v - v_old}}: which parameters each force moves (derived
    here; the paper's pair (9.4, 4.9) is output(guidance)/output(restoration) and parameter(restoration)/parameter(guidance)).

    groups: names of parameters by a name of one's own; window: with ART's credit, best update 2's. At most `states`
    states, spread evenly, of the kept steps `columns` (None: all). One backward pass per state and force, params' .grad is
    left alone. ValueError: unknown parameter names, no group, no state of a live sample.
    No example: `ablations/force.py` has one.
    """
    unknown = sorted({name for names in groups.values() for name in names} - params.keys())
    if not groups or unknown or not all(groups.values()):
        raise ValueError(f"groups must name parameters of params: {unknown or groups}")
    require_count("states", states)
    s = window_states(window)
    usable = (has_reward(window) & window.credit.get("alive", torch.ones_like(has_reward(window))))[s.rows]
    if columns is not None:
        usable = usable & torch.isin(s.columns, torch.tensor(list(columns), device=s.columns.device))
    found = usable.nonzero().flatten()
    if not len(found):
        raise ValueError(f"no state of a live sample at the kept steps {columns}")
    pick = found[torch.linspace(0, len(found) - 1, min(states, len(found))).long()]
    cond = {name: value[pick.to(value.device)] for name, value in s.cond.items()}
    names = sorted({name for group in groups.values() for name in group})
    with torch.enable_grad():
        (v,) = promote(velocity(params, s.x_t[pick], s.t[pick], cond))
    fields = {
        "guidance": -direction_of(window, s)[pick],
        "restoration": (v - s.v_old[pick]).detach(),
    }
    out: dict[str, dict[str, Force]] = {group: {} for group in groups}
    for kind, field in fields.items():
        single = [_pulled(v[i], field[i], [params[n] for n in names]) for i in range(len(pick))]
        by_name = {n: torch.stack([parts[j] for parts in single]) for j, n in enumerate(names)}
        size = float((field.double() ** 2).mean().sqrt())
        for group, members in groups.items():
            pulls = torch.cat([by_name[n] for n in members], dim=1)  # states x parameters of the group
            total, alone = float(pulls.sum(0).norm()), float(pulls.norm())
            out[group][kind] = Force(size, total / len(pick), total / alone if alone > 0 else float("nan"))
    return out


def _pulled(v: Tensor, force: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """J^T F/D of one state for each tensor, flat, float64."""
    grads = torch.autograd.grad((v * force).mean(), tensors, retain_graph=True, allow_unused=True)
    return [
        (torch.zeros_like(p) if grad is None else grad).detach().double().flatten()
        for p, grad in zip(tensors, grads, strict=True)
    ]
