"""The server's side: whatever sites do, the round goes on; wherever the server dies, the study goes
on.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Error, Message as FlowerMessage, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file

from dpfl.core.errors import FolderError, PeerError
from dpfl.core.types import Observer
from dpfl.deploy import coordinator as module
from dpfl.deploy.coordinator import Coordinator
from dpfl.deploy.enrolment import EnrolmentFile
from dpfl.deploy.in_process_grid import InProcessGrid
from dpfl.deploy.messages import WENT_WRONG, Message
from dpfl.deploy.requests import HELLO, TERMS, TRAIN
from dpfl.deploy.site import Site
from dpfl.deploy.summary import DeploymentSummary
from dpfl.deploy.transport import RECORD, Transport, from_record
from dpfl.privacy.ledger import Ledger
from dpfl.rounds.codec import FRAME_BYTES, encode_upload
from dpfl.runs.folder import RunFolder
from tests.deploy.federation import (
    CLIENT,
    FEATURES,
    RECORD as GRANT,
    Federation,
    WatchedGrid,
    changed,
    charged,
    empty,
    kind_of,
    make_server,
    make_site,
    reply_with,
    round_of,
    study_values,
)

SIZE = 2 * (FEATURES + 1)
Answer = Callable[[], FlowerMessage]


def in_round(
    number: int, misbehave: Callable[[FlowerMessage, Answer], FlowerMessage | None]
) -> Callable[..., FlowerMessage | None]:
    """Misbehave in one round only."""

    def fault(message: FlowerMessage, answer: Answer) -> FlowerMessage | None:
        return (
            misbehave(message, answer)
            if kind_of(message) == TRAIN and round_of(message) == number
            else answer()
        )

    return fault


def finished(federation: Federation, rounds: int = 3) -> dict[str, Any]:
    summary = federation.summary()
    assert summary["rounds"]["done"] == rounds
    assert [line["round"] for line in federation.lines()] == list(range(rounds))
    model = load_file(federation.server / "model.safetensors")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in model.values())
    return summary


def carrying(message: FlowerMessage, answer: Answer, payload: bytes) -> FlowerMessage:
    """The site's own answer with another payload."""
    return changed(answer(), message, lambda own: Message(header=own.header, payload=payload))


def uploaded(
    message: FlowerMessage, answer: Answer, values: torch.Tensor, site: str, run: str | None = None
) -> FlowerMessage:
    header = from_record(message.content).header
    payload = encode_upload(values, run or header["run"], header["round"], site)
    return carrying(message, answer, payload)


def _error(message: FlowerMessage, answer: Answer) -> FlowerMessage:
    return FlowerMessage(Error(code=7, reason="out of memory"), reply_to=message)


def _error_after_work(message: FlowerMessage, answer: Answer) -> FlowerMessage:
    answer()
    return FlowerMessage(Error(code=7, reason="node died"), reply_to=message)


class _Touch:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("/tmp/dpfl-was-unpickled"),)


FAULTS: dict[str, tuple[Callable[[FlowerMessage, Answer], FlowerMessage | None], str]] = {
    "an error": (_error, "out of memory"),
    "an error after it paid": (_error_after_work, "node died"),
    "garbage header": (
        lambda m, a: FlowerMessage(
            RecordDict({RECORD: ConfigRecord({"header": "{[", "payload": b""})}), reply_to=m
        ),
        "cannot be read",
    ),
    "a header of lists": (
        lambda m, a: FlowerMessage(
            RecordDict({RECORD: ConfigRecord({"header": "[" * 90_000, "payload": b""})}), reply_to=m
        ),
        "message",
    ),
    "nothing of ours": (lambda m, a: empty(m), "was not written by dpfl"),
    "no frame": (lambda m, a: carrying(m, a, b"abc"), "are no frame"),
    "nothing": (lambda m, a: carrying(m, a, b""), "are no frame"),
    "no token": (
        lambda m, a: reply_with(m, {"ok": True, "more": True}, from_record(a().content).payload),
        "somebody else answered",
    ),
    "too long": (lambda m, a: uploaded(m, a, torch.zeros(SIZE + 1), "b"), "bytes, at most"),
    "too short": (lambda m, a: uploaded(m, a, torch.zeros(SIZE - 1), "b"), f"send {SIZE}"),
    "gigantic": (
        lambda m, a: carrying(m, a, b"x" * (1 << 22)),
        "at most",
    ),
    "another site's upload": (
        lambda m, a: uploaded(m, a, torch.zeros(SIZE), "a"),
        "another run, round or client",
    ),
    "another run's upload": (
        lambda m, a: uploaded(m, a, torch.zeros(SIZE), "b", "old"),
        "another run, round or client",
    ),
    "another token": (
        lambda m, a: changed(
            a(), m, lambda x: Message(header={**x.header, "token": "0" * 64}, payload=x.payload)
        ),
        "somebody else answered",
    ),
    "a changed byte": (
        lambda m, a: changed(
            a(), m, lambda x: Message(header=x.header, payload=x.payload[:-1] + b"\x55")
        ),
        "damaged",
    ),
    "a pickle": (
        lambda m, a: carrying(m, a, pickle.dumps(_Touch()) + bytes(64)),
        "is not a dpfl upload",
    ),
    "odd kinds": (
        lambda m, a: reply_with(m, {"ok": [1], "more": {"x": 1}, "reason": 5, "site": []}),
        "5",
    ),
}


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_broken_answer_is_missed_and_named_and_the_round_goes_on(
    name: str, tmp_path: Path
) -> None:
    fault, words = FAULTS[name]
    federation = Federation.of(tmp_path, study_values("fedavg_dp"))
    federation.grid.faults[2] = in_round(1, fault)
    federation.play()
    summary = finished(federation)
    assert set(summary["missed"]) == {"b"}
    line = federation.lines()[1]
    assert line["arrived"] == ["a", "c"]
    assert words in line["missing"]["b"]
    assert "\n" not in line["missing"]["b"]
    assert line["effective_noise"]["arrived"] == 2
    assert not Path("/tmp/dpfl-was-unpickled").exists()
    for site in ("a", "c"):
        assert charged(federation.sites[site]) == {0, 1, 2}
    took = {line["round"] for line in federation.lines() if "b" in line["arrived"]}
    assert took <= charged(federation.sites["b"])
    if name == "an error after it paid":
        assert 1 in charged(federation.sites["b"])  # released to somebody: it stays paid
    if name == "an error":
        assert 1 not in charged(federation.sites["b"])
    if name != "odd kinds":
        assert took == {0, 2}  # it is asked again


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_upload_that_is_no_number_moves_nothing(value: float, tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, study_values("fedavg_dp"))
    broken = torch.zeros(SIZE)
    broken[3] = value
    federation.grid.faults[2] = in_round(1, lambda m, a: uploaded(m, a, broken, "b"))
    federation.play()
    finished(federation)
    line = federation.lines()[1]
    assert line["not_finite"] == ["b"]
    assert line["effective_noise"]["arrived"] == 2


def test_a_silent_site_is_waited_for_no_longer_than_was_said(tmp_path: Path) -> None:
    values = study_values("fedavg_dp", run={"round_timeout": 0.5})
    federation = Federation.of(tmp_path, values)
    federation.grid.faults[2] = in_round(1, lambda m, a: None)
    federation.play()
    finished(federation)
    line = federation.lines()[1]
    assert line["missing"] == {"b": "did not answer within 0.5 s"}
    assert federation.lines()[2]["arrived"] == ["a", "b", "c"]


class StaleGrid(WatchedGrid):
    """Hands over old answers again with every pull, and every answer twice."""

    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        self.kept: list[FlowerMessage] = []

    def pull_messages(self, message_ids: Any) -> list[FlowerMessage]:
        found = super().pull_messages(message_ids)
        stale = list(self.kept)
        self.kept += found
        return [*stale, *found, *found]


def test_duplicates_and_late_answers_are_never_counted(tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, study_values("fedavg_dp", run={"round_timeout": 0.5}))
    grid = StaleGrid(federation.grid.sites)
    late: list[FlowerMessage] = []

    def slow(message: FlowerMessage, answer: Answer) -> None:
        late.append(answer())  # it worked, and paid; its answer comes when the next round is on

    grid.faults[2] = in_round(0, slow)
    real = grid.push_messages

    def push(messages: Any) -> list[str]:
        grid.kept += late  # of the round before
        late.clear()
        return real(messages)

    grid.push_messages = push  # type: ignore[method-assign]
    federation.coordinator(grid).begin()
    finished(federation)
    first, second, third = federation.lines()
    assert first["missing"] == {"b": "did not answer within 0.5 s"}
    assert (second["arrived"], third["arrived"]) == (["a", "b", "c"], ["a", "b", "c"])
    assert second["bytes_up"] == 3 * (FRAME_BYTES + 4 * SIZE)
    assert charged(federation.sites["b"]) == {0, 1, 2}  # the late one stays paid


def test_a_second_node_under_a_site_s_name_is_turned_away(tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, study_values("fedavg_dp"))
    impostor = make_site(tmp_path / "impostor", "b")
    federation.grid.sites[9] = impostor.folder
    federation.play()
    summary = finished(federation)
    assert summary["refusals"] == {"b": "somebody else came under this name"}
    assert summary["missed"] == {}
    assert {node for node, _ in federation.grid.asked_to_train()} == {1, 2, 3}
    assert charged(impostor) == set()


def test_a_stranger_and_a_late_site_are_told_why(tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, study_values("fedavg_dp"))
    late = federation.grid.sites.pop(3)
    stranger = make_site(tmp_path / "x", "x")
    federation.grid.sites[8] = stranger.folder

    def comes(message: FlowerMessage, answer: Answer) -> FlowerMessage:
        federation.grid.sites[3] = late
        return answer()

    federation.grid.faults[1] = in_round(0, comes)
    federation.play()
    summary = finished(federation)
    assert summary["sites"] == ["a", "b"]
    assert "came after enrolment" in summary["refusals"]["c"]
    assert "is not named in the study" in summary["refusals"]["x"]
    assert charged(federation.sites["c"]) == charged(stranger) == set()


def test_a_site_that_comes_back_under_another_connection_goes_on(tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, study_values("fedavg_dp", run={"round_timeout": 0.5}))

    def moves(message: FlowerMessage, answer: Answer) -> None:
        federation.grid.sites[22] = federation.grid.sites[2]

    federation.grid.faults[2] = lambda m, a: a() if kind_of(m) != TRAIN else moves(m, a)
    federation.play()
    finished(federation)
    assert [("b" in line["arrived"]) for line in federation.lines()] == [False, True, True]
    assert (22, 1) in federation.grid.asked_to_train()


def test_a_site_whose_first_greeting_was_lost_is_greeted_again(tmp_path: Path) -> None:
    federation = Federation.of(
        tmp_path, study_values("fedavg_dp", run={"round_timeout": 0.3, "enrol_timeout": 60})
    )
    lost: list[FlowerMessage] = []

    def loses(message: FlowerMessage, answer: Answer) -> FlowerMessage | None:
        if kind_of(message) == HELLO and not lost:
            lost.append(message)
            return None
        return answer()

    federation.grid.faults[2] = loses
    federation.play()
    assert finished(federation)["sites"] == ["a", "b", "c"]


def test_too_few_sites_are_named_with_their_reasons(tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, study_values("fedavg_dp"), policy={"methods": ["pfa"]})
    with pytest.raises(
        PeerError, match=r"only 0 of 3 sites enrolled.*does not allow fedavg_dp"
    ) as caught:
        federation.play()
    assert "\n" not in str(caught.value)
    assert not (federation.server / "summary.json").exists()


def test_a_site_that_refuses_the_terms_takes_no_part_and_says_why(tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, study_values("fedavg_dp"))
    (federation.base / "b" / "site.toml").write_text(
        (federation.base / "b" / "site.toml")
        .read_text()
        .replace("least_noise_multiplier = 0.0", "least_noise_multiplier = 99.0")
    )
    federation.play()
    summary = finished(federation)
    assert "below its policy's 99" in summary["refusals"]["b"]
    assert all(line["arrived"] == ["a", "c"] for line in federation.lines())
    assert charged(federation.sites["b"]) == set()


def test_a_budget_that_runs_out_ends_a_site_s_part_and_the_model_is_kept(tmp_path: Path) -> None:
    values = study_values("fedavg_dp", spending="uniform")
    budgets = {"a": {**GRANT, "epsilon": 1.0}, "b": GRANT, "c": {**GRANT, "epsilon": 4.5}}
    federation = Federation.of(tmp_path, values, budgets=budgets)
    federation.play()
    summary = federation.summary()
    lines = federation.lines()
    assert "a" not in lines[-1]["arrived"]
    assert (federation.server / "model.safetensors").exists()
    assert summary["rounds"]["done"] == len(lines)
    for name, site in federation.sites.items():
        for line in site.spent():
            assert line.epsilon <= budgets[name]["epsilon"]
        assert {line["round"] for line in lines if name in line["arrived"]} == charged(site)


def test_when_nobody_can_afford_another_round_the_study_ends_early_with_its_model(
    tmp_path: Path,
) -> None:
    federation = Federation.of(tmp_path, study_values("fedavg_dp"), {**GRANT, "epsilon": 0.7})
    real = Coordinator._agreement

    def greedy(self: Coordinator) -> Any:
        agreement = real(self)
        object.__setattr__(agreement.terms, "participations", 1)
        return agreement

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Coordinator, "_agreement", greedy)
        federation.play()
    summary = federation.summary()
    assert "no site can afford another one" in summary["rounds"]["ended_early"]
    assert summary["rounds"]["done"] == 1
    assert (federation.server / "model.safetensors").exists()
    with pytest.raises(FolderError, match="has ended"):
        federation.coordinator().begin()


# -- effective noise -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "more", "expected"),
    [
        ("dp_fed", {"noise_multiplier": 8.0}, ("the server", 8.0)),
        (
            "udp_fedavg",
            {"noise_multiplier": 8.0, "tolerated_dropouts": 1},
            ("shares of the sites", 8.0),
        ),
        (
            "udp_fedavg",
            {"noise_multiplier": 8.0, "noise": "local"},
            ("shares of the sites", 8.0 * math.sqrt(2)),
        ),
    ],
)
def test_the_noise_of_a_round_is_stated_for_those_who_arrived(
    method: str, more: dict[str, Any], expected: tuple[str, float], tmp_path: Path
) -> None:
    federation = Federation.of(tmp_path, study_values(method, **more), CLIENT)
    federation.grid.faults[2] = in_round(1, _error)
    federation.play()
    finished(federation)
    whole, short, _ = (line["effective_noise"] for line in federation.lines())
    assert (whole["arrived"], whole["drawn"]) == (3, 3)
    assert (short["arrived"], short["drawn"], short["made_by"]) == (2, 3, expected[0])
    assert short["noise_multiplier"] == pytest.approx(expected[1])
    if method == "udp_fedavg":
        assert whole["noise_multiplier"] == pytest.approx(expected[1] * math.sqrt(3 / 2))


def test_with_too_few_shares_nothing_is_published(tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, study_values("udp_fedavg", noise_multiplier=8.0), CLIENT)
    federation.grid.faults[2] = in_round(1, _error)
    federation.play()
    finished(federation)
    line = federation.lines()[1]
    assert "nothing" in line["published"]
    assert line["effective_noise"]["noise_multiplier"] == pytest.approx(8.0 * math.sqrt(2 / 3))
    assert charged(federation.sites["a"]) == {0, 1, 2}


# -- the server dies -------------------------------------------------------------------------------


class Killed(BaseException):
    """As a kill: nothing of dpfl catches it."""


def _dies(*rest: Any, **more: Any) -> Any:
    raise Killed


def _once(real: Callable[..., Any], when: Callable[..., bool], after: bool) -> Callable[..., Any]:
    """Run as usual until ``when``; then die, before or after the real thing."""

    def wrapped(*rest: Any, **more: Any) -> Any:
        if when(*rest):
            if after:
                real(*rest, **more)
            raise Killed
        return real(*rest, **more)

    return wrapped


def _is_train(_: Any, messages: Any, *rest: Any) -> bool:
    return any(
        message.header["kind"] == TRAIN and message.header["round"] == 1
        for message in messages.values()
    )


def _is_terms(_: Any, messages: Any, *rest: Any) -> bool:
    return any(message.header["kind"] == TERMS for message in messages.values())


PHASES: dict[str, tuple[Any, str, Callable[..., bool], bool]] = {
    "gathering": (module, "gather", lambda *a: True, True),
    "before the ledger": (EnrolmentFile, "write", lambda *a: True, False),
    "after enrolment": (EnrolmentFile, "write", lambda *a: True, True),
    "after the first checkpoint": (RunFolder, "save_state", lambda *a: True, True),
    "telling the terms": (Transport, "ask", _is_terms, False),
    "after terms were told": (Transport, "ask", _is_terms, True),
    "opening": (module, "open_round", lambda agreement, state, *a: state.round == 1, True),
    "opened": (Transport, "ask", _is_train, False),
    "waiting": (Transport, "ask", _is_train, True),
    "closing": (module, "close_round", lambda agreement, state, *a: state.round == 1, True),
    "written down": (RunFolder, "append", lambda self, path, line: line["round"] == 1, True),
    "before the checkpoint": (
        RunFolder,
        "save_state",
        lambda self, checkpoint: checkpoint.state.round == 2,
        False,
    ),
    "after the checkpoint": (
        RunFolder,
        "save_state",
        lambda self, checkpoint: checkpoint.state.round == 2,
        True,
    ),
    "before the summary": (DeploymentSummary, "save", lambda *a: True, False),
}


KILLS = [("dp_fed", phase) for phase in PHASES] + [("udp_fedavg", "opening")]
KILLS += [
    ("fedavg_dp", phase)
    for phase in ("telling the terms", "waiting", "before the checkpoint", "before the summary")
]


@pytest.mark.parametrize(("method", "phase"), KILLS)
def test_a_killed_server_asks_for_the_same_again(
    method: str, phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cohort = 0.9 if method == "dp_fed" else None
    run = {} if cohort is None else {"cohort": cohort}
    federation = Federation.of(
        tmp_path, study_values(method, run=run), GRANT if method == "fedavg_dp" else CLIENT
    )
    place, name, when, after = PHASES[phase]
    with monkeypatch.context() as patch:
        patch.setattr(place, name, _once(getattr(place, name), when, after))
        with pytest.raises(Killed):
            federation.play()
    assert not (federation.server / "summary.json").exists()
    before = {site: charged(own) for site, own in federation.sites.items()}
    enrolment = federation.server / "enrolment.json"
    run_name = json.loads(enrolment.read_text())["run"] if enrolment.exists() else None
    federation.play()
    summary = finished(federation)
    if run_name is not None:
        assert summary["run"] == run_name
    # A round is lost only where the world was charged for a draw that nobody has seen.
    assert summary["lost_rounds"] == ([1] if phase == "opening" else [])
    asked: dict[tuple[int, int], set[bytes]] = {}
    said: dict[tuple[int, int], set[bytes]] = {}
    for node, question, answer in federation.grid.heard:
        if question.header["kind"] == TRAIN:
            key = (node, question.header["round"])
            asked.setdefault(key, set()).add(question.payload)
            said.setdefault(key, set()).add(answer.payload)
    # Whoever was asked twice was asked the same, and answered with the same bytes.
    assert all(len(bytes_) == 1 for bytes_ in (*asked.values(), *said.values()))
    for number, (site, own) in enumerate(federation.sites.items(), 1):
        assert before[site] <= charged(own)
        released = {
            asked_.header["round"]
            for node, asked_, said in federation.grid.heard
            if node == number and said.payload
        }
        assert released <= charged(own)
        assert {
            line["round"] for line in federation.lines() if site in line.get("arrived", [])
        } <= charged(own)
        if cohort is not None:
            assert charged(own, Observer.WORLD) == {0, 1, 2}
        assert all(line.epsilon <= 4.0 for line in own.spent() if line.budget)


def test_a_server_killed_again_and_again_still_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = Federation.of(tmp_path, study_values("fedavg_dp", rounds=4))
    for round_ in (0, 1, 2):
        with monkeypatch.context() as patch:
            now = lambda agreement, state, *a, r=round_: state.round == r  # noqa: E731
            patch.setattr(module, "close_round", _once(module.close_round, now, False))
            with pytest.raises(Killed):
                federation.play()
    federation.play()
    summary = finished(federation, 4)
    assert summary["lost_rounds"] == []
    assert all(line["arrived"] == ["a", "b", "c"] for line in federation.lines())
    assert all(charged(site) == {0, 1, 2, 3} for site in federation.sites.values())


def test_a_study_cannot_be_played_twice_at_once_nor_with_another_file(tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, study_values("fedavg_dp"))
    with RunFolder(federation.server).locked(), pytest.raises(FolderError, match="in use"):
        federation.coordinator().begin()
    federation.play()
    with pytest.raises(FolderError, match="has ended"):
        federation.play()


def test_an_impostor_after_a_restart_is_turned_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = Federation.of(tmp_path, study_values("fedavg_dp"))
    with monkeypatch.context() as patch:
        patch.setattr(Transport, "ask", _once(Transport.ask, _is_train, True))
        with pytest.raises(Killed):
            federation.play()
    impostor = make_site(tmp_path / "impostor", "b")
    federation.grid.sites[2] = impostor.folder
    federation.play()
    summary = finished(federation)
    assert summary["refusals"]["b"] == "somebody else came under this name"
    assert federation.lines()[2]["cohort"] == ["a", "c"]  # b has not committed again
    assert charged(impostor) == set()


# -- secrets, and what is told ---------------------------------------------------------------------


def test_tokens_and_secrets_stay_where_they_belong(tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, study_values("fedavg_dp"))
    federation.play()
    enrolment = federation.server / "enrolment.json"
    tokens = json.loads(enrolment.read_text())["tokens"]
    secrets = {name: (site.folder / "token").read_text() for name, site in federation.sites.items()}
    assert enrolment.stat().st_mode & 0o777 == 0o600
    for path in federation.server.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not any(secret.encode() in content for secret in secrets.values()), path
            if path != enrolment:
                assert not any(token.encode() in content for token in tokens.values()), path
    for number, name in enumerate("abc", 1):
        for node, asked, said in federation.grid.heard:
            told = json.dumps([asked.header, said.header])
            assert secrets[name] not in told
            assert (tokens[name] in told) <= (node == number)  # no site is told another's
            assert not any(token in json.dumps(asked.header) for token in tokens.values())
    for site in federation.sites.values():
        log = site.folder / "site.log"
        assert not log.exists() or not any(
            word in log.read_text() for word in [*tokens.values(), *secrets.values()]
        )


def test_a_site_is_told_nothing_of_the_network_nor_of_the_others_claims(tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, study_values("fedavg_dp"))
    federation.play()
    for _, asked, _ in federation.grid.heard:
        assert "network" not in asked.header["study"]
        assert "claims" not in asked.header


def test_a_seeded_rehearsal_is_stamped(tmp_path: Path) -> None:
    federation = Federation.of(
        tmp_path, study_values(run={"noise": "seeded", "seed": 1}), policy={"allow_seeded": True}
    )
    summary = federation.play()
    assert summary["flags"][0]["text"].startswith("NOT PRIVATE: SEEDED")
    plain = Federation.of(tmp_path / "plain", study_values())
    assert plain.play()["flags"] == []


def test_claims_are_declarations_and_change_nobody_s_bill(tmp_path: Path) -> None:
    """A site that claims a thousandfold moves the model's weights; what the others pay is their
    own.
    """
    honest = Federation.of(tmp_path / "honest", study_values())
    honest.play()
    lying = Federation.of(tmp_path / "lying", study_values())

    def claims(message: FlowerMessage, answer: Answer) -> FlowerMessage:
        if kind_of(message) != HELLO:
            return answer()
        lie = {"epsilon": 4000.0, "delta": 1e-2, "examples": 10**9}
        return changed(answer(), message, lambda x: Message(header={**x.header, "claims": lie}))

    lying.grid.faults[2] = claims
    lying.play()
    finished(lying)
    assert lying.lines()[0]["weights"]["b"] > 0.99
    for name in "abc":
        assert [x.epsilon for x in lying.sites[name].spent()] == [
            x.epsilon for x in honest.sites[name].spent()
        ]


@pytest.mark.parametrize(
    "wild",
    [{"epsilon": 10**400}, {"epsilon": math.nan}, {"examples": 10**400}, {"delta": -1}],
    ids=["huge epsilon", "no number", "huge examples", "negative delta"],
)
def test_a_wild_claim_does_not_stop_the_server(wild: dict[str, Any], tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, study_values())

    def claims(message: FlowerMessage, answer: Answer) -> FlowerMessage:
        if kind_of(message) != HELLO:
            return answer()
        return changed(
            answer(),
            message,
            lambda x: Message(header={**x.header, "claims": {**x.header["claims"], **wild}}),
        )

    federation.grid.faults[2] = claims
    federation.play()
    finished(federation)


def test_the_server_s_ledger_is_its_own_and_holds_what_the_world_sees(tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, study_values("dp_fed", noise_multiplier=8.0), CLIENT)
    summary = federation.play()
    ledger = Ledger.open(federation.server / "ledger.sqlite", summary["run"])
    assert {round_ for round_, _ in ledger.charged(summary["run"], Observer.WORLD)} == {0, 1, 2}
    ledger.close()
    assert isinstance(federation.grid, InProcessGrid)
    assert isinstance(federation.sites["a"], Site)


def test_a_study_does_not_go_on_with_fewer_sites_than_it_asks_for(tmp_path: Path) -> None:
    """Two members have spent their budgets: the third one's update would be published alone."""
    first = Federation.of(tmp_path, study_values("fedavg_dp", rounds=1))
    first.play()
    values = study_values("fedavg_dp", rounds=1, run={"least_sites": 3})
    second = make_server(tmp_path / "second", values)
    generous = make_site(tmp_path / "new" / "a", "a")
    grid = WatchedGrid({1: generous.folder, 2: first.sites["b"].folder, 3: first.sites["c"].folder})
    coordinator = Coordinator(second, Transport(grid))
    coordinator.sites.transport.wait = lambda seconds: None  # type: ignore[method-assign]
    with pytest.raises(PeerError, match="only 1 sites accept its terms") as refused:
        coordinator.begin()
    assert "b: its budget does not cover a round of this study" in str(refused.value)
    assert grid.asked_to_train() == []
    assert charged(generous) == set()


def test_a_study_that_nobody_answers_any_more_stops_and_can_be_resumed(tmp_path: Path) -> None:
    """Rounds would otherwise be used up for nothing, and the study could not be resumed."""
    federation = Federation.of(tmp_path, study_values("weiavg", rounds=8))
    broken = {"now": True}

    def fails(message: FlowerMessage, answer: Answer) -> FlowerMessage | None:
        if kind_of(message) == TRAIN and round_of(message) >= 2 and broken["now"]:
            return reply_with(message, {"ok": False, "reason": "its disk is full"})
        return answer()

    for node in (1, 2, 3):
        federation.grid.faults[node] = fails
    with pytest.raises(PeerError, match=r"no site has answered in 3 rounds.*disk is full"):
        federation.play()
    assert len(federation.lines()) == 5
    broken["now"] = False
    federation.play()
    assert federation.summary()["rounds"]["done"] == 8
    assert [bool(line["arrived"]) for line in federation.lines()] == [True] * 2 + [False] * 3 + [
        True
    ] * 3


def test_each_answer_is_shown_when_it_comes(tmp_path: Path) -> None:
    """A site that has answered is not shown as working while another one is waited for."""
    federation = Federation.of(tmp_path, study_values("weiavg", rounds=1))

    coordinator = federation.coordinator()
    heard: list[str] = []
    real = coordinator.sites._show
    coordinator.sites._show = lambda site, reply: heard.append(site) or real(site, reply)  # type: ignore[method-assign,func-returns-value]
    coordinator.begin()
    assert heard[:6] == ["a", "b", "c"] * 2  # when it came, and when all had come


def test_a_site_without_a_key_and_one_that_never_came_are_named_with_the_reason(
    tmp_path: Path,
) -> None:
    values = study_values(
        "weiavg", sites=("a", "b", "c"), run={"enrol_timeout": 2.0, "least_sites": 1}
    )
    federation = Federation.of(tmp_path, values)
    (federation.server / "nodes.json").write_text(json.dumps({"a": 1, "c": 3}))
    del federation.grid.sites[3], federation.grid.sites[2]
    federation.play()
    refusals = federation.summary()["refusals"]
    assert "check sites/b.pub" in refusals["b"]
    assert "did not come within 2 s" in refusals["c"]


def test_a_refusal_is_final_only_if_it_proves_whose_it_is(tmp_path: Path) -> None:
    """Nobody else can put a site out of a study by refusing in its name."""
    federation = Federation.of(tmp_path, study_values("weiavg", rounds=3))
    final = {"ok": False, "reason": "its policy forbids this", "code": 4, "more": False}
    federation.grid.faults[2] = in_round(0, lambda m, a: reply_with(m, final))
    federation.play()
    assert ["b" in line["arrived"] for line in federation.lines()] == [False, True, True]


def test_a_site_whose_policy_changed_is_not_asked_again(tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, study_values("weiavg", rounds=3))
    file = federation.sites["b"].folder / "site.toml"

    def stricter(message: FlowerMessage, answer: Answer) -> FlowerMessage | None:
        file.write_text(file.read_text().replace("[policy]", "[policy]\nmost_rounds = 1"))
        return answer()

    federation.grid.faults[2] = in_round(1, stricter)
    federation.play()
    assert ["b" in line["cohort"] for line in federation.lines()] == [True, True, False]


def went_wrong(message: FlowerMessage) -> FlowerMessage:
    return reply_with(message, {"ok": False, "reason": WENT_WRONG, "code": 1})


def at_binding_terms(
    misbehave: Callable[[FlowerMessage], FlowerMessage | None], times: int
) -> Callable[..., FlowerMessage | None]:
    """Misbehave when the terms are to bind, the first few times."""
    left = [times]

    def fault(message: FlowerMessage, answer: Answer) -> FlowerMessage | None:
        header = from_record(message.content).header
        if header["kind"] == TERMS and header["binding"] and left[0]:
            left[0] -= 1
            return misbehave(message)
        return answer()

    return fault


@pytest.mark.parametrize("misbehave", [went_wrong, lambda message: None])
def test_a_site_that_misses_the_binding_terms_is_asked_for_them_again(
    misbehave: Callable[[FlowerMessage], FlowerMessage | None], tmp_path: Path
) -> None:
    """It could otherwise take no part in any round, each time with a reason that is not true."""
    values = study_values("weiavg", rounds=4, run={"round_timeout": 0.5})
    federation = Federation.of(tmp_path, values)
    federation.grid.faults[1] = at_binding_terms(misbehave, 2)
    federation.play()
    assert ["a" in line["arrived"] for line in federation.lines()] == [False, False, True, True]
    assert federation.summary()["missed"] == {}  # it was not drawn before it had committed
    assert federation.summary()["refusals"] == {}  # a reason that has passed is not kept


def test_where_the_draw_is_secret_who_cannot_accept_the_terms_is_not_drawn(tmp_path: Path) -> None:
    """Rounds of noise alone would otherwise use up what the world is charged for."""
    values = study_values("dp_fed", rounds=5, run={"cohort": 2})
    federation = Federation.of(tmp_path, values, CLIENT)
    for node in (1, 2, 3):
        federation.grid.faults[node] = at_binding_terms(went_wrong, 100)
    federation.play()
    summary = federation.summary()
    assert summary["rounds"]["done"] == 0
    assert summary["rounds"]["ended_early"]


def test_a_key_that_was_let_in_gives_no_right_to_another_name(tmp_path: Path) -> None:
    """The name of a site whose key is missing is nobody's."""
    values = study_values("weiavg", run={"enrol_timeout": 2.0, "least_sites": 1})
    federation = Federation.of(tmp_path, values)
    (federation.server / "nodes.json").write_text(json.dumps({"b": 1, "c": 3}))
    del federation.grid.sites[2]
    federation.play()  # node 1 says that it is a, with b's key
    assert federation.summary()["sites"] == ["c"]
    assert "another key" in federation.summary()["refusals"]["a"]


class CutOffGrid:
    """A node that announces its answer, and is cut off while it sends the parts."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.sent = clock, list[FlowerMessage]()

    def get_node_ids(self) -> list[int]:
        return [1]

    def push_messages(self, messages: list[FlowerMessage]) -> list[str]:
        assert all(message.metadata.ttl > 0 for message in messages)
        for message in messages:
            self.sent.append(message)
            message.metadata.__dict__["_message_id"] = f"m{len(self.sent)}"
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, wanted: list[str]) -> list[FlowerMessage]:
        self.clock[0] += 40.0  # as long as Flower waits for the parts
        error = Error(code=ErrorCode.MESSAGE_UNAVAILABLE, reason="cut off")
        return [FlowerMessage(error, reply_to=one) for one in self.sent[-1:]]


def test_nobody_is_asked_again_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    clock = [0.0]
    monkeypatch.setattr("dpfl.deploy.transport.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("dpfl.deploy.transport.time.sleep", lambda seconds: None)
    for timeout, times in ((30.0, 1), (100.0, 3)):
        clock[0], grid = 0.0, CutOffGrid(clock)
        reply = Transport(grid).ask({1: Message(header={})}, timeout)[1]  # type: ignore[arg-type]
        assert len(grid.sent) == times
        assert "cut off" in reply.problem
