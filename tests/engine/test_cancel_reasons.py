"""The reason of a cancel reaches everything that waits: the program, children, parents and callers."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

import holdfast as hf
from holdfast.client import Client
from holdfast.errors import ChildFailed, RunCancelled
from tests.engine.harness import EngineVariant, wait_for_event

pytestmark = pytest.mark.contract("WF-4")

REASON = "it rains"


async def test_the_reason_reaches_a_child_and_what_it_cleans_up(variant: EngineVariant) -> None:
    app = hf.App("shop")
    heard: list[str] = []

    @app.workflow
    async def ship() -> None:
        try:
            await hf.wait_signal("never")
        except asyncio.CancelledError as problem:
            heard.append(str(problem))
            raise

    @app.workflow
    async def order() -> None:
        await ship()

    async with variant.node(app):
        run = await app.start(order, run_id="o-1")
        await wait_for_event(app.run("o-1/ship"), "SignalWaiting")
        await run.cancel(REASON)
        with pytest.raises(RunCancelled, match=REASON) as raised:
            await run.result()
        assert raised.value.details["reason"] == REASON
        with pytest.raises(RunCancelled, match=f"the parent was cancelled: {REASON}"):
            await app.run("o-1/ship").result()
        with pytest.raises(RunCancelled, match=REASON) as raised:
            await Client(app).result("o-1")
        assert raised.value.details["reason"] == REASON
    assert heard[-1] == f"the parent was cancelled: {REASON}"


async def test_the_reason_outlives_a_rotation_and_reaches_the_parent(variant: EngineVariant) -> None:
    app = hf.App("shop")
    heard: list[str] = []

    @app.workflow
    async def ship(number: int) -> None:
        try:
            await hf.wait_signal("never")
        except asyncio.CancelledError as problem:
            heard.append(str(problem))
            if number == 0:
                hf.continue_as_new(1)
            raise

    @app.workflow
    async def order() -> Any:
        try:
            await ship(0)
        except ChildFailed as problem:
            return problem.info.message
        return "shipped"

    async with variant.node(app):
        run = await app.start(order, run_id="o-1")
        child = app.run("o-1/ship")
        await wait_for_event(child, "SignalWaiting")
        await child.cancel(REASON)
        assert REASON in await run.result()
    assert set(heard) == {REASON}


async def test_a_flow_that_is_cancelled_names_the_reason(variant: EngineVariant) -> None:
    app = hf.App("shop")

    @dataclass
    class State:
        text: str = ""

    flow: Any = app.flow("patient", State, hf.Signal("never", str, on_receive=lambda state, payload: state))
    async with variant.node(app):
        run = await app.start(flow, State())
        await wait_for_event(run, "SignalWaiting")
        await run.cancel(REASON)
        with pytest.raises(RunCancelled, match=REASON):
            await run.result()
