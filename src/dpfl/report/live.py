"""The page of a running run, served on this machine only, and up to date by itself.

The page asks ``/news.json`` once a second, and replaces its parts and figures when the folder has
changed. It stops asking when the run has ended::

    with LiveServer(Path("runs/weiavg-digits-1")) as server:
        print(server.address)
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from dpfl.core.errors import FolderError, PeerError
from dpfl.report.page import full_page, running_page
from dpfl.report.reading import of_folders, read_run
from dpfl.report.rendering import Page, render
from dpfl.runs.folder import RunFolder

HOST = "127.0.0.1"
NEWS = "/news.json"


def page_of(folder: Path) -> tuple[Page, str]:
    """Return the page of the folder as it is now, and a name for this state of it.

    While there is no run, or a file cannot be read, the page says so.
    """
    if not RunFolder(folder).experiment.exists():
        said = f"{folder.name or 'The folder'} holds no run yet."
        return _waiting("waiting for a run", said), "waiting"
    try:
        run = read_run(folder, finished=False)
        if run.finished:
            return full_page(of_folders([folder])), f"{len(run.history)}-finished"
        return running_page(run), f"{len(run.history)}-running"
    except FolderError as error:
        return _waiting("waiting", str(error)), "unreadable"


def _waiting(title: str, said: str) -> Page:
    return Page(title=title, template="waiting", values={"said": said}, finished=False)


class LiveServer:
    """Serves the page of one folder on 127.0.0.1, as a context manager.

    It only reads, and refuses requests that were made under another host name. ``port`` 0 takes a
    free one.
    """

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder = folder
        try:
            self._server = ThreadingHTTPServer((HOST, port), _handler(folder, self._names))
        except OSError as error:
            problem = f"cannot be listened on ({error.strerror})"
            remedy = "choose another --port, or 0 for a free one"
            raise PeerError(f"{HOST}:{port}", problem, remedy) from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="dpfl live view", daemon=True
        )

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self._server.server_address[1]}/"

    def _names(self) -> set[str]:
        port = self._server.server_address[1]
        return {f"{HOST}:{port}", f"localhost:{port}"}

    def __enter__(self) -> LiveServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(folder: Path, names: Callable[[], set[str]]) -> type[BaseHTTPRequestHandler]:
    """Answers requests for one folder; ``names`` gives the host names it answers under."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A web page elsewhere can point its own name at 127.0.0.1: it must not read this one.
            if self.headers.get("Host") not in names():
                self._send(403, "text/plain", "this page is for this machine only\n")
            elif self.path == "/":
                page, version = page_of(folder)
                self._send(200, "text/html", render(page, live=NEWS, version=version))
            elif self.path == NEWS:
                self._send(200, "application/json", _news(folder))
            else:
                self._send(404, "text/plain", "there is no such page\n")

        def _send(self, status: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            try:
                self.end_headers()
                self.wfile.write(body)
            except (BrokenPipeError, ConnectionResetError):  # the reader left
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Print nothing: the terminal belongs to the progress bar."""

    return Handler


def _news(folder: Path) -> str:
    """The page as JSON, for a page that is already open."""
    page, version = page_of(folder)
    return json.dumps(
        {
            "version": version,
            "title": page.title,
            "parts": page.parts,
            "figures": page.figures(),
            "finished": page.finished,
        }
    )
