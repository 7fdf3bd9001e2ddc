"""A trained model, saved and loaded, predicts as it did; what does not fit is named."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dpfl
from dpfl.cli.main import run_command
from dpfl.core.errors import ConfigurationError, DataError, DpflError
from dpfl.runs.model_card import ModelCard
from dpfl.runs.predictor import read_records

from ..sim import own_training as own
from ..sim.conftest import small

RECORDS = np.random.default_rng(5).normal(size=(700, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dpfl.Result]:
    folder = tmp_path_factory.mktemp("trained") / "run"
    return folder, own.run(folder=folder)


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dpfl.Result]:
    """The run of an experiment file, whose model dpfl built by its name."""
    from dpfl.sim.experiment import run_experiment

    folder = tmp_path_factory.mktemp("named") / "run"
    settings = {"run": {"rounds": 2}, "model": {"name": "mlp", "hidden": 8}}
    return folder, run_experiment(small(**settings), folder)


def test_a_loaded_model_predicts_as_the_trained_one(trained: tuple[Path, dpfl.Result]) -> None:
    folder, result = trained
    outputs = result.model(torch.from_numpy(RECORDS)).detach()
    for given in (RECORDS, RECORDS.astype(np.float64), torch.from_numpy(RECORDS), RECORDS.tolist()):
        found = dpfl.load(folder, model=own.model()).predict(given)
        assert found.tolist() == outputs.argmax(1).tolist()
    chances = dpfl.load(folder, model=own.model()).predict_proba(RECORDS)
    assert np.allclose(chances, outputs.softmax(1).numpy(), atol=1e-6)


def test_a_model_of_an_experiment_is_built_again(named: tuple[Path, dpfl.Result]) -> None:
    folder, result = named
    predictor = dpfl.load(folder)
    digits = dpfl.load_dataset("digits").features
    assert torch.equal(predictor.outputs(digits), result.model(digits).detach())
    assert predictor.task == small().federation().task
    assert predictor.note.startswith("NOT PRIVATE: SEEDED")
    assert dpfl.Result.load(folder).summary == result.summary


def test_save_and_load_keep_everything(
    trained: tuple[Path, dpfl.Result], named: tuple[Path, dpfl.Result], tmp_path: Path
) -> None:
    for number, (result, model) in enumerate([(trained[1], own.model()), (named[1], None)]):
        folder = result.save(tmp_path / str(number))
        loaded = dpfl.Result.load(folder, model=model)
        assert own.bits(loaded) == own.bits(result)
        assert loaded.card == result.card
        assert loaded.timings == result.timings
        assert dpfl.report(folder) == folder / "report.html"
        with pytest.raises(DpflError, match="already holds a run of this experiment"):
            result.save(folder)


def test_the_files_for_the_world_hold_nothing_of_clients(
    trained: tuple[Path, dpfl.Result],
) -> None:
    """Whatever differs between federations of other clients, sizes and budgets stays out."""
    folder, result = trained
    card = json.loads((folder / "model.json").read_text())
    known = {"format", "task", "inputs", "shape", "schema", "built", "module", "frozen", "note"}
    assert card.keys() == known  # a field that is added must be thought about
    assert card["task"] == {"name": "classification", "metric": "accuracy", "classes": 2}
    other = own.federation(shift=0.3, e=3.0)
    plain = dpfl.train(own.model(), other, own.strategy(), rounds=2)
    assert plain.card == result.card


@pytest.mark.parametrize(
    ("model", "named_problem"),
    [
        (None, "a Linear of the user's own"),
        (own.model(4), "'weight' has shape (2, 4) in the model and (2, 3) in the file"),
        (nn.Sequential(nn.Linear(3, 2)), "'0.bias'"),
        ("linear", "is not a module"),
    ],
)
def test_a_model_that_does_not_fit_is_named(
    trained: tuple[Path, dpfl.Result], model: Any, named_problem: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        dpfl.load(trained[0], model=model)
    assert named_problem in str(caught.value)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DpflError) as caught:
        dpfl.load(tmp_path)
    assert caught.value.exit_code == 5
    (tmp_path / "model.json").write_text('{"format": "other"}')
    with pytest.raises(DpflError, match="format is 'other'"):
        dpfl.load(tmp_path)
    with pytest.raises(DpflError, match="holds no result"):
        dpfl.Result.load(tmp_path)


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        (np.zeros((2, 4)), "have shape (4,), the model takes (3,)"),
        (np.zeros((0, 3)), "there are none"),
        ([[1.0, 2.0, float("nan")]], "not a number"),
        ([["a", "b", "c"]], "cannot be read"),
        (np.zeros(3), "have shape ()"),
    ],
)
def test_records_that_do_not_fit_are_named(
    trained: tuple[Path, dpfl.Result], records: Any, problem: str
) -> None:
    with pytest.raises(DataError) as caught:
        dpfl.load(trained[0], model=own.model()).predict(records)
    assert problem in str(caught.value)


def test_every_kind_of_input_travels() -> None:
    from dpfl.data.inputs import Pixels, Tokens

    for inputs in (Pixels(mean=(0.5, 0.25), deviation=(1.0, 2.0)), Tokens(vocabulary=9)):
        kind = type(inputs).__name__.lower()
        card = ModelCard(task={}, inputs={"kind": kind, **vars(inputs)}, shape=(2,))
        assert ModelCard(**json.loads(json.dumps(vars(card)))).make_inputs() == inputs


def test_regression_has_no_probabilities(tmp_path: Path) -> None:
    x = RECORDS[:80]
    clients = {"a": (x[:40], x[:40, 0]), "b": (x[40:], x[40:, 0])}
    own_budgets = {client: dpfl.Budget(epsilon=8.0, delta=1e-3) for client in clients}
    federation = dpfl.Federation.from_arrays(clients, budgets=own_budgets, task="regression")
    folder = tmp_path / "run"
    dpfl.train(nn.Linear(3, 1), federation, own.strategy(), rounds=1, folder=folder)
    predictor = dpfl.load(folder, model=nn.Linear(3, 1))
    assert predictor.predict(x).shape == (80,)
    with pytest.raises(ConfigurationError, match="regression has no probabilities"):
        predictor.predict_proba(x)


def test_a_schema_travels_with_the_model(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    age = dpfl.Column(name="age", type="number", range=(0, 100))
    ill = dpfl.Column(name="ill", type="boolean")
    schema = dpfl.Schema(columns=(age, ill), target=("ill",))
    ages = np.linspace(0, 100, 80)
    table = {"site": ["n", "s"] * 40, "age": ages.tolist(), "ill": (ages > 50).tolist()}
    budgets = {client: dpfl.Budget(epsilon=8.0, delta=1e-3) for client in ("n", "s")}
    given = {"client": "site", "schema": schema, "budgets": budgets}
    federation = dpfl.Federation.from_frame(pandas.DataFrame(table), **given)
    folder = tmp_path / "run"
    dpfl.train(nn.Linear(1, 2), federation, own.strategy(), rounds=2, folder=folder)
    predictor = dpfl.load(folder, model=nn.Linear(1, 2))
    assert predictor.schema == schema
    expected = predictor.predict((ages / 100)[:, None]).tolist()
    assert predictor.predict(pandas.DataFrame({"age": ages})).tolist() == expected
    file = _file(tmp_path / "new.csv", ages[:, None])
    file.write_text(file.read_text().replace("f0", "age", 1))
    assert predictor.predict(read_records(file, predictor)).tolist() == expected
    with pytest.raises(DataError, match="has no column 'age'"):
        predictor.predict({"weight": [3.0]})


# ---- notebooks -----------------------------------------------------------------------------------


def test_results_show_themselves(trained: tuple[Path, dpfl.Result]) -> None:
    _, result = trained
    page = result._repr_html_()
    assert "NOT PRIVATE: SEEDED" in page
    assert "<script" not in page
    assert result.spent["a"]._repr_html_().count("<tr>") == 2
    assert result.spent._repr_html_().count("<tr>") == 5  # a heading and four clients
    frame = result.to_pandas()
    assert list(frame.index) == [1, 2, 3, 4, 5]
    assert frame["accuracy"].tolist() == [line.scores.value for line in result.history]  # type: ignore[union-attr]
    assert frame["weight a"].tolist() == [line.weights["a"] for line in result.history]
    panels = result.plot().axes
    assert [panel.get_ylabel() for panel in panels] == ["accuracy %", "loss", "weights"]
    assert panels[0].lines[0].get_ydata()[-1] == pytest.approx(100 * result.value)


def test_names_of_clients_are_escaped() -> None:
    from dpfl.core.html import html_table

    assert "<b>" not in html_table(("<b>",), [["<b>x</b>"]])
    assert "and 3 more" in html_table((), [[1]] * 5, most=2)


def test_a_missing_pandas_is_named(
    trained: tuple[Path, dpfl.Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigurationError, match="pip install pandas"):
        trained[1].to_pandas()


# ---- the command line ----------------------------------------------------------------------------


def _file(path: Path, features: np.ndarray, **more: np.ndarray) -> Path:
    names = [*(f"f{number}" for number in range(features.shape[1])), *more]
    rows = np.column_stack([features, *more.values()])
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([names, *rows.tolist()])
    return path


def test_predict_on_the_command_line(
    named: tuple[Path, dpfl.Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow
    from pyarrow import parquet

    digits = dpfl.load_dataset("digits")
    x, y = digits.features[:20].numpy(), digits.labels[:20].numpy()
    expected = dpfl.load(named[0]).predict(x).tolist()
    file = _file(tmp_path / "new.csv", x, label=y)
    command = ["predict", str(named[0]), str(file), "--drop", "label"]
    assert run_command(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["prediction", *map(str, expected)]
    assert run_command([*command, "--out", str(tmp_path / "p.csv"), "--probabilities"]) == 0
    table = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert [int(row["prediction"]) for row in table] == expected
    assert sum(float(table[0][f"probability_{k}"]) for k in range(10)) == pytest.approx(1)
    capsys.readouterr()
    columns = {f"f{number}": x[:, number] for number in range(64)}
    parquet.write_table(pyarrow.table(columns), tmp_path / "new.parquet")
    assert run_command(["predict", str(named[0]), str(tmp_path / "new.parquet"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"prediction": expected}


BAD = {
    "other columns": ("a,b\n1,2\n", 3, "has 2 columns, the model takes 64"),
    "empty": ("", 3, "is empty"),
    "no record": ("a,b\n", 3, "holds no record"),
    "a quote left open": ('a,b\n1,2\n3,"4\n', 3, "line 3: unexpected end of data"),
    "cut off": ("a,b\n1\n", 3, "line 2 has 1 cells for 2 columns"),
}


@pytest.mark.parametrize("which", BAD)
def test_a_bad_file_is_named(
    named: tuple[Path, dpfl.Result],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    which: str,
) -> None:
    text, code, problem = BAD[which]
    file = tmp_path / "new.csv"
    file.write_text(text)
    assert run_command(["predict", str(named[0]), str(file)]) == code
    err = capsys.readouterr().err
    assert problem in err
    assert err.count("\n") == 1


def test_bad_commands_are_named(
    named: tuple[Path, dpfl.Result],
    trained: tuple[Path, dpfl.Result],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = _file(tmp_path / "new.csv", np.zeros((1, 64)))
    words.write_text(words.read_text().replace("0.0", "high", 1))
    there, missing = str(words), str(tmp_path / "missing.csv")
    for command, code, problem in (
        ([str(named[0]), there], 3, "line 2, column 'f0': 'high' is not a number"),
        ([str(named[0]), missing], 3, "missing.csv: is not there; check the path"),
        ([str(named[0]), "new.txt"], 3, "neither .csv nor .parquet"),
        ([str(named[0]), there, "--drop", "label"], 3, "has no column 'label'"),
        ([str(tmp_path), there], 5, "model.json: is not there; name the folder"),
        ([str(trained[0]), there], 2, "of the user's own"),
    ):
        assert run_command(["predict", *command]) == code
        assert problem in capsys.readouterr().err


def test_categories_are_predicted_by_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sites, schema = tmp_path / "sites", tmp_path / "schema.toml"
    sites.mkdir()
    rows = [f"{age},{'old' if age > 50 else 'young'}" for age in range(20, 80)]
    for name in ("north", "south"):
        (sites / f"{name}.csv").write_text("\n".join(["age,group", *rows]) + "\n")
    schema.write_text(
        'target = "group"\n[columns.age]\ntype = "number"\nrange = [0, 100]\n'
        '[columns.group]\ntype = "category"\ncategories = ["young", "old"]\n'
    )
    folder = str(tmp_path / "run")
    run = ["run", "--dataset", str(sites), "--schema", str(schema), "--method", "weiavg"]
    options = ["--budgets", "8", "--delta", "1e-3", "--clip", "1", "--rounds", "1", "--quiet"]
    assert run_command([*run, *options, "--out", folder]) == 0
    capsys.readouterr()
    (tmp_path / "new.csv").write_text("age\n30\n70\n")
    assert run_command(["predict", folder, str(tmp_path / "new.csv"), "--probabilities"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header == "prediction,probability_young,probability_old"
    for line in lines:
        name, young, old = line.split(",")
        assert name == ("old" if float(old) > float(young) else "young")
    (tmp_path / "new.csv").write_text('age\n"30\n"\n\n\f70\n')
    assert run_command(["predict", folder, str(tmp_path / "new.csv")]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [line.split(",")[0] for line in lines]
    (tmp_path / "new.csv").write_text('age\n"30\n"\n\nold\n')
    assert run_command(["predict", folder, str(tmp_path / "new.csv")]) == 3
    assert "new.csv, line 5, column 'age': 'old' is not a number" in capsys.readouterr().err
    (tmp_path / "new.csv").write_text("height\n30\n")
    assert run_command(["predict", folder, str(tmp_path / "new.csv")]) == 3
    assert "has no column 'age'; add it; its columns are height" in capsys.readouterr().err


def test_records_are_read_without_words_of_other_libraries(
    trained: tuple[Path, dpfl.Result], recwarn: pytest.WarningsRecorder
) -> None:
    predictor, fixed = dpfl.load(trained[0], model=own.model()), RECORDS.copy()
    fixed.setflags(write=False)  # as the values of a pandas frame are
    predictor.predict(fixed)
    assert not recwarn.list
    with pytest.raises(DataError, match=r"^records: cannot be read as an array of numbers; give"):
        predictor.predict([["high"] * RECORDS.shape[1]])


class WithLogits(nn.Module):
    """Returns an object with logits, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.head = nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        """Logits in an object."""
        return SimpleNamespace(logits=self.head(self.frozen(x)))


def test_a_model_with_logits_and_a_frozen_part_predicts_as_trained(tmp_path: Path) -> None:
    model, public = WithLogits(), dpfl.PublicMetric(RECORDS[:20], np.arange(20) % 2)
    stopping = dpfl.EarlyStopping(metric=public, patience=9)
    result = dpfl.train(
        model, own.federation(), own.strategy(), rounds=2, seed=None, early_stopping=stopping
    )
    result.save(tmp_path / "saved")
    new = WithLogits()
    with pytest.raises(ConfigurationError, match="frozen parameters are not those of training"):
        dpfl.load(tmp_path / "saved", model=new)
    new.frozen.load_state_dict(model.frozen.state_dict())
    found = dpfl.load(tmp_path / "saved", model=new).outputs(RECORDS)
    assert torch.equal(found, result.model(torch.as_tensor(RECORDS)).logits.detach())


def test_public_records_may_be_frames_and_must_have_the_shape_of_records() -> None:
    pandas = pytest.importorskip("pandas")
    x = np.random.default_rng(1).uniform(size=(60, 1)).astype(np.float32)
    frame = pandas.DataFrame(
        {"site": ["a", "b"] * 30, "who": np.arange(60) // 4, "age": x[:, 0], "ill": x[:, 0] > 0.5}
    )
    columns = {"age": {"type": "number", "range": [0, 1]}, "ill": {"type": "boolean"}}
    schema = dpfl.Schema.from_dict(
        {"target": "ill", "person": "who", "records_per_person": 2, "columns": columns}
    )
    federation = dpfl.Federation.from_frame(frame, client="site", schema=schema)
    federation = federation.with_budgets(
        {client: dpfl.Budget(epsilon=4.0, delta=1e-3) for client in "ab"}
    )

    def stopped(features: Any) -> dpfl.Result:
        metric = dpfl.PublicMetric(features, frame["ill"])
        stopping = dpfl.EarlyStopping(metric=metric, patience=1, least_gain=9.0)
        model, options = nn.Linear(1, 2), {"rounds": 3, "seed": None, "early_stopping": stopping}
        return dpfl.train(model, federation, own.strategy(), **options)  # type: ignore[arg-type]

    assert stopped(frame[["age"]]).summary.rounds.done == 2
    with pytest.raises(DataError, match=r"public records: have shape \(3,\), those of the fed"):
        stopped(np.zeros((60, 3)))
