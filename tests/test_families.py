"""Every family on tiny random pipelines: the contract of a Model, as in test_models for Stable Diffusion 3.

Outputs are compared to 1e-5 of their size (a tensor elsewhere in memory may change the last bit), states bit for bit.
"""

import inspect

import numpy as np
import pytest
import tiny
import torch
from family_cases import (
    BY_NAME,
    CASES,
    GUIDED,
    LORA,
    PROMPTS,
    Case,
    each,
    each_guided,
    encoded,
    forced,
    made,
    pictures,
    walked,
)
from test_models import close, fingerprint, point

from diffrl import families
from diffrl.families import FAMILIES
from diffrl.models import from_pipeline
from diffrl.sampling import rollout


def oracle(case: Case, x_0):
    """A network that knows x_0: (x_t - x_0) / t, t read from what it is given."""

    def forward(hidden_states, timestep, **_):
        rows = [-1, *[1] * (x_0.ndim - 1)]
        x = hidden_states[:, : x_0.shape[1]] if case.name == "wan_i2v" else hidden_states
        return ((x - x_0) / (timestep / case.scale).reshape(rows),)

    return forward


@each
def test_velocity_is_noise_minus_data_at_every_rows_own_t(case):
    pipe, model = made(case)
    cond, (x_0, _), (noise, t) = encoded(case, model), point(model, seed=1), point(model, seed=2)
    assert model.latent_shape() == case.shape
    rows = t.reshape(-1, *[1] * (x_0.ndim - 1))
    x_t = (1 - rows) * x_0 + rows * noise
    pipe.transformer.forward = oracle(case, x_0)
    assert close(model.velocity(model.params, x_t, t, cond), noise - x_0, 1e-3)
    end = rollout(model.velocity, model.params, cond, model.times(5), noise=noise).x_0
    assert torch.allclose(end, x_0, atol=1e-3)
    pipe.transformer.forward = oracle(case._replace(scale=999.0 if case.scale > 1 else 1000.0), x_0)  # negative control
    assert not torch.allclose(model.velocity(model.params, x_t, t, cond), noise - x_0, atol=1e-3)


REFUSED = [
    ("flux", {"height": 22}, "height must be a multiple of 4, got 22"),
    ("flux", {"width": 18}, "width must be a multiple of 4, got 18"),
    ("flux", {"frames": 5}, "frames must be None for an image"),
    ("flux", {"guidance_scale": -1.0}, "guidance_scale"),
    ("flux", {"max_sequence_length": 513}, "max_sequence_length"),
    ("wan", {"height": 24}, "height must be a multiple of 16, got 24"),
    ("wan", {"width": 40}, "width must be a multiple of 16, got 40"),
    ("wan", {"frames": 4}, "frames must be 1 \\+ a multiple of 4, got 4"),
    ("wan", {"frames": None}, "frames must be given for a video"),
    ("wan", {"guidance_scale": 0.5}, "guidance_scale"),
    ("wan_i2v", {"frames": 7}, "frames must be 1 \\+ a multiple of 4, got 7"),
    ("wan_i2v", {"height": 8}, "height must be a multiple of 16"),
    ("hunyuan", {"height": 20}, "height must be a multiple of 8, got 20"),
    ("hunyuan", {"frames": 6}, "frames must be 1 \\+ a multiple of 4, got 6"),
    ("hunyuan", {"frames": 0}, "frames"),
    ("hunyuan", {"guidance_scale": -0.5}, "guidance_scale"),
    ("qwen", {"height": 20}, "height must be a multiple of 8, got 20"),
    ("qwen", {"guidance_scale": 0.0}, "guidance_scale"),
    ("qwen", {"max_sequence_length": 1025}, "max_sequence_length must be at most 1024"),
    ("sana", {"height": 31}, "height must be a multiple of 2, got 31"),
    ("sana", {"guidance_scale": float("nan")}, "guidance_scale"),
    ("sana", {"lora": {**LORA, "lora_dropout": 0.1}}, "lora_dropout"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_refused_before_anything_is_changed(name, options, message):
    case = BY_NAME[name]
    pipe = case.make()
    before = fingerprint(pipe)
    with pytest.raises(ValueError, match=message):
        from_pipeline(pipe, **{**case.size, "lora": LORA, "gradient_checkpointing": True, **options})
    assert fingerprint(pipe) == before


@each
@pytest.mark.parametrize("large", [False, True])
def test_times_are_the_schedulers(case, large):
    size = {k: v * 2 if large and k != "frames" else v for k, v in case.size.items()}
    pipe, model = made(case, fill=False, **size)
    mus = {}
    if case.name in ("flux", "qwen"):
        config = pipe.scheduler.config
        low, high, bottom, top = (
            config[k] for k in ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        )
        tokens = model.latent_shape()[0]
        mus = {"mu": bottom + (top - bottom) * (tokens - low) / (high - low)}
    for steps in (2, 5, 40):
        pipe.scheduler.set_timesteps(sigmas=list(np.linspace(1, 1 / steps, steps)), **mus)
        times = model.times(steps)
        assert times.dtype == torch.float32
        assert (times.diff() < 0).all()
        assert torch.allclose(times, pipe.scheduler.sigmas, atol=2e-6)
    assert model.times(1).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("name", ["wan", "sana"])
def test_a_number_of_steps_alone_is_warped_twice_by_the_euler_scheduler(name):
    pipe, model = made(BY_NAME[name], pipe=BY_NAME[name].make(scheduler={"shift": 3.0}))
    pipe.scheduler.set_timesteps(sigmas=[1, 0.75, 0.5, 0.25])
    assert torch.allclose(pipe.scheduler.sigmas, model.times(4), atol=2e-6)
    assert torch.allclose(model.times(4), torch.tensor([1, 0.9, 0.75, 0.5, 0]))
    pipe.scheduler.set_timesteps(4)  # negative control: what the pipelines' own call does
    assert torch.allclose(pipe.scheduler.sigmas, torch.tensor([1, 0.858, 0.602, 0.0089, 0]), atol=1e-3)


@pytest.mark.parametrize("name", ["wan", "sana"])
def test_released_schedulers_round_their_timesteps_and_are_asked_only_for_their_shift(name):
    from diffusers import DPMSolverMultistepScheduler, UniPCMultistepScheduler

    case, flow = BY_NAME[name], {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
    pipe = case.make()
    kind = UniPCMultistepScheduler if name == "wan" else DPMSolverMultistepScheduler
    pipe.scheduler = kind(**flow)
    _, model = made(case, pipe=pipe)
    assert torch.allclose(model.times(4), torch.tensor([1, 0.9, 0.75, 0.5, 0]))
    pipe.scheduler.set_timesteps(7)
    assert not pipe.scheduler.timesteps.is_floating_point()
    seen = []
    pipe.transformer.register_forward_pre_hook(lambda m, args, kw: seen.append(kw["timestep"]), with_kwargs=True)
    rollout(model.velocity, model.params, encoded(case, model), model.times(7), noise=point(model)[0])
    given = torch.stack(seen)[::2, 0]
    assert torch.equal(given, 1000 * model.times(7)[:-1])
    assert not torch.equal(given, given.round())


@each
@pytest.mark.parametrize("scale", [None, 2.5])
def test_rollout_equals_the_pipelines_own_loop(case, scale):
    pipe, model = made(case, guidance_scale=scale)
    noise, cond, images = point(model)[0], encoded(case, model), pictures(case)
    ours = rollout(model.velocity, model.params, cond, model.times(4), noise=noise).x_0
    forced(pipe, model.times(4))
    call = {case.guidance: scale or FAMILIES[type(pipe).__name__].guidance, "images": images}
    if case in GUIDED:
        call["negative_prompt"] = case.negative if case.name == "sana" else [case.negative]
    theirs = torch.stack(walked(case, pipe, noise, **call))
    assert close(ours, theirs, 1e-4 * max(1.0, float(theirs.abs().max())))
    # negative controls: another guidance, other prompts, another LoRA are seen
    for other in ({case.guidance: 1.3}, {"prompts": PROMPTS[::-1]}):
        assert not close(ours, torch.stack(walked(case, pipe, noise, **{**call, **other})), 1e-3)
    tiny.randomise(model.params, seed=4)
    assert not close(ours, torch.stack(walked(case, pipe, noise, **call)), 1e-3)


@each_guided
def test_a_negative_prompt_and_no_guidance(case):
    pipe, model = made(case, guidance_scale=3.0, negative_prompt="a blue house")
    noise, cond, images = point(model)[0], encoded(case, model), pictures(case)
    ours = rollout(model.velocity, model.params, cond, model.times(3), noise=noise).x_0
    _, plain = made(case, pipe=pipe, lora="default", guidance_scale=1.0)
    alone = rollout(plain.velocity, plain.params, encoded(case, plain), plain.times(3), noise=noise).x_0
    forced(pipe, model.times(3))
    negative = "a blue house" if case.name == "sana" else ["a blue house"]
    theirs = torch.stack(walked(case, pipe, noise, images=images, negative_prompt=negative, **{case.guidance: 3.0}))
    assert close(ours, theirs, 1e-4 * max(1.0, float(theirs.abs().max())))
    theirs = torch.stack(walked(case, pipe, noise, images=images, **{case.guidance: 1.0}))
    assert close(alone, theirs, 1e-4 * max(1.0, float(theirs.abs().max())))
    assert not close(ours, alone, 1e-3)


@each
def test_default_length_is_the_pipelines_own(case):
    pipe, model = made(case, max_sequence_length=None)
    default = inspect.signature(type(pipe).__call__).parameters["max_sequence_length"].default
    assert encoded(case, model, PROMPTS[:1])["encoder_hidden_states"].shape[1] == default


@each
def test_a_row_depends_on_its_prompt_alone_and_all_rows_have_one_shape(case):
    _, model = made(case)
    prompts, images = [*PROMPTS, PROMPTS[0]], pictures(case, 3)
    take = (lambda rows: {}) if images is None else (lambda rows: {"images": [images[i] for i in rows]})
    cond = model.encode(prompts, **take([0, 1, 2, 0]))
    _, again = made(case)
    for i, prompt in enumerate(prompts):
        alone = again.encode((prompt,), **take([i % 3]))
        assert all(torch.equal(cond[k][i], alone[k][0]) for k in cond)
    assert all(torch.is_tensor(v) and len(v) == 4 and not v.requires_grad for v in cond.values())
    assert not torch.equal(cond["encoder_hidden_states"][0], cond["encoder_hidden_states"][1])
    for name, value in cond.items():
        assert value.dtype in ((torch.int64,) if "mask" in name and name != "condition" else (torch.float32,)), name
    x, t = point(model, 4)
    v = model.velocity(model.params, x, t, cond)
    for i in range(4):  # and neither does a row of v
        row = {k: c[i : i + 1] for k, c in cond.items()}
        assert close(model.velocity(model.params, x[i : i + 1], t[i : i + 1], row), v[i : i + 1], 1e-4)
    order = [2, 0, 3, 1]
    shuffled = model.velocity(model.params, x[order], t[order], {k: c[order] for k, c in cond.items()})
    assert close(shuffled, v[order], 1e-4)
    assert not close(shuffled, v, 1e-2)


@each
def test_encoded_prompts_outlive_the_text_encoder(case):
    pipe, model = made(case)
    first = encoded(case, model)
    for name in ("text_encoder", "text_encoder_2"):
        if getattr(pipe, name, None) is not None:
            setattr(pipe, name, None)
    again = encoded(case, model, PROMPTS[:2])
    assert all(torch.equal(again[k], first[k][:2]) for k in first)
    with pytest.raises(ValueError, match="a new prompt"):
        encoded(case, model, ["a new prompt"])


@each_guided
def test_twins_are_those_entries_that_differ(case):
    pipe, model = made(case)
    cond, (x, t), seen = encoded(case, model), point(model), []
    twins = {k for k in cond if k.startswith("uncond.")}
    names = {k for k in cond if k.startswith("encoder_") and "image" not in k}
    assert twins == {f"uncond.{k}" for k in names}
    pipe.transformer.register_forward_pre_hook(lambda m, args, kw: seen.append(kw), with_kwargs=True)
    model.velocity(model.params, x, t, cond)
    assert len(seen) == 2
    assert all(len(kw["hidden_states"]) == len(kw["timestep"]) == 3 for kw in seen)
    _, plain = made(case, pipe=pipe, lora="default", guidance_scale=1.0)
    unguided = encoded(case, plain)
    assert not [k for k in unguided if k.startswith("uncond.")]
    seen.clear()
    v_cond = plain.velocity(plain.params, x, t, unguided)
    assert len(seen) == 1
    v = model.velocity(model.params, x, t, cond)
    scale = FAMILIES[type(pipe).__name__].guidance
    assert not close(v, v_cond, 1e-3)
    twin = {**unguided, **{k.removeprefix("uncond."): cond[k] for k in twins}}
    v_uncond = plain.velocity(plain.params, x, t, twin)
    plainly = v_uncond + scale * (v_cond - v_uncond)
    assert close(v, plainly, 1e-4) is (case.name != "qwen")
    if case.name == "qwen":  # every token keeps the norm of the conditional prediction
        assert torch.allclose(v.norm(dim=-1), v_cond.norm(dim=-1), rtol=1e-4)
        assert close(v, plainly * (v_cond.norm(dim=-1) / plainly.norm(dim=-1))[..., None], 1e-4)
    for name in twins:
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            model.velocity(model.params, x, t, {k: c for k, c in cond.items() if k != name})


@pytest.mark.parametrize(("name", "unit", "default"), [("flux", 1.0, 3.5), ("hunyuan", 1000.0, 6.0)])
def test_embedded_guidance_is_in_cond_and_replayed(name, unit, default):
    # https://github.com/XueZeyue/DanceGRPO: guidance was hard-coded in training and another value used in sampling
    case = BY_NAME[name]
    pipe, model = made(case)
    cond, (x, t), seen = encoded(case, model), point(model), []
    assert cond["guidance"].tolist() == [unit * default] * 3
    assert cond["guidance"].dtype == torch.float32
    assert not [k for k in cond if k.startswith("uncond.")]
    pipe.transformer.register_forward_pre_hook(lambda m, args, kw: seen.append(kw["guidance"]), with_kwargs=True)
    v = model.velocity(model.params, x, t, cond)
    stronger = {**cond, "guidance": torch.tensor([1.5, 2.0, 7.0]) * unit}
    assert not close(model.velocity(model.params, x, t, stronger), v, 1e-3)
    assert seen[0].tolist() == [unit * default] * 3
    assert torch.allclose(seen[1], stronger["guidance"])
    assert made(case, guidance_scale=2.0)[1].encode(PROMPTS[:1])["guidance"].tolist() == [2 * unit]
    with pytest.raises(ValueError, match="guidance"):
        model.velocity(model.params, x, t, {k: c for k, c in cond.items() if k != "guidance"})
    pipe, model = made(case, pipe=case.make(guidance_embeds=False))
    cond = encoded(case, model)
    assert "guidance" not in cond
    assert model.velocity(model.params, x, t, cond).shape == x.shape
    with pytest.raises(ValueError, match=r"guidance_scale=3\.5.*reads no guidance"):
        made(case, pipe=case.make(guidance_embeds=False), guidance_scale=3.5)


@each
def test_decode_gives_the_pipelines_pixels(case):
    pipe, model = made(case)
    latents = point(model)[0]
    out = model.decode(latents)
    assert out.dtype == torch.uint8
    frames = (case.size["frames"],) if "frames" in case.size else ()
    assert out.shape == (3, *frames, case.size["height"], case.size["width"], 3)
    forced(pipe, model.times(1))
    pipe.scheduler.step = lambda v, t, x, **_: (x,)  # no step: the pipeline decodes what it is given
    call = {"num_inference_steps": 1, "images": pictures(case), case.guidance: 1.0}
    for i, pixels in enumerate(walked(case, pipe, latents, output="np", **call)):
        assert np.abs(255 * pixels - out[i].numpy()).max() <= 0.51
    for i, pixels in enumerate(walked(case, pipe, latents, output="pil", **call)):
        images = np.stack([np.array(image) for image in pixels]) if frames else np.array(pixels)
        assert (np.abs(images.astype(int) - out[i].numpy().astype(int)) <= 1).all()
    assert torch.equal(model.decode(latents[1:2]), out[1:2])  # a row does not depend on its neighbours
    assert out.float().std() > 5
    whole = model.decode(latents)
    latents[1].view(-1)[0] = float("nan")
    assert not model.decode(latents)[1].any()
    assert torch.equal(model.decode(latents)[::2], whole[::2])
    mirrored = out.flip(-2)  # negative control
    assert not torch.equal(mirrored, out)


@each
def test_what_the_vae_encodes_is_what_decode_takes(case):
    """The pipelines' scaling, the other way round: pixels -> VAE -> our latents -> decode equals VAE -> VAE."""
    pipe, model = made(case)
    g, config = torch.Generator().manual_seed(0), pipe.vae.config
    frames = (case.size["frames"],) if "frames" in case.size else ((1,) if case.name == "qwen" else ())
    pixels = torch.rand(1, 3, *frames, case.size["height"], case.size["width"], generator=g) * 2 - 1
    with torch.no_grad():
        out = pipe.vae.encode(pixels)
        z = out.latent if hasattr(out, "latent") else out.latent_dist.mode()
        direct = pipe.vae.decode(z, return_dict=False)[0]
    if "latents_mean" in config and config["latents_mean"] is not None:
        mean, std = (torch.tensor(config[k]).view(1, -1, 1, 1, 1) for k in ("latents_mean", "latents_std"))
        latents = (z - mean) / std
    else:
        latents = (z - (config.get("shift_factor") or 0)) * config["scaling_factor"]
    if case.name in ("flux", "qwen"):
        latents = pipe._pack_latents(latents, 1, latents.shape[1], *latents.shape[-2:])
    assert tuple(latents.shape[1:]) == model.latent_shape()
    wanted = (255 * (direct / 2 + 0.5).clamp(0, 1)).round()
    wanted = (wanted[:, :, 0] if case.name == "qwen" else wanted).movedim(1, -1)
    assert (model.decode(latents).float() - wanted).abs().max() <= 1
    assert (model.decode(latents * 0).float() - wanted).abs().max() > 1  # negative control


def test_the_table_holds_every_family():
    assert set(FAMILIES) == {type(case.make()).__name__ for case in CASES} | {"StableDiffusion3Pipeline"}
    defaults = {
        name: (row.guidance, row.timestep_scale, row.video, row.guide is None) for name, row in FAMILIES.items()
    }
    assert defaults == {
        "StableDiffusion3Pipeline": (4.5, 1000.0, False, False),
        "FluxPipeline": (3.5, 1.0, False, True),
        "WanPipeline": (5.0, 1000.0, True, False),
        "WanImageToVideoPipeline": (5.0, 1000.0, True, False),
        "HunyuanVideoPipeline": (6.0, 1000.0, True, True),
        "QwenImagePipeline": (4.0, 1.0, False, False),
        "SanaPipeline": (4.5, 1000.0, False, False),
    }
    assert families.FAMILIES is FAMILIES
