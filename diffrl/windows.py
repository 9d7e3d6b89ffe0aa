"""Around an algorithm: which prompts and rows an optimizer step sees, and how images become rewards."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffrl.checks import NoReward, require_cond
from diffrl.guidance import dead_groups
from diffrl.partitions import even_runs
from diffrl.ranks import Ranks, alone
from diffrl.states import trained_pairs
from diffrl.types import Batch, Cond, Objective, Params, Reward, Trajectory, Window


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


def window_of(batch: Batch, credit: Mapping[str, Tensor], rows: Tensor, reference: Params | None = None) -> Window:
    """The given rows of a batch and its credit, cond expanded to one row per sample; reference: params, passed on.

    >>> walk = Trajectory(torch.arange(4.0)[:, None], *[None] * 8)
    >>> batch = Batch(walk, torch.tensor([[0.0, 1.0], [2.0, 3.0]]), {"prompt": torch.tensor([7, 8])})
    >>> window = window_of(batch, {}, torch.tensor([1, 2]))
    >>> window.rewards.tolist(), window.cond["prompt"].tolist()
    ([1.0, 2.0], [7, 8])
    """
    k = batch.rewards.shape[1]
    tr = batch.trajectory
    rows = rows.to(tr.x_0.device)
    return Window(
        trajectory=_trajectory_rows(tr, rows),
        rewards=batch.rewards.flatten()[rows.to(batch.rewards.device)],
        cond={name: value[(rows // k).to(value.device)] for name, value in batch.cond.items()},
        credit={name: value[rows.to(value.device)] for name, value in credit.items()},
        reference=reference,
    )


def select_rows(window: Window, rows: Tensor) -> Window:
    """Some rows of a window (a micro-batch).

    >>> window = Window(Trajectory(torch.arange(3.0)[:, None], *[None] * 8), torch.arange(3.0), {}, {})
    >>> select_rows(window, torch.tensor([2, 0])).rewards
    tensor([2., 0.])
    """
    return Window(
        trajectory=_trajectory_rows(window.trajectory, rows.to(window.trajectory.x_0.device)),
        rewards=window.rewards[rows.to(window.rewards.device)],
        cond={name: value[rows.to(value.device)] for name, value in window.cond.items()},
        credit={name: value[rows.to(value.device)] for name, value in window.credit.items()},
        reference=window.reference,
    )


def parts_of(
    objective: Objective,
    window: Window,
    *,
    micro_batch: int | None = None,
    pack: int | None = None,
    ranks: Ranks = alone,
) -> Iterator[tuple[Window, int, int]]:
    """(part, its share, of how much): what each forward-backward of one optimizer step sees; the shares add up,
    over the ranks where several share the rows (each cuts its own block of them; a rank without rows has no parts).

    micro_batch: samples per part, each with all its trained steps. pack: states, i.e. (sample, step) pairs, per part:
    ceil(states/pack) parts whose sizes differ by at most one (time-step packing; the sum over parts of share-weighted means
    is the mean over the window). Neither: the whole window. ValueError: both; pack for an objective that does not say
    which states it trains (`objective.steps_per_sample`, as those of this library do); an empty window.

    >>> window = Window(Trajectory(torch.arange(3.0)[:, None], *[None] * 8), torch.arange(3.0), {}, {})
    >>> [(part.rewards.tolist(), share, whole) for part, share, whole in parts_of(None, window, micro_batch=2)]
    [([0.0, 1.0], 2, 3), ([2.0], 1, 3)]
    """
    n = len(window.rewards)
    if n == 0:
        raise ValueError("an update's window is empty: split must give every update some rows")
    mine = ranks.share(torch.arange(n))
    if not len(mine):
        return
    if pack is None:
        for rows in mine.split(micro_batch or n):
            yield window if len(rows) == n else select_rows(window, rows), len(rows), n
        return
    if micro_batch is not None:
        raise ValueError(f"micro_batch={micro_batch} counts samples and pack={pack} states: give one of them")
    if not hasattr(objective, "steps_per_sample"):
        raise ValueError(
            f"pack={pack} needs to know which states {objective!r:.80} trains: set its attribute steps_per_sample (None: all kept steps)"
        )
    own = window if len(mine) == n else select_rows(window, mine)
    pairs = trained_pairs(own, steps_per_sample=objective.steps_per_sample)
    runs, whole = even_runs(len(pairs), -(-len(pairs) // pack)), len(pairs) // len(mine) * n
    for run in runs:
        yield own if len(runs) == 1 else own._replace(pairs=pairs[run.start : run.stop]), len(run), whole


def _trajectory_rows(tr: Trajectory, rows: Tensor) -> Trajectory:
    shared = {"t": tr.t, "t_next": tr.t_next}
    picked: dict[str, Any] = {
        name: None if value is None else value[rows] for name, value in tr._asdict().items() if name not in shared
    }
    return Trajectory(**picked, **shared)


def encode(model: Any, prompts: Sequence[str], images: Sequence[Any] | Tensor | None = None) -> Cond:
    """model.encode, moved to the device of the trained tensors. ValueError: not one row per prompt.

    >>> from diffrl.tasks.toy import toy_model
    >>> encode(toy_model(), ["north", "west"])
    {'prompt': tensor([0, 3])}
    """
    device = next(iter(model.params.values())).device
    cond = model.encode(prompts) if images is None else model.encode(prompts, images)
    require_cond(cond, len(prompts))
    return {name: value.to(device) for name, value in cond.items()}


class Score:
    """score(latents, prompt rows) -> rewards " b": decode, then the reward; counts the seconds spent in the reward.

    parts: after a call, the single rewards " b j" where the reward has several (`rewards.WeightedSum`), else None;
    part_weights: their weights in the sum, where it tells them. forgiving: a reward that raises for all images gives nan, as
    other ranks may have images it can judge (`judge_all` then asks them).
    """

    def __init__(
        self, decode: Callable[[Tensor], Tensor], reward: Reward, prompts: Sequence[str], *, forgiving: bool = False
    ):
        self.decode, self.reward, self.prompts, self.seconds = decode, reward, prompts, 0.0
        self.forgiving, self.failure = forgiving, ""
        self.parts: Tensor | None = None
        self.part_weights: tuple[float, ...] | None = getattr(reward, "weights", None)

    def __call__(self, latents: Tensor, rows: Tensor) -> Tensor:
        images = self.decode(latents.clone())  # where decode returns what it is given, a reward may write into it
        if not hasattr(images, "__len__") or len(images) != len(latents):
            got = len(images) if hasattr(images, "__len__") else repr(images)
            raise ValueError(f"decode must return one image per sample, {len(latents)}, got {got}")
        began = time.perf_counter()
        texts = [self.prompts[int(r)] for r in rows]
        single, total = getattr(self.reward, "rewards", None), getattr(self.reward, "total", None)
        if isinstance(single, Mapping) and callable(total):  # each is asked once, and may fail for images of its own
            own = images.clone if isinstance(images, Tensor) else lambda: images  # one may write into what it is given
            each = [self._told(reward, own(), texts) for reward in single.values()]
            self.parts = torch.stack(torch.broadcast_tensors(*each), dim=1).to(latents.device)
            values = total(self.parts)
        else:
            values = self._told(self.reward, images, texts)
        self.seconds += time.perf_counter() - began
        return values.to(latents.device)

    def _told(self, reward: Reward, images: Tensor, texts: Sequence[str]) -> Tensor:
        try:
            return score_images(reward, images, texts)
        except NoReward as error:
            if not self.forgiving:
                raise
            self.failure = str(error)
            return torch.full((len(texts),), torch.nan)

    def judge_all(self, rewards: Tensor, ranks: Any) -> None:
        """ValueError, on every rank, where the reward failed on some and gave none of them a value (`forgiving` put nan)."""
        if ranks.size > 1 and (told := [text for text in ranks.gathered(self.failure) if text]):
            self.failure = ""
            if not bool(torch.isfinite(rewards).any()):
                raise NoReward(told[0])


def score_images(reward: Reward, images: Tensor, prompts: Sequence[str]) -> Tensor:
    """The reward of every image as float " b"; an image for which it raises gets nan.

    A reward that raises on the batch is asked once per image. ValueError: it raises for every image, or returns
    anything but one number per image.

    >>> score_images(lambda images, prompts: [1 / len(prompt) for prompt in prompts], torch.zeros(2, 1), ["ab", ""])
    tensor([0.5000,    nan])
    """
    try:
        return _one_number_each(reward(images, list(prompts)), len(prompts))
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
        raise NoReward(f"reward raised for all {failed} images: {type(first).__name__}: {first}") from first
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
    """reward/mean, reward/std (finite rewards only, about the batch mean), reward/missing, groups/dead.

    >>> {name: round(value, 4) for name, value in reward_metrics(torch.tensor([[1.0, 1.0], [0.0, 2.0]])).items()}
    {'reward/mean': 1.0, 'reward/std': 0.7071, 'reward/missing': 0.0, 'groups/dead': 0.5}
    """
    values = rewards.double()
    finite = values[torch.isfinite(values)]
    return {
        "reward/mean": float(finite.mean()),
        "reward/std": float(finite.std(correction=0)) if len(finite) else float("nan"),
        "reward/missing": 1 - len(finite) / max(values.numel(), 1),
        "groups/dead": float(dead_groups(rewards).double().mean()),
    }


def params_distance(a: Params, b: Params) -> float:
    """sqrt(mean over all numbers of (a - b)^2): 0 when the behaviour policy is the live one.

    >>> round(params_distance({"w": torch.tensor([3.0, 4.0])}, {"w": torch.zeros(2)}), 4)  # sqrt(25/2)
    3.5355
    """
    if a is b:
        return 0.0
    pairs = [(a[name].detach().to(p.device).double(), p.detach().double()) for name, p in b.items()]
    total = sum(float((x - y).square().sum()) for x, y in pairs)
    return (total / max(sum(p.numel() for p in b.values()), 1)) ** 0.5
