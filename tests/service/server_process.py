"""A service in a process of its own, which can be told to end, or killed."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.cli.command_process import environment
from tests.service.stream_readers import Reading


class Server:
    """A process that serves `shop.py` of a folder at a port."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self._port = port
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60)

    async def __aenter__(self) -> "Server":
        command = [sys.executable, "-W", "error", "shop.py", str(self._port)]
        self._process = await asyncio.create_subprocess_exec(*command, cwd=self._folder, env=environment())
        while True:
            try:
                if (await self._http.get("/v1/health")).status_code == 200:
                    return self
            except httpx.TransportError:
                assert self._process.returncode is None, "it has ended"
                await asyncio.sleep(0.02)

    async def __aexit__(self, *problem: object) -> None:
        await self._http.aclose()
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal of the operating system."""
        self._process.send_signal(number)

    async def ended(self) -> int:
        """Wait for its end."""
        return await self._process.wait()

    async def start_run(self, workflow: str, **input: Any) -> str:
        """Start a run, and return its id."""
        return str((await self._post("/v1/runs", {"workflow": workflow, "input": input}))["run_id"])

    async def send(self, run_id: str, name: str) -> None:
        """Send a signal."""
        await self._post(f"/v1/runs/{run_id}/signals/{name}", {})

    async def history(self, run_id: str) -> list[dict[str, Any]]:
        """Return a run's events."""
        items: list[dict[str, Any]] = (await self._http.get(f"/v1/runs/{run_id}/events")).json()["items"]
        return items

    @asynccontextmanager
    async def reading(self, path: str, **headers: str) -> AsyncIterator[Reading]:
        """Open an event stream."""
        async with self._http.stream("GET", path, headers=headers) as response:
            yield Reading(response)

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        response = await self._http.post(path, json=body)
        assert response.is_success, response.text
        return response.json()
