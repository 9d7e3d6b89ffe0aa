"""From settings to what a run works on, the refusals, and the held-out evaluation.

Negative controls are the tests with `control` in their names.
"""

import sys
from dataclasses import asdict, replace

import pytest
import torch
from toys import adam, toy_run

from diffrl import algorithms
from diffrl.algorithms import all_steps
from diffrl.reward_names import REWARDS
from diffrl.rewards import TextReward, quoted, weighted_sum
from diffrl.sampling import rollout, sample_seeds
from diffrl.settings import (
    ALGORITHMS,
    DRAFTS,
    HELD_OUT_SEED,
    Evaluation,
    Judge,
    Settings,
    build,
    check_settings,
    drafted,
    evaluate,
    judge_text,
    make_algorithm,
    make_draft,
    make_reward,
    parse_trained_steps,
    read_prompts,
    rehearse,
)
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model
from diffrl.types import Gridded

# ---- trained steps


@pytest.mark.parametrize(
    ("text", "candidates", "size"),
    [
        ("all", range(8), None),
        ("noisiest:4", range(4), None),
        ("random:3", range(8), 3),
        ("random:3/4", range(4), 3),
        ("auto", range(5), 3),
        ("random:4/4", range(4), 4),
        ("noisiest:8", range(8), None),
    ],
)
def test_trained_steps_by_hand(text, candidates, size):
    chosen, per_sample = parse_trained_steps(text, 8)
    assert list(chosen(8)) == list(candidates)
    assert per_sample == size


@pytest.mark.parametrize(
    "text",
    [
        *("", "some", "all:3", "all ", "noisiest", "noisiest:0", "noisiest:9", "noisiest:1/2", "noisiest:x"),
        *("random", "random:0", "random:9", "random:-1", "random:5/4", "random:1/9", "random:1/2/3"),
    ],
)
def test_other_trained_steps_are_refused(text):
    with pytest.raises(ValueError, match=rf"--trained-steps.*steps=8, got '{text}'"):
        parse_trained_steps(text, 8)


# ---- settings

BAD = [
    ("task", "letters", "--task.*digits.*'letters'"),
    ("algorithm", "ppo", "--algorithm.*art.*'ppo'"),
    ("iterations", 0, "--iterations.*0"),
    ("group_size", 1, "--group-size.*1"),
    ("prompts_per_iteration", 0, "--prompts-per-iteration.*0"),
    ("steps", 0, "--steps.*0"),
    ("lora_rank", -1, "--lora-rank.*-1"),
    ("lora_alpha", -1, "--lora-alpha.*-1"),
    ("eval_every", 0, "--eval-every.*0"),
    ("eval_samples", 0, "--eval-samples.*0"),
    ("checkpoint_every", 0, "--checkpoint-every.*0"),
    ("threads", 0, "--threads.*0"),
    ("micro_batch", 0, "--micro-batch.*0"),
    ("rollout_chunk", 0, "--rollout-chunk.*0"),
    ("height", 0, "--height.*0"),
    ("width", -8, "--width.*-8"),
    ("seed", -1, "--seed.*-1"),
    ("seed", 2**62, "--seed.*4611686018427387904"),
    ("learning_rate", 0.0, "--learning-rate.*0"),
    ("learning_rate", float("nan"), "--learning-rate.*nan"),
    ("radius", -1e-5, "--radius.*-1e-05"),
    ("trained_steps", "random:9", "--trained-steps.*'random:9'"),
    ("device", "abacus", "--device 'abacus'"),
    ("pack", 0, "--pack.*0"),
    ("engine", "steam", "--engine.*loop, in_process, ray.*'steam'"),
    ("generators", 0, "--generators.*0"),
    ("trainers", 0, "--trainers.*0"),
    ("fragments", 0, "--fragments.*0"),
    ("stale", -1, "--stale.*-1"),
    ("task", "digit", r"--task.*'digit' \(did you mean 'digits'\?\)"),
    ("fragments", 2, "--fragments 2: --engine loop has none; it belongs to in_process, ray"),
    ("trainers", 2, "--trainers 2: --engine loop has none; it belongs to ray"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_one_bad_setting_is_refused_by_its_option_and_value(name, value, message):
    with pytest.raises(ValueError, match=message):
        check_settings(replace(Settings(), **{name: value}))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"draft": "int4"}, "--draft must be one of none, policy, nvfp4, mxfp4, got 'int4'"),
        ({"pool": 48}, "--pool 48 needs a --draft"),
        ({"draft_skip": "norm_out"}, "--draft-skip 'norm_out' needs a --draft"),
        ({"audit_every": 5}, "--audit-every 5 needs a --draft"),
        ({"draft": "nvfp4", "group_size": 7}, "--group-size 7 is odd"),
        ({"draft": "nvfp4", "pool": 8}, "--pool 8 must be at least --group-size 16"),
        ({"draft": "policy", "draft_min_dim": 64}, "--draft policy converts nothing.*64"),
        ({"draft": "nvfp4", "draft_steps": 0}, "--draft-steps.*0"),
        ({"draft": "nvfp4", "draft_steps": 9}, "--draft-steps 9 is more than --steps 8"),
        ({"draft": "nvfp4", "pool": 0}, "--pool.*0"),
        ({"draft": "nvfp4", "draft_min_dim": -1}, "--draft-min-dim.*-1"),
        ({"draft": "nvfp4", "audit_every": 0}, "--audit-every.*0"),
    ],
)
def test_drafts_that_cannot_be_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        check_settings(replace(Settings(), **changed))


@pytest.mark.parametrize("draft", [name for name in DRAFTS if name != "none"])
def test_control_every_draft_is_accepted_and_rehearsed(draft):
    s = Settings(draft=draft, pool=20, draft_steps=4, audit_every=3)
    check_settings(s)
    rehearse(make_algorithm(s), s)
    algorithm = drafted(make_algorithm(s), s, make_draft(s, toy_model()))
    assert (algorithm.pool, algorithm.kept) == (20, 16)
    velocity, params = make_draft(s, toy_model())({"mean": 1})
    assert callable(velocity)
    assert params == {"mean": 1}


def test_without_a_draft_the_algorithm_is_itself():
    algorithm = make_algorithm(Settings())
    assert drafted(algorithm, Settings(), None) is algorithm


def test_an_algorithm_whose_samples_share_their_noise_is_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match="DanceGRPO"):
        build(Settings(algorithm="dance_grpo", draft="nvfp4", model="nowhere"))


def test_control_the_defaults_are_accepted():
    check_settings(Settings())


def test_a_device_that_is_not_here_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="--device 'cuda'"):
        check_settings(Settings(device="cuda"))


def test_prompts_task_needs_a_model_and_prompts():
    with pytest.raises(ValueError, match="--task prompts needs --model and --prompts"):
        check_settings(Settings(task="prompts", model="somewhere"))
    check_settings(Settings(task="prompts", model="somewhere", prompts="file"))


def test_settings_are_json():
    import json

    assert Settings(**json.loads(json.dumps(asdict(Settings())))) == Settings()


# ---- algorithms and rewards


@pytest.mark.parametrize("name", ["art", "art_flash", "art_pairwise"])
def test_art_gets_the_runs_trained_steps_and_radius(name):
    trained = "random:2/3"
    algorithm = make_algorithm(Settings(algorithm=name, trained_steps=trained, radius=0.5, steps=5))
    kept = []
    plain = algorithm.objective

    def objective(velocity, params, window):
        loss, keep, metrics = plain(velocity, params, window)
        kept.append((window.trajectory.x_t.shape[1], len(loss) // len(window.rewards)))
        return loss, keep, metrics

    _, rows = toy_run(algorithm=algorithm._replace(objective=objective), iterations=1)
    assert set(kept) == {(3, 2)}  # kept steps, trained steps per sample
    assert rows[0]["masked_fraction"] == 0  # at this radius; at the default one it is not
    small = make_algorithm(Settings(algorithm=name, trained_steps=trained, steps=5))
    assert toy_run(algorithm=small, iterations=1)[1][0]["masked_fraction"] > 0


def test_rewards_by_name_and_by_module():
    assert isinstance(make_reward("ocr", threads=1), TextReward)
    assert make_reward("diffrl.tasks.toy:toward_compass") is toward_compass
    flat = make_reward("jpeg_compressibility")(torch.zeros(1, 8, 8, 3, dtype=torch.uint8), ["x"])
    assert float(flat) == -float(
        make_reward("jpeg_incompressibility")(torch.zeros(1, 8, 8, 3, dtype=torch.uint8), ["x"])
    )
    assert {"ocr", "tesseract_ocr", "jpeg_compressibility", "jpeg_incompressibility"} == set(REWARDS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("beauty", "--reward must be one of ocr, .* got 'beauty'"),
        ("no_such_module:f", "--reward 'no_such_module:f' cannot be imported: No module"),
        ("math:no_such_function", "--reward 'math:no_such_function' cannot be imported"),
        ("math:pi", "--reward 'math:pi' is not callable: 3.14"),
    ],
)
def test_unknown_rewards_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        make_reward(name)


def test_a_reward_whose_package_is_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(ImportError, match=r"pip install 'diffrl\[demo\]'"):
        make_reward("ocr")


def reading(*texts):
    return TextReward(quoted, lambda pictures: [texts[i % len(texts)] for i in range(len(pictures))])


def test_a_judge_remembers_exact_matches_of_its_last_call():
    images, prompts = torch.zeros(4, 8, 8, 3, dtype=torch.uint8), ['the "12"', 'the "34"', 'the "56"', "no target"]
    judge = Judge(reading("12", "3", "x56", "7"))
    assert judge.exact != judge.exact
    values = judge(images, prompts)
    assert values[:3].tolist() == [1.0, 0.5, 1.0]
    assert values[3] != values[3]
    assert judge.exact == pytest.approx(1 / 3)
    values, exact, texts = judge_text(judge.reward, images[:2], prompts[:2])
    assert (values.tolist(), exact.tolist(), texts) == ([1.0, 0.5], [1.0, 0.0], ["12", "3"])


def test_a_judge_of_a_reward_that_does_not_read_hands_its_values_on():
    judge = Judge(toward_compass)
    assert judge(torch.zeros(2, 2), ["north", "east"]).tolist() == [-1.0, -1.0]
    assert judge.exact != judge.exact


# ---- prompts


def test_prompts_are_the_non_empty_lines(tmp_path):
    (tmp_path / "p.txt").write_text("one\n\n  two  \n")
    assert read_prompts(str(tmp_path / "p.txt")) == ["one", "two"]


def test_prompts_that_are_not_there_are_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(ValueError, match=r"--prompts '.*empty.txt' holds no prompts"):
        read_prompts(str(tmp_path / "empty.txt"))
    with pytest.raises(ValueError, match=r"--prompts '.*gone.txt' is no file"):
        read_prompts(str(tmp_path / "gone.txt"))
    with pytest.raises(ValueError, match=r"--prompts '.*' is no file"):
        read_prompts(str(tmp_path))


# ---- build


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    from small import save_small_pipeline

    return save_small_pipeline(tmp_path_factory.mktemp("small"))


def small(pipe, **changed):
    from small import small_settings

    return Settings(**small_settings(pipe, **changed))


def test_build_is_a_function_of_the_settings(pipe):
    benches = [build(small(pipe, seed=seed)) for seed in (3, 3, 4)]
    first, again, other = ({n: p.detach() for n, p in bench.model.params.items()} for bench in benches)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    bench = benches[0]
    assert bench.prompts == [f'the number "{n}"' for n in ("12", "34", "56", "78")]
    assert bench.held_out is None
    assert bench.model.latent_shape() == (4, 6, 8)
    assert all(p.requires_grad for p in bench.model.params.values())


def test_build_takes_the_lora_and_a_held_out_reward(pipe):
    bench = build(small(pipe, lora_rank=3, lora_alpha=5, held_out_reward="jpeg_incompressibility"))
    assert {p.shape[0] for n, p in bench.model.params.items() if "lora_A" in n} == {3}
    layer = next(m for m in bench.model.module.modules() if hasattr(m, "scaling"))
    assert layer.scaling["default"] == pytest.approx(5 / 3)
    assert bench.held_out is not None


def test_a_saved_pipeline_of_one_s_own_is_read_at_the_text_length_asked_for(pipe, tmp_path):
    """The digits' model reads one token; at its pipeline's own length it writes other numbers."""
    (tmp_path / "prompts.txt").write_text("the number 12\nthe number 34\n")
    mine = {
        "task": "prompts",
        "prompts": str(tmp_path / "prompts.txt"),
        "prompts_per_iteration": 2,
        "height": 24,
        "width": 32,
    }
    lengths = []
    for asked in ({"max_sequence_length": 1}, {"max_sequence_length": 3}, {}):
        bench = build(small(pipe, **mine, guidance_scale=1.0, **asked))
        assert bench.options == {"height": 24, "width": 32, "guidance_scale": 1.0, **asked}
        lengths.append({n: v.shape[1] for n, v in bench.model.encode(bench.prompts).items()}["encoder_hidden_states"])
    assert lengths[1] - lengths[0] == 2
    assert lengths[2] > lengths[1]
    with pytest.raises(ValueError, match="--max-sequence-length must be an integer >= 1, got 0"):
        build(small(pipe, **mine, max_sequence_length=0))
    with pytest.raises(ValueError, match="--model 'nowhere' is no folder here, and no model of a hub"):
        build(small(pipe, **mine | {"model": "nowhere"}))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompts_per_iteration": 5}, "--prompts-per-iteration 5 of only 4 prompts"),
        ({"model": "nowhere"}, "--model 'nowhere' has no model_index.json"),
        ({"prompts": "nowhere.txt"}, "--prompts 'nowhere.txt'"),
        ({"height": 25}, "height.*25"),
        ({"guidance_scale": 0.5}, "guidance_scale.*0.5"),
        ({"held_out_reward": "beauty"}, "'beauty'"),
    ],
)
def test_build_refuses(pipe, changed, message):
    with pytest.raises(ValueError, match=message):
        build(small(pipe, **changed))


# ---- evaluation


def test_evaluation_is_the_plain_sampler_at_held_out_seeds():
    model, _ = toy_run(iterations=2)
    found = evaluate(model, PROMPTS, toward_compass, steps=4, samples=3)
    names = [prompt for prompt in PROMPTS for _ in range(3)]
    seeds = sample_seeds(HELD_OUT_SEED, 0, range(4), 3).flatten()
    walked = rollout(model.velocity, model.params, model.encode(names), model.times(4), seeds=seeds, shape=(2,))
    assert isinstance(found, Evaluation)
    assert torch.equal(found.images, walked.x_0)
    assert found.prompts == names
    assert torch.equal(found.rewards, toward_compass(walked.x_0, names))
    assert found.readings is None
    assert found.exact is None


def test_evaluation_is_repeatable_in_any_chunks_and_moves_nothing():
    model, state = toy_model(), torch.get_rng_state()
    whole = evaluate(model, PROMPTS, toward_compass, steps=4, samples=5)
    parts = evaluate(model, PROMPTS, toward_compass, steps=4, samples=5, chunk=3)
    assert torch.allclose(whole.images, parts.images, atol=1e-6)
    assert torch.equal(whole.images, evaluate(model, PROMPTS, toward_compass, steps=4, samples=5).images)
    assert torch.equal(torch.get_rng_state(), state)


def test_held_out_seeds_are_no_training_seeds():
    held_out = set(sample_seeds(HELD_OUT_SEED, 0, range(4), 8).flatten().tolist())
    trained = {int(s) for seed in (0, 1, 2**62 - 1) for s in sample_seeds(seed, 0, range(4), 8).flatten()}
    assert not held_out & trained
    with pytest.raises(ValueError, match="--seed"):
        check_settings(Settings(seed=HELD_OUT_SEED))


def test_evaluation_takes_other_params():
    model, _ = toy_run(iterations=3)
    initial = toy_model().params
    base = evaluate(model, PROMPTS, toward_compass, steps=4, samples=8, params=initial)
    trained = evaluate(model, PROMPTS, Judge(toward_compass), steps=4, samples=8)
    assert float(trained.rewards.mean()) > float(base.rewards.mean()) + 0.1
    assert torch.equal(base.images, evaluate(toy_model(), PROMPTS, toward_compass, steps=4, samples=8).images)


def test_evaluation_of_a_reader_gives_readings_and_matches():
    model = toy_model()._replace(decode=lambda latents: torch.zeros(len(latents), 8, 8, 3, dtype=torch.uint8))
    model = model._replace(encode=lambda prompts: {"prompt": torch.zeros(len(prompts), dtype=torch.long)})
    found = evaluate(model, ['a "1"', 'a "2"'], Judge(reading("1", "2", "9")), steps=2, samples=2)
    assert found.readings == ["1", "2", "9", "1"]
    assert found.exact.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert found.rewards.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_control_evaluation_sees_what_training_changed():
    model = toy_model()
    before = evaluate(model, PROMPTS, toward_compass, steps=4, samples=8)
    toy_run(model=model, iterations=3)
    after = evaluate(model, PROMPTS, toward_compass, steps=4, samples=8)
    assert not torch.equal(before.images, after.images)
    assert all_steps(3) == range(3)


def test_a_reward_whose_module_raises_is_named(tmp_path, monkeypatch):
    (tmp_path / "raising_reward.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"--reward 'raising_reward:f' .* ZeroDivisionError"):
        make_reward("raising_reward:f")
    with pytest.raises(ValueError, match="--reward ':f'"):
        make_reward(":f")


def test_a_prompts_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "p.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"--prompts .*p\.txt"):
        read_prompts(str(tmp_path / "p.txt"))


def test_art_flash_trains_all_of_the_noisiest_four_by_default():
    model = toy_model()
    sampler = Gridded(model.velocity, model.times, 8, (2,))
    cond, seeds = model.encode(PROMPTS), sample_seeds(0, 0, range(4), 2)
    kept = {}
    for name in ("art", "art_flash"):
        algorithm = make_algorithm(Settings(algorithm=name))
        batch = algorithm.collect(sampler, model.params, cond, seeds, lambda x_0, rows: x_0[:, 0])
        kept[name] = batch.trajectory.t
    assert torch.equal(kept["art_flash"], model.times(8)[:4])
    assert torch.equal(kept["art"], model.times(8)[:5])


# ---- the other algorithms

KEPT = {
    "flow_grpo": (9, 9),
    "flow_grpo_fast": (3, 3),
    "mix_grpo": (4, 4),
    "dance_grpo": (9, 5),
    "grpo_guard": (9, 9),
    "cps_grpo": (9, 9),
    "flow_dppo": (5, 3),
    "nft": (10, 10),
    "nft_ocr": (10, 10),
    "awm": (9, 9),
    "art": (7, 4),
    "art_flash": (4, 4),
    "art_pairwise": (7, 4),
}
"""Of 10 steps: kept, and trained per sample, by default."""


def trained_by(algorithm, steps=10):
    """{(kept steps, trained steps per sample)} of one iteration on the toy, and its metrics."""
    found = set()

    def objective(velocity, params, window):
        loss, keep, metrics = algorithm.objective(velocity, params, window)
        found.add((window.trajectory.x_t.shape[1], len(loss) // len(window.rewards)))
        return loss, keep, metrics

    model = toy_model()
    optimizer = adam(model, lr=0.3)
    _, rows = toy_run(
        model=model, optimizer=optimizer, algorithm=algorithm._replace(objective=objective), iterations=1, steps=steps
    )
    return found, rows[0]


def test_every_algorithm_of_the_command_line_is_the_factory_of_that_name():
    assert set(KEPT) == set(ALGORITHMS)
    for name, factory in ALGORITHMS.items():
        assert factory is getattr(algorithms, name)
        check_settings(Settings(algorithm=name))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_can_be_made_and_trains_its_own_steps_by_default(name):
    found, _ = trained_by(make_algorithm(Settings(algorithm=name, steps=10)))
    assert found == {KEPT[name]}


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"flow_grpo_fast", "mix_grpo"}))
def test_given_trained_steps_reach_every_algorithm_that_has_them(name):
    found, _ = trained_by(make_algorithm(Settings(algorithm=name, steps=10, trained_steps="random:2/6")))
    assert found == {(6, 2)}
    found, _ = trained_by(make_algorithm(Settings(algorithm=name, steps=10, trained_steps="noisiest:5")))
    assert found == {(5, 5)}


@pytest.mark.parametrize("name", ["flow_grpo_fast", "mix_grpo"])
@pytest.mark.parametrize("text", ["all", "noisiest:2", "random:3"])
def test_trained_steps_are_refused_where_the_window_decides(name, text):
    # An option that does nothing is refused: which steps are trained is one thing. https://github.com/yifan123/flow_grpo/issues/62
    with pytest.raises(ValueError, match=f"--trained-steps '{text}': {name} trains the steps of its own window"):
        make_algorithm(Settings(algorithm=name, trained_steps=text))


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"art", "art_flash", "art_pairwise", "flow_dppo"}))
def test_a_radius_is_refused_where_there_is_no_trust_region(name):
    with pytest.raises(ValueError, match=rf"--radius 0\.5: {name} has no trust region"):
        make_algorithm(Settings(algorithm=name, radius=0.5))
    make_algorithm(Settings(algorithm=name, radius=Settings.radius))


@pytest.mark.parametrize("name", ["art", "art_flash", "art_pairwise", "flow_dppo"])
def test_a_radius_reaches_every_trust_region(name):
    assert trained_by(make_algorithm(Settings(algorithm=name, steps=10, radius=100.0)))[1]["masked_fraction"] == 0
    assert trained_by(make_algorithm(Settings(algorithm=name, steps=10, radius=0.0)))[1]["masked_fraction"] > 0


def test_control_presets_keep_their_own_constants():
    """`nft_ocr` is not `nft`, `cps_grpo` not `flow_grpo`: two updates, and noise of another size."""
    made = {
        name: make_algorithm(Settings(algorithm=name, steps=10)) for name in ("nft", "nft_ocr", "flow_grpo", "cps_grpo")
    }
    assert [made[name].updates for name in ("nft", "nft_ocr")] == [1, 2]
    stds = [trained_by(made[name])[1]["std/t=1.000"] for name in ("flow_grpo", "cps_grpo")]
    assert stds == pytest.approx([0.7, 0.9 * 0.9510565], rel=1e-5)


def test_a_judge_hands_the_single_values_of_a_sum_on():
    """mix_grpo adds advantages per reward: they must reach it through the command line as well."""
    both = weighted_sum({"compass": toward_compass, "loud": lambda images, prompts: 100 * images[:, 0]})
    seen = []

    def watched(reward):
        algorithm = make_algorithm(Settings(algorithm="mix_grpo", steps=6))

        def credit(batch):
            seen.append(batch.parts)
            return algorithm.credit(batch)

        return toy_run(algorithm=algorithm._replace(credit=credit), reward=reward, iterations=2, steps=6)[0].params

    judged, plain = watched(Judge(both)), watched(both)
    assert all(torch.equal(judged[name], plain[name]) for name in plain)
    assert all(parts is not None and parts.shape == (4, 8, 2) for parts in seen)
    summed = watched(lambda images, prompts: toward_compass(images, prompts) + 100 * images[:, 0])
    assert seen[-1] is None
    assert not torch.equal(summed["mean"], plain["mean"])


@pytest.mark.parametrize(
    ("algorithm", "changed", "message"),
    [
        ("mix_grpo", {"steps": 3}, "window of size 4"),
        ("flow_dppo", {"steps": 4}, "steps_per_sample=3 of 2"),
        ("flow_grpo_fast", {"steps": 3}, "window of size 3"),
        ("cps_grpo", {"trained_steps": "all"}, "std is 0"),
        ("mix_grpo", {"group_size": 3}, "4 updates"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_model_is_loaded(algorithm, changed, message):
    s = replace(Settings(), algorithm=algorithm, **changed)
    made = make_algorithm(s)
    with pytest.raises(ValueError, match=message):
        rehearse(made, s)
    with pytest.raises(ValueError, match=message):
        build(s)


@pytest.mark.parametrize("name", algorithms.__all__)
def test_a_rehearsal_of_every_named_algorithm_passes(name):
    if name in ALGORITHMS:
        s = replace(Settings(), algorithm=name)
        rehearse(make_algorithm(s), s)


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path):
    (tmp_path / "p.txt").write_bytes("\ufeffa cat\na dog\n".encode())
    assert read_prompts(str(tmp_path / "p.txt")) == ["a cat", "a dog"]
