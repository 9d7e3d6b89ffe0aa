"""What separating generation from training gains, by simulation: `python benchmarks/schedules.py`.

Nothing here was measured: every number comes from `diffrl.parallel.PRESETS`, whose costs are assumed (see there).

Table 1, per preset: seconds per step of the two colocated baselines, and the throughput over the packed `genrl` baseline when
GAP, TSP, TAG and TCSS are added in turn, each with the best number of fragments and the best division of the same GPUs; beside
it the most that any schedule of this work could gain (no free lunch: baseline / `lower_bound`).
Table 2: the published range, 1.56 to 2.10 times - over which baselines it is reached, not reached, or impossible.
Table 3: the same on made-up costs that vary one thing at a time: samples per GPU, swap, cost per forward, unequal GPUs.
"""

import argparse
from dataclasses import replace

from diffrl.parallel import (
    PRESETS,
    CostModel,
    Pool,
    Schedule,
    TrainCost,
    best_split,
    ladder,
    lower_bound,
    simulate,
)

PROMPTS, GROUP, TIMESTEPS, PACK, STEPS = 4, 8, 8, 4, 8
FRAGMENTS = (1, 2, 4, 8)
RUNGS = ("barrier", "gap", "gap+tsp", "gap+tsp+tag", "gap+tsp+tag+tcss")
LOW, HIGH = 1.56, 2.10  # published, over two colocated systems


def rungs(fragments: int, prompts: int = PROMPTS, group: int = GROUP) -> dict[str, Schedule]:
    """The ladder's schedules on the batch, one stale fragment in the last."""
    return ladder(prompts, group, fragments=fragments, timesteps=TIMESTEPS, pack=PACK, stale=1)


def best(name: str, cost: CostModel, prompts: int = PROMPTS, group: int = GROUP) -> tuple[float, str]:
    """(seconds per step, how) of a rung with the best number of fragments and the best division of the GPUs."""
    gpus, found = cost.generator.gpus + cost.trainer.gpus, []
    for m in FRAGMENTS if name != "barrier" else (1,):
        if m > prompts * group:
            continue
        schedule = rungs(m, prompts, group)[name]
        split = best_split(gpus, schedule, cost, steps=STEPS)
        period = simulate(schedule, split, steps=STEPS).period
        found.append((period, f"{m} on {split.generator.gpus}+{split.trainer.gpus}"))
    return min(found)


def baselines(cost: CostModel, prompts: int = PROMPTS, group: int = GROUP) -> dict[str, float]:
    """Seconds per step of the colocated baselines, with and without packing."""
    named, found = rungs(1, prompts, group), {}
    for name in ("verl-omni", "genrl"):
        found[name] = simulate(named[name], cost).period
        found[f"{name}, packed"] = simulate(replace(named[name], pack=PACK), cost).period
    return found


def bound(cost: CostModel, prompts: int = PROMPTS, group: int = GROUP) -> float:
    """No schedule of the batch is faster, packed and assisted or not."""
    return lower_bound(rungs(1, prompts, group)["gap+tsp+tag"], cost)


def verdict(baseline: float, reached: float, least: float) -> str:
    """What the published range is over this baseline."""
    if baseline / least < LOW:
        return f"impossible (at most {baseline / least:.2f})"
    if baseline / reached < LOW:
        return f"not reached ({baseline / reached:.2f}, at most {baseline / least:.2f})"
    return f"reached ({baseline / reached:.2f})"


def row(*cells: object) -> None:
    print("| " + " | ".join(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells) + " |")


def head(*cells: str) -> None:
    row(*cells)
    row(*["---"] * len(cells))


def presets(names: list[str]) -> None:
    print(
        f"\n## Assumed costs: {PROMPTS} prompts x {GROUP} samples, {TIMESTEPS} timesteps, pack {PACK}; seconds, then ratios\n"
    )
    head("preset (assumed)", "bound", "verl-omni", "genrl", "genrl packed", *RUNGS, "at most", "M on generator+trainer")
    verdicts = []
    for name in names:
        cost = PRESETS[name]
        base, least = baselines(cost), bound(cost)
        found = [best(rung, cost) for rung in RUNGS]
        packed = base["genrl, packed"]
        ratios = [packed / period for period, _ in found]
        how = min(found)[1]
        row(name, least, base["verl-omni"], base["genrl"], packed, *ratios, packed / least, how)
        verdicts.append((name, *(verdict(value, min(found)[0], least) for value in base.values())))
    print(f"\n## {LOW} to {HIGH} times: over which baseline (assumed costs)\n")
    head("preset (assumed)", *(f"over {name}" for name in base))
    for line in verdicts:
        row(*line)


def made_up() -> None:
    """One thing varies at a time: 32 GPUs, 60 s per sample, 1 s per trained pair, no overheads, unless said otherwise."""
    plain = CostModel(60.0, TrainCost(0.0, 1.0), Pool(16), Pool(16), helper=1, switch=1.0, restore=1.0)
    print("\n## Where it comes from (made-up costs: 32 GPUs, 60 s per sample, 1 s per pair, switch + restore 2 s)\n")
    head("what varies", "bound", "best colocated", "best split", "ratio", "over the best colocated")

    def line(what: str, cost: CostModel, prompts: int = PROMPTS, group: int = GROUP) -> None:
        base, least = baselines(cost, prompts, group), bound(cost, prompts, group)
        colocated = min(base.values())
        split = min(best(rung, cost, prompts, group)[0] for rung in RUNGS)
        row(what, least, colocated, split, colocated / split, verdict(colocated, split, least))

    for prompts, group in ((1, 4), (1, 8), (2, 8), (3, 8), (4, 8), (5, 8), (8, 8)):
        line(f"{prompts * group} samples", plain, prompts, group)
    for heavy in (2.0, 4.0, 8.0):
        line(f"8 samples, {heavy:g} s per pair", replace(plain, train=TrainCost(0.0, heavy)), 1, 8)
    line("per-forward cost a = 4 s", replace(plain, train=TrainCost(4.0, 1.0)))
    for slow in (0.5, 0.25):
        line(f"trainer GPUs at {slow:g} of the speed", replace(plain, trainer=Pool(16, 1, slow)))
    print(
        "\nThe baseline is the faster of `genrl` and `verl-omni`, packed: only ceilings and unequal GPUs are left to win on."
    )
    print(
        "Over `verl-omni` alone a swap is won too: with T s per step and S s of swaps the ratio is at most (T + S)/T."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), choices=list(PRESETS), metavar="NAME")
    options = parser.parse_args()
    presets(options.presets)
    made_up()


if __name__ == "__main__":
    main()
