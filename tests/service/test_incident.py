"""An incident, in short: a bad deployment, a dead API and overdue tasks at once, until the board is clean.

Only what an operator has is used: the doctor, the lists, and commands to many.
"""

import asyncio
from datetime import timedelta
from typing import Any

import holdfast as hf
from holdfast.client import Client

ORDERS, MAILS, REVIEWS = 30, 50, 4


def shop(*, is_bad: bool, outage: asyncio.Event) -> tuple[hf.App, dict[str, Any]]:
    """Return the app as it is deployed, with a bug or without."""
    app = hf.App("shop")

    @app.activity
    async def reserve(order: str) -> dict[str, str]:
        return {"order": order}

    @app.activity(retry=hf.Retry(max_attempts=100, initial_ms=3_600_000))
    async def send(order: str) -> str:
        if outage.is_set():
            raise ConnectionError("connection refused")
        return "sent"

    @app.workflow
    async def order(order_id: str) -> str:
        found = await reserve(order_id)
        return found["shelf"] if is_bad else "by hand"

    @app.workflow
    async def mail(order_id: str) -> str:
        return await send(order_id)

    @app.workflow
    async def review(order_id: str) -> bool:
        return await hf.task("review", bool, payload={"order": order_id}, due=timedelta(milliseconds=1))

    return app, {"order": order, "mail": mail, "review": review}


async def found_by(client: Client, wanted: set[str]) -> dict[str, str]:
    """Return what the doctor says of these subjects, where it says something."""
    report = await client.system.doctor()
    return {each.subject: each.sentence for each in report.items if each.level != "fine" and each.subject in wanted}


async def until_found(client: Client, subjects: set[str], wanted: dict[str, str]) -> None:
    """Wait until the doctor's findings about these subjects hold these words, and no others are there."""
    async with asyncio.timeout(30):
        while True:
            found = await found_by(client, subjects)
            if found.keys() == wanted.keys() and all(words in found[subject] for subject, words in wanted.items()):
                return
            await asyncio.sleep(0.05)


async def test_an_incident_ends_with_a_clean_board() -> None:
    store, outage = hf.MemoryStore(), asyncio.Event()
    outage.set()
    subjects = {"paused runs", "retries", "tasks", "failed runs"}
    app, workflows = shop(is_bad=True, outage=outage)
    async with app.node(store):
        counts = {"order": ORDERS, "mail": MAILS, "review": REVIEWS}
        for name, count in counts.items():
            for number in range(count):
                await app.start(workflows[name], f"{name}-{number}")
        async with Client(app) as client:
            seen = {
                "paused runs": "30 runs were paused by UnhandledError",
                "retries": "50 runs are tried again",
                "tasks": "4 tasks are overdue",
            }
            await until_found(client, subjects, seen)
            preview = await client.runs.command_many(
                command="try_now", request_id="p", retrying=True, preview=True, limit=500
            )
            assert preview.concerned == MAILS
            outage.clear()
            done = await client.runs.command_many(
                command="try_now", request_id="again", retrying=True, limit=100, reason="it is back"
            )
            assert [item.error for item in done.items if item.error is not None] == []
            page = await client.tasks.list(status="OPEN", limit=500)
            for task in page.items:
                await client.tasks.complete(task_id=task.task_id, answer=True)
            await until_found(client, subjects, {"paused runs": "30 runs were paused"})
            entries = await client.audit.list(limit=500)
            assert sum(entry.operation == "runs.command_many" for entry in entries.items) == MAILS
    mended, _ = shop(is_bad=False, outage=outage)
    async with mended.node(store), Client(mended) as client:
        await until_found(client, subjects, {})  # they have gone on by themselves
        counted = await client.runs.count()
        assert counted.by_status == {"COMPLETED": ORDERS + MAILS + REVIEWS}
