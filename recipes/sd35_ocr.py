"""Stable Diffusion 3.5 Medium learns to write: DiffusionART, OCR reward (2610.12572: AdamW 3e-4, LoRA 32/64, 10 steps, 32 prompts).

    python recipes/sd35_ocr.py stabilityai/stable-diffusion-3.5-medium prompts.txt     each prompt with its text in quotes

The paper leaves the group size open (32 x K); 24 is Flow-GRPO's. Never run on the released weights here.
"""

import torch

from diffrl.algorithms import art
from diffrl.loop import train
from diffrl.models import from_pipeline

SIZE = {"height": 512, "width": 512}


def recipe(pipe, prompts, reward, *, size=SIZE, group_size=24, prompts_per_iteration=32, steps=10, seed=0, **more):
    torch.manual_seed(seed)
    model = from_pipeline(pipe, **size, lora={"r": 32, "lora_alpha": 64}, gradient_checkpointing=True)
    return model, train(
        model,
        art(radius=1e-5),
        prompts,
        reward,
        torch.optim.AdamW(model.params.values(), lr=3e-4),
        group_size=group_size,
        prompts_per_iteration=min(prompts_per_iteration, len(prompts)),
        steps=steps,
        seed=seed,
        micro_batch=4,
        rollout_chunk=8,
        **more,
    )


def reward(device):
    from diffrl.rewards import ocr

    return ocr()


if __name__ == "__main__":
    from command import main

    main(recipe, reward, __doc__)
