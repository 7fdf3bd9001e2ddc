"""Named points of dpfl at which a process can be killed: functions that charge, draw, send or write.

A process that is armed ends itself (``kill -9``) before or after its n-th visit of a point. How often
a point is visited is counted in a run that is not killed.
"""

import os
import signal
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pkgutil import resolve_name
from typing import Any

# what everything that must survive is written with
_FILES = {
    "a file is on disk": "os:fsync",
    "a file is moved into place": "pathlib:Path.replace",
    "a line is appended": "dpfl.runs.folder:append_line",
    "rows of a ledger's entry": "dpfl.privacy.chain:Entry.insert",
    "an entry of a ledger is sealed": "dpfl.privacy.chain:Entry.seal",
    "the head of a ledger is noted": "dpfl.privacy.chain:write_head",
}
SIMULATOR = _FILES | {
    "the folder is claimed": "dpfl.runs.folder:RunFolder.create",
    "a ledger is linked into place": "os:link",
    "plans are committed": "dpfl.privacy.ledger:Ledger.commit",
    "a round is charged": "dpfl.privacy.ledger:Ledger.charge",
    "clients work": "dpfl.sim.loop:Workers.run",
    "a round is closed": "dpfl.sim.loop:close_round",
    "a round is recorded": "dpfl.runs.folder:RunFolder.append_round",
    "the checkpoint is written": "dpfl.runs.folder:RunFolder.save_state",
    "the model is written": "dpfl.runs.folder:RunFolder.save_model",
    "the summary is written": "dpfl.runs.folder:RunFolder.save_summary",
}
FEDERATION = _FILES | {
    "sites are enrolled": "dpfl.deploy.enrolment:EnrolmentFile.write",
    "a site agrees to the terms": "dpfl.privacy.site_ledger:SiteLedger.agree",
    "a site commits to its plan": "dpfl.deploy.commitment:Commitment.make",
    "a round is opened": "dpfl.deploy.opened:OpenedRound.write",
    "a site works": "dpfl.deploy.site:Site.work",
    "a site charges, within its transaction": "dpfl.privacy.site_ledger:SiteLedger._charge",
    "a site charges and stores its answer": "dpfl.privacy.site_ledger:SiteLedger.charge_and_store",
    "a site notes what it sends": "dpfl.deploy.site:note_sent",
    "a site takes a receipt": "dpfl.deploy.site:Site.take_receipt",
    "a site remembers a secure sum": "dpfl.privacy.site_ledger:SiteLedger.store_sum",
    "the server signs a receipt": "dpfl.deploy.receipts:Countersigner.sign",
    "the server remembers a secure sum": "dpfl.deploy.server_sum:OpenSum.write",
    "a round is closed": "dpfl.deploy.coordinator:close_round",
    "a round is recorded": "dpfl.runs.folder:RunFolder.append_round",
    "the checkpoint is written": "dpfl.runs.folder:RunFolder.save_state",
    "the model is delivered": "dpfl.deploy.coordinator:deliver",
    "a site keeps the model": "dpfl.deploy.site:keep_model",
    "the summary is written": "dpfl.deploy.summary:DeploymentSummary.save",
}


def kill_at(place: str, visit: int, *, before: bool) -> None:
    """Let this process be killed at the n-th visit of a place, before or after what is done there."""
    count = 0

    def around(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        own = count
        if own == visit and before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments, **options)
        if own == visit:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    _wrap(place, around)


def count_visits(places: list[str]) -> Counter[str]:
    """Count, from now on, how often this process visits each place."""
    found: Counter[str] = Counter()
    for place in places:

        def around(
            function: Callable[..., Any], *arguments: Any, own: str = place, **options: Any
        ) -> Any:
            found[own] += 1
            return function(*arguments, **options)

        _wrap(place, around)
    return found


def _wrap(place: str, around: Callable[..., Any]) -> None:
    """Put a function around the one at a place, a module's or a class's."""
    module, _, path = place.partition(":")
    *holders, name = path.split(".")
    owner = resolve_name(f"{module}:{'.'.join(holders)}" if holders else module)
    function = getattr(owner, name)

    @wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        return around(function, *arguments, **options)

    setattr(owner, name, wrapped)
