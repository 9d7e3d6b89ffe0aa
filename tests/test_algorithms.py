"""DiffusionART's pieces: collect, credit, windows of states, objective, behaviour; and what two updates do, exactly."""

import functools
import inspect
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import F64, normal, refuses, spy
from strategies import reward_groups, seeds

from diffrl import algorithms, guidance, losses, sampling, trust_region
from diffrl.algorithms import (
    Batch,
    Window,
    all_steps,
    art,
    art_flash,
    art_pairwise,
    best_against_worst,
    collect_rollout,
    covariance_credit,
    guidance_force,
    guided_regression,
    lagging,
    live,
    net_force,
    noisiest,
    random_pairs,
    scalar_rewards,
    subset_of_steps,
    window_states,
)
from diffrl.guidance import aggregate_direction, pair_labels
from diffrl.loop import train
from diffrl.losses import masked_mean
from diffrl.sampling import dance_sde_step, flow_sde_step, rollout, time_grid
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model, toy_velocity
from diffrl.trust_region import keep_inside, kl_proxy
from diffrl.types import Gridded, Trajectory
from diffrl.windows import window_of

NAN, INF = math.nan, math.inf
WIDE = 1e9  # a radius that masks nothing


def ids(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape) * 5 + 2


def trajectory(b: int, s: int, *d: int, t=None, seeds=True) -> Trajectory:
    """A trajectory of arbitrary numbers: what the objective reads, without a model."""
    times = time_grid(s + 1, dtype=F64)
    t, t_next = (times[:s], times[1 : s + 1]) if t is None else t
    x_t, x_next, v = (normal(b, s, *d, seed=i) for i in range(3))
    rows = torch.ones(b, s, dtype=F64)
    return Trajectory(normal(b, *d, seed=9), x_t, x_next, v, t, t_next, rows, rows, ids(b) if seeds else None)


def batch_of(rewards: torch.Tensor, *d: int, seeds: bool = True) -> Batch:
    return Batch(trajectory(rewards.numel(), 2, *d, seeds=seeds), rewards, {})


# ---- which steps are trained ------------------------------------------------------------------------------------------


def test_trained_steps_are_index_ranges():
    # Which steps are trained is data, never a fraction. https://github.com/yifan123/flow_grpo/issues/62
    assert list(all_steps(4)) == [0, 1, 2, 3]
    assert list(noisiest(3)(10)) == [0, 1, 2]
    assert list(noisiest(4)(4)) == [0, 1, 2, 3]
    with refuses("noisiest 5", "4"):
        noisiest(5)(4)
    for bad in (0, 2.5, True):
        with refuses("noisiest", bad):
            noisiest(bad)


@given(st.integers(1, 9), st.data())
def test_subsets_of_steps_are_sorted_distinct_and_a_function_of_the_seed(candidates, data):
    size = data.draw(st.integers(1, candidates))
    values = torch.tensor(data.draw(st.lists(st.integers(0, 2**40), min_size=1, max_size=5)))
    columns = subset_of_steps(values, candidates, size)
    for seed, row in zip(values, columns.tolist()):
        assert row == sorted(set(row))
        assert len(row) == size
        assert set(row) <= set(range(candidates))
        assert subset_of_steps(seed[None], candidates, size).tolist() == [row]
    with refuses(f"steps_per_sample={candidates + 1}", candidates):
        subset_of_steps(values, candidates, candidates + 1)


def test_subsets_of_steps_are_drawn_evenly():
    counts = torch.bincount(subset_of_steps(torch.arange(2000), 5, 2).flatten(), minlength=5)
    assert int((counts - 800).abs().max()) < 5 * (2000 * 0.4 * 0.6) ** 0.5


# ---- collect ----------------------------------------------------------------------------------------------------------


def toy_sampler(steps: int = 4) -> tuple:
    model = toy_model(dtype=F64)
    return model, Gridded(model.velocity, model.times, steps, (2,))


def test_collect_is_a_rollout_of_every_prompt_s_seeds_scored_by_prompt():
    model, sampler = toy_sampler()
    with torch.no_grad():
        model.params["mean"].copy_(normal(4, 2))
    cond, seen = model.encode(["west", "north", "south"]), []

    def score(latents, rows):
        seen.append((latents, rows))
        return latents.sum(1) + 100 * rows

    kernels = [flow_sde_step, dance_sde_step, flow_sde_step, dance_sde_step]
    batch = collect_rollout(step=kernels, trained_steps=noisiest(2))(sampler, model.params, cond, ids(3, 2), score)
    rows = torch.tensor([0, 0, 1, 1, 2, 2])
    expected = rollout(
        toy_velocity,
        model.params,
        {"prompt": cond["prompt"][rows]},
        model.times(4),
        seeds=ids(3, 2).flatten(),
        shape=(2,),
        step=kernels,
        keep=[0, 1],
    )
    for got, want in zip(batch.trajectory, expected):
        assert torch.equal(got, want)
    assert torch.equal(seen[0][1], rows)
    assert torch.equal(batch.rewards, (expected.x_0.sum(1) + 100 * rows).reshape(3, 2))
    assert batch.cond is cond


def test_collect_refuses_a_velocity_without_its_grid():
    model, _ = toy_sampler()
    with refuses("Gridded"):
        collect_rollout()(model.velocity, model.params, {}, ids(1, 2), lambda x, rows: x[:, 0])


def test_a_gridded_velocity_is_the_velocity():
    model, sampler = toy_sampler()
    args = model.params, normal(2, 2), torch.full((2,), 0.5, dtype=F64), model.encode(["east", "west"])
    assert torch.equal(sampler(*args), toy_velocity(*args))


# ---- credit -----------------------------------------------------------------------------------------------------------


@given(reward_groups(min_k=2), seeds)
def test_credit_gives_every_sample_its_prompt_s_direction(rewards, seed):
    batch = batch_of(rewards, 2, 2)
    credit = covariance_credit(scale=0.5)(batch)
    g, k = rewards.shape
    x_0 = batch.trajectory.x_0.reshape(g, k, 2, 2)
    direction = aggregate_direction(rewards, x_0, scale=0.5)
    for i, j in itertools.product(range(g), range(k)):
        row = i * k + j
        assert torch.equal(credit["direction"][row], direction.value[i])
        assert bool(credit["alive"][row]) == bool(direction.alive[i])
        assert bool(credit["has_reward"][row]) == math.isfinite(rewards[i, j])


def test_credit_options_reach_the_direction():
    batch = batch_of(normal(2, 4), 3, 2)
    x_0 = batch.trajectory.x_0.reshape(2, 4, 3, 2)
    per_row = covariance_credit(rms_axes=(1,))(batch)["direction"]
    assert torch.equal(per_row[::4], aggregate_direction(batch.rewards, x_0, rms_axes=(1,)).value)
    labelled = covariance_credit(labels=best_against_worst)(batch)["direction"]
    assert torch.equal(labelled[::4], aggregate_direction(best_against_worst(batch), x_0).value)
    assert scalar_rewards(batch) is batch.rewards


def test_unpaired_samples_have_no_label_and_are_not_trained():
    batch = batch_of(torch.tensor([[1.0, 2.0, 3.0], [1.0, NAN, 2.0]], dtype=F64), 2)
    for pairing in (random_pairs, best_against_worst):
        has_reward = covariance_credit(labels=pairing)(batch)["has_reward"].reshape(2, 3)
        assert has_reward.sum(1).tolist() == [2, 2]
        assert not bool(has_reward[1, 1])


def test_random_pairs_follow_the_batch_s_seeds():
    rewards = normal(3, 8)
    first = batch_of(rewards, 2)
    assert torch.equal(random_pairs(first), random_pairs(first))
    other = first._replace(trajectory=first.trajectory._replace(seeds=ids(24) + 1))
    assert not torch.equal(random_pairs(first), random_pairs(other))
    expected = pair_labels(rewards, generator=torch.Generator().manual_seed(2))
    assert torch.equal(random_pairs(first), expected)
    assert torch.equal(random_pairs(batch_of(rewards, 2, seeds=False)), pair_labels(rewards))


@given(reward_groups())
def test_best_against_worst_by_sorting(rewards):
    labels = best_against_worst(batch_of(rewards, 2))
    for row, label in zip(rewards.tolist(), labels):
        finite = sorted(v for v in row if math.isfinite(v))
        half = len(finite) // 2
        expected = []
        for low, high in zip(finite[:half], finite[::-1]):
            expected += [0.5, 0.5] if low == high else [0.0, 1.0]
        got = label[~label.isnan()]
        assert sorted(got.tolist()) == sorted(expected)
        assert int(label.isnan().sum()) == len(row) - 2 * half
        assert all(math.isfinite(v) for v, x in zip(row, label) if not x.isnan())
        wins = [v for v, x in zip(row, label) if x == 1]
        losses_ = [v for v, x in zip(row, label) if x == 0]
        assert not wins or min(wins) > max(losses_)


# ---- windows of states ------------------------------------------------------------------------------------------------


def window_for(tr: Trajectory, direction: torch.Tensor, *, alive=None, has_reward=None, cond=None) -> Window:
    b = len(tr.x_0)
    everyone = torch.ones(b, dtype=torch.bool)
    credit = {
        "direction": direction,
        "alive": everyone if alive is None else alive,
        "has_reward": everyone if has_reward is None else has_reward,
    }
    return Window(tr, torch.zeros(b, dtype=F64), {} if cond is None else cond, credit)


def test_window_states_are_sample_major_with_every_kept_step_of_every_sample():
    tr = trajectory(3, 4, 2, 2)
    states = window_states(window_for(tr, tr.x_0, cond={"text": torch.arange(3)}))
    for row, (i, j) in enumerate(itertools.product(range(3), range(4))):
        assert torch.equal(states.x_t[row], tr.x_t[i, j])
        assert torch.equal(states.x_next[row], tr.x_next[i, j])
        assert torch.equal(states.v_old[row], tr.v[i, j])
        assert (float(states.t[row]), float(states.t_next[row])) == (float(tr.t[j]), float(tr.t_next[j]))
        assert int(states.rows[row]) == int(states.cond["text"][row]) == i
    assert torch.equal(states.std, tr.std.flatten())
    assert torch.equal(states.log_prob, tr.log_prob.flatten())


def test_window_states_may_be_a_seeded_subset_per_trajectory():
    tr = trajectory(3, 4, 2)
    states = window_states(window_for(tr, tr.x_0), steps_per_sample=2)
    columns = subset_of_steps(tr.seeds, 4, 2)
    assert torch.equal(states.rows, torch.tensor([0, 0, 1, 1, 2, 2]))
    assert torch.equal(states.x_t, torch.stack([tr.x_t[i, j] for i in range(3) for j in columns[i].tolist()]))
    assert torch.equal(states.t, tr.t[columns.flatten()])
    full = window_states(window_for(tr, tr.x_0), steps_per_sample=4)
    assert torch.equal(full.x_t, tr.x_t.flatten(0, 1))
    with refuses("steps_per_sample=5"):
        window_states(window_for(tr, tr.x_0), steps_per_sample=5)
    with refuses("seeds"):
        window_states(window_for(trajectory(3, 4, 2, seeds=False), tr.x_0), steps_per_sample=2)


# ---- objective --------------------------------------------------------------------------------------------------------


def shifted(params, x_t, t, cond):
    """v_old + d of the rows the test prepared."""
    return cond["v_old"] + params["d"]


def drifted(d: torch.Tensor, direction: torch.Tensor, *, seeds=True, **flags) -> tuple[dict, Window]:
    """(params, window) of len(d) one-step trajectories at t = .6 -> .4 whose new velocity is v_old + d."""
    tr = trajectory(
        len(d), 1, *d.shape[1:], t=(torch.tensor([0.6]).double(), torch.tensor([0.4]).double()), seeds=seeds
    )
    return {"d": d}, window_for(tr, direction, cond={"v_old": tr.v[:, 0]}, **flags)


def unit_rms(*shape: int, seed: int = 3) -> torch.Tensor:
    x = normal(*shape, seed=seed)
    return x / x.flatten(1).square().mean(1).sqrt().reshape(-1, *[1] * (x.ndim - 1))


def test_first_update_has_loss_1_times_the_live_share_no_drift_and_no_mask():
    alive = torch.tensor([True, True, True, False, True])
    has_reward = torch.tensor([True, False, True, True, True])
    params, window = drifted(torch.zeros(5, 3, 2), unit_rms(5, 3, 2), alive=alive, has_reward=has_reward)
    loss, keep, metrics = guided_regression()(shifted, params, window)
    torch.testing.assert_close(loss, torch.ones(5, dtype=F64), rtol=1e-12, atol=1e-12)
    assert keep.tolist() == [True, False, True, False, True]
    assert float(masked_mean(loss, keep)) == pytest.approx(3 / 5, rel=1e-12)
    assert metrics == {"masked_fraction": 0.0, "kl_proxy": 0.0, "drift_rms": 0.0}


def test_objective_is_regression_on_the_guided_target_inside_the_trust_region():
    d = torch.tensor([[0.1, 0.0], [1.2, 0.0], [0.0, 0.1], [-0.1, 0.0], [0.05, 0.5], [0.3, 0.3], [0.0, 0.0]], dtype=F64)
    direction = torch.tensor([[-1.0, 0.0]], dtype=F64).expand(7, 2)  # h_G = -direction = (1, 0)
    params, window = drifted(d, direction)
    loss, keep, metrics = guided_regression(radius=1e-9)(shifted, params, window)
    torch.testing.assert_close(loss, (d + direction).square().mean(1), rtol=1e-10, atol=1e-12)
    assert keep.tolist() == [False, True, True, True, True, False, True]
    assert metrics["masked_fraction"] == pytest.approx(2 / 7)
    assert metrics["drift_rms"] == pytest.approx(float(d.square().mean().sqrt()))
    v_old = window.trajectory.v[:, 0]
    assert metrics["kl_proxy"] == pytest.approx(float(kl_proxy(v_old + d, v_old, 0.6, 0.4).mean()))
    assert guided_regression(radius=WIDE)(shifted, params, window)[1].all()
    # guidance alone also masks updates that restore
    _, keep, _ = guided_regression(radius=1e-9, mask_force=guidance_force)(shifted, params, window)
    assert keep.tolist() == [False, False, True, True, False, False, True]


@given(seeds)
def test_mask_forces_are_the_two_readings_of_the_sign_test(seed):
    v, v_old, target = (normal(6, 3, seed=seed + i) for i in range(3))
    over = torch.ones(6, dtype=F64)
    net = ((v - v_old) * (target - v)).sum(1) > 0
    assert torch.equal(~keep_inside(v, v_old, net_force(v, v_old, target), over), net)
    guidance = ((v - v_old) * (target - v_old)).sum(1) > 0
    assert torch.equal(~keep_inside(v, v_old, guidance_force(v, v_old, target), over), guidance)


def test_masked_fraction_counts_live_states_only():
    d = torch.tensor([[0.1, 0.0]], dtype=F64).expand(4, 2)
    direction = torch.tensor([[-1.0, 0.0]], dtype=F64).expand(4, 2)
    alive = torch.tensor([True, True, False, False])
    params, window = drifted(d, direction, alive=alive)
    _, keep, metrics = guided_regression(radius=1e-9)(shifted, params, window)
    assert metrics["masked_fraction"] == 1.0
    assert not keep.any()
    params, window = drifted(d, direction, alive=torch.zeros(4, dtype=torch.bool))
    assert guided_regression(radius=1e-9)(shifted, params, window)[2]["masked_fraction"] == 0.0


def test_dead_groups_may_restore_the_old_velocity_instead():
    d = torch.full((3, 2), 0.1, dtype=F64)
    alive, has_reward = torch.tensor([True, False, False]), torch.tensor([True, True, False])
    direction = torch.where(alive[:, None], unit_rms(3, 2), 0.0)
    params, window = drifted(d, direction, alive=alive, has_reward=has_reward)
    loss, keep, _ = guided_regression(radius=WIDE)(shifted, params, window)
    assert keep.tolist() == [True, False, False]
    loss, keep, _ = guided_regression(radius=WIDE, dead="restore")(shifted, params, window)
    assert keep.tolist() == [True, True, False]
    assert float(loss[1]) == pytest.approx(0.01)  # target = v_old
    with refuses("dead", "'keep'"):
        guided_regression(dead="keep")


def test_objective_options_reach_the_kl_proxy_and_the_states():
    d = torch.full((3, 2), 0.01, dtype=F64)
    params, window = drifted(d, unit_rms(3, 2))
    v_old = window.trajectory.v[:, 0]
    metrics = guided_regression(reference_kernel=dance_sde_step)(shifted, params, window)[2]
    expected = kl_proxy(v_old + d, v_old, 0.6, 0.4, step=dance_sde_step).mean()
    assert metrics["kl_proxy"] == pytest.approx(float(expected))
    tr, log = trajectory(3, 4, 2), []
    guided_regression(steps_per_sample=2)(spy(lambda p, x, t, c: x, log), {}, window_for(tr, tr.x_0))
    assert len(log[0][0][1]) == 6
    for bad in (-1.0, NAN):
        with refuses("radius", bad):
            guided_regression(radius=bad)


def test_gradient_flows_through_the_velocity_alone():
    d = torch.full((2, 2), 0.1, dtype=F64, requires_grad=True)
    params, window = drifted(d, unit_rms(2, 2).requires_grad_())
    window.trajectory.v.requires_grad_()
    loss, _, _ = guided_regression(radius=WIDE)(lambda p, x, t, c: c["v_old"].detach() + p["d"], params, window)
    loss.sum().backward()
    assert window.trajectory.v.grad is None
    assert window.credit["direction"].grad is None
    torch.testing.assert_close(d.grad, (d + window.credit["direction"]).detach(), rtol=1e-9, atol=1e-12)


# ---- two updates of a linear model ------------------------------------------------------------------------------------


def features(params, x_t, t, cond):
    """v = Phi theta, scalar output, one row of Phi per state."""
    return (cond["phi"] @ params["theta"])[:, None]


def linear_window(phi: torch.Tensor, theta: torch.Tensor, h: torch.Tensor) -> Window:
    """States with features phi, v_old = Phi theta, and the direction seen as a velocity h = -direction."""
    tr = trajectory(len(phi), 1, 1, t=(torch.tensor([0.6]).double(), torch.tensor([0.4]).double()))
    tr = tr._replace(v=(phi @ theta)[:, None, None])
    return window_for(tr, -h[:, None], cond={"phi": phi})


def sgd(theta: torch.Tensor, window: Window, lr: float, radius: float = WIDE) -> torch.Tensor:
    """theta after one plain gradient step of the objective's masked mean."""
    theta = theta.clone().requires_grad_()
    loss, keep, _ = guided_regression(radius=radius)(features, {"theta": theta}, window)
    return (theta - lr * torch.autograd.grad(masked_mean(loss, keep), theta)[0]).detach()


def linear_problem(n_a: int = 5, n_b: int = 7, p: int = 4):
    phi = normal(n_a + n_b, p)
    return phi[:n_a], phi[n_a:], normal(p, seed=1), normal(n_a, seed=2), normal(n_b, seed=3)


def test_two_updates_on_two_windows_have_their_closed_form():
    phi_a, phi_b, theta, h_a, h_b = linear_problem()
    lr, n_a, n_b = 0.05, 5, 7
    after_a = sgd(theta, linear_window(phi_a, theta, h_a), lr)
    torch.testing.assert_close((after_a - theta) / lr, 2 / n_a * phi_a.T @ h_a, rtol=1e-9, atol=1e-12)
    d_b = phi_b @ (after_a - theta)
    torch.testing.assert_close(d_b, 2 * lr / n_a * phi_b @ phi_a.T @ h_a, rtol=1e-9, atol=1e-12)
    after_b = sgd(after_a, linear_window(phi_b, theta, h_b), lr)
    torch.testing.assert_close((after_b - after_a) / lr, 2 / n_b * phi_b.T @ (h_b - d_b), rtol=1e-9, atol=1e-12)
    masked = sgd(after_a, linear_window(phi_b, theta, h_b), lr, radius=0.0)
    inward = (d_b * (h_b - d_b) <= 0).double()  # dropped rows stay in the denominator
    assert 0 < int(inward.sum()) < n_b
    torch.testing.assert_close(
        (masked - after_a) / lr, 2 / n_b * phi_b.T @ (inward * (h_b - d_b)), rtol=1e-9, atol=1e-12
    )


@given(seeds)
def test_two_updates_on_the_same_window_contract_toward_the_target(seed):
    phi, theta, h, lr, n = normal(6, 4, seed=seed), normal(4, seed=seed + 1), normal(6, seed=seed + 2), 0.03, 6
    window = linear_window(phi, theta, h)
    drift = phi @ (sgd(sgd(theta, window, lr), window, lr) - theta)
    kernel = 2 * lr / n * phi @ phi.T
    contraction = torch.eye(n, dtype=F64) - kernel
    torch.testing.assert_close(drift, h - contraction @ contraction @ h, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(drift, 2 * kernel @ h - kernel @ kernel @ h, rtol=1e-9, atol=1e-11)


# ---- behaviour and factories ------------------------------------------------------------------------------------------


def test_live_params_roll_out_next_without_a_copy():
    old, new = {"a": torch.zeros(1)}, {"a": torch.ones(1)}
    assert live(old, new, 3) is new


def test_art_is_on_policy_with_two_updates_and_swappable_pieces():
    algorithm = art()
    assert (algorithm.updates, algorithm.pool, algorithm.behaviour) == (2, None, live)
    swapped = algorithm._replace(behaviour=lambda old, new, i: old)
    assert swapped.collect is algorithm.collect
    assert art(updates=3).updates == 3
    for bad in (0, 1.5):
        with refuses("updates", bad):
            art(updates=bad)
    with refuses("radius", "-1"):
        art(radius=-1)
    with refuses("dead"):
        art(dead="drop it")
    for factory in (art, art_flash, art_pairwise):
        with pytest.raises(TypeError, match="raduis"):
            factory(raduis=1e-5)


def collected(algorithm, steps: int = 6):
    model, sampler = toy_sampler(steps)
    batch = algorithm.collect(
        sampler,
        model.params,
        model.encode(list(PROMPTS)),
        ids(4, 4),
        lambda x, rows: toward_compass(x, [PROMPTS[i] for i in rows.tolist()]),
    )
    return model, batch


def test_art_trains_every_step_and_art_flash_the_noisiest():
    for algorithm, kept in ((art(), 6), (art_flash(), 4), (art_flash(noisiest=2, scale=0.5), 2)):
        _, batch = collected(algorithm)
        assert torch.equal(batch.trajectory.t, time_grid(6, dtype=F64)[:kept])
        assert torch.isfinite(batch.trajectory.x_0).all()
    with refuses("noisiest 4", "3"):
        collected(art_flash(), steps=3)
    assert list(art_flash(noisiest=2).credit(batch)) == ["direction", "alive", "has_reward"]


def test_art_settings_reach_their_pieces():
    _, batch = collected(art(step=flow_sde_step, trained_steps=noisiest(3)))
    assert batch.trajectory.std.shape == (16, 3)
    assert bool((batch.trajectory.std > 0).all())
    base = art().credit(batch)["direction"]
    torch.testing.assert_close(art(scale=0.25).credit(batch)["direction"], 0.25 * base)
    signs = art(rms_axes=()).credit(batch)["direction"]
    assert torch.equal(signs, base.sign())
    pairwise = art_pairwise().credit(batch)
    torch.testing.assert_close(pairwise["direction"], covariance_credit(labels=random_pairs)(batch)["direction"])
    other = art_pairwise(pairing=best_against_worst).credit(batch)["direction"]
    torch.testing.assert_close(other, covariance_credit(labels=best_against_worst)(batch)["direction"])


def test_on_policy_first_update_of_art_on_the_toy_is_loss_1():
    model, batch = collected(art())
    credit = art().credit(batch)
    cond = {"prompt": torch.arange(4).repeat_interleave(4)}
    window = Window(batch.trajectory, batch.rewards.flatten(), cond, credit)
    for algorithm in (art(), art(steps_per_sample=2), art_flash(), art_pairwise()):
        loss, keep, metrics = algorithm.objective(model.velocity, model.params, window)
        assert float(masked_mean(loss, keep).detach()) == pytest.approx(1, rel=1e-10)
        assert metrics["drift_rms"] == 0


def final_reward(iterations: int, **settings) -> float:
    """Mean toy reward over the last two iterations of `art(**settings)`."""
    torch.manual_seed(0)
    model = toy_model()
    optimizer = torch.optim.Adam(list(model.params.values()), lr=0.06)
    run = train(model, art(**settings), PROMPTS, toward_compass, optimizer, group_size=8, steps=4, seed=0)
    rewards = [row["reward/mean"] for row in itertools.islice(run, iterations)]
    return sum(rewards[-2:]) / 2


def test_the_sign_trap_the_wrong_sign_descends_the_reward():
    start = final_reward(2)
    assert final_reward(10) > start + 0.3
    assert final_reward(10, scale=-1.0) < start - 0.3


def test_no_two_parameters_of_a_function_are_variants_of_one_name():
    # Two different betas in one configuration. https://github.com/nvidia-cosmos/cosmos-rl/pull/581
    def clashes(function) -> list[tuple[str, str]]:
        numbers = [n for n, p in inspect.signature(function).parameters.items() if isinstance(p.default, float | int)]
        return [(a, b) for a in numbers for b in numbers if a != b and a in b.split("_")]

    seen = 0
    for module in (algorithms, guidance, losses, sampling, trust_region):
        for name, function in vars(module).items():
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                assert clashes(function) == [], name
                seen += 1
    assert seen > 50
    assert clashes(lambda beta=0.1, kl_beta=0.04: None) == [("beta", "kl_beta")]


# ---- negative control -------------------------------------------------------------------------------------------------


def test_negative_control_a_flipped_direction_or_a_full_mean_fails_the_closed_forms():
    phi, _, theta, h, _ = linear_problem()
    flipped = sgd(theta, linear_window(phi, theta, -h), 0.05)
    assert not torch.allclose((flipped - theta) / 0.05, 2 / 5 * phi.T @ h, atol=1e-3)
    stale = functools.partial(linear_window, phi, theta + 0.1)  # v_old that the training forward does not give
    loss, _, metrics = guided_regression(radius=WIDE)(features, {"theta": theta}, stale(torch.ones(5, dtype=F64)))
    assert float(loss.mean()) != pytest.approx(1, abs=1e-3)
    assert metrics["drift_rms"] > 1e-3


# ---- pieces of one's own


def toy_batch(algorithm, rewards):
    model = toy_model()
    g, k = rewards.shape
    velocity = Gridded(model.velocity, model.times, 4, (2,))
    seeds = torch.arange(g * k).reshape(g, k)
    return model, algorithm.collect(
        velocity, model.params, model.encode(PROMPTS[:g]), seeds, lambda x, r: rewards.flatten()
    )


def gradient(model, algorithm, batch):
    window = window_of(batch, algorithm.credit(batch), torch.arange(batch.rewards.numel()))
    for p in model.params.values():
        p.grad = None
    loss, keep, metrics = algorithm.objective(model.velocity, model.params, window)
    masked_mean(loss, keep).backward()
    return model.params["mean"].grad, metrics


@pytest.mark.parametrize("algorithm", [art(), art(dead="restore"), art(steps_per_sample=2)])
def test_nan_latents_of_a_sample_without_reward_reach_no_gradient(algorithm):
    model, batch = toy_batch(algorithm, torch.tensor([[1.0, 2.0, math.nan, 4.0], [0.0, 1.0, 2.0, math.inf]]))
    missing = ~torch.isfinite(batch.rewards).flatten()
    spoilt = {}
    for name in ("x_0", "x_t", "x_next", "v"):
        spoilt[name] = getattr(batch.trajectory, name).clone()
        spoilt[name][missing] = math.nan
    expected, metrics = gradient(model, algorithm, batch)
    found, others = gradient(model, algorithm, batch._replace(trajectory=batch.trajectory._replace(**spoilt)))
    assert torch.allclose(found, expected)
    assert others == metrics
    assert bool(found.any())


def test_a_credit_may_give_the_direction_alone():
    ours = art()._replace(credit=lambda batch: {"direction": art().credit(batch)["direction"]})
    rewards = torch.tensor([[1.0, 2.0, math.nan, 4.0], [1.0, 1.0, 1.0, 1.0]])  # one missing, one group dead
    model, batch = toy_batch(art(), rewards)
    (found, _), (expected, _) = gradient(model, ours, batch), gradient(model, art(), batch)
    assert torch.equal(found, expected)


def test_wins_and_counts_are_labels():
    _, batch = toy_batch(art(), torch.rand(2, 4))
    wins = batch.rewards > batch.rewards.median()
    for labels in (wins, wins.int()):
        found = art(labels=lambda batch, labels=labels: labels).credit(batch)["direction"]
        assert torch.equal(found, art(labels=lambda batch: wins.float()).credit(batch)["direction"])


def test_labels_of_another_grouping_are_refused():
    _, batch = toy_batch(art(), torch.rand(2, 4))
    with refuses("labels", "(4, 2)", "(2, 4)"):
        art(labels=lambda batch: batch.rewards.T).credit(batch)


@pytest.mark.parametrize("size", [0, -1, 1.5])
def test_steps_per_sample_is_a_count(size):
    with refuses("steps_per_sample", size):
        art(steps_per_sample=size)


def test_no_trained_step_at_all_is_refused():
    with pytest.raises(ValueError, match="trained_steps"):
        toy_batch(art(trained_steps=lambda steps: []), torch.rand(2, 4))


def test_an_average_may_be_kept_on_another_device():
    old, new = ({"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([3.0, 6.0], requires_grad=True)})
    plain, cpu = (lagging(lambda i: 0.25, device=device)(old, new, 1)["a"] for device in (None, "cpu"))
    assert torch.equal(plain, cpu)
    assert torch.equal(plain, torch.tensor([2.5, 5.0]))
    kept = lagging(lambda i: 0.25, device="meta")(old, new, 1)["a"]  # a device that is not here, and holds nothing
    assert kept.is_meta
    assert not kept.requires_grad
