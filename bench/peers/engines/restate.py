"""Restate; the address is its server's ingress, its admin API, and the port of the service, with commas between.

A run is a workflow, a signal resolves its durable promise through a shared handler. The service is served by Hypercorn,
as the SDK's documentation has it, in so many processes as the shape asks for; requests are sent with aiohttp.
"""

import asyncio
from typing import Any

import aiohttp
import restate
from hypercorn.asyncio import serve
from hypercorn.config import Config

from bench.peers import load
from bench.peers.load import STARTER, Engine


async def _nothing(number: int) -> int:
    return number


async def _arrive() -> int:
    load.note("arrived")
    return 0


steps, parked, held = restate.Workflow("steps"), restate.Workflow("parked"), restate.Workflow("held")


@steps.main("run")
async def run_steps(ctx: restate.WorkflowContext, count: int) -> int:
    """Take steps one after the other."""
    for number in range(count):
        await ctx.run_typed(f"nothing-{number}", _nothing, number=number)
    return count


@parked.main("run")
async def run_parked(ctx: restate.WorkflowContext, _: int) -> int:
    """Take a step, and wait."""
    await ctx.run_typed("arrive", _arrive)
    value: int = await ctx.promise("go", type_hint=int)
    return value


@parked.handler("go")
async def go(ctx: restate.WorkflowSharedContext, value: int) -> int:
    """Hand the value to the run."""
    await ctx.promise("go", type_hint=int).resolve(value)
    return 0


@held.main("run")
async def run_held(ctx: restate.WorkflowContext, _: int) -> int:
    """Take three steps that are noted."""
    for number in (1, 2, 3):
        await ctx.run_typed(f"held-{number}", load.held_step, number=number, run_id=ctx.key())
    return 3


service = restate.app([steps, parked, held])


class Restate(Engine):
    """A client of the ingress, and the service unless this process only starts."""

    at_once = 100

    async def open(self, address: str, role: str) -> None:
        self._ingress, admin, port = address.split(",")
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._stopped, self._service = asyncio.Event(), None
        if role == STARTER:
            return
        config = Config()
        config.bind = [f"127.0.0.1:{port}"]
        config.workers = 2  # several processes may listen on the port
        config.accesslog = config.errorlog = None
        config.h2_max_concurrent_streams = 10_000
        config.keep_alive_timeout = 600
        self._service = asyncio.create_task(serve(service, config, shutdown_trigger=self._stopped.wait))
        body = {"uri": f"http://127.0.0.1:{port}", "force": True}
        while True:
            try:
                async with self._session.post(f"{admin}/deployments", json=body) as answer:
                    if answer.status < 300:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        self._stopped.set()
        await self._session.close()
        if self._service is not None:
            self._service.cancel()
            await asyncio.gather(self._service, return_exceptions=True)

    async def start(self, workflow: str, run_id: str, argument: int) -> Any:
        await self._post(f"{workflow}/{run_id}/run/send", argument)
        return workflow, run_id

    def handle(self, run_id: str) -> Any:
        return "held", run_id

    async def result(self, handle: Any) -> int:
        workflow, run_id = handle
        url = f"{self._ingress}/restate/workflow/{workflow}/{run_id}/attach"
        async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=None)) as answer:
            answer.raise_for_status()
            value: int = await answer.json(content_type=None)
            return value

    async def signal(self, handle: Any, value: int) -> None:
        await self._post(f"parked/{handle[1]}/go", value)

    async def _post(self, path: str, body: int) -> None:
        async with self._session.post(f"{self._ingress}/{path}", json=body) as answer:
            answer.raise_for_status()
            await answer.read()


if __name__ == "__main__":
    load.main(Restate())
