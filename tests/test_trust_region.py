"""KL proxy, masks, averages and decay schedules of `diffrl.trust_region`."""

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import F64, normal, refuses
from strategies import pairs_of_latents, seeds, time_pairs

from diffrl.sampling import cps_step, dance_sde_step, euler_step, flow_sde_step, time_grid
from diffrl.trust_region import ema, keep_divergence, keep_inside, kl_proxy, ramp

NAN, INF = math.nan, math.inf
KERNELS = {"flow": flow_sde_step, "dance": dance_sde_step, "cps": cps_step}


def closed_form(name: str, t: float, t_next: float, eta: float) -> float:
    """m / mean d^2 of section 6."""
    delta = t - t_next
    if name == "flow":
        return delta / 2 * ((1 - t_next) / eta**2 if t == 1 else (1 - t) / t * (1 / eta + eta / 2) ** 2)
    if name == "dance":
        return delta / 2 * (1 / eta + eta * (1 - t) / (2 * t)) ** 2
    cos, sin = math.cos(eta * math.pi / 2), math.sin(eta * math.pi / 2)
    return ((1 - t) * t_next * cos - t * (1 - t_next)) ** 2 / (2 * t_next**2 * sin**2)


# ---- KL proxy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (flow_sde_step, 2.1088776e-5),
        (dance_sde_step, 1.1787778e-4),
        (functools.partial(cps_step, eta=0.7), 3.2504649e-5),
        (cps_step, 3.3321213e-5),
    ],
)
def test_golden_kl_proxy(step, expected):
    v = normal(1, 7)
    d = torch.tensor([[0.01] * 7], dtype=F64)
    assert float(kl_proxy(v + d, v, 0.6, 0.4, step=step)) == pytest.approx(expected, rel=5e-8)


def test_golden_kl_proxy_of_the_first_step():
    v = normal(1, 7)
    assert float(kl_proxy(v + 0.01, v, 1.0, 27 / 28)) == pytest.approx(1.301541e-7, rel=5e-7)


@pytest.mark.parametrize("name", KERNELS)
@given(pair=pairs_of_latents(), eta=st.floats(0.1, 0.95), data=st.data())
def test_kl_proxy_is_the_kl_of_the_two_transitions(name, pair, eta, data):
    v, v_old = pair
    t, t_next = data.draw(time_pairs(len(v)))
    t_next = t_next.clamp_min(1e-3)  # CPS has no noise at t_next = 0
    step = functools.partial(KERNELS[name], eta=eta)
    got = kl_proxy(v, v_old, t, t_next, step=step)
    size = ((v - v_old) ** 2).reshape(len(v), -1).mean(1)
    for i in range(len(v)):
        assert float(got[i]) == pytest.approx(
            closed_form(name, float(t[i]), float(t_next[i]), eta) * float(size[i]), rel=1e-8, abs=1e-14
        )
    x = normal(*v.shape, seed=5)  # the state cancels
    (mean, std), (old, _) = step(x, v, t, t_next), step(x, v_old, t, t_next)
    wide = std.reshape(-1, *[1] * (v.ndim - 1)).expand_as(v)
    normal_p, normal_q = torch.distributions.Normal(mean, wide), torch.distributions.Normal(old, wide)
    kl = torch.distributions.kl_divergence(normal_p, normal_q).reshape(len(v), -1).mean(1)
    torch.testing.assert_close(got, kl, rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(kl_proxy(v_old, v, t, t_next, step=step), got, rtol=1e-9, atol=1e-14)
    assert torch.equal(kl_proxy(v, v, t, t_next, step=step), torch.zeros(len(v), dtype=F64))


def test_drift_admitted_by_the_radius_at_each_step():
    times = time_grid(10, shift=3.0, dtype=F64)
    v = torch.zeros(10, 1, dtype=F64)
    per_unit = kl_proxy(v + 1, v, times[:-1], times[1:])
    admitted = (1e-5 / per_unit).sqrt()
    for t, expected in ((1.0, 0.0877), (0.875, 0.0279), (0.5625, 0.0078), (0.25, 0.0029)):
        index = int((times[:-1] - t).abs().argmin())
        assert float(times[index]) == pytest.approx(t, abs=1e-12)
        assert float(admitted[index]) == pytest.approx(expected, abs=5.1e-5)
    assert float(admitted[0] / admitted[-1]) == pytest.approx(30, abs=1)


def test_kl_proxy_differs_from_a_velocity_mse_and_carries_gradient_through_v_alone():
    # A coefficient for a "KL" that was a velocity MSE crashed training. https://github.com/yifan123/flow_grpo/issues/110
    v, v_old = normal(2, 3).requires_grad_(), normal(2, 3, seed=1).requires_grad_()
    kl = kl_proxy(v, v_old, 0.6, 0.4)
    kl.sum().backward()
    assert v_old.grad is None
    factor = closed_form("flow", 0.6, 0.4, 0.7)
    torch.testing.assert_close(v.grad, factor * 2 * (v - v_old).detach() / 3, rtol=1e-9, atol=1e-12)
    assert abs(factor - 1) > 0.5


def test_kl_proxy_refuses():
    x = torch.zeros(2, 3)
    with refuses("deterministic", "0.5", "0.25"):
        kl_proxy(x, x, 0.5, 0.25, step=euler_step)
    with refuses("deterministic"):
        kl_proxy(x, x, torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.0]), step=cps_step)
    with refuses("deterministic"):
        kl_proxy(x, x, 0.5, 0.25, step=functools.partial(flow_sde_step, eta=0.0))
    with refuses("v (2, 3)", "v_old (1, 3)"):
        kl_proxy(x, torch.zeros(1, 3), 0.5, 0.25)
    with refuses("t_next must be < t"):
        kl_proxy(x, x, 0.25, 0.5)


# ---- masks ------------------------------------------------------------------------------------------------------------

MASK_TABLE = [  # d, keep; h_G = target - v_old = (1, 0), kl >= radius
    ((0.1, 0.0), False),
    ((1.2, 0.0), True),
    ((0.0, 0.1), True),
    ((-0.1, 0.0), True),
    ((0.05, 0.5), True),
    ((0.3, 0.3), False),
    ((0.0, 0.0), True),
]


def table_of(keep) -> list[bool]:
    d = torch.tensor([row for row, _ in MASK_TABLE], dtype=F64)
    v_old = normal(len(d), 2)
    target = v_old + torch.tensor([1.0, 0.0], dtype=F64)
    return keep(v_old + d, v_old, target, torch.full((len(d),), 1e-5, dtype=F64)).tolist()


def test_mask_table():
    assert table_of(keep_inside) == [keep for _, keep in MASK_TABLE]
    assert table_of(lambda v, v_old, target, kl: keep_inside(v, v_old, target, kl * 0.999)) == [True] * 7


@given(seeds, st.floats(0, 3), st.booleans())
def test_the_mask_drops_exactly_the_updates_that_would_move_further_out(seed, size, over):
    d, h, v_old = size * normal(20, 2, 2, seed=seed), normal(20, 2, 2, seed=seed + 1), normal(20, 2, 2, seed=seed + 2)
    kl = torch.full((20,), 2e-5 if over else 0.5e-5, dtype=F64)
    keep = keep_inside(v_old + d, v_old, v_old + h, kl)
    step = 1e-6 * (h - d)  # a small step along the net force
    outward = (d + step).flatten(1).square().sum(1) > d.flatten(1).square().sum(1) + 1e-9
    ball = (d - h / 2).flatten(1).square().sum(1) < (h / 2).flatten(1).square().sum(1) - 1e-5
    assert not bool((outward & keep & over).any())
    assert torch.equal(keep[ball], torch.full((int(ball.sum()),), not over))
    assert bool(
        keep[~ball & ~outward & ((d - h / 2).flatten(1).norm(dim=1) > (h / 2).flatten(1).norm(dim=1) + 1e-3)].all()
    )
    assert keep.dtype == torch.bool


def test_kl_equal_to_the_radius_is_over_it_in_every_dtype():
    one = torch.ones(1, 1)
    for dtype in (torch.float32, F64):
        for radius in (1e-5, 0.1, 1.0):
            kl = torch.tensor([radius], dtype=dtype)
            assert keep_inside(0.5 * one, 0 * one, one, kl, radius=radius).tolist() == [False]
            assert keep_inside(0.5 * one, 0 * one, one, kl * 0.999, radius=radius).tolist() == [True]
            assert keep_divergence(kl, kl + 1, kl, radius=radius).tolist() == [False]


def test_one_inner_product_over_the_whole_state_not_one_per_element():
    v_old, d = torch.zeros(1, 2, dtype=F64), torch.tensor([[0.1, 0.1]], dtype=F64)
    target = torch.tensor([[1.0, -0.5]], dtype=F64)  # outward in one element, inward in the other, outward in sum
    over = torch.ones(1, dtype=F64)
    assert keep_inside(d, v_old, target, over).tolist() == [False]
    assert keep_inside(d, v_old, target - 0.5, over).tolist() == [True]


def test_masks_are_detached_and_refuse():
    v, kl = normal(2, 3).requires_grad_(), torch.ones(2, requires_grad=True)
    assert not keep_inside(v, v, v, kl).requires_grad
    assert not keep_divergence(kl, kl, kl).requires_grad
    with refuses("v (2, 3)", "target (1, 3)"):
        keep_inside(v, v, torch.zeros(1, 3), kl)
    with refuses("kl", "(2,)", "(2, 3)"):
        keep_inside(v, v, v, v)
    with refuses("kl (2,)", "advantages (3,)"):
        keep_divergence(kl, kl, torch.zeros(3))
    with refuses("kl", "(2, 3)"):
        keep_divergence(v, v, v)
    for function, args in ((keep_inside, (v, v, v, kl)), (keep_divergence, (kl, kl, kl))):
        for radius in (-1.0, NAN):
            with refuses("radius", radius):
                function(*args, radius=radius)


@given(st.floats(0, 1e-4), st.floats(0.5, 1.5), st.floats(-2, 2))
def test_keep_divergence_by_cases(kl, ratio, advantage):
    dropped = kl >= 1e-5 and ((ratio > 1 and advantage > 0) or (ratio < 1 and advantage < 0))
    got = keep_divergence(*(torch.tensor([x], dtype=F64) for x in (kl, ratio, advantage)))
    assert got.tolist() == [not dropped]


def test_keep_divergence_keeps_ratio_1_and_advantage_0():
    over, one = torch.ones(6), torch.tensor([1.0, 1.0, 1.1, 0.9, 1.1, 0.9])
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.0, -1.0, 1.0])
    assert bool(keep_divergence(over, one, advantages).all())


# ---- averages ---------------------------------------------------------------------------------------------------------


@given(seeds, st.floats(0, 1))
def test_ema_is_the_weighted_mean_and_never_aliases(seed, decay):
    old = {"a": normal(2, 3, seed=seed).requires_grad_(), "b": normal(4, seed=seed + 1)}
    new = {"b": normal(4, seed=seed + 2), "a": normal(2, 3, seed=seed + 3).requires_grad_()}
    before = [{k: x.detach().clone() for k, x in p.items()} for p in (old, new)]
    out = ema(old, new, decay=decay)
    assert set(out) == {"a", "b"}
    for name, value in out.items():
        torch.testing.assert_close(value, decay * old[name].detach() + (1 - decay) * new[name].detach())
        assert not value.requires_grad
        assert value.untyped_storage().data_ptr() not in [p[name].untyped_storage().data_ptr() for p in (old, new)]
        value.add_(1)
    for p, q in zip((old, new), before):
        assert all(torch.equal(p[k], q[k]) for k in p)


@pytest.mark.parametrize(("decay", "winner"), [(0.0, 1), (1.0, 0)])
def test_ema_at_its_ends_is_one_of_them_exactly(decay, winner):
    pair = [{"a": normal(3, dtype=torch.float32)}, {"a": normal(3, seed=1, dtype=torch.float32)}]
    pair[1 - winner]["a"][0] = INF  # 0 * inf would be nan
    out = ema(*pair, decay=decay)["a"]
    assert torch.equal(out, pair[winner]["a"])
    assert out.data_ptr() != pair[winner]["a"].data_ptr()


def test_ema_refuses():
    a = {"x": torch.zeros(2)}
    for decay in (-0.1, 1.1, NAN):
        with refuses("decay", decay):
            ema(a, a, decay=decay)
    with refuses("only in old ['x']", "only in new ['y']"):
        ema(a, {"y": torch.zeros(2)}, decay=0.5)
    with refuses("'x'", "old (2,)", "new (3,)"):
        ema(a, {"x": torch.zeros(3)}, decay=0.5)
    with refuses("only in new ['y']"):
        ema(a, {"x": torch.zeros(2), "y": torch.zeros(2)}, decay=0.5)


def test_golden_ramp():
    assert ramp(100, rate=0.0075, cap=0.999, flat=75) == pytest.approx(0.1875, rel=1e-15)
    assert [ramp(i, rate=0.001, cap=0.5) for i in (0, 1, 499, 500, 10**6)] == pytest.approx([0, 0.001, 0.499, 0.5, 0.5])


@given(st.integers(0, 3000), st.floats(0, 0.01), st.floats(0, 1), st.integers(0, 200))
def test_ramp_is_flat_then_linear_then_capped(i, rate, cap, flat):
    value = ramp(i, rate=rate, cap=cap, flat=flat)
    assert value == (0 if i < flat else min(rate * (i - flat), cap))
    assert 0 <= value <= ramp(i + 1, rate=rate, cap=cap, flat=flat) <= cap


def test_ramp_refuses():
    for name, bad in (("i", -1), ("i", 0.5), ("rate", -1.0), ("cap", 1.5), ("flat", -1)):
        with refuses(name, bad):
            ramp(**({"i": 1, "rate": 0.1, "cap": 0.5, "flat": 0} | {name: bad}))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_kl_proxy_and_mask_dtypes(half):
    v, v_old = normal(3, 4, dtype=half), normal(3, 4, seed=1, dtype=half)
    kl = kl_proxy(v, v_old, 0.6, 0.4)
    assert kl.dtype == torch.float32
    torch.testing.assert_close(kl, kl_proxy(v.float(), v_old.float(), 0.6, 0.4))
    assert kl_proxy(v.double(), v_old, 0.6, 0.4).dtype == F64
    assert keep_inside(v, v_old, v, kl).dtype == torch.bool


# ---- negative control -------------------------------------------------------------------------------------------------


def test_negative_control_other_masks_fail_the_table():
    def guidance_alone(v, v_old, target, kl):
        return ~(((v - v_old) * (target - v_old)).mean(1) > 0)

    def never(v, v_old, target, kl):
        return kl > 0

    def radius_alone(v, v_old, target, kl):
        return kl < 1e-5

    for wrong in (guidance_alone, never, radius_alone):
        assert table_of(wrong) != [keep for _, keep in MASK_TABLE]
    assert closed_form("dance", 0.6, 0.4, 0.3) != pytest.approx(closed_form("flow", 0.6, 0.4, 0.7), rel=0.5)


def test_an_infinite_radius_masks_nothing():
    far, one = torch.tensor([[1.2]]), torch.tensor([1.0])
    assert keep_inside(0.1 * far, 0 * far, far, one, radius=math.inf).tolist() == [True]
    assert keep_divergence(one, 2 * one, one, radius=math.inf).tolist() == [True]
    with refuses("radius", "-inf"):
        keep_inside(far, far, far, one, radius=-math.inf)


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
def test_ema_keeps_the_order_of_names(decay):
    old, new = {"b": torch.ones(1), "a": torch.ones(1)}, {"a": torch.zeros(1), "b": torch.zeros(1)}
    assert list(ema(old, new, decay=decay)) == ["b", "a"]
