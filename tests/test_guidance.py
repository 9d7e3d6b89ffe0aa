"""Rewards to advantages, optimality, covariance, direction, pair labels and the target velocity."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import F64, normal, numpy_advantages, numpy_covariance, refuses, rms
from strategies import pairs_of_latents, reward_groups, rewards_and_latents, seeds

from diffrl.guidance import (
    aggregate_direction,
    batch_std,
    dead_groups,
    group_advantages,
    group_std,
    guided_velocity,
    no_spread,
    optimality,
    pair_labels,
    reward_covariance,
)
from diffrl.sampling import interpolate, predict_x_0

NAN, INF = math.nan, math.inf
SPREADS = {"group": group_std, "batch": batch_std, "none": no_spread}
GOLDEN_R = torch.tensor([[1.0, 2.0, 4.0, NAN]], dtype=F64)
GOLDEN_X = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [3.0, 1.0], [9.0, 9.0]]], dtype=F64)


def finite_or_nan(rewards: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isfinite(rewards), rewards, NAN)


# ---- advantages -------------------------------------------------------------------------------------------------------


def test_golden_advantages():
    got = group_advantages(GOLDEN_R)
    np.testing.assert_allclose(got, [[-1.0690, -0.2672, 1.3362, 0.0]], atol=5.1e-5)
    got = group_advantages(torch.cat([GOLDEN_R, torch.ones(1, 4, dtype=F64)]), spread=batch_std)
    np.testing.assert_allclose(got, [[-1.2700, -0.3175, 1.5875, 0.0], [0, 0, 0, 0]], atol=5.1e-5)


@pytest.mark.parametrize("name", SPREADS)
@given(rewards=reward_groups())
def test_advantages_match_numpy_and_vanish_where_they_should(name, rewards):
    # A global std shrinks advantages: both exist and are named. https://github.com/Tencent-Hunyuan/UniRL/pull/128
    got = group_advantages(rewards, spread=SPREADS[name])
    np.testing.assert_allclose(got.numpy(), numpy_advantages(rewards.numpy(), spread=name), rtol=1e-9, atol=1e-12)
    assert bool((got[~torch.isfinite(rewards)] == 0).all())
    assert bool((got[dead_groups(rewards)] == 0).all())


@given(reward_groups(), st.floats(0.1, 10), st.floats(-5, 5), st.data())
def test_advantages_are_invariant_under_shift_scale_and_permutation(rewards, scale, shift, data):
    base = group_advantages(rewards, eps=0.0)
    moved = scale * rewards + shift
    if bool((dead_groups(moved) == dead_groups(rewards)).all()):
        torch.testing.assert_close(group_advantages(moved, eps=0.0), base, rtol=1e-7, atol=1e-7)
    order = data.draw(st.permutations(range(rewards.shape[1])))
    torch.testing.assert_close(group_advantages(rewards[:, list(order)], eps=0.0), base[:, list(order)])
    rows = data.draw(st.permutations(range(len(rewards))))
    torch.testing.assert_close(group_advantages(rewards[list(rows)], eps=0.0), base[list(rows)])
    # A tracker with hidden state broke on its second update. https://github.com/yifan123/flow_grpo
    assert torch.equal(group_advantages(rewards, eps=0.0), base)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-7, 12345.678, 1e20])
def test_a_constant_or_singleton_group_is_exactly_0(dtype, value):
    for k in (1, 3, 7, 10):
        rewards = torch.full((2, k), value, dtype=dtype)
        for spread, eps in itertools.product((group_std, no_spread), (0.0, 1e-4)):
            assert torch.equal(group_advantages(rewards, spread=spread, eps=eps), torch.zeros_like(rewards))
        rewards[1, 1:] = NAN
        assert torch.equal(group_advantages(rewards, eps=0.0), torch.zeros_like(rewards))
        assert dead_groups(rewards).tolist() == [True, True]
        assert aggregate_direction(rewards, normal(2, k, 3, dtype=dtype)).value.abs().max() == 0


def test_no_spread_is_the_centred_reward_exactly():
    rewards = normal(3, 5)
    assert torch.equal(group_advantages(rewards, spread=no_spread, eps=0.5), rewards - rewards.mean(1, keepdim=True))


def test_batch_std_is_the_std_about_the_batch_mean():
    rewards = torch.tensor([[0.0, 1.0], [10.0, 11.0]], dtype=F64)
    assert float(batch_std(rewards)) == pytest.approx(float(rewards.std(correction=0)), rel=1e-12)
    assert group_std(rewards).tolist() == [[0.5], [0.5]]
    ratio = group_advantages(rewards, eps=0.0) / group_advantages(rewards, spread=batch_std, eps=0.0)
    torch.testing.assert_close(ratio, torch.full_like(ratio, float(batch_std(rewards)) / 0.5))


@given(reward_groups())
def test_spreads_match_numpy(rewards):
    values = finite_or_nan(rewards)
    for row, got in zip(values.numpy(), group_std(values)[:, 0].tolist()):
        kept = row[np.isfinite(row)]
        assert got == pytest.approx(kept.std(), rel=1e-9, abs=1e-12) if len(kept) else math.isnan(got)
    kept = values.numpy()[np.isfinite(values.numpy())]
    got = float(batch_std(values))
    assert got == pytest.approx(kept.std(), rel=1e-9, abs=1e-12) if len(kept) else math.isnan(got)
    assert torch.equal(no_spread(values), torch.ones(len(rewards), 1, dtype=F64))


def test_group_statistics_are_float64_inside():
    rewards = torch.tensor([[1e4, 1e4 + 0.25, 1e4 + 0.5]])
    exact = group_advantages(rewards.double())
    assert group_advantages(rewards).dtype == torch.float32
    torch.testing.assert_close(group_advantages(rewards).double(), exact, rtol=1e-6, atol=1e-6)
    seen = []
    group_advantages(torch.tensor([[1.0, INF, 2.0]]), spread=lambda r: seen.append(r) or group_std(r))
    assert seen[0].dtype == F64
    assert seen[0].isnan().tolist() == [[False, True, False]]


def test_advantages_accept_any_spread_that_broadcasts_and_refuse_the_rest():
    rewards = torch.tensor([[0.0, 2.0], [0.0, 8.0]], dtype=F64)
    for spread in (2.0, torch.tensor(2.0), torch.tensor([2.0]), torch.full((2, 1), 2.0)):
        got = group_advantages(rewards, spread=lambda r, s=spread: s, eps=0.0)
        assert got.tolist() == [[-0.5, 0.5], [-2.0, 2.0]]
    with refuses("spread", "(2, 1)", "(2,)"):
        group_advantages(rewards, spread=lambda r: torch.ones(2))
    with refuses("eps", "-1"):
        group_advantages(rewards, eps=-1)


@pytest.mark.parametrize("function", [group_advantages, dead_groups, pair_labels])
def test_groups_are_never_guessed_from_a_flat_batch(function):
    # A partial last group was cut with a fixed stride. https://github.com/areal-project/AReaL/issues/1419
    # Without tracking the whole batch became one group. https://github.com/yifan123/flow_grpo/issues/46
    with refuses("rewards must be (g, k)", "(6,)"):
        function(torch.zeros(6))
    with refuses("rewards must be (g, k)", "(1, 2, 3)"):
        function(torch.zeros(1, 2, 3))
    with refuses("floating point", "int64"):
        function(torch.zeros(2, 3, dtype=torch.long))


@given(reward_groups())
def test_dead_groups_by_brute_force(rewards):
    # Everyone in a group looked the same and the gradient vanished. https://github.com/XueZeyue/DanceGRPO/issues/21
    expected = []
    for row in rewards.tolist():
        values = {v for v in row if math.isfinite(v)}
        expected.append(len(values) < 2)
    assert dead_groups(rewards).tolist() == expected


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_never_half_out(half):
    rewards, x = normal(2, 4, dtype=half), normal(2, 4, 3, dtype=half)
    results = [group_advantages(rewards), optimality(rewards), pair_labels(rewards), reward_covariance(rewards, x)]
    results += [aggregate_direction(rewards, x).value, guided_velocity(x, x), *(f(rewards) for f in SPREADS.values())]
    assert {r.dtype for r in results} == {torch.float32}
    wide, y = rewards.double(), x.double()
    results = [group_advantages(wide), optimality(wide), pair_labels(wide), reward_covariance(wide, y)]
    results += [aggregate_direction(wide, y).value, guided_velocity(y, y), *(f(wide) for f in SPREADS.values())]
    assert {r.dtype for r in results} == {F64}


# ---- optimality -------------------------------------------------------------------------------------------------------


def test_golden_optimality():
    got = optimality(torch.tensor([-6.0, -1.0, 0.0, 2.5], dtype=F64))
    np.testing.assert_allclose(got, [0, 0.4, 0.5, 0.75], atol=1e-15)


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=9), st.floats(0.01, 10))
def test_optimality_is_monotone_odd_about_a_half_and_in_0_1(values, clip):
    # Optimality stayed within .4 and .6: its clip is an argument. https://github.com/NVlabs/DiffusionNFT/issues/50
    a = torch.tensor(sorted(values), dtype=F64)
    r = optimality(a, clip=clip)
    np.testing.assert_allclose(r, np.clip(a / clip, -1, 1) / 2 + 0.5, rtol=0, atol=1e-15)
    assert 0 <= float(r.min()) <= float(r.max()) <= 1
    assert bool((r.diff() >= 0).all())
    torch.testing.assert_close(optimality(-a, clip=clip), 1 - r, rtol=0, atol=1e-15)


def test_optimality_refuses():
    for clip in (0.0, -1.0, NAN):
        with refuses("clip", clip):
            optimality(torch.zeros(2), clip=clip)
    with refuses("advantages", "int64"):
        optimality(torch.zeros(2, dtype=torch.long))


# ---- covariance and direction -----------------------------------------------------------------------------------------


def test_golden_covariance_and_direction():
    np.testing.assert_allclose(reward_covariance(GOLDEN_R, GOLDEN_X), [[11 / 9, 1 / 3]], rtol=1e-12)
    direction = aggregate_direction(GOLDEN_R, GOLDEN_X)
    np.testing.assert_allclose(direction.value, [[1.3644, 0.3721]], atol=5.1e-5)
    assert direction.alive.tolist() == [True]


def with_rewards(rewards: torch.Tensor) -> torch.Tensor:
    """The same, with two finite rewards in every group, so that numpy's loops have something to average."""
    rewards = rewards.clone()
    rewards[:, 0], rewards[:, 1] = -1.5, 2.5
    return rewards


@given(rewards_and_latents())
def test_covariance_matches_numpy_and_ignores_missing_samples(pair):
    rewards, x = with_rewards(pair[0]), pair[1].clone()
    missing = ~torch.isfinite(rewards)
    expected = numpy_covariance(rewards.numpy(), x.numpy())
    for filler in (NAN, INF, 1e300):
        x[missing] = filler
        got = reward_covariance(rewards, x)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-9, atol=1e-12)
        direction = aggregate_direction(rewards, x)
        assert bool(torch.isfinite(direction.value).all())


@given(rewards_and_latents())
def test_direction_is_the_covariance_at_unit_rms(pair):
    rewards, x = pair
    direction, covariance = aggregate_direction(rewards, x), reward_covariance(rewards, x)
    assert bool((direction.alive <= ~dead_groups(rewards)).all())
    for value, c, alive in zip(direction.value, covariance, direction.alive):
        if alive:
            torch.testing.assert_close(value, c / c.square().mean().sqrt(), rtol=1e-9, atol=1e-12)
            assert float(value.square().mean()) == pytest.approx(1, rel=1e-12)
        else:
            assert torch.equal(value, torch.zeros_like(value))


@given(seeds, st.floats(1e-3, 1e3), st.floats(-10, 10), st.floats(0.01, 100), st.floats(-5, 5), st.data())
def test_direction_invariances(seed, a, b, scale, shift, data):
    rewards, x = normal(3, 6, seed=seed), normal(3, 6, 2, 3, seed=seed + 1)
    base = aggregate_direction(rewards, x).value

    def close(other):
        torch.testing.assert_close(other, base, rtol=1e-7, atol=1e-7)

    close(aggregate_direction(a * rewards + b, x).value)
    close(aggregate_direction(rewards, scale * x + shift).value)
    close(-aggregate_direction(-rewards, x).value)
    close(-aggregate_direction(rewards, -x).value)
    close(aggregate_direction(rewards, x, scale=scale).value / scale)
    members = list(data.draw(st.permutations(range(6))))
    close(aggregate_direction(rewards[:, members], x[:, members]).value)
    groups = list(data.draw(st.permutations(range(3))))
    torch.testing.assert_close(aggregate_direction(rewards[groups], x[groups]).value, base[groups])


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-6, 1.0, 1e12])
def test_tiny_rewards_give_the_same_direction(dtype, scale):
    rewards, x = normal(2, 6, dtype=dtype), normal(2, 6, 5, seed=1, dtype=dtype)
    direction = aggregate_direction(rewards * scale, x)
    assert direction.alive.tolist() == [True, True]
    torch.testing.assert_close(direction.value, aggregate_direction(rewards, x).value, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        aggregate_direction(rewards, x * scale).value, aggregate_direction(rewards, x).value, rtol=1e-5, atol=1e-5
    )


def test_the_threshold_is_relative_to_reward_spread_and_latent_size():
    rewards = torch.tensor([[0.0, 1.0, 0.0, 1.0]], dtype=F64)
    x = torch.tensor([[[1.0], [1.0], [-1.0], [-1.0]]], dtype=F64)  # uncorrelated: C = 0
    for size, alive in ((0.0, False), (1e-7, False), (1e-5, True)):  # rms(C)/(std(R) rms(x)) is about `size`
        for scale in (1e-9, 1.0, 1e9):
            moved = x + size * (2 * rewards[..., None] - 1)
            assert aggregate_direction(scale * rewards, moved).alive.tolist() == [alive]
            assert aggregate_direction(rewards, scale * moved).alive.tolist() == [alive]


def test_dead_groups_get_no_direction():
    rewards = torch.tensor([[1.0, 1.0, 1.0], [1.0, NAN, INF], [NAN, NAN, NAN], [0.0, 1.0, NAN]])
    x = normal(4, 3, 2, dtype=torch.float32)
    x[~torch.isfinite(rewards)] = NAN
    direction = aggregate_direction(rewards, x)
    assert direction.alive.tolist() == [False, False, False, True]
    assert torch.equal(direction.value[:3], torch.zeros(3, 2))
    assert torch.equal(reward_covariance(rewards, x)[1:3], torch.zeros(2, 2))
    equal_latents = torch.ones(1, 3, 2) / 3
    assert aggregate_direction(torch.tensor([[0.0, 1.0, 5.0]]), equal_latents).alive.tolist() == [False]


def test_rms_axes_normalise_per_frame_or_per_element():
    rewards, x = normal(2, 5), normal(2, 5, 3, 4, 2, seed=1)
    c = reward_covariance(rewards, x)
    per_frame = aggregate_direction(rewards, x, rms_axes=(1, 2)).value
    torch.testing.assert_close(per_frame, c / c.square().mean((2, 3), keepdim=True).sqrt())
    assert torch.equal(aggregate_direction(rewards, x, rms_axes=(-1, -2)).value, per_frame)
    everything = aggregate_direction(rewards, x).value
    torch.testing.assert_close(aggregate_direction(rewards, x, rms_axes=(0, 1, 2)).value, everything)
    torch.testing.assert_close(aggregate_direction(rewards, x, rms_axes=()).value, c.sign())
    for axes in ((3,), (-4,), (1, 1), (0, -3)):
        with refuses("rms_axes", axes, "(3, 4, 2)"):
            aggregate_direction(rewards, x, rms_axes=axes)


def test_the_direction_is_detached_and_shared_by_the_group():
    rewards, x = normal(2, 4), normal(2, 4, 3, seed=1).requires_grad_()
    assert not aggregate_direction(rewards, x).value.requires_grad
    assert not reward_covariance(rewards, x).requires_grad
    assert aggregate_direction(rewards, x).value.shape == (2, 3)
    halves = [aggregate_direction(rewards[:, i : i + 2], x[:, i : i + 2].detach()).value for i in (0, 2)]
    whole = aggregate_direction(rewards, x).value
    assert not torch.allclose(sum(halves) / 2, whole, atol=1e-3)  # directions of parts do not add up


@pytest.mark.parametrize("function", [reward_covariance, aggregate_direction])
def test_covariance_and_direction_refuse(function):
    rewards = torch.zeros(2, 3)
    with refuses("rewards (2, 3)", "x_0 (2, 4, 5)"):
        function(rewards, torch.zeros(2, 4, 5))
    with refuses("rewards (2, 3)", "x_0 (6, 5)"):
        function(rewards, torch.zeros(6, 5))
    with refuses("rewards must be (g, k)", "(6,)"):
        function(torch.zeros(6), torch.zeros(6, 5))
    bad = torch.zeros(2, 3, 5)
    bad[1, 2, 0] = NAN
    with refuses("x_0 is not finite", "[1, 2]"):
        function(rewards, bad)
    for scale in (NAN, INF):
        with refuses("scale", scale):
            aggregate_direction(rewards, torch.zeros(2, 3, 5), scale=scale)
    assert function(torch.zeros(0, 3), torch.zeros(0, 3, 5)) is not None


# ---- pair labels ------------------------------------------------------------------------------------------------------


@given(reward_groups(), seeds)
def test_pair_labels_are_disjoint_pairs_of_finite_rewards(rewards, seed):
    labels = pair_labels(rewards, generator=torch.Generator().manual_seed(seed))
    for row, label in zip(rewards, labels):
        finite = torch.isfinite(row)
        assert label[~finite].isnan().all()
        kept = label[finite]
        assert int(kept.isnan().sum()) == int(finite.sum()) % 2
        assert set(kept[~kept.isnan()].tolist()) <= {0.0, 0.5, 1.0}
        assert float(kept.nansum()) == int(finite.sum()) // 2 * 0.5 * 2  # each pair adds one: mean label 1/2
        winners, losers = row[finite][kept == 1], row[finite][kept == 0]
        assert len(winners) == len(losers)
        if len(winners):  # a perfect matching with every winner above its loser exists
            assert bool((winners.sort().values > losers.sort().values).all())
    again = pair_labels(rewards, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(labels.nan_to_num(-1), again.nan_to_num(-1))


def test_pair_labels_are_pure_and_seeded_with_0_by_default():
    rewards, state = normal(3, 8), torch.get_rng_state()
    labels = pair_labels(rewards)
    assert torch.equal(pair_labels(rewards), labels)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(pair_labels(rewards, generator=torch.Generator().manual_seed(0)), labels)
    assert not torch.equal(pair_labels(rewards, generator=torch.Generator().manual_seed(1)), labels)


def test_every_pairing_of_four_is_drawn_equally_often():
    rewards = torch.tensor([[1.0, 2.0, 4.0, 8.0]], dtype=F64).expand(3000, 4)
    labels = pair_labels(rewards)
    counts = torch.unique(labels, dim=0, return_counts=True)
    # (12)(34): labels 0101; (13)(24) and (14)(23): 0011
    assert counts[0].tolist() == [[0, 0, 1, 1], [0, 1, 0, 1]]
    assert abs(int(counts[1][1]) - 1000) < 5 * (3000 * 2 / 9) ** 0.5


def test_ties_are_a_half_each():
    assert pair_labels(torch.tensor([[3.0, 3.0], [1.0, 2.0]])).tolist() == [[0.5, 0.5], [0.0, 1.0]]
    assert pair_labels(torch.tensor([[1.0, NAN, INF]])).isnan().all()


@given(seeds)
def test_two_samples_give_winner_minus_loser_at_unit_rms(seed):
    rewards, x = normal(3, 2, seed=seed), normal(3, 2, 2, 3, seed=seed + 1)
    best = rewards.argmax(1)
    gap = x[range(3), best] - x[range(3), 1 - best]
    labels = pair_labels(rewards)
    torch.testing.assert_close(reward_covariance(labels, x), gap / 4)
    expected = gap / rms(gap)[:, None, None]
    torch.testing.assert_close(aggregate_direction(labels, x).value, expected)
    torch.testing.assert_close(aggregate_direction(rewards, x).value, expected)  # equal to the scalar one at k = 2


def test_labels_as_rewards_sum_the_gaps_of_the_pairs():
    rewards = torch.tensor([[1.0, 2.0, 5.0, 5.0, 7.0, 9.0]], dtype=F64)
    x = normal(1, 6, 4)
    labels = pair_labels(rewards)
    draws = torch.rand(1, 6, generator=torch.Generator().manual_seed(0)).argsort(1)[0].reshape(3, 2)
    total = torch.zeros(4, dtype=F64)
    for a, b in draws.tolist():
        total += (x[0, a] - x[0, b]) * float(torch.sign(rewards[0, a] - rewards[0, b]))
    torch.testing.assert_close(reward_covariance(labels, x)[0], total / 12)
    assert not torch.allclose(aggregate_direction(labels, x).value, aggregate_direction(rewards, x).value, atol=1e-3)


# ---- target -----------------------------------------------------------------------------------------------------------


@given(pairs_of_latents(), st.floats(0.05, 1))
def test_the_target_velocity_moves_the_predicted_data_along_the_direction(pair, t):
    v_old, direction = pair
    target = guided_velocity(v_old, direction)
    assert torch.equal(target, v_old - direction)
    x_t = interpolate(direction, v_old, t)
    moved = predict_x_0(x_t, target, t) - predict_x_0(x_t, v_old, t)
    torch.testing.assert_close(moved, t * direction, rtol=1e-9, atol=1e-9)


def test_guided_velocity_is_detached_and_refuses_to_broadcast():
    v = normal(2, 3).requires_grad_()
    assert not guided_velocity(v, normal(2, 3)).requires_grad
    with refuses("v_old (2, 3)", "direction (1, 3)"):
        guided_velocity(v, torch.zeros(1, 3))


# ---- the noise law ----------------------------------------------------------------------------------------------------


def cosines(k: int, d: int, n: int, direction=lambda r, x: aggregate_direction(r, x).value) -> torch.Tensor:
    """cos(G, a) of n groups with x ~ N(0, I_d) and R = a.x for a random unit a."""
    x, a = normal(n, k, d, seed=k * d), torch.nn.functional.normalize(normal(n, d, seed=k + d), dim=1)
    g = direction(torch.einsum("nkd,nd->nk", x, a), x)
    return torch.nn.functional.cosine_similarity(g, a, dim=1)


@pytest.mark.parametrize(("k", "d"), [(8, 16), (2, 10), (24, 4)])
def test_noise_law_of_the_direction(k, d):
    n, mean = 3000, (k - 1) / (k + d - 2)
    cos = cosines(k, d, n)
    assert bool((cos > 0).all())
    a, b = (k - 1) / 2, (d - 1) / 2  # cos^2 is Beta(a, b)
    error = (a * b / ((a + b) ** 2 * (a + b + 1)) / n) ** 0.5
    assert abs(float((cos**2).mean()) - mean) < 4 * error
    if (k, d) == (8, 16):
        assert mean == pytest.approx(0.3182, abs=5e-5)


# ---- negative control -------------------------------------------------------------------------------------------------


def test_negative_control_wrong_directions_fail_the_oracles():
    unrelated = cosines(8, 16, 3000, lambda r, x: aggregate_direction(r.roll(1, 0), x).value)
    assert not bool((unrelated > 0).all())
    assert abs(float((unrelated**2).mean()) - 7 / 22) > 0.1
    uncentred = (GOLDEN_R.nan_to_num(0)[..., None] * GOLDEN_X).mean(1)  # forgets to centre, averages over the missing
    assert not np.allclose(uncentred, [[11 / 9, 1 / 3]], rtol=1e-3)
    x = torch.full((1, 2, 1), NAN)
    assert bool((torch.tensor([[0.0, 0.0]])[..., None] * x).isnan().all())  # weight 0 does not silence a nan


@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 1, 1), (3, 1)])
def test_a_spread_of_too_many_axes_or_groups_is_refused(shape):
    with refuses("spread", shape):
        group_advantages(torch.rand(2, 4), spread=lambda rewards: torch.ones(shape))
