"""The personal finish of a simulation: in the summary and the operator's report, and nowhere
else.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import dpfl
from dpfl.cli.main import run_command
from dpfl.engine.finish_scores import FinishScores
from dpfl.report.page import write_report
from dpfl.report.words import finish_in_words
from dpfl.runs.experiment import Experiment
from dpfl.runs.result import Summary
from dpfl.sim.train import run_experiment

CLIENTS = 5


def experiment(personal_finish: bool | None = True, **method: Any) -> Experiment:
    return Experiment.from_dict(
        {
            "data": {"name": "digits"},
            "partition": {"kind": "iid", "clients": CLIENTS},
            "budgets": {"epsilon": [1.0, 2.0, 4.0, 8.0, 8.0], "delta": 1e-3},
            "method": method or {"name": "preconditioned"},
            "run": {
                "seed": 3,
                **({"rounds": 2} if method else {}),
                **({} if personal_finish is None else {"personal_finish": personal_finish}),
            },
        }
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finish") / "run"
    run_experiment(experiment(), folder)
    write_report(folder, folder / "report.html")
    write_report(folder, folder / "public.html", public=True)
    return folder


def _summary(folder: Path) -> Summary:
    return Summary.from_dict(json.loads((folder / "summary.json").read_text()))


def test_every_client_has_a_row_and_the_common_model_is_the_one_that_is_tested(run: Path) -> None:
    summary = _summary(run)
    assert set(summary.finish) == set(summary.scores.by_client)
    assert len(summary.finish) == CLIENTS
    for client, own in summary.finish.items():
        assert own.common == pytest.approx(summary.scores.by_client[client], abs=1e-6)
        assert own.both > 0.8
        assert own.local > 0.8
        assert own.metric == "accuracy"


def test_a_summary_is_read_back_and_one_without_it_is_read_as_before(run: Path) -> None:
    summary = _summary(run)
    told = json.loads(json.dumps(summary.to_dict()))
    assert Summary.from_dict(told) == summary
    del told["finish"]
    assert Summary.from_dict(told) == replace(summary, finish={})
    assert "finish" not in replace(summary, finish={}).to_dict()


def test_it_is_computed_only_when_asked_for_and_nothing_that_is_published_depends_on_it(
    run: Path, tmp_path: Path
) -> None:
    other = tmp_path / "run"
    run_experiment(experiment(None), other)
    write_report(other, other / "report.html")
    assert 'id="personal-finish"' not in (other / "report.html").read_text()
    write_report(other, other / "public.html", public=True)
    assert not _summary(other).finish
    for name in ("model.safetensors", "model.json", "public.html", "rounds.jsonl"):
        assert (run / name).read_bytes() == (other / name).read_bytes(), name
    assert "own records" not in (run / "public.html").read_text()


def test_the_report_has_a_table_with_a_row_for_each_client(run: Path) -> None:
    page = html.unescape((run / "report.html").read_text())
    summary = _summary(run)
    (table,) = re.findall(r'<table id="personal-finish".*?</table>', page, re.S)
    assert table.count("<tr>") == CLIENTS + 1
    for client, own in summary.finish.items():
        (row,) = [row for row in table.split("<tr>") if f">{client}<" in row]
        for value in (own.local, own.common, own.both, own.error):
            assert f'data-value="{value}"' in row
        assert str(own.verdict) in row
    assert "What each site gets on its own test records (simulation only)" in page
    helped = rf"Federating helps \d of {CLIENTS} sites and buys nothing for \d"
    assert re.search(f"{helped}, by two standard errors; \\d have too few test records to", page)
    assert "no epsilon covers it" in page


def test_the_terminal_has_the_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text(experiment(None).to_toml())
    options = ["--personal-finish", "--out", str(tmp_path / "run"), "--quiet"]
    assert run_command(["run", str(file), *options]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    means = (
        r"\d+\.\d % with own records alone, \d+\.\d % with the common model, \d+\.\d % with both"
    )
    assert re.search(rf"personal finish Mean accuracy over sites: {means}", shown)
    assert re.search(rf"Federating helps \d of {CLIENTS} sites and buys nothing for \d", shown)


def test_every_method_that_trains_a_linear_head_has_one_and_others_have_none(
    tmp_path: Path,
) -> None:
    method = {"name": "weiavg", "lr": 0.3, "clip": 1.0, "batch_size": 8, "local_steps": 2}
    result = run_experiment(experiment(**method), tmp_path / "run")
    assert len(result.summary.finish) == CLIENTS
    values = {**experiment(**method).to_dict(), "model": {"name": "mlp"}}
    result = run_experiment(Experiment.from_dict(values), tmp_path / "deep")
    assert not result.summary.finish
    assert "finish" not in json.loads((tmp_path / "deep" / "summary.json").read_text())


def test_who_does_not_ask_for_it_has_the_experiment_of_before(tmp_path: Path) -> None:
    plain = experiment(None)
    assert "personal_finish" not in plain.to_toml()
    assert plain.digest() != experiment().digest()  # a run that is kept without it is not taken


def test_from_python_it_is_an_argument() -> None:
    rng = np.random.default_rng(0)
    arrays = {name: (rng.normal(size=(40, 3)), rng.integers(0, 2, 40)) for name in "ab"}
    federation = dpfl.Federation.from_arrays(arrays, budgets=dpfl.Budget(epsilon=5.0, delta=1e-3))
    method = dpfl.weiavg(lr=0.1, clip=1.0, batch_size=8, local_steps=1)
    own = {"rounds": 1, "seed": None, "progress": False}
    train = partial(dpfl.train, nn.Sequential(nn.Linear(3, 2)), federation, method, **own)
    assert train().summary.finish == {}
    assert set(train(personal_finish=True).summary.finish) == {"a", "b"}


def test_clients_that_cannot_be_compared_are_counted(run: Path) -> None:
    finish = dict(list(_summary(run).finish.items())[:3])
    shown = " ".join(finish_in_words(finish, CLIENTS).split())
    assert f"too few test records to tell. The test records of {CLIENTS - 3} more" in shown


def test_a_name_or_note_from_data_is_escaped_in_the_table(run: Path) -> None:
    from dpfl.report.finish_page import finish_page

    row = FinishScores(
        local=0.5, common=0.5, both=0.5, error=0.1, tested=9, strength=1.0, note="<b>"
    )
    page = finish_page("<script>alert()</script>", "run", row)
    assert "<script>alert()" not in page
    assert "<b>)" not in page
    assert "9 test records are too few to tell whether federating helps this site" in page
