# %% [markdown]
# # 02 · The convention, and the sign trap
#
# Four choices are fixed once in `diffrl`, and everything else follows from them:
#
# | choice | here |
# |---|---|
# | path | $x_t = (1-t)\,x_0 + t\,\varepsilon$, **$t = 1$ is noise**, sampling walks from 1 to 0 |
# | velocity | $v = dx/dt = \varepsilon - x_0$, as every diffusers flow model predicts it |
# | direction | $G$ lives in data space: moving $x_0$ along $G$ raises the reward |
# | target | $v_\text{target} = v_\text{old} - G$ |
#
# DiffusionART's paper writes $u = x_0 - \varepsilon = -v$. Whoever mixes the two trains *down* the reward, and no loss curve tells. This page
# draws the convention, steps into the trap on purpose, and shows what catches it.

# %%
# %matplotlib inline
import itertools
import math

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap

from diffrl.algorithms import art
from diffrl.guidance import aggregate_direction, guided_velocity, reward_covariance
from diffrl.loop import diagnose, train
from diffrl.losses import velocity_matching
from diffrl.sampling import predict_noise, predict_x_0, rollout, sample_seeds, time_grid
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model
from diffrl.trust_region import keep_inside, kl_proxy

torch.set_num_threads(1)
plt.rcParams["figure.dpi"] = 75
BLUE, ORANGE, GREEN, PURPLE, GREY = "#2b6cb0", "#dd6b20", "#2f855a", "#805ad5", "#8a8a8a"

# %% [markdown]
# ## A flow whose velocity is known
#
# The data are five blobs on a circle. For a mixture of Gaussians the mean of $x_0$ given $x_t$ is a closed form, and so is the velocity:
# $v = E[\varepsilon - x_0 \mid x_t] = (x_t - E[x_0 \mid x_t])/t$.

# %%
angles = torch.arange(5) * 2 * math.pi / 5 + math.pi / 2
params = {"centres": 1.5 * torch.stack([angles.cos(), angles.sin()], 1)}
WIDTH = 0.12


def five_blobs(params, x_t, t, cond):
    """The exact velocity of five equal Gaussians of std WIDTH; x_t " b 2", t " b"."""
    t, m = t[:, None], params["centres"]
    variance = (1 - t) ** 2 * WIDTH**2 + t**2
    gap = x_t[:, None] - (1 - t)[..., None] * m
    weight = torch.softmax(-gap.square().sum(2) / (2 * variance), 1)
    x_0 = (weight[..., None] * (m + ((1 - t) * WIDTH**2 / variance)[..., None] * gap)).sum(1)
    return (x_t - x_0) / t


def sample(velocity, n=300, steps=40):
    seeds = torch.arange(n)
    return rollout(velocity, params, {}, time_grid(steps), seeds=seeds, shape=(2,))


path = sample(five_blobs)
states = torch.cat([path.x_t, path.x_0[:, None]], 1)  # " b n+1 2": the start, every step, the end
times = torch.cat([path.t, path.t_next[-1:]])

# %%
figure, axes = plt.subplots(1, 4, figsize=(13, 3.5), layout="constrained")
grid = torch.cartesian_prod(torch.linspace(-2.1, 2.1, 8), torch.linspace(-2.1, 2.1, 8))
for axis, t in zip(axes, (1.0, 0.7, 0.35, 0.1)):
    i = int((times - t).abs().argmin())
    v = five_blobs(params, grid, torch.full((len(grid),), t), {})
    axis.scatter(*states[:, i].T, s=5, color=BLUE, alpha=0.5)
    axis.quiver(*grid.T, *v.T, color=ORANGE, angles="xy", scale=60 if t < 0.2 else 22, width=0.009, zorder=3)
    axis.set(xlim=(-2.8, 2.8), ylim=(-2.8, 2.8), aspect="equal", title=f"t = {t:g}" + (" (noise)" if t == 1 else ""))

# %% [markdown]
# Blue: 300 samples on their way, from left to right. Orange: $v$. **Look at the arrows at $t = 0.1$: they point away from the blobs**, from data to
# noise, because $v = \varepsilon - x_0$. Sampling walks against them: $x_{t'} = x_t - (t - t')\,v$. (The arrows of the last panel are drawn to a
# smaller scale: between the blobs $v$ grows like $1/t$.)
#
# Two inverses come with the path, and most mistakes are a mix-up of these: $x_0 = x_t - t\,v$ and $\varepsilon = x_t + (1-t)\,v$.

# %%
x_0, noise = torch.tensor([[2.0, -1.0]]), torch.tensor([[0.5, 0.5]])
t = torch.tensor([0.3])
x_t, v = 0.7 * x_0 + 0.3 * noise, noise - x_0
print("x_0 back:", predict_x_0(x_t, v, t).tolist(), "  noise back:", predict_noise(x_t, v, t).tolist())

# %%
port = lambda params, x_t, t, cond: -five_blobs(params, x_t, t, cond)  # a model in the paper's u = x_0 - noise
wrong = sample(port)
figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
for axis, run, title in zip(axes, (path, wrong), ("v = noise - x_0", "the same model with u = -v")):
    line = torch.cat([run.x_t, run.x_0[:, None]], 1)[:40]
    axis.plot(*line.permute(2, 1, 0), color=GREY, linewidth=0.6)
    axis.scatter(*line[:, 0].T, s=14, facecolor="white", edgecolor=GREY, zorder=3, label="t = 1")
    axis.scatter(*line[:, -1].T, s=14, color=BLUE, zorder=3, label="t = 0")
    axis.set(title=title, aspect="equal")
axes[0].set(xlim=(-3.4, 3.4), ylim=(-3.4, 3.4))
axes[1].set(xlim=(-17, 17), ylim=(-17, 17))
axes[0].legend(loc="upper left", fontsize=9)
print(f"rms of the samples: {path.x_0.square().mean().sqrt():.2f} with v, {wrong.x_0.square().mean().sqrt():.3g} with -v")

# %% [markdown]
# Mind the axes on the right. A *whole model* with the wrong sign cannot be overlooked by whoever draws it: everything flies away. The trap is the case where the
# sampler is right and only the **direction** has the wrong sign.
#
# ## The trap: where does the direction point?
#
# One prompt, eight samples, a reward. `aggregate_direction` gives $G = C/\mathrm{rms}(C)$ with $C = \frac1k \sum_i (R_i - \bar R)(x_i - \bar x)$.
# Now the one question that matters: at a state $x_t$, what does a change of the velocity do to the sample the model is heading for,
# $x_0 = x_t - t\,v$? Subtracting $G$ from $v$ *adds* $t\,G$ to it.

# %%
goal = torch.tensor([1.0, 1.0])
group = 0.7 * torch.randn(8, 2, generator=torch.Generator().manual_seed(3)) + torch.tensor([-0.6, -0.3])
rewards = -(group - goal).square().sum(1)
G = aggregate_direction(rewards[None], group[None]).value

x_t, t = torch.tensor([[-0.9, 0.9]]), torch.tensor([0.8])
v_old = (x_t - group.mean(0)) / t
heads_for = {
    "v_old": predict_x_0(x_t, v_old, t),
    "v_old - G": predict_x_0(x_t, guided_velocity(v_old, G), t),
    "v_old + G": predict_x_0(x_t, v_old + G, t),
}
figure, axis = plt.subplots(figsize=(5.6, 5), layout="constrained")
ticks = torch.linspace(-3, 3, 100)
plane = torch.cartesian_prod(ticks, ticks)
axis.contour(ticks, ticks, -(plane - goal).square().sum(1).reshape(100, 100).T, levels=12, cmap="Greys", alpha=0.5)
axis.scatter(*group.T, c=rewards, cmap="viridis", s=40, zorder=3)
axis.plot(*x_t[0], "ks", markersize=7)
axis.annotate("$x_t$", x_t[0] + torch.tensor([-0.05, 0.13]), fontsize=11)
for (name, end), colour, place in zip(heads_for.items(), (GREY, GREEN, ORANGE), ((0.12, -0.22), (0.06, -0.14), (0.08, -0.14))):
    axis.annotate("", end[0], x_t[0], arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 2})
    axis.annotate(name, end[0] + torch.tensor(place), color=colour, fontsize=11, weight="bold")
axis.plot(*goal, "k+", markersize=14)
axis.set(xlim=(-2.6, 2), ylim=(-2.2, 1.8), aspect="equal", title="what the model is heading for, at one state");
for name, end in heads_for.items():
    print(f"{name:10} heads for ({end[0, 0]:+.2f}, {end[0, 1]:+.2f}), reward {-(end - goal).square().sum():.2f}")

# %% [markdown]
# Dots: the group, brighter is better; the cross is the best point. Green heads uphill, orange downhill. In a paper with $u = -v$ the right formula
# reads $u_\text{old} + G$; carried over letter by letter to a diffusers model it is the orange arrow.
#
# ## Why no loss curve tells
#
# Losses, norms, KLs and inner products are even: flip the sign of every velocity and they stay. Even the first-update check (*the loss is exactly
# 1*) holds for both signs, because $\|v - (v_\text{old} \pm G)\|^2 = \|G\|^2 = 1$ at $v = v_\text{old}$.

# %%
d = 0.1 * torch.randn(1, 2, generator=torch.Generator().manual_seed(5))  # a drift of the policy after one update
rows = {}
for name, sign in (("right", -1), ("wrong", +1)):
    target = v_old + sign * G
    v = v_old - sign * d  # the policy has followed its target a little, in either case
    kl = kl_proxy(v, v_old, 0.8, 0.7)
    rows[name] = {
        "loss, update 1": velocity_matching(v_old, target),
        "loss, update 2": velocity_matching(v, target),
        "KL proxy": kl,
        "pull <v - v_old, target - v>": ((v - v_old) * (target - v)).sum(),
        "kept by the trust region (0: no)": keep_inside(v, v_old, target, kl),
        "change of the reward": ((predict_x_0(x_t, v, t) - heads_for["v_old"]) * 2 * (goal - heads_for["v_old"])).sum(),
    }
print(f"{'':33} {'v_old - G':>10} {'v_old + G':>10}")
for name in rows["right"]:
    print(f"{name:33}", *(f"{float(rows[sign][name]):10.4f}" for sign in ("right", "wrong")))

# %% [markdown]
# Every line agrees but the last. Now train both, on the toy of page 01: four prompts that start at the origin, the reward is minus the squared
# distance to the compass point. The port below changes one sign in the objective and nothing else.

# %%
def ported(algorithm):
    """The mistake: regress on v_old + G."""

    def objective(velocity, params, window):
        credit = {**window.credit, "direction": -window.credit["direction"]}
        return algorithm.objective(velocity, params, window._replace(credit=credit))

    return algorithm._replace(objective=objective)


def learn(algorithm, reward=toward_compass, iterations=60, group_size=8):
    """Train a fresh toy; returns it and every iteration's metrics."""
    model = toy_model()
    optimizer = torch.optim.Adam(list(model.params.values()), lr=0.02)
    steps = train(model, algorithm, PROMPTS, reward, optimizer, group_size=group_size, steps=8, seed=0)
    return model, list(itertools.islice(steps, iterations))


def cloud(model, k=128):
    """k samples of each prompt, " 4 k 2"."""
    params = {name: p.detach() for name, p in model.params.items()}
    cond = {"prompt": torch.arange(4).repeat_interleave(k)}
    seeds = sample_seeds(1, 0, range(4), k).flatten()
    return rollout(model.velocity, params, cond, model.times(8), seeds=seeds, shape=(2,)).x_0.reshape(4, k, 2)


runs = {"right sign": learn(art()), "wrong sign": learn(ported(art()))}

# %%
figure, axes = plt.subplots(1, 4, figsize=(14, 3.4), layout="constrained", width_ratios=[1, 1, 1.1, 1.1])
compass = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, -1.0], [-1.0, 0.0]])


def crosses(axis):
    """Where each prompt should go: its colour, with an edge that stands out from its samples."""
    axis.scatter(*compass.T, c=(BLUE, ORANGE, GREEN, PURPLE), marker="P", s=190, edgecolor="black", linewidth=1.8, zorder=3)


for axis, (name, (model, _)) in zip(axes, runs.items()):
    for points, colour in zip(cloud(model), (BLUE, ORANGE, GREEN, PURPLE)):
        axis.scatter(*points.T, s=4, alpha=0.6, color=colour)
    crosses(axis)
    axis.set(xlim=(-2.4, 2.4), ylim=(-2.4, 2.4), aspect="equal", title=f"{name}, 60 iterations")
for (name, (_, rows)), colour in zip(runs.items(), (GREEN, ORANGE)):
    axes[2].plot([row["loss/update_1"] for row in rows], color=colour, linewidth=4 if name == "right sign" else 1.5, label=f"{name}, update 1")
    axes[2].plot([row["loss/update_2"] for row in rows], ":", color=colour, label=f"{name}, update 2")
    axes[3].plot([row["reward/mean"] for row in rows], color=colour, label=name)
axes[2].set(title="loss", xlabel="iteration", ylim=(0, 1.8))
axes[2].legend(fontsize=8, loc="upper right")
axes[3].set(title="reward", xlabel="iteration")
axes[3].legend(fontsize=9);

# %% [markdown]
# Colours are prompts, crosses where each should go. In the loss panel the two runs lie on one another at update 1; at update 2 the *wrong* one
# looks calmer (the right one has arrived and jitters about its goal). The reward is the only witness, and in a real run a noisy one, hours in.
#
# ## What catches it, in seconds
#
# `diagnose` (on the command line: `diffrl doctor`) asks whether the set-up learns the right way *at all*. It redraws the same seeds after a few
# steps and compares, which takes the noise of new samples out.

# %%
for name, algorithm in (("right", art()), ("wrong sign in the objective", ported(art())), ("wrong sign in the credit", art(scale=-1.0))):
    print(f"---- {name}")
    print(diagnose(toy_model(), algorithm, PROMPTS, toward_compass, group_size=32, learning_rate=0.02))

# %% [markdown]
# Only the last line differs. With the sign wrong in the objective the samples move *against* the direction; with the sign wrong in the credit they
# follow it, but the reward falls. Both fail.
#
# And a *model* in the paper's convention, wired in as it is?

# %%
def paper_model():
    """The toy with u = -v for its velocity."""
    model = toy_model()
    return model._replace(velocity=lambda *inputs: -model.velocity(*inputs))


print(diagnose(paper_model(), art(), PROMPTS, toward_compass, group_size=32, learning_rate=0.02))

# %% [markdown]
# One line fails, and only that one. At $t = 1$ the state *is* the noise, so $v = x_t - E[x_0 \mid x_t]$ points along $x_t$ and $u = -v$ against it:
# "velocity points to noise" is the cosine of the two. The last line still says `ok`, and rightly so: the sampler integrates *whatever field it is
# given*, and subtracting $G$ from that field moves its samples along $+G$. Such a set-up learns, but from samples that fly away: compare the mean
# reward with the one above. (A model that is not trained yet points nowhere; then the line is a `?`.) **Look at the first pictures of a new model
# before anything else.**
#
# ## Axes: prompt-major
#
# A batch has $b = g \times k$ rows: all $k$ samples of the first prompt, then those of the second. A flat batch does not say which it is, so
# functions that need groups take `" g k"` and never guess. What if somebody reshapes it the other way round?

# %%
g, k = 4, 8
colours = torch.arange(g).repeat_interleave(k)  # which prompt each flat row belongs to
figure, axes = plt.subplots(3, 1, figsize=(9, 2.9), layout="constrained", height_ratios=[0.55, 1.3, 1.3])
palette = ListedColormap((BLUE, ORANGE, GREEN, PURPLE))
shown = [
    (colours[None], "the batch, as it comes"),
    (colours.reshape(g, k), "reshape(g, k): one prompt per row"),
    (colours.reshape(k, g).T, "reshape(k, g).T: groups of strangers"),
]
for axis, (table, title) in zip(axes, shown):
    axis.pcolormesh(table.flip(0), cmap=palette, edgecolor="white", linewidth=1)
    axis.set_title(title, fontsize=10, loc="left")
    axis.set(xticks=[], yticks=[], aspect="equal", anchor="W")


# %%
def strangers(batch):
    """art's credit on groups that were reshaped the wrong way round."""
    g, k = batch.rewards.shape
    mixed = lambda flat: flat.reshape(k, g, *flat.shape[1:]).transpose(0, 1)
    found = aggregate_direction(mixed(batch.rewards.flatten()), mixed(batch.trajectory.x_0))
    back = lambda per_group: per_group.repeat(k, *[1] * (per_group.ndim - 1))
    return {"direction": back(found.value), "alive": back(found.alive)}


_, mixed_up = learn(art()._replace(credit=strangers))
print(f"reward after 60 iterations: {runs['right sign'][1][-1]['reward/mean']:.2f} prompt-major, {mixed_up[-1]['reward/mean']:.2f} mixed up")
print(f"loss of the first update:   {runs['right sign'][1][-1]['loss/update_1']:.4f} prompt-major, {mixed_up[-1]['loss/update_1']:.4f} mixed up")
print(diagnose(toy_model(), art()._replace(credit=strangers), PROMPTS, toward_compass, group_size=32, learning_rate=0.02).checks[-1])

# %% [markdown]
# Row 1 is the flat batch, coloured by prompt. In row 3 every group holds two samples of each prompt: its covariance pulls all prompts to one
# place, where their rewards cancel. The loss of the first update is still 1. `diagnose` notices: the reward of these samples may creep up (the
# width shrinks), but they do not follow the direction they were told.
#
# ## A reward that is missing
#
# A reward of `nan` (or inf) means *this sample has no reward*: the judge crashed, timed out, refused. Such a sample leaves its group, and nothing
# else happens. The tempting alternative, a number in its place, is a reward that nobody gave:

# %%
told = rewards.clone()
told[group[:, 0].argmin()] = float("nan")  # the judge failed at the leftmost point
cases = {
    "all eight rewards": rewards,
    "nan: seven": told,
    "nan replaced by 0": told.nan_to_num(0.0),
}
figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
for axis, (name, values) in zip(axes, cases.items()):
    seen, missing = torch.isfinite(values), group[~torch.isfinite(told)]
    axis.scatter(*group[seen].T, c=values[seen], cmap="viridis", s=40)
    if name != "all eight rewards":
        axis.scatter(*missing.T, s=140, facecolor="none", edgecolor=ORANGE, linewidth=2)
    arrow = aggregate_direction(values[None], group[None]).value[0]
    centre = group.mean(0)
    axis.annotate("", centre + arrow, centre, arrowprops={"arrowstyle": "->", "color": GREEN, "linewidth": 2.5})
    axis.plot(*goal, "k+", markersize=14)
    axis.set(xlim=(-2.4, 1.6), ylim=(-1.8, 1.5), aspect="equal", title=name)

# %% [markdown]
# The arrow is $G$, the ring the sample without a reward. Rewards here are negative, so 0 is better than any of them: the judge that failed has
# praised the sample, and $G$ turns towards it. A model learns that quickly. Below, the judge is blind left of $x = -0.4$:

# %%
def half_blind(points, prompts):
    return torch.where(points[:, 0] < -0.4, torch.nan, toward_compass(points, prompts))


def as_zero(points, prompts):
    return half_blind(points, prompts).nan_to_num(0.0)


judged = {"nan: no reward": learn(art(), half_blind), "nan replaced by 0": learn(art(), as_zero)}
figure, axes = plt.subplots(1, 3, figsize=(12, 3.7), layout="constrained")
for axis, (name, (model, _)) in zip(axes, judged.items()):
    points = cloud(model)
    for one, colour in zip(points, (BLUE, ORANGE, GREEN, PURPLE)):
        axis.scatter(*one.T, s=4, alpha=0.6, color=colour)
    crosses(axis)
    axis.axvspan(-4, -0.4, color=GREY, alpha=0.2, linewidth=0)
    blind = (points[..., 0] < -0.4).float().mean()
    true = toward_compass(points.reshape(-1, 2), [p for p in PROMPTS for _ in range(128)]).mean()
    axis.set(xlim=(-3.5, 2), ylim=(-2.75, 2.75), aspect="equal", title=f"{name}\n{blind:.0%} not judged, true reward {true:.2f}")
for (name, (_, rows)), colour in zip(judged.items(), (GREEN, ORANGE)):
    axes[2].plot([row["reward/mean"] for row in rows], color=colour, label=name)
axes[2].set(title="mean reward, as reported", xlabel="iteration")
axes[2].legend(fontsize=9)
print(f"reward/missing at the end: {judged['nan: no reward'][1][-1]['reward/missing']:.0%} and {judged['nan replaced by 0'][1][-1]['reward/missing']:.0%}")

# %% [markdown]
# Grey is where nobody looks. With `nan` three prompts arrive and the fourth goes as far as it is judged, and somewhat beyond. With 0 instead,
# three of four prompts hide in the grey. **The reported curves cannot be told apart**; `reward/missing` and the true reward can.
#
# ## Change this
#
# 1. Give `port` a sampler that also walks the other way (`time_grid` cannot; write the Euler step). Does the picture come back?
# 2. `ported` flips a `"direction"` in the credit. Which algorithms have none (`nft()`, `flow_grpo()`, `awm()`)? Flip the sign of what they have
#    instead, and ask `diagnose`.
# 3. Lower `group_size` of `diagnose` to 2. Does it still separate right from wrong? What does the error bar of its last line say?
# 4. Let the judge of the last section fail at random, for half of all samples. How much slower does the model learn? And with `nan_to_num(-10.0)`?
