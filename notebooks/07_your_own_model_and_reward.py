# %% [markdown]
# # 07 · Your own model, your own reward
#
# What it takes to train *your* diffusers pipeline on *your* idea of a good picture: one call for the model, one function for the reward, a check
# of a few seconds, and a loop. Then what happens afterwards: export, reload into diffusers, resume. The pipeline here is the shipped one of 2.9
# million parameters (a real `StableDiffusion3Pipeline`), so that the page runs on two CPU cores; for another, change the one line that loads it.

# %%
# %matplotlib inline
import itertools
import tempfile

import matplotlib.pyplot as plt
import torch

from diffrl.algorithms import art, noisiest
from diffrl.loop import diagnose, load_checkpoint, restore_checkpoint, save_checkpoint, train
from diffrl.models import Model, from_pipeline
from diffrl.sampling import rollout, sample_seeds, seeded_noise, time_grid
from diffrl.tasks import digits

torch.set_num_threads(2)
plt.rcParams["figure.dpi"] = 75
folder = tempfile.TemporaryDirectory()

# %% [markdown]
# ## One call for the model
#
# `from_pipeline` adds a LoRA, freezes the rest, and returns plain functions. For SD3.5 the pipeline would be
# `StableDiffusion3Pipeline.from_pretrained(PATH, dtype=torch.bfloat16).to("cuda")` and the size 512 x 512; nothing else changes.

# %%
def load():
    return digits.load_pipeline()  # <- yours


def fresh(seed=0):
    """The pipeline as a Model, with a new LoRA that changes nothing yet."""
    torch.manual_seed(seed)
    return from_pipeline(load(), height=24, width=32, guidance_scale=1.0, max_sequence_length=1, lora={"r": 16, "lora_alpha": 32})


model = fresh()
print(f"trained: {len(model.params)} tensors, {sum(p.numel() for p in model.params.values()):,} numbers")
print("one sample's latents:", model.latent_shape())
print("times of four steps:", [round(float(t), 3) for t in model.times(4)])
print("cond of one prompt:", {name: tuple(value.shape) for name, value in model.encode(['the number "42"']).items()})

# %% [markdown]
# ## The same by hand
#
# A pipeline that `from_pipeline` does not know needs these six functions and nothing else. Here they are written out for this one, training two
# layers instead of a LoRA. Three things go wrong most often: the time must be what the network was trained on (diffusers: $1000\,t$), the sign
# must be $v = \varepsilon - x_0$ (page 02), and other `params` than the live ones must be *used* for that call. `diagnose`, below, finds the last
# two.

# %%
def by_hand(pipe, height=24, width=32):
    net = pipe.transformer.requires_grad_(False).eval()
    live = {name: p.requires_grad_() for name, p in net.named_parameters() if name.startswith(("norm_out", "proj_out"))}

    def velocity(params, x_t, t, cond):
        inputs = {"hidden_states": x_t, "timestep": 1000 * t, "return_dict": False, **cond}
        if all(params[name] is live[name] for name in live):  # the live tensors: with gradient
            return net(**inputs)[0]
        with torch.no_grad():  # an older or averaged policy, for this call only
            return torch.func.functional_call(net, dict(params), (), inputs)[0]

    def encode(prompts):
        with torch.no_grad():
            words, _, pooled, _ = pipe.encode_prompt(list(prompts), None, None, do_classifier_free_guidance=False, max_sequence_length=1)
        return {"encoder_hidden_states": words, "pooled_projections": pooled}

    def decode(latents):
        config = pipe.vae.config
        with torch.no_grad():
            pixels = pipe.vae.decode(latents / config.scaling_factor + config.shift_factor, return_dict=False)[0]
        return (255 * (pixels / 2 + 0.5).clamp(0, 1)).round().to(torch.uint8).permute(0, 2, 3, 1)

    return Model(
        velocity=velocity,
        params=live,
        encode=encode,
        decode=decode,
        latent_shape=lambda: (net.config.in_channels, height // pipe.vae_scale_factor, width // pipe.vae_scale_factor),
        times=lambda steps: time_grid(steps, shift=pipe.scheduler.config.shift),
    )


prompts = digits.prompts()[4::12][:8]


def latents(model, seed=5):
    """One sample of every prompt, at seeds that training never uses."""
    seeds = sample_seeds(seed, 0, range(len(prompts)), 1).flatten()
    params = {name: p.detach() for name, p in model.params.items()}
    return rollout(model.velocity, params, model.encode(prompts), model.times(8), seeds=seeds, shape=model.latent_shape()).x_0


mine = by_hand(load())
gap = (latents(mine) - latents(model)).abs().max()
levels = (mine.decode(latents(mine)).int() - model.decode(latents(model)).int()).abs().max()
print(f"largest difference after eight steps: {gap:.1e} in the latents, {levels} grey levels of 255 in the pixels")

# %% [markdown]
# ## A reward of your own
#
# Any function from pictures (`uint8`, b x h x w x 3, on the CPU) and prompts to one number each. This one likes left-right symmetry. A blank page
# is perfectly symmetric, so it gets no reward at all: `nan` means *this sample does not count*.

# %%
def symmetry(images, prompts):
    """Minus the ink that has no counterpart in the mirror, as a share of all ink."""
    ink = 1 - images.float().mean(3) / 255
    amount = ink.mean((1, 2))
    value = -(ink - ink.flip(2)).abs().mean((1, 2)) / amount.clamp_min(1e-3)
    return torch.where(amount < 0.05, torch.nan, value)


def show(rows, values=True):
    """Rows of pictures by name, the reward under each."""
    figure, axes = plt.subplots(len(rows), len(prompts), figsize=(12, 1.35 * len(rows)), layout="constrained", squeeze=False)
    for line, (name, images) in zip(axes, rows.items()):
        for axis, image, value in zip(line, images, symmetry(images, prompts)):
            axis.imshow(image)
            axis.set(xticks=[], yticks=[])
            axis.set_xlabel(f"{value:.2f}" if values else "", fontsize=9)
        line[0].set_ylabel(name, fontsize=9)
    for axis, prompt in zip(axes[0], prompts):
        axis.set_title(prompt, fontsize=8)


base = model.decode(latents(model))
show({"base": base})

# %% [markdown]
# ## Does it learn at all? Ask before the long run
#
# `diagnose` answers in seconds, and puts the model back as it was.

# %%
algorithm = art(trained_steps=noisiest(4), steps_per_sample=3)
check = {"group_size": 6, "steps": 6, "iterations": 2}
print(diagnose(model, algorithm, prompts[:4], symmetry, **check))

# %% [markdown]
# (The cosine is small and positive: a LoRA at this learning rate moves samples in many ways, and a little of it along $G$. Its sign is what
# counts.)
#
# Three set-ups with a mistake: a network left in train mode, so that every call draws another dropout mask; a `velocity` that ignores its `params`;
# and a reward that says the same of everything.

# %%
def with_dropout(model, share=0.05):
    drop = lambda v: torch.nn.functional.dropout(v, share)
    return model._replace(velocity=lambda *inputs: drop(model.velocity(*inputs)))


deaf = mine._replace(velocity=lambda params, *inputs: mine.velocity(mine.params, *inputs))

torch.manual_seed(0)
print("---- dropout")
print(diagnose(with_dropout(mine), algorithm, prompts[:4], symmetry, **check))
print("---- params ignored")
print(diagnose(deaf, algorithm, prompts[:4], symmetry, **check))
print("---- a reward that is always 1")
print(diagnose(mine, algorithm, prompts[:4], lambda images, prompts: torch.ones(len(images)), **check))

# %% [markdown]
# Read them from the top: a model that does not repeat itself makes every line below meaningless, also those that say `ok`. A model that ignores its
# params learns all the same (its last line), so its curve looks well; but whatever asks for *another* policy (a reference, a slow average, a draft)
# gets the live one under its name. A `?` is a question that could not be asked: with no group alive there is no gradient, and no way for the reward to go.
#
# ## Train
#
# `train` is a generator: one dict of metrics per iteration, and you decide when to stop. On the way, a checkpoint.

# %%
settings = {"group_size": 8, "steps": 8, "seed": 0}
optimizer = torch.optim.AdamW(list(model.params.values()), lr=1e-3)
rows = []
for row in itertools.islice(train(model, algorithm, prompts, symmetry, optimizer, **settings), 10):
    rows.append(row)
    if row["iteration"] == 5:
        save_checkpoint(folder.name + "/checkpoint", params=model.params, optimizer=optimizer, iteration=6)
print("reward: ", " ".join(f"{row['reward/mean']:.2f}" for row in rows))
print("missing:", " ".join(f"{row['reward/missing']:.2f}" for row in rows))

# %%
trained = model.decode(latents(model))
show({"base": base, "10 iterations": trained})

# %% [markdown]
# It has learned *exactly what was asked*: nobody asked for the number. Compare the numbers under the pictures, then look at what they cost. A
# reward is a specification; add to it what must not be lost, e.g. `weighted_sum({"read": ocr(), "symmetry": symmetry})`, and judge by something
# the model was not trained on.

# %%
figure, axes = plt.subplots(1, 3, figsize=(12, 3), layout="constrained")
axes[0].plot([row["reward/mean"] for row in rows], "o-")
axes[0].set(title="reward", xlabel="iteration")
for update in (1, 2):
    axes[1].plot([row[f"loss/update_{update}"] for row in rows], "o-", label=f"update {update}")
axes[1].set(title="loss", xlabel="iteration", ylim=(0, 1.1))
axes[1].legend()
axes[2].plot([row["drift_rms/update_2"] for row in rows], "o-")
axes[2].set(title="rms drift of v at update 2", xlabel="iteration", ylim=(0, None));

# %% [markdown]
# The first update's loss is 1 in every iteration, as it must be (a unit-RMS target, no drift yet): the cheapest check that a hand-made `velocity`
# gives the same numbers in rollout and training. In the second, states beyond the trust region count as 0, and here that is most of them: at this
# learning rate one step already leaves the radius.
#
# ## Export, and back into diffusers
#
# `model.export` writes what the pipeline class reads. A fresh pipeline, that has never heard of this library, draws from the same noise with its
# own sampler:

# %%
model.export(folder.name + "/adapter")
pipe = load()
pipe.load_lora_weights(folder.name + "/adapter")
noise = seeded_noise(sample_seeds(5, 0, range(len(prompts)), 1).flatten(), model.latent_shape())
images = pipe(
    list(prompts),
    latents=noise,
    sigmas=[1 - i / 8 for i in range(8)],  # the plain grid; the scheduler applies its shift
    num_inference_steps=8,
    height=24,
    width=32,
    guidance_scale=1.0,
    max_sequence_length=1,
    output_type="pt",
).images
reloaded = (255 * images).round().to(torch.uint8).permute(0, 2, 3, 1)
show({"trained here": trained, "in diffusers": reloaded})
print(f"largest difference: {(trained.int() - reloaded.int()).abs().max()} grey levels of 255")

# %% [markdown]
# ## Resume
#
# Another process, later: a fresh model and optimizer, the checkpoint of iteration 6, and the remaining four iterations. Prompts, seeds and
# optimizer state are functions of the iteration or in the checkpoint, so the result is the same run.

# %%
again = fresh(seed=123)  # other factors: they are overwritten
optimizer = torch.optim.AdamW(list(again.params.values()), lr=1e-3)
saved = load_checkpoint(folder.name + "/checkpoint")
behaviour = restore_checkpoint(saved, params=again.params, optimizer=optimizer)
steps = train(again, algorithm, prompts, symmetry, optimizer, start=saved.iteration, behaviour=behaviour, **settings)
resumed = list(itertools.islice(steps, 4))
print("uninterrupted:", [f"{row['reward/mean']:.6f}" for row in rows[6:]])
print("resumed:      ", [f"{row['reward/mean']:.6f}" for row in resumed])
gap = max(float((again.params[name] - p).detach().abs().max()) for name, p in model.params.items())
print(f"largest difference of a parameter: {gap:.1e}")
assert gap < 1e-6
folder.cleanup()

# %% [markdown]
# (On the command line all of this is `diffrl train --reward MODULE:FUNCTION`, `diffrl doctor` and `diffrl train --resume FOLDER`.)
#
# ## Change this
#
# 1. Remove the `torch.where` from `symmetry`. Does the model find the blank page? Watch the ink.
# 2. Train with `weighted_sum({"read": ocr(), "symmetry": symmetry}, {"read": 1.0, "symmetry": 0.5})` from `diffrl.rewards`. Which symmetric
#    numbers survive?
# 3. Train `mine` instead of `model`: two layers, no LoRA. It needs another learning rate; let `diagnose(..., learning_rate=...)` tell which.
# 4. Put `timestep=t` instead of `1000 * t` into `by_hand`. Which lines of `diagnose` change? Which picture tells at once?
