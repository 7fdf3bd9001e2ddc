"""The page in a real browser: silent, complete, true to summary.json, readable on a phone, and safe
with any name.
"""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from dpfl.engine.finish_scores import FinishScores
from dpfl.privacy.ledger import Ledger
from dpfl.report.attack_page import Gallery, Section, attack_page, picture
from dpfl.report.finish_page import finish_page
from dpfl.report.ledger_page import write_ledger_page
from dpfl.report.live import LiveServer
from dpfl.report.page import all_charts, write_report
from dpfl.report.reading import of_folders
from dpfl.report.rendering import write_page
from tests.report.conftest import (
    METHODS,
    Seen,
    copied,
    grown,
    renamed,
    reported,
    rounds_of,
    summary_of,
)

Look = Callable[..., Seen]
NAMES = [
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "\"double\" & 'single' quotes",
    "<b>bold</b>",
    "$5 and $6$",
    '<a href="javascript:alert(1)">click</a>',
    "&lt;already&gt; &amp; escaped",
    "<svg onload=alert(1)>",
]
FACTS = """() => Object.fromEntries([...document.querySelectorAll('[data-fact]')].map(
    (one) => [one.dataset.fact, one.dataset.value]))"""
DRAWN = """() => [...document.querySelectorAll('.plot')].map((one) => {
    const size = one.querySelector('.main-svg')?.getBoundingClientRect();
    const place = one.getBoundingClientRect();
    return {
        id: one.id, traces: one.data?.length ?? 0, width: size?.width ?? 0, height: size?.height ?? 0,
        room: place.width,
        marks: one.querySelectorAll('.point, .js-line, .heatmaplayer image, .bars path, .js-fill').length,
    };
})"""
OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
OPEN_ALL = "() => document.querySelectorAll('details').forEach((one) => { one.open = true; })"
SMALLEST = """(kind) => Math.min(...[...document.querySelectorAll(kind)].map(
    (one) => parseFloat(getComputedStyle(one).fontSize)))"""


def settle(seen: Seen) -> None:
    """Give the page time for whatever it does after drawing."""
    seen.page.evaluate(
        "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )


def check_silent(seen: Seen, page: Path) -> None:
    assert seen.said == []
    assert seen.dialogs == []
    assert [url for url in seen.requests if not url.startswith("data:")] == [page.as_uri()]


def check_drawn(seen: Seen, at_least: int) -> None:
    found = seen.page.evaluate(DRAWN)
    assert len(found) >= at_least
    for figure in found:
        assert figure["traces"] >= 1 and figure["marks"] >= 1, figure
        assert figure["width"] > 100 and figure["height"] > 100, figure
        assert figure["width"] <= figure["room"] + 1, figure


def table_of(seen: Seen, name: str) -> list[list[Any]]:
    """Rows of cells, each (value if it has one, text)."""
    rows: list[list[Any]] = seen.page.evaluate(
        """(name) => [...document.getElementById(name).tBodies[0].rows].map(
            (row) => [...row.cells].map((cell) => [cell.dataset.value ?? null, cell.textContent]))""",
        name,
    )
    return rows


@pytest.fixture(
    scope="module", params=[name for name in METHODS if name != "robust_hdp"]
)  # that is in the comparison
def run_page(
    request: pytest.FixtureRequest, made: Callable[[str], Path], look: Look
) -> tuple[Seen, Path]:
    """A run's page, opened once for all that only look at it."""
    folder = made(request.param)
    return look(reported(folder)), folder


# -- one run ---------------------------------------------------------------------------------------


def test_the_page_is_silent_and_asks_for_nothing(run_page: tuple[Seen, Path]) -> None:
    seen, folder = run_page
    settle(seen)
    check_silent(seen, folder / "report.html")


def test_every_figure_of_the_page_is_drawn(run_page: tuple[Seen, Path]) -> None:
    seen, _ = run_page
    wanted = set(
        seen.page.evaluate(
            "() => Object.keys(JSON.parse(document.getElementById('figures').textContent))"
        )
    )
    assert {one["id"] for one in seen.page.evaluate(DRAWN)} == {f"figure-{name}" for name in wanted}
    check_drawn(seen, 3)


def test_tiles_equal_the_summary_exactly(run_page: tuple[Seen, Path]) -> None:
    seen, folder = run_page
    told = summary_of(folder)
    spent, granted = told["epsilon"].get("spent"), told["epsilon"].get("budget")
    expected = {
        "accuracy": told["accuracy"],
        "clients-left": len(told["clients_left"]),
        "bytes-up": told["bytes_up"],
    }
    if spent:
        expected |= {"spent-median": spent["median"], "spent-largest": spent["largest"]}
    if granted:
        expected |= {"budget-median": granted["median"]}
    served = told["details"]["by_client"]
    if len(served) > 1:
        expected |= {"worst-client": min(served.values())}
    found = seen.page.evaluate(FACTS)
    assert found == {name: str(value) for name, value in expected.items()}
    assert f"{100 * told['accuracy']:.1f} %" in seen.page.inner_text("[data-fact=accuracy]")


def test_every_account_s_row_equals_its_statement(run_page: tuple[Seen, Path]) -> None:
    seen, folder = run_page
    told = summary_of(folder)
    if told["observer"] == "nobody":
        assert seen.page.query_selector("[id^=accounts-]") is None
        return
    rows = table_of(seen, f"accounts-{told['method']}")
    assert len(rows) == len(told["statements"]) == 8
    for row, line in zip(rows, told["statements"], strict=True):
        (
            (_, name),
            (rounds, _),
            (spent, spent_text),
            (granted, granted_text),
            (_, delta),
            (_, accountant),
        ) = row
        assert name == line["account"]
        assert (int(rounds), float(spent), float(granted)) == (
            line["rounds"],
            line["epsilon"],
            line["budget"],
        )
        assert float(delta) == line["delta"] and accountant == line["accountant"]
        assert float(spent_text) >= line["epsilon"]
        assert float(granted_text) >= line["budget"]


def test_the_plotted_accuracy_is_the_record_s(run_page: tuple[Seen, Path]) -> None:
    seen, folder = run_page
    (trace,) = seen.page.evaluate(
        "() => document.getElementById('figure-accuracy-by-round').data.map((one) => ({x: one.x, y: one.y}))"
    )
    lines = rounds_of(folder)
    assert trace["x"] == [line["round"] + 1 for line in lines]
    assert trace["y"] == [100 * line["accuracy"] for line in lines]


def test_stamps_and_the_experiment_are_on_the_page(run_page: tuple[Seen, Path]) -> None:
    seen, folder = run_page
    stamps = seen.page.evaluate(
        "() => [...document.querySelectorAll('.flag')].map((one) => one.textContent)"
    )
    assert sorted(stamps) == sorted(flag["text"] for flag in summary_of(folder)["flags"])
    assert "NOT PRIVATE" in stamps[0]
    assert seen.page.text_content("pre") == (folder / "experiment.toml").read_text()


# -- nothing is sent -------------------------------------------------------------------------------

BUTTONS = """() => [...document.querySelectorAll('.modebar-btn')].map(
    (one) => one.dataset.title + ' ' + one.dataset.attr)"""
LEAVE = """async () => {
    const refused = [];
    document.addEventListener(
        'securitypolicyviolation', (event) => refused.push(event.effectiveDirective));
    await fetch('https://example.org/').catch(() => {});
    new Image().src = 'https://example.org/image.png';
    const script = document.createElement('script');
    script.textContent = 'window.ran = true';
    const form = Object.assign(document.createElement('form'), {action: 'https://example.org/'});
    const base = Object.assign(document.createElement('base'), {href: 'https://example.org/'});
    document.body.append(script, form, base);
    form.submit();
    await new Promise((done) => setTimeout(done, 200));
    return [window.ran, [...new Set(refused)].sort()];
}"""


def test_no_figure_offers_to_share_it_and_a_picture_is_made_here(
    weiavg: Path, look: Look, tmp_path: Path
) -> None:
    page = write_report(of_folders([weiavg]), tmp_path / "page.html")
    seen = look(page)
    buttons = seen.page.evaluate(BUTTONS)
    assert buttons and not re.search("share|cloud|send|studio|upload", " ".join(buttons).lower())
    seen.page.locator(".plot").first.hover()
    with seen.page.expect_download() as download:
        seen.page.locator(".modebar-btn[data-title^=Download]").first.click()
    assert "<svg" in Path(download.value.path()).read_text()
    check_silent(seen, page)


def finish(folder: Path, page: Path) -> None:
    scores = FinishScores(local=0.5, common=0.7, both=0.8, error=0.01, tested=90, strength=1.0)
    page.write_text(finish_page("north", folder.name, scores))


def attack(folder: Path, page: Path) -> None:
    pixels = Gallery(headings=("record",), rows=[("north", [picture(torch.rand(1, 4, 4))])])
    charts = all_charts(of_folders([folder]))
    write_page(attack_page("t", [Section(title="t", gallery=pixels, charts=charts)]), page)


def ledger(folder: Path, page: Path) -> None:
    with closing(Ledger.open(folder / "ledger.sqlite", read_only=True)) as opened:
        write_ledger_page(opened, page, "What sites have spent")


@pytest.mark.parametrize(
    "write",
    [
        lambda folder, page: write_report(of_folders([folder]), page),
        lambda folder, page: write_report(of_folders([folder]), page, public=True),
        finish,
        attack,
        ledger,
    ],
    ids=["run", "public", "finish", "attack", "ledger"],
)
def test_no_page_can_send_anything_nor_run_a_script_that_it_did_not_come_with(
    write: Callable[[Path, Path], object], weiavg: Path, look: Look, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    write(weiavg, page)
    seen = look(page)
    settle(seen)
    check_silent(seen, page)
    for image in seen.page.query_selector_all("img"):
        assert image.evaluate("(one) => one.naturalWidth") == 4
    refused = ["base-uri", "connect-src", "form-action", "img-src", "script-src-elem"]
    assert seen.page.evaluate(LEAVE) == [None, refused]


# -- reading it ------------------------------------------------------------------------------------


def check_readable(seen: Seen) -> None:
    assert seen.page.evaluate(OVERFLOW) <= 0
    for kind in ("p", "td", "li", "figcaption", ".tile span", "pre"):
        if seen.page.query_selector(kind):
            assert seen.page.evaluate(SMALLEST, kind) >= 12, kind


@pytest.fixture(scope="module")
def compared(comparison: Path, look: Look) -> Seen:
    """A comparison on a desk, opened once; a test leaves it as it found it."""
    return look(comparison / "report.html")


def check_folded_figures_fit(seen: Seen, page: Path) -> None:
    check_readable(seen)
    seen.page.evaluate(OPEN_ALL)
    settle(seen)
    check_drawn(seen, 10)
    check_readable(seen)
    check_silent(seen, page)


def test_print_opens_what_is_folded_and_closes_it_again(compared: Seen, tmp_path: Path) -> None:
    states = "() => [...document.querySelectorAll('details')].map((one) => one.open)"
    before = compared.page.evaluate(states)
    assert before and not any(before)
    compared.page.evaluate(
        f"() => window.addEventListener('beforeprint', () => {{ window.printed = ({states})(); }})"
    )
    content = compared.page.pdf(path=str(tmp_path / "page.pdf"), format="A4")
    assert content.startswith(b"%PDF")
    assert compared.page.evaluate("() => window.printed") == [True] * len(before)
    assert compared.page.evaluate(states) == before
    compared.page.emulate_media(media="print")
    scroll = "() => getComputedStyle(document.querySelector('.scroll')).maxHeight"
    assert compared.page.evaluate(scroll) == "none"  # a table on paper cannot be scrolled
    compared.page.emulate_media(media="screen")
    assert compared.said == []


def test_a_comparison_is_readable_on_a_desk_and_its_folded_figures_fit(
    compared: Seen, comparison: Path
) -> None:
    check_folded_figures_fit(compared, comparison / "report.html")


def test_a_comparison_is_readable_on_a_phone_and_its_folded_figures_fit(
    comparison: Path, look: Look
) -> None:
    check_folded_figures_fit(look(comparison / "report.html", 390), comparison / "report.html")


def test_a_comparison_s_table_equals_its_results_and_the_best_is_of_one_promise(
    compared: Seen, comparison: Path
) -> None:
    cells = {
        cell["label"]: cell
        for cell in json.loads((comparison / "results.json").read_text())["cells"]
    }
    tables = {unit: table_of(compared, f"standings-{unit}") for unit in ("record", "client")}
    assert [row[0][1] for row in tables["record"]] == [
        "fedavg",
        "fedavg_dp",
        "weiavg",
        "robust_hdp",
    ]
    assert [row[0][1] for row in tables["client"]] == ["fedavg", "dp_fed"]
    for row in (*tables["record"], *tables["client"]):
        own = [run["accuracy"] for run in cells[row[0][1]]["runs"]]
        assert float(row[1][0]) == pytest.approx(sum(own) / len(own), abs=1e-12)
    means = {row[0][1]: float(row[1][0]) for row in tables["record"]}
    (best,) = [row[0][1] for row in tables["record"] if row[2][1] == "best"]
    assert best == max((label for label in means if label != "fedavg"), key=means.__getitem__)
    assert tables["record"][0][2][1] == "reference"


def test_a_heading_sorts_its_table_by_value_and_back(compared: Seen) -> None:
    compared.page.evaluate(OPEN_ALL)
    heads = compared.page.locator("#accounts-weiavg thead th")
    told = {row[0][1]: float(row[3][0]) for row in table_of(compared, "accounts-weiavg")}
    assert len(set(told.values())) > 3
    heads.nth(3).click()
    rising = [told[row[0][1]] for row in table_of(compared, "accounts-weiavg")]
    heads.nth(3).click()
    falling = [told[row[0][1]] for row in table_of(compared, "accounts-weiavg")]
    assert (rising, falling) == (sorted(told.values()), sorted(told.values(), reverse=True))
    heads.nth(0).click()
    assert [row[0][1] for row in table_of(compared, "accounts-weiavg")] == sorted(told)


def test_a_run_is_readable_on_a_phone(fedceo: Path, look: Look) -> None:
    page = reported(fedceo)
    seen = look(page, 390)
    seen.page.evaluate(OPEN_ALL)
    settle(seen)
    check_readable(seen)
    check_drawn(seen, 7)
    check_silent(seen, page)


def test_a_sweep_is_readable_and_its_table_equals_its_results(sweep: Path, look: Look) -> None:
    seen = look(sweep / "report.html", 390)
    check_readable(seen)
    check_silent(seen, sweep / "report.html")
    cells = json.loads((sweep / "results.json").read_text())["cells"]
    for label, unit in (("weiavg", "record"), ("dp_fed", "client")):
        rows = table_of(seen, f"sweep-{unit}")
        own = [cell for cell in cells if cell["label"] == label]
        assert [row[0][1] for row in rows] == [str(cell["case"]["budgets.scale"]) for cell in own]
        for row, cell in zip(rows, own, strict=True):
            mean = sum(run["accuracy"] for run in cell["runs"]) / len(cell["runs"])
            assert float(row[1][0]) == pytest.approx(mean, abs=1e-12)


# -- names -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def named(weiavg: Path, look: Look, tmp_path_factory: pytest.TempPathFactory) -> tuple[Seen, Path]:
    names = {f"client-{number}": name for number, name in enumerate(NAMES)}
    folder = renamed(weiavg, tmp_path_factory.mktemp("named") / "run", names)
    return look(reported(folder)), folder / "report.html"


def test_names_with_html_do_nothing_and_are_shown_as_they_are(named: tuple[Seen, Path]) -> None:
    seen, page = named
    settle(seen)
    check_silent(seen, page)
    assert sorted(row[0][1] for row in table_of(seen, "accounts-weiavg")) == sorted(NAMES)
    assert (
        seen.page.evaluate(
            "() => document.querySelectorAll('main img, main td *, main script').length"
        )
        == 0
    )
    check_drawn(seen, 5)


def test_dollars_in_a_name_are_no_mathematics(named: tuple[Seen, Path]) -> None:
    seen, _ = named
    assert not [one for one in seen.said if "MathJax" in one]


def test_names_with_html_are_themselves_along_an_axis(named: tuple[Seen, Path]) -> None:
    seen, _ = named
    shown = seen.page.evaluate(
        "() => [...document.querySelectorAll('#figure-epsilon-weiavg .xtick text')].map((one) => one.textContent)"
    )
    assert sorted(shown) == sorted(NAMES)


def test_names_with_html_are_themselves_where_one_points(named: tuple[Seen, Path]) -> None:
    seen, page = named
    told = seen.page.evaluate(
        """async () => {
            const place = document.getElementById('figure-epsilon-weiavg');
            const texts = [];
            for (const [number, name] of place.data[1].text.entries()) {
                Plotly.Fx.hover(place, [{ curveNumber: 1, pointNumber: number }]);
                await new Promise((done) => setTimeout(done, 60));
                texts.push([name, place.querySelector('.hoverlayer').textContent]);
            }
            return texts;
        }"""
    )
    check_silent(seen, page)
    for name, text in told:
        assert html.unescape(name) in text
    assert sorted(html.unescape(name) for name, _ in told) == sorted(NAMES)


# -- size ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thousand(
    weiavg: Path, tmp_path_factory: pytest.TempPathFactory, look: Look
) -> tuple[Seen, Path, float]:
    """A thousand clients on a phone, and how long that took to open."""
    page = reported(grown(weiavg, tmp_path_factory.mktemp("many") / "run", 1000))
    started = time.monotonic()
    return look(page, 390), page, time.monotonic() - started


def rows_shown(seen: Seen) -> int:
    rows = "[...document.querySelectorAll('#accounts-weiavg tbody tr')]"
    return int(seen.page.evaluate(f"() => {rows}.filter((one) => one.offsetParent).length"))


def test_a_thousand_clients_open_soon_and_fit(thousand: tuple[Seen, Path, float]) -> None:
    seen, page, seconds = thousand
    assert seconds < 30
    check_silent(seen, page)
    check_readable(seen)
    check_drawn(seen, 5)
    assert len(table_of(seen, "accounts-weiavg")) == 1000
    assert seen.page.evaluate("() => document.querySelector('.scroll').clientHeight") < 900


def test_one_of_a_thousand_is_found_by_its_name(thousand: tuple[Seen, Path, float]) -> None:
    seen, *_ = thousand
    field = seen.page.locator("input.filter")
    assert rows_shown(seen) == 1000
    field.fill("CLIENT-0077")
    assert rows_shown(seen) == 1
    assert "client-0077" in seen.page.inner_text("#accounts-weiavg tbody")
    field.fill("nobody")
    assert rows_shown(seen) == 0
    field.fill("")
    assert rows_shown(seen) == 1000


def test_a_thousand_lines_are_sorted_at_once(thousand: tuple[Seen, Path, float]) -> None:
    seen, *_ = thousand
    started = time.monotonic()
    seen.page.locator("#accounts-weiavg thead th").nth(2).click()
    values = [float(row[2][0]) for row in table_of(seen, "accounts-weiavg")]
    assert values == sorted(values) and values[0] < values[-1]
    assert time.monotonic() - started < 10


def test_a_name_is_found_among_names_only(thousand: tuple[Seen, Path, float]) -> None:
    seen, *_ = thousand
    seen.page.locator("input.filter").fill("PLD")  # the accountant, which every line has
    found = rows_shown(seen)
    seen.page.locator("input.filter").fill("")
    assert found == 0


# -- the public page -------------------------------------------------------------------------------


def test_the_public_page_is_silent_readable_and_without_figures(
    dp_fed_ls: Path, look: Look
) -> None:
    page = reported(dp_fed_ls, "public.html", public=True)
    seen = look(page, 390)
    check_silent(seen, page)
    check_readable(seen)
    assert seen.page.query_selector(".plot") is None
    assert "NOT PRIVATE: SEEDED" in seen.page.inner_text("main")


# -- the live view ---------------------------------------------------------------------------------


def test_the_live_page_follows_the_run_by_itself_to_its_end(
    weiavg: Path, look: Look, tmp_path: Path
) -> None:
    place = tmp_path / "run"
    lines = (weiavg / "rounds.jsonl").read_text().splitlines(keepends=True)
    points = "() => document.getElementById('figure-accuracy-by-round')?.data?.[0].x.length ?? 0"
    with LiveServer(place) as server:
        seen = look(server.address)
        assert seen.page.inner_text("h1") == "waiting for a run"
        seen.page.evaluate("() => { window.kept = 'the same page'; }")
        copied(weiavg, place)
        (place / "summary.json").unlink()
        (place / "rounds.jsonl").write_text("".join(lines[:2]) + lines[2][:60])
        seen.page.wait_for_selector("[data-fact=rounds-done][data-value='2']", timeout=20_000)
        assert seen.page.inner_text("h1") == "weiavg: running"
        seen.page.wait_for_function(f"({points})() === 2", timeout=20_000)
        (place / "rounds.jsonl").write_text("".join(lines[:4]))
        seen.page.wait_for_selector("[data-fact=rounds-done][data-value='4']", timeout=20_000)
        seen.page.wait_for_function(f"({points})() === 4", timeout=20_000)
        check_drawn(seen, 3)
        (place / "rounds.jsonl").write_text("".join(lines))
        (place / "summary.json").write_text((weiavg / "summary.json").read_text())
        seen.page.wait_for_selector("[data-fact=spent-median]", timeout=20_000)
        seen.page.wait_for_function(
            "document.querySelector('h1').textContent === 'weiavg: one run'", timeout=20_000
        )
        assert seen.page.evaluate(FACTS)["accuracy"] == str(summary_of(weiavg)["accuracy"])
        check_drawn(seen, 5)
        assert seen.page.evaluate("() => window.kept") == "the same page"
        assert seen.said == []
        assert all(url.startswith((server.address, "data:")) for url in seen.requests)
        asked = len(seen.requests)
        seen.page.wait_for_timeout(1500)
        assert len(seen.requests) == asked  # there is nothing more to come
