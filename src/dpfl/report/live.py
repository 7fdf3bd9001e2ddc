"""The page of a running run, served on this machine only, and up to date by itself.

The page asks ``/news.json`` once a second, and replaces its parts and figures when the folder has
changed. It stops asking when the run has ended::

    with LiveServer(Path("runs/weiavg-digits-1")) as server:
        print(server.address)
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

from dpfl.core.errors import FolderError, PeerError
from dpfl.report.page import full_page, running_page
from dpfl.report.reading import of_folders, read_run
from dpfl.report.rendering import Page, content_policy, render
from dpfl.runs.folder import RunFolder

HOST = "127.0.0.1"
NEWS = "/news.json"


def page_of(folder: Path) -> tuple[Page, str]:
    """Return the page of the folder as it is now, and a name for this state of it.

    While there is no run, or a file cannot be read, the page says so.
    """
    if not RunFolder(folder).holds_run:
        said = f"{folder.name or 'The folder'} holds no run yet."
        return _waiting("waiting for a run", said), "waiting"
    try:
        run = read_run(folder, finished=False)
        page = full_page(of_folders([folder])) if run.finished else running_page(run)
        return page, f"{len(run.history)}-{'finished' if run.finished else 'running'}"
    except FolderError as error:
        return _waiting("waiting", str(error)), "unreadable"


def _waiting(title: str, said: str) -> Page:
    return Page(title=title, template="waiting", values={"said": said}, finished=False)


class LiveServer(ThreadingHTTPServer):
    """Serves the page of one folder on 127.0.0.1, as a context manager.

    It only reads, and refuses requests that were made under another host name. ``port`` 0 takes a
    free one.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder = folder
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise PeerError(
                f"{HOST}:{port}",
                f"cannot be listened on ({error.strerror})",
                "choose another --port, or 0 for a free one",
            ) from error

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.server_port}/"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, name="dpfl live view", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Answers requests for the page, and for its news."""

    server: LiveServer

    def do_GET(self) -> None:
        """Answer one request."""
        # A web page elsewhere can point its own name at 127.0.0.1: it must not read this one.
        names = [f"{name}:{self.server.server_port}" for name in (HOST, "localhost")]
        if self.headers.get("Host") not in names:
            self._send(403, "text/plain", "this page is for this machine only\n")
        elif self.path == "/":
            page, version = page_of(self.server.folder)
            html = render(page, live=NEWS, version=version)
            self._send(200, "text/html", html, content_policy(page, live=NEWS))
        elif self.path == NEWS:
            self._send(200, "application/json", _news(self.server.folder))
        else:
            self._send(404, "text/plain", "there is no such page\n")

    def _send(self, status: int, kind: str, text: str, policy: str = "default-src 'none'") -> None:
        body = text.encode()
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        headers |= {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        headers["Content-Security-Policy"] = policy
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        try:
            self.end_headers()
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):  # the reader left
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Print nothing: the terminal belongs to the progress bar."""


def _news(folder: Path) -> str:
    """The page as JSON, for a page that is already open."""
    page, version = page_of(folder)
    told = {"version": version, "title": page.title, "finished": page.finished}
    return json.dumps({**told, "parts": page.parts, "figures": page.figures()})
