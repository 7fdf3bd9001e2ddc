"""A Flower grid inside one process, for tests and rehearsals.

Apps, messages and records are the real ones; there is no network. Flower wants an identity for the
task that creates messages. Setting it is the one private call, and it is made here alone: a test
notices when a new version of Flower moves it.
"""

import functools
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message as FlowerMessage, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from dpfl.deploy.client_app import FOLDER_KEY, app

Fault = Callable[[FlowerMessage, Callable[[], FlowerMessage]], FlowerMessage | None]
"""May answer in a node's place: with something else, or, by None, not at all."""

FAILED = ErrorCode.CLIENT_APP_RAISED_EXCEPTION


class InProcessGrid(Grid):
    """A grid whose nodes are folders of sites.

    ``sites`` are the folders by node; ``faults`` make some nodes misbehave. ``asked`` keeps every
    message that was sent.
    """

    def __init__(self, sites: Mapping[int, Path], client_app: ClientApp = app) -> None:
        self.sites = dict(sites)
        self.client_app = client_app
        self.faults: dict[int, Fault] = {}
        self.replies: dict[str, list[FlowerMessage]] = {}
        self.asked: list[FlowerMessage] = []
        TaskIdentity.task_id = 1
        TaskIdentity.run_id = 1
        TaskIdentity.node_id = 1

    def set_run(self, run: Any) -> None:
        """Do nothing: there is one run."""

    @property
    def run(self) -> Any:
        """Not available: nothing here asks for it."""
        raise NotImplementedError

    def create_message(self, *args: Any, **more: Any) -> FlowerMessage:
        """Not available: messages are made by their own constructor."""
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        """Return the nodes that are connected."""
        return list(self.sites)

    def push_messages(self, messages: Iterable[FlowerMessage]) -> list[str]:
        """Deliver the messages; each node answers at once."""
        ids = []
        for message in messages:
            name = uuid.uuid4().hex
            message.metadata.__dict__["_message_id"] = name
            self.asked.append(message)
            node = message.metadata.dst_node_id
            fault = self.faults.get(node)
            answer = functools.partial(self._reply, message, node)
            reply = answer() if fault is None else fault(message, answer)
            self.replies[name] = [] if reply is None else [reply]
            ids.append(name)
        return ids

    def _reply(self, message: FlowerMessage, node: int) -> FlowerMessage:
        """Ask the node's app; an exception is an error reply, as on a real node."""
        context = Context(
            run_id=1,
            node_id=node,
            node_config={FOLDER_KEY: str(self.sites[node])},
            state=RecordDict(),
            run_config={},
        )
        try:
            return self.client_app(message, context)
        except Exception as error:
            return FlowerMessage(Error(code=FAILED, reason=str(error)), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> list[FlowerMessage]:
        """Hand over the answers that have come, each once."""
        return [reply for name in message_ids for reply in self.replies.pop(name, [])]

    def send_and_receive(
        self, messages: Iterable[FlowerMessage], *, timeout: float | None = None
    ) -> list[FlowerMessage]:
        """Send messages and return the answers."""
        return self.pull_messages(self.push_messages(messages))
