"""Which prompts and rows an optimizer step sees, and how images become rewards.

Negative controls are the tests with `control` in their names.
"""

import math
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffrl.algorithms import Batch
from diffrl.checks import NoReward
from diffrl.rewards import weighted_sum
from diffrl.sampling import rollout, sample_seeds
from diffrl.tasks.toy import PROMPTS, toy_model
from diffrl.windows import (
    Score,
    encode,
    params_distance,
    prompts_of_iteration,
    reward_metrics,
    score_images,
    select_rows,
    split_within_prompt,
    window_of,
)

NAN = float("nan")

# ---- prompts and splits


@given(st.integers(0, 2**40), st.integers(0, 40), st.integers(1, 30), st.data())
def test_prompts_are_a_function_of_seed_and_iteration_without_repeats(seed, i, n, data):
    g = data.draw(st.integers(1, n))
    chosen = prompts_of_iteration(seed, i, n, g)
    assert chosen == prompts_of_iteration(seed, i, n, g)
    assert len(chosen) == len(set(chosen)) == g
    assert set(chosen) <= set(range(n))


def test_every_prompt_comes_once_per_epoch():
    drawn = [p for i in range(3) for p in prompts_of_iteration(7, i, 12, 4)]
    assert sorted(drawn) == list(range(12))
    assert prompts_of_iteration(0, 5, 4, 4) == [0, 1, 2, 3]


def test_control_other_seeds_and_iterations_give_other_prompts():
    first = prompts_of_iteration(0, 0, 50, 10)
    assert first != prompts_of_iteration(1, 0, 50, 10)
    assert first != prompts_of_iteration(0, 1, 50, 10)
    assert first != prompts_of_iteration(0, 5, 50, 10)  # the next epoch


def test_prompts_touch_no_global_generator():
    state = torch.get_rng_state()
    prompts_of_iteration(0, 3, 10, 4)
    assert torch.equal(state, torch.get_rng_state())


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 4))
def test_windows_are_disjoint_complete_and_even_within_every_prompt(g, k, updates):
    windows = [rows.tolist() for rows in split_within_prompt(g, k, updates)]
    assert len(windows) == updates
    assert sorted(row for rows in windows for row in rows) == list(range(g * k))
    for rows in windows:
        per_prompt = [sum(row // k == prompt for row in rows) for prompt in range(g)]
        assert all(n in (k // updates, -(-k // updates)) for n in per_prompt)


def test_the_extra_sample_of_an_odd_group_alternates_over_prompts():
    first, second = split_within_prompt(4, 3, 2)
    assert [int(((first // 3) == p).sum()) for p in range(4)] == [2, 1, 2, 1]
    assert [int(((second // 3) == p).sum()) for p in range(4)] == [1, 2, 1, 2]


def test_control_an_uneven_split_is_seen():
    """The property test's own measure on halves of the batch, which keep prompts apart."""
    halves = torch.arange(8).chunk(2)
    assert [[int((rows // 4 == p).sum()) for p in range(2)] for rows in halves] == [[4, 0], [0, 4]]


# ---- rows of a batch


def small_batch():
    model = toy_model()
    seeds = sample_seeds(0, 0, [0, 1, 2], 2)
    rows = torch.arange(3).repeat_interleave(2)
    cond = encode(model, PROMPTS[:3])
    tr = rollout(
        model.velocity,
        model.params,
        {name: value[rows] for name, value in cond.items()},
        model.times(3),
        seeds=seeds.flatten(),
        shape=(2,),
    )
    return Batch(tr, torch.arange(6.0).reshape(3, 2), cond)


def test_a_window_takes_the_same_rows_of_everything():
    batch = small_batch()
    window = window_of(batch, {"credit": 10 * torch.arange(6.0)}, torch.tensor([1, 4]))
    assert window.rewards.tolist() == [1.0, 4.0]
    assert window.credit["credit"].tolist() == [10.0, 40.0]
    assert window.cond["prompt"].tolist() == [0, 2]  # row 4 of k = 2 belongs to the third prompt
    for name in ("x_0", "x_t", "x_next", "v", "std", "seeds"):
        assert torch.equal(getattr(window.trajectory, name), getattr(batch.trajectory, name)[[1, 4]])
    assert torch.equal(window.trajectory.t, batch.trajectory.t)
    part = select_rows(window, torch.tensor([1]))
    assert part.rewards.tolist() == [4.0]
    assert part.cond["prompt"].tolist() == [2]
    assert part.credit["credit"].tolist() == [40.0]
    assert torch.equal(part.trajectory.x_t, batch.trajectory.x_t[[4]])


def test_windows_of_a_trajectory_without_seeds_have_none():
    batch = small_batch()
    batch = batch._replace(trajectory=batch.trajectory._replace(seeds=None))
    assert window_of(batch, {}, torch.tensor([0])).trajectory.seeds is None


def test_encode_gives_tensors_on_the_params_device():
    cond = encode(toy_model(), ["south", "north"])
    assert cond["prompt"].tolist() == [2, 0]


def test_encode_hands_images_on():
    seen = []
    model = toy_model()._replace(encode=lambda prompts, images=None: seen.append(images) or {})
    encode(model, ["north"])
    encode(model, ["north"], ["picture"])
    assert seen == [None, ["picture"]]


# ---- rewards

IMAGES = torch.arange(4.0)[:, None]
NAMES = ["a", "b", "c", "d"]


def picky(images, prompts):
    if bool((images == 2).any()):
        raise RuntimeError("cannot look at 2")
    return 10 * images[:, 0]


def test_one_bad_image_costs_only_its_own_reward():
    values = score_images(picky, IMAGES, NAMES)
    assert values[[0, 1, 3]].tolist() == [0.0, 10.0, 30.0]
    assert math.isnan(values[2])


def test_each_image_meets_its_own_prompt_when_asked_alone():
    def reward(images, prompts):
        if len(images) > 1:
            raise RuntimeError("one at a time")
        return torch.tensor([float(ord(prompts[0]) - ord("a"))]) + images[0]

    assert score_images(reward, IMAGES, NAMES).tolist() == [0.0, 2.0, 4.0, 6.0]


def test_a_reward_that_always_raises_is_refused_with_its_own_words():
    def reward(images, prompts):
        raise KeyError("no weights")

    with pytest.raises(NoReward, match=r"reward raised for all 4 images: KeyError: 'no weights'"):
        score_images(reward, IMAGES, NAMES)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(3), r"reward.*\(4,\).*\(3,\)"),
        (torch.zeros(4, 1), r"reward.*\(4,\).*\(4, 1\)"),
        (torch.zeros(()), r"reward.*\(4,\)"),
        ([0.0, 1.0], r"reward.*\(4,\).*\(2,\)"),
        (None, r"reward must return 4 numbers, got NoneType None"),
        ("text", r"reward must return 4 numbers, got str 'text'"),
        (["a"] * 4, r"reward must return 4 numbers, got list"),
    ],
)
def test_anything_but_one_number_per_image_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        score_images(lambda images, prompts: values, IMAGES, NAMES)


@pytest.mark.parametrize(
    "values", [[0, 1, 2, 3], (0.0, 1.0, 2.0, 3.0), torch.arange(4), torch.arange(4.0, requires_grad=True)]
)
def test_numbers_may_come_as_list_integers_or_with_a_graph(values):
    got = score_images(lambda images, prompts: values, IMAGES, NAMES)
    assert got.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert got.dtype == torch.float32
    assert not got.requires_grad


def test_float64_rewards_stay_float64():
    assert score_images(lambda i, p: torch.zeros(4, dtype=torch.float64), IMAGES, NAMES).dtype == torch.float64


def test_control_a_healthy_reward_is_asked_once():
    calls = []
    score_images(lambda images, prompts: calls.append(len(images)) or torch.zeros(len(images)), IMAGES, NAMES)
    assert calls == [4]


def test_score_decodes_and_names_the_prompt_of_every_row():
    seen = {}

    def reward(images, prompts):
        seen["prompts"] = list(prompts)
        return images[:, 0]

    score = Score(lambda latents: latents + 100, reward, ["first", "second"])
    got = score(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 1, 1]))
    assert got.tolist() == [101.0, 102.0, 103.0]
    assert seen["prompts"] == ["first", "second", "second"]
    assert score.seconds > 0


# ---- metrics


def test_reward_metrics_by_hand():
    rewards = torch.tensor([[1.0, 3.0, NAN], [2.0, 2.0, 2.0], [5.0, NAN, math.inf]])
    got = reward_metrics(rewards)
    finite = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 5.0], dtype=torch.float64)
    assert got["reward/mean"] == pytest.approx(2.5)
    assert got["reward/std"] == pytest.approx(float(finite.std(correction=0)))
    assert got["reward/missing"] == pytest.approx(3 / 9)
    assert got["groups/dead"] == pytest.approx(2 / 3)  # equal rewards, a single reward


def test_metrics_of_nothing_are_nan_not_an_error():
    got = reward_metrics(torch.full((2, 2), NAN))
    assert math.isnan(got["reward/mean"])
    assert math.isnan(got["reward/std"])
    assert (got["reward/missing"], got["groups/dead"]) == (1.0, 1.0)


def test_params_distance_is_the_rms_over_all_numbers():
    a = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([[3.0], [4.0]])}
    b = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([[3.0], [6.0]])}
    assert params_distance(a, b) == pytest.approx(1.0)  # sqrt(4/4)
    assert params_distance(a, a) == 0.0
    assert params_distance(a, {name: p.clone() for name, p in a.items()}) == 0.0


# ---- several rewards, a reference


def two_rewards(asked=None):
    """The pixel, and minus twice the place of the prompt in NAMES; weights 10 and 1."""

    def pixel(images, prompts):
        if asked is not None:
            asked.append(("pixel", len(images)))
        return images[:, 0]

    def place(images, prompts):
        if asked is not None:
            asked.append(("place", len(images)))
        return [-2.0 * NAMES.index(p) for p in prompts]

    return weighted_sum({"pixel": pixel, "place": place}, {"pixel": 10.0, "place": 1.0})


ROWS = torch.tensor([3, 0, 0, 2])


def test_single_values_of_a_reward_with_several_are_kept_and_each_is_asked_once():
    asked = []
    score = Score(lambda latents: latents + 1, two_rewards(asked), NAMES)
    assert score.parts is None
    got = score(IMAGES, ROWS)
    assert score.parts.tolist() == [[1.0, -6.0], [2.0, 0.0], [3.0, 0.0], [4.0, -4.0]]
    assert got.tolist() == [4.0, 20.0, 30.0, 36.0]
    assert asked == [("pixel", 4), ("place", 4)]
    assert score.seconds > 0
    score(2 * IMAGES, ROWS)
    assert score.parts[:, 0].tolist() == [1.0, 3.0, 5.0, 7.0]  # of the last call


def test_a_plain_reward_has_no_parts():
    score = Score(lambda latents: latents, lambda images, prompts: images[:, 0], NAMES)
    score(IMAGES, ROWS)
    assert score.parts is None


def test_each_of_several_rewards_may_fail_for_images_of_its_own():
    def other(images, prompts):
        if bool((images == 0).any()):
            raise RuntimeError("cannot look at 0")
        return images[:, 0]

    score = Score(lambda latents: latents, weighted_sum({"picky": picky, "other": other}), NAMES)
    got = score(IMAGES, ROWS)
    assert torch.isnan(score.parts).tolist() == [[False, True], [False, False], [True, False], [False, False]]
    assert torch.isnan(got).tolist() == [True, False, True, False]
    assert got[[1, 3]].tolist() == [11.0, 33.0]


def test_one_of_several_rewards_that_fails_everywhere_is_refused():
    def broken(images, prompts):
        raise OSError("no weights")

    with pytest.raises(ValueError, match="reward raised for all 4 images: OSError: no weights"):
        Score(lambda latents: latents, weighted_sum({"picky": picky, "broken": broken}), NAMES)(IMAGES, ROWS)


def test_a_reward_that_writes_into_its_images_does_not_reach_the_next():
    def writing(images, prompts):
        values = images[:, 0].clone()
        images.zero_()
        return values

    latents = IMAGES.clone()
    score = Score(lambda latents: latents, weighted_sum({"a": writing, "b": writing}), NAMES)
    score(latents, ROWS)
    assert torch.equal(score.parts, IMAGES.expand(4, 2))
    assert torch.equal(latents, IMAGES)


def test_control_something_called_rewards_does_not_make_a_sum():
    class Service:
        """A reward of one's own that keeps a table under that name."""

        rewards: ClassVar = {"cached": None}

        def __call__(self, images, prompts):
            return images[:, 0]

    score = Score(lambda latents: latents, Service(), NAMES)
    assert score(IMAGES, ROWS).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert score.parts is None


def test_parts_of_different_precision_keep_the_better_one():
    double = weighted_sum(
        {"a": lambda i, p: torch.full((4,), 0.1, dtype=torch.float64), "b": lambda i, p: torch.zeros(4)}
    )
    score = Score(lambda latents: latents, double, NAMES)
    assert score(IMAGES, ROWS).tolist() == [0.1] * 4
    assert score.parts.dtype == torch.float64


def test_the_reference_is_passed_on_to_every_part_of_a_window():
    batch, reference = small_batch(), {"a": torch.zeros(1)}
    window = window_of(batch, {}, torch.arange(4), reference)
    assert window.reference is reference
    assert select_rows(window, torch.tensor([2, 0])).reference is reference
    assert window_of(batch, {}, torch.arange(4)).reference is None
