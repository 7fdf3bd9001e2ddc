"""The page of a membership attack: what was played, ROC curves with their bound, and figures.

There is one section for each view that was attacked. Sentences and rows are also what the command
line prints, so that both say the same.
"""

from dpfl.attacks.members.result import (
    ATTACKS,
    VIEWS,
    Measured,
    MembershipCurve,
    MembershipResult,
    Points,
    View,
    hits_words,
)
from dpfl.privacy.accountant import shown
from dpfl.report.attack_page import Section, Table, attack_page
from dpfl.report.charts import Chart, Kind, Series
from dpfl.report.rendering import Page

HEADINGS = ("view", "attack", "figure", "value", "low", "high", "bound")
"""Columns of the table of figures; the first three are words."""

_CAPTION = "Higher is better for the attacker. {bound}"
_BOUNDED = "If the stated epsilon holds, no attack rises above the dashed line but by chance."
_UNBOUNDED = "Nothing is claimed against this adversary, so there is no bound."


def membership_page(result: MembershipResult) -> Page:
    """The page of what a membership attack found.

    ``result`` is shown whole. Where an attack exceeds its bound, the page begins with a warning
    that names the figures.
    """
    sections = [_section(result, view) for view in result.views]
    sections.append(Section(title="How to read the figures", sentences=[reading(result)]))
    sections.append(Section(title="The game", sentences=game_sentences(result)))
    title = f"Membership inference against {result.method}"
    return attack_page(title, sections, warnings(result))


def _section(result: MembershipResult, view: View) -> Section:
    """What was found on one view: the claim, the best attack, curves and figures."""
    return Section(
        title=f"Attacks on the {VIEWS[view]}",
        sentences=[claim_sentence(result, view), headline(result, view)],
        charts=[chart(result, view, log=log) for log in (True, False)],
        table=Table(headings=HEADINGS[1:], rows=figure_rows(result, view), names=2),
    )


# -- sentences -------------------------------------------------------------------------------------


def warnings(result: MembershipResult) -> list[str]:
    """One text for each attack that does better than its bound: the claim does not hold."""
    return [
        f"BOUND EXCEEDED ({curve.words}): an epsilon of {shown(result.bounds[curve.view].epsilon)} "
        f"does not allow {', '.join(_exceeding(curve))}. The claim does not hold."
        for curve in result.exceeding
    ]


def _exceeding(curve: MembershipCurve) -> list[str]:
    """The figures of an attack that exceed their bounds, in words."""
    return [
        f"{figure.words} = {figure.value:.4f} (at least {figure.low:.4f}, bound {figure.bound:.4f})"
        for figure in curve.figures
        if figure.exceeds
    ]


def claim_sentence(result: MembershipResult, view: View) -> str:
    """What is claimed against the adversary of a view."""
    bound = result.bounds.get(view)
    name = VIEWS[view]
    if bound is not None:
        claim = f"epsilon <= {shown(bound.epsilon)} at delta = {bound.delta:g}"
        adjacency = result.adjacency.replace("_", "-")
        about = f"per {result.unit}, {adjacency} adjacency, against the {bound.adversary}"
        return f"Claim for the {name}: {claim}, {about}."
    reason = f"'{result.method}' trusts the server"
    reason = reason if result.bounds else f"'{result.method}' protects nobody"
    return f"Claim for the {name}: none, {reason}. The attack is shown as a reference."


def headline(result: MembershipResult, view: View) -> str:
    """The best attack on a view, in a sentence: the one with the largest area under its curve."""
    own = [curve for curve in result.curves if curve.view == view]
    best = max(own, key=lambda curve: curve.auc.value)
    area = best.auc
    allowed = "" if area.bound is None else f"; the claim allows {area.bound:.3f} at most"
    limits = f"{area.value:.3f} ({area.low:.3f} to {area.high:.3f})"
    return f"Best attack: {ATTACKS[best.attack]}, AUC {limits}{allowed}. Guessing has 0.5."


def game_sentences(result: MembershipResult) -> list[str]:
    """What was played, and what the attacks do.

    The sentences name the targets, what stands for an absent one, what all runs have in common, and
    what the adversary knows.
    """
    unit = result.unit
    many = f"{result.targets} {result.unit}s"
    whose = f"{many} of client '{result.client}'" if result.client is not None else many
    absent = f"An absent {unit} is replaced by nothing; the number of {unit}s stays public."
    if result.client is None:
        absent = "An absent client sends an update of zero."
    if result.left_out:
        absent = f"An absent {unit} is left out: the method protects nobody."
    return [
        f"In each of {result.runs} runs a fair coin decides for each of {whose} whether it is "
        f"there. {absent} Data, partition and first model are the same in all runs.",
        "Runs are simulations through the code that sites run. Coins, samples and noise follow "
        f"from seed {result.seed}, so that the result can be repeated.",
        "The adversary knows the targets' data. From the published model it computes the logit of "
        "the probability of the true class, or minus the loss. From the transcript it computes "
        "how much of what the target would contribute without noise is in what arrives.",
        "LiRA (offline) compares this statistic with a normal law, fitted to the other runs in "
        "which the same target was absent. The threshold attack has one threshold for all targets.",
    ]


def reading(result: MembershipResult) -> str:
    """How the table is read: what the limits mean, where dashes stand, and when a figure counts as
    above its bound.
    """
    return (
        f"Limits have a confidence of {100 * result.confidence:g} % each; trials of one run count "
        f"as dependent. {result.absences} of {result.runs * result.targets} trials are without "
        "their target; a dash stands where these are too few. A figure exceeds its bound (!) if "
        "its lower limit does with all figures taken together, and with the uncertainty of the "
        "false positive rate."
    )


# -- table and charts ------------------------------------------------------------------------------


def figure_rows(result: MembershipResult, view: View) -> list[list[str]]:
    """One row a figure of a view, beside its bound; dashes where there are too few trials."""
    rows = []
    for curve in result.curves:
        if curve.view != view:
            continue
        named = {figure.words: _cells(figure) for figure in curve.rates}
        too_few = {hits_words(rate): ["-"] * 4 for rate in sorted(curve.missing)}
        cells = {curve.auc.words: _cells(curve.auc), **too_few, **named}
        rows += [[ATTACKS[curve.attack], figure, *own] for figure, own in cells.items()]
    return rows


def _cells(figure: Measured) -> list[str]:
    """Value, limits and bound; a figure that exceeds its bound is marked."""
    bound = "-" if figure.bound is None else f"{figure.bound:.4f}{' !' * figure.exceeds}"
    return [f"{figure.value:.4f}", f"{figure.low:.4f}", f"{figure.high:.4f}", bound]


def chart(result: MembershipResult, view: View, *, log: bool) -> Chart:
    """The ROC curves of a view, with guessing and the bound.

    With ``log`` both axes are logarithmic, which shows small false positive rates: those at which
    an attacker is sure of somebody. The axes begin at one false positive.
    """
    least = 1 / max(1, result.absences) if log else 0.0
    series = [
        _series(ATTACKS[curve.attack], curve.roc, least)
        for curve in result.curves
        if curve.view == view
    ]
    diagonal = [least + (1 - least) * step / 40 for step in range(41)]
    series.append(Series(name="guessing", x=diagonal, y=diagonal))
    bound = result.bounds.get(view)
    if bound is not None:
        name = f"bound, epsilon {shown(bound.epsilon)}"
        series.append(_series(name, bound.points, least, kind="dashes"))
    scale = "logarithmic axes" if log else "linear axes"
    return Chart(
        name=f"roc_{view}_{'log' if log else 'linear'}",
        title=f"{VIEWS[view].capitalize()}, {scale}",
        x_label="false positive rate",
        y_label="true positive rate",
        caption=_CAPTION.format(bound=_BOUNDED if bound else _UNBOUNDED),
        series=series,
        log_x=log,
        log_y=log,
    )


def _series(name: str, points: Points, least: float, kind: Kind = "line") -> Series:
    """A curve from the ``least`` rate on; a logarithmic axis has no zero."""
    kept = [(x, y) for x, y in points if x >= least and y >= least]
    return Series(name=name, x=[x for x, _ in kept], y=[y for _, y in kept], kind=kind)
