"""Agent: a loop of model and tools that asks a person before it does anything dangerous.

Every answer of the model and every result of a tool is recorded. After a crash the agent goes on where it was: no
token is paid for twice, and a permission that was given is not asked for again.
"""

import asyncio
import tempfile

import holdfast as hf

app = hf.App("agent")
chat: asyncio.Queue[str] = asyncio.Queue()  # stands for the chat in which people are asked
SCRIPT = [("list", "/logs"), ("delete", "/logs/old"), ("delete", "/logs/today"), ("stop", "")]


@app.activity(timeout=60, retry=hf.Retry(max_attempts=5))
async def think(goal: str, seen: list[str]) -> tuple[str, str]:
    """Ask the model which tool to use on what. This one follows a script; yours would be a call to its API."""
    return SCRIPT[len(seen)]


@app.activity
async def use(tool: str, path: str) -> str:
    return {"list": "found: old, today", "delete": f"deleted {path}"}[tool]


@app.activity
async def ask_people(question: str) -> None:
    chat.put_nowait(question)


@app.workflow
async def agent(goal: str) -> list[str]:
    """Think and act until the model says stop."""
    seen: list[str] = []
    while (call := await think(goal, seen))[0] != "stop":
        tool, path = call
        is_allowed = True
        if tool == "delete":
            await ask_people(f"May I delete {path}?")
            is_allowed = await hf.wait_signal("permission", bool)
        seen.append(await use(tool, path) if is_allowed else f"was not allowed to delete {path}")
    return seen


async def main(store: str) -> None:
    async with app.node(store):
        run = await app.start(agent, "make room on the disk")
        for number in range(2):
            question = await chat.get()
            print(f"agent: {question}\nhuman: {'yes' if 'old' in question else 'no'}")
            await run.signal("permission", "old" in question, signal_id=f"answer-{number}")
        print("agent:", "; ".join(await run.result()))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(f"sqlite:///{folder}/agent.db"))
