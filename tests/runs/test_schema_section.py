"""Experiment files with a schema: complete run folders, the person's word everywhere, bad files."""

import json
import re
from pathlib import Path

import pytest
import tomli_w

from dpfl.cli.main import run_command
from dpfl.core.types import Plain
from dpfl.data.schema import Schema
from dpfl.runs.experiment import Experiment

SCHEMA: Plain = {
    "target": "ill",
    "person": "who",
    "person_word": "patient",
    "records_per_person": 3,
    "columns": {
        "age": {"type": "number", "unit": "years", "range": [0, 100], "missing": "indicator"},
        "sex": {"type": "category", "categories": ["f", "m"]},
        "ill": {"type": "boolean"},
    },
}
EXPERIMENT: Plain = {
    "data": {"folder": "sites", "schema": "schema.toml"},
    "budgets": {"epsilon": 8.0, "delta": 1e-2},
    "method": {"name": "weiavg", "lr": 0.5, "clip": 1.0, "batch_size": 8, "local_steps": 1},
    "run": {"rounds": 2},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sites with strings, gaps, and several records of most patients."""
    monkeypatch.chdir(tmp_path)
    Path("sites").mkdir()
    for site in ("north", "south"):
        lines = ["who,age,sex,ill"]
        for number in range(60):
            age = 20 + number if number % 7 else ""
            lines.append(
                f"p{number % 25},{age},{'fm'[number % 2]},{'yes' if number > 30 else 'no'}"
            )
        Path(f"sites/{site}.csv").write_text("\n".join(lines) + "\n")
    Path("schema.toml").write_text(tomli_w.dumps(SCHEMA))
    Path("experiment.toml").write_text(tomli_w.dumps(EXPERIMENT))
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert run_command(list(arguments)) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return out if code == 0 else err


def test_a_run_folder_holds_the_schema_and_can_be_run_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said(capsys, "run", "experiment.toml", "--out", "one", "--quiet")
    Path("schema.toml").unlink()
    written = Experiment.from_file(Path("one/experiment.toml"))
    assert written.data.described() == Schema.from_dict(SCHEMA)
    said(capsys, "run", "one/experiment.toml", "--out", "two", "--quiet")
    first, second = (Path(name, "model.safetensors").read_bytes() for name in ("one", "two"))
    assert first == second


def test_every_word_about_the_promise_is_the_schemas_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    described = said(capsys, "describe", "experiment.toml")
    assert "protects a patient" in described and "record" not in described
    planned = said(capsys, "plan", "experiment.toml", "--methods", "weiavg", "--no-timing")
    assert re.search(r"client +patients +budget", planned) and "records" not in planned
    shown = said(capsys, "run", "experiment.toml", "--out", "run")
    account = said(capsys, "account", "--ledger", "run/ledger.sqlite")
    for text in (shown, account):
        assert "per patient" in text and "per record" not in text
    summary = json.loads(Path("run/summary.json").read_text())
    assert {line["unit"] for line in summary["statements"]} == {summary["unit"]} == {"patient"}
    assert not any("record" in one for one in summary["assumptions"])
    said(capsys, "report", "run")
    page = Path("run/report.html").read_text()
    assert "Each patient is protected" in page and "number of patients" in page
    for other in ("per record", "each record", "Each record", "records of one person"):
        assert other not in page, other
    said(capsys, "account", "--ledger", "run/ledger.sqlite", "--page", "ledger.html")
    page = Path("ledger.html").read_text()
    assert "each patient" in page and "each record" not in page


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("p1,old,f,no", "sites/north.csv, line 62, column 'age': 'old' is not a number"),
        ("p1,44,x,no", "sites/north.csv, line 62, column 'sex': 'x' is not a category"),
        ("p1,44,f,perhaps", "line 62, column 'ill': 'perhaps' is not true or false"),
        ("p1,44,f,", "line 62, column 'ill': has no value"),
        (",44,f,no", "line 62 names no patient in 'who'"),
        ("p1,44,f", "line 62 has 3 cells for 4 columns"),
    ],
)
def test_a_cell_that_cannot_be_read_is_named_with_file_line_and_column(
    line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("sites/north.csv").open("a") as file:
        file.write(line + "\n")
    assert words in said(capsys, "run", "experiment.toml", "--out", "run", code=3)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"name": "digits", "schema": "schema.toml"}, "none are given"),
        ({"folder": "sites", "schema": "schema.toml", "label": "ill"}, "names the target"),
        ({"folder": "sites", "schema": "absent.toml"}, "absent.toml: cannot be read"),
        ({"folder": "sites", "schema": {"target": "ill", "colums": {}}}, "did you mean 'columns'"),
    ],
)
def test_a_schema_that_does_not_belong_there_is_refused(
    data: Plain, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("experiment.toml").write_text(tomli_w.dumps({**EXPERIMENT, "data": data}))
    assert words in said(capsys, "run", "experiment.toml", "--out", "run", code=2)


def test_the_order_of_columns_is_part_of_what_names_a_result() -> None:
    columns = SCHEMA["columns"]
    turned = {**SCHEMA, "columns": dict(reversed(list(columns.items())))}
    one, other = (
        Experiment.from_dict({**EXPERIMENT, "data": {"folder": "sites", "schema": schema}})
        for schema in (SCHEMA, turned)
    )
    assert one.digest() != other.digest()
    assert Experiment.from_dict(one.to_dict()).digest() == one.digest()
