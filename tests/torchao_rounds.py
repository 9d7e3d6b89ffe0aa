"""What torchao 0.18 makes of fixed inputs: `python tests/torchao_rounds.py` writes them into tests/data, with torchao installed.

The inputs are functions of nothing; the answers are stored, so that the suite checks bit equality without torchao.
"""

import hashlib
from pathlib import Path

import torch
from oracles import normal
from safetensors.torch import save_file
from torch import Tensor

FILE = Path(__file__).parent / "data" / "torchao_rounds.safetensors"
SCALINGS = ("floor", "ceil", "rceil", "even")
FIXED_SCALE = 0.3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def every_pattern() -> Tensor:
    """All 65,280 finite bfloat16 numbers, shuffled into 1020 rows of 64."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    patterns = patterns[torch.isfinite(patterns)]
    order = torch.randperm(len(patterns), generator=torch.Generator().manual_seed(0))
    return patterns[order].reshape(-1, 64)


def large() -> dict[str, Tensor]:
    """Matrices of which only a digest is stored: every pattern, and integers, whose quotients often lie on ties."""
    return {"patterns": every_pattern(), "integers": (8 * normal(512, 512, dtype=torch.float32)).round()}


def inputs() -> dict[str, Tensor]:
    """Small float32 matrices of all the kinds that round differently."""
    x = normal(4, 64, seed=1, dtype=torch.float32)
    outlier = x * 1e-4
    outlier[0, 3] = 1.0
    return {
        "normal": x,
        "small": x * 1e-3,
        "tiny": x * 1e-30,
        "huge": x * 1e30,
        "outlier": outlier,
        "lognormal": (4 * x).exp(),
        "integers": (4 * x).round(),
        "sparse": torch.where(x > 1, x, torch.zeros_like(x)),
        "constant": torch.full_like(x, 0.3),
        "octaves": x * torch.exp2(torch.tensor([-90.0, -20.0, 20.0, 90.0]))[:, None],
    }


def digest(x: Tensor) -> str:
    """SHA-256 of the bits."""
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def torchao_rounds(x: Tensor) -> dict[str, Tensor]:
    """torchao's eager round trips of a float32 or bfloat16 matrix."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    scales = {
        "two_level": per_tensor_amax_to_scale(x.abs().amax()),
        "one_level": None,
        "fixed": torch.tensor(FIXED_SCALE),
    }
    found = {k: NVFP4Tensor.to_nvfp4(x, per_tensor_scale=s).dequantize(x.dtype) for k, s in scales.items()}
    for scaling in SCALINGS:
        stored = MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode(scaling))
        found[scaling] = stored.dequantize(x.dtype)
    return found


def main() -> None:
    answers, digests = {}, {}
    for kind, dtype in DTYPES.items():
        for name, x in inputs().items():
            for trip, answer in torchao_rounds(x.to(dtype)).items():
                answers[f"{kind}.{name}.{trip}"] = answer.contiguous()
        for name, x in large().items():
            for trip, answer in torchao_rounds(x.to(dtype)).items():
                digests[f"{kind}.{name}.{trip}"] = digest(answer)
    FILE.parent.mkdir(exist_ok=True)
    save_file(answers, FILE, metadata=digests)


if __name__ == "__main__":
    main()
