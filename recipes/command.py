"""What the recipes share: a pipeline from a folder or the hub, prompts from a file, a progress line, the adapter at the end."""

import argparse
import inspect
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch


def main(recipe: Callable[..., tuple[Any, Iterator[dict[str, float]]]], reward: Callable[[str], Any], doc: str) -> None:
    """python recipes/NAME.py MODEL PROMPTS [options]: run `recipe(pipe, prompts, reward, ...)` and export what it trained.

    reward: (device) -> the reward. Images, one file name per line in the order of the prompts, for image-to-video.
    """
    from diffusers import DiffusionPipeline
    from tqdm import tqdm

    from diffrl.settings import read_images, read_prompts

    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a saved pipeline or a hub id")
    parser.add_argument("prompts", help="file with one prompt per line")
    parser.add_argument("--images", help="file with one image file per line, for image-to-video")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--output", default="trained", help="folder of the exported weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if Path(options.output).is_file():
        parser.error(f"--output {options.output!r} is a file, not a folder")
    if ("images" in inspect.signature(recipe).parameters) != bool(options.images):
        parser.error("--images is needed by image-to-video, and by nothing else")
    # full fine-tuning needs float32 weights: the recipe says so of itself
    dtype = getattr(recipe, "dtype", torch.bfloat16)
    pipe = DiffusionPipeline.from_pretrained(options.model, dtype=dtype).to(options.device)
    prompts = read_prompts(options.prompts)
    more = {"images": read_images(options.images, len(prompts))} if options.images else {}
    model, training = recipe(pipe, prompts, reward(options.device), **more)
    try:
        with tqdm(itertools.islice(training, options.iterations), total=options.iterations) as bar:
            for row in bar:
                bar.set_postfix_str(f"reward {row['reward/mean']:.4f}, dead {row['groups/dead']:.2f}")
    except KeyboardInterrupt:
        print("interrupted: what was trained so far is written")
    print(model.export(options.output))
