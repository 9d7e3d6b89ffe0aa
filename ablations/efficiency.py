"""Efficiency: how many optimizer steps, samples and seconds until each algorithm reaches Flow-GRPO's final OCR reward.

    python ablations/efficiency.py [--quick]

Each algorithm with its published constants and its own best learning rate of GRID, chosen by the training reward of a
short run at a seed of its own; then three seeds. Digits task, 8 prompts x 8 samples per iteration, 6 sampling steps.
(Paper, SD3.5-M: ART needs 10.0x (GenEval), 5.2x (OCR), 9.6x (PickScore) fewer steps than Flow-GRPO.)
"""

import itertools
import math
from functools import partial

import common
from common import Run

from diffrl import algorithms as a

PIECES: common.Pieces = {
    "ART": a.art,
    "ART flash 3": partial(a.art_flash, noisiest=3),
    "ART pairwise": a.art_pairwise,
    "Flow-GRPO": a.flow_grpo,
    "Flow-GRPO-Fast": a.flow_grpo_fast,
    "DanceGRPO": a.dance_grpo,
    "NFT": a.nft,
    "NFT OCR": a.nft_ocr,
    "AWM": a.awm,
    "Flow-DPPO": a.flow_dppo,
}
GRID, GRID_SEED, GRID_ITERATIONS = (3e-4, 1e-3, 3e-3), 100, 12
SEEDS, ITERATIONS = (0, 1, 2), 30
Y = "eval/exact_match"


def grid() -> list[Run]:
    """The short runs that choose the learning rates."""
    return [Run(name, GRID_SEED, rate, GRID_ITERATIONS, eval_every=0, tag="grid") for name in PIECES for rate in GRID]


def best_rates(found) -> dict[str, float]:
    """By the mean training reward of the last third of the short run; a run that diverged loses."""

    def score(run: Run) -> float:
        rows = found[run]
        if any("diverged" in row for row in rows):
            return -math.inf
        tail = [row["reward/mean"] for row in rows[1:]][-max(run.iterations // 3, 1) :]
        return math.fsum(tail) / len(tail)

    rates = {}
    for name in PIECES:
        tried = [run for run in found if run.name == name]
        rates[name] = max(tried, key=score).learning_rate
    return rates


def mean_curve(found, name: str) -> list[dict[str, float]]:
    """At each evaluation: optimizer steps, samples, seconds (mean over seeds) and mean exact match."""
    runs = [[row for row in rows if Y in row] for run, rows in found.items() if run.name == name]
    columns = ("optimizer_steps", "samples", "seconds", Y)
    return [{c: math.fsum(row[c] for row in at) / len(at) for c in columns} for at in zip(*runs, strict=False)]


def reached(curve, level: float, x: str) -> float:
    """x at which the curve first reaches the level, linear between evaluations; inf: never."""
    for low, high in itertools.pairwise(curve):
        if high[Y] >= level:
            return low[x] + (high[x] - low[x]) * max(level - low[Y], 0) / max(high[Y] - low[Y], 1e-12)
    return math.inf


def summary(found, rates) -> str:
    """The table of docs/results.md: what each needs, in the mean over seeds, to reach the final exact match of Flow-GRPO."""
    curves = {name: mean_curve(found, name) for name in PIECES}
    level = curves["Flow-GRPO"][-1][Y]
    whole = curves["Flow-GRPO"][-1]["optimizer_steps"]
    lines = []
    for name in PIECES:
        cost = [reached(curves[name], level, x) for x in ("optimizer_steps", "samples", "seconds")]
        told = [f"{c:.0f}" if math.isfinite(c) else "never" for c in cost]
        times = f"{whole / cost[0]:.1f}x" if 0 < cost[0] < math.inf else "-"
        final = common.plus_minus(common.finals(found, name, Y))
        lines.append([name, f"{rates[name]:g}", *told, times, final])
    title = f"Mean curves until exact match {level:.3f} (Flow-GRPO's after {ITERATIONS} iterations)"
    header = ["algorithm", "learning rate", "optimizer steps", "samples", "seconds", "fewer steps", "final exact match"]
    return common.table(title, header, lines)


def main() -> None:
    options = common.options_of(__doc__)
    short = common.results("efficiency", common.shortened(grid(), options.quick), jobs=options.jobs)
    rates = best_rates(short)
    runs = [Run(name, seed, rates[name], ITERATIONS) for seed in SEEDS for name in PIECES]
    found = common.results("efficiency", common.shortened(runs, options.quick), jobs=options.jobs)
    print(common.write_csv("efficiency", {**short, **found}, quick=options.quick))
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 5.5), sharey=True)
    for axis, x in zip(axes, ("optimizer_steps", "samples")):
        common.draw_bands(axis, found, list(PIECES), Y, x=x)
    common.legend_beside(figure)
    told = ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
    note = (
        f"mean and 95 % t-interval over seeds {SEEDS}; {ITERATIONS} iterations of 8 x 8 samples, 6 steps; best learning rate "
        f"of {GRID}: {told}; python ablations/efficiency.py"
    )
    print(common.save_figure("efficiency", figure, note, quick=options.quick))
    if not options.quick:
        print(summary(found, rates))


if __name__ == "__main__":
    main()
