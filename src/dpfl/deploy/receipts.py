"""Receipts: each round the server signs the newest entry of every site's hash chain of charges.

A site's answer names the newest entry that its ledger has for this run, by a hash that covers all
earlier entries and a secret of the ledger, and so tells nothing. The server signs it, keeps the
receipt, and sends it along with its next request. The site checks that its ledger holds that entry,
and those of all receipts that it keeps itself. A ledger that was restored from a backup, or belongs
to a copy of the site's folder, does not: the site refuses to go on, and the server learns why. With
the receipts that it keeps, a site can show later what its ledger held when, and a server cannot
deny it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from dpfl.core.checks import check
from dpfl.core.errors import DpflError, FolderError, PeerError
from dpfl.core.files import append_line, parsed, write_safely
from dpfl.deploy.messages import round_name

RECEIPTS, SIGNING_KEY = "receipts.jsonl", "signing.key"


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """The server's signature: after this round, the site named its newest entry ``head``.

    ``head`` and ``signature`` are hexadecimal.
    """

    run: str
    site: str
    round: int
    head: str
    signature: str = ""

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Receipt:
        """Read a receipt; raises KeyError, TypeError or ValueError where it is none."""
        texts = {name: str(told[name]) for name in ("run", "site", "head", "signature")}
        return cls(round=int(told["round"]), **texts)

    def content(self) -> bytes:
        """Return what is signed."""
        return json.dumps(["dpfl receipt", self.run, self.site, self.round, self.head]).encode()

    def check(self, key: str) -> None:
        """Refuse a receipt that was not signed by the server whose public key this is."""
        try:
            public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
            public.verify(bytes.fromhex(self.signature), self.content())
        except (ValueError, InvalidSignature) as error:
            raise PeerError(
                "receipt", "is not signed with the key that was agreed on", "begin another run"
            ) from error


def signing_key(path: Path) -> Ed25519PrivateKey:
    """Read the private key in a file; it is made when it is first needed."""
    if not path.exists():
        write_safely(path, Ed25519PrivateKey.generate().private_bytes_raw(), secret=True)
    try:
        return Ed25519PrivateKey.from_private_bytes(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FolderError(str(path), f"cannot be used ({error})", "restore it") from error


class Countersigner:
    """The server's end: its key, and the last receipt of every site."""

    def __init__(self, folder: Path) -> None:
        path = folder / SIGNING_KEY
        self._kept = folder / RECEIPTS
        if not path.exists():
            check(
                not self._kept.exists(),
                str(path),
                "is missing, and has signed receipts",
                "restore it from a backup",
                FolderError,
            )
        self._key = signing_key(path)
        self.last = {receipt.site: receipt for receipt in read_receipts(self._kept)}

    @property
    def key(self) -> str:
        """The public key, in hexadecimal; it is part of what sites agree to."""
        return self._key.public_key().public_bytes_raw().hex()

    def sign(self, run: str, site: str, round_: int, head: str) -> None:
        """Sign what a site has named, once for each round, and keep the receipt."""
        known = self.last.get(site)
        if known is not None and (known.run, known.round, known.head) == (run, round_, head):
            return
        unsigned = Receipt(run=run, site=site, round=round_, head=head[:64])
        signature = self._key.sign(unsigned.content()).hex()
        receipt = Receipt(**{**asdict(unsigned), "signature": signature})
        append_line(self._kept, asdict(receipt))
        self.last[site] = receipt


def read_receipts(path: Path) -> Iterator[Receipt]:
    """Read the receipts in a file, oldest first; a line that was cut off or damaged is left out."""
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError, KeyError, TypeError):
            yield Receipt.read(parsed(line))


def check_held(
    receipt: Receipt, site: str, heads: Collection[str], kind: type[DpflError] = PeerError
) -> None:
    """Refuse to go on with a ledger that does not hold what the server has signed.

    ``heads`` are the entries that the ledger of ``site`` has for the run of the receipt, ``kind``
    is the error to raise.
    """
    signed = f"its ledger lacks the entry that the server signed after {round_name(receipt.round)}"
    why = "it was restored from a backup, or this is a copy of the site's folder"
    check(
        receipt.head in heads,
        f"site '{site}'",
        f"{signed}: {why} (or the server signed what this site never sent)",
        "put back the newest ledger, and use one copy of the folder only",
        kind,
    )
