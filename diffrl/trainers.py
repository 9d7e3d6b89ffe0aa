"""The trainer's side of a schedule: complete groups are told their credit, fragments accumulated, each exactly once."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from diffrl.partitions import even_runs, tsp_pack, tsp_shard
from diffrl.schedules import Pair, Schedule
from diffrl.types import Trajectory


def concatenated(parts: Sequence[Trajectory]) -> Trajectory:
    """The rows of several trajectories on one grid, one after the other. ValueError: kept steps that differ.

    >>> x, t = torch.zeros(2, 1, 1), torch.tensor([1.0])
    >>> part = Trajectory(x[:, 0], x, x, x, t, t / 2, x[..., 0], x[..., 0], None)
    >>> len(concatenated([part, part]).x_0)
    4
    """
    first = parts[0]
    for part in parts[1:]:
        if not torch.equal(part.t, first.t) or not torch.equal(part.t_next, first.t_next):
            raise ValueError(f"fragments kept other steps: t {first.t.tolist()} and {part.t.tolist()}")
    if len(parts) == 1:
        return first
    rows: dict[str, Any] = {}
    for name in ("x_0", "x_t", "x_next", "v", "std", "log_prob", "seeds"):
        values = [getattr(part, name) for part in parts]
        rows[name] = None if any(value is None for value in values) else torch.cat(values)
    return Trajectory(**rows, t=first.t, t_next=first.t_next)


def rows_of(trajectory: Trajectory, rows: Sequence[int]) -> Trajectory:
    """Some rows of a trajectory; all of them in order: the trajectory itself.

    >>> x, t = torch.arange(3.0).reshape(3, 1, 1), torch.tensor([1.0])
    >>> rows_of(Trajectory(x[:, 0], x, x, x, t, t / 2, x[..., 0], x[..., 0], None), [2, 0]).x_0.tolist()
    [[2.0], [0.0]]
    """
    if list(rows) == list(range(len(trajectory.x_0))):
        return trajectory
    picked: dict[str, Any] = {}
    for name in ("x_0", "x_t", "x_next", "v", "std", "log_prob", "seeds"):
        value = getattr(trajectory, name)
        picked[name] = None if value is None else value[torch.tensor(rows, device=value.device)]
    return trajectory._replace(**picked)


def _alike(parts: Mapping[int, tuple[Trajectory, Tensor]]) -> dict[int, tuple[Trajectory, Tensor]]:
    """Rewards beside their trajectories, and as wide as the widest: those of a fragment that could not be judged are nan
    whatever the number of parts the others' have."""
    width = max((values.shape[1] for _, values in parts.values() if values.ndim == 2), default=0)
    alike = {}
    for i, (trajectory, values) in parts.items():
        wide = values[:, None].expand(-1, width) if width and values.ndim == 1 else values
        alike[i] = (trajectory, wide.to(trajectory.x_0.device))
    return alike


class Trainer:
    """One trainer rank: credits complete groups once, accumulates its share of each fragment, commits, generates on loan.

    Nothing but `commit` steps the optimizer. The ledger refuses a fragment that is accumulated twice in one update, and a
    commit before every fragment of the update is in; `zero` empties both it and the gradient.
    """

    def __init__(self, stages: Any, schedule: Schedule, rank: int = 0, ranks: int = 1):
        self.stages, self.schedule, self.rank, self.ranks = stages, schedule, rank, ranks
        self.told: dict[tuple[int, int], Mapping[str, Tensor]] = {}  # (step, group) -> signal of its k rows
        self.ledger: set[tuple[int, int, int]] = set()
        self.held: Any = None

    def train(
        self, step: int, update: int, index: int, parts: Mapping[int, tuple[Trajectory, Tensor]]
    ) -> list[tuple[dict[str, float], int]]:
        """Add fragment `index`'s gradient. parts: (trajectory, rewards) of it and of all that share groups with it."""
        if (step, update, index) in self.ledger:
            raise ValueError(f"step {step}, update {update}: fragment {index} is accumulated already")
        parts = _alike(parts)
        self._credit(step, index, parts)
        rows, window = self.schedule.fragments[index].samples, self.stages.windows[update]
        chosen = sorted(set(window) & set(rows), key=rows.index)
        total = len(window) * self.schedule.timesteps
        self.ledger.add((step, update, index))
        packs = self._packs(len(chosen))
        if not packs:
            return []
        trajectory, rewards = parts[index]
        place = [rows.index(row) for row in chosen]
        k = self.schedule.group_size
        told = [self.told[step, row // k] for row in chosen]
        signal = {
            name: torch.stack([each[name][row % k] for each, row in zip(told, chosen, strict=True)]) for name in told[0]
        }
        here = torch.tensor(place, device=rewards.device)
        return self.stages.accumulate(
            step, update, chosen, rows_of(trajectory, place), rewards[here], signal, packs, total
        )

    def _packs(self, rows: int) -> tuple[tuple[Pair, ...], ...]:
        """This rank's pairs (local row, timestep) in packs: of its share of the rows, or of the pairs."""
        timesteps = self.schedule.timesteps
        if self.schedule.shard_pairs:
            pairs = [(row, t) for row in range(rows) for t in range(timesteps)]
            mine: Sequence[Pair] = tsp_shard(pairs, ranks=self.ranks)[self.rank] if pairs else []
        else:
            mine = [(row, t) for row in even_runs(rows, self.ranks)[self.rank] for t in range(timesteps)]
        return tsp_pack(mine, size=self.schedule.pack) if mine else ()

    def _credit(self, step: int, index: int, parts: Mapping[int, tuple[Trajectory, Tensor]]) -> None:
        """Tell every complete group once; the whole batch together where the schedule waits for it."""
        k, fragments = self.schedule.group_size, self.schedule.fragments
        every = range(self.schedule.rows // k)
        touched = every if self.schedule.barrier else sorted({row // k for row in fragments[index].samples})
        new = [group for group in touched if (step, group) not in self.told]
        if not new:
            return
        self.told = {key: value for key, value in self.told.items() if key[0] >= step}
        held = [row for i in parts for row in fragments[i].samples]
        together = concatenated([trajectory for trajectory, _ in parts.values()])
        rewards = torch.cat([values for _, values in parts.values()])
        for groups in [new] if self.schedule.barrier else [[group] for group in new]:
            place = [held.index(group * k + j) for group in groups for j in range(k)]
            own = rewards[torch.tensor(place, device=rewards.device)].reshape(len(groups), k, *rewards.shape[1:])
            signal = self.stages.credit(step, groups, rows_of(together, place), own)
            for i, group in enumerate(groups):
                self.told[step, group] = {name: value[i * k : (i + 1) * k] for name, value in signal.items()}

    def commit(self, step: int, update: int) -> dict[str, float]:
        """The optimizer step, once every fragment is in."""
        here = {index for s, u, index in self.ledger if (s, u) == (step, update)}
        missing = sorted(set(range(len(self.schedule.fragments))) - here)
        if missing:
            raise ValueError(
                f"step {step}, update {update}: fragments {missing} are not accumulated, nothing is committed"
            )
        metrics = self.stages.commit(step, update)
        self.ledger.clear()
        return metrics

    def zero(self) -> None:
        """Forget the gradient accumulated since the last commit."""
        self.ledger.clear()
        self.stages.zero()

    def switch(self) -> None:
        """The gradient out of the way, before helping."""
        self.held = self.stages.suspend()

    def restore(self) -> None:
        """And back, bit for bit."""
        held, self.held = self.held, None
        self.stages.resume(held)
