"""A process that runs orders on a PostgreSQL store: `python -m tests.store.postgres.worker ADDRESS MODE`.

With the mode `stall` its activities never end, and it says so on stdout as soon as one has begun. With `dawdle` they
end after a second, by the process's own time, and what the engine says goes to stdout as well.
"""

from __future__ import annotations

import asyncio
import logging
import sys

import holdfast as hf

LEASE_MS = 1_000
SLOW = {"stall": 3_600.0, "dawdle": 1.0}
OPTIONS = hf.NodeOptions(lease_ms=LEASE_MS, drain_s=0.1)

app = hf.App("orders")
mode = "finish"


@app.activity
async def charge(order_id: str) -> str:
    """Charge a card; or stall."""
    if mode in SLOW:
        print("charging", flush=True)
        await asyncio.sleep(SLOW[mode])
    return f"receipt of {order_id}"


@app.workflow
async def order(order_id: str) -> str:
    """Wait for approval, then charge."""
    if not await hf.wait_signal("approval", bool):
        return "rejected"
    return await charge(order_id)


async def main(address: str) -> None:
    """Run until killed."""
    async with app.node(address, options=OPTIONS):
        run = await app.start(order, "o-1", run_id="o-1", request_id="o-1")
        await run.signal("approval", True, signal_id="click")
        await asyncio.sleep(3_600)


if __name__ == "__main__":
    mode = sys.argv[2]
    if mode == "dawdle":
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
    asyncio.run(main(sys.argv[1]))
