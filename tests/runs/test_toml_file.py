"""Files as data: a misspelt key is met with the right one of its own section, wherever that section
stands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpfl.core.errors import ConfigurationError
from dpfl.runs.deployment import StudyFile
from dpfl.runs.experiment import Experiment
from dpfl.runs.site_file import SiteFile
from dpfl.runs.toml_file import TomlFile

SITE: dict[str, Any] = {
    "site": {"id": "a"},
    "data": {"file": "a.csv", "classes": 2},
    "budget": {"epsilon": 1.0, "delta": 1e-5},
}
RUN: dict[str, Any] = {
    "data": {"name": "digits"},
    "method": {"name": "fedavg"},
    "run": {"rounds": 1},
}
STUDY: dict[str, Any] = {
    "study": {"name": "s", "sites": ["a", "b"], "feature_shape": [3], "classes": 2},
    "method": {"name": "weiavg", "clip": 1.0, "lr": 0.1},
    "run": {"rounds": 3},
}


@pytest.mark.parametrize(
    ("kind", "values", "sentence"),
    [
        (
            SiteFile,
            {**SITE, "budget": {"epsilonn": 1.0, "delta": 1e-5}},
            "site, [budget] epsilonn: .*mean 'epsilon'",
        ),
        (
            SiteFile,
            {**SITE, "polcy": {}},
            "site, [polcy]: there is no key 'polcy'; did you mean 'policy'",
        ),
        (
            SiteFile,
            {**SITE, "policy": {"largest_clip": -1}},
            "[policy] largest_clip: -1 was given; give a number above 0",
        ),
        (
            StudyFile,
            {**STUDY, "run": {"rounds": 3, "roundtimeout": 5}},
            "[run] roundtimeout: .*mean 'round_timeout'",
        ),
        (StudyFile, {**STUDY, "run": {}}, "study, [run] rounds: is missing; give a value"),
        (
            Experiment,
            {**RUN, "clients": {"c-1": {"batchsize": 1}}},
            "[clients] c-1.batchsize: .*mean 'batch_size'",
        ),
        (
            Experiment,
            {**RUN, "run": {"rounds": "many"}},
            "[run] rounds: 'many' was given; give a whole number$",
        ),
        (
            Experiment,
            {**RUN, "run": {"rounds": 2.5}},
            "[run] rounds: 2.5 was given; give a whole number$",
        ),
        (
            Experiment,
            {**RUN, "run": {"rounds": 1, "seed": -1}},
            "[run] seed: -1 was given; give a number of at least 0$",
        ),
        (
            Experiment,
            {**RUN, "run": {"rounds": 1, "dropout": 2}},
            "[run] dropout: 2 was given; give a number of at most 1$",
        ),
        (
            Experiment,
            {**RUN, "run": {"rounds": 1, "sampling": "often"}},
            "[run] sampling: 'often' was given; give 'uniform' or 'poisson'$",
        ),
        (
            Experiment,
            {**RUN, "budgets": {"epsilon": [1.0, "x"]}},
            "[budgets] epsilon.1: 'x' was given; give a number$",
        ),
        (Experiment, {**RUN, "run": 5}, "[run]: 5 was given; give a table$"),
        (
            Experiment,
            {**RUN, "partition": {"validation": "perhaps"}},
            "[partition] validation: 'perhaps' was given; give true or false$",
        ),
        (
            Experiment,
            {**RUN, "client_settings": {"lr": 0.1}},
            "[client_settings] lr: 0.1 was given; give a list$",
        ),
        (
            StudyFile,
            {**STUDY, "study": {**STUDY["study"], "sites": ["a/b"]}},
            "[study] sites.0: 'a/b' was given; give a name .*without slashes",
        ),
        (
            StudyFile,
            {**STUDY, "study": {**STUDY["study"], "sites": []}},
            "[study] sites: .* was given; give at least 1 value",
        ),
    ],
)
def test_the_first_problem_is_one_sentence_about_its_own_section(
    kind: type[TomlFile], values: dict[str, Any], sentence: str
) -> None:
    pattern = sentence.replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(ConfigurationError, match=pattern):
        kind.from_dict(values)


@pytest.mark.parametrize(
    ("kind", "values"), [(SiteFile, SITE), (StudyFile, STUDY), (Experiment, RUN)]
)
def test_what_is_written_reads_back_the_same(
    kind: type[TomlFile], values: dict[str, Any], tmp_path: Path
) -> None:
    file = kind.from_dict(values)
    (tmp_path / "file.toml").write_text(file.to_toml())
    assert kind.from_file(tmp_path / "file.toml") == file
