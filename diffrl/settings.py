"""What a run depends on: its settings, and the model, prompts, reward and algorithm they name; held-out evaluation."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffrl import algorithms, rewards
from diffrl.algorithms import Algorithm, TrainedSteps, all_steps, art_flash, noisiest
from diffrl.checks import require_count, require_number
from diffrl.drafts import merged_draft
from diffrl.fp4 import mxfp4_fake_quantize, nvfp4_fake_quantize
from diffrl.loop import train
from diffrl.memory import encoders_off, vae_off
from diffrl.models import from_pipeline
from diffrl.numbers import nearest
from diffrl.reward_names import make_reward
from diffrl.sampling import rollout, sample_seeds
from diffrl.types import Params, Reward
from diffrl.windows import encode, score_images

NAMES = (
    *("art", "art_flash", "art_pairwise", "flow_grpo", "flow_grpo_fast", "mix_grpo", "dance_grpo", "grpo_guard"),
    *("cps_grpo", "flow_dppo", "nft", "nft_ocr", "awm"),
)
ALGORITHMS: dict[str, Callable[..., Algorithm]] = {name: getattr(algorithms, name) for name in NAMES}
PASSED_ON: dict[str, Callable[..., Algorithm]] = {
    "art_pairwise": algorithms.art,
    "cps_grpo": algorithms.flow_grpo,
    "nft_ocr": algorithms.nft,
}
"""Factories whose other keywords are those of another."""
TASKS = ("digits", "prompts")
ENGINES = ("loop", "in_process", "ray")
DRAFTS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "none": None,
    "policy": None,
    "nvfp4": nvfp4_fake_quantize,
    "mxfp4": mxfp4_fake_quantize,
}
DRAFT_OPTIONS = ("pool", "draft_steps", "draft_skip", "draft_min_dim", "audit_every")
HELD_OUT_SEED = 2**62 + 1  # beyond every --seed


@dataclass(frozen=True)
class Settings:
    """Everything a run depends on; written to the first line of metrics.jsonl."""

    task: str = "digits"
    model: str | None = None
    algorithm: str = "art"
    reward: str = "ocr"
    held_out_reward: str | None = None
    prompts: str | None = None
    iterations: int = 60
    group_size: int = 16
    prompts_per_iteration: int = 8
    steps: int = 8
    learning_rate: float = 1e-3
    trained_steps: str = "auto"
    radius: float = 1e-5
    lora_rank: int = 16
    lora_alpha: int = 32
    seed: int = 0
    eval_every: int = 20
    eval_samples: int = 4
    checkpoint_every: int = 5
    micro_batch: int | None = None
    pack: int | None = None
    rollout_chunk: int | None = None
    draft: str = "none"
    pool: int = 96
    draft_steps: int = 6
    draft_skip: str = ""
    draft_min_dim: int = 0
    audit_every: int | None = None
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    images: str | None = None
    guidance_scale: float | None = None
    max_sequence_length: int | None = None
    device: str = "cpu"
    threads: int = 2
    engine: str = "loop"
    generators: int = 1
    trainers: int = 1
    fragments: int = 1
    stale: int = 0
    gradient_checkpointing: bool = False
    encoders_off: bool = False
    vae_off: bool = False


def parse_trained_steps(text: str, steps: int) -> tuple[TrainedSteps, int | None]:
    """("auto" | "all" | "noisiest:N" | "random:M" | "random:M/N") -> (candidate steps, how many each trajectory trains).

    auto: 3/8 of the steps, drawn per trajectory from the noisiest 5/8, both rounded up (8 steps: random:3/5).
    random:M/N: M random ones of the noisiest N per trajectory. ValueError naming --trained-steps.

    >>> parse_trained_steps("random:3/5", 8)[0](8), parse_trained_steps("random:3/5", 8)[1]
    (range(0, 5), 3)
    """
    if text == "auto":
        text = f"random:{-(-3 * steps // 8)}/{-(-5 * steps // 8)}"
    kind, _, rest = text.partition(":")
    try:
        numbers = [int(n) for n in rest.split("/")] if rest else []
    except ValueError:
        numbers = [0]
    good = {"all": [0], "noisiest": [1], "random": [1, 2]}
    if (
        len(numbers) not in good.get(kind, [])
        or any(not 1 <= n <= steps for n in numbers)
        or sorted(numbers) != numbers
    ):
        raise ValueError(
            f"--trained-steps must be auto, all, noisiest:N, random:M or random:M/N with 1 <= M <= N <= steps={steps}, got {text!r}"
        )
    if kind == "all":
        return all_steps, None
    if kind == "noisiest":
        return noisiest(numbers[0]), None
    return (noisiest(numbers[1]) if len(numbers) == 2 else all_steps), numbers[0]


def check_settings(s: Settings) -> None:
    """One ValueError naming the option and its value for the first setting that cannot be.

    >>> check_settings(Settings(steps=0))
    Traceback (most recent call last):
    ValueError: --steps must be an integer >= 1, got 0
    """
    for name, known in (
        ("task", TASKS),
        ("algorithm", tuple(ALGORITHMS)),
        ("draft", tuple(DRAFTS)),
        ("engine", ENGINES),
    ):
        value = getattr(s, name)
        if value not in known:
            raise ValueError(f"--{name} must be one of {', '.join(known)}, got {value!r}{nearest(str(value), known)}")
    _check_plain(s)
    require_count("--lora-rank", s.lora_rank, low=0)
    for name in ("iterations", "prompts_per_iteration", "steps", "lora_alpha", "eval_every"):
        require_count(f"--{name.replace('_', '-')}", getattr(s, name))
    for name in ("eval_samples", "checkpoint_every", "threads", "generators", "trainers", "fragments"):
        require_count(f"--{name.replace('_', '-')}", getattr(s, name))
    require_count("--stale", s.stale, low=0)
    _check_engine(s)
    for name in ("micro_batch", "pack", "rollout_chunk", "height", "width", "frames", "max_sequence_length"):
        if getattr(s, name) is not None:
            require_count(f"--{name.replace('_', '-')}", getattr(s, name))
    require_count("--group-size", s.group_size, low=2)
    require_count("--seed", s.seed, low=0)
    if s.seed >= 2**62:
        raise ValueError(f"--seed must be below 2**62, got {s.seed}")
    require_number("--learning-rate", s.learning_rate, low=0, open_low=True)
    require_number("--radius", s.radius, low=0)
    parse_trained_steps(s.trained_steps, s.steps)
    _check_draft(s)
    if s.task == "prompts" and (s.model is None or s.prompts is None):
        raise ValueError(f"--task prompts needs --model and --prompts FILE, got {s.model!r} and {s.prompts!r}")
    if s.task == "digits" and (s.images or s.frames):
        raise ValueError(f"--images {s.images!r}, --frames {s.frames}: the digits are single pictures; --task prompts?")
    try:
        torch.empty(0, device=s.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {s.device!r} cannot be used: {str(error).splitlines()[0]}") from None


def _check_plain(s: Settings) -> None:
    """ValueError: an empty name, as an unset variable of a shell leaves it; an integer beyond those of torch."""
    for name, value in asdict(s).items():
        option = f"--{name.replace('_', '-')}"
        if value == "" and name != "draft_skip":
            raise ValueError(f"{option} '' is empty")
        if name != "seed" and isinstance(value, int) and abs(value) >= 2**31:
            raise ValueError(f"{option} must be below 2**31, got {value}")


def _check_engine(s: Settings) -> None:
    """ValueError: an option that the engine does not have."""
    theirs: dict[str, tuple[str, ...]] = {
        "loop": ("micro_batch", "rollout_chunk"),
        "in_process": ("fragments", "stale"),
    }
    theirs["ray"] = (*theirs["in_process"], "generators", "trainers")
    for name in {name for names in theirs.values() for name in names} - set(theirs[s.engine]):
        if getattr(s, name) != getattr(Settings, name):
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(s, name)}: --engine {s.engine} has none; it belongs to "
                f"{', '.join(engine for engine, names in theirs.items() if name in names)}"
            )
    if s.stale > s.fragments:
        raise ValueError(f"--stale {s.stale} must be at most --fragments {s.fragments}")


def _check_draft(s: Settings) -> None:
    require_count("--pool", s.pool)
    require_count("--draft-steps", s.draft_steps)
    require_count("--draft-min-dim", s.draft_min_dim, low=0)
    if s.audit_every is not None:
        require_count("--audit-every", s.audit_every)
    if s.draft == "none":
        given = [n for n in DRAFT_OPTIONS if getattr(s, n) != getattr(Settings, n)]
        if given:
            raise ValueError(
                f"--{given[0].replace('_', '-')} {getattr(s, given[0])!r} needs a --draft: nvfp4, mxfp4 or policy"
            )
        return
    if s.group_size % 2:
        raise ValueError(
            f"--group-size {s.group_size} is odd: --draft {s.draft} keeps its half best and its half worst"
        )
    if s.group_size > s.pool:
        raise ValueError(f"--pool {s.pool} must be at least --group-size {s.group_size}, which are chosen out of it")
    if s.draft_steps > s.steps:
        raise ValueError(f"--draft-steps {s.draft_steps} is more than --steps {s.steps}: drafts dearer than the policy")
    if s.draft == "policy" and (s.draft_skip or s.draft_min_dim):
        raise ValueError(
            f"--draft policy converts nothing, leave out --draft-skip {s.draft_skip!r}, --draft-min-dim {s.draft_min_dim}"
        )


def make_draft(s: Settings, model: Any) -> Any:
    """`sol_rl`'s draft of this model: params -> (velocity, params). ValueError: nothing to convert, names that meet none.

    No example: needs a pipeline.
    """
    quantize, skip = DRAFTS[s.draft], [name.strip() for name in s.draft_skip.split(",") if name.strip()]
    if quantize is None or getattr(model, "module", None) is None:  # the toy of the rehearsal has no layers
        return lambda params: (model.velocity, params)
    draft = merged_draft(model, quantize=quantize, skip=skip, min_dim=s.draft_min_dim)
    if (unused := draft.report.unused_skips) or not draft.report.converted:
        options = f"--draft-skip {s.draft_skip!r}, --draft-min-dim {s.draft_min_dim}"
        told = (
            f"--draft-skip meets no layer with {list(unused)}" if unused else f"no layer is left to convert ({options})"
        )
        raise ValueError(f"--draft {s.draft}: {told}")
    return draft


def drafted(algorithm: Algorithm, s: Settings, draft: Any) -> Algorithm:
    """The algorithm inside `sol_rl` where the settings ask for one, with this draft (`make_draft`), else itself.

    No example: needs a draft.
    """
    if s.draft == "none":
        return algorithm
    options: dict[str, Any] = {"draft_steps": s.draft_steps, "audit_every": s.audit_every, "chunk": s.rollout_chunk}
    return algorithms.sol_rl(algorithm, draft=draft, pool=s.pool, keep=s.group_size // 2, **options)


def make_algorithm(s: Settings) -> Algorithm:
    """The named algorithm with the run's trained steps and radius, where it has those; auto steps are ART's as tuned for
    this loop, and the published ones of every other algorithm. ValueError: an option that the algorithm does not have.

    >>> make_algorithm(Settings(algorithm="nft", radius=0.5))
    Traceback (most recent call last):
    ValueError: --radius 0.5: nft has no trust region
    """
    candidates, per_sample = parse_trained_steps(s.trained_steps, s.steps)
    if s.algorithm == "art_flash" and s.trained_steps == "auto":
        return art_flash(noisiest=min(4, s.steps), radius=s.radius)
    if s.algorithm == "art_flash":
        return art_flash(noisiest=len(candidates(s.steps)), steps_per_sample=per_sample, radius=s.radius)
    factory, of_art = ALGORITHMS[s.algorithm], s.algorithm in ("art", "art_pairwise")
    described = PASSED_ON.get(s.algorithm, factory)
    known = set(signature(described).parameters)
    chosen: dict[str, Any] = {}
    if "radius" in known:
        chosen["radius"] = s.radius
    elif s.radius != Settings.radius:
        raise ValueError(f"--radius {s.radius}: {s.algorithm} has no trust region")
    if of_art or (s.trained_steps != "auto" and "trained_steps" in known):
        chosen |= {"trained_steps": candidates, "steps_per_sample": per_sample}
    elif s.trained_steps != "auto":
        raise ValueError(f"--trained-steps {s.trained_steps!r}: {s.algorithm} trains the steps of its own window")
    return factory(**chosen)


def rehearse(algorithm: Algorithm, s: Settings) -> None:
    """One iteration on the closed-form toy, milliseconds: windows and steps that do not fit are refused here, not after
    the first rollout of the real model. ValueError: as the algorithm's.

    >>> rehearse(make_algorithm(Settings(algorithm="mix_grpo")), Settings(algorithm="mix_grpo", steps=4))
    Traceback (most recent call last):
    ValueError: a window of size 4 at start 0 passes the last allowed step 2 of 4
    """
    toy_task = import_module("diffrl.tasks.toy")
    model = toy_task.toy_model()
    optimizer = torch.optim.SGD(list(model.params.values()), lr=0.0)
    prompts, reward = toy_task.PROMPTS, toy_task.toward_compass
    algorithm = drafted(algorithm, replace(s, audit_every=None), make_draft(s, model))
    next(train(model, algorithm, prompts, reward, optimizer, group_size=s.group_size, steps=s.steps, seed=0))


class Judge:
    """A reward that remembers what share of its last call was read exactly, where it reads at all."""

    def __init__(self, reward: Reward):
        self.reward, self.exact = reward, float("nan")
        if isinstance(reward, rewards.WeightedSum):  # its single values reach `Batch.parts` as without a judge
            self.rewards, self.total, self.weights = reward.rewards, reward.total, reward.weights

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        if not isinstance(self.reward, rewards.TextReward):
            return self.reward(images, prompts)
        values, exact, _ = judge_text(self.reward, images, prompts)
        self.exact = float(exact.nanmean())
        return values


def judge_text(reward: "rewards.TextReward", images: Tensor, prompts: Sequence[str]) -> tuple[Tensor, Tensor, list]:
    """(rewards " b", exact matches " b", readings) from one reading of the images.

    >>> reader = rewards.ocr(engine=lambda pictures: ["12"])
    >>> judge_text(reader, torch.zeros(1, 8, 8, 3, dtype=torch.uint8), ['the number "13"'])
    (tensor([0.5000]), tensor([0.]), ['12'])
    """
    readings = reward.read(images)
    targets = [reward.target(prompt) for prompt in prompts]
    values = torch.tensor([rewards.text_similarity(r, t) for r, t in zip(readings, targets, strict=True)])
    return values, rewards.exact_match(readings, prompts, target=reward.target), readings


class Bench(NamedTuple):
    """What a run works on, built from its settings alone."""

    model: Any
    prompts: list[str]
    reward: Judge
    held_out: Reward | None
    algorithm: Algorithm
    draft: Any = None
    images: Sequence[Any] | None = None
    options: Mapping[str, Any] = {}  # of from_pipeline: what is not here is the pipeline's own


def build(s: Settings) -> Bench:
    """Model with a fresh seeded adapter, prompts, reward and algorithm. ValueError or ImportError, nothing written.

    No example: needs a pipeline.
    """
    check_settings(s)
    algorithm = make_algorithm(s)
    rehearse(algorithm, s)
    reward = Judge(make_reward(s.reward, threads=s.threads, device=s.device))
    held_out = None
    if s.held_out_reward is not None:
        held_out = make_reward(s.held_out_reward, threads=s.threads, device=s.device, option="--held-out-reward")
    pipe, prompts, options = _pipeline(s)
    images = None if s.images is None else read_images(s.images, len(prompts))
    if s.prompts_per_iteration > len(prompts):
        raise ValueError(
            f"--prompts-per-iteration {s.prompts_per_iteration} of only {len(prompts)} prompts: at most {len(prompts)} can be given"
        )
    torch.manual_seed(s.seed)  # the adapter's first factors
    pipe.to(s.device)
    lora = {"r": s.lora_rank, "lora_alpha": s.lora_alpha} if s.lora_rank else None
    model = from_pipeline(pipe, lora=lora, gradient_checkpointing=s.gradient_checkpointing, **options)
    encode(model, prompts[:1], None if images is None else images[:1])  # missing or unwanted images are refused here
    if s.encoders_off:
        encoders_off(model, pipe, prompts, images)
    if s.vae_off:
        model = vae_off(model, pipe, device=s.device)
    draft = make_draft(s, model)
    return Bench(model, prompts, reward, held_out, drafted(algorithm, s, draft), draft, images, options)


def _pipeline(s: Settings) -> tuple[Any, list[str], dict[str, Any]]:
    names = ("height", "width", "frames", "guidance_scale", "max_sequence_length")
    given = {name: value for name in names if (value := getattr(s, name)) is not None}
    prompts = None if s.prompts is None else read_prompts(s.prompts)
    if s.task == "digits":
        from diffrl.tasks import digits

        if s.model is not None and not (Path(s.model) / "model_index.json").is_file():
            raise ValueError(f"--model {s.model!r} has no model_index.json: not a saved pipeline")
        return digits.load_pipeline(s.model), prompts or digits.prompts(), {**digits.pipeline_options(), **given}
    from diffusers import DiffusionPipeline

    half = s.device != "cpu" and s.lora_rank > 0  # all parameters are trained in float32
    index = Path(str(s.model)) / "model_index.json"
    saved = json.loads(index.read_text()) if index.is_file() else {}
    absent = {name: None for name, value in saved.items() if value == [None, None]}  # a Stable Diffusion 3 without T5
    dtype = torch.bfloat16 if half else torch.float32
    try:
        pipe = DiffusionPipeline.from_pretrained(s.model, dtype=dtype, **absent)
    except OSError as error:
        if Path(str(s.model)).is_dir():
            raise
        raise ValueError(f"--model {s.model!r} is no folder here, and no model of a hub that can be reached") from error
    return pipe, prompts or [], {"height": 512, "width": 512, **given}


def read_prompts(path: str) -> list[str]:
    """One prompt per non-empty line. ValueError: no such file, no prompts.

    >>> read_prompts("absent.txt")
    Traceback (most recent call last):
    ValueError: --prompts 'absent.txt' is no file
    """
    if not Path(path).is_file():
        raise ValueError(f"--prompts {path!r} is no file")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # editors may begin a file with a byte-order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts {path!r} is not UTF-8 text: {error}") from None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"--prompts {path!r} holds no prompts")
    return lines


def read_images(path: str, prompts: int) -> list[Any]:
    """One picture per line of the file, a file name each (relative to that file), in the order of the prompts. ValueError:
    no such file, another number than prompts, what Pillow cannot read. No example: reads pictures."""
    from PIL import Image

    if not Path(path).is_file():
        raise ValueError(f"--images {path!r} is no file")
    names = [line.strip() for line in Path(path).read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    if len(names) != prompts:
        raise ValueError(f"--images {path!r} names {len(names)} pictures for {prompts} prompts")
    images = []
    for name in names:
        try:
            with Image.open(Path(path).parent / name) as image:
                images.append(image.convert("RGB"))
        except (OSError, ValueError) as error:
            raise ValueError(f"--images {path!r}: {name!r} cannot be read: {error}") from None
    return images


# ---- evaluation -------------------------------------------------------------------------------------------------------


class Evaluation(NamedTuple):
    """Held-out samples: images " b h w 3", their prompts, rewards " b", readings and exact matches " b" where text is read."""

    images: Tensor
    prompts: list[str]
    rewards: Tensor
    readings: list[str | None] | None
    exact: Tensor | None


def evaluate(
    model: Any,
    prompts: Sequence[str],
    reward: Reward,
    *,
    steps: int,
    samples: int,
    params: Params | None = None,
    chunk: int = 128,
    images: Sequence[Any] | None = None,
) -> Evaluation:
    """`samples` images of every prompt at the held-out seeds (the same in every run), by the plain ODE sampler. images: the
    start image of each prompt, for image-to-video.

    >>> from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model
    >>> found = evaluate(toy_model(), PROMPTS, toward_compass, steps=4, samples=2)
    >>> tuple(found.images.shape), found.prompts[:3]
    ((8, 2), ['north', 'north', 'east'])
    """
    params = model.params if params is None else params
    device = next(iter(model.params.values())).device
    seeds = sample_seeds(HELD_OUT_SEED, 0, range(len(prompts)), samples).flatten().to(device)
    texts = [prompt for prompt in prompts for _ in range(samples)]
    begun = None if images is None else [image for image in images for _ in range(samples)]
    parts = []
    for i in range(0, len(texts), chunk):
        part, names = seeds[i : i + chunk], texts[i : i + chunk]
        trajectory = rollout(
            model.velocity,
            params,
            encode(model, names, None if begun is None else begun[i : i + chunk]),
            model.times(steps),
            seeds=part,
            shape=model.latent_shape(),
            keep=[],
        )
        parts.append(model.decode(trajectory.x_0))
    drawn = torch.cat(parts)
    inner = reward.reward if isinstance(reward, Judge) else reward
    if isinstance(inner, rewards.TextReward):
        values, exact, readings = judge_text(inner, drawn, texts)
        return Evaluation(drawn, texts, values, readings, exact)
    return Evaluation(drawn, texts, score_images(inner, drawn, texts), None, None)
