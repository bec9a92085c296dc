"""A process with a node that fires schedules every second, until it is killed."""

import asyncio
import sys
from datetime import timedelta

import holdfast as hf

app = hf.App("ticking")


@app.workflow
async def tick() -> None:
    """End at once."""


for number in range(int(sys.argv[2])):
    app.schedule(every=timedelta(seconds=1), workflow=tick, schedule_id=f"s-{number}", overlap="allow")


async def main() -> None:
    """Run a node until the process ends."""
    options = hf.NodeOptions(lease_ms=1_000, safety_poll_s=0.3)
    async with app.node(sys.argv[1], options=options):
        print("ready", flush=True)
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main())
