"""A digits pipeline of the shipped one's classes with a few thousand random weights, and settings of a run in seconds."""

import os
import time
from pathlib import Path
from typing import Any

import torch

from diffrl.rewards import TextReward, quoted

PROMPTS = ("12", "34", "56", "78")


def save_small_pipeline(folder: Path) -> Path:
    """Write it, and prompts.txt beside it; returns the pipeline's folder. The same weights every time."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    from diffrl.tasks import digits, pretrain

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = pretrain.build_tokenizer()
        pipe = StableDiffusion3Pipeline(
            transformer=SD3Transformer2DModel(
                sample_size=8,
                patch_size=2,
                in_channels=4,
                out_channels=4,
                num_layers=1,
                attention_head_dim=8,
                num_attention_heads=2,
                joint_attention_dim=64,
                caption_projection_dim=16,
                pooled_projection_dim=64,
                pos_embed_max_size=8,
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=pretrain.SHIFT),
            vae=AutoencoderKL(
                down_block_types=("DownEncoderBlock2D",) * 3,
                up_block_types=("UpDecoderBlock2D",) * 3,
                block_out_channels=(4, 4, 4),
                layers_per_block=1,
                latent_channels=4,
                norm_num_groups=2,
                sample_size=digits.WIDTH,
                use_quant_conv=False,
                use_post_quant_conv=False,
                mid_block_add_attention=False,
                force_upcast=False,
            ),
            text_encoder=pretrain.build_text_encoder(len(tokenizer), tokenizer.eos_token_id),
            tokenizer=tokenizer,
            text_encoder_2=pretrain.build_text_encoder(len(tokenizer), tokenizer.eos_token_id),
            tokenizer_2=tokenizer,
            text_encoder_3=None,
            tokenizer_3=None,
        )
        for name, p in pipe.transformer.named_parameters():
            if float(p.detach().abs().max()) == 0 and name.endswith("weight"):
                torch.nn.init.normal_(p, std=0.2)  # as built, the output is 0 whatever the adapter does
    pretrain.save_pipeline(pipe, folder / "pipe")
    (folder / "prompts.txt").write_text("".join(f'the number "{number}"\n' for number in PROMPTS))
    return folder / "pipe"


def small_settings(pipe: Path, **changed: Any) -> dict[str, Any]:
    """Fields of `settings.Settings`: four prompts, 2 x 4 samples, 3 steps, a reward without a model."""
    return {
        "model": str(pipe),
        "prompts": str(pipe.parent / "prompts.txt"),
        "reward": "jpeg_compressibility",
        "iterations": 5,
        "group_size": 4,
        "prompts_per_iteration": 2,
        "steps": 3,
        "learning_rate": 0.02,
        "trained_steps": "random:1/2",
        "lora_rank": 2,
        "lora_alpha": 6,
        "eval_every": 2,
        "eval_samples": 2,
        "checkpoint_every": 2,
        "threads": 1,
        **changed,
    }


def words(settings: dict[str, Any]) -> list[str]:
    """The same on the command line."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


def _engine(images: Any) -> list[str]:
    """Reads the brightness as one of sixteen numbers, those of PROMPTS among them: a function of the picture alone."""
    time.sleep(float(os.environ.get("SMALL_SLEEP", "0")))
    levels = [round(1000 * float(image.mean())) for image in images]
    return [f"{2 * (level % 4) + 1}{2 * (level // 4 % 4) + 2}" for level in levels]


reader = TextReward(quoted, _engine)
"""A reward that reads, without an OCR engine: `--reward small:reader`."""


def wrong_length(images: Any, prompts: Any) -> torch.Tensor:
    return torch.zeros(len(prompts) + 1)


def always_raises(images: Any, prompts: Any) -> torch.Tensor:
    raise RuntimeError("no weights\nof any kind")
