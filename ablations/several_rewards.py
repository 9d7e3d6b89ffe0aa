"""Several rewards that conflict: read the number, compress well, use much ink. One covariance, or one direction each?

    python ablations/several_rewards.py [--quick]

ART on the noisiest three steps; rewards OCR, minus the kilobytes of a JPEG, mean darkness. sum of rewards (paper): one
covariance of their sum on raw scores; sum of directions: each at unit RMS; PCGrad: conflicting parts projected out; minimum
norm: the convex combination of smallest norm, which raises all rewards to first order or is dead. (With two rewards at unit
RMS the last three are one and the same direction.)
"""

from functools import partial

import common
from common import Run

from diffrl import algorithms as a
from diffrl import conflicts as c
from diffrl.extensions import several_rewards_credit


def mixed(direction) -> a.Algorithm:
    return a.art_flash(noisiest=3)._replace(credit=several_rewards_credit(direction))


PIECES: common.Pieces = {
    "sum of rewards (paper)": partial(mixed, c.sum_of_rewards),
    "sum of directions": partial(mixed, c.sum_of_directions),
    "PCGrad": partial(mixed, c.pcgrad),
    "minimum norm": partial(mixed, c.min_norm),
}
RUNS = [Run(name, seed, 1e-3, 16, task="ocr+jpeg+ink", eval_every=8) for seed in (0, 1, 2) for name in PIECES]

if __name__ == "__main__":
    panels = [("samples", "eval/exact_match"), ("samples", "eval/jpeg"), ("samples", "eval/ink")]
    common.compare(
        "several_rewards", __doc__, RUNS, panels=panels, finals_of=["eval/exact_match", "eval/jpeg", "eval/ink"]
    )
