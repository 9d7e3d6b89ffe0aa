"""Credits beyond the papers, the steadier ART and the force spectrum, against plain loops and linear models."""

import itertools
import math

import pytest
import torch
from oracles import F64, normal
from toys import rows_of, start

from diffrl import conflicts, directions
from diffrl.algorithms import Batch, Window, art, dance_grpo
from diffrl.credits import covariance_credit, sum_of_advantages
from diffrl.extensions import (
    Force,
    art_binned,
    art_steady,
    binned_credit,
    every_step,
    force_spectrum,
    several_rewards_credit,
)
from diffrl.loop import diagnose, train
from diffrl.rewards import weighted_sum
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model
from diffrl.types import Trajectory

NAN = float("nan")


def batch(g: int = 2, k: int = 4, s: int = 3, d: int = 5, *, parts: int = 0, seed: int = 0) -> Batch:
    b = g * k
    t = torch.linspace(1, 0.2, s, dtype=F64)
    trajectory = Trajectory(
        x_0=normal(b, d, seed=seed),
        x_t=normal(b, s, d, seed=seed + 1),
        x_next=normal(b, s, d, seed=seed + 2),
        v=normal(b, s, d, seed=seed + 3),
        t=t,
        t_next=t - 0.1,
        std=torch.zeros(b, s, dtype=F64),
        log_prob=torch.full((b, s), NAN, dtype=F64),
        seeds=torch.arange(b),
    )
    several = normal(g, k, parts, seed=seed + 4) if parts else None
    rewards = normal(g, k, seed=seed + 5) if several is None else several.sum(2)
    return Batch(trajectory, rewards, {}, several)


# ---- credits


@pytest.mark.parametrize("normalise", [directions.joint_rms, directions.bin_rms])
def test_binned_credit_is_a_plain_loop_over_samples_and_steps(normalise):
    told, k, bins = batch(), 4, [0, 0, 1]
    told.rewards[1, 2] = NAN
    credit = binned_credit(bins=lambda s: bins, normalise=normalise)(told)
    tr = told.trajectory
    covariance = torch.zeros(2, 2, 5, dtype=F64)
    for g, here in itertools.product(range(2), range(2)):
        members = [i for i in range(k) if math.isfinite(told.rewards[g, i])]
        mean = sum(float(told.rewards[g, i]) for i in members) / len(members)
        terms = [
            (float(told.rewards[g, i]) - mean)
            * (tr.x_0[g * k + i] - (tr.x_t[g * k + i, j] - tr.t[j] * tr.v[g * k + i, j]))
            for i in members
            for j in range(3)
            if bins[j] == here
        ]
        covariance[g, here] = torch.stack(terms).mean(0)
    expected = normalise(covariance)[:, bins].repeat_interleave(k, 0)
    torch.testing.assert_close(credit["direction"], expected, rtol=1e-10, atol=1e-12)
    assert credit["has_reward"].tolist() == [True] * 6 + [False, True]
    assert bool(credit["alive"].all())


def test_every_step_is_a_bin_of_its_own():
    assert every_step(4) == [0, 1, 2, 3]


def test_art_binned_trains_on_fresh_noise_with_a_direction_per_step_and_learns():
    rows = rows_of(start(toy_model(), art_binned()), 25)
    assert rows[0]["drift_rms/update_1"] == 0
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"] + 0.5


@pytest.mark.parametrize(
    "direction", [conflicts.sum_of_directions, conflicts.pcgrad, conflicts.min_norm, conflicts.sum_of_rewards]
)
def test_several_rewards_credit_hands_the_parts_to_the_direction(direction):
    told = batch(parts=2)
    told.parts[0, 1, 0] = NAN
    credit = several_rewards_credit(direction)(told)
    found = direction(told.parts, told.trajectory.x_0.reshape(2, 4, 5))
    assert torch.equal(credit["direction"], found.value.repeat_interleave(4, 0))
    assert torch.equal(credit["alive"], found.alive.repeat_interleave(4))
    assert credit["has_reward"].tolist() == [True, False, *[True] * 6]


def test_several_rewards_credit_refuses_a_reward_without_parts():
    with pytest.raises(ValueError, match="weighted_sum"):
        several_rewards_credit()(batch())


def test_conflicting_rewards_train_from_the_loop():
    reward = weighted_sum(
        {"compass": toward_compass, "small": lambda x, p: -(x**2).sum(1)}, {"compass": 1, "small": 0.1}
    )
    algorithm = art()._replace(credit=several_rewards_credit(conflicts.pcgrad))
    rows = rows_of(start(toy_model(), algorithm, reward=reward), 25)
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"] + 0.3


# ---- the steadier ART


def test_art_steady_is_art_weighted_by_spread_with_one_update_and_a_lagging_behaviour():
    told, steady = batch(), art_steady(retention=0.25)
    expected = covariance_credit(weight=directions.spread_weight)(told)
    assert steady.credit(told).keys() == expected.keys()
    assert all(torch.equal(steady.credit(told)[name], expected[name]) for name in expected)
    assert steady.updates == 1
    old, new = {"p": torch.zeros(2)}, {"p": torch.ones(2)}
    assert steady.behaviour(old, new, 7)["p"].tolist() == [0.75, 0.75]
    other = art_steady(direction=directions.batch_rms).credit(told)["direction"]
    assert torch.equal(other, covariance_credit(direction=directions.batch_rms)(told)["direction"])
    with pytest.raises(ValueError, match="retention"):
        art_steady(retention=1.5)


def test_settings_of_art_reach_the_credit_or_are_refused():
    told = batch()
    for make in (art_steady, art_binned):
        once, twice = (make(scale=s).credit(told)["direction"] for s in (1.0, 2.0))
        torch.testing.assert_close(twice, 2 * once)
        labelled = make(labels=lambda b: -b.rewards).credit(told)["direction"]
        torch.testing.assert_close(labelled, -once)
        with pytest.raises(ValueError, match="rms_axes"):
            make(rms_axes=(0,))


def test_the_doctor_understands_a_direction_per_step():
    assert diagnose(toy_model(), art_binned(), PROMPTS, toward_compass).ok


def test_weights_of_several_rewards_reach_direction_and_advantages():
    told = batch(parts=2)._replace(part_weights=(1.0, -2.0))
    weights, x_0 = torch.tensor([1.0, -2.0], dtype=F64), told.trajectory.x_0.reshape(2, 4, 5)
    for direction in (conflicts.sum_of_rewards, conflicts.sum_of_directions, conflicts.pcgrad):
        found = several_rewards_credit(direction)(told)["direction"]
        assert torch.equal(found, direction(told.parts, x_0, weights=weights).value.repeat_interleave(4, 0))
    with pytest.raises(ValueError, match="no weights"):
        several_rewards_credit(conflicts.min_norm)(told)
    single = [sum_of_advantages()(told._replace(parts=told.parts[..., j : j + 1], part_weights=None)) for j in (0, 1)]
    torch.testing.assert_close(sum_of_advantages()(told), single[0] - 2 * single[1])


def test_a_reward_with_weight_minus_one_is_descended():
    reward = weighted_sum({"compass": toward_compass}, {"compass": -1.0})
    for algorithm in (dance_grpo(), art()._replace(credit=several_rewards_credit(conflicts.sum_of_directions))):
        rows = rows_of(start(toy_model(), algorithm, reward=reward, steps=8), 15)
        assert rows[-1]["reward/mean"] > rows[0]["reward/mean"]


def test_art_steady_trains_the_noisier_half_of_the_steps():
    seen = []
    steady = art_steady()

    def objective(velocity, params, window):
        seen.append(window.trajectory.t.tolist())
        return steady.objective(velocity, params, window)

    rows_of(start(toy_model(), steady._replace(objective=objective)), 1)
    assert seen[0] == pytest.approx([1.0, 0.8, 0.6])  # of five steps


# ---- the force spectrum


def linear_window(b: int = 6, d: int = 4, seed: int = 0) -> tuple[Window, dict[str, torch.Tensor]]:
    """v = x_t W + c at one kept step; the old velocity is that of other params."""
    x_t = normal(b, 1, d, seed=seed)
    one = torch.ones(1, dtype=F64)
    tr = Trajectory(x_t[:, 0], x_t, x_t, normal(b, 1, d, seed=seed + 1), one, 0.5 * one, torch.zeros(b, 1, dtype=F64),
                    torch.zeros(b, 1, dtype=F64), torch.arange(b))  # fmt: skip
    params = {"w": normal(d, d, seed=seed + 2).requires_grad_(), "c": normal(d, seed=seed + 3).requires_grad_()}
    return Window(tr, normal(b, seed=9), {}, {"direction": normal(b, d, seed=seed + 4)}), params


def linear(params, x_t, t, cond):
    return x_t @ params["w"] + params["c"]


def test_force_spectrum_of_a_linear_model_has_its_closed_form():
    window, params = linear_window()
    found = force_spectrum(linear, params, window, groups={"weight": ["w"], "bias": ["c"], "all": ["w", "c"]}, states=6)
    x, d = window.trajectory.x_t[:, 0], 4
    fields = {
        "guidance": -window.credit["direction"],
        "restoration": linear(params, x, None, None).detach() - window.trajectory.v[:, 0],
    }
    for kind, field in fields.items():
        pulls = {"weight": torch.einsum("bi,bj->bij", x, field).reshape(6, -1) / d, "bias": field / d}
        pulls["all"] = torch.cat([pulls["weight"], pulls["bias"]], 1)
        for group, each in pulls.items():
            told = found[group][kind]
            assert isinstance(told, Force)
            assert told.output == pytest.approx(float((field**2).mean().sqrt()), rel=1e-10)
            assert told.parameter == pytest.approx(float(each.mean(0).norm()), rel=1e-10)
            assert told.cancellation == pytest.approx(float(each.sum(0).norm() / each.norm()), rel=1e-10)
    assert params["w"].grad is None


def test_coherent_forces_do_not_cancel_and_alternating_ones_do():
    window, params = linear_window(b=8)
    same = torch.ones(8, 4, dtype=F64)
    found = force_spectrum(linear, params, window._replace(credit={"direction": same}), groups={"c": ["c"]}, states=8)
    assert found["c"]["guidance"].cancellation == pytest.approx(math.sqrt(8))
    signs = torch.tensor([1.0, -1.0] * 4, dtype=F64)[:, None] * same
    found = force_spectrum(linear, params, window._replace(credit={"direction": signs}), groups={"c": ["c"]}, states=8)
    assert found["c"]["guidance"].cancellation == pytest.approx(0, abs=1e-12)


def test_force_spectrum_refuses():
    window, params = linear_window()
    for groups in ({}, {"a": ["nothing"]}, {"a": []}):
        with pytest.raises(ValueError, match="groups must name"):
            force_spectrum(linear, params, window, groups=groups)
    with pytest.raises(ValueError, match="states"):
        force_spectrum(linear, params, window, groups={"c": ["c"]}, states=0)
    with pytest.raises(ValueError, match="no state"):
        force_spectrum(linear, params, window, groups={"c": ["c"]}, columns=[3])
    nothing = window._replace(rewards=torch.full_like(window.rewards, NAN))
    with pytest.raises(ValueError, match="no state"):
        force_spectrum(linear, params, nothing, groups={"c": ["c"]})


def test_at_most_so_many_states_spread_over_the_window():
    window, params = linear_window(b=9)
    two = force_spectrum(linear, params, window, groups={"c": ["c"]}, states=2)["c"]["guidance"]
    ends = -window.credit["direction"][[0, 8]]
    assert two.parameter == pytest.approx(float((ends / 4).mean(0).norm()), rel=1e-10)


def test_control_the_oracles_tell_binned_from_plain_directions():
    told = batch()
    binned = binned_credit()(told)["direction"]
    plain = covariance_credit()(told)["direction"]
    assert binned.shape == (8, 3, 5)
    assert not torch.allclose(binned[:, 0], plain)
    model = toy_model()
    optimizer = torch.optim.SGD(model.params.values(), lr=0.0)
    still = train(model, art_steady(), PROMPTS, toward_compass, optimizer, group_size=4, steps=4, seed=0)
    assert next(still)["drift_rms"] == 0
