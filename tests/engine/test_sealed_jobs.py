"""Workers of a queue that lack the key of a job leave it to others, and use up nothing."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from tests.engine.harness import wait_for_event

WORKER: dict[str, Any] = {"takes_runs": False, "queues": ("far",)}


class Shop:
    """An app with an activity in a queue, and the workflow that calls it."""

    def __init__(self, key: str, is_keyed: bool) -> None:
        self.app = hf.App("shop", codecs=[hf.Encryption({key: key.encode() * 16})])
        self.calls: list[int] = []
        self.looks: list[str] = []

        async def find(card: str) -> hf.NotCompleted:
            self.looks.append(card)
            return hf.NotCompleted()

        options: dict[str, Any] = {"idempotency_key": lambda card: "k", "verify": find} if is_keyed else {}

        @self.app.activity(queue="far", retry=hf.Retry(max_attempts=1), **options)
        async def charge(card: str) -> str:
            self.calls.append(hf.activity_context().engine_attempt_id)
            return f"{card} charged"

        @self.app.workflow
        async def pay(card: str) -> str:
            return await charge(card)

        self.pay = pay


@pytest.mark.contract("ACT-1", "SEC-2")
@pytest.mark.parametrize("is_keyed", [False, True], ids=["plain", "keyed"])
async def test_a_worker_without_the_key_leaves_the_job_to_another_and_uses_up_no_attempt(
    is_keyed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"sqlite:///{tmp_path}/shop.db"
    owner, stranger, worker = Shop("k1", is_keyed), Shop("k2", is_keyed), Shop("k1", is_keyed)
    async with (
        asyncio.timeout(60),
        owner.app.node(address),
        stranger.app.node(address, options=hf.NodeOptions(visible_ms=100, **WORKER)),
    ):
        run = await owner.app.start(owner.pay, "hush")
        await wait_for_event(run, "StepStarted")
        while "cannot be opened here" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        async with worker.app.node(address, options=hf.NodeOptions(**WORKER)):
            assert await run.result() == "hush charged"
        types = [event.event_type for event in await run.events()]
    assert types == ["RunQueued", "RunStarted", "StepStarted", "StepCompleted", "RunCompleted"]
    assert (stranger.calls, worker.calls, worker.looks) == ([], [1], [])
    assert caplog.text.count("cannot be opened here") == 1, "it is not taken again and again"
