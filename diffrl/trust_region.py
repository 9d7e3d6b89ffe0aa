"""How far an update may go: KL proxies, masks, and averages of parameters."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from diffrl.checks import (
    promote,
    require_batch,
    require_count,
    require_number,
    require_rows,
    require_same_keys,
    time_pair,
)
from diffrl.sampling import Time, flow_sde_step, latent_mean, transition_kl
from diffrl.types import Params, Step


def kl_proxy(
    v: Float[Tensor, " b *d"],
    v_old: Float[Tensor, " b *d"],
    t: Time,
    t_next: Time,
    *,
    step: Step = flow_sde_step,
) -> Float[Tensor, " b"]:
    """m = mean_d (mean_v - mean_v_old)^2/(2 std^2): KL between the two Gaussian transitions that an ODE step from t to
    t_next would be under the reference kernel `step` (2610.12572; closed forms derived here). The state cancels.

    Flow-SDE: m = (D/2)((1-t)/t)(1/eta + eta/2)^2 mean_d d^2 with d = v - v_old; at t = 1: (D/2)(1 - t_next)/eta^2 mean_d d^2.
    Gradient flows through v. ValueError: shapes, times, or a kernel without noise there (Euler; CPS at t_next = 0).

    >>> v = torch.tensor([[0.7]])
    >>> kl_proxy(v, 0 * v, 1.0, 0.5)  # (1/4)(1/2)/.49 x .49
    tensor([0.1250])
    """
    require_batch(v=v, v_old=v_old)
    v, v_old = promote(v, v_old.detach())
    now, then = time_pair(t, t_next, v)
    origin = torch.zeros_like(v)
    (mean, std), (mean_old, _) = step(origin, v, now, then), step(origin, v_old, now, then)
    if not bool((std > 0).all()):
        raise ValueError(
            f"the reference kernel is deterministic at t {now.tolist()}, t_next {then.tolist()}: no KL there"
        )
    return transition_kl(mean, mean_old, std)


def keep_inside(
    v: Float[Tensor, " b *d"],
    v_old: Float[Tensor, " b *d"],
    target: Float[Tensor, " b *d"],
    kl: Float[Tensor, " b"],
    *,
    radius: float = 1e-5,
) -> Bool[Tensor, " b"]:
    """False iff kl >= radius and <v - v_old, target - v> > 0: a state beyond the radius is dropped only where its force
    would carry it further out (2610.12572). radius inf: never. Detached. ValueError: shapes, radius < 0.

    >>> one, far = torch.tensor([[1.0]]), torch.tensor([1.0])
    >>> keep_inside(0.1 * one, 0 * one, one, far), keep_inside(1.2 * one, 0 * one, one, far)
    (tensor([False]), tensor([True]))
    """
    b = require_batch(v=v, v_old=v_old, target=target)
    require_rows(b, kl=kl)
    radius = require_number("radius", radius, low=0, infinite=True)
    v, v_old, target = promote(v.detach(), v_old.detach(), target.detach())
    outward = latent_mean((v - v_old) * (target - v)) > 0
    return ~((kl.detach() >= radius) & outward)


def keep_divergence(
    kl: Float[Tensor, " b"], ratio: Float[Tensor, " b"], advantages: Float[Tensor, " b"], *, radius: float = 1e-5
) -> Bool[Tensor, " b"]:
    """Flow-DPPO's mask (2606.11025): False iff kl >= radius and the ratio already moved the way the advantage pushes
    (rho > 1 and A > 0, or rho < 1 and A < 0). Detached. ValueError: shapes, radius < 0.

    >>> far, ratio = torch.ones(3), torch.tensor([1.1, 1.1, 0.9])
    >>> keep_divergence(far, ratio, torch.tensor([1.0, -1.0, -1.0]))
    tensor([False,  True, False])
    """
    b = require_batch(kl=kl, ratio=ratio, advantages=advantages)
    require_rows(b, kl=kl)
    radius = require_number("radius", radius, low=0, infinite=True)
    pushed = ((ratio > 1) & (advantages > 0)) | ((ratio < 1) & (advantages < 0))
    return ~((kl >= radius) & pushed).detach()


def ema(old: Params, new: Params, *, decay: float) -> dict[str, Tensor]:
    """decay * old + (1 - decay) * new, name by name, as fresh detached tensors: never aliases or changes its arguments.

    A steady drift Delta per update lags by decay Delta/(1 - decay) after it. decay 0: a copy of new; 1: of old.
    ValueError: differing names or shapes, decay outside [0, 1].

    >>> ema({"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}, decay=0.75)
    {'w': tensor([1.5000])}
    """
    decay = require_number("decay", decay, low=0, high=1)
    require_same_keys(old=old, new=new)
    if decay in (0.0, 1.0):  # exactly one of them, also where the other is not finite
        one = new if decay == 0 else old
        return {name: one[name].detach().clone() for name in old}
    return {name: decay * old[name].detach() + (1 - decay) * new[name].detach() for name in old}


def ramp(i: int, *, rate: float, cap: float, flat: int = 0) -> float:
    """0 while i < flat, then min(rate (i - flat), cap): DiffusionNFT's decay schedule, i = optimizer steps so far.

    ValueError: i < 0, rate < 0, cap outside [0, 1], flat < 0.

    >>> ramp(100, rate=0.0075, cap=0.999, flat=75)
    0.1875
    """
    i, flat = require_count("i", i, low=0), require_count("flat", flat, low=0)
    rate, cap = require_number("rate", rate, low=0), require_number("cap", cap, low=0, high=1)
    return 0.0 if i < flat else min(rate * (i - flat), cap)


class AdaptiveRadius:
    """A radius that follows the policy: the q-quantile of `kl` over the last `updates` updates, never the current one.

    Derived here: at a stationary drift at most 1 - q of the states lie beyond it. per_step: one radius per step index,
    which removes the fixed radius's tightening toward low noise. Until an update was seen: `first`; never below `floor`;
    updates whose largest kl is below `floor` (the on-policy first ones) are not counted.

    Called as radius(step indices " w", kl " w") -> " w" by `objectives.guided_regression`, once per micro-batch; `advance`
    ends an update (the loop calls it after the optimizer's step), so that the split into micro-batches changes nothing.
    It has a memory (`history`), which no checkpoint holds: every call of `loop.train`, also one that resumes, begins by
    `reset`. ValueError: q outside [0, 1], counts < 1, first or floor <= 0.
    """

    def __init__(
        self, *, q: float = 0.5, updates: int = 20, floor: float = 1e-7, first: float = 1e-5, per_step: bool = False
    ):
        self.q = require_number("q", q, low=0, high=1)
        self.updates = require_count("updates", updates)
        self.floor = require_number("floor", floor, low=0, open_low=True)
        self.first = require_number("first", first, low=0, open_low=True)
        self.per_step = per_step
        self.reset()

    def reset(self) -> None:
        """Forget everything: the next radius is `first`."""
        self.history: list[tuple[Tensor, Tensor]] = []
        self._current: list[tuple[Tensor, Tensor]] = []

    def __call__(self, columns: Tensor, kl: Tensor) -> Tensor:
        seen, kl = kl.detach().double().cpu(), kl.detach()
        columns = columns.cpu() if self.per_step else torch.zeros_like(columns.cpu())
        limit = torch.full_like(seen, self.first)
        if self.history:
            old = [torch.cat(parts) for parts in zip(*self.history, strict=True)]
            for j in columns.unique():
                values = old[1][old[0] == j]
                if len(values):
                    limit[columns == j] = max(float(torch.quantile(values, self.q)), self.floor)
        usable = torch.isfinite(seen)
        self._current.append((columns[usable], seen[usable]))
        return limit.to(kl)

    def advance(self) -> None:
        """The update is over: what it showed counts from now on."""
        told, self._current = self._current, []
        if not told:
            return
        columns, seen = (torch.cat(parts) for parts in zip(*told, strict=True))
        if len(seen) and float(seen.max()) >= self.floor:
            self.history = [*self.history, (columns, seen)][-self.updates :]
