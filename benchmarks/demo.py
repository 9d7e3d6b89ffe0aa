"""The main job at several training seeds, each run timed: `python benchmarks/demo.py`.

Prints, per training seed, OCR exact match over all hundred prompts at held-out seeds after so many iterations, and the wall
time of the run (install and pictures apart); then the means. Finished seeds are kept in --output and not run again.
"""

import argparse
import os
import statistics
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from tqdm import tqdm

from diffrl.run import read_metrics, run
from diffrl.settings import Settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algorithm", default="art")
    parser.add_argument("--output", default="runs/figures")
    options = parser.parse_args()
    finals, bases, times, lines = [], [], [], []
    for seed in options.seeds:
        folder = Path(options.output) / f"{options.algorithm}-{seed}"
        clock = folder / "seconds.txt"
        if not clock.exists():
            began = time.perf_counter()
            settings = Settings(algorithm=options.algorithm, seed=seed)
            run(folder, settings, overwrite=True, progress=partial(tqdm, desc=f"seed {seed}"), pictures=False)
            clock.write_text(f"{time.perf_counter() - began:.1f}")
        _, rows = read_metrics(folder)
        evaluated = [row for row in rows if "eval/exact_match" in row]
        bases.append(evaluated[0]["eval/exact_match"])
        finals.append(evaluated[-1]["eval/exact_match"])
        times.append(float(clock.read_text()))
        curve = " | ".join(f"{row['eval/exact_match']:.4f}" for row in evaluated)
        lines.append(f"| {seed} | {curve} | {times[-1]:.0f} s |")
    done = [str(row["iteration"] + 1) for row in evaluated]
    print("| training seed | " + " | ".join(["base", *done[1:]]) + " | wall time |")
    print("|" + "---|" * (len(done) + 2))
    print("\n".join(lines))
    between = " | " * (len(done) - 1)
    print(
        f"| mean | {statistics.mean(bases):.4f}{between}**{statistics.mean(finals):.4f}** | {max(times):.0f} s at most |"
    )


if __name__ == "__main__":
    main()
