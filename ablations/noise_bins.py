"""Directions per noise level: one G for all states of a prompt, or one per step of the grid?

    python ablations/noise_bins.py [--quick]

All pieces train the six steps' states. ODE states: the paper. Fresh noise, one G: the paper's direction on states of the
forward process. Per step: `extensions.binned_credit`, one RMS over all steps (directions fade toward the data) or RMS 1
at each.
"""

from functools import partial

import common
from common import Run

from diffrl import algorithms as a
from diffrl import extensions as e
from diffrl.directions import bin_rms, joint_rms
from diffrl.rollouts import collect_renoised
from diffrl.sampling import euler_step

PIECES: common.Pieces = {
    "ODE states, one G (paper)": a.art,
    "noisier half, one G": lambda: a.art(trained_steps=e.first_half),
    "fresh noise, one G": lambda: a.art()._replace(collect=collect_renoised(step=euler_step)),
    "fresh noise, per step, joint RMS": partial(e.art_binned, trained_steps=a.all_steps, normalise=joint_rms),
    "fresh noise, per step, own RMS": partial(e.art_binned, trained_steps=a.all_steps, normalise=bin_rms),
}
RUNS = [Run(name, seed, 1e-3, 24, eval_every=8) for seed in (0, 1, 2) for name in PIECES]

if __name__ == "__main__":
    panels = [("samples", "eval/exact_match"), ("samples", "eval/reward"), ("samples", "drift_rms")]
    common.compare("noise_bins", __doc__, RUNS, panels=panels, finals_of=["eval/exact_match", "eval/reward"])
