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
    clip_fraction               states whose gradient the clip removes (PPO-like losses); 0 at ratio 1
    kl, kl_reference            mean KL of the step to the one taken (Flow-DPPO), to the reference's (beta > 0), before beta
    kl_velocity, anchor         mean (v - v_reference)^2 of AWM and DiffusionNFT, before their factors
    optimality/mean, /min, /max of DiffusionNFT's r: near 1/2 throughout it says nothing
    NAME/t=0.900                ratio_deviation, std and output_grad (rms of d loss/d v) of the step that starts at t
    draft/..., audit/..., and further seconds/... of `sol_rl`, see there
    seconds/rollout, seconds/reward, seconds/update

Four directions of the compass, learned by the closed-form toy in twenty iterations:

    >>> from diffrl.algorithms import art
    >>> from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model
    >>> model = toy_model()
    >>> diagnose(model, art(), PROMPTS, toward_compass).ok
    True
    >>> optimizer = torch.optim.Adam(model.params.values(), lr=0.05)
    >>> training = train(model, art(), PROMPTS, toward_compass, optimizer, group_size=8, steps=4, seed=0)
    >>> rewards = [metrics["reward/mean"] for metrics in itertools.islice(training, 20)]
    >>> rewards[-1] > rewards[0] + 0.5
    True
"""

import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffrl.algorithms import live
from diffrl.checkpoints import Checkpoint, load_checkpoint, restore_checkpoint, save_checkpoint
from diffrl.checks import require_count, require_number
from diffrl.guidance import dead_groups
from diffrl.losses import masked_mean
from diffrl.ranks import Ranks, alone, require_same_start
from diffrl.sampling import chunked, sample_seeds
from diffrl.states import Mean
from diffrl.training_checks import (
    check_algorithm,
    check_batch,
    check_behaviour,
    check_credit,
    check_model,
    check_optimizer,
    check_reward,
    check_sizes,
    checked_groups,
    checked_prompts,
    checked_reference,
)
from diffrl.types import Algorithm, Batch, Gridded, Params, Reward, Window
from diffrl.windows import (
    Score,
    encode,
    params_distance,
    parts_of,
    prompts_of_iteration,
    reward_metrics,
    select_rows,
    split_within_prompt,
    window_of,
)

__all__ = [
    "Checkpoint",
    "diagnose",
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
    images: Sequence[Any] | Tensor | None = None,
    grad_clip: float | None = 1.0,
    start: int = 0,
    behaviour: Params | None = None,
    micro_batch: int | None = None,
    pack: int | None = None,
    rollout_chunk: int | None = None,
    split: Split | None = None,
    reference: Params | None = None,
    before_iteration: Callable[[torch.optim.Optimizer], None] | None = None,
    ranks: Ranks = alone,
) -> Iterator[dict[str, float]]:
    """Endless: one dict of metrics per iteration, after its updates; the caller stops. See the module's table of metrics.

    model: `models.Model` or anything with its first six functions. steps: sampling steps. prompts_per_iteration: None =
    every prompt each time; else a function of (seed, i) alone. Seeds of samples: (seed, i, prompt, member). images: one
    per prompt, for image-to-video. start, behaviour: where a resumed run goes on (params and optimizer already loaded).
    micro_batch: samples per backward, or pack: states per backward, i.e. pairs (sample, trained step) (gradients equal to
    rounding, metrics are means over the parts); rollout_chunk: samples per velocity call in the rollout. split: (g, k, updates) -> row indices per update, default `split_within_prompt`.
    reference: params that a KL or an anchor pulls toward; None: a copy of the first ones, which a resumed run must be given.
    before_iteration: called with the optimizer first (e.g. to reset its state: `lambda o: o.state.clear()`).
    ranks: of a process that is one of several (`ranks.torch_ranks()`); prompts_per_iteration counts those of all of them.

    A reward that raises for some images gives those nan; for all: ValueError. ValueError at the call, before
    anything runs: empty or non-string prompts, group_size < 2, counts below 1, an optimizer that steps none or other tensors
    than the model's, a group_size smaller than the algorithm's updates or larger than its pool.
    No example: see the top of this file.
    """
    prompts = checked_prompts(prompts, images)
    group_size, steps = require_count("group_size", group_size, low=2), require_count("steps", steps)
    start, seed = require_count("start", start, low=0), require_count("seed", seed, low=0)
    if grad_clip is not None:
        grad_clip = require_number("grad_clip", grad_clip, low=0, open_low=True, infinite=True)
    g = checked_groups(prompts_per_iteration, len(prompts), ranks.size)
    check_model(model)
    check_algorithm(algorithm, group_size)
    check_sizes(micro_batch=micro_batch, pack=pack, rollout_chunk=rollout_chunk)
    check_optimizer(optimizer, model.params)
    require_same_start(ranks, model.params)
    check_reward(reward)
    reference = checked_reference(algorithm, reference, model.params, start)
    check_behaviour(algorithm, behaviour, model.params, start)
    if algorithm.memory is not None:
        algorithm.memory.reset()
    velocity = model.velocity if rollout_chunk is None else chunked(model.velocity, size=rollout_chunk)
    sampler = Gridded(velocity, model.times, steps, tuple(model.latent_shape()))
    how, split = (grad_clip, micro_batch, pack, ranks), split or split_within_prompt
    plan = _Plan(prompts, images, g, group_size, seed, how, split, reference, ranks)
    return _iterations(model, algorithm, sampler, reward, optimizer, plan, start, behaviour, before_iteration)


class _Plan(NamedTuple):
    """What every iteration of one `train` call shares."""

    prompts: Sequence[str]
    images: Sequence[Any] | Tensor | None
    g: int
    k: int
    seed: int
    how: tuple[Any, ...]  # every update is made: grad_clip, micro_batch, pack, ranks
    split: Split
    reference: Params | None
    ranks: Ranks


def _iterations(model, algorithm, sampler, reward, optimizer, plan, start, behaviour, before_iteration):
    behaviour = model.params if behaviour is None else behaviour
    device, warned = next(iter(model.params.values())).device, False
    for i in itertools.count(start):
        began = time.perf_counter()
        if before_iteration is not None:
            before_iteration(optimizer)
        every = prompts_of_iteration(plan.seed, i, len(plan.prompts), plan.g)
        chosen = plan.ranks.share(every)
        texts = [plan.prompts[p] for p in chosen]
        cond = encode(model, texts, None if plan.images is None else [plan.images[p] for p in chosen])
        seeds = sample_seeds(plan.seed, i, chosen, algorithm.pool or plan.k).to(device)
        score = Score(model.decode, reward, texts, forgiving=plan.ranks.size > 1)

        with torch.no_grad():
            # 1. roll out and score
            at_i = sampler._replace(iteration=i, first=int(sample_seeds(plan.seed, i, every[:1], 1)))
            batch = plan.ranks.whole(algorithm.collect(at_i, behaviour, cond, seeds, score))
            check_batch(batch, plan.g, plan.k)
            score.judge_all(batch.rewards, plan.ranks)
            credit = algorithm.credit(batch)  # 2. turn rewards into what each sample is told
        check_credit(credit, plan.g, plan.k)
        metrics = reward_metrics(batch.rewards) | {"behaviour_distance": params_distance(behaviour, model.params)}
        if metrics["groups/dead"] > 0.5 and not warned:
            warned = True
            warnings.warn(f"{metrics['groups/dead']:.0%} of groups have no spread at iteration {i}", stacklevel=2)
        collected = time.perf_counter()
        rolled_out = behaviour if algorithm.behaviour is live else _kept_apart(behaviour, model.params)
        windows = plan.split(plan.g, plan.k, algorithm.updates)
        parts = [window_of(batch, credit, rows, plan.reference) for rows in windows]
        updates = []
        for part in parts:  # 3. optimizer steps on disjoint windows of every group
            updates.append(update(algorithm.objective, model, optimizer, part, *plan.how))
            if algorithm.memory is not None:
                algorithm.memory.advance()
        behaviour = algorithm.behaviour(rolled_out, model.params, (i + 1) * len(windows))  # 4. who rolls out next
        seconds = {
            "seconds/rollout": collected - began - score.seconds,
            "seconds/reward": score.seconds,
            "seconds/update": time.perf_counter() - collected,
        }
        yield {"iteration": i, **metrics, **(batch.metrics or {}), **_over_updates(updates), **seconds}


def update(
    objective: Callable,
    model: Any,
    optimizer: torch.optim.Optimizer,
    window: Window,
    grad_clip: float | None = 1.0,
    micro_batch: int | None = None,
    pack: int | None = None,
    ranks: Ranks = alone,
) -> dict[str, float]:
    """One optimizer step on one window: masked mean of the objective, gradient norm clipped. Returns loss and metrics.

    micro_batch, pack: samples, or states, per backward (`windows.parts_of`, of this rank's rows); parts are weighted by
    their share of the window, so the gradient is the whole window's, as it is where `ranks` share the rows. ValueError: a
    gradient that is not finite (nothing is stepped then), an empty window. No example: a step of `train`.
    """
    for p in model.params.values():  # zero_grad, also of those that this optimizer does not step: they are in the norm
        p.grad = None
    total = 0.0
    told: dict[str, list[tuple[float, int]]] = {}  # each metric's values, with the size of the part that told it
    with torch.enable_grad():
        for part, share, whole in parts_of(objective, window, micro_batch=micro_batch, pack=pack, ranks=ranks):
            loss, keep, metrics = objective(model.velocity, model.params, part)
            value = masked_mean(loss, keep) * (share / whole)
            if not value.requires_grad:
                raise ValueError(
                    "the loss has no gradient: velocity or objective detaches it, or model.params do not require grad"
                )
            value.backward()
            total += float(value.detach())
            _note(told, metrics, share)
    ranks.add(model.params)
    total, told = _over_ranks(ranks.gathered((total, told)))
    params = list(model.params.values())
    norm = torch.nn.utils.clip_grad_norm_(params, torch.inf if grad_clip is None else grad_clip)
    if not bool(torch.isfinite(norm)):
        raise ValueError(f"gradient norm is {float(norm)} (loss {total}): nothing was stepped")
    optimizer.step()
    means = {name: _together(name, *zip(*values, strict=True)) for name, values in told.items()}
    return {**means, "loss": total, "grad_norm": float(norm)}


def _over_ranks(each: list[tuple[float, dict]]) -> tuple[float, dict]:
    """Sum of the ranks' shares of the loss, and every metric's values of all of them."""
    told: dict[str, list[tuple[float, int]]] = {}
    for _, own in each:
        for name, values in own.items():
            told.setdefault(name, []).extend(values)
    return sum(total for total, _ in each), told


def _note(told: dict[str, list[tuple[float, int]]], metrics: Mapping[str, Any], share: int) -> None:
    """Add a part's metrics to what was told, each with how many it is the mean of: its own count, or the part's size."""
    for name, number in metrics.items():
        told.setdefault(name, []).append((float(number), number.count if isinstance(number, Mean) else share))


def _together(name: str, values: Sequence[float], samples: Sequence[int]) -> float:
    """One metric of the parts that told it: the least of NAME/min, the greatest of NAME/max, of an rms the root of the mean
    square, else the mean, over samples. A part that has none says nothing, where another has some."""
    if not any(samples):
        return values[0]
    values, samples = zip(*[(v, n) for v, n in zip(values, samples, strict=True) if n], strict=True)
    if name.endswith(("/min", "/max")):
        return min(values) if name.endswith("/min") else max(values)
    power = 2 if name.endswith("_rms") else 1
    return (sum(v**power * n for v, n in zip(values, samples, strict=True)) / sum(samples)) ** (1 / power)


def _kept_apart(behaviour: Params, params: Params) -> Params:
    """The behaviour params, copied where they are the live ones: updates change those in place, and an average of what
    rolled out and the new params would be one of the new params with themselves."""
    return {name: p.detach().clone() if behaviour[name] is p else behaviour[name] for name, p in params.items()}


def _over_updates(updates: list[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps under the plain names, and each step's own as NAME/update_U."""
    names = dict.fromkeys(name for u in updates for name in u)
    told = {name: [u[name] for u in updates if name in u] for name in names}
    means = {name: _together(name, values, [1] * len(values)) for name, values in told.items()}
    single = {f"{name}/update_{j}": value for j, u in enumerate(updates, 1) for name, value in u.items()}
    return means | single


# ---- diagnosis --------------------------------------------------------------------------------------------------------


class Check(NamedTuple):
    """One question: passed is None where it could not be answered (the detail says why)."""

    name: str
    passed: bool | None
    detail: str


class Report(NamedTuple):
    """What `diagnose` found; `print(report)` is a table, `report.ok` is False if any check failed."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.passed is not False for check in self.checks)

    def __str__(self) -> str:
        mark = {True: "ok  ", False: "FAIL", None: "?   "}
        width = max(len(check.name) for check in self.checks)
        return "\n".join(f"{mark[c.passed]}  {c.name:<{width}}  {c.detail}" for c in self.checks)


def diagnose(
    model: Any,
    algorithm: Algorithm,
    prompts: Sequence[str],
    reward: Reward,
    *,
    images: Sequence[Any] | Tensor | None = None,
    group_size: int = 8,
    steps: int = 8,
    seed: int = 0,
    learning_rate: float = 1e-3,
    iterations: int = 3,
    tolerance: float = 1e-3,
    micro_batch: int | None = None,
    rollout_chunk: int | None = None,
) -> Report:
    """One call, seconds: does this set-up learn the right way at all? The model's params come back bit for bit.
    images: one per prompt, for image-to-video. micro_batch, rollout_chunk: as `train` (gradients are then asked of one part).

    Answers: do the same seeds give the same images; does v at t = 1 point to the noise (the sign u = x_0 - eps does not); are rewards finite; which share of groups has no spread; does replay
    equal the rollout (rms drift of v below `tolerance` rms(v); |ratio - 1| for objectives that report one); does v depend on the params it is given; do gradients reach
    the trained tensors and nothing else; do `iterations` iterations of Adam (learning_rate) move samples of the same
    seeds along the direction, and the reward not significantly down (two standard errors, paired). ValueError as `train`.
    No example: see the top of this file.
    """
    check_model(model)
    prompts = checked_prompts(prompts, images)[:8]
    images = None if images is None else images[:8]
    optimizer = torch.optim.Adam(list(model.params.values()), lr=learning_rate)
    how: dict[str, Any] = {"group_size": group_size, "steps": steps, "seed": seed, "images": images}
    how |= {"micro_batch": micro_batch, "rollout_chunk": rollout_chunk}
    training = train(model, algorithm, prompts, reward, optimizer, **how)
    velocity = model.velocity if rollout_chunk is None else chunked(model.velocity, size=rollout_chunk)
    sampler: Any = Gridded(velocity, model.times, steps, tuple(model.latent_shape()))
    cond, score = encode(model, prompts, images), Score(model.decode, reward, prompts)
    device = next(iter(model.params.values())).device
    seeds = sample_seeds(seed, 2**31, range(len(prompts)), algorithm.pool or group_size).to(device)
    saved = {name: p.detach().clone() for name, p in model.params.items()}

    collect = partial(_collected, algorithm, sampler, model.params, cond, seeds, score)
    try:
        batch, credit = collect()
        again, _ = collect()
        checks = [_same_seeds(batch, again), _towards_noise(batch), _finite_rewards(batch), _spread(batch)]
        window = window_of(batch, credit, torch.arange(batch.rewards.numel()), saved)
        checks.append(_replay(velocity, model.params, window, tolerance))
        checks.append(_others_used(velocity, saved, window))
        checks.extend(_gradients(model, algorithm, _first(window, micro_batch), tolerance))
        for _ in range(iterations):
            next(training)
        kept = batch.trajectory.seeds if hasattr(algorithm.collect, "of_chosen") else None
        after, _ = collect(None if kept is None else kept.reshape(batch.rewards.shape))
        checks.append(_right_way(batch, credit, after, iterations))
    finally:
        if algorithm.memory is not None:
            algorithm.memory.reset()
        _put_back(model.params, saved)
    return Report(tuple(checks))


@torch.no_grad()
def _collected(algorithm, sampler, params, cond, seeds, score, chosen: Tensor | None = None) -> tuple[Batch, Mapping]:
    """A batch and its credit. chosen: the seeds that an algorithm which draws more than it keeps has kept, to be rendered
    again as they are."""
    if algorithm.memory is not None:
        algorithm.memory.reset()
    by = algorithm.collect if chosen is None else algorithm.collect.of_chosen
    batch = by(sampler, params, cond, seeds if chosen is None else chosen, score)
    return batch, algorithm.credit(batch)


def _first(window: Window, samples: int | None) -> Window:
    n = len(window.rewards)
    return window if samples is None or samples >= n else select_rows(window, torch.arange(samples))


@torch.no_grad()
def _put_back(params: Params, saved: Params) -> None:
    for name, p in params.items():
        p.copy_(saved[name])
        p.grad = None


def _same_seeds(a: Batch, b: Batch) -> Check:
    gap = float((a.trajectory.x_0 - b.trajectory.x_0).abs().max())
    return Check("same seeds, same images", gap == 0, f"largest difference of latents {gap:.3g}")


def _towards_noise(batch: Batch) -> Check:
    """v = eps - x_0 at t = 1 is the state itself less a guess at x_0: cos(v, x_t) near 1, near -1 for u = x_0 - eps."""
    tr = batch.trajectory
    j = int(tr.t.argmax())
    cosine = float(torch.nn.functional.cosine_similarity(tr.v[:, j].flatten(1), tr.x_t[:, j].flatten(1)).mean())
    detail = f"cosine of v and x_t at t = {float(tr.t[j]):.3g}: {cosine:+.3f}"
    clear = float(tr.t[j]) > 0.9 and abs(cosine) > 0.2  # an untrained model points nowhere
    return Check("velocity points to noise", cosine > 0 if clear else None, detail)


def _finite_rewards(batch: Batch) -> Check:
    m = reward_metrics(batch.rewards)
    detail = f"{m['reward/missing']:.0%} missing; mean {m['reward/mean']:.4g}, std {m['reward/std']:.4g}"
    return Check("rewards are finite", m["reward/missing"] == 0, detail)


def _spread(batch: Batch) -> Check:
    dead = float(dead_groups(batch.rewards).double().mean())
    return Check("groups have spread", dead <= 0.5, f"{dead:.0%} of {len(batch.rewards)} groups have none")


def _replay(velocity: Any, params: Params, window: Window, tolerance: float) -> Check:
    tr = window.trajectory
    gaps, sizes = [], []
    with torch.no_grad():
        for j, t in enumerate(tr.t):
            v = velocity(params, tr.x_t[:, j], t.expand(len(tr.x_0)), window.cond)
            gaps.append(float((v - tr.v[:, j]).square().mean()))
            sizes.append(float(tr.v[:, j].square().mean()))
    drift = (sum(gaps) / max(sum(sizes), 1e-30)) ** 0.5
    return Check("replay equals rollout", drift <= tolerance, f"relative drift of v {drift:.2e} at {len(gaps)} steps")


@torch.no_grad()
def _others_used(velocity: Any, saved: Params, window: Window) -> Check:
    """An old, averaged or drafted policy is other params in the same call: one that ignores them is the live policy under its name."""
    tr, rows = window.trajectory, slice(0, 1)
    draw = torch.Generator().manual_seed(0)
    others = {n: p + torch.randn(p.shape, generator=draw).to(p) * (0.1 + p.abs()) for n, p in saved.items()}
    x, t, cond = tr.x_t[rows, 0], tr.t[:1].expand(1), {n: v[rows] for n, v in window.cond.items()}
    gap = float((velocity(others, x, t, cond) - velocity(saved, x, t, cond)).abs().max())
    return Check("other params are used", gap > 0, f"largest change of v under perturbed params {gap:.3g}")


def _gradients(model: Any, algorithm: Algorithm, window: Window, tolerance: float) -> list[Check]:
    module = getattr(model, "module", None)  # a toy model is six functions
    tensors = [*model.params.values(), *([] if module is None else module.parameters())]
    for p in tensors:
        p.grad = None
    with torch.enable_grad():
        loss, keep, metrics = algorithm.objective(model.velocity, model.params, window)
        masked_mean(loss, keep).backward()
    ratio = metrics.get("ratio_deviation")
    steps = ", ".join(f"{k.partition('/')[2]} {v:.1e}" for k, v in metrics.items() if k.startswith("ratio_deviation/"))
    ratios = (
        [] if ratio is None else [Check("ratio is 1", ratio <= tolerance, f"mean |ratio - 1| {ratio:.2e} ({steps})")]
    )
    reached = [name for name, p in model.params.items() if p.grad is not None and bool((p.grad != 0).any())]
    ours = {id(p) for p in model.params.values()}
    others = [] if module is None else [(n, p) for n, p in module.named_parameters() if id(p) not in ours]
    stray = [n for n, p in others if p.grad is not None]
    detail = f"{len(reached)} of {len(model.params)} trained tensors (of a fresh LoRA at most half), {len(stray)} others {stray[:3] or ''}".rstrip()
    if not bool(keep.any()):
        return [*ratios, Check("gradients reach the adapter", None, "every state was dropped: no group is alive")]
    # In a fresh LoRA half of the tensors have gradient 0 (the other factor is 0), and a last block may not use them all.
    enough = 4 * len(reached) >= len(model.params)
    return [*ratios, Check("gradients reach the adapter", enough and not stray, detail)]


def _right_way(before: Batch, credit: Mapping[str, Tensor], after: Batch, iterations: int) -> Check:
    change = (after.rewards - before.rewards).double().flatten()
    change = change[torch.isfinite(change)]
    mean, error = float(change.mean()), float(change.std() / max(len(change), 1) ** 0.5)
    detail = f"reward {mean:+.4f} +- {error:.4f} after {iterations} iterations on the same seeds"
    passed = mean >= -2 * error if bool((change != 0).any()) else None  # a constant reward goes nowhere
    b = len(before.trajectory.x_0)
    direction = torch.zeros(b, 1)
    if "direction" in credit:  # where there is one per step, their mean
        told = credit["direction"].reshape(b, -1, *before.trajectory.x_0.shape[1:])
        direction = told.mean(1).reshape(b, -1)
    alive = (direction != 0).any(1)
    if bool(alive.any()):
        moved = (after.trajectory.x_0 - before.trajectory.x_0).reshape(b, -1)
        along = torch.nn.functional.cosine_similarity(moved[alive], direction[alive]).mean()
        detail += f"; samples moved along the direction, cosine {float(along):+.3f}"
        passed = passed if float(along) > 0 else False
    return Check("the reward goes up", passed, detail)
