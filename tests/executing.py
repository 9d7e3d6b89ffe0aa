"""Real algorithms on the float64 toy by schedules, and plain workers that note what they are asked. No tests here."""

import functools
import time
from concurrent.futures import Future
from functools import partial

import pytest
import torch
from toys import wide

from diffrl.algorithms import art, awm, flow_grpo, nft
from diffrl.backends import Call
from diffrl.conductor import Conductor
from diffrl.executors import AlgorithmStages, InProcess, Workers, in_process, run
from diffrl.guidance import group_std
from diffrl.loop import train
from diffrl.parallel import CostModel, Pool, Schedule, TrainCost, bts_search, gap_partition
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model
from diffrl.types import Trajectory

GROUP, STEPS, WHOLE = 4, 5, 10**6
"""Samples per prompt, sampling steps, a pack that holds everything."""
COST = CostModel(1.0, TrainCost(0.1, 0.2), Pool(1), Pool(1), helper=1, reward=0.5)

# name: (algorithm, prompts, trained timesteps per sample); every credit looks at groups alone
GROUPWISE = {
    "art": (art, 5),
    "art, drawn steps": (partial(art, steps_per_sample=3, radius=1e-3), 3),
    "flow_grpo": (partial(flow_grpo, spread=group_std), 4),
    "nft": (partial(nft, spread=group_std), 5),
    "awm": (partial(awm, spread=group_std), 4),
}
BATCHWISE = {"flow_grpo": (flow_grpo, 4), "nft": (nft, 5), "awm": (awm, 4)}


def stages_of(algorithm, *, prompts=2, lr=0.06, optimizer=torch.optim.Adam, reward=toward_compass, seed=0, **options):
    model = toy_model(dtype=torch.float64)
    made = optimizer(list(model.params.values()), lr=lr)
    options = {"group_size": GROUP, "steps": STEPS, **options}
    return AlgorithmStages(model, wide(algorithm), PROMPTS[:prompts], reward, made, seed=seed, **options)


def plain(
    algorithm, *, prompts=2, lr=0.06, optimizer=torch.optim.Adam, iterations=2, reward=toward_compass, seed=0, **options
):
    """(params, rows) of `loop.train`."""
    model = toy_model(dtype=torch.float64)
    made = optimizer(list(model.params.values()), lr=lr)
    options = {"group_size": GROUP, "steps": STEPS, **options}
    training = train(model, wide(algorithm), PROMPTS[:prompts], reward, made, seed=seed, **options)
    rows = [next(training) for _ in range(iterations)]
    return model.params, rows


def whole(timesteps, *, prompts=2, fragments=1, **options):
    """A schedule of the batch in one fragment and one pack, unless said otherwise."""
    cut = gap_partition(prompts, GROUP, fragments=fragments)
    return Schedule(cut, GROUP, timesteps=timesteps, **{"pack": WHOLE, **options})


def close(a, b, *, relative=1e-12):
    """Equal to rounding, relative to each tensor's size."""
    assert a.keys() == b.keys()
    return all(
        float((a[n] - b[n]).detach().abs().max()) <= relative * max(float(b[n].detach().abs().max()), 1e-3) for n in a
    )


def executed(schedule, stages, *, steps=2, **options):
    """(params, results) of a whole run."""
    options = {"backend": in_process(pick=lambda n: 0), **options}
    results = list(run(schedule, stages, steps=steps, **options))
    return stages.model.params, results


class Noted:
    """Plain workers on one number theta whose loss of a pair is (theta + x) t: everything they are asked is noted."""

    def __init__(self, timesteps=2, seconds=0.0, **times):
        self.theta = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        self.timesteps, self.calls = timesteps, []
        self.seconds = {"generate": seconds, "score": seconds, "accumulate": seconds, "commit": 0.0, "snapshot": 0.0}
        self.seconds |= {"suspend": 0.0, "resume": 0.0, **times}

    def note(self, kind, *what):
        self.calls.append((kind, *what))
        if self.seconds.get(kind):
            time.sleep(self.seconds[kind] * (len(what[0]) if kind in ("generate",) else 1))

    def generate(self, params, seeds, cond):
        self.note("generate", seeds.tolist(), float(params["theta"]), cond["row"].tolist())
        x = (seeds % 1000).double()[:, None] / 1000 + params["theta"]
        n, s = len(seeds), self.timesteps
        states = x[:, None].expand(n, s, 1)
        t = torch.linspace(1, 0, s + 1, dtype=torch.float64)
        std = torch.zeros(n, s, dtype=torch.float64)
        return Trajectory(x, states, states, states, t[:-1], t[1:], std, std, seeds)

    def score(self, trajectory, cond):
        self.note("score", cond["row"].tolist())
        return trajectory.x_0[:, 0] * 2

    def credit(self, rewards, x_0):
        self.note("credit", tuple(rewards.shape), tuple(x_0.shape))
        return rewards - rewards.mean(1, keepdim=True)

    def accumulate(self, trajectory, signal, pairs, total):
        self.note("accumulate", pairs, total, tuple(signal.shape))
        loss = sum((self.theta[0] + trajectory.x_0[r, 0]) * signal[r] * (t + 1) for r, t in pairs) / total
        loss.backward()
        return {"pairs": float(len(pairs))}

    def commit(self):
        self.note("commit", None if self.theta.grad is None else float(self.theta.grad))
        with torch.no_grad():
            self.theta -= 0.1 * self.theta.grad
        self.theta.grad = None
        return {"theta": float(self.theta.detach())}

    def snapshot(self):
        self.note("snapshot")
        return {"theta": self.theta.detach().clone()}

    def suspend(self):
        self.note("suspend")
        held, self.theta.grad = self.theta.grad, None
        return held

    def resume(self, held):
        self.note("resume")
        self.theta.grad = held

    def workers(self):
        return Workers(
            *(self.generate, self.score, self.credit, self.accumulate),
            *(self.commit, self.snapshot, self.suspend, self.resume),
        )

    def of(self, kind):
        return [call[1:] for call in self.calls if call[0] == kind]


def require_quiet():
    """Skip where sleeping takes much longer than asked: nothing can be timed on a machine that busy."""
    late = []
    for _ in range(15):
        began = time.perf_counter()
        time.sleep(0.01)
        late.append(time.perf_counter() - began - 0.01)
    if max(late) > 0.005:
        pytest.skip(f"a sleep of 10 ms takes up to {1000 * max(late):.0f} ms longer here: too busy to time anything")


def timed(run, holds):
    """run() until `holds` of what it returns, three times at most; skipped where the machine is too busy to time it."""
    require_quiet()
    for _ in range(3):
        found = run()
        if holds(found):
            return
    require_quiet()
    assert holds(found)


def noted_run(schedule, noted, *, steps=1, seeds=None, **options):
    seeds = torch.arange(schedule.rows) + 7 if seeds is None else seeds
    options = {"backend": in_process(pick=lambda n: 0), **options}
    return list(run(schedule, noted.workers(), {"row": torch.arange(schedule.rows)}, seeds, steps=steps, **options))


class Clocked(InProcess):
    """A backend with a clock of its own, on which every call takes exactly what a cost model says; no work is done."""

    def __init__(self, cost):
        super().__init__(pick=lambda n: 0, rewards=cost.reward_workers)
        self.cost, self.time, self.running = cost, 0.0, []

    def open(self, stages, schedule):
        self.schedule, how = schedule, {"timesteps": schedule.timesteps, "pack": schedule.pack}
        sizes = [len(f.samples) for f in schedule.fragments]
        cost = self.cost if schedule.placement == "split" else self.cost.colocated()
        self.seconds = {
            "generate": [cost.generator_seconds(n) for n in sizes],
            "help": [self.help_seconds(cost, n) for n in sizes],
            "reward": [cost.reward_seconds(n) for n in sizes],
            "train": [cost.trainer_seconds(n, **how, shard_pairs=schedule.shard_pairs) for n in sizes],
        }

    def help_seconds(self, cost, n):
        """On the trainer pool; colocated, and where nobody helps, the generator's."""
        split = self.schedule.placement == "split" and cost.helper
        return cost.helper_seconds(n) if split else cost.generator_seconds(n)

    def now(self):
        return self.time

    def later(self, seconds, value=None):
        future = Future()
        future.set_running_or_notify_cancel()
        self.running.append((self.time + seconds, future, (self.time, self.time + seconds, value)))
        return Call(future, [None])

    def generate(self, step, fragment, version):
        return self.later(self.seconds["generate"][fragment])

    def help(self, step, fragment, version):
        return self.later(self.seconds["help"][fragment])

    def score(self, worker, step, fragment, handle):
        return self.later(self.seconds["reward"][fragment], torch.zeros(len(self.schedule.fragments[fragment].samples)))

    def train(self, step, update, fragment, parts):
        return self.later(self.seconds["train"][fragment], [])

    def commit(self, step, update):
        return self.later(self.cost.optimizer, {})

    def publish(self, version):
        free = version == 0 or self.schedule.placement == "module"
        return self.later(0.0 if free else self.cost.publish)

    def switch(self):
        return self.later(self.cost.switch)

    def restore(self):
        return self.later(self.cost.restore)

    def wait(self, futures, timeout):
        assert self.running, "nothing is in flight"
        self.time = min(end for end, *_ in self.running)
        for end, future, result in self.running:
            if end <= self.time:
                future.set_result(result)
        self.running = [entry for entry in self.running if entry[0] > self.time]
        return {future for future in futures if future.done()}


class Idle:
    """Stages of nothing, for a backend that does no work."""

    windows = ((),)

    def zero(self):
        pass


def clocked(schedule, cost, *, steps=2, lend=bts_search):
    """The trace of the executor's own rules on that clock."""
    backend = Clocked(cost)
    backend.open(Idle(), schedule)
    conductor = Conductor(
        schedule, backend, updates=1, start=0, stop=steps, cost=cost, lend=lend, retries=0, timeout=None
    )
    for _ in range(steps):
        conductor.play()
    return conductor.trace()


@functools.cache
def reference(name, *, iterations=2):
    """Params of the plain loop on the toy after two iterations."""
    return {n: p.detach().clone() for n, p in plain(GROUPWISE[name][0](), iterations=iterations)[0].items()}
