"""Workers, rewards, backends and searches that answer nonsense, late or not at all: one clear error, or the plain loop's params.

Negative controls are the tests with `control` in their names.
"""

import _thread
import copy
import pickle
import signal
import threading
import time

import pytest
import torch
from executing import COST, GROUP, Noted, close, executed, noted_run, plain, reference, stages_of, whole
from oracles import refuses
from toys import same, values_of

import diffrl.algorithms as algorithms
from diffrl.algorithms import art, flow_grpo_fast, grpo_guard, grpo_guard_as_published, mix_grpo
from diffrl.checks import NoReward
from diffrl.conductor import ExecutionError, MeasuredTrace
from diffrl.executors import calibrate, in_process, run
from diffrl.parallel import Schedule, Trace, gap_partition, prompt_partition
from diffrl.rewards import weighted_sum
from diffrl.stages import require_separable_objective, sums_of
from diffrl.tasks.toy import toward_compass, toy_model

SCHEDULE = Schedule(gap_partition(2, 2, fragments=3), 2, timesteps=2)
ROWS = {"row": torch.arange(4)}


def diffrl_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("diffrl")]


# ---- what plain workers answer


def changed(noted, name, after):
    """Noted's workers, one of which has its answer changed by `after`."""
    worker = getattr(noted.workers(), name)
    return noted.workers()._replace(**{name: lambda *given: after(worker(*given))})


@pytest.mark.parametrize(
    ("name", "after", "message"),
    [
        ("generate", lambda made: None, "generate of step 0, fragment 0 .*must return a Trajectory, got NoneType None"),
        ("generate", lambda made: made._replace(x_0=made.x_0[:-1]), r"x_0 must .* axes \(2,\), got shape \(1, 1\)"),
        ("generate", lambda made: made._replace(seeds=made.seeds[:0]), r"seeds must .* axes \(2,\), got shape \(0,\)"),
        ("score", lambda values: values[:, None], r"reward of step 0, .*numbers \(2,\), got torch.float64 \(2, 1\)"),
        ("score", lambda values: values.repeat(2), r"score must .* axes \(2,\), got shape \(4,\)"),
        ("score", lambda values: values.tolist(), r"score must be a tensor .* got list \["),
        ("score", lambda values: values.long(), r"floating-point numbers \(2,\), got torch.int64 \(2,\)"),
        ("credit", lambda told: told.flatten(), r"train of step 0, .*credit must .* axes \(1, 2\), got shape \(2,\)"),
        ("credit", lambda told: {"a": None}, r"credit\['a'\] must be a tensor with .* got NoneType None"),
        ("accumulate", lambda told: 1.5, r"train of step 0, .*numbers by name, or None, got 1.5"),
        ("accumulate", lambda told: {"a": "b"}, r"accumulate must return numbers by name, or None, got {'a': 'b'}"),
        ("commit", lambda told: 3, r"update of step 0 failed 1 times, .*commit must return numbers by name"),
        ("snapshot", lambda params: None, "publish of step 0 failed 1 times.* params by name, got NoneType None"),
    ],
)
def test_an_answer_of_another_kind_is_an_error_of_its_own_stage(name, after, message):
    noted = Noted()
    with pytest.raises(ExecutionError, match=message):
        list(run(SCHEDULE, changed(noted, name, after), ROWS, torch.arange(4), steps=1, retries=0))
    assert float(noted.theta.detach()) == 0.0 or name == "commit"
    assert diffrl_threads() == []


def test_control_what_is_only_unusual_is_taken_as_it_is():
    """Numbers that need a gradient, metrics that are tensors or absent, a trajectory with nothing but its end."""
    expected = noted_run(SCHEDULE, Noted(), seeds=torch.arange(4))[0].metrics
    noted = Noted()
    odd = changed(noted, "score", lambda values: values.requires_grad_())._replace(
        accumulate=lambda *given: {n: torch.tensor(v) for n, v in noted.accumulate(*given).items()},
    )
    found = next(run(SCHEDULE, odd, ROWS, torch.arange(4), steps=1, backend=in_process(pick=lambda n: 0))).metrics
    assert {n: v for n, v in found.items() if n[:7] != "seconds"} == {
        n: v for n, v in expected.items() if n[:7] != "seconds"
    }
    assert all(type(value) is float for value in found.values())
    silent = changed(Noted(), "accumulate", lambda told: None)
    assert "pairs" not in next(run(SCHEDULE, silent, ROWS, torch.arange(4), steps=1)).metrics


@pytest.mark.parametrize("seeds", [torch.rand(4), torch.ones(4, dtype=torch.bool), torch.tensor([0, 1, -2, 3])])
def test_seeds_that_are_no_counts_are_refused(seeds):
    """A fraction would be cut off: four samples of one seed."""
    with refuses("seeds must be integers >= 0", str(seeds.dtype)):
        run(SCHEDULE, Noted().workers(), ROWS, seeds, steps=1)
    run(SCHEDULE, Noted().workers(), ROWS, torch.arange(4).int(), steps=1)


def test_no_worker_no_backend_no_search_and_another_start_are_refused_at_the_call():
    with refuses("workers.commit must be a function, got None"):
        run(SCHEDULE, Noted().workers()._replace(commit=None), ROWS, torch.arange(4), steps=1)
    for backend in ("ray", None, lambda: None):
        with refuses("backend must be one"):
            run(whole(5), stages_of(art()), steps=1, backend=backend)
    with refuses("lend must be a function", "3"):
        run(whole(5), stages_of(art()), steps=1, lend=3)
    with refuses("start=1 comes before the stages' own start=2"):
        run(whole(5), stages_of(art(), start=2), steps=1, start=1)


# ---- backends


def test_a_backend_that_runs_a_schedule_is_not_given_another():
    backend = in_process()
    first, second = (run(whole(5, fragments=2), stages_of(art()), steps=2, backend=backend) for _ in range(2))
    next(first)
    with refuses("this backend runs another schedule now"):
        next(second)
    assert next(first).step == 1
    first.close()
    assert len(list(run(whole(5), stages_of(art()), steps=1, backend=backend))) == 1  # it is free again


def test_two_runs_side_by_side_and_one_after_the_other_are_the_plain_loop_s():
    stages = [stages_of(art()), stages_of(art())]
    runs = [run(whole(5, fragments=3, pack=4), each, steps=2) for each in stages]
    for _ in range(2):
        for one in runs:
            next(one)
    for one in runs:
        one.close()
    assert all(close(each.model.params, reference("art")) for each in stages)
    again = stages_of(art())
    for step in range(2):
        list(run(whole(5, fragments=3), again, steps=1, start=step))
    assert close(again.model.params, reference("art"))
    assert diffrl_threads() == []


def test_a_first_publication_that_fails_is_made_again_and_no_error_of_its_own():
    noted, failures = Noted(), [ZeroDivisionError("first")]

    def snapshot():
        if failures:
            raise failures.pop()
        return noted.snapshot()

    workers = noted.workers()._replace(snapshot=snapshot)
    assert len(list(run(SCHEDULE, workers, ROWS, torch.arange(4), steps=1, retries=1))) == 1
    failures += [ZeroDivisionError("again")] * 2
    with pytest.raises(ExecutionError, match="publish of step 0 failed 2 times, the last time by ZeroDivisionError"):
        list(run(SCHEDULE, workers, ROWS, torch.arange(4), steps=1, retries=1))


def test_a_timeout_has_no_meaning_where_calls_wait_for_their_turn():
    """Picked one at a time, a call may lie for longer than it takes: it is not given up unrun."""
    noted = Noted(generate=0.04)
    schedule = Schedule(prompt_partition(4, 1, fragments=4), 1, timesteps=2)
    backend = in_process(pick=lambda n: n - 1, rewards=2)
    results = noted_run(schedule, noted, timeout=0.03, backend=backend)
    assert len(results) == 1
    assert len(noted.of("generate")) == 4


@pytest.fixture
def interruptible():
    """Ctrl-C raises, also in a test run that was started in the background, where SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_leaves_the_last_commit_no_gradient_and_no_thread(interruptible):
    stages, halves = stages_of(art(updates=1)), []
    generate = stages.generate

    def begun():
        return all(p.grad is not None for p in stages.model.params.values())

    def interrupted(step, params, rows):
        if step == 1 and 5 in rows:
            until = time.monotonic() + 60
            while not begun() and time.monotonic() < until:  # the first prompt's gradient is half of the batch's
                time.sleep(0.01)
            halves.append(begun())
            _thread.interrupt_main()
            time.sleep(0.3)
        return generate(step, params, rows)

    stages.generate = interrupted
    running = run(whole(5, fragments=4), stages, steps=3)
    next(running)
    committed = values_of(stages.model.params)
    with pytest.raises(KeyboardInterrupt):
        next(running)
    assert halves == [True]
    assert same(values_of(stages.model.params), committed)
    assert all(p.grad is None for p in stages.model.params.values())
    assert diffrl_threads() == []
    with pytest.raises(StopIteration):
        next(running)


# ---- searches


def test_what_lend_raises_is_raised_and_its_thought_does_not_outlive_the_run():
    schedule = Schedule(prompt_partition(3, 1, fragments=3), 1, timesteps=2, tag=True)

    def late(*_):
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        noted_run(schedule, Noted(generate=0.02), cost=COST, lend=late, backend=in_process)

    def slow(*_):
        time.sleep(0.4)
        return 0

    noted_run(schedule, Noted(generate=0.02), cost=COST, lend=slow, backend=in_process)
    assert diffrl_threads() == []


def test_plain_workers_cannot_be_timed_without_seeds():
    for seeds in (None, [0, 1, 2, 3]):
        with refuses("plain Workers need cond and seeds"):
            calibrate(Noted().workers(), {}, seeds)


# ---- what a result holds


def test_what_was_done_again_is_told_and_warned_of():
    asked = []

    def flaky(trajectory, cond):
        asked.append(len(trajectory.x_0))
        if len(asked) == 1:
            raise OSError("judge is down")
        return torch.arange(float(len(trajectory.x_0)))

    workers, rows = Noted().workers()._replace(score=flaky), torch.arange(SCHEDULE.rows)
    with pytest.warns(
        UserWarning,
        match=r"reward/0: reward of step 0, fragment 0 failed \(OSError: judge is down\); done again, 1 of 2",
    ):
        first, second = run(SCHEDULE, workers, {"row": rows}, rows, steps=2)
    assert (first.metrics["retries"], second.metrics["retries"]) == (1.0, 0.0)
    assert first.metrics["replaced"] == 0.0


def test_a_result_holds_what_all_share_and_its_trace_ends_with_it():
    results = noted_run(SCHEDULE, Noted(generate=0.001, accumulate=0.001), steps=4)
    step, version, _, first = results[0]
    assert (step, version, type(first)) == (0, 1, MeasuredTrace)
    assert isinstance(first, Trace)
    assert len({id(vars(r.trace)["_lists"][0]) for r in results}) == 1  # a copy for each would grow with the square
    assert all("intervals" not in vars(r.trace) for r in results)
    for i, result in enumerate(results, 1):
        trace = result.trace
        assert len(trace.ends) == i
        assert {interval.step for interval in trace.intervals} == set(range(i))
        own = [x for x in trace.intervals if x.step == i - 1 and x.kind == "generate"]
        assert result.metrics["seconds/rollout"] == pytest.approx(sum(x.end - x.start for x in own))
    plain = Trace(first.intervals, first.ends)
    assert first == plain
    assert plain == first
    assert hash(first) == hash(plain)
    assert type(pickle.loads(pickle.dumps(first))) is Trace
    assert results[-1].trace != first
    with pytest.raises(AttributeError, match="nothing"):
        first.nothing  # noqa: B018


def test_the_state_that_is_loaded_is_not_trained():
    first = stages_of(art())
    list(run(whole(5), first, steps=1))
    saved = first.state()
    before = copy.deepcopy(saved)
    ends = []
    for _ in range(2):
        stages = stages_of(art(), start=1)
        stages.load(saved)
        list(run(whole(5), stages, steps=1, start=1))
        ends.append(values_of(stages.model.params))
    assert same(*ends)
    assert close(ends[0], reference("art"))
    for number, moments in before["optimizer"]["state"].items():
        assert same(saved["optimizer"]["state"][number], moments)


def test_a_reward_does_not_wait_for_a_rollout_or_training_of_the_same_module():
    stages = stages_of(art())
    made, held, free = stages.generate(0, stages.snapshot(), [0, 1]), threading.Event(), threading.Event()

    def train():
        with stages.lock:
            held.set()
            free.wait(20)

    other = threading.Thread(target=train)
    other.start()
    held.wait(20)
    scored: list = []
    reward = threading.Thread(target=lambda: scored.append(stages.score(0, [0, 1], made)))
    reward.start()
    reward.join(10)
    waited = reward.is_alive()
    free.set()
    other.join()
    reward.join()
    assert not waited
    assert scored[0].shape == (2,)


# ---- rewards


def parts(*, lacking=False):
    """Two rewards of the toy, of other scales; lacking: the second raises for what lies far out."""

    def radius(images, prompts):
        values = images.double().square().sum(1)
        if lacking and bool((values > 0.26).any()):
            raise ValueError("too far out")
        return (-100 * values).float()  # as rewards do; one that was asked row by row is float32 too

    return weighted_sum({"compass": (1.0, toward_compass), "radius": (0.5, radius)})


def trained_by_loop(algorithm, reward, **options):
    from executing import STEPS
    from toys import wide

    from diffrl.loop import train
    from diffrl.tasks.toy import PROMPTS

    model = toy_model(dtype=torch.float64)
    optimizer = torch.optim.Adam(list(model.params.values()), lr=0.06)
    given = {"group_size": GROUP, "steps": STEPS, "seed": 0, **options}
    training = train(model, wide(algorithm), PROMPTS[:2], reward, optimizer, **given)
    rows = [next(training), next(training)]
    return model.params, rows


def sliding():
    return mix_grpo(window=2, updates=2)


@pytest.mark.parametrize(("factory", "timesteps"), [(sliding, 2), (art, 5)])
def test_a_reward_of_several_parts_is_the_plain_loop_s(factory, timesteps):
    params, rows = trained_by_loop(factory(), parts())
    found, results = executed(whole(timesteps), stages_of(factory(), reward=parts()))
    assert same(values_of(found), values_of(params))
    for row, result in zip(rows, results, strict=True):
        assert result.metrics["reward/mean"] == pytest.approx(row["reward/mean"], rel=1e-12)
        assert result.metrics["reward/std"] == pytest.approx(row["reward/std"], rel=1e-12)
    cut, _ = executed(whole(timesteps, fragments=3, pack=3), stages_of(factory(), reward=parts()))
    assert close(cut, params)


def test_control_the_parts_are_not_their_sum_to_an_algorithm_that_adds_advantages():
    params, _ = trained_by_loop(sliding(), parts())
    single, _ = trained_by_loop(sliding(), lambda images, prompts: parts().total(_each(images, prompts)))
    assert not close(params, single, relative=1e-3)
    assert torch.equal(sums_of(torch.tensor([[3.0, 1.0, 2.0]])), torch.tensor([3.0]))
    assert torch.equal(sums_of(torch.tensor([3.0, 1.0])), torch.tensor([3.0, 1.0]))


def _each(images, prompts):
    return torch.stack([reward(images, prompts).double() for reward in parts().rewards.values()], 1)


@pytest.mark.parametrize(("factory", "timesteps"), [(sliding, 2), (art, 5)])
@pytest.mark.parametrize("several", [True, False])
def test_a_fragment_that_no_reward_can_judge_is_nan_as_in_the_whole_batch(factory, timesteps, several):
    """One sample per fragment: where the reward raises for it, it raises for all of the fragment."""
    lacking = parts(lacking=True)
    reward = lacking if several else lacking.rewards["radius"]
    params, rows = trained_by_loop(factory(), reward)
    assert 0 < rows[0]["reward/missing"] < 1
    stages = stages_of(factory(), reward=reward)
    found, results = executed(whole(timesteps, fragments=8), stages)
    assert [r.metrics["reward/missing"] for r in results] == [row["reward/missing"] for row in rows]
    assert close(found, params)


def test_control_a_batch_that_no_reward_can_judge_is_an_error():
    def broken(images, prompts):
        raise ZeroDivisionError("no engine")

    stages = stages_of(art(), reward=broken)
    before = values_of(stages.model.params)
    with pytest.raises(ExecutionError, match=r"reward of step 0, fragment \d failed 2 times.* NoReward") as caught:
        executed(whole(5, fragments=4), stages, retries=1)
    assert isinstance(caught.value.__cause__, NoReward)
    assert same(values_of(stages.model.params), before)


# ---- algorithms


def test_a_window_of_the_whole_iteration_is_the_same_in_every_fragment():
    """Flow-GRPO-Fast draws one window per iteration: from the first prompt's seed, wherever the batch is cut."""
    algorithm = flow_grpo_fast(window=2, updates=2)
    params, _ = plain(algorithm, steps=8)
    found, _ = executed(whole(2, barrier=True, fragments=5, pack=3), stages_of(algorithm, steps=8))
    assert close(found, params)
    starts = {stages_of(algorithm, steps=8, seed=seed).generate(0, _first(), [5, 6]).t[0].item() for seed in range(8)}
    assert len(starts) > 1  # it does move


def _first():
    return values_of(toy_model(dtype=torch.float64).params)


def test_an_objective_that_looks_at_its_micro_batch_is_not_cut():
    with refuses("objective looks at all samples of a forward", "in one fragment"):
        run(whole(4, fragments=2), stages_of(grpo_guard_as_published()), steps=1)
    params, _ = plain(grpo_guard_as_published())
    found, _ = executed(whole(4), stages_of(grpo_guard_as_published()))
    assert same(values_of(found), values_of(params))
    require_separable_objective(grpo_guard(), steps=5, group_size=4)


@pytest.mark.parametrize(
    "name", [n for n in algorithms.__all__ if n.startswith(("art", "awm", "cps", "dance", "flow", "nft", "mix"))]
)
def test_control_no_other_objective_is_refused(name):
    require_separable_objective(getattr(algorithms, name)(), steps=10, group_size=4)
