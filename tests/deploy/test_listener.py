"""The open port: silent connections are closed, and there is a limit to their number."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dpfl.deploy import listener as module
from dpfl.deploy.credentials import make_certificates
from dpfl.deploy.listener import CONNECTION, Limits, Listener

MOST, EACH, SILENT = 8, 3, 2.0
running: dict[str, Listener] = {}  # the one of the test that runs


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A listener on this machine; a request to /trust proves that its sender is a site."""
    monkeypatch.setattr(module, "SILENT_SECONDS", SILENT)
    monkeypatch.setattr(module, "_SWEEP_SECONDS", 0.1)

    async def answer(request: Request) -> Response:
        path = request.url.path
        if path.startswith("/trust"):
            request.scope["state"][CONNECTION].prove(path)
        if path.endswith("/slow"):
            await asyncio.sleep(60)
        return Response("ok")

    app = Starlette(routes=[Route("/{path:path}", answer)])
    limits = Limits(strangers=MOST, each=EACH, seconds=2.0)
    listening, ready = socket.create_server(("127.0.0.1", 0)), threading.Event()
    own: dict[str, Any] = {}

    async def serve() -> None:
        own["loop"], own["end"] = asyncio.get_running_loop(), asyncio.Event()
        running["listener"] = Listener(app, limits)
        serving = asyncio.create_task(running["listener"].serve(listening))
        ready.set()
        await own["end"].wait()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await asyncio.sleep(0.1)  # connections that were aborted are closed now

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(10)
    yield listening.getsockname()[1]
    own["loop"].call_soon_threadsafe(own["end"].set)
    thread.join(timeout=10)
    listening.close()


def connect(port: int) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=5)
    made.settimeout(5)
    return made


def get(own: socket.socket, path: str) -> bytes:
    own.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    answer = b""
    while not answer.endswith(b"\r\n\r\nok"):
        piece = own.recv(1000)
        assert piece, "the connection was closed"
        answer += piece
    return answer


def closed(own: socket.socket) -> bool:
    try:
        return own.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_connection_that_says_nothing_or_little_is_closed(port: int) -> None:
    silent, slow = connect(port), connect(port)
    slow.sendall(b"GET / HTTP/1.1\r\n")
    began = time.monotonic()
    with suppress(OSError):
        while time.monotonic() - began < 4 * SILENT:
            time.sleep(0.2)
            slow.sendall(b"x: y\r\n")
    assert time.monotonic() - began < 4 * SILENT  # the line was cut, however much was said
    assert closed(silent)
    assert closed(slow)
    silent.close()
    slow.close()


def test_a_connection_is_kept_between_requests_and_closed_when_it_is_silent_for_long(
    port: int,
) -> None:
    own = connect(port)
    for _ in range(4):
        assert b"200 OK" in get(own, "/trust")
        time.sleep(0.2)
    assert closed(own)
    own.close()


def test_strangers_make_room_for_the_next_and_sites_do_not(port: int) -> None:
    site = connect(port)
    assert b"200 OK" in get(site, "/trust")
    strangers = [connect(port) for _ in range(5 * MOST)]
    time.sleep(0.3)
    assert b"200 OK" in get(site, "/trust")  # a site keeps its connection
    late = connect(port)
    assert b"200 OK" in get(late, "/")  # and whoever comes is heard
    assert closed(strangers[0])  # the oldest stranger has made room
    for one in (site, late, *strangers):
        one.close()


def test_a_header_without_end_is_cut_off(port: int) -> None:
    own = connect(port)
    try:
        own.sendall(b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 100_000)
        answer = own.recv(1000)
    except (ConnectionResetError, BrokenPipeError):
        answer = b""
    own.close()
    assert b"200" not in answer


def test_a_stranger_gets_one_answer_and_no_more(port: int) -> None:
    """Who may ask again and again would always be younger than a site that is just connecting."""
    own = connect(port)
    assert b"200 OK" in get(own, "/")
    assert closed(own)
    own.close()


def test_a_site_that_opens_many_connections_takes_none_from_others(port: int) -> None:
    many, most = [], 0
    for _ in range(4 * EACH):
        many.append(connect(port))
        assert b"200 OK" in get(many[-1], "/trust/greedy")
        owners = [one.owner for one in running["listener"].connections]
        most = max(most, owners.count("/trust/greedy"))
    other = connect(port)
    assert b"200 OK" in get(other, "/trust/other")
    assert closed(many[0])
    assert 1 < most <= EACH
    for one in (other, *many):
        one.close()


def test_a_request_that_never_ends_is_cut_off(port: int) -> None:
    own, began = connect(port), time.monotonic()
    own.sendall(b"GET /trust/slow HTTP/1.1\r\nhost: x\r\n\r\n")
    assert closed(own)
    assert 1.5 < time.monotonic() - began < 5
    own.close()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_unfinished_handshakes_are_counted_and_freed(tmp_path: Path) -> None:
    """Strangers that never finish TLS hold no more than their share, however fast they come."""
    certificates = tmp_path / "certificates"
    make_certificates(certificates, ["127.0.0.1"])

    async def flood() -> tuple[int, int]:
        files = (str(certificates / "server.crt"), str(certificates / "server.key"))
        limits = Limits(strangers=MOST, each=EACH, seconds=2.0)
        listener = Listener(Starlette(), limits, *files)
        listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        serving = asyncio.create_task(listener.serve(listening))
        before, most, own = open_files(), 0, []
        for _ in range(100):
            one = socket.socket()
            one.setblocking(False)
            await asyncio.get_running_loop().sock_connect(one, listening.getsockname())
            own.append(one)
            most = max(most, open_files() - before - len(own))
        await asyncio.sleep(0.2)
        left = open_files() - before - len(own)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await asyncio.sleep(0.1)
        for one in (*own, listening):
            one.close()
        return most, left

    most, left = asyncio.run(flood())
    assert most <= MOST + 5
    assert left <= MOST + 1
