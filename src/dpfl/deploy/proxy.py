"""The proxy of a study: the only part of Flower's server that other machines can reach.

Flower 1.41 serves everything on one port. Its control interface (start a run, register a key) asks
nobody who they are unless an identity provider is set up. So the SuperLink listens on this machine
only, and this proxy passes on what sites need: the fleet interface, whose requests a site signs
with its key. Everything else is not found.
"""

import argparse
from collections.abc import Mapping

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FLEET = "/v1/fleet/"
LARGEST_BODY = 1 << 32
_CONNECTION_HEADERS = {"connection", "keep-alive", "transfer-encoding", "te", "trailer"}
_CONNECTION_HEADERS |= {"upgrade", "host", "content-length"}


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that are about the message, not about this connection."""
    return {k: v for k, v in headers.items() if k.lower() not in _CONNECTION_HEADERS}


def proxy(inner: str, certificate: str | None) -> Starlette:
    """Build an application that passes fleet requests on to the SuperLink at ``inner``.

    ``certificate``: the authority that the SuperLink's certificate is checked against.
    """
    client = httpx.AsyncClient(base_url=inner, verify=certificate or False, timeout=120)

    async def health(request: Request) -> Response:
        """Say that the proxy is running; anyone may ask."""
        return Response("ok\n", media_type="text/plain")

    async def fleet(request: Request) -> Response:
        """Pass a site's request on, unless it is too large or names something else."""
        announced = request.headers.get("content-length", "0")
        if not announced.isdigit() or int(announced) > LARGEST_BODY:
            return Response("too large\n", status_code=413)
        # The path is built from what was matched, so that no ".." leads elsewhere.
        name, headers = request.path_params["name"], _kept(request.headers)
        if not name.replace("-", "").isalnum():
            return Response("not found\n", status_code=404)
        try:
            answer = await client.post(FLEET + name, content=await request.body(), headers=headers)
        except httpx.HTTPError:
            return Response("the server is not ready\n", status_code=503)
        return Response(answer.content, answer.status_code, _kept(answer.headers))

    routes = [
        Route("/health", health, methods=["GET"]),
        Route(FLEET + "{name}", fleet, methods=["POST"]),
    ]
    return Starlette(routes=routes)


def main() -> None:
    """Run the proxy until the process is ended."""
    parser = argparse.ArgumentParser(description="Pass requests of sites on to a SuperLink.")
    for name in ("host", "port", "inner"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("ca", "certificate", "key"):
        parser.add_argument(f"--{name}")
    given = parser.parse_args()
    uvicorn.run(
        proxy(given.inner, given.ca),
        host=given.host,
        port=int(given.port),
        ssl_certfile=given.certificate,
        ssl_keyfile=given.key,
        log_level="warning",
        access_log=False,
    )


if __name__ == "__main__":
    main()
