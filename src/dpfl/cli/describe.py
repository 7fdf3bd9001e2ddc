"""``dpfl describe``: what would happen, to whom, against whom, at what cost; without running it.

Nothing is trained and nothing is charged. Printed are the pipeline of one round, the promise with
its assumptions, the planned epsilon against the server and against the world, the noise, and the
bytes of a round; and a warning where the noise of a round drowns what could be learned in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpfl.cli import options as o
from dpfl.cli.console import answer, bytes_text, format_spread, out, table, warn

if TYPE_CHECKING:
    from dpfl.experiments.describe import Description


@o.takes_experiment(one_method=True)
def describe(asked: o.Asked) -> None:
    """Print the pipeline, the promise, epsilon by adversary, noise and bytes, without training.

    Says which assumptions the promise rests on, how many clients will run out of budget, and warns
    where noise would drown the signal. Takes the same options as dpfl run.
    """
    from dpfl.experiments import describe as library

    described = library.describe(asked.experiment(), asked.data)
    answer(asked.json, described.to_dict, lambda: show(described))


def show(described: Description) -> None:
    """Print a description for people."""
    pipeline = table("step", "component", left=2, title=f"{described.method}: one round")
    for step, piece in described.pipeline:
        pipeline.add_row(step, piece)
    out.print(pipeline)
    promise = described.promise
    hidden = f"protects a {promise.unit} against the {promise.observer}"
    said = f"{hidden} ({promise.adjacency} adjacency)" if described.protects else "protects nobody"
    out.print(f"\nPromise: {said}")
    for assumption in described.assumptions:
        out.print(f"  - {assumption}")
    out.print()
    _show_costs(described)
    if described.running_out:
        early = f"{described.running_out} client(s) will run out of budget"
        out.print(f"{early} before their planned participations, and leave")
    if described.noise_multiplier:
        spread = " / ".join(f"{value:.3g}" for value in vars(described.noise_multiplier).values())
        out.print(f"noise multiplier (std / clip): {spread}  (smallest / median / largest)")
    out.print(
        f"{described.rounds} rounds, {len(described.clients)} clients, about "
        f"{described.cohort:g} a round, {described.participations} planned participations each"
    )
    up, down = bytes_text(described.bytes_up), bytes_text(described.bytes_down)
    out.print(f"{described.parameters} parameters; per client and round {up} up, {down} down")
    if described.forecast.warning:
        warn([f"WARNING: {described.forecast.warning}"])


def _show_costs(described: Description) -> None:
    """Print epsilons by adversary, as published, and by whose noise is counted on."""
    headings = ("smallest", "median", "largest")
    costs = table("planned epsilon", *headings, "accountant")
    for observer, planned in described.epsilon.items():
        accountants = ", ".join(planned.accountants)
        costs.add_row(f"against the {observer}", *format_spread(planned.spread), accountants)
    published = described.published
    if published:
        costs.add_row("as published", "", "", f"{published.epsilon:.2f}", "display only")
    out.print(costs)
    if published:
        out.print(f"as published: {published.remark}")
    if described.by_assumption:
        assumed = table("over this run's channel, if", *headings)
        for name, spread in described.by_assumption.items():
            assumed.add_row(name, *format_spread(spread))
        out.print(assumed)
