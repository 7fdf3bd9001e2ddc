"""Tables as files hold them: where each record stands, and which cells are missing."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import tomli_w
from pyarrow import parquet

from dpfl.core.errors import ConfigurationError, DataError
from dpfl.core.types import Plain
from dpfl.data.building import ClientTable, units_of
from dpfl.data.cells import MISSING_VALUES
from dpfl.data.columns import Column
from dpfl.data.schema import Schema
from dpfl.data.tables import read_columns, read_file
from dpfl.data.units import UnitKey
from dpfl.privacy.budgets import read_budget_file
from dpfl.runs.data_section import DataSection
from dpfl.runs.deployment import StudySection

# -- lines -----------------------------------------------------------------------------------------

ODD = 'age,remark,ill\n61,"two\nlines",1\n\n47,page\fbreak,0\n\n\n52,"a ""quoted"" \n\n word",1\n33,\x85\u2028,0\n'
"""Line breaks in quotes, blank lines, a form feed, and what some editors call a line's end."""
LINES = {2: "61", 5: "47", 8: "52", 11: "33"}


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_every_record_is_named_by_the_line_on_which_it_begins(ending: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(ODD.replace("\n", ending).encode())
    columns, rows = read_columns(path)
    assert dict(zip(rows, columns["age"], strict=True)) == {
        f"line {line}": age for line, age in LINES.items()
    }
    assert columns["remark"] == ["two\nlines", "page\fbreak", 'a "quoted" \n\n word', "\x85\u2028"]
    lines = ODD.split("\n")
    assert all(lines[line - 1].startswith(age) for line, age in LINES.items())


def test_a_cell_that_cannot_be_read_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(ODD.replace("33", "old"))
    schema = Schema.from_dict(
        {
            "target": "ill",
            "ignore": "remark",
            "columns": {"age": {"type": "number"}, "ill": {"type": "boolean"}},
        }
    )
    columns, rows = read_columns(path)
    with pytest.raises(DataError, match=r"a\.csv, line 11, column 'age': 'old' is not a number"):
        schema.prepare(columns, str(path), rows)
    path.write_text('age,"ill\nor not"\n1,0\n\n2,1\nold,0\n')
    with pytest.raises(DataError, match="line 6, column 'age': 'old' is not a number"):
        read_file(path)
    path.write_text('age,ill\n"1\n",0\n2\n')
    with pytest.raises(DataError, match="line 4 has 1 cells for 2 columns"):
        read_file(path)


def test_a_quote_that_is_not_closed_does_not_swallow_records(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('age,remark\n1,none\n2,"open\n3,none\n4,none\n')
    with pytest.raises(DataError, match=r"line 3: unexpected end of data"):
        read_columns(path)


def test_a_file_of_budgets_is_read_by_the_same_rules(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    path.write_bytes('id,epsilon\r\n"north\x85",1\r\n\r\n"so\futh",2\r\n'.encode())
    assert read_budget_file(path)[0] == {"north": 1.0, "so\futh": 2.0}
    path.write_text("id,epsilon\n\n\nnorth,1\n\nsouth,2,3\n")
    with pytest.raises(ConfigurationError, match="line 6 has 3 cells, not 2"):
        read_budget_file(path)


# -- missing values --------------------------------------------------------------------------------

KINDS: dict[str, Plain] = {
    "number": {"type": "number"},
    "whole": {"type": "whole"},
    "category": {"type": "category", "categories": ["f", "m"]},
    "boolean": {"type": "boolean"},
}
VALUES = {"number": "1.5", "whole": "3", "category": "m", "boolean": "yes"}


def schema(person: str | None = None, **more: Any) -> Schema:
    """A column and a target of every type, of which gaps are dropped."""
    columns = {
        f"{name}{part}": {**own, "missing": "drop"}
        for name, own in KINDS.items()
        for part in ("", " as target")
    }
    chosen = more.pop("target", "boolean as target")
    if person is not None:
        more["person"] = person
    return Schema.from_dict({"target": chosen, "columns": columns, **more})


def table(column: str, cells: list[Any]) -> dict[str, list[Any]]:
    """A table that has these cells in one column, and values in all others."""
    names = [f"{name}{part}" for name in KINDS for part in ("", " as target")]
    whole = {name: [VALUES[name.split()[0]]] * len(cells) for name in names}
    return {**whole, column: cells}


NOTHING = [None, math.nan, pd.NA, pd.NaT, "", "  ", np.float64("nan")]


@pytest.mark.parametrize("kind", KINDS)
def test_one_list_says_what_is_missing_in_every_type_of_column(kind: str) -> None:
    spellings = [*NOTHING, *MISSING_VALUES, " NA ", "n/a", "nan", "NULL", "\tnone\n"]
    cells = [*spellings, VALUES[kind]]
    for column in (kind, f"{kind} as target"):
        prepared = schema(target=f"{kind} as target").prepare(table(column, cells))
        assert prepared.kept.tolist() == [*[False] * len(spellings), True]


@pytest.mark.parametrize("kind", KINDS)
def test_a_schema_may_name_other_missing_values(kind: str) -> None:
    other = schema(missing_values=["unknown", "-9", "2000-01-01"])
    cells = [*NOTHING, " Unknown", "-9", "2000-01-01", VALUES[kind]]
    assert not other.prepare(table(kind, cells)).kept[:-1].any()
    with pytest.raises(DataError, match=f"record 1, column '{kind}': 'n.a.' is not"):
        other.prepare(table(kind, ["n.a."]))
    with pytest.raises(DataError, match=f"record 1, column '{kind}': '\\?' is not"):
        other.prepare(table(kind, ["?"]))


@pytest.mark.parametrize("cells", [["-9.0", "5"], [-9, 5], [-9.0, 5.0], np.array([-9, 5])])
def test_a_number_that_means_missing_does_so_however_it_is_written(cells: Any) -> None:
    made = schema(missing_values=["-9"]).prepare(table("number", [1, 2]) | {"number": cells})
    assert made.kept.tolist() == [False, True]
    whole = Column(name="x", type="whole", range=(0, 9), outside="refuse", missing="indicator")
    assert whole.read("table", cells, (), ["-9"]).tolist()[1:] == [5]


def test_numbers_of_the_caller_are_not_changed() -> None:
    cells = np.array([-9.0, 5.0])
    Column(name="x", type="number").read("table", cells, (), ["-9"])
    assert cells.tolist() == [-9.0, 5.0]


def test_a_category_is_never_missing() -> None:
    region = Column(name="region", type="category", categories=("EU", "NA", "none"))
    assert region.read("table", ["NA", "none", "EU", "", None]).tolist()[:3] == [1, 2, 0]
    assert np.isnan(region.read("table", ["", None, "?"])).all()
    with pytest.raises(DataError, match="'na' is not a category; choose one of EU, NA, none"):
        region.read("table", ["na"])


def test_missing_cells_go_by_the_rule_of_their_column() -> None:
    def encoded(rule: str, **more: Any) -> Any:
        column = Column(name="x", type="number", range=(0, 10), missing=rule, **more)  # type: ignore[arg-type]
        return [part.tolist() for part in column.encode("table", ["NA", "5"])]

    assert encoded("indicator") == [[[0.0, 1.0], [0.5, 0.0]], [True, True]]
    assert encoded("constant", fill=10) == [[[1.0], [0.5]], [True, True]]
    assert encoded("drop")[1] == [False, True]
    with pytest.raises(DataError, match="record 1, column 'x': has no value"):
        encoded("refuse")
    with pytest.raises(ConfigurationError, match="fill = 'NA' is itself missing"):
        encoded("constant", fill="NA")


@pytest.mark.parametrize("person", [*NOTHING, *MISSING_VALUES])
def test_records_whose_person_is_missing_are_not_one_persons(person: object) -> None:
    cells = table("number", ["1", "2"]) | {"who": ["a", person]}
    with pytest.raises(DataError, match="record 2 names no person in 'who'"):
        schema("who").prepare(cells)


def test_a_schema_may_allow_persons_with_such_an_id() -> None:
    cells = table("number", ["1", "2"]) | {"who": ["a", "NA"]}
    assert schema("who", missing_values=["?"]).prepare(cells).persons == ["a", "NA"]


def test_files_without_a_schema_have_the_same_missing_values(tmp_path: Path) -> None:
    for text in ("?", "NA", "", '"n/a"'):
        (tmp_path / "a.csv").write_text(f"age,ill\n1,0\n{text},1\n")
        with pytest.raises(DataError, match="line 3, column 'age': has no value; fill it in"):
            read_file(tmp_path / "a.csv")


def test_a_gap_is_one_value_in_the_identity_of_a_unit() -> None:
    key = UnitKey(bytes(32))

    def marks(*gaps: Any) -> list[bytes]:
        cells = ClientTable(table("number", [*gaps, "1", "2"]), "table")
        units = units_of(schema(), cells, key)
        assert units.blank.tolist() == [True, True, False, False]
        return list(units.marks)

    assert marks("", "") == marks("NA", "?") == marks(None, math.nan)


# -- where the setting travels ---------------------------------------------------------------------


def test_missing_values_travel_with_the_schema() -> None:
    told = schema(missing_values=["-9", ""]).to_dict()
    assert told["missing_values"] == ["-9", ""]
    for copy in (json.loads(json.dumps(told)), tomllib.loads(tomli_w.dumps(told))):
        assert Schema.from_dict(copy).missing_values == ("-9", "")
    study: Any = {"name": "s", "sites": ["a"], "schema": told}
    data: Any = {"folder": "sites", "schema": told}
    for described in (StudySection(**study).described(), DataSection(**data).described()):
        assert described is not None and described.missing_values == ("-9", "")
    assert schema().difference(schema(missing_values=["-9"])) == "missing_values"


def test_a_schema_that_names_none_is_written_as_before() -> None:
    assert "missing_values" not in schema().to_dict()
    assert schema(missing_values=list(MISSING_VALUES)) == schema()
    assert schema(missing_values="-9").missing_values == ("-9",)
    with pytest.raises(ConfigurationError, match="missing_values = 'NA' is not a list"):
        Schema(columns=schema().columns, target=("boolean",), missing_values="NA")  # type: ignore[arg-type]


# -- Parquet ---------------------------------------------------------------------------------------


def test_large_whole_numbers_of_a_parquet_file_are_not_rounded(tmp_path: Path) -> None:
    large = 2**60 + 1
    cells = {"who": [large, large + 1], "often": [1, None], "ill": [True, False]}
    parquet.write_table(pa.table(cells), tmp_path / "a.parquet")
    columns, rows = read_columns(tmp_path / "a.parquet")
    assert [int(cell) for cell in columns["who"]] == [large, large + 1]
    assert list(columns["often"]) == [1, None] and list(columns["ill"]) == [True, False]
    assert rows == ["record 1", "record 2"]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    twice = pa.Table.from_arrays([pa.array([1, 2]), pa.array([3, 4])], names=["age", "age"])
    parquet.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read .*age"):
        read_columns(tmp_path / "a.parquet")
