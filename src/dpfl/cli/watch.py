"""``dpfl watch``: the report of a run, while it is running.

The page is served on 127.0.0.1 only and asks for news once a second. It shows nothing that the
finished report would not show.
"""

import time
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from dpfl.cli import options as o
from dpfl.cli.console import note
from dpfl.core.checks import check
from dpfl.core.errors import FolderError


def watch(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a run, running or finished.", show_default=False)
    ],
    port: o.Port = 0,
    open_browser: Annotated[bool, o.opt("Open it in a browser.", "--open")] = False,
    until_done: Annotated[bool, o.opt("End when the run has.", "--until-done")] = False,
) -> None:
    """Serve a run's report on this machine while it is running.

    The page updates by itself and can be reached from this machine only. Ctrl-C ends the page, not
    the run.
    """
    from dpfl.report.live import LiveServer
    from dpfl.runs.folder import RunFolder

    remedy = "name the folder of a run, as dpfl run prints it"
    held = RunFolder(folder).experiment.exists()
    check(held, str(folder), "holds no run", remedy, FolderError)
    with LiveServer(folder, port) as server:
        note(f"Live view: {server.address} (Ctrl-C ends it)")
        if open_browser:
            webbrowser.open(server.address)
        try:
            while not (until_done and RunFolder(folder).summary.exists()):
                time.sleep(0.5)
            time.sleep(2)  # a page that asks once a second gets the end
        except KeyboardInterrupt:
            note("ended; the run itself goes on")
