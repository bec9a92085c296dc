"""Waiting for signals, through a real node: time-outs, conditions, handlers, many at once, and sending from inside."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec import UNSET

import holdfast as hf
from holdfast.app import App
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.state import COMPLETED, PAUSED
from holdfast.errors import InvalidInput, NotDurable, RunFailed, SignalHandlerFailed
from tests.engine.harness import EngineVariant, event_types, store_with_virtual_time, wait_for_event, wait_for_status


@dataclass
class Vote:
    by: str
    count: int = 1


# --- time-outs


async def too_late() -> str:
    """Return something, as an async function does."""
    return "too late"


@pytest.mark.contract("SIG-8")
@pytest.mark.parametrize("on_timeout", [lambda: "too late", too_late])
async def test_on_timeout_says_what_a_wait_returns_when_nobody_came(variant: EngineVariant, on_timeout: Any) -> None:
    app = hf.App("signals")

    @app.workflow
    async def waits() -> str:
        first: str = await hf.wait_signal("go", str, timeout=0.01, on_timeout=on_timeout)
        return f"{first}, {await hf.wait_signal('end', str)}"

    async with variant.node(app):
        run = await app.start(waits)
        await wait_for_event(run, "SignalTimedOut")
        await run.signal("end", "bye")
        assert await run.result() == "too late, bye"


@pytest.mark.contract("SIG-8", "SIG-3")
@pytest.mark.parametrize(
    ("early_us", "expected"), [(1_000, "somebody"), (0, "somebody"), (-1, "nobody")], ids=["before", "at once", "after"]
)
async def test_a_signal_in_time_is_not_too_late_because_nobody_looked(
    variant: EngineVariant, early_us: int, expected: str
) -> None:
    app = hf.App("signals")

    @app.workflow
    async def waits() -> list[Any]:
        first = await hf.wait_signal("go", str, timeout=60, on_timeout=lambda: "nobody")
        await hf.wait_signal("end", str)
        return [first, await hf.wait_signal("go", str, timeout=60, on_timeout=lambda: "nobody")]

    async with store_with_virtual_time(variant) as (store, clock):
        async with variant.node(app, store):
            run = await app.start(waits)
            await wait_for_event(run, "SignalWaiting")
        clock.advance(us=60_000_000 - early_us)
        await run.signal("go", "somebody")
        clock.advance(ms=5_000)
        async with variant.node(app, store):
            run = app.run(run.run_id)
            await wait_for_event(run, "SignalWaiting", times=2)
            kinds = await event_types(run)
            assert kinds.count("SignalReceived") + kinds.count("SignalTimedOut") == 1, "one wait, one outcome"
            await run.signal("end", "")
            if expected == "somebody":
                await wait_for_event(run, "SignalWaiting", times=3)
                await run.signal("go", "somebody else")
                assert await run.result() == ["somebody", "somebody else"]
            else:
                assert await run.result() == ["nobody", "somebody"], "who comes too late is kept"


def waits_twice(app: App) -> Any:
    """Return a workflow with a wait for a minute, and one for what came too late."""

    @app.workflow
    async def waits() -> list[Any]:
        first = await hf.wait_signal("go", str, timeout=60, on_timeout=lambda: "nobody")
        return [first, await hf.wait_signal("go", str)]

    return waits


@pytest.mark.contract("SIG-8", "SIG-2")
async def test_the_time_of_acceptance_decides_though_the_clock_of_the_node_is_behind(
    variant: EngineVariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = hf.App("signals")
    waits = waits_twice(app)
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store, safety_poll_s=0.1):
        run = await app.start(waits)
        await wait_for_event(run, "SignalWaiting")
        now, claim, seen = store.now, store.claim, asyncio.Event()

        async def behind() -> int:
            return await now() - 20_000

        async def watched(*args: Any) -> Any:
            if turns:  # the turn before this claim had the signal
                seen.set()
            claimed = await claim(*args)
            turns.extend(loaded for loaded in claimed if loaded.signals)
            return claimed

        turns: list[Any] = []
        monkeypatch.setattr(store, "now", behind)
        monkeypatch.setattr(store, "claim", watched)
        clock.advance(us=60_000_000 + 5_000)  # five milliseconds too late; for the node it is not over yet
        await run.signal("go", "somebody")
        await seen.wait()
        clock.advance(ms=20)
        assert await run.result() == ["nobody", "somebody"]


@pytest.mark.contract("SIG-8", "SIG-1")
async def test_a_clock_that_is_set_back_makes_no_signal_too_late(variant: EngineVariant) -> None:
    app = hf.App("signals")
    waits = waits_twice(app)
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        clock.advance(ms=3_600_000)
        run = await app.start(waits)
        await wait_for_event(run, "SignalWaiting")
        await run.signal("other", "from the future")
        clock.set_back(ms=3_599_000)
        await run.signal("go", "first")
        await run.signal("go", "second")
        assert await run.result() == ["first", "second"]


@pytest.mark.contract("SIG-8", "SIG-3")
async def test_a_wait_that_is_given_up_takes_no_signal_with_it(variant: EngineVariant) -> None:
    app = hf.App("signals")

    @app.workflow
    async def waits() -> list[str]:
        waiting = asyncio.create_task(hf.wait_signal("go", str))
        await hf.wait_signal("stop", str)
        waiting.cancel()
        await asyncio.wait([waiting])
        try:
            async with asyncio.timeout(0.01):
                await hf.wait_signal("go", str)
        except TimeoutError:
            await hf.wait_signal("on", str)
        return [await hf.wait_signal("go", str) for _ in range(2)]

    async with variant.node(app):
        run = await app.start(waits)
        await run.signal("stop", "")
        await wait_for_event(run, "StepCancelled", times=2)
        await run.signal("go", "a")
        await run.signal("go", "b")
        await run.signal("on", "")
        assert await run.result() == ["a", "b"]


# --- conditions


@pytest.mark.contract("SIG-8", "WF-5")
async def test_a_condition_is_looked_at_once_and_its_choice_is_recorded(variant: EngineVariant) -> None:
    app = hf.App("signals")
    looked: list[str] = []

    def holds(name: str, answer: bool) -> bool:
        looked.append(name)
        return answer

    @app.workflow
    async def waits() -> list[Any]:
        skipped = await hf.wait_signal("a", str, condition=lambda: holds("a", False))
        taken = await hf.wait_signal("b", str, condition=lambda: holds("b", True))
        return [skipped, taken, await hf.wait_signal("c", str)]

    async with variant.node(app):
        run = await app.start(waits)
        await run.signal("b", "yes")
        await wait_for_event(run, "SignalReceived")
        await run.signal("c", "end")
        assert await run.result() == [None, "yes", "end"]
        assert looked == ["a", "b"]
        marked = [event.step_id for event in await run.events() if event.event_type == "MarkerRecorded"]
        assert marked == ["a:skipped", "b:taken"]


@pytest.mark.contract("WF-5", "WF-2")
async def test_a_condition_that_raises_raises_again_on_replay(variant: EngineVariant) -> None:
    app = hf.App("signals")

    def breaks() -> bool:
        raise LookupError("no such thing")

    @app.workflow
    async def waits() -> str:
        with pytest.raises(LookupError):
            await hf.wait_signal("a", str, condition=breaks)
        return await hf.wait_signal("b", str)

    async with variant.node(app):
        run = await app.start(waits)
        await wait_for_event(run, "SignalWaiting")
        await run.signal("b", "on")
        assert await run.result() == "on"


# --- handlers


@pytest.mark.contract("SIG-4", "EVT-3")
async def test_a_handler_is_called_once_and_replay_reads_what_it_made(variant: EngineVariant) -> None:
    app = hf.App("signals")
    calls: list[str] = []

    def double(vote: Vote) -> Vote:
        calls.append(vote.by)
        return Vote(vote.by, vote.count * 2)

    @app.workflow
    async def waits() -> list[Any]:
        votes = [await hf.wait_signal("vote", Vote, handler=double) for _ in range(3)]
        assert all(isinstance(vote, Vote) for vote in votes)
        return [[vote.by, vote.count] for vote in votes]

    async with variant.node(app):
        run = await app.start(waits)
        for number, name in enumerate(("ann", "bob", "cleo"), 1):
            await run.signal("vote", Vote(name, number))
            await wait_for_event(run, "SignalReceived", times=number)
        assert await run.result() == [["ann", 2], ["bob", 4], ["cleo", 6]]
        assert calls == ["ann", "bob", "cleo"]
        received = [event.data for event in await run.events() if isinstance(event.data, e.SignalReceived)]
        after = [body.state_after for body in received if body.state_after is not UNSET]
        assert [codec.decode(state, Vote) for state in after] == [Vote("ann", 2), Vote("bob", 4), Vote("cleo", 6)]


@pytest.mark.contract("SIG-4", "WF-2")
async def test_what_a_handler_raises_is_recorded_and_raised_where_the_signal_is_awaited(variant: EngineVariant) -> None:
    app = hf.App("signals")
    calls: list[int] = []

    def refuse(number: int) -> int:
        calls.append(number)
        raise ValueError(f"not {number}")

    @app.workflow
    async def waits() -> list[str]:
        found = []
        for _ in range(2):
            try:
                await hf.wait_signal("go", int, handler=refuse, on_misfit="raise")
            except SignalHandlerFailed as problem:
                found.append(problem.info.message)
            except InvalidInput:
                found.append("does not fit")
        await hf.wait_signal("end", str)
        return found

    async with variant.node(app):
        run = await app.start(waits)
        await run.signal("go", 7)
        await wait_for_event(run, "SignalReceived")
        await run.signal("go", "seven")
        await wait_for_event(run, "SignalReceived", times=2)
        await run.signal("end", "")
        assert await run.result() == ["not 7", "does not fit"]
        assert calls == [7]


@pytest.mark.contract("SIG-4", "WF-2")
async def test_a_handler_that_does_more_than_compute_holds_the_run_and_loses_no_signal(variant: EngineVariant) -> None:
    app = hf.App("signals")
    is_mended = False

    @app.workflow
    async def waits() -> int:
        heard = asyncio.Event()
        asyncio.get_running_loop().create_task(heard.wait())
        await asyncio.sleep(0)

        def careless(number: int) -> int:
            if not is_mended:
                heard.set()
            return number

        result: int = await hf.wait_signal("go", int, handler=careless)
        return result

    async with variant.node(app):
        run = await app.start(waits)
        await wait_for_event(run, "SignalWaiting")
        await run.signal("go", 7)
        await wait_for_status(run, PAUSED)
        assert [left.payload for left in await run.mailbox()] == [7]
        is_mended = True
        await run.resume()
        assert await run.result() == 7


@pytest.mark.contract("WF-2")
async def test_a_handler_that_the_history_knows_nothing_of_pauses_the_run(variant: EngineVariant) -> None:
    app = hf.App("signals")
    has_handler = False

    @app.workflow
    async def waits() -> int:
        first: int = await hf.wait_signal("go", int, handler=abs if has_handler else None)
        return first + await hf.wait_signal("end", int)

    async with variant.opened() as store:
        async with variant.node(app, store):
            run = await app.start(waits)
            await run.signal("go", -7)
            await wait_for_event(run, "SignalWaiting", times=2)
        has_handler = True
        async with variant.node(app, store):
            run = app.run(run.run_id)
            await run.signal("end", 1)
            paused = await wait_for_event(run, "RunPaused")
            assert isinstance(paused.data, e.RunPaused)
            assert paused.data.error is not None
            assert "without a handler" in paused.data.error.message
            await wait_for_status(run, PAUSED)
        has_handler = False
        async with variant.node(app, store):
            run = app.run(run.run_id)
            await run.resume()
            assert await run.result() == -6


@pytest.mark.contract("API-2", "SIG-8")
@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: hf.wait_signal("go", str, on_timeout=str), "without a timeout"),
        (lambda: hf.wait_signal("go", str, condition=too_late), "a plain function"),  # type: ignore[arg-type]
        (lambda: hf.wait_signal("go", str, handler=too_late), "a plain function"),  # type: ignore[arg-type]
        (lambda: hf.wait_signal("vote", str), "is declared as"),
        (lambda: hf.signals("vote", str).__anext__(), "is declared as"),
        (lambda: hf.signals("", str).__anext__(), "not empty"),
    ],
)
async def test_a_wait_that_makes_no_sense_is_refused(
    variant: EngineVariant, ask: Callable[[], Awaitable[Any]], message: str
) -> None:
    app = hf.App("signals", on_error="fail")

    @app.workflow(signals={"vote": Vote})
    async def waits() -> None:
        await ask()

    async with variant.node(app):
        with pytest.raises(RunFailed, match=message):
            await (await app.start(waits)).result()


# --- many


@pytest.mark.contract("SIG-1", "SIG-8")
async def test_signals_are_iterated_in_order_until_the_time_is_up(variant: EngineVariant) -> None:
    app = hf.App("signals")

    @app.workflow
    async def poll() -> list[str]:
        return [vote.by async for vote in hf.signals("vote", Vote, timeout=0.3)]

    async with variant.node(app):
        run = await app.start(poll)
        names = ["ann", "bob", "cleo", "dora"]
        for name in names:
            await run.signal("vote", Vote(name))
        assert await run.result() == names


@pytest.mark.contract("SIG-1", "CAN-1", "SIG-3")
async def test_iterating_survives_rotations_and_loses_nothing(variant: EngineVariant) -> None:
    app = hf.App("signals", limits=hf.Limits(rotation_steps=3))

    @app.workflow
    async def adds(total: int, seen: int) -> list[int]:
        async for number in hf.signals("add", int):
            total, seen = total + number, seen + 1
            if seen == 10:
                return [total, seen]
            hf.continue_as_new_if_long(total, seen)
        raise AssertionError

    async with variant.node(app):
        run = await app.start(adds, 0, 0)
        for number in range(10):
            await run.signal("add", number)
        assert await run.result() == [45, 10]
        assert "ContinuedAsNew" in await event_types(run)
        assert await run.mailbox() == []


@pytest.mark.contract("SIG-8", "SIG-9")
async def test_several_waits_in_a_task_group_are_steps_with_paths_of_their_own(variant: EngineVariant) -> None:
    app = hf.App("signals")

    @app.workflow
    async def waits() -> list[str]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(hf.wait_signal("go", str)) for _ in range(3)]
        return [task.result() for task in tasks]

    async with variant.node(app):
        run = await app.start(waits)
        await wait_for_event(run, "SignalWaiting", times=3)
        assert [wait.step_id async for wait in app.waits(run_id=run.run_id)] == ["go", "go#2", "go#3"]
        await run.signal("go", "third", step_id="go#3")
        await run.signal("go", "first")
        await run.signal("go", "second", step_id="go#2")
        assert await run.result() == ["first", "second", "third"]


# --- sending from inside


def chatting_app() -> tuple[App, Any, Any]:
    """Return an app of which one workflow tells another, and is told by it."""
    app = hf.App("chat")

    @app.workflow
    async def asks(other: str) -> str:
        sent = await app.run(other).signal("question", {"from": app.run().run_id, "number": 20})
        assert not sent.accepted
        answer: int = await hf.wait_signal("answer", int)
        return f"{answer}"

    @app.workflow
    async def answers() -> str:
        question = await hf.wait_signal("question", dict[str, Any])
        await app.run(question["from"]).signal("answer", question["number"] + 1)
        return "answered"

    return app, asks, answers


@pytest.mark.contract("SIG-9", "SIG-5")
async def test_runs_signal_each_other_once(variant: EngineVariant) -> None:
    app, asks, answers = chatting_app()
    async with variant.node(app):
        second = await app.start(answers)
        first = await app.start(asks, second.run_id)
        assert await first.result() == "21"
        assert await second.result() == "answered"
        [sent] = [event.data for event in await first.events() if isinstance(event.data, e.SignalSent)]
        assert (await second.receipt("question", sent.signal_id)).status == "consumed"
        assert (await event_types(second)).count("SignalReceived") == 1


@pytest.mark.contract("SIG-9", "WF-4")
async def test_a_run_signals_itself_its_parent_and_its_child(variant: EngineVariant) -> None:
    app = hf.App("family")

    @app.workflow
    async def child(parent: str) -> str:
        await app.run(parent).signal("from child", "hello", signal_id="only one")
        return await hf.wait_signal("from parent", str)

    @app.workflow
    async def parent() -> list[str]:
        me = app.run()
        await me.signal("from me", "it's me")
        working = asyncio.create_task(child(me.run_id))
        heard = [await hf.wait_signal("from me", str), await hf.wait_signal("from child", str)]
        await app.run(f"{me.run_id}/child").signal("from parent", "good bye")
        return [*heard, await working]

    async with variant.node(app):
        run = await app.start(parent)
        assert await run.result() == ["it's me", "hello", "good bye"]


@pytest.mark.contract("SIG-11", "SIG-3")
async def test_what_runs_send_is_not_counted_by_the_minute(variant: EngineVariant) -> None:
    app = hf.App("chat")

    @app.workflow
    async def sends(other: str) -> None:
        for number in range(100):
            await app.run(other).signal("number", number)

    @app.workflow
    async def sums() -> int:
        return sum([await hf.wait_signal("number", int) for _ in range(100)])

    async with variant.node(app):
        run = await app.start(sums)
        await (await app.start(sends, run.run_id)).result()
        assert await run.result() == 4950


@pytest.mark.contract("API-2", "WF-2")
async def test_inside_a_workflow_a_run_can_only_be_signalled(variant: EngineVariant) -> None:
    app = hf.App("chat")

    @app.workflow
    async def curious(other: str) -> list[str]:
        found = []
        for ask in (
            lambda: app.run(other).status(),
            lambda: app.run(other).signal("go", require_waiting=True),
            lambda: app.run(other).signal("go", "x" * 70_000),
            lambda: app.run(other).signal("holdfast.control"),
            lambda: app.signal_many([]),
        ):
            try:
                await ask()
            except (NotDurable, hf.errors.CallerError) as problem:
                found.append(type(problem).__name__)
        await hf.wait_signal("end", str)
        return found

    async with variant.node(app):
        run = await app.start(curious, "some run")
        await run.signal("end", "")
        expected = ["NotDurable", "InvalidInput", "PayloadTooLarge", "InvalidInput", "InvalidInput"]
        assert await run.result() == expected
        await wait_for_status(run, COMPLETED)
