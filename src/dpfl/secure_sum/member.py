"""A member's side of a sum: five phases, each a function from what the member remembers.

A member remembers a :class:`~dpfl.secure_sum.session.MemberState`, which holds secrets and is
stored by the caller before the answer of a phase leaves: whoever is killed answers again with the
same bytes. Asked for something else than before, it refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from dpfl.core.checks import check
from dpfl.core.errors import PeerError
from dpfl.secure_sum import integers, keys
from dpfl.secure_sum.masks import commitment_to, own_mask, pair_mask
from dpfl.secure_sum.session import (
    Announcement,
    MemberKeys,
    MemberState,
    Roster,
    Shares,
    SumTerms,
    neighbours,
    survivors_content,
)

_NEW_ROUND = "begin another round"
_WHERE = "secure sum"


def make_keys(name: str, identity: Ed25519PrivateKey, terms: SumTerms) -> MemberState:
    """First phase: draw the one-time keys of a sum, signed by the member's identity."""
    mask_seed = keys.new_seed()
    share_seed = keys.new_seed()
    mask, share = (keys.public_half(keys.agreement_key(one)) for one in (mask_seed, share_seed))
    own = MemberKeys(name=name, identity=keys.public_half(identity), mask=mask, share=share)
    own = replace(own, signature=keys.sign(identity, own.content(terms)))
    return MemberState(keys=own, terms=terms, mask_seed=mask_seed, share_seed=share_seed)


def make_shares(state: MemberState, identity: Ed25519PrivateKey, roster: Roster) -> MemberState:
    """Second phase: join the session of a roster, and seal shares of one's secrets for others.

    The caller has decided that the roster's members may be counted on. Another roster than before
    is refused: the same secrets belong to one session.
    """
    if state.roster is not None:
        check(
            state.roster.session == roster.session,
            _WHERE,
            "another list of members than before, in the same attempt",
            "begin a new attempt, with new keys",
            PeerError,
        )
        return state
    own = state.keys
    check(
        own in roster.members and roster.terms == state.terms,
        _WHERE,
        "lists other keys or terms than this member's",
        "send the keys that it has made",
        PeerError,
    )
    roster.check_signatures()
    group = roster.group
    place = roster.place[own.name]
    own_seed = keys.new_seed()
    others = [number for number in range(len(roster.members)) if number != place]
    everyone = group.neighbours == len(others)
    chosen = () if everyone else keys.sample(others, group.neighbours)
    commitment = commitment_to(own_seed, roster.session)
    announced = Announcement(name=own.name, chosen=chosen, commitment=commitment)
    signature = keys.sign(identity, announced.content(roster.session))
    announced = replace(announced, signature=signature)
    holders = announced.holders(roster)
    both = [
        keys.shares_of(seed, len(holders), group.recovering) for seed in (state.mask_seed, own_seed)
    ]
    sealed = {}
    held = {}
    share_key = keys.agreement_key(state.share_seed)
    for holder, *parts in zip(holders, *both, strict=True):
        content = b"".join(parts)
        if holder == place:
            held[own.name] = content
        else:
            key, about = _sealing(roster, share_key, own.name, roster.names[holder], holder)
            sealed[roster.names[holder]] = keys.sealed(key, content, about)
    shares = Shares(announcement=announced, sealed=sealed)
    return replace(state, roster=roster, own_seed=own_seed, shares=shares, held=held)


def make_masked(
    state: MemberState,
    announced: Mapping[str, Announcement],
    sealed: Mapping[str, bytes],
    numbers: np.ndarray,
) -> tuple[MemberState, bytes]:
    """Third phase: open the others' shares, and mask one's own integers.

    All members must have announced their neighbours and sealed a share for this one, if they have
    chosen it; so all honest members are in one session with one roster. The state that is returned
    no longer holds what the mask is made of. Masking other integers in the same session would show
    their difference: the caller stores the answer, and never calls this twice in a session.
    """
    roster = state.joined
    own = state.keys.name
    check(bool(state.own_seed), _WHERE, "was masked in this session already", _NEW_ROUND, PeerError)
    held = opened_shares(state, announced, sealed)
    terms = roster.terms
    place = roster.place[own]
    check(
        len(numbers) == terms.numbers,
        _WHERE,
        f"{len(numbers)} integers, where {terms.numbers} were agreed",
        "plan the same round",
        PeerError,
    )
    masked = integers.residues(numbers, terms.largest, terms.width)
    key = keys.agreement_key(state.mask_seed)
    others = neighbours(roster, announced, own)
    masks = [pair_mask(roster, key, place, other) for other in others]
    integers.add_masks(masked, [(own_mask(state.own_seed, roster.session), 1), *masks])
    state = replace(state, held=held, mask_seed=b"", own_seed=b"", share_seed=b"")
    return state, integers.packed(masked, terms.width)


def opened_shares(
    state: MemberState, announced: Mapping[str, Announcement], sealed: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Open what others have sealed for this member; whatever is missing or changed is refused."""
    roster = state.joined
    own = state.keys.name
    missing = sorted({*roster.names} - announced.keys())
    check(
        not missing,
        _WHERE,
        f"'{missing[0]}' has sent no shares" if missing else "",
        "begin a new attempt without it",
        PeerError,
    )
    assert state.shares is not None
    check(
        announced[own] == state.shares.announcement,
        _WHERE,
        "shows other neighbours than this member has chosen",
        "pass on what members have sent",
        PeerError,
    )
    key = keys.agreement_key(state.share_seed)
    place = roster.place[own]
    held = dict(state.held or {})
    for name in roster.names:
        one = announced[name]
        one.check(roster)
        if name == own or place not in one.holders(roster):
            continue
        check(
            name in sealed,
            _WHERE,
            f"the share of '{name}' is missing",
            "pass on what members have sent",
            PeerError,
        )
        sender = roster.members[roster.place[name]].share
        purpose = ("share", roster.session, name, own)
        about = keys.canonical(*purpose, place)
        held[name] = keys.opened(keys.agreed(key, sender, *purpose), sealed[name], about, name)
    return held


def sign_survivors(
    state: MemberState, identity: Ed25519PrivateKey, survivors: tuple[str, ...]
) -> tuple[MemberState, str]:
    """Fourth phase: sign the list of those whose masked inputs have arrived, one list only."""
    roster = state.joined
    remedy = "ask with the list that was signed"
    check(
        list(survivors) == sorted({*survivors} & {*roster.names}),
        _WHERE,
        "the survivors are not members of this session, each once and in order",
        "list members of the session",
        PeerError,
    )
    check(
        state.keys.name in survivors,
        _WHERE,
        "this member is not among the survivors",
        _NEW_ROUND,
        PeerError,
    )
    least = roster.terms.least
    check(
        len(survivors) >= least,
        _WHERE,
        f"{len(survivors)} survivors, where at least {least} were agreed",
        "the round is lost",
        PeerError,
    )
    unmasked = bool(state.own_seed)
    check(not unmasked, _WHERE, "nothing was masked yet", "send the phases in order", PeerError)
    check(
        state.survivors in (None, survivors),
        _WHERE,
        "another list of survivors was signed before",
        remedy,
        PeerError,
    )
    signature = keys.sign(identity, survivors_content(roster.session, survivors))
    return replace(state, survivors=survivors), signature


def reveal(
    state: MemberState, signatures: Mapping[str, str]
) -> tuple[MemberState, Mapping[str, bytes]]:
    """Last phase: give the server the shares that take the masks off, one of two for each member.

    Of a survivor it is the share of its own mask, of a dropout that of its mask key; never both,
    and the other one is forgotten. ``signatures`` must show that enough members have signed the
    list that this one has signed.
    """
    roster = state.joined
    survivors = state.survivors
    check(
        survivors is not None,
        _WHERE,
        "no list of survivors was signed",
        "send the phases in order",
        PeerError,
    )
    assert survivors is not None
    content = survivors_content(roster.session, survivors)
    valid = 0
    for name, signature in signatures.items():
        if name in roster.place:
            member = roster.members[roster.place[name]]
            where = f"signature of '{name}'"
            keys.check_signature(member.identity, signature, content, where)
            valid += 1
    needed = roster.group.threshold
    check(
        valid >= needed,
        _WHERE,
        f"{valid} members have signed the list of survivors, and {needed} are needed",
        "the round is lost",
        PeerError,
    )
    if state.revealed is None:
        parts = (slice(keys.SEED), slice(keys.SEED, 2 * keys.SEED))
        held = (state.held or {}).items()
        revealed = {name: both[parts[name in survivors]] for name, both in held}
        state = replace(state, held=None, revealed=revealed)
    assert state.revealed is not None
    return state, state.revealed


def _sealing(
    roster: Roster, key: X25519PrivateKey, sender: str, receiver: str, number: int
) -> tuple[bytes, bytes]:
    """The key with which a share is sealed, and what it is about."""
    purpose = ("share", roster.session, sender, receiver)
    return keys.agreed(key, roster.members[number].share, *purpose), keys.canonical(
        *purpose, number
    )
