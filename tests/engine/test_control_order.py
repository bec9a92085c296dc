"""Operators' commands are decided before what else waits, so that a pause holds it."""

import asyncio

import pytest

import holdfast as hf
from holdfast.core.messages import SignalRequest, control_request
from holdfast.store.port import Accepted


@pytest.mark.contract("SIG-13")
async def test_a_pause_that_waits_with_a_signal_holds_the_program_before_it_takes_the_signal() -> None:
    app = hf.App("test")
    store = hf.MemoryStore()

    @app.workflow
    async def waits() -> str:
        answer: str = await hf.wait_signal("go", str)
        return answer

    async with asyncio.timeout(60), app.node(store):
        run = await app.start(waits)
        bell = store.wakeups.listen()
        while (await run.snapshot()).steps == ():
            await bell.wait(1.0)
        answers = await store.deliver(
            [SignalRequest(run_id=run.run_id, name="go"), control_request(run.run_id, "PAUSE", "ann")]
        )
        assert all(isinstance(answer, Accepted) for answer in answers)
        while (await run.snapshot()).status != "PAUSED":
            await bell.wait(1.0)
        types = [event.event_type for event in await run.events()]
        assert types[-2:] == ["SignalAccepted", "RunPaused"]
        await run.cancel()
