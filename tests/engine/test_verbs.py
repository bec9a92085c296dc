"""Every verb of a run's handle, on a run in every status, has one defined and typed answer."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.events import Event
from holdfast.core.messages import AcceptedSignalResult, Control
from holdfast.core.state import APPROVED, CANCELLED, COMPLETED, FAILED, PAUSED, PENDING, RUNNING, RunStatus, state_of
from holdfast.engine.turns.draft import TurnDraft
from holdfast.errors import Conflict, InvalidInput, NotFound, RunCancelled, RunFailed, RunTerminal
from holdfast.run import RunHandle
from holdfast.testing.samples import SampleNode
from holdfast.workflow import Workflow
from tests.engine.harness import wait_for_event, wait_for_status

WAITS = "waits"
STATUSES: tuple[RunStatus, ...] = (PENDING, APPROVED, RUNNING, PAUSED, COMPLETED, FAILED, CANCELLED)
VERBS: dict[str, Callable[[RunHandle[Any]], Awaitable[Any]]] = {
    "signal": lambda run: run.signal("go", "x"),
    "cancel": lambda run: run.cancel(),
    "pause": lambda run: run.pause(),
    "resume": lambda run: run.resume(),
    "approve": lambda run: run.approve(),
    "retry_step": lambda run: run.retry_step("go"),
    "skip_step": lambda run: run.skip_step("nowhere"),
    "terminate": lambda run: run.terminate(),
    "retry_run": lambda run: run.retry_run(signal_id="again"),
    "fork": lambda run: run.fork(request_id="again"),
    "query": lambda run: run.query("colour"),
    "state": lambda run: run.state(),
    "update": lambda run: run.update("double", number=2),
    "update_with": lambda run: run.update_with("double", {"number": 2}),
    "result": lambda run: run.result(),
    "last_event": lambda run: run.last_event(),
    "snapshot": lambda run: run.snapshot(),
    "published": lambda run: run.published(),
    "status": lambda run: run.status(),
    "events": lambda run: run.events(),
    "mailbox": lambda run: run.mailbox(),
    "receipt": lambda run: run.receipt("go", "nobody sent it"),
    "stream": lambda run: whole_stream(run),
}
DONE = (RunTerminal,) * 3
ACCEPTED = (AcceptedSignalResult,) * 4
FINE = (None,) * 4
# In the order of STATUSES. A run that has not begun is looked at without a node that takes runs: it would begin it.
ANSWERS: dict[str, tuple[Any, ...]] = {
    "signal": (*ACCEPTED, *DONE),
    "cancel": (*FINE, *DONE),
    "pause": (*FINE, *DONE),
    "resume": (*FINE, *DONE),
    "approve": (*FINE, *DONE),
    "retry_step": (Conflict, Conflict, None, None, *DONE),  # before the run begins no step can have failed
    "skip_step": (*FINE, *DONE),
    "terminate": (*FINE, *DONE),
    "retry_run": (*(Conflict,) * 4, *(RunHandle,) * 3),
    "fork": (RunHandle,) * 7,  # a run of its own, from as late as can be
    "query": (WAITS, WAITS, "blue", "blue", "blue", "blue", "blue"),
    "state": (WAITS, WAITS, *(NotFound,) * 5),  # it is code, and no flow
    "update": (WAITS, WAITS, 4, WAITS, *DONE),
    "update_with": (WAITS, WAITS, 4, WAITS, *DONE),
    "result": (WAITS, WAITS, WAITS, WAITS, "x", RunFailed, RunCancelled),
    "last_event": (WAITS, WAITS, WAITS, WAITS, Event, Event, Event),
    "snapshot": (object,) * 7,
    "published": ({},) * 7,
    "status": tuple(STATUSES),
    "events": (list,) * 7,
    "mailbox": ([],) * 7,
    "receipt": (NotFound,) * 7,
    "stream": (WAITS, WAITS, WAITS, WAITS, ["begun"], ["begun"], ["begun"]),
}


async def whole_stream(run: RunHandle[Any]) -> list[Any]:
    return [chunk.value async for chunk in run.stream("progress")]


def talker() -> tuple[hf.App, Workflow[..., Any]]:
    app = hf.App("verbs")

    @app.workflow(failures=ValueError)
    async def order() -> str:
        hf.on_query("colour", lambda: "blue")
        hf.on_update("double", lambda number: 2 * number)
        await hf.stream("progress").write("begun")
        word = await hf.wait_signal("go", str)
        if word == "fail":
            raise ValueError("as asked for")
        return word

    return app, order


@asynccontextmanager
async def run_in(status: RunStatus) -> AsyncIterator[RunHandle[Any]]:
    """Give a run in this status."""
    store = hf.MemoryStore()
    if status is PENDING or status is APPROVED:
        node = SampleNode(store)
        await node.create("run-1", requires_approval=True)
        if status is APPROVED:
            loaded = await node.load("run-1")
            draft = TurnDraft(state_of("run-1", await store.read_events("run-1")), loaded, await store.now(), node.name)
            draft.handle(Control(id="0001", name="APPROVE", signal_id="click", actor="ann"))
            await node.commit(draft.finish())
        app = hf.App("verbs")
        async with app.connect(store):
            yield app.run("run-1")
        return
    app, order = talker()
    async with app.node(store):
        run = await app.start(order)
        await wait_for_event(run, "SignalWaiting")
        if status is PAUSED:
            await run.pause()
        elif status is CANCELLED:
            await run.cancel()
        elif status is not RUNNING:
            await run.signal("go", "x" if status is COMPLETED else "fail")
        await wait_for_status(run, status)
        yield run


async def answer(verb: str, run: RunHandle[Any]) -> Any:
    """Return what a verb gives, as a value, an exception, or that it waits."""
    try:
        async with asyncio.timeout(0.05):
            return await VERBS[verb](run)
    except TimeoutError:
        return WAITS
    except hf.errors.HoldfastError as problem:
        return problem


@pytest.mark.contract("WF-7", "SIG-3", "API-2")
@pytest.mark.parametrize("status", STATUSES, ids=str)
@pytest.mark.parametrize("verb", VERBS)
async def test_every_verb_has_one_answer_in_every_status(verb: str, status: RunStatus) -> None:
    expected = ANSWERS[verb][STATUSES.index(status)]
    async with asyncio.timeout(60), run_in(status) as run:
        found = await answer(verb, run)
        if isinstance(expected, type):
            assert isinstance(found, expected), found
        else:
            assert found == expected, found
        if isinstance(found, Exception):
            assert found.code == type(found).__name__  # type: ignore[attr-defined]


@pytest.mark.contract("WF-7", "SIG-3", "API-2")
@pytest.mark.parametrize("verb", VERBS)
async def test_no_verb_is_lost_on_a_run_that_does_not_exist(verb: str) -> None:
    app, _ = talker()
    async with asyncio.timeout(60), app.node("memory://"):
        found = await answer(verb, app.run("nowhere"))
        assert isinstance(found, NotFound), found


@pytest.mark.contract("WF-7")
@pytest.mark.parametrize("status", [COMPLETED, FAILED, CANCELLED], ids=str)
async def test_a_finished_run_never_runs_again(status: RunStatus) -> None:
    async with asyncio.timeout(60), run_in(status) as run:
        before = await run.events()
        for verb in VERBS:
            await answer(verb, run)
        assert await run.events() == before


def test_the_matrix_has_no_gap() -> None:
    assert set(STATUSES) == set(RunStatus)
    assert set(ANSWERS) == set(VERBS)
    assert all(len(row) == len(STATUSES) for row in ANSWERS.values())
    public = {name for name in dir(RunHandle) if not name.startswith("_") and callable(getattr(RunHandle, name))}
    assert public == set(VERBS)


async def test_a_run_without_an_id_or_a_node_is_refused_with_what_is_missing() -> None:
    app = hf.App("shop")
    with pytest.raises(InvalidInput, match=r"no node is open: use `app.run\('o-1'\)` inside `async with app.node"):
        app.run("o-1")
    async with app.node("memory://"):
        with pytest.raises(InvalidInput, match="named by its id"):
            app.run(None)
