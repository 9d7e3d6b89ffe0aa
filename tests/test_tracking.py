"""Trackers: what was logged is read back from the files; the table of docs/metrics.md against the rows of real runs.

Negative controls are the tests with `control` in their names.
"""

import functools
import json
import math
import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import save_small_pipeline, small_settings
from toys import rows_of, start

from diffrl import run as run_module
from diffrl import tracking
from diffrl.algorithms import art, sol_rl
from diffrl.cli import main
from diffrl.run import run
from diffrl.settings import ALGORITHMS, Bench, Judge, Settings, make_algorithm
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model
from diffrl.tracking import (
    TRACKERS,
    Tracker,
    forgiving,
    in_folder,
    require_tracker,
    split_metrics,
    to_jsonl,
    to_tensorboard,
    to_wandb,
    together,
)

PICTURES = torch.arange(2 * 4 * 6 * 3, dtype=torch.uint8).reshape(2, 4, 6, 3)
TOY = Settings(
    iterations=3,
    group_size=4,
    prompts_per_iteration=2,
    steps=4,
    eval_every=2,
    eval_samples=2,
    threads=1,
    algorithm="art",
)


def lines_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.fixture
def toy(monkeypatch):
    """The toy in place of the pipeline."""

    def build(s):
        return Bench(toy_model(), list(PROMPTS), Judge(toward_compass), None, make_algorithm(s))

    monkeypatch.setattr(run_module, "build", build)


# ---- values


def test_values_become_plain_numbers_or_pictures():
    video = torch.stack([PICTURES, PICTURES + 1, PICTURES + 2], 1)
    numbers, pictures = split_metrics(
        {"a": 1, "b": np.float32(0.5), "c": torch.tensor(2.0), "d": None, "e": -math.inf, "f": PICTURES, "g": video}
    )
    assert numbers == {"a": 1, "b": 0.5, "c": 2.0, "d": None, "e": None}
    assert all(type(value) in (int, float) for value in numbers.values() if value is not None)
    assert torch.equal(pictures["f"], PICTURES)
    assert torch.equal(pictures["g"], PICTURES + 1)


@given(st.dictionaries(st.text(min_size=1, max_size=5), st.floats(allow_nan=True, allow_infinity=True), max_size=5))
def test_a_number_is_kept_to_the_bit_or_null(metrics):
    numbers, pictures = split_metrics(metrics)
    assert pictures == {}
    assert list(numbers) == list(metrics)
    assert all(numbers[n] == v if math.isfinite(v) else numbers[n] is None for n, v in metrics.items())


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"a": "high"}, "metric 'a' must be a number or pictures.*'high'"),
        ({"b": torch.zeros(3)}, r"metric 'b'.*torch.float32 \(3,\)"),
        ({"b": PICTURES[0]}, r"metric 'b'.*torch.uint8 \(4, 6, 3\)"),
        ({"c": 10**400}, "metric 'c' is an integer beyond every float"),
        ({"d": PICTURES[:0]}, r"metric 'd': there are no pixels in pictures of shape \(0, 4, 6, 3\)"),
        ({"d": PICTURES[:, None][:, :0]}, r"metric 'd': there are no pixels"),
        ({3: 1.0}, "names of metrics are strings, got 3"),
        ([("a", 1)], "must be a mapping"),
    ],
)
def test_what_is_neither_is_refused_by_name_and_nothing_is_noted(tmp_path, metrics, message):
    with to_jsonl(tmp_path / "a.jsonl") as log:
        with pytest.raises(ValueError, match=message):
            log(metrics, 0)
        with pytest.raises(ValueError, match=r"step.*-1"):
            log({}, -1)
    assert (tmp_path / "a.jsonl").read_text() == ""


# ---- trackers


def test_jsonl_holds_every_call_when_it_returns(tmp_path):
    path = tmp_path / "deep" / "a.jsonl"
    log = to_jsonl(path)
    log({"loss": 0.5, "nothing": math.nan, "seen": PICTURES}, 0)
    assert lines_of(path) == [{"step": 0, "loss": 0.5, "nothing": None}]
    log({"loss": 0.25}, 7)
    log.close()
    log.close()
    with pytest.raises(ValueError, match="closed: step 8"):
        log({"loss": 0.0}, 8)
    with to_jsonl(path) as more:  # a run that goes on
        more({}, 8)
    assert [line["step"] for line in lines_of(path)] == [0, 7, 8]
    with pytest.raises(ValueError, match="cannot be written"):
        to_jsonl(path / "below_a_file")


def test_together_tells_all_and_closes_all_even_where_one_fails(tmp_path):
    told, closed = [], []
    first = Tracker(lambda *a: told.append(a), lambda: closed.append("first"))
    failing = Tracker(lambda *a: None, lambda: 1 / 0)
    log = together(failing, first, lambda metrics, step: told.append((metrics, step)))
    log({"a": 1, "p": PICTURES}, 4)
    assert told[0][0] == {"a": 1}
    assert told[0][2] == 4
    assert set(told[1][0]) == {"a", "p"}
    with pytest.raises(ZeroDivisionError):
        log.close()
    assert closed == ["first"]
    with pytest.raises(ValueError, match=r"callables.*3"):
        together(first, 3)


def test_a_forgiven_tracker_is_told_all_until_it_fails_and_nothing_after(tmp_path):
    told, closed = [], []

    def some(metrics, pictures, step):
        told.append((metrics, set(pictures), step))
        if step == 1:
            raise OSError("full")

    log = forgiving(Tracker(some, lambda: closed.append(1)), "mine")
    log({"a": 0.5, "p": PICTURES}, 0)
    assert told == [({"a": 0.5}, {"p"}, 0)]
    with pytest.warns(UserWarning, match="^mine failed and is told nothing more: OSError: full$"):
        log({"a": 1.0}, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log({"a": 2.0}, 2)
        log.close()
    assert [step for *_, step in told] == [0, 1]
    assert closed == [1]
    with pytest.warns(UserWarning, match="ZeroDivisionError"):
        forgiving(Tracker(some, lambda: 1 / 0), "other").close()
    with pytest.raises(ValueError, match=r"callables.*3"):
        forgiving(3, "three")
    with pytest.raises(ValueError, match="metric 'a'"):  # control: a mistake of the caller's is none of the tracker's
        forgiving(lambda metrics, step: None, "fine")({"a": "high"}, 0)


def test_an_interrupt_is_not_forgiven():
    def stop(metrics, step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        forgiving(stop, "mine")({}, 0)


def test_what_wandb_would_refuse_is_refused_before_a_run(monkeypatch):
    monkeypatch.setattr(tracking, "_installed", lambda package: True)
    for kind in ("wandb:a/b", "wandb:" + "x" * 129):
        with pytest.raises(ValueError, match="a project's name"):
            require_tracker(kind)
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    with pytest.raises(ValueError, match="WANDB_MODE must be offline, online or disabled, got 'dryrun'"):
        require_tracker("wandb:mine")
    for mode in ("", "online"):
        monkeypatch.setenv("WANDB_MODE", mode)
        require_tracker("wandb:mine")
        require_tracker("wandb")


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    pytest.importorskip("tensorboard")
    with pytest.raises(ValueError, match="file' cannot be written: File exists"):
        to_tensorboard(tmp_path / "file")
    pytest.importorskip("wandb")
    with pytest.raises(ValueError, match="file' cannot be written: File exists"):
        to_wandb("p", folder=tmp_path / "file")


def events_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return read


def test_tensorboard_has_the_numbers_with_gaps_and_the_pictures(tmp_path):
    pytest.importorskip("tensorboard")
    with to_tensorboard(tmp_path) as log:
        for step, loss in enumerate((0.5, math.nan, 0.25)):
            log({"loss/update_1": loss, "eval/pictures": PICTURES}, step)
    read = events_of(tmp_path)
    assert [(e.step, e.value) for e in read.Scalars("loss/update_1")] == [(0, 0.5), (2, 0.25)]
    assert read.Tags()["images"] == ["eval/pictures"]
    images = read.Images("eval/pictures")
    assert [image.step for image in images] == [0, 1, 2]
    assert (images[0].width, images[0].height) == (12, 4)  # side by side


def test_a_tensorboard_that_goes_on_forgets_what_is_done_again(tmp_path):
    pytest.importorskip("tensorboard")
    for begin, values in ((None, (0.0, 1.0, 2.0)), (1, (10.0, 20.0))):
        with to_tensorboard(tmp_path, start=begin) as log:
            for step, value in enumerate(values, begin or 0):
                log({"x": value}, step)
    assert [(e.step, e.value) for e in events_of(tmp_path).Scalars("x")] == [(0, 0.0), (1, 10.0), (2, 20.0)]


def test_wandb_offline_writes_a_run_that_can_be_synced(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with to_wandb("numbers", folder=tmp_path, name="mine", run_id="one", config={"lr": 0.1}) as log:
        assert wandb.run.settings._offline if hasattr(wandb.run.settings, "_offline") else wandb.run.offline
        log({"loss": 0.5, "none": math.nan, "eval/pictures": PICTURES}, 0)
        log({"loss": 0.25}, 3)
    wandb.teardown()  # its service writes behind our back, until it ends with the process
    (folder,) = (tmp_path / "wandb").glob("offline-run-*-one")
    assert (folder / "run-one.wandb").stat().st_size > 100
    assert len(list((folder / "files" / "media" / "images").rglob("*.png"))) == 2
    assert b"loss" in (folder / "run-one.wandb").read_bytes()


def test_wandb_is_told_gaps_steps_and_options(tmp_path, monkeypatch):
    """Against a stand-in, where the package is not installed too."""
    told = {}

    class Run:
        def log(self, metrics, step):
            told.setdefault("rows", []).append((metrics, step))

        def finish(self):
            told["finished"] = True

    class Stub:
        Settings = staticmethod(lambda **options: options)
        Image = staticmethod(lambda pixels: pixels.shape)
        init = staticmethod(lambda **options: told.update(options) or Run())

    monkeypatch.setitem(sys.modules, "wandb", Stub)
    monkeypatch.setattr(tracking, "_installed", lambda package: True)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with in_folder("wandb:mine", tmp_path / "r", start=2, config={"a": 1}) as log:
        log({"x": 1.0, "y": math.inf, "p": PICTURES.repeat(20, 1, 1, 1)}, 2)
    assert told["rows"] == [({"x": 1.0, "p": [(4, 6, 3)] * 16}, 2)]
    assert (told["project"], told["mode"], told["name"], told["config"]) == ("mine", "disabled", "r", {"a": 1})
    assert told["finished"]
    assert "id" not in told
    monkeypatch.delenv("WANDB_MODE")
    in_folder("wandb", tmp_path / "r").close()
    assert (told["project"], told["mode"]) == ("diffrl", "offline")
    with pytest.raises(ValueError, match=r"mode must be.*'on'"):
        to_wandb("p", mode="on")


def test_what_is_not_installed_is_refused_with_the_command(monkeypatch, tmp_path, toy, capsys):
    monkeypatch.chdir(tmp_path)
    for kind, made in (("tensorboard", functools.partial(to_tensorboard, "board")), ("wandb", lambda: to_wandb("p"))):
        monkeypatch.setitem(sys.modules, kind, None)
        for refused in (made, lambda kind=kind: require_tracker(kind)):
            with pytest.raises(ImportError, match=rf"pip install 'diffrl\[{kind}\]'"):
                refused()
        assert main(["train", "--track", kind, "--output=r", "--no-pictures"]) == 2
        assert f"pip install 'diffrl[{kind}]'" in capsys.readouterr().err
    assert main(["train", "--track", "tensorbord", "--output=r"]) == 2
    assert "got 'tensorbord' (did you mean 'tensorboard'?)" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    require_tracker("jsonl")  # control: needs nothing
    assert set(TRACKERS) == {"tensorboard", "wandb", "jsonl"}


# ---- a run


def test_a_run_tells_its_tracker_every_row_and_the_pictures(tmp_path, monkeypatch):
    pipe = save_small_pipeline(tmp_path / "small")
    s = Settings(**small_settings(pipe, iterations=4, eval_every=2))
    told, begun = [], []

    def tracker(folder, s, start):
        assert (folder / "metrics.jsonl").is_file()
        begun.append(start)
        return together(lambda metrics, step: told.append((step, metrics)))

    rows = run(tmp_path / "r", s, pictures=False, tracker=tracker)
    assert [step for step, _ in told] == [0, 1, 2, 3]
    for (_, metrics), row in zip(told, rows, strict=True):
        assert {n: v for n, v in metrics.items() if n != "eval/pictures"} == row
        assert ("eval/pictures" in metrics) == ("eval/reward" in row)
    assert told[0][1]["eval/pictures"].shape[0] == 4  # one of each prompt
    assert not torch.equal(told[0][1]["eval/pictures"], told[3][1]["eval/pictures"])
    assert "eval/pictures" not in told[2][1]
    run(tmp_path / "r", resume=True, iterations=5, pictures=False, tracker=tracker)
    assert begun == [0, 4]
    assert [step for step, _ in told] == [0, 1, 2, 3, 4]


def test_a_tracker_is_closed_where_the_run_is_interrupted(tmp_path, toy):
    closed = []

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "r", TOY, pictures=False, tracker=lambda *_: Tracker(stop, lambda: closed.append(1)))
    assert closed == [1]


def test_track_on_the_command_line(tmp_path, monkeypatch, toy, capsys):
    monkeypatch.chdir(tmp_path)
    small = [
        "--iterations=2",
        "--group-size=4",
        "--prompts-per-iteration=2",
        "--steps=4",
        "--threads=1",
        "--quiet",
        "--eval-every=1",
    ]
    assert main(["train", *small, "--track=jsonl", "--output=r", "--no-pictures"]) == 0
    assert main(["train", "--resume=r", "--iterations=3", "--track=jsonl", "--quiet", "--no-pictures"]) == 0
    rows = lines_of("r/metrics.jsonl")[1:]
    assert lines_of("r/track.jsonl") == [{"step": row["iteration"], **row} for row in rows]
    pytest.importorskip("tensorboard")
    assert main(["train", *small, "--track=tensorboard", "--output=s", "--no-pictures"]) == 0
    assert [e.step for e in events_of("s/tensorboard").Scalars("reward/mean")] == [0, 1]


# ---- the table of metrics

ROOT = Path(__file__).parents[1]


def table(text):
    """{pattern: whether it is marked as not emitted by the runs below} of the rows of a markdown table of names."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if line.startswith("| `"):
            for name in re.findall(r"`([^`]+)`", cells[0]):
                found[name] = "(elsewhere)" in cells[-1]
    return found


def matches(pattern, name):
    """Whether a name is of a documented family: U a number, T a time, X any further part."""
    parts = {"U": r"\d+", "T": r"\d\.\d{3}"}
    return re.fullmatch("".join(parts.get(p, re.escape(p)) for p in re.split(r"(?<=[_=])([UT])\b", pattern)), name)


def documented():
    return table((ROOT / "docs" / "metrics.md").read_text())


def unknown(names, patterns):
    return sorted(name for name in names if not any(matches(p, name) for p in patterns))


@pytest.fixture(scope="module")
def emitted(tmp_path_factory):
    """The names of two iterations of every algorithm on the toy, of a draft, an engine, and of whole runs."""
    names, folder = set(), tmp_path_factory.mktemp("runs")
    pipe = save_small_pipeline(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ALGORITHMS:
            algorithm = make_algorithm(Settings(algorithm=name, steps=5))
            for row in rows_of(start(toy_model(), algorithm), 2):
                names |= set(row)
        model = toy_model()
        drafting = sol_rl(art(), draft=lambda p: (model.velocity, p), pool=12, keep=2, draft_steps=2, audit_every=1)
        names |= set(rows_of(start(model, drafting, group_size=4), 1)[0])
        small = small_settings(pipe, iterations=2, held_out_reward="jpeg_incompressibility", reward="small:reader")
        settings = [Settings(**small), replace(Settings(**small), iterations=1)]
        engine = {"engine": "in_process", "fragments": 2, "reward": "jpeg_compressibility"}
        settings.append(replace(Settings(**small), draft="nvfp4", pool=8, draft_steps=2, audit_every=1, iterations=1))
        settings.append(replace(Settings(**small), **engine))
        for i, s in enumerate(settings):
            log = to_jsonl(folder / f"{i}.jsonl")
            told = together(log, lambda metrics, step: names.update(metrics))
            run(folder / str(i), s, pictures=False, tracker=lambda *_, told=told: told)
    return names


def test_every_metric_that_is_told_is_in_the_table(emitted):
    assert unknown(emitted, documented()) == []


def test_every_metric_of_the_table_is_told_or_marked(emitted):
    silent = {p for p in documented() if not any(matches(p, name) for name in emitted)}
    assert silent == {p for p, elsewhere in documented().items() if elsewhere}


def test_control_a_name_that_is_not_in_the_table_is_found(emitted):
    patterns = documented()
    assert unknown({"loss/update_12", "std/t=0.900", "loss", "los", "loss/update_x", "loss/updat"}, patterns) == [
        "los",
        "loss/updat",
        "loss/update_x",
    ]
    assert unknown(emitted, {p for p in patterns if p != "grad_norm"}) == ["grad_norm"]
    assert table("| `a`, `b/U` | text | (elsewhere) |\n| c |") == {"a": True, "b/U": True}
    assert len(patterns) > 40
