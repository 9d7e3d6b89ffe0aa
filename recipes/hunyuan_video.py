"""HunyuanVideo: DiffusionART, visual and motion quality 1:1 (2610.12572: AdamW 1e-5, every parameter, 16 steps, 53 frames, 32 x 8).

    REWARD_URL=http://HOST:PORT python recipes/hunyuan_video.py hunyuanvideo-community/HunyuanVideo prompts.txt

The scorer (VideoReward: VQ, MQ) runs elsewhere behind `python -m diffrl.reward_server`. Every parameter in float32 with Adam's moments is 16
bytes each, 208 GB of a 13 B transformer: lora={"r": 32, "lora_alpha": 64} is for smaller machines. Never run on the released weights here.
"""

import os

import torch

from diffrl.algorithms import art
from diffrl.loop import train
from diffrl.models import from_pipeline

SIZE = {"height": 320, "width": 512, "frames": 53}


def recipe(
    pipe, prompts, reward, *, size=SIZE, lora=None, group_size=8, prompts_per_iteration=32, steps=16, seed=0, **more
):
    torch.manual_seed(seed)
    model = from_pipeline(pipe, **size, lora=lora, gradient_checkpointing=True)
    return model, train(
        model,
        art(radius=1e-5),
        prompts,
        reward,
        torch.optim.AdamW(model.params.values(), lr=1e-5),
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
