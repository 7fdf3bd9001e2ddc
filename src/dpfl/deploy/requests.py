"""What a server asks of its sites: five kinds of requests, each read once where it arrives.

Every request repeats the study and the name of the run, because a new process of the site may
answer it. Its header holds ::

    kind     hello, terms, train, sum or end
    dpfl     the server's version
    study    the study as it is offered: everything but the network; it names no file
    run      the name of the run, of at most 200 characters
    terms    what enrolment settled (not in a hello)
    binding  of terms: whether the site commits to its plan by accepting
    identities  of terms: the keys of all sites for secure sums, so that wrong ones are found early
    round    of a request to train, or for a phase of a secure sum
    phase    of a secure sum: keys, shares, survivors or unmask; its masked input is a training
    sum      what the phase brings: terms, a roster, others' shares, survivors or signatures
    signer   the public key that the server's receipts are signed with
    receipt  the server's signature under the newest entry that this site has named
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from dpfl.core.checks import check
from dpfl.core.errors import PeerError
from dpfl.core.types import Plain, Terms
from dpfl.core.version import __version__
from dpfl.deploy.messages import (
    END,
    HELLO,
    SAME_VERSION,
    SUM,
    TERMS,
    TRAIN,
    Message,
    integer,
    name_of,
    readable,
    terms_from_dict,
    terms_to_dict,
    write_header,
)
from dpfl.deploy.receipts import Receipt
from dpfl.runs.deployment import Offer


@dataclass(frozen=True, kw_only=True)
class Request:
    """A server's message: the study it offers, the name of the run, and what it asks.

    Subclasses are the five kinds of requests. :meth:`to_message` writes one, :meth:`read` reads
    whichever it is. ``payload`` is the download of a round, or the final model.
    """

    kind: ClassVar[str]
    study: Offer
    run: str
    payload: bytes = b""

    def to_message(self) -> Message:
        """Write the request."""
        common = {"kind": self.kind, "dpfl": __version__, "run": self.run}
        own = {name: getattr(self, name) for name in _own_fields(type(self))}
        if "terms" in own:
            own["terms"] = terms_to_dict(own["terms"])
            own["receipt"] = asdict(own["receipt"]) if own["receipt"] else None
        header = common | {"study": self.study.offer()} | own
        return Message(header=header, payload=self.payload)

    @staticmethod
    def read(message: Message) -> Request:
        """Read a request of any kind; another version of dpfl, or anything odd, is refused."""
        header = message.header
        version = str(header.get("dpfl", ""))
        check(
            version.split(".")[:2] == __version__.split(".")[:2],
            "server",
            f"runs dpfl {version or 'unknown'}, this site {__version__}",
            "use the same version",
            PeerError,
        )
        kind = header.get("kind")
        kinds = (Hello, TermsRequest, TrainingRequest, SumRequest, Delivery)
        found = next((one for one in kinds if one.kind == kind), None)
        if found is None:
            raise PeerError("message", f"there is no request '{kind}'", SAME_VERSION)
        with readable("message"):
            study = Offer.from_dict(dict(header["study"]), "the server's study")
            own = {name: _READERS[name](header.get(name)) for name in _own_fields(found)}
            return found(study=study, run=name_of(header["run"]), payload=message.payload, **own)


@dataclass(frozen=True, kw_only=True)
class Hello(Request):
    """Asks a node who it is; the site answers with an :class:`Introduction`."""

    kind = HELLO


@dataclass(frozen=True, kw_only=True)
class UnderTerms(Request):
    """A request under terms that enrolment has settled.

    ``signer`` is the public key of the server's receipts, ``receipt`` the last one of this site.
    """

    terms: Terms
    signer: str
    receipt: Receipt | None = None

    def digest(self) -> str:
        """Name the study, the terms and the server's key together: what a site agrees to.

        A site trains only under the digest that it has committed to.
        """
        agreed = {"study": self.study.digest(), "terms": terms_to_dict(self.terms)}
        return hashlib.sha256(write_header(agreed | {"signer": self.signer}).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class TermsRequest(UnderTerms):
    """Asks whether a site accepts the terms.

    Terms that are not ``binding`` yet cost nothing. By accepting binding ones the site commits to
    its plan.
    """

    kind = TERMS
    binding: bool
    identities: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainingRequest(UnderTerms):
    """Asks for one round; the payload is the download.

    Releases before round 0 have negative numbers, -R to -1, and are answered like rounds; so are
    measurements of an accounted metric, with numbers below. ``sum`` is what others have sealed for
    the site where uploads are masked for a secure sum.
    """

    kind = TRAIN
    round: int
    sum: Plain | None = None


@dataclass(frozen=True, kw_only=True)
class SumRequest(UnderTerms):
    """Asks for one phase of a round's secure sum, before or after the masked input."""

    kind = SUM
    round: int
    phase: str
    sum: Plain


@dataclass(frozen=True, kw_only=True)
class Delivery(UnderTerms):
    """Brings the final model, as safetensors in the payload."""

    kind = END


_READERS: dict[str, Callable[[Any], Any]] = {
    "terms": terms_from_dict,
    "binding": lambda value: value is True,
    "round": lambda value: integer(value, least=None),
    "identities": lambda value: {
        name_of(name): str(key) for name, key in dict(value or {}).items()
    },
    "phase": str,
    "sum": lambda value: None if value is None else dict(value),
    "signer": str,
    "receipt": lambda value: None if value is None else Receipt.read(value),
}


def _own_fields(kind: type[Request]) -> list[str]:
    """Return the fields that a kind of request adds to those of every request."""
    return [field.name for field in fields(kind) if field.name in _READERS]
