"""One case for each operation: what is there before, what is asked, and what must come back. Any transport will do."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import Raw
from msgspec.structs import replace

import holdfast as hf
from holdfast.core.access import write_token
from holdfast.core.bus import OutboxSettlement, SinkProgress, letter_of
from holdfast.engine.observe.samples import Sampler
from holdfast.engine.retention import unsealed
from holdfast.store.archive import Archive
from holdfast.store.queries import OutboxQuery, SinkQuery
from holdfast.testing import VirtualClock
from holdfast.testing.samples import message
from tests.service.in_process import Caller, InProcessServer

Case = Callable[[InProcessServer, Caller], Awaitable[None]]
CASES: dict[str, Case] = {}
ANN: dict[str, Any] = {"actor": "ann", "actor_roles": ["clerk"]}


def case(name: str) -> Callable[[Case], Case]:
    """Declare the case of an operation."""

    def declare(function: Case) -> Case:
        CASES[name] = function
        return function

    return declare


async def expect_answer(call: Caller, name: str, ask: dict[str, Any], status: int = 200) -> Any:
    """Ask, and return the answer, which must not be a refusal."""
    found, answer = await call(name, ask)
    assert found == status, answer
    return answer


async def expect_problem(call: Caller, name: str, ask: dict[str, Any], code: str, status: int) -> Any:
    """Ask, and return the problem, which must have this code."""
    found, problem = await call(name, ask)
    assert (found, problem.get("code")) == (status, code), problem
    return problem


async def waiting_order(server: InProcessServer) -> str:
    """Return a run that waits for its approval."""
    run_id = await server.start("order", order_id="o-1")
    await server.until("signals.waits", {"run_id": run_id}, lambda page: page["items"])
    return run_id


async def open_task(server: InProcessServer) -> str:
    """Return a task that is nobody's."""
    run_id = await server.start("asking", who="cleo")
    page = await server.until("tasks.list", {"run_id": run_id}, lambda page: page["items"])
    return str(page["items"][0]["task_id"])


async def finished(server: InProcessServer, workflow: str, **input: Any) -> str:
    """Return a run that has finished."""
    run_id = await server.start(workflow, **input)
    await server.until("runs.result", {"run_id": run_id, "wait_s": 5}, lambda outcome: outcome["is_finished"])
    return run_id


async def failed_step(server: InProcessServer) -> str:
    """Return a run that is paused because its step has failed."""
    run_id = await server.start("paying", order_id="o-1")
    await server.until("runs.get", {"run_id": run_id}, lambda run: run["status"] == "PAUSED")
    return run_id


async def dead_letter(server: InProcessServer, clock: VirtualClock) -> str:
    """Return a message that nobody could handle."""
    run_id = await waiting_order(server)
    store: Any = server.app.runtime().store
    await store.deliver([replace(message(run_id, "poison"), expected_version=99)])
    while not (letters := (await server.rest("letters.list", {"run_id": run_id}))[1]["items"]):
        clock.advance(ms=61_000)
        store.wakeups.notify()
        await asyncio.sleep(0.002)
    return str(letters[0]["letter_id"])


# --- streams of runs


@case("streams.list")
async def _list_streams(server: InProcessServer, call: Caller) -> None:
    run_id = await finished(server, "talking", words=["a", {"b": 1}])
    page = await expect_answer(call, "streams.list", {"run_id": run_id})
    [found] = page["items"]
    assert (found["name"], found["last_seq"], found["dropped"], found["is_closed"]) == ("words", 2, 0, False)
    assert page["next"] is None
    assert (await expect_answer(call, "streams.list", {"run_id": await server.start("echo")}))["items"] == []
    await expect_problem(call, "streams.list", {"run_id": "nowhere"}, "NotFound", 404)
    await expect_problem(call, "streams.list", {"run_id": run_id, "cursor": "?"}, "InvalidInput", 422)


@case("streams.read")
async def _read_stream(server: InProcessServer, call: Caller) -> None:
    ask = {"run_id": await finished(server, "talking", words=["a", {"b": 1}, "c"]), "name": "words"}
    whole = await expect_answer(call, "streams.read", ask)
    assert [(chunk["seq"], chunk["value"]) for chunk in whole["items"]] == [(1, "a"), (2, {"b": 1}), (3, "c")]
    assert {(chunk["step_id"], chunk["attempt"]) for chunk in whole["items"]} == {("talk", 1)}
    assert (whole["last_seq"], whole["is_last"], whole["dropped"]) == (3, True, 0)
    part = await expect_answer(call, "streams.read", {**ask, "after": 1, "limit": 1})
    assert (part["items"], part["last_seq"], part["is_last"]) == (whole["items"][1:2], 2, False)
    end = await expect_answer(call, "streams.read", {**ask, "after": 3})
    assert (end["items"], end["last_seq"], end["is_last"]) == ([], 3, True)
    other = await expect_answer(call, "streams.read", {**ask, "name": "other"})
    assert (other["items"], other["is_last"]) == ([], True)
    await expect_problem(call, "streams.read", {**ask, "after": 4}, "InvalidInput", 422)
    await expect_problem(call, "streams.read", {**ask, "after": -1}, "InvalidInput", 422)
    await expect_problem(call, "streams.read", {**ask, "limit": 0}, "InvalidInput", 422)
    await expect_problem(call, "streams.read", {**ask, "run_id": "nowhere"}, "NotFound", 404)


# --- runs


@case("runs.start")
async def _start(server: InProcessServer, call: Caller) -> None:
    ask = {"workflow": "order", "input": {"order_id": "o-1"}, "request_id": "r-1", "tags": ["a"], "reference_key": "k"}
    first = await expect_answer(call, "runs.start", ask, 201)
    assert first == await expect_answer(call, "runs.start", ask, 201)
    assert first["workflow"] == "order"
    assert first["workflow_version"] == "1"
    run = await expect_answer(call, "runs.get", {"run_id": first["run_id"]})
    assert (run["tags"], run["reference_key"], run["request_id"]) == (["a"], "k", "r-1")
    await expect_problem(call, "runs.start", {**ask, "input": {"order_id": "o-2"}}, "Conflict", 409)
    chosen = {"workflow": "echo", "run_id": "mine"}
    assert await expect_answer(call, "runs.start", chosen, 201) == await expect_answer(call, "runs.start", chosen, 201)
    for policy, run_id in (("return", "mine"), ("restart-if-finished", "mine~000002")):
        await expect_answer(call, "runs.result", {"run_id": "mine", "wait_s": 10})
        again = await expect_answer(call, "runs.start", {**chosen, "reuse": policy, "request_id": policy}, 201)
        assert (again["run_id"], again.get("is_reused", False)) == (run_id, policy == "return")
    await expect_problem(call, "runs.start", {**chosen, "reuse": "reject", "request_id": "no"}, "Conflict", 409)
    await expect_problem(call, "runs.start", {**chosen, "reuse": "perhaps"}, "InvalidInput", 422)
    replacing = {**chosen, "reuse": "terminate-and-restart", "request_id": "instead"}
    assert (await expect_answer(call, "runs.start", replacing, 201))["run_id"] == "mine~000003"
    assert (await expect_answer(call, "runs.start", replacing, 201))["run_id"] == "mine~000003"
    await expect_problem(call, "runs.start", {"workflow": "nothing"}, "NotFound", 404)
    await expect_problem(call, "runs.start", {"workflow": "order", "workflow_version": "9"}, "NotFound", 404)
    for bad in ({}, {"order_id": 7}, {"order_id": "o", "colour": "red"}):
        await expect_problem(call, "runs.start", {"workflow": "order", "input": bad}, "InvalidInput", 422)
    burst = {"workflow": "echo", "debounce_key": "k", "debounce_quiet_s": 0.05, "debounce_at_most_s": 60}
    first = await expect_answer(call, "runs.start", {**burst, "request_id": "b-1"}, 201)
    again = await expect_answer(call, "runs.start", {**burst, "request_id": "b-2"}, 201)
    assert (again["run_id"].partition("~")[0], first.get("is_reused", False)) == (first["run_id"], False)
    outcome = await expect_answer(call, "runs.result", {"run_id": first["run_id"], "wait_s": 20})
    assert outcome["status"] == "COMPLETED"
    for wrong in ({"debounce_quiet_s": 90}, {"debounce_quiet_s": 0}, {"debounce_key": "a/b"}, {"run_id": "mine"}):
        await expect_problem(call, "runs.start", {**burst, **wrong, "request_id": "b-3"}, "InvalidInput", 422)
    lacking = {"workflow": "echo", "debounce_key": "k", "request_id": "b-3"}
    await expect_problem(call, "runs.start", lacking, "InvalidInput", 422)
    short = {**ask, "request_id": "r-2", "execution_timeout_s": 0.05, "run_timeout_s": 9, "cleanup_timeout_s": 9}
    late = await expect_answer(call, "runs.start", short, 201)
    outcome = await expect_answer(call, "runs.result", {"run_id": late["run_id"], "wait_s": 20})
    assert (outcome["status"], outcome["is_timed_out"], outcome["error"]["code"]) == ("FAILED", True, "RunTimedOut")
    for wrong in ({"execution_timeout_s": 0}, {"run_timeout_s": -1}, {"cleanup_timeout_s": 5}):
        await expect_problem(call, "runs.start", {**ask, **wrong, "request_id": "r-3"}, "InvalidInput", 422)


@case("runs.get")
async def _get(server: InProcessServer, call: Caller) -> None:
    run_id = await waiting_order(server)
    run = await expect_answer(call, "runs.get", {"run_id": run_id})
    assert (run["run_id"], run["workflow"], run["status"]) == (run_id, "order", "RUNNING")
    assert run["waiting_kind"] == "signal"
    assert run["created_at"].endswith("Z")
    await expect_problem(call, "runs.get", {"run_id": "nowhere"}, "NotFound", 404)


@case("runs.list")
async def _list(server: InProcessServer, call: Caller) -> None:
    run_ids = sorted([await server.start("patient") for _ in range(5)])
    await finished(server, "echo")
    found: list[str] = []
    cursor = ""
    while True:
        page = await expect_answer(
            call, "runs.list", {"workflow": "patient", "limit": 2, "cursor": cursor, "order": "id"}
        )
        found += [run["run_id"] for run in page["items"]]
        cursor = page["next"]
        if cursor is None:
            break
        assert len(page["items"]) == 2
    assert found == run_ids
    done = await expect_answer(call, "runs.list", {"status": "COMPLETED"})
    assert [run["workflow"] for run in done["items"]] == ["echo"]
    assert (await expect_answer(call, "runs.list", {"created_from": "2999-01-01T00:00:00Z"}))["items"] == []
    newest = {"order": "newest", "limit": 2}
    page = await expect_answer(call, "runs.list", newest)
    rest = await expect_answer(call, "runs.list", {**newest, "limit": 9, "cursor": page["next"]})
    made = [(run["created_at"], run["workflow"]) for run in page["items"] + rest["items"]]
    assert made == sorted(made, reverse=True)
    assert (len(made), made[0][1], rest["next"]) == (6, "echo", None)
    await expect_problem(call, "runs.list", {"cursor": page["next"], "order": "id"}, "InvalidInput", 422)
    [named] = (await expect_answer(call, "runs.list", {"text": run_ids[0][9:]}))["items"]
    assert named["run_id"] == run_ids[0]
    await expect_problem(call, "runs.list", {"cursor": "nonsense"}, "InvalidInput", 422)
    await expect_problem(call, "runs.list", {"status": "ASLEEP"}, "InvalidInput", 422)
    await expect_problem(call, "runs.list", {"limit": 501}, "InvalidInput", 422)


@case("runs.count")
async def _count(server: InProcessServer, call: Caller) -> None:
    asks: list[dict[str, Any]] = [
        {"cents": 5, "region": "eu", "due": "2026-01-31T09:00:00Z"},
        {"cents": 1_500, "region": "eu"},
        {"cents": 20, "region": "us"},
    ]
    for number, attributes in enumerate(asks):
        start = {"workflow": "patient", "run_id": f"r{number}", "attributes": attributes}
        await expect_answer(call, "runs.start", {**start, "reference_parts": {"customer": str(number)}}, 201)
    run = await expect_answer(call, "runs.get", {"run_id": "r0"})
    assert run["attributes"] == {"cents": 5, "region": "eu", "due": "2026-01-31T09:00:00Z"}
    assert run["reference_parts"] == {"customer": "0"}
    for where, order_by, expected in (
        ("cents>5", "", ["r2", "r1"]),
        ("region=eu", "", ["r1", "r0"]),
        ("region=eu", "cents", ["r0", "r1"]),
        ("", "cents desc", ["r1", "r2", "r0"]),
        ("due<2026-02-01", "", ["r0"]),
        ("reference.customer=2", "created_at", ["r2"]),
        ("", "finished_at", []),
        ("workflow:patient region=e* created_at>2026-01-01", "", ["r1", "r0"]),
        ("status:failed", "", []),
        ("workflow:patient", "created_at desc", ["r2", "r1", "r0"]),
    ):
        found: list[str] = []
        cursor: str | None = ""
        while cursor is not None:
            ask = {"where": where, "order_by": order_by, "limit": 1, "cursor": cursor}
            page = await expect_answer(call, "runs.list", ask)
            found += [each["run_id"] for each in page["items"]]
            cursor = page["next"]
        assert found == expected, (where, order_by)
    counts = await expect_answer(call, "runs.count", {"where": "region=eu cents<100000"})
    assert (counts["total"], counts["by_workflow"], counts["is_whole"]) == (2, {"patient": 2}, True)
    assert sum(counts["by_status"].values()) == 2
    wheres = ("cents", "cents=many", "status:odd", "colour:red", "workflow:a workflow:b", "created_at=now")
    for bad in (
        *({"where": where} for where in wheres),
        {"where": "status:failed", "status": "PAUSED"},
        {"order_by": "x"},
    ):
        await expect_problem(call, "runs.list", bad, "InvalidInput", 422)
    await expect_problem(call, "runs.count", {"where": "cents>>1"}, "InvalidInput", 422)
    for wrong in ({"cents": "5"}, {"colour": "red"}):
        await expect_problem(call, "runs.start", {"workflow": "patient", "attributes": wrong}, "InvalidInput", 422)


@case("runs.events")
async def _events(server: InProcessServer, call: Caller) -> None:
    run_id = await finished(server, "echo", value="x")
    whole = await expect_answer(call, "runs.events", {"run_id": run_id})
    assert [event["run_seq"] for event in whole["items"]] == [1, 2, 3]
    assert [event["event_type"] for event in whole["items"]] == ["RunQueued", "RunStarted", "RunCompleted"]
    assert (whole["last_event_seq"], whole["status"]) == (3, "COMPLETED")
    assert whole["items"][0]["data"]["input"] == {"value": "x"}
    part = await expect_answer(call, "runs.events", {"run_id": run_id, "after": 1, "limit": 1})
    assert part["items"] == whole["items"][1:2]
    assert part["last_event_seq"] == 3
    await expect_problem(call, "runs.events", {"run_id": "nowhere"}, "NotFound", 404)


@case("runs.snapshot")
async def _snapshot(server: InProcessServer, call: Caller) -> None:
    run_id = await failed_step(server)
    snapshot = await expect_answer(call, "runs.snapshot", {"run_id": run_id})
    assert (snapshot["status"], snapshot["is_stale"]) == ("PAUSED", False)
    [step] = snapshot["steps"]
    assert (step["step_id"], step["status"], step["error"]["message"]) == ("charge", "FAILED", "the card was refused")
    await expect_answer(call, "runs.terminate", {"run_id": run_id, "wait": True}, 202)
    assert (await expect_answer(call, "runs.snapshot", {"run_id": run_id}))["status"] == "CANCELLED"
    await expect_problem(call, "runs.snapshot", {"run_id": "nowhere"}, "NotFound", 404)


@case("runs.graph")
async def _graph(server: InProcessServer, call: Caller) -> None:
    run_id = await server.start("drawn", order_id="o-1")
    await server.until("runs.get", {"run_id": run_id}, lambda run: run["status"] == "PAUSED")
    graph = await expect_answer(call, "runs.graph", {"run_id": run_id})
    assert (graph["kind"], graph["steps"], graph["counts"]) == ("flow", 2, {"FAILED": 1, "PENDING": 1})
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert nodes.keys() == {"charge", "after", "after/ship"}
    assert (nodes["charge"]["status"], nodes["charge"]["attempts"]) == ("FAILED", 1)
    assert nodes["charge"]["completed_at"] >= nodes["charge"]["started_at"]
    assert nodes["after"] == {
        "id": "after",
        "label": "after",
        "kind": "scene",
        "status": "PENDING",
        "depends_on": ["charge"],
        "counts": {"PENDING": 1},
        "is_expanded": True,
    }
    folded = await expect_answer(call, "runs.graph", {"run_id": run_id, "collapse": ["after"], "expand": ["x", "y"]})
    assert [node["id"] for node in folded["nodes"]] == ["charge", "after"]
    shown = (await expect_answer(call, "workflows.get", {"name": "drawn"}))["graph"]
    assert [node["id"] for node in shown["nodes"]] == ["charge", "after", "after/ship"]
    coded = await expect_answer(call, "runs.graph", {"run_id": await waiting_order(server)})
    assert (coded["kind"], coded["nodes"], coded["steps"]) == ("code", [], 0)
    await expect_problem(call, "runs.graph", {"run_id": "nowhere"}, "NotFound", 404)


@case("runs.result")
async def _result(server: InProcessServer, call: Caller) -> None:
    run_id = await waiting_order(server)
    outcome = await expect_answer(call, "runs.result", {"run_id": run_id, "wait_s": 0.01})
    assert (outcome["is_finished"], outcome["status"], outcome["result"]) == (False, "RUNNING", None)
    await expect_answer(
        call, "signals.send", {"run_id": run_id, "name": "approval", "payload": {"approved": True}}, 202
    )
    outcome = await expect_answer(call, "runs.result", {"run_id": run_id, "wait_s": 10})
    assert outcome["result"] == "o-1: True"
    assert outcome == await expect_answer(call, "runs.result", {"run_id": run_id})
    failed = await expect_answer(call, "runs.result", {"run_id": await finished(server, "failing")})
    assert failed["error"] == {"code": "ValueError", "message": "by design", "retryable": False, "category": ""}
    await expect_problem(call, "runs.result", {"run_id": "nowhere", "wait_s": 5}, "NotFound", 404)


@case("runs.handlers")
async def _run_handlers(server: InProcessServer, call: Caller) -> None:
    run_id = await waiting_order(server)
    answer = await expect_answer(call, "runs.handlers", {"run_id": run_id})
    assert answer["queries"]["progress"].keys() == {"input", "result"}
    await expect_problem(call, "runs.handlers", {"run_id": "nowhere"}, "NotFound", 404)


@case("runs.query")
async def _query(server: InProcessServer, call: Caller) -> None:
    run_id = await waiting_order(server)
    answer = await expect_answer(call, "runs.query", {"run_id": run_id, "name": "progress"})
    assert answer == {"result": {"order_id": "o-1"}}
    await expect_problem(call, "runs.query", {"run_id": run_id, "name": "colour"}, "NotFound", 404)
    await expect_problem(
        call, "runs.query", {"run_id": run_id, "name": "progress", "input": {"x": 1}}, "InvalidInput", 422
    )
    await expect_problem(call, "runs.query", {"run_id": "nowhere", "name": "progress"}, "NotFound", 404)


@case("runs.update")
async def _update(server: InProcessServer, call: Caller) -> None:
    ask = {"run_id": await waiting_order(server), "name": "change_address", "input": {"city": "Ulm"}, "update_id": "u"}
    assert await expect_answer(call, "runs.update", ask) == {"result": 1}
    assert await expect_answer(call, "runs.update", ask) == {"result": 1}
    assert await expect_answer(call, "runs.update", {**ask, "update_id": "v"}) == {"result": 2}
    await expect_problem(call, "runs.update", {**ask, "input": {"city": "Bonn"}}, "Conflict", 409)
    await expect_problem(call, "runs.update", {**ask, "name": "nothing", "update_id": "w"}, "UpdateFailed", 409)
    done = await finished(server, "echo")
    await expect_problem(call, "runs.update", {**ask, "run_id": done}, "RunTerminal", 409)


# --- controls


async def command(server: InProcessServer, call: Caller, name: str, run_id: str, status: str, **more: Any) -> None:
    """Give a command, and see what it makes of the run; then see that a run which has finished takes none."""
    answer = await expect_answer(call, name, {"run_id": run_id, "actor": "ann", "wait": True, **more}, 202)
    assert (answer["run_id"], answer["is_decided"]) == (run_id, True)
    await server.until("runs.get", {"run_id": run_id}, lambda run: run["status"] == status)
    done = await finished(server, "echo")
    await expect_problem(call, name, {"run_id": done, **more}, "RunTerminal", 409)
    await expect_problem(call, name, {"run_id": "nowhere", **more}, "NotFound", 404)


@case("runs.cancel")
async def _cancel(server: InProcessServer, call: Caller) -> None:
    await command(server, call, "runs.cancel", await waiting_order(server), "CANCELLED")


@case("runs.pause")
async def _pause(server: InProcessServer, call: Caller) -> None:
    run_id = await waiting_order(server)
    await command(server, call, "runs.pause", run_id, "PAUSED", reason="lunch")
    events = (await expect_answer(call, "runs.events", {"run_id": run_id}))["items"]
    [accepted] = [event["data"] for event in events if event["event_type"] == "SignalAccepted"]
    assert (accepted["actor"], accepted["reason"]) == ("ann", "lunch")


@case("runs.resume")
async def _resume(server: InProcessServer, call: Caller) -> None:
    run_id = await waiting_order(server)
    await expect_answer(call, "runs.pause", {"run_id": run_id, "wait": True}, 202)
    await command(server, call, "runs.resume", run_id, "RUNNING")


@case("runs.approve")
async def _approve(server: InProcessServer, call: Caller) -> None:
    run_id = await waiting_order(server)
    await expect_problem(call, "runs.approve", {"run_id": run_id, "wait": True}, "Conflict", 409)
    await expect_problem(call, "runs.approve", {"run_id": "nowhere"}, "NotFound", 404)
    gate = {"id": "gate", "sleep": 0.01, "requires_approval": True}
    plan = {"plan": "gated", "version": "1", "requires_approval": True, "steps": [gate], "output": "gone ahead"}
    started, given = await call("plans.start", {"plan_id": "gated", "document": json.dumps(plan)})
    assert started == 201, given
    about = {"run_id": given["run_id"], "wait": True}
    for step, task in (({}, ":approval"), ({"step_id": "gate"}, "gate:approval")):

        def is_asked(snapshot: Any, task: str = task) -> bool:
            return any(each["step_id"] == task for each in snapshot["steps"])

        await server.until("runs.snapshot", {"run_id": given["run_id"]}, is_asked)
        await expect_problem(call, "runs.approve", {**about, "step_id": "nothing"}, "Conflict", 409)
        await expect_answer(call, "runs.approve", {**about, **step}, 202)
    result = await expect_answer(call, "runs.result", {"run_id": given["run_id"], "wait_s": 10})
    assert result["result"] == "gone ahead"


@case("runs.terminate")
async def _terminate(server: InProcessServer, call: Caller) -> None:
    await command(server, call, "runs.terminate", await waiting_order(server), "CANCELLED")


@case("runs.retry_step")
async def _retry_step(server: InProcessServer, call: Caller) -> None:
    run_id = await failed_step(server)
    await command(server, call, "runs.retry_step", run_id, "PAUSED", step_id="charge")

    def is_tried(snapshot: Any) -> bool:
        return bool(snapshot["steps"][0]["logical_attempt_id"] == 2)

    await server.until("runs.snapshot", {"run_id": run_id}, is_tried)


@case("runs.skip_step")
async def _skip_step(server: InProcessServer, call: Caller) -> None:
    run_id = await failed_step(server)
    await command(server, call, "runs.skip_step", run_id, "COMPLETED", step_id="charge", result="cash")
    assert (await expect_answer(call, "runs.result", {"run_id": run_id}))["result"] == "cash"


@case("runs.retry")
async def _retry(server: InProcessServer, call: Caller) -> None:
    run_id = await finished(server, "echo", value="x")
    again = await expect_answer(call, "runs.retry", {"run_id": run_id, "signal_id": "click"}, 201)
    assert again == await expect_answer(call, "runs.retry", {"run_id": run_id, "signal_id": "click"}, 201)
    assert again["run_id"] != run_id
    outcome = await expect_answer(call, "runs.result", {"run_id": again["run_id"], "wait_s": 10})
    assert outcome["result"] == "x"
    await expect_problem(call, "runs.retry", {"run_id": await waiting_order(server)}, "Conflict", 409)
    failed = await failed_step(server)
    await command(server, call, "runs.resume", failed, "FAILED", raise_failure=True)
    for from_start, begins_with in ((False, failed), (True, None)):
        retried = await expect_answer(call, "runs.retry", {"run_id": failed, "from_start": from_start}, 201)
        [queued, *_] = (await expect_answer(call, "runs.events", {"run_id": retried["run_id"]}))["items"]
        assert queued["data"]["retry_of"]["run_id"] == failed
        assert queued["data"].get("forked_from", {}).get("run_id") == begins_with
    await expect_problem(call, "runs.retry", {"run_id": failed, "from_start": "yes"}, "InvalidInput", 422)


@case("runs.fork")
async def _fork(server: InProcessServer, call: Caller) -> None:
    run_id = await finished(server, "echo", value="x")
    ask = {"run_id": run_id, "at": 1, "request_id": "click"}
    fork = await expect_answer(call, "runs.fork", ask, 201)
    assert fork == await expect_answer(call, "runs.fork", ask, 201)
    assert (fork["forked_from"], fork["run_seq"]) == (run_id, 1)
    outcome = await expect_answer(call, "runs.result", {"run_id": fork["run_id"], "wait_s": 10})
    assert outcome["result"] == "x"
    for at in (0, 9_999):
        await expect_problem(call, "runs.fork", {**ask, "at": at}, "InvalidInput", 422)
    await expect_problem(call, "runs.fork", {"run_id": "nowhere"}, "NotFound", 404)


@case("runs.fork_many")
async def _fork_many(server: InProcessServer, call: Caller) -> None:
    run_id = await finished(server, "echo", value="x")
    ask = {"run_ids": [run_id, "nowhere"], "request_id": "mend"}
    answers = await expect_answer(call, "runs.fork_many", ask)
    assert answers["items"][0] == (await expect_answer(call, "runs.fork_many", ask))["items"][0]
    assert answers["items"][0]["forked_from"] == run_id
    assert answers["items"][1]["error"]["code"] == "NotFound"
    assert (await expect_answer(call, "runs.fork_many", {"request_id": "mend", "workflow": "echo"}))["items"] == []
    found = await expect_answer(
        call, "runs.fork_many", {"request_id": "all", "workflow": "echo", "status": "COMPLETED"}
    )
    assert [item["forked_from"] for item in found["items"]] == [run_id]


@case("runs.command_many")
async def _command_many(server: InProcessServer, call: Caller) -> None:
    run_id = await finished(server, "echo", value="x")
    waiting = await server.start("order", order_id="o-1")
    ask = {"request_id": "all", "command": "cancel"}
    preview = await expect_answer(call, "runs.command_many", {**ask, "preview": True})
    assert (preview["concerned"], preview["next"]) == (1, None)
    assert preview["items"] == [{"run_id": waiting}, {"run_id": run_id, "not_concerned": "it has finished"}]
    first = await expect_answer(call, "runs.command_many", {**ask, "limit": 1})
    assert [item["run_id"] for item in first["items"]] == [waiting]
    rest = await expect_answer(call, "runs.command_many", {**ask, "cursor": first["next"]})
    assert [item["run_id"] for item in rest["items"]] == [run_id]
    outcome = await expect_answer(call, "runs.result", {"run_id": waiting, "wait_s": 10})
    assert outcome["status"] == "CANCELLED"
    again = await expect_answer(call, "runs.command_many", {"request_id": "x", "command": "retry", "run_ids": [run_id]})
    assert again["items"][0]["made"]
    both = await expect_answer(call, "runs.command_many", {**ask, "request_id": "y", "run_ids": ["nowhere", run_id]})
    assert both["concerned"] == 0
    assert [(item["run_id"], item.get("error", {}).get("code")) for item in both["items"]] == [
        (run_id, None),
        ("nowhere", "NotFound"),
    ]
    await expect_problem(call, "runs.command_many", {**ask, "command": "burn"}, "InvalidInput", 422)


@case("runs.diff")
async def _diff(server: InProcessServer, call: Caller) -> None:
    one, other = await finished(server, "echo", value="x"), await finished(server, "echo", value="y")
    fork = await expect_answer(call, "runs.fork", {"run_id": one, "at": 1, "request_id": "click"}, 201)
    await expect_answer(call, "runs.result", {"run_id": fork["run_id"], "wait_s": 10})
    same = await expect_answer(call, "runs.diff", {"run_id": one, "other_run_id": fork["run_id"]})
    assert (same["parts_at"], same["is_whole"]) == (None, True)
    parted = await expect_answer(call, "runs.diff", {"run_id": one, "other_run_id": other})
    assert (parted["parts_at"], parted["event_type"], parted["is_whole"]) == (1, "RunQueued", True)
    await expect_problem(call, "runs.diff", {"run_id": one, "other_run_id": "nowhere"}, "NotFound", 404)


# --- signals


@case("signals.send")
async def _send(server: InProcessServer, call: Caller) -> None:
    run_id = await server.start("patient")
    ask = {"run_id": run_id, "name": "go", "payload": {"n": 1}, "signal_id": "click"}
    first = await expect_answer(call, "signals.send", ask, 202)
    assert first == await expect_answer(call, "signals.send", ask, 202)
    assert first.keys() == {
        *("accepted", "workflow_id", "signal_name", "signal_id", "accepted_at", "signal_storage_key"),
    }
    assert (first["accepted"], first["workflow_id"], first["signal_id"]) == (True, run_id, "click")
    await expect_problem(call, "signals.send", {**ask, "payload": 2}, "Conflict", 409)
    await expect_problem(call, "signals.send", {**ask, "run_id": "nowhere"}, "NotFound", 404)
    waiting = {"run_id": run_id, "name": "other", "require_waiting": True}
    await expect_problem(call, "signals.send", waiting, "NotWaiting", 409)
    for bad in ("", None, 7, "x" * 129, "é" * 65):
        await expect_problem(call, "signals.send", {**ask, "signal_id": bad}, "InvalidInput", 422)
    await expect_problem(
        call, "signals.send", {**ask, "signal_id": "big", "payload": "x" * 70_000}, "PayloadTooLarge", 413
    )


@case("signals.send_many")
async def _send_many(server: InProcessServer, call: Caller) -> None:
    run_id = await server.start("patient")
    items = [
        {"run_id": run_id, "name": "go", "signal_id": "a"},
        {"run_id": "nowhere", "name": "go"},
        {"run_id": run_id, "name": "go", "signal_id": "a"},
        {"run_id": run_id, "name": "holdfast.control"},
    ]
    first, unknown, again, reserved = (await expect_answer(call, "signals.send_many", {"signals": items}))["items"]
    assert first["result"]["signal_id"] == "a"
    assert again == first
    assert (unknown["result"], unknown["problem"]["code"]) == (None, "NotFound")
    assert reserved["problem"]["code"] == "InvalidInput"
    await expect_problem(call, "signals.send_many", {"signals": []}, "InvalidInput", 422)


@case("signals.start_with")
async def _start_with(server: InProcessServer, call: Caller) -> None:
    ask = {
        "workflow": "order",
        "input": {"order_id": "o-1"},
        "request_id": "r",
        "signal_id": "s",
        "signal_name": "approval",
        "signal_payload": {"approved": True},
    }
    first = await expect_answer(call, "signals.start_with", ask, 201)
    assert first == await expect_answer(call, "signals.start_with", ask, 201)
    outcome = await expect_answer(call, "runs.result", {"run_id": first["run"]["run_id"], "wait_s": 10})
    assert outcome["result"] == "o-1: True"
    bad = {**ask, "signal_payload": {}, "request_id": "r2"}
    await expect_problem(call, "signals.start_with", bad, "InvalidInput", 422)


@case("signals.receipt")
async def _receipt(server: InProcessServer, call: Caller) -> None:
    run_id = await waiting_order(server)
    ask = {"run_id": run_id, "name": "other", "signal_id": "a/b c"}
    key = (await expect_answer(call, "signals.send", ask, 202))["signal_storage_key"]
    assert (await expect_answer(call, "signals.receipt", ask))["status"] == "accepted"
    await expect_answer(
        call,
        "signals.send",
        {"run_id": run_id, "name": "approval", "payload": {"approved": True}, "signal_id": "s"},
        202,
    )
    await expect_answer(call, "runs.result", {"run_id": run_id, "wait_s": 10})
    consumed = await expect_answer(call, "signals.receipt", {"run_id": run_id, "name": "approval", "signal_id": "s"})
    assert consumed["status"] == "consumed"
    events = (await expect_answer(call, "runs.events", {"run_id": run_id}))["items"]
    assert events[consumed["consumed_at_event"] - 1]["event_type"] == "SignalReceived"
    for asked in (ask, {**ask, "signal_storage_key": key}):
        expired = await expect_answer(call, "signals.receipt", asked)
        assert expired["status"] == "expired"
        assert "COMPLETED" in expired["reason"]
    await expect_problem(call, "signals.receipt", {**ask, "signal_id": "never"}, "NotFound", 404)


@case("signals.waiting")
async def _waiting(server: InProcessServer, call: Caller) -> None:
    run_ids = sorted([await waiting_order(server) for _ in range(3)])
    page = await expect_answer(call, "signals.waiting", {"name": "approval", "limit": 2})
    rest = await expect_answer(call, "signals.waiting", {"name": "approval", "cursor": page["next"]})
    assert [wait["run_id"] for wait in page["items"] + rest["items"]] == run_ids
    assert rest["next"] is None
    assert (await expect_answer(call, "signals.waiting", {"name": "nobody"}))["items"] == []


@case("signals.waits")
async def _waits(server: InProcessServer, call: Caller) -> None:
    run_id = await waiting_order(server)
    [wait] = (await expect_answer(call, "signals.waits", {"run_id": run_id}))["items"]
    assert (wait["run_id"], wait["step_id"], wait["name"], wait["until"]) == (run_id, "approval", "approval", None)
    assert (wait["workflow"], wait["reference_key"]) == ("order", None)
    await expect_problem(call, "signals.waits", {"run_id": "nowhere"}, "NotFound", 404)


@case("signals.mailbox")
async def _mailbox(server: InProcessServer, call: Caller) -> None:
    run_id = await waiting_order(server)
    for number in range(3):
        await expect_answer(call, "signals.send", {"run_id": run_id, "name": "other", "payload": number}, 202)
    page = await expect_answer(call, "signals.mailbox", {"run_id": run_id, "limit": 2})
    rest = await expect_answer(call, "signals.mailbox", {"run_id": run_id, "cursor": page["next"]})
    assert [signal["payload"] for signal in page["items"] + rest["items"]] == [0, 1, 2]
    assert all(signal["age_ms"] >= 0 for signal in page["items"])
    await expect_problem(call, "signals.mailbox", {"run_id": "nowhere"}, "NotFound", 404)


@case("signals.unconsumed")
async def _unconsumed(server: InProcessServer, call: Caller) -> None:
    run_ids = [await waiting_order(server) for _ in range(2)]
    for number in range(3):
        await expect_answer(
            call, "signals.send", {"run_id": run_ids[number % 2], "name": "other", "payload": number}, 202
        )
    page = await expect_answer(call, "signals.unconsumed", {"limit": 2})
    rest = await expect_answer(call, "signals.unconsumed", {"cursor": page["next"]})
    found = [(signal["run_id"], signal["payload"]) for signal in page["items"] + rest["items"]]
    assert found == [(run_ids[0], 0), (run_ids[0], 2), (run_ids[1], 1)]
    [first, *_] = page["items"]
    assert (first["workflow"], first["run_status"], first["name"]) == ("order", "RUNNING", "other")
    await expect_answer(
        call,
        "signals.send",
        {"run_id": run_ids[0], "name": "approval", "payload": {"approved": True, "by": "ann"}},
        202,
    )
    await server.until("runs.get", {"run_id": run_ids[0]}, lambda run: run["status"] == "COMPLETED")
    assert len((await expect_answer(call, "signals.unconsumed", {}))["items"]) == 1
    assert len((await expect_answer(call, "signals.unconsumed", {"finished": True, "name": "other"}))["items"]) == 3
    assert (await expect_answer(call, "signals.unconsumed", {"name": "nobody"}))["items"] == []


# --- tasks


@case("tasks.list")
async def _list_tasks(server: InProcessServer, call: Caller) -> None:
    task_ids = sorted([await open_task(server) for _ in range(3)])
    page = await expect_answer(call, "tasks.list", {"limit": 2, "status": "OPEN", "role": "clerk"})
    rest = await expect_answer(call, "tasks.list", {"limit": 2, "cursor": page["next"]})
    assert [task["task_id"] for task in page["items"] + rest["items"]] == task_ids
    await expect_answer(call, "tasks.claim", {"task_id": task_ids[0], **ANN})
    [mine] = (await expect_answer(call, "tasks.list", {"mine": True, **ANN, "assignee": "ann"}))["items"]
    assert mine["task_id"] == task_ids[0]
    assert len((await expect_answer(call, "tasks.list", {"text": "CLEO"}))["items"]) == 3
    assert (await expect_answer(call, "tasks.list", {"role": "boss"}))["items"] == []


@case("tasks.get")
async def _get_task(server: InProcessServer, call: Caller) -> None:
    task = await expect_answer(call, "tasks.get", {"task_id": await open_task(server)})
    assert (task["name"], task["status"], task["workflow"]) == ("approve", "OPEN", "asking")
    assert (task["payload"], task["roles"]) == ({"who": "cleo"}, ["clerk"])
    assert task["form"] == {"type": "boolean"}
    await expect_problem(call, "tasks.get", {"task_id": "nothing"}, "NotFound", 404)


@case("tasks.history")
async def _history(server: InProcessServer, call: Caller) -> None:
    task_id = await open_task(server)
    await expect_answer(call, "tasks.claim", {"task_id": task_id, **ANN})
    types = [
        event["event_type"] for event in (await expect_answer(call, "tasks.history", {"task_id": task_id}))["items"]
    ]
    assert types == ["TaskCreated", "TaskAssigned"]
    await expect_problem(call, "tasks.history", {"task_id": "nothing"}, "NotFound", 404)


@case("tasks.assign")
async def _assign(server: InProcessServer, call: Caller) -> None:
    task_id = await open_task(server)
    assert (await expect_answer(call, "tasks.assign", {"task_id": task_id, "to": "bob"}))["assignee"] == "bob"
    await expect_problem(call, "tasks.assign", {"task_id": task_id, "to": "cleo"}, "Conflict", 409)


@case("tasks.claim")
async def _claim(server: InProcessServer, call: Caller) -> None:
    ask = {"task_id": await open_task(server), **ANN, "operation_id": "click"}
    assert (await expect_answer(call, "tasks.claim", ask))["assignee"] == "ann"
    assert (await expect_answer(call, "tasks.claim", ask))["assignee"] == "ann"
    await expect_problem(call, "tasks.claim", {**ask, "actor": "bob", "operation_id": "other"}, "Conflict", 409)


@case("tasks.release")
async def _release(server: InProcessServer, call: Caller) -> None:
    task_id = await open_task(server)
    await expect_answer(call, "tasks.claim", {"task_id": task_id, **ANN})
    assert (await expect_answer(call, "tasks.release", {"task_id": task_id, "actor": "ann"}))["assignee"] is None
    await expect_problem(call, "tasks.release", {"task_id": "nothing"}, "NotFound", 404)


@case("tasks.reassign")
async def _reassign(server: InProcessServer, call: Caller) -> None:
    task_id = await open_task(server)
    task = await expect_answer(call, "tasks.reassign", {"task_id": task_id, "to": "cleo", "roles": ["boss"]})
    assert (task["assignee"], task["roles"]) == ("cleo", ["boss"])


@case("activities.complete")
async def _complete_activity(server: InProcessServer, call: Caller) -> None:
    run_id = await server.start("signing")
    ask = {"completion_token": await server.completion_token(run_id), "result": "ann"}
    for _ in range(2):
        assert await expect_answer(call, "activities.complete", ask, 202) == {"accepted": True}
    await expect_problem(call, "activities.complete", {**ask, "result": "bob"}, "Conflict", 409)
    assert (await expect_answer(call, "runs.result", {"run_id": run_id, "wait_s": 10}))["result"] == "ann"
    assert await expect_answer(call, "activities.complete", ask, 202) == {"accepted": True}
    told = await expect_problem(call, "activities.complete", {**ask, "result": "bob"}, "Conflict", 409)
    assert run_id not in str(told)
    token = ask["completion_token"]
    forged = f"{token[:-5]}{'B' if token[-5] == 'A' else 'A'}{token[-4:]}"
    await expect_problem(call, "activities.complete", {**ask, "completion_token": forged}, "InvalidInput", 422)


@case("activities.fail")
async def _fail_activity(server: InProcessServer, call: Caller) -> None:
    run_id = await server.start("signing")
    token = await server.completion_token(run_id)
    await expect_answer(call, "activities.fail", {"completion_token": token, "message": "no pen"}, 202)
    second = await server.completion_token(run_id, other_than=token)
    await expect_problem(call, "activities.complete", {"completion_token": token, "result": "late"}, "Conflict", 409)
    await expect_answer(call, "activities.fail", {"completion_token": second, "message": "no", "retryable": False}, 202)
    outcome = await expect_answer(call, "runs.result", {"run_id": run_id, "wait_s": 10})
    assert "no" in outcome["error"]["message"]


@case("activities.heartbeat")
async def _heartbeat_activity(server: InProcessServer, call: Caller) -> None:
    tokens: list[str] = []

    @server.app.activity
    async def submit(ref: hf.CallbackRef) -> None:
        tokens.append(hf.activity_context().callback_token(ref))

    @server.app.workflow
    async def calling() -> int:
        answer = hf.callback(int, heartbeat_timeout=60)
        await submit(answer.ref)
        return await answer

    run_id = await server.start("calling")
    await server.until("runs.events", {"run_id": run_id}, lambda _: bool(tokens))
    ask = {"completion_token": tokens[0]}
    assert await expect_answer(call, "activities.heartbeat", ask, 202) == {"accepted": True}
    await expect_problem(call, "activities.complete", {**ask, "result": "seven"}, "InvalidInput", 422)
    await expect_answer(call, "activities.complete", {**ask, "result": 7}, 202)
    assert (await expect_answer(call, "runs.result", {"run_id": run_id, "wait_s": 10}))["result"] == 7
    await expect_problem(call, "activities.heartbeat", ask, "Conflict", 409)


@case("tasks.complete")
async def _complete(server: InProcessServer, call: Caller) -> None:
    task_id = await open_task(server)
    await expect_problem(call, "tasks.complete", {"task_id": task_id, "answer": "perhaps", **ANN}, "InvalidInput", 422)
    task = await expect_answer(call, "tasks.complete", {"task_id": task_id, "answer": True, **ANN})
    assert (task["status"], task["completed_by"]) == ("COMPLETED", "ann")
    problem = await expect_problem(
        call, "tasks.complete", {"task_id": task_id, "answer": False, **ANN}, "Conflict", 409
    )
    assert problem["details"]["completed_by"] == "ann"
    outcome = await expect_answer(call, "runs.result", {"run_id": task["run_id"], "wait_s": 10})
    assert outcome["result"] is True


@case("tasks.comment")
async def _comment(server: InProcessServer, call: Caller) -> None:
    task_id = await open_task(server)
    await expect_answer(call, "tasks.comment", {"task_id": task_id, "text": "hm", "actor": "ann"})
    last = (await expect_answer(call, "tasks.history", {"task_id": task_id}))["items"][-1]
    assert (last["event_type"], last["data"]["text"]) == ("TaskCommented", "hm")
    await expect_problem(call, "tasks.comment", {"task_id": task_id, "text": ""}, "InvalidInput", 422)


# --- the event bus

SINK = {"name": "hook", "address": "https://example.com/hook?token=hidden", "secret": "hook/key"}


@case("sinks.put")
async def _put_sink(server: InProcessServer, call: Caller) -> None:
    sink = await expect_answer(call, "sinks.put", SINK)
    assert (sink["kind"], sink["server"], sink["backlog"]) == ("webhook", "https://example.com", 0)
    assert "hidden" not in str(sink)
    for field, value in (("address", "https://ann:pw@example.com"), ("address", "ftp://x"), ("secret", "")):
        await expect_problem(call, "sinks.put", {**SINK, field: value}, "InvalidInput", 422)


@case("sinks.list")
async def _list_sinks(server: InProcessServer, call: Caller) -> None:
    await expect_answer(call, "sinks.put", {**SINK, "workflows": ["order"]})
    [sink] = (await expect_answer(call, "sinks.list", {}))["items"]
    assert (sink["name"], sink["workflows"], sink["is_paused"]) == ("hook", ["order"], False)


@case("sinks.pause")
async def _pause_sink(server: InProcessServer, call: Caller) -> None:
    await expect_answer(call, "sinks.put", SINK)
    assert (await expect_answer(call, "sinks.pause", {"sink": "hook"}))["is_paused"] is True
    await expect_problem(call, "sinks.pause", {"sink": "nothing"}, "NotFound", 404)


@case("sinks.resume")
async def _resume_sink(server: InProcessServer, call: Caller) -> None:
    await expect_answer(call, "sinks.put", SINK)
    await expect_answer(call, "sinks.pause", {"sink": "hook"})
    assert (await expect_answer(call, "sinks.resume", {"sink": "hook"}))["is_paused"] is False


@case("sinks.remove")
async def _remove_sink(server: InProcessServer, call: Caller) -> None:
    await expect_answer(call, "sinks.put", SINK)
    assert await expect_answer(call, "sinks.remove", {"sink": "hook"}) == {"name": "hook"}
    await expect_problem(call, "sinks.remove", {"sink": "hook"}, "NotFound", 404)


@case("bus.replay")
async def _replay(server: InProcessServer, call: Caller) -> None:
    run_id = await server.start("signing")
    await expect_answer(call, "sinks.put", {**SINK, "workflows": ["signing"]})
    await expect_answer(call, "sinks.pause", {"sink": "hook"})
    assert await expect_answer(call, "bus.replay", {"sink": "hook", "run_id": run_id}) == {"name": "hook", "runs": 1}
    await expect_answer(call, "bus.replay", {"sink": "hook", "since": "2020-01-01T00:00:00Z"})
    await expect_problem(call, "bus.replay", {"sink": "hook"}, "InvalidInput", 422)
    await expect_problem(call, "bus.replay", {"sink": "nothing", "run_id": run_id}, "NotFound", 404)
    later = await server.start("signing")
    store = server.app.runtime().store
    [first] = await store.read_events(later, 0, 1)
    asked = {"sink": "hook", "run_id": later, "event_id": first.event_id}
    assert (await expect_answer(call, "bus.replay", asked))["runs"] >= 1
    assert later in {entry.run_id for entry in await store.find(OutboxQuery(sink="hook"))}
    asked["event_id"] = (await store.read_events(run_id, 0, 1))[0].event_id
    assert await expect_answer(call, "bus.replay", {**asked, "run_id": run_id}) == {"name": "hook", "runs": 2}
    await expect_problem(call, "bus.replay", asked, "NotFound", 404)  # an event of another run
    since = {"sink": "hook", "since": "2020-01-01T00:00:00Z", "event_id": first.event_id}
    await expect_problem(call, "bus.replay", since, "InvalidInput", 422)


async def bus_letter(server: InProcessServer, call: Caller) -> str:
    """Give up an entry of a sink that is paused, and return the id of the letter."""
    run_id = await server.start("signing")
    await expect_answer(call, "sinks.put", SINK)
    await expect_answer(call, "sinks.pause", {"sink": "hook"})
    await expect_answer(call, "bus.replay", {"sink": "hook", "run_id": run_id})
    store = server.app.runtime().store
    [status] = await store.find(SinkQuery(name="hook"))
    found = (await store.find(OutboxQuery(sink="hook")))[0]
    letter = letter_of(status.sink, found, "410", await store.now())
    await store.settle_outbox("hook", [OutboxSettlement(entry=found, letter=letter)], SinkProgress())
    return letter.letter_id


@case("bus.letters")
async def _bus_letters(server: InProcessServer, call: Caller) -> None:
    letter_id = await bus_letter(server, call)
    [letter] = (await expect_answer(call, "bus.letters", {"sink": "hook"}))["items"]
    assert (letter["letter_id"], letter["detail"]) == (letter_id, "410")


@case("bus.requeue")
async def _requeue_bus_letter(server: InProcessServer, call: Caller) -> None:
    letter_id = await bus_letter(server, call)
    answer = await expect_answer(call, "bus.requeue", {"letter_id": letter_id})
    assert answer == {"letter_id": letter_id, "settled": "requeue"}
    await expect_problem(call, "bus.requeue", {"letter_id": letter_id}, "NotFound", 404)


@case("bus.drop")
async def _drop_bus_letter(server: InProcessServer, call: Caller) -> None:
    letter_id = await bus_letter(server, call)
    assert (await expect_answer(call, "bus.drop", {"letter_id": letter_id}))["settled"] == "drop"
    assert (await expect_answer(call, "bus.letters", {}))["items"] == []


# --- dead letters: on a service whose clock the case moves


def clock_of(server: InProcessServer) -> VirtualClock:
    """Return the clock of the service's store."""
    store: Any = server.app.runtime().store
    clock: VirtualClock = store.inner._clock
    return clock


@case("letters.list")
async def _letters(server: InProcessServer, call: Caller) -> None:
    letter_id = await dead_letter(server, clock_of(server))
    [letter] = (await expect_answer(call, "letters.list", {"reason": "retries exhausted"}))["items"]
    assert letter["letter_id"] == letter_id
    assert (await expect_answer(call, "letters.list", {"reason": "undecodable"}))["items"] == []


@case("letters.get")
async def _letter(server: InProcessServer, call: Caller) -> None:
    opened = await expect_answer(call, "letters.get", {"letter_id": await dead_letter(server, clock_of(server))})
    assert opened["message"]["signal_id"] == "poison"
    assert opened["letter"]["settled"] is None
    await expect_problem(call, "letters.get", {"letter_id": "nothing"}, "NotFound", 404)


@case("letters.requeue")
async def _requeue(server: InProcessServer, call: Caller) -> None:
    letter_id = await dead_letter(server, clock_of(server))
    answer = await expect_answer(call, "letters.requeue", {"letter_id": letter_id, "actor": "ann"})
    assert answer == {"letter_id": letter_id, "settled": "requeue"}
    opened = await expect_answer(call, "letters.get", {"letter_id": letter_id})
    assert opened["letter"]["settled_by"] == "ann"
    await expect_problem(call, "letters.drop", {"letter_id": letter_id}, "Conflict", 409)


@case("letters.drop")
async def _drop(server: InProcessServer, call: Caller) -> None:
    letter_id = await dead_letter(server, clock_of(server))
    assert (await expect_answer(call, "letters.drop", {"letter_id": letter_id}))["settled"] == "drop"
    assert (await expect_answer(call, "letters.list", {}))["items"] == []
    await expect_problem(call, "letters.drop", {"letter_id": "nothing"}, "NotFound", 404)


# --- workflows and the installation


@case("workflows.list")
async def _workflows(server: InProcessServer, call: Caller) -> None:
    names = [workflow["name"] for workflow in (await expect_answer(call, "workflows.list", {}))["items"]]
    assert names == ["asking", "drawn", "echo", "failing", "far", "order", "patient", "paying", "signing", "talking"]


@case("workflows.get")
async def _workflow(server: InProcessServer, call: Caller) -> None:
    await waiting_order(server)
    workflow = await expect_answer(call, "workflows.get", {"name": "order", "version": "1"})
    assert workflow["input"]["$defs"]["order_arguments"]["required"] == ["order_id"]
    assert workflow["result"] == {"type": "string"}
    assert workflow["signals"]["approval"]["$defs"]["Approval"]["required"] == ["approved"]
    assert workflow["updates"]["change_address"]["result"] == {"type": "integer"}
    assert workflow["queries"].keys() == {"progress"}
    assert workflow["allow_other_signals"] is False
    await expect_problem(call, "workflows.get", {"name": "nothing"}, "NotFound", 404)


@case("tokens.create")
async def _make_token(server: InProcessServer, call: Caller) -> None:
    ask = {"name": "ann", "role": "operator", "roles": ["clerk"], "tenant": "acme", "expires_in_s": 60}
    made = await expect_answer(call, "tokens.create", ask, 201)
    item = made["item"]
    assert made["token"].startswith(item["prefix"] + "_")
    assert (item["name"], item["role"], item["roles"], item["tenant"]) == ("ann", "operator", ["clerk"], "acme")
    assert (item["is_valid"], item["revoked_at"], item["last_used_at"]) == (True, None, None)
    assert made["token"] != (await expect_answer(call, "tokens.create", ask, 201))["token"]
    wrong: list[dict[str, Any]] = [
        {"role": None},
        {"role": "king"},
        {"scopes": ["everything"]},
        {"name": ""},
        {"tenant": "a:b"},
        {"expires_in_s": 0},
        {"tenant": None, "project": "p"},
    ]
    for bad in wrong:
        await expect_problem(call, "tokens.create", {**ask, **bad}, "InvalidInput", 422)


@case("tokens.list")
async def _tokens(server: InProcessServer, call: Caller) -> None:
    made = [
        await expect_answer(call, "tokens.create", {"name": f"n{n}", "scopes": ["runs:read"]}, 201) for n in range(3)
    ]
    page = await expect_answer(call, "tokens.list", {"limit": 2})
    rest = await expect_answer(call, "tokens.list", {"cursor": page["next"]})
    found = page["items"] + rest["items"]
    assert found == sorted([one["item"] for one in made], key=lambda item: str(item["token_id"]))
    assert (await expect_answer(call, "tokens.list", {"tenant": "acme"}))["items"] == []
    secrets = [one["token"].rpartition("_")[2] for one in made]
    assert not any(secret in str(found) for secret in secrets)


@case("tokens.revoke_leaked")
async def _revoke_leaked(server: InProcessServer, call: Caller) -> None:
    made = await expect_answer(call, "tokens.create", {"name": "ann", "role": "viewer"}, 201)
    revoked = await expect_answer(call, "tokens.revoke_leaked", {"token": f" {made['token']} "})
    assert (revoked["token_id"], revoked["is_valid"]) == (made["item"]["token_id"], False)
    wrong = made["token"][:-1] + ("0" if made["token"][-1] != "0" else "1")
    await expect_problem(call, "tokens.revoke_leaked", {"token": wrong}, "InvalidInput", 422)
    await expect_problem(call, "tokens.revoke", {"token_id": made["token"]}, "InvalidInput", 422)
    await expect_problem(call, "tokens.revoke_leaked", {"token": write_token("0" * 16, "0" * 64)}, "NotFound", 404)


@case("runs.delete")
async def _delete_run(server: InProcessServer, call: Caller) -> None:
    run_id = await finished(server, "echo")
    assert (await expect_answer(call, "runs.delete", {"run_id": run_id, "dry_run": True}))["runs"] == 1
    assert (await expect_answer(call, "runs.delete", {"run_id": run_id}))["runs"] == 1
    await expect_problem(call, "runs.delete", {"run_id": run_id}, "NotFound", 404)
    await expect_problem(call, "runs.delete", {"run_id": await waiting_order(server)}, "Conflict", 409)


@case("tenants.delete")
async def _delete_tenant(server: InProcessServer, call: Caller) -> None:
    run_id = await finished(server, "echo")
    assert (await expect_answer(call, "tenants.delete", {"tenant": "acme", "yes": True}))["runs"] == 0
    assert (await expect_answer(call, "tenants.delete", {"tenant": "default", "yes": True}))["runs"] == 1
    await expect_problem(call, "tenants.delete", {"tenant": "default"}, "InvalidInput", 422)
    await expect_problem(call, "runs.get", {"run_id": run_id}, "NotFound", 404)


@asynccontextmanager
async def archiving(server: InProcessServer) -> AsyncIterator[None]:
    """Let the policy of this server archive and delete every finished run."""
    runtime = server.app.runtime()
    duty, store = runtime.retention, unsealed(runtime.store)
    with TemporaryDirectory() as folder:
        duty.policy, duty.archive = hf.Retention(finished=0), Archive(Path(folder), store)
        yield


@case("retention.show")
async def _retention(server: InProcessServer, call: Caller) -> None:
    shown = await expect_answer(call, "retention.show", {})
    assert shown["rules"] == [{"finished_days": None, "workflow": None, "status": None, "tenant": None}]
    assert (shown["node"], shown["last"], shown["history"], shown["archive"]) == (None, None, [], False)


@case("retention.preview")
async def _preview(server: InProcessServer, call: Caller) -> None:
    run_id = await finished(server, "echo")
    assert (await expect_answer(call, "retention.preview", {}))["runs"] == 0
    async with archiving(server):
        assert (await expect_answer(call, "retention.preview", {}))["by_workflow"] == {"echo": 1}
    await expect_answer(call, "runs.get", {"run_id": run_id})


@case("retention.run")
async def _retain(server: InProcessServer, call: Caller) -> None:
    await finished(server, "echo")
    waiting = await waiting_order(server)
    async with archiving(server):
        report = await expect_answer(call, "retention.run", {})
        assert (report["runs"], report["archived"], report["has_more"]) == (1, 1, False)
        shown = await expect_answer(call, "retention.show", {})
        assert shown["last"] == report
        assert shown["history"][0]["detail"].startswith("runs 1, events ")
    await expect_answer(call, "runs.get", {"run_id": waiting})


@case("archive.list")
async def _archived_runs(server: InProcessServer, call: Caller) -> None:
    made = [await finished(server, "echo") for _ in range(3)]
    async with archiving(server):
        await expect_answer(call, "retention.run", {})
        page = await expect_answer(call, "archive.list", {"limit": 2})
        rest = await expect_answer(call, "archive.list", {"cursor": page["next"]})
        assert sorted(run["run_id"] for run in page["items"] + rest["items"]) == sorted(made)
        assert (await expect_answer(call, "archive.list", {"workflow": "order"}))["items"] == []


@case("archive.get")
async def _archived_run(server: InProcessServer, call: Caller) -> None:
    run_id = await finished(server, "echo")
    await expect_problem(call, "archive.get", {"run_id": run_id}, "NotFound", 404)
    async with archiving(server):
        await expect_answer(call, "retention.run", {})
        found = await expect_answer(call, "archive.get", {"run_id": run_id})
        assert (found["workflow"], found["status"], found["run_id"]) == ("echo", "COMPLETED", run_id)
        await expect_problem(call, "runs.get", {"run_id": run_id}, "NotFound", 404)


@case("archive.events")
async def _archived_events(server: InProcessServer, call: Caller) -> None:
    run_id = await finished(server, "echo")
    history = (await expect_answer(call, "runs.events", {"run_id": run_id}))["items"]
    async with archiving(server):
        await expect_answer(call, "retention.run", {})
        page = await expect_answer(call, "archive.events", {"run_id": run_id, "limit": 1})
        rest = await expect_answer(call, "archive.events", {"run_id": run_id, "after": 1})
        assert page["items"] + rest["items"] == history
        assert (page["last_event_seq"], page["status"]) == (len(history), "COMPLETED")
        server.app.runtime().retention.archive = None
        await expect_problem(call, "archive.events", {"run_id": run_id}, "ArtifactMissing", 404)
        await expect_problem(call, "archive.events", {"run_id": "nowhere"}, "NotFound", 404)


@case("audit.list")
async def _audit(server: InProcessServer, call: Caller) -> None:
    made = [await expect_answer(call, "runs.start", {"workflow": "echo"}, 201) for _ in range(3)]
    page = await expect_answer(call, "audit.list", {"operation": "runs.start", "limit": 2})
    rest = await expect_answer(call, "audit.list", {"operation": "runs.start", "cursor": page["next"]})
    found = [item["run_id"] for item in page["items"] + rest["items"]]
    assert found == [run["run_id"] for run in reversed(made)]
    oldest = await expect_answer(call, "audit.list", {"order": "oldest", "limit": 1})
    assert oldest["items"][0]["run_id"] == made[0]["run_id"]
    assert (await expect_answer(call, "audit.list", {"actor": "nobody-of-this-name"}))["items"] == []
    await expect_problem(call, "audit.list", {"cursor": page["next"], "order": "oldest"}, "InvalidInput", 422)


@case("tokens.revoke")
async def _revoke(server: InProcessServer, call: Caller) -> None:
    made = (await expect_answer(call, "tokens.create", {"name": "ann", "role": "viewer"}, 201))["item"]
    revoked = await expect_answer(call, "tokens.revoke", {"token_id": made["token_id"]})
    assert (revoked["is_valid"], revoked["revoked_by"]) == (False, "anonymous")
    assert await expect_answer(call, "tokens.revoke", {"token_id": made["prefix"]}) == revoked
    await expect_problem(call, "tokens.revoke", {"token_id": "nothing"}, "NotFound", 404)


@case("system.health")
async def _health(server: InProcessServer, call: Caller) -> None:
    health = await expect_answer(call, "system.health", {})
    assert (health["status"], health["app"]) == ("ok", "shop")


@case("system.stats")
async def _stats(server: InProcessServer, call: Caller) -> None:
    await waiting_order(server)
    stats = await expect_answer(call, "system.stats", {})
    assert (stats["runs"], stats["nodes"], stats["dead_letters"]) == ({"RUNNING": 1}, 1, 0)


@case("system.doctor")
async def _doctor(server: InProcessServer, call: Caller) -> None:
    run_id = await failed_step(server)
    report = await expect_answer(call, "system.doctor", {})
    assert not report["is_fine"]
    [paused] = [each for each in report["items"] if each["subject"] == "paused runs"]
    assert (paused["level"], paused["run_ids"]) == ("wrong", [run_id])
    assert "retry_step" in paused["advice"]
    assert paused["search"] == "status:paused with:children ValueError"


@case("system.queues")
async def _queues(server: InProcessServer, call: Caller) -> None:
    await server.start("far")
    queues = await server.until("system.queues", {}, lambda queues: queues["items"])
    assert queues["items"] == [{"name": "gpu", "jobs": 1}]
    assert await expect_answer(call, "system.queues", {}) == queues


@case("system.nodes")
async def _nodes(server: InProcessServer, call: Caller) -> None:
    [node] = (await expect_answer(call, "system.nodes", {}))["items"]
    assert node["is_here"]
    assert node["name"].startswith("shop-")
    assert "order" in node["workflows"]
    assert node["version"]


@case("system.locks")
async def _locks(server: InProcessServer, call: Caller) -> None:
    assert await expect_answer(call, "system.locks", {}) == {"items": []}
    await server.app.runtime().store.acquire_lock("retention", "node-7#5f2a", 60_000)
    [lock] = (await expect_answer(call, "system.locks", {}))["items"]
    assert (lock["name"], lock["node"], lock["epoch"], lock["is_expired"]) == ("retention", "node-7", 1, False)


@case("system.samples")
async def _samples(server: InProcessServer, call: Caller) -> None:
    assert await expect_answer(call, "system.samples", {}) == {"items": []}
    runtime = server.app.runtime()
    await server.start("far")
    await server.until("system.queues", {}, lambda queues: queues["items"])
    assert await Sampler(runtime.store, runtime.node_name, 60.0, 3_600.0).come_round()
    [sample] = (await expect_answer(call, "system.samples", {"since": "2020-01-01T00:00:00Z"}))["items"]
    assert (sample["jobs"], sample["queues"], sample["runs"], sample["nodes"]) == (1, {"gpu": 1}, {"RUNNING": 1}, 1)
    assert (await expect_answer(call, "system.samples", {"since": "2999-01-01T00:00:00Z"}))["items"] == []
    await expect_problem(call, "system.samples", {"since": "yesterday"}, "InvalidInput", 422)


@case("system.takeovers")
async def _takeovers(server: InProcessServer, call: Caller) -> None:
    body = Raw(b'{"node":"b","taken_from":"a","runs":3}')
    await server.app.runtime().store.put_bulletins("takeover", {"b 1": body}, 60_000)
    [found] = (await expect_answer(call, "system.takeovers", {}))["items"]
    assert (found["node"], found["taken_from"], found["runs"]) == ("b", "a", 3)


@case("system.alerts")
async def _alerts(server: InProcessServer, call: Caller) -> None:
    assert (await expect_answer(call, "system.alerts", {}))["items"] == []
    await expect_problem(call, "system.alerts", {"after": -1}, "InvalidInput", 422)


# --- plans

GREETING = """
plan: greeting
version: "1"
inputs: {name: {type: string}}
steps:
  - {id: wait, signal: go}
  - {id: rest, sleep: 0.01, depends_on: [wait]}
output: {name: "${inputs.name}", said: "${steps.wait.output}"}
"""


@case("plans.schema")
async def plans_schema(server: InProcessServer, call: Caller) -> None:
    answer = await expect_answer(call, "plans.schema", {})
    assert answer["schema"]["required"] == ["plan", "version", "steps"]


@case("plans.validate")
async def plans_validate(server: InProcessServer, call: Caller) -> None:
    answer = await expect_answer(call, "plans.validate", {"document": GREETING})
    assert (answer["is_valid"], answer["plan_id"], len(answer["graph"]["nodes"])) == (True, "greeting", 2)
    wrong = await expect_answer(call, "plans.validate", {"document": GREETING.replace("[wait]", "[nope]")})
    assert wrong["problems"] == [{"place": "/steps/1/depends_on/0", "message": "there is no step 'nope'", "line": 7}]
    unknown = "plan: p\nversion: '1'\nsteps: [{id: a, activity: nope}]"
    assert not (await expect_answer(call, "plans.validate", {"document": unknown}))["is_valid"]


@case("plans.register")
async def plans_register(server: InProcessServer, call: Caller) -> None:
    first = await expect_answer(call, "plans.register", {"document": GREETING}, 201)
    assert first == await expect_answer(call, "plans.register", {"document": GREETING, "sha256": first["sha256"]}, 201)
    await expect_problem(call, "plans.register", {"document": GREETING + "\n"}, "Conflict", 409)
    other = {"document": GREETING.replace('"1"', '"2"'), "sha256": "0" * 64}
    await expect_problem(call, "plans.register", other, "Conflict", 409)
    problem = await expect_problem(call, "plans.register", {"document": "plan: x\n"}, "PlanInvalid", 422)
    assert problem["details"]["problems"][0]["message"]
    await expect_problem(call, "plans.register", {}, "InvalidInput", 422)
    for uri in ("https://example.com/p.yaml", "file:///etc/passwd"):
        await expect_problem(call, "plans.register", {"uri": uri}, "NotPermitted", 403)


@case("plans.list")
async def plans_list(server: InProcessServer, call: Caller) -> None:
    for version in ("1", "2"):
        document = GREETING.replace('"1"', f'"{version}"')
        await expect_answer(call, "plans.register", {"document": document}, 201)
    page = await expect_answer(call, "plans.list", {"limit": 1})
    assert [item["plan_version"] for item in page["items"]] == ["1"]
    page = await expect_answer(call, "plans.list", {"cursor": page["next"], "plan_id": "greeting"})
    assert ([item["plan_version"] for item in page["items"]], page["next"]) == (["2"], None)


@case("plans.get")
async def plans_get(server: InProcessServer, call: Caller) -> None:
    await expect_answer(call, "plans.register", {"document": GREETING}, 201)
    plan = await expect_answer(call, "plans.get", {"plan_id": "greeting"})
    assert (plan["document"], plan["steps"], plan["problems"]) == (GREETING, 2, [])
    assert plan["input"]["required"] == ["name"]
    await expect_problem(call, "plans.get", {"plan_id": "greeting", "plan_version": "9"}, "NotFound", 404)


@case("plans.start")
async def plans_start(server: InProcessServer, call: Caller) -> None:
    registered = await expect_answer(call, "plans.register", {"document": GREETING}, 201)
    ask: dict[str, Any] = {"plan_id": "greeting", "inputs": {"name": "ann"}, "request_id": "q"}
    run = await expect_answer(call, "plans.start", ask, 201)
    assert run["workflow"] == "plan:greeting"
    assert run == await expect_answer(call, "plans.start", {**ask, "sha256": registered["sha256"]}, 201)
    await expect_answer(
        call, "signals.send", {"run_id": run["run_id"], "name": "go", "payload": 1, "signal_id": "s"}, 202
    )
    outcome = await server.until(
        "runs.result", {"run_id": run["run_id"], "wait_s": 5}, lambda outcome: outcome["is_finished"]
    )
    assert outcome["result"] == {"name": "ann", "said": 1}
    graph = await expect_answer(call, "runs.graph", {"run_id": run["run_id"]})
    assert {node["id"]: node["status"] for node in graph["nodes"]} == {"wait": "SUCCESS", "rest": "SUCCESS"}
    await expect_answer(
        call, "plans.start", {"plan_id": "greeting", "document": GREETING, "inputs": {"name": "bob"}}, 201
    )
    later = {"plan_id": "greeting", "inputs": {"name": "eve"}, "after_s": 3_600}
    waiting = await expect_answer(call, "plans.start", later, 201)
    assert (await expect_answer(call, "runs.get", {"run_id": waiting["run_id"]}))["status"] == "PENDING"
    both = {**later, "at": "2030-01-01T00:00:00Z"}
    await expect_problem(call, "plans.start", both, "InvalidInput", 422)
    await expect_problem(call, "plans.start", {"plan_id": "greeting"}, "InvalidInput", 422)
    await expect_problem(call, "plans.start", {"plan_id": "other", "document": GREETING}, "Conflict", 409)
    await expect_problem(call, "plans.start", {"plan_id": "nope"}, "NotFound", 404)
    await expect_problem(call, "plans.start", {"plan_id": "greeting", "sha256": "0" * 64}, "NotFound", 404)


@case("plans.diff")
async def plans_diff(server: InProcessServer, call: Caller) -> None:
    await expect_answer(call, "plans.register", {"document": GREETING}, 201)
    other = GREETING.replace('"1"', '"2"').replace("sleep: 0.01", "sleep: 9")
    await expect_answer(call, "plans.register", {"document": other + "on_failure: continue\n"}, 201)
    ask = {"plan_id": "greeting", "from_version": "1", "to_version": "2"}
    assert await expect_answer(call, "plans.diff", ask) == {
        "added": [],
        "removed": [],
        "changed": [{"step_id": "rest", "fields": [{"field": "sleep", "before": 0.01, "after": 9.0}]}],
        "fields": [{"field": "on_failure", "after": "continue"}],
    }
    await expect_problem(call, "plans.diff", {**ask, "to_version": "3"}, "NotFound", 404)


@case("plans.graph")
async def plans_graph(server: InProcessServer, call: Caller) -> None:
    await expect_answer(call, "plans.register", {"document": GREETING}, 201)
    graph = await expect_answer(call, "plans.graph", {"plan_id": "greeting"})
    assert (graph["kind"], graph["plan_version"], graph["steps"]) == ("plan", "1", len(graph["nodes"]))
    assert {node["status"] for node in graph["nodes"]} == {"PENDING"}
    other = GREETING.replace('"1"', '"2"').replace("sleep: 0.01", "sleep: 9")
    await expect_answer(call, "plans.register", {"document": other}, 201)
    ask = {"plan_id": "greeting", "from_version": "1", "expand": ["a", "b"]}
    compared = await expect_answer(call, "plans.graph", ask)
    assert compared["plan_version"] == "2"
    assert {node["id"]: node["change"] for node in compared["nodes"] if "change" in node} == {"rest": "changed"}
    await expect_problem(call, "plans.graph", {"plan_id": "nothing"}, "NotFound", 404)


# --- schedules

NIGHTLY = {"schedule_id": "nightly", "workflow": "echo", "cron": "30 3 * * *", "tz": "Europe/Sofia"}


@case("schedules.create")
async def schedules_create(server: InProcessServer, call: Caller) -> None:
    made = await expect_answer(call, "schedules.create", NIGHTLY, 201)
    assert (made["overlap"], made["is_paused"], len(made["next_ticks"])) == ("skip", False, 5)
    await expect_problem(call, "schedules.create", NIGHTLY, "Conflict", 409)
    for wrong in ({"cron": "x"}, {"tz": "Sofia"}, {"every_s": 60}, {"input": {"no": 1}}, {"overlap": "burn"}):
        await expect_problem(
            call, "schedules.create", {**NIGHTLY, "schedule_id": "other", **wrong}, "InvalidInput", 422
        )
    await expect_problem(call, "schedules.create", {**NIGHTLY, "workflow": "nothing"}, "NotFound", 404)


@case("schedules.list")
async def schedules_list(server: InProcessServer, call: Caller) -> None:
    for schedule_id in ("a", "b"):
        await expect_answer(call, "schedules.create", {**NIGHTLY, "schedule_id": schedule_id}, 201)
    page = await expect_answer(call, "schedules.list", {"limit": 1})
    assert [item["schedule_id"] for item in page["items"]] == ["a"]
    page = await expect_answer(call, "schedules.list", {"cursor": page["next"], "workflow": "echo"})
    assert ([item["schedule_id"] for item in page["items"]], page["next"]) == (["b"], None)


@case("schedules.get")
async def schedules_get(server: InProcessServer, call: Caller) -> None:
    made = await expect_answer(call, "schedules.create", NIGHTLY, 201)
    assert await expect_answer(call, "schedules.get", {"schedule_id": "nightly"}) == made
    await expect_problem(call, "schedules.get", {"schedule_id": "other"}, "NotFound", 404)


@case("schedules.update")
async def schedules_update(server: InProcessServer, call: Caller) -> None:
    await expect_answer(call, "schedules.create", NIGHTLY, 201)
    before = (await server.app.runtime().schedules.get(("default", "default", "default", "nightly"))).input
    changed = await expect_answer(call, "schedules.update", {"schedule_id": "nightly", "every_s": 3600})
    after = (await server.app.runtime().schedules.get(("default", "default", "default", "nightly"))).input
    assert bytes(before) == bytes(after) != b"null"
    assert (changed["cron"], changed["every_s"], changed["revision"]) == ("", 3600, 2)
    await expect_problem(call, "schedules.update", {"schedule_id": "nightly"}, "InvalidInput", 422)
    await expect_problem(call, "schedules.update", {"schedule_id": "other", "every_s": 60}, "NotFound", 404)


@case("schedules.pause")
async def schedules_pause(server: InProcessServer, call: Caller) -> None:
    await expect_answer(call, "schedules.create", NIGHTLY, 201)
    paused = await expect_answer(call, "schedules.pause", {"schedule_id": "nightly", "note": "holidays"})
    assert (paused["is_paused"], paused["note"], paused["next_ticks"]) == (True, "holidays", [])
    await expect_problem(call, "schedules.pause", {"schedule_id": "other"}, "NotFound", 404)


@case("schedules.resume")
async def schedules_resume(server: InProcessServer, call: Caller) -> None:
    await expect_answer(call, "schedules.create", NIGHTLY, 201)
    await expect_answer(call, "schedules.pause", {"schedule_id": "nightly"})
    resumed = await expect_answer(call, "schedules.resume", {"schedule_id": "nightly"})
    assert (resumed["is_paused"], len(resumed["next_ticks"])) == (False, 5)
    await expect_problem(call, "schedules.resume", {"schedule_id": "other"}, "NotFound", 404)


@case("schedules.trigger")
async def schedules_trigger(server: InProcessServer, call: Caller) -> None:
    await expect_answer(call, "schedules.create", NIGHTLY, 201)
    asked = {"schedule_id": "nightly", "request_id": "click-1"}
    first = await expect_answer(call, "schedules.trigger", asked)
    assert await expect_answer(call, "schedules.trigger", asked) == first
    await expect_problem(call, "schedules.trigger", {"schedule_id": "other"}, "NotFound", 404)


@case("schedules.backfill")
async def schedules_backfill(server: InProcessServer, call: Caller) -> None:
    await expect_answer(call, "schedules.create", NIGHTLY, 201)
    period = {"since": "2020-01-01T00:00:00Z", "until": "2020-01-03T12:00:00Z"}
    asked = {"schedule_id": "nightly", **period}
    assert await expect_answer(call, "schedules.backfill", asked) == {"ticks": 3}
    await expect_problem(call, "schedules.backfill", {**asked, "overlap": "skip"}, "InvalidInput", 422)
    await expect_problem(call, "schedules.backfill", {**asked, "schedule_id": "other"}, "NotFound", 404)


@case("schedules.delete")
async def schedules_delete(server: InProcessServer, call: Caller) -> None:
    await expect_answer(call, "schedules.create", NIGHTLY, 201)
    assert await expect_answer(call, "schedules.delete", {"schedule_id": "nightly"}) == {"schedule_id": "nightly"}
    await expect_problem(call, "schedules.delete", {"schedule_id": "nightly"}, "NotFound", 404)
