"""An exception that a workflow's code does not handle pauses its run, and the run goes on once the code is mended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import holdfast as hf
from holdfast.clock import SystemClock
from holdfast.core import events as e
from holdfast.core.state import CANCELLED, COMPLETED, FAILED, PAUSED, RUNNING
from holdfast.engine.check_histories import check_history
from holdfast.engine.observe.doctor import examine
from holdfast.errors import Conflict, InvalidInput, RunCancelled, RunFailed
from holdfast.store.port import RunQuery, Store
from holdfast.testing import TestNode
from tests.engine.harness import (
    MOST_SECONDS,
    EngineVariant,
    event_types,
    wait_for_child,
    wait_for_event,
    wait_for_status,
)

STEPS = 5


class InsufficientFunds(Exception):
    """Declared by workflows as a failure."""


class Shop:
    """An app whose workflow pays and then books; `bug` is what it does between the two."""

    def __init__(self, bug: Callable[[dict[str, int]], Any] = lambda prices: None, **options: Any) -> None:
        self.app = hf.App("shop")
        self.done: list[str] = []

        @self.app.activity(retry=hf.Retry(max_attempts=1))
        async def pay(item: int) -> int:
            self.done.append(f"pay {item}")
            return item

        @self.app.activity(retry=hf.Retry(max_attempts=1))
        async def refund(item: int) -> None:
            self.done.append(f"refund {item}")

        @self.app.activity(retry=hf.Retry(max_attempts=1))
        async def refuse() -> None:
            raise ValueError("refused")

        @self.app.workflow(**options)
        async def order() -> int:
            paid = [await pay(item) for item in range(STEPS)]
            bug({"here": 1})
            return sum(paid) + await pay(STEPS)

        @self.app.workflow(**options)
        async def trip() -> str:
            async with hf.Saga() as saga:
                await pay(1)
                saga.undo(refund, 1)
                bug({"here": 1})
            return "gone"

        @self.app.workflow(**options)
        async def declined() -> None:
            await refuse()

        @self.app.workflow(**options)
        async def parent() -> int:
            return await order()

        self.order, self.trip, self.declined, self.parent, self.pay = order, trip, declined, parent, pay

    @asynccontextmanager
    async def node(self, store: Store, **options: Any) -> AsyncIterator[Any]:
        """Run the app here."""
        chosen = hf.NodeOptions(**{"drain_s": 2.0, **options})
        async with asyncio.timeout(MOST_SECONDS), self.app.node(store, options=chosen) as node:
            yield node


def looks_up(prices: dict[str, int]) -> None:
    """Raise a KeyError."""
    prices["nowhere"]


async def paused_with(run: hf.RunHandle[Any]) -> e.ErrorInfo:
    """Return the error for which a run is paused."""
    await wait_for_status(run, PAUSED)
    event = await wait_for_event(run, "RunPaused")
    assert isinstance(event.data, e.RunPaused)
    assert event.data.error is not None
    return event.data.error


@pytest.mark.contract("WF-7")
async def test_it_pauses_the_run_with_its_traceback_and_mended_code_goes_on_from_there(variant: EngineVariant) -> None:
    async with variant.opened() as store:
        broken = Shop(looks_up)
        async with broken.node(store, cached_runs=variant.cached_runs):
            run = await broken.app.start(broken.order, run_id="o-1")
            error = await paused_with(run)
            assert error.code == "UnhandledError"
            assert "KeyError: 'nowhere'" in error.message
            assert "test_unhandled_errors.py:" in error.message, "the author's line"
            assert "in looks_up" in error.traceback
            assert "site-packages" not in error.traceback
            assert error.cause is not None
            assert (error.cause.code, error.cause.message) == ("KeyError", "'nowhere'")
            found = [each for each in (await examine(store, SystemClock())).findings if "o-1" in each.run_ids]
            assert any("KeyError: 'nowhere'" in each.sentence for each in found), "doctor says what is wrong"
        mended = Shop()
        async with mended.node(store, cached_runs=variant.cached_runs):
            assert await mended.app.run("o-1").result() == sum(range(STEPS + 1))
            names = await event_types(mended.app.run("o-1"))
        assert broken.done == [f"pay {item}" for item in range(STEPS)]
        assert mended.done == [f"pay {STEPS}"], "nothing is paid twice"
        assert (names.count("RunPaused"), names.count("RunResumed")) == (1, 1), "it went on by itself"


@pytest.mark.contract("WF-7", "SIG-13")
async def test_a_resumption_tries_again_and_pauses_again_while_the_code_is_the_same(variant: EngineVariant) -> None:
    prices: dict[str, int] = {}
    shop = Shop(lambda _: prices["late"])
    async with variant.opened() as store, shop.node(store, cached_runs=variant.cached_runs):
        run = await shop.app.start(shop.order)
        await paused_with(run)
        await run.resume()
        await wait_for_event(run, "RunPaused", 2)
        with pytest.raises(Conflict, match="has not failed"):
            await run.retry_step("pay")
        prices["late"] = 1
        await run.resume()
        assert await run.result() == sum(range(STEPS + 1))
        assert check_history(shop.app.registry, await run.events()) is None


@pytest.mark.contract("WF-7", "WF-4")
async def test_a_paused_run_can_be_cancelled(variant: EngineVariant) -> None:
    shop = Shop(looks_up)
    async with variant.opened() as store, shop.node(store, cached_runs=variant.cached_runs):
        run = await shop.app.start(shop.order)
        await paused_with(run)
        await run.cancel()
        with pytest.raises(RunCancelled):
            await run.result()
        assert check_history(shop.app.registry, await run.events()) is None


@pytest.mark.contract("WF-7", "WF-4")
async def test_a_mistake_inside_a_saga_undoes_nothing_until_the_run_is_cancelled(variant: EngineVariant) -> None:
    shop = Shop(looks_up)
    async with variant.opened() as store, shop.node(store, cached_runs=variant.cached_runs):
        run = await shop.app.start(shop.trip)
        error = await paused_with(run)
        assert "the code in a saga raised KeyError" in error.message
        assert shop.done == ["pay 1"]
        await run.cancel()
        with pytest.raises(RunCancelled):
            await run.result()
        assert shop.done == ["pay 1", "refund 1"]
        assert check_history(shop.app.registry, await run.events()) is None


@pytest.mark.contract("WF-7", "WF-4")
async def test_a_saga_goes_on_once_its_code_is_mended(variant: EngineVariant) -> None:
    async with variant.opened() as store:
        broken = Shop(looks_up)
        async with broken.node(store, cached_runs=variant.cached_runs):
            await paused_with(await broken.app.start(broken.trip, run_id="t-1"))
        mended = Shop()
        async with mended.node(store, cached_runs=variant.cached_runs):
            assert await mended.app.run("t-1").result() == "gone"
        assert mended.done == []


def raises(problem: BaseException) -> Callable[[dict[str, int]], None]:
    """Return what raises it."""

    def bug(prices: dict[str, int]) -> None:
        raise problem

    return bug


class OutOfStock(hf.WorkflowFailed):
    """A failure of its own name."""


@pytest.mark.contract("WF-7")
@pytest.mark.parametrize(
    ("problem", "options", "code"),
    [
        (hf.WorkflowFailed("sold out"), {}, "WorkflowFailed"),
        (OutOfStock("sold out"), {}, "OutOfStock"),
        (InsufficientFunds("sold out"), {"failures": (InsufficientFunds,)}, "InsufficientFunds"),
        (InsufficientFunds("sold out"), {"failures": InsufficientFunds}, "InsufficientFunds"),
        (KeyError("sold out"), {"on_error": "fail"}, "KeyError"),
        (TimeoutError("sold out"), {}, "TimeoutError"),
        (ExceptionGroup("both", [OutOfStock("sold out"), TimeoutError()]), {}, "ExceptionGroup"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
async def test_a_run_fails_by_what_its_author_declared(
    variant: EngineVariant, problem: Exception, options: dict[str, Any], code: str
) -> None:
    shop = Shop(raises(problem), **options)
    async with variant.opened() as store, shop.node(store, cached_runs=variant.cached_runs):
        run = await shop.app.start(shop.order)
        with pytest.raises(RunFailed) as failed:
            await run.result()
        assert failed.value.info.code == code
        trip = await shop.app.start(shop.trip)
        with pytest.raises(RunFailed):
            await trip.result()
        assert shop.done[-2:] == ["pay 1", "refund 1"], "what fails a run undoes what was done"


@pytest.mark.contract("WF-7", "ACT-1")
async def test_exhausted_retries_fail_the_run_and_so_does_a_failed_child(variant: EngineVariant) -> None:
    shop = Shop(raises(hf.WorkflowFailed("no")))
    async with variant.opened() as store, shop.node(store, cached_runs=variant.cached_runs):
        workflows: list[Any] = [shop.declined, shop.parent]
        for workflow in workflows:
            run = await shop.app.start(workflow)
            with pytest.raises(RunFailed):
                await run.result()
            assert await run.status() is FAILED


@pytest.mark.contract("WF-7")
async def test_a_group_with_a_mistake_in_it_pauses_the_run(variant: EngineVariant) -> None:
    shop = Shop(raises(ExceptionGroup("both", [hf.WorkflowFailed("no"), KeyError("x")])))
    async with variant.opened() as store, shop.node(store, cached_runs=variant.cached_runs):
        error = await paused_with(await shop.app.start(shop.order))
        assert error.cause is not None
        assert error.cause.code == "ExceptionGroup"


@pytest.mark.contract("WF-7", "WF-4")
async def test_a_paused_child_keeps_its_parent_waiting(variant: EngineVariant) -> None:
    async with variant.opened() as store:
        broken = Shop(looks_up)
        async with broken.node(store, cached_runs=variant.cached_runs):
            run = await broken.app.start(broken.parent, run_id="p-1")
            await wait_for_event(run, "ChildStarted")
            await wait_for_child(variant, broken.app.run("p-1/order"))
            await paused_with(broken.app.run("p-1/order"))
            assert [step.kind for step in (await run.snapshot()).steps] == ["child"]
        mended = Shop()
        async with mended.node(store, cached_runs=variant.cached_runs):
            assert await mended.app.run("p-1").result() == sum(range(STEPS + 1))


@pytest.mark.contract("WF-7")
async def test_an_app_chooses_for_all_its_workflows_and_a_workflow_for_itself(variant: EngineVariant) -> None:
    app = hf.App("fails", on_error="fail")

    @app.workflow
    async def fails() -> None:
        raise KeyError("x")

    @app.workflow(on_error="pause")
    async def pauses() -> None:
        raise KeyError("x")

    async with variant.node(app):
        with pytest.raises(RunFailed, match="KeyError"):
            await (await app.start(fails)).result()
        await paused_with(await app.start(pauses))
    for wrong in ({"on_error": "ignore"}, {"failures": "KeyError"}, {"failures": (int,)}):
        with pytest.raises(InvalidInput):
            app.workflow(name="wrong", **wrong)(pauses.definition.function)
    with pytest.raises(InvalidInput, match="on_error is one of pause, fail"):
        hf.App("x", on_error="ignore")  # type: ignore[arg-type]


@pytest.mark.contract("WF-7")
async def test_a_background_task_that_failed_unnoticed_pauses_the_run_at_its_end(variant: EngineVariant) -> None:
    app = hf.App("background")
    fails = [True]

    async def watch() -> None:
        await hf.sleep(0.001)
        if fails[0]:
            raise KeyError("watched")

    @app.workflow
    async def main() -> str:
        task = asyncio.create_task(watch(), name="watcher")
        await hf.sleep(0.002)
        assert task.done()
        return "done"

    @app.workflow
    async def handles() -> str:
        task = asyncio.create_task(watch())
        try:
            await task
        except KeyError:
            return "handled"
        return "nothing"

    async with variant.node(app):
        run = await app.start(main)
        error = await paused_with(run)
        assert "'watcher', a task that nothing has awaited, raised KeyError" in error.message
        assert await (await app.start(handles)).result() == "handled"
        fails[0] = False
        await run.resume()
        assert await run.result() == "done"


@pytest.mark.contract("WF-7", "WF-4")
async def test_a_mistake_while_a_run_is_cancelled_pauses_it_and_it_can_be_terminated(variant: EngineVariant) -> None:
    app = hf.App("cleanup")

    @app.workflow
    async def cleans() -> None:
        try:
            await hf.sleep(600)
        finally:
            raise KeyError("cleanup")

    async with variant.node(app):
        run = await app.start(cleans)
        await wait_for_event(run, "TimerStarted")
        await run.cancel()
        assert "KeyError: 'cleanup'" in (await paused_with(run)).message
        await run.terminate("give up")
        await wait_for_status(run, CANCELLED)


@pytest.mark.contract("WF-7", "WF-3")
async def test_a_node_with_other_code_that_is_up_takes_the_run_over(store: Store) -> None:
    broken, mended = Shop(looks_up), Shop(lambda prices: prices["here"])
    async with broken.node(store):
        run = await broken.app.start(broken.order)
        async with mended.node(store):
            assert await run.result() == sum(range(STEPS + 1))


@pytest.mark.contract("WF-7", "FMT-1")
async def test_a_history_that_failed_before_stays_valid_with_code_that_would_pause(variant: EngineVariant) -> None:
    async with variant.opened() as store:
        before = Shop(looks_up, on_error="fail")
        async with before.node(store, cached_runs=variant.cached_runs):
            runs = [await before.app.start(workflow) for workflow in (before.order, before.trip)]
            for run in runs:
                with pytest.raises(RunFailed):
                    await run.result()
            histories = [await run.events() for run in runs]
        assert "refund 1" in before.done
        now = Shop(looks_up)
        assert [check_history(now.app.registry, history) for history in histories] == [None, None]


@pytest.mark.contract("WF-7", "WF-6")
async def test_an_update_whose_handler_raises_is_answered_and_the_run_goes_on(variant: EngineVariant) -> None:
    app = hf.App("update")

    async def change() -> None:
        raise KeyError("x")

    @app.workflow
    async def takes() -> str:
        hf.on_update("change", change)
        return await hf.wait_signal("close", str)

    async with variant.node(app):
        run = await app.start(takes)
        with pytest.raises(hf.errors.UpdateFailed, match="KeyError"):
            await run.update("change")
        await run.signal("close", "done")
        assert await run.result() == "done"
        assert await run.status() is COMPLETED


@pytest.mark.contract("SIG-13", "WF-7")
@pytest.mark.parametrize("verb", ["cancel", "terminate", "pause"])
async def test_a_command_that_was_accepted_while_no_node_was_there_holds_before_mended_code(
    variant: EngineVariant, verb: str
) -> None:
    def build(*, is_broken: bool) -> tuple[hf.App, Any]:
        app = hf.App("shop")

        @app.workflow
        async def order() -> str:
            if is_broken:
                raise KeyError("nowhere")
            return "sent"  # at once: there is no later turn

        return app, order

    async with asyncio.timeout(MOST_SECONDS), variant.opened() as store:
        broken, order = build(is_broken=True)
        async with broken.node(store):
            await paused_with(await broken.start(order, run_id="o-1"))
        mended, _ = build(is_broken=False)
        async with mended.connect(store):
            await getattr(mended.run("o-1"), verb)("stop it")
        async with mended.node(store, options=hf.NodeOptions(cached_runs=variant.cached_runs)):
            run = mended.run("o-1")
            accepted = await wait_for_event(run, "SignalAccepted")
            assert isinstance(accepted.data, e.SignalAccepted)
            assert accepted.data.reason == "stop it"
            if verb == "pause":
                assert await run.status() == PAUSED
                await run.resume()
                assert await run.result() == "sent"
            elif verb == "terminate":
                await wait_for_status(run, CANCELLED)
            else:
                assert await run.result() == "sent", "code that never waits is never interrupted"
                assert "RunCancelRequested" in await event_types(run), "but it was asked"


@pytest.mark.contract("WF-7")
async def test_a_saga_of_a_cancelled_task_that_cannot_be_undone_fails_the_run(variant: EngineVariant) -> None:
    """The code has cancelled a task of its own: that is no mistake of the code, and the undoing has failed."""
    app = hf.App("shop")

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def refund() -> None:
        raise ValueError("refused")

    @app.workflow
    async def trip() -> None:
        async def book() -> None:
            async with hf.Saga() as saga:
                saga.undo(refund)
                await hf.sleep(1_000)

        async with asyncio.TaskGroup() as group:
            booking = group.create_task(book())
            await hf.sleep(0.01)
            booking.cancel()

    async with variant.opened() as store, variant.node(app, store):
        run = await app.start(trip)
        with pytest.raises(RunFailed, match="could not all be undone"):
            await run.result()
        assert (await run.snapshot()).status == FAILED


@pytest.mark.contract("WF-7", "PRJ-4")
async def test_a_mistake_where_a_failure_is_handled_is_what_the_run_shows(variant: EngineVariant) -> None:
    """The step has failed as well, but what has paused the run, and is to be mended, is the mistake."""
    app = hf.App("shop")

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def pay() -> None:
        raise ValueError("refused")

    @app.workflow
    async def order() -> str:
        try:
            await pay()
        except Exception as error:
            return {"there": str(error)}["here"]
        return ""

    async with variant.opened() as store, variant.node(app, store):
        run = await app.start(order)
        await wait_for_status(run, PAUSED)
        [head] = await store.find(RunQuery(run_ids=(run.run_id,)))
        assert head.snapshot is not None
        assert head.snapshot.last_error_code == "UnhandledError"
        report = await examine(store, SystemClock())
        [paused] = [one for one in report.findings if one.subject == "paused runs"]
        assert paused.sentence.startswith("1 run was paused by UnhandledError: the workflow raised KeyError: 'here'")
        assert paused.search.startswith("status:paused with:children UnhandledError test_unhandled_errors.py:")
        assert f'--status PAUSED --text "{paused.search.partition("with:children ")[2]}"' in paused.advice
        found = await store.find(RunQuery(text=paused.search.partition("with:children ")[2]))
        assert [each.run_id for each in found] == [run.run_id], "it finds them"


# --- code that waits, and nothing can wake it


class Waits:
    """A workflow that pays, and then waits for what one of its own tasks should bring."""

    def __init__(self, how: str = "mended") -> None:
        self.app = hf.App("waits")
        self.done: list[str] = []

        @self.app.activity(retry=hf.Retry(max_attempts=1))
        async def pay(item: int) -> int:
            self.done.append(f"pay {item}")
            if item < 0:
                raise ValueError("refused")
            return item

        async def bring(queue: asyncio.Queue[int], item: int) -> None:
            paid = await pay(item)
            queue.put_nowait({1: paid}[item])

        @self.app.workflow
        async def order() -> int:
            await pay(0)
            queue: asyncio.Queue[int] = asyncio.Queue()
            try:
                if how == "a lock of its own":
                    async with (lock := asyncio.Lock()), lock:
                        return 0
                if how == "a condition":
                    await hf.wait_until(lambda: False)
                if how == "a queue":
                    return await queue.get()
                if how != "mended":
                    hf.on_query("size", queue.qsize)
                item = {"a task with a bug": 2, "a task whose step fails": -1}.get(how, 1)
                task = asyncio.create_task(bring(queue, item))
                found = await queue.get()
                await task
                return found
            finally:
                await pay(10)

        self.order = order


VAIN = "nothing can wake the workflow: no step, timer or signal is open, and it waits at "
UNAWAITED = "; 'task 1', a task that nothing has awaited, raised "


@pytest.mark.contract("WF-7", "INV")
@pytest.mark.parametrize(
    ("how", "raised"),
    [
        ("a queue", ""),
        ("a condition", ""),
        ("a lock of its own", ""),
        ("a task with a bug", "KeyError: 2"),
        ("a task whose step fails", "ActivityFailed: step pay#2: ValueError: refused"),
    ],
)
async def test_a_wait_that_nothing_can_end_pauses_the_run(variant: EngineVariant, how: str, raised: str) -> None:
    async with variant.opened() as store:
        broken = Waits(how)
        async with asyncio.timeout(MOST_SECONDS), broken.app.node(store):
            run = await broken.app.start(broken.order, run_id="o-1")
            error = await paused_with(run)
            assert error.code == "UnhandledError"
            assert error.message.startswith(VAIN)
            line, _, rest = error.message.removeprefix(VAIN).partition(";")
            assert line.startswith(f"{__file__}:"), "the line that waits"
            assert f";{rest}".startswith(f"{UNAWAITED}{raised}; fix the code" if raised else "; fix the code")
            assert ("in bring" in error.traceback) is bool(raised)
            [found] = [each for each in (await examine(store, SystemClock())).findings if "o-1" in each.run_ids]
            assert found.search.endswith(line.rpartition("/")[2]), "runs that wait at this line are found by it"
            await run.cancel("never mind")
            with pytest.raises(RunCancelled, match="never mind"):
                await run.result()
        assert broken.done[-1] == "pay 10", "it has cleaned up"


@pytest.mark.contract("WF-7")
async def test_mended_code_goes_on_where_the_former_code_waited_in_vain(variant: EngineVariant) -> None:
    async with variant.opened() as store:
        broken = Waits("a queue")
        async with asyncio.timeout(MOST_SECONDS), broken.app.node(store):
            await paused_with(await broken.app.start(broken.order, run_id="o-1"))
        mended = Waits()
        async with asyncio.timeout(MOST_SECONDS), mended.app.node(store):
            assert await mended.app.run("o-1").result() == 1
        assert (broken.done, mended.done) == (["pay 0"], ["pay 1", "pay 10"])


@pytest.mark.contract("WF-7")
async def test_a_wait_that_something_may_end_is_no_mistake() -> None:
    app = hf.App("waits")

    @app.workflow
    async def waiting(how: str) -> None:
        if how == "a query":
            hf.on_query("how", lambda: how)
        if how == "an update":
            hf.on_update("how", lambda: how)
        if how == "a task that sleeps":
            task = asyncio.create_task(hf.sleep(10**9))
            task.add_done_callback(lambda _: None)
        await (asyncio.sleep(float("inf")) if how == "for ever" else asyncio.Event().wait())

    async with TestNode(app) as node:
        runs = [await app.start(waiting, how) for how in ("a query", "an update", "a task that sleeps", "for ever")]
        await node.settle()
        assert {await run.status() for run in runs} == {RUNNING}
