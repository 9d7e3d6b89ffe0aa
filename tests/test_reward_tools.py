"""Rewards made from rewards: hand-computed labels, sums and memories; rows that fail or hang; nothing blocks exit."""

import math
import subprocess
import sys
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffrl.reward_rows import Final, attempts
from diffrl.rewards import WeightedSum, cached, in_threads, judged, preference, weighted_sum

NAN = math.nan


def images_of(*numbers: int) -> torch.Tensor:
    """One picture per number, filled with it."""
    return torch.tensor(numbers, dtype=torch.uint8)[:, None, None, None].expand(-1, 2, 2, 3).contiguous()


def brightness(images: torch.Tensor, prompts) -> torch.Tensor:
    """The number; 255: no score."""
    values = images.float().flatten(1).mean(1)
    return torch.where(values == 255, torch.nan, values)


def same(a: torch.Tensor, b) -> bool:
    return torch.equal(torch.as_tensor(a).nan_to_num(-99), torch.as_tensor(b).nan_to_num(-99))


# ---- sums


def test_pairs_of_weight_and_reward_are_a_weighted_sum_and_each_member_is_logged_once():
    seen = []
    double = lambda images, prompts: 2 * brightness(images, prompts)  # noqa: E731
    reward = weighted_sum({"one": (3.0, brightness), "two": (-1, double)}, log=lambda *event: seen.append(event))
    assert isinstance(reward, WeightedSum)
    assert reward.weights == (3.0, -1.0)
    values = reward(images_of(5, 255), ["a", "b"])
    assert same(values, [5.0, NAN])
    assert [name for name, _ in seen] == ["one", "two"]
    assert same(seen[1][1], [10.0, NAN])
    for pairs in ({"a": (math.nan, brightness)}, {"a": ("much", brightness)}, {"a": (1.0, "no reward")}):
        with pytest.raises(ValueError, match="'a'"):
            weighted_sum(pairs)
    with pytest.raises(ValueError, match="callable"):
        weighted_sum({"a": (1.0, brightness)}, {"a": 1.0})


# ---- preferences


def test_preferences_of_two_by_hand():
    prompts = ["x", "x", "y", "y", "z", "z", "w", "w"]
    values = preference(brightness, group_size=2)(images_of(1, 3, 7, 2, 4, 4, 9, 255), prompts)
    assert same(values, [0.0, 1.0, 1.0, 0.0, 0.5, 0.5, NAN, NAN])
    assert values.dtype == torch.float32


@given(st.lists(st.integers(0, 9), min_size=4, max_size=4), st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_groups_do_not_depend_on_one_another_and_labels_add_up(first, second):
    """Half of a group wins: the invariant; and a group alone gets what it gets beside another with an equal draw."""
    reward = preference(brightness, group_size=4)
    both = reward(images_of(*first, *second), ["a"] * 4 + ["b"] * 4)
    assert both[:4].sum() == both[4:].sum() == 2
    generator = torch.Generator().manual_seed(0)
    torch.testing.assert_close(
        preference(brightness, group_size=4, generator=generator)(images_of(*first, *second), ["a"] * 4 + ["b"] * 4),
        both,
    )
    for values, labels in ((first, both[:4]), (second, both[4:])):
        top, low = max(values), min(values)
        assert all(labels[i] > 0 for i, v in enumerate(values) if v == top)
        assert all(labels[i] < 1 for i, v in enumerate(values) if v == low)


def test_a_generator_moves_on_from_call_to_call():
    images, prompts = images_of(1, 2, 3, 4), ["a"] * 4
    moving = preference(brightness, group_size=4, generator=torch.Generator().manual_seed(3))
    assert len({tuple(moving(images, prompts).tolist()) for _ in range(12)}) > 1
    fixed = preference(brightness, group_size=4)
    assert len({tuple(fixed(images, prompts).tolist()) for _ in range(12)}) == 1


def honest(a: torch.Tensor, b: torch.Tensor, prompt: str) -> str:
    x, y = int(a.flatten()[0]), int(b.flatten()[0])
    return "a" if x > y else "b" if y > x else "tie"


def test_judged_by_hand_and_asked_in_both_orders():
    asked = []

    def compare(a, b, prompt):
        asked.append((int(a.flatten()[0]), int(b.flatten()[0]), prompt))
        return honest(a, b, prompt)

    values = judged(compare, group_size=2)(images_of(1, 3, 7, 2, 4, 4), ["x", "x", "y", "y", "z", "z"])
    assert values.tolist() == [0.0, 1.0, 1.0, 0.0, 0.5, 0.5]
    assert sorted(asked) == sorted([(1, 3, "x"), (3, 1, "x"), (7, 2, "y"), (2, 7, "y"), (4, 4, "z"), (4, 4, "z")])


@pytest.mark.parametrize("habit", ["a", "b"])
def test_a_judge_that_prefers_a_place_only_makes_ties(habit):
    values = judged(lambda a, b, prompt: habit, group_size=2)(images_of(1, 3), ["x", "x"])
    assert values.tolist() == [0.5, 0.5]
    half = judged(lambda a, b, p: "tie" if int(a.flatten()[0]) == 1 else "a", group_size=2)
    assert half(images_of(1, 3), ["x", "x"]).tolist() == [0.5, 0.5]


@given(st.lists(st.integers(0, 9), min_size=5, max_size=5), st.permutations(range(3)))
def test_judged_pairs_are_disjoint_and_the_odd_one_out_has_no_label(numbers, order):
    generator = torch.Generator().manual_seed(7)
    values = judged(honest, group_size=5, generator=generator)(
        images_of(*numbers * 3), ["abc"[i] for i in order for _ in range(5)]
    )
    for labels in values.reshape(3, 5):
        assert int(labels.isnan().sum()) == 1
        assert labels.nansum() == 2


def test_a_judge_that_fails_costs_its_pair_alone():
    def compare(a, b, prompt):
        if prompt == "bad":
            raise RuntimeError("no answer")
        return "both" if prompt == "odd" else honest(a, b, prompt)

    counts, prompts = [], ["bad", "bad", "odd", "odd", "ok", "ok"]
    reward = judged(compare, group_size=2, log=lambda *event: counts.append(event))
    assert same(reward(images_of(1, 2, 3, 4, 5, 6), prompts), [NAN] * 4 + [0.0, 1.0])
    assert counts == [("failed", 4)]
    with pytest.warns(RuntimeWarning, match=r"judged: 4 of 6 rows have no score \(RuntimeError: no answer"):
        judged(compare, group_size=2)(images_of(1, 2, 3, 4, 5, 6), prompts)


@pytest.mark.parametrize(
    "make", [lambda k: preference(brightness, group_size=k), lambda k: judged(honest, group_size=k)]
)
def test_rows_that_are_no_groups_are_refused(make):
    for size in (1, 0, 2.0):
        with pytest.raises(ValueError, match="group_size must be an integer >= 2"):
            make(size)
    for prompts in (["a", "a", "b"], ["a", "b", "b", "a"]):
        with pytest.raises(ValueError, match="whole groups of group_size=2"):
            make(2)(images_of(*range(len(prompts))), prompts)
    with pytest.raises(ValueError, match="1 prompts"):
        make(2)(images_of(1, 2), ["a"])


# ---- a memory


class Counting:
    def __init__(self):
        self.calls = []

    def __call__(self, images, prompts):
        self.calls.append([(int(image.flatten()[0]), prompt) for image, prompt in zip(images, prompts)])
        return brightness(images, prompts) + torch.tensor([float(len(p)) for p in prompts])


def test_only_what_is_not_known_is_scored():
    inner = Counting()
    reward = cached(inner, capacity=10)
    assert reward(images_of(1, 2, 1), ["a", "bb", "a"]).tolist() == [2.0, 4.0, 2.0]
    assert inner.calls == [[(1, "a"), (2, "bb")]]
    assert reward(images_of(2, 3), ["bb", ""]).tolist() == [4.0, 3.0]
    assert reward(images_of(2, 1), ["bb", "a"]).tolist() == [4.0, 2.0]
    assert inner.calls[1:] == [[(3, "")]]
    assert reward(images_of(1, 1), ["A", "a "]).tolist() == [2.0, 3.0]  # the exact prompt
    assert inner.calls[2:] == [[(1, "A"), (1, "a ")]]
    assert reward(torch.zeros(0, 2, 2, 3, dtype=torch.uint8), []).shape == (0,)


def test_shape_and_pixels_are_part_of_the_key():
    inner = Counting()
    reward = cached(inner, capacity=10)
    flat = images_of(1)
    reward(flat, ["a"])
    reward(flat.reshape(1, 1, 4, 3), ["a"])
    reward(flat[:, None], ["a"])  # a video of one frame
    other = flat.clone()
    other[0, 1, 1, 2] = 9
    reward(other, ["a"])
    assert len(inner.calls) == 4


def test_a_row_without_a_score_is_tried_again():
    inner = Counting()
    reward = cached(inner, capacity=10)
    for _ in range(2):
        assert same(reward(images_of(255, 1), ["a", "a"]), [NAN, 2.0])
    assert inner.calls == [[(255, "a"), (1, "a")], [(255, "a")]]
    infinite = []
    keeps = cached(lambda i, p: infinite.append(1) or torch.full((1,), torch.inf), capacity=2)
    keeps(images_of(1), ["a"])
    keeps(images_of(1), ["a"])
    assert len(infinite) == 2


def test_the_longest_unused_is_forgotten_first():
    inner = Counting()
    reward = cached(inner, capacity=2)
    for number in (1, 2, 1, 3, 1, 2):  # 3 pushes 2 out, which was used before 1
        reward(images_of(number), ["a"])
    assert [call[0][0] for call in inner.calls] == [1, 2, 3, 2]
    assert reward(images_of(5, 6, 7), ["a"] * 3).tolist() == [6.0, 7.0, 8.0]  # more rows than there is room for


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(1, 3), st.data())
def test_a_memory_changes_no_value(numbers, capacity, data):
    reward = cached(brightness, capacity=capacity)
    for _ in range(3):
        order = data.draw(st.permutations(numbers))
        part = order[: data.draw(st.integers(1, len(order)))]
        assert torch.equal(reward(images_of(*part), ["x"] * len(part)), brightness(images_of(*part), None))


def test_a_memory_keeps_double_precision_and_refuses_the_wrong_number_of_values():
    exact = cached(lambda i, p: torch.full((len(p),), 0.1, dtype=torch.float64), capacity=3)
    assert exact(images_of(1), ["a"]).item() == 0.1
    with pytest.raises(ValueError, match=r"shape \(2,\), got shape \(1,\)"):
        cached(lambda i, p: torch.ones(1), capacity=3)(images_of(1, 2), ["a", "b"])
    for capacity in (0, 1.5, True):
        with pytest.raises(ValueError, match="capacity"):
            cached(brightness, capacity=capacity)
    with pytest.raises(ValueError, match="1 prompts"):
        cached(brightness, capacity=1)(images_of(1, 2), ["a"])


# ---- threads


def test_rows_keep_their_order_and_are_scored_beside_one_another():
    together, most, lock = 0, 0, threading.Lock()

    def slow(images, prompts):
        nonlocal together, most
        assert images.shape[0] == len(prompts) == 1
        assert not torch.is_grad_enabled()
        with lock:
            together += 1
            most = max(most, together)
        time.sleep(0.02 * (1 + int(images.flatten()[0]) % 3))
        with lock:
            together -= 1
        return brightness(images, prompts)

    values = in_threads(slow, workers=3, timeout=30)(images_of(*range(9)), list("abcdefghi"))
    assert values.tolist() == list(range(9))
    assert values.dtype == torch.float32
    assert most == 3


@given(st.permutations(range(5)), st.integers(1, 5), st.integers(1, 3))
def test_threads_change_no_value(order, count, workers):
    reward = in_threads(brightness, workers=workers, timeout=30)
    whole = reward(images_of(*range(5)), list("abcde"))
    part = list(order[:count])
    assert torch.equal(reward(images_of(*part), ["abcde"[i] for i in part]), whole[part])


def test_a_row_that_raises_is_tried_again_then_missing_and_counted():
    tries, counts = {}, []

    def flaky(images, prompts):
        tries[prompts[0]] = tries.get(prompts[0], 0) + 1
        if prompts[0] == "never" or (prompts[0] == "twice" and tries["twice"] < 3):
            raise RuntimeError(prompts[0])
        return [1.0, 2.0] if prompts[0] == "two values" else brightness(images, prompts)

    options = {"workers": 2, "timeout": 30, "pause": 0.001, "log": lambda *event: counts.append(event)}
    prompts = ["fine", "never", "twice", "two values", "nan"]
    values = in_threads(flaky, **options)(images_of(1, 2, 3, 4, 255), prompts)
    assert same(values, [1.0, NAN, 3.0, NAN, NAN])
    assert tries == {"fine": 1, "never": 3, "twice": 3, "two values": 3, "nan": 1}
    assert counts == [("failed", 2)]  # a reward that answers nan has not failed
    counts.clear()
    in_threads(flaky, **options)(images_of(1), ["fine"])
    assert counts == []
    with pytest.warns(RuntimeWarning, match="in_threads: 1 of 1 rows .*RuntimeError: never"):
        in_threads(flaky, workers=1, timeout=30, retries=0)(images_of(1), ["never"])


def test_whatever_hangs_the_call_returns_in_time():
    release, counts = threading.Event(), []

    def hangs(images, prompts):
        if prompts[0] == "hang":
            release.wait(60)
        return brightness(images, prompts)

    began = time.monotonic()
    log = lambda *event: counts.append(event)  # noqa: E731
    reward = in_threads(hangs, workers=2, timeout=1.0, retries=1, pause=0.01, log=log)
    # Two rows take both workers; the others are scored all the same.
    values = reward(images_of(1, 2, 3, 4, 5), ["hang", "hang", "c", "d", "e"])
    assert time.monotonic() - began < 2.0 + 4.0
    assert same(values, [NAN, NAN, 3.0, 4.0, 5.0])
    assert counts == [("failed", 2)]
    counts.clear()
    began = time.monotonic()
    quick = in_threads(hangs, workers=1, timeout=0.2, retries=1, log=log)
    assert quick(images_of(*range(30)), ["hang"] * 30).isnan().all()  # not 30 times 0.4 s
    assert time.monotonic() - began < 4.0
    assert counts == [("failed", 30)]
    release.set()


def test_a_thread_that_hangs_does_not_block_exit():
    code = """if True:
        import torch, threading, warnings
        warnings.simplefilter("ignore")
        from diffrl.reward_tools import in_threads
        reward = in_threads(lambda i, p: threading.Event().wait(), workers=1, timeout=0.1, retries=0)
        print(reward(torch.zeros(1, 2, 2, 3, dtype=torch.uint8), ["a"]).tolist())"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.strip() == "[nan]"


def test_control_an_ordinary_thread_would_block_exit():
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\nprint('done')"
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=1.5)


def test_a_late_answer_is_dropped():
    """The second try answers while the first still runs; what the first returns must go nowhere."""
    release, first = threading.Event(), threading.Event()

    def run(task):
        if not first.is_set():
            first.set()
            release.wait(60)
            return "late"
        release.set()
        time.sleep(0.3)  # the late answer comes before this one
        return "in time"

    assert attempts(1, run, workers=2, timeout=0.5, retries=2, pause=0.0) == ["in time"]


def test_pauses_grow_and_a_final_failure_is_not_repeated():
    times = []

    def run(task):
        times.append(time.monotonic())
        raise RuntimeError

    attempts(1, run, workers=1, timeout=20, retries=3, pause=0.1)
    gaps = [b - a for a, b in zip(times, times[1:])]  # noqa: RUF007
    assert gaps[0] >= 0.1
    assert gaps[1] >= 0.2
    assert gaps[2] >= 0.4

    def final(task):
        times.append(0)
        raise Final("no use")

    times.clear()
    (result,) = attempts(1, final, workers=1, timeout=20, retries=3, pause=0.0)
    assert isinstance(result, Final)
    assert len(times) == 1
    assert attempts(0, run, workers=1, timeout=1, retries=0, pause=0.0) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": math.inf}, "timeout"),
        ({"retries": -1}, "retries"),
        ({"pause": -0.1}, "pause"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        in_threads(brightness, **{"workers": 1, "timeout": 1.0, **options})
    with pytest.raises(ValueError, match="1 prompts"):
        in_threads(brightness, workers=1, timeout=1.0)(images_of(1, 2), ["a"])
