"""``dpfl sweep``: one field, or several, from one end of a list to the other."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from dpfl.cli import studies as command
from dpfl.cli.main import run_command
from dpfl.cli.values import lists_of, seeds_of
from dpfl.core.errors import ConfigurationError
from dpfl.core.types import Adjacency, Observer, Promise, Unit
from dpfl.experiments.results import CellResult, RunScore, StudyResult
from dpfl.methods import families
from dpfl.runs.experiment import Experiment

FEDERATION = ["--dataset", "digits", "--clients", "4", "--rounds", "1", "--local-steps", "2"]
PRIVATE = ["--budgets", "0.5,1,4,8", "--delta", "1e-3", "--clip", "1"]
FULL = [*FEDERATION, *PRIVATE, "--workers", "1", "--quiet"]


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DPFL_DATA", raising=False)


def sweep(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run_command(["sweep", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def granted(folder: str) -> dict[str, float]:
    summary = json.loads(Path("runs/kept", folder, "summary.json").read_text())
    return {line["account"]: line["budget"] for line in summary["statements"]}


def test_a_scale_multiplies_every_epsilon_and_the_noise_follows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    over = ["--over", "budgets.scale=1,2", "--methods", "fedavg_dp,weiavg", "--seeds", "2"]
    code, out, _ = sweep(capsys, *FULL, *over, "--json")
    results = json.loads(out)
    assert code == 0
    assert [(c["case"], c["label"]) for c in results["cells"]] == [
        ({"budgets.scale": scale}, label) for scale in (1, 2) for label in ("fedavg_dp", "weiavg")
    ]
    one, two = (granted(results["cells"][number]["runs"][0]["folder"]) for number in (0, 2))
    assert one == {"client-0": 0.5, "client-1": 1.0, "client-2": 4.0, "client-3": 8.0}
    assert two == {client: 2 * epsilon for client, epsilon in one.items()}
    spent = [cell["runs"][0]["epsilon"]["spent"] for cell in results["cells"]]
    for name, grant in (("smallest", 0.5), ("median", 2.5), ("largest", 8.0)):
        for scale, told in ((1, spent[0]), (2, spent[2])):  # multipliers lie on a ladder of 0.5 %
            assert 0.98 * scale * grant <= told[name] <= scale * grant
    folder = Path(results["folder"])
    assert folder == Path("runs/sweep-1")
    assert json.loads((folder / "results.json").read_text())["cells"] == results["cells"]
    assert "budgets.scale" in (folder / "report.html").read_text()
    # The same, out of what was kept, for people.
    code, out, err = sweep(capsys, *FULL, *over)
    assert code == 0
    assert "Results: runs/sweep-2" in err
    lines = out.splitlines()
    assert lines[0].strip() == "Protecting a record: accuracy %"
    assert lines[1].split() == ["scale", "fedavg_dp", "weiavg"]
    for number, scale in enumerate(("1", "2")):
        cells = results["cells"][2 * number : 2 * number + 2]
        means = [statistics.mean(run["accuracy"] for run in cell["runs"]) for cell in cells]
        shown = re.match(
            rf"{scale} +(\d+\.\d) ± \d+\.\d(\*?) +(\d+\.\d) ± \d+\.\d(\*?)$",
            lines[2 + number].rstrip(),
        )
        assert shown is not None, lines[2 + number]
        assert [float(shown.group(1)), float(shown.group(3))] == pytest.approx(
            [100 * m for m in means], abs=0.051
        )
        assert [shown.group(2), shown.group(4)] == (
            ["*", ""] if means[0] >= means[1] else ["", "*"]
        )
    assert max(map(len, lines)) <= 80


def test_several_fields_are_crossed_and_a_method_that_lacks_one_runs_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    over = ["--over", "method.smoothing=0.1,10", "--over", "method.lr=0.1,0.3"]
    methods = ["--methods", "dp_fed,dp_fed_ls", "--seeds", "1"]
    code, out, _ = sweep(capsys, *FULL, *over, *methods, "--json")
    assert code == 0
    results = json.loads(out)
    assert [tuple(cell["case"].values()) for cell in results["cells"][::2]] == [
        (0.1, 0.1),
        (0.1, 0.3),
        (10, 0.1),
        (10, 0.3),
    ]
    folders = {cell["label"]: [] for cell in results["cells"]}
    for cell in results["cells"]:
        folders[cell["label"]].append(cell["runs"][0]["folder"])
    assert len(set(folders["dp_fed_ls"])) == 4
    assert folders["dp_fed"][:2] == folders["dp_fed"][2:]  # there is no smoothing in it
    assert len(list(Path("runs/kept").iterdir())) == 6
    experiment = Experiment.from_file(Path("runs/kept", folders["dp_fed_ls"][3], "experiment.toml"))
    assert experiment.method.settings()["smoothing"] == 10
    assert experiment.method.settings()["lr"] == 0.3
    _, out, _ = sweep(capsys, *FULL, *over, *methods)
    assert out.splitlines()[1].split() == ["smoothing", "lr", "dp_fed", "dp_fed_ls"]


def test_the_number_of_clients_may_vary_and_the_star_stays_within_a_promise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [
        "--dataset",
        "digits",
        "--rounds",
        "1",
        "--workers",
        "1",
        "--quiet",
        "--seeds",
        "1",
        "--clip",
        "1",
    ]
    arguments += ["--budgets", "2", "--delta", "1e-3", "--over", "partition.clients=3,5"]
    code, out, _ = sweep(capsys, *arguments, "--methods", "fedavg,fedavg_dp,maximum,dp_fed")
    assert code == 0
    client, record = out.split("Protecting a record")
    for part, methods in (
        (client, ["fedavg", "dp_fed"]),
        (record, ["fedavg", "fedavg_dp", "maximum"]),
    ):
        lines = [line.split() for line in part.splitlines()]
        head = lines.index(["clients", *methods])
        assert [line[0] for line in lines[head + 1 : head + 3]] == ["3", "5"]
    assert not re.search(r"\d\*", out)  # everyone is alone with its promise, or a reference


def promised(method: str) -> Promise:
    observer = Observer.NOBODY if method == "fedavg" else Observer.SERVER
    return Promise(unit=Unit.RECORD, adjacency=Adjacency.ZERO_OUT, observer=observer)


def test_a_whole_family_fits_80_columns_with_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    names = families()["heterogeneous"]
    cells = [
        CellResult(
            case={"budgets.scale": scale},
            label=name,
            runs=tuple(
                RunScore(seed=seed, value=accuracy, promise=promised(name))
                for seed, accuracy in enumerate((0.1, 0.9, 0.8))
            ),
        )
        for scale in (0.125, 0.25)
        for name in names
    ]
    command.show_sweep(StudyResult(title="t", cells=tuple(cells)))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert all(re.search(rf"\b{name}\b", out) for name in names)
    assert out.count("60.0 ± 43.6") == len(cells)
    assert re.search(r"\b0\.125\b", out)
    assert re.search(r"\b0\.25\b", out)


# -- [budgets] scale -------------------------------------------------------------------------------


def scaled(epsilon: Any, scale: float | None, delta: Any = 1e-3) -> list[float]:
    budgets = {"epsilon": epsilon, "delta": delta} | ({} if scale is None else {"scale": scale})
    values = {"data": {"name": "digits"}, "partition": {"clients": 4}, "budgets": budgets}
    federation = Experiment.from_options(
        {**values, "method": {"name": "weiavg"}, "run": {"rounds": 1}}
    ).federation()
    assert {federation.budgets[client].delta for client in federation.ids} == {1e-3}
    return [federation.budgets[client].epsilon for client in federation.ids]


@pytest.mark.parametrize(
    "epsilon", [2.0, "mixgauss1", "0.5 1 4 8", [0.5, 1.0, 4.0, 8.0], "b.csv", "b.json"]
)
def test_every_kind_of_budgets_is_scaled(epsilon: Any) -> None:
    Path("b.csv").write_text("id,epsilon\n" + "".join(f"client-{n},{n + 1}\n" for n in range(4)))
    Path("b.json").write_text(json.dumps({f"client-{n}": [n + 1, 1e-3] for n in range(4)}))
    plain = scaled(epsilon, None)
    assert scaled(epsilon, 1.0) == plain
    assert scaled(epsilon, 2.5) == pytest.approx([2.5 * value for value in plain])


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), float("inf"), "two"])
def test_a_scale_is_a_positive_number(scale: Any) -> None:
    with pytest.raises(ConfigurationError, match="scale"):
        scaled(1.0, scale)


# -- reading lists and seeds -----------------------------------------------------------------------


def test_lists_are_read_as_numbers_truths_and_words() -> None:
    found = lists_of(
        [
            "method.k=1,2",
            "method.lr=0.5, 1e-3",
            "method.clip_after=true,False",
            "method.public=gmm,kmeans",
        ]
    )
    assert found == {
        "method.k": [1, 2],
        "method.lr": [0.5, 0.001],
        "method.clip_after": [True, False],
        "method.public": ["gmm", "kmeans"],
    }
    assert [type(value) for value in found["method.k"]] == [int, int]


@pytest.mark.parametrize(
    ("text", "seeds"), [("3", [0, 1, 2]), ("1", [0]), ("5,2", [5, 2]), ("7,0,1", [7, 0, 1])]
)
def test_seeds_are_a_number_or_a_list(text: str, seeds: list[int]) -> None:
    assert seeds_of(text) == seeds


# -- bad input -------------------------------------------------------------------------------------

W = ["--methods", "weiavg", "--seeds", "1"]
BAD: list[tuple[list[str], int, str]] = [
    ([*FULL, *W], 2, "--over: was not given"),
    ([*FULL, *W, "--over", "budgets.scale"], 2, "FIELD=VALUE"),
    ([*FULL, *W, "--over", "budgets.scale="], 2, "FIELD=VALUE"),
    ([*FULL, *W, "--over", "scale=1,2"], 2, "FIELD=VALUE"),
    ([*FULL, *W, "--over", "budgets.scal=1,2"], 2, "did you mean 'scale'"),
    ([*FULL, *W, "--over", "budget.scale=1,2"], 2, "did you mean 'budgets'"),
    ([*FULL, *W, "--over", "partition.client=3,4"], 2, "did you mean 'clients'"),
    ([*FULL, *W, "--over", "method.clipp=1,2"], 2, "did you mean 'clip'"),
    ([*FULL, *W, "--over", "budgets.scale=1,2", "--over", "budgets.scale=3"], 2, "was given twice"),
    ([*FULL, *W, "--over", "budgets.scale=1,0"], 2, "scale"),
    ([*FULL, *W, "--over", "budgets.scale=1,much"], 2, "scale"),
    ([*FULL, *W, "--over", "method.clip=1,-1"], 2, "clip = -1"),
    ([*FULL, "--over", "budgets.scale=1,2"], 2, "names no method"),
    ([*FULL, "--methods", "weiavgg", "--over", "budgets.scale=1,2"], 2, "did you mean 'weiavg'"),
    ([*FULL, "--methods", "weiavg", "--over", "budgets.scale=1,2", "--seeds", "none"], 2, "seeds"),
    (["--methods", "weiavg", "--over", "budgets.scale=1,2"], 2, "no data set"),
    # What only the second value makes impossible is found before the first one is run.
    (
        [
            *FEDERATION,
            *W,
            "--clip",
            "1",
            "--budgets",
            "2",
            "--delta",
            "1e-3",
            "--over",
            "partition.clients=4,5000",
        ],
        3,
        "5000",
    ),
    ([*FULL, *W, "--over", "partition.clients=4,5"], 2, "4 values for 5 clients"),
]


@pytest.mark.parametrize(
    ("arguments", "code", "words"), BAD, ids=[" ".join(a)[-50:] for a, _, _ in BAD]
)
def test_bad_input_gets_one_sentence_and_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    found, out, err = sweep(capsys, *arguments, "--quiet", "--workers", "1")
    assert (found, out) == (code, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert list(Path().iterdir()) == []
