"""Holdfast, with a store of its own; the address is the store's."""

from typing import Any

import holdfast as hf
from bench.peers import load
from bench.peers.load import ALONE, WORKER, Engine

app = hf.App("peers")


@app.activity
async def nothing(number: int) -> int:
    """Do nothing."""
    return number


@app.activity
async def arrive() -> int:
    """Note that the run is about to wait."""
    load.note("arrived")
    return 0


@app.activity
async def held_step(number: int, run_id: str) -> int:
    """Carry out a step of a run that is recovered."""
    return await load.held_step(number, run_id)


@app.workflow
async def steps(count: int) -> int:
    """Take steps one after the other."""
    for number in range(count):
        await nothing(number)
    return count


@app.workflow
async def parked(_: int) -> int:
    """Take a step, and wait."""
    await arrive()
    return await hf.wait_signal("go", int)


@app.workflow
async def held(_: int) -> int:
    """Take three steps that are noted."""
    run_id = hf.run_info().run_id
    for number in (1, 2, 3):
        await held_step(number, run_id)
    return 3


WORKFLOWS: dict[str, Any] = {"steps": steps, "parked": parked, "held": held}


class Holdfast(Engine):
    """A node in this process, or none."""

    at_once = 2_000

    async def open(self, address: str, role: str) -> None:
        options = hf.NodeOptions(tune_gc=True, lease_ms=load.LEASE_S * 1_000, takes_runs=role in (ALONE, WORKER))
        self._node = app.node(address, options=options)
        await self._node.__aenter__()

    async def close(self) -> None:
        await self._node.__aexit__(None, None, None)

    async def start(self, workflow: str, run_id: str, argument: int) -> Any:
        return await app.start(WORKFLOWS[workflow], argument, run_id=run_id)

    def handle(self, run_id: str) -> Any:
        return app.run(run_id)

    async def result(self, handle: Any) -> int:
        value: int = await handle.result()
        return value

    async def signal(self, handle: Any, value: int) -> None:
        await handle.signal("go", value)


if __name__ == "__main__":
    load.main(Holdfast())
