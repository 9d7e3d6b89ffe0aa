"""Does what is released install, and is everything in it? Builds both distributions, looks into them, installs each far from the source.

    python tests/installing.py [--only-build]

Exit code 1, and what was wrong, if anything does not hold. Nothing in the source tree is written: a copy of it is built, with
litter put into the copy first (caches, a run's folder, bytecode), which must not come out. Needs the extra `release`.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IGNORED = ("__pycache__", "*.egg-info", "build", "dist", "site", "runs", ".*")
LITTER = (
    *("runs/demo/metrics.jsonl", "build/lib/diffrl/gone.py", ".pytest_cache/README.md", ".hypothesis/unicode_data/x"),
    *("diffrl/__pycache__/types.cpython-311.pyc", "diffrl/tasks/digits_sd3/.DS_Store", "tests/__pycache__/x.pyc"),
    *("tests/.pytest_cache/README.md", "tests/runs/demo/metrics.jsonl", "notebooks/.ipynb_checkpoints/a.ipynb"),
)
GENERATED = ("PKG-INFO", "setup.cfg", "MANIFEST.in")
ASSET = "diffrl/tasks/digits_sd3/transformer/diffusion_pytorch_model.safetensors"
MUST = ("diffrl/py.typed", "diffrl/tasks/digits_sd3/model_index.json", ASSET)
TINY = "--iterations 1 --group-size 2 --prompts-per-iteration 1 --steps 2 --eval-samples 1 --trained-steps all"


def say(text: str, since: float) -> None:
    print(f"{time.perf_counter() - since:6.1f} s  {text}", flush=True)


def call(*words: str | Path, cwd: Path, **environment: str) -> str:
    """The output of a command that must succeed; no variable of ours reaches it, so that it imports what is installed."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=kept | environment, text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(map(str, words))} in {cwd}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout + done.stderr


def version_of(tree: Path) -> str:
    names: dict[str, str] = {}
    exec((tree / "diffrl" / "version.py").read_text(), names)
    return names["__version__"]


def members(archive: Path) -> dict[str, str]:
    """Every file of a wheel or sdist (below its one folder) and the hash of its bytes."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as file:
            read = {name: file.read(name) for name in file.namelist() if not name.endswith("/")}
    else:
        with tarfile.open(archive) as file:
            inside = [entry for entry in file.getmembers() if entry.isfile()]
            read = {entry.name.partition("/")[2]: file.extractfile(entry).read() for entry in inside}  # type: ignore[union-attr]
    return {name: hashlib.sha256(data).hexdigest() for name, data in read.items()}


def files_of(tree: Path) -> set[str]:
    return {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}


def differences(what: str, found: set[str], wanted: set[str]) -> list[str]:
    lines = [f"{what} holds {name}" for name in sorted(found - wanted)]
    return lines + [f"{what} lacks {name}" for name in sorted(wanted - found)]


def faults_of(wheel: dict[str, str], sdist: dict[str, str], tree: set[str], version: str) -> list[str]:
    """What is wrong with the contents of the two, given the files of the tree they come from; hashes are not looked at."""
    info = f"diffrl-{version}.dist-info"
    meta = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "top_level.txt", "entry_points.txt")}
    package = {name for name in tree if name.startswith("diffrl/")}
    faults = differences("the wheel", set(wheel), package | meta | {f"{info}/licenses/LICENSE"})
    egg = {name for name in sdist if name.startswith("diffrl.egg-info/")}
    faults += differences("the sdist", set(sdist) - egg - {*GENERATED}, tree - {*GENERATED})
    return faults + [f"{name} is nowhere" for name in MUST if name not in wheel or name not in sdist]


def build(folder: Path, since: float) -> tuple[Path, Path]:
    """(wheel, sdist) of a copy of the tree that holds litter; the wheel comes from the sdist, and equals the tree's own."""
    tree, out, direct = folder / "tree", folder / "dist", folder / "direct"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*IGNORED))
    clean = files_of(tree)
    for name in LITTER:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("litter")
    call(sys.executable, "-m", "build", "--outdir", out, tree, cwd=folder)
    shutil.rmtree(tree / "build")  # what setuptools keeps between builds is not what is asked here
    call(sys.executable, "-m", "build", "--wheel", "--outdir", direct, tree, cwd=folder)
    (wheel,), (sdist,), (other,) = out.glob("*.whl"), out.glob("*.tar.gz"), direct.glob("*.whl")
    say(
        f"built {wheel.name} ({wheel.stat().st_size / 1e6:.1f} MB), {sdist.name} ({sdist.stat().st_size / 1e6:.1f} MB)",
        since,
    )
    a, b = members(wheel), members(other)
    faults = faults_of(a, members(sdist), clean, version_of(tree))
    faults += [
        f"{name} differs between tree -> sdist -> wheel and tree -> wheel"
        for name in a.keys() | b.keys()
        if a.get(name) != b.get(name)
    ]
    if faults:
        raise SystemExit("\n".join(faults))
    call(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, cwd=folder)
    say(f"contents: {len(a)} files in the wheel, the same by way of the sdist; twine check passes", since)
    return wheel, sdist


def environment(folder: Path) -> Path:
    """The Python of a new, empty virtual environment."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def installed(python: Path, cwd: Path, version: str) -> None:
    """Refuses what is not diffrl `version`, with the demo's model, imported without torch from the environment."""
    code = (
        "import sys, importlib.metadata as m, pathlib, diffrl; assert 'torch' not in sys.modules\n"
        "here = pathlib.Path(diffrl.__file__).parent; assert here.is_relative_to(sys.prefix), here\n"
        f"assert (here.parent / {ASSET!r}).stat().st_size > 1e6 and (here / 'py.typed').is_file()\n"
        "print(diffrl.__version__, m.version('diffrl'))"
    )
    if call(python, "-c", code, cwd=cwd).split() != [version, version]:
        raise SystemExit(f"installed: not {version}")


def install_sdist(sdist: Path, folder: Path, since: float) -> None:
    """`pip install .` in the unpacked source distribution, with no git (nor anything else) to be found."""
    with tarfile.open(sdist) as file:
        file.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # from 3.11.4 on
    (source,) = folder.iterdir()
    python = environment(folder / "environment")
    call(python, "-m", "pip", "install", "--quiet", "--no-deps", ".", cwd=source, PATH=str(python.parent))
    installed(python, folder, version_of(source))
    say("the sdist installs by `pip install .`, without git", since)


def install_wheel(wheel: Path, folder: Path, since: float) -> None:
    """The wheel with the extra `demo` into an empty environment: import, help, version, and one iteration of training."""
    python = environment(folder / "environment")
    pins = ROOT / "constraints.txt"
    call(python, "-m", "pip", "install", "--quiet", "--constraint", pins, f"{wheel}[demo]", cwd=folder)
    say("the wheel and what it needs install into an empty environment", since)
    version, command = wheel.name.split("-")[1], python.parent / "diffrl"
    installed(python, folder, version)
    if call(command, "--version", cwd=folder).strip() != f"diffrl {version}":
        raise SystemExit(f"diffrl --version: not {version}")
    call(command, "--help", cwd=folder)
    call(command, "train", "--task", "digits", *TINY.split(), "--output", "run", "--quiet", cwd=folder)
    missing = [
        name for name in ("metrics.jsonl", "curve.png", "before_after.png") if not (folder / "run" / name).is_file()
    ]
    if missing:
        raise SystemExit(f"diffrl train wrote no {', '.join(missing)}")
    say("diffrl --help, --version and one iteration of diffrl train, outside of the source", since)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only-build", action="store_true", help="install nothing: seconds instead of minutes")
    options = parser.parse_args()
    since = time.perf_counter()
    if "version" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]:
        raise SystemExit("the version is written twice")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel, sdist = build(folder, since)
        if not options.only_build:
            for part, install, archive in (("a", install_sdist, sdist), ("b", install_wheel, wheel)):
                (folder / part).mkdir()
                install(archive, folder / part, since)
    return 0


if __name__ == "__main__":
    sys.exit(main())
