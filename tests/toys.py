"""Training on the closed-form toy, for the tests of the loop and what is around it. No tests here."""

from collections.abc import Callable
from typing import Any

import torch

from diffrl.algorithms import Algorithm, art
from diffrl.loop import train
from diffrl.models import Model
from diffrl.sampling import rollout, sample_seeds
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model

TIMES = tuple(
    f"seconds/{name}"
    for name in ("rollout", "reward", "update", "evaluation", "draft", "requantise", "audit", "policy")
)


def toy_reward(model: Model, reward: Callable = toward_compass, *, samples: int = 32) -> float:
    """Mean reward over seeds that no training iteration draws, by the plain sampler."""
    names = [prompt for prompt in PROMPTS for _ in range(samples)]
    seeds = sample_seeds(2**40, 0, range(len(PROMPTS)), samples).flatten()
    walked = rollout(
        model.velocity, model.params, model.encode(names), model.times(8), seeds=seeds, shape=(2,), keep=[]
    )
    return float(reward(walked.x_0, names).mean())


def adam(model: Model, *, lr: float = 0.06) -> torch.optim.Optimizer:
    return torch.optim.Adam(list(model.params.values()), lr=lr)


def start(model: Model, algorithm: Algorithm | None = None, *, reward: Any = toward_compass, **options: Any) -> Any:
    """The generator of `train` on the toy: four prompts x 8 samples, 5 steps, Adam 0.06, unless said otherwise."""
    optimizer = options.pop("optimizer", None) or adam(model)
    options = {"group_size": 8, "steps": 5, "seed": 0, **options}
    return train(
        model,
        art() if algorithm is None else algorithm,
        options.pop("prompts", PROMPTS),
        reward,
        optimizer,
        **options,
    )


def rows_of(training: Any, count: int) -> list[dict[str, float]]:
    return [next(training) for _ in range(count)]


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without the times, ready to be compared: nan is written as text, since it equals nothing."""
    return [
        {name: "nan" if value != value else value for name, value in row.items() if name not in TIMES} for row in rows
    ]


def values_of(params: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in params.items()}


def same(a: Any, b: Any) -> bool:
    """Equal names, and equal to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def toy_run(**changed: Any) -> tuple[Model, list[dict[str, float]]]:
    """A trained toy and its metrics: options of `start`, and iterations=, model=."""
    iterations, model = changed.pop("iterations", 4), changed.pop("model", None) or toy_model()
    return model, rows_of(start(model, changed.pop("algorithm", None), **changed), iterations)


def wide(algorithm):
    """The algorithm with everything it collected in float64 (the library's noise is float32)."""

    def collect(*args):
        batch = algorithm.collect(*args)
        kept = batch.trajectory._asdict()
        return batch._replace(
            trajectory=batch.trajectory._replace(**{n: x.double() for n, x in kept.items() if n != "seeds"})
        )

    return algorithm._replace(collect=collect)
