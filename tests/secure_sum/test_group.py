"""How many must be honest, sign, survive; and when a sparse graph holds together."""

import itertools
import random

import pytest

from dpfl.core.errors import PrivacyRefusal
from dpfl.secure_sum.session import MOST_ATTEMPTS, MOST_FAILURE, Group, parted


@pytest.mark.parametrize(
    ("members", "colluders", "threshold", "dropouts"), [(3, 1, 3, 0), (10, 2, 7, 3), (5, 1, 4, 1)]
)
def test_threshold(members, colluders, threshold, dropouts):
    group = Group(members=members, colluders=colluders, least=members - dropouts)
    assert group.threshold == threshold
    with pytest.raises(PrivacyRefusal, match=f"tolerate {dropouts} dropouts"):
        Group(members=members, colluders=colluders, least=members - dropouts - 1)


@pytest.mark.parametrize(
    "sizes", [(1, 1, 0), (2, 2, 2), (2, 1, 1), (4, 5, 1), (3, 3, -1), (10, 4, 5)]
)
def test_groups_that_hide_nobody_are_refused(sizes):
    members, least, colluders = sizes
    with pytest.raises(Exception, match="secure sum"):
        Group(members=members, least=least, colluders=colluders)


def test_no_two_lists_can_both_be_signed():
    # Every honest member signs one list, every colluder both: two lists never both reach t.
    for members, colluders in itertools.product(range(2, 12), range(6)):
        if colluders > members - 2:
            continue
        t = Group(members=members, colluders=colluders, least=members).threshold
        honest = members - colluders
        assert all(
            min(part + colluders, honest - part + colluders) < t for part in range(honest + 1)
        )


def test_threshold_is_the_least_that_rules_out_two_lists():
    for members, colluders in [(3, 1), (10, 2), (11, 3)]:
        t = Group(members=members, colluders=colluders, least=members).threshold - 1
        honest = members - colluders
        part = honest // 2
        assert min(part + colluders, honest - part + colluders) >= t


def test_bound_on_parted_graphs_is_not_below_what_is_seen():
    # Small enough to be seen: 9 members, 1 colluder, 2 may drop, each chooses 2 others.
    members, colluders, least, chosen, seen, draws = 9, 1, 7, 2, 0, 1500
    rng, honest = random.Random(5), range(8)
    for _ in range(draws):
        edges = set()
        for one in honest:
            others = [other for other in range(members) if other != one]
            edges |= {frozenset((one, other)) for other in rng.sample(others, chosen)}
        seen += any(
            _disconnected(left, edges)
            for size in range(least - colluders, 9)
            for left in itertools.combinations(honest, size)
        )
    assert seen / draws > 0.02  # the server's choice of dropouts matters
    assert seen / draws <= parted(members, colluders, least, chosen)


def _disconnected(left, edges):
    reached, todo = {left[0]}, [left[0]]
    while todo:
        one = todo.pop()
        new = {other for other in left if frozenset((one, other)) in edges} - reached
        reached |= new
        todo += new
    return len(reached) < len(left)


@pytest.mark.parametrize(("members", "dropouts", "colluders"), [(65, 3, 1), (200, 20, 5)])
def test_sparse_groups(members, dropouts, colluders):
    group = Group(members=members, least=members - dropouts, colluders=colluders)
    assert group.neighbours < members // 3
    # A server may give attempts up, graph after graph, until one has fallen apart.
    one = parted(members, colluders, members - dropouts, group.neighbours)
    assert 0 < MOST_ATTEMPTS * one == group.failure <= MOST_FAILURE
    # Colluders alone recover nobody's secret, and those left after all dropouts can.
    assert colluders < group.recovering <= group.neighbours - dropouts
    fewer = parted(members, colluders, members - dropouts, group.neighbours - 1)
    cannot_recover = group.neighbours - 1 - dropouts < group.recovering
    assert fewer > MOST_FAILURE / MOST_ATTEMPTS or cannot_recover
