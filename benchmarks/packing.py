"""What time-step packing gains here: t(q) = a + b q of one forward-backward of q states, predicted against measured speed-up.

    python benchmarks/packing.py

The digits model (an SD3 pipeline of 2-3 M parameters). a and b are fitted to forward-backwards of 1, 2 and 4 states; then
one optimizer step on a window of S states, which the fit has not seen, is run in packs of K: predicted seconds are
ceil(S/K) a + S b. Times are medians over rounds in which all sizes alternate; the first round warms up.
"""

import argparse
import math
import os
import statistics
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from tqdm import tqdm

from diffrl.algorithms import art
from diffrl.loop import update
from diffrl.losses import masked_mean
from diffrl.parallel import fit_train_cost
from diffrl.sampling import sample_seeds
from diffrl.settings import Settings, build
from diffrl.states import trained_pairs
from diffrl.types import Gridded
from diffrl.windows import Score, encode, window_of

FITTED = (1, 2, 4)


def window_to_train(bench, *, prompts: int, group: int, steps: int):
    """One window of the real task: `prompts` x `group` samples of `steps` trained states each."""
    model, texts, algorithm = bench.model, bench.prompts[:prompts], art(updates=1)
    sampler = Gridded(model.velocity, model.times, steps, tuple(model.latent_shape()))
    seeds = sample_seeds(0, 0, range(prompts), group)
    with torch.no_grad():
        batch = algorithm.collect(
            sampler, model.params, encode(model, texts), seeds, Score(model.decode, bench.reward, texts)
        )
        credit = algorithm.credit(batch)
    return algorithm, window_of(batch, credit, torch.arange(prompts * group))


def forward_backward(model, objective, window, pairs) -> float:
    """Seconds of one forward-backward of these states."""
    began = time.perf_counter()
    loss, keep, _ = objective(model.velocity, model.params, window._replace(pairs=pairs))
    masked_mean(loss, keep).backward()
    return time.perf_counter() - began


def step(model, objective, window, pack: int) -> float:
    """Seconds of one optimizer step (of rate 0) in packs of `pack`."""
    optimizer = torch.optim.SGD(list(model.params.values()), lr=0.0)
    began = time.perf_counter()
    update(objective, model, optimizer, window, None, None, pack)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--packs", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bench = build(Settings(threads=options.threads))
    algorithm, window = window_to_train(bench, prompts=2, group=4, steps=8)
    pairs = trained_pairs(window)
    alone: dict[int, list[float]] = {q: [] for q in FITTED}
    whole: dict[int, list[float]] = {k: [] for k in options.packs}
    for i in tqdm(range(options.rounds + 1), desc="rounds"):
        for q in FITTED:
            several = [
                forward_backward(bench.model, algorithm.objective, window, pairs[j : j + q]) for j in range(0, 8, q)
            ]
            if i:
                alone[q] += several
        for k in options.packs:
            seconds = step(bench.model, algorithm.objective, window, k)
            if i:
                whole[k].append(seconds)
    taken = {q: statistics.median(seconds) for q, seconds in alone.items()}
    cost = fit_train_cost(list(taken), list(taken.values()))
    states, measured = len(pairs), {k: statistics.median(seconds) for k, seconds in whole.items()}
    predicted = {k: math.ceil(states / k) * cost.a + states * cost.b for k in options.packs}
    first = options.packs[0]
    print(f"forward-backward of {FITTED} states: " + ", ".join(f"{1000 * t:.1f} ms" for t in taken.values()))
    print(
        f"fit: a = {1000 * cost.a:.1f} ms, b = {1000 * cost.b:.2f} ms; at most (a + b)/b = {(cost.a + cost.b) / cost.b:.2f}"
    )
    print(f"one optimizer step on {states} states, {options.threads} thread(s), medians of {options.rounds} rounds")
    print(f"| pack | calls | predicted, ms | measured, ms | predicted speed-up over {first} | measured |")
    print("|---|---|---|---|---|---|")
    for k in options.packs:
        gains = f"{predicted[first] / predicted[k]:.2f} | {measured[first] / measured[k]:.2f}"
        print(f"| {k} | {math.ceil(states / k)} | {1000 * predicted[k]:.0f} | {1000 * measured[k]:.0f} | {gains} |")


if __name__ == "__main__":
    main()
