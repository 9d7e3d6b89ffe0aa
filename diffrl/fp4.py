"""The four-bit numbers of FP4 inference, emulated: what a tensor becomes when it is stored in E2M1 with block scales.

Pure functions that quantise and dequantise. Shape and dtype are kept (float32, bfloat16, float16), arithmetic is float32
with one rounding at the end, bit-equal to torchao 0.18 wherever that is finite. Every large pass is one float operation in
place, so that eager mode moves little memory and torch.compile fuses everything: no branch reads a tensor's values.
`diffrl.quant` offers all of it.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffrl.checks import require_number, require_tensors, shapes

NVFP4_BLOCK, MXFP4_BLOCK = 16, 32
E2M1_MAX, E4M3_MIN, E4M3_MAX = 6.0, 2.0**-6, 448.0
TENSOR_SCALE_MIN = 2.0**-120  # 1/pts/s stays finite down to here
FLOAT32_MAX = torch.finfo(torch.float32).max
CARRIES = {"floor": 0, "ceil": 0x7FFFFF, "rceil": 0x3FFFFF, "even": 0x200000}
"""Added to the bits of a block maximum m 2^f, they carry into its exponent never, for m > .5, m > .75, m >= .875."""


def e2m1_round(x: Float[Tensor, " *d"]) -> Float[Tensor, " *d"]:
    """The nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to the even code (OCP MX v1.0, E2M1).

    Saturates at 6 (inf too), keeps the sign of zero, nan stays nan. x: any shape, float32, bfloat16 or float16, kept; the
    result has no gradient (`straight_through` gives it one). ValueError: another dtype.

    >>> e2m1_round(torch.tensor([0.25, 0.75, 2.5, 2.6, 5.0, -7.0]))
    tensor([ 0.,  1.,  2.,  3.,  4., -6.])
    """
    _require_narrow(x)
    return _e2m1(x.detach().float()).to(x.dtype)


def nvfp4_fake_quantize(
    x: Float[Tensor, " *d"], *, per_tensor_scale: float | Tensor | None = None, two_level: bool = True
) -> Float[Tensor, " *d"]:
    """x through NVFP4 and back: E2M1 in blocks of 16 along the last axis, block scales in E4M3, a float32 scale above them.

        pts = max |x|/(448 6)      s = E4M3(clamp(max_block |x|/6/pts, 2^-6, 448))      out = E2M1(x ((1/pts)/s)) (pts s)

    As torchao 0.18 (order of operations included; `two_level=False` drops pts). per_tensor_scale *is* pts = amax/2688:
    a number in (0, inf), or a tensor that broadcasts against x[..., :1] (per row or sample; its values are not checked, as
    that would synchronise the device). Left to itself pts is taken over the whole call: a row's result then depends on its
    neighbours. pts is floored at 2^-120. One level has an absolute floor: a constant 1e-3 becomes 0.

    Zeros give zeros. A block that holds a nan or inf comes out all nan and leaves every other block alone. No gradient.
    |x| up to 1e38. ValueError: dtype, a 0-d x or a last axis that is not whole blocks, a bad per_tensor_scale, or one beside
    two_level=False.

    >>> nvfp4_fake_quantize(torch.tensor([6.0, 2.4, 1.0, 0.2] * 4), per_tensor_scale=1.0)[:4]
    tensor([6., 2., 1., 0.])
    """
    blocks = _blocks(x, NVFP4_BLOCK)
    if not two_level and per_tensor_scale is not None:
        raise ValueError(f"one level has no per_tensor_scale, got {per_tensor_scale!r} with two_level={two_level!r}")
    given = None if per_tensor_scale is None else _tensor_scale(per_tensor_scale, x)
    if not x.numel():
        return x.detach().clone()
    amax = _block_maxima(blocks)
    usable = torch.isfinite(amax)
    largest = torch.where(usable, amax, torch.nan) / E2M1_MAX
    if two_level:
        pts = torch.where(usable, amax, 0.0).amax() / (E4M3_MAX * E2M1_MAX) if given is None else given
        pts = pts.clamp_min(TENSOR_SCALE_MIN)
        s = _e4m3(largest / pts)
        return _dequantised(x, blocks, (1 / pts) / s, pts * s)
    s = _e4m3(largest)
    return _dequantised(x, blocks, 1 / s, s)


def mxfp4_fake_quantize(x: Float[Tensor, " *d"], *, scaling: str = "floor") -> Float[Tensor, " *d"]:
    """x through MXFP4 and back (OCP MX v1.0): E2M1 in blocks of 32 along the last axis, each with a scale 2^e (E8M0).

        max_block |x| = m 2^f, m in [.5, 1)      e = f - 3 + up, clamped to [-127, 127]      out = E2M1(x 2^-e) 2^e

    scaling: up is 0 `floor` (entries in (6, 8) 2^e saturate); m > .5 `ceil`; m > .75 `rceil` (the smallest e that
    saturates nothing); m >= .875 `even`. As torchao 0.18 for e >= -126, but for `rceil` exact, where that misses a few ulp
    above 6 2^e. Zeros give zeros; a block that holds a nan or inf comes out all nan, alone. No gradient. ValueError: dtype, a
    0-d x or a last axis that is not whole blocks, another scaling.

    >>> mxfp4_fake_quantize(torch.tensor([7.0, 2.4, 1.0, 0.2] * 8), scaling="floor")[:4]
    tensor([6., 2., 1., 0.])
    """
    blocks = _blocks(x, MXFP4_BLOCK)
    if not isinstance(scaling, str) or scaling not in CARRIES:
        raise ValueError(f"scaling must be one of {sorted(CARRIES)}, got {scaling!r}")
    if not x.numel():
        return x.detach().clone()
    amax = _block_maxima(blocks)
    biased = ((amax.view(torch.int32) + CARRIES[scaling]) >> 23).clamp_min(2)  # e + 129
    scale = ((biased - 1) << 23).view(torch.float32) * 0.5  # 2^e, also where that is subnormal
    inverse = ((256 - biased) << 23).view(torch.float32)
    return _dequantised(x, blocks, inverse, torch.where(torch.isfinite(amax), scale, torch.nan))


def straight_through(quantize: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """f with f(x) bit-equal to quantize(x) and the identity as its gradient (Bengio 2013, 1308.3432), nothing clipped.

    `x + (q - x).detach()` is not q in floating point; this is. For quantisation-aware experiments: a draft has no gradient.
    ValueError: quantize not callable, or, at the call, a result of another shape or dtype.

    >>> x = torch.tensor([0.3, 9.0], requires_grad=True)
    >>> y = straight_through(e2m1_round)(x)
    >>> y.sum().backward()
    >>> y.tolist(), x.grad
    ([0.5, 6.0], tensor([1., 1.]))
    """
    if not callable(quantize):
        raise ValueError(f"quantize must be a function of a tensor, got {quantize!r}")

    def quantized(x: Tensor) -> Tensor:
        return _StraightThrough.apply(x, quantize)

    return quantized


class _StraightThrough(torch.autograd.Function):
    """Forward: quantize; backward: nothing happens."""

    @staticmethod
    def forward(x: Tensor, quantize: Callable[[Tensor], Tensor]) -> Tensor:
        q = quantize(x.detach())
        if q.shape != x.shape or q.dtype != x.dtype:
            raise ValueError(f"quantize must keep shape and dtype: {shapes(x=x, q=q)}, {x.dtype} and {q.dtype}")
        return q

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


# ---- shared parts -----------------------------------------------------------------------------------------------------


def _e2m1(q: Tensor) -> Tensor:
    """E2M1 of a float32 tensor: adding c rounds to c's last bit, .5 below 2, 1 below 4, else 2, ties to even."""
    y = q.abs().clamp_max_(E2M1_MAX)
    c = (y * 0.5).floor_().mul_(2.0**23).clamp_min_(2.0**22)
    return y.add_(c).sub_(c).copysign_(q)


def _e4m3(s: Tensor) -> Tensor:
    return s.clamp(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn).float()


def _blocks(x: Tensor, size: int) -> Tensor:
    """x " ... n" as " ... n/size size"; ValueError unless it is whole blocks of a dtype that can be quantised."""
    _require_narrow(x)
    if x.ndim < 1 or x.shape[-1] % size:
        raise ValueError(f"the last axis of x must be a whole number of blocks of {size}, got {shapes(x=x)}")
    return x.detach().reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _require_narrow(x: Tensor) -> None:
    require_tensors(x=x)
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"x must be float32, bfloat16 or float16, got {x.dtype}, shape {tuple(x.shape)}")


def _tensor_scale(value: Any, x: Tensor) -> Tensor:
    """per_tensor_scale in float32 with the blocks' axes; ValueError unless a positive number or one that broadcasts."""
    if not isinstance(value, Tensor):
        number = require_number("per_tensor_scale", value, low=0, high=FLOAT32_MAX, open_low=True)
        return torch.full((), number, dtype=torch.float32, device=x.device)
    require_tensors(per_tensor_scale=value)
    rows = (*x.shape[:-1], 1)
    fits = value.ndim <= len(rows) and all(n in (1, m) for n, m in zip(value.shape[::-1], rows[::-1]))
    if not fits:
        raise ValueError(f"per_tensor_scale must broadcast against x[..., :1] {rows}: {shapes(per_tensor_scale=value)}")
    scale = value.detach().to(x.device, torch.float32)
    return scale[..., None] if scale.ndim else scale


def _block_maxima(blocks: Tensor) -> Tensor:
    """max |x| of each block, float32, nan where the block holds one."""
    return blocks.abs().amax(-1, keepdim=True).float()


def _dequantised(x: Tensor, blocks: Tensor, inverse: Tensor, scale: Tensor) -> Tensor:
    """E2M1(x inverse) scale in float32, rounded once to x's dtype."""
    return _e2m1(blocks * inverse).mul_(scale).to(x.dtype).reshape(x.shape)
