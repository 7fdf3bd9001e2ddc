"""The message that a site is working on, kept in its folder until the answer was sent.

A site that is killed finds it there, and answers it when it is started again.
"""

import time
from pathlib import Path

from flwr.app import Message as FlowerMessage

from dpfl.core.files import write_safely
from dpfl.deploy.fleet import pack, unpack


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
