"""What overlap gains over the same engines one after the other: `python benchmarks/overlap.py [--engine in_process]`.

The digits task with its OCR reward on a generator, a trainer and a reward actor of one thread each (Ray; or threads of this process,
where rollout and training share one module and take turns, so that only the reward overlaps). Baseline: the serial split, one fragment
behind a barrier: rollout, then reward, then training. Then the batch in fragments (GAP), and with the first K fragments of the next
step started one version early (TCSS). Schedules alternate over --rounds; a step's seconds are the median over all but each run's
first two steps, and the gain is the median over rounds of the ratio within a round. ART with one update, whole prompts per fragment.
"""

import argparse
import itertools
import json
import os
import statistics
import time
from functools import partial

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from executors import backend_of, one_update
from tqdm import tqdm

from diffrl.executors import run
from diffrl.parallel import Schedule, prompt_partition
from diffrl.settings import Settings


def schedules(s: Settings, fragments: int) -> dict[str, Schedule]:
    """Name -> schedule of the same batch."""
    one, cut = (prompt_partition(s.prompts_per_iteration, s.group_size, fragments=m) for m in (1, fragments))
    make = partial(
        Schedule, group_size=s.group_size, timesteps=s.steps, pack=s.prompts_per_iteration * s.group_size * s.steps
    )
    return {
        "serial split": make(one, barrier=True),
        f"GAP, {fragments} fragments": make(cut),
        "GAP + TCSS, K = 1": make(cut, stale=1),
        f"GAP + TCSS, K = {fragments}": make(cut, stale=fragments),
    }


def seconds_per_step(schedule: Schedule, s: Settings, options: argparse.Namespace) -> tuple[float, dict[str, float]]:
    """Median seconds between the ends of two steps, and the busy share of each resource after the first two steps."""
    backend = backend_of(options, s)
    *_, last = run(schedule, one_update(s), steps=options.steps, backend=backend)
    after = last.trace.ends[1:]
    busy: dict[str, float] = {}
    for i in last.trace.intervals:
        if i.start >= after[0]:
            busy[i.resource] = busy.get(i.resource, 0.0) + i.end - i.start
    shares = {name: seconds / (after[-1] - after[0]) for name, seconds in sorted(busy.items())}
    return statistics.median(b - a for a, b in itertools.pairwise(after)), shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=["in_process", "ray"], default="ray")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="per run; the first two do not count")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--fragments", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="every measurement as one JSON object")
    options = parser.parse_args()
    if options.steps < 4:
        parser.error(f"--steps must be at least 4, got {options.steps}")
    s = Settings(
        threads=1,
        engine=options.engine,
        group_size=options.group_size,
        prompts_per_iteration=options.prompts,
        steps=6,
        trained_steps="all",
        fragments=options.fragments,
    )
    kinds = schedules(s, options.fragments)
    found: dict[str, list[float]] = {name: [] for name in kinds}
    shares: dict[str, dict[str, float]] = {}
    began = time.perf_counter()
    for _ in tqdm(range(options.rounds), desc="rounds"):
        for name, schedule in kinds.items():
            seconds, shares[name] = seconds_per_step(schedule, s, options)
            found[name].append(seconds)
    if options.json:
        print(json.dumps({"seconds_per_step": found, "busy": shares, "engine": options.engine}))
        return
    print(
        f"| {options.engine}, {options.prompts} x {options.group_size} samples | s per step | gain | busy, last round |"
    )
    print("|---|---|---|---|")
    base = found["serial split"]
    for name, values in found.items():
        gain = statistics.median(b / v for b, v in zip(base, values))
        used = ", ".join(f"{pool} {share:.0%}" for pool, share in shares[name].items())
        print(f"| {name} | {statistics.median(values):.2f} | {gain:.2f} | {used} |")
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
