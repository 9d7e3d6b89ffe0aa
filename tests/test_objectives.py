"""The regression objectives, by plain loops in float64: directions per step and adaptive radii, NFT's branches, AWM's ratio."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import F64, close, normal, refuses, rms
from strategies import seeds
from toys import rows_of, start, timeless

from diffrl.algorithms import art
from diffrl.loop import diagnose, update
from diffrl.losses import advantage_weighted_matching, flat_weight, masked_mean, nft_negative, nft_positive
from diffrl.objectives import (
    generalised_huber_matching,
    guided_regression,
    huber_matching,
    matching_ratio,
    nft_regression,
    plain_matching,
    time_weighted_matching,
)
from diffrl.rollouts import RENOISE_STREAM, collect_renoised, subset_of_steps
from diffrl.sampling import dance_sde_step, interpolate, seeded_noise, time_grid
from diffrl.states import credit_of
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model
from diffrl.trust_region import AdaptiveRadius, kl_proxy
from diffrl.types import Gridded, Trajectory, Window
from diffrl.windows import select_rows, window_of

NAN, INF = math.nan, math.inf
THETA = torch.tensor([0.9, 0.2, -0.3, 0.4], dtype=F64)
MOVED = THETA + torch.tensor([0.06, -0.04, 0.03, 0.05], dtype=F64)
REFERENCE = THETA - torch.tensor([0.02, 0.04, -0.03, 0.01], dtype=F64)
B, S, SHAPE = 6, 3, (2, 2)
WIDE = 1e9


# ---- windows of forward-process states of a velocity that is linear in its parameters ---------------------------------


def linear(params, x_t, t, cond):
    """v = Phi theta, Phi = (x, sin 3x, t, c)."""
    a, ones = params["theta"], [1] * (x_t.ndim - 1)
    t, c = t.reshape(-1, *ones), cond["c"].reshape(-1, *ones)
    return a[0] * x_t + a[1] * torch.sin(3 * x_t) + (a[2] * t + a[3] * c)


def window_for(*, shape=SHAPE, b=B, s=S, reference=REFERENCE, **credit) -> Window:
    """States x_t = (1 - t) x_0 + t eps of b samples at s times, v_old = Phi THETA."""
    grid = time_grid(s + 1, shift=3.0, dtype=F64)
    t, t_next = grid[:s], grid[1 : s + 1]
    x_0, c = normal(b, *shape, seed=1), normal(b, seed=6)
    columns = [interpolate(x_0, normal(b, *shape, seed=10 + j), t[j]) for j in range(s)]
    v = [linear({"theta": THETA}, x, t[j].expand(b), {"c": c}) for j, x in enumerate(columns)]
    x_t, v = torch.stack(columns, 1), torch.stack(v, 1)
    zeros = torch.zeros(b, s, dtype=F64)
    tr = Trajectory(x_0, x_t, x_t + 1, v, t, t_next, zeros, zeros * NAN, torch.arange(b) * 3 + 1)
    credit = {"advantage": normal(b, seed=5), "optimality": torch.linspace(0, 1, b, dtype=F64), **credit}
    reference = None if reference is None else {"theta": reference}
    return Window(tr, torch.zeros(b, dtype=F64), {"c": c}, credit, reference)


def outcome(objective, window: Window, theta: torch.Tensor = MOVED):
    """(masked mean, its gradient, metrics) at theta."""
    theta = theta.clone().requires_grad_()
    loss, keep, metrics = objective(linear, {"theta": theta}, window)
    value = masked_mean(loss, keep)
    return value.detach(), torch.autograd.grad(value, theta)[0], metrics


def states_of(window: Window, theta: torch.Tensor) -> list[SimpleNamespace]:
    """Every state by itself: flat x, v, v_old, v_reference, x_0, eps - x_0, t, t_next, its sample and column."""
    tr, found = window.trajectory, []
    for i in range(len(tr.x_0)):
        for j in range(len(tr.t)):
            x, t, x_0 = tr.x_t[i, j].flatten(), float(tr.t[j]), tr.x_0[i].flatten()
            features = [x, torch.sin(3 * x), torch.full_like(x, t), window.cond["c"][i].expand_as(x)]
            v = sum(a * f for a, f in zip(theta, features))
            reference = None if window.reference is None else window.reference["theta"]
            v_ref = None if reference is None else sum(float(a) * f for a, f in zip(reference, features))
            state = SimpleNamespace(x=x, v=v, v_old=tr.v[i, j].flatten(), v_ref=v_ref, x_0=x_0, t=t, i=i, j=j)
            state.u, state.t_next = (x - (1 - t) * x_0) / t - x_0, float(tr.t_next[j])
            found.append(state)
    return found


def mean_and_gradient(rows_of, window: Window):
    """sum of rows_of(states)/w at MOVED, and its gradient."""
    theta = MOVED.clone().requires_grad_()
    rows = rows_of(states_of(window, theta))
    value = sum(rows) / len(rows)
    return value.detach(), torch.autograd.grad(value, theta)[0]


def v_at(params, x_t, t, cond):
    """A velocity that is its own parameter: gradients of the loss in v."""
    return params["v"]


def spoilt(window: Window, sample: int, *names: str) -> Window:
    """The window whose sample has no reward, nan in the named tensors, and what `credits` tells such a sample."""
    changed = {name: getattr(window.trajectory, name).clone() for name in names}
    for value in changed.values():
        value[sample] = NAN
    rewards = window.rewards.clone()
    rewards[sample] = NAN
    credit = dict(window.credit)
    for name, neutral in (("advantage", 0.0), ("optimality", 0.5)):
        credit[name] = credit[name].index_fill(0, torch.tensor([sample]), neutral)
    return window._replace(trajectory=window.trajectory._replace(**changed), rewards=rewards, credit=credit)


OBJECTIVES = {
    "guided": guided_regression(radius=1e-4),
    "nft": nft_regression(anchor=0.1),
    "nft flat": nft_regression(beta=0.5, weight=flat_weight, anchor=0.0),
    "awm": matching_ratio(clip=0.05, beta=0.1),
    "awm ghuber": matching_ratio(clip=0.05, score=generalised_huber_matching()),
}


# ---- ART: one direction per step, weights, radii ----------------------------------------------------------------------


@pytest.mark.parametrize("steps_per_sample", [None, 2])
def test_directions_may_be_given_per_kept_step(steps_per_sample):
    direction = normal(B, S, *SHAPE, seed=3)
    window = window_for(direction=direction)
    loss, keep, _ = guided_regression(radius=WIDE, steps_per_sample=steps_per_sample)(linear, {"theta": MOVED}, window)
    row = 0
    for state in states_of(window, MOVED):
        drawn = subset_of_steps(window.trajectory.seeds[state.i, None], S, steps_per_sample or S)[0].tolist()
        if state.j in drawn:
            gap = state.v - (state.v_old - direction[state.i, state.j].flatten())
            assert float(loss[row]) == pytest.approx(sum(float(e) ** 2 for e in gap) / 4, rel=1e-12)
            row += 1
    assert row == len(loss)
    assert keep.all()


def test_the_same_direction_at_every_step_is_one_per_sample():
    one = normal(B, *SHAPE, seed=3)
    per_step = one[:, None].expand(B, S, *SHAPE)
    expected, found = (
        guided_regression(radius=1e-4)(linear, {"theta": MOVED}, window_for(direction=d)) for d in (one, per_step)
    )
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert found[2] == expected[2]
    # alive is not given here: a sample whose directions are all 0 is dead, one with a single direction alive
    per_step = per_step.clone()
    per_step[0], per_step[1, 1:] = 0, 0
    _, keep, _ = guided_regression(radius=WIDE)(linear, {"theta": MOVED}, window_for(direction=per_step))
    assert keep.reshape(B, S).all(1).tolist() == [False, True, True, True, True, True]


def test_the_credit_s_weight_scales_each_sample_s_states():
    direction, weight = normal(B, *SHAPE, seed=3), torch.tensor([0.0, 0.5, 1.0, 2.0, 3.0, 0.25], dtype=F64)
    objective = guided_regression(radius=1e-4)
    loss, keep, metrics = objective(linear, {"theta": MOVED}, window_for(direction=direction))
    weighted_loss, weights, told = objective(linear, {"theta": MOVED}, window_for(direction=direction, weight=weight))
    assert torch.equal(weighted_loss, loss)
    close(weights, keep.double() * weight.repeat_interleave(S))
    assert 0 < int(keep.sum()) < B * S
    assert told == metrics
    value, gradient, _ = outcome(objective, window_for(direction=direction, weight=weight))

    def rows(states):
        gaps = [s.v - (s.v_old - direction[s.i].flatten()) for s in states]
        return [g.square().mean() * float(weight[s.i]) * bool(k) for g, s, k in zip(gaps, states, keep)]

    expected, expected_gradient = mean_and_gradient(rows, window_for(direction=direction))
    close(value, expected)
    close(gradient, expected_gradient)


def test_a_radius_may_be_a_function_of_step_and_kl():
    direction, seen = normal(B, *SHAPE, seed=3), []
    window = window_for(direction=direction)
    limits = torch.tensor([1e-3, 1e-5, 1e9], dtype=F64)

    def radius(columns, kl):
        seen.append((columns, kl))
        return limits[columns]

    _, keep, metrics = guided_regression(radius=radius)(linear, {"theta": MOVED}, window)
    (columns, kl), *more = seen
    assert not more
    assert columns.tolist() == [*range(S)] * B
    for row, s in enumerate(states_of(window, MOVED)):
        by_hand = float(kl_proxy(s.v[None], s.v_old[None], s.t, s.t_next))
        assert float(kl[row]) == pytest.approx(by_hand, rel=1e-12)
        outward = float(((s.v - s.v_old) * (s.v_old - direction[s.i].flatten() - s.v)).sum()) > 0
        assert bool(keep[row]) == (not (by_hand >= float(limits[s.j]) and outward))
    assert metrics["masked_fraction"] == pytest.approx(float((~keep).double().mean()))
    assert 0 < metrics["masked_fraction"] < 1


@settings(max_examples=15)
@given(seeds, st.floats(1e-7, 1e-2))
def test_a_constant_function_is_that_radius_and_wider_radii_mask_less(seed, radius):
    window, theta = window_for(direction=normal(B, *SHAPE, seed=seed)), {"theta": THETA + 0.05 * normal(4, seed=seed)}
    _, keep, _ = guided_regression(radius=radius)(linear, theta, window)
    same = guided_regression(radius=lambda columns, kl: torch.full_like(kl, radius))(linear, theta, window)[1]
    assert torch.equal(same, keep)
    wider = guided_regression(radius=3 * radius)(linear, theta, window)[1]
    assert not bool((keep & ~wider).any())
    assert guided_regression(radius=WIDE)(linear, theta, window)[1].all()


@pytest.mark.parametrize("dead", ["drop", "restore"])
def test_a_radius_is_never_told_of_states_without_numbers(dead):
    window = spoilt(window_for(direction=normal(B, *SHAPE, seed=3)), 2, "x_t", "v")
    told = []
    guided_regression(radius=lambda c, kl: told.append(kl) or torch.full_like(kl, 1e-4), dead=dead)(
        linear, {"theta": MOVED}, window
    )
    assert torch.isfinite(told[0]).tolist() == [i != 2 for i in range(B) for _ in range(S)]
    radius = AdaptiveRadius()
    guided_regression(radius=radius)(linear, {"theta": MOVED}, window)
    radius.advance()
    assert len(radius.history[0][1]) == (B - 1) * S


# ---- adaptive radius --------------------------------------------------------------------------------------------------


def radii(radius: AdaptiveRadius, *kls, columns=None) -> list[list[float]]:
    """What it answers to a sequence of updates."""
    found = []
    for kl in kls:
        where = torch.zeros(len(kl), dtype=torch.long) if columns is None else torch.tensor(columns)
        found.append(radius(where, torch.tensor(kl, dtype=F64)).tolist())
        radius.advance()
    return found


def test_an_update_in_micro_batches_is_one_update():
    whole, parts = AdaptiveRadius(first=0.3), AdaptiveRadius(first=0.3)
    for kl in ([1.0, 2.0, 4.0], [5.0, 7.0, 9.0]):
        together = radii(whole, kl)[0]
        apart = []
        for one in kl:
            apart += parts(torch.zeros(1, dtype=torch.long), torch.tensor([one], dtype=F64)).tolist()
        parts.advance()
        assert apart == together
    assert [seen.tolist() for _, seen in parts.history] == [seen.tolist() for _, seen in whole.history]
    parts.advance()  # nothing was seen since
    assert len(parts.history) == 2


def test_the_loop_ends_the_updates_of_a_radius_with_a_memory():
    radius = AdaptiveRadius()
    rows_of(start(toy_model(), art(radius=radius), micro_batch=3), 4)
    assert len(radius.history) == 4  # the second update of each iteration; the first is on-policy
    assert len(radius.history[0][1]) == 4 * 4 * 5  # four prompts, half of eight samples, five steps


def test_the_radius_is_a_quantile_of_past_updates_never_of_the_current_one():
    answers = radii(AdaptiveRadius(q=0.5, first=0.3), [1.0, 2.0, 9.0], [5.0, 7.0], [100.0])
    assert answers == [[0.3] * 3, [2.0] * 2, [5.0]]
    answers = radii(AdaptiveRadius(q=0.25, first=0.3), [1.0, 2.0, 3.0, 4.0], [8.0])
    assert answers[1] == [1.75]  # linear between the order statistics
    assert radii(AdaptiveRadius(q=0, first=0.3), [1.0, 2.0], [8.0])[1] == [1.0]
    assert radii(AdaptiveRadius(q=1, first=0.3), [1.0, 2.0], [8.0])[1] == [2.0]


def test_it_forgets_updates_beyond_its_window():
    answers = radii(AdaptiveRadius(q=0.5, updates=2, first=0.3), [1.0], [2.0], [8.0], [4.0])
    assert answers == [[0.3], [1.0], [1.5], [5.0]]


def test_on_policy_updates_are_not_counted_and_the_radius_has_a_floor():
    radius = AdaptiveRadius(first=0.3, floor=1e-3)
    assert radii(radius, [0.0, 1e-9], [9e-4], [1e-6, 1e-3], [5.0]) == [[0.3] * 2, [0.3], [0.3] * 2, [1e-3]]
    assert len(radius.history) == 2
    assert radii(AdaptiveRadius(first=1e-9, floor=1e-3), [0.0]) == [[1e-9]]  # `first` is as it was given


def test_a_radius_of_each_step_of_its_own():
    columns, first = [0, 1, 1, 0], [1.0, 20.0, 40.0, 3.0]
    assert radii(AdaptiveRadius(per_step=True), first, [5.0] * 4, columns=columns)[1] == [2.0, 30.0, 30.0, 2.0]
    assert radii(AdaptiveRadius(), first, [5.0] * 4, columns=columns)[1] == [11.5] * 4
    radius = AdaptiveRadius(per_step=True, first=0.3)
    radii(radius, [1.0, 2.0], columns=[0, 1])
    assert radii(radius, [7.0, 7.0, 7.0], columns=[2, 1, 0])[0] == [0.3, 2.0, 1.0]  # step 2 was never seen


def test_states_without_a_kl_are_left_out():
    radius = AdaptiveRadius(first=0.3)
    assert radii(radius, [1.0, NAN, INF], [NAN], [5.0]) == [[0.3] * 3, [1.0], [1.0]]
    assert len(radius.history) == 2


@given(
    st.lists(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=4), min_size=1, max_size=6),
    st.integers(1, 4),
    st.floats(0, 1),
)
def test_the_radius_by_its_definition(kls, updates, q):
    answers = radii(AdaptiveRadius(q=q, updates=updates), *kls)
    for i, answer in enumerate(answers):
        past = sorted(x for kl in kls[max(i - updates, 0) : i] for x in kl)
        place = q * (len(past) - 1)
        low = math.floor(place) if past else 0
        expected = past[low] + (place - low) * (past[min(low + 1, len(past) - 1)] - past[low]) if past else 1e-5
        assert answer == pytest.approx([max(expected, 1e-7) if past else 1e-5] * len(kls[i]), rel=1e-9)


def test_the_radius_keeps_the_type_and_carries_no_gradient():
    radius = AdaptiveRadius()
    kl = torch.tensor([1.0, 2.0], requires_grad=True)
    for _ in range(2):
        found = radius(torch.tensor([0, 1]), 2 * kl)
        radius.advance()
        assert found.dtype == torch.float32
        assert not found.requires_grad


def test_every_training_begins_without_a_memory():
    algorithm = art(radius=AdaptiveRadius())
    first = timeless(rows_of(start(toy_model(), algorithm), 3))
    assert timeless(rows_of(start(toy_model(), algorithm), 3)) == first
    diagnose(toy_model(), algorithm, PROMPTS, toward_compass)
    assert algorithm.memory.history == []
    wrapped = algorithm._replace(objective=lambda *window: algorithm.objective(*window))
    assert (
        timeless(rows_of(start(toy_model(), wrapped), 3)) == first
    )  # the memory is the algorithm's, not the objective's


@pytest.mark.parametrize("bad", [None, "far", torch.tensor(1e-5), -torch.ones(B * S), torch.zeros(B * S)])
def test_a_radius_function_that_returns_no_radius_is_refused(bad):
    window = window_for(direction=normal(B, *SHAPE, seed=3))
    with pytest.raises(ValueError, match="radius must return"):
        guided_regression(radius=lambda columns, kl: bad)(linear, {"theta": MOVED}, window)


@pytest.mark.parametrize("steps", [S - 1, S + 1])
def test_a_direction_of_another_number_of_steps_is_refused(steps):
    window = window_for(direction=normal(B, steps, *SHAPE, seed=3))
    with pytest.raises(ValueError, match=f"{S} kept steps"):
        guided_regression()(linear, {"theta": MOVED}, window)


def test_pieces_of_two_families_say_what_they_miss():
    window = window_for()
    window = window._replace(credit={"direction": normal(B, *SHAPE, seed=3)})
    for objective in (nft_regression(anchor=0), matching_ratio()):
        with pytest.raises(ValueError, match="direction"):
            objective(linear, {"theta": MOVED}, window)
    assert credit_of(window, "direction") is window.credit["direction"]


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_a_velocity_in_half_precision_costs_only_its_own_rounding(half):
    """What is multiplied with it stays float32: optimality near 1/2 and t do not fall to half precision."""
    r = 0.5 + 0.004 * torch.rand(B, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    window = window_for(optimality=r, advantage=r - 0.5)
    tr = window.trajectory
    window = window._replace(
        trajectory=tr._replace(**{n: getattr(tr, n).float() for n in ("x_0", "x_t", "x_next", "v")})
    )

    def rounded(dtype):
        return lambda params, x, t, cond: linear(params, x, t, cond).to(half).to(dtype)

    for objective in (nft_regression(anchor=0), matching_ratio(score=generalised_huber_matching())):
        low, high = (objective(rounded(d), {"theta": MOVED.float()}, window)[0] for d in (half, torch.float32))
        torch.testing.assert_close(low, high, rtol=1e-6, atol=0)


def test_adaptive_radii_need_sensible_numbers():
    for name, bad in (("q", 1.5), ("q", NAN), ("updates", 0), ("updates", 1.5), ("floor", 0.0), ("first", -1.0)):
        with refuses(name, bad):
            AdaptiveRadius(**{name: bad})


def test_guided_regression_under_an_adaptive_radius_masks_half_of_a_steady_drift():
    window = window_for(b=40, direction=normal(40, *SHAPE, seed=3))
    radius = AdaptiveRadius(q=0.5, first=1e9)
    objective = guided_regression(radius=radius)
    _, first, _ = objective(linear, {"theta": MOVED}, window)
    assert first.all()
    radius.advance()
    _, second, metrics = objective(linear, {"theta": MOVED}, window)
    kl = radius.history[0][1]
    outward = ~guided_regression(radius=0.0)(linear, {"theta": MOVED}, window)[1]
    assert torch.equal(~second, outward & (kl >= torch.quantile(kl, 0.5)))
    assert 0 < metrics["masked_fraction"] <= 0.5
    radius.advance()
    assert objective(linear, {"theta": THETA}, window)[1].all()
    radius.advance()
    assert len(radius.history) == 2  # the on-policy update did not count


# ---- DiffusionNFT -----------------------------------------------------------------------------------------------------


def branch_by_hand(s, sign: int, beta: float, weighted: bool):
    error = s.x - s.t * (s.v_old + sign * beta * (s.v - s.v_old)) - s.x_0
    size = max(float(error.detach().abs().mean()), 1e-5) if weighted else 1.0
    return error.square().mean() / size


@pytest.mark.parametrize(("beta", "weighted"), [(1.0, True), (0.1, True), (0.5, False)])
def test_nft_is_the_factor_times_both_branches_plus_the_anchor(beta, weighted):
    window = window_for()
    options = {} if weighted else {"weight": flat_weight}
    value, gradient, metrics = outcome(nft_regression(beta=beta, loss_factor=3.0, anchor=0.2, **options), window)
    r = window.credit["optimality"].tolist()

    def rows(states):
        plus, minus = ([branch_by_hand(s, sign, beta, weighted) for s in states] for sign in (1, -1))
        away = [(s.v - s.v_ref).square().mean() for s in states]
        both = [r[s.i] * p + (1 - r[s.i]) * m for s, p, m in zip(states, plus, minus)]
        return [3 * x / beta + 0.2 * y for x, y in zip(both, away)]

    expected, expected_gradient = mean_and_gradient(rows, window)
    close(value, expected)
    close(gradient, expected_gradient)
    states = states_of(window, MOVED)
    assert metrics["anchor"] == pytest.approx(sum(float((s.v - s.v_ref).square().mean()) for s in states) / len(states))
    drift = sum(float((s.v - s.v_old).square().mean()) for s in states) / len(states)
    assert metrics["drift_rms"] == pytest.approx(math.sqrt(drift))


def nft_example(r: float = 0.8) -> tuple[Window, dict]:
    """One sample at t = .5."""
    x_0, eps = torch.tensor([[1.0, 0.0]], dtype=F64), torch.tensor([[0.0, 1.0]], dtype=F64)
    half, zeros = torch.tensor([0.5], dtype=F64), torch.zeros(1, 1, dtype=F64)
    v_old, x_t = torch.tensor([[[0.2, 0.1]]], dtype=F64), ((x_0 + eps) / 2)[:, None]
    tr = Trajectory(x_0, x_t, x_t, v_old, half, half / 2, zeros, zeros, None)
    window = Window(tr, torch.zeros(1, dtype=F64), {}, {"optimality": torch.tensor([r], dtype=F64)})
    return window, {"v": torch.tensor([[0.5, -0.5]], dtype=F64)}


@pytest.mark.parametrize(
    ("beta", "options", "expected"),
    [
        (1.0, {}, 0.6750),
        (1.0, {"branches": nft_positive}, 0.6000),
        (1.0, {"weight": flat_weight}, 0.4725),
        (0.1, {}, 5.4787),
        (0.1, {"branches": nft_positive}, 4.4466),
        (0.1, {"weight": flat_weight}, 2.9531),
    ],
)
def test_golden_nft(beta, options, expected):
    window, params = nft_example()
    for factor in (1.0, 5.0):
        loss, _, _ = nft_regression(beta=beta, loss_factor=factor, anchor=0.0, **options)(v_at, params, window)
        assert float(loss) == pytest.approx(factor * expected, abs=factor * 5e-5)
    published = nft_regression(anchor=0.0)(v_at, params, window)[0]
    assert float(published) == pytest.approx(5 * 0.6750, abs=5 * 5e-5)


@settings(max_examples=15)
@given(seeds, st.floats(0, 1), st.floats(0.05, 2))
def test_the_forces_of_the_branches_at_the_old_velocity(seed, r, beta):
    """-dL/dv = (2 t^2/dim) c h, h = u - v_old, c = 2r - 1, r, -(1 - r): beta scales restoration only."""
    window = window_for(optimality=torch.full((B,), r, dtype=F64))
    tr = window.trajectory
    h = torch.stack([s.u - s.v_old for s in states_of(window, THETA)])
    t2 = tr.t.repeat(B)[:, None] ** 2
    for branches, c in (({}, 2 * r - 1), ({"branches": nft_positive}, r), ({"branches": nft_negative}, r - 1)):
        objective = nft_regression(beta=beta, weight=flat_weight, loss_factor=1.0, anchor=0.0, **branches)
        v = tr.v.flatten(0, 1).clone().requires_grad_()
        loss, _, _ = objective(v_at, {"v": v}, window)
        (gradient,) = torch.autograd.grad(loss.sum(), v)
        close(-gradient.flatten(1), 2 * t2 / 4 * c * h, rtol=1e-8, atol=1e-12)


def test_optimality_is_told_of_the_samples_with_a_reward():
    # It stayed within .4 and .6 and nobody knew why. https://github.com/NVlabs/DiffusionNFT/issues/50
    window = window_for(optimality=torch.tensor([0.1, 0.9, 0.0, 0.4, 0.6, 1.0], dtype=F64))
    has_reward = torch.tensor([True, True, False, True, True, False])
    told = window._replace(credit={**window.credit, "has_reward": has_reward})
    _, _, metrics = outcome(nft_regression(anchor=0.0), told)
    expected = {"optimality/mean": 0.5, "optimality/min": 0.1, "optimality/max": 0.9}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert metrics.keys() == {"drift_rms", *expected}
    nobody = window._replace(credit={**window.credit, "has_reward": torch.zeros(B, dtype=torch.bool)})
    value, gradient, metrics = outcome(nft_regression(), nobody)
    assert float(value) == 0
    assert not gradient.any()
    assert metrics["optimality/min"] == 0


# ---- AWM --------------------------------------------------------------------------------------------------------------

SCORES = {
    "plain": (plain_matching, lambda m, t: -m),
    "time": (time_weighted_matching(1), lambda m, t: -m * t),
    "time squared": (time_weighted_matching(2), lambda m, t: -m * t * t),
    "huber": (huber_matching, lambda m, t: -t * ((m + 1e-10) ** 0.5 - 1e-5)),
    "ghuber": (generalised_huber_matching(0.25), lambda m, t: -4 * t * ((m + 1e-10) ** 0.25 - (1e-10) ** 0.25)),
}


def ratio_loss_by_hand(s, a: float, score, clip: float):
    now, old = (score((v - s.u).square().mean(), s.t) for v in (s.v, s.v_old))
    rho = torch.exp(now - old)
    clipped = rho if 1 - clip < rho < 1 + clip else torch.tensor(1 + clip if rho > 1 else 1 - clip, dtype=F64)
    return max(-a * rho, -a * clipped, key=lambda x: float(x.detach())), float(rho.detach())


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("name", SCORES)
def test_matching_ratios_by_plain_loops(name, beta):
    window, clip = window_for(), 0.05
    piece, score = SCORES[name]
    value, gradient, metrics = outcome(matching_ratio(clip=clip, score=piece, beta=beta), window)
    a = window.credit["advantage"].tolist()

    def rows(states):
        losses = [ratio_loss_by_hand(s, a[s.i], score, clip)[0] for s in states]
        return [x + beta * (s.v - s.v_ref).square().mean() for x, s in zip(losses, states)]

    expected, expected_gradient = mean_and_gradient(rows, window)
    close(value, expected, rtol=1e-9)
    close(gradient, expected_gradient, rtol=1e-9)
    states = states_of(window, MOVED)
    pairs = [(s, ratio_loss_by_hand(s, a[s.i], score, clip)[1]) for s in states]
    gaps = [abs(rho - 1) for _, rho in pairs]
    assert metrics["ratio_deviation"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-9)
    for j, t in enumerate(window.trajectory.t):
        here = [gap for (s, _), gap in zip(pairs, gaps) if s.j == j]
        assert metrics[f"ratio_deviation/t={float(t):.3f}"] == pytest.approx(sum(here) / len(here), rel=1e-9)
    removed = [(rho > 1 + clip and a[s.i] > 0) or (rho < 1 - clip and a[s.i] < 0) for s, rho in pairs]
    assert metrics["clip_fraction"] == pytest.approx(sum(removed) / len(removed))
    assert 0 < metrics["clip_fraction"] < 1
    away = [float((s.v - s.v_ref).square().mean()) for s in states]
    assert metrics.get("kl_velocity", 0) == pytest.approx(sum(away) / len(away) if beta else 0)


def test_with_the_plain_score_it_is_advantage_weighted_matching():
    window = window_for()
    loss, _, _ = matching_ratio(clip=0.05)(linear, {"theta": MOVED}, window)
    states = states_of(window, MOVED)
    v, v_old, u, x_0 = (torch.stack([getattr(s, name) for s in states]) for name in ("v", "v_old", "u", "x_0"))
    a = window.credit["advantage"].repeat_interleave(S)
    close(loss, advantage_weighted_matching(v, v_old, u + x_0, x_0, a, clip=0.05))
    same = matching_ratio(clip=0.05, score=lambda error, t: -error)(linear, {"theta": MOVED}, window)[0]
    close(loss, same)


@given(seeds, st.floats(0, 3))
def test_the_scores_are_0_at_0_and_relate_to_each_other(seed, power):
    error, t = normal(5, seed=seed) ** 2, torch.rand(5, generator=torch.Generator().manual_seed(seed), dtype=F64)
    close(time_weighted_matching(0)(error, t), plain_matching(error, t))
    close(time_weighted_matching(power)(error, t), [-float(e) * float(u) ** power for e, u in zip(error, t)])
    close(generalised_huber_matching(1.0)(error, t), time_weighted_matching(1)(error, t), rtol=1e-9)
    close(generalised_huber_matching(0.5)(error, t), 2 * huber_matching(error, t), rtol=1e-9, atol=1e-12)
    for score in (time_weighted_matching(power), huber_matching, generalised_huber_matching()):
        close(score(0 * error, t), torch.zeros(5), atol=1e-12)
        assert bool((score(error + 1, t) <= score(error, t)).all())  # a larger error is never likelier


@pytest.mark.parametrize("name", ["plain", "time", "huber"])
def test_the_on_policy_gradient_is_that_of_the_weighted_flow_matching_loss(name):
    """A grad MSE for the plain score, -A grad score in general."""
    window = window_for()
    piece, score = SCORES[name]
    _, gradient, metrics = outcome(matching_ratio(clip=1e-4, score=piece), window, THETA)
    theta = THETA.clone().requires_grad_()
    states, a = states_of(window, theta), window.credit["advantage"].tolist()
    expected = -sum(a[s.i] * score((s.v - s.u).square().mean(), s.t) for s in states) / len(states)
    close(gradient, torch.autograd.grad(expected, theta)[0])
    assert metrics["ratio_deviation"] == pytest.approx(0, abs=1e-14)
    assert metrics["clip_fraction"] == 0
    assert metrics["drift_rms"] == pytest.approx(0, abs=1e-14)


def test_the_stored_velocity_is_the_old_one_whatever_the_params_are():
    window = window_for()
    elsewhere = window._replace(trajectory=window.trajectory._replace(v=window.trajectory.v + 0.1))
    for objective in (matching_ratio(clip=10.0), nft_regression(anchor=0.0)):
        assert float(outcome(objective, elsewhere)[0]) != pytest.approx(float(outcome(objective, window)[0]), rel=1e-3)
    assert outcome(matching_ratio(), elsewhere, THETA)[2]["ratio_deviation"] > 1e-3
    v = elsewhere.trajectory.v.clone().requires_grad_()
    loss, keep, _ = matching_ratio(clip=10.0)(
        v_at,
        {"v": v.detach().flatten(0, 1).requires_grad_()},
        elsewhere._replace(trajectory=elsewhere.trajectory._replace(v=v)),
    )
    masked_mean(loss, keep).backward()
    assert v.grad is None


def test_the_path_of_fresh_noise_states_is_the_noise_that_made_them():
    model = toy_model(dtype=F64)
    sampler = Gridded(model.velocity, model.times, 4, (2,))
    seeds_ = torch.arange(4).reshape(2, 2) * 11 + 5
    collect = collect_renoised(trained_steps=lambda steps: [0, 2])
    batch = collect(sampler, model.params, model.encode(["east", "west"]), seeds_, lambda x, rows: x[:, 0])
    window = window_of(batch, {"advantage": normal(4)}, torch.arange(4))
    errors = []

    def score(error, t):
        errors.append(error.detach())
        return -error

    matching_ratio(score=score)(model.velocity, model.params, window)
    tr, row = batch.trajectory, 0
    for i in range(4):
        for j, step in enumerate((0, 2)):
            eps = seeded_noise(tr.seeds[i : i + 1], (2,), stream=RENOISE_STREAM + step)[0].double()
            expected = float((tr.v[i, j] - (eps - tr.x_0[i])).square().mean())
            for found in errors:  # of the live velocity, which is the old one here, and of the stored
                assert float(found[row]) == pytest.approx(expected, rel=1e-6)
            row += 1
    assert len(errors) == 2


def test_samples_of_advantage_0_feel_the_penalty_alone():
    window = window_for(advantage=torch.zeros(B, dtype=F64))
    value, gradient, _ = outcome(matching_ratio(), window)
    assert float(value) == 0
    assert torch.equal(gradient, torch.zeros(4, dtype=F64))
    value, gradient, _ = outcome(matching_ratio(beta=0.5), window)
    expected, expected_gradient = mean_and_gradient(
        lambda ss: [0.5 * (s.v - s.v_ref).square().mean() for s in ss], window
    )
    close(value, expected)
    close(gradient, expected_gradient)


# ---- what all of them share -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [(), ("x_t", "x_next", "v", "x_0")])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_samples_without_reward_give_no_value_and_no_gradient(name, names):
    window = window_for(direction=normal(B, *SHAPE, seed=3))
    without = select_rows(window, torch.tensor([0, 1, 3, 4, 5]))
    expected, expected_gradient, told = outcome(OBJECTIVES[name], without)
    found, gradient, metrics = outcome(OBJECTIVES[name], spoilt(window, 2, *names))
    close(B * found, (B - 1) * expected)  # masked_mean still divides by all rows
    close(B * gradient, (B - 1) * expected_gradient)
    assert gradient.any()
    for key, number in told.items():
        assert math.isfinite(metrics[key])
        if names and key != "clip_fraction":  # nor are they in the means over states
            assert metrics[key] == pytest.approx(number, rel=1e-9)


def gradient_of_update(objective, window: Window, micro_batch: int | None) -> torch.Tensor:
    """The gradient that `loop.update` leaves behind; nothing is stepped."""
    params = {"theta": MOVED.clone().requires_grad_()}
    model = SimpleNamespace(velocity=linear, params=params)
    update(objective, model, torch.optim.SGD([params["theta"]], lr=0.0), window, None, micro_batch)
    return params["theta"].grad


@pytest.mark.parametrize("steps_per_sample", [None, 2])
@pytest.mark.parametrize(
    "factory", [partial(guided_regression, radius=1e-4), nft_regression, partial(matching_ratio, clip=0.05, beta=0.1)]
)
def test_gradients_do_not_depend_on_the_micro_batch_or_on_the_order(factory, steps_per_sample):
    # A row's result depends on who else is in the batch. https://github.com/pytorch/pytorch/issues/124025
    weight = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 3.0], dtype=F64)
    window = window_for(direction=normal(B, *SHAPE, seed=3), weight=weight)
    objective = factory(steps_per_sample=steps_per_sample)
    expected = gradient_of_update(objective, window, None)
    assert expected.any()
    for size in (1, 4, 5):
        close(gradient_of_update(objective, window, size), expected)
    shuffled = select_rows(window, torch.tensor([4, 1, 5, 0, 2, 3]))
    close(gradient_of_update(objective, shuffled, 4), expected)


@settings(max_examples=10)
@given(st.sampled_from(sorted(OBJECTIVES)), st.lists(st.integers(1, 3), max_size=3))
def test_latents_of_any_rank(name, shape):
    window = window_for(shape=tuple(shape), direction=normal(B, *shape, seed=3))
    flat = window_for(shape=tuple(shape), direction=normal(B, *shape, seed=3))
    x_0, x_t, x_next, v = (x.reshape(*x.shape[: x.ndim - len(shape)], -1) for x in flat.trajectory[:4])
    tr = flat.trajectory._replace(x_0=x_0, x_t=x_t, x_next=x_next, v=v)
    flat = flat._replace(trajectory=tr, credit={**flat.credit, "direction": flat.credit["direction"].reshape(B, -1)})
    (value, gradient, _), (expected, expected_gradient, _) = (
        outcome(OBJECTIVES[name], window),
        outcome(OBJECTIVES[name], flat),
    )
    close(value, expected)
    close(gradient, expected_gradient)


def test_a_reference_is_asked_for_where_it_is_needed_only():
    window = window_for(reference=None)
    for objective in (nft_regression(), matching_ratio(beta=0.1)):
        with refuses("reference"):
            outcome(objective, window)
    for objective in (nft_regression(anchor=0.0), matching_ratio()):
        outcome(objective, window)


@pytest.mark.parametrize("bad", [-1.0, NAN, "much"])
def test_numbers_are_checked_before_anything_runs(bad):
    for factory, name in ((guided_regression, "radius"), (nft_regression, "anchor"), (nft_regression, "loss_factor")):
        with refuses(name, bad):
            factory(**{name: bad})
    for name in ("clip", "beta"):
        with refuses(name, bad):
            matching_ratio(**{name: bad})
    for score in (time_weighted_matching, generalised_huber_matching):
        with refuses("power", bad):
            score(bad)
    for factory in (guided_regression, nft_regression, matching_ratio):
        with refuses("steps_per_sample", 0):
            factory(steps_per_sample=0)


def test_bounds_are_open_or_closed_as_they_should():
    for factory, name, bad in ((nft_regression, "loss_factor", 0), (matching_ratio, "clip", 0)):
        with refuses(name, bad):
            factory(**{name: bad})
    for bad in (0, 1.1):
        with refuses("power", bad):
            generalised_huber_matching(bad)
    with refuses("beta", 0):
        outcome(nft_regression(beta=0.0, anchor=0.0), window_for())


# ---- negative control -------------------------------------------------------------------------------------------------


def test_control_another_reference_kernel_branch_or_sign_would_be_seen():
    window = window_for(direction=normal(B, *SHAPE, seed=3))
    value, gradient, metrics = outcome(guided_regression(radius=WIDE), window)
    flipped = window._replace(credit={**window.credit, "direction": -window.credit["direction"]})
    assert not torch.allclose(outcome(guided_regression(radius=WIDE), flipped)[1], gradient, rtol=0.1)
    dance = outcome(guided_regression(radius=WIDE, reference_kernel=dance_sde_step), window)[2]
    assert dance["kl_proxy"] != pytest.approx(metrics["kl_proxy"], rel=0.1)
    both = outcome(nft_regression(anchor=0.0), window)[0]
    for branches in (nft_positive, nft_negative):
        assert float(outcome(nft_regression(anchor=0.0, branches=branches), window)[0]) < float(both) - 0.1
    swapped = window._replace(credit={**window.credit, "optimality": 1 - window.credit["optimality"]})
    assert not torch.allclose(
        outcome(nft_regression(anchor=0.0), swapped)[1], outcome(nft_regression(anchor=0.0), window)[1], rtol=0.1
    )
    assert float(rms(window.trajectory.v - window.trajectory.x_t).min()) > 0.1  # the states are no fixed points
    assert float(value) > 0


def test_art_without_a_direction_says_what_it_misses():
    window = window_for()._replace(credit={"advantage": torch.zeros(B, dtype=F64)})
    with pytest.raises(ValueError, match=r"reads credit\['direction'\], and the credit has \['advantage'\]"):
        guided_regression()(linear, {"theta": MOVED}, window)
