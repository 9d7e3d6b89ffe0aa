"""The task with another glyph set: the same prompts, but a base model that draws a letter for each digit.

    python ablations/letters.py

The shipped pipeline is trained on for STEPS steps of flow matching on pictures of letters (digit d is GLYPHS[d]), with the
same share of mislabelled prompts, and saved in runs/ablations/letters-pipeline; about two minutes on two cores. The OCR reward asks for
the letters. `transfer.py` calls it where it is missing.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from common import ROOT

from diffrl.rewards import quoted
from diffrl.tasks import digits, pretrain

FOLDER = ROOT / "runs" / "ablations" / "letters-pipeline"
GLYPHS = "AEFHKLNPTU"
"""The letter of each digit: narrow enough for two in a picture, and no two alike to an OCR engine."""
STEPS = 300
SIZES = (15, 16)


def target(prompt: str) -> str | None:
    """What the OCR reward looks for: 'the number "07"' -> "AP"."""
    number = quoted(prompt)
    return None if number is None else "".join(GLYPHS[int(d)] for d in number)


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    """(UInt8 " b h w 3", row of the prompt " b"): every pair of letters in every font and size."""
    images, rows = [], []
    for row, prompt in enumerate(digits.prompts()):
        for font in digits.FONTS:
            for size in SIZES:
                images.append(digits.render(target(prompt), font=font, size=size))
                rows.append(row)
    return torch.stack(images), torch.tensor(rows)


def make(*, steps: int = STEPS, seed: int = 0) -> float:
    """Train, save, and return the base's exact match over the hundred prompts."""
    from diffrl import rewards

    pipe = digits.load_pipeline()
    images, rows = pictures()
    pixels = images.permute(0, 3, 1, 2).float() / 127.5 - 1
    config = pipe.vae.config
    latents = (pretrain.encode_pictures(pipe.vae, pixels) - config.shift_factor) * config.scaling_factor
    for module in (pipe.transformer, pipe.text_encoder, pipe.text_encoder_2):
        module.requires_grad_(True)
    generator = torch.Generator().manual_seed(seed)
    pretrain.train_flow(pipe, latents, rows, steps=steps, generator=generator, every=steps, report=lambda *_: None)
    pretrain.save_pipeline(pipe, FOLDER)
    read = rewards.ocr().read
    asked = [prompt for prompt in digits.prompts() for _ in range(2)]
    seen = read(digits.generate(digits.load_pipeline(FOLDER), asked, seeds=range(len(asked))))
    return sum(a == target(b) for a, b in zip(seen, asked, strict=True)) / len(asked)


def ensure() -> None:
    """Make the pipeline where it is missing."""
    if not (FOLDER / "model_index.json").is_file():
        print(f"exact match of the letters' base: {make():.3f}")


if __name__ == "__main__":
    print(f"exact match {make():.3f}, saved in {FOLDER.relative_to(ROOT)}")
