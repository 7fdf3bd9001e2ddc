"""``dpfl report``: one page about one run or many, for a board and for an engineer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpfl.cli import options as o
from dpfl.cli.console import err, print_json
from dpfl.report import all_charts, of_folders, print_page, write_figures, write_report


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders of runs, or of one comparison.", show_default=False),
    ],
    path: Annotated[
        Path | None,
        typer.Option(
            "--out", help="File (default: report.html in the first folder).", show_default=False
        ),
    ] = None,
    public: Annotated[
        bool,
        typer.Option(
            "--public", help="Leave out whatever an outsider may not see; writes public.html."
        ),
    ] = False,
    pdf: Annotated[
        bool, typer.Option("--pdf", help="Print it to a PDF as well (needs Chromium).")
    ] = False,
    figures: Annotated[
        Path | None,
        typer.Option(help="Folder for every figure as SVG and PNG.", show_default=False),
    ] = None,
    json: o.Json = False,
) -> None:
    """Write one self-contained HTML page: what was promised, spent and learned."""
    shown = of_folders(runs)
    target = path or runs[0] / ("public.html" if public else "report.html")
    page = write_report(shown, target, public=public)
    written = {"report": str(page)}
    if pdf:
        written["pdf"] = str(print_page(page, page.with_suffix(".pdf")))
    if figures is not None:
        written["figures"] = str(figures)
        write_figures([] if public else all_charts(shown), figures)
    if json:
        print_json(written)
        return
    for kind, place in written.items():
        err.print(f"{kind.capitalize()}: {place}", soft_wrap=True)
