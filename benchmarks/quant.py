"""FP4 round trips beside torchao's and a plain copy, alternating in one run: `python benchmarks/quant.py` (needs torchao).

Printed per format and dtype: GB/s of input of each, ours over torchao's eager and compiled, and the share of what a copy
reaches. Medians over rounds in which all alternate, so that a busy neighbour slows them alike; the ratio is also taken
within each round. Compiling is not timed.
"""

import argparse
import logging
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch._inductor.exc
from torch import Tensor
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from tqdm import tqdm

from diffrl.quant import mxfp4_fake_quantize, nvfp4_fake_quantize


def torchao_nvfp4(x: Tensor) -> Tensor:
    scale = per_tensor_amax_to_scale(x.abs().amax())
    return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(x.dtype)


def torchao_mxfp4(x: Tensor) -> Tensor:
    return MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32).dequantize(x.dtype)


ROUND_TRIPS = {
    "NVFP4": (nvfp4_fake_quantize, torchao_nvfp4),
    "MXFP4": (mxfp4_fake_quantize, torchao_mxfp4),
}


def seconds(function: Callable[[Tensor], Tensor], x: Tensor) -> float:
    began = time.perf_counter()
    function(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measured(x: Tensor, ours: Callable, theirs: Callable, rounds: int, label: str) -> dict[str, list[float]]:
    """Seconds of every contestant in every round, after one call each in which their bits are compared."""
    compiled, theirs_compiled = (torch.compile(f, fullgraph=True, dynamic=False) for f in (ours, theirs))
    contestants = {
        "copy": torch.clone,
        "eager": ours,
        "compiled": compiled,
        "torchao eager": theirs,
        "torchao compiled": theirs_compiled,
    }
    expected = theirs(x)
    for name, function in list(contestants.items()):
        try:
            same = name == "copy" or torch.equal(function(x), expected)
        except torch._inductor.exc.InductorError as error:  # MXTensor on the CPU in torch 2.13: no float8_e8m0fnu
            if "torchao" not in name:
                raise
            print(f"{label}: {name} does not compile ({str(error).splitlines()[0]:.80})")
            del contestants[name]
            continue
        if not same:
            raise SystemExit(f"{label}: {name} differs from torchao")
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in tqdm(range(rounds), desc=label, leave=False):
        for name, function in contestants.items():
            times[name].append(seconds(function, x))
    return times


def report(times: dict[str, list[float]], size: int) -> None:
    for name, values in times.items():
        print(f"  {name:17s} {size / statistics.median(values) / 1e9:8.3f} GB/s")
    for ours, theirs in (("eager", "torchao eager"), ("compiled", "torchao compiled"), ("compiled", "copy")):
        if theirs not in times:
            continue
        ratio = statistics.median(b / a for a, b in zip(times[ours], times[theirs], strict=True))
        print(f"  {ours} over {theirs}: {ratio:.2f} times its speed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=64, help="millions (2^20)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("torch._inductor.scheduler").setLevel(logging.CRITICAL + 1)  # it prints a whole graph per failure
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        x = normal(options.elements * 256, 4096).to(options.device, dtype)
        for name, (ours, theirs) in ROUND_TRIPS.items():
            label = f"{name}, {options.elements}M elements of {dtype}"
            times = measured(x, ours, theirs, options.rounds, label)
            print(f"{label}, {options.threads} threads on {options.device}")
            report(times, x.numel() * x.element_size())


if __name__ == "__main__":
    main()
