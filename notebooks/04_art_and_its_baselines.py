# %% [markdown]
# # 04 · DiffusionART and its baselines
#
# Nine algorithms teach the same small Stable Diffusion 3 pipeline to write two-digit numbers, judged by a real OCR engine. Each gets
# the same prompts, the same start, the same number of samples and the same number of iterations. One loop runs all of them; what
# differs is the algorithm, a NamedTuple of functions.
#
# **What this page can and cannot say.** Eight iterations, one seed, six prompts. It shows how the methods *behave*: what they roll
# out, what they pay, which numbers to watch. It does not rank them. Statements with intervals (three seeds, thirty iterations, a
# learning rate chosen for each) are in `ablations/efficiency.py`, `transfer.py`, `restoration.py`; their tables are in
# `docs/results.md`.

# %%
import itertools
import time
import warnings

import matplotlib.pyplot as plt
import torch

from diffrl import algorithms
from diffrl.loop import train
from diffrl.models import from_pipeline
from diffrl.rewards import ocr
from diffrl.sampling import rollout, sample_seeds
from diffrl.settings import evaluate
from diffrl.tasks import digits

torch.set_num_threads(2)
plt.rcParams.update({"figure.dpi": 80, "font.size": 9})
warnings.filterwarnings("ignore", message=".*of groups have no spread")  # said below, as groups/dead
prompts, judge = digits.prompts()[4::17], ocr()
GROUP, STEPS, ITERATIONS = 8, 6, 8
print(", ".join(prompts))

# %% [markdown]
# ## The nine
#
# | | rolls out by | each sample is told | regresses on, or scores |
# |---|---|---|---|
# | `art` | an ODE | its prompt's one covariance direction $G$ | velocity: $\|v-(v_\text{old}-G)\|^2$, twice on a frozen target |
# | `nft` | an ODE, of a slow copy | optimality $r\in[0,1]$ | velocity at fresh noise: $r\,L_+ + (1-r)\,L_-$ |
# | `awm` | an ODE | its advantage | the matching error as log-likelihood, in a clipped ratio |
# | `flow_grpo` | an SDE, all steps | its advantage | the ratio of step likelihoods, clipped, plus a KL |
# | `flow_grpo_fast` | an SDE in a window of 3 steps, else an ODE | its advantage | the same in the window, no KL |
# | `mix_grpo` | an SDE in a sliding window of 4 | its advantage | the same, four updates per rollout |
# | `dance_grpo` | another SDE, one first noise per prompt | its advantage | the same, on 3/5 of the steps |
# | `grpo_guard` | an SDE, all steps | its advantage | a ratio whose bias is removed |
# | `flow_dppo` | an SDE | its advantage | an unclipped ratio; states that moved too far are dropped |
#
# Everything else is the papers' default. The learning rates of seven are those that `ablations/efficiency.py` chose of 3e-4, 1e-3 and
# 3e-3; it does not try `mix_grpo` and `grpo_guard`, which get Flow-GRPO's here, untuned.

# %%
RATES = {
    "art": 1e-3, "nft": 3e-3, "awm": 3e-3,
    "flow_grpo": 1e-3, "flow_grpo_fast": 3e-3, "mix_grpo": 1e-3,
    "dance_grpo": 3e-4, "grpo_guard": 1e-3, "flow_dppo": 1e-3,
}


def fresh():
    """The shipped pipeline with a new LoRA (the same one every time), which counts the states its network sees."""
    torch.manual_seed(0)
    model = from_pipeline(digits.load_pipeline(), lora={"r": 16, "lora_alpha": 32}, **digits.pipeline_options())
    seen = {"forward": 0, "forward and backward": 0}

    def velocity(params, x_t, t, cond):
        seen["forward and backward" if torch.is_grad_enabled() else "forward"] += len(x_t)
        return model.velocity(params, x_t, t, cond)

    return model._replace(velocity=velocity), seen


def teach(name):
    """(rows of metrics, with the CPU seconds of each; states per iteration; held-out evaluation after training)."""
    model, seen = fresh()
    optimizer = torch.optim.AdamW(list(model.params.values()), lr=RATES[name], weight_decay=0.0)
    training = train(model, getattr(algorithms, name)(), prompts, judge, optimizer, group_size=GROUP, steps=STEPS, seed=0)
    rows = []
    for _ in range(ITERATIONS):
        began = time.process_time()
        rows.append(next(training) | {"cpu": time.process_time() - began})
    states = {what: count / ITERATIONS for what, count in seen.items()}
    return rows, states, evaluate(model, prompts, judge, steps=STEPS, samples=GROUP)


# %% [markdown]
# ## A control first
#
# Training rewards are means of 48 samples, and every iteration draws new seeds: the curve of a policy that learns *nothing* wiggles.
# Here is that curve, the base model on the very seeds the algorithms will draw, by the plain ODE. It is a control for those that roll out by that ODE.
# The others draw the same seeds, but by another sampler: second-order steps (`nft`), an SDE with noise of its own, a noisy window
# (`flow_grpo_fast`); for them it shows the luck of the first noise at most, and is no control.

# %%
base, _ = fresh()


def untrained(i):
    """Mean reward of the base model on the seeds of iteration i."""
    seeds = sample_seeds(0, i, range(len(prompts)), GROUP).flatten()
    texts = [prompt for prompt in prompts for _ in range(GROUP)]
    with torch.no_grad():
        x_0 = rollout(base.velocity, base.params, base.encode(texts), base.times(STEPS), seeds=seeds, shape=base.latent_shape(), keep=[]).x_0
    return float(judge(base.decode(x_0), texts).mean())


control = [untrained(i) for i in range(ITERATIONS)]
before = evaluate(base, prompts, judge, steps=STEPS, samples=GROUP)
print("untrained:", " ".join(f"{r:.2f}" for r in control))
print(f"held-out seeds: reward {float(before.rewards.mean()):.2f}, read exactly {float(before.exact.mean()):.2f} of {len(before.exact)}")

# %% [markdown]
# ## Train

# %%
runs = {name: teach(name) for name in ("art", "nft", "awm")}
print(f"nothing is learned before the first update: art's first batch {runs['art'][0][0]['reward/mean']:.3f}, the base model's {control[0]:.3f}")

# %%
runs |= {name: teach(name) for name in ("flow_grpo", "flow_grpo_fast", "mix_grpo")}

# %%
runs |= {name: teach(name) for name in ("dance_grpo", "grpo_guard", "flow_dppo")}

# %%
figure, axes = plt.subplots(3, 3, figsize=(10.5, 7), layout="constrained", sharex=True, sharey=True)
for axis, (name, (rows, _, _)) in zip(axes.flat, runs.items()):
    mean = torch.tensor([row["reward/mean"] for row in rows])
    error = torch.tensor([row["reward/std"] for row in rows]) / (len(prompts) * GROUP) ** 0.5
    axis.fill_between(range(ITERATIONS), mean - error, mean + error, color="#2b6cb0", alpha=0.2, linewidth=0)
    axis.plot(mean, color="#2b6cb0", marker="o", markersize=3, label="training")
    same = name in ("art", "awm")  # roll out by the control's own sampler
    axis.plot(control, color="grey", linestyle=":", alpha=1 if same else 0.35, label="base model, same seeds, ODE")
    axis.set_title(f"{name}, learning rate {RATES[name]:g}", fontsize=9, loc="left")
    axis.grid(alpha=0.25)
axes[0, 0].legend(fontsize=8, loc="lower right")
figure.supxlabel("iteration", fontsize=9)
figure.supylabel("mean OCR reward of the training batch (band: one standard error)", fontsize=9);

# %%
print("first batch, nothing learned yet:", ", ".join(f"{name} {rows[0]['reward/mean']:.2f}" for name, (rows, _, _) in runs.items()))

# %% [markdown]
# What to look for.
#
# - **The dotted line is luck alone.** It climbs from .65 to .80 here, and no policy changed. Where a method rolls out by the same ODE (`art`, `awm`),
#   a curve that follows it has learned nothing, and one that leaves it upwards has. In the other seven panels (paler) it is *not* a control:
#   a gap between the lines may be the sampler's.
# - **Another sampler, another reward.** The first batches are all of the same untrained network. Flow-SDE noise (`flow_grpo`, `grpo_guard`,
#   `flow_dppo`: the same pictures) costs nothing visible here, second-order steps (`nft`) and DanceGRPO's noise cost some, and CPS noise in a window makes
#   numbers *easier* to read. `flow_grpo_fast` draws another window in every iteration, so its curve moves with the window as well as with the
#   policy. So compare methods after training, by one sampler, at held-out seeds: that is the next table.
# - **A band can lie.** It takes the 48 samples for independent. `dance_grpo` starts all samples of a prompt from one noise: six noises per batch, not 48, and
#   its curve jumps by much more than its band allows.
#
# ## After training, and what it cost
#
# One ODE sampler for all, 48 held-out seeds, the same for everybody. "Exactly" is the share read as the number asked for; its standard
# error at 48 samples is about .06, so differences of a tenth between two methods mean little.
#
# The network's work is counted in states (one sample at one time) per iteration: those that only go forward, and those that are trained
# on. CPU seconds are the median over the iterations; other programs on this machine disturb them less than they do wall-clock seconds, but
# they do.

# %%
def middle(values):
    """The median."""
    return sorted(values)[len(values) // 2]


n = len(before.exact)
exact = {"base": float(before.exact.mean())} | {name: float(found.exact.mean()) for name, (_, _, found) in runs.items()}
print(f"{'':15} {'exactly':>8} {'reward':>7} {'forward':>8} {'trained':>8} {'updates':>8} {'CPU s':>6}")
print(f"{'base':15} {exact['base']:8.2f} {float(before.rewards.mean()):7.2f}")
cpu = {name: middle([row["cpu"] for row in rows]) for name, (rows, _, _) in runs.items()}
for name, (rows, states, found) in runs.items():
    counts = "".join(f"{states[what]:9.0f}" for what in ("forward", "forward and backward"))
    updates = getattr(algorithms, name)().updates
    print(f"{name:15} {exact[name]:8.2f} {float(found.rewards.mean()):7.2f}{counts} {updates:8d} {cpu[name]:6.1f}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.6), layout="constrained")
names = list(runs)
forward, trained = ([runs[name][1][what] for name in names] for what in ("forward", "forward and backward"))
left.barh(names, forward, color="#63b3ed", label="forward only")
left.barh(names, trained, left=forward, color="#dd6b20", label="forward and backward")
left.invert_yaxis()
left.set(xlabel="states per iteration", title="what an iteration asks of the network")
left.set_xlim(0, 1.45 * max(f + t for f, t in zip(forward, trained)))
left.legend(fontsize=8, loc="lower right")
places = range(len(names) + 1)
values = [exact["base"], *(exact[name] for name in names)]
errors = [(p * (1 - p) / n) ** 0.5 for p in values]
right.errorbar(values, places, xerr=errors, fmt="o", color="#2f855a", capsize=3)
right.axvline(exact["base"], color="grey", linestyle=":")
right.set_yticks(places, ["base", *names])
right.invert_yaxis()
right.set(xlim=(0, 1.02), xlabel="share read exactly (bar: one standard error)", title="held-out seeds, the same ODE sampler")
right.grid(alpha=0.25, axis="x");

# %% [markdown]
# The bars on the left explain most of the cost. `nft` and `awm` draw fresh noise for every state they train on and go through the network
# once more for the velocity of the policy that rolled out and of the one they are anchored to; `flow_grpo` asks its reference once per trained
# state; `art` stores the velocities of its rollout and needs no second look. `flow_grpo_fast`, `dance_grpo` and `flow_dppo` save by
# training few states.
#
# On the right, in the stored run: the three whose loss is an error of the velocity (`art`, `nft`, `awm`) have left the base model far behind after eight
# iterations; those that score steps of an SDE follow at a distance, `flow_grpo` and `dance_grpo` not at all. Thirty iterations at three seeds (`ablations/efficiency.py`, table in
# `docs/results.md`) agree that those are slower, and also say who of the three is ahead *on this task*: NFT, then AWM, then ART, which is not the order of
# DiffusionART's paper. Eight iterations of one seed could not have told you.
#
# ## The numbers worth watching
#
# From the last iteration of each run. `groups/dead`: groups that say nothing, because all their rewards are equal. With a reward
# that is 0, ½ or 1 their share grows once a policy reads nearly everything; and where the samples of a prompt start from one noise (`dance_grpo`) they are
# alike from the beginning. `masked`: states that a trust region drops. `clipped`: states whose gradient the clip removes. `ratio`: mean |ratio − 1|; with
# one update per rollout the policy is the one that rolled out, and it is 0. `behaviour`: distance between the params that rolled out and the live ones, 0 on-policy.

# %%
shown = {"groups/dead": "groups/dead", "masked": "masked_fraction", "clipped": "clip_fraction", "ratio": "ratio_deviation",
         "behaviour": "behaviour_distance", "grad norm": "grad_norm"}
print(" " * 15 + "".join(f"{title:>13}" for title in shown))
for name, (rows, _, _) in runs.items():
    told = [rows[-1].get(key) for key in shown.values()]
    print(f"{name:15}" + "".join(f"{'-' if value is None else format(value, '.3g'):>13}" for value in told))

# %% [markdown]
# ## Before and after
#
# Two held-out seeds of each prompt, the same in every row. A green frame: read exactly; an orange one: not. It is the engine's opinion;
# where yours differs you have found what the policy is learning to please. (Look at the strokes of `art`, `nft` and `awm`: they get bolder.)

# %%
pictures = {"base": before} | {name: found for name, (_, _, found) in runs.items()}
columns = [p * GROUP + j for p in range(len(prompts)) for j in range(2)]
figure, axes = plt.subplots(len(pictures), len(columns), figsize=(10.5, 7.2), layout="constrained")
for line, (name, found) in zip(axes, pictures.items()):
    for axis, j in zip(line, columns):
        axis.imshow(found.images[j])
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set(color="#2f855a" if found.exact[j] == 1 else "#dd6b20", linewidth=1.6)
        if name == "base":
            axis.set_title(found.prompts[j].split('"')[1], fontsize=9)
    line[0].set_ylabel(name, fontsize=8, rotation=0, ha="right", va="center")

# %% [markdown]
# ## Change this
#
# 1. Another seed: `train(..., seed=1)` in `teach` and `sample_seeds(1, ...)` in `untrained`. Does the order of the methods survive? That
#    is the quickest way to lose faith in a single run.
# 2. Give every algorithm the learning rate 3e-3. Who breaks? (`ablations/efficiency.py` has the grid.)
# 3. Make `art` cheaper: `algorithms.art_flash(noisiest=3)`, or `art(steps_per_sample=3)`. Look at "forward and backward".
# 4. Equal *cost* instead of equal samples: give each method `round(14 / cpu[name])` iterations. Who profits?
# 5. Swap a piece: `algorithms.nft()._replace(behaviour=algorithms.live)` is DiffusionNFT without its slow copy. The paper expects
#    trouble; `ablations/restoration.py` says what happens on this task.
# 6. A reward that reads nothing: `diffrl.rewards.jpeg_compressibility()`. Its values are all different, so no group is dead.
