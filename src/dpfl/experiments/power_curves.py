"""Channel gains from a file or drawn, and the curves of the paper's figures over a static channel.

The theorems are those of :mod:`dpfl.experiments.power`.
"""

import csv
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np

from dpfl.core.checks import check
from dpfl.core.errors import DataError, PrivacyRefusal
from dpfl.core.random import PublicSeed
from dpfl.experiments.power import convergence_bound, paper_epsilon, plan_power, tight_epsilon
from dpfl.numerics.projections import smallest_jl_dimension

Line = dict[str, float | None]
"""One point of every curve by its name; None where no plan exists."""


class Curves(TypedDict):
    """The curves of the paper's figures, over the dimension and over the target epsilon."""

    over_dimension: list[Line]
    over_epsilon: list[Line]


class PaperCurves(Curves):
    """The curves with the setting they belong to."""

    setting: dict[str, float]


def read_gains(path: Path) -> dict[str, float]:
    """Read channel gains from a CSV file with the columns ``id`` and ``gain``."""
    try:
        with path.open(newline="") as stream:
            lines = list(csv.DictReader(stream))
        found = {line["id"]: float(line["gain"]) for line in lines}
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise DataError(str(path), problem, "check the path") from error
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        problem = f"is not a table of gains ({error})"
        raise DataError(str(path), problem, "give the columns id,gain") from error
    once, problem = bool(found) and len(found) == len(lines), "names no client, or one twice"
    check(once, str(path), problem, "give one line per client", DataError)
    return found


def draw_gains(clients: int, seed: int = 0) -> dict[str, float]:
    """Draw Rayleigh gains for so many clients.

    >>> {name: round(gain, 3) for name, gain in draw_gains(2).items()}  # doctest: +SKIP
    {'client-0': 0.823, 'client-1': 1.11}
    """
    check(clients >= 1, "--clients", f"{clients}", "give a number of clients")
    drawn = PublicSeed(seed).child("gains").numpy().exponential(size=clients)
    digits = len(str(clients - 1))
    return {f"client-{i:0{digits}d}": math.sqrt(value) for i, value in enumerate(drawn.tolist())}


def curves(
    gains: Sequence[float],
    parameters: int,
    rounds: int,
    delta: float,
    *,
    failure: float = 5e-5,
    total_delta: float = 1e-5,
    strong_convexity: float = 1e-3,
    dimensions: Sequence[int] = (),
    targets: Sequence[float] = (),
) -> Curves:
    """Figures 1 to 3: epsilon and bound over r with all spare power as noise, bound over epsilon;
    beside tight composition.

    ``delta`` and ``failure`` are the paper's, per round; ``total_delta`` is that of the tight
    epsilons. ``dimensions`` and ``targets`` are those of the paper's figures, unless given.
    """
    dimensions = dimensions or sorted({round(parameters ** (i / 24)) for i in range(4, 25)})
    targets = targets or [float(f"{10 ** (i / 5):.3g}") for i in range(-2, 14)]
    kappas = np.asarray(gains, dtype=np.float64) ** 2
    weakest, all_spare = float(kappas.min()), 1 - kappas.min() / kappas
    noise, channel = float(all_spare @ kappas), (kappas.tolist(), all_spare.tolist())
    least = smallest_jl_dimension(len(kappas), failure)

    def tight(numbers: int) -> float:
        """Epsilon over r = ``numbers`` directions, composed exactly."""
        return tight_epsilon(math.sqrt((noise / numbers + 1) / weakest), rounds, total_delta)

    # Epsilon as a theorem of the paper prints it, and the bound of Theorem 3
    printed = partial(paper_epsilon, *channel, rounds=rounds, delta=delta, failure=failure)
    loss: Any = {"parameters": parameters, "strong_convexity": strong_convexity}
    gap: Callable[..., float] = partial(convergence_bound, *channel, rounds=rounds, **loss)

    def planned(target: float, accounting: Literal["tight", "paper"]) -> tuple[float | None, ...]:
        """Bound and dimension of the best plan for a target; None where there is none."""
        own = delta if accounting == "paper" else total_delta
        more: Any = {"failure": failure, "strong_convexity": strong_convexity}
        try:
            plan = plan_power(gains, parameters, rounds, target, own, accounting=accounting, **more)
        except PrivacyRefusal:
            return None, None
        return plan.bound, plan.dimension

    def unprojected(target: float) -> float:
        """Eq. 20: the same without projection, with as much noise as the target takes."""
        needed = 8 * weakest * math.log(1.25 / delta) / (target / rounds) ** 2
        inner = 1 + parameters / (len(kappas) ** 2 * weakest) * max(needed, 1.0)
        return 2 / (strong_convexity**2 * rounds) * inner

    over_dimension: list[Line] = [
        {
            "dimension": r,
            "theorem_1": printed(r, theorem=1) if r >= least else None,
            "theorem_2_s1": printed(r),
            "theorem_2_s2": printed(r, sparsity=2.0),
            "tight": tight(r),
            "no_projection_printed": printed(parameters, theorem="none"),
            "no_projection_tight": tight(parameters),
            "bound_s1": gap(r, kind="achlioptas"),
            "bound_s2": gap(r, kind="achlioptas", sparsity=2.0),
            "bound_no_projection": gap(parameters, kind="none"),
        }
        for r in dimensions
    ]
    over_epsilon: list[Line] = []
    for target in targets:
        line: Line = {"epsilon": target, "no_projection_printed": unprojected(target)}
        for accounting in ("paper", "tight"):
            bound, dimension = planned(target, accounting)
            line |= {f"bound_{accounting}": bound, f"dimension_{accounting}": dimension}
        over_epsilon.append(line)
    return {"over_dimension": over_dimension, "over_epsilon": over_epsilon}


def paper_curves(
    gains: Sequence[float], parameters: int, rounds: int, delta: float, strong_convexity: float
) -> PaperCurves:
    """Return the curves at the points of the paper's figures, with the setting they belong to."""
    found = curves(gains, parameters, rounds, delta, strong_convexity=strong_convexity)
    setting = {"clients": len(gains), "parameters": parameters, "rounds": rounds}
    deltas = {"delta_per_round": delta, "weakest_gain": min(gains), "tight_delta": 1e-5}
    return {"setting": setting | deltas, **found}
