"""``dpfl account``: noise <-> epsilon, and a ledger file -> what every account has spent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, cast

import typer

from dpfl.cli import options as o
from dpfl.cli.console import err, out, print_json, table
from dpfl.cli.run import show_statements
from dpfl.core.errors import ConfigurationError
from dpfl.core.types import Adjacency
from dpfl.privacy.accountant import AccountantName, shown, spend
from dpfl.privacy.calibrate import calibrate
from dpfl.privacy.events import SAMPLINGS, Event, Sampling
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.statement import statements
from dpfl.report.ledger_page import write_ledger_page


def account(
    ledger: Annotated[
        Path | None, typer.Option(help="A ledger file: print every account's spend.")
    ] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise std / clip: print epsilon.")
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Target epsilon: print the least noise that meets it.")
    ] = None,
    sampling_rate: Annotated[float, typer.Option(help="Rate at which units are drawn.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Number of releases.")] = 1,
    delta: Annotated[float | None, typer.Option(help="Delta (a ledger knows its own).")] = None,
    sampling: Annotated[str, typer.Option(help="poisson, uniform or none.")] = "poisson",
    adjacency: Annotated[
        str, typer.Option(help="add_remove, zero_out or replace_one.")
    ] = "add_remove",
    accountant: Annotated[
        str | None, typer.Option(help="pld, rdp or renyi (default: the tightest).")
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            help="With --ledger: write a privacy report for an ethics board (HTML).",
            show_default=False,
        ),
    ] = None,
    json: o.Json = False,
) -> None:
    """Turn noise into epsilon, epsilon into noise, or a ledger into statements."""
    if sum(value is not None for value in (ledger, noise_multiplier, epsilon)) != 1:
        raise ConfigurationError(
            "dpfl account",
            "one question at a time",
            "give --ledger, --noise-multiplier or --epsilon",
        )
    if ledger is not None:
        if accountant is not None:
            raise ConfigurationError(
                "--accountant", "a ledger is read by the tightest one", "leave it out"
            )
        _from_ledger(ledger, delta, page, json)
        return
    if page is not None:
        raise ConfigurationError("--page", "a page is about a ledger", "give --ledger as well")
    if delta is None:
        raise ConfigurationError(
            "--delta", "is missing and has no default", "give a delta well below 1 / units"
        )
    if sampling not in SAMPLINGS:
        raise ConfigurationError(
            "--sampling", f"'{sampling}' is unknown", f"choose one of {', '.join(SAMPLINGS)}"
        )
    if adjacency not in list(Adjacency):
        raise ConfigurationError(
            "--adjacency", f"'{adjacency}' is unknown", f"choose one of {', '.join(Adjacency)}"
        )
    if accountant not in (None, "pld", "rdp", "renyi"):
        raise ConfigurationError(
            "--accountant", f"'{accountant}' is unknown", "choose pld, rdp or renyi"
        )
    named = cast(AccountantName | None, accountant)
    _from_numbers(
        noise_multiplier,
        epsilon,
        sampling_rate,
        steps,
        delta,
        sampling,
        Adjacency(adjacency),
        named,
        json,
    )


def _from_numbers(
    noise_multiplier: float | None,
    target: float | None,
    rate: float,
    steps: int,
    delta: float,
    sampling: Sampling,
    adjacency: Adjacency,
    accountant: AccountantName | None,
    json: bool,
) -> None:
    if noise_multiplier is None:
        assert target is not None
        noise_multiplier = calibrate(
            target,
            delta,
            rate,
            steps,
            sampling=sampling,
            adjacency=adjacency,
            accountant=accountant,
        )
    event = Event(
        noise_multiplier=noise_multiplier,
        steps=steps,
        sampling=sampling,
        sampling_rate=1.0 if sampling == "none" else rate,
    )
    spent = spend((event,), delta, adjacency=adjacency, accountant=accountant)
    if json:
        print_json(
            {
                "noise_multiplier": noise_multiplier,
                "epsilon": spent.epsilon if math.isfinite(spent.epsilon) else "infinite",
                "delta": delta,
                "steps": steps,
                "sampling": sampling,
                "sampling_rate": rate,
                "adjacency": str(adjacency),
                "accountant": spent.accountant,
            }
        )
        return
    facts = table("", "", left=2)
    facts.add_row("noise multiplier (std / clip)", f"{noise_multiplier:.6g}")
    facts.add_row("epsilon", f"{shown(spent.epsilon, 4)} at delta {delta:g}")
    facts.add_row("adjacency, accountant", f"{adjacency}, {spent.accountant}")
    facts.add_row("releases", f"{steps}, {sampling} sampling at rate {rate:g}")
    out.print(facts)
    out.print("Unit and observer are those of whatever is clipped and sampled. Rounded up.")


def _from_ledger(path: Path, delta: float | None, page: Path | None, json: bool) -> None:
    book = Ledger.open(path, read_only=True)
    try:
        with book.snapshot():
            if page is not None:
                write_ledger_page(book, page, f"Privacy report of {book.identity()}", delta)
            lines = statements(book, delta)
            seeded = book.seeded_runs()
            hypothetical = [
                run for run, title in book.titles().items() if "hypothetical" in title.lower()
            ]
            head, rule = book.head(), book.filter
    finally:
        book.close()
    if json:
        told = [line.to_dict() for line in lines]
        stamps = {"seeded_runs": seeded, "hypothetical_runs": hypothetical}
        chain = {"filter": rule, "entries": head.number, "head": head.digest}
        print_json({"ledger": str(path), **chain, **stamps, "statements": told})
        return
    for run in seeded:
        err.print(f"NOT PRIVATE: SEEDED: run {run}", style="yellow")
    for run in hypothetical:
        err.print(
            f"HYPOTHETICAL: the budgets beside run {run} were raised to the largest of all",
            style="yellow",
        )
    if not lines:
        out.print("Nothing was charged.")
    if any(line.delta is None for line in lines):
        err.print("Some accounts have no budget, so no delta is known for them: give --delta.")
    show_statements([line.to_dict() for line in lines])
    out.print(f"Filter across studies: {rule}. Entries in the ledger: {head.number}.")
    out.print(f"Head: {head.digest}", soft_wrap=True)
    if page is not None:
        err.print(f"Page: {page}", soft_wrap=True)
