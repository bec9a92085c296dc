"""Run ids that are taken: what a start returns, refuses, restarts or replaces, and how that meets everything else."""

import asyncio
import sqlite3
from datetime import timedelta
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.keys import event_key
from holdfast.core.state import RunStatus
from holdfast.engine.inbox.authorization import ControlRequest, Verdict
from holdfast.errors import Conflict, InvalidInput, NotPermitted, Overloaded, RunCancelled, RunTerminal, StartRefused
from tests.engine.harness import EngineVariant, wait_for_event, wait_for_status

pytestmark = pytest.mark.contract("QUE-5")


def cart_app(**options: Any) -> tuple[hf.App, Any]:
    """Return an app with an entity: a cart that gets items until it is checked out."""
    app = hf.App("shop", **options)

    @app.workflow
    async def cart(user: str) -> list[str]:
        items: list[str] = []
        while (item := await hf.wait_signal("add", str)) != "check out":
            items.append(item)
        return [user, *items]

    return app, cart


def adding(item: str, signal_id: str | None = None) -> Any:
    """Return a first signal."""
    return {"name": "add", "payload": item, "signal_id": signal_id}


async def test_every_policy_on_a_free_a_running_and_a_finished_id(variant: EngineVariant) -> None:
    app, cart = cart_app()
    async with variant.node(app):
        first = await app.start(cart, "ann", run_id="c", reuse="reject")
        assert (first.run_id, first.is_reused) == ("c", False)
        await wait_for_event(first, "SignalWaiting")
        with pytest.raises(Conflict, match="there is a run with the id 'c', which is RUNNING"):
            await app.start(cart, "ann", run_id="c", reuse="reject")
        same = await app.start(cart, "someone else", run_id="c", reuse="return")
        assert (same.run_id, same.is_reused) == ("c", True)
        await first.signal("add", "check out")
        assert await same.result() == ["ann"]
        assert (await app.start(cart, "bob", run_id="c", reuse="return")).is_reused
        with pytest.raises(Conflict, match="COMPLETED"):
            await app.start(cart, "bob", run_id="c", reuse="reject")
        second = await app.start(cart, "bob", run_id="c", reuse="restart-if-finished")
        assert (second.run_id, second.is_reused) == ("c~000002", False)
        third = await app.start(cart, "eve", run_id="c", reuse="terminate-and-restart", request_id="r-3")
        assert third.run_id == "c~000003"
        with pytest.raises(RunCancelled, match="replaced by run c~000003"):
            await second.result()
        await third.signal("add", "check out")
        assert await third.result() == ["eve"]
        again = await app.start(cart, "eve", run_id="c", reuse="terminate-and-restart", request_id="r-3")
        assert (again.run_id, again.is_reused) == ("c~000003", False)
        for number, run in enumerate((first, second, third)):
            [queued] = [event for event in await run.events() if event.event_type == "RunQueued"]
            run_id = "c" if number == 0 else f"c~00000{number + 1}"
            assert queued.idempotency_key == event_key(run_id, "1", 0, "RunQueued", "1")


async def test_a_signal_with_start_reaches_the_running_run_or_the_next(variant: EngineVariant) -> None:
    app, cart = cart_app()

    async def add(item: str, request: str) -> Any:
        return await app.start(
            cart,
            "ann",
            run_id="c",
            reuse="restart-if-finished",
            request_id=request,
            with_signal=adding(item, f"of {request}"),
        )

    async with variant.node(app):
        runs = [await add(item, f"r-{item}") for item in ("milk", "tea", "check out")]
        assert [run.run_id for run in runs] == ["c"] * 3
        assert await runs[0].result() == ["ann", "milk", "tea"]
        assert (await add("check out", "r-check out")).run_id == "c"  # the same request: its signal was accepted
        assert (await add("milk", "r-milk")).run_id == "c"
        later = await add("rice", "r-rice")
        assert later.run_id == "c~000002"
        await later.signal("add", "check out")
        assert await later.result() == ["ann", "rice"]
        with pytest.raises(RunTerminal):
            await app.start(cart, "ann", run_id="c", reuse="return", with_signal=adding("salt"))


async def test_many_at_once_make_one_run_and_lose_no_signal(variant: EngineVariant) -> None:
    app, cart = cart_app()
    async with variant.node(app):
        await (await app.start(cart, "ann", run_id="c", with_signal=adding("check out"))).result()
        starts = [
            app.start(cart, "ann", run_id="c", reuse="restart-if-finished", with_signal=adding(f"i{number}"))
            for number in range(8)
        ]
        runs = await asyncio.gather(*starts)
        assert {run.run_id for run in runs} == {"c~000002"}
        assert sorted(run.is_reused for run in runs) == [False] + [True] * 7
        await runs[0].signal("add", "check out")
        assert sorted((await runs[0].result())[1:]) == [f"i{number}" for number in range(8)]


async def test_the_authoriser_decides_whether_a_run_may_be_replaced() -> None:
    async def nobody_stops(request: ControlRequest) -> Verdict:
        return "ask bob" if request.command == "EMERGENCY_STOP" else True

    app, cart = cart_app(authoriser=nobody_stops)
    async with asyncio.timeout(60), app.node("memory://"):
        run = await app.start(cart, "ann", run_id="c")
        with pytest.raises(NotPermitted, match="ask bob"):
            await app.start(cart, "ann", run_id="c", reuse="terminate-and-restart")
        await wait_for_event(run, "SignalRejected")
        assert await run.status() == RunStatus.RUNNING
        with pytest.raises(hf.errors.NotFound):
            await app.run("c~000002").status()


async def test_a_replaced_run_makes_room_and_a_refused_start_harms_nothing() -> None:
    app = hf.App("shop")

    @app.workflow(at_once=1, overload="reject")
    async def strict() -> None:
        await hf.wait_signal("end")

    @app.workflow(at_once=1)
    async def patient() -> str:
        await hf.wait_signal("end")
        return "done"

    async with asyncio.timeout(60), app.node("memory://"):
        held = await app.start(strict, run_id="s")
        await wait_for_event(held, "SignalWaiting")
        with pytest.raises(Overloaded):
            await app.start(strict, run_id="s", reuse="terminate-and-restart")
        assert await held.status() == RunStatus.RUNNING
        old = await app.start(patient, run_id="p")
        await wait_for_event(old, "SignalWaiting")
        new = await app.start(patient, run_id="p", reuse="terminate-and-restart")
        await new.signal("end")
        assert await new.result() == "done"
        assert await old.status() == RunStatus.CANCELLED


async def test_values_of_restarts_are_encrypted_for_their_own_run(variant: EngineVariant) -> None:
    app, cart = cart_app(codecs=[hf.Encryption({"k1": bytes(32)})])
    async with variant.node(app):
        for run_id in ("c", "c~000002"):
            for item in ("milk", "check out"):
                run = await app.start(
                    cart, "ann", run_id="c", reuse="restart-if-finished", with_signal=adding(item, f"{run_id} {item}")
                )
                assert run.run_id == run_id
            assert await run.result() == ["ann", "milk"]
        assert (await app.start(cart, "ann", run_id="c", reuse="terminate-and-restart")).run_id == "c~000003"


async def test_a_run_is_started_later_or_after_approval_as_any_other(variant: EngineVariant) -> None:
    app, cart = cart_app()

    @app.workflow(requires_approval=True)
    async def careful() -> str:
        return "approved"

    async with variant.node(app):
        for run_id in ("a", "a~000002"):
            run = await app.start(careful, run_id="a", reuse="restart-if-finished")
            assert run.run_id == run_id
            assert await run.status() == RunStatus.PENDING
            await run.approve(actor="ann")
            assert await run.result() == "approved"
        await (await app.start(cart, "ann", run_id="c", with_signal=adding("check out"))).result()
        later = await app.start(cart, "ann", run_id="c", reuse="restart-if-finished", after=timedelta(hours=1))
        assert await later.status() == RunStatus.PENDING
        assert (await app.start(cart, "ann", run_id="c", reuse="restart-if-finished")).run_id == later.run_id
        await app.start(cart, "ann", run_id="c", reuse="terminate-and-restart")
        await wait_for_status(later, RunStatus.CANCELLED)


async def test_a_workflow_starts_a_run_once_whatever_its_id(variant: EngineVariant) -> None:
    app, cart = cart_app()

    @app.workflow
    async def shop(policy: Any) -> str:
        try:
            run = await hf.start(cart, "ann", run_id="c", reuse=policy)
        except StartRefused as problem:
            return str(problem.info.code)
        return run.run_id

    async with variant.node(app):
        assert await (await app.start(shop, "restart-if-finished")).result() == "c"
        assert await (await app.start(shop, "restart-if-finished")).result() == "c"
        assert await (await app.start(shop, "terminate-and-restart")).result() == "c~000002"
        assert await (await app.start(shop, "reject")).result() == "Conflict"


async def test_a_transaction_of_the_callers_decides_about_it_all(tmp_path: Any) -> None:
    app, cart = cart_app()
    path = tmp_path / "runs.db"
    async with asyncio.timeout(60), app.node(f"sqlite:///{path}"):
        old = await app.start(cart, "ann", run_id="c")
        await wait_for_event(old, "SignalWaiting")
        connection = sqlite3.connect(path, isolation_level=None)
        for ends_with in ("ROLLBACK", "COMMIT"):
            assert await old.status() == RunStatus.RUNNING
            connection.execute("BEGIN IMMEDIATE")
            new = await app.start(cart, "bob", run_id="c", reuse="terminate-and-restart", connection=connection)
            assert new.run_id == "c~000002"
            connection.execute(ends_with)
        connection.close()
        await wait_for_status(old, RunStatus.CANCELLED)
        await new.signal("add", "check out")
        assert await new.result() == ["bob"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"reuse": "return"}, "give one"),
        ({"run_id": "c", "reuse": "perhaps"}, "reuse is one of return, reject"),
        ({"run_id": "c~000002", "reuse": "return"}, "which is for restarts"),
        ({"run_id": "c~000002"}, "which is for restarts"),
        ({"run_id": "x" * 250, "reuse": "return"}, "no room for the number"),
    ],
)
async def test_what_cannot_be_asked_is_refused(options: Any, problem: str) -> None:
    app, cart = cart_app()
    async with app.connect("memory://"):
        with pytest.raises(InvalidInput, match=problem):
            await app.start(cart, "ann", **options)
