"""A schema: what the columns of a table hold, and how records become features by public constants.

It is written once, without looking at the data, and is the same for all clients. It travels with
the model, so that whoever predicts prepares records as they were prepared for training.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from dpfl.core.checks import check, whole_number
from dpfl.core.errors import ConfigurationError, DataError, did_you_mean
from dpfl.core.files import text_of
from dpfl.core.types import Plain, Unit, unit_called
from dpfl.data.cells import (
    MISSING_VALUES,
    column_names,
    column_of,
    missing_texts,
    person_id,
)
from dpfl.data.columns import Column, by_name, known_keys, listed
from dpfl.data.records import check_data


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A table as arrays: features (records, features), targets, and whose record each is.

    ``kept`` says which records no rule for missing values drops. ``values`` are the cells as they
    were read (records, columns), in the schema's order; a gap is NaN. ``persons`` are ids as text,
    None where the schema names no persons.
    """

    features: np.ndarray
    targets: np.ndarray
    kept: np.ndarray
    values: np.ndarray
    persons: list[str] | None


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Columns by name, which of them is the target, and whose records they are.

    ``columns`` are features in this order, but for those named in ``target``. ``person`` names the
    column of a person's id: privacy is then promised to persons, who go by ``person_word``, and at
    most ``records_per_person`` records of each are used. Columns in ``ignore`` may be in a table
    and are not used; any other column that the schema does not know is refused. Empty cells and
    ``missing_values`` are missing in every column, but for those that are among its categories.

    >>> columns = (
    ...     Column(name="age", type="number", unit="years", range=(0, 100)),
    ...     Column(name="sex", type="category", categories=("f", "m")),
    ...     Column(name="ill", type="boolean"),
    ... )
    >>> schema = Schema(columns=columns, target=("ill",))
    >>> features, targets = schema.transform({"age": [50, 30], "sex": ["m", "f"], "ill": [1, 0]})
    >>> features.tolist(), targets.tolist()
    ([[0.5, 0.0, 1.0], [0.30000001192092896, 1.0, 0.0]], [1, 0])
    """

    columns: tuple[Column, ...]
    target: tuple[str, ...]
    person: str | None = None
    person_word: str = "person"
    records_per_person: int = 1
    ignore: tuple[str, ...] = ()
    missing_values: tuple[str, ...] = MISSING_VALUES

    def __post_init__(self) -> None:
        missing_values = listed("schema", "missing_values", self.missing_values)
        object.__setattr__(self, "missing_values", missing_values)
        names = [column.name for column in self.columns]
        known = set(names)
        check(
            len(known) == len(names),
            "schema",
            f"two columns have one name among {', '.join(names)}",
            "name each column once",
        )
        check(bool(self.target), "schema", "has no target", "name the column to be predicted")
        for name in self.target:
            if name not in known:
                raise ConfigurationError(
                    "schema",
                    f"its target '{name}' is not among its columns",
                    did_you_mean(name, names),
                )
        check(bool(self.inputs), "schema", "has no column beside its target", "add one")
        for column in self.outcomes:
            check(
                column.missing != "indicator",
                f"schema, column '{column.name}'",
                "is a target, and a missing target cannot be an indicator",
                "drop or refuse the record",
            )
        check(
            len(self.target) == 1 or {c.type for c in self.outcomes} in ({"boolean"}, {"number"}),
            "schema",
            "its targets are of several kinds, or are several categories",
            "give one target, or several numbers, or several booleans",
        )
        taken = self.person in names
        check(not taken, "schema", f"the person '{self.person}' is a column", "leave it out there")
        whole_number("schema", "records_per_person", self.records_per_person)
        word = unit_called(self.person_word)
        check(
            word is not Unit.RECORD,
            "schema",
            "a person cannot go by 'record'",
            "give a word such as 'patient'",
        )

    # -- what it says ------------------------------------------------------------------------------

    @property
    def inputs(self) -> tuple[Column, ...]:
        """The columns that become features."""
        targets = set(self.target)
        return tuple(column for column in self.columns if column.name not in targets)

    @property
    def outcomes(self) -> tuple[Column, ...]:
        """The columns that are targets, in the order of ``target``."""
        by_name = {column.name: column for column in self.columns}
        return tuple(by_name[name] for name in self.target)

    @property
    def unit(self) -> Unit:
        """Whose presence is hidden by what protects single units of the data."""
        return Unit.RECORD if self.person is None else Unit(self.person_word)

    @property
    def single(self) -> bool:
        """Whether every unit is a single record."""
        return self.person is None or self.records_per_person == 1

    def difference(self, other: Schema) -> str | None:
        """Name what ``other`` says otherwise of the columns that are used, None if nothing."""
        names = [f.name for f in fields(self) if f.name not in ("columns", "ignore")]
        told = [name for name in names if getattr(self, name) != getattr(other, name)]
        pairs = zip_longest(self.columns, other.columns)
        told += [f"column '{(one or two).name}'" for one, two in pairs if one != two]
        return told[0] if told else None

    @property
    def feature_names(self) -> tuple[str, ...]:
        """What each feature is about.

        >>> ill = Column(name="ill", type="boolean")
        >>> sex = Column(name="sex", type="category", categories=("f", "m"))
        >>> Schema(columns=(sex, ill), target=("ill",)).feature_names
        ('sex = f', 'sex = m')
        """
        return tuple(f"{column.name}{own}" for column in self.inputs for own in column.names)

    @property
    def classes(self) -> int | None:
        """How many classes one target has; None where it is a number, or there are several."""
        first = self.outcomes[0]
        if len(self.target) > 1 or first.type in ("number", "whole"):
            return None
        return 2 if first.type == "boolean" else len(first.categories)

    # -- what it does ------------------------------------------------------------------------------

    def transform(self, table: Any, where: str = "table") -> tuple[np.ndarray, np.ndarray]:
        """Return features (float32) and targets of a table.

        ``table``: a pandas or polars frame, an Arrow table, a Hugging Face dataset or a dict of
        columns. ``where`` names it in messages. Records that the rules for missing values drop are
        left out of both.
        """
        prepared = self.prepare(table, where)
        return prepared.features[prepared.kept], prepared.targets[prepared.kept]

    def features(self, table: Any, where: str = "table", rows: Sequence[str] = ()) -> np.ndarray:
        """Return the features (float32) of a table that needs no target: for predictions.

        One row a record: where a rule would drop a record, it is refused. ``where`` and ``rows``
        name the table and its records in messages.
        """
        self._check_columns(table, where, [column.name for column in self.inputs])
        values = self._read(self.inputs, table, where, rows)
        features, kept = self._features(values, where, rows)
        for row in np.flatnonzero(~kept).tolist():
            raise DataError(
                f"{where}, {rows[row] if rows else f'record {row + 1}'}",
                "lacks a value without which nothing is predicted",
                "fill it in, or leave the record out: the schema drops it from training",
            )
        return features

    def prepare(
        self,
        table: Any,
        where: str = "table",
        rows: Sequence[str] = (),
        also: Sequence[str] = (),
    ) -> Prepared:
        """Return a table as arrays, with the ids of persons where the schema names them.

        ``rows`` say where each record stands in its file, for messages. Columns in ``also`` may be
        in the table.
        """
        person = [self.person] if self.person is not None else []
        needed = [*(column.name for column in self.columns), *person]
        self._check_columns(table, where, needed)
        for name in column_names(table):
            if name not in (*needed, *self.ignore, *also):
                near = did_you_mean(name, [column.name for column in self.columns])
                raise DataError(
                    where,
                    f"has a column '{name}' that the schema does not know",
                    f"{near} Else " * near.endswith("?") + "add it to the schema, or to ignore",
                )
        values = self._read(self.columns, table, where, rows)
        features, kept = self._features(values, where, rows)
        targets = []
        for column in self.outcomes:
            target, there = column.as_target(where, values[column.name], rows)
            targets.append(target)
            kept = kept & there
        persons = None
        if self.person is not None:
            persons = [person_id(cell) for cell in column_of(table, self.person)]
            gaps = missing_texts(self.missing_values)
            for row, name in enumerate(persons):
                if name.casefold() in gaps:
                    place = rows[row] if rows else f"record {row + 1}"
                    raise DataError(
                        where,
                        f"{place} names no {self.person_word} in '{self.person}'",
                        "every record needs one",
                    )
        return Prepared(
            features=features,
            targets=targets[0] if len(targets) == 1 else np.stack(targets, axis=1),
            kept=kept,
            values=np.stack(list(values.values()), axis=1),
            persons=persons,
        )

    def _read(
        self, columns: Iterable[Column], table: Any, where: str, rows: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """Read the cells of columns as numbers, by the columns' names."""
        values = {}
        for column in columns:
            cells = column_of(table, column.name)
            values[column.name] = column.read(where, cells, rows, self.missing_values)
        lengths = {len(column) for column in values.values()}
        check_data(
            len(lengths) == 1,
            where,
            f"its columns have different lengths {sorted(lengths)}",
            "give one cell per record in each column",
        )
        return values

    def _features(
        self, values: Mapping[str, np.ndarray], where: str, rows: Sequence[str]
    ) -> tuple[np.ndarray, np.ndarray]:
        encoded = [c.as_features(where, values[c.name], rows) for c in self.inputs]
        features = np.concatenate([block for block, _ in encoded], axis=1).astype(np.float32)
        return features, np.logical_and.reduce([kept for _, kept in encoded])

    def _check_columns(self, table: Any, where: str, needed: Sequence[str]) -> None:
        names = column_names(table)
        for name in needed:
            check_data(
                name in names,
                where,
                f"has no column '{name}'",
                did_you_mean(name, names).replace("choose one of", "add it; its columns are"),
            )

    # -- as a file ---------------------------------------------------------------------------------

    def to_dict(self) -> Plain:
        """Return plain values, for JSON or TOML; the order of the columns is kept."""
        values: Plain = {"target": list(self.target)}
        if self.person is not None:
            values |= {"person": self.person, "person_word": self.person_word}
            values["records_per_person"] = self.records_per_person
        if self.ignore:
            values["ignore"] = list(self.ignore)
        if self.missing_values != MISSING_VALUES:
            values["missing_values"] = list(self.missing_values)
        return {**values, "columns": {column.name: column.to_dict() for column in self.columns}}

    def to_lists(self) -> Plain:
        """Return the same with a list of columns: a digest sorts the keys of tables."""
        values = self.to_dict()
        columns = [{"name": name, **column} for name, column in values["columns"].items()]
        return {**values, "columns": columns}

    @classmethod
    def from_dict(cls, values: Plain, where: str = "schema") -> Schema:
        """Read back what :meth:`to_dict` wrote, or what a person did; ``where`` names the source.

        >>> Schema.from_dict({"target": "ill", "columns": {"ill": {"type": "bolean"}}})
        Traceback (most recent call last):
        dpfl.core.errors.ConfigurationError: schema, column 'ill': type = 'bolean'; did you mean \
'boolean'?
        """
        given = dict(
            known_keys(where, values, [f.name for f in fields(cls)], ["target", "columns"])
        )
        columns = by_name(where, given.pop("columns"))
        check(
            isinstance(columns, Mapping),
            where,
            "its columns are not tables",
            "write a table [columns.NAME] for each column",
        )
        made = [Column.from_dict(name, own, where) for name, own in columns.items()]
        for name in given.keys() & {"target", "ignore", "missing_values"}:
            own = given[name]
            given[name] = listed(where, name, [own] if isinstance(own, str) else own)
        return cls(columns=tuple(made), **given)

    @classmethod
    def read(cls, path: Path | str) -> Schema:
        """Read a schema from a TOML file."""
        try:
            return cls.from_dict(tomllib.loads(text_of(Path(path))), str(path))
        except OSError as error:
            raise ConfigurationError(
                str(path), f"cannot be read ({error.strerror})", "check the path"
            ) from error
        except (ValueError, RecursionError) as error:  # or a number of thousands of digits
            raise ConfigurationError(str(path), f"is not TOML ({error})", "fix it") from error
