"""The sentences that people read, in words that a board can follow and a mathematician accepts.

Every number in a sentence is rounded so that privacy never looks better than it is. What is only
said in pages is in ``templates/texts.html.j2``, and flags are worded by :mod:`dpfl.privacy.flags`.
"""

import datetime
import math
from collections import Counter
from collections.abc import Mapping

from dpfl.core.promise import colluding
from dpfl.core.types import Adjacency, Observer, Promise
from dpfl.engine.finish_scores import FinishScores, Verdict, finish_gain, finish_means
from dpfl.privacy.accountant import shown
from dpfl.privacy.flags import Flag, RaisedFlag
from dpfl.runs.display import duration as duration, size as size
from dpfl.runs.result import Summary
from dpfl.tasks import MetricWords

ADJACENCY = {
    Adjacency.ZERO_OUT: "with the {unit} in place, and with it replaced by nothing while the "
    "number of {unit}s stays known",
    Adjacency.ADD_REMOVE: "with the {unit} in place, and without it",
    Adjacency.REPLACE_ONE: "with the {unit} in place, and with any other {unit} in its place",
}
ADVERSARY = {
    Observer.SERVER: "the server, and so everyone who learns anything from it",
    Observer.WORLD: "everyone who sees the published models",
    Observer.NOBODY: "nobody",
}


def grave(raised: RaisedFlag) -> bool:
    """Whether a flag says that the numbers must not be taken at their word."""
    return raised.flag.voids_privacy or raised.flag is Flag.FALSE_CLAIMS


# -- what is promised ------------------------------------------------------------------------------


def promise(promised: Promise, spent: float | None = None, by_server: float = math.inf) -> str:
    """Say who is protected from whom.

    ``spent`` is the largest epsilon under the promise, ``by_server`` the largest one against the
    server, infinite where the server is trusted. Where the promise is to the world, what the server
    itself learns is said as well.

    >>> from dpfl.core.types import Unit
    >>> server = Promise(
    ...     unit=Unit.RECORD, adjacency=Adjacency.ZERO_OUT, observer=Observer.SERVER
    ... )
    >>> promise(server)
    'Each record is protected, from the server, and so everyone who learns anything from it.'
    """
    if promised.observer is Observer.NOBODY:
        return "This method protects nobody: it is shown to tell what privacy costs."
    who = f"Each {promised.unit}" if promised.unit.of_data else "The whole contribution of a site"
    adversary = ADVERSARY[promised.observer]
    if helped := colluding(promised.colluders):
        adversary = adversary.replace("server,", f"server{helped},")
    said = f"{who} is protected, from {adversary}."
    if promised.observer is not Observer.WORLD:
        return said
    if math.isinf(by_server):
        return f"{said} The server is trusted: against it nothing is guaranteed."
    if spent == by_server:
        return f"{said} The same holds against the server itself."
    larger = "larger: " if spent is not None and spent < by_server else ""
    loss = f"{larger}at most epsilon {shown(by_server)}"
    return f"{said} Against the server itself the loss of a site is {loss}."


def promise_of(summary: Summary) -> str:
    """Say who is protected from whom in a finished run."""
    own = summary.epsilon
    server = summary.epsilon_against.get(Observer.SERVER)
    spent = own.spent.largest if own else None
    return promise(summary.promise, spent, server.spent.largest if server else math.inf)


def promises(summaries: Mapping[str, Summary]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Methods, promise and assumptions, with methods that agree in both put together."""
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for label, summary in summaries.items():
        alike.setdefault((promise_of(summary), summary.assumptions), []).append(label)
    return [(", ".join(labels), said, assumed) for (said, assumed), labels in alike.items()]


def meaning(promised: Promise, epsilon: float, delta: float | None) -> str:
    """Say what an epsilon means, in odds.

    The odds are rounded up to three digits, or to a power of ten where they are large.
    """
    worlds = ADJACENCY[promised.adjacency].format(unit=promised.unit)
    factor = math.exp(min(epsilon, 700))
    power = f"10 to the {math.ceil(epsilon / math.log(10))}"
    odds = power if factor >= 1e4 else _rounded_up(factor)
    failure = f", except with a probability of at most {delta:g}" if delta else ""
    return (
        f"An epsilon of {shown(epsilon)} means: compare two worlds, {worlds}. Whatever the "
        f"adversary sees is at most {odds} times as likely in one as in the other{failure}."
    )


def _rounded_up(factor: float) -> str:
    """Three digits, rounded up: an odds ratio must not look smaller than it is.

    >>> _rounded_up(1.6487), _rounded_up(2980.9)
    ('1.65', '2990')
    """
    if factor >= 1000:
        return str(10 * math.ceil(factor / 10))
    digits = 2 - math.floor(math.log10(factor))
    return f"{math.ceil(factor * 10**digits) / 10**digits:.{digits}f}"


# -- what clients get ------------------------------------------------------------------------------


def finish_in_words(finish: Mapping[str, FinishScores], clients: int) -> str:
    """Say what sites get on average, and how many get something from federating.

    ``clients`` is how many there are; ``finish`` has those that can be compared. Nothing is said
    where it has none.
    """
    if not finish:
        return ""
    metric = MetricWords(next(iter(finish.values())).metric)
    local, common, both = map(metric.show, finish_means(finish))
    more = " ± ".join(map(metric.number, finish_gain(finish)))
    verdicts = Counter(scores.verdict for scores in finish.values())
    bought = (
        f"Federating helps {verdicts[Verdict.HELPS]} of {count(len(finish), 'site')} and buys "
        f"nothing for {verdicts[Verdict.NOTHING]}, by two standard errors; "
        f"{verdicts[Verdict.UNCLEAR]} have too few test records to tell."
    )
    if len(finish) < clients:
        bought += f" The test records of {clients - len(finish)} more do not define the metric."
    means = f"{local} with own records alone, {common} with the common model, {both} with both"
    return f"Mean {metric.words} over sites: {means} ({more} more than alone). {bought}"


# -- numbers ---------------------------------------------------------------------------------------


def count(number: int, one: str, many: str = "") -> str:
    """A number with its noun.

    >>> count(1, "round"), count(3, "study", "studies")
    ('1 round', '3 studies')
    """
    return f"{number} {one if number == 1 else many or one + 's'}"


def moment(at: float | None) -> str:
    """Seconds since 1970 as a date and a time; a dash where no calendar has one.

    >>> moment(0)
    '1970-01-01 00:00 UTC'
    """
    try:
        found = None if at is None else datetime.datetime.fromtimestamp(at, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        found = None
    return "-" if found is None else found.strftime("%Y-%m-%d %H:%M UTC")


metric = MetricWords
"""How the values of a metric are written: ``metric("auc").show(0.9)``."""
