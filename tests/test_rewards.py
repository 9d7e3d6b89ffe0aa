"""Rewards: hand-computed values, independence of rows, refusals, missing scores; then the real OCR engine."""

import io
import math
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffrl.rewards import (
    TextReward,
    WeightedSum,
    edit_distance,
    exact_match,
    jpeg_compressibility,
    jpeg_incompressibility,
    ocr,
    quoted,
    rapid_ocr,
    tesseract_ocr,
    text_similarity,
    weighted_sum,
)

NAN = float("nan")


def fake_engine(pictures: np.ndarray) -> list[str]:
    """Reads the number in the first pixel: red is the tens' digit, green the ones'; blue 255: not readable."""
    if (pictures[:, 0, 0, 2] == 255).any():
        raise RuntimeError("cannot take this picture")
    return [f"{p[0, 0, 0]}{p[0, 0, 1]}" for p in pictures]


def spelled(*numbers: str) -> torch.Tensor:
    """Pictures that `fake_engine` reads as these numbers; "x": one it cannot take."""
    images = torch.zeros(len(numbers), 4, 5, 3, dtype=torch.uint8)
    for image, number in zip(images, numbers):
        image[0, 0] = torch.tensor([0, 0, 255] if number == "x" else [int(number[0]), int(number[1]), 0])
    return images


def noise_images(count: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count, *shape, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@pytest.fixture(scope="module")
def real():
    return ocr(threads=1)


@pytest.fixture(scope="module")
def written():
    """Pictures of some words and numbers, 40 x 96, and what they say."""
    from PIL import Image, ImageDraw, ImageFont

    texts = ["42", "07", "Open", "SALE", "1999", "diffrl"]
    font = ImageFont.load_default(28)
    images = []
    for text in texts:
        image = Image.new("RGB", (96, 40), "white")
        ImageDraw.Draw(image).text((48, 20), text, font=font, fill="black", anchor="mm")
        images.append(torch.from_numpy(np.array(image)))
    return torch.stack(images), texts


# --- the pure parts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ('a sign "Hello World" here', "Hello World"),
        ('"a" and "b"', "a"),
        ("nothing", None),
        ('half "open', None),
        ('""', ""),
    ],
)
def test_quoted_is_the_first_quoted_part(prompt, expected):
    assert quoted(prompt) == expected


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        ("", "", 0),
        ("", "abc", 3),
        ("abc", "", 3),
        ("kitten", "sitting", 3),
        ("flaw", "lawn", 2),
        ("42", "24", 2),
        ("7", "1", 1),
    ],
)
def test_edit_distance_by_hand(a, b, distance):
    assert edit_distance(a, b) == distance


def recursive_distance(a: str, b: str) -> int:
    """The definition, as it stands."""
    if not a or not b:
        return len(a) + len(b)
    return min(
        recursive_distance(a[1:], b) + 1,
        recursive_distance(a, b[1:]) + 1,
        recursive_distance(a[1:], b[1:]) + (a[0] != b[0]),
    )


words = st.text("ab1", max_size=5)


@settings(max_examples=40, deadline=None)
@given(words, words)
def test_edit_distance_is_its_recursive_definition_and_a_metric(a, b):
    assert edit_distance(a, b) == recursive_distance(a, b) == edit_distance(b, a)
    assert (edit_distance(a, b) == 0) == (a == b)


@pytest.mark.parametrize(
    ("reading", "target", "value"),
    [
        ("42", "42", 1.0),
        ("4", "42", 0.5),
        ("47", "42", 0.5),
        ("24", "42", 0.0),
        ("", "42", 0.0),
        ("No. 42!", "42", 1.0),  # the target occurs
        ("much too long", "42", 0.0),  # never below 0
        ("HELLO world", "Hello World", 1.0),  # case
        (" h e l l o", "hello", 1.0),  # spaces in what was read
        ("helo", "h e l l o", 0.8),  # and in the target: n = 5
        (None, "42", NAN),
        ("42", None, NAN),
        ("42", " ", NAN),
    ],
)
def test_text_similarity_by_hand(reading, target, value):
    assert text_similarity(reading, target) == pytest.approx(value, nan_ok=True)


@settings(max_examples=60, deadline=None)
@given(st.text("aB 1", max_size=6), st.text("aB 1", max_size=6))
def test_text_similarity_is_between_zero_and_one(reading, target):
    value = text_similarity(reading, target)
    assert math.isnan(value) if not target.strip() else 0 <= value <= 1
    assert text_similarity(reading.upper(), target) == pytest.approx(value, nan_ok=True)


def test_exact_match_is_stricter_than_the_reward():
    prompts = ['"42"', '"42"', '"Ab c"', "none", '"42"']
    values = exact_match(["42", "a 42", "aBC", "42", None], prompts)
    torch.testing.assert_close(values, torch.tensor([1.0, 0.0, 1.0, NAN, NAN]), equal_nan=True)
    assert values.dtype == torch.float32
    with pytest.raises(ValueError, match="one reading per prompt"):
        exact_match(["42"], prompts)
    with pytest.raises(ValueError, match="one reading per prompt"):
        exact_match("42", ["1", "2"])


# --- the OCR reward with an engine made up for the test ---------------------------------------------------------------


def test_ocr_values_by_hand():
    reward = ocr(engine=fake_engine)
    images = spelled("42", "47", "24", "42")
    assert reward.read(images) == ["42", "47", "24", "42"]
    values = reward(images, ['number "42"', 'number "42"', 'number "42"', "number 42"])
    torch.testing.assert_close(values, torch.tensor([1.0, 0.5, 0.0, NAN]), equal_nan=True)
    assert values.dtype == torch.float32
    assert not values.requires_grad


def test_ocr_takes_another_target():
    reward = ocr(engine=fake_engine, target=lambda prompt: prompt.split()[-1])
    assert reward(spelled("42"), ["say 42"]).tolist() == [1.0]


def test_a_picture_that_cannot_be_read_costs_nobody_else_a_score():
    reward = ocr(engine=fake_engine)
    assert reward.read(spelled("42", "x", "17")) == ["42", None, "17"]
    values = reward(spelled("42", "x", "17"), ['"42"'] * 3)
    torch.testing.assert_close(values, torch.tensor([1.0, NAN, 0.0]), equal_nan=True)


def test_pictures_without_pixels_have_no_score():
    values = ocr(engine=fake_engine)(torch.zeros(2, 0, 5, 3, dtype=torch.uint8), ['"42"'] * 2)
    assert values.isnan().tolist() == [True, True]
    assert ocr(engine=fake_engine)(torch.zeros(0, 4, 5, 3, dtype=torch.uint8), []).shape == (0,)


def test_an_engine_that_loses_a_picture_is_not_believed():
    def short(pictures):
        return ["42"] * max(1, len(pictures) - 1)

    # Two texts for three pictures cannot be assigned; one by one they can.
    assert ocr(engine=short).read(spelled("42", "42", "42")) == ["42"] * 3
    assert ocr(engine=lambda pictures: []).read(spelled("42")) == [None]


rows = st.lists(st.sampled_from(["42", "47", "17", "x"]), min_size=1, max_size=6)


@settings(max_examples=30, deadline=None)
@given(rows, st.randoms(use_true_random=False))
def test_ocr_rows_are_independent(numbers, random):
    reward = ocr(engine=fake_engine)
    prompts = [random.choice(['"42"', '"17"', "none"]) for _ in numbers]
    images = spelled(*numbers)
    whole = reward(images, prompts)
    order = random.sample(range(len(numbers)), len(numbers))
    permuted = reward(images[order], [prompts[i] for i in order])
    assert torch.equal(permuted.nan_to_num(-1), whole[order].nan_to_num(-1))
    part = random.randint(1, len(numbers))
    assert torch.equal(reward(images[:part], prompts[:part]).nan_to_num(-1), whole[:part].nan_to_num(-1))


good = torch.zeros(2, 4, 5, 3, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("images", "prompts", "message"),
    [
        (good, ["a"], r"2 images \(2, 4, 5, 3\) but 1 prompts"),
        (good, "ab", "sequence of strings, got 'ab'"),
        (good, ["a", 1], r"sequence of strings, got \['a', 1\]"),
        (good.float(), ["a", "b"], r"got torch.float32 \(2, 4, 5, 3\)"),
        (good[0], ["a", "b"], r"got torch.uint8 \(4, 5, 3\)"),
        (good[..., :2], ["a", "b"], r"got torch.uint8 \(2, 4, 5, 2\)"),
        (good.numpy(), ["a", "b"], "got ndarray"),
    ],
)
def test_malformed_calls_are_refused(images, prompts, message):
    for reward in (ocr(engine=fake_engine), jpeg_compressibility(), jpeg_incompressibility()):
        with pytest.raises(ValueError, match=message):
            reward(images, prompts)


def test_ocr_refuses_videos():
    with pytest.raises(ValueError, match=r"\(b h w 3\), got torch.uint8 \(2, 3, 4, 5, 3\)"):
        ocr(engine=fake_engine)(torch.zeros(2, 3, 4, 5, 3, dtype=torch.uint8), ["a", "b"])


@pytest.mark.parametrize("options", [{"threads": 0}, {"batch": 1}])
def test_rapid_ocr_refuses_bad_options(options):
    with pytest.raises(ValueError, match="threads >= 1 and batch >= 2"):
        rapid_ocr(**options)


# --- JPEG -------------------------------------------------------------------------------------------------------------


def pillow_kilobytes(image: torch.Tensor, quality: int) -> float:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image.numpy()).save(buffer, format="JPEG", quality=quality)
    return len(buffer.getvalue()) / 1000


@pytest.mark.parametrize("quality", [95, 30])
def test_jpeg_is_pillows_size(quality):
    images = noise_images(3, 24, 32)
    expected = torch.tensor([pillow_kilobytes(image, quality) for image in images])
    prompts = [""] * 3
    torch.testing.assert_close(jpeg_compressibility(quality=quality)(images, prompts), -expected)
    torch.testing.assert_close(jpeg_incompressibility(quality=quality)(images, prompts), expected)


def test_jpeg_of_a_video_is_the_mean_over_its_frames():
    videos = noise_images(2, 3, 16, 24)
    expected = [sum(pillow_kilobytes(frame, 95) for frame in video) / 3 for video in videos]
    torch.testing.assert_close(jpeg_incompressibility()(videos, ["", ""]), torch.tensor(expected))


def test_jpeg_prefers_flat_pictures_and_rows_are_independent():
    images = torch.cat([torch.full((1, 24, 32, 3), 128, dtype=torch.uint8), noise_images(3, 24, 32)])
    values = jpeg_compressibility()(images, [""] * 4)
    assert values.argmax() == 0
    order = [2, 0, 3, 1]
    assert torch.equal(jpeg_compressibility()(images[order], [""] * 4), values[order])
    assert torch.equal(jpeg_compressibility()(images[1:2], [""]), values[1:2])


def test_jpeg_of_nothing_is_missing():
    for shape in [(2, 0, 5, 3), (2, 0, 4, 5, 3)]:
        assert jpeg_compressibility()(torch.zeros(shape, dtype=torch.uint8), ["", ""]).isnan().all()


@pytest.mark.parametrize("quality", [0, 101])
def test_jpeg_refuses_bad_quality(quality):
    with pytest.raises(ValueError, match=f"quality={quality}"):
        jpeg_compressibility(quality=quality)


# --- Tesseract and missing packages -----------------------------------------------------------------------------------


def test_tesseract_has_one_api_object_per_thread(monkeypatch):
    made = []

    class Api:
        def __init__(self, *, psm, lang):
            assert (psm, lang) == (7, "eng")
            made.append(threading.get_ident())

        def SetImage(self, image):
            self.size = image.size

        def GetUTF8Text(self):
            assert made[-1] == threading.get_ident()
            return "{} x {}\n".format(*self.size)

    monkeypatch.setitem(sys.modules, "tesserocr", types.SimpleNamespace(PyTessBaseAPI=Api))
    reward = tesseract_ocr()
    assert isinstance(reward, TextReward)
    # 24 x 32 is enlarged threefold, with a margin of 10 all around.
    assert reward.read(noise_images(2, 24, 32)) == ["116 x 92\n"] * 2
    assert reward(noise_images(1, 24, 32), ['"116x92"']).tolist() == [1.0]
    thread = threading.Thread(target=reward.read, args=(noise_images(1, 24, 32),))
    thread.start()
    thread.join()
    assert len(made) == len(set(made)) == 2


def test_tesseract_refuses_bad_psm():
    with pytest.raises(ValueError, match="psm=14"):
        tesseract_ocr(psm=14)


@pytest.mark.parametrize(
    ("module", "factory"),
    [("rapidocr", ocr), ("onnxruntime", ocr), ("tesserocr", tesseract_ocr), ("PIL", jpeg_compressibility)],
)
def test_a_missing_package_is_named_with_what_to_install(monkeypatch, module, factory):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install 'diffrl\[demo") as caught:
        factory()
    assert "\n" not in str(caught.value)


def test_importing_rewards_imports_no_scorer():
    heavy = ["PIL", "cv2", "rapidocr", "onnxruntime", "tesserocr"]
    code = f"import sys, diffrl.rewards; print([name for name in {heavy} if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"


# --- the real engine --------------------------------------------------------------------------------------------------


def test_real_ocr_reads_what_is_written(real, written):
    images, texts = written
    assert real.read(images) == texts
    assert real(images, [f'it says "{text.lower()}"' for text in texts]).tolist() == [1.0] * len(texts)


def test_real_ocr_does_not_read_a_wrong_text_as_right(real, written):
    """Negative control of the test above: the same pictures, each with its neighbour's text."""
    images, texts = written
    wrong = [*texts[1:], texts[0]]
    values = real(images, [f'it says "{text}"' for text in wrong])
    assert (values < 0.6).all()
    assert exact_match(real.read(images), [f'"{text}"' for text in wrong]).sum() == 0


def test_real_ocr_rows_do_not_depend_on_their_neighbours(real, written):
    images, _ = written
    images = torch.cat([images, noise_images(5, 40, 96)])
    readings = real.read(images)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).tolist()
    assert real.read(images[order]) == [readings[i] for i in order]
    for size in (1, 2, 3, 9):
        assert real.read(images[:size]) == readings[:size]


def test_the_networks_outputs_are_equal_to_the_bit(monkeypatch, written):
    """Not only the text: what the network says of a picture depends neither on the other pictures nor on its place."""
    from rapidocr.inference_engine.onnxruntime.main import OrtInferSession

    outputs: dict[bytes, np.ndarray] = {}
    batches = []
    original = OrtInferSession.__call__

    def recording(self, batch):
        result = original(self, batch)
        batches.append(len(batch))
        for row, values in zip(batch, result):
            assert np.array_equal(outputs.setdefault(row.tobytes(), values.copy()), values)
        return result

    monkeypatch.setattr(OrtInferSession, "__call__", recording)
    images, _ = written
    images = torch.cat([images, noise_images(5, 40, 96)])
    read = rapid_ocr(threads=1, batch=4)
    for size in (11, 1, 2, 3):
        read(images[:size].numpy())
        read(images[:size].flip(0).numpy())
    assert len(outputs) == len(images)
    # Negative control: a batch of one really is another computation; `rapid_ocr` never asks for one.
    assert min(batches) == 2
    assert {2, 3, 4} <= set(batches)


def test_real_ocr_is_silent(real, written, capfd):
    rapid_ocr(threads=1)
    real.read(written[0])
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("quality", [50.5, "50", None, True])
def test_a_jpeg_quality_that_pillow_would_not_take_is_refused(quality):
    for make in (jpeg_compressibility, jpeg_incompressibility):
        with pytest.raises(ValueError, match="quality"):
            make(quality=quality)


def test_rewards_refuse_a_call_without_prompts():
    images = torch.zeros(1, 8, 8, 3, dtype=torch.uint8)
    for reward in (jpeg_compressibility(), ocr(engine=lambda pictures: [""] * len(pictures))):
        with pytest.raises(ValueError, match="prompts"):
            reward(images, None)


# ---- several rewards


@st.composite
def several(draw):
    """(values " b j" with missing ones, weights by name, the rewards by name in their order)."""
    j, b = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    number = st.one_of(st.floats(-10, 10), st.floats(-10, 10), st.sampled_from([NAN, math.inf, -math.inf]))
    values = torch.tensor([[draw(number) for _ in range(j)] for _ in range(b)], dtype=torch.float64)
    names = draw(st.permutations(["a", "b", "c", "d"]))[:j]
    weights = {name: draw(st.sampled_from([-2.0, 0.0, 0.5, 1.0])) for name in reversed(names)}
    columns = {
        name: (lambda images, prompts, i=i: values[images[:, 0, 0, 0].long(), i]) for i, name in enumerate(names)
    }
    return values, weights, columns


def numbered(b: int) -> torch.Tensor:
    """b pictures, each filled with the number of its row."""
    return torch.arange(b, dtype=torch.uint8)[:, None, None, None].expand(b, 2, 2, 3)


@given(several())
def test_a_weighted_sum_is_the_sum_over_samples_that_have_every_part(given_):
    values, weights, columns = given_
    reward = weighted_sum(columns, weights)
    found = reward(numbered(len(values)), ["x"] * len(values))
    assert found.dtype == torch.float32
    for row, total in zip(values.tolist(), found.tolist()):
        if all(math.isfinite(v) for v in row):
            assert total == pytest.approx(sum(weights[n] * v for n, v in zip(columns, row)), abs=1e-4)
        else:
            assert math.isnan(total)
    torch.testing.assert_close(reward.total(values.float()), found, rtol=0, atol=0, equal_nan=True)


def test_weights_are_one_each_by_default_and_belong_to_their_names():
    columns = {"x": lambda i, p: i[:, 0, 0, 0] + 1, "y": lambda i, p: 10 * i[:, 0, 0, 0] + 10}
    images = numbered(2)
    assert weighted_sum(columns)(images, ["a", "b"]).tolist() == [11.0, 22.0]
    assert weighted_sum(columns, {"y": 1, "x": -1})(images, ["a", "b"]).tolist() == [9.0, 18.0]
    reward = weighted_sum(columns)
    assert isinstance(reward, WeightedSum)
    columns["z"] = columns["x"]
    assert list(reward.rewards) == ["x", "y"]


def test_a_sum_sees_prompts_takes_lists_and_is_single_precision():
    seen = []
    rewards = {
        "list": lambda images, prompts: [len(p) for p in prompts],
        "wide": lambda images, prompts: seen.append(prompts) or torch.full((2,), 0.1, dtype=torch.float64),
    }
    assert torch.equal(weighted_sum(rewards)(numbered(2), ("a", "abc")), torch.tensor([1.1, 3.1]))
    assert seen == [["a", "abc"]]
    weight = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    found = weighted_sum({"one": lambda i, p: 2 * weight})(numbered(2), ["a", "b"])
    assert (found.dtype, found.device.type, found.requires_grad) == (torch.float32, "cpu", False)


@pytest.mark.parametrize(
    ("rewards", "weights", "message"),
    [
        ({}, None, r"non-empty mapping.*\{\}"),
        ([len], None, "mapping"),
        ({"a": len}, {"b": 1.0}, r"weights \['b'\].*rewards \['a'\]"),
        ({"a": len, "b": len}, {"a": 1.0}, r"weights \['a'\].*rewards \['a', 'b'\]"),
        ({"a": len}, {}, r"weights \[\].*\['a'\]"),
        ({"a": len}, {"a": NAN}, r"weights\['a'\].*nan"),
        ({"a": len}, {"a": "much"}, r"weights\['a'\].*'much'"),
    ],
)
def test_rewards_and_weights_that_do_not_fit_are_refused(rewards, weights, message):
    with pytest.raises(ValueError, match=message):
        weighted_sum(rewards, weights)


def test_control_a_missing_part_is_not_a_zero():
    reward = weighted_sum({"there": lambda i, p: torch.ones(2), "gone": lambda i, p: torch.tensor([NAN, 0.0])})
    assert torch.isnan(reward(numbered(2), ["a", "b"])).tolist() == [True, False]
