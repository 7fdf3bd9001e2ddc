"""What stands in studies/ and examples/ opens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpfl.experiments.ranking import standings
from dpfl.experiments.results import StudyResult
from dpfl.experiments.study import Sweep
from dpfl.runs.experiment import Experiment

ROOT = Path(__file__).parents[2]
STUDIES = sorted((ROOT / "studies").rglob("*.toml"))
RECORDED = [path.with_suffix(".json") for path in STUDIES if path.with_suffix(".json").exists()]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda p: p.stem)
def test_the_examples_open(path: Path) -> None:
    Experiment.from_file(path).check()


@pytest.mark.parametrize("path", STUDIES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_the_study_files_open(path: Path) -> None:
    study = Sweep.from_file(path)
    assert study.cases() and study.seeds


@pytest.mark.parametrize("path", RECORDED, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_recorded_results_of_version_0_1_are_read_and_ranked(path: Path) -> None:
    told, result = json.loads(path.read_text()), StudyResult.read(path)
    assert len(result.cells) == len(told["cells"])
    for cell, own in zip(result.cells, told["cells"], strict=True):
        assert [run.accuracy for run in cell.runs] == [run["accuracy"] for run in own["runs"]]
        for run, written in zip(cell.runs, own["runs"], strict=True):
            assert len(run.flags) == len(written.get("flags", written.get("stamps", [])))
            budget = written["epsilon"].get("budget") or written["epsilon"].get("granted")
            if written["epsilon"].get("spent") and budget:
                assert run.epsilon is not None
                assert run.epsilon.budget is not None
                assert run.epsilon.budget.to_dict() == budget
    assert len(standings(result.of_case(result.cases[0]))) == len(result.of_case(result.cases[0]))
    again = StudyResult.from_dict(json.loads(json.dumps(result.to_dict())))
    assert again.to_dict() == result.to_dict()
