"""Record-level methods and releases over a secure sum between sites: the simulator's integers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpfl.deploy.requests import TermsRequest
from dpfl.rounds import close_round
from tests.deploy.federation import RECORD, Desk, Federation, charged
from tests.deploy.releasing import begin_with_a_mean
from tests.deploy.sums import NAMES, Talk, integers_of, pin, sum_values


@pytest.fixture(autouse=True)
def _with_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_with_a_mean(monkeypatch)


def values_of(steps: int) -> dict[str, Any]:
    values = sum_values(method="weiavg")
    lengths = ("local_steps", "local_epochs")
    method = {name: own for name, own in values["method"].items() if name not in lengths}
    return {**values, "method": {**method, "local_steps": steps}}


def made(base: Path, steps: int) -> Federation:
    found = Federation.of(base, values_of(steps), RECORD, policy={"allow_seeded": True})
    pin(found.sites)
    return found


def test_a_study_adds_up_the_simulators_integers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = []

    def watched(agreement, state, plan, uplinks, run, *, total=None):  # type: ignore[no-untyped-def]
        played.append((plan, run, total))
        return close_round(agreement, state, plan, uplinks, run, total=total)

    monkeypatch.setattr("dpfl.deploy.coordinator.close_round", watched)
    federation = made(tmp_path, 1)
    federation.play()
    assert [line["round"] for line in federation.lines()] == [-1, 0]
    assert [plan.round for plan, _, _ in played] == [-1, 0]
    for plan, run, total in played:
        desk = Desk(values_of(1), run=run.name)
        sent = integers_of(desk, federation.sites, plan.round, plan.downloads["a"])
        assert sorted(total.ids) == [*NAMES]
        assert np.array_equal(total.integers, sum(sent.values()))
    for site in federation.sites.values():
        assert charged(site) == {-1, 0}
        (line,) = site.spent()
        assert 0 < line.epsilon <= 4


@pytest.mark.parametrize("secure", [True, False])
def test_a_release_asks_everyone_where_rounds_draw_a_cohort(tmp_path: Path, secure: bool) -> None:
    values = values_of(1)
    values = {**values, "run": {**values["run"], "cohort": 3}}
    values["secure_sum"] = {"tolerated_dropouts": 0}
    if not secure:
        del values["secure_sum"]
    federation = Federation.of(tmp_path, values, RECORD, policy={"allow_seeded": True})
    pin(federation.sites)
    federation.play()
    release, round_ = federation.lines()
    assert release["arrived"] == [*NAMES]
    assert len(round_["arrived"]) == 3


def test_a_site_checks_weights_noise_and_how_many_were_drawn(tmp_path: Path) -> None:
    federation, values = made(tmp_path, 1), values_of(1)
    desk, site = Desk(values), federation.sites["a"]
    honest = desk.agreement().terms

    def answered(**lies: Any) -> str:
        request = TermsRequest(
            study=desk.study(),
            run=desk.run,
            signer="00" * 32,
            terms=replace(honest, **lies),
            binding=False,
        )
        answer = site.answer(request.to_message())
        return "" if answer.accepted else answer.reason

    assert answered() == ""
    others = tuple(own for own in honest.weights if own[0] != "a")
    assert "no weight of 'a'" in answered(weights=others)
    assert "shares of one" in answered(weights=(("a", 0.9), ("b", 0.9)))
    assert "do not belong" in answered(release_noise=())
    # A weight only scales the site's own cost, and so does less noise.
    assert "does not cover" in answered(weights=(("a", 1.0),), noise_multiplier=1e-4)
    assert "does not cover" in answered(release_noise=(1e-3,))


def test_a_download_that_names_more_drawn_sites_than_are_asked_is_refused(tmp_path: Path) -> None:
    """Shares are made for the drawn: fewer in the sum would leave less noise than is charged."""
    values = {**values_of(1), "secure_sum": {"tolerated_dropouts": 0}}
    federation = Federation.of(tmp_path, values, RECORD, policy={"allow_seeded": True})
    pin(federation.sites)
    talk = Talk.bound(federation, values)
    talk.folders.pop("d")
    talk.round = -1
    talk.share_all()
    assert "4 sites were drawn, and 3 are asked" in talk.train("a").reason
    assert charged(federation.sites["a"]) == set()


@pytest.mark.parametrize("rows", [3, 9, 20])
def test_what_is_said_of_a_stored_upload_does_not_follow_from_records_that_changed(
    tmp_path: Path, rows: int
) -> None:
    policy = {"allow_seeded": True, "largest_sampling_rate": 0.26}
    federation = Federation.of(tmp_path, values_of(1), RECORD, policy=policy)
    pin(federation.sites)
    talk = Talk.bound(federation, values_of(1))
    talk.round = talk.desk.agreement().first_round
    talk.train_all()
    records = tmp_path / "a" / "records.csv"
    records.write_text("\n".join(records.read_text().splitlines()[: 1 + rows]) + "\n")
    assert talk.train("a").payload == talk.masked["a"]
    assert talk.sign("a").accepted
    other = federation.sites["a"].answer(talk.desk.terms(population=3))
    assert "not those agreed on" in str(other.reason)
