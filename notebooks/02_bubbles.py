# %% [markdown]
# # 02 · Bubbles
#
# GPUs that generate wait for GPUs that train, and the other way round. This page plays with that: change a cost, look at who waits
# for whom, and read off what no schedule could beat. The pieces are those of DigenRL (arXiv 2606.24369, withdrawn by its authors;
# nothing public runs it): fragments along the sample axis (GAP), time-step packs (TSP), a trainer that helps to generate while it
# waits (TAG), and fragments of the next batch that start one version early (TCSS).
#
# Everything up to the last section is **simulated, from assumed seconds**. The last one runs.

# %%
# %matplotlib inline
import itertools
import time
from dataclasses import replace

import matplotlib.pyplot as plt
import torch

from diffrl.algorithms import art
from diffrl.executors import AlgorithmStages, calibrate, run
from diffrl.loop import train
from diffrl.parallel import PRESETS, CostModel, Pool, Schedule, TrainCost, best_split, gap_partition, ladder, lower_bound, simulate
from diffrl.plots import gantt, utilisation
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model

torch.set_num_threads(1)

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
# ends of global steps, hatched bars were generated under weights one version old.

# %%
shown = {name: simulate(schedules[name], cost, steps=3) for name in ("genrl", "barrier")}
gantt(shown, title="colocated, and split behind a barrier")

# %%
gantt({name: simulate(schedules[name], cost, steps=3) for name in ("gap", "gap+tsp")}, title="fragments (GAP), then packed (TSP)")

# %%
gantt(
    {name: simulate(schedules[name], cost, steps=3) for name in ("gap+tsp+tag", "gap+tsp+tag+tcss")},
    title="the trainer helps (TAG); the next batch starts early (TCSS)",
)

# %% [markdown]
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
        assert trace.period >= bound * (1 - 1e-9)
        split = f"{best.generator.gpus}+{best.trainer.gpus}" if schedule.placement == "split" else "all"
        busy = ", ".join(f"{pool} {share:.0%}" for pool, share in utilisation(trace).items())
        print(f"{name:18} {trace.period:7.2f} {bound:7.2f} {split:>7}   {busy}")


table(schedules, cost, gpus=8)

# %% [markdown]
# (`verl-omni`, `barrier` and `gap` run one state per forward-backward, so their bound is higher: packing changes the work itself.)
#
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
    for name, schedule in schedules.items():
        speed = [simulate(colocated, c, steps=8).period / simulate(schedule, best_split(n, schedule, c), steps=8).period for _, c, n in rows]
        axis.plot(range(len(rows)), speed, "o-", label=name)
    axis.axhline(1, color="grey", linestyle=":")
    axis.set_xticks(range(len(rows)), [str(x) for x, *_ in rows])
    axis.set(title=title, xlabel=xlabel)
    axis.legend(fontsize=8)


figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
split = {name: schedule for name, schedule in schedules.items() if schedule.placement == "split"}
scaled = [(f, replace(cost, train=TrainCost(f * cost.train.a, f * cost.train.b)), 8) for f in (0.25, 0.5, 1, 2, 4)]
compare(axes[0], split, schedules["genrl"], scaled, "speed over colocated: 32 samples, 8 GPUs", "training seconds, times those above")
few = ladder(1, 8, fragments=1, timesteps=8, stale=1)
sized = [(n, CostModel(60.0, TrainCost(0.0, 8.0), Pool(n // 2), Pool(n // 2), helper=1), n) for n in (4, 8, 16, 32)]
split = {name: schedule for name, schedule in few.items() if name in ("barrier", "gap+tsp+tag", "gap+tsp+tag+tcss")}
compare(axes[1], split, few["genrl"], sized, "speed over colocated: 8 samples, 60 s each, 8 s a state", "GPUs")

# %% [markdown]
# Finer is not always better: with few samples in a fragment, replicas stand idle in its last wave.

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
# `executors.run` plays a schedule for real. Here in this process, on the flow model of page 01, with a reward that takes a while, as one
# that answers over the network would: four fragments, so that the next is generated while the last is scored.
# `calibrate` times every stage alone; the simulator predicts a trace from that; the executor measures one.

# %%
def distant(points, prompts):
    """The reward of page 01, 5 ms later."""
    time.sleep(0.005)
    return toward_compass(points, prompts)


def stages():
    """A fresh toy, its optimizer and its algorithm, as the stages of a schedule."""
    model = toy_model(dtype=torch.float64)
    optimizer = torch.optim.Adam(list(model.params.values()), lr=0.02)
    return AlgorithmStages(model, art(updates=1), PROMPTS, distant, optimizer, group_size=6, steps=8, seed=0)


schedule = Schedule(gap_partition(4, 6, fragments=4), 6, timesteps=8, pack=64)
measured_costs = calibrate(stages(), timesteps=8, samples=6, sizes=(6, 12))
real = stages()
*_, last = run(schedule, real, steps=2, cost=measured_costs)
gantt({"simulated": simulate(schedule, measured_costs, steps=2), "measured": last.trace}, title="the toy: predicted from stages timed alone, and measured")

# %% [markdown]
# The measured one takes longer: stages of a few milliseconds in one interpreter get in each other's way, which a simulator of pools of
# their own does not know (`python benchmarks/executors.py` compares the two where stages sleep instead, within 7 %).
#
# A schedule says where and when, never what: the params are those of the plain loop.

# %%
model = toy_model(dtype=torch.float64)
optimizer = torch.optim.Adam(list(model.params.values()), lr=0.02)
rows = list(itertools.islice(train(model, art(updates=1), PROMPTS, toward_compass, optimizer, group_size=6, steps=8, seed=0), 2))
gap = max(float((p - real.model.params[name]).detach().abs().max()) for name, p in model.params.items())
print(f"largest difference of a parameter after two steps: {gap:.0e}")
assert gap < 1e-9
assert abs(last.metrics["reward/mean"] - rows[-1]["reward/mean"]) < 1e-9
