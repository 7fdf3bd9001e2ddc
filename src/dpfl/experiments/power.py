"""Planning over the air: what a channel can promise before anybody transmits.

Paper
    Sonee, Rini, Huang: *Wireless Federated Learning with Limited Communication and Differential
    Privacy*, 2021; without projection: Seif, Tandon, Li: *Wireless Federated Learning with Local
    Differential Privacy*, ISIT 2020.

In one sentence
    Theorems 1 to 4: the paper's epsilon, its bound on the optimality gap, and the dimension and
    power split that are best for a target epsilon over a static channel.

Equations
    epsilon_t = 2 sqrt(stretch) sqrt(2 kappa_min ln(1.25 / delta) / (sum_i zeta_i kappa_i / r + 1))
    (Eq. 13 to 16), summed over rounds;  gap <= 2 L / (lambda^2 T) [clip^2 (1 + (d + s - 2) / r) + d
    / (n c)^2 (sum_i zeta_i kappa_i / r + 1)]; r* = min(d, floor(sum_i (kappa_i - kappa_min) /
    Omega)), Omega the noise variance that is still missing.

Formal guarantees
    None: these are plans and published figures. A run is charged by the accountant
    (:mod:`dpfl.methods.dprp`).

Departures
    - The printed rule for r* never depends on r. The bound falls with r while the privacy
      constraint binds, so r* is the largest r with power enough for the noise that is needed.
    - ``accounting = "tight"`` composes exactly, with clipping after the projection; ``"paper"``
      adds rounds up.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dpfl.core.checks import check, not_negative, one_of, positive
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.types import Adjacency
from dpfl.numerics.projections import Projection, check_projection, smallest_jl_dimension
from dpfl.privacy.accountant import adjacency_named, epsilon
from dpfl.privacy.calibrate import calibrate

UNHEARD = "leave out clients that are not heard"

# -- Theorems 1 and 2, for the paper's figures -----------------------------------------------------


def paper_epsilon(
    strengths: Sequence[float],
    artificial: Sequence[float],
    dimension: int,
    rounds: int,
    delta: float,
    *,
    theorem: Literal[1, 2, "none"] = 2,
    failure: float = 5e-5,
    distortion: float = 0.5,
    sparsity: float = 1.0,
    receiver_noise: float = 1.0,
) -> float:
    """T-fold epsilon as printed: Theorem 1 (Eq. 13), 2 (Eq. 14, 15) or without projection (Eq. 16);
    linear composition.

    ``strengths`` are kappa_i, ``artificial`` the shares zeta_i of their power; ``delta`` is of one
    round. For comparison only: what is charged is the accountant's. Without projection
    ``dimension`` is d.
    """
    kappas, zetas = _channel(strengths, artificial)
    ratio = math.log(1 / failure) / dimension
    stretched: dict[object, float] = {1: distortion, 2: 8 * sparsity * max(ratio, math.sqrt(ratio))}
    stretch = 1 + stretched.get(theorem, 0.0)
    noise = float(zetas @ kappas) / dimension + receiver_noise
    root = math.sqrt(2 * kappas.min() * math.log(1.25 / delta) / noise)
    return rounds * 2 * math.sqrt(stretch) * root


def convergence_bound(
    strengths: Sequence[float],
    artificial: Sequence[float],
    dimension: int,
    parameters: int,
    rounds: int,
    *,
    kind: Projection | Literal["none"] = "rademacher",
    clip: float = 1.0,
    smoothness: float = 1.0,
    strong_convexity: float = 1e-3,
    sparsity: float = 1.0,
    receiver_noise: float = 1.0,
) -> float:
    """Theorem 3 for a static channel: the optimality gap after ``rounds`` with learning rate 1 /
    (strong_convexity t).

    ``dimension`` is r, ``parameters`` is d; the other arguments are those of
    :func:`paper_epsilon` and of the loss.
    """
    kappas, zetas = _channel(strengths, artificial)
    extra = {
        "rademacher": (parameters - 1) / dimension,
        "achlioptas": (parameters + sparsity - 2) / dimension,
        "gaussian": (parameters + 1) / dimension,
        "fourier": (parameters - dimension) / dimension,
        "none": 0.0,
    }
    one_of("convergence bound", extra, kind=kind)
    strength = float(kappas.min()) / clip**2  # c^2
    noise = float(zetas @ kappas) / dimension + receiver_noise
    inner = clip**2 * (1 + extra[kind]) + parameters / (len(kappas) ** 2 * strength) * noise
    return 2 * smoothness / (strong_convexity**2 * rounds) * inner


def _channel(
    strengths: Sequence[float], artificial: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Return kappa_i and zeta_i as arrays; what is not a channel is refused."""
    kappas, zetas = (np.asarray(values, dtype=np.float64) for values in (strengths, artificial))
    check(
        kappas.ndim == 1 and len(kappas) >= 2,
        "channel",
        f"{kappas.size} client(s)",
        "give the gains of at least two clients",
    )
    check(
        bool(np.all(np.isfinite(kappas) & (kappas > 0))),
        "channel",
        "a strength is not a positive number",
        UNHEARD,
    )
    same = zetas.shape == kappas.shape
    check(
        same and not np.any((zetas < -1e-12) | (zetas + kappas.min() / kappas > 1 + 1e-9)),
        "channel",
        "artificial noise exceeds the power that is left",
        "keep gamma_i + zeta_i at most 1",
    )
    return kappas, zetas


# -- Theorem 4: planning ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PowerPlan:
    """A plan for a static channel.

    ``dimension`` is r*, ``artificial`` the share of power each client spends on noise, ``bound``
    that of Theorem 3, ``epsilon`` what all rounds cost, ``noise_multiplier`` the noise that arrives
    over one client's signal.
    """

    dimension: int
    artificial: tuple[float, ...]
    bound: float
    epsilon: float
    noise_multiplier: float


def _composed(
    target: float, rounds: int, delta: float, adjacency: Adjacency, weakest: float, stretch: float
) -> tuple[float, Callable[[float], float]]:
    """How rounds compose: the noise variance that must arrive for a target, infinite where none is
    enough, and the epsilon that some noise reaches.

    With a ``stretch`` rounds add up as in the paper; where it is 0 they compose exactly.
    """
    if stretch:
        printed = stretch * 8 * weakest * math.log(1.25 / delta)
        return printed / (target / rounds) ** 2, lambda noise: rounds * math.sqrt(printed / noise)
    once: Any = {"sampling": "none", "adjacency": adjacency}
    try:
        needed = calibrate(target, delta, 1.0, rounds, **once)
    except PrivacyRefusal:
        needed = math.inf
    return needed**2 * weakest, lambda noise: epsilon(
        math.sqrt(noise / weakest), 1.0, rounds, delta, **once
    )


def plan_power(
    gains: Sequence[float],
    parameters: int,
    rounds: int,
    target: float,
    delta: float,
    *,
    accounting: Literal["tight", "paper"] = "tight",
    adjacency: Adjacency | str = Adjacency.REPLACE_ONE,
    power: float = 1.0,
    clip: float = 1.0,
    kind: Projection = "rademacher",
    sparsity: float = 1.0,
    smoothness: float = 1.0,
    strong_convexity: float = 1e-3,
    distortion: float = 0.5,
    failure: float = 5e-5,
    receiver_noise: float = 1.0,
) -> PowerPlan:
    """The best dimension and power split for a static channel and a target epsilon (Theorem 4, as
    it must be meant).

    ``tight``: clipped again after projection, exact composition. ``paper``: Johnson-Lindenstrauss
    and linear composition over rounds, ``delta`` and ``failure`` per round. Noise is made by the
    clients with most power to spare; who makes it changes neither bound nor dimension.
    """
    loss: Any = {"clip": clip, "smoothness": smoothness, "strong_convexity": strong_convexity}
    positive("plan", parameters=parameters, rounds=rounds, epsilon=target, power=power, **loss)
    for name, value in (("delta", delta), ("distortion", distortion), ("failure", failure)):
        check(0 < value < 1, "plan", f"{name} = {value}", "give a number between 0 and 1")
    not_negative("plan", receiver_noise=receiver_noise)
    one_of("plan", ("tight", "paper"), accounting=accounting)
    check(
        all(math.isfinite(gain) and gain > 0 for gain in gains),
        "plan",
        "a channel gain is not a positive number",
        UNHEARD,
    )
    kappas = power * np.asarray(gains, dtype=np.float64) ** 2
    _channel(kappas.tolist(), [0.0] * len(kappas))
    check_projection(kind, 1, parameters, sparsity)
    least = 1
    stretch = 0.0
    why = "all spare power is too little noise"
    if accounting == "paper":
        least = smallest_jl_dimension(len(kappas), failure, distortion)
        stretch = 1 + distortion
        why = f"below {least} dimensions no norm is kept"
    check(
        parameters >= least,
        "plan",
        f"{parameters} parameters are fewer than the {least} dimensions that keep norms",
        "use accounting = 'tight', which clips after the projection",
        PrivacyRefusal,
    )
    weakest = float(kappas.min())
    named = adjacency_named(adjacency)
    needed, reached = _composed(target, rounds, delta, named, weakest, stretch)
    spare = float((kappas - weakest).sum())
    missing = needed - receiver_noise  # Omega
    # r*: the largest dimension with power enough for the noise that is missing
    dimension = parameters if missing <= 0 else min(parameters, int(spare / missing + 1e-9))
    if dimension < least:
        smallest = 1000 * reached(receiver_noise + spare / least)
        known = f"{math.ceil(smallest) / 1000:.3f}" if math.isfinite(smallest) else "infinite"
        raise PrivacyRefusal(
            "plan",
            f"no plan reaches epsilon = {target:g}: {why}",
            f"the smallest feasible epsilon for this channel is {known}",
        )
    zetas = _filled(kappas, max(0.0, missing) * dimension)
    arriving = receiver_noise + float(zetas @ kappas) / dimension
    loss |= {"sparsity": sparsity, "receiver_noise": receiver_noise}
    channel = (kappas.tolist(), zetas.tolist())
    sizes = (dimension, parameters, rounds)
    return PowerPlan(
        dimension=dimension,
        artificial=tuple(zetas.tolist()),
        bound=convergence_bound(*channel, *sizes, kind=kind, **loss),
        epsilon=reached(arriving),
        noise_multiplier=math.sqrt(arriving / weakest),
    )


def _filled(kappas: np.ndarray, wanted: float) -> np.ndarray:
    """Shares zeta_i with sum zeta_i kappa_i = wanted, from the client with most to spare down."""
    spare = kappas - kappas.min()
    zetas = np.zeros_like(kappas)
    left = wanted
    for i in np.argsort(-spare, kind="stable"):
        taken = min(spare[i], left)
        zetas[i], left = taken / kappas[i], left - taken
    return zetas
