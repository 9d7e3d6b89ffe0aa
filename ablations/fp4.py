"""Sol-RL on the digits: how far can a four-bit draft's ranks be trusted, and what does choosing 24 of 96 gain?

    python ablations/fp4.py [--quick]

1. Rank agreement of NVFP4 and MXFP4 drafts (and of the unquantised policy) at 2, 4, 6, 8 steps with the policy's 8 steps, on
   the base model: pools of 96 seeds of ten prompts.
2. ART and DiffusionNFT, groups of 24: of 24 seeds; of 96 ranked by the policy itself; of 96 ranked by an NVFP4 draft of 6
   steps (Sol-RL); and two forms of naive FP4, which trains on the draft's samples and rewards: with the policy's velocities
   at those states as v_old ("FP4 samples"), or with the draft's ("naive FP4").

Cost is counted in model evaluations, one of the draft weighing 1/3.5 of one of the policy: the speed-up per step that
Sol-RL's published 2.33x and 2.41x imply on a device with FP4 (2604.06916). This script emulates FP4, which is *slower*.
"""

import csv
import json
import math
from functools import partial
from typing import Any

import common
import torch
from common import ROOT, Run
from tqdm import tqdm

from diffrl.algorithms import Algorithm, art, nft, sol_rl
from diffrl.contrast import draft_rewards, rank_agreement, select_contrastive
from diffrl.drafts import merged_draft
from diffrl.fp4 import mxfp4_fake_quantize, nvfp4_fake_quantize

POOL, KEEP, STEPS, DRAFT_STEPS, SPEED = 96, 12, 8, 6, 3.5
INNER = {"ART": (art, 1e-3), "NFT": (nft, 3e-3)}
FORMATS = {"policy": None, "NVFP4": nvfp4_fake_quantize, "MXFP4": mxfp4_fake_quantize}
COST = {
    "24 of 24": 2 * KEEP * STEPS,
    "24 of 96": POOL * STEPS,  # its samples need not be rendered twice
    "Sol-RL": POOL * DRAFT_STEPS / SPEED + 2 * KEEP * STEPS,
    "FP4 samples": POOL * STEPS / SPEED + 2 * KEEP * STEPS,  # v_old once more, by the policy
    "naive FP4": POOL * STEPS / SPEED,
}
"""Policy evaluations per prompt and iteration."""


def policy_ranked(inner: Algorithm, model: Any) -> Algorithm:
    return sol_rl(inner, draft=lambda p: (model.velocity, p), pool=POOL, keep=KEEP, draft_steps=STEPS)


def draft_ranked(inner: Algorithm, model: Any) -> Algorithm:
    return sol_rl(inner, draft=merged_draft(model), pool=POOL, keep=KEEP, draft_steps=DRAFT_STEPS)


def samples_of_the_draft(inner: Algorithm, model: Any) -> Algorithm:
    """Trained on the draft's samples and rewards; v_old is the policy's at those states."""
    drafted = naive(inner, model)

    def collect(velocity, params, cond, seeds, score):
        batch = drafted.collect(velocity, params, cond, seeds, score)
        tr = batch.trajectory
        own = {name: value.repeat_interleave(2 * KEEP, 0) for name, value in cond.items()}
        v = [velocity(params, tr.x_t[:, j], t.expand(len(tr.x_0)), own) for j, t in enumerate(tr.t)]
        return batch._replace(trajectory=tr._replace(v=torch.stack(v, dim=1)))

    return drafted._replace(collect=collect)


def naive(inner: Algorithm, model: Any) -> Algorithm:
    """What Sol-RL is there to avoid: the draft's own samples and velocities are what is trained on."""
    draft = merged_draft(model)

    def collect(velocity, params, cond, seeds, score):
        by, own = draft(params)
        sampler = velocity._replace(velocity=by)
        times = sampler.times(sampler.steps)
        proxy = draft_rewards(by, own, cond, seeds, score, times=times, shape=sampler.shape)
        return inner.collect(sampler, own, cond, seeds.gather(1, select_contrastive(proxy, keep=KEEP)), score)

    return inner._replace(collect=collect, pool=POOL, kept=2 * KEEP)


def piece(kind: str, name: str) -> Any:
    inner = INNER[name][0]()
    make = {
        "24 of 96": policy_ranked,
        "Sol-RL": draft_ranked,
        "FP4 samples": samples_of_the_draft,
        "naive FP4": naive,
    }
    return inner if kind == "24 of 24" else partial(make[kind], inner)


PIECES: common.Pieces = {f"{name}, {kind}": partial(piece, kind, name) for name in INNER for kind in COST}
RUNS = [
    Run(f"{name}, {kind}", seed, INNER[name][1], 20, group_size=2 * KEEP, prompts=4, steps=STEPS, eval_every=5)
    for seed in (0, 1, 2)
    for name in INNER
    for kind in COST
]


# ---- rank agreement ---------------------------------------------------------------------------------------------------


def agreement(quick: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(one row per format and number of steps, the pools' rewards for the picture), kept in runs/ablations/fp4/."""
    path = ROOT / "runs" / "ablations" / "fp4" / f"agreement{'-quick' * quick}.json"
    if path.is_file():
        return json.loads(path.read_text())
    from diffrl.models import from_pipeline
    from diffrl.sampling import sample_seeds
    from diffrl.windows import Score, encode

    torch.set_num_threads(1)
    pipe, prompts, reward, options = common._task("digits")
    torch.manual_seed(0)
    model = from_pipeline(pipe, lora={"r": 16, "lora_alpha": 32}, **options)
    chosen = prompts[3 :: 50 if quick else 10]
    cond, seeds = encode(model, chosen), sample_seeds(2**62 + 6, 0, range(len(chosen)), POOL)
    score = Score(model.decode, reward, chosen)

    def pool(draft: Any, steps: int) -> torch.Tensor:
        by, own = draft(model.params)
        times, shape = model.times(steps), model.latent_shape()
        return draft_rewards(by, own, cond, seeds, score, times=times, shape=shape, chunk=POOL)

    def policy(params: Any) -> Any:
        return model.velocity, params

    true, rows, kept = pool(policy, STEPS), [], {}
    jobs = [(name, steps) for name in FORMATS for steps in (2, 4, 6, 8)]
    for name, steps in tqdm(jobs, desc="rank agreement"):
        quantize = FORMATS[name]
        proxy = pool(policy if quantize is None else merged_draft(model, quantize=quantize), steps)
        told = rank_agreement(proxy, true, keep=KEEP)._asdict()
        known = {k: [float(x) for x in v if math.isfinite(x)] for k, v in told.items()}
        rows.append({"draft": name, "steps": steps, "reward": float(proxy.mean()), **known})
        kept[f"{name} {steps}"] = proxy.tolist()
    found = [rows, {"prompts": chosen, "true": true.tolist(), **kept}]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))
    return found[0], found[1]


def report_agreement(rows: list[dict[str, Any]], quick: bool) -> None:
    names = ["spearman", "kendall", "top_match", "bottom_match", "bottom_false", "mean_rank_top", "mean_rank_bottom"]
    lines = [
        [r["draft"], str(r["steps"]), f"{r['reward']:.3f}", *(common.plus_minus(r[n]) for n in names)] for r in rows
    ]
    print(common.table("Rank agreement with 8 steps of the policy", ["draft", "steps", "mean reward", *names], lines))
    if quick:
        return
    path = ROOT / "ablations" / "results" / "fp4_agreement.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["draft", "steps", "reward", *names])
        for r in rows:
            writer.writerow(
                [r["draft"], r["steps"], f"{r['reward']:.6g}"] + [f"{sum(r[n]) / len(r[n]):.6g}" for n in names]
            )
    print(path)


# ---- training ---------------------------------------------------------------------------------------------------------


def draw(rows: list[dict[str, Any]], found: Any, quick: bool) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(21, 4.8))
    for number, name in enumerate(FORMATS):
        of = [r for r in rows if r["draft"] == name]
        values = [common.interval(r["spearman"]) for r in of]
        axes[0].errorbar(
            [r["steps"] for r in of],
            [m for m, _ in values],
            [h for _, h in values],
            label=name,
            marker="o",
            color=f"C{number}",
            capsize=3,
        )
    axes[0].set_xlabel("draft steps")
    axes[0].set_ylabel("Spearman with the policy's 8 steps")
    axes[0].set_title("rank agreement on the base model (over prompts)", fontsize=9)
    axes[0].legend(fontsize=8)
    for axis, name in zip(axes[1:3], INNER, strict=True):
        common.draw_bands(
            axis, found, [f"{name}, {kind}" for kind in COST], "eval/exact_match", x="weighted evaluations"
        )
        axis.set_title(f"{name}: exact match against cost", fontsize=9)
        axis.legend(fontsize=8, loc="lower right")
    common.draw_bands(
        axes[3], found, [f"{name}, {kind}" for name in INNER for kind in COST], "eval/exact_match", x="samples"
    )
    axes[3].set_title("the same against samples drawn, drafts included", fontsize=9)
    axes[3].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    first = next(iter(found))
    seeds = sorted({run.seed for run in found})
    note = (
        f"mean and 95 % t-interval over seeds {seeds}; {first.iterations} iterations of {first.prompts} prompts x {first.group_size} trained "
        f"samples, {STEPS} steps; ART 1e-3, NFT 3e-3; a draft evaluation counts 1/{SPEED:g} (stated, not measured: emulated here); evaluated on 100 prompts; "
        f"{'QUICK, no result; ' * quick}python ablations/fp4.py"
    )
    print(common.save_figure("fp4", figure, note, quick=quick))


def main() -> None:
    options = common.options_of(__doc__)
    rows, _ = agreement(options.quick)
    report_agreement(rows, options.quick)
    found = common.results("fp4", common.shortened(RUNS, options.quick), jobs=options.jobs)
    for run, told in found.items():
        for row in told:
            row["weighted evaluations"] = (row["iteration"] + 1) * run.prompts * COST[run.name.split(", ")[1]]
    print(common.write_csv("fp4", found, quick=options.quick))
    draw(rows, found, options.quick)
    lines = []
    for name in dict.fromkeys(run.name for run in found):
        cost: float = COST[name.split(", ")[1]]
        told = [common.plus_minus(common.finals(found, name, y)) for y in ("eval/exact_match", "eval/reward")]
        spearman = common.plus_minus(means(found, name, "draft/spearman")) if "Sol-RL" in name else ""
        lines.append([name, f"{cost:.0f}", f"{cost / COST['24 of 24']:.2f}", *told, spearman])
    header = ["piece", "evaluations per prompt", "cost", "eval/exact_match", "eval/reward", "Spearman on the chosen"]
    if not options.quick:
        print(common.table("Sol-RL", header, lines))


def means(found: Any, name: str, y: str) -> list[float]:
    """Of each run called `name`: the mean of y over its iterations."""
    told = [
        [row[y] for row in rows if math.isfinite(row.get(y, math.nan))]
        for run, rows in found.items()
        if run.name == name
    ]
    return [sum(values) / len(values) for values in told if values]


if __name__ == "__main__":
    main()
