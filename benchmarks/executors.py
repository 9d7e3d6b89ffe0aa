"""What a schedule takes for real, beside what the simulator says: `python benchmarks/executors.py [--engine ray]`.

First stages that sleep for known times, in this process: only the executor's own overhead separates the two numbers. Then the
digits task: every stage is timed alone (`executors.calibrate`), the schedule is simulated with those seconds, and run. In this
process rollout and training share one module and take turns, so that only the reward overlaps; Ray's actors each have their
own. `--picture FILE` draws both traces of the last schedule side by side.
"""

import argparse
import os
import time
from functools import partial

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from diffrl.algorithms import art
from diffrl.backends import in_process
from diffrl.engines import make_optimizer, make_stages
from diffrl.executors import Workers, calibrate, run
from diffrl.parallel import CostModel, Pool, Schedule, TrainCost, gap_partition, prompt_partition, simulate
from diffrl.plots import gantt, utilisation
from diffrl.settings import Settings, build
from diffrl.types import Trajectory


def sleepers(cost: CostModel) -> Workers:
    """Workers that do nothing for as long as the cost model says (one GPU each, packs of one size)."""
    theta = torch.zeros(1, requires_grad=True)

    def generate(params, seeds, cond):
        time.sleep(cost.generator_seconds(len(seeds)))
        x = torch.zeros(len(seeds), 1, 1)
        ends, std = torch.tensor([1.0]), torch.zeros(len(seeds), 1)
        return Trajectory(x[:, 0], x, x, x, ends, ends - 1, std, std, seeds)

    def score(trajectory, cond):
        time.sleep(cost.reward_seconds(len(trajectory.x_0)))
        return torch.zeros(len(trajectory.x_0))

    def accumulate(trajectory, signal, pairs, total):
        time.sleep(cost.train(len(pairs)))
        return {}

    def pause(seconds):
        time.sleep(seconds)
        return {}

    return Workers(
        *(generate, score, lambda rewards, x_0: rewards, accumulate, partial(pause, cost.optimizer)),
        *(lambda: {"theta": theta}, lambda: pause(cost.switch), lambda held: pause(cost.restore)),
    )


def asleep(steps: int) -> None:
    """Measured against simulated makespan where every stage sleeps."""
    cost = CostModel(
        *(0.04, TrainCost(0.02, 0.02), Pool(1), Pool(1)),
        helper=1,
        reward=0.03,
        reward_workers=1,
        optimizer=0.02,
        switch=0.01,
        restore=0.01,
    )
    fragments = prompt_partition(6, 2, fragments=6)
    kinds = {
        "barrier": {"barrier": True},
        "gap": {},
        "gap+tag": {"tag": True},
        "gap+tcss": {"stale": 2},
    }
    print(f"| {steps} steps that sleep | simulated, s | measured, s | measured/simulated |\n|---|---|---|---|")
    for name, options in kinds.items():
        schedule = Schedule(fragments, 2, pack=2, **options)
        expected = simulate(schedule, cost, steps=steps).makespan
        seeds = torch.arange(schedule.rows)
        *_, last = run(schedule, sleepers(cost), {}, seeds, steps=steps, cost=cost)
        print(f"| {name} | {expected:.2f} | {last.trace.makespan:.2f} | {last.trace.makespan / expected:.3f} |")


def digits(options: argparse.Namespace) -> None:
    """The digits task: predicted from stages timed alone, and measured."""
    torch.set_num_threads(options.threads)
    sizes = {"group_size": 4, "prompts_per_iteration": 2, "steps": 4, "trained_steps": "all", "fragments": 4}
    s = Settings(threads=options.threads, engine=options.engine, **sizes)
    bench = build(s)._replace(algorithm=art(updates=1))
    stages = make_stages(s, bench, make_optimizer(s, bench.model.params))
    rows = s.prompts_per_iteration * s.group_size
    print("\n| digits | simulated, s per step | measured | busy (measured) |\n|---|---|---|---|")
    for name, fragments, extra in (
        ("one after the other", 1, {"placement": "module"}),
        ("one fragment", 1, {}),
        ("gap, 4 fragments", 4, {}),
        ("gap+tcss", 4, {"stale": 1}),
    ):
        cut = gap_partition(s.prompts_per_iteration, s.group_size, fragments=fragments)
        schedule = Schedule(cut, s.group_size, timesteps=s.steps, pack=rows * s.steps, **extra)
        each = rows // fragments
        cost = calibrate(
            stages, repeats=2, timesteps=s.steps, sizes=(each, 2 * each) if fragments > 1 else (4, 8), samples=each
        )
        serial = each * cost.generate + cost.reward_seconds(each) + cost.train(each * s.steps) + cost.optimizer
        expected = simulate(schedule, cost, steps=options.steps)
        told = f"{serial:.2f} (sum)" if extra.get("placement") else f"{expected.period:.2f}"
        *_, last = run(schedule, stages, steps=options.steps, backend=backend_of(options, s))
        used = ", ".join(f"{pool} {share:.0%}" for pool, share in utilisation(last.trace).items())
        print(f"| {name} | {told} | {last.trace.period:.2f} | {used} |", flush=True)
    if options.picture:
        gantt({"simulated": expected, "measured": last.trace}, path=options.picture, title=name)


def one_update(s: Settings):
    """The stages of an actor, with the algorithm that is measured here."""
    torch.set_num_threads(s.threads)
    bench = build(s)._replace(algorithm=art(updates=1))
    return make_stages(s, bench, make_optimizer(s, bench.model.params))


def backend_of(options: argparse.Namespace, s: Settings):
    """The engine's backend."""
    if options.engine == "in_process":
        return in_process()
    from diffrl.ray_backend import ray_actors

    return ray_actors(build=partial(one_update, s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=["in_process", "ray"], default="in_process")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--picture", default=None)
    options = parser.parse_args()
    asleep(options.steps)
    digits(options)


if __name__ == "__main__":
    main()
