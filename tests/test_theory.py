"""The statements the algorithms rest on, each proven against exact sums, quadrature or a recursion, in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import (
    F64,
    Atoms,
    atoms,
    conditional_moments,
    conditional_velocities,
    gaussian_gain,
    normal,
    posterior,
    tilted_mean,
)
from strategies import seeds

from diffrl.guidance import guided_velocity, reward_covariance
from diffrl.losses import flat_weight, inverse_abs_error, nft, nft_negative, nft_positive, velocity_matching
from diffrl.sampling import euler_step, flow_sde_step, interpolate, predict_noise, predict_x_0, time_grid
from diffrl.trust_region import ema

TIMES = (1.0, 0.8, 0.5, 0.2)
NFT = {"both": nft, "positive": nft_positive, "negative": nft_negative}


def states(n: int, d: int = 3, seed: int = 11) -> torch.Tensor:
    return normal(n, d, seed=seed)


# ---- the path ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", TIMES)
def test_score_is_minus_the_expected_noise_over_t(t):
    """score = -(x_t + (1 - t) v)/t for the marginal velocity v, by differentiating the mixture's log-density."""
    world, s = atoms(), states(5).requires_grad_()
    gap = ((s[:, None] - (1 - t) * world.x[None]) ** 2).sum(-1)
    log_density = torch.logsumexp(world.prior.log() - gap / (2 * t**2), dim=1)
    score = torch.autograd.grad(log_density.sum(), s)[0]
    s = s.detach()
    _, v, _ = conditional_moments(world, s, t)
    torch.testing.assert_close(score, -predict_noise(s, v, t) / t, rtol=1e-10, atol=1e-10)


def test_flow_sde_first_step_inflates_the_variance_by_an_error_that_no_grid_removes():
    """From N(0, 1) the first step leaves (1 - eta^2/2 - D)^2 + eta^2: about 1 + eta^4/4, 1.06 at eta = .7."""
    one = torch.ones(1, 1, dtype=F64)
    for delta in (0.1, 1e-3, 1e-6):
        mean, std = flow_sde_step(one, one, 1.0, 1 - delta)  # at t = 1 the exact velocity is x, whatever the data
        variance = float(mean) ** 2 + float(std) ** 2
        assert variance == pytest.approx((1 - 0.245 - delta) ** 2 + 0.49, rel=1e-9)
    assert variance == pytest.approx(1 + 0.7**4 / 4, abs=1e-5)
    assert variance == pytest.approx(1.06, abs=1e-3)


# ---- Lemma 1 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", TIMES)
def test_lemma_1_both_branches_lie_on_one_line(t):
    """q (v+ - v_fwd) = (1 - q)(v_fwd - v-) = g, where v+ and v- are the velocities of the laws r p/q, (1 - r) p/(1 - q)."""
    world, s = atoms(), states(7)
    q, v_fwd, g = conditional_moments(world, s, t)
    u = conditional_velocities(world, s, t)
    v_plus = torch.einsum("nm,nmd->nd", posterior(world, s, t, world.reward.log()), u)
    v_minus = torch.einsum("nm,nmd->nd", posterior(world, s, t, (1 - world.reward).log()), u)
    torch.testing.assert_close(q[:, None] * (v_plus - v_fwd), g, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close((1 - q[:, None]) * (v_fwd - v_minus), g, rtol=1e-9, atol=1e-12)


# ---- Propositions 1 and 2 ---------------------------------------------------------------------------------------------


def nft_force(function, world: Atoms, s, t, v_old, d, beta, weight=flat_weight):
    """-(grad in v of E[loss | s]) / (2 t^2/D) at v = v_old + d, through autograd; " n dim"."""
    n, m = len(s), len(world.x)
    v = (v_old + d).requires_grad_()

    def rows(x):
        return x[:, None].expand(n, m, -1).reshape(n * m, -1)

    x_0 = world.x[None].expand(n, m, -1).reshape(n * m, -1)
    loss = function(rows(v), rows(v_old), rows(s), x_0, t, world.reward.repeat(n), beta=beta, weight=weight)
    expected = (posterior(world, s, t).reshape(-1) * loss).sum()
    return -torch.autograd.grad(expected, v)[0] / (2 * t**2 / s.shape[1])


@pytest.mark.parametrize("t", TIMES)
@pytest.mark.parametrize("beta", [0.1, 1.0, 2.0])
def test_proposition_1_force_is_guidance_plus_a_self_consuming_term_minus_restoration(t, beta):
    """F - beta d with F = 2 g + (2 q - 1) e; positive branch g + q e - q beta d, negative g - (1 - q) e - (1 - q) beta d."""
    world, s = atoms(), states(4)
    v_old, d = normal(4, 3, seed=5), normal(4, 3, seed=6)
    q, v_fwd, g = conditional_moments(world, s, t)
    q, e = q[:, None], v_fwd - v_old
    forces = {"both": 2 * g + (2 * q - 1) * e, "positive": g + q * e, "negative": g - (1 - q) * e}
    stiffness = {"both": 1.0, "positive": q, "negative": 1 - q}
    for name, force in forces.items():
        for drift in (torch.zeros_like(d), d):
            got = nft_force(NFT[name], world, s, t, v_old, drift, beta)
            torch.testing.assert_close(got, force - beta * stiffness[name] * drift, rtol=1e-8, atol=1e-10)
    minimiser = forces["both"] / beta
    at_rest = nft_force(nft, world, s, t, v_old, minimiser, beta)
    torch.testing.assert_close(at_rest, torch.zeros_like(at_rest), rtol=0, atol=1e-9)


@given(seeds, st.floats(0.05, 3), st.floats(0.05, 1))
def test_self_normalised_force_at_zero_drift_is_free_of_beta(seed, beta, t):
    """With the published weight, -grad at d = 0 is (2 t/(D mean|h|)) (2 r - 1) h per sample, h = u - v_old."""
    x_0, noise, v_old = (normal(3, 4, seed=seed + i) for i in range(3))
    r, v = torch.tensor([0.0, 0.3, 0.9], dtype=F64), v_old.clone().requires_grad_()
    x_t = interpolate(x_0, noise, t)
    loss = nft(v, v_old, x_t, x_0, t, r, beta=beta, weight=inverse_abs_error)
    grad = torch.autograd.grad(loss.sum(), v)[0]
    h = noise - x_0 - v_old
    expected = 2 * t / (4 * h.abs().mean(1, keepdim=True)) * (2 * r[:, None] - 1) * h
    torch.testing.assert_close(-grad, expected, rtol=1e-8, atol=1e-10)


@given(seeds, st.floats(0.05, 3), st.floats(0, 1), st.floats(0.05, 1))
def test_proposition_2_the_loss_is_linear_guidance_plus_quadratic_restoration(seed, beta, r, t):
    """r |beta d - h|^2 + (1 - r) |beta d + h|^2 = |h|^2 - 2 beta (2 r - 1) <d, h> + beta^2 |d|^2."""
    x_0, noise, v_old, d = (normal(2, 3, seed=seed + i) for i in range(4))
    x_t, rows = interpolate(x_0, noise, t), torch.full((2,), r, dtype=F64)
    loss = nft(v_old + d, v_old, x_t, x_0, t, rows, beta=beta, weight=flat_weight)
    h = noise - x_0 - v_old
    terms = (h**2).sum(1) - 2 * beta * (2 * r - 1) * (d * h).sum(1) + beta**2 * (d**2).sum(1)
    torch.testing.assert_close(loss, t**2 / 3 * terms / beta, rtol=1e-8, atol=1e-10)


# ---- the collapse -----------------------------------------------------------------------------------------------------


def collapse(function, q: float, iterations: int = 100) -> list[float]:
    """Endpoint std after 0..iterations updates by the force of `function` without reward signal (r = q everywhere)."""
    times = time_grid(10, shift=3.0, dtype=F64)
    t, ones = times[:-1], torch.ones(10, 1, dtype=F64)
    gain, out = gaussian_gain(t, 1.0), []
    for _ in range(iterations + 1):
        mean, _ = euler_step(ones, gain[:, None], t, times[1:])
        out.append(float(mean.prod().abs()))
        variance = out[-1] ** 2
        v_old = gain[:, None].clone()
        v = v_old.clone().requires_grad_()
        x_0 = predict_x_0(ones, gaussian_gain(t, variance)[:, None], t)  # E[x_0 | x = 1] of the model's own samples
        loss = function(v, v_old, ones, x_0, t, torch.full((10,), q, dtype=F64), beta=1.0, weight=flat_weight)
        force = -torch.autograd.grad(loss.sum(), v)[0] / (2 * t[:, None] ** 2)
        gain = gain + 0.2 * force[:, 0]
    return out


@pytest.mark.parametrize(
    ("name", "q", "at_20", "at_100"),
    [
        ("positive", 0.5, "0.5224", "0.0011"),
        ("negative", 0.5, "1.194", "7.7e+10"),
        ("both", 0.5, "0.8330", "0.8330"),
        ("both", 0.7, "0.581", "0.0087"),
        ("both", 0.3, "1.118", "38"),
    ],
)
def test_collapse_experiment(name, q, at_20, at_100):
    """A pure branch contracts or explodes the model on its own samples; both together rest only at q = 1/2."""
    std = collapse(NFT[name], q)
    assert std[0] == pytest.approx(0.8330, abs=5.1e-5)
    for value, printed in ((std[20], at_20), (std[100], at_100)):
        digits = len(printed.split("e")[0].replace(".", "").lstrip("0"))
        assert value == pytest.approx(float(printed), rel=0.51 * 10 ** (1 - digits))


# ---- EMA --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("decay", "multiple"), [(0.5, 1), (0.9, 9), (0.999, 999)])
def test_ema_lag(decay, multiple):
    """With new moving by Delta per iteration the average lags by decay Delta/(1 - decay) after its update."""
    delta, new = 0.25, {"w": torch.zeros(1, dtype=F64)}
    old = {"w": new["w"] - multiple * delta}  # the fixed point ...
    for _ in range(50):
        new = {"w": new["w"] + delta}
        old = ema(old, new, decay=decay)
        assert float(new["w"] - old["w"]) == pytest.approx(multiple * delta, rel=1e-9)
    if decay < 0.95:  # ... which attracts
        old = dict(new)
        for _ in range(300):
            new = {"w": new["w"] + delta}
            old = ema(old, new, decay=decay)
        assert float(new["w"] - old["w"]) == pytest.approx(multiple * delta, rel=1e-9)


# ---- Lemma 2 ----------------------------------------------------------------------------------------------------------


@given(seeds, st.integers(2, 9))
def test_lemma_2_covariance_is_the_derivative_of_the_tilted_mean(seed, k):
    """d/dtau E_tau[x_0] at 0, p_tau ~ p exp(tau R), by central difference."""
    rewards, x = normal(k, seed=seed), normal(k, 4, seed=seed + 1)
    step = 1e-5
    slope = (tilted_mean(rewards, x, step) - tilted_mean(rewards, x, -step)) / (2 * step)
    torch.testing.assert_close(reward_covariance(rewards[None], x[None])[0], slope, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("t", [1.0, 0.7, 0.3, 0.01])
def test_covariance_with_the_velocity_is_minus_that_with_the_data_at_every_time(t):
    """Cov(R, u_t | c) = -Cov(R, x_0 | c), as the noise is independent of (x_0, R): here on a full product design."""
    rewards, x, eps = normal(5), normal(5, 3, seed=1), normal(6, 3, seed=2)
    rows = torch.cartesian_prod(torch.arange(5), torch.arange(6))
    x_0, noise, r = x[rows[:, 0]], eps[rows[:, 1]], rewards[rows[:, 0]]
    x_t = interpolate(x_0, noise, t)
    u = (x_t - x_0) / t
    left, right = reward_covariance(r[None], u[None]), reward_covariance(r[None], x_0[None])
    torch.testing.assert_close(left, -right, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(right, reward_covariance(rewards[None], x[None]), rtol=1e-10, atol=1e-12)


def test_the_target_velocity_is_that_of_the_tilted_distribution_at_pure_noise():
    """At t = 1 the velocity of p exp(tau R) is v - tau Cov(R, x_0) to first order: the sign of `guided_velocity`."""
    world, s, tau = atoms(), states(4), 1e-5
    world = world._replace(prior=torch.full_like(world.prior, 1 / 6))
    u = conditional_velocities(world, s, 1.0)
    v, tilted = (torch.einsum("nm,nmd->nd", posterior(world, s, 1.0, k * world.reward), u) for k in (0.0, tau))
    c = reward_covariance(world.reward[None], world.x[None])[0]
    target = guided_velocity(v, (tau * c).expand_as(v))
    assert float((tilted - target).norm() / (tilted - v).norm()) < 1e-4
    wrong = guided_velocity(v, -(tau * c).expand_as(v))
    assert float((tilted - wrong).norm() / (tilted - v).norm()) == pytest.approx(2, rel=1e-4)


# ---- total covariance -------------------------------------------------------------------------------------------------


def line_world() -> tuple[Atoms, torch.Tensor]:
    return atoms(d=1), torch.linspace(-12, 12, 6001, dtype=F64)


def density(world: Atoms, s: torch.Tensor, t: float) -> torch.Tensor:
    gap = (s[:, None] - (1 - t) * world.x[None, :, 0]) / t
    return (torch.exp(-(gap**2) / 2) / (t * math.sqrt(2 * math.pi))) @ world.prior


@pytest.mark.parametrize("t", TIMES)
def test_total_covariance_splits_into_within_and_between_states(t):
    """Cov(R, x_0|c) = E_s[Cov(R, x_0|s)] + Cov_s(E[R|s], E[x_0|s]), by quadrature over s; Cov(R, u|s) = -Cov(R, x_0|s)/t."""
    world, s = line_world()
    p = density(world, s, t) * (s[1] - s[0])
    w = posterior(world, s[:, None], t)
    r, x = w @ world.reward, w @ world.x[:, 0]
    within = w @ (world.reward * world.x[:, 0]) - r * x
    total = world.prior @ (world.reward * world.x[:, 0]) - (world.prior @ world.reward) * (world.prior @ world.x[:, 0])
    between = p @ (r * x) - (p @ r) * (p @ x)
    assert float(p.sum()) == pytest.approx(1, abs=1e-9)
    assert float(p @ within + between) == pytest.approx(float(total), rel=1e-7)
    _, _, g = conditional_moments(world, s[:, None], t)
    torch.testing.assert_close(g[:, 0], -within / t, rtol=1e-6, atol=1e-9)
    if t == 1.0:
        assert float(between) == pytest.approx(0, abs=1e-12)  # s says nothing about x_0: the direction is exact
        assert float(p @ g[:, 0]) == pytest.approx(-float(total), rel=1e-9)


def test_the_within_state_part_vanishes_toward_the_data():
    world, s = line_world()
    share = []
    for t in (*TIMES, 0.02):
        _, _, g = conditional_moments(world, s[:, None], t)
        share.append(abs(float((density(world, s, t) * (s[1] - s[0])) @ g[:, 0])))
    assert share[0] > 20 * share[-1]


@pytest.mark.parametrize("t", [1.0, 0.8, 0.5, 0.2])
def test_conditional_covariance_of_a_linear_reward_on_gaussian_data(t):
    """|Cov(R, u|s)| = |a| S^2 t/((1 - t)^2 S^2 + t^2) for R = a x_0, x_0 ~ N(m, S^2)."""
    a, m, std = 1.7, 0.4, 0.6
    x = torch.linspace(m - 8 * std, m + 8 * std, 4001, dtype=F64)
    prior = torch.exp(-((x - m) ** 2) / (2 * std**2))
    world = Atoms(x[:, None], prior / prior.sum(), a * x)
    _, v, g = conditional_moments(world, torch.tensor([[-0.5], [0.0], [1.0]], dtype=F64), t)
    expected = a * std**2 * t / ((1 - t) ** 2 * std**2 + t**2)
    np.testing.assert_allclose(g[:, 0], [-expected] * 3, rtol=1e-6)
    gain = float(gaussian_gain(torch.tensor(t, dtype=F64), std**2))
    np.testing.assert_allclose((v[1:] - v[:-1])[:, 0], [gain * 0.5, gain * 1.0], rtol=1e-6)


# ---- velocities are conditional means ---------------------------------------------------------------------------------


@pytest.mark.parametrize("t", TIMES)
def test_velocity_matching_is_minimised_by_the_conditional_mean(t):
    world, s = atoms(), states(3)
    _, v_fwd, _ = conditional_moments(world, s, t)
    w, u = posterior(world, s, t), conditional_velocities(world, s, t)

    def expected_loss(v):
        losses = [velocity_matching(v, u[:, j]) for j in range(len(world.x))]
        return (w * torch.stack(losses, 1)).sum(1)

    v = v_fwd.clone().requires_grad_()
    grad = torch.autograd.grad(expected_loss(v).sum(), v)[0]
    torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=1e-12)
    assert bool((expected_loss(v_fwd + 0.1) > expected_loss(v_fwd)).all())


# ---- negative control -------------------------------------------------------------------------------------------------


def test_negative_control_the_oracles_reject_near_misses():
    world, s, t, beta = atoms(), states(4), 0.5, 0.5
    v_old = normal(4, 3, seed=5)
    q, v_fwd, g = conditional_moments(world, s, t)
    force = nft_force(nft, world, s, t, v_old, torch.zeros_like(v_old), beta)
    without_the_self_consuming_term = 2 * g
    assert not torch.allclose(force, without_the_self_consuming_term, atol=1e-3)
    published = nft_force(nft, world, s, t, v_old, torch.zeros_like(v_old), beta, inverse_abs_error)
    assert not torch.allclose(published, force, atol=1e-3)  # Proposition 1 is about the flat weight
    untilted = torch.einsum("nm,nmd->nd", posterior(world, s, t), conditional_velocities(world, s, t))
    assert not torch.allclose(q[:, None] * (untilted - v_fwd), g, atol=1e-3)
    assert collapse(nft, 0.5, 20)[20] != pytest.approx(collapse(nft_positive, 0.5, 20)[20], rel=0.1)
