"""The site as a Flower ClientApp.

A new process may answer every message, so all state is in the site's folder, which the node's
configuration names.
"""

from pathlib import Path

from flwr.app import Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp

from dpfl.core.errors import DpflError
from dpfl.deploy.messages import Message, refusal
from dpfl.deploy.site import Site
from dpfl.deploy.transport import from_record, to_record

FOLDER_KEY = "dpfl-site"

app = ClientApp()


@app.train()
def answer(message: FlowerMessage, context: Context) -> FlowerMessage:
    """Answer whatever the server asks."""
    folder = Path(str(context.node_config.get(FOLDER_KEY, "")))
    return FlowerMessage(to_record(_answer(message, folder)), reply_to=message)


def _answer(message: FlowerMessage, folder: Path) -> Message:
    """Read the message and let the site answer it; what is not dpfl's is refused."""
    try:
        asked = from_record(message.content)
    except DpflError as error:
        return refusal(str(error), code=error.exit_code)
    try:
        site = Site(folder)
    except DpflError as error:
        reason = "the site's folder cannot be used; its operator must look at it"
        return refusal(reason, code=error.exit_code)
    return site.answer(asked)
