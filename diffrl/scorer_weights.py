"""Published weights of the scorers: names translated once, every one accounted for; `load_x(...)` loads and calls `x`.

None of the published weights is part of this package, and its tests do not see them: they check the translations on tiny
models of the same structure. That the published checkpoints hold exactly these names is known from the projects' sources
only; a checkpoint that does not is refused with the difference.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffrl.reward_rows import Log
from diffrl.scorers import aesthetic, clip_score, hps_v2, image_reward, pick_score
from diffrl.types import Reward

CLIP_LARGE = "openai/clip-vit-large-patch14"
CLIP_HUGE = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"

_Rule = tuple[str, Callable[[re.Match[str], Tensor], dict[str, Tensor]]]


def _to(name: str) -> Callable[[re.Match[str], Tensor], dict[str, Tensor]]:
    """The tensor as it is, under a name in which groups of the match are filled in."""
    return lambda match, x: {match.expand(name): x}


def _turned(name: str) -> Callable[[re.Match[str], Tensor], dict[str, Tensor]]:
    return lambda match, x: {match.expand(name): x.T.contiguous()}


def _split(match: re.Match[str], x: Tensor) -> dict[str, Tensor]:
    """The fused projection of torch.nn.MultiheadAttention, rows q, k, v, as three."""
    tower = "vision_model" if match[1] else "text_model"
    names = [f"{tower}.encoder.layers.{match[2]}.self_attn.{part}_proj.{match[3]}" for part in "qkv"]
    return dict(zip(names, x.chunk(3), strict=True))


def _translated(state: Mapping[str, Tensor], rules: Sequence[_Rule]) -> dict[str, Tensor]:
    """Every tensor by the one rule that matches its whole name. ValueError: names that no rule matches."""
    found: dict[str, Tensor] = {}
    strange = []
    for name, tensor in state.items():
        match, rule = next(((m, rule) for pattern, rule in rules if (m := re.fullmatch(pattern, name))), (None, None))
        if match is None or rule is None:
            strange.append(name)
        else:
            found |= rule(match, tensor)
    if strange:
        raise ValueError(f"{len(strange)} of {len(state)} names in the checkpoint are unknown: {sorted(strange)[:8]}")
    return found


def _blocks(prefix: str, tower: str, names: Mapping[str, str]) -> list[_Rule]:
    """PREFIX.N.theirs.weight -> TOWER.encoder.layers.N.ours.weight, and biases."""
    return [
        (rf"{prefix}\.(\d+)\.{re.escape(theirs)}\.(weight|bias)", _to(rf"{tower}.encoder.layers.\1.{ours}.\2"))
        for theirs, ours in names.items()
    ]


_OPEN_CLIP_BLOCK = {
    "ln_1": "layer_norm1",
    "attn.out_proj": "self_attn.out_proj",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_OPEN_CLIP: list[_Rule] = [
    *_blocks(r"transformer\.resblocks", "text_model", _OPEN_CLIP_BLOCK),
    *_blocks(r"visual\.transformer\.resblocks", "vision_model", _OPEN_CLIP_BLOCK),
    (r"(visual\.)?transformer\.resblocks\.(\d+)\.attn\.in_proj_(weight|bias)", _split),
    (r"logit_scale", _to("logit_scale")),
    (r"token_embedding\.weight", _to("text_model.embeddings.token_embedding.weight")),
    (r"positional_embedding", _to("text_model.embeddings.position_embedding.weight")),
    (r"ln_final\.(weight|bias)", _to(r"text_model.final_layer_norm.\1")),
    (r"text_projection", _turned("text_projection.weight")),
    (r"visual\.class_embedding", _to("vision_model.embeddings.class_embedding")),
    (r"visual\.positional_embedding", _to("vision_model.embeddings.position_embedding.weight")),
    (r"visual\.conv1\.weight", _to("vision_model.embeddings.patch_embedding.weight")),
    (r"visual\.ln_pre\.(weight|bias)", _to(r"vision_model.pre_layrnorm.\1")),
    (r"visual\.ln_post\.(weight|bias)", _to(r"vision_model.post_layernorm.\1")),
    (r"visual\.proj", _turned("visual_projection.weight")),
]

_TIMM_BLOCK = {
    "norm1": "layer_norm1",
    "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.projection",
    "norm2": "layer_norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
_IMAGE_REWARD: list[_Rule] = [
    *_blocks(r"blip\.visual_encoder\.blocks", "vision_model", _TIMM_BLOCK),
    (r"blip\.visual_encoder\.cls_token", _to("vision_model.embeddings.class_embedding")),
    (r"blip\.visual_encoder\.pos_embed", _to("vision_model.embeddings.position_embedding")),
    (r"blip\.visual_encoder\.patch_embed\.proj\.(weight|bias)", _to(r"vision_model.embeddings.patch_embedding.\1")),
    (r"blip\.visual_encoder\.norm\.(weight|bias)", _to(r"vision_model.post_layernorm.\1")),
    (r"blip\.text_encoder\.embeddings\.position_ids", lambda match, x: {}),  # 0, 1, 2 ...: no weight
    (r"blip\.(text_encoder\..+)", _to(r"\1")),
    (r"blip\.((?:vision|text)_proj\.(?:weight|bias))", _to(r"\1")),
    (r"(mlp\.layers\.\d+\.(?:weight|bias))", _to(r"\1")),
]


def clip_from_open_clip(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of open_clip's CLIP (text tower at the root, as ViT-H-14) under the names of `transformers.CLIPModel`.

    The fused `in_proj` of each block splits into q, k and v; both projections are transposed; nothing else changes.

    Raises:
        ValueError: names in `state` that this translation does not know; whether any is missing is for `load` to see.

    >>> {name: tuple(x.shape) for name, x in clip_from_open_clip({"text_projection": torch.zeros(3, 2)}).items()}
    {'text_projection.weight': (2, 3)}
    """
    return _translated(state, _OPEN_CLIP)


def blip_from_image_reward(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """ImageReward's weights -> (those of `transformers.BlipForImageTextRetrieval`, those of the head, `layers.N. ...`).

    Raises:
        ValueError: names in `state` that this translation does not know.

    >>> blip_from_image_reward({"mlp.layers.0.bias": torch.zeros(1)})
    ({}, {'layers.0.bias': tensor([0.])})
    """
    found = _translated(state, _IMAGE_REWARD)
    head = {name.removeprefix("mlp."): x for name, x in found.items() if name.startswith("mlp.")}
    return {name: x for name, x in found.items() if not name.startswith("mlp.")}, head


def score_head(state: Mapping[str, Tensor]) -> torch.nn.Sequential:
    """The head of the LAION aesthetic score and of ImageReward: Linear 768-1024-128-64-16-1, dropout between, no activation.

    Args:
        state: `layers.N.weight` and `.bias` for N = 0, 2, 4, 6, 7 (dropout has the numbers between); the widths are read
            from the weights.

    Returns:
        The head in eval mode, float32, `head(embeddings " b d") -> " b 1"`.

    Raises:
        ValueError: other names; widths that do not fit one another; more than one output.

    >>> state = {f"layers.{i}.weight": torch.full((1, 1), -2.0) for i in (0, 2, 4, 6, 7)}
    >>> state |= {f"layers.{i}.bias": torch.zeros(1) for i in (0, 2, 4, 6, 7)}
    >>> score_head(state)(torch.ones(1, 1)).item()  # (-2)^5: nothing between the layers
    -32.0
    """
    places = (0, 2, 4, 6, 7)
    wanted = {f"layers.{place}.{part}" for place in places for part in ("weight", "bias")}
    if set(state) != wanted:
        raise ValueError(f"the head's names must be {sorted(wanted)}, got {sorted(state)}")
    weights = [state[f"layers.{place}.weight"] for place in places]
    sizes = [tuple(weight.shape) for weight in weights]
    biases = [tuple(state[f"layers.{place}.bias"].shape) for place in places]
    chained = all(len(size) == 2 for size in sizes) and all(b[0] == a[1] for b, a in itertools.pairwise(sizes))
    if not chained or sizes[-1][0] != 1 or biases != [(size[0],) for size in sizes]:
        raise ValueError(f"the head's layers do not fit: weights {sizes}, biases {biases}")
    layers: list[torch.nn.Module] = []
    for place, weight in zip(places, weights):
        layers += [torch.nn.Dropout()] * (place - len(layers))  # of no effect when scoring
        layers.append(torch.nn.Linear(weight.shape[1], weight.shape[0]))
    head = torch.nn.Sequential(*layers)
    head.load_state_dict({name.removeprefix("layers."): x.float() for name, x in state.items()})
    return head.eval()


def filled(model: Any, state: Mapping[str, Tensor], *, unused: str = r"") -> Any:
    """`model` with the weights `state`, in place.

    Args:
        unused: pattern of the model's names that may be missing, because nothing reads them.

    Raises:
        ValueError: a name too many or missing, or another shape; printed.

    >>> filled(torch.nn.Linear(1, 1, bias=False), {"weight": torch.tensor([[3.0]])}).weight.item()
    3.0
    """
    own = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    missing = sorted(name for name in own if name not in state and not re.fullmatch(unused, name))
    extra = sorted(set(state) - set(own))
    shapes = sorted(n for n in set(own) & set(state) if own[n] != tuple(state[n].shape))
    if missing or extra or shapes:
        parts = {"missing": missing, "unknown": extra, "of another shape": shapes}
        told = "; ".join(f"{len(names)} {what}: {names[:8]}" for what, names in parts.items() if names)
        raise ValueError(f"the weights do not fit {type(model).__name__}: {told}")
    model.load_state_dict(state, strict=False)
    return model


# ---- files ------------------------------------------------------------------------------------------------------------


def _models(what: str) -> Any:
    """The package transformers, once it and Pillow are known to be there."""
    try:
        import PIL  # noqa: F401  (the scorers need it when they are first called)
        import transformers
    except ImportError as error:
        raise ImportError(f"{what} needs transformers and Pillow: pip install 'diffrl[demo]' ({error})") from error
    return transformers


def weights_file(name: str, filename: str) -> Path:
    """The file `name`, `filename` in the folder `name`, or, where neither exists, that file of the hub's repository `name`.

    Raises:
        ValueError: the folder does not hold the file; `name` is no hub id either, or the file cannot be fetched.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     weights_file((Path(folder) / "model.pt").touch() or folder, "model.pt").name
    'model.pt'
    """
    path = Path(name)
    if path.is_file():
        return path
    if path.is_dir():
        if not (path / filename).is_file():
            raise ValueError(f"the folder {name!r} does not hold {filename}")
        return path / filename
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(repo_id=name, filename=filename))
    except Exception as error:
        raise ValueError(f"{name!r} is no file, no folder and no repository with {filename}: {error!s:.200}") from None


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors by name from .safetensors, or from a file of torch.save, which is read without running any code.

    A mapping under the one name `state_dict` is taken for its content; a prefix `module.` of every name goes.

    Raises:
        ValueError: the file is neither, or holds anything but tensors by name.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"state_dict": {"module.w": torch.ones(1)}}, Path(folder) / "model.pt")
    ...     read_weights(Path(folder) / "model.pt")
    {'w': tensor([1.])}
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found: Any = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{str(path)!r} cannot be read: {type(error).__name__}: {error!s:.200}") from None
    found = found.get("state_dict", found) if isinstance(found, Mapping) else found
    if not isinstance(found, Mapping) or not found or not all(isinstance(x, Tensor) for x in found.values()):
        raise ValueError(f"{str(path)!r} does not hold tensors by name: {type(found).__name__}")
    prefix = "module." if all(name.startswith("module.") for name in found) else ""
    return {name.removeprefix(prefix): x for name, x in found.items()}


def _clip(name: str, processor: str, device: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    library = _models("a CLIP reward")
    try:
        model = library.CLIPModel.from_pretrained(name, dtype=dtype).to(device)
        return model, library.CLIPProcessor.from_pretrained(processor)
    except (OSError, ValueError) as error:
        raise ValueError(f"no CLIP model in {name!r} with a processor in {processor!r}: {error!s:.300}") from None


def load_clip_score(
    name: str = CLIP_LARGE,
    *,
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    log: Log | None = None,
) -> Reward:
    """`clip_score` with the CLIP model and processor in a folder or on the hub (needs the network once). Not checked here
    with published weights. ValueError: no such model. ImportError: transformers or Pillow is missing.
    No example: needs weights."""
    return clip_score(*_clip(name, name, device, dtype), batch=batch, log=log)


def load_pick_score(
    name: str = "yuvalkirstain/PickScore_v1",
    processor: str = CLIP_HUGE,
    *,
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    log: Log | None = None,
) -> Reward:
    """`pick_score` with the published model; its processor is another repository's. Not checked here with published
    weights. Arguments and errors: as `load_clip_score`. No example: needs weights."""
    return pick_score(*_clip(name, processor, device, dtype), batch=batch, log=log)


def load_hps_v2(
    name: str = "xswu/HPSv2",
    clip: str = CLIP_HUGE,
    *,
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    log: Log | None = None,
) -> Reward:
    """`hps_v2` with HPS_v2.1_compressed.pt (a file, its folder or the hub's repository), translated by
    `clip_from_open_clip`.

    Args:
        clip: folder or hub id with the configuration (no weights are read) and the processor of ViT-H-14.

    Not checked here with published weights. ValueError: names or shapes that do not fit, no such files.

    No example: needs weights.
    """
    library = _models("hps_v2")
    state = clip_from_open_clip(read_weights(weights_file(name, "HPS_v2.1_compressed.pt")))
    try:
        config = library.CLIPConfig.from_pretrained(clip)
        processor = library.CLIPProcessor.from_pretrained(clip)
    except (OSError, ValueError) as error:
        raise ValueError(f"no configuration and processor of CLIP in {clip!r}: {error!s:.300}") from None
    model = filled(library.CLIPModel(config), state).to(device, dtype)
    return hps_v2(model, processor, batch=batch, log=log)


def load_aesthetic(
    head: str,
    clip: str = CLIP_LARGE,
    *,
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    log: Log | None = None,
) -> Reward:
    """`aesthetic` with the published head, sac+logos+ava1-l14-linearMSE.pth (a file or its folder), on CLIP ViT-L/14.

    Not checked here with published weights. `dtype` is CLIP's; the head is float32. Errors: as `load_clip_score`.
    No example: needs weights.
    """
    layers = score_head(read_weights(weights_file(head, "sac+logos+ava1-l14-linearMSE.pth")))
    model, processor = _clip(clip, clip, device, dtype)
    return aesthetic(model, processor, layers.to(device), batch=batch, log=log)


def image_reward_config() -> Any:
    """The sizes of ImageReward's BLIP (ViT-L/16 at 224, BERT base with 30,524 words); LayerNorms of the ViT add 1e-6, not
    the 1e-5 of transformers. No example: imports transformers, which takes seconds."""
    library = _models("image_reward")
    vision: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    }
    vision |= {"image_size": 224, "patch_size": 16, "layer_norm_eps": 1e-6}
    text = {"vocab_size": 30524, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
    text |= {"num_attention_heads": 12, "max_position_embeddings": 512, "encoder_hidden_size": 1024}
    return library.BlipConfig(text_config=text, vision_config=vision)


def load_image_reward(
    name: str = "zai-org/ImageReward",
    tokenizer: str = "bert-base-uncased",
    *,
    config: Any = None,
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    log: Log | None = None,
) -> Reward:
    """`image_reward` with ImageReward.pt (a file, its folder or the hub's repository), translated by
    `blip_from_image_reward`.

    Args:
        tokenizer: BERT's, a folder or hub id.
        config: a `BlipConfig`; None: `image_reward_config()`.

    Not checked here with published weights. `dtype` is BLIP's; the head is float32. ValueError: names or shapes that do
    not fit, no such files.

    No example: needs weights.
    """
    library = _models("image_reward")
    state, head = blip_from_image_reward(read_weights(weights_file(name, "ImageReward.pt")))
    layers = score_head(head).to(device)
    try:
        words = library.AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer in {tokenizer!r}: {error!s:.300}") from None
    blip = library.BlipForImageTextRetrieval(image_reward_config() if config is None else config)
    unused = r"itm_head\..*|(vision|text)_proj\..*"
    return image_reward(filled(blip, state, unused=unused).to(device, dtype), layers, words, batch=batch, log=log)
