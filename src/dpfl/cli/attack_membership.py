"""``dpfl attack membership``: tell from a run who was trained on, beside what epsilon allows.

Many simulated runs are played; the second of them is timed, and what all will take is said on
stderr. The table goes to stdout, a page with ROC curves to the folder. A figure above its bound
ends the command with exit code 4, after everything is written.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dpfl.cli import console as c, options as o
from dpfl.cli.attack_results import OUT, finish
from dpfl.core.checks import check
from dpfl.core.errors import PrivacyRefusal

if TYPE_CHECKING:
    from dpfl.attacks.members.result import MembershipResult

_CLIENT = "Whose records are guessed (default: the first client's)."
_TARGETS = "Records, or clients, that are guessed (default: up to 64)."
_RATES = "False positive rates at which hits are stated (default: 0.001,0.01,0.1 if possible)."


@o.takes_experiment()
def membership(
    asked: o.Asked,
    client: str | None = o.opt(_CLIENT),
    targets: int | None = o.opt(_TARGETS, min=1),
    runs: int = o.opt("Simulated runs; each is attacked, and a shadow run for the others.", 40),
    fpr: str | None = o.opt(_RATES, metavar="RATE,..."),
    confidence: float = o.opt("Confidence of all limits.", 0.95),
    folder: Path | None = OUT,
    quiet: bool = o.QUIET,
) -> None:
    """Guess who was trained on, from the published model and from what the server sees.

    In each run a coin decides for every target whether it is there. Loss and likelihood-ratio
    attacks (LiRA) are shown with the bound that the stated epsilon puts on any attack.

    For instance: dpfl attack membership --dataset digits --clients 10 --budgets 1 --delta 1e-3
    --clip 1 --method weiavg --rounds 10
    """
    from dpfl.attacks import membership as attack
    from dpfl.report.membership_page import membership_page, warnings
    from dpfl.sim.experiment import setup_of

    rates = None if fpr is None else _numbers(fpr)
    setup = setup_of(asked.experiment(), asked.data)
    where = folder or Path("membership")
    stop = c.interruptible(where, lambda: "nothing was kept; repeat it with fewer --runs")
    with stop, c.progress_bar("membership", "timing one run", runs, quiet) as update:
        ended = [0.0]

        def progress(done: int, total: int, seconds: float) -> None:
            update(completed=done, note="attacking")
            if done == 2:  # the first one also loads and plans
                each = seconds - ended[-1]
                left = f"about {c.duration(each * (total - done))} for the other {total - done}"
                c.note(f"One run takes {c.duration(each)}: {left} runs.")
            ended.append(seconds)

        result = attack(
            setup,
            client=client,
            targets=targets,
            runs=runs,
            rates=rates,
            confidence=confidence,
            progress=progress,
        )
    finish(
        result,
        membership_page(result),
        lambda: show(result),
        stem=f"membership-{result.method}",
        folder=folder,
        as_json=asked.json,
    )
    exceeded = warnings(result)
    remedy = "see report.html, and audit the method"
    c.warn(exceeded)
    check(
        not exceeded,
        "membership",
        f"{len(exceeded)} attack(s) exceed what the stated epsilon allows",
        remedy,
        PrivacyRefusal,
    )


def _numbers(text: str) -> list[float]:
    """Read rates that are separated by commas; a word that is not a number is refused."""
    found = []
    for word in text.split(","):
        with suppress(ValueError):
            found.append(float(word))
            continue
        check(False, "--fpr", f"'{word}' is not a number", "give rates such as 0.001,0.01")
    return found


def show(result: MembershipResult) -> None:
    """Print every figure beside its bound, and what is claimed.

    A mark (!) stands beside a bound that is exceeded. The lines below the table say how to read it.
    """
    from dpfl.report import membership_page as page

    many = f"{result.targets} {result.unit}{'s' * (result.targets > 1)}"
    title = f"Membership inference against {result.method}: {result.runs} runs, {many}"
    rows = [[view, *row] for view in result.views for row in page.figure_rows(result, view)]
    c.print_table(page.HEADINGS, rows, title=title, left=3)
    claims = (page.claim_sentence(result, view) for view in result.views)
    c.print_lines(*claims, page.reading(result))
