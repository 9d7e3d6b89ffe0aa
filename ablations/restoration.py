"""Restoration: what holds the policy back to where it was? Updates on a frozen target, an EMA, or nothing.

    python ablations/restoration.py [--quick]

ART on the noisiest three steps at twice its usual learning rate, so that a missing restoration shows: one, two and four
updates on one frozen target; two updates without the anchor (the target is the *live* velocity minus G: guidance alone); one
update with the behaviour policy an EMA of three retentions; DiffusionNFT on-policy with one and two updates.
"""

from functools import partial

import common
from common import Run

from diffrl import algorithms as a
from diffrl.losses import velocity_matching
from diffrl.states import drift_rms, finite_states, has_reward, window_states


def unanchored(velocity, params, window):
    """guided_regression with the live velocity in v_old's place: the force is h_G at every update, restoration none."""
    s, usable = finite_states(window_states(window), has_reward(window))
    v = velocity(params, s.x_t, s.t, s.cond)
    target = v.detach() - window.credit["direction"].to(v)[s.rows]
    keep = (window.credit["alive"] & has_reward(window))[s.rows]
    return velocity_matching(v, target), keep, {"drift_rms": drift_rms(v, s.v_old, usable)}


def lagged(retention: float) -> a.Algorithm:
    """One update per rollout, the behaviour policy an EMA."""
    return a.art_flash(noisiest=3, updates=1)._replace(behaviour=a.lagging(lambda i: retention))


PIECES: common.Pieces = {
    "two updates (paper)": partial(a.art_flash, noisiest=3),
    "one update": partial(a.art_flash, noisiest=3, updates=1),
    "four updates": partial(a.art_flash, noisiest=3, updates=4),
    "two updates, no anchor": lambda: a.art_flash(noisiest=3)._replace(objective=unanchored),
    "one update, EMA .5": partial(lagged, 0.5),
    "one update, EMA .9": partial(lagged, 0.9),
    "NFT on-policy, one update": partial(a.nft, decay=lambda i: 0.0, trained_steps=a.noisiest(3)),
    "NFT on-policy, two updates": partial(a.nft, decay=lambda i: 0.0, trained_steps=a.noisiest(3), updates=2),
}
RUNS = [Run(name, seed, 2e-3, 30) for seed in (0, 1, 2) for name in PIECES]

if __name__ == "__main__":
    panels = [("samples", "eval/exact_match"), ("optimizer_steps", "eval/exact_match"), ("samples", "drift_rms")]
    common.compare("restoration", __doc__, RUNS, panels=panels, finals_of=["eval/exact_match", "eval/reward"])
