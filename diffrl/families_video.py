"""The video families: Wan 2.1 text-to-video and image-to-video, HunyuanVideo. Each is one row of `VIDEOS`."""

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from diffrl.family import Family, Size, call_default, picture, require_multiple, unstandardised
from diffrl.types import Cond

TEXT_TOKENS = 512  # written into WanTransformer3DModel's attention


def _video_shape(pipe: Any, size: Size, channels: int, patch: Sequence[int]) -> tuple[int, ...]:
    space, time = pipe.vae_scale_factor_spatial, pipe.vae_scale_factor_temporal
    require_multiple(space * patch[1], height=size.height)
    require_multiple(space * patch[2], width=size.width)
    before = (size.frames or 1) - 1
    if before % time or (1 + before // time) % patch[0]:
        raise ValueError(f"frames must be 1 + a multiple of {time}, got {size.frames}")
    return (channels, 1 + before // time, size.height // space, size.width // space)


# Wan 2.1, and of 2.2 what has one network


def _wan_check(pipe: Any) -> None:
    config = pipe.config
    if (
        pipe.transformer is None
        or getattr(pipe, "transformer_2", None) is not None
        or config.boundary_ratio is not None
    ):
        raise ValueError(
            f"boundary_ratio={config.boundary_ratio}, transformer_2="
            f"{type(getattr(pipe, 'transformer_2', None)).__name__}: a pipeline of two networks (Wan 2.2 A14B) is two "
            "policies; pipelines with `transformer` alone are supported"
        )


def _wan_shape(pipe: Any, size: Size) -> tuple[int, ...]:
    config = pipe.transformer.config
    return _video_shape(pipe, size, config.in_channels, config.patch_size)


def _wan_encode(pipe: Any, prompt: str, length: int) -> dict[str, Tensor]:
    embeds, _ = pipe.encode_prompt(
        prompt=[prompt],
        do_classifier_free_guidance=False,
        max_sequence_length=length,
        device=pipe.text_encoder.device,
    )
    return {"encoder_hidden_states": embeds}


def _wan_predict(network: Callable, pipe: Any, size: Size, x: Tensor, timestep: Tensor, cond: Cond) -> Tensor:
    if pipe.config.expand_timesteps:  # Wan 2.2 5B reads one time per token; of text-to-video all are the same
        timestep = timestep[:, None].expand(-1, _wan_tokens(pipe, tuple(x.shape[1:])))
    return network(
        hidden_states=x,
        timestep=timestep,
        encoder_hidden_states=cond["encoder_hidden_states"],
        return_dict=False,
    )[0]


def _wan_decode(pipe: Any, size: Size, latents: Tensor) -> Any:
    videos = pipe.vae.decode(unstandardised(pipe, latents), return_dict=False)[0]
    return pipe.video_processor.postprocess_video(videos, output_type="np")


def _wan_tokens(pipe: Any, shape: tuple[int, ...]) -> int:
    t, h, w = pipe.transformer.config.patch_size
    return (shape[1] // t) * (shape[2] // h) * (shape[3] // w)


def _i2v_check(pipe: Any) -> None:
    _wan_check(pipe)
    if pipe.config.expand_timesteps:
        raise ValueError(
            "expand_timesteps=True (Wan 2.2 5B) keeps the image as the first latent frame, at time 0: not supported"
        )
    if importlib.util.find_spec("ftfy") is None:
        raise ValueError(
            "WanImageToVideoPipeline cleans its prompts with ftfy, which is not installed: pip install ftfy"
        )


def _i2v_shape(pipe: Any, size: Size) -> tuple[int, ...]:
    return _video_shape(pipe, size, pipe.vae.config.z_dim, pipe.transformer.config.patch_size)


def _i2v_encode(pipe: Any, prompt: str, length: int) -> dict[str, Tensor]:
    if pipe.transformer.config.image_dim is not None and length != TEXT_TOKENS:
        text = (
            f"max_sequence_length={length}: this network takes all but the last {TEXT_TOKENS} tokens of text and image"
        )
        warnings.warn(f"{text} for the image's, whatever they are; it was trained with {TEXT_TOKENS}", stacklevel=2)
    return _wan_encode(pipe, prompt, length)


def _i2v_image(pipe: Any, image: Any, size: Size) -> dict[str, Tensor]:
    """What follows from the first frame: its latents with a mask of which frames are given, and its CLIP embedding."""
    frame, device = picture(image), pipe.vae.device
    pixels = pipe.video_processor.preprocess(frame, height=size.height, width=size.width).to(device, torch.float32)
    noise = torch.zeros(1, *_i2v_shape(pipe, size), device=device)  # unused, and not drawn from the global generator
    _, condition = pipe.prepare_latents(
        pixels, 1, pipe.vae.config.z_dim, size.height, size.width, size.frames, torch.float32, device, None, noise
    )
    if pipe.transformer.config.image_dim is None:
        return {"condition": condition}
    if pipe.image_encoder is None:
        raise ValueError("this transformer reads a CLIP embedding of the image, and the pipeline has no image_encoder")
    return {"condition": condition, "encoder_hidden_states_image": pipe.encode_image(frame, device)}


def _i2v_predict(network: Callable, pipe: Any, size: Size, x: Tensor, timestep: Tensor, cond: Cond) -> Tensor:
    return network(
        hidden_states=torch.cat([x, cond["condition"]], 1),
        timestep=timestep,
        encoder_hidden_states=cond["encoder_hidden_states"],
        encoder_hidden_states_image=cond.get("encoder_hidden_states_image"),
        return_dict=False,
    )[0]


# HunyuanVideo


def _hunyuan_shape(pipe: Any, size: Size) -> tuple[int, ...]:
    config = pipe.transformer.config
    patch = (config.patch_size_t, config.patch_size, config.patch_size)
    return _video_shape(pipe, size, config.in_channels, patch)


def _hunyuan_encode(pipe: Any, prompt: str, length: int) -> dict[str, Tensor]:
    embeds, pooled, mask = pipe.encode_prompt(
        prompt=[prompt],
        prompt_template=call_default(pipe, "prompt_template"),
        device=pipe.text_encoder.device,
        max_sequence_length=length,
    )
    return {"encoder_hidden_states": embeds, "encoder_attention_mask": mask, "pooled_projections": pooled}


def _hunyuan_predict(network: Callable, pipe: Any, size: Size, x: Tensor, timestep: Tensor, cond: Cond) -> Tensor:
    guidance = cond.get("guidance")
    if guidance is not None:  # rounded as the pipeline does: in bf16 scale 6 is read as 6016
        guidance = (guidance / 1000).to(x.dtype) * 1000
    return network(
        hidden_states=x,
        timestep=timestep,
        encoder_hidden_states=cond["encoder_hidden_states"],
        encoder_attention_mask=cond["encoder_attention_mask"].to(x.dtype),
        pooled_projections=cond["pooled_projections"],
        guidance=guidance,
        return_dict=False,
    )[0]


def _hunyuan_decode(pipe: Any, size: Size, latents: Tensor) -> Any:
    videos = pipe.vae.decode(latents / pipe.vae.config.scaling_factor, return_dict=False)[0]
    return pipe.video_processor.postprocess_video(videos, output_type="np")


def _hunyuan_tokens(pipe: Any, shape: tuple[int, ...]) -> int:
    config = pipe.transformer.config
    return (shape[1] // config.patch_size_t) * (shape[2] // config.patch_size) * (shape[3] // config.patch_size)


def _hunyuan_unit(pipe: Any) -> float:
    return 1000.0 * pipe.transformer.config.guidance_embeds


WAN = Family(
    latent_shape=_wan_shape,
    encode=_wan_encode,
    predict=_wan_predict,
    decode=_wan_decode,
    tokens=_wan_tokens,
    timestep_scale=1000.0,
    guidance=5.0,
    video=True,
    check=_wan_check,
)

VIDEOS: dict[str, Family] = {
    "WanPipeline": WAN,
    "WanImageToVideoPipeline": WAN._replace(
        latent_shape=_i2v_shape,
        encode=_i2v_encode,
        predict=_i2v_predict,
        needs=("condition",),
        encode_image=_i2v_image,
        check=_i2v_check,
    ),
    "HunyuanVideoPipeline": Family(
        latent_shape=_hunyuan_shape,
        encode=_hunyuan_encode,
        predict=_hunyuan_predict,
        decode=_hunyuan_decode,
        tokens=_hunyuan_tokens,
        timestep_scale=1000.0,
        guidance=6.0,
        guide=None,
        twins=(),
        needs=("encoder_hidden_states", "encoder_attention_mask", "pooled_projections"),
        guidance_unit=_hunyuan_unit,
        video=True,
    ),
}
