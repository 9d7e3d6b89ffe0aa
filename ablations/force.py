"""Force spectrum: which parameters do guidance and restoration move, and how much do the states cancel each other?

    python ablations/force.py [--quick]

Full fine-tuning of the digits model with ART (all six steps, learning rate 3e-4). At iterations 0 and 10: one update on the
first half of every group, then on the second half the forces of `extensions.force_spectrum` by module. The paper reports
restoration with 9.4x smaller output RMS and 4.9x larger parameter gradient than guidance.
"""

import copy
import json
import math
import os

import common
import torch
from tqdm import tqdm

from diffrl import algorithms as a
from diffrl.extensions import force_spectrum
from diffrl.loop import train, update
from diffrl.sampling import sample_seeds
from diffrl.types import Gridded
from diffrl.windows import Score, encode, prompts_of_iteration, split_within_prompt, window_of

SEEDS, AT, K, PROMPTS, STEPS, RATE = (0, 1, 2), (0, 10), 8, 8, 6, 3e-4


def groups_of(names: list[str]) -> dict[str, list[str]]:
    """Attention, feed-forward and modulation, and the first, middle and last third of the blocks."""
    kinds = {"attention": ".attn", "feed-forward": ".ff", "modulation": ".norm"}
    found = {kind: [n for n in names if mark in n] for kind, mark in kinds.items()}
    blocks = sorted({int(n.split(".")[1]) for n in names if n.startswith("transformer_blocks.")})
    for number, block in enumerate(blocks):
        found[f"block {number}"] = [n for n in names if n.startswith(f"transformer_blocks.{block}.")]
    return {group: members for group, members in found.items() if members} | {"all": names}


def measured(model, optimizer, prompts, reward, seed: int, i: int, columns) -> dict:
    """The spectrum on update 2's window of iteration i; the params are stepped by update 1, then put back."""
    algorithm = a.art()
    saved = {name: p.detach().clone() for name, p in model.params.items()}
    chosen = prompts_of_iteration(seed, i, len(prompts), PROMPTS)
    sampler = Gridded(model.velocity, model.times, STEPS, tuple(model.latent_shape()))
    with torch.no_grad():
        cond = encode(model, [prompts[p] for p in chosen])
        score = Score(model.decode, reward, [prompts[p] for p in chosen])
        batch = algorithm.collect(sampler, model.params, cond, sample_seeds(seed, i, chosen, K), score)
        credit = algorithm.credit(batch)
    first, second = (window_of(batch, credit, rows) for rows in split_within_prompt(PROMPTS, K, 2))
    state = copy.deepcopy(optimizer.state_dict())
    update(algorithm.objective, model, optimizer, first)
    groups = groups_of(list(model.params))
    found = force_spectrum(model.velocity, model.params, second, groups=groups, states=24, columns=columns)
    with torch.no_grad():
        for name, p in model.params.items():
            p.copy_(saved[name])
            p.grad = None
    optimizer.load_state_dict(state)
    return {group: {kind: list(force) for kind, force in kinds.items()} for group, kinds in found.items()}


def of_seed(seed: int, at: tuple[int, ...]) -> list[dict]:
    """One record per measurement: iteration, which steps, the spectrum."""
    pipe, prompts, reward, options = common._task("digits")
    from diffrl.models import from_pipeline

    torch.manual_seed(seed)
    model = from_pipeline(pipe, lora=None, **options)
    optimizer = torch.optim.AdamW(list(model.params.values()), lr=RATE, weight_decay=0.0)
    keywords = {"group_size": K, "steps": STEPS, "seed": seed, "prompts_per_iteration": PROMPTS}
    training = train(model, a.art(), prompts, reward, optimizer, **keywords)
    records = []
    for i in tqdm(range(max(at) + 1), desc=f"force, seed {seed}"):
        if i in at:
            for name, columns in (("all", None), ("noisiest two", [0, 1]), ("last two", [4, 5])):
                spectrum = measured(model, optimizer, prompts, reward, seed, i, columns)
                records.append({"seed": seed, "iteration": i, "steps": name, "spectrum": spectrum})
        if i < max(at):
            next(training)
    return records


def main() -> None:
    options = common.options_of(__doc__)
    torch.set_num_threads(options.jobs)
    seeds, at = (SEEDS[:1], (0, 1)) if options.quick else (SEEDS, AT)
    folder = common.ROOT / "runs" / "ablations" / "force"
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for seed in seeds:
        path = folder / f"seed{seed}-{'-'.join(map(str, at))}.json"
        if not path.is_file():
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(of_seed(seed, at)))
            os.replace(temporary, path)
        records += json.loads(path.read_text())
    draw(records, at, seeds, quick=options.quick)


def draw(records: list[dict], at, seeds, *, quick: bool) -> None:
    """CSV, bars of the two ratios by module, table."""
    lines, told = [], {}
    for record in records:
        for group, kinds in record["spectrum"].items():
            (out_g, force_g, chi_g), (out_r, force_r, chi_r) = kinds["guidance"], kinds["restoration"]
            values = (out_g / out_r if out_r else math.nan, force_r / force_g if force_g else math.nan, chi_g, chi_r)
            lines.append([record["seed"], record["iteration"], record["steps"], group, *(f"{v:.4g}" for v in values)])
            told.setdefault((record["iteration"], record["steps"], group), []).append(values)
    stem = "force-quick" if quick else "force"
    folder = common.ROOT / ("runs/ablations" if quick else "ablations/results")
    head = "seed,iteration,steps,group,output guidance/restoration,parameter restoration/guidance,chi guidance,chi restoration"
    (folder / f"{stem}.csv").write_text("\n".join([head, *(",".join(map(str, line)) for line in lines)]) + "\n")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    groups = [g for i, s, g in told if (i, s) == (at[-1], "all")]
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.8))
    titles = (
        "parameter force: restoration / guidance",
        "cancellation chi of guidance",
        "cancellation chi of restoration",
    )
    for axis, which, title in zip(axes, (1, 2, 3), titles):
        for offset, steps in zip((-0.27, 0, 0.27), ("noisiest two", "all", "last two")):
            intervals = [common.interval([v[which] for v in told[at[-1], steps, g]]) for g in groups]
            x = [number + offset for number in range(len(groups))]
            axis.bar(
                x, [m for m, _ in intervals], 0.25, yerr=[0 if math.isnan(h) else h for _, h in intervals], label=steps
            )
        axis.set_xticks(range(len(groups)), groups, rotation=45, ha="right", fontsize=8)
        axis.set_title(title, fontsize=9)
    common.legend_beside(figure)
    note = f"iteration {at[-1]}, mean and 95 % t-interval over seeds {seeds}, 24 states; python ablations/force.py"
    print(common.save_figure("force", figure, note, quick=quick))
    rows = []
    for (i, steps, group), values in told.items():
        if group in ("all", "attention", "feed-forward"):
            rows.append([str(i), steps, group, *(common.plus_minus([v[c] for v in values]) for c in range(4))])
    header = ["iteration", "steps", "module", "output RMS g/r", "parameter force r/g", "chi g", "chi r"]
    print(common.table("Guidance (g) and restoration (r) on update 2's window", header, rows))


if __name__ == "__main__":
    main()
