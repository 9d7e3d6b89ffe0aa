"""Group size and preferences: k = 2, 4, 8, 16 at an equal number of samples, scalar rewards against random pairs.

    python ablations/group_size.py [--quick]

ART on the noisiest three steps; 64 samples per iteration, as 32 prompts x 2 up to 4 prompts x 16. At k = 2 the two
directions are the same wherever the pair is no tie.
"""

from functools import partial

import common
from common import Run

from diffrl import algorithms as a

SIZES = (2, 4, 8, 16)
PIECES: common.Pieces = {
    **{f"scalar, k = {k}": partial(a.art_flash, noisiest=3) for k in SIZES},
    **{f"pairs, k = {k}": partial(a.art_pairwise, trained_steps=a.noisiest(3)) for k in SIZES},
}
RUNS = [
    Run(f"{kind}, k = {k}", seed, 1e-3, 20, group_size=k, prompts=64 // k)
    for seed in (0, 1, 2)
    for kind in ("scalar", "pairs")
    for k in SIZES
]

if __name__ == "__main__":
    panels = [("samples", "eval/exact_match"), ("samples", "eval/reward"), ("samples", "masked_fraction")]
    common.compare("group_size", __doc__, RUNS, panels=panels, finals_of=["eval/exact_match", "eval/reward"])
