"""``dpfl ledger``: check the file in which a site or a run keeps what it was charged.

The file, its hash chain and the head noted beside it are checked; a hash that was noted elsewhere,
for instance on a printed report, must be in the chain. Whatever does not agree ends with exit
code 5, and nothing is changed.
"""

from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfl.cli import options as o
from dpfl.cli.console import note, out, print_facts, print_json
from dpfl.core.checks import check
from dpfl.core.errors import LedgerError

app = typer.Typer(
    no_args_is_help=True, help="A ledger file: check that nothing in it was changed or lost."
)


@app.callback()
def _top() -> None:
    pass


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="The ledger file.", show_default=False)],
    head: Annotated[str | None, o.opt("A hash noted earlier, which must be in the ledger.")] = None,
    accept_head: Annotated[
        bool, o.opt("Write the missing head file: this is the newest copy.", "--accept-head")
    ] = False,
    json: o.Json = False,
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
    with closing(Ledger.open(file, read_only=True)) as ledger, ledger.snapshot():
        problem = f"has no hash chain to check ({ledger.flags[0]})" if ledger.flags else ""
        remedy = "keep it with the version that wrote it; dpfl account --ledger reads it"
        check(not ledger.flags, str(file), problem, remedy, LedgerError)
        newest = ledger.head()
        wanted = None if head is None else head.strip().lower().rpartition(":")[2]
        problem = f"does not contain entry {wanted}, which was noted earlier"
        remedy = "find the ledger that does: this one was rolled back, rewritten, or is another one"
        held = wanted is None or ledger.contains(wanted)
        check(held, str(file), problem, remedy, LedgerError)
        facts: dict[str, Any] = {"ledger": str(file), "identity": ledger.identity()}
        facts |= {"filter": ledger.filter, "entries": newest.number, "head": newest.digest}
        facts |= {"accounts": len(ledger.accounts()), "runs": len(ledger.titles())}
    facts["head_file"] = None if noted is None else noted.number
    facts["checked"] = ["file", "hash chain", "head file", *(["given head"] if wanted else [])]
    if json:
        print_json(facts)
        return
    if accepted:
        note(f"Wrote {file}.head")
    later = newest.number - (noted.number if noted else 0)
    print_facts(
        {
            "ledger of": facts["identity"],
            "filter across studies": facts["filter"],
            "entries, runs, accounts": "{entries}, {runs}, {accounts}".format(**facts),
            "head file": f"agrees; {later} entries were written since" if later else "agrees",
            **({"given head": "is in the ledger"} if wanted else {}),
        }
    )
    out.print(f"Head: {newest.digest}", soft_wrap=True)
    out.print("Nothing was changed since the entries were written. Note the head elsewhere.")
