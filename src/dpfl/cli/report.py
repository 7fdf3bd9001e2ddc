"""``dpfl report`` and ``dpfl watch``: one page about one run or many, for an ethics board and for
engineers, after a run or while it is running.

The page is one HTML file that needs no network. ``--public`` leaves out whatever an adversary
against whom sampling amplifies may not see, and ``--figures`` writes every figure for a paper. A
page that is watched is served on 127.0.0.1 only and asks for news once a second; it shows nothing
that the finished report would not show.
"""

import time
import webbrowser
from pathlib import Path

import dpfl.report as pages
from dpfl.cli import options as o
from dpfl.cli.console import answer, note, note_files
from dpfl.core.checks import check
from dpfl.core.errors import FolderError

_PUBLIC = "Leave out whatever an outsider may not see; writes public.html."


def report(
    runs: list[Path] = o.arg("Folders of runs, or of one comparison."),
    path: Path | None = o.opt("File (default: report.html in the first folder).", None, "--out"),
    public: bool = o.flag("--public", _PUBLIC),
    figures: Path | None = o.opt("Folder for every figure as SVG and PNG."),
    json: bool = o.JSON,
) -> None:
    """Write one self-contained HTML page: what was promised, budgeted, spent and learned.

    Runs that are reported together must share their federation. The page for the public leaves out
    participation, values of single clients, and every metric without noise.
    """
    shown = pages.of_folders(runs)
    page = path or runs[0] / ("public.html" if public else "report.html")
    page = pages.write_report(shown, page, public=public)
    written = {"report": str(page)}
    if figures is not None:
        written["figures"] = str(figures)
        pages.write_figures([] if public else pages.all_charts(shown), figures)
    named = {kind.capitalize(): place for kind, place in written.items()}
    answer(json, written, note_files, named)


def watch(
    folder: Path = o.arg("Folder of a run, running or finished."),
    port: int = o.opt("Port on 127.0.0.1; 0 takes a free one.", 0, min=0, max=65535),
    open_browser: bool = o.flag("--open", "Open it in a browser."),
    until_done: bool = o.flag("--until-done", "End when the run has."),
) -> None:
    """Serve a run's report on this machine while it is running.

    The page updates by itself and can be reached from this machine only. Ctrl-C ends the page, not
    the run.
    """
    from dpfl.runs.folder import RunFolder

    check(
        RunFolder(folder).holds_run,
        str(folder),
        "holds no run",
        "name a folder that dpfl run prints",
        FolderError,
    )
    with pages.LiveServer(folder, port) as server:
        note(f"Live view: {server.address} (Ctrl-C ends it)")
        if open_browser:
            webbrowser.open(server.address)
        try:
            while not (until_done and RunFolder(folder).summary.exists()):
                time.sleep(0.5)
            time.sleep(2)  # a page that asks once a second gets the end
        except KeyboardInterrupt:
            note("ended; the run itself goes on")
