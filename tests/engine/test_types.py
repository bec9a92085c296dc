"""Whatever is given to the API in process is checked as the wire is: a typed error and nothing stored, or readable."""

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from math import inf, nan
from typing import Any, get_type_hints

import pytest

import holdfast as hf
from holdfast.core.messages import Actor
from holdfast.engine.options import NodeOptions
from holdfast.errors import InvalidInput
from holdfast.limits import DeadLetterPolicy
from holdfast.program.tasks import Escalation
from holdfast.run import RunHandle
from holdfast.service.auth.tokens import make_token
from holdfast.service.options import ServiceOptions
from holdfast.store.memory import MemoryStore
from holdfast.store.port import RunQuery
from holdfast.store.queries import TokenQuery
from tests.engine.harness import EngineVariant, wait_for_event

TEXTS: list[Any] = [None, 5, 0, False, b"x", ["x"], {"x": 1}, "\ud800", object()]
IDS: list[Any] = [*TEXTS, "", "x" * 300]
DURATIONS: list[Any] = [True, nan, inf, -1, 0, "5", [1], timedelta(0), timedelta(days=-1), 10**30]
PATIENCE: list[Any] = [True, nan, inf, -1, "5", [1], timedelta(days=-1), 10**30]  # none is to look into the mailbox
NAIVE = datetime(2030, 1, 1)  # noqa: DTZ001 - without a time zone on purpose
COUNTS: list[Any] = [True, 1.5, "1", -1, nan, 10**30, [1]]
LISTS: list[Any] = ["x", 5, [5], [None], [""], {"x": 1}, ["\ud800"]]

INSIDE: dict[str, tuple[list[Any], Callable[[Any], Any]]] = {
    "task route": (TEXTS, lambda bad: hf.task("ask", bool, route=bad)),
    "task type": (TEXTS, lambda bad: hf.task("ask", bool, task_type=bad)),
    "task roles": ([*LISTS, None], lambda bad: hf.task("ask", bool, roles=bad)),
    "task assignee": (IDS[1:], lambda bad: hf.task("ask", bool, assignee=bad)),
    "task due": (DURATIONS, lambda bad: hf.task("ask", bool, due=bad)),
    "task remind": (DURATIONS, lambda bad: hf.task("ask", bool, remind=bad)),
    "task escalate": ([5, "x", {"after": 1}], lambda bad: hf.task("ask", bool, escalate=bad)),
    "escalate after": (
        [*DURATIONS, None],
        lambda bad: hf.task("ask", bool, escalate=Escalation(after=bad, roles=["a"])),
    ),
    "escalate roles": (
        LISTS,
        lambda bad: hf.task("ask", bool, escalate=Escalation(after=timedelta(1), roles=bad, assignee="ann")),
    ),
    "escalate assignee": (
        IDS[1:],
        lambda bad: hf.task("ask", bool, escalate=Escalation(after=timedelta(1), roles=["a"], assignee=bad)),
    ),
    "task approvals": (COUNTS, lambda bad: hf.task("ask", bool, approvals=bad)),
    "task of": (COUNTS, lambda bad: hf.task("ask", bool, of=bad)),
    "wait timeout": (PATIENCE, lambda bad: hf.wait_signal("go", timeout=bad)),
    "signals timeout": (PATIENCE, lambda bad: hf.signals("go", timeout=bad)),
    "sleep": ([True, nan, inf, "5", [1], None, 10**30], lambda bad: hf.sleep(bad)),
    "wait_for_history timeout": (DURATIONS, lambda bad: hf.wait_until(lambda: False, timeout=bad)),
}


async def taken(word: Callable[[Any], Any], bad: list[Any]) -> list[str]:
    """Return which values are not refused with `InvalidInput`, and how."""
    found = []
    for value in bad:
        try:
            answer = word(value)
            if hasattr(answer, "__await__"):
                await asyncio.wait_for(answer, 0.01) if asyncio.get_running_loop().time() < 0 else await answer
        except InvalidInput:
            continue
        except Exception as problem:
            found.append(f"{value!r}: {problem!r}")
        else:
            found.append(f"{value!r} was taken")
    return found


@pytest.mark.contract("API-2", "WF-7")
@pytest.mark.parametrize("parameter", INSIDE)
async def test_what_a_workflow_asks_for_is_checked_before_it_is_stored(parameter: str) -> None:
    app = hf.App("types")
    bad, word = INSIDE[parameter]

    @app.workflow
    async def asks() -> list[str]:
        return await taken(word, bad)

    async with asyncio.timeout(60), app.node("memory://"):
        run = await app.start(asks)
        assert await run.result() == []
        assert [event.event_type for event in await run.events()] == ["RunQueued", "RunStarted", "RunCompleted"]


def activity(app: hf.App, **options: Any) -> Any:
    """Register an activity with these options."""

    async def act() -> None: ...

    return app.activity(name="act", **options)(act)


def workflow(app: hf.App, **options: Any) -> Any:
    """Register a workflow with these options."""

    async def flow() -> None: ...

    return app.workflow(name="flow", **options)(flow)


REGISTERING: dict[str, tuple[list[Any], Callable[[hf.App, Any], Any]]] = {
    "queue": (TEXTS, lambda app, bad: activity(app, queue=bad)),
    "retry": ([None, 5, "x", {"max_attempts": 1}], lambda app, bad: activity(app, retry=bad)),
    "timeout": (DURATIONS, lambda app, bad: activity(app, timeout=bad)),
    "schedule_to_close": (DURATIONS, lambda app, bad: activity(app, schedule_to_close=bad)),
    "heartbeat_timeout": (DURATIONS, lambda app, bad: activity(app, heartbeat_timeout=bad)),
    "on_failure": ([None, "", "stop", 5, ["raise"]], lambda app, bad: activity(app, on_failure=bad)),
    "max_attempts": (COUNTS, lambda app, bad: activity(app, retry=hf.Retry(max_attempts=bad))),
    "initial_ms": (COUNTS, lambda app, bad: activity(app, retry=hf.Retry(initial_ms=bad))),
    "most_ms": (COUNTS, lambda app, bad: activity(app, retry=hf.Retry(most_ms=bad))),
    "factor": ([nan, inf, 0, "2", None], lambda app, bad: activity(app, retry=hf.Retry(factor=bad))),
    "jitter": ([nan, inf, -1, 2, "2", None], lambda app, bad: activity(app, retry=hf.Retry(jitter=bad))),
    "version": ([*IDS, "a|b"], lambda app, bad: workflow(app, version=bad)),
    "close_policy": ([None, "", "kill", 5, ["await"]], lambda app, bad: workflow(app).options(close_policy=bad)),
    "at_once": (COUNTS, lambda app, bad: workflow(app, at_once=bad)),
    "overload": ([None, "", "drop", 5], lambda app, bad: workflow(app, at_once=1, overload=bad)),
    "rate": ([5, (1,), (nan, 1), (1, nan), (True, 1), ("1", 1), (1, -1)], lambda app, bad: workflow(app, rate=bad)),
}


@pytest.mark.contract("API-2")
@pytest.mark.parametrize("parameter", REGISTERING)
async def test_what_is_registered_is_checked(parameter: str) -> None:
    bad, word = REGISTERING[parameter]
    assert await taken(lambda value: word(hf.App("types"), value), bad) == []


def started(app: hf.App, **given: Any) -> Any:
    """Start a run with these options."""
    [definition] = [each for each in app.registry.workflows.values() if each.name == "waits"]
    return app.start(hf_workflow(definition), **given)


def hf_workflow(definition: Any) -> Any:
    """Return the workflow of a definition."""
    from holdfast.workflow import Workflow

    return Workflow(definition)


KINDS: dict[Any, list[Any]] = {
    int: [*COUNTS[:5], None, [1]],
    float: [True, "1", nan, -1.0, [1], object()],
    bool: [None, 1, "x", [1]],
    str: [None, 5, b"x", ["x"], "\ud800"],
}
OPTIONS = [
    (kind, field)
    for kind in (NodeOptions, hf.Limits, DeadLetterPolicy, hf.Retry, ServiceOptions)
    for field in kind.__struct_fields__
]


@pytest.mark.contract("API-2")
@pytest.mark.parametrize(("kind", "field"), OPTIONS, ids=[f"{kind.__name__}.{field}" for kind, field in OPTIONS])
async def test_every_option_is_checked_by_its_type(kind: Any, field: str) -> None:
    hint = get_type_hints(kind)[field]
    bad = KINDS.get(hint, [object(), "\ud800", 5 if "float" not in str(hint) else True, [5]])
    assert await taken(lambda value: kind(**{field: value}), bad) == []


TOKEN: dict[str, list[Any]] = {
    "name": [*TEXTS, ""],
    "role": TEXTS,
    "scopes": [*LISTS, None],
    "roles": [*LISTS, None],
    "tenant": IDS[1:],
    "project": IDS[1:],
    "environment": IDS[1:],
    "expires_in_s": [*DURATIONS[:7], None],
    "longest_s": [True, nan, "5", [1], None, 0],
    "created_by": TEXTS,
    "session_of": TEXTS[1:],
    "is_granted": [None, 1, "x"],
}


@pytest.mark.contract("API-2")
@pytest.mark.parametrize("field", TOKEN)
async def test_what_a_token_is_made_with_is_checked_before_it_is_kept(field: str) -> None:
    store = MemoryStore()
    await store.migrate()
    good = {"name": "ci", "role": "viewer", "tenant": "ours"}
    assert await taken(lambda value: make_token(store, **{**good, field: value}), TOKEN[field]) == []
    assert await store.find_tokens(TokenQuery(sessions=True)) == []


Sent = Callable[[hf.App, RunHandle[Any], str, Any], Any]
ANN = Actor("ann", ("clerk",))
SENDING: dict[str, tuple[list[Any], Sent]] = {
    "start request_id": ([5, 0, False, b"x", ["x"], "\ud800", "x" * 300], lambda a, r, t, x: started(a, request_id=x)),
    "start run_id": (IDS[1:], lambda a, r, t, x: started(a, run_id=x)),
    "start reference_key": (IDS[1:], lambda a, r, t, x: started(a, reference_key=x)),
    "start tags": ([*LISTS, None, ("",), (5,)], lambda a, r, t, x: started(a, tags=x)),
    "start tenant": (IDS, lambda a, r, t, x: started(a, tenant=x)),
    "start project": (IDS, lambda a, r, t, x: started(a, project=x)),
    "start environment": (IDS, lambda a, r, t, x: started(a, environment=x)),
    "start priority": ([True, 1.5, "1", nan, None, 101, -101], lambda a, r, t, x: started(a, priority=x)),
    "start with_signal": ([5, {}, {"name": 5}, {"name": "go", "x": 1}], lambda a, r, t, x: started(a, with_signal=x)),
    "start reuse": (["", "x", 5, ["return"]], lambda a, r, t, x: started(a, run_id="taken", reuse=x)),
    "start debounce": ([5, "k", {}, ("k", 1, 2)], lambda a, r, t, x: started(a, debounce=x)),
    "debounce key": ([*IDS, "a/b"], lambda a, r, t, x: started(a, debounce=hf.Debounce(x, 1, 2))),
    "debounce quiet": ([*DURATIONS, None, 3], lambda a, r, t, x: started(a, debounce=hf.Debounce("k", x, 2))),
    "debounce at_most": ([*DURATIONS, None, 0.5], lambda a, r, t, x: started(a, debounce=hf.Debounce("k", 1, x))),
    "start attributes": ([5, "x", ["x"], {"x": 1}, {5: 1}], lambda a, r, t, x: started(a, attributes=x)),
    "start context": ([5, "x", ["x"], {"x": 1}, {5: "x"}, {"": "x"}], lambda a, r, t, x: started(a, context=x)),
    "start reference_parts": ([5, "x", ["x"], {"x": 1}, {"": "x"}], lambda a, r, t, x: started(a, reference_parts=x)),
    "start workflow_version": (IDS[1:], lambda a, r, t, x: started(a, workflow_version=x)),
    "start at": ([5, "x", NAIVE, [1]], lambda a, r, t, x: started(a, at=x)),
    "start after": (DURATIONS, lambda a, r, t, x: started(a, after=x)),
    "start run_timeout": (DURATIONS, lambda a, r, t, x: started(a, run_timeout=x)),
    "start execution_timeout": (DURATIONS, lambda a, r, t, x: started(a, execution_timeout=x)),
    "start cleanup_timeout": (DURATIONS, lambda a, r, t, x: started(a, run_timeout=5, cleanup_timeout=x)),
    "start arguments": ([5, "x", ["x"], {5: 1}, {"x": 1}], lambda a, r, t, x: started(a, arguments=x)),
    "fork at": ([True, "1", 1.0, 0, -1, 99, [1]], lambda a, r, t, x: r.fork(at=x)),
    "fork input": ([5, "x", ["x"], {"x": 1}], lambda a, r, t, x: r.fork(at=1, input=x)),
    "fork request_id": ([5, b"x", ["x"], "\ud800"], lambda a, r, t, x: r.fork(at=1, request_id=x)),
    "fork reason": (TEXTS, lambda a, r, t, x: r.fork(at=1, reason=x)),
    "retry from_start": ([None, 0, "yes"], lambda a, r, t, x: r.retry_run(from_start=x)),
    "query name": ([None, 5, "", "\ud800", ["x"]], lambda a, r, t, x: r.query(x)),
    "update name": ([None, 5, "", "\ud800", ["x"]], lambda a, r, t, x: r.update(x)),
    "signal name": ([None, 5, "", "\ud800", ["x"]], lambda a, r, t, x: r.signal(x)),
    "receipt sent": ([None, 5, ["x"], {}], lambda a, r, t, x: r.receipt(x)),
    "retry_step step_id": (IDS, lambda a, r, t, x: r.retry_step(x)),
    "approve step_id": (IDS[1:], lambda a, r, t, x: r.approve(step_id=x)),
    "signal_many": ([None, 5, "x", b"x"], lambda a, r, t, x: a.signal_many(x)),
    "first signal_id": (IDS[1:], lambda a, r, t, x: started(a, with_signal={"name": "go", "signal_id": x})),
    "first actor": (TEXTS, lambda a, r, t, x: started(a, with_signal={"name": "go", "actor": x})),
    "signal payload": ([nan, object(), {1: 2}], lambda a, r, t, x: r.signal("go", x)),
    "signal signal_id": (IDS[1:], lambda a, r, t, x: r.signal("go", signal_id=x)),
    "signal step_id": (IDS[1:], lambda a, r, t, x: r.signal("go", step_id=x)),
    "signal require_waiting": ([None, 0, "yes", [1]], lambda a, r, t, x: r.signal("go", require_waiting=x)),
    "signal actor": (TEXTS, lambda a, r, t, x: r.signal("go", actor=x)),
    "update update_id": (IDS[1:], lambda a, r, t, x: r.update("say", update_id=x)),
    "update argument": ([nan, object(), {1: 2}], lambda a, r, t, x: r.update("say", word=x)),
    "pause reason": (TEXTS, lambda a, r, t, x: r.pause(x)),
    "cancel actor": (TEXTS, lambda a, r, t, x: r.cancel(actor=x)),
    "resume signal_id": (IDS[1:], lambda a, r, t, x: r.resume(signal_id=x)),
    "resume raise_failure": ([None, 0, "yes"], lambda a, r, t, x: r.resume(raise_failure=x)),
    "skip step_id": (IDS, lambda a, r, t, x: r.skip_step(x)),
    "skip result": ([nan, object(), {1: 2}], lambda a, r, t, x: r.skip_step("ask", result=x)),
    "assign to": (IDS, lambda a, r, t, x: a.tasks.assign(t, x, actor=ANN)),
    "reassign to": (IDS[1:], lambda a, r, t, x: a.tasks.reassign(t, x, actor=ANN)),
    "reassign roles": (LISTS, lambda a, r, t, x: a.tasks.reassign(t, roles=x, actor=ANN)),
    "task actor": ([None, 5, "ann", {"name": "ann"}], lambda a, r, t, x: a.tasks.claim(t, actor=x)),
    "actor name": (IDS, lambda a, r, t, x: a.tasks.claim(t, actor=Actor(x))),
    "actor roles": ([*LISTS, None], lambda a, r, t, x: a.tasks.claim(t, actor=Actor("ann", x))),
    "actor is_admin": ([None, 1, "yes"], lambda a, r, t, x: a.tasks.claim(t, actor=Actor("ann", (), x))),
    "operation_id": (IDS[1:], lambda a, r, t, x: a.tasks.claim(t, actor=ANN, operation_id=x)),
    "comment": ([*TEXTS, "", "x" * 5_000], lambda a, r, t, x: a.tasks.comment(t, x, actor=ANN)),
    "answer": ([nan, object(), {1: 2}], lambda a, r, t, x: a.tasks.complete(t, x, actor=ANN)),
}


@pytest.mark.contract("API-2", "SIG-5")
@pytest.mark.parametrize("parameter", SENDING)
async def test_what_is_sent_to_a_run_is_checked_before_it_is_stored(parameter: str, tmp_path: Any) -> None:
    app = hf.App("types")

    @app.workflow
    async def waits() -> None:
        hf.on_update("say", lambda word="": word)
        await hf.task("ask", bool)

    bad, word = SENDING[parameter]
    address = f"sqlite:///{tmp_path}/types.db"
    async with asyncio.timeout(60), app.node(address) as node:
        run: RunHandle[Any] = await app.start(waits)
        await wait_for_event(run, "TaskCreated")
        [task] = await app.tasks.list()
        before = await node.store.stats()
        assert await taken(lambda value: word(app, run, task.task_id, value), bad) == []
        assert (await node.store.stats()) == before
        assert len(await node.store.find(RunQuery())) == 1
    async with asyncio.timeout(60), app.node(address):
        assert [each.task_id for each in await app.tasks.list()] == [task.task_id]


@pytest.mark.contract("QUE-1")
async def test_no_request_id_is_none_given(variant: EngineVariant) -> None:
    app = hf.App("types")

    @app.workflow
    async def nothing() -> str:
        return "done"

    async with variant.node(app):
        runs = [await app.start(nothing, request_id=None) for _ in range(2)]
        assert [await run.result() for run in runs] == ["done", "done"]
        assert runs[0].run_id != runs[1].run_id
        assert [len(await run.events()) for run in runs] == [3, 3]
