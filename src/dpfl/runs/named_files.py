"""The files that an experiment or a study names: read where a person at this computer names them.

The sections themselves open nothing, because a site also reads those that a server sends.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

from dpfl.core.errors import ConfigurationError
from dpfl.core.types import Plain
from dpfl.data.schema import Schema
from dpfl.models.pretrained import read_weights
from dpfl.privacy.budgets import is_budget_file, read_budget_file


def resolve_files(values: Plain, folder: Path = Path()) -> Plain:
    """Return the values of a person's own file or options, without what a file may change later.

    A schema and a table of budgets are replaced by what their files hold; weights get an absolute
    path, since a run may be resumed from another folder, and their digest. Paths are relative to
    ``folder``. Values that a peer has sent never come here.
    """
    return {
        name: _RESOLVERS[name](section, folder)
        if name in _RESOLVERS and isinstance(section, dict)
        else section
        for name, section in values.items()
    }


def _with_schema(section: Plain, folder: Path) -> Plain:
    path = section.get("schema")
    if not isinstance(path, str):
        return section
    return {**section, "schema": Schema.read(folder / path).to_dict()}


def _with_digest(section: Plain, folder: Path) -> Plain:
    path = section.get("weights")
    if not isinstance(path, str) or section.get("weights_sha256") is not None:
        return section
    digest = hashlib.sha256(read_weights(folder / path)).hexdigest()
    return {**section, "weights": str((folder / path).absolute()), "weights_sha256": digest}


def _with_budgets(section: Plain, folder: Path) -> Plain:
    source = section.get("epsilon")
    if not (isinstance(source, str) and is_budget_file(source)):
        return section
    where = f"budgets file {source}"
    epsilons, deltas = read_budget_file(folder / source)
    common = section.get("delta")
    if not deltas or not isinstance(common, float | None):
        return {**section, "epsilon": epsilons, "delta": common}
    complete = set(deltas) == set(epsilons)
    delta = {client: deltas.get(client, common) for client in epsilons}
    for client, value in delta.items():
        if value is None:
            raise ConfigurationError(
                where, f"has no delta for '{client}'", "give a delta column, or one delta for all"
            )
        if complete and common not in (None, value):
            raise ConfigurationError(
                where,
                f"gives '{client}' delta {value}, and {common} was given for all",
                "leave one of the two out; a delta for all fills empty cells of the column",
            )
    return {**section, "epsilon": epsilons, "delta": delta}


_RESOLVERS: dict[str, Callable[[Plain, Path], Plain]] = {
    "data": _with_schema,
    "study": _with_schema,
    "model": _with_digest,
    "budgets": _with_budgets,
}
