"""One small case per family, and what its tests share: a Model, images, the pipeline's own loop with a scheduler of our times."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny
import tiny_families
import torch

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
        512,
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


def gradients(model, cond, x, t, between=None):
    """Of the mean square of v; zeros where a factor is not read (Qwen's last block drops its text)."""
    for p in model.params.values():
        p.grad = None
    loss = (model.velocity(model.params, x, t, cond) ** 2).mean()
    if between is not None:
        between()
    loss.backward()
    return {k: torch.zeros_like(p) if p.grad is None else p.grad.clone() for k, p in model.params.items()}


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
