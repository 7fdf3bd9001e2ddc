"""The page of a run that goes on: served on this machine only, and up to date by itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dpfl.core.errors import FolderError, PeerError
from dpfl.report.page import Page, full_page, going_on_page, render
from dpfl.report.reading import of_folders, read_run
from dpfl.report.sections import paragraph
from dpfl.runs.folder import RunFolder

HOST = "127.0.0.1"
NEWS = "/news.json"


def page_of(folder: Path) -> tuple[Page, str]:
    """The page as the folder tells it now, and a name for this state of it."""
    place = RunFolder(folder)
    if not place.experiment.exists():
        waiting = "<h2>Waiting</h2>" + paragraph(f"{folder.name or 'The folder'} holds no run yet.")
        return Page(
            title="waiting for a run", parts={"summary": waiting}, charts=[], finished=False
        ), "waiting"
    run = read_run(folder, finished=False)
    if run.finished:
        return full_page(of_folders([folder])), f"{len(run.history)}-finished"
    return going_on_page(run), f"{len(run.history)}-going-on"


def _readable(folder: Path) -> tuple[Page, str]:
    """The page; or, while a file is being written or is broken, a page that says so."""
    try:
        return page_of(folder)
    except FolderError as error:
        said = {"summary": "<h2>Waiting</h2>" + paragraph(str(error))}
        return Page(title="waiting", parts=said, charts=[], finished=False), "unreadable"


class LiveServer:
    """Serves one folder's page on 127.0.0.1. It only reads, and answers nobody who came under
    another name.
    """

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder = folder
        try:
            self._server = ThreadingHTTPServer((HOST, port), _handler(folder, self._known))
        except OSError as error:
            raise PeerError(
                f"{HOST}:{port}",
                f"cannot be listened on ({error.strerror})",
                "choose another --port, or 0 for a free one",
            ) from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="dpfl live view", daemon=True
        )

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self._server.server_address[1]}/"

    def _known(self) -> set[str]:
        port = self._server.server_address[1]
        return {f"{HOST}:{port}", f"localhost:{port}"}

    def __enter__(self) -> LiveServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(folder: Path, known: Callable[[], set[str]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A web page elsewhere can point its own name at 127.0.0.1: it must not read what is the
            # operator's.
            if self.headers.get("Host") not in known():
                self._send(403, "text/plain", b"this page is for this machine only\n")
            elif self.path == "/":
                page, version = _readable(folder)
                self._send(
                    200,
                    "text/html; charset=utf-8",
                    render(page, live=NEWS, version=version).encode(),
                )
            elif self.path == NEWS:
                self._send(200, "application/json", json.dumps(_news(folder)).encode())
            else:
                self._send(404, "text/plain", b"there is no such page\n")

        def _send(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            try:
                self.end_headers()
                self.wfile.write(body)
            except (
                BrokenPipeError,
                ConnectionResetError,
            ):  # the reader left: that is no error of ours
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            """Say nothing: the terminal belongs to the progress bar."""

    return Handler


def _news(folder: Path) -> dict[str, Any]:
    page, version = _readable(folder)
    return {
        "version": version,
        "title": page.title,
        "parts": page.parts,
        "figures": page.figures(),
        "finished": page.finished,
    }
