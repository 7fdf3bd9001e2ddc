"""``dpfl audit``: lower bounds on what methods reveal, beside what they claim."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfl.cli import console as c, options as o
from dpfl.cli.attack_results import OUT, finish
from dpfl.core.checks import check, one_of
from dpfl.core.errors import ConfigurationError

if TYPE_CHECKING:
    from dpfl.attacks.auditing.audit import MakeGames
    from dpfl.attacks.auditing.plan import Audit
    from dpfl.attacks.auditing.result import AuditLine, AuditResult

_LEGEND = """\
claimed: upper bound by the accountant; audited: the largest lower bound that holds for any \
mechanism; by curve: the largest one if the noise is the claim's, divided by some factor; gap: \
claimed less the larger of the two"""


def audit(
    methods: list[str] = o.arg("Methods.", None),
    every: bool = o.flag("--all", "Every method."),
    epsilon: float = o.opt("Budget of the clients with canaries.", 4.0),
    delta: float = o.opt("Their delta.", 1e-5),
    rounds: int = o.opt("Rounds (methods may plan them themselves).", 3, min=1),
    canaries: int = o.opt("Canaries that are guessed about.", 1000, min=1),
    trials: int = o.opt("Trials with one canary each, over all runs.", 1000, min=1),
    confidence: float = o.opt("Of all lower bounds of a line together.", 0.95),
    adjacency: str = o.opt("zero_out, replace_one, or both readings.", "both"),
    controls: int = o.opt("Put every fault into each method, so many times.", 0, min=0),
    sites: bool = o.flag("--sites", "Audit the messages of real site folders, made for it."),
    set: list[str] = o.opt("A setting of the methods.", [], metavar="KEY=VALUE"),  # noqa: A002
    seed: int | None = o.opt("Repeatable noise; left out, the operating system's."),
    out: Path | None = OUT,
    json: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Audit methods: canaries with the longest gradients there can be, guessed from what the
    adversary sees, in both readings of adjacency; and the support test.

    Every lower bound holds with the confidence asked for. A claim that is refuted ends with exit
    code 4. --controls puts deliberate faults into the code to see how often they are caught.

    For instance: dpfl audit weiavg udp_fedavg --controls 5
    """
    from dpfl.attacks.auditing.audit import audit as run, estimate
    from dpfl.attacks.auditing.plan import games
    from dpfl.cli.values import number
    from dpfl.core.errors import PrivacyRefusal
    from dpfl.core.types import Budget
    from dpfl.methods import METHODS, find
    from dpfl.report.audit_page import audit_page

    names = list(METHODS) if every else [find(name).name for name in methods or ()]
    check(
        bool(names), "audit", "no method was named", "name some that dpfl methods lists, or --all"
    )
    pairs = [pair.partition("=") for pair in set]
    how = _planned(
        adjacency,
        budget=Budget(epsilon=epsilon, delta=delta),
        rounds=rounds,
        canaries=canaries,
        trials=trials,
        confidence=confidence,
        settings={name: number(value) for name, _, value in pairs},
        seed=seed,
        coins=secrets.randbits(32) if seed is None else seed,
    )
    make = _between_sites() if sites else games
    seconds = estimate(names, how, controls, make)
    c.note(f"about {c.duration(seconds)}, by one run of each game")
    stop = c.interruptible(out or Path("runs"), lambda: "run it again: audits are not resumed")
    with stop, c.progress_bar("audit", "", None, quiet) as update:
        found = run(
            names,
            how,
            controls=controls,
            make=make,
            progress=lambda stage, done, total: update(completed=done, total=total, note=stage),
        )
    why = "; ".join(dict.fromkeys(found.left_out.values()))
    check(bool(found.lines), "audit", f"there is nothing to audit ({why})", "name other methods")
    finish(
        found,
        audit_page(found),
        lambda: show_audit(found),
        stem="audit",
        folder=out,
        as_json=json,
    )
    refuted = ", ".join(f"{one.method} ({one.reading})" for one in found.refuted)
    check(
        not refuted,
        "audit",
        f"the claim of {refuted} is refuted",
        "do not rely on it, and report it",
        PrivacyRefusal,
    )


def _planned(adjacency: str, **sizes: Any) -> Audit:
    """The audit of these readings and sizes."""
    from dpfl.attacks.auditing.plan import READINGS, Audit

    one_of("--adjacency", ("both", *READINGS), adjacency=adjacency)
    readings = [one for one in READINGS if adjacency in ("both", one)]
    return Audit(readings=readings, **sizes)


def _between_sites() -> MakeGames:
    """How games are made between real sites, which takes Flower."""
    try:
        from dpfl.deploy.recorded_sites import site_games
    except ImportError as error:
        raise ConfigurationError(
            "--sites", "Flower is not installed", "pip install 'dpfl[flower]'"
        ) from error
    return site_games


def show_audit(found: AuditResult) -> None:
    """Print one table of lines, and one of controls where there are any."""
    columns = ("method", "protects, from", "reading", "claimed", "audited", "by curve", "gap")
    of = "" if found.simulated else " from messages of sites"
    title = f"Lower bounds on epsilon{of}, confidence {found.confidence:g}"
    c.print_table(columns, map(_row, found.lines), title=title, left=3)
    kinds: dict[str, list[str]] = {}
    for line in found.lines:
        kinds.setdefault(line.support, []).append(line.method)
    tests = [f"support test {how}: {', '.join(dict.fromkeys(who))}" for how, who in kinds.items()]
    c.print_lines(_LEGEND, *tests)
    if found.controls:
        c.out.print()
        rows = [
            [one.method, one.fault, f"{one.caught}/{one.runs}", one.caught_by]
            for one in found.controls
        ]
        c.print_table(("method", "fault", "caught", "by"), rows, title="Controls", left=2)
    for name, why in found.left_out.items():
        c.note(f"left out: {name} ({why})")


def _row(line: AuditLine) -> list[str]:
    return [
        line.method,
        f"{line.promise.unit}, {line.promise.observer}",
        str(line.reading),
        c.epsilon_text(line.claimed, 2),
        f"{line.audited:.2f}",
        f"{line.by_curve:.2f}",
        "REFUTED" if line.refuted else f"{line.gap:.2f}",
    ]
