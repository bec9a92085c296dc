"""A node that has nothing to do knows how long it may sleep, without asking the store again after each step."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest

import holdfast as hf
from holdfast.core.instants import Instant
from holdfast.store.port import Plan, Store
from holdfast.store.proxy import StoreProxy
from holdfast.workflow import Workflow

STEPS = 40
LONG = hf.NodeOptions(safety_poll_s=3_600.0)
"""A node that depends on what it knows, and on notifications."""

app = hf.App("idle")
attempts: list[int] = []


@app.activity
async def hand_back(number: int) -> int:
    """Take as long as another process, so that the node becomes idle."""
    await asyncio.sleep(0.001)
    return number


@app.activity(retry=hf.Retry(max_attempts=2, initial_ms=20))
async def fail_once() -> str:
    """Fail the first time."""
    attempts.append(1)
    if len(attempts) == 1:
        raise ConnectionError("not yet")
    return "retried"


@app.workflow
async def steps(count: int) -> int:
    """Take steps one after the other."""
    return sum([await hand_back(number) for number in range(count)])


@app.workflow
async def parked() -> None:
    """Wait for an hour."""
    await hf.sleep(timedelta(hours=1))


@app.workflow
async def sleep() -> str:
    """Wait for a moment, after a step."""
    await hand_back(1)
    await hf.sleep(timedelta(milliseconds=20))
    return "slept"


@app.workflow
async def time_out() -> str:
    """Wait for a signal that does not come."""
    await hand_back(1)
    try:
        await hf.wait_signal("go", str, timeout=timedelta(milliseconds=20))
    except TimeoutError:
        return "timed out"
    return "signalled"


@app.workflow
async def retry() -> str:
    """Take a step that fails the first time."""
    return await fail_once()


class Counting(StoreProxy):
    """A store that counts how often it is asked what is due."""

    asked = 0

    async def next_due(
        self, node: str, plans: Sequence[Plan] | None = None, queues: Sequence[str] = ()
    ) -> Instant | None:
        self.asked += 1
        return await super().next_due(node, plans, queues)


@pytest.mark.contract("MSG-4")
async def test_a_step_does_not_ask_what_is_due(store: Store) -> None:
    counting = Counting(store)
    async with asyncio.timeout(60), app.node(counting, options=LONG):
        await app.start(parked)
        asked = counting.asked
        assert await (await app.start(steps, STEPS)).result() == sum(range(STEPS))
        assert counting.asked - asked <= STEPS // 10


@pytest.mark.contract("MSG-4", "TMR-1")
@pytest.mark.parametrize(
    ("workflow", "expected"),
    [(sleep, "slept"), (time_out, "timed out"), (retry, "retried")],
    ids=["timer", "time-out", "retry"],
)
async def test_what_becomes_due_earlier_is_found_at_once(
    store: Store, workflow: Workflow[[], str], expected: str
) -> None:
    attempts.clear()
    async with asyncio.timeout(60), app.node(store, options=LONG):
        await app.start(parked)
        await (await app.start(steps, 1)).result()  # the node knows that nothing is due for an hour
        assert await (await app.start(workflow)).result() == expected


@pytest.mark.contract("MSG-4", "TMR-1")
async def test_a_run_that_starts_later_is_found_in_time(store: Store) -> None:
    async with asyncio.timeout(60), app.node(store, options=LONG):
        await app.start(parked)
        await (await app.start(steps, 1)).result()
        run = await app.start(steps, 2, after=timedelta(milliseconds=20))
        assert await run.result() == 1
