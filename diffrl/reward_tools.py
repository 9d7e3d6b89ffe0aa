"""Rewards made from rewards: sums, preferences, a memory, threads. A reward in, a reward out.

State is kept only where it is the point: `cached` remembers values, `preference` and `judged` draw from a generator.
"""

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffrl.checks import promote, require_call, require_count, require_number
from diffrl.guidance import pair_labels
from diffrl.reward_rows import Log, Rows, attempts, one_number_each, report, score_rows
from diffrl.types import Reward

# ---- sums -------------------------------------------------------------------------------------------------------------


class WeightedSum(NamedTuple):
    """sum_j weights_j rewards_j, itself a reward. The single values reach `Batch.parts`, for advantages or directions per
    reward. A sample for which any of them is missing has no reward. Make it with `weighted_sum`."""

    rewards: Mapping[str, Reward]
    weights: tuple[float, ...]
    log: Log | None = None

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """images UInt8 " b h w 3" or " b f h w 3", one prompt each -> float32 " b" on the CPU, without gradient.

        Rows for which a member raises are nan, and reported once for each such member. ValueError: a malformed call, a
        member that returns anything but one number per row.
        """
        require_call("weighted_sum", images, prompts)
        parts = []
        for name, reward in self.rewards.items():
            parts.append(report(f"weighted_sum: {name}", _member_rows(name, reward, images, prompts), self.log))
        return self.total(torch.stack(parts, dim=1))

    def total(self, parts: Tensor) -> Tensor:
        """parts " b j" -> sum_j w_j parts_j " b", nan where any part is not finite."""
        total = parts @ torch.tensor(self.weights, dtype=parts.dtype, device=parts.device)
        return torch.where(torch.isfinite(parts).all(1), total, torch.nan)


def weighted_sum(
    rewards: Mapping[str, Any], weights: Mapping[str, float] | None = None, *, log: Log | None = None
) -> WeightedSum:
    """Several rewards as one, R = sum_j w_j R_j on raw scores (the mixture of 2610.12572).

    Args:
        rewards: rewards by name, or, without `weights`, pairs (weight, reward) by name.
        weights: finite numbers by the same names; None: 1 each, or those of the pairs.
        log: called as log(name, values " b") once for each call of a member (which is asked again row by row where it
            raises), and see `reward_rows.report`.

    Raises:
        ValueError: no rewards, other names, a member that cannot be called, a weight that is no finite number.

    >>> one = lambda images, prompts: torch.ones(1)
    >>> images = torch.zeros(1, 8, 8, 3, dtype=torch.uint8)
    >>> weighted_sum({"a": one, "b": one}, {"a": 2, "b": -1})(images, ["x"])
    tensor([1.])
    """
    if not isinstance(rewards, Mapping) or not rewards:
        raise ValueError(f"rewards must be a non-empty mapping of rewards by name, got {rewards!r}")
    if weights is None and all(isinstance(r, tuple) and len(r) == 2 and not callable(r) for r in rewards.values()):
        weights = {name: pair[0] for name, pair in rewards.items()}
        rewards = {name: pair[1] for name, pair in rewards.items()}
    for name, reward in rewards.items():
        if not callable(reward):
            raise ValueError(f"rewards[{name!r}] must be a callable, got {reward!r}")
    if weights is not None and not isinstance(weights, Mapping):
        raise ValueError(f"weights must be a mapping by the rewards' names {sorted(rewards)}, got {weights!r}")
    if weights is not None and weights.keys() != rewards.keys():
        raise ValueError(f"weights {sorted(weights)} must have the names of the rewards {sorted(rewards)}")
    given = dict.fromkeys(rewards, 1.0) if weights is None else weights
    members = dict(rewards) if log is None else {name: partial(_logged, log, name, r) for name, r in rewards.items()}
    return WeightedSum(members, tuple(require_number(f"weights[{n!r}]", given[n]) for n in rewards), log)


def _member_rows(name: str, reward: Reward, images: Tensor, prompts: Sequence[str]) -> Rows:
    """`score_rows` of one member, but for values that are not one number per row: those are a mistake, not a failure."""
    wrong: list[Exception] = []

    def score(part: Tensor, texts: Sequence[str]) -> Tensor:
        values = reward(part, texts)
        try:
            return one_number_each(values, len(part))
        except Exception as error:
            wrong.append(error)
            raise

    rows = score_rows(score, images, prompts, batch=max(len(prompts), 1))
    if wrong:
        raise ValueError(f"weighted_sum: rewards[{name!r}]: {wrong[0]}") from wrong[0]
    return rows


def _logged(log: Log, name: str, reward: Reward, images: Tensor, prompts: Sequence[str]) -> Tensor:
    values = reward(images, prompts)
    log(name, values)
    return values


# ---- preferences ------------------------------------------------------------------------------------------------------


def _require_groups(name: str, prompts: Sequence[str], k: int) -> None:
    """ValueError unless the rows are whole groups of `k` samples of one prompt each, prompt-major."""
    if len(prompts) % k or any(len(set(prompts[i : i + k])) > 1 for i in range(0, len(prompts), k)):
        raise ValueError(
            f"{name}: rows must be whole groups of group_size={k} samples of one prompt, got {list(prompts)}"
        )


def preference(scorer: Reward, *, group_size: int, generator: torch.Generator | None = None) -> Reward:
    """Only who wins: the labels `pair_labels` draws from the scores inside each group, 1 winner, 0 loser, 1/2 on a tie.

    The one reward (beside `judged`) whose rows are not independent: a label says how a sample compares with another of
    its group. Missing and unpaired samples get nan.

    Args:
        scorer: the reward that is compared.
        group_size: k >= 2 samples per prompt, prompt-major as in `train`.
        generator: draws the pairs and moves on; None: the same pairs in every call.

    Raises:
        ValueError: group_size < 2. The reward: rows that are not whole groups of one prompt.

    >>> images = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1).expand(2, 1, 1, 3)
    >>> brighter = preference(lambda images, prompts: images.float().mean((1, 2, 3)), group_size=2)
    >>> brighter(images, ["a cat", "a cat"])
    tensor([0., 1.])
    """
    require_count("group_size", group_size, low=2)

    def reward(images: Tensor, prompts: Sequence[str]) -> Tensor:
        require_call("preference", images, prompts)
        _require_groups("preference", prompts, group_size)
        scores = one_number_each(scorer(images, prompts), len(prompts))
        return pair_labels(scores.reshape(-1, group_size), generator=generator).flatten().float()

    return reward


def judged(
    compare: Callable[[Tensor, Tensor, str], str],
    *,
    group_size: int,
    generator: torch.Generator | None = None,
    log: Log | None = None,
) -> Reward:
    """As `preference`, from a judge that sees two images: 1 winner, 0 loser, 1/2 each on a tie.

    Each group is split into random disjoint pairs. A pair is shown in both orders, because judges prefer a place; where
    the two answers disagree it is a tie.

    Args:
        compare: (first image " h w 3" or " f h w 3", second, prompt) -> "a" (the first is better), "b" or "tie".
        group_size: k >= 2 samples per prompt, prompt-major; the odd one out gets nan.
        generator: draws the pairs and moves on; None: the same pairs in every call.
        log: see `reward_rows.report`.

    Returns:
        A reward; both images of a pair get nan, and are counted, where the judge raises or answers anything else.

    Raises:
        ValueError: group_size < 2. The reward: rows that are not whole groups of one prompt.

    >>> first = judged(lambda a, b, prompt: "a", group_size=2)  # a judge that prefers the first place says nothing
    >>> first(torch.zeros(2, 1, 1, 3, dtype=torch.uint8), ["a cat", "a cat"])
    tensor([0.5000, 0.5000])
    """
    require_count("group_size", group_size, low=2)

    def asked(a: Tensor, b: Tensor, prompt: str) -> float:
        scores = {"a": 1.0, "tie": 0.5, "b": 0.0}
        there, back = compare(a, b, prompt), compare(b, a, prompt)
        if there not in scores or back not in scores:
            raise ValueError(f"compare must answer 'a', 'b' or 'tie', got {there!r} and {back!r}")
        return scores[there] if scores[there] == 1 - scores[back] else 0.5

    def reward(images: Tensor, prompts: Sequence[str]) -> Tensor:
        require_call("judged", images, prompts)
        _require_groups("judged", prompts, group_size)
        draw = generator or torch.Generator().manual_seed(0)
        values, failed, first = torch.full((len(prompts),), torch.nan), 0, None
        for start in range(0, len(prompts), group_size):
            order = (start + torch.randperm(group_size, generator=draw)).tolist()
            for a, b in zip(order[::2], order[1::2], strict=False):
                try:
                    values[a] = asked(images[a], images[b], prompts[a])
                    values[b] = 1 - values[a]
                except Exception as error:
                    failed, first = failed + 2, first or error
        return report("judged", Rows(values, failed, first), log)

    return reward


# ---- a memory ---------------------------------------------------------------------------------------------------------


def _digest(image: Tensor, prompt: str) -> bytes:
    """Of shape, pixels and the exact prompt; the shape says where the pixels end and the prompt begins."""
    key = hashlib.sha256(repr(tuple(image.shape)).encode())
    key.update(image.detach().cpu().contiguous().numpy().tobytes())
    key.update(prompt.encode("utf-8", "surrogatepass"))
    return key.digest()


def cached(reward: Reward, *, capacity: int) -> Reward:
    """Remembers the values of the last `capacity` different (image, prompt) rows; only the others are scored.

    A row is known by a digest of its pixels, shape and exact prompt. A row that occurs twice in a call is scored once.
    Values that are not finite are not kept: a row without a score is tried again. Only for rewards whose rows are
    independent (not `preference`). It may be called from several threads.

    Args:
        reward: what scores the rows that are not known; not called when there are none.
        capacity: rows, >= 1; the longest unused are forgotten first.

    Raises:
        ValueError: capacity < 1. The reward: a malformed call, or not one number per row from `reward`.

    >>> asked, image = [], torch.zeros(1, 1, 1, 3, dtype=torch.uint8)
    >>> reward = cached(lambda images, prompts: asked.extend(prompts) or [1.0] * len(prompts), capacity=8)
    >>> reward(image, ["a cat"]), reward(image, ["a cat"]), asked
    (tensor([1.]), tensor([1.]), ['a cat'])
    """
    require_count("capacity", capacity)
    known: OrderedDict[bytes, Tensor] = OrderedDict()
    lock = threading.Lock()

    def call(images: Tensor, prompts: Sequence[str]) -> Tensor:
        require_call("cached", images, prompts)
        keys = [_digest(image, prompt) for image, prompt in zip(images, prompts, strict=True)]
        with lock:
            values = {key: known[key] for key in keys if key in known}
        new = {key: row for row, key in reversed(list(enumerate(keys))) if key not in values}  # the first of equal rows
        rows = sorted(new.values())
        if rows:
            found = one_number_each(reward(images[rows], [prompts[row] for row in rows]), len(rows))
            values |= {keys[row]: value for row, value in zip(rows, found, strict=True)}
        with lock:
            for key in keys:
                if math.isfinite(values[key]):
                    known[key] = values[key]
                    known.move_to_end(key)
            while len(known) > capacity:
                known.popitem(last=False)
        return torch.stack(promote(*(values[key] for key in keys))) if keys else torch.zeros(0)

    return call


# ---- threads ----------------------------------------------------------------------------------------------------------


def in_threads(
    reward: Reward,
    *,
    workers: int,
    timeout: float,
    retries: int = 2,
    pause: float = 0.1,
    log: Log | None = None,
) -> Reward:
    """One row per task in `workers` threads, for rewards that wait (a judge behind an API); rows keep their order.

    A row that raises or takes longer than `timeout` is tried again `retries` times after growing pauses, then nan and
    counted. The call returns within about timeout (retries + 1), whatever hangs and however many rows there are: choose
    the timeout so that a worker gets through its share of a call. No thread blocks the interpreter's exit, but one that
    hangs holds what it holds until it ends.

    Args:
        reward: called from several threads at once, with one row each.
        workers: rows at a time, >= 1.
        timeout: seconds per try of a row, > 0.
        retries: further tries, >= 0.
        pause: seconds before the second try, doubled before each further one, >= 0.
        log: see `reward_rows.report`.

    Raises:
        ValueError: an option outside its range. The reward: a malformed call.

    >>> reward = in_threads(lambda images, prompts: [len(prompts[0])], workers=2, timeout=60.0)
    >>> reward(torch.zeros(2, 1, 1, 3, dtype=torch.uint8), ["a cat", "a giraffe"])
    tensor([5., 9.])
    """
    require_count("workers", workers)
    require_number("timeout", timeout, low=0, open_low=True)
    require_count("retries", retries, low=0)
    require_number("pause", pause, low=0)

    def call(images: Tensor, prompts: Sequence[str]) -> Tensor:
        require_call("in_threads", images, prompts)

        def one(row: int) -> float:
            with torch.no_grad():  # of the calling thread alone, unless said again
                return float(one_number_each(reward(images[row : row + 1], [prompts[row]]), 1)[0])

        found = attempts(len(prompts), one, workers=workers, timeout=timeout, retries=retries, pause=pause)
        errors = [result for result in found if isinstance(result, Exception)]
        values = torch.tensor([math.nan if isinstance(result, Exception) else result for result in found])
        return report("in_threads", Rows(values, len(errors), next(iter(errors), None)), log)

    return call
