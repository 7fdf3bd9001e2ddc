"""Enrolment: wait for sites, settle terms that all of them accept, write down who takes part.

First every node that connects is asked who it is (:func:`gather`). Then terms are proposed to those
who came, until everyone who is left accepts them (:func:`accepting_sites`). The result is written
to ``enrolment.json``: from then on the list of members is closed, and a study that was cut off is
resumed with the same members and terms. Only then does the coordinator make the terms binding.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterable, Mapping, Set as AbstractSet
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import nn

from dpfl.core.checks import check
from dpfl.core.errors import CheckpointError, PeerError, PrivacyRefusal
from dpfl.core.files import parsed, readable_file, write_safely
from dpfl.core.layout import Layout
from dpfl.core.types import Claims, Plain
from dpfl.core.version import __version__
from dpfl.deploy.connections import Connections
from dpfl.deploy.messages import Reply
from dpfl.deploy.requests import TermsRequest
from dpfl.rounds import Agreement, buffer_shapes, enrol
from dpfl.runs.deployment import Offer
from dpfl.runs.validation import check_types
from dpfl.strategy import Strategy

ENROLMENT = "enrolment.json"
ASK_AGAIN = 30.0  # seconds after which a node that was refused is asked once more


@dataclass(frozen=True, kw_only=True)
class EnrolmentFile:
    """Who takes part in a run. It is secret: a token lets its holder answer for a site.

    ``run`` names the run in every ledger.
    ``study`` is the digest of what the sites agreed to.
    ``claims`` are what each member said of its budget and records.
    ``tokens`` prove that later answers come from the same sites.
    """

    run: str
    study: str | None
    claims: dict[str, Claims]
    tokens: dict[str, str]

    def write(self, folder: Path) -> None:
        """Write it into the server's folder."""
        text = json.dumps(self.to_dict(), indent=1) + "\n"
        write_safely(folder / ENROLMENT, text.encode(), secret=True)

    def to_dict(self) -> Plain:
        """Return plain values."""
        return {**asdict(self), "dpfl": __version__}

    @classmethod
    def read(cls, folder: Path) -> EnrolmentFile:
        """Read back what was written when the sites enrolled."""
        with readable_file(folder / ENROLMENT, "restore it", CheckpointError):
            told = parsed((folder / ENROLMENT).read_text())
            found = cls(
                run=told["run"],
                study=told.get("study"),
                claims={site: Claims(**said) for site, said in told["claims"].items()},
                tokens=dict(told["tokens"]),
            )
            check_types(found)
            return found


def enrolled(
    study: Offer,
    model: nn.Module,
    strategy: Strategy,
    claims: Mapping[str, Claims],
    *,
    noise: bool = True,
) -> Agreement:
    """Settle the terms of a study for sites that claim this; ``noise`` is that of ``enrol``."""
    shapes = buffer_shapes(model, strategy.releases)
    layout = Layout.of_module(model)
    measured = study.measurements()
    return enrol(strategy, claims, study.run.rounds, layout, shapes, measured, noise=noise)


def check_study(study: Offer) -> None:
    """Refuse a study that no sites can take part in, as its server would.

    Terms are proposed to sites with tiny and with huge budgets. What these do not cover is left to
    the sites that come.
    """
    model, strategy = study.trained()
    claims = {
        site: Claims(epsilon=(1e-3, 1e3)[number % 2], delta=1e-5, examples=1000)
        for number, site in enumerate(study.study.sites)
    }
    with suppress(PrivacyRefusal):
        enrolled(study, model, strategy, claims, noise=False)


def gather(
    sites: Connections,
    wanted: AbstractSet[str] | None = None,
    least: int | None = None,
    then: str = "the study goes on with",
) -> None:
    """Wait until every site has introduced itself, or until time is up and there are enough.

    ``wanted``: before enrolment these are the sites that the study names, afterwards those who take
    part. ``least``: how many must come (``least_sites``). ``then``: what happens to those who came.
    The study says how long to wait (``enrol_timeout``). A node that was refused is asked again from
    time to time, since its site may have been fixed.
    """
    study = sites.study
    began = time.monotonic()
    waited = 0.0
    asked = 0.0
    timeout = study.run.enrol_timeout
    least = study.least_sites if least is None else least
    until = f"{datetime.datetime.now() + datetime.timedelta(seconds=timeout):%H:%M:%S}"
    wanted = wanted or set(sites.members) or set(study.study.sites)
    while not wanted <= set(sites.nodes):
        if waited - asked >= ASK_AGAIN:  # what was refused may have been fixed
            sites.asked &= set(sites.nodes.values())
            asked = waited
        here = wanted & set(sites.nodes)
        absent = ", ".join(sorted(wanted - set(sites.nodes)))
        goes_on = f"{then} {len(here)} of {len(wanted)} sites"
        ends = (
            f"the server stops unless {least} of {len(wanted)} are there ({study.least_sites_by})"
        )
        next_ = goes_on if len(here) >= least else ends
        sites.progress.expect(f"Waiting for {absent} until {until}; then {next_}")
        sites.hello()
        if wanted <= set(sites.nodes) or max(waited, time.monotonic() - began) >= timeout:
            break
        sites.transport.wait(1.0)
        waited += 1.0
    here = wanted & set(sites.nodes)
    for site in sorted(wanted - here):
        sites.miss(site, f"did not come within {timeout:g} s")
    absent = f"without {', '.join(sorted(wanted - here))} ({sites.why})"
    check(
        len(here) >= least,
        f"study '{study.study.name}'",
        f"only {len(here)} of {len(wanted)} sites enrolled within {timeout:g} s, {absent}",
        f"start those sites, or change {study.least_sites_by}",
        PeerError,
    )


def accepting_sites(
    sites: Connections, enrol: Callable[[Mapping[str, Claims]], Agreement]
) -> dict[str, Claims]:
    """Propose terms until everyone who is left accepts them.

    A site that refuses is not in the population. Terms follow from who takes part, so those who
    are left are asked again. Nothing is binding yet. ``enrol`` makes the terms from claims.
    """
    accepting = dict(sorted(sites.introduced.items()))
    study = sites.study
    while True:
        replies = ask_terms(sites, enrol(accepting), accepting, binding=False)
        refusing = {site: reply.problem for site, reply in replies.items() if reply.problem}
        if not refusing:
            return accepting
        sites.refusals |= refusing
        accepting = {site: claims for site, claims in accepting.items() if site not in refusing}
        check(
            len(accepting) >= study.least_sites,
            f"study '{study.study.name}'",
            f"only {len(accepting)} sites accept its terms ({sites.why})",
            f"change the study or those sites' policies, or change {study.least_sites_by}",
            PeerError,
        )


def ask_terms(
    sites: Connections, agreement: Agreement, to: Iterable[str], *, binding: bool
) -> dict[str, Reply]:
    """Ask the members in ``to`` whether they accept the terms of an agreement.

    With ``binding`` a site that accepts also commits to its plan. Returns a reply for each.
    """
    asked = sorted(to)
    limit = sites.study.run.round_timeout
    what = f"{len(asked)} sites are asked whether they accept the terms"
    sites.progress.expect(f"{what}, and waited for up to {limit:g} s")
    known = agreement.claims.keys() & sites.identities.keys()
    request = TermsRequest(
        study=sites.study,
        run=sites.run,
        terms=agreement.terms,
        signer=sites.signer.key,
        binding=binding,
        identities={site: sites.identities[site] for site in known},
    )
    return sites.ask(dict.fromkeys(asked, request.to_message()), limit)


def settle(sites: Connections, agreement: Agreement) -> None:
    """Make the terms binding: each site commits to its plan, or takes no part and says why.

    Who has committed is not asked again, nor who refused for good. Where the secrecy of the draw is
    counted on, everyone is asked before every draw, and only those who accept now may be drawn:
    nobody who is drawn may be missing.
    """
    everyone = set(agreement.claims)
    left = {site for site in everyone - sites.bound if sites.willing.get(site, True)}
    to = everyone if agreement.amplified else left
    for site, reply in ask_terms(sites, agreement, to, binding=True).items() if to else ():
        problem = sites.note(site, reply)
        if not problem:
            sites.bound.add(site)
            if not sites.willing[site]:
                sites.refusals[site] = "its budget does not cover a round"
        elif agreement.amplified:
            sites.willing[site] = False
