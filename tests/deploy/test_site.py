"""A site believes nothing: what it refuses, what it pays for, and where its noise comes from."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpfl.core.errors import DiskError, DpflError, LedgerError
from dpfl.core.types import Observer, Unit
from dpfl.deploy.messages import Message, Reply, terms_from_dict
from dpfl.deploy.site import Site
from dpfl.deploy.site_status import SiteStatus
from dpfl.privacy.accountant import spend
from dpfl.rounds.codec import FRAME_BYTES
from dpfl.runs.site_file import SiteFile
from tests.deploy.federation import (
    CLIENT,
    DELTA,
    FEATURES,
    RECORD,
    Desk,
    charged,
    history_of,
    make_site,
    study_values,
    upload_of,
    write_site_file,
)

AT_REST = {"lr": 1e-9}  # nothing is learnt: what is sent is the noise
SHARED = {"noise_multiplier": None}


def udp(**more: Any) -> Desk:
    values = study_values("udp_fedavg", **{**AT_REST, **more})
    values["method"] = {k: v for k, v in values["method"].items() if v is not None}
    return Desk(values)


def enrolled(site: Site, desk: Desk, **lies: Any) -> None:
    answer = site.answer(desk.terms(**lies))
    assert answer.accepted, answer.reason


def one_sentence(answer: Message, words: str) -> None:
    assert not answer.accepted
    assert words in answer.reason, answer.reason
    assert "\n" not in answer.reason
    assert answer.payload == b""


# -- what a site refuses ---------------------------------------------------------------------------


def _with(
    method: str = "weiavg", run: dict[str, Any] | None = None, **more: Any
) -> Callable[[], Desk]:
    return lambda: Desk(study_values(method, run=run, **more))


@pytest.mark.parametrize(
    ("budget", "policy", "desk", "words", "code"),
    [
        (RECORD, {}, _with(run={"noise": "seeded", "seed": 5}), "seeded, which protects nobody", 4),
        (RECORD, {"methods": ["pfa", "fedavg_dp"]}, _with(), "does not allow weiavg", 4),
        (RECORD, {"least_noise_multiplier": 50.0}, _with(), "is below its policy's 50", 4),
        (RECORD, {"largest_clip": 0.5}, _with(), "a clip of 1.0 exceeds its policy's 0.5", 4),
        (RECORD, {"largest_sampling_rate": 0.2}, _with(), "exceeds its policy's 0.2", 4),
        (RECORD, {"most_rounds": 2}, _with(), "3 rounds exceed its policy's 2", 4),
        (RECORD, {"least_sites": 4}, _with(), "3 sites are fewer than its policy's 4", 4),
        (RECORD, {}, lambda: Desk(study_values(sites=("b", "c"))), "is not named in the study", 4),
        (RECORD, {}, _with("fedavg"), "protects nobody", 4),
        (RECORD, {}, _with("dp_fed", noise_multiplier=5.0), "trusts no server", 4),
        (
            CLIENT,
            {"largest_clip": 0.5},
            _with("dp_fed", noise_multiplier=5.0),
            "exceeds its policy's 0.5",
            4,
        ),
        (
            CLIENT,
            {"largest_clip": 0.5},
            _with("udp_fedavg", noise_multiplier=5.0),
            "exceeds its policy's 0.5",
            4,
        ),
        (
            CLIENT,
            {"largest_clip": 999.0},
            _with("udp_fedavg", noise_multiplier=5.0, target_quantile=0.5, vote_share=0.5),
            "a clip of 1000.0 exceeds its policy's 999",
            4,
        ),
        (
            CLIENT,
            {"least_noise_multiplier": 6.0},
            _with("udp_fedavg", noise_multiplier=5.0),
            "below its policy's 6",
            4,
        ),
        (
            CLIENT,
            {"least_noise_multiplier": 6.0},
            _with("dp_fed", noise_multiplier=5.0),
            "below its policy's 6",
            4,
        ),
        (CLIENT, {}, _with(), "is per client, but the method protects a record", 2),
        (RECORD, {"trust_server": True}, _with("dp_fed", noise_multiplier=5.0), "is per record", 2),
        (
            {**RECORD, "unit": "client"},
            {"trust_server": True},
            _with("dp_fed", noise_multiplier=5.0),
            "is against the server",
            2,
        ),
    ],
)
@pytest.mark.parametrize("kind", ["terms", "train"])
def test_a_site_checks_every_study_against_its_own_policy_whatever_the_message(
    budget: dict[str, Any],
    policy: dict[str, Any],
    desk: Callable[[], Desk],
    words: str,
    code: int,
    kind: str,
    tmp_path: Path,
) -> None:
    site = make_site(tmp_path / "a", "a", budget, policy)
    answer = site.answer(desk().terms() if kind == "terms" else desk().train(0))
    one_sentence(answer, words)
    assert answer.header["code"] == code
    assert charged(site) == charged(site, Observer.WORLD) == set()


def test_the_same_policies_let_a_study_within_them_pass(tmp_path: Path) -> None:
    policy = {
        "methods": ["weiavg"],
        "largest_clip": 1.0,
        "largest_sampling_rate": 0.25,
        "most_rounds": 3,
        "least_sites": 3,
        "least_noise_multiplier": 0.1,
    }
    site = make_site(tmp_path / "a", "a", RECORD, policy)
    desk = Desk(study_values())
    assert site.answer(desk.hello()).accepted
    enrolled(site, desk)
    assert site.answer(desk.train(0)).accepted


def test_data_of_another_shape_or_with_more_classes_is_refused(tmp_path: Path) -> None:
    site = make_site(tmp_path / "a", "a")
    values = study_values()
    values["study"]["feature_shape"] = [FEATURES + 1]
    one_sentence(site.answer(Desk(values).hello()), "prepare the same columns everywhere")
    values["study"]["feature_shape"] = [FEATURES, 1]
    answer = site.answer(Desk(values).hello())
    assert answer.header["code"] == 2
    assert (
        str([FEATURES]) not in answer.reason
    )  # what the site really holds is in its own log alone
    assert f"shape [{FEATURES}]" in (site.folder / "site.log").read_text()


@pytest.mark.parametrize("version", ["0.0.9", "1.0.0", "", None, "0", "0.1e"])
def test_another_version_is_refused_and_a_patch_is_not(version: str | None, tmp_path: Path) -> None:
    site, desk = make_site(tmp_path / "a", "a"), Desk(study_values())
    answer = site.answer(desk.hello(dpfl=version))
    one_sentence(answer, "use the same version")
    assert answer.header["code"] == 7
    assert site.answer(desk.hello(dpfl="0.1.99")).accepted


def test_a_site_without_a_budget_takes_part_only_where_it_said_so(tmp_path: Path) -> None:
    open_ = make_site(tmp_path / "open", "a", None, {"allow_unprotected": True})
    assert open_.answer(Desk(study_values("fedavg")).hello()).accepted
    one_sentence(open_.answer(Desk(study_values()).hello()), "has no budget")
    granted = make_site(tmp_path / "budget", "a", RECORD, {"allow_unprotected": True})
    one_sentence(granted.answer(Desk(study_values("fedavg")).hello()), "protects nobody")


# -- terms that are lies ---------------------------------------------------------------------------

LIES: list[dict[str, Any]] = [
    {"rounds": 4},
    {"rounds": 2},
    {"rounds": True},
    {"rounds": 3.0},
    {"rounds": -3},
    {"population": 4},
    {"population": -1},
    {"population": "3"},
    {"participations": -1},
    {"participations": 1.5},
    {"participations": 4},
    {"expected_cohort": "many"},
    {"expected_cohort": None},
    {"smallest_epsilon": [1]},
    {"noise_multiplier": math.nan},
    {"noise_multiplier": -1.0},
    {"noise_multiplier": "none"},
    {"public": 3},
]
WILD: list[dict[str, Any]] = [
    {"expected_cohort": math.nan},
    {"expected_cohort": math.inf},
    {"expected_cohort": 0.0},
    {"expected_cohort": -3.0},
    {"noise_multiplier": math.inf},
    {"noise_multiplier": 0.0},
    {"smallest_epsilon": math.nan},
    {"smallest_epsilon": -1.0},
    {"largest_epsilon": math.nan},
    {"participations": 0},
    {"population": 0},
]


@pytest.mark.parametrize("method", ["weiavg", "udp_fedavg", "dp_fed"])
@pytest.mark.parametrize("lie", LIES, ids=str)
def test_terms_that_do_not_belong_to_the_study_are_refused_and_cost_nothing(
    lie: dict[str, Any], method: str, tmp_path: Path
) -> None:
    site = make_site(tmp_path / "a", "a", RECORD if method == "weiavg" else CLIENT)
    desk = Desk(study_values(method))
    for message in (desk.terms(**lie), desk.train(0, **lie)):
        answer = site.answer(message)
        assert not answer.accepted
        assert "\n" not in answer.reason
        assert answer.payload == b""
    assert charged(site) == charged(site, Observer.WORLD) == set()


@pytest.mark.parametrize("method", ["weiavg", "minimum", "udp_fedavg", "dp_fed"])
@pytest.mark.parametrize("lie", WILD, ids=str)
def test_wild_numbers_are_answered_in_a_sentence_or_change_no_bill(
    lie: dict[str, Any], method: str, tmp_path: Path
) -> None:
    """Whatever a server says, a site answers, and what its ledger holds never passes what it
    granted.
    """
    record = method in ("weiavg", "minimum")
    site = make_site(tmp_path / "a", "a", RECORD if record else CLIENT)
    desk = Desk(study_values(method))
    for message in (desk.terms(**lie), desk.train(0, **lie), desk.train(1, **lie)):
        answer = site.answer(message)  # no exception
        assert answer.accepted or "\n" not in answer.reason
    spent = {line.observer: line for line in site.spent()}
    assert spent["server" if record else "world"].epsilon <= 4.0


@pytest.mark.parametrize("rounds", ["0", math.inf, math.nan, -1, 3, 10**30, None, [0], "x"])
def test_a_round_that_is_not_in_the_plan_is_refused(rounds: Any, tmp_path: Path) -> None:
    site, desk = make_site(tmp_path / "a", "a"), Desk(study_values())
    enrolled(site, desk)
    message = desk.train(0)
    answer = site.answer(
        Message(header={**message.header, "round": rounds}, payload=message.payload)
    )
    if rounds != "0":
        assert not answer.accepted
        assert charged(site) == set()


@pytest.mark.parametrize("missing", ["kind", "dpfl", "study", "run", "terms", "round"])
def test_a_message_that_lacks_something_is_refused(missing: str, tmp_path: Path) -> None:
    site, desk = make_site(tmp_path / "a", "a"), Desk(study_values())
    enrolled(site, desk)
    message = desk.train(0)
    header = {name: value for name, value in message.header.items() if name != missing}
    assert not site.answer(Message(header=header, payload=message.payload)).accepted
    assert charged(site) == set()


@pytest.mark.parametrize(
    "payload",
    [b"", b"x", b"\x80\x04.", b"\xff" * 64, (10**12).to_bytes(8, "little") + b"{}"],
    ids=repr,
)
def test_a_download_that_cannot_be_read_is_refused_and_costs_nothing(
    payload: bytes, tmp_path: Path
) -> None:
    site, desk = make_site(tmp_path / "a", "a"), Desk(study_values())
    enrolled(site, desk)
    answer = site.answer(desk.train(0, payload=payload))
    assert not answer.accepted
    assert charged(site) == set()


def test_training_before_agreeing_is_refused_and_releases_nothing(tmp_path: Path) -> None:
    for method, budget in (("weiavg", RECORD), ("dp_fed", CLIENT), ("udp_fedavg", CLIENT)):
        site, desk = make_site(tmp_path / method, "a", budget), Desk(study_values(method))
        answer = site.answer(desk.train(0))
        assert not answer.accepted
        assert answer.payload == b""
        assert charged(site) == charged(site, Observer.WORLD) == set()


# -- what it pays follows what it adds -------------------------------------------------------------


def noise_billed(site: Site, observer: Observer, clip: float = 1.0) -> float:
    """The least noise that any bill against the observer counts on."""
    return min(event.noise_multiplier for event in history_of(site, observer)) * clip


@pytest.mark.parametrize(
    "lies",
    [
        {},
        {"noise_multiplier": 0.9},
        {"participations": 1},
        {"smallest_epsilon": 100.0},
        {"expected_cohort": 1.0},
    ],
    ids=str,
)
def test_the_bill_follows_the_noise_that_is_really_added_whatever_the_terms_say(
    lies: dict[str, Any], tmp_path: Path
) -> None:
    site, desk = make_site(tmp_path / "a", "a", {**CLIENT, "epsilon": 20.0}), udp()
    site.answer(desk.terms(**lies))
    answer = site.answer(desk.train(0, **lies))
    assert answer.accepted, answer.reason
    grid = desk.study().strategy().resolve(terms_from_dict(desk.told(**lies))).upload_grid(3)
    assert grid is not None
    measured = float(upload_of(answer, grid.step).std())
    assert measured >= 0.8 * noise_billed(site, Observer.SERVER)
    assert measured * math.sqrt(3) >= 0.8 * noise_billed(site, Observer.WORLD)
    if "noise_multiplier" in lies:
        assert measured == pytest.approx(0.9 / math.sqrt(3), rel=0.25)
        line = next(line for line in site.spent() if line.observer == "world")
        assert (
            line.epsilon
            >= spend(history_of(site, Observer.WORLD), DELTA, adjacency=line.adjacency).epsilon
        )
        assert line.epsilon > 2  # about 4.5 for one release with a multiplier of 0.9


def test_a_server_that_says_more_were_drawn_than_there_are_gets_no_less_noise_than_was_billed(
    tmp_path: Path,
) -> None:
    site, desk = make_site(tmp_path / "a", "a", CLIENT), udp()
    enrolled(site, desk)
    answer = site.answer(desk.train(0, payload=desk.download(0, drawn=10**8)))
    if answer.accepted:
        assert float(upload_of(answer).std()) >= 0.8 * noise_billed(site, Observer.SERVER)
    else:
        assert charged(site) == set()


def test_terms_cannot_change_between_agreeing_and_training(tmp_path: Path) -> None:
    """An amplified bill is paid on agreeing: whoever agreed on much noise must not be made to add
    little.
    """
    site = make_site(tmp_path / "a", "a", CLIENT)
    values = study_values("udp_fedavg", run={"cohort": 2}, **AT_REST)
    desk = Desk(values)
    enrolled(site, desk, noise_multiplier=200.0)
    paid = noise_billed(site, Observer.WORLD)
    answer = site.answer(desk.train(0, payload=desk.download(0, drawn=2), noise_multiplier=1.0))
    if answer.accepted:
        assert float(upload_of(answer).std()) * math.sqrt(2) >= 0.8 * paid


def test_a_study_cannot_change_between_agreeing_and_training(tmp_path: Path) -> None:
    site = make_site(tmp_path / "a", "a", CLIENT)
    quiet = Desk(study_values("udp_fedavg", run={"cohort": 2}, **AT_REST, noise_multiplier=200.0))
    loud = Desk(study_values("udp_fedavg", run={"cohort": 2}, **AT_REST, noise_multiplier=1.0))
    enrolled(site, quiet)
    paid = noise_billed(site, Observer.WORLD)
    answer = site.answer(loud.train(0, payload=loud.download(0, drawn=2)))
    if answer.accepted:
        assert float(upload_of(answer).std()) * math.sqrt(2) >= 0.8 * paid


def test_record_level_noise_follows_the_site_s_own_budget_not_the_server_s_claims(
    tmp_path: Path,
) -> None:
    tight = make_site(tmp_path / "tight", "a", {**RECORD, "epsilon": 0.5})
    loose = make_site(tmp_path / "loose", "a", {**RECORD, "epsilon": 20.0})
    desk = Desk(study_values())
    for site in (tight, loose):
        enrolled(site, desk)
        assert site.answer(desk.train(0)).accepted
    assert noise_billed(tight, Observer.SERVER) > 2 * noise_billed(loose, Observer.SERVER)
    for site, epsilon in ((tight, 0.5), (loose, 20.0)):
        (line,) = site.spent()
        assert 0 < line.epsilon < epsilon


# -- budgets ---------------------------------------------------------------------------------------


def test_a_budget_that_is_used_up_ends_the_site_s_part_whatever_the_server_says(
    tmp_path: Path,
) -> None:
    site, desk = make_site(tmp_path / "a", "a"), Desk(study_values("weiavg", rounds=3))
    lie = {"participations": 1}  # all of the budget in the first round
    enrolled(site, desk, **lie)
    first = site.answer(desk.train(0, **lie))
    assert first.accepted
    assert first.header["more"] is False
    (line,) = site.spent()
    assert 3.5 < line.epsilon <= 4.0
    second = site.answer(desk.train(1, **lie))
    one_sentence(second, "takes no further part in this study")
    assert second.header["more"] is False
    third = site.answer(Desk(study_values("weiavg", rounds=3), run="another").terms())
    assert third.header.get("more") is False or not third.accepted
    assert charged(site) == {0}
    assert site.spent() == [line]


def test_the_grant_in_the_ledger_wins_over_an_edited_file(tmp_path: Path) -> None:
    site = make_site(tmp_path / "a", "a", {**RECORD, "epsilon": 1.0})
    write_site_file(site.folder, "a", {**RECORD, "epsilon": 100.0})
    desk = Desk(study_values())
    for message in (desk.terms(), desk.train(0), desk.train(1)):
        Site(site.folder).answer(message)
    write_site_file(site.folder, "a", {**RECORD, "epsilon": 1.0})
    (line,) = Site(site.folder).spent()
    assert line.epsilon <= 1.0
    assert line.budget == 1.0
    write_site_file(site.folder, "a", {**RECORD, "epsilon": 100.0})
    with pytest.raises(LedgerError, match="is epsilon 1"):
        Site(site.folder).prepare()


def test_a_missing_ledger_is_refused_and_not_made_again(tmp_path: Path) -> None:
    site, desk = make_site(tmp_path / "a", "a"), Desk(study_values())
    for file in site.folder.glob("ledger.sqlite*"):
        file.unlink()
    answer = site.answer(desk.terms())
    one_sentence(answer, "its own log says what")
    assert answer.header["code"] == 1  # what kind of failure it was stays here
    assert "there is no ledger" in (site.folder / "site.log").read_text()
    assert not list(site.folder.glob("ledger.sqlite*"))


def test_another_site_s_ledger_is_refused(tmp_path: Path) -> None:
    site, other = make_site(tmp_path / "a", "a"), make_site(tmp_path / "b", "b")
    for file in site.folder.glob("ledger.sqlite*"):
        file.unlink()
    (other.folder / "ledger.sqlite").rename(site.folder / "ledger.sqlite")
    assert site.answer(Desk(study_values()).terms()).header["code"] == 1


@pytest.mark.parametrize(("method", "cohort"), [("dp_fed", 0.5), ("udp_fedavg", 2)])
def test_amplified_methods_are_paid_for_all_rounds_on_agreeing_drawn_or_not(
    method: str, cohort: float, tmp_path: Path
) -> None:
    site, desk = (
        make_site(tmp_path / "a", "a", CLIENT),
        Desk(study_values(method, run={"cohort": cohort})),
    )
    enrolled(site, desk)
    assert charged(site, Observer.WORLD) == {0, 1, 2}
    assert charged(site) == set()
    line = next(line for line in site.spent() if line.observer == "world")
    agreement = desk.agreement()
    cost = agreement.cost(Observer.WORLD, site.member().participant)
    (event,) = cost.events
    whole = spend((event.times(3),), DELTA, adjacency=cost.adjacency).epsilon
    assert event.sampling == ("poisson" if method == "dp_fed" else "uniform")
    assert line.epsilon == pytest.approx(whole, rel=1e-9)
    assert 3 < line.epsilon <= 4.0
    enrolled(Site(site.folder), desk)  # told again after a restart: nothing is paid twice
    assert charged(site, Observer.WORLD) == {0, 1, 2}
    assert next(x.epsilon for x in site.spent() if x.observer == "world") == line.epsilon
    assert site.answer(desk.train(1, payload=desk.download(1, drawn=2))).accepted
    assert next(x.epsilon for x in site.spent() if x.observer == "world") == line.epsilon
    assert charged(site) == {1}


def test_an_amplified_study_that_the_budget_does_not_cover_is_refused_before_anything_is_paid(
    tmp_path: Path,
) -> None:
    site = make_site(tmp_path / "a", "a", {**CLIENT, "epsilon": 0.3})
    desk = Desk(study_values("dp_fed", run={"cohort": 0.5}, noise_multiplier=1.0))
    answer = site.answer(desk.terms())
    one_sentence(answer, "does not cover 3 rounds")
    assert charged(site, Observer.WORLD) == set()
    assert site.spent()[0].epsilon == 0


# -- noise -----------------------------------------------------------------------------------------


def _seed_everything() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.mark.parametrize("method", ["udp_fedavg", "weiavg"])
def test_two_releases_differ_though_every_global_generator_is_seeded(
    method: str, tmp_path: Path
) -> None:
    desk, uploads = Desk(study_values(method, **({} if method == "weiavg" else AT_REST))), []
    for copy in ("one", "two"):
        site = make_site(tmp_path / copy, "a", RECORD if method == "weiavg" else CLIENT)
        enrolled(site, desk)
        _seed_everything()
        uploads.append(upload_of(site.answer(desk.train(0))))
    one, two = uploads
    assert not torch.equal(one, two)
    if method == "udp_fedavg":  # nothing but noise
        correlation = float(torch.corrcoef(torch.stack([one, two]))[0, 1])
        assert abs(correlation) < 4 / math.sqrt(len(one))


def test_the_noise_comes_from_the_operating_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a broken operating-system generator the releases repeat; with a seed in the study they
    still differ.
    """
    desk = Desk(study_values("udp_fedavg", run={"seed": 5}, **AT_REST))
    sites = [make_site(tmp_path / copy, "a", CLIENT) for copy in ("one", "two", "three", "four")]
    for site in sites:
        enrolled(site, desk)
    honest = [upload_of(site.answer(desk.train(0))) for site in sites[:2]]
    assert not torch.equal(*honest)
    monkeypatch.setattr(os, "urandom", lambda length: b"\x01" * length)
    broken = [upload_of(site.answer(desk.train(0))) for site in sites[2:]]
    assert torch.equal(*broken)


def test_a_seeded_rehearsal_repeats_and_its_ledger_says_so(tmp_path: Path) -> None:
    desk = Desk(study_values("udp_fedavg", run={"noise": "seeded", "seed": 5}, **AT_REST))
    uploads = []
    for copy in ("one", "two"):
        site = make_site(tmp_path / copy, "a", CLIENT, {"allow_seeded": True})
        enrolled(site, desk)
        uploads.append(upload_of(site.answer(desk.train(0))))
        ledger = site.ledger()
        assert ledger.seeded_runs() == ["run-1"]
        ledger.close()
    assert torch.equal(*uploads)


def test_a_run_that_was_agreed_on_as_private_is_not_trained_with_seeded_noise(
    tmp_path: Path,
) -> None:
    """The ledger would say that the run was private."""
    site = make_site(tmp_path / "a", "a", CLIENT, {"allow_seeded": True})
    enrolled(site, Desk(study_values("udp_fedavg", **AT_REST)))
    seeded = Desk(study_values("udp_fedavg", run={"noise": "seeded", "seed": 5}, **AT_REST))
    answer = site.answer(seeded.train(0))
    ledger = site.ledger()
    assert not answer.accepted or ledger.seeded_runs() == ["run-1"]
    ledger.close()


# -- the file of a site ----------------------------------------------------------------------------


def test_what_is_sent_is_a_frame_of_the_agreed_size_and_holds_no_record(tmp_path: Path) -> None:
    site, desk = make_site(tmp_path / "a", "a"), Desk(study_values())
    enrolled(site, desk)
    answer = site.answer(desk.train(0))
    assert len(answer.payload) == FRAME_BYTES + 4 * (FEATURES + 1) * 2
    assert set(answer.header) == {"ok", "site", "round", "token", "more", "head"}
    claims = site.answer(desk.hello()).header["claims"]
    told = {"epsilon": 4.0, "delta": DELTA, "examples": 32, "accountant": None}
    assert claims == {**told, "test_examples": 0}


def test_a_token_is_bound_to_the_run_and_never_the_secret_itself(tmp_path: Path) -> None:
    site, desk = make_site(tmp_path / "a", "a"), Desk(study_values())
    secret = (site.folder / "token").read_text()
    tokens = {
        site.answer(Desk(desk.values, run=run).hello()).header["token"] for run in ("one", "two")
    }
    assert len(tokens) == 2
    assert secret not in tokens
    assert site.token("one") == Site(site.folder).token("one") in tokens
    assert (site.folder / "token").stat().st_mode & 0o777 == 0o600


FILE = {"file": "x.csv", "classes": 2}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"site": {"id": "a"}, "data": FILE}, r"\[budget\]: is missing"),
        ({"site": {"id": "a"}, "data": {}, "budget": RECORD}, r"\[data\] file: is missing"),
        ({"site": {"id": ""}, "data": FILE, "budget": RECORD}, "id"),
        ({"site": {"id": "a"}, "data": FILE, "budget": CLIENT}, "trusts the server"),
        ({"site": {"id": "a"}, "data": FILE, "budget": {**RECORD, "epsilon": 0}}, "epsilon"),
        (
            {"site": {"id": "a"}, "data": FILE, "budget": {**RECORD, "epsilon": math.inf}},
            "epsilon = inf",
        ),
        ({"site": {"id": "a"}, "data": FILE, "budget": {**RECORD, "delta": 1}}, "delta"),
        ({"site": {"id": "a"}, "data": FILE, "budget": {"epsilon": 1}}, "delta"),
        (
            {
                "site": {"id": "a"},
                "data": FILE,
                "budget": RECORD,
                "policy": {"least_sitess": 1},
            },
            "least_sites",
        ),
        (
            {
                "site": {"id": "a"},
                "data": FILE,
                "budget": RECORD,
                "policy": {"largest_sampling_rate": 2},
            },
            "largest_sampling_rate",
        ),
    ],
)
def test_a_site_s_file_is_refused_in_one_sentence(values: dict[str, Any], words: str) -> None:
    from dpfl.core.errors import ConfigurationError

    with pytest.raises(ConfigurationError, match=words) as caught:
        SiteFile.from_dict(values)
    assert "\n" not in str(caught.value)


def test_a_statement_is_never_below_the_accountant_over_everything_that_was_released(
    tmp_path: Path,
) -> None:
    """Two studies of different methods, one site: the second one is paid on top of the first."""
    site = make_site(tmp_path / "a", "a", {**RECORD, "epsilon": 8.0, "filter": "renyi"})
    for number, method in enumerate(("weiavg", "fedavg_dp")):
        desk = Desk(study_values(method, rounds=2), run=f"run-{number}", epsilon=8.0)
        site.answer(desk.terms(noise_multiplier=1.5))
        assert site.answer(desk.train(0, noise_multiplier=1.5)).accepted
    (line,) = site.spent()
    history = history_of(site, Observer.SERVER)
    assert [(event.steps, event.sampling_rate) for event in history] == [(4, 0.25)]
    assert history[0].noise_multiplier == pytest.approx(1.5, rel=1e-3)
    assert history[0].noise_multiplier < 1.5
    assert line.epsilon >= spend(history, DELTA, adjacency="zero_out").epsilon
    assert (line.unit, line.rounds) == (str(Unit.RECORD), 2)


def test_a_model_that_cannot_take_the_records_is_refused_before_anything_is_paid(
    tmp_path: Path,
) -> None:
    site, values = make_site(tmp_path / "a", "a"), study_values()
    values["model"] = {"name": "lstm"}
    desk = Desk(values)
    answer = site.answer(Message(header={**desk.header("hello")}))
    assert not answer.accepted
    assert "\n" not in answer.reason
    assert charged(site) == set()


def test_whether_a_study_fits_does_not_depend_on_the_records(tmp_path: Path) -> None:
    """A server that offers 2, 3, 4 classes was told the largest label of all records, free of
    charge.
    """
    answers = []
    for labels in ("0", "1"):
        folder = tmp_path / labels
        site = make_site(folder, "a")
        lines = (folder / "records.csv").read_text().splitlines()
        lines[1:] = [
            line.rsplit(",", 1)[0] + f",{labels}" for line in lines[1:]
        ]  # a record's label is the only change
        (folder / "records.csv").write_text("\n".join(lines) + "\n")
        told = []
        for classes in (2, 3, 4):
            values = study_values()
            values["study"]["classes"] = classes
            told.append(Site(site.folder).answer(Desk(values).hello()).accepted)
        answers.append(told)
    assert answers == [[True, True, True], [True, True, True]]


def test_a_label_beyond_the_declared_classes_is_refused_at_the_site(tmp_path: Path) -> None:
    site = make_site(tmp_path / "a", "a")
    path = tmp_path / "a" / "records.csv"
    path.write_text(path.read_text().rstrip().rsplit(",", 1)[0] + ",7\n")
    with pytest.raises(DpflError, match="label"):
        Site(site.folder).member()


def test_work_that_fails_is_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, desk = make_site(tmp_path / "a", "a"), Desk(study_values())
    enrolled(site, desk)

    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryError("too large")

    monkeypatch.setattr(Site, "work", fails)
    answer = site.answer(desk.train(0))
    assert not answer.accepted
    assert "too large" not in answer.reason
    assert charged(site) == {0}


def test_a_download_of_another_round_than_the_one_that_is_charged_is_refused(
    tmp_path: Path,
) -> None:
    """Work follows the download and the charge follows the request: they must be of one round."""
    site, desk = make_site(tmp_path / "a", "a"), Desk(study_values())
    assert site.answer(desk.terms()).accepted
    one_sentence(site.answer(desk.train(0, payload=desk.download(1))), "is of round 1")
    one_sentence(site.answer(desk.train(1, payload=desk.download(-1))), "is of round -1")
    assert charged(site) == set()
    assert site.answer(desk.train(0)).accepted


def test_records_that_changed_are_not_called_a_spent_budget(tmp_path: Path) -> None:
    """The site stops; its log says why, the server hears what it hears of any site that stops."""
    site, desk = make_site(tmp_path / "a", "a"), Desk(study_values())
    assert site.answer(desk.terms()).accepted
    assert site.answer(desk.train(0)).accepted
    records = site.folder / "records.csv"
    whole = records.read_text()
    records.write_text("".join(whole.splitlines(keepends=True)[:20]))
    answer = Site(site.folder).answer(desk.train(1))
    one_sentence(answer, "takes no further part in this study")
    assert not Reply.of(answer).more
    assert charged(site) == {0}
    assert "not those that the study was planned for" in (site.folder / "site.log").read_text()
    again = Site(site.folder).answer(desk.train(0))  # what was stored is sent again
    assert again.accepted and not Reply.of(again).more
    records.write_text(whole)
    assert Site(site.folder).answer(desk.train(1)).accepted


def test_a_folder_that_cannot_be_written_is_not_called_a_broken_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, desk = make_site(tmp_path / "a", "a"), Desk(study_values())
    assert site.answer(desk.terms()).accepted
    assert site.answer(desk.train(0)).accepted
    spent = site.spent()
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(DiskError, match="cannot be written"):
        site.ledger()
    assert site.spent() == spent  # whoever may only read can still see what was spent
    assert SiteStatus.of(site).studies


def test_a_refusal_without_proof_is_still_a_refusal(tmp_path: Path) -> None:
    """A missing token, or a run's name that cannot be written, must not end the site."""
    site, other = make_site(tmp_path / "a", "a"), Desk(study_values(sites=["b", "c"]))
    assert "token" in site.answer(other.hello()).header
    answer = site.answer(other.hello(run="\ud800"))
    one_sentence(answer, "is a name of 1 character")
    assert "token" not in answer.header
    (site.folder / "token").unlink()
    answer = site.answer(other.hello())
    one_sentence(answer, "is not named in the study")
    assert "token" not in answer.header


def test_a_site_file_that_names_what_a_data_set_needed_still_opens(tmp_path: Path) -> None:
    site = make_site(tmp_path / "a", "a")
    path = site.folder / "site.toml"
    text = path.read_text()
    path.write_text(text.replace("[data]\n", "[data]\nseed = 0\npartition = {}\n"))
    assert "partition" in path.read_text()
    assert Site(site.folder).member().shard.examples == site.member().shard.examples
