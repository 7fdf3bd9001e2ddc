"""The section of an experiment file that says which records are learned from."""

import warnings
from typing import Any

from pydantic import model_validator

from dpfl.core.checks import check
from dpfl.core.types import Plain
from dpfl.data.schema import Schema
from dpfl.runs.toml_file import Section

with warnings.catch_warnings():  # pydantic's models have an old method of the name schema
    warnings.simplefilter("ignore", UserWarning)

    class DataSection(Section):
        """Which records: a named data set, or a ``folder`` with one CSV or Parquet file per client.

        ``schema`` describes the columns of the files (:class:`dpfl.data.schema.Schema`): a table;
        a person may name a TOML file instead, which is read in (:mod:`dpfl.runs.named_files`),
        since it may change later. Without it all columns are numbers, and ``label`` names the
        column of the targets. ``stratified`` sets a fifth of each class of a folder's records aside
        for testing, instead of a fifth of all; the run is flagged then
        (:attr:`dpfl.Federation.stratified`).
        """

        name: str | None = None
        folder: str | None = None
        label: str | None = None
        schema: Plain | None = None  # type: ignore[assignment]
        stratified: bool = False

        @model_validator(mode="before")
        @classmethod
        def _check_schema(cls, values: Any) -> Any:
            """Refuse a wrong schema; the columns become a list, which keeps their order."""
            given = values.get("schema") if isinstance(values, dict) else None
            if given is None:
                return values
            schema = Schema.from_dict(given, "[data] schema")
            check(
                values.get("folder") is not None,
                "[data] schema",
                "describes the columns of files, and none are given",
                "name a folder",
            )
            check(
                values.get("label") is None,
                "[data] label",
                "is given beside a schema, which names the target",
                "leave it out",
            )
            return {**values, "schema": schema.to_lists()}

        def described(self) -> Schema | None:
            """The schema of the files, None if they have none."""
            return None if self.schema is None else Schema.from_dict(self.schema)
