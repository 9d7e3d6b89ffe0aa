"""The image families: Stable Diffusion 3, FLUX, Qwen-Image, Sana. Each is one row of `IMAGES` and a few functions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diffrl.checks import promote, require_number
from diffrl.family import Family, Size, call_default, require_multiple, unstandardised
from diffrl.types import Cond, Params, Velocity

# Stable Diffusion 3, 3.5


def _sd3_shape(pipe: Any, size: Size) -> tuple[int, ...]:
    config, factor = pipe.transformer.config, pipe.vae_scale_factor
    require_multiple(factor * config.patch_size, height=size.height, width=size.width)
    longest = factor * config.patch_size * config.pos_embed_max_size
    if max(size.height, size.width) > longest:
        raise ValueError(
            f"height {size.height}, width {size.width}: this transformer has positions up to {longest} pixels"
        )
    return (config.in_channels, size.height // factor, size.width // factor)


def _sd3_encode(pipe: Any, prompt: str, length: int) -> dict[str, Tensor]:
    embeds, _, pooled, _ = pipe.encode_prompt(
        prompt=[prompt],
        prompt_2=None,
        prompt_3=None,
        device=pipe.text_encoder.device,
        do_classifier_free_guidance=False,
        max_sequence_length=length,
    )
    return {"encoder_hidden_states": embeds, "pooled_projections": pooled}


def _sd3_predict(network: Callable, pipe: Any, size: Size, x: Tensor, timestep: Tensor, cond: Cond) -> Tensor:
    return network(
        hidden_states=x,
        timestep=timestep,
        encoder_hidden_states=cond["encoder_hidden_states"],
        pooled_projections=cond["pooled_projections"],
        return_dict=False,
    )[0]


def _sd3_decode(pipe: Any, size: Size, latents: Tensor) -> Any:
    config = pipe.vae.config
    images = pipe.vae.decode(latents / config.scaling_factor + (config.shift_factor or 0.0), return_dict=False)[0]
    return pipe.image_processor.postprocess(images, output_type="np")


def _patched(pipe: Any, shape: tuple[int, ...]) -> int:
    patch = pipe.transformer.config.patch_size
    return (shape[1] // patch) * (shape[2] // patch)


# FLUX.1, and what it shares with Qwen-Image: latents packed two by two into tokens


def _packed_shape(pipe: Any, size: Size) -> tuple[int, ...]:
    factor = 2 * pipe.vae_scale_factor
    require_multiple(factor, height=size.height, width=size.width)
    return ((size.height // factor) * (size.width // factor), pipe.transformer.config.in_channels)


def _packed_tokens(pipe: Any, shape: tuple[int, ...]) -> int:
    return shape[0]


def _flux_encode(pipe: Any, prompt: str, length: int) -> dict[str, Tensor]:
    embeds, pooled, _ = pipe.encode_prompt(
        prompt=[prompt], prompt_2=None, device=pipe.text_encoder.device, max_sequence_length=length
    )
    return {"encoder_hidden_states": embeds, "pooled_projections": pooled}


def _flux_predict(network: Callable, pipe: Any, size: Size, x: Tensor, timestep: Tensor, cond: Cond) -> Tensor:
    embeds, factor = cond["encoder_hidden_states"], 2 * pipe.vae_scale_factor
    rows, columns = size.height // factor, size.width // factor
    return network(
        hidden_states=x,
        timestep=timestep,
        guidance=cond.get("guidance"),
        encoder_hidden_states=embeds,
        pooled_projections=cond["pooled_projections"],
        txt_ids=embeds.new_zeros(embeds.shape[1], 3),
        img_ids=pipe._prepare_latent_image_ids(len(x), rows, columns, x.device, x.dtype),
        return_dict=False,
    )[0]


def _flux_decode(pipe: Any, size: Size, latents: Tensor) -> Any:
    return _sd3_decode(pipe, size, pipe._unpack_latents(latents, size.height, size.width, pipe.vae_scale_factor))


def _flux_unit(pipe: Any) -> float:
    return float(pipe.transformer.config.guidance_embeds)


# Qwen-Image


def _qwen_check(pipe: Any) -> None:
    config = pipe.transformer.config
    for name in ("guidance_embeds", "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope"):
        if config.get(name):
            raise ValueError(f"this Qwen transformer has {name}={config[name]}: text-to-image without it is supported")


def _qwen_encode(pipe: Any, prompt: str, length: int) -> dict[str, Tensor]:
    embeds, mask = pipe.encode_prompt(
        prompt=[prompt], device=pipe.text_encoder.device, max_sequence_length=length
    )  # as long as the prompt, and no mask where all of it counts: rows of a batch need one length
    mask = torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device) if mask is None else mask
    missing = length - embeds.shape[1]
    return {
        "encoder_hidden_states": torch.nn.functional.pad(embeds, (0, 0, 0, missing)),
        "encoder_hidden_states_mask": torch.nn.functional.pad(mask, (0, missing)),
    }


def _qwen_negative(pipe: Any, prompt: str, length: int) -> dict[str, Tensor]:
    return _qwen_encode(
        pipe, prompt or " ", length
    )  # its authors' empty prompt; to the pipeline none means no guidance


def _qwen_predict(network: Callable, pipe: Any, size: Size, x: Tensor, timestep: Tensor, cond: Cond) -> Tensor:
    factor = 2 * pipe.vae_scale_factor
    return network(
        hidden_states=x,
        timestep=timestep,
        encoder_hidden_states=cond["encoder_hidden_states"],
        encoder_hidden_states_mask=cond["encoder_hidden_states_mask"],
        img_shapes=[[(1, size.height // factor, size.width // factor)]] * len(x),
        return_dict=False,
    )[0]


def _qwen_decode(pipe: Any, size: Size, latents: Tensor) -> Any:
    frames = pipe._unpack_latents(latents, size.height, size.width, pipe.vae_scale_factor)  # one frame
    images = pipe.vae.decode(unstandardised(pipe, frames), return_dict=False)[0][:, :, 0]
    return pipe.image_processor.postprocess(images, output_type="np")


def norm_kept(velocity: Velocity, *, scale: float) -> Velocity:
    """Classifier-free guidance whose every token keeps the norm of the conditional prediction: with
    w = v_uncond + scale (v_cond - v_uncond), v = w |v_cond| / |w| over the last axis (QwenImagePipeline's loop).

    velocity, cond and what raises as `sampling.classifier_free`; a token with w = 0 stays 0.

    >>> cond = {"text": torch.tensor([[0.3, 0.4]]), "uncond.text": torch.zeros(1, 2)}
    >>> norm_kept(lambda params, x_t, t, cond: cond["text"], scale=7.0)({}, None, None, cond)
    tensor([[0.3000, 0.4000]])
    """
    scale = require_number("scale", scale)

    def guided(params: Params, x_t: Tensor, t: Tensor, cond: Cond) -> Tensor:
        twins = {k.removeprefix("uncond."): v for k, v in cond.items() if k.startswith("uncond.")}
        given = {k: v for k, v in cond.items() if not k.startswith("uncond.")}
        if not twins or twins.keys() - given.keys():
            raise ValueError(f"guidance needs cond to have NAME and uncond.NAME, got {sorted(cond)}")
        v_cond, v_uncond = promote(*(velocity(params, x_t, t, c) for c in (given, {**given, **twins})))
        v = v_uncond + scale * (v_cond - v_uncond)
        norm, wanted = (torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (v, v_cond))
        return v * (wanted / norm.clamp_min(torch.finfo(norm.dtype).tiny))

    return guided


# Sana


def _sana_shape(pipe: Any, size: Size) -> tuple[int, ...]:
    config, factor = pipe.transformer.config, pipe.vae_scale_factor
    require_multiple(factor * config.patch_size, height=size.height, width=size.width)
    return (config.in_channels, size.height // factor, size.width // factor)


def _sana_encode(pipe: Any, prompt: str, length: int, instruct: bool = True) -> dict[str, Tensor]:
    embeds, mask, _, _ = pipe.encode_prompt(
        prompt=[prompt],
        do_classifier_free_guidance=False,
        device=pipe.text_encoder.device,
        clean_caption=call_default(pipe, "clean_caption"),
        max_sequence_length=length,
        complex_human_instruction=call_default(pipe, "complex_human_instruction") if instruct else None,
    )
    return {"encoder_hidden_states": embeds, "encoder_attention_mask": mask}


def _sana_negative(pipe: Any, prompt: str, length: int) -> dict[str, Tensor]:
    return _sana_encode(pipe, prompt, length, instruct=False)


def _sana_predict(network: Callable, pipe: Any, size: Size, x: Tensor, timestep: Tensor, cond: Cond) -> Tensor:
    config = pipe.transformer.config
    v = network(
        hidden_states=x,
        timestep=timestep * config.timestep_scale,
        encoder_hidden_states=cond["encoder_hidden_states"],
        encoder_attention_mask=cond["encoder_attention_mask"],
        return_dict=False,
    )[0]
    # twice the channels: the second half is a predicted deviation
    return v[:, : config.in_channels] if config.out_channels // 2 == config.in_channels else v


def _sana_decode(pipe: Any, size: Size, latents: Tensor) -> Any:
    images = pipe.vae.decode(latents / pipe.vae.config.scaling_factor, return_dict=False)[0]
    return pipe.image_processor.postprocess(images, output_type="np")


IMAGES: dict[str, Family] = {
    "StableDiffusion3Pipeline": Family(
        latent_shape=_sd3_shape,
        encode=_sd3_encode,
        predict=_sd3_predict,
        decode=_sd3_decode,
        tokens=_patched,
        timestep_scale=1000.0,
        guidance=4.5,
        twins=("encoder_hidden_states", "pooled_projections"),
        longest=512,
    ),
    "FluxPipeline": Family(
        latent_shape=_packed_shape,
        encode=_flux_encode,
        predict=_flux_predict,
        decode=_flux_decode,
        tokens=_packed_tokens,
        timestep_scale=1.0,  # the network multiplies t and guidance by 1000 itself
        guidance=3.5,
        guide=None,
        twins=(),
        needs=("encoder_hidden_states", "pooled_projections"),
        guidance_unit=_flux_unit,
        longest=512,
    ),
    "QwenImagePipeline": Family(
        latent_shape=_packed_shape,
        encode=_qwen_encode,
        predict=_qwen_predict,
        decode=_qwen_decode,
        tokens=_packed_tokens,
        timestep_scale=1.0,
        guidance=4.0,
        guide=norm_kept,
        twins=("encoder_hidden_states", "encoder_hidden_states_mask"),
        encode_negative=_qwen_negative,
        longest=1024,
        check=_qwen_check,
    ),
    "SanaPipeline": Family(
        latent_shape=_sana_shape,
        encode=_sana_encode,
        predict=_sana_predict,
        decode=_sana_decode,
        tokens=_patched,
        timestep_scale=1000.0,
        guidance=4.5,
        twins=("encoder_hidden_states", "encoder_attention_mask"),
        encode_negative=_sana_negative,
    ),
}
