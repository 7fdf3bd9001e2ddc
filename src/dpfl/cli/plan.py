"""``dpfl plan``: what the budgets will buy, before anything is trained."""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfl.cli import options as o
from dpfl.cli import results as r
from dpfl.cli.console import bytes_text, epsilon_text, err, out, print_json, table
from dpfl.cli.describe import description_of
from dpfl.core.errors import DpflError
from dpfl.core.layout import Layout
from dpfl.experiments.forecast import NoiseForecast, Recommendation, outlook, recommend
from dpfl.experiments.pace import seconds_in_all
from dpfl.rounds import enrol
from dpfl.rounds.members import false_claims, honest_members
from dpfl.runs.experiment import Experiment, for_method

MOST_LINES = 24
MOST_COLUMNS = 3  # methods side by side in a terminal of 80 columns
BASIS = (
    "noise / signal: noise in a round's aggregate over the longest that its signal can be, by closed forms; it ranks methods "
    "of one promise and does not predict accuracy"
)


@o.takes_experiment()
def plan(
    given: dict[str, Any],
    file: o.File = None,
    methods: r.Methods = "",
    family: r.Family = None,
    data: o.Data = None,
    timing: Annotated[
        bool, typer.Option(help="Estimate the time by a few rounds on made-up records.")
    ] = True,
    json: o.Json = False,
) -> None:
    """Before training: noise per client, epsilon per observer, bytes, noise to signal, time, and
    what to try first.
    """
    values = o.experiment_values(file, given)
    named = methods or ("" if family else "all")
    names = r.chosen_methods(named, family, values, file, data)
    o.check_settings(values, names)
    planned = [_planned(o.build(file, for_method(values, name)), data, timing) for name in names]
    advice = recommend([one["outlook"] for one in planned])
    if json:
        print_json(
            {
                "methods": [_plain(one) for one in planned],
                "recommended": [asdict(one) for one in advice],
            }
        )
        return
    show(planned, advice)


def _plain(planned: dict[str, Any]) -> dict[str, Any]:
    ratio = planned["outlook"].noise_to_signal
    return {name: value for name, value in planned.items() if name != "outlook"} | {
        "noise_to_signal": _finite(ratio)
    }


def _finite(value: float | None) -> float | str | None:
    return "infinite" if value is not None and math.isinf(value) else value


def _planned(experiment: Experiment, data: Path | None, timing: bool) -> dict[str, Any]:
    described = description_of(experiment, data)
    federation = experiment.federation(data)
    members = honest_members(federation, false_claims(federation, experiment.run.misreports))
    layout = Layout.of_module(experiment.build_model(federation))
    agreement = enrol(
        experiment.strategy(len(members)),
        {c: m.claims for c, m in members.items()},
        experiment.run.rounds,
        layout,
    )
    clients = [
        {
            "client": client,
            "records": member.shard.examples,
            "budget": member.budget.epsilon if member.budget else None,
            "noise_multiplier": max(
                (p.noise_multiplier for p in agreement.phases(member.participant)), default=0.0
            )
            or agreement.strategy.noise_multiplier,
        }
        for client, member in sorted(members.items())
    ]
    return {
        "method": experiment.method.name,
        **{
            name: described[name]
            for name in ("unit", "observer", "adjacency", "clients", "rounds", "parameters")
        },
        "epsilon": described["epsilon"],
        "bytes_up_per_round": described["bytes_up_per_client"] * described["cohort"],
        "bytes_down_per_round": described["bytes_down_per_client"] * described["cohort"],
        "seconds": _seconds(experiment, data) if timing else None,
        "per_client": clients,
        "outlook": outlook(agreement, members, experiment.public_seed()),
    }


def _seconds(experiment: Experiment, data: Path | None) -> float | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a run that is not one
            return seconds_in_all(experiment, data)
    except (
        DpflError
    ) as error:  # four clients may be too few for a method that the whole federation can run
        err.print(f"no time for {experiment.method.name}: {error}", soft_wrap=True)
        return None


def show(planned: list[dict[str, Any]], advice: list[Recommendation]) -> None:
    """Print one table a promise, the noise of single clients, and the advice."""
    first = planned[0]
    out.print(
        f"{first['clients']} clients, {first['rounds']} rounds, {first['parameters']} parameters; nothing was trained"
    )
    promises = sorted(
        {(one["outlook"].observer == "nobody", one["outlook"].promise) for one in planned}
    )
    for nobody, promise in promises:
        unit, adjacency, observer = promise
        title = (
            "Protecting nobody, for reference"
            if nobody
            else f"Protecting a {unit} from the {observer} ({adjacency})"
        )
        lines = table(
            "method", "noise / signal", "server eps", "world eps", "up", "down", "time", title=title
        )
        for one in planned:
            if one["outlook"].promise != promise:
                continue
            lines.add_row(
                one["method"],
                _ratio(one["outlook"]),
                *(epsilon_text(one["epsilon"][who]["largest"]) for who in ("server", "world")),
                bytes_text(one["bytes_up_per_round"]),
                bytes_text(one["bytes_down_per_round"]),
                "-" if one["seconds"] is None else _time(one["seconds"]),
            )
        out.print()
        out.print(lines)
    out.print(
        "eps: largest planned epsilon of any client; up, down: a round, all clients; time: this machine, one worker"
    )
    out.print(BASIS)
    _show_noise(planned)
    out.print()
    for tip in advice:
        unit, adjacency, observer = tip.promise
        out.print(
            f"To protect a {unit} from the {observer} ({adjacency}), try {tip.method} first: {tip.reason}."
        )
    if advice:
        out.print(
            "Then compare: dpfl compare with the same options. Tune on public data: dpfl tune --tune-on."
        )


def _show_noise(planned: list[dict[str, Any]]) -> None:
    """Noise by client, where clients differ; methods that ask the same of everyone share a column."""
    columns: dict[tuple[float, ...], list[str]] = {}
    for one in planned:
        if one["observer"] != "nobody":
            key = tuple(round(client["noise_multiplier"] or 0.0, 6) for client in one["per_client"])
            columns.setdefault(key, []).append(one["method"])
    if not columns:
        return
    for first in range(0, len(columns), MOST_COLUMNS):
        part = dict(list(columns.items())[first : first + MOST_COLUMNS])
        _show_noise_of(
            planned, part, "Noise multiplier (std / clip) by client" if first == 0 else None
        )
    clients = planned[0]["per_client"]
    if len(clients) > MOST_LINES:
        out.print(f"... and {len(clients) - MOST_LINES} more: use --json")
    for own in columns.values():
        if len(own) > 1:
            out.print(f"(+{len(own) - 1}): {', '.join(own)}")


def _show_noise_of(
    planned: list[dict[str, Any]], columns: dict[tuple[float, ...], list[str]], title: str | None
) -> None:
    headings = [
        own[0] + (f" (+{len(own) - 1})" if len(own) > 1 else "") for own in columns.values()
    ]
    lines = table("client", "records", "budget", *headings, title=title)
    clients = planned[0]["per_client"]
    for number, client in enumerate(clients[:MOST_LINES]):
        granted = next(
            (one["per_client"][number]["budget"] for one in planned if one["observer"] != "nobody"),
            None,
        )
        lines.add_row(
            client["client"],
            str(client["records"]),
            "-" if granted is None else f"{granted:.4g}",
            *(f"{key[number]:.3g}" for key in columns),
        )
    out.print()
    out.print(lines)


def _ratio(one: NoiseForecast) -> str:
    return "-" if one.noise_to_signal is None else f"{one.noise_to_signal:.3g}"


def _time(seconds: float) -> str:
    return (
        f"{seconds:.1f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )
