# %% [markdown]
# # 03 · The theory, in closed form
#
# The statements that DiffusionART and DiffusionNFT rest on, each drawn twice: as a curve from its formula, and as points measured by calling the
# library's functions (mostly through autograd) on a world so small that every expectation is an exact sum. Curve and points should be one; where a
# statement stops being true, that is drawn too.
#
# Signs as in page 02: $x_t = (1-t)x_0 + t\varepsilon$, $v_j = \varepsilon - x_0$ for one sample $j$, $v = E[v_j \mid x_t]$ for a model; $n$ numbers
# make one sample. $r \in [0, 1]$ is the probability that a sample is good, $q = E[r \mid s]$ at a state $s = x_t$, and
# $g = \mathrm{Cov}(r, v_j \mid s)$ is *guidance*. (DiffusionART's paper has $u = x_0 - \varepsilon$ there, so this $g$ is minus the
# paper's: it says where the *velocity* should go. A sample goes the other way: $v_j = (s - x_0)/t$, so $g = -\mathrm{Cov}(r, x_0 \mid s)/t$.)

# %%
# %matplotlib inline
import math
from functools import partial

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap

from diffrl.guidance import aggregate_direction, guided_velocity, reward_covariance
from diffrl.losses import flat_weight, inverse_abs_error, nft, nft_negative, nft_positive, velocity_matching
from diffrl.sampling import euler_step, predict_x_0, time_grid
from diffrl.trust_region import ema, keep_inside, kl_proxy

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
plt.rcParams["figure.dpi"] = 75
BLUE, ORANGE, GREEN, PURPLE, GREY = "#2b6cb0", "#dd6b20", "#2f855a", "#805ad5", "#8a8a8a"
normal = lambda *shape, seed=0: torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

# %% [markdown]
# ## A world of six points
#
# Six possible pictures $x_j$ in the plane, with probabilities $p_j$ and rewards $r_j$. At a state $s$ the posterior is
# $w_j \propto p_j \exp(-|s - (1-t)x_j|^2 / 2t^2)$. `tilt` adds to its logarithm: a law $\propto p\,e^{\text{tilt}}$.

# %%
x = torch.tensor([[-1.5, 0.2], [-0.8, -1.1], [0.1, 1.3], [0.6, -0.4], [1.4, 0.9], [1.6, -1.2]])
p = torch.tensor([0.20, 0.15, 0.15, 0.20, 0.15, 0.15])
r = torch.tensor([0.10, 0.35, 0.60, 0.40, 0.95, 0.70])


def posterior(s, t, tilt=0.0):
    """w " n 6" at states s " n 2"."""
    gap = (s[:, None] - (1 - t) * x).square().sum(2)
    return torch.softmax(p.log() + tilt - gap / (2 * t**2), 1)


def sample_velocities(s, t):
    """v_j = eps_j - x_j " n 6 2": which straight line leads from picture j through s."""
    return (s[:, None] - (1 - t) * x) / t - x


def moments(w, v_j):
    """q " n", v " n 2", g " n 2" under weights w " n 6"."""
    q, v = w @ r, torch.einsum("nm,nmd->nd", w, v_j)
    return q, v, torch.einsum("nm,m,nmd->nd", w, r, v_j) - q[:, None] * v


# %% [markdown]
# ## Lemma 2: a covariance is a direction
#
# Prefer good pictures a little: $p_\tau \propto p\,e^{\tau R}$. Where does the mean picture go?
# $\frac{d}{d\tau}E_\tau[x_0]\big|_0 = \mathrm{Cov}(R, x_0)$. The covariance needs samples and rewards, and no gradient of the reward.

# %%
taus = torch.linspace(-6, 6, 121)
means = torch.stack([torch.softmax(p.log() + tau * r, 0) @ x for tau in taus])
draws = torch.multinomial(p, 4000, replacement=True, generator=torch.Generator().manual_seed(0))
C = reward_covariance(r[draws][None], x[draws][None])[0]
exact = (p * r) @ x - (p @ r) * (p @ x)

figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
dots = axes[0].scatter(*x.T, c=r, s=1500 * p, cmap="viridis", vmin=0, vmax=1)
figure.colorbar(dots, ax=axes[0], label="reward")
axes[0].plot(*means.T, color=GREY, label=r"mean of $p\,e^{\tau R}$, $-6 \leq \tau \leq 6$")
centre = p @ x
axes[0].annotate("", centre + 3 * C, centre, arrowprops={"arrowstyle": "->", "color": ORANGE, "linewidth": 2.5})
axes[0].annotate("3 Cov(R, x_0)", centre + 3 * C + torch.tensor([-0.55, 0.12]), color=ORANGE, weight="bold")
axes[0].set(xlim=(-2.3, 2.3), ylim=(-1.9, 2.1), aspect="equal")
axes[0].legend(fontsize=9, loc="upper left")
along = exact / exact.norm()
axes[1].plot(taus, (means - centre) @ along, color=GREY, label="exact mean, along the covariance")
axes[1].plot(taus, taus * exact.norm(), color=ORANGE, label=r"$\tau\,|\mathrm{Cov}|$")
axes[1].plot(taus[::15], taus[::15] * (C @ along), "o", color=BLUE, label="reward_covariance of 4000 samples")
axes[1].set(xlabel=r"$\tau$", ylim=(-1.6, 1.6))
axes[1].legend(fontsize=9)
print(f"exact {exact.tolist()}, from samples {C.tolist()}")

# %% [markdown]
# The orange arrow touches the grey curve where it starts, and only there: a covariance is the *first* step of the tilt.
#
# ## The fine print: one direction for all states is exact at pure noise only
#
# $G$ is one direction per prompt, used at every state of every trajectory. The exact tilt of the velocity is per state,
# $-\mathrm{Cov}(R, v_j \mid s) = \mathrm{Cov}(R, x_0 \mid s)/t$. Their means agree at $t = 1$, where the state says nothing about the picture. Two
# things happen below. The state comes to know which picture it will become, so $\mathrm{Cov}(R, x_0 \mid s)$, what is left to steer, only shrinks
# (left). But less time is left too, and the same shift of the picture takes a velocity $1/t$ as large: the tilt of the velocity *rises* before it
# vanishes (right). For a linear reward $R = a\,x_0$ on Gaussian data it is $|a| S^2 t / ((1-t)^2 S^2 + t^2)$.

# %%
def share_of_tilt(t, n=4000):
    """|mean over states of Cov(R, v_j|s)| / |Cov(R, x_0)|, with states drawn from p_t."""
    j = torch.multinomial(p, n, replacement=True, generator=torch.Generator().manual_seed(1))
    s = (1 - t) * x[j] + t * normal(n, 2, seed=2)
    _, _, g = moments(posterior(s, t), sample_velocities(s, t))
    return float(g.mean(0).norm() / exact.norm())


ts = torch.linspace(0.02, 1, 99)
points = torch.linspace(0.05, 1, 20)
measured = torch.tensor([share_of_tilt(float(t)) for t in points])
figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
for std, colour in ((0.3, GREEN), (0.6, BLUE), (1.0, PURPLE)):
    curve = ts / ((1 - ts) ** 2 * std**2 + ts**2)
    axes[0].plot(ts, ts * curve, color=colour, label=f"Gaussian data, S = {std:g}: formula")
    axes[1].plot(ts, curve, color=colour)
axes[0].plot(points, points * measured, "o", color=ORANGE, label="six points, 4000 states each")
axes[1].plot(points, measured, "o", color=ORANGE)
for axis, title in zip(axes, ("tilt of the picture at a state", "tilt of the velocity: that over t")):
    axis.axhline(1, color=GREY, linestyle=":")
    axis.set(xlabel="t", title=title, ylim=(0, 2.4))
axes[0].set_ylabel("over the prompt's covariance")
axes[0].legend(fontsize=9, loc="upper left");

# %% [markdown]
# All meet at $t = 1$. For separate pictures (orange) nothing is left below $t \approx 0.2$: the choice has been made, and a $G$ trained
# there is noise.
#
# ## Lemma 1: good and bad lie on one line
#
# Let $v^+$ be the velocity of the good pictures (law $\propto r\,p$) and $v^-$ that of the bad ones. Then $q\,(v^+ - v) = (1-q)(v - v^-) = g$:
# whatever the picture, the three velocities lie on a line, and $v$ divides it in the ratio of $q$.

# %%
t = 0.6
s = torch.tensor([[0.35, 0.1]])
v_j = sample_velocities(s, t)
q, v, g = moments(posterior(s, t), v_j)
v_plus = torch.einsum("nm,nmd->nd", posterior(s, t, r.log()), v_j)
v_minus = torch.einsum("nm,nmd->nd", posterior(s, t, (1 - r).log()), v_j)

figure, axes = plt.subplots(1, 2, figsize=(10.5, 4), layout="constrained")
weights = posterior(s, t)[0]
axes[0].scatter(*v_j[0].T, s=900 * weights + 5, c=r, cmap="viridis", vmin=0, vmax=1, alpha=0.8)
axes[0].plot(*torch.cat([v_minus, v_plus]).T, color=GREY)
for point, name, colour, place in ((v_minus, "$v^-$", ORANGE, (0.1, 0.1)), (v, "$v$", "black", (0, -0.5)), (v_plus, "$v^+$", GREEN, (-0.55, -0.45))):
    axes[0].plot(*point[0], "o", color=colour, markersize=7)
    axes[0].annotate(name, point[0] + torch.tensor(place), color=colour, fontsize=13)
axes[0].set(aspect="equal", title=f"velocities at one state, q = {float(q):.2f}", xlim=(-3.4, 4.4), ylim=(-3.2, 3.2))

many = normal(300, 2, seed=4)
for time, colour, mark in ((0.3, GREEN, {"markersize": 11, "alpha": 0.35}), (0.6, BLUE, {"markersize": 4}), (1.0, ORANGE, {"marker": "D", "markersize": 8})):
    w, v_j = posterior(many, time), sample_velocities(many, time)
    q, v, g = moments(w, v_j)
    good, bad = (torch.einsum("nm,nmd->nd", posterior(many, time, tilt), v_j) for tilt in (r.log(), (1 - r).log()))
    axes[1].plot((q[:, None] * (good - v))[:, 0], ((1 - q)[:, None] * (v - bad))[:, 0], color=colour, label=f"t = {time:g}", **{"marker": ".", "linestyle": ""} | mark)
    gap = max(float((q[:, None] * (good - v) - g).abs().max()), float(((1 - q)[:, None] * (v - bad) - g).abs().max()))
    print(f"t = {time:g}: largest difference from g over 300 states {gap:.0e}")
axes[1].axline((0, 0), slope=1, color=GREY, zorder=0)
axes[1].set(xlabel="$q\\,(v^+ - v)$, first coordinate", ylabel="$(1-q)(v - v^-)$", title="300 states", aspect="equal")
axes[1].legend();

# %% [markdown]
# Left: each disc is where one of the six pictures would send this state, as large as it is likely and as bright as it is good. Right:
# at $t = 1$ all 300 states have the same $g$, as none of them knows anything: one diamond.
#
# ## Proposition 1: what DiffusionNFT's loss really pulls on
#
# NFT regresses $v_\text{old} + \beta d$ on the good and $v_\text{old} - \beta d$ on the bad samples, $d = v - v_\text{old}$. The force (minus the
# gradient) is
#
# | branches | force, over $2t^2/n$ |
# |---|---|
# | both | $2g + (2q-1)\,e - \beta d$ |
# | positive alone | $g + q\,e - q\,\beta d$ |
# | negative alone | $g - (1-q)\,e - (1-q)\,\beta d$ |
#
# with $e = v - v_\text{old}$ for the *exact* velocity $v$ of the samples: how far the old model is from the flow of its own samples. The term in
# $e$ is about the model, not about the reward.

# %%
def force(branch, s, t, v_old, d, beta, weight=flat_weight):
    """Minus the gradient of the expected loss at v = v_old + d, over 2 t^2/n with n = 2 numbers, by autograd; " m 2"."""
    m = len(s)
    v = (v_old + d).requires_grad_()
    rows = lambda y: y[:, None].expand(m, 6, 2).reshape(-1, 2)
    x_0 = x[None].expand(m, 6, 2).reshape(-1, 2)
    loss = branch(rows(v), rows(v_old), rows(s), x_0, t, r.repeat(m), beta=beta, weight=weight)
    expected = (posterior(s, t).reshape(-1) * loss).sum()
    return -torch.autograd.grad(expected, v)[0] / (2 * t**2 / 2)


s, t, beta = normal(80, 2, seed=5), 0.6, 0.5
q, v, g = moments(posterior(s, t), sample_velocities(s, t))
v_old, d = v + 0.4 * normal(80, 2, seed=6), 0.3 * normal(80, 2, seed=7)
e, q = v - v_old, q[:, None]
formulas = {
    "both": (nft, 2 * g + (2 * q - 1) * e - beta * d, BLUE),
    "positive alone": (nft_positive, g + q * e - q * beta * d, GREEN),
    "negative alone": (nft_negative, g - (1 - q) * e - (1 - q) * beta * d, ORANGE),
}
figure, axes = plt.subplots(1, 2, figsize=(10.5, 4), layout="constrained")
for axis, weight, title in zip(axes, (flat_weight, inverse_abs_error), ("flat weight: exact", "the published weight: another posterior")):
    for name, (branch, formula, colour) in formulas.items():
        measured = force(branch, s, t, v_old, d, beta, weight) / (2 if name == "both" else 1)
        expected = formula / (2 if name == "both" else 1)
        axis.plot(expected.flatten(), measured.flatten(), ".", color=colour, label=name)
        if weight is flat_weight:
            print(f"{name:15} largest difference {float((measured - expected).abs().max()):.0e}")
    axis.axline((0, 0), slope=1, color=GREY, zorder=0)
    axis.set(xlabel="formula", ylabel="autograd", title=title)
axes[0].legend();

# %% [markdown]
# On the right the self-normalising weight of the published code, $1/\mathrm{mean}|e|$ per sample: the same statement holds with each sample's
# probability divided by its error, which is not this posterior. So the points leave the line.
#
# ## Collapse: one branch alone consumes itself
#
# Take away the reward: $r$ is constant, $g = 0$, nothing to learn. One dimension, $N(0,1)$ data, ten Euler steps. Euler's own error makes the
# samples too narrow (std .833): $e \neq 0$ from the start. Each iteration trains on the model's own samples. The recursion has a closed form with
# one constant $c$: $q$, $-(1-q)$ or $2q - 1$.

# %%
times = time_grid(10, shift=3.0, dtype=torch.float64)
early, ones = times[:-1], torch.ones(10, 1)


def gain(variance):
    """A of the exact velocity v = A x of N(0, variance), at the ten times."""
    k = (1 - early) * variance / ((1 - early) ** 2 * variance + early**2)
    return ((1 - k) / early)[:, None]


def closed_form(c, iterations=100):
    """Endpoint std of A <- A + .2 c (A_exact - A)."""
    A, out = gain(1.0), []
    for _ in range(iterations + 1):
        out.append(float((1 - (times[:-1] - times[1:])[:, None] * A).prod().abs()))
        A = A + 0.2 * c * (gain(out[-1] ** 2) - A)
    return out


def trained(pull, iterations=100):
    """The same by the library: endpoint std of A <- A + .2 pull(std, A, exact A), euler_step for the samples."""
    A, out = gain(1.0), []
    for _ in range(iterations + 1):
        mean, _ = euler_step(ones, A, early, times[1:])
        out.append(float(mean.prod().abs()))
        A = A + 0.2 * pull(out[-1], A, gain(out[-1] ** 2))
    return out


def pull_of_nft(branch, q, std, v_old, exact):
    v = v_old.clone().requires_grad_()
    loss = branch(v, v_old, ones, predict_x_0(ones, exact, early), early, torch.full((10,), q), beta=1.0, weight=flat_weight)
    return -torch.autograd.grad(loss.sum(), v)[0] / (2 * early[:, None] ** 2)


def pull_of_art(std, v_old, exact):
    """Eight samples that all score the same: G is exactly 0."""
    G = aggregate_direction(torch.full((1, 8), 0.3), std * normal(1, 8, 1)).value
    v = v_old.clone().requires_grad_()
    loss = velocity_matching(v, guided_velocity(v_old, G.expand_as(v_old)))
    return -torch.autograd.grad(loss.sum(), v)[0] / 2


cases = [
    ("positive alone", partial(pull_of_nft, nft_positive, 0.5), 0.5, GREEN),
    ("negative alone", partial(pull_of_nft, nft_negative, 0.5), -0.5, ORANGE),
    ("both, q = .7", partial(pull_of_nft, nft, 0.7), 0.4, PURPLE),
    ("both, q = .3", partial(pull_of_nft, nft, 0.3), -0.4, "#b7791f"),
    ("both, q = .5", partial(pull_of_nft, nft, 0.5), 0.0, BLUE),
    ("ART, equal rewards", pull_of_art, 0.0, "black"),
]
results = {name: trained(pull) for name, pull, _, _ in cases}

figure, axes = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained", width_ratios=[1.5, 1])
for (name, _, c, colour), offset in zip(cases, (0, 0, 0, 0, 0, 5)):
    axes[0].plot(closed_form(c), color=colour, linewidth=1)
    axes[0].plot(range(offset, 101, 10), results[name][offset::10], "s" if offset else "o", markersize=4.5, color=colour, label=f"{name}: {results[name][100]:.2g}")
axes[0].set(yscale="log", ylim=(5e-4, 2e3), xlabel="iteration", title="std of the samples (lines: closed form)")
axes[0].legend(fontsize=8.5, title="after 100 iterations", loc="upper left", ncols=2)
grid = torch.linspace(-3, 3, 400)
for name, colour in (("positive alone", GREEN), ("both, q = .5", BLUE), ("negative alone", ORANGE)):
    std = results[name][20]
    axes[1].plot(grid, torch.exp(-(grid**2) / (2 * std**2)) / (std * math.sqrt(2 * math.pi)), color=colour, label=f"{name}: std {std:.3f}")
axes[1].set(title="the samples' law after 20 iterations", ylim=(0, 1.05))
axes[1].legend(fontsize=9, loc="upper left");

# %% [markdown]
# The positive branch alone contracts to a point, the negative one explodes (to 10^10, out of the picture), though **no reward was ever given**.
# Both together rest only at $q = 1/2$, which centred rewards reach on average but not at every state. ART's direction is a centred covariance, so
# equal rewards give exactly zero and nothing moves, to the bit. (The dips on the way to the explosion: there the map from noise to sample passes
# through zero and turns over.)
#
# ## Proposition 2: linear guidance plus quadratic restoration
#
# Per sample, with $h = v_j - v_\text{old}$, and exactly:
# $r|\beta d - h|^2 + (1-r)|\beta d + h|^2 = |h|^2 - 2\beta(2r-1)\langle d, h\rangle + \beta^2|d|^2$. The reward only tilts a parabola that holds
# the policy at $v_\text{old}$.

# %%
ds, h, beta = torch.linspace(-1.6, 1.6, 200), 1.0, 1.0
few = ds[::20]
figure, axis = plt.subplots(figsize=(6.5, 3.9), layout="constrained")
for reward, colour in ((1.0, GREEN), (0.75, BLUE), (0.5, GREY), (0.25, PURPLE), (0.0, ORANGE)):
    axis.plot(ds, h**2 - 2 * beta * (2 * reward - 1) * ds * h + beta**2 * ds**2, color=colour)
    m = len(few)  # x_t = 0 and t = 1: there x_0 = -v_j
    zero = torch.zeros(m, 1)
    measured = nft(few[:, None], zero, zero, -h * torch.ones(m, 1), 1.0, torch.full((m,), reward), beta=beta, weight=flat_weight)
    axis.plot(few, measured, "o", color=colour, markersize=5, label=f"r = {reward:g}")
    best = (2 * reward - 1) * h / beta
    axis.plot(best, h**2 - (2 * reward - 1) ** 2 * h**2, "k+", markersize=11)
axis.set(xlabel="drift d, in units of h", ylabel="loss of one sample", ylim=(-0.3, 4.2))
axis.legend(title="points: losses.nft", fontsize=9, loc="upper center");

# %% [markdown]
# Crosses: the minima, at $d = (2r-1)h/\beta$. A good sample ($r = 1$) pulls all the way to itself, an indifferent one ($r = 1/2$) not at all.
#
# ## Restoration by a frozen target, and by an average
#
# ART keeps no running average. Its target is frozen over two updates: the first has force $-G$ alone, the second $-G - d$. For a linear model
# $v = \Phi\theta$ trained $m$ times on one window, $d_m = [I - (I-K)^m]\,h$ with $K = \frac{2\,\text{lr}}{n}\Phi\Phi^\top$. An average with
# retention $\eta$ instead lags behind a policy that moves by $\Delta$ per iteration by $\eta\Delta/(1-\eta)$ in the end.

# %%
phi, h, lr = normal(3, 2, seed=8), normal(3, 1, seed=9), 0.25
K = 2 * lr / 3 * phi @ phi.T
theta = torch.zeros(2, 1)
measured = [torch.zeros(3)]
for _ in range(12):
    theta = theta.clone().requires_grad_()
    loss = velocity_matching(phi @ theta, guided_velocity(torch.zeros(3, 1), -h)).mean()
    theta = (theta - lr * torch.autograd.grad(loss, theta)[0]).detach()
    measured.append((phi @ theta)[:, 0])
formula = torch.stack([(torch.eye(3) - torch.linalg.matrix_power(torch.eye(3) - K, m)) @ h for m in range(13)])[..., 0]

figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
for i, colour in enumerate((BLUE, GREEN, ORANGE)):
    axes[0].plot(formula[:, i], color=colour)
    axes[0].plot(torch.stack(measured)[:, i], "o", color=colour, label=f"state {i + 1}, pulled by {float(h[i]):+.2f}")
axes[0].axvspan(0, 2, color=GREY, alpha=0.15, linewidth=0)
axes[0].set(xlabel="updates on one frozen target", title="drift of three states of a linear model", ylim=(-1.05, 1.55))
axes[0].legend(fontsize=9, loc="upper right")
for retention, colour in ((0.5, GREEN), (0.9, BLUE), (0.97, PURPLE)):
    old = new = {"w": torch.zeros(1)}
    lags = [0.0]
    for _ in range(60):
        new = {"w": new["w"] + 1.0}
        old = ema(old, new, decay=retention)
        lags.append(float(new["w"] - old["w"]))
    i = torch.arange(61)
    axes[1].plot(i, retention * (1 - retention**i) / (1 - retention), color=colour)
    axes[1].plot(i[::5], lags[::5], "o", color=colour, label=f"retention {retention:g}: {retention / (1 - retention):.3g} in the end")
axes[1].set(xlabel="iteration", title="lag of an average, in steps of the policy")
axes[1].legend(fontsize=9);

# %% [markdown]
# ART stays in the grey strip on the left: two updates, of which the second already brakes. (Three states and two parameters: not every pull can be
# followed, which is why drifts do not end at the numbers of the legend.)
#
# ## The trust region
#
# A state is dropped only if it has moved too far *and* its force would carry it further out. With $h = -G$ the force is $h - d$, and it points
# outward exactly inside the ball $|d - h/2| < |h|/2$. "Too far" is measured by the KL between the two Gaussian transitions the step would have as
# an SDE, $m = \frac{D}{2}\frac{1-t}{t}\left(\frac1\eta + \frac\eta2\right)^2 \overline{d^2}$ with $D = t - t'$, against a radius of $10^{-5}$.

# %%
across, up = torch.linspace(-0.5, 1.3, 241), torch.linspace(-0.8, 0.8, 241)
d, h = torch.cartesian_prod(across, up), torch.tensor([[1.0, 0.0]])
zero = torch.zeros_like(d)
kept = keep_inside(d, zero, h.expand_as(d), kl_proxy(d, zero, 0.6, 0.4), radius=5e-3)

figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
axes[0].pcolormesh(across, up, kept.reshape(241, 241).T, cmap=ListedColormap(("#f6c9a0", "#c6e3cf")))
axes[0].annotate("kept", (1.04, 0.6), color=GREEN, fontsize=12)
axes[0].annotate("dropped", (0.38, -0.3), color=ORANGE, fontsize=12)
axes[0].add_patch(plt.Circle((0.5, 0), 0.5, fill=False, color="black", linewidth=1.5))
rate = 0.2 / 2 * (0.4 / 0.6) * (1 / 0.7 + 0.7 / 2) ** 2
axes[0].add_patch(plt.Circle((0, 0), math.sqrt(2 * 5e-3 / rate), fill=False, color="black", linewidth=1.5, linestyle=":"))
axes[0].annotate("", (1, 0), (0, 0), arrowprops={"arrowstyle": "->", "linewidth": 2})
axes[0].annotate("h = -G", (0.55, 0.06), fontsize=11)
axes[0].set(aspect="equal", title="keep_inside, over drifts d", xlabel="$d_1$", ylabel="$d_2$")

admitted, formula, eta = [], [], 0.7
for t, t_next in zip(times[:-1], times[1:]):
    low, high = 0.0, 1.0  # the largest rms drift whose KL is within the radius, by bisection
    for _ in range(40):
        middle = (low + high) / 2
        inside = kl_proxy(torch.full((1, 4), middle), torch.zeros(1, 4), float(t), float(t_next)) < 1e-5
        low, high = (middle, high) if inside else (low, middle)
    admitted.append(low)
    D = t - t_next
    m = D / 2 * (1 - t_next) / eta**2 if t == 1 else D / 2 * (1 - t) / t * (1 / eta + eta / 2) ** 2
    formula.append(float((1e-5 / m) ** 0.5))
axes[1].plot(times[:-1], formula, color=GREY, label="formula")
axes[1].plot(times[:-1], admitted, "o", color=BLUE, label="kl_proxy, by bisection")
for i in (0, 9):
    axes[1].annotate(f"{admitted[i]:.4f}", (times[i], admitted[i]), (-52 if i == 0 else 10, -4 if i == 0 else -6), textcoords="offset points")
axes[1].set(yscale="log", xlabel="t of the step (10 steps, shift 3)", title="largest rms drift inside radius 1e-5")
axes[1].legend(fontsize=9);

# %% [markdown]
# Left: dropped is what lies inside the solid ball and outside the dotted circle of the radius (here $5 \cdot 10^{-3}$, so that it can be seen). A
# state that has overshot its target, or moved sideways, is kept: its force brings it back. Right: one radius allows a drift thirty times larger at
# pure noise than at the last step.
#
# ## How much of G is noise
#
# Eight samples in a latent of 192 numbers: how well can their covariance point? For a linear reward on Gaussian data the cosine with the true
# direction has a law: $\cos^2 \sim \mathrm{Beta}(\frac{k-1}{2}, \frac{n-1}{2})$, with mean $\frac{k-1}{k+n-2}$.

# %%
def squared_cosines(k, n, groups):
    """cos^2 between aggregate_direction of k samples of n numbers and the gradient of a linear reward, by group."""
    samples, a = normal(groups, k, n, seed=k * n), normal(groups, n, seed=k + n)
    G = aggregate_direction(torch.einsum("gkn,gn->gk", samples, a), samples).value
    return torch.nn.functional.cosine_similarity(G, a, dim=1) ** 2


figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
grid = torch.linspace(1e-3, 1 - 1e-3, 300)
for k, colour in ((4, ORANGE), (8, BLUE), (24, GREEN)):
    a, b = torch.tensor((k - 1) / 2), torch.tensor((16 - 1) / 2)
    log = (a - 1) * grid.log() + (b - 1) * (1 - grid).log() - (a.lgamma() + b.lgamma() - (a + b).lgamma())
    axes[0].hist(squared_cosines(k, 16, 3000).numpy(), bins=50, range=(0, 1), density=True, alpha=0.35, color=colour, label=f"k = {k}")
    axes[0].plot(grid, log.exp(), color=colour)
axes[0].set(xlabel="$\\cos^2$", title="n = 16, 3000 groups (lines: Beta law)")
axes[0].legend()
ks = torch.tensor([2, 4, 8, 16, 32, 64])
for n, colour in ((2, PURPLE), (16, BLUE), (192, ORANGE)):
    fine = torch.linspace(2, 64, 200)
    axes[1].plot(fine, (fine - 1) / (fine + n - 2), color=colour)
    found = [float(squared_cosines(int(k), n, 1000).mean()) for k in ks]
    axes[1].plot(ks, found, "o", color=colour)
    axes[1].annotate(f"n = {n}", (17, {2: 0.86, 16: 0.44, 192: 0.13}[n]), color=colour, fontsize=11)
    if n == 192:
        print(f"n = 192, k = 8: measured {found[2]:.4f}, formula {7 / 198:.4f}")
axes[1].set(xscale="log", xlabel="k samples per prompt", ylim=(0, 1.05), title="mean of $\\cos^2$ (lines: (k - 1)/(k + n - 2))")
axes[1].set_xticks(ks.tolist(), [str(int(k)) for k in ks])
axes[1].minorticks_off()

# %% [markdown]
# Never negative, but with eight samples of 192 numbers $\cos^2$ is .035: in one iteration $G$ is mostly noise. Training works because the noise of
# many prompts and iterations averages out and the signal does not. `diffrl.directions` estimates how much is signal.
#
# ## Change this
#
# 1. Give all six points the same reward, or make one of them much better than the rest. What happens to the length of the orange arrow of Lemma 2,
#    and to $G$ after normalising?
# 2. Move $s$ in Lemma 1 close to a point, or lower $t$. When do $v^+$ and $v^-$ become one? (Compare with the fine print above.)
# 3. Start the collapse from a perfect sampler: `time_grid(1000)`. Does the positive branch still contract?
# 4. In the trust region use `dance_sde_step` or `cps_step` as the reference kernel (`kl_proxy(..., step=...)`). Which allows most at the last
#    steps?
# 5. Replace the linear reward of the last section by the quadratic $R = -|x - a|^2$. Does the law still hold?
