"""What is said of poisoning, on its page and in the terminal.

Every epsilon is said to be about a unit, an adjacency and an adversary, and rounded up.
"""

import statistics
from collections.abc import Sequence

from dpfl.attacks.poisoning.results import AttackedMethod, Cell, Poisoning
from dpfl.privacy.accountant import shown
from dpfl.tasks import MetricWords

SEEDED = (
    "NOT PRIVATE: these are simulations with seeded noise, to see what an attack does; epsilons "
    "are those that the same runs would have with noise from the operating system."
)
SAME = (
    "Every honest client is charged exactly the same epsilon with and without each attack: neither "
    "a claim nor an upload changes what another client is charged."
)
CHANGED_PLAN = "the claim has changed the common plan, and nobody is above its own budget"
ABOVE = "SOMEBODY IS ABOVE ITS OWN BUDGET"
ADAPTIVE = (
    "A dishonest client that steers the model does not weaken the others' guarantees: they hold "
    "for models that an adversary has chosen."
)
READING = (
    "Tables show means and standard deviations over seeds, on the honest clients' test records. "
    "Drop: how much worse than without an attack. Trigger: the share of records with the trigger, "
    "of other classes, that get its label. Weight: the dishonest client's share of all weights. "
    "Diverged: a loss ten times that of the first model. Cut off: numbers of its uploads that "
    "bounds of the protocol have cut off. Epsilon change: the largest one of an honest client."
)
LEGEND = """\
score: mean ± standard deviation over seeds, on the honest clients' test records; drop: how much \
worse than without an attack; trigger: share of records with the trigger, of other classes, that \
get its label; weight: the dishonest client's share of all weights; *: runs that diverged, with a \
loss ten times that of the first model"""
HEADINGS = ("drop", "trigger %", "weight %")
SHARE = MetricWords("accuracy")
"""How shares are shown: in percent."""


def dishonest(found: Poisoning) -> str:
    """Say who is dishonest in which runs, and how it was chosen.

    Where budgets are drawn by the seed, the client with the largest one differs from seed to seed.
    """
    seeds: dict[str, list[str]] = {}
    for one in found.clients:
        budget = "no budget" if one.epsilon is None else f"epsilon {shown(one.epsilon)}"
        about = f"{one.client} ({budget}, {one.records} records)"
        seeds.setdefault(about, []).append(str(one.seed))
    said = [f"{about} with seed {' and '.join(own)}" for about, own in seeds.items()]
    return f"Dishonest is {found.chosen}: {'; '.join(said)}."


def does(found: Poisoning) -> list[str]:
    """Say what the dishonest client does under each attack."""
    said = [f"{name}: the client {about}." for name, about in found.attacks.items()]
    return [*said, *trigger(found)]


def trigger(found: Poisoning) -> list[str]:
    """Say what a record with the trigger looks like, where records have classes."""
    return [f"A record with the trigger: {found.trigger}."] if found.trigger else []


def promises(methods: Sequence[AttackedMethod]) -> list[str]:
    """Say what epsilons are about, with methods that promise the same put together."""
    alike: dict[str, list[str]] = {}
    for one in methods:
        alike.setdefault(one.promise, []).append(one.name)
    return [f"epsilon of {', '.join(own)}: {promise}." for promise, own in alike.items()]


def rests_on(methods: Sequence[AttackedMethod]) -> list[str]:
    """Say what the others' guarantees rest on when a client leaves out its noise.

    Methods of which the same is said are put together. Where clients share noise, the epsilon is
    stated that the others have left if one more share is missing than the method allows for.
    """
    alike: dict[str, list[str]] = {}
    for one in methods:
        own = one.reliance
        said = one.reliance.words
        if own.epsilon is not None and own.without is not None:
            said += f"; with one more share missing, the largest epsilon of the others is \
{shown(own.without)} instead of {shown(own.epsilon)}"
        alike.setdefault(said, []).append(one.name)
    return [f"{', '.join(names)}: {said}." for said, names in alike.items()]


def warnings(found: Poisoning) -> list[str]:
    """Say that noise was seeded, and whose epsilon is not what it is without an attack.

    A claim may change a common plan, and with it what others spend of their budgets; that somebody
    spends more than its budget would be an error of dpfl.
    """
    said = [SEEDED] if found.seeded else []
    alike = dict[str, list[Cell]]()
    for cell in found.changed():
        alike.setdefault(cell.method, []).append(cell)
    for method, cells in alike.items():
        runs = [run for cell in cells for run in cell.runs]
        kept = all(run.within_budgets for run in runs)
        most = max(run.epsilon_change for run in runs)
        attacks = " and ".join(dict.fromkeys(cell.attack for cell in cells))
        said.append(
            f"Epsilons of honest clients differ by up to {most:.2g} with and without an attack "
            f"({method}, {attacks}): {CHANGED_PLAN if kept else ABOVE}."
        )
    return said


def unchanged(found: Poisoning) -> str:
    """Say in which runs every honest client is charged what it is without an attack."""
    return f"In all other runs {SAME[0].lower()}{SAME[1:]}" if found.changed() else SAME


def spread(words: MetricWords, values: Sequence[float]) -> str:
    """A mean with its standard deviation over seeds; a dash where there is nothing."""
    return words.spread(values) if values else "-"


def mean(words: MetricWords, values: Sequence[float]) -> str:
    """A mean over seeds; a dash where there is nothing."""
    return words.number(statistics.mean(values)) if values else "-"
