"""Our letters over Flower's messages. Answers are matched by the message they answer, not by who
seems to have sent them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from flwr.app import ConfigRecord, Message as FlowerMessage, MessageType, RecordDict
from flwr.serverapp import Grid

from dpfl.core.errors import PeerError
from dpfl.deploy.messages import Message, read_header, write_header

RECORD = "dpfl"
_POLL = 0.2


def to_record(letter: Message) -> RecordDict:
    """A letter as Flower carries it."""
    return RecordDict(
        {RECORD: ConfigRecord({"header": write_header(letter.header), "payload": letter.payload})}
    )


def from_record(content: RecordDict) -> Message:
    """Read it back."""
    try:
        record = content.config_records[RECORD]
        header, payload = record["header"], record["payload"]
    except KeyError as error:
        raise PeerError("message", "is not dpfl's", "run dpfl on both sides") from error
    if not isinstance(header, str) or not isinstance(payload, bytes):
        raise PeerError(
            "message", "holds something else than a header and bytes", "run dpfl on both sides"
        )
    return Message(header=read_header(header), payload=payload)


class FlowerTransport:
    """The post over a Flower grid."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def nodes(self) -> list[int]:
        """Who is connected."""
        return sorted(self.grid.get_node_ids())

    def ask(self, letters: Mapping[int, Message], timeout: float) -> dict[int, Message | str]:
        """Send to every node, and wait for answers until time is up. A late answer is never looked
        at.
        """
        if not letters:
            return {}
        messages = [
            FlowerMessage(
                content=to_record(letter),
                message_type=MessageType.TRAIN,
                dst_node_id=node,
                ttl=timeout + 60,
            )
            for node, letter in letters.items()
        ]
        sent = dict(zip(self.grid.push_messages(messages), letters, strict=True))
        answers: dict[int, Message | str] = dict.fromkeys(
            letters, f"did not answer within {timeout:g} s"
        )
        open_ids = set(sent)
        until = time.monotonic() + timeout
        while open_ids and time.monotonic() < until:
            for reply in self.grid.pull_messages(list(open_ids)):
                asked = reply.metadata.reply_to_message_id
                if (
                    asked in open_ids
                ):  # the first answer counts; a second one to the same message is not ours to take
                    open_ids.discard(asked)
                    answers[sent[asked]] = _read(reply)
            if open_ids:
                time.sleep(_POLL)
        return answers

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)


def _read(reply: FlowerMessage) -> Message | str:
    if reply.has_error():
        return f"failed ({(reply.error.reason or 'no reason')[:200]})"
    try:
        return from_record(reply.content)
    except PeerError as error:
        return str(error)
