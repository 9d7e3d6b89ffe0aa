"""FP4 numbers against float64 nearest neighbours, plain loops over blocks, and torchao's stored and live round trips."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import normal, refuses
from safetensors import safe_open
from strategies import seeds
from torchao_rounds import DTYPES, FILE, FIXED_SCALE, SCALINGS, digest, every_pattern, inputs, large, torchao_rounds

from diffrl.fp4 import e2m1_round, mxfp4_fake_quantize, nvfp4_fake_quantize, straight_through

NAN, INF = math.nan, math.inf
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
HALVES = (torch.float32, torch.bfloat16, torch.float16)
TRIPS = {
    "two_level": nvfp4_fake_quantize,
    "one_level": partial(nvfp4_fake_quantize, two_level=False),
    "fixed": partial(nvfp4_fake_quantize, per_tensor_scale=FIXED_SCALE),
    **{scaling: partial(mxfp4_fake_quantize, scaling=scaling) for scaling in SCALINGS},
}
both = pytest.mark.parametrize("quantize", [TRIPS["two_level"], *(TRIPS[s] for s in SCALINGS)])


def f32(*shape: int, seed: int = 0) -> torch.Tensor:
    return normal(*shape, seed=seed, dtype=torch.float32)


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same dtype, shape and bits: 0 and -0 differ."""
    return a.dtype == b.dtype and a.shape == b.shape and digest(a) == digest(b)


def nearest(x: np.ndarray) -> np.ndarray:
    """The grid point nearest to each entry in float64; of two equally near ones that with the even index; sign kept."""
    gaps = np.abs(np.minimum(np.abs(x), 6)[..., None] - np.array(GRID))
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # argmin takes the first: even codes first
    return np.copysign(np.array(GRID)[order[np.argmin(gaps[..., order], -1)]], x)


# ---- E2M1 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_every_bfloat16_pattern_goes_to_the_nearest_grid_point(dtype):
    x = every_pattern().to(dtype)
    assert equal_bits(e2m1_round(x), torch.from_numpy(nearest(x.double().numpy())).to(dtype))


def test_ties_go_to_the_even_code_and_one_ulp_beside_them_does_not():
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=np.float32)
    assert e2m1_round(torch.from_numpy(ties)).tolist() == [0, 1, 1, 2, 2, 4, 4]
    for side in (np.float32(0), np.float32(99)):
        x = np.nextafter(ties, side)
        got = e2m1_round(torch.from_numpy(np.concatenate([x, -x]))).numpy()
        assert np.array_equal(got, nearest(np.concatenate([x, -x]).astype(np.float64)))


def test_control_rounding_half_up_is_not_rounding_to_even():
    half_up = torch.floor(torch.tensor([0.25, 1.25]) * 2 + 0.5) / 2
    assert half_up.tolist() != e2m1_round(torch.tensor([0.25, 1.25])).tolist()


def test_e2m1_saturates_and_keeps_nan_and_the_sign_of_zero():
    got = e2m1_round(torch.tensor([INF, -INF, 1e30, NAN, 0.0, -0.0, -0.1]))
    assert got[:3].tolist() == [6, -6, 6]
    assert got[3].isnan()
    assert torch.signbit(got[4:]).tolist() == [False, True, True]


@given(st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=9))
def test_e2m1_is_odd_idempotent_and_monotone(values):
    x = torch.tensor(values).sort().values
    q = e2m1_round(x)
    assert torch.equal(e2m1_round(q), q)
    assert torch.equal(e2m1_round(-x), -q)
    assert bool((q.diff() >= 0).all())
    assert e2m1_round(x.reshape(1, -1, 1)).shape == (1, len(values), 1)
    assert e2m1_round(x[0]).shape == ()


# ---- torchao ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored():
    with safe_open(FILE, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("trip", TRIPS)
def test_round_trips_are_torchaos_to_the_bit(stored, trip, dtype):
    answers, digests = stored
    for name, x in inputs().items():
        assert equal_bits(TRIPS[trip](x.to(DTYPES[dtype])), answers[f"{dtype}.{name}.{trip}"]), name
    for name, x in large().items():
        assert digest(TRIPS[trip](x.to(DTYPES[dtype]))) == digests[f"{dtype}.{name}.{trip}"], name


def test_control_dividing_by_the_combined_scale_is_another_rounding():
    x = large()["integers"]
    blocks = x.reshape(len(x), -1, 16)
    amax = blocks.abs().amax(-1, keepdim=True)
    pts = amax.amax() / 2688
    s = (amax / 6 / pts).clamp(2**-6, 448).to(torch.float8_e4m3fn).float()
    inverses = (1 / pts) / s, 1 / (pts * s)
    ours, other = ((e2m1_round(blocks * inverse) * (pts * s)).reshape(x.shape) for inverse in inverses)
    assert torch.equal(ours, nvfp4_fake_quantize(x))
    assert not torch.equal(other, ours)


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trips_are_live_torchaos(dtype):
    pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    ladder = torch.exp2(torch.arange(-100, 100).float())[:, None] * f32(200, 64)
    for x in (
        f32(64, 256, seed=5),
        ladder,
        (3 * f32(64, 64)).exp(),
        f32(64, 64) / f32(64, 64, seed=1),
        every_pattern(),
    ):
        for trip, answer in torchao_rounds(x.to(DTYPES[dtype])).items():
            assert equal_bits(TRIPS[trip](x.to(DTYPES[dtype])), answer), trip


# ---- NVFP4 and MXFP4 --------------------------------------------------------------------------------------------------


def exact_mx(block: np.ndarray, scaling: str) -> np.ndarray:
    """One block by the exact rule in float64: frexp of the maximum, then the nearest grid point."""
    m, f = math.frexp(np.abs(block).max())
    up = {"floor": False, "ceil": m > 0.5, "rceil": m > 0.75, "even": m >= 0.875}[scaling]
    e = min(max(f - 3 + int(up), -127), 127) if m else -127
    return nearest(np.minimum(np.maximum(block * 2.0**-e, -6), 6)) * 2.0**e


@pytest.mark.parametrize("scaling", SCALINGS)
def test_mxfp4_is_the_exact_rule_in_float64_at_every_exponent(scaling):
    maxima = [
        f * 2.0**k
        for f, k in itertools.product((1, 1.25, 1.5, 1.500001, 1.7499999, 1.75, 1.9999999), range(-132, 126, 3))
    ]
    x = f32(len(maxima), 32).clamp(-3, 3) / 3 * torch.tensor(maxima)[:, None]
    x[:, 7] = torch.tensor(maxima)
    expected = np.stack([exact_mx(row, scaling) for row in x.double().numpy()])
    assert torch.equal(mxfp4_fake_quantize(x, scaling=scaling), torch.from_numpy(expected).float())


def test_rceil_never_saturates_and_gives_grid_blocks_back():
    for e in (-100, -3, 0, 5, 90):
        x = torch.tensor(GRID * 4) * 2.0**e * torch.tensor([1.0, -1.0] * 16)
        assert torch.equal(mxfp4_fake_quantize(x, scaling="rceil"), x)
        # A few ulp above the last grid point need the next exponent. https://github.com/pytorch/ao/pull/3991
        above = x.clone()
        above[7] = torch.nextafter(above[7], above[7] * 2)
        assert float(mxfp4_fake_quantize(above, scaling="rceil")[7]) == float(x[7])
        assert float(mxfp4_fake_quantize(above, scaling="rceil")[1]) == 0.0 == float(above[0])
    x = f32(50, 32) * torch.exp2(f32(50, 1) * 9)
    q = mxfp4_fake_quantize(x, scaling="rceil").abs().amax(1)
    assert bool(((q <= x.abs().amax(1) * 6 / 5) & (q >= x.abs().amax(1) * 4 / 5)).all())
    floor = mxfp4_fake_quantize(x, scaling="floor").abs().amax(1)
    assert bool((floor < x.abs().amax(1) * 0.8).any())  # and floor does saturate


def loop_nvfp4(x: np.ndarray, pts: float) -> np.ndarray:
    """Two-level NVFP4 with a power-of-two pts by loops in float64, E4M3 by its own grid; exact where products are."""
    e4m3 = np.array([m * 2.0**e for e in range(-9, 6) for m in range(8, 16)])
    e4m3 = e4m3[(e4m3 >= 2**-6) & (e4m3 <= 448)]
    out = np.empty_like(x)
    for row, col in itertools.product(range(len(x)), range(0, x.shape[1], 16)):
        block = x[row, col : col + 16]
        s = e4m3[np.argmin(np.abs(e4m3 - np.abs(block).max() / 6 / pts))]
        out[row, col : col + 16] = nearest(np.clip(block / pts / s, -6, 6)) * (pts * s)
    return out


def test_nvfp4_is_a_plain_loop_over_blocks_in_float64():
    x = f32(40, 64, seed=3)
    expected = loop_nvfp4(x.double().numpy(), 2.0**-8)
    got = nvfp4_fake_quantize(x, per_tensor_scale=2.0**-8)
    np.testing.assert_allclose(got.double().numpy(), expected, rtol=1e-6, atol=0)


def test_published_errors_on_normal_data():
    x = f32(512, 512, seed=2)
    expected = {"two_level": 0.0953, "floor": 0.1147, "rceil": 0.1156, "ceil": 0.1443, "even": 0.1119}
    for trip, error in expected.items():
        got = float((TRIPS[trip](x) - x).norm() / x.norm())
        assert got == pytest.approx(error, abs=5e-4), trip
    ratio = nvfp4_fake_quantize(x).reshape(-1, 16).abs().amax(1) / x.reshape(-1, 16).abs().amax(1)
    assert 0.94 < float(ratio.min()) < 0.95
    assert 1.05 < float(ratio.max()) < 1.06


def test_one_level_has_an_absolute_floor_and_two_levels_have_none():
    assert not nvfp4_fake_quantize(torch.full((16,), 1e-3), two_level=False).any()
    assert float(nvfp4_fake_quantize(torch.full((16,), 1e-2), two_level=False)[0]) == 2**-7
    assert float(nvfp4_fake_quantize(torch.full((16,), 1e-3))[0]) == pytest.approx(1e-3, rel=1e-6)


@given(seeds, st.integers(-60, 60), st.sampled_from(HALVES[:2]))
def test_two_level_is_odd_and_commutes_with_powers_of_two(seed, k, dtype):
    x = (f32(3, 48, seed=seed) * torch.exp2(3 * f32(3, 1, seed=seed))).to(dtype)
    q = nvfp4_fake_quantize(x)
    assert q.dtype == dtype
    assert equal_bits(nvfp4_fake_quantize(-x), -q)
    assert torch.equal(nvfp4_fake_quantize(x * 2.0**k), q * 2.0**k)
    assert bool(((q - x).abs() <= x.abs().max()).all())
    fixed = nvfp4_fake_quantize(x.float(), per_tensor_scale=2.0**-7)
    assert torch.equal(nvfp4_fake_quantize(fixed, per_tensor_scale=2.0**-7), fixed)


@given(seeds, st.sampled_from(SCALINGS), st.sampled_from(HALVES))
def test_mxfp4_is_odd_and_idempotent(seed, scaling, dtype):
    x = (f32(2, 64, seed=seed) * torch.exp2(3 * f32(2, 1, seed=seed))).to(dtype)
    q = mxfp4_fake_quantize(x, scaling=scaling)
    assert equal_bits(mxfp4_fake_quantize(-x, scaling=scaling), -q)
    assert torch.equal(mxfp4_fake_quantize(q, scaling=scaling), q)
    assert torch.equal(
        mxfp4_fake_quantize(8 * x.float(), scaling=scaling), 8 * mxfp4_fake_quantize(x.float(), scaling=scaling)
    )


@both
@pytest.mark.parametrize("dtype", HALVES)
def test_zeros_give_zeros_and_dtype_and_shape_are_kept(quantize, dtype):
    for shape in ((32,), (0, 32), (3, 0), (2, 3, 64), (1, 1, 1, 2, 32)):
        x = f32(*shape).to(dtype)
        q = quantize(x)
        assert (q.shape, q.dtype, q.requires_grad) == (x.shape, dtype, False)
        assert torch.equal(quantize(torch.zeros_like(x)), torch.zeros_like(x))
        assert torch.equal(q, quantize(x.float()).to(dtype))  # float32 inside, one rounding out
        assert not x.numel() or q.data_ptr() != x.data_ptr()


@both
def test_layout_and_gradient_do_not_matter(quantize):
    x = f32(64, 96)
    assert torch.equal(quantize(x.T), quantize(x.T.contiguous()))
    before = x.clone()
    assert torch.equal(quantize(x.clone().requires_grad_()), quantize(x))
    assert torch.equal(x, before)


@both
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_spoils_its_own_block_alone(quantize, bad):
    x = f32(4, 64)
    x[0, :16], x[3, 20] = 0.0, 40.0
    poisoned, zeroed = x.clone(), x.clone()
    poisoned[1, 33] = bad
    zeroed[1, 32:64] = 0.0
    q, clean = quantize(poisoned), quantize(zeroed)
    spoilt = torch.zeros(4, 64, dtype=torch.bool)
    spoilt[1, 32:48] = True
    if quantize is not TRIPS["two_level"]:
        spoilt[1, 48:64] = True
    assert torch.equal(q.isnan(), spoilt)
    known = ~spoilt
    known[1, 48:] = False
    assert torch.equal(q[known], clean[known])
    everywhere = quantize(torch.full((2, 32), bad))
    assert bool(everywhere.isnan().all())


def test_finite_in_finite_out_down_to_the_smallest_numbers():
    x = torch.tensor([1e-45, 1e-40, 1e-38, 1e-36, 1e-30, 1.0, 1e30, 1e38])[:, None] * f32(8, 64).clamp(-1, 1)
    for row in (*x, x):
        for trip in TRIPS.values():
            q = trip(row)
            assert bool(q.isfinite().all())
            assert bool(((q - row).abs() <= row.abs().max()).all())


# ---- per_tensor_scale -------------------------------------------------------------------------------------------------


def test_a_given_scale_is_pts_itself_and_broadcasts():
    x = f32(3, 4, 32)
    pts = float(x.abs().max()) / 2688
    assert torch.equal(nvfp4_fake_quantize(x, per_tensor_scale=x.abs().amax() / 2688), nvfp4_fake_quantize(x))
    assert torch.equal(nvfp4_fake_quantize(x, per_tensor_scale=pts), nvfp4_fake_quantize(x))
    rows = x.abs().amax(-1, keepdim=True) / 2688
    whole = nvfp4_fake_quantize(x, per_tensor_scale=rows)
    alone = torch.stack([torch.stack([nvfp4_fake_quantize(row) for row in sample]) for sample in x])
    assert torch.equal(whole, alone)
    samples = x.abs().amax((1, 2), keepdim=True) / 2688
    assert torch.equal(
        nvfp4_fake_quantize(x, per_tensor_scale=samples), torch.stack([nvfp4_fake_quantize(sample) for sample in x])
    )
    # two levels over a whole call: a row depends on its neighbours
    assert not torch.equal(
        nvfp4_fake_quantize(x * torch.tensor([1.0, 9.0, 3.0])[:, None, None])[0], nvfp4_fake_quantize(x[0])
    )


def test_bad_scales_are_refused():
    x = f32(2, 32)
    for bad in (0.0, -1.0, NAN, INF, 1e39, "one"):
        with refuses("per_tensor_scale", bad):
            nvfp4_fake_quantize(x, per_tensor_scale=bad)
    for shape in ((2,), (3, 1), (2, 2), (1, 2, 1), (2, 32)):
        with refuses("per_tensor_scale", shape, (2, 1)):
            nvfp4_fake_quantize(x, per_tensor_scale=torch.ones(shape))
    with refuses("per_tensor_scale", "int64"):
        nvfp4_fake_quantize(x, per_tensor_scale=torch.tensor(1))
    with refuses("one level", "0.5", "two_level"):
        nvfp4_fake_quantize(x, per_tensor_scale=0.5, two_level=False)


def test_bad_tensors_are_refused():
    for function in (e2m1_round, nvfp4_fake_quantize, mxfp4_fake_quantize):
        with refuses("float64", (64,)):
            function(torch.zeros(64, dtype=torch.float64))
        with refuses("floating point", "int64"):
            function(torch.zeros(64, dtype=torch.int64))
        with refuses("tensor", "list"):
            function([1.0])
    for function, size in ((nvfp4_fake_quantize, 16), (mxfp4_fake_quantize, 32)):
        for shape in ((), (size - 1,), (size, size // 2), (2, size + 1)):
            with refuses("last axis", size, shape):
                function(torch.zeros(shape))
    for bad in ("round", "FLOOR", None, 1):
        with refuses("scaling", repr(bad), "rceil"):
            mxfp4_fake_quantize(torch.zeros(32), scaling=bad)


# ---- straight through -------------------------------------------------------------------------------------------------


@given(seeds, st.sampled_from([e2m1_round, *TRIPS.values()]))
def test_straight_through_has_the_bits_of_the_function_and_the_identitys_gradient(seed, quantize):
    x = (9 * f32(2, 32, seed=seed)).requires_grad_()
    weight = f32(2, 32, seed=seed + 1)
    y = straight_through(quantize)(x)
    assert equal_bits(y.detach(), quantize(x.detach()))
    (y * weight).sum().backward()
    assert torch.equal(x.grad, weight)
    assert torch.equal(torch.func.grad(lambda z: (straight_through(quantize)(z) * weight).sum())(x.detach()), weight)


def test_control_adding_the_detached_difference_is_not_the_function():
    x = 1e8 * f32(4, 4)
    assert not torch.equal(x + (e2m1_round(x) - x), e2m1_round(x))


def test_straight_through_refuses_what_does_not_keep_its_argument():
    with refuses("quantize", "3"):
        straight_through(3)
    with refuses("(2, 2)", "(2,)"):
        straight_through(lambda x: x[0])(torch.zeros(2, 2))
    with refuses("float32", "float64"):
        straight_through(lambda x: x.double())(torch.zeros(2))
    assert straight_through(lambda x: x)(torch.ones(2)).tolist() == [1, 1]
