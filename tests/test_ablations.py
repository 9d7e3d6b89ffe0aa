"""The ablation scripts: every piece is an Algorithm, every question has three seeds, and their small statistics are right."""

import importlib
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "ablations"))

import common  # noqa: E402

from diffrl.algorithms import Algorithm, art  # noqa: E402
from diffrl.sampling import sample_seeds  # noqa: E402
from diffrl.tasks.toy import toy_model  # noqa: E402
from diffrl.types import Gridded  # noqa: E402

SCRIPTS = sorted(p.stem for p in (ROOT / "ablations").glob("*.py") if p.stem not in ("common", "letters"))
WITH_PIECES = [name for name in SCRIPTS if name != "force"]


@pytest.fixture(params=WITH_PIECES)
def script(request):
    return importlib.import_module(request.param)


def test_every_piece_is_an_algorithm(script):
    assert len(script.PIECES) >= 3
    model = toy_model()
    for factory in script.PIECES.values():
        made, again = (
            piece if isinstance(piece, Algorithm) else piece(small(model)) for piece in (factory(), factory())
        )
        assert isinstance(made, Algorithm)
        assert made is not again  # a piece with a memory is not shared between runs


def small(model):
    """The toy as a model with layers, for pieces that draft."""
    module = torch.nn.Sequential(torch.nn.Linear(32, 32))
    return model._replace(
        module=module, params={}, rebind=lambda module, names=None: model._replace(module=module, params={})
    )


def runs_of(script) -> list[common.Run]:
    if hasattr(script, "RUNS"):
        return script.RUNS
    rates = dict.fromkeys(script.PIECES, 1e-3)
    if script.__name__ == "transfer":
        return script.runs(rates)
    if script.__name__ == "stability":
        return script.runs("digits", list(script.PIECES))
    return [common.Run(name, seed, 1e-3, script.ITERATIONS) for name in script.PIECES for seed in script.SEEDS]


def test_every_question_has_three_seeds_of_every_piece_and_equal_samples(script):
    runs = runs_of(script)
    assert len({run.key for run in runs}) == len(runs)  # each is stored under a name of its own
    assert {run.name for run in runs} == set(script.PIECES)
    if script.__name__ == "stability":  # twelve settings of one seed
        settings = {(run.learning_rate, run.group_size, run.lora) for run in runs if run.name == "ART steady"}
        assert len(settings) == 12
        return
    for name in script.PIECES:
        for task in {run.task for run in runs}:
            assert len({run.seed for run in runs if (run.name, run.task) == (name, task)}) >= 3
    assert len({run.iterations * run.group_size * run.prompts for run in runs}) == 1


@pytest.mark.parametrize("name", [*SCRIPTS, "letters"])
def test_every_script_says_its_command(name):
    text = (ROOT / "ablations" / f"{name}.py").read_text()
    assert f"    python ablations/{name}.py" in text


def test_quick_runs_are_short_and_one_of_each():
    runs = [common.Run(name, seed) for seed in range(3) for name in ("a", "b")]
    short = common.shortened(runs, True)
    assert [run.name for run in short] == ["a", "b"]
    assert all(run.iterations == 2 and run.key not in {r.key for r in runs} for run in short)
    assert common.shortened(runs, False) == runs


@pytest.mark.parametrize("values", [[0.2, 0.9], [0.1, 0.5, 0.4], [3.0, 3.0, 3.0], [1.0, 2.0, 5.0, -1.0, 0.0]])
def test_intervals_are_student_s(values):
    mean, half = common.interval(values)
    n, sem = len(values), stats.sem(values)
    assert mean == pytest.approx(sum(values) / n)
    assert half == pytest.approx(sem * stats.t.ppf(0.975, n - 1), rel=1e-3, abs=1e-12)


def test_one_value_has_no_interval():
    assert math.isnan(common.interval([0.5])[1])


def test_curves_are_means_over_seeds_at_the_evaluations():
    found = {
        common.Run("a", 0): [{"samples": 0, "y": 1.0}, {"samples": 5}, {"samples": 9, "y": 2.0}],
        common.Run("a", 1): [{"samples": 0, "y": 3.0}, {"samples": 9, "y": 2.0}],
    }
    xs, told = common.curves(found, "y")
    assert xs == [0, 9]
    assert [mean for mean, _ in told] == [2.0, 2.0]
    assert common.finals(found, "a", "y") == [2.0, 2.0]
    lost = {**found, common.Run("a", 2): [{"samples": 0, "y": 1.0}, {"diverged": "x"}]}
    assert math.isnan(common.finals(lost, "a", "y")[2])


def test_a_stored_run_is_found_again_and_another_is_not(tmp_path):
    run = common.Run("a", 0)
    rows = [{"iteration": -1}]
    record = run._asdict()
    del record["diversity"]  # stored before this field was there: its default then
    (tmp_path / f"{run.key}.json").write_text(json.dumps({"run": record, "rows": rows}))
    assert common._stored(tmp_path, run) == rows
    assert common._stored(tmp_path, run._replace(steps=7)) is None
    assert common._stored(tmp_path, run._replace(seed=1)) is None


def test_the_level_is_reached_between_two_evaluations():
    efficiency = importlib.import_module("efficiency")
    curve = [{"samples": 0, efficiency.Y: 0.5}, {"samples": 10, efficiency.Y: 0.7}, {"samples": 20, efficiency.Y: 0.6}]
    assert efficiency.reached(curve, 0.6, "samples") == pytest.approx(5)
    assert efficiency.reached(curve, 0.7, "samples") == pytest.approx(10)
    assert efficiency.reached(curve, 0.8, "samples") == math.inf


def test_best_rates_are_those_of_the_best_last_third():
    efficiency = importlib.import_module("efficiency")
    found = {}
    for run in efficiency.grid():
        good = 0.9 if run.learning_rate == 1e-3 else 0.5
        rows = [{}, *[{"reward/mean": 1 - good}] * 8, *[{"reward/mean": good}] * 4]
        found[run] = [*rows, {"diverged": "x"}] if run.name == "NFT" and run.learning_rate == 1e-3 else rows
    rates = efficiency.best_rates(found)
    assert rates.pop("NFT") != 1e-3
    assert set(rates.values()) == {1e-3}


def test_what_a_run_kept():
    stability = importlib.import_module("stability")
    rows = [{"eval/reward": v} for v in (0.5, 0.9, 0.86, 0.95)]
    assert stability.kept(rows)
    assert stability.retained(rows) == pytest.approx(0.9)
    assert not stability.kept([*rows, {"eval/reward": 0.9}])
    assert not stability.kept([*rows, {"diverged": "x"}])
    assert stability.retained([{"eval/reward": 0.5}, {"eval/reward": 0.4}]) == 1.0
    assert stability.kept([{"eval/reward": -1.0}, {"eval/reward": -1.04}])  # a reward below 0
    assert not stability.kept([{"eval/reward": -1.0}, {"eval/reward": -1.06}])


def test_the_letters_of_a_number():
    letters = importlib.import_module("letters")
    assert letters.target('the number "07"') == letters.GLYPHS[0] + letters.GLYPHS[7]
    assert letters.target("nothing quoted") is None
    assert len(set(letters.GLYPHS)) == 10


def test_control_a_normal_interval_is_too_narrow_for_three_seeds():
    values = [0.1, 0.5, 0.4]
    assert common.interval(values)[1] > 2 * 1.96 * stats.sem(values)


# ---- staleness


def _collected(algorithm, shifts):
    """The toy's batches at params shifted by each of `shifts`, one after the other."""
    model, seeds = toy_model(), sample_seeds(0, 0, range(4), 3)
    sampler = Gridded(model.velocity, model.times, 4, (2,))
    cond = {"prompt": torch.arange(4) % 3}
    asked = []

    def score(latents, rows):
        asked.append(rows.tolist())
        return latents.sum(1) + 10 * rows

    batches = []
    for shift in shifts:
        params = {n: p.detach() + shift for n, p in model.params.items()}
        with torch.no_grad():
            batches.append(algorithm.collect(sampler, params, cond, seeds, score))
    return batches, asked


@pytest.mark.parametrize("fragments", [0, 1, 2, 4])
def test_stale_fragments_are_of_the_version_before_and_the_rest_of_this_one(fragments):
    staleness = importlib.import_module("staleness")
    late = 3 * fragments  # one prompt of three samples per fragment
    (first, second), asked = _collected(staleness.stale(art(), fragments), [0.0, 0.5])
    (old, new), _ = _collected(art(), [0.0, 0.5])
    assert torch.equal(first.trajectory.x_0, old.trajectory.x_0)  # nothing is older than version 0
    for name in ("x_0", "v", "x_t", "seeds"):
        got, a, b = (getattr(batch.trajectory, name) for batch in (second, old, new))
        assert torch.equal(got[:late], a[:late])
        assert torch.equal(got[late:], b[late:])
    assert torch.equal(second.trajectory.t, new.trajectory.t)
    assert torch.equal(second.rewards.flatten()[late:], new.rewards.flatten()[late:])
    assert sorted(row for rows in asked[1:] for row in rows) == sorted(3 * list(range(4)))  # no prompt twice


def test_control_versions_differ_on_the_toy():
    (old, new), _ = _collected(art(), [0.0, 0.5])
    assert not torch.equal(old.trajectory.x_0[:3], new.trajectory.x_0[:3])
