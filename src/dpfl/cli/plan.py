"""``dpfl plan``: what the budgets will buy, before anything is trained.

Methods are compared by closed forms only: noise in a round's aggregate over the longest that its
signal can be. For each promise one method is recommended, with the reason; the simplest among
those that would do about equally well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from dpfl.cli import console as c
from dpfl.cli import options as o

if TYPE_CHECKING:
    from dpfl.experiments.describe import Description
    from dpfl.experiments.plan import MethodPlan, Plan

MOST_COLUMNS = 3
"""Methods side by side in a terminal of 80 columns."""

LEGEND = """\
eps: largest planned epsilon of any client; up, down: a round, all clients; \
time: this machine, one worker
noise / signal: noise in a round's aggregate over the longest that its signal can be, by closed \
forms; it ranks methods of one promise and does not predict accuracy"""


@o.takes_experiment(o.MANY)
def plan(
    asked: o.Asked,
    timing: Annotated[bool, o.opt("Estimate the time by a few rounds on made-up records.")] = True,
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
    c.answer(asked.json, planned.to_dict, lambda: show(planned))


def show(planned: Plan) -> None:
    """Print one table per promise, the noise of single clients, warnings and the advice."""
    first = planned.methods[0].description
    size = f"{len(first.clients)} clients, {first.rounds} rounds, {first.parameters} parameters"
    c.out.print(f"{size}; nothing was trained")
    promises = {str(one.description.promise): one.description for one in planned.methods}
    for promise in sorted(promises, key=lambda name: (not promises[name].protects, name)):
        own = [one for one in planned.methods if str(one.description.promise) == promise]
        c.out.print()
        c.out.print(_methods_table(own, promises[promise]))
    c.out.print(LEGEND)
    _show_noise([one.description for one in planned.methods if one.description.protects])
    c.out.print()
    warned = [one for one in planned.methods if one.description.forecast.warning]
    c.warn(f"WARNING: {one.method}: {one.description.forecast.warning}" for one in warned)
    for tip in planned.recommendations:
        protected = f"To protect a {tip.promise.unit} against the {tip.promise.observer}"
        advice = f"({tip.promise.adjacency}), try {tip.method} first: {tip.reason}."
        c.out.print(f"{protected} {advice}")
    if planned.recommendations:
        c.out.print(
            "Then compare: dpfl compare with the same options. "
            "Tune on public data: dpfl tune --tune-on."
        )


def _methods_table(own: Sequence[MethodPlan], first: Description) -> object:
    """Return the table of the methods that promise the same."""
    promise = first.promise
    title = f"Protecting a {promise.unit} against the {promise.observer} ({promise.adjacency})"
    headings = ("noise / signal", "server eps", "world eps", "up", "down", "time")
    lines = c.table("method", *headings, title=title if first.protects else "Protecting nobody")
    for one in own:
        described = one.description
        ratio = described.forecast.noise_to_signal
        lines.add_row(
            one.method,
            "-" if ratio is None else f"{ratio:.3g}",
            *(c.epsilon_text(planned.spread.largest) for planned in described.epsilon.values()),
            c.bytes_text(described.bytes_up * described.cohort),
            c.bytes_text(described.bytes_down * described.cohort),
            c.time_text(one.seconds),
        )
    return lines


def _show_noise(described: Sequence[Description]) -> None:
    """Print noise by client; methods that ask the same of everyone share a column."""
    columns: dict[tuple[float, ...], list[str]] = {}
    for one in described:
        noise = tuple(round(client.noise_multiplier or 0.0, 6) for client in one.clients)
        columns.setdefault(noise, []).append(one.method)
    real = [one for one in described if not one.forecast.hypothetical] or described
    for start in range(0, len(columns), MOST_COLUMNS):
        part = list(columns.items())[start : start + MOST_COLUMNS]
        title = "Noise multiplier (std / clip) by client" if start == 0 else None
        names = [own[0] + (f" (+{len(own) - 1})" if len(own) > 1 else "") for _, own in part]
        lines = c.table("client", "records", "budget", *names, title=title)
        for number, client in enumerate(real[0].clients[: c.MOST_LINES]):
            budget = "-" if client.budget is None else f"{client.budget:.4g}"
            shown = [f"{key[number]:.3g}" for key, _ in part]
            lines.add_row(client.client, str(client.records), budget, *shown)
        c.out.print()
        c.out.print(lines)
    if columns and len(real[0].clients) > c.MOST_LINES:
        c.out.print(f"... and {len(real[0].clients) - c.MOST_LINES} more: use --json")
    for own in columns.values():
        if len(own) > 1:
            c.out.print(f"(+{len(own) - 1}): {', '.join(own)}")
