"""Show what happened: pages for a board and for an engineer, figures for papers, a live view.

>>> from dpfl import report
>>> report.__all__[:3]
['LiveServer', 'ReportInput', 'all_charts']

``write_report`` writes the page of a run or a comparison, ``write_ledger_page`` the privacy report
of a ledger for an ethics board, ``write_figures`` the charts of ``all_charts`` as files for papers,
``print_page`` a page as a PDF. ``LiveServer`` serves the page of a running run. What draws is
imported when it is used::

    shown = report.of_folders([Path("runs/weiavg-digits-1")])
    report.write_report(shown, "report.html")
    report.write_figures(report.all_charts(shown), Path("figures"))

How it is made: ``reading`` reads folders into the types of ``inputs``; ``outcome``, ``diagnostics``
and ``meaning`` turn them into charts; ``page``, ``public`` and ``ledger_page`` choose the values of
a page; ``rendering`` puts them into templates.
"""

from dpfl.report.inputs import ReportInput
from dpfl.report.ledger_page import write_ledger_page
from dpfl.report.live import LiveServer
from dpfl.report.page import all_charts, write_report
from dpfl.report.printing import print_page
from dpfl.report.reading import of_folders, of_results
from dpfl.report.static import write_figures

__all__ = [
    "LiveServer",
    "ReportInput",
    "all_charts",
    "of_folders",
    "of_results",
    "print_page",
    "write_figures",
    "write_ledger_page",
    "write_report",
]
