"""What every ablation shares: one run of one algorithm, many of them in parallel and resumable, a CSV, confidence bands.

A script holds a dict name -> factory of the algorithm (its pieces), makes `Run`s and calls `results`. Each finished run is
kept in runs/ablations/SCRIPT/ and is not repeated; interrupt at any moment and start the same command again.
"""

import argparse
import csv
import json
import math
import multiprocessing
import os
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from tqdm import tqdm

from diffrl.algorithms import Algorithm

ROOT = Path(__file__).resolve().parent.parent
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""97.5 % quantiles of Student's t with n - 1 degrees of freedom, by n."""
Pieces = Mapping[str, Callable[[], Algorithm | Callable[[Any], Algorithm]]]
"""name -> () -> an algorithm, or a function of the model that makes one."""


class Run(NamedTuple):
    """One training run; every field is part of its identity."""

    name: str  # which of the script's pieces
    seed: int
    learning_rate: float = 1e-3
    iterations: int = 40
    task: str = "digits"
    group_size: int = 8
    prompts: int = 8  # per iteration
    steps: int = 6
    lora: int = 16  # rank, alpha twice that; 0: every parameter is trained
    eval_every: int = 10
    eval_samples: int = 1  # per prompt
    tag: str = ""
    diversity: bool = False  # also measure how different the samples of one prompt are

    @property
    def key(self) -> str:
        words = [self.name, self.task, f"lr{self.learning_rate:g}", f"k{self.group_size}", f"n{self.iterations}"]
        words += ["full"] * (self.lora == 0) + [self.tag] * bool(self.tag) + [f"seed{self.seed}"]
        return re.sub(r"[^A-Za-z0-9.+-]+", "_", "-".join(words))


# ---- one run ----------------------------------------------------------------------------------------------------------

_loaded: dict[str, Any] = {}  # of this process: reading the OCR engine's weights takes longer than ten iterations


def ink(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    """Mean darkness of each picture, in [0, 1]: a reward that asks for the opposite of small files."""
    return 1 - images.float().mean((1, 2, 3)) / 255


def _task(name: str) -> tuple[Any, list[str], Any, dict[str, Any]]:
    """(pipeline, prompts, reward, options of from_pipeline); the pipeline is loaded anew, the reward once."""
    from diffrl import rewards
    from diffrl.tasks import digits

    if name not in _loaded:
        _loaded[name] = {
            "digits": lambda: rewards.ocr(threads=1),
            "letters": lambda: rewards.ocr(target=__import__("letters").target, threads=1),
            "jpeg": rewards.jpeg_compressibility,
            "ocr+jpeg+ink": lambda: rewards.weighted_sum(
                {"ocr": rewards.ocr(threads=1), "jpeg": rewards.jpeg_compressibility(), "ink": ink}
            ),
        }[name]()
    folder = __import__("letters").FOLDER if name == "letters" else None
    return digits.load_pipeline(folder), digits.prompts(), _loaded[name], digits.pipeline_options()


def _measured(model: Any, prompts: list[str], reward: Any, run: Run) -> dict[str, float]:
    """eval/reward over all prompts at the held-out seeds, and what else this run is asked to measure."""
    from diffrl.settings import evaluate
    from diffrl.windows import score_images

    parts = getattr(reward, "rewards", None)
    asked = parts["ocr"] if parts else reward
    found = evaluate(model, prompts, asked, steps=run.steps, samples=run.eval_samples)
    told = {"eval/reward": float(found.rewards.nanmean())}
    for name in ("jpeg", "ink") if parts else ():
        told[f"eval/{name}"] = float(score_images(parts[name], found.images, found.prompts).nanmean())
    if found.exact is not None:
        told["eval/exact_match"] = float(found.exact.nanmean())
    return told | (_diversity(model, prompts[::10], run) if run.diversity else {})


def _diversity(model: Any, prompts: list[str], run: Run) -> dict[str, float]:
    """Means over ten prompts x 8 samples of `diffrl.diversity` on the latents."""
    from diffrl.diversity import pairwise_distance, participation_ratio
    from diffrl.sampling import rollout, sample_seeds
    from diffrl.windows import encode

    names = [prompt for prompt in prompts for _ in range(8)]
    seeds = sample_seeds(2**62 + 5, 0, range(len(prompts)), 8).flatten()
    shape = model.latent_shape()
    walked = rollout(
        model.velocity, model.params, encode(model, names), model.times(run.steps), seeds=seeds, shape=shape, keep=[]
    )
    x_0 = walked.x_0.reshape(len(prompts), 8, *shape)
    return {
        "eval/pairwise_distance": float(pairwise_distance(x_0).mean()),
        "eval/participation_ratio": float(participation_ratio(x_0).mean()),
    }


def execute(
    run: Run, piece: Algorithm | Callable[[Any], Algorithm], tick: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """Train and evaluate: one row per iteration, iteration -1 the base; eval/* at every eval_every-th and at the last."""
    from diffrl.loop import train
    from diffrl.models import from_pipeline

    torch.set_num_threads(1)
    pipe, prompts, reward, options = _task(run.task)
    torch.manual_seed(run.seed)
    lora = {"r": run.lora, "lora_alpha": 2 * run.lora} if run.lora else None
    model = from_pipeline(pipe, lora=lora, **options)
    algorithm = piece if isinstance(piece, Algorithm) else piece(model)
    optimizer = torch.optim.AdamW(list(model.params.values()), lr=run.learning_rate, weight_decay=0.0)

    def measured() -> dict[str, float]:
        return _measured(model, prompts, reward, run)

    training = train(
        model,
        algorithm,
        prompts,
        reward,
        optimizer,
        group_size=run.group_size,
        steps=run.steps,
        seed=run.seed,
        prompts_per_iteration=run.prompts,
    )
    rows = [
        {"iteration": -1, "optimizer_steps": 0, "samples": 0, "seconds": 0.0} | (measured() if run.eval_every else {})
    ]
    seconds = 0.0
    for i in range(run.iterations):
        began = time.perf_counter()
        try:
            metrics = next(training)
        except ValueError as error:
            if "finite" not in str(error) and "gradient norm is" not in str(error):
                raise
            # a policy that left the numbers: a result, not an accident of the script
            rows.append({"iteration": i, "diverged": str(error)})
            break
        seconds += time.perf_counter() - began
        row = {
            "iteration": i,
            "optimizer_steps": (i + 1) * algorithm.updates,
            "samples": (i + 1) * run.prompts * (algorithm.pool or run.group_size),
            "seconds": seconds,
            **{k: v for k, v in metrics.items() if "/t=" not in k and not k.startswith("seconds") and k != "iteration"},
        }
        if run.eval_every and ((i + 1) % run.eval_every == 0 or i + 1 == run.iterations):
            row |= measured()
        rows.append(row)
        tick()
    return rows


# ---- many runs --------------------------------------------------------------------------------------------------------


def options_of(description: str, more: Mapping[str, str] | None = None) -> argparse.Namespace:
    """--quick, --jobs, and more options of text with their defaults."""
    parser = argparse.ArgumentParser(description=description.strip().splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few iterations of everything: does it run? no result")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes, one thread each")
    for name, default in (more or {}).items():
        parser.add_argument(name, default=default)
    return parser.parse_args()


def shortened(runs: Iterable[Run], quick: bool) -> list[Run]:
    """The runs, or with quick two iterations of three prompts at the first seed of each."""
    if not quick:
        return list(runs)
    short = [r._replace(iterations=2, prompts=3, eval_every=2 * bool(r.eval_every), tag=f"{r.tag}quick") for r in runs]
    first = {(r.name, r.task, r.learning_rate, r.group_size, r.lora): r for r in reversed(short)}
    return list(first.values())[::-1]


def _stored(folder: Path, run: Run) -> list[dict[str, Any]] | None:
    path = folder / f"{run.key}.json"
    if not path.is_file():
        return None
    record = json.loads(path.read_text())
    return record["rows"] if Run(**record["run"]) == run else None


def _worker(path: str, script: str, run: Run, queue: Any) -> tuple[Run, list[dict[str, Any]]]:
    """In a process of its own: the script's pieces are looked up by name, as closures cannot be sent."""
    sys.path.insert(0, str(Path(path).parent))
    pieces = __import__(script).PIECES
    rows = execute(run, pieces[run.name](), lambda: queue.put(1))
    folder = ROOT / "runs" / "ablations" / script
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{run.key}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps({"run": run._asdict(), "rows": rows}))
    os.replace(temporary, folder / f"{run.key}.json")
    return run, rows


def results(script: str, runs: Sequence[Run], *, jobs: int) -> dict[Run, list[dict[str, Any]]]:
    """Rows of every run of ablations/SCRIPT.py, from the store or trained now, `jobs` at a time, with a progress bar."""
    folder = ROOT / "runs" / "ablations" / script
    found = {run: rows for run in runs if (rows := _stored(folder, run)) is not None}
    missing = [run for run in runs if run not in found]
    if found:
        print(f"{len(found)} of {len(runs)} runs are in {folder.relative_to(ROOT)}", file=sys.stderr)
    if missing:
        context = multiprocessing.get_context("spawn")
        with context.Manager() as manager, tqdm(total=sum(r.iterations for r in missing), desc=script) as bar:
            queue = manager.Queue()
            threading.Thread(target=_listen, args=(queue, bar), daemon=True).start()
            with ProcessPoolExecutor(jobs, mp_context=context) as pool:
                path = str(Path(__file__).resolve())
                for future in as_completed([pool.submit(_worker, path, script, run, queue) for run in missing]):
                    run, rows = future.result()
                    found[run] = rows
            queue.put(0)
    return {run: found[run] for run in runs}


def _listen(queue: Any, bar: tqdm) -> None:
    while queue.get():
        bar.update(1)


# ---- what comes out ---------------------------------------------------------------------------------------------------


def write_csv(script: str, found: Mapping[Run, Sequence[Mapping[str, Any]]], *, quick: bool) -> Path:
    """ablations/results/SCRIPT.csv (with quick: runs/ablations/SCRIPT-quick.csv): one line per run and evaluation."""
    path = ROOT / "ablations" / "results" / f"{script}.csv"
    if quick:
        path = ROOT / "runs" / "ablations" / f"{script}-quick.csv"
    keep = ("iteration", "optimizer_steps", "samples", "seconds", "eval/reward", "eval/exact_match", "reward/mean")
    keep += ("eval/jpeg", "eval/ink", "eval/pairwise_distance", "eval/participation_ratio")
    keep += (
        "masked_fraction",
        "kl_proxy",
        "drift_rms",
        "behaviour_distance",
        "grad_norm",
        "ratio_deviation",
        "clip_fraction",
        "diverged",
        *("draft/spearman", "draft/gap", "draft/reversed", "draft/groups_dead", "groups/dead"),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*Run._fields, *keep])
        for run, rows in found.items():
            for row in rows:
                if "eval/reward" in row or "diverged" in row or not run.eval_every:
                    writer.writerow([*run, *(_short(row.get(name, "")) for name in keep)])
    return path


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half width of the 95 % t-interval of the mean); one value: half width nan."""
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return mean, math.nan
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    return mean, T95.get(n, 1.96) * std / math.sqrt(n)


def curves(
    found: Mapping[Run, Sequence[Mapping[str, Any]]], y: str, *, x: str = "samples"
) -> tuple[list[float], list[tuple[float, float]]]:
    """(x, [(mean, half width)]) over the seeds in `found`, at the rows where y is told by all of them: a run that diverged
    ends the curve."""
    at: dict[float, list[float]] = {}
    for rows in found.values():
        for row in rows:
            if y in row and x in row and row[y] is not None:
                at.setdefault(row[x], []).append(float(row[y]))
    xs = [x for x in sorted(at) if len(at[x]) == len(found)]
    return xs, [interval(at[v]) for v in xs]


def draw_bands(axis: Any, found: Mapping[Run, Any], names: Sequence[str], y: str, *, x: str = "samples") -> None:
    """One line per name with its 95 % band over seeds; of more than four names, which bands would hide, a bar at the end."""
    for number, name in enumerate(names):
        here = {run: rows for run, rows in found.items() if run.name == name}
        xs, told = curves(here, y, x=x)
        colour = f"C{number % 10}"
        mean = [m for m, _ in told]
        axis.plot(xs, mean, color=colour, label=name, marker="o", markersize=3, linestyle="-" if number < 10 else "--")
        low = [m - (0 if math.isnan(h) else h) for m, h in told]
        high = [m + (0 if math.isnan(h) else h) for m, h in told]
        if y in ("eval/exact_match", "masked_fraction", "drift_rms", "kl_proxy"):  # bounds that a t-interval ignores
            low = [max(v, 0.0) for v in low]
        if y in ("eval/exact_match", "masked_fraction"):
            high = [min(v, 1.0) for v in high]
        if len(names) <= 4:
            axis.fill_between(xs, low, high, color=colour, alpha=0.12, linewidth=0)
        elif xs:
            ends = [[max(mean[-1] - low[-1], 0)], [max(high[-1] - mean[-1], 0)]]
            at = xs[-1] * (1 + 0.015 * (1 + number))
            axis.errorbar([at], mean[-1:], ends, color=colour, capsize=2, linewidth=1, marker="o", markersize=3)
    axis.set_xlabel(x.replace("_", " "))
    axis.set_ylabel(y)


def legend_beside(figure: Any) -> None:
    """One legend for all panels, right of them, where it covers nothing."""
    named: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    figure.legend(
        named.values(), named.keys(), loc="center left", bbox_to_anchor=(1.0, 0.55), fontsize=8, frameon=False
    )


def save_figure(script: str, figure: Any, note: str, *, quick: bool) -> Path:
    """docs/ablations/SCRIPT.png (with quick: runs/ablations/), the note (seeds, budget, command) under the axes."""
    path = ROOT / "docs" / "ablations" / f"{script}.png"
    if quick:
        path = ROOT / "runs" / "ablations" / f"{script}-quick.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    wrapped = textwrap.fill(note, int(figure.get_figwidth() * 17))
    figure.text(0.01, 0.005, wrapped, fontsize=7, color="0.35", ha="left", va="bottom")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=110, bbox_inches="tight")
    return path


def compare(
    script: str,
    description: str,
    runs: Sequence[Run],
    *,
    panels: Sequence[tuple[str, str]],
    finals_of: Sequence[str],
    prepare: Callable[[], None] = lambda: None,
) -> None:
    """The whole of a simple ablation: run, write the CSV, draw one panel per (x, y), print a table of final values.

    One line per piece (and task, where there are several); finals_of: the metrics of the table, last evaluation.
    """
    options = options_of(description)
    prepare()
    found = results(script, shortened(runs, options.quick), jobs=options.jobs)
    print(write_csv(script, found, quick=options.quick))
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    tasks = list(dict.fromkeys(run.task for run in found))
    figure, axes = plt.subplots(len(tasks), len(panels), figsize=(5.6 * len(panels), 4.6 * len(tasks)), squeeze=False)
    for row, task in enumerate(tasks):
        here = {run: rows for run, rows in found.items() if run.task == task}
        names = list(dict.fromkeys(run.name for run in here))
        for axis, (x, y) in zip(axes[row], panels, strict=True):
            draw_bands(axis, here, names, y, x=x)
            if len(tasks) > 1:
                axis.set_title(task, fontsize=9)
    legend_beside(figure)
    first = next(iter(found))
    seeds = sorted({run.seed for run in found})
    rates = sorted({run.learning_rate for run in found})
    note = (
        f"mean and 95 % t-interval over seeds {seeds}; {first.iterations} iterations of {first.prompts * first.group_size} "
        f"samples, {first.steps} steps, learning rate {', '.join(f'{r:g}' for r in rates)}; evaluated on 100 prompts x "
        f"{first.eval_samples}; {'QUICK, no result; ' * options.quick}python ablations/{script}.py"
    )
    print(save_figure(script, figure, note, quick=options.quick))
    lines = []
    for task in tasks:
        here = {run: rows for run, rows in found.items() if run.task == task}
        for name in dict.fromkeys(run.name for run in here):
            at = [task] if len(tasks) > 1 else []
            lines.append([name, *at, *(plus_minus(finals(here, name, y)) for y in finals_of)])
    if not options.quick:
        header = ["piece", *(["task"] if len(tasks) > 1 else []), *finals_of]
        print(table(description.strip().splitlines()[0], header, lines))


def finals(found: Mapping[Run, Sequence[Mapping[str, Any]]], name: str, y: str, last: int = 1) -> list[float]:
    """Of each run called `name`: the mean of the last `last` values of y; nan for a run that diverged, or was not asked."""
    out = []
    for run, rows in found.items():
        if run.name == name:
            values = [float(row[y]) for row in rows if y in row]
            lost = not values or any("diverged" in row for row in rows)
            out.append(math.nan if lost else math.fsum(values[-last:]) / len(values[-last:]))
    return out


def table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A markdown table, which docs/results.md quotes."""
    rule = ["---"] * len(header)
    return "\n".join([title, "", *("| " + " | ".join(row) + " |" for row in (header, rule, *lines))])


def plus_minus(values: Sequence[float]) -> str:
    """.873 +- .021: mean and half width of the 95 % interval."""
    mean, half = interval(values)
    return re.sub(r"(?<!\d)0\.", ".", f"{mean:.3f} +- {half:.3f}")
