"""A turn that the store refuses, and would refuse for ever, pauses its run; every other run goes on."""

from collections.abc import Sequence
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.codec import encode_body
from holdfast.core.events import ChildStarted, Event, RunPaused
from holdfast.core.state import RunStatus
from holdfast.store.port import CommitConflict, Committed, Store, Turn
from tests.engine.place import Place, types, until_event, until_status


class Picky:
    """A store that cannot keep what mentions some text."""

    def __init__(self, inner: Store, hated: str) -> None:
        self._inner = inner
        self.hated = hated
        self.refused = 0

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._inner, verb)

    def _hates(self, event: Event) -> bool:
        return bool(self.hated) and self.hated in event.event_type + encode_body(event.data)

    async def commit(self, turns: Sequence[Turn]) -> list[Committed | CommitConflict]:
        """Refuse some turns, and commit the others."""
        bad = [any(self._hates(event) for event in turn.events) for turn in turns]
        good = [turn for turn, is_bad in zip(turns, bad, strict=True) if not is_bad]
        answers = iter(await self._inner.commit(good) if good else [])
        self.refused += sum(bad)
        return [CommitConflict("cannot be stored") if is_bad else next(answers) for is_bad in bad]


@pytest.mark.contract("MSG-3")
@pytest.mark.contract("INV")
async def test_a_result_that_the_store_refuses_pauses_its_run_and_no_other(place: Place) -> None:
    app = hf.App("picky")
    calls: list[str] = []

    @app.activity
    async def say(word: str) -> str:
        calls.append(word)
        return word.upper()

    @app.workflow
    async def talk(word: str) -> str:
        return await say(word)

    async with place.opened() as inner:
        picky: Any = Picky(inner, "POISON")
        async with place.node(app, picky):
            bad = await app.start(talk, "poison")
            good = await app.start(talk, "fine")
            assert await good.result() == "FINE"
            await until_status(bad, RunStatus.PAUSED)
            paused = await until_event(bad, "RunPaused")
            assert isinstance(paused.data, RunPaused)
            assert paused.data.error is not None
            assert paused.data.error.code == "TurnRefused"
            assert "cannot be stored" in paused.data.error.message
            assert await bad.status() is RunStatus.PAUSED
            assert await (await app.start(talk, "later")).result() == "LATER"

            picky.hated = ""
            await bad.resume()
            assert await bad.result() == "POISON"
            assert (await types(bad)).count("StepCompleted") == 1
        assert calls.count("poison") >= 2  # its first result was lost with the turn


@pytest.mark.contract("MSG-3")
@pytest.mark.contract("MSG-2")
async def test_a_message_that_leads_to_a_refused_turn_is_put_aside_and_not_lost(place: Place) -> None:
    app = hf.App("picky")

    @app.workflow
    async def child() -> str:
        await hf.wait_signal("go", bool)
        return "POISON"

    @app.workflow
    async def parent() -> str:
        return await child()

    async with place.opened() as inner:
        picky: Any = Picky(inner, "ChildCompleted")
        async with place.node(app, picky):
            run = await app.start(parent)
            started = await until_event(run, "ChildStarted")
            assert isinstance(started.data, ChildStarted)
            await app.run(started.data.child_run_id).signal("go", True)
            await until_status(run, RunStatus.PAUSED)
            assert picky.refused == 1  # it is not tried over and over
            assert (await inner.stats()).messages == 1  # the word of the child is still there
