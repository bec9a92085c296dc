"""A service that is being stopped: what it still answers, and what it says to those whom it does not."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from holdfast.service.context import Service, make_service
from holdfast.service.http.front import Front
from holdfast.service.http.server import listening
from holdfast.service.operations import OPERATIONS
from holdfast.service.options import ServiceOptions
from tests.service.in_process import make_app

MOST_SECONDS = 60.0
PATHS: dict[str, Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]] = {
    "REST": lambda http: http.get("/v1/runs"),
    "JSON-RPC": lambda http: http.post("/rpc", json={"jsonrpc": "2.0", "id": 1, "method": "runs.list", "params": {}}),
}


def hold_up(monkeypatch: pytest.MonkeyPatch, handle: Callable[..., Awaitable[Any]]) -> None:
    """Let `runs.list` be carried out by something else."""
    monkeypatch.setattr(type(OPERATIONS["runs.list"]), "handle", property(lambda self: handle), raising=False)


@pytest.mark.contract("API-2")
@pytest.mark.parametrize("path", PATHS)
async def test_a_request_that_outlives_the_drain_is_answered_as_503(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = asyncio.Event()

    async def never(call: Any, ask: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    hold_up(monkeypatch, never)
    app = make_app()
    async with asyncio.timeout(MOST_SECONDS), app.node("memory://"):
        service = make_service(app, ServiceOptions(port=0, drain_s=1))
        async with listening(service) as port:
            http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=MOST_SECONDS)
            asking = asyncio.create_task(_ask(http, path))
            await begun.wait()
        response = await asking
        await http.aclose()
    assert_stopping(response, "unknown")


@pytest.mark.contract("API-2")
@pytest.mark.parametrize("path", PATHS)
async def test_what_breaks_while_the_service_stops_is_no_internal_error(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app()
    async with asyncio.timeout(MOST_SECONDS), app.node("memory://"):
        service = make_service(app, ServiceOptions(port=0))

        async def breaks(call: Any, ask: Any) -> None:
            service.stopping.set()
            raise RuntimeError("the pool is closed")

        hold_up(monkeypatch, breaks)
        response = await _asked(service, path)
    assert_stopping(response, "unknown")


@pytest.mark.contract("API-2")
@pytest.mark.parametrize("path", PATHS)
async def test_nothing_is_begun_by_a_service_that_stops(path: str) -> None:
    app = make_app()
    async with asyncio.timeout(MOST_SECONDS), app.node("memory://"):
        service = make_service(app, ServiceOptions(port=0))
        service.stopping.set()
        response = await _asked(service, path)
    assert_stopping(response, "not-done")


def assert_stopping(response: httpx.Response, outcome: str) -> None:
    """Demand that a caller is told that the service stops, and what became of the request."""
    answer = response.json()
    problem = answer["error"]["data"] if "error" in answer else answer
    assert (problem["status"], problem["code"]) == (503, "ServiceStopping")
    assert problem["details"] == {"outcome": outcome}
    if "error" not in answer:
        assert response.status_code == 503
        assert response.headers["content-type"] == "application/problem+json"
        assert response.headers["retry-after"] == "1"


async def _asked(service: Service, path: str) -> httpx.Response:
    """Ask a service whose end the caller does not wait for."""
    transport = httpx.ASGITransport(Front(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as http:
        return await _ask(http, path)


async def _ask(http: httpx.AsyncClient, path: str) -> httpx.Response:
    return await PATHS[path](http)
