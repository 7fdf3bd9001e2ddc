"""Show what happened: pages for a board and for an engineer, figures for papers, a live view.

The package itself can be called: ``dpfl.report("runs/first")`` writes the page of a run or of a
comparison into its folder.

>>> from dpfl import report
>>> dir(report)[:3]
['LiveServer', 'ReportInput', 'all_charts']

``write_report`` writes the page of a run or a comparison, ``write_ledger_page`` the privacy report
of a ledger for an ethics board, ``write_figures`` the charts of ``all_charts`` as files for papers.
``LiveServer`` serves the page of a running run. What draws is imported when it is used::

    shown = report.of_folders([Path("runs/weiavg-digits-1")])
    report.write_report(shown, "report.html")
    report.write_figures(report.all_charts(shown), Path("figures"))

How it is made: ``reading`` reads folders into the types of ``inputs``; ``outcome``, ``diagnostics``
and ``meaning`` turn them into charts; ``page``, ``public`` and ``ledger_page`` choose the values of
a page; ``rendering`` puts them into templates.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dpfl.core.errors import no_attribute

if TYPE_CHECKING:
    from dpfl.report.inputs import ReportInput as ReportInput
    from dpfl.report.ledger_page import write_ledger_page as write_ledger_page
    from dpfl.report.live import LiveServer as LiveServer
    from dpfl.report.page import all_charts as all_charts, write_report as write_report
    from dpfl.report.reading import of_folders as of_folders, of_results as of_results
    from dpfl.report.static import write_figures as write_figures

_HOMES = {
    "LiveServer": "live",
    "ReportInput": "inputs",
    "all_charts": "page",
    "of_folders": "reading",
    "of_results": "reading",
    "write_figures": "static",
    "write_ledger_page": "ledger_page",
    "write_report": "page",
}


def __dir__() -> list[str]:
    return sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise no_attribute(__name__, name, _HOMES)
    return getattr(import_module(f"dpfl.report.{_HOMES[name]}"), name)


class _Report(ModuleType):
    """This package, which can be called as :func:`dpfl.report`."""

    def __call__(
        self,
        source: Path | str | Sequence[Path | str],
        path: Path | str | None = None,
        *,
        public: bool = False,
    ) -> Path:
        """Write the page of a run, of several runs or of a comparison, and return its path.

        ``source`` is a folder, or several folders of runs on the same federation. ``path`` is the
        HTML file, by default ``report.html`` in the first folder. ``public`` writes the page for
        everyone (``public.html``), without names, participation and measured scores.
        """
        folders = [Path(source)] if isinstance(source, Path | str) else [Path(p) for p in source]
        where = path or folders[0] / ("public.html" if public else "report.html")
        written: Path = __getattr__("write_report")(folders, where, public=public)
        return written


sys.modules[__name__].__class__ = _Report
