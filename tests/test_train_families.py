"""`diffrl train --task prompts` on a saved tiny pipeline of every family: train, evaluate, draw, export, go on."""

from dataclasses import replace

import numpy as np
import pytest
import tiny
import tiny_families
import torch
from oracles import refuses
from PIL import Image

from diffrl.run import read_metrics, run, stills
from diffrl.settings import Settings, build, read_images

FAMILIES = {
    "sd3": (tiny.sd3, {"height": 16, "width": 24}),
    "flux": (tiny_families.flux, {"height": 24, "width": 16}),
    "wan": (tiny_families.wan, {"height": 16, "width": 32, "frames": 5}),
    "wan_i2v": (tiny_families.wan_i2v, {"height": 16, "width": 32, "frames": 5}),
    "hunyuan": (tiny_families.hunyuan, {"height": 16, "width": 32, "frames": 5}),
    "qwen": (tiny_families.qwen, {"height": 24, "width": 16}),
    "sana": (tiny_families.sana, {"height": 64, "width": 32}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """name -> Settings of a run of two iterations on the saved pipeline."""
    root = tmp_path_factory.mktemp("pipelines")
    (root / "prompts.txt").write_text("a red cat\ntwo blue birds\n")
    for i, value in enumerate((40, 200)):
        Image.fromarray(np.full((16, 32, 3), value, dtype=np.uint8)).save(root / f"{i}.png")
    (root / "images.txt").write_text("0.png\n1.png\n")

    def settings(name, **changed):
        make, size = FAMILIES[name]
        if not (root / name).is_dir():
            make().save_pretrained(root / name)
        options = {"task": "prompts", "model": str(root / name), "prompts": str(root / "prompts.txt"), **size}
        options |= {"images": str(root / "images.txt")} if name == "wan_i2v" else {}
        options |= {"reward": "jpeg_incompressibility", "iterations": 2, "group_size": 4, "prompts_per_iteration": 2}
        options |= {"steps": 2, "lora_rank": 2, "lora_alpha": 4, "eval_samples": 1, "threads": 1, "micro_batch": 4}
        return Settings(**{**options, **changed})

    return settings


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_trains_from_its_folder(saved, tmp_path, name):
    s = saved(name)
    rows = run(tmp_path / "run", s)
    assert [row["iteration"] for row in rows] == [0, 1]
    assert all(np.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    for picture in ("curve.png", "before_after.png"):
        with Image.open(tmp_path / "run" / picture) as image:
            assert np.asarray(image.convert("L")).std() > 1
    assert (tmp_path / "run" / "adapter" / "pytorch_lora_weights.safetensors").is_file()
    assert read_metrics(tmp_path / "run")[0] == s


@pytest.mark.filterwarnings("ignore")
def test_a_video_run_with_a_draft_and_every_parameter(saved, tmp_path):
    run(tmp_path / "run", saved("wan", draft="policy", pool=6, draft_steps=1, lora_rank=0, iterations=1, audit_every=1))
    assert (tmp_path / "run" / "drafts.png").is_file()
    assert (tmp_path / "run" / "adapter" / "transformer" / "diffusion_pytorch_model.safetensors").is_file()


@pytest.mark.filterwarnings("ignore")
def test_a_pipeline_saved_without_an_encoder_and_the_chunks_of_evaluation(saved, tmp_path, monkeypatch):
    s = saved("sd3", iterations=1, rollout_chunk=1, eval_samples=3)
    tiny.sd3(with_t5=False).save_pretrained(tmp_path / "pipe")
    s = replace(s, model=str(tmp_path / "pipe"))
    bench, rows = build(s), []

    def watched(params, x_t, t, cond):
        rows.append(len(x_t))
        return bench.model.velocity(params, x_t, t, cond)

    monkeypatch.setattr("diffrl.run.build", lambda s: bench._replace(model=bench.model._replace(velocity=watched)))
    run(tmp_path / "run", s)
    assert max(rows[:6]) == 1  # the base's evaluation
    evaluated = [n for n in rows if n != s.micro_batch]
    assert set(evaluated) == {1}


def test_what_does_not_go_together_is_refused(saved, tmp_path):
    with refuses("frames"):
        build(saved("wan", frames=None))
    with refuses("frames", "5"):
        build(saved("flux", frames=5))
    with refuses("images"):
        build(saved("wan_i2v", images=None))
    with refuses("no images"):
        build(saved("flux", images=saved("wan_i2v").images))
    with refuses("--frames 5", "digits"):
        build(Settings(frames=5))


def test_images_are_read_in_order_or_refused(saved, tmp_path):
    path = saved("wan_i2v").images
    found = read_images(path, 2)
    assert [image.getpixel((0, 0))[0] for image in found] == [40, 200]
    with refuses("2 pictures for 3 prompts"):
        read_images(path, 3)
    with refuses("no file", "nowhere"):
        read_images("nowhere", 1)
    (tmp_path / "list.txt").write_text("missing.png\n")
    with refuses("'missing.png' cannot be read"):
        read_images(str(tmp_path / "list.txt"), 1)


def test_control_the_middle_frame_of_a_video_and_a_picture_as_it_is():
    video = torch.arange(5).reshape(1, 5, 1, 1, 1).expand(2, 5, 4, 4, 3)
    assert torch.equal(stills(video), video[:, 2])
    assert torch.equal(stills(video[:, 0]), video[:, 0])
