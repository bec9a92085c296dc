"""What clients do with the examples. A scenario may be played any number of times: requests and signals have ids."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from examples import agent, approval, etl, fan_out, hello, orders, planner, poller, race, saga
from holdfast import Actor, App, errors

RUN_ID = "run-1"


async def greet(app: App) -> Any:
    run = await app.start(hello.hello, "ann", run_id=RUN_ID)
    return await run.result()


async def approve(app: App) -> Any:
    run = await app.start(approval.expense, "ann", 4_200, timedelta(days=2), run_id=RUN_ID)
    for _ in range(2):
        await run.signal("decision", approval.Decision(True, "carol"), signal_id="click-1")
    return await run.result()


async def ignore(app: App) -> Any:
    run = await app.start(approval.expense, "bob", 999_900, timedelta(milliseconds=50), run_id=RUN_ID)
    return await run.result()


async def travel_to_lisbon(app: App) -> Any:
    return await (await app.start(saga.trip, "Lisbon", run_id=RUN_ID)).result()


async def travel_to_venice(app: App) -> Any:
    run = await app.start(saga.trip, "Venice", run_id=RUN_ID)
    try:
        return await run.result()
    except errors.RunFailed as failure:
        return failure.info.cause.message


async def resize(app: App) -> Any:
    pictures = [f"picture-{number:03}" for number in range(6, 14)]  # the last one is broken the first time
    return await (await app.start(fan_out.resize_all, pictures, run_id=RUN_ID)).result()


async def follow(app: App) -> Any:
    # From the fifth day on: six looks, with a rotation between them.
    return await (await app.start(poller.follow, "parcel-7", 4, "warehouse", run_id=RUN_ID)).result()


async def let_clean_up(app: App) -> Any:
    run = await app.start(agent.agent, "make room", run_id=RUN_ID)
    for number, answer in enumerate((True, False)):
        await run.signal("permission", answer, signal_id=f"answer-{number}")
    return await run.result()


async def race_mirrors(app: App) -> Any:
    run = await app.start(race.first_of, {"slow": 600.0, "fast": 0.01}, run_id=RUN_ID)
    return await run.result()


async def extract_and_load(app: App) -> Any:
    await app.plans.register(etl.ETL)
    return await (await app.plans.start("etl", {"day": "2026-01-28"}, run_id=RUN_ID)).result()


async def plan_and_approve(app: App) -> Any:
    run = await app.start(planner.agent, "compare laptops", run_id=RUN_ID)
    editor = Actor("ann", ("editor",))
    async for task in planner.open_tasks(editor):
        with suppress(errors.Conflict):  # it was answered in another life
            await app.tasks.complete(task.task_id, True, actor=editor, operation_id="click-1")
    return await run.result()


async def buy(app: App, ledger: Path) -> Any:
    run = await app.start(orders.order, RUN_ID, 4_200, str(ledger), run_id=RUN_ID, request_id="cart-1")
    await run.signal("approval", orders.Approval("ann"), signal_id="click-1")
    return await run.result()


SCENARIOS: dict[str, tuple[ModuleType, Any]] = {
    "hello": (hello, greet),
    "approval": (approval, approve),
    "approval that nobody gives": (approval, ignore),
    "saga": (saga, travel_to_lisbon),
    "saga that is undone": (saga, travel_to_venice),
    "fan_out": (fan_out, resize),
    "poller": (poller, follow),
    "plan": (etl, extract_and_load),
    "plan that is made at run time": (planner, plan_and_approve),
    "agent": (agent, let_clean_up),
    "race": (race, race_mirrors),
}
