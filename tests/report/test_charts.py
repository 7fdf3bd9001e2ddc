"""Figures as data: every number is one of the run's files, and no axis is shared by what cannot be
compared.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from dpfl.plugs.base import FigureKind, FigureSpec
from dpfl.report.charts import Chart, Heat, Series
from dpfl.report.diagnostics import diagnostics
from dpfl.report.inputs import ReportInput, ReportRun
from dpfl.report.interactive import specification
from dpfl.report.page import all_charts, full_page, running_page
from dpfl.report.reading import of_folders, read_run
from dpfl.report.rendering import render
from dpfl.rounds.record import RoundRecord, TrueNoise
from dpfl.strategy import Strategy
from tests.report.conftest import METHODS, copied, grown, renamed, rounds_of, summary_of


def charts_of(folder: Path) -> dict[str, Chart]:
    found = all_charts(of_folders([folder]))
    by_name = {chart.name: chart for chart in found}
    assert len(by_name) == len(
        found
    )  # a name is a file and a place in the page: no two may share it
    return by_name


def units_of(material: ReportInput) -> dict[str, str]:
    """By label; methods that protect nobody belong to all units."""
    return {
        label: str(runs[0].result.promise.unit) if runs[0].score.protects else "any"
        for case in material.cases
        for label, runs in case.methods.items()
    }


def strict_json(text: str) -> Any:
    """As a browser reads it: NaN and Infinity are no JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"a browser cannot read {word}")

    return json.loads(text, parse_constant=refuse)


# -- drawing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(METHODS))
def test_plotly_accepts_every_figure_of_a_run(name: str, made: Callable[[str], Path]) -> None:
    charts = charts_of(made(name))
    assert {"accuracy-by-round", "bytes", "seconds"} <= set(charts)
    for chart in charts.values():
        specified = specification(chart)
        figure = go.Figure(specified)  # refuses unknown properties and wrong values
        assert len(figure.data) >= 1
        assert figure.layout.xaxis.title.text == chart.x_label
        assert chart.caption.endswith(".") and chart.title and chart.y_label
        assert strict_json(json.dumps(specified)) == specified


def test_plotly_accepts_every_figure_of_a_comparison_and_a_sweep(
    comparison: Path, sweep: Path
) -> None:
    for folder in (comparison, sweep):
        for chart in charts_of(folder).values():
            go.Figure(specification(chart))


def test_the_check_above_can_fail() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        go.Figure({"data": [{"type": "scatter", "nonsense": 1}]})


def test_a_band_goes_around_its_line() -> None:
    chart = Chart(
        name="n", title="t", x_label="x", y_label="y", caption="c.",
        series=[Series(name="a", x=[1, 2], y=[5.0, 6.0], low=[4.0, 5.0], high=[6.0, 7.5])],
    )  # fmt: skip
    band, line = specification(chart)["data"]
    assert (band["x"], band["y"]) == ([1, 2, 2, 1], [6.0, 7.5, 5.0, 4.0])
    assert band["fill"] == "toself" and band["showlegend"] is False
    assert (line["x"], line["y"]) == ([1, 2], [5.0, 6.0])


@pytest.mark.parametrize("names", [["10", "9", "200"], ["2020-01-01", "2019-05-01", "2021-01-01"]])
def test_clients_called_by_numbers_or_dates_are_still_names(names: list[str]) -> None:
    words: dict[str, Any] = {
        "name": "n",
        "title": "t",
        "x_label": "client",
        "y_label": "y",
        "caption": "c.",
    }
    points = Chart(
        **words, series=[Series(name="a", x=list(names), y=[1.0, 2.0, 3.0], kind="points")]
    )
    heat = Chart(**words, heat=Heat(x=names, y=["0"], z=[[1.0, 2.0, 3.0]]))
    for chart in (points, heat):
        assert specification(chart)["layout"]["xaxis"].get("type") == "category"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_none_does_not_break_the_page(
    value: float, dp_fed_ls: Path, tmp_path: Path
) -> None:
    place = copied(dp_fed_ls, tmp_path / "run")
    lines = rounds_of(place)
    lines[1]["update_norm"] = value
    (place / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = render(full_page(of_folders([place])))
    figures = strict_json(text.split('id="figures">')[1].split("</script>")[0])
    assert "central-noise-dp_fed_ls" in figures


# -- units -----------------------------------------------------------------------------------------


def test_methods_that_protect_different_things_never_share_an_accuracy_axis(
    comparison: Path, sweep: Path
) -> None:
    for folder in (comparison, sweep):
        material = of_folders([folder])
        units = units_of(material)
        assert {"record", "client"} <= set(units.values())
        for chart in charts_of(folder).values():
            if "accuracy" in chart.y_label:
                inside = {units[series.name] for series in chart.series} - {"any"}
                assert len(inside) == 1, chart.name


def test_a_comparison_of_two_units_has_a_figure_for_each_and_the_reference_in_both(
    comparison: Path,
) -> None:
    charts = charts_of(comparison)
    record, client = charts["accuracy-by-round-record"], charts["accuracy-by-round-client"]
    assert {s.name for s in record.series} == {"fedavg", "fedavg_dp", "weiavg", "robust_hdp"}
    assert {s.name for s in client.series} == {"fedavg", "dp_fed"}
    for chart in (record, client):
        ends = [s.y[-1] or 0.0 for s in chart.series]
        assert ends == sorted(ends, reverse=True)
    assert "accuracy-by-round" not in charts


def test_epsilons_of_different_promises_have_figures_of_their_own(comparison: Path) -> None:
    charts = charts_of(comparison)
    by_epsilon = [chart for name, chart in charts.items() if name.startswith("accuracy-by-epsilon")]
    assert [[s.name for s in chart.series] for chart in by_epsilon] == [
        ["dp_fed"],
        ["fedavg_dp", "weiavg", "robust_hdp"],
    ]
    assert "Epsilon per client, zero_out adjacency, against the world" in by_epsilon[0].caption
    assert "Epsilon per record, zero_out adjacency, against the server" in by_epsilon[1].caption


def test_a_method_that_protects_nobody_has_no_epsilon_to_draw(fedavg: Path) -> None:
    assert not [name for name in charts_of(fedavg) if "epsilon" in name]


# -- numbers ---------------------------------------------------------------------------------------


def test_bands_are_one_standard_deviation_over_seeds(comparison: Path) -> None:
    material = of_folders([comparison])
    (series,) = [
        s for s in charts_of(comparison)["accuracy-by-round-record"].series if s.name == "weiavg"
    ]
    runs = material.cases[0].methods["weiavg"]
    assert [run.seed for run in runs] == [0, 1]
    for place, round_ in enumerate(series.x):
        both = [100 * rounds_of(run.folder)[round_ - 1]["accuracy"] for run in runs]
        assert series.y[place] == pytest.approx(statistics.mean(both))
        assert series.high and series.high[place] == pytest.approx(
            statistics.mean(both) + statistics.stdev(both)
        )
        assert series.low and series.low[place] == pytest.approx(
            statistics.mean(both) - statistics.stdev(both)
        )


def test_one_run_has_no_band_and_the_record_s_values(weiavg: Path) -> None:
    (series,) = charts_of(weiavg)["accuracy-by-round"].series
    assert series.low is None
    assert series.x == [1, 2, 3, 4, 5]
    assert series.y == [100 * line["accuracy"] for line in rounds_of(weiavg)]


def test_accuracy_stands_over_the_median_epsilon(weiavg: Path) -> None:
    (series,) = charts_of(weiavg)["accuracy-by-epsilon"].series
    told = summary_of(weiavg)
    assert series.x == [told["epsilon"]["spent"]["median"]]
    assert series.y == [100 * told["accuracy"]]


def test_a_sweep_s_curve_goes_over_the_field_and_its_bands_over_seeds(sweep: Path) -> None:
    material = of_folders([sweep])
    curve = charts_of(sweep)["accuracy-by-scale-record"]
    (series,) = curve.series
    assert (curve.x_label, series.name) == ("budgets.scale", "weiavg")
    assert (series.x, curve.log_x) == ([0.1, 1, 2], True)
    for case, mean in zip(material.cases, series.y, strict=True):
        own = [100 * run.result.accuracy for run in case.methods["weiavg"]]
        assert mean == pytest.approx(statistics.mean(own))
    assert series.low is not None


def test_every_site_s_grant_and_spend_are_drawn_by_grant_and_no_spend_above_its_grant(
    weiavg: Path,
) -> None:
    granted, spent = charts_of(weiavg)["epsilon-weiavg"].series
    told = {line["account"]: line for line in summary_of(weiavg)["statements"]}
    assert granted.x == spent.x == spent.text
    assert set(granted.x) == set(told)
    assert granted.y == [told[name]["budget"] for name in granted.x] == sorted(granted.y)
    assert spent.y == [told[name]["epsilon"] for name in spent.x]
    assert all(s <= g for s, g in zip(spent.y, granted.y, strict=True))


@pytest.mark.parametrize("name", ["weiavg", "robust_hdp"])
def test_weights_stand_beside_those_that_leave_the_least_noise(
    name: str, made: Callable[[str], Path]
) -> None:
    folder = made(name)
    oracle, own = charts_of(folder)[f"weights-{name}"].series
    lines = rounds_of(folder)
    for client, value, least in zip(own.x, own.y, oracle.y, strict=True):
        assert value == pytest.approx(statistics.mean(line["weights"][client] for line in lines))
        truth = [line["simulated_truth"]["oracle_weights"][client] for line in lines]
        assert least == pytest.approx(statistics.mean(truth))
    assert sum(own.y) == pytest.approx(1, abs=1e-5) and sum(oracle.y) == pytest.approx(1, abs=1e-5)


def test_noise_left_is_never_below_the_least(weiavg: Path) -> None:
    (series,) = charts_of(weiavg)["noise-ratio-weiavg"].series
    truths = [line["simulated_truth"] for line in rounds_of(weiavg)]
    assert series.y == [t["aggregate_noise_variance"] / t["least_noise_variance"] for t in truths]
    assert min(series.y) >= 1 - 1e-6


def test_estimated_noise_stands_over_the_true_one_client_by_client(robust_hdp: Path) -> None:
    points, line = charts_of(robust_hdp)["noise-estimates-robust_hdp"].series
    lines = rounds_of(robust_hdp)
    assert points.text is not None
    for number, client in enumerate(points.text):
        place = list(lines[0]["weights"]).index(client)
        seen = statistics.mean(one["weights_metrics"]["estimated_noise"][place] for one in lines)
        true = statistics.mean(one["simulated_truth"]["noise_variance"][client] for one in lines)
        assert (points.x[number], points.y[number]) == (pytest.approx(true), pytest.approx(seen))
    assert len(points.text) == 8
    assert line.kind == "dashes" and line.x == [min(points.x), max(points.x)]


def test_pfa_shows_what_the_subspace_keeps_and_its_spectrum(pfa: Path) -> None:
    charts, lines = charts_of(pfa), rounds_of(pfa)
    private, public = charts["subspace-pfa"].series
    assert private.y == [line["clean_metrics"]["private_energy_kept"] for line in lines]
    assert public.y == [line["clean_metrics"]["public_energy_kept"] for line in lines]
    told = {
        k.removesuffix("/spectrum"): v
        for k, v in lines[-1]["clean_metrics"].items()
        if k.endswith("/spectrum")
    }
    assert told
    assert {s.name: s.y for s in charts["public-spectrum-pfa"].series} == told


def test_fedceo_shows_spectrum_threshold_and_the_map_of_smoothness(fedceo: Path) -> None:
    charts = charts_of(fedceo)
    last = [
        line
        for line in rounds_of(fedceo)
        if "smoothness_map_before" in line.get("clean_metrics", {})
    ][-1]
    told = last["clean_metrics"]
    first, threshold = charts["spectrum-fedceo"].series
    assert first.y == told["1.weight/singular_values"][: len(first.y)]
    assert len(first.y) * told["1.weight/slices"] == len(told["1.weight/singular_values"])
    assert threshold.kind == "dashes" and set(threshold.y) == {told["1.weight/threshold"]}
    assert f"round {last['round'] + 1}" in charts["spectrum-fedceo"].title
    for when in ("before", "after"):
        heat = charts[f"smoothness-{when}-fedceo"].heat
        assert heat is not None
        assert heat.x == last["arrived"] and len(heat.y) == 10
        assert [value for row in heat.z for value in row] == told[f"smoothness_map_{when}"]
        assert {len(row) for row in heat.z} == {8}


def test_central_noise_stands_beside_the_update_it_hides(dp_fed_ls: Path) -> None:
    noise, after, update = charts_of(dp_fed_ls)["central-noise-dp_fed_ls"].series
    lines = rounds_of(dp_fed_ls)
    assert noise.y == [line["noise_metrics"]["norm"] for line in lines]
    assert after.y == [line["noise_metrics"]["norm_after"] for line in lines]
    assert update.y == [line["update_norm"] for line in lines]


def test_bytes_add_up_to_the_summary_s_and_stages_to_the_timings(weiavg: Path) -> None:
    charts, told = charts_of(weiavg), summary_of(weiavg)
    up, down = charts["bytes"].series
    assert [y * 2**20 for y in (*up.y, *down.y)] == [told["bytes_up"], told["bytes_down"]]
    timings = [json.loads(line) for line in (weiavg / "timings.jsonl").read_text().splitlines()]
    stages = {series.name: series.y for series in charts["seconds"].series}
    assert list(stages) == ["open", "clients", "close", "evaluate"]
    assert stages["clients"] == [
        pytest.approx(statistics.mean(line["clients"] for line in timings))
    ]


def test_every_method_has_its_bars(comparison: Path) -> None:
    up, _ = charts_of(comparison)["bytes"].series
    assert (up.kind, up.x) == ("bars", ["fedavg", "fedavg_dp", "weiavg", "robust_hdp", "dp_fed"])
    runs = {label: runs[0] for label, runs in of_folders([comparison]).cases[0].methods.items()}
    assert [y * 2**20 for y in up.y] == [runs[label].result.bytes_up for label in up.x]


# -- what components declare -----------------------------------------------------------------------


def drawn_by(
    run: ReportRun, slot: str, monkeypatch: pytest.MonkeyPatch, **spec: Any
) -> list[Chart]:
    """The figures of one declaration."""
    own = FigureSpec(**{"name": "own", "title": "own", "caption": "c.", "y_label": "y", **spec})
    monkeypatch.setattr(Strategy, "figures", lambda strategy: [(slot, own)])
    return [chart for chart in diagnostics("m", run) if chart.name.startswith("own")]


def rounds(*metrics: dict[str, Any], slot: str = "clean") -> list[RoundRecord]:
    names = ("a", "b")
    truth = TrueNoise(variances={"a": 1.0, "b": 4.0}, weights={"a": 0.8, "b": 0.2}, least=1.0)
    return [
        RoundRecord(
            round=number, cohort=names, arrived=names, metrics={slot: own} if own else {},
            weights={"a": 0.5, "b": 0.5}, update_norm=3.0, true_noise=truth,
        )
        for number, own in enumerate(metrics)
    ]  # fmt: skip


@pytest.mark.parametrize("kind", list(FigureKind))
def test_a_component_that_reports_nothing_has_no_figure(
    kind: FigureKind, weiavg: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for history in ([], rounds({}, {}), rounds({"other": 1.0}, {"m": "words"})):
        run = replace(read_run(weiavg), history=history)
        metrics = {"m": "metric", "update_norm": "update"}
        found = drawn_by(run, "clean", monkeypatch, kind=kind, metrics=metrics)
        assert [one for one in found if one.series and one.series[0].name == "metric"] == []
        assert not [one for one in found if one.heat]


def test_rounds_that_report_nothing_are_gaps(weiavg: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = replace(read_run(weiavg), history=rounds({"m": 1.0}, {}, {"m": 2}))
    kind = FigureKind.BY_ROUND
    (chart,) = drawn_by(run, "clean", monkeypatch, kind=kind, metrics={"m": "metric"})
    assert [(one.name, one.x, one.y) for one in chart.series] == [("metric", [1, 3], [1.0, 2.0])]
    assert drawn_by(run, "weights", monkeypatch, kind=kind, metrics={"m": "metric"}) == []


def test_a_spectrum_is_the_first_slice_of_the_last_round(
    weiavg: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"w/values": [5.0, 4.0, 3.0, 2.0], "w/slices": 2, "w/level": 4.5, "v/values": [1.0]}
    run = replace(read_run(weiavg), history=rounds({"w/values": [9.0]}, told, {}))
    spec = {"kind": FigureKind.SPECTRUM, "metrics": {"/values": "values"}, "threshold": "/level"}
    (chart,) = drawn_by(run, "clean", monkeypatch, **spec)
    assert [(one.name, one.x, one.y, one.kind) for one in chart.series] == [
        ("w", [1, 2], [5.0, 4.0], "line"),
        ("w, threshold", [1, 2], [4.5, 4.5], "dashes"),
        ("v", [1], [1.0], "line"),
    ]
    assert chart.title == "m: own, round 2"


def test_estimates_stand_over_the_truth_with_their_proportion(
    weiavg: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(read_run(weiavg), history=rounds({"m": [2.0, 8.0]}, {"m": [4.0, 8.0]}))
    kind = FigureKind.AGAINST_TRUE_NOISE
    (chart,) = drawn_by(run, "clean", monkeypatch, kind=kind, metrics={"m": "metric"})
    points, line = chart.series
    assert (points.text, points.x, points.y) == (["a", "b"], [1.0, 4.0], [3.0, 8.0])
    assert (line.x, line.y) == ([1.0, 4.0], [2.5, 10.0])
    assert chart.log_x and chart.log_y


def test_a_map_has_a_column_per_client_and_a_figure_per_metric(
    weiavg: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"m": [1.0, 2.0, 3.0, 4.0], "n": [5.0, 6.0]}
    run = replace(read_run(weiavg), history=rounds(told))
    metrics = {"m": "before it", "n": "after it"}
    kind = FigureKind.CLIENT_MAP
    first, second = drawn_by(run, "clean", monkeypatch, kind=kind, metrics=metrics)
    assert (first.name, second.name) == ("own-before-it-m", "own-after-it-m")
    assert first.heat == Heat(x=["a", "b"], y=["0", "1"], z=[[1.0, 2.0], [3.0, 4.0]])
    assert second.heat == Heat(x=["a", "b"], y=["0"], z=[[5.0, 6.0]])


def test_a_method_that_cannot_be_built_has_no_declared_figures(robust_hdp: Path) -> None:
    run = read_run(robust_hdp)
    method = run.experiment.method.model_copy(update={"name": "no such method"})
    gone = replace(run, experiment=run.experiment.model_copy(update={"method": method}))
    names = [chart.name for chart in diagnostics("m", run)]
    assert names == ["weights-m", "noise-ratio-m", "noise-estimates-m"]
    assert [chart.name for chart in diagnostics("m", gone)] == names[:2]


# -- size and names --------------------------------------------------------------------------------


def test_a_thousand_clients_are_numbered_not_named_along_the_axis(
    weiavg: Path, tmp_path: Path
) -> None:
    charts = charts_of(grown(weiavg, tmp_path / "many", 1000))
    for name in ("epsilon-weiavg", "weights-weiavg"):
        assert charts[name].x_label == "clients, by budget"
        for series in charts[name].series:
            assert series.x == list(range(1, 1001))
            assert series.text is not None and len(set(series.text)) == 1000


def test_a_name_in_a_hover_text_stays_a_name(weiavg: Path, tmp_path: Path) -> None:
    folder = renamed(weiavg, tmp_path / "run", {"client-0": "</script><script>alert(1)</script>"})
    text = render(full_page(of_folders([folder])))
    assert "<script>alert(1)" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_a_run_that_goes_on_has_figures_of_what_is_there(weiavg: Path, tmp_path: Path) -> None:
    place = copied(weiavg, tmp_path / "run")
    (place / "summary.json").unlink()
    lines = (place / "rounds.jsonl").read_text().splitlines(keepends=True)
    (place / "rounds.jsonl").write_text("".join(lines[:2]) + lines[2][:50])
    page = running_page(read_run(place, finished=False))
    by_name = {chart.name: chart for chart in page.charts}
    assert by_name["accuracy-by-round"].series[0].x == [1, 2]
    assert not page.finished
    assert "NOT PRIVATE: SEEDED" in page.parts["summary"]
    assert "epsilon-weiavg" not in by_name
    for chart in page.charts:
        go.Figure(specification(chart))


def test_a_run_of_which_nothing_is_done_yet_has_a_page(weiavg: Path, tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    (place / "experiment.toml").write_text((weiavg / "experiment.toml").read_text())
    page = running_page(read_run(place, finished=False))
    assert page.charts == []
    assert 'data-fact="rounds-done" data-value="0"' in page.parts["summary"]
