"""Only the sum of the uploads reaches the server."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Shared
from dpfl.plugs.channels import Channel, Summed, summed
from dpfl.privacy.exposure import Exposure


@dataclass(frozen=True, kw_only=True)
class SecureSum(Channel):
    """Only the sum arrives. Simulated: the cryptography that would make it true is not here, so
    deployment refuses it.
    """

    sees_rows: ClassVar[bool] = False
    simulated: ClassVar[bool] = True

    def deliver(
        self, messages: Mapping[str, Tensor], shared: Shared, seed: PublicSeed, rng: SecretRng
    ) -> dict[str, Tensor] | Summed:
        """Deliver the sum, added up in double precision and in canonical order."""
        return summed(messages)

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """The server sees one's own contribution under one's own noise; other shares are not
        counted on here.
        """
        return exposure
