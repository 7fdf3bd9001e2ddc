"""Columns of a table, and how one becomes features by public constants."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from dpfl.core.checks import check, finite, one_of
from dpfl.core.errors import DataError, did_you_mean
from dpfl.core.types import Plain
from dpfl.data.cells import MISSING_VALUES, cell_text, missing_texts

TYPES = ("number", "whole", "category", "boolean")
MISSING = ("refuse", "constant", "indicator", "drop")
_TRUTH = {"1": 1.0, "true": 1.0, "yes": 1.0, "0": 0.0, "false": 0.0, "no": 0.0}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: what it holds, and how it becomes features.

    ``type``: "number", "whole" (a whole number), "category" or "boolean". ``unit`` is the unit of
    measurement, for people. ``range`` of numbers: a feature is scaled from it to 0..1, and what
    lies ``outside`` is clipped to it or refused. ``categories`` become one feature each
    (``encoding`` "one_hot"), or one feature that holds the number of the category ("index").

    ``missing`` cells are refused, replaced by the constant ``fill``, turned into zeros with one
    more feature that says so ("indicator"), or their record is left out ("drop").

    All of these are constants that must not be chosen by looking at the data.

    >>> age = Column(name="age", type="number", unit="years", range=(0, 120), missing="indicator")
    >>> age.encode("table", [30, None, 150])[0].tolist()
    [[0.25, 0.0], [0.0, 1.0], [1.0, 0.0]]
    """

    name: str
    type: Literal["number", "whole", "category", "boolean"]
    unit: str = ""
    range: tuple[float, float] | None = None
    categories: tuple[str, ...] = ()
    encoding: Literal["one_hot", "index"] = "one_hot"
    missing: Literal["refuse", "constant", "indicator", "drop"] = "refuse"
    fill: float | str | None = None
    outside: Literal["clip", "refuse"] = "clip"

    def __post_init__(self) -> None:
        where = f"schema, column '{self.name}'"
        object.__setattr__(self, "categories", tuple(map(cell_text, self.categories)))
        one_of(where, TYPES, type=self.type)
        one_of(where, ("one_hot", "index"), encoding=self.encoding)
        one_of(where, MISSING, missing=self.missing)
        one_of(where, ("clip", "refuse"), outside=self.outside)
        numeric = self.type in ("number", "whole")
        category = self.type == "category"
        if self.range is not None:
            check(numeric, where, f"a {self.type} has no range", "leave the range out")
            pair = isinstance(self.range, tuple) and len(self.range) == 2
            check(
                pair and all(map(_real, self.range)) and self.range[0] < self.range[1],
                where,
                f"range = {self.range} is impossible",
                "give two numbers, the smaller one first",
            )
        check(
            category == bool(self.categories),
            where,
            "has no categories" if category else f"a {self.type} has no categories",
            "list the categories of a column of type 'category'",
        )
        check(
            len({*self.categories} - {""}) == len(self.categories),
            where,
            f"categories = {list(self.categories)} name one twice, or none",
            "list each category once",
        )
        check(
            (self.missing == "constant") == (self.fill is not None),
            where,
            f"missing = '{self.missing}' and fill = {self.fill!r}",
            "give a fill where missing = 'constant', and only there",
        )
        if self.fill is not None:
            (fill,) = self.read("schema", [self.fill], ["fill"])
            check(
                not math.isnan(fill),
                where,
                f"fill = {self.fill!r} is itself missing",
                "give a value",
            )

    @property
    def names(self) -> tuple[str, ...]:
        """What each of the features is about, as a suffix of the column's name."""
        own: tuple[str, ...] = ("",)
        if self.type == "category" and self.encoding == "one_hot":
            own = tuple(f" = {category}" for category in self.categories)
        return (*own, " is missing") if self.missing == "indicator" else own

    def encode(
        self, where: str, cells: Iterable[Any], rows: Sequence[str] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the features (records, features) of a column, and which records are kept.

        ``where`` says whose table it is, ``rows`` where each record stands in its file.
        """
        return self.as_features(where, self.read(where, cells, rows), rows)

    def as_features(
        self, where: str, values: np.ndarray, rows: Sequence[str] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the features of cells that were read, and which records are kept."""
        values, kept = self._filled(where, values, rows)
        absent = np.isnan(values)
        if self.range is not None:
            low, high = self.range
            values = (values - low) / (high - low)
        if self.type == "category" and self.encoding == "one_hot":
            features = (values[:, None] == np.arange(len(self.categories))).astype(np.float64)
        else:
            features = np.where(absent, 0.0, values)[:, None]
        if self.missing == "indicator":
            features = np.concatenate([features, absent[:, None]], axis=1)
        return features, kept

    def as_target(
        self, where: str, values: np.ndarray, rows: Sequence[str] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return cells that were read as a target (records,), and which records are kept.

        Classes are numbered from 0; a number is clipped to its range, and keeps its unit.
        """
        values, kept = self._filled(where, values, rows)
        if self.type in ("category", "boolean"):
            return np.nan_to_num(values).astype(np.int64), kept
        return values, kept

    def _filled(
        self, where: str, values: np.ndarray, rows: Sequence[str]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The values with the rule for missing ones applied, and which records are kept."""
        absent = np.isnan(values)
        kept = np.ones(len(values), dtype=bool)
        if self.missing == "constant":
            (fill,) = self.read(where, [self.fill])
            values = np.where(absent, fill, values)
        elif self.missing == "drop":
            kept = ~absent
        elif self.missing == "refuse" and absent.any():
            raise DataError(
                self._at(where, int(absent.argmax()), rows),
                "has no value",
                "fill it in, or give the column of a schema a rule for missing values",
            )
        return values, kept

    def read(
        self,
        where: str,
        cells: Iterable[Any],
        rows: Sequence[str] = (),
        missing_values: Iterable[str] = MISSING_VALUES,
    ) -> np.ndarray:
        """Read cells as numbers (a category by its place in the list), nan where there is none.

        Empty cells, None and nan are missing, and so are ``missing_values``, unless they are
        categories of this column. In a column of numbers -9.0 is missing where -9 is.
        """
        gaps = missing_texts(missing_values)
        gaps -= {category.casefold() for category in self.categories}
        codes: Mapping[str, float] | None = _TRUTH if self.type == "boolean" else None
        if self.type == "category":
            codes = {category: float(place) for place, category in enumerate(self.categories)}
        array = isinstance(cells, np.ndarray) and cells.ndim == 1 and cells.dtype.kind in "iuf"
        if array and codes is None:
            values = np.asarray(cells, dtype=np.float64)
        else:
            values = self._parsed(where, cells, codes, rows, gaps)
        if codes is None:
            values = np.where(np.isin(values, [*_numbers_among(gaps)]), np.nan, values)
            self._check_numbers(where, values, rows)
            if self.range is not None:
                values = np.clip(values, *self.range)
        return values

    def _parsed(
        self,
        where: str,
        cells: Iterable[Any],
        codes: Mapping[str, float] | None,
        rows: Sequence[str],
        gaps: Collection[str],
    ) -> np.ndarray:
        """Read cells one by one; a cell that cannot be read is named."""
        found = []
        for row, cell in enumerate(cells):
            text = cell_text(cell)
            if text.casefold() in gaps:
                found.append(math.nan)
                continue
            try:
                if codes is None:
                    found.append(float(cell))
                else:
                    found.append(codes[text if self.categories else text.lower()])
            except (TypeError, ValueError, KeyError, OverflowError) as error:
                place = self._at(where, row, rows)
                shown = text[:40]
                if self.type == "category":
                    raise DataError(
                        place, f"'{shown}' is not a category", did_you_mean(text, self.categories)
                    ) from error
                what = "a number"
                remedy = "correct it, or add it to the schema's missing_values"
                if self.type == "boolean":
                    what = "true or false"
                    remedy = "give true or false, yes or no, 1 or 0"
                raise DataError(place, f"'{shown}' is not {what}", remedy) from error
        return np.array(found, dtype=np.float64)

    def _check_numbers(self, where: str, values: np.ndarray, rows: Sequence[str]) -> None:
        """Refuse numbers that are not finite, not whole, or outside the range."""
        low, high = self.range or (-math.inf, math.inf)
        infinite = np.isinf(values) | (np.abs(values) > np.finfo(np.float32).max)
        broken = (values != np.round(values)) & ~np.isnan(values) & (self.type == "whole")
        outside = ((values < low) | (values > high)) & (self.outside == "refuse")
        limits = f"outside the range {low:g} to {high:g}"
        for wrong, what, remedy in (
            (infinite, "not finite", "give finite numbers of at most 1e38"),
            (broken, "not a whole number", "declare it as a number, or correct it"),
            (outside, limits, "correct it, or say outside = 'clip'"),
        ):
            if wrong.any():
                row = int(wrong.argmax())
                raise DataError(self._at(where, row, rows), f"{values[row]:g} is {what}", remedy)

    def _at(self, where: str, row: int, rows: Sequence[str]) -> str:
        place = rows[row] if rows else f"record {row + 1}"
        return f"{where}, {place}, column '{self.name}'"

    @classmethod
    def from_dict(cls, name: str, values: Any, where: str) -> Column:
        """Read back what :meth:`to_dict` wrote; ``where`` names the source."""
        place = f"{where}, column '{name}'"
        known = [f.name for f in fields(cls) if f.name != "name"]
        given = known_keys(place, values, known, ["type"])
        settings: Plain = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
        listed(place, "categories", settings.get("categories", ()))
        return cls(name=name, **settings)

    def to_dict(self) -> Plain:
        """Return plain values but the name; what is left at its default is left out."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}
        kept = {f.name for f in fields(self) if given.get(f.name, f.default) != f.default}
        listed = {k: list(v) if isinstance(v, tuple) else v for k, v in given.items()}
        return {name: value for name, value in listed.items() if name in kept}


def _numbers_among(texts: Iterable[str]) -> Iterator[float]:
    for text in texts:
        with suppress(ValueError):
            yield float(text)


def _real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and finite(value)


def listed(where: str, name: str, values: Any) -> tuple[str, ...]:
    """A list of names, as text."""
    check(
        isinstance(values, list | tuple),
        where,
        f"{name} = {values!r} is not a list",
        "write a list of names",
    )
    return tuple(map(str, values))


def by_name(where: str, columns: Any) -> Any:
    """Tables of columns by name, from such a table or from a list of tables with a name each.

    A list keeps its order wherever it is sent.
    """
    if not isinstance(columns, list):
        return columns
    remedy = 'write [[columns]] and name = "..." for each'
    found: dict[str, Plain] = {}
    for own in columns:
        name = own.get("name") if isinstance(own, Mapping) else None
        check(
            isinstance(name, str) and name not in found,
            where,
            f"{own!r:.60} is not a column with a name of its own",
            remedy,
        )
        found[str(name)] = {key: value for key, value in own.items() if key != "name"}
    return found


def known_keys(where: str, values: Any, known: Sequence[str], needed: Sequence[str]) -> Plain:
    """Refuse keys that are not known, and needed ones that are missing."""
    check(isinstance(values, Mapping), where, f"{values!r} is not a table", "write a table")
    for name in values:
        check(name in known, where, f"there is no key '{name}'", did_you_mean(str(name), known))
    for name in needed:
        check(name in values, where, f"'{name}' is missing", "it has no default")
    return dict(values)
