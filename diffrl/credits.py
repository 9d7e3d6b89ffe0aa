"""The `credit` pieces of an algorithm: from a batch's rewards to what each sample is told, tensors with one row per sample.

"has_reward" Bool " b" is always there: a sample whose reward is not finite is not trained on.
"""

from collections.abc import Callable, Sequence

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from diffrl.checks import promote, require_count, require_number, shapes
from diffrl.guidance import Direction, aggregate_direction, batch_std, group_advantages, optimality, pair_labels
from diffrl.types import Batch

Labels = Callable[[Batch], Tensor]
Advantages = Callable[[Batch], Tensor]
Credit = dict[str, Tensor]


# ---- directions -------------------------------------------------------------------------------------------------------


def scalar_rewards(batch: Batch) -> Float[Tensor, " g k"]:
    """The rewards as they are: labels for `covariance_credit`.

    >>> scalar_rewards(Batch(None, torch.tensor([[0.5, 2.0]]), {}))
    tensor([[0.5000, 2.0000]])
    """
    return batch.rewards


def random_pairs(batch: Batch) -> Float[Tensor, " g k"]:
    """Win/lose labels of random disjoint pairs, drawn from the batch's own seeds (a new pairing per iteration).

    No example: `guidance.pair_labels` has one.
    """
    seeds = batch.trajectory.seeds
    generator = None if seeds is None else torch.Generator().manual_seed(int(seeds[0]) % 2**63)
    return pair_labels(batch.rewards, generator=generator)


def best_against_worst(batch: Batch) -> Float[Tensor, " g k"]:
    """Labels of the pairing best-worst, second best-second worst, ...: 1 above, 0 below, 1/2 on ties, nan unpaired.

    >>> best_against_worst(Batch(None, torch.tensor([[1.0, 2.0, 3.0, 4.0, 2.5]]), {}))
    tensor([[0., 0., 1., 1., nan]])
    """
    finite = torch.isfinite(batch.rewards)
    labels = torch.full_like(batch.rewards, torch.nan)
    for group, row in enumerate(batch.rewards):
        order = [int(i) for i in row.nan_to_num(-torch.inf).argsort(descending=True) if finite[group, i]]
        for a, b in zip(order[: len(order) // 2], order[::-1]):
            won = 0.5 if row[a] == row[b] else 1.0
            labels[group, a], labels[group, b] = won, 1 - won
    return labels


def labels_of(batch: Batch, labels: Labels) -> Float[Tensor, " g k"]:
    """labels(batch) as floating-point numbers. ValueError: another shape than the rewards'.

    >>> labels_of(Batch(None, torch.tensor([[1.0, 3.0]]), {}), lambda batch: batch.rewards > 2)
    tensor([[0., 1.]])
    """
    values = labels(batch)
    if tuple(values.shape) != tuple(batch.rewards.shape):  # another grouping would mix prompts
        raise ValueError(f"labels must have the rewards' shape: {shapes(labels=values, rewards=batch.rewards)}")
    return values if values.is_floating_point() else values.float()  # counts and wins are numbers


def direction_credit(
    value: Float[Tensor, " g *d"], alive: Bool[Tensor, " g"], rewarded: Bool[Tensor, " g k"]
) -> Credit:
    """{"direction", "alive", "has_reward"} of each sample " b ...": the first two are those of its group.

    >>> told = direction_credit(torch.tensor([[5.0]]), torch.tensor([True]), torch.tensor([[True, False]]))
    >>> told["direction"].tolist(), told["has_reward"].tolist()
    ([[5.0], [5.0]], [True, False])
    """
    k = rewarded.shape[1]
    return {
        "direction": value.repeat_interleave(k, 0),
        "alive": alive.repeat_interleave(k, 0),
        "has_reward": rearrange(rewarded, "g k -> (g k)"),
    }


def covariance_credit(
    *,
    labels: Labels = scalar_rewards,
    direction: Callable[[Tensor, Tensor], Direction] | None = None,
    weight: Callable[[Tensor, Tensor], Tensor] | None = None,
    scale: float = 1.0,
    rms_axes: Sequence[int] | None = None,
) -> Callable[[Batch], Credit]:
    """credit: {"direction": G of the sample's prompt " b *d", "alive": Bool " b"}, from labels " g k" (nan: no reward).

    alive is False for samples of dead groups; "has_reward" False for samples without a label: neither is trained on.
    direction: (labels " g k", x_0 " g k *d") -> Direction; None: `aggregate_direction` with scale and rms_axes.
    weight: (labels, x_0) -> " g" >= 0, loss weight of each group, as "weight" " b". ValueError: labels of another shape
    than the rewards; a direction of one's own together with scale or rms_axes.

    >>> from diffrl.types import Trajectory
    >>> walk = Trajectory(torch.tensor([[2.0], [0.0]]), *[None] * 8)
    >>> covariance_credit(scale=0.5)(Batch(walk, torch.tensor([[1.0, 0.0]]), {}))["direction"].tolist()
    [[0.5], [0.5]]
    """
    if direction is not None and (scale != 1.0 or rms_axes is not None):
        raise ValueError(f"scale={scale} and rms_axes={rms_axes} belong to aggregate_direction, not to {direction!r}")

    def credit(batch: Batch) -> Credit:
        values = labels_of(batch, labels)
        g, k = values.shape
        x_0 = rearrange(batch.trajectory.x_0, "(g k) ... -> g k ...", g=g)
        if direction is None:
            found = aggregate_direction(values, x_0, scale=scale, rms_axes=rms_axes)
        else:
            found = direction(values, x_0)
        told = direction_credit(found.value, found.alive, torch.isfinite(values))
        return told if weight is None else told | {"weight": weight(values, x_0).repeat_interleave(k, 0)}

    return credit


# ---- advantages -------------------------------------------------------------------------------------------------------


def unbiased_group_std(rewards: Float[Tensor, " g k"]) -> Float[Tensor, " g 1"]:
    """sqrt(sum (R - Rbar)^2/(k - 1)) of each group's finite rewards: DanceGRPO's published spread (torch.std).

    >>> unbiased_group_std(torch.tensor([[1.0, 3.0, float("nan")]]))
    tensor([[1.4142]])
    """
    (rewards,) = promote(rewards)
    centred = rewards - rewards.nanmean(1, keepdim=True)
    count = torch.isfinite(rewards).sum(1, keepdim=True)
    return ((centred**2).nansum(1, keepdim=True) / (count - 1).clamp_min(1)).sqrt()


def advantages_of_sum(*, spread: Callable[[Tensor], Tensor] = batch_std, eps: float = 1e-4) -> Advantages:
    """(Batch) -> `group_advantages` of the reward, which for several rewards is their weighted sum.

    >>> advantages_of_sum(eps=0.0)(Batch(None, torch.tensor([[1.0, 3.0]]), {}))
    tensor([[-1.,  1.]])
    """
    return lambda batch: group_advantages(batch.rewards, spread=spread, eps=eps)


def sum_of_advantages(*, spread: Callable[[Tensor], Tensor] = batch_std, eps: float = 1e-4) -> Advantages:
    """(Batch) -> sum_j w_j A_j over the single rewards' `group_advantages` (MixGRPO): no reward drowns the others by its
    scale. w: the weights of the reward (`Batch.part_weights`; none: 1). A sample that lacks one of them has none. One
    reward: as `advantages_of_sum`.

    >>> parts = torch.tensor([[[1.0, 100.0], [3.0, 0.0]]])  # two rewards that disagree, one of fifty times the spread
    >>> sum_of_advantages(eps=0.0)(Batch(None, parts.sum(2), {}, parts))
    tensor([[0., 0.]])
    """

    def advantages(batch: Batch) -> Tensor:
        if batch.parts is None:
            return group_advantages(batch.rewards, spread=spread, eps=eps)
        complete = torch.isfinite(batch.rewards) & torch.isfinite(batch.parts).all(2)
        each = [torch.where(complete, part, torch.nan) for part in batch.parts.unbind(2)]
        weights = (1.0,) * len(each) if batch.part_weights is None else batch.part_weights
        told = [w * group_advantages(p, spread=spread, eps=eps) for w, p in zip(weights, each, strict=True)]
        return torch.stack(told).sum(0)

    return advantages


def advantage_credit(
    *, advantages: Advantages, clamp: float = 5.0, best_of: int | None = None
) -> Callable[[Batch], Credit]:
    """credit: {"advantage": A clamped to +-clamp " b"}; a sample without reward has A = 0 and is not trained on.

    best_of n: only the n/2 best and n/2 worst samples of each group are trained, by their advantage (DanceGRPO's
    best-of-n); "weight" " b" is k/n for those and 0 for the others, so that the loss is the mean over the selected.
    A over the whole group. ValueError: clamp <= 0, best_of odd or larger than the group.

    >>> credit = advantage_credit(advantages=scalar_rewards, clamp=2.0, best_of=2)
    >>> told = credit(Batch(None, torch.tensor([[-7.0, 0.0, 0.5, 1.0]]), {}))
    >>> told["advantage"].tolist(), told["weight"].tolist()
    ([-2.0, 0.0, 0.5, 1.0], [2.0, 0.0, 0.0, 2.0])
    """
    clamp = require_number("clamp", clamp, low=0, open_low=True, infinite=True)
    if best_of is not None and require_count("best_of", best_of, low=2) % 2:
        raise ValueError(f"best_of must be even (half best, half worst), got {best_of}")

    def credit(batch: Batch) -> Credit:
        values = advantages(batch)
        has_reward = torch.isfinite(batch.rewards)
        if batch.parts is not None:
            has_reward = has_reward & torch.isfinite(batch.parts).all(2)
        told = {
            "advantage": rearrange(values.clamp(-clamp, clamp), "g k -> (g k)"),
            "has_reward": rearrange(has_reward, "g k -> (g k)"),
        }
        if best_of is None:
            return told
        return told | {"weight": rearrange(extremes(values, has_reward, count=best_of), "g k -> (g k)")}

    return credit


def extremes(values: Float[Tensor, " g k"], usable: Tensor, *, count: int) -> Float[Tensor, " g k"]:
    """k/count for the count/2 largest and count/2 smallest usable values of each group, else 0; disjoint under ties.

    A group with fewer than `count` usable values keeps all of those. ValueError: count larger than the group.

    >>> extremes(torch.tensor([[4.0, 1.0, 3.0, 2.0]]), torch.ones(1, 4, dtype=torch.bool), count=2)
    tensor([[2., 2., 0., 0.]])
    """
    g, k = values.shape
    if count > k:
        raise ValueError(f"best_of={count} of a group of {k}")
    weight = torch.zeros_like(values)
    for i in range(g):
        order = [int(j) for j in values[i].argsort(stable=True) if usable[i, j]]
        chosen = order if len(order) <= count else [*order[: count // 2], *order[-(count // 2) :]]
        weight[i, chosen] = k / count
    return weight


def optimality_credit(
    *,
    advantages: Advantages,
    clip: float = 5.0,
    part: Callable[[Tensor], Tensor] | None = None,
) -> Callable[[Batch], Credit]:
    """credit: {"optimality": r = clip(A/clip, -1, 1)/2 + 1/2 " b", "advantage": A}: DiffusionNFT (2509.16117 eq. 7).

    part: a function of A first, e.g. `positive_part` or `negative_part`. ValueError: clip <= 0 or not finite.

    >>> credit = optimality_credit(advantages=scalar_rewards)
    >>> credit(Batch(None, torch.tensor([[-7.0, 0.0, 2.5]]), {}))["optimality"]
    tensor([0.0000, 0.5000, 0.7500])
    """
    clip = require_number("clip", clip, low=0, open_low=True)
    of_batch = advantage_credit(advantages=advantages, clamp=clip)

    def credit(batch: Batch) -> Credit:
        told = of_batch(batch)
        a = told["advantage"] if part is None else part(told["advantage"])
        return told | {"advantage": a, "optimality": optimality(a, clip=clip)}

    return credit


def positive_part(advantages: Tensor) -> Tensor:
    """max(A, 0): the published positive_only mode of DiffusionNFT, r in [1/2, 1]. Both branches still act.

    >>> optimality(positive_part(torch.tensor([-5.0, 5.0])))
    tensor([0.5000, 1.0000])
    """
    return advantages.clamp_min(0)


def negative_part(advantages: Tensor) -> Tensor:
    """min(A, 0): the published negative_only mode, r in [0, 1/2]. Both branches still act.

    >>> optimality(negative_part(torch.tensor([-5.0, 5.0])))
    tensor([0.0000, 0.5000])
    """
    return advantages.clamp_max(0)
