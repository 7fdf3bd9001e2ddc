"""The page of poisoning: who is dishonest, what it does to the model, and to others' privacy.

The sentences are those of the terminal, too. Figures show means over seeds; spreads are in the
tables. Every epsilon is said to be about a unit, an adjacency and an adversary, and rounded up.
"""

import statistics
from collections.abc import Sequence

from dpfl.attacks.poison_results import AttackedMethod, Cell, Poisoning, by_defence
from dpfl.privacy.accountant import shown
from dpfl.report.attack_page import Section, Table, attack_page
from dpfl.report.charts import Chart, Series
from dpfl.report.rendering import Page
from dpfl.tasks import MetricWords

SEEDED = (
    "NOT PRIVATE: these are simulations with seeded noise, to see what an attack does; epsilons "
    "are those that the same runs would have with noise from the operating system."
)
SAME = (
    "Every honest client is charged exactly the same epsilon with and without each attack: neither "
    "a claim nor an upload changes what another client is charged."
)
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
_SHARE = MetricWords("accuracy")


# -- sentences, for the page and for the terminal --------------------------------------------------


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
        own, said = one.reliance, one.reliance.words
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
    for cell in found.changed():
        most = max(run.epsilon_change for run in cell.runs)
        kept = all(run.within_budgets for run in cell.runs)
        after = (
            "the claim has changed the plan, and nobody is above its own budget"
            if kept
            else "SOMEBODY IS ABOVE ITS OWN BUDGET"
        )
        where = f"{cell.method}, {cell.defence}, {cell.attack}"
        said.append(f"Honest clients' epsilons differ by up to {most:.2g} ({where}): {after}.")
    return said


# -- numbers as cells of a table -------------------------------------------------------------------


def spread(words: MetricWords, values: Sequence[float]) -> str:
    """A mean with its standard deviation over seeds; a dash where there is nothing."""
    return words.spread(values) if values else "-"


def mean(words: MetricWords, values: Sequence[float]) -> str:
    """A mean over seeds; a dash where there is nothing."""
    return words.number(statistics.mean(values)) if values else "-"


def _words(name: str) -> str:
    """A name that a page can break between words."""
    return name.replace("_", " ")


def _row(found: Poisoning, cell: Cell) -> list[str]:
    """One line of a method's table: scores and drops with their spread, the rest as means."""
    change = max(run.epsilon_change for run in cell.runs)
    drop = "-" if cell.attack == "none" else spread(found.words, found.drops(cell))
    return [
        _words(cell.defence),
        _words(cell.attack),
        spread(found.words, cell.scores),
        drop,
        spread(_SHARE, cell.backdoors),
        mean(_SHARE, cell.weights),
        f"{cell.diverged} of {len(cell.runs)}",
        mean(_SHARE, [run.cut for run in cell.runs]),
        f"{change:.2g}" if change else "0",
    ]


# -- figures ---------------------------------------------------------------------------------------


def _by_attack(found: Poisoning, name: str, title: str, series: Sequence[Series]) -> Chart:
    title_ = f"{title}: {found.words.words} by attack"
    caption = "Mean over seeds, on the honest clients' test records."
    return Chart(
        name=name,
        title=title_,
        x_label="attack",
        y_label=found.words.title,
        caption=caption,
        series=series,
    )


def _bars(found: Poisoning, name: str, cells: Sequence[Cell]) -> Series:
    """The mean scores of some cells, by attack."""
    heights = [found.words.scale * statistics.mean(cell.scores) for cell in cells]
    return Series(name=name, x=[_words(cell.attack) for cell in cells], y=heights, kind="bars")


def _undefended(found: Poisoning) -> Chart:
    """All methods side by side under each attack.

    Each is shown with its first defence, which is none unless that was left out.
    """
    series, named = [], set[str]()
    for one in found.methods:
        defence, cells = next(iter(by_defence(found.of_method(one.name)).items()))
        named.add(defence)
        series.append(_bars(found, one.name, cells))
    title = "All methods" + (" without a defence" if named == {"none"} else "")
    return _by_attack(found, "methods-by-attack", title, series)


def _backdoors(found: Poisoning) -> list[Chart]:
    """How often the trigger works, by method and defence, and how often by chance.

    Empty where no backdoor was tried.
    """
    names = [one.name for one in found.methods]
    defences = list(dict.fromkeys(cell.defence for cell in found.cells))
    shown_as = [("no attack", "none", defences[0])]
    shown_as += [(f"defence: {_words(one)}", "backdoor", one) for one in defences]
    series = []
    for label, attack, defence in shown_as:
        own = (cell for cell in found.cells if (cell.attack, cell.defence) == (attack, defence))
        means = {one.method: 100 * statistics.mean(one.backdoors) for one in own if one.backdoors}
        heights = [means.get(name) for name in names]
        series.append(Series(name=label, x=names, y=heights, kind="bars"))
    chart = Chart(
        name="backdoor",
        title="Records with the trigger that get its label, under the attack 'backdoor'",
        x_label="method",
        y_label="% of records of other classes",
        caption="Beside what the same model does to them without an attack. Lower is better.",
        series=series,
    )
    return [chart] if found.trigger and "backdoor" in found.attacks else []


# -- the page --------------------------------------------------------------------------------------


def poison_page(found: Poisoning) -> Page:
    """The page of a comparison: who is dishonest, figures, a table for each method, privacy.

    ``found`` is the result of :func:`dpfl.attacks.poison`, from a run or from a file.
    """
    rows = [(_words(name), about) for name, about in found.attacks.items()]
    table = Table(headings=("attack", "what the dishonest client does"), rows=rows, names=2)
    who = [dishonest(found), *trigger(found)]
    sections = [
        Section(title="Who is dishonest", sentences=who, table=table),
        Section(title="Model", sentences=[READING], charts=[_undefended(found)]),
        *(Section(title="Backdoor", charts=[chart]) for chart in _backdoors(found)),
        *(_method_section(found, one.name) for one in found.methods),
        Section(title="Privacy of the others", sentences=_privacy(found)),
    ]
    if found.left_out:
        sections.append(Section(title="Left out", sentences=found.left_out))
    return attack_page("Poisoning", sections, warnings(found))


def _method_section(found: Poisoning, name: str) -> Section:
    """Figure and table of one method."""
    cells = found.of_method(name)
    headings = ["defence", "attack", found.words.title, *HEADINGS]
    headings += ["diverged", "cut off %", "epsilon change"]
    groups = by_defence(cells)
    series = [_bars(found, _words(defence), own) for defence, own in groups.items()]
    charts = [_by_attack(found, f"by-attack-{name}", name, series)] if len(groups) > 1 else []
    return Section(
        title=name,
        table=Table(headings=headings, rows=[_row(found, cell) for cell in cells], names=2),
        charts=charts,
    )


def _privacy(found: Poisoning) -> list[str]:
    """What the attacks change in the others' guarantees."""
    same = [] if found.changed() else [SAME]
    rests = ["If the dishonest client adds no noise:", *rests_on(found.methods)]
    return [*same, ADAPTIVE, *promises(found.methods), *rests]
