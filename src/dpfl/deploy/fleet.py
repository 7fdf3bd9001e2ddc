"""A site's connection to its server: Flower's fleet interface, without a SuperNode.

A SuperNode starts a new process for every message, and that process runs an app which the server
has sent. Here the site's own process pulls each message and hands it to code that is installed at
the site, so that nothing executable comes from the server.

Most of what is imported from Flower here is not part of its public interface. It is used in this
file alone, and a test notices when a new version of Flower moves it.
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message as FlowerMessage
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto import fleet_pb2 as fleet
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import Message as StoredMessage
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable import inflatable_protobuf_utils as objects
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPushError,
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from dpfl.core.errors import ConfigurationError, PeerError

# The server counts a site as connected for twice this long after its last sign of life.
HEARTBEAT_SECONDS = 15.0
_REJECTED, _UNKNOWN_KEY, _STILL_CONNECTED = 401, 403, 412
_AWAY = (502, 503, 504)


class ServerAway(Exception):
    """The server cannot be reached now, or does not know this connection any more."""


class NotTaken(Exception):
    """The server does not take an answer: it was restarted, and does not know the question."""


class StillConnected(Exception):
    """The server still counts an earlier connection with this site's key."""


class Fleet:
    """A connection of one site; use it in a ``with`` block, which leaves the server at its end.

    ``address`` is the server's. ``certificate`` is the study's ``ca.crt`` and ``key`` the site's
    private key; both are None where nothing is encrypted and nobody proves who they are.

    Raises :class:`ServerAway` where it pays to try again later, :class:`NotTaken` where an answer
    is of no use any more, :class:`StillConnected` where an earlier connection has not expired, and
    :class:`~dpfl.core.errors.PeerError` where only a person can help.
    """

    def __init__(self, address: str, certificate: Path | None, key: Path | None) -> None:
        self._address = address
        own = _load_key(key) if key is not None else generate_key_pairs()[0]
        self._public = public_key_to_bytes(own.public_key())
        self._registers = key is None
        self._client = FleetHttpClient.from_server_address(
            address,
            certificate is None,
            None if certificate is None else str(certificate),
            interceptors=[NodeAuthHttpInterceptor(own, own.public_key())],
        )
        self._node: Node | None = None
        self._leaving = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        try:
            if self._node is not None:
                self.disconnect(self._node.node_id)
        except (ServerAway, PeerError):
            pass  # the server notices by itself that nothing comes any more
        self._client.close()

    def connect(self) -> int:
        """Become a node of the server, which gives it a number."""
        if self._registers:
            self._call("RegisterNode", fleet.RegisterNodeFleetRequest(public_key=self._public))
            self._registers = False
        request = fleet.ActivateNodeRequest(
            public_key=self._public, heartbeat_interval=HEARTBEAT_SECONDS
        )
        self._node = Node(node_id=self._call("ActivateNode", request).node_id)
        # Flower wants to know which task makes a message; a SuperNode numbers them for itself.
        TaskIdentity.task_id = 1
        TaskIdentity.run_id = 1
        TaskIdentity.node_id = int(self._node.node_id)
        threading.Thread(target=self._beat, args=(self._node,), daemon=True).start()
        return int(self._node.node_id)

    def disconnect(self, node: int) -> None:
        """Tell the server that a node with this site's key is not there any more."""
        self._call("DeactivateNode", fleet.DeactivateNodeRequest(node_id=node))

    def _beat(self, node: Node) -> None:
        """Give signs of life until the connection ends, or the server does not know it any more."""
        request = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT_SECONDS)
        while not self._leaving.wait(HEARTBEAT_SECONDS * 0.6):
            try:
                self._call("SendNodeHeartbeat", request)
            except ServerAway:
                continue  # the next pull finds out
            except PeerError:
                return

    def pull(self) -> FlowerMessage | None:
        """Return the next message, None if there is none now.

        It is not confirmed yet: see :meth:`confirm`.
        """
        assert self._node is not None
        found = self._call("PullMessages", fleet.PullMessagesRequest(node=self._node))
        if not found.messages_list:
            return None
        tree = found.message_object_trees[0]
        run = found.messages_list[0].metadata.run_id
        pull_object = objects.make_pull_object_fn_protobuf(
            partial(self._call, "PullObject"), self._node, run
        )
        try:
            message = pull_and_inflate_object_from_tree(
                tree, pull_object, lambda _: None, return_type=FlowerMessage
            )
        except (ServerAway, PeerError):
            raise
        except Exception as error:  # a part that is lost, or anything that Flower cannot read
            raise ServerAway(f"a message of it cannot be read: {error}") from error
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message

    def confirm(self, message: FlowerMessage) -> None:
        """Tell the server that a message is safe here."""
        assert self._node is not None
        confirm = objects.make_confirm_message_received_fn_protobuf(
            partial(self._call, "ConfirmMessageReceived"), self._node, message.metadata.run_id
        )
        confirm(message.metadata.message_id)

    def push(self, reply: FlowerMessage) -> None:
        """Send the answer to a message."""
        assert self._node is not None
        reply.metadata.__dict__["_message_id"] = reply.object_id
        run = reply.metadata.run_id
        own = get_all_nested_objects(reply)
        pushed = self._call(
            "PushMessages",
            fleet.PushMessagesRequest(
                node=self._node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[0.0],
            ),
        )
        push_object = objects.make_push_object_fn_protobuf(
            partial(self._call, "PushObject"), self._node, run, pushed.session_id
        )
        try:
            push_objects(own, push_object, object_ids_to_push=set(pushed.objects_to_push))
        except ObjectPushError as error:
            raise NotTaken(str(error)) from error

    def _call(self, name: str, request: Any) -> Any:
        """Make a request of the fleet interface, and say what its failure means to a site."""
        try:
            return getattr(self._client, name)(request)
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            connecting = name == "ActivateNode"
            if status == _UNKNOWN_KEY:
                raise PeerError(
                    self._address,
                    "does not know this site's key, and rejected it",
                    "send it the .pub file; keys are registered when dpfl server run starts",
                ) from error
            if status == _STILL_CONNECTED and connecting:
                raise StillConnected from error
            if status == _REJECTED and connecting:
                raise PeerError(
                    self._address,
                    "rejected the signature of this site",
                    "compare the clocks of both machines, and the site's key",
                ) from error
            if name.startswith("Push") and status not in (_REJECTED, *_AWAY):
                raise NotTaken(f"it answered {status}") from error
            # Anything else on a connection that stood: the server was restarted.
            raise ServerAway(f"it answered {status}") from error
        except httpx.TransportError as error:
            raise ServerAway(str(error) or type(error).__name__) from error


def _load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a site's private key."""
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigurationError(
            str(path), f"cannot be used as a key ({error})", "put the site's key there"
        ) from error
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def pack(message: FlowerMessage) -> bytes:
    """Write a message to keep it over a restart."""
    return bytes(message_to_proto(message).SerializeToString())


def unpack(packed: bytes) -> FlowerMessage:
    """Read back what :func:`pack` wrote."""
    return message_from_proto(StoredMessage.FromString(packed))
