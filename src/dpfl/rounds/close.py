"""Close a round: the server takes what arrived, makes the next model, and writes down what
happened.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from dpfl.core.checks import check
from dpfl.core.errors import PeerError
from dpfl.core.types import Cohort, Rows, State, Total, Who
from dpfl.engine.process import one_thread
from dpfl.plugs.channels import Summed, summed
from dpfl.rounds.aggregate import aggregate
from dpfl.rounds.client import staged
from dpfl.rounds.codec import FRAME_BYTES, decode_upload
from dpfl.rounds.enrol import Agreement, Run
from dpfl.rounds.exchange import Plan, Uplink
from dpfl.rounds.open import shared_with
from dpfl.rounds.record import RoundRecord
from dpfl.rounds.release import combined, combined_sum
from dpfl.rounds.sums import SumOfUploads


@one_thread()  # the same bits on every machine, and no fight over cores
def close_round(
    agreement: Agreement,
    state: State,
    plan: Plan,
    uplinks: Sequence[Uplink],
    run: Run,
    *,
    total: SumOfUploads | None = None,
) -> tuple[State, RoundRecord]:
    """Take what arrived, make the next model, and write down what happened.

    ``plan`` is what :func:`open_round` decided, ``uplinks`` what came back, in any order; a
    client of the cohort without one counts as silent. Returned are the state to go on with and
    the operator's record, which names clients and must not reach an adversary against whom
    sampling amplifies.

    ``total`` is what a deployed secure sum has left: the sum of the integers of some clients. No
    upload is decoded then; uplinks say why clients are missing, and how many bytes have come.

    Uploads that are not as agreed, and those that are not finite, count as missing or as zero; the
    operator's record names them, nothing that is published does. Where too few arrived to carry the
    noise that was charged, the model stays as it was.
    """
    if not plan.cohort.ids:  # a server that comes back finds no download that says what was shared
        plan = replace(plan, shared=shared_with(agreement, state, run, plan.cohort))
    arrival = _Arrival(agreement, plan, run, dict.fromkeys(plan.cohort.ids, "no answer"))
    arrival.take(uplinks, total)
    sent = [len(uplink.payload) for uplink in uplinks if uplink.payload is not None]
    record = RoundRecord(
        round=state.round,
        cohort=plan.cohort.ids,
        left=plan.unwilling,
        bytes_up=sum(sent),
        payload_bytes_up=sum(sent) - FRAME_BYTES * len(sent),
        bytes_down=sum(map(len, plan.downloads.values())),
    )
    if state.round < 0 and agreement.strategy.secure:
        arrived = arrival.added_up(state)
        state, metrics = combined_sum(agreement, state, plan.cohort, arrived)
        slot, ids = f"release{record.round - agreement.first_round}", arrived.ids
        return state, arrival.told(
            replace(record, metrics={slot: metrics}, published=bool(ids)), ids
        )
    if state.round < 0:
        finite = {c: m for c, m in arrival.messages.items() if c not in arrival.not_finite}
        state, metrics = combined(agreement, state, plan.cohort, finite)
        slot = f"release{record.round - agreement.first_round}"
        record = replace(record, metrics={slot: metrics}, published=bool(finite))
        return state, arrival.told(record, tuple(sorted(arrival.messages)))
    ids, received = arrival.received(state)
    record, on_air = arrival.told(record, ids), plan.shared.get("channel")
    if on_air:
        record = replace(record, metrics={"channel": agreement.strategy.channel.metrics(on_air)})
    needed = agreement.strategy.shares_needed(agreement.terms, len(plan.cohort))
    enough = len(plan.cohort) - len(arrival.without_noise(ids)) >= needed
    something = bool(ids) or agreement.strategy.central_noise is not None
    if agreement.amplified or (enough and something):
        return aggregate(agreement, state, received, run, record, plan.shared)
    return replace(state, round=state.round + 1, starts={}), replace(record, published=False)


@dataclass
class _Arrival:
    """What came of a round: why clients are missing, messages by client, and whose were not
    finite.
    """

    agreement: Agreement
    plan: Plan
    run: Run
    missing: dict[str, str]
    messages: dict[str, Tensor] = field(default_factory=dict)
    not_finite: list[str] = field(default_factory=list)
    total: Summed | None = None
    lost: str = "lost on the way"

    def take(self, uplinks: Sequence[Uplink], total: SumOfUploads | None) -> None:
        """Decode each upload once; whatever is not as agreed counts as missing, and says why."""
        for uplink in uplinks:
            client, remedy = uplink.client, "send each upload once, to its own round"
            where, problem = f"upload of '{client}'", "was not asked for, or came twice"
            check(client in self.missing, where, problem, remedy, PeerError)
            if uplink.payload is None or total is not None:
                self.missing[client] = uplink.reason or self.missing[client]
                continue
            try:
                self.messages[client] = self._decoded(client, uplink.payload)
                del self.missing[client]
            except PeerError as error:
                self.missing[client] = str(error)
        strategy = self.agreement.strategy
        rows = strategy.channel.sees_rows and not strategy.sums_only
        for client, message in self.messages.items() if self.plan.round < 0 or not rows else ():
            if not bool(torch.isfinite(message).all()):  # nobody could take it out of a sum again
                self.messages[client] = torch.zeros_like(message)
                self.not_finite.append(client)
        if total is not None:
            self._take_total(total)

    def _take_total(self, total: SumOfUploads) -> None:
        """Take a sum that was added up elsewhere, in place of single uploads."""
        plan, drawn = self.plan, self.plan.cohort.ids
        planned = self.agreement.sum_plan(plan.round, len(drawn))
        total.check_plan(planned, drawn)
        vector = torch.from_numpy(total.integers.astype(np.float64)).mul_(planned.step)
        self.total = Summed(vector=vector, ids=tuple(sorted(total.ids)))
        for client in total.ids:
            del self.missing[client]

    def _decoded(self, client: str, payload: bytes) -> Tensor:
        """Read an upload; refuse one that the stages' server halves cannot turn into an update."""
        strategy, plan, size = self.agreement.strategy, self.plan, self.agreement.layout.size
        length = None if strategy.stages else size
        grid = self.agreement.upload_grid(plan.round, max(1, len(plan.cohort)))
        if plan.round < 0:
            length = self.agreement.terms.releases[plan.round][1]
        message = decode_upload(payload, length, self.run.name, plan.round, client, grid)
        if length is None and strategy.channel.sees_rows:
            undone = -1
            with suppress(RuntimeError, IndexError):
                undone = len(self._undo(message, self._who(client)))
            problem = f"{len(message)} numbers are not what was agreed"
            check(undone == size, f"upload of '{client}'", problem, "send those", PeerError)
        return message

    def told(self, record: RoundRecord, ids: tuple[str, ...]) -> RoundRecord:
        """The record with who arrived, who is missing and whose uploads were not finite."""
        lost = {client: self.lost for client in self.messages if client not in ids}
        missing, broken = {**self.missing, **lost}, tuple(sorted(self.not_finite))
        return replace(record, arrived=ids, missing=missing, not_finite=broken)

    def without_noise(self, ids: Sequence[str]) -> list[str]:
        """Drawn clients whose noise is not in what was delivered: an upload that was replaced by
        zero carries none either.
        """
        return sorted((set(self.plan.cohort.ids) - set(ids)) | set(self.not_finite))

    # -- the channel, and the stages undone --------------------------------------------------------

    def received(self, state: State) -> tuple[tuple[str, ...], Rows | Total]:
        """Deliver; returns who arrived, and rows with the stages undone, or their sum, whose
        stages are undone once it carries all of its noise.
        """
        strategy, arrived = self.agreement.strategy, self._delivered(state)
        if strategy.sums_only and not isinstance(arrived, Summed):
            # What is published depends on the sum alone: it is added up exactly. The sum of no
            # messages is as long as one would have been.
            arrived = summed(arrived) if arrived else Summed(vector=self._zero_updates()[0], ids=())
        if not isinstance(arrived, Summed):
            return tuple(sorted(arrived)), self._rows(arrived, state)
        if self.agreement.amplified:
            absent = self.without_noise(arrived.ids)
            stand_ins = self._zero_updates(absent) if absent else []
            vector = sum(stand_ins, torch.zeros_like(arrived.vector))
            arrived = replace(arrived, vector=arrived.vector + vector)
        vector = self._on_grid(arrived.vector)
        cohort, layout = self._cohort(arrived.ids), self.agreement.layout
        return arrived.ids, Total(vector=vector, cohort=cohort, layout=layout)

    def added_up(self, state: State) -> Summed:
        """The sum of the answers to a release; of nobody's where too few came."""
        arrived = self._delivered(state)
        if not isinstance(arrived, Summed):
            return Summed(vector=torch.zeros(0), ids=())
        return replace(arrived, vector=self._on_grid(arrived.vector))

    def _on_grid(self, total: Tensor) -> Tensor:
        """A sum of multiples of one step is one: put right what double precision has lost."""
        grid = self.agreement.upload_grid(self.plan.round, max(1, len(self.plan.cohort)))
        return total if grid is None else grid.integers(total).mul_(grid.step)

    def _delivered(self, state: State) -> Mapping[str, Tensor] | Summed:
        """What the channel delivers: nothing where too few uploads came for a secure sum."""
        if self.total is not None:
            return self.total
        channel, messages = self.agreement.strategy.channel, self.messages
        least = channel.least(len(self.plan.cohort))
        if len(messages) < least:
            few = f"{len(messages)} of {len(self.plan.cohort)} uploads came"
            self.lost = f"never unmasked: {few}, and the secure sum needs {least}"
            return {}
        seed = self.run.public.child("round", state.round, "channel")
        on_air, noise = self.plan.shared.get("channel", {}), self.run.secret("channel", state.round)
        return channel.deliver(messages, on_air, seed, noise) if messages else {}

    def _who(self, client: str) -> Who:
        cohort = self.plan.cohort
        return self.agreement.who(client, cohort.claims[client], len(cohort))

    def _cohort(self, ids: Sequence[str]) -> Cohort:
        return Cohort.of({client: self.plan.cohort.claims[client] for client in ids})

    def _undo(self, message: Tensor, who: Who) -> Tensor:
        for number, stage in reversed(list(enumerate(self.agreement.strategy.stages))):
            message = stage.server(message, self.plan.shared.get(f"stage{number}", {}), who)
        return message

    def _rows(self, arrived: Mapping[str, Tensor], state: State) -> Rows:
        """Every row re-based on the global model, wherever its client started; one that is not
        finite contributes zero.
        """
        cohort, layout = self._cohort(sorted(arrived)), self.agreement.layout
        matrix = torch.zeros(len(cohort), layout.size)
        for i, client in enumerate(cohort.ids):
            matrix[i] = self._undo(arrived[client], self._who(client))
            if client in self.plan.starts:
                matrix[i] += self.plan.starts[client] - state.model
            if not bool(torch.isfinite(matrix[i]).all()):
                matrix[i] = 0.0
                self.not_finite.append(client)
        return Rows(matrix=matrix, origin=state.model, cohort=cohort, layout=layout)

    def _zero_updates(self, absent: Sequence[str] = ()) -> list[Tensor]:
        """What drawn clients that sent nothing would have sent had their updates been zero: their
        noise alone; without clients, one message without noise.

        Where the secrecy of the draw is counted on, a round that is not published, or that carries
        less noise, would tell that one of them was drawn, and a round that is published that none
        was. With stand-ins a client that says it is willing and then fails is a client whose update
        is zero, and the charge for the draw holds as it stands.
        """
        zeros = [torch.zeros(self.agreement.layout.size)] * max(1, len(absent))
        who = [self._who(client) for client in absent]
        rngs = {c: self.run.secret("stand-in", self.plan.round, c) for c in absent}
        sent = staged(self.agreement.strategy, zeros, self.plan.shared, who, rngs)
        return [message.to(torch.float64) for message in sent]
