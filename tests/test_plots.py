"""Pictures are written, show what they are given, and nothing is drawn of nothing.

Negative controls are the tests with `control` in their names.
"""

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from diffrl.parallel import CostModel, Interval, Pool, Schedule, Trace, TrainCost, gap_partition, simulate
from diffrl.plots import (
    COLOURS,
    gantt,
    lanes_of,
    last_update,
    require_matplotlib,
    save_before_after,
    save_curve,
    save_draft_pairs,
    save_grid,
    save_rank_scatter,
    utilisation,
)


def pixels(path):
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).astype(int)


def share_of(picture, colour, *, within=12):
    """Share of pixels near a colour."""
    return float((np.abs(picture - np.array(colour)).max(-1) <= within).mean())


def pictures(*colours):
    """One flat picture per colour, UInt8 " b 12 16 3"."""
    return torch.stack([torch.tensor(c, dtype=torch.uint8).expand(12, 16, 3) for c in colours])


RED, TEAL, YELLOW, PURPLE = (200, 30, 30), (20, 150, 150), (230, 220, 40), (120, 20, 160)


def rows(n=6, **changed):
    return [
        {
            "iteration": i,
            "reward/mean": i / n,
            "loss/update_1": 1.0,
            "loss/update_2": 0.5 + i / 50,
            "masked_fraction/update_2": 0.3,
            "drift_rms/update_2": 0.02 * i,
            "groups/dead": 0.1,
            **({"eval/reward": 0.5 + i / 20, "eval/exact_match": 0.2 + i / 10, "eval/iterations": i} if i % 2 else {}),
            **changed,
        }
        for i in range(n)
    ]


# ---- the curve


def test_a_curve_is_written_and_returned(tmp_path):
    path = save_curve(tmp_path / "curve.png", rows(), title="a run")
    assert path == tmp_path / "curve.png"
    picture = pixels(path)
    assert picture.std() > 5
    height, width, _ = picture.shape
    assert width > 2 * height > 400
    thirds = np.array_split(picture, 3, axis=1)
    assert all(part.std() > 5 for part in thirds)  # three panels, each with something in it


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return pixels(save_curve(tmp_path_factory.mktemp("curve") / "full.png", rows()))


@pytest.mark.parametrize("name", ["eval/exact_match", "reward/mean", "loss/update_2", "drift_rms/update_2"])
def test_the_curve_shows_its_numbers(tmp_path, full, name):
    moved = [{k: (1 - v if k == name else v) for k, v in row.items()} for row in rows()]
    assert (pixels(save_curve(tmp_path / "b.png", moved)) != full).any()


def test_the_curve_shows_a_held_out_reward_and_the_base_of_a_single_iteration(tmp_path):
    one = rows(1, **{"eval/reward": 0.6})
    pictures = [
        pixels(save_curve(tmp_path / f"{i}.png", made))
        for i, made in enumerate((one, [one[0] | {"eval/held_out_reward": 0.3}], [one[0] | {"base/reward": 0.2}]))
    ]
    assert (pictures[0] != pictures[1]).any()
    assert (pictures[0] != pictures[2]).any()


def test_control_the_same_rows_give_the_same_picture(tmp_path, full):
    assert (pixels(save_curve(tmp_path / "a.png", rows())) == full).all()


@pytest.mark.parametrize(
    "given",
    [
        [{"iteration": 0}],
        rows(1, **{"reward/mean": float("nan")}),
        rows(3, **{"reward/mean": None, "eval/exact_match": None}),
        rows(3, **{"loss/update_9": 1.0}),
    ],
)
def test_rows_that_lack_something_are_drawn_without_it(tmp_path, given, recwarn):
    assert pixels(save_curve(tmp_path / "curve.png", given)).std() > 1
    assert not recwarn.list


def test_a_curve_of_no_rows_is_refused_and_nothing_written(tmp_path):
    with pytest.raises(ValueError, match="no rows"):
        save_curve(tmp_path / "curve.png", [])
    assert not list(tmp_path.iterdir())


# ---- before and after


def compared(path, before, after, **changed):
    b = len(before)
    options = {"titles": ["t"] * b, "captions_before": ["x"] * b, "captions_after": ["y"] * b, **changed}
    return save_before_after(path, before, after, **options)


def test_before_is_above_and_after_below(tmp_path):
    path = compared(tmp_path / "p.png", pictures(RED, TEAL), pictures(YELLOW, PURPLE))
    assert path == tmp_path / "p.png"
    above, below = np.array_split(pixels(path), 2)
    left, right = np.array_split(above, 2, axis=1)
    assert share_of(left, RED) > 0.1
    assert share_of(right, TEAL) > 0.1
    assert share_of(below, YELLOW) > 0.05
    assert share_of(below, PURPLE) > 0.05
    assert share_of(above, YELLOW) == share_of(below, RED) == 0


def test_captions_are_coloured_by_what_was_right(tmp_path):
    white = pictures((255, 255, 255), (255, 255, 255))
    good, bad = (47, 133, 90), (221, 107, 32)
    path = compared(tmp_path / "p.png", white, white, good_before=[False, False], good_after=[True, True])
    above, below = np.array_split(pixels(path), 2)
    assert share_of(above, bad) > 0 == share_of(above, good)
    assert share_of(below, good) > 0 == share_of(below, bad)
    plain = pixels(compared(tmp_path / "q.png", white, white))
    assert share_of(plain, bad) == share_of(plain, good) == 0


@pytest.mark.parametrize("changed", ["titles", "captions_before", "captions_after"])
def test_every_text_is_drawn(tmp_path, changed):
    two = pictures(RED, TEAL)
    a = pixels(compared(tmp_path / "a.png", two, two))
    b = pixels(compared(tmp_path / "b.png", two, two, **{changed: ["m", "m"]}))
    assert a.shape != b.shape or (a != b).any()


def test_a_single_pair_can_be_drawn(tmp_path):
    assert share_of(pixels(compared(tmp_path / "p.png", pictures(RED), pictures(TEAL))), TEAL) > 0.05


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        (pictures(RED)[:0], pictures(RED)[:0], {}),
        (pictures(RED), pictures(RED, TEAL), {}),
        (pictures(RED), pictures(RED)[:, :6], {}),
        (pictures(RED), pictures(RED), {"titles": []}),
        (pictures(RED), pictures(RED), {"captions_before": ["a", "b"]}),
        (pictures(RED), pictures(RED), {"captions_after": []}),
    ],
)
def test_lengths_and_shapes_that_differ_are_refused_and_nothing_written(tmp_path, before, after, changed):
    with pytest.raises(ValueError, match=r"before \(.*\), after \(.*\), lengths"):
        compared(tmp_path / "p.png", before, after, **changed)
    assert not list(tmp_path.iterdir())


# ---- a grid


def test_a_grid_holds_every_picture(tmp_path):
    four = pictures(RED, TEAL, YELLOW, PURPLE)
    picture = pixels(save_grid(tmp_path / "g.png", four, columns=3, captions=list("abcd")))
    above, below = np.array_split(picture, 2)
    assert all(share_of(above, colour) > 0.02 for colour in (RED, TEAL, YELLOW))
    assert share_of(below, PURPLE) > 0.02 > share_of(below, RED)
    assert pixels(save_grid(tmp_path / "h.png", four)).std() > 5


@pytest.mark.parametrize(("images", "captions"), [(pictures(RED)[:0], None), (pictures(RED), ["a", "b"])])
def test_a_grid_of_nothing_or_of_other_lengths_is_refused(tmp_path, images, captions):
    with pytest.raises(ValueError, match=r"\d images, .* captions"):
        save_grid(tmp_path / "g.png", images, captions=captions)
    assert not list(tmp_path.iterdir())


# ---- who worked when


def played(**changed):
    cost = CostModel(1.0, TrainCost(0.0, 1.0), Pool(1), Pool(1), helper=1, reward=0.5, optimizer=0.5)
    return simulate(Schedule(gap_partition(2, 2, fragments=4), 2, **changed), cost, steps=2)


def bars_of(figure):
    """[(lane, start, length, colour, hatch)] of each panel."""
    from matplotlib.colors import to_hex

    return [
        [
            (
                round(bar.get_y() + bar.get_height() / 2),
                bar.get_x(),
                bar.get_width(),
                to_hex(bar.get_facecolor()),
                bar.get_hatch(),
            )
            for bar in axis.patches
        ]
        for axis in figure.axes
    ]


def test_gantt_draws_every_interval_in_its_lane(tmp_path):
    trace = played()
    figure = gantt(trace, path=tmp_path / "g.png", title="a schedule")
    assert pixels(tmp_path / "g.png").std() > 5
    (bars,) = bars_of(figure)
    expected = [
        (lanes_of(trace).index(i.resource), i.start, i.end - i.start, COLOURS[i.kind], None) for i in trace.intervals
    ]
    assert sorted(bars, key=str) == sorted(expected, key=str)
    axis = figure.axes[0]
    assert [line.get_xdata()[0] for line in axis.get_lines()] == list(trace.ends)
    used = utilisation(trace)
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels[:2] == [f"generator {used['generator']:.0%}", f"trainer {used['trainer']:.0%}"]
    assert labels[2:] == [name for name in lanes_of(trace) if name.startswith("reward/")]


def test_gantt_shows_two_traces_on_one_scale():
    short, long = played(), played(barrier=True)
    figure = gantt({"simulated": short, "measured": long})
    left, right = figure.axes
    assert left.get_xlim() == right.get_xlim()
    assert left.get_xlim()[1] >= long.makespan > short.makespan
    assert ("simulated" in left.get_title(loc="left"), "measured" in right.get_title(loc="left")) == (True, True)
    assert [len(bars) for bars in bars_of(figure)] == [len(short.intervals), len(long.intervals)]


def test_gantt_hatches_what_was_generated_under_older_weights():
    trace = played(stale=1)
    assert set(trace.staleness.values()) == {0, 1}
    (bars,) = bars_of(gantt(trace))
    stale = {i.start for i in trace.intervals if i.kind == "generate" and trace.staleness[i.step, i.fragment]}
    assert {start for _, start, _, _, hatch in bars if hatch} == stale != set()


def every_kind():
    kinds = [("generator", "generate"), *(("trainer", k) for k in COLOURS if k != "generate")]
    one = [Interval(r, k, float(i), i + 1.0, 0, i, 0) for i, (r, k) in enumerate(kinds)]
    return Trace((*one, Interval("generator", "generate", 9.0, 10.0, 1, 0, 0)), (9.0, 1200.0))


@pytest.mark.parametrize("traces", [1, 2])
def test_the_legend_of_all_kinds_lies_inside_the_picture(traces):
    figure = gantt({str(i): every_kind() for i in range(traces)})
    figure.canvas.draw()
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 9
    box = legend.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert 0 <= box.y0 < box.y1 <= min(axis.get_tightbbox().y0 for axis in figure.axes)
    assert figure.axes[0].get_title(loc="left").endswith("1200 s")  # no 1.2e+03


def test_short_intervals_keep_their_width_beside_their_edge():
    trace = Trace(tuple(Interval("trainer", "train", 10.0 * i, 10.0 * i + 4, 0, i) for i in range(200)), (2000.0,))
    figure = gantt(trace)
    figure.canvas.draw()
    for bar in figure.axes[0].patches:
        assert bar.get_linewidth() <= 0.15 * bar.get_window_extent().width * 72 / figure.dpi


def test_colours_differ_in_lightness_or_hue_for_every_eye():
    """Every two kinds keep a distance after the projection of red-green blindness (Vienot 1999, in linear light)."""
    from matplotlib.colors import to_rgb

    def seen(name):
        r, g, b = (((c + 0.055) / 1.055) ** 2.4 if c > 0.04045 else c / 12.92 for c in to_rgb(COLOURS[name]))
        light = [0.29275 * r + 0.70725 * g, 0.29275 * r + 0.70725 * g, -0.02234 * r + 0.02234 * g + b]
        return np.clip(light, 0, 1) ** (1 / 2.4)

    apart = [np.linalg.norm(seen(a) - seen(b)) for a in COLOURS for b in COLOURS if a < b]
    assert min(apart) > 0.15


def test_control_on_policy_nothing_is_hatched():
    (bars,) = bars_of(gantt(played()))
    assert not any(hatch for *_, hatch in bars)


def test_utilisation_is_what_is_not_idle():
    trace = played()
    busy = {
        pool: sum(i.end - i.start for i in trace.intervals if i.resource == pool) for pool in ("generator", "trainer")
    }
    assert utilisation(trace) == pytest.approx({pool: b / trace.makespan for pool, b in busy.items()})
    assert utilisation(Trace((), (0.0,))) == {"generator": 0.0, "trainer": 0.0}


def test_lanes_are_the_pools_then_the_reward_workers_by_number():
    names = ["reward/10", "reward/9", "trainer", "generator"]
    trace = Trace(tuple(Interval(name, "reward", 0.0, 1.0, 0) for name in names), (1.0,))
    assert lanes_of(trace) == ["generator", "trainer", "reward/9", "reward/10"]


@pytest.mark.parametrize("given", [{}, None, {"a": "trace"}, [played()]])
def test_gantt_of_anything_but_traces_is_refused_and_nothing_written(tmp_path, given):
    with pytest.raises(ValueError, match="gantt draws a Trace"):
        gantt(given, path=tmp_path / "g.png")
    assert not list(tmp_path.iterdir())


# ---- matplotlib


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for call in (require_matplotlib, lambda: save_curve(tmp_path / "c.png", rows())):
        with pytest.raises(ImportError, match=r"matplotlib: pip install 'diffrl\[plots\]'"):
            call()
    assert not list(tmp_path.iterdir())


def test_control_with_matplotlib_nothing_is_raised():
    require_matplotlib()


def test_drawing_needs_no_pyplot(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    compared(tmp_path / "p.png", pictures(RED), pictures(TEAL))
    with pytest.raises(ImportError):
        import matplotlib.pyplot  # noqa: F401


def test_marks_that_are_too_few_and_pictures_of_another_rank_are_refused(tmp_path):
    images = torch.zeros(2, 4, 4, 3, dtype=torch.uint8)
    texts = {"titles": ["a", "b"], "captions_before": ["", ""], "captions_after": ["", ""]}
    with pytest.raises(ValueError, match="lengths"):
        save_before_after(tmp_path / "p.png", images, images, **texts, good_before=[True])
    with pytest.raises(ValueError, match="b h w 3"):
        save_before_after(tmp_path / "p.png", images[:, None], images[:, None], **texts)
    with pytest.raises(ValueError, match="columns"):
        save_grid(tmp_path / "p.png", images, columns=0)
    assert not list(tmp_path.iterdir())


# ---- drafts


def paired(path, draft, policy, draft_rewards=(1.0, 0.0), rewards=(1.0, 0.0), titles=("best", "worst")):
    return save_draft_pairs(
        path, draft, policy, titles=titles, draft_rewards=draft_rewards, rewards=rewards, title="two"
    )


def test_draft_pairs_show_both_renderings(tmp_path):
    drawn = pixels(paired(tmp_path / "p.png", pictures(RED, RED), pictures(TEAL, TEAL)))
    assert min(share_of(drawn, RED), share_of(drawn, TEAL)) > 0.05
    rows = [np.flatnonzero((np.abs(drawn - np.array(c)).max(-1) <= 12).any(1)) for c in (RED, TEAL)]
    assert rows[0].max() < rows[1].min()


def test_control_rewards_that_differ_are_marked(tmp_path):
    orange = (221, 107, 32)
    alike = pixels(paired(tmp_path / "a.png", pictures(TEAL, TEAL), pictures(TEAL, TEAL)))
    apart = pixels(paired(tmp_path / "b.png", pictures(TEAL, TEAL), pictures(TEAL, TEAL), rewards=(0.5, float("nan"))))
    assert share_of(alike, orange) == 0
    assert share_of(apart, orange, within=60) > 0


def test_draft_pairs_that_do_not_fit_are_refused(tmp_path):
    for bad in ({"draft_rewards": (1.0,)}, {"rewards": (1.0,)}, {"titles": ("best",)}):
        with pytest.raises(ValueError, match=r"draft \(2, 12, 16, 3\), policy"):
            paired(tmp_path / "p.png", pictures(RED, RED), pictures(TEAL, TEAL), **bad)
    with pytest.raises(ValueError, match=r"draft \(2, 12, 16, 3\), policy \(1, 12, 16, 3\)"):
        paired(tmp_path / "p.png", pictures(RED, RED), pictures(TEAL))
    assert not list(tmp_path.iterdir())


def test_the_scatter_has_a_panel_per_prompt_in_the_colours_of_the_choice(tmp_path):
    g = torch.Generator().manual_seed(0)
    proxy, true = torch.randn(6, 20, generator=g), torch.randn(6, 20, generator=g)
    proxy[0, 3] = float("nan")
    one = pixels(save_rank_scatter(tmp_path / "one.png", proxy[:1], true[:1], keep=4))
    six = pixels(save_rank_scatter(tmp_path / "six.png", proxy, true, keep=4, titles=list("abcdef")))
    assert six.shape[0] == 2 * one.shape[0]
    assert six.shape[1] == 5 * one.shape[1]
    plain = pixels(save_rank_scatter(tmp_path / "few.png", proxy[:1], true[:1], keep=1))
    blue, orange = (43, 108, 176), (221, 107, 32)
    for colour in (blue, orange):  # as blended with white
        blended = tuple(int(0.6 * c + 0.4 * 255) for c in colour)
        assert share_of(one, blended) > share_of(plain, blended)


def test_a_scatter_of_nothing_or_of_other_shapes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="titles"):
        save_rank_scatter(tmp_path / "p.png", torch.zeros(2, 8), torch.zeros(2, 8), keep=2, titles=["a"])
    with pytest.raises(ValueError, match="keep"):
        save_rank_scatter(tmp_path / "p.png", torch.zeros(2, 8), torch.zeros(2, 8), keep=5)
    with pytest.raises(ValueError, match="shape"):
        save_rank_scatter(tmp_path / "p.png", torch.zeros(2, 8), torch.zeros(2, 7), keep=2)
    assert not list(tmp_path.iterdir())


def test_prompts_with_dollars_are_no_mathematics(tmp_path):
    image, odd = pictures(RED, RED), "costs $\\frac{ and $5"
    paired(tmp_path / "p.png", image, image, titles=(odd, odd))
    save_rank_scatter(tmp_path / "s.png", torch.randn(1, 8), torch.randn(1, 8), keep=2, titles=[odd])
    save_grid(tmp_path / "g.png", image, captions=[odd, odd])
    save_curve(tmp_path / "c.png", rows(), title=odd)
    compared(tmp_path / "b.png", image, image, titles=[odd, odd])


def test_the_last_update_is_the_largest_number_told():
    rows = [{"loss": 1.0}, {"loss/update_1": 1.0, "loss/update_2": 1.0, "loss/update_11": 1.0, "kl/update_12": 1.0}]
    assert last_update(rows) == 11
    assert last_update(rows[:1]) == last_update([]) == 1
