"""``dpfl attack poison``: one dishonest client, several methods, with and without defences.

Tables go to stdout, one for each method; progress, what is left out and flags go to stderr. The
folder holds ``results.json`` with every run, and a page. Nothing is kept of a comparison that is
interrupted.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from dpfl.cli import console as c, options as o
from dpfl.cli.attack_results import OUT, finish
from dpfl.cli.values import seeds_of

if TYPE_CHECKING:
    from dpfl.attacks.poisoning.results import Cell, Poisoning

_ATTACKS = "Attacks, separated by commas (default: all)."
_DEFENCES = "Defences, separated by commas: none, clip, clip=NORM, krum, ... (default: all)."
_CLIENT = "The dishonest client, by name or number (default: the one with the largest budget)."
_FACTOR = "What uploads and claims of epsilon are multiplied by."


@o.takes_experiment(o.MANY | {"folder": (Path | None, OUT), "quiet": (bool, o.QUIET)})
def poison(
    asked: o.Asked,
    attacks: str = o.opt(_ATTACKS, ""),
    defences: str = o.opt(_DEFENCES, ""),
    client: str | None = o.opt(_CLIENT),
    factor: float = o.opt(_FACTOR, 10.0),
    seeds: str = o.SEEDS,
) -> None:
    """Let one client be dishonest: what it does to the model, and to the others' privacy.

    Methods are compared over paired seeds, with and without defences of the server. Attacks:
    sign_flip, scale, label_flip, backdoor, misreport, misreport_sign_flip. What a method cannot
    have is left out and named. The dishonest client trains, clips and adds noise as it should, and
    changes its records, its claim or its upload.

    For instance: dpfl attack poison examples/demo.toml --methods weiavg,robust_hdp --attacks
    sign_flip,label_flip --defences none,krum
    """
    from dpfl.attacks.poisoning.defences import DEFENCES
    from dpfl.attacks.poisoning.dishonest import ATTACKS
    from dpfl.attacks.poisoning.poison import poison as library
    from dpfl.report.poison_page import poison_page

    values = asked.values()
    numbers = seeds_of(seeds)
    names = asked.method_names(values)
    place = asked.folder or Path("runs")
    stop = c.interruptible(place, lambda: "nothing was written: run the command again")
    with stop, c.progress_bar("poison", "", None, asked.quiet) as update:
        found = library(
            values,
            names,
            attacks=_words(attacks) or tuple(ATTACKS),
            defences=_words(defences) or DEFENCES,
            client=client,
            factor=factor,
            seeds=numbers,
            data_folder=asked.data,
            progress=_Pace(update),
        )
    page = poison_page(found)
    folder = asked.folder
    finish(found, page, lambda: show(found), stem="poison", folder=folder, as_json=asked.json)


class _Pace:
    """Moves the bar, and says once, after the first run, about how long all others take."""

    def __init__(self, update: c.Update) -> None:
        self._update = update
        self._began = 0.0
        self._first = ""
        self._said = False

    def __call__(self, done: int, total: int, note: str) -> None:
        """A round of the run that ``note`` names is over: ``done`` of ``total`` rounds are."""
        if not self._first:  # planning is over, and so is the first round
            self._first, self._began = note, time.monotonic()
        if note != self._first and not self._said:
            left = (time.monotonic() - self._began) / max(1, done - 1) * (total - done)
            c.note(f"about {c.duration(left)} left, at the pace of the first run")
            self._said = True
        self._update(completed=done, total=total, note=note)


def _words(text: str) -> tuple[str, ...]:
    """The words of a list that is separated by commas."""
    return tuple(filter(None, (word.strip() for word in text.split(","))))


def show(found: Poisoning) -> None:
    """Print a table for each method, and what is said about all of them.

    A method's lines are grouped by defence; the first line of each is the run without an attack.
    """
    from dpfl.attacks.poisoning.results import by_defence
    from dpfl.report import poison_words as said

    headings = ("defence", "attack", found.words.title, *said.HEADINGS)
    for one in found.methods:
        groups = by_defence(found.of_method(one.name)).values()
        rows = [_row(found, cell, not number) for own in groups for number, cell in enumerate(own)]
        c.print_table(headings, rows, title=one.name, left=2)
        c.out.print()
    c.print_lines(said.LEGEND, said.dishonest(found), *said.does(found), said.unchanged(found))
    c.print_lines(*said.promises(found.methods), *said.rests_on(found.methods))
    for sentence in found.left_out:
        c.note(f"left out: {sentence}")
    c.warn(said.warnings(found))


def _row(found: Poisoning, cell: Cell, first: bool) -> list[str]:
    """One line of a table; a defence is named in its ``first`` line."""
    from dpfl.report.poison_words import SHARE, mean, spread

    return [
        cell.defence if first else "",
        cell.attack,
        spread(found.words, cell.scores) + "*" * bool(cell.diverged),
        "-" if cell.attack == "none" else mean(found.words, found.drops(cell)),
        mean(SHARE, cell.backdoors),
        mean(SHARE, cell.weights),
    ]
