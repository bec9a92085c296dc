"""Tests of the crash explorer: what it finds in naive workflows, and that it leaves careful ones alone."""

import asyncio
import random
from datetime import timedelta

import httpx
import pytest

import holdfast as hf
from holdfast.errors import ActivityFailed, InvalidInput
from holdfast.run import RunHandle
from holdfast.testing import explore


class Bank:
    """An outside system that knows what was charged."""

    def __init__(self) -> None:
        self.charges: list[str] = []

    def reset(self) -> None:
        """Forget everything."""
        self.charges.clear()


@pytest.mark.contract("ACT-2")
def test_it_finds_a_charge_that_a_crash_doubles_and_a_key_with_a_verifier_mends_it() -> None:
    bank = Bank()
    app = hf.App("shop")

    async def look(order_id: str) -> hf.Completed | hf.NotCompleted:
        return hf.Completed("receipt") if order_id in bank.charges else hf.NotCompleted()

    @app.activity
    async def charge(order_id: str) -> str:
        bank.charges.append(order_id)
        return "receipt"

    @app.activity(idempotency_key=lambda order_id: order_id, verify=look)
    async def charge_once(order_id: str) -> str:
        bank.charges.append(order_id)
        return "receipt"

    @app.workflow
    async def naive(order_id: str) -> str:
        return await charge(order_id)

    @app.workflow
    async def careful(order_id: str) -> str:
        return await charge_once(order_id)

    found = explore(app, naive, "o-1", before=bank.reset, check=lambda: list(bank.charges))
    assert {finding.point for finding in found.findings} >= {"after charge #1"}
    assert "charge ran twice, and without a crash once" in found.table()
    with pytest.raises(AssertionError, match="a crash changes"):
        found.assert_clean()
    assert explore(app, naive, "o-1", repeatable=[charge]).findings == []
    explore(app, careful, "o-1", before=bank.reset, check=lambda: list(bank.charges)).assert_clean()
    assert len(found.plays) >= 5


@pytest.mark.contract("WF-2")
@pytest.mark.parametrize("kind", ["function", "lambda of an async function"])
def test_a_verifier_that_is_not_async_is_asked_in_virtual_time(kind: str) -> None:
    app, shipped = hf.App("shop"), list[str]()

    def find(order_id: str) -> hf.Completed | hf.NotCompleted:
        return hf.Completed("parcel") if order_id in shipped else hf.NotCompleted()

    async def find_async(order_id: str) -> hf.Completed | hf.NotCompleted:
        return find(order_id)

    verify = find if kind == "function" else lambda order_id: find_async(order_id)

    @app.activity(idempotency_key=lambda order_id: f"ship-{order_id}", verify=verify)
    async def ship(order_id: str) -> str:
        shipped.append(order_id)
        return "parcel"

    @app.workflow
    async def order(order_id: str) -> str:
        return await ship(order_id)

    explore(app, order, "o-1", before=shipped.clear, check=lambda: list(shipped)).assert_clean()
    assert app.registry.activities["ship"].verifier.function is verify  # type: ignore[union-attr]


def test_it_finds_code_that_decides_differently_the_second_time() -> None:
    app = hf.App("shop")
    drawn = iter(range(1_000))

    @app.activity
    async def left() -> str:
        return "left"

    @app.activity
    async def right() -> str:
        return "right"

    @app.workflow
    async def drifting() -> str:
        chosen = left if next(drawn) % 2 == 0 else right
        return await chosen()

    problems = [finding.problem for finding in explore(app, drifting).findings]
    assert any("PAUSED" in problem for problem in problems), problems


@pytest.mark.contract("WF-4")
def test_a_saga_undoes_what_it_did_wherever_it_crashes() -> None:
    app = hf.App("shop")

    @app.activity
    async def book(what: str) -> str:
        return what

    @app.activity
    def cancel(what: str) -> None: ...

    @app.activity(retry=hf.Retry(max_attempts=2))
    async def pay() -> None:
        raise ConnectionError("the bank is closed")

    @app.workflow
    async def trip() -> str:
        try:
            await book("flight")
            await book("hotel")
            await pay()
        except ActivityFailed:
            await cancel("hotel")
            await cancel("flight")
            return "undone"
        return "booked"

    found = explore(app, trip, repeatable=[book, cancel, pay])
    assert found.plays[0].calls == {"book": 2, "pay": 2, "cancel": 2}
    assert found.plays[0].ending == "result 'undone'"
    assert [play.ending for play in found.plays] == ["result 'undone'"] * len(found.plays)
    assert all(play.calls["cancel"] >= 2 for play in found.plays)


def test_signals_are_sent_from_outside_and_days_pass_at_once() -> None:
    app = hf.App("shop")

    @app.workflow
    async def patient() -> str:
        await hf.sleep(timedelta(days=20))
        return await hf.wait_signal("approval", str, timeout=timedelta(days=20))

    async def drive(run: RunHandle[str]) -> None:
        await run.signal("approval", "yes", signal_id="click")

    found = explore(app, patient, drive=drive)
    found.assert_clean()
    assert found.plays[0].ending == "result 'yes'"
    assert len(found.plays) > 4


def test_a_run_that_never_ends_is_a_finding_of_its_first_play() -> None:
    app = hf.App("shop")

    @app.workflow
    async def waits() -> None:
        await hf.wait_signal("never", str)

    found = explore(app, waits)
    assert found.plays[0].ending == "no end: it waits for the signal 'never' (step 'never')"
    with pytest.raises(AssertionError, match=r"does not end even without a crash.*'never'.*`drive`"):
        found.assert_clean()


def test_what_a_run_waits_for_includes_the_people_who_are_asked() -> None:
    app = hf.App("shop")

    @app.workflow
    async def asks() -> None:
        cancelled = asyncio.create_task(hf.wait_signal("cancel", str))
        await hf.task("approve", bool)
        cancelled.cancel()

    assert (
        explore(app, asks)
        .plays[0]
        .ending.endswith("the signal 'cancel' (step 'cancel') and the task 'approve' (step 'approve')")
    )


@pytest.mark.parametrize("where", ["activity", "verifier"])
def test_the_network_is_refused_at_once_and_the_error_says_what_to_do(where: str) -> None:
    app = hf.App("shop")

    async def reach() -> str:
        async with httpx.AsyncClient() as client:
            return (await client.get("http://bank.example/")).text

    async def look() -> hf.NotCompleted:
        await reach()
        return hf.NotCompleted()

    @app.activity(idempotency_key=lambda: "k", verify=look)
    async def charge() -> str:
        if where == "activity":
            return await reach()
        raise ConnectionError("the answer was lost")

    @app.workflow
    async def pay() -> str:
        return await charge()

    with pytest.raises(InvalidInput, match=r"explore has no network.*an object that the test replaces"):
        explore(app, pay)


def test_crashes_that_were_asked_for_are_no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    app = hf.App("shop")

    @app.workflow
    async def wait() -> int:
        await hf.sleep(1)
        return 1

    assert len(explore(app, wait).plays) > 1
    assert caplog.messages == []


def test_functions_are_as_before_afterwards() -> None:
    app = hf.App("shop")

    @app.activity
    def draw() -> int:
        return random.randint(1, 6)

    @app.workflow
    async def game() -> int:
        return await draw()

    function = draw.definition.function
    explore(app, game)
    assert draw.definition.function is function
    assert not draw.definition.is_async


async def test_it_is_refused_where_a_loop_is_running() -> None:
    app = hf.App("shop")

    @app.workflow
    async def nothing() -> None: ...

    with pytest.raises(InvalidInput, match="event loop of its own"):
        explore(app, nothing)
