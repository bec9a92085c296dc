"""Every operation for everybody: each role and scope, no token and useless ones, and another tenant's things.

`LEAST` says what is documented. An operation that nobody has classified there fails these tests.
"""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.bus import OutboxReplay, OutboxSettlement, Sink, SinkProgress, letter_of
from holdfast.engine.inbox.authorization import OVERRIDE
from holdfast.service.auth.roles import OF_ALL_TENANTS, ROLES, SCOPES
from holdfast.service.auth.tokens import make_token
from holdfast.service.http.openapi import EXAMPLES, RUN
from holdfast.service.http.static import ASSETS, PLACES
from holdfast.service.operations import OPERATIONS, STREAMS
from holdfast.store.port import PurgePolicy, RunQuery
from holdfast.store.queries import DeadLetterQuery, OutboxQuery
from holdfast.testing import VirtualClock
from holdfast.testing.store_suite.retention import archived_run
from tests.service.in_process import InProcessServer
from tests.service.operation_cases import dead_letter, finished
from tests.service.token_callers import (
    TRANSPORTS,
    bearer_header,
    call_operation,
    code_in,
    problem_in,
    serve_with_tokens,
    status_at,
    store_of,
    token_for,
    useless_tokens,
)

EVERYBODY, VIEWER, OPERATOR, ENGINEER, ADMIN = "everybody", *ROLES

LEAST = {
    **dict.fromkeys(["system.health", "activities.complete", "activities.fail", "activities.heartbeat"], EVERYBODY),
    **dict.fromkeys(
        "runs.get runs.list runs.count runs.diff runs.events runs.snapshot runs.graph runs.result runs.query "
        "runs.handlers streams.list streams.read signals.receipt "
        "signals.waiting signals.waits signals.mailbox signals.unconsumed tasks.list tasks.get tasks.history "
        "letters.list letters.get sinks.list bus.letters workflows.list workflows.get "
        "plans.schema plans.validate plans.list plans.get "
        "plans.diff plans.graph schedules.list schedules.get "
        "retention.show retention.preview archive.list archive.get archive.events "
        "system.stats system.doctor system.queues system.nodes system.locks system.samples system.takeovers "
        "system.alerts".split(),
        VIEWER,
    ),
    **dict.fromkeys(
        "runs.cancel runs.pause runs.resume runs.approve runs.terminate runs.retry_step runs.skip_step runs.retry "
        "runs.fork runs.fork_many runs.command_many "
        "tasks.assign tasks.claim tasks.release tasks.reassign tasks.complete tasks.comment letters.requeue "
        "letters.drop bus.requeue bus.drop schedules.pause schedules.resume".split(),
        OPERATOR,
    ),
    **dict.fromkeys(
        "schedules.create schedules.update schedules.trigger schedules.backfill schedules.delete "
        "runs.start runs.update plans.register plans.start signals.send signals.send_many signals.start_with".split(),
        ENGINEER,
    ),
    **dict.fromkeys(
        "tokens.create tokens.list tokens.revoke tokens.revoke_leaked audit.list runs.delete tenants.delete "
        "retention.run sinks.put sinks.pause sinks.resume sinks.remove bus.replay".split(),
        ADMIN,
    ),
}
"""The least role that may ask for each operation."""

ALSO_NEEDS = {"signals.start_with": {"runs:write"}}
"""What an operation needs beside its scope."""

DOCS = Path(__file__).parents[2] / "docs" / "access.md"


def asked(name: str, **changes: Any) -> dict[str, Any]:
    """Return what an operation may be asked, by somebody who speaks for themselves."""
    fields = {field: value for field, value in EXAMPLES[name].items() if not field.startswith("actor")}
    return {**fields, **changes}


@pytest.mark.contract("API-4")
def test_every_operation_is_classified() -> None:
    assert set(LEAST) == set(OPERATIONS)
    for name, least in LEAST.items():
        scope = OPERATIONS[name].scope
        if least == EVERYBODY:
            assert scope is None
            continue
        needed = {scope, *ALSO_NEEDS.get(name, ())}
        assert needed <= SCOPES, name
        assert next(role for role, granted in ROLES.items() if needed <= granted) == least, name
    used = {operation.scope for operation in OPERATIONS.values()} - {None}
    assert used | {OVERRIDE} == SCOPES, "a scope that opens nothing"


@pytest.mark.contract("API-4")
def test_the_page_says_the_same_as_the_code() -> None:
    rows = [line.split("|")[1:-1] for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    table = {row[0].strip(" `"): [cell.strip() for cell in row[1:]] for row in rows if len(row) == len(ROLES) + 2}
    assert set(table) == SCOPES
    for scope, (*granted, operations) in table.items():
        assert granted == ["yes" if scope in scopes else "" for scopes in ROLES.values()], scope
        named = {name for name, operation in {**OPERATIONS, **STREAMS}.items() if operation.scope == scope}
        named |= {"GET /metrics"} if scope == "system:read" else set()
        named |= {"runs.skip_step of a task or a wait"} if scope == OVERRIDE else set()
        assert set(operations.replace("`", "").split(", ")) == named, scope


@pytest.mark.contract("API-4")
@pytest.mark.parametrize("name", sorted(OPERATIONS))
async def test_every_operation_for_every_role_and_scope(name: str) -> None:
    scope = OPERATIONS[name].scope
    order = list(ROLES)
    async with serve_with_tokens() as server:
        for role in order:
            is_allowed = LEAST[name] == EVERYBODY or order.index(role) >= order.index(LEAST[name])
            await check(server, name, await token_for(server, role), is_allowed)
        for granted in sorted(SCOPES):
            token, _ = await make_token(store_of(server), "sam", scopes=[granted])
            await check(server, name, token, scope is None or (granted == scope and name not in ALSO_NEEDS))


async def check(server: InProcessServer, name: str, token: str, is_allowed: bool) -> None:
    """Ask with a token, and see that it gets as far as it should."""
    for transport in TRANSPORTS:
        response = await call_operation(server, transport, name, asked(name), bearer_header(token))
        code = code_in(response)
        assert (code == "NotPermitted") == (not is_allowed), (transport, name, response.text)
        assert code not in ("NotAuthenticated", "InternalError", "MalformedRequest", "RateLimited"), response.text


@pytest.mark.contract("API-4")
@pytest.mark.parametrize("name", sorted(OPERATIONS))
async def test_every_operation_without_a_token_or_with_a_useless_one(name: str) -> None:
    async with serve_with_tokens() as server:
        before = await store_of(server).stats()
        useless = {kind: bearer_header(token) for kind, token in (await useless_tokens(server)).items()}
        told: set[str] = set()
        for transport in TRANSPORTS:
            for kind, headers in {"none": {}, **useless}.items():
                response = await call_operation(server, transport, name, asked(name), headers)
                if LEAST[name] == EVERYBODY and transport == "rest":
                    assert response.status_code == (422 if name.startswith("activities.") else 200)
                    continue
                problem = problem_in(response)
                assert (response.status_code, code_in(response)) == (401, "NotAuthenticated"), (kind, response.text)
                assert response.headers["www-authenticate"].startswith("Bearer")
                assert problem is not None
                if kind == "none":
                    assert "holdfast token create" in problem["detail"]
                else:
                    told.add(problem["detail"] + str(problem["details"]))
        assert len(told) <= 1, "useless tokens are told apart"
        assert (await store_of(server).stats()).runs == before.runs


# --- what is not in the catalogue

ADDRESSES = {
    "/openapi.json": None,
    "/metrics": "system:read",
    f"/v1/runs/{RUN}/stream": "runs:read",
    f"/v1/runs/{RUN}/streams/tokens/follow": "runs:read",
    "/v1/stream": "runs:read",
    "/v1/stream?kinds=tasks": "tasks:read",
    "/v1/stream?kinds=letters": "letters:read",
}
"""Every other address, and the scope that it takes; None takes a token, whatever it is good for."""


@pytest.mark.contract("API-4")
async def test_every_other_address_is_classified() -> None:
    async with serve_with_tokens() as server:
        transport: Any = server.http._transport
        routes = transport.app._others.routes
        paths = [operation.path for operation in STREAMS.values()]
        streams = {path.replace("{run_id}", RUN).replace("{name}", "tokens") for path in paths}
        known = {route.path for route in routes} | streams
    sessions = {"/session", "/session/ways", "/session/oidc", "/session/oidc/callback"}
    elsewhere = {*sessions, *PLACES, f"{ASSETS}/{{version}}/{{name:path}}"}  # which have tests of their own
    assert known - elsewhere == {address.partition("?")[0] for address in ADDRESSES}


@pytest.mark.contract("API-4")
@pytest.mark.parametrize("address", ADDRESSES)
async def test_every_other_address_for_everybody(address: str) -> None:
    scope = ADDRESSES[address]
    fine = 404 if RUN in address else 200
    async with serve_with_tokens() as server:
        for headers in ({}, *map(bearer_header, (await useless_tokens(server)).values())):
            assert await status_at(server, address, headers) == 401
        for role in ROLES:
            assert await status_at(server, address, bearer_header(await token_for(server, role))) == fine, role
        for granted in sorted(SCOPES):
            token, _ = await make_token(store_of(server), "sam", scopes=[granted])
            assert await status_at(server, address, bearer_header(token)) == (fine if scope in (None, granted) else 403)
        of_tenant = bearer_header(await token_for(server, "viewer", tenant="acme"))
        assert await status_at(server, address, of_tenant) == (403 if scope in OF_ALL_TENANTS else fine)


# --- another tenant

OF_THINGS = {
    "run_id": "run",
    "task_id": "task",
    "letter_id": "letter",
    "token_id": "token",
    "plan_id": "plan",
    "sink": "sink",
    "schedule_id": "schedule",
}
LISTS = {
    "runs.list",
    "signals.waiting",
    "signals.unconsumed",
    "tasks.list",
    "letters.list",
    "tokens.list",
    "audit.list",
    "plans.list",
    "archive.list",
    "sinks.list",
    "bus.letters",
    "schedules.list",
}
MAKES = {"runs.start", "signals.start_with", "tokens.create", "plans.register", "sinks.put", "schedules.create"}
SHARED = {"runs.count", "workflows.list", "workflows.get", "system.health", "plans.schema", "plans.validate"}
BEARERS = {"activities.complete", "activities.fail", "activities.heartbeat"}
"""What is asked by who has a completion token, whoever they are otherwise."""
MANY = {
    "runs.fork_many",
    "runs.command_many",
    "signals.send_many",
    "tokens.revoke_leaked",
    "tenants.delete",
    "retention.run",
}


def clocked() -> AbstractAsyncContextManager[InProcessServer]:
    """Return a stage with a clock that tests move."""
    return serve_with_tokens(hf.MemoryStore(VirtualClock()))


async def things_of_globex(server: InProcessServer) -> dict[str, str]:
    """Return the ids of what another tenant has: a run, a task, a dead letter, a token, a plan."""
    token = await token_for(server, tenant="globex", name="gus", roles=["clerk"])
    server.http.headers.update(bearer_header(token))
    store: Any = store_of(server)
    things = {"letter": await dead_letter(server, store.inner._clock), "token": token[9:25]}
    document = EXAMPLES["plans.register"]["document"].replace("etl", "plan-of-globex")
    for version in "12":
        ask = {"document": document.replace("'1'", f"'{version}'")}
        things["plan"] = (await server.rest("plans.register", ask))[1]["plan_id"]
    made = {"schedule_id": "schedule-of-globex", "workflow": "echo", "cron": "@yearly"}
    things["schedule"] = (await server.rest("schedules.create", made))[1]["schedule_id"]
    await server.start("asking", who="secret-of-globex")
    page = await server.until("tasks.list", {}, lambda page: page["items"])
    things["task"] = page["items"][0]["task_id"]
    [dead] = await store.find(DeadLetterQuery())
    things["run"] = dead.run_id
    things["archived"] = await finished(server, "echo")
    head = (await store.load([things["archived"]]))[0].head
    purge = PurgePolicy(run_ids=(head.run_id,), finished_run_ms=0, archived=(archived_run(head),))
    assert (await store.purge(purge)).runs == 1
    sink = Sink(
        name="globex:hook",
        kind="webhook",
        address="https://example.com",
        secret="x",
        tenant="globex",
        is_paused=True,
    )
    things["sink"] = (await store.put_sink(sink)).name
    await store.replay_outbox(OutboxReplay(sink.name, run_id=things["run"]))
    [entry, *_] = await store.find(OutboxQuery(sink=sink.name))
    letter = letter_of(sink, entry, "gone", await store.now())
    await store.settle_outbox(sink.name, [OutboxSettlement(entry=entry, letter=letter)], SinkProgress())
    del server.http.headers["authorization"]
    return things


def thing_of(name: str) -> str | None:
    """Return the field by which an operation names a thing, if it does."""
    return next((field for field in OPERATIONS[name].path_fields if field in OF_THINGS), None)


@pytest.mark.contract("API-4")
def test_every_operation_is_classified_by_what_it_is_about() -> None:
    about_all = {name for name, operation in OPERATIONS.items() if operation.scope in OF_ALL_TENANTS}
    by_id = {name for name in OPERATIONS if thing_of(name) is not None}
    kinds = (LISTS, MAKES, SHARED, BEARERS, MANY, about_all, by_id)
    assert set().union(*kinds) == set(OPERATIONS)
    assert sum(map(len, kinds)) == len(OPERATIONS)


@pytest.mark.contract("API-4")
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_what_another_tenant_has_is_answered_as_what_is_not_there(transport: str) -> None:
    async with clocked() as server:
        things = await things_of_globex(server)
        headers = bearer_header(await token_for(server, tenant="acme", roles=["clerk"]))
        store = store_of(server)
        before = (await store.load([things["run"]]), await store.find(DeadLetterQuery(settled=True)))
        for name in OPERATIONS:
            field = thing_of(name)
            if field is None:
                continue
            foreign = things[OF_THINGS[field]]
            texts = []
            for id_ in (foreign, "0" * len(foreign)):
                response = await call_operation(server, transport, name, asked(name, **{field: id_}), headers)
                assert code_in(response) == "NotFound", (name, response.text)
                problem = problem_in(response) or {}
                texts.append(str({**problem, "correlation_id": ""}).replace(id_, "…"))
            assert texts[0] == texts[1], name
        assert before == (
            await store.load([things["run"]]),
            await store.find(DeadLetterQuery(settled=True)),
        )


@pytest.mark.contract("API-4")
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_lists_and_batches_hold_nothing_of_another_tenant(transport: str) -> None:
    async with clocked() as server:
        things = await things_of_globex(server)
        headers, globex = [
            bearer_header(await token_for(server, tenant=tenant, roles=["clerk"])) for tenant in ("acme", "globex")
        ]
        await call_operation(server, transport, "signals.send", {"run_id": things["run"], "name": "other"}, globex)
        for name in LISTS:
            response = await call_operation(server, transport, name, {}, headers)
            assert code_in(response) == "", response.text
            assert not [id_ for id_ in things.values() if id_ in response.text], name
            theirs = await call_operation(server, transport, name, {}, globex)
            assert any(id_ in theirs.text for id_ in things.values()), name
        items = [{"run_id": run_id, "name": "approval"} for run_id in (things["run"], "nowhere")]
        response = await call_operation(server, transport, "signals.send_many", {"signals": items}, headers)
        assert response.text.count('"NotFound"') == 2
        for name in (name for name, operation in OPERATIONS.items() if operation.scope in OF_ALL_TENANTS):
            response = await call_operation(server, transport, name, {}, headers)
            assert code_in(response) == "NotPermitted", response.text
            assert (
                code_in(
                    await call_operation(server, transport, name, {}, bearer_header(await token_for(server, "viewer")))
                )
                == ""
            )


@pytest.mark.contract("API-4", "QUE-1")
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_what_a_tenant_makes_is_its_own(transport: str) -> None:
    async with clocked() as server:
        globex = bearer_header(await token_for(server, tenant="globex"))
        headers = bearer_header(await token_for(server, tenant="acme", project="shop"))
        for name in ("runs.start", "signals.start_with"):
            fields = asked(name, request_id=f"the same {name}")
            assert code_in(await call_operation(server, transport, name, fields, globex)) == ""
            response = await call_operation(server, transport, name, fields, headers)
            assert code_in(response) == "", response.text
            for elsewhere in ({"project": "other"}, {"tenant": "globex"}):
                response = await call_operation(server, transport, name, asked(name, **elsewhere), headers)
                assert code_in(response) == "NotPermitted"
        runs = await store_of(server).find(RunQuery())
        assert sorted((run.tenant, run.project) for run in runs) == [("acme", "shop")] * 2 + [("globex", "default")] * 2
        made = await call_operation(server, transport, "tokens.create", {"name": "bob", "role": "viewer"}, headers)
        assert '"tenant":"acme","project":"shop"' in made.text
        for place in ({"tenant": "globex"}, {"project": "other"}):
            response = await call_operation(
                server, transport, "tokens.create", {"name": "b", "role": "viewer", **place}, headers
            )
            assert code_in(response) == "NotPermitted"


@pytest.mark.contract("API-4", "QUE-1")
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_who_has_all_tenants_says_whose_a_run_is(transport: str) -> None:
    async with clocked() as server:
        everywhere, acme = (
            bearer_header(await token_for(server)),
            bearer_header(await token_for(server, "viewer", tenant="acme")),
        )
        response = await call_operation(server, transport, "runs.start", asked("runs.start", tenant="acme"), everywhere)
        assert code_in(response) == "", response.text
        [run] = await store_of(server).find(RunQuery())
        assert run.tenant == "acme"
        assert code_in(await call_operation(server, transport, "runs.get", {"run_id": run.run_id}, acme)) == ""


@pytest.mark.contract("API-4")
async def test_the_ids_that_tenants_choose_cannot_be_anothers() -> None:
    async with clocked() as server:
        globex, acme = [bearer_header(await token_for(server, tenant=tenant)) for tenant in ("globex", "acme")]
        for transport in TRANSPORTS:
            for name in ("runs.start", "signals.start_with"):
                response = await call_operation(
                    server, transport, name, asked(name, run_id="globex:o-1", request_id=name), globex
                )
                assert code_in(response) in ("", "Conflict")
                texts = set()
                for run_id in ("globex:o-1", "globex:o-2", "o-1"):
                    response = await call_operation(
                        server, transport, name, asked(name, run_id=run_id, request_id=run_id), acme
                    )
                    assert code_in(response) == "InvalidInput"
                    texts.add((problem_in(response) or {})["detail"])
                assert len(texts) == 1, "a taken id is told from a free one"


@pytest.mark.contract("API-4")
async def test_a_token_for_a_part_of_a_tenant_sees_that_part() -> None:
    async with clocked() as server:
        whole = bearer_header(await token_for(server, tenant="acme"))
        for project, environment in (("shop", "test"), ("shop", "live"), ("bank", "test")):
            fields = {"workflow": "asking", "input": {"who": "x"}, "project": project, "environment": environment}
            assert (await call_operation(server, "rest", "runs.start", fields, whole)).status_code == 201
        server.http.headers.update(whole)
        await server.until("tasks.list", {}, lambda page: len(page["items"]) == 3)
        for places, count in (
            ({}, 3),
            ({"project": "shop"}, 2),
            ({"environment": "test"}, 2),
            ({"project": "shop", "environment": "test"}, 1),
            ({"project": "none"}, 0),
        ):
            headers = bearer_header(await token_for(server, tenant="acme", **places))
            for name in ("runs.list", "tasks.list"):
                items = (await call_operation(server, "rest", name, {}, headers)).json()["items"]
                assert len(items) == count, (name, places)


@pytest.mark.contract("QUE-5", "API-4")
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_to_replace_a_run_takes_the_scope_that_terminates_it(transport: str) -> None:
    async with clocked() as server:
        token, _ = await make_token(store_of(server), "sam", scopes=["runs:write", "signals:write"])
        starter = bearer_header(token)
        for name in ("runs.start", "signals.start_with"):
            ask = asked(name, run_id=f"of {name}", request_id=f"{name} 1")
            assert code_in(await call_operation(server, transport, name, ask, starter)) == ""
            for policy, code in (("restart-if-finished", ""), ("terminate-and-restart", "NotPermitted")):
                again = {**ask, "request_id": f"{name} {policy}", "reuse": policy}
                assert code_in(await call_operation(server, transport, name, again, starter)) == code
