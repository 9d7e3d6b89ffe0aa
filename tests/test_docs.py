"""The documentation says what is there: every module has a page, every function of the README's table is on one, links and
named tests exist, and the Python blocks of the pages that teach run. The site itself is built by `make docs`.

A block in a ```python fence is run, in order, in one namespace per page; one that cannot run offline is fenced as
`{ .python .not-run title="not run: why" }`, so that readers see it, and counted here.
"""

import ast
import html
import importlib.util
import re
import sys
import types
from functools import cache
from pathlib import Path

import pytest
import torch

from diffrl import losses

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TAUGHT = {"quick-start.md": 1, "extend/algorithm.md": 0, "extend/reward.md": 0, "extend/family.md": 0, "extend/schedule.md": 1}
"""Pages whose Python blocks are run, and how many blocks on each are not."""
WITHOUT_A_PAGE = {"", "__main__", "tasks"}  # nothing is imported from these

RUN = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_RUN = re.compile(r'^```\{ \.python \.not-run title="not run: [^"]+" \}\n(.*?)^```$', re.DOTALL | re.MULTILINE)
FENCED = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)


def modules() -> set[str]:
    """kernels, tasks.toy, ...: every module of the package."""
    found = set()
    for path in (ROOT / "diffrl").rglob("*.py"):
        parts = path.relative_to(ROOT / "diffrl").with_suffix("").parts
        found.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def documented() -> set[str]:
    """The modules that a reference page is made from, each on the page of its name."""
    found = set()
    for page in (DOCS / "reference").glob("*.md"):
        for name in re.findall(r"^::: diffrl\.(\S+)$", page.read_text(), re.MULTILINE):
            assert page.stem == name, f"{name} is on {page.name}"
            found.add(name)
    return found


def home(name: str) -> str:
    """The module in which a public function, say `sampling.interpolate`, is defined; AssertionError where there is none."""
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(f"diffrl.{module}"), attribute, None)
    assert callable(found), f"{name} is not there"
    return found.__module__.removeprefix("diffrl.")


def equation_table() -> list[str]:
    """`module.function` names of the README's table; a name without a module is of the module named before it."""
    section = (ROOT / "README.md").read_text().split("\n## Equation, function, test\n")[1]
    rows = section.split("\n|---|---|---|\n")[1].split("\n\n")[0].splitlines()
    found = []
    for row in rows:
        module = ""
        for name in re.findall(r"`([\w.]+)`", row.split(" | ")[-2]):
            module = name.rpartition(".")[0] or module
            found.append(f"{module}.{name.rpartition('.')[2]}")
    return found


def slug(heading: str) -> str:
    """The anchor that Markdown's table of contents gives a heading."""
    text = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
    return re.sub(r"[-\s]+", "-", text)


def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)}


def broken(page: Path, text: str) -> list[str]:
    """Links of a page to a file or heading of this site that is not there."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", text)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        inside = there.is_file() and DOCS in there.parents
        if not inside or (anchor and anchor not in anchors(there)):
            found.append(target)
    return found


@cache
def defined_in(file: str) -> frozenset[str]:
    path = ROOT / "tests" / file
    return frozenset(re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE) if path.is_file() else ())


def missing_tests(text: str) -> list[str]:
    """Tests named as `file::test` that are not there."""
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", text)
    return [f"{file}::{test}" for file, test in named if test not in defined_in(file)]


def run_blocks(page: str, text: str) -> int:
    """Runs the page's blocks; returns how many. Tracebacks name the page and its line."""
    namespace: dict = {"__name__": page}
    blocks = list(RUN.finditer(text))
    for block in blocks:
        above = "\n" * (text[: block.start()].count("\n") + 1)
        exec(compile(above + block[1], page, "exec"), namespace)
    return len(blocks)


# ---- pages


def test_every_module_has_a_page_that_the_site_shows():
    assert documented() == modules() - WITHOUT_A_PAGE
    listed = re.findall(r"^\| \[`([\w.]+)`\]\(\1\.md\)", (DOCS / "reference" / "index.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(documented())
    site = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        assert f" {page.relative_to(DOCS)}\n" in site, f"{page.name} is in no menu"


def test_every_function_of_the_readme_s_table_is_on_a_page():
    names = equation_table()
    assert len(names) >= 40
    assert {"losses.nft", "trust_region.ramp"} <= set(names)
    assert {home(name) for name in names} <= documented()


def test_control_a_function_that_is_not_there_has_no_page():
    with pytest.raises(AssertionError, match="is not there"):
        home("losses.no_such_loss")
    assert home("sampling.interpolate") == "kernels"
    assert home("losses.nft") == losses.nft.__module__.removeprefix("diffrl.")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(DOCS)))
def test_links_inside_the_site_lead_somewhere(page):
    assert broken(page, page.read_text()) == []


def test_control_a_broken_link_is_found():
    text = (
        "[a](concepts.md#the-loop) [b](concepts.md#no-such-heading) [c](nowhere.md) [d](../README.md) [e](https://x.y)"
    )
    assert broken(DOCS / "index.md", text) == ["concepts.md#no-such-heading", "nowhere.md", "../README.md"]


# ---- details


def test_every_detail_is_numbered_and_names_tests_that_exist():
    text = (DOCS / "details.md").read_text()
    items = re.split(r"^(\d+)\. ", text, flags=re.MULTILINE)[1:]
    numbers, details = [int(n) for n in items[::2]], items[1::2]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 40
    assert [n for n, detail in zip(numbers, details) if not re.search(r"`test_\w+\.py::test_\w+`", detail)] == []
    assert missing_tests(text) == []


def test_control_a_test_that_is_not_there_is_found():
    text = "`test_losses.py::test_golden_nft` `test_losses.py::test_no_such` `test_no_such.py::test_golden_nft`"
    assert missing_tests(text) == ["test_losses.py::test_no_such", "test_no_such.py::test_golden_nft"]


# ---- docstrings


@pytest.fixture
def docstrings(monkeypatch):
    """docs/tools/docstrings.py, which needs griffe for its base class alone."""
    monkeypatch.setitem(sys.modules, "griffe", types.SimpleNamespace(Extension=object, Object=object))
    spec = importlib.util.spec_from_file_location("docstrings", DOCS / "tools" / "docstrings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_docstrings_keep_their_characters_equations_examples_and_hanging_indents(docstrings):
    assert docstrings.escaped('x " b *d", `a_b *c`, <v - w, t - v> >= 0') == (
        'x " b \\*d", `a_b *c`, &lt;v - w, t - v&gt; &gt;= 0'
    )
    assert docstrings.markdown("A step:\n\n    mean = x_t - D v\n") == "A step:\n\n    mean = x_t - D v\n"
    assert docstrings.markdown(">>> f(1)\n2") == "```pycon\n>>> f(1)\n2\n```\n"
    listed = docstrings.markdown("a: one thing\n    and more of it\nb: another\n    and more").strip().splitlines()
    assert listed == ["- a: one thing", "    and more of it", "- b: another", "    and more"]


def test_control_prose_that_happens_to_hold_a_colon_is_no_list(docstrings):
    assert docstrings.markdown("First: this\nand then that, no list").strip() == "First: this\nand then that, no list"


def test_no_docstring_loses_a_word_on_its_way(docstrings):
    for path in sorted((ROOT / "diffrl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                shown = html.unescape(docstrings.markdown(text)).replace("\\", "")
                words = re.findall(r"\w+", shown)
                assert [w for w in words if w != "pycon"] == re.findall(r"\w+", text.replace("\\", ""))


# ---- blocks


@pytest.mark.parametrize("page", TAUGHT)
def test_the_blocks_of_a_page_that_teaches_run(page):
    threads = torch.get_num_threads()
    text = (DOCS / page).read_text()
    try:
        assert run_blocks(page, text) > 3
    finally:
        torch.set_num_threads(threads)
    assert len(NOT_RUN.findall(text)) == TAUGHT[page]


def test_every_python_block_is_run_or_says_why_not():
    for page in PAGES:
        text, name = page.read_text(), str(page.relative_to(DOCS))
        run, marked = len(RUN.findall(text)), len(NOT_RUN.findall(text))
        assert len(re.findall(r"^ *```.*py", text, re.MULTILINE)) == run + marked, name
        assert run == 0 or name in TAUGHT, f"the blocks of {name} are not run"


def test_control_a_block_that_fails_fails():
    assert run_blocks("page", "```python\na = 1\n```\n\n```python\nassert a == 1\n```\n") == 2
    with pytest.raises(AssertionError):
        run_blocks("page", "```python\na = 1\n```\n\n```python\nassert a == 2\n```\n")
