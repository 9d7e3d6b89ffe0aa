"""Does the picture show what the prompt states? Objects, their number, colours and places, as GenEval asks
(Ghosh et al. 2023, 2310.11513; thresholds and the rule of places from djghosh13/geneval, evaluate_images.py)."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from diffrl.checks import require_call, require_count
from diffrl.reward_rows import Log, report, score_rows
from diffrl.types import Reward

RELATIONS = ("left of", "right of", "above", "below")
CONFIDENT, CONFIDENT_TO_COUNT = 0.3, 0.9
"""GenEval believes a detection above 0.3; above 0.9 where the prompt states a number."""
OVERLAP = 0.1
"""GenEval ignores an offset of up to this share of the two objects' summed sizes."""
MOST = 16
"""GenEval keeps at most this many objects of a class."""


class Object(NamedTuple):
    """A detection: class, confidence in [0, 1], box (left, top, right, bottom) in pixels, colour if the detector names one."""

    label: str
    score: float
    box: tuple[float, float, float, float]
    colour: str | None = None


class Fact(NamedTuple):
    """One thing a prompt states: a number of objects of a class or, where they are given, their colour or their place.

    label: the class; low, high: how many, high None means at least low.
    colour: the `low` most confident objects of the class have it (`high` plays no part).
    relation, other, others: each of the `low` most confident lies so (one of `RELATIONS`) to each of the `others` most
        confident of class `other`.
    above: detections with a confidence up to this are not believed.
    """

    label: str
    low: int = 1
    high: int | None = None
    colour: str | None = None
    relation: str | None = None
    other: str | None = None
    others: int = 1
    above: float = CONFIDENT


def relations(a: Sequence[float], b: Sequence[float]) -> set[str]:
    """Where box `a` lies as seen from box `b`: none, one or two of `RELATIONS`.

    With d the offset of the centres and s the summed sizes per axis, d' = sign(d) max(|d| - 0.1 s, 0) must exceed half of
    |d| on an axis. Boxes are (left, top, right, bottom), y grows downwards.

    >>> relations((0, 0, 2, 2), (8, 0, 10, 2))
    {'left of'}
    """
    boxes = np.array([a, b], dtype=np.float64).reshape(2, 2, 2)
    offset = boxes[0].mean(0) - boxes[1].mean(0)
    sizes = np.abs(boxes[:, 1] - boxes[:, 0]).sum(0)
    beyond = np.sign(offset) * np.maximum(np.abs(offset) - OVERLAP * sizes, 0)
    if (np.abs(beyond) < 1e-3).all():
        return set()
    x, y = beyond / np.linalg.norm(offset)
    tests = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, true in tests.items() if true}


def _best(objects: Iterable[Object], label: str, above: float) -> list[Object]:
    """The believed objects of a class, most confident first, equal ones in their order."""
    found = [o for o in objects if o.label == label and o.score > above]
    return sorted(found, key=lambda o: -o.score)[:MOST]


def holds(fact: Fact, objects: Sequence[Object]) -> bool:
    """Whether the objects bear out the fact.

    >>> holds(Fact("dog", 1, 1), [Object("dog", 0.8, (0, 0, 1, 1)), Object("dog", 0.2, (1, 1, 2, 2))])
    True
    """
    found = _best(objects, fact.label, fact.above)
    if len(found) < fact.low:
        return False
    chosen = found[: fact.low]
    if fact.relation is not None:
        others = _best(objects, fact.other or "", fact.above)[: fact.others]
        placed = all(fact.relation in relations(a.box, b.box) for a in chosen for b in others)
        return placed and len(others) == fact.others
    if fact.colour is not None:
        return all(o.colour == fact.colour for o in chosen)
    return fact.high is None or len(found) <= fact.high


def object_check(
    detect: Callable[[np.ndarray], Iterable[Object]],
    *,
    parse: Callable[[str], Sequence[Fact] | None],
    log: Log | None = None,
) -> Reward:
    """The share of the stated facts that hold; 1 exactly where GenEval calls the picture correct. No detector is shipped.

    Args:
        detect: picture UInt8 " h w 3" -> objects, with colours if any fact asks for one.
        parse: prompt -> its facts, for instance `geneval_facts(path)`; None or none: no score.
        log: see `reward_rows.report`.

    Returns:
        A reward for images, in [0, 1]; nan where the prompt states nothing, and, counted, where `detect` or `parse` raises.

    >>> import torch
    >>> detect = lambda picture: [Object("cat", 0.9, (0, 0, 4, 4))]
    >>> reward = object_check(detect, parse=lambda prompt: [Fact("cat"), Fact("dog")])
    >>> reward(torch.zeros(1, 8, 8, 3, dtype=torch.uint8), ["a cat and a dog"])
    tensor([0.5000])
    """

    def share(images: Tensor, prompts: Sequence[str]) -> list[float]:
        values = []
        for image, prompt in zip(images.detach().cpu().numpy(), prompts, strict=True):
            facts = parse(prompt) or ()
            objects = list(detect(image)) if facts else []
            values.append(sum(holds(fact, objects) for fact in facts) / len(facts) if facts else math.nan)
        return values

    def reward(images: Tensor, prompts: Sequence[str]) -> Tensor:
        require_call("object_check", images, prompts, ranks=(4,))
        return report("object_check", score_rows(share, images, prompts, batch=1), log)

    return reward


# ---- GenEval's table --------------------------------------------------------------------------------------------------


def facts_of(row: Mapping[str, Any]) -> list[Fact]:
    """The facts of one row of GenEval's metadata: {"tag", "include": [{"class", "count", "color"?, "position"?}],
    "exclude": [{"class", "count"}]}.

    An included class is a fact, its colour and its position are one more each; `position` is [relation, index of another
    included class]. An excluded class (fewer than `count`) narrows the number of an included one, else is a fact too.

    Raises:
        ValueError: a row of another form.

    >>> row = {"tag": "colors", "include": [{"class": "cat", "count": 1, "color": "red"}]}
    >>> [(fact.label, fact.low, fact.colour) for fact in facts_of(row)]
    [('cat', 1, None), ('cat', 1, 'red')]
    """
    try:
        above = CONFIDENT_TO_COUNT if row["tag"] == "counting" else CONFIDENT
        include, exclude = list(row["include"]), list(row.get("exclude", []))
        most: dict[str, int] = {}
        for e in exclude:
            fewer = require_count(f"exclude count of {e['class']!r}", e["count"]) - 1
            most[e["class"]] = min(fewer, most.get(e["class"], fewer))
        facts = []
        for item in include:
            label, low = item["class"], require_count(f"count of {item['class']!r}", item["count"])
            facts.append(Fact(label, low, most.get(label), above=above))
            if "color" in item:
                facts.append(Fact(label, low, colour=item["color"], above=above))
            if "position" in item:
                relation, place = item["position"]
                if relation not in RELATIONS or include[place] is item:
                    raise ValueError(f"position {item['position']!r}")
                other = include[require_count("position", place, low=0)]
                facts.append(
                    Fact(label, low, relation=relation, other=other["class"], others=other["count"], above=above)
                )
        included = {item["class"] for item in include}
        facts += [Fact(label, 0, high, above=above) for label, high in most.items() if label not in included]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"no row of GenEval's metadata ({type(error).__name__}: {error}): {row!r:.300}") from None
    return facts


def geneval_facts(path: str | Path) -> Callable[[str], list[Fact] | None]:
    """`parse` for `object_check` from GenEval's evaluation_metadata.jsonl: one row per line, its prompt under "prompt".

    Returns:
        prompt -> its facts; None for a prompt that is not in the file.

    Raises:
        ValueError: no such file, a line that is no row, a prompt with two different rows, no rows.

    >>> geneval_facts("absent.jsonl")
    Traceback (most recent call last):
    ValueError: GenEval's metadata 'absent.jsonl' is no file
    """
    if not Path(path).is_file():
        raise ValueError(f"GenEval's metadata {str(path)!r} is no file")
    table: dict[str, list[Fact]] = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, facts = row["prompt"], facts_of(row)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{str(path)!r}, line {number}: {error}") from None
        if table.setdefault(prompt, facts) != facts:
            raise ValueError(f"{str(path)!r}, line {number}: the prompt {prompt!r} has other facts before")
    if not table:
        raise ValueError(f"{str(path)!r} holds no rows")
    return table.get
