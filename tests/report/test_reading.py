"""Runs as a report reads them: what is there, what cannot be compared, and what is broken, each in
one sentence.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dpfl.cli.main import run_command
from dpfl.core.errors import ConfigurationError, DpflError, FolderError
from dpfl.report.reading import of_folders, read_run
from tests.report.conftest import copied, rounds_of, summary_of

Spoil = Callable[[Path], object]


def report(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    code = run_command(["report", *map(str, arguments)])
    return code, capsys.readouterr().err


def is_one_sentence(err: str) -> bool:
    return (
        err.startswith("dpfl: ")
        and err.count("\n") == 1
        and "Traceback" not in err
        and err.count(";") >= 1
    )


def changed(folder: Path, place: Path, *swaps: tuple[str, str]) -> Path:
    """A copy whose experiment says something else."""
    copied(folder, place)
    text = (place / "experiment.toml").read_text()
    for old, new in swaps:
        assert old in text
        text = text.replace(old, new)
    (place / "experiment.toml").write_text(text)
    return place


# -- what is there ---------------------------------------------------------------------------------


def test_a_run_is_read_as_its_files_tell_it(weiavg: Path) -> None:
    run = read_run(weiavg)
    assert (run.method, run.seed, run.rounds, run.finished) == ("weiavg", 0, 5, True)
    assert run.result.to_dict() == summary_of(weiavg)
    assert [line.to_dict() for line in run.history] == rounds_of(weiavg)
    assert run.toml == (weiavg / "experiment.toml").read_text()


def test_the_command_writes_one_file_beside_the_run_and_says_where(
    weiavg: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = copied(weiavg, tmp_path / "run")
    before = {path.name for path in place.iterdir()}
    code, err = report(capsys, place)
    assert code == 0
    assert {path.name for path in place.iterdir()} == before | {"report.html"}
    assert f"Report: {place / 'report.html'}" in err


def test_json_says_what_was_written(
    weiavg: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "deep" / "page.html"
    assert run_command(["report", str(weiavg), "--out", str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(target)}
    assert target.read_text().startswith("<!doctype html>")


def test_the_page_needs_nothing_from_anywhere(weiavg: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    assert run_command(["report", str(weiavg), "--out", str(target)]) == 0
    body = target.read_text()
    assert '<link rel="icon" href="data:,">' in body
    head = body.split("<script>")[0]
    assert (
        "http:" not in head
        and "https:" not in head
        and "src=" not in head
        and "@import" not in head
        and "url(" not in head
    )


def test_many_runs_are_grouped_by_method_and_sorted_by_seed(
    weiavg: Path, robust_hdp: Path, tmp_path: Path
) -> None:
    folders = [
        changed(source, tmp_path / f"{source.name}-{seed}", ("seed = 0", f"seed = {seed}"))
        for seed in (7, 3)
        for source in (weiavg, robust_hdp)
    ]
    material = of_folders(folders)
    (case,) = material.cases
    assert {label: [run.seed for run in runs] for label, runs in case.methods.items()} == {
        "weiavg": [3, 7],
        "robust_hdp": [3, 7],
    }
    assert material.title == "2 methods compared"
    assert len(material.runs) > 1


def test_a_comparison_is_read_from_its_results(comparison: Path) -> None:
    material = of_folders([comparison])
    assert [len(runs) for runs in material.cases[0].methods.values()] == [2] * 5
    told = json.loads((comparison / "results.json").read_text())
    means = {
        cell["label"]: sum(run["accuracy"] for run in cell["runs"]) / len(cell["runs"])
        for cell in told["cells"]
    }
    ranks = [rank for found in material.cases[0].rankings().values() for rank in found]
    found = {one.label: sum(run.accuracy for run in one.runs) / 2 for one in ranks}
    assert found == pytest.approx(means)


def test_a_sweep_has_a_case_for_every_value(sweep: Path) -> None:
    material = of_folders([sweep])
    assert material.varied == ["budgets.scale"]
    assert [case.values["budgets.scale"] for case in material.cases] == [0.1, 1, 2]


def test_a_comparison_can_be_reported_from_another_place(
    comparison: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Made with relative paths, as the defaults (runs/compare-1, runs/kept) are.
    told = json.loads((comparison / "results.json").read_text())
    runs = tmp_path / "runs"
    for name in {run["folder"] for cell in told["cells"] for run in cell["runs"]}:
        copied(Path(told["kept"]) / name, runs / "kept" / name)
    (runs / "compare-1").mkdir()
    (runs / "compare-1" / "results.json").write_text(json.dumps({**told, "kept": "runs/kept"}))
    monkeypatch.chdir(tmp_path)
    assert report(capsys, "runs/compare-1")[0] == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    code, err = report(capsys, runs / "compare-1")
    assert code == 0, err


# -- what cannot be compared -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "swap"),
    [
        ("data", ('name = "digits"', 'name = "heart_disease"')),
        ("partition", ('kind = "iid"', 'kind = "dirichlet"')),
        ("budgets", ("delta = 0.001", "delta = 0.0001")),
        ("model", ('name = "logistic"', 'name = "mlp"')),
    ],
)
def test_runs_on_different_federations_are_refused(
    section: str, swap: tuple[str, str], weiavg: Path, robust_hdp: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    other = changed(robust_hdp, tmp_path / "other", swap)
    code, err = report(capsys, weiavg, other, "--out", tmp_path / "r.html")
    assert code == 2
    assert is_one_sentence(err), err
    assert f"differ in [{section}]" in err and str(other) in err
    assert not (tmp_path / "r.html").exists()


def test_methods_run_with_different_seeds_are_refused(
    weiavg: Path, robust_hdp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = report(
        capsys, weiavg, changed(robust_hdp, tmp_path / "other", ("seed = 0", "seed = 1"))
    )
    assert code == 2
    assert is_one_sentence(err), err
    assert "different seeds" in err


@pytest.mark.parametrize(
    "swaps",
    [
        (),
        (("seed = 0", "seed = 1"), ("lr = 0.3", "lr = 0.1")),
        (("seed = 0", "seed = 1"), ("dropout = 0.0", "dropout = 0.2")),
        (("seed = 0", "seed = 1"), ("evaluate_every = 1", "evaluate_every = 1\ncohort = 0.5")),
        (("seed = 0", "seed = 1"), ("[run.misreports]", "[run.misreports]\nclient-3 = 100.0")),
    ],
    ids=["the same run twice", "settings", "dropout", "cohort", "misreports"],
)
def test_runs_of_one_method_that_are_no_repetitions_are_not_averaged(
    swaps: tuple[tuple[str, str], ...],
    weiavg: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, err = report(
        capsys, weiavg, changed(weiavg, tmp_path / "other", *swaps), "--out", tmp_path / "r.html"
    )
    assert code == 2
    assert is_one_sentence(err), err


def test_runs_of_different_length_are_refused(
    weiavg: Path, robust_hdp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = report(
        capsys, weiavg, changed(robust_hdp, tmp_path / "other", ("rounds = 5", "rounds = 6"))
    )
    assert code == 2
    assert is_one_sentence(err), err
    assert "rounds" in err


# -- what is broken --------------------------------------------------------------------------------


def _write(name: str, text: str | bytes) -> Spoil:
    content = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / name).write_bytes(content)


def _edit_summary(**fields: object) -> Spoil:
    def edit(folder: Path) -> None:
        told = {**summary_of(folder), **fields}
        (folder / "summary.json").write_text(
            json.dumps({k: v for k, v in told.items() if v is not None})
        )

    return edit


def _append(name: str, text: str) -> Spoil:
    return lambda folder: (folder / name).write_text((folder / name).read_text() + text)


BROKEN: dict[str, tuple[Spoil, str]] = {
    "no run at all": (lambda folder: [path.unlink() for path in folder.iterdir()], "holds no run"),
    "a run that goes on": (lambda folder: (folder / "summary.json").unlink(), "dpfl run --resume"),
    "an older summary": (_edit_summary(format="dpfl-summary-0"), "is of format 'dpfl-summary-0'"),
    "a summary before formats": (_edit_summary(format=None), "is of format 'None'"),
    "a summary without statements": (_edit_summary(statements=None), "summary.json"),
    "half a summary": (_write("summary.json", '{"format": "dpfl-su'), "cannot be read"),
    "a summary that is a list": (_write("summary.json", "[]"), "summary.json"),
    "an experiment of another version": (_append("experiment.toml", "\n[clouds]\nx = 1\n"), "not of this version"),
    "an experiment that is no TOML": (_write("experiment.toml", "[data\n"), "not of this version"),
    "an experiment that is no text": (_write("experiment.toml", b"\xff\xfe\x00"), "experiment.toml"),
    "a broken line in the middle": (_write("rounds.jsonl", '{"round": 0}\n{"rou\n{"round": 2}\n'), "line 2 cannot be read"),
    "a record that is no text": (_write("rounds.jsonl", b"\xff\xfe\x00\n"), "rounds.jsonl"),
    "a line that is no round": (_write("rounds.jsonl", "17\n"), "rounds.jsonl"),
    "results that are no JSON": (_write("results.json", "{"), "results.json"),
    "results of another version": (_write("results.json", '{"format": "old"}'), "results.json"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(BROKEN))
def test_a_broken_folder_is_one_sentence_and_code_5(
    what: str, weiavg: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, said = BROKEN[what]
    place = copied(weiavg, tmp_path / "run")
    spoil(place)
    code, err = report(capsys, place)
    assert code == 5, err
    assert is_one_sentence(err), err
    assert said in err
    assert not (place / "report.html").exists()


def test_a_folder_that_is_not_there_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = report(capsys, tmp_path / "nowhere")
    assert code == 5
    assert is_one_sentence(err), err


def test_no_folder_at_all_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, err = report(capsys)
    assert code == 2
    assert err.startswith("dpfl: RUNS: is missing; ") and err.count("\n") == 1


def test_a_comparison_whose_runs_are_gone_says_which(
    comparison: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = json.loads((comparison / "results.json").read_text())
    (tmp_path / "results.json").write_text(json.dumps({**told, "kept": str(tmp_path / "gone")}))
    code, err = report(capsys, tmp_path)
    assert code == 5
    assert is_one_sentence(err), err
    assert str(tmp_path / "gone") in err


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_last_line_that_was_cut_off_is_left_out(cut: int, weiavg: Path, tmp_path: Path) -> None:
    place = copied(weiavg, tmp_path / "run")
    whole = (place / "rounds.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    (place / "rounds.jsonl").write_text("".join(lines[:-1]) + lines[-1][:cut])
    assert [line.to_dict() for line in read_run(place).history] == rounds_of(weiavg)[:-1]
    assert run_command(["report", str(place)]) == 0
    (place / "rounds.jsonl").write_text("")
    assert run_command(["report", str(place)]) == 0


def test_a_target_that_cannot_be_written_is_one_sentence(
    weiavg: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    code, err = report(capsys, weiavg, "--out", tmp_path / "file" / "report.html")
    assert code in (5, 6)
    assert is_one_sentence(err), err


def test_every_refusal_is_one_of_ours(weiavg: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        of_folders([weiavg, weiavg])
    with pytest.raises(FolderError):
        of_folders([tmp_path])
    assert issubclass(FolderError, DpflError)
