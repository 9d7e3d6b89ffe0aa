"""Stable Diffusion 3.5 Medium towards human preference: DiffusionART, PickScore (2610.12572: settings of `sd35_ocr.py`).

    python recipes/sd35_pickscore.py stabilityai/stable-diffusion-3.5-medium prompts.txt

Never run on the released weights here.
"""

from sd35_ocr import recipe

__all__ = ["recipe"]


def reward(device):
    from diffrl.rewards import load_pick_score

    return load_pick_score(device=device)


if __name__ == "__main__":
    from command import main

    main(recipe, reward, __doc__)
