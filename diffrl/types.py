"""The convention, and the few types everything else is written in.

    x_t = (1 - t) x_0 + t eps,   t in [0, 1];  t = 1 is noise, sampling walks t from 1 to 0
    v   = dx/dt = eps - x_0      (the sign every diffusers flow model predicts)

DiffusionART's paper writes u = x_0 - eps = -v: velocities, drifts and guidance flip sign between the two; losses, norms,
KLs and inner products do not. A *direction* in this library lives in data space: moving x_0 along it raises the reward,
so the target velocity is `v_old - direction`.

Axes: b samples = g prompts x k samples, prompt-major; `*d` = one sample's latent shape, of any rank; s = kept steps.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jaxtyping import Float, Int
from torch import Tensor

Params: TypeAlias = Mapping[str, Tensor]
"""Trainable tensors by name. Data, never a switch: a velocity called with other params uses those for that one call."""

Cond: TypeAlias = Mapping[str, Tensor]
"""What the velocity is conditioned on: tensors by name, each with leading axis b (or g, one row per prompt)."""

Velocity: TypeAlias = Callable[[Params, Tensor, Tensor, Cond], Tensor]
"""(params, x_t " b *d", t " b", cond) -> v " b *d", v = dx/dt = eps - x_0."""

Step: TypeAlias = Callable[[Tensor, Tensor, Any, Any], tuple[Tensor, Tensor]]
"""(x_t " b *d", v " b *d", t, t_next) -> (mean " b *d", std " b"); t, t_next: float, 0-d or " b". std 0: deterministic."""

Reward: TypeAlias = Callable[[Tensor, Sequence[str]], Tensor]
"""(images, prompts) -> float " b"; nan or inf: this sample has no reward."""


class Trajectory(NamedTuple):
    """What a rollout keeps: its end points, and everything needed to replay the kept steps exactly as they were taken.

    `v` was predicted under the behaviour params; `log_prob` is the transition's log-density (mean over latent axes) of
    the stored `x_next`, nan where `std` is 0. `seeds` is None when the rollout was given none.
    """

    x_0: Float[Tensor, " b *d"]
    x_t: Float[Tensor, " b s *d"]
    x_next: Float[Tensor, " b s *d"]
    v: Float[Tensor, " b s *d"]
    t: Float[Tensor, " s"]
    t_next: Float[Tensor, " s"]
    std: Float[Tensor, " b s"]
    log_prob: Float[Tensor, " b s"]
    seeds: Int[Tensor, " b"] | None


class Gridded(NamedTuple):
    """A velocity that knows how it is sampled: what `Algorithm.collect` is given by the loop. Callable like the velocity.

    times: (steps) -> " steps+1" is the model's own grid, so that a collect that needs another number of steps (a draft)
    can ask for it; steps: sampling steps of the run; shape: one sample's latent shape; iteration: of the training loop,
    for a collect whose window moves (MixGRPO) and which stays a pure function of it; first: the first seed of the iteration's
    first prompt, from which a window is drawn that all prompts, and all ranks, share (None: the first one given).
    """

    velocity: Velocity
    times: Callable[[int], Tensor]
    steps: int
    shape: tuple[int, ...]
    iteration: int = 0
    first: int | None = None

    def __call__(self, params: Params, x_t: Tensor, t: Tensor, cond: Cond) -> Tensor:
        return self.velocity(params, x_t, t, cond)


# ---- what an algorithm is made of -------------------------------------------------------------------------------------

Score: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(latents " b *d", prompt rows " b") -> rewards " b"; after the call `score.parts`, where it exists, is " b j" or None,
and `score.part_weights` its j weights."""

Metrics: TypeAlias = dict[str, float]


class Batch(NamedTuple):
    """One rollout of g prompts x k samples: its trajectory (b = g k rows, prompt-major), rewards, one cond row per prompt.

    parts: the j single rewards that `rewards` is made of, where the reward has several, and their weights; else None.
    metrics: what `collect` measured on the way (`sol_rl`); the loop tells it with its own.
    """

    trajectory: Trajectory
    rewards: Float[Tensor, " g k"]
    cond: Cond
    parts: Float[Tensor, " g k j"] | None = None
    part_weights: tuple[float, ...] | None = None
    metrics: Mapping[str, float] | None = None


class Window(NamedTuple):
    """The rows of a Batch that one optimizer step sees: everything with one row per sample, and the reference params
    (a snapshot of the policy that training started from) where the algorithm asks for them.

    pairs: the (row, kept step) states that one forward sees, where several forwards share the step (time-step packing);
    None: all that the objective trains."""

    trajectory: Trajectory
    rewards: Float[Tensor, " b"]
    cond: Cond
    credit: Mapping[str, Tensor]
    reference: Params | None = None
    pairs: Int[Tensor, " w 2"] | None = None


Objective: TypeAlias = Callable[[Velocity, Params, Window], tuple[Tensor, Tensor, Metrics]]
"""(velocity, params, window) -> (loss " w", keep " w" Bool or weight, metrics), w = samples x trained steps of the window."""


class Algorithm(NamedTuple):
    """Four functions and five facts. `updates`: optimizer steps per batch, each on a disjoint window of
    every prompt's samples. `pool`: seeds drawn per prompt where `collect` needs more than group_size of them.
    `needs_reference`: the objective reads `window.reference`, which the loop then keeps. `memory`: what it remembers between
    updates (`trust_region.AdaptiveRadius`); the loop calls its reset() when training begins, advance() after each update.
    `kept`: samples per prompt that `collect` hands on whatever it is given (sol_rl); group_size must equal it."""

    collect: Callable[[Velocity, Params, Cond, Int[Tensor, " g k"], Score], Batch]
    credit: Callable[[Batch], Mapping[str, Tensor]]
    objective: Objective
    behaviour: Callable[[Params, Params, int], Params]
    updates: int
    pool: int | None = None
    needs_reference: bool = False
    memory: Any = None
    kept: int | None = None
