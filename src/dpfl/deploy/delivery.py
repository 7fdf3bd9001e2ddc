"""The end of a study: every member gets the model, and the operator gets the summary.

Delivering the model releases nothing that the world has not been charged for. A site that cannot be
reached is named in the summary, and gets the model by other means.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dpfl.deploy.connections import Connections
from dpfl.deploy.requests import Delivery
from dpfl.deploy.summary import DeploymentSummary, measured_values
from dpfl.engine.stacked import assumptions_of
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.statement import statements
from dpfl.rounds import Agreement
from dpfl.rounds.record import RoundRecord
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
