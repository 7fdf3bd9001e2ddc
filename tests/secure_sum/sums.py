"""Members of a secure sum, and a server between them."""

from dataclasses import dataclass, field, replace

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dpfl.secure_sum import member, server
from dpfl.secure_sum.session import Announcement, MemberState, Roster, SumTerms

LARGEST = 2**24


@dataclass
class Sum:
    """One sum played in memory; each phase can be looked at, and interfered with."""

    inputs: dict[str, np.ndarray]
    terms: SumTerms
    identities: dict[str, Ed25519PrivateKey] = field(default_factory=dict)
    states: dict[str, MemberState] = field(default_factory=dict)
    roster: Roster | None = None
    announced: dict[str, Announcement] = field(default_factory=dict)
    masked: dict[str, bytes] = field(default_factory=dict)

    def exchange_keys(self) -> Roster:
        for name in self.inputs:
            own = self.identities.setdefault(name, Ed25519PrivateKey.generate())
            self.states[name] = member.make_keys(name, own, self.terms)
        sent = {name: state.keys for name, state in self.states.items()}
        self.roster = server.make_roster(self.terms, sent)
        return self.roster

    def share(self) -> None:
        roster = self.roster or self.exchange_keys()
        for name, state in self.states.items():
            self.states[name] = member.make_shares(state, self.identities[name], roster)
        self.sent = {name: state.shares for name, state in self.states.items()}
        self.announced = {name: shares.announcement for name, shares in self.sent.items()}

    def mail(self, name: str) -> dict[str, bytes]:
        return server.mail_for(self.roster, self.sent, name)

    def mask(self, *dropouts: str) -> None:
        self.share()
        for name, numbers in self.inputs.items():
            if name not in dropouts:
                stored = MemberState.from_bytes(self.states[name].to_bytes())
                self.states[name], self.masked[name] = member.make_masked(
                    stored, self.announced, self.mail(name), numbers
                )

    def sign(self, survivors: tuple[str, ...] | None = None) -> dict[str, str]:
        survivors = survivors or tuple(sorted(self.masked))
        signatures = {}
        for name in survivors:
            self.states[name], signatures[name] = member.sign_survivors(
                self.states[name], self.identities[name], survivors
            )
        return signatures

    def unmask(self, *, silent: tuple[str, ...] = ()) -> np.ndarray:
        signatures = self.sign()
        told = [name for name in signatures if name not in silent]
        revealed = {name: member.reveal(self.states[name], signatures)[1] for name in told}
        return server.unmasked_sum(self.roster, self.announced, self.masked, revealed)


def make_sum(
    members: int, *, dropouts: int = 0, colluders: int = 1, numbers: int = 5, seed: int = 0, **more
) -> Sum:
    """A sum of random integers of so many members."""
    draws = np.random.default_rng(seed)
    names = [f"m{number:03d}" for number in range(members)]
    inputs = {name: draws.integers(-LARGEST, LARGEST + 1, numbers) for name in names}
    terms = SumTerms(
        run="study",
        round=0,
        attempt=0,
        model="m",
        plan="p",
        step=2.0**-20,
        numbers=numbers,
        largest=LARGEST,
        asked=members,
        least=members - dropouts,
        colluders=colluders,
    )
    return Sum(inputs=inputs, terms=replace(terms, **more))
