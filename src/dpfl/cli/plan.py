"""``dpfl plan``: what the budgets will buy, before anything is trained.

Methods are compared by closed forms only: noise in a round's aggregate over the longest that its
signal can be. For each promise one method is recommended, with the reason; the simplest among
those that would do about equally well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dpfl.cli import console as c
from dpfl.cli import options as o

if TYPE_CHECKING:
    from dpfl.core.types import Promise
    from dpfl.experiments.describe import Description
    from dpfl.experiments.plan import MethodPlan, Plan

LEGEND = """\
eps: largest planned epsilon of any client; up, down: a round, all clients; \
time: this machine, one worker
noise / signal: noise in a round's aggregate over the longest that its signal can be, by closed \
forms; it ranks methods of one promise and does not predict accuracy"""


HEADINGS = ("method", "noise / signal", "server eps", "world eps", "up", "down", "time")


@o.takes_experiment(o.MANY)
def plan(
    asked: o.Asked,
    timing: bool = o.opt("Estimate the time by a few rounds on made-up records.", True),
) -> None:
    """Before training: noise per client, epsilons, bytes, noise to signal, time, and what to try
    first.

    Without --methods or --family, all methods that fit the federation are planned. Nothing is
    written and nothing is charged. Takes the same options as dpfl compare.
    """
    from dpfl.experiments import plan as library
    from dpfl.experiments.compare import check_settings

    if not asked.methods and asked.family is None:
        asked = replace(asked, methods="all")
    names = asked.method_names(asked.values())
    check_settings(asked.values(), names)
    experiments = [asked.experiment(name) for name in names]
    planned = library.plan(experiments, data_folder=asked.data, timing=timing)
    for one in planned.methods:
        if one.untimed:
            c.note(f"no time for {one.method}: {one.untimed}")
    c.answer(asked.json, planned.to_dict(), show, planned)


def show(planned: Plan) -> None:
    """Print one table per promise, the noise of single clients, warnings and the advice."""
    described = [one.description for one in planned.methods]
    first = described[0]
    size = f"{len(first.clients)} clients, {first.rounds} rounds, {first.parameters} parameters"
    c.out.print(f"{size}; nothing was trained")
    for open_, promise in sorted({(not one.protects, str(one.promise)) for one in described}):
        own = [one for one in planned.methods if str(one.description.promise) == promise]
        protected = "nobody" if open_ else _protected(own[0].description.promise)
        c.out.print()
        c.print_table(HEADINGS, map(_row, own), title=f"Protecting {protected}")
    c.out.print(LEGEND)
    _show_noise([one for one in described if one.protects])
    c.out.print()
    warned = [one for one in described if one.forecast.warning]
    c.warn(f"WARNING: {one.method}: {one.forecast.warning}" for one in warned)
    for tip in planned.recommendations:
        advice = f"try {tip.method} first: {tip.reason}."
        c.out.print(f"To protect {_protected(tip.promise)}, {advice}")
    if planned.recommendations:
        tuning = "Tune on public data: dpfl tune --tune-on."
        c.out.print(f"Then compare: dpfl compare with the same options. {tuning}")


def _protected(promise: Promise) -> str:
    """What is protected, and against whom."""
    return f"a {promise.unit} against the {promise.observer} ({promise.adjacency})"


def _row(one: MethodPlan) -> list[str]:
    """One method before training, as cells of a table."""
    described = one.description
    return [
        one.method,
        c.number_text(described.forecast.noise_to_signal, ".3g"),
        *(c.epsilon_text(planned.spread.largest) for planned in described.epsilon.values()),
        c.bytes_text(described.bytes_up * described.cohort),
        c.bytes_text(described.bytes_down * described.cohort),
        c.time_text(one.seconds),
    ]


def _show_noise(described: Sequence[Description]) -> None:
    """Print noise by client; methods that ask the same of everyone share a column."""
    columns: dict[tuple[float, ...], list[str]] = {}
    for one in described:
        noise = tuple(round(client.noise_multiplier or 0.0, 6) for client in one.clients)
        columns.setdefault(noise, []).append(one.method)
    names = [own[0] + (f" (+{len(own) - 1})" if own[1:] else "") for own in columns.values()]
    real = [one for one in described if not one.forecast.hypothetical] or described
    clients = real[0].clients if real else ()
    known = [[one.client, str(one.records), c.number_text(one.budget, ".4g")] for one in clients]
    noises = [[f"{value:.3g}" for value in own] for own in zip(*columns, strict=True)]
    for start in range(0, len(names), c.MOST_COLUMNS):
        part = slice(start, start + c.MOST_COLUMNS)
        rows = [[*one, *own[part]] for one, own in zip(known, noises, strict=True)]
        title = "Noise multiplier (std / clip) by client" if start == 0 else ""
        c.out.print()
        c.print_table(
            ("client", "records", "budget", *names[part]), rows[: c.MOST_LINES], title=title
        )
    if len(known) > c.MOST_LINES:
        c.out.print(f"... and {len(known) - c.MOST_LINES} more: use --json")
    c.print_lines(*(f"(+{len(own) - 1}): {', '.join(own)}" for own in columns.values() if own[1:]))
