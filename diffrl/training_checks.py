"""What `loop.train` refuses, before anything runs and of what an algorithm hands back."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from diffrl.algorithms import live
from diffrl.checks import require_cond, require_count, require_same_keys
from diffrl.states import Mean
from diffrl.types import Algorithm, Batch, Params


def checked_reference(algorithm: Algorithm, reference: Params | None, params: Params, start: int) -> Params | None:
    """A copy of the reference where the algorithm needs one, which later updates must not touch; of the live params where
    training begins. ValueError: none where training goes on, no params by name, other names or shapes.

    >>> from diffrl.algorithms import flow_grpo
    >>> params = {"w": torch.ones(1)}
    >>> checked_reference(flow_grpo(), None, params, 0)["w"] is params["w"]  # a copy
    False
    """
    if not algorithm.needs_reference and reference is None:
        return None
    if reference is None and start > 0:
        raise ValueError(
            f"start={start}: this algorithm needs reference=, a snapshot of the params training began with"
        )
    reference = params if reference is None else reference
    if not isinstance(reference, Mapping):
        raise ValueError(f"reference must be params by name, got {reference!r}")
    require_same_keys(params=params, reference=reference)
    return {name: reference[name].detach().clone() for name in params}


def checked_groups(per_iteration: int | None, prompts: int, ranks: int) -> int:
    """Groups per iteration, g: `per_iteration`, or all prompts. ValueError: no count, more than there are, or not a multiple
    of the number of ranks, as a group stays with one.

    >>> checked_groups(6, 8, 4)
    Traceback (most recent call last):
    ValueError: 6 prompts per iteration cannot be dealt evenly to 4 ranks: groups stay whole
    """
    g = prompts if per_iteration is None else require_count("prompts_per_iteration", per_iteration)
    if g > prompts:
        raise ValueError(f"prompts_per_iteration={g} of only {prompts} prompts")
    if g % ranks:
        raise ValueError(f"{g} prompts per iteration cannot be dealt evenly to {ranks} ranks: groups stay whole")
    return g


def check_sizes(**sizes: int | None) -> None:
    """ValueError unless each is None or a count, and micro_batch and pack are not both given: one counts samples, one states.

    >>> check_sizes(micro_batch=4, pack=16)
    Traceback (most recent call last):
    ValueError: micro_batch=4 counts samples and pack=16 states: give one of them
    """
    for name, size in sizes.items():
        if size is not None:
            require_count(name, size)
    if sizes.get("micro_batch") is not None and sizes.get("pack") is not None:
        raise ValueError(
            f"micro_batch={sizes['micro_batch']} counts samples and pack={sizes['pack']} states: give one of them"
        )


def check_reward(reward: Any) -> None:
    """ValueError unless the reward can be called.

    >>> check_reward("ocr")
    Traceback (most recent call last):
    ValueError: reward must be a callable (images, prompts) -> values, got 'ocr'
    """
    if not callable(reward):
        raise ValueError(f"reward must be a callable (images, prompts) -> values, got {reward!r}")


def checked_prompts(prompts: Sequence[str], images: Sequence[Any] | Tensor | None) -> list[str]:
    """The prompts as a list. ValueError: none, no strings, empty ones, without an order; images of another number.

    >>> checked_prompts(["a cat", " "], None)
    Traceback (most recent call last):
    ValueError: prompts[1] must be a non-empty string, got ' '
    """
    indexed = hasattr(prompts, "__getitem__") and not isinstance(prompts, str | Mapping)  # a set has no order to repeat
    if not indexed or not len(prompts):
        raise ValueError(f"prompts must be a non-empty sequence of strings, got {prompts!r}")
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f"prompts[{i}] must be a non-empty string, got {prompt!r}")
    if images is not None and (not hasattr(images, "__len__") or len(images) != len(prompts)):
        got = f"{len(images)} images" if hasattr(images, "__len__") else repr(images)
        raise ValueError(f"images must be one per prompt: {got}, {len(prompts)} prompts")
    return list(prompts)


def check_behaviour(algorithm: Algorithm, behaviour: Params | None, params: Params, start: int) -> None:
    """ValueError: behaviour params of other names or shapes; a warning where a resumed run needs them and has none.

    No example: `checks.require_same_keys` has one.
    """
    if behaviour is not None:
        if not isinstance(behaviour, Mapping):
            raise ValueError(f"behaviour must be params by name, got {behaviour!r}")
        require_same_keys(params=params, behaviour=behaviour)
    elif start > 0 and algorithm.behaviour is not live:
        text = f"start={start} without behaviour=: the live params roll out first, which is another run than the one resumed"
        warnings.warn(text, stacklevel=3)


def check_algorithm(algorithm: Algorithm, group_size: int) -> None:
    """ValueError: no Algorithm, or a group_size that its updates, pool or kept samples rule out.

    >>> from diffrl.algorithms import art
    >>> check_algorithm(art(updates=4), 2)
    Traceback (most recent call last):
    ValueError: group_size=2 cannot be split into 4 updates
    """
    if not hasattr(algorithm, "updates"):
        raise ValueError(f"algorithm must be an Algorithm such as art(), got {algorithm!r}")
    if require_count("updates", algorithm.updates) > group_size:
        raise ValueError(f"group_size={group_size} cannot be split into {algorithm.updates} updates")
    if algorithm.pool is not None and algorithm.pool < group_size:
        raise ValueError(f"group_size={group_size} is larger than the algorithm's pool of {algorithm.pool}")
    if algorithm.kept is not None and algorithm.kept != group_size:
        raise ValueError(
            f"group_size={group_size} must be the {algorithm.kept} samples per prompt that collect keeps (sol_rl: 2 keep)"
        )


def check_model(model: Any) -> None:
    """ValueError unless the model has the five functions and the mapping of params that the loop uses.

    >>> from diffrl.tasks.toy import toy_model
    >>> check_model(toy_model()._replace(latent_shape=(2,)))
    Traceback (most recent call last):
    ValueError: model.latent_shape must be a function, got (2,)
    """
    for name in ("velocity", "encode", "decode", "latent_shape", "times"):
        if not callable(getattr(model, name, None)):
            raise ValueError(f"model.{name} must be a function, got {getattr(model, name, None)!r:.80}")
    params = getattr(model, "params", None)
    if not isinstance(params, Mapping) or not all(isinstance(p, Tensor) for p in params.values()):
        raise ValueError(f"model.params must be a mapping of tensors by name, got {params!r:.80}")


def check_optimizer(optimizer: torch.optim.Optimizer, params: Params) -> None:
    """ValueError unless the optimizer steps some of the params and nothing else.

    >>> check_optimizer(torch.optim.SGD([torch.zeros(1)], lr=0.1), {"w": torch.zeros(1)})
    Traceback (most recent call last):
    ValueError: optimizer must step model.params: of its 1 tensors 0 are among the model's 1
    """
    if not params:
        raise ValueError("model.params is empty: nothing to train")
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(f"optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    ours = {id(p) for p in params.values()}
    if not stepped & ours or stepped - ours:
        raise ValueError(
            f"optimizer must step model.params: of its {len(stepped)} tensors {len(stepped & ours)} are among "
            f"the model's {len(ours)}"
        )


def check_batch(batch: Batch, g: int, k: int) -> None:
    """ValueError for what a collect of one's own may get wrong: rows of other samples, cond per sample, parts of the pool.

    No example: what it refuses is a batch of a dozen fields.
    """
    b, tr = g * k, batch.trajectory
    if tuple(batch.rewards.shape) != (g, k) or tr.x_0.shape[0] != b:
        raise ValueError(
            f"collect must return rewards ({g}, {k}) and {b} samples, got {tuple(batch.rewards.shape)} and {tr.x_0.shape[0]}"
        )
    for name in ("x_t", "x_next", "v", "std", "log_prob"):
        if tuple(getattr(tr, name).shape[:2]) != (b, len(tr.t)):
            got = tuple(getattr(tr, name).shape)
            raise ValueError(f"trajectory.{name} must have {b} samples x {len(tr.t)} kept steps, got shape {got}")
    if tr.seeds is not None and len(tr.seeds) != b:
        raise ValueError(f"trajectory.seeds must hold one seed per sample ({b}), got {len(tr.seeds)}")
    if batch.parts is not None and tuple(batch.parts.shape[:2]) != (g, k):
        raise ValueError(f"parts must be ({g}, {k}, rewards), got {tuple(batch.parts.shape)}")
    require_cond(batch.cond, g)


def check_credit(credit: Mapping[str, Tensor], g: int, k: int) -> None:
    """ValueError unless every tensor of the credit has one row per sample.

    >>> check_credit({"advantage": torch.zeros(2)}, 2, 4)
    Traceback (most recent call last):
    ValueError: credit['advantage'] must have one row per sample (8), got (2,)
    """
    b = g * k
    for name, value in credit.items():
        if not isinstance(value, Tensor) or value.shape[:1] != (b,):
            got = tuple(value.shape) if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"credit[{name!r}] must have one row per sample ({b}), got {got}")


def check_rows(name: str, value: Any, lead: tuple[int, ...], *, absent: bool = False) -> None:
    """ValueError unless a tensor whose first axes are `lead`; absent: or None.

    >>> check_rows("score", torch.zeros(2, 3), (2,)) is None
    True
    """
    if value is None and absent:
        return
    if not isinstance(value, Tensor) or tuple(value.shape[: len(lead)]) != lead:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__} {value!r:.80}"
        raise ValueError(f"{name} must be a tensor with leading axes {lead}, got {got}")


def numbers_by_name(name: str, told: Any) -> dict[str, float]:
    """Metrics as floats (a `Mean` as it is); {} of None. ValueError: no numbers by name.

    >>> numbers_by_name("commit", {"loss": 1})
    {'loss': 1.0}
    """
    try:
        return {str(key): value if isinstance(value, Mean) else float(value) for key, value in dict(told or {}).items()}
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} must return numbers by name, or None, got {told!r:.80}") from None
