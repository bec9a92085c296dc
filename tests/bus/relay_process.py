"""A node that relays, in a process of its own, until it is killed: `relay_process.py STORE`."""

import asyncio
import sys

from holdfast.engine.options import NodeOptions
from tests.bus.test_relay import make_app


async def main(address: str) -> None:
    app, _ = make_app()
    options = NodeOptions(safety_poll_s=0.2, lease_ms=500)
    async with app.node(address, options=options):
        print("relaying", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
