"""From a batch's rewards to what each sample is told: advantages, best of n, optimality, a direction or a weight of one's own.

Oracles are plain loops over the samples. Negative controls are the tests with `control` in their names.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import F64, normal, numpy_advantages, refuses, spy
from strategies import reward_groups, seeds

from diffrl.credits import (
    advantage_credit,
    advantages_of_sum,
    best_against_worst,
    covariance_credit,
    direction_credit,
    extremes,
    labels_of,
    negative_part,
    optimality_credit,
    positive_part,
    sum_of_advantages,
    unbiased_group_std,
)
from diffrl.guidance import Direction, aggregate_direction, batch_std, group_advantages, group_std, no_spread
from diffrl.losses import masked_mean
from diffrl.objectives import guided_regression
from diffrl.types import Batch, Trajectory
from diffrl.windows import window_of

NAN, INF = math.nan, math.inf
SPREADS = {"group": group_std, "batch": batch_std, "none": no_spread}


def batch_of(rewards: torch.Tensor, *d: int, parts: torch.Tensor | None = None) -> Batch:
    """Rewards " g k" of samples whose latents are arbitrary numbers, one kept step at t = .6 -> .4."""
    b = rewards.numel()
    one = torch.ones(b, 1, dtype=F64)
    x_t, x_next, v = (normal(b, 1, *(d or (2,)), seed=i) for i in range(3))
    times = torch.tensor([0.6], dtype=F64), torch.tensor([0.4], dtype=F64)
    ids = torch.arange(b) * 3 + 1
    return Batch(Trajectory(normal(b, *(d or (2,)), seed=9), x_t, x_next, v, *times, one, one, ids), rewards, {}, parts)


@st.composite
def batches_with_parts(draw) -> Batch:
    """Rewards of one to three parts " g k j", some missing; the reward is their sum."""
    rewards = draw(reward_groups(min_k=2))
    others = [draw(st.permutations(list(range(rewards.numel())))) for _ in range(draw(st.integers(0, 2)))]
    columns = [rewards, *(rewards.flatten()[order].reshape(rewards.shape) * 7 + 1 for order in others)]
    parts = torch.stack(columns, dim=2)
    total = torch.where(torch.isfinite(parts).all(2), parts.sum(2), NAN)
    return batch_of(total, parts=parts)


# ---- spread -----------------------------------------------------------------------------------------------------------


@given(reward_groups(min_k=2))
def test_unbiased_std_is_numpy_s_and_sqrt_k_over_k_minus_1_times_the_population_s(rewards):
    given_ = torch.where(torch.isfinite(rewards), rewards, NAN)
    found = unbiased_group_std(given_)
    assert found.shape == (len(rewards), 1)
    for row, value, population in zip(given_.numpy(), found[:, 0].tolist(), group_std(given_)[:, 0].tolist()):
        k = int(np.isfinite(row).sum())
        if k > 1:
            assert value == pytest.approx(np.nanstd(row, ddof=1), rel=1e-12, abs=1e-12)
            assert value == pytest.approx(population * math.sqrt(k / (k - 1)), rel=1e-12, abs=1e-12)


def test_unbiased_std_is_computed_in_single_precision_at_least():
    rewards = torch.tensor([[256.0, 257.0, 258.0]])
    assert float(unbiased_group_std(rewards.half())) == 1.0
    assert unbiased_group_std(rewards.bfloat16()).dtype == torch.float32
    assert unbiased_group_std(rewards.double()).dtype == F64


# ---- advantages -------------------------------------------------------------------------------------------------------


@given(reward_groups(), st.sampled_from(sorted(SPREADS)), st.sampled_from([1e-4, 0.5]))
def test_advantages_of_the_sum_are_the_group_advantages_of_the_reward(rewards, spread, eps):
    # Both spreads exist and are named. https://github.com/Tencent-Hunyuan/UniRL/pull/128
    found = advantages_of_sum(spread=SPREADS[spread], eps=eps)(batch_of(rewards))
    expected = numpy_advantages(rewards.numpy(), spread=spread, eps=eps)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-9)


@given(batches_with_parts(), st.sampled_from(sorted(SPREADS)), st.sampled_from([1e-4, 0.5]))
def test_the_sum_of_advantages_adds_one_per_reward_over_the_complete_samples(batch, spread, eps):
    complete = np.isfinite(batch.parts.numpy()).all(2)
    expected = np.zeros(batch.rewards.shape)
    for j in range(batch.parts.shape[2]):
        column = np.where(complete, batch.parts[..., j].numpy(), np.nan)
        expected += numpy_advantages(column, spread=spread, eps=eps)
    found = sum_of_advantages(spread=SPREADS[spread], eps=eps)(batch).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    assert not found[~complete].any()


@given(reward_groups(min_k=2))
def test_of_one_reward_both_sums_are_the_same(rewards):
    expected = advantages_of_sum()(batch_of(rewards))
    assert torch.equal(sum_of_advantages()(batch_of(rewards)), expected)
    single = batch_of(torch.where(torch.isfinite(rewards), rewards, NAN), parts=rewards[..., None])
    torch.testing.assert_close(sum_of_advantages()(single), expected, rtol=1e-12, atol=1e-12)


def test_a_sample_without_reward_leaves_its_group_even_where_its_parts_are_there():
    parts = normal(2, 4, 2)
    rewards = parts.sum(2)
    rewards[0, 1] = NAN  # a collect of one's own took it out
    found = sum_of_advantages()(batch_of(rewards, parts=parts))
    without = parts.clone()
    without[0, 1] = NAN
    assert torch.equal(found, sum_of_advantages()(batch_of(rewards, parts=without)))
    assert float(found[0, 1]) == 0


def test_no_reward_drowns_another_by_its_scale():
    parts = normal(3, 6, 2)
    loud = parts * torch.tensor([1.0, 1000.0])

    def both(advantages):
        quiet, scaled = (advantages(batch_of(p.sum(2), parts=p)) for p in (parts, loud))
        return float((quiet - scaled).abs().max())

    assert both(sum_of_advantages(spread=group_std, eps=0.0)) < 1e-9
    assert both(advantages_of_sum(spread=group_std, eps=0.0)) > 0.1  # the control: the sum of the raw scores is drowned


# ---- advantage_credit -------------------------------------------------------------------------------------------------


@given(batches_with_parts(), st.sampled_from([0.3, 1.0, 5.0, INF]))
def test_the_credit_is_the_clamped_advantage_of_samples_with_reward(batch, clamp):
    credit = advantage_credit(advantages=sum_of_advantages(), clamp=clamp)(batch)
    assert sorted(credit) == ["advantage", "has_reward"]
    values, (g, k) = sum_of_advantages()(batch), batch.rewards.shape
    for i, j in itertools.product(range(g), range(k)):
        row = i * k + j
        assert float(credit["advantage"][row]) == min(max(float(values[i, j]), -clamp), clamp)
        assert bool(credit["has_reward"][row]) == bool(torch.isfinite(batch.parts[i, j]).all())


@given(reward_groups())
def test_without_parts_having_a_reward_is_its_being_finite(rewards):
    credit = advantage_credit(advantages=advantages_of_sum())(batch_of(rewards))
    assert torch.equal(credit["has_reward"], torch.isfinite(rewards).flatten())
    assert not credit["advantage"][~credit["has_reward"]].any()


def chosen_by_loops(values: torch.Tensor, usable: torch.Tensor, count: int) -> list[set[float]]:
    """The values of the count/2 lowest and count/2 highest usable samples of each group, sorted, with repeats."""
    picked = []
    for row, here in zip(values.tolist(), usable.tolist()):
        found = sorted(v for v, u in zip(row, here) if u)
        picked.append(found if len(found) <= count else found[: count // 2] + found[len(found) - count // 2 :])
    return picked


@given(reward_groups(min_k=2), st.data())
def test_best_of_n_trains_the_best_and_the_worst_half_by_half(rewards, data):
    g, k = rewards.shape
    n = 2 * data.draw(st.integers(1, k // 2))
    batch, advantages = batch_of(rewards), advantages_of_sum(spread=group_std)
    credit = advantage_credit(advantages=advantages, best_of=n)(batch)
    values, usable = advantages(batch), torch.isfinite(rewards)
    weight = credit["weight"].reshape(g, k)
    assert set(weight.unique().tolist()) <= {0.0, k / n}
    assert not weight[~usable].any()
    for i, expected in enumerate(chosen_by_loops(values, usable, n)):
        assert sorted(values[i][weight[i] > 0].tolist()) == expected  # under ties, n different samples all the same
    plain = advantage_credit(advantages=advantages)(batch)
    assert torch.equal(credit["advantage"], plain["advantage"])  # of the whole group
    if bool(usable.all()):
        loss = normal(g * k)
        assert float(masked_mean(loss, credit["weight"])) == pytest.approx(float(loss[credit["weight"] > 0].mean()))


def test_best_and_worst_are_disjoint_also_where_all_are_equal():
    flat = extremes(torch.zeros(2, 5), torch.ones(2, 5, dtype=torch.bool), count=4)
    assert (flat > 0).sum(1).tolist() == [4, 4]
    assert flat.sum(1).tolist() == pytest.approx([5.0, 5.0])
    few = extremes(torch.arange(5.0)[None], torch.tensor([[True, False, False, True, False]]), count=4)
    assert few.tolist() == [[1.25, 0.0, 0.0, 1.25, 0.0]]


def test_the_clamp_does_not_decide_who_is_best():
    """Two samples beyond the clamp are told apart before it."""
    batch = batch_of(torch.tensor([[1.0, 0.0, 10.0, 9.0]], dtype=F64))
    weight = advantage_credit(advantages=advantages_of_sum(), clamp=0.01, best_of=2)(batch)["weight"]
    assert weight.tolist() == [0.0, 2.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"clamp": 0.0}, ("clamp", 0.0)),
        ({"clamp": -1.0}, ("clamp", -1.0)),
        ({"clamp": NAN}, ("clamp", "nan")),
        ({"best_of": 3}, ("best_of", 3)),
        ({"best_of": 0}, ("best_of", 0)),
        ({"best_of": 2.0}, ("best_of", 2.0)),
    ],
)
def test_bad_options_are_refused_before_any_batch(options, named):
    with refuses(*named):
        advantage_credit(advantages=advantages_of_sum(), **options)


def test_more_best_and_worst_than_samples_are_refused():
    credit = advantage_credit(advantages=advantages_of_sum(), best_of=6)
    with refuses("best_of=6", 5):
        credit(batch_of(normal(2, 5)))


# ---- optimality -------------------------------------------------------------------------------------------------------


@given(reward_groups(), st.sampled_from([0.2, 1.0, 5.0]), st.sampled_from([None, positive_part, negative_part]))
def test_optimality_is_the_clipped_advantage_from_0_to_1(rewards, clip, part):
    advantages = advantages_of_sum(spread=group_std)
    credit = optimality_credit(advantages=advantages, clip=clip, part=part)(batch_of(rewards))
    limits = {None: (0.0, 1.0), positive_part: (0.5, 1.0), negative_part: (0.0, 0.5)}[part]
    for a, r, told in zip(
        advantages(batch_of(rewards)).flatten().tolist(), *map(credit.get, ("optimality", "advantage"))
    ):
        a = max(min(a, clip), -clip)
        a = {None: a, positive_part: max(a, 0.0), negative_part: min(a, 0.0)}[part]
        assert float(told) == pytest.approx(a, abs=1e-12)
        assert float(r) == pytest.approx(a / clip / 2 + 0.5, abs=1e-12)
        assert limits[0] <= float(r) <= limits[1]
    assert torch.equal(credit["has_reward"], torch.isfinite(rewards).flatten())


def test_parts_of_the_advantages_add_up():
    a = normal(50)
    assert torch.equal(positive_part(a) + negative_part(a), a)
    assert bool((positive_part(a) >= 0).all())
    assert bool((negative_part(a) <= 0).all())


@pytest.mark.parametrize("clip", [0.0, -1.0, NAN, INF])
def test_an_optimality_that_cannot_be_is_refused_by_its_own_name(clip):
    with refuses("clip must", clip):
        optimality_credit(advantages=advantages_of_sum(), clip=clip)


def test_credits_remember_nothing():
    # A tracker with hidden state broke on its second update. https://github.com/yifan123/flow_grpo
    first, other = batch_of(normal(3, 4)), batch_of(normal(3, 4, seed=5) * 50)
    for credit in (
        advantage_credit(advantages=sum_of_advantages(), best_of=2),
        optimality_credit(advantages=advantages_of_sum()),
        covariance_credit(),
    ):
        before = credit(first)
        credit(other)
        after = credit(first)
        assert all(torch.equal(before[name], after[name]) for name in before)


# ---- a direction or a weight of one's own -----------------------------------------------------------------------------


def by_median(labels: torch.Tensor, x_0: torch.Tensor) -> Direction:
    """Mean of the better half minus the mean of the rest; groups without spread are dead."""
    above = labels > labels.median(dim=1, keepdim=True).values
    alive = above.any(1)
    gaps = [(x[a].mean(0) - x[~a].mean(0)) if a.any() else 0 * x[0] for a, x in zip(above, x_0)]
    return Direction(torch.stack(gaps), alive)


@given(st.integers(1, 4), st.integers(2, 6), seeds)
def test_a_direction_of_one_s_own_sees_labels_and_groups_and_reaches_every_sample(g, k, seed):
    batch, asked = batch_of(normal(g, k, seed=seed), 3, 2), []
    batch.rewards[0] = 1.0  # a dead group
    credit = covariance_credit(labels=best_against_worst, direction=spy(by_median, asked))(batch)
    (((labels, x_0), _),) = asked
    assert torch.equal(labels.nan_to_num(-1), best_against_worst(batch).nan_to_num(-1))
    assert torch.equal(x_0, batch.trajectory.x_0.reshape(g, k, 3, 2))
    expected = by_median(labels, x_0)
    for row in range(g * k):
        assert torch.equal(credit["direction"][row], expected.value[row // k])
        assert bool(credit["alive"][row]) == bool(expected.alive[row // k])
    assert "weight" not in credit


def test_the_default_direction_is_aggregate_direction():
    batch = batch_of(normal(3, 4), 2)
    x_0 = batch.trajectory.x_0.reshape(3, 4, 2)
    plain, given_ = covariance_credit()(batch), covariance_credit(direction=aggregate_direction)(batch)
    assert all(torch.equal(plain[name], given_[name]) for name in plain)
    assert torch.equal(plain["direction"][::4], aggregate_direction(batch.rewards, x_0).value)


@given(st.integers(1, 4), st.integers(2, 6), seeds)
def test_a_weight_per_group_reaches_every_sample_and_the_loss(g, k, seed):
    batch, asked = batch_of(normal(g, k, seed=seed), 3), []
    weights = torch.arange(g, dtype=F64)  # the first group counts nothing
    weigh = covariance_credit(weight=spy(lambda labels, x_0: weights, asked))
    credit = weigh(batch)
    (((labels, x_0), _),) = asked
    assert torch.equal(labels, batch.rewards)
    assert x_0.shape == (g, k, 3)
    assert credit["weight"].tolist() == [float(row // k) for row in range(g * k)]
    plain = covariance_credit()(batch)
    assert all(torch.equal(credit[name], plain[name]) for name in plain)
    objective, window = guided_regression(), window_of(batch, credit, torch.arange(g * k))
    loss, keep, _ = objective(lambda params, x, t, cond: window.trajectory.v[:, 0], {}, window)
    expected = sum(float(v) * (row // k) * float(plain["alive"][row]) for row, v in enumerate(loss)) / (g * k)
    assert float(masked_mean(loss, keep)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("options", [{"scale": 0.5}, {"rms_axes": (0,)}, {"scale": 2.0, "rms_axes": ()}])
def test_options_of_the_default_direction_are_refused_for_another(options):
    with refuses("aggregate_direction", *(f"{name}={value}" for name, value in options.items())):
        covariance_credit(direction=by_median, **options)
    covariance_credit(**options)


def test_labels_of_another_shape_are_refused():
    # A partial last group would mix prompts. https://github.com/areal-project/AReaL/issues/1419
    for labels in (
        lambda batch: batch.rewards.T,
        lambda batch: batch.rewards.flatten(),
        lambda batch: batch.rewards[:, :2],
    ):
        with refuses("labels", "rewards (2, 3)"):
            covariance_credit(labels=labels, direction=by_median)(batch_of(normal(2, 3)))


# ---- negative control -------------------------------------------------------------------------------------------------


def test_control_other_groupings_and_ties_broken_twice_would_be_seen():
    rewards = normal(2, 6)
    member_major = advantages_of_sum(spread=group_std)(batch_of(rewards.flatten().reshape(6, 2).T.contiguous()))
    assert not np.allclose(member_major.numpy(), numpy_advantages(rewards.numpy(), spread="group"), atol=1e-2)
    values = torch.zeros(1, 4)
    top, bottom = values.argsort(descending=True, stable=True)[0, :2], values.argsort(stable=True)[0, :2]
    assert set(top.tolist()) & set(bottom.tolist())  # best and worst by two sorts overlap under ties
    assert int((extremes(values, values == 0, count=4) > 0).sum()) == 4
    assert not torch.equal(group_advantages(rewards), group_advantages(rewards, spread=batch_std))


def test_a_direction_of_the_group_is_told_to_each_of_its_samples():
    value, alive = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([True, False])
    told = direction_credit(value, alive, torch.tensor([[True, False, True], [True, True, False]]))
    assert told["direction"].tolist() == [[1.0, 2.0]] * 3 + [[3.0, 4.0]] * 3
    assert told["alive"].tolist() == [True] * 3 + [False] * 3
    assert told["has_reward"].tolist() == [True, False, True, True, True, False]


def test_labels_are_numbers_of_the_rewards_shape():
    rewards = torch.tensor([[1.0, 2.0], [0.0, 3.0]])
    told = Batch(None, rewards, {})
    assert labels_of(told, lambda b: b.rewards > 1).tolist() == [[0.0, 1.0], [0.0, 1.0]]
    with pytest.raises(ValueError, match="labels must have"):
        labels_of(told, lambda b: b.rewards.T[:1])
