"""What a schedule executes: the stages of one global step as functions of rows, for plain callables and for an `Algorithm`.

A stage object answers for step s of a run: generate(s, params, rows), score(s, rows, trajectory), credit(s, groups, ...),
accumulate(s, update, ...), commit(s, update), snapshot(), suspend(), resume(held), zero(). `executors.run` calls them
wherever its backend has put them. `windows` are the rows of each optimizer step of a batch: one window, all rows, for
plain workers; the algorithm's disjoint windows for an `Algorithm`.
"""

import contextlib
import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffrl.checks import require_cond, require_count, require_number, require_same_keys, shapes
from diffrl.losses import masked_mean
from diffrl.sampling import _hash63, sample_seeds
from diffrl.schedules import Pair, Schedule
from diffrl.states import trained_pairs
from diffrl.training_checks import (
    check_algorithm,
    check_credit,
    check_optimizer,
    check_reward,
    check_rows,
    checked_groups,
    checked_prompts,
    checked_reference,
    numbers_by_name,
)
from diffrl.types import Algorithm, Batch, Cond, Gridded, Params, Reward, Trajectory, Window
from diffrl.windows import Score, encode, prompts_of_iteration, split_within_prompt, window_of

Signal = Mapping[str, Tensor] | Tensor
"""What credit tells each sample: rows " g k ..." of a tensor or of several by name."""
Told = list[tuple[dict[str, float], int]]
"""Metrics of each forward-backward, and how many pairs it saw."""


class Workers(NamedTuple):
    """Plain, picklable callables that a schedule runs; rows are the samples of one fragment.

    generate: (params, seeds " n", cond) -> Trajectory, one params snapshot for the whole call; sample i depends on
    (seeds[i], params) alone. score: (trajectory, cond) -> " n", nan: no reward. credit: (rewards " g k", x_0 " g k *d") ->
    Signal " g k ...", whole groups only. accumulate: (trajectory, signal " n ...", pairs, N) -> metrics adds the gradient of
    (sum over the pairs of loss)/N; a pair is (row of this trajectory, timestep), N the pairs of the whole batch. commit: one
    optimizer step, then zero the accumulators. snapshot: detached copies of the params. suspend, resume: the accumulated
    gradient out of the way before helping, and back bit for bit.
    """

    generate: Callable[[Params, Tensor, Cond], Trajectory]
    score: Callable[[Trajectory, Cond], Tensor]
    credit: Callable[[Tensor, Tensor], Signal]
    accumulate: Callable[[Trajectory, Signal, Sequence[Pair], int], Mapping[str, float]]
    commit: Callable[[], Mapping[str, float]]
    snapshot: Callable[[], Params]
    suspend: Callable[[], object]
    resume: Callable[[Any], None]


def folded_seeds(seeds: Tensor, step: int) -> Tensor:
    """Seeds of global step `step`: a function of (seeds[i], step) alone, whatever the order fragments arrive in.

    >>> folded_seeds(torch.tensor([1, 2]), 3).equal(folded_seeds(torch.tensor([2, 1]), 3).flip(0))
    True
    """
    return torch.tensor([_hash63(int(seed), step) for seed in seeds], dtype=torch.int64, device=seeds.device)


class PlainStages:
    """`Workers` as stages: cond and seeds are cut by rows, seeds folded with the step.

    ValueError: not n rows of each, seeds that are no integers >= 0; when they run, workers that answer with other rows than
    those they were given."""

    def __init__(self, workers: Workers, cond: Cond, seeds: Tensor, schedule: Schedule):
        if not isinstance(workers, Workers):
            raise ValueError(f"workers must be Workers or AlgorithmStages, got {workers!r:.80}")
        if nothing := [name for name, worker in workers._asdict().items() if not callable(worker)]:
            raise ValueError(f"workers.{nothing[0]} must be a function, got {getattr(workers, nothing[0])!r:.80}")
        if not isinstance(seeds, Tensor) or seeds.shape != (schedule.rows,):
            got = shapes(seeds=seeds) if isinstance(seeds, Tensor) else f"{type(seeds).__name__} {seeds!r:.80}"
            raise ValueError(f"seeds must be a tensor, one per row, ({schedule.rows},), got {got}")
        counts = not (seeds.is_floating_point() or seeds.is_complex() or seeds.dtype == torch.bool)
        if not counts or bool((seeds < 0).any()):  # a fraction would be cut off, and samples be the same
            raise ValueError(f"seeds must be integers >= 0, got {seeds.dtype} {seeds.tolist()!r:.80}")
        require_cond(cond, schedule.rows)
        self.workers, self.cond, self.seeds, self.timesteps = workers, cond, seeds, schedule.timesteps
        self.windows: list[list[int]] = [list(range(schedule.rows))]

    def _cond(self, rows: Sequence[int]) -> Cond:
        return {name: value[list(rows)] for name, value in self.cond.items()}

    def generate(self, step: int, params: Params, rows: Sequence[int]) -> Trajectory:
        """`workers.generate` of these rows, with the step's seeds."""
        made = self.workers.generate(params, folded_seeds(self.seeds[list(rows)], step), self._cond(rows))
        if not isinstance(made, Trajectory):
            raise ValueError(f"generate must return a Trajectory, got {type(made).__name__} {made!r:.80}")
        for name in ("x_0", "x_t", "x_next", "v", "std", "log_prob", "seeds"):
            check_rows(f"generate's {name}", getattr(made, name), (len(rows),), absent=name != "x_0")
        return made

    def score(self, step: int, rows: Sequence[int], trajectory: Trajectory) -> Tensor:
        """`workers.score`, one number each."""
        rewards = self.workers.score(trajectory, self._cond(rows))
        check_rows("score", rewards, (len(rows),))
        if rewards.ndim != 1 or not rewards.is_floating_point():
            raise ValueError(
                f"score must return floating-point numbers ({len(rows)},), got {rewards.dtype} {tuple(rewards.shape)}"
            )
        return rewards.detach()

    def credit(self, step: int, groups: Sequence[int], trajectory: Trajectory, rewards: Tensor) -> dict[str, Tensor]:
        """`workers.credit` of whole groups, one row per sample: as it is named, or "" for one without names."""
        g, k = rewards.shape
        signal = self.workers.credit(rewards, trajectory.x_0.reshape(g, k, *trajectory.x_0.shape[1:]))
        named = signal if isinstance(signal, Mapping) else {"": signal}
        for name, value in named.items():
            check_rows(f"credit{f'[{name!r}]' if name else ''}", value, (g, k))
        return {name: value.reshape(g * k, *value.shape[2:]) for name, value in named.items()}

    def accumulate(self, step, update, rows, trajectory, rewards, signal, packs, total) -> Told:
        """`workers.accumulate` of each pack: (metrics, pairs)."""
        told = signal[""] if signal.keys() == {""} else signal
        return [
            (numbers_by_name("accumulate", self.workers.accumulate(trajectory, told, pack, total)), len(pack))
            for pack in packs
        ]

    def commit(self, step: int, update: int) -> dict[str, float]:
        return numbers_by_name("commit", self.workers.commit())

    def snapshot(self) -> Params:
        """`workers.snapshot`, by name."""
        params = self.workers.snapshot()
        if not isinstance(params, Mapping):
            raise ValueError(f"snapshot must return params by name, got {type(params).__name__} {params!r:.80}")
        return params

    def suspend(self) -> object:
        return self.workers.suspend()

    def resume(self, held: Any) -> None:
        self.workers.resume(held)

    def zero(self) -> None:
        self.workers.suspend()


class AlgorithmStages:
    """An `Algorithm` on a `Model` as stages: the pieces of `loop.train`, cut so that fragments can go their own ways.

    Arguments as `loop.train`. Version v is what rolls out in iteration v (the behaviour params, copied); each batch has the
    algorithm's `updates` optimizer steps, the later ones on their windows once the first is committed. A model with a module
    is one resource: rollout and training then take turns (`lock`); rewards overlap with both.

    ValueError, beside those of `loop.train`: an algorithm with a pool (its collect scores by itself) or a memory (what is
    trained again after a failure would be remembered twice); an objective that does not say which states it trains
    (`objective.steps_per_sample`).
    """

    def __init__(
        self,
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
        grad_clip: float | None = 1.0,
        start: int = 0,
        behaviour: Params | None = None,
        reference: Params | None = None,
    ):
        self.prompts = checked_prompts(prompts, None)
        self.k, self.steps = require_count("group_size", group_size, low=2), require_count("steps", steps)
        self.seed, self.start = require_count("seed", seed, low=0), require_count("start", start, low=0)
        self.g = checked_groups(prompts_per_iteration, len(self.prompts), 1)
        if grad_clip is not None:
            grad_clip = require_number("grad_clip", grad_clip, low=0, open_low=True, infinite=True)
        check_algorithm(algorithm, self.k)
        check_optimizer(optimizer, model.params)
        if algorithm.pool is not None:
            raise ValueError(
                f"an algorithm with a pool ({algorithm.pool}) scores while it collects: no schedule can cut it"
            )
        if algorithm.memory is not None:
            raise ValueError(f"an algorithm with a memory ({algorithm.memory!r:.60}) is not supported by a schedule")
        check_reward(reward)
        if not hasattr(algorithm.objective, "steps_per_sample"):
            raise ValueError("the objective must say which states it trains: set its attribute steps_per_sample")
        self.reference = checked_reference(algorithm, reference, model.params, self.start)
        if behaviour is not None:
            require_same_keys(params=model.params, behaviour=behaviour)
        self.model, self.algorithm, self.reward, self.optimizer, self.grad_clip = (
            *(model, algorithm, reward, optimizer),
            grad_clip,
        )
        self.behaviour = _copies(model.params if behaviour is None else behaviour)
        self.windows = [rows.tolist() for rows in split_within_prompt(self.g, self.k, algorithm.updates)]
        self._fresh()
        self.zero()

    def _fresh(self) -> None:
        self.lock: Any = threading.RLock()
        self.known: dict[int, tuple[list[str], Cond, Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("lock", "known")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._fresh()

    def _alone(self) -> contextlib.AbstractContextManager:
        """Other params are swapped into a module for the time of a call: nobody else may look at it meanwhile."""
        return contextlib.nullcontext() if getattr(self.model, "module", None) is None else self.lock

    def _batch(self, step: int) -> tuple[list[str], Cond, Tensor]:
        """(texts, cond " g", seeds " g k") of a global step: those of the loop's iteration."""
        found = self.known.get(step)
        if found is not None:  # without the lock: a reward does not wait for the end of a rollout or of training
            return found
        with self.lock:
            if step not in self.known:  # another thread was quicker
                chosen = prompts_of_iteration(self.seed, step, len(self.prompts), self.g)
                texts = [self.prompts[p] for p in chosen]
                device = next(iter(self.model.params.values())).device
                seeds = sample_seeds(self.seed, step, chosen, self.k).to(device)
                self.known = {s: v for s, v in self.known.items() if s >= step - 1}
                self.known[step] = (texts, encode(self.model, texts), seeds)
            return self.known[step]

    def check(self, schedule: Schedule) -> None:
        """ValueError where this algorithm cannot be run by this schedule: rows or group_size that are not its batch's, a
        collect, credit or objective that looks at more than what the schedule's fragments hold together (asked of the toy)."""
        if (schedule.rows, schedule.group_size) != (self.g * self.k, self.k):
            raise ValueError(
                f"the schedule has {schedule.rows} rows in groups of {schedule.group_size}, the batch {self.g * self.k} in groups of {self.k}"
            )
        if len(schedule.fragments) > 1:
            whole = all(_groups_of(f.samples, self.k) is not None for f in schedule.fragments)
            require_separable_collect(self.algorithm, steps=self.steps, group_size=self.k, whole_groups=whole)
            require_separable_objective(self.algorithm, steps=self.steps, group_size=self.k)
        if not schedule.barrier and self.g > 1:
            require_separable_credit(self.algorithm, steps=self.steps, group_size=self.k)

    def generate(self, step: int, params: Params, rows: Sequence[int]) -> Trajectory:
        """The trajectory of these rows of step `step` under `params`, collected as whole groups where they are some."""
        _, cond, seeds = self._batch(step)
        first = int(seeds[0, 0])  # what a window is drawn from that every fragment shares
        groups = _groups_of(rows, self.k)
        if groups is not None:
            prompts, seeds = torch.tensor(groups), seeds[groups]
        else:  # every sample as a group of its own
            prompts, seeds = torch.tensor(rows) // self.k, seeds.flatten()[list(rows)][:, None]
        cond = {name: value[prompts.to(value.device)] for name, value in cond.items()}
        model = self.model
        sampler: Any = Gridded(model.velocity, model.times, self.steps, tuple(model.latent_shape()), step, first)
        with torch.no_grad(), self._alone():
            return self.algorithm.collect(sampler, params, cond, seeds, _unscored).trajectory

    def score(self, step: int, rows: Sequence[int], trajectory: Trajectory) -> Tensor:
        """The rewards of these rows, one each, nan where there is none; of j parts " b 1+j", the parts after their sum."""
        score = Score(self.model.decode, self.reward, self._batch(step)[0])
        with torch.no_grad():
            rewards = score(trajectory.x_0, torch.tensor(rows) // self.k)
        return rewards if score.parts is None else torch.cat([rewards[:, None], score.parts], dim=1)

    def credit(self, step: int, groups: Sequence[int], trajectory: Trajectory, rewards: Tensor) -> dict[str, Tensor]:
        """What the algorithm's credit tells these whole groups, given their rewards " g k"; one row per sample."""
        cond = {name: value[list(groups)] for name, value in self._batch(step)[1].items()}
        batch = Batch(trajectory, rewards, cond)
        if rewards.ndim == 3:
            batch = Batch(trajectory, rewards[..., 0], cond, rewards[..., 1:], getattr(self.reward, "weights", None))
        with torch.no_grad():
            told = dict(self.algorithm.credit(batch))
        check_credit(told, *rewards.shape[:2])
        return told

    def accumulate(self, step, update, rows, trajectory, rewards, signal, packs, total) -> Told:
        """Add the gradient of each pack's share of `total` states; (metrics, states) of each. pairs: (row, timestep)."""
        cond = {n: v[(torch.tensor(rows) // self.k).to(v.device)] for n, v in self._batch(step)[1].items()}
        window = Window(trajectory, sums_of(rewards), cond, signal, self.reference)
        objective, told = self.algorithm.objective, []
        pairs = trained_pairs(window, steps_per_sample=objective.steps_per_sample).reshape(len(rows), -1, 2)  # type: ignore[attr-defined]
        timesteps = total // len(self.windows[update])
        if pairs.shape[1] != timesteps:
            raise ValueError(
                f"the schedule has timesteps {timesteps}, but the objective trains {pairs.shape[1]} per sample"
            )
        every = sum(len(pack) for pack in packs) == pairs.shape[0] * pairs.shape[1]
        with torch.enable_grad(), self._alone():
            for pack in packs:
                chosen = torch.stack([pairs[row, timestep] for row, timestep in pack])
                part = window if every and len(packs) == 1 else window._replace(pairs=chosen)
                loss, keep, metrics = objective(self.model.velocity, self.model.params, part)
                value = masked_mean(loss, keep) * (len(pack) / total)
                if not value.requires_grad:
                    raise ValueError("the loss has no gradient: velocity or objective detaches it")
                value.backward()
                loss_here = {"loss": float(value.detach()) * total / len(pack)}
                told.append((numbers_by_name("objective", metrics) | loss_here, len(pack)))
        return told

    def commit(self, step: int, update: int) -> dict[str, float]:
        """One optimizer step on what was accumulated; after a batch's last one the behaviour params follow. ValueError: a
        gradient norm that is not finite."""
        params = list(self.model.params.values())
        limit = torch.inf if self.grad_clip is None else self.grad_clip
        with self._alone():
            norm = torch.nn.utils.clip_grad_norm_(params, limit)
            if not bool(torch.isfinite(norm)):
                raise ValueError(f"gradient norm is {float(norm)}: nothing was stepped")
            self.optimizer.step()
            self.zero()
            if update == len(self.windows) - 1:
                done = (step + 1) * len(self.windows)
                self.behaviour = _copies(self.algorithm.behaviour(self.behaviour, self.model.params, done))
        return {"grad_norm": float(norm)}

    def snapshot(self) -> Params:
        return _copies(self.behaviour)

    def suspend(self) -> object:
        """The accumulated gradient, on the CPU, while the params' own is zeroed; `resume` puts it back."""
        held = {name: p.grad for name, p in self.model.params.items()}
        self.zero()
        return {name: None if grad is None else grad.to("cpu") for name, grad in held.items()}

    def resume(self, held: Any) -> None:
        for name, p in self.model.params.items():
            p.grad = None if held[name] is None else held[name].to(p.device)

    def zero(self) -> None:
        for p in self.model.params.values():
            p.grad = None

    def state(self) -> dict[str, Any]:
        """Everything a commit changes: params, behaviour params, optimizer. Copies."""
        return {
            "params": _copies(self.model.params),
            "behaviour": _copies(self.behaviour),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Back to a `state`, in place: the live tensors stay the ones the optimizer steps."""
        with torch.no_grad():
            for name, p in self.model.params.items():
                p.copy_(state["params"][name])
        self.behaviour = _copies(state["behaviour"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # it would step the tensors of `state` else
        self.zero()


def _copies(params: Params) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in params.items()}


def sums_of(rewards: Tensor) -> Tensor:
    """What is trained on: the rewards, or the sums of those that have parts (`AlgorithmStages.score`).

    >>> sums_of(torch.tensor([[3.0, 1.0, 2.0]]))
    tensor([3.])
    """
    return rewards if rewards.ndim == 1 else rewards[:, 0]


def _unscored(latents: Tensor, rows: Tensor) -> Tensor:
    """The score of a collect whose samples are scored later."""
    return torch.zeros(len(latents), device=latents.device)


def _groups_of(rows: Sequence[int], k: int) -> list[int] | None:
    """The groups these rows are, where they are whole groups one after the other; else None."""
    groups = [row // k for row in rows[::k]]
    return groups if list(rows) == [group * k + j for group in groups for j in range(k)] else None


# ---- what an algorithm looks at, asked of the closed-form toy ---------------------------------------------------------


def _toy_batch(algorithm: Algorithm, steps: int, k: int) -> tuple[Callable[[Any, Tensor], Batch], Tensor]:
    toy = import_module("diffrl.tasks.toy")
    model = toy.toy_model()
    drawn = sample_seeds(0, 0, range(3), k)
    sampler: Any = Gridded(model.velocity, model.times, steps, (2,), first=int(drawn[0, 0]))

    def collect(prompts: Any, seeds: Tensor) -> Batch:
        cond = {"prompt": torch.as_tensor(prompts)}
        with torch.no_grad():
            return algorithm.collect(sampler, model.params, cond, seeds, lambda x, rows: x.sum(1) + x[:, 0] ** 3)

    return collect, drawn


def trained_timesteps(algorithm: Algorithm, *, steps: int) -> int:
    """How many timesteps of each sample the objective trains, of a rollout of `steps` steps. Asked of the toy.

    >>> from diffrl.algorithms import art, flow_grpo
    >>> trained_timesteps(art(), steps=10), trained_timesteps(flow_grpo(), steps=10)
    (10, 9)
    """
    collect, seeds = _toy_batch(algorithm, steps, 2)
    kept = collect([0], seeds[:1]).trajectory.std.shape[1]
    size = algorithm.objective.steps_per_sample  # type: ignore[attr-defined]
    return kept if size is None else size(kept) if callable(size) else size


def require_separable_collect(algorithm: Algorithm, *, steps: int, group_size: int, whole_groups: bool) -> None:
    """ValueError unless a sample is the same whoever is collected with it: other groups where whole_groups, anybody
    otherwise. Asked of the toy, milliseconds.

    >>> from diffrl.algorithms import dance_grpo  # whose samples all start from the first one's noise
    >>> require_separable_collect(dance_grpo(), steps=4, group_size=2, whole_groups=False)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: this algorithm's collect looks beyond a sample: ...
    """
    collect, seeds = _toy_batch(algorithm, steps, group_size)
    whole = collect([0, 1, 2], seeds).trajectory
    if whole_groups:
        rows = list(range(group_size, 2 * group_size))
        part = collect([1], seeds[1:2]).trajectory
    else:
        rows = [2 * group_size - 1, 2 * group_size]
        part = collect([1, 2], seeds.flatten()[rows][:, None]).trajectory
    names = ("x_0", "x_t", "v", "std")
    same = part.x_t.shape[1:] == whole.x_t.shape[1:] and torch.equal(part.t, whole.t)
    if not same or not all(
        torch.allclose(getattr(part, n), getattr(whole, n)[rows], rtol=1e-4, atol=1e-5) for n in names
    ):
        unit = "group" if whole_groups else "sample"
        raise ValueError(
            f"this algorithm's collect looks beyond a {unit}: a {unit} collected apart is another one. Cut the batch into "
            f"{'one fragment' if whole_groups else 'whole groups (prompt_partition) or one fragment'}"
        )


def require_separable_credit(algorithm: Algorithm, *, steps: int, group_size: int) -> None:
    """ValueError unless a group is told the same whichever groups are with it. Asked of the toy, milliseconds.

    >>> from diffrl.algorithms import flow_grpo  # which divides by the std of the whole batch
    >>> require_separable_credit(flow_grpo(), steps=4, group_size=2)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: this algorithm's credit['advantage'] looks at other groups too ...
    """
    group_size = max(group_size, 16)  # few samples have few pairings: another draw may be the same
    collect, seeds = _toy_batch(algorithm, steps, group_size)
    batch = collect([0, 1, 2], seeds)
    told = algorithm.credit(batch)
    rows = slice(group_size, 2 * group_size)
    tr = batch.trajectory
    shared = {"t": tr.t, "t_next": tr.t_next}
    alone = tr._replace(**{n: v[rows] for n, v in tr._asdict().items() if n not in shared and v is not None})
    one = algorithm.credit(Batch(alone, batch.rewards[1:2], {n: v[1:2] for n, v in batch.cond.items()}))
    for name, value in one.items():
        if not torch.allclose(value.double(), told[name][rows].double(), rtol=1e-4, atol=1e-5, equal_nan=True):
            raise ValueError(
                f"this algorithm's credit[{name!r}] looks at other groups too (a batch's spread, pairs of a batch): "
                "the schedule must wait for the whole batch (barrier=True)"
            )


def require_separable_objective(algorithm: Algorithm, *, steps: int, group_size: int) -> None:
    """ValueError unless the loss of a sample is the same whoever shares its forward. Asked of the toy, milliseconds.

    >>> from diffrl.algorithms import art
    >>> require_separable_objective(art(), steps=4, group_size=2) is None
    True
    """
    collect, seeds = _toy_batch(algorithm, steps, group_size)
    batch = collect([0, 1, 2], seeds)
    credit = algorithm.credit(batch)
    toy = import_module("diffrl.tasks.toy").toy_model()
    params = {name: p.detach() + 0.1 for name, p in toy.params.items()}  # at the old ones every ratio is 1

    def losses(rows: Sequence[int]) -> Tensor:
        window = window_of(batch, credit, torch.tensor(rows), toy.params)
        loss, keep, _ = algorithm.objective(toy.velocity, params, window)
        return torch.where(keep > 0, loss * keep, 0.0).detach().reshape(len(rows), -1)

    with torch.no_grad():
        b = batch.rewards.numel()
        rows = range(0, b, max(b // 8, 1))  # some of every group
        apart, together = torch.cat([losses([row]) for row in rows]), losses(rows)
    if not torch.allclose(apart, together, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise ValueError(
            "this algorithm's objective looks at all samples of a forward (a mean over a micro-batch): cut apart, it is "
            "another one. Run the batch in one fragment"
        )
