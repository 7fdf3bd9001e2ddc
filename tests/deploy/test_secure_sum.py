"""A secure sum between sites: exact, charged once, and nothing else can be had from it."""

from __future__ import annotations

import json
import shutil
import tomllib
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpfl.cli.main import run_command
from dpfl.core.errors import CheckpointError, ConfigurationError, PeerError, PrivacyRefusal
from dpfl.deploy import server_sum
from dpfl.deploy.requests import TRAIN
from dpfl.deploy.server_sum import SUM
from dpfl.deploy.site import Site
from dpfl.deploy.transport import from_record
from dpfl.privacy.site_ledger import SiteLedger
from dpfl.rounds import close_round
from dpfl.runs.deployment import StudyFile
from dpfl.runs.site_file import SiteFile
from dpfl.secure_sum import member
from dpfl.secure_sum.keys import public_half
from dpfl.secure_sum.session import MOST_ATTEMPTS, Roster, Shares
from tests.deploy.federation import Desk, Federation, WatchedGrid, charged
from tests.deploy.sums import NAMES, Talk, integers_of, pin, sum_federation, sum_values


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Sites that have committed to the terms; tests work on copies."""
    base = tmp_path_factory.mktemp("sums")
    sum_federation(base / "new")
    shutil.copytree(base / "new", base / "bound")
    Talk.bound(copied(base / "bound"), sum_values())
    return base


def copied(base: Path) -> Federation:
    """The federation in a folder."""
    grid = WatchedGrid({number + 1: base / name for number, name in enumerate(NAMES)})
    sites = {name: Site(base / name) for name in NAMES}
    return Federation(base=base, server=base / "server", grid=grid, sites=sites)


@pytest.fixture
def federation(prepared: Path, tmp_path: Path) -> Federation:
    """A federation whose server has not begun."""
    return copied(Path(shutil.copytree(prepared / "new", tmp_path / "fresh")))


@pytest.fixture
def bound(prepared: Path, tmp_path: Path) -> Federation:
    """A federation whose sites have committed to the terms of a study."""
    return copied(Path(shutil.copytree(prepared / "bound", tmp_path / "bound")))


@pytest.fixture
def talk(bound: Federation) -> Talk:
    """A server that asks the bound sites message by message."""
    folders = {name: site.folder for name, site in bound.sites.items()}
    return Talk(folders=folders, desk=Desk(sum_values()))


def change_study(federation: Federation, **run: Any) -> dict[str, Any]:
    """Change how long the server waits."""
    values = sum_values()
    values["run"] |= run
    (federation.server / "study.toml").write_text(StudyFile.from_dict(values).to_toml())
    return values


def silent_when(*kinds: str):
    """A node that does not answer requests of these kinds, or phases."""

    def fault(message, answer):
        header = from_record(message.content).header
        return None if {header["kind"], header.get("phase")} & {*kinds} else answer()

    return fault


# -- masked = unmasked = simulator -----------------------------------------------------------------


@pytest.mark.parametrize("gone", [(), ("c",)])
def test_the_sum_is_that_of_the_simulators_integers(bound, talk, gone):
    talk.train_all(*gone)
    sent = integers_of(talk.desk, bound.sites)
    expected = sum(sent[name] for name in NAMES if name not in gone)
    assert np.array_equal(talk.total(), expected)
    assert np.abs(expected).max() > 1000  # noise and all


@pytest.mark.parametrize("gone", [(), ("c",)])
def test_a_study_publishes_what_the_simulator_publishes(federation, monkeypatch, gone):
    """The coordinator's rounds, and the same rounds with the simulator's integers in the open."""
    played = []

    def watched(agreement, state, plan, uplinks, run, *, total=None):
        played.append((plan, run, total))
        return close_round(agreement, state, plan, uplinks, run, total=total)

    monkeypatch.setattr("dpfl.deploy.coordinator.close_round", watched)
    for name in gone:
        federation.grid.faults[1 + NAMES.index(name)] = silent_when(TRAIN)
    values = change_study(federation, round_timeout=0.3 if gone else 20.0)
    summary = federation.play()
    (line,) = federation.lines()
    assert line["arrived"] == [name for name in NAMES if name not in gone]
    assert sorted(line["missing"]) == [*gone]
    assert line["payload_bytes_up"] == line["bytes_up"] > 0  # masked uploads have no frame
    ((plan, run, total),) = played
    desk = Desk(values, run=run.name)
    sent = integers_of(desk, federation.sites, download=plan.downloads["a"])
    assert np.array_equal(total.integers, sum(sent[name] for name in total.ids))
    assert summary["rounds"]["done"] == 1
    lines = (federation.server / "timings.jsonl").read_text().splitlines()
    timings = [json.loads(one) for one in lines]
    phases = ["keys", "shares", "masked updates", "survivors", "unmask"]
    assert [line["phase"] for line in timings] == phases
    assert all(line["bytes_down_up"]["a"][1] > 100 for line in timings)


def test_every_site_is_charged_once_a_round_at_the_honest_shares(federation):
    federation.play()
    for site in federation.sites.values():
        assert charged(site) == {0}
        (statement,) = [one for one in site.spent() if str(one.observer) == "server"]
        assert 0 < statement.epsilon <= 4.0
    # Two of four shares count: one may be missing, one may collude.
    strategy = StudyFile.from_dict(sum_values()).strategy()
    assert strategy.channel.group(4).honest == 2
    assert strategy.stages[-1].tolerated_dropouts == 2


# -- sessions --------------------------------------------------------------------------------------


def test_the_same_session_gets_the_same_bytes_and_is_charged_once(bound, talk):
    talk.train_all()
    again = talk.train("a")
    assert again.accepted
    assert again.payload == talk.masked["a"]
    assert charged(bound.sites["a"]) == {0}


def test_another_session_of_a_round_is_refused_after_the_upload(bound, talk):
    talk.train_all()
    first = talk.masked["a"]
    talk.attempt = 1
    answer = talk.keys("a")
    assert not answer.accepted
    assert "in another session" in answer.reason
    # The others may make a new session, with other members, which the site never joined.
    session = "0" * 64
    answer = talk.train("a", session=session)
    assert not answer.accepted
    assert "another session" in answer.reason
    assert answer.payload == b""
    assert charged(bound.sites["a"]) == {0}
    talk.attempt = 0
    assert talk.train("a").payload == first


def test_a_new_attempt_before_the_upload_forgets_the_old_one(talk):
    talk.share_all()
    old = talk.roster
    talk.attempt = 1
    talk.make_roster(("a", "b", "c"))
    assert talk.roster.session != old.session
    talk.shares.clear()
    talk.share_all()
    answer = talk.train("a", session=old.session)
    assert "another session" in answer.reason
    assert talk.train("a").accepted
    talk.attempt = 0
    assert "attempt 0 is over" in talk.keys("b").reason


def test_keys_and_shares_are_the_same_when_asked_again(talk):
    talk.make_roster()
    assert talk.keys("a").header == talk.keys("a").header
    assert talk.share("a").header["sum"] == talk.share("a").header["sum"]


def test_other_lists_of_members_are_refused(bound, talk):
    roster = talk.make_roster()
    assert talk.share("a").accepted
    smaller = Roster(terms=roster.terms, members=roster.members[:3])
    assert "another list of members" in talk.share("a", smaller).reason
    # b is shown another list: a notices, since b's share does not open.
    for name, shown in zip(NAMES, (roster, smaller, smaller, roster), strict=True):
        talk.shares[name] = Shares.read(talk.share(name, shown).header["sum"])
    answer = talk.train("a")
    assert not answer.accepted
    assert "'b'" in answer.reason
    assert charged(bound.sites["a"]) == set()


def test_one_list_of_survivors(talk):
    talk.train_all()
    assert talk.sign("a").accepted
    assert talk.sign("a").header["sum"] == talk.sign("a").header["sum"]
    assert "another list of survivors" in talk.sign("a", ["a", "b", "c"]).reason
    assert "2 survivors" in talk.sign("b", ["a", "b"]).reason


def test_a_ledger_from_before_the_signature_is_refused(bound, talk, tmp_path):
    """Restored from a backup, it would sign another list."""
    talk.train_all()
    files = [bound.sites["a"].folder / name for name in ("ledger.sqlite", "ledger.sqlite-wal")]
    kept = {path: path.read_bytes() for path in files if path.exists()}
    assert talk.sign("a").accepted
    for path, content in kept.items():
        path.write_bytes(content)
    (bound.sites["a"].folder / "ledger.sqlite-shm").unlink(missing_ok=True)
    assert not talk.sign("a", ["a", "b", "c"]).accepted


def test_nothing_is_unmasked_without_enough_signatures(talk):
    talk.train_all()
    signatures = {name: talk.sign(name).header["sum"]["signature"] for name in NAMES}
    fewer = dict(list(signatures.items())[:2])  # t = 3
    assert "2 members have signed" in talk.unmask("a", fewer).reason
    assert talk.unmask("a", signatures).accepted


def test_an_upload_without_a_session_is_refused(talk):
    answer = talk.answer("a", talk.desk.train())
    assert not answer.accepted
    assert "not masked" in answer.reason


def test_another_download_than_the_sessions_is_refused(bound, talk):
    talk.share_all()
    other = bytearray(talk.desk.download(0))
    other[-1] ^= 1
    assert "not the one that the session is about" in talk.train("a", payload=bytes(other)).reason
    assert charged(bound.sites["a"]) == set()


def test_shares_of_noise_are_made_for_those_who_are_in_the_sum(prepared, tmp_path):
    """A download that names more drawn sites would make every share of the noise too small."""
    values = sum_values(dropouts=0)
    base = Path(shutil.copytree(prepared / "new", tmp_path / "fresh"))
    talk = Talk.bound(copied(base), values)
    del talk.folders["d"]  # three are asked, and the download says four
    talk.desk.download = lambda round_: Desk(values).download(round_, drawn=4)
    talk.share_all()
    answer = talk.train("a")
    assert not answer.accepted
    assert "4 sites were drawn, and 3 are asked" in answer.reason


@pytest.mark.parametrize(
    "lie",
    [
        {"step": 1e-9},
        {"largest": 2**30},
        {"numbers": 7},
        {"least": 2},
        {"colluders": 0},
        {"asked": 5},
        {"asked": 3},
        {"plan": "0"},
        {"run": "other"},
        {"round": 1},
        {"attempt": MOST_ATTEMPTS},
    ],
    ids=str,
)
def test_terms_that_the_study_does_not_have_are_refused(talk, lie):
    answer = talk.keys("a", **lie)
    assert not answer.accepted
    (name,) = lie
    named = {"asked": "3 members" if lie == {"asked": 3} else "5 sites are asked"}
    assert named.get(name, name) in answer.reason


@pytest.mark.parametrize(
    ("phase", "about"),
    [
        ("keys", {}),
        ("shares", {"terms": 1}),
        ("survivors", {}),
        ("unmask", {"session": 3}),
        ("x", {}),
    ],
)
def test_messages_that_make_no_sense_are_refused(talk, phase, about):
    answer = talk.answer("a", talk.request(phase, about))
    assert not answer.accepted
    assert answer.header["code"] == PeerError.exit_code


def test_a_study_without_a_secure_sum_has_no_phases(tmp_path):
    values = {**sum_values()}
    del values["secure_sum"]
    values["method"]["noise"] = "local"
    federation = sum_federation(tmp_path, values)
    talk = Talk.bound(federation, values)
    answer = talk.answer("a", talk.request("keys", {}))
    assert "has none" in answer.reason


# -- whom a site counts on -------------------------------------------------------------------------


def test_sites_that_are_not_pinned_count_as_colluders(federation):
    pin({name: site for name, site in federation.sites.items() if name != "d"})
    talk = Talk({name: site.folder for name, site in federation.sites.items()}, Desk(sum_values()))
    answer = talk.answer("a", talk.desk.hello())
    assert not answer.accepted
    assert "d not pinned" in answer.reason
    assert answer.header["code"] == PrivacyRefusal.exit_code


def test_a_member_with_another_key_than_pinned_is_refused(bound, talk):
    (bound.sites["b"].folder / "identity.key").unlink()
    talk.make_roster()
    answer = talk.share("a")
    assert "'b' has the identity key" in answer.reason


def test_keys_are_compared_when_sites_enrol(federation):
    """A wrong pin costs nobody a round: the site is not in the population."""
    values = SiteFile.in_folder(federation.sites["d"].folder).model_dump(exclude_none=True)
    values["secure_sum"]["members"]["a"] = "ab" * 32
    (federation.sites["d"].folder / "site.toml").write_text(SiteFile.from_dict(values).to_toml())
    study = sum_values(dropouts=0)
    (federation.server / "study.toml").write_text(StudyFile.from_dict(study).to_toml())
    summary = federation.play()
    assert "'a' has the identity key" in summary["refusals"]["d"]
    assert summary["sites"] == ["a", "b", "c"]
    assert charged(federation.sites["d"]) == set()
    assert charged(federation.sites["a"]) == {0}


def test_two_sites_with_one_key_are_refused_when_they_enrol(federation):
    key = (federation.sites["a"].folder / "identity.key").read_bytes()
    (federation.sites["b"].folder / "identity.key").write_bytes(key)
    with pytest.raises(PeerError, match="'a' and 'b' have one identity key"):
        federation.play()
    assert charged(federation.sites["c"]) == set()


def test_a_policy_that_asks_for_more_honest_sites_than_there_are(federation):
    pin(federation.sites, least_honest=3)
    talk = Talk({name: site.folder for name, site in federation.sites.items()}, Desk(sum_values()))
    answer = talk.answer("a", talk.desk.terms())
    assert "2 honest sites" in answer.reason
    assert "asks for 3" in answer.reason


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"members": {"b": "xyz"}}, r"members.b: 'xyz' was given; give 64 hexadecimal digits"),
        ({"members": {"b": "0" * 64, "c": "0" * 64}}, "one key"),
        ({"count_on": ["b"]}, "count_on"),
        ({"colluders": 0}, "colluders"),
        ({"least_honest": 1}, "least_honest"),
    ],
    ids=str,
)
def test_bad_sections_in_a_sites_file(federation, section, named):
    values = SiteFile.in_folder(federation.sites["a"].folder).model_dump(exclude_none=True)
    with pytest.raises(ConfigurationError, match=named):
        SiteFile.from_dict({**values, "secure_sum": section})


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["keys", "shares"])
def test_a_site_that_drops_out_early_leads_to_another_attempt(federation, phase):
    change_study(federation, round_timeout=0.3)
    federation.grid.faults[4] = silent_when(phase)
    federation.play()
    (line,) = federation.lines()
    assert line["arrived"] == ["a", "b", "c"]
    assert charged(federation.sites["d"]) == set()  # it has sent nothing


def test_with_more_missing_the_round_is_lost_and_charged(federation):
    change_study(federation, round_timeout=0.3)
    for node in (3, 4):
        federation.grid.faults[node] = silent_when(TRAIN)
    federation.play()
    (line,) = federation.lines()
    assert line["arrived"] == []
    assert "nothing" in line["published"]
    assert "the secure sum is lost" in line["missing"]["a"]
    assert charged(federation.sites["a"]) == {0}
    # Nobody was asked to take masks off.
    phases = [question.header.get("phase") for _, question, _ in federation.grid.heard]
    assert "shares" in phases
    assert not {"survivors", "unmask"} & {*phases}


class Killed(BaseException):
    """The process is gone."""


def test_a_site_that_is_killed_goes_on_in_its_session(bound, talk, monkeypatch):
    """Killed before and after each of its commits, and asked again in a new process."""
    killed: list[str] = []

    def die(where: str) -> None:
        if where not in killed:
            killed.append(where)
            raise Killed

    def dying(name: str, real: Any) -> Any:
        def call(self, *rest, **more):
            if self.identity() != "a":
                return real(self, *rest, **more)
            die(f"before {name} in {phase[0]}")
            result = real(self, *rest, **more)
            die(f"after {name} in {phase[0]}")
            return result

        return call

    for name in ("store_sum", "charge_and_store"):
        monkeypatch.setattr(SiteLedger, name, dying(name, getattr(SiteLedger, name)))
    ask, phase = talk.answer, [""]

    def asked(site, message):
        phase[0] = message.header.get("phase", message.header["kind"])
        for _ in range(2):
            with suppress(Killed):
                return ask(site, message)
        return ask(site, message)

    talk.answer = asked
    talk.train_all("c")
    sent = integers_of(talk.desk, bound.sites)
    expected = sum(sent[name] for name in NAMES if name != "c")
    assert np.array_equal(talk.total(), expected)
    assert charged(bound.sites["a"]) == {0}
    commits = ["store_sum in keys", "store_sum in shares", "charge_and_store in train"]
    commits += ["store_sum in survivors", "store_sum in unmask"]
    assert killed == [f"{when} {point}" for point in commits for when in ("before", "after")]


@pytest.mark.parametrize("phase", ["keys", "shares", "survivors"])
def test_two_messages_at_once_get_one_answer(talk, monkeypatch, phase):
    """A second process answers while the first one works: one of the two answers is refused.

    Otherwise a site would sign two lists of survivors, or share one secret out in two sessions.
    """
    if phase == "keys":
        step, asked, other = "make_keys", lambda: talk.keys("a"), lambda: talk.keys("a")
    elif phase == "shares":
        roster = talk.make_roster()
        smaller = Roster(terms=roster.terms, members=roster.members[:3])
        step, asked, other = (
            "make_shares",
            lambda: talk.share("a"),
            lambda: talk.share("a", smaller),
        )
    else:
        talk.train_all()
        step, asked, other = (
            "sign_survivors",
            lambda: talk.sign("a"),
            lambda: talk.sign("a", ["a", "b", "c"]),
        )
    real, answers = getattr(member, step), []

    def interrupted(*about):
        made = real(*about)
        monkeypatch.setattr(member, step, real)
        answers.append(other())
        return made

    monkeypatch.setattr(member, step, interrupted)
    answers.append(asked())
    assert [answer.accepted for answer in answers] == [True, False]
    assert "meanwhile" in answers[1].reason


def test_two_processes_never_mask_two_uploads(bound, talk, monkeypatch):
    """Two uploads under one mask would show their difference, and two sessions one upload twice."""
    talk.share_all()
    real, second = member.make_masked, []

    def interrupted(*about):
        made = real(*about)
        monkeypatch.setattr(member, "make_masked", real)
        second.append(talk.train("a"))
        return made

    monkeypatch.setattr(member, "make_masked", interrupted)
    first = talk.train("a")
    assert second[0].accepted
    assert not first.accepted
    assert first.payload == b""
    assert talk.train("a").payload == second[0].payload
    assert charged(bound.sites["a"]) == {0}


def test_no_two_processes_reveal_both_shares_of_a_member(talk, monkeypatch):
    """While one process signs a list, two others sign, and unmask, another one."""
    talk.train_all()
    real, first = member.sign_survivors, {}
    fewer, everyone = ["a", "b", "c"], [*NAMES]
    signed = {name: talk.sign(name, fewer).header["sum"]["signature"] for name in ("b", "c")}

    def interrupted(*about):
        made = real(*about)
        monkeypatch.setattr(member, "sign_survivors", real)
        signed["a"] = talk.sign("a", fewer).header["sum"]["signature"]
        first.update(talk.unmask("a", signed).header["sum"]["revealed"])
        return made

    monkeypatch.setattr(member, "sign_survivors", interrupted)
    second = talk.sign("a", everyone)
    assert set(first) == {*NAMES}
    assert not second.accepted
    assert "another list of survivors" in talk.sign("a", everyone).reason


def test_a_server_that_is_killed_goes_on_in_its_session(federation, monkeypatch):
    """Killed after the answers of each phase, before it did anything with them."""
    real, died = server_sum.ServerSum._replies, []

    def dying(self, messages, what, read):
        found = real(self, messages, what, read)
        if what not in died:
            died.append(what)
            raise Killed
        return found

    monkeypatch.setattr(server_sum.ServerSum, "_replies", dying)
    for _ in range(5):
        with pytest.raises(Killed):
            federation.coordinator().begin()
    summary = federation.play()
    assert died == ["keys", "shares", "masked updates", "survivors", "unmask"]
    assert summary["rounds"]["done"] == 1
    (line,) = federation.lines()
    assert line["arrived"] == [*NAMES]
    assert "published" not in line
    for site in federation.sites.values():
        assert charged(site) == {0}


def test_a_damaged_file_of_a_sum_is_named(federation):
    (federation.server / SUM).write_text("{")
    with pytest.raises(CheckpointError, match=SUM):
        federation.coordinator().begin()


def test_secrets_are_gone_from_the_disk_when_the_study_is_over(federation):
    federation.play()
    for site in federation.sites.values():
        with closing(site.ledger()) as ledger:
            (run,) = ledger.titles()
            assert ledger.stored_sum(run).state == b""


def test_secrets_of_a_closed_sum_are_overwritten(bound, talk):
    talk.share_all()
    with closing(bound.sites["a"].ledger()) as ledger:
        state = ledger.stored_sum(talk.desk.run).state
        secret = json.loads(state)["mask_seed"].encode()
        files = [path for path in bound.sites["a"].folder.iterdir() if path.is_file()]
        assert any(secret in path.read_bytes() for path in files)
        ledger.close_sum(talk.desk.run)
        files = [path for path in bound.sites["a"].folder.iterdir() if path.is_file()]
        assert not any(secret in path.read_bytes() for path in files)


# -- what people are told --------------------------------------------------------------------------


def test_a_sites_spending_names_the_adversary(federation, capsys):
    federation.play()
    folder = federation.sites["a"].folder
    page = folder / "board.html"
    assert run_command(["site", "spend", str(folder), "--page", str(page)]) == 0
    expected = "over a secure sum against the server with up to 1 colluding site"
    assert expected in " ".join(capsys.readouterr().out.split())
    written = " ".join(page.read_text().split())
    assert expected in written
    assert "against more of them epsilon is larger" in written


def test_an_identity_is_one_line_of_a_file(federation, capsys, monkeypatch):
    monkeypatch.setattr("dpfl.cli.console.out.width", 40)
    folder = federation.sites["a"].folder
    assert run_command(["site", "identity", str(folder)]) == 0
    known = tomllib.loads(capsys.readouterr().out)
    assert known == {"a": public_half(federation.sites["a"].identity())}


# -- records that change after an upload was stored ------------------------------------------------


@pytest.mark.parametrize("change", ["a cell", "fewer rows", "one row", "no row", "garbage", "gone"])
def test_an_upload_is_sent_again_and_unmasked_whatever_the_records_are_now(
    bound: Federation, change: str
) -> None:
    talk = Talk({name: site.folder for name, site in bound.sites.items()}, Desk(sum_values()))
    talk.train_all()
    records = bound.base / "a" / "records.csv"
    lines = records.read_text().splitlines()
    kept = {
        "a cell": [*lines[:-1], f"9{lines[-1].lstrip('-')}"],
        "fewer rows": lines[:9],
        "one row": lines[:2],
        "no row": lines[:1],
    }
    if change == "gone":
        records.unlink()
    else:
        records.write_text("\n".join(kept.get(change, ["garbage"])) + "\n")
    again = talk.train("a")
    assert again.accepted
    assert again.payload == talk.masked["a"]
    assert not again.header["more"]
    assert len(talk.total()) == talk.terms().numbers
