"""Best and worst of a pool: which seeds a cheap draft says matter, how far its ranking can be trusted, and the rollout that
renders only those with the policy (Sol-RL, 2604.06916). The draft's rewards choose and are measured; nothing learns from them.

`diffrl.quant` offers all of it.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Float64, Int, Int64
from torch import Tensor

from diffrl.checks import (
    NoReward,
    require_cond,
    require_count,
    require_number,
    require_same_shape,
    require_tensors,
    shapes,
)
from diffrl.sampling import _checked_kernels, _checked_times, euler_step, rollout
from diffrl.types import Cond, Params, Reward, Score, Step, Trajectory, Velocity

# ---- selection and agreement ------------------------------------------------------------------------------------------


def select_contrastive(rewards: Float[Tensor, " g n"], *, keep: int) -> Int64[Tensor, " g two_keep"]:
    """Columns of each group's best `keep` and worst `keep` rewards, " g 2*keep": best first, worst last (2604.06916 sec. 3.2).

    One stable descending order per group (ties: lower column first), so that the two halves are disjoint even where all
    rewards are equal. A nan or inf is no reward: with m < 2 keep finite ones all m are taken, the top min(keep, ceil(m/2))
    first, the rest last, and columns without reward (lowest first) fill the middle. Unchanged by any increasing map of
    the rewards. ValueError: rewards not " g n" float, keep < 1, 2 keep > n.

    >>> select_contrastive(torch.tensor([[0.1, 0.9, 0.5, 0.9, 0.2]]), keep=2)
    tensor([[1, 3, 4, 0]])
    """
    keep = _checked_keep_of(rewards, keep, name="rewards")
    finite = torch.isfinite(rewards)
    order = torch.where(finite, rewards.detach().double(), -math.inf).argsort(dim=1, descending=True, stable=True)
    m = finite.sum(1, keepdim=True)
    top = ((m + 1) // 2).clamp(max=keep)
    bottom = (m - top).clamp(max=keep)
    place = torch.arange(2 * keep, device=rewards.device).expand(len(rewards), -1)
    last = m - (2 * keep - place)
    middle = m + place - top
    return order.gather(1, torch.where(place < top, place, torch.where(place < 2 * keep - bottom, middle, last)))


class RankAgreement(NamedTuple):
    """How a proxy's ranking agrees with the true one, per group; nan where a group has nothing to say (`rank_agreement`)."""

    spearman: Float64[Tensor, " g"]
    kendall: Float64[Tensor, " g"]
    top_match: Float64[Tensor, " g"]
    bottom_match: Float64[Tensor, " g"]
    bottom_false: Float64[Tensor, " g"]
    mean_rank_top: Float64[Tensor, " g"]
    mean_rank_bottom: Float64[Tensor, " g"]


def rank_agreement(proxy: Float[Tensor, " g n"], true: Float[Tensor, " g n"], *, keep: int) -> RankAgreement:
    """Does the proxy pick what the true reward would? Each field " g" in float64; average over groups with nanmean.

    spearman, kendall   Pearson of average ranks; tau-b. A constant group: nan
    top_match, bottom_match   share of the proxy's top (bottom) keep among the true top (bottom) keep (`select_contrastive`)
    bottom_false        share of the proxy's bottom keep with true rank < (n + 1)/2: truly in the better half
    mean_rank_top, mean_rank_bottom   mean true rank of the proxy's top (bottom) keep

    Rank 1 is the best, ties get their average rank. A perfect proxy: 1, 1, 1, 1, 0, (keep + 1)/2, n - (keep - 1)/2; an
    independent one: 0, 0, keep/n, keep/n, 1/2, (n + 1)/2 twice. Columns where either is not finite are left out first (n
    is what remains); fewer than 2 keep left: nan. Derived here: the match of 2604.06916 is another, undefined there.
    ValueError: shapes differ or are not " g n" float, keep < 1, 2 keep > n.

    >>> rank_agreement(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.tensor([[3.0, 2.0, 1.0, 0.0]]), keep=1).spearman
    tensor([0.8000], dtype=torch.float64)
    """
    require_same_shape(proxy=proxy, true=true)
    keep = _checked_keep_of(proxy, keep, name="proxy and true")
    usable = torch.isfinite(proxy) & torch.isfinite(true)
    rows = []
    for mask, guess, truth in zip(usable, proxy.detach().double(), true.detach().double()):
        enough = int(mask.sum()) >= 2 * keep
        rows.append(_agreement(guess[mask], truth[mask], keep) if enough else [math.nan] * len(RankAgreement._fields))
    table = torch.tensor(rows, dtype=torch.float64, device=proxy.device).reshape(len(proxy), len(RankAgreement._fields))
    return RankAgreement(*table.unbind(1))


def _agreement(guess: Tensor, truth: Tensor, keep: int) -> list[float]:
    """The fields of one group, " n" finite values each."""
    n, ranks = len(truth), average_ranks(truth)
    chosen, best = (select_contrastive(x[None], keep=keep)[0] for x in (guess, truth))
    top, bottom = chosen[:keep], chosen[keep:]
    a, b = (torch.sign(x[:, None] - x[None, :]).flatten() for x in (guess, truth))
    fields = (
        _cosine(average_ranks(guess) - (n + 1) / 2, ranks - (n + 1) / 2),
        _cosine(a, b),
        torch.isin(top, best[:keep]).double().mean(),
        torch.isin(bottom, best[keep:]).double().mean(),
        (ranks[bottom] < (n + 1) / 2).double().mean(),
        ranks[top].mean(),
        ranks[bottom].mean(),
    )
    return [float(x) for x in fields]


def average_ranks(x: Float[Tensor, " n"]) -> Float64[Tensor, " n"]:
    """1 for the largest of " n" values, ties their average: (number above) + (number equal + 1)/2.

    >>> average_ranks(torch.tensor([0.5, 2.0, 0.5]))
    tensor([2.5000, 1.0000, 2.5000], dtype=torch.float64)
    """
    if not isinstance(x, Tensor) or x.ndim != 1:
        raise ValueError(f"ranks are of one row of values, got {shapes(x=x)}")
    above, equal = (x[None, :] > x[:, None]).sum(1), (x[None, :] == x[:, None]).sum(1)
    return above + (equal + 1).double() / 2


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """<a, b>/(|a| |b|), nan where either is zero; sums of half-integers are exact, so a perfect match is 1 exactly."""
    return (a @ b) / torch.sqrt((a @ a) * (b @ b))


def _checked_keep_of(rewards: Tensor, keep: int, *, name: str) -> int:
    require_tensors(**{name: rewards})
    if rewards.ndim != 2:
        raise ValueError(f"{name} must be (g, n), got {tuple(rewards.shape)}")
    keep = require_count("keep", keep)
    if 2 * keep > rewards.shape[1]:
        raise ValueError(f"keep={keep} best and as many worst of {rewards.shape[1]}: {shapes(**{name: rewards})}")
    return keep


# ---- extras -----------------------------------------------------------------------------------------------------------


def affordable_pool(budget: float, *, draft: float, policy: float, keep: int, most: int) -> int:
    """*Extra*: the largest n <= most with n draft + 2 keep policy <= budget, and never below 2 keep. Derived here.

    budget: seconds per prompt; draft, policy: seconds of one sample in either stage, scoring included, measured. ValueError:
    numbers below 0 (draft: at 0 too), keep < 1, most < 2 keep.

    >>> affordable_pool(10.0, draft=0.1, policy=0.25, keep=12, most=96), affordable_pool(1.0, draft=0.1, policy=0.25, keep=12, most=96)
    (40, 24)
    """
    keep, most = require_count("keep", keep), require_count("most", most)
    if most < 2 * keep:
        raise ValueError(f"most={most} is below the {2 * keep} samples that keep={keep} chooses")
    budget, policy = require_number("budget", budget, low=0), require_number("policy", policy, low=0)
    draft = require_number("draft", draft, low=0, open_low=True)
    spare = (budget - 2 * keep * policy) / draft
    return max(2 * keep, math.floor(min(most, spare + 1e-9)))


class RewardCache:
    """*Extra*: rewards by (prompt, seed, policy version), the latest `capacity` of them. Derived here.

    In training the version changes with every iteration, so it hits only on resume, audit and evaluation; a key without the
    version would hand on the rewards of samples that no longer exist. version: whatever tells policies apart, an iteration
    or a digest. What is not finite is not kept.

    >>> cache = RewardCache(capacity=2)
    >>> cache(["a", "a"], [0, 1], version=3, render=lambda rows: torch.tensor([float(r) for r in rows]))
    tensor([0., 1.])
    >>> cache(["a", "a"], [1, 0], version=3, render=None)
    tensor([1., 0.])
    """

    def __init__(self, *, capacity: int):
        self.capacity = require_count("capacity", capacity)
        self.kept: dict[tuple[str, int, Hashable], float] = {}
        self.hits = self.misses = 0

    def __call__(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int] | Tensor,
        *,
        version: Hashable,
        render: Callable[[list[int]], Tensor] | None,
    ) -> Float[Tensor, " b"]:
        """Rewards " b" (float32), of which render(rows) gives those of the rows not known, in their order. ValueError: lengths
        that differ, a version of None, as many rewards as rows not returned."""
        numbers = [int(s) for s in seeds]
        known = version is not None and isinstance(version, Hashable)
        if isinstance(prompts, str) or len(prompts) != len(numbers) or not known:
            raise ValueError(
                f"{len(prompts)} prompts, {len(numbers)} seeds, version {version!r}: one each, and a version"
            )
        keys = [(prompt, seed, version) for prompt, seed in zip(prompts, numbers)]
        first = {key: row for row, key in reversed(list(enumerate(keys)))}
        fresh = sorted(row for key, row in first.items() if key not in self.kept)
        self.hits, self.misses = self.hits + len(keys) - len(fresh), self.misses + len(fresh)
        found = {key: self.kept[key] for key in keys if key in self.kept}
        if fresh:
            if render is None:
                raise ValueError(
                    f"{len(fresh)} rewards are not known, the first of {keys[fresh[0]]}, and render is None"
                )
            values = render(fresh)
            if not isinstance(values, Tensor) or tuple(values.shape) != (len(fresh),):
                raise ValueError(f"render must return ({len(fresh)},) rewards, got {shapes(rewards=values)}")
            found |= {keys[row]: float(value) for row, value in zip(fresh, values)}
        for key in keys:  # the latest asked for are the last to go
            self.kept.pop(key, None)
            if math.isfinite(found[key]):
                self.kept[key] = found[key]
        for key in list(self.kept)[: max(len(self.kept) - self.capacity, 0)]:
            del self.kept[key]
        return torch.tensor([found[key] for key in keys], dtype=torch.float32)


# ---- the two-stage rollout --------------------------------------------------------------------------------------------


class TwoStageRollout(NamedTuple):
    """The policy's samples of the chosen seeds (b = g 2keep, prompt-major) and their own rewards, which are what is learned
    from; `columns` says which of the n seeds they are, `proxy` what the draft's samples of all n were worth."""

    trajectory: Trajectory
    rewards: Float[Tensor, " g two_keep"]
    columns: Int64[Tensor, " g two_keep"]
    proxy: Float[Tensor, " g n"]


def _identity(x: Tensor) -> Tensor:
    return x


@torch.no_grad()
def two_stage_rollout(
    velocity: Velocity,
    params: Params,
    draft_velocity: Velocity,
    draft_params: Params,
    cond: Cond,
    seeds: Int[Tensor, " g n"],
    reward: Reward,
    *,
    draft_times: Float[Tensor, " m1"],
    times: Float[Tensor, " n1"],
    keep: int,
    shape: Sequence[int],
    prompts: Sequence[str],
    decode: Callable[[Tensor], Tensor] = _identity,
    step: Step | Sequence[Step] = euler_step,
    chunk: int | None = None,
) -> TwoStageRollout:
    """Sol-RL's rollout (2604.06916): the draft renders all n seeds of each prompt, the policy the best and worst `keep` again.

    1. Euler along draft_times with the draft, decode, reward: proxy " g n". Latents and images are let go.
    2. columns = select_contrastive(proxy), chosen = seeds at those columns.
    3. rollout(velocity, params) of the chosen seeds along `times` by `step`, from the same noise; decode; reward again.

    Only the trajectory and rewards of 3 are to be learned from. The draft is an ODE: under an SDE the seed does not
    determine the sample; stage 3 may be one, its noise comes from (seed, stream). cond: tensors with leading axis g, one
    row per prompt; prompts: g strings; reward(decode(x_0), prompts) gets one prompt per image and returns " b"; shape: one
    latent's; chunk: samples per call of velocity, decode and reward in either stage (None: all in one). A sample depends on
    its seed, prompt and params alone, in whatever chunk, if that holds of the velocity. No gradient anywhere.

    Cost beside a rollout of the n seeds, decoding and scoring left out: n T/(n T_d/s + 2 keep T) times faster, with T and
    T_d steps and a draft that is s times faster per step; at 96, 12, 10, 6 and s = 1 that is 1.18.
    ValueError, before the first sample: another g anywhere, 2 keep > n, times, kernels, chunk; later: a reward that is
    not " b". No example: `sol_rl` runs it.
    """
    g = _checked_pool(seeds, cond, keep)
    _checked_times(draft_times)
    _checked_kernels(step, len(_checked_times(times)) - 1)
    chunk = None if chunk is None else require_count("chunk", chunk)
    listed = isinstance(prompts, Sequence) and not isinstance(prompts, str) and all(isinstance(p, str) for p in prompts)
    if not listed or len(prompts) != g:
        raise ValueError(f"prompts must be {g} strings, one per row of seeds {tuple(seeds.shape)}, got {prompts!r}")
    if not callable(reward) or not callable(decode):
        raise ValueError(f"reward and decode must be functions, got {reward!r} and {decode!r}")

    def score(x_0: Tensor, rows: Tensor) -> Any:
        given = x_0.clone()  # decode or the reward may write into what they are given; `windows.Score` copies too
        return reward(decode(given), [prompts[i] for i in rows.tolist()])

    proxy = draft_rewards(draft_velocity, draft_params, cond, seeds, score, times=draft_times, shape=shape, chunk=chunk)
    columns = select_contrastive(proxy, keep=keep)
    chosen = seeds.gather(1, columns.to(seeds.device))
    pieces = list(_rendered(velocity, params, cond, chosen, score, times, shape, chunk, step=step))
    rewards = rearrange(torch.cat([r for _, r in pieces]), "(g k) -> g k", g=g)
    return TwoStageRollout(_joined([trajectory for trajectory, _ in pieces]), rewards, columns, proxy)


@torch.no_grad()
def draft_rewards(
    velocity: Velocity,
    params: Params,
    cond: Cond,
    seeds: Int[Tensor, " g n"],
    score: Score,
    *,
    times: Float[Tensor, " n1"],
    shape: Sequence[int],
    chunk: int | None = None,
) -> Float[Tensor, " g n"]:
    """Stage 1 of `two_stage_rollout` alone: the rewards of every seed's sample by an Euler walk of `times`, nothing kept.

    score: (latents " b *d", prompt rows " b") -> " b". ValueError: as there.

    >>> still, grid = lambda params, x_t, t, cond: 0 * x_t, torch.tensor([1.0, 0.0])  # the sample is its seed's noise
    >>> told = draft_rewards(still, {}, {}, torch.tensor([[5, 5, 6]]), lambda x, rows: x[:, 0], times=grid, shape=(1,))
    >>> (told[0] == told[0, 0]).tolist()
    [True, True, False]
    """
    _checked_pool(seeds, cond, None)
    chunk = None if chunk is None else require_count("chunk", chunk)
    pieces = _rendered(velocity, params, cond, seeds, score, times, shape, chunk, step=euler_step, keep=[])
    return rearrange(torch.cat([rewards for _, rewards in pieces]), "(g n) -> g n", g=len(seeds))


def _rendered(velocity, params, cond, seeds, score, times, shape, chunk, **how):
    """(trajectory, rewards " c") of one chunk of samples after the other, prompt-major."""
    flat, n = seeds.flatten(), seeds.shape[1]
    scored, failure = 0, None
    for start in range(0, len(flat), chunk or len(flat)):
        part = flat[start : start + (chunk or len(flat))]
        rows = torch.arange(start, start + len(part), device=flat.device) // n
        own = {name: value[rows.to(value.device)] for name, value in cond.items()}
        walked = rollout(velocity, params, own, times, seeds=part, shape=shape, **how)
        try:
            rewards = score(walked.x_0, rows)
            scored += 1
        except NoReward as error:  # a chunk without a reward is no run without one
            rewards, failure = torch.full((len(part),), math.nan), error
        if not isinstance(rewards, Tensor) or not rewards.is_floating_point() or tuple(rewards.shape) != (len(part),):
            raise ValueError(f"the reward must return ({len(part)},) floats, one per sample, got {shapes(r=rewards)}")
        yield walked, rewards
    if failure is not None and not scored:
        raise failure


def _joined(parts: list[Trajectory]) -> Trajectory:
    """One trajectory of all rows; t and t_next are the same in every part."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    whole = {n: torch.cat([getattr(p, n) for p in parts]) for n in Trajectory._fields if n not in ("t", "t_next")}
    return first._replace(**whole)


def _checked_pool(seeds: Tensor, cond: Cond, keep: int | None) -> int:
    """g; ValueError unless seeds are " g n" integers, g >= 1, cond has g rows and 2 keep of n can be chosen."""
    if not isinstance(seeds, Tensor) or seeds.ndim != 2 or seeds.is_floating_point() or seeds.dtype == torch.bool:
        raise ValueError(f"seeds must be (g, n) integers, got {shapes(seeds=seeds)}")
    g, n = seeds.shape
    if not g or not n:
        raise ValueError(f"seeds (g, n) must not be empty, got {tuple(seeds.shape)}")
    require_cond(cond, g)
    if keep is not None and 2 * require_count("keep", keep) > n:
        raise ValueError(f"keep={keep} best and as many worst need {2 * keep} seeds per prompt, got {n}")
    return g
