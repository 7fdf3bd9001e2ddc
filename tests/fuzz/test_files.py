"""Files that people write: experiments, studies, sites, schemas, budgets and tables."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from dpfl.data.schema import Schema
from dpfl.data.tables import read_columns, read_file
from dpfl.deploy.records import LoadedSite
from dpfl.experiments.study import Sweep
from dpfl.methods import METHODS
from dpfl.runs.deployment import StudyFile
from dpfl.runs.experiment import Experiment, for_method
from dpfl.runs.site_file import SITE_FILE, SiteFile
from tests.data.test_schema import PLAIN as SCHEMA, TABLE
from tests.deploy.federation import CLIENT, study_values, write_csv
from tests.fuzz.doors import command, enter, fresh
from tests.fuzz.mutations import altered, as_csv, as_json, as_toml, damaged, files

METHOD = {"lr": 0.3, "clip": 1.0, "batch_size": 8, "local_steps": 3}
EXPERIMENT: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"kind": "unequal", "clients": 3, "alpha": 5.0, "smallest": 40},
    "budgets": {"epsilon": [0.5, 1.0, 2.0], "delta": 1e-3},
    "model": {"name": "mlp", "hidden": 4},
    "task": {"name": "classification", "classes": 10},
    "method": {"name": "weiavg", **METHOD},
    "server": {"optimizer": "adam", "lr": 0.1, "beta1": 0.9},
    "run": {"rounds": 2, "cohort": 2, "seed": 3, "workers": 1, "misreports": {"client-0": 2.0}},
    "client_settings": {"lr": [0.1, 0.2]},
    "clients": {"client-2": {"batch_size": 16, "local_steps": 5}},
}
CENTRAL: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"clients": 20},
    "method": {"name": "dp_fed", **METHOD, "noise_multiplier": 1.0, "project": "once"},
    "budgets": {"epsilon": 8.0, "delta": 1e-3},
    "run": {"rounds": 2, "cohort": 0.5, "sampling": "poisson"},
    "accounted": {"metric": "loss", "every": 1, "share": 0.1, "bound": 2.0, "bins": 8},
}
STUDY = {
    **study_values(rounds=2),
    "model": {"name": "mlp", "hidden": 4},
    "task": {"name": "classification"},
    "accounted": {"metric": "accuracy", "every": 1, "share": 0.1},
    "secure_sum": {"tolerated_dropouts": 0, "colluders": 1},
    "network": {"host": "127.0.0.1", "port": 9092, "names": ["localhost"]},
}
DESCRIBED = {
    **study_values(rounds=2),
    "study": {"name": "s", "sites": ["a", "b"], "schema": SCHEMA, "unit": "record"},
}
SITE: dict[str, Any] = {
    "site": {"id": "a"},
    "data": {"file": "records.csv", "label": "ill", "classes": 2},
    "budget": {**CLIENT, "per_study": 1.0},
    "policy": {"methods": ["weiavg"], "trust_server": True, "largest_clip": 2.0, "most_rounds": 9},
    "secure_sum": {"members": {"b": "ab" * 32}, "colluders": 1, "count_on": ["b"]},
    "client_settings": {"batch_size": 8},
    "server": {"address": "study.org:9092", "certificate": "ca.crt", "key": "site.key"},
}
SWEEP: dict[str, Any] = {
    "title": "a study",
    "base": {k: v for k, v in EXPERIMENT.items() if k not in ("method", "clients")},
    "methods": {"weiavg": METHOD, "other": {"name": "fedavg_dp", **METHOD}},
    "vary": {"budgets.epsilon": [1.0, 2.0]},
    "tune": {"over": {"method.lr": [0.1, 0.3]}, "own": {"weiavg": {"method.clip": [1.0]}}},
    "seeds": [0, 1],
    "metrics": ["update_norm"],
}
CENTRAL["method"] |= {"target_quantile": 0.5, "vote_share": 0.2}
SWEEP["tune"] |= {"seeds": [7], "at": {"budgets.epsilon": 1.0}, "search": "halving"}


# Every method, with all settings that a file can give; they run on four clients in a moment.
BASE: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"clients": 4},
    "budgets": {"epsilon": [1.0, 2.0, 4.0, 8.0], "delta": 1e-3},
    "run": {"rounds": 1, "seed": 1, "dropout": 0.1, "evaluate_every": 1},
}
GIVEN_TO_METHODS = {**METHOD, "local_steps": 1, "dimension": 20}


def method_settings(name: str) -> dict[str, Any]:
    known = {k: setting.default for k, setting in METHODS[name].settings.items()}
    plain = {k: own for k, own in known.items() if isinstance(own, int | float | str)}
    return {**plain, **{k: own for k, own in GIVEN_TO_METHODS.items() if k in known}}


EXPERIMENTS = [
    for_method({**BASE, "method": {"name": name, **method_settings(name)}}, name)
    for name in METHODS
]
LONG = {"rounds", "local_steps", "local_epochs", "batch_size", "clients", "hidden", "head_epochs"}
few = settings(max_examples=max(settings.default.max_examples // 2, 1))


def soon_done(values: Any) -> bool:
    """Whether an experiment, if it is accepted, takes a moment: large numbers may be meant."""
    if not isinstance(values, dict):
        return True
    large = any(k in LONG and isinstance(v, int | float) and v > 20 for k, v in values.items())
    return not large and all(map(soon_done, values.values()))


def written(name: str, content: bytes) -> Path:
    path = fresh() / name
    path.write_bytes(content)
    return path


# -- TOML ------------------------------------------------------------------------------------------


@given(st.one_of(files(EXPERIMENT, as_toml), files(CENTRAL, as_toml)))
def test_experiment_files(content: bytes) -> None:
    path = written("e.toml", content)

    def door() -> None:
        Experiment.from_file(path).check()

    enter("experiment file", door)


@given(st.one_of(files(EXPERIMENT, as_toml), files(CENTRAL, as_toml)))
def test_experiment_files_by_command(content: bytes) -> None:
    enter("dpfl describe", command("describe", written("e.toml", content)))


@few
@given(altered(*EXPERIMENTS).filter(soon_done).map(as_toml))
def test_runs(content: bytes) -> None:
    path = written("e.toml", content)
    enter("dpfl run", command("run", path, "--out", path.parent / "run", "--quiet"))


@given(st.one_of(files(STUDY, as_toml), files(DESCRIBED, as_toml)))
def test_study_files_of_deployments(content: bytes) -> None:
    path = written("study.toml", content)

    def door() -> None:
        study = StudyFile.from_file(path)
        study.strategy()
        study.offer()
        study.digest()

    enter("study file of a deployment", door)
    enter("dpfl server init", command("server", "init", path.parent / "s", "--study", path))


@given(files(SITE, as_toml))
def test_site_files(content: bytes) -> None:
    folder = written(SITE_FILE, content).parent
    write_csv(folder / "records.csv")

    def door() -> None:
        site = LoadedSite(folder)
        site.member()
        site.prepare()
        site.spent()

    enter("site file", door)


@given(files(SWEEP, as_toml))
def test_sweep_files(content: bytes) -> None:
    path = written("study.toml", content)
    enter("sweep file", lambda: Sweep.from_file(path).to_toml())


@given(files(SCHEMA, as_toml))
def test_schemas(content: bytes) -> None:
    path = written("schema.toml", content)

    def door() -> None:
        schema = Schema.read(path)
        assert Schema.from_dict(schema.to_dict()) == schema
        schema.transform(TABLE)

    enter("schema", door)


# -- tables ----------------------------------------------------------------------------------------

CELLS = [["age", "dose", "ill"], *([n, n % 7 + 0.5, n % 2] for n in range(20))]
MIXED_CELLS = [
    ["age", "visits", "sex", "smoker", "ill"],
    [50, 3, "m", "yes", "yes"],
    ["", 2, "f", "no", "no"],
    [120, "", "f", "true", "no"],
]
CSV, MIXED = as_csv(CELLS), as_csv(MIXED_CELLS)
BUDGETS = [
    ["id", "epsilon", "delta"],
    ["client-0", 1.0, 1e-3],
    ["client-1", 2, ""],
    ["client-2", 0.5, 1e-4],
]


@given(files(CELLS, as_csv))
def test_tables_of_numbers(content: bytes) -> None:
    path = written("a.csv", content)
    enter("data CSV", lambda: read_file(path))


@given(files(CELLS, as_csv))
def test_tables_of_numbers_by_command(content: bytes) -> None:
    folder = written("a.csv", content).parent
    (folder / "b.csv").write_bytes(CSV)
    options = ["--method", "weiavg", "--budgets", 2, "--delta", 1e-3, "--clip", 1, "--rounds", 1]
    enter("data CSV by command", command("describe", "--dataset", f"{folder}/", *options))


@given(files(MIXED_CELLS, as_csv))
def test_tables_by_a_schema(content: bytes) -> None:
    path = written("a.csv", content)

    def door() -> None:
        columns, rows = read_columns(path)
        Schema.from_dict(SCHEMA).prepare(columns, str(path), rows)

    enter("data CSV by a schema", door)


def parquet() -> bytes:
    arrow, files = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"age": [1.0, 2.0, 3.0], "dose": [1, 2, 3], "ill": [0, 1, 0]})
    stream = io.BytesIO()
    files.write_table(table, stream)
    return stream.getvalue()


@given(st.deferred(lambda: damaged(parquet())))
def test_parquet(content: bytes) -> None:
    folder = written("a.parquet", content).parent
    enter(
        "data Parquet",
        lambda: (read_file(folder / "a.parquet"), read_columns(folder / "a.parquet")),
    )


@given(
    st.one_of(
        files(BUDGETS, as_csv).map(lambda content: ("b.csv", content)),
        files({"client-0": 1.0, "client-1": [2.0, 1e-3]}, as_json).map(lambda own: ("b.json", own)),
    )
)
def test_budgets(given_: tuple[str, bytes]) -> None:
    path = written(*given_)
    values = {**EXPERIMENT, "budgets": {"epsilon": str(path), "delta": 1e-3}, "clients": {}}
    enter("budgets file", lambda: Experiment.from_options(values).federation())


# -- what they are made of --------------------------------------------------------------------------


def test_the_examples_are_valid() -> None:
    """Otherwise everything would be refused at the first check."""
    for values in (EXPERIMENT, CENTRAL, *EXPERIMENTS):
        Experiment.from_dict(values).check()
    for values in (STUDY, DESCRIBED):
        StudyFile.from_dict(values).strategy()
    SiteFile.from_dict(SITE)
    Sweep.from_dict(SWEEP)
    for name, content in (("a.csv", CSV), ("a.parquet", parquet())):
        assert len(read_file(written(name, content))[0])
    path = written("a.csv", MIXED)
    assert len(Schema.from_dict(SCHEMA).prepare(*read_columns(path)[:1]).features) == 3
