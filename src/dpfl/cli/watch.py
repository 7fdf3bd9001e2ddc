"""``dpfl watch``: the report of a run, while it is running.

The page is served on 127.0.0.1 only and asks for news once a second. It shows nothing that the
finished report would not show.
"""

import time
import webbrowser
from pathlib import Path

from dpfl.cli import options as o
from dpfl.cli.console import note
from dpfl.core.checks import check
from dpfl.core.errors import FolderError


def watch(
    folder: Path = o.arg("Folder of a run, running or finished."),
    port: int = o.PORT,
    open_browser: bool = o.flag("--open", "Open it in a browser."),
    until_done: bool = o.flag("--until-done", "End when the run has."),
) -> None:
    """Serve a run's report on this machine while it is running.

    The page updates by itself and can be reached from this machine only. Ctrl-C ends the page, not
    the run.
    """
    from dpfl.report.live import LiveServer
    from dpfl.runs.folder import RunFolder

    held, remedy = RunFolder(folder).experiment.exists(), "name a folder that dpfl run prints"
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
