"""Commands and updates always carry an id, so that a store whose answer was lost can repeat them harmlessly."""

import asyncio
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.messages import SignalRequest
from holdfast.store.memory import MemoryStore
from tests.engine.harness import wait_for_event


class LosesAnswers(MemoryStore):
    """Delivers everything twice, as a store does that did not hear whether the first time was done."""

    async def deliver(self, items: Any) -> Any:
        first = await super().deliver(items)
        repeated = [item for item in items if isinstance(item, SignalRequest) and item.signal_id is not None]
        assert len(repeated) == len(items), "what has no id cannot be repeated"
        await super().deliver(repeated)
        return first


@pytest.mark.contract("SIG-13", "SIG-5")
async def test_a_command_or_an_update_without_an_id_is_decided_once_though_it_is_delivered_twice() -> None:
    app = hf.App("orders")

    @app.workflow
    async def order() -> None:
        words: list[str] = []

        def say(word: str) -> int:
            words.append(word)
            return len(words)

        hf.on_update("say", say)
        await hf.wait_signal("go")

    async with asyncio.timeout(60), app.node(LosesAnswers()):
        run = await app.start(order)
        await wait_for_event(run, "SignalWaiting")
        assert await run.update("say", word="x") == 1
        await run.pause(wait=True)
        await run.resume(wait=True)
        await run.cancel(wait=True)
        await wait_for_event(run, "RunCancelled")
        verdicts = [event.data.name for event in await run.events() if event.event_type == "SignalAccepted"]  # type: ignore[attr-defined]
        assert verdicts == ["PAUSE", "RESUME", "CANCEL"]
