"""Updates and signals at the end of a stretch: what is answered is kept; what comes too late waits or is refused."""

import asyncio
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.state import CANCELLED, COMPLETED
from holdfast.errors import RunCancelled, RunTerminal, UpdateFailed
from tests.engine.harness import EngineVariant, event_types, wait_for_event, wait_for_history, wait_for_status


class Gate:
    """Activities that wait until a test opens them."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.began = asyncio.Event()
        self.passed: list[int] = []

    async def __call__(self, number: int) -> int:
        self.passed.append(number)
        self.began.set()
        await self.opened.wait()
        return number


def counting(gate: Gate) -> tuple[hf.App, Any]:
    """Return an app whose workflow adds up what updates bring, and begins again or returns when it is told to."""
    app = hf.App("counting")

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def pass_gate(number: int) -> int:
        return await gate(number)

    @app.workflow
    async def count(total: int = 0, stretch: int = 0) -> list[int]:
        async def add(by: int) -> int:
            nonlocal total
            total += await pass_gate(by)
            return total

        hf.on_update("add", add)
        hf.on_query("total", lambda: total)
        if await hf.wait_signal("end", str) == "rotate":
            hf.continue_as_new(total, stretch + 1)
        return [total, stretch]

    return app, count


@pytest.mark.contract("WF-6", "CAN-1")
async def test_the_effect_of_an_update_that_is_being_answered_at_a_rotation_is_carried(variant: EngineVariant) -> None:
    gate = Gate()
    app, count = counting(gate)
    async with variant.node(app):
        run = await app.start(count)
        asking = asyncio.create_task(run.update("add", by=5))
        await gate.began.wait()
        await run.signal("end", "rotate")
        await wait_for_event(run, "SignalReceived")
        gate.opened.set()
        assert await asking == 5
        await wait_for_event(run, "ContinuedAsNew")
        assert await run.query("total") == 5
        await run.signal("end", "return")
        assert await run.result() == [5, 1]
        names = await event_types(run)
        assert names.index("UpdateCompleted") < names.index("ContinuedAsNew")
    assert gate.passed == [5]


@pytest.mark.contract("WF-6")
async def test_the_effect_of_an_update_that_is_being_answered_at_the_return_is_in_the_result(
    variant: EngineVariant,
) -> None:
    gate = Gate()
    app, count = counting(gate)
    async with variant.node(app):
        run = await app.start(count)
        asking = asyncio.create_task(run.update("add", by=5))
        await gate.began.wait()
        await run.signal("end", "return")
        await wait_for_event(run, "SignalReceived")
        gate.opened.set()
        assert await asking == 5
        assert await run.result() == [5, 0]
    assert gate.passed == [5]


@pytest.mark.contract("WF-6", "CAN-1")
async def test_an_update_that_arrives_while_a_rotation_waits_is_answered_by_the_next_stretch(
    variant: EngineVariant,
) -> None:
    gate = Gate()
    app, count = counting(gate)
    async with variant.node(app):
        run = await app.start(count)
        first = asyncio.create_task(run.update("add", by=5))
        await gate.began.wait()
        await run.signal("end", "rotate")
        await wait_for_event(run, "SignalReceived")
        second = asyncio.create_task(run.update("add", by=1))
        await run.signal("other")
        await wait_for_history(run, lambda events: len(events) >= 6)
        assert (await event_types(run)).count("UpdateAccepted") == 1
        gate.opened.set()
        assert [await first, await second] == [5, 6]
        await run.signal("end", "return")
        assert await run.result() == [6, 1]
        names = await event_types(run)
        assert names.index("ContinuedAsNew") < len(names) - 1 - names[::-1].index("UpdateAccepted")


@pytest.mark.contract("WF-4", "WF-6")
@pytest.mark.parametrize("end", ["rotate", "return"])
async def test_a_run_that_waits_for_an_update_can_be_cancelled(variant: EngineVariant, end: str) -> None:
    gate = Gate()
    app, count = counting(gate)
    async with variant.node(app):
        run = await app.start(count)
        asking = asyncio.create_task(run.update("add", by=5))
        await gate.began.wait()
        await run.signal("end", end)
        await wait_for_event(run, "SignalReceived")
        await run.cancel()
        with pytest.raises(RunCancelled):
            await run.result()
        with pytest.raises(RunTerminal):
            await asking
        assert await run.status() is CANCELLED
        gate.opened.set()


@pytest.mark.contract("WF-6", "CAN-1")
async def test_an_update_that_only_the_ending_function_can_answer_begins_again_after_the_rotation(
    variant: EngineVariant,
) -> None:
    """What it waits for comes true in the same breath in which the arguments are taken."""
    app = hf.App("deadlock")

    @app.workflow
    async def flow(total: int = 0, stretch: int = 0) -> list[int]:
        is_ready = False

        async def add(by: int) -> int:
            nonlocal total
            await hf.wait_until(lambda: is_ready)
            total += by
            return total

        hf.on_update("add", add)
        if await hf.wait_signal("end", str) == "rotate":
            is_ready = True
            hf.continue_as_new(total, stretch + 1)
        is_ready = True
        await hf.wait_signal("end", str)
        return [total, stretch]

    async with variant.node(app):
        run = await app.start(flow)
        asking = asyncio.create_task(run.update("add", by=5))
        await wait_for_event(run, "UpdateAccepted")
        await run.signal("end", "rotate")
        await wait_for_event(run, "ContinuedAsNew")
        assert not asking.done()
        await run.signal("end", "return")
        assert await asking == 5
        await run.signal("end", "return")
        assert await run.result() == [5, 1]
        assert (await event_types(run)).count("UpdateAccepted") == 1


def family(policy: str = "await") -> tuple[hf.App, Any]:
    """Return an app whose workflow ends while a child, an update and a reader of signals are under way."""
    app = hf.App("family")

    @app.workflow
    async def child() -> None:
        await hf.wait_signal("go", str)

    @app.workflow
    async def parent(end: str, seen: list[str], total: int = 0) -> list[Any]:
        def add(by: int) -> int:
            nonlocal total
            total += by
            return total

        async def read() -> None:
            async for note in hf.signals("note", str):
                seen.append(note)  # noqa: PERF401 - one by one, as they come

        hf.on_update("add", add)
        reading = asyncio.create_task(read())
        if end == "":
            await hf.wait_signal("end", str)
            reading.cancel()
            return [seen, total]
        asyncio.create_task(child())  # noqa: RUF006
        await hf.wait_signal("end", str)
        if end == "rotate":
            hf.continue_as_new("", seen, total)
        return [seen, total]

    return app, parent


@pytest.mark.contract("WF-6", "SIG-3", "CAN-1")
async def test_what_arrives_while_a_rotation_waits_for_children_is_for_the_next_stretch(variant: EngineVariant) -> None:
    app, parent = family()
    async with variant.node(app):
        run = await app.start(parent, "rotate", [], run_id="p")
        await run.signal("note", "early")
        await wait_for_event(run, "SignalReceived")
        await run.signal("end", "")
        await wait_for_event(run, "SignalReceived", times=2)
        await run.signal("note", "late")
        asking = asyncio.create_task(run.update("add", by=5))
        await wait_for_event(app.run("p/child"), "SignalWaiting")
        assert not asking.done()
        await app.run("p/child").signal("go", "")
        assert await asking == 5
        await wait_for_event(run, "SignalReceived", times=3)
        await run.signal("end", "")
        assert await run.result() == [["early", "late"], 5]
        names = await event_types(run)
        assert names.index("ContinuedAsNew") < names.index("UpdateAccepted")


@pytest.mark.contract("WF-6", "WF-7", "SIG-3")
async def test_what_arrives_while_a_return_waits_for_children_is_told_that_the_run_has_ended(
    variant: EngineVariant,
) -> None:
    app, parent = family()
    async with variant.node(app):
        run = await app.start(parent, "return", [], run_id="p")
        await run.signal("end", "")
        await wait_for_event(run, "SignalReceived")
        await run.signal("note", "late")
        asking = asyncio.create_task(run.update("add", by=5))
        await wait_for_event(app.run("p/child"), "SignalWaiting")
        await app.run("p/child").signal("go", "")
        with pytest.raises(RunTerminal):
            await asking
        assert await run.result() == [[], 0]
        assert [each.name for each in await run.mailbox() if each.name == "note"] == ["note"]
        assert "UpdateAccepted" not in await event_types(run)


@pytest.mark.contract("WF-4", "WF-6")
@pytest.mark.parametrize(("end", "status"), [("rotate", CANCELLED), ("return", COMPLETED)])
async def test_a_run_that_waits_for_its_children_can_be_cancelled(
    variant: EngineVariant, end: str, status: Any
) -> None:
    """One that has returned keeps its result; what it waits for is cancelled."""
    app, parent = family()
    async with variant.node(app):
        run = await app.start(parent, end, [], run_id="p")
        await run.signal("end", "")
        await wait_for_event(run, "SignalReceived")
        asking = asyncio.create_task(run.update("add", by=5))
        await wait_for_event(app.run("p/child"), "SignalWaiting")
        await run.cancel()
        await wait_for_status(app.run("p/child"), CANCELLED)
        await wait_for_status(run, status)
        with pytest.raises(RunTerminal):
            await asking


@pytest.mark.contract("WF-6")
async def test_the_handler_of_an_update_cannot_begin_the_workflow_again(variant: EngineVariant) -> None:
    app = hf.App("handler")

    @app.workflow
    async def flow() -> str:
        hf.on_update("rotate", lambda: hf.continue_as_new())
        return await hf.wait_signal("end", str)

    async with variant.node(app):
        run = await app.start(flow)
        with pytest.raises(UpdateFailed, match="cannot rotate the history"):
            await run.update("rotate")
        await run.signal("end", "done")
        assert await run.result() == "done"


@pytest.mark.contract("WF-6", "OWN-3")
@pytest.mark.parametrize("end", ["rotate", "return"])
async def test_an_end_that_waits_for_an_update_is_found_again_after_a_restart(variant: EngineVariant, end: str) -> None:
    """Nodes stop between any two turns, and the next one makes the same of the history."""
    gate = Gate()
    async with variant.opened() as store:
        app, count = counting(gate)
        async with variant.node(app, store, drain_s=0.01):
            run = await app.start(count)
            run_id = run.run_id
            asking = asyncio.create_task(run.update("add", by=5))
            await gate.began.wait()
            await run.signal("end", end)
            await wait_for_event(run, "SignalReceived")
            asking.cancel()
        gate.opened.set()
        app, _ = counting(gate)
        async with variant.node(app, store):
            run = app.run(run_id)
            if end == "rotate":
                await wait_for_event(run, "ContinuedAsNew")
                assert await run.query("total") in (0, 5)
                await run.signal("end", "return")
            completed = (await wait_for_event(run, "UpdateCompleted")).data
            total = (await run.result())[0]
            assert total == (5 if completed.error is None else 0)  # type: ignore[attr-defined]
