"""A study over a secure sum for tests: sites that know each other's keys, and a server's messages
to them one by one.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpfl.core.grid import Grid
from dpfl.core.random import PublicSeed
from dpfl.deploy.messages import Message
from dpfl.deploy.requests import SumRequest, TrainingRequest
from dpfl.deploy.site import Site
from dpfl.deploy.sum_phases import KEYS, SHARES, SURVIVORS, UNMASK, digest_of, sum_terms
from dpfl.engine import make_engine
from dpfl.rounds import Agreement, Workshop, client_round
from dpfl.rounds.codec import decode_upload
from dpfl.rounds.enrol import secret_for
from dpfl.runs.site_file import SiteFile
from dpfl.secure_sum import keys, server
from dpfl.secure_sum.session import MemberKeys, Roster, Shares
from tests.deploy.federation import CLIENT, Desk, Federation, study_values

NAMES = ("a", "b", "c", "d")
BUDGET = {**CLIENT, "observer": "server"}


def sum_values(
    sites: Sequence[str] = NAMES, dropouts: int = 1, method: str = "udp_fedavg", **more: Any
) -> dict[str, Any]:
    """A seeded study over a secure sum."""
    run = {"noise": "seeded", "seed": 3, "least_sites": 2}
    values = study_values(method, rounds=1, sites=sites, run=run, **more)
    return {**values, "secure_sum": {"tolerated_dropouts": dropouts}}


def pin(sites: Mapping[str, Site], **more: Any) -> None:
    """Give every site the others' identity keys; ``more`` goes into its [secure_sum]."""
    known = {name: keys.public_half(site.identity()) for name, site in sites.items()}
    for name, site in sites.items():
        members = {other: key for other, key in known.items() if other != name}
        values = SiteFile.in_folder(site.folder).model_dump(exclude_none=True)
        values["secure_sum"] = {"members": members, **more}
        (site.folder / "site.toml").write_text(SiteFile.from_dict(values).to_toml())
        sites[name].file = SiteFile.in_folder(site.folder)


def sum_federation(base: Path, values: dict[str, Any] | None = None, **more: Any) -> Federation:
    """Sites and a server in one folder, on the in-process grid."""
    made = Federation.of(base, values or sum_values(), BUDGET, policy={"allow_seeded": True})
    pin(made.sites, **more)
    return made


def integers_of(
    desk: Desk, sites: Mapping[str, Site], round_: int = 0, download: bytes | None = None
) -> dict[str, np.ndarray]:
    """What the simulator's clients send in a seeded study: integers, without masks."""
    study, agreement = desk.study(), desk.agreement()
    members = {name: site.member(study.learned()) for name, site in sites.items()}
    seed = PublicSeed(study.run.seed).child("secret")
    workshop = Workshop(
        agreement=agreement,
        run=desk.run,
        engine=make_engine("stacked"),
        model=study.build_model(),
        secret=lambda round_, site: secret_for(seed, "client", round_, site),
    )
    sent = desk.download(round_) if download is None else download
    found, grid = {}, Grid(agreement.sum_plan(round_, len(sites)).step)
    for uplink in client_round(workshop, dict.fromkeys(members, sent), members):
        vector = decode_upload(uplink.payload, None, desk.run, round_, uplink.client, grid)
        found[uplink.client] = grid.integers(vector).numpy().astype(np.int64)
    return found


@dataclass
class Talk:
    """A server that asks sites phase by phase; every message can be changed into a lie."""

    folders: dict[str, Path]
    desk: Desk
    round: int = 0
    attempt: int = 0
    roster: Roster | None = None
    shares: dict[str, Shares] = field(default_factory=dict)
    masked: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def bound(cls, federation: Federation, values: dict[str, Any]) -> Talk:
        """Begin with sites that have committed to the terms."""
        folders = {name: site.folder for name, site in federation.sites.items()}
        talk = cls(folders=folders, desk=Desk(values))
        for name in folders:
            answer = talk.answer(name, talk.desk.terms())
            assert answer.accepted, answer.reason
        return talk

    def answer(self, name: str, message: Message) -> Message:
        """Ask a site, in what might be a new process each time."""
        return Site(self.folders[name]).answer(message)

    def _common(self) -> dict[str, Any]:
        agreed = {"study": self.desk.study(), "run": self.desk.run, "signer": "00" * 32}
        return {**agreed, "terms": self.desk.agreement().terms, "round": self.round}

    def request(self, phase: str, about: dict[str, Any]) -> Message:
        return SumRequest(**self._common(), phase=phase, sum=about).to_message()

    def terms(self, **lies: Any):
        agreement: Agreement = self.desk.agreement()
        digest = SumRequest(**self._common(), phase="", sum={}).digest()
        model = digest_of(self.desk.download(self.round))
        asked = len(self.folders)
        honest = sum_terms(
            agreement,
            digest,
            self.desk.run,
            self.round,
            asked,
            attempt=self.attempt,
            model=model,
        )
        return replace(honest, **lies)

    def keys(self, name: str, **lies: Any) -> Message:
        return self.answer(name, self.request(KEYS, {"terms": asdict(self.terms(**lies))}))

    def make_roster(self, names: Sequence[str] | None = None) -> Roster:
        sent = {
            name: MemberKeys.read(self.keys(name).header["sum"]) for name in names or self.folders
        }
        self.roster = server.make_roster(self.terms(), sent)
        return self.roster

    def share(self, name: str, roster: Roster | None = None) -> Message:
        return self.answer(name, self.request(SHARES, (roster or self.roster).to_dict()))

    def share_all(self) -> None:
        roster = self.roster or self.make_roster()
        for name in roster.names:
            self.shares[name] = Shares.read(self.share(name).header["sum"])

    def train(self, name: str, *, payload: bytes | None = None, **lies: Any) -> Message:
        mail = server.mail_for(self.roster, self.shares, name)
        about = {
            "session": self.roster.session,
            "announced": [asdict(one.announcement) for one in self.shares.values()],
            "sealed": {other: base64.b64encode(one).decode() for other, one in mail.items()},
            **lies,
        }
        download = self.desk.download(self.round) if payload is None else payload
        request = TrainingRequest(**self._common(), payload=download, sum=about)
        return self.answer(name, request.to_message())

    def train_all(self, *gone: str) -> None:
        self.share_all()
        for name in self.roster.names:
            if name not in gone:
                self.masked[name] = self.train(name).payload

    def sign(self, name: str, survivors: Sequence[str] | None = None) -> Message:
        listed = list(survivors or sorted(self.masked))
        about = {"session": self.roster.session, "survivors": listed}
        return self.answer(name, self.request(SURVIVORS, about))

    def unmask(self, name: str, signatures: Mapping[str, str]) -> Message:
        about = {"session": self.roster.session, "signatures": dict(signatures)}
        return self.answer(name, self.request(UNMASK, about))

    def total(self) -> np.ndarray:
        signatures = {
            name: self.sign(name).header["sum"]["signature"] for name in sorted(self.masked)
        }
        revealed = {}
        for name in self.masked:
            told = self.unmask(name, signatures).header["sum"]["revealed"]
            revealed[name] = {other: base64.b64decode(one) for other, one in told.items()}
        announced = {name: one.announcement for name, one in self.shares.items()}
        return server.unmasked_sum(self.roster, announced, self.masked, revealed)
