"""Shrunk, weighted and per-noise-level directions: against brute force, closed forms and the unbiased HSIC."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import F64, atoms, conditional_moments, normal, numpy_covariance, refuses, rms
from strategies import rewards_and_latents, seeds
from torch.nn.functional import cosine_similarity, normalize

from diffrl.directions import (
    batch_rms,
    bin_rms,
    binned_covariance,
    binned_direction,
    joint_rms,
    noise_energy,
    shrink_scale,
    shrink_toward,
    shrink_toward_batch,
    signal_energy,
    signal_fraction,
    signal_weight,
    spread_weight,
    unbiased_covariance,
)
from diffrl.guidance import aggregate_direction, dead_groups, reward_covariance
from diffrl.sampling import interpolate, predict_x_0

NAN, INF = math.nan, math.inf
DIRECTIONS = {"scale": shrink_scale, "batch": shrink_toward_batch, "rms": batch_rms}


def linear(n: int, k: int = 8, d: int = 16, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """n groups of x ~ N(0, I_d) with reward R = x_1: Cov = e_1."""
    x = normal(n, k, d, seed=seed)
    return x[..., 0], x


def pair_energy(rewards: list[float], x: np.ndarray, order: list[int]) -> float:
    """sum over p != q of <h_p, h_q>/(P (P - 1)) by loops; pairs are the neighbours (i, P + i) of `order`."""
    pairs = len(order) // 2
    h = [
        (rewards[a] - rewards[b]) * (x[a] - x[b]) / 2
        for a, b in zip(order[:pairs], order[pairs : 2 * pairs], strict=True)
    ]
    return sum((h[p] * h[q]).sum() for p in range(pairs) for q in range(pairs) if p != q) / (pairs * (pairs - 1))


def unbiased_hsic(rewards: torch.Tensor, x: torch.Tensor) -> float:
    """Song et al. 2012 of one group with linear kernels, their diagonals left out."""
    n = len(rewards)
    gram_x, gram_r = (m - m.diag().diag() for m in (x @ x.T, torch.outer(rewards, rewards)))
    product = gram_x @ gram_r
    total = product.trace() + gram_x.sum() * gram_r.sum() / ((n - 1) * (n - 2)) - 2 * product.sum() / (n - 2)
    return float(total / (n * (n - 3)))


# ---- signal and noise ------------------------------------------------------------------------------------------------


def test_signal_energy_is_the_sum_over_the_drawn_pairs():
    rewards, x = normal(3, 9), normal(3, 9, 2, 2, seed=1)
    rewards[1, [0, 4]], rewards[2, 1] = NAN, INF
    x[~torch.isfinite(rewards)] = NAN
    draws = torch.rand((2, 9), generator=torch.Generator().manual_seed(0))
    for group, got in enumerate(signal_energy(rewards, x, pairings=2).tolist()):
        kept = torch.isfinite(rewards[group]).nonzero().flatten()
        orders = [kept[draws[m, kept].argsort()].tolist() for m in range(2)]
        expected = [pair_energy(rewards[group].tolist(), x[group].numpy(), order) for order in orders]
        assert got == pytest.approx(sum(expected) / 2, rel=1e-10)


def test_what_a_group_says_does_not_depend_on_the_other_groups():
    rewards, x = normal(5, 8), normal(5, 8, 4, seed=1)
    whole = signal_fraction(rewards, x)
    for group in range(5):
        assert torch.equal(signal_fraction(rewards[group : group + 1], x[group : group + 1])[0], whole[group])


def test_over_all_pairings_it_is_the_unbiased_hsic():
    rewards, x = normal(1, 4), normal(1, 4, 3, seed=1)
    found = {
        round(float(signal_energy(rewards, x, pairings=1, generator=torch.Generator().manual_seed(s))), 9)
        for s in range(60)
    }
    assert len(found) == 3  # the three pairings of four
    assert sum(found) / 3 == pytest.approx(unbiased_hsic(rewards[0], x[0]), abs=1e-8)
    assert float(signal_energy(rewards, x, pairings=30_000)) == pytest.approx(sum(found) / 3, abs=0.02)


def test_signal_energy_is_unbiased_for_the_squared_covariance():
    n, (rewards, x) = 4000, linear(4000)
    signal, noise = signal_energy(rewards, x), noise_energy(rewards, x)
    assert abs(float(signal.mean()) - 1) < 4 * float(signal.std()) / n**0.5  # |Cov|^2 = |e_1|^2
    assert float(signal.std()) < 2  # 1.68; a single pairing gives 2.25
    assert abs(float(noise.mean()) - 17 / 7) < 4 * float(noise.std()) / n**0.5  # (k + D)/(k - 1) - 1
    assert bool((signal < 0).any())
    unrelated = signal_energy(rewards.roll(1, 0), x)
    assert abs(float(unrelated.mean())) < 4 * float(unrelated.std()) / n**0.5
    pooled = float(signal.sum() / (signal + noise).sum())
    assert pooled == pytest.approx(7 / 24, abs=0.03)  # (k - 1)/(k + D)


@given(rewards_and_latents(), st.integers(1, 3))
def test_signal_and_noise_add_up_to_the_unbiased_covariance(pair, pairings):
    rewards, x = pair
    total = unbiased_covariance(rewards, x).reshape(len(x), -1).square().sum(1)
    both = signal_energy(rewards, x, pairings=pairings) + noise_energy(rewards, x, pairings=pairings)
    few = torch.isfinite(rewards).sum(1) < 4
    assert torch.equal(both.isnan(), few)
    torch.testing.assert_close(both[~few], total[~few], rtol=1e-9, atol=1e-9)


@given(rewards_and_latents())
def test_unbiased_covariance_is_numpy_s_over_k_minus_1(pair):
    rewards, x = pair[0].clone(), pair[1]
    rewards[:, 0], rewards[:, 1] = -1.5, 2.5
    count = torch.isfinite(rewards).sum(1).reshape(-1, *[1] * (x.ndim - 2))
    expected = torch.from_numpy(numpy_covariance(rewards.numpy(), x.numpy())) * count / (count - 1)
    torch.testing.assert_close(unbiased_covariance(rewards, x), expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(unbiased_covariance(torch.ones_like(rewards) / 3, x), torch.zeros_like(expected))


@given(seeds, st.floats(0.01, 100), st.floats(-5, 5), st.floats(0.01, 100), st.floats(-5, 5))
def test_the_fraction_is_free_of_units_and_within_0_and_1(seed, a, b, scale, shift):
    rewards, x = normal(4, 7, seed=seed), normal(4, 7, 3, seed=seed + 1)
    rho = signal_fraction(rewards, x)
    assert bool(((rho >= 0) & (rho <= 1)).all())
    torch.testing.assert_close(signal_fraction(a * rewards + b, scale * x + shift), rho, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(signal_fraction(-rewards, x), rho)
    energy = signal_energy(rewards, x)
    torch.testing.assert_close(signal_energy(a * rewards, scale * x), a**2 * scale**2 * energy, rtol=1e-6, atol=1e-6)
    total = unbiased_covariance(rewards, x).square().sum(1)
    torch.testing.assert_close(rho, (energy / total).clamp(0, 1))
    assert torch.equal(signal_weight(rewards, x), rho)
    assert torch.equal(signal_weight(rewards, x, pairings=1), signal_fraction(rewards, x, pairings=1))


def test_small_groups_get_the_pooled_fraction_and_dead_ones_none():
    rewards, x = linear(6, 8, 4, seed=3)
    rewards = rewards.clone()
    rewards[3, 3:], rewards[4] = NAN, 1.0  # three finite rewards; dead
    rewards[5, 2:], rewards[5, :2] = NAN, 0.25  # two, equal: dead too
    rho = signal_fraction(rewards, x)
    able = slice(0, 3)
    total = unbiased_covariance(rewards, x).square().sum(1)
    pooled = float(signal_energy(rewards, x)[able].sum() / total[able].sum())
    assert 0 < pooled < 1
    assert float(rho[3]) == pytest.approx(pooled)
    assert rho[4:].tolist() == [0, 0]
    assert signal_fraction(rewards[3:], x[3:]).tolist() == [1, 0, 0]  # nobody can tell
    assert signal_fraction(rewards[:0], x[:0]).shape == (0,)
    worse = signal_fraction(torch.cat([-rewards[:3].roll(1, 0), rewards[3:4]]), x[:4])
    assert 0 <= float(worse[3]) <= 1


def test_pairings_are_pure_and_seeded_with_0_by_default():
    (rewards, x), state = linear(3), torch.get_rng_state()
    for function in (signal_energy, noise_energy, signal_fraction):
        first = function(rewards, x)
        assert torch.equal(function(rewards, x), first)
        assert torch.equal(function(rewards, x, generator=torch.Generator().manual_seed(0)), first)
        assert not torch.equal(function(rewards, x, generator=torch.Generator().manual_seed(1)), first)
        assert not torch.equal(function(rewards, x, pairings=5), first)
    assert torch.equal(torch.get_rng_state(), state)


# ---- shrunk directions -----------------------------------------------------------------------------------------------


@given(rewards_and_latents(), st.floats(0.1, 10))
def test_a_scaled_direction_is_rho_times_g(pair, scale):
    rewards, x = pair
    got, base = shrink_scale(rewards, x, scale=scale), aggregate_direction(rewards, x, scale=scale)
    assert torch.equal(got.alive, base.alive)
    rho = signal_fraction(rewards, x).reshape(-1, *[1] * (x.ndim - 2))
    torch.testing.assert_close(got.value, rho * base.value)
    one = shrink_scale(rewards, x, pairings=1).value
    rho = signal_fraction(rewards, x, pairings=1).reshape(rho.shape)
    torch.testing.assert_close(one, rho * aggregate_direction(rewards, x).value)


def shrunk_by_loops(rewards, x, centre):
    """(1 - lam) Chat + lam M at RMS 1, group by group."""
    covariance, noise = unbiased_covariance(rewards, x), noise_energy(rewards, x)
    out = []
    for c, m, n in zip(covariance, centre, noise.tolist()):
        lam = min(1.0, max(0.0, n / float(((c - m) ** 2).sum())))
        posterior = (1 - lam) * c + lam * m
        out.append(posterior / posterior.square().mean().sqrt())
    return torch.stack(out)


@given(seeds)
def test_shrinking_moves_the_covariance_towards_the_centre_by_its_noise(seed):
    rewards, x = normal(4, 8, seed=seed), normal(4, 8, 2, 3, seed=seed + 1)
    running = 0.3 * normal(4, 2, 3, seed=seed + 2)
    got = shrink_toward(rewards, x, running, scale=2.0)
    torch.testing.assert_close(got.value, 2 * shrunk_by_loops(rewards, x, running), rtol=1e-6, atol=1e-6)
    mean = unbiased_covariance(rewards, x).mean(0, keepdim=True).expand(4, 2, 3)
    batch = shrink_toward_batch(rewards, x)
    torch.testing.assert_close(batch.value, shrunk_by_loops(rewards, x, mean), rtol=1e-6, atol=1e-6)
    assert bool(batch.alive.all())
    torch.testing.assert_close(rms(batch.value), torch.ones(4, dtype=F64))


def test_shrinking_draws_as_many_pairings_as_it_is_told():
    (rewards, x), running = linear(4, 8, 6), 0.3 * normal(4, 6)
    for shrink in (shrink_toward_batch, partial(shrink_toward, running=running)):
        assert not torch.equal(shrink(rewards, x, pairings=1).value, shrink(rewards, x).value)
        assert torch.equal(shrink(rewards, x, pairings=4).value, shrink(rewards, x).value)


def test_the_centre_of_the_batch_is_that_of_its_alive_groups():
    x = normal(5, 30, 6, seed=1)
    rewards = torch.stack([x[i, :, i] for i in range(5)])  # each prompt pulls its own way, so that 0 < lam < 1
    rewards[1], rewards[3] = 0.5, NAN
    got, alone = shrink_toward_batch(rewards, x), [0, 2, 4]
    assert got.alive.tolist() == [True, False, True, False, True]
    assert torch.equal(got.value[[1, 3]], torch.zeros(2, 6, dtype=F64))
    mean = unbiased_covariance(rewards, x)[alone].mean(0, keepdim=True).expand(5, 6)
    torch.testing.assert_close(got.value[alone], shrunk_by_loops(rewards, x, mean)[alone])
    single = shrink_toward_batch(rewards[:2], x[:2])
    torch.testing.assert_close(single.value, aggregate_direction(rewards[:2], x[:2]).value)
    assert not shrink_toward_batch(rewards[[1, 3]], x[[1, 3]]).alive.any()


def test_shrinking_towards_zero_and_towards_itself_changes_nothing():
    rewards, x = linear(40, 8, 6)
    base = aggregate_direction(rewards, x)
    itself = shrink_toward(rewards, x, unbiased_covariance(rewards, x))
    torch.testing.assert_close(itself.value, base.value)
    zero = shrink_toward(rewards, x, torch.zeros(40, 6, dtype=F64))
    assert torch.equal(zero.alive, signal_energy(rewards, x) > 0)  # all noise: nothing is left
    assert 0 < int(zero.alive.sum()) < 40
    torch.testing.assert_close(zero.value[zero.alive], base.value[zero.alive])
    assert torch.equal(zero.value[~zero.alive], torch.zeros_like(zero.value[~zero.alive]))


def test_two_samples_shrink_by_the_pooled_noise():
    rewards, x = linear(3, 8, 5, seed=2)
    rewards = rewards.clone()
    rewards[0, 2:] = NAN
    running = normal(3, 5)
    c, rho = unbiased_covariance(rewards, x)[0], float(signal_fraction(rewards, x)[0])
    assert 0 < rho < 1
    lam = min(1.0, (1 - rho) * float(c.square().sum() / (c - running[0]).square().sum()))
    posterior = (1 - lam) * c + lam * running[0]
    got = shrink_toward(rewards, x, running).value[0]
    torch.testing.assert_close(got, posterior / posterior.square().mean().sqrt())


def test_prompts_that_agree_lend_each_other_samples_and_others_lose():
    def quality(direction, same: bool) -> float:
        x = normal(60, 8, 8, 32, seed=5)
        a = normalize(normal(60, 1 if same else 8, 32, seed=6), dim=2).expand(60, 8, 32)
        rewards = torch.einsum("ngkd,ngd->ngk", x, a)
        values = torch.stack([direction(r, y).value for r, y in zip(rewards, x)])
        return float(cosine_similarity(values, a, dim=2).mean())

    plain = quality(aggregate_direction, True)
    assert plain == pytest.approx(((8 - 1) / (8 + 32 - 2)) ** 0.5, abs=0.02)
    assert quality(shrink_toward_batch, True) == pytest.approx(0.78, abs=0.03)
    assert quality(shrink_toward_batch, False) == pytest.approx(0.23, abs=0.03)


# ---- spread ----------------------------------------------------------------------------------------------------------


@given(rewards_and_latents(), st.floats(0.1, 10))
def test_batch_rms_divides_all_groups_by_one_number(pair, scale):
    rewards, x = pair
    got, c = batch_rms(rewards, x, scale=scale), reward_covariance(rewards, x)
    alive = aggregate_direction(rewards, x).alive
    assert torch.equal(got.alive, alive)
    assert torch.equal(got.value[~alive], torch.zeros_like(c[~alive]))
    if bool(alive.any()):
        common = rms(c.reshape(len(c), -1))[alive].square().mean().sqrt()
        torch.testing.assert_close(got.value[alive], scale * c[alive] / common, rtol=1e-9, atol=1e-12)
        size = rms(got.value.reshape(len(c), -1))[alive].square().mean()
        assert float(size) == pytest.approx(scale**2)


def test_a_saturating_group_fades_into_a_dead_one():
    rewards, x = normal(3, 6), normal(3, 6, 4, seed=1)
    sizes = []
    for spread in (1.0, 1e-2, 1e-4, 0.0):
        fading = torch.cat([rewards[:2], spread * rewards[2:]])
        got = batch_rms(fading, x)
        sizes.append(float(rms(got.value)[2]))
        assert got.alive.tolist() == [True, True, spread > 0]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] == pytest.approx(1e2 * sizes[2], rel=1e-3)
    assert sizes[3] == 0
    torch.testing.assert_close(batch_rms(5 * rewards + 1, x).value, batch_rms(rewards, x).value)


@given(rewards_and_latents())
def test_spread_weight_is_numpy_s_std_against_its_median(pair):
    rewards, x = pair
    alive = ~dead_groups(rewards).numpy()
    std = np.array([row[np.isfinite(row)].std() if a else 0.0 for row, a in zip(rewards.numpy(), alive)])
    got = spread_weight(rewards)
    if alive.any():
        np.testing.assert_allclose(got, std / (std + np.median(std[alive])), rtol=1e-12)
    assert bool((got[torch.from_numpy(~alive)] == 0).all())
    np.testing.assert_allclose(spread_weight(rewards, x, typical=0.5), std / (std + 0.5), rtol=1e-12)
    assert bool(((got >= 0) & (got < 1)).all())
    torch.testing.assert_close(spread_weight(7 * rewards - 3), got)  # the median scales along


# ---- noise levels ----------------------------------------------------------------------------------------------------


@given(rewards_and_latents(), st.permutations([0, 1, 0, 2, 1]), st.integers(1, 5))
def test_binned_covariance_is_the_loop(pair, bins, steps):
    rewards, x = pair[0].clone(), pair[1].clone()
    rewards[:, 0], rewards[:, 1] = -1.5, 2.5
    bins = [sorted(set(bins[:steps])).index(b) for b in bins[:steps]]
    predicted = normal(*rewards.shape, steps, *x.shape[2:], seed=steps)
    missing = ~torch.isfinite(rewards)
    x[missing], predicted[missing] = NAN, INF
    got = binned_covariance(rewards, x, predicted, bins)
    for group, row in enumerate(rewards):
        kept = torch.isfinite(row).nonzero().flatten().tolist()
        mean = sum(float(row[i]) for i in kept) / len(kept)
        for b in range(max(bins) + 1):
            mine = [n for n in range(steps) if bins[n] == b]
            terms = [(float(row[i]) - mean) * (x[group, i] - predicted[group, i, n]) for i in kept for n in mine]
            torch.testing.assert_close(got[group, b], sum(terms) / len(terms), rtol=1e-9, atol=1e-12)


@given(rewards_and_latents())
def test_at_pure_noise_the_state_says_nothing_and_c_is_left(pair):
    rewards, x = pair
    predicted = normal(len(x), 1, 2, *x.shape[2:], seed=1).expand(*x.shape[:2], 2, *x.shape[2:])
    got = binned_covariance(rewards, x, predicted, [0, 1])
    for b in range(2):
        torch.testing.assert_close(got[:, b], reward_covariance(rewards, x), rtol=1e-9, atol=1e-9)


def within(values: torch.Tensor, expected: torch.Tensor, errors: float = 5.0) -> bool:
    """Mean of independent rows " n d" within so many standard errors of `expected` in every coordinate."""
    return bool(((values.mean(0) - expected).abs() < errors * values.std(0) / len(values) ** 0.5 + 1e-12).all())


def gaussian_bins(times, k: int = 20_000, variance: float = 0.49):
    """(rewards, x_0, predicted, expected " s d") of R = a.x_0, x_0 ~ N(m, S^2 I), with the exact velocity."""
    a, m = torch.tensor([1.0, -2.0, 0.5], dtype=F64), torch.tensor([0.3, 0.0, -1.0], dtype=F64)
    x = m + variance**0.5 * normal(k, 3, seed=1)
    guesses, expected = [], []
    for i, t in enumerate(times):
        s = interpolate(x, normal(k, 3, seed=10 + i), t)
        total = (1 - t) ** 2 * variance + t**2
        mean = m + (1 - t) * variance / total * (s - (1 - t) * m)
        guesses.append(predict_x_0(s, (s - mean) / t, t))
        expected.append(a * variance * t**2 / total)  # t |Cov(R, u|s)|
    return (x @ a)[None], x[None], torch.stack(guesses, 1)[None], torch.stack(expected)


def test_the_gaussian_s_within_state_covariance():
    times = (1.0, 0.8, 0.5, 0.2)
    rewards, x, predicted, expected = gaussian_bins(times)
    got = binned_covariance(rewards, x, predicted, range(4))[0]
    for b in range(4):
        terms = (rewards[0] - rewards.mean())[:, None] * (x[0] - predicted[0, :, b])
        torch.testing.assert_close(got[b], terms.mean(0))
        assert within(terms, expected[b])
    assert rms(got)[0] > 1.3 * rms(got)[2] > 3 * rms(got)[3]
    joined = binned_covariance(rewards, x, predicted, [0, 0, 1, 1])[0]
    torch.testing.assert_close(joined, got.reshape(2, 2, 3).mean(1))


@pytest.mark.parametrize("t", [1.0, 0.6, 0.3])
def test_the_within_state_covariance_of_a_world_of_atoms(t):
    world, k = atoms(), 20_000
    which = torch.multinomial(world.prior, k, replacement=True, generator=torch.Generator().manual_seed(2))
    x, rewards = world.x[which], world.reward[which]
    s = interpolate(x, normal(k, 3, seed=3), t)
    _, v, g = conditional_moments(world, s, t)
    predicted = predict_x_0(s, v, t)
    inside = -t * g  # Cov(r, x_0|s), as Cov(r, u|s) = -Cov(r, x_0|s)/t
    got = binned_covariance(rewards[None], x[None], predicted[None, :, None], [0])[0, 0]
    terms = (rewards - rewards.mean())[:, None] * (x - predicted)
    torch.testing.assert_close(got, terms.mean(0))
    assert within(terms - inside, torch.zeros(3, dtype=F64))
    whole = reward_covariance(rewards[None], x[None])[0]
    assert within(terms, whole) == (t == 1.0)  # elsewhere C is another thing


def test_binned_directions_share_one_rms_or_have_one_each():
    times = torch.tensor([1.0, 0.8, 0.5, 0.2], dtype=F64)[:, None]
    rewards, x, predicted, _ = gaussian_bins(times.flatten().tolist(), k=64)
    c = binned_covariance(rewards, x, predicted, [0, 0, 1, 2])
    joint = binned_direction(rewards, x, predicted, [0, 0, 1, 2], scale=3.0)
    torch.testing.assert_close(joint.value, 3 * c / c.square().mean().sqrt())
    torch.testing.assert_close(joint.value, 3 * joint_rms(c))
    each = binned_direction(rewards, x, predicted, [0, 0, 1, 2], normalise=bin_rms).value
    torch.testing.assert_close(each, c / c.square().mean(2, keepdim=True).sqrt())
    torch.testing.assert_close(each, bin_rms(c))
    tilt = binned_direction(rewards, x, predicted, range(4), normalise=lambda c: joint_rms(c / times)).value[0]
    exact = joint_rms(binned_covariance(rewards, x, predicted, range(4)) / times)[0]
    torch.testing.assert_close(tilt, exact)
    assert torch.equal(joint_rms(torch.zeros(1, 2, 3)), torch.zeros(1, 2, 3))
    assert bin_rms(torch.tensor([[0.0, -2.0]])).tolist() == [[0.0, -1.0]]  # latents of one number


def test_bins_without_a_word_are_zero_and_dead_groups_too():
    rewards, x = normal(4, 6), normal(4, 6, 3, seed=1)
    rewards[1], rewards[2, 1:] = 2.0, NAN
    predicted = torch.stack([x, torch.zeros_like(x)], 2)  # the first step knows x_0: nothing is left but rounding
    predicted[:, :, 0] += 1e-12 * normal(4, 6, 3, seed=2)
    predicted[3, :, 1] = x[3]
    for normalise in (joint_rms, bin_rms):
        got = binned_direction(rewards, x, predicted, [0, 1], normalise=normalise)
        assert got.alive.tolist() == [True, False, False, False]
        assert torch.equal(got.value[1:], torch.zeros(3, 2, 3, dtype=F64))
        assert torch.equal(got.value[0, 0], torch.zeros(3, dtype=F64))
        assert float(got.value[0, 1].abs().sum()) > 0
    assert not binned_direction(rewards[:0], x[:0], predicted[:0], [0, 1]).alive.any()


# ---- dtypes and refusals ---------------------------------------------------------------------------------------------


def results(rewards, x):
    """One tensor of every function."""
    predicted = torch.stack([0.5 * x, 0 * x], 2)
    return [
        *(f(rewards, x).value for f in DIRECTIONS.values()),
        *(f(rewards, x) for f in (unbiased_covariance, signal_fraction, signal_weight, spread_weight)),
        shrink_toward(rewards, x, torch.zeros_like(x[:, 0])).value,
        binned_covariance(rewards, x, predicted, [0, 1]),
        binned_direction(rewards, x, predicted, [0, 1]).value,
        *(f(x) for f in (joint_rms, bin_rms)),
    ]


def test_results_are_float32_or_better_detached_and_float64_stays():
    rewards, x = normal(2, 6), normal(2, 6, 5, seed=1)
    for dtype in (torch.bfloat16, torch.float32):
        assert {r.dtype for r in results(rewards.to(dtype), x.to(dtype))} == {torch.float32}
    assert {r.dtype for r in results(rewards, x)} == {F64}
    assert not any(r.requires_grad for r in results(rewards.clone().requires_grad_(), x.clone().requires_grad_()))
    tiny = signal_energy(1e-25 * rewards.float(), x.float())
    assert tiny.dtype == F64
    torch.testing.assert_close(1e50 * tiny, signal_energy(rewards.float(), x.float()), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "function", [*DIRECTIONS.values(), unbiased_covariance, signal_energy, noise_energy, signal_fraction, signal_weight]
)
def test_directions_and_energies_refuse(function):
    rewards = torch.rand(2, 4)
    with refuses("rewards (2, 4)", "x_0 (2, 5, 3)"):
        function(rewards, torch.zeros(2, 5, 3))
    with refuses("rewards must be (g, k)", "(8,)"):
        function(torch.rand(8), torch.zeros(8, 3))
    bad = torch.zeros(2, 4, 3)
    bad[1, 2, 0] = NAN
    with refuses("x_0 is not finite", "[1, 2]"):
        function(rewards, bad)


def test_options_are_refused():
    rewards, x = torch.rand(2, 4), torch.rand(2, 4, 3)
    for pairings in (0, 1.5, True):
        for function in (
            signal_energy,
            noise_energy,
            signal_fraction,
            signal_weight,
            shrink_scale,
            shrink_toward_batch,
        ):
            with refuses("pairings", pairings):
                function(rewards, x, pairings=pairings)
    for function in (*DIRECTIONS.values(), partial(shrink_toward, running=x[:, 0])):
        with refuses("scale", INF):
            function(rewards, x, scale=INF)
    with refuses("running must be (g, *d)", "(1, 3)"):
        shrink_toward(rewards, x, torch.zeros(1, 3))
    with refuses("running is not finite", "[1, 0]"):
        shrink_toward(rewards, x, torch.tensor([[0.0, 0.0, 0.0], [NAN, 0.0, 0.0]]))
    for typical in (0.0, -1.0, NAN):
        with refuses("typical", typical):
            spread_weight(rewards, typical=typical)
    with refuses("rewards must be (g, k)", "(4,)"):
        spread_weight(rewards[0])


@pytest.mark.parametrize("function", [binned_covariance, binned_direction])
def test_bins_are_refused(function):
    rewards, x, predicted = torch.rand(2, 4), torch.rand(2, 4, 3), torch.rand(2, 4, 2, 3)
    for bins in ([0], [0, 0, 1], [0, 2], [1, 1], []):
        with refuses("bins", bins, "2 steps"):
            function(rewards, x, predicted, bins)
    for bins, value in (([0, -1], -1), ([0, 0.5], 0.5)):
        with refuses("a bin", value):
            function(rewards, x, predicted, bins)
    for wrong in (torch.rand(2, 4, 3), torch.rand(2, 4, 2, 4), torch.rand(2, 3, 2, 3)):
        with refuses("predicted", tuple(wrong.shape), "x_0 (2, 4, 3)"):
            function(rewards, x, wrong, [0, 1])
    with refuses("rewards (2, 4)", "x_0 (2, 5, 3)"):
        function(rewards, torch.rand(2, 5, 3), predicted, [0, 1])
    predicted[1, 2, 0, 1] = INF
    with refuses("predicted is not finite", "[1, 2]"):
        function(rewards, x, predicted, [0, 1])
    for normalise in (joint_rms, bin_rms):
        with refuses("covariance", "(3,)"):
            normalise(torch.zeros(3))
    with refuses("normalise", "(2, 2, 3)", "(2, 2)"):
        binned_direction(rewards, x, torch.rand(2, 4, 2, 3), [0, 1], normalise=lambda c: c.mean(2))
    with refuses("scale", NAN):
        binned_direction(rewards, x, torch.rand(2, 4, 2, 3), [0, 1], scale=NAN)


# ---- negative control ------------------------------------------------------------------------------------------------


def test_control_biased_energies_and_predictions_on_the_path_are_told_apart():
    rewards, x = linear(4000)
    total = unbiased_covariance(rewards, x).square().sum(1)  # without taking the noise away: 24/7
    assert abs(float(total.mean()) - 1) > 20 * float(total.std()) / 4000**0.5
    rewards, x, _, expected = gaussian_bins((0.5,))
    perfect = rewards[0][:, None] * (x[0] - x[0])  # a prediction that knows x_0, as on an ODE path
    assert not within(perfect, expected[0])
    uncentred = (rewards[0] + 1)[:, None] * x[0]
    assert not within(uncentred, expected[0])
    assert unbiased_hsic(normal(6), normal(6, 2, seed=1)) != pytest.approx(
        unbiased_hsic(normal(6), normal(6, 2, seed=2))
    )
