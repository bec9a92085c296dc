"""Deleting a run, and what a tenant has, over the API."""

from typing import Any

import pytest

from holdfast.store.queries import AuditQuery, ScheduleQuery, TokenQuery
from tests.service.in_process import InProcessServer
from tests.service.token_callers import (
    TRANSPORTS,
    bearer_header,
    call_operation,
    code_in,
    serve_with_tokens,
    store_of,
    token_for,
)


async def started(server: InProcessServer, headers: dict[str, str], workflow: str = "echo") -> str:
    response = await call_operation(server, "rest", "runs.start", {"workflow": workflow}, headers)
    run_id = str(response.json()["run_id"])
    if workflow == "echo":
        await server.app.run(run_id).result()
    return run_id


def told(response: Any) -> dict[str, Any]:
    body = response.json()
    return dict(body["result"] if "jsonrpc" in body else body)


@pytest.mark.contract("FMT-2", "API-4")
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_finished_run_is_deleted_and_one_that_goes_on_is_not(transport: str) -> None:
    async with serve_with_tokens() as server:
        headers = bearer_header(await token_for(server, name="ann"))
        done, going = await started(server, headers), await started(server, headers, "patient")
        refused = await call_operation(server, transport, "runs.delete", {"run_id": going}, headers)
        assert code_in(refused) == "Conflict"
        planned = told(
            await call_operation(server, transport, "runs.delete", {"run_id": done, "dry_run": True}, headers)
        )
        assert (planned["runs"], planned["is_dry_run"]) == (1, True)
        assert (await call_operation(server, "rest", "runs.get", {"run_id": done}, headers)).status_code == 200
        assert told(await call_operation(server, transport, "runs.delete", {"run_id": done}, headers))["runs"] == 1
        assert code_in(await call_operation(server, transport, "runs.get", {"run_id": done}, headers)) == "NotFound"
        assert code_in(await call_operation(server, transport, "runs.delete", {"run_id": done}, headers)) == "NotFound"
        await call_operation(server, "rest", "runs.terminate", {"run_id": going, "wait": True}, headers)
        assert told(await call_operation(server, transport, "runs.delete", {"run_id": going}, headers))["runs"] == 1
        found = await store_of(server).find(AuditQuery(operation="runs.delete"))
        assert [(entry.run_id, entry.tenant) for entry in found] == [(done, "default"), (going, "default")]


@pytest.mark.contract("API-4")
async def test_only_admins_delete_and_only_what_is_theirs() -> None:
    async with serve_with_tokens() as server:
        root = bearer_header(await token_for(server, name="root"))
        acme = bearer_header(await token_for(server, name="acme", tenant="acme"))
        engineer = bearer_header(await token_for(server, "engineer", name="eng"))
        others = await started(server, root)
        assert code_in(await call_operation(server, "rest", "runs.delete", {"run_id": others}, acme)) == "NotFound"
        assert (
            code_in(await call_operation(server, "rest", "runs.delete", {"run_id": others}, engineer)) == "NotPermitted"
        )
        for headers in (acme, engineer):
            response = await call_operation(server, "rest", "tenants.delete", {"tenant": "acme", "yes": True}, headers)
            assert code_in(response) == "NotPermitted"
        own = await started(server, acme)
        assert told(await call_operation(server, "rest", "runs.delete", {"run_id": own}, acme))["runs"] == 1


@pytest.mark.contract("API-4", "FMT-2")
async def test_what_a_tenant_has_is_deleted_once_its_runs_have_finished() -> None:
    async with serve_with_tokens() as server:
        root = bearer_header(await token_for(server, name="root"))
        token = await token_for(server, name="acme", tenant="acme")
        acme = bearer_header(token)
        runs = [await started(server, acme) for _ in range(3)]
        kept = await started(server, root)
        going = await started(server, acme, "patient")
        hourly = {"schedule_id": "hourly", "workflow": "echo", "every_s": 3_600}
        for headers in (acme, root):
            told(await call_operation(server, "rest", "schedules.create", hourly, headers))
        sure = {"tenant": "acme", "yes": True}
        assert (
            code_in(await call_operation(server, "rest", "tenants.delete", {"tenant": "acme"}, root)) == "InvalidInput"
        )
        assert code_in(await call_operation(server, "rest", "tenants.delete", sure, root)) == "Conflict"
        await call_operation(server, "rest", "runs.terminate", {"run_id": going, "wait": True}, acme)
        planned = told(
            await call_operation(server, "rest", "tenants.delete", {"tenant": "acme", "dry_run": True}, root)
        )
        deleted = told(await call_operation(server, "rest", "tenants.delete", sure, root))
        assert (deleted["runs"], deleted["tokens"], deleted["schedules"], deleted["has_more"]) == (4, 1, 1, False)
        counted = ("runs", "events", "schedules")
        assert {name: planned[name] for name in counted} == {name: deleted[name] for name in counted}
        assert [left.tenant for left in await store_of(server).find(ScheduleQuery())] == ["default"]
        assert (await server.http.get("/v1/runs", headers=acme)).status_code in (200, 401), "known for two seconds more"
        assert await store_of(server).load([*runs, going]) == [None] * 4
        assert (await store_of(server).load([kept]))[0] is not None
        assert [found.name for found in await store_of(server).find_tokens(TokenQuery())] == ["root"]
        left = await store_of(server).find(AuditQuery())
        assert [entry.operation for entry in left if entry.tenant == "acme"] == []
        [said] = [entry for entry in left if entry.operation == "tenants.delete"]
        assert (said.subject, said.by and said.by.name) == ("acme", "root")
        assert "runs 4" in said.detail
