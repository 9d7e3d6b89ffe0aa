"""models.py on tiny random Stable Diffusion 3 pipelines: the contract, and what went wrong elsewhere.

Outputs are compared to 1e-5 (a tensor elsewhere in memory may change the last bit), states bit for bit.
"""

import copy
import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from diffrl import models
from diffrl.models import Model, from_pipeline
from diffrl.sampling import (
    chunked,
    classifier_free,
    euler_step,
    flow_sde_step,
    rollout,
    time_grid,
    transition_log_prob,
)

SIZE = {"height": 24, "width": 16}
LORA = {"r": 4, "lora_alpha": 16}
PROMPTS = ["a red cat", "the dog sings on the river", "two blue birds"]


def made(*, fill=True, pipe=None, **options):
    """A pipeline and its Model; LoRA factors random unless `fill=False`."""
    pipe = pipe or tiny.sd3()
    options = {"lora": LORA, "max_sequence_length": 8, **SIZE, **options}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = from_pipeline(pipe, **options)
    if fill and isinstance(options["lora"], dict):
        tiny.randomise(model.params)
    return pipe, model


def point(model, b=3, seed=0):
    """(x_t, t) of b rows."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(b, *model.latent_shape(), generator=g), torch.rand(b, generator=g) * 0.9 + 0.05


def others(params, seed=9):
    out = {k: v.detach().clone() for k, v in params.items()}
    tiny.randomise(out, seed=seed)
    return out


def close(a, b, tolerance=1e-5):
    return a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance)


def state(module):
    """Everything a call must leave alone: identity, bits, dtype and requires_grad of each parameter, training flags."""
    tensors = [(n, id(p), p.dtype, p.requires_grad, p.detach().clone()) for n, p in module.named_parameters()]
    return tensors, [m.training for m in module.modules()]


def same_state(a, b):
    return (
        a[1] == b[1]
        and len(a[0]) == len(b[0])
        and all(x[:4] == y[:4] and torch.equal(x[4], y[4]) for x, y in zip(a[0], b[0]))
    )


def fingerprint(pipe):
    """A digest of all weights, flags, adapters, settings and the global generator."""
    h = hashlib.sha256(torch.random.get_rng_state().numpy().tobytes())
    for name, part in pipe.components.items():
        h.update(f"{name} {type(part)}".encode())
        if isinstance(part, torch.nn.Module):
            h.update(str([(n, type(m).__name__, m.training) for n, m in part.named_modules()]).encode())
            h.update(str(sorted(getattr(part, "peft_config", {}))).encode())
            for n, p in part.named_parameters():
                h.update(f"{n} {id(p)} {p.dtype} {p.requires_grad}".encode() + p.detach().float().numpy().tobytes())
    h.update(f"{pipe.transformer.is_gradient_checkpointing} {dict(pipe.scheduler.config)}".encode())
    return h.hexdigest()


# (a) the convention


def oracle(x_0, scale):
    def forward(hidden_states, timestep, **_):
        t = (timestep / scale).reshape(-1, 1, 1, 1)
        return ((hidden_states - x_0) / t,)

    return forward


@pytest.mark.parametrize(("scale", "right"), [(1000.0, True), (1.0, False), (999.0, False)])
def test_velocity_is_noise_minus_data_at_every_rows_own_t(scale, right):
    pipe, model = made(height=16, width=32)
    cond = model.encode(PROMPTS)
    x_0, (noise, t) = point(model, seed=1)[0], point(model, seed=2)
    pipe.transformer.forward = oracle(x_0, scale)
    x_t = (1 - t.reshape(-1, 1, 1, 1)) * x_0 + t.reshape(-1, 1, 1, 1) * noise
    assert close(model.velocity(model.params, x_t, t, cond), noise - x_0, 1e-4) is right
    end = rollout(model.velocity, model.params, cond, model.times(5), noise=noise).x_0
    assert close(end, x_0, 1e-4) is right


def test_timestep_is_float32_and_never_rounded():
    # https://github.com/X-GenGroup/Flow-Factory/pull/61: rollout and replay differed by the rounding of t
    seen = []
    pipe = tiny.sd3().to(torch.bfloat16)
    pipe, model = made(pipe=pipe, guidance_scale=1.0)
    pipe.transformer.register_forward_pre_hook(lambda m, args, kw: seen.append(kw["timestep"]), with_kwargs=True)
    x, _ = point(model, 2)
    t = torch.tensor([0.123456, 0.654321])
    model.velocity(model.params, x, t, model.encode(PROMPTS[:2]))
    assert seen[0].dtype == torch.float32
    assert torch.equal(seen[0], 1000 * t)
    assert not torch.equal(seen[0], (1000 * t).round())


def test_t_may_be_a_number_or_0d_but_not_a_timestep():
    _, model = made()
    cond, (x, _) = model.encode(PROMPTS), point(model)
    full = model.velocity(model.params, x, torch.full((3,), 0.25), cond)
    assert torch.equal(full, model.velocity(model.params, x, 0.25, cond))
    assert torch.equal(full, model.velocity(model.params, x, torch.tensor(0.25), cond))
    assert not close(full, model.velocity(model.params, x, 0.5, cond), 1e-3)
    for bad in (250.0, torch.full((2,), 0.5), torch.full((3,), float("nan")), -0.1):
        with pytest.raises(ValueError, match=r"\bt must be"):
            model.velocity(model.params, x, bad, cond)


# (b) the pipeline's own loop, (c) times


def walked(pipe, noise, steps, *, sigmas=True, **call):
    sigmas = {"sigmas": list(np.linspace(1, 1 / steps, steps))} if sigmas else {}
    size = {"height": noise.shape[2] * 2, "width": noise.shape[3] * 2}
    call = {"num_inference_steps": steps, "max_sequence_length": 8, **size, **sigmas, **call}
    return pipe(latents=noise, output_type="latent", **call).images


@pytest.mark.parametrize("t5", [True, False])
@pytest.mark.parametrize(("height", "width"), [(24, 16), (16, 32)])
@pytest.mark.parametrize(("scale", "negative"), [(None, ""), (1.0, ""), (3.0, "a blue house")])
def test_rollout_equals_the_pipelines_own_loop(t5, height, width, scale, negative):
    pipe, model = made(
        pipe=tiny.sd3(with_t5=t5), height=height, width=width, guidance_scale=scale, negative_prompt=negative
    )
    noise, _ = point(model)
    ours = rollout(model.velocity, model.params, model.encode(PROMPTS), model.times(4), noise=noise).x_0
    call = {"prompt": PROMPTS, "guidance_scale": scale or 4.5, "negative_prompt": [negative] * 3}
    assert close(ours, walked(pipe, noise, 4, **call), 1e-4)
    assert not close(ours, walked(pipe, noise, 4, **{**call, "guidance_scale": 2.0}), 1e-2)


def test_the_pipelines_default_grid_and_other_prompts_are_told_apart():
    """Negative control of the test above, and the double warp of `set_timesteps(n)`."""
    pipe, model = made()
    noise, _ = point(model)
    ours = rollout(model.velocity, model.params, model.encode(PROMPTS), model.times(4), noise=noise).x_0
    call = {"prompt": PROMPTS, "guidance_scale": 4.5}
    assert not close(ours, walked(pipe, noise, 4, sigmas=False, **call), 1e-3)
    assert not close(ours, walked(pipe, noise, 4, prompt=PROMPTS[::-1], guidance_scale=4.5), 1e-3)
    tiny.randomise(model.params, seed=4)
    assert not close(ours, walked(pipe, noise, 4, **call), 1e-3)


def test_default_sequence_length_is_the_pipelines_own():
    pipe = tiny.sd3()
    model = from_pipeline(pipe, **SIZE)
    cond = model.encode(["a cat"])
    assert cond["encoder_hidden_states"].shape == (1, tiny.CLIP_LENGTH + 256, 32)
    assert pipe.transformer.peft_config["default"].r == 32
    assert pipe.transformer.peft_config["default"].init_lora_weights == "gaussian"
    assert pipe.transformer.peft_config["default"].lora_alpha == 64


DYNAMIC = {"use_dynamic_shifting": True, "base_image_seq_len": 4, "max_image_seq_len": 64, "max_shift": 1.16}


@pytest.mark.parametrize(
    "scheduler",
    [
        {},
        DYNAMIC,
        {**DYNAMIC, "time_shift_type": "linear"},
        {"shift_terminal": 0.02},
        {**DYNAMIC, "shift_terminal": 0.1},
    ],
)
@pytest.mark.parametrize("size", [(24, 16), (32, 64)])
def test_times_are_the_schedulers(scheduler, size):
    # https://github.com/huggingface/diffusers: the shift depends on the number of tokens; a Model has one size
    pipe, model = made(pipe=tiny.sd3(scheduler=scheduler), height=size[0], width=size[1])
    tokens = (size[0] // 4) * (size[1] // 4)
    mu = 0.5 + (1.16 - 0.5) * (tokens - 4) / 60
    for steps in (2, 5, 40):
        mus = {"mu": mu} if "use_dynamic_shifting" in scheduler else {}
        pipe.scheduler.set_timesteps(sigmas=list(np.linspace(1, 1 / steps, steps)), **mus)
        times = model.times(steps)
        assert times.dtype == torch.float32
        assert (times.diff() < 0).all()
        assert torch.allclose(times, pipe.scheduler.sigmas, atol=2e-6)
    assert model.times(1).tolist() == [1.0, 0.0]


def test_published_grid_and_given_shift():
    assert torch.allclose(made()[1].times(4), torch.tensor([1, 0.9, 0.75, 0.5, 0]))
    assert torch.allclose(made(shift=1.0)[1].times(4), torch.tensor([1, 0.75, 0.5, 0.25, 0]))
    pipe = tiny.sd3(shift=2.0)
    assert torch.allclose(made(pipe=pipe, fill=False)[1].times(2), torch.tensor([1, 2 / 3, 0]))
    pipe.scheduler.set_shift(4.0)
    assert torch.allclose(made(pipe=pipe, lora="default")[1].times(2), torch.tensor([1, 0.8, 0]))
    from diffusers import DDIMScheduler, UniPCMultistepScheduler

    pipe.scheduler = UniPCMultistepScheduler(use_flow_sigmas=True, flow_shift=5.0)  # Wan's, Sana's name for it
    assert torch.allclose(made(pipe=pipe, lora="default")[1].times(2), torch.tensor([1, 5 / 6, 0]))
    pipe.scheduler = DDIMScheduler()
    with pytest.raises(ValueError, match="DDIMScheduler has no flow shift"):
        made(pipe=pipe, lora="default")
    a, b = (made(pipe=tiny.sd3(scheduler=DYNAMIC), height=h, width=32)[1] for h in (16, 64))
    assert not torch.allclose(a.times(4), b.times(4))
    with pytest.raises(ValueError, match="steps"):
        a.times(0)


# (d) the swap


def test_other_params_are_used_for_one_call_and_leave_no_trace():
    # https://github.com/huggingface/peft/issues/3580: switching adapters flipped requires_grad; params are data
    _, model = made()
    cond, (x, t) = model.encode(PROMPTS), point(model)
    live, before = model.velocity(model.params, x, t, cond), state(model.module)
    old = others(model.params)
    swapped = model.velocity(old, x, t, cond)
    assert not close(swapped, live, 1e-2)
    assert not swapped.requires_grad
    assert same_state(before, state(model.module))
    assert live.requires_grad
    assert torch.equal(live, model.velocity(model.params, x, t, cond))
    # the oracle: those values written into the module for good
    with torch.no_grad():
        for name, tensor in model.params.items():
            tensor.copy_(old[name])
    assert not same_state(before, state(model.module))
    assert close(swapped, model.velocity(model.params, x, t, cond))


def test_a_copy_of_the_live_params_gives_the_live_result_without_graph():
    _, model = made()
    cond, (x, t) = model.encode(PROMPTS), point(model)
    clone = {k: p.clone().requires_grad_(True) for k, p in model.params.items()}
    v = model.velocity(clone, x, t, cond)
    assert not v.requires_grad
    assert close(v, model.velocity(model.params, x, t, cond))
    assert model.velocity(dict(model.params), x, t, cond).requires_grad  # by identity of tensors, not of the mapping
    first = next(iter(model.params))
    assert not model.velocity({**model.params, first: clone[first]}, x, t, cond).requires_grad
    half = {k: p.detach().to(torch.float64) for k, p in model.params.items()}
    assert close(model.velocity(half, x, t, cond), v)


def test_params_come_back_when_the_call_raises():
    _, model = made()
    cond, (x, t), before = model.encode(PROMPTS), point(model), state(model.module)
    seen = []

    def hook(module, args, output):
        seen.append({n: id(p) for n, p in model.module.named_parameters()})
        raise RuntimeError("in the middle")

    handle = model.module.transformer_blocks[1].register_forward_hook(hook)
    with pytest.raises(RuntimeError, match="in the middle"):
        model.velocity(others(model.params), x, t, cond)
    assert same_state(before, state(model.module))
    # negative control: at the time of the raise other tensors were in place
    assert seen[0] != {n: row for n, row, *_ in before[0]}
    handle.remove()
    assert model.velocity(model.params, x, t, cond).requires_grad


def test_malformed_calls_are_refused_by_name_and_shape():
    # https://github.com/verl-project/verl-omni/issues/658: one renamed layer was silently not synced
    _, model = made()
    cond, (x, t) = model.encode(PROMPTS), point(model)
    old = others(model.params)
    first, *_ = old
    renamed = {k.replace("to_out.0", "to_out_0"): v for k, v in old.items()}
    with pytest.raises(ValueError, match="to_out_0"):
        model.velocity(renamed, x, t, cond)
    for wrong in ({k: v for k, v in old.items() if k != first}, {**old, "more": x}, {}):
        with pytest.raises(ValueError, match="names"):
            model.velocity(wrong, x, t, cond)
    with pytest.raises(ValueError, match=r"\(2, 2\)"):
        model.velocity({**old, first: torch.zeros(2, 2)}, x, t, cond)
    with pytest.raises(ValueError, match=r"4, 12, 8.*\(3, 4, 8, 12\)"):
        model.velocity(model.params, x.transpose(2, 3), t, cond)
    with pytest.raises(ValueError, match=r"uncond\.pooled_projections"):
        model.velocity(model.params, x, t, {k: v for k, v in cond.items() if k != "uncond.pooled_projections"})
    with pytest.raises(ValueError, match="leading axis 3"):
        model.velocity(model.params, x, t, {**cond, "pooled_projections": cond["pooled_projections"][:1]})


# (e) gradient, (f) checkpointing, (h) ratio


def gradients(model, cond, x, t, between=None):
    for p in model.params.values():
        p.grad = None
    loss = (model.velocity(model.params, x, t, cond) ** 2).mean()
    if between is not None:
        between()
    loss.backward()
    return {k: p.grad.clone() for k, p in model.params.items()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_reaches_every_lora_factor_and_nothing_else(checkpointing):
    # https://github.com/cloneofsimo/lora/issues/26: with gradient checkpointing the LoRA got no gradient
    pipe, model = made(gradient_checkpointing=checkpointing)
    assert model.module.is_gradient_checkpointing is checkpointing
    x, t = point(model)
    grads = gradients(model, model.encode(PROMPTS), x.requires_grad_(False), t)
    assert sum(bool(g.any()) for g in grads.values()) >= len(grads) / 2
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            assert not any(m.training for m in part.modules())
            trained = {n for n, p in part.named_parameters() if p.requires_grad}
            assert trained == (set(model.params) if part is model.module else set())
            assert {n for n, p in part.named_parameters() if p.grad is not None} == trained


@pytest.mark.parametrize("scale", [1.0, 4.5])
def test_checkpointing_changes_no_gradient_nor_does_an_old_policy_in_between(scale):
    _, plain = made(guidance_scale=scale)
    _, model = made(guidance_scale=scale, gradient_checkpointing=True)
    cond, (x, t), old = plain.encode(PROMPTS), point(plain), others(plain.params)
    wanted = gradients(plain, cond, x, t)

    def old_policy():
        model.velocity(old, x, t, cond)

    for got in (gradients(model, cond, x, t), gradients(model, cond, x, t, old_policy)):
        assert all(close(got[k], wanted[k]) for k in wanted)

    def copy_in_and_forget():
        with torch.no_grad():
            for k, p in model.params.items():
                p.data = old[k]

    got = gradients(model, cond, x, t, copy_in_and_forget)  # negative control: the recompute sees other values
    assert not all(close(got[k], wanted[k], 1e-3) for k in wanted)


def test_a_checkpointed_swap_with_a_graph_would_be_silently_wrong():
    """Why other params are used without gradient: the recompute in backward finds the live values in the module."""
    _, model = made(guidance_scale=1.0, gradient_checkpointing=True)
    cond, (x, t) = model.encode(PROMPTS), point(model)
    inputs = {"hidden_states": x, "timestep": 1000 * t, **cond, "return_dict": False}
    grads = []
    for checkpointing in (False, True):
        model.module.gradient_checkpointing = checkpointing
        values = {k: v.requires_grad_(True) for k, v in others(model.params).items()}
        v = torch.func.functional_call(model.module, values, (), inputs)[0]
        grads.append(torch.autograd.grad((v**2).mean(), list(values.values()), allow_unused=True))
    assert any(b is None or not close(a, b, 1e-3) for a, b in zip(*grads))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_on_policy_ratio_is_one_for_every_chunk_size(size):
    _, model = made()
    prompts = [PROMPTS[i % 3] for i in range(5)]
    cond = model.encode(prompts)
    velocity = chunked(model.velocity, size=size)
    path = rollout(
        velocity,
        {k: p.detach().clone() for k, p in model.params.items()},
        cond,
        model.times(4),
        seeds=torch.arange(5),
        shape=model.latent_shape(),
        step=[flow_sde_step] * 3 + [euler_step],
    )
    for i in range(3):
        v = model.velocity(model.params, path.x_t[:, i], path.t[i].expand(5), cond)
        assert close(v, path.v[:, i])
        log_prob = transition_log_prob(path.x_next[:, i], *flow_sde_step(path.x_t[:, i], v, path.t[i], path.t_next[i]))
        assert torch.allclose((log_prob - path.log_prob[:, i]).exp(), torch.ones(5), atol=1e-4)
    off = model.velocity(others(model.params), path.x_t[:, 0], path.t[0].expand(5), cond)
    wrong = transition_log_prob(path.x_next[:, 0], *flow_sde_step(path.x_t[:, 0], off, path.t[0], path.t_next[0]))
    assert not torch.allclose((wrong - path.log_prob[:, 0]).exp(), torch.ones(5), atol=1e-3)


# guidance


@pytest.mark.parametrize(("scale", "calls"), [(1.0, 1), (1.5, 2)])
def test_forwards_and_twins(scale, calls):
    # https://github.com/NVlabs/DiffusionNFT/issues/4: guidance above 1 doubled the prompts and not the latents
    pipe, model = made(guidance_scale=scale)
    cond, (x, t), seen = model.encode(PROMPTS), point(model), []
    pipe.transformer.register_forward_pre_hook(lambda m, args, kw: seen.append(kw), with_kwargs=True)
    model.velocity(model.params, x, t, cond)
    names = {"encoder_hidden_states", "pooled_projections"}
    assert set(cond) == (names if calls == 1 else names | {f"uncond.{n}" for n in names})
    assert len(seen) == calls
    for kw in seen:
        assert not [k for k in kw if k.startswith("uncond.")]
        assert len(kw["hidden_states"]) == len(kw["timestep"]) == len(kw["pooled_projections"]) == 3


def test_guidance_is_classifier_free_of_the_unguided_velocity():
    pipe, model = made(guidance_scale=2.5, negative_prompt="a green house")
    plain = from_pipeline(pipe, lora="default", guidance_scale=1.0, max_sequence_length=8, **SIZE)
    assert all(plain.params[k] is p for k, p in model.params.items())
    cond, (x, t) = model.encode(PROMPTS), point(model)
    v = model.velocity(model.params, x, t, cond)
    assert close(v, classifier_free(plain.velocity, scale=2.5)(model.params, x, t, cond))
    negative = plain.encode(["a green house"])
    assert close(cond["uncond.pooled_projections"], negative["pooled_projections"].expand(3, -1))
    # a guided cond given to an unguided model: its twins are not looked at
    assert close(plain.velocity(model.params, x, t, cond), plain.velocity(model.params, x, t, plain.encode(PROMPTS)))
    assert not close(v, plain.velocity(model.params, x, t, cond), 1e-3)


# encode


def test_a_row_depends_on_its_prompt_alone():
    pipe, model = made()
    cond = model.encode([*PROMPTS, PROMPTS[0]])
    _, again = made()
    for i, prompt in enumerate([*PROMPTS, PROMPTS[0]]):
        alone = again.encode((prompt,))
        assert all(torch.equal(cond[k][i], alone[k][0]) for k in cond)
    assert not close(cond["pooled_projections"][0], cond["pooled_projections"][1], 1e-3)
    direct = pipe.encode_prompt(PROMPTS, None, None, max_sequence_length=8, negative_prompt=[""] * 3)
    keys = ("encoder_hidden_states", "uncond.encoder_hidden_states", "pooled_projections", "uncond.pooled_projections")
    assert all(close(cond[k][:3], x) for k, x in zip(keys, direct))
    assert not any(x.requires_grad or x.is_inference() for x in cond.values())


def test_each_distinct_prompt_is_encoded_once_and_kept_by_content():
    pipe, model = made()
    seen = []
    pipe.text_encoder.register_forward_hook(lambda m, args, out: seen.append(args[0].shape))
    first = model.encode([PROMPTS[0], PROMPTS[1], PROMPTS[0]])
    assert [s[0] for s in seen] == [1, 1, 1]  # two prompts, one negative
    for x in first.values():
        x.zero_()  # what is returned is the caller's
    again = model.encode([PROMPTS[1], PROMPTS[0]])
    assert len(seen) == 3
    assert all(x.any() for x in again.values())
    for x in model.encode(PROMPTS[:1]).values():
        x.zero_()
    assert all(x.any() for x in model.encode(PROMPTS[:1]).values())
    pipe.text_encoder = pipe.text_encoder_2 = pipe.text_encoder_3 = None
    third = model.encode(PROMPTS[:2])
    assert all(torch.equal(third[k], again[k].flip(0)) for k in third)
    with pytest.raises(ValueError, match="a new prompt"):
        model.encode(["a new prompt"])


def test_without_t5_zeros_but_never_by_accident():
    pipe, model = made()
    model.encode(PROMPTS[:1])
    pipe.text_encoder_3 = None
    model.encode(PROMPTS[:1])
    with pytest.raises(ValueError, match="text_encoder_3"):
        model.encode(PROMPTS[1:2])
    _, model = made(pipe=tiny.sd3(with_t5=False))
    cond = model.encode(PROMPTS)
    assert cond["encoder_hidden_states"].shape == (3, tiny.CLIP_LENGTH + 8, 32)
    assert not cond["encoder_hidden_states"][:, tiny.CLIP_LENGTH :].any()
    assert cond["encoder_hidden_states"][:, : tiny.CLIP_LENGTH].any()


def test_encode_is_in_eval_mode_although_t5_starts_with_dropout():
    pipe = tiny.sd3()
    noisy = [pipe.encode_prompt(PROMPTS[:1], None, None, max_sequence_length=8)[0] for _ in range(2)]
    assert not close(*noisy)  # negative control: as built, the encoder is random
    a, b = (made(pipe=tiny.sd3())[1].encode(PROMPTS)["encoder_hidden_states"] for _ in range(2))
    assert torch.equal(a, b)


@pytest.mark.parametrize("prompts", ["a cat", [], ["a", 3], 7 * [None]])
def test_prompts_of_another_kind_are_refused(prompts):
    with pytest.raises(ValueError, match="prompts"):
        made()[1].encode(prompts)


def test_images_for_a_text_only_family_are_refused():
    with pytest.raises(ValueError, match="no images"):
        made()[1].encode(["a cat"], images=[torch.zeros(3, 8, 8)])


# decode


@pytest.mark.parametrize(("height", "width"), [(24, 16), (16, 32)])
def test_decode_gives_the_pipelines_pixels(height, width):
    pipe, model = made(height=height, width=width)
    latents = 2 * point(model)[0]
    out = model.decode(latents)
    assert out.shape == (3, height, width, 3)
    assert out.dtype == torch.uint8
    call = {"latents": latents, "num_inference_steps": 1, "height": height, "width": width, "max_sequence_length": 8}
    pipe.scheduler.step = lambda v, t, x, **_: (x,)  # no step: the pipeline decodes what it is given
    images = pipe(PROMPTS, guidance_scale=1.0, **call).images
    pixels = torch.stack([torch.from_numpy(np.array(image)) for image in images])
    assert (out.int() - pixels.int()).abs().max() <= 1  # a half may round either way
    assert (out != pixels).float().mean() < 0.01
    assert torch.equal(model.decode(latents[1:2]), out[1:2])  # a row does not depend on its neighbours
    assert out.float().std() > 10
    pipe.vae.register_to_config(shift_factor=0.0)  # negative control: the shift is part of it
    assert (model.decode(latents).int() - pixels.int()).abs().max() > 1


def test_latents_that_are_not_finite_are_black_and_harm_nobody():
    pipe, model = made()
    latents, _ = point(model)
    whole = model.decode(latents)
    for bad in (float("nan"), float("inf")):
        broken = latents.clone()
        broken[1, 0, 0, 0] = bad
        out = model.decode(broken)
        assert not out[1].any()
        assert torch.equal(out[::2], whole[::2])
    assert whole[1].any()
    pipe.vae.decode = lambda z, return_dict: (torch.ones(1, 3, 24, 16),)  # a decoder that does not notice
    assert model.decode(broken).float().mean((1, 2, 3)).tolist() == [255, 0, 255]
    pipe.vae.decode = lambda z, return_dict: (torch.full((1, 3, 24, 16), float("nan")),)
    assert not model.decode(latents).any()
    assert model.decode(latents[:0]).shape == (0, 24, 16, 3)
    with pytest.raises(ValueError, match="latents"):
        model.decode(latents[0])


def test_decode_keeps_no_graph_and_follows_the_vaes_dtype():
    pipe, model = made()
    latents = point(model)[0].requires_grad_(True)
    out = model.decode(latents)
    pipe.vae.to(torch.bfloat16)
    assert (model.decode(latents).int() - out.int()).abs().float().mean() < 3


# (g) export and resuming


def outputs(pipe, x, t, cond):
    inputs = {k: v for k, v in cond.items() if not k.startswith("uncond.")}
    with torch.no_grad():
        return pipe.transformer(hidden_states=x, timestep=1000 * t, **inputs, return_dict=False)[0]


def test_export_reloads_to_the_same_outputs(tmp_path):
    # https://github.com/huggingface/diffusers/issues/11790: would not load, or loaded as a no-op with a warning
    _, model = made(guidance_scale=1.0)
    cond, (x, t) = model.encode(PROMPTS), point(model)
    wanted = model.velocity(model.params, x, t, cond).detach()
    folder = model.export(str(tmp_path / "new" / "lora"))
    assert isinstance(folder, Path)
    assert (folder / "pytorch_lora_weights.safetensors").is_file()
    fresh = tiny.sd3()
    base = outputs(fresh, x, t, cond)
    fresh.load_lora_weights(folder)
    assert close(outputs(fresh, x, t, cond), wanted)
    assert not close(base, wanted, 1e-2)
    # other params: a behaviour policy, an average
    old = others(model.params)
    before = state(model.module)
    model.export(tmp_path / "old", old)
    assert same_state(before, state(model.module))
    other = tiny.sd3()
    other.load_lora_weights(tmp_path / "old")
    assert close(outputs(other, x, t, cond), model.velocity(old, x, t, cond))
    with pytest.raises(ValueError, match="names"):
        model.export(tmp_path / "bad", {"x": x})
    assert not (tmp_path / "bad").exists()


def test_without_metadata_alpha_is_lost(tmp_path):
    # https://github.com/huggingface/peft: it loaded and was wrong. The negative control of the test above.
    from peft import get_peft_model_state_dict

    pipe, model = made(guidance_scale=1.0)
    cond, (x, t) = model.encode(PROMPTS), point(model)
    type(pipe).save_lora_weights(tmp_path, transformer_lora_layers=get_peft_model_state_dict(model.module))
    fresh = tiny.sd3()
    fresh.load_lora_weights(tmp_path)
    assert not close(outputs(fresh, x, t, cond), model.velocity(model.params, x, t, cond), 1e-2)


@pytest.mark.parametrize(
    "options", [{"use_rslora": True}, {"use_dora": True}, {"rank_pattern": {"to_q": 2}, "alpha_pattern": {"to_k": 3}}]
)
def test_export_keeps_other_scalings(tmp_path, options):
    _, model = made(guidance_scale=1.0, lora={**LORA, **options})
    cond, (x, t) = model.encode(PROMPTS), point(model)
    fresh = tiny.sd3()
    fresh.load_lora_weights(model.export(tmp_path))
    assert close(outputs(fresh, x, t, cond), model.velocity(model.params, x, t, cond))


def test_resume_on_a_loaded_adapter(tmp_path):
    # https://github.com/huggingface/trl/issues/495: the reference is a snapshot, not "adapter off"
    _, model = made()
    cond, (x, t) = model.encode(PROMPTS), point(model)
    wanted = model.velocity(model.params, x, t, cond).detach()
    pipe = tiny.sd3()
    pipe.load_lora_weights(model.export(tmp_path), adapter_name="default")
    _, resumed = made(pipe=pipe, lora="default")
    assert set(resumed.params) == set(model.params)
    reference = {k: p.detach().clone() for k, p in resumed.params.items()}
    assert close(resumed.velocity(resumed.params, x, t, cond), wanted)
    optimizer = torch.optim.SGD(resumed.params.values(), lr=1.0)
    gradients(resumed, cond, x, t)
    optimizer.step()
    assert not close(resumed.velocity(resumed.params, x, t, cond), wanted)
    assert close(resumed.velocity(reference, x, t, cond), wanted)
    again = tiny.sd3()
    again.load_lora_weights(resumed.export(tmp_path / "second"))
    _, third = made(pipe=again, lora="default_0")
    assert close(third.velocity(third.params, x, t, cond), resumed.velocity(resumed.params, x, t, cond))
    with torch.no_grad():
        again.disable_lora()
        assert not close(third.velocity(third.params, x, t, cond), wanted, 1e-2)  # "adapter off" is the base


def test_params_are_chosen_by_the_adapters_name(tmp_path):
    # https://github.com/verl-project/verl-omni/issues/608: a copy without tensors, by prefix matching
    _, model = made()
    model.export(tmp_path)
    pipe = tiny.sd3()
    for name in ("first", "first_b"):
        pipe.load_lora_weights(tmp_path, adapter_name=name)
    pipe.disable_lora()
    pipe, resumed = made(pipe=pipe, lora="first")
    assert len(resumed.params) == len(model.params)
    assert all(".first." in k for k in resumed.params)
    assert {n for n, p in pipe.transformer.named_parameters() if p.requires_grad} == set(resumed.params)
    cond, (x, t) = model.encode(PROMPTS), point(model)
    assert close(resumed.velocity(resumed.params, x, t, cond), model.velocity(model.params, x, t, cond))
    assert any(g.any() for g in gradients(resumed, cond, x, t).values())


def test_another_size_shares_the_live_params():
    pipe, small = made()
    large = from_pipeline(pipe, height=32, width=48, lora="default", max_sequence_length=8)
    assert all(large.params[k] is p for k, p in small.params.items())
    assert large.latent_shape() == (4, 16, 24)
    assert small.latent_shape() == (4, 12, 8)
    assert small.latent_shape(height=32, width=48) == (4, 16, 24)
    assert small.latent_shape(width=32) == (4, 12, 16)
    cond, (x, t) = large.encode(PROMPTS), point(large)
    assert large.velocity(small.params, x, t, cond).requires_grad
    for bad in ({"height": 30}, {"frames": 5}, {"width": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            small.latent_shape(**bad)


# a fresh LoRA, dtypes, full training


def test_a_fresh_and_a_zero_lora_are_exactly_the_base_model():
    # https://github.com/huggingface/peft/issues/493: "adapter off" was not the base model
    base = tiny.sd3()
    base.transformer.eval()
    _, model = made(fill=False, guidance_scale=1.0)
    cond, (x, t) = model.encode(PROMPTS), point(model)
    wanted = outputs(base, x, t, cond)
    assert close(model.velocity(model.params, x, t, cond), wanted)
    assert all(p.any() for k, p in model.params.items() if "lora_A" in k)
    zero = {k: torch.zeros_like(p) for k, p in model.params.items()}
    assert close(model.velocity(zero, x, t, cond), wanted)
    tiny.randomise(model.params)
    assert not close(model.velocity(model.params, x, t, cond), wanted, 1e-2)
    assert close(model.velocity(zero, x, t, cond), wanted)


def test_every_attention_projection_is_adapted():
    # https://github.com/verl-project/verl-omni/issues/552: the adapter was bound to no module
    _, model = made()
    layers = {k.split(".lora_")[0].split(".attn.")[1] for k in model.params}
    assert layers == {"to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"}
    assert len(model.params) == 2 * (8 + 7)  # the last block has no to_add_out
    named = dict(model.module.named_parameters())
    assert all(named[k] is p and p.dtype == torch.float32 for k, p in model.params.items())


def test_bf16_base_with_float32_factors():
    # https://github.com/Tencent-Hunyuan/UniRL/pull/151: bf16 LoRA weights swallowed small updates
    _, exact = made(guidance_scale=1.0)
    _, model = made(pipe=tiny.sd3().to(torch.bfloat16), guidance_scale=1.0)
    assert {p.dtype for p in model.params.values()} == {torch.float32}
    assert {p.dtype for n, p in model.module.named_parameters() if n not in model.params} == {torch.bfloat16}
    cond, (x, t) = model.encode(PROMPTS), point(model)
    assert {c.dtype for c in cond.values()} == {torch.bfloat16}
    v = model.velocity(model.params, x, t, cond)
    assert v.dtype == torch.float32
    assert model.velocity(others(model.params), x, t, cond).dtype == torch.float32
    wanted = exact.velocity(exact.params, x, t, exact.encode(PROMPTS))
    assert (v - wanted).norm() < 0.05 * wanted.norm()
    assert v.isfinite().all()
    grads = gradients(model, cond, x, t)
    assert {g.dtype for g in grads.values()} == {torch.float32}
    first = next(iter(model.params))
    before = model.params[first].detach().clone()
    with torch.no_grad():
        model.params[first].add_(1e-4 * before)
        assert not torch.equal(model.params[first], before)
        assert torch.equal(before.bfloat16() * (1 + 1e-4), before.bfloat16())  # negative control: lost in bf16
    assert model.decode(point(model)[0]).shape == (3, 24, 16, 3)


def test_resumed_bf16_factors_become_float32(tmp_path):
    made()[1].export(tmp_path)
    pipe = tiny.sd3().to(torch.bfloat16)
    pipe.load_lora_weights(tmp_path, adapter_name="default")
    assert {p.dtype for p in pipe.transformer.parameters()} == {torch.bfloat16}
    _, model = made(pipe=pipe, lora="default")
    assert {p.dtype for p in model.params.values()} == {torch.float32}


def test_full_fine_tuning(tmp_path):
    from diffusers import SD3Transformer2DModel

    pipe, model = made(lora=None)
    assert set(model.params) == {n for n, _ in pipe.transformer.named_parameters()}
    assert all(p.requires_grad for p in model.params.values())
    assert not any(p.requires_grad for p in pipe.text_encoder.parameters())
    cond, (x, t) = model.encode(PROMPTS), point(model)
    assert all(g.isfinite().all() for g in gradients(model, cond, x, t).values())
    old, before = {k: p.detach() * 1.1 for k, p in model.params.items()}, state(model.module)
    assert not close(model.velocity(old, x, t, cond), model.velocity(model.params, x, t, cond), 1e-3)
    double = {k: v.double() for k, v in old.items()}  # an average kept in another dtype is used in the module's
    assert close(model.velocity(double, x, t, cond), model.velocity(old, x, t, cond))
    for folder, params in (("live", None), ("old", old)):
        assert model.export(tmp_path / folder, params) == tmp_path / folder
        saved = SD3Transformer2DModel.from_pretrained(tmp_path / folder / "transformer")
        assert all(torch.equal(p, (params or model.params)[n]) for n, p in saved.named_parameters())
    assert same_state(before, state(model.module))


def test_rebind_gives_an_independent_policy():
    # https://github.com/huggingface/diffusers/issues/10492: a quantised copy is made anew, nothing is merged into it
    _, model = made()
    cond, (x, t) = model.encode(PROMPTS), point(model)
    double = copy.deepcopy(model.module)
    copied = model.rebind(double)
    assert copied.module is double
    assert list(copied.params) == list(model.params)
    assert not {p.data_ptr() for p in double.parameters()} & {p.data_ptr() for p in model.module.parameters()}
    v = model.velocity(model.params, x, t, cond)
    assert close(copied.velocity(copied.params, x, t, cond), v)
    tiny.randomise(copied.params, seed=8)
    assert not close(copied.velocity(copied.params, x, t, cond), v, 1e-2)
    assert close(copied.velocity({k: p.detach() for k, p in model.params.items()}, x, t, cond), v)
    assert torch.equal(model.velocity(model.params, x, t, cond), v)
    assert copied.encode is model.encode
    assert torch.equal(copied.times(3), model.times(3))
    with pytest.raises(ValueError, match="lacks 30"):
        model.rebind(tiny.sd3().transformer)


def test_rebound_export_writes_the_copys_params(tmp_path):
    _, model = made(guidance_scale=1.0)
    cond, (x, t) = model.encode(PROMPTS), point(model)
    copied = model.rebind(copy.deepcopy(model.module))
    tiny.randomise(copied.params, seed=8)
    fresh = tiny.sd3()
    fresh.load_lora_weights(copied.export(tmp_path))
    assert close(outputs(fresh, x, t, cond), copied.velocity(copied.params, x, t, cond))
    assert not close(outputs(fresh, x, t, cond), model.velocity(model.params, x, t, cond), 1e-2)


def test_eval_mode_for_ever():
    # https://github.com/huggingface/peft: dropout made rollout and replay two policies
    _, model = made()
    cond, (x, t) = model.encode(PROMPTS), point(model)
    model.module.train()
    model.velocity(model.params, x, t, cond)
    assert not any(m.training for m in model.module.modules())


# refusals


def with_adapter(pipe, **options):
    made(pipe=pipe, **options)


def bf16(pipe):
    pipe.transformer.to(torch.bfloat16)


def weighted(pipe):
    with_adapter(pipe)
    pipe.set_adapters(["default"], [0.5])


def fused(pipe):
    with_adapter(pipe)
    pipe.fuse_lora(components=["transformer"], adapter_names=["default"])


def nothing(pipe):
    pass


REFUSED = [
    ({"height": 30}, nothing, "height must be a multiple of 4, got 30"),
    ({"width": 18}, nothing, "width must be a multiple of 4, got 18"),
    ({"height": 0}, nothing, "height"),
    ({"width": -16}, nothing, "width"),
    ({"height": 24.0}, nothing, "height"),
    ({"height": 128}, nothing, "positions up to 64"),
    ({"frames": 5}, nothing, "frames"),
    ({"guidance_scale": 0.5}, nothing, "guidance_scale"),
    ({"guidance_scale": float("nan")}, nothing, "guidance_scale"),
    ({"shift": 0.0}, nothing, "shift"),
    ({"shift": -1.0}, nothing, "shift"),
    ({"shift": float("inf")}, nothing, "shift"),
    ({"max_sequence_length": 0}, nothing, "max_sequence_length"),
    ({"max_sequence_length": 513}, nothing, "max_sequence_length"),
    ({"negative_prompt": ["a"]}, nothing, "negative_prompt"),
    ({"lora": {**LORA, "lora_dropout": 0.1}}, nothing, "lora_dropout=0.1"),
    ({"lora": {**LORA, "lora_alpha": 0}}, nothing, "lora_alpha"),
    ({"lora": {**LORA, "bias": "all"}}, nothing, "bias"),
    ({"lora": {**LORA, "modules_to_save": ["proj_out"]}}, nothing, "modules_to_save"),
    ({"lora": {**LORA, "init_lora_weights": "pissa"}}, nothing, "pissa"),
    ({"lora": {"r": 0}}, nothing, "rank"),
    ({"lora": {**LORA, "target_modules": ["no_such_layer"]}}, nothing, "no_such_layer"),
    ({"lora": {**LORA, "target_modules": ["to_q", "to_out_0"]}}, nothing, "to_out_0"),
    ({"lora": {**LORA, "target_modules": r"blocks\..*"}}, nothing, "match nothing"),
    ({"lora": {**LORA, "target_modules": []}}, nothing, "match nothing"),
    ({"lora": {**LORA, "target_modules": ["norm_q"]}}, nothing, "cannot adapt"),
    ({"lora": 4}, nothing, "lora must be"),
    ({"lora": "default"}, nothing, "no adapter 'default'.*loaded: \\[\\]"),
    ({"lora": "other"}, with_adapter, "no adapter 'other'.*default"),
    ({}, with_adapter, "adapters \\['default'\\]"),
    ({"lora": None}, with_adapter, "adapters \\['default'\\]"),
    ({"lora": None}, bf16, "float32.*bfloat16"),
    ({"lora": "default"}, weighted, "weight 0.5"),
    ({"lora": "default"}, fused, "fused"),
]


@pytest.mark.parametrize(("options", "arrange", "message"), REFUSED, ids=lambda x: getattr(x, "__name__", str(x)[:40]))
def test_refused_before_anything_is_changed(options, arrange, message):
    pipe = tiny.sd3()
    arrange(pipe)
    before = fingerprint(pipe)
    with pytest.raises(ValueError, match=message):
        from_pipeline(pipe, **{**SIZE, "lora": LORA, "gradient_checkpointing": True, **options})
    assert fingerprint(pipe) == before


def test_the_fingerprint_sees_every_change():
    """Negative control of the refusals."""
    pipe = tiny.sd3()
    seen = {fingerprint(pipe)}
    pipe.text_encoder_3.eval()
    seen.add(fingerprint(pipe))
    pipe.vae.requires_grad_(False)
    seen.add(fingerprint(pipe))
    pipe.transformer.enable_gradient_checkpointing()
    seen.add(fingerprint(pipe))
    torch.rand(1)
    seen.add(fingerprint(pipe))
    with_adapter(pipe)
    seen.add(fingerprint(pipe))
    assert len(seen) == 6


def test_other_pipelines_are_refused_by_name_and_unknown_keywords_by_python():
    class KolorsPipeline:
        pass

    with pytest.raises(ValueError, match=r"KolorsPipeline is not supported.*StableDiffusion3Pipeline"):
        from_pipeline(KolorsPipeline(), **SIZE)
    with pytest.raises(TypeError):
        from_pipeline(tiny.sd3(), **SIZE, guidence_scale=3.0)


def test_an_unloaded_adapter_leaves_room_for_a_new_one():
    pipe, _ = made()
    pipe.unload_lora_weights()
    _, model = made(pipe=pipe)
    assert len(model.params) == 30


# the table, toys, noise and imports


def test_the_table_serves_video_images_and_embedded_guidance(monkeypatch):
    # https://github.com/XueZeyue/DanceGRPO: guidance was hard-coded in training and another value used in sampling
    name, encoded = "StableDiffusion3Pipeline", []
    row = models.FAMILIES[name]

    def encode_image(pipe, image, size):
        encoded.append(size)
        return {"image_latents": image[None].double()}

    def decode(pipe, size, latents):
        return np.full((1, size.frames, size.height, size.width, 3), 0.5)

    video = row._replace(
        video=True,
        encode_image=encode_image,
        decode=decode,
        guide=None,
        guidance=6.0,
        guidance_unit=lambda pipe: 1000.0,
    )
    monkeypatch.setitem(models.FAMILIES, name, video)
    _, model = made(frames=5)
    red, blue = torch.zeros(3, 4, 4), torch.ones(3, 4, 4)
    cond = model.encode([PROMPTS[0], PROMPTS[1], PROMPTS[0]], images=[red, blue, red.clone()])
    assert encoded == [(24, 16, 5)] * 2  # two distinct images
    assert cond["image_latents"].dtype == torch.float32
    assert cond["image_latents"].mean((1, 2, 3)).tolist() == [0, 1, 0]
    assert cond["guidance"].tolist() == [6000.0] * 3
    assert not [k for k in cond if k.startswith("uncond.")]
    x, t = point(model)
    assert model.decode(x).shape == (3, 5, 24, 16, 3)
    assert set(model.decode(x).unique().tolist()) == {128}
    assert model.velocity(model.params, x, t, cond).shape == x.shape
    for images in (None, [red]):
        with pytest.raises(ValueError, match="one per prompt"):
            model.encode(PROMPTS, images=images)
    with pytest.raises(ValueError, match="frames"):
        made(frames=None)

    def marked(pipe, prompt, length):
        return {k: torch.zeros_like(v) for k, v in row.encode(pipe, prompt, length).items()}

    monkeypatch.setitem(models.FAMILIES, name, row._replace(encode_negative=marked, twins=("pooled_projections",)))
    cond = made()[1].encode(PROMPTS)
    assert set(cond) == {"encoder_hidden_states", "pooled_projections", "uncond.pooled_projections"}
    assert not cond["uncond.pooled_projections"].any()


def test_a_toy_model_is_six_functions():
    w = torch.ones(3, requires_grad=True)
    toy = Model(
        velocity=lambda params, x_t, t, cond: x_t * params["w"] + cond["c"],
        params={"w": w},
        encode=lambda prompts: {"c": torch.tensor([[float(len(p))] for p in prompts])},
        decode=lambda latents: torch.zeros(len(latents), 2, 2, 3, dtype=torch.uint8),
        latent_shape=lambda: (3,),
        times=time_grid,
    )
    assert (toy.module, toy.export, toy.rebind) == (None, None, None)
    path = rollout(
        toy.velocity, toy.params, toy.encode(["a", "bb"]), toy.times(3), seeds=torch.arange(2), shape=toy.latent_shape()
    )
    assert toy.decode(path.x_0).shape == (2, 2, 2, 3)


def test_nothing_is_printed(tmp_path, capfd, recwarn):
    pipe = tiny.sd3()
    capfd.readouterr()
    recwarn.clear()
    model = from_pipeline(pipe, **SIZE)
    model.export(tmp_path)
    assert capfd.readouterr() == ("", "")
    assert not list(recwarn)


def test_importing_models_is_light():
    code = "import sys, diffrl.models; print([m for m in ('diffusers', 'peft', 'transformers') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_a_second_size_leaves_the_first_ones_checkpointing_on():
    pipe, _ = made(gradient_checkpointing=True)
    from_pipeline(pipe, lora="default", height=16, width=16, max_sequence_length=8)
    assert pipe.transformer.is_gradient_checkpointing
