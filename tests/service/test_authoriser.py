"""The app's authoriser decides on everything that comes to a run through a surface, and is given the caller (API-4)."""

from typing import Any

import pytest

from holdfast.client import Client
from holdfast.engine.inbox.authorization import ControlRequest
from holdfast.errors import NotPermitted
from holdfast.service.context import Principal
from holdfast.service.options import ServiceOptions
from tests.service.in_process import InProcessServer, make_app
from tests.service.operation_cases import open_task, waiting_order
from tests.service.token_callers import (
    TRANSPORTS,
    bearer_header,
    call_operation,
    code_in,
    serve_with_tokens,
    store_of,
    token_for,
)

GO = {"approved": True}


class Guard:
    """An authoriser that refuses everything but what it is told to let through, and notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[ControlRequest] = []
        self.is_closed = True
        self.asks_about_starts = False

    def __call__(self, request: ControlRequest) -> bool | str:
        if request.command == "START" and not self.asks_about_starts:
            return True
        self.asked.append(request)
        return "not today" if self.is_closed else True


def guarded_app(guard: Guard) -> Any:
    """Return the app of the stage with an authoriser."""
    app = make_app()
    app.authoriser = guard
    return app


async def sends(server: InProcessServer) -> dict[str, dict[str, Any]]:
    """Return everything that sends something to a run, and how it is asked for."""
    run_id, task_id = await waiting_order(server), await open_task(server)
    signal = {"run_id": run_id, "name": "approval", "payload": GO}
    return {
        "runs.update": {"run_id": run_id, "name": "change_address", "input": {"city": "Ghent"}},
        "signals.send": signal,
        "signals.send_many": {"signals": [signal, {**signal, "run_id": "nowhere"}]},
        "signals.start_with": {
            "workflow": "order",
            "input": {"order_id": "o-2"},
            "signal_name": "approval",
            "signal_payload": GO,
        },
        "runs.pause": {"run_id": run_id},
        "tasks.comment": {"task_id": task_id, "text": "hm"},
        "tasks.complete": {"task_id": task_id, "answer": True},
    }


@pytest.mark.contract("API-4", "SIG-13")
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_everything_that_is_sent_to_a_run_is_decided_by_the_authoriser(transport: str) -> None:
    guard = Guard()
    async with serve_with_tokens(app=guarded_app(guard)) as server:
        token = await token_for(server, name="ann", tenant="acme", roles=["clerk"])
        server.http.headers.update(bearer_header(token))
        runs_before = len((await server.rest("runs.list", {}))[1]["items"])
        asks = await sends(server)
        for name, fields in asks.items():
            guard.asked.clear()
            response = await call_operation(server, transport, name, fields)
            if name == "signals.send_many":
                body = response.json()
                items = body["items"] if transport == "rest" else body["result"]["items"]
                assert [item["problem"]["code"] for item in items] == ["NotPermitted", "NotFound"]
            else:
                assert code_in(response) == "NotPermitted", name
            [asked] = guard.asked
            assert asked.caller is not None
            assert (asked.actor, asked.caller.name, asked.caller.tenant, asked.tenant) == ("ann", "ann", "acme", "acme")
        assert len((await server.rest("runs.list", {}))[1]["items"]) == runs_before + 2, (
            "start_with has started nothing"
        )

        run_id = asks["signals.send"]["run_id"]

        def rejections(page: Any) -> list[Any]:
            return [each["data"]["name"] for each in page["items"] if each["event_type"] == "SignalRejected"]

        page = await server.until("runs.events", {"run_id": run_id}, lambda page: len(rejections(page)) == 4)
        assert rejections(page) == ["UPDATE change_address", "SIGNAL approval", "SIGNAL approval", "PAUSE"]
        assert "approved" not in str(page), "no payload of what was refused is kept"
        assert (await server.rest("signals.mailbox", {"run_id": run_id}))[1]["items"] == []

        guard.is_closed = False
        for name, fields in asks.items():
            if name != "runs.pause":
                assert code_in(await call_operation(server, transport, name, fields)) == "", name


@pytest.mark.contract("API-4")
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_starts_and_queries_are_decided_by_the_authoriser(transport: str) -> None:
    guard = Guard()
    async with serve_with_tokens(app=guarded_app(guard)) as server:
        server.http.headers.update(bearer_header(await token_for(server, name="ann", tenant="acme")))
        run_id = await waiting_order(server)
        guard.asks_about_starts = True
        asks: dict[str, dict[str, Any]] = {
            "runs.query": {"run_id": run_id, "name": "progress"},
            "runs.start": {"workflow": "order", "input": {"order_id": "o-2"}},
        }
        for name, fields in asks.items():
            guard.is_closed = True
            assert code_in(await call_operation(server, transport, name, fields)) == "NotPermitted", name
            asked = guard.asked[-1]
            assert asked.caller is not None
            assert (asked.actor, asked.caller.name, asked.tenant, asked.workflow) == ("ann", "ann", "acme", "order")
            guard.is_closed = False
            assert code_in(await call_operation(server, transport, name, fields)) == "", name
        assert [each.command for each in guard.asked] == ["QUERY", "QUERY", "START", "START"]


@pytest.mark.contract("SIG-13", "API-4")
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_operator_passes_no_approval_by_skipping_it(transport: str) -> None:
    async with serve_with_tokens() as server:
        server.http.headers.update(bearer_header(await token_for(server)))
        order = await waiting_order(server)
        asking = str((await server.rest("tasks.get", {"task_id": await open_task(server)}))[1]["run_id"])
        operator = bearer_header(await token_for(server, role="engineer", name="olga"))
        for run_id, step_id in ((order, "approval"), (asking, "approve")):
            fields = {"run_id": run_id, "step_id": step_id, "wait": True}
            for result in ({}, {"result": True}, {"result": GO}):
                response = await call_operation(server, transport, "runs.skip_step", {**fields, **result}, operator)
                assert code_in(response) == "NotPermitted", result
            assert (
                code_in(await call_operation(server, transport, "runs.skip_step", {**fields, "result": GO}))
                == "Conflict"
            )
        fields = {"run_id": asking, "step_id": "approve", "wait": True}
        assert code_in(await call_operation(server, transport, "runs.skip_step", fields)) == ""


@pytest.mark.contract("API-4")
async def test_the_authoriser_is_not_asked_about_what_the_caller_cannot_see() -> None:
    guard = Guard()
    async with serve_with_tokens(app=guarded_app(guard)) as server:
        server.http.headers.update(bearer_header(await token_for(server, name="ann", tenant="acme")))
        asks = await sends(server)
        [before] = await store_of(server).load([asks["signals.send"]["run_id"]])
        guard.asked.clear()
        other = bearer_header(await token_for(server, name="eve", tenant="other"))
        for name in asks.keys() - {"signals.send_many", "signals.start_with"}:
            assert code_in(await call_operation(server, "rest", name, asks[name], other)) == "NotFound", name
        items = (await call_operation(server, "rest", "signals.send_many", asks["signals.send_many"], other)).json()[
            "items"
        ]
        assert {item["problem"]["code"] for item in items} == {"NotFound"}
        assert guard.asked == []
        [after] = await store_of(server).load([asks["signals.send"]["run_id"]])
        assert after is not None
        assert before is not None
        assert after.head.inbox_seq == before.head.inbox_seq


@pytest.mark.contract("API-4")
async def test_the_client_in_process_is_asked_about_as_the_one_whom_it_names() -> None:
    guard = Guard()
    async with serve_with_tokens(app=guarded_app(guard)) as server:
        guard.is_closed = False
        server.http.headers.update(bearer_header(await token_for(server, name="ann", tenant="acme")))
        run_id = await waiting_order(server)
        guard.is_closed = True
        async with Client(server.app, principal=Principal(name="carl", tenant="acme")) as client:
            with pytest.raises(NotPermitted, match="not today"):
                await client.signals.send(run_id, "approval", payload=GO)
        assert [(each.actor, each.name) for each in guard.asked] == [("carl", "approval")]


@pytest.mark.contract("API-4", "SIG-11")
async def test_who_is_refused_too_often_cannot_fill_a_history_with_signals() -> None:
    guard = Guard()
    app = guarded_app(guard)
    async with serve_with_tokens(app=app, options=ServiceOptions(refusals_per_minute=3)) as server:
        server.http.headers.update(bearer_header(await token_for(server, name="ann")))
        asks = await sends(server)
        signal = asks["signals.send"]
        many = {"signals": [signal] * 3}
        assert code_in(await call_operation(server, "rest", "signals.send_many", many)) == ""
        for name in asks:
            assert code_in(await call_operation(server, "rest", name, asks[name])) == "RateLimited", name
        [run] = await store_of(server).load([signal["run_id"]])
        assert run is not None
        assert run.head.inbox_seq == 3
        assert code_in(await call_operation(server, "rest", "runs.start", {"workflow": "echo"})) == "", (
            "starting is not limited"
        )


@pytest.mark.contract("API-4")
async def test_who_asks_for_what_their_token_is_not_good_for_may_go_on_with_what_it_is_good_for() -> None:
    async with serve_with_tokens(options=ServiceOptions(refusals_per_minute=3)) as server:
        server.http.headers.update(bearer_header(await token_for(server, name="ann")))
        run_id = await waiting_order(server)
        sender = bearer_header(await token_for(server, "", name="bob", scopes=["signals:write"]))
        for _ in range(5):
            assert (
                code_in(await call_operation(server, "rest", "runs.pause", {"run_id": run_id}, sender))
                == "NotPermitted"
            )
        signal = {"run_id": run_id, "name": "approval", "payload": GO}
        assert code_in(await call_operation(server, "rest", "signals.send", signal, sender)) == ""
