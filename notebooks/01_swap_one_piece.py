# %% [markdown]
# # 01 · Swap one piece
#
# An algorithm in `diffrl` is a NamedTuple of plain functions. Changing the science means passing another function; nothing is
# configured, registered or subclassed. This page does it twice: on a flow model with a closed form, where every answer is known,
# and on a small Stable Diffusion 3 pipeline that is judged by a real OCR engine.
#
# The convention, once: $x_t = (1-t)\,x_0 + t\,\varepsilon$, $v = \varepsilon - x_0$, $t = 1$ is noise. A *direction* lives in data
# space, so the velocity to regress on is $v_\text{old} - G$.

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
    axis.set(xlim=(-2, 2), ylim=(-2, 2), title=title, aspect="equal")
axes[0].legend(markerscale=3, fontsize=8)
axes[2].plot([row["loss/update_1"] for row in rows], label="loss, update 1")
axes[2].plot([row["loss/update_2"] for row in rows], label="loss, update 2")
axes[2].plot([row["masked_fraction/update_2"] for row in rows], ":", label="masked fraction, update 2")
axes[2].set(title="two updates on one frozen target", xlabel="iteration", ylim=(0, 1.6))
axes[2].legend(fontsize=8);

# %% [markdown]
# The loss of the first update is 1 up to float rounding, in every iteration (times the share of groups whose rewards differ at all, which
# here is 1 too): the direction has unit RMS and the policy has not moved yet, so $\|v - (v_\text{old} - G)\|^2 = \|G\|^2 = 1$. If a wiring mistake is anywhere in a set-up (another guidance scale in training
# than in the rollout, dropout left on, a dtype too narrow), this number shows it.
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
        style = {"color": "grey", "linewidth": 2}
    axis.plot(curve, ":" if name.startswith("control") else "-", label=f"{name}  {curve[-1]:.2f}", zorder=3 if name == "art" else 2, **style)
axis.set(xlabel="iteration", ylabel="mean reward", ylim=(-3, 0), title="one piece swapped at a time")
axis.legend(fontsize=8, ncols=2);

# %% [markdown]
# The two controls are the point of the figure: without guidance nothing rises, and with the sign of the direction flipped the reward
# falls. (DiffusionART's paper writes $u = x_0 - \varepsilon$, the opposite of what every diffusers model predicts; a port that forgets
# this is the dotted line at the bottom.)
#
# A reward is any callable:

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
from diffrl.rewards import exact_match, ocr
from diffrl.tasks import digits

prompts, judge = digits.prompts()[::7], ocr()


def fresh():
    torch.manual_seed(0)
    return from_pipeline(digits.load_pipeline(), lora={"r": 16, "lora_alpha": 32}, **digits.pipeline_options())


def draw(model, seed=5):
    """One picture of every prompt at held-out seeds."""
    seeds = sample_seeds(seed, 0, range(len(prompts)), 1).flatten()
    x_0 = rollout(model.velocity, model.params, model.encode(prompts), model.times(8), seeds=seeds, shape=model.latent_shape()).x_0
    return model.decode(x_0)


def teach(algorithm, reward, iterations=12):
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
rows = {"base": fresh(), **{name: model for name, (model, _) in runs.items()}}
figure, axes = plt.subplots(len(rows), len(prompts), figsize=(12, 3.2), layout="constrained")
for line, (name, model) in zip(axes, rows.items()):
    images = draw(model)
    right = exact_match(judge.read(images), prompts)
    for axis, image, prompt, good in zip(line, images, prompts, right):
        axis.imshow(image)
        axis.set(xticks=[], yticks=[])
        for spine in axis.spines.values():
            spine.set(color="#2f855a" if good == 1 else "#dd6b20", linewidth=1.5)
        if name == "base":
            axis.set_title(prompt.split('"')[1], fontsize=9)
    line[0].set_ylabel(name, fontsize=8)

# %% [markdown]
# Green frames were read correctly by the OCR engine; it is the engine's opinion, not yours. Each row is only twelve iterations from the
# same start, and one picture per prompt is a small sample: the curves below say more.

# %%
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
for name in ("art, OCR", "pairwise, OCR"):
    axis.plot(runs[name][1], label=name)
axis.set(xlabel="iteration", ylabel="OCR reward of the training batch")
axis.legend()
print("ink:", " ".join(f"{value:.3f}" for value in runs["art, ink"][1]))
