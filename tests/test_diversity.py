"""Group diversity against loops, eigenvalues and known shapes."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import F64, normal, refuses
from strategies import seeds

from diffrl.diversity import pairwise_distance, participation_ratio, share_along

NAN, INF = math.nan, math.inf
METRICS = {
    "distance": pairwise_distance,
    "ratio": participation_ratio,
    "share": lambda x: share_along(x, torch.ones_like(x[:, 0]).nan_to_num(1.0)),
}
latents = st.lists(st.integers(1, 3), min_size=0, max_size=3)


@given(st.integers(2, 6), latents, seeds)
def test_metrics_are_the_loops(k, shape, seed):
    x, direction = normal(3, k, *shape, seed=seed), normal(3, *shape, seed=seed + 1)
    got = pairwise_distance(x), participation_ratio(x), share_along(x, direction)
    for group in range(3):
        y, g = x[group].reshape(k, -1).numpy(), direction[group].reshape(-1).numpy()
        gaps = [((y[i] - y[j]) ** 2).mean() for i, j in itertools.combinations(range(k), 2)]
        assert float(got[0][group]) == pytest.approx(math.sqrt(sum(gaps) / len(gaps)), rel=1e-9)
        values = np.linalg.eigvalsh(np.cov(y.T, bias=True).reshape(y.shape[1], y.shape[1]))
        ratio = values.sum() ** 2 / (values**2).sum()
        assert float(got[1][group]) == pytest.approx(ratio, rel=1e-6)
        assert 1 - 1e-9 <= ratio <= min(k - 1, y.shape[1]) + 1e-9
        centred = y - y.mean(0)
        share = sum((g @ row) ** 2 for row in centred) / (g @ g * (centred**2).sum())
        assert float(got[2][group]) == pytest.approx(share, rel=1e-9)
        assert 0 <= float(got[2][group]) <= 1


@given(seeds, st.floats(0.01, 100), st.floats(-5, 5), st.data())
def test_metrics_under_scale_shift_and_permutation(seed, scale, shift, data):
    x, direction = normal(2, 5, 2, 3, seed=seed), normal(2, 2, 3, seed=seed + 1)
    members = list(data.draw(st.permutations(range(5))))
    moved = scale * x[:, members] + shift
    torch.testing.assert_close(pairwise_distance(moved), scale * pairwise_distance(x), rtol=1e-7, atol=0)
    torch.testing.assert_close(participation_ratio(moved), participation_ratio(x), rtol=1e-7, atol=0)
    torch.testing.assert_close(share_along(moved, -3 * direction), share_along(x, direction), rtol=1e-6, atol=1e-12)


def test_known_shapes():
    corners = torch.eye(4, dtype=F64)[None]  # a regular simplex: every pair sqrt(2/4) apart, three equal dimensions
    assert float(pairwise_distance(corners)) == pytest.approx(math.sqrt(0.5))
    assert float(participation_ratio(corners)) == pytest.approx(3)
    line = torch.tensor([[[0.0, 0.0], [1.0, 2.0], [3.0, 6.0]]], dtype=F64)
    assert float(participation_ratio(line)) == pytest.approx(1)
    assert float(share_along(line, torch.tensor([[1.0, 2.0]], dtype=F64))) == pytest.approx(1)
    assert float(share_along(line, torch.tensor([[-2.0, 1.0]], dtype=F64))) == pytest.approx(0, abs=1e-15)
    many = normal(1, 20_000, 5)
    assert float(pairwise_distance(many)) == pytest.approx(math.sqrt(2), abs=0.02)  # sqrt(2) std
    assert float(participation_ratio(many[:, :2000])) == pytest.approx(5, abs=0.1)
    assert float(share_along(many, torch.ones(1, 5, dtype=F64))) == pytest.approx(1 / 5, abs=0.01)


@pytest.mark.parametrize("name", METRICS)
def test_rows_that_are_not_finite_are_left_out(name):
    x = normal(4, 5, 3)
    x[0, 1, 2], x[0, 4, 0] = NAN, INF
    x[1, 1:] = NAN
    x[2] = NAN
    got = METRICS[name](x)
    torch.testing.assert_close(got[0], METRICS[name](x[:1, [0, 2, 3]])[0])
    assert got.isnan().tolist() == [False, True, True, False]
    assert METRICS[name](x[:0]).shape == (0,)
    assert METRICS[name](x[:, :1]).isnan().all()


def test_a_collapsed_group_has_distance_0_and_no_shape():
    x = torch.full((1, 7, 3), 0.1, dtype=F64) + torch.tensor([0.0, 1 / 3, 7.0], dtype=F64)
    assert float(pairwise_distance(x)) == 0
    assert participation_ratio(x).isnan().all()
    assert share_along(x, torch.ones(1, 3, dtype=F64)).isnan().all()
    assert share_along(normal(1, 4, 3), torch.zeros(1, 3, dtype=F64)).isnan().all()  # a dead group's direction
    close = 1 + 1e-7 * normal(1, 6, 3)  # nearly, but not
    assert float(pairwise_distance(close)) == pytest.approx(1e-7, rel=2)
    assert 1 < float(participation_ratio(close)) < 3


@pytest.mark.parametrize("name", METRICS)
def test_results_are_float32_or_better_and_detached(name):
    x = normal(2, 4, 3)
    for dtype, out in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (F64, F64),
    ):
        got = METRICS[name](x.to(dtype).requires_grad_())
        assert (got.dtype, got.requires_grad) == (out, False)
    far = (normal(1, 6, 3) + 1e4).float()  # float64 inside
    torch.testing.assert_close(METRICS[name](far).double(), METRICS[name](far.double()), rtol=1e-6, atol=0)


def test_inputs_are_refused():
    for function in (pairwise_distance, participation_ratio):
        with refuses("x_0", "(4,)"):
            function(torch.zeros(4))
        with refuses("x_0", "int64"):
            function(torch.zeros(2, 4, 3, dtype=torch.long))
    for direction in (torch.ones(3), torch.ones(1, 3), torch.ones(2, 4)):
        with refuses("direction", tuple(direction.shape), "x_0 (2, 4, 3)"):
            share_along(torch.zeros(2, 4, 3), direction)
    with refuses("direction is not finite", "[1, 0]"):
        share_along(torch.zeros(2, 4, 3), torch.tensor([[1.0, 0.0, 0.0], [NAN, 0.0, 0.0]]))


def test_control_the_wrong_formulas_are_told_apart():
    x = normal(1, 4, 6)
    y = x[0].numpy()
    ordered = np.mean([((y[i] - y[j]) ** 2).mean() for i in range(4) for j in range(4)])  # counts a sample with itself
    assert float(pairwise_distance(x)) != pytest.approx(math.sqrt(ordered), rel=1e-2)
    gram = y @ y.T  # not centred
    assert float(participation_ratio(x)) != pytest.approx(np.trace(gram) ** 2 / (gram**2).sum(), rel=1e-2)
    assert float(share_along(x, x.mean(1))) != pytest.approx(float(share_along(x - 5, x[:, 0])), rel=1e-2)
