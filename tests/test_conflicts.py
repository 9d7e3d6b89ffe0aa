"""Several rewards: sums, projections and the minimum norm, against loops, closed forms and scipy's SLSQP."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import F64, normal, refuses, rms
from scipy.optimize import minimize
from strategies import seeds

from diffrl import conflicts, directions
from diffrl.conflicts import direction_cosines, min_norm, pcgrad, sum_of_directions, sum_of_rewards
from diffrl.guidance import aggregate_direction

NAN, INF = math.nan, math.inf
COMBINE = {"rewards": sum_of_rewards, "directions": sum_of_directions, "pcgrad": pcgrad, "min_norm": min_norm}


def parts_of(rewards: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """G_j " g j D", each of RMS 1."""
    return torch.stack([aggregate_direction(rewards[..., j], x).value.flatten(1) for j in range(rewards.shape[2])], 1)


def unit(v: torch.Tensor) -> torch.Tensor:
    return v / v.square().mean().sqrt()


def opposed(*directions: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """One group whose covariances point along the given vectors: R_j = x . a_j on the corners +-e_i of the latents."""
    a = torch.tensor(directions, dtype=F64)
    x = torch.cat([torch.eye(a.shape[1], dtype=F64), -torch.eye(a.shape[1], dtype=F64)])
    return (x @ a.T)[None], x[None]


def test_the_corners_give_the_covariances_asked_for():
    rewards, x = opposed([3.0, 0.0], [-1.0, 2.0])
    torch.testing.assert_close(parts_of(rewards, x)[0, 0], unit(torch.tensor([3.0, 0.0], dtype=F64)))
    torch.testing.assert_close(parts_of(rewards, x)[0, 1], unit(torch.tensor([-1.0, 2.0], dtype=F64)))


# ---- sums ------------------------------------------------------------------------------------------------------------


@given(seeds, st.integers(1, 4), st.floats(0.1, 10))
def test_sums_are_the_loop(seed, j, scale):
    rewards, x, w = normal(3, 6, j, seed=seed), normal(3, 6, 2, 2, seed=seed + 1), normal(j, seed=seed + 2)
    got = sum_of_directions(rewards, x, weights=w, scale=scale)
    expected = torch.stack([scale * unit(total) for total in torch.einsum("j,gjd->gd", w, parts_of(rewards, x))])
    torch.testing.assert_close(got.value.flatten(1), expected)
    raw = sum(float(w[i]) * rewards[..., i] for i in range(j))
    one = sum_of_rewards(rewards, x, weights=w, scale=scale)
    torch.testing.assert_close(one.value, aggregate_direction(raw, x, scale=scale).value)
    assert bool(got.alive.all() & one.alive.all())
    for function in (sum_of_directions, sum_of_rewards, pcgrad):
        assert torch.equal(function(rewards, x).value, function(rewards, x, weights=torch.ones(j)).value)


@given(seeds, st.floats(0.01, 100), st.floats(-5, 5))
def test_directions_are_free_of_each_reward_s_units_and_raw_sums_are_not(seed, a, b):
    rewards, x = normal(2, 6, 3, seed=seed), normal(2, 6, 4, seed=seed + 1)
    moved = rewards.clone()
    moved[..., 1] = a * moved[..., 1] + b
    for function in (sum_of_directions, pcgrad, min_norm):
        torch.testing.assert_close(function(moved, x).value, function(rewards, x).value, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(direction_cosines(moved, x), direction_cosines(rewards, x), rtol=1e-6, atol=1e-6)
    loud = rewards * torch.tensor([1.0, 1e9, 1.0], dtype=F64)
    alone = aggregate_direction(rewards[..., 1], x).value
    torch.testing.assert_close(sum_of_rewards(loud, x).value, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", COMBINE)
def test_one_reward_alone_is_its_aggregate_direction(name):
    rewards, x = normal(3, 6), normal(3, 6, 2, 2, seed=1)
    got, base = COMBINE[name](rewards[..., None], x, scale=2.0), aggregate_direction(rewards, x, scale=2.0)
    torch.testing.assert_close(got.value, base.value)
    assert torch.equal(got.alive, base.alive)


# ---- pcgrad ----------------------------------------------------------------------------------------------------------


def pcgrad_by_loops(parts: list[np.ndarray], orders: list[list[int]]) -> np.ndarray:
    total = np.zeros_like(parts[0])
    for j, order in enumerate(orders):
        g = parts[j].copy()
        for k in order:
            if k != j and g @ parts[k] < 0:
                g = g - (g @ parts[k]) / (parts[k] @ parts[k]) * parts[k]
        total += g
    return total / np.sqrt((total**2).mean())


@given(seeds, st.integers(2, 5))
def test_pcgrad_projects_in_the_drawn_order(seed, j):
    rewards, x, w = normal(3, 7, j, seed=seed), normal(3, 7, 4, seed=seed + 1), normal(j, seed=seed + 2)
    got = pcgrad(rewards, x, weights=w, scale=3.0, generator=torch.Generator().manual_seed(seed)).value
    orders = torch.rand((j, j), generator=torch.Generator().manual_seed(seed)).argsort(1).tolist()
    for group, parts in enumerate(parts_of(rewards, x)):
        expected = pcgrad_by_loops([float(w[i]) * parts[i].numpy() for i in range(j)], orders)
        np.testing.assert_allclose(got[group], 3 * expected, rtol=1e-7, atol=1e-7)


def test_pcgrad_is_the_sum_where_nothing_conflicts_and_helps_where_it_does():
    rewards, x = opposed([1.0, 0.2, 0.0], [1.0, 0.0, 0.5], [0.0, 1.0, 0.0])
    torch.testing.assert_close(pcgrad(rewards, x).value, sum_of_directions(rewards, x).value)
    rewards, x = opposed([1.0, 0.0, 0.1], [1.0, 0.1, 0.0], [-1.0, 0.5, 0.5])  # two against one
    worst = [float((parts_of(rewards, x)[0] @ f(rewards, x).value[0]).min()) for f in (sum_of_directions, pcgrad)]
    assert worst[0] < 0 < worst[1]


def test_pcgrad_is_pure_and_seeded_with_0_by_default():
    (rewards, x), state = (normal(6, 7, 5), normal(6, 7, 4, seed=1)), torch.get_rng_state()
    first = pcgrad(rewards, x).value
    assert torch.equal(pcgrad(rewards, x).value, first)
    assert torch.equal(pcgrad(rewards, x, generator=torch.Generator().manual_seed(0)).value, first)
    assert not torch.allclose(pcgrad(rewards, x, generator=torch.Generator().manual_seed(1)).value, first)
    assert torch.equal(torch.get_rng_state(), state)
    two = [pcgrad(rewards[..., :2], x, generator=torch.Generator().manual_seed(s)).value for s in range(4)]
    assert all(torch.equal(v, two[0]) for v in two)


# ---- minimum norm ----------------------------------------------------------------------------------------------------


def slsqp(gram: np.ndarray) -> np.ndarray:
    """argmin a.gram a over the simplex."""
    n = len(gram)
    done = minimize(
        lambda a: a @ gram @ a,
        np.full(n, 1 / n),
        jac=lambda a: 2 * gram @ a,
        bounds=[(0, 1)] * n,
        constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": lambda a: np.ones(n)},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 500},
    )
    return done.x


def faces(gram: np.ndarray) -> float:
    """min a.gram a over the simplex, by trying the affine minimum of every face."""
    best = math.inf
    for size in range(1, len(gram) + 1):
        for face in itertools.combinations(range(len(gram)), size):
            q = gram[np.ix_(face, face)]
            system = np.block([[q, np.ones((size, 1))], [np.ones((1, size)), np.zeros((1, 1))]])
            a = np.linalg.lstsq(system, np.r_[np.zeros(size), 1.0], rcond=None)[0][:size]
            if (a >= -1e-12).all() and abs(a.sum() - 1) < 1e-9:
                best = min(best, a @ q @ a)
    return best


@given(seeds, st.integers(2, 6), st.integers(1, 7), st.floats(-1, 1))
def test_the_solver_finds_the_nearest_point_of_the_hull(seed, j, d, shift):
    g = normal(j, d, seed=seed) * (1 + torch.arange(j, dtype=F64))[:, None] + 2 * shift
    gram, alpha = g @ g.T, conflicts._nearest_to_zero(g)
    assert float(alpha.sum()) == pytest.approx(1, abs=1e-12)
    assert bool((alpha >= 0).all())
    size, slope = float(alpha @ gram @ alpha), gram @ alpha
    assert size - float(slope.min()) <= 1e-12 * float(gram.diagonal().max())  # the duality gap: <G*, G_j> >= |G*|^2
    assert size == pytest.approx(faces(gram.numpy()), abs=1e-10 * float(gram.diagonal().max()))
    a = slsqp(gram.numpy())
    assert size <= a @ gram.numpy() @ a + 1e-7 * float(gram.diagonal().max())


@given(seeds, st.integers(2, 8), st.integers(1, 9), st.sampled_from(["twin", "near", "opposed", "narrow", "balanced"]))
def test_the_solver_on_hulls_without_a_proper_shape(seed, j, d, kind):
    g = normal(j, d, seed=seed)
    if kind == "narrow":
        g = g[:1] + 1e-6 * g
    last = {"twin": g[0], "near": g[0] + 1e-7 * normal(d, seed=seed + 1), "opposed": -g[0], "balanced": -g[:-1].sum(0)}
    g[-1] = last.get(kind, g[-1])
    if kind == "balanced":
        g = g / g.norm(dim=1, keepdim=True).clamp_min(1e-6)
    x = conflicts._nearest_to_zero(g) @ g
    assert float(((x - g) @ x).max()) <= 1e-12 * float(g.square().sum(1).max())
    if kind == "opposed":
        assert float(x.norm()) < 1e-7 * float(g.norm(dim=1).max())


def test_the_solver_gives_up_no_share_but_the_one_that_vanishes():
    for seed in range(400):  # rounding sends one in sixty of these the wrong way if it does
        g = normal(6, 3, seed=seed)
        g[-1] = -g[0]
        x = conflicts._nearest_to_zero(g) @ g
        assert float(x.norm()) < 1e-7 * float(g.norm(dim=1).max()), seed


@given(seeds)
def test_two_vectors_have_a_closed_form(seed):
    g = normal(2, 3, seed=seed) * torch.tensor([[1.0], [3.0]], dtype=F64)
    first = float(((g[1] - g[0]) @ g[1] / (g[0] - g[1]).square().sum()).clamp(0, 1))
    torch.testing.assert_close(conflicts._nearest_to_zero(g), torch.tensor([first, 1 - first], dtype=F64))


@pytest.mark.parametrize("seed", range(8))
def test_min_norm_agrees_with_slsqp_and_lowers_no_reward(seed):
    rewards, x = normal(2, 10, 4, seed=seed), normal(2, 10, 3, 3, seed=seed + 100)
    got = min_norm(rewards, x, scale=2.0)
    assert got.alive.tolist() == [True, True]
    for value, parts in zip(got.value, parts_of(rewards, x)):
        a = slsqp((parts @ parts.T).numpy())
        expected = 2 * unit(torch.from_numpy(a) @ parts)
        torch.testing.assert_close(value.flatten(), expected, rtol=1e-4, atol=1e-4)
        gains = parts @ value.flatten()
        assert bool((gains > 0).all())
        assert float(gains[torch.from_numpy(a) > 1e-4].std(correction=0)) < 1e-7  # all that bind gain alike


def test_two_unit_directions_make_all_three_the_same():
    rewards, x = normal(5, 8, 2), normal(5, 8, 6, seed=1)
    assert bool((direction_cosines(rewards, x)[:, 0, 1] < 0).any())
    for function in (pcgrad, min_norm):
        torch.testing.assert_close(function(rewards, x).value, sum_of_directions(rewards, x).value)


def test_parts_that_cancel_are_pareto_stationary_and_dead():
    for vectors in (
        [[1.0, 0.0], [-1.0, 0.0]],
        [[1.0, 0.0], [-1.0, 2.0], [-1.0, -2.0]],
        [[1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]],
    ):
        rewards, x = opposed(*vectors)
        got = min_norm(rewards, x)
        assert got.alive.tolist() == [False]
        assert torch.equal(got.value, torch.zeros(1, 2, dtype=F64))
    rewards, x = opposed([1.0, 0.0], [-1.0, 0.0])
    for function in (sum_of_directions, pcgrad, sum_of_rewards):
        assert not function(rewards, x).alive.any()
    for size, alive in ((1e-7, False), (1e-4, True)):
        rewards, x = opposed([1.0, size], [-1.0, size])
        for function in (min_norm, sum_of_directions, pcgrad):
            assert function(rewards, x).alive.tolist() == [alive]
    torch.testing.assert_close(min_norm(rewards, x).value, torch.tensor([[0.0, 2**0.5]], dtype=F64), rtol=0, atol=1e-6)


# ---- dead, missing, cosines ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["directions", "pcgrad", "min_norm"])
def test_a_reward_that_says_nothing_takes_no_part(name):
    rewards, x = normal(3, 6, 3), normal(3, 6, 4, seed=1)
    rewards[0, :, 1] = 0.5
    rewards[1] = 2.0
    got = COMBINE[name](rewards, x)
    assert got.alive.tolist() == [True, False, True]
    assert torch.equal(got.value[1], torch.zeros(4, dtype=F64))
    torch.testing.assert_close(got.value[0], COMBINE[name](rewards[:1, :, [0, 2]], x[:1]).value[0])
    weights = None if name == "min_norm" else torch.tensor([1.0, 0.0, 1.0])
    if weights is not None:
        pair = COMBINE[name](rewards[2:, :, [0, 2]], x[2:])
        torch.testing.assert_close(COMBINE[name](rewards[2:], x[2:], weights=weights).value, pair.value)


@pytest.mark.parametrize("name", COMBINE)
def test_a_sample_with_any_part_missing_has_no_reward(name):
    rewards, x = normal(2, 8, 3), normal(2, 8, 4, seed=1)
    kept = [0, 1, 3, 4, 6, 7]
    expected = COMBINE[name](rewards[:, kept], x[:, kept]).value
    rewards[:, 2, 0], rewards[:, 5, 2] = NAN, INF
    x[:, [2, 5]] = NAN
    torch.testing.assert_close(COMBINE[name](rewards, x).value, expected)
    assert bool(torch.isfinite(direction_cosines(rewards, x)).all())
    assert COMBINE[name](rewards[:0], x[:0]).value.shape == (0, 4)


def test_cosines_are_those_of_the_covariances():
    rewards, x = normal(3, 6, 3), normal(3, 6, 2, 2, seed=1)
    rewards[2, :, 1] = 1.0
    got = direction_cosines(rewards, x)
    parts = parts_of(rewards, x)
    expected = torch.nn.functional.cosine_similarity(parts[:, :, None], parts[:, None], dim=3)
    torch.testing.assert_close(got[:2], expected[:2])
    torch.testing.assert_close(got[:2].diagonal(dim1=1, dim2=2), torch.ones(2, 3, dtype=F64))
    assert got[2].isnan().tolist() == [[False, True, False], [True, True, True], [False, True, False]]
    rewards, x = opposed([1.0, 0.0], [-2.0, 0.0], [1.0, 1.0])
    torch.testing.assert_close(direction_cosines(rewards, x)[0, 0], torch.tensor([1.0, -1.0, 0.5**0.5], dtype=F64))


# ---- dtypes, refusals, control ---------------------------------------------------------------------------------------


def test_results_are_float32_or_better_detached_and_all_are_directions_names():
    rewards, x = normal(2, 6, 3), normal(2, 6, 5, seed=1)
    for function in COMBINE.values():
        for dtype, out in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (F64, F64)):
            value = function(rewards.to(dtype), x.to(dtype).requires_grad_()).value
            assert (value.dtype, value.requires_grad) == (out, False)
            assert float((rms(value) - 1).abs().max()) < 1e-6
        assert getattr(directions, function.__name__) is function
    assert direction_cosines(rewards.float(), x.float()).dtype == torch.float32
    assert directions.direction_cosines is direction_cosines


@pytest.mark.parametrize("function", [*COMBINE.values(), direction_cosines])
def test_rewards_and_latents_are_refused(function):
    rewards = torch.rand(2, 4, 3)
    for wrong in (torch.rand(2, 4), torch.rand(2, 4, 0)):
        with refuses("rewards must be (g, k, j)", tuple(wrong.shape)):
            function(wrong, torch.zeros(2, 4, 5))
    with refuses("rewards (2, 4)", "x_0 (2, 5, 5)"):
        function(rewards, torch.zeros(2, 5, 5))
    bad = torch.zeros(2, 4, 5)
    bad[1, 2, 0] = NAN
    with refuses("x_0 is not finite", "[1, 2]"):
        function(rewards, bad)


@pytest.mark.parametrize("name", COMBINE)
def test_options_are_refused(name):
    rewards, x = torch.rand(2, 4, 3), torch.rand(2, 4, 5)
    with refuses("scale", NAN):
        COMBINE[name](rewards, x, scale=NAN)
    if name != "min_norm":
        for weights in (torch.ones(2), torch.ones(1, 3), torch.tensor([1.0, NAN, 1.0])):
            with refuses("weights", "3", weights.tolist()):
                COMBINE[name](rewards, x, weights=weights)


def test_control_the_plain_sum_is_no_minimum_and_lowers_a_reward():
    rewards, x = opposed([1.0, 0.0, 0.1], [1.0, 0.1, 0.0], [-1.0, 0.5, 0.5])
    parts = parts_of(rewards, x)[0]
    gram = parts @ parts.T
    even = torch.full((3,), 1 / 3, dtype=F64)
    assert float(even @ gram @ even) > faces(gram.numpy()) + 0.1
    assert float((parts @ sum_of_directions(rewards, x).value[0]).min()) < 0
    assert not np.allclose(
        pcgrad_by_loops(list(parts.numpy()), [[0, 1, 2]] * 3), sum_of_directions(rewards, x).value[0]
    )
