"""Listening on an open port: how many connections there may be, and how long each may be silent.

A server library accepts whatever comes, and waits for it. Anyone who can reach the port could then
hold it with connections that never send a request. Here there is a limit to their number. A
connection that has sent no request within ``SILENT_SECONDS`` is closed; where there are too many,
the oldest one that has not proved to be a site's makes room for the next.
"""

import asyncio
import socket
import ssl
import time
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

SILENT_SECONDS = 10.0
HANDSHAKE_SECONDS = 10.0
_LARGEST_HEADER = 16_384
_SWEEP_SECONDS = 1.0
CONNECTION = "connection"  # where a request's state holds its connection


class Connection(H11Protocol):
    """One connection; ``trusted`` once a request on it has proved to be a site's."""

    trusted = False

    def __init__(self, config: uvicorn.Config, state: ServerState, since: float) -> None:
        super().__init__(config, state, {CONNECTION: self})
        self.since = since

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def on_response_complete(self) -> None:
        """Begin to count the silence anew."""
        self.since = time.monotonic()
        super().on_response_complete()


class Listener:
    """Accepts connections for an application, at most ``most`` at a time."""

    def __init__(self, app: Any, most: int, certificate: str | None, key: str | None) -> None:
        self._most = most
        self._config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            timeout_keep_alive=int(SILENT_SECONDS),
            h11_max_incomplete_event_size=_LARGEST_HEADER,
        )
        self._config.load()
        self._state = ServerState()
        self._tls: ssl.SSLContext | None = None
        if certificate is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(certificate, key)
        self._shaking: dict[socket.socket, float] = {}  # connections whose handshake goes on

    @property
    def connections(self) -> list[Connection]:
        """The connections that are open now."""
        return [one for one in self._state.connections if isinstance(one, Connection)]

    async def serve(self, listening: socket.socket) -> None:
        """Accept connections until cancelled."""
        loop, sweeping = asyncio.get_running_loop(), asyncio.create_task(self._sweep())
        listening.setblocking(False)
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                try:
                    accepted, _ = await loop.sock_accept(listening)
                except OSError:  # no file descriptor is left: connections must end first
                    await asyncio.sleep(_SWEEP_SECONDS)
                    continue
                if not self._make_room():
                    accepted.close()
                    continue
                task = asyncio.create_task(self._take(accepted))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            sweeping.cancel()
            for one in self.connections:
                one.transport.abort()

    def _make_room(self) -> bool:
        """Close the oldest connection that is no site's if there are too many; False if all are."""
        if len(self._state.connections) + len(self._shaking) < self._most:
            return True
        strangers = [one for one in self.connections if not one.trusted]
        oldest = min(strangers, key=lambda one: one.since, default=None)
        if self._shaking and (oldest is None or next(iter(self._shaking.values())) < oldest.since):
            first = next(iter(self._shaking))
            del self._shaking[first]
            first.close()
            return True
        if oldest is None:
            return False
        self._state.connections.discard(oldest)
        oldest.transport.abort()
        return True

    async def _take(self, accepted: socket.socket) -> None:
        """Make a connection of an accepted socket; whoever does not finish TLS is dropped."""
        loop, since = asyncio.get_running_loop(), time.monotonic()
        self._shaking[accepted] = since
        try:
            await loop.connect_accepted_socket(
                lambda: Connection(self._config, self._state, since),
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_SECONDS if self._tls else None,
            )
        except OSError:  # ssl.SSLError and timeouts are among them
            accepted.close()
        finally:
            self._shaking.pop(accepted, None)

    async def _sweep(self) -> None:
        """Close connections that have been silent for too long."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            limit = time.monotonic() - SILENT_SECONDS
            for one in self.connections:
                if not one.busy and one.since < limit:
                    one.transport.abort()
