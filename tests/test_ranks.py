"""Two processes are one process: gathered batches, shared windows, summed gradients, over a real gloo group."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import refuses
from small import save_small_pipeline, small_settings, words
from toys import adam, rows_of, start

from diffrl.algorithms import art
from diffrl.loop import train
from diffrl.ranks import Ranks, alone, joined, launched, require_same_start, share_of, torch_ranks
from diffrl.run import read_metrics, run
from diffrl.sampling import sample_seeds
from diffrl.settings import Settings
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model
from diffrl.types import Gridded

HERE = Path(__file__).resolve().parent


# ---- the pieces -------------------------------------------------------------------------------------------------------


@given(st.integers(0, 30), st.integers(1, 8))
def test_shares_are_consecutive_even_and_all(n, size):
    rows = list(range(n))
    parts = [share_of(rows, r, size) for r in range(size)]
    assert [row for part in parts for row in part] == rows
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert [len(p) for p in parts] == [len(p) for p in torch.arange(n).tensor_split(size)]


def test_shares_of_no_rank_are_refused():
    for rank, size in ((2, 2), (-1, 2), (0, 0)):
        with refuses(f"rank {rank} of {size}"):
            share_of([1], rank, size)


def batch_of(prompts, parts=False):
    model = toy_model()
    sampler = Gridded(model.velocity, model.times, 4, (2,))
    seeds = sample_seeds(0, 0, [PROMPTS.index(p) for p in prompts], 3)

    def score(x, rows):
        return toward_compass(x, [prompts[i] for i in rows.tolist()])

    with torch.no_grad():
        batch = art().collect(sampler, model.params, model.encode(prompts), seeds, score)
    return batch._replace(parts=batch.rewards[..., None], part_weights=(1.0,)) if parts else batch


@pytest.mark.parametrize("parts", [False, True])
def test_joined_batches_are_the_batch_of_all_prompts(parts):
    whole = batch_of(PROMPTS, parts)
    halves = [
        batch_of(PROMPTS[:2], parts)._replace(metrics={"a": 1.0}),
        batch_of(PROMPTS[2:], parts)._replace(metrics={"a": 2.0}),
    ]
    found = joined(halves)
    assert found.metrics == {"a": 1.5}
    assert torch.equal(found.rewards, whole.rewards)
    assert all(torch.equal(found.cond[n], whole.cond[n]) for n in whole.cond)
    for a, b in zip(found.trajectory, whole.trajectory):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert (found.parts is None) == (not parts)
    assert joined([whole]).metrics is None


def test_batches_of_other_steps_or_fields_are_refused():
    a, b = batch_of(PROMPTS[:2]), batch_of(PROMPTS[2:])
    with refuses("other steps", "t_next"):
        joined([a, b._replace(trajectory=b.trajectory._replace(t_next=b.trajectory.t_next * 0.5))])
    with refuses("other fields", "'more'"):
        joined([a, b._replace(cond={**b.cond, "more": b.rewards})])
    with refuses("other fields"):
        joined([a, b._replace(parts=b.rewards[..., None])])


def test_prompts_that_cannot_be_dealt_evenly_and_other_params_are_refused():
    three = alone._replace(size=3)
    with refuses("4 prompts", "3 ranks"):
        start(toy_model(), ranks=three)
    params = toy_model().params
    told = []
    require_same_start(alone._replace(gathered=lambda mine: told.append(mine) or [mine, mine]), params)
    other = [(name, shape, total + 1, square) for name, shape, total, square in told[0]]
    with refuses("rank 1", "mean"):
        require_same_start(alone._replace(gathered=lambda mine: [mine, other]), params)


def test_a_process_that_nobody_launched_is_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert launched() is alone
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launched() is alone


def test_without_torch_distributed_there_are_no_ranks():
    with refuses("init_process_group"):
        torch_ranks()


# ---- two processes ----------------------------------------------------------------------------------------------------

PROGRAM = """
import sys, json, os, torch, itertools, warnings
sys.path[:0] = [{root!r}, {here!r}]
torch.set_num_threads(1)
from diffrl import algorithms as a
from diffrl.loop import train
from diffrl.ranks import torch_ranks, alone, enter_group, leave_group
from diffrl.tasks.toy import PROMPTS, toward_compass, toy_model
rank = int(sys.argv[1])
enter_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
ranks = torch_ranks()
def only_north_and_east(points, prompts):
    if set(prompts) & {{"south", "west"}}:
        raise RuntimeError("cannot judge " + prompts[-1])
    return toward_compass(points, prompts).float()
def draft(params):
    return toy_model(dtype=torch.float64).velocity, params
def run(algorithm, ranks, **options):
    model = toy_model(dtype=torch.float64)
    optimizer = torch.optim.Adam(list(model.params.values()), lr=0.05)
    reward = options.pop("reward", toward_compass)
    training = train(model, algorithm, PROMPTS, reward, optimizer, group_size=8, seed=1, ranks=ranks, **{{"steps": 6, **options}})
    rows = list(itertools.islice(training, 3))
    return {{n: p.detach() for n, p in model.params.items()}}, rows
found = {{}}
for name, make, options in (
    ("art", a.art, {{}}),
    ("art in parts", a.art, {{"micro_batch": 3}}),
    ("art in packs", a.art, {{"pack": 5}}),
    ("nft in packs", a.nft, {{"pack": 7}}),
    ("two prompts", a.art, {{"prompts_per_iteration": 2}}),
    ("flow_grpo", a.flow_grpo, {{}}),
    ("nft", a.nft, {{}}),
    ("mix_grpo", a.mix_grpo, {{}}),
    ("reward fails on one rank", a.art, {{"reward": only_north_and_east}}),
    ("flow_grpo_fast", a.flow_grpo_fast, {{"steps": 12}}),
    ("sol_rl", lambda: a.sol_rl(a.flow_grpo_fast(), draft=draft, pool=12, keep=4, draft_steps=3), {{"steps": 12}}),
):
    mine, rows = run(make(), ranks, **options)
    single, expected = run(make(), alone, **options)
    gap = max(float((mine[n] - single[n]).abs().max()) for n in single)
    moved = max(float(p.abs().max()) for p in single.values())
    names = [n for n in expected[-1] if not n.startswith("seconds")]
    metric = max(abs(rows[i][n] - expected[i][n]) for i in range(3) for n in names)
    found[name] = [gap, moved, metric, sorted(set(expected[-1]) ^ set(rows[-1]))]
    others = ranks.gathered({{n: p.tolist() for n, p in mine.items()}})
    assert others[0] == others[1], name
def broken(points, prompts):
    raise RuntimeError("no engine")
try:
    run(a.art(), ranks, reward=broken)
    found["broken"] = "no error"
except ValueError as error:
    found["broken"] = str(error)
here = a.art(trained_steps=lambda steps: range(2 + rank, 4 + rank))
try:
    run(here, ranks)
    found["steps"] = "no error"
except ValueError as error:
    found["steps"] = str(error)
torch.manual_seed(rank)
model = toy_model()
model.params["mean"].data += rank
try:
    train(model, a.art(), PROMPTS, toward_compass, torch.optim.Adam(list(model.params.values())), group_size=8, steps=6, seed=1, ranks=ranks)
    found["start"] = "no error"
except ValueError as error:
    found["start"] = str(error)
def gloo_threads():
    names = [open(f"/proc/self/task/{{i}}/comm").read() for i in os.listdir("/proc/self/task")]
    return sum("gloo" in name for name in names)
found["threads"] = [gloo_threads() if sys.platform == "linux" else -1]
leave_group()
found["threads"].append(gloo_threads() if sys.platform == "linux" else 0)
if rank == 0:
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    import json

    meet = tmp_path_factory.mktemp("gloo") / "meet"
    program = PROGRAM.format(root=str(HERE.parent), here=str(HERE))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(r), str(meet)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    told = [p.communicate(timeout=200) for p in processes]
    assert all(p.returncode == 0 for p in processes), told[0][1][-3000:] + told[1][1][-3000:]
    return json.loads(told[0][0].splitlines()[-1])


@pytest.mark.parametrize(
    "name",
    [
        "art",
        "art in parts",
        "art in packs",
        "nft in packs",
        "two prompts",
        "flow_grpo",
        "nft",
        "mix_grpo",
        "flow_grpo_fast",
        "sol_rl",
        "reward fails on one rank",
    ],
)
def test_two_processes_are_one(pair, name):
    gap, moved, metric, names = pair[name]
    assert moved > 1e-2
    assert gap < 1e-12
    assert metric < 1e-6
    assert names == []


def test_steps_of_each_ranks_own_are_refused(pair):
    assert "ranks took other steps" in pair["steps"]


def test_a_reward_that_fails_everywhere_ends_every_rank(pair):
    assert "raised for all" in pair["broken"]
    assert "no engine" in pair["broken"]


def test_a_group_that_is_left_has_no_threads(pair):
    """One that outlives the interpreter aborts a process that succeeded, now and then (pytorch/pytorch#190489)."""
    within, after = pair["threads"]
    assert within  # the control: threads of gloo are found by their name
    assert after == 0


def test_prompts_that_cannot_be_dealt_leave_no_folder(tmp_path):
    pipe = save_small_pipeline(tmp_path / "small")
    s = Settings(**small_settings(pipe, prompts_per_iteration=3))
    with refuses("3 prompts", "2 ranks"):
        run(tmp_path / "run", s, pictures=False, ranks=alone._replace(size=2))
    assert not (tmp_path / "run").exists()


def test_ranks_that_start_apart_are_refused(pair):
    assert "starts from other params" in pair["start"]
    assert "seed before from_pipeline" in pair["start"]


def test_control_unshared_gradients_would_be_seen():
    """A rank that forgets to add the gradients trains on half of the rows: the params differ by far more than the bound."""

    def after(ranks):
        model = toy_model(dtype=torch.float64)
        options = {"group_size": 8, "steps": 6, "seed": 1, "ranks": ranks}
        rows_of(train(model, art(), PROMPTS, toward_compass, adam(model), **options), 2)
        return model.params["mean"].detach()

    half: Ranks = alone._replace(share=lambda rows: rows if isinstance(rows, list) else share_of(rows, 0, 2))
    assert float((after(alone) - after(half)).abs().max()) > 1e-6


# ---- diffrl train under torchrun --------------------------------------------------------------------------------------


def torchrun(*words, cwd):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}"}
    return subprocess.run(
        [*command, "-m", "diffrl.cli", "train", *words, "--no-pictures"],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        timeout=400,
    )


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


@pytest.mark.filterwarnings("ignore:.*groups have no spread")
def test_a_command_on_two_ranks_is_the_command_on_one_and_goes_on(tmp_path):
    pipe = save_small_pipeline(tmp_path / "small")
    settings = small_settings(pipe, iterations=3, reward="small:reader")
    whole = run(tmp_path / "one", Settings(**settings), pictures=False)
    first = torchrun(*words(settings), "--output", str(tmp_path / "two"), "--iterations", "2", cwd=tmp_path)
    assert first.returncode == 0, first.stderr[-3000:]
    assert first.stdout.count("2 iterations") == 2  # the title and the summary, of one rank
    again = torchrun("--resume", str(tmp_path / "two"), "--iterations", "3", cwd=tmp_path)
    assert again.returncode == 0, again.stderr[-3000:]
    _, rows = read_metrics(tmp_path / "two")
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    for mine, other in zip(rows, whole, strict=True):
        for name in ("reward/mean", "reward/exact_match", "loss", "grad_norm", "masked_fraction"):
            assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4), name
    assert (tmp_path / "two" / "adapter" / "pytorch_lora_weights.safetensors").is_file()
