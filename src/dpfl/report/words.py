"""What a run promises, in words that a board member can follow and a mathematician cannot fault."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dpfl.privacy.accountant import shown

ADJACENCY = {
    "zero_out": "with the {unit} in place, and with it replaced by nothing while the number of {unit}s stays known",
    "add_remove": "with the {unit} in place, and without it",
    "replace_one": "with the {unit} in place, and with any other {unit} in its place",
}
OBSERVER = {
    "server": "the server, and so everyone who learns anything from it",
    "world": "everyone who sees the published models",
    "nobody": "nobody",
}


def promise(summary: Mapping[str, Any]) -> str:
    """Who is protected from whom."""
    if summary["observer"] == "nobody":
        return "This method protects nobody: it is shown to tell what privacy costs."
    unit = summary["unit"]
    whom = (
        "each single record of a site" if unit == "record" else "the whole contribution of a site"
    )
    return f"Protected is {whom}, from {OBSERVER[summary['observer']]}.{against_server(summary)}"


def against_server(summary: Mapping[str, Any]) -> str:
    """Where the promise is to the world: what the server itself learns."""
    if summary["observer"] != "world":
        return ""
    spent = summary.get("epsilon_by_observer", {}).get("server", {}).get("spent")
    largest = spent["largest"] if spent else "infinite"
    if largest == "infinite":
        return " The server is trusted: against it nothing is guaranteed."
    world = (summary["epsilon"].get("spent") or {}).get("largest")
    if world == largest:
        return " The same holds against the server itself."
    larger = (
        "larger: at most"
        if isinstance(world, int | float) and world < float(largest)
        else "at most"
    )
    return f" Against the server itself the loss of a site is {larger} epsilon {shown(float(largest))}."


def meaning(summary: Mapping[str, Any], epsilon: float, delta: float | None) -> str:
    """What an epsilon says, in odds."""
    unit = summary["unit"]
    worlds = ADJACENCY[summary["adjacency"]].format(unit=unit)
    factor = math.exp(min(epsilon, 700))
    odds = f"{_up(factor)}" if factor < 1e4 else f"10 to the {math.ceil(epsilon / math.log(10))}"
    but = "" if not delta else f", but for a failure of probability at most {delta:g}"
    return (
        f"An epsilon of {shown(epsilon)} means: compare two worlds, {worlds}. Whatever the observer sees is at most {odds} "
        f"times as likely in one as in the other{but}."
    )


def _up(factor: float) -> str:
    """Three digits, rounded up: an odds ratio must not look smaller than it is."""
    if factor >= 1000:
        return str(10 * math.ceil(factor / 10))
    digits = 2 - math.floor(math.log10(factor))
    return f"{math.ceil(factor * 10**digits) / 10**digits:.{digits}f}"


def strength(epsilon: float) -> str:
    """A word for an epsilon; thresholds as commonly used, and said to be no more than that.

    >>> strength(0.5), strength(30.0)
    ('strong', 'weak')
    """
    if epsilon <= 1:
        return "strong"
    return "moderate" if epsilon <= 10 else "weak"


GUARANTEES = (
    "Each site's charge was written down before anything that depends on its data was released.",
    "Every epsilon is an upper bound on the loss of the whole run, by the accountant named beside it, and shown rounded up.",
    "No site spends more than it granted: one that cannot afford another round leaves, and the model goes on without it.",
    "What a client says of its budget may change how its update is weighed, never what it is charged.",
)
LEDGER_GUARANTEES = (
    "Every study was planned before its first release: how often it may release, with how much noise and sampling.",
    "Every charge was written into this ledger before anything that depends on the data was released.",
    "Every epsilon is an upper bound on the loss over all studies in this ledger together, also if a study was chosen by "
    "looking at the results of earlier ones; it is shown rounded up.",
    "A study or a round that would exceed the budget is refused, whatever a server says.",
    "A ledger that was edited, cut or replaced by an old copy is refused, as long as its head file was not replaced with it.",
)
LEDGER_LIMITS = (
    "Releases that were not made through this ledger, and other ledgers on the same records, add to these numbers.",
    "A ledger that was put back together with its old head file has forgotten what was charged since. Only a head that was "
    "noted elsewhere reveals that.",
    "Choosing the method or its settings by looking at private data, and passing on measured accuracies, are not covered.",
    "Noise comes from AES-256, keyed by the operating system: the guarantee is against adversaries who cannot break it.",
)
LIMITS = (
    "The epsilons cover this run only. Other runs on the same data add to them; a ledger that spans runs adds them up.",
    "Choosing the method or its settings by looking at private data is not covered.",
    "Accuracy and loss are measured on the clients' test records and are not covered.",
    "Noise comes from AES-256, keyed by the operating system: the guarantee is against adversaries who cannot break it.",
)
