"""Hello: two activities and a sleep, in order.

A workflow is an `async def` that decides; an activity is a function that does. Every result is recorded in a file
before the workflow goes on, so after a crash the workflow continues where it was, and finished work is not repeated.
"""

import asyncio
import tempfile

import holdfast as hf

app = hf.App("hello")


@app.activity
async def look_up(name: str) -> str:
    """Anything that touches the world belongs in an activity."""
    return {"ann": "Dr Ann Smith"}.get(name, name)


@app.activity
def shout(text: str) -> str:
    """A plain function is fine too; it runs in a thread."""
    return text.upper() + "!"


@app.workflow
async def hello(name: str) -> str:
    """Find out who it is, pause, and greet."""
    full_name = await look_up(name)
    await hf.sleep(0.1)  # durable: it could be a month, and nothing would be held in memory
    return await shout(f"hello, {full_name}")


async def main(store: str) -> None:
    """Run the workflow once, and look at what was recorded."""
    async with app.node(store):
        run = await app.start(hello, "ann")
        print(await run.result())
        print("\nIts history:")
        for event in await run.events():
            print(f"  {event.run_seq:2} {event.event_type:14} {event.step_id or ''}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(f"sqlite:///{folder}/hello.db"))
