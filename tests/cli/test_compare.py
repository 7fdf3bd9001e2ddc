"""``dpfl compare``: paired, never across promises, and nothing is run twice."""

from __future__ import annotations

import io
import json
import re
import signal
import statistics
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from scipy import stats

import dpfl
from dpfl.cli import compare as r
from dpfl.cli.main import run_command
from dpfl.cli.options import Asked
from dpfl.experiments import compare as library, pool as compare
from dpfl.experiments.results import StudyResult
from dpfl.methods import METHODS, families
from dpfl.runs.experiment import Experiment

FEDERATION = ["--dataset", "digits", "--clients", "4", "--rounds", "2", "--local-steps", "2"]
UNEQUAL = ["--budgets", "0.5,1,4,8", "--delta", "1e-3", "--clip", "1"]
ONE_BY_ONE = ["--workers", "1", "--quiet"]
VALUES: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"clients": 4},
    "budgets": {"epsilon": "0.5,1,4,8", "delta": 1e-3},
    "method": {"lr": 0.1, "clip": 1.0, "batch_size": 16, "local_steps": 2},
    "run": {"rounds": 2},
}
FULL = [*FEDERATION, *UNEQUAL, *ONE_BY_ONE]
COMPARED = ("fedavg", "fedavg_dp", "weiavg", "maximum", "minimum", "dp_fed")


def spoken(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr; for fixtures of a module, which cannot have capsys."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run_command(list(arguments))
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DPFL_DATA", raising=False)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Six methods, three seeds; once as JSON, and once more, out of what was kept, as people see
    it.
    """
    place = tmp_path_factory.mktemp("compared")
    options = [
        *FEDERATION,
        *UNEQUAL,
        *ONE_BY_ONE,
        "--methods",
        ",".join(COMPARED),
        "--kept",
        str(place / "kept"),
    ]
    code, out, _ = spoken("compare", *options, "--json", "--out", str(place / "one"))
    assert code == 0
    kept = {path: path.stat().st_mtime_ns for path in (place / "kept").rglob("*")}
    code, text, err = spoken("compare", *options, "--out", str(place / "two"))
    assert code == 0
    assert {path: path.stat().st_mtime_ns for path in (place / "kept").rglob("*")} == kept
    return {"place": place, "results": json.loads(out), "text": text, "err": err}


def kept_experiments(place: Path) -> dict[tuple[str, int], Experiment]:
    found = [Experiment.from_file(path) for path in place.glob("*/experiment.toml")]
    return {(experiment.method.name, experiment.run.seed): experiment for experiment in found}


def test_methods_meet_the_same_federations_and_first_models(compared: dict[str, Any]) -> None:
    experiments = kept_experiments(compared["place"] / "kept")
    assert set(experiments) == {(method, seed) for method in COMPARED for seed in range(3)}
    fingerprints = set()
    for seed in range(3):
        own = [experiments[method, seed] for method in COMPARED]
        federations = [experiment.federation() for experiment in own]
        assert len({federation.fingerprint() for federation in federations}) == 1
        assert len({repr(sorted(federation.budgets.items())) for federation in federations}) == 1
        fingerprints.add(federations[0].fingerprint())
        models = [e.build_model(f) for e, f in zip(own, federations, strict=True)]
        for model in models[1:]:
            for one, other in zip(models[0].parameters(), model.parameters(), strict=True):
                assert torch.equal(one, other)
    assert len(fingerprints) == 3


def lines_of(text: str) -> dict[str, list[str]]:
    """The outcome lines of every method, over all tables."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        match = re.match(r"(\w+) +\d+\.\d ± \d+\.\d +(.+)", line)
        if match:
            found.setdefault(match.group(1), []).append(line)
    return found


def test_means_spreads_and_p_values_are_those_of_the_runs(compared: dict[str, Any]) -> None:
    by_seed = {
        cell["label"]: [run["accuracy"] for run in cell["runs"]]
        for cell in compared["results"]["cells"]
    }
    lines = lines_of(compared["text"])
    for label, own in by_seed.items():
        shown = f"{100 * statistics.mean(own):.1f} ± {100 * statistics.stdev(own):.1f}"
        assert all(shown in line for line in lines[label])
    rivals = ("fedavg_dp", "weiavg", "minimum")
    best = max(rivals, key=lambda label: statistics.mean(by_seed[label]))
    assert " best " in lines[best][0]
    raw = sorted(
        (float(stats.ttest_rel(by_seed[best], by_seed[o]).pvalue), o) for o in rivals if o != best
    )
    adjusted = {raw[0][1]: min(1.0, 2 * raw[0][0])}
    adjusted[raw[1][1]] = max(adjusted[raw[0][1]], raw[1][0])
    for label, p in adjusted.items():
        behind = 100 * (statistics.mean(by_seed[best]) - statistics.mean(by_seed[label]))
        assert re.search(rf" {behind:.1f} +{re.escape(f'{p:.2g}')} ", lines[label][0]), lines[label]


@pytest.mark.parametrize("kind", [str, Path])
def test_print_shows_what_the_command_shows(compared: dict[str, Any], kind: type[Any]) -> None:
    result = StudyResult.read(kind(compared["place"] / "two"))
    printed = " ".join(str(result).split())
    for block in compared["text"].strip().split("\n\n"):
        assert " ".join(block.split()) in printed
    assert "spent: min" in printed


def test_there_is_one_table_a_unit_and_references_never_win(compared: dict[str, Any]) -> None:
    text, lines = compared["text"], lines_of(compared["text"])
    assert re.findall(r"Protecting a (\w+): outcome over 3 seed", text) == ["client", "record"]
    client, record = text.split("Protecting a record")
    assert "dp_fed" in client
    assert "dp_fed" not in record.partition("epsilon: ")[0]
    assert "weiavg" in record
    assert "weiavg" not in client
    assert " alone " in lines["dp_fed"][0]
    assert len(lines["fedavg"]) == 2
    for label in ("fedavg", "maximum"):
        assert all(" reference " in line and " - " in line for line in lines[label])
    assert "HYPOTHETICAL" in compared["err"]
    assert "[maximum]" in compared["err"]


def test_results_and_a_page_are_left_behind(compared: dict[str, Any]) -> None:
    folder = compared["place"] / "one"
    written = json.loads((folder / "results.json").read_text())
    assert written["cells"] == compared["results"]["cells"]
    assert written["kept"] == str(compared["place"] / "kept")
    page = (folder / "report.html").read_text()
    assert all(method in page for method in COMPARED)
    assert compared["results"]["folder"] == str(folder)


def test_everything_fits_80_columns(
    compared: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert max(map(len, compared["text"].splitlines())) <= 80
    assert "…" not in compared["text"]
    cells = json.loads(json.dumps(compared["results"]["cells"]))
    for number, cell in enumerate(cells):  # the longest that may come
        cell["label"] = f"robust_hd{number}"
        for run, accuracy in zip(cell["runs"], (0.0, 1.0, 1.0), strict=True):
            run |= {
                "accuracy": accuracy,
                "clients": 1000,
                "clients_left": 333,
                "bytes_up": 2**30 - 2**19,
            }
            run["bytes_down"] = 2**30 - 2**19
    r.show_tables(StudyResult.from_dict(compared["results"] | {"cells": cells}))
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert text.count("1023.5 MiB") >= 2 * len(cells)


# -- which methods ---------------------------------------------------------------------------------


def test_of_all_what_does_not_fit_is_left_out_with_a_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    equal = {**VALUES, "budgets": {"epsilon": 1.0, "delta": 1e-3}}
    found = Asked(methods="all").method_names(equal)
    said = capsys.readouterr().err.strip().splitlines()
    assert set(found) == set(METHODS) - {"centaur", "dprp", "pfa", "pfa_plus"}
    assert [line.split()[2] for line in said] == ["centaur", "dprp", "pfa", "pfa_plus"]
    assert all(line.startswith("left out: ") for line in said)
    assert "one layer" in said[0]
    assert "needs dimension" in said[1]
    assert "all claimed epsilons are equal" in said[2]
    assert "all claimed epsilons are equal" in said[3]


@pytest.mark.parametrize("family", sorted(families()))
def test_a_family_is_all_of_it_where_all_of_it_fits(
    capsys: pytest.CaptureFixture[str], family: str
) -> None:
    fits = {
        **VALUES,
        "model": {"name": "mlp", "hidden": 8},
        "method": {**VALUES["method"], "dimension": 20},
    }
    assert Asked(family=family).method_names(fits) == list(families()[family])
    said = capsys.readouterr().err.splitlines()
    needed = any("dimension" in METHODS[name].settings for name in families()[family])
    assert said == [] if needed else all(line.startswith("left aside, ") for line in said)


def test_settings_of_the_file_that_no_compared_method_has_are_left_aside_with_one_note() -> None:
    Path("file.toml").write_text(tomli_w.dumps({**VALUES, "run": {"rounds": 1}}))
    asked = ["file.toml", "--methods", "preconditioned", "--seeds", "1", "--out", "r"]
    code, out, err = spoken("compare", *asked, "--kept", "k", "--quiet")
    assert code == 0 and "preconditioned" in out
    notes = [line for line in err.splitlines() if line.startswith("left aside, ")]
    assert len(notes) == 1 and "lr" in notes[0] and "clip" in notes[0]
    results = dpfl.compare(
        VALUES, ["preconditioned"], seeds=1, progress=False
    )  # from Python as well
    assert [cell.method for cell in results.cells] == ["preconditioned"]


@pytest.mark.parametrize(
    ("methods", "more", "words"),
    [
        ("fedavg_dp,centaur", UNEQUAL, "one layer"),
        ("fedavg_dp,dprp", UNEQUAL, "needs dimension"),
        (
            "fedavg_dp,pfa",
            ["--budgets", "2", "--delta", "1e-3", "--clip", "1"],
            "all claimed epsilons are equal",
        ),
    ],
)
def test_a_method_that_was_named_and_does_not_fit_is_an_error_before_anything_is_run(
    methods: str, more: list[str], words: str
) -> None:
    code, out, err = spoken(
        "compare", *FEDERATION, *more, *ONE_BY_ONE, "--methods", methods, "--seeds", "1"
    )
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert not Path("runs").exists()


def test_data_that_are_not_there_are_no_reason_to_leave_out_every_method() -> None:
    code, out, err = spoken("compare", *FULL, "--family", "wireless", "--dataset", "./nowhere")
    assert (code, out) == (3, "")
    assert "not a folder" in err
    assert len(err.strip().splitlines()) == 1
    assert list(Path().iterdir()) == []


# -- runs kept by content --------------------------------------------------------------------------


def test_only_what_has_changed_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("sites").mkdir()
    for site in ("north", "south", "east"):
        rows = "".join(f"{i % 7},{(i * 3) % 5},{int(i % 7 > 3)}\n" for i in range(40))
        Path(f"sites/{site}.csv").write_text("a,b,ill\n" + rows)
    ran: list[str] = []
    real = compare.run_experiment

    def spy(experiment: Experiment, *rest: Any, **more: Any) -> Any:
        ran.append(f"{experiment.method.name} {experiment.run.seed}")
        return real(experiment, *rest, **more)

    monkeypatch.setattr(compare, "run_experiment", spy)

    def again(*more: str) -> list[str]:
        ran.clear()
        common = [
            "--dataset",
            "./sites",
            "--rounds",
            "1",
            "--local-steps",
            "2",
            *ONE_BY_ONE,
            "--seeds",
            "2",
        ]
        code, _, err = spoken("compare", *common, *more)
        assert code == 0, err
        return ran

    private = ["--budgets", "2", "--delta", "1e-3", "--clip", "1"]
    assert again("--methods", "fedavg") == ["fedavg 0", "fedavg 1"]
    assert again("--methods", "fedavg") == []
    assert again("--methods", "fedavg,weiavg", *private) == [
        "fedavg 0",
        "fedavg 1",
        "weiavg 0",
        "weiavg 1",
    ]
    assert again("--methods", "weiavg,fedavg", *private) == []
    assert again("--methods", "fedavg", "--seeds", "0,2,1") == ["fedavg 2"]
    assert again("--methods", "fedavg", "--lr", "0.2") == ["fedavg 0", "fedavg 1"]
    path = Path("sites/south.csv")
    content = path.read_bytes()
    path.write_bytes(content[:-2] + (b"1" if content[-2:-1] == b"0" else b"0") + content[-1:])
    assert again("--methods", "fedavg") == ["fedavg 0", "fedavg 1"]
    path.write_bytes(content)
    assert again("--methods", "fedavg") == []


def test_stopping_says_that_repeating_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(library, "run_study", stopped)
    code, out, err = spoken("compare", *FEDERATION, *UNEQUAL, *ONE_BY_ONE, "--methods", "weiavg")
    assert (code, out) == (130, "")
    assert "repeat the command: it goes on where it was" in err
    assert not Path("runs").exists()


# -- bad input -------------------------------------------------------------------------------------

BAD: list[tuple[list[str], int, str]] = [
    ([*FULL], 2, "names no method"),
    ([*FULL, "--methods", " , "], 2, "names no method"),
    ([*FULL, "--methods", "weiavgg"], 2, "did you mean 'weiavg'"),
    ([*FULL, "--family", "heterogenous"], 2, "did you mean 'heterogeneous'"),
    ([*FULL, "--family", "client", "--methods", "dp_fed"], 2, "give one of the two"),
    ([*FULL, "--methods", "weiavg", "--seeds", "0"], 2, "list of different numbers"),
    ([*FULL, "--methods", "weiavg", "--seeds=-2"], 2, "list of different numbers"),
    ([*FULL, "--methods", "weiavg", "--seeds", "1,1"], 2, "list of different numbers"),
    ([*FULL, "--methods", "weiavg", "--seeds", "1,"], 2, "list of different numbers"),
    ([*FULL, "--methods", "weiavg", "--seeds", "1.5"], 2, "not a number"),
    ([*FULL, "--methods", "weiavg", "--workers", "0"], 2, "--workers"),
    (
        [*FULL, "--methods", "weiavg", "--set", "smoothnes=1"],
        2,
        "none of the methods has 'smoothnes'",
    ),
    ([*FULL, "--methods", "dp_fed_ls", "--set", "smoothnes=1"], 2, "did you mean 'smoothing'"),
    ([*FULL, "--methods", "weiavg", "--tuned", "nowhere"], 5, "cannot be read"),
    ([*FULL, "--methods", "weiavg", "--dataset", "digts"], 2, "did you mean 'digits'"),
    ([*FULL, "--methods", "weiavg", "--clients", "5000"], 3, "clients"),
    ([*FULL, "--methods", "weiavg", "--budgets", "1e-9", "--delta", "1e-12"], 4, "no finite noise"),
    ([*ONE_BY_ONE, "--methods", "weiavg", *UNEQUAL], 2, "no data set"),
    ([*FEDERATION, *ONE_BY_ONE, "--methods", "weiavg"], 2, "clip"),
    (["nowhere.toml", "--methods", "weiavg"], 2, "cannot be read"),
]


@pytest.mark.parametrize(
    ("arguments", "code", "words"), BAD, ids=[" ".join(a)[-50:] for a, _, _ in BAD]
)
def test_bad_input_gets_one_sentence_and_leaves_nothing_behind(
    arguments: list[str], code: int, words: str
) -> None:
    found, out, err = spoken("compare", *arguments)
    assert (found, out) == (code, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("content", ["{}", "no json", '{"format": "dpfl-study-0", "cells": []}'])
def test_results_that_are_not_ours_are_refused(content: str) -> None:
    Path("t").mkdir()
    Path("t/results.json").write_text(content)
    code, out, err = spoken("compare", *FULL, "--methods", "weiavg", "--tuned", "t")
    assert (code, out) == (5, "")
    assert len(err.strip().splitlines()) == 1
    assert not Path("runs").exists()


def test_results_of_another_comparison_are_never_overwritten() -> None:
    arguments = ["compare", *FULL, "--seeds", "1", "--out", "c"]
    assert spoken(*arguments, "--methods", "fedavg,weiavg")[0] == 0
    before = {path.name: path.read_bytes() for path in Path("c").iterdir()}
    code, out, err = spoken(*arguments, "--methods", "weiavg,minimum")
    assert (code, out) == (5, "")
    assert "c: already holds another comparison" in err
    assert "give another --out" in err
    assert {path.name: path.read_bytes() for path in Path("c").iterdir()} == before
    assert len(list(Path("runs/kept").iterdir())) == 2  # refused before anything ran
    assert spoken(*arguments, "--methods", "fedavg,weiavg")[0] == 0  # the same one goes on
    assert Path("c/results.json").read_bytes() == before["results.json"]


@pytest.mark.parametrize("what", ["run", "file", "notes"])
def test_a_folder_that_holds_something_else_is_left_as_it_is(what: str) -> None:
    arguments = ["compare", *FULL, "--seeds", "1", "--out", "c", "--methods", "weiavg"]
    if what == "file":
        Path("c").write_text("mine")
    else:
        Path("c").mkdir()
        name = "experiment.toml" if what == "run" else "notes.txt"
        Path("c", name).write_text("mine")
    code, _, err = spoken(*arguments)
    assert code == 5
    assert "give another --out" in err
    files = [path for path in (Path("c"), *Path("c").glob("*")) if path.is_file()]
    assert [path.read_text() for path in files if path.name != ".lock"] == ["mine"]


def test_a_killed_comparison_keeps_its_runs_and_goes_on() -> None:
    arguments = ["compare", *FULL, "--rounds", "40", "--seeds", "2", "--out", "c"]
    arguments += ["--methods", "fedavg_dp,weiavg"]
    ended = "runs/kept/*/summary.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "dpfl.cli.main", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 90
    while not list(Path().glob(ended)) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not Path("c/results.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in Path().glob(ended)}
    assert kept
    assert spoken(*arguments[:-1], "minimum")[0] == 5  # its folder is taken already
    code, _, _ = spoken(*arguments)
    assert code == 0
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    whole = spoken(*arguments, "--out", "d", "--kept", "elsewhere")
    assert whole[0] == 0
    first, second = (json.loads(Path(name, "results.json").read_text()) for name in "cd")
    assert first["cells"] == second["cells"]


def test_baselines_are_added_to_methods_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [*FULL, "--seeds", "1", "--rounds", "1", "--methods", "weiavg", "--baselines"]
    code, out, _ = spoken("compare", *options, "--json")
    assert code == 0
    assert [cell["label"] for cell in json.loads(out)["cells"]] == [
        *("weiavg", "local_only", "pooled_dp"),
    ]
