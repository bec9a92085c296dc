"""Nodes are killed between a write to the artifact store and the commit that refers to it, and others sweep meanwhile.

Nothing that is referred to is missing, whenever one looks; and nothing is left for ever.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

import holdfast as hf
from holdfast.core import codec
from holdfast.store.artifacts import GRACE_MS
from holdfast.store.port import Created, Existing, NewRun, Refused, Store
from holdfast.store.proxy import StoreProxy
from tests.crash.artifact_process import LARGE, OPTIONS, make_app
from tests.races.stores import open_anywhere

pytestmark = [pytest.mark.slow, pytest.mark.process]

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120
WRITES = 3
"""The large input, the artifact, and the large result of the step. The result of the run comes after them."""


@pytest.fixture(params=["sqlite", "postgres"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the address of an empty store that processes share."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/studio.db"
    return str(request.getfixturevalue("postgres_url"))


def command(role: str, *given: object) -> list[str]:
    return [sys.executable, "-m", "tests.crash.artifact_process", role, *map(str, given)]


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def make_old(paths: Sequence[Path]) -> None:
    """Let files be older than a start may take."""
    for path in paths:
        then = path.stat().st_mtime - GRACE_MS / 1_000 - 60
        os.utime(path, (then, then))


async def read_everything(app: hf.App, run_ids: Sequence[str]) -> int:
    """Read every value and every artifact to which the histories refer. Return how many runs there are."""
    found = 0
    for run_id in run_ids:
        try:
            events = await app.run(run_id).events()
        except hf.errors.NotFound:
            continue
        found += 1
        for event in events:
            assert not codec.holds_sealed(codec.encode(event.data)), f"{run_id}: a value of {event} is missing"
            for artifact in getattr(event.data, "artifacts", ()):
                _ = [chunk async for chunk in app.open_artifact(artifact)]
    return found


@pytest.mark.contract("SEC-2", "OWN-3", "FMT-2")
async def test_whenever_a_node_is_killed_nothing_referred_to_is_missing_and_nothing_stays(
    address: str, tmp_path: Path
) -> None:
    folder = tmp_path / "artifacts"
    deaths = [(write, moment) for write in range(1, WRITES + 2) for moment in ("during", "after")]
    run_ids = [f"{moment}-{write}" for write, moment in deaths]
    app, produce = make_app(hf.FolderArtifacts(folder))
    for run_id, (write, moment) in zip(run_ids, deaths, strict=True):
        child = await asyncio.to_thread(
            subprocess.run,
            command("run", address, folder, run_id, write, moment),
            cwd=ROOT,
            timeout=PATIENCE_S,
            check=False,
        )
        assert child.returncode == -SIGKILL, f"{run_id}: the process was to be killed"
        async with asyncio.timeout(PATIENCE_S), app.connect(address):
            await read_everything(app, run_ids)
        async with asyncio.timeout(PATIENCE_S), app.node(address, name="studio", options=OPTIONS):
            if write == 1:  # the start whose input was written, or not, and was not committed
                assert await app.runtime().store.load([run_id]) == [None]
                continue
            film, text = await app.run(run_id).result()  # without its type: it is the history that is looked at
            assert (film["size_bytes"], len(text)) == (8 * 65_536, LARGE)

    async with asyncio.timeout(PATIENCE_S), app.node(address, name="studio", options=OPTIONS):
        artifacts, store = app.runtime().artifacts, app.runtime().store
        assert artifacts is not None
        assert await artifacts.sweep(store) == 0, "what is young may yet be referred to"
        make_old(files_in(folder))
        assert [path for path in files_in(folder) if "=after-1" in path.parts]
        assert len(files_in(folder / ".incomplete")) >= WRITES + 1
        assert await artifacts.sweep(store) > WRITES + 1
        assert await read_everything(app, run_ids) == len(run_ids) - 2
        left = [path for path in files_in(folder) if {"=after-1", "=during-1", ".incomplete"} & set(path.parts)]
        assert left == [], "the lost input, and what interrupted writes have left, is gone"
        await (
            await app.start(produce, "after-1".ljust(LARGE), run_id="after-1")
        ).result()  # a start that is sent again
        assert await read_everything(app, run_ids) == len(run_ids) - 1
        await store.purge(hf.PurgePolicy(finished_run_ms=0))
        make_old(files_in(folder))
        await artifacts.sweep(store)
    assert files_in(folder) == []


class Held(StoreProxy):
    """A store in which starts wait, between the write of their input and their commit."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.has_come, self.may_go = asyncio.Event(), asyncio.Event()

    async def create(self, runs: Sequence[NewRun], claim_for: str | None = None) -> list[Created | Existing | Refused]:
        """Wait, and create."""
        self.has_come.set()
        await self.may_go.wait()
        answers: list[Created | Existing | Refused] = await self.inner.create(runs, claim_for)
        return answers


@pytest.mark.contract("SEC-2", "OWN-4")
async def test_two_processes_sweep_at_once_while_a_start_is_between_write_and_commit(
    address: str, tmp_path: Path
) -> None:
    folder, orphans = tmp_path / "artifacts", 300
    store = await open_anywhere(Path(address.removeprefix("sqlite:///")) if address.startswith("sqlite") else address)
    await store.migrate()
    held = Held(store)
    app, produce = make_app(hf.FolderArtifacts(folder))
    sweepers: list[asyncio.subprocess.Process] = []
    try:
        async with asyncio.timeout(PATIENCE_S), app.node(held, options=OPTIONS):
            starting = asyncio.ensure_future(app.start(produce, "x" * LARGE, run_id="x"))
            await held.has_come.wait()
            [young] = files_in(folder)
            place = young.relative_to(folder).parts[0]
            for number in range(orphans):
                path = folder / place / "artifacts" / f"=gone-{number}" / "film" / "1"
                path.parent.mkdir(parents=True)
                path.write_bytes(b"an orphan")
                make_old([path])
            pipe = asyncio.subprocess.PIPE
            for _ in range(2):
                sweeper: Any = await asyncio.create_subprocess_exec(
                    *command("sweep", address, folder), cwd=ROOT, stdin=pipe, stdout=pipe
                )
                sweepers.append(sweeper)
                assert await sweeper.stdout.readline() == b"ready\n"
            counts = await asyncio.gather(*(sweeper.communicate(b"go\n") for sweeper in sweepers))
            assert [sweeper.returncode for sweeper in sweepers] == [0, 0]
            assert sum(int(said) for said, _ in counts) >= orphans
            assert files_in(folder) == [young], "all orphans are gone, and what was just written is not"
            held.may_go.set()
            film, _ = await (await starting).result()
            assert film.size_bytes == 8 * 65_536
            assert await read_everything(app, ["x"]) == 1
    finally:
        for sweeper in sweepers:
            if sweeper.returncode is None:
                sweeper.kill()
                await sweeper.wait()
        await store.close()
