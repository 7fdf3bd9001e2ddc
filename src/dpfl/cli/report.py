"""``dpfl report``: one page about one run or many, for an ethics board and for engineers.

The page is one HTML file that needs no network. ``--public`` leaves out whatever an adversary
against whom sampling amplifies may not see, ``--figures`` writes every figure for a paper, and
``--pdf`` prints the page with Chromium.
"""

from pathlib import Path

from dpfl.cli import options as o
from dpfl.cli.console import answer, note_files


def report(
    runs: list[Path] = o.arg("Folders of runs, or of one comparison."),
    path: Path | None = o.opt("File (default: report.html in the first folder).", None, "--out"),
    public: bool = o.flag(
        "--public", "Leave out whatever an outsider may not see; writes public.html."
    ),
    pdf: bool = o.flag("--pdf", "Print it to a PDF as well (needs Chromium)."),
    figures: Path | None = o.opt("Folder for every figure as SVG and PNG."),
    json: bool = o.JSON,
) -> None:
    """Write one self-contained HTML page: what was promised, budgeted, spent and learned.

    Runs that are reported together must share their federation. The page for the public leaves out
    participation, values of single clients, and every metric without noise.
    """
    from dpfl.report.page import all_charts, write_report
    from dpfl.report.printing import print_page
    from dpfl.report.reading import of_folders
    from dpfl.report.static import write_figures

    shown = of_folders(runs)
    page = path or runs[0] / ("public.html" if public else "report.html")
    page = write_report(shown, page, public=public)
    written = {"report": str(page)}
    if pdf:
        written["pdf"] = str(print_page(page, page.with_suffix(".pdf")))
    if figures is not None:
        written["figures"] = str(figures)
        write_figures([] if public else all_charts(shown), figures)
    named = {kind.capitalize(): place for kind, place in written.items()}
    answer(json, written, note_files, named)
