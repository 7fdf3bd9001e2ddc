"""``dpfl describe``: what would happen, to whom, against whom, at what cost; without running it.

Nothing is trained and nothing is charged. Printed are the pipeline of one round, the promise with
its assumptions, the planned epsilon against the server and against the world, the noise, and the
bytes of a round; and a warning where the noise of a round drowns what could be learned in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpfl.cli import console as c
from dpfl.cli import options as o

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
    c.answer(asked.json, described.to_dict(), show, described)


def show(described: Description) -> None:
    """Print a description for people."""
    title = f"{described.method}: one round"
    c.print_table(("step", "component"), described.pipeline, left=2, title=title)
    promise, said = described.promise, "protects nobody"
    if described.protects:
        hidden = f"protects a {promise.unit} against the {promise.observer}"
        said = f"{hidden} ({promise.adjacency} adjacency)"
    c.print_lines(f"\nPromise: {said}", *(f"  - {one}" for one in described.assumptions), "")
    _show_costs(described)
    if described.running_out:
        early = f"{described.running_out} client(s) will run out of budget"
        c.out.print(f"{early} before their planned participations, and leave")
    if described.noise_multiplier:
        spread = " / ".join(f"{value:.3g}" for value in vars(described.noise_multiplier).values())
        c.out.print(f"noise multiplier (std / clip): {spread}  (smallest / median / largest)")
    size = f"{described.rounds} rounds, {len(described.clients)} clients"
    cohort = f"about {described.cohort:g} a round"
    c.out.print(f"{size}, {cohort}, {described.participations} planned participations each")
    up, down = c.bytes_text(described.bytes_up), c.bytes_text(described.bytes_down)
    c.out.print(f"{described.parameters} parameters; per client and round {up} up, {down} down")
    if described.forecast.warning:
        c.warn([f"WARNING: {described.forecast.warning}"])


def _show_costs(described: Description) -> None:
    """Print epsilons by adversary, as published, and by whose noise is counted on."""
    headings, published = ("smallest", "median", "largest"), described.published
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
