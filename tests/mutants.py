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
    ("open_interval_closed", "or (open_low and number == low)", ""),
    ("a_bool_is_a_count", "None if isinstance(value, bool) else operator.index(value)", "operator.index(value)"),
    (
        "shapes_may_broadcast",
        "if len({tuple(x.shape) for x in tensors.values()}) != 1:",
        "if len({x.ndim for x in tensors.values()}) != 1:",
    ),
    ("rows_of_any_length", "if tuple(x.shape) != (b,):", "if x.ndim != 1:"),
    ("missing_keys_accepted", "if a.keys() != b.keys():", "if a.keys() - b.keys():"),
)

SAMPLING = mutants_of(
    "sampling.py",
    "test_sampling.py",
    ("interpolate_reversed", "return (1 - t) * x_0 + t * noise", "return t * x_0 + (1 - t) * noise"),
    ("predict_x_0_sign", "return x_t - column(time_rows(\"t\", t, x_t), x_t) * v", "return x_t + column(time_rows(\"t\", t, x_t), x_t) * v"),
    ("predict_noise_without_1_minus_t", "(1 - column(time_rows(\"t\", t, x_t), x_t)) * v", "column(time_rows(\"t\", t, x_t), x_t) * v"),
    ("shift_twice", "    t = t.to(torch.promote_types(dtype or", "    t = shift * t / (1 + (shift - 1) * t)\n    t = t.to(torch.promote_types(dtype or"),
    ("grid_above_1", "shift * u / (shift * u + (1 - u))", "shift * u / (1 + (shift - 1) * u)"),
    ("euler_uphill", "return x_t - column(now - then, x_t) * v,", "return x_t + column(now - then, x_t) * v,"),
    ("flow_sde_without_its_first_step_rule", "torch.where(now == 1, then, now)", "then"),
    ("flow_sde_variance_without_delta", "eta * torch.sqrt(now * delta / rest)", "eta * torch.sqrt(now / rest)"),
    ("flow_sde_score_sign", "on_x = 1 - s2 * delta", "on_x = 1 + s2 * delta"),
    ("dance_without_its_score", "pull = eta**2 / 2 * delta / now", "pull = 0 * eta**2 / 2 * delta / now"),
    ("dance_eta_not_squared", "pull = eta**2 / 2", "pull = eta / 2"),
    ("cps_without_cosine", "kept = then * math.cos(eta * math.pi / 2)", "kept = then * math.sqrt(1 - eta**2)"),
    ("latent_mean_in_half", "Mean over all latent axes. What every peer uses for log-probabilities: ratios are then exp(log-ratio / D).\"\"\"\n    (x,) = promote(x)\n", "Mean.\"\"\"\n"),
    ("latent_sum_of_the_last_axis", "x.flatten(1).sum(1)", "x.flatten(1).sum(1) / x.shape[1]"),
    ("log_prob_without_normaliser", " - torch.log(safe) - math.log(2 * math.pi) / 2", ""),
    ("log_prob_without_the_2", "/ (2 * safe**2)", "/ safe**2"),
    ("log_prob_0_where_deterministic", "torch.where(std > 0, log_prob, torch.full_like(log_prob, math.nan))", "torch.where(std > 0, log_prob, torch.zeros_like(log_prob))"),
    ("kl_without_the_2", "/ (2 * column(_positive(std), mean_p) ** 2)", "/ column(_positive(std), mean_p) ** 2"),
    ("negative_std_accepted", "(torch.isfinite(std) & (std >= 0)).all()", "torch.isfinite(std).all()"),
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
    ("windows_do_not_roll_back", "if start + stride + size <= steps - 1 else 0", "if start + stride + size <= steps - 1 else start"),
    ("windows_move_every_time", "for _ in range(every):", "for _ in range(1):"),
    ("guidance_without_the_unconditional", "return v_uncond + scale * (v_cond - v_uncond)", "return v_cond + scale * (v_cond - v_uncond)"),
    ("guidance_in_half_precision", "v_cond, v_uncond = promote(v_cond, velocity(params, x_t, t, {**given, **twins}))", "v_uncond = velocity(params, x_t, t, {**given, **twins})"),
    ("unconditional_is_conditional", "{**given, **twins}", "{**twins, **given}"),
    ("chunks_share_the_first_condition", "_rows(cond, i, i + size)", "_rows(cond, 0, len(x_t[i : i + size]))"),
)  # fmt: skip

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
    ("old_log_prob_carries_gradient", "torch.exp(log_prob - log_prob_old.detach()), advantages", "torch.exp(log_prob - log_prob_old), advantages"),
    ("guard_without_its_bias", "(log_prob - log_prob_old.detach() + bias) * std", "(log_prob - log_prob_old.detach()) * std"),
    ("guard_without_std", "(log_prob - log_prob_old.detach() + bias) * std", "(log_prob - log_prob_old.detach() + bias)"),
    ("guard_accepts_deterministic_steps", "(torch.isfinite(std) & (std > 0)).all()", "torch.isfinite(std).all()"),
    ("guard_bias_of_the_micro_batch", "bias = latent_mean((mean - mean_old.detach()) ** 2)", "bias = ((mean - mean_old.detach()) ** 2).mean()"),
    ("awm_target_sign", "target = (noise - x_0).detach()", "target = (x_0 - noise).detach()"),
    ("awm_maximises_the_error", "-velocity_matching(v, target), -velocity", "velocity_matching(v, target), velocity"),
    ("masked_mean_divides_by_kept", "/ max(len(values), 1)", "/ max(float((weight > 0).sum()), 1)"),
    ("masked_by_multiplication", "kept = torch.where(weight > 0, values, torch.zeros_like(values))", "kept = values"),
    ("weights_as_a_mask", "return (kept * weight).sum()", "return kept.sum()"),
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
        ("theory:branches_swapped", "return latent_mean(weight(plus) * plus**2), latent_mean(weight(minus) * minus**2), r", "return latent_mean(weight(minus) * minus**2), latent_mean(weight(plus) * plus**2), r"),
        ("theory:shift_without_beta", "shift = beta * (v - v_old)", "shift = v - v_old"),
    ),
    *mutants_of(
        "trust_region.py",
        "test_theory.py",
        ("theory:ema_lag", "decay * old[name].detach() + (1 - decay) * new", "decay**2 * old[name].detach() + (1 - decay**2) * new"),
    ),
]  # fmt: skip

ALGORITHMS = mutants_of(
    "algorithms.py",
    "test_algorithms.py",
    ("noisiest_are_the_last", "        return range(count)\n", "        return range(steps - count, steps)\n"),
    ("subset_unsorted", "[:, :size].sort(dim=1).values", "[:, :size]"),
    ("subset_shared_by_all", "seeded_noise(seeds, (candidates,), stream=SUBSET_STREAM)", "seeded_noise(seeds[:1].expand_as(seeds), (candidates,), stream=SUBSET_STREAM)"),
    ("prompts_interleaved", "repeat_interleave(k)\n        trajectory", "repeat_interleave(k).reshape(g, k).T.flatten()\n        trajectory"),
    ("collect_keeps_everything", "keep=kept", "keep=None"),
    ("credit_per_sample_member_major", "direction.value.repeat_interleave(k, 0)", "direction.value.repeat(k, *[1] * (x_0.ndim - 2))"),
    ("credit_of_missing_samples", "\"has_reward\": _has_reward(values)", "\"has_reward\": _has_reward(torch.zeros_like(values))"),
    ("credit_ignores_scale", "aggregate_direction(values, x_0, scale=scale,", "aggregate_direction(values, x_0,"),
    ("one_pairing_for_ever", ".manual_seed(int(seeds[0]) % 2**63)", ".manual_seed(0)"),
    ("best_against_second_best", "zip(order[: len(order) // 2], order[::-1])", "zip(order[: len(order) // 2], order[len(order) // 2 :])"),
    ("states_step_major", "rows = torch.arange(b, device=columns.device).repeat_interleave(len(columns) // max(b, 1))", "rows = torch.arange(b, device=columns.device).repeat(len(columns) // max(b, 1))"),
    ("objective_reads_x_next", "velocity(params, s.x_t, s.t, s.cond)", "velocity(params, s.x_next, s.t, s.cond)"),
    ("objective_without_mask", "return velocity_matching(v, target), inside & trained, metrics", "return velocity_matching(v, target), trained, metrics"),
    ("objective_trains_dead_groups", "return velocity_matching(v, target), inside & trained, metrics", "return velocity_matching(v, target), inside, metrics"),
    ("objective_toward_live_params", "guided_velocity(s.v_old, window", "guided_velocity(velocity(params, s.x_t, s.t, s.cond), window"),
    ("direction_reaches_v_with_a_plus", "window.credit[\"direction\"].to(s.v_old)[s.rows]", "-window.credit[\"direction\"].to(s.v_old)[s.rows]"),
    ("masked_fraction_of_all_states", "_share(~inside, trained)", "_share(~inside, torch.ones_like(trained))"),
    ("guidance_force_is_net", "return v + (target - v_old)", "return target"),
    ("reference_kernel_ignored", "s.t_next, step=reference_kernel)", "s.t_next)"),
    ("art_ignores_its_radius", "            radius=radius,\n", "            radius=1e-5,\n"),
    ("art_flash_trains_everything", "trained_steps=_noisiest(noisiest)", "trained_steps=all_steps"),
    ("art_pairwise_on_rewards", "return art(labels=pairing, **settings)", "return art(**settings)"),
    ("behaviour_never_moves", "    return params\n", "    return behaviour\n"),
)  # fmt: skip

LOOP = [
    *mutants_of(
        "loop.py",
        "test_loop.py",
        ("loop:no_clipping", "torch.inf if grad_clip is None else grad_clip)", "torch.inf)"),
        ("loop:gradients_pile_up", "        p.grad = None\n    n = len", "        pass\n    n = len"),
        ("loop:micro_batches_unweighted", "value = masked_mean(loss, keep) * (len(rows) / n)", "value = masked_mean(loss, keep)"),
        ("loop:live_params_roll_out", "algorithm.collect(sampler, behaviour, cond", "algorithm.collect(sampler, model.params, cond"),
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

MUTANTS = [*CHECKS, *SAMPLING, *GUIDANCE, *LOSSES, *TRUST_REGION, *THEORY, *ALGORITHMS, *LOOP]


def copy_to(folder: Path, source: Path = ROOT) -> None:
    """The package and its tests, without caches and without the shipped model."""
    skip = shutil.ignore_patterns("__pycache__", "digits_sd3")
    for name in ("diffrl", "tests"):
        shutil.copytree(source / name, folder / name, ignore=skip)
    shutil.copy(source / "pyproject.toml", folder)


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
