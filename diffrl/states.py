"""The states of a window that an objective looks at, and what every objective says about them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffrl.checks import column, require_count
from diffrl.rollouts import subset_of_steps
from diffrl.sampling import latent_mean
from diffrl.types import Cond, Metrics, Velocity, Window

StepsPerSample = int | Callable[[int], int] | None


class States(NamedTuple):
    """The trained states of a window, flattened to w = samples x trained steps rows, sample-major."""

    x_t: Float[Tensor, " w *d"]
    x_next: Float[Tensor, " w *d"]
    v_old: Float[Tensor, " w *d"]
    t: Float[Tensor, " w"]
    t_next: Float[Tensor, " w"]
    std: Float[Tensor, " w"]
    log_prob: Float[Tensor, " w"]
    rows: Int[Tensor, " w"]
    cond: Cond
    columns: Int[Tensor, " w"]
    x_0: Float[Tensor, " w *d"]


def window_states(window: Window, *, steps_per_sample: StepsPerSample = None) -> States:
    """Every kept step of every sample of the window, or a seeded random `steps_per_sample` of them per trajectory (a
    number, or a function of how many are kept); of `window.pairs`, where it is given, exactly those.

    >>> from diffrl.types import Trajectory
    >>> x, t = torch.zeros(2, 2, 1), torch.tensor([0.5, 0.25])  # two samples, two kept steps
    >>> walk = Trajectory(x[0], x, x, x, t, t / 2, x[..., 0], x[..., 0], None)
    >>> s = window_states(Window(walk, torch.zeros(2), {}, {}))
    >>> s.rows.tolist(), s.t.tolist()
    ([0, 0, 1, 1], [0.5, 0.25, 0.5, 0.25])
    """
    tr = window.trajectory
    if window.pairs is None:
        pairs = trained_pairs(window, steps_per_sample=steps_per_sample)
    else:
        pairs = _checked_pairs(window.pairs, tuple(tr.std.shape)).to(tr.t.device)
    rows, columns = pairs.unbind(1)
    pick = {name: getattr(tr, name)[rows, columns] for name in ("x_t", "x_next", "v", "std", "log_prob")}
    cond = {name: value[rows.to(value.device)] for name, value in window.cond.items()}
    return States(
        x_t=pick["x_t"],
        x_next=pick["x_next"],
        v_old=pick["v"],
        t=tr.t[columns],
        t_next=tr.t_next[columns],
        std=pick["std"],
        log_prob=pick["log_prob"],
        rows=rows,
        cond=cond,
        columns=columns,
        x_0=tr.x_0[rows],
    )


def trained_pairs(window: Window, *, steps_per_sample: StepsPerSample = None) -> Int[Tensor, " w 2"]:
    """(row, column) of every state that an objective with these steps_per_sample trains, sample-major; whatever
    `window.pairs` says.

    >>> from diffrl.types import Trajectory
    >>> walk = Trajectory(*[None] * 4, torch.tensor([0.5, 0.25]), None, torch.zeros(2, 2), None, None)
    >>> trained_pairs(Window(walk, torch.zeros(2), {}, {})).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    tr = window.trajectory
    b, s = tr.std.shape
    size = steps_per_sample(s) if callable(steps_per_sample) else steps_per_sample
    require_steps_per_sample(size)
    if size is None or size == s:
        columns = repeat(torch.arange(s, device=tr.t.device), "s -> b s", b=b)
    elif tr.seeds is None:
        raise ValueError("a random subset of steps per trajectory needs a trajectory with seeds")
    else:
        columns = subset_of_steps(tr.seeds, s, size)
    columns = rearrange(columns, "b s -> (b s)")
    rows = torch.arange(b, device=columns.device).repeat_interleave(len(columns) // max(b, 1))
    return torch.stack([rows, columns], dim=1)


def _checked_pairs(pairs: Tensor, shape: tuple[int, ...]) -> Tensor:
    """ValueError unless (row, column) integers inside `shape`, one at least, none twice."""
    good = isinstance(pairs, Tensor) and pairs.ndim == 2 and pairs.shape[1:] == (2,) and len(pairs) > 0
    if not good or pairs.is_floating_point() or pairs.dtype == torch.bool:
        raise ValueError(f"window.pairs must be integers (w, 2), w > 0, got {pairs!r:.100}")
    if bool((pairs < 0).any()) or bool((pairs >= torch.tensor(shape, device=pairs.device)).any()):
        raise ValueError(f"window.pairs must be (row, column) inside {shape}, got {pairs.tolist()!r:.100}")
    if len(pairs.unique(dim=0)) != len(pairs):
        raise ValueError(f"window.pairs holds a state twice: {pairs.tolist()!r:.100}")
    return pairs


def finite_states(s: States, rewarded: Bool[Tensor, " b"]) -> tuple[States, Bool[Tensor, " w"]]:
    """(states, which of them hold numbers): those of samples without reward that do not become 0, since nan times a
    gradient of 0 is nan.

    >>> x, row = torch.tensor([[torch.nan]]), torch.tensor([0])
    >>> s = States(x, x, x, *[None] * 4, row, {}, row, x)
    >>> clean, usable = finite_states(s, torch.tensor([False]))
    >>> clean.x_t, usable
    (tensor([[0.]]), tensor([False]))
    """
    latents = (s.x_t, s.x_next, s.v_old, s.x_0)
    finite = torch.stack([torch.isfinite(x).reshape(len(s.rows), -1).all(1) for x in latents]).all(0)
    usable = rewarded[s.rows] | finite
    x_t, x_next, v_old, x_0 = (torch.where(column(usable, x), x, 0.0) for x in latents)
    return s._replace(x_t=x_t, x_next=x_next, v_old=v_old, x_0=x_0), usable


def has_reward(window: Window) -> Bool[Tensor, " b"]:
    """The credit's "has_reward", else where the window's rewards are finite.

    >>> has_reward(Window(None, torch.tensor([0.5, torch.nan]), {}, {}))
    tensor([ True, False])
    """
    return window.credit.get("has_reward", torch.isfinite(window.rewards))


def credit_of(window: Window, name: str) -> Tensor:
    """What the credit says under this name. ValueError: it does not (pieces of two families do not fit together).

    >>> credit_of(Window(None, torch.zeros(1), {}, {"direction": torch.zeros(1, 2)}), "advantage")
    Traceback (most recent call last):
    ValueError: this objective reads credit['advantage'], and the credit has ['direction']
    """
    if name not in window.credit:
        raise ValueError(f"this objective reads credit[{name!r}], and the credit has {sorted(window.credit)}")
    return window.credit[name]


def loss_weights(window: Window, keep: Bool[Tensor, " w"] | Float[Tensor, " w"], rows: Int[Tensor, " w"]) -> Tensor:
    """keep as it is, or times the credit's loss weight of each sample.

    >>> window = Window(None, torch.zeros(2), {}, {"weight": torch.tensor([0.5, 2.0])})
    >>> loss_weights(window, torch.tensor([True, False, True]), torch.tensor([0, 0, 1]))
    tensor([0.5000, 0.0000, 2.0000])
    """
    weight = window.credit.get("weight")
    return keep if weight is None else keep * weight[rows]


class Mean(float):
    """A metric that is the mean of `count` numbers: with it the parts of a batch that was cut tell what the whole would, also
    where some of them hold fewer that count, or none.

    >>> part = Mean(0.5, 3)
    >>> part, part.count
    (0.5, 3)
    """

    count: int

    def __new__(cls, value: float, count: int) -> "Mean":
        mean = super().__new__(cls, value)
        mean.count = count
        return mean

    def __getnewargs__(self) -> tuple[float, int]:  # type: ignore[override]
        return float(self), self.count


def mean_over(values: Tensor, among: Bool[Tensor, " w"]) -> Mean:
    """The mean of those `values` that are `among`; nan of none.

    >>> mean_over(torch.tensor([1.0, 5.0, 3.0]), torch.tensor([True, False, True]))
    2.0
    """
    return Mean(float(values.detach()[among].mean()), int(among.sum()))


def share_of(what: Bool[Tensor, " w"], among: Bool[Tensor, " w"]) -> Mean:
    """The share of `among` that is also `what`; 0 of none.

    >>> share_of(torch.tensor([True, True, False]), torch.tensor([True, False, True]))
    0.5
    """
    return Mean(float((what & among).sum() / among.sum().clamp_min(1)), int(among.sum()))


def drift_rms(v: Tensor, v_old: Tensor, usable: Tensor) -> Mean:
    """rms(v - v_old) over the usable states.

    >>> v, v_old = torch.tensor([[3.0, 0.0], [9.0, 9.0]]), torch.tensor([[0.0, 3.0], [0.0, 0.0]])
    >>> drift_rms(v, v_old, torch.tensor([True, False]))
    3.0
    """
    square = mean_over(latent_mean((v.detach() - v_old.detach()) ** 2), usable)
    return Mean(square**0.5, square.count)


def by_step(name: str, values: Float[Tensor, " w"], s: States, usable: Bool[Tensor, " w"]) -> Metrics:
    """The mean of `values` at each step of the grid: {"name/t=0.900": ...}.

    >>> s = States(*[None] * 3, torch.tensor([0.5, 0.25, 0.5]), *[None] * 5, torch.tensor([0, 1, 0]), None)
    >>> by_step("std", torch.tensor([1.0, 5.0, 3.0]), s, torch.ones(3, dtype=torch.bool))
    {'std/t=0.500': 2.0, 'std/t=0.250': 5.0}
    """
    found: Metrics = {}
    for j in s.columns.unique().tolist():
        here = (s.columns == j) & usable
        if bool(here.any()):
            found[f"{name}/t={float(s.t[here][0]):.3f}"] = mean_over(values, here)
    return found


def reference_velocity(velocity: Velocity, window: Window, s: States) -> Tensor:
    """v at the same states under the reference params, without gradient.

    >>> window = Window(None, torch.zeros(1), {}, {})
    >>> reference_velocity(lambda params, x_t, t, cond: x_t, window, None)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: beta > 0 regularises toward reference params: window.reference is None ...
    """
    if window.reference is None:
        raise ValueError(
            "beta > 0 regularises toward reference params: window.reference is None (train keeps one where the Algorithm has needs_reference=True)"
        )
    with torch.no_grad():
        return velocity(window.reference, s.x_t, s.t, s.cond)


def require_steps_per_sample(steps_per_sample: StepsPerSample) -> None:
    """ValueError unless None, a function, or a count.

    >>> require_steps_per_sample(0)
    Traceback (most recent call last):
    ValueError: steps_per_sample must be an integer >= 1, got 0
    """
    if steps_per_sample is not None and not callable(steps_per_sample):
        require_count("steps_per_sample", steps_per_sample)
