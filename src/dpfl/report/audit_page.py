"""The page of an audit: claimed and audited epsilons, and how often faults were caught."""

from dpfl.attacks.auditing.result import AuditLine, AuditResult
from dpfl.privacy.accountant import shown
from dpfl.report.attack_page import Section, Table, attack_page
from dpfl.report.charts import Chart, Series
from dpfl.report.rendering import Page

_GAME = (
    "Canaries are units whose contribution is as large as it can be, in directions of their own. A "
    "fair coin decides for each whether it is there (zero-out), or which of two opposite values it "
    "has (replace-one). The auditor sees what the adversary sees of all releases and rounds, and "
    "guesses the coins."
)
_SIMULATED = "Clients are simulated, by the functions that real sites call."
_SITES = (
    "Clients are real sites with folders, policies and ledgers of their own, in one process: what "
    "the adversary sees are the bytes of their answers, or what the server made of them, and the "
    "claim is that of a site's own ledger."
)
_TESTS = (
    "Canaries: many of them in few runs (Steinke, Nasr, Jagielski 2023), and the same for the "
    "whole trade-off curve of the claim (Mahloujifar, Melis, Chaudhuri 2024). Repeated runs: "
    "independent trials with a threshold chosen on the first half of the runs, with "
    "Clopper-Pearson limits. Bounds with f-DP are epsilons of the claim with all noise divided by "
    "a factor; they hold for noise of that kind, the others for any mechanism. "
    "Support: a deterministic test that nothing but noisy integers depends on a client's data."
)
_LIMITS = (
    "An audit proves no guarantee: it finds noise that is several times too small, and nothing "
    "that its adversary does not look at. Reach is how far canaries move what the adversary sees, "
    "relative to what the claim allows: a method that mixes clients before anything is published, "
    "or that has more noise than it counts on, shows little of them, and larger faults could pass."
)


def audit_page(found: AuditResult) -> Page:
    """All lines, a figure of claims and bounds, and the controls."""
    warnings = [
        f"REFUTED: the claim of {line.method} ({line.promise}, {line.reading} reading)."
        for line in found.refuted
    ]
    confidence = (
        "Claims are per unit, against the adversary and under the adjacency of their line. All "
        f"bounds of a line hold together with confidence {found.confidence:g}."
    )
    outcome = Section(
        title="Claims and audits",
        sentences=(_GAME, _SIMULATED if found.simulated else _SITES, confidence),
        table=_lines(found.lines),
        charts=_charts(found.lines),
    )
    sections = [outcome, Section(title="Tests", sentences=(_TESTS, _LIMITS))]
    if found.controls:
        rows = [
            (one.method, one.fault, one.about, f"{one.caught} of {one.runs}", one.caught_by)
            for one in found.controls
        ]
        headings = ("method", "fault", "what it does", "caught", "by")
        told = "Faults that were put into the code on purpose, one at a time."
        table = Table(headings=headings, rows=rows, names=3)
        sections.append(Section(title="Controls", sentences=(told,), table=table))
    if found.left_out:
        why = list(found.left_out.items())
        table = Table(headings=("method", "why"), rows=why, names=2)
        sections.append(Section(title="Not audited", table=table))
    return attack_page("Audit", sections, warnings)


def _lines(lines: tuple[AuditLine, ...]) -> Table:
    tests = [bound.test for bound in lines[0].bounds] if lines else []
    rows = [
        (
            line.method,
            str(line.promise.unit),
            line.promise.adversary,
            _reading(line),
            shown(line.claimed),
            *(f"{bound.epsilon:.2f}" for bound in line.bounds),
            f"{line.gap:.2f}",
            "-" if line.reach is None else f"{100 * line.reach:.0f} %",
            line.support,
        )
        for line in lines
    ]
    headings = ("method", "unit", "adversary", "adjacency", "claimed", *tests)
    return Table(headings=(*headings, "gap", "reach", "support"), rows=rows, names=4)


def _reading(line: AuditLine) -> str:
    """What the coins decided, and the adjacency of the claim where it has a bound under another."""
    own = line.promise.adjacency
    return str(line.reading) if own == line.reading else f"{line.reading} (claim: {own})"


def _charts(lines: tuple[AuditLine, ...]) -> list[Chart]:
    """Claimed and audited epsilon of every method, one figure for each reading."""
    charts = []
    for reading in dict.fromkeys(line.reading for line in lines):
        own = [line for line in lines if line.reading == reading]
        names = [f"{line.method}, {line.promise.observer}" for line in own]
        series = [
            Series(name="claimed", x=names, y=[line.claimed for line in own], kind="rings"),
            Series(name="audited", x=names, y=[line.audited for line in own], kind="points"),
            Series(name="by curve", x=names, y=[line.by_curve for line in own], kind="points"),
        ]
        charts.append(
            Chart(
                name=f"audit-{reading}",
                title=f"Claimed and audited, {reading} reading",
                x_label="method, adversary",
                y_label="epsilon",
                caption="A point above its ring refutes the claim.",
                series=series,
            )
        )
    return charts
