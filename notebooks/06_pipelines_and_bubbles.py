# %% [markdown]
# # 06 · Pipelines and bubbles
#
# GPUs that generate wait for GPUs that train, and the other way round. A stretch of waiting is a *bubble*. This page plays with
# them: change a cost, look at who waits for whom, and read off what no schedule could beat. The pieces are those of DigenRL (arXiv
# 2606.24369, withdrawn by its authors; nothing public runs it):
#
# - **GAP**: the batch is cut into fragments along the sample axis; a fragment is trained as soon as its groups are scored;
# - **TSP**: several (sample, time step) pairs are packed into one forward-backward;
# - **TAG**: a trainer that has nothing to train helps to generate; a small search says how much;
# - **TCSS**: the first K fragments of the next batch start early, under weights one version old.
#
# Everything up to the last section is **simulated, from assumed seconds**. The last one runs for real.

# %%
# %matplotlib inline
import itertools
import statistics
from dataclasses import replace

import matplotlib.pyplot as plt
import torch

from diffrl.algorithms import art
from diffrl.executors import AlgorithmStages, calibrate, run
from diffrl.loop import train
from diffrl.models import from_pipeline
from diffrl.parallel import (
    PRESETS,
    CostModel,
    Pool,
    Schedule,
    TrainCost,
    best_split,
    bts_search,
    gap_partition,
    ladder,
    lower_bound,
    prompt_partition,
    simulate,
    tcss_seconds,
)
from diffrl.plots import gantt, utilisation
from diffrl.rewards import ocr
from diffrl.tasks import digits
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model

torch.set_num_threads(1)
plt.rcParams.update({"figure.dpi": 80, "font.size": 9})


def draw(traces, title):
    """`plots.gantt`, at a resolution for a screen."""
    figure = gantt(traces, title=title)
    figure.set_dpi(80)
    return figure


# %% [markdown]
# ## Costs
#
# A cost model is a handful of seconds and two pools of GPUs. `PRESETS` holds assumed ones for four models on three testbeds; these are
# round numbers that make every effect visible. **Change them and run the page again.**

# %%
cost = CostModel(
    generate=4.0,                    # one sample on one GPU
    train=TrainCost(a=0.5, b=0.5),   # a + b q: one forward-backward of q states
    generator=Pool(4),
    trainer=Pool(4),
    helper=1,                        # GPUs per replica when the trainer helps to generate
    reward=1.0,                      # per fragment
    optimizer=0.5,
    publish=0.5,
    switch=0.5,                      # from training to generating, and back
    restore=0.5,
)
prompts, group, fragments, states, pack, stale = 4, 8, 8, 8, 4, 2
schedules = ladder(prompts, group, fragments=fragments, timesteps=states, pack=pack, stale=stale)
schedules["genrl"] = replace(schedules["genrl"], pack=pack)   # a colocated baseline that is packed too, for fairness
list(schedules)

# %% [markdown]
# ## Who worked when
#
# `genrl` is colocated: all GPUs generate, then all train. The others split the GPUs. Beside each pool is its busy share, dashed lines are
# ends of global steps, hatched bars were generated under weights one version old. Look for the white: behind a barrier each pool is idle
# while the other works; fragments let them overlap; what is left is mostly at the two ends of a step.

# %%
shown = {name: simulate(schedules[name], cost, steps=3) for name in ("genrl", "barrier")}
draw(shown, title="colocated, and split behind a barrier")

# %%
draw({name: simulate(schedules[name], cost, steps=3) for name in ("gap", "gap+tsp")}, title="fragments (GAP), then packed (TSP)")

# %%
draw(
    {name: simulate(schedules[name], cost, steps=3) for name in ("gap+tsp+tag", "gap+tsp+tag+tcss")},
    title="the trainer helps (TAG); the next batch starts early (TCSS)",
)

# %% [markdown]
# ## A trainer that helps, and the search behind it
#
# When the trainer has nothing to train, it *could* generate. It pays for that: weights are moved out of the way (`switch`) and back
# (`restore`), and a fragment that can be trained meanwhile waits. How many fragments should it take? `bts_search` answers by
# playing the rest of the step for every answer, itself deciding again at later bubbles, and keeps the one that ends first.
#
# One GPU each, eight fragments of 10 s of generation and 4 s of training, a switch of 1 s each way:

# %%
slow = CostModel(10.0, TrainCost(0.0, 4.0), Pool(1), Pool(1), helper=1, reward=1.0, switch=1.0, restore=1.0)
eight = Schedule(prompt_partition(8, 1, fragments=8), 1)
assisted = replace(eight, tag=True)
draw({"alone": simulate(eight, slow), "assisted": simulate(assisted, slow)}, title="one step: the trainer waits, or helps (light blue)")

# %% [markdown]
# Is the search's answer the best? Here is every constant answer, "take n at each bubble", beside it. Too little wastes the bubble; too much
# makes fragments that are ready wait for the trainer.

# %%
def always(n):
    """A policy of lending: n fragments at every bubble, as far as there are any."""
    return lambda bubble, schedule, cost: min(n, len(bubble.unclaimed))


figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.3), layout="constrained")
constant = [simulate(assisted, slow, lend=always(n)).makespan for n in range(8)]
searched = simulate(assisted, slow).makespan
left.bar(range(8), constant, color="#56b4e9", label="n at every bubble")
left.axhline(searched, color="#d55e00", label="what bts_search does")
left.set(xlabel="n", ylabel="seconds of a step", title="how much should the trainer help?", ylim=(0, 1.35 * max(constant)))
left.legend(fontsize=8, loc="upper right")
assert searched <= min(constant) + 1e-9

pauses = [0, 0.5, 1, 2, 4, 8, 16, 32]
gains = {
    name: [simulate(eight, c).makespan / simulate(assisted, c, lend=lend).makespan for c in (replace(slow, switch=p, restore=p) for p in pauses)]
    for name, lend in (("bts_search", bts_search), ("always 3", always(3)))
}
for (name, speed), colour in zip(gains.items(), ("#d55e00", "#56b4e9")):
    right.plot(range(len(pauses)), speed, "o-", color=colour, label=name)
right.axhline(1, color="grey", linestyle=":")
right.set_xticks(range(len(pauses)), [f"{p:g}" for p in pauses])
right.set(xlabel="seconds of a switch, each way", title="speed over a trainer that waits")
right.legend(fontsize=8, loc="lower left")
print(f"alone {simulate(eight, slow).makespan:.0f} s, assisted {searched:.0f} s, bound {lower_bound(assisted, slow):.0f} s")

# %% [markdown]
# On the right a switch gets dearer. The search takes other amounts then, at last nothing, and never falls below the dotted line; a fixed rule does.
#
# ## Weights one version old
#
# On-policy, the generator stands still while the last fragments are trained and the new weights are published. TCSS lets the first K
# fragments of the next batch start before that. They are at most *one* version late, and their stored velocities and likelihoods are that
# version's, so that a loss knows what it compares with. How much staleness buys what? Dots are simulated, the line is the closed form
# (`tcss_seconds`, for whole-group fragments without TAG).

# %%
figure, axis = plt.subplots(figsize=(6.5, 3.3), layout="constrained")
cases = {"generation slower: 10 s and 6 s": (10.0, 6.0), "equal: 8 s and 8 s": (8.0, 8.0), "training slower: 6 s and 10 s": (6.0, 10.0)}
for (name, (g, t)), colour in zip(cases.items(), ("#0072b2", "#009e73", "#d55e00")):
    made = CostModel(g, TrainCost(0.0, t), Pool(1), Pool(1), reward=2.0, optimizer=1.0, publish=3.0)
    dots = [simulate(replace(eight, stale=k), made, steps=16).period for k in range(9)]
    line = [tcss_seconds(8, k, g=g, r=2.0, t=t, u=1.0, w=3.0) for k in range(9)]
    axis.plot(range(9), line, "-", color=colour, label=name)
    axis.plot(range(9), dots, "o", color=colour, markersize=5)
    assert max(abs(a - b) for a, b in zip(dots, line)) < 1e-6
axis.set(xlabel="K: fragments of eight that may start one version early", ylabel="seconds per step", title="a little staleness goes a long way", ylim=(60, 105))
axis.legend(fontsize=8, loc="upper right")
axis.grid(alpha=0.25)

# %% [markdown]
# One or two stale fragments buy nearly everything; then one of the pools is busy all the time and no further staleness helps. More K is
# more off-policy data for nothing.
#
# ## No free lunch
#
# GPU-seconds are what they are: `lower_bound` is the work of one step, spread over all GPUs without a gap. A schedule can only take
# bubbles away. Where the batch fills the colocated GPUs exactly, colocation without swaps has few, and separation cannot win.

# %%
def table(schedules, cost, gpus):
    """Seconds per step of every schedule with its best division of the GPUs, the bound, and the busy shares."""
    print(f"{'schedule':18} {'s/step':>7} {'bound':>7} {'split':>7}   busy")
    for name, schedule in schedules.items():
        best = best_split(gpus, schedule, cost) if schedule.placement == "split" else cost
        trace, bound = simulate(schedule, best, steps=8), lower_bound(schedule, best)
        assert trace.period >= bound * (1 - 1e-9)  # nothing beats the bound
        split = f"{best.generator.gpus}+{best.trainer.gpus}" if schedule.placement == "split" else "all"
        busy = ", ".join(f"{pool} {share:.0%}" for pool, share in utilisation(trace).items())
        print(f"{name:18} {trace.period:7.2f} {bound:7.2f} {split:>7}   {busy}")


table(schedules, cost, gpus=8)

# %% [markdown]
# (`verl-omni`, `barrier` and `gap` run one state per forward-backward, so their bound is higher: packing changes the work itself.)
#
# A pool that is busy is not yet a pool that gains: `switch` and `publish` keep it busy too, and a last wave that fills half of the replicas
# counts in full. The honest share is bound over period: of all GPU-seconds of a step, those that no schedule could save.

# %%
figure, axis = plt.subplots(figsize=(6.5, 3), layout="constrained")
divided = {name: best_split(8, s, cost) if s.placement == "split" else cost for name, s in schedules.items()}
traces = {name: simulate(s, divided[name], steps=8) for name, s in schedules.items()}
useful = [lower_bound(schedules[name], divided[name]) / trace.period for name, trace in traces.items()]
busy = [
    sum(share * (8 if pool == "cluster" else getattr(divided[name], pool).gpus) for pool, share in utilisation(trace).items()) / 8
    for name, trace in traces.items()
]
axis.barh(list(schedules), busy, color="#dddddd", label="busy")
axis.barh(list(schedules), useful, color="#009e73", height=0.45, label="bound / period")
axis.invert_yaxis()
axis.set(xlim=(0, 1.3), xlabel="share of the GPU-seconds of a step", title="busy, and useful")
axis.set_xticks([0, 0.25, 0.5, 0.75, 1])
axis.legend(fontsize=8, loc="center right");

# %% [markdown]
# The same table from a preset, whose costs are assumed, not measured:

# %%
preset = PRESETS["hunyuanvideo-13b/B"]
rungs = ladder(4, 8, fragments=2, timesteps=8, pack=4, stale=1)   # of 16 samples: finer ones would leave replicas idle
rungs["genrl"] = replace(rungs["genrl"], pack=4)
table(rungs, preset, gpus=32)

# %% [markdown]
# ## When does separation win?
#
# On the left, training is made cheaper and dearer. No schedule gets over 1: 32 samples fill eight colocated GPUs exactly, in four full
# waves, and these GPUs never swap anything. On the right a batch of 8 samples, in one fragment: colocated,
# GPUs beyond the eighth have nothing to do; separated, eight generate the next batch while eight train this one. That takes weights one
# version old (TCSS): without it the two pools only take turns.

# %%
def compare(axis, schedules, colocated, rows, title, xlabel):
    """Speed over `colocated` of every schedule with its best division. rows: (x, cost, GPUs)."""
    for number, (name, schedule) in enumerate(schedules.items()):
        speed = [simulate(colocated, c, steps=8).period / simulate(schedule, best_split(n, schedule, c), steps=8).period for _, c, n in rows]
        axis.plot(range(len(rows)), speed, "o-", label=name, linewidth=1.5 if number else 6, alpha=1 if number else 0.4)  # under another of equal speed
    axis.axhline(1, color="grey", linestyle=":")
    axis.set_xticks(range(len(rows)), [str(x) for x, *_ in rows])
    axis.set(title=title, xlabel=xlabel)
    axis.set_ylim(0, 1.4 * axis.get_ylim()[1])
    axis.legend(fontsize=8, ncols=2, loc="upper left")


figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
split = {name: schedule for name, schedule in schedules.items() if schedule.placement == "split"}
scaled = [(f, replace(cost, train=TrainCost(f * cost.train.a, f * cost.train.b)), 8) for f in (0.25, 0.5, 1, 2, 4)]
compare(axes[0], split, schedules["genrl"], scaled, "speed over colocated: 32 samples, 8 GPUs", "training seconds, times those above")
few = ladder(1, 8, fragments=1, timesteps=8, stale=1)
sized = [(n, CostModel(60.0, TrainCost(0.0, 8.0), Pool(n // 2), Pool(n // 2), helper=1), n) for n in (4, 8, 16, 32)]
split = {name: schedule for name, schedule in few.items() if name in ("barrier", "gap+tsp+tag", "gap+tsp+tag+tcss")}
compare(axes[1], split, few["genrl"], sized, "speed over colocated: 8 samples, 60 s each, 8 s a state", "GPUs")

# %% [markdown]
# Finer is not always better: with few samples in a fragment, replicas stand idle in its last wave. And mind the left end of the TCSS line: one stale
# fragment *of one* is the whole batch one version old, of two it is half. Its seconds are those of off-policy training there; only from some
# eight fragments on is it a *little* staleness (an eighth).

# %%
figure, axis = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
counts = [1, 2, 4, 8, 16, 32]
for name, options in (("GAP + TSP", {}), ("+ TAG", {"tag": True}), ("+ TCSS, 1 stale", {"tag": True, "stale": 1})):
    cuts = [Schedule(gap_partition(prompts, group, fragments=m), group, timesteps=states, pack=pack, **options) for m in counts]
    axis.plot(range(len(counts)), [simulate(cut, cost, steps=8).period for cut in cuts], "o-", label=name)
axis.set_xticks(range(len(counts)), [str(m) for m in counts])
axis.set(xlabel="fragments", title="seconds per step (simulated, 4 + 4 GPUs)")
axis.legend(fontsize=8);

# %% [markdown]
# ## One that runs
#
# `executors.run` plays a schedule for real. Here in this process, on the digits task with its OCR engine: two prompts x four samples in four
# fragments. In one process rollout and training share one network and take turns; what can overlap is the reward, which has a thread of its own.
# `calibrate` times every stage alone; the simulator predicts a trace from that; the executor measures one.

# %%
def stages():
    """The digits task, its optimizer and its algorithm, as the stages of a schedule."""
    torch.manual_seed(0)
    model = from_pipeline(digits.load_pipeline(), lora={"r": 16, "lora_alpha": 32}, **digits.pipeline_options())
    optimizer = torch.optim.AdamW(list(model.params.values()), lr=1e-3)
    return AlgorithmStages(model, art(updates=1), digits.prompts()[7::50], ocr(threads=1), optimizer, group_size=4, steps=4, seed=0)


schedule = Schedule(gap_partition(2, 4, fragments=4), 4, timesteps=4, pack=32)
real = stages()
alone = calibrate(real, timesteps=4, samples=2, sizes=(2, 4), repeats=2)
*_, last = run(schedule, real, steps=3, cost=alone)


def replayed(trace):
    """A cost model of the medians of a trace's own intervals: what the simulator makes of the seconds that were measured."""
    seconds = {}
    for interval in trace.intervals:
        seconds.setdefault(interval.kind, []).append(interval.end - interval.start)
    middle = {kind: statistics.median(values) for kind, values in seconds.items()}
    return replace(
        alone,
        generate=middle["generate"] / 2,
        train=TrainCost(0.0, middle["train"] / 8),
        reward=middle["reward"],
        reward_per_sample=0.0,
        optimizer=middle["update"],
        publish=middle.get("publish", 0.0),
    )


draw({"simulated, from its own medians": simulate(schedule, replayed(last.trace), steps=3), "measured": last.trace}, title="the digits task, in this process")

# %%
print(f"seconds per step: {simulate(schedule, alone, steps=3).period:.2f} predicted from stages timed alone, "
      f"{simulate(schedule, replayed(last.trace), steps=3).period:.2f} from the run's own medians, {last.trace.period:.2f} measured")

# %% [markdown]
# Compare the shapes first: order of the bars, who waits for whom. On the right the trainer's first bar overlaps the generator's last ones, though
# they take turns: a measured interval begins when its stage is *called*, so it includes waiting for the one network that both share. (The
# medians on the left are of such intervals too, so they count that waiting as work.)
#
# Then the seconds. Where they differ there are two reasons. Stages in one process get in each other's way, which a simulator of separate pools does not know; and whatever else the machine was doing is in the measured one
# alone. (`python benchmarks/executors.py` compares the two where stages sleep for known times: there they agree within a few percent.)
# **This shows that schedules run and are timed; a gain from overlap it does not show**, as generation and training take turns in one process. Where each has
# a process of its own (`python benchmarks/overlap.py`, on Ray) there is one to be measured.
#
# A schedule says where and when, never what: the params are those of the plain loop. On the flow model of page 01, in float64:

# %%
def toy():
    model = toy_model(dtype=torch.float64)
    return model, torch.optim.Adam(list(model.params.values()), lr=0.02)


model, optimizer = toy()
cut = Schedule(gap_partition(4, 6, fragments=4), 6, timesteps=8, pack=64)
*_, last = run(cut, AlgorithmStages(model, art(updates=1), PROMPTS, toward_compass, optimizer, group_size=6, steps=8, seed=0), steps=2)
plain, optimizer = toy()
rows = list(itertools.islice(train(plain, art(updates=1), PROMPTS, toward_compass, optimizer, group_size=6, steps=8, seed=0), 2))
gap = max(float((p - model.params[name]).detach().abs().max()) for name, p in plain.params.items())
print(f"largest difference of a parameter after two steps: {gap:.0e}")
assert gap < 1e-9
assert abs(last.metrics["reward/mean"] - rows[-1]["reward/mean"]) < 1e-9

# %% [markdown]
# ## Change this
#
# 1. `reward=1.0` to 20 in `cost`: a slow judge. Which piece hides it? Give it `reward_workers=1`.
# 2. `Pool(2)` and `Pool(6)`: who waits now? Then let `best_split` choose.
# 3. `PRESETS["flux.1-12b/B"]` in the table. Which rung of the ladder matters for images, which for videos?
# 4. Write a policy of lending of your own, `(bubble, schedule, cost) -> n`, and try to beat `bts_search`.
# 5. `stale=1` in the last schedule: which bars get hatched? (`last.trace.staleness` says it in numbers.)
# 6. `ladder(1, 8, ...)` on 32 GPUs: fewer samples than GPUs, where separation wins. How far can training get cheaper before it no longer does?
