"""The proxy of a study: the only part of Flower's server that other machines can reach.

Flower 1.41 serves everything on one port. Its control interface (start a run, register a key) asks
nobody who they are unless an identity provider is set up. So the SuperLink listens on this machine
only, and this proxy passes on what sites need: the fleet interface, whose requests a site signs
with its key. Everything else is not found.

Keys and signatures are checked before anything of a body is read. Bodies are passed on while they
arrive, counted, and cut off at a limit that follows from the size of the model.
"""

import argparse
import asyncio
import base64
import datetime
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from dpfl.deploy.listener import CONNECTION, Limits, Listener
from dpfl.deploy.processes import CLOCK_AHEAD, CLOCK_BEHIND
from dpfl.runs.processes import end_with

FLEET, _KEY = "/v1/fleet/", "flwr-public-key"
UNKNOWN_KEY, BAD_SIGNATURE, TOO_LARGE, AWAY = 403, 401, 413, 503
_STRANGERS, _EACH = 64, 12  # connections: Flower sends the parts of a message side by side
_CONNECTION_HEADERS = {"connection", "keep-alive", "transfer-encoding", "te", "trailer"}
_CONNECTION_HEADERS |= {"upgrade", "host"}


class TooLarge(Exception):
    """A body is longer than anything that a site has to send."""


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that are about the message, not about this connection."""
    return {k: v for k, v in headers.items() if k.lower() not in _CONNECTION_HEADERS}


def _refused(status: int, reason: str) -> Response:
    """Refuse a request, and close its connection: what follows is not read."""
    return Response(f"{reason}\n", status, {"connection": "close"}, "text/plain")


def body_seconds(size: int) -> float:
    """Return how long a body may take to arrive: a minute, and 32 KiB a second."""
    return 60.0 + size / (1 << 15)


def read_keys(folder: Path) -> frozenset[bytes]:
    """Return the public keys in a folder, in the form in which requests carry them.

    What is no key of a site is passed over: Flower has refused it, with the reason.
    """
    encoding = serialization.Encoding.PEM
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    found = set()
    for path in folder.glob("*.pub"):
        with suppress(ValueError, UnsupportedAlgorithm):
            key = serialization.load_ssh_public_key(path.read_bytes())
            if isinstance(key, ec.EllipticCurvePublicKey):
                found.add(key.public_bytes(encoding, form))
    return frozenset(found)


def check_signature(headers: Mapping[str, str], keys: Collection[bytes]) -> Response | None:
    """Check that a request comes from one of the keys, now; return the refusal if it does not."""
    try:
        key = base64.b64decode(headers[_KEY], validate=True)
        if key not in keys:
            return _refused(UNKNOWN_KEY, "this key is not known")
        stamp = headers["flwr-timestamp"]
        signature = base64.b64decode(headers["flwr-signature"], validate=True)
        public = serialization.load_pem_public_key(key)
        assert isinstance(public, ec.EllipticCurvePublicKey)
        public.verify(signature, stamp.encode(), ec.ECDSA(hashes.SHA256()))
        ahead = datetime.datetime.fromisoformat(stamp).timestamp() - time.time()
    except (KeyError, ValueError, InvalidSignature):
        return _refused(BAD_SIGNATURE, "the request is not signed")
    if not -CLOCK_BEHIND < ahead < CLOCK_AHEAD:
        return _refused(BAD_SIGNATURE, f"the site's clock is {ahead:+.0f} s off")
    return None


@dataclass
class Proxy:
    """Passes fleet requests on to the SuperLink behind ``client``.

    ``keys``: the sites' public keys; None in a rehearsal without keys.
    ``largest_body``: how many bytes a request may have.
    """

    client: httpx.AsyncClient
    keys: Collection[bytes] | None
    largest_body: int

    def app(self) -> Starlette:
        """Return the application; what it has no route for is not found."""
        fleet = Route(FLEET + "{name}", self.fleet, methods=["POST"])
        return Starlette(routes=[Route("/health", self.health, methods=["GET"]), fleet])

    async def health(self, request: Request) -> Response:
        """Say that the proxy is running, and what time it is here; anyone may ask."""
        return Response(json.dumps({"time": time.time()}), media_type="application/json")

    async def fleet(self, request: Request) -> Response:
        """Pass a site's request on, unless it is nobody's, too large, or names something else."""
        # The path is built from what was matched, so that no ".." leads elsewhere.
        name = request.path_params["name"]
        headers = _kept(request.headers)
        refusal = self._refusal(name, request)
        if refusal is not None:
            return refusal
        try:
            asked = self.client.build_request(
                "POST", FLEET + name, content=self._counted(request), headers=headers
            )
            async with asyncio.timeout(body_seconds(self.largest_body)):
                answer = await self.client.send(asked, stream=True)
        except TooLarge:
            return _refused(TOO_LARGE, f"at most {self.largest_body} bytes")
        except Exception as error:  # whatever it is, the site must know that it can try again
            if not isinstance(error, httpx.HTTPError | ClientDisconnect | TimeoutError):
                sys.stderr.write(f"{name}: {error!r}\n")
            return _refused(AWAY, "the server is not ready")
        return StreamingResponse(_pieces(answer), answer.status_code, _kept(answer.headers))

    def _refusal(self, name: str, request: Request) -> Response | None:
        """Check a request by its headers alone; return the refusal, None if it may pass."""
        if not name.replace("-", "").isalnum():
            return _refused(404, "not found")
        if self.keys is not None:
            refusal = check_signature(request.headers, self.keys)
            if refusal is not None:
                return refusal
        connection = request.scope.get("state", {}).get(CONNECTION)
        if connection is not None:
            connection.prove(base64.b64decode(request.headers[_KEY]) if self.keys else "anyone")
        announced = request.headers.get("content-length", "0")
        if not announced.isdigit() or int(announced) > self.largest_body:
            return _refused(TOO_LARGE, f"at most {self.largest_body} bytes")
        return None

    async def _counted(self, request: Request) -> AsyncIterator[bytes]:
        """Hand the body on in the pieces in which it arrives, up to the limit."""
        size = 0
        async for piece in request.stream():
            size += len(piece)
            if size > self.largest_body:
                raise TooLarge
            if piece:
                yield piece


async def _pieces(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Hand an answer on in the pieces in which it arrives."""
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()


def main() -> None:
    """Run the proxy until the process is ended, or the process that started it has ended."""
    parser = argparse.ArgumentParser(description="Pass requests of sites on to a SuperLink.")
    for name in ("host", "inner"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "parent", "largest-body", "sites"):
        parser.add_argument(f"--{name}", required=True, type=int)
    for name in ("ca", "certificate", "key"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--keys", type=Path)
    given = parser.parse_args()
    end_with(given.parent)
    keys = None if given.keys is None else read_keys(given.keys)
    limits = Limits(
        strangers=_STRANGERS,
        each=_EACH if keys is not None else _EACH * given.sites,  # without keys all are one owner
        seconds=2 * body_seconds(given.largest_body),
    )
    client = httpx.AsyncClient(
        base_url=given.inner,
        verify=given.ca or False,
        timeout=120,
        limits=httpx.Limits(max_connections=_EACH * given.sites),
        trust_env=False,  # it is on this machine: no proxy of the network leads there
    )
    app = Proxy(client, keys, given.largest_body).app()
    family = socket.AF_INET6 if ":" in given.host else socket.AF_INET
    listening = socket.create_server((given.host, given.port), family=family, backlog=128)
    listener = Listener(app, limits, given.certificate, given.key)
    asyncio.run(listener.serve(listening))


if __name__ == "__main__":
    main()
