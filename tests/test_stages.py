"""Stages of plain workers and of algorithms: what each is asked, and what no schedule can cut.

Negative controls are the tests with `control` in their names.
"""

import math

import pytest
import torch
from executing import COST, GROUP, STEPS, WHOLE, Noted, close, executed, noted_run, plain, stages_of, whole
from hypothesis import given
from hypothesis import strategies as st
from oracles import refuses
from scheduling import fragments_of
from toys import wide

from diffrl.algorithms import art, art_pairwise, dance_grpo, flow_grpo, flow_grpo_fast, nft, sol_rl
from diffrl.backends import Lost
from diffrl.conductor import ExecutionError
from diffrl.executors import Workers, folded_seeds, in_process, run
from diffrl.parallel import (
    CostModel,
    Pool,
    Schedule,
    TrainCost,
    gap_partition,
    prompt_partition,
)
from diffrl.rollouts import collect_window
from diffrl.sampling import cps_step, random_window
from diffrl.stages import AlgorithmStages, PlainStages, require_separable_collect, require_separable_credit
from diffrl.tasks.toy import PROMPTS, toy_model
from diffrl.trust_region import AdaptiveRadius

# ---- plain workers: what each is asked


def test_seeds_of_a_step_are_folded_from_seed_and_step_and_cut_by_rows():
    noted, schedule = Noted(), Schedule(gap_partition(2, 2, fragments=3), 2, timesteps=2)
    noted_run(schedule, noted, steps=2)
    for step in range(2):
        seeds = folded_seeds(torch.arange(4) + 7, step).tolist()
        asked = noted.of("generate")[3 * step : 3 * step + 3]
        assert [(s, rows) for s, _, rows in asked] == [
            ([seeds[r] for r in f.samples], list(f.samples)) for f in schedule.fragments
        ]
    assert len({s for step in range(5) for s in folded_seeds(torch.arange(4), step).tolist()}) == 20


@given(st.data(), st.integers(1, 3))
def test_every_group_is_told_once_and_every_pair_accumulated_once_over_the_batch_s_number(data, pack):
    schedule = Schedule(data.draw(fragments_of(3, 2)), 2, timesteps=2, pack=pack)
    noted, randoms = Noted(), data.draw(st.randoms(use_true_random=False))
    noted_run(schedule, noted, backend=in_process(pick=lambda n: randoms.randrange(n)))
    assert noted.of("credit") == [((1, 2), (1, 2, 1))] * 3
    packs = noted.of("accumulate")
    assert all(total == 12 and len(pairs) <= pack for pairs, total, _ in packs)
    assert sum(len(pairs) for pairs, *_ in packs) == 12
    assert len(packs) == sum(math.ceil(2 * len(f.samples) / pack) for f in schedule.fragments)
    assert len(noted.of("commit")) == 1


def test_the_gradient_of_plain_workers_is_the_closed_form():
    """Loss of a pair: (theta + x_r) A_r (t + 1): its gradient in theta is the sum of A_r (t + 1) over the pairs, / N."""
    schedule = Schedule(gap_partition(2, 3, fragments=4), 3, timesteps=2, pack=3)
    noted = Noted()
    noted_run(schedule, noted)
    x = (folded_seeds(torch.arange(6) + 7, 0) % 1000).double().reshape(2, 3) / 1000
    a = 2 * (x - x.mean(1, keepdim=True))
    assert noted.of("commit")[0][0] == pytest.approx(float((3 * a).sum() / 12), abs=1e-15)


def test_a_snapshot_of_each_version_and_nothing_generated_under_another():
    noted, schedule = Noted(), Schedule(gap_partition(2, 2, fragments=2), 2, timesteps=2)
    results = noted_run(schedule, noted, steps=3)
    thetas = [0.0, *(r.metrics["theta"] for r in results[:2])]
    assert [theta for _, theta, _ in noted.of("generate")] == [t for t in thetas for _ in range(2)]
    assert len(noted.of("snapshot")) == 4


def test_the_gradient_is_put_away_before_helping_and_comes_back():
    def lend(bubble, *_):
        return min(1, len(bubble.unclaimed))

    noted = Noted()
    schedule = Schedule(prompt_partition(4, 2, fragments=4), 2, timesteps=2, tag=True)
    with_help = noted_run(schedule, noted, cost=COST, lend=lend, backend=in_process(pick=lambda n: n - 1))
    names = [call[0] for call in noted.calls]
    assert names.count("suspend") == names.count("resume") > 0
    for i in [i for i, name in enumerate(names) if name == "suspend"]:
        after = names[i + 1 : names.index("resume", i)]
        assert set(after) <= {"generate", "score"}
    alone = Noted()
    without = noted_run(Schedule(schedule.fragments, 2, timesteps=2), alone)
    assert with_help[0].metrics["theta"] == pytest.approx(without[0].metrics["theta"], rel=1e-13)
    assert any(i.kind == "help" for i in with_help[0].trace.intervals)


# ---- what cannot be run


def test_a_credit_of_the_batch_needs_a_barrier():
    for factory in (flow_grpo, nft, art_pairwise):
        with refuses("looks at other groups too", "barrier=True"):
            run(whole(4), stages_of(factory()), steps=1)
        run(whole(4, barrier=True), stages_of(factory()), steps=1)
    require_separable_credit(art(), steps=5, group_size=4)


def own_window():
    """A window drawn from the first seed it happens to be given, whoever else is in the batch."""

    def where(velocity, seeds):
        return random_window(int(seeds[0, 0]) % 2**63, steps=velocity.steps, size=3)

    return flow_grpo_fast()._replace(collect=collect_window(kernel=cps_step, window=where))


def test_a_collect_that_looks_at_its_group_or_batch_is_not_cut_there():
    dance = dance_grpo(updates=1)
    with refuses("looks beyond a sample"):
        run(whole(2, fragments=3), stages_of(dance), steps=1)
    groups = Schedule(prompt_partition(2, GROUP, fragments=2), GROUP, timesteps=2, pack=WHOLE)
    found, _ = executed(groups, stages_of(dance))
    assert close(found, plain(dance)[0])
    require_separable_collect(flow_grpo_fast(), steps=10, group_size=4, whole_groups=False)
    for whole_groups, message in ((True, "looks beyond a group"), (False, "looks beyond a sample")):
        with refuses(message):
            require_separable_collect(own_window(), steps=10, group_size=4, whole_groups=whole_groups)
    require_separable_collect(flow_grpo(), steps=5, group_size=4, whole_groups=False)


def test_algorithms_and_rewards_that_a_schedule_cannot_cut_are_refused():
    model = toy_model()
    drafted = sol_rl(art(), draft=lambda p: (model.velocity, p), pool=8, keep=2)
    with refuses("an algorithm with a pool (8)"):
        stages_of(drafted)
    with refuses("an algorithm with a memory"):
        stages_of(art(radius=AdaptiveRadius()))
    with refuses("reward must be a callable", "None"):
        stages_of(art(), reward=None)
    with refuses("steps_per_sample"):
        stages_of(art()._replace(objective=lambda *_: None))
    with refuses("prompts_per_iteration=3 of only 2"):
        stages_of(art(), prompts_per_iteration=3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"start": -1}, "start"),
        ({"retries": -1}, "retries"),
        ({"timeout": 0.0}, "timeout"),
        ({"cost": 3}, "cost must be a CostModel"),
        ({"cond": {}}, "have their own cond and seeds"),
    ],
)
def test_arguments_out_of_range_are_refused_at_the_call(changed, message):
    given = {"steps": 1, **changed}
    with refuses(message):
        run(whole(5), stages_of(art()), given.pop("cond", None), **given)


def test_schedules_and_workers_that_do_not_fit_are_refused_at_the_call():
    with refuses("schedule must be a Schedule"):
        run(None, stages_of(art()), steps=1)
    with refuses("the schedule has 4 rows in groups of 2, the batch 8 in groups of 4"):
        run(Schedule(gap_partition(2, 2, fragments=1), 2), stages_of(art()), steps=1)
    with refuses("cost.helper >= 1"):
        run(whole(5, tag=True), stages_of(art()), steps=1, cost=CostModel(1.0, TrainCost(0, 1), Pool(1), Pool(1)))
    schedule = Schedule(gap_partition(2, 2, fragments=1), 2)
    for workers, cond, seeds, message in (
        (None, {}, torch.arange(4), "workers must be Workers"),
        (Noted().workers(), {}, torch.arange(3), "seeds must be a tensor, one per row, (4,)"),
        (Noted().workers(), {}, None, "seeds must be a tensor, one per row, (4,)"),
        (Noted().workers(), {"row": torch.arange(3)}, torch.arange(4), "cond['row'] must have leading axis 4"),
    ):
        with refuses(message):
            run(schedule, workers, cond, seeds, steps=1)
    assert PlainStages(Noted().workers(), {}, torch.arange(4), schedule).windows == [[0, 1, 2, 3]]
    assert isinstance(stages_of(art()), AlgorithmStages)


def test_timesteps_that_are_not_the_objective_s_are_refused():
    with pytest.raises(ExecutionError, match="timesteps 3, but the objective trains 5 per sample"):
        executed(whole(3), stages_of(art()))


def test_rewards_of_a_backend_are_counted():
    with refuses("rewards"):
        in_process(rewards=0)
    assert issubclass(Lost, RuntimeError)
    assert Workers._fields[:4] == ("generate", "score", "credit", "accumulate")
    assert wide(art()).updates == 2
    assert (GROUP, STEPS, len(PROMPTS)) == (4, 5, 4)


def test_control_what_can_be_cut_is_not_refused():
    for schedule in (whole(5, fragments=3), whole(5, fragments=1, barrier=True)):
        run(schedule, stages_of(art()), steps=1)
