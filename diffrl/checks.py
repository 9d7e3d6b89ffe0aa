"""Refusals and dtype rules shared by every floor: bad input is refused first, in one place, by one ValueError that
prints names, shapes and values; arithmetic is float32 or better."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diffrl.numbers import require_count as require_count
from diffrl.numbers import require_number as require_number


class NoReward(ValueError):
    """A reward raised for every image of one call; of several calls, the caller decides."""


def shapes(**tensors: Any) -> str:
    """`name (2, 3), other (2, 4)`: how every refusal prints what it was given.

    >>> shapes(a=torch.zeros(2, 3), b=1.5)
    'a (2, 3), b 1.5'
    """
    return ", ".join(f"{n} {tuple(x.shape) if isinstance(x, Tensor) else repr(x)}" for n, x in tensors.items())


def require_tensors(**tensors: Any) -> None:
    """ValueError unless every argument is a floating-point tensor.

    >>> require_tensors(x_0=torch.zeros(2, 3, dtype=torch.int64))
    Traceback (most recent call last):
    ValueError: x_0 must be floating point, got torch.int64, shape (2, 3)
    """
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__} {x!r}")
        if not x.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {x.dtype}, shape {tuple(x.shape)}")


def require_same_shape(**tensors: Tensor) -> None:
    """ValueError unless all are floating-point tensors of one shape: nothing is broadcast silently.

    >>> require_same_shape(v=torch.zeros(2, 3), v_old=torch.zeros(3))
    Traceback (most recent call last):
    ValueError: shapes differ: v (2, 3), v_old (3,)
    """
    require_tensors(**tensors)
    if len({tuple(x.shape) for x in tensors.values()}) != 1:
        raise ValueError(f"shapes differ: {shapes(**tensors)}")


def require_rows(b: int, **tensors: Tensor) -> None:
    """ValueError unless each is a floating-point " b" tensor of exactly `b` rows.

    >>> require_rows(2, advantages=torch.zeros(2, 1))
    Traceback (most recent call last):
    ValueError: advantages must have shape (2,), got (2, 1)
    """
    require_tensors(**tensors)
    for name, x in tensors.items():
        if tuple(x.shape) != (b,):
            raise ValueError(f"{name} must have shape ({b},), got {tuple(x.shape)}")


def require_batch(**tensors: Tensor) -> int:
    """ValueError unless all have one shape with a leading batch axis; returns b.

    >>> require_batch(v=torch.zeros(2, 3), v_old=torch.zeros(2, 3))
    2
    """
    require_same_shape(**tensors)
    x = next(iter(tensors.values()))
    if x.ndim < 1:
        raise ValueError(f"a leading batch axis is needed: {shapes(**tensors)}")
    return x.shape[0]


def require_cond(cond: Any, b: int) -> None:
    """ValueError unless `cond` is a mapping of tensors with leading axis b.

    >>> require_cond({"text": torch.zeros(3, 8)}, 2)
    Traceback (most recent call last):
    ValueError: cond['text'] must have leading axis 2, got (3, 8)
    """
    if not isinstance(cond, Mapping):
        raise ValueError(f"cond must be a mapping of tensors by name, got {cond!r}")
    for name, value in cond.items():
        if not isinstance(value, Tensor) or value.ndim < 1 or value.shape[0] != b:
            got = tuple(value.shape) if isinstance(value, Tensor) else f"{type(value).__name__} {value!r:.60}"
            raise ValueError(f"cond[{name!r}] must have leading axis {b}, got {got}")


def promote(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All tensors in their common dtype, at least float32: bf16 and fp16 become float32, float64 stays float64.

    >>> [x.dtype for x in promote(torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.float16))]
    [torch.float32, torch.float32]
    """
    dtype = torch.float32
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    return tuple(x.to(dtype) for x in tensors)


def time_rows(name: str, t: Any, like: Tensor) -> Tensor:
    """t (float, 0-d or " b") as a " b" tensor in `like`'s dtype and device; ValueError unless all are in [0, 1].

    >>> time_rows("t", 0.5, torch.zeros(2, 3))
    tensor([0.5000, 0.5000])
    """
    try:  # straight to like's dtype: a Python float must not pass through float32
        value = torch.as_tensor(t, dtype=like.dtype, device=like.device)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} must be a number, 0-d or ({like.shape[0]},), got {t!r}") from None
    if value.ndim > 1 or (value.ndim == 1 and value.shape[0] != like.shape[0]):
        raise ValueError(f"{name} must be a number, 0-d or ({like.shape[0]},), got shape {tuple(value.shape)}")
    if not bool(((value >= 0) & (value <= 1)).all()):
        raise ValueError(f"{name} must be in [0, 1], got {value.tolist()}")
    return value.expand(like.shape[0])


def time_pair(t: Any, t_next: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """(t, t_next) as " b" rows; ValueError unless 0 <= t_next < t <= 1 in every row.

    >>> time_pair(0.5, 0.75, torch.zeros(1, 3))
    Traceback (most recent call last):
    ValueError: t_next must be < t (time runs from 1 to 0), got t [0.5], t_next [0.75]
    """
    now, then = time_rows("t", t, like), time_rows("t_next", t_next, like)
    if not bool((then < now).all()):
        raise ValueError(f"t_next must be < t (time runs from 1 to 0), got t {now.tolist()}, t_next {then.tolist()}")
    return now, then


def column(rows: Tensor, like: Tensor) -> Tensor:
    """A " b" tensor reshaped to (b, 1, ..., 1), to be multiplied with `like` " b *d".

    >>> column(torch.zeros(2), torch.zeros(2, 3, 4)).shape
    torch.Size([2, 1, 1])
    """
    return rows.reshape(-1, *[1] * (like.ndim - 1))


def require_same_keys(**mappings: Mapping[str, Tensor]) -> None:
    """ValueError unless all mappings hold the same names with the same shapes, printing the difference.

    >>> require_same_keys(params={"w": torch.zeros(1)}, behaviour={"b": torch.zeros(1)})
    Traceback (most recent call last):
    ValueError: params and behaviour differ in names: only in params ['w'], only in behaviour ['b']
    """
    (first, a), *others = mappings.items()
    for name, b in others:
        if a.keys() != b.keys():
            raise ValueError(
                f"{first} and {name} differ in names: only in {first} {sorted(a.keys() - b.keys())}, "
                f"only in {name} {sorted(b.keys() - a.keys())}"
            )
        for key in a:
            if a[key].shape != b[key].shape:
                raise ValueError(f"{key!r}: {shapes(**{first: a[key], name: b[key]})}")


def require_images(name: str, images: Any, *, ranks: tuple[int, ...]) -> None:
    """ValueError unless `images` is a torch.uint8 tensor " b h w 3" (rank 4) or " b f h w 3" (rank 5), as `ranks` allows.

    >>> require_images("ocr", torch.zeros(1, 3, 8, 8), ranks=(4,))
    Traceback (most recent call last):
    ValueError: ocr: images must be a torch.uint8 tensor (b h w 3), got torch.float32 (1, 3, 8, 8)
    """
    axes = " or ".join({4: "b h w 3", 5: "b f h w 3"}[rank] for rank in ranks)
    good = isinstance(images, Tensor) and images.dtype == torch.uint8 and images.ndim in ranks and images.shape[-1] == 3
    if not good:
        got = f"{images.dtype} {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"{name}: images must be a torch.uint8 tensor ({axes}), got {got}")


def require_call(name: str, images: Any, prompts: Any, *, ranks: tuple[int, ...] = (4, 5)) -> None:
    """ValueError unless a reward is called with images of one of the ranks and one prompt, a string, for each.

    >>> require_call("ocr", torch.zeros(2, 8, 8, 3, dtype=torch.uint8), ["a cat"])
    Traceback (most recent call last):
    ValueError: ocr: 2 images (2, 8, 8, 3) but 1 prompts
    """
    require_images(name, images, ranks=ranks)
    listed = hasattr(prompts, "__len__") and not isinstance(prompts, str | bytes)
    if not listed or not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError(f"{name}: prompts must be a sequence of strings, got {prompts!r}")
    if len(prompts) != len(images):
        raise ValueError(f"{name}: {len(images)} images {tuple(images.shape)} but {len(prompts)} prompts")
