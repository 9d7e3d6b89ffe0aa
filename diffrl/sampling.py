"""From noise to samples: conversions, time grids, transition kernels, rollouts, log-probabilities and KLs.

Every kernel is one function `(x_t, v, t, t_next) -> (mean, std)`, used alike by rollout, replay and KL. Equations are in
the library's convention (x_t = (1 - t) x_0 + t eps, v = eps - x_0, D = t - t_next > 0).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

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
    require_rows,
    require_tensors,
    shapes,
    time_pair,
    time_rows,
)
from diffrl.types import Cond, Params, Step, Trajectory, Velocity

Time = Any  # float, 0-d tensor or " b" tensor


def interpolate(x_0: Float[Tensor, " b *d"], noise: Float[Tensor, " b *d"], t: Time) -> Float[Tensor, " b *d"]:
    """x_t = (1 - t) x_0 + t eps: the straight path from data (t = 0) to noise (t = 1), rectified flow 2209.03003 eq. 1.

    t in [0, 1]: float, 0-d or " b". Returns float32 or better. ValueError: shapes differ, t outside [0, 1].

    >>> interpolate(torch.zeros(1, 2), torch.ones(1, 2), 0.25)
    tensor([[0.2500, 0.2500]])
    """
    require_batch(x_0=x_0, noise=noise)
    x_0, noise = promote(x_0, noise)
    t = column(time_rows("t", t, x_0), x_0)
    return (1 - t) * x_0 + t * noise


def predict_x_0(x_t: Float[Tensor, " b *d"], v: Float[Tensor, " b *d"], t: Time) -> Float[Tensor, " b *d"]:
    """x_0 = x_t - t v, the end of the straight path through x_t with velocity v = eps - x_0 (derived from the convention).

    t in [0, 1]: float, 0-d or " b". ValueError: shapes differ, t outside [0, 1].
    """
    require_batch(x_t=x_t, v=v)
    x_t, v = promote(x_t, v)
    return x_t - column(time_rows("t", t, x_t), x_t) * v


def predict_noise(x_t: Float[Tensor, " b *d"], v: Float[Tensor, " b *d"], t: Time) -> Float[Tensor, " b *d"]:
    """eps = x_t + (1 - t) v, the noise end of the same path (derived from the convention).

    t in [0, 1]: float, 0-d or " b". ValueError: shapes differ, t outside [0, 1].
    """
    require_batch(x_t=x_t, v=v)
    x_t, v = promote(x_t, v)
    return x_t + (1 - column(time_rows("t", t, x_t), x_t)) * v


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


def euler_step(x_t: Float[Tensor, " b *d"], v: Float[Tensor, " b *d"], t: Time, t_next: Time):
    """mean = x_t - D v, std = 0: the first-order step of the probability-flow ODE dx/dt = v.

    Returns (mean " b *d", std " b"). ValueError: shapes differ, not 0 <= t_next < t <= 1.

    >>> euler_step(torch.ones(1, 1), torch.ones(1, 1), 0.5, 0.25)
    (tensor([[0.7500]]), tensor([0.]))
    """
    require_batch(x_t=x_t, v=v)
    x_t, v = promote(x_t, v)
    now, then = time_pair(t, t_next, x_t)
    return x_t - column(now - then, x_t) * v, torch.zeros_like(now)


def flow_sde_step(x_t: Float[Tensor, " b *d"], v: Float[Tensor, " b *d"], t: Time, t_next: Time, *, eta: float = 0.7):
    """Flow-GRPO's SDE (2505.05470 eq. 9): s2 = eta^2 t/(1 - t*), std = eta sqrt(t D/(1 - t*)),

        mean = x_t (1 - s2 D/(2t)) - v (1 + s2 (1 - t)/(2t)) D,      t* = t, but t* = t_next where t = 1.

    std is the whole transition's. At t = 1 it is eta exactly, whatever the grid (the published choice: their sigmas[1]).
    Returns (mean " b *d", std " b"). ValueError: shapes differ, not 0 <= t_next < t <= 1, eta < 0.
    """
    require_batch(x_t=x_t, v=v)
    eta = require_number("eta", eta, low=0)
    x_t, v = promote(x_t, v)
    now, then = time_pair(t, t_next, x_t)
    delta = now - then
    rest = 1 - torch.where(now == 1, then, now)
    s2 = eta**2 * now / rest
    on_x = 1 - s2 * delta / (2 * now)
    on_v = (1 + s2 * (1 - now) / (2 * now)) * delta
    return column(on_x, x_t) * x_t - column(on_v, x_t) * v, eta * torch.sqrt(now * delta / rest)


def dance_sde_step(x_t: Float[Tensor, " b *d"], v: Float[Tensor, " b *d"], t: Time, t_next: Time, *, eta: float = 0.3):
    """DanceGRPO's SDE with constant noise (2505.07818 eq. 8): std = eta sqrt(D),

        mean = x_t - D v - (eta^2/2) D (x_t + (1 - t) v)/t.

    Returns (mean " b *d", std " b"). ValueError: shapes differ, not 0 <= t_next < t <= 1, eta < 0.
    """
    require_batch(x_t=x_t, v=v)
    eta = require_number("eta", eta, low=0)
    x_t, v = promote(x_t, v)
    now, then = time_pair(t, t_next, x_t)
    delta = now - then
    pull = eta**2 / 2 * delta / now
    mean = column(1 - pull, x_t) * x_t - column(delta + pull * (1 - now), x_t) * v
    return mean, eta * torch.sqrt(delta)


def cps_step(x_t: Float[Tensor, " b *d"], v: Float[Tensor, " b *d"], t: Time, t_next: Time, *, eta: float = 0.8):
    """Coefficients-preserving sampling (2509.05952): std = t_next sin(eta pi/2),

        mean = (1 - t_next) (x_t - t v) + t_next cos(eta pi/2) (x_t + (1 - t) v).

    The coefficient on noise stays t_next; the marginals do not stay p_t (E[eps|x] has less than unit variance). std is 0
    on the step that ends at t = 0. Returns (mean " b *d", std " b"). ValueError: as the others, eta outside [0, 1].
    """
    require_batch(x_t=x_t, v=v)
    eta = require_number("eta", eta, low=0, high=1)
    x_t, v = promote(x_t, v)
    now, then = time_pair(t, t_next, x_t)
    kept = then * math.cos(eta * math.pi / 2)
    x_0 = x_t - column(now, x_t) * v
    noise = x_t + column(1 - now, x_t) * v
    return column(1 - then, x_t) * x_0 + column(kept, x_t) * noise, then * math.sin(eta * math.pi / 2)


def latent_mean(x: Float[Tensor, " b *d"]) -> Float[Tensor, " b"]:
    """Mean over all latent axes. What every peer uses for log-probabilities: ratios are then exp(log-ratio / D)."""
    (x,) = promote(x)
    return x.flatten(1).mean(1) if x.ndim > 1 else x


def latent_sum(x: Float[Tensor, " b *d"]) -> Float[Tensor, " b"]:
    """Sum over all latent axes: the exact joint log-density; clip ranges then depend on the resolution."""
    (x,) = promote(x)
    return x.flatten(1).sum(1) if x.ndim > 1 else x


def transition_log_prob(
    x_next: Float[Tensor, " b *d"],
    mean: Float[Tensor, " b *d"],
    std: Float[Tensor, " b"],
    *,
    reduce: Callable[[Tensor], Tensor] = latent_mean,
) -> Float[Tensor, " b"]:
    """reduce_d[-(x_next - mean)^2/(2 std^2) - log std - log(2 pi)/2], the exact Normal log-density, constants kept.

    reduce: `latent_mean` (default: does not grow with resolution, so clip ranges carry over) or `latent_sum`.
    nan where std = 0 (a deterministic step has no density). ValueError: shapes differ, std negative or not finite.
    """
    b = require_batch(x_next=x_next, mean=mean)
    require_rows(b, std=std)
    x_next, mean, std = promote(x_next, mean, std)
    safe = column(_positive(std), x_next)
    log_prob = reduce(-((x_next - mean) ** 2) / (2 * safe**2) - torch.log(safe) - math.log(2 * math.pi) / 2)
    return torch.where(std > 0, log_prob, torch.full_like(log_prob, math.nan))


def transition_kl(
    mean_p: Float[Tensor, " b *d"],
    mean_q: Float[Tensor, " b *d"],
    std: Float[Tensor, " b"],
    *,
    reduce: Callable[[Tensor], Tensor] = latent_mean,
) -> Float[Tensor, " b"]:
    """reduce_d[(mean_p - mean_q)^2/(2 std^2)]: KL of two Gaussian transitions with equal std (hence symmetric).

    nan where std = 0. ValueError: shapes differ, std negative or not finite.
    """
    b = require_batch(mean_p=mean_p, mean_q=mean_q)
    require_rows(b, std=std)
    mean_p, mean_q, std = promote(mean_p, mean_q, std)
    kl = reduce((mean_p - mean_q) ** 2 / (2 * column(_positive(std), mean_p) ** 2))
    return torch.where(std > 0, kl, torch.full_like(kl, math.nan))


def _positive(std: Tensor) -> Tensor:
    """std with zeros replaced by 1, so that no nan enters the graph before `where` selects; refuses what is no std."""
    if not bool((torch.isfinite(std) & (std >= 0)).all()):
        raise ValueError(f"std must be finite and >= 0, got {std.tolist()}")
    return torch.where(std > 0, std, torch.ones_like(std))


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
    What is stored is what is scored.

    ValueError: times not strictly decreasing inside [0, 1]; neither noise nor seeds; seeds without shape; a
    stochastic kernel without seeds; a wrong number of kernels; keep unsorted, repeated or out of range; a cond tensor
    whose leading axis is not b; a velocity of another shape, or not finite (names the step, t and the number of rows).
    """
    grid = _checked_times(times)
    n = len(grid) - 1
    kernels = _checked_kernels(step, n)
    kept = _checked_keep(keep, n)
    if noise is None:
        if seeds is None or shape is None:
            raise ValueError(f"give noise=, or seeds= with one sample's shape=: {shapes(seeds=seeds, shape=shape)}")
        noise = seeded_noise(seeds, shape).to(torch.promote_types(times.dtype, torch.float32))
    elif shape is not None and tuple(shape) != tuple(noise.shape[1:]):
        raise ValueError(f"shape {tuple(shape)} is not one sample's of {shapes(noise=noise)}")
    b = require_batch(noise=noise)
    if seeds is not None and tuple(_checked_seeds(seeds).shape) != (b,):
        raise ValueError(f"one seed per sample: {shapes(seeds=seeds, noise=noise)}")
    (x,) = promote(noise.detach().clone())
    require_cond(cond, b)
    grid = grid.to(x)
    rows: list[tuple[Tensor, ...]] = []
    with torch.no_grad():
        for i, kernel in enumerate(kernels):
            t, t_next = grid[i], grid[i + 1]
            v = _finite_velocity(velocity(params, x, t.expand(b), cond), x, i, float(t))
            mean, std = _checked_transition(kernel(x, v, t, t_next), x, i)
            x_next = mean
            if bool((std > 0).any()):
                if seeds is None:
                    raise ValueError(
                        f"step {i} is stochastic (std {float(std.max()):.4g}): give seeds=, not noise= alone"
                    )
                x_next = mean + column(std, x) * seeded_noise(seeds, x.shape[1:], stream=i + 1).to(x)
            if i in kept:
                rows.append((x, x_next, v, std, transition_log_prob(x_next, mean, std)))
            x = x_next
    return _pack(x, rows, grid, kept, seeds)


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


def _checked_kernels(step: Step | Sequence[Step], n: int) -> list[Step]:
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
    """(mean, std) of a kernel in the state's dtype; ValueError unless (" b *d", " b") and the mean is finite."""
    mean, std = transition
    require_tensors(mean=mean, std=std)
    if mean.shape != x.shape or tuple(std.shape) != (len(x),):
        raise ValueError(
            f"the kernel of step {i} must return mean {tuple(x.shape)}, std ({len(x)},): {shapes(mean=mean, std=std)}"
        )
    if not bool(torch.isfinite(mean).all()):
        raise ValueError(f"the kernel of step {i} returned a mean that is not finite")
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


def mix_windows(steps: int, *, size: int, stride: int, every: int) -> Iterator[range]:
    """MixGRPO's sliding window (2507.21802): one window per iteration, moved by `stride` after `every` iterations.

    Windows stay full and inside 0..steps-2; past the end they roll back to the start (the published schedule shrinks
    there and trains nothing for some iterations). Endless. ValueError: counts < 1, a size that fits nowhere.
    """
    stride, every = require_count("stride", stride), require_count("every", every)
    sde_window(steps, start=0, size=size)
    return _mix_windows(steps, size, stride, every)


def _mix_windows(steps: int, size: int, stride: int, every: int) -> Iterator[range]:
    start = 0
    while True:
        for _ in range(every):
            yield sde_window(steps, start=start, size=size)
        start = start + stride if start + stride + size <= steps - 1 else 0


def classifier_free(velocity: Velocity, *, scale: float) -> Velocity:
    """v_uncond + scale (v_cond - v_uncond): classifier-free guidance (2207.12598) as a wrapper around a velocity.

    cond["uncond.NAME"] replaces cond["NAME"] in the unconditional call; neither call sees an `uncond.` key. At scale 1
    there is one call, of the condition alone. float32 or better, since guidance amplifies the rounding of half precision.
    ValueError: scale not finite; a twin without its NAME; scale other than 1 and no twin at all.
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
