"""How uploads reach the server: one by one, as a sum only, or with some lost on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from dpfl.core.errors import ConfigurationError
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import (
    Claims,
    Cohort,
    Metrics,
    PlugState,
    Shared,
    Terms,
    Who,
)
from dpfl.plugs.base import Plug
from dpfl.privacy.exposure import Exposure


@dataclass(frozen=True, kw_only=True)
class Summed:
    """What a summing channel hands over: the sum, and whose messages are in it."""

    vector: Tensor
    ids: tuple[str, ...]


class Channel(Plug):
    """How messages reach the server.

    Laws: with ``sees_rows`` every row arrives as it was sent; otherwise only the sum does, and it
    equals the sum of what was sent. ``simulated`` channels cannot exist outside a simulation and
    refuse deployment.
    """

    sees_rows: ClassVar[bool]
    simulated: ClassVar[bool]

    @property
    def shares_noise(self) -> bool:
        """Whether the noise that protects a message is made of what all clients add on the way."""
        return False

    def reachable(self, client: str, round_: int, seed: PublicSeed) -> bool:
        """Whether a client can be heard in this round at all; it is not drawn otherwise."""
        return True

    def send(self, message: Tensor, shared: Shared, who: Who, rng: SecretRng) -> Tensor:
        """The client's half: what leaves its antenna."""
        return message

    def deliver(
        self, messages: Mapping[str, Tensor], shared: Shared, seed: PublicSeed, rng: SecretRng
    ) -> dict[str, Tensor] | Summed:
        """Return each arrived message by client, or their sum. ``seed`` draws what may be known,
        ``rng`` the noise.
        """
        raise NotImplementedError

    def metrics(self, shared: Shared) -> Metrics:
        """What a person would ask about this round's channel."""
        return {}

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """What the server sees of one message."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Digital(Channel):
    """Every message arrives as it was sent, and the server sees it."""

    sees_rows: ClassVar[bool] = True
    simulated: ClassVar[bool] = False

    def deliver(
        self, messages: Mapping[str, Tensor], shared: Shared, seed: PublicSeed, rng: SecretRng
    ) -> dict[str, Tensor] | Summed:
        """Deliver each message."""
        return dict(messages)

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """The server sees the message itself."""
        return exposure


def summed(messages: Mapping[str, Tensor]) -> Summed:
    """Add messages up in double precision, in canonical order."""
    ids = tuple(sorted(messages))
    total = torch.zeros_like(messages[ids[0]], dtype=torch.float64)
    for client in ids:
        total += messages[client]
    return Summed(vector=total, ids=ids)


@dataclass(frozen=True, kw_only=True)
class Dropout(Channel):
    """Loses each message with probability ``rate``: for studying what a method does without some of
    its cohort.
    """

    rate: float
    through: Channel
    simulated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ConfigurationError(
                "dropout", f"rate = {self.rate}", "give a probability between 0 and 1"
            )

    @property
    def sees_rows(self) -> bool:  # type: ignore[override]
        """As the channel underneath."""
        return self.through.sees_rows

    @property
    def shares_noise(self) -> bool:
        """As the channel underneath."""
        return self.through.shares_noise

    @property
    def tolerated_dropouts(self) -> int:
        """As the channel underneath."""
        return int(getattr(self.through, "tolerated_dropouts", 0))

    @property
    def noise_multiplier(self) -> float | None:
        """As the channel underneath."""
        return getattr(self.through, "noise_multiplier", None)

    @property
    def makes_noise(self) -> bool:
        """As the channel underneath."""
        return bool(getattr(self.through, "makes_noise", False))

    def agree(self, terms: Terms, claims: Mapping[str, Claims]) -> Terms:
        """As the channel underneath."""
        return self.through.agree(terms, claims)

    def resolve(self, terms: Terms) -> Self:
        """As the channel underneath."""
        return replace(self, through=self.through.resolve(terms))

    def start(self, terms: Terms, layout: Layout) -> PlugState:
        """As the channel underneath."""
        return self.through.start(terms, layout)

    def open(self, state: PlugState, round_: int, cohort: Cohort, seed: PublicSeed) -> Shared:
        """As the channel underneath."""
        return self.through.open(state, round_, cohort, seed)

    def reachable(self, client: str, round_: int, seed: PublicSeed) -> bool:
        """As the channel underneath."""
        return self.through.reachable(client, round_, seed)

    def send(self, message: Tensor, shared: Shared, who: Who, rng: SecretRng) -> Tensor:
        """As the channel underneath."""
        return self.through.send(message, shared, who, rng)

    def metrics(self, shared: Shared) -> Metrics:
        """As the channel underneath."""
        return self.through.metrics(shared)

    def deliver(
        self, messages: Mapping[str, Tensor], shared: Shared, seed: PublicSeed, rng: SecretRng
    ) -> dict[str, Tensor] | Summed:
        """Deliver what is not lost."""
        lost = torch.rand(len(messages), generator=seed.child("dropout").generator()) < self.rate
        kept = {
            client: messages[client]
            for client, gone in zip(sorted(messages), lost.tolist(), strict=True)
            if not gone
        }
        if not kept and not self.sees_rows:
            return Summed(vector=torch.zeros_like(next(iter(messages.values()))), ids=())
        return self.through.deliver(kept, shared, seed, rng)

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """As the channel underneath: who is lost depends on nothing private."""
        return self.through.exposure(exposure, drawn)
