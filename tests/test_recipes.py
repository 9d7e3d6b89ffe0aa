"""Every recipe runs on a tiny pipeline of its class, with the model swapped and everything smaller but its own settings."""

import inspect
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
import tiny_families
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes"))
import flux_geneval
import hunyuan_video
import qwen_image
import sana_sol_rl
import sd35_ocr
import sd35_pickscore
import wan_i2v

PROMPTS = ["a red cat", "two blue birds"]
RECIPES = {
    "sd35_ocr": (sd35_ocr, tiny.sd3, {"height": 16, "width": 24}),
    "sd35_pickscore": (sd35_pickscore, tiny.sd3, {"height": 16, "width": 24}),
    "flux_geneval": (flux_geneval, tiny_families.flux, {"height": 24, "width": 16}),
    "hunyuan_video": (hunyuan_video, tiny_families.hunyuan, {"height": 16, "width": 32, "frames": 5}),
    "wan_i2v": (wan_i2v, tiny_families.wan_i2v, {"height": 16, "width": 32, "frames": 5}),
    "qwen_image": (qwen_image, tiny_families.qwen, {"height": 24, "width": 16}),
    "sana_sol_rl": (sana_sol_rl, tiny_families.sana, {"height": 64, "width": 32}),
}


def brightness(images, prompts):
    return images.float().flatten(1).mean(1)


def started(name):
    module, make, size = RECIPES[name]
    more = {"size": {**size, "max_sequence_length": 8}, "steps": 4 if name != "sana_sol_rl" else 3}
    if "images" in inspect.signature(module.recipe).parameters:
        more["images"] = [Image.fromarray(np.full((16, 32, 3), v, dtype=np.uint8)) for v in (40, 200)]
    more |= {"pool": 6, "keep": 2} if name == "sana_sol_rl" else {"group_size": 4}
    return module.recipe(make(), PROMPTS, brightness, **more)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_its_tiny_pipeline_and_exports_it(name, tmp_path):
    model, training = started(name)
    before = {n: p.detach().clone() for n, p in model.params.items()}
    row = next(training)
    assert math.isfinite(row["loss"])
    assert row["groups/dead"] == 0
    assert row["grad_norm"] > 0
    assert any(not torch.equal(before[n], p) for n, p in model.params.items())
    model.export(tmp_path / "trained")
    full = name in ("hunyuan_video", "wan_i2v")
    written = "transformer/diffusion_pytorch_model.safetensors" if full else "pytorch_lora_weights.safetensors"
    assert (tmp_path / "trained" / written).is_file()


def test_control_the_same_recipe_at_another_seed_trains_other_params():
    module, make, size = RECIPES["sd35_ocr"]
    sizes = {**size, "max_sequence_length": 8}
    ends = []
    for seed in (0, 0, 1):
        model, training = module.recipe(make(), PROMPTS, brightness, size=sizes, group_size=4, steps=2, seed=seed)
        next(training)
        ends.append(torch.cat([p.detach().flatten() for p in model.params.values()]))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("sd35_ocr", {"steps": 10, "prompts_per_iteration": 32, "size": {"height": 512, "width": 512}}),
        ("flux_geneval", {"steps": 10, "prompts_per_iteration": 32}),
        ("hunyuan_video", {"steps": 16, "prompts_per_iteration": 32, "group_size": 8, "lora": None}),
        ("wan_i2v", {"steps": 4, "prompts_per_iteration": 32, "lora": None}),
        ("sana_sol_rl", {"steps": 10, "pool": 96, "keep": 12, "prompts_per_iteration": 48}),
    ],
)
def test_defaults_are_the_published_settings(name, published):
    found = {n: p.default for n, p in inspect.signature(RECIPES[name][0].recipe).parameters.items()}
    assert {n: found[n] for n in published} == published
    assert RECIPES["hunyuan_video"][2]["frames"] != hunyuan_video.SIZE["frames"] == 53


def test_every_recipe_is_tested():
    here = {p.stem for p in (Path(__file__).parent.parent / "recipes").glob("*.py")} - {"command"}
    assert here == set(RECIPES)
