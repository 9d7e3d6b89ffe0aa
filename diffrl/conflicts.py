"""One direction from several rewards of the same samples: they may disagree.

Rewards come as " g k j", j of them for every sample. A sample with any part nan or inf has no reward at all, so all
parts see the same samples. All but `sum_of_rewards` combine the parts' directions, sum_j a_j G_j, G_j = C_j/rms(C_j):
a from the G_j in float64, normalised once, at the end. With two rewards weighed alike the sum, `pcgrad`
and `min_norm` are the same direction, that of G_1 + G_2: they differ from three rewards on, or by the weights.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from diffrl.checks import require_number, require_tensors
from diffrl.guidance import Direction, _require_groups, aggregate_direction

STATIONARY = 1e-6  # a combination this small beside its largest part is none: the parts cancel
GAP = 1e-14  # of |largest part|^2: with so little left, |G - G*| <= 1e-7 |largest part|


def _parts(rewards: Tensor) -> Tensor:
    """float64 rewards " g k j", nan in every part where any part is missing; ValueError unless " g k j"."""
    require_tensors(rewards=rewards)
    if rewards.ndim != 3 or rewards.shape[2] == 0:
        raise ValueError(f"rewards must be (g, k, j), j >= 1 rewards of each sample, got {tuple(rewards.shape)}")
    return torch.where(torch.isfinite(rewards).all(2, keepdim=True), rewards.detach().double(), math.nan)


def _weights(weights: Tensor | None, values: Tensor) -> Tensor:
    """float64 " j"; None: ones."""
    if weights is None:
        return values.new_ones(values.shape[2])
    require_tensors(weights=weights)
    if weights.shape != values.shape[2:] or not bool(torch.isfinite(weights).all()):
        raise ValueError(f"weights must be {values.shape[2]} finite numbers, got {weights.tolist()}")
    return weights.detach().to(values)


def _unit_parts(values: Tensor, x_0: Tensor) -> Tensor:
    """G_j = C_j/rms(C_j) " g j D" in float64, 0 where reward j says nothing in the group."""
    _require_groups(values[:, :, 0], x_0)
    g, _, j = values.shape
    parts = values.new_zeros((g, j, math.prod(x_0.shape[2:])))
    for group in range(g):
        x = x_0[group : group + 1].detach().double()  # one group at a time in float64
        for part in range(j):
            parts[group, part] = aggregate_direction(values[group : group + 1, :, part], x).value.reshape(-1)
    return parts


def _mixed(parts: Tensor, mix: Tensor, x_0: Tensor, scale: float) -> Direction:
    """sum_j mix_j part_j at RMS `scale`; dead where it is next to nothing beside its largest part."""
    total = torch.einsum("gj,gjd->gd", mix, parts)
    alive = total.norm(dim=1) > STATIONARY * parts.norm(dim=2).amax(1)
    value = torch.where(alive[:, None], scale * total / total.square().mean(1, keepdim=True).sqrt(), 0.0)
    out = torch.promote_types(x_0.dtype, torch.float32)
    return Direction(value.reshape(len(x_0), *x_0.shape[2:]).to(out), alive)


def sum_of_rewards(
    rewards: Float[Tensor, " g k j"],
    x_0: Float[Tensor, " g k *d"],
    *,
    weights: Float[Tensor, " j"] | None = None,
    scale: float = 1.0,
) -> Direction:
    """`aggregate_direction` of sum_j w_j R_j: one covariance of the raw scores, so the widest spread wins (2610.12572).

    weights None: ones. A sample with any part not finite has no reward. Dead as there.
    ValueError: rewards not " g k j"; weights not j finite numbers; as `aggregate_direction`.

    >>> rewards = torch.tensor([[[1.0, 0.0], [0.0, 3.0]]])  # the second one, of three times the spread, wants x smaller
    >>> sum_of_rewards(rewards, torch.tensor([[[1.0], [0.0]]])).value
    tensor([[-1.]])
    """
    values = _parts(rewards)
    return aggregate_direction((values * _weights(weights, values)).sum(2), x_0, scale=scale)


def sum_of_directions(
    rewards: Float[Tensor, " g k j"],
    x_0: Float[Tensor, " g k *d"],
    *,
    weights: Float[Tensor, " j"] | None = None,
    scale: float = 1.0,
) -> Direction:
    """sum_j w_j G_j at RMS `scale`, G_j = C_j/rms(C_j): rewards count alike whatever their units (derived here).

    weights None: ones. A reward that is dead in a group adds nothing there. Dead: all of them are, or the sum cancels,
    |sum| <= 1e-6 max |w_j G_j|. Invariant under R_j -> a_j R_j + b_j, a_j > 0. ValueError: as `sum_of_rewards`.

    >>> x_0 = torch.tensor([[[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]])
    >>> rewards = torch.tensor([[[9.0, 0.0], [-9.0, 0.0], [0.0, 1.0], [0.0, -1.0]]])
    >>> sum_of_directions(rewards, x_0).value
    tensor([[1., 1.]])
    """
    scale, values = require_number("scale", scale), _parts(rewards)
    parts = _unit_parts(values, x_0) * _weights(weights, values)[:, None]
    return _mixed(parts, parts.new_ones(parts.shape[:2]), x_0, scale)


def _projected(gram: Tensor, orders: Tensor) -> Tensor:
    """Coefficients " j" of the sum of parts, each projected off those it conflicts with, from <part, part> " j j"."""
    rows = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    for j, order in enumerate(orders.tolist()):
        for other in order:
            conflict = rows[j] @ gram[:, other]
            if other != j and bool(conflict < 0):
                rows[j, other] -= conflict / gram[other, other]
    return rows.sum(0)


def pcgrad(
    rewards: Float[Tensor, " g k j"],
    x_0: Float[Tensor, " g k *d"],
    *,
    weights: Float[Tensor, " j"] | None = None,
    scale: float = 1.0,
    generator: torch.Generator | None = None,
) -> Direction:
    """`sum_of_directions` after each G_j lost what conflicts: PCGrad (Yu et al. 2020, 2001.06782, algorithm 1).

    For each j, over the others in random order: where <G_j, G_k> < 0, G_j <- G_j - <G_j, G_k>/|G_k|^2 G_k, with G_k as
    it was. Then the sum at RMS `scale`. weights scale G_j first (None: ones; a negative one turns it round). generator
    None: one seeded with 0; with two rewards the order does not matter. Dead and ValueError: as `sum_of_directions`.

    >>> x_0 = torch.tensor([[[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]])
    >>> rewards = torch.stack([x_0[..., 0], x_0[..., 1] - x_0[..., 0]], dim=2)  # at 0 and at 135 degrees
    >>> pcgrad(rewards, x_0).value  # at 67.5 degrees
    tensor([[0.5412, 1.3066]])
    """
    scale, values = require_number("scale", scale), _parts(rewards)
    parts = _unit_parts(values, x_0) * _weights(weights, values)[:, None]
    generator = generator or torch.Generator(device=rewards.device).manual_seed(0)
    g, j = parts.shape[:2]
    orders = torch.rand((j, j), generator=generator, device=generator.device).argsort(dim=1, stable=True)
    mix = parts.new_zeros((g, j))
    for group in range(g):
        mix[group] = _projected(parts[group] @ parts[group].T, orders)
    return _mixed(parts, mix, x_0, scale)


def _nearest_to_zero(points: Tensor) -> Tensor:
    """argmin |a @ points| over the simplex " j" of points " j D": Wolfe 1976, Math. Programming 11."""
    alpha = torch.zeros(len(points), dtype=points.dtype)
    alpha[int(points.norm(dim=1).argmin())] = 1.0
    held, found, size = alpha.nonzero()[0].tolist(), alpha, math.inf
    while True:
        x = alpha @ points
        if not float(x @ x) < size:  # it falls strictly, so this ends: here only rounding is left
            return found
        found, size = alpha.clone(), float(x @ x)
        gaps = (x - points) @ x  # all 0 or less: |x|^2 <= <x, point>, x is the nearest
        entering = int(gaps.argmax())
        if entering in held or float(gaps[entering]) <= GAP * float(points.square().sum(1).max()):
            return found
        held.append(entering)
        while True:  # to the nearest point of the affine hull of `held`, giving up those with a share of 0 or less
            first, edges = points[held[0]], points[held[1:]] - points[held[0]]
            along = -first @ torch.linalg.pinv(edges)
            wanted = torch.cat([1 - along.sum(0, keepdim=True), along])
            if bool((wanted > 0).all()):
                alpha[held] = wanted
                break
            now = alpha[held]
            steps = torch.where(wanted <= 0, now / (now - wanted), math.inf).nan_to_num(0.0, posinf=math.inf)
            alpha[held] = (now + steps.min() * (wanted - now)).clamp_min(0)
            alpha[held[int(steps.argmin())]] = 0.0
            held = [i for i in held if float(alpha[i]) > 0]
            alpha /= alpha.sum()


def min_norm(rewards: Float[Tensor, " g k j"], x_0: Float[Tensor, " g k *d"], *, scale: float = 1.0) -> Direction:
    """G* = argmin |G| over the hull of the G_j, at RMS `scale`: no reward loses (MGDA: Desideri 2012; 1810.04650).

    <G*, G_j> >= |G*|^2 for every j. Two rewards: a_1 = clip(<G_2 - G_1, G_2>/|G_1 - G_2|^2, 0, 1), which for G_j
    of one RMS is 1/2. A reward that is dead in a group takes no part. Dead: all of them are, or Pareto-stationary,
    |G*| <= 1e-6 max |G_j|: nothing raises all of them. ValueError: as `sum_of_rewards`.

    >>> x_0 = torch.tensor([[[0.0], [1.0]]])
    >>> min_norm(torch.cat([x_0, -x_0], dim=2), x_0)  # two rewards that want the opposite
    Direction(value=tensor([[0.]]), alive=tensor([False]))
    """
    scale, values = require_number("scale", scale), _parts(rewards)
    parts = _unit_parts(values, x_0)
    mix = torch.zeros(parts.shape[:2], dtype=torch.float64)
    for group in range(len(parts)):
        said = parts[group].norm(dim=1).nonzero().flatten()
        if len(said):  # in coordinates of the parts' own span, which QR finds without squaring the rounding
            mix[group, said.cpu()] = _nearest_to_zero(torch.linalg.qr(parts[group, said].T).R.T.cpu())
    return _mixed(parts, mix.to(parts.device), x_0, scale)


def direction_cosines(rewards: Float[Tensor, " g k j"], x_0: Float[Tensor, " g k *d"]) -> Float[Tensor, " g j j"]:
    """cos(G_i, G_j) of the rewards' directions in each group: below 0 they conflict (derived here).

    nan where one of the two is dead, so that `nanmean` over groups counts what was measured.
    ValueError: as `sum_of_rewards`.

    >>> x_0 = torch.tensor([[[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]])
    >>> rewards = torch.stack([x_0[..., 0], x_0[..., 1] - x_0[..., 0]], dim=2)  # at 0 and at 135 degrees
    >>> direction_cosines(rewards, x_0)[0, 0]
    tensor([ 1.0000, -0.7071])
    """
    parts = _unit_parts(_parts(rewards), x_0)
    length = parts.norm(dim=2)
    cosines = parts @ parts.mT / (length[:, :, None] * length[:, None])
    return cosines.clamp(-1, 1).to(torch.promote_types(x_0.dtype, torch.float32))
