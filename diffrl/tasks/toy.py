"""A closed-form 2-D flow model: every piece of the loop in milliseconds, with exact answers to compare against.

Data of prompt c is N(m_c, S^2 I); the exact velocity is v = (x_t - E[x_0|x_t])/t with
E[x_0|x_t] = m + k (x_t - (1-t) m), k = (1-t) S^2/((1-t)^2 S^2 + t^2). Trainable: the means m_c and log S.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from diffrl.models import Model
from diffrl.sampling import time_grid
from diffrl.types import Cond, Params

PROMPTS = ("north", "east", "south", "west")


def toy_velocity(params: Params, x_t: Tensor, t: Tensor, cond: Cond) -> Tensor:
    """The exact velocity of N(m_c, S^2 I), m_c = params["mean"][cond["prompt"]], log S = params["log_std"]; x_t " b 2".

    >>> params = {"mean": torch.tensor([[0.0, 1.0]]), "log_std": torch.tensor(0.0)}
    >>> toy_velocity(params, torch.tensor([[2.0, 0.0]]), torch.ones(1), {"prompt": torch.tensor([0])})  # t = 1: x_t - m
    tensor([[ 2., -1.]])
    """
    mean = params["mean"][cond["prompt"]]
    variance = torch.exp(2 * params["log_std"])
    t = t[:, None]
    k = (1 - t) * variance / ((1 - t) ** 2 * variance + t**2)
    return (x_t - mean - k * (x_t - (1 - t) * mean)) / t


def toy_model(*, std: float = 0.5, dtype: torch.dtype = torch.float32) -> Model:
    """Four prompts, all at the origin at first, std S. `decode` returns the points themselves: images are " b 2".

    >>> toy_model(std=0.5).params["log_std"].exp().item()
    0.5
    """
    params = {
        "mean": torch.zeros(len(PROMPTS), 2, dtype=dtype, requires_grad=True),
        "log_std": torch.tensor(math.log(std), dtype=dtype, requires_grad=True),
    }

    def encode(prompts: Sequence[str]) -> dict[str, Tensor]:
        return {"prompt": torch.tensor([PROMPTS.index(p) for p in prompts])}

    return Model(
        velocity=toy_velocity,
        params=params,
        encode=encode,
        decode=lambda latents: latents,
        latent_shape=lambda: (2,),
        times=lambda steps: time_grid(steps, dtype=dtype),
    )


def toward_compass(points: Tensor, prompts: Sequence[str]) -> Tensor:
    """Reward -|x - e_c|^2 with e_c the unit vector of the compass direction: its best mean is e_c.

    >>> toward_compass(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), ["east", "west"])
    tensor([-2., -1.])
    """
    targets = {"north": (0.0, 1.0), "east": (1.0, 0.0), "south": (0.0, -1.0), "west": (-1.0, 0.0)}
    goal = torch.tensor([targets[p] for p in prompts], dtype=points.dtype)
    return -((points - goal) ** 2).sum(1)
