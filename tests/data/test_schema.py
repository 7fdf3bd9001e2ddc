"""Schemas: laws of the transform, round trips, and one clear sentence for whatever is wrong."""

import json
import math
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import tomli_w
from hypothesis import assume, given, strategies as st

from dpfl.core.errors import ConfigurationError, DataError
from dpfl.core.types import Plain
from dpfl.data.columns import Column
from dpfl.data.schema import Schema

PLAIN: Plain = {
    "target": "ill",
    "columns": {
        "age": {"type": "number", "unit": "years", "range": [0, 100], "missing": "indicator"},
        "visits": {"type": "whole", "missing": "constant", "fill": 1},
        "sex": {"type": "category", "categories": ["f", "m"]},
        "smoker": {"type": "boolean", "missing": "drop"},
        "ill": {"type": "category", "categories": ["no", "yes"]},
    },
}
SCHEMA = Schema.from_dict(PLAIN)
TABLE: dict[str, list[Any]] = {
    "age": [50, None, 120],
    "visits": [3, 2, None],
    "sex": ["m", "f", "f"],
    "smoker": [True, False, True],
    "ill": ["yes", "no", "no"],
}
FEATURES = [[0.5, 0, 3, 0, 1, 1], [0, 1, 2, 1, 0, 0], [1, 0, 1, 1, 0, 1]]

NAMES = st.text("abcdefgh _", min_size=1, max_size=6)
NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)


@st.composite
def columns(draw: st.DrawFn, name: str, target: bool = False) -> Column:
    kind = draw(st.sampled_from(["number", "whole", "category", "boolean"]))
    values: Plain = {"name": name, "type": kind, "unit": draw(st.sampled_from(["", "mmHg"]))}
    if kind in ("number", "whole") and draw(st.booleans()):
        low = draw(st.integers(-50, 50))
        values["range"] = (low, low + draw(st.integers(1, 100)))
    if kind == "category":
        kinds = st.lists(st.text("abc", min_size=1), min_size=1, max_size=4, unique=True)
        values["categories"] = tuple(draw(kinds))
        values["encoding"] = draw(st.sampled_from(["one_hot", "index"]))
    rules = (
        ["refuse", "constant", "drop"] if target else ["refuse", "constant", "indicator", "drop"]
    )
    values["missing"] = draw(st.sampled_from(rules))
    if values["missing"] == "constant":
        fills: dict[str, Any] = {"number": 0.5, "whole": 2, "boolean": 1.0}
        values["fill"] = fills.get(kind) if kind != "category" else values["categories"][0]
    return Column(**values)


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    names = draw(st.lists(NAMES, min_size=2, max_size=5, unique=True))
    made = [draw(columns(name, target=name == names[-1])) for name in names]
    more: Plain = {}
    if draw(st.booleans()):
        more = {"person": "person id", "person_word": "patient"}
        more["records_per_person"] = draw(st.integers(1, 5))
    ignore = tuple(draw(st.lists(st.sampled_from(["x1", "x2"]), unique=True)))
    return Schema(columns=tuple(made), target=(names[-1],), ignore=ignore, **more)


def cells(column: Column) -> st.SearchStrategy[Any]:
    """What a column may hold, as people write it."""
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "category": st.sampled_from(column.categories or ("none",)),
        "number": NUMBERS | NUMBERS.map(str),
        "whole": st.integers(-1000, 1000) | st.integers(-1000, 1000).map(float),
        "boolean": st.sampled_from([True, False, 1, 0, "yes", "No", "TRUE", 0.0]),
    }
    found = kinds[column.type]
    return found if column.missing == "refuse" else found | st.sampled_from([None, "", math.nan])


@st.composite
def tables(draw: st.DrawFn, schema: Schema, least: int = 1) -> dict[str, list[Any]]:
    count = draw(st.integers(least, 6))
    rows = {"min_size": count, "max_size": count}
    found = {c.name: draw(st.lists(cells(c), **rows)) for c in schema.columns}
    if schema.person is not None:
        found[schema.person] = draw(st.lists(st.integers(0, 3), **rows))
    return found


# -- laws ------------------------------------------------------------------------------------------


@given(schemas())
def test_a_schema_comes_back_from_json_and_toml_as_it_was(schema: Schema) -> None:
    plain = schema.to_dict()
    assert Schema.from_dict(json.loads(json.dumps(plain))) == schema
    assert Schema.from_dict(tomllib.loads(tomli_w.dumps(plain))) == schema
    assert list(json.loads(json.dumps(plain))["columns"]) == [c.name for c in schema.columns]


@given(st.data())
def test_a_record_becomes_the_same_features_whoever_else_is_in_the_table(
    data: st.DataObject,
) -> None:
    schema = data.draw(schemas())
    table = data.draw(tables(schema, least=2))
    count = len(next(iter(table.values())))
    alone = [
        schema.transform({n: own[i : i + 1] for n, own in table.items()}) for i in range(count)
    ]
    features, targets = schema.transform(table)
    assert np.array_equal(features, np.concatenate([x for x, _ in alone]))
    assert np.array_equal(targets, np.concatenate([y for _, y in alone]))
    assert features.dtype == np.float32 and features.shape[1] == len(schema.feature_names)
    assert np.isfinite(features).all()


@given(st.data())
def test_numbers_with_a_range_become_features_between_0_and_1(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    features, _ = schema.transform(data.draw(tables(schema)))
    at = 0
    for column in schema.inputs:
        width = len(column.names)
        if column.range is not None or column.type == "boolean" or column.encoding == "one_hot":
            own = features[:, at : at + width]
            assume(column.type not in ("number", "whole") or column.range is not None)
            assert ((own >= 0) & (own <= 1)).all()
        at += width


@given(st.data())
def test_predicting_prepares_records_as_training_does(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    table = data.draw(tables(schema))
    features, _ = schema.transform(table)
    assume(len(features) == len(next(iter(table.values()))))  # nothing is dropped
    asked = {c.name: table[c.name] for c in schema.inputs}
    assert np.array_equal(schema.features(asked), features)


# -- examples --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made", [dict, pd.DataFrame, lambda t: pl.DataFrame(t, strict=False), pa.table]
)
def test_every_kind_of_table_gives_the_same_arrays(made: Any) -> None:
    features, targets = SCHEMA.transform(made(TABLE))
    assert features.tolist() == FEATURES and targets.tolist() == [1, 0, 0]
    names = ["age", "age is missing", "visits", "sex = f", "sex = m", "smoker"]
    assert list(SCHEMA.feature_names) == names and SCHEMA.classes == 2


def test_a_dataset_of_hugging_face_is_a_table() -> None:
    datasets = pytest.importorskip("datasets")
    features, _ = SCHEMA.transform(datasets.Dataset.from_dict(TABLE))
    assert features.tolist() == FEATURES


def test_numbers_that_lost_their_type_are_still_categories() -> None:
    grade = Column(name="grade", type="category", categories=("1", "2"), encoding="index")
    assert grade.encode("table", np.array([1.0, 2.0]))[0].tolist() == [[0.0], [1.0]]


def test_records_are_dropped_from_features_targets_and_persons_alike() -> None:
    schema = Schema.from_dict({**PLAIN, "person": "who"})
    made = schema.prepare({**TABLE, "smoker": [True, None, False], "who": [7, 8, 9.0]})
    assert made.kept.tolist() == [True, False, True]
    features, targets = made.features[made.kept], made.targets[made.kept]
    assert features.tolist()[0] == FEATURES[0] and len(features) == len(targets) == 2
    assert targets.tolist() == [1, 0]
    assert made.persons == ["7", "8", "9"]


def test_targets_that_are_numbers_keep_their_unit_and_several_are_columns() -> None:
    kinds: Plain = {n: {"type": "number", "range": [0, 200]} for n in ("low", "high", "x")}
    schema = Schema.from_dict({"target": ["high", "low"], "columns": kinds})
    _, targets = schema.transform({"low": [80], "high": [250], "x": [1]})
    assert targets.tolist() == [[200.0, 80.0]] and schema.classes is None


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target": "il"}, "target 'il'.*did you mean 'ill'"),
        ({"target": []}, "no target"),
        ({"traget": 3}, "no key 'traget'.*did you mean 'target'"),
        ({"records_per_person": 0}, "records_per_person = 0"),
        ({"person": "age"}, "'age' is a column"),
        ({"person": "who", "person_word": "record"}, "'record'"),
        ({"person": "who", "person_word": "client"}, "'client'"),
        ({"columns": {"ill": {"type": "boolean"}}}, "no column beside its target"),
        ({"columns": 3}, "not tables"),
    ],
)
def test_a_schema_that_cannot_be_is_refused(change: Plain, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as refusal:
        Schema.from_dict({**PLAIN, **change})
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ({"type": "numbr"}, "type = 'numbr'.*did you mean 'number'"),
        ({}, "'type' is missing"),
        ({"type": "number", "range": [5, 5]}, r"range = \(5, 5\) is impossible"),
        ({"type": "number", "range": [9, 5]}, "impossible"),
        ({"type": "number", "range": [0, "x"]}, "impossible"),
        ({"type": "number", "range": [0, math.inf]}, "impossible"),
        ({"type": "number", "range": 5}, "impossible"),
        ({"type": "boolean", "range": [0, 1]}, "a boolean has no range"),
        ({"type": "category"}, "has no categories"),
        ({"type": "category", "categories": ["a", "a"]}, "name one twice"),
        ({"type": "category", "categories": "abc"}, "is not a list"),
        ({"type": "number", "categories": ["a"]}, "a number has no categories"),
        ({"type": "number", "missing": "median"}, "missing = 'median'"),
        ({"type": "number", "missing": "constant"}, "fill = None"),
        ({"type": "number", "fill": 3}, "fill = 3"),
        ({"type": "number", "missing": "constant", "fill": "x"}, "'x' is not a number"),
        ({"type": "number", "outside": "drop"}, "outside = 'drop'"),
        ({"type": "number", "scale": 3}, "no key 'scale'"),
    ],
)
def test_a_column_that_cannot_be_is_refused_by_name(column: Plain, words: str) -> None:
    given = {**PLAIN, "columns": {**PLAIN["columns"], "dose": column}}
    with pytest.raises((ConfigurationError, DataError), match=f"column 'dose'.*{words}|{words}"):
        Schema.from_dict(given)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"age": [50, "old", 1]}, "record 2, column 'age': 'old' is not a number"),
        ({"age": [50, math.inf, 1]}, "record 2, column 'age': inf is not finite"),
        ({"visits": [1, 2, 2.5]}, "record 3, column 'visits': 2.5 is not a whole number"),
        ({"sex": ["m", "ff", "f"]}, "record 2, column 'sex': 'ff' is not a category"),
        ({"sex": ["m", None, "f"]}, "record 2, column 'sex': has no value"),
        (
            {"smoker": ["perhaps", 1, 0]},
            "record 1, column 'smoker': 'perhaps' is not true or false",
        ),
        ({"age": [1, 2]}, r"different lengths \[2, 3\]"),
        ({"agee": [1, 2, 3]}, "column 'agee' that the schema does not know; did you mean 'age'"),
    ],
)
def test_a_cell_that_does_not_fit_is_named(change: dict[str, list[Any]], words: str) -> None:
    with pytest.raises(DataError, match=words) as refusal:
        SCHEMA.transform({**TABLE, **change})
    assert refusal.value.exit_code == 3


def test_a_column_that_is_missing_is_named_with_the_nearest_one() -> None:
    table = {("gae" if name == "age" else name): own for name, own in TABLE.items()}
    with pytest.raises(DataError, match="no column 'age'; did you mean 'gae'"):
        SCHEMA.transform(table)


def test_values_outside_the_range_are_refused_where_the_schema_says_so() -> None:
    age = {**PLAIN["columns"]["age"], "outside": "refuse"}
    schema = Schema.from_dict({**PLAIN, "columns": {**PLAIN["columns"], "age": age}})
    with pytest.raises(
        DataError, match="record 3, column 'age': 120 is outside the range 0 to 100"
    ):
        schema.transform(TABLE)


def test_nothing_is_predicted_where_the_schema_would_drop_the_record() -> None:
    with pytest.raises(DataError, match="record 2: lacks a value"):
        SCHEMA.features({**TABLE, "smoker": [True, None, True]})


def test_a_person_without_an_id_is_refused() -> None:
    schema = Schema.from_dict({**PLAIN, "person": "who", "person_word": "patient"})
    with pytest.raises(DataError, match="record 2 names no patient in 'who'"):
        schema.prepare({**TABLE, "who": ["a", None, "b"]})


def test_a_schema_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent\.toml: cannot be read"):
        Schema.read(tmp_path / "absent.toml")
    (tmp_path / "odd.toml").write_text("target = ")
    with pytest.raises(ConfigurationError, match=r"odd\.toml: is not TOML"):
        Schema.read(tmp_path / "odd.toml")
    (tmp_path / "good.toml").write_text(tomli_w.dumps(PLAIN))
    assert Schema.read(tmp_path / "good.toml") == SCHEMA


def seconds_to_read(targets: int) -> float:
    columns = {f"c{i}": {"type": "number", "range": [0, 1]} for i in range(targets + 1)}
    values = {"target": [f"c{i}" for i in range(targets)], "columns": columns}
    began = time.process_time()
    assert len(Schema.from_dict(values).inputs) == 1
    return time.process_time() - began


def test_the_time_to_read_a_schema_grows_with_its_columns_and_not_with_their_square() -> None:
    few, many = (min(seconds_to_read(count) for _ in range(3)) for count in (2_000, 16_000))
    assert many < 25 * few
