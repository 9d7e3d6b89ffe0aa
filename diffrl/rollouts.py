"""The `collect` pieces of an algorithm: which steps are sampled how, which are kept for training, where the noise is from.

Every collect needs a velocity that knows its grid (`types.Gridded`, which `loop.train` hands in) and is a pure function of
(velocity, params, cond, seeds): the same seeds give the same batch.
"""

from collections.abc import Callable, Sequence

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from diffrl.checks import require_count
from diffrl.sampling import (
    _checked_keep,
    dpm2_step,
    euler_step,
    interpolate,
    mix_window,
    random_window,
    rollout,
    seeded_noise,
)
from diffrl.types import Batch, Cond, Gridded, Params, Score, Step, Trajectory

TrainedSteps = Callable[[int], Sequence[int]]
Noise = Callable[[Tensor, tuple[int, ...]], Tensor | None]
SUBSET_STREAM = 2**32  # far from the streams 0..n that a rollout draws
RENOISE_STREAM = 2**33


# ---- which steps are trained ------------------------------------------------------------------------------------------


def all_steps(steps: int) -> range:
    """Every step of the rollout is trained.

    >>> all_steps(10)
    range(0, 10)
    """
    return range(steps)


def all_but_last(steps: int) -> range:
    """Every step but the one that ends at t = 0, whose noise would stay in the sample (Flow-GRPO, DanceGRPO).

    >>> all_but_last(8)
    range(0, 7)
    """
    if steps < 2:
        raise ValueError(f"a rollout of {steps} steps has none but the last")
    return range(steps - 1)


def first_half(steps: int) -> range:
    """The noisier half of the steps, rounded up (Flow-DPPO).

    >>> first_half(9)
    range(0, 5)
    """
    return range(-(-steps // 2))


def noisiest_nine_tenths(steps: int) -> range:
    """The first 9/10 of the steps, rounded down, at least one (AWM).

    >>> noisiest_nine_tenths(10), noisiest_nine_tenths(1)
    (range(0, 9), range(0, 1))
    """
    return range(max(9 * steps // 10, 1))


def noisiest(count: int) -> TrainedSteps:
    """The first `count` steps, where x_t is mostly noise: there G is the exact tilt (tests/test_theory.py, total covariance).

    >>> noisiest(3)(10)
    range(0, 3)
    """
    count = require_count("noisiest", count)

    def first(steps: int) -> range:
        if count > steps:
            raise ValueError(f"the noisiest {count} steps of a rollout of {steps}")
        return range(count)

    return first


def three_fifths(steps: int) -> int:
    """How many of `steps` trained steps each trajectory trains, at random: 3/5, rounded down, at least one (DanceGRPO).

    >>> three_fifths(15)
    9
    """
    return max(3 * steps // 5, 1)


def subset_of_steps(seeds: Int[Tensor, " b"], candidates: int, size: int) -> Int[Tensor, " b {size}"]:
    """Sorted random columns, `size` of `candidates` per trajectory, row i a function of seeds[i] alone.

    >>> chosen = subset_of_steps(torch.tensor([5, 5, 6]), 9, 4)
    >>> tuple(chosen.shape), chosen[0].equal(chosen[1]), bool((chosen.diff() > 0).all())
    ((3, 4), True, True)
    """
    if size > candidates:
        raise ValueError(f"steps_per_sample={size} of {candidates} trained steps")
    draws = seeded_noise(seeds, (candidates,), stream=SUBSET_STREAM)
    return draws.argsort(dim=1)[:, :size].sort(dim=1).values


# ---- where the noise is from ------------------------------------------------------------------------------------------


def own_noise(seeds: Int[Tensor, " g k"], shape: tuple[int, ...]) -> None:
    """Every sample starts from its own seed's noise (stream 0).

    >>> own_noise(torch.tensor([[5, 6]]), (4,)) is None  # `rollout` then draws it from the seeds
    True
    """
    return None


def noise_of_the_prompt(seeds: Int[Tensor, " g k"], shape: tuple[int, ...]) -> Float[Tensor, " b *d"]:
    """All k samples of a prompt start from the first one's noise and differ by the noise of their steps (DanceGRPO).

    >>> first, second = noise_of_the_prompt(torch.tensor([[5, 6]]), (4,))
    >>> first.equal(second)
    True
    """
    return seeded_noise(seeds[:, 0], shape).repeat_interleave(seeds.shape[1], 0)


# ---- collect ----------------------------------------------------------------------------------------------------------


def _walk(
    velocity: Gridded,
    params: Params,
    cond: Cond,
    seeds: Tensor,
    kernels: Step | Sequence[Step],
    kept: Sequence[int],
    noise: Noise,
) -> Trajectory:
    """One rollout of every prompt's seeds on the model's own grid, cond repeated over the group."""
    times = velocity.times(velocity.steps)
    start = noise(seeds, velocity.shape)
    return rollout(
        velocity.velocity,
        params,
        _per_sample(cond, seeds),
        times,
        noise=None if start is None else start.to(torch.promote_types(times.dtype, torch.float32)),
        seeds=rearrange(seeds, "g k -> (g k)"),
        shape=velocity.shape,
        step=kernels,
        keep=kept,
    )


def _per_sample(cond: Cond, seeds: Tensor) -> dict[str, Tensor]:
    rows = _rows(seeds)
    return {name: value[rows.to(value.device)] for name, value in cond.items()}


def _rows(seeds: Tensor) -> Tensor:
    return torch.arange(len(seeds), device=seeds.device).repeat_interleave(seeds.shape[1])


def _scored(trajectory: Trajectory, cond: Cond, seeds: Tensor, score: Score) -> Batch:
    k = seeds.shape[1]
    rewards = rearrange(score(trajectory.x_0, _rows(seeds)), "(g k) -> g k", k=k)
    parts = getattr(score, "parts", None)
    if parts is None:
        return Batch(trajectory, rewards, cond)
    weights = getattr(score, "part_weights", None)
    return Batch(trajectory, rewards, cond, rearrange(parts, "(g k) j -> g k j", k=k), weights)


def _gridded(velocity: object) -> Gridded:
    if not isinstance(velocity, Gridded):
        raise ValueError(f"collect needs a types.Gridded velocity (with times, steps, shape), got {velocity!r}")
    return velocity


def _kept(trained_steps: TrainedSteps, steps: int) -> Sequence[int]:
    kept = _checked_keep(trained_steps(steps), steps)
    if not kept:
        raise ValueError(f"trained_steps names none of the {steps} steps: nothing would be trained")
    return kept


def collect_rollout(
    *,
    step: Step | Sequence[Step] = euler_step,
    trained_steps: TrainedSteps = all_steps,
    noise: Noise = own_noise,
) -> Callable[..., Batch]:
    """The plain collect: one rollout under the behaviour params on the model's grid, then one score per sample.

    step: one kernel, or one per sampling step; trained_steps are kept; noise: `own_noise` or `noise_of_the_prompt`.

    >>> line = Gridded(lambda params, x, t, cond: x / t[:, None], lambda n: torch.linspace(1, 0, n + 1), 4, (2,))
    >>> seeds, score = torch.tensor([[1, 2], [3, 4]]), lambda x_0, rows: x_0.abs().sum(1) + rows
    >>> collect_rollout()(line, {}, {}, seeds, score).rewards.tolist()  # straight lines, all of which end at 0
    [[0.0, 0.0], [1.0, 1.0]]
    """

    def collect(velocity: Gridded, params: Params, cond: Cond, seeds: Tensor, score: Score) -> Batch:
        velocity = _gridded(velocity)
        kept = _kept(trained_steps, velocity.steps)
        return _scored(_walk(velocity, params, cond, seeds, step, kept, noise), cond, seeds, score)

    return collect


Where = Callable[[Gridded, Tensor], range]


def random_window_of(size: int) -> Where:
    """Flow-GRPO-Fast's window: `size` steps, one start per rollout, uniform in {0..steps//2 - size}, from the batch's seeds.

    >>> random_window_of(2)(Gridded(None, None, 4, ()), torch.tensor([[5]]))  # 4 steps leave one place: 0
    range(0, 2)
    """
    size = require_count("window", size)

    def where(velocity: Gridded, seeds: Tensor) -> range:
        first = int(seeds[0, 0]) if velocity.first is None else velocity.first
        return random_window(first % 2**63, steps=velocity.steps, size=size)

    return where


def sliding_window_of(size: int, *, stride: int, every: int) -> Where:
    """MixGRPO's window: `size` steps, moved by `stride` after `every` iterations (`sampling.mix_window`).

    >>> sliding_window_of(4, stride=1, every=25)(Gridded(None, None, 25, (), iteration=50), None)
    range(2, 6)
    """
    return lambda velocity, seeds: mix_window(
        velocity.iteration, steps=velocity.steps, size=size, stride=stride, every=every
    )


def collect_window(*, kernel: Step, window: Where, outside: Step = euler_step) -> Callable[..., Batch]:
    """`kernel` inside a window of steps, which are kept and trained, `outside` elsewhere.

    window: (Gridded velocity, seeds) -> range, inside 0..steps-2. Where it lay comes back as trajectory.t and .std.

    >>> line = Gridded(lambda params, x, t, cond: x / t[:, None], lambda n: torch.linspace(1, 0, n + 1), 4, (2,))
    >>> step = lambda x, v, t, t_next: (x, torch.full((len(x),), 0.5))
    >>> collect = collect_window(kernel=step, window=lambda velocity, seeds: range(1, 2))
    >>> walk = collect(line, {}, {}, torch.tensor([[1]]), lambda x_0, rows: x_0[:, 0]).trajectory
    >>> walk.t.tolist(), walk.std.tolist()
    ([0.75], [[0.5]])
    """

    def collect(velocity: Gridded, params: Params, cond: Cond, seeds: Tensor, score: Score) -> Batch:
        velocity = _gridded(velocity)
        kept = window(velocity, seeds)
        if not len(kept) or min(kept) < 0 or max(kept) > velocity.steps - 2:
            raise ValueError(f"the window {list(kept)} must hold steps of 0..{velocity.steps - 2}, never the last one")
        kernels = [kernel if i in kept else outside for i in range(velocity.steps)]
        return _scored(_walk(velocity, params, cond, seeds, kernels, kept, own_noise), cond, seeds, score)

    return collect


def collect_renoised(*, step: Step = dpm2_step, trained_steps: TrainedSteps = all_steps) -> Callable[..., Batch]:
    """An ODE rollout, then states of the *forward* process: x_t = (1 - t) x_0 + t eps at the trained steps' times, eps
    fresh per sample and step (a function of the sample's seed), v under the same behaviour params (DiffusionNFT, AWM).

    Stored: x_t, v, and x_next, the same straight path at t_next; std 0 (no density). eps - x_0 = (x_t - x_0)/t.

    >>> line = Gridded(lambda params, x, t, cond: x / t[:, None], lambda n: torch.linspace(1, 0, n + 1), 4, (2,))
    >>> walk = collect_renoised()(line, {}, {}, torch.tensor([[1]]), lambda x_0, rows: x_0[:, 0]).trajectory
    >>> walk.t.tolist(), torch.allclose(walk.x_t[0, 1], 0.75 * walk.x_t[0, 0])  # x_0 = 0, and eps is fresh at each t
    ([1.0, 0.75, 0.5, 0.25], False)
    """

    def collect(velocity: Gridded, params: Params, cond: Cond, seeds: Tensor, score: Score) -> Batch:
        velocity = _gridded(velocity)
        kept = _kept(trained_steps, velocity.steps)
        walked = _walk(velocity, params, cond, seeds, step, [], own_noise)
        batch = _scored(walked, cond, seeds, score)  # first, as decode or the reward may refuse
        return batch._replace(trajectory=renoise(velocity, params, _per_sample(cond, seeds), walked, kept))

    return collect


def renoise(velocity: Gridded, params: Params, cond: Cond, walked: Trajectory, kept: Sequence[int]) -> Trajectory:
    """The trajectory of forward-process states of `walked.x_0` at the grid's steps `kept`: see `collect_renoised`.

    cond: one row per sample. ValueError: a walk without seeds, kept unsorted, repeated or out of range, a velocity that
    is not finite. No example: `collect_renoised` has one.
    """
    if walked.seeds is None:
        raise ValueError("fresh noise needs a trajectory with seeds")
    kept, grid = _checked_keep(kept, velocity.steps), velocity.times(velocity.steps).to(walked.x_0)
    parts = []
    for i in kept:
        noise = seeded_noise(walked.seeds, walked.x_0.shape[1:], stream=RENOISE_STREAM + i).to(walked.x_0)
        x_t, x_next = (interpolate(walked.x_0, noise, t) for t in (grid[i], grid[i + 1]))
        v = rollout(velocity.velocity, params, cond, grid[i : i + 2], noise=x_t, keep=[0]).v[:, 0]
        parts.append((x_t, x_next, v))
    x_t, x_next, v = (torch.stack(column, dim=1) for column in zip(*parts, strict=True))
    index = torch.tensor(kept, device=grid.device)
    std = grid.new_zeros(x_t.shape[:2])
    return walked._replace(
        x_t=x_t,
        x_next=x_next,
        v=v,
        t=grid[index],
        t_next=grid[index + 1],
        std=std,
        log_prob=torch.full_like(std, torch.nan),
    )
