"""The command line: help, exit codes, one clear line for bad input with nothing written, and what is printed.

Negative controls are the tests with `control` in their names.
"""

import os
import re
import subprocess
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import torch
import tqdm
from small import save_small_pipeline, small_settings, words
from toys import toy_run

from diffrl import run as run_module
from diffrl import settings as settings_module
from diffrl.cli import Parser, main, make_parser, summary
from diffrl.loop import Check, Report
from diffrl.run import Interrupted
from diffrl.settings import Bench, Judge, Settings
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model
from diffrl.version import __version__


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    return save_small_pipeline(tmp_path_factory.mktemp("small"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def called(*arguments):
    """Exit code of the command, whichever way it ends."""
    try:
        return main([str(a) for a in arguments])
    except SystemExit as stop:
        return stop.code


def one_line(text):
    (line,) = text.splitlines()
    return line


# ---- help and version


@pytest.mark.parametrize("command", ["train", "doctor"])
def test_help_lists_every_setting_with_its_default(command, capsys):
    assert called(command, "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    for field in fields(Settings):
        default = "none" if field.default in (None, "") else str(field.default)
        option = re.escape(f"--{field.name.replace('_', '-')} ")
        assert re.search(rf"{option}[A-Z]+ .*?\(default: {re.escape(default)}\)", text), field.name
    for option in ("--output", "--resume", "--overwrite", "--no-pictures", "--quiet"):
        assert (option in text) == (command == "train")


def test_a_word_far_from_every_option_gets_no_suggestion(capsys):
    parser = Parser(prog="tool")
    parser.add_argument("--colour")
    for words_given, suggestion in ((["--color", "x"], True), (["--sizes", "x"], False)):
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args(words_given)
        assert ("did you mean --colour?" in one_line(capsys.readouterr().err)) == suggestion


def test_help_of_the_rest(capsys):
    assert called("--help") == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("train", "doctor", "pretrain", "exit codes:", "130"))
    assert called("pretrain", "--help") == 0
    assert "digits" in capsys.readouterr().out


def test_version(capsys):
    assert called("--version") == 0
    assert capsys.readouterr().out == f"diffrl {__version__}\n"


def test_options_are_the_fields_with_their_types_and_defaults():
    options = vars(make_parser().parse_args(["train"]))
    assert {name: options[name] for name in vars(Settings())} == vars(Settings())
    given = vars(
        make_parser().parse_args(["train", "--guidance-scale=2", "--micro-batch=3", "--radius=1e-3", "--model=m"])
    )
    assert (given["guidance_scale"], given["micro_batch"], given["radius"], given["model"]) == (2.0, 3, 1e-3, "m")
    assert isinstance(given["guidance_scale"], float)


# ---- bad input: one line, exit code 2, nothing written


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--lerning-rate", "1"], r"--lerning-rate.*did you mean --learning-rate\?"),
        (["train", "--lerning-rate=1"], r"--lerning-rate=1.*did you mean --learning-rate\?"),
        (["train", "--iteration", "3"], r"--iteration.*did you mean --iterations\?"),
        (["doctor", "--group-sise", "3"], r"diffrl doctor.*--group-sise.*did you mean --group-size\?"),
        (["pretrain", "digits", "--outptu", "x", "--output", "y"], r"--outptu.*did you mean --output\?"),
        (["--verison"], r"--verison|COMMAND"),
        (["train", "--zzz"], r"unrecognized arguments: --zzz$"),
        (["train", "--iterations", "many"], r"argument --iterations: invalid int value: 'many'$"),
        (["train", "--learning-rate"], r"argument --learning-rate: expected one argument$"),
        (["train", "stray"], r"unrecognized arguments: stray$"),
        (["trian"], r"invalid choice: 'trian'.*train"),
        ([], r"required: COMMAND"),
        (["pretrain", "letters", "--output", "x"], r"'letters'.*digits"),
        (["pretrain", "digits"], r"required: --output"),
    ],
)
def test_what_cannot_be_parsed_is_one_line_with_the_nearest_word(here, capsys, arguments, message):
    assert called(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(message, one_line(err))
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"task": "letters"}, "--task must be one of digits, prompts, got 'letters'"),
        ({"algorithm": "ppo"}, "--algorithm must be one of .*, got 'ppo'"),
        ({"reward": "beauty"}, "--reward must be one of .*, got 'beauty'"),
        ({"reward": "nowhere:f"}, "--reward 'nowhere:f' cannot be imported"),
        ({"group_size": 1}, "--group-size.*1"),
        ({"prompts_per_iteration": 9}, "--prompts-per-iteration 9 of only 4 prompts"),
        ({"prompts": "gone.txt"}, "--prompts 'gone.txt' is no file"),
        ({"model": "gone"}, "--model 'gone'"),
        ({"trained_steps": "random:4"}, "--trained-steps.*'random:4'"),
        ({"micro_batch": 0}, "--micro-batch.*0"),
        ({"height": 25}, "height.*25"),
        ({"guidance_scale": 0.5}, "guidance_scale.*0.5"),
        ({"device": "abacus"}, "--device 'abacus'"),
        ({"learning_rate": "nan"}, "--learning-rate.*nan"),
        ({"reward": "small:wrong_length"}, r"reward must return one number per image, shape \(8,\), got shape \(9,\)"),
        ({"reward": "small:always_raises"}, "reward raised for all 8 images: RuntimeError: no weights of any kind"),
    ],
)
def test_bad_settings_are_one_line_and_leave_nothing(here, capfd, pipe, changed, message):
    assert called("train", *words(small_settings(pipe, **changed)), "--output=out", "--quiet") == 2
    out, err = capfd.readouterr()
    line = one_line(err)
    assert out == ""
    assert line.startswith("diffrl train: error: ")
    assert re.search(message, line)
    assert not list(here.iterdir())


def test_control_the_same_settings_without_a_mistake_train(here, capfd, pipe):
    assert called("train", *words(small_settings(pipe, iterations=1)), "--output=out", "--quiet", "--no-pictures") == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "1 iterations of 2 prompts x 4 samples -> out" in out
    assert "eval/reward: -" in out
    assert "written: adapter, checkpoint, metrics.jsonl" in out
    assert [p.name for p in here.iterdir()] == ["out"]


def test_empty_prompts_are_refused(here, capsys, pipe):
    (here / "empty.txt").write_text("\n")
    settings = small_settings(pipe, prompts="empty.txt")
    assert called("train", *words(settings), "--output=out") == 2
    assert "--prompts 'empty.txt' holds no prompts" in one_line(capsys.readouterr().err)
    assert [p.name for p in here.iterdir()] == ["empty.txt"]


def test_a_missing_extra_is_one_line_that_says_what_to_install(here, capsys, pipe, monkeypatch):
    for module, reward in (("rapidocr", "ocr"), ("tesserocr", "tesseract_ocr"), ("PIL", "jpeg_compressibility")):
        monkeypatch.setitem(sys.modules, module, None)
        assert called("train", *words(small_settings(pipe, reward=reward)), "--output=out", "--no-pictures") == 2
        assert "pip install 'diffrl[" in one_line(capsys.readouterr().err)
        monkeypatch.undo()
        monkeypatch.chdir(here)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert called("train", *words(small_settings(pipe)), "--output=out") == 2
    assert "matplotlib: pip install 'diffrl[plots]'" in one_line(capsys.readouterr().err)
    assert not list(here.iterdir())


def test_a_folder_that_exists_is_one_line_and_left_alone(here, capsys, pipe):
    (here / "out").mkdir()
    (here / "out" / "notes.txt").write_text("dear diary")
    for more in ([], ["--overwrite"]):
        assert called("train", *words(small_settings(pipe)), "--output=out", *more) == 2
        assert "--output 'out'" in one_line(capsys.readouterr().err)
    assert [p.name for p in (here / "out").iterdir()] == ["notes.txt"]


def test_a_read_only_place_is_one_line(here, capsys, pipe, monkeypatch):
    def read_only(self, *args, **options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", read_only)
    settings = words(small_settings(pipe))
    assert called("train", *settings, "--output=out", "--no-pictures") == 2
    assert "--output 'out' cannot be written: Read-only file system" in one_line(capsys.readouterr().err)
    assert not list(here.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_one_line(here, capsys, pipe):
    here.chmod(0o500)
    try:
        assert called("train", *words(small_settings(pipe)), "--output=out", "--no-pictures") == 2
    finally:
        here.chmod(0o700)
    assert "--output 'out' cannot be written: Permission denied" in one_line(capsys.readouterr().err)


def test_resuming_what_is_no_run_is_one_line(here, capsys):
    assert called("train", "--resume", "nowhere") == 2
    assert "'nowhere' is not a diffrl run" in one_line(capsys.readouterr().err)
    assert not list(here.iterdir())


@pytest.mark.parametrize("more", [["--group-size", "4"], ["--seed=1"], ["--output", "x"], ["--overwrite"]])
def test_settings_beside_resume_are_refused_by_name(here, capsys, more):
    assert called("train", "--resume", "r", *more) == 2
    line = one_line(capsys.readouterr().err)
    assert f"--resume reads its settings from r: {more[0].split('=')[0]} cannot be given" in line


def test_pretrain_refuses_a_folder_that_exists(here, capsys):
    (here / "out").mkdir()
    assert called("pretrain", "digits", "--output", "out") == 2
    assert one_line(capsys.readouterr().err) == "diffrl pretrain: error: --output 'out' exists"


def test_doctor_refuses_as_train_does(here, capsys):
    assert called("doctor", "--algorithm", "ppo") == 2
    assert one_line(capsys.readouterr().err).startswith("diffrl doctor: error: --algorithm must be one of")


# ---- what the commands do


@pytest.fixture
def toy(monkeypatch):
    """The toy in place of the pipeline, for train and doctor."""
    pieces = {"reward": toward_compass}

    def build(s):
        settings_module.check_settings(s)
        return Bench(toy_model(), list(PROMPTS), Judge(pieces["reward"]), None, settings_module.make_algorithm(s))

    monkeypatch.setattr(run_module, "build", build)
    monkeypatch.setattr(settings_module, "build", build)
    return pieces


TOY = ["--iterations=3", "--group-size=4", "--prompts-per-iteration=2", "--steps=4", "--threads=1"]


def test_train_then_more_iterations(here, capsys, toy):
    assert called("train", *TOY, "--no-pictures", "--quiet", "--output", "r") == 0
    assert called("train", "--resume", "r", "--iterations", "5", "--no-pictures", "--quiet") == 0
    assert "5 iterations" in capsys.readouterr().out
    assert len((here / "r" / "metrics.jsonl").read_text().splitlines()) == 6
    assert called("train", "--resume", "r", "--iterations", "2", "--no-pictures") == 2
    assert "--iterations 2" in one_line(capsys.readouterr().err)


def test_the_default_folder_names_task_and_algorithm(here, toy, capsys):
    assert called("train", *TOY, "--algorithm=art_pairwise", "--no-pictures", "--quiet") == 0
    assert (here / "runs" / "digits-art_pairwise" / "metrics.jsonl").is_file()


def test_overwrite_starts_again(here, toy, capsys):
    for more in ([], ["--overwrite"]):
        assert called("train", *TOY, "--no-pictures", "--quiet", "--output=r", *more) == 0
    assert called("train", *TOY, "--no-pictures", "--quiet", "--output=r") == 2


def test_the_progress_bar_shows_iteration_reward_and_masked_fraction(here, toy, capsys, monkeypatch):
    monkeypatch.setattr("tqdm.tqdm", partial(tqdm.tqdm, disable=False, ncols=120))
    assert called("train", *TOY, "--no-pictures", "--output=r") == 0
    *_, last = capsys.readouterr().err.replace("\r", "\n").splitlines()
    assert re.search(r"iteration: 100%.*3/3 \[\d\d:\d\d<\d\d:\d\d.*reward -\d\.\d+, masked \d\.\d+", last)
    assert called("train", *TOY, "--no-pictures", "--output=s", "--quiet") == 0
    assert capsys.readouterr().err == ""


def test_an_interrupt_is_130_with_the_command_that_goes_on(here, capsys, toy, monkeypatch):
    def interrupted(*args, **options):
        raise Interrupted("stopped after 2 of 5 iterations; go on with: diffrl train --resume r")

    monkeypatch.setattr(run_module, "run", interrupted)
    assert called("train", *TOY, "--output=r") == 130
    assert "go on with: diffrl train --resume r" in capsys.readouterr().err


def test_an_interrupt_outside_the_iterations_is_130_too(here, capsys, toy, monkeypatch):
    def stop(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "build", stop)
    assert called("train", *TOY, "--output=r") == 130
    assert one_line(capsys.readouterr().err) == "diffrl train: interrupted"
    assert not list(here.iterdir())
    monkeypatch.undo()


def test_an_interrupt_while_pictures_are_drawn_names_the_command(here, capsys, toy, monkeypatch):
    def stop(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "save_pictures", stop)
    assert called("train", *TOY, "--output=r", "--quiet") == 130
    assert "go on with: diffrl train --resume r" in capsys.readouterr().err
    assert called("train", "--resume=r", "--no-pictures", "--quiet") == 0


def test_doctor_is_0_when_all_is_well_and_prints_the_table(here, capsys, toy):
    assert called("doctor", "--group-size=8", "--steps=5", "--trained-steps=all", "--threads=1") == 0
    out, err = capsys.readouterr()
    assert out.count("ok  ") == 6
    assert "FAIL" not in out + err
    assert not list(here.iterdir())


def test_control_doctor_is_1_when_a_check_fails(here, capsys, toy):
    def holey(images, prompts):
        values = toward_compass(images, prompts)
        values[::3] = float("nan")
        return values

    toy["reward"] = holey
    assert called("doctor", "--group-size=8", "--steps=5", "--trained-steps=all", "--threads=1") == 1
    assert "FAIL  rewards are finite" in capsys.readouterr().out


def test_doctor_on_a_real_pipeline(here, capsys, pipe):
    settings = small_settings(pipe, trained_steps="all", learning_rate=1e-3)
    code = called("doctor", *words(settings))
    out = capsys.readouterr().out
    assert code in (0, 1)  # a random model need not improve
    checks = {line[6:].split("  ")[0]: line[:4].strip() for line in out.splitlines()}
    for name in (
        "same seeds, same images",
        "rewards are finite",
        "replay equals rollout",
        "gradients reach the adapter",
    ):
        assert checks[name] == "ok"


def test_pretrain_hands_its_options_on(here, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "diffrl.tasks.pretrain.pretrain_digits", lambda output, **options: seen.append((output, options))
    )
    assert called("pretrain", "digits", "--output", "mine", "--seed", "3") == 0
    assert seen == [("mine", {"seed": 3})]


def test_summary_by_hand(tmp_path):
    (tmp_path / "b").touch()
    (tmp_path / "a").mkdir()
    rows = [
        {"iteration": 0, "eval/reward": 0.25, "eval/exact_match": 0.5, "seconds/update": 1.4},
        {"iteration": 1, "seconds/update": None},
        {"iteration": 2, "eval/reward": 0.75, "eval/exact_match": None, "seconds/reward": 2.0},
    ]
    assert summary(tmp_path, rows).splitlines() == [
        "eval/exact_match: 0.5000 -> 0.5000",
        "eval/reward: 0.2500 -> 0.7500",
        "3 iterations, 3 s; written: a, b",
    ]


def test_reports_print_one_line_per_check():
    report = Report((Check("first", True, "yes"), Check("second one", None, "who knows")))
    assert str(report) == "ok    first       yes\n?     second one  who knows"
    assert report.ok
    assert not Report((Check("x", False, ""),)).ok


# ---- in a process of its own


def test_the_module_runs_as_a_program(tmp_path):
    def ran(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "diffrl.cli", *arguments], capture_output=True, text=True, cwd=tmp_path
        )

    done = ran("train", "--task", "letters")
    assert done.returncode == 2
    assert done.stdout == ""
    assert one_line(done.stderr) == "diffrl train: error: --task must be one of digits, prompts, got 'letters'"
    assert not list(tmp_path.iterdir())


def test_control_the_toy_of_these_tests_trains():
    model, rows = toy_run(iterations=1)
    assert rows[0]["loss/update_1"] == pytest.approx(1)
    assert all(isinstance(p, torch.Tensor) for p in model.params.values())


def test_the_package_is_a_command_too():
    done = subprocess.run([sys.executable, "-m", "diffrl", "--version"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("diffrl ")
