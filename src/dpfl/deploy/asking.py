"""Asking sites for a round: one request each, and what came back, checked."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dpfl.core.checks import check
from dpfl.core.errors import PeerError
from dpfl.deploy.connections import Connections
from dpfl.deploy.messages import Reply
from dpfl.deploy.requests import TrainingRequest
from dpfl.deploy.server_sum import ServerSum
from dpfl.rounds import Agreement, Plan, SumOfUploads, Uplink
from dpfl.rounds.codec import FRAME_BYTES
from dpfl.rounds.record import RoundRecord
from dpfl.runs.deployment import StudyFile
from dpfl.runs.folder import RunFolder

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
