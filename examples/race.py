"""Race: ask two mirrors, take the first answer, and cancel the other.

Who won is recorded. On replay the winner is the one in the history, whoever would be faster today.
"""

import asyncio
import tempfile

import holdfast as hf

app = hf.App("mirrors")


@app.activity
async def fetch(mirror: str, seconds: float) -> str:
    """Fetch a file from a mirror. A cancelled activity is told so, and may clean up."""
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        print(f"  {mirror}: cancelled")
        raise
    print(f"  {mirror}: done")
    return f"the file, from {mirror}"


@app.workflow
async def first_of(mirrors: dict[str, float]) -> str:
    """Return what the fastest mirror sends."""
    racers = [asyncio.create_task(fetch(mirror, seconds)) for mirror, seconds in mirrors.items()]
    done, losers = await asyncio.wait(racers, return_when=asyncio.FIRST_COMPLETED)
    for loser in losers:
        loser.cancel()
    await asyncio.wait(losers)
    return done.pop().result()


async def main(store: str) -> None:
    """Race a slow mirror against a fast one."""
    async with app.node(store):
        run = await app.start(first_of, {"slow.example": 60.0, "fast.example": 0.1})
        print("the winner:", await run.result())
        print("recorded:", [(event.event_type, event.step_id) for event in await run.events() if event.step_id])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(f"sqlite:///{folder}/race.db"))
