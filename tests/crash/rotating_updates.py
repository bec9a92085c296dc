"""A workflow that is asked to begin again while it answers an update."""

from __future__ import annotations

import asyncio
from typing import Any

import holdfast as hf

app = hf.App("counting")


@app.activity
async def add_slowly(number: int) -> int:
    await asyncio.sleep(0.01)
    return number


@app.workflow
async def count(total: int = 0, stretch: int = 0) -> list[int]:
    async def add(by: int) -> int:
        nonlocal total
        first = await add_slowly(by)
        total += first + await add_slowly(by)
        return total

    hf.on_update("add", add)
    if await hf.wait_signal("end", str) == "rotate":
        hf.continue_as_new(total, stretch + 1)
    return [total, stretch]


async def _ask(run: Any) -> Any:
    try:
        return await run.update("add", by=5, update_id="click-1")
    except hf.errors.RunTerminal:
        return None  # told again when all is over, and the answer stands in the history


async def rotate_while_answering(app: hf.App, run_id: str) -> list[int]:
    """Ask for an update, let the workflow begin again meanwhile, and return what has become of it."""
    run = await app.start(count, run_id=run_id)
    asking = asyncio.create_task(_ask(run))
    while not any(event.event_type == "UpdateAccepted" for event in await run.events()):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await run.signal("end", "rotate", signal_id="end-1")
    answer = await asking
    assert answer in (10, None)
    await run.signal("end", "return", signal_id="end-2")
    return await run.result()
