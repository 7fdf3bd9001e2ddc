"""The server's part of an accounted metric: asking sites for a measurement, and pooling answers.

A measurement is a round with a negative number. Its download is the published model; an answer is
a noisy sum over the site's test records, or over a secure sum a share of one. Value and standard
error follow from the noisy sums and from what sites claim: nothing else of test records leaves a
site.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dpfl.core.checks import check
from dpfl.core.errors import DpflError, PeerError
from dpfl.core.grid import Grid
from dpfl.core.grid_noise import LARGEST
from dpfl.core.types import Budget, Claims, ClientSettings, Cohort, Downlink, State
from dpfl.deploy.asking import ask_uploads
from dpfl.deploy.connections import Connections
from dpfl.deploy.enrolment import settle
from dpfl.deploy.opened import OpenedRound
from dpfl.plugs.accounted_metric import AccountedMetric
from dpfl.plugs.base import Participant
from dpfl.plugs.measures import Estimate, Measure
from dpfl.rounds import Agreement, Plan, SumOfUploads, Uplink
from dpfl.rounds.codec import FRAME_BYTES, decode_upload, encode_download
from dpfl.rounds.measure import answer_noise, hidden, pooled
from dpfl.rounds.record import RoundRecord
from dpfl.runs.folder import RunFolder


def measure(
    sites: Connections,
    folder: RunFolder,
    agreement: Agreement,
    state: State,
    history: list[RoundRecord],
) -> None:
    """Make the measurement that is due after the rounds so far, and add its record.

    The rounds must be on disk: who has answered a measurement does not answer them again. A
    measurement is over once it has a record, also where nobody could answer.
    """
    metric = sites.study.accounted_metric()
    done = state.round
    if metric is None or not metric.is_due(done):
        return
    round_ = agreement.measurement(done // metric.every - 1)
    if any(record.round == round_ for record in history):
        return
    sites.hello()
    settle(sites, agreement)
    record = _Measurement(sites, folder, agreement, metric, round_, state).play()
    folder.append_round(record)
    history.append(record)


@dataclass
class _Measurement:
    """One measurement, as its server asks for it.

    ``round`` is its (negative) number, ``state`` holds the model that is measured. ``missing`` says
    why sites are not in it.
    """

    sites: Connections
    folder: RunFolder
    agreement: Agreement
    metric: AccountedMetric
    round: int
    state: State
    missing: dict[str, str] = field(default_factory=dict)

    def play(self) -> RoundRecord:
        """Ask the sites, and return the record with value and standard error.

        What is sent is on disk before the first message leaves: after a kill the same is asked
        again, and sites send the same bytes.
        """
        opened = OpenedRound.read(self.folder.path)
        if opened is not None and opened.round == self.round:
            plan = opened.plan(self.agreement, self.state)
        else:
            plan = self._plan()
            OpenedRound.of(plan).write(self.folder.path)
        before = dict(self.sites.willing)
        uplinks, total = ask_uploads(self.sites, self.folder, self.agreement, plan)
        self.missing = {one.client: one.reason for one in uplinks if one.payload is None}
        found, arrived = self._estimate(plan, uplinks, total)
        for site in self.missing:  # who refuses a measurement may take the next round
            self.sites.willing[site] = before.get(site, True)
        sent = [len(uplink.payload) for uplink in uplinks if uplink.payload is not None]
        frame = FRAME_BYTES if total is None else 0
        return RoundRecord(
            round=self.round,
            cohort=plan.cohort.ids,
            arrived=arrived,
            missing=self.missing,
            bytes_up=sum(sent),
            payload_bytes_up=sum(sent) - frame * len(sent),
            bytes_down=sum(map(len, plan.downloads.values())),
            published=found is not None,
            measured=found,
        )

    def _plan(self) -> Plan:
        """Whom to ask: members with test records; nobody where a sum could not hide them.

        A site that takes no more rounds has planned for measurements all the same. A sum counts on
        those that it asks, so that there only those are asked who are willing.
        """
        agreement = self.agreement
        state = self.state
        sites = self.sites
        channel = agreement.strategy.channel
        claims = {
            site: own
            for site, own in agreement.claims.items()
            if own.test_examples
            and site in sites.bound
            and (channel.sees_rows or sites.willing.get(site, False))
        }
        cohort = Cohort.of(claims if claims and hidden(channel, len(claims)) else {})
        published = agreement.strategy.step.published(dict(state.plugs["step"]), state.model)
        shared = {"buffers": dict(state.buffers)} if state.buffers else {}
        download = encode_download(
            Downlink(round=self.round, start=published, shared=shared, drawn=len(cohort))
        )
        downloads = dict.fromkeys(cohort.ids, download)
        return Plan(round=self.round, cohort=cohort, downloads=downloads, shared=shared)

    def _estimate(
        self, plan: Plan, uplinks: Sequence[Uplink], total: SumOfUploads | None
    ) -> tuple[Estimate | None, tuple[str, ...]]:
        """The metric over the test records of those who answered, and who did."""
        claims = plan.cohort.claims
        agreement = self.agreement
        measure = self.metric.measure(self.sites.study.learned())
        if total is not None:
            step = agreement.sum_plan(self.round, len(plan.cohort)).step
            vector = torch.from_numpy(total.integers.astype(np.float64)).mul_(step)
            ids = tuple(sorted(total.ids))
            self.missing = {site: why for site, why in self.missing.items() if site not in ids}
            variance = len(ids) * self._noise(plan, ids[0]) ** 2
            records = sum(claims[site].test_examples for site in ids)
            return measure.estimate(vector, variance, records), ids
        answers = {}
        stds = {}
        for uplink in uplinks if agreement.strategy.channel.sees_rows else ():
            if uplink.payload is not None:
                site = uplink.client
                try:
                    std = self._noise(plan, site)
                    answers[site] = self._decoded(measure, uplink.payload, site, std)
                    stds[site] = std
                except DpflError as error:
                    self.missing[site] = str(error)
        records = sum(claims[site].test_examples for site in answers)
        found = pooled(measure, answers, stds, records) if answers else None
        return found, tuple(sorted(answers))

    def _decoded(self, measure: Measure, payload: bytes, site: str, std: float) -> Tensor:
        """Read an answer; one that so many test records cannot give is refused."""
        grid = Grid.of(std)
        records = self.agreement.claims[site].test_examples
        answer = decode_upload(payload, measure.numbers, self.sites.run, self.round, site, grid)
        most = records + (LARGEST + 1) * grid.step
        check(
            bool((answer.abs() <= most).all()),
            "answer",
            f"exceeds what {records} test records and their noise can give",
            "send a sum of statistics",
            PeerError,
        )
        return answer

    def _noise(self, plan: Plan, site: str) -> float:
        """The noise in a site's answer, as it follows from the budget that it claims."""
        if not plan.cohort.claims[site].usable:
            raise PeerError(
                "claims", "hold no usable (epsilon, delta)", "claim what the site enforces"
            )
        who = _claimed(site, plan.cohort.claims[site])
        return answer_noise(self.agreement, self.round, who, len(plan.cohort))


def _claimed(site: str, claims: Claims) -> Participant:
    """A site that has what it claims."""
    budget = Budget(epsilon=claims.epsilon, delta=claims.delta, accountant=claims.accountant)
    settings = ClientSettings()
    return Participant(
        examples=claims.examples, client_settings=settings, budget=budget, client=site
    )
