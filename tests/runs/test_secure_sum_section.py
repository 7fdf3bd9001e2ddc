"""The [secure_sum] section of experiments and studies, and --secure-sum."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dpfl.cli.main import run_command
from dpfl.core.errors import ConfigurationError, DpflError, PrivacyRefusal
from dpfl.methods import METHODS
from dpfl.plugs.channels import Digital
from dpfl.plugs.secure_sum import SecureSum
from dpfl.runs.deployment import StudyFile
from dpfl.runs.experiment import Experiment, for_method

METHOD = {"lr": 0.2, "clip": 1.0, "batch_size": 16, "local_steps": 2}
EXPERIMENT: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"clients": 10},
    "budgets": {"epsilon": 4.0, "delta": 1e-3},
    "method": {"name": "dp_fed", **METHOD},
    "run": {"rounds": 2},
}
STUDY: dict[str, Any] = {
    "study": {
        "name": "one",
        "sites": [f"site-{i}" for i in range(10)],
        "feature_shape": [4],
        "classes": 2,
    },
    "method": {"name": "udp_fedavg", **METHOD},
    "run": {"rounds": 2},
}


def built(kind: type[Experiment] | type[StudyFile], **section: int) -> Any:
    values = EXPERIMENT if kind is Experiment else STUDY
    made = kind.from_dict({**values, "secure_sum": section})
    return made, made.strategy(10) if isinstance(made, Experiment) else made.strategy()


@pytest.mark.parametrize("kind", [Experiment, StudyFile])
def test_the_section_applies_to_any_method_and_survives_its_file(
    kind: type[Experiment] | type[StudyFile], tmp_path: Path
) -> None:
    made, strategy = built(kind, tolerated_dropouts=2)
    assert strategy.channel == SecureSum(tolerated_dropouts=2, colluders=1)
    (tmp_path / "file.toml").write_text(made.to_toml())
    assert kind.from_file(tmp_path / "file.toml") == made
    others = [built(kind)[0], built(kind, tolerated_dropouts=2, colluders=3)[0]]
    assert len({one.digest() for one in (made, *others)}) == 3
    _, empty = built(kind)
    assert empty.channel == SecureSum()


def test_files_without_the_section_are_what_they_were() -> None:
    plain = Experiment.from_dict(EXPERIMENT)
    assert "secure_sum" not in plain.to_dict()
    assert plain.strategy(10).channel == Digital()
    assert "secure_sum" not in StudyFile.from_dict(STUDY).offer()


def test_sites_are_told_of_the_secure_sum() -> None:
    study, _ = built(StudyFile, colluders=2)
    assert study.offer()["secure_sum"] == {"tolerated_dropouts": 0, "colluders": 2}
    assert StudyFile.from_dict(study.offer()).strategy() == study.strategy()


def test_runs_with_and_without_it_are_other_methods() -> None:
    with_it, without = built(Experiment)[0], Experiment.from_dict(EXPERIMENT)
    assert with_it.settings_key() != without.settings_key()


@pytest.mark.parametrize("values", [EXPERIMENT, STUDY])
@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"colluders": -1}, "colluders"),
        ({"tolerated_dropouts": 0.5}, "tolerated_dropouts"),
        ({"dropouts": 1}, "dropouts"),
    ],
)
def test_what_makes_no_sense_is_refused(
    values: dict[str, Any], section: dict[str, Any], said: str
) -> None:
    kind = Experiment if values is EXPERIMENT else StudyFile
    with pytest.raises(ConfigurationError, match=said):
        kind.from_dict({**values, "secure_sum": section})


def test_a_study_with_too_few_sites_is_refused_with_its_numbers() -> None:
    study = StudyFile.from_dict({**STUDY, "secure_sum": {"tolerated_dropouts": 5}})
    with pytest.raises(PrivacyRefusal, match="10 members of whom 1 may collude"):
        study.strategy()


def test_an_experiment_that_cannot_be_is_refused_before_anything_is_loaded() -> None:
    for name in METHODS:
        if name not in ("fedavg", "pfa", "pooled_dp"):
            continue
        known = {key: own for key, own in METHOD.items() if key in METHODS[name].settings}
        values = {**EXPERIMENT, "method": {"name": name, **known}, "secure_sum": {}}
        with pytest.raises(DpflError, match=name):
            Experiment.from_dict(values).check()


# ---- the command line ----------------------------------------------------------------------------

ASKED = ["--dataset", "digits", "--clients", "10", "--rounds", "2", "--local-steps", "1"]
ASKED += ["--budgets", "4", "--delta", "1e-3", "--clip", "1", "--secure-sum"]


def test_describe_says_who_must_be_there_and_whose_noise_counts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = [*ASKED, "--method", "dp_fed", "--set", "secure_sum.tolerated_dropouts=2"]
    assert run_command(["describe", *options, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["secure_sum"] == {
        "members": 10,
        "least": 8,
        "colluders": 1,
        "honest": 7,
        "threshold": 6,
    }
    assert told["observer"] == "server"
    assert "1 member of a sum may work together with it" in told["assumptions"][0]
    assert run_command(["describe", *options]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "8 of 10 uploads and 6 signatures unmask a sum" in said
    assert "against the server with up to 1 of them the noise of 7 counts" in said
    assert "against the server with up to 1 colluding client (zero_out adjacency)" in said


def test_where_own_noise_counts_alone_nobody_is_said_to_share_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(["describe", *ASKED, "--method", "weiavg", "--local-steps", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "own noise counts alone" in said
    assert "protects a record against the server (zero_out adjacency)" in said
    assert "shares of noise" not in said


def test_a_study_waits_for_as_many_sites_as_its_sum_needs() -> None:
    study, _ = built(StudyFile, tolerated_dropouts=2, colluders=2)
    assert study.least_sites == 7
    assert study.least_sites_by == "[secure_sum]"
    enough = StudyFile.from_dict({**STUDY, "run": {"rounds": 2, "least_sites": 7}})
    plain, own = StudyFile.from_dict(STUDY), replace_section(enough, tolerated_dropouts=2)
    assert (plain.least_sites, own.least_sites) == (2, 7)
    assert {plain.least_sites_by, own.least_sites_by} == {"least_sites"}


def replace_section(study: StudyFile, **section: int) -> StudyFile:
    return StudyFile.from_dict({**study.offer(), "secure_sum": section})


def test_the_title_in_a_ledger_names_the_adversary() -> None:
    told = built(StudyFile, tolerated_dropouts=2, colluders=2)[0].title
    assert (
        told == "one: udp_fedavg, over a secure sum against the server with up to 2 colluding sites"
    )
    assert StudyFile.from_dict(STUDY).title == "one: udp_fedavg"
    alone = {**STUDY, "method": {"name": "weiavg", **METHOD}, "secure_sum": {}}
    assert (
        StudyFile.from_dict(alone).title
        == "one: weiavg, over a secure sum where own noise counts alone"
    )
    assert built(StudyFile, colluders=0)[0].title.endswith("the server with all sites trusted")


def test_a_study_with_one_honest_site_in_a_sum_is_refused() -> None:
    two = {**STUDY, "study": {**STUDY["study"], "sites": ["a", "b"]}, "secure_sum": {}}
    study = StudyFile.from_dict(two)
    assert study.least_sites == 3
    with pytest.raises(PrivacyRefusal, match="one honest site only"):
        study.strategy()


def test_a_refusal_has_the_exit_code_of_its_kind(capsys: pytest.CaptureFixture[str]) -> None:
    poisson = ["--method", "dp_fed", "--cohort", "5"]
    assert run_command(["describe", *ASKED, *poisson]) == 4
    assert "sampling = 'uniform'" in capsys.readouterr().err
    assert run_command(["describe", *ASKED, "--method", "fedceo"]) == 2
    assert "personal_starts = false" in capsys.readouterr().err
    few = ["--method", "dp_fed", "--set", "secure_sum.colluders=10"]
    assert run_command(["describe", *ASKED, *few]) == 4
    assert "10 members of whom 10 may collude" in " ".join(capsys.readouterr().err.split())


def test_references_are_run_without_a_secure_sum() -> None:
    values = {"method": {"name": "udp_fedavg", "lr": 0.1}, "secure_sum": {"colluders": 2}}
    assert "secure_sum" not in for_method(values, "fedavg")
    assert "secure_sum" not in for_method(values, "pooled_dp")
    assert for_method(values, "dp_fed")["secure_sum"] == {"colluders": 2}
    assert "secure_sum" in for_method(values, "fedavg", compared=False)  # which is refused
