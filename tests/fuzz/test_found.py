"""What fuzzing has found, each once more: all of these ended in a traceback, or took all memory."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dpfl.core.errors import ConfigurationError, DpflError, PeerError
from dpfl.core.files import parsed
from dpfl.core.types import ClientSettings
from dpfl.data.schema import Schema
from dpfl.data.tables import read_file
from dpfl.deploy.connections import NODES, registered_keys
from dpfl.deploy.enrolment import ENROLMENT, EnrolmentFile
from dpfl.deploy.messages import Message
from dpfl.deploy.opened import OPENED, OpenedRound
from dpfl.deploy.records import LoadedSite
from dpfl.deploy.sum_phases import KEYS, SHARES, SURVIVORS, UNMASK
from dpfl.deploy.summary import StudyStatus
from dpfl.experiments.results import StudyResult
from dpfl.models.pretrained import read_weights
from dpfl.privacy.budgets import read_budget_file
from dpfl.runs.deployment import StudyFile
from dpfl.runs.experiment import Experiment
from dpfl.runs.predictor import load, read_records
from dpfl.runs.site_file import SITE_FILE
from dpfl.runs.toml_file import read_toml
from dpfl.sim.train import run_experiment
from tests.fuzz import examples
from tests.fuzz.doors import GIVEN, command, enter, fresh
from tests.fuzz.ledgers import read_tables, schema_of, write_tables
from tests.fuzz.mutations import as_toml
from tests.fuzz.test_files import BASE, CENTRAL, METHOD, SITE, STUDY, written
from tests.fuzz.test_messages import site_answers

LONG = 10**400


def refused(door: Callable[[], Any]) -> None:
    """Open a door that must refuse, and keep to what every door keeps to."""
    with pytest.raises(DpflError):
        door()
    enter("found", door)


def changed(values: Any, path: str, value: Any) -> Any:
    """Plain values with one of them replaced; a path is keys with dots between them."""
    copy = json.loads(json.dumps(values))
    *parents, last = (int(key) if key.lstrip("-").isdigit() else key for key in path.split("."))
    place = copy
    for key in parents:
        place = place[key]
    place[last] = value
    return copy


def change_lines(path: Path, where: str, value: Any) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in changed(lines, where, value)))


def change_json(path: Path, where: str, value: Any) -> None:
    path.write_text(json.dumps(changed(json.loads(path.read_text()), where, value)))


# -- numbers that cannot be meant ------------------------------------------------------------------

WEIAVG = {**BASE, "method": {"name": "weiavg", **METHOD}}


@pytest.mark.parametrize(
    ("values", "path", "value"),
    [
        (WEIAVG, "method.weight_decay", 4.5e154),
        (WEIAVG, "method.proximal", 1e308),
        (WEIAVG, "method.local_steps", 10**9),
        (WEIAVG, "run.rounds", 2**31),
        (CENTRAL, "run.rounds", 2**31),
        (CENTRAL, "accounted.share", 5e-324),
        ({**WEIAVG, "model": {"name": "mlp"}}, "model.hidden", 2**31),
        ({**WEIAVG, "model": {"name": "mlp"}}, "model.hidden", LONG),
    ],
    ids=lambda own: own if isinstance(own, str) else "",
)
def test_a_size_that_cannot_be_meant_is_refused(values: Any, path: str, value: Any) -> None:
    file = written("e.toml", as_toml(changed(values, path, value)))
    with pytest.raises(ConfigurationError):
        Experiment.from_file(file).check()
        run_experiment(Experiment.from_file(file), GIVEN / "run")
    enter("found", command("describe", file))


def test_a_whole_number_may_be_written_with_a_point() -> None:
    for name, setting in (("weiavg", "local_steps"), ("pfa", "k")):
        values = {**BASE, "method": {"name": name, **METHOD, setting: 2.0}}
        assert enter("found", command("describe", written("e.toml", as_toml(values))))
    assert repr(ClientSettings(batch_size=8.0).batch_size) == "8"


def test_a_study_under_no_name_is_not_half_made() -> None:
    file = written("study.toml", as_toml(changed(STUDY, "network.host", "\ufeff127.0.0.1")))
    assert enter("found", command("server", "init", GIVEN / "s", "--study", file)) is None
    assert not (GIVEN / "s" / "study.toml").exists()


# -- JSON and TOML ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '"\\ud800"', "9" * 5000, ""])
def test_json_that_cannot_be_written_again_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        parsed(text)
    assert parsed('"\\ud83d\\ude42"') == "\N{SLIGHTLY SMILING FACE}"


def test_numbers_of_thousands_of_digits_are_refused_in_every_file() -> None:
    schema = written("schema.toml", b"target = " + b"9" * 5000)
    refused(lambda: Schema.read(schema))
    budgets = written("b.json", json.dumps({"client-0": LONG}).encode())
    refused(lambda: read_budget_file(budgets))


def test_a_date_is_refused_where_a_setting_is_expected() -> None:
    values = {**BASE, "method": {"name": "weiavg", **METHOD, "momentum": date(2024, 2, 29)}}
    file = written("e.toml", as_toml(values))
    refused(lambda: run_experiment(Experiment.from_file(file), GIVEN / "run"))


@pytest.mark.parametrize("name", ["/dev/full", "/dev/zero", "a" * 5000, "a\0b"])
def test_names_that_no_file_can_have_are_refused(name: str) -> None:
    study = written(
        "study.toml", as_toml(changed(STUDY, "study", {**STUDY["study"], "schema": name}))
    )
    refused(lambda: StudyFile.from_file(study))
    for door in (Schema.read, read_budget_file, read_toml, read_weights, read_file):
        refused(lambda door=door: door(GIVEN / name))
    site = {**SITE, "data": {"file": name, "classes": 2}}
    written(SITE_FILE, as_toml(site))
    refused(lambda: LoadedSite(GIVEN).member())


# -- run folders -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["", [1], None, LONG], ids=["text", "list", "none", "long"])
def test_records_of_another_type_are_refused(value: Any) -> None:
    for name, where in (("rounds.jsonl", "0.bytes_up"), ("timings.jsonl", "0.seconds")):
        folder = fresh(examples.finished_run())
        change_lines(folder / name, where, value)
        for door in (command("report", folder), command("run", "--resume", folder, "--quiet")):
            enter("found", door)


@pytest.mark.parametrize("where", ["details.by_client.client-0", "statements.0.epsilon", "rounds"])
def test_a_summary_of_another_type_is_refused(where: str) -> None:
    folder = fresh(examples.finished_run())
    change_json(folder / "summary.json", where, [])
    assert enter("found", command("report", folder)) is None


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("cells.0.runs.0.epsilon.spent.largest", LONG),
        ("cells.0.runs.0.epsilon.spent", [1]),
        ("cells.0.runs.0.epsilon_by_observer", [1]),
        ("cells.0.runs.0", [1]),
        ("cells.0.chosen", [1]),
        ("cells.0", [1]),
        ("cells", {}),
        ("title", "\ud800"),
    ],
)
def test_results_of_another_type_are_refused(where: str, value: Any) -> None:
    folder = fresh(examples.comparison()) / "results"
    change_json(folder / "results.json", where, value)
    if where != "cells":
        refused(lambda: StudyResult.read(folder))
    enter("found", command("report", folder))


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("task.metric", 0),
        ("inputs", "numbers"),
        ("inputs", {"ind": "numbers"}),
        ("inputs.picture", "x"),
        ("built", {"hidden": 64}),
        ("built", {"name": "mlp", "hidden": "x"}),
        ("shape", ["x"]),
        ("shape", [2**40]),
    ],
)
def test_a_card_that_describes_no_model_is_refused(where: str, value: Any) -> None:
    folder = fresh(examples.finished_run())
    change_json(folder / "model.json", where, value)
    refused(lambda: load(folder))


@pytest.mark.parametrize(
    ("name", "value"),
    [("round", "x"), ("round", "-1"), ("slots", '["channel"]'), ("slots", "{"), ("slots", "1")],
)
def test_a_checkpoint_with_other_metadata_is_refused(name: str, value: str) -> None:
    """The digest is that of the tensors."""
    folder = fresh(examples.interrupted_run())
    path = folder / "checkpoint" / "state.safetensors"
    with safe_open(path, framework="pt") as stream:
        told = stream.metadata()
    save_file(load_file(path), path, metadata={**told, name: value})
    assert enter("found", command("run", "--resume", folder, "--quiet")) is None


# -- ledgers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("plans.0.2", '["server"]'),
        ("charges.0.3", "nobody at all"),
        ("grants.0.3", "x"),
        ("meta", [["format", "dpfl-ledger-2"], ["identity", "a"]]),
        ("meta", [["format", "dpfl-ledger-2"], ["filter", "allotments"]]),
    ],
)
def test_a_ledger_with_values_that_nobody_writes_is_refused(where: str, value: Any) -> None:
    """Also where its hash chain was computed anew."""
    path = fresh(examples.finished_run()) / "ledger.sqlite"
    write_tables(path, schema_of(path), changed(read_tables(path), where, value), forged=True)
    assert enter("found", command("account", "--ledger", path)) is None
    assert enter("found", command("ledger", "verify", path)) is None


def test_the_secret_of_a_site_is_bytes() -> None:
    folder = fresh(examples.federation()) / "a"
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger, ledger:
        ledger.execute("UPDATE salt SET value = 7")
    assert enter("found", command("site", "spend", folder)) is None


# -- tables ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", ["3.5e38", "nan", "-inf", "", "9" * 400])
def test_records_that_no_model_takes_are_not_predicted(cell: str) -> None:
    folder = fresh(examples.finished_run())
    predictor = load(folder)
    size = math.prod(predictor.shape)
    rows = [[f"x{number}" for number in range(size)], [cell, *["0.5"] * (size - 1)]]
    table = written("r.csv", "\n".join(",".join(row) for row in rows).encode())
    refused(lambda: read_records(table, predictor))


def test_what_arrow_does_not_implement_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> None:
        raise pyarrow.ArrowNotImplementedError("Integers with more than 64 bits")

    monkeypatch.setattr(parquet, "read_table", broken)
    table = written("t.parquet", b"PAR1")
    refused(lambda: read_file(table))


# -- servers ---------------------------------------------------------------------------------------


def test_files_of_a_server_of_another_type_are_refused() -> None:
    folder = fresh(examples.interrupted_federation()) / "server"
    for where, value in (("claims", 0), ("claims.a.epsilon", ""), ("tokens.a", 1), ("run", None)):
        whole = (folder / ENROLMENT).read_text()
        change_json(folder / ENROLMENT, where, value)
        refused(lambda: EnrolmentFile.read(folder))
        (folder / ENROLMENT).write_text(whole)
    first, _, rest = (folder / OPENED).read_bytes().partition(b"\n")
    (folder / OPENED).write_bytes(
        json.dumps(json.loads(first) | {"round": "x"}).encode() + b"\n" + rest
    )
    refused(lambda: OpenedRound.read(folder))
    (folder / NODES).write_text('{"a": []}')
    refused(lambda: registered_keys(folder))
    change_lines(folder / "timings.jsonl", "0.seconds", {"a": "x"})
    refused(lambda: StudyStatus.of(folder))


# -- sites -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, [], 7, "x"], ids=repr)
def test_phases_of_a_secure_sum_without_their_content_are_refused(value: Any) -> None:
    asked = [one for one in examples.sum_messages() if one[1].header["kind"] == "sum"]
    assert {message.header["phase"] for _, message in asked} == {KEYS, SHARES, SURVIVORS, UNMASK}
    for before, message in asked:
        header = {**message.header, "sum": value}
        answer = site_answers(fresh(before), Message(header=header, payload=message.payload))
        assert answer.header["code"] == PeerError.exit_code
