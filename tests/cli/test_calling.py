"""What comes back over HTTP: answers, refusals, nonsense, and the bell that rings when a run has news."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from holdfast import errors
from holdfast.cli import calling
from holdfast.cli.calling import _OverHttp
from holdfast.errors import EngineError, HoldfastError

URL = "http://shop"


def http_with(answer: Any) -> httpx.AsyncClient:
    """Return a client whose requests are answered by a function."""
    return httpx.AsyncClient(base_url=URL, transport=httpx.MockTransport(answer))


async def ask(answer: Any) -> Any:
    async with http_with(answer) as http:
        return await _OverHttp(URL, http, httpx.HTTPError)("runs.get", {"run_id": "r", "wait_s": 0.1})


def problem(code: str, status: int, **details: Any) -> dict[str, Any]:
    return {"code": code, "status": status, "detail": "why", "details": details, "correlation_id": "c"}


def error(data: Any, code: int = -32_009) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "error": {"code": code, "message": "why", "data": data}}


async def test_a_result_is_given_back() -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={"jsonrpc": "2.0", "id": 1, "result": None})

    assert await ask(answer) is None
    assert b'"method":"runs.get"' in asked[0].content.replace(b" ", b"")


@pytest.mark.contract("API-2")
@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (200, error(problem("Conflict", 409, by="ann")), errors.Conflict),
        (200, error(None, -32_601), errors.NotFound),
        (200, error(problem("Novelty", 422)), errors.CallerError),
        (200, error(problem("Novelty", 507)), EngineError),
        (403, problem("NotPermitted", 403), errors.NotPermitted),
        (404, {"hello": "world"}, EngineError),
        (200, ["what", "is", "this"], EngineError),
    ],
)
async def test_a_refusal_is_raised_as_it_was(status: int, body: Any, kind: type[HoldfastError]) -> None:
    with pytest.raises(kind) as refused:
        await ask(lambda request: httpx.Response(status, json=body))
    assert type(refused.value) is kind
    if kind is errors.Conflict:
        assert (refused.value.message, refused.value.details) == ("why", {"by": "ann"})


async def test_what_is_no_server_is_told() -> None:
    with pytest.raises(EngineError, match="no Holdfast server"):
        await ask(lambda request: httpx.Response(200, text="<html>"))

    def fail(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no")

    with pytest.raises(EngineError, match="no server answers at http://shop"):
        await ask(fail)


class Chunks(httpx.AsyncByteStream):
    """A stream of two pieces, which may break off."""

    def __init__(self, breaks: bool) -> None:
        self._breaks = breaks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b": open\n\n"
        yield b"id: 1\ndata: {}\n\n"
        if self._breaks:
            raise httpx.ReadError("gone")


@pytest.mark.parametrize(("status", "breaks"), [(200, False), (200, True), (404, False)])
async def test_the_bell_rings_with_the_stream_and_then_now_and_then(
    status: int, breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rested: list[float] = []

    async def rest(seconds: float) -> None:
        rested.append(seconds)

    monkeypatch.setattr("holdfast.cli.calling.asyncio.sleep", rest)
    paths: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.raw_path.decode())
        return httpx.Response(status, stream=Chunks(breaks))

    async with http_with(answer) as http:
        bell = _OverHttp(URL, http, httpx.HTTPError).bell("r/1")
        async with aclosing(bell), asyncio.timeout(5):
            for _ in range(4):
                await anext(bell)
    assert paths == ["/v1/runs/r%2F1/stream"]
    assert rested == [calling.LOOK_S] * (1 if status == 200 else 3)
