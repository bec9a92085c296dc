"""Who did it: `by` in every event that a caller causes, and the audit log."""

import asyncio
from typing import Any

import pytest

import holdfast as hf
from holdfast.app import App
from holdfast.core import codec
from holdfast.core.access import read_token
from holdfast.core.events import CallerRef
from holdfast.service.operations import OPERATIONS
from holdfast.store.queries import AuditQuery, DeadLetterQuery
from holdfast.testing.samples import dead_letter
from tests.service.in_process import InProcessServer, make_app
from tests.service.token_callers import (
    TRANSPORTS,
    bearer_header,
    call_operation,
    code_in,
    serve_with_tokens,
    store_of,
    token_for,
)

WRITES = {name for name, operation in OPERATIONS.items() if operation.verb != "GET"}


def app_with_quorum() -> App:
    app = make_app()

    @app.workflow
    async def quorum() -> Any:
        return await hf.task("release", bool, roles=["clerk"], approvals=2, of=3)

    return app


async def events_of(server: InProcessServer, run_id: str) -> dict[str, Any]:
    events = await server.app.run(run_id).events()
    return {event.event_type: event.data for event in events}


async def made(server: InProcessServer, headers: dict[str, str], operation: str, /, **fields: Any) -> Any:
    response = await call_operation(server, "rest", operation, fields, headers)
    assert response.status_code < 300, response.text
    return response.json()


async def entries(server: InProcessServer, **query: Any) -> list[tuple[str, str, str]]:
    found = await store_of(server).find(AuditQuery(**query))
    return [(entry.operation, entry.actor, entry.by.name if entry.by else "") for entry in found]


async def open_task(server: InProcessServer, run_id: str) -> str:
    """Return the task that a run asks, once it does."""
    async with asyncio.timeout(60):
        listener = store_of(server).wakeups.listen()
        while not (found := await server.app.tasks.list(run_id=run_id, status="OPEN")):
            await listener.wait(0.1)
        listener.close()
    return found[0].task_id


@pytest.mark.contract("API-4", "EVT-4", "SIG-13")
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_every_event_that_a_caller_causes_names_the_token_beside_the_actor(transport: str) -> None:
    async with serve_with_tokens() as server:
        token = await token_for(server, name="ann")
        headers = bearer_header(token)
        started = await made(server, headers, "runs.start", workflow="order", input={"order_id": "o"})
        run_id = started["run_id"]
        for name, fields in (
            ("runs.update", {"name": "change_address", "input": {"city": "Bern"}}),
            ("runs.pause", {"actor": "bob", "wait": True}),
            ("runs.resume", {"actor": "bob", "wait": True}),
            ("signals.send", {"name": "approval", "payload": {"approved": True}}),
        ):
            response = await call_operation(server, transport, name, {"run_id": run_id, **fields}, headers)
            assert (response.is_success, code_in(response)) == (True, ""), response.text
        await server.app.run(run_id).result()
        found = await events_of(server, run_id)
        for kind in ("RunQueued", "UpdateAccepted", "SignalAccepted", "RunPaused", "RunResumed", "SignalReceived"):
            assert found[kind].by == CallerRef(read_token(token)[0], "ann"), kind  # type: ignore[index]
        assert found["SignalAccepted"].actor == "bob"
        assert (found["RunStarted"].by, found["RunCompleted"].by) == (None, None)


@pytest.mark.contract("API-4")
async def test_code_of_this_process_is_no_caller() -> None:
    async with serve_with_tokens() as server:
        registry = server.app.registry
        started = await server.app.runtime().start(registry.workflow("echo"), codec.encode({"value": 1}))
        run = server.app.run(started.run_id)
        await run.result()
        assert all(event.data.by is None for event in await run.events())
        assert await entries(server) == []


@pytest.mark.contract("API-4", "SIG-5")
async def test_a_retry_by_another_token_is_the_same_request() -> None:
    """What is compared is the request, and not its caller."""
    async with serve_with_tokens() as server:
        ann, bob = [bearer_header(await token_for(server, name=name)) for name in ("ann", "bob")]
        fields: dict[str, Any] = {"workflow": "patient", "request_id": "r-1"}
        first, again = [await made(server, headers, "runs.start", **fields) for headers in (ann, bob)]
        assert first["run_id"] == again["run_id"]
        sent = {"run_id": first["run_id"], "name": "go", "signal_id": "s-1", "payload": 1}
        taken = [await made(server, headers, "signals.send", **sent) for headers in (ann, bob)]
        assert taken[0] == taken[1]
        pause = {"run_id": first["run_id"], "actor": "carl", "signal_id": "p-1", "wait": True}
        for headers in (ann, bob):
            await made(server, headers, "runs.pause", **pause)
        assert await entries(server) == [
            ("runs.start", "ann", "ann"),
            ("signals.send", "ann", "ann"),
            ("runs.pause", "carl", "ann"),
        ]


@pytest.mark.contract("API-4")
async def test_one_token_is_one_person_in_a_quorum_whomever_it_acts_for() -> None:
    async with serve_with_tokens(app=app_with_quorum()) as server:
        admin = bearer_header(await token_for(server, name="root"))
        other = bearer_header(await token_for(server, name="eve", roles=("clerk",)))
        run_id = (await made(server, admin, "runs.start", workflow="quorum"))["run_id"]
        task_id = await open_task(server, run_id)
        answer = {"task_id": task_id, "answer": True, "actor_roles": ["clerk"]}
        assert (
            await call_operation(server, "rest", "tasks.complete", {**answer, "actor": "ann"}, admin)
        ).status_code == 200
        for actor in ("bob", "root", "ann"):
            response = await call_operation(server, "rest", "tasks.complete", {**answer, "actor": actor}, admin)
            assert (response.status_code, code_in(response)) == (409, "Conflict"), response.text
        assert (await server.app.run(run_id).status()) == "RUNNING"
        response = await call_operation(server, "rest", "tasks.complete", {"task_id": task_id, "answer": True}, other)
        assert response.status_code == 200, response.text
        assert await server.app.run(run_id).result() == [True, True]
        answered: list[Any] = [e.data for e in await server.app.run(run_id).events() if e.event_type == "TaskAnswered"]
        assert [(body.actor, body.by.name) for body in answered] == [("ann", "root"), ("eve", "eve")]


@pytest.mark.contract("API-4")
async def test_a_session_is_its_token_in_a_quorum() -> None:
    """Signing in does not make somebody a second person."""
    async with serve_with_tokens(app=app_with_quorum()) as server:
        token = await token_for(server, name="root")
        run_id = (await made(server, bearer_header(token), "runs.start", workflow="quorum"))["run_id"]
        task_id = await open_task(server, run_id)
        answer = {"task_id": task_id, "answer": True, "actor_roles": ["clerk"]}
        await made(server, bearer_header(token), "tasks.complete", **answer, actor="ann")
        own = {"x-holdfast-request": "1"}
        signed_in = await server.http.post("/session", json={"token": token}, headers=own)
        cookie = signed_in.headers["set-cookie"].partition(";")[0]
        server.http.cookies.clear()
        fields = {**answer, "actor": "bob"}
        response = await call_operation(server, "rest", "tasks.complete", fields, {"cookie": cookie, **own})
        assert code_in(response) == "Conflict"


@pytest.mark.contract("API-4")
async def test_what_a_caller_changes_is_in_the_audit_log_and_what_they_read_is_not() -> None:
    async with serve_with_tokens(app=app_with_quorum()) as server:
        token = await token_for(server, name="ann", roles=("clerk",))
        headers = bearer_header(token)
        order = (await made(server, headers, "runs.start", workflow="order", input={"order_id": "o"}))["run_id"]
        asking = (await made(server, headers, "runs.start", workflow="asking", input={"who": "x"}))["run_id"]
        task_id = await open_task(server, asking)
        letter = dead_letter(order)
        store: Any = store_of(server)
        store._store._runs[order].letters[letter.letter_id] = letter
        done: list[tuple[str, dict[str, Any]]] = [
            ("runs.update", {"run_id": order, "name": "change_address", "input": {"city": "Bern"}}),
            ("signals.send_many", {"signals": [{"run_id": order, "name": "other"}]}),
            ("signals.start_with", {"workflow": "patient", "signal_name": "go"}),
            ("tasks.claim", {"task_id": task_id}),
            ("tasks.comment", {"task_id": task_id, "text": "hm"}),
            ("tasks.complete", {"task_id": task_id, "answer": True}),
            ("letters.drop", {"letter_id": letter.letter_id}),
            ("runs.cancel", {"run_id": order, "wait": True}),
            ("tokens.create", {"name": "bot", "role": "viewer"}),
        ]
        for name, fields in done:
            await made(server, headers, name, **fields)
        for name, fields in (("runs.get", {"run_id": order}), ("runs.list", {}), ("audit.list", {})):
            await made(server, headers, name, **fields)
        assert (
            await call_operation(server, "rest", "runs.query", {"run_id": order, "name": "progress"}, headers)
        ).is_success
        found = [operation for operation, _, _ in await entries(server)]
        wanted = ["runs.start", "runs.start", *(name for name, _ in done)]
        wanted.insert(wanted.index("signals.start_with"), "signals.start_with")  # the run, and its signal
        assert found == wanted
        assert await store_of(server).find(DeadLetterQuery()) == []


@pytest.mark.contract("API-4", "FMT-2")
async def test_a_pass_of_retention_names_the_token_of_who_asked_for_it() -> None:
    async with serve_with_tokens() as server:
        token = await token_for(server, name="ann")
        headers = bearer_header(token)
        run_id = (await made(server, headers, "runs.start", workflow="echo"))["run_id"]
        await made(server, headers, "runs.result", run_id=run_id, wait_s=10)
        server.app.runtime().retention.policy = hf.Retention(finished=0)
        assert (await made(server, headers, "retention.run"))["runs"] == 1
        [entry] = await store_of(server).find(AuditQuery(operation="retention.run"))
        token_id, _ = read_token(token) or ("", "")
        assert (entry.by, entry.actor, bool(entry.correlation_id)) == (CallerRef(token_id, "ann"), "ann", True)


@pytest.mark.contract("API-4")
async def test_every_operation_that_changes_something_says_how_it_is_audited() -> None:
    changing = {name for name in WRITES if OPERATIONS[name].audit != "nothing"}
    # Which only look, or say that work goes on.
    assert WRITES - changing == {"activities.heartbeat", "plans.validate", "runs.query"}
    assert {name for name, operation in OPERATIONS.items() if operation.verb == "GET"}.isdisjoint(changing)


@pytest.mark.contract("API-4")
async def test_what_the_authoriser_refuses_is_in_the_audit_log_as_refused() -> None:
    app = hf.App("shop", authoriser=lambda request: request.command != "PAUSE")

    @app.workflow
    async def patient() -> Any:
        return await hf.wait_signal("go")

    async with serve_with_tokens(app=app) as server:
        headers = bearer_header(await token_for(server, name="ann"))
        run_id = (await made(server, headers, "runs.start", workflow="patient"))["run_id"]
        assert (
            code_in(await call_operation(server, "rest", "runs.pause", {"run_id": run_id}, headers)) == "NotPermitted"
        )
        [refused] = await store_of(server).find(AuditQuery(operation="runs.pause"))
        assert (refused.outcome, refused.run_id, refused.by and refused.by.name) == ("refused", run_id, "ann")


@pytest.mark.contract("API-4")
async def test_the_audit_log_is_for_admins_and_of_their_tenant() -> None:
    async with serve_with_tokens() as server:
        acme, other = [bearer_header(await token_for(server, name=t, tenant=t)) for t in ("acme", "other")]
        everybody = bearer_header(await token_for(server, name="root"))
        for headers in (acme, other):
            await made(server, headers, "runs.start", workflow="echo")
            await made(server, headers, "tokens.create", name="bot", role="viewer")
        await made(server, everybody, "tokens.create", name="all", role="viewer")
        for role in ("viewer", "operator", "engineer"):
            limited = bearer_header(await token_for(server, role, name=role))
            assert code_in(await call_operation(server, "rest", "audit.list", {}, limited)) == "NotPermitted"
        seen = (await made(server, acme, "audit.list", tenant="other", order="oldest"))["items"]
        assert [(item["operation"], item["tenant"]) for item in seen] == [
            ("runs.start", "acme"),
            ("tokens.create", "acme"),
        ]
        assert len((await made(server, everybody, "audit.list"))["items"]) == 5
        newest = (await made(server, everybody, "audit.list", limit=2))["items"]
        assert [item["subject"] != "" for item in newest] == [True, True]
        assert newest[0]["tenant"] is None


@pytest.mark.contract("API-4")
async def test_sign_ins_and_those_that_fail_are_in_the_audit_log_and_cannot_fill_it() -> None:
    async with serve_with_tokens() as server:
        token = await token_for(server, name="ann")
        own = {"x-holdfast-request": "1"}
        signed_in = await server.http.post("/session", json={"token": token}, headers=own)
        cookie = signed_in.headers["set-cookie"].partition(";")[0]
        server.http.cookies.clear()
        assert (await server.http.delete("/session", headers={"cookie": cookie, **own})).status_code == 204
        for _ in range(50):
            assert (await server.http.post("/session", json={"token": "guess"}, headers=own)).status_code == 401
        found = await store_of(server).find(AuditQuery(limit=500))
        assert [(entry.operation, entry.outcome, entry.actor) for entry in found[:2]] == [
            ("session.sign_in", "done", "ann"),
            ("session.sign_out", "done", "ann"),
        ]
        assert {(entry.operation, entry.outcome, entry.by) for entry in found[2:]} == {
            ("session.sign_in", "refused", None)
        }
        assert 1 <= len(found[2:]) <= 10
        assert "guess" not in str(found)


@pytest.mark.contract("API-4")
async def test_refusals_of_one_caller_leave_the_lines_of_others_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with serve_with_tokens() as server:
        noisy = bearer_header(await token_for(server, "viewer", name="mallory"))
        quiet = bearer_header(await token_for(server, "viewer", name="victim"))
        for _ in range(200):
            await server.http.get("/v1/tokens", headers=noisy)
        await server.http.get("/v1/tokens", headers=quiet)
        lines = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
        assert 0 < sum("mallory" in line for line in lines) <= 60
        assert sum("victim" in line for line in lines) == 1
