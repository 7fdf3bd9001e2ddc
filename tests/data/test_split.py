"""Neighbouring files: what one unit of a file can change in the parts that are trained and tested on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st

import dpfl
from dpfl.data.building import ClientTable, units_of
from dpfl.data.federation import Federation
from dpfl.data.schema import Schema
from dpfl.data.units import UnitKey, Units, units_to_test

KEYS = st.binary(min_size=1, max_size=64).map(UnitKey)
ROWS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)), min_size=2, max_size=60)
LONG = [(i % 97, i % 2) for i in range(300)]  # with equal rows
Row = tuple[Any, int]
Part = Counter[tuple[Any, ...]]


def federation(rows: list[Row], key: UnitKey) -> Federation:
    x = [[float(a)] for a, _ in rows]
    y = [b for _, b in rows]
    return Federation.from_arrays({"a": (x, y)}, classes=2, key=key)


def parts(rows: list[Row], key: UnitKey) -> tuple[Part, Part]:
    """What is trained on, and what is tested on: equal rows are interchangeable."""
    shard = federation(rows, key).shards["a"]
    found = (shard.features, shard.labels), (shard.test_features, shard.test_labels)
    train, test = (Counter(zip(x[:, 0].tolist(), y.tolist(), strict=True)) for x, y in found)
    return train, test


def difference(one: Part, other: Part) -> int:
    """How many records would have to be replaced, added or removed."""
    return max((one - other).total(), (other - one).total())


@given(ROWS, KEYS)
@example(LONG, UnitKey(b"k"))
def test_sizes_follow_from_the_number_of_units_alone(rows: list[Row], key: UnitKey) -> None:
    train, test = parts(rows, key)
    assert test.total() == units_to_test(len(rows)) == max(1, round(len(rows) / 5))
    assert train + test == Counter((float(a), b) for a, b in rows)


@given(ROWS, KEYS, st.data())
@example(LONG, UnitKey(b"k"), None)
def test_a_row_that_changes_trades_places_with_one_other_at_most(
    rows: list[Row], key: UnitKey, data: Any
) -> None:
    before = parts(rows, key)
    places = range(0, 300, 7) if data is None else [data.draw(st.integers(0, len(rows) - 1))]
    for place in places:
        changed = [*rows]
        changed[place] = (77, 1)
        assert all(difference(a, b) <= 1 for a, b in zip(before, parts(changed, key), strict=True))


@given(ROWS.filter(lambda rows: len(rows) > 2), KEYS, st.data())
@example(LONG, UnitKey(b"k"), None)
def test_a_row_that_is_removed_moves_one_other_at_most(
    rows: list[Row], key: UnitKey, data: Any
) -> None:
    before = parts(rows, key)
    places = range(0, 300, 7) if data is None else [data.draw(st.integers(0, len(rows) - 1))]
    for place in places:
        left = rows[:place] + rows[place + 1 :]
        gone = Counter([(float(rows[place][0]), rows[place][1])])
        after = parts(left, key)
        # Of the other records, one at most is in the other part.
        moved = sum(((b - a) - gone).total() for a, b in zip(before, after, strict=True))
        assert moved <= 1


@given(ROWS, KEYS, st.randoms())
def test_the_order_of_rows_changes_nothing(rows: list[Row], key: UnitKey, random: Any) -> None:
    before = federation(rows, key).shards["a"]
    random.shuffle(rows)
    after = federation(rows, key).shards["a"]
    assert torch.equal(before.features, after.features)
    assert torch.equal(before.test_features, after.test_features)


def test_the_split_by_row_numbers_moved_many_records() -> None:
    """200 rows, each of which is removed: the permutation of row numbers moved 31 others."""
    rows = [(i, i % 2) for i in range(200)]
    key = UnitKey(b"any")
    _, tests = parts(rows, key)
    for place in (0, 17, 100, 199):
        _, after = parts(rows[:place] + rows[place + 1 :], key)
        assert difference(tests, after) <= 1


# -- persons and gaps ------------------------------------------------------------------------------

PERSONS = st.dictionaries(
    st.text("abc\u00e9", min_size=1, max_size=4),
    st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 9)), st.integers(0, 1)), min_size=1),
    min_size=2,
    max_size=30,
)


def schema(person: bool, most: int = 1) -> Schema:
    columns = {"x": {"type": "number", "missing": "drop"}, "ill": {"type": "boolean"}}
    named = {"person": "who", "records_per_person": most} if person else {}
    return Schema.from_dict({"target": "ill", "columns": columns, **named})


def units(table: dict[str, list[Any]], of: Schema, key: UnitKey) -> Units:
    return units_of(of, ClientTable(table, "table"), key)


def table_of(persons: dict[str, list[Row]]) -> dict[str, list[Any]]:
    rows = [(who, *row) for who, own in persons.items() for row in own]
    return {"who": [r[0] for r in rows], "x": [r[1] for r in rows], "ill": [r[2] for r in rows]}


def sides(made: Units, key: UnitKey) -> tuple[list[bytes], list[bytes]]:
    order = key.order(made.marks)
    cut = units_to_test(len(order))
    return [made.marks[i] for i in order[:cut]], [made.marks[i] for i in order[cut:]]


@given(PERSONS, KEYS, st.integers(1, 3), st.data())
def test_a_person_who_changes_or_is_emptied_moves_nobody(
    persons: dict[str, list[Row]], key: UnitKey, most: int, data: Any
) -> None:
    who = data.draw(st.sampled_from(sorted(persons)))
    other = data.draw(st.sampled_from([[(None, 0)], [(3, 1), (4, 0), (5, 1), (6, 1)]]))
    before = units(table_of(persons), schema(True, most), key)
    after = units(table_of({**persons, who: other}), schema(True, most), key)
    assert sides(before, key) == sides(after, key)
    different = [
        a.tolist() != b.tolist() for a, b in zip(before.features, after.features, strict=True)
    ]
    assert sum(different) <= 1


@given(PERSONS, KEYS, st.data())
def test_a_gap_that_drops_a_record_leaves_a_blank(
    persons: dict[str, list[Row]], key: UnitKey, data: Any
) -> None:
    table = {k: v for k, v in table_of(persons).items() if k != "who"}
    made = units(table, schema(False), key)
    assert len(made.marks) == len(table["x"])
    assert made.blank.tolist() == [x is None for x in table["x"]]
    assert not made.features[made.blank].any() and not made.targets[made.blank].any()
    place = data.draw(st.integers(0, len(table["x"]) - 1))
    emptied = {**table, "x": [*table["x"][:place], None, *table["x"][place + 1 :]]}
    assert len(units(emptied, schema(False), key).marks) == len(made.marks)


def test_a_name_is_one_person_however_its_accents_are_stored() -> None:
    table = {"who": ["Zo\u00eb", "Zoe\u0308 ", "b"], "x": [1, 2, 3], "ill": [0, 1, 1]}
    assert len(units(table, schema(True), UnitKey(b"k")).marks) == 2


# -- blanks ----------------------------------------------------------------------------------------


def test_withdrawn_units_keep_their_place_in_a_study_and_leave_the_next() -> None:
    key = UnitKey(b"k")
    table = {"x": [float(i) for i in range(20)] + [3.0], "ill": [i % 2 for i in range(21)]}
    made = units(table, schema(False), key)
    gone = made.marks[3], made.marks[7]
    study = made.in_study(set(gone), {gone[0]})
    assert len(study.marks) == 20 and study.blank.sum() == 1
    deleted = {k: v[:3] + v[4:] for k, v in table.items()}  # afterwards the row leaves the file
    without = units(deleted, schema(False), key).in_study(set(gone), {gone[0]})
    assert sorted(without.marks) == sorted(study.marks)
    assert without.digest(key, {gone[0]}) == study.digest(key, {gone[0]})
    assert study.digest(key, {gone[0]}) != made.digest(key, set())
    one = Federation.from_arrays({"a": study}, classes=2, key=key).shards["a"]
    other = Federation.from_arrays({"a": without}, classes=2, key=key).shards["a"]
    assert torch.equal(one.features, other.features) and torch.equal(one.labels, other.labels)
    blanks = [] if one.live is None else (~one.live).tolist()
    tests = [] if one.test_live is None else (~one.test_live).tolist()
    assert sum(blanks) + sum(tests) == 1


@pytest.mark.parametrize("changed", ["x", "ill"])
def test_a_digest_names_contents(changed: str) -> None:
    key = UnitKey(b"k")
    table = {"who": ["a", "b", "c"], "x": [1, 2, 3], "ill": [0, 1, 1]}
    before = units(table, schema(True), key).digest(key, set())
    table[changed] = [1, 0, 0]
    assert units(table, schema(True), key).digest(key, set()) != before
    assert units(table, schema(True), UnitKey(b"l")).digest(UnitKey(b"l"), set()) != before


@pytest.mark.parametrize("method", ["weiavg", "fedavg"])
@pytest.mark.parametrize("hidden", [0, 3])
def test_blanks_are_drawn_and_left_out(method: str, hidden: int) -> None:
    """A blank adds nothing, whatever it holds: the model does not depend on it."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(40, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)

    def trained(filling: float) -> torch.Tensor:
        key = UnitKey(b"k")
        from dpfl.data.units import record_units

        made = record_units(x.copy(), y.astype(np.float64), key)
        blank = np.arange(40) % 3 == 0
        made = Units(**{**vars(made), "blank": blank})
        made.features[blank] = filling
        layers = [torch.nn.Linear(4, 2)] if not hidden else [
            torch.nn.Linear(4, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 2)
        ]  # fmt: skip
        torch.manual_seed(1)
        model = torch.nn.Sequential(*layers)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        federation = Federation.from_arrays(
            {"a": made, "b": (x, y)},
            classes=2,
            key=key,
            budgets={c: dpfl.Budget(epsilon=2.0, delta=1e-3) for c in "ab"},
        )
        assert federation.shards["a"].live is not None
        settings: dict[str, Any] = {"lr": 0.3, "batch_size": 5, "local_steps": 3}
        settings |= {"clip": 1.0} if method == "weiavg" else {}
        strategy = getattr(dpfl, method)(**settings)
        result = dpfl.train(model, federation, strategy, rounds=2, seed=1)
        return torch.cat([p.detach().flatten() for p in result.model.parameters()])

    assert torch.equal(trained(0.0), trained(1e6))
