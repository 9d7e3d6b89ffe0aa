"""Policy gradients on stochastic steps, against plain loops over torch.distributions.Normal and closed-form gradients."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import F64, close, normal, refuses
from strategies import seeds, time_pairs
from torch import distributions
from torch.distributions import kl_divergence

from diffrl.loop import update
from diffrl.losses import clipped_ratio, masked_mean
from diffrl.policy_gradients import (
    Transition,
    clip_fraction,
    cps_surrogate,
    divergence_masked,
    exact_kl,
    guarded_ppo,
    guarded_ppo_as_published,
    kl_clamped_sigma,
    kl_without_delta,
    policy_gradient,
    ppo,
)
from diffrl.sampling import (
    chunked,
    cps_step,
    dance_sde_step,
    euler_step,
    flow_sde_step,
    latent_sum,
    rollout,
    seeded_noise,
    time_grid,
    transition_log_prob,
)
from diffrl.types import Trajectory, Window
from diffrl.windows import select_rows

NAN, INF = math.nan, math.inf
Normal = partial(distributions.Normal, validate_args=False)
KERNELS = {"flow": flow_sde_step, "dance": dance_sde_step, "cps": cps_step}
ETA = {"flow": 0.7, "dance": 0.3, "cps": 0.8}
THETA = torch.tensor([0.9, 0.2, -0.3, 0.4], dtype=F64)
MOVED = THETA + torch.tensor([0.03, -0.05, 0.06, 0.04], dtype=F64)
REFERENCE = THETA - torch.tensor([0.02, 0.04, -0.03, 0.01], dtype=F64)
CLIP, RADIUS = 0.01, 2e-4
LOSSES = {
    "ppo": ppo(clip=CLIP),
    "guard": guarded_ppo(clip=CLIP / 3),
    "as published": guarded_ppo_as_published(clip=CLIP / 3),
    "divergence": divergence_masked(radius=RADIUS),
}
PER_SAMPLE = ("ppo", "guard", "divergence")


# ---- a velocity that is linear in its parameters, and windows of its rollouts -----------------------------------------


def linear(params, x_t, t, cond):
    """v = Phi theta, Phi = (x, sin 3x, t, c): any rank of latents."""
    a, ones = params["theta"], [1] * (x_t.ndim - 1)
    t, c = t.reshape(-1, *ones), cond["c"].reshape(-1, *ones)
    return a[0] * x_t + a[1] * torch.sin(3 * x_t) + (a[2] * t + a[3] * c)


def window_for(kernel, *, b=6, shape=(3,), steps=4, keep=(0, 1, 2), reference=None, theta=THETA, **credit) -> Window:
    """A rollout of b samples under theta, its steps `keep`, with advantages of both signs."""
    cond = {"c": normal(b, seed=6)}
    seeds_ = torch.arange(b) * 3 + 1
    times = time_grid(steps, shift=3.0, dtype=F64)
    tr = rollout(linear, {"theta": theta}, cond, times, seeds=seeds_, shape=shape, step=kernel, keep=keep)
    reference = None if reference is None else {"theta": reference}
    credit = {"advantage": normal(b, seed=5), **credit}
    return Window(tr, torch.zeros(b, dtype=F64), cond, credit, reference)


def outcome(objective, window: Window, theta: torch.Tensor = MOVED):
    """(masked mean, its gradient, metrics) at theta."""
    theta = theta.clone().requires_grad_()
    loss, keep, metrics = objective(linear, {"theta": theta}, window)
    value = masked_mean(loss, keep)
    return value.detach(), torch.autograd.grad(value, theta)[0], metrics


def v_at(params, x_t, t, cond):
    """A velocity that is its own parameter: gradients of the loss in v."""
    return params["v"]


def transitions_of(objective_options: dict, velocity, params, window: Window) -> Transition:
    """What policy_gradient shows its loss."""
    seen = []

    def loss(q):
        seen.append(q)
        return q.log_prob, torch.ones_like(q.log_prob), {}

    policy_gradient(loss=loss, **objective_options)(velocity, params, window)
    return seen[0]


# ---- oracles: one state at a time -------------------------------------------------------------------------------------


def step_by_hand(name: str, x, v, t: float, t_next: float):
    """(mean, std) from the SDE's form: Euler plus (sigma^2/2) score D; CPS from its coefficients."""
    d, eta = t - t_next, ETA[name]
    if name == "cps":
        x_0, noise = x - t * v, x + (1 - t) * v
        angle = eta * math.pi / 2
        return (1 - t_next) * x_0 + t_next * math.cos(angle) * noise, t_next * math.sin(angle)
    sigma2 = eta**2 if name == "dance" else eta**2 * t / (1 - (t_next if t == 1 else t))
    score = -(x + (1 - t) * v) / t
    return x - d * v + sigma2 / 2 * score * d, math.sqrt(sigma2 * d)


def states_by_hand(name: str, window: Window, theta: torch.Tensor) -> list[SimpleNamespace]:
    """Every state of the window: now, as it was taken, and under the reference, as Normals."""
    tr, found = window.trajectory, []
    for i in range(len(tr.x_0)):
        for j in range(len(tr.t)):
            x, t, t_next = tr.x_t[i, j], float(tr.t[j]), float(tr.t_next[j])
            features = [x, torch.sin(3 * x), torch.full_like(x, t), window.cond["c"][i].expand_as(x)]
            v = sum(a * f for a, f in zip(theta, features))
            v_old = sum(float(a) * f for a, f in zip(THETA, features))
            (mean, std), (mean_old, _) = (step_by_hand(name, x, u, t, t_next) for u in (v, v_old))
            state = SimpleNamespace(a=float(window.credit["advantage"][i]), d=t - t_next, std=std, sample=i, t=t)
            state.now, state.old, state.x_next = Normal(mean, std), Normal(mean_old, std), tr.x_next[i, j]
            state.log_ratio = (state.now.log_prob(state.x_next) - state.old.log_prob(state.x_next)).mean()
            if window.reference is not None:
                v_ref = sum(float(a) * f for a, f in zip(window.reference["theta"], features))
                state.reference = Normal(step_by_hand(name, x, v_ref, t, t_next)[0], std)
                state.kl_reference = kl_divergence(state.now, state.reference).mean()
            found.append(state)
    return found


def clipped_by_hand(rho, a: float, clip: float):
    if a >= 0:
        return -a * (rho if rho < 1 + clip else torch.tensor(1 + clip, dtype=F64))
    return -a * (rho if rho > 1 - clip else torch.tensor(1 - clip, dtype=F64))


def loss_by_hand(name: str, states: list) -> list:
    """The weighted loss of each state."""
    if name == "ppo":
        return [clipped_by_hand(torch.exp(s.log_ratio), s.a, CLIP) for s in states]
    if name == "guard":  # the exponent is the mean of z dmu
        z = [(s.x_next - s.old.mean) / s.std for s in states]
        rhos = [torch.exp((u * (s.now.mean - s.old.mean)).mean()) for u, s in zip(z, states)]
        return [clipped_by_hand(rho, s.a, CLIP / 3) / s.d for rho, s in zip(rhos, states)]
    if name == "as published":  # one bias for all
        bias = sum(kl_divergence(s.now, s.old).mean() for s in states) / len(states)
        rhos = [torch.exp((s.log_ratio + bias) * s.std) for s in states]
        return [clipped_by_hand(rho, s.a, CLIP / 3) / s.d for rho, s in zip(rhos, states)]
    losses = []
    for s in states:
        far = float(kl_divergence(s.now, s.old).mean().detach()) >= RADIUS
        rho = torch.exp(s.log_ratio)
        pushed = (rho > 1 and s.a > 0) or (rho < 1 and s.a < 0)
        losses.append(0 * rho if far and pushed else -s.a * rho)
    return losses


# ---- value and gradient -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradient_are_those_of_plain_loops(loss, kernel):
    window = window_for(KERNELS[kernel], shape=(2, 2))
    value, gradient, metrics = outcome(policy_gradient(kernel=KERNELS[kernel], loss=LOSSES[loss]), window)
    theta = MOVED.clone().requires_grad_()
    rows = loss_by_hand(loss, states_by_hand(kernel, window, theta))
    expected = sum(rows) / len(rows)
    close(value, expected.detach())
    close(gradient, torch.autograd.grad(expected, theta)[0])
    assert bool((gradient != 0).all())
    dropped = metrics["masked_fraction" if loss == "divergence" else "clip_fraction"]
    assert 0 < dropped < 1  # the numbers of this file exercise both sides


@pytest.mark.parametrize("shape", [(), (5,), (2, 1, 2)])
def test_latents_of_any_rank(shape):
    window = window_for(flow_sde_step, shape=shape)
    value, gradient, _ = outcome(policy_gradient(kernel=flow_sde_step, loss=LOSSES["ppo"]), window)
    theta = MOVED.clone().requires_grad_()
    rows = loss_by_hand("ppo", states_by_hand("flow", window, theta))
    close(value, (sum(rows) / len(rows)).detach())
    close(gradient, torch.autograd.grad(sum(rows) / len(rows), theta)[0])


@pytest.mark.parametrize(("kernel", "expected"), [("flow", -0.0337772), ("dance", 1.0807532), ("cps", -0.3325281)])
def test_golden_log_probabilities(kernel, expected):
    one = torch.ones(1, 1, 1, dtype=F64)
    t, t_next = torch.tensor([0.6], dtype=F64), torch.tensor([0.4], dtype=F64)
    std = KERNELS[kernel](one[0], one[0], 0.6, 0.4)[1][None]
    tr = Trajectory(one[0], one, 0.9 * one, 0.5 * one, t, t_next, std, std, None)
    window = Window(tr, torch.zeros(1, dtype=F64), {}, {"advantage": torch.ones(1, dtype=F64)})
    q = transitions_of({"kernel": KERNELS[kernel]}, v_at, {"v": 0.5 * one[0]}, window)
    assert float(q.log_prob) == pytest.approx(expected, abs=5e-8)


def transition(log_ratio: float, mean, mean_old, std: float, advantage: float, *, t=0.6, t_next=0.4) -> Transition:
    """One state; its log-probability of then is 0."""
    one = torch.ones(1, dtype=F64)
    return Transition(
        advantages=advantage * one,
        log_prob=log_ratio * one,
        log_prob_old=0 * one,
        mean=torch.tensor([mean], dtype=F64),
        mean_old=torch.tensor([mean_old], dtype=F64),
        std=std * one,
        t=t * one,
        delta=(t - t_next) * one,
    )


def test_golden_guard():
    q = transition(0.01, [0.5, -0.5], [0.2, 0.1], 0.4, -1.0)
    for loss in (guarded_ppo, guarded_ppo_as_published):  # one state: its bias is that of all
        values, weight, _ = loss(clip=10)(q)
        assert float(values) == pytest.approx(1.3301, abs=5e-5)
        assert float(weight) == pytest.approx(5)


@settings(max_examples=12)
@given(seeds, st.sampled_from(["flow", "dance", "cps"]))
def test_the_guard_s_exponent_is_the_mean_of_z_dmu_and_its_weight_1_over_delta(seed, kernel):
    window = window_for(KERNELS[kernel], b=3)
    theta = THETA + 0.05 * normal(4, seed=seed)
    q = transitions_of({"kernel": KERNELS[kernel]}, linear, {"theta": theta}, window)
    tr = window.trajectory
    x_next, mean_old = tr.x_next.flatten(0, 1), q.mean_old
    z = (x_next - mean_old) / q.std[:, None]
    values, weight, _ = guarded_ppo(clip=1e9)(q)
    close(values, -q.advantages * torch.exp((z * (q.mean - mean_old)).mean(1)), rtol=1e-9)
    close(1 / weight, (tr.t - tr.t_next).repeat(3))
    noise = [seeded_noise(tr.seeds, (3,), stream=j + 1).double() for j in range(3)]
    close(z, torch.stack(noise, 1).flatten(0, 1), rtol=1e-6, atol=1e-9)  # z is the noise that the step drew


# ---- closed-form gradients at ratio 1 ---------------------------------------------------------------------------------


def gain_on_v(kernel: str, t: float, t_next: float) -> float:
    """-d mean/d v, derived here from each kernel's equation."""
    d, eta = t - t_next, ETA[kernel]
    if kernel == "flow":
        return (1 + eta**2 / 2) * d if t < 1 else d
    if kernel == "dance":
        return d * (1 + eta**2 / 2 * (1 - t) / t)
    return (1 - t_next) * t - t_next * math.cos(eta * math.pi / 2) * (1 - t)


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 1, 2)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_gradient_at_ratio_1_is_the_advantage_times_the_injected_noise(kernel, shape):
    """dL/dv = A z gain/(dim std): for Flow-SDE at t < 1, A z (1 + eta^2/2) D/(dim std)."""
    window = window_for(KERNELS[kernel], shape=shape)
    tr, dim = window.trajectory, math.prod(shape)
    v = tr.v.flatten(0, 1).clone().requires_grad_()
    loss, keep, _ = policy_gradient(kernel=KERNELS[kernel], loss=ppo(clip=1e-4))(v_at, {"v": v}, window)
    (gradient,) = torch.autograd.grad((loss * keep).sum(), v)
    row = 0
    for i in range(6):
        for j in range(3):
            z = seeded_noise(tr.seeds[i : i + 1], shape, stream=j + 1)[0].double()
            gain = gain_on_v(kernel, float(tr.t[j]), float(tr.t_next[j]))
            expected = window.credit["advantage"][i] * z * gain / (dim * tr.std[i, j])
            close(gradient[row], expected, rtol=1e-9, atol=1e-13)
            row += 1
    assert row == len(gradient)


def test_the_reduction_over_latent_axes_is_a_piece():
    # Mean or sum over latent axes? https://github.com/yifan123/flow_grpo/issues/143
    window = window_for(flow_sde_step, shape=(2, 2))
    summed = partial(transition_log_prob, reduce=latent_sum)
    options = {"kernel": flow_sde_step}
    mean = transitions_of(options, linear, {"theta": MOVED}, window)
    total = transitions_of({**options, "log_prob": summed}, linear, {"theta": MOVED}, window)
    close(total.log_prob - total.log_prob_old, 4 * (mean.log_prob - mean.log_prob_old))
    same = transitions_of({**options, "log_prob": summed}, linear, {"theta": THETA}, window)
    close(same.ratio, torch.ones(18, dtype=F64))


@pytest.mark.parametrize("loss", LOSSES)
def test_samples_of_advantage_0_have_exactly_no_gradient(loss):
    window = window_for(flow_sde_step, advantage=torch.zeros(6, dtype=F64))
    for theta in (THETA, MOVED, 1e3 * MOVED):  # the last one's ratios are 0 or overflow
        _, gradient, metrics = outcome(policy_gradient(kernel=flow_sde_step, loss=LOSSES[loss]), window, theta)
        assert torch.equal(gradient, torch.zeros(4, dtype=F64))
        assert metrics.get("clip_fraction", 0) == metrics.get("masked_fraction", 0) == 0
    if loss not in PER_SAMPLE:
        return
    mixed = normal(6, seed=5) * torch.tensor([0, 1, 0, 1, 1, 0])
    v = (window.trajectory.v.flatten(0, 1) + 0.01).requires_grad_()
    values, keep, _ = policy_gradient(kernel=flow_sde_step, loss=LOSSES[loss])(
        v_at, {"v": v}, window._replace(credit={"advantage": mixed})
    )
    gradient = torch.autograd.grad(masked_mean(values, keep), v)[0]
    assert not gradient[(mixed == 0).repeat_interleave(3)].any()
    assert gradient.any()


# ---- ratio 1 on-policy, in single precision ---------------------------------------------------------------------------

SHAPE = (4, 2)


def network(*, dtype=torch.float32, width: int = 64) -> dict[str, torch.Tensor]:
    """Weights of a small MLP on (x, t, c)."""
    n = math.prod(SHAPE)
    sizes = {"w1": (n + 2, width), "b1": (width,), "w2": (width, width), "w3": (width, n)}
    return {name: normal(*size, seed=i, dtype=dtype) / size[0] ** 0.5 for i, (name, size) in enumerate(sizes.items())}


def mlp(params, x_t, t, cond):
    inputs = torch.cat([x_t.flatten(1), t[:, None], cond["c"][:, None].to(x_t)], dim=1)
    hidden = torch.tanh(inputs @ params["w1"] + params["b1"])
    return (torch.tanh(hidden @ params["w2"]) @ params["w3"]).reshape(x_t.shape)


def mlp_window(kernel, *, b=12, steps=6, keep=None, size=None, dtype=torch.float32) -> Window:
    velocity = mlp if size is None else chunked(mlp, size=size)
    cond, seeds_ = {"c": normal(b, seed=6)}, torch.arange(b) * 3 + 1
    times = time_grid(steps, shift=3.0, dtype=dtype)
    keep = range(steps - 1) if keep is None else keep
    tr = rollout(velocity, network(dtype=dtype), cond, times, seeds=seeds_, shape=SHAPE, step=kernel, keep=keep)
    return Window(tr, torch.zeros(b, dtype=dtype), cond, {"advantage": normal(b, seed=5, dtype=dtype)})


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_first_ratio_is_1_to_the_bit_at_equal_shapes(kernel):
    # Stored first, then scored; replay reads t from the trajectory, one kernel and one log-prob function serve both.
    # https://github.com/verl-project/verl-omni/pull/209 https://github.com/verl-project/verl-omni/pull/279
    # https://github.com/X-GenGroup/Flow-Factory/pull/61
    for j in range(5):
        window = mlp_window(KERNELS[kernel], keep=[j])
        q = transitions_of({"kernel": KERNELS[kernel]}, mlp, network(), window)
        assert q.log_prob.dtype == torch.float32
        assert torch.equal(q.log_prob, window.trajectory.log_prob[:, 0])
        assert torch.equal(q.ratio, torch.ones(12))
        assert torch.equal(q.mean, q.mean_old)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_first_ratio_is_1_for_every_chunking_of_rollout_and_replay(kernel):
    # Ratio .9990 before any update when the two differ in size. https://github.com/XueZeyue/DanceGRPO/issues/87
    # A shipped `assert ratio == 1` failed on users' machines. https://github.com/ReinFlow/ReinFlow/issues/5
    for size in (1, 5, 12):
        window = mlp_window(KERNELS[kernel], size=size)
        for micro_batch in (1, 4, 7, 12):
            for rows in torch.arange(12).split(micro_batch):
                q = transitions_of({"kernel": KERNELS[kernel]}, mlp, network(), select_rows(window, rows))
                assert float((q.ratio - 1).abs().max()) < 2e-5


# ---- independence of order and of the micro-batch ---------------------------------------------------------------------


def gradient_of_update(objective, window: Window, micro_batch: int | None) -> torch.Tensor:
    """The gradient that `loop.update` leaves behind, one backward per micro-batch; nothing is stepped."""
    params = {name: (p + 0.02 * normal(*p.shape, seed=9)).requires_grad_() for name, p in network(dtype=F64).items()}
    model = SimpleNamespace(velocity=mlp, params=params)
    update(objective, model, torch.optim.SGD(list(params.values()), lr=0.0), window, None, micro_batch)
    return torch.cat([p.grad.flatten() for p in params.values()])


def reference_weights() -> dict[str, torch.Tensor]:
    return {name: p + 0.01 for name, p in network(dtype=F64).items()}


def largest_gap(objective, window: Window) -> float:
    """Of the gradients under several micro-batches and a shuffled window, relative to the largest entry."""
    expected = gradient_of_update(objective, window, None)
    found = [gradient_of_update(objective, window, size) for size in (1, 5, 8)]
    shuffled = select_rows(window, torch.randperm(12, generator=torch.Generator().manual_seed(1)))
    found += [gradient_of_update(objective, shuffled, size) for size in (None, 5)]
    return float(max((g - expected).abs().max() for g in found) / expected.abs().max())


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("loss", PER_SAMPLE)
def test_gradients_do_not_depend_on_the_micro_batch_or_on_the_order(loss, beta):
    # A row's result depends on who else is in the batch. https://github.com/pytorch/pytorch/issues/124025
    window = mlp_window(flow_sde_step, dtype=F64)._replace(reference=reference_weights())
    assert largest_gap(policy_gradient(kernel=flow_sde_step, loss=LOSSES[loss], beta=beta), window) < 1e-10
    random = policy_gradient(kernel=flow_sde_step, loss=LOSSES[loss], beta=beta, steps_per_sample=2)
    assert largest_gap(random, window) < 1e-10


def test_control_the_published_guard_depends_on_its_micro_batch():
    window = mlp_window(flow_sde_step, dtype=F64)
    assert largest_gap(policy_gradient(kernel=flow_sde_step, loss=LOSSES["as published"]), window) > 1e-6


# ---- what the clip and the divergence drop ----------------------------------------------------------------------------


@given(seeds, st.floats(1e-3, 0.2))
def test_the_clip_fraction_counts_the_rows_whose_gradient_the_clip_removes(seed, clip):
    # It counted the wrong side. https://github.com/huggingface/trl/issues/3144
    advantages = normal(12, seed=seed + 1) * (normal(12, seed=seed + 2) > -0.5)
    log_ratio = (0.1 * normal(12, seed=seed)).requires_grad_()
    losses = clipped_ratio(log_ratio, torch.zeros(12, dtype=F64), advantages, clip=clip)
    (gradient,) = torch.autograd.grad(losses.sum(), log_ratio)
    removed = (gradient == 0) & (advantages != 0)
    found = clip_fraction(log_ratio.exp(), advantages, clip)
    assert found == {"clip_fraction": pytest.approx(float(removed.double().mean()))}
    assert clip_fraction(torch.ones(12, dtype=F64), advantages, clip) == {"clip_fraction": 0.0}


@pytest.mark.parametrize("loss", ["ppo", "guard", "as published"])
def test_each_loss_reports_the_clip_fraction_of_its_own_ratio(loss):
    window = window_for(flow_sde_step)
    _, _, metrics = outcome(policy_gradient(kernel=flow_sde_step, loss=LOSSES[loss]), window)
    losses = loss_by_hand(loss, states_by_hand("flow", window, MOVED.clone().requires_grad_()))
    removed = sum(not row.requires_grad for row in losses)
    assert metrics["clip_fraction"] == pytest.approx(removed / len(losses))


@settings(max_examples=12)
@given(seeds, st.sampled_from(["ppo", "guard"]), st.sampled_from(["flow", "dance", "cps"]))
def test_a_wider_clip_removes_no_gradient_that_a_narrower_one_leaves(seed, name, kernel):
    window = window_for(KERNELS[kernel], b=4)
    v_old = window.trajectory.v.flatten(0, 1)
    before = torch.zeros(12, dtype=torch.bool)
    for clip in (1e-3, 1e-2, 1e-1, 10.0):
        v = (v_old + 0.05 * normal(*v_old.shape, seed=seed)).requires_grad_()
        loss = {"ppo": ppo, "guard": guarded_ppo}[name](clip=clip)
        values, keep, metrics = policy_gradient(kernel=KERNELS[kernel], loss=loss)(v_at, {"v": v}, window)
        alive = torch.autograd.grad((values * keep).sum(), v)[0].abs().sum(1) > 0
        assert not bool((before & ~alive).any())
        assert metrics["clip_fraction"] == pytest.approx(float((~alive).double().mean()))
        before = alive
    assert bool(before.all())


@settings(max_examples=12)
@given(seeds)
def test_flow_dppo_drops_exactly_its_set_and_keeps_the_zeros_in_the_mean(seed):
    window = window_for(flow_sde_step, b=5)
    theta, dropped_before = THETA + 0.04 * normal(4, seed=seed), torch.ones(15, dtype=torch.bool)
    states = states_by_hand("flow", window, theta)
    kl = [float(kl_divergence(s.now, s.old).mean()) for s in states]
    for radius in (0.0, 1e-5, 1e-4, 1e-3, INF):
        objective = policy_gradient(kernel=flow_sde_step, loss=divergence_masked(radius=radius))
        values, keep, metrics = objective(linear, {"theta": theta}, window)
        total = 0.0
        for row, s in enumerate(states):
            rho = math.exp(s.log_ratio)
            drop = kl[row] >= radius and ((rho > 1 and s.a > 0) or (rho < 1 and s.a < 0))
            assert bool(keep[row]) == (not drop)
            total += 0.0 if drop else -s.a * rho
        assert float(masked_mean(values, keep)) == pytest.approx(total / 15, rel=1e-9)
        assert metrics["masked_fraction"] == pytest.approx(float((keep == 0).double().mean()))
        assert metrics["kl"] == pytest.approx(sum(kl) / 15, rel=1e-9)
        assert not bool(((keep == 0) & ~dropped_before).any())  # monotone in the radius
        dropped_before = keep == 0
    assert not dropped_before.any()


def test_the_mask_measures_the_kl_it_is_given():
    window = window_for(flow_sde_step)
    published = divergence_masked(radius=RADIUS, kl=kl_without_delta)
    _, keep, metrics = policy_gradient(kernel=flow_sde_step, loss=published)(linear, {"theta": MOVED}, window)
    states = states_by_hand("flow", window, MOVED)
    kl = [float(kl_divergence(s.now, s.old).mean()) * s.d for s in states]
    assert metrics["kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-9)
    pushed = [(s.log_ratio > 0) == (s.a > 0) for s in states]
    assert [bool(k) for k in keep] == [not (p and d >= RADIUS) for p, d in zip(pushed, kl)]


@pytest.mark.parametrize("advantage", [1.0, 0.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_row_that_says_nothing_or_is_dropped_has_no_gradient_where_its_ratio_overflows(loss, advantage):
    q = transition(8000.0, [5.0, 0.0], [0.0, 0.0], 0.1, advantage)
    log_prob = q.log_prob.clone().requires_grad_()
    values, keep, _ = LOSSES[loss](q._replace(log_prob=log_prob))
    value = masked_mean(values, keep)
    assert math.isfinite(float(value.detach()))
    assert torch.equal(torch.autograd.grad(value, log_prob)[0], torch.zeros(1, dtype=F64))


# ---- the KL pieces ----------------------------------------------------------------------------------------------------


@given(st.data(), seeds, st.sampled_from(["flow", "dance"]))
def test_kl_without_delta_is_delta_times_the_exact_kl(data, seed, kernel):
    t, t_next = data.draw(time_pairs(3))
    t_next = 0.9 * t_next + 0.01 * t
    x, v, other = (normal(3, 2, seed=seed + i) for i in range(3))
    (p, std), (q, _) = (KERNELS[kernel](x, u, t, t_next) for u in (v, other))
    by_hand = torch.stack([kl_divergence(Normal(a, s), Normal(b, s)).mean() for a, b, s in zip(p, q, std)])
    close(exact_kl(p, q, std, t, t - t_next), by_hand, rtol=1e-9)
    close(kl_without_delta(p, q, std, t, t - t_next), (t - t_next) * by_hand, rtol=1e-9)


@pytest.mark.parametrize("eta", [0.7, 0.3])
def test_kl_with_a_clamped_sigma_is_28_percent_of_the_exact_one_on_the_first_step(eta):
    grid = time_grid(10, shift=3.0, dtype=F64)
    t, t_next = grid[:-1], grid[1:]
    p, q = normal(10, 3), normal(10, 3, seed=1)
    _, std = flow_sde_step(p, p, t, t_next, eta=eta)
    exact, clamped = (kl(p, q, std, t, t - t_next) for kl in (exact_kl, kl_clamped_sigma(eta)))
    close(clamped[1:], exact[1:])
    assert float(clamped[0] / exact[0]) == pytest.approx(0.28, abs=1e-3)
    assert float(clamped[0] / exact[0]) == pytest.approx(0.01 / float(1 - grid[1]), rel=1e-9)  # sigma^2 D: 1 -> D/.01
    # in between it is clamped as well: at t = .995 the exact variance is twice as large
    t, t_next = torch.tensor([0.995], dtype=F64), torch.tensor([0.9], dtype=F64)
    _, std = flow_sde_step(p[:1], p[:1], t, t_next, eta=eta)
    ratio = kl_clamped_sigma(eta)(p[:1], q[:1], std, t, t - t_next) / exact_kl(p[:1], q[:1], std, t, t - t_next)
    close(ratio, torch.tensor([2.0]), rtol=1e-9)


@given(seeds, st.floats(0.05, 2.0))
def test_the_cps_surrogate_s_log_ratio_is_2_std_squared_times_the_exact_one(seed, std):
    x, mean, mean_old = (normal(4, 2, 2, seed=seed + i) for i in range(3))
    std = torch.full((4,), std, dtype=F64)
    exact = Normal(mean, std[0]).log_prob(x).mean((1, 2)) - Normal(mean_old, std[0]).log_prob(x).mean((1, 2))
    close(cps_surrogate(x, mean, std) - cps_surrogate(x, mean_old, std), 2 * std**2 * exact, rtol=1e-9, atol=1e-12)
    close(cps_surrogate(x, mean, std), [-sum(float(e) ** 2 for e in (a - b).flatten()) / 4 for a, b in zip(x, mean)])


def test_the_surrogate_serves_now_and_then_alike():
    # One side had the normaliser, the other not. https://github.com/verl-project/verl-omni/pull/209
    window = window_for(cps_step)
    options = {"kernel": cps_step, "log_prob": cps_surrogate}
    q = transitions_of(options, linear, {"theta": THETA}, window)
    assert torch.equal(q.ratio, torch.ones(18, dtype=F64))
    q = transitions_of(options, linear, {"theta": MOVED}, window)
    log_ratio = [2 * s.std**2 * float(s.log_ratio) for s in states_by_hand("cps", window, MOVED)]
    close(q.log_prob - q.log_prob_old, log_ratio, rtol=1e-9)


# ---- the penalty ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("loss", PER_SAMPLE)
def test_the_penalty_adds_beta_times_the_exact_kl_and_its_gradient_also_where_the_loss_is_dropped(loss, kernel):
    # A "KL" that was a velocity MSE. https://github.com/yifan123/flow_grpo/issues/110
    weight = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 3.0], dtype=F64)
    for credit in ({}, {"weight": weight}):
        window = window_for(KERNELS[kernel], reference=REFERENCE, **credit)
        pieces = {"kernel": KERNELS[kernel], "loss": LOSSES[loss]}
        value, gradient, plain = outcome(policy_gradient(**pieces), window)
        penalised, with_penalty, metrics = outcome(policy_gradient(beta=0.3, **pieces), window)
        theta = MOVED.clone().requires_grad_()
        states = states_by_hand(kernel, window, theta)
        kl = sum(s.kl_reference * (float(weight[s.sample]) if credit else 1) for s in states) / len(states)
        close(penalised - value, 0.3 * kl.detach(), rtol=1e-9)
        close(with_penalty - gradient, 0.3 * torch.autograd.grad(kl, theta)[0], rtol=1e-9)
        told = sum(float(s.kl_reference.detach()) for s in states) / len(states)
        assert metrics["kl_reference"] == pytest.approx(told, rel=1e-9)
        assert "kl_reference" not in plain


def test_the_penalty_is_the_kl_it_is_given_and_0_at_the_reference():
    window = window_for(flow_sde_step, reference=REFERENCE)
    pieces = {"kernel": flow_sde_step, "loss": LOSSES["ppo"]}
    value, _, _ = outcome(policy_gradient(**pieces), window)
    penalised, _, _ = outcome(policy_gradient(beta=2.0, kl=kl_without_delta, **pieces), window)
    states = states_by_hand("flow", window, MOVED)
    close(penalised - value, 2 * sum(float(s.kl_reference) * s.d for s in states) / len(states), rtol=1e-9)
    assert outcome(policy_gradient(beta=2.0, **pieces), window, REFERENCE)[2]["kl_reference"] == 0
    with refuses("reference", "beta"):
        outcome(policy_gradient(beta=0.1, **pieces), window._replace(reference=None))


@pytest.mark.parametrize("loss", PER_SAMPLE)
def test_the_credit_s_weight_scales_each_sample_s_loss(loss):
    weight = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 3.0], dtype=F64)
    window = window_for(flow_sde_step, weight=weight)
    value, gradient, _ = outcome(policy_gradient(kernel=flow_sde_step, loss=LOSSES[loss]), window)
    theta = MOVED.clone().requires_grad_()
    states = states_by_hand("flow", window, theta)
    expected = sum(float(weight[s.sample]) * row for s, row in zip(states, loss_by_hand(loss, states))) / len(states)
    close(value, expected.detach())
    close(gradient, torch.autograd.grad(expected, theta)[0])


# ---- samples without reward -------------------------------------------------------------------------------------------


def spoilt(window: Window, sample: int, *names: str) -> Window:
    """The window whose sample has nan rewards and nan in the named tensors."""
    changed = {name: getattr(window.trajectory, name).clone() for name in names}
    for value in changed.values():
        value[sample] = NAN
    rewards = window.rewards.clone()
    rewards[sample] = NAN
    credit = {**window.credit, "advantage": window.credit["advantage"].index_fill(0, torch.tensor([sample]), 0.0)}
    return window._replace(trajectory=window.trajectory._replace(**changed), rewards=rewards, credit=credit)


@pytest.mark.parametrize("names", [(), ("x_0",), ("x_t", "x_next", "v", "x_0", "log_prob")])
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("loss", PER_SAMPLE)
def test_samples_without_reward_give_no_value_and_no_gradient(loss, beta, names):
    window = window_for(flow_sde_step, reference=REFERENCE)
    objective = policy_gradient(kernel=flow_sde_step, loss=LOSSES[loss], beta=beta)
    without = select_rows(window, torch.tensor([0, 1, 3, 4, 5]))
    expected, expected_gradient, told = outcome(objective, without)
    found, gradient, metrics = outcome(objective, spoilt(window, 2, *names))
    close(6 * found, 5 * expected)  # masked_mean still divides by all rows
    close(6 * gradient, 5 * expected_gradient)
    assert all(math.isfinite(value) for value in metrics.values())
    if names:  # nor are they in the means over states
        for name in ("ratio_deviation", "drift_rms", *(["kl_reference"] if beta else [])):
            assert metrics[name] == pytest.approx(told[name], rel=1e-9)


def test_states_without_numbers_count_as_unmoved_in_the_published_guard_and_in_the_divergence():
    window = window_for(flow_sde_step)
    gone = spoilt(window, 2, "x_t", "x_next", "v")
    value, gradient, _ = outcome(policy_gradient(kernel=flow_sde_step, loss=LOSSES["as published"]), gone)
    theta = MOVED.clone().requires_grad_()
    states = [s for s in states_by_hand("flow", window, theta) if s.sample != 2]
    bias = sum(kl_divergence(s.now, s.old).mean() for s in states) / 18
    rows = [clipped_by_hand(torch.exp((s.log_ratio + bias) * s.std), s.a, CLIP / 3) / s.d for s in states]
    close(value, sum(rows).detach() / 18)
    close(gradient, torch.autograd.grad(sum(rows) / 18, theta)[0])
    _, _, metrics = outcome(policy_gradient(kernel=flow_sde_step, loss=LOSSES["divergence"]), gone)
    assert metrics["kl"] == pytest.approx(
        sum(float(kl_divergence(s.now, s.old).mean().detach()) for s in states) / 18, rel=1e-9
    )


def test_a_loss_of_one_s_own_sees_no_nan_of_missing_samples():
    gone = spoilt(window_for(flow_sde_step), 2, "x_t", "x_next", "v", "log_prob")
    q = transitions_of({"kernel": flow_sde_step}, linear, {"theta": MOVED}, gone)
    missing = torch.arange(6).repeat_interleave(3) == 2
    assert torch.equal(q.ratio[missing], torch.ones(3, dtype=F64))
    assert torch.equal(q.mean[missing], q.mean_old[missing])
    assert bool((q.ratio[~missing] != 1).all())
    assert all(torch.isfinite(value).all() for value in q)


# ---- metrics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
def test_metrics_at_the_first_update_and_their_names(loss):
    # "The ratio is always 1, is it training?" https://github.com/yifan123/flow_grpo/issues/131
    window = window_for(flow_sde_step)
    _, _, metrics = outcome(policy_gradient(kernel=flow_sde_step, loss=LOSSES[loss]), window, THETA)
    assert metrics["ratio_deviation"] == pytest.approx(0, abs=1e-14)
    assert metrics["drift_rms"] == pytest.approx(0, abs=1e-14)
    grid = [f"/t={float(t):.3f}" for t in time_grid(4, shift=3.0, dtype=F64)[:3]]
    for name in ("ratio_deviation", "std", "output_grad"):
        assert [key for key in metrics if key.startswith(f"{name}/")] == [name + t for t in grid]
    for t, std in zip(grid, window.trajectory.std[0]):
        assert metrics[f"std{t}"] == pytest.approx(float(std))
        assert metrics[f"ratio_deviation{t}"] == pytest.approx(0, abs=1e-14)
        assert metrics[f"output_grad{t}"] > 0


def test_ratio_and_drift_by_plain_loops():
    window = window_for(dance_sde_step)
    _, _, metrics = outcome(policy_gradient(kernel=dance_sde_step, loss=LOSSES["ppo"]), window)
    states = states_by_hand("dance", window, MOVED)
    gaps = [abs(math.exp(s.log_ratio) - 1) for s in states]
    assert metrics["ratio_deviation"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-9)
    first = [gap for gap, s in zip(gaps, states) if s.t == 1]
    assert metrics["ratio_deviation/t=1.000"] == pytest.approx(sum(first) / len(first), rel=1e-9)
    tr, cond = window.trajectory, {"c": window.cond["c"].repeat_interleave(3)}
    v = linear({"theta": MOVED}, tr.x_t.flatten(0, 1), tr.t.repeat(6), cond)
    assert metrics["drift_rms"] == pytest.approx(float((v - tr.v.flatten(0, 1)).square().mean().sqrt()), rel=1e-9)


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("loss", LOSSES)
def test_output_grad_is_autograd_s_of_what_masked_mean_sums(loss, beta):
    weight = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 3.0], dtype=F64)
    window = window_for(flow_sde_step, reference=REFERENCE, weight=weight)
    rows = {"v": window.trajectory.v.flatten(0, 1) + 0.02 * normal(18, 3, seed=4)}
    rows["v"].requires_grad_()

    def velocity(params, x_t, t, cond):
        return params["v"] if params is rows else linear(params, x_t, t, cond)

    objective = policy_gradient(kernel=flow_sde_step, loss=LOSSES[loss], beta=beta)
    values, keep, metrics = objective(velocity, rows, window)
    gradient = torch.autograd.grad(18 * masked_mean(values, keep), rows["v"])[0]
    sizes = gradient.square().mean(1).sqrt().reshape(6, 3)
    for j, t in enumerate(window.trajectory.t):
        assert metrics[f"output_grad/t={float(t):.3f}"] == pytest.approx(float(sizes[:, j].mean()), rel=1e-9)
    rows["v"].requires_grad_(False)
    assert not any(name.startswith("output_grad") for name in objective(velocity, rows, window)[2])


def test_a_random_subset_of_steps_is_what_is_trained():
    window = window_for(flow_sde_step)
    objective = policy_gradient(kernel=flow_sde_step, loss=LOSSES["ppo"], steps_per_sample=lambda kept: kept - 1)
    values, keep, _ = objective(linear, {"theta": MOVED}, window)
    assert len(values) == len(keep) == 12
    assert policy_gradient(kernel=flow_sde_step, loss=LOSSES["ppo"])(linear, {"theta": MOVED}, window)[0].shape == (18,)


# ---- refusals ---------------------------------------------------------------------------------------------------------


def test_a_trained_step_without_noise_is_refused_with_its_t():
    # A guard that assumes a Gaussian step refuses what is not one. https://github.com/yifan123/flow_grpo/issues/192
    # Is there noise in the last step? https://github.com/irom-princeton/dppo/issues/42
    objective = policy_gradient(kernel=cps_step, loss=LOSSES["guard"])
    with refuses("noise", "t = [0.5]"):  # CPS has none in the step that ends at 0
        outcome(objective, window_for(cps_step, keep=(0, 3)))
    kernels = [cps_step, euler_step, cps_step, cps_step]
    with refuses("noise", "t = [0.9]"):
        outcome(objective, window_for(kernels))
    with refuses("noise", "0.9"):
        outcome(policy_gradient(kernel=euler_step, loss=LOSSES["ppo"]), window_for(cps_step))


def test_another_kernel_than_the_rollout_s_is_refused():
    window = window_for(flow_sde_step)
    for kernel in (dance_sde_step, cps_step, partial(flow_sde_step, eta=0.701)):
        with refuses("std", "rollout", float(window.trajectory.std[0, 0])):
            outcome(policy_gradient(kernel=kernel, loss=LOSSES["ppo"]), window)
    outcome(policy_gradient(kernel=partial(flow_sde_step, eta=0.7 * (1 + 1e-6)), loss=LOSSES["ppo"]), window)


@pytest.mark.parametrize("bad", [0, -1e-4, NAN, INF, "small"])
def test_a_clip_is_a_positive_number(bad):
    for loss in (ppo, guarded_ppo, guarded_ppo_as_published):
        with refuses("clip", bad):
            loss(clip=bad)


@pytest.mark.parametrize("bad", [-1.0, NAN, "wide"])
def test_radius_beta_and_steps_are_checked_before_anything_runs(bad):
    with refuses("radius", bad):
        divergence_masked(radius=bad)
    with refuses("beta", bad):
        policy_gradient(kernel=flow_sde_step, loss=LOSSES["ppo"], beta=bad)
    with refuses("steps_per_sample", bad):
        policy_gradient(kernel=flow_sde_step, loss=LOSSES["ppo"], steps_per_sample=bad)
    with refuses("eta"):
        kl_clamped_sigma(0)


# ---- negative control -------------------------------------------------------------------------------------------------


def test_control_a_wrong_time_a_stored_bf16_state_or_a_flipped_advantage_would_be_seen():
    window = mlp_window(flow_sde_step)
    tr = window.trajectory
    options = {"kernel": flow_sde_step}
    # Storing the next state in bf16 alone moves the mean log-prob by 1e-3. https://github.com/yifan123/flow_grpo
    rounded = window._replace(trajectory=tr._replace(x_next=tr.x_next.bfloat16().float()))
    assert float((transitions_of(options, mlp, network(), rounded).ratio - 1).abs().max()) > 2e-5

    # The network's time cut to an integer. https://github.com/XueZeyue/DanceGRPO
    def cut(params, x_t, t, cond):
        return mlp(params, x_t, (100 * t).int() / 100, cond)

    assert float((transitions_of(options, cut, network(), window).ratio - 1).abs().max()) > 2e-5
    window = window_for(flow_sde_step)
    objective = policy_gradient(kernel=flow_sde_step, loss=LOSSES["ppo"])
    flipped = window._replace(credit={"advantage": -window.credit["advantage"]})
    assert not torch.allclose(outcome(objective, flipped)[1], outcome(objective, window)[1], rtol=0.1)
