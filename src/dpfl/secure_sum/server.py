"""The server's side of a sum: it passes messages on, and takes the masks off the sum.

What it checks here is for its own sake: a server that skips a check gains nothing, since members
check for themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dpfl.core.checks import check
from dpfl.core.errors import PeerError
from dpfl.secure_sum import integers, keys
from dpfl.secure_sum.masks import commitment_to, own_mask, pair_mask
from dpfl.secure_sum.session import (
    Announcement,
    MemberKeys,
    Roster,
    Shares,
    SumTerms,
    neighbours,
    survivors_content,
)

_LOST = "the round is lost; begin another one"


def make_roster(terms: SumTerms, sent: Mapping[str, MemberKeys]) -> Roster:
    """List the members that have sent keys; what their identities have not signed is refused."""
    roster = Roster(terms=terms, members=tuple(sent[name] for name in sorted(sent)))
    roster.check_signatures()
    return roster


def mail_for(roster: Roster, sent: Mapping[str, Shares], name: str) -> dict[str, bytes]:
    """The sealed shares that others have made for a member."""
    return {one: shares.sealed[name] for one, shares in sent.items() if name in shares.sealed}


def unmasked_sum(
    roster: Roster,
    announced: Mapping[str, Announcement],
    masked: Mapping[str, bytes],
    revealed: Mapping[str, Mapping[str, bytes]],
) -> np.ndarray:
    """The sum of the survivors' integers, exactly.

    ``masked`` are the survivors' masked inputs, ``revealed`` what members gave to take the masks
    off, by the member who gave it and the member whom it is about. Shares that do not fit what was
    announced are refused by the name of the member whom they are about.
    """
    terms = roster.terms
    survivors = {*masked}
    total = np.zeros(terms.numbers, integers.word(terms.width))
    for name, payload in sorted(masked.items()):
        total += integers.unpacked(payload, terms.numbers, terms.width, name)
    masks: list[tuple[bytes, int]] = []
    for name in roster.names:
        alive = name in survivors
        around = [] if alive else neighbours(roster, announced, name)
        left = [other for other in around if roster.names[other] in survivors]
        if not (alive or left):
            continue
        seed = _recovered(roster, announced[name], revealed)
        if alive:
            check(
                commitment_to(seed, roster.session) == announced[name].commitment,
                f"secret of '{name}'",
                "the shares of its own mask do not fit what it has announced",
                _LOST,
                PeerError,
            )
            masks.append((own_mask(seed, roster.session), -1))
            continue
        key = keys.agreement_key(seed)
        place = roster.place[name]
        check(
            keys.public_half(key) == roster.members[place].mask,
            f"secret of '{name}'",
            "the shares of its mask key do not fit its public key",
            _LOST,
            PeerError,
        )
        # what a dropout would have added cancels what is left in the sum
        masks += [pair_mask(roster, key, place, other) for other in left]
    integers.add_masks(total, masks)
    return integers.signed(total, terms.width)


def check_survivor_signature(
    roster: Roster, survivors: tuple[str, ...], name: str, signature: str
) -> None:
    """Refuse a signature that is not the member's own under this list."""
    content = survivors_content(roster.session, survivors)
    identity = roster.members[roster.place[name]].identity
    keys.check_signature(identity, signature, content, f"signature of '{name}'")


def _recovered(
    roster: Roster, announced: Announcement, revealed: Mapping[str, Mapping[str, bytes]]
) -> bytes:
    """The seed of a member, from the shares that its holders have revealed."""
    holders = announced.holders(roster)
    found = {
        number: revealed[roster.names[holder]][announced.name]
        for number, holder in enumerate(holders)
        if announced.name in revealed.get(roster.names[holder], {})
    }
    return keys.recovered(found, roster.group.recovering, announced.name)
