"""Diversity: ART moves every sample of a prompt the same way. What does that cost?

    python ablations/diversity.py [--quick]

Mean pairwise RMS distance and participation ratio of eight samples of a prompt (`diffrl.diversity`, on latents, ten
prompts, held-out seeds), beside the reward. At learning rates at which the three learn about equally fast.
"""

from functools import partial

import common
from common import Run

from diffrl import algorithms as a

PIECES: common.Pieces = {
    "ART": a.art,
    "ART flash 3": partial(a.art_flash, noisiest=3),
    "NFT": partial(a.nft, steps_per_sample=3),
    "AWM": partial(a.awm, steps_per_sample=3),
    "Flow-GRPO": partial(a.flow_grpo, steps_per_sample=3),
}
RUNS = [Run(name, seed, 1e-3, 16, eval_every=8, diversity=True) for seed in (0, 1, 2) for name in PIECES]

if __name__ == "__main__":
    panels = [("samples", "eval/exact_match"), ("samples", "eval/pairwise_distance")]
    panels += [("samples", "eval/participation_ratio")]
    finals_of = ["eval/exact_match", "eval/pairwise_distance", "eval/participation_ratio"]
    common.compare("diversity", __doc__, RUNS, panels=panels, finals_of=finals_of)
