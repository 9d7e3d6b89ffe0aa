"""Selection, rank agreement and the two-stage rollout against brute force, scipy and a plain rollout of the chosen seeds."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import F64, normal, refuses, spy
from strategies import reward_groups

from diffrl.contrast import (
    RankAgreement,
    RewardCache,
    TwoStageRollout,
    affordable_pool,
    average_ranks,
    draft_rewards,
    rank_agreement,
    select_contrastive,
    two_stage_rollout,
)
from diffrl.sampling import flow_sde_step, rollout, sample_seeds, time_grid
from diffrl.types import Trajectory
from diffrl.windows import score_images

NAN, INF = math.nan, math.inf


# ---- selection --------------------------------------------------------------------------------------------------------


def plain_selection(row: list[float], keep: int) -> list[int]:
    """One group by sorting a list: best first, worst last, missing ones in the middle."""
    there = sorted((i for i, r in enumerate(row) if math.isfinite(r)), key=lambda i: (-row[i], i))
    missing = [i for i, r in enumerate(row) if not math.isfinite(r)]
    if len(there) >= 2 * keep:
        return there[:keep] + there[-keep:]
    top = min(keep, math.ceil(len(there) / 2))
    return there[:top] + missing[: 2 * keep - len(there)] + there[top:]


@given(reward_groups(min_k=2), st.data())
def test_selection_is_a_sorted_list(rewards, data):
    n = rewards.shape[1]
    keep = data.draw(st.integers(1, n // 2))
    got = select_contrastive(rewards, keep=keep)
    assert got.dtype == torch.int64
    assert got.tolist() == [plain_selection(row, keep) for row in rewards.tolist()]
    assert all(len(set(row)) == 2 * keep for row in got.tolist())
    increasing = torch.where(torch.isfinite(rewards), (rewards / 3).exp() - 2, NAN)
    assert torch.equal(select_contrastive(increasing, keep=keep), got)
    chosen = rewards.gather(1, got)
    for row in chosen.tolist():
        finite = [r for r in row if math.isfinite(r)]
        assert finite == sorted(finite, reverse=True)


def test_ties_never_overlap():
    # Two calls of topk give 12 distinct of 24 here, and 22 of the ten ones among 96.
    same = torch.zeros(2, 96)
    assert select_contrastive(same, keep=12).tolist() == [[*range(12), *range(84, 96)]] * 2
    ones = torch.zeros(1, 96)
    ones[0, 40:50] = 1.0
    got = select_contrastive(ones, keep=12)[0].tolist()
    assert got == [*range(40, 50), 0, 1, *range(84, 96)]


def test_control_two_topk_calls_do_overlap():
    same = torch.zeros(96)
    both = torch.cat([same.topk(12).indices, same.topk(12, largest=False).indices])
    assert len(set(both.tolist())) < 24


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([NAN, 3.0, INF, 1.0, 2.0, -INF], [1, 4, 0, 3]),
        ([NAN, NAN, 5.0, NAN, NAN, NAN], [2, 0, 1, 3]),
        ([NAN] * 6, [0, 1, 2, 3]),
        ([4.0, NAN, 3.0, 2.0, 1.0, NAN], [0, 2, 3, 4]),
        ([1.0, NAN, 2.0, NAN, NAN, NAN], [2, 1, 3, 0]),
    ],
)
def test_samples_without_reward_fill_the_middle(row, expected):
    assert select_contrastive(torch.tensor([row]), keep=2).tolist() == [expected]


def test_selection_does_not_depend_on_dtype_or_other_groups():
    rewards = normal(5, 20).to(torch.bfloat16)
    got = select_contrastive(rewards, keep=4)
    for dtype in (torch.float16, torch.float32, F64):
        assert torch.equal(select_contrastive(rewards.to(dtype), keep=4), got)
    for g in range(5):
        assert torch.equal(select_contrastive(rewards[g : g + 1], keep=4)[0], got[g])
    close = torch.tensor([[1.0, 1.0 + 1e-15, 1.0 - 1e-15]], dtype=F64)  # told apart in float64 only
    assert select_contrastive(close, keep=1).tolist() == [[1, 2]]
    assert select_contrastive(torch.zeros(0, 4), keep=2).shape == (0, 4)


def test_bad_selections_are_refused():
    for keep in (0, -1, 1.5, True):
        with refuses("keep", keep):
            select_contrastive(torch.zeros(2, 8), keep=keep)
    with refuses("keep=5", "(2, 8)"):
        select_contrastive(torch.zeros(2, 8), keep=5)
    with refuses("(g, n)", "(8,)"):
        select_contrastive(torch.zeros(8), keep=1)
    with refuses("floating point", "int64"):
        select_contrastive(torch.zeros(2, 8, dtype=torch.int64), keep=1)


# ---- agreement --------------------------------------------------------------------------------------------------------


def plain_agreement(proxy: np.ndarray, true: np.ndarray, keep: int) -> list[float]:
    """One group with scipy and lists."""
    both = np.isfinite(proxy) & np.isfinite(true)
    proxy, true = proxy[both], true[both]
    n = len(true)
    if n < 2 * keep:
        return [NAN] * 7
    ranks = scipy.stats.rankdata(-true)
    guess, best = plain_selection(list(proxy), keep), plain_selection(list(true), keep)
    constant = len(set(proxy)) == 1 or len(set(true)) == 1
    return [
        NAN if constant else scipy.stats.spearmanr(proxy, true).statistic,
        NAN if constant else scipy.stats.kendalltau(proxy, true).statistic,
        len(set(guess[:keep]) & set(best[:keep])) / keep,
        len(set(guess[keep:]) & set(best[keep:])) / keep,
        np.mean(ranks[guess[keep:]] < (n + 1) / 2),
        np.mean(ranks[guess[:keep]]),
        np.mean(ranks[guess[keep:]]),
    ]


@given(reward_groups(min_k=2), st.data())
def test_agreement_is_scipys_and_brute_force(true, data):
    n = true.shape[1]
    values = st.one_of(st.integers(-2, 2).map(float), st.sampled_from([NAN, INF]), st.floats(-9, 9))
    rows = st.lists(values, min_size=n, max_size=n)
    proxy = torch.tensor([data.draw(rows) for _ in range(len(true))], dtype=F64)
    keep = data.draw(st.integers(1, n // 2))
    got = rank_agreement(proxy, true, keep=keep)
    expected = np.array([plain_agreement(p, t, keep) for p, t in zip(proxy.numpy(), true.numpy())])
    assert all(field.dtype == F64 and field.shape == (len(true),) for field in got)
    np.testing.assert_allclose(torch.stack(got, 1).numpy(), expected, rtol=1e-9, atol=1e-12)
    moved = rank_agreement(torch.where(proxy.isfinite(), 2 * proxy + 1, NAN), true, keep=keep)
    np.testing.assert_allclose(torch.stack(moved).numpy(), torch.stack(got).numpy(), atol=1e-12)
    mirrored = rank_agreement(-proxy, -true, keep=keep)
    np.testing.assert_allclose(mirrored.spearman.numpy(), got.spearman.numpy(), atol=1e-12)


def test_perfect_reversed_and_random_proxies_have_the_tabled_values():
    true = normal(3, 96)
    perfect = torch.stack(rank_agreement(true, true, keep=12), 1)
    assert perfect.tolist() == [[1, 1, 1, 1, 0, 6.5, 90.5]] * 3
    back = torch.stack(rank_agreement(-true, true, keep=12), 1)
    assert back.tolist() == [[-1, -1, 0, 0, 1, 90.5, 6.5]] * 3
    many = rank_agreement(normal(400, 96, seed=1), normal(400, 96, seed=2), keep=12)
    means = torch.stack(many, 1).nanmean(0).tolist()
    assert means == pytest.approx([0, 0, 0.125, 0.125, 0.5, 48.5, 48.5], abs=1.5)
    assert means[:5] == pytest.approx([0, 0, 0.125, 0.125, 0.5], abs=0.03)


def test_gaussian_ranks_at_the_published_correlation():
    """2604.06916 reports Spearman .927; Gaussian ranks there have overlap .75 and mean rank 9.0 at 12 of 96 (derived)."""
    rho = 2 * math.sin(math.pi * 0.927 / 6)
    true = normal(400, 96, seed=3)
    proxy = rho * true + math.sqrt(1 - rho**2) * normal(400, 96, seed=4)
    found = rank_agreement(proxy, true, keep=12)
    assert float(found.spearman.mean()) == pytest.approx(0.92, abs=0.01)
    assert float(found.top_match.mean()) == pytest.approx(0.75, abs=0.02)
    assert float(found.mean_rank_top.mean()) == pytest.approx(9.0, abs=0.3)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=12))
def test_average_ranks_are_scipys(values):
    x = torch.tensor(values)
    assert average_ranks(x).tolist() == scipy.stats.rankdata(-x.numpy(), method="average").tolist()
    with refuses("one row"):
        average_ranks(x[None])


def test_groups_with_too_little_or_no_spread():
    proxy = torch.tensor([[1.0, NAN, 2.0, 3.0, 0.0], [1.0, 2.0, NAN, INF, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    true = torch.tensor([[1.0, 5.0, 2.0, 3.0, 0.0], [1.0, 2.0, 3.0, 4.0, NAN], [1.0, 2.0, 3.0, 4.0, 5.0]])
    got = rank_agreement(proxy, true, keep=2)
    assert got.spearman[0] == got.kendall[0] == 1
    assert all(bool(field[1].isnan()) for field in got)
    assert bool(got.spearman[2].isnan() & got.kendall[2].isnan())
    assert got.top_match[2] == 0  # the constant proxy takes the lower columns, which are the worst
    assert (
        torch.isnan(torch.stack(rank_agreement(proxy.to(torch.bfloat16), true.to(torch.bfloat16), keep=2))).sum() == 9
    )
    assert isinstance(got, RankAgreement)
    assert rank_agreement(torch.zeros(0, 4), torch.zeros(0, 4), keep=2).kendall.shape == (0,)


def test_bad_agreements_are_refused():
    with refuses("shapes differ", "(2, 8)", "(2, 7)"):
        rank_agreement(torch.zeros(2, 8), torch.zeros(2, 7), keep=1)
    with refuses("(g, n)", "(8,)"):
        rank_agreement(torch.zeros(8), torch.zeros(8), keep=1)
    with refuses("keep=5", "(2, 8)"):
        rank_agreement(torch.zeros(2, 8), torch.zeros(2, 8), keep=5)
    with refuses("keep", 0):
        rank_agreement(torch.zeros(2, 8), torch.zeros(2, 8), keep=0)


# ---- two stages -------------------------------------------------------------------------------------------------------

G, N, KEEP, SHAPE = 3, 10, 2, (2, 2)
PROMPTS = ["a", "b", "c"]
COND = {"text": torch.arange(1.0, 4.0)[:, None]}
SEEDS = sample_seeds(0, 1, [0, 1, 2], N)
PARAMS, DRAFT_PARAMS = {"w": torch.tensor(0.7)}, {"w": torch.tensor(0.7)}
DRAFT_TIMES, TIMES = time_grid(3), time_grid(5)


def velocity(params, x, t, cond):
    return params["w"] * x * t[:, None, None] + 0.1 * cond["text"][:, :, None]


def reward(images, prompts):
    return images.sum((1, 2)) + torch.tensor([float(len(p) + ord(p)) for p in prompts])


def staged(draft=velocity, **changed):
    given = {
        "draft_times": DRAFT_TIMES,
        "times": TIMES,
        "keep": KEEP,
        "shape": SHAPE,
        "prompts": PROMPTS,
        "cond": COND,
        "seeds": SEEDS,
        "reward": reward,
        "velocity": velocity,
        **changed,
    }
    order = [given.pop(name) for name in ("velocity", "cond", "seeds", "reward")]
    return two_stage_rollout(order[0], PARAMS, draft, DRAFT_PARAMS, *order[1:], **given)


def assert_same(a: Trajectory, b: Trajectory) -> None:
    for name, x, y in zip(Trajectory._fields, a, b):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("step", [flow_sde_step, None])
def test_a_draft_that_is_the_policy_gives_the_plain_rollout_of_the_chosen_seeds(step):
    how = {} if step is None else {"step": step}
    got = staged(draft_times=TIMES, **how)
    assert isinstance(got, TwoStageRollout)
    assert (got.rewards.shape, got.columns.shape, got.proxy.shape) == ((G, 4), (G, 4), (G, N))
    assert torch.equal(got.columns, select_contrastive(got.proxy, keep=KEEP))
    chosen = SEEDS.gather(1, got.columns).flatten()
    rows = {"text": COND["text"].repeat_interleave(4, 0)}
    direct = rollout(velocity, PARAMS, rows, TIMES, seeds=chosen, shape=SHAPE, **how)
    assert_same(got.trajectory, direct)
    if step is None:
        assert torch.equal(got.rewards, got.proxy.gather(1, got.columns))
    assert torch.equal(got.rewards.flatten(), reward(direct.x_0, [p for p in PROMPTS for _ in range(4)]))


def test_the_draft_chooses_and_nothing_else():
    plain = staged()
    shifted = staged(draft=lambda p, x, t, c: velocity(p, x, t, c) - 3.0)  # every reward is the same amount higher
    assert torch.equal(shifted.columns, plain.columns)
    torch.testing.assert_close(
        shifted.proxy - plain.proxy, torch.full((G, N), float(shifted.proxy[0, 0] - plain.proxy[0, 0]))
    )
    assert float((shifted.proxy - plain.proxy).min()) > 1
    assert torch.equal(shifted.rewards, plain.rewards)
    assert_same(shifted.trajectory, plain.trajectory)
    other = staged(draft=lambda p, x, t, c: 5 * torch.sin(5 * x))
    assert not torch.equal(other.columns, plain.columns)


def test_control_another_policy_changes_the_rewards():
    assert not torch.equal(staged(velocity=lambda p, x, t, c: -x).rewards, staged().rewards)


def test_each_stage_sees_its_params_its_rows_and_no_gradient():
    draft_log, log, asked, decoded = [], [], [], []

    def grad_free(function):
        def call(params, x, t, cond):
            assert not torch.is_grad_enabled()
            return function(params, x, t, cond)

        return call

    def counted(images, prompts):
        asked.append(list(prompts))
        return reward(images, prompts)

    with torch.enable_grad():
        got = staged(
            spy(grad_free(velocity), draft_log),
            velocity=spy(grad_free(velocity), log),
            reward=counted,
            decode=lambda x: decoded.append(torch.is_grad_enabled()) or x,
        )
    assert [len(args[1]) for args, _ in draft_log] == [G * N] * 3
    assert [len(args[1]) for args, _ in log] == [G * 2 * KEEP] * 5
    assert all(args[0] is DRAFT_PARAMS for args, _ in draft_log)
    assert all(args[0] is PARAMS for args, _ in log)
    assert asked == [[p for p in PROMPTS for _ in range(N)], [p for p in PROMPTS for _ in range(4)]]
    assert decoded == [False, False]
    assert not any(x.requires_grad for x in (got.rewards, got.proxy, got.trajectory.x_0))


@pytest.mark.parametrize("chunk", [1, 7, 12, 31])
def test_any_chunk_gives_the_same_columns_and_values(chunk):
    plain, got = staged(step=flow_sde_step), staged(step=flow_sde_step, chunk=chunk)
    assert torch.equal(got.columns, plain.columns)
    assert torch.equal(got.rewards, plain.rewards)
    assert torch.equal(got.proxy, plain.proxy)
    assert_same(got.trajectory, plain.trajectory)
    sizes = []
    staged(chunk=chunk, reward=lambda x, p: sizes.append(len(p)) or reward(x, p))
    assert max(sizes) <= chunk
    assert sum(sizes) == G * N + G * 2 * KEEP


def test_one_prompts_seeds_change_no_other_prompts_rows():
    plain, seeds = staged(), SEEDS.clone()
    seeds[1] = sample_seeds(9, 9, [1], N)[0]
    got = staged(seeds=seeds)
    for row in (0, 2):
        assert torch.equal(got.rewards[row], plain.rewards[row])
        assert torch.equal(got.trajectory.x_0[4 * row : 4 * row + 4], plain.trajectory.x_0[4 * row : 4 * row + 4])
    assert not torch.equal(got.proxy[1], plain.proxy[1])


def test_a_missing_reward_of_either_stage_stops_nothing():
    calls = []

    def flaky(images, prompts):
        calls.append(len(prompts))
        r = reward(images, prompts)
        r[:8] = NAN
        return r

    got = staged(reward=flaky)
    assert got.proxy.isnan().sum() == got.rewards.isnan().sum() == 8
    assert got.columns[0].tolist()[1:3] == [0, 1]  # two finite of the first prompt, then the lowest columns
    assert {got.columns[0, 0].item(), got.columns[0, 3].item()} == {8, 9}


def test_draft_rewards_are_the_first_stage():
    def score(x, rows):
        return reward(x, [PROMPTS[i] for i in rows.tolist()])

    got = draft_rewards(velocity, DRAFT_PARAMS, COND, SEEDS, score, times=DRAFT_TIMES, shape=SHAPE, chunk=7)
    assert torch.equal(got, staged().proxy)
    with refuses("seeds", "(3,)"):
        draft_rewards(velocity, {}, COND, SEEDS[:, 0], score, times=TIMES, shape=SHAPE)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seeds": SEEDS[:2]}, ("cond['text']", "2")),
        ({"cond": {"text": torch.zeros(30, 1)}}, ("cond['text']", "3", "(30, 1)")),
        ({"prompts": ["a", "b"]}, ("prompts", "3 strings")),
        ({"prompts": "abc"}, ("prompts", "3 strings")),
        ({"keep": 6}, ("keep=6", "12", "10")),
        ({"keep": 0}, ("keep", "0")),
        ({"chunk": 0}, ("chunk", "0")),
        ({"seeds": SEEDS.flatten()}, ("seeds", "(30,)")),
        ({"seeds": SEEDS.double()}, ("seeds", "integers")),
        ({"seeds": SEEDS[:, :0]}, ("empty", "(3, 0)")),
        ({"times": TIMES.flip(0)}, ("times",)),
        ({"draft_times": TIMES[:1]}, ("times",)),
        ({"step": [flow_sde_step] * 4}, ("4 kernels", "5")),
    ],
)
def test_what_is_wrong_is_refused_before_the_first_sample(changed, said):
    def never(*_):
        raise AssertionError("sampled")

    with refuses(*said):
        staged(never, **{"velocity": never, **changed})


@pytest.mark.parametrize("chunk", [None, 1, 2, 7])
def test_an_image_the_reward_fails_for_is_a_missing_one_in_any_chunk(chunk):
    how = {"times": TIMES, "shape": SHAPE, "chunk": chunk}
    plain = draft_rewards(velocity, PARAMS, COND, SEEDS, lambda x, rows: x.sum((1, 2)), **how)
    limit = float(plain.median())

    def fails(images, prompts):
        if bool((images.sum((1, 2)) > limit).any()):
            raise RuntimeError("engine died")
        return images.sum((1, 2))

    def never(images, prompts):
        raise RuntimeError("engine died")

    def scored(reward):
        return lambda x, rows: score_images(reward, x, ["p"] * len(x))

    found = draft_rewards(velocity, PARAMS, COND, SEEDS, scored(fails), **how)
    assert torch.equal(torch.isnan(found), plain > limit)
    assert torch.equal(found[plain <= limit], plain[plain <= limit])
    with refuses("raised for all", "engine died"):
        draft_rewards(velocity, PARAMS, COND, SEEDS, scored(never), **how)


def test_decode_and_reward_may_write_into_what_they_are_given():
    wrote = staged(reward=lambda images, prompts: reward(images, prompts).clone() + 0 * images.mul_(0).sum())
    assert torch.equal(wrote.trajectory.x_0, staged().trajectory.x_0)
    clamped = staged(decode=lambda x: x.clamp_(-0.1, 0.1))
    assert float(clamped.trajectory.x_0.abs().max()) > 0.1


def test_a_reward_of_another_shape_is_refused():
    for bad in (lambda x, p: x, lambda x, p: torch.zeros(len(p), dtype=torch.int64), lambda x, p: [0.0] * len(p)):
        with refuses("reward", "(30,)"):
            staged(reward=bad)


# ---- extras -----------------------------------------------------------------------------------------------------------


@given(
    st.floats(0, 50),
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.integers(1, 8),
    st.integers(0, 80),
)
def test_the_affordable_pool_is_the_largest_that_fits(budget, draft, policy, keep, more):
    most = 2 * keep + more
    n = affordable_pool(budget, draft=draft, policy=policy, keep=keep, most=most)
    fitting = [m for m in range(2 * keep, most + 1) if m * draft + 2 * keep * policy <= budget + 1e-8 * draft]
    assert n == max(fitting, default=2 * keep)


def test_bad_budgets_are_refused():
    good = {"draft": 0.1, "policy": 0.2, "keep": 2, "most": 8}
    for name, value in {"draft": 0, "policy": -1, "keep": 0, "most": 3}.items():
        with refuses(name, value):
            affordable_pool(1.0, **{**good, name: value})
    assert affordable_pool(1e308, draft=1e-300, policy=0, keep=1, most=96) == 96
    with refuses("budget", "nan"):
        affordable_pool(math.nan, **good)


def tenfold(log):
    def render(rows):
        log.append(rows)
        return torch.tensor([10.0 * r for r in rows])

    return render


def test_the_cache_renders_what_it_does_not_know_once():
    cache, log = RewardCache(capacity=10), []
    assert cache(["a", "b", "a"], [1, 1, 1], version=0, render=tenfold(log)).tolist() == [0, 10, 0]
    assert log == [[0, 1]]
    assert cache(["b", "a"], torch.tensor([1, 1]), version=0, render=None).tolist() == [10, 0]
    assert (cache.hits, cache.misses) == (3, 2)
    assert cache(["x", "a", "A"], [1, 1, 1], version=0, render=tenfold(log)).tolist() == [0, 0, 20]
    assert log[1:] == [[0, 2]]


def test_control_another_policy_version_is_another_reward():
    cache, log = RewardCache(capacity=10), []
    for version in (0, 1, "digest", 0):
        cache(["a"], [1], version=version, render=tenfold(log))
    assert len(log) == 3


def test_the_cache_forgets_the_oldest_and_keeps_no_nan():
    cache, log = RewardCache(capacity=2), []
    cache(["a", "b"], [0, 0], version=0, render=tenfold(log))
    cache(["a"], [0], version=0, render=None)
    cache(["c"], [0], version=0, render=tenfold(log))
    assert {key[0] for key in cache.kept} == {"a", "c"}
    assert torch.isnan(cache(["d"], [0], version=0, render=lambda rows: torch.tensor([math.nan])))
    assert {key[0] for key in cache.kept} == {"a", "c"}


def test_bad_calls_of_the_cache_are_refused():
    cache = RewardCache(capacity=2)
    with refuses("capacity", 0):
        RewardCache(capacity=0)
    for prompts, numbers, version in ((["a"], [0, 1], 0), ("a", [0], 0), (["a"], [0], None), (["a"], [0], [1])):
        with refuses("version", repr(version)):
            cache(prompts, numbers, version=version, render=tenfold([]))
    with refuses("render is None", "'a'"):
        cache(["a"], [0], version=0, render=None)
    with refuses("(1,)", "(2,)"):
        cache(["a"], [0], version=0, render=lambda rows: torch.zeros(2))
