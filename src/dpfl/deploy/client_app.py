"""The site as a Flower ClientApp. A new process may answer every message: all state is in the
site's folder.
"""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context, Message as FlowerMessage
from flwr.clientapp import ClientApp

from dpfl.core.errors import DpflError
from dpfl.deploy.transport import from_record, to_record
from dpfl.deploy.messages import Message, refusal
from dpfl.deploy.site import Site

FOLDER_KEY = "dpfl-site"

app = ClientApp()


@app.train()
def answer(message: FlowerMessage, context: Context) -> FlowerMessage:
    """Answer whatever the server asks."""
    return FlowerMessage(
        to_record(answered(message, str(context.node_config.get(FOLDER_KEY, "")))), reply_to=message
    )


def answered(message: FlowerMessage, folder: str) -> Message:
    """What the site in this folder says to a message."""
    try:
        letter = from_record(message.content)
    except DpflError as error:
        return refusal(str(error), code=error.exit_code)
    try:
        site = Site(Path(folder))
    except DpflError as error:
        return refusal(
            "the site's folder cannot be used; its operator must see to it", code=error.exit_code
        )
    return site.answer(letter)
