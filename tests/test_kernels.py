"""Conversions, kernels and densities of `diffrl.kernels`, as `diffrl.sampling` offers them."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import F64, affine_endpoint_std, gaussian_gain, normal, refuses
from scipy.stats import linregress
from strategies import latent_shapes, pairs_of_latents, seeds, time_pairs

from diffrl.checks import require_rows
from diffrl.sampling import (
    Past,
    cps_step,
    dance_sde_step,
    dpm2_step,
    euler_step,
    flow_sde_step,
    interpolate,
    latent_mean,
    latent_sum,
    predict_noise,
    predict_x_0,
    rollout,
    time_grid,
    transition_kl,
    transition_log_prob,
)

HALVES = (torch.bfloat16, torch.float16)
KERNELS = {
    "euler": euler_step,
    "flow": flow_sde_step,
    "dance": dance_sde_step,
    "cps": cps_step,
}
NOISY = ("flow", "dance", "cps")
EVERY = {**KERNELS, "dpm2": dpm2_step}


def one(value: float) -> torch.Tensor:
    return torch.tensor([[value]], dtype=F64)


def order_of(steps, errors) -> tuple[float, float]:
    """The order p of errors ~ steps^-p by least squares in logarithms, and two standard errors of it."""
    fit = linregress(np.log(steps), np.log(errors))
    return -fit.slope, 2 * fit.stderr


def gaussian(params, x, t, cond):
    """The exact velocity of data N(0, .49), elementwise."""
    return gaussian_gain(t, 0.49).reshape(-1, *[1] * (x.ndim - 1)) * x


def gaussian_flow(x, t: float, t_next: float):
    """Where the probability-flow ODE of `gaussian` takes x from t to t_next: x sigma(t_next)/sigma(t)."""
    return x * math.sqrt(((1 - t_next) ** 2 * 0.49 + t_next**2) / ((1 - t) ** 2 * 0.49 + t**2))


# ---- conversions ------------------------------------------------------------------------------------------------------


@given(pairs_of_latents(), st.data())
def test_conversions_invert_the_path(pair, data):
    x_0, noise = pair
    t, _ = data.draw(time_pairs(len(x_0)))
    x_t, v = interpolate(x_0, noise, t), noise - x_0
    by_row = torch.stack([(1 - float(s)) * a + float(s) * e for s, a, e in zip(t, x_0, noise)])
    torch.testing.assert_close(x_t, by_row, rtol=0, atol=1e-12)
    torch.testing.assert_close(predict_x_0(x_t, v, t), x_0, rtol=0, atol=1e-12)
    torch.testing.assert_close(predict_noise(x_t, v, t), noise, rtol=0, atol=1e-12)


def test_the_path_runs_from_data_to_noise_with_velocity_noise_minus_data():
    x_0, noise = normal(2, 3), normal(2, 3, seed=1)
    assert torch.equal(interpolate(x_0, noise, 0.0), x_0)
    assert torch.equal(interpolate(x_0, noise, 1.0), noise)
    slope = (interpolate(x_0, noise, 0.5 + 1e-4) - interpolate(x_0, noise, 0.5 - 1e-4)) / 2e-4
    torch.testing.assert_close(slope, noise - x_0, rtol=0, atol=1e-10)


def test_a_python_time_keeps_all_its_digits_in_float64():
    # A time that passes through float32 on its way is another time. https://github.com/X-GenGroup/Flow-Factory/pull/61
    assert interpolate(one(0.0), one(1.0), 0.6).item() == 0.6
    assert interpolate(one(0.0), one(1.0), torch.tensor(0.6, dtype=F64)).item() == 0.6
    assert euler_step(one(0.0), one(-1.0), 0.3, 0.1)[0].item() == 0.3 - 0.1


@pytest.mark.parametrize("function", [interpolate, predict_x_0, predict_noise])
def test_conversions_refuse(function):
    x = torch.zeros(2, 3)
    with refuses("(2, 3)", "(2, 1)"):
        function(x, torch.zeros(2, 1), 0.5)
    with refuses("t must be in [0, 1]", "1.5"):
        function(x, x, 1.5)
    with refuses("t must be in [0, 1]", "-0.5"):
        function(x, x, torch.tensor([0.5, -0.5]))
    with refuses("nan"):
        function(x, x, math.nan)
    with refuses("(2,)", "(3,)"):
        function(x, x, torch.full((3,), 0.5))
    with refuses("t must be a number", "'half'"):
        function(x, x, "half")
    with refuses("floating point", "int64"):
        function(x.long(), x.long(), 0.5)


# ---- kernels ----------------------------------------------------------------------------------------------------------


def by_hand(name: str, x: float, v: float, t: float, t_next: float, eta: float) -> tuple[float, float]:
    """mean and std in Python floats, from x - D v + (sigma^2/2) score D with score = -(x + (1 - t) v)/t."""
    delta = t - t_next
    if name == "cps":
        angle = eta * math.pi / 2
        x_0, noise = x - t * v, x + (1 - t) * v
        return (1 - t_next) * x_0 + t_next * math.cos(angle) * noise, t_next * math.sin(angle)
    sigma = {
        "euler": 0.0,
        "flow": eta * math.sqrt(t / (1 - (t_next if t == 1 else t))),
        "dance": eta,
    }[name]
    score = -(x + (1 - t) * v) / t
    return x - delta * v + sigma**2 / 2 * score * delta, sigma * math.sqrt(delta)


def with_eta(name: str, eta: float):
    return euler_step if name == "euler" else functools.partial(KERNELS[name], eta=eta)


@pytest.mark.parametrize("name", KERNELS)
@given(pair=pairs_of_latents(), eta=st.floats(0.05, 1.0), data=st.data())
def test_kernels_match_the_closed_form_for_every_rank_and_mixed_times(name, pair, eta, data):
    x, v = pair
    t, t_next = data.draw(time_pairs(len(x)))
    mean, std = with_eta(name, eta)(x, v, t, t_next)
    assert mean.shape == x.shape
    assert std.shape == (len(x),)
    for i in range(len(x)):
        for a, b, c in zip(x[i].flatten().tolist(), v[i].flatten().tolist(), mean[i].flatten().tolist()):
            expected, s = by_hand(name, a, b, float(t[i]), float(t_next[i]), eta)
            assert c == pytest.approx(expected, rel=1e-10, abs=1e-10)
            assert float(std[i]) == pytest.approx(s, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", EVERY)
def test_one_time_may_be_a_float_a_0d_tensor_or_a_row_each(name):
    x, v = normal(3, 2, 2), normal(3, 2, 2, seed=1)
    times = [(0.6, 0.4), (torch.tensor(0.6, dtype=F64), torch.tensor(0.4, dtype=F64))]
    times += [
        (torch.full((3,), 0.6, dtype=F64), torch.full((3,), 0.4, dtype=F64)),
        (0.6, torch.full((3,), 0.4).to(F64)),
    ]
    results = [EVERY[name](x, v, *pair) for pair in times]
    for mean, std in results[:3]:
        assert torch.equal(mean, results[0][0])
        assert torch.equal(std, results[0][1])
    torch.testing.assert_close(results[3][0], results[0][0], rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("kernel", "mean", "std", "log_prob"),
    [
        (flow_sde_step, 0.7530, 0.3834058, -0.0337772),
        (dance_sde_step, 0.8820, 0.1341641, 1.0807532),
        (cps_step, 0.5683282, 0.3804226, -0.3325281),
    ],
)
def test_golden_numbers_of_one_step(kernel, mean, std, log_prob):
    m, s = kernel(one(1.0), one(0.5), 0.6, 0.4)
    assert float(m) == pytest.approx(mean, abs=6e-8)
    assert float(s) == pytest.approx(std, abs=6e-8)
    assert float(transition_log_prob(one(0.9), m, s)) == pytest.approx(log_prob, abs=6e-8)


def test_golden_numbers_of_the_first_step():
    m, s = flow_sde_step(one(1.0), one(0.5), 1.0, 0.9)
    assert (float(m), float(s)) == pytest.approx((0.7050, 0.7), abs=1e-12)
    m, s = dance_sde_step(one(1.0), one(0.5), 1.0, 0.9)
    assert (float(m), float(s)) == pytest.approx((0.9455, 0.0948683), abs=6e-8)


@given(st.floats(0.0, 0.99), st.floats(0.01, 2.0))
def test_flow_sde_first_step_has_std_eta_whatever_the_grid(t_next, eta):
    assert float(flow_sde_step(one(1.0), one(0.3), 1.0, t_next, eta=eta)[1]) == pytest.approx(eta, rel=1e-12)


@given(pairs_of_latents(), st.data())
def test_kernels_without_noise_are_euler(pair, data):
    x, v = pair
    t, t_next = data.draw(time_pairs(len(x)))
    expected, _ = euler_step(x, v, t, t_next)
    for name in ("flow", "dance", "cps"):
        mean, std = KERNELS[name](x, v, t, t_next, eta=0.0)
        torch.testing.assert_close(mean, expected, rtol=1e-10, atol=1e-10)
        assert torch.equal(std, torch.zeros_like(t))


TABLE = {  # exact endpoint std of Gaussian data of std .700, shift 1
    10: (0.6121, 0.6756, 0.6214, 0.5273),
    100: (0.6907, 0.7018, 0.6917, 0.5857),
    4000: (0.6998, 0.7009, 0.6998, 0.5961),
}


@pytest.mark.parametrize("steps", TABLE)
def test_endpoint_std_of_every_kernel(steps):
    kernels = (euler_step, flow_sde_step, dance_sde_step, functools.partial(cps_step, eta=0.7))
    got = [affine_endpoint_std(k, time_grid(steps, dtype=F64), 0.49) for k in kernels]
    assert got == pytest.approx(TABLE[steps], abs=5.1e-5)


def test_marginals_are_kept_as_the_grid_refines_by_all_but_cps():
    def gap(step, steps):
        return abs(affine_endpoint_std(step, time_grid(steps, dtype=F64), 0.49) - 0.7)

    for step in (euler_step, dance_sde_step):  # first order: half the step, half the error
        assert gap(step, 400) == pytest.approx(gap(step, 200) / 2, rel=0.03)
    assert gap(flow_sde_step, 4000) < gap(flow_sde_step, 400) < 0.0025
    assert gap(functools.partial(cps_step, eta=0.7), 4000) > 0.1


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("eta", [0.3, 0.7, 1.0])
def test_the_bias_of_dance_s_std_shrinks_like_1_over_steps(eta, shift):
    steps = [100, 200, 400, 800]
    grids = [time_grid(n, shift=shift, dtype=F64) for n in steps]
    bias = [affine_endpoint_std(functools.partial(dance_sde_step, eta=eta), g, 0.49) - 0.7 for g in grids]
    order, error = order_of(steps, np.abs(bias))
    assert order == pytest.approx(1, abs=0.02)  # measured .991 to .997
    assert error < 0.01


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize(("eta", "limit"), [(0.3, 0.019), (0.7, 0.103), (0.9, 0.167)])
def test_cps_never_reaches_the_data_s_std(eta, limit, shift):
    steps = [500, 1000, 2000, 4000]
    grids = [time_grid(n, shift=shift, dtype=F64) for n in steps]
    gap = [0.7 - affine_endpoint_std(functools.partial(cps_step, eta=eta), g, 0.49) for g in grids]
    assert min(gap) > limit  # what is missing does not vanish: the order of its decay is near 0, not 1
    assert order_of(steps, gap)[0] < 0.15


def mixture(params, x, t, cond):
    """The exact velocity, elementwise, of .4 N(-1, .3^2) + .6 N(.8, .5^2): E[eps|x] - E[x_0|x] by components."""
    t = t.to(F64).reshape(-1, *[1] * x.ndim)
    variance = ((1 - t) * SPREADS) ** 2 + t**2
    gap = x[..., None] - (1 - t) * CENTRES
    share = torch.softmax(SHARES.log() - variance.log() / 2 - gap**2 / (2 * variance), -1)
    return (share * (t * gap / variance - CENTRES - (1 - t) * SPREADS**2 * gap / variance)).sum(-1)


SHARES, CENTRES, SPREADS = (torch.tensor(pair, dtype=F64) for pair in ((0.4, 0.6), (-1.0, 0.8), (0.3, 0.5)))


def kolmogorov_distance(x: torch.Tensor, t: float) -> float:
    """sup |empirical - exact| distribution function of the mixture's marginal at time t."""
    x = x.flatten().sort().values
    scale = (((1 - t) * SPREADS) ** 2 + t**2).sqrt()
    exact = (SHARES * torch.special.ndtr((x[:, None] - (1 - t) * CENTRES) / scale)).sum(1)
    below = torch.arange(len(x), dtype=F64) / len(x)
    return float(torch.maximum(below + 1 / len(x) - exact, exact - below).max())


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("name", EVERY)
def test_marginals_of_a_mixture_along_the_whole_rollout(name, shift):
    # 10,000 samples: above 2.23/sqrt(n) with probability 2 exp(-2 2.23^2) = 1e-4 where the law is exact
    times = time_grid(200, shift=shift, dtype=F64)
    tr = rollout(
        mixture, {}, {}, times, seeds=torch.arange(4), shape=(2500,), step=EVERY[name], keep=[49, 99, 149, 199]
    )
    distances = [kolmogorov_distance(tr.x_next[:, j], float(tr.t_next[j])) for j in range(4)]
    if name == "cps":  # the negative control: its samples are of another law
        assert distances[-1] > 0.0223
    else:
        assert max(distances) < 0.0223


@pytest.mark.parametrize("name", EVERY)
def test_the_spread_of_real_rollouts_is_the_affine_recursion_s(name):
    times, n = time_grid(20, shift=3.0, dtype=F64), 40_000
    tr = rollout(gaussian, {}, {}, times, seeds=torch.arange(4), shape=(n // 4,), step=EVERY[name], keep=[])
    if name == "dpm2":  # two-step, so the recursion does not hold; its own error is small
        exact, slack = 0.7, 0.01
    else:
        exact, slack = affine_endpoint_std(EVERY[name], times, 0.49), 0.0
    assert float(tr.x_0.std()) == pytest.approx(exact, abs=4 * exact / math.sqrt(2 * n) + slack)


def test_std_of_the_last_step():
    # Is there noise in the last step? It depended on a flag of the scheduler. https://github.com/irom-princeton/dppo/issues/42
    x, v, t = normal(2, 3), normal(2, 3, seed=1), 0.25
    assert float(flow_sde_step(x, v, t, 0.0, eta=0.7)[1][0]) == pytest.approx(0.7 * t / math.sqrt(1 - t), rel=1e-12)
    assert float(dance_sde_step(x, v, t, 0.0, eta=0.3)[1][0]) == pytest.approx(0.3 * math.sqrt(t), rel=1e-12)
    assert cps_step(x, v, t, 0.0)[1].tolist() == [0, 0]
    assert euler_step(x, v, t, 0.0)[1].tolist() == [0, 0]
    assert dpm2_step(x, v, t, 0.0, past=Past(x, torch.full((2,), 0.5)))[1].tolist() == [0, 0]


@pytest.mark.parametrize("name", EVERY)
def test_kernels_refuse(name):
    step, x = EVERY[name], torch.zeros(2, 3)
    with refuses("t_next must be < t", "0.5"):
        step(x, x, 0.5, 0.5)
    with refuses("t_next must be < t"):
        step(x, x, torch.tensor([0.5, 0.5]), torch.tensor([0.4, 0.6]))
    with refuses("t must be in [0, 1]", "1.25"):
        step(x, x, 1.25, 0.5)
    with refuses("t_next must be in [0, 1]", "-0.25"):
        step(x, x, 0.5, -0.25)
    with refuses("x_t (2, 3)", "v (1, 3)"):
        step(x, torch.zeros(1, 3), 0.5, 0.25)
    with refuses("batch axis"):
        step(torch.tensor(1.0), torch.tensor(1.0), 0.5, 0.25)
    with refuses("(2,)", "(3,)"):
        step(x, x, torch.full((3,), 0.5), 0.25)
    if name in NOISY:
        with refuses("eta", "-0.1"):
            step(x, x, 0.5, 0.25, eta=-0.1)
    if name == "cps":
        with refuses("eta", "1.5"):
            step(x, x, 0.5, 0.25, eta=1.5)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", EVERY)
def test_step_arithmetic_is_float32_or_better_whatever_comes_in(name, half):
    # Log-probabilities nan at every step of a half-precision model. https://github.com/yifan123/flow_grpo/issues/209
    x, v = normal(3, 4, dtype=half), normal(3, 4, seed=1, dtype=half)
    mean, std = EVERY[name](x, v, 0.75, 0.5)
    assert (mean.dtype, std.dtype) == (torch.float32, torch.float32)
    wide = EVERY[name](x.float(), v.float(), 0.75, 0.5)
    assert torch.equal(mean, wide[0])
    assert EVERY[name](x, v.double(), 0.75, 0.5)[0].dtype == F64


@pytest.mark.parametrize("half", HALVES)
def test_every_other_function_of_latents_is_float32_or_better(half):
    x, y, std = normal(3, 4, dtype=half), normal(3, 4, seed=1, dtype=half), torch.full((3,), 0.5, dtype=half)
    results = [f(x, y, 0.5) for f in (interpolate, predict_x_0, predict_noise)]
    results += [transition_log_prob(x, y, std), transition_kl(x, y, std), latent_mean(x), latent_sum(x)]
    assert {r.dtype for r in results} == {torch.float32}
    wide = (x.double(), y.double())
    results = [f(*wide, 0.5) for f in (interpolate, predict_x_0, predict_noise)]
    results += [transition_log_prob(*wide, std), transition_kl(*wide, std), latent_mean(wide[0]), latent_sum(wide[0])]
    assert {r.dtype for r in results} == {F64}


# ---- the second-order solver ------------------------------------------------------------------------------------------


def log_snr(t):
    return math.log((1 - t) / t)


def published_dpm2(x: float, m: float, m_past: float, t: float, t_next: float, t_past: float) -> float:
    """2211.01095's update in Python floats: sigma_n/sigma x - alpha_n (e^-h - 1) (m + (m - m_past)/(2 r)), r = h_past/h."""
    h, h_past = log_snr(t_next) - log_snr(t), log_snr(t) - log_snr(t_past)
    return t_next / t * x - (1 - t_next) * math.expm1(-h) * (m + (m - m_past) / (2 * (h_past / h)))


@given(pairs_of_latents(), st.data())
def test_dpm2_is_the_published_update_for_every_rank_and_mixed_times(pair, data):
    x, v = pair
    b = len(x)
    fractions = st.lists(st.floats(0.05, 0.95), min_size=3, max_size=3)
    times = [data.draw(fractions) for _ in range(b)]
    before = torch.tensor([a for a, _, _ in times], dtype=F64)
    now = before * torch.tensor([c for _, c, _ in times], dtype=F64)
    then = now * torch.tensor([c for _, _, c in times], dtype=F64)
    past = normal(*x.shape, seed=7)
    mean, std = dpm2_step(x, v, now, then, past=Past(past, before))
    assert torch.equal(std, torch.zeros(b, dtype=F64))
    for i in range(b):
        t = [float(now[i]), float(then[i]), float(before[i])]
        for a, c, p, got in zip(*(y[i].flatten().tolist() for y in (x, v, past, mean))):
            assert got == pytest.approx(published_dpm2(a, a - t[0] * c, p, *t), rel=1e-10, abs=1e-10)


def test_dpm2_golden_number():
    # t .8 -> .5 -> .2: h = h_past = log 4, so D = m + (m - m_past)/2 = 1.5, mean = .4 * 1 + .6 * 1.5
    mean, _ = dpm2_step(one(1.0), one(0.0), 0.5, 0.2, past=Past(one(0.0), torch.tensor([0.8], dtype=F64)))
    assert mean.item() == pytest.approx(1.3, abs=1e-15)


def test_dpm2_is_first_order_where_the_second_has_no_limit_row_by_row():
    inf, nan = math.inf, math.nan
    now = torch.tensor([0.6, 1.0, 0.6, 0.6, 0.6, 0.9], dtype=F64)
    then = torch.tensor([0.4, 0.9, 0.4, 0.0, 0.4, 0.0], dtype=F64)
    before = torch.tensor([1.0, inf, inf, 0.8, 0.8, 1.0], dtype=F64)
    x, v, past = (normal(6, 3, seed=i) for i in range(3))
    past[1:3] = nan  # a row without a past holds anything
    mean, _ = dpm2_step(x, v.requires_grad_(), now, then, past=Past(past, before))
    euler, _ = euler_step(x, v, now, then)
    first = [0, 1, 2, 3, 5]
    assert torch.equal(mean[first], euler[first])
    assert float((mean[4] - euler[4]).detach().abs().max()) > 0.1
    torch.testing.assert_close(mean[[3, 5]], predict_x_0(x, v, now)[[3, 5]], rtol=0, atol=1e-15)
    mean.sum().backward()
    assert bool(torch.isfinite(v.grad).all())
    for i in range(6):  # a row does not depend on its batch
        alone, _ = dpm2_step(x[[i]], v[[i]], now[[i]], then[[i]], past=Past(past[[i]], before[[i]]))
        assert torch.equal(alone, mean[[i]])


@given(pairs_of_latents(), st.data())
def test_dpm2_without_a_past_is_euler_to_the_bit(pair, data):
    x, v = pair
    t, t_next = data.draw(time_pairs(len(x)))
    for got, expected in zip(dpm2_step(x, v, t, t_next, past=None), euler_step(x, v, t, t_next)):
        assert torch.equal(got, expected)


@given(st.floats(0.06, 0.9), st.floats(0.05, 0.95), st.floats(0.0, 0.95), seeds)
def test_dpm2_is_exact_for_a_prediction_that_does_not_move(t, before, then, seed):
    # x_0 = c at every state: the flow is the straight line through c, whatever the steps
    c, x = normal(2, 3, seed=seed), normal(2, 3, seed=seed + 1)
    before, then = t + before * (1 - t), then * t
    mean, _ = dpm2_step(x, (x - c) / t, t, then, past=Past(c, torch.full((2,), before, dtype=F64)))
    torch.testing.assert_close(mean, c + then / t * (x - c), rtol=0, atol=1e-11)


def linear_in_lambda(t: float, h: float) -> tuple[float, float, float]:
    """(dpm2's step, the exact solution, the first-order step with the prediction of the middle) from x = .4 at t over h in
    lambda, for the prediction m = .3 + .8 lambda, whose flow is (x/t)' = -m/t^2."""

    def time(lam):
        return 1 / (1 + math.exp(lam))

    def m(lam):
        return 0.3 + 0.8 * lam

    x, lam = 0.4, log_snr(t)
    then, before = time(lam + h), time(lam - 0.7 * h)
    past = Past(one(m(lam - 0.7 * h)), torch.tensor([before], dtype=F64))
    mean, _ = dpm2_step(one(x), one((x - m(lam)) / t), t, then, past=past)
    exact = then / t * x + (1 - then) * (m(lam + h) - 0.8 - math.exp(-h) * (m(lam) - 0.8))
    middle = then / t * x + (1 - then / t) * m(lam + h / 2)
    return float(mean), exact, middle


@pytest.mark.parametrize("t", [0.2, 0.5, 0.9])
def test_dpm2_extrapolates_a_prediction_linear_in_lambda_exactly_to_the_middle(t):
    # ... and holds it there over the step, which is why such a field is solved to third order per step, not exactly
    errors = []
    for h in (0.2, 0.1, 0.05, 0.025):
        mean, exact, middle = linear_in_lambda(t, h)
        assert mean == pytest.approx(middle, abs=1e-12)
        errors.append(abs(mean - exact))
    order, error = order_of([1, 2, 4, 8], errors)
    assert order == pytest.approx(3, abs=0.1)
    assert error < 0.1


def endpoint_errors(step, velocity, grids, exact) -> list[float]:
    """RMS distance of the endpoints of 50 rollouts from `exact`, which maps starts to ends."""
    start = normal(50, 1)
    ends = [rollout(velocity, {}, {}, grid, noise=start, step=step, keep=[]).x_0 for grid in grids]
    return [float((end - exact(start)).square().mean().sqrt()) for end in ends]


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_orders_of_convergence_inside_the_path(shift):
    # Measured on [.95, .05], with two standard errors: Euler .99 +- .01; dpm2 2.08 +- .03 (shift 1), 2.06 +- .02 (shift 3)
    steps = [32, 64, 128, 256]
    grids = [0.05 + 0.9 * time_grid(n, shift=shift, dtype=F64) for n in steps]
    errors = {
        step: endpoint_errors(step, gaussian, grids, lambda x: gaussian_flow(x, 0.95, 0.05))
        for step in (euler_step, dpm2_step)
    }
    for step, low, high in ((euler_step, 0.9, 1.1), (dpm2_step, 1.85, 2.2)):
        order, error = order_of(steps, errors[step])
        assert low < order - error
        assert order + error < high
    ratios = np.array(errors[euler_step]) / np.array(errors[dpm2_step])
    assert ratios.min() > 1.9
    assert ratios[-1] > 15


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_orders_of_convergence_from_noise_to_data(shift):
    """On the full grid steps in lambda never become small at the ends, which costs dpm2 a logarithm: D^2 log(1/D).

    Measured slopes from 128 to 1024 steps: Euler 1.00; dpm2 1.83 +- .01 (shift 1) and 1.72 +- .04 (shift 3), rising to 2,
    as n^2 times the error grows by the same amount with every doubling of n.
    """
    steps = [128, 256, 512, 1024]
    grids = [time_grid(n, shift=shift, dtype=F64) for n in steps]
    euler, dpm2 = (
        endpoint_errors(step, gaussian, grids, lambda x: gaussian_flow(x, 1.0, 0.0)) for step in (euler_step, dpm2_step)
    )
    assert order_of(steps, euler)[0] == pytest.approx(1, abs=0.02)
    order, error = order_of(steps, dpm2)
    assert order - error > 1.6
    assert order + error < 2
    growth = np.diff(np.array(dpm2) * np.array(steps) ** 2)
    assert growth.max() / growth.min() < 1.12
    assert all(a < b / 5 for a, b in zip(dpm2, euler))


def test_the_order_holds_for_a_flow_that_is_not_linear():
    def walk(x, steps=400):  # the classical fourth-order Runge-Kutta method
        h = -0.9 / steps
        for i in range(steps):
            t = torch.full((len(x),), 0.95 + i * h, dtype=F64)
            a = mixture({}, x, t, {})
            b = mixture({}, x + h / 2 * a, t + h / 2, {})
            c = mixture({}, x + h / 2 * b, t + h / 2, {})
            x = x + h / 6 * (a + 2 * b + 2 * c + mixture({}, x + h * c, t + h, {}))
        return x

    steps = [32, 64, 128, 256]
    grids = [0.05 + 0.9 * time_grid(n, dtype=F64) for n in steps]
    order, error = order_of(steps, endpoint_errors(dpm2_step, mixture, grids, walk))
    assert order == pytest.approx(2, abs=0.1)  # measured 2.05 +- .02
    assert error < 0.05


@pytest.mark.parametrize("half", HALVES)
def test_dpm2_arithmetic_is_float32_or_better_past_included(half):
    x, v, m = (normal(3, 4, seed=i, dtype=half) for i in range(3))
    t = torch.full((3,), 0.875, dtype=half)
    mean, std = dpm2_step(x, v, 0.75, 0.5, past=Past(m, t))
    assert (mean.dtype, std.dtype) == (torch.float32, torch.float32)
    wide = dpm2_step(x.float(), v.float(), 0.75, 0.5, past=Past(m.float(), t.float()))[0]
    assert torch.equal(mean, wide)
    exact = dpm2_step(x.double(), v.double(), 0.75, 0.5, past=Past(m.double(), t.double()))[0]
    torch.testing.assert_close(wide.double(), exact, rtol=1e-6, atol=1e-6)
    assert dpm2_step(x, v, 0.75, 0.5, past=Past(m.double(), t))[0].dtype == F64


def test_the_step_ratio_keeps_its_digits_in_float32():
    # neighbouring times: log-SNRs that differ in their last float32 digits
    times = [float(t) for t in torch.tensor([0.50002, 0.50001, 0.5])]
    x, m = torch.ones(1, 1), torch.zeros(1, 1)
    mean, _ = dpm2_step(x, x * 0, times[1], times[2], past=Past(m - 4e4, torch.tensor([times[0]])))
    exact = published_dpm2(1.0, 1.0, -4e4, times[1], times[2], times[0])
    assert float(mean) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize(
    ("past", "named"),
    [
        (Past(torch.zeros(2, 1), torch.ones(2)), ("x_t (2, 3)", "past_x_0 (2, 1)")),
        (Past(torch.zeros(2, 3), torch.ones(1)), ("past_t", "(2,)", "(1,)")),
        (Past(torch.zeros(2, 3), torch.tensor(1.0)), ("past_t", "(2,)")),
        (Past(torch.zeros(2, 3), 0.9), ("past_t", "0.9")),
        (Past(torch.zeros(2, 3, dtype=torch.long), torch.ones(2)), ("past_x_0", "int64")),
        (Past(torch.zeros(2, 3), torch.tensor([0.9, 0.5])), ("past.t must be in (t, 1]", "0.5")),
        (Past(torch.zeros(2, 3), torch.tensor([0.9, 0.25])), ("past.t must be in (t, 1]", "0.25")),
        (Past(torch.zeros(2, 3), torch.tensor([0.9, 1.25])), ("past.t must be in (t, 1]", "1.25")),
        (Past(torch.zeros(2, 3), torch.tensor([0.9, math.nan])), ("past.t must be in (t, 1]", "nan")),
        ((torch.zeros(2, 3), torch.ones(2)), ("Past(x_0, t)",)),
        (torch.zeros(2, 3), ("Past(x_0, t)",)),
    ],
)
def test_dpm2_refuses_a_past_that_is_none(past, named):
    x = torch.zeros(2, 3)
    with refuses(*named):
        dpm2_step(x, x, 0.5, 0.25, past=past)


# ---- densities --------------------------------------------------------------------------------------------------------


@given(pairs_of_latents(), st.floats(0.01, 3.0))
def test_log_prob_and_kl_match_torch_distributions(pair, scale):
    x, mean = pair
    std = scale * (1 + torch.arange(len(x), dtype=F64))
    wide = std.reshape(-1, *[1] * (x.ndim - 1)).expand_as(x)
    exact = torch.distributions.Normal(mean, wide).log_prob(x).reshape(len(x), -1)
    torch.testing.assert_close(transition_log_prob(x, mean, std), exact.mean(1), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        transition_log_prob(x, mean, std, reduce=latent_sum), exact.sum(1), rtol=1e-10, atol=1e-10
    )
    p, q = torch.distributions.Normal(x, wide), torch.distributions.Normal(mean, wide)
    kl = torch.distributions.kl_divergence(p, q).reshape(len(x), -1)
    torch.testing.assert_close(transition_kl(x, mean, std), kl.mean(1), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(transition_kl(x, mean, std, reduce=latent_sum), kl.sum(1), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", NOISY)
def test_log_prob_and_kl_of_every_step_of_a_grid_match_torch_distributions(name, rank, shift):
    shape = (3, *(2, 3, 1, 2, 2)[:rank])
    x, v, other, z = (normal(*shape, seed=i) for i in range(4))
    for eta in (0.01, 0.3, 0.7, 1.0):
        times = time_grid(7, shift=shift, dtype=F64).tolist()
        for t, t_next in itertools.pairwise(times):  # first and last steps included
            (mean, std), (mean_q, _) = (KERNELS[name](x, u, t, t_next, eta=eta) for u in (v, other))
            (exact, s), (exact_q, _) = (by_hand(name, x, u, t, t_next, eta) for u in (v, other))
            if s == 0:  # CPS at the end: no density, and no clamp that invents one
                assert (name, t_next) == ("cps", 0)
                assert bool(transition_log_prob(mean, mean, std).isnan().all())
                assert bool(transition_kl(mean, mean_q, std).isnan().all())
                continue
            x_next = mean + std.reshape(-1, *[1] * rank) * z
            p, q = torch.distributions.Normal(exact, s), torch.distributions.Normal(exact_q, s)
            log_prob, kl = p.log_prob(x_next).flatten(1), torch.distributions.kl_divergence(p, q).flatten(1)
            close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-10)
            close(transition_log_prob(x_next, mean, std), log_prob.mean(1))
            close(transition_log_prob(x_next, mean, std, reduce=latent_sum), log_prob.sum(1))
            close(transition_kl(mean, mean_q, std), kl.mean(1))
            close(transition_kl(mean, mean_q, std, reduce=latent_sum), kl.sum(1))


@given(latent_shapes(), seeds)
def test_reductions_match_numpy(shape, seed):
    x = normal(*shape, seed=seed)
    flat = x.numpy().reshape(shape[0], -1)
    np.testing.assert_allclose(latent_mean(x).numpy(), flat.mean(1), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(latent_sum(x).numpy(), flat.sum(1), rtol=1e-12, atol=1e-14)


def test_the_default_reduction_does_not_grow_with_the_resolution():
    # Mean or sum over latent axes: the clip range depended on it. https://github.com/yifan123/flow_grpo/issues/143
    x, mean, std = normal(2, 4), normal(2, 4, seed=1), torch.tensor([0.5, 0.7], dtype=F64)
    double = torch.cat([x, x], 1), torch.cat([mean, mean], 1), std
    torch.testing.assert_close(transition_log_prob(*double), transition_log_prob(x, mean, std))
    torch.testing.assert_close(
        transition_log_prob(*double, reduce=latent_sum), 2 * transition_log_prob(x, mean, std, reduce=latent_sum)
    )


@pytest.mark.parametrize("density", [transition_log_prob, transition_kl])
def test_a_deterministic_step_has_no_density_and_no_nan_gradient(density):
    x, mean, std = normal(3, 2), normal(3, 2, seed=1).requires_grad_(), torch.tensor([0.0, 0.5, 0.0], dtype=F64)
    value = density(x, mean, std)
    assert value.isnan().tolist() == [True, False, True]
    value[1].backward()
    assert bool(torch.isfinite(mean.grad).all())
    assert mean.grad[0].tolist() == [0, 0]


def test_log_prob_and_kl_gradients_match_finite_differences():
    x, mean = normal(2, 3), normal(2, 3, seed=1).requires_grad_()
    std = torch.tensor([0.4, 0.9], dtype=F64)
    assert torch.autograd.gradcheck(lambda m: transition_log_prob(x, m, std), mean)
    assert torch.autograd.gradcheck(lambda m: transition_kl(m, x, std), mean)


@pytest.mark.parametrize("density", [transition_log_prob, transition_kl])
def test_densities_refuse(density):
    x, std = torch.zeros(2, 3), torch.ones(2)
    with refuses("(2, 3)", "(2, 1)"):
        density(x, torch.zeros(2, 1), std)
    with refuses("std", "(2,)", "(1,)"):
        density(x, x, torch.ones(1))
    with refuses("std", "-1.0"):
        density(x, x, torch.tensor([1.0, -1.0]))
    with refuses("std", "nan"):
        density(x, x, torch.tensor([1.0, math.nan]))


# ---- negative control -------------------------------------------------------------------------------------------------


def test_negative_control_a_wrong_kernel_fails_the_oracles():
    def without_the_exception_at_t_1(x_t, v, t, t_next, *, eta=0.7):
        return flow_sde_step(x_t, v, torch.where(t == 1, 1 - 1e-9, t), t_next, eta=eta)

    def without_the_score(x_t, v, t, t_next, *, eta=0.3):
        return euler_step(x_t, v, t, t_next)[0], dance_sde_step(x_t, v, t, t_next, eta=eta)[1]

    times = time_grid(100, dtype=F64)
    assert affine_endpoint_std(without_the_exception_at_t_1, times, 0.49) != pytest.approx(TABLE[100][1], abs=5.1e-5)
    assert affine_endpoint_std(without_the_score, times, 0.49) != pytest.approx(TABLE[100][2], abs=5.1e-5)
    with pytest.raises(AssertionError, match="does not mention"), refuses("x_t (2, 3)"):
        require_rows(2, x_t=torch.zeros(3))


def test_negative_control_a_solver_that_misuses_its_past_is_not_of_second_order():
    def forgets(x_t, v, t, t_next, *, past=None):
        return dpm2_step(x_t, v, t, t_next)

    def contradicts(x_t, v, t, t_next, *, past=None):
        first, std = euler_step(x_t, v, t, t_next)
        return 2 * first - dpm2_step(x_t, v, t, t_next, past=past)[0], std

    steps = [32, 64, 128, 256]
    grids = [0.05 + 0.9 * time_grid(n, dtype=F64) for n in steps]
    for step in (forgets, contradicts):
        order, _ = order_of(steps, endpoint_errors(step, gaussian, grids, lambda x: gaussian_flow(x, 0.95, 0.05)))
        assert order == pytest.approx(1, abs=0.1)
