"""Wan and HunyuanVideo: images, networks that are refused, what stays in float32, rounding of masks and guidance."""

import copy

import numpy as np
import pytest
import tiny
import tiny_families
import torch
from family_cases import BY_NAME, PROMPTS, encoded, forced, made, pictures, walked
from test_models import close, others, point

from diffrl import families_video
from diffrl.algorithms import nft
from diffrl.loop import diagnose, train
from diffrl.sampling import rollout


def test_pipelines_of_two_networks_are_refused_and_what_is_the_same_network_is_not(monkeypatch):
    case = BY_NAME["wan"]
    pipe = case.make(boundary_ratio=0.9)
    pipe.register_modules(transformer_2=copy.deepcopy(pipe.transformer))
    with pytest.raises(ValueError, match=r"boundary_ratio=0\.9.*two networks"):
        made(case, pipe=pipe)
    with pytest.raises(ValueError, match="two networks"):
        made(case, pipe=case.make(boundary_ratio=0.875))
    i2v = BY_NAME["wan_i2v"]
    with pytest.raises(ValueError, match="expand_timesteps"):
        made(i2v, pipe=i2v.make(expand_timesteps=True))
    pipe = i2v.make()
    monkeypatch.setattr(families_video.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="ftfy"):
        made(i2v, pipe=pipe)
    made(case)  # text-to-video asks diffusers whether ftfy is there
    with pytest.raises(ValueError, match="zero_cond_t=True"):
        made(BY_NAME["qwen"], pipe=tiny_families.qwen(zero_cond_t=True))


def test_wan_2_2_text_to_video_reads_one_time_per_token():
    case = BY_NAME["wan"]
    pipe, model = made(case, pipe=case.make(expand_timesteps=True))
    noise, cond = point(model)[0], encoded(case, model)
    ours = rollout(model.velocity, model.params, cond, model.times(3), noise=noise).x_0
    forced(pipe, model.times(3))
    theirs = torch.stack(walked(case, pipe, noise, guidance_scale=5.0, negative_prompt=[""]))
    assert close(ours, theirs, 1e-4 * max(1.0, float(theirs.abs().max())))
    seen = []
    pipe.transformer.register_forward_pre_hook(lambda m, args, kw: seen.append(kw["timestep"]), with_kwargs=True)
    t = torch.tensor([0.2, 0.5, 0.7])
    v = model.velocity(model.params, noise, t, cond)
    assert torch.equal(seen[0], (1000 * t)[:, None].expand(3, 2 * 1 * 2))
    _, plain = made(case, pipe=case.make())
    tiny.randomise(plain.params)
    assert close(plain.velocity(plain.params, noise, t, cond), v, 1e-4)


def test_images_condition_the_video_one_per_prompt():
    case = BY_NAME["wan_i2v"]
    pipe, model = made(case)
    images, (x, t) = pictures(case), point(model)
    cond = model.encode(PROMPTS, images)
    assert cond["condition"].shape == (3, 20, 2, 2, 4)
    mask, latents = cond["condition"][:, :4], cond["condition"][:, 4:]
    assert mask[:, :, 0].eq(1).all()
    assert not mask[:, :, 1:].any()
    assert cond["encoder_hidden_states_image"].shape == (3, 5, 4)
    # normalised latents of the first frame followed by grey, by hand
    video = torch.zeros(1, 3, 5, 16, 32)
    video[0, :, 0] = torch.from_numpy(np.array(images[1])).permute(2, 0, 1) / 127.5 - 1
    mean, std = (torch.tensor(pipe.vae.config[k]).view(1, -1, 1, 1, 1) for k in ("latents_mean", "latents_std"))
    with torch.no_grad():
        by_hand = (pipe.vae.encode(video).latent_dist.mode() - mean) / std
        pixel_values = pipe.image_processor(images=images[1], return_tensors="pt").pixel_values
        hidden = pipe.image_encoder(pixel_values, output_hidden_states=True).hidden_states
    assert close(latents[1:2], by_hand)
    assert close(cond["encoder_hidden_states_image"][1:2], hidden[-2])
    assert not close(cond["encoder_hidden_states_image"][1:2], hidden[-1], 1e-3)
    # another image is another video; the same pixels in another form are the same image
    swapped = model.encode(PROMPTS, [images[1], images[0], images[2]])
    v, w = (model.velocity(model.params, x, t, c) for c in (cond, swapped))
    assert not close(v[:2], w[:2], 1e-3)
    assert close(v[2], w[2])
    arrays = [np.array(image) for image in images]
    floats = torch.stack([torch.from_numpy(a).permute(2, 0, 1) / 255 for a in arrays])
    for same in (arrays, torch.from_numpy(np.stack(arrays)), floats):
        again = made(case)[1].encode(PROMPTS, same)
        assert all(close(again[k], cond[k]) for k in cond)
    nearly, white = torch.full((3, 16, 32), 0.999), np.full((16, 32, 3), 255, dtype=np.uint8)
    a, b = (model.encode(PROMPTS[:1], [image])["condition"] for image in (nearly, white))
    assert torch.equal(a, b)  # rounded to 8 bits, not cut
    # resized as the pipeline does
    assert not close(model.encode(PROMPTS, [images[0].resize((48, 48))] * 3)["condition"], cond["condition"], 1e-3)
    for bad in (floats[0] * 2, np.zeros((16, 32)), np.zeros((16, 32, 4), dtype=np.uint8)):
        with pytest.raises(ValueError, match="an image must be"):
            model.encode(PROMPTS[:1], [bad])
    for bad in (None, images[:2], [*images, images[0]]):
        with pytest.raises(ValueError, match="3 images, one per prompt"):
            model.encode(PROMPTS, bad)
    with pytest.raises(ValueError, match="takes no images"):
        made(BY_NAME["wan"])[1].encode(PROMPTS, images)


def test_the_text_must_be_512_tokens_long_where_the_network_counts_on_it():
    """The attention splits text and image at 512 from the end: of a shorter text, image tokens are read as words."""
    case = BY_NAME["wan_i2v"]
    _, model = made(case)
    cond, (x, t) = model.encode(PROMPTS, pictures(case)), point(model)
    assert cond["encoder_hidden_states"].shape[1] == 512
    v = model.velocity(model.params, x, t, cond)
    factors = {k: torch.zeros_like(p) if "add_" in k else p.detach() for k, p in model.params.items()}
    assert not close(model.velocity(factors, x, t, cond), v, 1e-3)  # the image's projections are read
    _, short = made(case, max_sequence_length=8)
    with pytest.warns(UserWarning, match="max_sequence_length=8.*512"):
        cut = short.encode(PROMPTS, pictures(case))
    v = short.velocity(short.params, x, t, cut)
    assert close(short.velocity(factors, x, t, cut), v)  # negative control: here they are not


def test_a_network_that_reads_no_clip_embedding():
    case = BY_NAME["wan_i2v"]
    pipe, model = made(case, pipe=case.make(clip=False))
    cond, noise = encoded(case, model), point(model)[0]
    assert "encoder_hidden_states_image" not in cond
    ours = rollout(model.velocity, model.params, cond, model.times(3), noise=noise).x_0
    forced(pipe, model.times(3))
    theirs = torch.stack(walked(case, pipe, noise, images=pictures(case), guidance_scale=5.0, negative_prompt=[""]))
    assert close(ours, theirs, 1e-4 * max(1.0, float(theirs.abs().max())))
    pipe, model = made(case)
    pipe.image_encoder = None
    with pytest.raises(ValueError, match="no image_encoder"):
        encoded(case, model)


def test_the_loop_trains_on_images():
    case = BY_NAME["wan_i2v"]
    _, model = made(case, fill=False, guidance_scale=1.0)
    images, seen = pictures(case), []
    cond, (x, t) = model.encode(PROMPTS, images), point(model)
    with pytest.raises(ValueError, match=r"cond lacks \['condition'\]"):
        model.velocity(model.params, x, t, {k: c for k, c in cond.items() if k != "condition"})

    def brightness(videos, prompts):
        seen.append(tuple(videos.shape))
        return videos.float().mean((1, 2, 3, 4))

    before = {k: p.detach().clone() for k, p in model.params.items()}
    optimizer = torch.optim.Adam(model.params.values(), lr=1e-3)
    rows = train(model, nft(), PROMPTS[:2], brightness, optimizer, group_size=2, steps=2, seed=0, images=images[:2])
    metrics = next(rows)
    assert seen == [(4, 5, 16, 32, 3)]
    assert np.isfinite(metrics["loss"])
    assert metrics["grad_norm"] > 0
    assert any(not torch.equal(before[k], p) for k, p in model.params.items())
    report = diagnose(
        model, nft(), PROMPTS[:2], brightness, images=images[:2], group_size=2, steps=2, iterations=1, tolerance=0.01
    )
    assert [c.passed for c in report.checks if c.name in ("same seeds, same images", "replay equals rollout")] == [
        True
    ] * 2
    rows = train(model, nft(), PROMPTS[:2], brightness, optimizer, group_size=2, steps=2, seed=0)
    with pytest.raises(ValueError, match="2 images, one per prompt; got none"):  # negative control: images are needed
        next(rows)


def test_wan_keeps_some_weights_in_float32_beside_a_bf16_rest(tmp_path):
    from diffusers import WanTransformer3DModel

    case = BY_NAME["wan"]
    pipe = case.make()
    pipe.transformer.save_pretrained(tmp_path)
    pipe.transformer = WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert next(pipe.transformer.parameters()).dtype == torch.float32  # the first tensor is no witness of the rest
    assert pipe.transformer.patch_embedding.weight.dtype == torch.bfloat16
    _, model = made(case, pipe=pipe)
    _, exact = made(case)
    cond, (x, t) = encoded(case, model), point(model)
    assert cond["encoder_hidden_states"].dtype == torch.bfloat16
    v, wanted = model.velocity(model.params, x, t, cond), exact.velocity(exact.params, x, t, encoded(case, exact))
    assert (v - wanted).norm() < 0.1 * wanted.norm()
    assert model.velocity(others(model.params), x, t, cond).isfinite().all()


def test_hunyuan_mask_and_guidance_are_rounded_as_in_the_pipeline():
    case = BY_NAME["hunyuan"]
    pipe = case.make()
    pipe.transformer.to(torch.bfloat16)
    _, model = made(case, pipe=pipe)
    cond, (x, t), seen = encoded(case, model), point(model), []
    assert cond["guidance"].tolist() == [6000.0] * 3  # of the network's units, exact
    pipe.transformer.register_forward_pre_hook(lambda m, args, kw: seen.append(kw), with_kwargs=True)
    model.velocity(model.params, x, t, cond)
    forced(pipe, model.times(2))
    walked(case, pipe, x, prompts=PROMPTS[:1], guidance_scale=6.0)
    ours, theirs = seen[0], seen[1]
    assert ours["guidance"].dtype == theirs["guidance"].dtype == torch.bfloat16
    assert ours["guidance"][0] == theirs["guidance"][0] == 6016
    assert ours["encoder_attention_mask"].dtype == theirs["encoder_attention_mask"].dtype == torch.bfloat16
    for name in ("encoder_attention_mask", "encoder_hidden_states", "pooled_projections"):
        assert torch.equal(ours[name][:1], theirs[name])
    assert 0 < ours["encoder_attention_mask"].sum(1)[0] < case.length  # the template cropped, then padding
    for scale in (3.3, 7.7, 5.1):
        _, other = made(case, pipe=pipe, lora="default", guidance_scale=scale)
        seen.clear()
        other.velocity(other.params, x, t, encoded(case, other))
        assert seen[0]["guidance"][0] == torch.tensor(scale, dtype=torch.bfloat16) * 1000.0


def test_hunyuan_reads_the_third_last_hidden_state_of_the_templated_prompt():
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

    pipe, model = made(BY_NAME["hunyuan"])
    cond = model.encode(PROMPTS[:1])
    text = DEFAULT_PROMPT_TEMPLATE["template"].format(PROMPTS[0])
    ids = pipe.tokenizer(text, padding="max_length", max_length=95 + 16, return_tensors="pt")
    with torch.no_grad():
        hidden = pipe.text_encoder(
            **{k: ids[k] for k in ("input_ids", "attention_mask")}, output_hidden_states=True
        ).hidden_states
    assert close(cond["encoder_hidden_states"], hidden[-3][:, 95:])
    assert not close(cond["encoder_hidden_states"], hidden[-2][:, 95:], 1e-3)
    assert torch.equal(cond["encoder_attention_mask"], ids.attention_mask[:, 95:])
