"""Wan2.1 image-to-video, step-distilled: DiffusionART, motion quality (2610.12572: AdamW 1e-5, every parameter, 4 steps, 32 x K).

    REWARD_URL=http://HOST:PORT python recipes/wan_i2v.py MODEL prompts.txt --images images.txt

One start image per prompt. MODEL: a step-distilled Wan2.1-I2V-14B in diffusers' format; a distilled model takes no guidance. K = 8 is ours.
Memory: as `hunyuan_video.py`. Never run on the released weights here.
"""

import os

import torch

from diffrl.algorithms import art
from diffrl.loop import train
from diffrl.models import from_pipeline

SIZE = {"height": 480, "width": 832, "frames": 53}


def recipe(
    pipe,
    prompts,
    reward,
    *,
    images,
    size=SIZE,
    lora=None,
    group_size=8,
    prompts_per_iteration=32,
    steps=4,
    seed=0,
    **more,
):
    torch.manual_seed(seed)
    model = from_pipeline(pipe, **size, lora=lora, guidance_scale=1.0, gradient_checkpointing=True)
    return model, train(
        model,
        art(radius=1e-5),
        prompts,
        reward,
        torch.optim.AdamW(model.params.values(), lr=1e-5),
        images=images,
        group_size=group_size,
        prompts_per_iteration=min(prompts_per_iteration, len(prompts)),
        steps=steps,
        seed=seed,
        micro_batch=1,
        rollout_chunk=1,
        **more,
    )


recipe.dtype = torch.float32


def reward(device):
    from diffrl.rewards import remote

    return remote(os.environ["REWARD_URL"], timeout=600)


if __name__ == "__main__":
    from command import main

    main(recipe, reward, __doc__)
