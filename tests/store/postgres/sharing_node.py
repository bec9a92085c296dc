"""A process with a node that shares work with others: `python -m tests.store.postgres.sharing_node ADDRESS NAME`."""

from __future__ import annotations

import asyncio
import sys

import holdfast as hf

app = hf.App("sharing")


@app.activity
async def pick(number: int) -> int:
    """Take a moment."""
    await asyncio.sleep(0.02)
    return number


@app.workflow
async def parcel(number: int) -> int:
    """Pick one thing."""
    return await pick(number)


async def main(address: str, name: str) -> None:
    """Say when the node is there, and run until killed."""
    async with app.node(address, name=name):
        print("ready", flush=True)
        await asyncio.sleep(3_600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
