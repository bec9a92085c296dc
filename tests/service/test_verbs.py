"""Every verb on every status has the same typed answer, whether the run is of code, a flow or a plan, and however it is
asked for: each cell of the matrix takes the next transport, and all are compared with one table."""

import json
from collections.abc import Awaitable, Callable
from itertools import cycle
from typing import Any

import pytest
from msgspec import Struct

import holdfast as hf
from holdfast.app import App
from holdfast.service.options import ServiceOptions
from tests.service.callers import CALLERS, caller_by_name
from tests.service.in_process import InProcessServer, serve_in_process

TRANSPORTS = [name for name in CALLERS if name != "command line"]  # which has a process's stdout to itself
VERBS: dict[str, dict[str, Any]] = {
    "runs.cancel": {"wait": True},
    "runs.pause": {"wait": True},
    "runs.resume": {"wait": True},
    "runs.approve": {"wait": True},
    "runs.terminate": {"wait": True},
    "runs.retry_step": {"wait": True, "step_id": "go"},
    "runs.skip_step": {"wait": True, "step_id": "go"},
    "runs.retry": {"signal_id": "again"},
    "runs.fork": {"request_id": "again"},
    "runs.delete": {},
    "signals.send": {"name": "word", "payload": 1},
}
C, T = "Conflict", "RunTerminal"
OPEN = (202, 202, 202, C, 202, C, 202, C, 201, C, 202)
DONE = (T, T, T, T, T, T, T, 201, 201, 200, T)
ANSWERS: dict[str, tuple[int | str, ...]] = {
    "PENDING": (202, C, C, C, 202, C, C, C, 201, C, 202),
    "RUNNING": OPEN,
    "PAUSED": OPEN,
    "retrying": (202, 202, 202, C, 202, 202, 202, C, 201, C, 202),
    "COMPLETED": DONE,
    "FAILED": DONE,
    "CANCELLED": DONE,
}
HOUR = {"after_s": 3_600}


class Order(Struct, frozen=True):
    """The state of the flow."""

    number: int = 0


def one_step_each(app: App) -> None:
    """Register workflows with one step, `go`: a wait, and activities that succeed, fail, and are tried again."""

    @app.activity
    async def fine(order: Order | None = None) -> Order | None:
        return order

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def broken(order: Order | None = None) -> Order | None:
        raise ValueError("by design")

    @app.activity(retry=hf.Retry(max_attempts=9, initial_ms=3_600_000))
    async def flaky(order: Order | None = None) -> Order | None:
        raise ValueError("for now")

    @app.workflow
    async def code(what: str) -> None:
        if what == "wait":
            await hf.wait_signal("go")
        else:
            await {"fine": fine, "broken": broken, "flaky": flaky}[what].options(name="go")()

    app.flow("flow_wait", Order, hf.Signal("go", step="go"), allow_other_signals=True)
    for activity in (fine, broken, flaky):
        app.flow(f"flow_{activity.definition.name}", Order, hf.Act(activity, step="go"))


def plan_of(what: str) -> str:
    """Return a plan with one step."""
    step = {"signal": "go"} if what == "wait" else {"activity": what}
    return json.dumps({"plan": what, "version": "1", "steps": [{"id": "go", **step}]})


async def started(server: InProcessServer, kind: str, what: str, **more: Any) -> str:
    """Start a run of this kind whose one step is this, and return its id."""
    if kind == "plan":
        status, run = await server.rest("plans.start", {"plan_id": what, "document": plan_of(what), **more})
    elif kind == "flow":
        status, run = await server.rest("runs.start", {"workflow": f"flow_{what}", "input": {"state": {}}, **more})
    else:
        status, run = await server.rest("runs.start", {"workflow": "code", "input": {"what": what}, **more})
    assert status == 201, run
    return str(run["run_id"])


async def run_in(server: InProcessServer, kind: str, status: str) -> str:
    """Return a run of this kind in this status."""
    what = {"COMPLETED": "fine", "FAILED": "broken", "retrying": "flaky"}.get(status, "wait")
    run_id = await started(server, kind, what, **(HOUR if status == "PENDING" else {}))
    about = {"run_id": run_id}
    if status in ("RUNNING", "PAUSED", "CANCELLED"):
        await server.until("runs.snapshot", about, lambda snapshot: snapshot["steps"])
    if status in ("PAUSED", "CANCELLED"):
        verb = "runs.pause" if status == "PAUSED" else "runs.terminate"
        assert (await server.rest(verb, {**about, "wait": True}))[0] == 202
    is_there: Callable[[Any], bool] = lambda run: run["status"] == status  # noqa: E731
    await server.until("runs.get", about, (lambda run: run["retrying"]) if status == "retrying" else is_there)
    return run_id


@pytest.mark.contract("WF-7", "API-1", "API-2", "SIG-13")
@pytest.mark.parametrize("kind", ["code", "flow", "plan"])
async def test_every_verb_has_one_answer_in_every_status_for_every_kind(kind: str) -> None:
    app, options = App("verbs"), ServiceOptions(reads_per_minute=1_000_000, refusals_per_minute=1_000_000)
    one_step_each(app)
    async with serve_in_process(app=app, options=options) as server:
        calls: list[tuple[str, Callable[[str, dict[str, Any]], Awaitable[Any]]]] = [
            (name, caller_by_name(server, name)) for name in TRANSPORTS
        ]
        each_call = cycle(calls)
        for status, expected in ANSWERS.items():
            for (verb, ask), wanted in zip(VERBS.items(), expected, strict=True):
                transport, call = next(each_call)
                found, answer = await call(verb, {"run_id": await run_in(server, kind, status), **ask})
                given = answer["code"] if found >= 400 else found
                assert given == wanted, (kind, status, verb, transport, answer)
