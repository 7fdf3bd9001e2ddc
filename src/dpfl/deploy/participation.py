"""Taking part: connect a site to its server, and stay connected while the server comes and goes.

A site that is started before its server waits for it, and says so. A wrong address, certificate,
key or clock is named in one sentence. Each message is written to the site's folder before the
server is told that it arrived, and is removed after its answer was sent: a site that is killed
answers it when it is started again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app import Message as FlowerMessage

from dpfl.core.errors import DpflError, PeerError
from dpfl.core.files import write_safely
from dpfl.deploy.client_app import answer_with
from dpfl.deploy.fleet import Fleet, ServerAway, StillConnected, pack, unpack
from dpfl.deploy.processes import check_server
from dpfl.deploy.requests import END
from dpfl.deploy.site_folder import CONNECTED, INBOX, SiteFolder
from dpfl.deploy.worker import Worker
from dpfl.runs.folder import RunFolder
from dpfl.runs.processes import this_folder

RETRY_SECONDS = 2.0  # between looks for a server that is away
POLL_SECONDS = 0.5
IDLE_SECONDS = 600.0  # after which a worker that nobody asks is ended
EXPIRES_SECONDS = 60.0  # by then the server has forgotten a connection that gives no sign of life


def take_part(folder: Path, tell: Callable[[str], None], *, insecure: bool) -> None:
    """Connect the site in ``folder`` and answer its server, until interrupted or rejected.

    ``tell`` is given each sentence for the people who watch. ``insecure`` leaves out TLS and keys.
    The folder is held: a site cannot run twice. Raises :class:`~dpfl.core.errors.PeerError` where
    the server rejects the site, or is another one.
    """
    site = SiteFolder(folder)
    site.ledger().close()  # a missing or damaged ledger is refused before anything else
    with RunFolder(folder).locked():
        Participation(site, tell, insecure=insecure).run()


@dataclass
class Participation:
    """A site that takes part: its folder, its worker, and who watches it."""

    site: SiteFolder
    tell: Callable[[str], None]
    insecure: bool = field(kw_only=True)

    def __post_init__(self) -> None:
        self._worker = Worker(self.site.folder)
        self._told = ""

    def run(self) -> None:
        """Connect, answer, and connect again, until interrupted."""
        server, folder = self.site.file.server, self.site.folder
        certificate = None if self.insecure else folder / server.certificate
        key = None if self.insecure else folder / server.key
        try:
            while True:
                self._wait_for_server(server.address, certificate)
                with Fleet(server.address, certificate, key) as fleet:
                    self._serve(fleet)
        finally:
            self._worker.end()
            (folder / CONNECTED).unlink(missing_ok=True)

    def _say_once(self, sentence: str) -> None:
        if sentence != self._told:
            self._told = sentence
            self.tell(sentence)

    def _wait_for_server(self, address: str, certificate: Path | None) -> None:
        """Ask for the server until it is there; what only a person can change is raised."""
        while (problem := check_server(address, certificate)) is not None:
            self._say_once(f"Waiting for the server: {problem} (Ctrl-C stops)")
            time.sleep(RETRY_SECONDS)

    def _serve(self, fleet: Fleet) -> None:
        """Answer messages until the server goes away."""
        try:
            self._connect(fleet)
            self._say_once(f"Site '{self.site.id}' is connected; Ctrl-C stops it safely")
            self._answer_kept(fleet)
            while True:
                message = fleet.pull()
                if message is not None:
                    write_safely(self.site.folder / INBOX, pack(message), secret=True)
                    fleet.confirm(message)
                    self._answer_kept(fleet)
                    continue
                if time.monotonic() - self._worker.used > IDLE_SECONDS:
                    self._worker.end()
                time.sleep(POLL_SECONDS)
        except ServerAway as error:
            self._say_once(f"The server went away ({error}); waiting for it to come back")
            time.sleep(RETRY_SECONDS)

    def _connect(self, fleet: Fleet) -> None:
        """Connect; where an earlier connection of this very folder is still counted, end it.

        A copy of the folder on another disk or machine is not this folder: it waits, and is refused
        while the other one is connected.
        """
        noted, own = self.site.folder / CONNECTED, this_folder(self.site.folder)
        until = time.monotonic() + EXPIRES_SECONDS
        while True:
            try:
                node = fleet.connect()
                break
            except StillConnected:
                earlier = _read(noted)
                if earlier.get("folder") == own:
                    fleet.disconnect(int(earlier["node"]))
                    noted.unlink()
                    continue
                if time.monotonic() > until:
                    problem = "another process is connected with this site's key"
                    remedy = "end it: a copy of a site's folder must not be used beside the site"
                    raise PeerError(f"site '{self.site.id}'", problem, remedy) from None
                self._say_once("The server still counts an earlier connection of this site")
                time.sleep(RETRY_SECONDS)
        write_safely(noted, json.dumps({"node": node, "pid": os.getpid(), "folder": own}).encode())

    def _answer_kept(self, fleet: Fleet) -> None:
        """Answer the message that is kept in the folder, if there is one."""
        inbox = self.site.folder / INBOX
        if not inbox.exists():
            return
        message = unpack(inbox.read_bytes())
        fleet.push(self._answered(message))
        inbox.unlink()

    def _answered(self, message: FlowerMessage) -> FlowerMessage:
        began = time.monotonic()
        reply, asked, said = answer_with(message, lambda one: self._worker.answer(one, self.tell))
        self.tell(_event(asked, said, time.monotonic() - began))
        if asked.get("kind") == END:
            self._worker.end()
        return reply
