"""What a malicious server tries: each attempt is refused, and what it sees tells nothing."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from scipy import stats
from tests.secure_sum.sums import LARGEST, make_sum

from dpfl.core.errors import PeerError, PrivacyRefusal
from dpfl.secure_sum import integers, keys, masks, member, server
from dpfl.secure_sum.session import Roster
from dpfl.secure_sum.trust import Trust

# -- what the server sees --------------------------------------------------------------------------

NUMBERS = 20_000


def _views(value: int) -> list[np.ndarray]:
    """What a server that colludes with one member knows of three honest ones, whose first one sends
    ``value`` throughout: every sum over some of them, with all masks off that it can take off.
    """
    one = make_sum(4, numbers=NUMBERS, colluders=1)
    one.inputs["m000"][:] = value
    one.share()
    seeds = {name: state.own_seed for name, state in one.states.items()}
    colluder = keys.agreement_key(one.states["m003"].mask_seed)
    one.mask()
    one.unmask()  # so that the server learns the seeds of all own masks
    roster, width, seen = one.roster, one.terms.width, {}
    for number, name in enumerate(("m000", "m001", "m002")):
        words = integers.unpacked(one.masked[name], NUMBERS, width, name)
        own = masks.own_mask(seeds[name], roster.session), -1
        integers.add_masks(words, [own, masks.pair_mask(roster, colluder, 3, number)])
        seen[name] = words
    subsets = [names for size in (1, 2) for names in itertools.combinations(seen, size)]
    return [integers.signed(sum(seen[name] for name in names), width) for names in subsets]


def _smallest_p(pairs) -> float:
    """The smallest p-value of a two-sample test of each pair, times their number."""
    found = [stats.ks_2samp(*pair).pvalue for pair in pairs]
    return min(found) * len(found)


def test_messages_do_not_depend_on_an_honest_members_data():
    pairs = list(zip(_views(-LARGEST), _views(LARGEST), strict=True))
    assert _smallest_p(pairs) > 1e-6
    half = 1 << (make_sum(4).terms.width - 1)
    uniform = [
        stats.kstest(one / half, stats.uniform(-1, 2).cdf).pvalue for pair in pairs for one in pair
    ]
    assert min(uniform) * len(uniform) > 1e-6


@pytest.mark.parametrize("without", ["all", "pairs"])
def test_without_masks_the_same_test_tells(monkeypatch, without):
    # The server recovers own masks, which come first: without those of pairs, nothing is left.
    kept, add = 0 if without == "all" else 1, integers.add_masks
    monkeypatch.setattr(integers, "add_masks", lambda words, masks: add(words, masks[:kept]))
    assert _smallest_p(zip(_views(-LARGEST), _views(LARGEST), strict=True)) < 1e-6


# -- one session, one roster -----------------------------------------------------------------------


def test_another_roster_in_one_attempt_is_refused():
    one = make_sum(4, dropouts=1)
    one.share()
    smaller = Roster(terms=one.terms, members=one.roster.members[:3])
    with pytest.raises(PeerError, match="another list of members"):
        member.make_shares(one.states["m000"], one.identities["m000"], smaller)


def test_different_lists_for_different_members_are_noticed():
    one = make_sum(4, dropouts=1)
    roster = one.exchange_keys()
    smaller = Roster(terms=one.terms, members=roster.members[:3])
    states = {
        name: member.make_shares(one.states[name], one.identities[name], shown)
        for name, shown in zip(one.inputs, (roster, smaller, smaller, roster), strict=True)
    }
    sent = {name: state.shares for name, state in states.items()}
    announced = {name: shares.announcement for name, shares in sent.items()}
    for name in ("m000", "m001"):
        mail = {other: shares.sealed.get(name, b"") for other, shares in sent.items()}
        with pytest.raises(PeerError, match=r"signed|sealed"):
            member.make_masked(states[name], announced, mail, one.inputs[name])


def test_all_members_must_have_shared():
    one = make_sum(4, dropouts=1)
    one.share()
    del one.announced["m002"]
    with pytest.raises(PeerError, match="'m002' has sent no shares"):
        member.make_masked(one.states["m000"], one.announced, one.mail("m000"), one.inputs["m000"])


@pytest.mark.parametrize("change", ["drop", "flip", "swap"])
def test_changed_shares_are_refused(change):
    one = make_sum(4)
    one.share()
    mail = one.mail("m000")
    if change == "drop":
        del mail["m001"]
    elif change == "flip":
        mail["m001"] = mail["m001"][:-1] + bytes([mail["m001"][-1] ^ 1])
    else:
        mail["m001"], mail["m002"] = mail["m002"], mail["m001"]
    with pytest.raises(PeerError, match="'m001'"):
        member.make_masked(one.states["m000"], one.announced, mail, one.inputs["m000"])


def test_nothing_is_masked_twice_in_a_session():
    one = make_sum(3)
    one.mask()
    with pytest.raises(PeerError, match="masked in this session already"):
        member.make_masked(one.states["m000"], one.announced, one.mail("m000"), one.inputs["m000"])


@pytest.mark.parametrize("field", ["mask", "share", "identity"])
def test_two_members_with_one_key_are_refused(field):
    one = make_sum(3)
    first, *rest = one.exchange_keys().members
    twin = replace(rest[0], **{field: getattr(first, field)})
    with pytest.raises(PrivacyRefusal, match=f"'m000' and 'm001' have one {field} key"):
        Roster(terms=one.terms, members=(first, twin, *rest[1:]))


def test_keys_that_change_are_refused():
    one = make_sum(3)
    first, second, third = one.exchange_keys().members
    other = make_sum(3)
    changed = replace(second, mask=other.exchange_keys().members[1].mask)
    roster = Roster(terms=one.terms, members=(first, changed, third))
    with pytest.raises(PeerError, match="keys of 'm001': is not signed"):
        member.make_shares(one.states["m000"], one.identities["m000"], roster)
    # Keys of another attempt are signed, but not for this one.
    later = make_sum(3, attempt=1)
    later.identities = one.identities
    old = replace(later.terms, attempt=0)
    with pytest.raises(PeerError, match="is not signed"):
        server.make_roster(old, {one.name: one for one in later.exchange_keys().members})
    with pytest.raises(PeerError, match="other keys or terms than this member's"):
        member.make_shares(one.states["m000"], one.identities["m000"], later.roster)


@pytest.mark.parametrize(
    "change",
    [{"step": 1.0}, {"largest": LARGEST + 1}, {"least": 2}, {"colluders": 0}, {"numbers": 9}],
)
def test_other_terms_than_the_members_are_refused(change):
    one = make_sum(3, colluders=1)
    roster = one.exchange_keys()
    terms = replace(one.terms, **change)
    with pytest.raises((PeerError, PrivacyRefusal)):
        member.make_shares(one.states["m000"], one.identities["m000"], replace(roster, terms=terms))


# -- one list of survivors -------------------------------------------------------------------------


def test_a_second_list_of_survivors_is_refused():
    one = make_sum(5, dropouts=1)
    one.mask()
    one.sign(("m000", "m001", "m002", "m003"))
    with pytest.raises(PeerError, match="another list of survivors"):
        member.sign_survivors(one.states["m000"], one.identities["m000"], tuple(sorted(one.inputs)))


def test_lists_that_split_the_members_are_never_both_unmasked():
    # 5 members, 1 colluder: t = 4. The colluder signs anything.
    one = make_sum(5, dropouts=1)
    one.mask()
    lists = ("m000", "m001", "m003", "m004"), ("m001", "m002", "m003", "m004")
    signed = {}
    for name, own in zip(("m000", "m001", "m002", "m003"), (0, 0, 1, 1), strict=True):
        one.states[name], signature = member.sign_survivors(
            one.states[name], one.identities[name], lists[own]
        )
        signed.setdefault(own, {})[name] = signature
    for own, names in ((0, ("m000", "m001")), (1, ("m002", "m003"))):
        content = member.survivors_content(one.roster.session, lists[own])
        signed[own]["m004"] = keys.sign(one.identities["m004"], content)
        for name in names:
            with pytest.raises(PeerError, match="3 members have signed"):
                member.reveal(one.states[name], signed[own])


def test_more_colluders_than_planned_can_show_a_single_input():
    """What the documents warn of: 4 members, 1 planned colluder and 2 real ones, m002 and m003."""
    one = make_sum(4, dropouts=1)
    one.mask()
    lists, sums = (("m000", "m001", "m002", "m003"), ("m001", "m002", "m003")), []
    colluders = {name: one.states[name] for name in ("m002", "m003")}
    for survivors, honest in zip(lists, ("m000", "m001"), strict=True):
        states, signed = {**colluders, honest: one.states[honest]}, {}
        for name, state in states.items():
            states[name], signed[name] = member.sign_survivors(
                state, one.identities[name], survivors
            )
        revealed = {name: member.reveal(state, signed)[1] for name, state in states.items()}
        masked = {name: one.masked[name] for name in survivors}
        sums.append(server.unmasked_sum(one.roster, one.announced, masked, revealed))
    assert np.array_equal(sums[0] - sums[1], one.inputs["m000"])


@pytest.mark.parametrize(
    ("survivors", "problem"),
    [
        (("m000", "m001"), "2 survivors"),
        (("m001", "m002", "m003", "m004"), "not among the survivors"),
        (("m001", "m000", "m002", "m003"), "in order"),
        (("m000", "m000", "m001", "m002"), "each once"),
        (("m000", "m001", "m002", "x"), "not members"),
    ],
)
def test_bad_lists_of_survivors(survivors, problem):
    one = make_sum(5, dropouts=1)
    one.mask()
    with pytest.raises(PeerError, match=problem):
        member.sign_survivors(one.states["m000"], one.identities["m000"], survivors)


def test_signatures_are_checked():
    one = make_sum(3)
    one.mask()
    signatures = one.sign()
    state = one.states["m000"]
    with pytest.raises(PeerError, match="2 members have signed"):
        member.reveal(state, dict(list(signatures.items())[:2]))
    forged = keys.sign(Ed25519PrivateKey.generate(), b"anything")
    with pytest.raises(PeerError, match="signature of 'm001'"):
        member.reveal(state, {**signatures, "m001": forged})
    # Strangers' signatures do not count.
    with pytest.raises(PeerError, match="2 members have signed"):
        member.reveal(state, {"x": forged, **dict(list(signatures.items())[:2])})


def test_one_share_of_two_is_revealed_and_the_other_forgotten():
    one = make_sum(5, dropouts=1)
    one.mask("m004")
    held = dict(one.states["m000"].held)
    signatures = one.sign()
    state, revealed = member.reveal(one.states["m000"], signatures)
    for name, both in held.items():
        assert revealed[name] == (both[:16] if name == "m004" else both[16:])
    assert state.held is None
    assert member.reveal(state, signatures)[1] == revealed
    assert all(both not in state.to_bytes() for both in held.values())


def test_phases_out_of_order():
    one = make_sum(3)
    one.exchange_keys()
    names = tuple(one.inputs)
    with pytest.raises(PeerError, match="no session was joined"):
        member.sign_survivors(one.states["m000"], one.identities["m000"], names)
    one.share()
    with pytest.raises(PeerError, match="nothing was masked"):
        member.sign_survivors(one.states["m000"], one.identities["m000"], names)
    one.mask()
    with pytest.raises(PeerError, match="no list of survivors"):
        member.reveal(one.states["m000"], {})


def test_secrets_of_masks_are_gone_once_the_input_is_masked():
    one = make_sum(3)
    one.share()
    state = one.states["m000"]
    after, _ = member.make_masked(state, one.announced, one.mail("m000"), one.inputs["m000"])
    assert after.own_seed == after.mask_seed == after.share_seed == b""


# -- invented members ------------------------------------------------------------------------------


def _trust(one, **more) -> Trust:
    pinned = {keys_.name: keys_.identity for keys_ in one.roster.members if keys_.name != "m000"}
    return Trust(name="m000", pinned=pinned, **more)


def test_invented_members_count_as_colluders():
    one = make_sum(6, dropouts=1, colluders=1)
    one.exchange_keys()
    _trust(one).check(one.roster)
    with pytest.raises(PrivacyRefusal, match=r"2 members may collude .*m005 not pinned"):
        known = {name: key for name, key in _trust(one).pinned.items() if name != "m005"}
        Trust(name="m000", pinned=known).check(one.roster)


def test_a_pinned_name_with_another_key_is_refused():
    one = make_sum(4)
    one.exchange_keys()
    trust = _trust(one)
    other = keys.public_half(Ed25519PrivateKey.generate())
    with pytest.raises(PrivacyRefusal, match="'m002' has the identity key"):
        replace(trust, pinned={**trust.pinned, "m002": other}).check(one.roster)


def test_members_who_are_counted_on_do_not_collude():
    one = make_sum(3, colluders=0)
    one.exchange_keys()
    with pytest.raises(PrivacyRefusal, match="1 members may collude"):
        _trust(one).check(one.roster)
    _trust(one, count_on=frozenset({"m001", "m002"})).check(one.roster)
    with pytest.raises(PrivacyRefusal):  # one of them is doubted, and may collude
        _trust(one, count_on=frozenset({"m001"})).check(one.roster)


def test_a_policy_that_asks_for_more_honest_members():
    one = make_sum(4, colluders=1)
    one.exchange_keys()
    _trust(one, least_honest=3).check(one.roster)
    with pytest.raises(PrivacyRefusal, match=r"3 honest members .* asks for 4"):
        _trust(one, least_honest=4).check(one.roster)


# -- members that misbehave ------------------------------------------------------------------------


def test_messages_of_a_wrong_length_are_refused():
    one = make_sum(3)
    one.mask()
    one.masked["m001"] += b"0"
    with pytest.raises(PeerError, match="masked input of 'm001'"):
        one.unmask()


@pytest.mark.parametrize("gone", [(), ("m004",)])
def test_false_shares_are_noticed(gone):
    one = make_sum(5, dropouts=1)
    one.mask(*gone)
    signatures = one.sign()
    revealed = {name: dict(member.reveal(one.states[name], signatures)[1]) for name in signatures}
    about = gone[0] if gone else "m002"
    revealed["m000"][about] = bytes(16)
    with pytest.raises(PeerError, match=f"secret of '{about}'"):
        server.unmasked_sum(one.roster, one.announced, one.masked, revealed)


def test_too_few_shares_lose_the_sum():
    one = make_sum(5, dropouts=1)
    one.mask()
    with pytest.raises(PeerError, match="3 of 4 shares"):
        one.unmask(silent=("m000", "m001"))


def test_integers_beyond_the_bound_are_refused():
    one = make_sum(3)
    one.inputs["m000"][0] = LARGEST + 1
    with pytest.raises(PrivacyRefusal, match=str(LARGEST + 1)):
        one.mask()
