"""``dpfl describe`` and ``dpfl plan``: what would happen, to whom, at what cost, without a run.

Nothing is trained and nothing is charged. ``describe`` prints the pipeline of one round, the
promise with its assumptions, the planned epsilon against the server and against the world, the
noise, and the bytes of a round; and a warning where the noise of a round drowns what could be
learned in it.

``plan`` compares methods by closed forms only: noise in a round's aggregate over the longest that
its signal can be. For each promise one method is recommended, with the reason; the simplest among
those that would do about equally well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dpfl.cli import console as c, options as o

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


@o.takes_experiment()
def describe(asked: o.Asked) -> None:
    """Print the pipeline, the promise, epsilon by adversary, noise and bytes, without training.

    Says which assumptions the promise rests on, how many clients will run out of budget, and warns
    where noise would drown the signal. Takes the same options as dpfl run.
    """
    from dpfl.experiments import describe as library

    described = library.describe(asked.experiment(), asked.data)
    c.answer(asked.json, described.to_dict(), show_description, described)


def show_description(described: Description) -> None:
    """Print a description for people."""
    title = f"{described.method}: one round"
    c.print_table(("step", "component"), described.pipeline, left=2, title=title)
    promise = described.promise
    said = "protects nobody"
    if described.protects:
        hidden = f"protects a {promise.unit} against the {promise.adversary}"
        said = f"{hidden} ({promise.adjacency} adjacency)"
    c.print_lines(f"\nPromise: {said}", *(f"  - {one}" for one in described.assumptions), "")
    _show_costs(described)
    if described.secure_sum:
        c.out.print(f"secure sum: {described.secure_sum}")
    if described.running_out:
        early = f"{described.running_out} client(s) will run out of budget"
        c.out.print(f"{early} before their planned participations, and leave")
    if described.noise_multiplier:
        spread = " / ".join(f"{value:.3g}" for value in vars(described.noise_multiplier).values())
        c.out.print(f"noise multiplier (std / clip): {spread}  (smallest / median / largest)")
    if described.forecast.planned:
        c.print_table(
            ("planned", "from claims and shapes alone"), described.forecast.planned, left=2
        )
    size = f"{described.rounds} rounds, {len(described.clients)} clients"
    cohort = f"about {described.cohort:g} a round"
    c.out.print(f"{size}, {cohort}, {described.participations} planned participations each")
    up = c.size(described.bytes_up)
    down = c.size(described.bytes_down)
    c.out.print(f"{described.parameters} parameters; per client and round {up} up, {down} down")
    for name, reason in described.slow_layers.items():
        layer = f"layer '{name}'" if name else "the model itself"
        c.out.print(f"slow: {layer}: {reason}")
    c.warn(described.flags)
    if described.forecast.warning:
        c.warn([f"WARNING: {described.forecast.warning}"])


def _show_costs(described: Description) -> None:
    """Print epsilons by adversary, as published, and by whose noise is counted on."""
    headings = ("smallest", "median", "largest")
    published = described.published
    costs = [
        [f"against the {observer}", *c.format_spread(one.spread), ", ".join(one.accountants)]
        for observer, one in described.epsilon.items()
    ]
    if published:
        costs.append(["as published", "", "", f"{published.epsilon:.2f}", "display only"])
    c.print_table(("planned epsilon", *headings, "accountant"), costs)
    if published:
        c.out.print(f"as published: {published.remark}")
    if described.by_assumption:
        assumed = described.by_assumption.items()
        rows = [[name, *c.format_spread(spread)] for name, spread in assumed]
        c.print_table(("over this run's channel, if", *headings), rows)


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

    if not asked.methods and asked.family is None:
        asked = replace(asked, methods="all")
    names = asked.method_names(asked.values())
    experiments = [asked.experiment(name) for name in names]
    planned = library.plan(experiments, data_folder=asked.data, timing=timing)
    for one in planned.methods:
        if one.untimed:
            c.note(f"no time for {one.method}: {one.untimed}")
    c.answer(asked.json, planned.to_dict(), show_plan, planned)


def show_plan(planned: Plan) -> None:
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
    for one in described:
        if one.forecast.planned:
            c.out.print()
            title = f"What {one.method} plans, and from what"
            c.print_table(("planned", "because"), one.forecast.planned, left=2, title=title)
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
    return f"a {promise.unit} against the {promise.adversary} ({promise.adjacency})"


def _row(one: MethodPlan) -> list[str]:
    """One method before training, as cells of a table."""
    described = one.description
    return [
        one.method,
        c.number_text(described.forecast.noise_to_signal, ".3g"),
        *(c.epsilon_text(planned.spread.largest) for planned in described.epsilon.values()),
        c.size(described.bytes_up * described.cohort),
        c.size(described.bytes_down * described.cohort),
        "-" if one.seconds is None else c.duration(one.seconds),
    ]


def _show_noise(described: Sequence[Description]) -> None:
    """Print noise by client; methods that ask the same of everyone share a column."""
    columns: dict[tuple[float, ...], list[str]] = {}
    for one in described:
        noise = tuple(round(client.noise_multiplier or 0.0, 6) for client in one.clients)
        columns.setdefault(noise, []).append(one.method)
    names = [own[0] + (f" (+{len(own) - 1})" if own[1:] else "") for own in columns.values()]
    real = [one for one in described if not one.forecast.reference] or described
    clients = real[0].clients if real else ()
    known = [[one.client, str(one.records), c.number_text(one.budget, ".4g")] for one in clients]
    noises = [[f"{value:.3g}" for value in own] for own in zip(*columns, strict=True)]
    for start in range(0, len(names), c.MOST_COLUMNS):
        part = slice(start, start + c.MOST_COLUMNS)
        rows = [[*one, *own[part]] for one, own in zip(known, noises, strict=True)]
        title = "Noise multiplier (std / clip) by client" if start == 0 else ""
        c.out.print()
        heads = ("client", f"{real[0].counted}s", "budget", *names[part])
        c.print_table(heads, rows[: c.MOST_LINES], title=title)
    if len(known) > c.MOST_LINES:
        c.out.print(f"... and {len(known) - c.MOST_LINES} more: use --json")
    c.print_lines(*(f"(+{len(own) - 1}): {', '.join(own)}" for own in columns.values() if own[1:]))
