# %% [markdown]
# # 01 · Swap one piece
#
# An algorithm in `diffrl` is a NamedTuple of plain functions. Changing the science means passing another function; nothing is
# configured, registered or subclassed. This page does it twice: on a flow model with a closed form, where every answer is known,
# and on a small Stable Diffusion 3 pipeline that is judged by a real OCR engine.
#
# The convention, once: $x_t = (1-t)\,x_0 + t\,\varepsilon$, $v = \varepsilon - x_0$, $t = 1$ is noise. A *direction* lives in data
# space, so the velocity to regress on is $v_\text{old} - G$.
#
# One iteration of every algorithm here is the same four steps: roll out and score (`collect`), turn rewards into what each sample is told
# (`credit`), take optimizer steps on a loss (`objective`, `updates` times), say who rolls out next (`behaviour`). Those are the fields.

# %%
import itertools

import matplotlib.pyplot as plt
import torch

from diffrl.algorithms import art, art_pairwise, noisiest
from diffrl.guidance import group_advantages
from diffrl.loop import train
from diffrl.sampling import rollout, sample_seeds
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model

torch.set_num_threads(2)
plt.rcParams.update({"figure.dpi": 80, "font.size": 9})

# %% [markdown]
# ## A flow model in two dimensions
#
# Four prompts, `north`, `east`, `south`, `west`. Each starts as the same Gaussian at the origin; the reward is minus the squared
# distance to the compass point. The velocity is exact, the trainable tensors are the four means and one width.

# %%
def learn(algorithm, iterations=60, learning_rate=0.02, reward=toward_compass):
    """Train a fresh toy model; returns it and the mean reward of every iteration."""
    model = toy_model()
    optimizer = torch.optim.Adam(list(model.params.values()), lr=learning_rate)
    steps = train(model, algorithm, PROMPTS, reward, optimizer, group_size=8, steps=8, seed=0)
    rows = list(itertools.islice(steps, iterations))
    return model, rows


def points(model):
    """256 samples of each prompt, as " 4 256 2"."""
    seeds = sample_seeds(1, 0, range(4), 256).flatten()
    cond = {"prompt": torch.arange(4).repeat_interleave(256)}
    params = {name: p.detach() for name, p in model.params.items()}
    return rollout(model.velocity, params, cond, model.times(8), seeds=seeds, shape=(2,)).x_0.reshape(4, 256, 2)


before, (model, rows) = points(toy_model()), learn(art())
after = points(model)

# %%
colours = ["#2b6cb0", "#dd6b20", "#2f855a", "#805ad5"]
figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
for axis, cloud, title in zip(axes, (before, after), ("before: four prompts, one blob", "after 60 iterations")):
    for c, (name, colour) in enumerate(zip(PROMPTS, colours)):
        axis.scatter(*cloud[c].T, s=5, alpha=0.5, color=colour, label=name)
    for goal in ((0, 1), (1, 0), (0, -1), (-1, 0)):
        axis.plot(*goal, "k+", markersize=12)
    axis.set(xlim=(-2, 2), ylim=(-2, 2.6), title=title, aspect="equal")
axes[0].legend(markerscale=3, fontsize=8, ncols=2, loc="upper center")
axes[2].plot([row["loss/update_1"] for row in rows], label="loss, update 1")
axes[2].plot([row["loss/update_2"] for row in rows], label="loss, update 2")
axes[2].plot([row["masked_fraction/update_2"] for row in rows], ":", label="masked fraction, update 2")
axes[2].set(title="two updates on one frozen target", xlabel="iteration", ylim=(0, 1.6))
axes[2].legend(fontsize=8);

# %% [markdown]
# The loss of the first update is 1 up to float rounding, in every iteration (times the share of groups whose rewards differ at all, which
# here is 1 too): the direction has unit RMS and the policy has not moved yet, so $\|v - (v_\text{old} - G)\|^2 = \|G\|^2 = 1$. If a wiring mistake is
# anywhere in a set-up (another guidance scale in training than in the rollout, dropout left on, a dtype too narrow), this number shows it.
#
# The second update sees other samples and a policy that has moved: its loss is lower, because the first update went the same way. Where that would
# take a sample outside the trust region the sample is masked (dotted); a masked sample counts as 0 in the mean, so **a low loss here is
# no sign of a good fit**: read the two lines together. After some thirty iterations the goal is reached, fewer samples are masked, and the loss of the second
# update goes *up*. Nothing is wrong.
#
# ## Nine swaps and two controls
#
# Each line below replaces one piece of `art()`. `_replace` is the NamedTuple's own; there is no registry.

# %%
def advantage_direction(batch):
    """Another credit: each sample is pushed along its own deviation from the group's mean, by its own advantage."""
    g, k = batch.rewards.shape
    x_0 = batch.trajectory.x_0.reshape(g, k, -1)
    push = group_advantages(batch.rewards)[..., None] * (x_0 - x_0.mean(1, keepdim=True))
    push = push / push.square().mean().sqrt()
    always = torch.ones(g * k, dtype=torch.bool)
    return {"direction": push.reshape(g * k, -1), "alive": always, "has_reward": always}


def only_upwards(batch):
    """Another label: keep the better half, forget by how much."""
    return (batch.rewards > batch.rewards.median(1, keepdim=True).values).float()


def without_mask(velocity, params, window):
    """Another objective: the same loss, no mask at all."""
    loss, _, metrics = art().objective(velocity, params, window)
    return loss, window.credit["alive"].repeat_interleave(window.trajectory.t.numel()), metrics


swaps = {
    "art": art(),
    "pairwise labels": art_pairwise(),
    "advantage credit": art()._replace(credit=advantage_direction),
    "better half": art(labels=only_upwards),
    "no mask": art()._replace(objective=without_mask),
    "tight radius": art(radius=1e-7),
    "noisy steps only": art(trained_steps=noisiest(3)),
    "one update": art(updates=1),
    "half the scale": art(scale=0.5),
    "slow behaviour": art()._replace(
        behaviour=lambda old, new, i: {name: 0.5 * old[name].detach() + 0.5 * new[name].detach() for name in new}
    ),
    "control: no guidance": art(scale=0.0),
    "control: wrong sign": art(scale=-1.0),
}
curves = {name: [row["reward/mean"] for row in learn(algorithm)[1]] for name, algorithm in swaps.items()}

# %%
figure, axis = plt.subplots(figsize=(9, 4.2), layout="constrained")
for name, curve in curves.items():
    style = {"color": "black", "linewidth": 2.5} if name == "art" else {}
    if name.startswith("control"):
        style = {"color": "grey", "linewidth": 2, "linestyle": "--" if "wrong" in name else ":"}
    axis.plot(curve, label=f"{name}  {curve[-1]:.2f}", zorder=3 if name == "art" else 2, **style)
axis.set(xlabel="iteration", ylabel="mean reward", ylim=(-3, 0), title="one piece swapped at a time")
axis.legend(fontsize=8, ncols=2);

# %% [markdown]
# The two controls (grey) are the point of the figure: without guidance (dotted) nothing rises, and with the sign of the direction flipped (dashed)
# the reward falls. The nine swaps all learn: on a task this easy few choices matter, and the numbers in the legend (last iteration, 32 samples) do not rank
# them. (DiffusionART's paper writes $u = x_0 - \varepsilon$, the opposite of what every diffusers model predicts; a port that forgets
# this is the dashed line at the bottom.)
#
# A reward is any callable. This one likes points far to the right, on the axis, whatever the prompt; so all four means go there, and there is no end to it:

# %%
model, rows = learn(art(), reward=lambda points, prompts: points[:, 0] - points[:, 1].abs())
print("means:", [[round(float(x), 2) for x in row] for row in model.params["mean"].detach()])

# %% [markdown]
# ## The same loop on a real pipeline
#
# The digits task ships a `StableDiffusion3Pipeline` of 2.9 million parameters that writes two-digit numbers and gets about two in
# five of them wrong. `from_pipeline` turns it into the same six functions the toy had; SD3.5 differs by a path.

# %%
from diffrl.models import from_pipeline
from diffrl.rewards import ocr
from diffrl.settings import evaluate
from diffrl.tasks import digits

prompts, judge = digits.prompts()[4::13], ocr()


def fresh():
    torch.manual_seed(0)
    return from_pipeline(digits.load_pipeline(), lora={"r": 16, "lora_alpha": 32}, **digits.pipeline_options())


def teach(algorithm, reward, iterations=12):
    """A trained model, and the mean reward of every iteration's batch."""
    model = fresh()
    optimizer = torch.optim.AdamW(list(model.params.values()), lr=1e-3)
    steps = train(model, algorithm, prompts, reward, optimizer, group_size=8, steps=8, seed=0)
    return model, [row["reward/mean"] for row in itertools.islice(steps, iterations)]


# %% [markdown]
# Three runs: DiffusionART with the OCR reward; the same with nothing but win/lose labels (a swap of the credit); and a reward that
# is a Python lambda which likes ink (a swap of the reward).

# %%
noisy = art(trained_steps=noisiest(4), steps_per_sample=3)
pairs = art_pairwise(trained_steps=noisiest(4), steps_per_sample=3)
ink = lambda images, prompts: 1 - images.float().mean((1, 2, 3)) / 255

runs = {"art, OCR": teach(noisy, judge), "pairwise, OCR": teach(pairs, judge), "art, ink": teach(noisy, ink)}

# %%
models = {"base": fresh(), **{name: model for name, (model, _) in runs.items()}}
found = {name: evaluate(model, prompts, judge, steps=8, samples=8) for name, model in models.items()}  # seeds never trained on
columns = [8 * p + j for p in range(len(prompts)) for j in range(2)]
figure, axes = plt.subplots(len(models), len(columns), figsize=(12, 3), layout="constrained")
for line, (name, held_out) in zip(axes, found.items()):
    for axis, j in zip(line, columns):
        axis.imshow(held_out.images[j])
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set(color="#2f855a" if held_out.exact[j] == 1 else "#dd6b20", linewidth=1.5)
        if name == "base":
            axis.set_title(held_out.prompts[j].split('"')[1], fontsize=9)
    line[0].set_ylabel(name, fontsize=8, rotation=0, ha="right", va="center")

# %% [markdown]
# Two of eight held-out seeds per prompt, the same in every row. Green frames were read correctly by the OCR engine; it is the engine's opinion, not yours.
# The last row is what optimising a silly reward looks like: more ink, no numbers.

# %%
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
for name in ("art, OCR", "pairwise, OCR"):
    axis.plot(runs[name][1], label=name)
axis.set(xlabel="iteration", ylabel="OCR reward of the training batch")
axis.legend(loc="lower right")
for name, held_out in found.items():
    share, n = float(held_out.exact.mean()), len(held_out.exact)
    print(f"{name:14} read exactly {share:.2f} +- {(share * (1 - share) / n) ** 0.5:.2f} (one standard error, {n} held-out samples)")
print("ink, by iteration:", " ".join(f"{value:.2f}" for value in runs["art, ink"][1]))

# %% [markdown]
# Twelve iterations from one seed: enough to see that the pieces fit together, too few to say which credit is better. Page 04 puts nine algorithms side
# by side; `ablations/` holds three seeds of everything, with intervals.
#
# ## Change this
#
# 1. Flip a sign: in `advantage_direction`, push *towards* the mean. Which control does the curve join?
# 2. Write a credit of your own: direction = best sample minus worst sample of each group. It must be a tensor " b *d" of about unit RMS.
# 3. `art(updates=4)`: four updates on one frozen target. On which of the two tasks does it hurt?
# 4. A reward that is sometimes missing: return `float("nan")` for some samples. They leave their group; nothing else happens.
# 5. `teach(noisy._replace(behaviour=...), judge)` with the slow behaviour above: does the pipeline mind as much as the toy does?
