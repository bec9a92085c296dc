"""What the tests of payments work with: the payment service, the nodes of a shop, and what can be seen of both."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import holdfast as hf
from holdfast.engine.inbox.tasks import TaskView
from holdfast.store.port import Store
from tests.payments import service
from tests.payments.worker import Order, shop

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0
OPERATOR = hf.Actor("olga", roles=("operator", "admin"))


class Supervised:
    """A process that is started again whenever it ends, as a supervisor does. It writes its id into the file `up`."""

    def __init__(self, up: Path, *command: str) -> None:
        self._up = up
        self._command = [sys.executable, "-m", *command]
        self._process: Process | None = None
        self._may_run = asyncio.Event()
        self._may_run.set()
        self.deaths = 0

    @property
    def is_up(self) -> bool:
        """Whether the present process has come as far as to work."""
        written = self._up.read_text(encoding="ascii") if self._up.exists() else ""
        return self._process is not None and written == str(self._process.pid)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Supervised]:
        """Keep the process running while the context is open, and kill it in the end."""
        keeping = asyncio.create_task(self._keep())
        try:
            yield self
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    def kill(self) -> None:
        """Kill the present process, without a word."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """Kill the present process, and start no other before `start`."""
        self._may_run.clear()
        self.kill()
        if self._process is not None:
            await self._process.wait()

    def start(self) -> None:
        """Start the process again."""
        self._may_run.set()

    @asynccontextmanager
    async def down(self) -> AsyncIterator[None]:
        """Let the process not run while the context is open."""
        await self.stop()
        try:
            yield
        finally:
            self.start()

    async def _keep(self) -> None:
        while True:
            await self._may_run.wait()
            self._process = await asyncio.create_subprocess_exec(*self._command, cwd=ROOT)
            try:
                code = await self._process.wait()
                assert code in (service.DIED, -9), f"{self._command[2]} ended with {code}"
                self.deaths += 1
            finally:
                if self._process.returncode is None:
                    self._process.kill()
                    await self._process.wait()


class Town:
    """A payment service and a shop with two nodes: one has the runs, the other works on the queue."""

    def __init__(self, address: str, folder: Path) -> None:
        self.folder = folder
        self._address = address
        self.app, self.pay = shop(folder)
        self.service = Supervised(folder / "service.up", "tests.payments.service", str(folder))
        self.nodes = {
            role: Supervised(folder / f"{role}.up", "tests.payments.worker", address, str(folder), role)
            for role in ("runs", "queue")
        }
        self.store: Store

    @asynccontextmanager
    async def opened(self, patience_s: float = PATIENCE_S) -> AsyncIterator[Town]:
        """Start everything, and end it when the context ends."""
        async with asyncio.timeout(patience_s), self.app.connect(self._address), AsyncExitStack() as stack:
            self.store = self.app.runtime().store
            await stack.enter_async_context(self.service.running())
            while not (self.folder / "port").exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            for node in self.nodes.values():
                await stack.enter_async_context(node.running())
            yield self

    async def start(self, order: Order, **faults: tuple[service.Fault | None, ...]) -> Any:
        """Order what goes wrong with the payment service, then start the run. Its id is the order's key."""
        for verb, ordered in faults.items():
            service.order_fault(self.folder, order.key, verb, *ordered)
        return await self.app.start(self.pay, order, run_id=order.key)

    async def questions(self, run_id: str | None = None) -> list[TaskView]:
        """Return what operators are asked about a run, or about all."""
        return list(await self.app.tasks.list(run_id=run_id, status="OPEN"))

    async def question(self, run_id: str) -> TaskView:
        """Wait until an operator is asked about a run, and return the task."""
        while True:
            for task in await self.questions(run_id):
                return task
            await asyncio.sleep(0.02)

    async def answer(self, task: TaskView, answer: str, result: Any = None) -> None:
        """Answer a question as an operator."""
        said = {"answer": answer, "reason": "looked it up"} | ({} if result is None else {"result": result})
        await self.app.tasks.complete(task.task_id, said, actor=OPERATOR)

    async def record(self, run_id: str) -> str:
        """Return the status of the record of a run's only step. The store brings those that are not completed."""
        [loaded] = await self.store.load([run_id])
        assert loaded is not None
        [status] = [record.status for record in loaded.records] or ["completed"]
        return status

    def charged(self, key: str) -> list[int]:
        """Return the charges that were made for a key, by the ledger of the payment service."""
        return service.charges(self.folder, key).get(key, [])

    def asked(self, key: str, verb: str) -> int:
        """Return how often the service was asked."""
        return service.requests(self.folder, key, verb)


async def outcome(run: hf.RunHandle[Any]) -> Any:
    """Return the result of a run, or the code of the error that failed it."""
    try:
        return await run.result()
    except hf.errors.RunFailed as problem:
        info = problem.info
        while info.cause is not None:
            info = info.cause
        return info.code
