"""Several processes that train one policy: each rolls out whole groups of its own, all learn from all of them.

    torchrun --nproc-per-node 2 script.py       with `ranks=launched()` handed to `loop.train`, and `leave_group()` at its end

Rank r of R rolls out and scores the r-th of R equal blocks of an iteration's prompts. The batch is then gathered on every
rank, so that credit (a batch's spread included) is what one process would give; of every optimizer step's window each rank
computes the r-th block of rows, and gradients are summed. All ranks hold the same params, bit for bit, and the same as one
process up to the order of a sum. What is gathered is the kept states: a rank's memory holds all of them.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffrl.types import Batch, Params, Trajectory

SHARED = ("t", "t_next")
PATIENCE = timedelta(days=1)
"""How long a rank waits for the others: the first one alone evaluates and draws, which may take its time."""


class Ranks(NamedTuple):
    """What a process knows of the others, as functions: `alone`, or `torch_ranks()`.

    share: (a sequence or tensor of rows) -> this rank's block of it. whole: (batch of this rank's prompts) -> the batch of all.
    add: (params) -> None, gradients become their sums over ranks (none counts as zero). gathered: (picklable) -> one from
    every rank, in order.
    """

    rank: int
    size: int
    share: Callable[[Any], Any]
    whole: Callable[[Batch], Batch]
    add: Callable[[Params], None]
    gathered: Callable[[Any], list[Any]]


def share_of(rows: Any, rank: int, size: int) -> Any:
    """The rank-th of `size` consecutive blocks of rows, the first ones a row longer where they cannot be equal.

    >>> [share_of([0, 1, 2, 3, 4], r, 2) for r in range(2)]
    [[0, 1, 2], [3, 4]]
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {size}")
    each, more = divmod(len(rows), size)
    start = rank * each + min(rank, more)
    return rows[start : start + each + (rank < more)]


alone = Ranks(0, 1, lambda rows: rows, lambda batch: batch, lambda params: None, lambda value: [value])
"""One process."""


def joined(batches: Sequence[Batch]) -> Batch:
    """One batch of the ranks' batches, in order. ValueError: other steps, or fields that only some of them have.

    metrics are averaged over the ranks that told them.

    >>> one = Batch(Trajectory(*[torch.zeros(1)] * 9), torch.tensor([[0.0, 1.0]]), {})
    >>> joined([one, one]).rewards.tolist()
    [[0.0, 1.0], [0.0, 1.0]]
    """
    first = batches[0]
    for other in batches[1:]:
        for name in SHARED:
            a, b = getattr(first.trajectory, name), getattr(other.trajectory, name)
            if a.shape != b.shape or not torch.equal(a, b.to(a)):
                raise ValueError(
                    f"ranks took other steps: {name} {a.tolist()} and {b.tolist()} (a window drawn per rank?)"
                )
        if (first.parts is None) != (other.parts is None) or first.cond.keys() != other.cond.keys():
            raise ValueError(
                f"ranks have other fields: cond {sorted(first.cond)} and {sorted(other.cond)}, or parts on some"
            )
    rows: dict[str, Any] = {}
    for name in Trajectory._fields:
        values = [getattr(batch.trajectory, name) for batch in batches]
        rows[name] = values[0] if name in SHARED or values[0] is None else torch.cat(values)
    told = [batch.metrics for batch in batches if batch.metrics]
    names = dict.fromkeys(name for one in told for name in one)
    metrics = {name: _mean([one[name] for one in told if name in one]) for name in names}
    return first._replace(
        trajectory=Trajectory(**rows),
        rewards=torch.cat([batch.rewards for batch in batches]),
        cond={name: torch.cat([batch.cond[name] for batch in batches]) for name in first.cond},
        parts=None if first.parts is None else torch.cat([b.parts for b in batches if b.parts is not None]),
        metrics=metrics or None,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def launched() -> Ranks:
    """`torch_ranks()` in a process that torchrun started, its group and (with CUDA) its own device set up; else `alone`.

    >>> launched().size  # of a process that nobody launched
    1
    """
    import os

    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return alone
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        enter_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
    return torch_ranks()


def enter_group(backend: str, **options: Any) -> None:
    """`torch.distributed.init_process_group(backend, **options)`, such that `leave_group` can end it.

    No example: needs several processes.
    """
    import torch.distributed as dist

    # torch.distributed.nn takes the group of the moment of its import as a default argument and holds it from then on; an
    # optimizer imports it. A group that is held keeps its threads past the interpreter's end (see leave_group).
    if dist.is_available():
        import torch.distributed.nn  # noqa: F401
    dist.init_process_group(backend, **options)


def leave_group() -> None:
    """Out of the group that `launched` or `enter_group` has set up, its threads joined; nothing where there is none.

    Call it last in a process that succeeded. Without it a thread of gloo that still frees a tensor while the interpreter
    ends aborts the process with "terminate called without an active exception" (github.com/pytorch/pytorch/issues/190489),
    after all is done, now and then. After an error leave it out: it waits for what the others were asked for.

    >>> leave_group() is None  # no group, nothing to do
    True
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def torch_ranks() -> Ranks:
    """The ranks of torch.distributed, which torchrun or `init_process_group` has set up. ValueError: nobody has.

    No example: needs several processes.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("torch.distributed is not initialised: call torch.distributed.init_process_group() first")
    rank, size = dist.get_rank(), dist.get_world_size()

    def gathered(value: Any) -> list[Any]:
        values: list[Any] = [None] * size
        dist.all_gather_object(values, value)
        return values

    def tensors(own: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(parts, own.contiguous())
        return parts

    def whole(batch: Batch) -> Batch:
        # shapes first: tensors of other sizes would hang or mix rows
        wide = any(
            gathered(batch.rewards.dtype == torch.float64)
        )  # one rank's reward may have failed where others' did not
        batch = batch._replace(rewards=batch.rewards.double()) if wide else batch
        told = {n: (tuple(v.shape), str(v.dtype)) for n, v in _flat(batch).items()}
        others = gathered((told, batch.metrics, batch.part_weights))
        if any(one[0] != told for one in others):
            differing = {
                n: [one[0].get(n) for one in others] for n in told if any(one[0].get(n) != told[n] for one in others)
            }
            raise ValueError(f"ranks have batches of other shapes: {differing or [sorted(one[0]) for one in others]}")
        parts = {name: tensors(value) for name, value in _flat(batch).items()}
        return joined(
            [_unflat(batch, {n: v[r] for n, v in parts.items()})._replace(metrics=others[r][1]) for r in range(size)]
        )

    def add(params: Params) -> None:
        for p in params.values():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)

    return Ranks(rank, size, lambda rows: share_of(rows, rank, size), whole, add, gathered)


def _flat(batch: Batch) -> dict[str, Tensor]:
    """Every tensor of a batch by a name of its own."""
    found = {f"trajectory.{n}": v for n, v in batch.trajectory._asdict().items() if v is not None}
    found |= {f"cond.{n}": v for n, v in batch.cond.items()} | {"rewards": batch.rewards}
    return found if batch.parts is None else found | {"parts": batch.parts}


def _unflat(like: Batch, values: dict[str, Tensor]) -> Batch:
    trajectory = like.trajectory._replace(
        **{n.partition(".")[2]: v for n, v in values.items() if n.startswith("trajectory.")}
    )
    cond = {name: values[f"cond.{name}"] for name in like.cond}
    return like._replace(trajectory=trajectory, cond=cond, rewards=values["rewards"], parts=values.get("parts"))


def require_same_start(ranks: Ranks, params: Params) -> None:
    """ValueError where ranks begin with other params: gradients of one policy would move another.

    >>> two = Ranks(0, 2, alone.share, alone.whole, alone.add, lambda told: [told, [("v", *told[0][1:])]])
    >>> require_same_start(two, {"w": torch.ones(1)})
    Traceback (most recent call last):
    ValueError: rank 1 starts from other params than rank 0: w differ (seed before from_pipeline)
    """
    told = [
        (name, tuple(p.shape), float(p.detach().double().sum()), float(p.detach().double().square().sum()))
        for name, p in params.items()
    ]
    for r, other in enumerate(ranks.gathered(told)):
        if other != told:
            name = next((a[0] for a, b in zip(told, other) if a != b), "their names")
            raise ValueError(
                f"rank {r} starts from other params than rank {ranks.rank}: {name} differ (seed before from_pipeline)"
            )
