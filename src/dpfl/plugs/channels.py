"""How uploads reach the server."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Metrics, Shared, Terms, Who
from dpfl.plugs.base import Plug
from dpfl.privacy.exposure import Exposure
from dpfl.secure_sum.session import Group


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
    tolerated_dropouts: int = 0
    colluders: int = 0

    @property
    def shares_noise(self) -> bool:
        """Whether the noise that protects a message is made of what all clients add on the way."""
        return False

    def group(self, drawn: int) -> Group | None:
        """The group that adds up ``drawn`` clients' uploads; None where it is no secure sum."""
        return None

    def noise_share(self, std: float, drawn: int) -> float:
        """The noise that one of ``drawn`` clients adds where this much must protect everyone: all
        of it, unless it is added up on the way.
        """
        return std

    def shared_exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """What is seen of a release whose noise ``drawn`` clients share by ``noise_share``.

        Its rounding is that of the whole noise: no share lies on a coarser grid.
        """
        return exposure

    def least(self, drawn: int) -> int:
        """How many uploads must arrive before anything is delivered."""
        return 0

    def reachable(self, client: str, round_: int, seed: PublicSeed) -> bool:
        """Whether a client can be heard in this round at all; it is not drawn otherwise."""
        return True

    def send(self, message: Tensor, shared: Shared, who: Who, rng: SecretRng) -> Tensor:
        """Return what leaves the client."""
        return message

    def deliver(
        self, messages: Mapping[str, Tensor], shared: Shared, seed: PublicSeed, rng: SecretRng
    ) -> dict[str, Tensor] | Summed:
        """Return each arrived message by client, or their sum.

        ``seed`` draws what may be known, ``rng`` the noise.
        """
        return dict(messages) if self.sees_rows else summed(messages)

    def metrics(self, shared: Shared) -> Metrics:
        """Return metrics of this round's channel for the operator."""
        return {}

    def losses_by_assumption(
        self, ids: tuple[str, ...], terms: Terms, layout: Layout, seed: PublicSeed
    ) -> dict[str, list[float]]:
        """Each client's sum of 1 / z^2 over all rounds, by whose noise is counted on; empty
        where the channel makes no noise.
        """
        return {}

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """What the server sees of one message: all of it, or one's own contribution to a sum under
        one's own noise alone.
        """
        raise NotImplementedError


class Digital(Channel):
    """Every message arrives as it was sent, and the server sees it."""

    sees_rows: ClassVar[bool] = True
    simulated: ClassVar[bool] = False

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """Return the exposure as it is: nothing is added or taken away."""
        return exposure


def summed(messages: Mapping[str, Tensor]) -> Summed:
    """Add messages up in double precision, in canonical order."""
    ids = tuple(sorted(messages))
    total = torch.zeros_like(messages[ids[0]], dtype=torch.float64)
    for client in ids:
        total += messages[client]
    return Summed(vector=total, ids=ids)
