"""Tiny random pipelines: the real diffusers classes, a few thousand weights, no download. Only for tests."""

from typing import Any

import torch

WORDS = [
    *("a", "the", "one", "two", "red", "green", "blue", "cat", "dog", "bird"),
    *("house", "river", "on", "under", "sings", "sleeps", "jumps", "quietly", "photo", "of"),
]
CLIP_LENGTH = 12


def tokenizer(length: int) -> Any:
    """Word-level, `<s> words </s>` padded with `<pad>`; an unknown word is `<unk>`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    vocab = {word: i for i, word in enumerate(["<pad>", "<s>", "<unk>", *WORDS, "</s>"])}
    core = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = Whitespace()
    ends = [("<s>", vocab["<s>"]), ("</s>", vocab["</s>"])]
    core.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=length, **special)


def fill_zeros(module: torch.nn.Module, std: float = 0.2) -> None:
    """Random values where a layer starts at zero: there a wrong input, sign or adapter would change nothing."""
    with torch.no_grad():
        for tensor in module.parameters():
            if not tensor.any():
                tensor.normal_(std=std)


def clip(projection: int) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": len(WORDS) + 3}
    config = CLIPTextConfig(
        vocab_size=len(WORDS) + 4,
        hidden_size=16,
        intermediate_size=16,
        projection_dim=projection,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CLIP_LENGTH,
        **ids,
    )
    return CLIPTextModelWithProjection(config)


def t5() -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(vocab_size=len(WORDS) + 4, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.5)
    )


def vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        layers_per_block=1,
        scaling_factor=1.3,
        shift_factor=0.2,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def sd3(*, seed: int = 0, with_t5: bool = True, shift: float = 3.0, scheduler: dict[str, Any] | None = None) -> Any:
    """StableDiffusion3Pipeline in float32 on the CPU: VAE factor 2, patches of 2, 16 positions a side, 4 channels."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
    )
    pipe = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift, **(scheduler or {})),
        vae=vae(),
        text_encoder=clip(32),
        tokenizer=tokenizer(CLIP_LENGTH),
        text_encoder_2=clip(32),
        tokenizer_2=tokenizer(CLIP_LENGTH),
        text_encoder_3=t5() if with_t5 else None,
        tokenizer_3=tokenizer(512) if with_t5 else None,
    )
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"):
        if getattr(pipe, name) is not None:
            fill_zeros(getattr(pipe, name))
            getattr(pipe, name).train()  # as built from a configuration: whoever forgets eval() meets T5's dropout
    pipe.set_progress_bar_config(disable=True)
    torch.random.set_rng_state(state)
    return pipe


def randomise(params: dict[str, torch.Tensor], *, seed: int = 1, std: float = 0.3) -> None:
    """Random values in place: a fresh LoRA's B is zero, which hides every mistake in A, alpha and the swap."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in params.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)
