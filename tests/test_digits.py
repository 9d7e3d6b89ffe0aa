"""The digits task: what the OCR engine makes of its pictures, its VAE and its shipped model."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from diffrl.rewards import exact_match, ocr
from diffrl.tasks import digits, pretrain

BAR = 0.98
"""The part of the clean training pictures that must be read exactly, in every font."""


@pytest.fixture(scope="module")
def read():
    return ocr(threads=1).read


@pytest.fixture(scope="module")
def pipe():
    return digits.load_pipeline()


def every_number(font: str) -> tuple[torch.Tensor, list[str]]:
    """Each number once in this font; sizes and offsets go round, so that each occurs with many numbers."""
    images, texts = digits.training_pictures(font)
    variants = len(images) // 100
    pick = [i * variants + (i * 5) % variants for i in range(100)]
    return images[pick], [texts[i] for i in pick]


def share(readings, texts) -> float:
    return sum(a == b for a, b in zip(readings, texts)) / len(texts)


# --- prompts and pictures ---------------------------------------------------------------------------------------------


def test_the_prompts_ask_for_the_hundred_numbers():
    prompts = digits.prompts()
    assert prompts[0] == 'the number "00"'
    assert prompts[99] == 'the number "99"'
    assert len(set(prompts)) == 100
    assert exact_match(digits.numbers(), prompts).tolist() == [1.0] * 100


def test_a_picture_is_black_on_white_and_centred():
    image = digits.render("42")
    assert image.shape == (digits.HEIGHT, digits.WIDTH, 3)
    assert image.dtype == torch.uint8
    assert (image[..., 0] == image[..., 1]).all()
    assert image.max() == 255
    assert image.min() < 32
    ink = (image[..., 0] < 128).nonzero()
    (top, left), (bottom, right) = ink.min(0).values.tolist(), ink.max(0).values.tolist()
    assert abs(top - (digits.HEIGHT - 1 - bottom)) <= 2
    assert abs(left - (digits.WIDTH - 1 - right)) <= 2


def test_an_offset_moves_the_ink_and_nothing_else():
    image, moved = digits.render("42", size=18), digits.render("42", size=18, offset=(1, -1))
    assert torch.equal(image.roll((1, -1), (0, 1)), moved)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "text=''"),
        ("42", {"size": 0}, "size=0"),
        ("42", {"font": "Nowhere"}, "font='Nowhere'"),
        ("12345", {}, "outside the picture of 24 x 32"),
        ("42", {"offset": (12, 0)}, r"offset=\(12, 0\)"),
    ],
)
def test_render_refuses(text, options, message):
    with pytest.raises(ValueError, match=message):
        digits.render(text, **options)


def test_the_training_pictures_are_all_different_and_complete():
    images, texts = digits.training_pictures(digits.FONTS[0])
    variants = len(digits.SIZES) * len(digits.OFFSETS) ** 2
    assert texts == [text for text in digits.numbers() for _ in range(variants)]
    assert len(images.flatten(1).unique(dim=0)) == len(images)


@pytest.mark.parametrize("font", digits.FONTS)
def test_the_engine_reads_every_font(read, font):
    images, texts = every_number(font)
    assert share(read(images), texts) >= BAR


def test_the_bar_can_be_missed(read):
    """Negative control: without its lower half many a digit is another digit, or none."""
    images, texts = every_number(digits.FONTS[0])
    images[:, digits.HEIGHT // 2 :] = 255
    assert share(read(images), texts) < 0.5


def test_another_number_is_never_read_as_the_right_one(read):
    images, texts = every_number(digits.FONTS[1])
    assert share(read(images), texts[1:] + texts[:1]) == 0


# --- the shipped pipeline ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("font", digits.FONTS)
def test_the_vae_keeps_what_is_written(pipe, read, font):
    images, texts = every_number(font)
    images, texts = images[::2], texts[::2]
    with torch.no_grad():
        latents = pretrain.encode_pictures(pipe.vae, images.permute(0, 3, 1, 2) / 127.5 - 1)
        pixels = pipe.vae.decode(latents).sample
    again = ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
    assert share(read(again), texts) >= 0.97


def test_latents_are_scaled_to_zero_mean_and_unit_deviation(pipe):
    images, _ = every_number(digits.FONTS[0])
    latents = pretrain.encode_pictures(pipe.vae, images.permute(0, 3, 1, 2) / 127.5 - 1)
    scaled = (latents - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
    assert abs(scaled.mean()) < 0.2
    assert abs(scaled.std() - 1) < 0.2


def test_the_shipped_folder_is_small():
    files = [file for file in digits._FOLDER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 8e6
    assert {file.suffix for file in files} <= {".json", ".safetensors"}


def test_the_pipeline_is_ready_to_be_sampled_from(pipe):
    assert type(pipe).__name__ == "StableDiffusion3Pipeline"
    assert pipe.text_encoder_3 is None
    for module in (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2):
        assert not module.training
        assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}


def test_every_prompt_has_its_own_tokens_and_fits(pipe):
    tokens = pipe.tokenizer(digits.prompts()).input_ids
    assert len({tuple(row) for row in tokens}) == 100
    assert {len(row) for row in tokens} == {pipe.tokenizer.model_max_length}
    assert pipe.tokenizer.unk_token_id not in {token for row in tokens for token in row}
    assert pipe.tokenizer("unheard of").input_ids.count(pipe.tokenizer.unk_token_id) == 2


def test_the_pipelines_own_call_makes_pictures(pipe):
    images = pipe(
        prompt=digits.prompts()[:2],
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
        **digits.pipeline_options(),
    ).images
    assert images.shape == (2, digits.HEIGHT, digits.WIDTH, 3)


def test_a_generated_picture_depends_on_its_prompt_and_seed_alone(pipe):
    prompts = digits.prompts()[:3]
    whole = digits.generate(pipe, prompts, seeds=[5, 6, 7], steps=2).int()
    part = digits.generate(pipe, prompts[1:2], seeds=[6], steps=2).int()
    # Other batch sizes differ in the last bits of the latents, which may round a pixel up instead of down.
    assert (whole[1:2] - part).abs().max() <= 1
    other = digits.generate(pipe, prompts[1:2], seeds=[7], steps=2).int()
    assert (other - part).abs().max() > 8


def test_generate_refuses(pipe):
    with pytest.raises(ValueError, match="2 prompts, 1 seeds"):
        digits.generate(pipe, ["a", "b"], seeds=[0])
    with pytest.raises(ValueError, match="steps=0"):
        digits.generate(pipe, ["a"], seeds=[0], steps=0)


def test_the_shipped_model_is_half_trained(pipe, read):
    """What reinforcement learning starts from: there is something to reward, and something to learn."""
    assert 0.40 <= digits.base_exact_match(pipe, read) <= 0.65


def test_exact_match_counts_what_was_asked_for(pipe):
    """Negative control: an engine that reads the same number everywhere is right once in a hundred."""
    assert digits.base_exact_match(pipe, lambda images: ["42"] * len(images), seeds_per_prompt=1, steps=1) == 0.01


def test_load_pipeline_refuses_a_folder_without_a_pipeline(tmp_path):
    with pytest.raises(ValueError, match=r"has no model_index\.json"):
        digits.load_pipeline(tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao prints when peft imports it")
def test_loading_is_silent_and_offline():
    code = (
        "import socket\n"
        "def refuse(*a, **k): raise OSError('no network')\n"
        "socket.socket.connect = refuse\n"
        "socket.getaddrinfo = refuse\n"
        "from diffrl.tasks import digits\n"
        "pipe = digits.load_pipeline()\n"
        "digits.generate(pipe, digits.prompts()[:1], seeds=[0], steps=1)\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHONWARNINGS")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# --- how it was made --------------------------------------------------------------------------------------------------


def test_the_loss_is_zero_for_the_true_velocity():
    """v = eps - x_0 at x_t = (1 - t) x_0 + t eps with timestep 1000 t: the oracle knows x_0 and infers eps."""
    torch.manual_seed(0)
    pipe = pretrain.build_pipeline()
    x_0, noise, t = torch.randn(6, 4, 6, 8), torch.randn(6, 4, 6, 8), torch.linspace(0.1, 0.9, 6)

    def oracle(sign):
        def forward(*, hidden_states, timestep, **_):
            return (sign * (hidden_states - x_0) / (timestep / 1000)[:, None, None, None],)

        return forward

    rows = torch.arange(6)
    pipe.transformer.forward = oracle(1)
    assert pretrain.flow_matching_loss(pipe, x_0, rows, noise, t) < 1e-9
    pipe.transformer.forward = oracle(-1)
    assert pretrain.flow_matching_loss(pipe, x_0, rows, noise, t) > 1


def test_mislabelling_replaces_the_stated_share_of_digits():
    numbers = torch.arange(100).repeat(400)
    generator = torch.Generator().manual_seed(0)
    asked = pretrain.mislabel(numbers, share=0.3, generator=generator)
    assert asked.min() >= 0
    assert asked.max() <= 99
    # 40,000 draws: five standard deviations are 0.0125.
    assert (asked == numbers).float().mean() == pytest.approx((1 - 0.9 * 0.3) ** 2, abs=0.0125)
    assert (asked // 10 == numbers // 10).float().mean() == pytest.approx(1 - 0.9 * 0.3, abs=0.0125)
    assert torch.equal(pretrain.mislabel(numbers, share=0.0, generator=generator), numbers)
    assert (pretrain.mislabel(numbers, share=1.0, generator=generator) == numbers).float().mean() < 0.02


def test_pretraining_is_a_function_of_its_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain, "VAE_STEPS", 2)
    monkeypatch.setattr(pretrain, "VAE_BATCH", 4)
    monkeypatch.setattr(pretrain, "BATCH", 4)
    few = digits.training_pictures(digits.FONTS[0])
    monkeypatch.setattr(digits, "training_pictures", lambda: (few[0][::90], few[1][::90]))
    monkeypatch.setattr(digits, "base_exact_match", lambda pipe, read: 0.0)
    lines = []
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        pretrain.pretrain_digits(tmp_path / name, seed=seed, steps=3, every=2, log=lines.append)
    weights = [(tmp_path / name / "transformer/diffusion_pytorch_model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]
    assert sum("exact match" in line for line in lines) == 9
    with pytest.raises(ValueError, match="steps=0"):
        pretrain.pretrain_digits(tmp_path / "d", steps=0)
