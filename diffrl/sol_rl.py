"""Sol-RL (2604.06916): many cheap drafts only say which seeds matter; the policy renders those again and learns from its own.

A composition around any Algorithm: `collect` and the number of seeds change, what is learned and how does not. What it
measures comes back in `Batch.metrics` and is one of the loop's metrics:

    draft/spearman ... draft/mean_rank_bottom   `quant.rank_agreement` of the chosen samples' two rewards, mean over prompts. Free;
                                they are extremes only, which inflates it: watch the trend
    draft/gap, draft/reversed   policy reward of the drafts' best half minus its worst half; share of prompts where <= 0
    draft/missing, draft/steps, draft/pool      share of drafts without a reward; steps and seeds per prompt of this iteration
    draft/converted             share of the module's numbers in four-bit layers (`drafts.Draft`)
    draft/groups_dead           share of prompts whose pool of drafts has no spread: there the choice is arbitrary
    audit/...                   the same seven on whole pools, by the policy's own ODE samples, where an audit was due
    seconds/requantise, /draft, /audit, /policy   each without its scoring, which seconds/reward holds; parts of seconds/rollout
"""

import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffrl.checks import require_count, require_number
from diffrl.contrast import affordable_pool, draft_rewards, rank_agreement, select_contrastive
from diffrl.guidance import dead_groups
from diffrl.rollouts import _gridded
from diffrl.sampling import seeded_noise
from diffrl.types import Algorithm, Batch, Cond, Gridded, Params, Score, Velocity

Draft = Callable[[Params], tuple[Velocity, Params]]


def sol_rl(
    algorithm: Algorithm,
    *,
    draft: Draft,
    pool: int = 96,
    keep: int = 12,
    draft_steps: int = 6,
    chunk: int | None = None,
    audit_every: int | None = None,
    audit_prompts: int = 1,
    threshold: float = 0.8,
    most_draft_steps: int | None = None,
    budget: float | None = None,
) -> Algorithm:
    """The same algorithm on the best and worst `keep` of `pool` seeds per prompt, as a draft ranks them (2604.06916).

    1. Once per iteration `draft(behaviour params)` gives (velocity, params): `drafts.merged_draft(model)` is the four-bit one,
       `lambda p: (model.velocity, p)` is the policy itself, with fewer steps.
    2. All `pool` seeds are rendered by Euler steps on the model's own grid of draft_steps and scored (`draft_rewards`, at
       most `chunk` samples at a time).
    3. `algorithm.collect` runs on the chosen seeds: its noise, steps and rewards, from which alone it learns. The draft's
       rewards enter no loss, advantage or baseline.

    Credit, objective, behaviour and updates are the wrapped algorithm's; group_size must be 2 keep. Published: pool 96,
    keep 12, 6 draft steps of 10, DiffusionNFT's loss, 48 prompts. What is measured: see this module's table.

    audit_every: in iterations 0, m, 2m, ... the first audit_prompts prompts have their whole pool rendered by the policy too
    (ODE, the run's steps: that many more samples). threshold: of the audit's mean Spearman; below it a warning is given.

    *Extras*, in neither paper nor code, off by default: most_draft_steps: after an audit below the threshold one more draft
    step is taken from then on, up to this number. budget, seconds: only the first n seeds of each pool are drafted, n the
    most that the last iteration's seconds say can be afforded (`affordable_pool`); such a run is not repeatable. Both begin
    anew in a resumed run.

    ValueError: no Algorithm or one with a pool already, 2 keep > pool, numbers out of range, draft not callable or, at the
    call, not returning a pair; an algorithm whose samples do not start from their own seeds' noise (DanceGRPO): its draft
    would rank other samples.

    >>> from diffrl.algorithms import art
    >>> sol_rl(art(), draft=lambda params: (lambda *args: args[1], params)).pool
    96
    """
    o = _Options(draft, pool, keep, draft_steps, chunk, audit_every, audit_prompts, threshold, most_draft_steps, budget)
    o = _checked(algorithm, o)
    now = _Now(algorithm.memory, o.pool, o.draft_steps)
    remembers = most_draft_steps is not None or budget is not None
    collect: Any = partial(_collect, algorithm.collect, o, now)
    collect.of_chosen = algorithm.collect  # the samples of given seeds, without choosing: what `diagnose` compares
    return algorithm._replace(
        collect=collect,
        pool=o.pool,
        kept=2 * o.keep,
        memory=now if remembers else algorithm.memory,
    )


class _Options(NamedTuple):
    """The arguments of `sol_rl`."""

    draft: Draft
    pool: int
    keep: int
    draft_steps: int
    chunk: int | None
    audit_every: int | None
    audit_prompts: int
    threshold: float
    most_draft_steps: int | None
    budget: float | None


def _checked(algorithm: Any, o: _Options) -> _Options:
    if not isinstance(algorithm, Algorithm) or algorithm.pool is not None:
        raise ValueError(f"sol_rl wraps an Algorithm without a pool such as nft(), got {algorithm!r:.200}")
    if not callable(o.draft):
        raise ValueError(f"draft must map behaviour params to (velocity, params), got {o.draft!r}")
    counts: dict[str, Any] = {
        name: require_count(name, getattr(o, name)) for name in ("pool", "keep", "draft_steps", "audit_prompts")
    }
    for name in ("chunk", "audit_every", "most_draft_steps"):
        if getattr(o, name) is not None:
            counts[name] = require_count(name, getattr(o, name))
    o = o._replace(**counts)
    if 2 * o.keep > o.pool:
        raise ValueError(f"keep={o.keep} best and as many worst need a pool of at least {2 * o.keep}, got {o.pool}")
    require_number("threshold", o.threshold, low=-1, high=1)
    if o.most_draft_steps is not None and (o.audit_every is None or o.most_draft_steps < o.draft_steps):
        raise ValueError(
            f"most_draft_steps={o.most_draft_steps} needs audits to act on (audit_every={o.audit_every}) and at least "
            f"draft_steps={o.draft_steps}"
        )
    if o.budget is not None:
        require_number("budget", o.budget, low=0, open_low=True)
    return o


def _collect(
    collect: Callable[..., Batch],
    o: _Options,
    now: "_Now",
    velocity: Velocity,
    params: Params,
    cond: Cond,
    seeds: Tensor,
    score: Score,
) -> Batch:
    """Draft, rank, choose, and the wrapped algorithm's own collect on what was chosen."""
    sampler = _gridded(velocity)
    if seeds.shape[1] != o.pool:
        raise ValueError(f"sol_rl ranks {o.pool} seeds per prompt, got {tuple(seeds.shape)}")
    seeds, steps, clock = seeds[:, : now.pool], now.steps, _Clock(score)
    by, with_params = _drafted(o.draft(params))
    clock.lap("seconds/requantise")
    times = sampler.times(steps)
    proxy = draft_rewards(by, with_params, cond, seeds, score, times=times, shape=sampler.shape, chunk=o.chunk)
    clock.lap("seconds/draft")
    told: dict[str, float] = {}
    if (
        o.audit_every is not None and sampler.iteration % o.audit_every == 0
    ):  # before stage 2: `score` remembers its last
        told = _audit(sampler, params, cond, seeds, score, proxy, o)
        now.steps = _answered(told["audit/spearman"], o, now, steps, sampler)
        clock.lap("seconds/audit")
    columns = select_contrastive(proxy, keep=o.keep).to(seeds.device)
    chosen = seeds.gather(1, columns)
    own = sampler._replace(velocity=_from_own_noise(sampler.velocity, chosen, sampler.shape))
    batch = collect(own, params, cond, chosen, score)
    clock.lap("seconds/policy")
    told |= _measured(proxy, columns, batch.rewards, o.keep)
    told |= {"draft/steps": steps, "draft/pool": seeds.shape[1]} | clock.seconds
    if (share := getattr(o.draft, "share", None)) is not None:
        told["draft/converted"] = share
    if o.budget is not None:
        now.pool = _afforded(o, told, clock.scoring, now.pool, len(seeds))
    return batch._replace(metrics={**(batch.metrics or {}), **told})


def _drafted(pair: Any) -> tuple[Velocity, Params]:
    if not isinstance(pair, tuple) or len(pair) != 2 or not callable(pair[0]):
        raise ValueError(f"draft must return (velocity, params), got {pair!r:.200}")
    return pair


def _from_own_noise(velocity: Velocity, seeds: Tensor, shape: tuple[int, ...]) -> Velocity:
    """The velocity, whose first call at t = 1 must see the noise that the draft of these seeds began with."""
    seen = False

    def watched(params: Params, x_t: Tensor, t: Tensor, cond: Cond) -> Tensor:
        nonlocal seen
        if not seen and len(x_t) == seeds.numel() and bool((torch.as_tensor(t) == 1).all()):
            seen = True
            if not torch.equal(x_t, seeded_noise(seeds.flatten(), shape).to(x_t)):
                raise ValueError(
                    f"the algorithm starts its {len(x_t)} samples from other noise than their own seeds' (as DanceGRPO's "
                    "one noise per prompt): the draft ranked other samples than it would train"
                )
        return velocity(params, x_t, t, cond)

    return watched


# ---- what is measured -------------------------------------------------------------------------------------------------


class _Clock:
    """Seconds since the last lap, without what `score` spent inside the reward, which is the loop's to tell."""

    def __init__(self, score: Any):
        self.score, self.seconds, self.scoring = score, dict[str, float](), dict[str, float]()
        self.began, self.scored = time.perf_counter(), float(getattr(score, "seconds", 0.0))

    def lap(self, name: str) -> None:
        now, scored = time.perf_counter(), float(getattr(self.score, "seconds", 0.0))
        self.scoring[name] = scored - self.scored
        self.seconds[name] = now - self.began - self.scoring[name]
        self.began, self.scored = now, scored


def _agreement(prefix: str, proxy: Tensor, true: Tensor, keep: int) -> dict[str, float]:
    fields = rank_agreement(proxy, true.to(proxy), keep=keep)._asdict()
    return {f"{prefix}/{name}": float(value.nanmean()) for name, value in fields.items()}


def _measured(proxy: Tensor, columns: Tensor, rewards: Tensor, keep: int) -> dict[str, float]:
    """What stages 1 and 2 say of each other without a further sample."""
    finite = rewards.where(torch.isfinite(rewards), torch.nan)
    gap = finite[:, :keep].nanmean(1) - finite[:, keep:].nanmean(1)
    known = gap[torch.isfinite(gap)]
    chosen = proxy.gather(1, columns.to(proxy.device))
    whole = _agreement("draft", chosen, rewards, keep)
    of_pairs = _agreement(
        "draft", chosen, rewards, 1
    )  # correlations need no full halves: a missing reward costs a pair
    return {
        **whole,
        **{name: of_pairs[name] for name in ("draft/spearman", "draft/kendall")},
        "draft/gap": float(known.mean()),
        "draft/reversed": float((known <= 0).double().mean()),
        "draft/missing": 1 - float(torch.isfinite(proxy).double().mean()),
        "draft/groups_dead": float(dead_groups(proxy).double().mean()),
    }


def _audit(
    sampler: Gridded, params: Params, cond: Cond, seeds: Tensor, score: Score, proxy: Tensor, o: _Options
) -> dict[str, float]:
    """`rank_agreement` of whole pools: the first prompts' seeds once more, by the policy."""
    g = min(o.audit_prompts, len(seeds))
    few = {name: value[:g] for name, value in cond.items()}
    how: dict[str, Any] = {"times": sampler.times(sampler.steps), "shape": sampler.shape, "chunk": o.chunk}
    true = draft_rewards(sampler.velocity, params, few, seeds[:g], score, **how)
    return _agreement("audit", proxy[:g], true, o.keep)


# ---- what is remembered -----------------------------------------------------------------------------------------------


class _Now:
    """Draft steps and pool of the next iteration, and whatever the wrapped algorithm remembers (`Algorithm.memory`)."""

    def __init__(self, inner: Any, pool: int, steps: int):
        self.inner, self.first = inner, (pool, steps)
        self.pool, self.steps = self.first
        self.warned = False

    def reset(self) -> None:
        self.pool, self.steps = self.first
        self.warned = False
        if self.inner is not None:
            self.inner.reset()

    def advance(self) -> None:
        if self.inner is not None:
            self.inner.advance()


def _answered(spearman: float, o: _Options, now: _Now, steps: int, sampler: Gridded) -> int:
    """The draft steps from here on; a warning where the draft's ranking cannot be trusted (nan: it could not be told), once
    and whenever it is answered."""
    if not spearman < o.threshold:
        return steps
    more = steps if o.most_draft_steps is None else max(steps, min(steps + 1, o.most_draft_steps, sampler.steps))
    if now.warned and more == steps:
        return steps
    now.warned, i = True, sampler.iteration
    answer = f"{more} draft steps from now on" if more > steps else "more draft steps may help; see audit/spearman"
    warnings.warn(
        f"iteration {i}: the draft ranks as the policy does only to {spearman:.3f} (Spearman, threshold {o.threshold:g}; "
        f"{o.audit_prompts} prompt(s) of {now.pool} seeds, noisy where rewards are tied); "
        f"{answer}",
        stacklevel=4,
    )
    return more


def _afforded(o: _Options, told: Mapping[str, float], scoring: Mapping[str, float], now: int, g: int) -> int:
    """Seeds per prompt of the next iteration, said where it changes."""
    assert o.budget is not None
    draft = (told["seconds/draft"] + scoring["seconds/draft"]) / (g * now)
    policy = (told["seconds/policy"] + scoring["seconds/policy"]) / (g * 2 * o.keep)
    n = affordable_pool(o.budget / g, draft=draft, policy=policy, keep=o.keep, most=o.pool)
    if n != now:
        text = f"pool {now} -> {n} seeds per prompt: {draft:.3g} s per draft, {policy:.3g} s per sample, budget {o.budget:g} s"
        warnings.warn(text, stacklevel=4)
    return n
