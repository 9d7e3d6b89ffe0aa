"""What a checkpoint holds, what is refused, and that one interrupted at any moment leaves the old one whole.

Negative controls are the tests with `control` in their names.
"""

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from toys import adam, same, toy_run, values_of

from diffrl.checkpoints import Checkpoint, load_checkpoint, restore_checkpoint, save_checkpoint
from diffrl.tasks.toy import toy_model


def trained(**options):
    model = toy_model()
    optimizer = adam(model)
    toy_run(model=model, optimizer=optimizer, iterations=2, **options)
    return model, optimizer


def saved(folder, *, iteration=2, behaviour=None, settings=None):
    model, optimizer = trained()
    save_checkpoint(
        folder,
        params=model.params,
        optimizer=optimizer,
        iteration=iteration,
        behaviour=behaviour,
        settings=settings,
    )
    return model, optimizer


def state_file(folder):
    (found,) = folder.glob("state-*.safetensors")
    return found


# ---- round trip


def test_everything_comes_back(tmp_path):
    average = {name: p + 1 for name, p in toy_model().params.items()}
    settings = {"task": "toy", "steps": 6, "nothing": None, "rate": 1e-5}
    model, optimizer = saved(tmp_path / "new" / "folder", behaviour=average, settings=settings)
    found = load_checkpoint(tmp_path / "new" / "folder")
    assert isinstance(found, Checkpoint)
    assert same(found.params, values_of(model.params))
    assert same(found.behaviour, values_of(average))
    assert found.iteration == 2
    assert found.settings == settings
    state = optimizer.state_dict()
    assert found.optimizer["param_groups"] == state["param_groups"]
    assert found.optimizer["state"].keys() == state["state"].keys()
    for index, entries in state["state"].items():
        assert same(found.optimizer["state"][index], entries)


def test_restoring_gives_the_live_tensors_their_values(tmp_path):
    model, optimizer = saved(tmp_path)
    fresh = toy_model(std=0.8)
    tensors, other = dict(fresh.params), adam(fresh, lr=1.0)
    assert restore_checkpoint(load_checkpoint(tmp_path), params=fresh.params, optimizer=other) is None
    assert same(values_of(fresh.params), values_of(model.params))
    assert all(fresh.params[name] is tensors[name] for name in tensors)  # in place
    assert all(p.requires_grad for p in fresh.params.values())
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert other.param_groups[0]["betas"] == (0.9, 0.999)


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.AdamW(params, lr=1e-3, amsgrad=True),
        lambda params: torch.optim.RMSprop(params, lr=1e-3),
        lambda params: torch.optim.Adam([{"params": params[:1], "lr": 0.5}, {"params": params[1:]}], lr=1e-2),
    ],
)
def test_other_optimizers_go_on_where_they_were(tmp_path, make):
    def stepped(model, optimizer, count):
        for _ in range(count):
            optimizer.zero_grad()
            sum((p - 2).square().sum() for p in model.params.values()).backward()
            optimizer.step()

    model = toy_model()
    optimizer = make(list(model.params.values()))
    stepped(model, optimizer, 3)
    save_checkpoint(tmp_path, params=model.params, optimizer=optimizer, iteration=3)
    stepped(model, optimizer, 2)
    fresh = toy_model()
    other = make(list(fresh.params.values()))
    restore_checkpoint(load_checkpoint(tmp_path), params=fresh.params, optimizer=other)
    stepped(fresh, other, 2)
    assert same(values_of(fresh.params), values_of(model.params))


def test_global_generators_come_back(tmp_path):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    random.gauss(0, 1), np.random.standard_normal()  # both keep the second number of a pair
    saved(tmp_path)
    expected = [random.gauss(0, 1), random.random(), float(np.random.standard_normal()), float(torch.rand(()))]
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    fresh = toy_model()
    restore_checkpoint(load_checkpoint(tmp_path), params=fresh.params, optimizer=adam(fresh))
    got = [random.gauss(0, 1), random.random(), float(np.random.standard_normal()), float(torch.rand(()))]
    assert got == expected


def test_saving_moves_nothing(tmp_path):
    model, optimizer = trained()
    before = values_of(model.params)
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    state = {i: values_of(entries) for i, entries in optimizer.state_dict()["state"].items()}
    save_checkpoint(tmp_path, params=model.params, optimizer=optimizer, iteration=2, behaviour=model.params)
    assert same(values_of(model.params), before)
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == generators[1:]
    assert all(same(entries, state[i]) for i, entries in optimizer.state_dict()["state"].items())


def test_live_and_behaviour_params_are_kept_apart(tmp_path):
    model, optimizer = trained()
    for behaviour in (None, model.params, dict(model.params)):
        save_checkpoint(tmp_path, params=model.params, optimizer=optimizer, iteration=2, behaviour=behaviour)
        assert load_checkpoint(tmp_path).behaviour is None
    copy = values_of(model.params)
    save_checkpoint(tmp_path, params=model.params, optimizer=optimizer, iteration=2, behaviour=copy)
    assert same(load_checkpoint(tmp_path).behaviour, copy)


def test_half_precision_and_odd_shapes_come_back(tmp_path):
    params = {
        "a.b": torch.randn(3, 0, 2, requires_grad=True),
        "half": torch.full((2,), 1 / 3, dtype=torch.bfloat16, requires_grad=True),
        "scalar": torch.tensor(2.0, dtype=torch.float64, requires_grad=True),
        "strided": torch.arange(6.0).reshape(2, 3).t().requires_grad_(),
    }
    save_checkpoint(tmp_path, params=params, optimizer=torch.optim.SGD(list(params.values()), lr=1.0), iteration=0)
    found = load_checkpoint(tmp_path).params
    assert same(found, values_of(params))
    assert all(found[name].dtype == p.dtype for name, p in params.items())


def test_files_are_safetensors_and_json(tmp_path):
    saved(tmp_path)
    pointer = json.loads((tmp_path / "checkpoint.json").read_text())
    state = tmp_path / pointer["state"]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["checkpoint.json", state.name])
    assert {"params.mean", "params.log_std", "rng.torch"} <= set(load_file(state))
    raw = b"".join(p.read_bytes() for p in tmp_path.iterdir())
    assert not any(word in raw for word in (b"torch._utils", b"_rebuild_tensor", b"cpython"))


def test_control_a_pickle_would_be_seen(tmp_path):
    torch.save({"a": torch.zeros(2)}, tmp_path / "pickled")
    assert b"_rebuild_tensor" in (tmp_path / "pickled").read_bytes()


def test_only_the_newest_state_stays(tmp_path):
    for iteration in (1, 2, 10):
        saved(tmp_path, iteration=iteration)
    assert state_file(tmp_path).name.startswith("state-000010-")
    assert load_checkpoint(tmp_path).iteration == 10


# ---- refusals


def test_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no checkpoint: .*checkpoint\.json does not exist"):
        load_checkpoint(tmp_path)


def test_a_negative_iteration_is_refused_and_nothing_written(tmp_path):
    model, optimizer = trained()
    with pytest.raises(ValueError, match=r"iteration.*-1"):
        save_checkpoint(tmp_path / "x", params=model.params, optimizer=optimizer, iteration=-1)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("share", [0, 0.3, 0.9, 0.999])
def test_a_truncated_state_is_refused_by_name(tmp_path, share):
    saved(tmp_path)
    state = state_file(tmp_path)
    state.write_bytes(state.read_bytes()[: int(share * state.stat().st_size)])
    with pytest.raises(ValueError, match=rf"{state.name}.*truncated or was changed"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("place", [0, 20, -1])
def test_a_changed_byte_is_refused_by_name(tmp_path, place):
    saved(tmp_path)
    state = state_file(tmp_path)
    data = bytearray(state.read_bytes())
    data[place] ^= 1
    state.write_bytes(data)
    with pytest.raises(ValueError, match=rf"{state.name}.*truncated or was changed"):
        load_checkpoint(tmp_path)


def test_a_missing_state_is_refused_by_name(tmp_path):
    saved(tmp_path)
    state = state_file(tmp_path)
    state.unlink()
    with pytest.raises(ValueError, match=rf"checkpoint\.json names {state.name}, which is missing"):
        load_checkpoint(tmp_path)


def test_another_file_in_the_states_place_is_refused(tmp_path):
    saved(tmp_path / "a"), saved(tmp_path / "b", behaviour=toy_model().params)
    os.replace(state_file(tmp_path / "b"), state_file(tmp_path / "a"))
    with pytest.raises(ValueError, match="truncated or was changed"):
        load_checkpoint(tmp_path / "a")


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "5", "[]", "{}", '{"format": "diffrl-checkpoint-1"}', '{"epoch": 3, "state": "x"}', "\x00\x01"],
)
def test_foreign_or_truncated_json_is_refused_by_name(tmp_path, text):
    (tmp_path / "checkpoint.json").write_text(text)
    with pytest.raises(ValueError, match=r"checkpoint\.json is not a diffrl checkpoint"):
        load_checkpoint(tmp_path)


def test_bytes_that_are_no_text_are_refused_by_name(tmp_path):
    (tmp_path / "checkpoint.json").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(ValueError, match=r"checkpoint\.json is not a diffrl checkpoint"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["optimizer", "rng", "iteration", "settings", "state", "sha256", "format"])
def test_an_incomplete_pointer_is_refused(tmp_path, name):
    saved(tmp_path)
    pointer = tmp_path / "checkpoint.json"
    record = json.loads(pointer.read_text())
    del record[name]
    pointer.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=rf"checkpoint\.json is not a diffrl checkpoint .*{name}"):
        load_checkpoint(tmp_path)


def test_another_format_is_refused(tmp_path):
    saved(tmp_path)
    pointer = tmp_path / "checkpoint.json"
    pointer.write_text(pointer.read_text().replace("diffrl-checkpoint-1", "diffrl-checkpoint-99"))
    with pytest.raises(ValueError, match=r"format 'diffrl-checkpoint-99', this version reads 'diffrl-checkpoint-1'"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "params",
    [
        {"mean": torch.zeros(4, 2, requires_grad=True)},
        {"mean": torch.zeros(4, 3, requires_grad=True), "log_std": torch.zeros((), requires_grad=True)},
        {**toy_model().params, "more": torch.zeros(1, requires_grad=True)},
    ],
)
def test_a_checkpoint_of_another_model_is_refused_before_anything_changes(tmp_path, params):
    saved(tmp_path)
    before, state = values_of(params), torch.get_rng_state()
    optimizer = torch.optim.Adam(list(params.values()))
    with pytest.raises(ValueError, match=r"checkpoint"):
        restore_checkpoint(load_checkpoint(tmp_path), params=params, optimizer=optimizer)
    assert same(values_of(params), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert not optimizer.state


# ---- interrupted while saving


class Killed(BaseException):
    pass


def dies_at(monkeypatch, call):
    """os.replace of its number `call` (from 0) never happens: as if the process were gone before it."""
    real, calls = os.replace, []

    def replace(a, b):
        calls.append(b)
        if len(calls) == call + 1:
            raise Killed
        real(a, b)

    monkeypatch.setattr(os, "replace", replace)
    return calls


@pytest.mark.parametrize("iteration", [3, 2], ids=["later", "same iteration, other values"])
@pytest.mark.parametrize("call", [0, 1], ids=["before the state", "before the pointer"])
def test_a_save_that_dies_leaves_the_old_checkpoint(tmp_path, monkeypatch, call, iteration):
    model, optimizer = saved(tmp_path, iteration=2)
    old = values_of(model.params)
    with torch.no_grad():
        model.params["mean"].add_(1)
    calls = dies_at(monkeypatch, call)
    with pytest.raises(Killed):
        save_checkpoint(tmp_path, params=model.params, optimizer=optimizer, iteration=iteration)
    assert len(calls) == call + 1
    found = load_checkpoint(tmp_path)
    assert found.iteration == 2
    assert same(found.params, old)
    monkeypatch.undo()
    save_checkpoint(tmp_path, params=model.params, optimizer=optimizer, iteration=iteration)
    assert same(load_checkpoint(tmp_path).params, values_of(model.params))
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".safetensors"]  # nothing is left lying about


def test_a_first_save_that_dies_leaves_none(tmp_path, monkeypatch):
    model, optimizer = trained()
    dies_at(monkeypatch, 1)
    with pytest.raises(Killed):
        save_checkpoint(tmp_path, params=model.params, optimizer=optimizer, iteration=1)
    with pytest.raises(ValueError, match="no checkpoint"):
        load_checkpoint(tmp_path)


def test_control_a_save_makes_exactly_two_renames_the_pointer_last(tmp_path, monkeypatch):
    """Were there another way into place, the tests above would miss it."""
    calls = dies_at(monkeypatch, 99)
    saved(tmp_path)
    assert [os.path.basename(path).split("-")[0] for path in calls] == ["state", "checkpoint.json"]


def test_behaviour_params_of_other_names_are_refused_and_nothing_written(tmp_path):
    model = toy_model()
    for behaviour in ({"mean": model.params["mean"]}, {**model.params, "more": torch.ones(1)}):
        with pytest.raises(ValueError, match="behaviour"):
            save_checkpoint(
                tmp_path / "c", params=model.params, optimizer=adam(model), iteration=0, behaviour=behaviour
            )
    assert not (tmp_path / "c").exists()


def test_settings_that_are_not_json_are_refused_and_nothing_written(tmp_path):
    model = toy_model()
    with pytest.raises(ValueError, match="JSON"):
        save_checkpoint(
            tmp_path / "c", params=model.params, optimizer=adam(model), iteration=0, settings={"a": tmp_path}
        )
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda params: torch.optim.Adagrad(params),
        lambda params: torch.optim.Adam([{"params": params[:1]}, {"params": params[1:]}]),
    ],
)
def test_another_optimizer_is_refused_before_anything_changes(tmp_path, make):
    model, optimizer = toy_model(), None
    optimizer = adam(model)
    model.params["mean"].grad = torch.ones(4, 2)
    optimizer.step()
    save_checkpoint(tmp_path, params=model.params, optimizer=optimizer, iteration=1)
    fresh = toy_model()
    before = values_of(fresh.params)
    with pytest.raises(ValueError, match="optimizer"):
        restore_checkpoint(load_checkpoint(tmp_path), params=fresh.params, optimizer=make(list(fresh.params.values())))
    assert same(values_of(fresh.params), before)


@pytest.mark.parametrize(
    ("name", "value"), [("optimizer", {}), ("optimizer", 3), ("rng", 3), ("iteration", "x"), ("settings", None)]
)
def test_a_pointer_with_entries_of_another_kind_is_refused(tmp_path, name, value):
    model = toy_model()
    pointer = save_checkpoint(tmp_path, params=model.params, optimizer=adam(model), iteration=1)
    pointer.write_text(json.dumps(json.loads(pointer.read_text()) | {name: value}))
    with pytest.raises(ValueError, match=name):
        load_checkpoint(tmp_path)


def test_a_full_disk_is_an_os_error_that_names_the_folder_and_leaves_the_old_checkpoint(tmp_path):
    script = (
        "import resource, signal, sys, torch; from diffrl.checkpoints import save_checkpoint;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); p = torch.zeros(3, requires_grad=True);"
        "save = lambda p: save_checkpoint(sys.argv[1], params={'p': p}, optimizer=torch.optim.SGD([p], lr=1.0), iteration=1);"
        "save(p); resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16)); save(torch.zeros(2**20, requires_grad=True))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert "OSError: " + str(tmp_path) in done.stderr.splitlines()[-1]
    assert load_checkpoint(tmp_path).params["p"].shape == (3,)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"]
