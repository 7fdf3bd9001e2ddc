"""How messages travel: over a Flower grid, matched by the message that an answer belongs to.

Who seems to have sent an answer does not count: Flower answers for a dead node under another id.
The real network and the in-process grid of tests are both grids, so that everything above the grid
is the same in a test and in a deployment.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from flwr.app import ConfigRecord, Message as FlowerMessage, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import pull_objects

from dpfl.core.errors import PeerError
from dpfl.deploy.messages import Message, Reply, read_header, refusal, write_header

RECORD = "dpfl"
_POLL_SECONDS = 0.2
_RETURN_SECONDS = 120.0  # how long a node that went away is waited for
_CUT_OFF = (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE)
_BOTH_SIDES = "run dpfl on both sides"


def to_record(message: Message) -> RecordDict:
    """Put a message into the form that Flower carries: a record with the header and the bytes."""
    header = write_header(message.header)
    return RecordDict({RECORD: ConfigRecord({"header": header, "payload": message.payload})})


def from_record(content: RecordDict) -> Message:
    """Read a message back; anything else is refused."""
    try:
        record = content.config_records[RECORD]
        header = record["header"]
        payload = record["payload"]
    except KeyError as error:
        raise PeerError("message", "was not written by dpfl", _BOTH_SIDES) from error
    if not isinstance(header, str) or not isinstance(payload, bytes):
        raise PeerError("message", "does not hold a header and bytes", _BOTH_SIDES)
    return Message(header=read_header(header), payload=payload)


def received(message: FlowerMessage) -> Message:
    """Read a message of dpfl from one of Flower's; one without content is refused."""
    if not message.has_content():
        raise PeerError("message", "is empty", _BOTH_SIDES)
    return from_record(message.content)


def replied(message: FlowerMessage, answer: Callable[[Message], Message]) -> FlowerMessage:
    """Read a message, let a site answer it, and make the reply; what is not dpfl's is refused."""
    try:
        said = answer(received(message))
    except PeerError as error:
        said = refusal(str(error), code=error.exit_code)
    return reply_to(message, said)


def reply_to(message: FlowerMessage, said: Message) -> FlowerMessage:
    """Make the reply to a message of Flower's."""
    return FlowerMessage(to_record(said), reply_to=message)


def limit_parts(seconds: float) -> None:
    """Let Flower wait this long, in this process, for the rest of an answer that began to arrive.

    Flower announces an answer before its parts are there, and waits two hours for them: a site that
    was killed while it sent them would hold up everyone. There is no setting for it.
    """
    assert pull_objects.__kwdefaults__ is not None
    pull_objects.__kwdefaults__["max_time"] = seconds


class Transport:
    """What a coordinator needs of a network, over a Flower grid."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def nodes(self) -> list[int]:
        """Return the nodes that are connected."""
        return sorted(self.grid.get_node_ids())

    def ask(
        self,
        messages: Mapping[int, Message],
        timeout: float,
        heard: Callable[[int, Reply], None] = lambda node, reply: None,
    ) -> dict[int, Reply]:
        """Send one message to each node, and wait for the answers.

        ``messages`` are by node; ``timeout`` is in seconds; ``heard`` is told of each answer when
        it comes. Returns a reply for every node: its answer, or why there is none. The first answer
        to a message counts. A second or a late one is never read. A node that goes away, or is cut
        off while it answers, is asked again if it comes back in time.
        """
        replies = dict.fromkeys(messages, Reply.none(f"did not answer within {timeout:g} s"))
        waiting = self._send(messages, timeout)
        gone = dict[int, float]()
        began = time.monotonic()
        until = began + timeout
        while (waiting or gone) and time.monotonic() < until:
            for answer in self.grid.pull_messages(list(waiting)):
                node = waiting.pop(answer.metadata.reply_to_message_id, None)
                if node is not None:
                    replies[node] = replace(_read(answer), seconds=time.monotonic() - began)
                    heard(node, replies[node])
                    if answer.has_error() and answer.error.code in _CUT_OFF:
                        gone[node] = time.monotonic() + _RETURN_SECONDS
            now = time.monotonic()
            here = set(self.nodes()) if gone and now < until else set()
            back = {node: messages[node] for node in gone if node in here}
            waiting |= self._send(back, until - now)
            gone = {node: end for node, end in gone.items() if node not in here and now < end}
            if waiting or gone:
                time.sleep(_POLL_SECONDS)
        return replies

    def _send(self, messages: Mapping[int, Message], timeout: float) -> dict[str, int]:
        """Send, and return which node each message went to, by the message's id."""
        if not messages:
            return {}
        kind = MessageType.TRAIN
        ttl = timeout + 60
        sent = [
            FlowerMessage(content=to_record(one), message_type=kind, dst_node_id=node, ttl=ttl)
            for node, one in messages.items()
        ]
        return dict(zip(self.grid.push_messages(sent), messages, strict=True))

    def wait(self, seconds: float) -> None:
        """Wait for this many seconds before asking again."""
        time.sleep(seconds)


def _read(answer: FlowerMessage) -> Reply:
    """Read Flower's answer; an error there, or a message that is not dpfl's, is no answer."""
    if answer.has_error():
        return Reply.none(f"failed ({(answer.error.reason or 'no reason')[:200]})")
    try:
        return Reply.of(received(answer))
    except PeerError as error:
        return Reply.none(str(error))
