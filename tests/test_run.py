"""A run's folder: what is written, what an interruption at any moment leaves, and that nothing is half-written.

Most runs are of the closed-form toy, put in place of the pipeline; the last part trains a small real pipeline.
Negative controls are the tests with `control` in their names.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from small import save_small_pipeline, small_settings
from toys import TIMES, same, timeless, values_of

from diffrl import run as module
from diffrl.algorithms import art
from diffrl.checkpoints import load_checkpoint, restore_checkpoint
from diffrl.run import Interrupted, prepare_folder, read_metrics, refuse_folder, run, save_draft_pictures
from diffrl.sampling import rollout, sample_seeds
from diffrl.settings import HELD_OUT_SEED, Bench, Judge, Settings, build, evaluate
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model
from diffrl.trust_region import ema

pytestmark = pytest.mark.filterwarnings("ignore:.*groups have no spread")  # small groups, coarse readings

TOY = Settings(
    iterations=5,
    group_size=4,
    prompts_per_iteration=2,
    steps=3,
    learning_rate=0.05,
    eval_every=2,
    eval_samples=2,
    checkpoint_every=2,
    threads=1,
)
EMA = art()._replace(behaviour=lambda old, new, i: ema(old, new, decay=0.7))


class Killed(BaseException):
    pass


@pytest.fixture
def toy(monkeypatch):
    """Puts the toy in place of the pipeline; returns the list of benches built. Its `pieces` may be changed by a test."""
    built = []

    def build_toy(s):
        pieces = {"reward": toward_compass, "algorithm": EMA, "held_out": None, **built_pieces}
        bench = Bench(toy_model(), list(PROMPTS), Judge(pieces["reward"]), pieces["held_out"], pieces["algorithm"])
        built.append(bench)
        return bench

    built_pieces = {}
    monkeypatch.setattr(module, "build", build_toy)
    build_toy.built, build_toy.pieces = built, built_pieces
    return build_toy


def toy_params(toy):
    return values_of(toy.built[-1].model.params)


@pytest.fixture
def whole(toy, tmp_path):
    """(rows, params, folder) of an uninterrupted run of the toy."""
    rows = run(tmp_path / "whole", TOY, pictures=False)
    return timeless(rows), toy_params(toy), tmp_path / "whole"


def strict_lines(folder):
    def refuse(token):
        raise AssertionError(f"{token} is no JSON")

    text = (Path(folder) / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def assert_as_whole(whole, toy, folder):
    _, params, first = whole
    lines = strict_lines(folder)
    assert [line["iteration"] for line in lines[1:]] == list(range(TOY.iterations))
    assert timeless(lines[1:]) == timeless(strict_lines(first)[1:])
    assert same(toy_params(toy), params)
    a, b = (load_checkpoint(f / "checkpoint") for f in (first, folder))
    assert same(a.params, b.params)
    assert same(a.behaviour, b.behaviour)
    assert all(same(a.optimizer["state"][i], b.optimizer["state"][i]) for i in a.optimizer["state"])


# ---- what is written

NAMES = {
    *("iteration", "reward/mean", "reward/std", "reward/missing", "groups/dead", "loss", "masked_fraction"),
    *("kl_proxy", "drift_rms", "behaviour_distance", "grad_norm", "reward/exact_match"),
    *("seconds/rollout", "seconds/reward", "seconds/update"),
}


def test_the_first_line_is_the_settings_then_one_line_an_iteration(toy, tmp_path):
    rows = run(tmp_path / "r", TOY, pictures=False)
    head, *lines = strict_lines(tmp_path / "r")
    assert set(head) == {"diffrl", "settings"}
    assert Settings(**head["settings"]) == TOY
    assert [line["iteration"] for line in lines] == [0, 1, 2, 3, 4]
    assert all(set(line) >= NAMES for line in lines)
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3, 4]
    found, read = read_metrics(tmp_path / "r")
    assert found == TOY
    assert read == lines


@pytest.mark.parametrize(
    ("every", "evaluated"),
    [(2, {0: 0, 1: 2, 3: 4, 4: 5}), (3, {0: 0, 2: 3, 4: 5}), (5, {0: 0, 4: 5}), (99, {0: 0, 4: 5})],
)
def test_evaluations_come_at_the_first_every_few_and_the_last(toy, tmp_path, every, evaluated):
    rows = run(tmp_path / "r", replace(TOY, eval_every=every), pictures=False)
    got = {row["iteration"]: row["eval/iterations"] for row in rows if "eval/reward" in row}
    assert got == evaluated


def test_the_first_evaluation_is_of_the_base_and_the_last_of_the_trained_model(toy, tmp_path):
    rows = run(tmp_path / "r", TOY, pictures=False)
    model = toy.built[-1].model

    def value(params):
        found = evaluate(model, PROMPTS, toward_compass, steps=TOY.steps, samples=TOY.eval_samples, params=params)
        return float(found.rewards.mean())

    assert rows[0]["eval/reward"] == pytest.approx(value(toy_model().params), abs=1e-6)
    assert rows[-1]["eval/reward"] == pytest.approx(value(model.params), abs=1e-6)
    assert rows[-1]["eval/reward"] > rows[0]["eval/reward"] + 0.1


def test_a_run_of_one_iteration_is_evaluated_after_it(toy, tmp_path):
    (row,) = run(tmp_path / "r", replace(TOY, iterations=1), pictures=False)
    assert row["eval/iterations"] == 1


def test_numbers_that_are_not_finite_are_null(toy, tmp_path):
    calls = []

    def late(images, prompts):
        calls.append(1)
        return toward_compass(images, prompts) * (math.nan if len(calls) == 2 else 1)  # iteration 0's batch

    toy.pieces["reward"] = late
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(tmp_path / "r", TOY, pictures=False)
    lines = strict_lines(tmp_path / "r")
    assert lines[1]["reward/mean"] is None
    assert lines[1]["reward/missing"] == 1
    assert lines[2]["reward/mean"] is not None
    assert lines[1]["reward/exact_match"] is None  # this reward does not read


def test_a_held_out_reward_is_evaluated_and_never_trained_on(toy, tmp_path):
    toy.pieces["held_out"] = lambda images, prompts: images[:, 0]
    rows = run(tmp_path / "r", TOY, pictures=False)
    assert all(("eval/held_out_reward" in row) == ("eval/reward" in row) for row in rows)
    params = toy_params(toy)
    toy.pieces.clear()
    run(tmp_path / "s", TOY, pictures=False)
    assert same(toy_params(toy), params)


def test_progress_counts_iterations_and_shows_the_numbers(toy, tmp_path):
    class Bar:
        def __init__(self, **numbers):
            self.numbers, self.count, self.texts, self.closed = numbers, 0, [], False

        def set_postfix_str(self, text, refresh):
            self.texts.append(text)

        def update(self, n):
            self.count += n

        def close(self):
            self.closed = True

    bars = []
    run(tmp_path / "r", TOY, pictures=False, progress=lambda **numbers: bars.append(Bar(**numbers)) or bars[-1])
    assert bars[0].numbers == {"total": 5, "initial": 0}
    assert (bars[0].count, bars[0].closed, len(bars[0].texts)) == (5, True, 5)
    assert all("reward -" in text and "masked " in text for text in bars[0].texts)


def test_the_bar_shows_the_masked_fraction_of_the_last_update_as_the_figure_does():
    row = {
        "reward/mean": 1.0,
        "masked_fraction": 0.25,
        "masked_fraction/update_1": 0.0,
        "masked_fraction/update_2": 0.5,
    }
    row |= {"loss/update_1": 1.0, "loss/update_2": 1.0}
    assert module._postfix(row, None) == "reward 1.000, masked 0.50"
    assert module._postfix({"reward/mean": 1.0, "loss/update_1": 1.0}, 0.5) == "reward 1.000, exact 0.500"


@pytest.mark.parametrize("iterations", [1, 2, 5, 6, 7])
def test_evaluations_are_counted_as_they_come(toy, tmp_path, iterations):
    s = replace(TOY, iterations=iterations, eval_every=3)
    rows = run(tmp_path / "r", s, pictures=False)
    named = [n for row in rows for n in row if n in ("eval/reward", "base/reward")]
    assert module.evaluations(s) == len(named)
    assert module.evaluations(s, 1) == len([row for row in rows[1:] if "eval/reward" in row])


def test_the_folder_is_what_issue_and_module_say(toy, tmp_path):
    run(tmp_path / "r", TOY, pictures=False)
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == ["checkpoint", "metrics.jsonl"]
    assert list(tmp_path.iterdir()) == [tmp_path / "r"]  # and nothing beside it


# ---- resume


@pytest.mark.parametrize("j", [1, 2, 3, 4, 5])
def test_n_steps_are_j_steps_resume_and_the_rest(toy, tmp_path, whole, j):
    run(tmp_path / "r", replace(TOY, iterations=j), pictures=False)
    rows = run(tmp_path / "r", resume=True, iterations=5, pictures=False)
    assert timeless(rows) == whole[0]
    assert_as_whole(whole, toy, tmp_path / "r")
    assert strict_lines(tmp_path / "r")[0] == strict_lines(whole[2])[0]


def test_resuming_a_finished_run_changes_nothing(toy, tmp_path, whole):
    before = (whole[2] / "metrics.jsonl").read_text()
    run(whole[2], resume=True, pictures=False)
    assert (whole[2] / "metrics.jsonl").read_text() == before
    assert same(toy_params(toy), whole[1])


@pytest.mark.parametrize("event", range(8))
def test_death_before_any_rename_is_made_good_by_resume(toy, tmp_path, whole, monkeypatch, event):
    """Every file is put in its place by os.replace: one at the start, two per checkpoint at 2, 4 and 5 iterations."""
    real, calls = os.replace, []

    def replace_or_die(a, b):
        calls.append(b)
        if len(calls) == event + 1:
            raise Killed
        real(a, b)

    monkeypatch.setattr(os, "replace", replace_or_die)
    if event == 7:  # there are seven
        run(tmp_path / "r", TOY, pictures=False)
        assert len(calls) == 7
    else:
        with pytest.raises(Killed):
            run(tmp_path / "r", TOY, pictures=False)
    monkeypatch.setattr(os, "replace", real)
    run(tmp_path / "r", resume=True, pictures=False)
    assert_as_whole(whole, toy, tmp_path / "r")


@pytest.mark.parametrize("calls_survived", [1, 2, 4, 6])
def test_death_inside_an_iteration_or_evaluation_is_made_good_by_resume(toy, tmp_path, whole, calls_survived):
    calls = []

    def reward(images, prompts):
        calls.append(1)
        if len(calls) == calls_survived + 1:
            raise Killed
        return toward_compass(images, prompts)

    toy.pieces["reward"] = reward
    with pytest.raises(Killed):
        run(tmp_path / "r", TOY, pictures=False)
    run(tmp_path / "r", resume=True, pictures=False)
    assert_as_whole(whole, toy, tmp_path / "r")


@pytest.mark.parametrize("torn", ['{"iteration": 2, "rew', '{"iteration": 2}', "\x00\x00"])
def test_a_torn_last_line_is_dropped(toy, tmp_path, whole, torn):
    run(tmp_path / "r", replace(TOY, iterations=2), pictures=False)
    with (tmp_path / "r" / "metrics.jsonl").open("a") as file:
        file.write(torn)
    run(tmp_path / "r", resume=True, iterations=5, pictures=False)
    assert_as_whole(whole, toy, tmp_path / "r")


def test_rows_beyond_the_checkpoint_are_not_repeated(toy, tmp_path, whole):
    run(tmp_path / "r", replace(TOY, iterations=2), pictures=False)
    with (tmp_path / "r" / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 2, "reward/mean": 99}\n{"iteration": 3, "reward/mean": 99}\n')
    run(tmp_path / "r", resume=True, iterations=5, pictures=False)
    assert_as_whole(whole, toy, tmp_path / "r")


def test_control_a_lost_checkpoint_would_be_seen(toy, tmp_path, whole):
    """With fresh optimizer state at iteration 2 the run is another one."""
    run(tmp_path / "r", replace(TOY, iterations=2), pictures=False)
    original = restore_checkpoint

    def forgetful(checkpoint, *, params, optimizer):
        return original(checkpoint, params=params, optimizer=torch.optim.AdamW(list(params.values())))

    module.restore_checkpoint = forgetful
    try:
        rows = run(tmp_path / "r", resume=True, iterations=5, pictures=False)
    finally:
        module.restore_checkpoint = original
    assert timeless(rows)[:2] == whole[0][:2]
    assert timeless(rows) != whole[0]
    assert not same(toy_params(toy), whole[1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_iteration_and_says_how_to_go_on(toy, tmp_path, whole, number, capfd):
    calls, handlers = [], [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]

    def reward(images, prompts):
        calls.append(1)
        if len(calls) == 3:  # base evaluation, iteration 0, iteration 1
            os.kill(os.getpid(), number)
        return toward_compass(images, prompts)

    toy.pieces["reward"] = reward
    folder = tmp_path / "r"
    with pytest.raises(
        Interrupted, match=rf"stopped after 2 of 5 iterations; go on with: diffrl train --resume {folder}"
    ):
        run(folder, replace(TOY, checkpoint_every=99), pictures=False)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert load_checkpoint(folder / "checkpoint").iteration == 2
    assert "finishing this iteration" in capfd.readouterr().err
    assert [line.get("iteration") for line in strict_lines(folder)] == [None, 0, 1]
    run(folder, resume=True, pictures=False)
    lines = strict_lines(folder)[1:]
    assert timeless(lines) == timeless(strict_lines(whole[2])[1:])
    assert same(toy_params(toy), whole[1])


def test_a_second_interrupt_stops_at_once_and_resume_makes_it_good(toy, tmp_path, whole):
    calls = []

    def reward(images, prompts):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return toward_compass(images, prompts)

    toy.pieces["reward"] = reward
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "r", TOY, pictures=False)
    run(tmp_path / "r", resume=True, pictures=False)
    assert_as_whole(whole, toy, tmp_path / "r")


# ---- refusals


def test_a_folder_that_exists_is_refused_and_left_alone(toy, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("dear diary")
    (tmp_path / "file").write_text("text")
    for name in ("mine", "file"):
        for overwrite in (False, True):
            with pytest.raises(ValueError, match=rf"--output '.*{name}' (exists|is not a diffrl run)"):
                run(tmp_path / name, TOY, overwrite=overwrite, pictures=False)
            with pytest.raises(ValueError, match="--output"):
                refuse_folder(tmp_path / name, overwrite=overwrite)
            with pytest.raises(ValueError, match="--output"):  # also where it appeared while the model was loading
                prepare_folder(tmp_path / name, TOY, overwrite=overwrite)
    assert not toy.built  # refused before a model is loaded
    assert (tmp_path / "mine" / "notes.txt").read_text() == "dear diary"
    assert (tmp_path / "file").read_text() == "text"


def test_a_run_is_replaced_only_when_asked_to(toy, tmp_path):
    run(tmp_path / "r", TOY, pictures=False)
    with pytest.raises(ValueError, match=r"--output '.*r' exists: resume it"):
        run(tmp_path / "r", TOY, pictures=False)
    assert len(strict_lines(tmp_path / "r")) == 6
    run(tmp_path / "r", replace(TOY, iterations=2), overwrite=True, pictures=False)
    assert len(strict_lines(tmp_path / "r")) == 3
    assert load_checkpoint(tmp_path / "r" / "checkpoint").iteration == 2


def test_an_empty_folder_is_used(toy, tmp_path):
    (tmp_path / "r").mkdir()
    run(tmp_path / "r", replace(TOY, iterations=1), pictures=False)
    assert len(strict_lines(tmp_path / "r")) == 2


def test_a_folder_that_cannot_be_written_is_refused(toy, tmp_path, monkeypatch):
    def read_only(self, *args, **options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(ValueError, match=r"--output '.*r' cannot be written: Read-only file system"):
        run(tmp_path / "r", TOY, pictures=False)
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())


def test_a_folder_below_a_file_is_refused(toy, tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(ValueError, match=r"--output '.*file/r' cannot be written: Not a directory"):
        prepare_folder(tmp_path / "file" / "r", TOY, overwrite=False)
    assert (tmp_path / "file").read_text() == "text"


def test_a_disk_that_fills_up_leaves_nothing_and_keeps_the_old_run(toy, tmp_path, monkeypatch):
    run(tmp_path / "r", TOY, pictures=False)

    def full(self, *args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ValueError, match="No space left on device"):
        prepare_folder(tmp_path / "r", TOY, overwrite=True)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["r"]
    assert len(strict_lines(tmp_path / "r")) == 6


@pytest.mark.parametrize("values", [lambda n: torch.zeros(n + 1), lambda n: None, lambda n: 1 / 0])
def test_a_reward_that_cannot_be_used_is_refused_before_anything_is_written(toy, tmp_path, values):
    run(tmp_path / "old", TOY, pictures=False)
    toy.pieces["reward"] = lambda images, prompts: values(len(prompts))
    for folder, overwrite in ((tmp_path / "r", False), (tmp_path / "old", True)):
        with pytest.raises(ValueError, match="reward"):
            run(folder, TOY, overwrite=overwrite, pictures=False)
    assert [p.name for p in tmp_path.iterdir()] == ["old"]
    assert len(strict_lines(tmp_path / "old")) == 6


def test_pictures_that_cannot_be_drawn_are_refused_before_training(toy, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"matplotlib: pip install"):
        run(tmp_path / "r", TOY)
    assert not toy.built
    assert not list(tmp_path.iterdir())
    run(tmp_path / "r", replace(TOY, iterations=1), pictures=False)


def test_resuming_what_is_no_run_is_refused(toy, tmp_path):
    with pytest.raises(ValueError, match=r"'.*nowhere' is not a diffrl run"):
        run(tmp_path / "nowhere", resume=True)
    for text in ("", "text\n", "{}\n", '{"settings": {"task": "digits"}}\n', json.dumps(asdict(TOY)) + "\n"):
        (tmp_path / "metrics.jsonl").write_text(text)
        with pytest.raises(ValueError, match=r"metrics\.jsonl' does not start with the settings"):
            run(tmp_path, resume=True)
    assert not toy.built


def test_resuming_to_fewer_iterations_than_there_are_is_refused(toy, tmp_path, whole):
    before = (whole[2] / "metrics.jsonl").read_text()
    for iterations, message in ((0, "--iterations.*0"), (3, r"--iterations 3: .* already has 5")):
        with pytest.raises(ValueError, match=message):
            run(whole[2], resume=True, iterations=iterations, pictures=False)
    assert (whole[2] / "metrics.jsonl").read_text() == before


def test_another_runs_checkpoint_is_refused(toy, tmp_path, whole):
    run(tmp_path / "other", replace(TOY, seed=1), pictures=False)
    shutil.rmtree(whole[2] / "checkpoint")
    shutil.copytree(tmp_path / "other" / "checkpoint", whole[2] / "checkpoint")
    with pytest.raises(ValueError, match=r"another run.*'seed': \(1, 0\)"):
        run(whole[2], resume=True, pictures=False)


def test_a_truncated_checkpoint_is_refused_and_the_metrics_are_kept(toy, tmp_path, whole):
    (state,) = (whole[2] / "checkpoint").glob("state-*")
    state.write_bytes(state.read_bytes()[:-1])
    before = (whole[2] / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match=rf"{state.name} is truncated or was changed"):
        run(whole[2], resume=True, iterations=9, pictures=False)
    assert (whole[2] / "metrics.jsonl").read_text() == before


def test_metrics_that_lack_iterations_are_refused(toy, tmp_path, whole):
    path = whole[2] / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2] + lines[3:]))
    with pytest.raises(ValueError, match=r"metrics\.jsonl lacks iterations before 5"):
        run(whole[2], resume=True, pictures=False)


# ---- a small real pipeline


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    return save_small_pipeline(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def real(pipe, tmp_path_factory):
    """(settings, rows, folder) of a run of the small pipeline with a reward that reads, pictures drawn."""
    s = Settings(**small_settings(pipe, reward="small:reader"))
    folder = tmp_path_factory.mktemp("real") / "run"
    return s, run(folder, s), folder


def test_the_folder_of_a_real_run(real):
    _, rows, folder = real
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and "state-" not in p.name)
    assert names == [
        "adapter/pytorch_lora_weights.safetensors",
        "before_after.png",
        "checkpoint/checkpoint.json",
        "curve.png",
        "metrics.jsonl",
    ]
    evaluated = [row for row in rows if "eval/exact_match" in row]
    assert [row["iteration"] for row in evaluated] == [0, 1, 3, 4]
    assert all(0 <= row["eval/exact_match"] <= 1 and 0 <= row["eval/reward"] <= 1 for row in evaluated)
    assert all(row["loss/update_1"] == pytest.approx(1 - row["groups/dead"], abs=1e-3) for row in rows)
    assert all(row["behaviour_distance"] == 0 for row in rows)
    assert all(0 <= row["reward/exact_match"] <= 1 for row in rows)


def test_a_run_with_a_draft_measures_it_and_draws_what_it_chose(pipe, tmp_path):
    s = Settings(**small_settings(pipe, draft="nvfp4", pool=8, draft_steps=2, iterations=2, audit_every=1))
    rows = run(tmp_path / "run", s)
    assert all(row["draft/pool"] == 8 and row["draft/steps"] == 2 and 0 < row["draft/converted"] < 1 for row in rows)
    assert all(-1 <= row["audit/spearman"] <= 1 for row in rows)
    for name in ("drafts.png", "ranks.png"):
        with Image.open(tmp_path / "run" / name) as image:
            assert np.asarray(image.convert("L")).std() > 5
    bench = build(s)
    (tmp_path / "drafts").mkdir()
    save_draft_pictures(tmp_path / "drafts", s, bench)
    assert sorted(p.name for p in (tmp_path / "drafts").iterdir()) == ["drafts.png", "ranks.png"]
    with pytest.raises(ValueError, match=r"--draft-skip meets no layer with \['attention'\]"):
        build(Settings(**{**small_settings(pipe), "draft": "nvfp4", "draft_steps": 2, "draft_skip": "attention"}))
    with pytest.raises(ValueError, match=r"no layer is left to convert.*--draft-min-dim 1000000"):
        build(Settings(**{**small_settings(pipe), "draft": "nvfp4", "draft_steps": 2, "draft_min_dim": 10**6}))


def test_a_run_with_a_draft_goes_on_as_if_it_had_not_stopped(pipe, tmp_path):
    s = Settings(
        **small_settings(
            pipe, draft="nvfp4", pool=8, draft_steps=2, iterations=3, algorithm="nft", trained_steps="auto"
        )
    )
    whole = run(tmp_path / "whole", s, pictures=False)
    run(tmp_path / "halves", replace(s, iterations=2), pictures=False)
    halves = run(tmp_path / "halves", resume=True, iterations=3, pictures=False)
    assert timeless(halves[2:]) == timeless(whole[2:])


@pytest.mark.parametrize("name", ["curve.png", "before_after.png"])
def test_the_pictures_show_something(real, name):
    with Image.open(real[2] / name) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    assert min(pixels.shape[:2]) > 200
    assert all(part.std() > 3 for part in np.array_split(pixels, 3, axis=1))


def drawn(pipe, s):
    """Latents of the held-out samples by the pipeline's own call."""
    seeds = sample_seeds(HELD_OUT_SEED, 0, range(4), 1).flatten()
    noise = rollout(
        lambda params, x_t, t, cond: torch.zeros_like(x_t),
        {},
        {},
        torch.tensor([1.0, 0.0]),
        seeds=seeds,
        shape=(4, 6, 8),
    ).x_0
    return pipe(
        prompt=Path(s.prompts).read_text().splitlines(),
        latents=noise,
        sigmas=[1 - i / s.steps for i in range(s.steps)],
        num_inference_steps=s.steps,
        height=24,
        width=32,
        guidance_scale=1.0,
        max_sequence_length=1,
        output_type="latent",
    ).images


def test_the_adapter_loads_in_diffusers_and_draws_what_was_trained(real):
    from diffrl.tasks.digits import load_pipeline

    s, _, folder = real
    assert s.lora_alpha != s.lora_rank
    bench = build(s)
    restore_checkpoint(
        load_checkpoint(folder / "checkpoint"),
        params=bench.model.params,
        optimizer=torch.optim.AdamW(list(bench.model.params.values())),
    )
    prompts = bench.prompts
    seeds = sample_seeds(HELD_OUT_SEED, 0, range(4), 1).flatten()
    trained = rollout(
        bench.model.velocity,
        bench.model.params,
        bench.model.encode(prompts),
        bench.model.times(s.steps),
        seeds=seeds,
        shape=(4, 6, 8),
        keep=[],
    ).x_0
    pipe = load_pipeline(s.model)
    base = drawn(pipe, s)
    pipe.load_lora_weights(folder / "adapter")
    assert torch.allclose(drawn(pipe, s), trained, atol=1e-4)
    # control: the base model is another one, and so is an adapter whose alpha was lost
    assert float((base - trained).abs().max()) > 0.01
    pipe.set_adapters(pipe.get_active_adapters(), adapter_weights=[s.lora_rank / s.lora_alpha])
    assert float((drawn(pipe, s) - trained).abs().max()) > 0.01


def test_killed_and_interrupted_runs_end_as_the_uninterrupted_one(pipe, tmp_path):
    """kill -9 at random moments and SIGINT, through the command line in processes of their own (tests/killed.py)."""
    script = Path(__file__).with_name("killed.py")
    environment = os.environ | {"PYTHONPATH": str(script.parent)}
    done = subprocess.run(
        [sys.executable, script, pipe, tmp_path], capture_output=True, text=True, env=environment, timeout=300
    )
    log = (tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""
    assert done.returncode == 0, done.stderr + log
    codes = json.loads(done.stdout)
    assert codes["whole"] == [0]
    assert codes["killed"] == [-9] * 2 + [0]
    assert codes["early"] == [-9] * 2 + [0]
    assert codes["interrupted"] == [130, 0]
    assert log.count(f"go on with: diffrl train --resume {tmp_path / 'interrupted'}") == 1

    expected = strict_lines(tmp_path / "whole")
    adapter = load_file(tmp_path / "whole" / "adapter" / "pytorch_lora_weights.safetensors")
    checkpoint = load_checkpoint(tmp_path / "whole" / "checkpoint")
    assert len(expected) == 8
    for name in ("killed", "early", "interrupted"):
        lines = strict_lines(tmp_path / name)
        assert [line["iteration"] for line in lines[1:]] == list(range(7))
        assert timeless(lines[1:]) == timeless(expected[1:])
        assert same(load_file(tmp_path / name / "adapter" / "pytorch_lora_weights.safetensors"), adapter)
        found = load_checkpoint(tmp_path / name / "checkpoint")
        assert same(found.params, checkpoint.params)
        assert torch.equal(found.rng["torch"], checkpoint.rng["torch"])
        states = found.optimizer["state"], checkpoint.optimizer["state"]
        assert all(same(states[0][i], states[1][i]) for i in states[1])


def test_control_rows_of_another_seed_differ(real, tmp_path):
    s, rows, _ = real
    other = run(tmp_path / "r", replace(s, seed=1), pictures=False)
    assert timeless(other) != timeless(rows)
    assert set(TIMES) & set(rows[0])


@pytest.mark.parametrize("text", [b"[1]\n", b"3\n", b"null\n", b'{"settings": 3}\n', b"\xff\xfe\n", b""])
def test_a_metrics_file_of_another_kind_is_refused_by_name(tmp_path, text):
    (tmp_path / "metrics.jsonl").write_bytes(text)
    with pytest.raises(ValueError, match=r"metrics\.jsonl"):
        read_metrics(tmp_path)


def test_reading_metrics_stops_at_a_line_that_is_no_row(tmp_path):
    head = json.dumps({"diffrl": "0", "settings": asdict(Settings())})
    (tmp_path / "metrics.jsonl").write_bytes(head.encode() + b'\n{"iteration": 0}\n3\n{"iteration": 1}\n')
    assert read_metrics(tmp_path)[1] == [{"iteration": 0}]


def test_a_folder_in_which_another_process_trains_is_refused(tmp_path):
    script = (
        "import fcntl, os, sys; h = os.open(sys.argv[1], os.O_RDONLY); fcntl.flock(h, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    (tmp_path / "metrics.jsonl").write_text("kept")
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        for how in ({"resume": True}, {"s": Settings(), "overwrite": True}):
            with pytest.raises(ValueError, match="another process"):
                run(tmp_path, **how)
        assert (tmp_path / "metrics.jsonl").read_text() == "kept"
        holder.kill()
    with pytest.raises(ValueError, match="settings of a diffrl run"):  # let go by the kill
        run(tmp_path, resume=True)
