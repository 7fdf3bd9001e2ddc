"""The gate: sites get through, nothing else is there; and a key is bound to its name."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dpfl.deploy import proxy as module
from tests.deploy.federation import Federation, study_values


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What reached the server behind the gate."""
    reached: list[str] = []

    async def inner(request: Request) -> Response:
        reached.append(request.url.path)
        body = await request.body()
        return Response(
            body[::-1],
            status_code=202,
            headers={"x-signature": request.headers.get("x-signature", "")},
        )

    server = Starlette(routes=[Route("/{path:path}", inner, methods=["GET", "POST"])])
    real = httpx.AsyncClient

    def client(**settings: Any) -> httpx.AsyncClient:
        settings.pop("verify", None)
        return real(transport=httpx.ASGITransport(server), **settings)

    monkeypatch.setattr(module.httpx, "AsyncClient", client)
    return reached


def ask(method: str, path: str, **more: Any) -> httpx.Response:
    app = module.proxy("http://inner", None)

    async def go() -> httpx.Response:
        # Built before the seam is replaced would be the real client; here only the transport
        # differs.
        transport = httpx.ASGITransport(app)
        request = httpx.Request(method, httpx.URL("http://gate", raw_path=path.encode()), **more)
        answer = await transport.handle_async_request(request)
        await answer.aread()
        return answer

    return asyncio.run(go())


def test_a_signed_fleet_request_goes_through_with_its_signature(asked: list[str]) -> None:
    answer = ask("POST", "/v1/fleet/pull-messages", content=b"abc", headers={"x-signature": "s"})
    assert (answer.status_code, answer.content, answer.headers["x-signature"]) == (202, b"cba", "s")
    assert asked == ["/v1/fleet/pull-messages"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/pull-task-input", "/", "/docs", "/openapi.json",
        "/v1/fleet/../control/list-runs", "/v1/fleet/..%2fcontrol%2flist-runs", "/v1/fleet/%2e%2e/control/list-runs",
        "/v1/fleet/", "/v1/fleet/a/b", "/v1/fleet//v1/control/list-runs", "/v1/Fleet/pull-messages",
    ],
)  # fmt: skip
def test_nothing_else_is_there(path: str, asked: list[str]) -> None:
    assert ask("POST", path, content=b"x").status_code in (404, 405)
    assert ask("GET", path).status_code in (404, 405)
    assert asked == []


def test_whether_it_stands_can_be_asked_by_anyone(asked: list[str]) -> None:
    assert ask("GET", "/health").status_code == 200
    assert asked == []


def test_what_is_too_large_is_refused_before_it_is_read(asked: list[str]) -> None:
    answer = ask("POST", "/v1/fleet/push-messages", headers={"content-length": str(1 << 40)})
    assert answer.status_code == 413
    assert asked == []


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
