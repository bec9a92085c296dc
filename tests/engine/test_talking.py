"""Signals, queries, updates and conditions, through a real node."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.state import COMPLETED
from holdfast.errors import Conflict, InvalidInput, NotDurable, NotFound, RunError, RunFailed, RunTerminal, UpdateFailed
from holdfast.workflow import Workflow
from tests.engine.harness import EngineVariant, event_types, wait_for_event, wait_for_status


@dataclass
class Approval:
    by: str


# --- signals


@pytest.mark.contract("SIG-3", "SIG-8")
@pytest.mark.parametrize("is_early", [True, False])
async def test_a_signal_is_taken_whether_it_comes_before_or_after_the_wait(
    variant: EngineVariant, is_early: bool
) -> None:
    app = hf.App("signals")
    gate = asyncio.Event()

    @app.activity
    async def open_gate() -> None:
        await gate.wait()

    @app.workflow
    async def waits() -> str:
        await open_gate()
        return (await hf.wait_signal("approval", Approval, timeout=60)).by

    async with variant.node(app):
        run = await app.start(waits)
        if is_early:
            await run.signal("approval", Approval("ann"))
        gate.set()
        if not is_early:
            await wait_for_event(run, "SignalWaiting")
            await run.signal("approval", Approval("ann"))
        assert await run.result() == "ann"


@pytest.mark.contract("SIG-8")
async def test_a_wait_can_time_out_and_the_late_signal_stays(variant: EngineVariant) -> None:
    app = hf.App("signals")

    @app.workflow
    async def waits() -> str:
        with pytest.raises(TimeoutError, match="'go'"):
            await hf.wait_signal("go", str, timeout=0.02)
        return await hf.wait_signal("go", str)

    async with variant.node(app):
        run = await app.start(waits)
        await wait_for_event(run, "SignalTimedOut")
        await run.signal("go", "late")
        assert await run.result() == "late"


@pytest.mark.contract("SIG-1", "SIG-8", "SIG-9")
async def test_several_waits_take_their_signals_in_order(variant: EngineVariant) -> None:
    app = hf.App("signals")

    @app.workflow
    async def waits() -> list[int]:
        return list(await asyncio.gather(*(hf.wait_signal(name, int) for name in ("a", "b", "a", "a"))))

    async with variant.node(app):
        run = await app.start(waits)
        for name, value in (("a", 1), ("a", 2), ("b", 3), ("a", 4)):
            await run.signal(name, value)
        assert await run.result() == [1, 3, 2, 4]


@pytest.mark.contract("SIG-10")
async def test_a_payload_that_does_not_fit_raises_in_the_workflow(variant: EngineVariant) -> None:
    app = hf.App("signals")

    @app.workflow
    async def waits() -> str:
        while True:
            try:
                return (await hf.wait_signal("approval", Approval)).by
            except InvalidInput:
                continue

    async with variant.node(app):
        run = await app.start(waits)
        await run.signal("approval", {"who": 1})
        await run.signal("approval", Approval("ann"))
        assert await run.result() == "ann"


@pytest.mark.contract("API-2", "MSG-3")
@pytest.mark.parametrize("name", ["holdfast.control", "holdfast.update", "holdfast.other"])
async def test_the_engines_own_signals_cannot_be_sent_or_waited_for_by_hand(variant: EngineVariant, name: str) -> None:
    app = hf.App("signals")

    @app.workflow
    async def waits() -> str:
        try:
            await hf.wait_signal(name, str)
        except InvalidInput:
            return await hf.wait_signal("go", str)
        return "let through"

    async with variant.node(app):
        run = await app.start(waits)
        with pytest.raises(InvalidInput, match="engine"):
            await run.signal(name, 5)
        await run.signal("go", "on")
        assert await run.result() == "on"


# --- queries


def talking_app() -> tuple[hf.App, Workflow[[], list[str]]]:
    app = hf.App("talk")

    @app.activity
    async def look_up(name: str) -> str:
        return name.upper()

    @app.workflow
    async def basket() -> list[str]:
        names: list[str] = []
        touched = asyncio.Event()

        async def add(name: str) -> int:
            names.append(await look_up(name))
            return len(names)

        def refuse_empty(name: str) -> None:
            if not name:
                raise ValueError("a name is needed")

        hf.on_query("names", lambda: names)
        hf.on_query("starting_with", lambda letter: [name for name in names if name.startswith(letter)])
        hf.on_query("naughty", touched.set)
        hf.on_update("add", add, validator=refuse_empty)
        hf.on_update("clear", names.clear)
        hf.on_update("odd", lambda: object())
        await hf.wait_signal("close", str)
        return names

    return app, basket


@pytest.mark.contract("WF-6")
async def test_a_query_sees_the_present_and_leaves_no_trace(variant: EngineVariant) -> None:
    app, basket = talking_app()
    async with variant.node(app):
        run = await app.start(basket)
        await wait_for_event(run, "SignalWaiting")
        assert await run.query("names") == []
        await run.update("add", name="pear")
        before = await event_types(run)
        assert await run.query("names") == ["PEAR"]
        assert await run.query("starting_with", letter="P") == ["PEAR"]
        with pytest.raises(NotFound, match=r"answers no query 'price'; it answers \['names', 'naughty'"):
            await run.query("price")
        with pytest.raises(InvalidInput):
            await run.query("starting_with", wrong=1)
        assert await event_types(run) == before
        await run.signal("close", "")
        assert await run.result() == ["PEAR"]


@pytest.mark.contract("WF-6")
async def test_a_query_that_touches_what_nobody_waits_for_does_no_harm(variant: EngineVariant) -> None:
    app, basket = talking_app()
    async with variant.node(app):
        run = await app.start(basket)
        await wait_for_event(run, "SignalWaiting")
        await run.query("naughty")  # it sets an event that nobody waits for
        await run.signal("close", "")
        assert await run.result() == []


@pytest.mark.contract("WF-6")
async def test_a_handler_of_queries_cannot_be_async(variant: EngineVariant) -> None:
    app = hf.App("talk")

    @app.workflow(on_error="fail")
    async def odd() -> None:
        async def look() -> int:
            return 1

        hf.on_query("look", look)

    async with variant.node(app):
        with pytest.raises(RunFailed, match="a query is read-only"):
            await (await app.start(odd)).result()


@pytest.mark.contract("WF-6")
async def test_a_query_that_wakes_the_program_is_refused_and_the_program_made_anew(variant: EngineVariant) -> None:
    app = hf.App("talk")

    @app.workflow
    async def careless() -> str:
        touched = asyncio.Event()
        hf.on_query("touch", touched.set)
        waiting = asyncio.create_task(touched.wait())
        answer = await hf.wait_signal("close", str)
        return f"{answer} {waiting.done()}"

    async with variant.node(app):
        run = await app.start(careless)
        await wait_for_event(run, "SignalWaiting")
        with pytest.raises(NotDurable, match="a query is read-only"):
            await run.query("touch")
        await run.signal("close", "closed")
        assert await run.result() == "closed False"


@pytest.mark.contract("WF-6")
async def test_a_query_cannot_begin_anything(variant: EngineVariant) -> None:
    app = hf.App("talk")
    effects: list[str] = []

    @app.activity
    async def charge(name: str) -> None:
        effects.append(name)

    @app.workflow
    async def careless() -> str:
        def charges() -> None:
            asyncio.ensure_future(charge("by a query"))  # noqa: RUF006

        def waits() -> None:
            asyncio.get_running_loop().call_later(0, effects.append, "later")

        def leaves() -> None:
            raise SystemExit("bye")

        for query in (charges, waits, leaves):
            hf.on_query(query.__name__, query)
        return await hf.wait_signal("close", str)

    async with variant.node(app):
        run = await app.start(careless)
        for name in ("charges", "waits"):
            with pytest.raises(NotDurable, match=f"query '{name}' would change something, and is read-only"):
                await run.query(name)
        with pytest.raises(RunError, match=r"query 'leaves' raised SystemExit\('bye'\)"):
            await run.query("leaves")
        await run.signal("close", "closed")
        assert await run.result() == "closed"
    assert effects == []


@pytest.mark.contract("WF-6")
@pytest.mark.parametrize("ids", [{}, {"run_id": "r-1"}, {"request_id": "q-1"}], ids=str)
async def test_a_query_can_be_asked_as_soon_as_the_run_is_started(variant: EngineVariant, ids: dict[str, Any]) -> None:
    app, basket = talking_app()
    async with variant.node(app):
        run = await app.start(basket, **ids)
        assert await run.query("names") == []


@pytest.mark.contract("WF-6")
async def test_a_query_of_a_run_that_does_not_start_is_told_so(
    variant: EngineVariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.engine.run_queries.START_S", 0.05)
    app = hf.App("talk")

    @app.workflow(at_once=1)
    async def narrow() -> str:
        return await hf.wait_signal("close", str)

    async with variant.node(app):
        first, second = await app.start(narrow), await app.start(narrow)
        with pytest.raises(Conflict, match="is PENDING and has not started"):
            await second.query("names")
        for run in (first, second):
            await run.signal("close", "")
            await run.result()


# --- updates


@pytest.mark.contract("WF-6")
async def test_an_update_is_answered_at_once_while_the_run_is_at_work(variant: EngineVariant) -> None:
    app = hf.App("talk")
    may_end = asyncio.Event()

    @app.activity
    async def work() -> None:
        await may_end.wait()

    @app.workflow
    async def busy() -> None:
        hf.on_update("ask", lambda: "answer")
        await work()

    async with variant.node(app):
        run = await app.start(busy)
        took_s: list[float] = []
        while not took_s or (min(took_s) > 0.8 and len(took_s) < 20):  # a busy machine may be late, but not each time
            began = asyncio.get_running_loop().time()
            assert await run.update("ask") == "answer"
            took_s.append(asyncio.get_running_loop().time() - began)
        assert min(took_s) < 0.8, "a wake-up that does not come is made up for after a second"
        may_end.set()
        await run.result()


@pytest.mark.contract("WF-6")
async def test_a_validator_cannot_be_async(variant: EngineVariant) -> None:
    app = hf.App("talk")

    @app.workflow(on_error="fail")
    async def odd() -> None:
        async def check() -> None:
            raise ValueError("refused")

        hf.on_update("add", lambda: None, validator=check)

    async with variant.node(app):
        with pytest.raises(RunFailed, match="a validator is read-only"):
            await (await app.start(odd)).result()


@pytest.mark.contract("WF-6")
async def test_an_update_is_answered_and_once_by_its_id(variant: EngineVariant) -> None:
    app, basket = talking_app()
    async with variant.node(app):
        run = await app.start(basket)
        assert await run.update("add", name="pear", update_id="u-1") == 1
        assert await run.update("add", name="pear", update_id="u-1") == 1
        both = await asyncio.gather(*(run.update("add", name="fig", update_id="u-2") for _ in range(2)))
        assert both == [2, 2]
        assert await run.query("names") == ["PEAR", "FIG"]
        assert await run.update("clear") is None
        await run.signal("close", "")
        assert await run.result() == []
        assert (await event_types(run)).count("UpdateAccepted") == 3


@pytest.mark.contract("WF-6", "API-2")
async def test_an_update_id_has_the_rules_of_a_signal_id_and_is_named_in_refusals(variant: EngineVariant) -> None:
    app, basket = talking_app()
    async with variant.node(app):
        run = await app.start(basket)
        for bad in ("", "é" * 64 + "x", "\ud800", 7):
            with pytest.raises(InvalidInput, match="update_id ") as caught:
                await run.update("add", name="pear", update_id=bad)  # type: ignore[arg-type]
            assert caught.value.details == {"field": "update_id"}
        assert await run.update("add", name="pear", update_id="é" * 64) == 1
        assert await run.update("add", name="pear", update_id="É" * 64) == 2
        with pytest.raises(Conflict, match="an update with this update_id was accepted before with another payload"):
            await run.update("add", name="fig", update_id="é" * 64)
        await run.pause(signal_id="p")
        with pytest.raises(Conflict, match="a command with this signal_id was accepted before with another payload"):
            await run.resume(signal_id="p")


@pytest.mark.contract("WF-6")
async def test_an_update_can_be_refused_and_fail_without_harm(variant: EngineVariant) -> None:
    app, basket = talking_app()
    async with variant.node(app):
        run = await app.start(basket)
        with pytest.raises(UpdateFailed, match="a name is needed") as caught:
            await run.update("add", name="")
        assert caught.value.info.code == "ValueError"
        with pytest.raises(UpdateFailed, match="takes no update 'remove'"):
            await run.update("remove")
        with pytest.raises(UpdateFailed, match="the arguments of update 'add' do not fit"):
            await run.update("add", name=5)
        with pytest.raises(UpdateFailed, match="cannot be stored"):
            await run.update("odd")
        await run.signal("close", "")
        assert await run.result() == []


@pytest.mark.contract("WF-6", "WF-7")
async def test_an_update_that_is_not_answered_before_the_end_is_told_so(variant: EngineVariant) -> None:
    app = hf.App("talk")

    @app.workflow
    async def short() -> None:
        async def never() -> None:
            await hf.wait_signal("never", str)

        hf.on_update("never", never)
        await hf.wait_signal("close", str)

    async with variant.node(app):
        run = await app.start(short)
        asking = asyncio.create_task(run.update("never"))
        await wait_for_event(run, "UpdateAccepted")
        await run.signal("close", "")
        with pytest.raises(RunTerminal, match="ended before it had answered"):
            await asking
        await wait_for_status(run, COMPLETED)
        with pytest.raises(RunTerminal):
            await run.update("never")


# --- conditions


@pytest.mark.contract("WF-1", "WF-6")
async def test_a_condition_is_looked_at_whenever_something_has_happened(variant: EngineVariant) -> None:
    app = hf.App("talk")

    @app.workflow
    async def counts() -> int:
        total = 0
        began = hf.now()

        def add(by: int) -> None:
            nonlocal total
            total += by

        hf.on_update("add", add)
        await hf.wait_until(lambda: total >= 3 and hf.now() >= began)
        return total

    async with variant.node(app):
        run = await app.start(counts)
        for _ in range(3):
            await run.update("add", by=1)
        assert await run.result() == 3


@pytest.mark.contract("WF-1")
async def test_a_condition_can_time_out_and_can_raise(variant: EngineVariant) -> None:
    app = hf.App("talk")

    @app.workflow
    async def waits() -> list[str]:
        found = []
        try:
            await hf.wait_until(lambda: False, timeout=0.02)
        except TimeoutError:
            found.append("late")
        numbers = [1]
        asyncio.get_running_loop().call_later(0.01, numbers.clear)
        try:
            await hf.wait_until(lambda: numbers[0] > 1)
        except IndexError:
            found.append("broken")
        return found

    async with variant.node(app):
        assert await (await app.start(waits)).result() == ["late", "broken"]


@pytest.mark.contract("WF-6", "SIG-6", "EVT-4")
@pytest.mark.parametrize("cached_runs", [5_000, 0])
async def test_an_update_id_that_is_used_again_after_it_was_forgotten_is_a_new_request(cached_runs: int) -> None:
    app, basket = talking_app()
    store = hf.MemoryStore(limits=hf.Limits(acceptance_retention_ms=1))
    async with asyncio.timeout(60), app.node(store, options=hf.NodeOptions(cached_runs=cached_runs, drain_s=1.0)):
        run = await app.start(basket)
        assert await run.update("add", name="pear", update_id="u-1") == 1
        await asyncio.sleep(0.005)
        assert await run.update("add", name="fig", update_id="u-1") == 2
        await run.signal("close", "")
        assert await run.result() == ["PEAR", "FIG"]
