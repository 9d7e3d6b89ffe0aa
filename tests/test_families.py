"""Every family on tiny random pipelines: the contract of a Model, and the traps of each pipeline class.

Outputs are compared to 1e-5 of their size (a tensor elsewhere in memory may change the last bit), states bit for bit.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny
import tiny_families
import torch
from test_models import close, fingerprint, others, point, same_state, state

from diffrl import families, families_image, families_video
from diffrl.algorithms import nft
from diffrl.families import FAMILIES
from diffrl.loop import train
from diffrl.models import from_pipeline
from diffrl.sampling import chunked, euler_step, flow_sde_step, rollout, transition_log_prob

PROMPTS = ["a red cat", "the dog sings on the river", "two blue birds"]
LORA = {"r": 4, "lora_alpha": 16}


class Case(NamedTuple):
    """A family and one small non-square size. scale: the network's own factor of t; twins: entries with an uncond twin."""

    name: str
    make: Callable[..., Any]
    size: dict[str, int]
    shape: tuple[int, ...]
    length: int
    scale: float
    guidance: str
    negative: str = ""
    call: tuple[tuple[str, Any], ...] = ()


CASES = [
    Case("flux", tiny_families.flux, {"height": 24, "width": 16}, (24, 16), 8, 1.0, "guidance_scale"),
    Case("wan", tiny_families.wan, {"height": 16, "width": 32, "frames": 5}, (16, 2, 2, 4), 8, 1e3, "guidance_scale"),
    Case(
        "wan_i2v",
        tiny_families.wan_i2v,
        {"height": 16, "width": 32, "frames": 5},
        (16, 2, 2, 4),
        8,
        1e3,
        "guidance_scale",
    ),
    Case(
        "hunyuan",
        tiny_families.hunyuan,
        {"height": 16, "width": 32, "frames": 5},
        (4, 2, 2, 4),
        16,
        1e3,
        "guidance_scale",
    ),
    Case("qwen", tiny_families.qwen, {"height": 24, "width": 16}, (6, 16), 20, 1.0, "true_cfg_scale", " "),
    Case(
        "sana",
        tiny_families.sana,
        {"height": 32, "width": 64},
        (4, 16, 32),
        12,
        1e3,
        "guidance_scale",
        call=(("use_resolution_binning", False),),
    ),
]
BY_NAME = {case.name: case for case in CASES}
GUIDED = [case for case in CASES if case.name not in ("flux", "hunyuan")]
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_guided = pytest.mark.parametrize("case", GUIDED, ids=lambda case: case.name)


def made(case: Case, *, pipe=None, fill=True, **options):
    """A pipeline and its Model; LoRA factors random unless `fill=False`."""
    pipe = pipe or case.make()
    options = {"lora": LORA, "max_sequence_length": case.length, **case.size, **options}
    with tiny_families.seeded(5):
        model = from_pipeline(pipe, **options)
    if fill and isinstance(options["lora"], dict):
        tiny.randomise(model.params)
    return pipe, model


def pictures(case: Case, n: int = 3) -> list[Any] | None:
    """PIL images of the case's size, for image-to-video."""
    if case.name != "wan_i2v":
        return None
    from PIL import Image

    rng = np.random.default_rng(3)
    shape = (case.size["height"], case.size["width"], 3)
    return [Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)) for _ in range(n)]


def encoded(case: Case, model, prompts=PROMPTS):
    images = pictures(case)
    return model.encode(prompts) if images is None else model.encode(prompts, images[: len(prompts)])


def forced(pipe: Any, times: torch.Tensor) -> None:
    """A scheduler which takes Euler steps at exactly these times, whatever it is asked for."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    class Forced(FlowMatchEulerDiscreteScheduler):
        def set_timesteps(self, num_inference_steps=None, device=None, sigmas=None, mu=None, timesteps=None):
            self._step_index = self._begin_index = None
            self.sigmas, self.timesteps = times.clone(), 1000 * times[:-1]

    pipe.scheduler = Forced.from_config(pipe.scheduler.config)


def walked(case: Case, pipe, noise, *, prompts=PROMPTS, images=None, output="latent", **call):
    """The pipeline's own loop, a sample at a time: its latents, or pixels."""
    size = {("num_frames" if k == "frames" else k): v for k, v in case.size.items()}
    call = {
        "num_inference_steps": 4,
        "max_sequence_length": case.length,
        "output_type": output,
        **size,
        **dict(case.call),
        **call,
    }
    out = []
    for i, prompt in enumerate(prompts):
        image = {} if images is None else {"image": images[i]}
        out.append(pipe(prompt=[prompt], latents=noise[i : i + 1], return_dict=False, **image, **call)[0][0])
    return out


# the convention, the grid


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


# the pipeline's own loop


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


# cond


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


# params, gradients, checkpointing


def gradients(model, cond, x, t, between=None):
    """Of the mean square of v; zeros where a factor is not read (Qwen's last block drops its text)."""
    for p in model.params.values():
        p.grad = None
    loss = (model.velocity(model.params, x, t, cond) ** 2).mean()
    if between is not None:
        between()
    loss.backward()
    return {k: torch.zeros_like(p) if p.grad is None else p.grad.clone() for k, p in model.params.items()}


@each
def test_other_params_are_used_for_one_call_and_leave_no_trace(case):
    # https://github.com/huggingface/peft/issues/3580: switching adapters flipped requires_grad; params are data
    _, model = made(case)
    cond, (x, t), before = encoded(case, model), point(model), None
    live, before = model.velocity(model.params, x, t, cond), state(model.module)
    old = others(model.params)
    swapped = model.velocity(old, x, t, cond)
    assert not close(swapped, live, 1e-2)
    assert not swapped.requires_grad
    assert live.requires_grad
    assert same_state(before, state(model.module))

    def hook(module, args, output):
        raise RuntimeError("in the middle")

    handle = next(m for n, m in model.module.named_modules() if n.endswith("to_q")).register_forward_hook(hook)
    with pytest.raises(RuntimeError, match="in the middle"):
        model.velocity(old, x, t, cond)
    handle.remove()
    assert same_state(before, state(model.module))
    assert torch.equal(live, model.velocity(model.params, x, t, cond))
    with torch.no_grad():  # the oracle: those values written into the module for good
        for name, tensor in model.params.items():
            tensor.copy_(old[name])
    assert not same_state(before, state(model.module))  # negative control
    assert close(swapped, model.velocity(model.params, x, t, cond))


@each
def test_gradient_reaches_lora_factors_only_checkpointed_or_not(case):
    # https://github.com/cloneofsimo/lora/issues/26: with gradient checkpointing the LoRA got no gradient
    pipe, plain = made(case)
    _, model = made(case, gradient_checkpointing=True)
    assert model.module.is_gradient_checkpointing
    cond, (x, t), old = encoded(case, plain), point(plain), others(plain.params)
    wanted = gradients(plain, cond, x, t)
    assert all(g.isfinite().all() for g in wanted.values())
    assert sum(bool(g.any()) for g in wanted.values()) >= len(wanted) / 2
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            assert not any(m.training for m in part.modules())
            trained = {n for n, p in part.named_parameters() if p.requires_grad}
            assert trained == (set(plain.params) if part is plain.module else set())
            assert {n for n, p in part.named_parameters() if p.grad is not None} <= trained
    size = max(float(g.abs().max()) for g in wanted.values())
    for between in (None, lambda: model.velocity(old, x, t, cond)):
        got = gradients(model, cond, x, t, between)
        assert all(torch.allclose(got[k], wanted[k], rtol=1e-3, atol=1e-4 * size) for k in wanted)

    def copy_in_and_forget():
        for k, p in model.params.items():
            p.data = old[k]

    got = gradients(model, cond, x, t, copy_in_and_forget)  # negative control: the recompute sees other values
    assert not all(torch.allclose(got[k], wanted[k], rtol=1e-2, atol=1e-2 * size) for k in wanted)


@each
def test_a_fresh_lora_is_the_base_model_on_every_attention_projection(case):
    # https://github.com/huggingface/peft/issues/493, https://github.com/verl-project/verl-omni/issues/552
    base, model = case.make(), made(case, fill=False)[1]
    full = from_pipeline(base, lora=None, max_sequence_length=case.length, **case.size)
    cond, (x, t) = encoded(case, model), point(model)
    assert close(model.velocity(model.params, x, t, cond), full.velocity(full.params, x, t, cond))
    wanted = {
        n
        for n, m in base.transformer.named_modules()
        if n.endswith(families_image.Family._field_defaults["targets"]) and isinstance(m, torch.nn.Linear)
    }
    assert {k.split(".lora_")[0] for k in model.params} == wanted
    assert len(wanted) >= 4
    assert all(p.dtype == torch.float32 for p in model.params.values())


# export


@each
def test_export_reloads_to_the_same_outputs_and_is_trained_on(case, tmp_path):
    # https://github.com/huggingface/diffusers/issues/11790, https://github.com/huggingface/trl/issues/2505
    pipe, model = made(case)
    cond, (x, t) = encoded(case, model), point(model)
    live, base = model.velocity(model.params, x, t, cond).detach(), None
    old = others(model.params)
    for name, params in (("live", None), ("old", old)):
        folder = model.export(tmp_path / name, params)
        fresh = case.make()
        fresh.load_lora_weights(folder, adapter_name="default")
        _, resumed = made(case, pipe=fresh, lora="default")
        assert set(resumed.params) == set(model.params)
        assert close(resumed.velocity(resumed.params, x, t, cond), model.velocity(params or model.params, x, t, cond))
        assert sum(bool(g.any()) for g in gradients(resumed, cond, x, t).values()) >= len(resumed.params) / 2
        with torch.no_grad():
            fresh.disable_lora()
            base = resumed.velocity(resumed.params, x, t, cond)
    assert not close(base, live, 1e-2)
    from peft import get_peft_model_state_dict

    # without its metadata alpha is lost: the negative control
    type(pipe).save_lora_weights(tmp_path / "bare", transformer_lora_layers=get_peft_model_state_dict(model.module))
    fresh = case.make()
    fresh.load_lora_weights(tmp_path / "bare", adapter_name="default")
    _, resumed = made(case, pipe=fresh, lora="default")
    assert not close(resumed.velocity(resumed.params, x, t, cond), live, 1e-2)


@each
def test_full_fine_tuning_is_saved_as_the_transformer(case, tmp_path):
    pipe, model = made(case, lora=None)
    assert set(model.params) == {n for n, _ in pipe.transformer.named_parameters()}
    cond, (x, t) = encoded(case, model), point(model)
    assert sum(bool(g.any()) for g in gradients(model, cond, x, t).values()) > len(model.params) / 2
    old = {k: p.detach() * 1.1 for k, p in model.params.items()}
    wanted = model.velocity(old, x, t, cond)
    assert not close(wanted, model.velocity(model.params, x, t, cond), 1e-3)
    model.export(tmp_path, old)
    saved = type(pipe.transformer).from_pretrained(tmp_path / "transformer")
    assert all(torch.equal(p, old[n]) for n, p in saved.named_parameters())
    other = case.make(seed=9)
    other.transformer = saved
    _, loaded = made(case, pipe=other, lora=None)
    assert close(loaded.velocity(loaded.params, x, t, cond), wanted)


@each
def test_rebind_gives_an_independent_policy(case):
    _, model = made(case)
    cond, (x, t) = encoded(case, model), point(model)
    copied = model.rebind(copy.deepcopy(model.module))
    v = model.velocity(model.params, x, t, cond)
    assert close(copied.velocity(copied.params, x, t, cond), v)
    tiny.randomise(copied.params, seed=8)
    assert not close(copied.velocity(copied.params, x, t, cond), v, 1e-2)
    assert torch.equal(model.velocity(model.params, x, t, cond), v)


# on-policy ratios, half precision


def largest_ratio_error(model, cond, size):
    """max |ratio - 1| of a replay in calls of `size` rows of a rollout in calls of 3."""
    path = rollout(
        model.velocity,
        {k: p.detach().clone() for k, p in model.params.items()},
        cond,
        model.times(3),
        seeds=torch.arange(3),
        shape=model.latent_shape(),
        step=[flow_sde_step] * 2 + [euler_step],
    )
    worst = 0.0
    for i in range(2):
        with torch.no_grad():
            v = chunked(model.velocity, size=size)(model.params, path.x_t[:, i], path.t[i].expand(3), cond)
        log_prob = transition_log_prob(path.x_next[:, i], *flow_sde_step(path.x_t[:, i], v, path.t[i], path.t_next[i]))
        worst = max(worst, float(((log_prob - path.log_prob[:, i]).exp() - 1).abs().max()))
    return worst


@each
def test_on_policy_ratio_is_one_for_every_chunk_size(case):
    _, model = made(case)
    cond = encoded(case, model)
    for size in (1, 2, 3):
        assert largest_ratio_error(model, cond, size) < 1e-4
    replayed = model._replace(
        velocity=lambda params, x, t, c: model.velocity(params, x, t, c) + 0.1 * (params is model.params)
    )
    assert largest_ratio_error(replayed, cond, 3) > 1e-3  # negative control: a replay that is off by a little


BF16_RATIO = 0.05


@each
def test_bf16_base_with_float32_factors(case):
    # https://github.com/Tencent-Hunyuan/UniRL/pull/151: bf16 LoRA weights swallowed small updates
    _, exact = made(case)
    pipe = case.make()
    pipe.transformer.to(torch.bfloat16)
    _, model = made(case, pipe=pipe)
    assert {p.dtype for p in model.params.values()} == {torch.float32}
    assert {p.dtype for n, p in model.module.named_parameters() if n not in model.params} == {torch.bfloat16}
    cond, (x, t) = encoded(case, model), point(model)
    assert {c.dtype for k, c in cond.items() if c.is_floating_point() and k != "guidance"} == {torch.bfloat16}
    v = model.velocity(model.params, x, t, cond)
    assert v.dtype == torch.float32
    wanted = exact.velocity(exact.params, x, t, encoded(case, exact))
    assert (v - wanted).norm() < 0.2 * wanted.norm()
    assert {g.dtype for g in gradients(model, cond, x, t).values()} == {torch.float32}
    assert largest_ratio_error(model, cond, 3) == 0  # the same call gives the same bits
    assert max(largest_ratio_error(model, cond, size) for size in (1, 2)) < BF16_RATIO


# decode


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


# refusals

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


# Wan: image to video


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
    rows = train(model, nft(), PROMPTS[:2], brightness, optimizer, group_size=2, steps=2, seed=0)
    with pytest.raises(ValueError, match="2 images, one per prompt; got none"):  # negative control: images are needed
        next(rows)


# Wan: weights that stay in float32


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


# HunyuanVideo


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


# Qwen-Image


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


# Sana


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


# one table


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
