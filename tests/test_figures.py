"""Measured figures are what a command of this repository printed: every table of numbers stands in a filled block."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import figures  # noqa: E402

MEASURED = re.compile(r"(?<![\w.])\d*\.\d{2,}(?![\w.])")  # .9375, 1.03: what a table of measurements holds


def measured_tables(page: str) -> list[str]:
    """First lines of the tables outside of blocks with three decimal numbers or more, but for published constants."""
    rest = re.sub(r"<!-- constants -->\n(?:\|.*\n)+", "", figures.BLOCK.sub("", page))
    return [table.splitlines()[0] for table in figures.tables(rest) if len(MEASURED.findall(table)) >= 3]


@pytest.mark.parametrize("path", figures.pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_measured_table_is_a_stored_figure(path):
    page = path.read_text()
    assert figures.filled(page) == page, "python benchmarks/figures.py --fill"
    assert measured_tables(page) == []


def test_commands_exist_and_every_ablation_has_one():
    for arguments in figures.COMMANDS.values():
        assert (ROOT / arguments.split()[0]).is_file(), arguments
    scripts = {p.stem for p in (ROOT / "ablations").glob("*.py")} - {"common", "letters"}
    assert scripts <= set(figures.COMMANDS)


def test_stored_figures_have_a_command_and_name_no_folder_of_a_machine():
    for stored in figures.RESULTS.glob("*.md"):
        assert stored.stem in figures.COMMANDS
        assert not re.search(r"(^|[\s\"'(])/(home|work|tmp|root|Users)/", stored.read_text()), stored.name


def test_a_block_is_the_table_asked_for_with_its_command(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    (tmp_path / "loop.md").write_text("told\n\n| a |\n|---|\n| 1 |\n\nthen\n| b |\n|---|\n| 2 |\n")
    page = "x\n<!-- figure: loop 2 -->\nold\n<!-- end figure -->\ny\n<!-- figure: loop text -->\n<!-- end figure -->\n"
    filled = figures.filled(page)
    assert "| b |\n|---|\n| 2 |" in filled
    assert "| a |" not in filled.split("```text")[0]
    assert "```text\ntold" in filled
    assert "benchmarks/loop.py" in filled
    assert "old\n" not in filled.replace("told\n", "")
    assert figures.filled(filled) == filled


@pytest.mark.parametrize("name", ["loop 3", "nothing", "demo"])
def test_a_figure_that_is_not_there_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    (tmp_path / "loop.md").write_text("| a |\n|---|\n| 1 |\n")
    with pytest.raises(ValueError, match=name.split()[0]):
        figures.filled(f"<!-- figure: {name} -->\n<!-- end figure -->\n")


def test_what_is_stored_names_no_path():
    told = figures.printed(f"{ROOT}/docs/x.png\n| a |\n|---|\n| 1 |\n\n\n\nend\n")
    assert str(ROOT) not in told
    assert "\n\n\n" not in told
    assert figures.tables(told) == ["| a |\n|---|\n| 1 |"]


def test_control_a_measured_table_outside_a_block_is_found():
    page = "| seed | x |\n|---|---|\n| 0 | .9375 |\n| 1 | .9325 |\n| 2 | .9150 |\n"
    assert measured_tables(page) == ["| seed | x |"]
    assert measured_tables(f"<!-- figure: demo -->\n{page}<!-- end figure -->\n") == []
    assert measured_tables("| name | what |\n|---|---|\n| a | 1.5 |\n") == []
