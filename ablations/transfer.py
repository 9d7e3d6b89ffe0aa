"""Transfer without tuning: each algorithm's best learning rate on the digits task, used as it is on two other tasks.

    python ablations/transfer.py [--quick]

jpeg: the same model, rewarded for pictures that compress well (minus the kilobytes of a JPEG). letters: another base model
that draws a letter for each digit (`letters.py`), rewarded by the OCR engine. The rates are those that `efficiency.py`'s
grid chose; run it first. "Lost": the last evaluation is below 95 % of the run's best, measured from the base.
"""

import common
import efficiency
import letters
from common import Run

PIECES = efficiency.PIECES
SEEDS, ITERATIONS = (0, 1, 2), 10


def runs(rates: dict[str, float]) -> list[Run]:
    return [
        Run(name, seed, rates[name], ITERATIONS, task=task, eval_every=5)
        for seed in SEEDS
        for task in ("jpeg", "letters")
        for name in PIECES
    ]


def lost(found, name: str, task: str) -> str:
    """How many of the runs end below the base plus 95 % of their best gain."""
    count, total = 0, 0
    for run, rows in found.items():
        if run.name == name and run.task == task:
            told = [row["eval/reward"] for row in rows if "eval/reward" in row]
            total += 1
            count += any("diverged" in row for row in rows) or told[-1] < told[0] + 0.95 * (max(told) - told[0])
    return f"{count} of {total}"


def main() -> None:
    options = common.options_of(__doc__)
    letters.ensure()
    grid = efficiency.grid()
    if options.quick:
        rates = dict.fromkeys(PIECES, 1e-3)
    else:
        rates = efficiency.best_rates(common.results("efficiency", grid, jobs=options.jobs))
    found = common.results("transfer", common.shortened(runs(rates), options.quick), jobs=options.jobs)
    print(common.write_csv("transfer", found, quick=options.quick))
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 5.5))
    for axis, task in zip(axes, ("jpeg", "letters")):
        here = {run: rows for run, rows in found.items() if run.task == task}
        common.draw_bands(axis, here, list(PIECES), "eval/reward")
        axis.set_title(task, fontsize=9)
    common.legend_beside(figure)
    note = f"mean and 95 % t-interval over seeds {SEEDS}; {ITERATIONS} iterations of 8 x 8 samples, 6 steps; learning rates of efficiency.py's grid; python ablations/transfer.py"
    print(common.save_figure("transfer", figure, note, quick=options.quick))
    if not options.quick:
        lines = []
        for name in PIECES:
            line = [name, f"{rates[name]:g}"]
            for task in ("jpeg", "letters"):
                here = {run: rows for run, rows in found.items() if run.task == task}
                line += [common.plus_minus(common.finals(here, name, "eval/reward")), lost(found, name, task)]
            lines.append(line)
        header = ["algorithm", "learning rate", "jpeg: reward", "lost", "letters: reward", "lost"]
        print(common.table("Final reward of the transferred setting", header, lines))


if __name__ == "__main__":
    main()
