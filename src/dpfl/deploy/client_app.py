"""The site as a Flower ClientApp, for the in-process grid and for anyone who runs a SuperNode.

``dpfl site run`` does not need it: there a worker answers (:mod:`dpfl.deploy.worker`), by the same
function.
"""

from pathlib import Path

from flwr.app import Context, Message as FlowerMessage
from flwr.clientapp import ClientApp

from dpfl.deploy.records import Records
from dpfl.deploy.site import answered
from dpfl.deploy.transport import replied

FOLDER_KEY = "dpfl-site"


def make_app(kept: dict[Path, Records] | None = None) -> ClientApp:
    """Build the app; ``kept`` keeps what sites have read, by folder, for their next messages."""
    made = ClientApp()

    @made.train()
    def answer(message: FlowerMessage, context: Context) -> FlowerMessage:
        """Answer whatever the server asks."""
        folder = Path(str(context.node_config.get(FOLDER_KEY, "")))
        records = None if kept is None else kept.setdefault(folder, Records())
        return replied(message, lambda asked: answered(folder, asked, records))

    return made


app = make_app()
