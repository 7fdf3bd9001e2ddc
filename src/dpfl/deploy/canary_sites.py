"""Site folders whose records are canaries, and the study that is offered to them.

The model is a logistic regression, a small network for methods that split a model in two, or the
head that a method brings along. A canary is a record LONG e_j, whose gradient is clipped; what is
looked at are the weights of the first layer that multiply its j-th number. A canary that is not
there is a record of zeros, whose gradient is zero in all of them: no further apart than under
zero-out, unless a method mixes these weights with others before it publishes anything. A client
whose presence is guessed has canaries alone, or zeros alone. The models of heads centre every
record, so that zeros count: there canaries are e_j or -e_j only.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpfl.attacks.auditing.probes import Floats
from dpfl.core.promise import Promise
from dpfl.core.random import PublicSeed
from dpfl.core.types import Budget, Observer, Plain
from dpfl.data.units import UnitKey, row_bytes, units_to_test
from dpfl.deploy.example import pin_identities
from dpfl.deploy.records import UNITS_KEY
from dpfl.deploy.site import Site
from dpfl.plugs.base import Participant
from dpfl.privacy.events import History
from dpfl.runs.deployment import STUDY_FILE, StudyFile
from dpfl.runs.site_file import SITE_FILE, SiteFile

LONG = 10.0
OWN_RECORDS = 5
"""Records of a site with one canary, and of one without any; a fifth is set aside for testing."""

_RECORDS, _SERVER = "records.csv", "server"


@dataclass(frozen=True, kw_only=True)
class CanarySites:
    """A study in a ``folder`` that holds nothing else, with a folder for each of its sites.

    ``promise`` is that of the method. ``victims`` and ``fillers`` are the names of sites with
    canaries, whose budget is ``budget``, and without, who have half as much again: some methods
    need claims that differ.
    """

    folder: Path
    study: StudyFile
    promise: Promise
    victims: Sequence[str]
    fillers: Sequence[str]
    budget: Budget

    @property
    def names(self) -> list[str]:
        """The sites of the study, those with canaries first."""
        return [*self.victims, *self.fillers]

    @property
    def server(self) -> Path:
        """The server's folder."""
        return self.folder / _SERVER

    def write(self, marks: Floats, directions: np.ndarray) -> None:
        """Write all folders; ``marks`` has a row for each victim, a number for each canary of it.

        1 and -1 are a canary in its direction, or the opposite one, 0 is none. Where clients are
        protected, the only canary of a victim is all of its records.
        """
        self.server.mkdir()
        (self.server / STUDY_FILE).write_text(self.study.to_toml())
        size = self.study.study.feature_shape[0]
        own = np.split(directions, len(marks))
        for name, mark, direction in zip(self.victims, marks, own, strict=True):
            self._write_site(name, self.budget.epsilon)
            rows = max(OWN_RECORDS, -(-5 * len(mark) // 4))
            features = np.zeros((rows, size))
            if self.promise.unit.of_data:
                features[: len(mark)][np.arange(len(mark)), direction] = LONG * mark
                self._make_trained(name, features)
            else:
                features[:, direction] = LONG * mark
            self._write_records(name, features)
        for name in self.fillers:
            self._write_site(name, 1.5 * self.budget.epsilon)
            self._write_records(name, np.zeros((OWN_RECORDS, size)))
        if self.study.secure_sum is not None:
            pin_identities([self.folder / name for name in self.names])

    def _write_site(self, name: str, epsilon: float) -> None:
        """Write the file of a site, and make its ledger and its keys."""
        own = self.folder / name
        own.mkdir()
        world = self.promise.observer is not Observer.SERVER
        about = {"unit": str(self.promise.unit), "observer": "world" if world else "server"}
        limits = {"epsilon": epsilon, "delta": self.budget.delta, "filter": "allotments"}
        accepted = {"trust_server": world, "allow_seeded": self.study.seeded}
        values: Plain = {
            "site": {"id": name},
            "data": {"file": _RECORDS, "classes": 2},
            "budget": {**limits, **about},
            "policy": {"least_noise_multiplier": 0.0, **accepted},
        }
        (own / SITE_FILE).write_text(SiteFile.from_dict(values).to_toml())
        self._write_key(name, UnitKey.of(PublicSeed(0).child(name)).value)
        Site(own).prepare()

    def _write_key(self, name: str, key: bytes) -> None:
        """Write the key under which a site marks its units: the same in every trial."""
        (self.folder / name / UNITS_KEY).write_text(key.hex())

    def _write_records(self, name: str, features: Floats) -> None:
        lines = [",".join([*(f"x{number}" for number in range(features.shape[1])), "label"])]
        lines += [",".join([*(f"{value:g}" for value in row), "0"]) for row in features.tolist()]
        (self.folder / name / _RECORDS).write_text("\n".join(lines) + "\n")

    def _make_trained(self, name: str, features: Floats) -> None:
        """Make a site's canaries longer, by thousandths, until it trains on all of them.

        Zeros alone are then tested on, whichever canaries are there. Where no length does it, the
        site gets another key.
        """
        key = Site(self.folder / name).units_key

        def hashes(rows: Floats) -> list[bytes]:
            records = row_bytes(rows.astype(np.float32), np.zeros(len(rows)))
            return key.hashes("split", key.marks(records))

        there = features.any(axis=1)
        largest = sorted(hashes(features[~there]))[units_to_test(len(features)) - 1]
        for row in np.flatnonzero(there):
            tries = features[row] * (1 + np.arange(100)[:, None] / 1000)
            fitting = [number for number, value in enumerate(hashes(tries)) if value > largest]
            if not fitting:
                self._write_key(name, key.hash("another"))
                return self._make_trained(name, features)
            features[row] = tries[fitting[0]]
        return None

    # -- what a victim says afterwards -------------------------------------------------------------

    def participant(self, name: str) -> Participant:
        """A site with its budget, as noise is planned for it."""
        return Site(self.folder / name).member().participant

    def histories(self, name: str) -> dict[Observer, History]:
        """What a site's own ledger was charged against every adversary that it was planned for."""
        with closing(Site(self.folder / name).ledger(reading=True)) as ledger:
            return {one: ledger.history(name, one) for one in ledger.observers(name)}
