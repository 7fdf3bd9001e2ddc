"""DPRP-FedSGD: project, add noise, and add up over the air.

Paper
    Sonee, Rini, Huang: *Wireless Federated Learning with Limited Communication and Differential Privacy*, 2021; without
    projection: Seif, Tandon, Li: *Wireless Federated Learning with Local Differential Privacy*, ISIT 2020.

In one sentence
    Every client projects its clipped gradient onto a few random directions that all share, transmits it together with the
    others, and the server, who hears one noisy sum, projects back.

Equations
    z_i = U g_i / sqrt(r), U an r x d matrix fresh every round (Eq. 6, 7);  y = sum_i |h_i| x_i + n (Eq. 8, 9; see
    :mod:`dpfl.wire.air`);  g = U^T y / (sqrt(r) n c),  c = sqrt(signal) / clip (Eq. 10).

Formal guarantees
    A client's gradient, against the server, as long as the signals really add up in the air. Billed are Gaussian mechanisms
    with the noise that ``honest`` says may be counted on, by tight composition. With ``clip_after`` (the default) the
    projected vector is clipped again: the sensitivity is sure, no failure probability is paid. Without it the
    Johnson-Lindenstrauss bound is billed, each round's failure probability comes off delta, and where nothing is left
    the epsilon is infinite.

Departures
    - The paper fixes the signal at the weakest client's strength, so that epsilon depends on the channel's luck. Here the
      strength is chosen each round so that noise over signal is what was billed. ``paper_epsilon`` and ``plan_power`` keep
      the paper's rule.
    - ``clip_after`` shortens long projections: the estimate is then scaled by E[|z| min(|z|, clip)] / |g|^2.
    - The printed rule for r* never depends on r. The bound falls with r while the privacy constraint binds, so r* is the
      largest r with power enough for the noise that is needed: floor(sum_i (kappa_i - kappa_min) / Omega).
    - The paper composes linearly over rounds; that is here for its figures only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from scipy.fft import dct, idct
from torch import Tensor

from dpfl.client.local_work import Sgd
from dpfl.client.stages import Clip
from dpfl.core import linalg
from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Adjacency, Cohort, Observer, PlugState, Practice, Shared, Terms, Unit, Who
from dpfl.privacy.accountant import adjacency_named, epsilon
from dpfl.privacy.calibrate import calibrate
from dpfl.privacy.exposure import Exposure
from dpfl.protocols import Selection, Stage
from dpfl.server.aggregate import Step
from dpfl.server.selection import Everyone
from dpfl.server.weights import ExpectedCohortWeights
from dpfl.strategy import Strategy
from dpfl.wire.air import Honest, OverTheAir

Projection = Literal["rademacher", "gaussian", "achlioptas", "fourier"]
PROJECTIONS: tuple[Projection, ...] = ("rademacher", "gaussian", "achlioptas", "fourier")
_AT_ONCE = 1 << 22  # entries of U held at once: 16 MiB
_WHOLE = 1 << 40  # a batch no data set exceeds

ASSUMPTIONS = (
    "the signals really add up in the air: whoever hears one client alone hears its message without the others' noise",
    "phases and strengths are corrected as planned; gains and the projection's seed are public",
)


# -- Eq. 6, 7: random projections, in blocks of rows -------------------------------------------------------------------


def project(
    rows: Tensor, seed: PublicSeed, numbers: int, kind: Projection = "rademacher", sparsity: float = 1.0
) -> Tensor:
    """T g = U g / sqrt(r) for every row g of a matrix (n, d); the same ``seed`` gives the same U at both ends.

    >>> rows = torch.eye(4)
    >>> bool(torch.allclose(lift(project(rows, PublicSeed(1), 4, "fourier")[0], PublicSeed(1), 4, "fourier"), rows[0]))
    True
    """
    length = rows.shape[1]
    _check(kind, numbers, length, sparsity)
    if kind == "fourier":
        signs, chosen = _fourier(seed, length, numbers)
        turned = dct(rows.numpy() * signs, norm="ortho", axis=1)[:, chosen]
        return torch.from_numpy(turned.astype(np.float32) * np.float32(math.sqrt(length / numbers)))
    projected = torch.empty(len(rows), numbers)
    for first, block in _blocks(seed, numbers, length, kind, sparsity):
        projected[:, first : first + len(block)] = rows @ block.T
    return projected.div_(math.sqrt(numbers))


def lift(
    vector: Tensor, seed: PublicSeed, length: int, kind: Projection = "rademacher", sparsity: float = 1.0
) -> Tensor:
    """T^T y = U^T y / sqrt(r): back to d numbers."""
    numbers = len(vector)
    _check(kind, numbers, length, sparsity)
    if kind == "fourier":
        signs, chosen = _fourier(seed, length, numbers)
        spread = np.zeros(length, dtype=np.float32)
        spread[chosen] = vector.numpy() * np.float32(math.sqrt(length / numbers))
        return torch.from_numpy((idct(spread, norm="ortho") * signs).astype(np.float32))
    lifted = torch.zeros(length)
    for first, block in _blocks(seed, numbers, length, kind, sparsity):
        lifted += vector[first : first + len(block)] @ block
    return lifted.div_(math.sqrt(numbers))


def _blocks(
    seed: PublicSeed, numbers: int, length: int, kind: Projection, sparsity: float
) -> Iterator[tuple[int, Tensor]]:
    """U, some rows at a time: never whole."""
    at_once = max(1, _AT_ONCE // length)
    draw: Callable[[np.random.Generator, int], np.ndarray] = {
        "rademacher": _signs,
        "gaussian": lambda rng, count: rng.standard_normal(count, dtype=np.float32),
        "achlioptas": lambda rng, count: _sparse(rng, count, sparsity),
    }[kind]
    for first in range(0, numbers, at_once):
        rows = min(at_once, numbers - first)
        yield first, torch.from_numpy(draw(seed.child("rows", first).numpy(), rows * length).reshape(rows, length))


def _signs(rng: np.random.Generator, count: int) -> np.ndarray:
    """+1 or -1, eight to a random byte."""
    bits = np.unpackbits(np.frombuffer(rng.bytes((count + 7) // 8), dtype=np.uint8), count=count)
    signs = bits.astype(np.float32)
    signs *= 2.0
    signs -= 1.0
    return signs


def _sparse(rng: np.random.Generator, count: int, sparsity: float) -> np.ndarray:
    """+ or - sqrt(s), each with probability 1 / 2s, else 0."""
    uniform = rng.random(count, dtype=np.float32)
    size = np.float32(math.sqrt(sparsity))
    half = np.float32(0.5 / sparsity)
    return np.where(uniform < half, size, np.where(uniform < 2 * half, -size, np.float32(0)))


def _fourier(seed: PublicSeed, length: int, numbers: int) -> tuple[np.ndarray, np.ndarray]:
    """Random signs, and which coordinates of the cosine transform are kept."""
    rng = seed.child("fourier").numpy()
    return _signs(rng, length), np.sort(rng.choice(length, numbers, replace=False))


def _check(kind: str, numbers: int, length: int, sparsity: float) -> None:
    if kind not in PROJECTIONS:
        raise ConfigurationError("projection", f"there is no kind '{kind}'", f"choose one of {', '.join(PROJECTIONS)}")
    if numbers != int(numbers) or numbers < 1:
        raise ConfigurationError("projection", f"dimension = {numbers}", "project onto at least one number")
    if numbers > length:
        raise ConfigurationError(
            "projection", f"{numbers} numbers are more than the model's {length}", "project onto fewer, or use airsgd"
        )
    if not (math.isfinite(sparsity) and sparsity >= 1):
        raise ConfigurationError("projection", f"sparsity = {sparsity}", "give 1 or more")


@dataclass(frozen=True, kw_only=True)
class RandomProjection(Stage):
    """The client projects, the server projects back; both from the round's public seed."""

    dimension: int
    clip: float
    kind: Projection = "rademacher"
    sparsity: float = 1.0
    clip_after: bool = True
    distortion: float = 0.5
    failure: float = 1e-9
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(self.kind, self.dimension, max(1, self.dimension), self.sparsity)
        if not 0 < self.distortion < 1 or not 0 < self.failure < 1:
            raise ConfigurationError(
                "projection",
                f"distortion = {self.distortion}, failure = {self.failure}",
                "give numbers between 0 and 1",
            )
        if self.kind == "fourier" and not self.clip_after:
            raise PrivacyRefusal("projection", "nothing bounds a Fourier projection's norm", "use clip_after")

    def start(self, terms: Terms, layout: Layout) -> PlugState:
        """Refuse a dimension that the model does not have, or for which the JL bound does not hold."""
        _check(self.kind, self.dimension, layout.size, self.sparsity)
        if not self.clip_after:
            least = smallest_jl_dimension(terms.population, self.failure, self.distortion)
            if self.dimension < least:
                raise PrivacyRefusal(
                    "projection",
                    f"dimension = {self.dimension} is below {least}, where the Johnson-Lindenstrauss bound begins",
                    "use clip_after, or more dimensions",
                )
        return {"length": torch.tensor([layout.size])}

    def open(self, state: PlugState, round_: int, cohort: Cohort, seed: PublicSeed) -> Shared:
        """Publish the round's seed."""
        return {"seed": seed.to_tensor(), "length": state["length"].clone()}

    def client_rows(self, rows: Tensor, shared: Shared) -> Tensor:
        """Project all clients with one matrix."""
        projected = project(rows, PublicSeed.from_tensor(shared["seed"]), self.dimension, self.kind, self.sparsity)
        return linalg.clip(projected, self.clip) if self.clip_after else projected

    def client(self, x: Tensor, shared: Shared, who: Who, rng: SecretRng) -> Tensor:
        """Project."""
        return self.client_rows(x[None], shared)[0]

    def server(self, y: Tensor, shared: Shared, who: Who | None) -> Tensor:
        """Project back."""
        return lift(y, PublicSeed.from_tensor(shared["seed"]), int(shared["length"]), self.kind, self.sparsity)

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """Clipped again the bound is sure; otherwise norms stretch, except with probability ``failure``."""
        if self.clip_after:
            return exposure.projected(math.inf).clipped(self.clip)
        return exposure.projected(math.sqrt(1 + self.distortion), self.failure)


# -- Theorems 1 and 2, for the paper's figures -------------------------------------------------------------------------


def smallest_jl_dimension(clients: int, failure: float, distortion: float = 0.5) -> int:
    """r >= (4 + 2 a) / (e^2 / 2 - e^3 / 3) ln n with a = ln(1 / failure) / ln n: (4 ln n + 2 ln(1 / failure)) / (...)."""
    logs = 4 * math.log(max(clients, 1)) + 2 * math.log(1 / failure)
    return math.ceil(logs / (distortion**2 / 2 - distortion**3 / 3))


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
    """T-fold epsilon as printed: Theorem 1 (Eq. 13), 2 (Eq. 14, 15) or without projection (Eq. 16); linear composition.

    ``strengths`` are kappa_i, ``artificial`` the shares zeta_i of their power. For comparison only: the bill is the
    accountant's. Without projection ``dimension`` is d.
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
    return rounds * 2 * math.sqrt(stretch) * math.sqrt(2 * kappas.min() * math.log(1.25 / delta) / noise)


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
    """Theorem 3 for a static channel: the optimality gap after ``rounds`` with learning rate 1 / (strong_convexity t)."""
    kappas, zetas = _channel(strengths, artificial)
    extra = {
        "rademacher": (parameters - 1) / dimension,
        "achlioptas": (parameters + sparsity - 2) / dimension,
        "gaussian": (parameters + 1) / dimension,
        "fourier": (parameters - dimension) / dimension,
        "none": 0.0,
    }
    if kind not in extra:
        raise ConfigurationError("convergence bound", f"kind = '{kind}'", f"choose one of {', '.join(extra)}")
    strength = float(kappas.min()) / clip**2  # c^2
    noise = float(zetas @ kappas) / dimension + receiver_noise
    inner = clip**2 * (1 + extra[kind]) + parameters / (len(kappas) ** 2 * strength) * noise
    return 2 * smoothness / (strong_convexity**2 * rounds) * inner


def _channel(strengths: Sequence[float], artificial: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    kappas, zetas = np.asarray(strengths, dtype=np.float64), np.asarray(artificial, dtype=np.float64)
    if kappas.ndim != 1 or len(kappas) < 2:
        raise ConfigurationError("channel", f"{kappas.size} client(s)", "give the gains of at least two clients")
    if not np.all(np.isfinite(kappas) & (kappas > 0)):
        raise ConfigurationError(
            "channel", "a strength is not a positive number", "leave out clients that are not heard"
        )
    if zetas.shape != kappas.shape or np.any(zetas < -1e-12) or np.any(zetas + kappas.min() / kappas > 1 + 1e-9):
        raise ConfigurationError(
            "channel", "artificial noise exceeds the power that is left", "keep gamma_i + zeta_i at most 1"
        )
    return kappas, zetas


# -- Theorem 4: planning -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PowerPlan:
    """r*, the share of power each client spends on noise, the bound of Theorem 3, and what it all costs."""

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
    """The best dimension and power split for a static channel and a target epsilon (Theorem 4, as it must be meant).

    ``tight``: clipped again after projection, exact composition. ``paper``: Johnson-Lindenstrauss and linear composition
    over rounds, ``delta`` and ``failure`` per round.
    """
    if not np.all(np.isfinite(gains)) or np.any(np.asarray(gains, dtype=np.float64) <= 0):
        raise ConfigurationError(
            "plan", "a channel gain is not a positive number", "leave out clients that are not heard"
        )
    kappas = power * np.asarray(gains, dtype=np.float64) ** 2
    _plan_check(
        parameters=parameters, rounds=rounds, epsilon=target, delta=delta, clip=clip, power=power, smoothness=smoothness,
        strong_convexity=strong_convexity, distortion=distortion, failure=failure,
    )  # fmt: skip
    _channel(kappas.tolist(), [0.0] * len(kappas))
    _check(kind, 1, parameters, sparsity)
    if accounting not in ("tight", "paper"):
        raise ConfigurationError("plan", f"accounting = '{accounting}'", "choose tight or paper")
    if not (math.isfinite(receiver_noise) and receiver_noise >= 0):
        raise ConfigurationError("plan", f"receiver_noise = {receiver_noise}", "give a variance, 0 or above")
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
        why = "all spare power is too little noise" if least == 1 else f"below {least} dimensions no norm is kept"
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
                "plan", f"{name} = {value}", f"give a number {'between 0 and 1' if share else 'above 0'}"
            )


def _filled(kappas: np.ndarray, wanted: float, filling: str) -> np.ndarray:
    """Shares zeta_i with sum zeta_i kappa_i = wanted: from the client with most to spare down, or everyone alike."""
    spare = kappas - kappas.min()
    if filling == "proportional":
        return np.zeros_like(kappas) if wanted <= 0 else spare * min(1.0, wanted / spare.sum()) / kappas
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
    """Figures 1 to 3: epsilon and bound over r with all spare power as noise, bound over epsilon; beside tight composition.

    ``delta`` and ``failure`` are the paper's, per round; ``total_delta`` is that of the tight epsilons. None: no plan exists.
    """
    kappas = np.asarray(gains, dtype=np.float64) ** 2
    weakest, all_spare = float(kappas.min()), 1 - kappas.min() / kappas
    noise, shares = float(all_spare @ kappas), all_spare.tolist()

    def tight(numbers: int) -> float:
        multiplier = math.sqrt((noise / numbers + 1) / weakest)
        return epsilon(multiplier, 1.0, rounds, total_delta, sampling="none", adjacency=Adjacency.REPLACE_ONE)

    def printed(numbers: int, theorem: Literal[1, 2, "none"], sparsity: float = 1.0) -> float:
        return paper_epsilon(
            kappas.tolist(), shares, numbers, rounds, delta, theorem=theorem, failure=failure, sparsity=sparsity
        )

    def gap(numbers: int, kind: Projection | Literal["none"], sparsity: float = 1.0) -> float:
        return convergence_bound(
            kappas.tolist(), shares, numbers, parameters, rounds, kind=kind, sparsity=sparsity,
            strong_convexity=strong_convexity,
        )  # fmt: skip

    over_r: list[dict[str, float | None]] = [
        {
            "dimension": r,
            "theorem_1": printed(r, 1) if r >= smallest_jl_dimension(len(kappas), failure) else None,
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
        line: dict[str, float | None] = {"epsilon": target, "no_projection_printed": unprojected(target)}
        for accounting in ("paper", "tight"):
            plan = planned(target, accounting)
            line[f"bound_{accounting}"] = None if plan is None else plan.bound
            line[f"dimension_{accounting}"] = None if plan is None else plan.dimension
        over_epsilon.append(line)
    return {"over_dimension": over_r, "over_epsilon": over_epsilon}


# -- the methods -------------------------------------------------------------------------------------------------------


def dprp(
    *,
    lr: float,
    clip: float,
    dimension: int,
    batch_size: int | None = None,
    noise_multiplier: float | None = None,
    projection: Projection = "rademacher",
    sparsity: float = 1.0,
    clip_after: bool = True,
    distortion: float = 0.5,
    failure: float = 1e-9,
    honest: Honest = 1.0,
    power: float = 1.0,
    receiver_noise: float = 1.0,
    fading: Literal["block", "static"] = "block",
    min_gain: float = 0.0,
    gain_seed: int = 0,
    tolerated_dropouts: int = 0,
    adjacency: str = "replace_one",
    selection: Selection | None = None,
) -> Strategy:
    """Gradients projected onto a few shared random directions, noised, and added up over the air."""
    stage = RandomProjection(
        dimension=dimension,
        clip=clip,
        kind=projection,
        sparsity=sparsity,
        clip_after=clip_after,
        distortion=distortion,
        failure=failure,
    )
    channel = OverTheAir(
        clip=clip,
        noise_multiplier=noise_multiplier,
        power=power,
        receiver_noise=receiver_noise,
        fading=fading,
        min_gain=min_gain,
        gain_seed=gain_seed,
        honest=honest,
        tolerated_dropouts=tolerated_dropouts,
        numbers=dimension,
    )
    return _on_air("dprp", lr, batch_size, (Clip(clip=clip), stage), channel, adjacency, selection)


def airsgd(
    *,
    lr: float,
    clip: float,
    batch_size: int | None = None,
    noise_multiplier: float | None = None,
    honest: Honest = 1.0,
    power: float = 1.0,
    receiver_noise: float = 1.0,
    fading: Literal["block", "static"] = "block",
    min_gain: float = 0.0,
    gain_seed: int = 0,
    tolerated_dropouts: int = 0,
    adjacency: str = "replace_one",
    selection: Selection | None = None,
) -> Strategy:
    """Gradients noised and added up over the air, all of them: DPRP without the projection."""
    channel = OverTheAir(
        clip=clip,
        noise_multiplier=noise_multiplier,
        power=power,
        receiver_noise=receiver_noise,
        fading=fading,
        min_gain=min_gain,
        gain_seed=gain_seed,
        honest=honest,
        tolerated_dropouts=tolerated_dropouts,
    )
    return _on_air("airsgd", lr, batch_size, (Clip(clip=clip),), channel, adjacency, selection)


def _on_air(
    name: str,
    lr: float,
    batch_size: int | None,
    stages: tuple[Stage, ...],
    channel: OverTheAir,
    adjacency: str,
    selection: Selection | None,
) -> Strategy:
    practice = Practice(lr=1.0, batch_size=_WHOLE if batch_size is None else batch_size, local_steps=1)
    return Strategy(
        name=name,
        unit=Unit.CLIENT,
        observer=Observer.SERVER,
        adjacency=adjacency_named(adjacency),
        local=Sgd(practice=practice),
        selection=selection or Everyone(),
        stages=stages,
        channel=channel,
        weights=ExpectedCohortWeights(),
        step=Step(lr=lr),
        tolerated_dropouts=channel.tolerated_dropouts,
        assumptions=(_counted_on(channel), *ASSUMPTIONS),
    )


def _counted_on(channel: OverTheAir) -> str:
    if channel.honest == "own":
        return "nobody's noise but the client's own is counted on"
    if channel.honest == "own_and_receiver":
        return (
            "the client's own noise and the receiver's are counted on: the receiver's hardware is not the adversary's"
        )
    return f"the receiver's noise and that of {100 * float(channel.honest):g} % of the other clients are counted on"
