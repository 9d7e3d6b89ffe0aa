# %% [markdown]
# # 08 · Pairwise preferences
#
# People are bad at giving a picture a number and good at saying which of two is better. `diffrl` trains on that alone: inside each group of
# samples random disjoint pairs are shown to a judge, the winner gets 1, the loser 0, a tie 1/2 each, and the covariance of these labels with the
# pictures is the direction. This page puts a stand-in for a person in the loop, looks at what it is shown, makes it err, and compares with the
# numbers it never reveals.

# %%
# %matplotlib inline
import hashlib
import itertools

import matplotlib.pyplot as plt
import torch

from diffrl.algorithms import art, noisiest
from diffrl.guidance import aggregate_direction, pair_labels
from diffrl.loop import train
from diffrl.models import from_pipeline
from diffrl.rewards import exact_match, judged, ocr, quoted, text_similarity
from diffrl.sampling import rollout, sample_seeds
from diffrl.tasks import digits

torch.set_num_threads(2)
plt.rcParams["figure.dpi"] = 75
BLUE, ORANGE, GREEN, PURPLE, GREY = "#2b6cb0", "#dd6b20", "#2f855a", "#805ad5", "#8a8a8a"

# %% [markdown]
# ## The judge
#
# It looks at two pictures and the prompt and answers `"a"`, `"b"` or `"tie"`. Replace `better` by a window with two buttons, and a person is in
# the loop. Its taste, which it keeps to itself: the number should be legible (an OCR engine reads it) and the strokes bold. Looks are remembered,
# as `judged` asks about every pair twice, in both orders.

# %%
engine, remembered = ocr(), {}


def taste(images, prompts):
    """How much of the number is read, in [0, 1], plus four times the share of ink: what the judge never says."""
    keys = [image.numpy().tobytes() for image in images]
    new = {key: i for i, key in enumerate(keys) if key not in remembered}
    if new:
        remembered.update(zip(new, engine.read(images[list(new.values())])))
    read = [text_similarity(remembered[key], quoted(prompt)) for key, prompt in zip(keys, prompts)]
    return torch.tensor(read) + 4 * (1 - images.float().mean((1, 2, 3)) / 255)


def better(a, b, prompt):
    first, second = taste(torch.stack([a, b]), [prompt, prompt])
    return "tie" if first == second else "a" if first > second else "b"


prompts = digits.prompts()[2::16][:6]
k = 8


def fresh():
    torch.manual_seed(0)
    return from_pipeline(digits.load_pipeline(), lora={"r": 16, "lora_alpha": 32}, **digits.pipeline_options())


def draw(model, seed, k):
    """k samples of each prompt: latents " (g k) *d" and pictures."""
    seeds = sample_seeds(seed, 0, range(len(prompts)), k).flatten()
    params = {name: p.detach() for name, p in model.params.items()}
    cond = {name: value.repeat_interleave(k, 0) for name, value in model.encode(prompts).items()}
    x_0 = rollout(model.velocity, params, cond, model.times(6), seeds=seeds, shape=model.latent_shape()).x_0
    return x_0, model.decode(x_0)


base = fresh()
x_0, images = draw(base, seed=5, k=k)
asked = [prompt for prompt in prompts for _ in range(k)]
values = taste(images, asked)  # for comparison only
print(f"base model: taste {values.mean():.2f}, {exact_match(engine.read(images), asked).mean():.2f} of {len(images)} pictures read exactly")

# %% [markdown]
# ## What the judge sees
#
# Four prompts, four pairs each. Green is the winner, orange the loser, grey a tie. **This is all the information training gets**: no scores, and
# nothing about how the pairs compare with one another.

# %%
shown = []


def watched(a, b, prompt):
    verdict = better(a, b, prompt)
    shown.append((a, b, prompt, verdict))
    return verdict


labels = judged(watched, group_size=k)(images[: 4 * k], asked[: 4 * k]).reshape(4, k)
pairs = shown[::2]  # every pair was asked about twice

figure = plt.figure(figsize=(11.5, 4.6), layout="constrained")
for row, part in enumerate(figure.subfigures(4, 1)):
    axes = part.subplots(1, 12, width_ratios=[1, 1, 0.35] * 4)
    for number, (a, b, prompt, verdict) in enumerate(pairs[4 * row : 4 * row + 4]):
        left, right, gap = axes[3 * number : 3 * number + 3]
        gap.axis("off")
        sign = {"a": ("winner", "loser"), "b": ("loser", "winner"), "tie": ("tie", "tie")}[verdict]
        for axis, image, what in zip((left, right), (a, b), sign):
            axis.imshow(image)
            axis.set(xticks=[], yticks=[])
            for spine in axis.spines.values():
                spine.set(color={"winner": GREEN, "loser": ORANGE, "tie": GREY}[what], linewidth=2.5)
    axes[0].set_ylabel(quoted(prompt), fontsize=13, rotation=0, labelpad=16, va="center")
ties = sum(verdict == "tie" for *_, verdict in pairs)
print(f"{len(pairs)} pairs, {ties} ties; labels of the first prompt: {labels[0].tolist()}")

# %% [markdown]
# Can you tell why the green ones won? They are easier to read, or bolder, or so much of one that it makes up for the other. A tie would be worth a
# label of 1/2 for both, which pulls nowhere.
#
# ## What is lost by asking for less
#
# One group of samples, two directions: from the numbers and from the verdicts. With two samples they are the same, exactly: only the order of two
# numbers survives the normalisation. With more they part.

# %%
x, numbers = x_0.reshape(len(prompts), k, -1).double(), values.reshape(-1, k).double()
cosine = lambda a, b: torch.nn.functional.cosine_similarity(a, b, dim=1)
for members in (2, 4, 8):
    some, rewards = x[:, :members], numbers[:, :members]
    full, pairs_only = aggregate_direction(rewards, some), aggregate_direction(pair_labels(rewards), some)
    print(f"k = {members}: mean cosine between the two {cosine(full.value, pairs_only.value).mean():.3f}")

# %% [markdown]
# ## A judge that errs
#
# Two kinds of error. A *stubborn* judge has its mind made up about a pair and answers the same in either order; with probability `wrong` the mind
# is wrong. A *wavering* one tosses a coin at every question; as `judged` asks in both orders and calls contradictions a tie, most of its errors
# turn into ties.

# %%
def coin(*things):
    """A number in [0, 1) that depends on these bytes alone: errors repeat from run to run."""
    return int.from_bytes(hashlib.sha256(b"".join(things)).digest()[:8], "big") / 2**64


turned = {"a": "b", "b": "a", "tie": "tie"}


def stubborn(wrong):
    def compare(a, b, prompt):
        verdict, (x, y) = better(a, b, prompt), sorted((a.numpy().tobytes(), b.numpy().tobytes()))
        return turned[verdict] if coin(x, y) < wrong else verdict

    return compare


def wavering(wrong):
    def compare(a, b, prompt):
        verdict = better(a, b, prompt)
        return turned[verdict] if coin(a.numpy().tobytes(), b.numpy().tobytes(), b"order") < wrong else verdict

    return compare


def verdicts(compare, pairings=20):
    """Labels of all samples under many pairings, the same for every judge."""
    judge = judged(compare, group_size=k, generator=torch.Generator().manual_seed(3))
    return torch.cat([judge(images, asked) for _ in range(pairings)])


truth = verdicts(better)
decided = truth != 0.5
print(f"{'':16} right  wrong   tie   (of {int(decided.sum()) // 2} questions about {len(images)} pictures)")
for name, kind in (("stubborn", stubborn), ("wavering", wavering)):
    for wrong in (0.1, 0.3):
        said = verdicts(kind(wrong))[decided]
        right, tie = int((said == truth[decided]).sum()), int((said == 0.5).sum())
        print(f"{name}, {wrong:.0%} wrong {right / len(said):5.0%}  {(len(said) - right - tie) / len(said):5.0%}  {tie / len(said):5.0%}")

# %% [markdown]
# In expectation a share $p$ of wrong verdicts only *shortens* the covariance, by $1 - 2p$; its direction stays. But $G$ is normalised, so what is
# left is the noise: the same length, less of it true. Measured on synthetic groups, where the true direction is known (a linear reward on Gaussian
# samples):

# %%
def cosines(k, D, wrong, n=2000):
    """Mean cosine with the true direction, from verdicts that are wrong with this probability."""
    draw = torch.Generator().manual_seed(1)
    samples, a = torch.randn(n, k, D, generator=draw), torch.randn(n, D, generator=draw)
    scores = torch.einsum("nkd,nd->nk", samples, a).reshape(n, k // 2, 2)  # neighbours are pairs
    first_wins = (scores[..., 0] > scores[..., 1]) != (torch.rand(n, k // 2, generator=draw) < wrong)
    labels = torch.stack([first_wins, ~first_wins], 2).reshape(n, k).float()
    return float(cosine(aggregate_direction(labels, samples).value, a).mean())


wrongs = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
figure, axis = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
for members, colour in ((2, ORANGE), (8, BLUE), (24, GREEN)):
    axis.plot(wrongs, [cosines(members, 16, wrong) for wrong in wrongs], "o-", color=colour, label=f"k = {members}")
axis.axhline(0, color=GREY, linestyle=":")
axis.set(xlabel="share of wrong verdicts", ylabel="cosine with the true direction", title="16 dimensions, 2000 groups")
axis.legend();

# %% [markdown]
# ## Train
#
# The same algorithm, seeds and samples; only the reward differs: the judge's hidden number, or its verdicts. `judged` is a reward like any other
# (its generator moves on, so pairs change from iteration to iteration).

# %%
def teach(reward, iterations=10):
    """Train a fresh model; returns it and the taste of every iteration's samples, which the training is not told."""
    model, hidden = fresh(), []

    def observed(images, prompts):
        hidden.append(float(taste(images, prompts).mean()))
        return reward(images, prompts)

    optimizer = torch.optim.AdamW(list(model.params.values()), lr=1e-3)
    algorithm = art(trained_steps=noisiest(4), steps_per_sample=3)
    steps = train(model, algorithm, prompts, observed, optimizer, group_size=k, steps=6, seed=0)
    for _ in itertools.islice(steps, iterations):
        remembered.clear()
    return model, hidden


def pairs_by(compare):
    return judged(compare, group_size=k, generator=torch.Generator().manual_seed(7))


runs = {
    "numbers": teach(taste),
    "verdicts": teach(pairs_by(better)),
    "verdicts, 10 % wrong": teach(pairs_by(stubborn(0.1))),
    "verdicts, 30 % wrong": teach(pairs_by(stubborn(0.3))),
}

# %%
finals = {name: draw(model, 6, 8)[1] for name, model in {"base": base, **{name: model for name, (model, _) in runs.items()}}.items()}
exact = {name: exact_match(engine.read(pictures), asked) for name, pictures in finals.items()}
liked = {name: taste(pictures, asked) for name, pictures in finals.items()}
palette = dict(zip(finals, (GREY, "black", GREEN, BLUE, ORANGE)))
figure, axes = plt.subplots(1, 3, figsize=(13, 3.7), layout="constrained", width_ratios=[1.6, 1, 1])
for name, (_, curve) in runs.items():
    axes[0].plot(curve, "o-", color=palette[name], markersize=4, label=name)
axes[0].set(title="hidden taste of the training samples", xlabel="iteration")
axes[0].legend(fontsize=9, loc="upper left")
for axis, measured, title in zip(axes[1:], (liked, exact), ("taste, 48 new samples", "read exactly, 48 new samples")):
    means = [float(values.mean()) for values in measured.values()]
    errors = [float(values.std() / len(values) ** 0.5) for values in measured.values()]
    axis.barh(range(5), means, color=palette.values(), xerr=errors, ecolor=GREY)
    axis.set_yticks(range(5), measured if axis is axes[1] else [""] * 5)
    axis.invert_yaxis()
    axis.set(title=title)
    for i, value in enumerate(means):
        axis.annotate(f"{value:.2f}", (0.03 * axis.get_xlim()[1], i - 0.2), va="center", color="white", fontsize=9, weight="bold")

# %%
figure, axes = plt.subplots(5, len(prompts), figsize=(11.5, 4.6), layout="constrained")
for line, (name, pictures) in zip(axes, finals.items()):
    good = exact[name].reshape(-1, 8)
    for axis, image, right, prompt in zip(line, pictures[::8], good[:, 0], prompts):
        axis.imshow(image)
        axis.set(xticks=[], yticks=[])
        for spine in axis.spines.values():
            spine.set(color=GREEN if right == 1 else ORANGE, linewidth=2)
        if name == "base":
            axis.set_title(quoted(prompt), fontsize=10)
    line[0].set_ylabel(name.replace("verdicts, ", "verdicts,\n"), fontsize=8)

# %% [markdown]
# Verdicts alone take the taste as far as the numbers do here, and a judge that is wrong in 10 or 30 % of its answers still teaches, only less.
# (One run each, and error bars over samples of that run: do not read an order into the last two.)
#
# Then look at the right panel and at the frames, which are green where the OCR engine read the number: **all four read no better than the base
# model, and the most liked ones far worse**. Bold strokes were the quick way to please. A judge gets what it prefers pair by pair, not what it
# would say it wants; and a verdict does not tell by how much, so a shade bolder counts as much as a whole digit. The run that saw numbers gave up
# less of its reading than the one that saw verdicts: in a single run a hint, not a finding. Judge by something that was not trained on, as in page
# 07.
#
# ## Which function when
#
# | you have | use |
# |---|---|
# | a person or a model that compares two pictures | `rewards.judged(compare, group_size=k)` |
# | a score, of which you trust only the order | `algorithms.art_pairwise()`, or `rewards.preference(scorer, group_size=k)` for any algorithm |
# | labels of your own | `guidance.pair_labels` shows their form: 1, 0, 1/2, `nan` for whoever was not compared |
#
# ## Change this
#
# 1. Let ink count twice instead of four times in `taste`. Which runs keep reading now? Repeat with another `seed` before you believe it.
# 2. Replace `stubborn(0.3)` by `wavering(0.3)`. Ties cost information, wrong labels cost direction: which is worse at equal error?
# 3. Give the judge a taste for the left picture: `"a"` whenever the two are close. What do both orders make of it?
# 4. Ask about fewer pairs: return `"tie"` for all but one pair of a group. How many verdicts does a point of reward cost?
# 5. Let the judge raise an exception now and then (it went for a coffee). Look for `reward/missing` among the metrics.
# 6. Pair the best with the worst instead of at random: `art_pairwise(pairing=best_against_worst)`. It needs scores to know which those are.
