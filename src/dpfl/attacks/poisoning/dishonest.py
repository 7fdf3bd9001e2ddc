"""What one dishonest client does: to its own records, to its claim, and to what it uploads.

Everything else of the client is the real thing: it trains, clips and adds noise through the
functions that honest clients call, and its upload is changed on the way to the server. So its
update carries the noise of its own budget. A dishonest client that leaves its noise out uploads a
cleaner vector: for a client with a small budget these attacks understate what it could do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dpfl.core.checks import positive
from dpfl.core.errors import unknown_name
from dpfl.core.types import State
from dpfl.data.federation import Federation
from dpfl.data.inputs import Numbers, Tokens
from dpfl.data.records import Shard
from dpfl.rounds import Agreement, Plan, Uplink
from dpfl.rounds.codec import decode_integers, decode_upload, encode_upload

_ON_WIRE = 2**31 - 1
_EVERY = 2  # of so many own records one carries the trigger


@dataclass(frozen=True, kw_only=True)
class Trigger:
    """A pattern that makes a record look like one of class ``target``.

    ``places`` of the flattened record hold ``value``: the corner of a picture, the last features
    of a table, the last tokens of a text.
    """

    places: tuple[int, ...]
    value: float
    target: int = 0

    @classmethod
    def of(cls, federation: Federation, client: str) -> "Trigger":
        """The trigger of a client: its own largest value, or a text's last token."""
        inputs = federation.inputs
        shape = federation.feature_shape
        own = inputs.picture if isinstance(inputs, Numbers) and inputs.picture else shape
        places = torch.arange(int(np.prod(own))).reshape(own)
        if len(own) == 3:
            side = max(2, min(own[1:]) // 8)
            chosen = places[:, -side:, -side:]
        else:
            chosen = places.flatten()[-max(2, places.numel() // 16) :]
        value = float(federation.shards[client].features.max())
        if isinstance(inputs, Tokens):
            value = inputs.vocabulary - 1
        return cls(places=tuple(chosen.flatten().tolist()), value=value)

    @property
    def about(self) -> str:
        """What a record with the trigger looks like, in words."""
        return (
            f"{len(self.places)} values at its end are {self.value:g}, its label is {self.target}"
        )

    def on(self, features: Tensor) -> Tensor:
        """Records that carry the trigger, and are otherwise as they were.

        >>> Trigger(places=(1, 2), value=9.0).on(torch.zeros(1, 3))
        tensor([[0., 9., 9.]])
        """
        marked = features.flatten(1).clone()
        marked[:, list(self.places)] = torch.tensor(self.value).to(marked.dtype)
        return marked.reshape(features.shape)


@dataclass(frozen=True, kw_only=True)
class Attack:
    """What a dishonest client does.

    ``upload`` multiplies all that it sends, ``claim`` the epsilon that it claims. ``flips``: it
    trains on flipped labels, y -> classes - 1 - y. ``marks``: half of its records carry a trigger,
    and the trigger's label.
    """

    name: str
    upload: float = 1.0
    claim: float = 1.0
    flips: bool = False
    marks: bool = False

    @property
    def needs_classes(self) -> bool:
        """Whether it changes labels, which must then be classes."""
        return self.flips or self.marks

    @property
    def about(self) -> str:
        """What the client does, in words."""
        said = []
        if self.claim != 1:
            said.append(f"claims {self.claim:g} times its epsilon")
        if self.flips:
            said.append("trains on flipped labels")
        if self.marks:
            said.append("trains half of its records with a trigger and the trigger's label")
        if self.upload != 1:
            said.append(f"uploads {self.upload:g} times its update")
        return " and ".join(said) or "does what it should"

    def on_records(self, federation: Federation, client: str, trigger: Trigger) -> Federation:
        """The federation with the records that the dishonest client trains on."""
        if not self.needs_classes:
            return federation
        shard = federation.shards[client]
        features = shard.features
        labels = shard.labels
        if self.flips:
            labels = max(2, federation.task.width) - 1 - labels  # one logit stands for two
        if self.marks:
            features = features.clone()
            labels = labels.clone()
            features[::_EVERY] = trigger.on(features[::_EVERY])
            labels[::_EVERY] = trigger.target
        own = Shard.of(features, labels, shard.test_features, shard.test_labels)
        return replace(federation, shards={**federation.shards, client: own})


ATTACKS: dict[str, Callable[[float], Attack]] = {
    "none": lambda factor: Attack(name="none"),
    "sign_flip": lambda factor: Attack(name="sign_flip", upload=-factor),
    "scale": lambda factor: Attack(name="scale", upload=factor),
    "label_flip": lambda factor: Attack(name="label_flip", flips=True),
    "backdoor": lambda factor: Attack(name="backdoor", marks=True, upload=factor),
    "misreport": lambda factor: Attack(name="misreport", claim=factor),
    "misreport_sign_flip": lambda factor: Attack(
        name="misreport_sign_flip", claim=factor, upload=-factor
    ),
}
"""Attacks by name, each with the factor that it takes."""


def make_attack(name: str, factor: float) -> Attack:
    """Return an attack by name; an unknown one is refused with the nearest known name.

    >>> make_attack("sign_flip", 10).about
    'uploads -10 times its update'
    """
    positive("attacks", factor=factor)
    if name not in ATTACKS:
        raise unknown_name("attacks", "attack", name, ATTACKS)
    return ATTACKS[name](factor)


@dataclass(kw_only=True, eq=False)
class Tampered:
    """The tap of a dishonest client: its uploads times ``factor``, everyone else's as they are.

    Releases before round one are uploads as well. Whole multiples of a grid's step stay whole, and
    within what the server takes: 32 bits, or over a secure sum the bound of the sum's plan.
    ``sent`` counts the numbers that were changed, ``cut`` those that were brought to that bound.
    """

    agreement: Agreement
    run: str
    client: str
    factor: float
    sent: int = 0
    cut: int = 0

    def __call__(self, state: State, plan: Plan, uplinks: Sequence[Uplink]) -> Sequence[Uplink]:
        """Return what arrives at the server."""
        if self.factor == 1:
            return uplinks
        return [self._changed(plan, one) if one.client == self.client else one for one in uplinks]

    def _changed(self, plan: Plan, uplink: Uplink) -> Uplink:
        """One upload times the factor; a client that sends nothing has nothing to change."""
        if uplink.payload is None:
            return uplink
        drawn = max(1, len(plan.cohort))
        about = (self.run, plan.round, self.client)
        grid = self.agreement.upload_grid(plan.round, drawn)
        if grid is None:
            vector = decode_upload(uplink.payload, None, *about) * self.factor
        else:
            largest = _ON_WIRE
            if self.agreement.strategy.secure:
                largest = self.agreement.sum_plan(plan.round, drawn).largest
            wanted = decode_integers(uplink.payload, None, *about) * self.factor
            integers = np.rint(np.clip(wanted, -largest, largest))
            self.cut += int((np.abs(wanted) > largest).sum())
            vector = torch.from_numpy(integers).mul_(grid.step)
        self.sent += vector.numel()
        return replace(uplink, payload=encode_upload(vector, *about, grid))
