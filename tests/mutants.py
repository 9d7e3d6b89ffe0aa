"""Does the suite notice? Each mutant is one wrong line; the named tests must fail on a copy of the package that holds it.

    python tests/mutants.py [--only NAME ...] [--jobs 2]

First the unmutated copy must pass the same tests. Exit code 1 if that fails or if any mutant survives.
"""

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 240  # a mutant that hangs for this long is killed too
STRANGER = 99  # exit code where something else than the copy was imported
HEAVY = ["torch", "numpy", "pytest", "hypothesis", "beartype", "jaxtyping", "einops", "safetensors.torch"]


class Mutant(NamedTuple):
    """In diffrl/`file`, `old` (which occurs exactly once) becomes `new`; `tests` are the files that must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def mutants_of(file: str, tests: str, *rows: tuple[str, str, str]) -> list[Mutant]:
    return [Mutant(name, file, old, new, tuple(tests.split())) for name, old, new in rows]


CHECKS = mutants_of(
    "numbers.py",
    "test_checks.py",
    ("open_interval_closed", "or (open_low and number == low)", ""),
    ("a_bool_is_a_count", "None if isinstance(value, bool) else operator.index(value)", "operator.index(value)"),
) + mutants_of(
    "checks.py",
    "test_checks.py",
    (
        "time_through_float32",
        "torch.as_tensor(t, dtype=like.dtype, device",
        "torch.as_tensor(float(t) if not isinstance(t, Tensor) else t, device",
    ),
    ("equal_times_accepted", "(then < now).all()", "(then <= now + 1e-9).all()"),
    ("negative_time_accepted", "((value >= 0) & (value <= 1)).all()", "(value <= 1).all()"),
    ("half_not_promoted", "    dtype = torch.float32\n", "    dtype = torch.bfloat16\n"),
    (
        "shapes_may_broadcast",
        "if len({tuple(x.shape) for x in tensors.values()}) != 1:",
        "if len({x.ndim for x in tensors.values()}) != 1:",
    ),
    ("rows_of_any_length", "if tuple(x.shape) != (b,):", "if x.ndim != 1:"),
    ("missing_keys_accepted", "if a.keys() != b.keys():", "if a.keys() - b.keys():"),
)

SAMPLING = [
    *mutants_of(
        "kernels.py",
        "test_kernels.py",
        ("interpolate_reversed", "return (1 - t) * x_0 + t * noise", "return t * x_0 + (1 - t) * noise"),
        ("predict_x_0_sign", "return x_t - column(time_rows(\"t\", t, x_t), x_t) * v", "return x_t + column(time_rows(\"t\", t, x_t), x_t) * v"),
        ("predict_noise_without_1_minus_t", "(1 - column(time_rows(\"t\", t, x_t), x_t)) * v", "column(time_rows(\"t\", t, x_t), x_t) * v"),
        ("euler_uphill", "return x_t - column(now - then, x_t) * v,", "return x_t + column(now - then, x_t) * v,"),
        ("flow_sde_without_its_first_step_rule", "torch.where(now == 1, then, now)", "then"),
        ("flow_sde_variance_without_delta", "eta * torch.sqrt(now * delta / rest)", "eta * torch.sqrt(now / rest)"),
        ("flow_sde_score_sign", "on_x = 1 - s2 * delta", "on_x = 1 + s2 * delta"),
        ("dance_without_its_score", "pull = eta**2 / 2 * delta / now", "pull = 0 * eta**2 / 2 * delta / now"),
        ("dance_eta_not_squared", "pull = eta**2 / 2", "pull = eta / 2"),
        ("cps_without_cosine", "kept = then * math.cos(eta * math.pi / 2)", "kept = then * math.sqrt(1 - eta**2)"),
        ("latent_mean_in_half", "(x,) = promote(x)\n    return x.flatten(1).mean(1)", "return x.flatten(1).mean(1)"),
        ("latent_sum_of_the_last_axis", "x.flatten(1).sum(1)", "x.flatten(1).sum(1) / x.shape[1]"),
        ("log_prob_without_normaliser", " - torch.log(safe) - math.log(2 * math.pi) / 2", ""),
        ("log_prob_without_the_2", "/ (2 * safe**2)", "/ safe**2"),
        ("log_prob_0_where_deterministic", "torch.where(std > 0, log_prob, torch.full_like(log_prob, math.nan))", "torch.where(std > 0, log_prob, torch.zeros_like(log_prob))"),
        ("kl_without_the_2", "/ (2 * column(_positive(std), mean_p) ** 2)", "/ column(_positive(std), mean_p) ** 2"),
        ("negative_std_accepted", "(torch.isfinite(std) & (std >= 0)).all()", "torch.isfinite(std).all()"),
        ("dpm2_correction_sign", "return mean + torch.where(column(second", "return mean - torch.where(column(second"),
        ("dpm2_ignores_its_past", "    if past is None:\n        return euler_step", "    if True:\n        return euler_step"),
        ("dpm2_ratio_inverted", "((ahead - here) / (2 * (here - past)))", "((here - past) / (2 * (ahead - here)))"),
        ("dpm2_correction_not_halved", "(2 * (here - past))", "(here - past)"),
        ("dpm2_gain_without_1_over_t", "column((now - then) / now * _half", "column((now - then) * _half"),
        ("dpm2_steps_in_time", "-torch.logit(torch.where(where,", "-1 * (torch.where(where,"),
        ("dpm2_second_order_to_the_end", "(before < 1) & (then > 0)", "before < 1"),
        ("dpm2_second_order_without_a_past", "(before < 1) & (then > 0)", "then > 0"),
        ("dpm2_ratio_in_float32", ".double(), stand_in)", ".float(), stand_in.float())"),
        ("dpm2_nan_of_a_missing_past", "torch.where(column(second, x_t), gain * moved, torch.zeros_like(moved))", "column(second, x_t) * gain * moved"),
        ("dpm2_past_time_unchecked", "((before > now) & ((before", "(((before"),
        ("dpm2_past_beyond_noise", "((before <= 1) | (before == math.inf))", "(before == before)"),
        ("dpm2_past_may_broadcast", "require_batch(x_t=x_t, v=v, past_x_0=past.x_0)", "require_batch(x_t=x_t, v=v)"),
        ("dpm2_past_not_promoted", "return promote(x_t, v, past.x_0)", "return x_t, v, past.x_0"),
    ),
    *mutants_of(
        "sampling.py",
        "test_sampling.py",
        ("shift_twice", "    t = t.to(torch.promote_types(dtype or", "    t = shift * t / (1 + (shift - 1) * t)\n    t = t.to(torch.promote_types(dtype or"),
        ("grid_above_1", "shift * u / (shift * u + (1 - u))", "shift * u / (1 + (shift - 1) * u)"),
        ("seed_plus_stream", "key=(stream << 64) + k", "key=stream + k"),
        ("stream_ignored", "key=(stream << 64) + k", "key=k"),
        ("noise_from_the_global_generator", "draws = [\n        np.random.Generator(np.random.Philox(key=(stream << 64) + k))", "draws = [\n        np.random.RandomState(np.random.randint(2**31))"),
        ("sample_seeds_ignore_the_iteration", "_hash63(seed, iteration, int(p), m)", "_hash63(seed, 0, int(p), m)"),
        ("sample_seeds_by_position", "for m in range(members)] for p in prompts]", "for m in range(members)] for p, _ in enumerate(prompts)]"),
        ("seeded_start_in_float32", ".to(torch.promote_types(times.dtype, torch.float32))\n    elif", "\n    elif"),
        ("steps_reuse_stream_0", "stream=i + 1)", "stream=i)"),
        ("scored_before_storing", "transition_log_prob(x_next, mean, std)))", "transition_log_prob(x_next.bfloat16(), mean, std)))"),
        ("velocity_stored_after_the_step", "rows.append((x, x_next, v, std,", "rows.append((x_next, x_next, v, std,"),
        ("nan_velocity_passes", "    if bool(bad.any()):\n", "    if bool(bad.all()):\n"),
        ("everything_is_kept_alive", "            x = x_next\n", "            rows_alive = (*rows_alive, x) if i else (x,)\n            x = x_next\n"),
        ("noise_alone_is_enough", "                if seeds is None:\n", "                if seeds is None and i > 1:\n"),
        ("a_short_list_of_kernels", "    if len(kernels) != n:\n", "    if len(kernels) > n:\n"),
        ("keep_with_repeats", "any(a >= b for a, b in itertools.pairwise(kept))", "any(a > b for a, b in itertools.pairwise(kept))"),
        ("gradient_through_the_rollout", "    with torch.no_grad():\n        for i, kernel", "    with torch.enable_grad():\n        for i, kernel"),
        ("t_next_is_t", "grid[index], grid[index + 1], std", "grid[index], grid[index], std"),
        ("window_takes_the_last_step", "if start + size > steps - 1:", "if start + size > steps:"),
        ("windows_do_not_roll_back", "i // every % places * stride", "min(i // every, places - 1) * stride"),
        ("windows_move_every_time", "i // every % places", "i % places"),
        ("guidance_without_the_unconditional", "return v_uncond + scale * (v_cond - v_uncond)", "return v_cond + scale * (v_cond - v_uncond)"),
        ("guidance_in_half_precision", "v_cond, v_uncond = promote(v_cond, velocity(params, x_t, t, {**given, **twins}))", "v_uncond = velocity(params, x_t, t, {**given, **twins})"),
        ("unconditional_is_conditional", "{**given, **twins}", "{**twins, **given}"),
        ("chunks_share_the_first_condition", "_rows(cond, i, i + size)", "_rows(cond, 0, len(x_t[i : i + size]))"),
        ("memory_survives_noise", "past = _past(x, v, t, std) if", "past = _past(x, v, t, 0 * std) if"),
        ("memory_survives_noise_in_a_row", "torch.where(noisy, torch.full_like(std, math.inf), t)", "t.expand_as(std)"),
        ("memory_ends_for_all_rows", "if bool(noisy.all()):", "if bool(noisy.any()):"),
        ("memory_is_the_state", "Past(predict_x_0(x, v, t), ", "Past(x, "),
        ("memory_with_the_next_time", "_past(x, v, t, std) if", "_past(x, v, t_next, std) if"),
        ("memory_given_to_nobody", "{\"past\": past} if remembers[i] else {}", "{}"),
        ("memory_starts_late", "if remembers[i + 1] else None", "if remembers[i + 1] and remembers[i] else None"),
        ("memory_lost_in_wrappers", "inspect.signature(kernel)", "inspect.signature(kernel, follow_wrapped=False)"),
        ("memory_for_positional_arguments", "parameter is not None and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)", "parameter is not None"),
        ("nan_std_accepted", "(torch.isfinite(std) & (std >= 0)).all()", "((std >= 0) | std.isnan()).all()"),
        ("negative_kernel_std_accepted", "(torch.isfinite(std) & (std >= 0)).all()", "torch.isfinite(std).all()"),
        ("mix_window_one_place_less", "(steps - 1 - len(first)) // stride + 1", "max((steps - 1 - len(first)) // stride, 1)"),
        ("mix_window_one_place_more", "(steps - 1 - len(first)) // stride + 1", "(steps - len(first)) // stride + 1"),
        ("mix_window_moves_by_one", "i // every % places * stride", "i // every % places"),
        ("mix_window_moves_before_its_time", "i // every % places", "(i + 1) // every % places"),
        ("mix_windows_skip_the_first", "for i in itertools.count())", "for i in itertools.count(1))"),
        ("mix_windows_refuse_late", "    mix_window(0, steps=steps, size=size, stride=stride, every=every)\n    return", "    return"),
        ("random_window_of_the_whole_grid", "% (max(steps // 2 - size, 0) + 1)", "% (steps - size)"),
        ("random_window_one_start_less", "% (max(steps // 2 - size, 0) + 1)", "% max(steps // 2 - size, 1)"),
        ("random_window_for_ever_the_same", "np.random.SeedSequence(seed, spawn_key", "np.random.SeedSequence(0, spawn_key"),
        ("random_window_of_another_stream", "spawn_key=(1,)", "spawn_key=(2,)"),
        ("random_window_from_the_global_generator", "int(word) % (max(steps // 2 - size, 0) + 1)", "np.random.randint(max(steps // 2 - size, 0) + 1)"),
    ),
]  # fmt: skip

GUIDANCE = mutants_of(
    "guidance.py",
    "test_guidance.py",
    ("wrong_sign_of_the_target", "return (v_old - direction).detach()", "return (v_old + direction).detach()"),
    ("target_carries_gradient", "return (v_old - direction).detach()", "return v_old - direction"),
    ("dead_by_std", "(top == low)", "(rewards.std(1) <= 0)"),
    ("a_group_without_rewards_lives", "(finite.sum(1) < 2) | (top == low)", "(top == low)"),
    ("unbiased_group_std", "return (centred**2).nanmean(1, keepdim=True).sqrt()", "return ((centred**2).nansum(1, keepdim=True) / (len(rewards[0]) - 1)).sqrt()"),
    ("batch_std_about_group_means", "centred = rewards - rewards.nanmean()\n", "centred = rewards - rewards.nanmean(1, keepdim=True)\n"),
    ("no_spread_adds_eps", "if spread is not no_spread:", "if True:"),
    ("a_spread_per_row_meets_the_members", "shape[-1:] not in ((), (1,)) or", "False or"),
    ("advantages_without_the_mean", "centred / scale, 0.0)", "values / scale, 0.0)"),
    ("missing_reward_gets_minus_the_mean", "torch.where(finite & ~dead[:, None], centred", "torch.where(~dead[:, None], centred.nan_to_num(-1.0)"),
    ("optimality_unclipped", "(advantages / clip).clamp(-1, 1)", "(advantages / clip).clamp(-2, 2)"),
    ("covariance_not_centred", "return (weight * (x - x.mean(0))).mean(0),", "return ((weight + r.mean()) * x).mean(0),"),
    ("covariance_over_k_minus_1", "(weight * (x - x.mean(0))).mean(0), (x**2)", "(weight * x).sum(0) / max(len(r) - 1, 1), (x**2)"),
    ("covariance_over_missing_samples", "r, x = rewards[finite], x_0[finite].detach().double()", "r, x = rewards.nan_to_num(0), x_0.detach().double().nan_to_num(0)"),
    ("an_absolute_threshold", "> DEAD_RMS * std * size", "> DEAD_RMS"),
    ("no_threshold", "> DEAD_RMS * std * size", "> 0"),
    ("norm_instead_of_rms", "rms = (c**2).mean(tuple(axes), keepdim=True).sqrt()", "rms = (c**2).sum(tuple(axes), keepdim=True).sqrt()"),
    ("rms_axes_ignored", ".mean(tuple(axes), keepdim=True)", ".mean()"),
    ("normalised_per_sample_first", "    c, size = ", "    x_0 = x_0 / x_0.flatten(2).norm(dim=2).clamp_min(1e-9).reshape(*x_0.shape[:2], *[1] * latent_axes)\n        c, size = "),
    ("nan_latents_accepted", "if bool((finite & ~usable).any()):", "if False:"),
    ("losers_win", "(torch.sign(values[group, a] - values[group, b]) + 1) / 2", "(torch.sign(values[group, b] - values[group, a]) + 1) / 2"),
    ("a_tie_has_a_winner", "won = (torch.sign(values[group, a] - values[group, b]) + 1) / 2", "won = (values[group, a] >= values[group, b]).to(values)"),
    ("always_the_same_pairs", "order = torch.where(finite, draws, math.inf)", "order = torch.where(finite, 0 * draws, math.inf)"),
    ("pairs_with_missing_samples", "zip(order, finite.sum(1).tolist())", "zip(order, [finite.shape[1]] * len(finite))"),
)  # fmt: skip

LOSSES = mutants_of(
    "losses.py",
    "test_losses.py",
    ("velocity_matching_is_a_sum", "return latent_mean((v - target) ** 2)", "return latent_mean((v - target) ** 2) * v[0].numel()"),
    ("weight_carries_gradient", "latent_mean(error.detach().abs())", "latent_mean(error.abs())"),
    ("weight_unbounded", ".clamp_min(1e-5)", ".clamp_min(1e-12)"),
    ("flat_weight_of_2", "return error.new_ones(", "return 2 * error.new_ones("),
    ("v_old_carries_gradient", "t, v_old = time_rows(\"t\", t, x_t), v_old.detach()", "t = time_rows(\"t\", t, x_t)"),
    ("minus_branch_is_plus", "predict_x_0(x_t, v_old - shift, t) - x_0", "predict_x_0(x_t, v_old + shift, t) - x_0"),
    ("nft_without_1_over_beta", "return (r * plus + (1 - r) * minus) / beta", "return r * plus + (1 - r) * minus"),
    ("nft_positive_weighs_1", "return r * plus / beta", "return plus / beta"),
    ("nft_negative_weighs_r", "return (1 - r) * minus / beta", "return r * minus / beta"),
    ("nan_optimality_accepted", "if not bool(((r >= 0) & (r <= 1)).all()):", "if bool(((r < 0) | (r > 1)).any()):"),
    ("optimistic_clip", "return torch.maximum(-advantages * ratio,", "return torch.minimum(-advantages * ratio,"),
    ("clip_one_sided", "ratio.clamp(1 - clip, 1 + clip)", "ratio.clamp(0, 1 + clip)"),
    ("old_log_prob_carries_gradient", "_clipped(log_prob - log_prob_old.detach(), advantages", "_clipped(log_prob - log_prob_old, advantages"),
    ("guard_without_its_bias", "(log_prob - log_prob_old.detach() + bias) * std", "(log_prob - log_prob_old.detach()) * std"),
    ("guard_without_std", "(log_prob - log_prob_old.detach() + bias) * std", "(log_prob - log_prob_old.detach() + bias)"),
    ("guard_accepts_deterministic_steps", "(torch.isfinite(std) & (std > 0)).all()", "torch.isfinite(std).all()"),
    ("guard_bias_of_the_micro_batch", "bias = latent_mean((mean - mean_old.detach()) ** 2)", "bias = ((mean - mean_old.detach()) ** 2).mean()"),
    ("awm_target_sign", "target = (noise - x_0).detach()", "target = (x_0 - noise).detach()"),
    ("awm_maximises_the_error", "-velocity_matching(v, target), -velocity", "velocity_matching(v, target), velocity"),
    ("masked_mean_divides_by_kept", "/ max(len(values), 1)", "/ max(float((weight > 0).sum()), 1)"),
    ("masked_by_multiplication", "kept = torch.where(weight > 0, values, torch.zeros_like(values))", "kept = values"),
    ("weights_as_a_mask", "return (kept * weight).sum()", "return kept.sum()"),
    ("zero_advantage_times_infinity", "    log_ratio = torch.where(advantages == 0, torch.zeros_like(log_ratio), log_ratio)\n", ""),
    ("zero_advantage_in_the_value_alone", "    log_ratio = torch.where(advantages == 0, torch.zeros_like(log_ratio), log_ratio)\n    ratio = torch.exp(torch.where(settled, torch.full_like(log_ratio, beyond), log_ratio))\n", "    ratio = torch.exp(torch.where(settled, torch.full_like(log_ratio, beyond), log_ratio)).masked_fill(advantages == 0, 1.0)\n"),
    ("a_negative_advantage_is_none", "torch.where(advantages == 0, torch", "torch.where(advantages <= 0, torch"),
    ("overflow_beyond_the_clip", "(advantages > 0) & (log_ratio > beyond)", "(advantages > 0) & (log_ratio > math.inf)"),
    ("settled_inside_the_clip", "math.log1p(clip) + 1", "math.log1p(clip) / 2"),
    ("settled_against_the_advantage", "(advantages > 0) & (log_ratio > beyond)", "log_ratio > beyond"),
    ("a_weight_of_any_rank", "if w.ndim and (w.ndim != error.ndim or any(n not in (1, m) for n, m in zip(w.shape, error.shape, strict=True))):", "if w.ndim and any(n not in (1, m) for n, m in zip(w.shape, error.shape)):"),
    ("a_weight_of_any_size", "w.ndim != error.ndim or any(n not in (1, m)", "w.ndim != error.ndim or any(n > m"),
)  # fmt: skip

TRUST_REGION = mutants_of(
    "trust_region.py",
    "test_trust_region.py",
    ("kl_proxy_of_the_sum", "return transition_kl(mean, mean_old, std)", "return transition_kl(mean, mean_old, std) * v[0].numel()"),
    ("kl_proxy_is_an_mse", "return transition_kl(mean, mean_old, std)", "return latent_mean((v - v_old) ** 2)"),
    ("kl_proxy_old_carries_gradient", "promote(v, v_old.detach())", "promote(v, v_old)"),
    ("kl_proxy_at_deterministic_steps", "    if not bool((std > 0).all()):\n", "    if not bool((std > 0).any()):\n"),
    ("mask_open_at_the_radius", "return ~((kl.detach() >= radius) & outward)", "return ~((kl.detach() > radius) & outward)"),
    ("mask_by_radius_alone", "return ~((kl.detach() >= radius) & outward)", "return ~(kl.detach() >= radius)"),
    ("mask_of_the_guidance_alone", "(v - v_old) * (target - v)) > 0", "(v - v_old) * (target - v_old)) > 0"),
    ("mask_inward_updates", "(target - v)) > 0", "(target - v)) < 0"),
    ("mask_zero_drift", "(target - v)) > 0", "(target - v)) >= 0"),
    ("divergence_mask_of_one_side", "((ratio > 1) & (advantages > 0)) | ((ratio < 1) & (advantages < 0))", "(ratio > 1) & (advantages > 0)"),
    ("divergence_mask_at_ratio_1", "((ratio > 1) & (advantages > 0))", "((ratio >= 1) & (advantages > 0))"),
    ("ema_swapped", "decay * old[name].detach() + (1 - decay) * new[name].detach()", "decay * new[name].detach() + (1 - decay) * old[name].detach()"),
    ("ema_in_place", "decay * old[name].detach() + (1 - decay) * new[name].detach()", "old[name].detach().mul_(decay).add_((1 - decay) * new[name].detach())"),
    ("ema_aliases_at_its_ends", "one[name].detach().clone()", "one[name].detach()"),
    ("ramp_not_delayed", "min(rate * (i - flat), cap)", "min(rate * i, cap)"),
    ("ramp_without_cap", "min(rate * (i - flat), cap)", "rate * (i - flat)"),
)  # fmt: skip

THEORY = [
    *mutants_of(
        "guidance.py",
        "test_theory.py",
        ("theory:covariance_sign", "weight = (r - r.mean())", "weight = (r.mean() - r)"),
        ("theory:wrong_sign_of_the_target", "return (v_old - direction).detach()", "return (v_old + direction).detach()"),
    ),
    *mutants_of(
        "losses.py",
        "test_theory.py",
        ("theory:branches_swapped", "return _weighted(plus, weight), _weighted(minus, weight), r", "return _weighted(minus, weight), _weighted(plus, weight), r"),
        ("theory:shift_without_beta", "shift = beta * (v - v_old)", "shift = v - v_old"),
    ),
    *mutants_of(
        "trust_region.py",
        "test_theory.py",
        ("theory:ema_lag", "decay * old[name].detach() + (1 - decay) * new", "decay**2 * old[name].detach() + (1 - decay**2) * new"),
    ),
]  # fmt: skip

ALGORITHMS = [
    *mutants_of(
        "rollouts.py",
        "test_algorithms.py",
        ("noisiest_are_the_last", "        return range(count)\n", "        return range(steps - count, steps)\n"),
        ("subset_unsorted", "[:, :size].sort(dim=1).values", "[:, :size]"),
        ("subset_shared_by_all", "seeded_noise(seeds, (candidates,), stream=SUBSET_STREAM)", "seeded_noise(seeds[:1].expand_as(seeds), (candidates,), stream=SUBSET_STREAM)"),
        ("prompts_interleaved", "torch.arange(len(seeds), device=seeds.device).repeat_interleave(seeds.shape[1])", "torch.arange(len(seeds), device=seeds.device).repeat(seeds.shape[1])"),
        ("collect_keeps_everything", "keep=kept", "keep=None"),
    ),
    *mutants_of(
        "credits.py",
        "test_algorithms.py",
        ("credit_per_sample_member_major", "value.repeat_interleave(k, 0)", "value.repeat(k, *[1] * (value.ndim - 1))"),
        ("credit_of_missing_samples", "found.alive, torch.isfinite(values))", "found.alive, torch.isfinite(torch.zeros_like(values)))"),
        ("credit_ignores_scale", "aggregate_direction(values, x_0, scale=scale,", "aggregate_direction(values, x_0,"),
        ("one_pairing_for_ever", ".manual_seed(int(seeds[0]) % 2**63)", ".manual_seed(0)"),
        ("best_against_second_best", "zip(order[: len(order) // 2], order[::-1])", "zip(order[: len(order) // 2], order[len(order) // 2 :])"),
    ),
    *mutants_of(
        "states.py",
        "test_algorithms.py",
        ("states_step_major", "rows = torch.arange(b, device=columns.device).repeat_interleave(len(columns) // max(b, 1))", "rows = torch.arange(b, device=columns.device).repeat(len(columns) // max(b, 1))"),
    ),
    *mutants_of(
        "objectives.py",
        "test_algorithms.py",
        ("objective_reads_x_next", "direction_of(window, s))\n        v = velocity(params, s.x_t,", "direction_of(window, s))\n        v = velocity(params, s.x_next,"),
        ("objective_without_mask", "loss_weights(window, inside & trained, s.rows)", "loss_weights(window, trained, s.rows)"),
        ("objective_trains_dead_groups", "loss_weights(window, inside & trained, s.rows)", "loss_weights(window, inside, s.rows)"),
        ("objective_toward_live_params", "guided_velocity(s.v_old, direction_of", "guided_velocity(velocity(params, s.x_t, s.t, s.cond), direction_of"),
        ("direction_reaches_v_with_a_plus", "direction, steps = credit_of(", "direction, steps = -credit_of("),
        ("masked_fraction_of_all_states", "share_of(~inside, trained)", "share_of(~inside, torch.ones_like(trained))"),
        ("guidance_force_is_net", "return v + (target - v_old)", "return target"),
        ("reference_kernel_ignored", "s.t_next, step=reference_kernel)", "s.t_next)"),
    ),
    *mutants_of(
        "algorithms.py",
        "test_algorithms.py",
        ("art_ignores_its_radius", "            radius=radius,\n", "            radius=1e-5,\n"),
        ("art_flash_trains_everything", "trained_steps=_noisiest(noisiest)", "trained_steps=all_steps"),
        ("art_pairwise_on_rewards", "return art(labels=pairing, **settings)", "return art(**settings)"),
        ("behaviour_never_moves", "    return params\n", "    return behaviour\n"),
    ),
]  # fmt: skip

OBJECTIVES = [
    *mutants_of(
        "states.py",
        "test_states.py",
        ("states:one_subset_for_all", "subset_of_steps(tr.seeds, s, size)", "subset_of_steps(0 * tr.seeds, s, size)"),
        ("states:a_function_is_told_how_many_samples", "steps_per_sample(s) if callable(steps_per_sample)", "steps_per_sample(b) if callable(steps_per_sample)"),
        ("states:a_function_may_say_0", "    require_steps_per_sample(size)\n", ""),
        ("states:t_next_is_t", "t_next=tr.t_next[columns]", "t_next=tr.t[columns]"),
        ("states:condition_of_another_sample", "value[rows.to(value.device)]", "value[rows.flip(0).to(value.device)]"),
        ("states:x_0_of_another_sample", "x_0=tr.x_0[rows]", "x_0=tr.x_0[rows.flip(0)]"),
        ("states:errors_become_0", "usable = rewarded[s.rows] | finite", "usable = finite"),
        ("states:missing_samples_become_0", "usable = rewarded[s.rows] | finite", "usable = rewarded[s.rows]"),
        ("states:only_x_t_is_looked_at", "all(1) for x in latents]", "all(1) for x in latents[:1]]"),
        ("states:0_by_multiplication", "torch.where(column(usable, x), x, 0.0)", "x * column(usable, x)"),
        ("states:has_reward_by_the_rewards_alone", "window.credit.get(\"has_reward\", torch.isfinite(window.rewards))", "torch.isfinite(window.rewards)"),
        ("states:weight_ignored", "keep * weight[rows]", "keep"),
        ("states:weight_by_state", "keep * weight[rows]", "keep * weight[rows.flip(0)]"),
        ("states:share_of_all", "(what & among).sum()", "what.sum()"),
        ("states:drift_of_all_states", "** 2), usable)", "** 2), usable | True)"),
        ("states:steps_of_unusable_states", "here = (s.columns == j) & usable", "here = s.columns == j"),
        ("states:steps_are_summed", "float(values.detach()[among].mean())", "float(values.detach()[among].sum())"),
        ("states:means_of_one_each", "int(among.sum()))\n\n\ndef share_of", "1)\n\n\ndef share_of"),
        ("states:shares_of_all", "int(among.sum()))\n\n\ndef drift_rms", "len(among))\n\n\ndef drift_rms"),
        ("states:reference_at_other_states", "velocity(window.reference, s.x_t,", "velocity(window.reference, s.x_next,"),
        ("states:reference_carries_gradient", "with torch.no_grad():", "with torch.enable_grad():"),
    ),
    *mutants_of(
        "policy_gradients.py",
        "test_policy_gradients.py",
        ("policy:kl_over_delta_squared", "std / torch.sqrt(delta)", "std / delta"),
        ("policy:sigma_clamped_elsewhere", "t.clamp_max(0.99)", "t.clamp_max(0.999)"),
        ("policy:surrogate_normalised", "return -velocity_matching(x_next, mean)", "return -velocity_matching(x_next, mean) / (2 * std**2)"),
        ("policy:ppo_of_the_default_clip", "clipped_ratio(q.log_prob, q.log_prob_old, q.advantages, clip=clip)", "clipped_ratio(q.log_prob, q.log_prob_old, q.advantages)"),
        ("policy:clip_fraction_of_the_wrong_side", "(ratio < 1 - clip) & (advantages < 0)", "(ratio < 1 - clip) & (advantages > 0)"),
        ("policy:clip_fraction_of_all_outside", "float((up | down)", "float(((ratio - 1).abs() > clip)"),
        ("policy:guard_not_over_delta", "return values, 1 / q.delta, clip_fraction(ratio,", "return values, torch.ones_like(values), clip_fraction(ratio,"),
        ("policy:guard_reports_the_biased_ratio", "(q.log_prob.detach() - q.log_prob_old + bias) * q.std)", "(q.log_prob.detach() - q.log_prob_old) * q.std)"),
        ("policy:published_guard_per_sample", "bias = ((q.mean - q.mean_old.detach()) ** 2 / (2 * column(q.std, q.mean) ** 2)).mean()", "bias = latent_mean((q.mean - q.mean_old.detach()) ** 2 / (2 * column(q.std, q.mean) ** 2))"),
        ("policy:published_guard_not_over_delta", "return values, 1 / q.delta, clip_fraction(torch", "return values, torch.ones_like(values), clip_fraction(torch"),
        ("policy:divergence_drops_nothing", "torch.exp(exponent), keep, metrics", "torch.exp(exponent), torch.ones_like(keep), metrics"),
        ("policy:divergence_is_ascended", "return -q.advantages * torch.exp(exponent)", "return q.advantages * torch.exp(exponent)"),
        ("policy:divergence_of_another_kl", "divergence = kl(q.mean.detach()", "divergence = exact_kl(q.mean.detach()"),
        ("policy:dropped_rows_overflow", "torch.where(keep & (q.advantages != 0),", "torch.where(q.advantages != 0,"),
        ("policy:rows_that_say_nothing_overflow", "torch.where(keep & (q.advantages != 0),", "torch.where(keep,"),
        ("policy:penalty_dropped_with_the_loss", "            keep = torch.ones_like(values)\n", "            keep = (keep > 0).to(values)\n"),
        ("policy:penalty_unweighs_the_loss", "torch.where(keep > 0, values * keep, 0.0) + beta", "values + beta"),
        ("policy:penalty_toward_the_old_policy", "kernel(s.x_t, reference_velocity(velocity, window, s),", "kernel(s.x_t, s.v_old,"),
        ("policy:steps_without_noise_pass", "if not bool((s.std > 0).all()) or not bool((std > 0).all()):", "if False:"),
        ("policy:any_kernel_passes", "rtol=1e-4, atol=0", "rtol=1e-1, atol=0"),
        ("policy:surrogate_against_the_exact_one", "old = s.log_prob if log_prob is transition_log_prob else log_prob(s.x_next, mean_old, std)", "old = s.log_prob"),
        ("policy:scored_at_x_t", "now = log_prob(s.x_next, mean, std)", "now = log_prob(s.x_t, mean, std)"),
        ("policy:states_without_numbers_moved", "torch.where(column(usable, v), s.v_old, v)", "s.v_old"),
        ("policy:nan_log_probs_of_missing_samples", "torch.where(usable, old.to(mean), now.detach())", "old.to(mean)"),
        ("policy:missing_samples_are_penalised", "rewarded[s.rows] * keep", "(rewarded[s.rows] | True) * keep"),
        ("policy:output_grad_unweighted", "values * weight, 0.0).sum()", "values, 0.0).sum()"),
        ("policy:deviations_cancel", "gap = (q.ratio.detach() - 1).abs()", "gap = q.ratio.detach() - 1"),
        ("policy:delta_is_t", "delta=(s.t - s.t_next).to(mean)", "delta=s.t.to(mean)"),
        ("policy:every_step_is_trained", "window_states(window, steps_per_sample=steps_per_sample)", "window_states(window)"),
    ),
    *mutants_of(
        "objectives.py",
        "test_objectives.py",
        ("objectives:the_first_step_s_direction", "direction[s.rows, s.columns]", "direction[s.rows, 0 * s.columns]"),
        ("objectives:radius_told_of_nan_states", "radius(s.columns, torch.where(usable, kl, torch.nan))", "radius(s.columns, kl)"),
        ("objectives:radius_by_sample", "limit = radius(s.columns,", "limit = radius(s.rows,"),
        ("objectives:kl_times_the_radius", "kl / limit", "kl * limit"),
        ("objectives:weight_ignored", "loss_weights(window, inside & trained, s.rows)", "inside & trained"),
        ("objectives:nft_without_its_factor", "values = loss_factor * branches(", "values = branches("),
        ("objectives:nft_of_beta_1", "r.to(s.x_t)[s.rows], beta=beta,", "r.to(s.x_t)[s.rows], beta=1.0,"),
        ("objectives:nft_weight_ignored", "beta=beta, weight=weight)", "beta=beta)"),
        ("objectives:nft_about_itself", "branches(v, s.v_old, s.x_t", "branches(v, v.detach(), s.x_t"),
        ("objectives:nft_optimality_of_all", "(r[rewarded] if bool(rewarded.any()) else r), int", "r, int"),
        ("objectives:nft_anchor_of_1", "values + anchor * away", "values + away"),
        ("objectives:nft_on_missing_samples", "metrics[\"anchor\"] = mean_over(away, usable)\n        return values, loss_weights(window, rewarded[s.rows], s.rows)", "metrics[\"anchor\"] = mean_over(away, usable)\n        return values, loss_weights(window, rewarded[s.rows] | True, s.rows)"),
        ("objectives:path_backwards", "path = (s.x_t - s.x_0) /", "path = (s.x_0 - s.x_t) /"),
        ("objectives:path_not_over_t", "path = (s.x_t - s.x_0) / column(s.t, s.x_t)", "path = s.x_t - s.x_0"),
        ("objectives:time_weight_of_power_1", "-error * t**power", "-error * t"),
        ("objectives:huber_without_its_offset", "(torch.sqrt(error + 1e-10) - 1e-5)", "torch.sqrt(error + 1e-10)"),
        ("objectives:ghuber_not_over_its_power", "-t / power *", "-t *"),
        ("objectives:ratio_to_itself", "for u in (v, s.v_old))", "for u in (v, v.detach()))"),
        ("objectives:other_scores_of_the_default_clip", "clipped_ratio(now, old, a, clip=clip)", "clipped_ratio(now, old, a)"),
        ("objectives:awm_of_the_default_clip", "noise, s.x_0, a, clip=clip)", "noise, s.x_0, a)"),
        ("objectives:velocity_kl_of_1", "values + beta * away", "values + away"),
        ("objectives:awm_on_missing_samples", "metrics[\"kl_velocity\"] = mean_over(away, usable)\n        return values, loss_weights(window, rewarded[s.rows], s.rows)", "metrics[\"kl_velocity\"] = mean_over(away, usable)\n        return values, loss_weights(window, rewarded[s.rows] | True, s.rows)"),
    ),
    *mutants_of(
        "trust_region.py",
        "test_objectives.py",
        ("radius:of_the_current_update", "zip(*self.history, strict=True)", "zip(*self.history, (columns, seen), strict=True)"),
        ("radius:remembers_one_update_more", "[-self.updates :]", "[-self.updates - 1 :]"),
        ("radius:without_a_floor", "max(float(torch.quantile(values, self.q)), self.floor)", "float(torch.quantile(values, self.q))"),
        ("radius:counts_on_policy_updates", "float(seen.max()) >= self.floor", "float(seen.max()) >= 0"),
        ("radius:an_update_never_ends", "told, self._current = self._current, []", "told = self._current"),
        ("radius:of_all_steps", "values = old[1][old[0] == j]", "values = old[1]"),
        ("radius:starts_at_the_floor", "torch.full_like(seen, self.first)", "torch.full_like(seen, self.floor)"),
        ("radius:counts_micro_batches", "        self._current.append((columns[usable], seen[usable]))", "        self._current.append((columns[usable], seen[usable]))\n        self.advance()"),
        ("radius:counts_infinite_kls", "usable = torch.isfinite(seen)", "usable = ~seen.isnan()"),
    ),
]  # fmt: skip

LOOP = [
    *mutants_of(
        "loop.py",
        "test_loop.py",
        ("loop:no_clipping", "torch.inf if grad_clip is None else grad_clip)", "torch.inf)"),
        ("loop:gradients_pile_up", "        p.grad = None\n    total = 0.0", "        pass\n    total = 0.0"),
        ("loop:micro_batches_unweighted", "value = masked_mean(loss, keep) * (share / whole)", "value = masked_mean(loss, keep)"),
        ("loop:live_params_roll_out", "collect(at_i, behaviour, cond", "collect(at_i, model.params, cond"),
        ("loop:same_seeds_every_iteration", "sample_seeds(plan.seed, i, chosen,", "sample_seeds(plan.seed, 0, chosen,"),
        ("loop:steps_on_nan", "    if not bool(torch.isfinite(norm)):\n", "    if False:\n"),
        ("loop:behaviour_counts_iterations", "(i + 1) * len(windows))", "i + 1)"),
    ),
    *mutants_of(
        "windows.py",
        "test_windows.py",
        ("windows:overlap", "(member + prompt) % updates == u", "(member + prompt) % updates <= u"),
        ("windows:extra_sample_to_the_first", "(member + prompt) % updates == u", "member % updates == u"),
        ("windows:prompts_repeat", "order[place * g : (place + 1) * g]", "order[:g]"),
        ("windows:condition_of_another_prompt", "value[(rows // k).to(value.device)]", "value[(rows % len(value)).to(value.device)]"),
        ("windows:distance_is_a_sum", "return (total / max(sum(p.numel() for p in b.values()), 1)) ** 0.5", "return total**0.5"),
    ),
    *mutants_of(
        "checkpoints.py",
        "test_checkpoints.py",
        ("checkpoints:digest_unchecked", "    if _sync_and_digest(state) != digest:\n", "    if False:\n"),
        ("checkpoints:pointer_first", "    os.replace(temporary, folder / name)\n", "    os.replace(temporary, folder / name) if (folder / 'checkpoint.json').exists() else None\n"),
        ("checkpoints:behaviour_lost", "        tensors |= {f\"behaviour.{name}\": p for name, p in behaviour.items()}\n", "        pass\n"),
        ("checkpoints:generator_lost", "    torch.set_rng_state(rng[\"torch\"])\n", ""),
        ("checkpoints:old_states_pile_up", "            old.unlink(missing_ok=True)\n", "            pass\n"),
    ),
]  # fmt: skip

DIRECTIONS = [
    *mutants_of(
        "directions.py",
        "test_directions.py",
        ("directions:a_pair_meets_itself", "((whole - own) / (pairs * (pairs - 1))).mean()", "(whole / (pairs * pairs)).mean()"),
        ("directions:pairs_without_their_half", "half_gap = (r[a] - r[b]) / 2", "half_gap = r[a] - r[b]"),
        ("directions:one_pairing_for_all", "torch.rand((pairings, values.shape[1])", "torch.rand((1, values.shape[1])"),
        ("directions:pairs_by_the_wrong_draws", "draws[:, here]", "draws[:, :n]"),
        ("directions:energy_of_the_biased_covariance", "r @ gram @ r / (n - 1) ** 2", "r @ gram @ r / n**2"),
        ("directions:unbiased_is_biased", "return covariance * _rows(k / (k - 1), covariance)", "return covariance * _rows(k / k, covariance)"),
        ("directions:fraction_unclipped", "signal / total, pooled).clamp(0, 1), 0.0)", "signal / total, pooled), 0.0)"),
        ("directions:pool_of_ratios", "signal[own].sum() / total[own].sum()", "(signal[own] / total[own]).mean()"),
        ("directions:small_groups_trust_themselves", "torch.where(own, signal / total, pooled)", "torch.where(own, signal / total, 1.0)"),
        ("directions:dead_groups_have_a_fraction", "return torch.where(alive, torch.where(own, signal", "return torch.where(alive | True, torch.where(own, signal"),
        ("directions:scaled_by_one_pairing", "pairings=pairings).to(value), value), alive)", "pairings=1).to(value), value), alive)"),
        ("directions:lam_turned_round", "posterior = unbiased - _rows(lam, gap) * gap", "posterior = unbiased - _rows(1 - lam, gap) * gap"),
        ("directions:lam_unclipped", "noise / distance, 0.0).clamp(0, 1)", "noise / distance, 0.0)"),
        ("directions:centre_of_dead_groups_too", "unbiased[alive].mean(0, keepdim=True)", "unbiased.mean(0, keepdim=True)"),
        ("directions:nothing_left_is_alive", "alive & (rms > floor), scale", "alive, scale"),
        ("directions:few_samples_have_no_noise", "total * (1 - _fraction(signal, total, count, alive))", "0 * total"),
        ("directions:batch_rms_counts_the_dead", "_rms(covariance)[alive].square()", "_rms(covariance).square()"),
        ("directions:batch_rms_is_a_mean", "[alive].square().mean().sqrt()\n    return _direction", "[alive].mean()\n    return _direction"),
        ("directions:typical_spread_is_a_mean", "spread[alive].quantile(0.5)", "spread[alive].mean()"),
        ("directions:dead_groups_weigh", "torch.where(alive, spread / (spread + middle), 0.0)", "spread / (spread + middle)"),
        ("directions:prediction_added", "x - guess[:, steps].double().mean(1)", "x + guess[:, steps].double().mean(1)"),
        ("directions:bins_run_together", "if mine == b]", "if mine <= b]"),
        ("directions:binned_rewards_not_centred", "(row[here] - row[here].mean()) / here.sum()", "row[here] / here.sum()"),
        ("directions:bins_over_missing_samples", "row[here].mean()) / here.sum()", "row[here].mean()) / len(row)"),
        ("directions:joint_rms_per_bin", "return _divided(covariance, 1)", "return _divided(covariance, 2)"),
        ("directions:bin_rms_is_joint", "return _divided(covariance, 2)", "return _divided(covariance, 1)"),
        ("directions:rounding_becomes_a_bin", ".sqrt() > floor[:, None])", ".sqrt() > 0)"),
        ("directions:bins_with_a_gap", "or set(chosen) != set(range(max(chosen) + 1))", ""),
        ("directions:nan_predictions_accepted", "    if bool(bad.any()):\n", "    if False:\n"),
    ),
    *mutants_of(
        "conflicts.py",
        "test_conflicts.py",
        ("conflicts:some_part_is_enough", "torch.isfinite(rewards).all(2, keepdim=True)", "torch.isfinite(rewards).any(2, keepdim=True)"),
        ("conflicts:weights_after_all_alike", "_weights(weights, values)[:, None]\n    return _mixed", "_weights(None, values)[:, None]\n    return _mixed"),
        ("conflicts:raw_sum_ignores_weights", "(values * _weights(weights, values)).sum(2)", "values.sum(2)"),
        ("conflicts:projects_where_parts_agree", "bool(conflict < 0)", "bool(conflict > 0)"),
        ("conflicts:projects_twice_as_far", "rows[j, other] -= conflict / gram[other, other]", "rows[j, other] -= 2 * conflict / gram[other, other]"),
        ("conflicts:one_order_for_all_parts", "parts[group].T, orders)", "parts[group].T, orders[:1].expand(j, j))"),
        ("conflicts:stops_at_once", "GAP = 1e-14", "GAP = 1e-2"),
        ("conflicts:leaves_the_hull", "            if bool((wanted > 0).all()):\n", "            if True:\n"),
        ("conflicts:gives_up_the_wrong_one", "now / (now - wanted), math.inf).nan_to_num(0.0, posinf=math.inf)", "now / (now - wanted), 1.0).nan_to_num(0.0)"),
        ("conflicts:the_dead_take_part", "parts[group].norm(dim=1).nonzero().flatten()", "torch.arange(parts.shape[1])"),
        ("conflicts:cancelled_parts_live", "> STATIONARY * parts", "> 0 * parts"),
        ("conflicts:cosine_of_the_dead", "cosines.clamp(-1, 1)", "cosines.nan_to_num(0.0).clamp(-1, 1)"),
    ),
    *mutants_of(
        "diversity.py",
        "test_diversity.py",
        ("diversity:a_sample_meets_itself", "x.square().mean(1).sum() / (len(x) - 1)", "x.square().mean(1).sum() / len(x)"),
        ("diversity:not_centred", "centred = x - x.mean(0)", "centred = x"),
        ("diversity:ratio_of_the_diagonal", "/ gram.square().sum()", "/ gram.diagonal().square().sum()"),
        ("diversity:share_along_the_length", "unit = along[group] / along[group].norm()", "unit = along[group]"),
        ("diversity:partly_finite_counts", "torch.isfinite(samples).all(1)", "torch.isfinite(samples).any(1)"),
        ("diversity:rounding_has_a_shape", "torch.zeros_like(centred) if collapsed else centred", "centred"),
        ("diversity:in_single_precision", ".all(1)].double()", ".all(1)].float()"),
    ),
]  # fmt: skip

BASELINES = [
    *mutants_of(
        "rollouts.py",
        "test_rollouts.py",
        ("rollouts:last_step_too", "    return range(steps - 1)\n", "    return range(steps)\n"),
        ("rollouts:half_rounded_down", "range(-(-steps // 2))", "range(max(steps // 2, 1))"),
        ("rollouts:nine_tenths_of_the_rest", "9 * steps // 10", "9 * (steps - 1) // 10"),
        ("rollouts:three_fifths_rounded_up", "max(3 * steps // 5, 1)", "max(-(-3 * steps // 5), 1)"),
        ("rollouts:starts_interleaved", "seeded_noise(seeds[:, 0], shape).repeat_interleave(seeds.shape[1], 0)", "seeded_noise(seeds[:, 0], shape).repeat(seeds.shape[1], 1)"),
        ("rollouts:own_noise_anyway", "noise=None if start is None else", "noise=None if start is not None else"),
        ("rollouts:start_in_single_precision", "start.to(torch.promote_types(times.dtype, torch.float32))", "start.float()"),
        ("rollouts:noise_outside_the_window", "kernel if i in kept else outside", "outside if i in kept else kernel"),
        ("rollouts:noise_after_the_window", "kernel if i in kept else outside", "kernel if i >= kept[0] else outside"),
        ("rollouts:outside_is_euler", "kernel if i in kept else outside", "kernel if i in kept else euler_step"),
        ("rollouts:window_of_the_last_seed", "first = int(seeds[0, 0]) if", "first = int(seeds[-1, -1]) if"),
        ("rollouts:window_of_the_first_iteration", "velocity.iteration, steps=velocity.steps", "0, steps=velocity.steps"),
        ("rollouts:one_fresh_noise_for_all_steps", "stream=RENOISE_STREAM + i)", "stream=RENOISE_STREAM)"),
        ("rollouts:renoised_with_the_rollout_s_noise", "stream=RENOISE_STREAM + i)", "stream=i)"),
        ("rollouts:renoised_next_state_of_this_time", "for t in (grid[i], grid[i + 1]))", "for t in (grid[i], grid[i]))"),
        ("rollouts:renoised_path_reversed", "interpolate(walked.x_0, noise, t)", "interpolate(noise, walked.x_0, t)"),
        ("rollouts:renoised_velocity_at_the_noise", "noise=x_t, keep=[0]).v[:, 0]", "noise=noise, keep=[0]).v[:, 0]"),
        ("rollouts:renoised_with_a_density", "log_prob=torch.full_like(std, torch.nan)", "log_prob=torch.zeros_like(std)"),
        ("rollouts:parts_member_major", "rearrange(parts, \"(g k) j -> g k j\", k=k)", "rearrange(parts, \"(k g) j -> g k j\", k=k)"),
        ("rollouts:parts_lost", "getattr(score, \"parts\", None)", "getattr(score, \"part\", None)"),
        ("rollouts:any_steps_are_scored_first", "kept = _checked_keep(trained_steps(steps), steps)", "kept = list(trained_steps(steps))"),
        ("rollouts:any_steps_are_renoised", "kept, grid = _checked_keep(kept, velocity.steps), velocity", "kept, grid = list(kept), velocity"),
        ("rollouts:conditions_interleaved", "device=seeds.device).repeat_interleave(seeds.shape[1])", "device=seeds.device).repeat(seeds.shape[1])"),
    ),
    *mutants_of(
        "credits.py",
        "test_credits.py",
        ("credits:unbiased_is_the_population_s", "(count - 1).clamp_min(1)", "count.clamp_min(1)"),
        ("credits:unbiased_in_half_precision", "    (rewards,) = promote(rewards)\n", ""),
        ("credits:sum_of_advantages_is_of_the_sum", "w * group_advantages(p, spread=spread, eps=eps) for w, p in zip(weights, each, strict=True)", "group_advantages(sum(each), spread=spread, eps=eps)"),
        ("credits:incomplete_samples_count", "[torch.where(complete, part, torch.nan) for part in", "[part for part in"),
        ("credits:taken_out_samples_count", "torch.isfinite(batch.rewards) & torch.isfinite(batch.parts).all(2)\n        each", "torch.isfinite(batch.parts).all(2)\n        each"),
        ("credits:unclamped", "values.clamp(-clamp, clamp)", "values"),
        ("credits:clamped_from_above", "values.clamp(-clamp, clamp)", "values.clamp_max(clamp)"),
        ("credits:the_best_alone", "[*order[: count // 2], *order[-(count // 2) :]]", "order[-count:]"),
        ("credits:best_by_the_clamped", "extremes(values, has_reward,", "extremes(values.clamp(-clamp, clamp), has_reward,"),
        ("credits:best_of_n_weighs_1", "weight[i, chosen] = k / count", "weight[i, chosen] = 1.0"),
        ("credits:missing_among_the_best", "argsort(stable=True) if usable[i, j]]", "argsort(stable=True)]"),
        ("credits:odd_best_of_n", "low=2) % 2:", "low=2) % 1:"),
        ("credits:optimality_of_both_parts", "optimality(a, clip=clip)", "optimality(told[\"advantage\"], clip=clip)"),
        ("credits:positive_part_is_the_size", "return advantages.clamp_min(0)", "return advantages.abs()"),
        ("credits:infinite_optimality_clip", "    clip = require_number(\"clip\", clip, low=0, open_low=True)\n", ""),
        ("credits:own_direction_ignored", "        if direction is None:\n            found", "        if True:\n            found"),
        ("credits:weights_interleaved", "weight(values, x_0).repeat_interleave(k, 0)", "weight(values, x_0).repeat(k)"),
        ("credits:scale_beside_an_own_direction", "(scale != 1.0 or rms_axes is not None)", "(scale != 1.0 and rms_axes is not None)"),
    ),
    *mutants_of(
        "algorithms.py",
        "test_baselines.py",
        ("baselines:flow_grpo_without_kl", "beta=beta, kl=kl, steps_per_sample", "kl=kl, steps_per_sample"),
        ("baselines:flow_grpo_s_wider_clip", "def flow_grpo(\n    *,\n    kernel: Step = flow_sde_step,\n    clip: float = 1e-4,", "def flow_grpo(\n    *,\n    kernel: Step = flow_sde_step,\n    clip: float = 2e-4,"),
        ("baselines:published_kl_is_exact", "flow_grpo(kl=kl_without_delta, **settings)", "flow_grpo(**settings)"),
        ("baselines:fast_by_flow_sde", "def flow_grpo_fast(\n    *,\n    kernel: Step = cps_step,", "def flow_grpo_fast(\n    *,\n    kernel: Step = flow_sde_step,"),
        ("baselines:fast_with_a_wide_clip", "window: int = 3,\n    clip: float = 1e-5,", "window: int = 3,\n    clip: float = 1e-4,"),
        ("baselines:mix_never_slides", "sliding_window_of(window, stride=stride, every=every)", "sliding_window_of(window, stride=stride, every=10**9)"),
        ("baselines:mix_of_the_sum", "sum_of_advantages(spread=spread), clamp", "advantages_of_sum(spread=spread), clamp"),
        ("baselines:dance_on_own_noise", "trained_steps=trained_steps, noise=noise)", "trained_steps=trained_steps)"),
        ("baselines:dance_best_of_all", "clamp=clamp, best_of=best_of)", "clamp=clamp)"),
        ("baselines:dance_with_another_eps", "sum_of_advantages(spread=spread, eps=eps)", "sum_of_advantages(spread=spread)"),
        ("baselines:dance_published_is_population", "dance_grpo(spread=unbiased_group_std, **settings)", "dance_grpo(**settings)"),
        ("baselines:guard_published_is_per_sample", "grpo_guard(loss=guarded_ppo_as_published, **settings)", "grpo_guard(**settings)"),
        ("baselines:guard_is_ppo", "loss: Callable[..., Any] = guarded_ppo,", "loss: Callable[..., Any] = ppo,"),
        ("baselines:cps_published_is_exact", "cps_grpo(log_prob=cps_surrogate, **settings)", "cps_grpo(**settings)"),
        ("baselines:dppo_at_low_noise", "trained_steps: TrainedSteps = first_half", "trained_steps: TrainedSteps = all_but_last"),
        ("baselines:dppo_published_is_exact", "kl=kl_clamped_sigma(eta), **settings)", "**settings)"),
        ("baselines:nft_by_euler", "step: Step = dpm2_step", "step: Step = euler_step"),
        ("baselines:nft_on_policy", "behaviour=lagging(decay)", "behaviour=live"),
        ("baselines:average_turned_round", "ema(old, params, decay=decay(i))", "ema(params, old, decay=decay(i))"),
        ("baselines:nft_without_its_factor", "loss_factor: float = 5.0", "loss_factor: float = 1.0"),
        ("baselines:nft_positive_is_negative", "nft(part=positive_part, **settings)", "nft(part=negative_part, **settings)"),
        ("baselines:ocr_without_its_beta", "{\"beta\": 0.1, \"decay\"", "{\"decay\""),
        ("baselines:ocr_decay_not_flat", "cap=0.999, flat=75)", "cap=0.999)"),
        ("baselines:slow_decay_is_fast", "partial(ramp, rate=0.001, cap=0.5)", "partial(ramp, rate=0.01, cap=0.5)"),
        ("baselines:nft_without_reference", "needs_reference=anchor > 0", "needs_reference=False"),
        ("baselines:awm_without_kl", "score=score, beta=beta, steps_per_sample", "score=score, steps_per_sample"),
        ("baselines:awm_trains_everything", "trained_steps: TrainedSteps = noisiest_nine_tenths", "trained_steps: TrainedSteps = all_steps"),
    ),
    *mutants_of(
        "loop.py",
        "test_loop.py",
        ("loop:reference_lost", "window_of(batch, credit, rows, plan.reference)", "window_of(batch, credit, rows)"),
        ("loop:iteration_untold", "sampler._replace(iteration=i, first=", "sampler._replace(first="),
        ("loop:micro_batches_of_any_size_alike", "number.count if isinstance(number, Mean) else share", "number.count if isinstance(number, Mean) else 1"),
        ("loop:silent_updates_count_as_zero", "_together(name, values, [1] * len(values))", "sum(values) / len(updates)"),
        ("loop:the_least_is_a_mean", "if name.endswith((\"/min\", \"/max\")):", "if False:"),
        ("loop:the_greatest_is_the_least", "else max(values)", "else min(values)"),
        ("loop:diagnosis_without_reference", "torch.arange(batch.rewards.numel()), saved)", "torch.arange(batch.rewards.numel()))"),
        ("loop:gaps_per_step_unprinted", "{ratio:.2e} ({steps})", "{ratio:.2e}"),
        ("loop:gaps_without_their_digits", "{v:.1e}\" for k, v in metrics.items()", "{v:.1f}\" for k, v in metrics.items()"),
        ("loop:warns_at_one_half", "metrics[\"groups/dead\"] > 0.5 and", "metrics[\"groups/dead\"] >= 0.5 and"),
    ),
    *mutants_of(
        "windows.py",
        "test_windows.py",
        ("windows:reference_lost_in_parts", "        reference=window.reference,\n", ""),
        ("windows:one_copy_for_all_rewards", "self._told(reward, own(), texts)", "self._told(reward, images, texts)"),
        ("windows:anything_with_rewards_is_a_sum", "isinstance(single, Mapping) and callable(total)", "isinstance(single, Mapping)"),
    ),
    *mutants_of(
        "reward_tools.py",
        "test_rewards.py",
        ("rewards:weights_by_position", "given[n]) for n in rewards)", "w) for n, w in zip(rewards, given.values()))"),
        ("rewards:weights_ignored", "parts @ torch.tensor(self.weights, dtype", "parts @ torch.ones(len(self.weights), dtype"),
        ("rewards:some_part_is_enough", "torch.isfinite(parts).all(1), total", "torch.isfinite(parts).any(1), total"),
        ("rewards:weights_of_some", "weights.keys() != rewards.keys()", "weights.keys() - rewards.keys()"),
    ),
    *mutants_of(
        "settings.py",
        "test_settings.py",
        ("settings:radius_silently_ignored", "    elif s.radius != Settings.radius:\n", "    elif False:\n"),
        ("settings:radius_always_the_default", "chosen[\"radius\"] = s.radius", "chosen[\"radius\"] = Settings.radius"),
        ("settings:steps_silently_ignored", "    elif s.trained_steps != \"auto\":\n", "    elif False:\n"),
        ("settings:auto_steps_are_art_s", "if of_art or (s.trained_steps != \"auto\" and \"trained_steps\" in known):", "if \"trained_steps\" in known:"),
        ("settings:judge_hides_the_parts", "            self.rewards, self.total, self.weights = reward.rewards, reward.total, reward.weights\n", "            pass\n"),
    ),
]  # fmt: skip

REVIEWED = [
    *mutants_of(
        "extensions.py",
        "test_extensions.py",
        ("extensions:missing_parts_are_trained", "torch.isfinite(batch.parts).all(2))", "torch.isfinite(batch.parts).any(2))"),
        ("extensions:weights_forgotten", "found = direction(batch.parts, x_0, weights=torch.tensor(weights, dtype=torch.float64))", "found = direction(batch.parts, x_0)"),
        ("extensions:steady_forgets_the_scale", "partial(direction, scale=scale)", "direction"),
        ("extensions:steady_forgets_the_labels", "covariance_credit(labels=labels, ", "covariance_credit("),
        ("extensions:steady_rolls_out_live", "credit=credit, behaviour=lagging(lambda i: retention)", "credit=credit"),
        ("extensions:prediction_is_the_state", "tr.t.repeat(g * k))", "0 * tr.t.repeat(g * k))"),
        ("extensions:cancellation_of_the_mean", "total / alone if alone > 0", "total / len(pick) / alone if alone > 0"),
        ("extensions:force_is_a_sum", "Force(size, total / len(pick),", "Force(size, total,"),
    ),
    *mutants_of(
        "loop.py",
        "test_loop.py",
        ("loop:some_live_params_not_copied", "p.detach().clone() if behaviour[name] is p else behaviour[name]", "behaviour[name]"),
        ("loop:a_mean_of_roots", 'power = 2 if name.endswith("_rms") else 1', "power = 1"),
    ),
    *mutants_of(
        "loop.py",
        "test_objectives.py",
        ("loop:a_memory_is_never_told", "                algorithm.memory.advance()\n", "                pass\n"),
    ),
    *mutants_of(
        "objectives.py",
        "test_objectives.py",
        ("objectives:r_in_half_precision", "r.to(s.x_t)[s.rows]", "r.to(v)[s.rows]"),
        ("objectives:t_in_half_precision", "s.t.to(s.x_t)) for u", "s.t.to(u)) for u"),
        ("objectives:a_missing_direction_is_a_key_error", 'alive = (credit_of(window, "direction") != 0)', 'alive = (window.credit["direction"] != 0)'),
        ("objectives:any_radius", "or not bool((limit > 0).all())", ""),
        ("objectives:any_number_of_directions", "if direction.shape[1:] != (steps, *shape):", "if direction.ndim != len(shape) + 2:"),
    ),
    *mutants_of(
        "settings.py",
        "test_settings.py",
        ("settings:no_rehearsal", "    rehearse(algorithm, s)\n", ""),
    ),
]  # fmt: skip

QUANT = [
    *mutants_of(
        "fp4.py",
        "test_fp4.py",
        ("e2m1_magic_constant_doubled", ".clamp_min_(2.0**22)", ".clamp_min_(2.0**23)"),
        ("e2m1_saturates_at_8", "E2M1_MAX, E4M3_MIN, E4M3_MAX = 6.0", "E2M1_MAX, E4M3_MIN, E4M3_MAX = 8.0"),
        ("e2m1_zero_loses_its_sign", ".sub_(c).copysign_(q)", ".sub_(c).mul_(q.sign())"),
        ("e2m1_grid_without_its_top_octave", "(y * 0.5).floor_()", "(y * 0.5).floor_().clamp_max_(1.0)"),
        ("nvfp4_divides_by_the_combined_scale", "(1 / pts) / s, pts * s", "1 / (pts * s), pts * s"),
        ("nvfp4_scale_not_rounded_to_e4m3", ".to(torch.float8_e4m3fn).float()", ".float()"),
        ("nvfp4_an_inf_enters_the_tensor_scale", "torch.where(usable, amax, 0.0).amax()", "amax.amax()"),
        ("nvfp4_an_inf_saturates_silently", "largest = torch.where(usable, amax, torch.nan) / E2M1_MAX", "largest = amax / E2M1_MAX"),
        ("nvfp4_tensor_scale_without_floor", "pts = pts.clamp_min(TENSOR_SCALE_MIN)", "pts = pts.clamp_min(0.0)"),
        ("nvfp4_given_scale_is_an_amax", "return scale[..., None] if scale.ndim else scale", "return (scale[..., None] if scale.ndim else scale) / 2688"),
        ("nvfp4_given_scale_ignored_per_row", "return scale[..., None] if scale.ndim else scale", "return scale.amax()"),
        ("nvfp4_scale_beside_one_level_accepted", "if not two_level and per_tensor_scale is not None:", "if False:"),
        ("nvfp4_blocks_of_32", "blocks = _blocks(x, NVFP4_BLOCK)", "blocks = _blocks(x, MXFP4_BLOCK)"),
        ("mxfp4_rceil_is_ceil", "\"rceil\": 0x3FFFFF", "\"rceil\": 0x7FFFFF"),
        ("mxfp4_even_rounds_late", "\"even\": 0x200000", "\"even\": 0x1FFFFF"),
        ("mxfp4_floor_carries", "\"floor\": 0,", "\"floor\": 0x400000,"),
        ("mxfp4_ceil_of_powers_too", "\"ceil\": 0x7FFFFF", "\"ceil\": 0x800000"),
        ("mxfp4_smallest_scale_twice_too_large", ">> 23).clamp_min(2)", ">> 23).clamp_min(3)"),
        ("mxfp4_an_inf_saturates_silently", "torch.where(torch.isfinite(amax), scale, torch.nan)", "scale"),
        ("fp4_result_rounded_before_its_scale", "_e2m1(blocks * inverse).mul_(scale).to(x.dtype)", "_e2m1(blocks * inverse.to(x.dtype).float()).mul_(scale).to(x.dtype)"),
        ("straight_through_clips", "return gradient, None", "return gradient.clamp(-1, 1), None"),
        ("straight_through_any_shape", "if q.shape != x.shape or q.dtype != x.dtype:", "if q.dtype != x.dtype:"),
    ),
    *mutants_of(
        "contrast.py",
        "test_contrast.py",
        ("selection_not_stable", "argsort(dim=1, descending=True, stable=True)", "flip(1).argsort(dim=1, descending=True, stable=True).sub(rewards.shape[1] - 1).neg()"),
        ("selection_worst_first", "last = m - (2 * keep - place)", "last = m - 1 - (place - (2 * keep - bottom))"),
        ("selection_inf_is_the_best", "finite = torch.isfinite(rewards)", "finite = ~torch.isnan(rewards)"),
        ("selection_more_bottom_than_top", "top = ((m + 1) // 2).clamp(max=keep)", "top = (m // 2).clamp(max=keep)"),
        ("selection_in_float32", "rewards.detach().double(), -math.inf", "rewards.detach().float(), -math.inf"),
        ("selection_may_overlap", "if 2 * keep > rewards.shape[1]:", "if keep > rewards.shape[1]:"),
        ("agreement_missing_counts", "usable = torch.isfinite(proxy) & torch.isfinite(true)", "usable = torch.isfinite(true)"),
        ("agreement_with_too_few", "enough = int(mask.sum()) >= 2 * keep", "enough = int(mask.sum()) >= keep"),
        ("agreement_ties_get_the_best_rank", "return above + (equal + 1).double() / 2", "return above + 1.0 + 0 * equal"),
        ("agreement_kendall_a", "_cosine(a, b),", "(a @ b) / (n * (n - 1)),"),
        ("agreement_bottom_of_the_truth", "(ranks[bottom] < (n + 1) / 2)", "(ranks[bottom] > (n + 1) / 2)"),
        ("agreement_rank_1_is_the_worst", "x[None, :] > x[:, None]", "x[None, :] < x[:, None]"),
        ("two_stage_learns_from_the_proxy", "return TwoStageRollout(_joined([trajectory for trajectory, _ in pieces]), rewards,", "return TwoStageRollout(_joined([trajectory for trajectory, _ in pieces]), proxy.gather(1, columns),"),
        ("two_stage_other_noise", "pieces = list(_rendered(velocity, params, cond, chosen, ", "pieces = list(_rendered(velocity, params, cond, chosen + 1, "),
        ("two_stage_draft_with_the_policys_params", "draft_rewards(draft_velocity, draft_params,", "draft_rewards(draft_velocity, params,"),
        ("two_stage_policys_steps_for_the_draft", "times=draft_times, shape", "times=times, shape"),
        ("two_stage_rows_by_column", "device=flat.device) // n", "device=flat.device) % len(seeds)"),
        ("two_stage_with_gradient", "@torch.no_grad()\ndef two_stage_rollout", "@torch.enable_grad()\ndef two_stage_rollout"),
        ("two_stage_prompts_of_any_number", "or len(prompts) != g:", "or False:"),
    ),
    *mutants_of(
        "quant.py",
        "test_quant.py",
        ("convert_weights_only", "linear(self.quantize(x), self.weight", "linear(x, self.weight"),
        ("convert_activations_only", "nn.Parameter(value.to(weight.dtype)", "nn.Parameter(weight.detach()"),
        ("convert_in_place", "draft = copy.deepcopy(module).requires_grad_(False)", "draft = module.requires_grad_(False)"),
        ("convert_substring_skips", "return f\".{entry}\" in f\".{name}\"", "return entry in name"),
        ("convert_adapters_too", "if any(part.startswith(\"lora_\") for part in name.split(\".\")):", "if False:"),
        ("convert_subclasses_too", "return None if type(layer) is nn.Linear else \"subclass\"", "return None"),
        ("convert_min_dim_of_the_smaller_axis", "if max(layer.in_features, layer.out_features) <= min_dim", "if min(layer.in_features, layer.out_features) <= min_dim"),
        ("convert_min_dim_open", "layer.out_features) <= min_dim", "layer.out_features) < min_dim"),
        ("convert_splits_shared_weights", "if id(weight) not in weights:", "if True:"),
        ("convert_a_string_is_a_sequence", "if isinstance(skip, str) or not", "if not"),
        ("convert_to_train_mode", ".train(linear.training)", ""),
        ("torchao_on_hopper", "BLACKWELL = (10, 0)", "BLACKWELL = (9, 0)"),
        ("torchao_for_every_layer", "filter_fn=lambda _, name: name in layers", "filter_fn=lambda m, name: isinstance(m, nn.Linear)"),
        ("requantise_adds", "own[name].copy_(value)", "own[name].add_(value)"),
        ("requantise_casts_first", "return _quantized(name, value, layer.quantize)", "return _quantized(name, value.to(into.dtype), layer.quantize)"),
        ("requantise_copies_weights", "if isinstance(layer, QuantizedLinear):\n        return _quantized", "if layer is None:\n        return _quantized"),
        ("requantise_broadcasts", "x.shape != own[n].shape or x.is_meta]", "x.is_meta]"),
        ("merge_in_the_weights_dtype", "return weight.float() + scale * (lora_b.float() @ lora_a.float())", "return (weight + scale * (lora_b @ lora_a)).float()"),
        ("merge_unscaled", "return weight.float() + scale *", "return weight.float() +"),
        ("convert_what_is_more_than_its_weight", "if hooks or own or owners:", "if False:"),
        ("convert_under_a_fast_path", "isinstance(owner, nn.TransformerEncoderLayer)", "False"),
        ("convert_to_another_shape", "or quantized.shape != value.shape:", "or False:"),
    ),
    *mutants_of(
        "sol_rl.py",
        "test_sol_rl.py",
        ("sol_rl_trains_on_the_first_seeds", "chosen = seeds.gather(1, columns)", "chosen = seeds[:, : 2 * o.keep]"),
        ("sol_rl_learns_from_the_draft", "collect(own, params, cond, chosen, score)", "collect(own, with_params, cond, chosen, score)"),
        ("sol_rl_drafts_with_the_policys_params", "draft_rewards(by, with_params,", "draft_rewards(by, params,"),
        ("sol_rl_drafts_with_the_policys_steps", "times = sampler.times(steps)", "times = sampler.times(sampler.steps)"),
        ("sol_rl_of_any_group_size", "        kept=2 * o.keep,\n", ""),
        ("sol_rl_of_a_sol_rl", "or algorithm.pool is not None:", "or False:"),
        ("sol_rl_from_any_noise", "if not torch.equal(x_t, seeded_noise(seeds.flatten(), shape).to(x_t)):", "if False:"),
        ("sol_rl_audits_every_iteration", "sampler.iteration % o.audit_every == 0", "True"),
        ("sol_rl_audits_with_the_drafts_steps", "\"times\": sampler.times(sampler.steps)", "\"times\": sampler.times(o.draft_steps)"),
        ("sol_rl_audits_every_prompt", "g = min(o.audit_prompts, len(seeds))", "g = len(seeds)"),
        ("sol_rl_is_always_alarmed", "if not spearman < o.threshold:", "if False:"),
        ("sol_rl_takes_steps_without_end", "min(steps + 1, o.most_draft_steps, sampler.steps)", "min(steps + 1, sampler.steps)"),
        ("sol_rl_never_begins_anew", "    def reset(self) -> None:\n        self.pool, self.steps = self.first", "    def reset(self) -> None:\n        pass"),
        ("sol_rl_forgets_the_inner_memory", "            self.inner.advance()", "            pass"),
        ("sol_rl_gap_of_absolute_values", "gap = finite[:, :keep].nanmean(1) - finite[:, keep:].nanmean(1)", "gap = finite[:, :keep].nanmean(1) + finite[:, keep:].nanmean(1)"),
        ("sol_rl_free_agreement_of_the_pool", "chosen = proxy.gather(1, columns.to(proxy.device))", "chosen = proxy[:, : 2 * keep]"),
        ("sol_rl_missing_of_what_is_there", "1 - float(torch.isfinite(proxy).double().mean())", "float(torch.isfinite(proxy).double().mean())"),
        ("sol_rl_scoring_counted_twice", "now - self.began - self.scoring[name]", "now - self.began + 10 * self.scoring[name]"),
        ("sol_rl_steps_beyond_the_policys", "min(steps + 1, o.most_draft_steps, sampler.steps)", "min(steps + 1, o.most_draft_steps)"),
        ("sol_rl_warns_every_time", "if now.warned and more == steps:", "if False:"),
        ("sol_rl_an_inf_is_a_reward", "finite = rewards.where(torch.isfinite(rewards), torch.nan)", "finite = rewards"),
        ("sol_rl_a_missing_reward_costs_a_prompt", "**{name: of_pairs[name] for name in (\"draft/spearman\", \"draft/kendall\")},", ""),
    ),
    *mutants_of(
        "drafts.py",
        "test_drafts.py",
        ("draft_may_be_other_params", "if name not in params or reference() is not params[name]:", "if False:"),
        ("draft_may_be_of_before_the_step", "if not torch.equal(_some_values(params), self._values):", "if False:"),
        ("draft_half_written_is_used", "        self._written = None  # where", "        # where"),
        ("draft_never_refreshed", "requantize_(self.module, self._refresh(params))", "self._refresh(params)"),
        ("draft_merges_unscaled", "scale=scale\n", "scale=1.0\n"),
        ("draft_merges_the_live_params", "b = (params[f", "b = (model.params[f"),
        ("draft_merges_in_bfloat16", "            written[f\"{name}.weight\"] = merge_lora(\n                weight.detach()", "            written[f\"{name}.weight\"] = (lambda *x, scale: merge_lora(*x, scale=scale).to(weight))(\n                weight.detach()"),
        ("draft_with_a_gradient", "with torch.no_grad():\n            return self._velocity", "if True:\n            return self._velocity"),
        ("draft_reports_peft_names", "converted=tuple(plain.get(name, name) for name in report.converted)", "converted=report.converted"),
        ("draft_share_of_layers", "self.share = sum(converted.values()) /", "self.share = 2 * sum(converted.values()) /"),
        ("draft_is_copied", "    def __deepcopy__(self, memory: Any)", "    def _deepcopy(self, memory: Any)"),
        ("draft_beside_other_adapters", "if layer.merged or layer.disable_adapters or list(layer.active_adapters) != [adapter]:", "if False:"),
        ("draft_keeps_its_first_scale", "        layers = _adapted(module, model.params)\n        _require_merged(module, model.params, layers)  # again", "        _require_merged(module, model.params, layers)  # again"),
        ("draft_drops_odd_factors", "if odd or any(", "if any("),
        ("adapter_draft_of_the_live_params", "        return params\n\n    return Draft(around", "        return model.params\n\n    return Draft(around"),
    ),
    *mutants_of(
        "contrast.py",
        "test_contrast.py",
        ("pool_rounds_up", "math.floor(min(most, spare + 1e-9))", "math.ceil(min(most, spare))"),
        ("pool_below_what_is_kept", "return max(2 * keep, math.floor(", "return max(1, math.floor("),
        ("cache_of_any_version", "keys = [(prompt, seed, version) for", "keys = [(prompt, seed, 0) for"),
        ("cache_keeps_nan", "if math.isfinite(found[key]):", "if True:"),
        ("cache_forgets_the_latest", "list(self.kept)[: max(len(self.kept) - self.capacity, 0)]", "list(self.kept)[self.capacity :]"),
        ("cache_renders_twice", "if key not in self.kept)", "if True)"),
        ("chunk_without_a_reward_ends_the_run", "except NoReward as error:", "except ZeroDivisionError as error:"),
        ("chunks_all_without_a_reward_are_fine", "if failure is not None and not scored:", "if False:"),
        ("reward_writes_into_the_samples", "given = x_0.clone()", "given = x_0"),
    ),
    *mutants_of(
        "settings.py",
        "test_settings.py",
        ("draft_of_an_odd_group", "if s.group_size % 2:", "if False:"),
        ("draft_options_without_a_draft", "if s.draft == \"none\":\n        given = [", "if s.draft == \"none\":\n        given = [] and ["),
    ),
    *mutants_of(
        "loop.py",
        "test_sol_rl.py",
        ("doctor_lets_the_draft_choose_again", "kept = batch.trajectory.seeds if hasattr(algorithm.collect, \"of_chosen\") else None", "kept = None"),
        ("doctor_goes_on_with_its_memory", "    if algorithm.memory is not None:\n        algorithm.memory.reset()\n    by =", "    by ="),
    ),
    *mutants_of(
        "plots.py",
        "test_plots.py",
        ("scatter_of_the_truth", "chosen = select_contrastive(proxy, keep=keep)", "chosen = select_contrastive(proxy, keep=1)"),
        ("pairs_the_other_way_round", "{\"draft\": draft, \"policy\": policy}", "{\"draft\": policy, \"policy\": draft}"),
        ("titles_are_mathematics", "axis.set_title(titles[j], fontsize=8.5, color=INK, parse_math=False)", "axis.set_title(titles[j], fontsize=8.5, color=INK)"),
    ),
]  # fmt: skip

RANKS = [
    *mutants_of(
        "training_checks.py",
        "test_ranks.py",
        ("checks:prompts_dealt_unevenly", "if g % ranks:", "if False:"),
    ),
    *mutants_of(
        "training_checks.py",
        "test_loop.py",
        ("loop:reference_follows_the_params", "return {name: reference[name].detach().clone() for name in params}", "return dict(reference)"),
        ("loop:reference_of_the_resumed_params", "if reference is None and start > 0:", "if False:"),
        ("loop:reference_of_another_model", "    require_same_keys(params=params, reference=reference)\n", ""),
        ("loop:rows_of_the_pool_train", "!= (b, len(tr.t)):", "== (-1, -1):"),
        ("loop:cond_per_sample_is_fine", "    require_cond(batch.cond, g)\n", ""),
        ("loop:behaviour_of_other_names", "require_same_keys(params=params, behaviour=behaviour)", "pass"),
    ),
    *mutants_of(
        "ranks.py",
        "test_ranks.py",
        ("ranks:shares_by_stride", "return rows[start : start + each + (rank < more)]", "return rows[rank::size]"),
        ("ranks:gradients_not_added", "            dist.all_reduce(p.grad)\n", ""),
        ("ranks:gradients_averaged", "            dist.all_reduce(p.grad)\n", "            dist.all_reduce(p.grad)\n            p.grad /= size\n"),
        ("ranks:other_steps_accepted", "if a.shape != b.shape or not torch.equal(a, b.to(a)):", "if False:"),
        ("ranks:rows_of_the_first_rank", "rewards=torch.cat([batch.rewards for batch in batches])", "rewards=torch.cat([first.rewards for _ in batches])"),
        ("ranks:metrics_of_the_first", "metrics=metrics or None", "metrics=first.metrics"),
        ("ranks:any_start", "if other != told:", "if False:"),
        ("ranks:group_held_by_defaults", "        import torch.distributed.nn  # noqa: F401\n", "        pass\n"),
        ("ranks:group_never_left", "        dist.destroy_process_group()\n", "        pass\n"),
        ("ranks:parts_lost", "parts=None if first.parts is None else", "parts=None if True else"),
    ),
    *mutants_of(
        "loop.py",
        "test_ranks.py",
        ("loop:loss_of_one_rank", "return sum(total for total, _ in each), told", "return each[0][0], told"),
        ("loop:metrics_of_one_rank", "for _, own in each:", "for _, own in each[:1]:"),
        ("loop:window_of_each_rank", "first=int(sample_seeds(plan.seed, i, every[:1], 1))", "first=int(sample_seeds(plan.seed, i, chosen[:1], 1))"),
    ),
]  # fmt: skip

FAMILIES_MUTANTS = [
    *mutants_of(
        "families_image.py",
        "test_families_image.py",
        (
            "qwen_reads_its_padding",
            'encoder_hidden_states_mask=cond["encoder_hidden_states_mask"]',
            "encoder_hidden_states_mask=None",
        ),
        ("qwen_mask_padded_with_ones", "pad(mask, (0, missing))", "pad(mask, (0, missing), value=1)"),
        ("qwen_norm_not_kept", "return v * (wanted / norm.clamp_min(torch.finfo(norm.dtype).tiny))", "return v"),
        ("qwen_zero_token_becomes_nan", "norm.clamp_min(torch.finfo(norm.dtype).tiny)", "norm"),
        ("qwen_norm_of_the_unconditional", "for x in (v, v_cond))", "for x in (v, v_uncond))"),
        ("qwen_empty_negative_prompt", 'prompt or " "', "prompt"),
        ("sana_instruction_with_the_negative_only", "if instruct else None", "if not instruct else None"),
        ("sana_timestep_unscaled", "timestep * config.timestep_scale", "timestep"),
        ("sana_takes_the_deviation", "v[:, : config.in_channels]", "v[:, config.in_channels :]"),
    ),
    *mutants_of(
        "families_image.py",
        "test_families.py",
        ("flux_reads_1000_t", "timestep_scale=1.0,  # the network", "timestep_scale=1000.0,  # the network"),
        ("flux_positions_transposed", "(len(x), rows, columns, x.device", "(len(x), columns, rows, x.device"),
        (
            "qwen_positions_transposed",
            "[[(1, size.height // factor, size.width // factor)]]",
            "[[(1, size.width // factor, size.height // factor)]]",
        ),
        (
            "packed_sizes_rounded",
            "    require_multiple(factor, height=size.height, width=size.width)\n    return ((",
            "    return ((",
        ),
        ("sana_mask_forgotten", 'encoder_attention_mask=cond["encoder_attention_mask"]', "encoder_attention_mask=None"),
    ),
    *mutants_of(
        "families_video.py",
        "test_families_video.py",
        ("two_networks_driven_as_one", "        or config.boundary_ratio is not None\n", ""),
        (
            "image_as_first_frame_accepted",
            "    if pipe.config.expand_timesteps:\n        raise",
            "    if False:\n        raise",
        ),
        ("ftfy_not_looked_for", 'find_spec("ftfy") is None', 'find_spec("ftfy") is False'),
        ("condition_before_the_noise", 'torch.cat([x, cond["condition"]], 1)', 'torch.cat([cond["condition"], x], 1)'),
        ("clip_embedding_forgotten", 'cond.get("encoder_hidden_states_image")', "None"),
        ("hunyuan_guidance_rounded_once", "(guidance / 1000).to(x.dtype) * 1000", "guidance.to(x.dtype)"),
        ("hunyuan_guidance_not_in_thousands", "return 1000.0 * pipe", "return 1.0 * pipe"),
    ),
    *mutants_of(
        "families_video.py",
        "test_families.py",
        ("frames_rounded", "    if before % time or (1", "    if False and (1"),
        (
            "wan_time_from_zero_to_one",
            "    tokens=_wan_tokens,\n    timestep_scale=1000.0,",
            "    tokens=_wan_tokens,\n    timestep_scale=1.0,",
        ),
    ),
    *mutants_of(
        "family.py", "test_families_image.py", ("mean_scaled_too", "latents * std + mean", "(latents + mean) * std")
    ),
    *mutants_of(
        "families.py",
        "test_families.py",
        ("guidance_for_a_network_that_reads_none", "        if scale:\n", "        if False:\n"),
    ),
    *mutants_of(
        "models.py",
        "test_families_video.py",
        ("dtype_of_the_first_tensor", " and not any(part in n for part in kept))", ")"),
    ),
    *mutants_of(
        "encoding.py",
        "test_encoding.py",
        (
            "kept_whatever_the_weights",
            "str(encoder.pipe.transformer.dtype), encoder.weights[parts], *key]",
            "str(encoder.pipe.transformer.dtype), *key]",
        ),
        ("kept_whatever_the_length", "(function.__name__, encoder.length, prompt)", "(function.__name__, prompt)"),
        ("kept_whatever_the_size", '("image", *encoder.size, digest)', '("image", digest)'),
        ("half_files_left_behind", "        Path(name).unlink(missing_ok=True)\n        raise", "        raise"),
        ("rows_of_a_weight_may_swap", "* torch.arange(1, len(rows) + 1, device=rows.device)", "* 1"),
        ("normalisers_do_not_count", 'fast.to_str() if fast is not None else ""', '""'),
        ("one_image_for_all", ".encode() + pixels.tobytes()", ".encode()"),
    ),
]

PICTURES = mutants_of(
    "family.py",
    "test_families_video.py",
    ("float_images_cut_to_bytes", "transpose(1, 2, 0)).round()", "transpose(1, 2, 0))"),
)

LATE = [
    *mutants_of(
        "windows.py",
        "test_ranks.py",
        ("windows:a_rank_without_rewards_ends_the_run", "            if not self.forgiving:\n                raise", "            raise"),
        ("windows:no_rewards_anywhere_are_fine", "                raise NoReward(told[0])", "                pass"),
    ),
    *mutants_of("memory.py", "test_memory.py", ("t5_in_float32", "and dtype == torch.bfloat16", "and False")),
    *mutants_of("run.py", "test_ranks.py", ("run:a_folder_before_the_refusal", "checked_groups(s.prompts_per_iteration, len(bench.prompts), ranks.size)", "pass")),
    *mutants_of("run.py", "test_train_families.py", ("run:evaluates_all_at_once", "\"chunk\": s.rollout_chunk or 128}\n    found", "\"chunk\": 128}\n    found")),
    *mutants_of("settings.py", "test_train_families.py", ("settings:absent_parts_are_wanted", "dtype=dtype, **absent)", "torch_dtype=dtype)")),
    *mutants_of("models.py", "test_models.py", ("second_size_switches_checkpointing_off", "elif config is not None and getattr", "elif getattr")),
]  # fmt: skip

PLAN_MUTANTS = mutants_of(
    "memory.py",
    "test_memory.py",
    ("adam_of_one_moment", "2 * n)", "n)"),
    ("factors_of_square_layers", "m.in_features + m.out_features", "2 * m.in_features"),
    ("nothing_stays_in_float32", "FLOAT32 if any(part in", "dtype.itemsize if any(part in"),
    ("trajectory_without_its_velocities", "(1 + 3 * s)", "(1 + 2 * s)"),
    ("what_left_the_device_counted", "lines if line.on_device) / 1e9", "lines) / 1e9"),
)

SCORER_MUTANTS = [
    *mutants_of(
        "checks.py",
        "test_checks.py",
        ("checks:floats_are_pictures", "images.dtype == torch.uint8 and images.ndim", "images.ndim"),
        ("checks:a_string_is_a_list_of_prompts", 'hasattr(prompts, "__len__") and not isinstance(prompts, str | bytes)', 'hasattr(prompts, "__len__")'),
        ("checks:prompts_of_any_number", "    if len(prompts) != len(images):\n", "    if False:\n"),
    ),
    *mutants_of(
        "scorers.py",
        "test_scorers.py",
        ("scorers:column_0", "return (_unit(found.image_embeds) * _unit(found.text_embeds)).sum(-1)", "return (_unit(found.image_embeds) @ _unit(found.text_embeds).T)[:, 0]"),
        ("scorers:prompts_reversed", "        text=list(prompts),\n", "        text=list(prompts)[::-1],\n"),
        ("scorers:not_normalised", "return torch.nn.functional.normalize(x.float(), dim=-1)", "return x.float()"),
        ("scorers:clip_below_zero", "100 * cosines(i, p).clamp_min(0)", "100 * cosines(i, p)"),
        ("scorers:pick_without_its_scale", "model.logit_scale.detach().float().exp() * cosines", "model.logit_scale.detach().exp().float() * cosines"),
        ("scorers:hps_crops", "return letterboxed(images, model.config.vision_config.image_size)", "return pil_pictures(images)"),
        ("scorers:black_all_below", "(size - height) // 2))", "0))"),
        ("scorers:train_mode", "        model.eval()\n", "        pass\n"),
        ("scorers:image_reward_not_standardised", " - IMAGE_REWARD_MEAN) / IMAGE_REWARD_STD", ")"),
        ("scorers:image_reward_reads_all", "length = min(35, ", "length = min(77, "),
        ("scorers:nan_is_not_counted", "        if not bool(torch.isfinite(values).all()):\n            raise ArithmeticError(f\"the model", "        if False:\n            raise ArithmeticError(f\"the model"),
        ("scorers:videos_standardised_over_the_batch", "(one_number_each(given[name], len(prompts)).double() - mean) / std", "(one_number_each(given[name], len(prompts)).double() - one_number_each(given[name], len(prompts)).double().mean()) / std"),
    ),
    *mutants_of(
        "scorer_weights.py",
        "test_scorers.py",
        ("scorer_weights:keys_and_values_swapped", 'for part in "qkv"]', 'for part in "qvk"]'),
        ("scorer_weights:projection_not_transposed", "{match.expand(name): x.T.contiguous()}", "{match.expand(name): x.reshape(x.shape[::-1])}"),
        ("scorer_weights:strange_names_dropped", "    if strange:\n", "    if False:\n"),
        ("scorer_weights:missing_names_stay_random", "    if missing or extra or shapes:\n", "    if extra or shapes:\n"),
        ("scorer_weights:code_of_a_checkpoint_runs", "weights_only=True", "weights_only=False"),
        ("scorer_weights:usual_layer_norms", '"layer_norm_eps": 1e-6', '"layer_norm_eps": 1e-5'),
    ),
    *mutants_of(
        "reward_rows.py",
        "test_reward_tools.py",
        ("reward_rows:threads_block_exit", "args=(ticket, task), daemon=True)", "args=(ticket, task), daemon=False)"),
        ("reward_rows:late_answers_count", "            if own in running:\n                settle(own, result)\n", "            results[0] = result\n            if own in running:\n                settle(own, result)\n"),
        ("reward_rows:one_try_less", "and tries < retries:", "and tries < retries - 1:"),
        ("reward_rows:pauses_do_not_grow", "pause * 2**tries", "pause"),
        ("reward_rows:a_hung_row_keeps_its_worker", "ends = [deadline, *(end for _, _, end in running.values())]", "running = {k: (a, b, deadline) for k, (a, b, _) in running.items()}\n        ends = [deadline]"),
        ("reward_rows:busy_counts_as_a_try", "if isinstance(result, Busy):", "if False:"),
        ("reward_rows:final_failures_are_repeated", "not isinstance(result, Final) and", ""),
    ),
    *mutants_of(
        "reward_rows.py",
        "test_objects.py",
        ("reward_rows:failures_are_silent", "    if rows.failed and log is not None:\n        log(", "    if False:\n        log("),
        ("reward_rows:a_failing_row_is_zero", "values = torch.full((len(images),), torch.nan)", "values = torch.zeros(len(images))"),
    ),
    *mutants_of(
        "reward_tools.py",
        "test_reward_tools.py",
        ("reward_tools:case_does_not_matter", 'prompt.encode("utf-8"', 'prompt.lower().encode("utf-8"'),
        ("reward_tools:shape_is_not_in_the_key", "hashlib.sha256(repr(tuple(image.shape)).encode())", "hashlib.sha256()"),
        ("reward_tools:nan_is_remembered", "                if math.isfinite(values[key]):\n", "                if True:\n"),
        ("reward_tools:the_newest_is_forgotten", "known.popitem(last=False)", "known.popitem(last=True)"),
        ("reward_tools:known_rows_shift", "values |= {keys[row]: value for row, value in zip(rows, found, strict=True)}", "values |= {keys[row]: value for row, value in zip(rows, found.flip(0), strict=True)}"),
        ("reward_tools:asked_in_one_order", "compare(a, b, prompt), compare(b, a, prompt)", "compare(a, b, prompt), {\"a\": \"b\", \"b\": \"a\"}.get(compare(a, b, prompt), \"tie\")"),
        ("reward_tools:disagreement_has_a_winner", "return scores[there] if scores[there] == 1 - scores[back] else 0.5", "return scores[there]"),
        ("reward_tools:groups_of_several_prompts", " or any(len(set(prompts[i : i + k])) > 1 for i in range(0, len(prompts), k))", ""),
        ("reward_tools:wrong_shapes_are_failures", "    if wrong:\n", "    if False:\n"),
        ("reward_tools:a_sum_takes_any_call", 'require_call("weighted_sum", images, prompts)', "pass"),
        ("reward_tools:failures_of_members_are_silent", '_member_rows(name, reward, images, prompts), self.log)', '_member_rows(name, reward, images, prompts)._replace(failed=0), self.log)'),
        ("reward_tools:pairs_are_columns", "scores.reshape(-1, group_size), generator", "scores.reshape(group_size, -1).T, generator"),
    ),
    *mutants_of(
        "objects.py",
        "test_objects.py",
        ("objects:y_grows_upwards", '"above": y < -0.5, "below": y > 0.5', '"above": y > 0.5, "below": y < -0.5'),
        ("objects:overlap_ignored", "OVERLAP = 0.1", "OVERLAP = 0.0"),
        ("objects:any_object_of_the_colour", "return all(o.colour == fact.colour for o in chosen)", "return sum(o.colour == fact.colour for o in found) >= fact.low"),
        ("objects:at_least_is_enough", "return fact.high is None or len(found) <= fact.high", "return True"),
        ("objects:counting_believes_all", 'if row["tag"] == "counting" else CONFIDENT', 'if row["tag"] == "none" else CONFIDENT'),
        ("objects:excluded_one_too_many", "e[\"count\"]) - 1", "e[\"count\"])"),
        ("objects:some_pair_is_enough", "placed = all(", "placed = any("),
        ("objects:all_or_nothing", "sum(holds(fact, objects) for fact in facts) / len(facts)", "float(all(holds(fact, objects) for fact in facts))"),
    ),
    *mutants_of(
        "remote_rewards.py",
        "test_remote_rewards.py",
        ("remote:a_flood_is_read", "data = reply.read(limit + 1)", "data = reply.read()[: limit + 1]"),
        ("remote:any_number_of_values", "if len(numbers) != rows or not all(", "if not all("),
        ("remote:client_errors_are_repeated", "300 <= reply.status < 500", "400 <= reply.status < 400"),
        ("remote:servers_failures_are_not_counted", "        if missing:\n", "        if False:\n"),
        ("remote:any_address", 'target.scheme in ("http", "https") and target.hostname', "target.hostname"),
        ("remote:a_part_is_sent_whole", "texts = images[spans[i]], prompts[spans[i]]", "texts = images[: spans[i].stop - spans[i].start], prompts[spans[i]]"),
        ("remote:a_broken_pipe_says_nothing", "except (BrokenPipeError, ConnectionResetError) as error:", "except ZeroDivisionError as error:"),
        ("remote:any_number_of_bytes", " and size + own <= max_bytes:", ":"),
        ("remote:a_busy_server_is_not_asked_when_it_says", "raise Busy(reason, float(after) if", "raise Busy(reason, 0.0 if"),
    ),
    *mutants_of(
        "reward_server.py",
        "test_remote_rewards.py",
        ("reward_server:any_size", "if len(given) > 18 or int(given) > self.server.max_bytes:", "if len(given) > 18:"),
        ("reward_server:requests_side_by_side", "        with self.alone:\n", "        if True:\n"),
        ("reward_server:places_are_not_given_back", "self.server.places.release()  #", "pass  #"),
        ("reward_server:endless_patience", "left = self.end - time.monotonic()", "left = 120.0"),
        ("reward_server:a_refused_body_is_cut_off", "return self._discard(int(given[:18]))", "return self._discard(self.server.max_bytes)"),
        ("reward_server:busy_without_a_time", ', {"Retry-After": "1"})', ")"),
        ("reward_server:refusals_in_html", "def send_error(self,", "def send_error_in_json(self,"),
        ("reward_server:four_requests", '"requests": options.requests}', '"requests": 4}'),
    ),
    *mutants_of(
        "reward_names.py",
        "test_reward_names.py",
        ("reward_names:one_device", "return load(*given, device=device)", "return load(*given, device=\"cpu\")"),
        ("reward_names:any_number_of_arguments", " or len(given) > (2 if \",\" in form else 1)", ""),
    ),
]  # fmt: skip

SCHEDULING = [
    *mutants_of(
        "partitions.py",
        "test_partitions.py",
        ("runs_shorter_first", "i * short + min(i, extra)", "i * short + max(0, i + extra - parts)"),
        ("prompt_partition_cuts_groups", "fragments, group_size, n_prompts)", "fragments, 1, n_prompts * group_size)"),
        ("ready_with_the_first_group", "max((complete[group] for group in groups), default=time)", "min((complete[group] for group in groups), default=time)"),
        ("pack_ignores_the_memory_cap", "        size = math.floor(memory_cap / bytes_per_pair)\n", "        pass\n"),
        ("pack_over_its_size", "max(1, -(-len(checked) // size))", "max(1, len(checked) // size)"),
        ("pair_twice_accepted", "if len(set(checked)) != len(checked):", "if False:"),
    ),
    *mutants_of(
        "costs.py",
        "test_costs.py",
        ("waves_rounded_down", "waves = -(-require_count(\"samples\", samples) // self.generator.replicas)", "waves = max(1, require_count(\"samples\", samples) // self.generator.replicas)"),
        ("helper_at_the_generator_s_speed", "waves * self.generate / self.trainer.speed", "waves * self.generate / self.generator.speed"),
        ("shard_by_samples", "q = -(-samples * timesteps // ranks) if shard_pairs", "q = -(-samples // ranks) * timesteps if shard_pairs"),
        ("packs_without_their_overhead", "-(-q // pack) * self.train.a", "self.train.a"),
        ("colocated_at_the_faster_speed", "min(self.generator.speed, self.trainer.speed)", "max(self.generator.speed, self.trainer.speed)"),
        ("fit_takes_the_worse_edge", "a, b = min(edges", "a, b = max(edges"),
        ("bound_helper_always_narrower", "width = min(width, cost.helper)", "width = cost.helper"),
        ("bound_unpacked", "cost.train.a / schedule.pack", "cost.train.a"),
        ("stale_cycle_not_halved", "(j * g + tail[j]) / 2", "(j * g + tail[j])"),
        ("barrier_without_reward", "float(m * g + r + m * t", "float(m * g + m * t"),
        ("gap_at_the_faster_stage", "(m - 1) * max(g, t)", "(m - 1) * min(g, t)"),
    ),
    *mutants_of(
        "schedules.py",
        "test_schedules.py",
        ("colocated_without_barrier", "object.__setattr__(self, \"barrier\", True)", "pass"),
        ("period_over_an_odd_window", "m = 2 * (len(self.ends) // 4)", "m = len(self.ends) // 2"),
        ("missing_row_accepted", "if max(seen) != len(seen) - 1:", "if False:"),
        ("trace_out_of_order", "            before = start\n", "            before = -math.inf\n"),
        ("stale_beyond_the_fragments", "if self.stale > len(self.fragments):", "if False:"),
    ),
    *mutants_of(
        "simulation.py",
        "test_simulation.py",
        ("claims_before_publication", "start = max(self.free, self.since)", "start = self.free"),
        ("claim_at_publication_on_the_old_version", "if start >= claims_before:", "if start > claims_before:"),
        ("one_stale_fragment_more", "batch.place >= self.schedule.stale", "batch.place > self.schedule.stale"),
        ("last_step_generates_ahead", "if batch.step == self.steps or batch.place", "if batch.place"),
        ("trains_the_lowest_index_first", "heapq.heappop(batch.trainable)[1]", "batch.trainable.pop(min((i, at) for at, (r, i) in enumerate(batch.trainable) if r <= self.now)[1])[1]"),
        ("never_asks_again", "batch.trained, waiting = batch.trained + 1, False", "batch.trained = batch.trained + 1"),
        ("helped_before_the_generator_at_one_instant", "            self.run_generator(self.now)\n            self.deliver(batch, fragment, self.now)\n", "            self.deliver(batch, fragment, self.now)\n            self.run_generator(self.now)\n"),
        ("restore_is_free", "        self.trainer(\"restore\", self.cost.restore)\n", ""),
        ("reward_worker_free_last", "start, worker = heapq.heappop(self.busy)", "start, worker = self.busy.pop(self.busy.index(max(self.busy)))"),
        ("colocated_trains_before_the_rewards", "now = max(now, scored)", "now = max(now, 0.0)"),
        ("module_swaps", "swaps = schedule.placement == \"engines\"", "swaps = True"),
        ("two_versions_late", "published == step - 1", "published >= step - 2"),
        ("group_ready_with_its_last_fragment_s_own_time", "max(time, self.complete[group])", "time"),
        ("chrome_in_milliseconds", "\"ts\": start * 1e6", "\"ts\": start * 1e3"),
    ),
    *mutants_of(
        "lending.py",
        "test_lending.py",
        ("largest_among_equals", "return next(n for n in counts if", "return next(n for n in reversed(counts) if"),
        ("bound_above_what_can_be_reached", "begin = state.now + state.owed", "begin = state.now + 2 * state.owed"),
        ("tail_of_everybody", "sum(self.train[j] for j in self.share[i])", "sum(self.train)"),
        ("help_before_training", "if ready or not self.queue:", "if not self.queue:"),
        ("search_ignores_busy_workers", "start = max(time, state.workers.pop(0))", "start = time"),
        ("search_forgets_the_switch", "state.now += self.stages.switch", "pass"),
        ("key_of_the_queue_alone", "return self.now, self.place, self.flying, self.free, readiness, tuple(self.workers)", "return self.place, self.flying"),
        ("scoring_bound_above_what_can_be_reached", "scored = max(workers[0], arrival) + rewards[0]", "scored = max(workers[0], arrival) + 3 * rewards[0]"),
        ("arrivals_of_the_shortest_helps_alone", "for f in rest[: m + 1])", "for f in rest[:m][-1:])"),
        ("arrivals_of_a_generator_that_works_twice", "made[m - q - flying]", "2 * made[m - q - flying]"),
        ("search_helps_at_the_generator_s_pace", "self.help = [cost.helper_seconds(n) for n in sizes]", "self.help = self.generate"),
        ("search_without_barrier", "barrier=schedule.barrier", "barrier=False"),
        ("fragment_twice_accepted", "if len(set(named)) != len(named):", "if False:"),
    ),
    *mutants_of(
        "presets.py",
        "test_presets.py",
        ("tie_to_more_generators", "return min(divisions, key", "return min(reversed(divisions), key"),
        ("tag_without_pack", "\"gap+tsp+tag\": replace(tsp, tag=True)", "\"gap+tsp+tag\": replace(gap, tag=True)"),
        ("genrl_swaps", "placement=\"module\"", "placement=\"engines\""),
        ("switch_and_restore_exchanged", "switch=9.1", "switch=3.3"),
    ),
]  # fmt: skip

EXECUTOR_MUTANTS = [
    *mutants_of(
        "plots.py",
        "test_plots.py",
        ("gantt_hides_staleness", 'hatch = "////" if stale else None', "hatch = None"),
        ("gantt_legend_in_one_row", "ncols=5 if len(traces) == 1 and len(kinds) > 5 else 9", "ncols=9"),
        ("gantt_edges_eat_the_bars", "linewidth=min(0.5, 0.1 * points)", "linewidth=0.5"),
        ("utilisation_is_idleness", "1 - idle / trace.makespan for", "idle / trace.makespan for"),
    ),
    *mutants_of(
        "windows.py",
        "test_packing.py",
        ("mean_of_the_packs_means", "len(run), whole\n", "1, len(runs)\n"),
        ("packs_beyond_their_size", "-(-len(pairs) // pack)", "max(1, len(pairs) // pack)"),
        ("packs_of_the_rank_s_own_window", "len(pairs) // len(mine) * n\n", "len(pairs)\n"),
        ("every_rank_packs_all_rows", "own = window if len(mine) == n else select_rows(window, mine)", "own = window"),
        ("a_rank_without_rows_fails", "    if not len(mine):\n        return\n", ""),
    ),
    *mutants_of(
        "training_checks.py",
        "test_training_checks.py",
        ("samples_and_states_together", 'if sizes.get("micro_batch") is not None and', "if False and"),
    ),
    *mutants_of(
        "engines.py",
        "test_engines.py",
        ("engines_under_torchrun", "if ranks > 1:", "if False:"),
        ("engines_without_first_frames", "if s.images is not None:", "if False:"),
    ),
    *mutants_of(
        "loop.py",
        "test_packing.py",
        ("loop:parts_that_say_nothing_count", "number.count if isinstance(number, Mean) else share", "share"),
        ("loop:parts_with_nothing_are_read", "samples, strict=True) if n]", "samples, strict=True)]"),
    ),
    *mutants_of(
        "states.py",
        "test_packing.py",
        ("pairs_of_a_pack_ignored", "if window.pairs is None:", "if True:"),
        ("a_state_twice_in_a_pack", "if len(pairs.unique(dim=0)) != len(pairs):", "if False:"),
    ),
    *mutants_of(
        "conductor.py",
        "test_conductor.py",
        ("executor_without_barrier", "schedule.group_size, barrier=schedule.barrier)", "schedule.group_size)"),
        (
            "trains_the_latest_first",
            'self.plan.append(("train", ready[0][1]))',
            'self.plan.append(("train", ready[-1][1]))',
        ),
        ("one_more_stale_fragment", "stale=self.schedule.stale)", "stale=self.schedule.stale + 1)"),
        ("the_last_step_looks_ahead", "exists = self.stop is None or batch.step < self.stop", "exists = True"),
        ("help_without_restore", '*(("help", i) for i in lent), ("restore", -1)]', '*(("help", i) for i in lent)]'),
        ("the_generator_is_thought_free", "free = max(0.0, flying.begun", "free = 0 * max(0.0, flying.begun"),
    ),
    *mutants_of(
        "conductor.py",
        "test_backends.py",
        ("half_a_gradient_is_kept", 'self.plan.append(("zero", -1))', "pass"),
        ("one_retry_too_many", "if self.attempts[key] > self.retries:", "if self.attempts[key] > self.retries + 1:"),
        ("scored_again_behind_the_others", "self.queue.appendleft((batch, fragment))", "pass"),
    ),
    *mutants_of(
        "trainers.py",
        "test_trainers.py",
        ("a_fragment_counts_twice", "if (step, update, index) in self.ledger:", "if False:"),
        ("commits_a_part_of_the_batch", "        if missing:\n", "        if False:\n"),
        ("every_rank_takes_everything", "even_runs(rows, self.ranks)[self.rank]", "range(rows)"),
        ("every_rank_takes_all_pairs", "tsp_shard(pairs, ranks=self.ranks)[self.rank]", "tuple(pairs)"),
        (
            "the_ledger_is_not_forgotten",
            "        self.ledger.clear()\n        self.stages.zero()",
            "        self.stages.zero()",
        ),
    ),
    *mutants_of(
        "trainers.py",
        "test_stages.py",
        ("divided_by_the_fragment_s_pairs", "total = len(window) * self", "total = len(chosen) * self"),
        ("groups_are_told_again", "if (step, group) not in self.told]", "if step >= 0]"),
    ),
    *mutants_of(
        "stages.py",
        "test_stages.py",
        ("every_step_has_the_same_seeds", "_hash63(int(seed), step)", "_hash63(int(seed), 0)"),
        ("a_collect_of_the_group_is_cut", "if not same or not all(", "if not same and not all("),
    ),
    *mutants_of(
        "stages.py",
        "test_trainers.py",
        (
            "helps_over_its_own_gradient",
            "        self.zero()\n        return {name: None",
            "        return {name: None",
        ),
    ),
    *mutants_of(
        "stages.py",
        "test_engines.py",
        ("behaviour_one_batch_behind", "done = (step + 1) * len(self.windows)", "done = step * len(self.windows)"),
    ),
    *mutants_of(
        "ray_backend.py",
        "test_ray_backend.py",
        ("the_last_rank_wins", "        total += gradient\n", "        total = gradient\n"),
        ("joined_before_all_are_done", "elif not left[0]:", "else:"),
        ("actors_on_a_node_that_is_gone", "STARTS = 3", "STARTS = 1"),
        ("what_cannot_be_built_is_tried_on", "not left or error.actor_init_failed", "not left"),
        (
            "a_new_trainer_starts_afresh",
            "        if state is not None:\n            self.stages.load(state)",
            "        pass",
        ),
    ),
]

COMMAND_LINE = (
    mutants_of(
        "cli_text.py",
        "test_cli.py",
        (
            "cli:colour_in_spite_of_no_color",
            'if shown and not os.environ.get("NO_COLOR") else text',
            "if shown else text",
        ),
        (
            "cli:no_suggestion_for_an_option",
            'return f" (did you mean {bare[found.group(1)]}?)" if found else ""',
            'return ""',
        ),
        (
            "cli:steps_of_one_update",
            '"optimizer_steps": algorithm.updates * (s.iterations - start),',
            '"optimizer_steps": s.iterations - start,',
        ),
    )
    + mutants_of(
        "cli.py",
        "test_cli.py",
        ("cli:a_failed_run_is_wrong_usage", "return _failed(name, begun, 1)", "return _failed(name, begun, 2)"),
        (
            "cli:prints_between_the_lines",
            "with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as stack:",
            "with contextlib.ExitStack() as stack:",
        ),
        (
            "cli:nan_in_json",
            "return None if isinstance(value, float) and not math.isfinite(value) else value",
            "return value",
        ),
    )
    + mutants_of(
        "settings.py",
        "test_cli.py",
        (
            "cli:checkpointing_forgotten",
            "lora=lora, gradient_checkpointing=s.gradient_checkpointing, **options",
            "lora=lora, **options",
        ),
    )
    + mutants_of(
        "folders.py",
        "test_folders.py",
        ("folders:edits_unnoticed", "if then != now:", "if False:"),
        ("folders:prompts_run_together", '"\\n".join(lines).encode()', '"".join(lines).encode()'),
        (
            "folders:pictures_by_name_alone",
            "name.encode() + hashlib.sha256((listed.parent / name).read_bytes()).digest()",
            "name.encode()",
        ),
    )
    + mutants_of(
        "run.py",
        "test_run.py",
        (
            "run:bar_of_the_mean",
            'masked = f"masked_fraction/update_{last_update([row])}"',
            'masked = "masked_fraction"',
        ),
        ("run:first_evaluation_not_counted", "return later + (start == 0)", "return later"),
    )
    + mutants_of("run.py", "test_tracking.py", ("run:pictures_told_again", "            seen = {}\n", ""))
    + mutants_of(
        "tracking.py",
        "test_tracking.py",
        (
            "tracking:nan_is_a_number",
            "finite = value is not None and math.isfinite(value)",
            "finite = value is not None",
        ),
        ("tracking:closed_is_open", "            self._open = False\n", ""),
        ("tracking:first_frame", "value[:, value.shape[1] // 2]", "value[:, 0]"),
        (
            "tracking:one_failing_close_ends_all",
            '                closing.callback(getattr(log, "close", lambda: None))',
            '                getattr(log, "close", lambda: None)()',
        ),
    )
    + mutants_of(
        "memory.py",
        "test_memory.py",
        (
            "memory:first_prompt_alone",
            "for i, prompt in enumerate(prompts):",
            "for i, prompt in enumerate(prompts[:1]):",
        ),
        (
            "memory:a_failing_vae_stays",
            "        finally:\n            vae.to(to)",
            "        finally:\n            pass",
        ),
    )
    + mutants_of(
        "numbers.py",
        "test_checks.py",
        ("nearest_by_case", "words = {name.lower(): name for", "words = {name: name for"),
    )
    + mutants_of(
        "plots.py",
        "test_plots.py",
        ("last_update_is_the_first", "return max((int(n.removeprefix", "return min((int(n.removeprefix"),
    )
)

ODD_WORKER_MUTANTS = [
    *mutants_of(
        "stages.py",
        "test_odd_workers.py",
        ("every_fragment_has_its_own_window", "first = int(seeds[0, 0])", "first = None"),
        ("parts_are_forgotten", "return rewards if score.parts is None else", "return rewards if True else"),
        ("the_state_given_is_trained", 'copy.deepcopy(state["optimizer"])', 'state["optimizer"]'),
        ("a_reward_waits_for_the_module", "        if found is not None:", "        if False:"),
    ),
    *mutants_of(
        "conductor.py",
        "test_odd_workers.py",
        ("what_cannot_be_judged_ends_the_run", "isinstance(error, NoReward) and", "False and"),
        ("a_thought_outlives_its_run", "            wait([self.thinking], timeout=seconds)", "            pass"),
    ),
    *mutants_of(
        "ray_backend.py",
        "test_ray_backend.py",
        ("plain_workers_begin_anew", "if self.commits and not hasattr", "if False and not hasattr"),
    ),
]


LAST_MUTANTS = [
    *mutants_of(
        "loop.py",
        "test_executors.py",
        ("loop:fragments_that_say_nothing_count", "number.count if isinstance(number, Mean) else share", "share"),
    ),
    *mutants_of(
        "executors.py",
        "test_executors.py",
        ("a_resumed_run_stops_too_soon", "stop = None if steps is None else start + steps", "stop = steps"),
        ("calibration_is_training", "        stages.load(held)\n", "        pass\n"),
    ),
    *mutants_of(
        "executors.py",
        "test_odd_workers.py",
        ("an_interrupted_step_leaves_its_half", "            stages.zero()\n", "            pass\n"),
    ),
    *mutants_of(
        "backends.py",
        "test_backends.py",
        ("a_thread_that_hangs_is_asked_again", "lane = self.lanes.pop(resource)", "lane = self.lanes[resource]"),
        ("order_is_not_picked", "rewards=rewards, pick=pick)", "rewards=rewards, pick=None)"),
    ),
    *mutants_of(
        "cli_options.py",
        "test_cli.py",
        ("cli:numbers_are_text", 'kind = int if "int" in annotation else', 'kind = str if "int" in annotation else'),
    ),
    *mutants_of(
        "loop.py",
        "test_loop.py",
        ("a_velocity_s_sign_is_not_seen", "cosine > 0 if clear else None", "True if clear else None"),
        ("an_untrained_model_points_the_wrong_way", "abs(cosine) > 0.2", "abs(cosine) >= 0"),
        ("ignored_params_are_not_seen", '"other params are used", gap > 0,', '"other params are used", gap >= 0,'),
        ("a_constant_reward_goes_up", "if bool((change != 0).any()) else None", "if True else None"),
    ),
    *mutants_of(
        "ray_backend.py",
        "test_ray_backend.py",
        ("gloo_gives_zeros_where_nobody_has_one", "p.grad = p.grad if known else None", "p.grad = p.grad"),
        ("gloo_keeps_its_own", "    torch_ranks().add(params)\n", ""),
        ("ray_sum_of_the_first", "for grads in ranks if grads[name]", "for grads in ranks[:1] if grads[name]"),
    ),
    *mutants_of(
        "conductor.py",
        "test_odd_workers.py",
        ("a_trace_ends_with_the_run", "tuple(ends[:steps])", "tuple(ends)"),
        ("traces_are_never_equal", "isinstance(other, Trace) and (self", "False and (self"),
    ),
]


COMMAND_MUTANTS = [
    *mutants_of(
        "cli.py",
        "test_cli.py",
        ("cli:stdout_below_python", "            os.dup2(other, 1)\n", ""),
        ("cli:sigterm_kills", "        old = signal.signal(signal.SIGTERM, stop)\n", "        old = None\n"),
        ("cli:closed_streams", 'for name in ("stdout", "stderr"):', "for name in ():"),
        ("cli:empty_folder", 'if getattr(options, name) == "":', "if False:"),
    ),
    *mutants_of(
        "tracking.py",
        "test_tracking.py",
        (
            "tracking:told_after_failing",
            "        if not failed:\n            attempt(",
            "        if True:\n            attempt(",
        ),
        ("tracking:no_pixels", "if not value.numel():", "if False:"),
    ),
    *mutants_of(
        "settings.py",
        "test_cli.py",
        ("settings:beyond_torch", "abs(value) >= 2**31", "False"),
    ),
]

MUTANTS = [
    *CHECKS,
    *SAMPLING,
    *GUIDANCE,
    *LOSSES,
    *TRUST_REGION,
    *THEORY,
    *ALGORITHMS,
    *OBJECTIVES,
    *LOOP,
    *DIRECTIONS,
    *BASELINES,
    *SCHEDULING,
    *REVIEWED,
    *QUANT,
    *RANKS,
    *FAMILIES_MUTANTS,
    *PLAN_MUTANTS,
    *PICTURES,
    *LATE,
    *SCORER_MUTANTS,
    *EXECUTOR_MUTANTS,
    *COMMAND_LINE,
    *ODD_WORKER_MUTANTS,
    *LAST_MUTANTS,
    *COMMAND_MUTANTS,
]


def copy_to(folder: Path, source: Path = ROOT) -> None:
    """The package and its tests, without caches and without the shipped model."""
    skip = shutil.ignore_patterns("__pycache__", "digits_sd3")
    for name in ("diffrl", "tests"):
        shutil.copytree(source / name, folder / name, ignore=skip)
    shutil.copy(source / "pyproject.toml", folder)
    (folder / "docs").mkdir()
    shutil.copy(source / "docs" / "metrics.md", folder / "docs")


def apply(mutant: Mutant, folder: Path) -> None:
    path = folder / "diffrl" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(
            f"{mutant.name}: {mutant.old!r} occurs {text.count(mutant.old)} times in {mutant.file}, not once"
        )
    path.write_text(text.replace(mutant.old, mutant.new))


def pytest_in(folder: str, tests: tuple[str, ...]) -> None:
    """The body of one process: pytest on the copy, which comes first on the path; exits with pytest's code."""
    os.chdir(folder)
    for stream in (1, 2):
        os.dup2(os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ |= {"PYTHONPATH": folder, "HYPOTHESIS_PROFILE": "mutants", "DIFFRL_TYPECHECK": "0"}
    sys.dont_write_bytecode = True
    sys.path[:] = [folder, *(p for p in sys.path if p and Path(p).resolve() not in (ROOT, ROOT / "tests"))]
    import pytest
    from hypothesis import Phase, settings

    phases = [Phase.explicit, Phase.generate]  # no shrinking: that a test fails is all that is asked
    settings.register_profile("mutants", deadline=None, max_examples=40, derandomize=True, phases=phases)
    code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *(f"tests/{name}" for name in tests)]))
    loaded = [m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "diffrl" and m.__file__]
    strangers = [path for path in loaded if not Path(path).resolve().is_relative_to(Path(folder).resolve())]
    if strangers or not loaded:
        print(f"imported {strangers or 'no diffrl at all'} instead of the copy in {folder}")
        code = STRANGER
    sys.stdout.flush()
    os._exit(code)


def run_tests(folder: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """pytest's exit code and output, from a process of its own that starts with the heavy imports done."""
    process = multiprocessing.get_context("forkserver").Process(target=pytest_in, args=(str(folder), tests))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        return 1, f"no answer in {SECONDS} s"
    output = folder / "output.txt"
    return process.exitcode or 0, output.read_text() if output.exists() else ""


def verdict(source: Path, mutant: Mutant) -> str:
    """killed, SURVIVED, or what went wrong (a mutant that cannot be imported proves nothing)."""
    with tempfile.TemporaryDirectory() as name:
        copy_to(Path(name), source)
        apply(mutant, Path(name))
        code, output = run_tests(Path(name), mutant.tests)
    if code == 0:
        return "SURVIVED"
    return "killed" if code == 1 else f"BROKEN (exit code {code})\n{output[-2000:]}"


def control(source: Path, tests: str) -> str:
    """Empty if the unmutated copy passes, else the end of pytest's output."""
    with tempfile.TemporaryDirectory() as name:
        copy_to(Path(name), source)
        code, output = run_tests(Path(name), (tests,))
    return "" if code == 0 else f"control: the unmutated copy fails {tests}\n{output[-2000:]}"


def check_list(source: Path, mutants: list[Mutant]) -> None:
    """Names are unique and every replacement applies, before anything runs."""
    names = [m.name for m in mutants]
    if repeated := {n for n in names if names.count(n) > 1}:
        raise SystemExit(f"mutants share a name: {sorted(repeated)}")
    for m in mutants:
        count = (source / "diffrl" / m.file).read_text().count(m.old)
        if count != 1:
            raise SystemExit(f"{m.name}: {m.old!r} occurs {count} times in {m.file}, not once")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these mutants alone")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default 2)")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if options.only is None or m.name in options.only]
    if options.only and len(chosen) != len(set(options.only)):
        raise SystemExit(f"unknown mutants: {sorted(set(options.only) - {m.name for m in chosen})}")
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    multiprocessing.get_context("forkserver").set_forkserver_preload(HEAVY)
    with tempfile.TemporaryDirectory() as snapshot:  # edits made meanwhile change nothing
        copy_to(Path(snapshot))
        check_list(Path(snapshot), chosen)
        return run(Path(snapshot), chosen, options.jobs)


def run(source: Path, chosen: list[Mutant], jobs: int) -> int:
    """The exit code: 0 where the control passes and every mutant is killed."""
    files, failed = sorted({name for m in chosen for name in m.tests}), []
    with ThreadPoolExecutor(jobs) as pool:
        for problem in tqdm(pool.map(partial(control, source), files), total=len(files), desc="control"):
            failed += [problem] if problem else []
        if failed:
            print("\n".join(failed))
            return 1
        results = pool.map(partial(verdict, source), chosen)
        for mutant, result in zip(chosen, tqdm(results, total=len(chosen), desc="mutants")):
            if result != "killed":
                failed.append(mutant.name)
                tqdm.write(f"{mutant.name}: {result}")
    print(f"{len(chosen)} mutants, {len(chosen) - len(failed)} killed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
