"""An accounted metric between sites: the simulator's values and charges, one answer, one charge."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file

from dpfl.cli.main import run_command
from dpfl.core.errors import ConfigurationError, PeerError, PrivacyRefusal
from dpfl.core.grid import Grid
from dpfl.core.types import Observer
from dpfl.deploy import measuring as module
from dpfl.deploy.commitment import NOTHING_TO_MEASURE, Commitment
from dpfl.deploy.messages import Introduction, Message
from dpfl.deploy.order import following, place
from dpfl.deploy.requests import TRAIN
from dpfl.deploy.site import Site
from dpfl.deploy.summary import DeploymentSummary, StudyStatus
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.site_ledger import PlannedUnits, SiteLedger
from dpfl.rounds.codec import decode_download, decode_upload, encode_download, encode_upload
from dpfl.rounds.measure import answer_noise
from dpfl.runs.deployment import StudyFile
from dpfl.runs.experiment import Experiment
from dpfl.runs.folder import RunFolder
from dpfl.sim.train import run_experiment
from tests.deploy.federation import (
    RECORD,
    SITES,
    Desk,
    Federation,
    WatchedGrid,
    charged,
    history_of,
    make_site,
    study_values,
)
from tests.deploy.sums import NAMES, Talk, pin, sum_values
from tests.deploy.test_equivalence import deploy, experiment_of, on_files

ACCOUNTED = {"metric": "accuracy", "every": 2, "share": 0.2}
SEEDED = {"noise": "seeded", "seed": 3}


def values_of(
    rounds: int = 4,
    run: dict[str, Any] | None = None,
    sites: Sequence[str] = SITES,
    **more: Any,
) -> dict[str, Any]:
    values = study_values("weiavg", rounds=rounds, sites=sites, run=run)
    return {**values, "accounted": {**ACCOUNTED, **more}}


def summed_values(rounds: int = 2, dropouts: int = 1) -> dict[str, Any]:
    values = sum_values(method="weiavg", dropouts=dropouts, local_steps=1)
    values["run"]["rounds"] = rounds
    return {**values, "accounted": ACCOUNTED}


def summed_federation(base: Path, values: dict[str, Any]) -> Federation:
    made = Federation.of(base, values, RECORD, policy={"allow_seeded": True})
    pin(made.sites)
    return made


def train_messages(made: Federation, node: int = 1) -> dict[int, tuple[Message, Message]]:
    """What a site was asked, and what it answered, by round."""
    return {
        question.header["round"]: (question, answer)
        for number, question, answer in made.grid.heard
        if number == node and question.header["kind"] == TRAIN
    }


# -- the simulator ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("metric", "secure"), [("accuracy", False), ("loss", True)])
def test_sites_and_the_simulator_measure_the_same(
    metric: str, secure: bool, tmp_path: Path
) -> None:
    plain = experiment_of("weiavg", {"local_steps": 1}, {}, rounds=2)
    accounted = {"metric": metric, "every": 1, "share": 0.3}
    accounted |= {"bound": 4.0} if metric == "loss" else {}
    sections: dict[str, Any] = {"accounted": accounted}
    if secure:
        sections["secure_sum"] = {"tolerated_dropouts": 0}
    experiment = Experiment.from_dict({**plain.to_dict(), **sections})
    experiment = on_files(experiment, tmp_path / "files")
    server, _, sites = deploy(tmp_path, experiment)
    simulated = run_experiment(experiment, tmp_path / "simulated")
    lines = RunFolder(server).read_rounds()
    assert [line.round for line in lines] == [0, -2, 1, -1]
    found = [line.measured for line in lines if line.round < 0]
    wanted = [line.measured for line in simulated.history]
    for one, other in zip(found, wanted, strict=True):
        assert one is not None and other is not None
        assert one.value == pytest.approx(other.value, rel=1e-12)
        assert one.standard_error == pytest.approx(other.standard_error, rel=1e-12)
        assert other.standard_error > 0
    assert len({one.value for one in found if one is not None}) == 2
    own, sim = (
        load_file(folder / "model.safetensors") for folder in (server, tmp_path / "simulated")
    )
    assert all((own[name] - sim[name]).abs().max() < 1e-5 for name in own)
    with closing(Ledger.open(RunFolder(tmp_path / "simulated").ledger)) as ledger:
        for name, site in sites.items():
            assert charged(site) == {-2, -1, 0, 1}
            assert history_of(site, Observer.SERVER) == ledger.history(name, Observer.SERVER)


def test_summary_and_status_state_values_with_their_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Federation.of(tmp_path, values_of())
    summary = made.play()
    assert summary["rounds"] == {"planned": 4, "done": 4, "ended_early": None}
    assert summary["missed"] == summary["refusals"] == {}
    assert [line["round"] for line in made.lines()] == [0, 1, -2, 2, 3, -1]
    assert [one["after"] for one in summary["measured"]] == [2, 4]
    for one, line in zip(summary["measured"], (made.lines()[2], made.lines()[5]), strict=True):
        assert one["metric"] == "accuracy"
        assert {key: one[key] for key in line["measured"]} == line["measured"]
        assert 0 <= one["value"] <= 1 and one["standard_error"] > 0
        assert line["arrived"] == ["a", "b", "c"]
    assert run_command(["server", "status", str(made.server)]) == 0
    last, shown = summary["measured"][-1], " ".join(capsys.readouterr().out.split())
    value = f"{last['value']:.4g} ± {last['standard_error']:.2g} (noise)"
    assert f"accuracy {value}, after round 4" in shown
    status = StudyStatus.of(made.server)
    assert list(status.measured) == summary["measured"] == status.to_dict()["measured"]
    assert status.done == status.took_part("a") == 4
    again = DeploymentSummary.from_dict(summary)
    assert again.to_dict()["measured"] == summary["measured"]
    for site in made.sites.values():
        (line,) = site.spent()
        assert 0.9 * 4 <= line.epsilon <= 4


# -- one answer, one charge ------------------------------------------------------------------------


@given(every=st.integers(1, 7), more=st.integers(0, 20))
def test_measurements_stand_behind_their_rounds_and_nothing_stands_at_one_place(
    every: int, more: int
) -> None:
    study = StudyFile.from_dict(values_of(every + more, every=every))
    agreement: Any = _Planned(study)
    metric, rounds = study.accounted_metric(), study.run.rounds
    assert metric is not None
    order: list[int] = []
    for round_ in range(rounds):  # as a server asks
        order.append(round_)
        if metric.is_due(round_ + 1):
            order.append(agreement.measurement((round_ + 1) // every - 1))
    assert sorted(order) == list(range(-len(agreement.measurements), rounds))
    places = [place(study, agreement, round_) for round_ in order]
    assert places == sorted(set(places))
    ahead = [following(study, agreement, round_) for round_ in order]
    assert [next_ for next_, *_ in ahead] == [*order[1:], rounds]
    assert all(round_ == max(places[i][0] + 1, 0) for i, (*_, round_) in enumerate(ahead))


class _Planned:
    """What an order needs of an agreement, without planning any noise."""

    def __init__(self, study: StudyFile) -> None:
        self.measurements = range(-len(study.measurements()), 0)

    def measurement(self, number: int) -> int:
        return self.measurements[number]


def test_a_measurement_is_answered_again_with_the_same_bytes_and_closes_what_was_before(
    tmp_path: Path,
) -> None:
    """Two rounds, a measurement, one round: asked by hand, in all orders that a server may try."""
    site, desk = make_site(tmp_path / "a", "a", RECORD), Desk(values_of(3))
    assert site.answer(desk.terms()).accepted
    first = site.answer(desk.train(1))
    assert first.accepted
    assert site.answer(desk.train(1)).payload == first.payload
    measured = site.answer(desk.train(-1))
    assert measured.accepted
    again = Site(site.folder).answer(desk.train(-1))
    assert again.payload == measured.payload != first.payload
    for over in (0, 1):
        assert site.answer(desk.train(over)).reason == f"round {over} is over"
    assert charged(site) == {1, -1}
    assert site.answer(desk.train(2)).accepted
    assert site.answer(desk.train(-1)).reason == "round -1 is over"
    for unknown in (-2, 3):
        assert "not in the plan" in site.answer(desk.train(unknown)).reason
    assert charged(site) == {1, -1, 2}


def test_a_round_that_a_measurement_has_passed_is_never_answered(tmp_path: Path) -> None:
    site, desk = make_site(tmp_path / "a", "a", RECORD), Desk(values_of(3))
    assert site.answer(desk.terms()).accepted
    assert site.answer(desk.train(-1)).accepted
    assert site.answer(desk.train(1)).reason == "round 1 is over"
    assert charged(site) == {-1}


def test_another_model_is_not_measured_under_a_charge_that_was_used(tmp_path: Path) -> None:
    site, desk = make_site(tmp_path / "a", "a", RECORD), Desk(values_of(2))
    assert site.answer(desk.terms()).accepted
    measured = site.answer(desk.train(-1))
    size = desk.agreement().layout.size
    told = decode_download(desk.download(-1), size)
    other = encode_download(replace(told, start=told.start + 1))
    assert site.answer(desk.train(-1, payload=other)).payload == measured.payload
    assert charged(site) == {-1}


def test_a_download_of_another_round_is_refused_before_anything_is_charged(tmp_path: Path) -> None:
    site, desk = make_site(tmp_path / "a", "a", RECORD), Desk(values_of(2))
    assert site.answer(desk.terms()).accepted
    answer = site.answer(desk.train(-1, payload=desk.download(0)))
    assert "is of round 0, and round -1 was asked for" in answer.reason
    crowd = desk.download(-1, drawn=4)
    assert "4 sites were drawn" in site.answer(desk.train(-1, payload=crowd)).reason
    assert charged(site) == set()


def test_a_measurement_asks_everyone_where_rounds_draw_a_cohort(tmp_path: Path) -> None:
    site = make_site(tmp_path / "a", "a", RECORD)
    desk = Desk(values_of(2, run={"cohort": 2}))
    assert site.answer(desk.terms()).accepted
    assert "3 sites were drawn" in site.answer(desk.train(1)).reason
    assert site.answer(desk.train(-1)).accepted


def test_work_that_fails_in_a_measurement_is_charged_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, desk = make_site(tmp_path / "a", "a", RECORD), Desk(values_of(2))
    assert site.answer(desk.terms()).accepted
    with monkeypatch.context() as patch:
        patch.setattr("dpfl.deploy.bound_site.measured_upload", lambda *_: 1 / 0)
        assert not site.answer(desk.train(-1)).accepted
    assert charged(site) == {-1}
    assert site.answer(desk.train(-1)).reason == "its work failed in this round"


# -- kills -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "secure"),
    [("asked", False), ("answered", False), ("written", False), ("answered", True)],
)
def test_a_server_killed_at_a_measurement_goes_on_with_the_same_bytes(
    moment: str, secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = _small_sum() if secure else values_of(2, run=SEEDED)
    made = (summed_federation if secure else _seeded)(tmp_path, values)

    real = module.ask_uploads

    def answered(*asked: Any) -> Any:
        real(*asked)
        raise SystemExit

    with monkeypatch.context() as patch:
        if moment == "asked":
            patch.setattr(module, "ask_uploads", _dies)
        elif moment == "answered":
            patch.setattr(module, "ask_uploads", answered)
        else:
            patch.setattr("dpfl.deploy.coordinator.deliver", _dies)
        with pytest.raises(SystemExit):
            made.play()
    before = {node: train_messages(made, node).get(-1) for node in (1, 2, 3)}
    summary = made.play()
    assert summary["lost_rounds"] == [] and summary["missed"] == {}
    assert [line["round"] for line in made.lines()] == [0, 1, -1]
    (measured,) = summary["measured"]
    assert measured["standard_error"] > 0
    assert all((said is None) == (moment == "asked") for said in before.values())
    for node, said in before.items():
        if said is not None:
            assert train_messages(made, node)[-1][1].payload == said[1].payload != b""
    assert all(charged(site) == {-1, 0, 1} for site in made.sites.values())


def test_a_server_that_comes_back_asks_the_same_sites_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _seeded(tmp_path, values_of(2, run=SEEDED))
    with monkeypatch.context() as patch:
        patch.setattr(module, "ask_uploads", _dies)
        with pytest.raises(SystemExit):
            made.play()
    left = WatchedGrid({1: tmp_path / "a", 2: tmp_path / "b"})
    made.coordinator(left).begin()
    line = made.lines()[-1]
    assert (line["cohort"], line["arrived"]) == (["a", "b", "c"], ["a", "b"])
    assert line["missing"] == {"c": "is not connected"}
    assert line["measured"]["standard_error"] > 0


def _dies(*_: Any, **__: Any) -> Any:
    raise SystemExit


def _small_sum() -> dict[str, Any]:
    values = summed_values(dropouts=0)
    values["study"]["sites"] = ["a", "b", "c"]
    return values


def _seeded(base: Path, values: dict[str, Any]) -> Federation:
    return Federation.of(base, values, RECORD, policy={"allow_seeded": True})


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_site_killed_at_its_charge_answers_once(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, desk = make_site(tmp_path / "a", "a", RECORD), Desk(values_of(2))
    assert site.answer(desk.terms()).accepted
    real = SiteLedger.charge_and_store

    def dies(ledger: Any, *rest: Any, **more: Any) -> bool:
        if moment == "after":
            real(ledger, *rest, **more)
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(SiteLedger, "charge_and_store", dies)
        with pytest.raises(SystemExit):
            site.answer(desk.train(-1))
    assert charged(site) == ({-1} if moment == "after" else set())
    answers = {Site(site.folder).answer(desk.train(-1)).payload for _ in range(2)}
    assert len(answers) == 1 and answers != {b""}
    assert charged(site) == {-1}


# -- the secure sum --------------------------------------------------------------------------------


def test_over_a_secure_sum_a_missing_site_is_left_out_and_too_many_lose_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Site._train
    for number, gone in enumerate((("d",), ("c", "d"))):
        made = summed_federation(tmp_path / str(number), summed_values())

        def train(self: Site, ledger: Any, request: Any, gone: tuple[str, ...] = gone) -> Message:
            if request.round < 0 and self.id in gone:
                return Message(header={"ok": False, "reason": "is away", "site": self.id})
            return real(self, ledger, request)

        with monkeypatch.context() as patch:
            patch.setattr(Site, "_train", train)
            made.play()
        line = made.lines()[-1]
        here = [name for name in NAMES if name not in gone]
        assert line["round"] == -1
        assert charged(made.sites["a"]) == {-1, 0, 1}
        if len(gone) == 1:
            assert line["arrived"] == here
            who = made.sites["a"].member().participant
            share = answer_noise(Desk(summed_values()).agreement(), -1, who, asked=4)
            error = share * math.sqrt(3) / (3 * 8)  # three shares, of eight test records each
            assert line["measured"]["standard_error"] == pytest.approx(error, rel=1e-9)
            assert list(line["missing"]) == ["d"]
        else:
            assert line["arrived"] == [] and "measured" not in line
            assert "secure sum is lost" in line["missing"]["a"]


def test_a_site_masks_a_measurement_in_one_session_only(tmp_path: Path) -> None:
    values = summed_values(dropouts=0)
    talk = Talk.bound(summed_federation(tmp_path, values), values)
    talk.round = -1
    talk.train_all()
    assert charged(Site(talk.folders["a"])) == {-1}
    assert talk.train("a").payload == talk.masked["a"]
    talk.attempt += 1
    assert "has sent its upload of this round" in talk.keys("a").reason
    talk.attempt, talk.round = 0, 1  # the round that it measures is over
    assert "is over" in talk.keys("a").reason
    assert charged(Site(talk.folders["a"])) == {-1}


# -- who takes no part, and what is refused --------------------------------------------------------


def test_a_site_without_test_records_is_not_asked_and_refuses_if_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, planned = Site.member, Site.planned_units

    def member(self: Site, *rest: Any) -> Any:
        found = real(self, *rest)
        if self.id != "c":
            return found
        return replace(found, shard=replace(found.shard, test_span=(0, 0)))

    def planned_units(self: Site) -> PlannedUnits:
        return planned(self)._replace(tested=0) if self.id == "c" else planned(self)

    monkeypatch.setattr(Site, "member", member)
    monkeypatch.setattr(Site, "planned_units", planned_units)
    made = Federation.of(tmp_path, values_of(2))
    summary = made.play()
    assert made.lines()[-1]["cohort"] == ["a", "b"]
    assert summary["measured"][0]["standard_error"] > 0
    assert charged(made.sites["c"]) == {0, 1}
    question, _ = train_messages(made)[-1]
    header = {**question.header, "receipt": None}
    said = made.sites["c"].answer(replace(question, header=header))
    assert said.reason == NOTHING_TO_MEASURE
    assert charged(made.sites["c"]) == {0, 1}


def test_a_site_that_cannot_pay_abstains_and_takes_the_next_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Commitment.covers

    def covers(self: Commitment, ledger: Any, run: str, round_: int) -> bool:
        poor = self.member.id == "b" and round_ in self.agreement.measurements
        return not poor and real(self, ledger, run, round_)

    monkeypatch.setattr(Commitment, "covers", covers)
    made = Federation.of(tmp_path, values_of(3))
    made.play()
    lines = {line["round"]: line for line in made.lines()}
    assert list(lines) == [0, 1, -1, 2]
    assert lines[-1]["arrived"] == ["a", "c"]
    assert "takes no further part" in lines[-1]["missing"]["b"]
    assert lines[2]["arrived"] == ["a", "b", "c"]
    assert charged(made.sites["b"]) == {0, 1, 2}


def test_a_measurement_that_the_ledger_does_not_admit_is_refused(tmp_path: Path) -> None:
    """Another study has used the budget up before this one has released anything."""
    site = make_site(tmp_path / "a", "a", {**RECORD, "filter": "renyi"})
    here, other = (Desk(values_of(2), run=run) for run in ("run-1", "run-2"))
    for desk in (here, other):
        assert site.answer(desk.terms()).accepted
    for round_ in (0, 1, -1):
        assert site.answer(other.train(round_)).accepted
    assert "takes no further part" in site.answer(here.train(-1)).reason
    with closing(site.ledger()) as ledger:
        assert not ledger.charged("run-1", Observer.SERVER)
        assert ledger.answered("run-1") is None


def test_answers_that_cannot_be_are_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is damaged, one larger than its test records allow, one of a site without a budget."""
    real, introduced = Site._train, Site._introduce

    def train(self: Site, ledger: Any, request: Any) -> Message:
        said = real(self, ledger, request)
        if request.round >= 0:
            return said
        if self.id == "a":
            return replace(said, payload=said.payload[:-1] + b"x")
        own = torch.tensor([1e12]), request.run, request.round, self.id, Grid(1.0)
        return replace(said, payload=encode_upload(*own)) if self.id == "b" else said

    def introduce(self: Site, request: Any, planned: Any) -> Message:
        said = introduced(self, request, planned)
        lie = {"epsilon": math.inf if self.id == "c" else 4.0}
        return replace(said, header={**said.header, "claims": {**said.header["claims"], **lie}})

    monkeypatch.setattr(Site, "_train", train)
    monkeypatch.setattr(Site, "_introduce", introduce)
    made = Federation.of(tmp_path, values_of(2, sites=("a", "b", "c", "d")))
    made.play()
    line = made.lines()[-1]
    assert line["arrived"] == ["d"]
    desk, site_d = Desk(values_of(2), run=made.summary()["run"]), made.sites["d"]
    std = answer_noise(desk.agreement(), -1, site_d.member().participant, 4)
    sent = train_messages(made, 4)[-1][1].payload
    (total,) = decode_upload(sent, 1, desk.run, -1, "d", Grid.of(std)).tolist()
    assert line["measured"]["standard_error"] == pytest.approx(std / 8, rel=1e-12)
    assert line["measured"]["value"] == pytest.approx(min(1.0, max(0.0, total / 8)), rel=1e-12)
    for site, why in {"a": "damaged", "b": "test records", "c": "usable"}.items():
        assert why in line["missing"][site]


@pytest.mark.parametrize("count", [-1, 1 << 60, True, "8"])
def test_a_number_of_test_records_that_cannot_be_is_refused(count: Any) -> None:
    claims = {"epsilon": 1.0, "delta": 0.1, "examples": 8, "test_examples": count}
    with pytest.raises(PeerError):
        Introduction.from_header({"site": "a", "token": "", "dpfl": "", "claims": claims})


def test_terms_with_other_measurements_than_the_study_states_are_refused(tmp_path: Path) -> None:
    site, desk = make_site(tmp_path / "a", "a", RECORD), Desk(values_of(2))
    assert site.answer(desk.terms(binding=False)).accepted
    for lie in ((), ((0.4, 1),), ((0.2, 2),), ((0.2, 1), (0.2, 1))):
        assert "do not belong to this study" in site.answer(desk.terms(releases=lie)).reason
    assert charged(site) == set()


def test_the_section_is_offered_and_agreed_to() -> None:
    study, plain = StudyFile.from_dict(values_of()), StudyFile.from_dict(study_values(rounds=4))
    assert study.digest() != plain.digest() and "accounted" not in plain.offer()
    assert study.offer()["accounted"] == ACCOUNTED
    again = StudyFile.from_dict(json.loads(json.dumps(study.offer())))
    assert again.digest() == study.digest() and again.measurements() == ((0.1, 1), (0.1, 1))
    assert StudyFile.from_dict(values_of(every=1)).digest() != study.digest()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"metric": "auc"}, None),
        ({"metric": "loss"}, "bound"),
        ({"every": 5}, "every 5 of 4 rounds"),
        ({"every": 0}, "every"),
        ({"share": 1.0}, "whole budget"),
        ({"metric": "f1"}, "f1"),
    ],
)
def test_settings_that_cannot_be_are_refused(more: dict[str, Any], said: str | None) -> None:
    values = values_of(**more)
    if said is None:  # two classes have a ROC curve; three have none
        assert StudyFile.from_dict(values).measurements()[0][1] == 32
        values["study"]["classes"], said = 3, "auc"
    with pytest.raises(ConfigurationError, match=said):
        StudyFile.from_dict(values)


def test_a_task_without_classes_has_no_accuracy() -> None:
    values = values_of()
    del values["study"]["classes"]
    with pytest.raises(ConfigurationError, match="no classes to count"):
        StudyFile.from_dict({**values, "task": {"name": "regression"}})


def test_a_method_that_protects_sites_takes_no_accounted_metric() -> None:
    values = {**study_values("udp_fedavg"), "accounted": {**ACCOUNTED, "every": 1}}
    with pytest.raises(PrivacyRefusal, match="protects records"):
        StudyFile.from_dict(values).strategy()


def test_a_site_asks_for_as_much_noise_in_a_measurement_as_its_policy_says(tmp_path: Path) -> None:
    values = values_of(2, share=0.9)
    desk = Desk(values)
    site = make_site(tmp_path / "a", "a", RECORD)
    least = desk.agreement().release_noise(-1, site.member().participant)
    for factor, accepted in ((0.99, True), (1.01, False)):
        policy = {"least_noise_multiplier": factor * least}
        own = make_site(tmp_path / str(factor), "a", RECORD, policy)
        assert own.answer(desk.terms()).accepted is accepted
