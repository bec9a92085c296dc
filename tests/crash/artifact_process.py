"""A node with large values and artifacts that kills itself at a write, and a process that only sweeps.

`python -m tests.crash.artifact_process run STORE FOLDER RUN_ID WRITE MOMENT` starts a run and works until it is killed
by SIGKILL, at the WRITE-th write to the artifact store, `during` or `after` it.
`python -m tests.crash.artifact_process sweep STORE FOLDER` sweeps ten times.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import holdfast as hf

LARGE = 300 * 1024
CHUNK = 64 * 1024
OPTIONS = hf.NodeOptions(lease_ms=500, safety_poll_s=0.5)


class Deadly(hf.FolderArtifacts):
    """A folder whose writer is killed at a write: in the middle of it, or when it is durable and not referred to."""

    def __init__(self, folder: Path, write: int, moment: str) -> None:
        super().__init__(folder)
        self._left = write
        self._moment = moment

    async def put(self, key: str, chunks: AsyncIterator[bytes]) -> None:
        """Store an object, or die."""
        self._left -= 1
        is_last = self._left == 0
        await super().put(key, _deadly(chunks) if is_last and self._moment == "during" else chunks)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)


async def _deadly(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        yield chunk[: len(chunk) // 2]
        os.kill(os.getpid(), signal.SIGKILL)


def make_app(artifacts: hf.ArtifactStore) -> tuple[hf.App, Any]:
    """Return an app whose workflow has a large input, an artifact, a large result of a step and one of the run."""
    app = hf.App("studio", artifacts=hf.Artifacts(artifacts))

    @app.activity
    async def film(name: str) -> hf.Artifact:
        return await hf.put_artifact((name[:1].encode() * CHUNK for _ in range(8)), kind="film")

    @app.activity
    async def describe(artifact: hf.Artifact) -> str:
        size = sum([len(chunk) async for chunk in hf.open_artifact(artifact)])
        return str(size).ljust(LARGE)

    @app.workflow
    async def produce(name: str) -> tuple[hf.Artifact, str]:
        artifact = await film(name)
        return artifact, await describe(artifact)

    return app, produce


async def run(address: str, folder: Path, run_id: str, write: int, moment: str) -> None:
    """Start a run, and work until it has ended."""
    app, produce = make_app(Deadly(folder, write, moment))
    async with app.node(address, name="studio", options=OPTIONS):
        await (await app.start(produce, run_id.ljust(LARGE), run_id=run_id)).result()


async def sweep(address: str, folder: Path) -> None:
    """Sweep again and again, and print how much that has deleted."""
    app, _ = make_app(hf.FolderArtifacts(folder))
    async with app.connect(address):
        artifacts = app.runtime().artifacts
        assert artifacts is not None
        print("ready", flush=True)
        sys.stdin.readline()
        print(sum([await artifacts.sweep(app.runtime().store) for _ in range(10)]))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", address, folder, run_id, write, moment]:
            asyncio.run(run(address, Path(folder), run_id, int(write), moment))
        case ["sweep", address, folder]:
            asyncio.run(sweep(address, Path(folder)))
