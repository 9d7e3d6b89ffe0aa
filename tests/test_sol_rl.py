"""sol_rl around the algorithms of the library: with nothing to choose it is the algorithm itself, and the draft only chooses."""

import math
import sys
import warnings
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from oracles import refuses, spy
from toys import rows_of, start, toy_reward

from diffrl import algorithms
from diffrl.algorithms import art, dance_grpo, flow_grpo, nft, sol_rl
from diffrl.contrast import draft_rewards, rank_agreement, select_contrastive
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


# ---- what it measures -------------------------------------------------------------------------------------------------


def with_iteration(algorithm, model, i, n, by=score):
    sampler = Gridded(model.velocity, model.times, STEPS, (2,), i)
    seeds = sample_seeds(0, 0, range(4), n)
    with torch.no_grad():
        return algorithm.collect(sampler, model.params, model.encode(PROMPTS), seeds, by)


def backwards(model):
    """A draft that ranks the other way round."""
    return lambda params: ((lambda p, x, t, c: -model.velocity(p, x, t, c)), params)


def test_metrics_are_the_agreement_of_the_chosen_and_of_the_audited_pools():
    model, n = toy_model(), 16
    draft = lambda params: (model.velocity, {k: p * 0.7 for k, p in params.items()})  # noqa: E731
    algorithm = sol_rl(
        art(), draft=draft, pool=n, keep=KEEP, draft_steps=2, audit_every=3, audit_prompts=2, threshold=-1
    )
    told = with_iteration(algorithm, model, 3, n).metrics
    cond, seeds = model.encode(PROMPTS), sample_seeds(0, 0, range(4), n)
    by, own = draft(model.params)
    proxy = draft_rewards(by, own, cond, seeds, score, times=model.times(2), shape=(2,))
    true = draft_rewards(model.velocity, model.params, cond, seeds, score, times=model.times(STEPS), shape=(2,))
    columns = select_contrastive(proxy, keep=KEEP)
    free = rank_agreement(proxy.gather(1, columns), true.gather(1, columns), keep=KEEP)
    audit = rank_agreement(proxy[:2], true[:2], keep=KEEP)
    for name in free._fields:
        assert told[f"draft/{name}"] == pytest.approx(float(getattr(free, name).nanmean()), nan_ok=True), name
        assert told[f"audit/{name}"] == pytest.approx(float(getattr(audit, name).nanmean()), nan_ok=True), name
    rewards = true.gather(1, columns)
    gap = rewards[:, :KEEP].mean(1) - rewards[:, KEEP:].mean(1)
    assert told["draft/gap"] == pytest.approx(float(gap.mean()))
    assert told["draft/reversed"] == float((gap <= 0).double().mean())
    assert (told["draft/steps"], told["draft/pool"], told["draft/missing"]) == (2, n, 0)
    assert "audit/spearman" not in with_iteration(algorithm, model, 4, n).metrics


def test_control_a_draft_that_ranks_backwards_is_seen_and_warned_of():
    model = toy_model()
    algorithm = sol_rl(art(), draft=backwards(model), pool=16, keep=KEEP, audit_every=1)
    with pytest.warns(UserWarning, match="iteration 0: the draft ranks .* more draft steps may help"):
        told = with_iteration(algorithm, model, 0, 16).metrics
    assert told["audit/spearman"] < 0.8
    honest = with_iteration(sol_rl(art(), draft=the_policy(model), pool=16, keep=KEEP), model, 0, 16).metrics
    assert told["draft/gap"] < honest["draft/gap"]


def test_a_draft_without_rewards_or_spread_is_told():
    model = toy_model()

    def mute(x, rows):
        values = score(x, rows)
        return values.where(rows > 0, torch.nan) if len(x) > 24 else torch.zeros(len(x))

    told = with_iteration(sol_rl(art(), draft=the_policy(model), pool=16, keep=KEEP), model, 0, 16, mute).metrics
    assert told["draft/missing"] == 0.25
    assert told["draft/groups_dead"] == 0.25
    assert (told["draft/gap"], told["draft/reversed"]) == (0, 1)


def test_measuring_changes_nothing_that_is_learned():
    model = toy_model()
    plain = sol_rl(nft(), draft=the_policy(model), pool=16, keep=KEEP, draft_steps=2)
    audited = sol_rl(nft(), draft=the_policy(model), pool=16, keep=KEEP, draft_steps=2, audit_every=1, threshold=-1)
    a, b = with_iteration(plain, model, 0, 16), with_iteration(audited, model, 0, 16)
    assert torch.equal(a.rewards, b.rewards)
    assert torch.equal(a.trajectory.x_t, b.trajectory.x_t)


def hit(x, prompts):
    return (toward_compass(x, prompts) > -1.2).float()


@pytest.mark.parametrize("extra", [{}, {"budget": 1e-9}, {"audit_every": 1, "most_draft_steps": 9, "threshold": 1.0}])
def test_the_doctor_compares_the_same_seeds(extra):
    model = toy_model()
    wrap = lambda algorithm: sol_rl(algorithm, draft=the_policy(model), pool=48, keep=4, draft_steps=5, **extra)  # noqa: E731
    options = {"group_size": 8, "steps": 5, "learning_rate": 0.05, "iterations": 4}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = diagnose(model, wrap(nft()), list(PROMPTS), hit, **options)
    checks = {check.name: check for check in report.checks}
    assert checks["same seeds, same images"].passed
    assert checks["the reward goes up"].passed


@pytest.mark.filterwarnings("ignore")
def test_control_the_doctor_sees_a_set_up_that_learns_backwards():
    model, inner = toy_model(), nft()

    def backwards_credit(batch):
        return {n: 1 - v if v.is_floating_point() else v for n, v in inner.credit(batch).items()}

    wrong = sol_rl(inner._replace(credit=backwards_credit), draft=the_policy(model), pool=96, keep=8, draft_steps=5)
    report = diagnose(model, wrong, list(PROMPTS), hit, group_size=16, steps=5, learning_rate=0.03, iterations=4)
    assert report.checks[-1].name == "the reward goes up"
    assert not report.checks[-1].passed


def test_missing_and_infinite_rewards_of_the_policy_cost_pairs_not_prompts():
    model = toy_model()

    def patchy(x, rows):
        values = score(x, rows)
        if len(x) == 4 * 2 * KEEP:
            values[1 :: 2 * KEEP] = torch.inf  # one of every prompt's
            values[0] = torch.nan
        return values

    algorithm = sol_rl(art(), draft=the_policy(model), pool=16, keep=KEEP, draft_steps=STEPS)
    told = with_iteration(algorithm, model, 0, 16, patchy).metrics
    assert told["draft/spearman"] == pytest.approx(1.0)
    whole = with_iteration(algorithm, model, 0, 16).metrics
    assert math.isfinite(told["draft/gap"])
    assert told["draft/gap"] == pytest.approx(whole["draft/gap"], rel=0.5)


def test_the_loop_tells_what_was_measured():
    model = toy_model()
    algorithm = sol_rl(art(), draft=the_policy(model), pool=16, keep=4, draft_steps=3)
    row = rows_of(start(model, algorithm, group_size=8), 1)[0]
    assert {"draft/spearman", "draft/steps", "seconds/draft", "reward/mean", "seconds/rollout"} <= set(row)
    assert row["seconds/rollout"] >= row["seconds/draft"] + row["seconds/policy"] >= 0


def test_seconds_of_a_stage_leave_out_its_scoring(monkeypatch):
    class Slow:
        seconds = 0.0

        def __call__(self, x, rows):
            self.seconds += 4.0
            return score(x, rows)

    ticks = iter(range(0, 1000, 10))
    monkeypatch.setattr(sys.modules["diffrl.sol_rl"], "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    model = toy_model()
    algorithm = sol_rl(art(), draft=the_policy(model), pool=16, keep=KEEP, audit_every=1, threshold=-1)
    told = with_iteration(algorithm, model, 0, 16, Slow()).metrics
    found = {name: told[f"seconds/{name}"] for name in ("requantise", "draft", "audit", "policy")}
    assert found == {"requantise": 10, "draft": 6, "audit": 6, "policy": 6}


# ---- extras: off by default -------------------------------------------------------------------------------------------


def test_more_draft_steps_after_a_bad_audit_up_to_the_most_and_anew_after_reset():
    model = toy_model()
    options = {"pool": 16, "keep": KEEP, "draft_steps": 2, "audit_every": 2, "most_draft_steps": 4}
    algorithm = sol_rl(art(), draft=backwards(model), **options)
    steps = []
    for i in range(8):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            steps.append(with_iteration(algorithm, model, i, 16).metrics["draft/steps"])
        said = [str(w.message) for w in caught]
        assert len(said) == (i in (0, 2))  # once, and whenever it is answered
        if i == 0:
            assert "3 draft steps from now on" in said[0]
    assert steps == [2, 3, 3, 4, 4, 4, 4, 4]
    never_more = sol_rl(art(), draft=backwards(model), **{**options, "most_draft_steps": 9, "audit_every": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps = [with_iteration(never_more, model, i, 16).metrics["draft/steps"] for i in range(6)]
    assert steps == [2, 3, 4, 5, 5, 5]  # not beyond the policy's own
    algorithm.memory.reset()
    with pytest.warns(UserWarning, match="3 draft steps"):
        assert with_iteration(algorithm, model, 0, 16).metrics["draft/steps"] == 2
    good = sol_rl(art(), draft=the_policy(model), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [with_iteration(good, model, i, 16).metrics["draft/steps"] for i in range(3)] == [2, 2, 2]


def test_a_budget_shrinks_the_pool_to_what_it_buys():
    model = toy_model()
    algorithm = sol_rl(art(), draft=the_policy(model), pool=16, keep=KEEP, budget=1e-9)
    assert with_iteration(algorithm, model, 0, 16).metrics["draft/pool"] == 16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert with_iteration(algorithm, model, 1, 16).metrics["draft/pool"] == 2 * KEEP
    algorithm.memory.reset()
    with pytest.warns(UserWarning, match="pool 16 -> 6 seeds per prompt"):
        with_iteration(algorithm, model, 0, 16)
    rich = sol_rl(art(), draft=the_policy(model), pool=16, keep=KEEP, budget=1e9)
    assert [with_iteration(rich, model, i, 16).metrics["draft/pool"] for i in range(2)] == [16, 16]


def test_the_memory_of_the_wrapped_algorithm_goes_on():
    class Memory:
        calls: ClassVar[list[str]] = []

        def reset(self):
            self.calls.append("reset")

        def advance(self):
            self.calls.append("advance")

    model, memory = toy_model(), Memory()
    inner = art()._replace(memory=memory)
    assert sol_rl(inner, draft=the_policy(model)).memory is memory
    algorithm = sol_rl(inner, draft=the_policy(model), pool=16, keep=4, budget=1e9)
    rows_of(start(model, algorithm, group_size=8), 1)
    assert memory.calls == ["reset", "advance", "advance"]


# ---- what it cannot wrap ----------------------------------------------------------------------------------------------


def test_an_algorithm_that_starts_from_other_noise_is_refused():
    model = toy_model()
    with refuses("other noise than their own seeds'", "DanceGRPO"):
        collected(sol_rl(dance_grpo(), draft=the_policy(model), pool=8, keep=2), model, 8)


@pytest.mark.parametrize(
    "name", ["art_flash", "art_pairwise", "flow_grpo_fast", "mix_grpo", "flow_dppo", "awm", "grpo_guard"]
)
def test_every_other_algorithm_is_wrapped(name):
    model = toy_model()
    algorithm = sol_rl(getattr(algorithms, name)(), draft=the_policy(model), pool=12, keep=4, draft_steps=3)
    row = rows_of(start(model, algorithm, group_size=8, steps=8), 1)[0]
    assert math.isfinite(row["loss"])


def test_bad_options_are_refused():
    draft = the_policy(toy_model())
    for name, value in {
        "audit_every": 0,
        "audit_prompts": 0,
        "most_draft_steps": 0,
        "threshold": 2,
        "budget": 0,
    }.items():
        with refuses(name, value):
            sol_rl(art(), draft=draft, **{name: value})
    with refuses("most_draft_steps=9", "audit_every=None"):
        sol_rl(art(), draft=draft, most_draft_steps=9)
    with refuses("most_draft_steps=3", "draft_steps=6"):
        sol_rl(art(), draft=draft, most_draft_steps=3, audit_every=1)
