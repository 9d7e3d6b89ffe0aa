"""The whole algorithm on one screen (`_iterations`), the refusals before it, and checkpoints beside it.

Metrics of one iteration, all floats (times in seconds):

    reward/mean, reward/std     over the finite rewards of the batch, std about the batch mean
    reward/missing              share of samples whose reward is not finite
    groups/dead                 share of groups that say nothing (fewer than two rewards, or all equal)
    loss, loss/update_U         masked mean per optimizer step; the plain name averages over the updates
    masked_fraction, kl_proxy, drift_rms   (and /update_U) from the objective: states dropped by the trust region,
                                mean KL proxy, rms(v - v_old). At update 1 on-policy drift is 0 and ART's loss is 1 x the live share
    behaviour_distance          rms over all trainable numbers of (params that rolled out - live params): 0 on-policy
    grad_norm                   before clipping, mean over the updates
    ratio_deviation             mean |ratio - 1|, only for objectives with likelihood ratios; 0 expected at update 1
    seconds/rollout, seconds/reward, seconds/update
"""

import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from diffrl.algorithms import Algorithm, Batch, Window
from diffrl.checkpoints import Checkpoint, load_checkpoint, restore_checkpoint, save_checkpoint
from diffrl.checks import require_count, require_number
from diffrl.guidance import dead_groups
from diffrl.losses import masked_mean
from diffrl.sampling import chunked, sample_seeds
from diffrl.types import Cond, Gridded, Params, Reward, Trajectory

__all__ = [
    "Checkpoint",
    "load_checkpoint",
    "restore_checkpoint",
    "save_checkpoint",
    "train",
]

Split = Callable[[int, int, int], list[Tensor]]


def train(
    model: Any,
    algorithm: Algorithm,
    prompts: Sequence[str],
    reward: Reward,
    optimizer: torch.optim.Optimizer,
    *,
    group_size: int,
    steps: int,
    seed: int,
    prompts_per_iteration: int | None = None,
    images: Sequence[Any] | None = None,
    grad_clip: float | None = 1.0,
    start: int = 0,
    behaviour: Params | None = None,
    micro_batch: int | None = None,
    rollout_chunk: int | None = None,
    split: Split | None = None,
    before_iteration: Callable[[torch.optim.Optimizer], None] | None = None,
) -> Iterator[dict[str, float]]:
    """Endless: one dict of metrics per iteration, after its updates; the caller stops. See the module's table of metrics.

    model: `models.Model` or anything with its first six functions. steps: sampling steps. prompts_per_iteration: None =
    every prompt each time; else a function of (seed, i) alone. Seeds of samples: (seed, i, prompt, member). images: one
    per prompt, for image-to-video. start, behaviour: where a resumed run goes on (params and optimizer already loaded).
    micro_batch: samples per backward (gradients accumulate, results equal to rounding); rollout_chunk: samples per
    velocity call in the rollout. split: (g, k, updates) -> row indices per update, default `split_within_prompt`.
    before_iteration: called with the optimizer first (e.g. to reset its state: `lambda o: o.state.clear()`).

    A reward that raises for some images gives those nan; one that raises for all is a ValueError.
    ValueError at the call, before anything runs: empty or non-string prompts, group_size < 2, counts below 1,
    an optimizer that steps none or other tensors than the model's, a group_size the algorithm's windows do not divide.
    """
    prompts = _checked_prompts(prompts, images)
    group_size = require_count("group_size", group_size, low=2)
    steps, start = require_count("steps", steps), require_count("start", start, low=0)
    seed = require_count("seed", seed, low=0)
    if grad_clip is not None:
        grad_clip = require_number("grad_clip", grad_clip, low=0, open_low=True)
    g = len(prompts) if prompts_per_iteration is None else require_count("prompts_per_iteration", prompts_per_iteration)
    if g > len(prompts):
        raise ValueError(f"prompts_per_iteration={g} of only {len(prompts)} prompts")
    if require_count("updates", algorithm.updates) > group_size:
        raise ValueError(f"group_size={group_size} cannot be split into {algorithm.updates} updates")
    if algorithm.pool is not None and algorithm.pool < group_size:
        raise ValueError(f"group_size={group_size} is larger than the algorithm's pool of {algorithm.pool}")
    for name, size in (("micro_batch", micro_batch), ("rollout_chunk", rollout_chunk)):
        if size is not None:
            require_count(name, size)
    _check_optimizer(optimizer, model.params)
    if not callable(reward):
        raise ValueError(f"reward must be a callable (images, prompts) -> values, got {reward!r}")
    velocity = model.velocity if rollout_chunk is None else chunked(model.velocity, size=rollout_chunk)
    sampler = Gridded(velocity, model.times, steps, tuple(model.latent_shape()))
    plan = Plan(prompts, images, g, group_size, seed, grad_clip, micro_batch, split or split_within_prompt)
    return _iterations(model, algorithm, sampler, reward, optimizer, plan, start, behaviour, before_iteration)


class Plan(NamedTuple):
    """What every iteration of one `train` call shares."""

    prompts: Sequence[str]
    images: Sequence[Any] | None
    g: int
    k: int
    seed: int
    grad_clip: float | None
    micro_batch: int | None
    split: Split


def _iterations(model, algorithm, sampler, reward, optimizer, plan, start, behaviour, before_iteration):
    behaviour = model.params if behaviour is None else behaviour
    device, warned = next(iter(model.params.values())).device, False
    for i in itertools.count(start):
        began = time.perf_counter()
        if before_iteration is not None:
            before_iteration(optimizer)
        chosen = prompts_of_iteration(plan.seed, i, len(plan.prompts), plan.g)
        texts = [plan.prompts[p] for p in chosen]
        cond = encode(model, texts, plan.images and [plan.images[p] for p in chosen])
        seeds = sample_seeds(plan.seed, i, chosen, algorithm.pool or plan.k).to(device)
        score = Score(model.decode, reward, texts)

        with torch.no_grad():
            batch = algorithm.collect(sampler, behaviour, cond, seeds, score)  # 1. roll out and score
            credit = algorithm.credit(batch)  # 2. turn rewards into what each sample is told
        _check_batch(batch, credit, plan)
        metrics = reward_metrics(batch.rewards) | {"behaviour_distance": params_distance(behaviour, model.params)}
        if metrics["groups/dead"] > 0.5 and not warned:
            warned = True
            warnings.warn(f"{metrics['groups/dead']:.0%} of groups have no spread at iteration {i}", stacklevel=2)
        collected = time.perf_counter()
        windows = plan.split(plan.g, plan.k, algorithm.updates)
        updates = [  # 3. optimizer steps on disjoint windows of every group
            update(
                algorithm.objective, model, optimizer, window_of(batch, credit, rows), plan.grad_clip, plan.micro_batch
            )
            for rows in windows
        ]
        behaviour = algorithm.behaviour(behaviour, model.params, (i + 1) * len(windows))  # 4. who rolls out next
        seconds = {
            "seconds/rollout": collected - began - score.seconds,
            "seconds/reward": score.seconds,
            "seconds/update": time.perf_counter() - collected,
        }
        yield {"iteration": i, **metrics, **_over_updates(updates), **seconds}


def update(
    objective: Callable,
    model: Any,
    optimizer: torch.optim.Optimizer,
    window: Window,
    grad_clip: float | None = 1.0,
    micro_batch: int | None = None,
) -> dict[str, float]:
    """One optimizer step on one window: masked mean of the objective, gradient norm clipped. Returns loss and metrics.

    micro_batch: samples per backward; parts are weighted by their share of the window, so the gradient is the whole
    window's. ValueError: a gradient that is not finite (nothing is stepped then).
    """
    optimizer.zero_grad(set_to_none=True)
    n = len(window.rewards)
    totals: dict[str, float] = {"loss": 0.0}
    with torch.enable_grad():
        for rows in torch.arange(n).split(micro_batch or max(n, 1)):
            part = window if len(rows) == n else select_rows(window, rows)
            loss, keep, metrics = objective(model.velocity, model.params, part)
            value = masked_mean(loss, keep) * (len(rows) / n)
            value.backward()
            for name, number in {
                **{k: v * len(rows) / n for k, v in metrics.items()},
                "loss": float(value.detach()),
            }.items():
                totals[name] = totals.get(name, 0.0) + number
    params = list(model.params.values())
    norm = torch.nn.utils.clip_grad_norm_(params, torch.inf if grad_clip is None else grad_clip)
    if not bool(torch.isfinite(norm)):
        raise ValueError(f"gradient norm is {float(norm)} (loss {totals['loss']}): nothing was stepped")
    optimizer.step()
    return {**totals, "grad_norm": float(norm)}


def _over_updates(updates: list[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps under the plain names, and each step's own as NAME/update_U."""
    means = {name: sum(u[name] for u in updates) / len(updates) for name in updates[0]}
    single = {f"{name}/update_{j}": value for j, u in enumerate(updates, 1) for name, value in u.items()}
    return means | single


# ---- prompts, windows, scores -----------------------------------------------------------------------------------------


def prompts_of_iteration(seed: int, i: int, n: int, g: int) -> list[int]:
    """Indices of iteration i's g prompts of n: a pure function of (seed, i). Epochs of floor(n/g) disjoint draws, each a
    fresh permutation; never the same prompt twice in one iteration. g = n: all, in order.

    >>> sorted(prompts_of_iteration(0, 4, 4, 2) + prompts_of_iteration(0, 5, 4, 2))
    [0, 1, 2, 3]
    """
    if g == n:
        return list(range(n))
    epoch, place = divmod(i, n // g)
    order = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch]))).permutation(n)
    return [int(p) for p in order[place * g : (place + 1) * g]]


def split_within_prompt(g: int, k: int, updates: int) -> list[Tensor]:
    """Row indices (of b = g k, prompt-major) of each update: every prompt's samples dealt evenly, the first update that
    gets an extra one alternating over prompts. Disjoint, and together all rows.

    >>> [rows.tolist() for rows in split_within_prompt(2, 3, 2)]
    [[0, 2, 4], [1, 3, 5]]
    """
    prompt, member = torch.arange(g * k) // k, torch.arange(g * k) % k
    return [torch.nonzero((member + prompt) % updates == u).flatten() for u in range(updates)]


def window_of(batch: Batch, credit: Mapping[str, Tensor], rows: Tensor) -> Window:
    """The given rows of a batch and its credit, cond expanded to one row per sample."""
    k = batch.rewards.shape[1]
    tr = batch.trajectory
    rows = rows.to(tr.x_0.device)
    return Window(
        trajectory=_trajectory_rows(tr, rows),
        rewards=batch.rewards.flatten()[rows.to(batch.rewards.device)],
        cond={name: value[(rows // k).to(value.device)] for name, value in batch.cond.items()},
        credit={name: value[rows.to(value.device)] for name, value in credit.items()},
    )


def select_rows(window: Window, rows: Tensor) -> Window:
    """Some rows of a window (a micro-batch)."""
    return Window(
        trajectory=_trajectory_rows(window.trajectory, rows.to(window.trajectory.x_0.device)),
        rewards=window.rewards[rows.to(window.rewards.device)],
        cond={name: value[rows.to(value.device)] for name, value in window.cond.items()},
        credit={name: value[rows.to(value.device)] for name, value in window.credit.items()},
    )


def _trajectory_rows(tr: Trajectory, rows: Tensor) -> Trajectory:
    shared = {"t": tr.t, "t_next": tr.t_next}
    picked = {
        name: None if value is None else value[rows] for name, value in tr._asdict().items() if name not in shared
    }
    return Trajectory(**picked, **shared)


def encode(model: Any, prompts: Sequence[str], images: Sequence[Any] | None = None) -> Cond:
    """model.encode, moved to the device of the trained tensors."""
    device = next(iter(model.params.values())).device
    cond = model.encode(prompts) if images is None else model.encode(prompts, images)
    return {name: value.to(device) for name, value in cond.items()}


class Score:
    """score(latents, prompt rows) -> rewards " b": decode, then the reward; counts the seconds spent in the reward."""

    def __init__(self, decode: Callable[[Tensor], Tensor], reward: Reward, prompts: Sequence[str]):
        self.decode, self.reward, self.prompts, self.seconds = decode, reward, prompts, 0.0

    def __call__(self, latents: Tensor, rows: Tensor) -> Tensor:
        images = self.decode(latents)
        began = time.perf_counter()
        values = score_images(self.reward, images, [self.prompts[int(r)] for r in rows])
        self.seconds += time.perf_counter() - began
        return values.to(latents.device)


def score_images(reward: Reward, images: Tensor, prompts: Sequence[str]) -> Tensor:
    """The reward of every image as float " b"; an image for which it raises gets nan.

    A reward that raises on the batch is asked once per image. ValueError: it raises for every image, or returns
    anything but one number per image.
    """
    try:
        return _one_number_each(reward(images, prompts), len(prompts))
    except _WrongLength as error:
        raise ValueError(str(error)) from None
    except Exception as error:
        first = error
    values, failed = [], 0
    for image, prompt in zip(images, prompts, strict=True):
        try:
            values.append(float(_one_number_each(reward(image[None], [prompt]), 1)[0]))
        except Exception:
            values.append(float("nan"))
            failed += 1
    if failed == len(prompts):
        raise ValueError(f"reward raised for all {failed} images: {type(first).__name__}: {first}") from first
    return torch.tensor(values)


class _WrongLength(Exception):
    pass


def _one_number_each(values: Any, b: int) -> Tensor:
    try:
        values = torch.as_tensor(values).detach().cpu()
    except Exception as error:
        raise _WrongLength(
            f"reward must return {b} numbers, got {type(values).__name__} {values!r:.80} ({error})"
        ) from None
    if tuple(values.shape) != (b,):
        raise _WrongLength(f"reward must return one number per image, shape ({b},), got shape {tuple(values.shape)}")
    return values if values.dtype == torch.float64 else values.float()


def reward_metrics(rewards: Tensor) -> dict[str, float]:
    """reward/mean, reward/std (finite rewards only, about the batch mean), reward/missing, groups/dead."""
    values = rewards.double()
    finite = values[torch.isfinite(values)]
    return {
        "reward/mean": float(finite.mean()),
        "reward/std": float(finite.std(correction=0)) if len(finite) else float("nan"),
        "reward/missing": 1 - len(finite) / max(values.numel(), 1),
        "groups/dead": float(dead_groups(rewards).double().mean()),
    }


def params_distance(a: Params, b: Params) -> float:
    """sqrt(mean over all numbers of (a - b)^2): 0 when the behaviour policy is the live one."""
    if a is b:
        return 0.0
    total = sum(float((a[name].detach().double() - b[name].detach().double()).square().sum()) for name in b)
    return (total / max(sum(p.numel() for p in b.values()), 1)) ** 0.5


# ---- refusals ---------------------------------------------------------------------------------------------------------


def _checked_prompts(prompts: Sequence[str], images: Sequence[Any] | None) -> list[str]:
    if isinstance(prompts, str) or not len(prompts):
        raise ValueError(f"prompts must be a non-empty sequence of strings, got {prompts!r}")
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f"prompts[{i}] must be a non-empty string, got {prompt!r}")
    if images is not None and len(images) != len(prompts):
        raise ValueError(f"images must be one per prompt: {len(images)} images, {len(prompts)} prompts")
    return list(prompts)


def _check_optimizer(optimizer: torch.optim.Optimizer, params: Params) -> None:
    if not params:
        raise ValueError("model.params is empty: nothing to train")
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    ours = {id(p) for p in params.values()}
    if not stepped & ours or stepped - ours:
        raise ValueError(
            f"optimizer must step model.params: of its {len(stepped)} tensors {len(stepped & ours)} are among "
            f"the model's {len(ours)}"
        )


def _check_batch(batch: Batch, credit: Mapping[str, Tensor], plan: Plan) -> None:
    g, k, b = plan.g, plan.k, plan.g * plan.k
    if tuple(batch.rewards.shape) != (g, k) or batch.trajectory.x_0.shape[0] != b:
        raise ValueError(
            f"collect must return rewards ({g}, {k}) and {b} samples, got {tuple(batch.rewards.shape)} "
            f"and {batch.trajectory.x_0.shape[0]}"
        )
    for name, value in credit.items():
        if value.shape[:1] != (b,):
            raise ValueError(f"credit[{name!r}] must have one row per sample ({b}), got shape {tuple(value.shape)}")
