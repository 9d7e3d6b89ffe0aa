"""From noise to samples: time grids, seeds, rollouts, windows and wrappers; the transition kernels come from `kernels`.

Every kernel is one function `(x_t, v, t, t_next) -> (mean, std)`, used alike by rollout, replay and KL. Equations are in
the library's convention (x_t = (1 - t) x_0 + t eps, v = eps - x_0, D = t - t_next > 0).
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffrl.checks import (
    column,
    promote,
    require_batch,
    require_cond,
    require_count,
    require_number,
    require_tensors,
    shapes,
)
from diffrl.kernels import (
    Past,
    Time,
    cps_step,
    dance_sde_step,
    dpm2_step,
    euler_step,
    flow_sde_step,
    interpolate,
    latent_mean,
    latent_sum,
    predict_noise,
    predict_x_0,
    transition_kl,
    transition_log_prob,
)
from diffrl.types import Cond, Params, Step, Trajectory, Velocity

__all__ = [
    "Past",
    "Time",
    "chunked",
    "classifier_free",
    "cps_step",
    "dance_sde_step",
    "dpm2_step",
    "euler_step",
    "flow_sde_step",
    "interpolate",
    "latent_mean",
    "latent_sum",
    "mix_window",
    "mix_windows",
    "predict_noise",
    "predict_x_0",
    "random_window",
    "rollout",
    "sample_seeds",
    "sde_window",
    "seeded_noise",
    "time_grid",
    "transition_kl",
    "transition_log_prob",
]


def time_grid(steps: int, *, shift: float = 1.0, dtype: torch.dtype | None = None) -> Float[Tensor, " {steps}+1"]:
    """t_i = s u / (1 + (s - 1) u) with u = 1 - i/steps: strictly decreasing from 1 to 0, the shift s applied once.

    The shift is SD3's (2403.03206 eq. 23). dtype: torch's default, never below float32. ValueError: steps < 1,
    shift <= 0, or a grid so fine that two of its times round to the same number.

    >>> time_grid(4, shift=3.0)
    tensor([1.0000, 0.9000, 0.7500, 0.5000, 0.0000])
    """
    steps = require_count("steps", steps)
    shift = require_number("shift", shift, low=0, open_low=True)
    u = 1 - torch.arange(steps + 1, dtype=torch.float64) / steps
    t = shift * u / (shift * u + (1 - u))  # the same, and exactly 1 at u = 1
    t = t.to(torch.promote_types(dtype or torch.get_default_dtype(), torch.float32))
    if not bool((t.diff() < 0).all()):
        raise ValueError(f"steps={steps} with shift={shift} gives times that coincide in {t.dtype}")
    return t


def seeded_noise(seeds: Int[Tensor, " b"], shape: Sequence[int], *, stream: int = 0) -> Float[Tensor, " b *d"]:
    """Standard normal float32 noise whose row i is a function of (seeds[i], stream) alone: Philox keyed by the pair.

    seeds: int64, any value; shape: one sample's; stream >= 0. The pair is the key itself, so (s, stream) and
    (s + 1, stream - 1) never alias; no global generator is touched; drawn on the CPU, returned on seeds' device, so
    every device sees the same numbers. ValueError: seeds not " b" integers, stream negative, bad shape.

    >>> torch.equal(seeded_noise(torch.tensor([7, 8]), (3,))[1:], seeded_noise(torch.tensor([8]), (3,)))
    True
    """
    _checked_seeds(seeds)
    stream = require_count("stream", stream, low=0)
    if not isinstance(shape, Sequence):
        raise ValueError(f"shape must be one sample's shape, a sequence of integers, got {shape!r}")
    size = tuple(require_count("shape", n, low=0) for n in shape)
    keys = [int(s) % 2**64 for s in seeds.tolist()]
    draws = [
        np.random.Generator(np.random.Philox(key=(stream << 64) + k)).standard_normal(size, np.float32) for k in keys
    ]
    noise = np.stack(draws) if draws else np.zeros((0, *size), np.float32)
    return torch.from_numpy(noise).to(seeds.device)


def _checked_seeds(seeds: Tensor) -> Tensor:
    if not isinstance(seeds, Tensor) or seeds.ndim != 1 or seeds.is_floating_point() or seeds.dtype == torch.bool:
        raise ValueError(f"seeds must be a (b,) integer tensor, got {shapes(seeds=seeds)}")
    return seeds


def sample_seeds(seed: int, iteration: int, prompts: Sequence[int], members: int) -> Int[Tensor, " g k"]:
    """Seeds of one iteration's samples: a hash (numpy's SeedSequence) of (seed, iteration, prompt, member), 63 bits.

    prompts: indices of the g prompts; members: k. Any sample's seed is independent of how many others are drawn.

    >>> bool((sample_seeds(0, 3, [5, 6], 4)[1, :2] == sample_seeds(0, 3, [6], 2)[0]).all())
    True
    """
    seed, iteration = require_count("seed", seed, low=0), require_count("iteration", iteration, low=0)
    rows = [[_hash63(seed, iteration, int(p), m) for m in range(members)] for p in prompts]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), members)


def _hash63(*words: int) -> int:
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(1))


def rollout(
    velocity: Velocity,
    params: Params,
    cond: Cond,
    times: Float[Tensor, " n1"],
    *,
    noise: Float[Tensor, " b *d"] | None = None,
    seeds: Int[Tensor, " b"] | None = None,
    shape: Sequence[int] | None = None,
    step: Step | Sequence[Step] = euler_step,
    keep: Sequence[int] | None = None,
) -> Trajectory:
    """Walk `times` from noise to data, x_next = mean + std * noise with (mean, std) = step(x_t, v, t, t_next).

    The state at times[0] is `noise`, or stream 0 of `seeds` with one sample's `shape`; step i draws stream i + 1 of the
    seeds (with both, the noise starts and the seeds drive the steps). A start drawn from seeds has the times' dtype, one
    given as noise its own, both at least float32. step: one kernel or one per step. keep: sorted step indices to store,
    None = all; memory is linear in kept steps only. cond: tensors with leading axis b. Nothing here carries gradient.
    What is stored is what is scored. A kernel with a keyword `past` (`dpm2_step`) is given the step before as
    `Past(x_0, t)`, whichever kernel took it; None on the first step and after a stochastic one (t = inf in the rows that
    drew noise, if only some did).

    ValueError: times not strictly decreasing inside [0, 1]; neither noise nor seeds; seeds without shape; a
    stochastic kernel without seeds; a wrong number of kernels; keep unsorted, repeated or out of range; a cond tensor
    whose leading axis is not b; a velocity of another shape, or not finite (names the step, t and the number of rows).

    >>> rollout(lambda params, x_t, t, cond: 0 * x_t + 3, {}, {}, time_grid(4), noise=torch.ones(1, 1)).x_0  # 1 - 3
    tensor([[-2.]])
    """
    grid = _checked_times(times)
    n = len(grid) - 1
    kernels = _checked_kernels(step, n)
    remembers = [*map(_takes_past, kernels), False]
    kept = _checked_keep(keep, n)
    x = _start(grid, noise, seeds, shape)
    b = len(x)
    require_cond(cond, b)
    grid = grid.to(x)
    rows: list[tuple[Tensor, ...]] = []
    past: Past | None = None
    with torch.no_grad():
        for i, kernel in enumerate(kernels):
            t, t_next = grid[i], grid[i + 1]
            v = _finite_velocity(velocity(params, x, t.expand(b), cond), x, i, float(t))
            memory = {"past": past} if remembers[i] else {}
            mean, std = _checked_transition(kernel(x, v, t, t_next, **memory), x, i)
            x_next = mean
            if bool((std > 0).any()):
                if seeds is None:
                    raise ValueError(
                        f"step {i} is stochastic (std {float(std.max()):.4g}): give seeds=, not noise= alone"
                    )
                x_next = mean + column(std, x) * seeded_noise(seeds, x.shape[1:], stream=i + 1).to(x)
            if i in kept:
                rows.append((x, x_next, v, std, transition_log_prob(x_next, mean, std)))
            past = _past(x, v, t, std) if remembers[i + 1] else None
            x = x_next
    return _pack(x, rows, grid, kept, seeds)


def _start(times: Tensor, noise: Tensor | None, seeds: Tensor | None, shape: Sequence[int] | None) -> Tensor:
    """The state at times[0]: the noise, or stream 0 of the seeds, detached, float32 or better, nobody else's memory."""
    if noise is None:
        if seeds is None or shape is None:
            raise ValueError(f"give noise=, or seeds= with one sample's shape=: {shapes(seeds=seeds, shape=shape)}")
        noise = seeded_noise(seeds, shape).to(torch.promote_types(times.dtype, torch.float32))
    elif shape is not None and tuple(shape) != tuple(noise.shape[1:]):
        raise ValueError(f"shape {tuple(shape)} is not one sample's of {shapes(noise=noise)}")
    b = require_batch(noise=noise)
    if seeds is not None and tuple(_checked_seeds(seeds).shape) != (b,):
        raise ValueError(f"one seed per sample: {shapes(seeds=seeds, noise=noise)}")
    return promote(noise.detach().clone())[0]


def _takes_past(kernel: Callable) -> bool:
    """Whether the kernel can be called with past=...; functools.partial and functools.wraps are seen through."""
    try:
        parameter = inspect.signature(kernel).parameters.get("past")
    except (TypeError, ValueError):  # a callable written in C
        return False
    return parameter is not None and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)


def _past(x: Tensor, v: Tensor, t: Tensor, std: Tensor) -> Past | None:
    """What the step just taken leaves to the next: nothing in the rows that drew noise, which begin anew."""
    noisy = std > 0
    if bool(noisy.all()):
        return None
    return Past(predict_x_0(x, v, t), torch.where(noisy, torch.full_like(std, math.inf), t))


def _pack(x: Tensor, rows: list, grid: Tensor, kept: list[int], seeds: Tensor | None) -> Trajectory:
    if rows:
        x_t, x_next, v, std, log_prob = (torch.stack(parts, dim=1) for parts in zip(*rows, strict=True))
    else:
        x_t = x_next = v = x.new_zeros(x.shape[0], 0, *x.shape[1:])
        std = log_prob = x.new_zeros(x.shape[0], 0)
    index = torch.tensor(kept, dtype=torch.long, device=grid.device)
    seeds = None if seeds is None else seeds.clone()
    return Trajectory(x, x_t, x_next, v, grid[index], grid[index + 1], std, log_prob, seeds)


def _checked_times(times: Tensor) -> Tensor:
    if not isinstance(times, Tensor) or times.ndim != 1 or len(times) < 2 or not times.is_floating_point():
        raise ValueError(f"times must be a (steps+1,) float tensor with steps >= 1, got {shapes(times=times)}")
    if not bool(((times >= 0) & (times <= 1)).all()) or not bool((times.diff() < 0).all()):
        raise ValueError(f"times must decrease strictly inside [0, 1], got {times.tolist()}")
    return times


def _checked_kernels(step: Step | Sequence[Step], n: int) -> list[Callable[..., tuple[Tensor, Tensor]]]:
    if not callable(step) and not isinstance(step, Sequence):
        raise ValueError(f"step must be a kernel or a sequence of {n}, got {step!r}")
    kernels = [step] * n if callable(step) else list(step)
    if wrong := [k for k in kernels if not callable(k)]:
        raise ValueError(f"step holds {wrong[0]!r}, which is no kernel (x_t, v, t, t_next) -> (mean, std)")
    if len(kernels) != n:
        raise ValueError(f"step holds {len(kernels)} kernels for {n} steps")
    return kernels


def _checked_keep(keep: Sequence[int] | None, n: int) -> list[int]:
    if keep is not None and not hasattr(keep, "__iter__"):
        raise ValueError(f"keep must be a sequence of step indices, got {keep!r}")
    kept = list(range(n)) if keep is None else [require_count("keep", i, low=0) for i in keep]
    if any(not 0 <= i < n for i in kept) or any(a >= b for a, b in itertools.pairwise(kept)):
        raise ValueError(f"keep must be sorted step indices in 0..{n - 1} without repeats, got {kept}")
    return kept


def _finite_velocity(v: Tensor, x: Tensor, i: int, t: float) -> Tensor:
    require_tensors(velocity=v)
    if v.shape != x.shape:
        raise ValueError(f"velocity at step {i} has another shape than the state: {shapes(v=v, x_t=x)}")
    v = v.to(x.dtype, copy=True)  # a compiled network may return the same buffer at every call
    bad = ~torch.isfinite(v).flatten(1).all(1) if v.ndim > 1 else ~torch.isfinite(v)
    if bool(bad.any()):
        raise ValueError(
            f"velocity is not finite at step {i}, t = {t:.6g}, in {int(bad.sum())} of {len(bad)} rows "
            f"(the network's dtype may be too narrow)"
        )
    return v


def _checked_transition(transition: tuple[Tensor, Tensor], x: Tensor, i: int) -> tuple[Tensor, Tensor]:
    """(mean, std) of a kernel in the state's dtype; ValueError unless (" b *d", " b"), finite, std >= 0."""
    mean, std = transition
    require_tensors(mean=mean, std=std)
    if mean.shape != x.shape or tuple(std.shape) != (len(x),):
        raise ValueError(
            f"the kernel of step {i} must return mean {tuple(x.shape)}, std ({len(x)},): {shapes(mean=mean, std=std)}"
        )
    if not bool(torch.isfinite(mean).all()):
        raise ValueError(f"the kernel of step {i} returned a mean that is not finite")
    if not bool((torch.isfinite(std) & (std >= 0)).all()):
        raise ValueError(f"the kernel of step {i} returned a std that is not finite and >= 0: {std.tolist()}")
    return mean.to(x.dtype), std.to(x.dtype)


def sde_window(steps: int, *, start: int, size: int) -> range:
    """The steps start..start+size-1 that are sampled stochastically and trained, inside 0..steps-2.

    Never the step that ends at t = 0 (its noise would stay in the sample). ValueError past that limit.

    >>> sde_window(10, start=2, size=3)
    range(2, 5)
    """
    steps, start = require_count("steps", steps), require_count("start", start, low=0)
    size = require_count("size", size)
    if start + size > steps - 1:
        raise ValueError(
            f"a window of size {size} at start {start} passes the last allowed step {steps - 2} of {steps}"
        )
    return range(start, start + size)


def mix_window(i: int, *, steps: int, size: int, stride: int, every: int) -> range:
    """MixGRPO's sliding window (2507.21802) in iteration i >= 0: it starts at stride * ((i // every) mod places).

    places = (steps - 1 - size) // stride + 1: the window moves by `stride` after `every` iterations, stays full and
    inside 0..steps-2, and past the end rolls back to the start (the published schedule shrinks there and trains nothing
    for some iterations). A function of i alone, so that a resumed run goes on where it stopped. ValueError: i < 0, counts
    < 1, a size that fits nowhere.

    >>> [mix_window(i, steps=6, size=3, stride=2, every=1) for i in range(3)]
    [range(0, 3), range(2, 5), range(0, 3)]
    """
    i, stride, every = require_count("i", i, low=0), require_count("stride", stride), require_count("every", every)
    first = sde_window(steps, start=0, size=size)
    places = (steps - 1 - len(first)) // stride + 1
    return sde_window(steps, start=i // every % places * stride, size=size)


def mix_windows(steps: int, *, size: int, stride: int, every: int) -> Iterator[range]:
    """`mix_window` of the iterations 0, 1, 2, ..., endless. ValueError at the call: counts < 1, a size that fits nowhere.

    >>> windows = mix_windows(25, size=4, stride=1, every=2)
    >>> [next(windows).start for _ in range(5)]
    [0, 0, 1, 1, 2]
    """
    mix_window(0, steps=steps, size=size, stride=stride, every=every)
    return (mix_window(i, steps=steps, size=size, stride=stride, every=every) for i in itertools.count())


def random_window(seed: int, *, steps: int, size: int) -> range:
    """Flow-GRPO-Fast's window (2505.05470): its start is uniform in {0, ..., max(steps // 2 - size, 0)}.

    A function of the seed alone (numpy's SeedSequence, in a key space apart from `sample_seeds`), inside 0..steps-2.
    ValueError: seed < 0, counts < 1, a size that fits nowhere.

    >>> random_window(0, steps=10, size=5)
    range(0, 5)
    """
    seed = require_count("seed", seed, low=0)
    sde_window(steps, start=0, size=size)
    word = np.random.SeedSequence(seed, spawn_key=(1,)).generate_state(1, np.uint64)[0]
    return sde_window(steps, start=int(word) % (max(steps // 2 - size, 0) + 1), size=size)


def classifier_free(velocity: Velocity, *, scale: float) -> Velocity:
    """v_uncond + scale (v_cond - v_uncond): classifier-free guidance (2207.12598) as a wrapper around a velocity.

    cond["uncond.NAME"] replaces cond["NAME"] in the unconditional call; neither call sees an `uncond.` key. At scale 1
    there is one call, of the condition alone. float32 or better, since guidance amplifies the rounding of half precision.
    ValueError: scale not finite; a twin without its NAME; scale other than 1 and no twin at all.

    >>> cond = {"text": torch.tensor([3.0]), "uncond.text": torch.tensor([1.0])}
    >>> classifier_free(lambda params, x_t, t, cond: cond["text"], scale=4.5)({}, None, None, cond)  # 1 + 4.5 (3 - 1)
    tensor([10.])
    """
    scale = require_number("scale", scale)

    def guided(params: Params, x_t: Tensor, t: Tensor, cond: Cond) -> Tensor:
        twins = {k.removeprefix("uncond."): v for k, v in cond.items() if k.startswith("uncond.")}
        given = {k: v for k, v in cond.items() if not k.startswith("uncond.")}
        if unknown := sorted(twins.keys() - given.keys()):
            raise ValueError(f"cond has uncond twins of names it lacks: {unknown}; it has {sorted(given)}")
        v_cond = velocity(params, x_t, t, given)
        if scale == 1:
            return promote(v_cond)[0]
        if not twins:
            raise ValueError(f"guidance scale {scale} needs uncond.NAME entries in cond, which has {sorted(given)}")
        v_cond, v_uncond = promote(v_cond, velocity(params, x_t, t, {**given, **twins}))
        return v_uncond + scale * (v_cond - v_uncond)

    return guided


def chunked(velocity: Velocity, *, size: int) -> Velocity:
    """The same velocity, called on at most `size` rows at a time: bounded memory, equal to 1e-5 in float32.

    A row's last bits may depend on how many rows share its call (a property of the matrix library): use one size in
    rollout and replay where bits matter. ValueError: size < 1.

    >>> sizes = []
    >>> v = chunked(lambda params, x_t, t, cond: sizes.append(len(x_t)) or x_t, size=2)
    >>> len(v({}, torch.zeros(5, 1), torch.zeros(5), {})), sizes
    (5, [2, 2, 1])
    """
    size = require_count("size", size)

    def in_chunks(params: Params, x_t: Tensor, t: Tensor, cond: Cond) -> Tensor:
        if x_t.shape[0] <= size:
            return velocity(params, x_t, t, cond)
        pieces = range(0, x_t.shape[0], size)
        parts = [velocity(params, x_t[i : i + size], t[i : i + size], _rows(cond, i, i + size)) for i in pieces]
        return torch.cat(parts)

    return in_chunks


def _rows(cond: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {name: value[start:stop] for name, value in cond.items()}
