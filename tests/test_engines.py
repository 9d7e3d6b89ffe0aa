"""A run by a schedule instead of the loop: the same params, rows and checkpoints; settings that do not fit are refused.

Negative controls are the tests with `control` in their names.
"""

from dataclasses import replace

import pytest
import torch
from oracles import refuses
from small import save_small_pipeline, small_settings
from toys import same, values_of, wide

from diffrl import run as module
from diffrl.algorithms import art, dance_grpo, flow_grpo, flow_grpo_fast, grpo_guard_as_published, nft, sol_rl
from diffrl.engines import (
    check_engine,
    engine_rows,
    make_optimizer,
    make_stages,
    schedule_for,
    stages_from_settings,
)
from diffrl.loop import train
from diffrl.run import run
from diffrl.settings import Bench, Judge, Settings, build, check_settings
from diffrl.stages import trained_timesteps
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model
from diffrl.trust_region import AdaptiveRadius

TOY = Settings(
    iterations=3,
    group_size=4,
    prompts_per_iteration=2,
    steps=4,
    learning_rate=0.05,
    eval_every=2,
    eval_samples=2,
    checkpoint_every=1,
    threads=1,
    engine="in_process",
    fragments=3,
)


def bench_of(algorithm):
    model = toy_model(dtype=torch.float64)
    return Bench(model, list(PROMPTS), Judge(toward_compass), None, wide(algorithm))


def by_engine(s, algorithm, count=3):
    bench = bench_of(algorithm)
    initial, told = values_of(bench.model.params), []
    optimizer = make_optimizer(s, bench.model.params)
    rows = engine_rows(s, bench, optimizer, reference=initial, published=lambda b: told.append(values_of(b)))
    found = [next(rows) for _ in range(count)]
    rows.close()
    return bench.model.params, found, told


def by_loop(s, algorithm, count=3):
    bench = bench_of(algorithm)
    given = {"group_size": s.group_size, "steps": s.steps, "seed": s.seed, "pack": s.pack}
    given["prompts_per_iteration"] = s.prompts_per_iteration
    optimizer = make_optimizer(s, bench.model.params)
    rows = train(bench.model, bench.algorithm, bench.prompts, bench.reward, optimizer, **given)
    return bench.model.params, [next(rows) for _ in range(count)]


@pytest.mark.parametrize("factory", [art, nft, flow_grpo, lambda: dance_grpo(updates=1)])
def test_an_engine_s_rows_and_params_are_the_loop_s(factory):
    s = replace(TOY, pack=5, fragments=2)
    params, rows, told = by_engine(s, factory())
    expected, plain = by_loop(s, factory())
    for name, p in expected.items():
        assert torch.allclose(params[name], p, rtol=1e-11, atol=1e-13)
    for row, other in zip(rows, plain, strict=True):
        shared = {n for n in other if not n.startswith("seconds/") and "/t=" not in n} - {"behaviour_distance"}
        assert shared <= set(row)
        assert {n: row[n] for n in shared} == pytest.approx({n: other[n] for n in shared}, rel=1e-6, abs=1e-9)
        assert {"seconds/rollout", "seconds/reward", "seconds/update", "seconds/step"} <= set(row)
    assert len(told) == 3
    assert not same(told[0], told[2])


def test_the_same_settings_give_the_same_bits():
    assert same(values_of(by_engine(TOY, art())[0]), values_of(by_engine(TOY, art())[0]))


def test_control_another_seed_gives_other_params():
    assert not same(values_of(by_engine(TOY, art())[0]), values_of(by_engine(replace(TOY, seed=1), art())[0]))


def test_a_run_by_an_engine_is_interrupted_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "build", lambda s: bench_of(nft()))
    run(tmp_path / "whole", TOY, pictures=False)
    run(tmp_path / "parts", replace(TOY, iterations=2), pictures=False)
    rows = run(tmp_path / "parts", resume=True, iterations=3, pictures=False)
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert rows[0]["reward/exact_match"] is None  # a reward of fragments says nothing about the batch
    a, b = (module.load_checkpoint(tmp_path / name / "checkpoint") for name in ("whole", "parts"))
    assert same(a.params, b.params)
    assert same(a.behaviour, b.behaviour)


def test_the_schedule_follows_what_the_algorithm_looks_at():
    s = replace(TOY, fragments=2, stale=1, pack=7)
    cut = schedule_for(art(), s)
    assert [len(f.samples) for f in cut.fragments] == [4, 4]
    assert (cut.barrier, cut.timesteps, cut.pack, cut.stale) == (False, 4, 7, 1)
    assert schedule_for(flow_grpo(), s).barrier
    assert schedule_for(art(), replace(s, fragments=3, pack=None)).pack >= 2 * 4 * 4
    three = replace(TOY, prompts_per_iteration=3, fragments=2)
    assert [len(f.samples) for f in schedule_for(art(), three).fragments] == [6, 6]
    assert [len(f.samples) for f in schedule_for(dance_grpo(), three).fragments] == [8, 4]
    assert trained_timesteps(art(), steps=6) == 6
    assert trained_timesteps(art(steps_per_sample=2), steps=6) == 2
    assert trained_timesteps(dance_grpo(), steps=6) == 3


def test_what_an_engine_cannot_run_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    check_engine(replace(TOY, steps=10), flow_grpo_fast())
    with refuses("objective looks at all samples of a forward"):
        check_engine(TOY, grpo_guard_as_published())
    check_engine(replace(TOY, fragments=1), grpo_guard_as_published())
    with refuses("fragments must be at most 8"):
        check_engine(replace(TOY, fragments=9), art())
    model = toy_model()
    with refuses("an algorithm with a pool (8)"):
        check_engine(TOY, sol_rl(art(), draft=lambda p: (model.velocity, p), pool=8, keep=2))
    with refuses("--engine in_process", "2 processes"):
        check_engine(TOY, art(), ranks=2)
    with refuses("--engine in_process", "--images 'list.txt'"):
        check_engine(replace(TOY, task="prompts", images="list.txt"), art())
    check_engine(replace(TOY, engine="loop", fragments=1, images="list.txt"), art(), ranks=2)
    with refuses("an algorithm with a memory"):
        check_engine(TOY, art(radius=AdaptiveRadius()))
    check_engine(replace(TOY, engine="loop", fragments=1), flow_grpo_fast())
    monkeypatch.setattr(module, "build", lambda s: bench_of(art()))
    with refuses("fragments must be at most 8"):
        run(tmp_path / "run", replace(TOY, fragments=9), pictures=False)
    assert not list(tmp_path.iterdir())
    with refuses("--stale 4 must be at most --fragments 3"):
        check_settings(replace(TOY, stale=4))
    with refuses("--micro-batch 2: --engine in_process has none; it belongs to loop"):
        check_settings(replace(TOY, micro_batch=2))


def test_a_pipeline_s_module_is_shared_by_rollout_and_training(tmp_path):
    """Snapshots are swapped into the very module that trains: the params are still the loop's."""
    pipe = save_small_pipeline(tmp_path)
    s = Settings(**small_settings(pipe, engine="in_process", fragments=4, iterations=2, stale=0))
    stages = stages_from_settings(s)
    bench = build(s)
    initial = values_of(bench.model.params)
    assert same(values_of(stages.model.params), initial)
    rows = engine_rows(s, bench, make_optimizer(s, bench.model.params), reference=initial)
    found = [next(rows) for _ in range(2)]
    rows.close()
    other = build(s)
    given = {"group_size": s.group_size, "steps": s.steps, "seed": s.seed}
    given["prompts_per_iteration"] = s.prompts_per_iteration
    optimizer = make_optimizer(s, other.model.params)
    plain = train(other.model, other.algorithm, other.prompts, other.reward, optimizer, reference=initial, **given)
    expected = [next(plain) for _ in range(2)]
    assert [r["reward/mean"] for r in found] == pytest.approx([r["reward/mean"] for r in expected], rel=1e-5)
    for name, p in other.model.params.items():
        assert torch.allclose(bench.model.params[name], p, rtol=1e-3, atol=1e-4)
    assert not same(initial, values_of(bench.model.params))
    assert make_stages(s, bench, optimizer=make_optimizer(s, bench.model.params)).lock is not None
