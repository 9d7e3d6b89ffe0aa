"""Trust region: with, without, at several radii, and two that adapt; how much the mask drops over time.

    python ablations/trust_region.py [--quick]

ART on all six steps at twice its usual learning rate. adaptive: the median of the KL proxy over the last 20 updates
(`trust_region.AdaptiveRadius`); adaptive per step: one median per step of the grid.
"""

from functools import partial

import common
from common import Run

from diffrl import algorithms as a
from diffrl.trust_region import AdaptiveRadius

PIECES: common.Pieces = {
    "no mask": partial(a.art, radius=float("inf")),
    "radius 1e-4": partial(a.art, radius=1e-4),
    "radius 1e-5 (paper)": a.art,
    "radius 1e-6": partial(a.art, radius=1e-6),
    "adaptive": lambda: a.art(radius=AdaptiveRadius()),
    "adaptive per step": lambda: a.art(radius=AdaptiveRadius(per_step=True)),
}
RUNS = [Run(name, seed, 2e-3, 25) for seed in (0, 1, 2) for name in PIECES]

if __name__ == "__main__":
    panels = [("samples", "eval/exact_match"), ("samples", "masked_fraction"), ("samples", "kl_proxy")]
    common.compare("trust_region", __doc__, RUNS, panels=panels, finals_of=["eval/exact_match", "masked_fraction"])
