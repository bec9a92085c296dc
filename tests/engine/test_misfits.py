"""Signals whose payload does not fit the wait for them: they are dead letters with the reason, and the wait goes on."""

import asyncio
from typing import Any

import pytest
from msgspec import Struct

import holdfast as hf
from holdfast.app import App
from holdfast.core import events as e
from holdfast.core.invariants import check_drained
from holdfast.core.messages import AcceptedSignalResult
from holdfast.core.state import PAUSED
from holdfast.engine.inbox.dead_letters import DeadLetterHandle, find_dead_letters
from holdfast.errors import InvalidInput
from holdfast.run import RunHandle
from holdfast.store.port import Store
from holdfast.store.queries import DeadLetterQuery
from holdfast.testing import system_view
from tests.engine.harness import EngineVariant, event_types, store_with_virtual_time, wait_for_event, wait_for_status


class Vote(Struct):
    by: str
    count: int = 1


def app_of(workflow: Any) -> tuple[App, Any]:
    """Return an app with this workflow, which declares nothing."""
    app = hf.App("misfits")
    return app, app.workflow(workflow)


async def letters_of(store: Store, run: RunHandle[Any]) -> list[DeadLetterHandle]:
    """Return the dead letters of a run."""
    return await find_dead_letters(store, DeadLetterQuery(run_id=run.run_id))


async def check_fine(store: Store) -> None:
    """Check that nothing is wrong in the store."""
    assert check_drained(await system_view(store)) == []


@pytest.mark.contract("SIG-10", "SIG-12")
async def test_what_does_not_fit_is_a_dead_letter_and_the_wait_goes_on(variant: EngineVariant) -> None:
    async def waits() -> int:
        vote = await hf.wait_signal("vote", Vote)
        return vote.count

    app, workflow = app_of(waits)
    async with variant.opened() as store:
        async with variant.node(app, store):
            run = await app.start(workflow)
            sent = [await run.signal("vote", payload) for payload in ({"by": "ann", "count": "secret"}, 7, {})]
            fit = await run.signal("vote", {"by": "bob", "count": 3})
            assert await run.result() == 3
            letters = await letters_of(store, run)
            assert [letter.record.reason for letter in letters] == ["payload does not fit"] * 3
            assert sorted(letter.record.detail.partition("payload")[2] for letter in letters) == [
                ".count: Expected `int`, got `str`",
                ": Expected `object`, got `int`",
                ": Object missing required field `by`",
            ]
            assert "secret" not in str([letter.record.detail for letter in letters])
            receipts = [await run.receipt(one) for one in sent]
            assert [receipt.status for receipt in receipts] == ["dead-lettered"] * 3
            assert receipts[0].reason is not None
            assert receipts[0].reason.startswith("payload does not fit: signal 'vote', ")
            assert (await run.receipt(fit)).status == "consumed"
            assert await run.mailbox() == []
            kinds = await event_types(run)
            assert (kinds.count("SignalDeadLettered"), kinds.count("SignalReceived")) == (3, 1)
        await check_fine(store)


@pytest.mark.contract("SIG-10")
async def test_the_author_may_ask_for_the_error(variant: EngineVariant) -> None:
    async def waits() -> list[Any]:
        found: list[Any] = []
        for handler in (None, lambda number: number + 1):
            try:
                found.append(await hf.wait_signal("go", int, handler=handler, on_misfit="raise"))
            except InvalidInput:
                found.append("does not fit")
        try:
            await anext(hf.signals("go", int, on_misfit="raise"))
        except InvalidInput:
            found.append("does not fit")
        return found

    app, workflow = app_of(waits)
    async with variant.opened() as store:
        async with variant.node(app, store):
            run = await app.start(workflow)
            sent = [await run.signal("go", "word") for _ in range(3)]
            assert await run.result() == ["does not fit"] * 3
            assert [(await run.receipt(one)).status for one in sent] == ["consumed"] * 3
            assert await letters_of(store, run) == []
        await check_fine(store)


@pytest.mark.contract("SIG-10")
async def test_what_becomes_of_a_misfit_is_one_of_two(variant: EngineVariant) -> None:
    async def waits() -> list[str]:
        found = []
        waits: list[Any] = [hf.wait_signal, hf.signals]
        for wait in waits:
            try:
                await wait("go", int, on_misfit="ignore")
            except InvalidInput as problem:
                found.append(problem.message)
        return found

    app, workflow = app_of(waits)
    async with variant.node(app):
        run = await app.start(workflow)
        assert await run.result() == ["on_misfit is one of dead-letter, raise, not 'ignore'"] * 2


@pytest.mark.contract("SIG-10", "SIG-4")
async def test_no_handler_is_called_with_what_does_not_fit(variant: EngineVariant) -> None:
    called: list[int] = []

    def double(number: int) -> int:
        called.append(number)
        return 2 * number

    async def waits() -> Any:
        return await hf.wait_signal("go", int, handler=double)

    app, workflow = app_of(waits)
    async with variant.opened() as store:
        async with variant.node(app, store):
            run = await app.start(workflow)
            await run.signal("go", "word")
            await run.signal("go", 21)
            assert await run.result() == 42
            assert called == [21]
        await check_fine(store)


@pytest.mark.contract("SIG-10", "SIG-1")
async def test_the_others_keep_their_order_over_rotations(variant: EngineVariant) -> None:
    async def counts(found: list[int] | None = None) -> list[int]:
        found = found or []
        async for number in hf.signals("go", int):
            found.append(number)
            if len(found) == 20:
                break
            if len(found) % 5 == 0:
                hf.continue_as_new(found)
        return found

    app, workflow = app_of(counts)
    async with variant.opened() as store:
        async with variant.node(app, store):
            run = await app.start(workflow)
            items: list[Any] = []
            for number in range(20):
                items += [
                    {"run_id": run.run_id, "name": "go", "payload": payload} for payload in (f"no {number}", number)
                ]
            for answer in await app.signal_many(items):
                assert isinstance(answer, AcceptedSignalResult), answer
            assert await run.result() == list(range(20))
            assert 19 <= len(await letters_of(store, run)) <= 20
        await check_fine(store)


@pytest.mark.contract("SIG-10", "SIG-9")
async def test_each_of_several_waits_has_its_own_type(variant: EngineVariant) -> None:
    async def waits() -> list[Any]:
        first = hf.wait_signal("go", int)
        second = hf.wait_signal("go", str)
        return list(await asyncio.gather(first, second))

    app, workflow = app_of(waits)
    async with variant.opened() as store:
        async with variant.node(app, store):
            run = await app.start(workflow)
            await wait_for_event(run, "SignalWaiting", times=2)
            await run.signal("go", 7, step_id="go#2")
            await run.signal("go", "second", step_id="go#2")
            await run.signal("go", "the oldest wait is for a number")
            await run.signal("go", 1)
            assert await run.result() == [1, "second"]
            assert len(await letters_of(store, run)) == 2
        await check_fine(store)


@pytest.mark.contract("SIG-10", "SIG-8")
async def test_a_wait_times_out_although_something_came_that_did_not_fit(variant: EngineVariant) -> None:
    async def waits() -> Any:
        return await hf.wait_signal("go", int, timeout=60, on_timeout=lambda: "nobody")

    app, workflow = app_of(waits)
    async with store_with_virtual_time(variant) as (store, clock):
        async with variant.node(app, store):
            run = await app.start(workflow)
            await wait_for_event(run, "SignalWaiting")
            await run.signal("go", "word")
            await wait_for_event(run, "SignalDeadLettered")
        clock.advance(ms=61_000)
        async with variant.node(app, store):
            assert await app.run(run.run_id).result() == "nobody"
        await check_fine(store)


@pytest.mark.contract("SIG-10", "SIG-13")
async def test_a_paused_run_looks_at_it_when_it_goes_on(variant: EngineVariant) -> None:
    async def waits() -> int:
        return await hf.wait_signal("go", int)

    app, workflow = app_of(waits)
    async with variant.opened() as store:
        async with variant.node(app, store):
            run = await app.start(workflow)
            await wait_for_event(run, "SignalWaiting")
            await run.pause()
            await wait_for_status(run, PAUSED)
            sent = await run.signal("go", "word")
            assert (await run.receipt(sent)).status == "accepted"
            await run.resume()
            await wait_for_event(run, "SignalDeadLettered")
            await run.signal("go", 1)
            assert await run.result() == 1
        await check_fine(store)


# --- dead letters are settled


async def two_waits() -> list[Any]:
    """Wait for a number, and then for a word."""
    return [await hf.wait_signal("go", int), await hf.wait_signal("go", str)]


@pytest.mark.contract("SIG-10", "SIG-12", "MSG-3")
async def test_a_letter_that_is_requeued_is_taken_by_a_wait_that_it_fits(variant: EngineVariant) -> None:
    app, workflow = app_of(two_waits)
    async with variant.opened() as store:
        async with variant.node(app, store):
            run = await app.start(workflow)
            sent = await run.signal("go", "word", signal_id="a")
            await run.signal("go", 1)
            await wait_for_event(run, "SignalWaiting", times=2)
            [letter] = await letters_of(store, run)
            await letter.requeue(actor="ann")
            assert await run.result() == [1, "word"]
            receipt = await run.receipt(sent)
            taken = [event for event in await run.events() if isinstance(event.data, e.SignalReceived)][-1]
            assert (receipt.status, receipt.consumed_at_event) == ("consumed", taken.run_seq)
            assert await letters_of(store, run) == []
        await check_fine(store)


@pytest.mark.contract("SIG-10", "SIG-12", "MSG-3")
async def test_a_letter_that_is_requeued_and_does_not_fit_is_one_again_and_can_be_dropped(
    variant: EngineVariant,
) -> None:
    app, workflow = app_of(two_waits)
    async with variant.opened() as store:
        async with variant.node(app, store):
            run = await app.start(workflow)
            sent = await run.signal("go", [7])
            await wait_for_event(run, "SignalDeadLettered")
            for _ in range(3):
                [letter] = await letters_of(store, run)
                await letter.requeue()
                while not (again := await letters_of(store, run)):  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
                assert again[0].record.reason == "payload does not fit"
                assert (await run.receipt(sent)).status == "dead-lettered"
            [letter] = await letters_of(store, run)
            await letter.drop()
            assert (await run.receipt(sent)).status == "dead-lettered"
            await run.signal("go", 1)
            await run.signal("go", "word")
            assert await run.result() == [1, "word"]
        await check_fine(store)


@pytest.mark.contract("SIG-10", "WF-3")
async def test_new_code_takes_what_the_old_could_not(variant: EngineVariant) -> None:
    async def waits() -> Any:
        return await hf.wait_signal("go", int)

    old, workflow = app_of(waits)
    async with variant.opened() as store:
        async with variant.node(old, store):
            run = await old.start(workflow)
            await run.signal("go", "word")
            await wait_for_event(run, "SignalDeadLettered")
        new = hf.App("misfits")

        @new.workflow(name="waits")
        async def mended() -> Any:
            return await hf.wait_signal("go", int | str)

        async with variant.node(new, store):
            [letter] = await letters_of(store, run)
            await letter.requeue()
            assert await new.run(run.run_id).result() == "word"
        await check_fine(store)
