"""What HTTP says about everything that is not an operation's own business."""

import asyncio
import gzip
import logging
from typing import Any

import httpx
import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import holdfast as hf
from holdfast.errors import Conflict, HoldfastError, StoreFull
from holdfast.limits import JSON_DEPTH
from holdfast.service.context import make_service
from holdfast.service.http.front import Front
from holdfast.service.http.problems import STATUS, problem_of, retry_after, rpc_code_of, status_of
from holdfast.service.options import ServiceOptions
from tests.service.in_process import make_app, serve_in_process

pytestmark = pytest.mark.contract("API-2")

START: dict[str, Any] = {"workflow": "echo", "input": {"value": 1}}


def nested(depth: int) -> bytes:
    """Return JSON that asks for a run with an input nested so deep."""
    return b'{"workflow":"echo","input":{"value":' + b"[" * depth + b"]" * depth + b"}}"


def check_problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """See that a response is the problem it should be, with everything that a problem has."""
    problem: dict[str, Any] = response.json()
    assert (response.status_code, problem["code"], problem["status"]) == (status, code, status), problem
    assert response.headers["content-type"] == "application/problem+json"
    assert problem["correlation_id"] == response.headers["x-correlation-id"]
    assert problem["type"].endswith(code)
    assert problem["title"]
    return problem


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "NotFound"),
        ("GET", "/v1/", 404, "NotFound"),
        ("GET", "/v1/nothing", 404, "NotFound"),
        ("GET", "/v1/runs/", 404, "NotFound"),
        ("GET", "/v1/runs//events", 404, "NotFound"),
        ("GET", "/v1/runs/a/nothing", 404, "NotFound"),
        ("GET", "/v1/runs/%ff", 400, "MalformedRequest"),
        ("GET", "/v1/runs/%00", 404, "NotFound"),
        ("GET", "/v1/runs?limit=many", 422, "InvalidInput"),
        ("GET", "/v1/runs?limit=1&limit=2", 422, "InvalidInput"),
        ("GET", "/v1/runs?colour=red", 422, "InvalidInput"),
        ("GET", "/v1/runs?tag=%ff", 400, "MalformedRequest"),
        ("GET", "/v1/runs?created_from=2026-01-01T00:00:00", 422, "InvalidInput"),
        ("DELETE", "/v1/runs", 405, "MethodNotAllowed"),
        ("PUT", "/v1/health", 405, "MethodNotAllowed"),
        ("GET", "/rpc", 405, "MethodNotAllowed"),
        ("POST", "/openapi.json", 405, "MethodNotAllowed"),
    ],
)
async def test_what_is_not_there_is_a_problem(method: str, path: str, status: int, code: str) -> None:
    async with serve_in_process() as server:
        response = await server.http.request(method, path)
        check_problem(response, status, code)
        if status == 405:
            assert method not in response.headers["allow"].split(", ")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 422, "InvalidInput"),
        (b"{", 400, "MalformedRequest"),
        (b"\xff", 400, "MalformedRequest"),
        (b'{"workflow":"\\ud800"}', 400, "MalformedRequest"),
        (b"[]", 422, "InvalidInput"),
        (b"null", 422, "InvalidInput"),
        (b'{"workflow":7}', 422, "InvalidInput"),
        (b'{"workflow":"echo","colour":"red"}', 422, "InvalidInput"),
        (b'{"workflow":"echo","input":{"value":1e999}}', 422, "InvalidInput"),
        (b'{"workflow":"echo","input":{"value":' + b"9" * 5_000 + b"}}", 422, "InvalidInput"),
        (b'{"workflow":"echo","run_id":"a/b"}', 422, "InvalidInput"),
        (b'{"workflow":"echo","request_id":"\\u0000"}', 422, "InvalidInput"),
        (b'{"workflow":"echo","tags":["\\n"]}', 422, "InvalidInput"),
        (nested(JSON_DEPTH + 5), 422, "InvalidInput"),
        (nested(JSON_DEPTH + 20), 400, "MalformedRequest"),
        (nested(100_000), 400, "MalformedRequest"),
    ],
    ids=lambda value: None if not isinstance(value, bytes) else value[:40].decode(errors="replace"),
)
async def test_bad_bodies_are_refused_and_leave_nothing(body: bytes, status: int, code: str) -> None:
    async with serve_in_process() as server:
        response = await server.http.post("/v1/runs", content=body, headers={"content-type": "application/json"})
        check_problem(response, status, code)
        assert (await server.rest("system.stats", {}))[1]["runs"] == {}


async def test_a_field_of_the_path_is_not_said_twice() -> None:
    async with serve_in_process() as server:
        response = await server.http.post("/v1/runs/a/cancel", json={"run_id": "b"})
        assert check_problem(response, 422, "InvalidInput")["details"] == {"field": "run_id"}


@pytest.mark.contract("API-1", "API-2")
async def test_a_field_that_is_not_there_is_named_with_those_that_are() -> None:
    async with serve_in_process() as server:
        call = {"jsonrpc": "2.0", "id": 1, "method": "runs.start", "params": {**START, "inputs": {}}}
        answers = [
            (await server.http.post("/v1/runs", json={**START, "inputs": {}})).json(),
            (await server.http.post("/rpc", json=call)).json()["error"]["data"],
            (await server.http.get("/v1/runs?inputs=1")).json(),
        ]
        for answer, field in zip(answers, ("input", "input", "status"), strict=True):
            assert (answer["code"], answer["details"]) == ("InvalidInput", {"field": "inputs"})
            assert answer["detail"].startswith("inputs: there is no such field; the fields are: ")
            assert field in answer["detail"].rpartition(": ")[2].split(", ")
        assert (await server.http.get("/v1/runs")).json()["items"] == []


async def test_media_types() -> None:
    async with serve_in_process() as server:
        body = msgspec.json.encode(START)
        for kind in ("text/plain", "", "application/xml"):
            response = await server.http.post("/v1/runs", content=body, headers={"content-type": kind})
            check_problem(response, 415, "UnsupportedMediaType")
        for kind in ("application/json", "Application/JSON; charset=utf-8"):
            response = await server.http.post("/v1/runs", content=body, headers={"content-type": kind})
            assert response.status_code == 201
        for accept, status in [
            ("text/html", 406),
            ("*/*;q=0", 406),
            ("text/html, */*;q=0.1", 200),
            ("application/*", 200),
            ("application/json", 200),
        ]:
            response = await server.http.get("/v1/health", headers={"accept": accept})
            assert response.status_code == status, accept


async def test_head_and_options() -> None:
    async with serve_in_process() as server:
        head = await server.http.head("/v1/workflows")
        get = await server.http.get("/v1/workflows")
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == get.headers["content-length"]
        options = await server.http.options("/v1/runs")
        assert (options.status_code, options.headers["allow"]) == (204, "GET, HEAD, OPTIONS, POST")
        assert (await server.http.options("/rpc")).headers["allow"] == "OPTIONS, POST"
        assert (await server.http.head("/v1/runs/nowhere")).status_code == 404


async def test_bodies_are_bounded() -> None:
    async with serve_in_process(options=ServiceOptions(body_bytes=100)) as server:
        headers = {"content-type": "application/json"}

        async def in_parts() -> Any:
            for _ in range(30):
                yield b" " * 10

        for content in (b" " * 101, in_parts()):
            response = await server.http.post("/v1/runs", content=content, headers=headers)
            check_problem(response, 413, "PayloadTooLarge")
        assert (await server.http.post("/v1/runs", json=START)).status_code == 201


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async with serve_in_process(options=ServiceOptions(body_s=0.01)) as server:

        async def slowly() -> Any:
            yield b"{"
            await asyncio.Event().wait()

        response = await server.http.post("/v1/runs", content=slowly(), headers={"content-type": "application/json"})
        check_problem(response, 408, "SlowRequest")


async def test_an_operation_that_takes_too_long_says_so() -> None:
    async with serve_in_process(options=ServiceOptions(request_s=0.02)) as server:
        run_id = await server.start("order", order_id="o-1")
        await server.until("signals.waits", {"run_id": run_id}, lambda page: page["items"])
        await server.rest("runs.pause", {"run_id": run_id})
        update = {"run_id": run_id, "name": "change_address", "input": {"city": "Ulm"}}
        await server.until("runs.get", {"run_id": run_id}, lambda run: run["status"] == "PAUSED")
        status, problem = await server.rest("runs.update", update)
        assert (status, problem["code"]) == (504, "RequestTimedOut")
        assert "no node may be running, or the run is paused" in problem["detail"]
        status, outcome = await server.rest("runs.result", {"run_id": run_id, "wait_s": 0.1})
        assert (status, outcome["is_finished"]) == (200, False), "the time that was asked for comes on top"


async def test_correlation_ids_are_taken_or_given() -> None:
    async with serve_in_process() as server:
        given = await server.http.get("/v1/health", headers={"x-correlation-id": "abc-1"})
        assert given.headers["x-correlation-id"] == "abc-1"
        fresh = {(await server.http.get("/v1/health")).headers["x-correlation-id"] for _ in range(3)}
        assert len(fresh) == 3
        for bad in ("a b", "x" * 129):
            response = await server.http.get("/nowhere", headers={"x-correlation-id": bad})
            assert response.headers["x-correlation-id"] != bad


@pytest.mark.parametrize("path", ["/v1/health", "/openapi.json", "/nowhere", "/rpc", "/v1/runs/nowhere"])
async def test_every_answer_guards_browsers(path: str) -> None:
    async with serve_in_process() as server:
        headers = (await server.http.get(path)).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy


async def test_large_answers_are_compressed_for_who_takes_it() -> None:
    async with serve_in_process() as server:
        small = await server.http.get("/v1/health", headers={"accept-encoding": "gzip"})
        assert "content-encoding" not in small.headers
        plain = await server.http.get("/openapi.json", headers={"accept-encoding": "identity"})
        assert "content-encoding" not in plain.headers
        async with server.http.stream("GET", "/openapi.json", headers={"accept-encoding": "gzip"}) as packed:
            raw = b"".join([part async for part in packed.aiter_raw()])
        assert packed.headers["content-encoding"] == "gzip"
        assert gzip.decompress(raw) == plain.content


@pytest.mark.contract("API-1")
async def test_ids_may_hold_any_character() -> None:
    async with serve_in_process() as server:
        run_id = "über & 100%?#"
        assert (await server.rest("runs.start", {**START, "run_id": run_id}))[0] == 201
        response = await server.http.post("/v1/runs", json={**START, "run_id": run_id + "2"})
        assert (await server.http.get(response.headers["location"])).json()["run_id"] == run_id + "2"
        ask = {"run_id": run_id, "name": "a/b", "signal_id": "a:b/c", "payload": None}
        await server.until("runs.result", {"run_id": run_id, "wait_s": 5}, lambda outcome: outcome["is_finished"])
        status, problem = await server.rest("signals.send", ask)
        assert (status, problem["code"]) == (409, "RunTerminal"), "the path was read as it was meant"
        status, problem = await server.rest("runs.get", {"run_id": "parent/child"})
        assert "parent/child" in problem["detail"]


async def test_values_are_never_told_in_problems() -> None:
    async with serve_in_process() as server:
        secret = "hunter2"
        asks: list[tuple[str, dict[str, Any]]] = [
            ("runs.start", {"workflow": "order", "input": {"order_id": 7, "cents": secret}}),
            ("runs.start", {"workflow": "order", "input": secret}),
            ("runs.list", {"status": secret}),
            ("signals.send", {"run_id": "r", "name": "n", "require_waiting": secret}),
        ]
        for name, ask in asks:
            status, problem = await server.rest(name, ask)
            assert status == 422
            assert secret not in msgspec.json.encode(problem).decode()


async def test_what_nobody_expected_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    async with serve_in_process() as server:

        async def broken() -> Any:
            raise RuntimeError("the secret is hunter2")

        server.app.runtime().store.stats = broken  # type: ignore[method-assign]
        with caplog.at_level(logging.ERROR, "holdfast.service"):
            response = await server.http.get("/v1/stats", headers={"x-correlation-id": "find-me"})
        problem = check_problem(response, 500, "InternalError")
        assert "hunter2" not in response.text
        assert problem["correlation_id"] == "find-me"
        assert "find-me" in caplog.text
        assert "hunter2" in caplog.text
        answer = (await server.http.post("/rpc", json={"jsonrpc": "2.0", "id": 1, "method": "system.stats"})).json()
        assert answer["error"]["code"] == -32_603


@pytest.mark.contract("API-2", "WF-6")
@pytest.mark.parametrize("is_rpc", [False, True])
async def test_a_query_that_raises_is_one_line_and_a_typed_answer(
    caplog: pytest.LogCaptureFixture, is_rpc: bool
) -> None:
    app = make_app()

    @app.workflow
    async def moody() -> Any:
        def fails(why: str) -> None:
            raise LookupError(why)

        hf.on_query("fails", fails)
        hf.on_query("odd", lambda: object())
        return await hf.wait_signal("go")

    async with serve_in_process(app=app) as server:
        run_id = await server.start("moody")
        ask = server.rpc if is_rpc else server.rest
        with caplog.at_level(logging.INFO):
            why = {"why": "no such\nthing\x1b[2J"}
            status, problem = await ask("runs.query", {"run_id": run_id, "name": "fails", "input": why})
            assert (status, problem["code"]) == (409, "QueryFailed")
            assert "LookupError" in problem["detail"]
            status, problem = await ask("runs.query", {"run_id": run_id, "name": "odd"})
            assert (status, problem["code"]) == (409, "QueryFailed")
        lines = [record for record in caplog.records if "query" in record.getMessage()]
        assert [record.levelname for record in lines] == ["INFO", "INFO"]
        assert all(record.exc_info is None for record in caplog.records)
        assert all(character.isprintable() for record in lines for character in record.getMessage())


async def test_routes_of_others_are_answered_alike() -> None:
    app = make_app()

    async def page(request: Request) -> Response:
        if "fail" in request.query_params:
            raise RuntimeError("no")
        if "conflict" in request.query_params:
            raise Conflict("no")
        return Response("hello")

    async with app.node("memory://"):
        front = Front(make_service(app), [Route("/page", page)])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://shop") as http:
            fine = await http.get("/page")
            assert (fine.text, fine.headers["x-frame-options"]) == ("hello", "DENY")
            check_problem(await http.get("/page?conflict"), 409, "Conflict")
            check_problem(await http.get("/page?fail"), 500, "InternalError")
            check_problem(await http.post("/page"), 405, "MethodNotAllowed")


# --- the table of errors


def kinds(root: type[HoldfastError] = HoldfastError) -> list[type[HoldfastError]]:
    """Return every error there is."""
    found = [kind for child in root.__subclasses__() for kind in (child, *kinds(child))]
    return [kind for kind in found if kind.__module__ == "holdfast.errors" and not kind.__name__.startswith("_")]


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_every_error_has_a_status_and_a_number(kind: type[HoldfastError]) -> None:
    status, number = status_of(kind), rpc_code_of(kind)
    assert 400 <= status < 600
    assert number in (-32_602, -32_603) or -32_099 <= number <= -32_000
    same = {rpc_code_of(other) for other in kinds() if status_of(other) == status}
    assert same == {number}
    problem = problem_of(kind("why", retry_after_ms=1_500), "c")
    assert (problem.code, problem.detail, retry_after(problem)) == (kind.code, "why", 2)


@pytest.mark.contract("SIG-6", "SIG-7")
def test_conflicts_share_one_number() -> None:
    names = {"Conflict", "RunTerminal", "NotWaiting", "SignalAcceptanceIndeterminate"}
    for kind in STATUS:
        if kind.__name__ in names:
            assert (status_of(kind), rpc_code_of(kind)) == (409, -32_009)
    assert rpc_code_of(StoreFull) == -32_057
