"""Rewards by name: every form reaches its loader with its arguments, and what cannot be is refused with --reward."""

import pytest
import torch

from diffrl import reward_names
from diffrl.cli import make_parser
from diffrl.reward_names import FORMS, LOADED, REWARDS, is_known, make_reward
from diffrl.rewards import TextReward


def flat(images, prompts):
    return torch.zeros(len(prompts))


@pytest.mark.parametrize(
    ("name", "loader", "arguments"),
    [
        ("clip:a/b", "clip", ("a/b",)),
        ("pick:a", "pick", ("a",)),
        ("pick:a,b", "pick", ("a", "b")),
        ("hps:x.pt,b", "hps", ("x.pt", "b")),
        ("aesthetic:C:/head.pth", "aesthetic", ("C:/head.pth",)),
        ("image_reward:x,y", "image_reward", ("x", "y")),
    ],
)
def test_names_reach_their_loaders(monkeypatch, name, loader, arguments):
    seen = []

    def load(*given, device):
        seen.append((given, device))
        return flat

    monkeypatch.setitem(LOADED, loader, (load, LOADED[loader][1]))
    assert make_reward(name, device="meta") is flat
    assert seen == [(arguments, "meta")]
    assert is_known(name)


def test_the_loaders_are_those_of_their_names():
    from diffrl import rewards

    names = {"clip": "clip_score", "pick": "pick_score", "hps": "hps_v2"}
    for name, (load, form) in LOADED.items():
        assert load is getattr(rewards, f"load_{names.get(name, name)}")
        assert form.startswith(f"{name}:")
    assert {name: getattr(rewards, name) for name in REWARDS} == REWARDS


def test_a_remote_reward_by_name(monkeypatch):
    seen = []
    monkeypatch.setattr(reward_names, "remote", lambda url: seen.append(url) or flat)
    assert make_reward("remote:http://host:8000/score") is flat
    assert seen == ["http://host:8000/score"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("clip", "'clip': it is written clip:CLIP"),
        ("clip:", "'clip:': it is written clip:CLIP"),
        ("clip:a,b", "it is written clip:CLIP"),
        ("pick:a,b,c", r"it is written pick:PICKSCORE\[,CLIP\]"),
        ("hps:,b", "it is written hps:"),
        ("clip:/nowhere/at/all", "'clip:/nowhere/at/all': no CLIP model in '/nowhere/at/all'"),
        ("remote:host", "url must be http://HOST"),
        ("remote", "url must be http://HOST"),
        ("beauty", r"must be one of ocr, .*clip:CLIP, .*remote:URL, or MODULE:FUNCTION, got 'beauty'"),
        ("clip_score:x", "cannot be imported"),
    ],
)
def test_names_that_cannot_be_are_refused(name, message):
    with pytest.raises(ValueError, match=f"--reward .*{message}"):
        make_reward(name)


def test_control_names_that_can_be_are_not_refused():
    assert isinstance(make_reward("ocr", threads=1), TextReward)
    black = torch.zeros(1, 8, 8, 3, dtype=torch.uint8)
    assert make_reward("jpeg_incompressibility")(black, [""]) == -make_reward("jpeg_compressibility")(black, [""])
    assert make_reward("math:floor") is __import__("math").floor
    assert not is_known("math:floor")


def test_the_help_of_the_command_names_every_form(capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["train", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    for form in FORMS:
        assert form.replace(" ", "") in words.replace(" ", ""), form
