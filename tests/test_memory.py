"""memory.py: every formula against the bytes of real tensors, and the published sizes of large models."""

import json

import pytest
import tiny
import tiny_families
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from diffrl.cli import main
from diffrl.memory import (
    Memory,
    empty_pipeline,
    encoders_off,
    lora_numbers,
    module_bytes,
    plan,
    plan_text,
    training_memory,
    trajectory_bytes,
    vae_off,
)
from diffrl.models import from_pipeline
from diffrl.sampling import flow_sde_step, rollout

FACTORIES = {"sd3": tiny.sd3, **tiny_families.FACTORIES}
IMAGE, VIDEO = {"height": 32, "width": 64}, {"height": 16, "width": 32, "frames": 5}
SIZES = {name: VIDEO if name in ("wan", "wan_i2v", "hunyuan") else IMAGE for name in FACTORIES}


def measured(tensors):
    return sum(x.numel() * x.element_size() for x in tensors)


def held(module):
    return [*module.parameters(), *module.buffers()]


def by_name(lines):
    return {line.name: line.bytes for line in lines}


@pytest.mark.parametrize("name", FACTORIES)
def test_weights_factors_and_trajectory_of_every_family(name, tmp_path):
    pipe = FACTORIES[name]()
    pipe.save_pretrained(tmp_path)
    empty = empty_pipeline(tmp_path)
    assert type(empty) is type(pipe)
    assert {x.device.type for x in empty.transformer.parameters()} == {"meta"}
    samples, kept = 2, 3
    told = by_name(plan(empty, rank=4, samples=samples, kept=kept, dtype=None, **SIZES[name]))
    modules = {k: part for k, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    for part, module in modules.items():
        assert told[part] == measured(held(module))
    assert set(told) == {*modules, "trained tensors", "gradients", "Adam moments", "copies of the policy", "trajectory"}
    half = by_name(plan(empty, rank=4, dtype=torch.bfloat16, **SIZES[name]))
    loaded = type(pipe.transformer).from_pretrained(tmp_path / "transformer", torch_dtype=torch.bfloat16)
    fixed = {n for n, _ in loaded.named_buffers()}  # tables made anew when a model is loaded, whatever its dtype
    assert half["transformer"] - sum(module_of(empty.transformer, fixed, torch.bfloat16)) == measured(
        loaded.parameters()
    )
    assert half["transformer"] < told["transformer"]
    model = from_pipeline(pipe, lora={"r": 4}, max_sequence_length=12, **SIZES[name])
    assert told["trained tensors"] == measured(model.params.values())
    assert told["trained tensors"] == 4 * lora_numbers(empty.transformer, rank=4)
    noise = torch.zeros(samples, *model.latent_shape())
    path = rollout(
        lambda params, x, t, cond: x,
        {},
        {},
        model.times(kept),
        seeds=torch.arange(samples),
        shape=model.latent_shape(),
        step=flow_sde_step,
    )
    assert told["trajectory"] == measured([*path, noise])


def module_of(module, names, dtype):
    """Bytes counted for these buffers."""
    return [
        x.numel() * (4 if n.startswith("rope") else dtype.itemsize) for n, x in module.named_buffers() if n in names
    ]


def test_an_optimizer_step_holds_what_was_told():
    model = from_pipeline(tiny.sd3(), lora={"r": 4}, max_sequence_length=8, height=24, width=16)
    optimizer = torch.optim.AdamW(model.params.values())
    x, t = torch.randn(1, *model.latent_shape()), torch.tensor([0.5])
    model.velocity(model.params, x, t, model.encode(["a cat"])).square().mean().backward()
    optimizer.step()
    copies = [{k: p.detach().clone() for k, p in model.params.items()} for _ in range(2)]
    told = by_name(training_memory(sum(p.numel() for p in model.params.values()), copies=2))
    assert told["gradients"] == measured(p.grad for p in model.params.values() if p.grad is not None)
    moments = [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    assert told["Adam moments"] == measured(moments)
    assert told["copies of the policy"] == measured(x for copy in copies for x in copy.values())
    # negative control: one copy is not two
    assert told["copies of the policy"] != measured(copies[0].values())


def test_full_training_counts_the_transformer_once_in_float32():
    pipe = tiny_families.wan()
    told = by_name(plan(pipe, rank=None, copies=0, **VIDEO))
    assert "transformer" not in told
    assert told["trained tensors"] == measured(pipe.transformer.parameters())
    assert told["copies of the policy"] == 0


def test_published_sizes():
    """12 billion parameters (FLUX.1), 24 GB in bf16; of a LoRA of rank 32 on its attention some 50 million."""
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        module = FluxTransformer2DModel(guidance_embeds=True)
    assert module_bytes(module, dtype=torch.bfloat16) / 1e9 == pytest.approx(23.8, abs=0.1)
    assert lora_numbers(module, rank=32) / 1e6 == pytest.approx(52.3, abs=0.1)
    # a state of a 720p video of 129 frames, 16 channels: 30 MB
    assert trajectory_bytes((16, 33, 90, 160), samples=1, kept=1) / 4 / 1e6 == pytest.approx(30.4, abs=0.1)


@settings(max_examples=25)
@given(st.integers(1, 5), st.integers(1, 7), st.integers(1, 9), st.integers(0, 4))
def test_bytes_add_up(samples, kept, rank, copies):
    shape = (4, 3, 2)
    assert (
        trajectory_bytes(shape, samples=2 * samples, kept=kept) - trajectory_bytes(shape, samples=samples, kept=kept)
        == trajectory_bytes(shape, samples=samples, kept=kept) - 8 * kept
    )
    layer = torch.nn.ModuleDict({"a_to_q": torch.nn.Linear(3, 3), "to_q": torch.nn.Linear(5, 2)})
    assert lora_numbers(layer, rank=rank) == 7 * rank
    lines = training_memory(rank, copies=copies)
    assert sum(line.bytes for line in lines) == 4 * rank * (4 + copies)


def test_what_leaves_the_device_is_not_counted():
    pipe = tiny_families.flux()
    lines = plan(pipe, vae_on_device=False, encoders_on_device=False, **IMAGE)
    away = {line.name for line in lines if not line.on_device}
    assert away == {"vae", "text_encoder", "text_encoder_2"}
    assert [a.bytes for a in lines] == [b.bytes for b in plan(pipe, **IMAGE)]
    text = plan_text([Memory("weights", 3 * 10**9), Memory("vae", 10**9, False)], gpu_memory=4.5)
    assert text.splitlines() == [
        "weights      3.000 GB",
        "vae          1.000 GB  (off the device)",
        "on the device      3.000 GB, without activations",
        "of 4.5 GB      1.500 GB left for activations",
    ]
    assert "too much" in plan_text([Memory("weights", 3 * 10**9)], gpu_memory=2)
    with pytest.raises(ValueError, match="gpu_memory"):
        plan_text([Memory("weights", 1)], gpu_memory=0)


def test_refusals(tmp_path):
    pipe = tiny_families.flux()
    for options, message in (
        ({"height": 30}, "height must be a multiple of 4, got 30"),
        ({"frames": 5}, "frames must be None"),
        ({"rank": 0}, "rank"),
        ({"samples": 0}, "samples"),
        ({"kept": 0}, "kept"),
        ({"copies": -1}, "copies"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(pipe, **{**IMAGE, **options})
    with pytest.raises(ValueError, match="match no linear layer"):
        lora_numbers(pipe.transformer, rank=2, targets=["no_such"])
    with pytest.raises(ValueError, match="object is not supported"):
        plan(object(), **IMAGE)
    with pytest.raises(ValueError, match="no pipeline in"):
        empty_pipeline(tmp_path)
    index = tmp_path / "model_index.json"
    index.write_text('{"_class_name": "KolorsPipeline"}')
    with pytest.raises(ValueError, match="KolorsPipeline is not supported"):
        empty_pipeline(tmp_path)
    index.write_text('{"_class_name": "FluxPipeline", "vae": ["os", "system"]}')
    with pytest.raises(ValueError, match=r"vae is os\.system"):
        empty_pipeline(tmp_path)


def test_on_the_command_line(tmp_path, capsys):
    tiny_families.hunyuan().save_pretrained(tmp_path)
    capsys.readouterr()
    words = ["plan", "--model", str(tmp_path), "--height", "16", "--width", "32", "--frames", "5"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("on the device")
    assert any(line.startswith("text_encoder_2") for line in lines)
    assert main([*words, "--gpu-memory", "1", "--vae-off", "--encoders-off", "--lora-rank", "0"]) == 0
    out = capsys.readouterr().out
    assert "left for activations" in out
    assert out.count("off the device") == 3
    assert main([*words, "--gpu-memory", "0.0001"]) == 1
    assert "too much" in capsys.readouterr().out
    assert main([*words[:-1], "6"]) == 2
    assert "frames must be 1 + a multiple of 4, got 6" in capsys.readouterr().err


def test_transformers_keep_their_float32_parts_in_float16_alone():
    class Part(nn.Module):
        _keep_in_fp32_modules = ("wo",)

        def __init__(self):
            super().__init__()
            self.wo = nn.Linear(2, 2, bias=False)

    part = Part()
    assert module_bytes(part, dtype=torch.bfloat16) == 16
    Part.__module__ = "transformers.models.t5"
    assert module_bytes(part, dtype=torch.bfloat16) == 8
    assert module_bytes(part, dtype=torch.float16) == 16


def test_a_part_that_is_not_installed_is_named(tmp_path):
    index = {"_class_name": "FluxPipeline", "vae": ["diffusers", "AutoencoderOfTomorrow"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="vae is AutoencoderOfTomorrow, which the installed diffusers does not have"):
        empty_pipeline(tmp_path)


# ---- parts that leave the device


class Moved(nn.Linear):
    """Notes where it is sent."""

    def __init__(self):
        super().__init__(1, 1)
        self.places = []

    def to(self, place):
        self.places.append(place)
        return self


def test_encoders_leave_once_everything_is_encoded():
    pipe = tiny.sd3()
    model = from_pipeline(pipe, **IMAGE)
    prompts = ["a", "b", "c"]
    before = model.encode(prompts)
    encoded = []
    fresh = from_pipeline(pipe, lora="default", **IMAGE)
    watched = fresh._replace(encode=lambda *given: encoded.append(given) or fresh.encode(*given))
    encoders_off(watched, pipe, prompts, to="meta")
    assert [given[0] for given in encoded] == [["a"], ["b"], ["c"]]
    assert {p.device.type for name in ("text_encoder", "text_encoder_2") for p in getattr(pipe, name).parameters()} == {
        "meta"
    }
    assert {p.device.type for p in [*pipe.transformer.parameters(), *pipe.vae.parameters()]} == {"cpu"}
    after = fresh.encode(prompts)  # from memory: the encoders are gone
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert len(encoded) == 3


def test_the_vae_is_there_while_it_decodes_and_away_otherwise():
    pipe = tiny.sd3()
    model = from_pipeline(pipe, **IMAGE)
    latents = torch.randn(2, *model.latent_shape(), generator=torch.Generator().manual_seed(0))
    plain = model.decode(latents)
    stand_in = Moved()

    class Pipe:
        vae = stand_in

    seen = []
    away = vae_off(model._replace(decode=lambda x: seen.append(list(stand_in.places)) or plain), Pipe, device="there")
    assert torch.equal(away.decode(latents), plain)
    assert seen == [["cpu", "there"]]
    assert stand_in.places == ["cpu", "there", "cpu"]
    failing = vae_off(model._replace(decode=lambda x: 1 / 0), Pipe, device="there")
    with pytest.raises(ZeroDivisionError):
        failing.decode(latents)
    assert stand_in.places[-2:] == ["there", "cpu"]
    real = vae_off(model, pipe, device="cpu")
    assert torch.equal(real.decode(latents), plain)
    assert real.params is model.params
