"""Releases before round one travel as rounds with negative numbers: same bytes, charges, resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dpfl.deploy import coordinator as module
from dpfl.deploy.outcome import outcomes
from dpfl.deploy.site import Site
from tests.deploy import releasing
from tests.deploy.federation import (
    RECORD,
    Desk,
    Federation,
    charged,
    make_site,
    study_values,
    write_site_file,
)
from tests.deploy.releasing import RELEASE, begin_with_a_mean


@pytest.fixture(autouse=True)
def _with_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_with_a_mean(monkeypatch)


def federation(tmp_path: Path, **run: Any) -> Federation:
    return Federation.of(tmp_path, study_values("weiavg", rounds=2, run=run), RECORD)


def test_sites_answer_a_release_before_round_one_and_stay_within_their_budgets(
    tmp_path: Path,
) -> None:
    made = federation(tmp_path)
    summary = made.play()
    assert [line["round"] for line in made.lines()] == [-1, 0, 1]
    assert summary["rounds"] == {"planned": 2, "done": 2, "ended_early": None}
    assert sorted(set(made.grid.asked_to_train())) == [
        (n, r) for n in (1, 2, 3) for r in (-1, 0, 1)
    ]
    for site in made.sites.values():
        assert charged(site) == {-1, 0, 1}
        (line,) = site.spent()
        assert 0.9 * 4 <= line.epsilon <= 4
        (outcome,) = outcomes(site.folder)
        kept = load_file(outcome.model)
        assert set(kept) == {"0.mean", "1.weight", "1.bias"}
        assert kept["0.mean"].abs().max() > 0
        assert outcome.tried(site.id, site.federation()).test_records == 8
    final = load_file(made.server / "model.safetensors")
    assert torch.equal(kept["0.mean"], final["0.mean"])


def test_measurements_are_numbered_below_releases(tmp_path: Path) -> None:
    values = study_values("weiavg", rounds=2)
    made = Federation.of(tmp_path, {**values, "accounted": {"every": 1, "share": 0.3}}, RECORD)
    summary = made.play()
    assert [line["round"] for line in made.lines()] == [-1, 0, -3, 1, -2]
    assert [one["after"] for one in summary["measured"]] == [1, 2]
    for site in made.sites.values():
        assert charged(site) == {-3, -2, -1, 0, 1}
        (line,) = site.spent()
        assert 0.9 * 4 <= line.epsilon <= 4


def test_a_release_is_answered_again_with_the_same_bytes_and_not_after_a_round(
    tmp_path: Path,
) -> None:
    made = federation(tmp_path)
    made.play()
    asked = {
        question.header["round"]: (question, answer)
        for node, question, answer in made.grid.heard
        if node == 1 and question.header["kind"] == "train"
    }
    site = made.sites["a"]
    question, answer = asked[1]
    assert site.answer(question).payload == answer.payload
    question, _ = asked[-1]
    assert "is over" in site.answer(question).reason
    header = {**question.header, "round": -2}
    assert not site.answer(replace(question, header=header)).accepted
    assert charged(site) == {-1, 0, 1}


@pytest.mark.parametrize("round_", [-1, 0])
def test_a_server_killed_in_a_release_or_after_it_goes_on(
    round_: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = federation(tmp_path)
    real = module.close_round

    def dies(agreement: Any, state: Any, *rest: Any, **more: Any) -> Any:
        if state.round == round_:
            raise SystemExit
        return real(agreement, state, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(module, "close_round", dies)
        with pytest.raises(SystemExit):
            made.play()
    summary = made.play()
    assert summary["lost_rounds"] == []
    assert [line["round"] for line in made.lines()] == [-1, 0, 1]
    assert all(charged(site) == {-1, 0, 1} for site in made.sites.values())


def test_a_release_has_at_least_the_noise_that_a_site_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of the budget goes into the release here, so that it has less noise than the rounds."""
    monkeypatch.setattr(releasing, "RELEASE", replace(RELEASE, share=0.9))
    desk, answers = Desk(study_values("weiavg", rounds=2)), []
    for number, factor in enumerate((0.0, 0.99, 1.01)):
        site = make_site(tmp_path / str(number), "a", RECORD)
        agreement, who = desk.agreement(), site.member().participant
        release = agreement.release_noise(-1, who)
        assert all(phase.noise_multiplier > 1.1 * release for phase in agreement.phases(who))
        write_site_file(site.folder, "a", RECORD, {"least_noise_multiplier": factor * release})
        answers.append(Site(site.folder).answer(desk.terms()))
    assert [answer.accepted for answer in answers] == [True, True, False]
    assert "below its policy" in answers[-1].reason
