"""The page of an inversion: originals beside reconstructions, and how alike they are."""

import math
from collections.abc import Sequence

from torch import Tensor

from dpfl.attacks.inversion_result import InversionCase, InversionResult
from dpfl.privacy.accountant import shown
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
    """A gallery for each algorithm, a figure of PSNR, and all numbers."""
    facts = (
        f"{len(found.originals)} records of {found.client}; model {found.model} with "
        f"{found.parameters:,} parameters; {found.iterations} iterations, "
        f"{found.restarts} start(s) each."
    )
    sections = [Section(title="Attack", sentences=(_GAME, facts), charts=_charts(found.cases))]
    if found.picture:
        sections += [
            Section(title=f"Reconstructions by {algorithm}", gallery=_gallery(found, algorithm))
            for algorithm in dict.fromkeys(case.algorithm for case in found.cases)
        ]
    sections.append(Section(title="Every case", table=_table(found.cases)))
    if found.left_out:
        sections.append(Section(title="Left out", sentences=found.left_out))
    return attack_page("Gradient inversion", sections, warnings=())


def epsilon_words(case: InversionCase) -> str:
    """The epsilon of a case in words."""
    return "no privacy" if math.isinf(case.epsilon) else f"epsilon {shown(case.epsilon, 2)}"


def _gallery(found: InversionResult, algorithm: str) -> Gallery:
    """Originals in the first row, then a row a case."""
    own = [case for case in found.cases if case.algorithm == algorithm]
    first = _pictures(found, found.originals, [f"class {label}" for label in found.labels])
    rows = [("original", first)]
    for case in own:
        captions = [f"{value:.1f} dB" for value in case.psnr]
        name = f"{case.method}, {case.view}, {epsilon_words(case)}"
        rows.append((name, _pictures(found, case.found, captions)))
    return Gallery(headings=[""] * len(first), rows=rows)


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


def _charts(cases: Sequence[InversionCase]) -> list[Chart]:
    """Mean PSNR by epsilon, a line for each method, view and algorithm."""
    lines: dict[str, list[InversionCase]] = {}
    for case in cases:
        lines.setdefault(f"{case.method}, {case.view}, {case.algorithm}", []).append(case)
    series = [
        Series(
            name=name,
            x=[epsilon_words(case) for case in own],
            y=[case.mean_psnr for case in own],
            kind="points",
        )
        for name, own in lines.items()
    ]
    chart = Chart(
        name="psnr-by-epsilon",
        title="How well records are reconstructed",
        x_label="epsilon of the victim",
        y_label="PSNR, dB (mean)",
        caption="Higher is a better reconstruction, and worse for the victim.",
        series=series,
    )
    return [chart]
