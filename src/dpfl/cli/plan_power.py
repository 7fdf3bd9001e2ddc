"""``dpfl plan-power``: how many directions, and how much of each client's power for noise, before
anybody transmits.
"""

from __future__ import annotations

import csv
import math
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfl.cli.console import epsilon_text, out, print_json, table
from dpfl.cli.options import Json
from dpfl.core.errors import ConfigurationError, DataError
from dpfl.core.random import PublicSeed
from dpfl.experiments.power import curves, plan_power

MOST_LINES = 12


def plan(
    parameters: Annotated[int, typer.Option(help="Parameters of the model (d).")],
    rounds: Annotated[int, typer.Option(help="Rounds.")],
    delta: Annotated[float, typer.Option(help="Delta; with --accounting paper, of one round.")],
    epsilon: Annotated[
        float | None, typer.Option(help="What all rounds may cost a client.", show_default=False)
    ] = None,
    gains: Annotated[
        Path | None,
        typer.Option(help="CSV with the columns id,gain; or --clients.", show_default=False),
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="Draw this many Rayleigh gains instead.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of drawn gains.")] = 0,
    accounting: Annotated[
        str, typer.Option(help="tight, or paper (linear composition).")
    ] = "tight",
    adjacency: Annotated[str, typer.Option(help="replace_one or zero_out.")] = "replace_one",
    projection: Annotated[
        str, typer.Option(help="rademacher, gaussian, achlioptas or fourier.")
    ] = "rademacher",
    power: Annotated[float, typer.Option(help="Average power of a client.")] = 1.0,
    clip: Annotated[float, typer.Option(help="Largest norm of a gradient.")] = 1.0,
    strong_convexity: Annotated[float, typer.Option(help="Of the loss, for the bound.")] = 1e-3,
    figures: Annotated[
        bool, typer.Option("--curves", help="Write the paper's curves as JSON instead of one plan.")
    ] = False,
    json: Json = False,
) -> None:
    """Plan a static over-the-air channel: the dimension to project onto, the power split, and the
    bound of Theorem 3.
    """
    named = _gains(gains, clients, seed)
    if figures:
        print_json(_curves(list(named.values()), parameters, rounds, delta, strong_convexity))
        return
    if epsilon is None:
        raise ConfigurationError("--epsilon", "is missing", "say what all rounds may cost a client")
    settings: dict[str, Any] = {
        "accounting": accounting,
        "adjacency": adjacency,
        "kind": projection,
        "power": power,
    }
    if accounting not in ("tight", "paper"):
        raise ConfigurationError("--accounting", f"'{accounting}'", "choose tight or paper")
    found = plan_power(
        list(named.values()),
        parameters,
        rounds,
        epsilon,
        delta,
        clip=clip,
        strong_convexity=strong_convexity,
        **settings,
    )
    meaning = {
        "unit": "client",
        "observer": "server",
        "adjacency": adjacency,
        "delta": delta,
        "composition": accounting,
    }
    if json:
        print_json(
            {
                **asdict(found),
                "artificial": dict(zip(named, found.artificial, strict=True)),
                **meaning,
            }
        )
        return
    facts = table("", "", left=2)
    facts.add_row(
        "project onto",
        f"{found.dimension} of {parameters} numbers ({found.dimension} channel uses a round)",
    )
    facts.add_row("epsilon", f"{epsilon_text(found.epsilon)} (target {epsilon:g})")
    facts.add_row("", f"per client, {adjacency} adjacency, against the server")
    facts.add_row("", f"{accounting} composition")
    facts.add_row("noise / signal", f"{found.noise_multiplier:.4g}")
    facts.add_row("bound (Theorem 3)", f"{found.bound:.6g}")
    facts.add_row(
        "power for noise",
        f"{100 * statistics.mean(found.artificial):.1f} % on average, most {100 * max(found.artificial):.1f} %",
    )
    out.print(facts)
    if len(named) <= MOST_LINES:
        shares = table("client", "gain", "signal %", "noise %")
        weakest = min(named.values())
        for (client, gain), share in zip(named.items(), found.artificial, strict=True):
            shares.add_row(
                client, f"{gain:.4g}", f"{100 * (weakest / gain) ** 2:.1f}", f"{100 * share:.1f}"
            )
        out.print(shares)


def _curves(
    gains: list[float], parameters: int, rounds: int, delta: float, strong_convexity: float
) -> dict[str, Any]:
    dimensions = sorted({round(parameters ** (i / 24)) for i in range(4, 25)})
    targets = [float(f"{10 ** (i / 5):.3g}") for i in range(-2, 14)]
    found = curves(
        gains,
        parameters,
        rounds,
        delta,
        strong_convexity=strong_convexity,
        dimensions=dimensions,
        targets=targets,
    )
    setting = {
        "clients": len(gains),
        "parameters": parameters,
        "rounds": rounds,
        "delta_per_round": delta,
    }
    return {"setting": {**setting, "weakest_gain": min(gains), "tight_delta": 1e-5}, **found}


def _gains(path: Path | None, clients: int | None, seed: int) -> dict[str, float]:
    if (path is None) == (clients is None):
        raise ConfigurationError("gains", "need either --gains or --clients", "give one of the two")
    if path is None:
        assert clients is not None
        if clients < 1:
            raise ConfigurationError("--clients", f"{clients}", "give a number of clients")
        drawn = PublicSeed(seed).child("gains").numpy().exponential(size=clients)
        digits = len(str(clients - 1))
        return {
            f"client-{i:0{digits}d}": math.sqrt(value) for i, value in enumerate(drawn.tolist())
        }
    try:
        with path.open(newline="") as stream:
            lines = list(csv.DictReader(stream))
        found = {line["id"]: float(line["gain"]) for line in lines}
    except OSError as error:
        raise DataError(
            str(path), f"cannot be read ({error.strerror})", "check the path"
        ) from error
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise DataError(
            str(path), f"is no table of gains ({error})", "give the columns id,gain"
        ) from error
    if not found or len(found) != len(lines):
        raise DataError(str(path), "names no client, or one twice", "give one line per client")
    return found
