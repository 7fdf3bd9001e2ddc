"""What server and sites agree on in a secure sum: the names of its phases, and its terms.

Both compute the terms from what was agreed on, and a site compares.
"""

import hashlib

from dpfl.rounds import Agreement
from dpfl.secure_sum.session import SumTerms

KEYS, SHARES, SURVIVORS, UNMASK = "keys", "shares", "survivors", "unmask"
"""The phases beside the masked input, which is a request to train."""


def sum_terms(
    agreement: Agreement,
    digest: str,
    run: str,
    round_: int,
    asked: int,
    *,
    attempt: int,
    model: str,
) -> SumTerms:
    """The terms of a round's sum, as they follow from what was agreed on.

    ``digest`` names what was agreed on, ``model`` is the digest of the download, and ``asked`` is
    how many sites were drawn.
    """
    plan = agreement.sum_plan(round_, asked)
    return SumTerms(
        run=run,
        round=round_,
        attempt=attempt,
        model=model,
        plan=digest,
        step=plan.step,
        numbers=plan.numbers,
        largest=plan.largest,
        asked=asked,
        least=plan.group.least,
        colluders=plan.group.colluders,
    )


def digest_of(download: bytes) -> str:
    """Name the download that all members of a sum start from."""
    return hashlib.sha256(download).hexdigest()
