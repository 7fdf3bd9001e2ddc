from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from dpfl.core.errors import ConfigurationError, DataError
from dpfl.core.random import PublicSeed
from dpfl.data.partition import PARTITIONS, Partition, matching_test

KINDS = sorted(PARTITIONS)


def balanced(classes: int, each: int) -> np.ndarray:
    """Labels of a data set with equally many records a class, in no order."""
    return np.random.default_rng(0).permutation(np.repeat(np.arange(classes), each))


@st.composite
def label_sets(draw: st.DrawFn) -> np.ndarray:
    """Labels with classes of different sizes, each of at least 30 records."""
    sizes = draw(st.lists(st.integers(30, 90), min_size=2, max_size=5))
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return np.random.default_rng(draw(st.integers(0, 99))).permutation(labels)


seeds = st.integers(0, 2**64).map(PublicSeed)
client_counts = st.integers(1, 8)


def distinct(labels: np.ndarray, part: np.ndarray) -> int:
    return len(np.unique(labels[part]))


@pytest.mark.parametrize("kind", KINDS)
@given(labels=label_sets(), clients=client_counts, seed=seeds)
def test_parts_are_disjoint_and_nobody_is_left_empty(
    kind: str, labels: np.ndarray, clients: int, seed: PublicSeed
) -> None:
    assume(kind != "classes" or clients * 2 >= len(np.unique(labels)))
    parts = Partition(kind=kind).split(labels, clients, seed)
    everything = np.concatenate(parts)
    assert len(parts) == clients
    assert min(map(len, parts)) >= 1
    assert len(np.unique(everything)) == len(everything)
    assert set(everything.tolist()) <= set(range(len(labels)))


@pytest.mark.parametrize("kind", KINDS)
@given(labels=label_sets(), seed=seeds)
def test_a_partition_is_a_function_of_its_seed(
    kind: str, labels: np.ndarray, seed: PublicSeed
) -> None:
    law = Partition(kind=kind)
    first, again = (law.split(labels, 5, seed) for _ in range(2))
    other = law.split(labels, 5, seed.child("other"))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@given(labels=label_sets(), clients=client_counts, seed=seeds)
def test_iid_shares_are_equal_and_leave_less_than_one_record_each_over(
    labels: np.ndarray, clients: int, seed: PublicSeed
) -> None:
    parts = Partition(kind="iid").split(labels, clients, seed)
    assert {len(part) for part in parts} == {len(labels) // clients}


def test_iid_shares_have_the_label_mix_of_all() -> None:
    labels = balanced(4, 1000)
    for part in Partition(kind="iid").split(labels, 4, PublicSeed(0)):
        counts = np.bincount(labels[part], minlength=4)
        assert abs(counts - 250).max() < 5 * np.sqrt(1000 * 0.25 * 0.75)


@given(labels=label_sets(), clients=client_counts, shards=st.integers(1, 5), seed=seeds)
def test_shards_use_every_record_and_cut_each_class_boundary_once(
    labels: np.ndarray, clients: int, shards: int, seed: PublicSeed
) -> None:
    """Sorted by label, K classes have K - 1 boundaries: all shards together see at most that many
    labels too many.
    """
    parts = Partition(kind="shards", shards_per_client=shards).split(labels, clients, seed)
    assert sum(map(len, parts)) == len(labels)
    seen = sum(distinct(labels, part) for part in parts)
    assert seen <= clients * shards + len(np.unique(labels)) - 1


@given(shards=st.integers(1, 4), seed=seeds)
def test_shards_that_fit_the_classes_give_a_client_as_many_labels_as_shards(
    shards: int, seed: PublicSeed
) -> None:
    labels = balanced(10, 120)
    parts = Partition(kind="shards", shards_per_client=shards).split(labels, 20, seed)
    assert all(distinct(labels, part) <= shards for part in parts)
    assert {len(part) for part in parts} == {60}


def test_shards_are_dealt_at_random() -> None:
    labels = balanced(10, 40)
    hands = Counter(
        frozenset(labels[Partition(kind="shards").split(labels, 10, PublicSeed(i))[0]].tolist())
        for i in range(200)
    )
    assert len(hands) > 30  # of 10 + 45 possible pairs of labels


@given(labels=label_sets(), clients=client_counts, c=st.integers(1, 5), seed=seeds)
def test_classes_gives_each_client_few_classes_and_uses_every_record(
    labels: np.ndarray, clients: int, c: int, seed: PublicSeed
) -> None:
    assume(clients * c >= len(np.unique(labels)))
    parts = Partition(kind="classes", classes_per_client=c).split(labels, clients, seed)
    assert max(distinct(labels, part) for part in parts) <= c
    assert sum(map(len, parts)) == len(labels)


@given(seed=seeds)
def test_classes_shares_a_class_equally_among_those_who_hold_it(seed: PublicSeed) -> None:
    labels = balanced(5, 60)
    parts = Partition(kind="classes", classes_per_client=2).split(labels, 10, seed)
    for label in range(5):
        held = [int(np.sum(labels[part] == label)) for part in parts if label in labels[part]]
        assert max(held) - min(held) <= 1


def test_classes_that_nobody_could_hold_are_refused() -> None:
    with pytest.raises(DataError, match="leave some of 5 classes to nobody"):
        Partition(kind="classes", classes_per_client=2).split(balanced(5, 20), 2, PublicSeed(0))


def unevenness(parts: list[np.ndarray], labels: np.ndarray) -> float:
    """Mean distance between a client's label mix and everyone's: 0 if all are alike."""
    overall = np.bincount(labels) / len(labels)
    mixes = [np.bincount(labels[part], minlength=len(overall)) / len(part) for part in parts]
    return float(np.mean([np.abs(mix - overall).sum() / 2 for mix in mixes]))


def test_a_small_alpha_makes_dirichlet_shares_more_uneven() -> None:
    labels = balanced(5, 200)
    means = []
    for alpha in (0.1, 1.0, 100.0):
        law = Partition(kind="dirichlet", alpha=alpha, smallest=1)
        means.append(
            np.mean([unevenness(law.split(labels, 6, PublicSeed(i)), labels) for i in range(20)])
        )
    assert means[0] > 1.3 * means[1]
    assert means[1] > 4 * means[2]
    assert means[2] < 0.06


@given(labels=label_sets(), seed=seeds, alpha=st.sampled_from([0.5, 1.0, 10.0]))
def test_dirichlet_uses_every_record(labels: np.ndarray, seed: PublicSeed, alpha: float) -> None:
    parts = Partition(kind="dirichlet", alpha=alpha).split(labels, 4, seed)
    assert sum(map(len, parts)) == len(labels)
    assert min(map(len, parts)) >= 2


def test_a_dirichlet_split_that_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"Dirichlet\(0.01\) over 20 clients leaves someone below 5 records"
    ):
        Partition(kind="dirichlet", alpha=0.01, smallest=5).split(
            balanced(2, 50), 20, PublicSeed(0)
        )


@given(
    labels=label_sets(),
    seed=seeds,
    smallest=st.integers(1, 6),
    alpha=st.sampled_from([0.3, 1.0, 5.0]),
)
def test_unequal_sizes_differ_and_nobody_is_below_the_smallest(
    labels: np.ndarray, seed: PublicSeed, smallest: int, alpha: float
) -> None:
    sizes = [
        len(p)
        for p in Partition(kind="unequal", alpha=alpha, smallest=smallest).split(labels, 6, seed)
    ]
    assert min(sizes) >= smallest
    assert max(sizes) > min(sizes)
    assert len(labels) - 6 < sum(sizes) <= len(labels)


def test_unequal_shares_keep_the_label_mix() -> None:
    labels = balanced(4, 1000)
    for part in Partition(kind="unequal", smallest=200).split(labels, 5, PublicSeed(3)):
        counts = np.bincount(labels[part], minlength=4)
        assert abs(counts - len(part) / 4).max() < 5 * np.sqrt(len(part) * 0.25 * 0.75)


@given(seed=seeds, smallest=st.integers(2, 8), records=st.integers(1, 8), spare=st.integers(0, 30))
def test_unequal_keeps_its_floor_whatever_number_of_records_is_asked_for(
    seed: PublicSeed, smallest: int, records: int, spare: int
) -> None:
    """Too few records for everyone's floor is an error, not a share below it."""
    labels = np.zeros(6 * records + spare, dtype=np.int64)
    try:
        parts = Partition(kind="unequal", smallest=smallest, records=records).split(labels, 6, seed)
    except DataError as error:
        assert 6 * max(smallest, records) > len(labels)
        assert "need" in str(error)
    else:
        assert min(map(len, parts)) >= min(smallest, records)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=seeds, records=st.integers(1, 30))
def test_nobody_holds_more_records_than_asked_for(
    kind: str, seed: PublicSeed, records: int
) -> None:
    law = Partition(kind=kind, records=records, alpha=5.0, smallest=1)
    assert max(map(len, law.split(balanced(5, 60), 5, seed))) <= records


@pytest.mark.parametrize("kind", ["iid", "shards", "dirichlet"])
@given(seed=seeds, records=st.integers(1, 30))
def test_records_fixes_the_size_of_every_share(kind: str, seed: PublicSeed, records: int) -> None:
    """The papers' 1200 records a client; unequal shares and shares by class take it as a limit."""
    law = Partition(kind=kind, records=records, alpha=5.0)
    assert {len(part) for part in law.split(balanced(5, 60), 5, seed)} == {records}


@pytest.mark.parametrize("kind", KINDS)
def test_more_clients_than_records_are_refused_with_how_many_would_do(kind: str) -> None:
    with pytest.raises(DataError, match="use at most 5 clients"):
        Partition(kind=kind).split(balanced(2, 5), 11, PublicSeed(0))


def test_more_shards_than_records_are_refused() -> None:
    with pytest.raises(DataError, match="20 shards of 12 records"):
        Partition(kind="shards", shards_per_client=5).split(balanced(2, 6), 4, PublicSeed(0))


@pytest.mark.parametrize(
    "fields",
    [
        {"alpha": 0.0},
        {"alpha": -1.0},
        {"alpha": float("nan")},
        {"alpha": float("inf")},
        {"smallest": 0},
        {"records": -3},
        {"records": 0},
        {"shards_per_client": 0},
        {"classes_per_client": -1},
    ],
)
def test_a_knob_out_of_range_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        Partition(**fields)


def test_no_clients_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least 1 client"):
        Partition().split(balanced(2, 5), 0, PublicSeed(0))


def test_an_unknown_kind_suggests_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'dirichlet'"):
        Partition(kind="dirichelt")


# ---- test parts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@given(labels=label_sets(), seed=seeds)
def test_test_parts_are_disjoint_but_for_a_record_borrowed_by_those_with_none(
    kind: str, labels: np.ndarray, seed: PublicSeed
) -> None:
    train = Partition(kind=kind).split(labels, 5, seed)
    test = matching_test(train, labels, labels[::7], seed)
    assert min(map(len, test)) >= 1
    owners = Counter(record for part in test for record in part.tolist())
    for record, count in owners.items():
        lenders = [part for part in test if record in part and len(part) > 1]
        assert count == 1 or len(lenders) <= 1


@pytest.mark.parametrize("kind", KINDS)
@given(seed=seeds)
def test_the_label_mix_of_a_test_part_follows_the_train_part(kind: str, seed: PublicSeed) -> None:
    """Each label's test records are shared out like its train records, but for rounding; none is
    wasted.
    """
    labels, test_labels = balanced(4, 150), balanced(4, 60)
    train = Partition(kind=kind).split(labels, 5, seed)
    test = matching_test(train, labels, test_labels, seed.child("test"))
    held = np.array([np.bincount(labels[part], minlength=4) for part in train])
    given_ = np.array([np.bincount(test_labels[part], minlength=4) for part in test])
    expected = 60 * held / held.sum(axis=0)
    borrowed = np.array([len(part) == 1 for part in test])
    assert np.abs(given_ - expected)[~borrowed].max() <= 1
    assert given_.sum() >= 4 * 60


def test_a_borrowed_test_record_has_the_label_its_borrower_holds_most() -> None:
    labels = np.array([0] * 400 + [1] * 2)
    train = [np.arange(0, 400), np.array([400]), np.array([401])]
    test = matching_test(train, labels, np.array([0, 0, 0, 1]), PublicSeed(0))
    assert [len(part) for part in test] == [3, 1, 1]
    assert test[1].tolist() == test[2].tolist() == [3]
