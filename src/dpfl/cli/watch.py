"""``dpfl watch``: the page of a run, while it goes on."""

from __future__ import annotations

import time
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from dpfl.cli.console import err
from dpfl.core.errors import FolderError
from dpfl.report.live import LiveServer
from dpfl.runs.folder import RunFolder

Port = Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.", min=0, max=65535)]


def watch(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a run, going on or finished.", show_default=False)
    ],
    port: Port = 0,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    until_done: Annotated[bool, typer.Option("--until-done", help="End when the run has.")] = False,
) -> None:
    """Serve a run's report on this machine while the run goes on; the page updates by itself.
    Ctrl-C ends it.
    """
    if not RunFolder(folder).experiment.exists():
        raise FolderError(
            str(folder),
            "holds no run",
            "name the folder of a run, for instance runs/weiavg-digits-1",
        )
    with LiveServer(folder, port) as server:
        err.print(f"Live view: {server.address} (Ctrl-C ends it)", soft_wrap=True)
        if open_browser:
            webbrowser.open(server.address)
        try:
            while not (until_done and RunFolder(folder).summary.exists()):
                time.sleep(0.5)
            time.sleep(2)  # a page that asks once a second gets the end
        except KeyboardInterrupt:
            err.print("ended; the run itself goes on")
