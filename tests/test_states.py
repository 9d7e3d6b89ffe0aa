"""The states of a window: which rows an objective sees, which of them hold numbers, and the metrics that all objectives share."""

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import F64, normal, refuses
from strategies import seeds

from diffrl.rollouts import subset_of_steps
from diffrl.states import (
    Mean,
    States,
    by_step,
    drift_rms,
    finite_states,
    has_reward,
    loss_weights,
    mean_over,
    reference_velocity,
    require_steps_per_sample,
    share_of,
    window_states,
)
from diffrl.types import Trajectory, Window

NAN, INF = math.nan, math.inf
LATENTS = ("x_t", "x_next", "v_old", "x_0")


def window_for(b: int, s: int, *d: int, seeded: bool = True, credit=None, rewards=None, reference=None) -> Window:
    """b samples of s kept steps at t = 1, 1 - 1/(s + 1), ...; every number differs from every other."""
    times = 1 - torch.arange(s + 1, dtype=F64) / (s + 1)
    x_t, x_next, v = (normal(b, s, *d, seed=i) for i in range(3))
    std, log_prob = normal(b, s, seed=3).exp(), normal(b, s, seed=4)
    ids = torch.arange(b) * 7 + 3 if seeded else None
    tr = Trajectory(normal(b, *d, seed=9), x_t, x_next, v, times[:-1], times[1:], std, log_prob, ids)
    rewards = torch.zeros(b, dtype=F64) if rewards is None else rewards
    return Window(tr, rewards, {"text": torch.arange(b), "guide": normal(b, 2, seed=8)}, credit or {}, reference)


def states(b: int = 3, s: int = 4, *d: int) -> States:
    return window_states(window_for(b, s, *(d or (2,))))


# ---- which states -----------------------------------------------------------------------------------------------------


def steps_of(window: Window, size: int | None) -> list[list[int]]:
    """Which columns each sample trains, by the definition: all, or the seeded subset."""
    b, s = window.trajectory.std.shape
    if size is None or size == s:
        return [list(range(s))] * b
    return [subset_of_steps(seed[None], s, size)[0].tolist() for seed in window.trajectory.seeds]


@given(st.integers(1, 4), st.integers(1, 5), st.lists(st.integers(1, 3), max_size=3), st.data())
def test_every_row_is_its_sample_s_step_and_says_which(b, s, d, data):
    # Steps have indices, never values to be looked up. https://github.com/huggingface/diffusers/issues/11749
    window = window_for(b, s, *d)
    size = data.draw(st.one_of(st.none(), st.integers(1, s)))
    found = window_states(window, steps_per_sample=size)
    tr, row = window.trajectory, 0
    for i, columns in enumerate(steps_of(window, size)):
        for j in columns:
            assert (int(found.rows[row]), int(found.columns[row])) == (i, j)
            for name, source in (("x_t", tr.x_t), ("x_next", tr.x_next), ("v_old", tr.v), ("std", tr.std)):
                assert torch.equal(getattr(found, name)[row], source[i, j])
            assert float(found.log_prob[row]) == float(tr.log_prob[i, j])
            assert (float(found.t[row]), float(found.t_next[row])) == (float(tr.t[j]), float(tr.t_next[j]))
            assert torch.equal(found.x_0[row], tr.x_0[i])
            assert int(found.cond["text"][row]) == i
            assert torch.equal(found.cond["guide"][row], window.cond["guide"][i])
            row += 1
    assert row == len(found.t) == len(found.x_t)


def test_the_number_of_steps_per_sample_may_be_a_function_of_how_many_are_kept():
    window, asked = window_for(5, 6, 2), []

    def two_of_three(kept: int) -> int:
        asked.append(kept)
        return 2 * kept // 3

    found, expected = window_states(window, steps_per_sample=two_of_three), window_states(window, steps_per_sample=4)
    assert asked == [6]
    assert torch.equal(found.columns, expected.columns)
    assert torch.equal(found.x_t, expected.x_t)
    everything = window_states(window_for(5, 6, 2, seeded=False), steps_per_sample=lambda kept: kept)
    assert everything.columns.tolist() == [*range(6)] * 5
    assert window_states(window, steps_per_sample=lambda kept: None).columns.tolist() == [*range(6)] * 5


def test_samples_draw_their_steps_apart_and_the_same_way_again():
    first, again = (window_states(window_for(40, 6, 2), steps_per_sample=2).columns.reshape(40, 2) for _ in range(2))
    assert torch.equal(first, again)
    assert len({tuple(row) for row in first.tolist()}) > 5
    tail = window_for(40, 6, 2)
    tail = tail._replace(
        trajectory=Trajectory(*(x[20:] if x.shape[0] == 40 else x for x in tail.trajectory)),
        cond={name: x[20:] for name, x in tail.cond.items()},
    )
    assert torch.equal(window_states(tail, steps_per_sample=2).columns.reshape(20, 2), first[20:])


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_steps_per_sample_is_a_count_whoever_says_it(size):
    with refuses("steps_per_sample", size):
        require_steps_per_sample(size)
    # a function that says 0 would train nothing, silently
    with refuses("steps_per_sample", size):
        window_states(window_for(2, 3, 2), steps_per_sample=lambda kept: size)


def test_steps_per_sample_needs_that_many_steps_and_seeds():
    for fine in (None, 1, 3, lambda kept: kept):
        require_steps_per_sample(fine)
    with refuses("steps_per_sample=4", 3):
        window_states(window_for(2, 3, 2), steps_per_sample=4)
    with refuses("seeds"):
        window_states(window_for(2, 3, 2, seeded=False), steps_per_sample=2)


# ---- which of them hold numbers ---------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from(["", *LATENTS])), min_size=1, max_size=5),
    st.sampled_from([NAN, INF]),
)
def test_states_of_samples_without_reward_that_hold_no_numbers_become_0(samples, poison):
    """samples: (has a reward, which of its tensors is spoilt at step 1)."""
    rewarded = torch.tensor([has for has, _ in samples])
    s = states(len(samples), 2, 2, 3)
    for i, (_, name) in enumerate(samples):
        if name:
            getattr(s, name)[2 * i + 1, 0, 2] = poison
    found, usable = finite_states(s, rewarded)
    for row in range(len(s.rows)):
        has, name = samples[row // 2]
        gone = not has and name != "" and row % 2 == 1
        assert bool(usable[row]) == (not gone)
        for field in LATENTS:
            expected = torch.zeros(2, 3, dtype=F64) if gone else getattr(s, field)[row]
            # a rewarded sample keeps its nan: that is an error to be seen, not to be trained around
            torch.testing.assert_close(getattr(found, field)[row], expected, rtol=0, atol=0, equal_nan=True)
    for field in ("t", "t_next", "std", "log_prob", "rows", "columns", "cond"):
        assert getattr(found, field) is getattr(s, field)


def test_nan_states_pass_no_gradient_once_replaced():
    s = states(2, 1, 3)
    s.x_t[1] = NAN
    found, usable = finite_states(s, torch.tensor([True, False]))
    theta = torch.ones(3, dtype=F64, requires_grad=True)
    torch.where(usable, (found.x_t * theta).square().sum(1), 0.0).sum().backward()
    torch.testing.assert_close(theta.grad, 2 * s.x_t[0] ** 2)


@given(st.lists(st.sampled_from([0.0, -2.0, NAN, INF, -INF]), min_size=1, max_size=6))
def test_who_has_a_reward(values):
    rewards = torch.tensor(values, dtype=F64)
    assert has_reward(window_for(len(values), 1, 1, rewards=rewards)).tolist() == [math.isfinite(x) for x in values]
    said = torch.tensor([i % 2 == 0 for i in range(len(values))])
    assert has_reward(window_for(len(values), 1, 1, rewards=rewards, credit={"has_reward": said})) is said


# ---- weights and metrics ----------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=5))
def test_the_credit_s_weight_multiplies_what_the_objective_keeps(samples):
    kept, keep, weight = (torch.tensor(column) for column in zip(*samples))
    rows = torch.arange(len(samples)).repeat_interleave(2)
    plain = window_for(len(samples), 2, 1)
    assert torch.equal(loss_weights(plain, kept[rows], rows), kept[rows])
    weighted = plain._replace(credit={"weight": weight})
    for of_objective in (kept[rows], keep[rows]):
        found = loss_weights(weighted, of_objective, rows).tolist()
        assert found == pytest.approx([float(k) * samples[int(i)][2] for k, i in zip(of_objective, rows)])


def test_share_of_counts_within_and_is_0_of_nobody():
    what, among = torch.tensor([True, True, False, False, True]), torch.tensor([True, False, True, True, True])
    assert share_of(what, among) == 0.5
    assert share_of(what, torch.zeros(5, dtype=torch.bool)) == 0.0
    assert share_of(~what, ~among) == 0.0


@given(seeds, st.integers(1, 4), st.lists(st.integers(1, 3), max_size=3))
def test_drift_rms_is_over_the_usable_states_alone(seed, w, d):
    v, v_old = normal(w + 1, *d, seed=seed).requires_grad_(), normal(w + 1, *d, seed=seed + 1)
    with torch.no_grad():
        v[w] = NAN
    usable = torch.arange(w + 1) < w
    gaps = [float(a - b) ** 2 for i in range(w) for a, b in zip(v[i].detach().flatten(), v_old[i].flatten())]
    assert drift_rms(v, v_old, usable) == pytest.approx(math.sqrt(sum(gaps) / len(gaps)), rel=1e-12)


@given(st.integers(1, 4), st.integers(1, 4), seeds)
def test_metrics_by_step_are_means_over_the_usable_states_of_that_step(b, s, seed):
    # std, ratio and gradient norm per step of the grid. https://github.com/XueZeyue/DanceGRPO/issues/79
    found_states = states(b, s, 2)
    values = normal(b * s, seed=seed).requires_grad_()
    usable = normal(b * s, seed=seed + 1) > -0.7
    expected: dict[str, list[float]] = {}
    for row in range(b * s):
        if usable[row]:
            t = 1 - (row % s) / (s + 1)
            expected.setdefault(f"ratio/t={t:.3f}", []).append(float(values[row].detach()))
    found = by_step("ratio", values, found_states, usable)
    assert found.keys() == expected.keys()
    for name, numbers in expected.items():
        assert found[name] == pytest.approx(sum(numbers) / len(numbers), rel=1e-12)


def test_metrics_by_step_are_named_by_the_time_the_step_starts_at():
    s = states(1, 2, 2)._replace(t=torch.tensor([0.9, 0.75]))
    values = torch.tensor([2.0, float("nan")])
    assert by_step("std", values, s, torch.tensor([True, False])) == {"std/t=0.900": 2.0}


# ---- the reference ----------------------------------------------------------------------------------------------------


def test_reference_velocity_is_that_of_the_reference_params_at_the_same_states_without_gradient():
    def velocity(params, x_t, t, cond):
        return params["a"] * x_t + t[:, None] + cond["text"][:, None]

    reference = {"a": torch.tensor(3.0, dtype=F64, requires_grad=True)}
    window = window_for(2, 3, 2, reference=reference)
    s = window_states(window)
    found = reference_velocity(velocity, window, s)
    assert not found.requires_grad
    assert torch.equal(found, 3 * s.x_t + s.t[:, None] + s.rows[:, None])
    with refuses("reference", "None"):
        reference_velocity(velocity, window._replace(reference=None), s)


# ---- negative control -------------------------------------------------------------------------------------------------


def test_control_states_of_another_order_or_sample_would_be_seen():
    s = states(3, 4, 2)
    step_major = torch.arange(12).reshape(3, 4).T.flatten()
    assert not torch.equal(s.x_t[step_major], s.x_t)
    assert not torch.equal(s.rows[step_major], s.rows)
    assert not torch.equal(s.x_0[step_major], s.x_0)
    spoilt = s._replace(x_t=torch.where(s.rows[:, None] == 1, NAN, s.x_t))
    assert not torch.isfinite(finite_states(spoilt, torch.ones(3, dtype=torch.bool))[0].x_t).all()


def test_a_mean_is_a_float_that_knows_of_how_many_also_where_it_was_sent():
    values = torch.tensor([1.0, 5.0, 3.0], requires_grad=True)
    mean = mean_over(values, torch.tensor([True, False, True]))
    assert (mean, mean.count) == (2.0, 2)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        sent = pickle.loads(pickle.dumps(mean, protocol))
        assert (type(sent), sent, sent.count) == (Mean, 2.0, 2)
    none = mean_over(values, torch.zeros(3, dtype=torch.bool))
    assert math.isnan(none)
    assert none.count == 0
    assert share_of(values > 4, values > 1).count == 2
    assert drift_rms(values[:, None], 0 * values[:, None], values > 1).count == 2
