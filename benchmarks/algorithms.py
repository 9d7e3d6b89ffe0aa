"""Seconds per iteration and peak memory of every algorithm at equal samples: `python benchmarks/algorithms.py`.

Digits model, 8 prompts x 8 samples, 6 sampling steps, published constants. Times: medians over rounds in which all
algorithms alternate, so that a busy neighbour slows them alike; the reward apart. Memory: the largest resident set of a
process of its own, less what it held before the first iteration. Trained states: samples x trained steps per iteration.
"""

import argparse
import multiprocessing
import os
import statistics
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from tqdm import tqdm

from diffrl.algorithms import Algorithm
from diffrl.loop import train
from diffrl.settings import ALGORITHMS, Settings, build

GROUP, PROMPTS, STEPS = 8, 8, 6


def counted(algorithm: Algorithm, tally: dict[str, int]) -> Algorithm:
    """The same algorithm, which notes how many states its objective looked at."""

    def objective(velocity, params, window):
        loss, keep, metrics = algorithm.objective(velocity, params, window)
        tally["states"] += len(loss)
        return loss, keep, metrics

    return algorithm._replace(objective=objective)


def training_of(bench, algorithm: Algorithm):
    optimizer = torch.optim.AdamW(list(bench.model.params.values()), lr=1e-5)
    return train(
        bench.model,
        algorithm,
        bench.prompts,
        bench.reward,
        optimizer,
        group_size=GROUP,
        steps=STEPS,
        seed=0,
        prompts_per_iteration=PROMPTS,
    )


def megabytes(what: str) -> float:
    """VmRSS (now) or VmHWM (the most so far) of this process; getrusage's maximum is inherited from the parent."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[what].split()[0]) / 1024


def peak(name: str, threads: int) -> float:
    """MB over what the process held when training began, over two iterations."""
    torch.set_num_threads(threads)
    bench = build(Settings(threads=threads))
    training = training_of(bench, ALGORITHMS[name]())
    bench.reward(torch.full((1, 24, 32, 3), 255, dtype=torch.uint8), bench.prompts[:1])  # the engine's own buffers
    before = megabytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    for _ in range(2):
        next(training)
    return megabytes("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bench = build(Settings(threads=options.threads))
    tallies = {name: {"states": 0} for name in ALGORITHMS}
    made = {name: factory() for name, factory in ALGORITHMS.items()}
    trainings = {name: training_of(bench, counted(made[name], tallies[name])) for name in ALGORITHMS}
    seconds: dict[str, list[float]] = {name: [] for name in ALGORITHMS}
    for i in tqdm(range(options.rounds + 1), desc="rounds"):
        for name, training in trainings.items():
            row = next(training)
            if i:
                seconds[name].append(row["seconds/rollout"] + row["seconds/update"])
    context = multiprocessing.get_context("spawn")
    memory = {}
    for name in tqdm(ALGORITHMS, desc="memory"):
        with context.Pool(1) as pool:
            memory[name] = pool.apply(peak, (name, options.threads))
    base = statistics.median(seconds["art"])
    print(
        f"{PROMPTS} prompts x {GROUP} samples, {STEPS} steps, {options.threads} threads, medians of {options.rounds} rounds"
    )
    print("| algorithm | s per iteration | relative to art | trained states | optimizer steps | peak memory, MB |")
    print("|---|---|---|---|---|---|")
    for name in ALGORITHMS:
        took = statistics.median(seconds[name])
        states = tallies[name]["states"] // (options.rounds + 1)
        print(f"| {name} | {took:.2f} | {took / base:.2f} | {states} | {made[name].updates} | {memory[name]:.0f} |")


if __name__ == "__main__":
    main()
