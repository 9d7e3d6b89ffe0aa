"""FLUX, Qwen-Image, Sana: packing, masks, guidance that keeps the norm, instructions, grids."""

import inspect

import numpy as np
import pytest
import tiny_families
import torch
from family_cases import BY_NAME, PROMPTS, encoded, forced, made, walked
from hypothesis import given, settings
from hypothesis import strategies as st
from test_models import close, point

from diffrl import families_image
from diffrl.sampling import classifier_free, rollout


def test_the_shift_depends_on_the_size_where_it_is_dynamic_and_qwen_ends_at_its_terminal_time():
    # https://github.com/huggingface/diffusers: trained at one number of tokens, evaluated at another
    for name in ("flux", "qwen"):
        a, b = (made(BY_NAME[name], height=h, width=16)[1].times(4) for h in (16, 64))
        assert not torch.allclose(a, b)
    times = made(BY_NAME["qwen"])[1].times(10)
    assert times[-2] == pytest.approx(0.02, abs=1e-6)
    shift, last = float(np.exp(0.5 + 0.4 * (6 - 4) / 124)), 0.1
    warped = shift * torch.linspace(1, last, 10) / (1 + (shift - 1) * torch.linspace(1, last, 10))
    assert torch.allclose(times[:-1], 1 - (1 - warped) * (1 - 0.02) / (1 - warped[-1]), atol=1e-6)
    unstretched = made(BY_NAME["qwen"], pipe=tiny_families.qwen(scheduler={"shift_terminal": None}))[1].times(10)
    assert torch.allclose(unstretched[:-1], warped, atol=1e-6)
    assert not torch.allclose(unstretched, times, atol=1e-3)


@pytest.mark.parametrize("name", ["flux", "qwen"])
def test_packing_goes_there_and_back_for_sizes_that_are_not_square(name):
    case = BY_NAME[name]
    pipe, model = made(case)
    factor, (tokens, packed) = pipe.vae_scale_factor, model.latent_shape()
    height, width = case.size["height"] // factor, case.size["width"] // factor
    image = torch.randn(2, packed // 4, height, width)
    latents = pipe._pack_latents(image, 2, packed // 4, height, width)
    assert latents.shape == (2, tokens, packed)
    assert torch.equal(
        pipe._unpack_latents(latents, case.size["height"], case.size["width"], factor).reshape(image.shape), image
    )
    seen = []
    decode = pipe.vae.decode
    pipe.vae.decode = lambda z, return_dict: (seen.append(z), decode(z, return_dict=return_dict))[1]
    model.decode(latents)
    z = seen[0][:2].reshape(image.shape)
    if name == "flux":
        assert close(z, image / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor)
    else:
        mean, std = (torch.tensor(pipe.vae.config[k]).view(1, -1, 1, 1) for k in ("latents_mean", "latents_std"))
        assert close(z, image * std + mean)
    # the same number of tokens, other positions: the transposed size is another function
    _, turned = made(case, pipe=pipe, lora="default", height=case.size["width"], width=case.size["height"])
    cond, (x, t) = encoded(case, model), point(model)
    assert turned.latent_shape() == model.latent_shape()
    assert not close(turned.velocity(model.params, x, t, cond), model.velocity(model.params, x, t, cond), 1e-3)


def test_qwen_pads_every_prompt_to_one_length_and_always_has_a_mask():
    pipe, model = made(BY_NAME["qwen"])
    cond = model.encode(PROMPTS)
    alone = [pipe.encode_prompt([p]) for p in PROMPTS]
    assert [mask for _, mask in alone] == [None] * 3  # full masks become None
    lengths = [e.shape[1] for e, _ in alone]
    assert len(set(lengths)) > 1
    assert cond["encoder_hidden_states_mask"].sum(1).tolist() == lengths
    for i, (embeds, _) in enumerate(alone):
        assert close(cond["encoder_hidden_states"][i, : lengths[i]], embeds[0])
        assert not cond["encoder_hidden_states"][i, lengths[i] :].any()
    # what is under the padding is not read
    x, t = point(model)
    v = model.velocity(model.params, x, t, cond)
    filled = cond["encoder_hidden_states"].clone()
    filled[cond["encoder_hidden_states_mask"] == 0] = 3.0
    assert close(model.velocity(model.params, x, t, {**cond, "encoder_hidden_states": filled}), v, 1e-4)
    ones = torch.ones_like(cond["encoder_hidden_states_mask"])  # negative control: without the mask it is
    assert not close(model.velocity(model.params, x, t, {**cond, "encoder_hidden_states_mask": ones}), v, 1e-3)
    # a prompt longer than the length is cut, as in the pipeline
    _, short = made(BY_NAME["qwen"], max_sequence_length=9)
    cut = short.encode(PROMPTS)
    assert cut["encoder_hidden_states"].shape == (3, 9, 32)
    assert close(cut["encoder_hidden_states"], cond["encoder_hidden_states"][:, :9])


def test_qwens_empty_negative_prompt_is_a_space():
    pipe, model = made(BY_NAME["qwen"])
    asked = []
    inner = pipe.encode_prompt
    pipe.encode_prompt = lambda prompt, **kw: (asked.append(prompt), inner(prompt=prompt, **kw))[1]
    model.encode(PROMPTS[:1])
    assert asked == [[PROMPTS[0]], [" "]]
    _, other = made(BY_NAME["qwen"], pipe=pipe, lora="default", negative_prompt="a dog")
    other.encode(PROMPTS[:1])
    assert asked[-1] == ["a dog"]


def test_norm_kept_by_hand():
    v = {
        1.0: torch.tensor([[[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]]]),
        0.0: torch.tensor([[[3.0, 0.0], [0.0, 0.0], [2.0, 0.0]]]),
    }

    def velocity(params, x, t, cond):
        return v[float(cond["c"])].to(x.dtype)

    guided = families_image.norm_kept(velocity, scale=2.0)
    cond = {"c": torch.ones(1), "uncond.c": torch.zeros(1)}
    out = guided({}, torch.zeros(1, 3, 2), torch.ones(1), cond)
    mixed = torch.tensor([3.0, 8.0])
    assert torch.allclose(out[0, 0], mixed * 5 / mixed.norm())
    assert out[0, 1].tolist() == [0, 0]
    assert out[0, 2].tolist() == [0, 0]  # 2 + 2 (1 - 2) = 0 has no direction to keep a norm in
    assert guided({}, torch.zeros(1, 3, 2, dtype=torch.float64), torch.ones(1), cond).dtype == torch.float64
    assert guided({}, torch.zeros(1, 3, 2).bfloat16(), torch.ones(1), cond).dtype == torch.float32
    for bad in ({"c": torch.ones(1)}, {"uncond.c": torch.ones(1)}, {"c": torch.ones(1), "uncond.d": torch.ones(1)}):
        with pytest.raises(ValueError, match="uncond"):
            guided({}, torch.zeros(1, 3, 2), torch.ones(1), bad)
    with pytest.raises(ValueError, match="scale"):
        families_image.norm_kept(velocity, scale=float("nan"))


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.floats(1.0, 20.0))
def test_norm_kept_keeps_norms_and_the_direction_of_classifier_free_guidance(seed, scale):
    g = torch.Generator().manual_seed(seed)
    v = {1.0: torch.randn(2, 3, 5, generator=g), 0.0: torch.randn(2, 3, 5, generator=g)}

    def velocity(params, x, t, cond):
        return v[float(cond["c"][0])]

    cond = {"c": torch.ones(2), "uncond.c": torch.zeros(2)}
    arguments = ({}, torch.zeros(2, 3, 5), torch.ones(2), cond)
    out = families_image.norm_kept(velocity, scale=scale)(*arguments)
    plainly = classifier_free(velocity, scale=scale + 1e-9)(*arguments)
    assert torch.allclose(out.norm(dim=-1), v[1.0].norm(dim=-1), rtol=1e-4)
    assert torch.allclose(torch.cosine_similarity(out, plainly, dim=-1), torch.ones(2, 3), atol=1e-4)


def test_sana_reads_its_instruction_from_the_call_and_lower_cases():
    pipe, model = made(BY_NAME["sana"])
    asked, inner = [], pipe.encode_prompt
    pipe.encode_prompt = lambda prompt, **kw: (
        asked.append(kw["complex_human_instruction"]),
        inner(prompt=prompt, **kw),
    )[1]
    cond = model.encode(["A Red Cat"])
    instruction = inspect.signature(type(pipe).__call__).parameters["complex_human_instruction"].default
    assert asked == [instruction, None]
    assert torch.equal(
        cond["encoder_hidden_states"], made(BY_NAME["sana"])[1].encode(["a red cat"])["encoder_hidden_states"]
    )
    wanted = pipe._get_gemma_prompt_embeds(
        ["a red cat"], "cpu", torch.float32, max_sequence_length=12, complex_human_instruction=instruction
    )[0]
    assert close(cond["encoder_hidden_states"], wanted[:, [0, *range(-11, 0)]])
    # the call would resize to one of its own sizes: compared elsewhere with use_resolution_binning=False
    from diffusers.pipelines.sana.pipeline_sana import ASPECT_RATIO_1024_BIN

    assert pipe.image_processor.classify_height_width_bin(32, 64, ratios=ASPECT_RATIO_1024_BIN) != (32, 64)
    bare = pipe._get_gemma_prompt_embeds(["a red cat"], "cpu", torch.float32, max_sequence_length=12)[0]
    assert not close(cond["encoder_hidden_states"], bare, 1e-3)  # negative control
    negative = pipe._get_gemma_prompt_embeds([""], "cpu", torch.float32, max_sequence_length=12)[0]
    assert close(cond["uncond.encoder_hidden_states"], negative)


@pytest.mark.parametrize(("transformer", "shape"), [({"timestep_scale": 0.5}, 4), ({"out_channels": 8}, 4), ({}, 4)])
def test_sana_timestep_scale_and_predicted_sigma(transformer, shape):
    case = BY_NAME["sana"]
    pipe, model = made(case, pipe=case.make(**transformer))
    cond, noise, seen = encoded(case, model), point(model)[0], []
    pipe.transformer.register_forward_pre_hook(lambda m, args, kw: seen.append(kw["timestep"]), with_kwargs=True)
    t = torch.tensor([0.2, 0.5, 0.7])
    v = model.velocity(model.params, noise, t, cond)
    assert torch.allclose(seen[0], 1000 * t * transformer.get("timestep_scale", 1.0))
    assert v.shape[1] == shape
    ours = rollout(model.velocity, model.params, cond, model.times(3), noise=noise).x_0
    forced(pipe, model.times(3))
    theirs = torch.stack(walked(case, pipe, noise, guidance_scale=4.5))
    assert close(ours, theirs, 1e-4 * max(1.0, float(theirs.abs().max())))
