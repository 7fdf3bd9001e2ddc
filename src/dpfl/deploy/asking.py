"""Asking sites for a round: one request each, and what came back, checked.

The end of a study: every member gets the model, and the operator gets the summary.

Delivering the model releases nothing that the world has not been charged for. A site that cannot be
reached is named in the summary, and gets the model by other means.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dpfl.core.checks import check
from dpfl.core.errors import PeerError
from dpfl.deploy.connections import Connections
from dpfl.deploy.messages import Reply
from dpfl.deploy.requests import Delivery, TrainingRequest
from dpfl.deploy.server_sum import ServerSum
from dpfl.deploy.summary import DeploymentSummary, measured_values
from dpfl.engine.stacked import assumptions_of
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.statement import statements
from dpfl.rounds import Agreement, Plan, SumOfUploads, Uplink
from dpfl.rounds.codec import FRAME_BYTES
from dpfl.rounds.record import RoundRecord
from dpfl.runs.deployment import StudyFile
from dpfl.runs.folder import RunFolder
from dpfl.runs.result import RoundCount, total_bytes


def deliver(
    sites: Connections, agreement: Agreement, model: bytes, to: Iterable[str]
) -> dict[str, str]:
    """Send the model to the members in ``to``; return why some did not get it.

    ``model`` is the content of the model's file. A site checks that the model is one of the study
    that it agreed to, and keeps it. Nothing of the site comes back but whether it did.
    """
    study = sites.study
    request = Delivery(
        study=study,
        run=sites.run,
        terms=agreement.terms,
        signer=sites.signer.key,
        payload=model,
    )
    last = sites.signer.last
    messages = {site: replace(request, receipt=last.get(site)).to_message() for site in sorted(to)}
    limit = study.run.round_timeout
    sent = f"The model is sent to {len(messages)} sites, which are waited for up to {limit:g} s"
    sites.progress.expect(sent)
    replies = sites.ask(messages, limit)
    return {site: reply.problem for site, reply in replies.items() if reply.problem}


def summarise(
    sites: Connections,
    agreement: Agreement,
    rounds: RoundCount,
    history: Sequence[RoundRecord],
    undelivered: Mapping[str, str],
    ledger: Ledger,
) -> DeploymentSummary:
    """Write down what came of a study, from what the server knows of it.

    ``rounds``: how many were planned and done.
    ``history``: the records of all rounds.
    ``undelivered``: who did not get the model, and why.
    ``ledger``: the server's own, which holds what the world sees.
    """
    study = sites.study
    strategy = sites.study.strategy()
    layout = agreement.layout
    return DeploymentSummary(
        run=sites.run,
        study=study.study.name,
        method=study.method.name,
        promise=strategy.promise,
        flags=study.flags,
        assumptions=assumptions_of(strategy, study.build_model(), layout),
        sites=tuple(sorted(agreement.claims)),
        refusals=sites.refusals,
        parameters=layout.size,
        rounds=rounds,
        delivered=tuple(sorted(set(agreement.claims) - set(undelivered))),
        undelivered=undelivered,
        lost_rounds=tuple(record.round for record in history if record.lost),
        missed=dict(Counter(site for record in history for site in record.missing)),
        world_statements=tuple(statements(ledger)),
        measured=measured_values(study, history),
        **total_bytes(history),
    )


_MOST_EMPTY_ROUNDS = 3


Uploads = tuple[list[Uplink], SumOfUploads | None]
"""What sites have sent in a round, and the sum of it where nobody sees a single upload."""


def ask_uploads(sites: Connections, folder: RunFolder, agreement: Agreement, plan: Plan) -> Uploads:
    """Ask the sites that were drawn for their uploads, or for their sum where nobody sees one."""
    if agreement.strategy.channel.sees_rows or not plan.cohort.ids:
        return ask_round(sites, folder, agreement, plan), None
    asked = ServerSum(sites=sites, folder=folder, agreement=agreement, plan=plan)
    total = asked.play()
    return asked.uplinks(), total


def ask_round(
    sites: Connections, folder: RunFolder, agreement: Agreement, plan: Plan
) -> list[Uplink]:
    """Ask the sites that were drawn for their uploads, and return what came of it.

    With each request goes the receipt for the site's last answer; the answers are signed in turn.
    How long every site took, and how many bytes went each way, is written to the folder.
    """
    signer = sites.signer
    terms = agreement.terms
    limit = sites.study.run.round_timeout
    request = TrainingRequest(
        study=sites.study, run=sites.run, terms=terms, signer=signer.key, round=plan.round
    )
    messages = {
        site: replace(request, payload=payload, receipt=signer.last.get(site)).to_message()
        for site, payload in plan.downloads.items()
    }
    what = "a release of statistics" if plan.round < 0 else "a round"
    what = "a measurement" if plan.round in agreement.measurements else what
    asked = f"{len(messages)} sites are asked for {what}, and waited for up to {limit:g} s"
    sites.progress.expect(f"{asked}; whoever has not answered by then is missed")
    replies = sites.ask(messages, limit)
    _note_times(folder, plan, replies)
    return [_uplink(sites, agreement, plan.round, *one) for one in replies.items()]


def check_answers(study: StudyFile, played: Sequence[RoundRecord]) -> None:
    """Stop where nobody answers any more: later rounds would be used up for nothing."""
    last = [record for record in played if record.cohort][-_MOST_EMPTY_ROUNDS:]
    empty = len(last) == _MOST_EMPTY_ROUNDS and not any(record.arrived for record in last)
    rounds = f"{_MOST_EMPTY_ROUNDS} rounds in a row"
    missing = last[-1].missing if last else {}
    why = "; ".join(f"{site}: {said}" for site, said in missing.items())
    check(
        not empty,
        f"study '{study.study.name}'",
        f"no site has answered in {rounds} ({why})",
        "repair the sites, then resume the study",
        PeerError,
    )


def _note_times(folder: RunFolder, plan: Plan, replies: Mapping[str, Reply]) -> None:
    """Write down how long each site took, and how many bytes went to it and came back."""
    answered = {site: reply for site, reply in replies.items() if reply.answered}
    seconds = {site: round(reply.seconds, 3) for site, reply in answered.items()}
    size = {
        site: [len(plan.downloads[site]), len(reply.message.payload)]
        for site, reply in answered.items()
    }
    line = {"round": plan.round, "seconds": seconds, "bytes_down_up": size}
    folder.append(folder.timings, line)


def _uplink(
    sites: Connections, agreement: Agreement, round_: int, site: str, reply: Reply
) -> Uplink:
    """Read what came back from a site that was drawn: its upload, or why there is none.

    A payload that is longer than a round or release can need is not read.
    """
    before = sites.willing.get(site, False)
    problem = sites.note(site, reply)
    if agreement.amplified:
        # Who may be drawn follows from what everyone was asked, never from the draw.
        sites.willing[site] = before
    numbers = agreement.layout.size
    terms = agreement.terms
    layout = agreement.layout
    for stage in agreement.strategy.stages:  # a vote rides with the row
        numbers = max(numbers, math.ceil(stage.upload_size(numbers, terms, layout)))
    if round_ < 0:  # whose numbers may have eight bytes
        numbers = 2 * agreement.terms.releases[round_][1]
    size = len(reply.message.payload)
    largest = FRAME_BYTES + 4 * numbers
    if not problem and size > largest:
        problem = f"sent {size} bytes, at most {largest} were agreed"
    head = reply.message.header.get("head")
    if not problem and isinstance(head, str):
        sites.signer.sign(sites.run, site, round_, head)
    return Uplink(client=site, payload=None if problem else reply.message.payload, reason=problem)
