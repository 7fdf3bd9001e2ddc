"""Figures as files: written, the same bytes again, and true to the names in them."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from dpfl.cli.main import run_command
from dpfl.core.errors import FolderError
from dpfl.report.charts import Chart, Heat, Series
from dpfl.report.page import all_charts
from dpfl.report.reading import of_folders
from dpfl.report.static import drawn, write_figures

DOLLARS = "$alpha$ & <b>$10$</b> \\$ $"


def chart(name: str = "one", **more: object) -> Chart:
    series = more.pop("series", [Series(name="line", x=[1, 2, 3], y=[1.0, 3.0, 2.0])])
    return Chart(
        name=name, title="t", x_label="x", y_label="y", caption="c.", series=series, **more
    )  # type: ignore[arg-type]


def test_the_command_writes_every_figure_as_svg_and_png(fedceo: Path, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "r.html")]
    assert run_command(["report", str(fedceo), "--figures", str(tmp_path / "figures"), *out]) == 0
    names = {one.name for one in all_charts(of_folders([fedceo]))}
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        f"{n}.{k}" for n in names for k in ("svg", "png")
    }
    assert {"smoothness-before-fedceo", "spectrum-fedceo", "accuracy-by-round"} <= names
    for path in (tmp_path / "figures").glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    for path in (tmp_path / "figures").glob("*.svg"):
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_the_same_figure_is_the_same_file(tmp_path: Path) -> None:
    charts = [
        chart(
            "lines",
            series=[Series(name="a", x=[1, 2], y=[1.0, 2.0], low=[0.5, 1.0], high=[2.0, 3.0])],
            log_y=True,
        ),
        chart("heat", series=[], heat=Heat(x=["a", "b"], y=["0", "1"], z=[[1.0, 2.0], [3.0, 4.0]])),
    ]
    first = write_figures(charts, tmp_path / "one", ["svg"])
    second = write_figures(charts, tmp_path / "two", ["svg"])
    assert len(first) == 2
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_names_with_dollars_and_tags_stay_names(tmp_path: Path) -> None:
    names = [DOLLARS, "$one", "two$ and $"]
    one = chart(
        series=[
            Series(name=DOLLARS, x=list(names), y=[1.0, 2.0, 3.0], kind="points"),
            Series(name="$b$", x=list(names), y=[1.0, None, 3.0], kind="rings"),
        ]
    )
    (path,) = write_figures([one], tmp_path, ["svg"])
    ElementTree.parse(path)
    figure = drawn(one)
    figure.canvas.draw()
    axes = figure.axes[0]
    shown = [
        label.get_text() for label in (*axes.get_xticklabels(), *figure.legends[0].get_texts())
    ]
    assert shown
    for text in shown:
        # What matplotlib would take for mathematics has an even number of dollars that are not
        # escaped.
        assert text.count("$") == text.count(r"\$")
    assert [text.replace(r"\$", "$") for text in shown] == [*names, DOLLARS, "$b$"]


def test_bars_side_by_side_do_not_hide_each_other() -> None:
    bars = [
        Series(name=n, x=["a", "b"], y=y, kind="bars")
        for n, y in (("up", [1.0, 2.0]), ("down", [3.0, 1.0]))
    ]
    spans = [
        (p.get_x(), p.get_x() + p.get_width()) for p in drawn(chart(series=bars)).axes[0].patches
    ]
    assert len(spans) == 4
    for number, (low, high) in enumerate(spans):
        for other_low, other_high in spans[:number]:
            assert high <= other_low + 1e-9 or other_high <= low + 1e-9


def test_stacked_bars_stand_on_each_other() -> None:
    bars = [
        Series(name=n, x=["a", "b"], y=y, kind="bars")
        for n, y in (("open", [1.0, 2.0]), ("close", [3.0, 1.0]))
    ]
    patches = drawn(chart(series=bars, stacked=True)).axes[0].patches
    assert [(p.get_y(), p.get_height()) for p in patches] == [
        (0, 1.0),
        (0, 2.0),
        (1.0, 3.0),
        (2.0, 1.0),
    ]


def test_a_map_s_columns_are_named_as_its_rows_are() -> None:
    one = chart(
        series=[], heat=Heat(x=["north", "south"], y=["0", "1"], z=[[1.0, 2.0], [3.0, 4.0]])
    )
    axes = drawn(one).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["north", "south"]


def test_a_folder_that_is_a_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="cannot be used"):
        write_figures([chart()], tmp_path / "file")
