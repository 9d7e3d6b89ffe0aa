"""What is told of the version, and of the pins, in several places is the same; what the distributions must hold."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import installing
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from diffrl.cli import main
from diffrl.version import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TREE = {"diffrl/__init__.py", "README.md", "tests/conftest.py", *installing.MUST}


def headings(text: str) -> list[tuple[str, str]]:
    """(version, rest) of the changelog's second-level headings, in Keep a Changelog's form: `## [1.2.3] - 2026-01-31`."""
    return re.findall(r"^## \[([^]]+)\](.*)$", text, flags=re.MULTILINE)


def released(text: str) -> list[str]:
    return [name for name, rest in headings(text) if re.fullmatch(r" - \d{4}-\d\d-\d\d", rest)]


def pins(name: str) -> dict[str, Version]:
    """{normal name: version} of a file of exact pins."""
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line]
    return {re.sub(r"[-_.]+", "-", key).lower(): Version(value) for key, value in pairs}


def bounds(extras: tuple[str, ...]) -> dict[str, Version]:
    """The lower bounds of the dependencies and of some extras; every one of them has exactly one bound, and it is a lower one."""
    project, found = PROJECT["project"], {}
    for line in [*project["dependencies"], *(x for extra in extras for x in project["optional-dependencies"][extra])]:
        requirement = Requirement(line)
        if requirement.name != "diffrl":
            (only,) = requirement.specifier
            assert only.operator == ">=", line
            found[requirement.name.lower()] = Version(only.version)
    return found


# ---- the version


def test_the_changelogs_newest_release_is_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert released(text)[0] == __version__
    assert text.count("\n## ") == len(headings(text))  # no heading in another form
    assert all(name == "Unreleased" or name in released(text) for name, _ in headings(text))


def test_control_a_release_without_a_date_is_none():
    assert released("## [9.9.9]\n## [9.9.8] (unreleased)\n## 9.9.7 - 2026-01-01\n## [9.9.6] - 2026-01-01\n") == [
        "9.9.6"
    ]


def test_packaging_reads_the_one_version():
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "diffrl.version.__version__"}
    assert installing.version_of(ROOT) == __version__ == str(Version(__version__))
    assert not re.search(r"\d+\.\d+\.\d+", (ROOT / "diffrl" / "__init__.py").read_text())


def test_the_package_tells_it_without_torch_and_the_command_tells_it(capsys):
    code = "import sys, diffrl; assert 'torch' not in sys.modules; print(diffrl.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == f"{__version__}\n"
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"diffrl {__version__}\n"


# ---- the bounds


def test_the_oldest_that_is_tested_is_the_oldest_that_is_allowed():
    oldest, lowest = pins("constraints-oldest.txt"), bounds(("models", "rewards", "plots"))
    untried = {"torch"}  # its old releases have no build for the CPU alone
    assert {name: oldest[name] for name in lowest if name not in untried} == {
        name: bound for name, bound in lowest.items() if name not in untried
    }
    assert all(oldest[name] >= lowest[name] for name in untried)


def test_the_newest_pins_are_allowed_and_not_older():
    newest, oldest = pins("constraints.txt"), pins("constraints-oldest.txt")
    extras = tuple(PROJECT["project"]["optional-dependencies"])
    for name, bound in bounds(tuple(x for x in extras if x != "tesseract")).items():
        assert newest[name] >= bound, name
        assert newest[name] >= oldest.get(name, newest[name]), name


# ---- what is distributed


def archives() -> tuple[dict[str, str], dict[str, str]]:
    info = f"diffrl-{__version__}.dist-info"
    meta = ("METADATA", "WHEEL", "RECORD", "top_level.txt", "entry_points.txt", "licenses/LICENSE")
    wheel = {name: "" for name in TREE if name.startswith("diffrl/")} | {f"{info}/{name}": "" for name in meta}
    return wheel, dict.fromkeys({*TREE, "PKG-INFO", "setup.cfg", "diffrl.egg-info/SOURCES.txt"}, "")


def test_archives_that_hold_the_tree_have_no_fault():
    assert installing.faults_of(*archives(), TREE, __version__) == []


@pytest.mark.parametrize("name", ["runs/demo/metrics.jsonl", "tests/__pycache__/x.pyc", "diffrl/gone.py"])
def test_control_litter_is_found(name):
    wheel, sdist = archives()
    assert installing.faults_of(wheel, {**sdist, name: ""}, TREE, __version__) == [f"the sdist holds {name}"]
    assert installing.faults_of({**wheel, name: ""}, sdist, TREE, __version__) == [f"the wheel holds {name}"]


@pytest.mark.parametrize("name", sorted(installing.MUST))
def test_control_what_is_left_out_is_found(name):
    wheel, sdist = archives()
    del wheel[name]
    assert installing.faults_of(wheel, sdist, TREE, __version__) == [f"the wheel lacks {name}", f"{name} is nowhere"]
