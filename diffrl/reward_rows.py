"""One number per row whatever fails: rows that raise or hang become nan and are counted, and cost their neighbours
nothing."""

import heapq
import queue
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

Log: TypeAlias = Callable[[str, Any], None]
"""(name, value): `("failed", n)` once for each call of a reward in which n > 0 rows got no score because of an error."""


class Final(Exception):
    """A failure that another try cannot mend."""


class Busy(RuntimeError):
    """Not now: worth another try after so many seconds, as often as there is time for."""

    def __init__(self, reason: str, after: float = 0.0):
        super().__init__(reason)
        self.after = after


class Rows(NamedTuple):
    """values: float32 " b", nan where a row failed; failed: how many did; error: the first reason, None where none did."""

    values: Tensor
    failed: int
    error: Exception | None


def report(name: str, rows: Rows, log: Log | None) -> Tensor:
    """The values of `rows`; failures go to `log("failed", n)`, or without one into a RuntimeWarning with the first reason.

    >>> report("mine", Rows(torch.tensor([0.5, torch.nan]), 1, ValueError("no face")), print)
    failed 1
    tensor([0.5000,    nan])
    """
    if rows.failed and log is not None:
        log("failed", rows.failed)
    elif rows.failed:
        reason = f"{type(rows.error).__name__}: {rows.error}"
        warnings.warn(
            f"{name}: {rows.failed} of {len(rows.values)} rows have no score ({reason:.300})",
            RuntimeWarning,
            stacklevel=3,
        )
    return rows.values


def one_number_each(values: Any, b: int) -> Tensor:
    """values as a detached float " b" on the CPU (float64 stays, all else becomes float32). ValueError: anything else.

    >>> one_number_each([1, 0], 2)
    tensor([1., 0.])
    """
    found = torch.as_tensor(values).detach().cpu()
    if tuple(found.shape) != (b,):
        raise ValueError(f"one number per row is needed, shape ({b},), got shape {tuple(found.shape)}")
    return found if found.dtype == torch.float64 else found.float()


def score_rows(
    score: Callable[[Tensor, Sequence[str]], Any], images: Tensor, prompts: Sequence[str], *, batch: int
) -> Rows:
    """score(images " c ...", prompts) -> c numbers, asked for `batch` rows at a time; where it raises, once for each row.

    A row for which it raises alone gets nan. The values are float32.

    >>> score = lambda images, texts: [1 / len(text) for text in texts]
    >>> rows = score_rows(score, torch.zeros(2, 1), ["ab", ""], batch=2)
    >>> rows.values, rows.failed
    (tensor([0.5000,    nan]), 1)
    """
    values = torch.full((len(images),), torch.nan)
    failed, first = 0, None
    for i in range(0, len(images), batch):
        part, texts = images[i : i + batch], list(prompts[i : i + batch])
        try:
            values[i : i + batch] = one_number_each(score(part, texts), len(part)).float()
            continue
        except Exception as error:
            first = first or error
        for row in range(len(part)):  # one bad row must not cost its neighbours their scores
            try:
                values[i + row] = one_number_each(score(part[row : row + 1], texts[row : row + 1]), 1).float()[0]
            except Exception:
                failed += 1
    return Rows(values, failed, first if failed else None)


def attempts(
    tasks: int, run: Callable[[int], Any], *, workers: int, timeout: float, retries: int, pause: float
) -> list[Any]:
    """run(0) ... run(tasks - 1), `workers` at a time -> results in order; an exception stands for a task that failed.

    A task that raises, or has no result after `timeout` seconds, is tried again `retries` times, after pauses of `pause`,
    2 `pause`, 4 `pause` ... seconds; one that raises `Final` is not, and `Busy`, after at least as long as it says, is no
    try: it is repeated as long as the call lasts. The whole call ends after timeout (retries + 1)
    seconds: tasks without a result by then have failed. A thread whose time is up is left to itself: it is a daemon,
    which does not keep the interpreter alive, and what it still returns is dropped.

    >>> attempts(3, lambda task: task * task, workers=2, timeout=60.0, retries=0, pause=0.0)
    [0, 1, 4]
    """
    results: list[Any] = [TimeoutError(f"no result within {timeout * (retries + 1):g} s")] * tasks
    done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    began = time.monotonic()
    deadline = began + timeout * (retries + 1)
    waiting = [(began, task, 0) for task in range(tasks)]  # a heap: (not before, task, tries so far)
    running: dict[int, tuple[int, int, float]] = {}  # ticket -> (task, tries so far, when its time is up)
    ticket = 0

    def start(own: int, task: int) -> None:
        try:
            done.put((own, run(task)))
        except BaseException as error:  # in a thread: it must reach the caller as a result
            done.put((own, error if isinstance(error, Exception) else RuntimeError(repr(error))))

    def settle(own: int, result: Any) -> None:
        task, tries, _ = running.pop(own)
        results[task] = result
        if isinstance(result, Busy):  # never at once, or it would be asked all the time
            heapq.heappush(waiting, (time.monotonic() + max(result.after, pause, 0.05), task, tries))
        elif isinstance(result, Exception) and not isinstance(result, Final) and tries < retries:
            heapq.heappush(waiting, (time.monotonic() + pause * 2**tries, task, tries + 1))

    while (running or (waiting and waiting[0][0] < deadline)) and (now := time.monotonic()) < deadline:
        while waiting and waiting[0][0] <= now and len(running) < workers:
            _, task, tries = heapq.heappop(waiting)
            running[ticket] = (task, tries, now + timeout)
            threading.Thread(target=start, args=(ticket, task), daemon=True).start()
            ticket += 1
        ends = [deadline, *(end for _, _, end in running.values())]
        ends += [waiting[0][0]] if waiting and len(running) < workers else []
        try:
            own, result = done.get(timeout=max(min(ends) - now, 0.0))
            if own in running:
                settle(own, result)
        except queue.Empty:
            pass
        for own in [own for own, (_, _, end) in running.items() if end <= time.monotonic()]:
            settle(own, TimeoutError(f"no result within {timeout:g} s"))
    return results
