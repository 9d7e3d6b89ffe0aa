"""How different the samples of a group still are, on x_0 " g k *d": report beside the reward, relative to iteration 0.

A sample whose latents are not all finite is left out. float64 inside; nan where a group has nothing to measure.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from diffrl.checks import require_tensors, shapes

COLLAPSED = 1e-24  # squared deviation this small beside the squared latents is float64 rounding


def _measured(x_0: Tensor, measure: Callable[[int, Tensor], Tensor]) -> Tensor:
    """measure(group, centred finite samples " n D" in float64) of each group with two or more, else nan."""
    require_tensors(x_0=x_0)
    if x_0.ndim < 2:
        raise ValueError(f"x_0 must be (g, k, *d), got {tuple(x_0.shape)}")
    found = torch.full((len(x_0),), math.nan, dtype=torch.float64, device=x_0.device)
    for group, samples in enumerate(x_0.detach().reshape(*x_0.shape[:2], math.prod(x_0.shape[2:]))):
        x = samples[torch.isfinite(samples).all(1)].double()
        if len(x) >= 2:
            centred = x - x.mean(0)
            collapsed = bool(centred.square().sum() <= COLLAPSED * x.square().sum())
            found[group] = measure(group, torch.zeros_like(centred) if collapsed else centred)
    return found.to(torch.promote_types(x_0.dtype, torch.float32))


def pairwise_distance(x_0: Float[Tensor, " g k *d"]) -> Float[Tensor, " g"]:
    """sqrt(mean over pairs i < j of mean_d (x_i - x_j)^2): the typical RMS distance of two samples (derived here).

    Equal to sqrt(2) times the unbiased std of the latents, pooled over d. Samples with nan or inf are left out; fewer
    than two: nan; equal samples: 0. In latent units. ValueError: x_0 not " g k *d".

    >>> pairwise_distance(torch.tensor([[[0.0, 0.0], [3.0, 3.0]], [[1.0, 1.0], [1.0, 1.0]]]))
    tensor([3., 0.])
    """
    return _measured(x_0, lambda _, x: (2 * x.square().mean(1).sum() / (len(x) - 1)).sqrt())


def participation_ratio(x_0: Float[Tensor, " g k *d"]) -> Float[Tensor, " g"]:
    """(tr M)^2/tr M^2 of the centred Gram matrix M: how many dimensions the group spreads over, 1 to min(k-1, D).

    Derived here. Free of the latents' scale. Samples with nan or inf are left out; fewer than two, or all equal: nan.
    ValueError: x_0 not " g k *d".

    >>> participation_ratio(torch.tensor([[[0.0, 0.0], [1.0, 1.0], [5.0, 5.0]]]))
    tensor([1.])
    """

    def ratio(_: int, x: Tensor) -> Tensor:
        gram = x @ x.T
        return gram.trace() ** 2 / gram.square().sum()

    return _measured(x_0, ratio)


def share_along(x_0: Float[Tensor, " g k *d"], direction: Float[Tensor, " g *d"]) -> Float[Tensor, " g"]:
    """sum_i <G, x_i - xbar>^2/(|G|^2 sum_i |x_i - xbar|^2) in [0, 1]: the share of the group's variance along G.

    Derived here. 1/D for isotropic samples. Samples with nan or inf are left out; fewer than two, all equal, or G = 0
    (a dead group): nan. ValueError: x_0 not " g k *d"; direction not " g *d" or not finite.

    >>> share_along(torch.tensor([[[0.0, 0.0], [1.0, 1.0]]]), torch.tensor([[1.0, 0.0]]))
    tensor([0.5000])
    """
    require_tensors(x_0=x_0, direction=direction)
    if direction.shape != x_0.shape[:1] + x_0.shape[2:]:
        raise ValueError(f"direction must be (g, *d) with x_0's (g, k, *d): {shapes(x_0=x_0, direction=direction)}")
    if not bool(torch.isfinite(direction).all()):
        raise ValueError(f"direction is not finite at {(~torch.isfinite(direction)).nonzero().tolist()[:8]}")
    along = direction.detach().double().reshape(len(x_0), math.prod(x_0.shape[2:]))

    def share(group: int, x: Tensor) -> Tensor:
        unit = along[group] / along[group].norm()
        return ((x @ unit).square().sum() / x.square().sum()).clamp_max(1)

    return _measured(x_0, share)
