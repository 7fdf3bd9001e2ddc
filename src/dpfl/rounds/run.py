"""Which run this is, where it is charged, and where its randomness comes from."""

from dataclasses import dataclass, field

from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Observer
from dpfl.privacy.ledger import Ledger
from dpfl.rounds.memory import Memory


@dataclass(frozen=True, kw_only=True)
class Run(Memory):
    """Which run this is, where it is charged, and where its randomness comes from (None: the
    operating system).

    ``populations`` names the account under which each client is charged against the world,
    ``covered`` who can take part in every round, until it has another plan.
    """

    name: str
    ledger: Ledger
    seed: PublicSeed | None
    public: PublicSeed
    populations: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    covered: set[str] = field(default_factory=set, compare=False, repr=False)

    def planned(self, observer: Observer) -> dict[str, int]:
        """How many rounds each account has committed to at most, against an adversary; read once,
        then kept up to date.
        """
        return self.once(observer, self.ledger.planned, self.name, observer)

    def secret(self, *labels: str | int) -> SecretRng:
        """Make the secret generator for a named purpose: seeded in a simulation, fresh from the
        system otherwise.
        """
        return secret_for(self.seed, *labels)

    def round_seed(self, round_: int) -> PublicSeed:
        """The public randomness of a round (projections, channel gains): shared, but known to
        nobody before the round.

        Without a seed it comes from the operating system, so that no data can have been chosen with
        it in mind.
        """
        if self.seed is None:
            return SecretRng.from_system().secret_seed()
        return self.public.child("round", round_)


def secret_for(seed: PublicSeed | None, *labels: str | int) -> SecretRng:
    """A secret generator: from a simulation's seed, or from the operating system if there is
    none.
    """
    return SecretRng.from_system() if seed is None else SecretRng.simulated(seed.child(*labels))
