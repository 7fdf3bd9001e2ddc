"""Close a round: the server takes what arrived, makes the next model, and writes down what
happened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
from dpfl.rounds.enrol import Agreement, Plan, Run, Uplink
from dpfl.rounds.record import RoundRecord
from dpfl.rounds.release import combined


@one_thread()  # the same bits on every machine, and no fight over cores
def close_round(
    agreement: Agreement, state: State, plan: Plan, uplinks: Sequence[Uplink], run: Run
) -> tuple[State, RoundRecord]:
    """Take what arrived, make the next model, and write down what happened.

    ``plan`` is what :func:`open_round` decided, ``uplinks`` what came back, in any order; a
    client of the cohort without one counts as silent. Returned are the state to go on with and
    the operator's record, which names clients and must not reach an adversary against whom
    sampling amplifies.

    Uploads that are not as agreed, and those that are not finite, count as missing or as zero; the
    operator's record names them, nothing that is published does. Where too few arrived to carry the
    noise that was charged, the model stays as it was.
    """
    sent = [uplink.payload for uplink in uplinks if uplink.payload is not None]
    arrival = _Arrival.of(agreement, plan, uplinks, run)
    record = RoundRecord(
        round=state.round,
        cohort=plan.cohort.ids,
        left=plan.unwilling,
        bytes_up=sum(map(len, sent)),
        payload_bytes_up=sum(map(len, sent)) - FRAME_BYTES * len(sent),
        bytes_down=sum(map(len, plan.downloads.values())),
    )
    if state.round < 0:
        state, metrics = combined(agreement, state, plan.cohort, arrival.finite)
        slot = f"release{record.round - agreement.first_round}"
        record = replace(record, metrics={slot: metrics}, published=bool(arrival.finite))
        return state, arrival.told(record, tuple(sorted(arrival.messages)))
    ids, received = arrival.received(state)
    on_air = dict(plan.shared.get("channel", {}))
    if on_air:
        record = replace(record, metrics={"channel": agreement.strategy.channel.metrics(on_air)})
    record = arrival.told(record, ids)
    needed = agreement.strategy.shares_needed(agreement.terms, len(plan.cohort))
    enough = len(plan.cohort) - len(arrival.without_noise(ids)) >= needed
    something = bool(ids) or agreement.strategy.central_noise is not None
    if agreement.amplified or (enough and something):
        return aggregate(agreement, state, received, run, record)
    return replace(state, round=state.round + 1, starts={}), replace(record, published=False)


@dataclass(frozen=True, kw_only=True)
class _Arrival:
    """What came of a round: messages by client, why others are missing, and whose were not
    finite.
    """

    agreement: Agreement
    plan: Plan
    run: Run
    messages: dict[str, Tensor]
    missing: dict[str, str]
    not_finite: list[str]

    @classmethod
    def of(cls, agreement: Agreement, plan: Plan, uplinks: Sequence[Uplink], run: Run) -> _Arrival:
        """Decode each upload once; whatever is not as agreed counts as missing, and says why."""
        found = cls(
            agreement=agreement,
            plan=plan,
            run=run,
            messages={},
            missing=dict.fromkeys(plan.cohort.ids, "no answer"),
            not_finite=[],
        )
        for uplink in uplinks:
            expected = uplink.client in found.missing and uplink.client not in found.messages
            where, problem = f"upload of '{uplink.client}'", "was not asked for, or came twice"
            check(expected, where, problem, "send each upload once, to its own round", PeerError)
            found._take(uplink)
        rows = agreement.strategy.channel.sees_rows and not agreement.strategy.sums_only
        for client, message in found.messages.items() if plan.round < 0 or not rows else ():
            if not bool(torch.isfinite(message).all()):  # nobody could take it out of a sum again
                found.messages[client] = torch.zeros_like(message)
                found.not_finite.append(client)
        return found

    def _take(self, uplink: Uplink) -> None:
        strategy, plan, client = self.agreement.strategy, self.plan, uplink.client
        if uplink.payload is None:
            self.missing[client] = uplink.reason
            return
        length = None if strategy.stages else self.agreement.layout.size
        grid = strategy.upload_grid(max(1, len(plan.cohort)))
        if plan.round < 0:
            release = self.agreement.release(plan.round)
            length, grid = release.numbers(self.agreement.buffer_shapes[release.into]), None
        try:
            name, round_ = self.run.name, plan.round
            message = decode_upload(uplink.payload, length, name, round_, client, grid)
            if length is None and strategy.channel.sees_rows:
                self._check_undone(client, message)
        except PeerError as error:
            self.missing[client] = str(error)
            return
        self.messages[client] = message
        del self.missing[client]

    def told(self, record: RoundRecord, ids: tuple[str, ...]) -> RoundRecord:
        """The record with who arrived, who is missing and whose uploads were not finite."""
        lost = {client: "lost on the way" for client in self.messages if client not in ids}
        missing, broken = {**self.missing, **lost}, tuple(sorted(self.not_finite))
        return replace(record, arrived=ids, missing=missing, not_finite=broken)

    @property
    def finite(self) -> dict[str, Tensor]:
        """The messages that are finite."""
        return {c: message for c, message in self.messages.items() if c not in self.not_finite}

    def without_noise(self, ids: Sequence[str]) -> list[str]:
        """Drawn clients whose noise is not in what was delivered: an upload that was replaced by
        zero carries none either.
        """
        return sorted((set(self.plan.cohort.ids) - set(ids)) | set(self.not_finite))

    # -- the channel, and the stages undone --------------------------------------------------------

    def received(self, state: State) -> tuple[tuple[str, ...], Rows | Total]:
        """Deliver, undo the stages; returns who arrived, and rows or their sum."""
        strategy, plan = self.agreement.strategy, self.plan
        seed = self.run.public.child("round", state.round, "channel")
        on_air, noise = (
            dict(plan.shared.get("channel", {})),
            self.run.secret("channel", state.round),
        )
        messages = self.messages
        arrived = strategy.channel.deliver(messages, on_air, seed, noise) if messages else {}
        if strategy.sums_only and isinstance(arrived, dict):
            # What is published depends on the sum alone: it is added up exactly.
            arrived = summed(arrived) if arrived else Summed(vector=self._nothing(), ids=())
        if isinstance(arrived, Summed):
            if self.agreement.amplified:
                absent = self.without_noise(arrived.ids)
                vector = sum(self._stand_ins(absent), torch.zeros_like(arrived.vector))
                arrived = replace(arrived, vector=arrived.vector + vector)
            return arrived.ids, self._total(arrived)
        return tuple(sorted(arrived)), self._rows(arrived, state)

    def _who(self, client: str) -> Who:
        cohort, public = self.plan.cohort, client in self.agreement.terms.public
        return Who(id=client, claims=cohort.claims[client], drawn=len(cohort), public=public)

    def _cohort(self, ids: Sequence[str]) -> Cohort:
        return Cohort.of({client: self.plan.cohort.claims[client] for client in ids})

    def _undo(self, message: Tensor, who: Who | None) -> Tensor:
        for number, stage in reversed(list(enumerate(self.agreement.strategy.stages))):
            message = stage.server(message, dict(self.plan.shared.get(f"stage{number}", {})), who)
        return message

    def _check_undone(self, client: str, message: Tensor) -> None:
        """Refuse a message that the stages' server halves cannot turn back into an update."""
        try:
            length = len(self._undo(message, self._who(client)))
        except (RuntimeError, IndexError):
            length = -1
        where, problem = f"upload of '{client}'", f"{len(message)} numbers are not what was agreed"
        check(length == self.agreement.layout.size, where, problem, "send those", PeerError)

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

    def _total(self, arrived: Summed) -> Total:
        grid = self.agreement.strategy.upload_grid(max(1, len(self.plan.cohort)))
        # A sum of multiples of one step is one: what double precision lost on the way is put right.
        vector = arrived.vector if grid is None else grid.integers(arrived.vector).mul_(grid.step)
        cohort, layout = self._cohort(arrived.ids), self.agreement.layout
        return Total(vector=self._undo(vector, None), cohort=cohort, layout=layout)

    def _stand_ins(self, absent: Sequence[str]) -> list[Tensor]:
        """What drawn clients that sent nothing would have sent had their updates been zero: their
        noise alone.

        Where the secrecy of the draw is counted on, a round that is not published, or that carries
        less noise, would tell that one of them was drawn, and a round that is published that none
        was. With stand-ins a client that says it is willing and then fails is a client whose update
        is zero, and the charge for the draw holds as it stands.
        """
        if not absent:
            return []
        who = [self._who(client) for client in absent]
        rngs = {c: self.run.secret("stand-in", self.plan.round, c) for c in absent}
        zeros = [torch.zeros(self.agreement.layout.size)] * len(absent)
        noise = staged(self.agreement.strategy, zeros, self.plan.shared, who, rngs)
        return [message.to(torch.float64) for message in noise]

    def _nothing(self) -> Tensor:
        """The sum of no messages: as long as a client's would have been."""
        rows = torch.zeros(1, self.agreement.layout.size)
        for number, stage in enumerate(self.agreement.strategy.stages):
            if stage.acts_on_rows:
                rows = stage.client_rows(rows, dict(self.plan.shared.get(f"stage{number}", {})))
        return rows[0].to(torch.float64)
