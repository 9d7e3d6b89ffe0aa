# %% [markdown]
# # 05 · Four bits, and ranks that agree
#
# Some samples of a group teach more than others: the best and the worst. Sol-RL (arXiv 2604.06916) draws *many* samples with a cheap
# four-bit copy of the policy, a **draft**, only to learn which seeds are the best and the worst; then the policy itself renders
# those few seeds again, and learns from its own samples alone. So a draft need not be right. It has to **rank** right.
#
# This page draws the four-bit numbers, makes a draft, measures its ranks, and trains with one. There is no FP4 hardware here: four bits
# are *emulated*, values are exact and the speed is not. Tables with intervals: `ablations/fp4.py` and `docs/results.md`.

# %%
import itertools
import tempfile
import time
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from IPython.display import Image

from diffrl.algorithms import nft, sol_rl
from diffrl.contrast import draft_rewards, rank_agreement, select_contrastive
from diffrl.drafts import merged_draft
from diffrl.fp4 import e2m1_round, mxfp4_fake_quantize, nvfp4_fake_quantize
from diffrl.loop import train
from diffrl.models import from_pipeline
from diffrl.plots import save_rank_scatter
from diffrl.rewards import ocr
from diffrl.sampling import interpolate, rollout, sample_seeds, seeded_noise
from diffrl.settings import evaluate
from diffrl.tasks import digits
from diffrl.trust_region import kl_proxy
from diffrl.windows import Score

torch.set_num_threads(2)
plt.rcParams.update({"figure.dpi": 80, "font.size": 9})
BLUE, ORANGE, GREEN = "#2b6cb0", "#dd6b20", "#2f855a"

# %% [markdown]
# ## Sixteen codes, eight sizes
#
# E2M1: a sign, two bits of exponent, one of mantissa. The magnitudes are 0, ½, 1, 1½, 2, 3, 4, 6, and nothing in between. Rounding is to
# the nearest, ties to the even code, and everything beyond 6 is 6. So a tensor must be **scaled** first, block by block:
#
# - **MXFP4**: 32 numbers share a scale, a power of two.
# - **NVFP4**: 16 numbers share a scale with three bits of mantissa (E4M3), and the tensor has one more, in float32.

# %%
grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
x = torch.linspace(-7.5, 7.5, 3001)
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.4), layout="constrained")
left.plot(x, x, color="grey", linestyle=":", linewidth=1, label="x")
left.plot(x, e2m1_round(x), color=BLUE, label="e2m1_round(x)")
left.plot(torch.cat([-grid, grid]), torch.cat([-grid, grid]), "o", color=BLUE, markersize=4)
left.set(title="the grid: steps of ½, 1, 2", xlabel="x")
left.legend(fontsize=8, loc="upper left")
left.grid(alpha=0.25)

generator = torch.Generator().manual_seed(0)
blocks = torch.randn(4096, 32, generator=generator)
blocks = blocks / blocks.abs().amax(1, keepdim=True)  # every block's largest magnitude is 1
tops = 2 ** torch.linspace(0, 2, 81)
kinds = {
    "MXFP4, floor (the standard's)": (mxfp4_fake_quantize, "#e53e3e", "-"),
    "MXFP4, even": (partial(mxfp4_fake_quantize, scaling="even"), ORANGE, "-"),
    "MXFP4, rceil (never saturates)": (partial(mxfp4_fake_quantize, scaling="rceil"), "#805ad5", "--"),
    "NVFP4, two levels": (nvfp4_fake_quantize, BLUE, "-"),
}


def relative_error(quantize, x):
    """rms(quantize(x) - x)/rms(x)."""
    return float((quantize(x) - x).square().mean().sqrt() / x.square().mean().sqrt())


for name, (quantize, colour, style) in kinds.items():
    right.plot(tops, [relative_error(quantize, top * blocks) for top in tops], style, color=colour, label=name)
right.set(title="rounding error of normal data, by the largest of each block", xlabel="largest magnitude of every block", ylabel="relative rms error")
right.set_ylim(0.07, 0.32)
right.legend(fontsize=8, loc="upper left", ncols=2)
right.grid(alpha=0.25)

# %% [markdown]
# Look at the right picture from 1 to 2 and from 2 to 4: the same, because every scale doubles. A power of two cannot meet the
# largest magnitude, so MXFP4's error depends on where that falls between two powers: with `floor`, largest magnitudes between 1½ times a power of
# two and the next one are cut off (they saturate), the worse the larger; `rceil` never cuts and leaves up to half of the grid empty instead; `even`
# decides in between. NVFP4's scale follows the block, and its curve is flat.
#
# On plain normal data:

# %%
normal = torch.randn(1024, 1024, generator=generator)
for name, (quantize, _, _) in kinds.items():
    print(f"{name:32} {relative_error(quantize, normal):.4f}")

# %% [markdown]
# A trap that costs a day: NVFP4 with *one* level (no scale per tensor) has an absolute floor, because the smallest block scale is
# 2⁻⁶. Small weights vanish:

# %%
for size in (1e-1, 1e-2, 1e-3):
    one, two = (float(nvfp4_fake_quantize(torch.full((16,), size), two_level=levels)[0]) for levels in (False, True))
    print(f"{size:.3f}  one level: {one:.5f}   two levels: {two:.5f}")

# %% [markdown]
# ## A draft
#
# `merged_draft` copies the policy's network with every linear layer in four bits, weights *and* activations, the LoRA merged in before
# rounding. Calling it with params writes these into the copy. Nothing else about the policy changes.

# %%
torch.manual_seed(0)
model = from_pipeline(digits.load_pipeline(), lora={"r": 16, "lora_alpha": 32}, **digits.pipeline_options())
drafts = {"NVFP4": merged_draft(model), "MXFP4": merged_draft(model, quantize=mxfp4_fake_quantize)}
print(drafts["NVFP4"].report)
print(f"{drafts['NVFP4'].share:.0%} of the network's numbers are in four-bit layers")

# %% [markdown]
# How wrong is its velocity? Relative rms error at the states of the policy's own trajectories, by noise level. And for comparison with
# the **trust region** of DiffusionART: its KL proxy between the draft's step and the policy's, against the published radius 1e-5.

# %%
prompts, judge, STEPS, POOL, KEEP = digits.prompts()[3::25], ocr(), 8, 48, 6
cond, shape, times = model.encode(prompts), model.latent_shape(), model.times(STEPS)
seeds = sample_seeds(2024, 0, range(len(prompts)), POOL)
rows = torch.arange(len(prompts)).repeat_interleave(8)
few = {name: value[rows] for name, value in cond.items()}
with torch.no_grad():
    walked = rollout(model.velocity, model.params, few, times, seeds=seeds[:, :8].flatten(), shape=shape)
error, divergence = {}, {}
for name, draft in drafts.items():
    velocity, params = draft(model.params)
    error[name], divergence[name] = [], []
    for i, t in enumerate(walked.t):
        v = velocity(params, walked.x_t[:, i], t.expand(len(rows)), few)
        error[name].append(float((v - walked.v[:, i]).square().mean().sqrt() / walked.v[:, i].square().mean().sqrt()))
        divergence[name].append(float(kl_proxy(v, walked.v[:, i], t, walked.t_next[i]).mean()))

figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3), layout="constrained")
for name, colour in (("NVFP4", BLUE), ("MXFP4", "#e53e3e")):
    left.plot(walked.t, error[name], "o-", color=colour, label=name)
    right.plot(walked.t, divergence[name], "o-", color=colour, label=name)
right.axhline(1e-5, color="grey", linestyle="--", label="trust region of DiffusionART")
right.set(yscale="log", title="KL proxy, draft against policy", xlabel="t (1 is noise)", ylim=(3e-6, 1))
left.set(title="relative rms error of the draft's velocity", xlabel="t (1 is noise)", ylim=(0, None))
for axis in (left, right):
    axis.legend(fontsize=8)
    axis.grid(alpha=0.25)
print("smallest KL proxy over the radius:", {name: f"{min(values) / 1e-5:.0f}x" for name, values in divergence.items()})

# %% [markdown]
# **This is the naive trap.** It is tempting to train on the draft's samples and velocities, since they are already there. But a loss that
# compares the live policy with $v_\text{old}$ then starts *outside* its trust region before the first update, and what it learns first is to
# undo the rounding. On this task that breaks DiffusionNFT altogether within ten iterations (`ablations/fp4.py`, "naive FP4": no number is read any
# more; with the policy's own velocities at the same states it learns). Sol-RL lets the draft choose, and nothing else.
#
# ## Do the ranks agree?
#
# Four prompts, 48 seeds each. The policy renders them all with its 8 steps: that is the truth. Each draft renders the same seeds, with fewer
# steps or fewer bits, and we compare ranks.

# %%
score = Score(model.decode, judge, prompts)


def pool(draft, steps):
    """Rewards " 4 48" of every seed by an ODE walk of the draft."""
    velocity, params = draft(model.params)
    return draft_rewards(velocity, params, cond, seeds, score, times=model.times(steps), shape=shape)


policy = lambda params: (model.velocity, params)
began = time.process_time()
true = pool(policy, STEPS)
seconds = {"policy": time.process_time() - began}
proxies = {("policy", steps): pool(policy, steps) for steps in (2, 4)}
for steps in (2, 4, 8):
    began = time.process_time()
    proxies["NVFP4", steps] = pool(drafts["NVFP4"], steps)
    seconds["NVFP4"] = time.process_time() - began
proxies |= {("MXFP4", steps): pool(drafts["MXFP4"], steps) for steps in (4, 8)}
print("of the policy's rewards", {value: round(float((true == value).double().mean()), 2) for value in sorted({float(v) for v in true.unique()})})

# %%
with tempfile.TemporaryDirectory() as folder:
    scatter = save_rank_scatter(Path(folder) / "ranks.png", proxies["NVFP4", 4], true, keep=KEEP, titles=prompts)
    picture = Image(scatter.read_bytes(), width=900)
picture

# %% [markdown]
# Each disc is one or more seeds; its area counts them. The OCR reward has few values, so seeds come in **ties** and the discs sit on a
# coarse lattice. On the diagonal the two agree. Blue is what the draft would choose as best, orange as worst: mistakes are blue discs far
# up and orange discs far down. Grey circles around a coloured disc are seeds of the same two rewards that were not chosen: among equals the
# lower number goes first.

# %%
told = {key: rank_agreement(proxy, true, keep=KEEP) for key, proxy in proxies.items()}
print(f"{'draft':8} {'steps':>5} {'Spearman':>9} {'Kendall':>8} {'top':>5} {'bottom':>7} {'bottom in the better half':>26}")
for (name, steps), found in told.items():
    values = [float(getattr(found, f).nanmean()) for f in ("spearman", "kendall", "top_match", "bottom_match", "bottom_false")]
    print(f"{name:8} {steps:5d} {values[0]:9.2f} {values[1]:8.2f} {values[2]:5.2f} {values[3]:7.2f} {values[4]:26.2f}")
print(f"by chance      {0:9.2f} {0:8.2f} {KEEP / POOL:5.2f} {KEEP / POOL:7.2f} {0.5:26.2f}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.4), layout="constrained")
for name, colour in (("policy", "grey"), ("NVFP4", BLUE), ("MXFP4", "#e53e3e")):
    found = [(steps, told[name, steps].spearman) for steps in (2, 4, 8) if (name, steps) in told]
    if name == "policy":
        found.append((STEPS, torch.ones(1)))
    left.plot([s for s, _ in found], [float(v.nanmean()) for _, v in found], "-", color=colour, label=f"{name}, mean of the prompts")
    for steps, values in found:
        left.plot([steps] * len(values), values, "o", color=colour, markersize=4, alpha=0.6)
left.set(title="agreement with the policy's 8 steps", xlabel="steps of the draft", ylabel="Spearman", ylim=(0, 1.05), xticks=[2, 4, 6, 8])
left.legend(fontsize=8, loc="lower right")
left.grid(alpha=0.25)

columns = select_contrastive(proxies["NVFP4", 4], keep=KEEP)
chosen = {"draft says": proxies["NVFP4", 4].gather(1, columns), "policy says": true.gather(1, columns)}
for j, (name, values) in enumerate(chosen.items()):
    best, worst = values[:, :KEEP].mean(1), values[:, KEEP:].mean(1)
    right.plot(torch.arange(4) + 0.16 * j, best, "o", color=BLUE, fillstyle="none" if j == 0 else "full", label=f"best {KEEP}, {name}")
    right.plot(torch.arange(4) + 0.16 * j, worst, "s", color=ORANGE, fillstyle="none" if j == 0 else "full", label=f"worst {KEEP}, {name}")
right.plot(torch.arange(4) + 0.08, true.mean(1), "k_", markersize=22, label="whole pool, policy")
right.set_xticks(range(4), [prompt.split('"')[1] for prompt in prompts])
right.set(title="mean reward of the chosen: NVFP4, 4 steps", ylim=(-0.05, 1.75), xlabel="prompt")
right.set_yticks([0, 0.5, 1])
right.legend(fontsize=8, ncols=2, loc="upper left")
right.grid(alpha=0.25)

# %% [markdown]
# On the right: open marks are the rewards a draft chose by, filled ones what the policy's own samples of these seeds are worth. Rewards
# of the chosen **regress** towards the middle, as extremes of a noisy measurement always do; that is why the policy's samples are scored
# again, and only those rewards are learned from.
#
# Four prompts are few: that NVFP4 ranks better than the policy at 2 steps is noise, and one prompt can be a tenth away from another. Over ten prompts and 96 seeds (`ablations/fp4.py`) NVFP4 stays above .8 from 4 steps on and MXFP4 at about .6 whatever the
# steps; Sol-RL reports .927 on released models.
#
# ## What choosing costs
#
# With $n$ drafts of $T_d$ steps and $2k$ samples of $T$ steps, a rollout is $nT/(nT_d/s + 2kT)$ times as fast as $n$ samples of the policy,
# where $s$ is the draft's speed-up per step. (Decoding and scoring come on top, $n$ and $2k$ times.) Compare also with the line at
# $2k/n$: a rollout of $2k$ *random* seeds, which needs no draft at all.

# %%
speed = torch.linspace(0.25, 4, 200)
n, kept, T = 96, 24, 10
figure, axis = plt.subplots(figsize=(6.5, 3.2), layout="constrained")
for steps, colour in ((2, GREEN), (4, BLUE), (6, ORANGE)):
    axis.plot(speed, (n * steps / speed + kept * T) / (n * T), color=colour, label=f"{steps} draft steps of {T}")
axis.axhline(1, color="grey", linestyle=":")
axis.axhline(kept / n, color="grey", linestyle="--", label=f"{kept} seeds at random")
axis.axvline(1, color="grey", linewidth=0.8)
axis.set(xlabel="speed-up of the draft per step, s", ylabel="cost of a rollout", title=f"{n} seeds ranked by the policy cost 1", ylim=(0, 2))
axis.legend(fontsize=8, loc="upper right")
print(f"here, emulated: s = {seconds['policy'] / seconds['NVFP4']:.2f} (CPU seconds of a pool of 8 steps, decoding and scoring included)")

# %% [markdown]
# Emulation makes a draft *slower* than the policy (s below 1), so on this machine four bits are there to be studied. What pays on any machine is fewer steps.
#
# ## One short training
#
# `sol_rl` wraps any algorithm whose samples start from their own seeds. Here DiffusionNFT: 32 drafts of 4 steps per prompt, the best and worst 6 are trained on. Its
# metrics come with every iteration.

# %%
algorithm = sol_rl(nft(), draft=merged_draft(model), pool=32, keep=KEEP, draft_steps=4, audit_every=3, audit_prompts=2, threshold=-1)
start = evaluate(model, prompts, judge, steps=STEPS, samples=12)
optimizer = torch.optim.AdamW(list(model.params.values()), lr=3e-3, weight_decay=0.0)
training = train(model, algorithm, prompts, judge, optimizer, group_size=2 * KEEP, steps=STEPS, seed=0)
told = list(itertools.islice(training, 7))
end = evaluate(model, prompts, judge, steps=STEPS, samples=12)

names = ["reward/mean", "draft/spearman", "draft/gap", "draft/reversed", "draft/groups_dead", "audit/spearman"]
print("iteration " + " ".join(f"{name:>17}" for name in names))
for row in told:
    print(f"{row['iteration']:9d} " + " ".join(f"{row[name]:17.2f}" if name in row else " " * 17 for name in names))
print(f"held-out seeds, read exactly: {float(start.exact.mean()):.2f} before, {float(end.exact.mean()):.2f} after, of {len(end.exact)}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3), layout="constrained")
line = [row["iteration"] for row in told]
left.plot(line, [row["draft/spearman"] for row in told], "o-", color=BLUE, label="draft/spearman (of the chosen)")
audits = [row for row in told if "audit/spearman" in row]
left.plot([row["iteration"] for row in audits], [row["audit/spearman"] for row in audits], "s", color="black", label="audit/spearman (whole pools of two prompts)")
left.set(title="does the draft still rank as the policy does?", xlabel="iteration", ylim=(-0.25, 1.05))
left.legend(fontsize=8, loc="lower left")
right.plot(line, [row["draft/gap"] for row in told], "o-", color=GREEN, label="draft/gap: best half minus worst half")
right.plot(line, [row["draft/groups_dead"] for row in told], "o-", color="grey", label="draft/groups_dead: pools without spread")
right.plot(line, [row["reward/mean"] for row in told], "o-", color=ORANGE, label="reward/mean (over extremes!)")
right.set(title="is there still something to choose?", xlabel="iteration", ylim=(-0.05, 1.5))
right.set_yticks([0, 0.5, 1])
right.legend(fontsize=8, loc="upper left")
for axis in (left, right):
    axis.grid(alpha=0.25)

# %% [markdown]
# How to read these. `draft/spearman` is measured on the chosen samples only, extremes, which inflates it: watch its trend, not its
# level. `audit/spearman` is the honest one, and costs a pool of the policy. `draft/gap` is what the algorithm lives on: where it goes to
# zero, all samples of a prompt are worth the same and there is nothing left to choose. Then the ranks are of ties and `draft/spearman`
# falls too, through no fault of the draft; where every seed of a pool has the same reward there are no ranks at all, and an audit says nan. `reward/mean` averages best and worst halves, so it is
# *not* the policy's mean reward; the held-out line is.
#
# Seven iterations and one seed show that the pieces work together, no more. Does choosing pay on this task? With intervals: **no**, not per evaluation
# (`docs/results.md`, Sol-RL): with a reward of three values a group of 24 random seeds already holds good and bad samples.
#
# ## Change this
#
# 1. `merged_draft(model, quantize=mxfp4_fake_quantize)` in the training. Which metric tells you first?
# 2. Leave layers alone: `merged_draft(model, skip=("norm_out", "proj_out", "context_embedder"))`; print its report and its velocity's error.
# 3. The reward `diffrl.rewards.jpeg_compressibility()` has no ties. What do the scatter and Spearman look like now?
# 4. `draft=policy` with `draft_steps=2`: no four bits at all, only fewer steps. Compare its row in the table with NVFP4's.
# 5. `keep=16`, `pool=32`, `group_size=32`: everything is chosen. What is left of `draft/gap`?
