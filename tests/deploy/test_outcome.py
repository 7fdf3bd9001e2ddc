"""The end of a study at a site: the model arrives, is checked, and is tried on the site's own test
records.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from flwr.app import Message as FlowerMessage
from safetensors.torch import load_file, save

from dpfl.cli.main import run_command
from dpfl.core.layout import Layout
from dpfl.deploy import coordinator as module
from dpfl.deploy.messages import Message
from dpfl.deploy.outcome import MODELS, outcomes
from dpfl.deploy.requests import END
from dpfl.runs.model_card import ModelCard
from tests.deploy.federation import (
    SIGNER,
    Desk,
    Federation,
    charged,
    kind_of,
    make_site,
    study_values,
)


def _ended(desk: Desk, payload: bytes) -> Message:
    return Message(header=desk.header(END, terms=desk.told(), signer=SIGNER), payload=payload)


def _weights(desk: Desk, value: float = 0.5) -> dict[str, torch.Tensor]:
    return {
        block.name: torch.full(block.shape, value)
        for block in Layout.of_module(desk.study().build_model())
    }


def test_every_site_is_given_the_model_and_nothing_is_charged_for_it(tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, study_values())
    summary = federation.play()
    assert (summary["delivered"], summary["undelivered"]) == (["a", "b", "c"], {})
    final = load_file(federation.server / "model.safetensors")
    for site in federation.sites.values():
        (outcome,) = outcomes(site.folder)
        kept = load_file(outcome.model)
        assert set(kept) == set(final)
        assert all(torch.equal(kept[name], final[name]) for name in final)
        assert charged(site) == {0, 1, 2}
    ends = [answer for _, asked, answer in federation.grid.heard if asked.header["kind"] == END]
    assert [set(answer.header) for answer in ends] == [
        {"ok", "site"}
    ] * 3  # nothing of the site goes back
    assert all(answer.payload == b"" for answer in ends)


def test_a_site_that_does_not_take_the_model_is_named_and_the_study_ends(tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, study_values("fedavg_dp", run={"round_timeout": 0.5}))

    def silent(message: FlowerMessage, answer: object) -> FlowerMessage | None:
        return None if kind_of(message) == END else answer()  # type: ignore[operator, no-any-return]

    federation.grid.faults[2] = silent
    summary = federation.play()
    assert summary["delivered"] == ["a", "c"]
    assert summary["undelivered"] == {"b": "did not answer within 0.5 s"}
    assert summary["rounds"]["done"] == 3
    assert outcomes(federation.sites["b"].folder) == []


def test_a_server_killed_before_the_model_was_delivered_delivers_it_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = Federation.of(tmp_path, study_values())
    coordinator = federation.coordinator()
    with monkeypatch.context() as killed:
        killed.setattr(module, "deliver", lambda *rest: (_ for _ in ()).throw(SystemExit))
        with pytest.raises(SystemExit):
            coordinator.begin()
    assert not (federation.server / "summary.json").exists()
    before = {name: charged(site) for name, site in federation.sites.items()}
    federation.coordinator().begin()
    assert federation.summary()["delivered"] == ["a", "b", "c"]
    assert {name: charged(site) for name, site in federation.sites.items()} == before


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"", "cannot be read"),
        (b"\x80\x04pickled", "cannot be read"),
        (b"\xff" * 3_000_000, "bytes"),
        (save({"other": torch.zeros(3)}), "not those agreed"),
    ],
)
def test_what_is_no_model_of_the_study_is_not_kept(
    payload: bytes, words: str, tmp_path: Path
) -> None:
    site, desk = make_site(tmp_path / "a", "a"), Desk(study_values())
    assert site.answer(desk.terms()).accepted
    answer = site.answer(_ended(desk, payload))
    assert not answer.accepted
    assert words in answer.reason
    assert not (site.folder / MODELS).exists()


def test_a_model_that_is_not_finite_or_of_another_study_is_not_kept(tmp_path: Path) -> None:
    site, desk = make_site(tmp_path / "a", "a"), Desk(study_values())
    assert (
        "was not agreed to by this site" in site.answer(_ended(desk, save(_weights(desk)))).reason
    )
    assert site.answer(desk.terms()).accepted
    assert "not finite" in site.answer(_ended(desk, save(_weights(desk, float("nan"))))).reason
    assert not (site.folder / MODELS).exists()
    assert site.answer(_ended(desk, save(_weights(desk)))).accepted


@pytest.mark.parametrize(
    "run", ["../../escape", "/etc/escape", "a/b", ".", "..", "x" * 200, "två hospital"]
)
def test_a_run_s_name_never_leads_out_of_the_site_s_folder(run: str, tmp_path: Path) -> None:
    site, desk = make_site(tmp_path / "deep" / "a", "a"), Desk(study_values(), run=run)
    before = {path for path in tmp_path.rglob("*") if site.folder not in path.parents}
    assert site.answer(desk.terms()).accepted
    assert site.answer(_ended(desk, save(_weights(desk)))).accepted
    (outcome,) = outcomes(site.folder)
    assert outcome.model.resolve().parent.parent == (site.folder / MODELS).resolve()
    assert {path for path in tmp_path.rglob("*") if site.folder not in path.parents} == before


def _evaluate(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run_command(["site", "evaluate", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_site_tries_a_model_on_its_own_test_records(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    site, desk = make_site(tmp_path / "a", "a"), Desk(study_values())
    assert site.answer(desk.terms()).accepted
    weights = _weights(desk, 0.0)
    weights["1.weight"][1, 0] = 1.0  # the label is whether the first feature is above 0
    assert site.answer(_ended(desk, save(weights))).accepted
    code, out, _ = _evaluate(capsys, str(site.folder), "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["accuracy"], found["test_records"]) == (1.0, 8)
    assert 0.5 <= found["constant"] < 1.0
    weights["1.weight"][1, 0] = -1.0
    assert site.answer(_ended(desk, save(weights))).accepted
    code, out, err = _evaluate(capsys, str(site.folder))
    assert code == 0
    assert "accuracy 0.0 % on 8 records" in " ".join(out.split())
    assert "a release that no ledger counts" in " ".join(err.split())


def test_a_model_brought_by_hand_is_tried_as_well(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    federation = Federation.of(tmp_path, study_values())
    federation.play()
    given = ["--model", str(federation.server)]
    _, by_hand, _ = _evaluate(capsys, str(tmp_path / "a"), "--json", *given)
    _, delivered, _ = _evaluate(capsys, str(tmp_path / "a"), "--json")
    assert json.loads(by_hand)["accuracy"] == json.loads(delivered)["accuracy"]


def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    site, desk = make_site(tmp_path / "a", "a"), Desk(study_values())
    home, brought = str(site.folder), tmp_path / "brought"
    other = study_values()
    other["study"]["feature_shape"] = [7]
    for study, code, words in (
        (None, 2, "cannot be read"),
        (Desk(other).study(), 2, "records of shape"),
        (desk.study(), 5, "model.json: is not there"),
    ):
        if study is not None:
            brought.mkdir(exist_ok=True)
            (brought / "study.toml").write_text(study.to_toml())
        got, _, err = _evaluate(capsys, home, "--model", str(brought))
        assert (got, words in err) == (code, True), err
        assert "Traceback" not in err
    ModelCard.of_study(desk.study()).write(brought / "model.json")
    (brought / "model.safetensors").write_bytes(b"no model")
    for arguments, words in (([], "has no model yet"), (["--model", str(brought)], "be read")):
        got, _, err = _evaluate(capsys, home, *arguments)
        assert (got, words in err) == (5, True), err
    assert site.answer(desk.terms()).accepted
    assert site.answer(_ended(desk, save(_weights(desk)))).accepted
    got, _, err = _evaluate(capsys, home, "--run", "other")
    assert (got, "there is no model of 'other'" in err, "run-1" in err) == (2, True, True)
