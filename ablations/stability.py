"""Stability: does a setting keep what it has learnt? 300 updates at three learning rates, k = 2 and 8, LoRA and full.

    python ablations/stability.py [--quick] [--task digits | jpeg | letters | all] [--pieces NAME,NAME] [--sizes 2,8]

The aim: never below 95 % of the run's best evaluation, measured from the base, at any of the twelve settings, and at least
as good as DiffusionNFT at its best learning rate of the three. One seed per setting (twelve settings are twelve trials);
150 iterations of 8 prompts x k samples, evaluated every 15.
"""

import math
from collections.abc import Sequence
from functools import partial

import common
from common import Run

from diffrl import algorithms as a
from diffrl.extensions import art_steady

PIECES: common.Pieces = {
    "ART": a.art,
    "ART steady": art_steady,
    "NFT": partial(a.nft, updates=2, trained_steps=a.noisiest(3)),
}
RATES, SIZES, LORA, UPDATES = (1e-4, 3e-4, 1e-3), (2, 8), (16, 0), 300


def runs(task: str, pieces: Sequence[str]) -> list[Run]:
    """ART, steady and as published, at every setting; NFT at k = 8 with LoRA, to be tuned over the rates."""
    grid = [(rate, k, rank) for rate in RATES for k in SIZES for rank in LORA]
    settings = [("ART steady", *setting) for setting in grid] + [("NFT", rate, 8, 16) for rate in RATES]
    settings += [("ART", *setting) for setting in grid]
    made = []
    for name, rate, k, rank in settings:
        if name in pieces:
            iterations = UPDATES // PIECES[name]().updates
            setting = {"task": task, "group_size": k, "prompts": 4, "lora": rank, "eval_every": iterations // 10}
            made.append(Run(name, 0, rate, iterations, **setting))
    return made


def retained(rows) -> float:
    """The smallest share of the best gain so far that is left at any later evaluation; 1 where nothing was gained."""
    told = [row["eval/reward"] for row in rows if "eval/reward" in row]
    if any("diverged" in row for row in rows):
        return 0.0
    least, best = 1.0, told[0]
    for value in told:
        best = max(best, value)
        if best > told[0]:
            least = min(least, (value - told[0]) / (best - told[0]))
    return least


def kept(rows) -> bool:
    """Whether no evaluation is below 95 % of the best one before it (as rewards in [0, 1], as the aim is stated)."""
    told, best = [row["eval/reward"] for row in rows if "eval/reward" in row], -math.inf
    for value in told:
        best = max(best, value)
        if value < best - 0.05 * abs(best):
            return False
    return not any("diverged" in row for row in rows)


def main() -> None:
    more = {"--task": "digits", "--pieces": ",".join(PIECES), "--sizes": ",".join(map(str, SIZES))}
    options = common.options_of(__doc__, more)
    tasks = ("digits", "jpeg", "letters") if options.task == "all" else (options.task,)
    if "letters" in tasks:
        import letters

        letters.ensure()
    sizes = {int(k) for k in options.sizes.split(",")}
    asked = [run for one in tasks for run in runs(one, options.pieces.split(",")) if run.group_size in sizes]
    wanted = common.shortened(asked, options.quick)
    found = common.results("stability", wanted, jobs=options.jobs)
    print(common.write_csv("stability", found, quick=options.quick))
    draw(found, tasks, quick=options.quick)
    if not options.quick:
        print(summary(found))


def draw(found, tasks, *, quick: bool) -> None:
    """One panel per k and LoRA or full, one line per algorithm and rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [(k, rank) for k in sorted({run.group_size for run in found}) for rank in LORA]
    wide = 5.4 * len(shown)
    figure, axes = plt.subplots(len(tasks), len(shown), figsize=(wide, 4.6 * len(tasks)), squeeze=False)
    for row, task in enumerate(tasks):
        for axis, (k, rank) in zip(axes[row], shown):
            for run, rows in found.items():
                if (run.task, run.group_size, run.lora) == (task, k, rank):
                    told = [(r["optimizer_steps"], r["eval/reward"]) for r in rows if "eval/reward" in r]
                    style = {"ART": ":", "ART steady": "-", "NFT": "--"}[run.name]
                    colour = f"C{RATES.index(run.learning_rate)}"
                    axis.plot(*zip(*told), style, color=colour, label=f"{run.name}, {run.learning_rate:g}")
            axis.set_title(f"{task}, k = {k}, {'LoRA' if rank else 'full'}", fontsize=9)
            axis.set_xlabel("optimizer steps")
        axes[row, 0].set_ylabel("eval/reward")
    common.legend_beside(figure)
    note = "seed 0 at every setting, 300 optimizer steps, 4 prompts x k samples per iteration, 6 sampling steps; python ablations/stability.py"
    print(common.save_figure("stability", figure, note, quick=quick))


def summary(found) -> str:
    lines = [
        [
            *(run.name, run.task, f"{run.learning_rate:g}", str(run.group_size), "LoRA" if run.lora else "full"),
            f"{max(r['eval/reward'] for r in rows if 'eval/reward' in r):.3f}",
            f"{[r['eval/reward'] for r in rows if 'eval/reward' in r][-1]:.3f}",
            f"{[r.get('eval/exact_match', math.nan) for r in rows if 'eval/reward' in r][-1]:.3f}",
            f"{retained(rows):.2f}",
            "yes" if kept(rows) else "no",
        ]
        for run, rows in found.items()
    ]
    header = [
        "algorithm",
        "task",
        "rate",
        "k",
        "params",
        "best",
        "last",
        "exact match",
        "least share of the best gain kept",
        ">= 95 %",
    ]
    return common.table("Stability over 300 updates", header, lines)


if __name__ == "__main__":
    main()
