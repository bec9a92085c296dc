"""One scene for each operation: what is there before, what is asked, and what must come back. Any transport will do."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec.structs import replace

from holdfast.core.access import write_token
from holdfast.testing import VirtualClock
from holdfast.testing.samples import message
from tests.service.stage import Caller, Stage

Scene = Callable[[Stage, Caller], Awaitable[None]]
SCENES: dict[str, Scene] = {}
ANN: dict[str, Any] = {"actor": "ann", "actor_roles": ["clerk"]}


def scene(name: str) -> Callable[[Scene], Scene]:
    """Declare the scene of an operation."""

    def declare(function: Scene) -> Scene:
        SCENES[name] = function
        return function

    return declare


async def fine(call: Caller, name: str, ask: dict[str, Any], status: int = 200) -> Any:
    """Ask, and return the answer, which must not be a refusal."""
    found, answer = await call(name, ask)
    assert found == status, answer
    return answer


async def refused(call: Caller, name: str, ask: dict[str, Any], code: str, status: int) -> Any:
    """Ask, and return the problem, which must have this code."""
    found, problem = await call(name, ask)
    assert (found, problem.get("code")) == (status, code), problem
    return problem


async def waiting_order(stage: Stage) -> str:
    """Return a run that waits for its approval."""
    run_id = await stage.start("order", order_id="o-1")
    await stage.until("signals.waits", {"run_id": run_id}, lambda page: page["items"])
    return run_id


async def open_task(stage: Stage) -> str:
    """Return a task that is nobody's."""
    run_id = await stage.start("asking", who="cleo")
    page = await stage.until("tasks.list", {"run_id": run_id}, lambda page: page["items"])
    return str(page["items"][0]["task_id"])


async def finished(stage: Stage, workflow: str, **input: Any) -> str:
    """Return a run that has finished."""
    run_id = await stage.start(workflow, **input)
    await stage.until("runs.result", {"run_id": run_id, "wait_s": 5}, lambda outcome: outcome["is_finished"])
    return run_id


async def failed_step(stage: Stage) -> str:
    """Return a run that is paused because its step has failed."""
    run_id = await stage.start("paying", order_id="o-1")
    await stage.until("runs.get", {"run_id": run_id}, lambda run: run["status"] == "PAUSED")
    return run_id


async def dead_letter(stage: Stage, clock: VirtualClock) -> str:
    """Return a message that nobody could handle."""
    run_id = await waiting_order(stage)
    store: Any = stage.app.runtime().store
    await store.deliver([replace(message(run_id, "poison"), expected_version=99)])
    while not (letters := (await stage.rest("letters.list", {"run_id": run_id}))[1]["items"]):
        clock.advance(ms=61_000)
        store.wakeups.notify()
        await asyncio.sleep(0.002)
    return str(letters[0]["letter_id"])


# --- runs


@scene("runs.start")
async def _start(stage: Stage, call: Caller) -> None:
    ask = {"workflow": "order", "input": {"order_id": "o-1"}, "request_id": "r-1", "tags": ["a"], "reference_key": "k"}
    first = await fine(call, "runs.start", ask, 201)
    assert first == await fine(call, "runs.start", ask, 201)
    assert first["workflow"] == "order"
    assert first["workflow_version"] == "1"
    run = await fine(call, "runs.get", {"run_id": first["run_id"]})
    assert (run["tags"], run["reference_key"], run["request_id"]) == (["a"], "k", "r-1")
    await refused(call, "runs.start", {**ask, "input": {"order_id": "o-2"}}, "Conflict", 409)
    chosen = {"workflow": "echo", "run_id": "mine"}
    assert await fine(call, "runs.start", chosen, 201) == await fine(call, "runs.start", chosen, 201)
    await refused(call, "runs.start", {"workflow": "nothing"}, "NotFound", 404)
    await refused(call, "runs.start", {"workflow": "order", "workflow_version": "9"}, "NotFound", 404)
    for bad in ({}, {"order_id": 7}, {"order_id": "o", "colour": "red"}):
        await refused(call, "runs.start", {"workflow": "order", "input": bad}, "InvalidInput", 422)


@scene("runs.get")
async def _get(stage: Stage, call: Caller) -> None:
    run_id = await waiting_order(stage)
    run = await fine(call, "runs.get", {"run_id": run_id})
    assert (run["run_id"], run["workflow"], run["status"]) == (run_id, "order", "RUNNING")
    assert run["waiting_kind"] == "signal"
    assert run["created_at"].endswith("Z")
    await refused(call, "runs.get", {"run_id": "nowhere"}, "NotFound", 404)


@scene("runs.list")
async def _list(stage: Stage, call: Caller) -> None:
    run_ids = sorted([await stage.start("patient") for _ in range(5)])
    await finished(stage, "echo")
    found: list[str] = []
    cursor = ""
    while True:
        page = await fine(call, "runs.list", {"workflow": "patient", "limit": 2, "cursor": cursor})
        found += [run["run_id"] for run in page["items"]]
        cursor = page["next"]
        if cursor is None:
            break
        assert len(page["items"]) == 2
    assert found == run_ids
    done = await fine(call, "runs.list", {"status": "COMPLETED"})
    assert [run["workflow"] for run in done["items"]] == ["echo"]
    assert (await fine(call, "runs.list", {"created_from": "2999-01-01T00:00:00Z"}))["items"] == []
    newest = {"order": "newest", "limit": 2}
    page = await fine(call, "runs.list", newest)
    rest = await fine(call, "runs.list", {**newest, "limit": 9, "cursor": page["next"]})
    made = [(run["created_at"], run["workflow"]) for run in page["items"] + rest["items"]]
    assert made == sorted(made, reverse=True)
    assert (len(made), made[0][1], rest["next"]) == (6, "echo", None)
    await refused(call, "runs.list", {"cursor": page["next"]}, "InvalidInput", 422)
    [named] = (await fine(call, "runs.list", {"text": run_ids[0][9:]}))["items"]
    assert named["run_id"] == run_ids[0]
    await refused(call, "runs.list", {"cursor": "nonsense"}, "InvalidInput", 422)
    await refused(call, "runs.list", {"status": "ASLEEP"}, "InvalidInput", 422)
    await refused(call, "runs.list", {"limit": 501}, "InvalidInput", 422)


@scene("runs.events")
async def _events(stage: Stage, call: Caller) -> None:
    run_id = await finished(stage, "echo", value="x")
    whole = await fine(call, "runs.events", {"run_id": run_id})
    assert [event["run_seq"] for event in whole["items"]] == [1, 2, 3]
    assert [event["event_type"] for event in whole["items"]] == ["RunQueued", "RunStarted", "RunCompleted"]
    assert (whole["last_event_seq"], whole["status"]) == (3, "COMPLETED")
    assert whole["items"][0]["data"]["input"] == {"value": "x"}
    part = await fine(call, "runs.events", {"run_id": run_id, "after": 1, "limit": 1})
    assert part["items"] == whole["items"][1:2]
    assert part["last_event_seq"] == 3
    await refused(call, "runs.events", {"run_id": "nowhere"}, "NotFound", 404)


@scene("runs.snapshot")
async def _snapshot(stage: Stage, call: Caller) -> None:
    run_id = await failed_step(stage)
    snapshot = await fine(call, "runs.snapshot", {"run_id": run_id})
    assert (snapshot["status"], snapshot["is_stale"]) == ("PAUSED", False)
    [step] = snapshot["steps"]
    assert (step["step_id"], step["status"], step["error"]["message"]) == ("charge", "FAILED", "the card was refused")
    await fine(call, "runs.terminate", {"run_id": run_id, "wait": True}, 202)
    assert (await fine(call, "runs.snapshot", {"run_id": run_id}))["status"] == "CANCELLED"
    await refused(call, "runs.snapshot", {"run_id": "nowhere"}, "NotFound", 404)


@scene("runs.result")
async def _result(stage: Stage, call: Caller) -> None:
    run_id = await waiting_order(stage)
    outcome = await fine(call, "runs.result", {"run_id": run_id, "wait_s": 0.01})
    assert (outcome["is_finished"], outcome["status"], outcome["result"]) == (False, "RUNNING", None)
    await fine(call, "signals.send", {"run_id": run_id, "name": "approval", "payload": {"approved": True}}, 202)
    outcome = await fine(call, "runs.result", {"run_id": run_id, "wait_s": 10})
    assert outcome["result"] == "o-1: True"
    assert outcome == await fine(call, "runs.result", {"run_id": run_id})
    failed = await fine(call, "runs.result", {"run_id": await finished(stage, "failing")})
    assert failed["error"] == {"code": "ValueError", "message": "by design", "retryable": False, "category": ""}
    await refused(call, "runs.result", {"run_id": "nowhere", "wait_s": 5}, "NotFound", 404)


@scene("runs.query")
async def _query(stage: Stage, call: Caller) -> None:
    run_id = await waiting_order(stage)
    answer = await fine(call, "runs.query", {"run_id": run_id, "name": "progress"})
    assert answer == {"result": {"order_id": "o-1"}}
    await refused(call, "runs.query", {"run_id": run_id, "name": "colour"}, "NotFound", 404)
    await refused(call, "runs.query", {"run_id": run_id, "name": "progress", "input": {"x": 1}}, "InvalidInput", 422)
    await refused(call, "runs.query", {"run_id": "nowhere", "name": "progress"}, "NotFound", 404)


@scene("runs.update")
async def _update(stage: Stage, call: Caller) -> None:
    ask = {"run_id": await waiting_order(stage), "name": "change_address", "input": {"city": "Ulm"}, "update_id": "u"}
    assert await fine(call, "runs.update", ask) == {"result": 1}
    assert await fine(call, "runs.update", ask) == {"result": 1}
    assert await fine(call, "runs.update", {**ask, "update_id": "v"}) == {"result": 2}
    await refused(call, "runs.update", {**ask, "input": {"city": "Bonn"}}, "Conflict", 409)
    await refused(call, "runs.update", {**ask, "name": "nothing", "update_id": "w"}, "UpdateFailed", 409)
    done = await finished(stage, "echo")
    await refused(call, "runs.update", {**ask, "run_id": done}, "RunTerminal", 409)


# --- controls


async def command(stage: Stage, call: Caller, name: str, run_id: str, status: str, **more: Any) -> None:
    """Give a command, and see what it makes of the run; then see that a run which has finished takes none."""
    answer = await fine(call, name, {"run_id": run_id, "actor": "ann", "wait": True, **more}, 202)
    assert (answer["run_id"], answer["is_decided"]) == (run_id, True)
    await stage.until("runs.get", {"run_id": run_id}, lambda run: run["status"] == status)
    done = await finished(stage, "echo")
    await refused(call, name, {"run_id": done, **more}, "RunTerminal", 409)
    await refused(call, name, {"run_id": "nowhere", **more}, "NotFound", 404)


@scene("runs.cancel")
async def _cancel(stage: Stage, call: Caller) -> None:
    await command(stage, call, "runs.cancel", await waiting_order(stage), "CANCELLED")


@scene("runs.pause")
async def _pause(stage: Stage, call: Caller) -> None:
    run_id = await waiting_order(stage)
    await command(stage, call, "runs.pause", run_id, "PAUSED", reason="lunch")
    events = (await fine(call, "runs.events", {"run_id": run_id}))["items"]
    [accepted] = [event["data"] for event in events if event["event_type"] == "SignalAccepted"]
    assert (accepted["actor"], accepted["reason"]) == ("ann", "lunch")


@scene("runs.resume")
async def _resume(stage: Stage, call: Caller) -> None:
    run_id = await waiting_order(stage)
    await fine(call, "runs.pause", {"run_id": run_id, "wait": True}, 202)
    await command(stage, call, "runs.resume", run_id, "RUNNING")


@scene("runs.approve")
async def _approve(stage: Stage, call: Caller) -> None:
    run_id = await waiting_order(stage)
    await refused(call, "runs.approve", {"run_id": run_id, "wait": True}, "Conflict", 409)
    await refused(call, "runs.approve", {"run_id": "nowhere"}, "NotFound", 404)


@scene("runs.terminate")
async def _terminate(stage: Stage, call: Caller) -> None:
    await command(stage, call, "runs.terminate", await waiting_order(stage), "CANCELLED")


@scene("runs.retry_step")
async def _retry_step(stage: Stage, call: Caller) -> None:
    run_id = await failed_step(stage)
    await command(stage, call, "runs.retry_step", run_id, "PAUSED", step_id="charge")

    def is_tried(snapshot: Any) -> bool:
        return bool(snapshot["steps"][0]["logical_attempt_id"] == 2)

    await stage.until("runs.snapshot", {"run_id": run_id}, is_tried)


@scene("runs.skip_step")
async def _skip_step(stage: Stage, call: Caller) -> None:
    run_id = await failed_step(stage)
    await command(stage, call, "runs.skip_step", run_id, "COMPLETED", step_id="charge", result="cash")
    assert (await fine(call, "runs.result", {"run_id": run_id}))["result"] == "cash"


@scene("runs.retry")
async def _retry(stage: Stage, call: Caller) -> None:
    run_id = await finished(stage, "echo", value="x")
    again = await fine(call, "runs.retry", {"run_id": run_id, "signal_id": "click"}, 201)
    assert again == await fine(call, "runs.retry", {"run_id": run_id, "signal_id": "click"}, 201)
    assert again["run_id"] != run_id
    outcome = await fine(call, "runs.result", {"run_id": again["run_id"], "wait_s": 10})
    assert outcome["result"] == "x"
    await refused(call, "runs.retry", {"run_id": await waiting_order(stage)}, "Conflict", 409)


# --- signals


@scene("signals.send")
async def _send(stage: Stage, call: Caller) -> None:
    run_id = await stage.start("patient")
    ask = {"run_id": run_id, "name": "go", "payload": {"n": 1}, "signal_id": "click"}
    first = await fine(call, "signals.send", ask, 202)
    assert first == await fine(call, "signals.send", ask, 202)
    assert first.keys() == {
        *("accepted", "workflow_id", "signal_name", "signal_id", "accepted_at", "signal_storage_key"),
    }
    assert (first["accepted"], first["workflow_id"], first["signal_id"]) == (True, run_id, "click")
    await refused(call, "signals.send", {**ask, "payload": 2}, "Conflict", 409)
    await refused(call, "signals.send", {**ask, "run_id": "nowhere"}, "NotFound", 404)
    waiting = {"run_id": run_id, "name": "other", "require_waiting": True}
    await refused(call, "signals.send", waiting, "NotWaiting", 409)
    for bad in ("", None, 7, "x" * 129, "é" * 65):
        await refused(call, "signals.send", {**ask, "signal_id": bad}, "InvalidInput", 422)
    await refused(call, "signals.send", {**ask, "signal_id": "big", "payload": "x" * 70_000}, "PayloadTooLarge", 413)


@scene("signals.send_many")
async def _send_many(stage: Stage, call: Caller) -> None:
    run_id = await stage.start("patient")
    items = [
        {"run_id": run_id, "name": "go", "signal_id": "a"},
        {"run_id": "nowhere", "name": "go"},
        {"run_id": run_id, "name": "go", "signal_id": "a"},
        {"run_id": run_id, "name": "holdfast.control"},
    ]
    first, unknown, again, reserved = (await fine(call, "signals.send_many", {"signals": items}))["items"]
    assert first["result"]["signal_id"] == "a"
    assert again == first
    assert (unknown["result"], unknown["problem"]["code"]) == (None, "NotFound")
    assert reserved["problem"]["code"] == "InvalidInput"
    await refused(call, "signals.send_many", {"signals": []}, "InvalidInput", 422)


@scene("signals.start_with")
async def _start_with(stage: Stage, call: Caller) -> None:
    ask = {
        "workflow": "order",
        "input": {"order_id": "o-1"},
        "request_id": "r",
        "signal_id": "s",
        "signal_name": "approval",
        "signal_payload": {"approved": True},
    }
    first = await fine(call, "signals.start_with", ask, 201)
    assert first == await fine(call, "signals.start_with", ask, 201)
    outcome = await fine(call, "runs.result", {"run_id": first["run"]["run_id"], "wait_s": 10})
    assert outcome["result"] == "o-1: True"
    bad = {**ask, "signal_payload": {}, "request_id": "r2"}
    await refused(call, "signals.start_with", bad, "InvalidInput", 422)


@scene("signals.receipt")
async def _receipt(stage: Stage, call: Caller) -> None:
    run_id = await waiting_order(stage)
    ask = {"run_id": run_id, "name": "other", "signal_id": "a/b c"}
    key = (await fine(call, "signals.send", ask, 202))["signal_storage_key"]
    assert (await fine(call, "signals.receipt", ask))["status"] == "accepted"
    await fine(
        call,
        "signals.send",
        {"run_id": run_id, "name": "approval", "payload": {"approved": True}, "signal_id": "s"},
        202,
    )
    await fine(call, "runs.result", {"run_id": run_id, "wait_s": 10})
    consumed = await fine(call, "signals.receipt", {"run_id": run_id, "name": "approval", "signal_id": "s"})
    assert consumed["status"] == "consumed"
    events = (await fine(call, "runs.events", {"run_id": run_id}))["items"]
    assert events[consumed["consumed_at_event"] - 1]["event_type"] == "SignalReceived"
    for asked in (ask, {**ask, "signal_storage_key": key}):
        expired = await fine(call, "signals.receipt", asked)
        assert expired["status"] == "expired"
        assert "COMPLETED" in expired["reason"]
    await refused(call, "signals.receipt", {**ask, "signal_id": "never"}, "NotFound", 404)


@scene("signals.waiting")
async def _waiting(stage: Stage, call: Caller) -> None:
    run_ids = sorted([await waiting_order(stage) for _ in range(3)])
    page = await fine(call, "signals.waiting", {"name": "approval", "limit": 2})
    rest = await fine(call, "signals.waiting", {"name": "approval", "cursor": page["next"]})
    assert [wait["run_id"] for wait in page["items"] + rest["items"]] == run_ids
    assert rest["next"] is None
    assert (await fine(call, "signals.waiting", {"name": "nobody"}))["items"] == []


@scene("signals.waits")
async def _waits(stage: Stage, call: Caller) -> None:
    run_id = await waiting_order(stage)
    [wait] = (await fine(call, "signals.waits", {"run_id": run_id}))["items"]
    assert (wait["run_id"], wait["step_id"], wait["name"], wait["until"]) == (run_id, "approval", "approval", None)
    assert (wait["workflow"], wait["reference_key"]) == ("order", None)
    await refused(call, "signals.waits", {"run_id": "nowhere"}, "NotFound", 404)


@scene("signals.mailbox")
async def _mailbox(stage: Stage, call: Caller) -> None:
    run_id = await waiting_order(stage)
    for number in range(3):
        await fine(call, "signals.send", {"run_id": run_id, "name": "other", "payload": number}, 202)
    page = await fine(call, "signals.mailbox", {"run_id": run_id, "limit": 2})
    rest = await fine(call, "signals.mailbox", {"run_id": run_id, "cursor": page["next"]})
    assert [signal["payload"] for signal in page["items"] + rest["items"]] == [0, 1, 2]
    assert all(signal["age_ms"] >= 0 for signal in page["items"])
    await refused(call, "signals.mailbox", {"run_id": "nowhere"}, "NotFound", 404)


@scene("signals.unconsumed")
async def _unconsumed(stage: Stage, call: Caller) -> None:
    run_ids = [await waiting_order(stage) for _ in range(2)]
    for number in range(3):
        await fine(call, "signals.send", {"run_id": run_ids[number % 2], "name": "other", "payload": number}, 202)
    page = await fine(call, "signals.unconsumed", {"limit": 2})
    rest = await fine(call, "signals.unconsumed", {"cursor": page["next"]})
    found = [(signal["run_id"], signal["payload"]) for signal in page["items"] + rest["items"]]
    assert found == [(run_ids[0], 0), (run_ids[0], 2), (run_ids[1], 1)]
    [first, *_] = page["items"]
    assert (first["workflow"], first["run_status"], first["name"]) == ("order", "RUNNING", "other")
    await fine(
        call,
        "signals.send",
        {"run_id": run_ids[0], "name": "approval", "payload": {"approved": True, "by": "ann"}},
        202,
    )
    await stage.until("runs.get", {"run_id": run_ids[0]}, lambda run: run["status"] == "COMPLETED")
    assert len((await fine(call, "signals.unconsumed", {}))["items"]) == 1
    assert len((await fine(call, "signals.unconsumed", {"finished": True, "name": "other"}))["items"]) == 3
    assert (await fine(call, "signals.unconsumed", {"name": "nobody"}))["items"] == []


# --- tasks


@scene("tasks.list")
async def _list_tasks(stage: Stage, call: Caller) -> None:
    task_ids = sorted([await open_task(stage) for _ in range(3)])
    page = await fine(call, "tasks.list", {"limit": 2, "status": "OPEN", "role": "clerk"})
    rest = await fine(call, "tasks.list", {"limit": 2, "cursor": page["next"]})
    assert [task["task_id"] for task in page["items"] + rest["items"]] == task_ids
    await fine(call, "tasks.claim", {"task_id": task_ids[0], **ANN})
    [mine] = (await fine(call, "tasks.list", {"mine": True, **ANN, "assignee": "ann"}))["items"]
    assert mine["task_id"] == task_ids[0]
    assert len((await fine(call, "tasks.list", {"text": "CLEO"}))["items"]) == 3
    assert (await fine(call, "tasks.list", {"role": "boss"}))["items"] == []


@scene("tasks.get")
async def _get_task(stage: Stage, call: Caller) -> None:
    task = await fine(call, "tasks.get", {"task_id": await open_task(stage)})
    assert (task["name"], task["status"], task["workflow"]) == ("approve", "OPEN", "asking")
    assert (task["payload"], task["roles"]) == ({"who": "cleo"}, ["clerk"])
    assert task["form"] == {"type": "boolean"}
    await refused(call, "tasks.get", {"task_id": "nothing"}, "NotFound", 404)


@scene("tasks.history")
async def _history(stage: Stage, call: Caller) -> None:
    task_id = await open_task(stage)
    await fine(call, "tasks.claim", {"task_id": task_id, **ANN})
    types = [event["event_type"] for event in (await fine(call, "tasks.history", {"task_id": task_id}))["items"]]
    assert types == ["TaskCreated", "TaskAssigned"]
    await refused(call, "tasks.history", {"task_id": "nothing"}, "NotFound", 404)


@scene("tasks.assign")
async def _assign(stage: Stage, call: Caller) -> None:
    task_id = await open_task(stage)
    assert (await fine(call, "tasks.assign", {"task_id": task_id, "to": "bob"}))["assignee"] == "bob"
    await refused(call, "tasks.assign", {"task_id": task_id, "to": "cleo"}, "Conflict", 409)


@scene("tasks.claim")
async def _claim(stage: Stage, call: Caller) -> None:
    ask = {"task_id": await open_task(stage), **ANN, "operation_id": "click"}
    assert (await fine(call, "tasks.claim", ask))["assignee"] == "ann"
    assert (await fine(call, "tasks.claim", ask))["assignee"] == "ann"
    await refused(call, "tasks.claim", {**ask, "actor": "bob", "operation_id": "other"}, "Conflict", 409)


@scene("tasks.release")
async def _release(stage: Stage, call: Caller) -> None:
    task_id = await open_task(stage)
    await fine(call, "tasks.claim", {"task_id": task_id, **ANN})
    assert (await fine(call, "tasks.release", {"task_id": task_id, "actor": "ann"}))["assignee"] is None
    await refused(call, "tasks.release", {"task_id": "nothing"}, "NotFound", 404)


@scene("tasks.reassign")
async def _reassign(stage: Stage, call: Caller) -> None:
    task_id = await open_task(stage)
    task = await fine(call, "tasks.reassign", {"task_id": task_id, "to": "cleo", "roles": ["boss"]})
    assert (task["assignee"], task["roles"]) == ("cleo", ["boss"])


@scene("activities.complete")
async def _complete_activity(stage: Stage, call: Caller) -> None:
    run_id = await stage.start("signing")
    ask = {"completion_token": await stage.completion_token(run_id), "result": "ann"}
    for _ in range(2):
        assert await fine(call, "activities.complete", ask, 202) == {"accepted": True}
    await refused(call, "activities.complete", {**ask, "result": "bob"}, "Conflict", 409)
    assert (await fine(call, "runs.result", {"run_id": run_id, "wait_s": 10}))["result"] == "ann"
    assert await fine(call, "activities.complete", ask, 202) == {"accepted": True}
    told = await refused(call, "activities.complete", {**ask, "result": "bob"}, "Conflict", 409)
    assert run_id not in str(told)
    token = ask["completion_token"]
    forged = f"{token[:-5]}{'B' if token[-5] == 'A' else 'A'}{token[-4:]}"
    await refused(call, "activities.complete", {**ask, "completion_token": forged}, "InvalidInput", 422)


@scene("activities.fail")
async def _fail_activity(stage: Stage, call: Caller) -> None:
    run_id = await stage.start("signing")
    token = await stage.completion_token(run_id)
    await fine(call, "activities.fail", {"completion_token": token, "message": "no pen"}, 202)
    second = await stage.completion_token(run_id, other_than=token)
    await refused(call, "activities.complete", {"completion_token": token, "result": "late"}, "Conflict", 409)
    await fine(call, "activities.fail", {"completion_token": second, "message": "no", "retryable": False}, 202)
    outcome = await fine(call, "runs.result", {"run_id": run_id, "wait_s": 10})
    assert "no" in outcome["error"]["message"]


@scene("tasks.complete")
async def _complete(stage: Stage, call: Caller) -> None:
    task_id = await open_task(stage)
    await refused(call, "tasks.complete", {"task_id": task_id, "answer": "perhaps", **ANN}, "InvalidInput", 422)
    task = await fine(call, "tasks.complete", {"task_id": task_id, "answer": True, **ANN})
    assert (task["status"], task["completed_by"]) == ("COMPLETED", "ann")
    problem = await refused(call, "tasks.complete", {"task_id": task_id, "answer": False, **ANN}, "Conflict", 409)
    assert problem["details"]["completed_by"] == "ann"
    outcome = await fine(call, "runs.result", {"run_id": task["run_id"], "wait_s": 10})
    assert outcome["result"] is True


@scene("tasks.comment")
async def _comment(stage: Stage, call: Caller) -> None:
    task_id = await open_task(stage)
    await fine(call, "tasks.comment", {"task_id": task_id, "text": "hm", "actor": "ann"})
    last = (await fine(call, "tasks.history", {"task_id": task_id}))["items"][-1]
    assert (last["event_type"], last["data"]["text"]) == ("TaskCommented", "hm")
    await refused(call, "tasks.comment", {"task_id": task_id, "text": ""}, "InvalidInput", 422)


# --- dead letters: on a stage whose clock the scene moves


def clock_of(stage: Stage) -> VirtualClock:
    """Return the clock of the stage's store."""
    store: Any = stage.app.runtime().store
    clock: VirtualClock = store.inner._clock
    return clock


@scene("letters.list")
async def _letters(stage: Stage, call: Caller) -> None:
    letter_id = await dead_letter(stage, clock_of(stage))
    [letter] = (await fine(call, "letters.list", {"reason": "retries exhausted"}))["items"]
    assert letter["letter_id"] == letter_id
    assert (await fine(call, "letters.list", {"reason": "undecodable"}))["items"] == []


@scene("letters.get")
async def _letter(stage: Stage, call: Caller) -> None:
    opened = await fine(call, "letters.get", {"letter_id": await dead_letter(stage, clock_of(stage))})
    assert opened["message"]["signal_id"] == "poison"
    assert opened["letter"]["settled"] is None
    await refused(call, "letters.get", {"letter_id": "nothing"}, "NotFound", 404)


@scene("letters.requeue")
async def _requeue(stage: Stage, call: Caller) -> None:
    letter_id = await dead_letter(stage, clock_of(stage))
    answer = await fine(call, "letters.requeue", {"letter_id": letter_id, "actor": "ann"})
    assert answer == {"letter_id": letter_id, "settled": "requeue"}
    opened = await fine(call, "letters.get", {"letter_id": letter_id})
    assert opened["letter"]["settled_by"] == "ann"
    await refused(call, "letters.drop", {"letter_id": letter_id}, "Conflict", 409)


@scene("letters.drop")
async def _drop(stage: Stage, call: Caller) -> None:
    letter_id = await dead_letter(stage, clock_of(stage))
    assert (await fine(call, "letters.drop", {"letter_id": letter_id}))["settled"] == "drop"
    assert (await fine(call, "letters.list", {}))["items"] == []
    await refused(call, "letters.drop", {"letter_id": "nothing"}, "NotFound", 404)


# --- workflows and the installation


@scene("workflows.list")
async def _workflows(stage: Stage, call: Caller) -> None:
    names = [workflow["name"] for workflow in (await fine(call, "workflows.list", {}))["items"]]
    assert names == ["asking", "echo", "failing", "far", "order", "patient", "paying", "signing"]


@scene("workflows.get")
async def _workflow(stage: Stage, call: Caller) -> None:
    await waiting_order(stage)
    workflow = await fine(call, "workflows.get", {"name": "order", "version": "1"})
    assert workflow["input"]["$defs"]["order_arguments"]["required"] == ["order_id"]
    assert workflow["result"] == {"type": "string"}
    assert workflow["signals"]["approval"]["$defs"]["Approval"]["required"] == ["approved"]
    assert workflow["updates"]["change_address"]["result"] == {"type": "integer"}
    assert workflow["queries"].keys() == {"progress"}
    assert workflow["allow_other_signals"] is False
    await refused(call, "workflows.get", {"name": "nothing"}, "NotFound", 404)


@scene("tokens.create")
async def _make_token(stage: Stage, call: Caller) -> None:
    ask = {"name": "ann", "role": "operator", "roles": ["clerk"], "tenant": "acme", "expires_in_s": 60}
    made = await fine(call, "tokens.create", ask, 201)
    item = made["item"]
    assert made["token"].startswith(item["prefix"] + "_")
    assert (item["name"], item["role"], item["roles"], item["tenant"]) == ("ann", "operator", ["clerk"], "acme")
    assert (item["is_valid"], item["revoked_at"], item["last_used_at"]) == (True, None, None)
    assert made["token"] != (await fine(call, "tokens.create", ask, 201))["token"]
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
        await refused(call, "tokens.create", {**ask, **bad}, "InvalidInput", 422)


@scene("tokens.list")
async def _tokens(stage: Stage, call: Caller) -> None:
    made = [await fine(call, "tokens.create", {"name": f"n{n}", "scopes": ["runs:read"]}, 201) for n in range(3)]
    page = await fine(call, "tokens.list", {"limit": 2})
    rest = await fine(call, "tokens.list", {"cursor": page["next"]})
    found = page["items"] + rest["items"]
    assert found == sorted([one["item"] for one in made], key=lambda item: str(item["token_id"]))
    assert (await fine(call, "tokens.list", {"tenant": "acme"}))["items"] == []
    secrets = [one["token"].rpartition("_")[2] for one in made]
    assert not any(secret in str(found) for secret in secrets)


@scene("tokens.revoke_leaked")
async def _revoke_leaked(stage: Stage, call: Caller) -> None:
    made = await fine(call, "tokens.create", {"name": "ann", "role": "viewer"}, 201)
    revoked = await fine(call, "tokens.revoke_leaked", {"token": f" {made['token']} "})
    assert (revoked["token_id"], revoked["is_valid"]) == (made["item"]["token_id"], False)
    wrong = made["token"][:-1] + ("0" if made["token"][-1] != "0" else "1")
    await refused(call, "tokens.revoke_leaked", {"token": wrong}, "InvalidInput", 422)
    await refused(call, "tokens.revoke", {"token_id": made["token"]}, "InvalidInput", 422)
    await refused(call, "tokens.revoke_leaked", {"token": write_token("0" * 16, "0" * 64)}, "NotFound", 404)


@scene("runs.delete")
async def _delete_run(stage: Stage, call: Caller) -> None:
    run_id = await finished(stage, "echo")
    assert (await fine(call, "runs.delete", {"run_id": run_id, "dry_run": True}))["runs"] == 1
    assert (await fine(call, "runs.delete", {"run_id": run_id}))["runs"] == 1
    await refused(call, "runs.delete", {"run_id": run_id}, "NotFound", 404)
    await refused(call, "runs.delete", {"run_id": await waiting_order(stage)}, "Conflict", 409)


@scene("tenants.delete")
async def _delete_tenant(stage: Stage, call: Caller) -> None:
    run_id = await finished(stage, "echo")
    assert (await fine(call, "tenants.delete", {"tenant": "acme", "yes": True}))["runs"] == 0
    assert (await fine(call, "tenants.delete", {"tenant": "default", "yes": True}))["runs"] == 1
    await refused(call, "tenants.delete", {"tenant": "default"}, "InvalidInput", 422)
    await refused(call, "runs.get", {"run_id": run_id}, "NotFound", 404)


@scene("audit.list")
async def _audit(stage: Stage, call: Caller) -> None:
    made = [await fine(call, "runs.start", {"workflow": "echo"}, 201) for _ in range(3)]
    page = await fine(call, "audit.list", {"operation": "runs.start", "limit": 2})
    rest = await fine(call, "audit.list", {"operation": "runs.start", "cursor": page["next"]})
    found = [item["run_id"] for item in page["items"] + rest["items"]]
    assert found == [run["run_id"] for run in reversed(made)]
    oldest = await fine(call, "audit.list", {"order": "oldest", "limit": 1})
    assert oldest["items"][0]["run_id"] == made[0]["run_id"]
    assert (await fine(call, "audit.list", {"actor": "nobody-of-this-name"}))["items"] == []
    await refused(call, "audit.list", {"cursor": page["next"], "order": "oldest"}, "InvalidInput", 422)


@scene("tokens.revoke")
async def _revoke(stage: Stage, call: Caller) -> None:
    made = (await fine(call, "tokens.create", {"name": "ann", "role": "viewer"}, 201))["item"]
    revoked = await fine(call, "tokens.revoke", {"token_id": made["token_id"]})
    assert (revoked["is_valid"], revoked["revoked_by"]) == (False, "anonymous")
    assert await fine(call, "tokens.revoke", {"token_id": made["prefix"]}) == revoked
    await refused(call, "tokens.revoke", {"token_id": "nothing"}, "NotFound", 404)


@scene("system.health")
async def _health(stage: Stage, call: Caller) -> None:
    health = await fine(call, "system.health", {})
    assert (health["status"], health["app"]) == ("ok", "shop")


@scene("system.stats")
async def _stats(stage: Stage, call: Caller) -> None:
    await waiting_order(stage)
    stats = await fine(call, "system.stats", {})
    assert (stats["runs"], stats["nodes"], stats["dead_letters"]) == ({"RUNNING": 1}, 1, 0)


@scene("system.queues")
async def _queues(stage: Stage, call: Caller) -> None:
    await stage.start("far")
    queues = await stage.until("system.queues", {}, lambda queues: queues["items"])
    assert queues["items"] == [{"name": "gpu", "jobs": 1}]
    assert await fine(call, "system.queues", {}) == queues


@scene("system.nodes")
async def _nodes(stage: Stage, call: Caller) -> None:
    [node] = (await fine(call, "system.nodes", {}))["items"]
    assert node["is_here"]
    assert node["name"].startswith("shop-")


@scene("system.alerts")
async def _alerts(stage: Stage, call: Caller) -> None:
    assert (await fine(call, "system.alerts", {}))["items"] == []
    await refused(call, "system.alerts", {"after": -1}, "InvalidInput", 422)
