"""Plans and populations between sites: terms cost nothing until they bind, refusers are not counted
on, studies add up.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpfl.core.errors import LedgerError, PrivacyRefusal
from dpfl.core.types import Observer
from dpfl.deploy import coordinator as module
from dpfl.deploy.connections import Connections
from dpfl.deploy.site import Site
from dpfl.rounds import Agreement
from tests.deploy.federation import (
    CLIENT,
    DELTA,
    RECORD,
    Desk,
    Federation,
    charged,
    make_site,
    study_values,
    write_site_file,
)


def test_terms_that_are_not_binding_cost_and_commit_nothing(tmp_path: Path) -> None:
    site, desk = make_site(tmp_path / "a", "a", RECORD), Desk(study_values())
    answer = site.answer(desk.terms(binding=False))
    assert answer.accepted
    ledger = site.ledger()
    assert ledger.planned("run-1", Observer.SERVER) == {}
    assert ledger.titles() == {}
    ledger.close()
    assert not site.answer(desk.train(0)).accepted  # nothing was agreed on
    assert site.answer(desk.terms()).accepted
    assert site.answer(desk.train(0)).accepted


def test_a_site_that_refuses_the_terms_is_not_in_the_population(tmp_path: Path) -> None:
    """Amplification by size / population counted on sites that would never take part."""
    values = study_values("udp_fedavg", noise_multiplier=4.0, run={"cohort": 2, "least_willing": 2})
    federation = Federation.of(tmp_path, values, CLIENT, budgets={"c": {**CLIENT, "epsilon": 0.01}})
    summary = federation.play()
    enrolment = json.loads((federation.server / "enrolment.json").read_text())
    assert sorted(enrolment["claims"]) == ["a", "b"]
    assert "does not cover 3 rounds" in summary["refusals"]["c"]
    assert summary["rounds"]["done"] == 3
    asked = [
        message.header["terms"]["population"]
        for _, message, _ in federation.grid.heard
        if "round" in message.header
    ]
    assert set(asked) == {2}
    assert charged(federation.sites["c"]) == set()


def test_a_plan_ends_when_fewer_sites_are_there_than_it_counts_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = study_values("udp_fedavg", noise_multiplier=4.0, run={"cohort": 2})
    federation = Federation.of(tmp_path, values, {**CLIENT, "epsilon": 10.0})
    coordinator = federation.coordinator()
    original = module.settle
    rounds: list[int] = []

    def settle(sites: Connections, agreement: Agreement) -> None:
        original(sites, agreement)
        rounds.append(1)
        if len(rounds) == 3:
            sites.willing["c"] = False

    monkeypatch.setattr(module, "settle", settle)
    coordinator.begin()
    summary = federation.summary()
    assert summary["rounds"]["done"] == 2
    assert (
        "2 of 3 sites can take another round, and the plan needs 3"
        in summary["rounds"]["ended_early"]
    )
    assert (federation.server / "model.safetensors").exists()


def test_by_default_studies_pay_round_by_round_and_leave_the_rest_to_the_next(
    tmp_path: Path,
) -> None:
    budget = {"epsilon": 4.0, "delta": DELTA, "per_study": 1.5}
    site = make_site(tmp_path / "a", "a", budget)
    spent = []
    for number in range(3):
        desk = Desk(study_values(rounds=2), run=f"run-{number}", epsilon=1.5)
        assert site.answer(desk.terms()).accepted
        for round_ in range(1 if number == 0 else 2):  # the first study stops early
            assert site.answer(desk.train(round_)).accepted
        (line,) = site.spent()
        spent.append(line.epsilon)
        assert line.filter == "renyi"
    assert spent == sorted(spent)
    assert spent[0] < 1.5
    assert spent[2] < 4.0  # three studies of 1.5 would add up to 4.5


def test_allotments_take_the_whole_price_and_refuse_a_fourth_study(tmp_path: Path) -> None:
    budget = {"epsilon": 4.0, "delta": DELTA, "per_study": 1.3, "filter": "allotments"}
    site = make_site(tmp_path / "a", "a", budget)
    for number in range(4):
        desk = Desk(study_values(rounds=2), run=f"run-{number}", epsilon=1.3)
        assert site.answer(desk.terms()).accepted == (number < 3)
    (line,) = site.spent()
    assert 3.8 < line.epsilon <= 3.9
    assert line.rounds == 0  # nothing was released, and the price was taken


def test_the_filter_is_fixed_when_the_ledger_is_made(tmp_path: Path) -> None:
    site = make_site(tmp_path / "a", "a", RECORD)
    write_site_file(tmp_path / "a", "a", {**RECORD, "filter": "renyi"})
    with pytest.raises(LedgerError, match="adds studies up by 'allotments', not by 'renyi'"):
        type(site)(tmp_path / "a").ledger()


def test_a_study_s_part_of_epsilon_holds_whatever_noise_a_server_names(tmp_path: Path) -> None:
    """Terms with little noise made one study of 1 spend 7 of 8."""
    site = make_site(tmp_path / "a", "a", {"epsilon": 8.0, "delta": DELTA, "per_study": 1.0})
    desk = Desk(study_values(), epsilon=1.0)
    answer = site.answer(desk.terms(noise_multiplier=0.55))
    assert not answer.accepted
    assert "does not cover a round" in answer.reason
    assert site.answer(desk.terms()).accepted


@pytest.mark.parametrize(
    "error", [MemoryError, lambda: PrivacyRefusal("site", "will not", "ask another")]
)
def test_sites_that_accept_and_then_fail_do_not_change_what_is_published(
    tmp_path: Path, error: Callable[[], Exception]
) -> None:
    """Rounds that published nothing told who was drawn: 4.489 stated, 7.852 true with two of three
    sites failing.
    """
    values = study_values("udp_fedavg", rounds=12, noise_multiplier=8.0, run={"cohort": 1})
    federation = Federation.of(tmp_path, values, {**CLIENT, "epsilon": 15.0})
    original = Site.work

    def fails(self: Site, *arguments: Any) -> Any:
        if self.id != "a":
            raise error()
        return original(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Site, "work", fails)
        federation.play()
    summary = federation.summary()
    lines = federation.lines()
    assert summary["rounds"]["done"] == len(lines) == 12
    assert not any("published" in line for line in lines)
    assert {len(line["arrived"]) for line in lines} == {0, 1}
    assert {line["effective_noise"]["noise_multiplier"] for line in lines} == {8.0}
    assert {site for line in lines for site in line["cohort"]} & {"b", "c"}  # the draw is secret
