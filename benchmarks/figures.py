"""Every measured figure of the README and of docs/, by one command: `python benchmarks/figures.py [NAME ...]`.

Runs the commands below one after the other (no names: all of them, hours; the ablations and the demo keep finished runs and go on
where they were), stores what each prints in benchmarks/results/NAME.md and writes it where a page quotes it:

    <!-- figure: NAME 2 -->          the second table that NAME prints (1 where no number stands; `text`: everything, as it is)
    <!-- end figure -->

--fill runs nothing and only writes the stored figures into the pages; --check says whether that would change one. A table of
measured numbers stands in such a block or not at all (tests/test_figures.py).
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
QUESTIONS = (
    *("efficiency", "transfer", "restoration", "trust_region", "group_size", "branches", "shrinkage", "noise_bins"),
    *("several_rewards", "diversity", "force", "staleness", "fp4"),
)
COMMANDS = {
    "demo": "benchmarks/demo.py",
    "loop": "benchmarks/loop.py",
    "algorithms": "benchmarks/algorithms.py --rounds 2",
    "packing": "benchmarks/packing.py",
    "schedules": "benchmarks/schedules.py",
    "executors": "benchmarks/executors.py",
    "overlap": "benchmarks/overlap.py",
    "quant": "benchmarks/quant.py --rounds 3",
    **{question: f"ablations/{question}.py" for question in QUESTIONS},
    "stability": 'ablations/stability.py --pieces "ART steady" --sizes 2',
}
"""Name -> arguments of python."""
BLOCK = re.compile(r"<!-- figure: (?P<name>[a-z0-9_]+)(?: (?P<which>\d+|text))? -->\n.*?<!-- end figure -->", re.DOTALL)


def pages() -> list[Path]:
    """The README and every page of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def printed(output: str) -> str:
    """What a command printed, without lines that name a path of this machine."""
    kept = [line.rstrip() for line in output.splitlines() if str(ROOT) not in line]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip() + "\n"


def tables(text: str) -> list[str]:
    """The markdown tables in a text, in order."""
    return [match.group().strip("\n") for match in re.finditer(r"(?:^\|.*\|[ ]*(?:\n|\Z))+", text, re.MULTILINE)]


def quoted(name: str, which: str | None, text: str) -> str:
    """The block of a page: its figure, and the command that prints it. ValueError: not so many tables."""
    if which == "text":
        body = f"```text\n{text.strip()}\n```"
    else:
        found, number = tables(text), int(which or 1)
        if not 1 <= number <= len(found):
            raise ValueError(f"figure {name} has {len(found)} tables, asked for number {number}")
        body = found[number - 1]
    head = f"<!-- figure: {name}{' ' + which if which else ''} -->"
    return f"{head}\n{body}\n\n*`python {COMMANDS[name]}`*\n<!-- end figure -->"


def filled(page: str) -> str:
    """A page with every block of a stored figure written anew. ValueError: a figure that no command here makes, or that has
    not been stored."""

    def block(match: re.Match) -> str:
        name = match["name"]
        if name not in COMMANDS:
            raise ValueError(f"unknown figure {name!r}; known: {', '.join(COMMANDS)}")
        stored = RESULTS / f"{name}.md"
        if not stored.exists():
            raise ValueError(f"figure {name!r} is not stored: python benchmarks/figures.py {name}")
        return quoted(name, match["which"], stored.read_text())

    return BLOCK.sub(block, page)


def measure(name: str) -> None:
    """Run a figure's command and store what it prints; progress goes to this terminal."""
    began = time.perf_counter()
    command = [sys.executable, *shlex.split(COMMANDS[name])]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(printed(done.stdout))
    tqdm.write(f"{name}: {time.perf_counter() - began:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(COMMANDS)}; none: all")
    parser.add_argument("--fill", action="store_true", help="run nothing: write stored figures into the pages")
    parser.add_argument(
        "--check", action="store_true", help="write nothing: exit code 1 where --fill would change a page"
    )
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(COMMANDS)):
        parser.error(f"unknown figures {unknown}; known: {', '.join(COMMANDS)}")
    if not (options.fill or options.check):
        for name in tqdm(options.names or list(COMMANDS), desc="figures"):
            measure(name)
    changed = [page for page in pages() if filled(page.read_text()) != page.read_text()]
    for page in changed:
        print(f"{page.relative_to(ROOT)} {'is out of date' if options.check else 'written'}")
        if not options.check:
            page.write_text(filled(page.read_text()))
    return int(bool(options.check and changed))


if __name__ == "__main__":
    sys.exit(main())
