"""Tiny random models of the scorers' families, and plain-torch models under the names of the published checkpoints."""

import itertools
from typing import Any

import tiny
import torch
from torch import nn

SIZE, WORDS = 8, len(tiny.WORDS) + 4


def randomise(module: nn.Module, *, seed: int = 0, std: float = 0.4) -> Any:
    """Every weight random; as built, embeddings of different inputs are nearly equal. Biases and places count for little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator) * std
                norm = "norm" in name.lower() or "ln_" in name or "layrnorm" in name
                few = name.endswith("bias") or "position" in name or "pos_" in name or "cls" in name or "class" in name
                tensor.copy_(1 + noise if norm and name.endswith("weight") else 0.1 * noise if few else noise)
    return module


def clip_config(**vision: Any) -> Any:
    from transformers import CLIPConfig

    layers = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    layers |= {"projection_dim": 12, "hidden_act": "gelu", "attention_dropout": 0.5}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": WORDS - 1}
    text = {**layers, **ids, "vocab_size": WORDS, "max_position_embeddings": 10}
    return CLIPConfig(text_config=text, vision_config={**layers, "image_size": SIZE, "patch_size": 4, **vision})


def clip(seed: int = 4) -> Any:
    """A CLIPModel in train mode, with dropout."""
    from transformers import CLIPModel

    config = clip_config()
    config.projection_dim = 12
    return randomise(CLIPModel(config), seed=seed).train()


def processor() -> Any:
    from transformers import CLIPProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    pictures = CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})
    return CLIPProcessor(image_processor=pictures, tokenizer=tiny.tokenizer(10))


def blip_config() -> Any:
    from transformers import BlipConfig

    layers = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": WORDS - 1, "sep_token_id": WORDS - 1}
    text = {**layers, **ids, "vocab_size": WORDS, "max_position_embeddings": 40, "encoder_hidden_size": 16}
    vision = {**layers, "image_size": SIZE, "patch_size": 4, "layer_norm_eps": 1e-6}
    return BlipConfig(text_config={**text, "hidden_dropout_prob": 0.5}, vision_config=vision)


def blip(seed: int = 0) -> Any:
    """A BlipForImageTextRetrieval in train mode, with dropout."""
    from transformers import BlipForImageTextRetrieval

    return randomise(BlipForImageTextRetrieval(blip_config()), seed=seed).train()


def head_state(width: int, *, prefix: str = "", seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of a head as published, with small widths."""
    generator = torch.Generator().manual_seed(seed)
    sizes, state = (width, 10, 8, 6, 4, 1), {}
    for place, (a, b) in zip((0, 2, 4, 6, 7), itertools.pairwise(sizes)):
        state[f"{prefix}layers.{place}.weight"] = torch.randn(b, a, generator=generator)
        state[f"{prefix}layers.{place}.bias"] = torch.randn(b, generator=generator)
    return state


# ---- open_clip's structure, as its checkpoints name it: fused attention, sequence of blocks, projections as matrices


class OpenClipBlock(nn.Module):
    def __init__(self, width: int, heads: int, inner: int):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, inner), "c_proj": nn.Linear(inner, width)})

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp["c_proj"](nn.functional.gelu(self.mlp["c_fc"](self.ln_2(x))))


class OpenClipTower(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, inner: int):
        super().__init__()
        self.resblocks = nn.ModuleList(OpenClipBlock(width, heads, inner) for _ in range(layers))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.resblocks:
            x = block(x, mask)
        return x


class OpenClipVision(nn.Module):
    def __init__(self):
        super().__init__()
        self.class_embedding = nn.Parameter(torch.zeros(16))
        self.positional_embedding = nn.Parameter(torch.zeros(5, 16))
        self.conv1 = nn.Conv2d(3, 16, 4, stride=4, bias=False)
        self.ln_pre, self.ln_post = nn.LayerNorm(16), nn.LayerNorm(16)
        self.transformer = OpenClipTower(2, 16, 2, 24)
        self.proj = nn.Parameter(torch.zeros(16, 12))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.conv1(pixels).flatten(2).mT
        x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], dim=1) + self.positional_embedding
        return self.ln_post(self.transformer(self.ln_pre(x))[:, 0]) @ self.proj


class OpenClip(nn.Module):
    """CLIP with its text tower at the root."""

    def __init__(self):
        super().__init__()
        self.positional_embedding = nn.Parameter(torch.zeros(10, 16))
        self.text_projection = nn.Parameter(torch.zeros(16, 12))
        self.logit_scale = nn.Parameter(torch.zeros(()))
        self.token_embedding = nn.Embedding(WORDS, 16)
        self.transformer = OpenClipTower(2, 16, 2, 24)
        self.ln_final = nn.LayerNorm(16)
        self.visual = OpenClipVision()

    def encode_text(self, ids: torch.Tensor) -> torch.Tensor:
        n = ids.shape[1]
        mask = torch.full((n, n), -torch.inf).triu(1)
        x = self.transformer(self.token_embedding(ids) + self.positional_embedding[:n], mask)
        end = (ids == WORDS - 1).int().argmax(1)
        return self.ln_final(x)[torch.arange(len(x)), end] @ self.text_projection


# ---- the vision transformer of BLIP, as ImageReward's checkpoint names it


class TimmBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16, eps=1e-6), nn.LayerNorm(16, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(16, 48), "proj": nn.Linear(16, 16)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(16, 24), "fc2": nn.Linear(24, 16)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = self.attn["qkv"](self.norm1(x)).reshape(b, n, 3, 2, 8).permute(2, 0, 3, 1, 4)
        seen = (q @ k.mT / 8**0.5).softmax(-1) @ v
        x = x + self.attn["proj"](seen.transpose(1, 2).reshape(b, n, 16))
        return x + self.mlp["fc2"](nn.functional.gelu(self.mlp["fc1"](self.norm2(x))))


class TimmVision(nn.Module):
    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 16))
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 16))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, 16, 4, stride=4)})
        self.blocks = nn.ModuleList(TimmBlock() for _ in range(2))
        self.norm = nn.LayerNorm(16, eps=1e-6)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed["proj"](pixels).flatten(2).mT
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.norm(x)
