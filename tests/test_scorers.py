"""Model-based rewards on tiny random models: values from their embeddings, rows, refusals, missing scores, weights."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tiny_scorers
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from diffrl import rewards, scorer_weights, scorers
from diffrl.reward_rows import report, score_rows
from diffrl.rewards import (
    VIDEO_ALIGN,
    aesthetic,
    clip_score,
    hps_v2,
    image_reward,
    load_aesthetic,
    load_clip_score,
    load_hps_v2,
    load_image_reward,
    load_pick_score,
    pick_score,
    video_reward,
)
from diffrl.scorer_weights import (
    blip_from_image_reward,
    clip_from_open_clip,
    filled,
    image_reward_config,
    read_weights,
    score_head,
    weights_file,
)
from diffrl.scorers import clip_pixels, cropped, letterboxed, pil_pictures

ROOT = Path(__file__).parents[1]
PROMPTS = [
    "a red cat",
    "the dog sleeps",
    "one green house on the river",
    "two birds",
    "a photo of a bird",
    "blue",
    "cat",
]
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def pictures(count: int, height: int = 8, width: int = 8, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, height, width, 3), generator=generator, dtype=torch.uint8)


def by_hand(images: torch.Tensor) -> torch.Tensor:
    """Pixels of images that already have the model's size."""
    x = (images.numpy() / 255 - np.array(MEAN)) / np.array(STD)
    return torch.from_numpy(x).float().permute(0, 3, 1, 2)


@pytest.fixture(scope="module")
def clip():
    return tiny_scorers.clip()


@pytest.fixture(scope="module")
def processor():
    return tiny_scorers.processor()


@pytest.fixture(scope="module")
def blip():
    return tiny_scorers.blip()


@pytest.fixture(scope="module")
def tokenizer(processor):
    return processor.tokenizer


HEAD_12, HEAD_16 = tiny_scorers.head_state(12), tiny_scorers.head_state(16, seed=1)


@pytest.fixture(scope="module")
def every(clip, processor, blip, tokenizer):
    """All factories on their tiny models."""
    return {
        "clip_score": clip_score(clip, processor),
        "pick_score": pick_score(clip, processor),
        "hps_v2": hps_v2(clip, processor),
        "aesthetic": aesthetic(clip, processor, score_head(HEAD_12)),
        "image_reward": image_reward(blip, score_head(HEAD_16), tokenizer),
    }


def embeddings(clip, tokenizer, images, prompts) -> tuple[np.ndarray, np.ndarray]:
    """(image, text) embeddings in float64, unnormalised, one row at a time and tower by tower."""
    image_rows, text_rows = [], []
    clip.eval()
    with torch.no_grad():
        for pixels, prompt in zip(by_hand(images), prompts):
            image_rows.append(clip.visual_projection(clip.vision_model(pixel_values=pixels[None]).pooler_output)[0])
            ids = torch.tensor([tokenizer(prompt)["input_ids"]])
            text_rows.append(clip.text_projection(clip.text_model(input_ids=ids).pooler_output)[0])
    return torch.stack(image_rows).double().numpy(), torch.stack(text_rows).double().numpy()


def cosine_matrix(clip, tokenizer, images, prompts) -> np.ndarray:
    """cos of every image (rows) with every prompt (columns)."""
    i, t = embeddings(clip, tokenizer, images, prompts)
    return (i / np.linalg.norm(i, axis=1, keepdims=True)) @ (t / np.linalg.norm(t, axis=1, keepdims=True)).T


def mlp(state, x: np.ndarray) -> np.ndarray:
    for place in (0, 2, 4, 6, 7):
        x = x @ state[f"layers.{place}.weight"].double().numpy().T + state[f"layers.{place}.bias"].double().numpy()
    return x[:, 0]


# ---- values


def test_clip_pick_and_hps_are_the_diagonal_of_the_cosines(clip, tokenizer, every):
    images = pictures(7)
    cosines = cosine_matrix(clip, tokenizer, images, PROMPTS)
    own = np.diag(cosines)
    assert own.min() < -0.05  # some are clipped
    assert own.max() > 0.05
    np.testing.assert_allclose(every["clip_score"](images, PROMPTS), 100 * np.maximum(own, 0), atol=2e-4)
    np.testing.assert_allclose(every["hps_v2"](images, PROMPTS), own, atol=2e-6)
    scale = float(clip.logit_scale.detach().double().exp())
    assert abs(scale - 1) > 0.05
    np.testing.assert_allclose(every["pick_score"](images, PROMPTS), scale * own, atol=4e-6)


def test_control_column_0_of_the_cosines_is_another_reward(clip, tokenizer):
    """Scoring every image against the first prompt, or prompts in another order, would have been noticed."""
    cosines = cosine_matrix(clip, tokenizer, pictures(7), PROMPTS)
    own = np.diag(cosines)
    assert np.abs(cosines[1:, 0] - own[1:]).min() > 1e-3
    assert np.abs(np.roll(own, 1) - own).min() > 1e-3


def test_aesthetic_is_the_head_of_the_unit_embedding(clip, tokenizer, every):
    images = pictures(7)
    embedding, _ = embeddings(clip, tokenizer, images, PROMPTS)
    unit = embedding / np.linalg.norm(embedding, axis=1, keepdims=True)
    np.testing.assert_allclose(every["aesthetic"](images, PROMPTS), mlp(HEAD_12, unit), rtol=2e-4, atol=2e-4)
    assert np.abs(mlp(HEAD_12, embedding) - mlp(HEAD_12, unit)).min() > 0.1  # negative control: not of the raw one
    assert torch.equal(every["aesthetic"](images, PROMPTS[::-1]), every["aesthetic"](images, PROMPTS))


def test_image_reward_is_the_head_of_the_first_hidden_state(blip, tokenizer, every):
    images = pictures(7)
    hidden = []
    blip.eval()
    with torch.no_grad():
        for pixels, prompt in zip(by_hand(images), PROMPTS):
            found = blip(input_ids=torch.tensor([tokenizer(prompt)["input_ids"]]), pixel_values=pixels[None])
            hidden.append(found.question_embeds[0, 0])
    raw = mlp(HEAD_16, torch.stack(hidden).double().numpy())
    expected = (raw - 0.16717362830052426) / 1.0333394966054072
    np.testing.assert_allclose(every["image_reward"](images, PROMPTS), expected, rtol=2e-4, atol=2e-3)


def test_image_reward_reads_35_tokens(blip, tokenizer, every):
    long = " ".join(["cat"] * 33 + ["dog", "bird"])  # with <s> and </s>: 37 tokens
    cut, other = " ".join(["cat"] * 33), " ".join(["cat"] * 32 + ["dog"])
    values = image_reward(blip, score_head(HEAD_16), tokenizer)(pictures(1).repeat(3, 1, 1, 1), [long, cut, other])
    assert values[0] == values[1]
    assert values[0] != values[2]


def test_clip_reads_as_many_tokens_as_the_model_holds(every):
    cut = "cat dog bird cat dog bird red blue"  # with <s> and </s>: the 10 that there is room for
    images = pictures(1).repeat(3, 1, 1, 1)
    values = every["hps_v2"](images, [f"{cut} house river", cut, cut.replace("blue", "green")])
    assert values[0] == values[1]
    assert values[0] != values[2]


# ---- pictures


def test_letterboxed_by_hand():
    wide = pictures(1, 3, 8)
    (square,) = letterboxed(wide, 8)
    found = torch.from_numpy(np.array(square))
    assert torch.equal(found[2:5], wide[0])  # 2 rows of black above, 3 below
    assert not found[:2].any()
    assert not found[5:].any()
    tall = torch.full((1, 16, 8, 3), 200, dtype=torch.uint8)
    found = torch.from_numpy(np.array(letterboxed(tall, 8)[0]))
    assert (found[:, 2:6] == 200).all()
    assert not found[:, :2].any()
    assert not found[:, 6:].any()
    thin = torch.full((1, 1, 100, 3), 200, dtype=torch.uint8)
    assert np.array(letterboxed(thin, 8)[0]).any()


def test_cropped_by_hand():
    wide = pictures(1, 8, 13)
    assert torch.equal(torch.from_numpy(np.array(cropped(wide, 8)[0])), wide[0, :, 2:10])  # round(5 / 2) = 2
    halves = torch.cat([torch.zeros(1, 32, 8, 3), torch.full((1, 32, 8, 3), 240)], dim=2).to(torch.uint8)
    found = np.array(cropped(halves, 8)[0])
    assert found.shape == (8, 8, 3)
    assert (found[:, :2] < 20).all()
    assert (found[:, -2:] > 220).all()


def test_pixels_and_pictures_by_hand():
    images = pictures(2, 3, 3)  # three rows, three columns, three channels: nothing to guess from the shape
    assert [np.array(p).tolist() for p in pil_pictures(images)] == images.tolist()
    torch.testing.assert_close(clip_pixels(pil_pictures(images)), by_hand(images))


def test_hps_pads_where_clip_crops(clip, tokenizer, processor):
    wide = pictures(2, 4, 8)
    padded = torch.nn.functional.pad(wide.permute(0, 3, 1, 2), (0, 0, 2, 2)).permute(0, 2, 3, 1).contiguous()
    expected = np.diag(cosine_matrix(clip, tokenizer, padded, PROMPTS[:2])).copy()
    np.testing.assert_allclose(hps_v2(clip, processor, batch=2)(wide, PROMPTS[:2]), expected, atol=2e-6)
    crop = clip_score(clip, processor, batch=2)(wide, PROMPTS[:2]) / 100
    assert (crop - torch.from_numpy(expected).clamp_min(0)).abs().max() > 1e-3  # negative control


# ---- rows


PICTURES = pictures(7, seed=3)


@settings(max_examples=6, phases=[Phase.generate])
@given(st.integers(1, 7), st.randoms(use_true_random=False))
def test_rows_do_not_depend_on_one_another(every, count, random):
    images = PICTURES
    order = random.sample(range(7), count)
    for name, reward in every.items():
        whole = reward(images, PROMPTS)
        assert whole.dtype == torch.float32
        assert not whole.requires_grad
        part = reward(images[order], [PROMPTS[i] for i in order])
        assert torch.equal(part, whole[order]), name  # to the bit


def test_no_images_no_values(every):
    for reward in every.values():
        assert reward(pictures(0), []).shape == (0,)


def test_a_larger_batch_changes_nothing_but_the_last_bits(clip, processor, blip, tokenizer, every):
    images = pictures(7)
    made = {name: getattr(rewards, name)(clip, processor, batch=3) for name in ("clip_score", "pick_score", "hps_v2")}
    made["aesthetic"] = aesthetic(clip, processor, score_head(HEAD_12), batch=3)
    made["image_reward"] = image_reward(blip, score_head(HEAD_16), tokenizer, batch=3)
    for name, reward in made.items():
        one = every[name](images, PROMPTS)
        torch.testing.assert_close(reward(images, PROMPTS), one, rtol=1e-4, atol=1e-4, msg=name)


def test_a_batch_is_one_call_of_the_model(clip, processor):
    sizes = []
    hook = clip.vision_model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["pixel_values"])), with_kwargs=True
    )
    hps_v2(clip, processor, batch=4)(pictures(7), PROMPTS)
    hook.remove()
    assert sizes == [4, 3]


def test_models_are_put_in_eval_mode_and_left_as_they_are(processor, tokenizer):
    clip, blip = tiny_scorers.clip(), tiny_scorers.blip()  # with dropout, in train mode
    head = torch.nn.Sequential(torch.nn.Dropout(0.9), torch.nn.Linear(12, 1))
    before = {name: x.clone() for name, x in clip.state_dict().items()}
    made = [clip_score(clip, processor, batch=2), aesthetic(clip, processor, head, batch=2)]
    made.append(image_reward(blip, score_head(HEAD_16), tokenizer, batch=2))
    for reward in made:
        first = reward(pictures(2), PROMPTS[:2])
        assert all(torch.equal(reward(pictures(2), PROMPTS[:2]), first) for _ in range(3))
    assert all(torch.equal(x, before[name]) for name, x in clip.state_dict().items())
    assert all(p.grad is None for p in clip.parameters())


@pytest.mark.parametrize("name", ["clip_score", "pick_score", "hps_v2", "aesthetic", "image_reward"])
def test_bf16_models_stay_bf16_and_are_normalised_in_float32(processor, tokenizer, every, name):
    images = pictures(7)
    if name == "image_reward":
        reward = image_reward(tiny_scorers.blip().bfloat16(), score_head(HEAD_16), tokenizer, batch=3)
        tolerance = 0.1 * float(every[name](images, PROMPTS).abs().max())
    else:
        clip = tiny_scorers.clip().bfloat16()
        if name == "aesthetic":
            reward, tolerance = aesthetic(clip, processor, score_head(HEAD_12), batch=3), 2.0
        else:
            reward = getattr(rewards, name)(clip, processor, batch=3)
            tolerance = {"clip_score": 4.0, "pick_score": 0.05, "hps_v2": 0.04}[name]
    values = reward(images, PROMPTS)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, every[name](images, PROMPTS), rtol=0, atol=tolerance)
    assert (values.bfloat16().float() != values).any()  # not rounded to bf16 at the end


def test_the_scale_of_a_bf16_pick_score_is_taken_in_float32(processor):
    clip = tiny_scorers.clip()
    clip.logit_scale.data.fill_(4.6052)
    clip = clip.bfloat16()
    ratio = pick_score(clip, processor, batch=2)(pictures(2), PROMPTS[:2]) / hps_v2(clip, processor, batch=2)(
        pictures(2), PROMPTS[:2]
    )
    exact = float(clip.logit_scale.detach().double().exp())
    assert abs(exact - float(clip.logit_scale.detach().exp())) > 0.05  # negative control: bf16 is coarse
    np.testing.assert_allclose(ratio, exact, rtol=1e-6)


def test_autocast_around_a_call_changes_nothing(every):
    images = pictures(3)
    with torch.autocast("cpu", torch.bfloat16):
        inside = {name: reward(images, PROMPTS[:3]) for name, reward in every.items()}
    for name, reward in every.items():
        assert torch.equal(inside[name], reward(images, PROMPTS[:3])), name


# ---- refusals and missing scores


@pytest.mark.parametrize(
    ("images", "prompts", "message"),
    [
        (pictures(2), ["a"], r"2 images \(2, 8, 8, 3\) but 1 prompts"),
        (pictures(2), "ab", "sequence of strings, got 'ab'"),
        (pictures(2), None, "sequence of strings, got None"),
        (pictures(2), 2, "sequence of strings, got 2"),
        (pictures(2).float(), ["a", "b"], "got torch.float32"),
        (pictures(2)[None], ["a"], r"\(b h w 3\), got torch.uint8 \(1, 2, 8, 8, 3\)"),
    ],
)
def test_malformed_calls_are_refused(every, images, prompts, message):
    for name, reward in every.items():
        with pytest.raises(ValueError, match=f"{name}: .*{message}"):
            reward(images, prompts)


def test_bad_batches_are_refused(clip, processor, blip, tokenizer):
    for make in (clip_score, pick_score, hps_v2):
        with pytest.raises(ValueError, match="batch must be an integer >= 1, got 0"):
            make(clip, processor, batch=0)
    with pytest.raises(ValueError, match="batch"):
        aesthetic(clip, processor, score_head(HEAD_12), batch=1.5)
    with pytest.raises(ValueError, match="batch"):
        image_reward(blip, score_head(HEAD_16), tokenizer, batch=-1)


def marked(images: torch.Tensor, row: int) -> torch.Tensor:
    images = images.clone()
    images[row] = 255
    return images


class Picky:
    """A processor that cannot take a white picture, or makes nan of it."""

    def __init__(self, inner, *, to_nan: bool):
        self.inner, self.to_nan, self.tokenizer = inner, to_nan, inner.tokenizer

    def __call__(self, *, images, **options):
        white = [bool((np.array(image) == 255).all()) for image in images]
        if any(white) and not self.to_nan:
            raise RuntimeError("a white picture")
        found = self.inner(images=images, **options)
        found["pixel_values"][white] = torch.nan
        return found


@pytest.mark.parametrize("to_nan", [False, True])
def test_a_row_that_fails_is_nan_and_counted_and_costs_nobody_else_a_score(clip, processor, to_nan):
    picky, counts = Picky(processor, to_nan=to_nan), []
    images = marked(pictures(7), 4)

    def log(*event):
        counts.append(event)

    made = {
        "clip_score": (clip_score(clip, picky, batch=3, log=log), clip_score(clip, processor)),
        "pick_score": (pick_score(clip, picky, batch=3, log=log), pick_score(clip, processor, batch=3)),
        "hps_v2": (hps_v2(clip, picky, batch=3, log=log), hps_v2(clip, processor, batch=3)),
        "aesthetic": tuple(aesthetic(clip, p, score_head(HEAD_12), batch=3, log=log) for p in (picky, processor)),
    }
    for name, (reward, whole) in made.items():
        counts.clear()
        values, expected = reward(images, PROMPTS), whole(images, PROMPTS)
        expected[4] = torch.nan
        assert torch.allclose(values, expected, rtol=1e-4, atol=1e-4, equal_nan=True), name
        assert counts == [("failed", 1)], name
        counts.clear()
        reward(images[:4], PROMPTS[:4])
        assert counts == []


def test_without_a_log_failures_warn_with_their_reason(clip, processor):
    reward = clip_score(clip, Picky(processor, to_nan=False), batch=3)
    with pytest.warns(RuntimeWarning, match=r"clip_score: 1 of 7 rows have no score \(RuntimeError: a white picture"):
        reward(marked(pictures(7), 4), PROMPTS)


def test_pictures_without_pixels_have_no_score(every):
    for name, reward in every.items():
        with pytest.warns(RuntimeWarning, match=f"{name}: 2 of 2 rows"):
            assert reward(torch.zeros(2, 0, 8, 3, dtype=torch.uint8), ["a", "b"]).isnan().all()


def test_image_reward_counts_the_rows_its_tokenizer_cannot_take(blip, tokenizer):
    def picky(texts, **options):
        if "bad" in texts:
            raise RuntimeError("bad text")
        return tokenizer(texts, **options)

    counts = []
    reward = image_reward(blip, score_head(HEAD_16), picky, batch=3, log=lambda *event: counts.append(event))
    values = reward(pictures(4), ["cat", "dog", "bad", "red"])
    assert values.isnan().tolist() == [False, False, True, False]
    assert counts == [("failed", 1)]


def test_score_rows_tells_what_failed_and_refuses_the_wrong_number_of_values():
    def score(images, prompts):
        if "x" in prompts:
            raise KeyError("x")
        return images[:, 0, 0, 0].float()

    images = pictures(5)
    rows = score_rows(score, images, ["a", "b", "x", "d", "e"], batch=2)
    assert rows.failed == 1
    assert isinstance(rows.error, KeyError)
    assert rows.values.isnan().tolist() == [False, False, True, False, False]
    assert torch.equal(rows.values[[0, 1, 3, 4]], images[[0, 1, 3, 4], 0, 0, 0].float())
    lost = score_rows(lambda i, p: [1.0] * (len(p) - 1 or 1), images[:3], ["a"] * 3, batch=3)
    assert lost.values.tolist() == [1.0] * 3  # two for three cannot be assigned; one by one they can
    assert report("name", lost, None) is lost.values


# ---- videos


def videos(count: int, seed: int = 0) -> torch.Tensor:
    return pictures(count * 2, seed=seed).reshape(count, 2, 8, 8, 3)


def qualities(videos, prompts):
    x = videos.double().flatten(1)
    return {"VQ": x.mean(1), "MQ": x.std(1).tolist(), "TA": [len(prompt) for prompt in prompts], "extra": None}


def test_a_video_reward_is_the_weighted_sum_of_standardised_qualities():
    clips, prompts = videos(4), ["a", "bb", "ccc", "dddd"]
    given_ = qualities(clips, prompts)
    weights = {"VQ": 2.0, "TA": -0.5}
    raw = video_reward(qualities, weights=weights)(clips, prompts)
    np.testing.assert_allclose(raw, 2 * given_["VQ"].numpy() - 0.5 * np.array([1, 2, 3, 4]), rtol=1e-6)
    made = video_reward(qualities, weights=weights, constants=VIDEO_ALIGN)(clips, prompts)
    expected = 2 * (given_["VQ"].numpy() - 3.6757) / 2.2476 - 0.5 * (np.array([1, 2, 3, 4]) - 2.8105) / 2.5121
    np.testing.assert_allclose(made, expected, rtol=1e-6)
    assert made.dtype == torch.float32
    assert VIDEO_ALIGN["MQ"] == (1.1646, 1.3811)


@given(st.permutations(range(5)), st.integers(1, 5), st.integers(1, 3))
def test_videos_do_not_depend_on_one_another(order, count, batch):
    clips, prompts = videos(5), list("abcde")
    reward = video_reward(qualities, weights={"VQ": 1, "MQ": 1}, constants=VIDEO_ALIGN, batch=batch)
    whole = reward(clips, prompts)
    part = order[:count]
    torch.testing.assert_close(reward(clips[part], [prompts[i] for i in part]), whole[part], rtol=1e-6, atol=0)


def test_videos_that_cannot_be_judged_are_nan_and_counted():
    def score(clips, prompts):
        return {"VQ": [float("inf") if p == "inf" else 1 / (p != "bad") for p in prompts]}

    counts = []
    reward = video_reward(score, weights={"VQ": 3}, batch=2, log=lambda *event: counts.append(event))
    values = reward(videos(4), ["x", "bad", "y", "inf"])
    assert torch.equal(values.nan_to_num(-1), torch.tensor([3.0, -1, 3, -1]))
    assert counts == [("failed", 2)]
    with pytest.warns(RuntimeWarning, match="KeyError: 'MQ'"):
        assert video_reward(score, weights={"MQ": 1.0})(videos(1), ["x"]).isnan().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {}}, r"non-empty mapping .* got \{\}"),
        ({"weights": [1]}, "non-empty mapping"),
        ({"weights": {"VQ": float("nan")}}, r"weights\['VQ'\].*nan"),
        ({"weights": {"XX": 1.0}, "constants": VIDEO_ALIGN}, r"not there: \['XX'\]"),
        ({"weights": {"VQ": 1.0}, "constants": {"VQ": (0.0, 0.0)}}, r"std must be in \(0"),
        ({"weights": {"VQ": 1.0}, "constants": {"VQ": (float("inf"), 1.0)}}, "mean must be"),
        ({"weights": {"VQ": 1.0}, "batch": 0}, "batch"),
    ],
)
def test_bad_video_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        video_reward(qualities, **options)


def test_a_video_reward_refuses_images():
    with pytest.raises(ValueError, match=r"video_reward: .*\(b f h w 3\), got torch.uint8 \(2, 8, 8, 3\)"):
        video_reward(qualities, weights={"VQ": 1})(pictures(2), ["a", "b"])


# ---- published weights, as far as that can be checked without them


def test_open_clip_weights_are_the_same_function_under_other_names(tokenizer):
    from transformers import CLIPModel

    theirs = tiny_scorers.randomise(tiny_scorers.OpenClip(), seed=5, std=0.3).eval()
    config = tiny_scorers.clip_config()
    config.projection_dim = 12
    ours = filled(CLIPModel(config), clip_from_open_clip(theirs.state_dict())).eval()
    assert set(clip_from_open_clip(theirs.state_dict())) == set(ours.state_dict())
    ids = torch.tensor(tokenizer(PROMPTS, padding="max_length", max_length=10)["input_ids"])
    pixels = by_hand(pictures(7))
    with torch.no_grad():
        found = ours(input_ids=ids, pixel_values=pixels)
        unit = torch.nn.functional.normalize
        torch.testing.assert_close(found.image_embeds, unit(theirs.visual(pixels), dim=-1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.text_embeds, unit(theirs.encode_text(ids), dim=-1), rtol=1e-4, atol=1e-5)
    assert torch.equal(ours.logit_scale, theirs.logit_scale)


def test_every_name_of_an_open_clip_checkpoint_is_consumed():
    state = tiny_scorers.OpenClip().state_dict()
    for strange in ("visual.transformer.resblocks.0.ln_3.weight", "attn_mask", "text.logit_scale", "visual.conv1.bias"):
        with pytest.raises(ValueError, match=f"1 of {len(state) + 1} names .* unknown: .*{re.escape(strange)}"):
            clip_from_open_clip({**state, strange: torch.zeros(1)})
    for lost in ("visual.proj", "transformer.resblocks.1.attn.in_proj_bias", "ln_final.bias"):
        less = clip_from_open_clip({name: x for name, x in state.items() if name != lost})
        from transformers import CLIPModel

        config = tiny_scorers.clip_config()
        config.projection_dim = 12
        with pytest.raises(ValueError, match=r"do not fit CLIPModel: \d+ missing"):
            filled(CLIPModel(config), less)


def published_image_reward(seed: int = 0) -> dict[str, torch.Tensor]:
    """A tiny checkpoint with the names of ImageReward.pt."""
    vision = tiny_scorers.randomise(tiny_scorers.TimmVision(), seed=seed).state_dict()
    blip = tiny_scorers.blip(seed=seed + 1).state_dict()
    state = {f"blip.visual_encoder.{name}": x for name, x in vision.items()}
    state |= {
        f"blip.{name}": x for name, x in blip.items() if name.startswith(("text_encoder.", "vision_proj", "text_proj"))
    }
    state["blip.text_encoder.embeddings.position_ids"] = torch.arange(40)[None]
    return state | tiny_scorers.head_state(16, prefix="mlp.", seed=1)


def test_image_reward_weights_are_the_same_function_under_other_names():
    from transformers import BlipForImageTextRetrieval

    theirs = tiny_scorers.randomise(tiny_scorers.TimmVision(), seed=0)
    state, head = blip_from_image_reward(published_image_reward())
    assert {name: tuple(x.shape) for name, x in head.items()} == {n: tuple(x.shape) for n, x in HEAD_16.items()}
    model = filled(BlipForImageTextRetrieval(tiny_scorers.blip_config()), state, unused=r"itm_head\..*").eval()
    pixels = by_hand(pictures(3))
    with torch.no_grad():
        found = model.vision_model(pixel_values=pixels).last_hidden_state
        torch.testing.assert_close(found, theirs(pixels), rtol=1e-4, atol=1e-5)
    same = tiny_scorers.blip(seed=1).state_dict()
    own = model.state_dict()
    assert all(torch.equal(own[name], same[name]) for name in own if name.startswith("text_"))


def test_every_name_of_an_image_reward_checkpoint_is_consumed():
    state = published_image_reward()
    for strange in ("blip.visual_encoder.blocks.0.gamma", "blip.tokenizer.x", "head.weight", "mlp.layers.9"):
        with pytest.raises(ValueError, match=f"unknown: .*{strange}"):
            blip_from_image_reward({**state, strange: torch.zeros(1)})


def test_the_published_sizes_of_image_reward():
    from transformers import BlipForImageTextRetrieval

    with torch.device("meta"):
        model = BlipForImageTextRetrieval(image_reward_config())
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    assert shapes["vision_model.embeddings.position_embedding"] == (1, 197, 1024)
    assert shapes["vision_model.encoder.layers.23.self_attn.qkv.weight"] == (3072, 1024)
    assert shapes["text_encoder.embeddings.word_embeddings.weight"] == (30524, 768)
    assert shapes["text_encoder.encoder.layer.11.crossattention.self.key.weight"] == (768, 1024)
    assert "vision_model.encoder.layers.24.self_attn.qkv.weight" not in shapes
    assert model.config.vision_config.layer_norm_eps == 1e-6
    assert (model.config.vision_config.num_attention_heads, model.config.text_config.num_attention_heads) == (16, 12)


def test_a_head_by_hand_and_its_refusals():
    x = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    head = score_head({name: v.half() for name, v in HEAD_12.items()})
    assert next(head.parameters()).dtype == torch.float32
    assert [type(layer).__name__ for layer in head] == [*["Linear", "Dropout"] * 3, "Linear", "Linear"]
    np.testing.assert_allclose(score_head(HEAD_12)(x)[:, 0].detach(), mlp(HEAD_12, x.double().numpy()), rtol=1e-4)
    with pytest.raises(ValueError, match="names must be"):
        score_head({name: v for name, v in HEAD_12.items() if name != "layers.7.bias"})
    with pytest.raises(ValueError, match="names must be"):
        score_head({**HEAD_12, "layers.8.bias": torch.zeros(1)})
    for name, shape in (("layers.2.weight", (8, 9)), ("layers.7.weight", (2, 4)), ("layers.4.bias", (7,))):
        with pytest.raises(ValueError, match="do not fit"):
            score_head({**HEAD_12, name: torch.zeros(shape)})


def test_weights_that_do_not_fit_are_refused_with_the_difference():
    layer = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"Linear: 1 missing: \['bias'\]; 1 unknown: \['scale'\]"):
        filled(layer, {"weight": torch.zeros(1, 2), "scale": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"the weights do not fit Linear: 1 missing: \['bias'\]$"):
        filled(layer, {"weight": torch.zeros(1, 2)})
    with pytest.raises(ValueError, match=r"1 of another shape: \['weight'\]"):
        filled(layer, {"weight": torch.zeros(2, 2), "bias": torch.zeros(1)})
    assert filled(layer, {"weight": torch.ones(1, 2)}, unused="bias").weight.tolist() == [[1.0, 1.0]]


class Trap:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code of a checkpoint ran')",))


def test_weights_are_read_without_running_code(tmp_path):
    from safetensors.torch import save_file

    state = {"a": torch.ones(2), "b": torch.zeros(1)}
    torch.save({"epoch": 3, "state_dict": {f"module.{name}": x for name, x in state.items()}}, tmp_path / "w.pt")
    save_file(state, tmp_path / "w.safetensors")
    for name in ("w.pt", "w.safetensors"):
        found = read_weights(tmp_path / name)
        assert found.keys() == state.keys()
        assert all(torch.equal(found[n], state[n]) for n in state)
    torch.save({"state_dict": Trap()}, tmp_path / "trap.pt")
    (tmp_path / "text.pt").write_text("not weights")
    (tmp_path / "text.safetensors").write_text("not weights")
    torch.save({"state_dict": {}}, tmp_path / "empty.pt")
    torch.save({"a": 1.0}, tmp_path / "number.pt")
    for name in ("trap.pt", "text.pt", "text.safetensors"):
        with pytest.raises(ValueError, match=f"{name}' cannot be read"):
            read_weights(tmp_path / name)
    for name in ("empty.pt", "number.pt"):
        with pytest.raises(ValueError, match="does not hold tensors by name"):
            read_weights(tmp_path / name)


def test_weights_files_are_files_or_in_folders(tmp_path):
    (tmp_path / "w.pt").write_text("")
    assert weights_file(str(tmp_path / "w.pt"), "other.pt") == tmp_path / "w.pt"
    assert weights_file(str(tmp_path), "w.pt") == tmp_path / "w.pt"
    with pytest.raises(ValueError, match=r"does not hold other\.pt"):
        weights_file(str(tmp_path), "other.pt")
    with pytest.raises(ValueError, match=r"no file, no folder and no repository with other\.pt"):
        weights_file(str(tmp_path / "nowhere"), "other.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, processor):
    """What the loaders read, in one folder: a CLIP model with its processor, and the checkpoints."""
    folder = tmp_path_factory.mktemp("published")
    tiny_scorers.clip().save_pretrained(folder)
    processor.save_pretrained(folder)
    theirs = tiny_scorers.randomise(tiny_scorers.OpenClip(), seed=5, std=0.3).state_dict()
    torch.save({"epoch": 1, "state_dict": theirs}, folder / "HPS_v2.1_compressed.pt")
    torch.save(HEAD_12, folder / "sac+logos+ava1-l14-linearMSE.pth")
    torch.save(published_image_reward(), folder / "ImageReward.pt")
    return str(folder)


def test_loaders_load_and_call_the_factories(folder, processor, tokenizer, every, capfd):
    from transformers import BlipForImageTextRetrieval, CLIPModel

    images = pictures(4)
    theirs = tiny_scorers.randomise(tiny_scorers.OpenClip(), seed=5, std=0.3).state_dict()
    config = tiny_scorers.clip_config()
    config.projection_dim = 12
    translated = filled(CLIPModel(config), clip_from_open_clip(theirs))
    blip_state, head = blip_from_image_reward(published_image_reward())
    unused = r"itm_head\..*"
    blip = filled(BlipForImageTextRetrieval(tiny_scorers.blip_config()), blip_state, unused=unused)
    pairs = {
        "clip_score": (load_clip_score(folder), every["clip_score"]),
        "pick_score": (load_pick_score(folder, folder), every["pick_score"]),
        "aesthetic": (load_aesthetic(folder, folder), every["aesthetic"]),
        "hps_v2": (load_hps_v2(folder, folder), hps_v2(translated, processor)),
        "image_reward": (
            load_image_reward(folder, folder, config=tiny_scorers.blip_config()),
            image_reward(blip, score_head(head), tokenizer),
        ),
    }
    for name, (loaded, direct) in pairs.items():
        # not to the bit: weights that lie elsewhere in memory are multiplied in another order
        torch.testing.assert_close(
            loaded(images, PROMPTS[:4]), direct(images, PROMPTS[:4]), rtol=1e-4, atol=1e-3, msg=name
        )


def test_names_of_the_command_line_load_the_same_rewards(folder, every):
    from diffrl.reward_names import make_reward

    images = pictures(2)
    for name, factory in (
        ("clip:{0}", "clip_score"),
        ("pick:{0},{0}", "pick_score"),
        ("aesthetic:{0},{0}", "aesthetic"),
    ):
        values = make_reward(name.format(folder))(images, PROMPTS[:2])
        torch.testing.assert_close(values, every[factory](images, PROMPTS[:2]), rtol=1e-4, atol=1e-3, msg=name)
    assert make_reward(f"hps:{folder},{folder}")(images, PROMPTS[:2]).isfinite().all()


def test_loaders_take_a_dtype(folder):
    seen = []
    original = scorers._cosines

    def watching(model, *rest):
        seen.append(next(model.parameters()).dtype)
        return original(model, *rest)

    scorers._cosines = watching
    try:
        for load, names in ((load_clip_score, (folder,)), (load_hps_v2, (folder, folder))):
            assert load(*names, dtype=torch.bfloat16, batch=2)(pictures(2), PROMPTS[:2]).dtype == torch.float32
    finally:
        scorers._cosines = original
    assert seen == [torch.bfloat16] * 2


def test_loaders_say_what_is_not_there(tmp_path, folder):
    nowhere = str(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no CLIP model in '.*nowhere'"):
        load_clip_score(nowhere)
    with pytest.raises(ValueError, match=r"no CLIP model in .* with a processor in '.*nowhere'"):
        load_pick_score(folder, nowhere)
    with pytest.raises(ValueError, match=r"HPS_v2\.1_compressed\.pt"):
        load_hps_v2(nowhere)
    with pytest.raises(ValueError, match=r"no configuration and processor of CLIP in '.*nowhere'"):
        load_hps_v2(folder, nowhere)
    with pytest.raises(ValueError, match=r"linearMSE\.pth"):
        load_aesthetic(nowhere)
    with pytest.raises(ValueError, match=r"ImageReward\.pt"):
        load_image_reward(nowhere)
    with pytest.raises(ValueError, match=r"no tokenizer in '.*nowhere'"):
        load_image_reward(folder, nowhere)


@pytest.mark.parametrize("module", ["transformers", "PIL"])
def test_a_missing_package_is_named_with_what_to_install(monkeypatch, folder, module):
    monkeypatch.setitem(sys.modules, module, None)
    for load in (load_clip_score, load_pick_score, load_hps_v2, load_image_reward):
        with pytest.raises(ImportError, match=r"pip install 'diffrl\[demo\]'"):
            load(folder)
    with pytest.raises(ImportError, match=r"pip install 'diffrl\[demo\]'"):
        load_aesthetic(folder)


# ---- the room


def test_every_reward_is_reached_from_one_place_and_none_loads_anything_heavy():
    wanted = ["clip_score", "load_clip_score", "pick_score", "hps_v2", "aesthetic", "image_reward", "object_check"]
    wanted += ["video_reward", "preference", "judged", "cached", "in_threads", "remote", "weighted_sum", "ocr"]
    wanted += ["load_pick_score", "load_hps_v2", "load_aesthetic", "load_image_reward", "Object", "Fact"]
    heavy = ["transformers", "PIL", "huggingface_hub", "rapidocr", "diffusers"]
    code = f"import sys, json\nfrom diffrl.rewards import {', '.join(wanted)}\n"
    code += f"print(json.dumps([name for name in {heavy} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(done.stdout) == []
    assert set(wanted) <= set(rewards.__all__)
    assert all(hasattr(rewards, name) for name in rewards.__all__)


FORBIDDEN = {
    "hpsv2",
    "image_reward",
    "ImageReward",
    "open_clip",
    "clip",
    "imscore",
    "t2v_metrics",
    "mmdet",
    "torchvision",
}


def imports(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


def test_no_reward_package_is_a_dependency():
    """Reward packages pinned old versions of everything, or lacked a vocabulary file:
    https://github.com/tgxs002/HPSv2/issues/30"""
    for path in (ROOT / "diffrl").rglob("*.py"):
        assert not imports(path.read_text()) & FORBIDDEN, path
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    names = {re.split(r"[<>=!\[ ]", name)[0].lower().replace("-", "_") for name in wanted}
    assert not names & {"hpsv2", "image_reward", "open_clip_torch", "clip", "mmdet"}
    assert imports("def f():\n    import hpsv2.img_score") & FORBIDDEN  # negative control


def test_what_is_not_checked_says_so():
    for name in ("load_clip_score", "load_pick_score", "load_hps_v2", "load_aesthetic", "load_image_reward"):
        assert "Not checked here\nwith published" in getattr(scorer_weights, name).__doc__.replace("    ", "") or (
            "Not checked here with published" in " ".join(getattr(scorer_weights, name).__doc__.split())
        )
