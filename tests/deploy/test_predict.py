"""A model that was trained between sites predicts for new records: at the server, and at a site."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import dpfl
from dpfl.cli.main import run_command
from dpfl.core.errors import FolderError
from dpfl.deploy.finish import finish_delivered
from dpfl.deploy.outcome import outcomes
from dpfl.runs.predictor import HEAD, PRIVATE, read_records
from tests.deploy.federation import FEATURES, Federation, study_values
from tests.deploy.test_schema import SCHEMA, SITES, deploy, patient_study

NEW = "patient_id,blood,age,sex,remarks\nq1,120,30,f,\nq2,,80,m,seen\nq3,90,70,f,\n"


SINGLE = {**SCHEMA, "records_per_person": 1}


def _patients(tmp_path: Path, method: str = "weiavg") -> Federation:
    """A study of patients that has ended, with a file of new ones beside it."""
    values = patient_study(method, stated=True)
    values["study"]["schema"] = SINGLE
    if method.startswith("preconditioned"):
        values["method"] = {"name": method}
        values["run"].pop("rounds")
    federation = deploy(tmp_path, values, schema=SINGLE)
    federation.play()
    (tmp_path / "new.csv").write_text(NEW)
    return federation


def _predict(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[list[str], str]:
    assert run_command(["predict", *map(str, arguments)]) == 0
    captured = capsys.readouterr()
    rows = csv.DictReader(io.StringIO(captured.out))
    return [row["prediction"] for row in rows], captured.err


@pytest.mark.parametrize("method", ["weiavg", "preconditioned"])
def test_new_patients_are_predicted_from_their_raw_columns_everywhere(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    federation = _patients(tmp_path, method)
    site = federation.sites["a"]
    (outcome,) = outcomes(site.folder)
    folders = (federation.server, outcome.folder, site.folder)
    answers = [_predict(capsys, folder, tmp_path / "new.csv", "--common") for folder in folders]
    assert all(rows == answers[0][0] for rows, _ in answers)
    assert len(answers[0][0]) == 3
    assert set(answers[0][0]) <= {"no", "yes"} | {"false", "true"} | {"0", "1"}


def test_what_a_server_s_card_says_is_for_the_world(tmp_path: Path) -> None:
    federation = _patients(tmp_path)
    for folder in (federation.server, outcomes(federation.sites["a"].folder)[0].folder):
        card = json.loads((folder / "model.json").read_text())
        text = json.dumps({name: value for name, value in card.items() if name != "schema"})
        assert not {f'"{site}"' for site in SITES} & set(text.split())
        assert set(card) == {
            *("format", "task", "inputs", "shape", "schema", "built", "module", "frozen", "note")
        }
        assert "sites" not in text and "examples" not in text and "rounds" not in text


@pytest.mark.parametrize("method", ["ppsgd", "centaur"])
def test_a_site_predicts_with_its_own_part_and_nobody_else_does(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = {"epsilon": 8.0, "delta": 0.01, "unit": "client", "observer": "world"}
    values = {**study_values(method), "model": {"name": "mlp", "hidden": 4}}
    federation = Federation.of(tmp_path, values, budget=budget, policy={"trust_server": True})
    summary = federation.play()
    assert summary["delivered"] == ["a", "b", "c"]
    rows = np.random.default_rng(0).standard_normal((50, FEATURES)).round(3)
    lines = [",".join(f"f{i}" for i in range(FEATURES)), *(",".join(map(str, r)) for r in rows)]
    (tmp_path / "new.csv").write_text("\n".join(lines) + "\n")
    site = federation.sites["a"].folder
    (outcome,) = outcomes(site)
    own = dpfl.load(site)
    common = dpfl.load(site, common=True)
    private = load_file(outcome.folder / PRIVATE)
    for name, parameter in own.model.named_parameters():
        assert torch.equal(parameter, private[name])
    assert not all(
        torch.equal(one, other)
        for one, other in zip(own.model.parameters(), common.model.parameters(), strict=True)
    )
    assert own.personal and not common.personal
    _, notes = _predict(capsys, site, tmp_path / "new.csv")
    assert "own part" in notes
    # What is called so in a server's folder is somebody else's.
    planted = federation.server / PRIVATE
    shutil.copy(outcome.folder / PRIVATE, planted)
    shutil.copy(outcome.folder / PRIVATE, federation.server / HEAD)
    at_server = dpfl.load(federation.server)
    assert not at_server.personal
    records = read_records(tmp_path / "new.csv", at_server)
    assert np.array_equal(at_server.outputs(records).numpy(), common.outputs(records).numpy())
    # Nor is it taken where a model's folder has left the site.
    shutil.copytree(outcome.folder, tmp_path / "models" / "elsewhere")
    assert not dpfl.load(tmp_path / "models" / "elsewhere").personal


def test_a_site_predicts_with_its_own_head_once_it_has_one(tmp_path: Path) -> None:
    site = _patients(tmp_path, "preconditioned").sites["a"]
    before = dpfl.load(site.folder)
    finish_delivered(site)
    head = load_file(outcomes(site.folder)[0].folder / HEAD)
    after = dpfl.load(site.folder)
    assert not before.personal and "head" in after.personal
    found = dict(after.model.named_parameters())
    assert head and all(torch.equal(found[name], tensor) for name, tensor in head.items())


def test_a_site_s_own_schema_reads_tables_where_the_study_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    federation = deploy(tmp_path, patient_study())
    federation.play()
    (tmp_path / "new.csv").write_text(NEW)
    rows, _ = _predict(capsys, federation.sites["b"].folder, tmp_path / "new.csv")
    assert len(rows) == 3
    assert dpfl.load(federation.server).schema is None


def test_the_newest_of_two_models_is_the_site_s(tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, study_values())
    federation.play()
    site = federation.sites["a"].folder
    (first,) = outcomes(site)
    second = first.folder.with_name("later")
    shutil.copytree(first.folder, second)
    weights = load_file(first.model)
    save_file(
        {name: torch.ones_like(x) for name, x in weights.items()}, second / "model.safetensors"
    )
    newest = dpfl.load(site).model
    assert all(bool((one == 1).all()) for one in newest.parameters())
    oldest = dpfl.load(first.folder).model
    assert not all(bool((one == 1).all()) for one in oldest.parameters())


def test_a_site_without_a_model_and_a_model_that_is_not_finite_are_refused(tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, study_values())
    with pytest.raises(FolderError, match="has no model yet"):
        dpfl.load(federation.sites["a"].folder)
    federation.play()
    weights = load_file(federation.server / "model.safetensors")
    weights["1.bias"][0] = float("nan")
    save_file(weights, federation.server / "model.safetensors")
    with pytest.raises(FolderError, match=r"'1.bias' holds numbers that are not finite"):
        dpfl.load(federation.server)
    text = repr(dpfl.load(federation.sites["a"].folder))
    assert len(text) < 300 and "2 classes" in text
