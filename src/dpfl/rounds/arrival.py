"""What came of a round: decoded uploads, what the channel delivers, and the stages undone."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from dpfl.core.checks import check
from dpfl.core.errors import PeerError
from dpfl.core.types import Cohort, Rows, State, Total, Who
from dpfl.numerics.clipping import all_finite
from dpfl.plugs.channels import Summed, summed
from dpfl.rounds.client import staged
from dpfl.rounds.codec import decode_upload
from dpfl.rounds.enrol import Agreement, Run
from dpfl.rounds.exchange import Plan, Uplink
from dpfl.rounds.record import RoundRecord
from dpfl.rounds.sums import SumOfUploads


@dataclass
class Arrival:
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

    @classmethod
    def of(
        cls,
        agreement: Agreement,
        plan: Plan,
        uplinks: Sequence[Uplink],
        run: Run,
        total: SumOfUploads | None = None,
    ) -> Self:
        """Take what came back, with the arguments of :func:`~dpfl.rounds.close_round`."""
        arrival = cls(agreement, plan, run, dict.fromkeys(plan.cohort.ids, "no answer"))
        arrival._take(uplinks, total)
        return arrival

    def _take(self, uplinks: Sequence[Uplink], total: SumOfUploads | None) -> None:
        """Decode each upload once; whatever is not as agreed counts as missing, and says why."""
        for uplink in uplinks:
            client = uplink.client
            check(
                client in self.missing,
                f"upload of '{client}'",
                "was not asked for, or came twice",
                "send each upload once, to its own round",
                PeerError,
            )
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
            if not all_finite(message):  # nobody could take it out of a sum again
                self.messages[client] = torch.zeros_like(message)
                self.not_finite.append(client)
        if total is not None:
            self._take_total(total)

    def _take_total(self, total: SumOfUploads) -> None:
        """Take a sum that was added up elsewhere, in place of single uploads."""
        plan = self.plan
        drawn = self.plan.cohort.ids
        planned = self.agreement.sum_plan(plan.round, len(drawn))
        total.check_plan(planned, drawn)
        vector = torch.from_numpy(total.integers.astype(np.float64)).mul_(planned.step)
        self.total = Summed(vector=vector, ids=tuple(sorted(total.ids)))
        for client in total.ids:
            del self.missing[client]

    def _decoded(self, client: str, payload: bytes) -> Tensor:
        """Read an upload; refuse one that the stages' server halves cannot turn into an update."""
        strategy = self.agreement.strategy
        plan = self.plan
        size = self.agreement.layout.size
        length = None if strategy.stages else size
        grid = self.agreement.upload_grid(plan.round, max(1, len(plan.cohort)))
        if plan.round < 0:
            length = self.agreement.terms.releases[plan.round][1]
        message = decode_upload(payload, length, self.run.name, plan.round, client, grid)
        if length is None and strategy.channel.sees_rows:
            undone = -1
            with suppress(RuntimeError, IndexError):
                undone = len(self._undo(message, self._who(client)))
            check(
                undone == size,
                f"upload of '{client}'",
                f"{len(message)} numbers are not what was agreed",
                "send those",
                PeerError,
            )
        return message

    def told(self, record: RoundRecord, ids: tuple[str, ...]) -> RoundRecord:
        """The record with who arrived, who is missing and whose uploads were not finite."""
        lost = {client: self.lost for client in self.messages if client not in ids}
        missing = {**self.missing, **lost}
        broken = tuple(sorted(self.not_finite))
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
        strategy = self.agreement.strategy
        arrived = self._delivered(state)
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
        cohort = self._cohort(arrived.ids)
        layout = self.agreement.layout
        return arrived.ids, Total(vector=vector, cohort=cohort, layout=layout)

    def seen(self, state: State) -> Rows | Total:
        """What the server sees of a round, before it cleans, weighs or denoises anything: every row
        where the channel delivers rows, or else their sum, with the stages undone in both.

        A channel that adds noise draws it again: the same noise where the run is seeded.
        """
        arrived = self._delivered(state)
        if not isinstance(arrived, Summed):
            return self._rows(arrived, state)
        vector = self._undo(self._on_grid(arrived.vector), None)
        return Total(vector=vector, cohort=self._cohort(arrived.ids), layout=self.agreement.layout)

    def added_up(self, state: State) -> Summed:
        """The sum of the answers to a release; of nobody's where too few came."""
        arrived = self._delivered(state)
        if not isinstance(arrived, Summed):
            return Summed(vector=torch.zeros(0), ids=())
        return replace(arrived, vector=self._on_grid(arrived.vector))

    def released(self, state: State) -> Mapping[str, Tensor] | Tensor:
        """What the server sees of a release: every client's answer, or the sum of all."""
        return self.added_up(state).vector if self.agreement.strategy.secure else self.messages

    def _on_grid(self, total: Tensor) -> Tensor:
        """A sum of multiples of one step is one: put right what double precision has lost."""
        grid = self.agreement.upload_grid(self.plan.round, max(1, len(self.plan.cohort)))
        return total if grid is None else grid.integers(total).mul_(grid.step)

    def _delivered(self, state: State) -> Mapping[str, Tensor] | Summed:
        """What the channel delivers: nothing where too few uploads came for a secure sum."""
        if self.total is not None:
            return self.total
        channel = self.agreement.strategy.channel
        messages = self.messages
        least = channel.least(len(self.plan.cohort))
        if len(messages) < least:
            few = f"{len(messages)} of {len(self.plan.cohort)} uploads came"
            self.lost = f"never unmasked: {few}, and the secure sum needs {least}"
            return {}
        seed = self.run.public.child("round", state.round, "channel")
        on_air = self.plan.shared.get("channel", {})
        noise = self.run.secret("channel", state.round)
        return channel.deliver(messages, on_air, seed, noise) if messages else {}

    def _who(self, client: str) -> Who:
        cohort = self.plan.cohort
        return self.agreement.who(client, cohort.claims[client], len(cohort))

    def _cohort(self, ids: Sequence[str]) -> Cohort:
        return Cohort.of({client: self.plan.cohort.claims[client] for client in ids})

    def _undo(self, message: Tensor, who: Who | None) -> Tensor:
        for number, stage in reversed(list(enumerate(self.agreement.strategy.stages))):
            message = stage.server(message, self.plan.shared.get(f"stage{number}", {}), who)
        return message

    def _rows(self, arrived: Mapping[str, Tensor], state: State) -> Rows:
        """Every row re-based on the global model, wherever its client started; one that is not
        finite contributes zero.
        """
        cohort = self._cohort(sorted(arrived))
        layout = self.agreement.layout
        matrix = torch.zeros(len(cohort), layout.size)
        for i, client in enumerate(cohort.ids):
            matrix[i] = self._undo(arrived[client], self._who(client))
            if client in self.plan.starts:
                matrix[i] += self.plan.starts[client] - state.model
            if not all_finite(matrix[i]):
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
