"""A run's folder: what its input files held is noted, and an edit is noticed, with the file and the run named.

Negative controls are the tests with `control` in their names. Folders as runs use them: `test_run.py`.
"""

import json
import re
from dataclasses import replace

import pytest
from PIL import Image

from diffrl.folders import (
    file_digests,
    head_line,
    held_alone,
    json_line,
    prepare_folder,
    read_metrics,
    require_same_files,
)
from diffrl.settings import Settings


@pytest.fixture
def s(tmp_path):
    """Settings with prompts and first frames."""
    (tmp_path / "prompts.txt").write_text("a cat\n\na dog\n")
    for name in ("a.png", "b.png"):
        Image.new("RGB", (4, 4), (name[0] == "a" and "red") or "blue").save(tmp_path / name)
    (tmp_path / "images.txt").write_text("a.png\nb.png\n")
    return Settings(prompts=str(tmp_path / "prompts.txt"), images=str(tmp_path / "images.txt"))


def test_the_head_notes_what_the_files_held(s, tmp_path):
    prepare_folder(tmp_path / "r", s, overwrite=False)
    head = json.loads((tmp_path / "r" / "metrics.jsonl").read_text())
    assert head == json.loads(head_line(s))
    assert {name: d["lines"] for name, d in head["files"].items()} == {"prompts": 2, "images": 2}
    assert all(re.fullmatch("[0-9a-f]{64}", d["sha256"]) for d in head["files"].values())
    assert read_metrics(tmp_path / "r") == (s, [])
    assert "files" not in json.loads(head_line(Settings()))


EDITS = {
    "another_word": ("prompts", lambda folder: (folder / "prompts.txt").write_text("a cat\na dot\n")),
    "another_order": ("prompts", lambda folder: (folder / "prompts.txt").write_text("a dog\na cat\n")),
    "one_more": ("prompts", lambda folder: (folder / "prompts.txt").write_text("a cat\na dog\na cow\n")),
    "words_moved": ("prompts", lambda folder: (folder / "prompts.txt").write_text("a c\nata dog\n")),
    "another_list": ("images", lambda folder: (folder / "images.txt").write_text("b.png\na.png\n")),
    "another_picture": ("images", lambda folder: Image.new("RGB", (4, 4), "green").save(folder / "a.png")),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_refused_naming_the_file_and_the_run(s, tmp_path, edit):
    prepare_folder(tmp_path / "r", s, overwrite=False)
    require_same_files(tmp_path / "r", s)  # control: nothing was edited
    name, change = EDITS[edit]
    change(tmp_path)
    told = rf"--{name} '{re.escape(getattr(s, name))}' was changed since the run in '{re.escape(str(tmp_path / 'r'))}' began"
    with pytest.raises(ValueError, match=told + r" \(then 2 lines, sha256 \w{12}; now [23] lines, sha256 \w{12}\)"):
        require_same_files(tmp_path / "r", s)


def test_control_the_same_prompts_written_otherwise_are_the_same(s, tmp_path):
    before = file_digests(s)
    (tmp_path / "prompts.txt").write_text("\n  a cat \r\na dog")
    assert file_digests(s) == before


def test_a_run_that_noted_nothing_goes_on(s, tmp_path):
    prepare_folder(tmp_path / "r", replace(s, prompts=None, images=None), overwrite=False)
    require_same_files(tmp_path / "r", s)


def test_a_picture_that_is_gone_is_refused_and_nothing_is_made(s, tmp_path):
    (tmp_path / "b.png").unlink()
    with pytest.raises(ValueError, match=r"--images .*b\.png' cannot be read: No such file"):
        prepare_folder(tmp_path / "r", s, overwrite=False)
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]


def test_lines_are_json_and_a_folder_is_held_by_one(tmp_path):
    assert json.loads(json_line({"a": float("inf"), "b": 1.5})) == {"a": None, "b": 1.5}
    with held_alone(tmp_path), pytest.raises(ValueError, match="another process is training"), held_alone(tmp_path):
        pass
    with held_alone(tmp_path), held_alone(tmp_path / "absent"):
        pass
