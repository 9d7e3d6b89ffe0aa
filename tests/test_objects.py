"""Objects, numbers, colours and places: by hand, against GenEval's rule written again, rows, refusals, GenEval's table."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffrl.objects import RELATIONS, facts_of, holds, relations
from diffrl.rewards import Fact, Object, geneval_facts, object_check

DOG, CAT = Object("dog", 0.9, (0, 0, 10, 10), "red"), Object("cat", 0.8, (100, 0, 110, 10), "blue")


# ---- places


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ((0, 0, 10, 10), (100, 0, 110, 10), {"left of"}),
        ((100, 0, 110, 10), (0, 0, 10, 10), {"right of"}),
        ((0, 0, 10, 10), (0, 50, 10, 60), {"above"}),
        ((0, 50, 10, 60), (0, 0, 10, 10), {"below"}),
        ((0, 0, 2, 2), (50, 50, 52, 52), {"left of", "above"}),
        ((0, 0, 10, 10), (0, 0, 10, 10), set()),
        ((0, 0, 10, 10), (2, 0, 12, 10), set()),  # an offset of 2 = 0.1 (10 + 10)
        ((0, 0, 10, 10), (3, 0, 13, 10), set()),  # (3 - 2) / 3 is not above 1/2
        ((0, 0, 10, 10), (4.1, 0, 14.1, 10), {"left of"}),  # (4.1 - 2) / 4.1 is
    ],
)
def test_relations_by_hand(a, b, found):
    assert relations(a, b) == found


boxes = st.tuples(*[st.integers(0, 40)] * 4).map(lambda v: (v[0], v[1], v[0] + v[2] + 1, v[1] + v[3] + 1))


@given(boxes, boxes, st.integers(-9, 9), st.integers(-9, 9))
def test_relations_turn_around_and_do_not_depend_on_where_the_pair_is(a, b, x, y):
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    assert relations(b, a) == {opposite[name] for name in relations(a, b)}
    moved = [tuple(v + (x, y)[i % 2] for i, v in enumerate(box)) for box in (a, b)]
    assert relations(*moved) == relations(a, b)


# ---- facts


@pytest.mark.parametrize(
    ("fact", "true"),
    [
        (Fact("dog"), True),
        (Fact("cow"), False),
        (Fact("dog", 2), False),
        (Fact("dog", 1, 1), True),
        (Fact("dog", 0, 0), False),
        (Fact("cow", 0, 0), True),
        (Fact("dog", colour="red"), True),
        (Fact("dog", colour="blue"), False),
        (Fact("dog", relation="left of", other="cat"), True),
        (Fact("dog", relation="right of", other="cat"), False),
        (Fact("cat", relation="right of", other="dog"), True),
        (Fact("dog", relation="left of", other="cow"), False),
        (Fact("dog", relation="left of", other="cat", others=2), False),
        (Fact("dog", above=0.9), False),  # a confidence must lie above
        (Fact("dog", above=0.89), True),
    ],
)
def test_holds_by_hand(fact, true):
    assert holds(fact, [DOG, CAT]) is true


def test_the_most_confident_objects_are_judged():
    pale = Object("dog", 0.95, (50, 0, 60, 10), "white")
    assert not holds(Fact("dog", colour="red"), [DOG, pale])  # the white one is surer
    assert holds(Fact("dog", colour="white"), [DOG, pale])
    assert not holds(Fact("dog", 2, colour="red"), [DOG, pale])
    behind = Object("cat", 0.99, (-90, 0, -80, 10))
    assert not holds(Fact("dog", relation="left of", other="cat"), [DOG, CAT, behind])
    assert not holds(Fact("dog", relation="left of", other="cat", others=2), [DOG, CAT, behind])  # of every pair
    assert holds(Fact("dog", relation="left of", other="cat", others=2), [DOG, CAT, CAT])
    assert not holds(Fact("dog", 2, relation="left of", other="cat"), [DOG, CAT, DOG._replace(box=(200, 0, 210, 10))])
    many = [DOG._replace(score=0.5)] * 17 + [CAT]
    assert holds(Fact("dog", 16, 16), many)  # no more than 16 of a class are looked at


# ---- the reward


def image(*objects: Object) -> torch.Tensor:
    """A picture that `read` finds these objects in: its first pixel is a number for them."""
    if objects not in SHOWN:
        SHOWN.append(objects)
    picture = torch.zeros(4, 4, 3, dtype=torch.uint8)
    picture[0, 0, 0] = SHOWN.index(objects)
    return picture


SHOWN: list[tuple[Object, ...]] = [()]


def read(picture: np.ndarray) -> list[Object]:
    assert picture.dtype == np.uint8
    assert picture.shape == (4, 4, 3)
    if picture[0, 0, 0] == 255:
        raise RuntimeError("cannot look at this")
    return list(SHOWN[picture[0, 0, 0]])


TABLE = {
    "a red dog": [Fact("dog"), Fact("dog", colour="red")],
    "a dog left of a cat": [Fact("dog"), Fact("cat"), Fact("dog", relation="left of", other="cat")],
    "two dogs": [Fact("dog", 2, 2)],
    "nothing stated": [],
}


def test_the_share_of_facts_by_hand():
    images = torch.stack(
        [
            image(DOG, CAT),
            image(DOG._replace(colour="blue")),
            image(DOG, CAT),
            image(CAT),
            image(DOG, DOG),
            image(DOG),
            image(DOG),
        ]
    )
    prompts = [
        "a red dog",
        "a red dog",
        "a dog left of a cat",
        "a dog left of a cat",
        "two dogs",
        "nothing stated",
        "unknown",
    ]
    counts = []
    values = object_check(read, parse=TABLE.get, log=lambda *event: counts.append(event))(images, prompts)
    expected = torch.tensor([1, 1 / 2, 1, 1 / 3, 1, math.nan, math.nan])
    torch.testing.assert_close(values, expected, equal_nan=True)
    assert values.dtype == torch.float32
    assert counts == []  # a prompt that states nothing is no failure


def test_a_detector_or_parser_that_raises_costs_its_row_alone():
    bad = torch.full((4, 4, 3), 255, dtype=torch.uint8)
    images, counts = torch.stack([image(DOG), bad, image(DOG)]), []

    def parse(prompt):
        return TABLE[prompt]

    reward = object_check(read, parse=parse, log=lambda *event: counts.append(event))
    values = reward(images, ["a red dog", "a red dog", "not in the table"])
    assert values.isnan().tolist() == [False, True, True]
    assert counts == [("failed", 2)]
    with pytest.warns(RuntimeWarning, match="object_check: 1 of 1 rows .*cannot look at this"):
        object_check(read, parse=parse)(bad[None], ["a red dog"])


@given(st.permutations(range(5)), st.integers(1, 5))
def test_rows_do_not_depend_on_one_another(order, count):
    images = torch.stack([image(DOG, CAT), image(CAT), image(DOG), image(DOG, DOG), image()])
    prompts = ["a red dog", "a dog left of a cat", "a red dog", "two dogs", "a red dog"]
    reward = object_check(read, parse=TABLE.get)
    whole = reward(images, prompts)
    assert len(set(whole.tolist())) > 1
    part = list(order[:count])
    assert torch.equal(reward(images[part], [prompts[i] for i in part]), whole[part])


def test_malformed_calls_are_refused():
    reward = object_check(read, parse=TABLE.get)
    with pytest.raises(ValueError, match=r"object_check: 1 images .* but 2 prompts"):
        reward(image(DOG)[None], ["a", "b"])
    with pytest.raises(ValueError, match=r"\(b h w 3\)"):
        reward(image(DOG)[None, None], ["a"])


# ---- GenEval's table

ROWS = [
    {"tag": "single_object", "include": [{"class": "dog", "count": 1}], "prompt": "a photo of a dog"},
    {
        "tag": "counting",
        "include": [{"class": "dog", "count": 2}],
        "exclude": [{"class": "dog", "count": 3}],
        "prompt": "a photo of two dogs",
    },
    {"tag": "colors", "include": [{"class": "cat", "count": 1, "color": "blue"}], "prompt": "a photo of a blue cat"},
    {
        "tag": "position",
        "include": [{"class": "dog", "count": 1}, {"class": "cat", "count": 1, "position": ["right of", 0]}],
        "prompt": "a photo of a cat right of a dog",
    },
]


def test_facts_of_genevals_rows_by_hand():
    assert facts_of(ROWS[0]) == [Fact("dog", above=0.3)]
    assert facts_of(ROWS[1]) == [Fact("dog", 2, 2, above=0.9)]
    assert facts_of(ROWS[2]) == [Fact("cat"), Fact("cat", colour="blue")]
    assert facts_of(ROWS[3]) == [Fact("dog"), Fact("cat"), Fact("cat", relation="right of", other="dog")]
    assert facts_of({"tag": "x", "include": [], "exclude": [{"class": "cow", "count": 1}]}) == [Fact("cow", 0, 0)]


def correct(row: dict, objects: list[Object]) -> bool:
    """GenEval's verdict, its rule written again: groups in turn, each of which the later ones may refer to."""
    above = 0.9 if row["tag"] == "counting" else 0.3
    by_class: dict[str, list[Object]] = {}
    for o in sorted((o for o in objects if o.score > above), key=lambda o: -o.score):
        by_class.setdefault(o.label, []).append(o)
    good, groups = True, []
    for want in row["include"]:
        group = by_class.get(want["class"], [])[: want["count"]]
        fine = len(group) == want["count"]
        if fine and "color" in want:
            fine = sum(o.colour == want["color"] for o in group) >= want["count"]
        if fine and "position" in want:
            relation, place = want["position"]
            fine = groups[place] is not None and all(
                relation in relations(o.box, t.box) for o in group for t in groups[place]
            )
        good &= fine
        groups.append(group if fine else None)
    return good and all(len(by_class.get(e["class"], [])) < e["count"] for e in row.get("exclude", []))


labels, colours = st.sampled_from(["dog", "cat", "cow"]), st.sampled_from(["red", "blue"])
detections = st.lists(st.builds(Object, labels, st.sampled_from([0.2, 0.5, 0.95]), boxes, colours), max_size=6)


@st.composite
def metadata(draw):
    include = [
        {"class": label, "count": draw(st.integers(1, 2))}
        for label in draw(st.lists(labels, min_size=1, max_size=3, unique=True))
    ]
    for place, item in enumerate(include):
        if draw(st.booleans()):
            item["color"] = draw(colours)
        if place and draw(st.booleans()):
            item["position"] = [draw(st.sampled_from(RELATIONS)), draw(st.integers(0, place - 1))]
    exclude = [{"class": draw(labels), "count": draw(st.integers(1, 3))} for _ in range(draw(st.integers(0, 2)))]
    return {"tag": draw(st.sampled_from(["counting", "colors"])), "include": include, "exclude": exclude, "prompt": "p"}


@given(metadata(), detections)
def test_all_facts_hold_exactly_where_geneval_says_correct(row, objects):
    assert all(holds(fact, objects) for fact in facts_of(row)) == correct(row, objects)


def test_control_one_wrong_fact_is_not_correct():
    left = {**ROWS[3], "include": [ROWS[3]["include"][0], {"class": "cat", "count": 1, "position": ["left of", 0]}]}
    assert correct(ROWS[3], [DOG, CAT])
    assert not correct(left, [DOG, CAT])
    assert [holds(fact, [DOG, CAT]) for fact in facts_of(left)] == [True, True, False]


def test_genevals_table_from_a_file(tmp_path):
    path = tmp_path / "evaluation_metadata.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in [*ROWS, ROWS[0]]) + "\n\n")
    parse = geneval_facts(path)
    assert parse("a photo of two dogs") == [Fact("dog", 2, 2, above=0.9)]
    assert parse("a photo of Two dogs") is None
    images = torch.stack([image(DOG, CAT), image(DOG, DOG), image(CAT, DOG)])
    values = object_check(read, parse=parse)(images, [ROWS[3]["prompt"], ROWS[1]["prompt"], "unheard of"])
    torch.testing.assert_close(values, torch.tensor([1, 0, math.nan]), equal_nan=True)  # 0.9 is not above 0.9


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1"),
        ("[]", "line 1"),
        ('{"tag": "x", "include": []}', "'prompt'"),
        (json.dumps({"include": [], "prompt": "p"}), "KeyError: 'tag'"),
        (json.dumps({"tag": "x", "include": [{"class": "a"}], "prompt": "p"}), "KeyError: 'count'"),
        (json.dumps({"tag": "x", "include": [{"class": "a", "count": 0}], "prompt": "p"}), "count of 'a'"),
        (
            json.dumps({"tag": "x", "include": [{"class": "a", "count": 1, "position": ["near", 0]}], "prompt": "p"}),
            "position",
        ),
        (
            json.dumps({"tag": "x", "include": [{"class": "a", "count": 1, "position": ["above", 0]}], "prompt": "p"}),
            "position",
        ),
        (
            json.dumps({"tag": "x", "include": [{"class": "a", "count": 1, "position": ["above", 3]}], "prompt": "p"}),
            "IndexError",
        ),
        (
            json.dumps({"tag": "x", "include": [], "exclude": [{"class": "a", "count": 0}], "prompt": "p"}),
            "exclude count",
        ),
        ("", "holds no rows"),
    ],
)
def test_files_that_are_no_table_are_refused(tmp_path, line, message):
    path = tmp_path / "m.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        geneval_facts(path)


def test_no_file_and_two_meanings_of_a_prompt_are_refused(tmp_path):
    with pytest.raises(ValueError, match="is no file"):
        geneval_facts(tmp_path / "nowhere.jsonl")
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps({**ROWS[1], "prompt": ROWS[0]["prompt"]}))
    with pytest.raises(ValueError, match="line 2: the prompt 'a photo of a dog' has other facts before"):
        geneval_facts(path)
