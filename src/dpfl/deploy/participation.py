"""Taking part: connect a site to its server, and stay connected while the server comes and goes.

A site that is started before its server waits for it, and says so. A wrong address, certificate,
key or clock is named in one sentence. Each message is written to the site's folder before the
server is told that it arrived, and is removed after its answer was sent: a site that is killed
answers it when it is started again.

The message that a site is working on, kept in its folder until the answer was sent.

A site that is killed finds it there, and answers it when it is started again.

Looking for a server: whether it is there, is the right one, and agrees on the time.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import ssl
import time
import urllib.error
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from flwr.app import Message as FlowerMessage

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, DataError, DpflError, PeerError
from dpfl.core.files import check_private, for_owner_only, hold_folder, parsed, write_safely
from dpfl.deploy.fleet import Fleet, NotTaken, ServerAway, StillConnected, pack, unpack
from dpfl.deploy.messages import (
    END,
    HELLO,
    SUM,
    TERMS,
    TRAIN,
    WENT_WRONG,
    Message,
    refusal,
    round_name,
    write_header,
)
from dpfl.deploy.processes import CLOCK_AHEAD, CLOCK_BEHIND, health, note_process
from dpfl.deploy.site_folder import (
    CONNECTED,
    INBOX,
    LOG,
    SAYS,
    SITE_PROCESS,
    SiteFolder,
    note_sent,
)
from dpfl.deploy.transport import received, reply_to
from dpfl.deploy.worker import Worker

_OTHER_NAMES = (62, 64)  # OpenSSL: host name mismatch, IP address mismatch


def check_server(address: str, certificate: Path | None) -> str | None:
    """Ask a server whether it is there: None if it is, or why it pays to ask again later.

    ``certificate`` is the study's ``ca.crt``, which the server's own must be signed by; None means
    without TLS. What only a person can change is raised: a certificate that is missing or another
    one's (:class:`~dpfl.core.errors.ConfigurationError`, :class:`~dpfl.core.errors.PeerError`), and
    clocks that are too far apart for the server to accept this site's signatures.
    """
    if certificate is not None:
        remedy = "put the study's certificate (ca.crt) there"
        check(certificate.exists(), str(certificate), "is missing", remedy)
        try:
            ssl.create_default_context(cafile=str(certificate))
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                str(certificate), f"is not a certificate ({error})", remedy
            ) from error
    try:
        _check_clock(address, health(address, certificate, 10))
        return None
    except urllib.error.HTTPError as error:
        return f"{address} answers with status {error.code}"
    except (urllib.error.URLError, OSError, ValueError) as error:
        return _why_not(address, certificate, getattr(error, "reason", error))


def _why_not(address: str, certificate: Path | None, reason: object) -> str:
    """Explain why a server could not be asked; raise what waiting does not change."""
    if isinstance(reason, ssl.SSLCertVerificationError) and reason.verify_code in _OTHER_NAMES:
        raise PeerError(
            address,
            f"its certificate is for other names ({reason.verify_message})",
            "use a name that is in it, or ask for it in [network] names (dpfl server renew)",
        )
    if isinstance(reason, ssl.SSLCertVerificationError):
        raise PeerError(
            address,
            f"its certificate is not signed by {certificate} ({reason.verify_message})",
            "ask the server's operator for the right ca.crt; do not connect without it",
        )
    if isinstance(reason, ssl.SSLError):
        return f"{address} does not speak TLS ({reason})"
    return f"{address} cannot be reached ({reason})"


def _check_clock(address: str, ahead: float) -> None:
    """Refuse a clock that differs from the server's by more than Flower allows."""
    far = not -CLOCK_BEHIND < ahead < CLOCK_AHEAD - 1.0
    side = "ahead of" if ahead > 0 else "behind"
    check(
        not far,
        "this machine's clock",
        f"is {abs(ahead):.1f} s {side} the server's at {address}, which rejects such a site",
        "set both clocks, for example with: timedatectl set-ntp true",
        PeerError,
    )


class Unusable(Exception):
    """A message that was kept cannot be answered any more."""


class Inbox:
    """The one message that was taken over from ``server``, kept until its answer was sent."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.server = ""

    def keep(self, message: FlowerMessage) -> None:
        """Write a message down, before the server is told that it arrived."""
        write_safely(self.path, self.server.encode() + b"\n" + pack(message), secret=True)

    def read(self) -> FlowerMessage | None:
        """Return the message; one that is damaged, too old or another server's is put away."""
        if not self.path.exists():
            return None
        server, _, packed = self.path.read_bytes().partition(b"\n")
        try:
            if server != self.server.encode():
                raise Unusable("it came under another address or certificate of a server")
            message = unpack(packed)
            if time.time() > message.metadata.created_at + message.metadata.ttl:
                raise Unusable("the server does not wait for its answer any more")
            return message
        except Unusable:
            self.empty()
            raise
        except Exception as error:  # whatever Flower's reader raises
            aside = self.path.with_suffix(".damaged")
            self.path.replace(aside)
            raise Unusable(f"it is damaged ({type(error).__name__}); see {aside}") from error

    def empty(self) -> None:
        """Forget the message: its answer was sent."""
        self.path.unlink(missing_ok=True)


RETRY_SECONDS = 2.0  # between looks for a server that is away
POLL_SECONDS, SOON_SECONDS = 0.5, 0.1  # between looks for a message; right after one
BUSY_SECONDS = 5.0  # for so long after a message another one is likely
IDLE_SECONDS = 600.0  # after which a worker that nobody asks is ended
EXPIRES_SECONDS = 60.0  # by then the server has forgotten a connection that gives no sign of life


@for_owner_only()
def take_part(folder: Path, tell: Callable[[str], None], *, insecure: bool) -> None:
    """Connect the site in ``folder`` and answer its server, until interrupted or rejected.

    ``tell`` is given each sentence for the people who watch. ``insecure`` leaves out TLS and keys.
    The folder is held: a site cannot run twice. Raises :class:`~dpfl.core.errors.PeerError` where
    the server rejects the site, or is another one.
    """
    site = SiteFolder(folder)
    check_private(folder)
    with closing(site.ledger()) as ledger:  # a missing or damaged one is refused before all else
        site.check_receipts(ledger)
    records = site.file.data.file
    check(
        records is None or (folder / records).exists(),
        str(records),
        "is missing: the site's records",
        "put them back",
        DataError,
    )
    server = site.file.server
    certificate, key = (
        (None, None) if insecure else (folder / server.certificate, folder / server.key)
    )
    with hold_folder(folder):
        note_process(folder / SITE_PROCESS, os.getpid())
        Participation(site, tell).run(server.address, certificate, key)


class Participation:
    """A site that takes part: its folder, its worker, and ``tell`` for those who watch it."""

    def __init__(self, site: SiteFolder, tell: Callable[[str], None]) -> None:
        self.site = site
        self._tell = tell
        self._worker = Worker(site.folder)
        self._inbox = Inbox(site.folder / INBOX)
        self._told: set[str] = set()

    def run(self, address: str, certificate: Path | None, key: Path | None) -> None:
        """Connect, answer, and connect again, until interrupted."""
        try:
            while True:
                self._wait_for_server(address, certificate)
                self._inbox.server = f"{address} {_fingerprint(certificate)}"
                with Fleet(address, certificate, key) as fleet:
                    self._serve(fleet)
        finally:
            self._worker.end()
            for name in (CONNECTED, SITE_PROCESS, SAYS):
                (self.site.folder / name).unlink(missing_ok=True)

    def tell(self, sentence: str) -> None:
        """Say something to those who watch, and to whoever asks for the site's status."""
        self._tell(sentence)
        with suppress(DpflError):  # a full disk is noticed where it matters
            write_safely(self.site.folder / SAYS, f"{sentence}\n".encode())

    def _say_once(self, sentence: str) -> None:
        """Say what has not been said since something was answered."""
        if sentence not in self._told:
            self._told.add(sentence)
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
            self._told.clear()
            self.tell(f"Site '{self.site.id}' is connected; Ctrl-C stops it safely")
            self._answer_kept(fleet)
            while True:
                message = fleet.pull()
                if message is not None:
                    self._inbox.keep(message)
                    fleet.confirm(message)
                    self._answer_kept(fleet)
                    continue
                unused = time.monotonic() - self._worker.used
                if unused > IDLE_SECONDS:
                    self._worker.end()
                time.sleep(SOON_SECONDS if unused < BUSY_SECONDS else POLL_SECONDS)
        except ServerAway as error:
            self._say_once(f"The server went away ({error}); waiting for it to come back")
            time.sleep(RETRY_SECONDS)

    def _connect(self, fleet: Fleet) -> None:
        """Connect; where an earlier connection of this very folder is still counted, end it.

        A copy of the folder on another disk or machine is not this folder: it waits, and is refused
        while the other one is connected.
        """
        noted = self.site.folder / CONNECTED
        own = _identity(self.site.folder)
        until = time.monotonic() + EXPIRES_SECONDS
        while True:
            try:
                node = fleet.connect()
                break
            except StillConnected:
                earlier = _noted_node(noted, own)
                if earlier is not None:
                    noted.unlink()
                    fleet.disconnect(earlier)
                    continue
                if time.monotonic() > until:
                    raise PeerError(
                        f"site '{self.site.id}'",
                        "another process is connected with this site's key",
                        "end it: a copy of a site's folder must not be used beside the site",
                    ) from None
                what = "The server still counts an earlier connection of this site"
                self._say_once(f"{what}; waiting up to {EXPIRES_SECONDS:g} s for its end")
                time.sleep(RETRY_SECONDS)
        write_safely(noted, json.dumps({"node": node, "folder": own}).encode())

    def _answer_kept(self, fleet: Fleet) -> None:
        """Answer the message that is kept in the folder, if there is one."""
        try:
            message = self._inbox.read()
        except Unusable as error:
            self.tell(f"A message that was kept is not answered: {error}")
            return
        if message is None:
            return
        began, (asked, said) = time.monotonic(), self._answered(message)
        try:
            fleet.push(reply_to(message, said))
            self._show(asked, said, time.monotonic() - began)
        except NotTaken as error:
            self.tell(f"The server did not take this answer ({error}); it will ask if it needs it")
        self._inbox.empty()
        if asked is not None and asked.header.get("kind") == END:
            self._worker.release()

    def _answered(self, message: FlowerMessage) -> tuple[Message | None, Message]:
        """Let the worker answer; return what was asked, if it can be read, and the answer.

        What no worker has answered is refused, and written down here.
        """
        asked = None
        said = refusal(WENT_WRONG, site=self.site.id, code=1)
        try:
            asked = received(message)
            return asked, self._worker.answer(asked, self.tell)
        except PeerError as error:
            said = refusal(str(error), code=error.exit_code)
        except DataError as error:
            self.site.log(str(error))
        note_sent(self.site.folder, asked, said)
        return asked, said

    def _show(self, asked: Message | None, said: Message, seconds: float) -> None:
        """Say what came of a message, now that its answer was sent."""
        header = {} if asked is None else asked.header
        kind = str(header.get("kind"))
        number = header.get("round")
        what = _KINDS.get(kind, "A message")
        if kind == TRAIN and isinstance(number, int):
            what = round_name(number).capitalize()
        if kind == SUM and isinstance(number, int):
            phase = _PHASES.get(str(header.get("phase")), "a phase")
            what = f"{round_name(number).capitalize()}, secure sum, {phase}"
        size = len(write_header(said.header)) + len(said.payload)
        if said.accepted:
            self._told.clear()
            self.tell(f"{what}: answered with {size} bytes after {seconds:.1f} s")
        else:  # who was refused asks again from time to time
            reason = said.reason
            reason = f"see {self.site.folder / LOG}" if reason == WENT_WRONG else reason
            self._say_once(f"{what}: refused ({reason})")


_KINDS = {
    HELLO: "A server asks who this is",
    TERMS: "Terms of a study",
    END: "The model of a study",
}
_PHASES = {
    "keys": "keys",
    "shares": "shares of secrets",
    "survivors": "list of survivors",
    "unmask": "unmasking",
}


def _identity(folder: Path) -> list[Any]:
    """Tell this very folder from a copy: its machine since it was started, and its place there."""
    status = folder.stat()
    boot = Path("/proc/sys/kernel/random/boot_id")
    started = boot.read_text().strip() if boot.exists() else ""
    return [socket.gethostname(), started, status.st_dev, status.st_ino]


def _fingerprint(certificate: Path | None) -> str:
    """Name the authority that vouches for a server."""
    return "" if certificate is None else hashlib.sha256(certificate.read_bytes()).hexdigest()


def _noted_node(path: Path, own: list[Any]) -> int | None:
    """Return the connection that this very folder had when its process was killed."""
    try:
        noted = parsed(path.read_text())
        return int(noted["node"]) if noted["folder"] == own else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
