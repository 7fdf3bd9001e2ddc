"""What sites learn: a study's task is checked against what a site declares, agreed on, trained and
tried; a server is told nothing of the records by it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from dpfl.cli.main import run_command
from dpfl.core.errors import ConfigurationError, DpflError
from dpfl.deploy.messages import Message
from dpfl.deploy.outcome import outcomes
from dpfl.deploy.requests import END
from dpfl.deploy.site import Site
from dpfl.runs.deployment import Offer, StudyFile
from dpfl.runs.site_file import SiteFile
from dpfl.sim.train import train
from dpfl.tasks import Binary, Classification, Regression
from tests.deploy.federation import (
    FEATURES,
    METHOD,
    RECORD,
    SIGNER,
    Desk,
    Federation,
    charged,
    make_site,
    study_values,
)

REGRESSION = {"name": "regression"}
BINARY = {"name": "binary", "metric": "accuracy"}


def task_values(task: dict[str, Any], **more: Any) -> dict[str, Any]:
    values = study_values(**more)
    del values["study"]["classes"]
    return {**values, "task": task}


def with_numbers(site: Site, slope: float = 2.0, shift: float = 5.0) -> Site:
    """The same site, whose label column holds a linear function of the first feature."""
    path = site.folder / "records.csv"
    head, *lines = path.read_text().splitlines()
    rows = [line.rsplit(",", 1)[0] for line in lines]
    told = [f"{row},{slope * float(row.split(',')[0]) + shift}" for row in rows]
    path.write_text("\n".join([head, *told]) + "\n")
    file = site.folder / "site.toml"
    text = file.read_text().replace("classes = 2\n", "")
    file.write_text(text.replace('targets = "classes"', 'targets = "numbers"'))
    return Site(site.folder)


def make_number_site(folder: Path, name: str = "a", **more: Any) -> Site:
    return with_numbers(make_site(folder, name, **more))


# -- the files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "task", "expected"),
    [
        (2, None, Classification(classes=2)),
        (3, {"metric": "f1"}, Classification(classes=3, metric="f1")),
        (None, {"classes": 4}, Classification(classes=4)),
        (2, {"class_weights": [1.0, 3.0]}, Classification(classes=2, class_weights=(1.0, 3.0))),
        (None, BINARY, Binary(metric="accuracy")),
        (2, {"name": "binary"}, Binary()),
        (None, {"name": "regression", "loss": "huber"}, Regression(loss="huber")),
    ],
)
def test_a_study_names_its_task(classes: int | None, task: Any, expected: Any) -> None:
    values = study_values()
    values["study"]["classes"] = classes
    study = StudyFile.from_dict({**values, "task": task})
    assert study.learned() == expected
    again = StudyFile.from_dict(study.offer())  # as it travels to sites
    assert (again.learned(), again.digest()) == (expected, study.digest())
    last = list(study.build_model().parameters())[-1]
    assert last.shape == (expected.width,)


@pytest.mark.parametrize(
    ("classes", "task", "words"),
    [
        (None, None, r"\[study\] classes: is missing"),
        (None, {"name": "classification"}, r"\[study\] classes: is missing"),
        (3, REGRESSION, "3 classes for regression; leave it out"),
        (3, BINARY, "3 classes do not fit binary"),
        (3, {"classes": 5}, "3 classes do not fit 5 classes"),
        (5, {"classes": 3}, "5 classes do not fit 3 classes"),
        (None, {"classes": 1}, "is missing"),
        (None, {"name": "regression", "outputs_per_record": 0}, "outputs_per_record = 0"),
        (2, {"class_weights": [1.0, 2.0, 3.0]}, "3 weights for 2 classes"),
        (None, {"name": "multi_label", "labels": 3}, "several targets per record"),
        (None, {"name": "token_prediction", "vocabulary": 3}, "several targets per record"),
        (None, {"name": "regression", "outputs_per_record": 2}, "several targets per record"),
        (None, {"name": "regresion"}, "regression"),
        (None, {"name": "regression", "metric": "auc"}, "'auc' is not a metric of regression"),
        (None, {"name": "regression", "dleta": 1.0}, "delta"),
        (None, {"name": "custom"}, "user's own"),
    ],
)
def test_a_task_that_sites_cannot_learn_is_one_sentence(
    classes: int | None, task: Any, words: str
) -> None:
    values = study_values()
    values["study"]["classes"] = classes
    with pytest.raises(ConfigurationError, match=words) as caught:
        StudyFile.from_dict({**values, "task": task})
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_a_study_without_a_task_is_what_it_was() -> None:
    """Its digest, by which sites agree and folders resume, is that of before there were tasks."""
    study = StudyFile.from_dict(study_values())
    assert study.digest() == "b1d3f13f076be136fdcf021fa0a7ee3799fbe96668e675da362d43c0ae09d2b6"
    assert "task" not in study.to_dict()
    assert study.title == "demo: weiavg"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"file": "x.csv"}, r'classes: is missing; .* or targets = "numbers"'),
        ({"file": "x.csv", "targets": "numbers", "classes": 2}, "2 classes were declared"),
        ({"file": "x.csv", "targets": "number", "classes": 2}, "targets"),
    ],
)
def test_a_site_s_file_declares_classes_or_numbers(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        SiteFile.from_dict({"site": {"id": "a"}, "data": data, "budget": RECORD})


def test_an_old_site_file_declares_classes(tmp_path: Path) -> None:
    site = make_site(tmp_path / "a", "a")
    file = site.folder / "site.toml"
    file.write_text(file.read_text().replace('targets = "classes"\n', ""))
    assert "targets" not in file.read_text()
    assert Site(site.folder).federation().task == Classification(classes=2)
    assert Site(site.folder).answer(Desk(study_values()).hello()).accepted


# -- what a site accepts ---------------------------------------------------------------------------


def test_a_study_fits_by_what_the_site_declares(tmp_path: Path) -> None:
    sites = {"classes": make_site(tmp_path / "a", "a"), "numbers": make_number_site(tmp_path / "b")}
    studies = {
        "2 classes": study_values(),
        "binary": task_values(BINARY),
        "3 classes": task_values({"classes": 3}),
        "regression": task_values(REGRESSION),
    }
    answers = {
        (kind, name): site.answer(Desk(values).hello())
        for kind, site in sites.items()
        for name, values in studies.items()
    }
    fitting = {
        ("classes", "2 classes"),
        ("classes", "binary"),
        ("classes", "3 classes"),
        ("numbers", "regression"),
    }
    assert {key for key, answer in answers.items() if answer.accepted} == fitting
    refused = answers["classes", "regression"]
    assert refused.header["code"] == 2
    wanted = f"its records do not have the study's shape [{FEATURES}] and targets (regression)"
    assert wanted in refused.reason
    assert "2 classes" not in refused.reason  # what the site has is in its own log alone
    log = (sites["classes"].folder / "site.log").read_text()
    assert f"records have shape [{FEATURES}] and 2 classes" in log


@pytest.mark.parametrize("task", [BINARY, REGRESSION])
def test_no_answer_before_training_depends_on_a_target(task: Any, tmp_path: Path) -> None:
    """Neither a constant column, nor whole numbers where numbers are declared, are told apart."""
    answers = []
    for copy, value in (("one", "1"), ("two", "0"), ("three", None)):
        site = (make_site if task is BINARY else make_number_site)(tmp_path / copy, "a")
        path = site.folder / "records.csv"
        if value is not None:
            head, *lines = path.read_text().splitlines()
            path.write_text("\n".join([head, *(x.rsplit(",", 1)[0] + f",{value}" for x in lines)]))
        (site.folder / "token").write_text("same")
        desk = Desk(task_values(task))
        said = [Site(site.folder).answer(desk.hello()), Site(site.folder).answer(desk.terms())]
        answers.append([answer.header for answer in said])
    assert answers[0] == answers[1] == answers[2]
    assert all(header["ok"] for header in answers[0])


def test_targets_that_are_not_what_was_declared_stay_in_the_site_s_log(tmp_path: Path) -> None:
    site = make_number_site(tmp_path / "a")
    file = site.folder / "site.toml"
    file.write_text(file.read_text().replace('targets = "numbers"', "classes = 2"))
    for task in (None, BINARY):
        desk = Desk(study_values() if task is None else task_values(task))
        answer = Site(site.folder).answer(desk.hello())
        assert (answer.accepted, answer.header["code"]) == (False, 1)
        assert answer.reason == "something went wrong at the site; its own log says what"
    assert "has labels that are not whole numbers" in (site.folder / "site.log").read_text()


def test_a_site_agrees_to_one_task_and_says_which(tmp_path: Path) -> None:
    site, desk = make_number_site(tmp_path / "a"), Desk(task_values(REGRESSION))
    assert site.answer(desk.terms()).accepted
    log = (site.folder / "site.log").read_text()
    assert "agreed to 3 rounds of demo: weiavg, regression (RMSE) (run run-1)" in log
    with_other = Desk(task_values({"name": "regression", "loss": "huber"}))
    answer = site.answer(with_other.train(0))
    assert "is not under the agreed terms" in answer.reason
    assert charged(site) == set()
    assert site.answer(desk.terms()).accepted  # told again: nothing new is agreed to
    assert (site.folder / "site.log").read_text().count("agreed to") == 1
    assert site.answer(desk.train(0)).accepted
    assert charged(site) == {0}
    ledger = site.ledger()
    assert ledger.titles() == {"run-1": "demo: weiavg, regression (RMSE)"}
    ledger.close()


@pytest.mark.parametrize("task", [BINARY, REGRESSION])
def test_a_model_that_gives_what_the_task_asks_for_is_accepted_and_no_other(
    task: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = (make_site if task is BINARY else make_number_site)(tmp_path / "a", "a")
    desk = Desk(task_values(task))
    offer = desk.hello()
    assert site.answer(offer).accepted
    two = torch.nn.Linear(FEATURES, 2)
    monkeypatch.setattr(Offer, "build_model", lambda _: two)
    answer = Site(site.folder).answer(offer)  # a process checks the model of a study once
    assert f"outputs of shape (2,) for {task['name']}" in answer.reason
    assert charged(site) == set()


@pytest.mark.parametrize(
    "task",
    [1, [], {"name": ["x"]}, {"classes": "2"}, {"class_weights": {}}]
    + [{**REGRESSION, **more} for more in ({"outputs_per_record": True}, {"loss": {}}, {"x": 1})],
)
def test_whatever_a_server_sends_as_a_task_is_refused_in_a_sentence(
    task: Any, tmp_path: Path
) -> None:
    site, desk = make_number_site(tmp_path / "a"), Desk(task_values(REGRESSION))
    header = desk.hello().header
    answer = site.answer(Message(header={**header, "study": {**header["study"], "task": task}}))
    assert (answer.accepted, answer.header["code"]) == (False, 2)
    assert "\n" not in answer.reason


# -- records and training --------------------------------------------------------------------------


def test_targets_are_converted_and_the_split_stays(tmp_path: Path) -> None:
    site = make_site(tmp_path / "a", "a")
    plain, binary = site.federation(), site.federation(Binary())
    own, other = plain.shards["a"], binary.shards["a"]
    assert torch.equal(own.features, other.features)
    assert torch.equal(own.test_features, other.test_features)
    assert other.labels.dtype == torch.float32
    assert torch.equal(own.labels, other.labels.long())
    assert torch.equal(own.test_labels, other.test_labels.long())
    assert site.federation(Binary()) is binary  # converted once a study
    assert site.member(Binary()).task == Binary()
    assert site.member(Classification(classes=3)).shard.labels.dtype == torch.int64
    number = with_numbers(site)
    there = number.federation(Regression()).shards["a"]
    wanted = 2 * there.features[:, 0] + 5
    assert torch.allclose(there.labels, wanted, atol=1e-5)
    path = number.folder / "records.csv"
    path.write_text(path.read_text() + path.read_text().splitlines()[1] + "\n")
    assert number.federation(Regression()).shards["a"].examples == 33  # the file has changed


def test_three_sites_learn_numbers_from_their_files_as_a_simulation_does(tmp_path: Path) -> None:
    run = {"noise": "seeded", "seed": 5}
    values = task_values(REGRESSION, run=run)
    federation = Federation.of(tmp_path, values, policy={"allow_seeded": True})
    federation.sites = {name: with_numbers(site) for name, site in federation.sites.items()}
    assert federation.play()["refusals"] == {}
    study, sites = StudyFile.in_folder(federation.server), federation.sites
    from dpfl import Budget, Federation as Arrays, weiavg

    records = {name: site.federation().shards[name] for name, site in sites.items()}
    arrays = {
        name: tuple(
            np.asarray(x) for x in (one.features, one.labels, one.test_features, one.test_labels)
        )
        for name, one in records.items()
    }
    budget = Budget(epsilon=4.0, delta=RECORD["delta"])
    own = Arrays.from_arrays(arrays, task="regression", budgets=dict.fromkeys(arrays, budget))
    simulated = train(
        study.build_model(), own, weiavg(**METHOD), rounds=3, seed=5, filter="allotments"
    )
    final = load_file(federation.server / "model.safetensors")
    for name, tensor in simulated.model.state_dict().items():
        assert torch.equal(final[name], tensor)


@pytest.mark.parametrize(
    ("task", "targets"),
    [
        (Classification(classes=3), torch.tensor([0, 1, 1, 2, 1])),
        (Binary(), torch.tensor([0.0, 1.0, 1.0, 1.0])),
        (Regression(), torch.tensor([0.5, 3.0, -2.0])),
    ],
)
def test_no_other_constant_has_a_smaller_loss(task: Any, targets: torch.Tensor) -> None:
    constant = task.constant(targets).double()

    def loss(outputs: torch.Tensor) -> float:
        return float(task.losses(outputs.repeat(len(targets), 1), targets).mean())

    for place in range(len(constant)):
        for step in (-0.05, 0.05):
            other = constant.clone()
            other[place] += step
            assert loss(other) > loss(constant)


# -- trying a model --------------------------------------------------------------------------------


def _delivered(site: Site, desk: Desk, weight: float, bias: float) -> None:
    model = desk.study().build_model().state_dict()
    weights = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    weights["1.weight"][0, 0], weights["1.bias"][0] = weight, bias
    assert site.answer(desk.terms()).accepted
    header = desk.header(END, terms=desk.told(), signer=SIGNER)
    assert site.answer(Message(header=header, payload=save(weights))).accepted


def _evaluate(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = run_command(["site", "evaluate", *arguments])
    captured = capsys.readouterr()
    return code, " ".join((captured.out or captured.err).split())


def test_a_regression_is_tried_by_its_own_metric_beside_the_mean(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    site, desk = make_number_site(tmp_path / "a"), Desk(task_values(REGRESSION))
    _delivered(site, desk, 2.0, 4.5)  # half too low everywhere
    code, out = _evaluate(capsys, str(site.folder), "--json")
    found = json.loads(out)
    assert (code, found["metric"], found["task"]) == (0, "rmse", "regression")
    assert found["rmse"] == pytest.approx(0.5, abs=1e-4)
    targets = site.federation().shards["a"].test_labels
    assert found["constant"] == pytest.approx(float(targets.std(correction=0)), rel=1e-4)
    assert "commonest_class" not in found
    code, out = _evaluate(capsys, str(site.folder))
    assert "RMSE 0.5 on 8 records the same prediction for every record: RMSE" in out
    assert "MAE 0.5" in out
    code, out = _evaluate(capsys, str(site.folder), "--json", "--metric", "r2")
    assert json.loads(out)["constant"] == pytest.approx(0.0, abs=1e-5)
    code, out = _evaluate(capsys, str(site.folder), "--metric", "auc")
    assert (code, "'auc' is not a metric of regression" in out) == (2, True)


def test_a_binary_model_is_tried_and_another_kind_of_records_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    site, desk = make_site(tmp_path / "a", "a"), Desk(task_values({"name": "binary"}))
    _delivered(site, desk, 9.0, 0.0)  # the label is whether the first feature is above 0
    _, out = _evaluate(capsys, str(site.folder), "--json")
    found = json.loads(out)
    assert (found["auc"], found["constant"]) == (1.0, 0.5)
    assert math.isclose(found["details"]["metrics"]["accuracy"], 1.0)
    (outcome,) = outcomes(site.folder)
    share = float(site.federation(Binary()).shards["a"].test_labels.mean())
    entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
    tried = outcome.tried("a", site.federation(), "loss")
    assert tried.constant == pytest.approx(entropy, rel=1e-5)
    with pytest.raises(DpflError, match=r"targets \(binary\), not \[60\] and regression"):
        outcome.tried("a", with_numbers(site).federation())


# -- the commands ----------------------------------------------------------------------------------


def _init(capsys: pytest.CaptureFixture[str], home: Path, *more: str) -> tuple[int, str, str]:
    given = ["--id", "a", "--epsilon", "4", "--delta", "0.01"]
    data = str(home.parent / "a" / "records.csv")
    code = run_command(["site", "init", str(home), "--data", data, *given, *more])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_site_is_made_for_a_task(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make_number_site(tmp_path / "a")
    code, out, _ = _init(capsys, tmp_path / "home", "--task", "regression")
    assert (code, "32 training records, numbers as targets, epsilon 4" in out) == (0, True)
    file = SiteFile.in_folder(tmp_path / "home")
    assert (file.data.targets, file.data.classes) == ("numbers", None)
    for number, (more, words, expected) in enumerate(
        (
            (["--task", "regression", "--classes", "3"], "3 classes for regression", 2),
            (["--task", "binary", "--classes", "3"], "3 classes do not fit binary", 2),
            (["--task", "multi_label"], "several targets per record", 2),
            (["--task", "regresion"], "regression", 2),
            (["--task", "binary"], "not whole numbers", 3),
        )
    ):
        code, _, err = _init(capsys, tmp_path / f"bad{number}", *more)
        assert (code, words in err) == (expected, True), err
        assert not (tmp_path / f"bad{number}" / "site.toml").exists()


def test_the_server_says_what_is_learned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "study.toml"
    file.write_text(StudyFile.from_dict(task_values(REGRESSION)).to_toml())
    server = str(tmp_path / "server")
    assert run_command(["server", "init", server, "--study", str(file)]) == 0
    assert "weiavg, regression (RMSE), 3 rounds, 3 sites" in capsys.readouterr().out
    assert run_command(["server", "status", server]) == 0
    assert "task regression (RMSE)" in " ".join(capsys.readouterr().out.split())
    assert run_command(["server", "status", server, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["task"]
    assert (told["name"], told["metric"]) == ("regression", "rmse")
