"""An Algorithm is a NamedTuple of functions; a variant is `._replace(piece=another_function)`.

batch  = collect(velocity, behaviour params, cond, seeds " g k", score)     rollout and rewards      (`rollouts`)
credit = credit(batch)                                                      what each sample is told (`credits`)
loss " w", keep " w", metrics = objective(velocity, params, window)         one optimizer step's worth of states (`objectives`, `policy_gradients`)
behaviour params = behaviour(behaviour params, params, i)                   who rolls out next, i optimizer steps so far

Defaults are the papers'. Where published code deviates from its own formula, the exact form is the default and the
deviation has a name of its own, `..._as_published`. Numbers that belong to a run (learning rate, group size, sampling
steps, guidance scale, LoRA rank) are the loop's; docs/parity.md has the published ones, as far as known.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor

from diffrl.checks import require_count
from diffrl.credits import (
    Labels,
    advantage_credit,
    advantages_of_sum,
    best_against_worst,
    covariance_credit,
    negative_part,
    optimality_credit,
    positive_part,
    random_pairs,
    scalar_rewards,
    sum_of_advantages,
    unbiased_group_std,
)
from diffrl.guidance import batch_std, group_std
from diffrl.losses import inverse_abs_error
from diffrl.losses import nft as nft_loss
from diffrl.objectives import (
    MatchingScore,
    guidance_force,
    guided_regression,
    matching_ratio,
    net_force,
    nft_regression,
    plain_matching,
)
from diffrl.policy_gradients import (
    KL,
    LogProb,
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
from diffrl.rollouts import (
    Noise,
    TrainedSteps,
    all_but_last,
    all_steps,
    collect_renoised,
    collect_rollout,
    collect_window,
    first_half,
    noise_of_the_prompt,
    noisiest,
    noisiest_nine_tenths,
    random_window_of,
    sliding_window_of,
    subset_of_steps,
    three_fifths,
)
from diffrl.sampling import cps_step, dance_sde_step, dpm2_step, euler_step, flow_sde_step, transition_log_prob
from diffrl.sol_rl import sol_rl
from diffrl.states import States, StepsPerSample, window_states
from diffrl.trust_region import ema, ramp
from diffrl.types import Algorithm, Batch, Metrics, Params, Score, Step, Window

__all__ = [
    "Algorithm",
    "Batch",
    "Metrics",
    "Score",
    "States",
    "TrainedSteps",
    "Window",
    "all_steps",
    "art",
    "art_flash",
    "art_pairwise",
    "awm",
    "best_against_worst",
    "collect_rollout",
    "covariance_credit",
    "cps_grpo",
    "cps_grpo_as_published",
    "dance_grpo",
    "dance_grpo_as_published",
    "flow_dppo",
    "flow_dppo_as_published",
    "flow_grpo",
    "flow_grpo_as_published",
    "flow_grpo_fast",
    "grpo_guard",
    "grpo_guard_as_published",
    "guidance_force",
    "guided_regression",
    "lagging",
    "live",
    "mix_grpo",
    "net_force",
    "nft",
    "nft_negative_only",
    "nft_ocr",
    "nft_positive_only",
    "noisiest",
    "ocr_decay",
    "random_pairs",
    "scalar_rewards",
    "slow_decay",
    "sol_rl",
    "subset_of_steps",
    "window_states",
]


# ---- behaviour --------------------------------------------------------------------------------------------------------


def live(behaviour: Params, params: Params, i: int) -> Params:
    """On-policy: the live params roll out next (decay 0, no copy). No example: it returns `params`."""
    return params


def lagging(decay: Callable[[int], float], *, device: Any = None) -> Callable[[Params, Params, int], Params]:
    """old <- decay(i) old + (1 - decay(i)) params, i optimizer steps so far: DiffusionNFT's behaviour policy.

    decay: e.g. `slow_decay`, `ocr_decay`, or a constant `lambda i: .9`. device: where the average is kept, e.g. "cpu" for a
    fully trained model; a velocity moves it where it is needed, one call at a time. None: where the params are.

    >>> lagging(lambda i: 0.9)({"w": Tensor([0.0])}, {"w": Tensor([1.0])}, 7)
    {'w': tensor([0.1000])}
    """

    def behaviour(old: Params, params: Params, i: int) -> Params:
        if device is not None:
            old, params = ({name: p.detach().to(device) for name, p in each.items()} for each in (old, params))
        return ema(old, params, decay=decay(i))

    return behaviour


# ---- DiffusionART -----------------------------------------------------------------------------------------------------


def art(
    *,
    scale: float = 1.0,
    radius: float | Callable[[Tensor, Tensor], Tensor] = 1e-5,
    trained_steps: TrainedSteps = all_steps,
    steps_per_sample: StepsPerSample = None,
    updates: int = 2,
    step: Step | Sequence[Step] = euler_step,
    reference_kernel: Step = flow_sde_step,
    rms_axes: Sequence[int] | None = None,
    labels: Labels = scalar_rewards,
    mask_force: Callable[[Tensor, Tensor, Tensor], Tensor] = net_force,
    dead: Literal["drop", "restore"] = "drop",
) -> Algorithm:
    """DiffusionART (2610.12572): one unit-RMS covariance direction per prompt, target v_old - G frozen over two updates
    on disjoint halves of each group, a KL-proxy trust region whose mask drops outward updates only. No EMA, no reference.

    scale of G; radius of the trust region; trained_steps: (steps) -> step indices, `all_steps` or `noisiest(n)`;
    steps_per_sample: train a seeded random subset of those per trajectory; updates per rollout; step: the sampler;
    reference_kernel of the KL proxy; rms_axes, labels, mask_force, dead: see `aggregate_direction`,
    `covariance_credit`, `guided_regression`. Assumes a velocity model that an ODE samples well, few-step distilled
    ones included; needs no gradient of the reward and no log-probabilities. Published: lr 3e-4, 10 steps, 32 prompts.
    No example: the top of `loop` trains with it.
    """
    return Algorithm(
        collect=collect_rollout(step=step, trained_steps=trained_steps),
        credit=covariance_credit(labels=labels, scale=scale, rms_axes=rms_axes),
        objective=guided_regression(
            radius=radius,
            reference_kernel=reference_kernel,
            steps_per_sample=steps_per_sample,
            mask_force=mask_force,
            dead=dead,
        ),
        behaviour=live,
        updates=require_count("updates", updates),
        memory=radius if hasattr(radius, "advance") else None,
    )


_noisiest = noisiest  # `art_flash` has a keyword of that name


def art_flash(*, noisiest: int = 4, **settings: Any) -> Algorithm:
    """`art` with only the `noisiest` steps trained (the authors' public notes of 2026-10-25: comparable, cheaper).
    No example: a preset of `art`."""
    return art(trained_steps=_noisiest(noisiest), **settings)


def art_pairwise(*, pairing: Labels = random_pairs, **settings: Any) -> Algorithm:
    """`art` from preferences only: labels 1/0 (1/2 on a tie) of disjoint pairs inside each group instead of rewards.

    pairing: `random_pairs` (seeded), `best_against_worst`, or any (Batch) -> labels " g k". Other keywords as `art`.
    No example: a preset of `art`.
    """
    return art(labels=pairing, **settings)


# ---- Flow-GRPO and its family -----------------------------------------------------------------------------------------


def flow_grpo(
    *,
    kernel: Step = flow_sde_step,
    clip: float = 1e-4,
    beta: float = 0.04,
    kl: KL = exact_kl,
    log_prob: LogProb = transition_log_prob,
    spread: Callable[[Tensor], Tensor] = batch_std,
    clamp: float = 5.0,
    trained_steps: TrainedSteps = all_but_last,
    steps_per_sample: StepsPerSample = None,
    updates: int = 2,
) -> Algorithm:
    """Flow-GRPO (2505.05470): SDE rollout, group-relative advantages over the batch's std, clipped ratio per step plus
    beta x the exact KL to the reference.

    kernel samples, replays and gives the KL, eta .7; every step but the last is trained. Published: lr 3e-4, 10 steps,
    24 samples x 48 prompts, beta .04 (GenEval, OCR) or .01 (PickScore), guidance 4.5. No example: a preset.
    """
    return Algorithm(
        collect=collect_rollout(step=kernel, trained_steps=trained_steps),
        credit=advantage_credit(advantages=advantages_of_sum(spread=spread), clamp=clamp),
        objective=policy_gradient(
            kernel=kernel, loss=ppo(clip=clip), log_prob=log_prob, beta=beta, kl=kl, steps_per_sample=steps_per_sample
        ),
        behaviour=live,
        updates=require_count("updates", updates),
        needs_reference=beta > 0,
    )


def flow_grpo_as_published(**settings: Any) -> Algorithm:
    """`flow_grpo` with the KL of its code: mean(dmu^2)/(2 (std/sqrt(D))^2), D x the exact one. No example: a preset."""
    return flow_grpo(kl=kl_without_delta, **settings)


def flow_grpo_fast(
    *,
    kernel: Step = cps_step,
    window: int = 3,
    clip: float = 1e-5,
    beta: float = 0.0,
    spread: Callable[[Tensor], Tensor] = batch_std,
    clamp: float = 5.0,
    updates: int = 2,
) -> Algorithm:
    """Flow-GRPO-Fast (2505.05470's code): noise only in a random window of 3 steps, one per rollout, Euler elsewhere; only
    the window is trained. CPS kernel of eta .8, start uniform in {0..steps//2 - window}, no KL, no guidance.
    No example: a preset."""
    return Algorithm(
        collect=collect_window(kernel=kernel, window=random_window_of(window)),
        credit=advantage_credit(advantages=advantages_of_sum(spread=spread), clamp=clamp),
        objective=policy_gradient(kernel=kernel, loss=ppo(clip=clip), beta=beta),
        behaviour=live,
        updates=require_count("updates", updates),
        needs_reference=beta > 0,
    )


def mix_grpo(
    *,
    kernel: Step = flow_sde_step,
    window: int = 4,
    stride: int = 1,
    every: int = 25,
    clip: float = 1e-4,
    spread: Callable[[Tensor], Tensor] = group_std,
    clamp: float = 5.0,
    updates: int = 4,
) -> Algorithm:
    """MixGRPO (2507.21802): SDE inside a window that slides from noise to data, ODE outside; the advantages of several
    rewards are added. The window stays full and rolls back at the end (the published schedule shrinks there and trains
    nothing in 25 of 600 iterations). Published: 25 steps, shift 3, 12 samples, 4 updates. No example: a preset."""
    return Algorithm(
        collect=collect_window(kernel=kernel, window=sliding_window_of(window, stride=stride, every=every)),
        credit=advantage_credit(advantages=sum_of_advantages(spread=spread), clamp=clamp),
        objective=policy_gradient(kernel=kernel, loss=ppo(clip=clip)),
        behaviour=live,
        updates=require_count("updates", updates),
    )


def dance_grpo(
    *,
    kernel: Step = dance_sde_step,
    clip: float = 1e-4,
    spread: Callable[[Tensor], Tensor] = group_std,
    eps: float = 1e-8,
    clamp: float = 5.0,
    noise: Noise = noise_of_the_prompt,
    best_of: int | None = None,
    trained_steps: TrainedSteps = all_but_last,
    steps_per_sample: StepsPerSample = three_fifths,
    updates: int = 1,
) -> Algorithm:
    """DanceGRPO (2505.07818): an SDE of constant noise, eta .3, one initial noise per prompt, 3/5 of the steps trained at
    random per trajectory, the last never.

    best_of n: only the n/2 best and worst of each group are trained. Published: FLUX 12 samples, 16 steps, lr 1e-5;
    HunyuanVideo eta .25, 24 samples, best_of 8, 16 steps, shift 5. Published spread: `unbiased_group_std`.
    No example: a preset.
    """
    return Algorithm(
        collect=collect_rollout(step=kernel, trained_steps=trained_steps, noise=noise),
        credit=advantage_credit(advantages=sum_of_advantages(spread=spread, eps=eps), clamp=clamp, best_of=best_of),
        objective=policy_gradient(kernel=kernel, loss=ppo(clip=clip), steps_per_sample=steps_per_sample),
        behaviour=live,
        updates=require_count("updates", updates),
    )


def dance_grpo_as_published(**settings: Any) -> Algorithm:
    """`dance_grpo` with its code's unbiased std as spread: advantages are sqrt((k - 1)/k) as large.
    No example: a preset."""
    return dance_grpo(spread=unbiased_group_std, **settings)


def grpo_guard(
    *,
    kernel: Step = flow_sde_step,
    clip: float = 2e-6,
    spread: Callable[[Tensor], Tensor] = group_std,
    clamp: float = 5.0,
    trained_steps: TrainedSteps = all_but_last,
    steps_per_sample: StepsPerSample = None,
    updates: int = 2,
    loss: Callable[..., Any] = guarded_ppo,
) -> Algorithm:
    """GRPO-Guard (2510.22319): the ratio's bias removed and its scale made equal over steps, each step's loss divided by
    D. Needs a Gaussian kernel scored by its mean log-density. Published: clip 2e-6 or 4e-6, beta 0, lr 1e-4.
    No example: a preset."""
    return Algorithm(
        collect=collect_rollout(step=kernel, trained_steps=trained_steps),
        credit=advantage_credit(advantages=advantages_of_sum(spread=spread), clamp=clamp),
        objective=policy_gradient(kernel=kernel, loss=loss(clip=clip), steps_per_sample=steps_per_sample),
        behaviour=live,
        updates=require_count("updates", updates),
    )


def grpo_guard_as_published(**settings: Any) -> Algorithm:
    """`grpo_guard` with its code's bias, averaged over a micro-batch's states, not per sample. No example: a preset."""
    return grpo_guard(loss=guarded_ppo_as_published, **settings)


def cps_grpo(*, kernel: Step = cps_step, **settings: Any) -> Algorithm:
    """`flow_grpo` on coefficients-preserving sampling (2509.05952), eta .8, by the exact log-density.
    No example: a preset."""
    return flow_grpo(kernel=kernel, **settings)


def cps_grpo_as_published(**settings: Any) -> Algorithm:
    """`cps_grpo` scored as in its code, -mean (x_next - mean)^2: the ratio then differs per step.
    No example: a preset."""
    return cps_grpo(log_prob=cps_surrogate, **settings)


def flow_dppo(
    *,
    kernel: Step = flow_sde_step,
    radius: float = 1e-5,
    kl: KL = exact_kl,
    spread: Callable[[Tensor], Tensor] = batch_std,
    clamp: float = 5.0,
    trained_steps: TrainedSteps = first_half,
    steps_per_sample: StepsPerSample = 3,
    updates: int = 2,
) -> Algorithm:
    """Flow-DPPO (2606.11025): no ratio clip; a state whose step moved further than `radius` in KL, the way its advantage
    pushes, is dropped. 3 random steps of the noisier half per trajectory. Published: eta .7, 10 steps, 16 samples, lr 3e-4.
    No example: a preset."""
    return Algorithm(
        collect=collect_rollout(step=kernel, trained_steps=trained_steps),
        credit=advantage_credit(advantages=advantages_of_sum(spread=spread), clamp=clamp),
        objective=policy_gradient(
            kernel=kernel, loss=divergence_masked(radius=radius, kl=kl), steps_per_sample=steps_per_sample
        ),
        behaviour=live,
        updates=require_count("updates", updates),
    )


def flow_dppo_as_published(*, eta: float = 0.7, **settings: Any) -> Algorithm:
    """`flow_dppo` with its code's KL, whose sigma is clamped at t = .99 (`kl_clamped_sigma`): .28 of the exact one on the
    first of 10 steps with shift 3. eta: of the kernel and of that KL. No example: a preset."""
    return flow_dppo(kernel=partial(flow_sde_step, eta=eta), kl=kl_clamped_sigma(eta), **settings)


# ---- forward-process methods ------------------------------------------------------------------------------------------

slow_decay = partial(ramp, rate=0.001, cap=0.5)
"""DiffusionNFT's first published schedule of the behaviour policy's decay: .001 per optimizer step, up to .5."""
ocr_decay = partial(ramp, rate=0.0075, cap=0.999, flat=75)
"""Its second one (OCR): 0 for 75 optimizer steps, then .0075 per step, up to .999."""


def nft(
    *,
    beta: float = 1.0,
    decay: Callable[[int], float] = slow_decay,
    weight: Callable[[Tensor], Tensor] = inverse_abs_error,
    branches: Callable[..., Tensor] = nft_loss,
    loss_factor: float = 5.0,
    anchor: float = 1e-4,
    spread: Callable[[Tensor], Tensor] = batch_std,
    clip: float = 5.0,
    part: Callable[[Tensor], Tensor] | None = None,
    step: Step = dpm2_step,
    trained_steps: TrainedSteps = all_steps,
    steps_per_sample: StepsPerSample = None,
    updates: int = 1,
) -> Algorithm:
    """DiffusionNFT (2509.16117): ODE rollout of the *old* params, then regression of the forward process on a positive
    and a negative branch weighted by the optimality r; old params follow by an EMA of decay ramp(i).

    branches: `losses.nft`, `nft_positive`, `nft_negative` (the pure branches); part: `positive_part` or `negative_part`
    of the advantages (the published modes). Published: 24 samples, no guidance, loss x 5 + 1e-4 mean (v - v_ref)^2.
    No example: a preset.
    """
    return Algorithm(
        collect=collect_renoised(step=step, trained_steps=trained_steps),
        credit=optimality_credit(advantages=advantages_of_sum(spread=spread), clip=clip, part=part),
        objective=nft_regression(
            beta=beta,
            weight=weight,
            branches=branches,
            loss_factor=loss_factor,
            anchor=anchor,
            steps_per_sample=steps_per_sample,
        ),
        behaviour=lagging(decay),
        updates=require_count("updates", updates),
        needs_reference=anchor > 0,
    )


def nft_ocr(**settings: Any) -> Algorithm:
    """`nft` with the second published setting (OCR): beta .1, decay 0 for 75 optimizer steps, then .0075 per step up to
    .999, two updates per rollout. No example: a preset."""
    return nft(**{"beta": 0.1, "decay": ocr_decay, "updates": 2, **settings})


def nft_positive_only(**settings: Any) -> Algorithm:
    """`nft` in its published positive_only mode: of max(A, 0) (not the pure positive branch). No example: a preset."""
    return nft(part=positive_part, **settings)


def nft_negative_only(**settings: Any) -> Algorithm:
    """`nft` in its published negative_only mode: of min(A, 0) (not the pure negative branch). No example: a preset."""
    return nft(part=negative_part, **settings)


def awm(
    *,
    clip: float = 1e-4,
    score: MatchingScore = plain_matching,
    beta: float = 1e-4,
    spread: Callable[[Tensor], Tensor] = batch_std,
    clamp: float = 5.0,
    step: Step = euler_step,
    trained_steps: TrainedSteps = noisiest_nine_tenths,
    steps_per_sample: StepsPerSample = None,
    updates: int = 1,
) -> Algorithm:
    """AWM (2509.25050): the flow-matching error of the sample as log-probability, in a clipped ratio of old and new at the
    same (eps, t), plus beta x velocity KL to the reference.

    score: `plain_matching`, `time_weighted_matching(p)`, `huber_matching`, `generalised_huber_matching(.25)`. SD3.5 recipe:
    the last, clip 1, clamp 1, 16 samples, one update, 14 steps, lr 3e-4. No example: a preset.
    """
    return Algorithm(
        collect=collect_renoised(step=step, trained_steps=trained_steps),
        credit=advantage_credit(advantages=advantages_of_sum(spread=spread), clamp=clamp),
        objective=matching_ratio(clip=clip, score=score, beta=beta, steps_per_sample=steps_per_sample),
        behaviour=live,
        updates=require_count("updates", updates),
        needs_reference=beta > 0,
    )
