"""Every algorithm as a whole: two iterations of the loop against a plain script written from the table of baselines.

The script (`reference_run`) has its own rollout, noise, advantages, losses and optimizer steps, in torch and numpy alone;
the rows of the table are data. It writes what the library does in another form where there is one: kernels as drift plus
score, ratios from the injected noise, DPM-Solver++ as published, errors of a forward state as t (u - v). Negative controls
are the tests with `control` in their names.
"""

import inspect
import itertools
import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import F64, normal, refuses
from strategies import seeds
from torch import Tensor
from toys import adam, rows_of, same, start, timeless, toy_reward, toy_run, values_of

from diffrl import algorithms, credits, objectives, policy_gradients, rollouts
from diffrl.algorithms import lagging, live, ocr_decay, slow_decay
from diffrl.credits import (
    advantage_credit,
    advantages_of_sum,
    optimality_credit,
    sum_of_advantages,
    unbiased_group_std,
)
from diffrl.guidance import batch_std, group_std
from diffrl.losses import inverse_abs_error, nft_negative, nft_positive
from diffrl.losses import nft as nft_loss
from diffrl.objectives import generalised_huber_matching, huber_matching, plain_matching
from diffrl.policy_gradients import Transition, kl_without_delta, policy_gradient, ppo
from diffrl.rewards import weighted_sum
from diffrl.rollouts import (
    all_but_last,
    all_steps,
    collect_renoised,
    collect_rollout,
    collect_window,
    first_half,
    noise_of_the_prompt,
    noisiest_nine_tenths,
    own_noise,
    sliding_window_of,
    three_fifths,
)
from diffrl.sampling import cps_step, dance_sde_step, dpm2_step, euler_step, flow_sde_step
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model, toy_velocity
from diffrl.trust_region import ema

G, K, STEPS = 4, 8, 8
PROMPT = torch.arange(G).repeat_interleave(K)
TIMES = [1 - i / STEPS for i in range(STEPS + 1)]


# ---- the table --------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One method of the table of baselines, as data."""

    rollout: str  # flow | dance | cps | euler | dpm2
    loss: str  # ppo | guard | guard of the batch | dppo | nft | awm | art
    trained: Callable[[int, int], range]  # (iteration, first seed) -> steps whose states are kept
    eta: float = 0.0
    euler_outside: bool = False
    one_start: bool = False
    spread: str = "batch"  # batch | group | unbiased
    eps: float = 1e-4
    clamp: float = 5.0
    summed: bool = False  # advantages per reward, added
    clip: float = 1e-4  # of the ratio; beta of nft; radius of dppo and art
    beta: float = 0.0  # of the pull toward the first params
    kl: str = "exact"  # exact | without delta | clamped sigma
    surrogate: bool = False
    subset: int | None = None
    updates: int = 2
    decay: Callable[[int], float] | None = None
    branch: str = "both"
    best_of: int | None = None
    paired: bool = False
    matching: str = "plain"


def until(n: int) -> Callable[[int, int], range]:
    return lambda i, seed: range(n)


def random_3(i: int, seed: int) -> range:
    """Size 3, start uniform in {0..N/2 - 3}."""
    first = int(np.random.SeedSequence(seed, spawn_key=(1,)).generate_state(1, np.uint64)[0]) % (STEPS // 2 - 3 + 1)
    return range(first, first + 3)


def sliding(size: int, stride: int, every: int) -> Callable[[int, int], range]:
    places = len(range(0, STEPS - 1 - size + 1, stride))
    return lambda i, seed: range(i // every % places * stride, i // every % places * stride + size)


FLOW = Row("flow", "ppo", until(STEPS - 1), eta=0.7, beta=0.04)
CPS = FLOW._replace(rollout="cps", eta=0.8)
DANCE = Row("dance", "ppo", until(STEPS - 1), eta=0.3, one_start=True, spread="group", eps=1e-8, updates=1, summed=True)
DANCE = DANCE._replace(subset=math.floor(0.6 * (STEPS - 1)))
MIX = Row("flow", "ppo", sliding(4, 1, 25), eta=0.7, euler_outside=True, spread="group", updates=4, summed=True)
GUARD = Row("flow", "guard", until(STEPS - 1), eta=0.7, spread="group", clip=2e-6)
DPPO = Row("flow", "dppo", until(STEPS // 2), eta=0.7, clip=1e-5, subset=3)
NFT = Row("dpm2", "nft", until(STEPS), clip=1.0, beta=1e-4, updates=1, decay=lambda i: min(0.001 * i, 0.5))
OCR = NFT._replace(clip=0.1, updates=2, decay=lambda i: 0.0 if i < 75 else min(0.0075 * (i - 75), 0.999))
AWM = Row("euler", "awm", until(math.floor(0.9 * STEPS)), clip=1e-4, beta=1e-4, updates=1)
ART = Row("euler", "art", until(STEPS), clip=1e-5)
TABLE = {
    "flow_grpo": FLOW,
    "flow_grpo_as_published": FLOW._replace(kl="without delta"),
    "flow_grpo_fast": Row("cps", "ppo", random_3, eta=0.8, euler_outside=True, clip=1e-5),
    "mix_grpo": MIX,
    "dance_grpo": DANCE,
    "dance_grpo_as_published": DANCE._replace(spread="unbiased"),
    "grpo_guard": GUARD,
    "grpo_guard_as_published": GUARD._replace(loss="guard of the batch"),
    "cps_grpo": CPS,
    "cps_grpo_as_published": CPS._replace(surrogate=True),
    "flow_dppo": DPPO,
    "flow_dppo_as_published": DPPO._replace(kl="clamped sigma"),
    "nft": NFT,
    "nft_ocr": OCR,
    "nft_positive_only": NFT._replace(branch="positive"),
    "nft_negative_only": NFT._replace(branch="negative"),
    "awm": AWM,
    "art": ART,
    "art_pairwise": ART._replace(paired=True),
}
VARIANTS = {
    "mix_grpo, a window that moves": (
        partial(algorithms.mix_grpo, window=2, stride=2, every=1),
        MIX._replace(trained=sliding(2, 2, 1)),
    ),
    "dance_grpo, best of 4, twice": (
        partial(algorithms.dance_grpo, best_of=4, updates=2),
        DANCE._replace(best_of=4, updates=2),
    ),
    "dance_grpo, own noise": (partial(algorithms.dance_grpo, noise=own_noise), DANCE._replace(one_start=False)),
    "nft, an average from the start": (
        partial(algorithms.nft, decay=lambda i: 0.6, updates=2),
        NFT._replace(decay=lambda i: 0.6, updates=2),
    ),
    "nft, positive branch alone": (
        partial(algorithms.nft, branches=nft_positive, updates=2),
        NFT._replace(branch="r alone", updates=2),
    ),
    "nft, negative branch alone": (
        partial(algorithms.nft, branches=nft_negative, updates=2),
        NFT._replace(branch="1 - r alone", updates=2),
    ),
    "awm, SD3.5 recipe, twice": (
        partial(algorithms.awm, score=generalised_huber_matching(0.25), clip=1.0, clamp=1.0, updates=2),
        AWM._replace(matching="ghuber", clip=1.0, clamp=1.0, updates=2),
    ),
    "awm, huber, twice": (
        partial(algorithms.awm, score=huber_matching, updates=2),
        AWM._replace(matching="huber", updates=2),
    ),
    "flow_grpo, advantages clamped, two random steps": (
        partial(algorithms.flow_grpo, clamp=0.3, steps_per_sample=2),
        FLOW._replace(clamp=0.3, subset=2),
    ),
    "flow_grpo, every step": (
        partial(algorithms.flow_grpo, trained_steps=all_steps),
        FLOW._replace(trained=until(STEPS)),
    ),
    "awm, twice": (partial(algorithms.awm, updates=2), AWM._replace(updates=2)),
    "flow_grpo_fast toward the reference": (
        partial(algorithms.flow_grpo_fast, beta=0.3),
        TABLE["flow_grpo_fast"]._replace(beta=0.3),
    ),
}


# ---- the script -------------------------------------------------------------------------------------------------------


def draw(seeds: np.ndarray, stream: int, *shape: int) -> Tensor:
    keys = [(stream << 64) + int(seed) for seed in seeds.flatten()]
    rows = [np.random.Generator(np.random.Philox(key=key)).standard_normal(shape, np.float32) for key in keys]
    return torch.from_numpy(np.stack(rows)).double()


def seeds_of(i: int) -> np.ndarray:
    words = [[np.random.SeedSequence((0, i, p, m)).generate_state(1, np.uint64)[0] for m in range(K)] for p in range(G)]
    return np.array(words, dtype=np.uint64) >> np.uint64(1)


def velocity(theta: dict, x: Tensor, t: float) -> Tensor:
    return toy_velocity(theta, x, torch.full((G * K,), t, dtype=F64), {"prompt": PROMPT})


def transition(kind: str, eta: float, x: Tensor, v: Tensor, t: float, t_next: float) -> tuple[Tensor, float]:
    """Mean and std: the ODE's step, plus half the noise's variance times the score; CPS: the two ends mixed anew."""
    d = t - t_next
    if kind == "cps":
        x_0, noise, angle = x - t * v, x + (1 - t) * v, eta * math.pi / 2
        return (1 - t_next) * x_0 + t_next * math.cos(angle) * noise, t_next * math.sin(angle)
    variance = {"flow": eta**2 * t / (1 - (t_next if t == 1 else t)) if kind == "flow" else 0, "dance": eta**2}.get(
        kind, 0.0
    ) * d
    score = -(x + (1 - t) * v) / t
    return x - d * v + variance / 2 * score, math.sqrt(variance)


def dpm2(x: Tensor, v: Tensor, t: float, t_next: float, past: tuple[Tensor, float] | None) -> Tensor:
    """DPM-Solver++(2M) as published, alpha = 1 - t, sigma = t; first order at the ends."""
    if past is None or past[1] == 1 or t_next == 0:
        return x - (t - t_next) * v
    before, now, then = (math.log((1 - s) / s) for s in (past[1], t, t_next))
    h, m = then - now, x - t * v
    guess = m + (m - past[0]) * h / (2 * (now - before))
    return t_next / t * x - (1 - t_next) * (math.exp(-h) - 1) * guess


class State(NamedTuple):
    """One kept step of all samples."""

    j: int
    x: Tensor
    x_next: Tensor
    v_old: Tensor
    t: float
    t_next: float
    std: float
    path: Tensor  # eps - x_0 of a forward state


def walk(row: Row, theta: dict, seeds: np.ndarray, kept: range) -> tuple[Tensor, list[State]]:
    """(x_0, the kept states): of the rollout, or of the forward process for the methods that renoise."""
    x, past, states = draw(np.repeat(seeds[:, :1], K, 1) if row.one_start else seeds, 0, 2), None, []
    for j, (t, t_next) in enumerate(itertools.pairwise(TIMES)):
        v = velocity(theta, x, t)
        kind = "euler" if row.euler_outside and j not in kept else row.rollout
        mean, std = transition(kind, row.eta, x, v, t, t_next)
        if kind == "dpm2":
            mean, past = dpm2(x, v, t, t_next, past), (x - t * v, t)
        x_next = mean + std * draw(seeds, j + 1, 2)
        if j in kept:
            states.append(State(j, x, x_next, v, t, t_next, std, v))
        x = x_next
    if row.loss in ("nft", "awm"):
        states = []
        for j in kept:
            t, noise = TIMES[j], draw(seeds, 2**33 + j, 2)
            x_t = (1 - t) * x + t * noise
            states.append(State(j, x_t, x_t, velocity(theta, x_t, t), t, TIMES[j + 1], 0.0, noise - x))
    return x, states


def advantages(row: Row, rewards: np.ndarray) -> np.ndarray:
    """(R - mean of the group)/(spread + eps) over the samples that have a reward, else 0."""
    out, there = np.zeros(rewards.shape), np.isfinite(rewards)
    for g in range(G):
        r = rewards[g][there[g]]
        spread = rewards[there].std() if row.spread == "batch" else r.std(ddof=1 if row.spread == "unbiased" else 0)
        if len(r) > 1 and r.max() > r.min():
            out[g][there[g]] = (r - r.mean()) / (spread + row.eps)
    return out


def pair_labels(rewards: np.ndarray, seed: int) -> np.ndarray:
    """Disjoint pairs in the order of uniform numbers: 1 for the better, 0 for the worse, nan for who is left over."""
    order = torch.rand((G, K), generator=torch.Generator().manual_seed(seed)).double().numpy()
    labels = np.full((G, K), np.nan)
    for g in range(G):
        there = [
            m for m in np.argsort(np.where(np.isfinite(rewards[g]), order[g], np.inf)) if np.isfinite(rewards[g, m])
        ]
        for a, b in zip(there[::2], there[1::2]):
            labels[g, a], labels[g, b] = (rewards[g, a] > rewards[g, b]), (rewards[g, b] > rewards[g, a])
    return labels


def direction_of(labels: np.ndarray, x_0: Tensor) -> Tensor:
    """G of every sample's prompt: the covariance of label and sample, of RMS 1."""
    out = np.zeros((G, K, 2))
    for g, x in enumerate(x_0.numpy().reshape(G, K, 2)):
        there = np.isfinite(labels[g])
        r = labels[g][there]
        c = ((r - r.mean())[:, None] * (x[there] - x[there].mean(0))).mean(0)
        out[g] = c / np.sqrt((c**2).mean())
    return torch.from_numpy(out.reshape(G * K, 2))


class Told(NamedTuple):
    """What the samples are told: advantage, direction, whether they are trained and with which weight."""

    a: Tensor
    direction: Tensor
    there: Tensor
    weight: Tensor


def told(row: Row, parts: np.ndarray, x_0: Tensor, seeds: np.ndarray) -> Told:
    total = parts.sum(2)  # nan where any is missing
    if row.summed:
        complete = np.where(np.isfinite(total)[..., None], parts, np.nan)
        a = sum(advantages(row, complete[..., j]) for j in range(parts.shape[2]))
    else:
        a = advantages(row, total)
    weight = np.ones((G, K))
    if row.best_of:
        weight[:] = 0
        for g in range(G):
            there = [m for m in np.argsort(a[g], kind="stable") if np.isfinite(total[g, m])]
            weight[g, there[: row.best_of // 2] + there[-(row.best_of // 2) :]] = K / row.best_of
    labels = pair_labels(total, int(seeds[0, 0])) if row.paired else total
    a = np.clip(a, -row.clamp, row.clamp)
    a = {"positive": np.maximum(a, 0), "negative": np.minimum(a, 0)}.get(row.branch, a)
    direction = direction_of(labels, x_0) if row.loss == "art" else torch.zeros(G * K, 2, dtype=F64)
    rows = [torch.from_numpy(np.ascontiguousarray(n)).flatten() for n in (a, np.isfinite(labels), weight)]
    return Told(rows[0], direction, rows[1], rows[2])


def policy_states(row: Row, s: State, v: Tensor, v_ref: Tensor) -> dict[str, Tensor]:
    """Of one step: log-ratio from the injected noise z, KL of the step to the one taken, KL to the reference's."""
    mean, std = transition(row.rollout, row.eta, s.x, v, s.t, s.t_next)
    old, ref = (transition(row.rollout, row.eta, s.x, u, s.t, s.t_next)[0] for u in (s.v_old, v_ref))
    z, moved, d = (s.x_next - old) / std, mean - old, s.t - s.t_next
    drift, score = (moved**2).mean(1) / (2 * std**2), (z * moved).mean(1)
    log_ratio = score / std - drift
    clamped = std**2 / (row.eta**2 * s.t * d / (1 - min(s.t, 0.99)))
    factor = {"exact": 1.0, "without delta": d, "clamped sigma": clamped}[row.kl]
    return {
        "log_ratio": log_ratio * 2 * std**2 if row.surrogate else log_ratio,
        "score": score,
        "drift": drift,
        "kl": factor * drift,
        "pull": factor * ((mean - ref) ** 2).mean(1) / (2 * std**2),
        "std": torch.full_like(drift, std),
        "delta": torch.full_like(drift, d),
    }


def matching_states(row: Row, s: State, v: Tensor, v_ref: Tensor, a: Tensor) -> dict[str, Tensor]:
    """Of one forward state: AWM's log-ratio or DiffusionNFT's loss, and the pull toward the reference."""
    pull = ((v - v_ref) ** 2).mean(1)
    if row.loss == "awm":
        error, before = (((u - s.path) ** 2).mean(1) for u in (v, s.v_old))
        score = {
            "plain": lambda m: -m,
            "huber": lambda m: -s.t * ((m + 1e-10).sqrt() - 1e-5),
            "ghuber": lambda m: -s.t / 0.25 * ((m + 1e-10) ** 0.25 - 1e-10**0.25),
        }[row.matching]
        return {"log_ratio": score(error) - score(before), "pull": pull}
    r = (a / 5).clamp(-1, 1) / 2 + 0.5
    plus, minus = (s.t * (s.path - s.v_old - sign * row.clip * (v - s.v_old)) for sign in (1, -1))
    size = [(e**2).mean(1) / e.detach().abs().mean(1).clamp_min(1e-5) for e in (plus, minus)]
    shares = {"r alone": (r, 0 * r), "1 - r alone": (0 * r, 1 - r)}.get(row.branch, (r, 1 - r))
    return {"loss": 5 * (shares[0] * size[0] + shares[1] * size[1]) / row.clip, "pull": pull}


def art_states(row: Row, s: State, v: Tensor, direction: Tensor) -> dict[str, Tensor]:
    """Of one step: |d - h|^2 with h = -G, and whether the KL proxy lets it in; Flow-SDE of eta .7 as reference kernel."""
    drift, h, d = v - s.v_old, -direction, s.t - s.t_next
    gain = (1 - s.t_next) / 0.49 if s.t == 1 else (1 - s.t) / s.t * (1 / 0.7 + 0.35) ** 2
    outward = (drift * (h - drift)).sum(1) > 0
    far = d / 2 * gain * (drift**2).mean(1) >= row.clip
    return {"loss": ((drift - h) ** 2).mean(1), "keep": ~(far & outward), "pull": 0 * drift[:, 0]}


def loss_of(row: Row, flat: dict[str, Tensor], a: Tensor) -> Tensor:
    """Per state, with the weight of the method; dropped states are 0."""
    if row.loss == "nft":
        return flat["loss"]
    if row.loss == "art":
        return flat["loss"] * flat["keep"]
    exponent, weight = flat["log_ratio"], 1.0
    if row.loss == "guard":  # (log-ratio + its bias) std = mean of z dmu
        exponent, weight = flat["score"], 1 / flat["delta"]
    elif row.loss == "guard of the batch":
        exponent, weight = (exponent + flat["drift"].mean()) * flat["std"], 1 / flat["delta"]
    ratio = exponent.exp()
    if row.loss == "dppo":
        pushed = ((ratio > 1) & (a > 0)) | ((ratio < 1) & (a < 0))
        return -a * ratio * ~((flat["kl"] >= row.clip) & pushed)
    return weight * torch.maximum(-a * ratio, -a * ratio.clamp(1 - row.clip, 1 + row.clip))


def update_of(row: Row, theta: dict, first: dict, states: list[State], t: Told, seeds: np.ndarray, u: int):
    """(loss, mean of every other number) of the samples of one window: every prompt's, dealt in turn."""
    mine = (torch.arange(G * K) % K + torch.arange(G * K) // K) % row.updates == u
    subset = np.sort(np.argsort(draw(seeds, 2**32, len(states)).numpy(), axis=1)[:, : row.subset], axis=1)
    parts, a, there, weight = [], [], [], []
    for position, s in enumerate(states):
        chosen = mine & torch.from_numpy((subset == position).any(1))
        v, v_ref = velocity(theta, s.x, s.t), velocity(first, s.x, s.t).detach()
        if row.loss == "art":
            found = art_states(row, s, v, t.direction)
        elif row.loss in ("nft", "awm"):
            found = matching_states(row, s, v, v_ref, t.a)
        else:
            found = policy_states(row, s, v, v_ref)
        parts.append({name: value[chosen] for name, value in found.items()})
        for column, value in ((a, t.a), (there, t.there), (weight, t.weight)):
            column.append(value[chosen])
    flat = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    a, there, weight = torch.cat(a), torch.cat(there), torch.cat(weight)
    loss = (loss_of(row, flat, a) + row.beta * flat["pull"]) * there * weight
    return loss.sum() / len(loss), {name: float(value.detach().double().mean()) for name, value in flat.items()}


def reference_run(row: Row, parts_of: Callable, *, iterations: int = 2, lr: float = 0.05):
    """(params, {what was seen} of every optimizer step) after plain gradient descent."""
    theta = {"mean": torch.zeros(G, 2, dtype=F64), "log_std": torch.tensor(math.log(0.5), dtype=F64)}
    first, old, steps, log = values_of(theta), values_of(theta), 0, []
    for i in range(iterations):
        seeds = seeds_of(i)
        with torch.no_grad():
            x_0, states = walk(row, old, seeds, row.trained(i, int(seeds[0, 0])))
        parts = parts_of(x_0, [PROMPTS[p] for p in PROMPT.tolist()]).numpy().reshape(G, K, -1)
        t = told(row, parts, x_0, seeds)
        for u in range(row.updates):
            theta = {name: p.requires_grad_() for name, p in theta.items()}
            loss, seen = update_of(row, theta, first, states, t, seeds, u)
            grads = torch.autograd.grad(loss, list(theta.values()))
            theta = {n: (p - lr * g).detach() for (n, p), g in zip(theta.items(), grads)}
            steps += 1
            log.append(seen | {"reward": float(np.nanmean(parts.sum(2))), "loss": float(loss.detach())})
        decay = 0.0 if row.decay is None else row.decay(steps)
        old = {n: decay * old[n] + (1 - decay) * theta[n] for n in theta}
    return theta, log


# ---- the loop against the script --------------------------------------------------------------------------------------


def picky(points: Tensor, prompts: list[str]) -> Tensor:
    """The compass, but no reward for the points far in the east."""
    return torch.where(points[:, 0] > 0.3, math.nan, toward_compass(points, prompts))


def quadrant(points: Tensor, prompts: list[str]) -> Tensor:
    """A second reward, of another scale."""
    return 30 * torch.where(points[:, 1] < -0.8, math.nan, points[:, 0] * points[:, 1])


def descent(algorithm, reward=picky, *, iterations: int = 2, lr: float = 0.05, **options):
    model = toy_model(dtype=F64)
    optimizer = torch.optim.SGD(list(model.params.values()), lr=lr)
    options = {"group_size": K, "steps": STEPS, "grad_clip": None, **options}
    return toy_run(
        model=model, algorithm=algorithm, reward=reward, optimizer=optimizer, iterations=iterations, **options
    )


PULL = {"nft": "anchor", "awm": "kl_velocity"}
LR = {"dppo": 1.0}
"""Where a step of .05 would leave every state inside the radius."""


def compared(
    algorithm, row: Row, other: Row | None = None, *, several: bool = False
) -> tuple[list[dict], float, float]:
    """(rows of the loop, largest gap of params after two iterations, largest gap of logged numbers) to the script."""
    lr = LR.get(row.loss, 0.05)
    reward = weighted_sum({"compass": picky, "quadrant": quadrant}) if several else picky
    model, rows = descent(algorithm, reward, lr=lr)
    functions, row = (picky, quadrant) if several else (picky,), other or row
    theta, log = reference_run(row, lambda x, names: torch.stack([f(x, names) for f in functions], 1), lr=lr)
    gap = max(float((p.detach() - theta[name]).abs().max()) for name, p in model.params.items())
    names = {"loss": "loss", "kl": "kl", "pull": PULL.get(row.loss, "kl_reference")}
    logged = [0.0]
    for step, seen in enumerate(log):
        i, u = divmod(step, row.updates)
        logged.append(abs(rows[i]["reward/mean"] - seen["reward"]))
        for name, ours in names.items():
            if (found := rows[i].get(f"{ours}/update_{u + 1}")) is not None:
                logged.append(abs(found - seen[name]) / max(abs(seen[name]), 1e-3))
    return rows, gap, max(logged)


def assert_same_run(algorithm, row: Row, *, several: bool = False) -> None:
    """Params after two iterations, and every optimizer step's loss, KL and pull, equal to 1e-9."""
    rows, gap, logged = compared(algorithm, row, several=several)
    assert gap < 1e-9
    assert logged < 1e-9
    assert 0 < rows[0]["reward/missing"] < 0.6
    assert rows[0]["grad_norm"] > 1e-3
    assert (f"{PULL.get(row.loss, 'kl_reference')}" in rows[0]) == (row.beta > 0)
    assert ("kl" in rows[0]) == (row.loss == "dppo")
    removed = "masked_fraction" if row.loss in ("dppo", "art") else "clip_fraction"
    assert rows[0].get(f"{removed}/update_1", 0.0) == 0  # on-policy nothing is clipped or dropped
    if row.updates > 1 and row.clip < 1 and row.loss != "nft":
        assert 0 < rows[0][f"{removed}/update_2"] < 1  # what was compared has both kinds of states


@pytest.mark.parametrize("name", TABLE)
def test_two_iterations_of_the_loop_are_the_table_s_script(name):
    # Each pull toward the reference has its own name and its size is logged. https://github.com/yifan123/flow_grpo/issues/110
    # A ratio regularised for one kernel with another's log-prob collapsed. https://github.com/yifan123/flow_grpo/issues/192
    assert_same_run(getattr(algorithms, name)(), TABLE[name])


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_the_factories_are_the_script_with_another_row(name):
    factory, row = VARIANTS[name]
    assert_same_run(factory(), row)


@pytest.mark.parametrize("name", ["mix_grpo", "dance_grpo", "flow_grpo"])
def test_of_several_rewards_the_table_s_signal_is_used(name):
    assert_same_run(getattr(algorithms, name)(), TABLE[name], several=True)


def test_control_the_comparison_sees_one_wrong_entry_of_a_row():
    """Each entry of the table matters to the script: what the equality above would not notice is no test of it."""
    wrong = {
        "flow_grpo": {"eta": 0.69, "beta": 0.05, "clip": 2e-4, "spread": "group", "kl": "without delta", "updates": 1},
        "dance_grpo": {"one_start": False, "spread": "unbiased", "eps": 1e-3, "subset": 3},
        "mix_grpo": {"euler_outside": False, "trained": sliding(3, 1, 25)},
        "grpo_guard": {"loss": "guard of the batch", "clip": 4e-6},
        "flow_dppo": {"clip": 1e-4, "kl": "clamped sigma", "subset": 4, "trained": until(STEPS)},
        "nft": {"rollout": "euler", "decay": lambda i: 0.5, "beta": 1e-2, "branch": "positive", "clip": 0.5},
        "awm": {"matching": "huber", "trained": until(STEPS), "beta": 1e-2},
        "art": {"clip": 1e-3, "paired": True},
    }
    for name, entries in wrong.items():
        for entry, value in entries.items():
            _, gap, logged = compared(getattr(algorithms, name)(), TABLE[name], TABLE[name]._replace(**{entry: value}))
            assert max(gap, logged) > 1e-8, (name, entry)


# ---- the reward rises -------------------------------------------------------------------------------------------------


def learned(algorithm) -> tuple[dict[str, Tensor], float]:
    """(params after eight iterations with Adam at .06, how much the reward rose at held-out seeds)."""
    model = toy_model()
    before = toy_reward(model)
    toy_run(model=model, algorithm=algorithm, steps=6, iterations=8)
    return values_of(model.params), toy_reward(model) - before


@cache
def learned_by(name: str) -> tuple[dict[str, Tensor], float]:
    return learned(getattr(algorithms, name)())


@pytest.mark.parametrize("name", TABLE)
def test_eight_iterations_raise_the_toy_s_reward(name):
    """From -1.37 (its best mean with the initial spread: -.5)."""
    assert learned_by(name)[1] > 0.3


def test_control_the_wrong_sign_of_the_advantage_lowers_the_reward():
    for factory in (algorithms.flow_grpo, algorithms.nft, algorithms.awm, algorithms.flow_dppo):
        algorithm = factory()

        def turned(batch, credit=algorithm.credit):
            told_ = credit(batch)
            wrong = {"advantage": -told_["advantage"]}
            return told_ | wrong | ({"optimality": 1 - told_["optimality"]} if "optimality" in told_ else {})

        assert learned(algorithm._replace(credit=turned))[1] < -0.3


# ---- constants --------------------------------------------------------------------------------------------------------


def defaults(function) -> dict:
    return {n: p.default for n, p in inspect.signature(function).parameters.items() if p.default is not p.empty}


POLICY = {"clamp": 5.0, "updates": 2}
CONSTANTS = {
    "flow_grpo": POLICY
    | {"kernel": flow_sde_step, "clip": 1e-4, "beta": 0.04, "spread": batch_std, "trained_steps": all_but_last},
    "flow_grpo_fast": POLICY | {"kernel": cps_step, "window": 3, "clip": 1e-5, "beta": 0.0, "spread": batch_std},
    "mix_grpo": {"kernel": flow_sde_step, "window": 4, "stride": 1, "every": 25, "clip": 1e-4, "spread": group_std},
    "dance_grpo": {
        "kernel": dance_sde_step,
        "clip": 1e-4,
        "spread": group_std,
        "eps": 1e-8,
        "clamp": 5.0,
        "best_of": None,
        "noise": noise_of_the_prompt,
        "trained_steps": all_but_last,
        "steps_per_sample": three_fifths,
    },
    "grpo_guard": {"kernel": flow_sde_step, "clip": 2e-6, "spread": group_std, "clamp": 5.0},
    "cps_grpo": {"kernel": cps_step},
    "flow_dppo": POLICY
    | {
        "kernel": flow_sde_step,
        "radius": 1e-5,
        "spread": batch_std,
        "trained_steps": first_half,
        "steps_per_sample": 3,
    },
    "nft": {
        "beta": 1.0,
        "decay": slow_decay,
        "weight": inverse_abs_error,
        "branches": nft_loss,
        "loss_factor": 5.0,
        "anchor": 1e-4,
        "spread": batch_std,
        "clip": 5.0,
        "step": dpm2_step,
        "updates": 1,
    },
    "awm": {
        "clip": 1e-4,
        "score": plain_matching,
        "spread": batch_std,
        "clamp": 5.0,
        "step": euler_step,
        "trained_steps": noisiest_nine_tenths,
    },
    "art": {"scale": 1.0, "radius": 1e-5, "updates": 2, "step": euler_step, "reference_kernel": flow_sde_step},
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_defaults_are_the_table_s(name):
    # Two different betas in one configuration: each of these names is there once. https://github.com/nvidia-cosmos/cosmos-rl/pull/581
    found = defaults(getattr(algorithms, name))
    assert {key: found[key] for key in CONSTANTS[name]} == CONSTANTS[name]


def test_etas_and_eps_are_the_published_ones():
    assert [defaults(step)["eta"] for step in (flow_sde_step, dance_sde_step, cps_step)] == [0.7, 0.3, 0.8]
    assert defaults(algorithms.flow_dppo_as_published)["eta"] == 0.7
    assert defaults(advantages_of_sum)["eps"] == defaults(sum_of_advantages)["eps"] == 1e-4
    assert defaults(generalised_huber_matching)["power"] == 0.25


def test_a_typo_or_a_number_out_of_range_is_refused_by_every_factory():
    for name in TABLE:
        factory = getattr(algorithms, name)
        with pytest.raises(TypeError, match="clamped"):
            factory(clamped=1.0)
        with refuses("updates", 0):
            factory(updates=0)
    for name in ("flow_grpo", "flow_grpo_fast", "mix_grpo", "dance_grpo", "grpo_guard", "cps_grpo", "awm", "nft"):
        with refuses("clip", "-1"):
            getattr(algorithms, name)(clip=-1.0)
    for name, option in (("flow_dppo", "radius"), ("flow_grpo", "beta"), ("nft", "anchor"), ("awm", "beta")):
        with refuses(option, "-1"):
            getattr(algorithms, name)(**{option: -1.0})


@given(st.integers(0, 3000))
def test_decays_are_the_published_ramps(i):
    assert slow_decay(i) == pytest.approx(min(0.001 * i, 0.5), abs=1e-15)
    assert ocr_decay(i) == pytest.approx(0.0 if i < 75 else min(0.0075 * (i - 75), 0.999), abs=1e-15)


def test_decays_by_hand():
    assert (ocr_decay(74), ocr_decay(75), ocr_decay(100), ocr_decay(1000)) == (0.0, 0.0, 0.1875, 0.999)
    assert (slow_decay(0), slow_decay(200), slow_decay(499), slow_decay(10**6)) == (0.0, 0.2, 0.499, 0.5)


@given(st.floats(0, 1), st.integers(0, 50))
def test_a_lagging_behaviour_moves_by_one_minus_the_decay_of_the_step(decay, i):
    old, new, asked = {"a": normal(3), "b": normal(2, 2)}, {"a": normal(3, seed=1), "b": normal(2, 2, seed=2)}, []
    before = values_of(old) | {f"new {n}": p.clone() for n, p in new.items()}
    found = lagging(lambda step: asked.append(step) or decay)(old, new, i)
    assert asked == [i]
    for name in old:
        torch.testing.assert_close(found[name], decay * old[name] + (1 - decay) * new[name], rtol=1e-12, atol=1e-12)
        assert torch.equal(old[name], before[name])
        assert torch.equal(new[name], before[f"new {name}"])
        assert found[name].data_ptr() not in (old[name].data_ptr(), new[name].data_ptr())


def test_the_behaviour_lags_by_the_closed_form_under_a_steady_drift():
    """Delta per step: after the update the old params lag by decay Delta/(1 - decay)."""
    follow, old = lagging(lambda i: 0.9), {"a": torch.zeros(1, dtype=F64)}
    for i in range(1, 400):
        old = follow(old, {"a": torch.full((1,), float(i), dtype=F64)}, i)
    assert float(399 - old["a"]) == pytest.approx(0.9 / 0.1, rel=1e-9)


def test_who_needs_a_reference_says_so():
    needing = {name for name in TABLE if getattr(algorithms, name)().needs_reference}
    assert needing == {name for name, row in TABLE.items() if row.beta > 0}
    assert not algorithms.flow_grpo(beta=0.0).needs_reference
    assert not algorithms.nft(anchor=0.0).needs_reference
    assert not algorithms.awm(beta=0.0).needs_reference
    assert algorithms.flow_grpo_fast(beta=0.1).needs_reference
    on_policy = {name for name in TABLE if getattr(algorithms, name)().behaviour is live}
    assert on_policy == {name for name, row in TABLE.items() if row.decay is None}


# ---- same bits, resumed runs ------------------------------------------------------------------------------------------

RESUMED = {
    **{name: getattr(algorithms, name) for name in TABLE},
    "mix_grpo, a window that moves": partial(algorithms.mix_grpo, window=2, every=1),
    "nft, an average from the start": partial(algorithms.nft, decay=lambda i: 0.6),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(name):
    """Three iterations against one, and the other two on a fresh model: hence also the same seeds, the same bits."""
    algorithm, held, options = RESUMED[name](), {}, {"steps": 6, "prompts_per_iteration": 2}
    straight, rows = toy_run(algorithm=algorithm, iterations=3, **options)

    def remembered(old, new, i):
        held["behaviour"] = algorithm.behaviour(old, new, i)
        return held["behaviour"]

    model = toy_model()
    reference, optimizer = values_of(model.params), adam(model)
    replaced = algorithm if algorithm.behaviour is live else algorithm._replace(behaviour=remembered)
    first = rows_of(start(model, replaced, optimizer=optimizer, **options), 1)

    fresh = toy_model(std=0.9)
    with torch.no_grad():
        for key, p in fresh.params.items():
            p.copy_(model.params[key])
    later = adam(fresh, lr=1.0)
    later.load_state_dict(optimizer.state_dict())
    resumed = {"start": 1, "behaviour": None if algorithm.behaviour is live else values_of(held["behaviour"])}
    resumed["reference"] = reference if algorithm.needs_reference else None
    rest = rows_of(start(fresh, algorithm, optimizer=later, **options, **resumed), 2)
    assert timeless(first + rest) == timeless(rows)
    assert same(values_of(fresh.params), values_of(straight.params))


def test_the_window_of_a_resumed_mix_grpo_lies_where_it_would_have():
    # Which window was trained is told by the metrics' names. https://github.com/yifan123/flow_grpo/issues/150
    algorithm = algorithms.mix_grpo(window=2, every=2)
    _, rows = toy_run(algorithm=algorithm, steps=6, iterations=6)
    _, resumed = toy_run(algorithm=algorithm, steps=6, iterations=1, start=5)
    times = [sorted(n for n in row if n.startswith("std/t=") and "update" not in n) for row in rows]
    assert times[:2] == [["std/t=0.833", "std/t=1.000"]] * 2
    assert times[2:4] == [["std/t=0.667", "std/t=0.833"]] * 2
    assert times[5] == ["std/t=0.500", "std/t=0.667"]
    assert sorted(n for n in resumed[0] if n.startswith("std/t=") and "update" not in n) == times[5]


def test_control_a_forgotten_reference_or_behaviour_changes_the_rest():
    def run(algorithm, **options):
        return toy_run(algorithm=algorithm, iterations=2, steps=6, **options)[0].params

    other = {name: p + 0.5 for name, p in values_of(toy_model().params).items()}
    pulled = algorithms.flow_grpo(beta=1.0)
    assert not same(run(pulled), run(pulled, reference=other))
    assert not same(run(algorithms.nft()), run(algorithms.nft(), behaviour=other))


# ---- pieces -----------------------------------------------------------------------------------------------------------

flow_window = collect_window(kernel=flow_sde_step, window=sliding_window_of(3, stride=1, every=1))
SWAPS = {
    "flow_grpo with group std": lambda a: a.flow_grpo()._replace(
        credit=advantage_credit(advantages=advantages_of_sum(spread=group_std))
    ),
    "flow_grpo with an unbiased spread and best of 4": lambda a: a.flow_grpo()._replace(
        credit=advantage_credit(advantages=sum_of_advantages(spread=unbiased_group_std), best_of=4)
    ),
    "flow_grpo in a window": lambda a: a.flow_grpo()._replace(collect=flow_window),
    "flow_grpo of old params": lambda a: a.flow_grpo()._replace(behaviour=lagging(lambda i: 0.5)),
    "flow_grpo with dppo's objective": lambda a: a.flow_grpo()._replace(objective=a.flow_dppo().objective),
    "mix_grpo toward the reference": lambda a: a.mix_grpo()._replace(
        objective=policy_gradient(kernel=flow_sde_step, loss=ppo(clip=1e-3), beta=0.1, kl=kl_without_delta),
        needs_reference=True,
    ),
    "dance_grpo on own noise": lambda a: a.dance_grpo()._replace(
        collect=collect_rollout(step=dance_sde_step, trained_steps=all_but_last)
    ),
    "grpo_guard with one update": lambda a: a.grpo_guard()._replace(updates=1),
    "nft on-policy": lambda a: a.nft()._replace(behaviour=live),
    "nft by Euler": lambda a: a.nft()._replace(collect=collect_renoised(step=euler_step, trained_steps=first_half)),
    "nft by a sharper optimality": lambda a: a.nft()._replace(
        credit=optimality_credit(advantages=advantages_of_sum(spread=group_std), clip=1.0)
    ),
    "awm on the rollout's states": lambda a: a.awm()._replace(collect=collect_rollout(trained_steps=all_but_last)),
    "awm of an average": lambda a: a.awm()._replace(behaviour=lambda old, new, i: ema(old, new, decay=0.3)),
    "art on renoised states": lambda a: a.art()._replace(collect=collect_renoised(trained_steps=all_steps)),
    "nft with art's direction and objective": lambda a: a.nft()._replace(
        credit=lambda batch: a.art().credit(batch) | a.nft().credit(batch), objective=a.art().objective
    ),
}


@pytest.mark.parametrize("name", SWAPS)
def test_a_swapped_piece_is_used_and_learns(name):
    swapped = SWAPS[name](algorithms)
    params, gain = learned(swapped)
    assert gain > 0.3
    assert not same(params, learned_by(name.split(" ")[0])[0])


# ---- what is logged ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.floats(1e-6, 0.3), seeds)
def test_the_clip_fraction_counts_the_states_whose_gradient_the_clip_removes(n, clip, seed):
    # It counted the wrong side; it is 0 at ratio 1. https://github.com/huggingface/trl/issues/3144
    advantages_, log_ratio = normal(n, seed=seed), 0.2 * normal(n, seed=seed + 1)
    log_prob = log_ratio.clone().requires_grad_()
    rest = {name: torch.zeros(n, 1, dtype=F64) for name in ("mean", "mean_old")}
    rest |= {name: torch.ones(n, dtype=F64) for name in ("std", "t", "delta")}
    zero = torch.zeros(n, dtype=F64)
    values, _, metrics = ppo(clip=clip)(Transition(advantages_, log_prob, zero, **rest))
    (grad,) = torch.autograd.grad(values.sum(), log_prob)
    assert metrics["clip_fraction"] == pytest.approx(float((grad == 0).double().mean()))
    at_one = Transition(advantages_, zero, zero, **rest)
    assert ppo(clip=clip)(at_one)[2]["clip_fraction"] == 0


@pytest.mark.parametrize("micro_batch", [None, 1, 5])
def test_mean_least_and_greatest_optimality_are_metrics_whatever_the_micro_batch(micro_batch):
    # Optimality stayed within .4 and .6 and nobody knew why. https://github.com/NVlabs/DiffusionNFT/issues/50
    told_ = []
    plain = algorithms.nft(updates=2)

    def credit(batch):
        told_.append(plain.credit(batch))
        return told_[-1]

    _, (row,) = descent(plain._replace(credit=credit), iterations=1, micro_batch=micro_batch)
    r, there = told_[0]["optimality"], told_[0]["has_reward"]
    mine = [((torch.arange(G * K) % K + torch.arange(G * K) // K) % 2 == u) & there for u in (0, 1)]
    for u in (0, 1):
        assert row[f"optimality/min/update_{u + 1}"] == pytest.approx(float(r[mine[u]].min()))
        assert row[f"optimality/max/update_{u + 1}"] == pytest.approx(float(r[mine[u]].max()))
    assert row["optimality/min"] == pytest.approx(float(r[there].min()))
    assert row["optimality/max"] == pytest.approx(float(r[there].max()))
    assert row["optimality/min"] < 0.45 < 0.55 < row["optimality/max"]
    assert row["optimality/mean"] == pytest.approx(sum(float(r[m].mean()) for m in mine) / 2)


def test_per_step_output_gradients_are_flow_grpo_s_closed_form():
    """At ratio 1, t < 1: dL/dv = A z (1 + eta^2/2) D/(dim s), s the step's std, z the injected noise."""
    # Samples turned to noise and nothing said why: std, ratio, gradient per step. https://github.com/XueZeyue/DanceGRPO/issues/79
    _, (row,) = descent(algorithms.flow_grpo(beta=0.0, updates=1), iterations=1)
    seeds_ = seeds_of(0)
    x_0, states = walk(FLOW, toy_model(dtype=F64).params, seeds_, range(STEPS - 1))
    a = torch.from_numpy(
        advantages(FLOW, picky(x_0, [PROMPTS[p] for p in PROMPT]).detach().numpy().reshape(G, K))
    ).flatten()
    for s in states:
        assert row[f"std/t={s.t:.3f}"] == pytest.approx(s.std)
        assert row[f"ratio_deviation/t={s.t:.3f}"] < 1e-12
        if s.t < 1:
            z, d = draw(seeds_, s.j + 1, 2), s.t - s.t_next
            grad = a[:, None] * z * (1 + 0.49 / 2) * d / (2 * s.std)
            assert row[f"output_grad/t={s.t:.3f}"] == pytest.approx(float((grad**2).mean(1).sqrt().mean()), rel=1e-6)


# ---- chunks, names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flow_grpo", "mix_grpo", "dance_grpo", "grpo_guard", "flow_dppo", "nft", "awm"])
def test_micro_batches_and_rollout_chunks_change_nothing_but_rounding(name):
    # Ratio .9990 before any update where rollout and training differ in size. https://github.com/XueZeyue/DanceGRPO/issues/87
    algorithm = getattr(algorithms, name)()
    whole, rows = descent(algorithm)
    parts, rows_of_parts = descent(algorithm, micro_batch=3, rollout_chunk=5)
    for key, p in whole.params.items():
        torch.testing.assert_close(p, parts.params[key], rtol=1e-9, atol=1e-9)
    for metric in ("loss", "ratio_deviation", "kl_reference", "kl", "clip_fraction", "masked_fraction"):
        if metric in rows[0]:
            assert rows[-1][metric] == pytest.approx(rows_of_parts[-1][metric], rel=1e-7, abs=1e-9)


def test_control_the_published_guard_does_depend_on_the_micro_batch():
    whole, parts = (descent(algorithms.grpo_guard_as_published(), micro_batch=size)[0] for size in (None, 3))
    assert not torch.allclose(whole.params["mean"], parts.params["mean"], rtol=1e-6, atol=1e-9)


def test_no_two_numbers_of_a_piece_are_variants_of_one_name():
    # Two different betas in one configuration. https://github.com/nvidia-cosmos/cosmos-rl/pull/581
    seen = 0
    for module in (rollouts, credits, objectives, policy_gradients):
        for name, function in vars(module).items():
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                numbers = [n for n, default in defaults(function).items() if isinstance(default, float | int)]
                assert [(a, b) for a in numbers for b in numbers if a != b and a in b.split("_")] == [], name
                seen += 1
    assert seen > 50
