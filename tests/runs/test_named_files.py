"""Files that a person names are read where they are named, and nowhere else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import save_file

from dpfl.cli.options import Asked
from dpfl.core.errors import ConfigurationError
from dpfl.experiments.planning import describe
from dpfl.experiments.study import Sweep
from dpfl.runs.deployment import StudyFile
from dpfl.runs.experiment import Experiment
from tests.audited import closed

BASE: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"clients": 3},
    "budgets": {"epsilon": 1.0, "delta": 1e-3},
    "method": {"name": "weiavg", "lr": 0.1, "clip": 1.0, "batch_size": 8, "local_steps": 2},
    "run": {"rounds": 1},
}
STUDY: dict[str, Any] = {
    "study": {"name": "s", "sites": ["a", "b"]},
    "method": BASE["method"],
    "run": {"rounds": 1},
}
WEIGHTED = {**BASE, "model": {"weights": "w.safetensors"}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand beside the files, which are named by relative paths."""
    monkeypatch.chdir(tmp_path)
    save_file({"1.bias": torch.zeros(10)}, "w.safetensors")
    Path("b.csv").write_text("id,epsilon\nclient-0,1\nclient-1,2\nclient-2,3\n")
    Path("s.toml").write_text('target = "ill"\n[columns.age]\ntype = "number"\n')
    with Path("s.toml").open("a") as file:
        file.write('range = [0, 100]\n[columns.ill]\ntype = "boolean"\n')
    return tmp_path


NAMED: dict[str, tuple[Callable[[Any], object], dict[str, Any]]] = {
    "weights": (Experiment.from_dict, WEIGHTED),
    "budgets": (Experiment.from_dict, {**BASE, "budgets": {"epsilon": "b.csv", "delta": 1e-3}}),
    "a schema": (Experiment.from_dict, {**BASE, "data": {"folder": "f", "schema": "s.toml"}}),
    "a study's schema": (
        StudyFile.from_dict,
        {**STUDY, "study": {**STUDY["study"], "schema": "s.toml"}},
    ),
    "a study's weights": (StudyFile.from_dict, {**STUDY, "model": WEIGHTED["model"]}),
}


@pytest.mark.parametrize("what", NAMED)
def test_plain_values_open_no_file(what: str) -> None:
    read, values = NAMED[what]
    with pytest.raises(ConfigurationError):  # what is imported when first needed is there
        read(values)
    with closed() as tried, pytest.raises(ConfigurationError):
        read(values)
    assert not tried


def swept() -> Experiment:
    values = {"title": "t", "base": BASE, "methods": {"weiavg": {}}}
    study = Sweep.from_dict({**values, "vary": {"model.weights": ["w.safetensors"]}})
    (case,) = study.cases()
    return study.experiment(case, "weiavg", {}, 0)


def from_file() -> Experiment:
    Path("e.toml").write_text(tomli_w.dumps(WEIGHTED))
    return Experiment.from_file(Path("e.toml"))


DOORS: dict[str, Callable[[], Experiment]] = {
    "a file": from_file,
    "a command's file": lambda: Asked(file=Path("e.toml")).experiment(),
    "a command's options": lambda: Asked(
        file=Path("plain.toml"), given={"set": ["model.weights=w.safetensors"]}
    ).experiment(),
    "values": lambda: Experiment.from_options(WEIGHTED),
    "a sweep": swept,
}


@pytest.mark.parametrize("door", DOORS)
def test_weights_are_named_by_their_content_at_every_door(
    door: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = from_file()
    Path("plain.toml").write_text(tomli_w.dumps(BASE))
    found = DOORS[door]()
    digest = hashlib.sha256(Path("w.safetensors").read_bytes()).hexdigest()
    assert found.model.weights_sha256 == digest
    assert found.model.weights == str(folder / "w.safetensors")
    assert found.digest() == expected.digest()
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    again = Experiment.from_dict(found.to_dict())  # as a run is resumed
    again.build_model(again.federation())


def test_python_takes_files_by_name() -> None:
    values = {**BASE, "budgets": {"epsilon": "b.csv", "delta": 1e-3}}
    assert describe(values) is not None
    assert Experiment.from_options(values).budgets.epsilon == {
        f"client-{i}": i + 1 for i in range(3)
    }


def test_a_study_s_schema_lies_beside_its_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {**STUDY, "study": {**STUDY["study"], "schema": "s.toml"}}
    Path("study.toml").write_text(tomli_w.dumps(values))
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    study = StudyFile.from_file(folder / "study.toml")
    assert study.study.described() is not None
    assert StudyFile.from_dict(study.to_dict()).digest() == study.digest()
