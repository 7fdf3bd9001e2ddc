"""Schemas and persons at sites: columns mean the same everywhere, and every promise is about the
unit that study, site and ledger agree on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.torch import load_file

import dpfl
from dpfl.cli.main import run_command
from dpfl.core.errors import ConfigurationError, LedgerError
from dpfl.core.types import Observer
from dpfl.data.schema import Schema
from dpfl.data.units import UnitKey
from dpfl.deploy.messages import Message, read_header, write_header
from dpfl.deploy.outcome import outcomes
from dpfl.deploy.records import UNITS_KEY, LoadedSite
from dpfl.deploy.site import Site
from dpfl.plugs.releases import Mean
from dpfl.runs.deployment import Offer, StudyFile
from dpfl.runs.site_file import SiteFile
from dpfl.strategy import Strategy
from tests.deploy.federation import (
    DELTA,
    METHOD,
    RECORD,
    Desk,
    Federation,
    WatchedGrid,
    charged,
    make_server,
    make_site,
    study_values,
)

SCHEMA: dict[str, Any] = {
    "target": "ill",
    "person": "patient_id",
    "person_word": "patient",
    "records_per_person": 2,
    "ignore": ["remarks"],
    "columns": {  # not in the order of the alphabet
        "sex": {"type": "category", "categories": ["f", "m"]},
        "age": {"type": "number", "unit": "years", "range": [0, 100]},
        "blood": {"type": "number", "range": [60, 220], "missing": "indicator"},
        "ill": {"type": "boolean"},
    },
}
WIDTH = 5  # two sexes, an age, a pressure, whether it is missing
PATIENT = {**RECORD, "unit": "patient"}
SITES = ("a", "b", "c")
OPEN = {"least_noise_multiplier": 0.0, "allow_seeded": True}
INIT = ["--id", "a", "--epsilon", "4", "--delta", "0.01"]


def without_persons(values: Mapping[str, Any] = SCHEMA) -> dict[str, Any]:
    kept = {name: own for name, own in values.items() if "person" not in name}
    return {**kept, "ignore": [*values["ignore"], "patient_id"]}


def write_table(path: Path, seed: int = 0, patients: int = 40) -> None:
    """One to three records of each patient, with words, missing values and a remark."""
    rng, lines = np.random.default_rng(seed), ["patient_id,blood,age,sex,remarks,ill"]
    for patient in range(patients):
        for _ in range(1 + patient % 3):
            age, blood = (
                int(rng.integers(20, 90)),
                "" if rng.random() < 0.2 else rng.integers(70, 200),
            )
            ill = "yes" if age > 55 else "no"
            lines.append(f"p{patient},{blood},{age},{rng.choice(['f', 'm'])},x,{ill}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def make_schema_site(
    folder: Path,
    name: str = "a",
    schema: Mapping[str, Any] = SCHEMA,
    budget: Mapping[str, Any] = PATIENT,
) -> Site:
    write_table(folder / "records.csv", seed=ord(name))
    (folder / "schema.toml").write_text(tomli_w.dumps(schema))
    values = {
        "site": {"id": name},
        "data": {"file": "records.csv", "schema": "schema.toml"},
        "budget": dict(budget),
        "policy": {**OPEN, "trust_server": budget.get("observer") == "world"},
    }
    (folder / "site.toml").write_text(SiteFile.from_dict(values).to_toml())
    key = UnitKey.of(dpfl.PublicSeed(0).child("split", name))  # as a simulation has it
    (folder / UNITS_KEY).write_text(key.value.hex())
    site = Site(folder)
    site.prepare()
    return site


def patient_study(method: str = "weiavg", *, stated: bool = False, **more: Any) -> dict[str, Any]:
    """A study of patients; with ``stated`` it has the schema that all sites must use."""
    values = study_values(method, **more)
    about = {name: values["study"][name] for name in ("name", "sites")}
    own = (
        {"schema": SCHEMA}
        if stated
        else {"feature_shape": [WIDTH], "classes": 2, "unit": "patient"}
    )
    return {**values, "study": {**about, **own}}


def deploy(base: Path, values: Mapping[str, Any], **more: Any) -> Federation:
    sites = {name: make_schema_site(base / name, name, **more) for name in SITES}
    grid = WatchedGrid({number + 1: base / name for number, name in enumerate(SITES)})
    return Federation(base, make_server(base / "server", values), grid, sites)


# -- the same as a simulation ----------------------------------------------------------------------


@pytest.mark.parametrize("most", [2, 1])
@pytest.mark.parametrize("task", [None, {"name": "binary", "metric": "accuracy"}])
def test_sites_with_persons_learn_what_a_simulation_learns(
    most: int, task: dict[str, Any] | None, tmp_path: Path
) -> None:
    schema = {**SCHEMA, "records_per_person": most}
    values = patient_study(run={"noise": "seeded", "seed": 5})
    federation = deploy(tmp_path, {**values, "task": task}, schema=schema)
    summary = federation.play()
    assert (summary["refusals"], summary["unit"]) == ({}, "patient")
    (tmp_path / "tables").mkdir()
    for name in SITES:
        shutil.copy(tmp_path / name / "records.csv", tmp_path / "tables" / f"{name}.csv")
    budgets = dict.fromkeys(SITES, dpfl.Budget(epsilon=4.0, delta=DELTA))
    own = dpfl.Federation.from_files(
        tmp_path / "tables", schema=Schema.from_dict(schema), budgets=budgets, task=task
    )
    with pytest.warns(dpfl.NotPrivateWarning):
        simulated = dpfl.train(
            StudyFile.in_folder(federation.server).build_model(),
            own,
            dpfl.weiavg(**METHOD),
            rounds=3,
            seed=5,
            filter="allotments",
        )
    final = load_file(federation.server / "model.safetensors")
    for name, tensor in simulated.model.state_dict().items():
        # With one record a person a simulation adds up several clients at once, in another order.
        same = torch.equal if most == 2 else torch.allclose
        assert same(final[name], tensor)
    for name, site in federation.sites.items():
        (line,) = [one for one in site.spent() if one.observer == Observer.SERVER]
        alone = simulated.spent[name]
        assert (line.epsilon, str(line.unit), str(alone.unit)) == (
            alone.epsilon,
            "patient",
            "patient",
        )
        assert site.member().shard.examples == own.shards[name].examples == 32


def test_a_schema_without_persons_promises_per_record(tmp_path: Path) -> None:
    site = make_schema_site(tmp_path / "a", schema=without_persons(), budget=RECORD)
    values = patient_study()
    del values["study"]["unit"]
    assert site.answer(Desk(values).hello()).accepted
    assert site.federation().feature_shape == (WIDTH,)
    features = site.federation().shards["a"].features
    assert 0 <= float(features.min()) <= float(features.max()) <= 1


def test_a_schema_inside_the_site_s_file_is_the_same(tmp_path: Path) -> None:
    site = make_schema_site(tmp_path / "a")
    values = site.file.to_dict()
    values["data"]["schema"] = SCHEMA
    (site.folder / "site.toml").write_text(SiteFile.from_dict(values).to_toml())
    (site.folder / "schema.toml").unlink()
    other = Site(site.folder).federation().shards["a"]
    own = site.federation().shards["a"]
    assert torch.equal(own.features, other.features)
    assert torch.equal(own.labels, other.labels)


# -- one study, one unit ---------------------------------------------------------------------------


def test_a_study_and_its_sites_have_one_unit(tmp_path: Path) -> None:
    persons = make_schema_site(tmp_path / "a")
    records = make_schema_site(tmp_path / "b", schema=without_persons(), budget=RECORD)
    others = make_schema_site(
        tmp_path / "c",
        schema={**SCHEMA, "person_word": "donor"},
        budget={**RECORD, "unit": "donor"},
    )
    per_patient = Desk(
        {**patient_study(), "study": {**patient_study()["study"], "sites": ["a", "b"]}}
    )
    per_record = Desk(per_patient.values | {"study": {**per_patient.values["study"], "unit": None}})
    said = {
        (number, name): site.answer(desk.hello())
        for number, desk in enumerate((per_patient, per_record))
        for name, site in (("persons", persons), ("records", records), ("others", others))
    }
    accepted = {key for key, answer in said.items() if answer.accepted}
    assert accepted == {(0, "persons"), (1, "records")}
    for key, words in {
        (0, "records"): "the study protects a patient, and this site a record",
        (0, "others"): "the study protects a patient, and this site a donor",
        (1, "persons"): "the study protects a record, and this site a patient",
    }.items():
        assert (said[key].header["code"], words in said[key].reason) == (4, True), said[key].reason
    assert persons.answer(per_record.terms()).header["code"] == 4
    assert persons.answer(per_record.train(0)).header["code"] == 4
    assert charged(persons) == set()


def test_every_statement_of_server_and_site_is_about_patients(tmp_path: Path) -> None:
    federation = deploy(tmp_path, patient_study(stated=True))
    summary = federation.play()
    assert summary["refusals"] == {}
    assert (summary["unit"], summary["observer"]) == ("patient", "server")
    told = " ".join(summary["assumptions"])
    assert "a patient with data at several clients" in told
    assert "record" not in told
    for site in federation.sites.values():
        assert {str(line.unit) for line in site.spent()} == {"patient"}
        agreed = "agreed to 3 rounds of demo: weiavg, 2 classes (accuracy), per patient"
        assert agreed in (site.folder / "site.log").read_text()


def test_methods_that_protect_whole_sites_stay_as_they_are(tmp_path: Path) -> None:
    whole = {**RECORD, "unit": "client", "observer": "world"}
    federation = deploy(tmp_path, patient_study("dp_fed", stated=True), budget=whole)
    assert federation.play()["unit"] == "client"
    with pytest.raises(ConfigurationError, match="'patient' was given, and dp_fed protects whole"):
        StudyFile.from_dict(patient_study("dp_fed")).strategy()


def test_a_ledger_of_records_is_not_one_of_patients(tmp_path: Path) -> None:
    site = make_schema_site(tmp_path / "a", schema=without_persons(), budget=RECORD)
    values = patient_study()
    del values["study"]["unit"]
    assert site.answer(Desk(values).terms()).accepted
    assert site.answer(Desk(values).train(0)).accepted
    (site.folder / "schema.toml").write_text(tomli_w.dumps(SCHEMA))
    with pytest.raises(ConfigurationError, match="is 'record', and the schema protects a patient"):
        Site(site.folder)
    told = site.file.to_dict()
    told["budget"]["unit"] = "patient"
    (site.folder / "site.toml").write_text(SiteFile.from_dict(told).to_toml())
    with pytest.raises(LedgerError, match="record"):
        Site(site.folder).ledger()
    answer = Site(site.folder).answer(Desk(patient_study(), run="run-2").terms())
    assert not answer.accepted


def test_releases_before_round_one_need_single_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = make_schema_site(tmp_path / "a")
    single = make_schema_site(tmp_path / "b", schema={**SCHEMA, "records_per_person": 1})
    real, release = Offer.strategy, Mean(into="0.mean", share=0.2, bound=1.0)

    def strategy(self: Offer) -> Strategy:
        return replace(real(self), releases=(release,))

    monkeypatch.setattr(Offer, "strategy", strategy)
    answer = several.answer(Desk(patient_study()).hello())
    words = "releases before round one take single records, not all of a patient's"
    assert (answer.accepted, words in answer.reason) == (False, True)
    values = patient_study()
    values["study"]["sites"] = ["a", "b"]
    assert single.answer(Desk(values).hello()).accepted


# -- the study's schema ----------------------------------------------------------------------------


def reordered(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "columns": dict(sorted(schema["columns"].items()))}


def ranged(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        **schema,
        "columns": {**schema["columns"], "age": {"type": "number", "range": [0, 120]}},
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda own: own, None),
        (lambda own: {**own, "ignore": ["remarks", "nurse"]}, None),
        (lambda own: {**own, "target": ["ill"]}, None),
        (ranged, "its schema is not the study's"),
        (reordered, "its schema is not the study's"),
        (lambda own: {**own, "records_per_person": 3}, "its schema is not the study's"),
    ],
)
def test_a_study_s_schema_is_every_site_s(
    change: Callable[[dict[str, Any]], dict[str, Any]], words: str | None, tmp_path: Path
) -> None:
    site, desk = (
        make_schema_site(tmp_path / "a", schema=change(SCHEMA)),
        Desk(patient_study(stated=True)),
    )
    hello = desk.hello()
    sent = Message(header=read_header(write_header(hello.header)))  # as it travels
    answer = site.answer(sent)
    assert answer.accepted is (words is None), answer.reason
    if words is not None:
        assert words in answer.reason
        assert answer.header["code"] == 2


def test_a_study_with_a_schema_keeps_the_order_of_its_columns(tmp_path: Path) -> None:
    study = StudyFile.from_dict(patient_study(stated=True))
    assert (study.study.feature_shape, study.study.classes) == ([WIDTH], 2)
    again = StudyFile.from_dict(read_header(write_header(study.offer())))
    assert again.study.described() == study.study.described() == Schema.from_dict(SCHEMA)
    other = StudyFile.from_dict(
        {
            **patient_study(stated=True),
            "study": {**patient_study(stated=True)["study"], "schema": reordered(SCHEMA)},
        }
    )
    assert other.digest() != study.digest() == again.digest()
    folder = make_server(tmp_path, patient_study(stated=True))
    assert StudyFile.in_folder(folder) == study


def test_a_site_without_a_schema_is_told_that_the_study_states_one(tmp_path: Path) -> None:
    site = make_site(tmp_path / "a", "a")
    about = {"name": "demo", "sites": list(SITES), "schema": without_persons()}
    answer = site.answer(Desk({**study_values(), "study": about}).hello())
    assert "has no schema, and the study states one" in answer.reason


def test_a_study_file_names_its_schema_by_a_path_beside_it(tmp_path: Path) -> None:
    (tmp_path / "columns.toml").write_text(tomli_w.dumps(SCHEMA))
    values = patient_study(stated=True)
    values["study"]["schema"] = "columns.toml"
    path = tmp_path / "study.toml"
    path.write_text(tomli_w.dumps(values))
    study = StudyFile.from_file(path)
    assert study == StudyFile.from_dict(patient_study(stated=True))
    (tmp_path / "columns.toml").unlink()
    with pytest.raises(ConfigurationError, match=r"columns\.toml: cannot be read"):
        StudyFile.from_file(path)


@pytest.mark.parametrize(
    "schema",
    [
        1,
        [],
        "{path}",
        {},
        {"target": "ill"},
        {**SCHEMA, "person_word": 5},
        {**SCHEMA, "person": [1]},
        {**SCHEMA, "ignore": {}},
        {**SCHEMA, "records_per_person": "many"},
        {**SCHEMA, "columns": [1]},
        {**SCHEMA, "columns": [{"name": "x"}]},
        {**SCHEMA, "columns": [{"name": "x", "type": "number"}] * 2},
        {**SCHEMA, "columns": {**SCHEMA["columns"], "age": {"type": {}}}},
        {**SCHEMA, "columns": {**SCHEMA["columns"], "age": {"type": "number", "range": "ab"}}},
        {**SCHEMA, "columns": {**SCHEMA["columns"], "sex": {"type": "category", "fill": []}}},
    ],
)
def test_whatever_a_server_sends_as_a_schema_is_refused_and_no_file_is_read(
    schema: Any, tmp_path: Path
) -> None:
    site = make_schema_site(tmp_path / "a")
    path = str(site.folder / "schema.toml")  # a file that would do, if it were read
    header = Desk(patient_study(stated=True)).hello().header
    given = path if schema == "{path}" else schema
    study = {**header["study"], "study": {**header["study"]["study"], "schema": given}}
    answer = site.answer(Message(header={**header, "study": study}))
    assert (answer.accepted, answer.header["code"]) == (False, 2)
    assert "\n" not in answer.reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"schema": SCHEMA, "unit": "donor"},
            "'donor' was given, and the schema makes it 'patient'",
        ),
        (
            {"schema": SCHEMA, "feature_shape": [4]},
            r"\[4\] was given, and the schema makes it \[5\]",
        ),
        ({"schema": SCHEMA, "classes": 3}, "3 was given, and the schema makes it 2"),
        ({"unit": "client", "feature_shape": [5], "classes": 2}, "'client' is no word for a unit"),
        ({"unit": "p4tient", "feature_shape": [5], "classes": 2}, "'p4tient' is no word"),
        ({"schema": {**SCHEMA, "target": ["ill", "sick"]}}, "its target 'sick' is not among"),
    ],
)
def test_a_study_that_contradicts_its_schema_is_one_sentence(
    change: dict[str, Any], words: str
) -> None:
    about = {"name": "demo", "sites": list(SITES), **change}
    with pytest.raises(ConfigurationError, match=words):
        StudyFile.from_dict({**study_values(), "study": about})


# -- what a server is told -------------------------------------------------------------------------


def test_no_answer_before_training_depends_on_a_value(tmp_path: Path) -> None:
    answers = []
    for copy in ("one", "two"):
        site = make_schema_site(tmp_path / copy)
        if copy == "two":
            path = site.folder / "records.csv"
            path.write_text(path.read_text().replace("yes", "no").replace(",f,", ",m,"))
        (site.folder / "token").write_text("same")
        desk = Desk(patient_study(stated=True))
        said = [Site(site.folder).answer(desk.hello()), Site(site.folder).answer(desk.terms())]
        answers.append([answer.header for answer in said])
    assert answers[0] == answers[1]
    assert all(header["ok"] for header in answers[0])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("sex,remarks", "gender,remarks", "has no column 'sex'"),
        (",m,", ",w,", "'w'"),
        ("p3,", ",", "names no patient in 'patient_id'"),
    ],
)
def test_records_that_do_not_follow_the_schema_stay_in_the_site_s_log(
    old: str, new: str, words: str, tmp_path: Path
) -> None:
    site = make_schema_site(tmp_path / "a")
    path = site.folder / "records.csv"
    path.write_text(path.read_text().replace(old, new))
    answer = Site(site.folder).answer(Desk(patient_study()).hello())
    assert answer.reason == "something went wrong at the site; its own log says what"
    assert words in (site.folder / "site.log").read_text()


# -- the commands ----------------------------------------------------------------------------------


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = run_command(list(arguments))
    captured = capsys.readouterr()
    return code, " ".join((captured.out + captured.err).split())


def _init(capsys: pytest.CaptureFixture[str], base: Path, *more: str) -> tuple[int, str]:
    given = ["--data", str(base / "t.csv"), "--schema", str(base / "s.toml"), *INIT]
    return _run(capsys, "site", "init", str(base / "home"), *given, *more)


def test_the_commands_of_a_site_speak_of_patients(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_table(tmp_path / "t.csv")
    (tmp_path / "s.toml").write_text(tomli_w.dumps(SCHEMA))
    code, out = _init(capsys, tmp_path, "--delta", "0.05")
    assert (
        code,
        "32 training patients, 2 classes, epsilon 4 at delta 0.05 per patient" in out,
    ) == (0, True)
    assert "is not below 1 / 32 patients: a method may disclose some patients in full" in out
    home = tmp_path / "home"
    assert (home / "schema.toml").read_bytes() == (tmp_path / "s.toml").read_bytes()
    assert SiteFile.in_folder(home).data.schema == "schema.toml"
    desk = Desk(patient_study(stated=True))
    assert Site(home).answer(desk.terms()).accepted
    assert Site(home).answer(desk.train(0)).accepted
    code, out = _run(capsys, "site", "status", str(home))
    assert (code, "against the server, per patient" in out) == (0, True)
    code, out = _run(capsys, "site", "spend", str(home), "--page", str(tmp_path / "page.html"))
    assert (code, "per patient, zero_out adjacency" in out) == (0, True)
    page = (tmp_path / "page.html").read_text()
    assert "patient" in page
    assert "per record" not in page
    assert "Each record" not in page
    told = json.loads(
        _run(capsys, "site", "spend", str(home), "--json")[1].partition("] ")[0] + "]"
    )
    assert {line["unit"] for line in told} == {"patient"}


@pytest.mark.parametrize(
    ("schema", "more", "expected", "words"),
    [
        (None, [], 2, "s.toml: cannot be read"),
        ("target = ", [], 2, "s.toml: is not TOML"),
        ('target = "ill"', [], 2, "'columns' is missing"),
        (tomli_w.dumps({**SCHEMA, "persn": "x"}), [], 2, "there is no key 'persn'"),
        (tomli_w.dumps({**SCHEMA, "target": ["age", "blood"]}), [], 2, "cannot be an indicator"),
        (tomli_w.dumps({**SCHEMA, "ignore": []}), [], 3, "'remarks' that the schema does not know"),
        (tomli_w.dumps({**SCHEMA, "person": "pid"}), [], 3, "has no column 'pid'"),
        (tomli_w.dumps(SCHEMA), ["--label", "ill"], 2, "is given beside a schema"),
        (tomli_w.dumps(SCHEMA), ["--classes", "2"], 2, "is given beside a schema"),
        (tomli_w.dumps(SCHEMA), ["--task", "binary"], 2, "'binary' was given, and a schema"),
        (
            tomli_w.dumps(SCHEMA),
            ["--unit", "record"],
            2,
            "is 'record', and the schema protects a patient",
        ),
        (
            tomli_w.dumps(SCHEMA),
            ["--unit", "donor"],
            2,
            "is 'donor', and the schema protects a patient",
        ),
        (tomli_w.dumps(SCHEMA), ["--unit", "p4"], 2, "'p4' was given; give 'record', 'client', or"),
    ],
)
def test_a_site_is_not_made_with_a_wrong_schema(
    schema: str | None,
    more: list[str],
    expected: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    write_table(tmp_path / "t.csv")
    if schema is not None:
        (tmp_path / "s.toml").write_text(schema)
    code, out = _init(capsys, tmp_path, *more)
    assert (code, words in out) == (expected, True), out
    assert not list((tmp_path / "home").glob("*.*"))
    (tmp_path / "s.toml").write_text(tomli_w.dumps(SCHEMA))
    assert _init(capsys, tmp_path)[0] == 0


def test_a_schema_that_is_lost_stops_the_site_and_tells_the_server_no_path(tmp_path: Path) -> None:
    from dpfl.deploy.site import answered

    site = make_schema_site(tmp_path / "a")
    (site.folder / "schema.toml").unlink()
    answer = answered(site.folder, Desk(patient_study()).hello())
    assert answer.reason == "the site's folder cannot be used; its operator must look at it"
    assert "schema.toml: cannot be read" in (site.folder / "site.log").read_text()


@pytest.mark.parametrize(
    ("data", "budget", "words"),
    [
        ({"file": "x.csv", "classes": 2}, PATIENT, "no .data. schema that names persons"),
        ({"file": "x.csv", "classes": 2, "schema": "s.toml"}, RECORD, "is given beside a schema"),
        ({"file": "x.csv", "schema": 3}, RECORD, "schema"),
    ],
)
def test_a_site_s_file_that_contradicts_itself_is_one_sentence(
    data: Any, budget: Any, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        SiteFile.from_dict({"site": {"id": "a"}, "data": data, "budget": budget})


def test_several_targets_are_refused(tmp_path: Path) -> None:
    columns = {**SCHEMA["columns"], "bad": {"type": "boolean"}}
    site = make_schema_site(tmp_path / "a")
    told = tomli_w.dumps({**SCHEMA, "columns": columns, "target": ["ill", "bad"]})
    (site.folder / "schema.toml").write_text(told)
    with pytest.raises(ConfigurationError, match="has 2 targets, and sites learn one"):
        LoadedSite(site.folder)


def test_a_model_is_tried_on_the_records_of_the_test_patients(tmp_path: Path) -> None:
    federation = deploy(tmp_path, patient_study())
    federation.play()
    site = federation.sites["a"]
    (outcome,) = outcomes(site.folder)
    tried = outcome.tried("a", site.federation())
    labels = site.federation().shards["a"].test_labels
    known = labels[labels >= 0]
    assert labels.shape == (8, 2)
    assert tried.test_records == len(known) < 16
    share = float(known.float().mean())
    assert tried.constant == pytest.approx(max(share, 1 - share))
