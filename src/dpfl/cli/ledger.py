"""``dpfl ledger``: check the file in which a site or a run keeps what it was charged.

The file, its hash chain and the head noted beside it are checked; a hash that was noted elsewhere,
for instance on a printed report, must be in the chain. Whatever does not agree ends with exit
code 5, and nothing is changed.
"""

from contextlib import closing
from pathlib import Path
from typing import Any

from dpfl.cli import console as c
from dpfl.cli import options as o
from dpfl.core.checks import check
from dpfl.core.errors import LedgerError

app = o.group("A ledger file: check that nothing in it was changed or lost.")


@app.command()
def verify(
    file: Path = o.arg("The ledger file."),
    head: str | None = o.opt("A hash noted earlier, which must be in the ledger."),
    accept_head: bool = o.flag(
        "--accept-head", "Write the missing head file: this is the newest copy."
    ),
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
        Ledger.accept_head(file)
    noted = read_head(str(file))
    wanted = (head or "").strip().lower().rpartition(":")[2]
    with closing(Ledger.open(file, read_only=True)) as ledger, ledger.snapshot():
        problem = f"has no hash chain to check ({', '.join(map(str, ledger.flags))})"
        remedy = "keep it with the version that wrote it; dpfl account --ledger reads it"
        check(not ledger.flags, str(file), problem, remedy, LedgerError)
        held = head is None or ledger.contains(wanted)
        problem = f"does not contain entry {wanted}, which was noted earlier"
        remedy = "find the ledger that does: this one was rolled back, rewritten, or is another one"
        check(held, str(file), problem, remedy, LedgerError)
        facts: dict[str, Any] = {"ledger": str(file), "identity": ledger.identity()}
        newest = ledger.head()
        facts |= {"filter": ledger.filter, "entries": newest.number, "head": newest.digest}
        facts |= {"accounts": len(ledger.accounts()), "runs": len(ledger.titles())}
    facts["head_file"] = None if noted is None else noted.number
    facts["checked"] = ["file", "hash chain", "head file", *(["given head"] if wanted else [])]
    c.answer(json, facts, _show, facts, accepted)


def _show(facts: dict[str, Any], accepted: bool) -> None:
    """Print what was found in a ledger."""
    if accepted:
        c.note(f"Wrote {facts['ledger']}.head")
    later = facts["entries"] - (facts["head_file"] or 0)
    given = "given head" in facts["checked"]
    c.print_facts(
        {
            "ledger of": facts["identity"],
            "filter across studies": facts["filter"],
            "entries, runs, accounts": "{entries}, {runs}, {accounts}".format(**facts),
            "head file": f"agrees; {later} entries were written since" if later else "agrees",
            **({"given head": "is in the ledger"} if given else {}),
        }
    )
    c.out.print(f"Head: {facts['head']}", soft_wrap=True)
    c.out.print("Nothing was changed since the entries were written. Note the head elsewhere.")
