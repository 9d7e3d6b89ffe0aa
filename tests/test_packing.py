"""Time-step packing: several (sample, step) states per forward-backward, the gradient of the whole window, ceil(S/K) calls.

Float64 on the toy. Negative controls are the tests with `control` in their names.
"""

import itertools
import math
import warnings
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import refuses
from test_states import window_for
from toys import TIMES, toy_run, wide

from diffrl import algorithms
from diffrl.algorithms import art, awm, dance_grpo, flow_dppo, flow_grpo, nft
from diffrl.checks import column
from diffrl.losses import masked_mean
from diffrl.ranks import alone, share_of
from diffrl.states import trained_pairs, window_states
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model
from diffrl.types import Window
from diffrl.windows import parts_of

FAMILIES = {
    "art": lambda: art(updates=1),
    "art, drawn steps": lambda: art(steps_per_sample=3, radius=1e-3),
    "flow_grpo": lambda: flow_grpo(updates=1),
    "dance_grpo": lambda: dance_grpo(),
    "flow_dppo": lambda: flow_dppo(),
    "nft": lambda: nft(),
    "awm": lambda: awm(),
    "guard": lambda: algorithms.grpo_guard(updates=1),
}


def gradients(algorithm, **options):
    """(gradients of every optimizer step, states of every forward-backward) of two iterations, SGD, no clipping."""
    model, seen, sizes = toy_model(dtype=torch.float64), [], []
    inner = algorithm.objective

    def objective(velocity, params, window):
        loss, keep, metrics = inner(velocity, params, window)
        sizes.append(len(loss))
        return loss, keep, metrics

    objective.steps_per_sample = inner.steps_per_sample
    optimizer = torch.optim.SGD(list(model.params.values()), lr=0.05)
    optimizer.register_step_pre_hook(lambda *_: seen.append({n: p.grad.clone() for n, p in model.params.items()}))
    options = {"group_size": 4, "iterations": 2, "grad_clip": None, "prompts": PROMPTS[:2], **options}
    toy_run(model=model, optimizer=optimizer, algorithm=wide(algorithm)._replace(objective=objective), **options)
    return seen, sizes


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("pack", [1, 3, 7, 1000])
def test_packed_forwards_give_the_windows_gradient_with_ceil_of_s_over_k_calls(name, pack):
    whole, states = gradients(FAMILIES[name]())
    parts, sizes = gradients(FAMILIES[name](), pack=pack)
    assert sum(sizes) == sum(states)
    assert len(sizes) == sum(math.ceil(s / pack) for s in states)
    assert max(sizes) <= pack
    assert len(whole) == len(parts) >= 2
    for a, b in zip(whole, parts, strict=True):
        for n in a:
            assert torch.allclose(a[n], b[n], rtol=1e-12, atol=1e-12 * float(a[n].abs().max()))


def test_a_pack_of_everything_is_the_plain_update_bit_for_bit():
    for name in ("art", "flow_grpo", "nft"):
        for a, b in zip(gradients(FAMILIES[name]())[0], gradients(FAMILIES[name](), pack=10**6)[0], strict=True):
            assert all(torch.equal(a[n], b[n]) for n in a)


def test_control_the_mean_of_the_means_of_ragged_packs_is_another_gradient():
    """What the shares are for: 7 states in packs of 3, 2 and 2."""
    window = window_for(7, 1, 2, credit={"direction": torch.ones(7, 2, dtype=torch.float64)})
    theta = torch.ones(2, dtype=torch.float64, requires_grad=True)
    objective = art().objective

    def velocity(params, x, t, cond):
        return x * params["a"]

    def gradient(share_of):
        theta.grad = None
        for part, share, whole in parts_of(objective, window, pack=3):
            loss, keep, _ = objective(velocity, {"a": theta}, part)
            (masked_mean(loss, keep) * share_of(share, whole)).backward()
        return theta.grad.clone()

    loss, keep, _ = objective(velocity, {"a": theta}, window)
    (plain,) = torch.autograd.grad(masked_mean(loss, keep), theta)
    assert torch.allclose(gradient(lambda share, whole: share / whole), plain, rtol=1e-12, atol=0)
    assert not torch.allclose(gradient(lambda share, whole: 1 / 3), plain, rtol=1e-3, atol=0)


def test_metrics_of_packs_are_weighted_by_their_states():
    options = {"algorithm": art(updates=1), "iterations": 2, "group_size": 4, "prompts": PROMPTS[:1]}
    whole, packed = toy_run(**options)[1][1], toy_run(pack=7, **options)[1][1]
    assert packed["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert packed["kl_proxy"] == pytest.approx(whole["kl_proxy"], rel=1e-4)
    assert packed["drift_rms"] == pytest.approx(whole["drift_rms"], rel=1e-4)
    assert packed["masked_fraction"] == pytest.approx(whole["masked_fraction"], abs=1e-6)


def unfair(points, prompts):
    """A dead group, one whose samples have no reward, one that lacks some, a whole one."""
    rewards = toward_compass(points, prompts)
    rewards[[p == PROMPTS[0] for p in prompts]] = 0.5
    rewards[[p == PROMPTS[1] for p in prompts]] = torch.nan
    rewards[torch.tensor([p == PROMPTS[2] for p in prompts]) & (points[:, 0] > 0)] = torch.nan
    return rewards


def without_numbers(algorithm):
    """The latents of samples that have no reward are nan, as those of a rollout that overflowed."""

    def collect(*args):
        batch = algorithm.collect(*args)
        lost = torch.isnan(batch.rewards).flatten()
        tr = batch.trajectory
        lose = {n: torch.where(column(lost, getattr(tr, n)), torch.nan, getattr(tr, n)) for n in ("x_0", "x_t", "v")}
        return batch._replace(trajectory=tr._replace(**lose))

    return algorithm._replace(collect=collect)


@pytest.mark.parametrize("cut", [{"micro_batch": 1}, {"micro_batch": 3}, {"pack": 1}, {"pack": 7}], ids=str)
@pytest.mark.parametrize("algorithm", [art, flow_grpo, nft, awm, flow_dppo])
def test_metrics_are_those_of_the_whole_where_some_samples_say_nothing(algorithm, cut):
    """Parts without a live sample, or without a reward, once counted as masked fractions of 0 and as nan."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # samples have no reward
        (whole,), (cut_up,) = (
            toy_run(algorithm=without_numbers(algorithm()), reward=unfair, iterations=1, **how)[1] for how in ({}, cut)
        )
    assert whole["reward/missing"] > 0.25
    for name in set(whole) - set(TIMES):
        assert cut_up[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6, nan_ok=True), name


# ---- the pieces


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 25), st.sampled_from([None, 1, 2]), st.data())
def test_parts_cover_every_trained_state_once(b, s, pack, size, data):
    window = window_for(b, s, 2)
    size = size if size is None or size <= s else None

    def objective(*_): ...

    objective.steps_per_sample = size
    every = trained_pairs(window, steps_per_sample=size).tolist()
    parts = list(parts_of(objective, window, pack=pack))
    found = [pair for part, *_ in parts for pair in (every if part.pairs is None else part.pairs.tolist())]
    assert found == every
    assert len(parts) == math.ceil(len(every) / pack)
    sizes = [share for _, share, _ in parts]
    assert max(sizes) - min(sizes) <= 1
    assert {whole for *_, whole in parts} == {len(every)}


@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from([None, 2, 3, 50]), st.integers(1, 4), st.booleans())
def test_ranks_share_the_rows_and_each_packs_its_own(b, s, size, count, packed):
    """Every state once over all ranks, in order; the shares are of the window, whoever has no rows."""
    window = window_for(b, s, 2)

    def objective(*_): ...

    objective.steps_per_sample = None
    given = {"pack": size} if packed and size else {"micro_batch": size}
    seeds, share_sum = [], 0.0
    for r in range(count):
        ranks = alone._replace(rank=r, size=count, share=partial(share_of, rank=r, size=count))
        for part, share, whole in parts_of(objective, window, ranks=ranks, **given):
            states = window_states(part)
            seeds += list(zip(part.trajectory.seeds[states.rows].tolist(), states.columns.tolist(), strict=True))
            assert len(states.rows) * whole == share * b * s
            assert share <= (size or whole)
            share_sum += share / whole
    assert seeds == list(itertools.product(window.trajectory.seeds.tolist(), range(s)))
    assert share_sum == pytest.approx(1.0)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_the_states_of_given_pairs_are_those_pairs_in_that_order(b, s, data):
    window = window_for(b, s, 2)
    every = [(i, j) for i in range(b) for j in range(s)]
    chosen = data.draw(st.lists(st.sampled_from(every), min_size=1, unique=True))
    some = window_states(window._replace(pairs=torch.tensor(chosen)), steps_per_sample=1)
    whole = window_states(window)
    place = [every.index(pair) for pair in chosen]
    for name in ("x_t", "x_next", "v_old", "t", "t_next", "std", "log_prob", "rows", "columns", "x_0"):
        assert torch.equal(getattr(some, name), getattr(whole, name)[place])
    assert torch.equal(some.cond["guide"], whole.cond["guide"][place])


@pytest.mark.parametrize(
    "pairs",
    [
        torch.zeros(0, 2, dtype=torch.int64),
        torch.zeros(3, dtype=torch.int64),
        torch.tensor([[0.0, 1.0]]),
        torch.tensor([[0, 4]]),
        torch.tensor([[3, 0]]),
        torch.tensor([[-1, 0]]),
        torch.tensor([[1, 1], [1, 1]]),
    ],
)
def test_pairs_that_are_none_are_refused(pairs):
    with refuses("window.pairs"):
        window_states(window_for(3, 4, 2)._replace(pairs=pairs))


def test_pack_is_a_count_and_stands_alone():
    with refuses("pack"):
        toy_run(pack=0)
    with refuses("micro_batch=2 counts samples and pack=3 states"):
        toy_run(pack=3, micro_batch=2)
    with refuses("micro_batch=2 counts samples and pack=3 states"):
        list(parts_of(art().objective, window_for(2, 2, 2), micro_batch=2, pack=3))


def test_an_objective_that_does_not_say_what_it_trains_cannot_be_packed():
    inner = art().objective
    algorithm = art()._replace(objective=lambda *args: inner(*args))
    with refuses("steps_per_sample"):
        toy_run(algorithm=algorithm, pack=4, iterations=1)
    toy_run(algorithm=algorithm, micro_batch=4, iterations=1)  # the negative control: without packs it runs


def test_an_empty_window_is_refused():
    window = window_for(2, 2, 2)
    none: Window = window._replace(rewards=window.rewards[:0])
    with refuses("window is empty"):
        list(parts_of(art().objective, none, pack=2))
