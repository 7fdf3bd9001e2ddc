"""The page of an inversion: originals beside reconstructions, and how alike they are."""

import math
from collections.abc import Sequence

from torch import Tensor

from dpfl.attacks.inverting.result import InversionCase, InversionResult
from dpfl.core.types import Observer
from dpfl.privacy.accountant import shown
from dpfl.report import words
from dpfl.report.attack_page import Gallery, Picture, Section, Table, attack_page, picture
from dpfl.report.charts import Chart, Series
from dpfl.report.rendering import Page

MOST_PICTURES = 8
"""Records that a gallery shows."""

_GAME = (
    "The victim holds these records alone and takes one local step on all of them: the adversary's "
    "best case. What is inverted are the numbers that arrive after local work, client stages and "
    "channel. Higher PSNR and SSIM mean a better reconstruction."
)


def inversion_page(found: InversionResult) -> Page:
    """A figure of PSNR, a gallery, and all numbers."""
    facts = (
        f"{words.count(len(found.originals), 'record')} of {found.client}; model {found.model} "
        f"with {found.parameters:,} parameters; {found.iterations} iterations, "
        f"{words.count(found.restarts, 'start')} each."
    )
    sections = [Section(title="Attack", sentences=(_GAME, facts), charts=[_chart(found.cases)])]
    if found.picture:
        sections.append(Section(title="Originals and reconstructions", gallery=_gallery(found)))
    sections.append(Section(title="Every case", table=_table(found.cases)))
    if found.left_out:
        sections.append(Section(title="Left out", sentences=found.left_out))
    return attack_page("Gradient inversion", sections, warnings=())


def epsilon_words(case: InversionCase) -> str:
    """The epsilon of a case in words."""
    if case.promise.observer is Observer.NOBODY:
        return "no privacy"
    bounded = math.isfinite(case.epsilon)
    return f"epsilon {shown(case.epsilon, 2)}" if bounded else "no epsilon stated"


def _gallery(found: InversionResult) -> Gallery:
    """Originals in the first row, then a row for each method, view and epsilon; all algorithms side
    by side.
    """
    algorithms = list(dict.fromkeys(case.algorithm for case in found.cases))
    first = _pictures(found, found.originals, [f"class {label}" for label in found.labels])
    rows = [("original", first * len(algorithms))]
    for name, own in _lines(found.cases).items():
        shown_in_row: list[Picture] = []
        for case in own:
            captions = [f"{value:.1f} dB" for value in case.psnr]
            shown_in_row += _pictures(found, case.found, captions)
        rows.append((name, shown_in_row))
    headings = [name if number == 0 else "" for name in algorithms for number in range(len(first))]
    return Gallery(headings=headings, rows=rows)


def _lines(cases: Sequence[InversionCase]) -> dict[str, list[InversionCase]]:
    """Cases that differ in the algorithm alone, by what they have in common."""
    lines: dict[str, list[InversionCase]] = {}
    for case in cases:
        name = f"{case.method}, {case.view}, {epsilon_words(case)}"
        lines.setdefault(name, []).append(case)
    return lines


def _pictures(found: InversionResult, records: Tensor, captions: Sequence[str]) -> list[Picture]:
    pairs = zip(records[:MOST_PICTURES], captions, strict=False)
    return [picture(record.view(found.picture), caption) for record, caption in pairs]


def _table(cases: Sequence[InversionCase]) -> Table:
    rows = [
        (
            case.method,
            case.view,
            case.algorithm,
            "none" if math.isinf(case.epsilon) else f"{shown(case.epsilon)} ({case.promise})",
            f"{case.mean_psnr:.2f}",
            "-" if case.mean_ssim is None else f"{case.mean_ssim:.3f}",
            f"{100 * case.labels_right:.0f}",
            f"{case.loss:.3g}",
        )
        for case in cases
    ]
    headings = ("method", "view", "algorithm", "epsilon of all rounds")
    numbers = ("PSNR, dB", "SSIM", "labels right, %", "mismatch")
    return Table(headings=(*headings, *numbers), rows=rows, names=4)


def _chart(cases: Sequence[InversionCase]) -> Chart:
    """Mean PSNR of every method, view and epsilon, by algorithm."""
    lines = _lines(cases)
    algorithms = dict.fromkeys(case.algorithm for case in cases)
    series = []
    for algorithm in algorithms:
        own = {
            name: case.mean_psnr
            for name, found in lines.items()
            for case in found
            if case.algorithm == algorithm
        }
        series.append(Series(name=algorithm, x=[*own], y=[*own.values()], kind="points"))
    return Chart(
        name="psnr",
        title="How well records are reconstructed",
        x_label="",
        y_label="PSNR, dB (mean)",
        caption="Higher is a better reconstruction, and worse for the victim.",
        series=series,
    )
