"""SANA by Sol-RL: 96 NVFP4 drafts of 6 steps per prompt, the best and worst 12 regenerated in 10, DiffusionNFT's loss (2604.06916).

    python recipes/sana_sol_rl.py Efficient-Large-Model/Sana_1600M_512px_diffusers prompts.txt

Published: 48 prompts, AdamW 3e-4, LoRA 32/64, gradient norm 1, the skip list and smallest size of `quant.PUBLISHED_*`. Without FP4 hardware
the draft is emulated and slower than the policy. HPSv2 as in the paper. Never run on the released weights here.
"""

import torch

from diffrl.algorithms import nft, sol_rl
from diffrl.drafts import merged_draft
from diffrl.loop import train
from diffrl.models import from_pipeline
from diffrl.quant import PUBLISHED_MIN_DIM, PUBLISHED_SKIP
from diffrl.sampling import euler_step

SIZE = {"height": 512, "width": 512}


def recipe(pipe, prompts, reward, *, size=SIZE, pool=96, keep=12, prompts_per_iteration=48, steps=10, seed=0, **more):
    torch.manual_seed(seed)
    model = from_pipeline(
        pipe, **size, lora={"r": 32, "lora_alpha": 64}, guidance_scale=1.0, gradient_checkpointing=True
    )
    draft = merged_draft(model, skip=PUBLISHED_SKIP["SANA"], min_dim=PUBLISHED_MIN_DIM["SANA"])
    print(
        f"draft: {len(draft.report.converted)} layers converted, {len(draft.report.skipped)} not, {draft.report.backend}"
    )
    return model, train(
        model,
        sol_rl(nft(step=euler_step), draft=draft, pool=pool, keep=keep, draft_steps=6, chunk=16, audit_every=20),
        prompts,
        reward,
        torch.optim.AdamW(model.params.values(), lr=3e-4),
        group_size=2 * keep,
        prompts_per_iteration=min(prompts_per_iteration, len(prompts)),
        steps=steps,
        seed=seed,
        micro_batch=4,
        rollout_chunk=16,
        **more,
    )


def reward(device):
    from diffrl.rewards import load_hps_v2

    return load_hps_v2(device=device)


if __name__ == "__main__":
    from command import main

    main(recipe, reward, __doc__)
