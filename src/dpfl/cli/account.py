"""``dpfl account``: noise to epsilon, epsilon to noise, or a ledger file to statements."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

from dpfl.cli import options as o
from dpfl.cli.console import note, out, print_facts, print_json, warn
from dpfl.core.checks import check, one_of


def account(
    ledger: Annotated[Path | None, o.opt("A ledger file: print every account's spend.")] = None,
    noise_multiplier: Annotated[float | None, o.opt("Noise std / clip: print epsilon.")] = None,
    epsilon: Annotated[float | None, o.opt("Target: print the least noise that meets it.")] = None,
    sampling_rate: Annotated[float, o.opt("Rate at which units are drawn.")] = 1.0,
    steps: Annotated[int, o.opt("Number of releases.")] = 1,
    delta: Annotated[float | None, o.opt("Delta (a ledger knows its own).")] = None,
    sampling: Annotated[str, o.opt("poisson, uniform or none.")] = "poisson",
    adjacency: Annotated[str, o.opt("add_remove, zero_out or replace_one.")] = "add_remove",
    accountant: Annotated[str | None, o.opt("pld, rdp or renyi (default: the tightest).")] = None,
    page: Annotated[
        Path | None, o.opt("With --ledger: write a privacy report for an ethics board (HTML).")
    ] = None,
    json: o.Json = False,
) -> None:
    """Turn noise into epsilon, epsilon into noise, or a ledger into statements."""
    asked = [value for value in (ledger, noise_multiplier, epsilon) if value is not None]
    remedy = "give --ledger, --noise-multiplier or --epsilon"
    check(len(asked) == 1, "dpfl account", "answers one question at a time", remedy)
    if ledger is not None:
        problem = "a ledger is read by the tightest one"
        check(accountant is None, "--accountant", problem, "leave it out")
        _from_ledger(ledger, delta, page, json)
        return
    check(page is None, "--page", "a page is about a ledger", "give --ledger as well")
    remedy = "give a delta well below 1 / units"
    check(delta is not None, "--delta", "is missing and has no default", remedy)
    common = {"sampling": sampling, "adjacency": adjacency, "accountant": accountant}
    found = _from_numbers(noise_multiplier, epsilon, sampling_rate, steps, delta or 0.0, common)
    if json:
        print_json(found)
    else:
        _show(found)


def _from_numbers(
    noise: float | None,
    target: float | None,
    rate: float,
    steps: int,
    delta: float,
    common: dict[str, Any],
) -> dict[str, Any]:
    """Find the noise that is missing, and what it costs; torch is not needed for that."""
    from dpfl.core.types import Adjacency
    from dpfl.privacy.accountant import spend
    from dpfl.privacy.calibrate import calibrate
    from dpfl.privacy.events import SAMPLINGS, Event

    one_of("--sampling", SAMPLINGS, sampling=common["sampling"])
    one_of("--adjacency", [str(one) for one in Adjacency], adjacency=common["adjacency"])
    one_of("--accountant", ("pld", "rdp", "renyi"), accountant=common["accountant"] or "pld")
    adjacency, sampling = Adjacency(common["adjacency"]), common["sampling"]
    if noise is None:
        noise = calibrate(target or 0.0, delta, rate, steps, **{**common, "adjacency": adjacency})
    effective = 1.0 if sampling == "none" else rate
    event = Event(noise_multiplier=noise, steps=steps, sampling=sampling, sampling_rate=effective)
    spent = spend((event,), delta, adjacency=adjacency, accountant=common["accountant"])
    return {
        "noise_multiplier": noise,
        "epsilon": spent.epsilon if math.isfinite(spent.epsilon) else "infinite",
        "delta": delta,
        "steps": steps,
        "sampling": sampling,
        "sampling_rate": rate,
        "adjacency": str(adjacency),
        "accountant": spent.accountant,
    }


def _show(found: dict[str, Any]) -> None:
    from dpfl.privacy.accountant import shown

    epsilon = math.inf if found["epsilon"] == "infinite" else found["epsilon"]
    print_facts(
        {
            "noise multiplier (std / clip)": f"{found['noise_multiplier']:.6g}",
            "epsilon": f"{shown(epsilon, 4)} at delta {found['delta']:g}",
            "adjacency, accountant": f"{found['adjacency']}, {found['accountant']}",
            "releases": f"{found['steps']}, {found['sampling']} sampling at rate "
            f"{found['sampling_rate']:g}",
        }
    )
    out.print("Unit and adversary are those of whatever is clipped and sampled. Rounded up.")


def _from_ledger(path: Path, delta: float | None, page: Path | None, json: bool) -> None:
    from dpfl.cli.run import show_statements
    from dpfl.privacy.flags import Flag, RaisedFlag
    from dpfl.privacy.ledger import Ledger
    from dpfl.privacy.statement import statements

    with closing(Ledger.open(path, read_only=True)) as book, book.snapshot():
        if page is not None:
            from dpfl.report.ledger_page import write_ledger_page

            write_ledger_page(book, page, f"Privacy report of {book.identity()}", delta)
        lines, head, rule = statements(book, delta), book.head(), book.filter
        seeded = book.seeded_runs()
        raised = [run for run, title in book.titles().items() if "HYPOTHETICAL" in title]
    if json:
        told: dict[str, Any] = {"filter": rule, "entries": head.number, "head": head.digest}
        told |= {"seeded_runs": seeded, "hypothetical_runs": raised}
        own = [line.to_dict() for line in lines]
        print_json({"ledger": str(path), **told, "statements": own})
        return
    flagged = {Flag.SEEDED: seeded, Flag.HYPOTHETICAL: raised}
    warn(RaisedFlag(flag, f"run {run}") for flag, runs in flagged.items() for run in runs)
    if not lines:
        out.print("Nothing was charged.")
    if any(line.delta is None for line in lines):
        note("Some accounts have no budget, so no delta is known for them: give --delta.")
    show_statements(lines)
    out.print(f"Filter across studies: {rule}. Entries in the ledger: {head.number}.")
    out.print(f"Head: {head.digest}", soft_wrap=True)
    if page is not None:
        note(f"Page: {page}")
