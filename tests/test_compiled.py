"""FP4 under torch.compile: one graph, and the bits of eager mode."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import torch
from diffrl.fp4 import mxfp4_fake_quantize, nvfp4_fake_quantize
torch.set_num_threads(1)
x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
x[0, 3], x[5] = float("inf"), 0.0
def branching(x):
    return nvfp4_fake_quantize(x) if x.sum() > 0 else x
for function, dtype in {FUNCTIONS}:
    got = torch.compile(function, fullgraph=True, backend="{BACKEND}")(x.to(dtype))
    assert torch.equal(got.nan_to_num(99.0), function(x.to(dtype)).nan_to_num(99.0)), (function, dtype)
print("equal")
"""
BOTH = "((nvfp4_fake_quantize, torch.bfloat16), (mxfp4_fake_quantize, torch.float32))"


def run(functions: str, backend: str):
    """A process of its own, as the annotation checks of this one would break the graph."""
    program = PROGRAM.replace("{FUNCTIONS}", functions).replace("{BACKEND}", backend)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiled_in_one_graph_and_equal_to_the_bit():
    done = run(BOTH, "inductor")
    assert done.stdout.split() == ["equal"], done.stderr[-2000:]


def test_control_a_branch_on_values_breaks_the_graph():
    done = run("((branching, torch.float32),)", "eager")
    assert done.returncode == 1
    assert "data-dependent" in done.stderr.lower(), done.stderr[-2000:]
