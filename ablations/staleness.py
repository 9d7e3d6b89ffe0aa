"""Trajectory-consistent staleness (TCSS): does learning survive fragments that are one version old?

    python ablations/staleness.py [--quick]

The batch of eight prompts is cut into four fragments of two prompts; the first K of every iteration but the first are rolled
out by the behaviour policy of the iteration before, each whole trajectory under one version, and trained with the velocities and
log-probabilities stored then. A real schedule with stale=K makes at most K fragments stale, depending on the clock; here always K
are, the worst case, so that a run is a function of its seed. K = 0 is the plain loop. Five seeds.
"""

from functools import partial

import common
from common import Run

from diffrl import algorithms as a
from diffrl.ranks import joined

FRAGMENTS = 4


def stale(algorithm: a.Algorithm, fragments: int) -> a.Algorithm:
    """The algorithm with the first `fragments` of FRAGMENTS equal runs of prompts collected one version late."""
    held: dict = {}

    def collect(velocity, behaviour, cond, seeds, score):
        before, held["params"] = held.get("params"), {n: p.detach().clone() for n, p in behaviour.items()}
        late = len(seeds) * fragments // FRAGMENTS
        if before is None or late == 0:
            return algorithm.collect(velocity, behaviour, cond, seeds, score)
        parts = []
        for params, rows in ((before, slice(0, late)), (behaviour, slice(late, len(seeds)))):
            told = {n: v[rows] for n, v in cond.items()}
            if len(seeds[rows]):
                scored = partial(lambda latents, prompt, first: score(latents, prompt + first), first=rows.start)
                parts.append(algorithm.collect(velocity, params, told, seeds[rows], scored))
        return parts[0] if len(parts) == 1 else joined(parts)

    return algorithm._replace(collect=collect)


PIECES: common.Pieces = {
    **{f"ART, K = {k}": (lambda k=k: stale(a.art(), k)) for k in (0, 1, 2, 4)},
    **{f"Flow-GRPO, K = {k}": (lambda k=k: stale(a.flow_grpo(), k)) for k in (0, 1, 4)},
}
RUNS = [Run(name, seed, 1e-3, 20) for seed in range(5) for name in PIECES]

if __name__ == "__main__":
    panels = [("samples", "eval/exact_match"), ("samples", "reward/mean"), ("samples", "masked_fraction")]
    common.compare("staleness", __doc__, RUNS, panels=panels, finals_of=["eval/exact_match", "eval/reward"])
