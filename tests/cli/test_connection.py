"""What comes back over HTTP: answers, refusals and nonsense; and what is told about it in one line."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from holdfast import errors
from holdfast.cli.connection import Connection
from holdfast.cli.exit_codes import run_command
from holdfast.client.transports import Http
from holdfast.errors import EngineError, HoldfastError

URL = "http://shop"


async def ask(answer: Any, **more: Any) -> Any:
    transport = Http(URL, None, 45.0, httpx.MockTransport(answer))
    try:
        return await Connection(transport)("runs.result", {"run_id": "r", **more})
    finally:
        await transport.close()


def problem(code: str, status: int, **details: Any) -> dict[str, Any]:
    told = {"type": "urn:x", "title": "t", "detail": "why", "correlation_id": "c"}
    return {**told, "code": code, "status": status, "details": details}


async def test_an_answer_is_given_back_as_it_is_and_waited_for_as_long_as_asked() -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={"new_field": [1, None]})

    assert await ask(answer, wait_s=30.0) == {"new_field": [1, None]}
    assert asked[0].url.raw_path == b"/v1/runs/r/result?wait_s=30.0"
    assert asked[0].extensions["timeout"]["read"] == 75.0


@pytest.mark.contract("API-2")
@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (409, problem("Conflict", 409, by="ann"), errors.Conflict),
        (422, problem("Novelty", 422), errors.CallerError),
        (507, problem("Novelty", 507), EngineError),
        (401, problem("NotAuthenticated", 401), errors.NotAuthenticated),
        (403, problem("NotPermitted", 403), errors.NotPermitted),
        (404, {"hello": "world"}, errors.CallerError),
    ],
)
async def test_a_refusal_is_raised_as_it_was(status: int, body: Any, kind: type[HoldfastError]) -> None:
    with pytest.raises(kind) as refused:
        await ask(lambda request: httpx.Response(status, json=body))
    assert type(refused.value) is kind
    if kind is errors.Conflict:
        assert (refused.value.message, refused.value.details) == ("why", {"by": "ann", "correlation_id": "c"})


async def test_a_page_that_is_not_found_points_to_the_path_of_a_mounted_service() -> None:
    with pytest.raises(errors.CallerError, match="it says 404; if the service is mounted below a path, that path"):
        await ask(lambda request: httpx.Response(404, json={"detail": "Not Found"}))


async def test_what_is_no_server_is_told_and_is_asked_once() -> None:
    asked = 0

    def fail(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        raise httpx.ConnectError("no")

    with pytest.raises(EngineError, match="no server answers at http://shop: ConnectError: no"):
        await ask(fail)
    assert asked == 1
    for response in (httpx.Response(200, text="<html>"), httpx.Response(502, text="<html>")):
        with pytest.raises(EngineError, match="no Holdfast server"):
            await ask(lambda request, response=response: response)


def test_who_cannot_be_reached_is_told_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise Http(URL, None, 1.0)._unreachable(httpx.ConnectError("no"))

    assert run_command(fail) == 6
    assert "(start one with `holdfast dev`, or name another with --server, or" in capsys.readouterr().err
