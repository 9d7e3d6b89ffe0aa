"""Shrinkage and spread: what a group of eight says is mostly noise; does weighing it down help?

    python ablations/shrinkage.py [--quick]

ART on the noisiest three steps, with other directions or group weights (`diffrl.directions`; the equation of each in its
docstring). Learning rate 2e-3, where the plain method swings.
"""

from functools import partial

import common
from common import Run

from diffrl import algorithms as a
from diffrl import directions as d
from diffrl.credits import covariance_credit

base = partial(a.art_flash, noisiest=3)


def credited(**settings) -> a.Algorithm:
    return base()._replace(credit=covariance_credit(**settings))


PIECES: common.Pieces = {
    "unit RMS per group (paper)": base,
    "one RMS per batch": partial(credited, direction=d.batch_rms),
    "spread weight": partial(credited, weight=d.spread_weight),
    "signal fraction x G": partial(credited, direction=d.shrink_scale),
    "signal fraction as weight": partial(credited, weight=d.signal_weight),
    "toward the batch mean": partial(credited, direction=d.shrink_toward_batch),
}
RUNS = [Run(name, seed, 2e-3, 25) for seed in (0, 1, 2) for name in PIECES]

if __name__ == "__main__":
    panels = [("samples", "eval/exact_match"), ("samples", "eval/reward"), ("samples", "drift_rms")]
    common.compare("shrinkage", __doc__, RUNS, panels=panels, finals_of=["eval/exact_match", "eval/reward"])
