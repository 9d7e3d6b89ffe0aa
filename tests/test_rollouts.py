"""How a batch is collected: which steps, whose noise, where the window lies, states of the forward process.

The oracle is a rollout by hand: a plain loop whose noise is numpy's Philox, read without the library. Negative controls are
the tests with `control` in their names.
"""

import inspect
import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import F64, normal, refuses, spy
from scipy.stats import kstest
from toys import same, values_of

from diffrl.rewards import weighted_sum
from diffrl.rollouts import (
    RENOISE_STREAM,
    SUBSET_STREAM,
    all_but_last,
    all_steps,
    collect_renoised,
    collect_rollout,
    collect_window,
    first_half,
    noise_of_the_prompt,
    noisiest,
    noisiest_nine_tenths,
    own_noise,
    random_window_of,
    renoise,
    sliding_window_of,
    three_fifths,
)
from diffrl.sampling import (
    chunked,
    cps_step,
    dance_sde_step,
    dpm2_step,
    euler_step,
    flow_sde_step,
    mix_windows,
    rollout,
    sample_seeds,
    time_grid,
)
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model, toy_velocity
from diffrl.types import Gridded
from diffrl.windows import Score

STEPS, G, K = 6, 3, 4
SEEDS = sample_seeds(7, 0, range(G), K)
COND = {"prompt": torch.arange(G)}
ROWS = torch.arange(G).repeat_interleave(K)
COLLECTS = {
    "rollout": collect_rollout(step=flow_sde_step, trained_steps=all_but_last),
    "one noise per prompt": collect_rollout(step=dance_sde_step, noise=noise_of_the_prompt),
    "random window": collect_window(kernel=cps_step, window=random_window_of(2)),
    "sliding window": collect_window(kernel=flow_sde_step, window=sliding_window_of(2, stride=1, every=1)),
    "renoised": collect_renoised(trained_steps=noisiest(3)),
}
every_collect = pytest.mark.parametrize("collect", COLLECTS.values(), ids=COLLECTS)


def draw(seeds: torch.Tensor, stream: int, *shape: int) -> torch.Tensor:
    """Row i: standard normal float32 numbers of Philox with the key (stream, seeds[i])."""
    keys = [(stream << 64) + int(seed) for seed in seeds.flatten()]
    rows = [np.random.Generator(np.random.Philox(key=key)).standard_normal(shape, np.float32) for key in keys]
    return torch.from_numpy(np.stack(rows)).double()


def sampler(steps: int = STEPS, iteration: int = 0, velocity=toy_velocity) -> Gridded:
    return Gridded(velocity, partial(time_grid, shift=2.0, dtype=F64), steps, (2,), iteration)


def params_of(seed: int = 0) -> dict[str, torch.Tensor]:
    return {"mean": normal(4, 2, seed=seed), "log_std": torch.tensor(-0.4, dtype=F64)}


def first_axis(latents: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return latents[:, 0] + 10 * rows


def by_hand(kernels, *, start=None, steps: int = STEPS, params=None) -> list[dict[str, torch.Tensor]]:
    """Every step of a rollout of SEEDS: x, v, mean, std, x_next, t, t_next; the next noise is stream i + 1 of each seed."""
    times = time_grid(steps, shift=2.0, dtype=F64)
    x, taken = draw(SEEDS, 0, 2) if start is None else start, []
    for i, kernel in enumerate(kernels):
        v = toy_velocity(params or params_of(), x, times[i].expand(G * K), {"prompt": ROWS})
        mean, std = kernel(x, v, times[i], times[i + 1])
        x_next = mean + std[:, None] * draw(SEEDS, i + 1, 2)
        taken.append(
            {"x_t": x, "v": v, "mean": mean, "std": std, "x_next": x_next, "t": times[i], "next": times[i + 1]}
        )
        x = x_next
    return taken


def assert_is(trajectory, taken, kept) -> None:
    """The trajectory holds exactly the kept steps of a rollout by hand, and its end."""
    for name in ("x_t", "x_next", "v", "std"):
        torch.testing.assert_close(
            getattr(trajectory, name), torch.stack([taken[i][name] for i in kept], 1), rtol=1e-12, atol=1e-12
        )
    torch.testing.assert_close(trajectory.x_0, taken[-1]["x_next"], rtol=1e-12, atol=1e-12)
    assert trajectory.t.tolist() == [float(taken[i]["t"]) for i in kept]
    assert trajectory.t_next.tolist() == [float(taken[i]["next"]) for i in kept]
    for column, i in enumerate(kept):
        step = taken[i]
        exact = torch.distributions.Normal(step["mean"], step["std"].clamp_min(1e-9)[:, None])
        expected = torch.where(step["std"] > 0, exact.log_prob(step["x_next"]).mean(1), math.nan)
        torch.testing.assert_close(trajectory.log_prob[:, column], expected, rtol=1e-9, atol=1e-9, equal_nan=True)


# ---- which steps are trained ------------------------------------------------------------------------------------------


@given(st.integers(1, 60))
def test_trained_steps_are_indices_counted_in_one_place(n):
    # Which steps are trained is a range, never a fraction that drops one. https://github.com/yifan123/flow_grpo/issues/62
    # (N - 1) f against N f: one helper, sorted, without repeats. https://github.com/XueZeyue/DanceGRPO/issues/99
    assert list(all_steps(n)) == list(range(n))
    assert list(first_half(n)) == [i for i in range(n) if 2 * i < n]
    tenths = math.floor(Fraction(9, 10) * n)
    assert list(noisiest_nine_tenths(n)) == list(range(n))[: max(tenths, 1)]
    assert three_fifths(n) == max(math.floor(Fraction(3, 5) * n), 1)
    if n > 1:
        assert list(all_but_last(n)) == list(range(n))[:-1]


def test_there_must_be_a_step_but_the_last():
    with refuses("1 steps"):
        all_but_last(1)


@pytest.mark.parametrize("bad", [[2, 1], [1, 1], [0, STEPS], [-1], [0.5]])
@pytest.mark.parametrize("make", [collect_rollout, collect_renoised])
def test_steps_unsorted_repeated_or_outside_the_grid_are_refused_before_anything_is_scored(make, bad):
    asked = []
    with refuses("keep", f"{bad[-1]}"):
        make(trained_steps=lambda steps: bad)(sampler(), params_of(), COND, SEEDS, spy(first_axis, asked))
    assert asked == []
    with refuses("keep", f"{bad[-1]}"):
        walked = rollout(
            toy_velocity, params_of(), {"prompt": ROWS}, sampler().times(STEPS), seeds=SEEDS.flatten(), shape=(2,)
        )
        renoise(sampler(), params_of(), {"prompt": ROWS}, walked, bad)


@pytest.mark.parametrize("make", [collect_rollout, collect_renoised])
def test_training_no_step_is_refused(make):
    with refuses("trained_steps", STEPS):
        make(trained_steps=lambda steps: ())(sampler(), params_of(), COND, SEEDS, first_axis)


# ---- what every collect does ------------------------------------------------------------------------------------------


@every_collect
def test_a_collect_is_a_function_of_its_arguments(collect):
    state, params = torch.get_rng_state(), params_of()
    before = values_of(params)
    first, again = (collect(sampler(), params, COND, SEEDS, first_axis) for _ in range(2))
    for a, b in zip(first.trajectory, again.trajectory):
        assert torch.equal(a.nan_to_num(0), b.nan_to_num(0))
    assert torch.equal(first.rewards, again.rewards)
    assert torch.equal(torch.get_rng_state(), state)
    assert same(values_of(params), before)
    assert first.cond is COND
    assert torch.equal(first.trajectory.seeds, SEEDS.flatten())
    assert not any(x.requires_grad for x in first.trajectory)


@every_collect
def test_every_sample_is_scored_once_under_its_own_prompt(collect):
    asked = []
    batch = collect(sampler(), params_of(), COND, SEEDS, spy(first_axis, asked))
    (((latents, rows), _),) = asked
    assert torch.equal(rows, ROWS)
    assert torch.equal(latents, batch.trajectory.x_0)
    assert torch.equal(batch.rewards.flatten(), latents[:, 0] + 10 * rows)
    assert batch.rewards.shape == (G, K)
    assert batch.parts is None


@every_collect
def test_the_single_values_of_a_reward_reach_the_batch_in_its_order(collect):
    def along(axis):
        return lambda images, prompts: images[:, axis] + 100 * torch.tensor([PROMPTS.index(p) for p in prompts])

    several = weighted_sum({"x": along(0), "y": along(1)}, {"x": 2.0, "y": -1.0})
    batch = collect(sampler(), params_of(), COND, SEEDS, Score(lambda latents: latents, several, PROMPTS[:G]))
    x_0 = batch.trajectory.x_0.reshape(G, K, 2)
    expected = x_0 + 100 * torch.arange(G)[:, None, None]
    assert torch.equal(batch.parts, expected)
    torch.testing.assert_close(batch.rewards, 2 * expected[..., 0] - expected[..., 1], rtol=1e-12, atol=1e-12)


@every_collect
def test_a_velocity_without_its_grid_is_refused(collect):
    with refuses("Gridded"):
        collect(toy_velocity, params_of(), COND, SEEDS, first_axis)


@every_collect
def test_a_sample_does_not_depend_on_the_others(collect):
    """Two of the prompts alone; the window of the whole batch is drawn from its first seed, which stays."""
    whole = collect(sampler(), params_of(), COND, SEEDS, first_axis).trajectory
    part = collect(sampler(), params_of(), {"prompt": torch.arange(2)}, SEEDS[:2], first_axis).trajectory
    for name in ("x_0", "x_t", "x_next", "v", "std"):
        torch.testing.assert_close(getattr(part, name), getattr(whole, name)[: 2 * K], rtol=1e-12, atol=1e-12)


# ---- noise ------------------------------------------------------------------------------------------------------------


def test_samples_start_from_their_own_noise():
    assert own_noise(SEEDS, (2,)) is None
    tr = collect_rollout()(sampler(), params_of(), COND, SEEDS, first_axis).trajectory
    assert torch.equal(tr.x_t[:, 0], draw(SEEDS, 0, 2))


def test_samples_of_a_prompt_start_from_one_noise_and_differ_by_their_steps():
    start = draw(SEEDS[:, 0], 0, 2).repeat_interleave(K, 0)
    torch.testing.assert_close(noise_of_the_prompt(SEEDS, (2,)).double(), start, rtol=0, atol=0)
    collect = collect_rollout(step=dance_sde_step, noise=noise_of_the_prompt)
    tr = collect(sampler(), params_of(), COND, SEEDS, first_axis).trajectory
    assert_is(tr, by_hand([dance_sde_step] * STEPS, start=start), range(STEPS))
    groups = tr.x_t[:, 0].reshape(G, K, 2)
    assert torch.equal(groups, groups[:, :1].expand(G, K, 2))
    assert len(groups[:, 0].unique(dim=0)) == G
    assert len(tr.x_next[:, 0].unique(dim=0)) == G * K


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("noise", [own_noise, noise_of_the_prompt])
def test_a_start_has_the_grid_s_precision(noise, dtype):
    model = toy_model(dtype=dtype)
    grid = Gridded(model.velocity, model.times, STEPS, (2,))
    tr = collect_rollout(noise=noise)(grid, model.params, COND, SEEDS, first_axis).trajectory
    assert tr.x_t.dtype == tr.x_0.dtype == dtype


# ---- kernels per step, windows ----------------------------------------------------------------------------------------


def test_kernels_may_differ_per_step():
    # Is there noise in the last step? Its std is in the trajectory. https://github.com/irom-princeton/dppo/issues/42
    kernels = [flow_sde_step, euler_step, dance_sde_step, cps_step, partial(flow_sde_step, eta=0.3), cps_step]
    tr = collect_rollout(step=kernels)(sampler(), params_of(), COND, SEEDS, first_axis).trajectory
    assert_is(tr, by_hand(kernels), range(STEPS))
    assert [bool((s > 0).all()) for s in tr.std.T] == [True, False, True, True, True, False]
    with refuses("5 kernels for 6 steps"):
        collect_rollout(step=kernels[:5])(sampler(), params_of(), COND, SEEDS, first_axis)


@pytest.mark.parametrize("start", range(STEPS - 2))
@pytest.mark.parametrize("outside", [euler_step, partial(dance_sde_step, eta=0.1)], ids=["euler", "dance"])
def test_noise_lies_in_the_window_which_comes_back_with_the_trajectory(start, outside):
    # Nobody could tell where the window lay: it is trajectory.t and .std. https://github.com/yifan123/flow_grpo/issues/150
    window, asked = range(start, start + 2), []
    collect = collect_window(kernel=flow_sde_step, window=spy(lambda velocity, seeds: window, asked), outside=outside)
    velocity = sampler(iteration=3)
    batch = collect(velocity, params_of(), COND, SEEDS, first_axis)
    kernels = [flow_sde_step if i in window else outside for i in range(STEPS)]
    assert_is(batch.trajectory, by_hand(kernels), window)
    listed = collect_rollout(step=kernels, trained_steps=lambda n: window)(
        velocity, params_of(), COND, SEEDS, first_axis
    )
    for a, b in zip(batch.trajectory, listed.trajectory):
        assert torch.equal(a, b)
    assert bool((batch.trajectory.std > 0).all())
    assert asked == [((velocity, SEEDS), {})]


def test_before_and_after_the_window_the_path_is_the_ode_s():
    collect = collect_window(kernel=flow_sde_step, window=lambda velocity, seeds: range(2, 4))
    tr = collect(sampler(), params_of(), COND, SEEDS, first_axis).trajectory
    ode = by_hand([euler_step] * STEPS)
    torch.testing.assert_close(tr.x_t[:, 0], ode[2]["x_t"], rtol=1e-12, atol=1e-12)
    times = time_grid(STEPS, shift=2.0, dtype=F64)
    after = rollout(toy_velocity, params_of(), {"prompt": ROWS}, times[4:], noise=tr.x_next[:, -1])
    torch.testing.assert_close(tr.x_0, after.x_0, rtol=1e-12, atol=1e-12)


@given(st.integers(0, 2**63 - 1), st.integers(1, 4), st.integers(0, 8), st.integers(0, 2**40))
def test_a_random_window_is_one_start_per_rollout_from_the_batch_s_first_seed(seed, size, extra, other):
    steps = size + 1 + extra
    seeds = torch.tensor([[seed, other], [other, other]])
    window = random_window_of(size)(sampler(steps, iteration=int(other) % 5), seeds)
    word = int(np.random.SeedSequence(seed, spawn_key=(1,)).generate_state(1, np.uint64)[0])
    assert window.start == word % (max(steps // 2 - size, 0) + 1)
    assert len(window) == size
    assert window.stop <= steps - 1  # never the step that ends at t = 0
    assert window == random_window_of(size)(sampler(steps), torch.tensor([[seed]]))


def test_random_windows_are_uniform_over_0_to_half_minus_size():
    starts = [random_window_of(3)(sampler(12), sample_seeds(0, i, [0, 1], 2)).start for i in range(1000)]
    counts = np.bincount(starts)
    assert len(counts) == 12 // 2 - 3 + 1
    assert abs(counts - 250).max() < 5 * math.sqrt(1000 * 0.25 * 0.75)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(0, 6), st.integers(0, 60))
def test_a_sliding_window_is_a_function_of_the_iteration_alone(size, stride, every, extra, i):
    steps = size + 1 + extra
    slide, schedule = (
        sliding_window_of(size, stride=stride, every=every),
        mix_windows(steps, size=size, stride=stride, every=every),
    )
    expected = [next(schedule) for _ in range(i + 1)][i]
    assert slide(sampler(steps, iteration=i), SEEDS) == expected  # asked for nothing else before, as after a resume
    slide(sampler(steps, iteration=0), SEEDS)
    assert slide(sampler(steps, iteration=i), SEEDS + 1) == expected


def test_a_collect_moves_its_window_with_the_iteration():
    collect = collect_window(kernel=flow_sde_step, window=sliding_window_of(2, stride=1, every=2))
    times = time_grid(STEPS, shift=2.0, dtype=F64).tolist()
    starts = [collect(sampler(iteration=i), params_of(), COND, SEEDS, first_axis).trajectory.t[0] for i in range(10)]
    assert [times.index(float(t)) for t in starts] == [0, 0, 1, 1, 2, 2, 3, 3, 0, 0]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: random_window_of(0), ("window", 0)),
        (lambda: random_window_of(2.0), ("window", 2.0)),
        (lambda: random_window_of(STEPS)(sampler(), SEEDS), (STEPS, "start 0")),
        (lambda: sliding_window_of(0, stride=1, every=1)(sampler(), SEEDS), ("size", 0)),
        (lambda: sliding_window_of(STEPS, stride=1, every=1)(sampler(), SEEDS), (STEPS, "start 0")),
        (lambda: sliding_window_of(2, stride=0, every=1)(sampler(), SEEDS), ("stride", 0)),
        (lambda: sliding_window_of(2, stride=1, every=0)(sampler(), SEEDS), ("every", 0)),
    ],
)
def test_windows_that_fit_nowhere_are_refused(make, named):
    with refuses(*named):
        make()


# ---- states of the forward process ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [range(STEPS), [1, 4], [STEPS - 1]])
def test_renoised_states_lie_on_fresh_straight_paths_from_the_sample(kept):
    batch = collect_renoised(trained_steps=lambda steps: kept)(sampler(), params_of(), COND, SEEDS, first_axis)
    tr, times = batch.trajectory, time_grid(STEPS, shift=2.0, dtype=F64)
    x_0 = rollout(toy_velocity, params_of(), {"prompt": ROWS}, times, noise=draw(SEEDS, 0, 2), step=dpm2_step).x_0
    torch.testing.assert_close(tr.x_0, x_0, rtol=1e-12, atol=1e-12)
    for column, i in enumerate(kept):
        noise, t, t_next = draw(SEEDS, RENOISE_STREAM + i, 2), float(times[i]), float(times[i + 1])
        x_t = (1 - t) * x_0 + t * noise
        torch.testing.assert_close(tr.x_t[:, column], x_t, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(tr.x_next[:, column], (1 - t_next) * x_0 + t_next * noise, rtol=1e-12, atol=1e-12)
        v = toy_velocity(params_of(), x_t, torch.full((G * K,), t, dtype=F64), {"prompt": ROWS})
        torch.testing.assert_close(tr.v[:, column], v, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close((tr.x_t[:, column] - tr.x_0) / t, noise - x_0, rtol=1e-9, atol=1e-12)
    assert tr.t.tolist() == [float(times[i]) for i in kept]
    assert tr.t_next.tolist() == [float(times[i + 1]) for i in kept]
    assert not tr.std.any()
    assert bool(tr.log_prob.isnan().all())
    assert tr.std.shape == tr.log_prob.shape == (G * K, len(kept))
    assert torch.equal(batch.rewards.flatten(), tr.x_0[:, 0] + 10 * ROWS)


def test_renoising_takes_the_velocity_under_the_params_it_is_given():
    collect = collect_renoised(trained_steps=noisiest(2))
    old, other = params_of(0), params_of(1)
    tr = collect(sampler(), other, COND, SEEDS, first_axis).trajectory
    t = tr.t[1].expand(G * K)
    assert torch.equal(tr.v[:, 1], toy_velocity(other, tr.x_t[:, 1], t, {"prompt": ROWS}))
    assert not torch.allclose(tr.v[:, 1], toy_velocity(old, tr.x_t[:, 1], t, {"prompt": ROWS}))


def fresh_noise(collect, samples: int = 2000, steps: int = 3) -> torch.Tensor:
    """The eps " samples steps 2" of one prompt's renoised states, recovered from x_t and x_0."""
    seeds = sample_seeds(3, 0, [0], samples)
    tr = collect(sampler(steps), params_of(), {"prompt": torch.zeros(1).long()}, seeds, first_axis).trajectory
    return (tr.x_t - tr.x_0[:, None]) / tr.t[None, :, None] + tr.x_0[:, None]


def largest_correlation(noise: torch.Tensor, others: torch.Tensor | None = None) -> float:
    """The largest |correlation| between different columns (steps x latents, and those of `others`), over the samples."""
    columns = noise.flatten(1) if others is None else torch.cat([noise.flatten(1), others.flatten(1)], 1)
    corr = torch.corrcoef(columns.T)
    return float((corr - torch.eye(len(corr), dtype=corr.dtype)).abs().max())


def test_fresh_noise_is_standard_normal_and_independent_of_everything_else():
    noise = fresh_noise(collect_renoised())
    for column in noise.flatten(1).T:
        assert kstest(column.numpy(), "norm").pvalue > 1e-4
    walked = torch.cat([draw(sample_seeds(3, 0, [0], 2000), stream, 2) for stream in (0, 1, 3, SUBSET_STREAM)], 1)
    assert largest_correlation(noise, walked) < 5 / math.sqrt(2000)


def test_control_noise_shared_by_the_steps_or_by_the_samples_would_be_seen():
    noise = fresh_noise(collect_renoised(), 1000)
    assert largest_correlation(noise[:, :1].expand_as(noise)) > 0.99
    start = draw(sample_seeds(3, 0, [0], 1000), 0, 2)
    assert largest_correlation(torch.cat([start[:, None], noise], 1), start) > 0.99
    assert kstest(noise[:1].expand(1000, -1, -1)[:, 0, 0].numpy(), "norm").pvalue < 1e-4


def test_fresh_noise_is_a_function_of_the_sample_s_seed_alone():
    collect = collect_renoised(trained_steps=noisiest(2))
    whole = collect(sampler(), params_of(), COND, SEEDS, first_axis).trajectory
    turned = collect(sampler(), params_of(), COND, SEEDS.flip(1), first_axis).trajectory
    back = torch.arange(G * K).reshape(G, K).flip(1).flatten()
    for name in ("x_0", "x_t", "x_next"):
        torch.testing.assert_close(getattr(turned, name), getattr(whole, name)[back], rtol=1e-12, atol=1e-12)
    later = collect(sampler(iteration=9), params_of(), COND, SEEDS, first_axis).trajectory
    assert torch.equal(later.x_t, whole.x_t)


@pytest.mark.parametrize("size", [1, 5, 12])
@every_collect
def test_chunks_of_the_velocity_change_nothing(collect, size):
    # Rows agree whoever is in the batch. https://github.com/pytorch/pytorch/issues/124025
    whole = collect(sampler(), params_of(), COND, SEEDS, first_axis).trajectory
    parts = collect(sampler(velocity=chunked(toy_velocity, size=size)), params_of(), COND, SEEDS, first_axis).trajectory
    for a, b in zip(whole, parts):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_renoising_comes_after_the_reward_which_may_refuse():
    calls = []

    def score(latents, rows):
        assert len(calls) == STEPS
        return latents[:, 0]

    collect = collect_renoised(step=euler_step, trained_steps=noisiest(2))
    collect(sampler(velocity=spy(toy_velocity, calls)), params_of(), COND, SEEDS, score)
    assert len(calls) == STEPS + 2


def test_renoising_refuses_a_walk_without_seeds_and_a_velocity_that_is_not_finite():
    walked = collect_rollout()(sampler(), params_of(), COND, SEEDS, first_axis).trajectory
    with refuses("seeds"):
        renoise(sampler(), params_of(), {"prompt": ROWS}, walked._replace(seeds=None), [0])
    # Log-probabilities nan from the first step on: here the rows are named. https://github.com/yifan123/flow_grpo/issues/177
    burst = sampler(velocity=lambda p, x, t, c: torch.where(c["prompt"][:, None] == 1, math.inf, x))
    with refuses("velocity is not finite", f"{K} of {G * K} rows"):
        renoise(burst, params_of(), {"prompt": ROWS}, walked, [0])


# ---- what the loop hands in -------------------------------------------------------------------------------------------


def test_a_float32_model_gives_a_float32_batch_that_trains():
    model = toy_model()
    grid = Gridded(model.velocity, model.times, STEPS, (2,))
    names = [PROMPTS[i] for i in ROWS]
    for collect in COLLECTS.values():
        batch = collect(grid, model.params, COND, SEEDS, lambda x, rows: toward_compass(x, names))
        assert {x.dtype for x in batch.trajectory if x.is_floating_point()} == {torch.float32}
        assert bool(torch.isfinite(batch.rewards).all())


def test_options_are_keywords_and_a_typo_is_refused():
    for make, needed in (
        (collect_rollout, {}),
        (collect_window, {"kernel": cps_step, "window": all_steps}),
        (collect_renoised, {}),
    ):
        assert {p.kind for p in inspect.signature(make).parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
        with pytest.raises(TypeError, match="trained"):
            make(trained=all_steps, **needed)
