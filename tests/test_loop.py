"""The loop on the closed-form toy: what it gives, what may be swapped, what it refuses, and whether `diagnose` notices.

Negative controls are the tests with `control` in their names.
"""

import functools
import itertools
import math
import re
import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from toys import adam, rows_of, same, start, timeless, toy_reward, toy_run, values_of

from diffrl import algorithms, loop
from diffrl.algorithms import (
    all_steps,
    art,
    art_flash,
    art_pairwise,
    best_against_worst,
    collect_rollout,
    guidance_force,
    guided_regression,
    noisiest,
    window_states,
)
from diffrl.guidance import (
    Direction,
    aggregate_direction,
    batch_std,
    group_advantages,
    guided_velocity,
    optimality,
)
from diffrl.loop import diagnose, load_checkpoint, restore_checkpoint, save_checkpoint, update
from diffrl.losses import advantage_weighted_matching, flat_weight, nft, velocity_matching
from diffrl.models import Model
from diffrl.sampling import cps_step, dance_sde_step, euler_step, flow_sde_step, rollout, sample_seeds
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model, toy_velocity
from diffrl.trust_region import ema
from diffrl.types import Gridded
from diffrl.windows import prompts_of_iteration, split_within_prompt

NAN = float("nan")

# ---- metrics

PLAIN = {
    *("iteration", "reward/mean", "reward/std", "reward/missing", "groups/dead", "loss", "masked_fraction"),
    *("kl_proxy", "drift_rms", "behaviour_distance", "grad_norm"),
    *("seconds/rollout", "seconds/reward", "seconds/update"),
}


def test_training_raises_the_reward():
    model = toy_model()
    before = toy_reward(model)
    toy_run(model=model, iterations=10)
    assert toy_reward(model) > before + 0.8


def test_every_metric_is_there_is_a_number_and_is_documented():
    _, rows = toy_run(iterations=2)
    single = {
        f"{n}/update_{u}" for n in ("loss", "masked_fraction", "kl_proxy", "drift_rms", "grad_norm") for u in (1, 2)
    }
    for row in rows:
        assert set(row) == PLAIN | single
        assert all(isinstance(value, (int, float)) and math.isfinite(value) for value in row.values())
    documented = set(re.findall(r"[a-z_]+(?:/[a-z]+)?", loop.__doc__))
    assert set(PLAIN - {"iteration"}) | {"ratio_deviation"} <= documented


def test_a_metric_of_the_objective_is_passed_on_and_averaged_over_the_updates():
    plain = guided_regression()

    def objective(velocity, params, window):
        loss, keep, metrics = plain(velocity, params, window)
        return loss, keep, metrics | {"ratio_deviation": float(window.rewards.mean())}

    row = toy_run(algorithm=art()._replace(objective=objective), iterations=1)[1][0]
    assert row["ratio_deviation"] == pytest.approx(row["reward/mean"])
    single = [row[f"ratio_deviation/update_{u}"] for u in (1, 2)]
    assert row["ratio_deviation"] == pytest.approx(sum(single) / 2)
    assert single[0] != single[1]


def test_the_first_updates_loss_is_the_live_share():
    def some_dead(images, prompts):
        flat = torch.tensor([prompt == "north" for prompt in prompts])
        return torch.where(flat, 1.0, toward_compass(images, prompts))

    _, rows = toy_run(iterations=3)
    assert all(row["loss/update_1"] == pytest.approx(1.0, abs=1e-6) for row in rows)
    assert all(row["drift_rms/update_1"] == 0.0 for row in rows)
    assert all(row["drift_rms/update_2"] > 0 for row in rows)
    _, rows = toy_run(iterations=3, reward=some_dead)
    assert all(row["groups/dead"] == 0.25 for row in rows)
    assert all(row["loss/update_1"] == pytest.approx(0.75, abs=1e-6) for row in rows)


def test_control_a_stale_behaviour_shows_in_loss_and_drift():
    """With the initial params rolling out for ever, neither drift 0 nor loss 1 holds at the first update."""
    _, rows = toy_run(algorithm=art()._replace(behaviour=lambda old, new, i: ema(old, new, decay=1.0)))
    assert rows[0]["drift_rms/update_1"] == 0.0
    assert all(row["drift_rms/update_1"] > 0 for row in rows[1:])
    assert all(abs(row["loss/update_1"] - 1) > 1e-3 for row in rows[1:])
    distances = [row["behaviour_distance"] for row in rows]
    assert distances[0] == 0 < distances[1] < distances[2] < distances[3]


# ---- determinism, prompts, seeds


def test_same_seed_same_bits_another_seed_other_bits():
    (model, rows), (again, rows_again), (other, rows_other) = toy_run(), toy_run(), toy_run(seed=1)
    assert same(model.params, again.params)
    assert timeless(rows) == timeless(rows_again)
    assert not same(model.params, other.params)
    assert timeless(rows) != timeless(rows_other)


def test_global_generators_are_neither_read_nor_moved():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    model, _ = toy_run()
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert same(model.params, toy_run()[0].params)


def watched(seen, algorithm=None):
    """The algorithm, noting prompts (by their encoding) and seeds of every collect."""
    algorithm = algorithm or art()

    def collect(velocity, params, cond, seeds, score):
        seen.append((cond["prompt"].tolist(), seeds.clone()))
        return algorithm.collect(velocity, params, cond, seeds, score)

    return algorithm._replace(collect=collect)


def test_prompts_and_seeds_of_an_iteration_are_functions_of_seed_and_iteration():
    straight, jumped = [], []
    toy_run(algorithm=watched(straight), prompts_per_iteration=2, seed=5, iterations=4)
    toy_run(algorithm=watched(jumped), prompts_per_iteration=2, seed=5, iterations=2, start=2, group_size=4)
    for i, (prompts, seeds) in enumerate(straight):
        chosen = prompts_of_iteration(5, i, 4, 2)
        assert prompts == chosen
        assert torch.equal(seeds, sample_seeds(5, i, chosen, 8))
    for (prompts, seeds), (earlier, seeds_earlier) in zip(jumped, straight[2:]):
        assert prompts == earlier  # also where the run starts there, with another group size
        assert torch.equal(seeds, seeds_earlier[:, :4])
    assert len({int(s) for _, seeds in straight for s in seeds.flatten()}) == 4 * 2 * 8


def test_a_pool_draws_more_seeds_than_the_group_trains():
    seen = []

    def collect(velocity, params, cond, seeds, score):
        seen.append(seeds.shape)
        return collect_rollout()(velocity, params, cond, seeds[:, :8], score)

    toy_run(algorithm=art()._replace(collect=collect, pool=20), iterations=1)
    assert seen == [(4, 20)]


# ---- windows and micro-batches


def collect_doubles(*args):
    """Noise of the library is float32; from here on everything is float64."""
    batch = collect_rollout()(*args)
    wide = {n: x.double() for n, x in batch.trajectory._asdict().items() if n != "seeds"}
    return batch._replace(trajectory=batch.trajectory._replace(**wide))


def gradients(**options):
    """Gradients of every optimizer step of two iterations, plain gradient descent, float64."""
    model, seen = toy_model(dtype=torch.float64), []
    options["algorithm"] = art()._replace(collect=collect_doubles)
    optimizer = torch.optim.SGD(list(model.params.values()), lr=0.05)
    optimizer.register_step_pre_hook(lambda *_: seen.append({n: p.grad.clone() for n, p in model.params.items()}))
    toy_run(model=model, optimizer=optimizer, iterations=2, grad_clip=None, **options)
    return seen


@pytest.mark.parametrize("micro_batch", [1, 3, 5, 16, 100])
def test_micro_batches_give_the_windows_gradient_and_no_further_step(micro_batch):
    whole, parts = gradients(), gradients(micro_batch=micro_batch)
    assert len(whole) == len(parts) == 4  # two iterations x two windows
    for a, b in zip(whole, parts):
        for name in a:
            assert torch.allclose(a[name], b[name], rtol=0, atol=1e-12)


def test_micro_batches_bound_how_many_samples_a_backward_sees():
    plain, sizes = guided_regression(), []

    def objective(velocity, params, window):
        sizes.append(len(window.rewards))
        return plain(velocity, params, window)

    toy_run(algorithm=art()._replace(objective=objective), micro_batch=3, iterations=1)
    assert sizes == [3, 3, 3, 3, 3, 1] * 2


def test_control_gradients_of_other_samples_differ_by_more_than_rounding():
    a, b = gradients()[0], gradients(seed=1)[0]
    assert float((a["mean"] - b["mean"]).abs().max()) > 1e-3


def test_micro_batches_of_a_partly_dead_batch_keep_the_denominator():
    def some_dead(images, prompts):
        flat = torch.tensor([prompt == "north" for prompt in prompts])
        return torch.where(flat, 1.0, toward_compass(images, prompts))

    whole, parts = gradients(reward=some_dead), gradients(reward=some_dead, micro_batch=3)
    assert all(torch.allclose(a["mean"], b["mean"], rtol=0, atol=1e-12) for a, b in zip(whole, parts))


def test_one_optimizer_step_per_window_of_disjoint_rows():
    plain, windows = guided_regression(), []

    def objective(velocity, params, window):
        windows.append(window.trajectory.seeds.tolist())
        return plain(velocity, params, window)

    for updates in (1, 2, 4):
        windows.clear()
        model = toy_model()
        optimizer, steps = adam(model), []
        optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
        algorithm = art(updates=updates)._replace(objective=objective)
        toy_run(model=model, optimizer=optimizer, algorithm=algorithm, iterations=1)
        assert len(steps) == len(windows) == updates
        seeds = sample_seeds(0, 0, range(4), 8)
        assert sorted(itertools.chain(*windows)) == sorted(seeds.flatten().tolist())
        for window in windows:
            assert all(sum(s in window for s in row.tolist()) == 8 // updates for row in seeds)


def test_rollout_chunks_change_nothing_but_rounding():
    model, rows = toy_run()
    chunked, rows_chunked = toy_run(rollout_chunk=5)
    for name, p in model.params.items():
        assert torch.allclose(p, chunked.params[name], atol=1e-6)
    assert rows[-1]["reward/mean"] == pytest.approx(rows_chunked[-1]["reward/mean"], abs=1e-5)


def test_gradients_are_clipped_and_reported_unclipped():
    model, seen = toy_model(), []
    optimizer = torch.optim.SGD(list(model.params.values()), lr=0.1)
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(float(sum(p.grad.square().sum() for p in model.params.values()).sqrt()))
    )
    row = toy_run(model=model, optimizer=optimizer, grad_clip=1e-3, iterations=1)[1][0]
    assert seen == pytest.approx([1e-3, 1e-3], rel=1e-2)
    assert row["grad_norm"] > 0.01


def test_images_reach_the_encoder_of_their_prompts():
    model, seen = toy_model(), []

    def encode(prompts, images):
        seen.append(dict(zip(prompts, images)))
        return model.encode(prompts)

    pictures = [f"picture of {prompt}" for prompt in PROMPTS]
    toy_run(model=model._replace(encode=encode), images=pictures, prompts_per_iteration=2, iterations=2)
    assert all(image == f"picture of {prompt}" for pairs in seen for prompt, image in pairs.items())
    assert sorted(itertools.chain(*seen)) == sorted(PROMPTS)


def test_before_iteration_is_handed_the_optimizer_and_can_reset_it():
    (reset, _), (kept, _) = toy_run(before_iteration=lambda o: o.state.clear()), toy_run()
    assert not same(reset.params, kept.params)
    untouched, _ = toy_run(before_iteration=lambda o: None)
    assert same(untouched.params, kept.params)


# ---- behaviour


def test_behaviour_moves_once_per_iteration_and_counts_optimizer_steps():
    calls = []

    def behaviour(old, new, i):
        calls.append(i)
        return ema(old, new, decay=0.5)

    model = toy_model()
    _, rows = toy_run(model=model, algorithm=art()._replace(behaviour=behaviour), micro_batch=3)
    assert calls == [2, 4, 6, 8]
    assert rows[0]["behaviour_distance"] == 0
    assert all(row["behaviour_distance"] > 0 for row in rows[1:])


def test_the_behaviour_params_roll_out_and_the_live_ones_are_trained():
    used = []

    def collect(velocity, params, cond, seeds, score):
        used.append(values_of(params))
        return art().collect(velocity, params, cond, seeds, score)

    model = toy_model()
    algorithm = art()._replace(collect=collect, behaviour=lambda old, new, i: ema(old, new, decay=0.9))
    training = start(model, algorithm)
    expected = values_of(model.params)
    for _ in range(3):
        next(training)
        assert same(used[-1], expected)
        expected = ema(expected, model.params, decay=0.9)
        assert not same(expected, values_of(model.params))


# ---- resume

EMA = art()._replace(behaviour=lambda old, new, i: ema(old, new, decay=0.7))


@pytest.mark.parametrize("algorithm", [art(), EMA], ids=["on-policy", "average"])
@pytest.mark.parametrize("k", [1, 3])
def test_n_steps_are_k_steps_save_load_and_the_rest(tmp_path, algorithm, k):
    n, options = 5, {"prompts_per_iteration": 2}
    straight, rows = toy_run(algorithm=algorithm, iterations=n, **options)

    model, held = toy_model(), {}

    def remembered(old, new, i):
        held["now"] = algorithm.behaviour(old, new, i)
        return held["now"]

    optimizer = adam(model)
    training = start(model, algorithm._replace(behaviour=remembered), optimizer=optimizer, **options)
    first = rows_of(training, k)
    save_checkpoint(tmp_path, params=model.params, optimizer=optimizer, behaviour=held["now"], iteration=k)

    fresh = toy_model(std=0.9)
    optimizer = adam(fresh, lr=1.0)  # everything, the learning rate too, comes from the checkpoint
    checkpoint = load_checkpoint(tmp_path)
    behaviour = restore_checkpoint(checkpoint, params=fresh.params, optimizer=optimizer)
    assert (behaviour is None) == (algorithm is not EMA)
    later = start(fresh, algorithm, optimizer=optimizer, start=checkpoint.iteration, behaviour=behaviour, **options)
    rest = rows_of(later, n - k)
    assert timeless(first + rest) == timeless(rows)
    assert same(fresh.params, straight.params)


def test_control_forgetting_any_part_of_a_checkpoint_changes_the_rest(tmp_path):
    model, held = toy_model(), {}

    def remembered(old, new, i):
        held["now"] = EMA.behaviour(old, new, i)
        return held["now"]

    optimizer = adam(model)
    training = start(model, EMA._replace(behaviour=remembered), optimizer=optimizer)
    rows_of(training, 3)
    save_checkpoint(tmp_path, params=model.params, optimizer=optimizer, behaviour=held["now"], iteration=3)
    rows_of(training, 2)

    def rest(forget):
        fresh = toy_model()
        optimizer = adam(fresh)
        behaviour = restore_checkpoint(load_checkpoint(tmp_path), params=fresh.params, optimizer=optimizer)
        if forget == "optimizer":
            optimizer = adam(fresh)
        options = {
            "start": 0 if forget == "iteration" else 3,
            "behaviour": None if forget == "behaviour" else behaviour,
        }
        rows_of(start(fresh, EMA, optimizer=optimizer, **options), 2)
        return same(fresh.params, model.params)

    assert rest(None)
    assert not any(rest(forget) for forget in ("optimizer", "iteration", "behaviour"))


def test_saving_changes_nothing(tmp_path):
    model = toy_model()
    optimizer = adam(model)
    training = start(model, optimizer=optimizer)
    for i in range(4):
        next(training)
        save_checkpoint(tmp_path, params=model.params, optimizer=optimizer, iteration=i + 1)
    assert same(model.params, toy_run()[0].params)


# ---- swaps

euler_last = [partial(dance_sde_step, eta=0.3)] * 4 + [euler_step]


def noisier(step, **options):
    return [partial(step, **options)] * 4 + [euler_step]


def signed(batch):
    """Labels 1 above the group's median, 0 below."""
    return (batch.rewards > batch.rewards.median(dim=1, keepdim=True).values).float()


def weighted_by_advantage(batch):
    """credit: mean of x_0 weighted by the advantage, spread over the whole batch, and never normalised."""
    g, k = batch.rewards.shape
    advantages = group_advantages(batch.rewards, spread=batch_std)
    x_0 = batch.trajectory.x_0.reshape(g, k, -1)
    direction = (advantages[..., None] * x_0).mean(1)
    every = torch.ones(g * k, dtype=torch.bool)
    return {"direction": direction.repeat_interleave(k, 0), "alive": every, "has_reward": every}


def scalar_credit(batch):
    advantages = group_advantages(batch.rewards).flatten()
    return {"advantage": advantages, "optimality": optimality(advantages)}


def nft_objective(velocity, params, window):
    """DiffusionNFT's loss on the states of the rollout: no direction, one number per sample."""
    s = window_states(window)
    v = velocity(params, s.x_t, s.t, s.cond)
    r = window.credit["optimality"][s.rows]
    loss = nft(v, s.v_old, s.x_t, window.trajectory.x_0[s.rows], s.t, r, beta=1.0, weight=flat_weight)
    return loss, torch.ones_like(loss, dtype=torch.bool), {}


def awm_objective(velocity, params, window):
    s = window_states(window)
    v = velocity(params, s.x_t, s.t, s.cond)
    x_0 = window.trajectory.x_0[s.rows]
    noise = s.x_t[:, :] + (1 - s.t)[:, None] * s.v_old  # where this state's straight line starts
    loss = advantage_weighted_matching(v, s.v_old, noise, x_0, window.credit["advantage"][s.rows], clip=10.0)
    return loss, torch.ones_like(loss, dtype=torch.bool), {}


def no_trust_region(velocity, params, window):
    """Plain regression on the guided velocity, every live state kept: about the smallest objective there is."""
    s = window_states(window)
    target = guided_velocity(s.v_old, window.credit["direction"][s.rows])
    return velocity_matching(velocity(params, s.x_t, s.t, s.cond), target), window.credit["alive"][s.rows], {}


def everything_positional(velocity, behaviour, cond, seeds, score):
    """A collect of one's own around the library's: rewards are ranks."""
    batch = collect_rollout()(velocity, behaviour, cond, seeds, score)
    return batch._replace(rewards=batch.rewards.argsort(1).argsort(1).float())


def by_prompt(g, k, updates):
    """Whole prompts per update instead of halves of every prompt."""
    return list(torch.arange(g * k).chunk(updates))


SWAPS = {
    "credit: advantage-weighted mean": (art()._replace(credit=weighted_by_advantage), {}),
    "credit and objective: DiffusionNFT": (
        art(updates=1)._replace(credit=scalar_credit, objective=nft_objective),
        {"iterations": 15},
    ),
    "credit and objective: AWM": (
        art(updates=1)._replace(credit=scalar_credit, objective=awm_objective),
        {"iterations": 15},
    ),
    "labels: random pairs": (art_pairwise(), {}),
    "labels: best against worst": (art_pairwise(pairing=best_against_worst), {}),
    "labels: above the median": (art(labels=signed), {}),
    "kernel: Dance": (art(step=euler_last), {}),
    "kernel: flow SDE on two steps": (art(step=[flow_sde_step] * 2 + [euler_step] * 3), {}),
    "kernel: CPS": (art(step=noisier(cps_step, eta=0.4)), {}),
    "reference kernel: Dance": (art(reference_kernel=partial(dance_sde_step, eta=0.5), radius=0.03), {}),
    "mask: guidance alone": (art(mask_force=guidance_force), {}),
    "mask: a wider radius": (art(radius=0.03), {}),
    "mask: a force of one's own": (art(mask_force=lambda v, v_old, target: v + v_old), {}),
    "mask: none": (art()._replace(objective=no_trust_region), {}),
    "trained steps: the noisiest": (art_flash(noisiest=2), {}),
    "trained steps: last half": (art(trained_steps=lambda n: range(n // 2, n)), {}),
    "trained steps: random subset": (art(steps_per_sample=2), {}),
    "behaviour: an average": (art()._replace(behaviour=lambda old, new, i: ema(old, new, decay=0.5)), {}),
    "collect: ranks as rewards": (art()._replace(collect=everything_positional), {}),
    "updates: one": (art(updates=1), {}),
    "updates: four": (art(updates=4), {}),
    "split: whole prompts": (art(), {"split": by_prompt}),
    "dead groups restore": (art(dead="restore"), {}),
    "reward: a lambda": (art(), {"reward": lambda images, prompts: toward_compass(images, prompts).exp()}),
    "reward: a list of numbers": (art(), {"reward": lambda images, prompts: toward_compass(images, prompts).tolist()}),
    "optimizer: plain gradient descent": (art(), {"optimizer": "sgd"}),
    "grad_clip: tight": (art(), {"grad_clip": 0.01}),
}
MARGIN = 0.4
"""Of the toy's reward, which is -1.3 at first and -0.3 at its best mean with the initial spread."""


SAME_HERE = {"dead groups restore", "reward: a list of numbers", "mask: guidance alone"}
"""Swaps that make no difference here: no group is dead, a list holds the same numbers, no drift outgrows the guidance."""


@functools.cache
def unswapped():
    return values_of(toy_run(iterations=10)[0].params)


@pytest.mark.parametrize("name", SWAPS)
def test_a_swapped_piece_raises_the_reward(name):
    algorithm, options = SWAPS[name]
    model = toy_model()
    if options.get("optimizer") == "sgd":
        options = options | {"optimizer": torch.optim.SGD(list(model.params.values()), lr=0.3)}
    before = toy_reward(model)
    toy_run(model=model, algorithm=algorithm, **{"iterations": 10} | options)
    assert toy_reward(model) > before + MARGIN
    assert same(model.params, unswapped()) == (name in SAME_HERE)  # the swapped piece was the one used


def test_control_without_guidance_nothing_moves():
    model = toy_model()
    before = values_of(model.params)
    _, rows = toy_run(model=model, algorithm=art(scale=0.0), iterations=10)
    assert same(values_of(model.params), before)
    assert all(row["grad_norm"] == 0 for row in rows)


def test_control_the_wrong_sign_lowers_the_reward():
    def wrong(batch):
        credit = art().credit(batch)
        return credit | {"direction": -credit["direction"]}

    model = toy_model()
    before = toy_reward(model)
    toy_run(model=model, algorithm=art()._replace(credit=wrong), iterations=10)
    assert toy_reward(model) < before - MARGIN


def test_control_a_reward_without_information_does_not_raise_the_reward():
    calls = itertools.count()

    def blind(images, prompts):
        return torch.rand(len(images), generator=torch.Generator().manual_seed(next(calls)))

    model = toy_model()
    before = toy_reward(model)
    toy_run(model=model, reward=blind, iterations=10)
    assert toy_reward(model) < before + MARGIN / 2


def test_collect_is_called_with_exactly_five_positional_arguments():
    seen = []

    def collect(*args):
        seen.append(args)
        return art().collect(*args)

    model = toy_model()
    toy_run(model=model, algorithm=art()._replace(collect=collect), iterations=1)
    ((velocity, behaviour, cond, seeds, score),) = seen
    assert isinstance(velocity, Gridded)
    assert velocity.shape == (2,)
    assert velocity.steps == 5
    assert behaviour is model.params
    assert cond["prompt"].tolist() == [0, 1, 2, 3]  # one row per prompt
    assert seeds.shape == (4, 8)
    assert score(torch.zeros(2, 2), torch.tensor([0, 3])).tolist() == [-1.0, -1.0]


# ---- rewards that fail


def test_a_reward_that_raises_for_some_is_missing_there_and_the_run_goes_on():
    def picky(images, prompts):
        if bool((images[:, 0] > 0.5).any()):
            raise RuntimeError("too far east")
        return toward_compass(images, prompts)

    model = toy_model()
    _, rows = toy_run(model=model, reward=picky, iterations=3)
    assert all(0 < row["reward/missing"] < 0.7 for row in rows)
    assert all(math.isfinite(row["reward/mean"]) for row in rows)
    assert all(bool(torch.isfinite(p).all()) for p in model.params.values())
    assert toy_run()[1][0]["reward/missing"] == 0


@pytest.mark.parametrize("hole", [NAN, math.inf, -math.inf])
def test_rewards_that_are_not_finite_leave_their_groups_only(hole):
    def holey(images, prompts):
        values = toward_compass(images, prompts)
        values[images[:, 1] > 0.4] = hole
        return values

    model = toy_model()
    _, rows = toy_run(model=model, reward=holey, iterations=3)
    assert all(0 < row["reward/missing"] < 1 for row in rows)
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert all(bool(torch.isfinite(p).all()) for p in model.params.values())


@pytest.mark.filterwarnings("ignore:.*groups have no spread")
def test_an_iteration_without_any_reward_moves_no_fresh_params_and_the_run_goes_on():
    calls = itertools.count()

    def late(images, prompts):
        values = toward_compass(images, prompts)
        return values * NAN if next(calls) < 2 else values

    model = toy_model()
    before, training = values_of(model.params), start(model, reward=late)
    rows = rows_of(training, 2)
    assert all(row["reward/missing"] == row["groups/dead"] == 1 for row in rows)
    assert all(row["loss"] == 0 and math.isnan(row["reward/mean"]) for row in rows)
    assert same(values_of(model.params), before)
    rows_of(training, 2)
    assert not same(values_of(model.params), before)
    assert all(bool(torch.isfinite(p).all()) for p in model.params.values())


def test_mostly_dead_groups_are_warned_about_once():
    with pytest.warns(UserWarning, match=r"100% of groups have no spread at iteration 0") as caught:
        toy_run(reward=lambda images, prompts: torch.ones(len(images)), iterations=3)
    assert len(caught) == 1


def test_a_reward_that_raises_everywhere_is_refused():
    def broken(images, prompts):
        raise OSError("no such weights")

    with pytest.raises(ValueError, match=r"reward raised for all 32 images: OSError: no such weights"):
        toy_run(reward=broken)


def test_a_reward_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match=r"reward.*\(32,\).*\(31,\)"):
        toy_run(reward=lambda images, prompts: torch.zeros(31))


# ---- refusals


def other_optimizer(model):
    return torch.optim.Adam([torch.zeros(2, requires_grad=True)])


def one_too_many(model):
    return torch.optim.Adam([*model.params.values(), torch.zeros(2, requires_grad=True)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, r"prompts.*\[\]"),
        ({"prompts": "north"}, r"prompts.*'north'"),
        ({"prompts": ["north", ""]}, r"prompts\[1\].*''"),
        ({"prompts": ["north", 3]}, r"prompts\[1\].*3"),
        ({"group_size": 1}, r"group_size.*1"),
        ({"group_size": True}, r"group_size.*True"),
        ({"group_size": 2.5}, r"group_size.*2\.5"),
        ({"steps": 0}, r"steps.*0"),
        ({"seed": -1}, r"seed.*-1"),
        ({"start": -1}, r"start.*-1"),
        ({"prompts_per_iteration": 0}, r"prompts_per_iteration.*0"),
        ({"prompts_per_iteration": 5}, r"prompts_per_iteration=5.*4"),
        ({"grad_clip": 0.0}, r"grad_clip.*0"),
        ({"grad_clip": NAN}, r"grad_clip.*nan"),
        ({"micro_batch": 0}, r"micro_batch.*0"),
        ({"rollout_chunk": -2}, r"rollout_chunk.*-2"),
        ({"images": ["one"]}, r"images.*1 images, 4 prompts"),
        ({"reward": None}, r"reward.*None"),
        ({"group_size": 3, "algorithm": art(updates=4)}, r"group_size=3.*4 updates"),
        ({"algorithm": art()._replace(updates=0)}, r"updates.*0"),
        ({"algorithm": art()._replace(pool=4)}, r"group_size=8.*pool of 4"),
        ({"optimizer": other_optimizer}, r"optimizer.*1 tensors 0 are among the model's 2"),
        ({"optimizer": one_too_many}, r"optimizer.*3 tensors 2 are among the model's 2"),
    ],
)
def test_bad_input_is_refused_at_the_call(options, message):
    model = toy_model()
    if callable(options.get("optimizer")):
        options = options | {"optimizer": options["optimizer"](model)}
    with pytest.raises(ValueError, match=message):
        start(model, options.pop("algorithm", None) if "algorithm" in options else None, **options)


def test_control_the_same_call_with_good_input_is_accepted():
    next(start(toy_model(), art(), group_size=2, prompts_per_iteration=4, grad_clip=None, micro_batch=1))


def test_a_model_without_params_is_refused():
    model = toy_model()
    with pytest.raises(ValueError, match=r"model\.params is empty"):
        start(model._replace(params={}), optimizer=adam(model))


def test_times_that_do_not_decrease_are_refused():
    model = toy_model()._replace(times=lambda steps: torch.tensor([1.0, 0.5, 0.5, 0.0]))
    with pytest.raises(ValueError, match=r"times must decrease strictly.*0\.5, 0\.5"):
        toy_run(model=model)


def test_latents_of_another_rank_are_refused():
    def flat(params, x_t, t, cond):
        return toy_velocity(params, x_t, t, cond).flatten()

    with pytest.raises(ValueError, match=r"velocity at step 0.*\(64,\).*\(32, 2\)"):
        toy_run(model=toy_model()._replace(velocity=flat))


def test_a_velocity_that_is_not_finite_is_refused_with_its_step():
    def burst(params, x_t, t, cond):
        return toy_velocity(params, x_t, t, cond) / (t[:, None] < 0.9)

    with pytest.raises(ValueError, match=r"velocity is not finite at step 0, t = 1"):
        toy_run(model=toy_model()._replace(velocity=burst))


def test_a_batch_of_other_sizes_is_refused():
    def fewer(velocity, params, cond, seeds, score):
        return art().collect(velocity, params, cond, seeds[:, :6], score)

    with pytest.raises(ValueError, match=r"collect must return rewards \(4, 8\) and 32 samples, got \(4, 6\)"):
        toy_run(algorithm=art()._replace(collect=fewer))


def test_a_credit_of_another_length_is_refused():
    def per_prompt(batch):
        return art().credit(batch) | {"mine": torch.zeros(4)}

    with pytest.raises(ValueError, match=r"credit\['mine'\].*32.*\(4,\)"):
        toy_run(algorithm=art()._replace(credit=per_prompt))


def test_a_gradient_that_is_not_finite_steps_nothing():
    def burst(velocity, params, window):
        loss, keep, metrics = no_trust_region(velocity, params, window)
        return loss * math.inf, keep, metrics

    model = toy_model()
    before = values_of(model.params)
    with pytest.raises(ValueError, match=r"gradient norm is (nan|inf).*nothing was stepped"):
        toy_run(model=model, algorithm=art()._replace(objective=burst))
    assert same(values_of(model.params), before)


def test_update_is_one_step_on_one_window():
    model = toy_model()
    optimizer, windows = torch.optim.SGD(list(model.params.values()), lr=1.0), []

    def objective(velocity, params, window):
        windows.append(window)
        return no_trust_region(velocity, params, window)

    toy_run(model=model, optimizer=optimizer, algorithm=art(updates=1)._replace(objective=objective), iterations=1)
    before = values_of(model.params)
    got = update(no_trust_region, model, optimizer, windows[0], None)
    expected = {name: before[name] - model.params[name].grad for name in before}
    assert same(values_of(model.params), expected)
    assert set(got) == {"loss", "grad_norm"}


# ---- memory


def stored_bytes(trajectory):
    tensors = [x for x in trajectory if isinstance(x, torch.Tensor)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x.numel()}
    return sum(storages.values())


def walk(steps, keep, velocity=toy_velocity):
    model = toy_model()
    return rollout(
        velocity,
        model.params,
        {"prompt": torch.zeros(64, dtype=torch.long)},
        model.times(steps),
        seeds=torch.arange(64),
        shape=(2,),
        keep=range(keep),
    )


def test_a_rollout_stores_bytes_linear_in_kept_steps_and_none_for_the_others():
    none, one, two, five = (stored_bytes(walk(8, keep)) for keep in (0, 1, 2, 5))
    per_step = two - one
    assert per_step > 0
    assert five - one == 4 * per_step
    assert abs(one - none - per_step) <= 2 * 64 * 8  # seeds and end points apart
    assert stored_bytes(walk(32, 2)) == two


@pytest.mark.parametrize(("keep", "most"), [(0, 2), (3, 5), (24, 25)])
def test_while_it_runs_a_rollout_holds_only_kept_states(keep, most):
    refs, alive = [], []

    def velocity(params, x_t, t, cond):
        alive.append(sum(ref() is not None for ref in refs))
        refs.append(weakref.ref(x_t))
        return toy_velocity(params, x_t, t, cond)

    walk(24, keep, velocity)
    assert len(alive) == 24
    assert max(alive) <= most
    assert max(alive) >= min(keep, 23)  # the measure sees what is kept


def test_the_trained_window_holds_the_trained_steps_only():
    shapes = []

    def objective(velocity, params, window):
        shapes.append(tuple(window.trajectory.x_t.shape))
        return guided_regression()(velocity, params, window)

    for trained_steps, s in ((all_steps, 5), (noisiest(2), 2)):
        shapes.clear()
        toy_run(algorithm=art(trained_steps=trained_steps)._replace(objective=objective), iterations=1)
        assert shapes == [(16, s, 2)] * 2


# ---- diagnosis


def failed(report):
    return {check.name for check in report.checks if check.passed is False}


def diagnosed(model=None, algorithm=None, reward=toward_compass, **options):
    return diagnose(model or toy_model(), algorithm or art(), PROMPTS, reward, **{"steps": 6} | options)


def test_a_good_set_up_passes_every_check():
    report = diagnosed()
    assert report.ok
    assert all(check.passed for check in report.checks)
    assert len(report.checks) == 8
    text = str(report)
    assert text.count("\n") == 7
    assert text.count("ok  ") == 8
    assert "FAIL" not in text


def test_control_the_wrong_sign_in_the_credit_is_noticed():
    def wrong(batch):
        credit = art().credit(batch)
        return credit | {"direction": -credit["direction"]}

    report = diagnosed(algorithm=art()._replace(credit=wrong))
    assert failed(report) == {"the reward goes up"}
    assert not report.ok
    assert "FAIL  the reward goes up" in str(report)


def against_the_direction(velocity, params, window):
    s = window_states(window)
    target = s.v_old + window.credit["direction"][s.rows]
    return velocity_matching(velocity(params, s.x_t, s.t, s.cond), target), window.credit["alive"][s.rows], {}


def test_control_the_wrong_sign_in_the_target_is_noticed():
    report = diagnosed(algorithm=art()._replace(objective=against_the_direction))
    assert failed(report) == {"the reward goes up"}
    assert "cosine -" in str(report)


def test_control_a_model_of_the_other_sign_is_noticed_although_its_reward_goes_up():
    toy = toy_model()
    report = diagnosed(model=toy._replace(velocity=lambda params, x, t, cond: -toy.velocity(params, x, t, cond)))
    assert failed(report) == {"velocity points to noise"}
    assert "-1.000" in str(report)


def test_an_untrained_model_points_nowhere_and_a_constant_reward_goes_nowhere():
    toy = toy_model()
    turned = toy._replace(
        velocity=lambda params, x, t, cond: toy.velocity(params, x, t, cond).flip(1) * torch.tensor([1.0, -1.0])
    )
    told = {check.name: check for check in diagnosed(model=turned, iterations=1).checks}
    assert told["velocity points to noise"].passed is None
    told = {check.name: check for check in diagnosed(reward=lambda images, prompts: torch.ones(len(images))).checks}
    assert told["the reward goes up"].passed is None
    assert told["groups have spread"].passed is False


def test_control_a_model_that_ignores_the_params_it_is_given_is_noticed():
    toy = toy_model()
    report = diagnosed(model=toy._replace(velocity=lambda params, x, t, cond: toy.velocity(toy.params, x, t, cond)))
    assert failed(report) == {"other params are used"}


def coarse(images, prompts):
    """Whether a point is on its side of the compass: a small step changes hardly any of them."""
    return (toward_compass(images, prompts) > -1.0).float()


def test_a_coarse_reward_that_has_not_moved_yet_passes_by_its_direction():
    report = diagnosed(reward=coarse, learning_rate=1e-5)
    assert report.ok
    assert "reward +0.0000 +- 0.0000" in str(report)


def test_control_the_wrong_sign_under_a_coarse_reward_is_noticed_by_the_direction():
    report = diagnosed(algorithm=art()._replace(objective=against_the_direction), reward=coarse, learning_rate=1e-5)
    assert "reward +0.0000 +- 0.0000" in str(report)
    assert failed(report) == {"the reward goes up"}


def test_missing_rewards_are_noticed():
    def holey(images, prompts):
        return torch.where(images[:, 0] > 0.3, NAN, toward_compass(images, prompts))

    report = diagnosed(reward=holey)
    assert failed(report) == {"rewards are finite"}


@pytest.mark.filterwarnings("ignore:.*groups have no spread")
def test_a_constant_reward_is_noticed():
    report = diagnosed(reward=lambda images, prompts: torch.ones(len(images)))
    assert "groups have spread" in failed(report)
    assert any(check.passed is None for check in report.checks)


def noisy(model, size):
    generator = torch.Generator().manual_seed(0)

    def velocity(params, x_t, t, cond):
        v = toy_velocity(params, x_t, t, cond)
        return v + size * torch.randn(v.shape, generator=generator)

    return model._replace(velocity=velocity)


def test_noise_in_the_velocity_is_noticed():
    report = diagnosed(noisy(toy_model(), 0.1))
    assert {"same seeds, same images", "replay equals rollout"} <= failed(report)


def test_another_forward_in_training_than_in_the_rollout_is_noticed():
    """As a network in train mode: the rollout is repeatable, its replay is another function."""
    plain = art()

    def collect(velocity, params, cond, seeds, score):
        def shifted(params, x_t, t, cond):
            return toy_velocity(params, x_t, t, cond) + 0.05

        return plain.collect(velocity._replace(velocity=shifted), params, cond, seeds, score)

    report = diagnosed(algorithm=plain._replace(collect=collect))
    assert "replay equals rollout" in failed(report)
    assert "same seeds, same images" not in failed(report)


class Adapted(torch.nn.Module):
    """The toy's mean as a base and an adapter; `leaky` leaves the base open to gradients."""

    def __init__(self, leaky: bool):
        super().__init__()
        self.base = torch.nn.Parameter(torch.zeros(4, 2), requires_grad=leaky)
        self.adapter = torch.nn.Parameter(torch.zeros(4, 2))


def adapted(leaky: bool) -> Model:
    module, plain = Adapted(leaky), toy_model()
    log_std = torch.tensor(math.log(0.5))

    def velocity(params, x_t, t, cond):
        return toy_velocity({"mean": module.base + params["adapter"], "log_std": log_std}, x_t, t, cond)

    return plain._replace(velocity=velocity, params={"adapter": module.adapter}, module=module)


def test_gradients_beyond_the_adapter_are_noticed():
    report = diagnosed(adapted(leaky=True))
    assert failed(report) == {"gradients reach the adapter"}
    assert "'base'" in str(report)
    assert diagnosed(adapted(leaky=False)).ok


def test_stale_gradients_of_others_are_no_leak():
    model = adapted(leaky=False)
    model.module.base.grad = torch.ones(4, 2)
    assert diagnosed(model).ok


def test_unreached_params_are_noticed():
    plain = toy_model()
    unused = {f"unused {i}": torch.zeros(3, requires_grad=True) for i in range(7)}
    model = plain._replace(params={**plain.params, **unused})
    report = diagnosed(model)
    assert failed(report) == {"gradients reach the adapter"}
    assert "2 of 9" in str(report)


def test_diagnosis_gives_the_params_back_to_the_bit():
    model, _ = toy_run()
    before = values_of(model.params)
    diagnosed(model, learning_rate=0.1)
    assert same(values_of(model.params), before)
    assert all(p.grad is None for p in model.params.values())


@pytest.mark.parametrize("survived", [0, 1, 3, 4])
def test_diagnosis_gives_the_params_back_when_the_reward_gives_up(survived):
    calls = itertools.count()

    def tired(images, prompts):
        if next(calls) >= survived:
            raise RuntimeError("enough")
        return toward_compass(images, prompts)

    model = toy_model()
    before = values_of(model.params)
    with pytest.raises(ValueError, match="enough"):
        diagnosed(model, reward=tired, learning_rate=0.1)
    assert same(values_of(model.params), before)


@pytest.mark.parametrize(("options", "message"), [({"group_size": 1}, "group_size.*1"), ({"steps": 0}, "steps.*0")])
def test_diagnosis_refuses_what_training_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        diagnosed(**options)


def test_diagnosis_works_without_directions_in_the_credit():
    report = diagnosed(algorithm=art(updates=1)._replace(credit=scalar_credit, objective=nft_objective))
    assert report.ok
    assert "cosine" not in report.checks[-1].detail


# ---- the toy itself


def test_toy_velocity_is_the_exact_one():
    """Against the conditional mean of x_0 by quadrature over the toy's data, at three times."""
    mean, std = torch.tensor([0.3, -0.6]), 0.5
    params = {"mean": mean[None], "log_std": torch.tensor(math.log(std))}
    x = torch.tensor([[0.4, 0.1]])
    grid = torch.linspace(-6, 6, 4001, dtype=torch.float64)
    for t in (0.2, 0.6, 0.95):
        got = toy_velocity(params, x, torch.tensor([t]), {"prompt": torch.zeros(1, dtype=torch.long)})
        for axis in range(2):
            density = -((grid - mean[axis]) ** 2) / (2 * std**2) - (x[0, axis] - (1 - t) * grid) ** 2 / (2 * t**2)
            weight = (density - density.max()).exp()
            expected = (x[0, axis] - (weight * grid).sum() / weight.sum()) / t
            assert float(got[0, axis]) == pytest.approx(float(expected), abs=1e-4)


def test_toy_samples_follow_the_compass_after_training():
    model, _ = toy_run(iterations=15)
    goal = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, -1.0], [-1.0, 0.0]])
    assert float((model.params["mean"].detach() * goal).sum(1).min()) > 0.5
    assert toward_compass(goal, PROMPTS).tolist() == [0.0] * 4


def test_directions_of_the_toy_point_to_the_goal():
    """The shared direction of a large group is the gradient of the reward at the mean, up to noise."""
    model = toy_model()
    seeds = sample_seeds(0, 0, range(4), 256)
    names = [prompt for prompt in PROMPTS for _ in range(256)]
    walked = rollout(
        model.velocity, model.params, model.encode(names), model.times(8), seeds=seeds.flatten(), shape=(2,), keep=[]
    )
    rewards = toward_compass(walked.x_0, names).reshape(4, 256)
    direction = aggregate_direction(rewards, walked.x_0.reshape(4, 256, 2))
    assert isinstance(direction, Direction)
    assert direction.alive.tolist() == [True] * 4
    goal = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, -1.0], [-1.0, 0.0]])
    assert float(torch.nn.functional.cosine_similarity(direction.value, goal).min()) > 0.9


def test_default_split_is_within_prompts():
    plain, given = toy_run(), toy_run(split=split_within_prompt)
    assert same(plain[0].params, given[0].params)
    assert not same(plain[0].params, toy_run(split=by_prompt)[0].params)


# ---- what others hand in


def taken(count=1, model=None, reward=toward_compass, algorithm=None, prompts=PROMPTS, optimizer=None, **given):
    model = toy_model() if model is None else model
    optimizer = adam(model) if optimizer is None else optimizer
    given = {"group_size": 4, "steps": 4, "seed": 0} | given
    rows = loop.train(model, art() if algorithm is None else algorithm, prompts, reward, optimizer, **given)
    return timeless(list(itertools.islice(rows, count)))


def test_a_reward_that_writes_into_its_images_changes_nothing_else():
    def writing(images, prompts):
        values = toward_compass(images, prompts)
        images.zero_()
        prompts.clear()
        return values

    assert taken(3, reward=writing) == taken(3)


def test_a_toy_model_is_six_functions_for_diagnose_too():
    class Six(NamedTuple):
        velocity: Callable
        params: dict
        encode: Callable
        decode: Callable
        latent_shape: Callable
        times: Callable

    model = Six(*toy_model()[:6])
    assert taken(model=model) == taken()
    assert diagnose(model, art(), PROMPTS, toward_compass, group_size=4, steps=4).checks
    mine = art()._replace(credit=lambda batch: {"direction": art().credit(batch)["direction"]})
    assert diagnose(model, mine, PROMPTS, toward_compass, group_size=4, steps=4).checks


def test_images_may_be_one_tensor():
    seen = []

    def encode(prompts, images):
        seen.extend(float(image) for image in images)
        return toy_model().encode(prompts)

    taken(model=toy_model()._replace(encode=encode), images=torch.arange(4.0))
    assert seen == [0.0, 1.0, 2.0, 3.0]


def test_gradients_of_tensors_that_the_optimizer_does_not_step_do_not_pile_up():
    def run(first):
        model = toy_model()
        optimizer = torch.optim.SGD([model.params["mean"]], lr=0.01)
        rows = taken(first, model=model, optimizer=optimizer)
        for p in model.params.values():
            p.grad = None  # as in a new process
        return rows + taken(4 - first, model=model, optimizer=optimizer, start=first)

    assert run(2) == run(4)


def test_an_infinite_clip_is_none():
    assert taken(2, grad_clip=math.inf) == taken(2, grad_clip=None)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"prompts": None}, "prompts"),
        ({"prompts": 3}, "prompts"),
        ({"prompts": set(PROMPTS)}, "prompts"),
        ({"prompts": iter(PROMPTS)}, "prompts"),
        ({"images": 3}, "images"),
        ({"algorithm": art}, "algorithm"),
        ({"optimizer": "adam"}, "optimizer"),
        ({"model": toy_model()._replace(encode=lambda prompts: {"prompt": torch.zeros(1).long()})}, "cond"),
        ({"model": toy_model()._replace(encode=lambda prompts: None)}, "cond"),
        ({"model": toy_model()._replace(decode=lambda latents: latents[:-1])}, "decode"),
        ({"model": toy_model()._replace(decode=lambda latents: None)}, "decode"),
        ({"model": toy_model()._replace(velocity=lambda *a: toy_velocity(*a).detach())}, "no gradient"),
    ],
)
def test_misuse_is_one_value_error_that_names_it(changed, named):
    with pytest.raises(ValueError, match=named):
        taken(**changed)


def test_metrics_of_an_objective_may_be_tensors():
    def objective(velocity, params, window):
        loss, keep, _ = art().objective(velocity, params, window)
        return loss, keep, {"mine": torch.tensor(2.0)}

    (row,) = taken(algorithm=art()._replace(objective=objective))
    assert row["mine"] == 2.0
    assert type(row["mine"]) is float


# ---- the reference ----------------------------------------------------------------------------------------------------

PULLED = algorithms.flow_grpo(beta=0.1)


def watching_reference(algorithm, seen):
    """The algorithm, noting each window's reference params: the mapping, and its values then."""

    def objective(velocity, params, window):
        seen.append((window.reference, None if window.reference is None else values_of(window.reference)))
        return algorithm.objective(velocity, params, window)

    return algorithm._replace(objective=objective)


@pytest.mark.parametrize("algorithm", [PULLED, algorithms.nft(), algorithms.awm()], ids=["flow_grpo", "nft", "awm"])
def test_the_reference_is_a_copy_of_the_params_training_starts_from(algorithm):
    model, seen = toy_model(), []
    first = values_of(model.params)
    toy_run(model=model, algorithm=watching_reference(algorithm, seen), iterations=3, micro_batch=5)
    assert seen
    assert all(same(values, first) for _, values in seen)
    assert all(same(values_of(reference), first) for reference, _ in seen)
    assert not same(values_of(model.params), first)
    assert not any(reference[name] is model.params[name] for reference, _ in seen for name in first)
    assert not any(p.requires_grad for reference, _ in seen for p in reference.values())


def test_the_reference_is_taken_at_the_call_not_at_the_first_iteration():
    model, seen = toy_model(), []
    first = values_of(model.params)
    training = start(model, watching_reference(PULLED, seen))
    with torch.no_grad():
        model.params["mean"].add_(1.0)
    next(training)
    assert same(seen[0][1], first)


def test_a_given_reference_is_copied_too_and_may_differ_from_the_params():
    model, seen = toy_model(), []
    given = {name: p + 0.25 for name, p in values_of(model.params).items()}
    training = start(model, watching_reference(PULLED, seen), reference=given)
    expected = values_of(given)
    next(training)
    given["mean"].zero_()
    row = next(training)
    assert same(seen[-1][1], expected)
    assert row["kl_reference/update_1"] > 0
    assert rows_of(start(toy_model(), PULLED), 1)[0]["kl_reference/update_1"] == 0


def test_a_resumed_run_needs_the_reference_where_the_algorithm_does():
    with pytest.raises(ValueError, match=r"start=3.*reference"):
        start(toy_model(), PULLED, start=3)
    next(start(toy_model(), PULLED, start=3, reference=values_of(toy_model().params)))
    next(start(toy_model(), art(), start=3))  # the control: nothing is asked of the others
    next(start(toy_model(), algorithms.flow_grpo(beta=0.0), start=3))


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ({"mean": torch.zeros(4, 2)}, r"params and reference differ in names: only in params \['log_std'\]"),
        ({"mean": torch.zeros(4, 2), "log_std": torch.zeros(()), "b": torch.zeros(1)}, r"only in reference \['b'\]"),
        ({"mean": torch.zeros(4, 3), "log_std": torch.zeros(())}, r"'mean'.*\(4, 2\).*\(4, 3\)"),
    ],
)
def test_a_reference_of_another_model_is_refused_at_the_call(reference, message):
    with pytest.raises(ValueError, match=message):
        start(toy_model(), PULLED, reference=reference)


def test_windows_have_no_reference_where_none_is_asked_for():
    seen = []
    toy_run(algorithm=watching_reference(art(), seen), iterations=1)
    assert [reference for reference, _ in seen] == [None, None]


def test_collect_is_told_the_iteration():
    seen = []

    def collect(velocity, params, cond, seeds, score):
        seen.append(velocity.iteration)
        return art().collect(velocity, params, cond, seeds, score)

    toy_run(algorithm=art()._replace(collect=collect), iterations=3, start=4)
    assert seen == [4, 5, 6]


# ---- metrics that not every part tells --------------------------------------------------------------------------------


def telling(tell, algorithm=None):
    """The algorithm, whose objective tells what `tell(call number, window)` says and nothing else."""
    algorithm, calls = algorithm or art(), itertools.count()

    def objective(velocity, params, window):
        loss, keep, _ = algorithm.objective(velocity, params, window)
        return loss, keep, tell(next(calls), window)

    return algorithm._replace(objective=objective)


def test_a_metric_that_a_micro_batch_does_not_tell_is_the_mean_over_those_that_do():
    """16 rows of a window in parts of 6, 6 and 4."""
    told = [{"a": 1.0, "b": 4.0}, {"a": 2.0}, {"a": 5.0, "b": 9.0}]
    (row,) = toy_run(
        algorithm=telling(lambda i, w: told[i], art(updates=2)),
        iterations=1,
        micro_batch=6,
        split=lambda g, k, updates: [torch.arange(16)],
    )[1]
    assert row["a"] == pytest.approx((6 * 1 + 6 * 2 + 4 * 5) / 16)
    assert row["b"] == pytest.approx((6 * 4 + 4 * 9) / 10)


def test_least_and_greatest_stay_so_over_micro_batches_and_updates():
    told = [{"r/min": 3.0, "r/max": 3.0, "admin": 3.0}, {"r/min": 1.0, "r/max": 4.0, "admin": 1.0}, {"r/min": 2.0}]
    (row,) = toy_run(algorithm=telling(lambda i, w: told[i % 3]), iterations=1, micro_batch=6)[1]
    assert (row["r/min"], row["r/min/update_2"]) == (1.0, 1.0)
    assert (row["r/max"], row["r/max/update_1"]) == (4.0, 4.0)
    assert row["admin"] == 2.0  # only /min and /max are extremes


def test_a_metric_that_one_update_does_not_tell_is_the_mean_over_those_that_do():
    told = [{"late": 3.0}, {}, {"late": 5.0}, {}]
    _, rows = toy_run(algorithm=telling(lambda i, w: told[i], art(updates=4)), iterations=1)
    assert rows[0]["late"] == 4.0
    assert {n for n in rows[0] if n.startswith("late")} == {"late", "late/update_1", "late/update_3"}


def test_control_a_metric_called_loss_does_not_replace_the_loss():
    (row,) = toy_run(algorithm=telling(lambda i, w: {"loss": 77.0, "grad_norm": 77.0}), iterations=1)[1]
    assert row["loss/update_1"] == pytest.approx(1.0, abs=1e-6)
    assert row["grad_norm"] != 77.0


@pytest.mark.parametrize(
    "name", ["flow_grpo", "flow_dppo", "grpo_guard", "mix_grpo", "dance_grpo", "nft", "awm", "art"]
)
def test_every_metric_of_every_algorithm_is_a_number_and_documented(name):
    _, rows = toy_run(algorithm=getattr(algorithms, name)(), iterations=2, steps=6)
    table = loop.__doc__.replace("optimality/mean, /min, /max", "optimality/mean, optimality/min, optimality/max")
    for row in rows:
        for metric, value in row.items():
            assert isinstance(value, (int, float))
            assert math.isfinite(value), metric
            plain = re.sub(r"(/t=[0-9.]+)?(/update_\d)?$", "", metric)
            assert plain == "iteration" or re.search(rf"(?<![\w/]){plain}(?![\w/])", table), metric


def test_ratio_std_and_gradient_arrive_for_every_step_of_the_grid():
    # Samples turned to noise after the first updates and nothing said why. https://github.com/XueZeyue/DanceGRPO/issues/79
    # "The ratio is always 1": it is at update 1, and not at update 2. https://github.com/yifan123/flow_grpo/issues/131
    _, rows = toy_run(algorithm=algorithms.flow_grpo(), iterations=2, steps=5)
    times = toy_model().times(5)
    for i, (t, t_next) in enumerate(itertools.pairwise(times[:-1].tolist())):
        at = f"t={t:.3f}"
        for row in rows:
            assert row[f"ratio_deviation/{at}/update_1"] < 1e-5
            assert row[f"ratio_deviation/{at}/update_2"] > 1e-4
            _, std = flow_sde_step(torch.zeros(1, 2), torch.zeros(1, 2), t, t_next)
            assert row[f"std/{at}"] == pytest.approx(float(std))
            assert row[f"output_grad/{at}/update_1"] > 0
        assert f"std/t={times[4]:.3f}" not in rows[0], i
    for u in (1, 2):
        steps = [
            value for name, value in rows[0].items() if re.fullmatch(rf"ratio_deviation/t=[0-9.]+/update_{u}", name)
        ]
        assert rows[0][f"ratio_deviation/update_{u}"] == pytest.approx(sum(steps) / 4)


def test_groups_that_all_look_the_same_are_a_metric_with_a_warning_above_one_half(recwarn):
    # Everyone in a group looked the same and the gradient vanished. https://github.com/XueZeyue/DanceGRPO/issues/21
    def flat(*names):
        return lambda images, prompts: torch.where(
            torch.tensor([p in names for p in prompts]), 1.0, toward_compass(images, prompts)
        )

    assert toy_run(reward=flat("north", "east"), iterations=1)[1][0]["groups/dead"] == 0.5
    assert not recwarn.list
    with pytest.warns(UserWarning, match="75% of groups have no spread at iteration 0"):
        assert toy_run(reward=flat("north", "east", "west"), iterations=1)[1][0]["groups/dead"] == 0.75


# ---- diagnosis of the other algorithms --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flow_grpo", "flow_grpo_fast", "grpo_guard", "dance_grpo", "flow_dppo", "nft", "awm"])
def test_diagnose_passes_a_good_set_up_of_every_kind(name):
    report = diagnosed(algorithm=getattr(algorithms, name)(), learning_rate=1e-2)
    assert report.ok, str(report)
    assert all(check.passed for check in report.checks)
    ratios = [check for check in report.checks if check.name == "ratio is 1"]
    assert len(ratios) == (name != "nft")


@pytest.mark.parametrize(("name", "steps"), [("flow_grpo", 5), ("awm", 5), ("flow_grpo_fast", 3)])
def test_diagnose_prints_the_ratio_s_gap_per_step_before_the_first_update(name, steps):
    # bf16 forward pairs differ; an on-policy check prints the gap per step. https://github.com/verl-project/verl-omni/issues/280
    # Too few digits shown: |ratio - 1| is in scientific notation. https://github.com/yifan123/flow_grpo/issues/131
    (line,) = [
        line for line in str(diagnosed(algorithm=getattr(algorithms, name)())).split("\n") if "ratio is 1" in line
    ]
    assert re.search(r"mean \|ratio - 1\| \d\.\d\de[+-]\d\d ", line)
    gaps = re.findall(r"t=(\d\.\d{3}) (\d\.\de[+-]\d\d)", line)
    assert len(gaps) == steps
    assert [f"{t:.3f}" for t in toy_model().times(6).tolist()][: len(gaps)] == [
        t for t, _ in gaps
    ] or name == "flow_grpo_fast"
    assert all(float(gap) < 1e-5 for _, gap in gaps)


def test_control_a_replay_that_is_not_the_rollout_shows_in_the_ratio_of_its_steps():
    """Only the steps at t < .5 are another function in the rollout: their gaps stand out."""
    plain = algorithms.flow_grpo()

    def collect(velocity, params, cond, seeds, score):
        def shifted(params, x_t, t, cond):
            return toy_velocity(params, x_t, t, cond) + 0.5 * (t[:, None] < 0.5)

        return plain.collect(velocity._replace(velocity=shifted), params, cond, seeds, score)

    report = diagnosed(algorithm=plain._replace(collect=collect))
    assert {"replay equals rollout", "ratio is 1"} <= failed(report)
    gaps = dict(re.findall(r"t=(\d\.\d{3}) (\d\.\de[+-]\d\d)", str(report)))
    assert {t for t, gap in gaps.items() if float(gap) > 1e-3} == {t for t in gaps if float(t) < 0.5}


# ---- what a collect, a credit or a resumption of one's own may get wrong ----------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda b: b._replace(trajectory=b.trajectory._replace(x_t=torch.cat([b.trajectory.x_t] * 2))),
            "trajectory.x_t",
        ),
        (lambda b: b._replace(trajectory=b.trajectory._replace(v=b.trajectory.v[:, 1:])), "trajectory.v must have 32"),
        (lambda b: b._replace(trajectory=b.trajectory._replace(seeds=b.trajectory.seeds[:3])), "one seed per sample"),
        (lambda b: b._replace(cond={"prompt": b.cond["prompt"].repeat_interleave(8)}), "leading axis 4"),
        (lambda b: b._replace(parts=torch.zeros(4, 16, 2)), "parts must be"),
    ],
)
def test_a_batch_of_other_rows_is_refused_before_it_trains(spoil, message):
    plain = art()
    spoilt = plain._replace(collect=lambda *given: spoil(plain.collect(*given)))
    with pytest.raises(ValueError, match=message):
        next(start(toy_model(), spoilt))


def test_a_credit_that_is_no_tensor_per_sample_is_refused():
    with pytest.raises(ValueError, match=r"credit\['weight'\] must have one row per sample \(32\), got 0.5"):
        next(start(toy_model(), art()._replace(credit=lambda batch: {**art().credit(batch), "weight": 0.5})))


def test_behaviour_of_other_params_is_refused_and_a_missing_one_is_warned_about():
    for bad in ({"other": torch.zeros(1)}, {**values_of(toy_model().params), "mean": torch.zeros(3, 2)}, "live"):
        with pytest.raises(ValueError, match="behaviour"):
            start(toy_model(), algorithms.nft(anchor=0), behaviour=bad, start=1)
    with pytest.warns(UserWarning, match="without behaviour="):
        start(toy_model(), algorithms.nft(anchor=0), start=1)
    with pytest.raises(ValueError, match="reference"):
        start(toy_model(), art(), reference={"other": torch.zeros(1)})
    with pytest.raises(ValueError, match="reference"):
        start(toy_model(), algorithms.flow_grpo(), reference="first")


def test_a_given_reference_reaches_objectives_that_the_algorithm_does_not_announce():
    seen = []

    def objective(velocity, params, window):
        seen.append(window.reference)
        return art().objective(velocity, params, window)

    model = toy_model()
    given = {name: value + 1 for name, value in values_of(model.params).items()}
    next(start(model, art()._replace(objective=objective), reference=given))
    assert all(same(reference, given) for reference in seen)
    assert len(seen) == 2


def test_a_behaviour_of_some_live_and_some_averaged_params_is_averaged_rightly():
    """The live ones change in place during the updates: they are copied first, tensor by tensor."""
    seen = []

    def behaviour(old, new, i):
        seen.append((old["log_std"].clone(), new["log_std"].detach().clone()))
        return {"mean": ema(old, new, decay=0.5)["mean"], "log_std": new["log_std"]}

    rows_of(start(toy_model(), art()._replace(behaviour=behaviour)), 3)
    assert all(not torch.equal(old, new) for old, new in seen)


def test_an_rms_over_micro_batches_is_the_root_of_the_mean_square():
    whole, parts = (rows_of(start(toy_model(), art(), micro_batch=size), 2) for size in (None, 3))
    for a, b in zip(whole, parts, strict=True):
        assert a["drift_rms/update_2"] == pytest.approx(b["drift_rms/update_2"], rel=1e-4)


def test_the_doctor_keeps_to_the_chunks_it_is_given():
    model, rows = toy_model(), []

    def watched(params, x_t, t, cond):
        rows.append((torch.is_grad_enabled(), len(x_t)))
        return model.velocity(params, x_t, t, cond)

    watched_model = model._replace(velocity=watched)
    options = {"group_size": 8, "steps": 4, "seed": 0, "iterations": 1}
    report = diagnose(watched_model, art(), list(PROMPTS), toward_compass, micro_batch=2, rollout_chunk=3, **options)
    assert report.ok, str(report)
    assert max(n for grad, n in rows if not grad) == 3
    assert max(n for grad, n in rows if grad) == 2 * 4  # two samples of four trained states
