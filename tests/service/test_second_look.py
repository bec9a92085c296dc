"""What a caller can do to others with what looks harmless: queries, tokens made in a hurry, half a request."""

import asyncio
import logging
import time
from itertools import pairwise
from typing import Any

import httpx
import pytest

from holdfast.engine.turns.execute import rebuild
from holdfast.service.auth.tokens import TokenAccess, make_token, revoke_token
from holdfast.service.context import make_service
from holdfast.service.http.server import listening
from holdfast.service.options import ServiceOptions
from holdfast.store.queries import TokenQuery
from tests.service.in_process import MOST_SECONDS, make_app, serve_in_process
from tests.service.test_audit import app_with_quorum, open_task
from tests.service.test_connections import connected
from tests.service.test_tenants import by_header
from tests.service.token_callers import bearer_header, serve_with_tokens, store_of, token_for

REPLAY_S = 0.02


@pytest.mark.contract("API-2", "API-4")
async def test_queries_that_replay_their_runs_leave_the_loop_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    replays: list[tuple[float, float]] = []

    def slow(*of: Any) -> Any:
        began_at = time.monotonic()
        while time.monotonic() - began_at < REPLAY_S:
            pass  # a long history holds up the loop
        answer = rebuild(*of)
        replays.append((began_at, time.monotonic()))
        return answer

    async with serve_in_process() as server:
        run_id = await server.start("order", order_id="o-1")
        await server.rest("runs.cancel", {"run_id": run_id})
        await server.rest("runs.result", {"run_id": run_id, "wait_s": 10})
        monkeypatch.setattr("holdfast.engine.run_queries.rebuild", slow)
        ask = {"run_id": run_id, "name": "progress"}
        batch = [{"jsonrpc": "2.0", "id": number, "method": "runs.query", "params": ask} for number in range(5)]
        answers = (await server.http.post("/rpc", json=batch)).json()
        assert [answer["result"]["result"] for answer in answers] == [{"order_id": "o-1"}] * 5
    assert len(replays) == 5
    for (began_at, ended_at), (next_began_at, _) in pairwise(replays):
        assert next_began_at - ended_at >= ended_at - began_at, "turns and other callers have their time in between"


@pytest.mark.contract("API-4")
async def test_queries_count_as_what_a_caller_reads() -> None:
    async with serve_with_tokens(options=ServiceOptions(reads_per_minute=3)) as server:
        admin = bearer_header(await token_for(server))
        started = await server.http.post(
            "/v1/runs", json={"workflow": "order", "input": {"order_id": "o-1"}}, headers=admin
        )
        run_id = started.json()["run_id"]
        viewer = bearer_header(await token_for(server, "viewer"))
        path = f"/v1/runs/{run_id}/queries/progress"
        answers = [(await server.http.post(path, json={}, headers=viewer)).status_code for _ in range(4)]
        assert answers == [200, 200, 200, 429]


@pytest.mark.contract("API-4")
async def test_who_leaves_while_signing_in_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app()
    half = (
        b"POST /session HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"X-Holdfast-Request: 1\r\nContent-Length: 100\r\n\r\n{"
    )
    async with asyncio.timeout(MOST_SECONDS), app.node("memory://"):
        service = make_service(app, ServiceOptions(port=0), TokenAccess(app, 2.0))
        with caplog.at_level(logging.INFO):
            async with listening(service) as port:
                async with connected(port) as (_, writer):
                    writer.write(half)
                    await writer.drain()
                async with connected(port) as (reader, writer):  # by now the other one has been read, and has gone
                    writer.write(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n")
                    assert b" 200 " in await reader.readuntil(b"\r\n")
        assert "failed" not in caplog.text


@pytest.mark.contract("API-4")
async def test_a_token_revoked_elsewhere_makes_no_token_that_outlives_it() -> None:
    async with serve_with_tokens(options=ServiceOptions(tokens_s=3_600)) as server:
        store = store_of(server)
        leaked, record = await make_token(store, "mallory", role="admin")
        assert (await server.http.get("/v1/tokens", headers=bearer_header(leaked))).status_code == 200, (
            "it is known here now"
        )
        await revoke_token(store, record, "ann")  # by another process, which has found no descendants
        made = await server.http.post("/v1/tokens", json={"name": "m2", "role": "admin"}, headers=bearer_header(leaked))
        assert made.status_code == 401
        for token in await store.find_tokens(TokenQuery()):
            assert token.revoked_at is not None, token


@pytest.mark.contract("API-4")
async def test_who_is_known_without_a_token_is_one_person_too() -> None:
    """An `authenticate` of one's own may know callers by their names alone."""
    async with serve_in_process(app=app_with_quorum(), authenticate=by_header) as server:
        _, started = await server.rest("runs.start", {"workflow": "quorum"})
        task_id = await open_task(server, started["run_id"])
        answer = {"task_id": task_id, "answer": True, "actor_roles": ["clerk"]}
        assert (await server.rest("tasks.complete", {**answer, "actor": "bob"}))[0] == 200
        assert (await server.rest("tasks.complete", {**answer, "actor": "carl"}))[0] == 409, "ann acts for both"
        _, page = await server.rest("audit.list", {"operation": "tasks.complete"})
        assert {entry["by"]["name"] for entry in page["items"]} == {"ann"}


@pytest.mark.contract("API-2", "API-4")
async def test_bodies_under_way_are_bounded_for_each_caller_and_for_those_whom_nobody_knows() -> None:
    app, size = make_app(), 1_000_000
    head = (
        f"POST /v1/activities/complete HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}"
    )
    async with asyncio.timeout(MOST_SECONDS), app.node("memory://"):
        options = ServiceOptions(port=0, receiving_bytes=8 * size)
        service = make_service(app, options, TokenAccess(app, 2.0))
        token, _ = await make_token(app.runtime().store, "ann", role="admin")
        async with listening(service) as port, connected(port) as (_, first), connected(port) as (reader, second):
            first.write(f"{head}\r\n\r\n{{".encode())
            while not service.receiving.bytes:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            second.write(f"{head}\r\n\r\n{{".encode())
            assert b" 503 " in await reader.readuntil(b"\r\n"), "the two are one caller, as long as nobody knows them"
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", headers=bearer_header(token), timeout=60
            ) as http:
                input = {"workflow": "echo", "input": {"value": "x" * 200_000}}
                assert (await http.post("/v1/runs", json=input)).status_code == 201, "others have their own share"
        assert service.receiving.bytes == 0
