"""The page of poisoning: who is dishonest, what it does to the model, and to others' privacy.

Figures show means over seeds; spreads are in the tables. The sentences are in ``poison_words``.
"""

import statistics
from collections.abc import Sequence

from dpfl.attacks.poisoning.results import Cell, Poisoning, by_defence
from dpfl.report import poison_words as said
from dpfl.report.attack_page import Section, Table, attack_page
from dpfl.report.charts import Chart, Series
from dpfl.report.poison_words import HEADINGS, SHARE, mean, spread
from dpfl.report.rendering import Page


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
        spread(SHARE, cell.backdoors),
        mean(SHARE, cell.weights),
        f"{cell.diverged} of {len(cell.runs)}",
        mean(SHARE, [run.cut for run in cell.runs]),
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
    series = []
    named = set[str]()
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
    who = [said.dishonest(found), *said.trigger(found)]
    sections = [
        Section(title="Who is dishonest", sentences=who, table=table),
        Section(title="Model", sentences=[said.READING], charts=[_undefended(found)]),
        *(Section(title="Backdoor", charts=[chart]) for chart in _backdoors(found)),
        *(_method_section(found, one.name) for one in found.methods),
        Section(title="Privacy of the others", sentences=_privacy(found)),
    ]
    if found.left_out:
        sections.append(Section(title="Left out", sentences=found.left_out))
    return attack_page("Poisoning", sections, said.warnings(found))


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
    rests = ["If the dishonest client adds no noise:", *said.rests_on(found.methods)]
    return [said.unchanged(found), said.ADAPTIVE, *said.promises(found.methods), *rests]
