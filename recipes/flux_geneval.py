"""FLUX.1-dev counts and places objects: DiffusionART, GenEval-style reward (2610.12572: AdamW 3e-4, LoRA 32/64, 10 steps).

    DETECTOR=MODULE:FUNCTION python recipes/flux_geneval.py black-forest-labs/FLUX.1-dev prompts.txt

DETECTOR names your detect(image) -> [Object(label, score, box, colour)]; none is shipped. FACTS=metadata.jsonl is GenEval's own table of
prompts. Guidance is embedded, 3.5. Never run on the released weights here.
"""

import importlib
import os

from sd35_ocr import recipe

__all__ = ["recipe"]


def reward(device):
    from diffrl.rewards import geneval_facts, object_check

    module, _, name = os.environ["DETECTOR"].partition(":")
    return object_check(getattr(importlib.import_module(module), name), parse=geneval_facts(os.environ["FACTS"]))


if __name__ == "__main__":
    from command import main

    main(recipe, reward, __doc__)
