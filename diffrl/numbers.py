"""Refusals of plain numbers and words, without torch: what `checks` says about tensors, said about counts and seconds."""

import difflib
import math
import operator
from collections.abc import Iterable
from typing import Any


def require_number(
    name: str, value: Any, *, low: float = -math.inf, high: float = math.inf, open_low=False, infinite=False
) -> float:
    """The number in [low, high] (or (low, high]), finite unless `infinite`, else ValueError printing name, range and value.

    A 0-d array or tensor is a number; text and a bool are none, and an int beyond every float is refused too.

    >>> require_number("eta", 1.5, low=0, high=1)
    Traceback (most recent call last):
    ValueError: eta must be in [0, 1], got 1.5
    """
    try:
        number = None if isinstance(value, str | bytes | bytearray | bool) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several elements
        number = None
    if number is None:
        raise ValueError(f"{name} must be a number, got {value!r:.120}")
    finite = math.isfinite(number) or (infinite and number == math.inf)
    if not finite or number < low or number > high or (open_low and number == low):
        left, right = "(" if open_low or low == -math.inf else "[", "]" if infinite or high < math.inf else ")"
        raise ValueError(f"{name} must be in {left}{low}, {high}{right}, got {value!r}")
    return number


def require_count(name: str, value: Any, *, low: int = 1) -> int:
    """The integer >= low, else ValueError printing name and value (a bool or a float is no count).

    >>> require_count("steps", True)
    Traceback (most recent call last):
    ValueError: steps must be an integer >= 1, got True
    """
    try:
        count = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = None
    if count is None or count < low:
        raise ValueError(f"{name} must be an integer >= {low}, got {value!r}")
    return count


def listed(name: str, values: Any) -> list[Any]:
    """The values of any iterable, else ValueError printing name and value.

    >>> listed("sizes", range(3))
    [0, 1, 2]
    """
    try:
        return list(values)
    except TypeError:
        raise ValueError(f"{name} must be a sequence, got {values!r:.120}") from None


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'art'?)`, to end a refusal with, or nothing where no known word is near.

    >>> nearest("rat", ["art", "nft"]), nearest("xyzzy", ["art", "nft"])
    (" (did you mean 'art'?)", '')
    """
    words = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower().replace("-", "_"), words, n=1)
    return f" (did you mean {words[close[0]]!r}?)" if close else ""
