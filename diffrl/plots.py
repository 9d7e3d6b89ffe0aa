"""Pictures of a run: its curve, what the same seeds drew before and after, who worked when. matplotlib is imported when one
is drawn."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffrl.checks import require_count
from diffrl.contrast import average_ranks, rank_agreement, select_contrastive
from diffrl.schedules import Trace

INK, GREY, BLUE, ORANGE, GREEN = "#222222", "#8a8a8a", "#2b6cb0", "#dd6b20", "#2f855a"


def require_matplotlib() -> None:
    """ImportError, naming what to install, where no picture could be drawn: to be asked before hours of training.

    No example: it says nothing where matplotlib is there.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'diffrl[plots]'") from error


def _figure(width: float, height: float) -> Any:
    """A figure outside pyplot: no global state, no display."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _style(axis: Any, title: str, xlabel: str) -> None:
    axis.set_title(title, fontsize=10, color=INK, loc="left", parse_math=False)  # a prompt may hold dollars
    axis.set_xlabel(xlabel, fontsize=9)
    axis.grid(True, alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)


def _legend(axis: Any, *more: Any) -> None:
    """Of this axis and of those that share its place, below it, where it covers nothing."""
    handles, labels = list[Any](), list[str]()
    for each in (axis, *more):
        handles, labels = (
            old + new for old, new in zip((handles, labels), each.get_legend_handles_labels(), strict=True)
        )
    if labels:
        columns = 1 if max(map(len, labels)) > 22 else 2
        how: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.0, -0.16), "borderaxespad": 0.0}
        axis.legend(handles, labels, fontsize=8, frameon=False, ncols=columns, **how)


def _series(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """(iteration, value) of the rows that have a number under `name`."""
    kept = [(r["iteration"], r[name]) for r in rows if isinstance(r.get(name), int | float) and r[name] == r[name]]
    return [float(i) for i, _ in kept], [float(v) for _, v in kept]


def last_update(rows: Sequence[Mapping[str, Any]]) -> int:
    """The number of the last optimizer step of an iteration, 1 where none is told: the U of the largest loss/update_U.

    >>> last_update([{"loss/update_1": 1.0, "loss/update_2": 0.9}, {}])
    2
    """
    beginning = "loss/update_"
    return max((int(n.removeprefix(beginning)) for row in rows for n in row if n.startswith(beginning)), default=1)


def save_curve(path: str | Path, rows: Sequence[Mapping[str, Any]], *, title: str = "") -> Path:
    """Three panels over iterations: reward and held-out evaluation; loss of each update; trust region.

    rows: one mapping per iteration, with "iteration" and the metric names of `diffrl.loop`; absent ones are left out.
    ValueError: no rows. No example: draws a file.
    """
    if not rows:
        raise ValueError("no rows: nothing to draw")
    from matplotlib.ticker import MaxNLocator

    figure = _figure(12, 4.2)
    left, middle, right = figure.subplots(1, 3)
    _evaluation_panel(left, rows)
    _style(middle, "loss of each update", "iteration")
    for u, colour in ((1, BLUE), (2, ORANGE), (3, GREEN), (4, GREY)):
        if any(f"loss/update_{u}" in row for row in rows):
            middle.plot(*_series(rows, f"loss/update_{u}"), color=colour, linewidth=1.5, label=f"update {u}")
    if any("groups/dead" in row for row in rows):
        x, dead = _series(rows, "groups/dead")
        middle.fill_between(x, [1 - d for d in dead], color=GREY, alpha=0.2, linewidth=0, label="share of live groups")
    _legend(middle)
    _steering_panel(right, rows)
    for axis in (left, middle, right):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if title:
        figure.suptitle(title, fontsize=11, color=INK, parse_math=False)
    figure.savefig(path)
    return Path(path)


def _steering_panel(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """The trust region where there is one; a draft's ranks where there is a draft; how far the policy moved."""
    last = last_update(rows)
    shown = [
        (f"masked_fraction/update_{last}", "masked fraction", ORANGE),
        ("draft/spearman", "draft/spearman (chosen)", GREEN),
        ("audit/spearman", "audit/spearman (whole pools)", GREY),
    ]
    shown = [(name, label, colour) for name, label, colour in shown if _series(rows, name)[0]]
    of_draft = [label for _, label, _ in shown if "spearman" in label]
    _style(axis, "ranks of the draft, last update" if of_draft else "trust region, last update", "iteration")
    for name, label, colour in shown:
        style = "o-" if name == "audit/spearman" else "-"
        axis.plot(*_series(rows, name), style, color=colour, linewidth=1.5, markersize=4, label=label)
    axis.set_ylim(-0.02, 1.02)
    if shown:
        axis.set_ylabel("Spearman" if of_draft else "masked fraction", fontsize=9, color=GREEN if of_draft else ORANGE)
    twin = axis.twinx()
    twin.plot(*_series(rows, f"drift_rms/update_{last}"), color=BLUE, linewidth=1.2, label="drift rms")
    twin.set_ylim(bottom=0)
    twin.set_ylabel("drift rms", fontsize=9, color=BLUE)
    twin.spines["top"].set_visible(False)
    twin.tick_params(labelsize=8)
    _legend(axis, twin)


def _evaluation_panel(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    _style(axis, "reward", "iterations completed")
    x, y = _series(rows, "reward/mean")
    if x:
        axis.plot(x, y, color=GREY, linewidth=1.2, label="training reward")
    for name, colour in (("eval/reward", BLUE), ("eval/exact_match", GREEN), ("eval/held_out_reward", ORANGE)):
        base = name.replace("eval/", "base/")  # of a run of one iteration
        points = [(0, row[base]) for row in rows[:1] if row.get(base) is not None]
        points += [
            (row.get("eval/iterations", row["iteration"]), row[name]) for row in rows if row.get(name) is not None
        ]
        if points:
            axis.plot(
                *zip(*points, strict=True),
                "o-",
                color=colour,
                linewidth=1.6,
                markersize=4,
                label=f"{name} (held-out seeds)",
            )
    _legend(axis)


def save_before_after(
    path: str | Path,
    before: Tensor,
    after: Tensor,
    *,
    titles: Sequence[str],
    captions_before: Sequence[str],
    captions_after: Sequence[str],
    good_before: Sequence[bool] | None = None,
    good_after: Sequence[bool] | None = None,
) -> Path:
    """Two rows of pictures of the same prompts and seeds: before above, after below, a caption under each.

    before, after: UInt8 " b h w 3"; titles, captions_*: b strings; good_*: captions in green or orange. ValueError:
    lengths or shapes that differ, nothing to draw. No example: draws a file.
    """
    return _two_rows(
        path,
        {"before": before, "after": after},
        titles,
        [captions_before, captions_after],
        [good_before, good_after],
    )


def _two_rows(
    path: str | Path,
    images: Mapping[str, Tensor],
    titles: Sequence[str],
    captions: Sequence[Sequence[str]],
    good: Sequence[Sequence[bool] | None],
    title: str = "",
) -> Path:
    """Two named rows of b pictures, titles above the first, a caption under each, green or orange where it is judged."""
    first, second = images.values()
    b = len(first)
    lengths = [len(second), len(titles), *(len(c) for c in captions), *(len(x) for x in good if x is not None)]
    if b == 0 or first.ndim != 4 or first.shape != second.shape or any(n != b for n in lengths):
        told = ", ".join(f"{name} {tuple(x.shape)}" for name, x in images.items())
        raise ValueError(f"{told}, lengths {lengths} must be b h w 3 and all b > 0")
    h, w = first.shape[1:3]
    cell = 1.25
    figure = _figure(cell * b + 0.5, 2 * (cell * h / w + 0.42) + 0.25)
    axes = figure.subplots(2, b, squeeze=False)
    for line, (name, shown), words, judged in zip(axes, images.items(), captions, good, strict=True):
        for j, axis in enumerate(line):
            axis.imshow(shown[j].numpy(), interpolation="nearest" if h < 128 else None)
            axis.set_xticks([])
            axis.set_yticks([])
            axis.spines[:].set_color("#cccccc")
            colour = INK if judged is None else GREEN if judged[j] else ORANGE
            axis.set_xlabel(words[j], fontsize=7.5, color=colour, parse_math=False)
            if shown is first:
                axis.set_title(titles[j], fontsize=8.5, color=INK, parse_math=False)
        line[0].set_ylabel(name, fontsize=9, color=INK)
    if title:
        figure.suptitle(title, fontsize=10, color=INK, x=0.01, ha="left", parse_math=False)
    figure.savefig(path)
    return Path(path)


def save_grid(path: str | Path, images: Tensor, *, columns: int = 10, captions: Sequence[str] | None = None) -> Path:
    """A grid of pictures, UInt8 " b h w 3", to be looked at beside the curve. ValueError: nothing to draw.

    No example: draws a file.
    """
    columns = require_count("columns", columns)
    if len(images) == 0 or images.ndim != 4 or (captions is not None and len(captions) != len(images)):
        raise ValueError(f"{len(images)} images, {None if captions is None else len(captions)} captions")
    h, w = images.shape[1:3]
    lines = -(-len(images) // columns)
    figure = _figure(columns * 0.9, lines * (0.9 * h / w + (0.2 if captions else 0.05)))
    for j, axis in enumerate(figure.subplots(lines, columns, squeeze=False).flat):
        axis.axis("off")
        if j < len(images):
            axis.imshow(images[j].numpy(), interpolation="nearest" if h < 128 else None)
            if captions is not None:
                axis.set_title(captions[j], fontsize=6, parse_math=False)
    figure.savefig(path)
    return Path(path)


def save_draft_pairs(
    path: str | Path,
    draft: Tensor,
    policy: Tensor,
    *,
    titles: Sequence[str],
    draft_rewards: Sequence[float],
    rewards: Sequence[float],
    title: str = "",
) -> Path:
    """The draft's samples above and the policy's of the same seeds below, each with its reward; best first, worst last.

    draft, policy: UInt8 " b h w 3", as `select_contrastive` orders them; a reward is orange where the two differ by more
    than a tenth of the spread of all of them. ValueError: lengths or shapes that differ, nothing to draw.
    No example: draws a file.
    """
    values = [float(v) for v in [*draft_rewards, *rewards]]
    known = [v for v in values if math.isfinite(v)]
    far = 0.1 * (max(known) - min(known)) if known else 0.0
    same = [abs(float(a) - float(b)) <= far for a, b in zip(draft_rewards, rewards)]
    return _two_rows(
        path,
        {"draft": draft, "policy": policy},
        titles,
        [[f"{float(v):.3g}" for v in told] for told in (draft_rewards, rewards)],
        [same, same],
        title,
    )


def save_rank_scatter(
    path: str | Path, proxy: Tensor, true: Tensor, *, keep: int, titles: Sequence[str] | None = None
) -> Path:
    """One panel per prompt: the rank a draft gave each seed against the rank of the policy's own sample of it.

    proxy, true: rewards " g n"; blue and orange: the draft's best and worst `keep` (`select_contrastive`). Spearman and Kendall
    above each panel. Ranks: 1 is the best, ties get their average rank, and a disc's area is the number of seeds there. ValueError: as `rank_agreement`, or titles of another number.
    No example: draws a file.
    """
    found = rank_agreement(proxy, true, keep=keep)
    g, n = proxy.shape
    if g == 0 or (titles is not None and len(titles) != g):
        raise ValueError(f"{g} prompts, {None if titles is None else len(titles)} titles")
    chosen = select_contrastive(proxy, keep=keep)
    figure = _figure(min(g, 5) * 3.0, -(-g // 5) * 3.2)
    axes = list(figure.subplots(-(-g // 5), min(g, 5), squeeze=False).flat)
    for axis in axes[g:]:
        axis.axis("off")
    for j, axis in zip(range(g), axes):
        usable = torch.isfinite(proxy[j]) & torch.isfinite(true[j])
        x, y = (torch.full((n,), torch.nan, dtype=torch.float64) for _ in range(2))
        x[usable], y[usable] = average_ranks(proxy[j][usable].double()), average_ranks(true[j][usable].double())
        colours = [GREY] * n
        for place, column in enumerate(chosen[j].tolist()):
            colours[column] = BLUE if place < keep else ORANGE
        axis.plot([1, n], [1, n], color="#cccccc", linewidth=0.8, zorder=0)
        points = Counter(
            zip(x.tolist(), y.tolist(), colours)
        )  # tied rewards lie on one another: larger, the more there are
        for (a, b, colour), count in sorted(points.items(), key=lambda point: point[0][2] != GREY):  # the chosen on top
            style = {"facecolors": "none", "edgecolors": GREY} if colour == GREY else {"c": colour, "alpha": 0.6}
            axis.scatter(a, b, s=14 * count, linewidth=1 if colour == GREY else 0, **style)
        name = "" if titles is None else f"{titles[j]}\n"
        told = f"Spearman {float(found.spearman[j]):.2f}, Kendall {float(found.kendall[j]):.2f}"
        _style(axis, f"{name}{told}", "rank by the draft (1 is best)")
        axis.title.set_fontsize(8)
        axis.set_ylabel("rank by the policy" if j % 5 == 0 else "", fontsize=9)
        axis.set_xlim(0, n + 1)
        axis.set_ylim(0, n + 1)
    for colour, name in ((BLUE, f"draft's best {keep}"), (ORANGE, f"its worst {keep}"), (GREY, "not chosen")):
        axes[0].scatter([], [], s=20, c=colour, label=name)
    axes[0].legend(fontsize=8, framealpha=0.8, edgecolor="none", loc="lower right")
    figure.savefig(path)
    return Path(path)


# ---- schedules --------------------------------------------------------------------------------------------------------

COLOURS = {
    "generate": "#0072b2",
    "help": "#56b4e9",
    "reward": "#009e73",
    "train": "#d55e00",
    "update": "#000000",
    "publish": "#cc79a7",
    "switch": "#e69f00",
    "restore": "#f0e442",
}
"""Of every kind of interval: the eight of Okabe and Ito (2008), apart from one another for colour-blind eyes too."""

PANEL = 6.5
"""Inches, the width of one trace."""


def _seconds(value: float) -> str:
    """Three digits, and no power of ten where a reader expects none."""
    return f"{value:.3g} s" if value < 999.5 or value >= 1e6 else f"{value:.0f} s"


def lanes_of(trace: Trace) -> list[str]:
    """The resources of a trace in the order of its lanes: the pools, then the reward workers by number.

    >>> from diffrl.schedules import Interval
    >>> lanes_of(Trace((Interval("reward/0", "reward", 0, 1, 0), Interval("trainer", "train", 1, 2, 0)), (2.0,)))
    ['trainer', 'reward/0']
    """
    names = {interval.resource for interval in trace.intervals}
    return sorted(names, key=lambda name: ("/" in name, len(name) if "/" in name else 0, name))


def utilisation(trace: Trace) -> dict[str, float]:
    """Busy share of every pool, 1 - idle/makespan; 0 where nothing took time. ValueError: no Trace.

    >>> from diffrl.schedules import Interval
    >>> utilisation(Trace((Interval("trainer", "train", 1, 2, 0),), (4.0,)))
    {'generator': 0.0, 'trainer': 0.25}
    """
    if not isinstance(trace, Trace):
        raise ValueError(f"utilisation is of one Trace, got {trace!r:.100}")
    if trace.makespan <= 0:
        return dict.fromkeys(trace.idle, 0.0)
    return {pool: 1 - idle / trace.makespan for pool, idle in trace.idle.items()}


def gantt(trace: Trace | Mapping[str, Trace], *, path: str | Path | None = None, title: str = "") -> Any:
    """One lane per resource, colour by kind, hatched where generated under older weights, a line at the end of each step.

    trace: one, or several by name, drawn side by side on one scale of seconds, e.g. {"simulated": a, "measured": b}. Beside
    a pool's name: its `utilisation`. path: where to save it. Returns the matplotlib figure. ValueError: no trace.
    No example: draws a figure.
    """
    traces = dict(trace) if isinstance(trace, Mapping) else {"": trace}
    if not traces or not all(isinstance(t, Trace) for t in traces.values()):
        raise ValueError(f"gantt draws a Trace, or several by name, got {trace!r:.100}")
    most = max(max(len(lanes_of(t)) for t in traces.values()), 1)
    figure = _figure(PANEL * len(traces), 1.6 + 0.42 * min(most, 12) + 0.2 * max(most - 12, 0))
    axes = figure.subplots(1, len(traces), squeeze=False)[0]
    longest = max(max((i.end for i in t.intervals), default=0.0) for t in traces.values())
    longest = max(longest, *(t.makespan for t in traces.values()))
    shown: dict[str, Any] = {}
    for axis, (name, one) in zip(axes, traces.items(), strict=True):
        _style(axis, f"{name}  {_seconds(one.makespan)}".strip(), "seconds")
        shown |= _lanes(axis, one, longest)
        if longest > 0:
            axis.set_xlim(0, 1.01 * longest)
    if shown:
        kinds = [kind for kind in (*COLOURS, "stale") if kind in shown]
        figure.legend(
            [shown[kind] for kind in kinds],
            kinds,
            loc="outside lower center",
            ncols=5 if len(traces) == 1 and len(kinds) > 5 else 9,  # as many as fit in the width
            fontsize=8,
            frameon=False,
        )
    if title:
        figure.suptitle(title, fontsize=11, color=INK)
    if path is not None:
        figure.savefig(path)
    return figure


def _lanes(axis: Any, trace: Trace, longest: float) -> dict[str, Any]:
    """Draw the intervals; the bars by kind, for the legend. A white edge takes a tenth of a narrow bar at most."""
    from matplotlib.patches import Patch

    lanes, used, staleness, shown = lanes_of(trace), utilisation(trace), trace.staleness, {}
    for resource, kind, start, end, step, fragment, _ in trace.intervals:
        stale = kind == "generate" and staleness.get((step, fragment), 0) > 0
        points = 0.8 * 72 * PANEL * (end - start) / max(longest, end)
        hatch = "////" if stale else None
        axis.barh(
            lanes.index(resource),
            end - start,
            left=start,
            height=0.72,
            color=COLOURS[kind],
            edgecolor="white",
            linewidth=min(0.5, 0.1 * points),
            hatch=hatch,
        )
        shown["stale" if stale else kind] = Patch(facecolor=COLOURS[kind], edgecolor="white", hatch=hatch)
    for end in trace.ends:
        axis.axvline(end, color=GREY, linewidth=0.9, linestyle="--")
    labels = [f"{name} {used[name]:.0%}" if name in used else name for name in lanes]
    axis.set_yticks(range(len(lanes)), labels)
    axis.invert_yaxis()
    axis.grid(False, axis="y")
    return shown
