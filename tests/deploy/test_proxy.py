"""The proxy: sites get through, nothing else is there; and a key is bound to its name."""

from __future__ import annotations

import asyncio
import base64
import datetime
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dpfl.deploy.credentials import make_site_key
from dpfl.deploy.proxy import Proxy, read_keys
from tests.deploy.federation import Federation, study_values


@pytest.fixture
def asked() -> list[str]:
    """What reached the server behind the proxy."""
    return []


KEY = ec.generate_private_key(ec.SECP384R1())
PUBLIC = KEY.public_key().public_bytes(
    serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
)
LARGEST = 10_000


def signed(ahead: float = 0.0, key: ec.EllipticCurvePrivateKey = KEY) -> dict[str, str]:
    """The headers by which a site proves who it is; its clock may be off."""
    stamp = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ahead)).isoformat()
    parts = {"public-key": PUBLIC, "signature": key.sign(stamp.encode(), ec.ECDSA(hashes.SHA256()))}
    encoded = {f"flwr-{name}": base64.b64encode(part).decode() for name, part in parts.items()}
    return {**encoded, "flwr-timestamp": stamp}


def ask(asked: list[str], method: str, path: str, **more: Any) -> httpx.Response:
    """Ask the proxy, whose server turns every body round."""

    async def inner(request: Request) -> Response:
        asked.append(request.url.path)
        body = await request.body()
        return Response(body[::-1], 202, {"x-own": request.headers.get("x-own", "")})

    server = Starlette(routes=[Route("/{path:path}", inner, methods=["GET", "POST"])])
    client = httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://inner")
    app = Proxy(client, {PUBLIC}, LARGEST).app()

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        url = httpx.URL("http://proxy", raw_path=path.encode())
        answer = await transport.handle_async_request(httpx.Request(method, url, **more))
        await answer.aread()
        return answer

    return asyncio.run(go())


def test_a_signed_fleet_request_goes_through_with_its_headers(asked: list[str]) -> None:
    headers = {"x-own": "s", **signed()}
    answer = ask(asked, "POST", "/v1/fleet/pull-messages", content=b"abc", headers=headers)
    assert (answer.status_code, answer.content, answer.headers["x-own"]) == (202, b"cba", "s")
    assert asked == ["/v1/fleet/pull-messages"]


@pytest.mark.parametrize(
    ("headers", "status", "words"),
    [
        ({}, 401, "not signed"),
        ({**signed(), "flwr-public-key": "x"}, 401, "not signed"),
        ({**signed(), "flwr-public-key": base64.b64encode(b"x").decode()}, 403, "not known"),
        ({**signed(), "flwr-signature": base64.b64encode(b"x").decode()}, 401, "not signed"),
        ({**signed(), "flwr-timestamp": "2026-01-01T00:00:00+00:00"}, 401, "not signed"),
        (signed(key=ec.generate_private_key(ec.SECP384R1())), 401, "not signed"),
    ],
)
def test_whoever_is_no_site_is_refused_before_a_byte_is_read(
    headers: dict[str, str], status: int, words: str, asked: list[str]
) -> None:
    answer = ask(asked, "POST", "/v1/fleet/push-object", content=unread(), headers=headers)
    assert answer.status_code == status
    assert words in answer.text
    assert answer.headers["connection"] == "close"
    assert asked == []


@pytest.mark.parametrize(
    ("ahead", "passes"), [(8.0, False), (3.0, True), (-200.0, True), (-400.0, False)]
)
def test_a_clock_that_is_off_is_named(ahead: float, passes: bool, asked: list[str]) -> None:
    answer = ask(asked, "POST", "/v1/fleet/pull-messages", content=b"x", headers=signed(ahead))
    assert (answer.status_code == 202) == passes
    assert passes or f"{ahead:+.0f} s off" in answer.text


async def unread() -> AsyncIterator[bytes]:
    raise AssertionError("the body was read")
    yield b""


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/pull-task-input", "/", "/docs", "/openapi.json",
        "/v1/fleet/../control/list-runs", "/v1/fleet/..%2fcontrol%2flist-runs", "/v1/fleet/%2e%2e/control/list-runs",
        "/v1/fleet/", "/v1/fleet/a/b", "/v1/fleet//v1/control/list-runs", "/v1/Fleet/pull-messages",
    ],
)  # fmt: skip
def test_nothing_else_is_there(path: str, asked: list[str]) -> None:
    assert ask(asked, "POST", path, content=b"x", headers=signed()).status_code in (404, 405)
    assert ask(asked, "GET", path).status_code in (404, 405)
    assert asked == []


def test_whether_it_stands_can_be_asked_by_anyone(asked: list[str]) -> None:
    answer = ask(asked, "GET", "/health")
    assert abs(answer.json()["time"] - time.time()) < 60
    assert asked == []


def test_what_is_too_large_is_refused_by_what_it_announces(asked: list[str]) -> None:
    headers = {**signed(), "content-length": str(LARGEST + 1)}
    answer = ask(asked, "POST", "/v1/fleet/push-messages", content=unread(), headers=headers)
    assert answer.status_code == 413
    assert asked == []


def test_what_is_too_large_is_cut_off_while_it_streams(asked: list[str]) -> None:
    sent: list[int] = []

    async def endless() -> AsyncIterator[bytes]:
        while True:
            sent.append(1000)
            yield b"x" * 1000

    answer = ask(asked, "POST", "/v1/fleet/push-object", content=endless(), headers=signed())
    assert answer.status_code == 413
    assert LARGEST < sum(sent) <= LARGEST + 3000


def test_a_key_is_bound_to_its_name(tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, study_values("weiavg", rounds=1))
    (federation.server / "nodes.json").write_text(
        json.dumps({"a": 2, "b": 2, "c": 3})
    )  # a comes with another key than its own
    summary = federation.play()
    assert summary["sites"] == ["b", "c"]
    assert "another key" in summary["refusals"]["a"]


def test_without_registered_keys_names_are_taken_as_they_come(tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, study_values("weiavg", rounds=1))
    assert federation.play()["sites"] == ["a", "b", "c"]


def test_a_file_that_holds_no_key_keeps_nobody_else_out(tmp_path: Path) -> None:
    own = make_site_key(tmp_path / "site.key")
    (tmp_path / "good.pub").write_bytes(own.read_bytes())
    own.unlink()
    (tmp_path / "bad.pub").write_text("no key")
    (tmp_path / "empty.pub").write_text("")
    rsa = generate_private_key(public_exponent=65537, key_size=2048).public_key()
    form = (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (tmp_path / "other.pub").write_bytes(rsa.public_bytes(*form))
    assert len(read_keys(tmp_path)) == 1


@pytest.mark.parametrize("error", [httpx.ConnectError("no"), RuntimeError("no"), TimeoutError()])
def test_whatever_fails_behind_it_a_site_is_told_to_try_again(error: Exception) -> None:
    """Any other status would make a site drop its answer."""

    async def fails(request: httpx.Request) -> httpx.Response:
        raise error

    async def go() -> int:
        client = httpx.AsyncClient(transport=httpx.MockTransport(fails), base_url="http://inner")
        way = httpx.ASGITransport(Proxy(client, {PUBLIC}, LARGEST).app())
        async with httpx.AsyncClient(transport=way, base_url="http://proxy") as site:
            answer = await site.post("/v1/fleet/push-object", content=b"x", headers=signed())
            return answer.status_code

    assert asyncio.run(go()) == 503
