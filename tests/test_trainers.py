"""The trainer's ledger, its shards, and the putting away of its gradient.

Negative controls are the tests with `control` in their names.
"""

import pytest
import torch
from executing import close, stages_of, whole
from oracles import refuses
from toys import same, values_of

from diffrl.algorithms import art
from diffrl.trainers import Trainer, concatenated, rows_of

# ---- the trainer


def trainer_and_parts(**options):
    stages, schedule = stages_of(art(updates=1)), whole(5, fragments=2, **options)
    params = stages.snapshot()
    made = {f.index: stages.generate(0, params, f.samples) for f in schedule.fragments}
    parts = {i: (made[i], stages.score(0, schedule.fragments[i].samples, made[i])) for i in made}
    return Trainer(stages, schedule), stages, parts


def test_the_ledger_refuses_a_fragment_twice_and_a_commit_too_early():
    trainer, stages, parts = trainer_and_parts()
    trainer.train(0, 0, 0, parts)
    with refuses("fragment 0 is accumulated already"):
        trainer.train(0, 0, 0, parts)
    before = values_of(stages.model.params)
    with refuses("fragments [1] are not accumulated, nothing is committed"):
        trainer.commit(0, 0)
    assert same(values_of(stages.model.params), before)
    trainer.zero()
    assert all(p.grad is None for p in stages.model.params.values())
    for i in (0, 1):
        trainer.train(0, 0, i, parts)
    trainer.commit(0, 0)
    assert not same(values_of(stages.model.params), before)


def test_suspended_gradients_come_back_bit_for_bit():
    trainer, stages, parts = trainer_and_parts()
    trainer.train(0, 0, 0, parts)
    held = {n: p.grad.clone() for n, p in stages.model.params.items()}
    state = torch.get_rng_state()
    trainer.switch()
    assert all(p.grad is None for p in stages.model.params.values())
    stages.generate(0, stages.snapshot(), [0, 1])
    assert all(p.grad is None for p in stages.model.params.values())
    trainer.restore()
    assert same({n: p.grad for n, p in stages.model.params.items()}, held)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("shard_pairs", [True, False])
def test_shards_over_ranks_add_up_to_the_whole_gradient(ranks, shard_pairs):
    """Ragged shares, an empty one among them: sums, never a mean of means."""
    trainer, stages, parts = trainer_and_parts(pack=3, shard_pairs=shard_pairs)
    for i in (0, 1):
        trainer.train(0, 0, i, parts)
    expected = {n: p.grad.clone() for n, p in stages.model.params.items()}
    stages.zero()
    for rank in range(ranks):
        other = Trainer(stages, trainer.schedule, rank, ranks)
        for i in (0, 1):
            other.train(0, 0, i, parts)
    assert close({n: p.grad for n, p in stages.model.params.items()}, expected)


def test_rows_of_trajectories_and_their_concatenation():
    _, _, parts = trainer_and_parts()
    a, b = (parts[i][0] for i in (0, 1))
    both = concatenated([a, b])
    assert torch.equal(both.x_t, torch.cat([a.x_t, b.x_t]))
    assert torch.equal(rows_of(both, [4, 1]).x_0, torch.stack([b.x_0[0], a.x_0[1]]))
    assert rows_of(both, range(8)) is both
    assert concatenated([a]) is a
    with refuses("kept other steps"):
        concatenated([a, b._replace(t=b.t + 1)])


def test_control_a_fragment_left_out_is_another_gradient():
    trainer, stages, parts = trainer_and_parts()
    trainer.train(0, 0, 0, parts)
    some = {n: p.grad.clone() for n, p in stages.model.params.items()}
    trainer.train(0, 0, 1, parts)
    assert not close(some, {n: p.grad for n, p in stages.model.params.items()}, relative=1e-3)
