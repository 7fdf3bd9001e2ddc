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

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.types import Adjacency
from dpfl.numerics.projections import Projection, check_projection, smallest_jl_dimension
from dpfl.privacy.accountant import adjacency_named, epsilon
from dpfl.privacy.calibrate import calibrate

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

    ``strengths`` are kappa_i, ``artificial`` the shares zeta_i of their power. For comparison only:
    the bill is the accountant's. Without projection ``dimension`` is d.
    """
    kappas, zetas = _channel(strengths, artificial)
    if theorem == 1:
        stretch = 1 + distortion
    elif theorem == 2:
        ratio = math.log(1 / failure) / dimension
        stretch = 1 + 8 * sparsity * (math.sqrt(ratio) if ratio <= 1 else ratio)
    else:
        stretch = 1.0
    noise = float(zetas @ kappas) / dimension + receiver_noise
    return (
        rounds
        * 2
        * math.sqrt(stretch)
        * math.sqrt(2 * kappas.min() * math.log(1.25 / delta) / noise)
    )


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
    """
    kappas, zetas = _channel(strengths, artificial)
    extra = {
        "rademacher": (parameters - 1) / dimension,
        "achlioptas": (parameters + sparsity - 2) / dimension,
        "gaussian": (parameters + 1) / dimension,
        "fourier": (parameters - dimension) / dimension,
        "none": 0.0,
    }
    if kind not in extra:
        raise ConfigurationError(
            "convergence bound", f"kind = '{kind}'", f"choose one of {', '.join(extra)}"
        )
    strength = float(kappas.min()) / clip**2  # c^2
    noise = float(zetas @ kappas) / dimension + receiver_noise
    inner = clip**2 * (1 + extra[kind]) + parameters / (len(kappas) ** 2 * strength) * noise
    return 2 * smoothness / (strong_convexity**2 * rounds) * inner


def _channel(
    strengths: Sequence[float], artificial: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    kappas, zetas = (
        np.asarray(strengths, dtype=np.float64),
        np.asarray(artificial, dtype=np.float64),
    )
    if kappas.ndim != 1 or len(kappas) < 2:
        raise ConfigurationError(
            "channel", f"{kappas.size} client(s)", "give the gains of at least two clients"
        )
    if not np.all(np.isfinite(kappas) & (kappas > 0)):
        raise ConfigurationError(
            "channel", "a strength is not a positive number", "leave out clients that are not heard"
        )
    if (
        zetas.shape != kappas.shape
        or np.any(zetas < -1e-12)
        or np.any(zetas + kappas.min() / kappas > 1 + 1e-9)
    ):
        raise ConfigurationError(
            "channel",
            "artificial noise exceeds the power that is left",
            "keep gamma_i + zeta_i at most 1",
        )
    return kappas, zetas


# -- Theorem 4: planning ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PowerPlan:
    """r*, the share of power each client spends on noise, the bound of Theorem 3, and what it all
    costs.
    """

    dimension: int
    artificial: tuple[float, ...]
    bound: float
    epsilon: float
    noise_multiplier: float


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
    filling: Literal["water", "proportional"] = "water",
) -> PowerPlan:
    """The best dimension and power split for a static channel and a target epsilon (Theorem 4, as
    it must be meant).

    ``tight``: clipped again after projection, exact composition. ``paper``: Johnson-Lindenstrauss
    and linear composition over rounds, ``delta`` and ``failure`` per round.
    """
    if not np.all(np.isfinite(gains)) or np.any(np.asarray(gains, dtype=np.float64) <= 0):
        raise ConfigurationError(
            "plan",
            "a channel gain is not a positive number",
            "leave out clients that are not heard",
        )
    kappas = power * np.asarray(gains, dtype=np.float64) ** 2
    _plan_check(
        parameters=parameters, rounds=rounds, epsilon=target, delta=delta, clip=clip, power=power, smoothness=smoothness,
        strong_convexity=strong_convexity, distortion=distortion, failure=failure,
    )  # fmt: skip
    _channel(kappas.tolist(), [0.0] * len(kappas))
    check_projection(kind, 1, parameters, sparsity)
    if accounting not in ("tight", "paper"):
        raise ConfigurationError("plan", f"accounting = '{accounting}'", "choose tight or paper")
    if not (math.isfinite(receiver_noise) and receiver_noise >= 0):
        raise ConfigurationError(
            "plan", f"receiver_noise = {receiver_noise}", "give a variance, 0 or above"
        )
    weakest, spare = float(kappas.min()), float((kappas - kappas.min()).sum())
    adjacency = adjacency_named(adjacency)
    least = 1 if accounting == "tight" else smallest_jl_dimension(len(kappas), failure, distortion)

    def needed(wanted: float) -> float:
        """Noise variance that must arrive."""
        if accounting == "tight":
            multiplier = calibrate(wanted, delta, 1.0, rounds, sampling="none", adjacency=adjacency)
            return multiplier**2 * weakest
        return (1 + distortion) * 8 * weakest * math.log(1.25 / delta) / (wanted / rounds) ** 2

    def reached(noise: float) -> float:
        """Epsilon with this much noise."""
        if accounting == "tight":
            multiplier = math.sqrt(noise / weakest)
            return epsilon(multiplier, 1.0, rounds, delta, sampling="none", adjacency=adjacency)
        return rounds * math.sqrt((1 + distortion) * 8 * weakest * math.log(1.25 / delta) / noise)

    if parameters < least:
        raise PrivacyRefusal(
            "plan",
            f"{parameters} parameters are fewer than the {least} dimensions below which no norm is kept",
            "use accounting = 'tight', which clips after the projection",
        )
    most = receiver_noise + spare / least
    try:
        missing = needed(target) - receiver_noise  # Omega
    except PrivacyRefusal:
        missing = math.inf
    largest = parameters if missing <= 0 else min(parameters, math.floor(spare / missing + 1e-9))
    if largest < least:
        why = (
            "all spare power is too little noise"
            if least == 1
            else f"below {least} dimensions no norm is kept"
        )
        raise PrivacyRefusal(
            "plan",
            f"no plan reaches epsilon = {target:g}: {why}",
            f"the smallest feasible epsilon for this channel is {_rounded_up(reached(most))}",
        )
    wanted = max(0.0, missing) * largest
    zetas = _filled(kappas, wanted, filling)
    arriving = receiver_noise + float(zetas @ kappas) / largest
    bound = convergence_bound(
        kappas.tolist(), zetas.tolist(), largest, parameters, rounds, kind=kind, clip=clip, smoothness=smoothness,
        strong_convexity=strong_convexity, sparsity=sparsity, receiver_noise=receiver_noise,
    )  # fmt: skip
    return PowerPlan(
        dimension=largest,
        artificial=tuple(zetas.tolist()),
        bound=bound,
        epsilon=reached(arriving),
        noise_multiplier=math.sqrt(arriving / weakest),
    )


def _rounded_up(value: float) -> str:
    return f"{math.ceil(value * 1000) / 1000:.3f}" if math.isfinite(value) else "infinite"


def _plan_check(**numbers: float) -> None:
    for name, value in numbers.items():
        share = name in ("delta", "distortion", "failure")
        if not (math.isfinite(value) and 0 < value < (1 if share else math.inf)):
            raise ConfigurationError(
                "plan",
                f"{name} = {value}",
                f"give a number {'between 0 and 1' if share else 'above 0'}",
            )


def _filled(kappas: np.ndarray, wanted: float, filling: str) -> np.ndarray:
    """Shares zeta_i with sum zeta_i kappa_i = wanted: from the client with most to spare down, or
    everyone alike.
    """
    spare = kappas - kappas.min()
    if filling == "proportional":
        return (
            np.zeros_like(kappas)
            if wanted <= 0
            else spare * min(1.0, wanted / spare.sum()) / kappas
        )
    if filling != "water":
        raise ConfigurationError("plan", f"filling = '{filling}'", "choose water or proportional")
    zetas, left = np.zeros_like(kappas), wanted
    for i in np.argsort(-spare, kind="stable"):
        taken = min(spare[i], left)
        zetas[i], left = taken / kappas[i], left - taken
    return zetas


def curves(
    gains: Sequence[float],
    parameters: int,
    rounds: int,
    delta: float,
    *,
    failure: float = 5e-5,
    total_delta: float = 1e-5,
    strong_convexity: float = 1e-3,
    dimensions: Sequence[int],
    targets: Sequence[float],
) -> dict[str, list[dict[str, float | None]]]:
    """Figures 1 to 3: epsilon and bound over r with all spare power as noise, bound over epsilon;
    beside tight composition.

    ``delta`` and ``failure`` are the paper's, per round; ``total_delta`` is that of the tight
    epsilons. None: no plan exists.
    """
    kappas = np.asarray(gains, dtype=np.float64) ** 2
    weakest, all_spare = float(kappas.min()), 1 - kappas.min() / kappas
    noise, shares = float(all_spare @ kappas), all_spare.tolist()

    def tight(numbers: int) -> float:
        multiplier = math.sqrt((noise / numbers + 1) / weakest)
        return epsilon(
            multiplier, 1.0, rounds, total_delta, sampling="none", adjacency=Adjacency.REPLACE_ONE
        )

    def printed(numbers: int, theorem: Literal[1, 2, "none"], sparsity: float = 1.0) -> float:
        return paper_epsilon(
            kappas.tolist(),
            shares,
            numbers,
            rounds,
            delta,
            theorem=theorem,
            failure=failure,
            sparsity=sparsity,
        )

    def gap(numbers: int, kind: Projection | Literal["none"], sparsity: float = 1.0) -> float:
        return convergence_bound(
            kappas.tolist(), shares, numbers, parameters, rounds, kind=kind, sparsity=sparsity,
            strong_convexity=strong_convexity,
        )  # fmt: skip

    over_r: list[dict[str, float | None]] = [
        {
            "dimension": r,
            "theorem_1": printed(r, 1)
            if r >= smallest_jl_dimension(len(kappas), failure)
            else None,
            "theorem_2_s1": printed(r, 2),
            "theorem_2_s2": printed(r, 2, 2.0),
            "tight": tight(r),
            "no_projection_printed": printed(parameters, "none"),
            "no_projection_tight": tight(parameters),
            "bound_s1": gap(r, "achlioptas", 1.0),
            "bound_s2": gap(r, "achlioptas", 2.0),
            "bound_no_projection": gap(parameters, "none"),
        }
        for r in dimensions
    ]

    def planned(target: float, accounting: Literal["tight", "paper"]) -> PowerPlan | None:
        own_delta = delta if accounting == "paper" else total_delta
        try:
            return plan_power(
                gains, parameters, rounds, target, own_delta, accounting=accounting, failure=failure,
                strong_convexity=strong_convexity,
            )  # fmt: skip
        except PrivacyRefusal:
            return None

    def unprojected(target: float) -> float:
        """Eq. 20: the same without projection, with as much noise as the target takes."""
        needed = 8 * weakest * math.log(1.25 / delta) / (target / rounds) ** 2
        inner = 1 + parameters / (len(kappas) ** 2 * weakest) * max(needed, 1.0)
        return 2 / (strong_convexity**2 * rounds) * inner

    over_epsilon: list[dict[str, float | None]] = []
    for target in targets:
        line: dict[str, float | None] = {
            "epsilon": target,
            "no_projection_printed": unprojected(target),
        }
        for accounting in ("paper", "tight"):
            plan = planned(target, accounting)
            line[f"bound_{accounting}"] = None if plan is None else plan.bound
            line[f"dimension_{accounting}"] = None if plan is None else plan.dimension
        over_epsilon.append(line)
    return {"over_dimension": over_r, "over_epsilon": over_epsilon}
