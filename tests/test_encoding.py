"""encoding.py: rows by content, in memory and on disk."""

import numpy as np
import pytest
import safetensors.torch
import tiny
import tiny_families
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffrl import encoding
from diffrl.models import from_pipeline

SIZE = {"height": 24, "width": 16}
PROMPTS = ["a red cat", "the dog sings on the river", "two blue birds"]


def model_of(pipe, **options):
    return from_pipeline(pipe, **{"lora": {"r": 2}, "max_sequence_length": 8, **SIZE, **options})


def counted(pipe):
    """How often each text encoder runs from now on."""
    calls = []
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3"):
        getattr(pipe, name).register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    return calls


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_rows_are_read_back_to_the_bit_without_running_an_encoder(tmp_path):
    folder = tmp_path / "not" / "there"
    cond = model_of(tiny.sd3(), embeddings=folder).encode(PROMPTS)
    assert equal(cond, model_of(tiny.sd3()).encode(PROMPTS))
    files = sorted(folder.iterdir())
    assert [f.suffix for f in files] == [".safetensors"] * 4  # three prompts and the negative one
    pipe = tiny.sd3()
    calls = counted(pipe)
    assert equal(model_of(pipe, embeddings=str(folder)).encode(PROMPTS), cond)
    assert calls == []
    model_of(pipe, lora="default", embeddings=folder).encode(["a green house"])
    assert len(calls) == 3  # negative control: a new prompt is encoded, once by each
    assert len(list(folder.iterdir())) == 5


def changed_weight(pipe):
    with torch.no_grad():
        next(iter(pipe.text_encoder_3.parameters()))[3, 5] += 1e-3


def changed_vocabulary(pipe):
    pipe.tokenizer_2.add_tokens(["elephant"])


def swapped_rows(pipe):
    with torch.no_grad():
        weight = next(iter(pipe.text_encoder_3.parameters()))
        weight[[5, 7]] = weight[[7, 5]]


def changed_normaliser(pipe):
    from tokenizers.normalizers import Lowercase

    pipe.tokenizer_2.backend_tokenizer.normalizer = Lowercase()


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (changed_weight, {}),
        (swapped_rows, {}),
        (changed_normaliser, {}),
        (changed_vocabulary, {}),
        (lambda pipe: pipe.transformer.to(torch.bfloat16), {}),
        (lambda pipe: None, {"max_sequence_length": 9}),
        (lambda pipe: None, {"negative_prompt": "a bird"}),
    ],
    ids=["weight", "rows", "normaliser", "vocabulary", "dtype", "length", "negative"],
)
def test_what_was_encoded_otherwise_is_not_read(tmp_path, change, options):
    model_of(tiny.sd3(), embeddings=tmp_path).encode(PROMPTS[:1])
    pipe, fresh = tiny.sd3(), tiny.sd3()
    change(pipe)
    change(fresh)
    calls = counted(pipe)
    cond = model_of(pipe, embeddings=tmp_path, **options).encode(PROMPTS[:1])
    assert len(calls) == (3 if options.get("negative_prompt") else 6)
    assert equal(cond, model_of(fresh, **options).encode(PROMPTS[:1]))


def test_images_are_kept_by_pixels_and_size(tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (16, 32, 3), dtype=np.uint8)
    options = {"lora": {"r": 2}, "max_sequence_length": 512, "height": 16, "width": 32, "frames": 5}
    cond = from_pipeline(tiny_families.wan_i2v(), embeddings=tmp_path, **options).encode(PROMPTS[:1], [image])
    pipe = tiny_families.wan_i2v()
    seen = []
    encode = pipe.encode_image
    pipe.encode_image = lambda *a: (seen.append(a), encode(*a))[1]
    model = from_pipeline(pipe, embeddings=tmp_path, **options)
    assert equal(model.encode(PROMPTS[:1], [image.copy()]), cond)
    assert seen == []
    other = image.copy()
    other[0, 0, 0] ^= 1
    assert not equal(model.encode(PROMPTS[:1], [other]), cond)
    assert len(seen) == 1
    longer = from_pipeline(pipe, embeddings=tmp_path, **{**options, "lora": "default", "frames": 9})
    assert longer.encode(PROMPTS[:1], [image])["condition"].shape[2] == 3
    assert len(seen) == 2


def test_images_are_what_is_seen_not_how_they_are_stored():
    from PIL import Image

    model = from_pipeline(
        tiny_families.wan_i2v(), lora={"r": 2}, max_sequence_length=512, height=16, width=32, frames=5
    )
    one, two = (Image.new("P", (32, 16), 3) for _ in range(2))
    one.putpalette([0, 0, 0, 9, 9, 9, 90, 90, 90, 200, 10, 10])
    two.putpalette([0, 0, 0, 9, 9, 9, 90, 90, 90, 10, 10, 200])
    first, second = (model.encode(PROMPTS[:1], [image])["condition"] for image in (one, two))
    assert not torch.equal(first, second)
    assert torch.equal(model.encode(PROMPTS[:1], [one.convert("RGB")])["condition"], first)
    pixels = torch.from_numpy(np.array(one.convert("RGB"))).permute(2, 0, 1) / 255
    for kind in (pixels.requires_grad_(True), pixels.detach().bfloat16()):
        found = model.encode(PROMPTS[:1], [kind])["condition"]
        torch.testing.assert_close(found, first, rtol=0.1, atol=0.1)


def test_a_write_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def broken(rows, name):
        with open(name, "wb") as file:
            file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(safetensors.torch, "save_file", broken)
    model = model_of(tiny.sd3(), embeddings=tmp_path)
    with pytest.raises(OSError, match="disk full"):
        model.encode(PROMPTS[:1])
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    seen = []
    replace = encoding.os.replace
    monkeypatch.setattr(encoding.os, "replace", lambda a, b: (seen.append(str(a)), replace(a, b)))
    model_of(tiny.sd3(), embeddings=tmp_path).encode(PROMPTS[:1])
    assert all(name.startswith(str(tmp_path)) for name in seen)  # renamed within one file system
    assert len(seen) == 2


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    model_of(tiny.sd3(), embeddings=tmp_path, guidance_scale=1.0).encode(PROMPTS[:1])
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ValueError, match=file.name):
        model_of(tiny.sd3(), embeddings=tmp_path, guidance_scale=1.0).encode(PROMPTS[:1])
    with pytest.raises(ValueError, match="is a file, not a folder"):
        model_of(tiny.sd3(), embeddings=file)


def test_encoders_taken_out_of_the_pipeline(tmp_path):
    pipe = tiny.sd3()
    model = model_of(pipe, embeddings=tmp_path)
    cond = model.encode(PROMPTS[:1])
    model_of(tiny.sd3(), embeddings=tmp_path).encode(PROMPTS)
    pipe.text_encoder = pipe.text_encoder_2 = pipe.text_encoder_3 = None
    assert equal(model.encode(PROMPTS[:1]), cond)
    assert len(model.encode(PROMPTS)["pooled_projections"]) == 3  # another run's file, of the weights seen before
    with pytest.raises(ValueError, match="a new one"):
        model.encode(["a new one"])
    pipe = tiny.sd3()
    model = model_of(pipe, embeddings=tmp_path)
    pipe.text_encoder_3 = None  # before anything was encoded: whose weights made the file cannot be told
    with pytest.raises(ValueError, match=r"a red cat.*text_encoder_3"):
        model.encode(PROMPTS[:1])


SHARED = []


@settings(max_examples=20)
@given(st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=5))
def test_rows_follow_their_prompts(prompts):
    if not SHARED:
        SHARED.append(model_of(tiny.sd3()))
    model = SHARED[0]
    whole = model.encode(prompts)
    for name, value in whole.items():
        parts = torch.cat([model.encode([p])[name] for p in prompts])
        assert torch.equal(value, parts)
        if not name.startswith("uncond."):
            assert all(
                torch.equal(value[i], value[j]) for i, p in enumerate(prompts) for j, q in enumerate(prompts) if p == q
            )


def test_control_two_prompts_are_two_rows():
    a, b = (model_of(tiny.sd3()).encode([p])["pooled_projections"] for p in PROMPTS[:2])
    assert not torch.equal(a, b)
