"""The command line: help, exit codes, one clear line for bad input with nothing written, and what is printed.

Negative controls are the tests with `control` in their names.
"""

import io
import json
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

from diffrl import cli, cli_text
from diffrl import run as run_module
from diffrl import settings as settings_module
from diffrl.algorithms import art
from diffrl.cli import Parser, main, make_parser, summary
from diffrl.cli_options import NOT_THE_DOCTOR_S, option_of
from diffrl.cli_text import announcement, facts, outcome, painted, piece, size, width
from diffrl.loop import Check, Report
from diffrl.run import Interrupted
from diffrl.settings import Bench, Judge, Settings
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model
from diffrl.tracking import Tracker
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
        if command == "doctor" and field.name in NOT_THE_DOCTOR_S:
            assert f"{option_of(field.name)} " not in text
            continue
        default = "off" if field.default is False else "none" if field.default in (None, "") else str(field.default)
        option = re.escape(f"{option_of(field.name)} ")
        assert re.search(rf"{option}([A-Z]+ )?[a-z].*?\(default: {re.escape(default)}\)", text), field.name
    for option in ("--output FOLDER", "--resume FOLDER", "--overwrite", "--no-pictures", "--quiet", "--track KIND"):
        assert (option in text) == (command == "train")


@pytest.mark.parametrize("command", [[], ["train"], ["doctor"], ["plan"], ["pretrain"]])
def test_help_has_examples_that_parse_exit_codes_and_a_default_for_every_option(command, capsys, monkeypatch):
    assert called(*command, "--help") == 0
    text = capsys.readouterr().out
    assert all(f"\n  {code:<4} " in text for code in (0, 1, 2, 130))
    commands = re.findall(r"^  (?:diffrl|torchrun .*diffrl.cli) (.*)$", text.replace(" \\\n", " "), re.MULTILINE)
    assert commands
    for line in commands:
        make_parser().parse_args(line.partition(" > ")[0].split())
    options = re.split(r"^  (?=-)", text.split("examples:")[0], flags=re.MULTILINE)[1:]
    bare = [o.split()[0] for o in options if not re.search(r"\((default: |required\))", " ".join(o.split()))]
    assert bare == ["-h,"] if command else ["-h,", "--version"]


@pytest.mark.parametrize("columns", [60, 100])
def test_help_is_as_wide_as_the_shell(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert called("train", "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert columns - 15 < max(map(len, lines)) <= columns
    with pytest.raises(SystemExit):  # control: a broken example is one command all the same
        make_parser().parse_args(["train", "\\"])


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
        (["--verison"], r"required: COMMAND \(did you mean --version\?\)$"),
        (["train", "--algoritm", "art"], r"--algoritm art \(did you mean --algorithm\?\)$"),
        (
            ["doctor", "--iterations", "3"],
            r"--iterations 3 \(an option of diffrl train that the doctor does not use\)$",
        ),
        (["plan", "--modle", "x"], r"required: --model.* \(did you mean --model\?\)$"),
        (
            ["plan", "--model=x", "--height=8", "--width=8", "--dtype=bfloat"],
            r"'bfloat'.*\(did you mean 'bfloat16'\?\)$",
        ),
        (["pretrain", "digit", "--output", "x"], r"\(did you mean 'digits'\?\)$"),
        (["train", "--zzz"], r"unrecognized arguments: --zzz$"),
        (["train", "--iterations", "many"], r"argument --iterations: invalid int value: 'many'$"),
        (["train", "--learning-rate"], r"argument --learning-rate: expected one argument$"),
        (["train", "stray"], r"unrecognized arguments: stray$"),
        (["trian"], r"invalid choice: 'trian'.*\(did you mean 'train'\?\)$"),
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
        ({"task": "digit"}, r"--task .*, got 'digit' \(did you mean 'digits'\?\)$"),
        ({"algorithm": "ppo"}, "--algorithm must be one of .*, got 'ppo'$"),
        ({"algorithm": "flow-gpro"}, r"got 'flow-gpro' \(did you mean 'flow_grpo'\?\)$"),
        ({"reward": "beauty"}, "--reward must be one of .*, got 'beauty'$"),
        ({"reward": "orc"}, r"got 'orc' \(did you mean 'ocr'\?\)$"),
        ({"engine": "in-proces"}, r"got 'in-proces' \(did you mean 'in_process'\?\)$"),
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
        ({"threads": 0}, "--threads must be an integer >= 1, got 0"),
        ({"lora_rank": 10**30}, r"--lora-rank must be below 2\*\*31, got 10"),
        ({"micro_batch": 2**31}, r"--micro-batch must be below 2\*\*31, got 2147483648"),
        ({"model": ""}, "--model '' is empty"),
        ({"images": ""}, "--images '' is empty"),
        ({"held_out_reward": "beauty"}, "--held-out-reward must be one of .*, got 'beauty'"),
        ({"held_out_reward": "nowhere:f"}, "--held-out-reward 'nowhere:f' cannot be imported"),
        ({"reward": "small:wrong_length"}, r"reward must return one number per image, shape \(8,\), got shape \(9,\)"),
        ({"reward": "small:always_raises"}, "reward raised for all 8 images: RuntimeError: no weights of any kind"),
    ],
)
def test_bad_settings_are_one_line_and_leave_nothing(here, capfd, pipe, changed, message):
    assert called("train", *words(small_settings(pipe, **changed)), "--output=out", "--quiet") == 2
    out, err = capfd.readouterr()
    line = one_line(err)
    assert out == "" or "small:" in str(changed["reward"])  # such a reward is found out by the first evaluation
    assert line.startswith("diffrl train: error: ")
    assert re.search(message, line)
    assert not list(here.iterdir())


def test_control_the_same_settings_without_a_mistake_train(here, capfd, pipe):
    assert called("train", *words(small_settings(pipe, iterations=1)), "--output=out", "--quiet", "--no-pictures") == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert re.search(r"^samples +2 x 4 = 8 per iteration in 3 steps, 8 in all$", out, re.MULTILINE)
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


@pytest.mark.parametrize("option", ["--output", "--resume"])
def test_an_empty_folder_is_not_the_default_one(here, capsys, option):
    assert called("train", f"{option}=") == 2
    assert one_line(capsys.readouterr().err) == f"diffrl train: error: {option} '' is empty"
    assert not list(here.iterdir())


def test_doctor_refuses_threads_that_cannot_be(here, capsys):
    assert called("doctor", "--threads=0") == 2
    assert "--threads must be an integer >= 1, got 0" in one_line(capsys.readouterr().err)


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
    assert out.count("ok  ") == 8
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
    settings = {name: value for name, value in settings.items() if name not in NOT_THE_DOCTOR_S}
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
        "eval/exact_match: 0.5000",
        "eval/reward: 0.2500 -> 0.7500",
        "3 iterations, 3 s; written: a, b",
    ]


def test_one_evaluation_is_not_two(tmp_path):
    """An interrupted run knows how it began, not how it ended."""
    told = outcome(tmp_path, [{"iteration": 0, "eval/reward": 0.25}, {"iteration": 1}])
    assert told["eval/reward"] == [0.25, None]
    told = outcome(tmp_path, [{"iteration": 0, "eval/reward": 0.5, "base/reward": 0.25}])
    assert told["eval/reward"] == [0.25, 0.5]


def test_the_announcement_says_what_a_sample_depends_on():
    s = Settings(task="prompts", steps=7)
    bench = Bench(toy_model(), list(PROMPTS), Judge(toward_compass), None, art())
    assert "sampling    the pipeline's own pixels, 7 steps, guidance the pipeline's own, text tokens" in announcement(
        Path("r"), s, bench
    ).replace("\n            ", " ")
    bench = bench._replace(
        options={"height": 24, "width": 32, "frames": 9, "guidance_scale": 1.0, "max_sequence_length": 5}
    )
    assert "24 x 32 pixels, 9 frames, 7 steps, guidance 1.0, text tokens 5" in announcement(Path("r"), s, bench)


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


def test_version_help_and_a_mistyped_command_need_no_torch():
    """They answer at once, and so does Ctrl-C while torch is imported: by then `main` is there."""
    code = "import sys; from diffrl.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    for words_given in (["--version"], ["--help"], ["trian"], ["pretrain", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *words_given], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    done = subprocess.run([sys.executable, "-c", code, "train", "--help"], capture_output=True, text=True, timeout=300)
    assert "AssertionError" in done.stderr  # control: the options of train are those of its settings, which need it


IN_A_SHELL = """
import os, sys
import torch
from diffrl import cli, run, settings
from diffrl.settings import Bench, Judge
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model
def noisy(points, prompts):
    os.write(1, b"from below\\n")
    return toward_compass(points, prompts)
def build(s):
    if "stop" in os.environ:
        os.kill(os.getpid(), int(os.environ["stop"]))
    return Bench(toy_model(), list(PROMPTS), Judge(noisy), None, settings.make_algorithm(s))
run.build = build
sys.exit(cli.main())
"""


def shell(folder, ending="", **environment):
    """`diffrl train` of the toy in a shell, with redirections at the end of the line."""
    (folder / "toy.py").write_text(IN_A_SHELL)
    line = f"{sys.executable} toy.py train {' '.join(TOY)} --no-pictures --output=r {ending}"
    root = str(Path(cli.__file__).parents[1])
    return subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=300,
        env={**os.environ, "PYTHONPATH": root, **environment},
    )


def test_what_is_printed_below_python_does_not_come_between_the_lines(here):
    done = shell(here, "--json --quiet")
    assert done.returncode == 0, done.stderr
    assert len([json.loads(line) for line in done.stdout.splitlines()]) == 5
    assert "from below" in done.stderr


def test_a_path_that_the_locale_cannot_show_is_escaped(here):
    done = shell(here, "--output=snow☃ --quiet", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "snow\\u2603: metrics.jsonl" in done.stdout


def test_closed_streams_do_not_stop_a_run(here):
    done = shell(here, "--json >&- 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len((here / "r" / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_sigterm_while_the_model_loads_is_130(here):
    done = shell(here, stop="15")
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "diffrl train: interrupted"
    assert not (here / "r").exists()


# ---- what is said beforehand


def test_what_will_be_done_is_counted_and_written(here, capsys, pipe):
    """Against the run itself: its tensors, its rows and its files."""
    s = Settings(**small_settings(pipe, iterations=5, algorithm="nft", trained_steps="auto"))
    bench = settings_module.build(s)
    told = facts(s, bench)
    rows = run_module.run(here / "r", s, pictures=False)
    module = bench.model.module
    assert told["parameters"] == sum(p.numel() for p in module.parameters())
    assert told["trained_parameters"] == sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert told["evaluations"] == sum("eval/reward" in row for row in rows)
    assert told["optimizer_steps"] == sum(n.startswith("loss/update_") for row in rows for n in row)
    assert (told["samples_per_iteration"], told["samples"], told["samples_per_evaluation"]) == (8, 40, 8)
    assert told["pieces"]["credit"] == "optimality_credit"
    sizes = {
        name: sum(p.stat().st_size for p in [here / "r" / name, *(here / "r" / name).glob("**/*")] if p.is_file())
        for name in told["bytes"]
    }
    assert 0.5 < told["bytes"]["metrics.jsonl"] / sizes["metrics.jsonl"] < 2
    assert 0.5 < told["bytes"]["checkpoint"] / sizes["checkpoint"] < 2
    assert 0.25 < told["bytes"]["adapter"] / sizes["adapter"] <= 1  # of so small a one names are the most
    assert facts(s, bench, 3)["evaluations"] == sum("eval/reward" in row for row in rows[3:])


def test_the_announcement_fits_the_shell_and_names_every_piece(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    s = Settings(draft="policy", pool=20, draft_steps=4, encoders_off=True, gradient_checkpointing=True, micro_batch=3)
    bench = Bench(toy_model(), list(PROMPTS), Judge(toward_compass), None, settings_module.make_algorithm(s))
    text = announcement(Path("r"), s, bench)
    assert max(map(len, text.splitlines())) <= 70
    flat = " ".join(text.split())
    for part in (
        *(
            "covariance_credit",
            "guided_regression",
            "objective",
            "behaviour live",
            "3 of 8 steps",
            "20 seeds per prompt in 4 steps",
        ),
        *(
            "9 parameters (100.00%) in 2 tensors",
            "8 x 16 = 128 per iteration",
            "4 times 16 samples",
            "2 per iteration, 120 in all",
        ),
        *(
            "micro batch 3",
            "gradient checkpointing, encoders off the device",
            "drafts.png",
            "checkpoint/ every 5 (about 25.1 kB)",
        ),
    ):
        assert part in flat
    assert "VAE" not in flat
    assert "curve.png" not in announcement(Path("r"), s, bench, pictures=False)


def test_small_words_about_sizes_and_pieces():
    assert [size(n) for n in (0, 999, 5300, 2.5e9, 3e15)] == ["0 B", "999 B", "5.3 kB", "2.5 GB", "3e+03 TB"]
    assert piece(partial(partial(toy_run, iterations=1))) == "toy_run"
    assert width() >= 40


class Terminal:
    def isatty(self):
        return True


def test_colour_is_for_terminals_without_no_color(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert painted("x", "red", Terminal()) == "\x1b[31mx\x1b[0m"
    assert painted("x", "red", io.StringIO()) == "x"
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            assert painted("x", "red", Terminal()) == "x"
    monkeypatch.setenv("NO_COLOR", "")  # no-color.org: present and not empty
    assert painted("x", "red", Terminal()) != "x"


# ---- for machines


def machine_lines(capsys):
    out, err = capsys.readouterr()

    def refuse(token):
        raise AssertionError(f"{token} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in out.splitlines()], err


def test_json_of_train_is_settings_rows_and_summary(here, capsys, toy):
    assert called("train", *TOY, "--no-pictures", "--quiet", "--output=r", "--json") == 0
    (head, *rows, last), err = machine_lines(capsys)
    written = [json.loads(line) for line in (here / "r" / "metrics.jsonl").read_text().splitlines()]
    assert {name: head[name] for name in written[0]} == written[0]
    assert head["plan"]["optimizer_steps"] == 6
    assert rows == written[1:]
    assert last["summary"]["iterations"] == 3
    assert last["summary"]["interrupted"] is False
    assert last["summary"]["eval/reward"] == [rows[0]["eval/reward"], rows[-1]["eval/reward"]]
    assert "iterations  3;" in err
    assert "\x1b" not in err
    assert called("train", "--resume=r", "--iterations=5", "--no-pictures", "--quiet", "--json") == 0
    (head, *rows, last), err = machine_lines(capsys)
    assert [row["iteration"] for row in rows] == [3, 4]
    assert (head["plan"]["start"], last["summary"]["iterations"]) == (3, 5)
    assert "iterations  2 of 5, from 3 on;" in err


@pytest.mark.parametrize("what", ["wrong input", "a run that had begun"])
def test_json_of_a_failure_ends_with_the_error(here, capsys, toy, what):
    calls = []

    def broken(points, prompts):  # once the base is evaluated
        calls.append(len(points))
        if len(calls) > 1:
            raise RuntimeError("no\n engine")
        return toward_compass(points, prompts)

    if what == "wrong input":
        code, words = 2, ["--resume=nowhere"]
    else:
        code, words = 1, [*TOY, "--quiet", "--output=r"]
        toy["reward"] = broken
    assert called("train", *words, "--no-pictures", "--json") == code
    lines, err = machine_lines(capsys)
    assert list(lines[-1]) == ["error"]
    assert ("no engine" if code == 1 else "nowhere") in lines[-1]["error"]
    assert lines[-1]["error"] in err
    assert len(lines) == (1 if code == 2 else 2)


def test_what_a_reward_prints_does_not_come_between_the_lines(here, capsys, toy):
    def chatty(points, prompts):
        print("hello from the reward")
        return toward_compass(points, prompts)

    toy["reward"] = chatty
    assert called("train", *TOY, "--no-pictures", "--quiet", "--output=r", "--json") == 0
    lines, err = machine_lines(capsys)
    assert len(lines) == 5
    assert "hello from the reward" in err
    assert called("train", *TOY, "--no-pictures", "--quiet", "--output=s") == 0
    assert "hello from the reward" in capsys.readouterr().out  # control: it does print


def test_what_is_not_finite_is_null_at_any_depth():
    lines = io.StringIO()
    cli._tell(lines, {"a": float("nan"), "b": [float("inf"), (1.5, {"c": -float("inf")})], "d": 3})
    assert lines.getvalue() == '{"a": null, "b": [null, [1.5, {"c": null}]], "d": 3}\n'


def test_json_of_doctor_plan_and_pretrain(here, capsys, toy, pipe, monkeypatch):
    assert called("doctor", "--group-size=8", "--steps=5", "--trained-steps=all", "--threads=1", "--json") == 0
    (report,), err = machine_lines(capsys)
    assert report["ok"] is True
    assert {check["name"] for check in report["checks"]} >= {"replay equals rollout", "rewards are finite"}
    assert err.count("ok  ") == 8
    for memory, code, fits in (("80", 0, True), ("1e-6", 1, False)):
        assert called("plan", "--model", pipe, "--height=32", "--width=64", f"--gpu-memory={memory}", "--json") == code
        (told,), err = machine_lines(capsys)
        assert told["bytes_on_device"] == sum(line["bytes"] for line in told["lines"] if line["on_device"])
        assert told["fits"] is fits
        assert "on the device" in err
    monkeypatch.setattr(
        "diffrl.tasks.pretrain.pretrain_digits", lambda output, **o: Path(output).mkdir() or print("loss")
    )
    assert called("pretrain", "digits", "--output=mine", "--json") == 0
    assert machine_lines(capsys) == ([{"output": "mine", "task": "digits", "seed": 0, "files": []}], "loss\n")


def test_a_reader_that_goes_away_ends_the_command_with_1(here, capsys, toy, monkeypatch):
    def gone(self, record):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(cli, "_tell", gone)
    assert called("train", *TOY, "--no-pictures", "--quiet", "--output=r", "--json") == 1
    assert "error" not in capsys.readouterr().err


# ---- a run that fails after it has begun is 1, and says how to go on


def test_a_failure_after_the_beginning_is_1_and_names_the_checkpoint(here, capsys, toy, monkeypatch):
    real = run_module.save_checkpoint

    def once(folder, **options):
        if options["iteration"] > 1:
            raise OSError(28, "No space left on device")
        return real(folder, **options)

    monkeypatch.setattr(run_module, "save_checkpoint", once)
    assert called("train", *TOY, "--checkpoint-every=1", "--no-pictures", "--quiet", "--output=r") == 1
    line = one_line(capsys.readouterr().err)
    assert line.startswith("diffrl train: error: ")
    assert line.endswith("No space left on device; go on from the last checkpoint with: diffrl train --resume r")
    monkeypatch.setattr(run_module, "save_checkpoint", real)
    assert called("train", "--resume=r", "--no-pictures", "--quiet") == 0


def test_out_of_memory_is_one_line_that_says_what_helps(here, capsys, toy, monkeypatch):
    def full(s):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    monkeypatch.setattr(run_module, "build", full)
    assert called("train", *TOY, "--no-pictures", "--quiet", "--output=r") == 1
    line = one_line(capsys.readouterr().err)
    assert "CUDA out of memory. Tried to allocate 2 GiB; less memory: --micro-batch" in line


def test_control_a_mistake_of_the_library_s_own_is_not_hidden(here, toy, monkeypatch):
    monkeypatch.setattr(run_module, "build", lambda s: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        called("train", *TOY, "--no-pictures", "--quiet", "--output=r")


def test_out_of_memory_of_the_cpu_is_one_line_too(here, capsys, toy, monkeypatch):
    monkeypatch.setattr(run_module, "build", lambda s: torch.empty(2**50))
    assert called("train", *TOY, "--no-pictures", "--quiet", "--output=r") == 1
    assert "less memory: --micro-batch" in one_line(capsys.readouterr().err)


def test_a_failure_before_any_checkpoint_says_how_to_begin_again(here, capsys, toy, monkeypatch):
    def full(folder, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(run_module, "save_checkpoint", full)
        assert called("train", *TOY, "--no-pictures", "--quiet", "--output=r") == 1
    assert one_line(capsys.readouterr().err).endswith("device; begin again with: diffrl train --resume r")
    assert called("train", "--resume=r", "--no-pictures", "--quiet") == 0


# ---- a tracker that fails


def test_a_tracker_that_fails_is_told_nothing_more_and_the_run_goes_on(here, toy, monkeypatch):
    told = []

    def lost(metrics, step):
        told.append(step)
        raise ConnectionError("gone")

    monkeypatch.setattr("diffrl.tracking.to_jsonl", lambda path: Tracker(lambda n, p, s: lost(n, s), lambda: None))
    with pytest.warns(UserWarning, match="--track jsonl failed and is told nothing more: ConnectionError: gone"):
        assert called("train", *TOY, "--no-pictures", "--quiet", "--output=r", "--track=jsonl") == 0
    assert told == [0]
    assert len((here / "r" / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_tracker_that_cannot_be_made_is_1_for_the_folder_is_there(here, capsys, toy, monkeypatch):
    monkeypatch.setattr("diffrl.tracking.to_jsonl", lambda path: 1 / 0)
    assert called("train", *TOY, "--no-pictures", "--quiet", "--output=r", "--track=jsonl") == 1
    line = one_line(capsys.readouterr().err)
    assert "error: --track jsonl: division by zero; begin again with: diffrl train --resume r" in line
    assert called("train", "--resume=r", "--no-pictures", "--quiet") == 0


def test_two_projects_are_refused(here, capsys):
    assert called("train", "--track=wandb:a", "--track=wandb:b") == 2
    assert re.search(
        "--track wandb has one project, got wandb:a, wandb:b|pip install", one_line(capsys.readouterr().err)
    )


# ---- prompts that were edited in between


def test_resume_notices_prompts_that_were_edited(here, capsys, pipe):
    mine = here / "mine.txt"
    mine.write_text('the number "12"\nthe number "34"\n')
    settings = words(small_settings(pipe, prompts=mine, iterations=1))
    assert called("train", *settings, "--output=r", "--no-pictures", "--quiet") == 0
    mine.write_text('the number "12"\nthe number "43"\n')
    capsys.readouterr()
    more = ("train", "--resume=r", "--iterations=2", "--no-pictures", "--quiet")
    assert called(*more) == 2
    line = one_line(capsys.readouterr().err)
    assert re.search(
        rf"--prompts '{mine}' was changed since the run in 'r' began \(then 2 lines, sha256 \w{{12}}; now 2 lines", line
    )
    mine.write_text('\nthe number "12"  \nthe number "34"')  # control: the same prompts, written otherwise
    assert called(*more) == 0
    assert json.loads((here / "r" / "metrics.jsonl").read_text().splitlines()[0])["files"]["prompts"]["lines"] == 2


# ---- memory


def test_gradient_checkpointing_and_moved_parts_change_nothing(here, pipe):
    plain = run_module.run(here / "plain", Settings(**small_settings(pipe, iterations=2)), pictures=False)
    saving = Settings(
        **small_settings(pipe, iterations=2), gradient_checkpointing=True, encoders_off=True, vae_off=True
    )
    bench = settings_module.build(saving)
    assert bench.model.module.is_gradient_checkpointing
    rows = run_module.run(here / "saving", saving, pictures=False)
    assert [row["reward/mean"] for row in rows] == [row["reward/mean"] for row in plain]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in plain], rel=1e-4)
    assert not settings_module.build(Settings(**small_settings(pipe))).model.module.is_gradient_checkpointing


def test_outcome_by_hand(tmp_path):
    rows = [{"eval/reward": 1.0, "base/reward": 0.5, "seconds/update": 2.0}]
    told = outcome(tmp_path, rows)
    assert told == {"eval/reward": [0.5, 1.0], "iterations": 1, "seconds": 2.0, "folder": str(tmp_path), "files": []}
    assert cli_text.summary is summary
