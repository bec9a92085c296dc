"""Values have a bound: whoever gives one that is too large is told, there, and nothing else is harmed."""

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.state import RunStatus
from holdfast.errors import ActivityFailed, PayloadTooLarge, RunFailed, UpdateFailed
from holdfast.limits import Limits
from holdfast.store.port import RunQuery
from tests.engine.harness import EngineVariant, wait_for_status

MOST = 1_000
BIG = "x" * MOST  # with its quotes it is over
LIMITS = Limits(value_bytes=MOST)


@pytest.mark.contract("API-2")
async def test_an_input_that_is_too_large_is_refused_at_the_start(variant: EngineVariant) -> None:
    app = hf.App("shop", limits=LIMITS)

    @app.workflow
    async def order(text: str) -> int:
        return len(text)

    async with variant.opened() as store, variant.node(app, store):
        with pytest.raises(PayloadTooLarge) as refused:
            await app.start(order, BIG)
        assert refused.value.details["limit_bytes"] == MOST
        assert await store.find(RunQuery()) == []
        assert await (await app.start(order, BIG[:900])).result() == 900


@pytest.mark.contract("ACT-1")
@pytest.mark.parametrize("queue", ["", "far"])
@pytest.mark.parametrize("what", ["result", "progress"])
async def test_a_result_or_progress_that_is_too_large_fails_the_activity_once(
    variant: EngineVariant, queue: str, what: str
) -> None:
    app, attempts = hf.App("shop", limits=LIMITS), list[int]()

    @app.activity(queue=queue, retry=hf.Retry(max_attempts=5, initial_ms=1))
    async def pack() -> str:
        attempts.append(hf.activity_context().attempt)
        if what == "progress":
            hf.activity_context().heartbeat(BIG)
        return BIG

    @app.workflow
    async def order() -> str:
        try:
            return await pack()
        except ActivityFailed as failure:
            return f"{failure.info.code}: {failure.info.message}"

    async with variant.node(app, queues=("far",)):
        told = await (await app.start(order)).result()
    assert told.startswith(f"PayloadTooLarge: the {what} of activity 'pack' has 1002 bytes")
    assert attempts == [1]


@pytest.mark.contract("WF-2", "WF-7")
async def test_what_a_workflow_gives_away_is_refused_where_it_is_given(variant: EngineVariant) -> None:
    """And raised there again by every replay."""
    app = hf.App("shop", limits=LIMITS)

    @app.activity
    async def measure(text: str) -> int:
        return len(text)

    @app.workflow
    async def child(text: str) -> int:
        return len(text)

    @app.workflow
    async def order(text: str = "") -> list[str]:
        told = []
        for give in (lambda: measure(BIG), lambda: child(BIG), lambda: hf.task("sign", str, payload=BIG)):
            try:
                await give()
            except PayloadTooLarge as refusal:
                told.append(refusal.message.partition(" has ")[0])
        try:
            hf.continue_as_new(BIG)
        except PayloadTooLarge:
            told.append("continue_as_new")
        return [*told, str(await measure("abc"))]

    async with variant.node(app):
        told = await (await app.start(order)).result()
    assert told == [
        "the input of activity 'measure'",
        "the input of 'child'",
        "the payload of task 'sign'",
        "continue_as_new",
        "3",
    ]


@pytest.mark.contract("WF-6", "WF-7")
async def test_answers_that_are_too_large_are_errors_of_who_gives_them(variant: EngineVariant) -> None:
    app = hf.App("shop", limits=LIMITS, on_error="fail")

    @app.workflow
    async def order() -> str:
        async def change() -> str:
            return BIG

        hf.on_query("look", lambda: BIG)
        hf.on_update("change", change)
        await hf.wait_signal("go", str)
        return BIG

    async with variant.node(app):
        run = await app.start(order)
        with pytest.raises(PayloadTooLarge, match="the answer of query 'look'"):
            await run.query("look")
        with pytest.raises(UpdateFailed, match="the answer of the update has 1002 bytes"):
            await run.update("change")
        await run.signal("go", "on")
        with pytest.raises(RunFailed, match="the result of the run has 1002 bytes"):
            await run.result()


@pytest.mark.contract("ACT-1")
async def test_an_outcome_by_token_is_bounded_like_any_other_result(variant: EngineVariant) -> None:
    app, tokens = hf.App("shop"), asyncio.Queue[str]()

    @app.activity
    async def sign() -> str:
        tokens.put_nowait(hf.activity_context().token)
        hf.activity_context().complete_later()

    @app.workflow
    async def contract() -> int:
        return len(await sign())

    async with variant.node(app):
        run, token = await app.start(contract), await tokens.get()
        with pytest.raises(PayloadTooLarge):
            await app.complete_activity(token, "x" * Limits().value_bytes)
        await app.complete_activity(token, "x" * 1_000_000)  # more than a signal may have
        assert await run.result() == 1_000_000


@pytest.mark.contract("MSG-3")
async def test_what_the_driver_refuses_pauses_one_run_and_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is set too high: the file takes no value of that length, whoever tries."""
    connect = sqlite3.connect

    def narrow(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **kwargs)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 300_000)
        return connection

    monkeypatch.setattr(sqlite3, "connect", narrow)
    app = hf.App("shop", limits=Limits(value_bytes=2**30))

    @app.activity
    async def make(size: int) -> str:
        return "x" * size

    @app.workflow
    async def order(size: int) -> int:
        return len(await make(size))

    async with asyncio.timeout(60), app.node(f"sqlite:///{tmp_path}/store.db"):
        runs = [await app.start(order, size) for size in (10, 400_000, 20)]
        await wait_for_status(runs[1], RunStatus.PAUSED)
        assert [await run.result() for run in (runs[0], runs[2])] == [10, 20]
        assert await (await app.start(order, 30)).result() == 30
    async with asyncio.timeout(60), app.node(f"sqlite:///{tmp_path}/store.db"):
        assert await (await app.start(order, 40)).result() == 40
