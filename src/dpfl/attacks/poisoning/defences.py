"""What a server does against a dishonest client, and what the others' guarantees rest on.

A defence is a setting of the server that users can switch on, ``[server] clip`` or ``[server]
aggregation``; here it is laid over a method's strategy, so that methods that plan themselves are
compared with it as well.

All defences look at rows that are private already, so that they are post-processing and change no
epsilon. Over a secure sum the server has no rows to look at, and no defence: what one upload can do
is limited by the bound of its integers alone.
"""

import math
from dataclasses import dataclass, replace

from dpfl.attacks.observation import Observation
from dpfl.core.checks import check
from dpfl.core.errors import unknown_name
from dpfl.core.types import Observer
from dpfl.plugs.robust import AGGREGATIONS
from dpfl.privacy.accountant import spend
from dpfl.sim.loop import Simulation
from dpfl.strategy import Strategy
from dpfl.strategy.robust import with_aggregation, with_clipped_rows

DEFENCES = ("none", "clip", *AGGREGATIONS)
"""Defences by name; ``clip=0.5`` is a clip with a bound of one's own."""

OWN = "each client adds all of its noise itself: noise that another one leaves out changes nothing"
CENTRAL = "a trusted server adds the noise: a client has none that it could leave out"
NOBODY = "the method protects nobody"
AIR = (
    "noise is added up in the air: epsilons count on the clients that the channel assumes honest, "
    "and dpfl describe states them for other assumptions"
)


def check_defence(name: str) -> None:
    """Refuse a name that is not a defence, or a setting that the defence does not have.

    >>> check_defence("clip=0.5")
    """
    kind, _, bound = name.partition("=")
    if kind not in DEFENCES:
        raise unknown_name("defences", "defence", kind, DEFENCES)
    good = not bound or (kind == "clip" and _number(bound) > 0)
    check(
        good and not name.endswith("="),
        "defences",
        f"'{name}' has no such setting",
        "give a norm above 0, for instance clip=0.5" if kind == "clip" else f"say {kind}",
    )


def defended(strategy: Strategy, name: str) -> Strategy:
    """Return a method's strategy with a defence; one that it cannot have is refused."""
    check_defence(name)
    kind, _, bound = name.partition("=")
    if kind == "none":
        return strategy
    robust = {type(strategy.weights), type(strategy.clean)} & set(AGGREGATIONS.values())
    check(
        not robust,
        f"defence {name}",
        f"'{strategy.name}' aggregates robustly already",
        "compare it without a further defence",
    )
    if kind == "clip":
        return with_clipped_rows(strategy, _number(bound) if bound else None)
    return with_aggregation(strategy, kind)


def _number(text: str) -> float:
    """A finite number, or 0 where the text is none."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


@dataclass(frozen=True, kw_only=True)
class Reliance:
    """What the honest clients' guarantees rest on, when one client adds no noise.

    ``words`` say it. Where clients share noise, ``epsilon`` is the planned one of the honest client
    that spends most, and ``without`` the one that is left if the noise of one more client is
    missing than the method allows for.
    """

    words: str
    epsilon: float | None = None
    without: float | None = None


def reliance(simulation: Simulation, dishonest: str) -> Reliance:
    """Say what the others' guarantees rest on if the dishonest client leaves out its noise.

    Where every client adds its own noise, or a trusted server does, they do not depend on it. Where
    clients share one noise, a method counts on some of the shares only: over a secure sum on none
    of the colluders', elsewhere on those of all but the dropouts that are tolerated.
    """
    strategy = simulation.strategy
    terms = simulation.agreement.terms
    if strategy.observer is Observer.NOBODY:
        return Reliance(words=NOBODY)
    if strategy.channel.shares_noise:
        return Reliance(words=AIR)
    if not strategy.shares_noise:
        return Reliance(words=OWN if strategy.central_noise is None else CENTRAL)
    drawn = simulation.agreement.most_drawn(0)
    group = strategy.channel.group(drawn)
    shares = strategy.shares(terms) if group is None else group.honest
    spare = strategy.tolerated_dropouts if group is None else group.colluders
    kind = "uploads may be missing" if group is None else "may work with the server"
    words = f"noise is shared: epsilons count on {shares} of {drawn} shares"
    words += f"; {spare} {kind}, and a client that adds no noise is one of these" if spare else (
        ", and a client that adds no noise is not allowed for"
    )  # fmt: skip
    epsilon, without = _epsilons(simulation, dishonest, shares)
    return Reliance(words=words, epsilon=epsilon, without=without)


def _epsilons(simulation: Simulation, dishonest: str, shares: int) -> tuple[float | None, ...]:
    """The largest planned epsilon of an honest client with all ``shares``, and with one fewer.

    The noise of a sum of n shares goes with sqrt(n), and so does every multiplier. None where no
    honest client has a budget, and so a delta.
    """
    members = simulation.members
    strategy = simulation.strategy
    budgets = {c: m.budget for c, m in members.items() if m.budget is not None and c != dishonest}
    if not budgets:
        return None, None
    client = max(sorted(budgets), key=lambda one: budgets[one].epsilon)
    history = Observation.of(simulation).history(client, strategy.observer)
    less = math.sqrt((shares - 1) / shares)
    found = []
    for factor in (1.0, less):
        events = [replace(one, noise_multiplier=one.noise_multiplier * factor) for one in history]
        delta = budgets[client].delta
        found.append(spend(events, delta, adjacency=strategy.adjacency).epsilon)
    return tuple(found)
