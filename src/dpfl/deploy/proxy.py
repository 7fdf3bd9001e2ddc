"""The door of a study: the only part of Flower's server that others than this machine can reach.

Flower 1.41 serves everything on one port, and its control interface (start a run, register a key)
asks nobody who they are unless an identity provider is set up. So the SuperLink listens on this
machine only, and this gate lets through what sites need, the fleet interface, whose requests a site
signs with its key; everything else is not there.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

OPEN = "/v1/fleet/"
LARGEST_BODY = 1 << 32
_HOP = {
    "connection",
    "keep-alive",
    "transfer-encoding",
    "te",
    "trailer",
    "upgrade",
    "host",
    "content-length",
}


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers that are about the message, not about this connection."""
    return {name: value for name, value in headers.items() if name.lower() not in _HOP}


def gate(inner: str, certificate: str | None) -> Starlette:
    """An application that passes fleet requests on to the SuperLink at ``inner``."""
    client = httpx.AsyncClient(base_url=inner, verify=certificate or False, timeout=120)

    async def health(request: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    async def fleet(request: Request) -> Response:
        announced = request.headers.get("content-length", "0")
        if not announced.isdigit() or int(announced) > LARGEST_BODY:
            return Response("too large\n", status_code=413)
        # The path is built from what was matched, so that no ".." leads elsewhere.
        name = request.path_params["name"]
        if not name.replace("-", "").isalnum():
            return Response("not here\n", status_code=404)
        try:
            answer = await client.post(
                OPEN + name, content=await request.body(), headers=_kept(request.headers)
            )
        except httpx.HTTPError:
            return Response("the server is not ready\n", status_code=503)
        return Response(
            answer.content, status_code=answer.status_code, headers=_kept(answer.headers)
        )

    routes = [
        Route("/health", health, methods=["GET"]),
        Route(OPEN + "{name}", fleet, methods=["POST"]),
    ]
    return Starlette(routes=routes)


def main() -> None:
    """Stand at the door until told to go."""
    asked = argparse.ArgumentParser(
        description="Let sites, and nothing else, through to a SuperLink."
    )
    for name in ("host", "port", "inner"):
        asked.add_argument(f"--{name}", required=True)
    for name in ("ca", "certificate", "key"):
        asked.add_argument(f"--{name}")
    given = asked.parse_args()
    uvicorn.run(
        gate(given.inner, given.ca),
        host=given.host,
        port=int(given.port),
        ssl_certfile=given.certificate,
        ssl_keyfile=given.key,
        log_level="warning",
        access_log=False,
    )


if __name__ == "__main__":
    main()
