"""Wall time of one training iteration over the bare time of its own model calls: `python benchmarks/loop.py`.

Bare: the same number of denoiser forwards at the same shapes without gradient, the same decodes, and per update one forward
and backward at the same shape, called directly. Both alternate in one run; the ratio of the medians and the median of the
pairwise ratios are printed, the reward left out of the iteration.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from tqdm import tqdm

from diffrl.loop import train
from diffrl.sampling import seeded_noise
from diffrl.settings import Settings, build, parse_trained_steps
from diffrl.windows import encode


def bare_iteration(model, s: Settings, algorithm, prompts, trained: int) -> float:
    """Seconds of the model calls of one iteration, and of nothing else."""
    b = s.prompts_per_iteration * s.group_size
    cond = {
        k: v.repeat_interleave(s.group_size, 0) for k, v in encode(model, prompts[: s.prompts_per_iteration]).items()
    }
    x = seeded_noise(torch.arange(b), model.latent_shape())
    t = torch.full((b,), 0.5)
    w = b // algorithm.updates
    wide = {k: v[:w].repeat_interleave(trained, 0) for k, v in cond.items()}
    states = x[:w].repeat_interleave(trained, 0)
    began = time.perf_counter()
    with torch.no_grad():
        for _ in range(s.steps):
            model.velocity(model.params, x, t, cond)
        model.decode(x)
    for _ in range(algorithm.updates):
        model.velocity(model.params, states, t[:1].expand(len(states)), wide).square().mean().backward()
    seconds = time.perf_counter() - began
    for p in model.params.values():
        p.grad = None
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    s = Settings(threads=options.threads)
    torch.set_num_threads(s.threads)
    bench = build(s)
    candidates, per_sample = parse_trained_steps(s.trained_steps, s.steps)
    trained = per_sample or len(candidates(s.steps))
    bench.model.encode(bench.prompts)  # each text is encoded once in a run, not once an iteration
    optimizer = torch.optim.AdamW(list(bench.model.params.values()), lr=s.learning_rate)
    iterations = train(
        bench.model,
        bench.algorithm,
        bench.prompts,
        bench.reward,
        optimizer,
        group_size=s.group_size,
        steps=s.steps,
        seed=0,
        prompts_per_iteration=s.prompts_per_iteration,
    )
    parts: list[dict[str, float]] = []
    bare: list[float] = []
    for i in tqdm(range(options.repeats + 2), desc="alternating"):
        alone = bare_iteration(bench.model, s, bench.algorithm, bench.prompts, trained)
        row = next(iterations)
        if i >= 2:  # the first two warm up
            bare.append(alone)
            parts.append(row)
    whole = [row["seconds/rollout"] + row["seconds/update"] for row in parts]
    median = {
        name: statistics.median(row[f"seconds/{name}"] for row in parts) for name in ("rollout", "reward", "update")
    }
    print(
        f"{s.prompts_per_iteration} prompts x {s.group_size} samples, {s.steps} steps, {options.repeats} alternations"
    )
    for name, value in median.items():
        print(f"{name:<8} {1000 * value:8.1f} ms")
    print(f"bare     {1000 * statistics.median(bare):8.1f} ms (forwards, decodes, backwards alone)")
    print(f"overhead {statistics.median(whole) / statistics.median(bare):8.3f} x, ratio of medians (reward apart)")
    print(f"overhead {statistics.median(w / a for w, a in zip(whole, bare)):8.3f} x, median of pairwise ratios")


if __name__ == "__main__":
    main()
