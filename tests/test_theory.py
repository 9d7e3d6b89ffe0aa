"""The statements the algorithms rest on, each proven against exact sums, quadrature or a recursion, in float64.

Provenance in brackets, as in the specification: [paper] DiffusionART 2610.12572, [derived] proven by its test. v = eps - x_0,
u = eps - x_0 per sample, h = u - v_old, e = v_fwd - v_old, d = v - v_old, q = E[r|s], g = Cov(r, u|s), G the direction in data
space, h_G = -G. Every test whose name begins with the words on the right belongs to the statement on the left.

| statement | tests |
|---|---|
| score = -E[eps|x_t]/t; the regression target of flow matching is E[u|s] [known] | `score_is`, `velocity_matching_is` |
| first step of Flow-SDE: variance 1 + eta^4/4, on any grid [derived] | `flow_sde_first_step` |
| Lemma 1: q (v+ - v_fwd) = (1 - q)(v_fwd - v-) = g [paper] | `lemma_1` |
| Proposition 1: force F - beta d, F = 2g + (2q - 1)e; positive alone g + q e, negative alone g - (1 - q)e [paper] | `proposition_1` |
| the same with the published weight: the posterior re-weighted by 1/mean abs h; free of beta at d = 0 [derived] | `proposition_1_with_the_published_weight` |
| Proposition 2: linear guidance + quadratic restoration [paper] | `proposition_2` |
| Lemma 2: d/dtau E_tau[x_0] = Cov(R, x_0|c) [paper]; the target velocity is the tilted law's at t = 1 [derived] | `lemma_2` |
| Cov(R, u_t|c) = -Cov(R, x_0|c) at every t [derived] | `covariance_with_the_velocity` |
| Cov(R, x_0|c) = E_s Cov(R, x_0|s) + Cov_s(E[R|s], E[x_0|s]): G is the state-wise tilt at t = 1 only [derived] | `total_covariance` |
| an EMA lags by eta Delta/(1 - eta) after its update [derived] | `ema_lag` |
| collapse: one branch alone contracts or explodes, both rest at q = 1/2 only, aggregation first holds [derived] | `collapse` |
| update 1: no drift, loss 1, force h_G; update 2: h_G - d [paper]; closed forms of a linear model [derived] | `two_updates` |
| small groups: cos^2(G, a) ~ Beta((k - 1)/2, (D - 1)/2), mean (k - 1)/(k + D - 2) [derived] | `noise_law` |
| on-policy: stored states scored as stored have ratio exactly 1, for any chunking [derived] | `on_policy_law` |
| every statement above can fail | `control` |
"""

import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from oracles import (
    F64,
    Atoms,
    atoms,
    collapse_recursion,
    conditional_moments,
    conditional_velocities,
    gaussian_gain,
    line_density,
    moments,
    normal,
    numpy_covariance,
    posterior,
    six_atoms,
    tilted_mean,
)
from scipy import stats
from strategies import seeds

from diffrl.guidance import Direction, aggregate_direction, guided_velocity, reward_covariance
from diffrl.losses import (
    clipped_ratio,
    flat_weight,
    inverse_abs_error,
    masked_mean,
    nft,
    nft_negative,
    nft_positive,
    velocity_matching,
)
from diffrl.sampling import (
    chunked,
    cps_step,
    dance_sde_step,
    euler_step,
    flow_sde_step,
    interpolate,
    predict_noise,
    predict_x_0,
    rollout,
    time_grid,
    transition_log_prob,
)
from diffrl.trust_region import ema

TIMES = (1.0, 0.8, 0.5, 0.2)
times_of_day = st.one_of(st.just(1.0), st.floats(0.05, 1))


def for_all(*strategies, **named):
    """`given` without shrinking: a wrong statement is wrong almost everywhere, and the controls need no smallest example."""
    options = settings(phases=(Phase.explicit, Phase.generate), report_multiple_bugs=False)
    return lambda test: options(given(*strategies, **named)(test))


def states(n: int, d: int = 3, seed: int = 11) -> torch.Tensor:
    return normal(n, d, seed=seed)


def close(got, expected, rtol=1e-8, atol=1e-10) -> None:
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


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
    close(score, -predict_noise(s, v, t) / t, rtol=1e-10)


def test_flow_sde_first_step_inflates_the_variance_by_an_error_that_no_grid_removes():
    """From N(0, 1) the first step leaves (1 - eta^2/2 - D)^2 + eta^2: about 1 + eta^4/4, 1.06 at eta = .7."""
    one = torch.ones(1, 1, dtype=F64)
    for delta in (0.1, 1e-3, 1e-6):
        mean, std = flow_sde_step(one, one, 1.0, 1 - delta)  # at t = 1 the exact velocity is x, whatever the data
        variance = float(mean) ** 2 + float(std) ** 2
        assert variance == pytest.approx((1 - 0.245 - delta) ** 2 + 0.49, rel=1e-9)
    assert variance == pytest.approx(1 + 0.7**4 / 4, abs=1e-5)
    assert variance == pytest.approx(1.06, abs=1e-3)


@pytest.mark.parametrize("t", TIMES)
def test_velocity_matching_is_minimised_by_the_conditional_mean(t):
    """-D/2 times the gradient of E|v - u|^2/D at v is E[u|s] - v: zero at v_fwd, and the loss rises around it."""
    world, s = atoms(), states(3)
    _, v_fwd, _ = conditional_moments(world, s, t)
    w, u = posterior(world, s, t), conditional_velocities(world, s, t)

    def expected_loss(v):
        losses = [velocity_matching(v, u[:, j]) for j in range(len(world.x))]
        return (w * torch.stack(losses, 1)).sum(1)

    for shift in (0.0, 0.1):
        v = (v_fwd + shift).requires_grad_()
        grad = torch.autograd.grad(expected_loss(v).sum(), v)[0]
        close(grad, torch.full_like(grad, 2 * shift / 3), rtol=1e-9, atol=1e-12)
    assert bool((expected_loss(v_fwd + 0.1) > expected_loss(v_fwd)).all())


# ---- Lemma 1 and Proposition 1 ----------------------------------------------------------------------------------------


def branches() -> dict:
    """Looked up at every call, so that a control may replace one."""
    return {"both": nft, "positive": nft_positive, "negative": nft_negative}


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


@for_all(seeds, times_of_day, st.integers(2, 7), st.integers(1, 4))
def test_lemma_1_both_branches_lie_on_one_line(seed, t, m, dim):
    """[paper] q (v+ - v_fwd) = (1 - q)(v_fwd - v-) = g, where v+ and v- are the velocities of the laws r p/q, (1 - r) p/(1 - q);
    at beta = 1 they are where `nft_positive` and `nft_negative` come to rest."""
    world, s, v_old = atoms(m, dim, seed), states(3, dim, seed + 1), normal(3, dim, seed=seed + 2)
    q, v_fwd, g = conditional_moments(world, s, t)
    u = conditional_velocities(world, s, t)
    v_plus = torch.einsum("nm,nmd->nd", posterior(world, s, t, world.reward.log()), u)
    v_minus = torch.einsum("nm,nmd->nd", posterior(world, s, t, (1 - world.reward).log()), u)
    close(q[:, None] * (v_plus - v_fwd), g)
    close((1 - q[:, None]) * (v_fwd - v_minus), g)
    for beta in (1.0, 0.4):  # v(+) = v_old + beta d rests at v+, v(-) = v_old - beta d at v-
        for name, d in (("positive", (v_plus - v_old) / beta), ("negative", (v_old - v_minus) / beta)):
            rest = nft_force(branches()[name], world, s, t, v_old, d, beta)
            close(rest, torch.zeros_like(rest), atol=1e-9)
            assert float(nft_force(branches()[name], world, s, t, v_old, d + 0.1, beta).max()) < 0  # pulled back


@pytest.mark.parametrize("t", TIMES)
@pytest.mark.parametrize("beta", [0.1, 1.0, 2.0])
def test_proposition_1_force_is_guidance_plus_a_self_consuming_term_minus_restoration(t, beta):
    """[paper; constants derived] F - beta d with F = 2 g + (2 q - 1) e; positive branch g + q e - q beta d, negative
    g - (1 - q) e - (1 - q) beta d. Autograd at d = 0 and at d; the minimiser is F/beta."""
    world, s = atoms(), states(4)
    v_old, d = normal(4, 3, seed=5), normal(4, 3, seed=6)
    q, v_fwd, g = conditional_moments(world, s, t)
    q, e = q[:, None], v_fwd - v_old
    forces = {"both": 2 * g + (2 * q - 1) * e, "positive": g + q * e, "negative": g - (1 - q) * e}
    stiffness = {"both": torch.ones_like(q), "positive": q, "negative": 1 - q}
    for name, function in branches().items():
        for drift in (torch.zeros_like(d), d):
            got = nft_force(function, world, s, t, v_old, drift, beta)
            close(got, forces[name] - beta * stiffness[name] * drift)
        minimiser = forces[name] / (beta * stiffness[name])
        close(nft_force(function, world, s, t, v_old, minimiser, beta), torch.zeros_like(d), atol=1e-9)


def test_proposition_1_without_reward_only_the_self_consuming_term_is_left():
    """[derived] r = q for every atom: g = 0, the forces are (2 q - 1) e, q e, -(1 - q) e, and all vanish at v_old = v_fwd."""
    s, t, v_old = states(4), 0.5, normal(4, 3, seed=5)
    for q in (0.5, 0.7):
        world = atoms()._replace(reward=torch.full((6,), q, dtype=F64))
        _, v_fwd, g = conditional_moments(world, s, t)
        close(g, torch.zeros_like(g))
        share = {"both": 2 * q - 1, "positive": q, "negative": -(1 - q)}
        for name, function in branches().items():
            zero = torch.zeros_like(v_old)
            close(nft_force(function, world, s, t, v_old, zero, 1.0), share[name] * (v_fwd - v_old))
            close(nft_force(function, world, s, t, v_fwd, zero, 1.0), zero)


@for_all(seeds, st.floats(0.05, 3), st.floats(0.05, 1))
def test_proposition_1_with_the_published_weight_is_free_of_beta_without_drift(seed, beta, t):
    """[derived] -grad at d = 0 is (2 t/(D mean|h|)) (2 r - 1) h per sample: beta scales restoration only."""
    x_0, noise, v_old = (normal(3, 4, seed=seed + i) for i in range(3))
    r, x_t = torch.tensor([0.0, 0.3, 0.9], dtype=F64), interpolate(x_0, noise, t)
    h = noise - x_0 - v_old
    scale = 2 * t / (4 * h.abs().mean(1, keepdim=True))
    signs = {"both": 2 * r - 1, "positive": r, "negative": -(1 - r)}
    for name, function in branches().items():
        v = v_old.clone().requires_grad_()
        loss = function(v, v_old, x_t, x_0, t, r, beta=beta, weight=inverse_abs_error)
        close(-torch.autograd.grad(loss.sum(), v)[0], scale * signs[name][:, None] * h)


@pytest.mark.parametrize("t", TIMES)
@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_proposition_1_with_the_published_weight_holds_for_the_reweighted_posterior(t, beta):
    """[derived] At d = 0 the force is E[1/mean|h|]/t times Proposition 1's, with q, v_fwd, g under the posterior
    re-weighted by 1/mean|h|."""
    world, s, v_old = atoms(), states(4), normal(4, 3, seed=5)
    u, w = conditional_velocities(world, s, t), posterior(world, s, t)
    inverse = 1 / (u - v_old[:, None]).abs().mean(-1)
    q, v_fwd, g = moments(posterior(world, s, t, inverse.log()), world.reward, u)
    q, e, size = q[:, None], v_fwd - v_old, (w * inverse).sum(1, keepdim=True) / t
    forces = {"both": 2 * g + (2 * q - 1) * e, "positive": g + q * e, "negative": g - (1 - q) * e}
    for name, function in branches().items():
        got = nft_force(function, world, s, t, v_old, torch.zeros_like(v_old), beta, inverse_abs_error)
        close(got, size * forces[name])


# ---- Proposition 2 ----------------------------------------------------------------------------------------------------


@for_all(seeds, st.floats(0.05, 3), st.floats(0, 1), st.floats(0.05, 1))
def test_proposition_2_the_loss_is_linear_guidance_plus_quadratic_restoration(seed, beta, r, t):
    """[paper] r |beta d - h|^2 + (1 - r) |beta d + h|^2 = |h|^2 - 2 beta (2 r - 1) <d, h> + beta^2 |d|^2, per sample; the
    loss is t^2/(D beta) times it, each branch one of its two terms."""
    x_0, noise, v_old, d = (normal(2, 3, seed=seed + i) for i in range(4))
    x_t, rows = interpolate(x_0, noise, t), torch.full((2,), r, dtype=F64)
    h = noise - x_0 - v_old
    terms = {
        "both": (h**2).sum(1) - 2 * beta * (2 * r - 1) * (d * h).sum(1) + beta**2 * (d**2).sum(1),
        "positive": r * ((beta * d - h) ** 2).sum(1),
        "negative": (1 - r) * ((beta * d + h) ** 2).sum(1),
    }
    for name, function in branches().items():
        loss = function(v_old + d, v_old, x_t, x_0, t, rows, beta=beta, weight=flat_weight)
        close(loss, t**2 / 3 * terms[name] / beta)


# ---- Lemma 2 ----------------------------------------------------------------------------------------------------------


@for_all(seeds, st.integers(2, 9), st.integers(0, 3))
def test_lemma_2_covariance_is_the_derivative_of_the_tilted_mean(seed, k, missing):
    """[paper] d/dtau E_tau[x_0] at 0, p_tau ~ p exp(tau R), by central difference; samples without reward are no atoms."""
    rewards, x = normal(k, seed=seed), normal(k, 4, seed=seed + 1)
    step = 1e-5
    slope = (tilted_mean(rewards, x, step) - tilted_mean(rewards, x, -step)) / (2 * step)
    rewards = torch.cat([rewards, torch.full((missing,), math.nan, dtype=F64)])
    x = torch.cat([x, normal(missing, 4, seed=seed + 2)])
    close(reward_covariance(rewards[None], x[None])[0], slope, rtol=1e-6, atol=1e-8)


def test_lemma_2_the_target_velocity_is_that_of_the_tilted_law_at_pure_noise():
    """[derived] At t = 1 the velocity of p exp(tau R) is v - tau Cov(R, x_0) to first order, and one Euler step along it ends
    at the tilted mean: the sign of `guided_velocity`."""
    world, s, tau = atoms(), states(4), 1e-5
    world = world._replace(prior=torch.full_like(world.prior, 1 / 6))
    u = conditional_velocities(world, s, 1.0)
    v, tilted = (torch.einsum("nm,nmd->nd", posterior(world, s, 1.0, k * world.reward), u) for k in (0.0, tau))
    c = reward_covariance(world.reward[None], world.x[None])[0]
    target = guided_velocity(v, (tau * c).expand_as(v))
    assert float((tilted - target).norm() / (tilted - v).norm()) < 1e-4
    wrong = guided_velocity(v, -(tau * c).expand_as(v))
    assert float((tilted - wrong).norm() / (tilted - v).norm()) == pytest.approx(2, rel=1e-4)
    (end, _), (start, _) = euler_step(s, target, 1.0, 0.0), euler_step(s, v, 1.0, 0.0)
    moved = tilted_mean(world.reward, world.x, tau) - tilted_mean(world.reward, world.x, 0.0)
    close((end - start) / tau, (moved / tau).expand_as(end), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("t", [1.0, 0.7, 0.3, 0.01])
def test_covariance_with_the_velocity_is_minus_that_with_the_data_at_every_time(t):
    """[derived] Cov(R, u_t|c) = -Cov(R, x_0|c), as the noise is independent of (x_0, R): here on a full product design."""
    rewards, x, eps = normal(5), normal(5, 3, seed=1), normal(6, 3, seed=2)
    rows = torch.cartesian_prod(torch.arange(5), torch.arange(6))
    x_0, noise, r = x[rows[:, 0]], eps[rows[:, 1]], rewards[rows[:, 0]]
    x_t = interpolate(x_0, noise, t)
    u = (x_t - x_0) / t
    left, right = reward_covariance(r[None], u[None]), reward_covariance(r[None], x_0[None])
    close(left, -right)
    close(
        right, torch.from_numpy(numpy_covariance(rewards[None].numpy(), x[None].numpy()))
    )  # the design changes nothing
    dependent = reward_covariance(rewards[None], (eps[:5] - x)[None])  # one noise per sample is no such design
    assert not torch.allclose(dependent, -right, atol=1e-3)


# ---- total covariance -------------------------------------------------------------------------------------------------

LINE = torch.linspace(-14, 14, 7001, dtype=F64)


def on_the_line(world: Atoms) -> Atoms:
    return world._replace(prior=torch.full_like(world.prior, 1 / len(world.prior)))


def split(world: Atoms, t: float) -> tuple[float, float, torch.Tensor]:
    """(within, between, g at the states of LINE) of one-dimensional equally likely atoms, by quadrature over p_t(s)."""
    p = line_density(world, LINE, t) * (LINE[1] - LINE[0])
    assert float(p.sum()) == pytest.approx(1, abs=1e-9)
    w, s = posterior(world, LINE[:, None], t), LINE[:, None]
    _, v, g = conditional_moments(world, s, t)
    r, x = w @ world.reward, predict_x_0(s, v, t)[:, 0]  # E[R|s], E[x_0|s]
    within = p @ (w @ (world.reward * world.x[:, 0]) - r * (w @ world.x[:, 0]))
    return float(within), float(p @ (r * x) - (p @ r) * (p @ x)), g[:, 0]


@for_all(seeds, times_of_day)
def test_total_covariance_splits_into_within_and_between_states(seed, t):
    """[derived] Cov(R, x_0|c) = E_s[Cov(R, x_0|s)] + Cov_s(E[R|s], E[x_0|s]), and E_s Cov(R, u|s) = -within/t; at t = 1 there is
    no between: s says nothing about x_0."""
    world = on_the_line(atoms(d=1, seed=seed))
    total = float(reward_covariance(world.reward[None], world.x[None])[0])
    within, between, g = split(world, t)
    assert within + between == pytest.approx(total, rel=1e-7, abs=1e-10)
    p = line_density(world, LINE, t) * (LINE[1] - LINE[0])
    assert float(p @ g) == pytest.approx(-within / t, rel=1e-6, abs=1e-9)
    if t == 1.0:
        assert between == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("t", TIMES)
def test_total_covariance_the_statewise_tilt_of_the_velocity_is_the_covariance_at_the_state(t):
    """[derived] d/dtau of the velocity of p exp(tau R) at a state is Cov(R, u|s) = -Cov(R, x_0|s)/t, by central difference;
    the prompt's target velocity v - tau Cov(R, x_0|c) moves along it at t = 1 and nowhere else."""
    world, s, step = on_the_line(six_atoms()), torch.linspace(-2, 2, 9, dtype=F64)[:, None], 1e-5
    u, w = conditional_velocities(world, s, t), posterior(world, s, t)
    up, down = (torch.einsum("nm,nmd->nd", posterior(world, s, t, k * world.reward), u) for k in (step, -step))
    slope = (up - down) / (2 * step)
    _, v, g = moments(w, world.reward, u)
    close(slope, g, rtol=1e-6, atol=1e-8)
    x_0 = predict_x_0(s[:, None].expand_as(u).reshape(-1, 1), u.reshape(-1, 1), t).reshape(u.shape)
    close(g, -moments(w, world.reward, x_0)[2] / t)
    c = reward_covariance(world.reward[None], world.x[None])
    shared = guided_velocity(v, c.expand_as(v)) - v
    gap = float((shared - slope).norm() / shared.norm())
    assert gap < 1e-6 if t == 1.0 else gap > 0.1


def printed(value: float, text: str) -> bool:
    """Whether the value prints as the text, to its number of places."""
    places = len(text.partition("e")[0].partition(".")[2])
    return f"{value:.{places}{'e' if 'e' in text else 'f'}}" == text


def tilt_share(world: Atoms, t: float) -> float:
    """|E_s g|/|Cov|: the mean state-wise tilt of the velocity over the prompt's."""
    _, _, g = split(world, t)
    total = reward_covariance(world.reward[None], world.x[None])[0]
    return abs(float((line_density(world, LINE, t) * (LINE[1] - LINE[0])) @ g) / float(total))


def test_total_covariance_numbers_of_six_atoms():
    """[derived] |E_s g|/|Cov| = 1.00, 1.05, .45, .001 at t = 1, .8, .5, .2 (`six_atoms`)."""
    for t, text in zip(TIMES, ("1.00", "1.05", "0.45", "0.001")):
        assert printed(tilt_share(six_atoms(), t), text)


@for_all(seeds)
def test_total_covariance_the_within_state_part_vanishes_toward_the_data(seed):
    """[derived] The share is 1 at t = 1 for every world; once t is far below the atoms' distances it is nearly nothing."""
    world = atoms(d=1, seed=seed)
    world = on_the_line(world)._replace(x=torch.arange(6, dtype=F64)[:, None] - 2.5)  # a distance of 1
    shares = [tilt_share(world, t) for t in (1.0, 0.5, 0.25, 0.1)]
    assert shares[0] == pytest.approx(1, rel=1e-7)
    assert shares[3] < 1e-3 * max(shares[:2])


@pytest.mark.parametrize("t", TIMES)
def test_total_covariance_of_a_linear_reward_on_gaussian_data(t):
    """[derived] |Cov(R, u|s)| = |a| S^2 t/((1 - t)^2 S^2 + t^2) at every s, for R = a x_0, x_0 ~ N(m, S^2)."""
    a, m, std = 1.7, 0.4, 0.6
    x = torch.linspace(m - 8 * std, m + 8 * std, 4001, dtype=F64)
    prior = torch.exp(-((x - m) ** 2) / (2 * std**2))
    world = Atoms(x[:, None], prior / prior.sum(), a * x)
    s = torch.tensor([[-0.5], [0.0], [1.0]], dtype=F64)
    _, v, g = conditional_moments(world, s, t)
    expected = a * std**2 * t / ((1 - t) ** 2 * std**2 + t**2)
    np.testing.assert_allclose(g[:, 0], [-expected] * 3, rtol=1e-6)
    x_0 = m + (1 - t) * std**2 * (s - (1 - t) * m) / ((1 - t) ** 2 * std**2 + t**2)  # E[x_0|s]
    close(predict_x_0(s, v, t), x_0, rtol=1e-6, atol=1e-9)
    gain = float(gaussian_gain(torch.tensor(t, dtype=F64), std**2))
    np.testing.assert_allclose((v[1:] - v[:-1])[:, 0], [gain * 0.5, gain * 1.0], rtol=1e-6)


# ---- EMA --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("decay", "multiple"), [(0.5, 1), (0.9, 9), (0.999, 999)])
def test_ema_lag_is_a_fixed_multiple_of_the_drift(decay, multiple):
    """[derived] With new moving by Delta per iteration the average lags by decay Delta/(1 - decay) after its update."""
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


@for_all(seeds, st.floats(0, 0.999), st.integers(1, 30))
def test_ema_lag_after_n_updates_from_none(seed, decay, n):
    """[derived] From lag 0, lag_n = decay Delta (1 - decay^n)/(1 - decay), parameter by parameter."""
    delta = {"a": normal(3, seed=seed), "b": normal(2, 2, seed=seed + 1)}
    old = new = {name: torch.zeros_like(x) for name, x in delta.items()}
    for _ in range(n):
        new = {name: x + delta[name] for name, x in new.items()}
        old = ema(old, new, decay=decay)
    for name, x in delta.items():
        close(new[name] - old[name], decay * (1 - decay**n) / (1 - decay) * x, rtol=1e-7, atol=1e-9)


# ---- the collapse -----------------------------------------------------------------------------------------------------


def nft_force_on_itself(function, q: float, v_old, ideal, t) -> torch.Tensor:
    """Force of `function` at no drift and r = q everywhere on the states x = 1, whose E[x_0|x] is that of `ideal`."""
    v, ones = v_old.clone().requires_grad_(), torch.ones_like(v_old)
    x_0 = predict_x_0(ones, ideal, t)
    loss = function(v, v_old, ones, x_0, t, torch.full((len(t),), q, dtype=F64), beta=1.0, weight=flat_weight)
    return -torch.autograd.grad(loss.sum(), v)[0] / (2 * t[:, None] ** 2)


def aggregated_force(std: float, v_old) -> torch.Tensor:
    """Force of velocity matching on the target v_old - G, with G from eight of the model's samples that all score the same."""
    samples = std * normal(1, 8, 1)
    direction = aggregate_direction(torch.full((1, 8), 0.3, dtype=F64), samples).value
    v = v_old.clone().requires_grad_()
    loss = velocity_matching(v, guided_velocity(v_old, direction.expand_as(v_old)))
    return -torch.autograd.grad(loss.sum(), v)[0] / 2


def collapse(force, iterations: int = 100) -> list[float]:
    """Endpoint std after 0..iterations updates A += .2 force; force(std, v_old, ideal, t) of the tabulated velocities A x at x = 1."""
    times = time_grid(10, shift=3.0, dtype=F64)
    t, ones = times[:-1], torch.ones(10, 1, dtype=F64)
    gain, out = gaussian_gain(t, 1.0)[:, None], []
    for _ in range(iterations + 1):
        mean, _ = euler_step(ones, gain, t, times[1:])
        out.append(float(mean.prod().abs()))
        gain = gain + 0.2 * force(out[-1], gain, gaussian_gain(t, out[-1] ** 2)[:, None], t)
    return out


COLLAPSE = [
    ("positive", 0.5, "0.5224", "0.0011"),
    ("negative", 0.5, "1.194", "7.7e+10"),
    ("both", 0.5, "0.8330", "0.8330"),
    ("both", 0.7, "0.581", "0.0087"),
    ("both", 0.3, "1.118", "38"),
]


@pytest.mark.parametrize(("name", "q", "at_20", "at_100"), COLLAPSE)
def test_collapse_a_branch_alone_contracts_or_explodes_and_both_rest_at_q_one_half_only(name, q, at_20, at_100):
    """[derived] Trained on its own samples without reward, N(0, 1) from ten Euler steps starts at std .8330 (Euler's error is
    the first e); the std follows the recursion with c = q, -(1 - q), 2q - 1 and prints the table's numbers."""
    std = collapse(lambda s, v_old, ideal, t: nft_force_on_itself(branches()[name], q, v_old, ideal, t))
    c = {"positive": q, "negative": -(1 - q), "both": 2 * q - 1}[name]
    np.testing.assert_allclose(std, collapse_recursion(c, 100), rtol=1e-6)
    for value, text in ((std[0], "0.8330"), (std[20], at_20), (std[100], at_100)):
        assert printed(value, text), (value, text)


def test_collapse_aggregation_first_holds_where_there_is_no_reward():
    """[derived] Equal rewards: G = 0 exactly, the target is v_old, the force 0, and the std stays .8330 to the bit."""
    std = collapse(lambda s, v_old, ideal, t: aggregated_force(s, v_old))
    assert set(std) == {std[0]}
    assert printed(std[0], "0.8330")


# ---- two updates on one frozen target ---------------------------------------------------------------------------------


@for_all(seeds, st.integers(2, 6), st.integers(1, 5))
def test_two_updates_force_of_the_first_is_guidance_of_the_second_guidance_minus_drift(seed, k, dim):
    """[paper] -D/2 times the gradient at v = v_old + d is h_G - d with h_G = -G; at d = 0 every state's loss is 1."""
    rewards, x_0, v_old = normal(2, k, seed=seed), normal(2, k, dim, seed=seed + 1), normal(2 * k, dim, seed=seed + 2)
    direction = aggregate_direction(rewards, x_0).value.repeat_interleave(k, 0)
    target = guided_velocity(v_old, direction)
    for d in (torch.zeros_like(v_old), normal(2 * k, dim, seed=seed + 3)):
        v = (v_old + d).requires_grad_()
        loss = velocity_matching(v, target)
        close(-dim / 2 * torch.autograd.grad(loss.sum(), v)[0], -direction - d)
        if not d.any():
            close(loss.detach(), torch.ones_like(loss), rtol=1e-12, atol=1e-12)


def sgd(theta, phi, theta_old, direction, lr: float, keep) -> torch.Tensor:
    """theta after one plain gradient step of the linear model v = phi theta toward its frozen target."""
    theta = theta.clone().requires_grad_()
    loss = velocity_matching(phi @ theta, guided_velocity(phi @ theta_old, direction))
    return (theta - lr * torch.autograd.grad(masked_mean(loss, keep), theta)[0]).detach()


@for_all(seeds, st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.floats(0.01, 0.3))
def test_two_updates_of_a_linear_model_on_two_windows_have_their_closed_form(seed, n_a, n_b, dim, lr):
    """[derived] Force 1 = (2/n_A D) Phi_A^T h_A; drift on B d_B = (2 lr/n_A D) Phi_B Phi_A^T h_A; force 2 =
    (2/n_B D) Phi_B^T (h_B - d_B), masked rows giving 0 and staying in n_B. One output: D = 1."""
    phi_a, phi_b, theta = normal(n_a, 4, seed=seed), normal(n_b, 4, seed=seed + 1), normal(4, dim, seed=seed + 2)
    h_a, h_b = normal(n_a, dim, seed=seed + 3), normal(n_b, dim, seed=seed + 4)
    everyone = torch.ones(n_a, dtype=torch.bool)
    after_a = sgd(theta, phi_a, theta, -h_a, lr, everyone)
    close((after_a - theta) / lr, 2 / (n_a * dim) * phi_a.T @ h_a, rtol=1e-7, atol=1e-10)
    d_b = phi_b @ (after_a - theta)
    close(d_b, 2 * lr / (n_a * dim) * phi_b @ phi_a.T @ h_a)
    for keep in (torch.ones(n_b, dtype=torch.bool), normal(n_b, seed=seed + 5) > 0):
        after_b = sgd(after_a, phi_b, theta, -h_b, lr, keep)
        force = phi_b.T @ (keep[:, None] * (h_b - d_b))
        close((after_b - after_a) / lr, 2 / (n_b * dim) * force, rtol=1e-7, atol=1e-10)


@for_all(seeds, st.integers(1, 6), st.integers(1, 3), st.integers(1, 4), st.floats(0.01, 0.3))
def test_two_updates_on_the_same_window_contract_toward_the_target(seed, n, dim, updates, lr):
    """[derived] After two: v - v_old = [I - (I - K)^2] h = 2 K h - K^2 h, K = (2 lr/n D) Phi Phi^T; after m: I - (I - K)^m."""
    phi, theta, h = normal(n, 4, seed=seed), normal(4, dim, seed=seed + 1), normal(n, dim, seed=seed + 2)
    kernel, everyone = 2 * lr / (n * dim) * phi @ phi.T, torch.ones(n, dtype=torch.bool)
    rest = torch.eye(n, dtype=F64) - kernel
    after, steps = theta, []
    for _ in range(max(updates, 2)):
        after = sgd(after, phi, theta, -h, lr, everyone)
        steps.append(phi @ (after - theta))
    close(steps[1], 2 * kernel @ h - kernel @ kernel @ h)
    for m, drift in enumerate(steps, 1):
        close(drift, h - torch.linalg.matrix_power(rest, m) @ h)


# ---- the noise law of small groups ------------------------------------------------------------------------------------


def cosines(k: int, d: int, n: int) -> np.ndarray:
    """cos(G, a) of n groups of k samples x = m + S z, z ~ N(0, I_d), R = c a.x + b for a random unit a."""
    z, a = normal(n, k, d, seed=k * d), torch.nn.functional.normalize(normal(n, d, seed=k + d), dim=1)
    x = 0.8 * z + normal(d, seed=3)
    g = aggregate_direction(2.5 * torch.einsum("nkd,nd->nk", x, a) - 4, x).value
    return torch.nn.functional.cosine_similarity(g, a, dim=1).numpy()


@pytest.mark.parametrize(
    ("k", "d", "text"), [(8, 16, "0.3182"), (2, 10, "0.1000"), (24, 4, "0.8846"), (4, 64, "0.0455")]
)
def test_noise_law_of_small_groups(k, d, text):
    """[derived] C = sum_i s_i (x_i - xbar)/k with s_i = a.(x_i - xbar): along a |s|^2, across it |s| N(0, I_(D-1)); hence
    cos^2 = chi2_(k-1)/(chi2_(k-1) + chi2_(D-1)) ~ Beta((k - 1)/2, (D - 1)/2), with mean (k - 1)/(k + D - 2), and cos > 0.
    Mean and variance within four standard errors; Kolmogorov-Smirnov against the whole law."""
    n, law = 3000, stats.beta((k - 1) / 2, (d - 1) / 2)
    cos = cosines(k, d, n)
    squares = cos**2
    assert (cos > 0).all()
    assert printed((k - 1) / (k + d - 2), text)
    assert law.mean() == pytest.approx((k - 1) / (k + d - 2), rel=1e-12)
    assert abs(squares.mean() - law.mean()) < 4 * law.std() / n**0.5
    fourth = float(law.stats("k")) + 3
    assert abs(squares.var() - law.var()) < 4 * law.var() * ((fourth - 1) / n) ** 0.5
    assert stats.kstest(squares, law.cdf).pvalue > 0.01


# ---- on-policy --------------------------------------------------------------------------------------------------------

KERNELS = {"flow": flow_sde_step, "dance": dance_sde_step, "cps": cps_step}


def row_by_row(params, x_t, t, cond):
    """Elementwise, so that the bits of a row do not depend on how many rows share its call."""
    return torch.tanh(params["a"] * x_t) * (1 + t[:, None]) + cond["shift"][:, None]


def replayed(velocity, tr, j: int, cond, kernel, size: int) -> torch.Tensor:
    """log_prob of the stored transitions of step j, everything computed on at most `size` rows at a time."""
    parts = []
    for i in range(0, len(tr.x_0), size):
        rows = slice(i, i + size)
        x_t, x_next, c = tr.x_t[rows, j], tr.x_next[rows, j], {"shift": cond["shift"][rows]}
        v = velocity({"a": torch.tensor(0.8, dtype=F64)}, x_t, tr.t[j].expand(len(x_t)), c)
        mean, std = kernel(x_t, v, tr.t[j], tr.t_next[j])
        parts.append(transition_log_prob(x_next, mean, std))
    return torch.cat(parts)


@pytest.mark.parametrize("name", KERNELS)
@for_all(b=st.integers(1, 6), size=st.integers(1, 7), inner=st.integers(1, 7), seed=seeds)
def test_on_policy_law_the_first_ratio_is_exactly_1_for_any_chunking(name, b, size, inner, seed):
    """[derived] Stored (x_t, x_next) scored as stored: the log-ratio is exactly 0 whatever the chunks of rollout and replay, so
    the clipped loss is exactly -A. Only steps with noise have a density."""
    kernel, cond = KERNELS[name], {"shift": normal(b, seed=seed)}
    velocity, times = chunked(row_by_row, size=inner), time_grid(4, shift=3.0, dtype=F64)
    ids, params = torch.arange(b) * 7 + seed, {"a": torch.tensor(0.8, dtype=F64)}
    tr = rollout(velocity, params, cond, times, seeds=ids, shape=(5,), step=kernel)
    advantages = normal(b, seed=seed + 1)
    for j in range(4):
        if float(tr.std[0, j]) == 0:
            assert (name, j) == ("cps", 3)
            continue
        log_prob = replayed(row_by_row, tr, j, cond, kernel, size)
        assert torch.equal(torch.exp(log_prob - tr.log_prob[:, j]), torch.ones(b, dtype=F64))
        assert torch.equal(clipped_ratio(log_prob, tr.log_prob[:, j], advantages), -advantages)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_on_policy_law_round_first_then_score(half):
    """[derived] What is stored in half precision is scored as it was stored: then the ratio is exactly 1; scored before rounding
    it is off by more than the clip ranges of 1e-5."""
    x_t = normal(6, 40, dtype=half).float()
    mean, std = flow_sde_step(x_t, normal(6, 40, seed=1, dtype=torch.float32), 0.6, 0.4)
    exact = mean + std[:, None] * normal(6, 40, seed=2, dtype=torch.float32)
    stored = exact.to(half)
    old = transition_log_prob(stored.float(), mean, std)
    for size in (1, 4, 6):
        pieces = zip(stored.split(size), mean.split(size), std.split(size))
        new = torch.cat([transition_log_prob(a.float(), m, s) for a, m, s in pieces])
        assert torch.equal(torch.exp(new - old), torch.ones(6))
    late = torch.exp(old - transition_log_prob(exact, mean, std))
    assert float((late - 1).abs().max()) > 1e-5


# ---- negative controls ------------------------------------------------------------------------------------------------


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
    assert not printed(0.5224, "0.5223")
    assert not printed(38.6, "38")


# A wrong variant is a function of the right one, which it may call.


def times(factor: float):
    return lambda right: lambda *args, **options: factor * right(*args, **options)


def replaced_by(other):
    return lambda right: other


def winners_and_losers_swapped(nft):
    return lambda v, v_old, x_t, x_0, t, r, **options: nft(v, v_old, x_t, x_0, t, 1 - r, **options)


def not_divided_by_beta(nft):
    return lambda *args, beta, **options: beta * nft(*args, beta=beta, **options)


def squared(weight):
    return lambda error: weight(error) ** 2


def unbiased(covariance):
    return lambda rewards, x_0: rewards.shape[1] / (rewards.shape[1] - 1) * covariance(rewards, x_0)


def missing_as_zero(covariance):
    """Missing rewards count as zeros."""
    return lambda rewards, x_0: covariance(rewards.nan_to_num(0.0), x_0)


def plus(guided_velocity):
    return lambda v_old, direction: v_old + direction


def shrinking(guided_velocity):
    return lambda v_old, direction: 0.99 * v_old - direction


def uncentred(aggregate_direction):
    def direction(rewards, x_0):
        c = (rewards[..., None] * x_0).mean(1)
        return Direction(c / c.square().mean(1, keepdim=True).sqrt(), torch.ones(len(c), dtype=torch.bool))

    return direction


def over_the_kept(masked_mean):
    return lambda values, keep: masked_mean(values, keep) * len(keep) / max(int(keep.sum()), 1)


def centred_over_the_batch(log_prob):
    return lambda *args: log_prob(*args) - log_prob(*args).mean()


def per_unit_of_time(step):
    return lambda x_t, v, t, t_next: (step(x_t, v, t, t_next)[0], step(x_t, v, t, t_next)[1] * (t - t_next) ** 0.5)


def twice(ema):
    return lambda old, new, *, decay: ema(ema(old, new, decay=decay), new, decay=decay)


def backwards(interpolate):
    return lambda x_0, noise, t: interpolate(noise, x_0, t)


def from_the_wrong_end(predict_x_0):
    return lambda x_t, v, t: x_t + (1 - t) * v


SCORE = partial(test_score_is_minus_the_expected_noise_over_t, 0.5)
FIRST_STEP = test_flow_sde_first_step_inflates_the_variance_by_an_error_that_no_grid_removes
MATCHING = partial(test_velocity_matching_is_minimised_by_the_conditional_mean, 0.5)
LEMMA_1 = test_lemma_1_both_branches_lie_on_one_line
FORCE = partial(test_proposition_1_force_is_guidance_plus_a_self_consuming_term_minus_restoration, t=0.5, beta=2.0)
NO_REWARD = test_proposition_1_without_reward_only_the_self_consuming_term_is_left
FREE_OF_BETA = test_proposition_1_with_the_published_weight_is_free_of_beta_without_drift
REWEIGHTED = partial(test_proposition_1_with_the_published_weight_holds_for_the_reweighted_posterior, t=0.5, beta=0.1)
PROPOSITION_2 = test_proposition_2_the_loss_is_linear_guidance_plus_quadratic_restoration
LEMMA_2 = test_lemma_2_covariance_is_the_derivative_of_the_tilted_mean
TILTED = test_lemma_2_the_target_velocity_is_that_of_the_tilted_law_at_pure_noise
MINUS = partial(test_covariance_with_the_velocity_is_minus_that_with_the_data_at_every_time, 0.7)
SPLIT = test_total_covariance_splits_into_within_and_between_states
STATEWISE = test_total_covariance_the_statewise_tilt_of_the_velocity_is_the_covariance_at_the_state
SIX_ATOMS = test_total_covariance_numbers_of_six_atoms
VANISHES = test_total_covariance_the_within_state_part_vanishes_toward_the_data
GAUSSIAN = partial(test_total_covariance_of_a_linear_reward_on_gaussian_data, 0.5)
LAG = partial(test_ema_lag_is_a_fixed_multiple_of_the_drift, 0.9, 9)
LAG_N = test_ema_lag_after_n_updates_from_none
COLLAPSES = test_collapse_a_branch_alone_contracts_or_explodes_and_both_rest_at_q_one_half_only
HOLDS = test_collapse_aggregation_first_holds_where_there_is_no_reward
FORCES = test_two_updates_force_of_the_first_is_guidance_of_the_second_guidance_minus_drift
TWO_WINDOWS = test_two_updates_of_a_linear_model_on_two_windows_have_their_closed_form
ONE_WINDOW = test_two_updates_on_the_same_window_contract_toward_the_target
NOISE_LAW = partial(test_noise_law_of_small_groups, 8, 16, "0.3182")
RATIO_1 = partial(test_on_policy_law_the_first_ratio_is_exactly_1_for_any_chunking, name="flow")
ROUND_FIRST = partial(test_on_policy_law_round_first_then_score, torch.bfloat16)

WRONG = [  # (name in this file, its wrong variant, the statement that must fail)
    ("predict_noise", times(-1), SCORE),
    ("flow_sde_step", per_unit_of_time, FIRST_STEP),
    ("velocity_matching", times(2), MATCHING),
    ("nft_positive", replaced_by(nft_negative), LEMMA_1),
    ("nft_negative", times(-1), LEMMA_1),
    ("nft_positive", not_divided_by_beta, FORCE),
    ("nft_negative", times(2), FORCE),
    ("nft", times(2), FORCE),
    ("nft", winners_and_losers_swapped, FORCE),
    ("nft", not_divided_by_beta, FORCE),
    ("nft", replaced_by(nft_positive), NO_REWARD),
    ("nft", not_divided_by_beta, FREE_OF_BETA),
    ("inverse_abs_error", squared, FREE_OF_BETA),
    ("inverse_abs_error", squared, REWEIGHTED),
    ("inverse_abs_error", replaced_by(flat_weight), REWEIGHTED),
    ("nft_negative", times(-1), REWEIGHTED),
    ("nft", winners_and_losers_swapped, PROPOSITION_2),
    ("nft", times(2), PROPOSITION_2),
    ("nft_positive", not_divided_by_beta, PROPOSITION_2),
    ("reward_covariance", times(-1), LEMMA_2),
    ("reward_covariance", unbiased, LEMMA_2),
    ("reward_covariance", missing_as_zero, LEMMA_2),
    ("reward_covariance", times(2), TILTED),
    ("guided_velocity", plus, TILTED),
    ("interpolate", backwards, MINUS),
    ("reward_covariance", times(-1), MINUS),
    ("reward_covariance", times(2), SPLIT),
    ("predict_x_0", from_the_wrong_end, SPLIT),
    ("guided_velocity", plus, partial(STATEWISE, 1.0)),
    ("predict_x_0", from_the_wrong_end, partial(STATEWISE, 0.2)),
    ("reward_covariance", unbiased, SIX_ATOMS),
    ("reward_covariance", unbiased, VANISHES),
    ("predict_x_0", from_the_wrong_end, GAUSSIAN),
    ("ema", twice, LAG),
    ("ema", twice, LAG_N),
    ("nft_positive", replaced_by(nft), partial(COLLAPSES, *COLLAPSE[0])),
    ("nft_negative", replaced_by(nft), partial(COLLAPSES, *COLLAPSE[1])),
    ("nft", replaced_by(nft_positive), partial(COLLAPSES, *COLLAPSE[2])),
    ("nft", winners_and_losers_swapped, partial(COLLAPSES, *COLLAPSE[3])),
    ("nft", times(2), partial(COLLAPSES, *COLLAPSE[4])),
    ("aggregate_direction", uncentred, HOLDS),
    ("guided_velocity", shrinking, HOLDS),
    ("guided_velocity", plus, FORCES),
    ("velocity_matching", times(2), FORCES),
    ("guided_velocity", plus, TWO_WINDOWS),
    ("velocity_matching", times(2), TWO_WINDOWS),
    ("masked_mean", over_the_kept, TWO_WINDOWS),
    ("velocity_matching", times(2), ONE_WINDOW),
    ("guided_velocity", plus, ONE_WINDOW),
    ("aggregate_direction", uncentred, NOISE_LAW),
    ("transition_log_prob", centred_over_the_batch, RATIO_1),
    ("clipped_ratio", times(-1), RATIO_1),
    ("transition_log_prob", centred_over_the_batch, ROUND_FIRST),
]


def named(row) -> str:
    name, wrong, statement = row
    what = wrong.__qualname__.partition(".")[0]
    return f"{name}-{what}-{getattr(statement, 'func', statement).__name__.removeprefix('test_')}"


@pytest.mark.parametrize(("name", "wrong", "statement"), WRONG, ids=map(named, WRONG))
def test_control_a_wrong_sign_or_factor_fails_the_statement(name, wrong, statement, monkeypatch):
    monkeypatch.setitem(globals(), name, wrong(globals()[name]))
    with pytest.raises(AssertionError):
        statement()


def test_control_every_statement_has_a_wrong_variant():
    tests = {name for name in globals() if name.startswith("test_") and "control" not in name}
    assert {getattr(row[2], "func", row[2]).__name__ for row in WRONG} == tests


def test_control_every_test_belongs_to_a_statement_of_the_table():
    words = [w for line in __doc__.splitlines() if line.startswith("|") for w in re.findall(r"`(\w+)`", line)]
    tests = [name.removeprefix("test_") for name in globals() if name.startswith("test_") and "control" not in name]
    assert [name for name in tests if not name.startswith(tuple(words))] == []
    assert [w for w in words if w != "control" and not any(name.startswith(w) for name in tests)] == []
