"""Stages on the float64 toy that die, hang or raise once where a file of that name lies in a folder. No tests here.

Built in each actor by itself: only the folder's name travels.
"""

import os
import time
from functools import partial
from pathlib import Path

import torch
from toys import wide

from diffrl.algorithms import art
from diffrl.executors import AlgorithmStages
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model


class Mortal(AlgorithmStages):
    """folder/generate, folder/score, folder/commit, ...: the next such call unlinks it and does what it says."""

    folder = Path("/nonexistent")

    def meet(self, kind: str) -> None:
        path = self.folder / kind
        try:
            what = path.read_text()
            path.unlink()
        except OSError:
            return
        if what == "die":
            os._exit(1)
        if what == "hang":
            time.sleep(60)
        raise RuntimeError(what)

    def generate(self, *args):
        self.meet("generate")
        return super().generate(*args)

    def score(self, *args):
        self.meet("score")
        return super().score(*args)

    def accumulate(self, *args):
        told = super().accumulate(*args)
        self.meet("accumulate")
        return told

    def commit(self, *args):
        self.meet("commit")
        return super().commit(*args)


def build(folder: str | Path, **options) -> Mortal:
    model = toy_model(dtype=torch.float64)
    optimizer = torch.optim.Adam(list(model.params.values()), lr=0.06)
    options = {"group_size": 4, "steps": 5, "seed": 0, **options}
    stages = Mortal(model, wide(art()), PROMPTS[:2], toward_compass, optimizer, **options)
    stages.folder = Path(folder)
    return stages


def builder(folder: str | Path):
    return partial(build, str(folder))
