"""The refusals and dtype rules that every other module shares."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import F64, normal, refuses
from strategies import latent_shapes, seeds, time_pairs

from diffrl.checks import (
    column,
    promote,
    require_batch,
    require_call,
    require_cond,
    require_count,
    require_images,
    require_number,
    require_rows,
    require_same_keys,
    require_same_shape,
    require_tensors,
    shapes,
    time_pair,
    time_rows,
)
from diffrl.numbers import nearest

DTYPES = (torch.bfloat16, torch.float16, torch.float32, F64)


def test_shapes_prints_names_shapes_and_values():
    assert shapes(a=torch.zeros(2, 3), b=1.5, c=None) == "a (2, 3), b 1.5, c None"


def test_tensor_refusals_name_what_is_wrong():
    x = torch.zeros(2, 3)
    assert require_batch(a=x, b=x) == 2
    require_tensors(a=x)
    require_rows(2, a=torch.zeros(2))
    with refuses("a must be a tensor", "[1]"):
        require_tensors(a=[1])
    with refuses("a must be floating point", "bool"):
        require_tensors(a=x.bool())
    with refuses("a (2, 3)", "b (1, 3)"):
        require_same_shape(a=x, b=x[:1])
    with refuses("c must have shape (2,)", "(2, 3)"):
        require_rows(2, a=x[:, 0], c=x)
    with refuses("a must have shape (2,)", "(3,)"):
        require_rows(2, a=torch.zeros(3))
    with refuses("batch axis", "a ()"):
        require_batch(a=torch.tensor(1.0))


@given(st.floats(-5, 5), st.floats(-5, 5))
def test_require_number_is_membership_in_the_interval(value, low):
    if value >= low:
        assert require_number("x", value, low=low) == value
    else:
        with refuses("x must be in", value, low):
            require_number("x", value, low=low)
    if value > low:
        assert require_number("x", value, low=low, open_low=True) == value
    else:
        with refuses("x must be in (", value):
            require_number("x", value, low=low, open_low=True)


def test_require_number_and_count_refuse_what_is_none():
    for bad in (math.nan, math.inf, "one", None, torch.zeros(2)):
        with refuses("x"):
            require_number("x", bad)
    assert require_number("x", torch.tensor(0.5)) == 0.5
    with refuses("[0, 1]", "2"):
        require_number("x", 2, low=0, high=1)
    assert require_count("n", torch.tensor(3)) == 3
    for bad in (0, -1, 1.0, True, "2", None):
        with refuses("n must be an integer >= 1", repr(bad)):
            require_count("n", bad)
    assert require_count("n", 0, low=0) == 0


@given(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))
def test_promote_is_the_common_dtype_and_never_half(dtypes):
    out = promote(*(torch.ones(2, dtype=d) for d in dtypes))
    assert {x.dtype for x in out} == {F64 if F64 in dtypes else torch.float32}


@given(latent_shapes(), seeds, st.data())
def test_times_become_rows_and_columns(shape, seed, data):
    x = normal(*shape, seed=seed)
    t, t_next = data.draw(time_pairs(len(x)))
    now, then = time_pair(t, t_next, x)
    assert torch.equal(now, t)
    assert torch.equal(then, t_next)
    assert torch.equal(column(t, x) * x, torch.stack([s * row for s, row in zip(t, x)]))
    assert time_rows("t", 0.3, x).tolist() == [0.3] * len(x)
    assert time_rows("t", 1, x.float()).dtype == torch.float32


def test_time_refusals_print_the_times():
    x = torch.zeros(2, 3)
    with refuses("t_next must be < t", "0.25", "0.5"):
        time_pair(0.25, 0.5, x)
    with refuses("t_next must be < t"):
        time_pair(0.5, 0.5, x)
    for bad in (1.5, -0.5):
        with refuses("now must be in [0, 1]", bad):
            time_rows("now", bad, x)
    with refuses("now", "(2,)", "(1, 2)"):
        time_rows("now", torch.zeros(1, 2), x)
    with refuses("now must be a number", "None"):
        time_rows("now", None, x)


def test_keys_and_shapes_of_mappings():
    a = {"x": torch.zeros(2), "y": torch.zeros(3)}
    require_same_keys(a=a, b=dict(reversed(a.items())))
    with refuses("only in a ['y']", "only in b ['z']"):
        require_same_keys(a=a, b={"x": a["x"], "z": a["y"]})
    for extra in ((a, a | {"z": a["y"]}), (a | {"z": a["y"]}, a)):
        with refuses("['z']"):
            require_same_keys(a=extra[0], b=extra[1])
    with refuses("'y'", "a (3,)", "b (4,)"):
        require_same_keys(a=a, b={"x": a["x"], "y": torch.zeros(4)})


def test_negative_control_a_refusal_that_names_nothing_is_noticed():
    with pytest.raises(AssertionError, match="does not mention"), refuses("scale"):
        raise ValueError("bad input")
    with pytest.raises(pytest.fail.Exception), refuses("scale"):
        require_number("scale", 1.0)


@pytest.mark.parametrize("value", [torch.tensor(2.0), torch.ones(2), 2.0, "2", None, True])
def test_require_count_refuses_what_is_no_count_whatever_its_type(value):
    with pytest.raises(ValueError, match="n must be an integer >= 1"):
        require_count("n", value)


def test_require_number_says_whether_infinity_is_a_number():
    assert require_number("x", math.inf, low=0, infinite=True) == math.inf
    with pytest.raises(ValueError, match=r"x must be in \[0, inf\), got inf"):
        require_number("x", math.inf, low=0)
    with pytest.raises(ValueError, match=r"\[0, inf\], got nan"):
        require_number("x", math.nan, low=0, infinite=True)


def test_require_cond():
    require_cond({"y": torch.ones(2, 3)}, 2)
    require_cond({}, 2)
    for cond in (None, {"y": [1, 2]}, {"y": torch.ones(())}, {"y": torch.ones(3)}):
        with pytest.raises(ValueError, match="cond"):
            require_cond(cond, 2)


def test_require_images_and_calls():
    picture, video = torch.zeros(2, 4, 5, 3, dtype=torch.uint8), torch.zeros(2, 1, 4, 5, 3, dtype=torch.uint8)
    require_images("r", picture, ranks=(4,))
    require_images("r", video, ranks=(4, 5))
    require_call("r", video, ("a", "b"))
    require_call("r", picture[:0], [])
    for images, ranks, axes, got in (
        (video, (4,), "(b h w 3)", "torch.uint8 (2, 1, 4, 5, 3)"),
        (picture, (5,), "(b f h w 3)", "torch.uint8 (2, 4, 5, 3)"),
        (picture[0], (4, 5), "(b h w 3 or b f h w 3)", "torch.uint8 (4, 5, 3)"),
        (picture.float(), (4,), "(b h w 3)", "torch.float32 (2, 4, 5, 3)"),
        (picture[..., :1], (4,), "(b h w 3)", "torch.uint8 (2, 4, 5, 1)"),
        ([1], (4,), "(b h w 3)", "list"),
    ):
        with refuses("r: images must be", axes, got):
            require_images("r", images, ranks=ranks)
    for prompts in (None, 3, "ab", b"ab", ["a", None], iter(["a", "b"])):
        with refuses("r: prompts must be a sequence of strings"):
            require_call("r", picture, prompts)
    with refuses("r: 2 images (2, 4, 5, 3) but 3 prompts"):
        require_call("r", picture, ["a", "b", "c"])
    with refuses("(b h w 3)"):
        require_call("r", video, ["a", "b"], ranks=(4,))


def test_the_nearest_word_in_any_case_with_either_dash_and_none_far_away():
    known = ("art", "flow_grpo", "flow_grpo_fast", "OCR")
    for word, answer in (
        ("rat", "art"),
        ("flow-grpo", "flow_grpo"),
        ("Flow_GRPO_Fats", "flow_grpo_fast"),
        ("ocr", "OCR"),
    ):
        assert nearest(word, known) == f" (did you mean {answer!r}?)"
    assert nearest("xyzzy", known) == nearest("art", ()) == ""
