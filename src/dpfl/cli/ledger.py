"""``dpfl ledger``: check the file in which a site or a run keeps what it was charged."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from dpfl.cli import options as o
from dpfl.cli.console import err, out, print_json, table
from dpfl.core.errors import LedgerError
from dpfl.privacy.chain import read_head
from dpfl.privacy.ledger import Ledger

app = typer.Typer(
    no_args_is_help=True, help="A ledger file: check that nothing in it was changed or lost."
)


@app.callback()
def _top() -> None:
    """A ledger file: check that nothing in it was changed or lost."""


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="The ledger file.", show_default=False)],
    head: Annotated[
        str | None,
        typer.Option(
            help="A hash noted earlier, which the ledger must contain.", show_default=False
        ),
    ] = None,
    accept_head: Annotated[
        bool,
        typer.Option(
            "--accept-head",
            help="Write the missing head file, if this is the newest copy of the ledger.",
        ),
    ] = False,
    json: o.Json = False,
) -> None:
    """Check a ledger's file, its hash chain, and the head noted beside it.

    The chain has no key: whoever can rewrite the ledger and its head file together is only found
    out by a hash that was noted elsewhere, for instance on a printed report. Give it with --head.
    """
    accepted = accept_head and read_head(str(file)) is None
    if accept_head:
        Ledger.accept_head(file)
    noted = read_head(str(file))
    with closing(Ledger.open(file, read_only=True)) as ledger, ledger.snapshot():
        newest = ledger.head()
        wanted = None if head is None else head.strip().lower().rpartition(":")[2]
        if wanted is not None and not ledger.contains(wanted):
            raise LedgerError(
                str(file),
                f"does not contain entry {wanted}, which was noted earlier",
                "find the ledger that does: this one was rolled back, rewritten, or is another one",
            )
        facts: dict[str, object] = {
            "ledger": str(file),
            "identity": ledger.identity(),
            "filter": ledger.filter,
            "entries": newest.number,
            "head": newest.digest,
            "head_file": None if noted is None else noted.number,
            "accounts": len(ledger.accounts()),
            "runs": len(ledger.titles()),
            "checked": ["file", "hash chain", "head file", *(["given head"] if wanted else [])],
        }
    if json:
        print_json(facts)
        return
    if accepted:
        err.print(f"Wrote {file}.head", soft_wrap=True)
    shown = table("", "", left=2)
    shown.add_row("ledger of", str(facts["identity"]))
    shown.add_row("filter across studies", str(facts["filter"]))
    shown.add_row(
        "entries, runs, accounts", f"{facts['entries']}, {facts['runs']}, {facts['accounts']}"
    )
    behind = newest.number - (noted.number if noted else 0)
    shown.add_row(
        "head file", "agrees" if behind == 0 else f"agrees; {behind} entries were written since"
    )
    if wanted is not None:
        shown.add_row("given head", "is in the ledger")
    out.print(shown)
    out.print(f"Head: {newest.digest}", soft_wrap=True)
    out.print(
        "Nothing in the ledger was changed since its entries were written. Note the head elsewhere."
    )
