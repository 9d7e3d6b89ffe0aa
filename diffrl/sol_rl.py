"""Sol-RL (2604.06916): many cheap drafts only say which seeds matter; the policy renders those again and learns from its own.

A composition around any Algorithm: `collect` and the number of seeds change, what is learned and how does not.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from diffrl.checks import require_count
from diffrl.contrast import draft_rewards, select_contrastive
from diffrl.rollouts import _gridded
from diffrl.types import Algorithm, Batch, Cond, Params, Score, Velocity

Draft = Callable[[Params], tuple[Velocity, Params]]


def sol_rl(
    algorithm: Algorithm,
    *,
    draft: Draft,
    pool: int = 96,
    keep: int = 12,
    draft_steps: int = 6,
    chunk: int | None = None,
) -> Algorithm:
    """The same algorithm on the best and worst `keep` of `pool` seeds per prompt, as a draft ranks them (2604.06916).

    1. Once per iteration `draft(behaviour params)` gives (velocity, params): a quantised one calls `requantize_` inside;
       `lambda p: (model.velocity, p)` is the policy itself, with fewer steps.
    2. All `pool` seeds are rendered by Euler steps on the model's own grid of draft_steps and scored (`draft_rewards`, at
       most `chunk` samples at a time).
    3. `algorithm.collect` runs on the chosen seeds: its noise, steps and rewards, from which alone it learns. The draft's
       rewards enter no loss, advantage or baseline.

    Credit, objective, behaviour and updates are the wrapped algorithm's; group_size must be 2 keep. Needs an algorithm
    whose samples start from their own seeds' noise (not DanceGRPO's shared one): else the draft ranks other samples.
    Published: pool 96, keep 12, 6 draft steps of 10, DiffusionNFT's loss, 48 prompts. ValueError: no Algorithm or one
    with a pool already, 2 keep > pool, counts < 1, draft not callable or, at the call, not returning a pair.

    >>> from diffrl.algorithms import art
    >>> sol_rl(art(), draft=lambda params: (lambda *args: args[1], params)).pool
    96
    """
    if not isinstance(algorithm, Algorithm) or algorithm.pool is not None:
        raise ValueError(f"sol_rl wraps an Algorithm without a pool such as nft(), got {algorithm!r:.200}")
    if not callable(draft):
        raise ValueError(f"draft must map behaviour params to (velocity, params), got {draft!r}")
    pool, keep, steps = (
        require_count(name, n) for name, n in (("pool", pool), ("keep", keep), ("draft_steps", draft_steps))
    )
    if 2 * keep > pool:
        raise ValueError(f"keep={keep} best and as many worst need a pool of at least {2 * keep}, got {pool}")
    chunk = None if chunk is None else require_count("chunk", chunk)

    def collect(velocity: Velocity, params: Params, cond: Cond, seeds: Tensor, score: Score) -> Batch:
        sampler = _gridded(velocity)
        if seeds.shape[1] != pool:
            raise ValueError(f"sol_rl ranks {pool} seeds per prompt, got {tuple(seeds.shape)}")
        by, with_params = _drafted(draft(params))
        times = sampler.times(steps)
        proxy = draft_rewards(by, with_params, cond, seeds, score, times=times, shape=sampler.shape, chunk=chunk)
        columns = select_contrastive(proxy, keep=keep).to(seeds.device)
        return algorithm.collect(velocity, params, cond, seeds.gather(1, columns), score)

    return algorithm._replace(collect=collect, pool=pool, kept=2 * keep)


def _drafted(pair: Any) -> tuple[Velocity, Params]:
    if not isinstance(pair, tuple) or len(pair) != 2 or not callable(pair[0]):
        raise ValueError(f"draft must return (velocity, params), got {pair!r:.200}")
    return pair
