"""``dpfl account`` and ``dpfl ledger``: noise to epsilon, epsilon to noise, a ledger to statements.

With numbers ``account`` runs without torch and without reading any data: the accountant needs only
rates, steps and noise. Given an epsilon it finds the least noise that meets it. Given a ledger it
prints one line for each account and adversary, with the flags of the ledger first, and with
``--page`` writes the privacy report for an ethics board.

``ledger verify`` checks the file, its hash chain and the head noted beside it; a hash that was
noted elsewhere, for instance on a printed report, must be in the chain. A missing or edited ledger
ends with exit code 5, and nothing is changed.
"""

import math
from contextlib import closing
from pathlib import Path

import dpfl.report as pages
from dpfl.cli import console as c, options as o
from dpfl.core.checks import check
from dpfl.core.errors import LedgerError
from dpfl.core.types import Plain

_ACCEPT = "Write the missing head file: this is the newest copy."
ledger_app = o.group("A ledger file: check that nothing in it was changed or lost.")


def account(
    ledger: Path | None = o.opt("A ledger file: print every account's spend."),
    noise_multiplier: float | None = o.opt("Noise std / clip: print epsilon."),
    epsilon: float | None = o.opt("Target: print the least noise that meets it."),
    sampling_rate: float = o.opt("Rate at which units are drawn.", 1.0),
    steps: int = o.opt("Number of releases.", 1),
    delta: float | None = o.opt("Delta (a ledger knows its own)."),
    sampling: str = o.opt("poisson, uniform or none.", "poisson"),
    adjacency: str = o.opt("add_remove, zero_out or replace_one.", "add_remove"),
    accountant: str | None = o.opt("pld, rdp or renyi (default: the tightest)."),
    page: Path | None = o.opt("With --ledger: a privacy report for a board."),
    json: bool = o.JSON,
) -> None:
    """Turn noise into epsilon, epsilon into noise, or a ledger into statements.

    For instance: dpfl account --epsilon 2 --delta 1e-5 --sampling-rate 0.01 --steps 1000
    """
    asked = [value for value in (ledger, noise_multiplier, epsilon) if value is not None]
    check(
        len(asked) == 1,
        "dpfl account",
        "answers one question at a time",
        "give --ledger, --noise-multiplier or --epsilon",
    )
    if ledger is not None:
        check(
            accountant is None,
            "--accountant",
            "a ledger is read by the tightest one",
            "leave it out",
        )
        _from_ledger(ledger, delta, page, json)
        return
    check(page is None, "--page", "a page is about a ledger", "give --ledger as well")
    check(
        delta is not None,
        "--delta",
        "is missing and has no default",
        "give a delta well below 1 / units",
    )
    told: Plain = {"noise_multiplier": noise_multiplier, "epsilon": epsilon}
    told |= {"delta": delta, "steps": steps, "sampling": sampling, "sampling_rate": sampling_rate}
    found = _from_numbers({**told, "adjacency": adjacency, "accountant": accountant})
    c.answer(json, found, _show, found)


def _from_numbers(asked: Plain) -> Plain:
    """Find the noise if it is missing, and what it costs; torch is not needed for that."""
    from dpfl.privacy.accountant import adjacency_named, spend
    from dpfl.privacy.calibrate import calibrate
    from dpfl.privacy.events import Event

    noise = asked["noise_multiplier"]
    delta = asked["delta"]
    adjacency = asked["adjacency"]
    by = {"adjacency": adjacency_named(adjacency), "accountant": asked["accountant"]}
    rate = 1.0 if asked["sampling"] == "none" else asked["sampling_rate"]
    drawn = {"sampling": asked["sampling"], "sampling_rate": rate, "steps": asked["steps"]}
    if noise is None:
        noise = calibrate(asked["epsilon"], delta, **drawn, **by)
    spent = spend((Event(noise_multiplier=noise, **drawn),), delta, **by)
    epsilon = spent.epsilon if math.isfinite(spent.epsilon) else "infinite"
    return asked | {"noise_multiplier": noise, "epsilon": epsilon, "accountant": spent.accountant}


def _show(found: Plain) -> None:
    """Print noise and epsilon for people."""
    facts = {
        "noise multiplier (std / clip)": f"{found['noise_multiplier']:.6g}",
        "epsilon": f"{c.epsilon_text(found['epsilon'], 4)} at delta {found['delta']:g}",
        "adjacency, accountant": "{adjacency}, {accountant}".format(**found),
        "releases": "{steps}, {sampling} sampling at rate {sampling_rate:g}".format(**found),
    }
    c.print_facts(facts)
    c.out.print("Unit and adversary are those of whatever is clipped and sampled. Rounded up.")


def _from_ledger(path: Path, delta: float | None, page: Path | None, json: bool) -> None:
    """Print what every account of a ledger has spent."""
    from dpfl.cli.run import show_statements
    from dpfl.privacy.flags import IN_TITLE, Flag, RaisedFlag, flags_in
    from dpfl.privacy.ledger import Ledger
    from dpfl.privacy.statement import statements

    with closing(Ledger.open(path, read_only=True)) as book, book.snapshot():
        if page is not None:
            pages.write_ledger_page(book, page, f"Privacy report of {book.identity()}", delta)
        lines = statements(book, delta)
        head = book.head()
        rule = book.filter
        seeded = book.seeded_runs()
        titles = book.titles()
    raised = {
        flag: [run for run, title in titles.items() if flag in flags_in(title)] for flag in IN_TITLE
    }
    if json:
        told: Plain = {"filter": rule, "entries": head.number, "head": head.digest}
        told |= {"seeded_runs": seeded} | {f"{flag}_runs": runs for flag, runs in raised.items()}
        own = [line.to_dict() for line in lines]
        c.print_json({"ledger": str(path), **told, "statements": own})
        return
    for flag, runs in ((Flag.SEEDED, seeded), *raised.items()):
        c.warn(RaisedFlag(flag, f"run {run}") for run in runs)
    if any(line.delta is None for line in lines):
        c.note("Some accounts have no budget, so no delta is known for them: give --delta.")
    show_statements(lines)
    c.out.print(f"Filter across studies: {rule}. Entries in the ledger: {head.number}.")
    c.out.print(f"Head: {head.digest}", soft_wrap=True)
    c.note_files({"Page": page} if page else {})


@ledger_app.command()
def verify(
    file: Path = o.arg("The ledger file."),
    head: str | None = o.opt("A hash noted earlier, which must be in the ledger."),
    accept_head: bool = o.flag("--accept-head", _ACCEPT),
    json: bool = o.JSON,
) -> None:
    """Check a ledger's file, its hash chain, and the head noted beside it.

    The chain has no key: whoever can rewrite the ledger and its head file together is only found
    out by a hash that was noted elsewhere, for instance on a printed report. Give it with --head.
    """
    from dpfl.privacy.chain import read_head
    from dpfl.privacy.ledger import Ledger

    accepted = accept_head and read_head(str(file)) is None
    if accept_head:
        Ledger.open(file, read_only=True, accept_head=True).close()
    noted = read_head(str(file))
    wanted = (head or "").strip().lower().rpartition(":")[2]
    with closing(Ledger.open(file, read_only=True)) as book, book.snapshot():
        check(
            head is None or book.contains(wanted),
            str(file),
            f"does not contain entry {wanted}, which was noted earlier",
            "find the ledger that does: this one was rolled back, rewritten, or is another one",
            LedgerError,
        )
        facts: Plain = {"ledger": str(file), "identity": book.identity()}
        newest = book.head()
        facts |= {"filter": book.filter, "entries": newest.number, "head": newest.digest}
        facts |= {"accounts": len(book.accounts()), "runs": len(book.titles())}
    facts["head_file"] = None if noted is None else noted.number
    facts["checked"] = ["file", "hash chain", "head file", *(["given head"] if wanted else [])]
    c.answer(json, facts, _show_verified, facts, accepted)


def _show_verified(facts: Plain, accepted: bool) -> None:
    """Print what was found in a ledger."""
    if accepted:
        c.note(f"Wrote {facts['ledger']}.head")
    later = facts["entries"] - (facts["head_file"] or 0)
    shown = {
        "ledger of": facts["identity"],
        "filter across studies": facts["filter"],
        "entries, runs, accounts": "{entries}, {runs}, {accounts}".format(**facts),
        "head file": f"agrees; {later} entries were written since" if later else "agrees",
    }
    if "given head" in facts["checked"]:
        shown["given head"] = "is in the ledger"
    c.print_facts(shown)
    c.out.print(f"Head: {facts['head']}", soft_wrap=True)
    c.out.print("Nothing was changed since the entries were written. Note the head elsewhere.")
