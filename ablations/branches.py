"""Branches: DiffusionNFT's positive and negative branch, each alone and together.

    python ablations/branches.py [--quick]

Pure branches (`losses.nft_positive`, `nft_negative`) and the published modes, which clamp the advantages instead and keep
both branches. On-policy (no EMA) and with the published schedule; three random states of every trajectory are trained.
"""

from functools import partial

import common
from common import Run

from diffrl import algorithms as a
from diffrl.losses import nft_negative, nft_positive

three = partial(a.nft, steps_per_sample=3)
PIECES: common.Pieces = {
    "joint": three,
    "positive branch": partial(three, branches=nft_positive),
    "negative branch": partial(three, branches=nft_negative),
    "positive_only (published)": partial(a.nft_positive_only, steps_per_sample=3),
    "negative_only (published)": partial(a.nft_negative_only, steps_per_sample=3),
}
RUNS = [Run(name, seed, 1e-3, 20) for seed in (0, 1, 2) for name in PIECES]

if __name__ == "__main__":
    panels = [("samples", "eval/exact_match"), ("samples", "eval/reward"), ("samples", "drift_rms")]
    common.compare("branches", __doc__, RUNS, panels=panels, finals_of=["eval/exact_match", "eval/reward"])
