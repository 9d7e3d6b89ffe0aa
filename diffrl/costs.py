"""What a schedule costs: seconds of every stage on pools of GPUs, closed forms, and the bound no schedule can beat.

GPUs of a pool work in replicas; samples and pairs are whole, so every stage is a ceiling. `speed` scales a pool.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import no_type_check

from diffrl.numbers import listed, require_count, require_number
from diffrl.schedules import Schedule


def _numbers(owner: object, *names: str, low: float = 0.0, open_low: bool = False) -> None:
    """Each field as a float, finite and >= low; ValueError naming the field otherwise."""
    for name in names:
        object.__setattr__(owner, name, require_number(name, getattr(owner, name), low=low, open_low=open_low))


@no_type_check  # it refuses bad values itself
@dataclass(frozen=True)
class Pool:
    """GPUs that do one job: gpus // per_replica replicas, each `speed` times as fast as the reference GPU.

    ValueError: gpus not a positive multiple of per_replica, speed not > 0.
    """

    gpus: int
    per_replica: int = 1
    speed: float = 1.0

    def __post_init__(self) -> None:
        for name in ("gpus", "per_replica"):
            object.__setattr__(self, name, require_count(name, getattr(self, name)))
        if self.gpus % self.per_replica:
            raise ValueError(f"gpus must be a multiple of per_replica, got {self.gpus} and {self.per_replica}")
        _numbers(self, "speed", open_low=True)

    @property
    def replicas(self) -> int:
        """Copies of the model that work side by side."""
        return self.gpus // self.per_replica


@no_type_check  # it refuses bad values itself
@dataclass(frozen=True)
class TrainCost:
    """t(q) = a + b q: seconds of one forward-backward of q >= 1 pairs on one rank. a, b >= 0, a + b > 0, else ValueError.

    >>> TrainCost(57.0, 337.0)(2)
    731.0
    """

    a: float
    b: float

    def __post_init__(self) -> None:
        _numbers(self, "a", "b")
        if self.a + self.b <= 0:
            raise ValueError(f"a + b must be > 0, got a {self.a}, b {self.b}")

    def __call__(self, q: int) -> float:
        return self.a + self.b * require_count("q", q)


@no_type_check  # it refuses bad values itself
@dataclass(frozen=True)
class CostModel:
    """Seconds of every stage, the same whichever schedule is run.

    generate: one sample on one replica of speed 1, > 0. train: on one rank of speed 1. helper: GPUs per replica when the
    trainer pool generates, 0: it cannot. reward: seconds per fragment, plus reward_per_sample each; reward_workers:
    fragments scored at once, None: unlimited. optimizer, publish: per global step. switch, restore: trainer to generating
    and back. All >= 0. ValueError: out of range; helper > trainer.gpus.
    """

    generate: float
    train: TrainCost
    generator: Pool
    trainer: Pool
    helper: int = 0
    reward: float = 0.0
    reward_per_sample: float = 0.0
    reward_workers: int | None = None
    optimizer: float = 0.0
    publish: float = 0.0
    switch: float = 0.0
    restore: float = 0.0

    def __post_init__(self) -> None:
        _numbers(self, "generate", open_low=True)
        for name, kind in (("train", TrainCost), ("generator", Pool), ("trainer", Pool)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} must be a {kind.__name__}, got {getattr(self, name)!r}")
        object.__setattr__(self, "helper", require_count("helper", self.helper, low=0))
        if self.helper > self.trainer.gpus:
            raise ValueError(f"helper must be at most the trainer's {self.trainer.gpus} GPUs, got {self.helper}")
        if self.reward_workers is not None:
            object.__setattr__(self, "reward_workers", require_count("reward_workers", self.reward_workers))
        _numbers(self, "reward", "reward_per_sample", "optimizer", "publish", "switch", "restore")

    def generator_seconds(self, samples: int) -> float:
        """ceil(samples / generator.replicas) generate / generator.speed, samples >= 1."""
        waves = -(-require_count("samples", samples) // self.generator.replicas)
        return waves * self.generate / self.generator.speed

    def helper_seconds(self, samples: int) -> float:
        """ceil(samples / (trainer.gpus // helper)) generate / trainer.speed. ValueError: helper = 0."""
        if not self.helper:
            raise ValueError(f"the trainer cannot generate: helper must be >= 1, got {self.helper}")
        waves = -(-require_count("samples", samples) // (self.trainer.gpus // self.helper))
        return waves * self.generate / self.trainer.speed

    def reward_seconds(self, samples: int) -> float:
        """reward + reward_per_sample samples, samples >= 1."""
        return self.reward + self.reward_per_sample * require_count("samples", samples)

    def trainer_seconds(self, samples: int, *, timesteps: int, pack: int = 1, shard_pairs: bool = False) -> float:
        """(ceil(q / pack) a + q b) / trainer.speed for the q pairs of the fullest of `trainer.replicas` ranks.

        q = ceil(samples / ranks) timesteps, or ceil(samples timesteps / ranks) when shard_pairs. Counts >= 1.

        >>> cost = CostModel(1.0, TrainCost(1.0, 2.0), Pool(1), Pool(2))
        >>> cost.trainer_seconds(3, timesteps=3, pack=4), cost.trainer_seconds(3, timesteps=3, pack=4, shard_pairs=True)
        (14.0, 12.0)
        """
        samples, timesteps = require_count("samples", samples), require_count("timesteps", timesteps)
        if not isinstance(shard_pairs, bool):
            raise ValueError(f"shard_pairs must be True or False, got {shard_pairs!r}")
        pack, ranks = require_count("pack", pack), self.trainer.replicas
        q = -(-samples * timesteps // ranks) if shard_pairs else -(-samples // ranks) * timesteps
        return (-(-q // pack) * self.train.a + q * self.train.b) / self.trainer.speed

    def colocated(self) -> "CostModel":
        """Both pools on all the GPUs (less a remainder that fills no replica) at the slower speed: they go in lockstep."""
        gpus, speed = self.generator.gpus + self.trainer.gpus, min(self.generator.speed, self.trainer.speed)
        pools = [Pool(gpus - gpus % p.per_replica, p.per_replica, speed) for p in (self.generator, self.trainer)]
        return replace(self, generator=pools[0], trainer=pools[1])


def fit_train_cost(sizes: Iterable[float], seconds: Iterable[float]) -> TrainCost:
    """The a, b >= 0 that minimise sum (a + b q - t)^2 over measured packs of q pairs that took t seconds.

    The problem is convex in two variables: where the unconstrained optimum is infeasible, the best point of the two edges
    is the answer. ValueError: lengths differ, fewer than two distinct sizes, anything not finite and > 0.

    >>> cost = fit_train_cost([1, 2, 4], [391.0, 737.0, 1404.0])
    >>> round(cost.a, 1), round(cost.b, 1)
    (57.5, 337.1)
    """
    counts, times = listed("sizes", sizes), listed("seconds", seconds)
    if len(counts) != len(times):
        raise ValueError(f"sizes and seconds must be as many, got {len(counts)} and {len(times)}")
    q = [require_number(f"sizes[{i}]", x, low=0, open_low=True) for i, x in enumerate(counts)]
    t = [require_number(f"seconds[{i}]", x, low=0, open_low=True) for i, x in enumerate(times)]
    if len(set(q)) < 2:
        raise ValueError(f"sizes must hold two distinct values at least, got {q}")
    q_unit, t_unit = (2.0 ** (math.frexp(max(x))[1] - 1) for x in (q, t))  # squares of what is left stay in range
    q, t = [x / q_unit for x in q], [y / t_unit for y in t]
    mean_q, mean_t = math.fsum(q) / len(q), math.fsum(t) / len(t)
    b = math.fsum((x - mean_q) * (y - mean_t) for x, y in zip(q, t, strict=True)) / math.fsum(
        (x - mean_q) ** 2 for x in q
    )
    a = mean_t - b * mean_q
    if a >= 0 and b >= 0:
        return TrainCost(a * t_unit, b / q_unit * t_unit)
    through_origin = math.fsum(x * y for x, y in zip(q, t, strict=True)) / math.fsum(x * x for x in q)
    edges = [(0.0, through_origin), (mean_t, 0.0)]
    a, b = min(edges, key=lambda line: math.fsum((line[0] + line[1] * x - y) ** 2 for x, y in zip(q, t, strict=True)))
    return TrainCost(a * t_unit, b / q_unit * t_unit)


def lower_bound(schedule: Schedule, cost: CostModel) -> float:
    """Seconds per global step that no schedule of this work on these GPUs can beat (derived here).

    (W_gen + W_train) / sum(gpus speed), W_gen = n generate per_replica of the generator (with TAG: the smaller of that and
    `helper`), W_train = n timesteps (a/pack + b) per_replica of the trainer: reference-GPU seconds of work over all the
    GPUs there are. With linear scaling and no overheads a colocated step equals it: separation cannot win for free.

    >>> from diffrl.schedules import Fragment
    >>> schedule = Schedule((Fragment(0, (0, 1, 2, 3)),), 2)  # 4 samples x (1 s to generate + 2 s to train) on 2 GPUs
    >>> lower_bound(schedule, CostModel(1.0, TrainCost(0.0, 2.0), Pool(1), Pool(1)))
    6.0
    """
    if not isinstance(schedule, Schedule) or not isinstance(cost, CostModel):
        raise ValueError(f"a Schedule and a CostModel are needed, got {schedule!r:.60} and {cost!r:.60}")
    width = cost.generator.per_replica
    if schedule.tag and cost.helper:
        width = min(width, cost.helper)
    per_pair = cost.train.a / schedule.pack + cost.train.b
    work = cost.generate * width + schedule.timesteps * per_pair * cost.trainer.per_replica
    return schedule.rows * work / sum(pool.gpus * pool.speed for pool in (cost.generator, cost.trainer))


def _stages(m: int, seconds: dict[str, float]) -> int:
    for name, value in seconds.items():
        require_number(name, value, low=0)
    return require_count("m", m)


def barrier_seconds(m: int, *, g: float, r: float, t: float, u: float = 0.0, w: float = 0.0) -> float:
    """M g + r + M t + u + w: one step of M equal whole-group fragments when training waits for the whole batch.

    g, r, t: seconds of generation, reward, training per fragment; u, w: optimizer and publication per step; >= 0.

    >>> barrier_seconds(8, g=10, r=1, t=4)
    113.0
    """
    m = _stages(m, {"g": g, "r": r, "t": t, "u": u, "w": w})
    return float(m * g + r + m * t + u + w)


def gap_seconds(m: int, *, g: float, r: float, t: float, u: float = 0.0, w: float = 0.0) -> float:
    """g + r + t + (M - 1) max(g, t) + u + w: the same when fragments stream to the trainer (derived here).

    The trainer idles in it for g + r + (M - 1) max(0, g - t).

    >>> gap_seconds(8, g=10, r=1, t=4)
    85.0
    """
    m = _stages(m, {"g": g, "r": r, "t": t, "u": u, "w": w})
    return float(g + r + t + (m - 1) * max(g, t) + u + w)


def tcss_seconds(m: int, k: int, *, g: float, r: float, t: float, u: float = 0.0, w: float = 0.0) -> float:
    """Steady-state seconds per step when the first k of M fragments may start one version early (derived here).

    The largest of M g (the generator never waits), M t + u + w (the trainer never waits),
    (j - k) g + r + (M - j + 1) t + u + w for k < j <= M, and half of j g + r + (M - j + 1) t + u + w for 1 <= j <= k (a
    cycle through two steps). 0 <= k <= M, else ValueError.

    >>> [tcss_seconds(8, k, g=10, r=2, t=6, u=1, w=3) for k in range(4)]
    [92.0, 82.0, 80.0, 80.0]
    """
    m = _stages(m, {"g": g, "r": r, "t": t, "u": u, "w": w})
    k = require_count("k", k, low=0)
    if k > m:
        raise ValueError(f"k must be at most m, got k {k}, m {m}")
    tail = {j: r + (m - j + 1) * t + u + w for j in range(1, m + 1)}
    cycles = [(j - k) * g + tail[j] if j > k else (j * g + tail[j]) / 2 for j in tail]
    return float(max(m * g, m * t + u + w, *cycles))
