"""``dpfl tune``: the same search for every method, what it leaves behind, and what it says of it."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from dpfl.cli.main import run_command
from dpfl.experiments import compare as library, pool as compare
from dpfl.experiments.study import Sweep
from dpfl.methods import METHODS
from dpfl.runs.experiment import Experiment

FEDERATION = ["--dataset", "digits", "--clients", "4", "--rounds", "2", "--local-steps", "2"]
GRANTS = ["--budgets", "0.5,1,4,8", "--delta", "1e-3"]
FULL = [*FEDERATION, *GRANTS, "--clip", "1", "--workers", "1", "--quiet"]
RATES, CLIPS = library.GRID["method.lr"], library.GRID["method.clip"]
LR = ["--over", "method.lr=0.01,0.5,2"]


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
def tuned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("tuned")
    where = ["--out", str(place / "t"), "--kept", str(place / "kept")]
    code, text, err = spoken(
        "tune", *FULL, *LR, "--over", "method.clip=0.3,3", "--methods", "fedavg,weiavg", *where
    )
    assert code == 0
    return {
        "place": place,
        "text": text,
        "err": err,
        "results": json.loads((place / "t/results.json").read_text()),
    }


class Captured:
    """Stands in for the search: remembers the study."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.study: Sweep | None = None

        def catch(study: Sweep, *rest: Any) -> dict[str, Any]:
            self.study = study
            raise KeyboardInterrupt

        monkeypatch.setattr(library, "tune_study", catch)

    def tried(self, *arguments: str) -> dict[str, list[dict[str, Any]]]:
        code, _, err = spoken("tune", *arguments)
        assert code == 130, err
        assert self.study is not None
        return {label: self.study.tunable(label) for label in self.study.methods}


# -- what is found, said and left behind -----------------------------------------------------------


def test_the_best_on_validation_records_is_chosen_and_shown(tuned: dict[str, Any]) -> None:
    cells = {cell["label"]: cell for cell in tuned["results"]["cells"]}
    assert [one["values"] for one in cells["fedavg"]["tried"]] == [
        {"method.lr": lr} for lr in (0.01, 0.5, 2)
    ]
    assert [one["values"] for one in cells["weiavg"]["tried"]] == [
        {"method.lr": lr, "method.clip": clip} for lr in (0.01, 0.5, 2) for clip in (0.3, 3)
    ]
    for cell in cells.values():
        best = max(one["validation"] for one in cell["tried"])
        assert next(o for o in cell["tried"] if o["validation"] == best)["values"] == cell["chosen"]
        line = next(line for line in tuned["text"].splitlines() if line.startswith(cell["label"]))
        worst = min(one["validation"] for one in cell["tried"])
        chosen = ", ".join(
            f"{name.removeprefix('method.')} = {value}" for name, value in cell["chosen"].items()
        )
        assert line.split(cell["label"], 1)[1].split() == [
            *chosen.split(), f"{100 * best:.1f}", f"{100 * worst:.1f}", str(len(cell["tried"])),
        ]  # fmt: skip
    assert all(cell["runs"] == [] for cell in cells.values())
    assert max(map(len, tuned["text"].splitlines())) <= 80


def test_runs_of_the_search_are_on_validation_records_and_seeds_that_nobody_reports(
    tuned: dict[str, Any],
) -> None:
    experiments = [
        Experiment.from_file(path) for path in (tuned["place"] / "kept").glob("*/experiment.toml")
    ]
    assert len(experiments) == 3 + 6
    assert {experiment.run.seed for experiment in experiments} == {library.TUNING_SEED}
    assert all(experiment.partition.validation for experiment in experiments)


def test_tuning_on_private_records_says_that_no_cost_covers_it(tuned: dict[str, Any]) -> None:
    said = " ".join(tuned["text"].split())
    assert "Tuned on the clients' own records" in said
    assert "no privacy cost covers that" in said
    assert "--tune-on" in said
    assert "no privacy cost covers that" in tuned["results"]["tuning"]


def test_files_with_the_chosen_values_are_ready_to_run(tuned: dict[str, Any]) -> None:
    folder = tuned["place"] / "t"
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock",
        "fedavg.toml",
        "results.json",
        "study.toml",
        "weiavg.toml",
    ]
    for cell in tuned["results"]["cells"]:
        path = folder / f"{cell['label']}.toml"
        assert str(path) in tuned["err"]
        experiment = Experiment.from_file(path)
        experiment.check()
        assert experiment.method.name == cell["label"]
        for field, value in cell["chosen"].items():
            assert experiment.method.settings()[field.removeprefix("method.")] == value
        assert (experiment.run.seed, experiment.run.rounds, experiment.partition.validation) == (
            0,
            2,
            False,
        )
        assert experiment.method.settings()["local_steps"] == 2
    assert "clip" not in Experiment.from_file(folder / "fedavg.toml").method.settings()
    assert spoken("run", str(folder / "weiavg.toml"), "--out", "r", "--quiet")[0] == 0
    assert Experiment.from_file(Path("r/experiment.toml")) == Experiment.from_file(
        folder / "weiavg.toml"
    )


def test_compare_takes_what_was_tuned(tuned: dict[str, Any]) -> None:
    arguments = [
        "--methods",
        "weiavg,fedavg",
        "--seeds",
        "1",
        "--tuned",
        str(tuned["place"] / "t"),
        "--json",
    ]
    code, out, err = spoken("compare", *FULL, *arguments)
    assert code == 0, err
    chosen = {cell["label"]: cell["chosen"] for cell in tuned["results"]["cells"]}
    for cell in json.loads(out)["cells"]:
        ran = Experiment.from_file(Path("runs/kept", cell["runs"][0]["folder"], "experiment.toml"))
        for field, value in chosen[cell["label"]].items():
            assert ran.method.settings()[field.removeprefix("method.")] == value
        assert not ran.partition.validation
    code, _, err = spoken("compare", *FULL, *arguments, "--methods", "weiavg,minimum")
    assert code == 2
    assert "does not hold 'minimum'" in err


def test_baselines_are_beside_tuned_methods_tuned_where_the_search_holds_them() -> None:
    searched = ["--methods", "weiavg,local_only", "--out", "t"]
    assert spoken("tune", *FULL, "--over", "method.lr=0.01,0.02", *searched)[0] == 0
    alone = ["--methods", "weiavg", "--baselines", "--seeds", "1", "--tuned", "t"]
    code, out, err = spoken("compare", *FULL, *alone, "--json")
    assert code == 0, err
    assert "not tuned: the baseline 'pooled_dp' runs as the experiment has it" in err
    assert "'local_only'" not in err
    rates = {}
    for cell in json.loads(out)["cells"]:
        ran = Experiment.from_file(Path("runs/kept", cell["runs"][0]["folder"], "experiment.toml"))
        rates[cell["label"]] = ran.method.settings()["lr"]
    assert list(rates) == ["weiavg", "local_only", "pooled_dp"]
    assert rates["local_only"] in (0.01, 0.02)
    assert rates["pooled_dp"] not in (0.01, 0.02)


def test_a_clip_that_was_tuned_need_not_be_given_again(tuned: dict[str, Any]) -> None:
    without = [
        *FEDERATION,
        *GRANTS,
        "--workers",
        "1",
        "--quiet",
    ]  # as the search itself may be asked for
    tuned_at = ["--methods", "weiavg", "--seeds", "1", "--tuned", str(tuned["place"] / "t")]
    code, _, err = spoken("compare", *without, *tuned_at)
    assert code == 0, err
    code, _, err = spoken("compare", *without, *tuned_at, "--baselines")
    assert code == 2  # baselines that were not tuned have none
    assert "clip" in err.splitlines()[-1]


def test_results_of_a_comparison_are_no_tuning() -> None:
    assert spoken("compare", *FULL, "--methods", "weiavg", "--seeds", "1", "--out", "c")[0] == 0
    code, out, err = spoken("compare", *FULL, "--methods", "weiavg", "--seeds", "1", "--tuned", "c")
    assert code in (2, 5), "every method ran with settings that nobody has tuned"
    assert len(err.strip().splitlines()) == 1
    assert out == ""


def test_the_same_search_again_runs_nothing(
    tuned: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any, **more: Any) -> Any:
        raise AssertionError("a run was repeated")

    monkeypatch.setattr(compare, "run_experiment", never)
    where = ["--out", "again", "--kept", str(tuned["place"] / "kept")]
    code, text, _ = spoken(
        "tune", *FULL, *LR, "--over", "method.clip=0.3,3", "--methods", "fedavg,weiavg", *where
    )
    assert (code, text) == (0, tuned["text"])


def test_halving_is_said_and_its_document_tells_how_far_each_went() -> None:
    over = [
        "--over",
        "method.lr=0.01,0.1,0.5,2",
        "--search",
        "halving",
        "--rounds",
        "4",
        "--methods",
        "fedavg",
    ]
    code, text, _ = spoken("tune", *FULL, *over)
    assert code == 0
    assert "dropped were judged after a quarter or half" in " ".join(text.split())
    (cell,) = json.loads(Path("runs/tune-1/results.json").read_text())["cells"]
    assert sorted(one["rounds"] for one in cell["tried"]) == [1, 1, 2, 4]
    assert next(one["rounds"] for one in cell["tried"] if one["values"] == cell["chosen"]) == 4


# -- on a proxy ------------------------------------------------------------------------------------


def test_a_proxy_is_trained_on_instead_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Experiment] = []
    real = compare.run_experiment

    def spy(experiment: Experiment, *rest: Any, **more: Any) -> Any:
        ran.append(experiment)
        return real(experiment, *rest, **more)

    monkeypatch.setattr(compare, "run_experiment", spy)
    code, text, _ = spoken(
        "tune", *FULL, *LR, "--methods", "weiavg", "--tune-on", "breast_cancer", "--out", "t"
    )
    assert code == 0
    assert [experiment.data.name for experiment in ran] == ["breast_cancer"] * 3
    assert all(len(experiment.federation().ids) == 4 for experiment in ran)
    federation = ran[0].federation()
    assert [federation.budgets[client].epsilon for client in federation.ids] == [0.5, 1.0, 4.0, 8.0]
    said = " ".join(text.split())
    assert "Tuned on breast_cancer: what was chosen says nothing of the clients' records." in said
    assert "no privacy cost covers that" not in said
    written = Experiment.from_file(Path("t/weiavg.toml"))
    assert (written.data.name, written.partition.clients) == ("digits", 4)


def test_the_federations_own_data_are_no_proxy() -> None:
    code, out, err = spoken("tune", *FULL, *LR, "--methods", "weiavg", "--tune-on", "digits")
    assert code == 2, f"said: {' '.join(out.split())[-80:]}"
    assert out == ""
    assert len(err.strip().splitlines()) == 1


# -- what is searched ------------------------------------------------------------------------------


def test_by_default_every_method_is_searched_over_the_same_values_and_its_own_knob(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured = Captured(monkeypatch)
    options = [*FEDERATION, *GRANTS, "--model", "mlp", "--workers", "1", "--quiet"]
    methods = "fedavg,weiavg,dp_fed_ls,pfa,fedceo,ppsgd,dprp"
    tried = captured.tried(*options, "--methods", methods)
    common = len(RATES) * len(CLIPS)
    assert {label: len(candidates) for label, candidates in tried.items()} == {
        "fedavg": len(RATES),
        "weiavg": common,
        "dp_fed_ls": 3 * common,
        "pfa": 2 * common,
        "fedceo": 3 * common,
        "ppsgd": 2 * common,
        "dprp": 2 * common,
    }
    for candidates in tried.values():
        assert {one["method.lr"] for one in candidates} == set(RATES)
    assert {one["method.k"] for one in tried["pfa"]} == {1, 2}
    parameters = 64 * 64 + 64 + 64 * 10 + 10
    assert {one["method.dimension"] for one in tried["dprp"]} == {
        round(parameters / 64),
        round(parameters / 8),
    }


def test_what_the_user_fixes_or_names_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = Captured(monkeypatch)
    fixed = captured.tried(*FULL, "--methods", "dp_fed_ls", "--set", "smoothing=0.5")
    assert all("method.smoothing" not in one for one in fixed["dp_fed_ls"])
    named = captured.tried(*FULL, "--methods", "dp_fed_ls,pfa", "--over", "method.smoothing=1,2")
    assert named == {"dp_fed_ls": [{"method.smoothing": 1}, {"method.smoothing": 2}], "pfa": [{}]}
    captured.tried(*FULL, *LR, "--methods", "weiavg", "--seeds", "2", "--search", "halving")
    assert captured.study is not None
    assert captured.study.tune is not None
    assert captured.study.tune.seeds == [1000, 1001]
    assert captured.study.tune.search == "halving"


def test_of_all_a_method_whose_knob_has_no_default_is_searched_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured = Captured(monkeypatch)
    tried = captured.tried(*FEDERATION, *GRANTS, "--workers", "1", "--quiet", "--methods", "all")
    assert set(tried) == set(METHODS) - {"centaur"}
    assert len({one["method.dimension"] for one in tried["dprp"]}) == 2


# -- bad input -------------------------------------------------------------------------------------

W = ["--methods", "weiavg"]
BAD: list[tuple[list[str], int, str]] = [
    ([*FULL, *LR], 2, "names no method"),
    ([*FULL, *LR, "--methods", "weiavgg"], 2, "did you mean 'weiavg'"),
    ([*FULL, *LR, *W, "--search", "halvin"], 2, "did you mean 'halving'"),
    ([*FULL, *W, "--over", "budgets.scale=1,2"], 2, "not a setting of a method"),
    ([*FULL, *W, "--over", "lr=1,2"], 2, "FIELD=VALUE"),
    ([*FULL, *W, "--over", "method.lrr=1,2"], 2, "did you mean 'method.lr'"),
    ([*FULL, *W, "--over", "method.lr=1,-2"], 2, "lr = -2"),
    ([*FULL, *W, "--over", "method.lr=1,many"], 2, "not a number"),
    ([*FULL, *LR, *W, "--seeds", "0"], 2, "--seeds"),
    ([*FULL, *LR, *W, "--tune-on", "breast_cancr"], 2, "did you mean 'breast_cancer'"),
    ([*FULL, *LR, *W, "--tune-on", "./nowhere"], 3, "not a folder"),
    ([*FULL, *LR, *W, "--clients", "5000"], 3, "clients"),
    ([*FULL, *LR, *W, "--budgets", "1e-9", "--delta", "1e-12"], 4, "no finite noise"),
    ([*FEDERATION, *LR, *W, "--clip", "1"], 2, "budgets"),
    ([*LR, *W, *GRANTS], 2, "no data set"),
]


@pytest.mark.parametrize(
    ("arguments", "code", "words"), BAD, ids=[" ".join(a)[-50:] for a, _, _ in BAD]
)
def test_bad_input_gets_one_sentence_and_leaves_nothing_behind(
    arguments: list[str], code: int, words: str
) -> None:
    found, out, err = spoken("tune", *arguments, "--workers", "1", "--quiet")
    assert (found, out) == (code, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert list(Path().iterdir()) == []
