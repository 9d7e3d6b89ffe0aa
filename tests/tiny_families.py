"""Tiny random pipelines of the other families: the real diffusers classes, a few thousand weights, no download.

Every factory is `(*, seed=0, scheduler=None, ...)`; `scheduler` replaces entries of the released configuration given here.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from tiny import CLIP_LENGTH, WORDS, fill_zeros, t5, tokenizer, vae

TOKENS = len(WORDS) + 4
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": TOKENS - 1}
FLUX_SCHEDULER = {
    "use_dynamic_shifting": True,
    "shift": 3.0,
    "base_image_seq_len": 4,
    "max_image_seq_len": 64,
    "base_shift": 0.5,
    "max_shift": 1.15,
}
QWEN_SCHEDULER = {
    "use_dynamic_shifting": True,
    "shift": 1.0,
    "time_shift_type": "exponential",
    "shift_terminal": 0.02,
    "base_image_seq_len": 4,
    "max_image_seq_len": 128,
    "base_shift": 0.5,
    "max_shift": 0.9,
}
SEED_OF_STATISTICS = 7


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def finished(pipe: Any) -> Any:
    """Nothing at zero, everything in train mode as built from a configuration, no progress bar."""
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            fill_zeros(part)
            part.train()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def euler(config: dict[str, Any], given: dict[str, Any] | None) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**{**config, **(given or {})})


def statistics(channels: int) -> dict[str, list[float]]:
    """Means and deviations of latents, none 0 or 1: forgotten ones are seen."""
    g = torch.Generator().manual_seed(SEED_OF_STATISTICS)
    mean, std = torch.randn(channels, generator=g), torch.rand(channels, generator=g) + 0.5
    return {"latents_mean": mean.tolist(), "latents_std": std.tolist()}


def clip_text(width: int = 32) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    sizes = {"hidden_size": width, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return CLIPTextModel(CLIPTextConfig(vocab_size=TOKENS, max_position_embeddings=77, **sizes, **IDS))


def flux(*, seed: int = 0, scheduler: dict[str, Any] | None = None, guidance_embeds: bool = True) -> Any:
    """FluxPipeline: VAE factor 2, packed by 2: 16 channels of (h/4)(w/4) tokens."""
    from diffusers import FluxPipeline, FluxTransformer2DModel

    with seeded(seed):
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            guidance_embeds=guidance_embeds,
            axes_dims_rope=(4, 4, 8),
        )
        return finished(
            FluxPipeline(
                scheduler=euler(FLUX_SCHEDULER, scheduler),
                vae=vae(),
                text_encoder=clip_text(),
                tokenizer=tokenizer(CLIP_LENGTH),
                text_encoder_2=t5(),
                tokenizer_2=tokenizer(512),
                transformer=transformer,
            )
        )


def umt5() -> Any:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(
        UMT5Config(vocab_size=TOKENS, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.5)
    )


def wan_parts(**transformer: Any) -> dict[str, Any]:
    from diffusers import AutoencoderKLWan, WanTransformer3DModel

    return {
        "tokenizer": tokenizer(512),
        "text_encoder": umt5(),
        "transformer": WanTransformer3DModel(
            **{
                "patch_size": (1, 2, 2),
                "num_attention_heads": 2,
                "attention_head_dim": 12,
                "in_channels": 16,
                "out_channels": 16,
                "text_dim": 32,
                "freq_dim": 256,
                "ffn_dim": 32,
                "num_layers": 2,
                "rope_max_seq_len": 32,
                **transformer,
            }
        ),
        "vae": AutoencoderKLWan(
            base_dim=3,
            z_dim=16,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            **statistics(16),
        ),
    }


def wan(*, seed: int = 0, scheduler: dict[str, Any] | None = None, transformer: dict | None = None, **config) -> Any:
    """WanPipeline: VAE factor 8 in space, 4 in time, patches of 2: multiples of 16, 1 + 4 k frames."""
    from diffusers import WanPipeline

    with seeded(seed):
        return finished(
            WanPipeline(**wan_parts(**(transformer or {})), scheduler=euler({"shift": 5.0}, scheduler), **config)
        )


def wan_i2v(*, seed: int = 0, scheduler: dict[str, Any] | None = None, clip: bool = True, **config: Any) -> Any:
    """WanImageToVideoPipeline; `clip=False` as where the network reads no embedding of the image."""
    from diffusers import WanImageToVideoPipeline
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    with seeded(seed):
        reads = {"image_dim": 4, "added_kv_proj_dim": 24} if clip else {}
        parts = wan_parts(in_channels=36, **reads)
        sizes = {"hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        if clip:
            parts["image_encoder"] = CLIPVisionModel(CLIPVisionConfig(image_size=32, patch_size=16, **sizes))
            parts["image_processor"] = CLIPImageProcessor(size=32, crop_size=32)
        return finished(WanImageToVideoPipeline(**parts, scheduler=euler({"shift": 3.0}, scheduler), **config))


def hunyuan(*, seed: int = 0, scheduler: dict[str, Any] | None = None, guidance_embeds: bool = True) -> Any:
    """HunyuanVideoPipeline: VAE factor 8 in space, 4 in time, no patches: multiples of 16 (the pipeline's), 1 + 4 k frames."""
    from diffusers import AutoencoderKLHunyuanVideo, HunyuanVideoPipeline, HunyuanVideoTransformer3DModel
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    with seeded(seed):
        transformer = HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=10,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            patch_size=1,
            patch_size_t=1,
            guidance_embeds=guidance_embeds,
            text_embed_dim=16,
            pooled_projection_dim=8,
            rope_axes_dim=(2, 4, 4),
        )
        autoencoder = AutoencoderKLHunyuanVideo(
            latent_channels=4,
            down_block_types=("HunyuanVideoDownBlock3D",) * 4,
            up_block_types=("HunyuanVideoUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            norm_num_groups=4,
            spatial_compression_ratio=8,
            temporal_compression_ratio=4,
            scaling_factor=0.7,
        )
        return finished(
            HunyuanVideoPipeline(
                text_encoder=LlamaModel(LlamaConfig(vocab_size=TOKENS, **sizes, **IDS)),
                tokenizer=tokenizer(512),
                transformer=transformer,
                vae=autoencoder,
                scheduler=euler({"shift": 7.0}, scheduler),
                text_encoder_2=clip_text(8),
                tokenizer_2=tokenizer(77),
            )
        )


def qwen_text() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    rope = {"rope_theta": 1e6, "type": "default", "rope_type": "default", "mrope_section": [2, 3, 3]}
    text = {**sizes, "num_key_value_heads": 2, "vocab_size": TOKENS, "rope_parameters": rope, **IDS}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "window_size": 8,
    }
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def qwen(*, seed: int = 0, scheduler: dict[str, Any] | None = None, **transformer: Any) -> Any:
    """QwenImagePipeline: VAE factor 4, packed by 2: 16 channels of (h/8)(w/8) tokens."""
    from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel

    with seeded(seed):
        network = QwenImageTransformer2DModel(
            **{
                "patch_size": 2,
                "in_channels": 16,
                "out_channels": 4,
                "num_layers": 2,
                "attention_head_dim": 16,
                "num_attention_heads": 2,
                "joint_attention_dim": 32,
                "axes_dims_rope": (8, 4, 4),
                **transformer,
            }
        )
        autoencoder = AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 2, 4],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            **statistics(4),
        )
        return finished(
            QwenImagePipeline(
                scheduler=euler(QWEN_SCHEDULER, scheduler),
                vae=autoencoder,
                text_encoder=qwen_text(),
                tokenizer=tokenizer(1058),
                transformer=network,
            )
        )


def sana(*, seed: int = 0, scheduler: dict[str, Any] | None = None, **transformer: Any) -> Any:
    """SanaPipeline: VAE factor 2, no patches; the pipeline itself wants multiples of 32."""
    from diffusers import AutoencoderDC, SanaPipeline, SanaTransformer2DModel
    from transformers import Gemma2Config, Gemma2Model

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with seeded(seed):
        network = SanaTransformer2DModel(
            **{
                "patch_size": 1,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 1,
                "num_attention_heads": 2,
                "attention_head_dim": 4,
                "num_cross_attention_heads": 2,
                "cross_attention_head_dim": 4,
                "cross_attention_dim": 8,
                "caption_channels": 8,
                "sample_size": 32,
                **transformer,
            }
        )
        autoencoder = AutoencoderDC(
            in_channels=3,
            latent_channels=4,
            attention_head_dim=2,
            encoder_block_types=("ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "EfficientViTBlock"),
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            encoder_qkv_multiscales=((), (5,)),
            decoder_qkv_multiscales=((), (5,)),
            encoder_layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1),
            downsample_block_type="conv",
            upsample_block_type="interpolate",
            decoder_norm_types="rms_norm",
            decoder_act_fns="silu",
            scaling_factor=0.41407,
        )
        text = Gemma2Config(vocab_size=TOKENS, head_dim=4, num_key_value_heads=2, **sizes, **IDS)
        return finished(
            SanaPipeline(
                tokenizer=tokenizer(512),
                text_encoder=Gemma2Model(text),
                vae=autoencoder,
                transformer=network,
                scheduler=euler({"shift": 3.0}, scheduler),
            )
        )


FACTORIES = {"flux": flux, "wan": wan, "wan_i2v": wan_i2v, "hunyuan": hunyuan, "qwen": qwen, "sana": sana}
