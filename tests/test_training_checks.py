"""Refusals of `loop.train`, each on its own; test_loop.py meets them through `train`."""

import pytest
import torch
from oracles import refuses
from toys import adam

from diffrl.algorithms import art, nft
from diffrl.tasks.toy import PROMPTS, toy_model
from diffrl.training_checks import (
    check_algorithm,
    check_batch,
    check_behaviour,
    check_credit,
    check_model,
    check_optimizer,
    check_reward,
    check_rows,
    check_sizes,
    checked_groups,
    checked_prompts,
    checked_reference,
    numbers_by_name,
)
from diffrl.types import Batch, Trajectory


def batch(b=6, steps=2, **changed):
    states = torch.zeros(b, steps, 2)
    numbers = torch.zeros(b, steps)
    times = torch.tensor([1.0, 0.5])[:steps]
    tr = Trajectory(torch.zeros(b, 2), states, states, states, times, times / 2, numbers, numbers, torch.arange(b))
    return Batch(tr._replace(**changed), torch.zeros(2, 3), {"a": torch.zeros(2, 1)})


def test_groups_are_all_prompts_or_as_many_as_asked_for():
    assert checked_groups(None, 6, 2) == 6
    assert checked_groups(4, 6, 2) == 4
    for asked, ranks, said in (
        (7, 1, "7 of only 6"),
        (0, 1, "prompts_per_iteration"),
        (4, 3, "3 ranks"),
        (None, 4, "6 prompts"),
    ):
        with refuses(said):
            checked_groups(asked, 6, ranks)


def test_sizes_are_counts_and_samples_or_states():
    check_sizes(micro_batch=None, pack=None, rollout_chunk=None)
    check_sizes(micro_batch=2, pack=None, rollout_chunk=3)
    check_sizes(pack=2)
    with refuses("rollout_chunk", "0"):
        check_sizes(rollout_chunk=0)
    with refuses("pack", "1.5"):
        check_sizes(micro_batch=None, pack=1.5)
    with refuses("micro_batch=2 counts samples and pack=3 states"):
        check_sizes(micro_batch=2, pack=3)


def test_control_what_is_right_is_accepted():
    model = toy_model()
    assert checked_prompts(PROMPTS, None) == list(PROMPTS)
    check_algorithm(art(), 8)
    check_optimizer(adam(model), model.params)
    check_reward(print)
    check_batch(batch(), 2, 3)
    check_credit({"advantage": torch.zeros(6)}, 2, 3)
    check_behaviour(art(), None, model.params, 3)
    assert checked_reference(art(), None, model.params, 3) is None
    kept = checked_reference(nft(), None, model.params, 0)
    assert all(torch.equal(kept[n], p) and kept[n] is not p for n, p in model.params.items())


def test_what_is_wrong_is_refused():
    model = toy_model()
    with refuses("non-empty sequence", "set()"):
        checked_prompts(set(), None)
    with refuses("1 images", "4 prompts"):
        checked_prompts(PROMPTS, [0])
    with refuses("updates"):
        check_algorithm(art(updates=9), 8)
    with refuses("model.params"):
        check_optimizer(adam(toy_model()), model.params)
    with refuses("reward", "3"):
        check_reward(3)
    with refuses("6 samples", "(2, 3)"):
        check_batch(batch(b=5), 2, 3)
    with refuses("trajectory.std", "(6, 1)"):
        check_batch(batch(std=torch.zeros(6, 1)), 2, 3)
    with refuses("credit['a']", "(5,)"):
        check_credit({"a": torch.zeros(5)}, 2, 3)
    with refuses("start=3", "reference"):
        checked_reference(nft(), None, model.params, 3)
    with refuses("behaviour", "5"):
        check_behaviour(nft(), 5, model.params, 0)
    with pytest.warns(UserWarning, match="without behaviour="):
        check_behaviour(nft(), None, model.params, 3)


# ---- answers of plain workers


def test_rows_of_an_answer_are_counted_and_absent_ones_allowed_where_they_may_be():
    check_rows("score", torch.zeros(2, 3), (2,))
    check_rows("credit", torch.zeros(2, 4, 1), (2, 4))
    check_rows("generate's seeds", None, (2,), absent=True)
    for value in (torch.zeros(3), torch.zeros(()), [0.0, 1.0], None):
        with refuses("score"):
            check_rows("score", value, (2,))


def test_metrics_by_name_are_floats_and_nothing_is_none():
    assert numbers_by_name("commit", {"a": torch.tensor(0.5), "b": 2}) == {"a": 0.5, "b": 2.0}
    assert numbers_by_name("commit", None) == {}
    for told in ([1.0], {"a": "much"}, {"a": torch.zeros(2)}):
        with refuses("commit"):
            numbers_by_name("commit", told)


def test_a_model_of_other_fields_is_refused_by_name():
    toy = toy_model()
    check_model(toy)
    for name in ("velocity", "encode", "decode", "latent_shape", "times"):
        with refuses(f"model.{name} must be a function"):
            check_model(toy._replace(**{name: (2,)}))
    for params in (list(toy.params.values()), {"w": 1.0}, None):
        with refuses("model.params must be a mapping"):
            check_model(toy._replace(params=params))
    with refuses("model.velocity must be a function, got None"):
        check_model(object())
