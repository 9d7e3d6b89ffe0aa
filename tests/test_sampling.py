"""Grids, seeds, rollouts, windows and wrappers of `diffrl.sampling`; its kernels are in test_kernels.py."""

import functools
import itertools
import math
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import F64, normal, refuses, spy
from strategies import seeds
from test_kernels import KERNELS, NOISY, by_hand, gaussian

import diffrl.kernels
import diffrl.sampling
from diffrl.sampling import (
    Past,
    chunked,
    classifier_free,
    cps_step,
    dpm2_step,
    euler_step,
    flow_sde_step,
    mix_window,
    mix_windows,
    predict_x_0,
    random_window,
    rollout,
    sample_seeds,
    sde_window,
    seeded_noise,
    time_grid,
    transition_log_prob,
)

HALVES = (torch.bfloat16, torch.float16)


# ---- time grids -------------------------------------------------------------------------------------------------------


def test_time_grid_golden_numbers():
    torch.testing.assert_close(
        time_grid(4, shift=3, dtype=F64), torch.tensor([1, 0.9, 0.75, 0.5, 0], dtype=F64), rtol=0, atol=1e-15
    )


@given(st.integers(1, 200), st.floats(0.2, 12.0))
def test_time_grid_is_its_closed_form_with_the_shift_applied_once(steps, shift):
    # The shift was applied twice to the end of the schedule. https://github.com/huggingface/diffusers/issues/13243
    # Sigmas were shifted, time-steps were not: here there is one time. https://github.com/huggingface/diffusers/issues/14013
    t = time_grid(steps, shift=shift, dtype=F64)
    u = 1 - np.arange(steps + 1) / steps
    np.testing.assert_allclose(t.numpy(), shift * u / (1 + (shift - 1) * u), rtol=0, atol=1e-15)
    np.testing.assert_allclose((t / (shift - (shift - 1) * t)).numpy(), u, rtol=0, atol=1e-12)  # its inverse, once
    assert t[0] == 1
    assert t[-1] == 0
    assert bool((t.diff() < 0).all())


def test_time_grid_dtype_and_refusals():
    assert time_grid(3).dtype == torch.float32
    assert time_grid(3, dtype=torch.bfloat16).dtype == torch.float32
    assert time_grid(3, dtype=F64).dtype == F64
    for steps in (0, -1, 2.5, True):
        with refuses("steps", repr(steps)):
            time_grid(steps)
    for shift in (0.0, -1.0, math.nan, math.inf):
        with refuses("shift", shift):
            time_grid(3, shift=shift)
    with refuses("steps=10", "coincide"):
        time_grid(10, shift=1e9)


# ---- seeds ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=6), st.integers(0, 9), st.data())
def test_a_row_of_noise_depends_on_its_seed_and_stream_alone(values, stream, data):
    # A row's result depends on who else is in the batch. https://github.com/pytorch/pytorch/issues/124025
    order = data.draw(st.permutations(range(len(values))))
    all_rows = seeded_noise(torch.tensor(values), (2, 3), stream=stream)
    permuted = seeded_noise(torch.tensor(values)[list(order)], (2, 3), stream=stream)
    assert torch.equal(permuted, all_rows[list(order)])
    for i, value in enumerate(values):
        assert torch.equal(seeded_noise(torch.tensor([value]), (2, 3), stream=stream)[0], all_rows[i])


@given(st.integers(-50, 2**40), st.integers(1, 40))
def test_neighbouring_seeds_and_streams_never_alias(seed, stream):
    rows = [
        seeded_noise(torch.tensor([s]), (4,), stream=k)[0]
        for s, k in (
            (seed, stream),
            (seed + 1, stream - 1),
            (seed - 1, stream + 1),
            (seed + 1, stream),
            (seed, stream - 1),
        )
    ]
    for a, b in itertools.combinations(rows, 2):
        assert not torch.equal(a, b)
        assert not torch.equal(a, -b)


def test_noise_is_standard_normal_and_independent_between_streams():
    n, d = 400, 50
    a, b = (seeded_noise(torch.arange(n), (d,), stream=s).double() for s in (0, 1))
    size = (n * d) ** 0.5
    assert abs(float(a.mean())) < 5 / size
    assert abs(float((a**2).mean()) - 1) < 5 * 2**0.5 / size
    assert abs(float((a**4).mean()) - 3) < 5 * 96**0.5 / size
    assert abs(float((a * b).mean())) < 5 / size
    assert abs(float((a[1:] * a[:-1]).mean())) < 5 / size
    assert abs(float((a[1:] * b[:-1]).mean())) < 5 / size


def test_global_generators_are_not_touched():
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = seeded_noise(torch.tensor([3]), (4,))
    rollout(linear, PARAMS, {}, time_grid(3), seeds=torch.tensor([1, 2]), shape=(4,), step=flow_sde_step)
    sample_seeds(0, 0, [0], 2)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    torch.manual_seed(7)
    assert torch.equal(seeded_noise(torch.tensor([3]), (4,)), first)


def test_seeded_noise_shapes_and_refusals():
    assert seeded_noise(torch.tensor([1, 2]), ()).shape == (2,)
    assert seeded_noise(torch.empty(0, dtype=torch.long), (2, 3)).shape == (0, 2, 3)
    assert seeded_noise(torch.tensor([1]), (2,)).dtype == torch.float32
    with refuses("seeds", "(2, 1)"):
        seeded_noise(torch.tensor([[1], [2]]), (2,))
    with refuses("seeds"):
        seeded_noise(torch.tensor([1.0]), (2,))
    with refuses("stream", "-1"):
        seeded_noise(torch.tensor([1]), (2,), stream=-1)
    with refuses("shape", "-2"):
        seeded_noise(torch.tensor([1]), (-2,))
    with refuses("shape", "3"):
        seeded_noise(torch.tensor([1]), 3)


def test_sample_seeds_are_a_function_of_seed_iteration_prompt_and_member():
    everything = sample_seeds(3, 5, range(20), 50)
    assert everything.dtype == torch.int64
    assert int(everything.min()) >= 0
    assert len(set(everything.flatten().tolist())) == 1000
    assert torch.equal(sample_seeds(3, 5, [7, 2], 9), everything[[7, 2], :9])
    assert torch.equal(sample_seeds(3, 5, range(20), 50), everything)
    others = torch.stack([sample_seeds(4, 5, range(20), 50), sample_seeds(3, 6, range(20), 50)])
    assert not set(others.flatten().tolist()) & set(everything.flatten().tolist())
    words = np.random.SeedSequence([3, 5, 7, 8]).generate_state(1, np.uint64)[0]
    assert int(everything[7, 8]) == int(words) >> 1
    with refuses("seed", "-1"):
        sample_seeds(-1, 0, [0], 2)
    with refuses("iteration", "0.5"):
        sample_seeds(0, 0.5, [0], 2)


# ---- rollout ----------------------------------------------------------------------------------------------------------

PARAMS = {"a": torch.tensor(0.8)}


def linear(params, x_t, t, cond):
    """Elementwise, so that its bits do not depend on the number of rows."""
    shift = cond["shift"].to(x_t) if "shift" in cond else torch.zeros(len(x_t), dtype=x_t.dtype)
    return params["a"].to(x_t) * x_t * (1 + t.reshape(-1, *[1] * (x_t.ndim - 1))) + shift.reshape(
        -1, *[1] * (x_t.ndim - 1)
    )


def ids(n: int) -> torch.Tensor:
    return torch.arange(n) * 7 + 3


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_replay_from_the_trajectory_equals_the_rollout_bit_for_bit(name, dtype):
    # One kernel and one log-prob serve both sides. https://github.com/verl-project/verl-omni/pull/209
    # Replay reads t and t_next, never rebuilds a grid. https://github.com/verl-project/verl-omni/pull/279
    # Steps have indices: the times of this grid are close. https://github.com/huggingface/diffusers/issues/11749
    b, cond = 5, {"shift": torch.linspace(-1, 1, 5)}
    times, step = time_grid(12, shift=9.0, dtype=dtype), KERNELS[name]
    tr = rollout(
        linear, PARAMS, cond, times, noise=normal(b, 2, 3, dtype=dtype), seeds=ids(b), step=step, keep=[0, 3, 11]
    )
    assert torch.equal(tr.t, times[[0, 3, 11]])
    assert torch.equal(tr.t_next, times[[1, 4, 12]])
    for j, index in enumerate([0, 3, 11]):
        t, t_next = tr.t[j].expand(b), tr.t_next[j].expand(b)
        v = linear(PARAMS, tr.x_t[:, j], t, cond)
        assert torch.equal(v, tr.v[:, j])
        mean, std = step(tr.x_t[:, j], v, t, t_next)
        assert torch.equal(std, tr.std[:, j])
        noise = seeded_noise(ids(b), (2, 3), stream=index + 1).to(dtype)
        assert torch.equal(mean + std[:, None, None] * noise, tr.x_next[:, j])
        again = transition_log_prob(tr.x_next[:, j], mean, std)
        assert torch.equal(again.nan_to_num(7), tr.log_prob[:, j].nan_to_num(7))
        assert bool(again.isnan().all()) == (name == "euler" or (name == "cps" and index == 11))
    assert torch.equal(tr.x_0, tr.x_next[:, 2])
    assert torch.equal(tr.seeds, ids(b))


@pytest.mark.parametrize("name", KERNELS)
def test_rollout_is_the_naive_walk(name):
    times, start = time_grid(6, shift=3.0, dtype=F64), normal(3, 4)
    tr = rollout(linear, PARAMS, {}, times, noise=start, seeds=ids(3), step=KERNELS[name])
    x = start
    for i in range(6):
        assert torch.equal(tr.x_t[:, i], x)
        v = linear(PARAMS, x, times[i].expand(3), {})
        expected = torch.empty_like(x)
        for row, column in itertools.product(range(3), range(4)):
            eta = {"euler": 0, "flow": 0.7, "dance": 0.3, "cps": 0.8}[name]
            m, s = by_hand(
                name, float(x[row, column]), float(v[row, column]), float(times[i]), float(times[i + 1]), eta
            )
            expected[row, column] = m + s * float(seeded_noise(ids(3), (4,), stream=i + 1)[row, column])
        torch.testing.assert_close(tr.x_next[:, i], expected, rtol=1e-12, atol=1e-12)
        x = tr.x_next[:, i]
    assert torch.equal(tr.x_0, x)
    assert torch.equal(tr.t_next[:-1], tr.t[1:])


@given(st.integers(1, 7), st.data())
def test_rollout_rows_do_not_depend_on_their_batch(b, data):
    # On-policy ratios are 1 for every chunking. https://github.com/XueZeyue/DanceGRPO/issues/87
    size = data.draw(st.integers(1, b))
    settings = {"shape": (2, 2), "step": flow_sde_step}
    cond = {"shift": torch.linspace(-1, 1, b)}
    whole = rollout(linear, PARAMS, cond, time_grid(4), seeds=ids(b), **settings)
    for i in range(0, b, size):
        part = rollout(
            linear, PARAMS, {"shift": cond["shift"][i : i + size]}, time_grid(4), seeds=ids(b)[i : i + size], **settings
        )
        for name in ("x_0", "x_t", "x_next", "v", "std", "log_prob"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[i : i + size])


def test_rollout_starts_from_stream_0_of_the_seeds_or_from_the_noise():
    tr = rollout(linear, PARAMS, {}, time_grid(3), seeds=ids(2), shape=(3,))
    assert torch.equal(tr.x_t[:, 0], seeded_noise(ids(2), (3,), stream=0))
    for dtype in (torch.float32, F64):
        tr = rollout(linear, PARAMS, {}, time_grid(3, dtype=dtype), seeds=ids(2), shape=(3,), step=flow_sde_step)
        assert {x.dtype for x in tr[:8]} == {dtype}
        assert torch.equal(tr.x_t[:, 0], seeded_noise(ids(2), (3,)).to(dtype))
    start = normal(2, 3, dtype=torch.float32)
    tr = rollout(linear, PARAMS, {}, time_grid(3), noise=start)
    assert torch.equal(tr.x_t[:, 0], start)
    assert tr.seeds is None


def test_keep_stores_only_the_kept_steps():
    def stored(keep):
        tr = rollout(linear, PARAMS, {}, time_grid(8), seeds=ids(3), shape=(5, 2), step=flow_sde_step, keep=keep)
        parts = (tr.x_t, tr.x_next, tr.v, tr.std, tr.log_prob, tr.t, tr.t_next)
        assert all(p.shape[1] == len(keep) for p in parts[:5])
        return sum(p.untyped_storage().nbytes() for p in parts), tr

    per_step = 4 * (3 * (3 * 10) + 2 * 3 + 2)
    everything, full = stored(range(8))
    for keep in ([], [0], [7], [1, 4, 6], range(2, 7)):
        size, tr = stored(keep)
        assert size == per_step * len(keep)
        index = list(keep)
        assert torch.equal(tr.x_0, full.x_0)
        assert torch.equal(tr.x_t, full.x_t[:, index])
        assert torch.equal(tr.log_prob, full.log_prob[:, index])
        assert torch.equal(tr.t_next, full.t_next[index])
    assert everything == 8 * per_step


def test_states_that_are_not_kept_are_freed_during_the_rollout():
    alive: list[int] = []
    states: list[weakref.ref] = []

    def watched(params, x_t, t, cond):
        alive.append(sum(r() is not None for r in states))
        states.append(weakref.ref(x_t))
        return linear(params, x_t, t, cond)

    rollout(watched, PARAMS, {}, time_grid(10), seeds=ids(2), shape=(3,), keep=[2, 3])
    assert max(alive) <= 4
    alive.clear()
    states.clear()
    rollout(watched, PARAMS, {}, time_grid(10), seeds=ids(2), shape=(3,))
    assert max(alive) == 9


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_velocity_that_is_not_finite_stops_the_rollout(value):
    # Log-probabilities nan from the first step on. https://github.com/yifan123/flow_grpo/issues/177
    def broken(params, x_t, t, cond):
        v = torch.zeros_like(x_t)
        if float(t[0]) < 0.6:
            v[1:4, 0] = value
        return v

    with refuses("step 2", "t = 0.5", "3 of 5 rows"):
        rollout(broken, PARAMS, {}, time_grid(4), noise=torch.zeros(5, 2))
    with refuses("step 0", "1 of 2 rows"):
        rollout(linear, PARAMS, {}, time_grid(4), noise=torch.tensor([[1.0], [value]]))


def test_mixed_kernels_one_per_step():
    # The window is an argument and comes back with the trajectory. https://github.com/yifan123/flow_grpo/issues/150
    # Which steps are stochastic is data, not a fraction. https://github.com/yifan123/flow_grpo/issues/62
    # Samples turned to noise and nothing said why: std is there per step. https://github.com/XueZeyue/DanceGRPO/issues/79
    window, times = sde_window(6, start=1, size=2), time_grid(6)
    steps = [flow_sde_step if i in window else euler_step for i in range(6)]
    tr = rollout(linear, PARAMS, {}, times, seeds=ids(2), shape=(3,), step=steps)
    assert (tr.std[0] > 0).tolist() == [False, True, True, False, False, False]
    assert tr.log_prob.isnan()[0].tolist() == [True, False, False, True, True, True]
    tr = rollout(linear, PARAMS, {}, times, seeds=ids(2), shape=(3,), step=steps, keep=window)
    assert torch.equal(tr.t, times[1:3])
    assert bool((tr.std > 0).all())


@pytest.mark.parametrize("half", HALVES)
def test_what_is_stored_is_what_is_scored_with_a_half_precision_model(half):
    # Sampled in float32, stored in bf16, scored the other one: mean ratio .99996.
    # https://github.com/verl-project/verl-omni/blob/main/docs/contributing/common_pitfalls.md
    # bf16 storage moves the log-prob by ten clip ranges. https://github.com/yifan123/flow_grpo
    # A cast whose result was thrown away; one mode for both sides. https://github.com/XueZeyue/DanceGRPO
    # A shipped `assert ratio == 1` failed: here both sides are the same numbers. https://github.com/ReinFlow/ReinFlow/issues/5
    def narrow(params, x_t, t, cond):
        return linear(params, x_t.to(half), t.to(half), cond)

    tr = rollout(narrow, PARAMS, {}, time_grid(5), noise=normal(4, 6, dtype=half), seeds=ids(4), step=flow_sde_step)
    assert {x.dtype for x in tr[:8]} == {torch.float32}
    for j in range(5):
        v = narrow(PARAMS, tr.x_t[:, j], tr.t[j].expand(4), {})
        mean, std = flow_sde_step(tr.x_t[:, j], v, tr.t[j], tr.t_next[j])
        ratio = torch.exp(transition_log_prob(tr.x_next[:, j], mean, std) - tr.log_prob[:, j])
        assert torch.equal(ratio, torch.ones(4))


def test_the_velocity_is_fed_the_grid_s_own_times():
    # int(sigma * 1000) cut up to .92 of a step. https://github.com/XueZeyue/DanceGRPO
    # Rounding of t against sigma between rollout and replay. https://github.com/X-GenGroup/Flow-Factory/pull/61
    log = []
    times = time_grid(16, shift=3.0)
    tr = rollout(spy(linear, log), PARAMS, {}, times, seeds=ids(3), shape=(2,))
    fed = torch.stack([args[2] for args, _ in log])
    assert torch.equal(fed, times[:-1, None].expand(16, 3))
    assert torch.equal(tr.t, times[:-1])
    assert tr.t.dtype == torch.float32


def test_rollout_carries_no_gradient_and_changes_no_argument():
    params, start = {"a": torch.tensor(0.8, requires_grad=True)}, normal(2, 3).requires_grad_()
    before = start.detach().clone()
    tr = rollout(linear, params, {}, time_grid(3, dtype=F64), noise=start, seeds=ids(2), step=flow_sde_step)
    assert not any(x.requires_grad for x in tr[:8])
    tr.x_t.zero_()
    tr.x_0.zero_()
    assert torch.equal(start.detach(), before)


def test_rollout_refusals():
    x, times = torch.zeros(2, 3), time_grid(4)
    go = functools.partial(rollout, linear, PARAMS, {})
    with refuses("noise", "seeds"):
        go(times)
    with refuses("shape", "seeds"):
        go(times, seeds=ids(2))
    with refuses("step 0 is stochastic", "seeds"):
        go(times, noise=x, step=flow_sde_step)
    with refuses("step 1 is stochastic"):
        go(times, noise=x, step=[euler_step, cps_step, euler_step, euler_step])
    with refuses("3 kernels", "4 steps"):
        go(times, noise=x, step=[euler_step] * 3)
    with refuses("keep", "0..3", "[2, 1]"):
        go(times, noise=x, keep=[2, 1])
    # A double [:, :-1] cut the kept steps twice: steps are sorted, without repeats, inside the grid.
    # https://github.com/XueZeyue/DanceGRPO/issues/99
    for keep in ([1, 1], [4], [-1], [1.5]):
        with refuses("keep", keep[-1]):
            go(times, noise=x, keep=keep)
    with refuses("seed", "(3,)", "(2, 3)"):
        go(times, noise=x, seeds=ids(3))
    with refuses("shape (5,)", "(2, 3)"):
        go(times, noise=x, shape=(5,))
    with refuses("cond['text']", "2", "(3, 4)"):
        rollout(linear, PARAMS, {"text": torch.zeros(3, 4)}, times, noise=x)
    with refuses("v (2, 1)", "x_t (2, 3)", "step 0"):
        rollout(lambda p, x, t, c: x[:, :1], PARAMS, {}, times, noise=x)
    for bad in (torch.tensor([1.0]), torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.5, 0.5]), torch.tensor([1.2, 0.0])):
        with refuses("times"):
            go(bad, noise=x)


# ---- the memory of multistep kernels ----------------------------------------------------------------------------------


def noting(log: list, step=euler_step):
    """A kernel that takes a past, notes it, and steps as `step` does."""

    def kernel(x_t, v, t, t_next, *, past=None):
        log.append(past)
        return step(x_t, v, t, t_next)

    return kernel


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_rollout_gives_dpm2_the_step_before(dtype, shift):
    times, start = time_grid(7, shift=shift, dtype=dtype), normal(3, 2, 2, dtype=dtype)
    tr = rollout(linear, PARAMS, {}, times, noise=start, step=dpm2_step)
    x, past = start, None
    for i in range(7):
        assert torch.equal(tr.x_t[:, i], x)
        v = linear(PARAMS, x, times[i].expand(3), {})
        x, past = (
            dpm2_step(x, v, times[i], times[i + 1], past=past)[0],
            Past(predict_x_0(x, v, times[i]), times[i].expand(3)),
        )
    assert torch.equal(tr.x_0, x)
    assert bool((tr.std == 0).all())
    assert bool(tr.log_prob.isnan().all())  # a deterministic step has no density, and none is invented
    euler = rollout(linear, PARAMS, {}, times, noise=start).x_t
    # t = 1, then past.t = 1: two first-order steps to the bit, then another path
    assert torch.equal(tr.x_t[:, :3], euler[:, :3])
    assert not bool((tr.x_t[:, 3] == euler[:, 3]).all())


def test_a_step_of_a_stored_dpm2_rollout_is_replayed_from_the_trajectory():
    tr = rollout(linear, PARAMS, {}, time_grid(6), noise=normal(3, 4), step=dpm2_step)
    for j in range(1, 6):
        past = Past(predict_x_0(tr.x_t[:, j - 1], tr.v[:, j - 1], tr.t[j - 1]), tr.t[j - 1].expand(3))
        assert torch.equal(dpm2_step(tr.x_t[:, j], tr.v[:, j], tr.t[j], tr.t_next[j], past=past)[0], tr.x_next[:, j])


def test_the_memory_is_the_data_prediction_and_time_of_any_deterministic_step_and_ends_with_noise():
    log: list = []
    take, take_noisily = noting(log), functools.partial(noting(log, flow_sde_step), past=None)
    steps = [take, euler_step, take, dpm2_step, take, flow_sde_step, take, take_noisily, take]
    times = time_grid(9, dtype=F64)
    tr = rollout(linear, PARAMS, {}, times, seeds=ids(2), shape=(3,), step=steps)
    assert [past is None for past in log] == [True, False, False, True, False, True]
    for index, past in zip((1, 3, 6), (log[1], log[2], log[4])):
        assert torch.equal(past.t, times[index].expand(2))
        assert torch.equal(past.x_0, predict_x_0(tr.x_t[:, index], tr.v[:, index], times[index]))


def test_a_row_that_drew_noise_begins_anew_and_its_neighbours_do_not_notice():
    def noisy_where_negative(x_t, v, t, t_next):
        mean, _ = euler_step(x_t, v, t, t_next)
        return mean, 0.3 * (x_t[:, 0] < 0).to(x_t)

    log: list = []
    times, start = time_grid(4, dtype=F64), torch.tensor([[-1.0], [1.0], [2.0]], dtype=F64)
    go = functools.partial(rollout, linear, PARAMS, {}, times)
    steps = [euler_step, noisy_where_negative, noting(log, dpm2_step), euler_step]
    tr = go(noise=start, seeds=ids(3), step=steps)
    assert (tr.std[:, 1] > 0).tolist() == [True, False, False]
    assert log[0].t.tolist() == [math.inf, 0.75, 0.75]
    steps[2] = dpm2_step
    whole = go(noise=start, seeds=ids(3), step=steps)
    for i in range(3):
        alone = go(noise=start[[i]], seeds=ids(3)[[i]], step=steps)
        assert torch.equal(alone.x_t, whole.x_t[[i]])
    steps[2] = euler_step
    assert (go(noise=start, seeds=ids(3), step=steps).x_0 == whole.x_0).flatten().tolist() == [True, False, False]


@given(st.integers(1, 6), st.data())
def test_dpm2_rows_do_not_depend_on_their_batch(b, data):
    size, start = data.draw(st.integers(1, b)), normal(b, 2, 2, dtype=torch.float32)
    whole = rollout(linear, PARAMS, {}, time_grid(5), noise=start, step=dpm2_step)
    for i in range(0, b, size):
        part = rollout(linear, PARAMS, {}, time_grid(5), noise=start[i : i + size], step=dpm2_step)
        assert torch.equal(part.x_t, whole.x_t[i : i + size])
        assert torch.equal(part.x_0, whole.x_0[i : i + size])


def test_a_kernel_s_keyword_past_is_found_through_partials_and_wrappers_and_nothing_else_is_given_one():
    log: list = []
    kernel = noting(log)

    @functools.wraps(kernel)
    def wrapped(*args, **kwargs):
        return kernel(*args, **kwargs)

    class Kernel:
        def __call__(self, x_t, v, t, t_next, past=None):
            return kernel(x_t, v, t, t_next, past=past)

    for form in (kernel, functools.partial(kernel), wrapped, Kernel(), Kernel().__call__):
        log.clear()
        rollout(linear, PARAMS, {}, time_grid(3), noise=normal(2, 3), step=form)
        assert [past is None for past in log] == [True, False, False]

    def without(x_t, v, t, t_next, **kwargs):
        assert not kwargs
        return euler_step(x_t, v, t, t_next)

    def positional(x_t, v, t, t_next, past=4, /):
        assert past == 4
        return euler_step(x_t, v, t, t_next)

    class Foreign:
        __signature__ = 4  # as with a callable written in C, there is nothing to look at

        def __call__(self, *args):
            return euler_step(*args)

    for form in (without, positional, Foreign()):
        rollout(linear, PARAMS, {}, time_grid(3), noise=normal(2, 3), step=form)


def test_the_memory_costs_nothing_where_no_kernel_asks_for_it(monkeypatch):
    calls: list = []
    monkeypatch.setattr(diffrl.sampling, "predict_x_0", spy(predict_x_0, calls))
    rollout(linear, PARAMS, {}, time_grid(4), noise=normal(2, 3))
    assert not calls
    rollout(linear, PARAMS, {}, time_grid(4), noise=normal(2, 3), step=dpm2_step)
    assert len(calls) == 3  # the last step leaves nothing behind


@pytest.mark.parametrize(
    ("shift", "steps", "gain"), [(1.0, 5, 2.0), (1.0, 10, 8), (3.0, 5, 1.09), (3.0, 10, 1.9), (3.0, 20, 5)]
)
def test_dpm2_beats_euler_at_equal_steps(shift, steps, gain):
    # the endpoint of a Gaussian's flow is known; measured 2.07, 36, 1.10, 1.98 and 56 (where its error changes sign)
    start, times = normal(50, 1), time_grid(steps, shift=shift, dtype=F64)
    ends = [rollout(gaussian, {}, {}, times, noise=start, step=step, keep=[]).x_0 for step in (euler_step, dpm2_step)]
    euler, dpm2 = (float((end - 0.7 * start).abs().max()) for end in ends)
    assert dpm2 * gain < euler


# ---- windows ----------------------------------------------------------------------------------------------------------


@given(st.integers(2, 30), st.data())
def test_sde_window_lies_inside_0_to_steps_minus_2(steps, data):
    size = data.draw(st.integers(1, steps - 1))
    start = data.draw(st.integers(0, steps - 1 - size))
    window = sde_window(steps, start=start, size=size)
    assert list(window) == [start + i for i in range(size)]
    assert max(window) <= steps - 2
    with refuses(f"size {size}", f"{steps - 2} of {steps}"):
        sde_window(steps, start=steps - size, size=size)


def test_sde_window_refusals():
    for name, bad in (("size", 0), ("start", -1), ("steps", 0)):
        with refuses(name, bad):
            sde_window(**({"steps": 10, "start": 0, "size": 2} | {name: bad}))


@given(st.integers(3, 25), st.integers(1, 4), st.integers(1, 4), st.data())
def test_mix_windows_slide_stay_full_and_roll_back(steps, stride, every, data):
    # The published schedule shrinks at its end and holds an empty window. https://github.com/XueZeyue/DanceGRPO/issues/99
    size = data.draw(st.integers(1, steps - 1))
    starts = list(range(0, steps - size, stride))
    expected = [range(s, s + size) for s in starts for _ in range(every)] * 2
    assert list(itertools.islice(mix_windows(steps, size=size, stride=stride, every=every), len(expected))) == expected


def test_mix_windows_refuses_at_the_call():
    for name in ("size", "stride", "every"):
        with refuses(name, "0"):
            mix_windows(10, **({"size": 2, "stride": 1, "every": 1} | {name: 0}))
    with refuses("size 10"):
        mix_windows(10, size=10, stride=1, every=1)


@given(st.integers(3, 25), st.integers(1, 4), st.integers(1, 4), st.integers(0, 10**12), st.data())
def test_mix_window_is_a_function_of_the_iteration_alone(steps, stride, every, far, data):
    size = data.draw(st.integers(1, steps - 1))
    schedule = {"steps": steps, "size": size, "stride": stride, "every": every}
    starts = range(0, steps - size, stride)
    walked = list(itertools.islice(mix_windows(**schedule), 60))
    assert walked == [mix_window(i, **schedule) for i in range(60)]
    period = len(starts) * every  # resumed at any iteration, it goes on
    assert mix_window(far, **schedule) == mix_window(far % period, **schedule)
    assert [mix_window(far + i, **schedule) for i in range(3)] == [
        range(start, start + size) for start in (starts[(far + i) // every % len(starts)] for i in range(3))
    ]


def test_mix_window_golden_and_refusals():
    # steps 0..8 of 10 may be noisy: windows of four move by two after three iterations, and the third place is the last
    places = [mix_window(i, steps=10, size=4, stride=2, every=3).start for i in range(11)]
    assert places == [0, 0, 0, 2, 2, 2, 4, 4, 4, 0, 0]
    for name, bad in (("i", -1), ("i", 0.5), ("size", 0), ("stride", 0), ("every", 0), ("steps", 0)):
        with refuses(name, bad):
            mix_window(**({"i": 0, "steps": 10, "size": 2, "stride": 1, "every": 1} | {name: bad}))
    with refuses("size 10"):
        mix_window(0, steps=10, size=10, stride=1, every=1)


@pytest.mark.parametrize(("steps", "size"), [(10, 2), (10, 5), (10, 9), (28, 3), (3, 1), (2, 1)])
def test_random_window_starts_uniformly_in_the_first_half(steps, size):
    n, places = 3000, max(steps // 2 - size, 0) + 1
    windows = [random_window(seed, steps=steps, size=size) for seed in range(n)]
    assert all(len(w) == size and w.start >= 0 and max(w) <= steps - 2 for w in windows)
    counts = np.bincount([w.start for w in windows], minlength=places)
    assert len(counts) == places
    chi2 = ((counts - n / places) ** 2 / (n / places)).sum()  # mean places - 1, variance 2 (places - 1)
    assert chi2 <= places - 1 + 5 * math.sqrt(2 * (places - 1))
    runs = np.array([w.start for w in windows], dtype=float)
    if places > 1:  # neighbouring seeds are independent: correlation 0 +- 1/sqrt(n)
        assert abs(np.corrcoef(runs[1:], runs[:-1])[0, 1]) < 5 / math.sqrt(n)


@given(st.integers(0, 2**70), st.integers(2, 30), st.data())
def test_random_window_is_a_function_of_its_seed(seed, steps, data):
    size = data.draw(st.integers(1, steps - 1))
    state = np.random.get_state()[1].copy(), torch.get_rng_state()
    window = random_window(seed, steps=steps, size=size)
    assert window == random_window(seed, steps=steps, size=size) == sde_window(steps, start=window.start, size=size)
    assert window.start <= max(steps // 2 - size, 0)
    assert np.array_equal(np.random.get_state()[1], state[0])
    assert torch.equal(torch.get_rng_state(), state[1])


def test_random_window_golden_and_refusals():
    # the same on every machine and for ever: a resumed run must find its windows again
    assert [random_window(seed, steps=10, size=2).start for seed in range(12)] == [3, 3, 3, 0, 0, 3, 3, 3, 3, 0, 3, 2]
    for name, bad in (("seed", -1), ("seed", 0.5), ("steps", 0), ("size", 0)):
        with refuses(name, bad):
            random_window(**({"seed": 0, "steps": 10, "size": 2} | {name: bad}))
    with refuses("size 10", "8 of 10"):
        random_window(0, steps=10, size=10)


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("name", NOISY)
def test_a_window_never_holds_a_step_without_variance(name, shift):
    for steps in range(2, 9):
        times = time_grid(steps, shift=shift)
        schedules = [sde_window(steps, start=steps - 1 - size, size=size) for size in range(1, steps)]
        schedules += itertools.islice(mix_windows(steps, size=1, stride=1, every=1), 2 * steps)
        schedules += [random_window(seed, steps=steps, size=1) for seed in range(5)]
        for window in set(schedules):
            kernels = [KERNELS[name] if i in window else euler_step for i in range(steps)]
            tr = rollout(linear, PARAMS, {}, times, seeds=ids(2), shape=(2,), step=kernels, keep=window)
            assert bool((tr.std > 0).all())
            assert bool(torch.isfinite(tr.log_prob).all())


# ---- wrappers ---------------------------------------------------------------------------------------------------------


def conditional(params, x_t, t, cond):
    return x_t + cond["text"] + cond.get("pooled", torch.zeros_like(x_t)) + t[:, None]


@given(seeds, st.floats(-3, 9))
def test_classifier_free_extrapolates_from_the_unconditional_velocity(seed, scale):
    x, t, text, empty = (
        normal(2, 3, seed=seed),
        torch.full((2,), 0.5, dtype=F64),
        normal(2, 3, seed=1),
        normal(2, 3, seed=2),
    )
    log = []
    guided = classifier_free(spy(conditional, log), scale=scale)
    cond = {"text": text, "uncond.text": empty, "pooled": x}
    v_cond, v_uncond = (
        conditional({}, x, t, {"text": text, "pooled": x}),
        conditional({}, x, t, {"text": empty, "pooled": x}),
    )
    torch.testing.assert_close(guided({}, x, t, cond), v_uncond + scale * (v_cond - v_uncond), rtol=1e-12, atol=1e-12)
    assert all(sorted(args[3]) == ["pooled", "text"] for args, _ in log)
    assert len(log) == (1 if scale == 1 else 2)


def test_classifier_free_at_scale_1_is_one_call_of_the_condition_alone():
    log = []
    x, t = normal(2, 3), torch.full((2,), 0.5, dtype=F64)
    cond = {"text": normal(2, 3, seed=1), "uncond.text": normal(2, 3, seed=2)}
    out = classifier_free(spy(conditional, log), scale=1)({}, x, t, cond)
    assert torch.equal(out, conditional({}, x, t, {"text": cond["text"]}))
    assert len(log) == 1
    assert torch.equal(
        classifier_free(conditional, scale=1.0)({}, x, t, {"text": x}), conditional({}, x, t, {"text": x})
    )


def test_guidance_of_a_half_precision_model_is_combined_in_float32():
    # Under guidance 4.5 bf16 differences grow from 2e-5 to 5e-4. https://github.com/verl-project/verl-omni/issues/280
    x, t = normal(3, 4, dtype=torch.bfloat16), torch.full((3,), 0.5, dtype=torch.bfloat16)
    cond = {
        "text": normal(3, 4, seed=1, dtype=torch.bfloat16),
        "uncond.text": normal(3, 4, seed=2, dtype=torch.bfloat16),
    }
    v_cond, v_uncond = (conditional({}, x, t, {"text": cond[name]}).float() for name in ("text", "uncond.text"))
    out = classifier_free(conditional, scale=4.5)({}, x, t, cond)
    assert out.dtype == torch.float32
    assert torch.equal(out, v_uncond + 4.5 * (v_cond - v_uncond))
    assert classifier_free(conditional, scale=1.0)({}, x, t, cond).dtype == torch.float32


def test_classifier_free_refuses():
    x, t = torch.zeros(2, 3), torch.full((2,), 0.5)
    with refuses("scale", "nan"):
        classifier_free(conditional, scale=math.nan)
    with refuses("uncond", "['text']"):
        classifier_free(conditional, scale=3.0)({}, x, t, {"text": x})
    with refuses("['image']", "['text']"):
        classifier_free(conditional, scale=3.0)({}, x, t, {"text": x, "uncond.image": x})


@given(st.integers(0, 9), st.integers(1, 9))
def test_chunked_calls_at_most_size_rows_and_changes_nothing(b, size):
    log = []
    x, t, cond = normal(b, 3), torch.linspace(0, 1, b, dtype=F64), {"text": normal(b, 3, seed=1)}
    out = chunked(spy(conditional, log), size=size)({}, x, t, cond)
    assert torch.equal(out, conditional({}, x, t, cond))
    assert [len(args[1]) for args, _ in log] == ([size] * (b // size) + [b % size] * (b % size > 0) or [0])
    assert all(len(args[1]) == len(args[2]) == len(args[3]["text"]) for args, _ in log)


def test_chunked_agrees_with_one_call_through_a_matrix_product():
    # A row's last bits depend on its batch; they agree to 1e-5. https://github.com/pytorch/pytorch/issues/124025
    weight = normal(64, 64, dtype=torch.float32) / 8
    x, t = normal(33, 64, dtype=torch.float32), torch.full((33,), 0.5)
    velocity = lambda params, x_t, t, cond: torch.tanh(x_t @ weight)  # noqa: E731
    torch.testing.assert_close(chunked(velocity, size=5)({}, x, t, {}), velocity({}, x, t, {}), rtol=1e-5, atol=1e-5)
    for bad in (0, -1, 1.5):
        with refuses("size", bad):
            chunked(velocity, size=bad)


# ---- negative control -------------------------------------------------------------------------------------------------


def test_negative_control_an_aliasing_noise_fails_the_seed_tests():
    def aliasing(seed, stream):
        return torch.randn(4, generator=torch.Generator().manual_seed(seed + stream))

    assert torch.equal(aliasing(5, 1), aliasing(6, 0))
    assert not torch.equal(seeded_noise(torch.tensor([5]), (4,), stream=1), seeded_noise(torch.tensor([6]), (4,)))


def test_negative_control_a_memory_that_survives_noise_is_another_rollout():
    steps, times = [euler_step, flow_sde_step, dpm2_step, euler_step], time_grid(4, dtype=F64)
    tr = rollout(linear, PARAMS, {}, times, seeds=ids(2), shape=(3,), step=steps)
    x, v = tr.x_t[:, 2], tr.v[:, 2]
    fresh, stale = (
        dpm2_step(x, v, times[2], times[3]),
        Past(predict_x_0(tr.x_t[:, 1], tr.v[:, 1], times[1]), times[[1, 1]]),
    )
    assert torch.equal(tr.x_next[:, 2], fresh[0])
    assert float((dpm2_step(x, v, times[2], times[3], past=stale)[0] - fresh[0]).abs().min()) > 1e-3


def test_sampling_offers_everything_of_kernels():
    public = {name for name in vars(diffrl.kernels) if not name.startswith("_")}
    own = {name for name in public if getattr(getattr(diffrl.kernels, name), "__module__", "") == "diffrl.kernels"}
    assert own
    assert own <= set(diffrl.sampling.__all__)
    for name in own:
        assert getattr(diffrl.sampling, name) is getattr(diffrl.kernels, name)
    assert all(hasattr(diffrl.sampling, name) for name in diffrl.sampling.__all__)


# ---- what is handed in stays the caller's, what comes out is nobody else's


def half_way(params, x_t, t, cond):
    return 0.5 * x_t


def test_a_velocity_that_reuses_its_buffer_is_recorded_step_by_step():
    buffer = torch.empty(2, 3)

    def reusing(params, x_t, t, cond):
        return buffer.copy_(half_way(params, x_t, t, cond))

    ours, plain = (
        rollout(v, {}, {}, time_grid(3), seeds=torch.tensor([1, 2]), shape=(3,)) for v in (reusing, half_way)
    )
    assert torch.equal(ours.v, plain.v)
    assert not torch.equal(plain.v[:, 0], plain.v[:, 1])  # a shared buffer would be seen


def test_a_trajectory_shares_no_memory_with_its_arguments():
    noise, seeds_given, times = torch.ones(2, 3), torch.tensor([1, 2]), time_grid(2)

    def still(x_t, v, t, t_next):
        return x_t, torch.zeros(len(x_t))

    found = rollout(half_way, {}, {}, times, noise=noise, seeds=seeds_given, step=still)
    for tensor in (noise, seeds_given, times):
        tensor.zero_()
    assert torch.equal(found.x_0, torch.ones(2, 3))
    assert found.seeds.tolist() == [1, 2]
    assert found.t.tolist() == [1.0, 0.5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_kernel_of_another_dtype_does_not_change_the_states(dtype):
    def kernel(x_t, v, t, t_next):
        return (x_t - (t - t_next) * v).to(dtype), torch.full((len(x_t),), 0.1, dtype=dtype)

    found = rollout(half_way, {}, {}, time_grid(2), seeds=torch.tensor([1, 2]), shape=(3,), step=kernel)
    assert {x.dtype for x in (found.x_0, found.x_t, found.x_next, found.v, found.std, found.log_prob)} == {
        torch.float32
    }


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"step": None}, "step"),
        ({"step": [euler_step, None]}, "step"),
        ({"keep": 1}, "keep"),
        ({"seeds": [1, 2]}, "seeds"),
        ({"seeds": torch.tensor([1.0, 2.0])}, "seeds"),
        ({"step": lambda x_t, v, t, t_next: (x_t[:, :1], torch.zeros(2))}, "kernel of step 0"),
        ({"step": lambda x_t, v, t, t_next: (x_t, 0.0)}, "std"),
        ({"step": lambda x_t, v, t, t_next: (x_t, torch.zeros(()))}, "kernel of step 0"),
        ({"step": [euler_step, lambda x_t, v, t, t_next: (x_t * math.nan, torch.zeros(2))]}, "kernel of step 1"),
        ({"step": lambda x_t, v, t, t_next: (x_t, torch.tensor([0.0, math.nan])), "keep": []}, "std"),
        ({"step": lambda x_t, v, t, t_next: (x_t, torch.tensor([0.0, -0.5])), "keep": []}, "-0.5"),
    ],
)
def test_rollout_refuses_junk_by_name(changed, named):
    given = {"noise": torch.ones(2, 3), "seeds": torch.tensor([1, 2])} | changed
    with refuses(named):
        rollout(half_way, {}, {}, time_grid(2), **given)


@pytest.mark.parametrize("cond", [None, {"y": None}, {"y": [1, 2]}])
def test_rollout_refuses_a_cond_that_is_no_mapping_of_tensors(cond):
    with refuses("cond"):
        rollout(half_way, {}, cond, time_grid(2), noise=torch.ones(2, 3))


@pytest.mark.parametrize("v", [None, (torch.ones(2, 3),), torch.ones(2, 3, dtype=torch.int64)])
def test_rollout_refuses_a_velocity_that_is_no_float_tensor(v):
    with refuses("velocity"):
        rollout(lambda *_: v, {}, {}, time_grid(2), noise=torch.ones(2, 3))
