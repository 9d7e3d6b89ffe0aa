"""Per-sample losses against closed forms, brute force and autograd; `masked_mean` as the only reduction."""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import F64, normal, refuses
from strategies import pairs_of_latents, seeds

from diffrl.losses import (
    advantage_weighted_matching,
    clipped_ratio,
    flat_weight,
    guard_clipped_ratio,
    inverse_abs_error,
    masked_mean,
    nft,
    nft_negative,
    nft_positive,
    velocity_matching,
)
from diffrl.sampling import flow_sde_step, interpolate, latent_mean, transition_log_prob

NAN, INF = math.nan, math.inf
NFT = {"both": nft, "positive": nft_positive, "negative": nft_negative}


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=F64)


# ---- velocity matching ------------------------------------------------------------------------------------------------


@given(pairs_of_latents())
def test_velocity_matching_is_the_mean_squared_error_of_each_row(pair):
    v, target = pair
    expected = ((v - target).numpy().reshape(len(v), -1) ** 2).mean(1)
    np.testing.assert_allclose(velocity_matching(v, target), expected, rtol=1e-12)
    order = list(range(len(v)))[::-1]
    assert torch.equal(velocity_matching(v[order], target[order]), velocity_matching(v, target)[order])


def test_velocity_matching_gradient_and_refusals():
    v = normal(2, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: velocity_matching(x, normal(2, 3, seed=1)), v)
    with refuses("v (2, 3)", "target (1, 3)"):
        velocity_matching(v, torch.zeros(1, 3))
    with refuses("target", "int64"):
        velocity_matching(v, torch.zeros(2, 3, dtype=torch.long))


# ---- DiffusionNFT -----------------------------------------------------------------------------------------------------


def golden_nft(function, beta: float, weight) -> float:
    x_0, eps = row(1, 0), row(0, 1)
    x_t, r = interpolate(x_0, eps, 0.5), torch.tensor([0.8], dtype=F64)
    return float(function(row(0.5, -0.5), row(0.2, 0.1), x_t, x_0, 0.5, r, beta=beta, weight=weight))


def test_golden_nft():
    both = {beta: [golden_nft(nft, beta, w) for w in (inverse_abs_error, flat_weight)] for beta in (1.0, 0.1)}
    assert both[1.0] == pytest.approx([0.6750, 0.4725], abs=5.1e-5)
    assert both[0.1] == pytest.approx([5.4787, 2.9531], abs=5.1e-5)
    assert golden_nft(nft_positive, 1.0, inverse_abs_error) == pytest.approx(0.6, abs=5.1e-5)
    assert golden_nft(nft_positive, 0.1, inverse_abs_error) == pytest.approx(4.4466, abs=5.1e-5)


def nft_by_hand(v, v_old, x_t, x_0, t, r, beta, published: bool) -> tuple[np.ndarray, np.ndarray]:
    """(r L+/beta, (1 - r) L-/beta) by numpy loops."""
    out = np.zeros((2, len(v)))
    for i in range(len(v)):
        for sign in (1, -1):
            branch = v_old[i] + sign * beta * (v[i] - v_old[i])
            error = x_t[i] - t[i] * branch - x_0[i]
            loss = np.mean(error**2) / (max(np.mean(np.abs(error)), 1e-5) if published else 1)
            out[0 if sign > 0 else 1, i] = (r[i] if sign > 0 else 1 - r[i]) * loss / beta
    return out[0], out[1]


@pytest.mark.parametrize("published", [True, False])
@given(pair=pairs_of_latents(), other=seeds, beta=st.floats(0.05, 2), data=st.data())
def test_nft_by_brute_force_and_its_branches_add_up(published, pair, other, beta, data):
    v, v_old = pair
    b = len(v)
    x_t, x_0 = normal(*v.shape, seed=other), normal(*v.shape, seed=other + 1)
    t = torch.tensor(data.draw(st.lists(st.floats(0, 1), min_size=b, max_size=b)), dtype=F64)
    r = torch.tensor(data.draw(st.lists(st.floats(0, 1), min_size=b, max_size=b)), dtype=F64)
    weight = inverse_abs_error if published else flat_weight
    plus, minus = nft_by_hand(*(x.numpy() for x in (v, v_old, x_t, x_0, t, r)), beta, published)
    args, settings = (v, v_old, x_t, x_0, t, r), {"beta": beta, "weight": weight}
    np.testing.assert_allclose(nft_positive(*args, **settings), plus, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(nft_negative(*args, **settings), minus, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(nft(*args, **settings), plus + minus, rtol=1e-9, atol=1e-12)
    swapped = nft(2 * v_old - v, v_old, x_t, x_0, t, 1 - r, **settings)  # mirrored velocity, mirrored optimality
    torch.testing.assert_close(swapped, nft(*args, **settings), rtol=1e-9, atol=1e-12)


@given(pairs_of_latents())
def test_weights_are_one_per_row_detached_and_bounded(pair):
    error = pair[0].requires_grad_()
    weight = inverse_abs_error(error)
    assert not weight.requires_grad
    assert weight.shape == (len(error), *[1] * (error.ndim - 1))
    size = np.abs(error.detach().numpy().reshape(len(error), -1)).mean(1)
    np.testing.assert_allclose(weight.flatten(), 1 / np.maximum(size, 1e-5), rtol=1e-12)
    assert inverse_abs_error(0 * error).flatten().tolist() == pytest.approx([1e5] * len(error))
    assert torch.equal(flat_weight(error), torch.ones_like(weight))


@pytest.mark.parametrize("name", NFT)
def test_nft_moves_v_alone_with_the_weight_held_fixed(name):
    v, v_old, x_t, x_0 = (normal(2, 3, seed=i).requires_grad_() for i in range(4))
    r, t = torch.tensor([0.3, 0.8], dtype=F64), torch.tensor([0.5, 0.9], dtype=F64)
    NFT[name](v, v_old, x_t, x_0, t, r, beta=0.5).sum().backward()
    assert v_old.grad is None
    d, side = (v - v_old).detach(), {"both": (1, -1), "positive": (1,), "negative": (-1,)}[name]
    expected = torch.zeros_like(d)
    for sign in side:
        e = (x_t - t[:, None] * (v_old + sign * 0.5 * d) - x_0).detach()
        w = 1 / e.abs().mean(1, keepdim=True)
        share = (r if sign > 0 else 1 - r)[:, None]
        expected += share * w * 2 * e * (-sign * 0.5 * t[:, None]) / 3 / 0.5
    torch.testing.assert_close(v.grad, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NFT)
def test_nft_refuses(name):
    x, r = torch.zeros(2, 3), torch.full((2,), 0.5)
    go = functools.partial(NFT[name], x, x, x, x)
    for bad in (1.5, -0.25, NAN):
        with refuses("r must be in [0, 1]", bad):
            go(0.5, torch.tensor([0.5, bad]))
    for beta in (0.0, -1.0, INF):
        with refuses("beta", beta):
            go(0.5, r, beta=beta)
    with refuses("t must be in [0, 1]", "1.5"):
        go(1.5, r)
    with refuses("r must have shape (2,)", "(3,)"):
        go(0.5, torch.zeros(3))
    with refuses("v (2, 3)", "x_0 (2, 1)"):
        NFT[name](x, x, x, torch.zeros(2, 1), 0.5, r)


@pytest.mark.parametrize("name", NFT)
def test_nft_takes_any_weight_that_broadcasts_to_the_error(name):
    v, v_old, x_t, x_0 = (normal(2, 3, 4, seed=i) for i in range(4))
    r, extra = torch.tensor([0.3, 0.8], dtype=F64), normal(2, 3, 4, seed=9).abs()
    for shape in ((2, 3, 4), (2, 1, 4), (1, 3, 1), (1, 1, 1), (2, 1, 1)):
        w = extra[: shape[0], : shape[1], : shape[2]]
        got = NFT[name](v, v_old, x_t, x_0, 0.5, r, beta=0.5, weight=lambda e, w=w: w)
        full = NFT[name](v, v_old, x_t, x_0, 0.5, r, beta=0.5, weight=lambda e, w=w: w.expand_as(e))
        torch.testing.assert_close(got, full, rtol=1e-12, atol=1e-12)
    w = normal(2, 1, 1, seed=5).requires_grad_()  # a learned weight may carry gradient
    NFT[name](v, v_old, x_t, x_0, 0.5, r, weight=lambda e: w).sum().backward()
    assert bool((w.grad != 0).all())


@pytest.mark.parametrize("name", NFT)
def test_nft_refuses_a_weight_that_would_meet_other_axes(name):
    # b = 3 rows of 3 latents: a " b" weight broadcasts to the error, along the wrong axis, and nothing else would tell
    x, r = normal(3, 3), torch.full((3,), 0.5, dtype=F64)
    per_row = torch.tensor([1.0, 2.0, 3.0], dtype=F64)
    square = x**2
    assert not torch.allclose((per_row * square).mean(1), (per_row[:, None] * square).mean(1))  # negative control
    go = functools.partial(NFT[name], x, 0 * x, 0 * x, 0 * x, 1.0, r)
    with refuses("weight (3,)", "error (3, 3)"):
        go(weight=lambda e: per_row)
    with refuses("weight (3, 1, 1)", "error (3, 3)"):
        go(weight=lambda e: per_row[:, None, None])
    with refuses("weight (3, 2)", "error (3, 3)"):
        go(weight=lambda e: e[:, :2])
    doubled = 2 * go(weight=lambda e: torch.ones_like(e))
    for number in (2.0, torch.tensor(2.0)):
        torch.testing.assert_close(go(weight=lambda e, n=number: n), doubled, rtol=1e-12, atol=0)
    share = {"both": 1.0, "positive": 0.5, "negative": 0.5}[name]  # here both branches have the error +-x
    expected = share * latent_mean(per_row[:, None] * square)
    torch.testing.assert_close(go(weight=lambda e: per_row[:, None]), expected, rtol=1e-12, atol=1e-12)


# ---- likelihood ratios ------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(-0.2, 0.2), st.floats(-3, 3)), min_size=1, max_size=6), st.floats(1e-4, 0.1))
def test_clipped_ratio_is_ppo_s_loss(rows, clip):
    log_ratio, a = (torch.tensor(column, dtype=F64) for column in zip(*rows))
    old = normal(len(rows))
    expected = [max(-y * math.exp(x), -y * min(max(math.exp(x), 1 - clip), 1 + clip)) for x, y in rows]
    got = clipped_ratio(old + log_ratio, old, a, clip=clip)
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)
    assert bool((got >= -a * torch.exp(log_ratio) - 1e-12).all())  # never below the unclipped loss


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-0.1, -0.005, 0.0, 0.005, 0.1])
def test_the_clip_removes_gradients_on_one_side_only(advantage, log_ratio):
    # The clip fraction counted the wrong side; at ratio 1 nothing is clipped. https://github.com/huggingface/trl/issues/3144
    # "The ratio is always 1, is it training?": the gradient there is -A. https://github.com/yifan123/flow_grpo/issues/131
    log_prob = torch.tensor([log_ratio], dtype=F64, requires_grad=True)
    clipped_ratio(log_prob, torch.zeros(1, dtype=F64), torch.tensor([advantage], dtype=F64), clip=0.01).backward()
    clipped = advantage * log_ratio > 0.05
    expected = 0.0 if clipped else -advantage * math.exp(log_ratio)
    assert float(log_prob.grad) == pytest.approx(expected, abs=1e-12)


def test_old_log_probs_and_advantages_carry_no_gradient():
    lp, old, a = (normal(3, seed=i).requires_grad_() for i in range(3))
    clipped_ratio(lp, old, a, clip=10.0).sum().backward()
    assert lp.grad is not None
    assert old.grad is None
    assert a.grad is None


def test_clipped_ratio_refuses():
    x = torch.zeros(2)
    for clip in (0.0, -1e-4, NAN):
        with refuses("clip", clip):
            clipped_ratio(x, x, x, clip=clip)
    with refuses("log_prob (2,)", "advantages (3,)"):
        clipped_ratio(x, x, torch.zeros(3))
    with refuses("log_prob", "(2, 1)"):
        clipped_ratio(x[:, None], x[:, None], x[:, None])


LOG_RATIOS = [0.0, 0.5, -0.5, 800.0, -800.0, 1e30, INF, -INF, NAN]


def ratio_losses(log_ratio: torch.Tensor, advantages: torch.Tensor, clip: float) -> dict:
    """clipped_ratio and the guard (equal means, std 1: the same ratio) with the gradients of their log-probs."""
    b, out = len(log_ratio), {}
    x, one = torch.zeros(b, 3, dtype=log_ratio.dtype), torch.ones(b, dtype=log_ratio.dtype)
    for name in ("plain", "guard"):
        lp, old = log_ratio.clone().requires_grad_(), torch.zeros_like(log_ratio)
        if name == "plain":
            loss = clipped_ratio(lp, old, advantages, clip=clip)
        else:
            loss = guard_clipped_ratio(lp, old, x, x, one, advantages, clip=clip)
        (gradient,) = torch.autograd.grad(loss.sum(), lp)
        out[name] = loss.detach(), gradient
    return out


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", ["plain", "guard"])
def test_a_row_of_advantage_0_has_loss_and_gradient_0_whatever_its_ratio(name, dtype):
    log_ratio = torch.tensor(LOG_RATIOS, dtype=dtype)
    loss, gradient = ratio_losses(log_ratio, torch.zeros_like(log_ratio), 0.1)[name]
    assert loss.tolist() == [0] * len(LOG_RATIOS)
    assert gradient.tolist() == [0] * len(LOG_RATIOS)
    # negative control: the product alone is nan there, in value and in gradient
    lp = log_ratio[3:4].clone().requires_grad_()
    naive = -0.0 * torch.exp(lp)
    naive.sum().backward()
    assert naive.isnan().all()
    assert lp.grad.isnan().all()


def test_a_row_of_advantage_0_leaves_its_neighbours_alone():
    log_ratio = torch.tensor([0.02, 800.0, -0.02, 0.3, 0.3, -800.0], dtype=F64)
    advantages = torch.tensor([1.0, 0.0, -2.0, 1.0, -1.0, 1.5], dtype=F64)
    for loss, gradient in ratio_losses(log_ratio, advantages, 0.1).values():
        rho = log_ratio.exp()
        expected = torch.maximum(-advantages * rho, -advantages * rho.clamp(0.9, 1.1))
        expected[1] = 0
        torch.testing.assert_close(loss, expected, rtol=1e-15, atol=0)
        slope = -advantages * rho * torch.tensor([1.0, 0, 1, 0, 1, 1])
        slope[1] = 0
        torch.testing.assert_close(gradient, slope, rtol=1e-12, atol=0)


@pytest.mark.parametrize("clip", [1e-4, 0.2, 10.0, 1e9])
def test_a_ratio_that_overflows(clip):
    log_ratio = torch.tensor([800.0, 800.0, -800.0], dtype=F64)
    for loss, gradient in ratio_losses(log_ratio, torch.tensor([2.0, -2.0, -2.0], dtype=F64), clip).values():
        # A > 0: the clip bounds the loss and removes its gradient; A < 0: an unbounded loss is what PPO defines
        assert loss.tolist() == [-2 * (1 + clip), INF, pytest.approx(2 * max(1 - clip, 0))]
        assert float(gradient[0]) == 0


def test_advantage_weighted_matching_of_a_row_without_advantage():
    v, v_old, noise, x_0 = (normal(2, 3, seed=i) for i in range(4))
    v = torch.cat([v[:1], 1e3 * v[1:]]).requires_grad_()
    loss = advantage_weighted_matching(v, 1e4 * v_old, noise, x_0, torch.tensor([0.0, 0.0], dtype=F64))
    loss.sum().backward()
    assert loss.tolist() == [0, 0]
    assert v.grad.flatten().tolist() == [0] * 6


def test_the_guard_of_a_row_without_advantage_moves_no_mean():
    mean = (1e3 * normal(2, 3)).requires_grad_()
    lp = torch.tensor([900.0, 0.01], dtype=F64, requires_grad=True)
    zero, std, a = torch.zeros(2, dtype=F64), torch.full((2,), 0.5, dtype=F64), torch.tensor([0.0, 0.0], dtype=F64)
    guard_clipped_ratio(lp, zero, mean, torch.zeros(2, 3, dtype=F64), std, a, clip=0.1).sum().backward()
    assert lp.grad.tolist() == [0, 0]
    assert mean.grad.flatten().tolist() == [0] * 6


def flow_grpo_state(t: float, t_next: float, seed: int = 0):
    """(x_t, v_old, x_next, z) of one Flow-SDE step of eta .7 with injected noise z."""
    x, v, z = normal(4, 6, seed=seed), normal(4, 6, seed=seed + 1), normal(4, 6, seed=seed + 2)
    mean, std = flow_sde_step(x, v, t, t_next)
    return x, v, mean + std[:, None] * z, z


@pytest.mark.parametrize(("t", "t_next"), [(0.6, 0.4), (0.9, 0.75), (0.25, 0.0)])
def test_flow_grpo_gradient_at_ratio_1(t, t_next):
    x, v_old, x_next, z = flow_grpo_state(t, t_next)
    v, a, eta = v_old.clone().requires_grad_(), torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=F64), 0.7
    mean, std = flow_sde_step(x, v, t, t_next)
    log_prob = transition_log_prob(x_next, mean, std)
    clipped_ratio(log_prob, log_prob, a).sum().backward()
    # dL/dv = A z (1 + eta^2/2) D/(dim s): the push is along the injected noise
    expected = a[:, None] * z * (1 + eta**2 / 2) * (t - t_next) / (6 * std[:, None])
    torch.testing.assert_close(v.grad, expected, rtol=1e-9, atol=1e-12)


def test_the_surrogate_without_the_normaliser_is_another_ratio():
    # One side had the normaliser, the other not. https://github.com/verl-project/verl-omni/pull/209
    x, v, x_next, _ = flow_grpo_state(0.6, 0.4)
    mean, std = flow_sde_step(x, v + 0.01, 0.6, 0.4)
    old_mean, _ = flow_sde_step(x, v, 0.6, 0.4)
    exact = transition_log_prob(x_next, mean, std) - transition_log_prob(x_next, old_mean, std)
    surrogate = ((x_next - old_mean) ** 2 - (x_next - mean) ** 2).mean(1)
    torch.testing.assert_close(exact, surrogate / (2 * std**2), rtol=1e-9, atol=1e-12)
    assert float((exact - surrogate).abs().max()) > 1e-4


def test_golden_guard():
    got = guard_clipped_ratio(
        torch.tensor([0.01], dtype=F64),
        torch.zeros(1, dtype=F64),
        row(0.5, -0.5),
        row(0.2, 0.1),
        torch.tensor([0.4], dtype=F64),
        torch.tensor([-1.0], dtype=F64),
        clip=10.0,
    )
    assert float(got) == pytest.approx(1.3301, abs=5.1e-5)


@given(seeds, st.floats(0.1, 0.9), st.floats(0.01, 1.0))
def test_the_guard_s_exponent_is_the_noise_times_the_change_of_the_mean(seed, t, size):
    x, v_old, x_next, z = flow_grpo_state(t, t / 2, seed)
    v = v_old + size * normal(4, 6, seed=seed + 9)
    (mean, std), (old, _) = flow_sde_step(x, v, t, t / 2), flow_sde_step(x, v_old, t, t / 2)
    lp, lp_old = transition_log_prob(x_next, mean, std), transition_log_prob(x_next, old, std)
    a = torch.tensor([1.0, -1.0, 2.0, 0.0], dtype=F64)
    got = guard_clipped_ratio(lp, lp_old, mean, old, std, a, clip=1e9)
    exponent = (z * (mean - old)).mean(1)
    torch.testing.assert_close(got, -a * torch.exp(exponent), rtol=1e-8, atol=1e-10)
    clipped = guard_clipped_ratio(lp, lp_old, mean, old, std, a, clip=1e-3)
    torch.testing.assert_close(clipped, torch.maximum(got, -a * torch.exp(exponent).clamp(0.999, 1.001)))


def test_guard_refuses_what_is_not_a_gaussian_step():
    # A ratio regularised for one kernel with another's log-prob collapsed. https://github.com/yifan123/flow_grpo/issues/192
    b, x, one = torch.zeros(2), torch.zeros(2, 3), torch.ones(2)
    for bad in (0.0, -1.0, NAN):
        with refuses("std > 0", bad):
            guard_clipped_ratio(b, b, x, x, torch.tensor([1.0, bad]), b, clip=1.0)
    with refuses("mean (2, 3)", "mean_old (2, 1)"):
        guard_clipped_ratio(b, b, x, torch.zeros(2, 1), one, b, clip=1.0)
    with refuses("std", "(2, 3)"):
        guard_clipped_ratio(b, b, x, x, torch.ones(2, 3), b, clip=1.0)
    with refuses("clip", "0"):
        guard_clipped_ratio(b, b, x, x, one, b, clip=0)


def test_guard_moves_the_new_policy_alone():
    lp, old, a = (normal(2, seed=i).requires_grad_() for i in range(3))
    mean, mean_old = (normal(2, 3, seed=i).requires_grad_() for i in range(2))
    guard_clipped_ratio(lp, old, mean, mean_old, torch.ones(2, dtype=F64), a, clip=1e9).sum().backward()
    assert [x.grad is None for x in (lp, mean, old, mean_old, a)] == [False, False, True, True, True]


@given(seeds)
def test_advantage_weighted_matching_on_policy_gradient_is_a_times_that_of_the_mse(seed):
    v_old, noise, x_0 = (normal(3, 4, seed=seed + i) for i in range(3))
    a, v = normal(3, seed=seed + 3), v_old.clone().requires_grad_()
    loss = advantage_weighted_matching(v, v_old, noise, x_0, a)
    torch.testing.assert_close(loss, -a)
    loss.sum().backward()
    torch.testing.assert_close(v.grad, a[:, None] * 2 * (v_old - (noise - x_0)) / 4, rtol=1e-9, atol=1e-12)


@given(seeds, st.floats(1e-3, 0.5))
def test_advantage_weighted_matching_by_brute_force(seed, clip):
    v, v_old, noise, x_0 = (normal(3, 2, 2, seed=seed + i) for i in range(4))
    a = normal(3, seed=seed + 4)
    got = advantage_weighted_matching(v, v_old, noise, x_0, a, clip=clip)
    for i in range(3):
        new, old = (-float(((w[i] - noise[i] + x_0[i]) ** 2).mean()) for w in (v, v_old))
        ratio = math.exp(new - old)
        expected = max(-a[i] * ratio, -a[i] * min(max(ratio, 1 - clip), 1 + clip))
        assert float(got[i]) == pytest.approx(float(expected), rel=1e-9)


def test_advantage_weighted_matching_refuses_and_detaches():
    x, a = torch.zeros(2, 3), torch.zeros(2)
    with refuses("v (2, 3)", "x_0 (2, 1)"):
        advantage_weighted_matching(x, x, x, torch.zeros(2, 1), a)
    with refuses("advantages", "(2, 3)"):
        advantage_weighted_matching(x, x, x, x, x)
    with refuses("clip", "-1"):
        advantage_weighted_matching(x, x, x, x, a, clip=-1)
    v, v_old, noise, x_0 = (normal(2, 3, seed=i).requires_grad_() for i in range(4))
    advantage_weighted_matching(v, v_old, noise, x_0, torch.ones(2, dtype=F64), clip=100.0).sum().backward()
    assert [y.grad is None for y in (v, v_old, noise, x_0)] == [False, True, True, True]


# ---- reduction --------------------------------------------------------------------------------------------------------


def test_golden_masked_mean():
    keep = torch.tensor([True, True, False])
    assert float(masked_mean(torch.tensor([1.0, 3.0, NAN], dtype=F64), keep)) == pytest.approx(4 / 3, rel=1e-15)


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(0, 3), st.booleans()), min_size=0, max_size=9))
def test_masked_mean_divides_by_all_rows(rows):
    values = torch.tensor([x for x, _, _ in rows], dtype=F64)
    weight = torch.tensor([w for _, w, _ in rows], dtype=F64)
    keep = torch.tensor([k for _, _, k in rows], dtype=torch.bool)
    n = max(len(rows), 1)
    assert float(masked_mean(values, keep)) == pytest.approx(sum(x for x, _, k in rows if k) / n, abs=1e-12)
    assert float(masked_mean(values, weight)) == pytest.approx(sum(x * w for x, w, _ in rows) / n, abs=1e-12)
    assert torch.equal(masked_mean(values, keep), masked_mean(values, keep.to(F64)))
    if n > 1:  # parts weighted by their size give the whole
        parts = [(values[s], keep[s], len(values[s]) / n) for s in (slice(0, 1), slice(1, None))]
        total = sum(float(masked_mean(v, k)) * share for v, k, share in parts)
        assert total == pytest.approx(float(masked_mean(values, keep)), abs=1e-12)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("keep", [torch.tensor([True, False, True]), torch.tensor([2.0, 0.0, 2.0])])
def test_masked_rows_that_are_not_finite_give_value_0_and_gradient_0(bad, keep):
    values = torch.tensor([1.0, bad, 3.0], requires_grad=True)
    total = masked_mean(values, keep)
    total.backward()
    scale = float(keep[0])
    assert float(total.detach()) == pytest.approx(4 * scale / 3)
    assert values.grad.tolist() == pytest.approx([scale / 3, 0, scale / 3])


def test_masked_mean_of_nothing_is_0_with_gradient_0():
    values = torch.tensor([NAN, 2.0], requires_grad=True)
    total = masked_mean(values, torch.zeros(2, dtype=torch.bool))
    total.backward()
    assert float(total.detach()) == 0
    assert values.grad.tolist() == [0, 0]
    assert float(masked_mean(torch.zeros(0), torch.zeros(0, dtype=torch.bool))) == 0
    assert math.isnan(float(masked_mean(torch.tensor([NAN]), torch.tensor([True]))))  # a kept nan is not hidden


def test_masked_mean_refuses_and_detaches_its_weights():
    values = torch.ones(2)
    with refuses("values (2,)", "keep (3,)"):
        masked_mean(values, torch.ones(3))
    with refuses("values (2, 1)"):
        masked_mean(values[:, None], torch.ones(2, 1))
    for bad in (-1.0, NAN, INF):
        with refuses("weights", bad):
            masked_mean(values, torch.tensor([1.0, bad]))
    weight = torch.ones(2, requires_grad=True)
    assert not masked_mean(values, weight).requires_grad


# ---- dtypes -----------------------------------------------------------------------------------------------------------


def all_losses(dtype: torch.dtype) -> list[torch.Tensor]:
    x = [normal(2, 3, seed=i, dtype=dtype) for i in range(4)]
    b = [normal(2, seed=i, dtype=dtype) for i in range(3)]
    r = torch.tensor([0.25, 0.75], dtype=dtype)
    out = [velocity_matching(x[0], x[1]), clipped_ratio(*b), advantage_weighted_matching(*x, b[0])]
    out += [guard_clipped_ratio(b[0], b[1], x[0], x[1], torch.ones(2, dtype=dtype), b[2], clip=1.0)]
    out += [f(*x, torch.full((2,), 0.5, dtype=dtype), r) for f in NFT.values()]
    return [*out, inverse_abs_error(x[0]), flat_weight(x[0]), masked_mean(b[0], torch.ones(2, dtype=torch.bool))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_losses_are_float32_or_better(dtype):
    assert {x.dtype for x in all_losses(dtype)} == {torch.float32}
    assert {x.dtype for x in all_losses(F64)} == {F64}


# ---- negative control -------------------------------------------------------------------------------------------------


def test_negative_control_wrong_losses_fail_the_oracles():
    def pessimist(log_prob, log_prob_old, a, clip):  # min instead of max
        ratio = torch.exp(log_prob - log_prob_old)
        return torch.minimum(-a * ratio, -a * ratio.clamp(1 - clip, 1 + clip))

    lp, old, a = torch.tensor([0.1], dtype=F64), torch.zeros(1, dtype=F64), torch.ones(1, dtype=F64)
    assert float(pessimist(lp, old, a, 0.01)) != pytest.approx(float(clipped_ratio(lp, old, a, clip=0.01)))
    values = torch.tensor([1.0, NAN])
    assert math.isnan(float((values * torch.tensor([1.0, 0.0])).sum()))  # multiplying by zero hides no nan
    assert golden_nft(nft, 1.0, lambda e: 2 * flat_weight(e)) != pytest.approx(0.4725, abs=5.1e-5)


@pytest.mark.parametrize(("values", "keep"), [([1.0], torch.ones(1)), (torch.ones(1), [True]), (torch.ones(1), None)])
def test_masked_mean_refuses_what_is_no_tensor(values, keep):
    with refuses("values", "keep"):
        masked_mean(values, keep)
