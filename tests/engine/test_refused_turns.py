"""A turn that the store refuses, and would refuse for ever, pauses its run; every other run goes on."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.codec import encode_body
from holdfast.core.events import ChildStarted, Event, RunPaused
from holdfast.core.state import RunStatus
from holdfast.limits import Limits
from holdfast.store.port import CommitConflict, Committed, Store, Turn
from holdfast.store.proxy import StoreProxy
from tests.engine.harness import (
    EngineVariant,
    event_types,
    store_with_virtual_time,
    wait_for_event,
    wait_for_status,
)


class Picky(StoreProxy):
    """A store that cannot keep what mentions some text."""

    def __init__(self, inner: Store, *hated: str) -> None:
        super().__init__(inner)
        self.hated = hated
        self.refused = 0

    def _hates(self, event: Event) -> bool:
        return any(text in event.event_type + encode_body(event.data) for text in self.hated)

    async def commit(self, turns: Sequence[Turn]) -> list[Committed | CommitConflict]:
        """Refuse some turns, and commit the others."""
        bad = [any(self._hates(event) for event in turn.events) for turn in turns]
        good = [turn for turn, is_bad in zip(turns, bad, strict=True) if not is_bad]
        answers = iter(await self.inner.commit(good) if good else [])
        self.refused += sum(bad)
        return [CommitConflict("cannot be stored") if is_bad else next(answers) for is_bad in bad]


def talking_app(**options: Any) -> tuple[hf.App, Any]:
    app = hf.App("picky", **options)

    @app.activity
    async def say(word: str) -> str:
        return word.upper()

    @app.workflow
    async def talk(word: str) -> str:
        return await say(word)

    return app, talk


@pytest.mark.contract("MSG-3")
@pytest.mark.contract("INV")
async def test_a_result_that_the_store_refuses_pauses_its_run_and_no_other(variant: EngineVariant) -> None:
    app = hf.App("picky")
    calls: list[str] = []

    @app.activity
    async def say(word: str) -> str:
        calls.append(word)
        return word.upper()

    @app.workflow
    async def talk(word: str) -> str:
        return await say(word)

    async with variant.opened() as inner:
        picky: Any = Picky(inner, "POISON")
        async with variant.node(app, picky):
            bad = await app.start(talk, "poison")
            good = await app.start(talk, "fine")
            assert await good.result() == "FINE"
            await wait_for_status(bad, RunStatus.PAUSED)
            paused = await wait_for_event(bad, "RunPaused")
            assert isinstance(paused.data, RunPaused)
            assert paused.data.error is not None
            assert paused.data.error.code == "TurnRefused"
            assert "cannot be stored" in paused.data.error.message
            assert await bad.status() is RunStatus.PAUSED
            assert await (await app.start(talk, "later")).result() == "LATER"

            picky.hated = ()
            await bad.resume()
            assert await bad.result() == "POISON"
            assert (await event_types(bad)).count("StepCompleted") == 1
        assert calls.count("poison") >= 2  # its first result was lost with the turn


@pytest.mark.contract("MSG-3")
@pytest.mark.contract("MSG-2")
async def test_a_message_that_leads_to_a_refused_turn_is_put_aside_and_not_lost(variant: EngineVariant) -> None:
    app = hf.App("picky")

    @app.workflow
    async def child() -> str:
        await hf.wait_signal("go", bool)
        return "POISON"

    @app.workflow
    async def parent() -> str:
        return await child()

    async with variant.opened() as inner:
        picky: Any = Picky(inner, "ChildCompleted")
        async with variant.node(app, picky):
            run = await app.start(parent)
            started = await wait_for_event(run, "ChildStarted")
            assert isinstance(started.data, ChildStarted)
            await app.run(started.data.child_run_id).signal("go", True)
            await wait_for_status(run, RunStatus.PAUSED)
            assert picky.refused == 1  # it is not tried over and over
            assert (await inner.stats()).messages == 1  # the word of the child is still there


async def until_refused(picky: Picky, times: int) -> None:
    """Wait until so many turns were refused."""
    while picky.refused < times:  # noqa: ASYNC110
        await asyncio.sleep(0.002)


@pytest.mark.contract("MSG-3", "INV")
async def test_a_run_that_cannot_even_be_paused_is_tried_a_few_times_and_left_to_an_operator(
    variant: EngineVariant,
) -> None:
    app, talk = talking_app(limits=Limits(poison_retries=2))
    async with store_with_virtual_time(variant) as (inner, clock):
        picky: Any = Picky(inner, "POISON", "RunPaused")
        async with variant.node(app, picky):
            bad = await app.start(talk, "poison")
            for times, wait_ms in ((1, 1_000), (2, 2_000), (3, 0)):
                await until_refused(picky, 1 + times)  # its turn, and its pause again and again
                for word in ("one", "two", "three"):
                    assert await (await app.start(talk, word)).result() == word.upper()
                assert picky.refused == 1 + times, "it is not tried over and over"
                assert await bad.status() is RunStatus.RUNNING
                clock.advance(ms=wait_ms)
                picky.wakeups.notify()
            while not (letters := await app.dead_letters()):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            [letter] = letters
            assert (letter.record.run_id, letter.record.reason) == (bad.run_id, "retries exhausted")
            assert letter.record.detail.startswith("TurnRefused: a turn of the run was refused")
            clock.advance(ms=3_600_000)
            picky.wakeups.notify()
            assert await (await app.start(talk, "four")).result() == "FOUR"
            assert picky.refused == 4

            picky.hated = ()
            await letter.requeue(actor="ann")
            await wait_for_status(bad, RunStatus.PAUSED)
            await bad.resume()
            assert await bad.result() == "POISON"
            assert (await event_types(bad)).count("StepCompleted") == 1


@pytest.mark.contract("MSG-3", "INV")
async def test_a_run_that_could_not_be_paused_is_paused_once_it_can_by_whichever_node(variant: EngineVariant) -> None:
    app, talk = talking_app()
    async with store_with_virtual_time(variant) as (inner, clock):
        picky: Any = Picky(inner, "POISON", "RunPaused")
        async with variant.node(app, picky):
            run_id = (await app.start(talk, "poison")).run_id
            await until_refused(picky, 2)
        picky.hated = ()
        clock.advance(ms=1_000)
        async with variant.node(app, picky):
            run = app.run(run_id)
            paused = await wait_for_event(run, "RunPaused")
            assert isinstance(paused.data, RunPaused)
            assert paused.data.error is not None
            assert paused.data.error.code == "TurnRefused"
            await run.resume()
            assert await run.result() == "POISON"
            assert await app.dead_letters() == []


@pytest.mark.contract("MSG-3", "MSG-2")
async def test_what_a_run_was_told_is_kept_while_it_cannot_even_be_paused(variant: EngineVariant) -> None:
    app = hf.App("picky")

    @app.workflow
    async def child() -> str:
        return "POISON"

    @app.workflow
    async def parent() -> str:
        return await child()

    async with store_with_virtual_time(variant) as (inner, clock):
        picky: Any = Picky(inner, "ChildCompleted", "RunPaused")
        async with variant.node(app, picky):
            run = await app.start(parent)
            await until_refused(picky, 2)
            picky.hated = ()
            clock.advance(ms=1_000)
            picky.wakeups.notify()
            await wait_for_status(run, RunStatus.PAUSED)
            clock.advance(ms=2_000)
            await run.resume()
            assert await run.result() == "POISON"


@pytest.mark.contract("OWN-1", "MSG-3")
async def test_a_refusal_says_nothing_about_a_run_that_others_have_had_since(variant: EngineVariant) -> None:
    class Interrupted(Picky):
        """A store on which somebody else has each run for a moment, before its node can take it again."""

        async def release(self, node: str, run_ids: Sequence[str] | None = None) -> int:
            freed: int = await self.inner.release(node, run_ids)
            if run_ids is not None:
                self.hated = ()
                await self.inner.renew("other", 10_000)
                while not taken:  # in a bucket a run is left to the node of its shard for two seconds
                    taken.extend(run.head.run_id for run in await self.inner.claim("other", 10))
                await self.inner.release("other")
            return freed

    taken: list[str] = []
    app, talk = talking_app()
    async with variant.opened() as inner:
        picky: Any = Interrupted(inner, "POISON")
        async with variant.node(app, picky):
            run = await app.start(talk, "poison")
            assert await run.result() == "POISON"
            assert taken == [run.run_id]
            assert picky.refused == 1
            assert "RunPaused" not in await event_types(run)
