"""sol_rl around the algorithms of the library: with nothing to choose it is the algorithm itself, and the draft only chooses."""

import math

import pytest
import torch
from oracles import refuses, spy
from toys import rows_of, start, toy_reward

from diffrl.algorithms import art, flow_grpo, nft, sol_rl
from diffrl.contrast import select_contrastive
from diffrl.loop import diagnose
from diffrl.sampling import dpm2_step, rollout, sample_seeds
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model
from diffrl.types import Gridded, Trajectory

STEPS, KEEP = 5, 3
ALGORITHMS = {"art": art, "nft": nft, "flow_grpo": flow_grpo}


def the_policy(model):
    return lambda params: (model.velocity, params)


def score(x, rows):
    return toward_compass(x, [PROMPTS[i] for i in rows.tolist()])


def collected(algorithm, model, n):
    sampler = Gridded(model.velocity, model.times, STEPS, (2,))
    seeds = sample_seeds(0, 0, range(4), n)
    with torch.no_grad():
        return algorithm.collect(sampler, model.params, model.encode(PROMPTS), seeds, score)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_with_nothing_to_choose_it_is_the_algorithm_up_to_the_order_in_a_group(name):
    model, plain = toy_model(), ALGORITHMS[name]()
    wrapped = sol_rl(plain, draft=the_policy(model), pool=2 * KEEP, keep=KEEP, draft_steps=STEPS)
    assert wrapped._replace(collect=plain.collect, pool=None, kept=None) == plain
    ours, theirs = collected(wrapped, model, 2 * KEEP), collected(plain, model, 2 * KEEP)
    order = ours.trajectory.seeds.reshape(4, -1).argsort(1)
    other = theirs.trajectory.seeds.reshape(4, -1).argsort(1)
    assert torch.equal(ours.rewards.gather(1, order), theirs.rewards.gather(1, other))
    rows, those = ((o + 2 * KEEP * torch.arange(4)[:, None]).flatten() for o in (order, other))
    for field, a, b in zip(Trajectory._fields, ours.trajectory, theirs.trajectory):
        if field not in ("t", "t_next"):
            a, b = a[rows], b[those]
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=field)


def test_the_chosen_are_the_drafts_best_and_worst_rendered_by_the_policy():
    model, n = toy_model(), 16
    model.params["mean"].data += 0.3
    draft_params = {name: p.detach() * 0.8 for name, p in model.params.items()}
    log = []

    def draft(params):
        log.append(params)
        return model.velocity, draft_params

    algorithm = sol_rl(nft(), draft=draft, pool=n, keep=KEEP, draft_steps=2)
    batch = collected(algorithm, model, n)
    assert len(log) == 1
    assert log[0] is model.params
    cond = {k: v.repeat_interleave(n, 0) for k, v in model.encode(PROMPTS).items()}
    seeds = sample_seeds(0, 0, range(4), n)
    with torch.no_grad():
        drafted = rollout(model.velocity, draft_params, cond, model.times(2), seeds=seeds.flatten(), shape=(2,)).x_0
    proxy = toward_compass(drafted, [p for p in PROMPTS for _ in range(n)]).reshape(4, n)
    chosen = seeds.gather(1, select_contrastive(proxy, keep=KEEP))
    assert torch.equal(batch.trajectory.seeds, chosen.flatten())
    few = {k: v.repeat_interleave(2 * KEEP, 0) for k, v in model.encode(PROMPTS).items()}
    with torch.no_grad():
        direct = rollout(
            model.velocity, model.params, few, model.times(STEPS), seeds=chosen.flatten(), shape=(2,), step=dpm2_step
        )
    assert torch.equal(batch.trajectory.x_0, direct.x_0)
    rewards = toward_compass(direct.x_0, [p for p in PROMPTS for _ in range(2 * KEEP)])
    assert torch.equal(batch.rewards.flatten(), rewards)
    assert float((batch.rewards[:, :KEEP].mean(1) - batch.rewards[:, KEEP:].mean(1)).min()) > 0
    for chunk in (1, 7, 1000):
        again = collected(sol_rl(nft(), draft=draft, pool=n, keep=KEEP, draft_steps=2, chunk=chunk), model, n)
        assert torch.equal(again.trajectory.x_0, batch.trajectory.x_0)


def test_control_the_drafts_own_rewards_are_not_what_is_learned_from():
    model, n, log = toy_model(), 16, []
    algorithm = sol_rl(art(), draft=lambda params: (lambda p, x, t, c: -x, params), pool=n, keep=KEEP)
    sampler = Gridded(model.velocity, model.times, STEPS, (2,))
    with torch.no_grad():
        seeds = sample_seeds(0, 0, range(4), n)
        batch = algorithm.collect(sampler, model.params, model.encode(PROMPTS), seeds, spy(score, log))
    proxy = score(*log[0][0]).reshape(4, n)
    assert [len(args[0]) for args, _ in log] == [4 * n, 4 * 2 * KEEP]
    assert not torch.equal(batch.rewards, proxy.gather(1, select_contrastive(proxy, keep=KEEP)))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_trains_in_the_loop(name):
    model = toy_model()
    algorithm = sol_rl(ALGORITHMS[name](), draft=the_policy(model), pool=16, keep=4, draft_steps=3)
    before = toy_reward(model)
    rows = rows_of(start(model, algorithm, group_size=8), 12)
    assert all(math.isfinite(row["loss"]) for row in rows)
    if name == "art":
        assert toy_reward(model) > before + 0.5


def test_the_doctor_passes_it_and_the_group_size_is_checked_first():
    model = toy_model()
    algorithm = sol_rl(art(), draft=the_policy(model), pool=16, keep=4, draft_steps=3)
    report = diagnose(model, algorithm, list(PROMPTS), toward_compass, group_size=8, steps=5, seed=0)
    assert report is not None
    for wrong in (6, 16):
        with refuses(f"group_size={wrong}", "8"):
            start(model, algorithm, group_size=wrong)


def test_bad_compositions_are_refused():
    model = toy_model()
    draft = the_policy(model)
    with refuses("Algorithm", "nft"):
        sol_rl(nft, draft=draft)
    with refuses("without a pool"):
        sol_rl(sol_rl(art(), draft=draft), draft=draft)
    with refuses("draft", "3"):
        sol_rl(art(), draft=3)
    with refuses("keep=12", "24", "23"):
        sol_rl(art(), draft=draft, pool=23)
    for name in ("pool", "keep", "draft_steps", "chunk"):
        with refuses(name, "0"):
            sol_rl(art(), draft=draft, **{name: 0})
    with refuses("96", "(4, 8)"):
        collected(sol_rl(art(), draft=draft), model, 8)
    with refuses("draft must return"):
        collected(sol_rl(art(), draft=lambda params: model.velocity, pool=8, keep=2), model, 8)
    with refuses("Gridded"):
        sol_rl(art(), draft=draft).collect(model.velocity, {}, {}, torch.zeros(4, 96, dtype=torch.int64), score)
