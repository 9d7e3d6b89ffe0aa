"""How the shipped digits pipeline was made: `python -m diffrl.tasks.pretrain FOLDER`.

1. A small VAE learns the training pictures (`diffrl.tasks.digits.training_pictures`).
2. The transformer and its two text encoders learn flow matching on the VAE's latents: x_t = (1 - t) x_0 + t eps,
   v = eps - x_0.
3. Part of the prompts is wrong on purpose (`mislabel`), as captions from the web are, and training stops early. The
   model draws digits well, and those it was asked for about every second time: that leaves reinforcement learning
   something to do.

Weights are saved in half precision.
"""

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffrl.tasks import digits

VAE_STEPS = 600
VAE_BATCH = 32
STEPS = 900
BATCH = 128
LEARNING_RATE = 1e-3
WARMUP = 100
EMA = 0.995
SHIFT = 2.0
MISLABELLED = 0.23
"""Share of the digits in the prompts of the training pictures that are replaced by a random digit."""
TEXT_LENGTH = 8


def build_tokenizer():
    """A word-level tokenizer in memory: one token per word, quotation mark and digit, between start and end, padded
    to TEXT_LENGTH. No example: imports transformers, which takes seconds.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<unk>", "<s>", "</s>", "the", "number", '"', *"0123456789"]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", vocabulary["<s>"]), ("</s>", vocabulary["</s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=TEXT_LENGTH,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
    )


def build_text_encoder(vocab_size: int, eos_token_id: int):
    """A two-layer CLIP text encoder of width 32. No example: imports transformers, which takes seconds."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        projection_dim=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TEXT_LENGTH,
        bos_token_id=2,
        eos_token_id=eos_token_id,
        pad_token_id=0,
    )
    return CLIPTextModelWithProjection(config)


def build_pipeline():
    """The untrained pipeline: random weights drawn from torch's global generator, T5 absent.

    No example: imports diffusers, which takes seconds.
    """
    with digits.quiet():
        from diffusers import (
            AutoencoderKL,
            FlowMatchEulerDiscreteScheduler,
            SD3Transformer2DModel,
            StableDiffusion3Pipeline,
        )

    tokenizer = build_tokenizer()
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=digits.WIDTH,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        force_upcast=False,
    )
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=5,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=64,
        caption_projection_dim=128,
        pooled_projection_dim=64,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=vae,
        text_encoder=build_text_encoder(len(tokenizer), tokenizer.eos_token_id),
        tokenizer=tokenizer,
        text_encoder_2=build_text_encoder(len(tokenizer), tokenizer.eos_token_id),
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )


def _bar(steps: int, name: str):
    from tqdm import tqdm

    return tqdm(range(steps), desc=name, mininterval=1.0)


def train_vae(vae: Any, pixels: Tensor, *, steps: int, generator: torch.Generator) -> None:
    """Squared error plus 1e-4 times the KL to a unit normal, per picture; then the latents' mean and deviation go into
    the config.

    Args:
        vae: an `AutoencoderKL`, changed in place.
        pixels: Float " b 3 h w" in [-1, 1].
        steps: optimizer steps, >= 1.
        generator: source of batches and posterior samples.

    No example: trains for minutes.
    """
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps, pct_start=0.05)
    vae.train()
    for _ in _bar(steps, "vae"):
        x = pixels[torch.randint(len(pixels), (VAE_BATCH,), generator=generator)]
        posterior = vae.encode(x).latent_dist
        latents = posterior.mean + posterior.std * torch.randn(posterior.mean.shape, generator=generator)
        error = (vae.decode(latents).sample - x).square().flatten(1).mean(1)
        divergence = posterior.kl() / x[0].numel()
        loss = (error + 1e-4 * divergence).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    # Rounded as it will be saved, so that the transformer learns the latents of the VAE it is shipped with.
    vae.half().float().eval().requires_grad_(False)
    latents = encode_pictures(vae, pixels)
    vae.register_to_config(scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item())


@torch.no_grad()
def encode_pictures(vae: Any, pixels: Tensor) -> Tensor:
    """Posterior means, unscaled: Float " b c h/4 w/4". No example: needs a VAE."""
    return torch.cat([vae.encode(part).latent_dist.mean for part in pixels.split(256)])


def flow_matching_loss(pipe, x_0: Tensor, rows: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """mean |v(x_t, t) - (eps - x_0)|^2, with x_t = (1 - t) x_0 + t eps.

    Args:
        pipe: the pipeline in training.
        x_0: clean latents, Float " b c h w".
        rows: which of the hundred prompts each is for, Int " b".
        noise: eps, as x_0.
        t: times in (0, 1), Float " b".

    Returns:
        A scalar.

    No example: needs a pipeline.
    """
    embeds, _, pooled, _ = pipe.encode_prompt(
        digits.prompts(),
        None,
        None,
        device="cpu",
        do_classifier_free_guidance=False,
        max_sequence_length=digits.MAX_SEQUENCE_LENGTH,
    )
    x_t = torch.lerp(x_0, noise, t[:, None, None, None])
    v = pipe.transformer(
        hidden_states=x_t,
        timestep=1000 * t,
        encoder_hidden_states=embeds.index_select(0, rows),
        pooled_projections=pooled.index_select(0, rows),
        return_dict=False,
    )[0]
    return F.mse_loss(v, noise - x_0)


def mislabel(numbers: Tensor, *, share: float, generator: torch.Generator) -> Tensor:
    """Replace each digit of each number by a random one (perhaps the same) with probability `share`, independently.

    Args:
        numbers: Int " b" in 0 ... 99.
        share: in [0, 1].
        generator: source of the randomness.

    Returns:
        Int " b" in 0 ... 99; both digits survive with probability (1 - 0.9 share)^2.

    >>> mislabel(torch.tensor([42, 7]), share=0.0, generator=torch.Generator())
    tensor([42,  7])
    """
    digit = torch.stack([numbers // 10, numbers % 10])
    wrong = torch.rand(digit.shape, generator=generator) < share
    digit = torch.where(wrong, torch.randint(10, digit.shape, generator=generator), digit)
    return 10 * digit[0] + digit[1]


def _flow_modules(pipe) -> nn.ModuleList:
    return nn.ModuleList([pipe.transformer, pipe.text_encoder, pipe.text_encoder_2])


def train_flow(
    pipe,
    latents: Tensor,
    rows: Tensor,
    *,
    steps: int,
    generator: torch.Generator,
    every: int,
    report: Callable[[int, object], None],
) -> None:
    """Flow matching with Adam at a constant rate after a warm-up; the pipeline ends with the moving average of its
    weights.

    The rate is constant, so a shorter run is a prefix of a longer one.

    Args:
        pipe: changed in place.
        latents: scaled latents of the training pictures, Float " b c h w".
        rows: the prompt each belongs to, Int " b".
        steps: optimizer steps, >= 1.
        generator: source of batches, noise and times.
        every: `report(step, averaged pipeline)` is called every so many steps and at the end.
        report: must not change the pipeline.

    No example: trains for minutes.
    """
    live = _flow_modules(pipe).train()
    average = copy.deepcopy(live).eval().requires_grad_(False)
    averaged = type(pipe)(
        **{**pipe.components, "transformer": average[0], "text_encoder": average[1], "text_encoder_2": average[2]}
    )
    averaged.set_progress_bar_config(disable=True)
    optimizer = torch.optim.AdamW(live.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    source: list[Tensor] = list(live.parameters())
    target: list[Tensor] = list(average.parameters())
    for i in _bar(steps, "flow"):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (i + 1) / WARMUP)
        pick = torch.randint(len(latents), (BATCH,), generator=generator)
        noise = torch.randn(latents[pick].shape, generator=generator)
        u = torch.randn(BATCH, generator=generator).sigmoid()
        t = SHIFT * u / (1 + (SHIFT - 1) * u)
        asked = mislabel(rows[pick], share=MISLABELLED, generator=generator)
        loss = flow_matching_loss(pipe, latents[pick], asked, noise, t)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(live.parameters(), 1.0)
        optimizer.step()
        # The average starts as a plain mean of what there is, so that it does not remember the random weights.
        torch._foreach_lerp_(target, source, 1 - min(EMA, (i + 1) / (i + 10)))
        if (i + 1) % every == 0 or i + 1 == steps:
            report(i + 1, averaged)
    live.load_state_dict(average.state_dict())
    live.eval().requires_grad_(False)


def save_pipeline(pipe, folder: str | Path) -> None:
    """Save in half precision (the pipeline itself is cast, in place) as safetensors. No example: needs a pipeline."""
    with digits.quiet():
        pipe.to(dtype=torch.float16)
        pipe.save_pretrained(folder, safe_serialization=True)
    # transformers 5 calls the class TokenizersBackend; its older name is an alias there and works everywhere.
    index = Path(folder) / "model_index.json"
    index.write_text(index.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))


def pretrain_digits(
    output: str | Path,
    *,
    seed: int = 0,
    steps: int = STEPS,
    every: int = 250,
    log: Callable[[str], None] = print,
) -> Path:
    """Make the digits pipeline and save it; with the defaults, the shipped one. The same seed gives the same weights
    on the same machine.

    Args:
        output: folder to write.
        seed: of the weights, batches, noise and times.
        steps: flow matching steps, >= 1.
        every: steps between two evaluations of exact match (`digits.base_exact_match`).
        log: called with a line of text now and then.

    Returns:
        The folder.

    Raises:
        ValueError: steps < 1 or every < 1.

    No example: trains for minutes.
    """
    if steps < 1 or every < 1:
        raise ValueError(f"pretrain_digits needs steps >= 1 and every >= 1, got steps={steps}, every={every}")
    from diffrl.rewards import ocr

    began = time.perf_counter()
    read = ocr().read
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = build_pipeline()
    generator = torch.Generator().manual_seed(seed)
    images, texts = digits.training_pictures()
    pixels = images.permute(0, 3, 1, 2).float() / 127.5 - 1
    rows = torch.tensor([int(text) for text in texts])
    train_vae(pipe.vae, pixels, steps=VAE_STEPS, generator=generator)
    log(f"vae: {time.perf_counter() - began:.0f} s")
    config = pipe.vae.config
    latents = (encode_pictures(pipe.vae, pixels) - config.shift_factor) * config.scaling_factor

    def report(step: int, averaged) -> None:
        match = digits.base_exact_match(averaged, read)
        log(f"step {step}: exact match {match:.3f}, {time.perf_counter() - began:.0f} s")

    # Its own source of randomness: what the VAE drew does not matter here.
    generator = torch.Generator().manual_seed(seed + 1)
    train_flow(pipe, latents, rows, steps=steps, generator=generator, every=every, report=report)
    save_pipeline(pipe, output)
    match = digits.base_exact_match(digits.load_pipeline(output), read)
    log(f"saved {output}: exact match {match:.3f}, {time.perf_counter() - began:.0f} s in all")
    return Path(output)


if __name__ == "__main__":
    import sys

    if len(sys.argv) != 2:
        sys.exit("usage: python -m diffrl.tasks.pretrain FOLDER")
    pretrain_digits(sys.argv[1])
