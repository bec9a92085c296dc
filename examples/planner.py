"""Planner: an agent makes a plan at run time, a human approves it, and it is run."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import holdfast as hf

app = hf.App("planner")


@app.activity
async def think(goal: str) -> dict[str, Any]:
    """Answer with a plan, as a language model would."""
    search = {"id": "search", "activity": "search", "for_each": ["price", "reviews"], "input": {"topic": "${item}"}}
    write = {"id": "write", "activity": "write", "input": {"notes": "${steps.search.output}"}}
    return {"plan": "research", "version": goal, "steps": [search, write], "output": "${steps.write.output}"}


@app.activity
async def search(topic: str) -> str:
    return f"notes about {topic}"


@app.activity
async def write(notes: list[str]) -> str:
    return "; ".join(notes)


@app.workflow
async def agent(goal: str) -> str:
    document = await think(goal)
    if not await hf.task("approve plan", bool, payload=document, roles=["editor"]):
        return "the plan was not approved"
    return str(await hf.plan(document))


async def open_tasks(editor: hf.Actor) -> AsyncIterator[Any]:
    """Look until there is something to approve."""
    for _ in range(200):
        if found := await app.tasks.list(actor=editor):
            yield found[0]
            return
        await asyncio.sleep(0.05)


async def main(store: hf.MemoryStore) -> None:
    """Approve the plan that the agent makes."""
    async with app.node(store):
        run = await app.start(agent, "compare laptops")
        editor = hf.Actor("ann", ("editor",))
        [task] = [task async for task in open_tasks(editor)]
        print("to approve:", bytes(task.payload).decode()[:60], "…")
        await app.tasks.complete(task.task_id, True, actor=editor)
        print(await run.result())


if __name__ == "__main__":
    asyncio.run(main(hf.MemoryStore()))
