"""The secure sum as a channel: what a server and the members of a sum see of one upload.

The protocol is in :mod:`dpfl.secure_sum`. A simulation adds up the same integers without masks.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from dpfl.core.checks import whole_number
from dpfl.core.grid import Grid
from dpfl.plugs.channels import Channel
from dpfl.privacy.exposure import Exposure
from dpfl.secure_sum.session import COMPLETE, MOST_FAILURE, Group

OUTSIDERS = (
    "who takes part in a round is known to the server and to the members of its sum: the secret "
    "draw of cohorts counts against outsiders only, and for a drawn client that sends nothing the "
    "server adds a share of noise"
)
COMPUTATIONAL = (
    "the secure sum's primitives (X25519, Ed25519, AES, Shamir's secret sharing) are not broken"
)


@dataclass(frozen=True, kw_only=True)
class SecureSum(Channel):
    """Only the sum arrives, of all drawn clients but at most ``tolerated_dropouts``.

    ``colluders``: how many members of a sum may work together with the server. They know their own
    shares of noise, so what counts is the noise of h = drawn - tolerated_dropouts - colluders
    shares: against the server, every member and the world alike.

    >>> SecureSum(tolerated_dropouts=2, colluders=1).group(20).honest
    17
    """

    tolerated_dropouts: int = 0
    colluders: int = 1
    sees_rows: ClassVar[bool] = False
    simulated: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("tolerated_dropouts", "colluders"):
            whole_number("secure sum", name, getattr(self, name), least=0)

    def group(self, drawn: int) -> Group:
        """The group that adds up when so many are drawn; refused where nobody would be hidden."""
        least = drawn - self.tolerated_dropouts
        return Group(members=drawn, least=least, colluders=self.colluders)

    def noise_share(self, std: float, drawn: int) -> float:
        """Return a share for the honest ones of those who are sure to be in the sum."""
        return std / math.sqrt(max(1, drawn - self.tolerated_dropouts - self.colluders))

    def shared_exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """Return the exposure of a share, added up."""
        share = self.noise_share(exposure.noise, drawn)
        return self.exposure(replace(exposure, noise=share), drawn)

    def least(self, drawn: int) -> int:
        """How many uploads a sum needs: with fewer it is never unmasked."""
        return max(1, drawn - self.tolerated_dropouts)

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """A sum with the noise of the honest shares that are sure to be in it.

        A graph of masks with more than ``COMPLETE`` members may fall apart, with a probability of
        at most ``MOST_FAILURE`` whatever the size.
        """
        failure = exposure.failure + (MOST_FAILURE if drawn > COMPLETE else 0.0)
        shared = replace(exposure, failure=failure).summed(1.0, self.group(drawn).honest)
        if shared.noise <= exposure.noise or math.isinf(shared.bound):
            return shared
        # Clients may leave later: fewer shares are larger, and lie on a coarser grid.
        finer, coarser = (Grid.of(one.noise).widening(one.numbers) for one in (exposure, shared))
        return replace(shared, bound=shared.bound + coarser - finer)

    @property
    def hides(self) -> str:
        """What is hidden, and from whom, in words."""
        members = "the members of its sums are trusted"
        if self.colluders:
            members = f"{_counted(self.colluders, 'member')} of a sum may work together with it"
        return (
            f"the server is the adversary, and {members}; it sees sums over a secure sum and no "
            "single upload, so nobody has to trust it"
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What a promise against the server rests on, in words, where clients share noise."""
        missing = self.tolerated_dropouts
        shares = self.tolerated_dropouts + self.colluders
        sent = f"all drawn clients but {missing}" if missing else "all drawn clients"
        return (
            self.hides,
            f"every sum holds the uploads of {sent}; shares of noise are made for "
            f"{_counted(shares, 'client')} fewer than are drawn, so that those of the honest ones "
            "carry all of it",
            COMPUTATIONAL,
        )


def _counted(number: int, what: str) -> str:
    return f"{number or 'no'} {what}" + "s" * (number > 1)
