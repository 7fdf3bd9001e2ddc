"""A federation from datasets, tables and files: by a schema, or by taking columns as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dpfl.core.checks import check
from dpfl.core.random import PublicSeed
from dpfl.core.types import Plain
from dpfl.data.arrays import with_declared
from dpfl.data.cells import column_names
from dpfl.data.loaders import Transform, read_items
from dpfl.data.records import check_data
from dpfl.data.schema import Schema
from dpfl.data.sources import MEMORY, by_client, plain_columns
from dpfl.data.tables import KINDS, read_columns
from dpfl.data.units import UnitKey, Units, table_units
from dpfl.tasks import PerPerson, Task, make_task


class Sources:
    """Ways to build a federation that all end in its ``from_arrays``."""

    if TYPE_CHECKING:

        @classmethod
        def from_arrays(cls, *clients: Any, **options: Any) -> Self:
            """Build from arrays by client."""

    @classmethod
    def from_torch(
        cls,
        clients: Mapping[Any, Any],
        *,
        transform: Transform | None = None,
        features: str | None = None,
        target: str | None = None,
        memory: int = MEMORY,
        **options: Any,
    ) -> Self:
        """Build from one torch dataset (map-style or iterable) or DataLoader per client.

        A record is (features, target), or a dict of which ``features`` and ``target`` name the two,
        as in Hugging Face datasets of images. ``transform`` is applied to the features of each
        record; images need none, and become numbers 0..1. A source without a length is read to its
        end, and refused if it takes more than ``memory`` bytes. ``options`` are those of
        :meth:`from_arrays`, here and below.
        """
        check(
            isinstance(clients, Mapping),
            "from_torch",
            f"clients are a {type(clients).__name__}",
            "give {client: dataset}, one dataset or loader for each client",
        )
        named = None if features is None or target is None else (features, target)
        given: dict[str, Any] = {"transform": transform, "fields": named, "memory": memory}
        read = {c: read_items(f"client '{c}'", source, **given) for c, source in clients.items()}
        return cls.from_arrays(read, **options)

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        *,
        client: str | None = None,
        target: str | None = None,
        schema: Schema | None = None,
        **options: Any,
    ) -> Self:
        """Build from one table with a column that says who the ``client`` is, or one per client.

        A table is a pandas or polars frame, an Arrow table, a Hugging Face dataset or a dict of
        columns. A ``schema`` says how columns become features; without one they are numbers, and
        ``target`` names the target (the last column if None).

        >>> table = {"site": [7, 7, 11, 11], "dose": [0.1, 0.9, 0.2, 0.8], "ill": [0, 1, 0, 1]}
        >>> from dpfl import Federation
        >>> Federation.from_frame(table, client="site", target="ill").ids
        ('07', '11')
        """
        arrays, options = arrays_of(tables_of(frame, client), schema, target, options)
        return cls.from_arrays(arrays, **options)

    @classmethod
    def from_files(
        cls,
        folder: Path | str,
        *,
        label: str | None = None,
        schema: Schema | None = None,
        **options: Any,
    ) -> Self:
        """Build from a folder with one CSV or Parquet file per client.

        A file's name is its client's id. A ``schema`` says how columns become features; without one
        they are numbers, and ``label`` names the column of the targets (the last one if None).
        """
        check(
            isinstance(folder, str | Path),
            "federation",
            f"folder = {folder!r:.60}",
            "give the path of a folder",
        )
        arrays, options = arrays_of(tables_in(Path(folder)), schema, label, options)
        return cls.from_arrays(arrays, **options)


Given = Task | str | Mapping[str, Any] | None


@dataclass(frozen=True)
class ClientTable:
    """One client's table; ``where`` and ``rows`` say in messages where a record stands."""

    columns: Any
    where: str
    rows: Sequence[str] = field(default=())


def tables_of(frame: Any, client: str | None) -> dict[Any, ClientTable]:
    """The clients' tables: groups of one table by a column, or a mapping of tables by client."""
    if client is not None:
        groups = by_client(frame, client)
        return {name: ClientTable(own, f"client '{name}'") for name, own in groups.items()}
    check(
        isinstance(frame, Mapping) and all(_is_table(own) for own in frame.values()),
        "from_frame",
        "was given one table and no clients",
        "name the column of the clients (client=...), or give one table for each client",
    )
    return {name: ClientTable(own, f"client '{name}'") for name, own in frame.items()}


def tables_in(folder: Path) -> dict[Any, ClientTable]:
    """The tables of a folder with one CSV or Parquet file per client."""
    found = {}
    where = str(folder)
    check_data(
        folder.is_dir(),
        where,
        "is not a folder",
        "name a folder with one .csv or .parquet file per client",
    )
    for path in sorted(path for path in folder.iterdir() if path.suffix.lower() in KINDS):
        check_data(
            path.stem not in found,
            str(path),
            f"client '{path.stem}' has two files",
            "keep one file per client",
        )
        columns, rows = read_columns(path)
        check_data(bool(rows), str(path), "holds no record", "leave this client out")
        found[path.stem] = ClientTable(columns, str(path), rows)
    check_data(
        bool(found), where, "holds no .csv or .parquet file", "put one file per client there"
    )
    return found


def _is_table(value: Any) -> bool:
    columns = any(hasattr(value, name) for name in ("columns", "column_names"))
    return columns or isinstance(value, Mapping)


def arrays_of(
    tables: Mapping[Any, ClientTable],
    schema: Schema | None,
    target: str | None,
    options: Plain,
    key: UnitKey | None = None,
) -> tuple[dict[Any, Any], Plain]:
    """Each client's features and targets, and the options of a federation that is built of them.

    Without a schema all columns are numbers, the same in every table, and ``target`` names the
    target (the last column if None). ``options`` are those of :meth:`dpfl.Federation.from_arrays`.
    Units are marked under the ``key``, which follows from the seed unless it is given.
    """
    if schema is None:
        arrays = {}
        first: list[str] = []
        for name, table in tables.items():
            names = column_names(table.columns)
            first = first or names
            check_data(
                names == first,
                table.where,
                f"has columns {names}, and another table has {first}",
                "use the same columns in the same order",
            )
            arrays[name] = plain_columns(table.columns, target, table.where, table.rows)
        return arrays, options
    check(
        target is None,
        "federation",
        f"has a schema and a target '{target}'",
        "leave the target out: the schema names it",
    )
    units: dict[Any, Any] = {}
    for name, table in tables.items():
        seed = PublicSeed(int(options.get("seed", 0))).child("split", str(name))
        units[name] = units_of(schema, table, key or UnitKey.of(seed))
        count = len(units[name].marks)
        check_data(
            key is not None or count >= 2,
            table.where,
            f"has {count} {schema.unit}(s), too few for a train and a test part",
            "leave this client out, or join it with another one",
        )
    task = _task_of(schema, options.get("task"))
    split = options.get("stratified", False) and not schema.single
    check(
        not split,
        "federation",
        "persons with several records have no one class",
        "leave stratified out, or use one record per person",
    )
    task = task if schema.single else PerPerson(task=task)
    return units, {**options, "task": task, "unit": schema.unit, "schema": schema}


def units_of(schema: Schema, table: ClientTable, key: UnitKey) -> Units:
    """One client's units: its records, or its persons with a bounded number of records each."""
    made = schema.prepare(table.columns, table.where, table.rows)
    most = schema.records_per_person
    size = len(set(made.persons or ())) * most * made.features[:1].nbytes
    check_data(
        size <= MEMORY,
        table.where,
        f"{most} places for each {schema.unit} take {size / 2**30:.3g} GiB",
        "use fewer records_per_person",
    )
    return table_units(made, key, most)


def _task_of(schema: Schema, given: Given) -> Task:
    """The task that was asked for, or else the one that fits the schema's target."""
    if given is None and schema.classes is None:
        given = "multi_label" if schema.outcomes[0].type == "boolean" else "regression"
    return with_declared(make_task(given), schema.classes)
