"""Listening on an open port: how many connections there may be, and how long each may take.

A server library accepts whatever comes, and waits for it. Anyone who can reach the port could then
hold it with connections that never send a request. Here strangers get few connections and little
time: one that has not proved to be a site's within ``SILENT_SECONDS`` is closed, and so is one
whose first request did not prove it. Where there are too many, one of the address that holds the
most makes room, first those that say nothing. A site has a number of connections of its own, which
no other can take.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

SILENT_SECONDS = 10.0
_LARGEST_HEADER = 16_384
_SWEEP_SECONDS = 1.0
_HESITATION_SECONDS = 1.0  # after TLS was agreed on, and before a request came
_HESITATES, _CONNECTING, _READY = range(3)  # what a stranger's connection is worth
CONNECTION = "connection"  # where a request's state holds its connection


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How many connections strangers may have together, and a site each; seconds of a request."""

    strangers: int
    each: int
    seconds: float


class Connection(H11Protocol):
    """One connection; ``owner`` is the site's key once a request on it has proved to be a site's.

    ``since``: when it began, or when its last request was answered, by the monotonic clock.
    """

    owner: Hashable = None

    def __init__(self, listener: Listener, address: str, since: float) -> None:
        super().__init__(listener.config, listener.state, {CONNECTION: self})
        self.address = address
        self.since = since
        self._listener = listener
        self.ready = since

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Note when TLS was agreed on: whoever is a site asks at once."""
        self.ready = time.monotonic()
        super().connection_made(transport)

    def worth(self, now: float) -> int:
        """How much a stranger's connection is worth keeping."""
        return _HESITATES if now - self.ready > _HESITATION_SECONDS else _READY

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def prove(self, owner: Hashable) -> None:
        """Note whose request this is, and begin to count its seconds."""
        self.owner, self.since = owner, time.monotonic()
        self._listener.limit(owner)

    def on_response_complete(self) -> None:
        """Begin to count the silence of a site anew, and close the connection of a stranger."""
        if self.owner is None:
            self.transport.close()
        self.since = time.monotonic()
        super().on_response_complete()

    def end(self) -> None:
        """Close the connection at once."""
        self._listener.state.connections.discard(self)
        self.transport.abort()


@dataclass(frozen=True, kw_only=True, eq=False)
class Handshake:
    """A connection that was accepted, and is not ready for a request yet."""

    address: str
    since: float
    task: asyncio.Task[None]

    def worth(self, now: float) -> int:
        """How much it is worth keeping, among the connections of strangers."""
        return _CONNECTING

    def end(self) -> None:
        """Give it up; asyncio aborts what it has made of the socket."""
        self.task.cancel()


class Listener:
    """Accepts connections for an application, within limits."""

    def __init__(
        self, app: Any, limits: Limits, certificate: str | None = None, key: str | None = None
    ) -> None:
        self.limits, self.state = limits, ServerState()
        self.config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            timeout_keep_alive=int(SILENT_SECONDS),
            h11_max_incomplete_event_size=_LARGEST_HEADER,
        )
        self.config.load()
        self._tls: ssl.SSLContext | None = None
        if certificate is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(certificate, key)
        self._handshakes: set[Handshake] = set()

    @property
    def connections(self) -> list[Connection]:
        """The connections that are open now."""
        return [one for one in self.state.connections if isinstance(one, Connection)]

    async def serve(self, listening: socket.socket) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        sweeping = asyncio.create_task(self._sweep())
        listening.setblocking(False)
        try:
            while True:
                try:
                    accepted, address = await loop.sock_accept(listening)
                except OSError:  # no file descriptor is left: connections must end first
                    await asyncio.sleep(_SWEEP_SECONDS)
                    continue
                self._make_room()
                self._take(accepted, str(address[0]))
                await asyncio.sleep(0)  # others have a turn, however many are waiting
        finally:
            sweeping.cancel()
            for one in self.connections:
                one.end()
            for handshake in list(self._handshakes):
                handshake.end()

    def _strangers(self) -> Iterator[Connection | Handshake]:
        yield from self._handshakes
        yield from (one for one in self.connections if one.owner is None)

    def _make_room(self) -> None:
        """Close a connection of the address with the most, where strangers have many.

        It is the oldest of those that say nothing, else of those that have not agreed on TLS.
        """
        strangers = list(self._strangers())
        now = time.monotonic()
        if len(strangers) >= self.limits.strangers:
            held = Counter(one.address for one in strangers)
            oldest = min(strangers, key=lambda x: (-held[x.address], x.worth(now), x.since))
            if isinstance(oldest, Handshake):
                self._handshakes.discard(oldest)
            oldest.end()

    def limit(self, owner: Hashable) -> None:
        """Close a site's oldest connection where it has too many."""
        own = [one for one in self.connections if one.owner == owner]
        if len(own) > self.limits.each:
            min(own, key=lambda one: one.since).end()

    def _take(self, accepted: socket.socket, address: str) -> None:
        """Make a connection of an accepted socket; whoever does not finish TLS is dropped."""
        since = time.monotonic()
        task = asyncio.create_task(self._shake_hands(accepted, address, since))
        handshake = Handshake(address=address, since=since, task=task)
        self._handshakes.add(handshake)
        task.add_done_callback(partial(self._taken, handshake, accepted))

    async def _shake_hands(self, accepted: socket.socket, address: str, since: float) -> None:
        with suppress(OSError):  # ssl.SSLError and timeouts are among them
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(self, address, since),
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=SILENT_SECONDS if self._tls else None,
            )
            return
        accepted.close()

    def _taken(
        self, handshake: Handshake, accepted: socket.socket, task: asyncio.Task[None]
    ) -> None:
        """Forget a handshake that is over; one that never began still has its socket."""
        self._handshakes.discard(handshake)
        if task.cancelled():
            accepted.close()

    async def _sweep(self) -> None:
        """Close connections that have been silent, or busy with one request, for too long."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            now = time.monotonic()
            for one in self.connections:
                working = one.busy and one.owner is not None
                if now - one.since > (self.limits.seconds if working else SILENT_SECONDS):
                    one.end()
