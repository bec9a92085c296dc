"""What is done in a process of its own because it cannot be undone: giving up rights, and limiting file sizes."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.store.port import Created
from holdfast.store.sqlite import SqliteStore
from holdfast.testing.samples import new_run
from tests.races.parallel import Contender
from tests.races.stores import opened

NOBODY = 65_534


async def write_without_rights(contender: Contender, path: Path) -> str:
    """Open the file and write to it as a user who owns nothing; return the code of the error."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    try:
        store = await SqliteStore.open(path)
        try:
            await store.migrate()
            await store.create([new_run("run-of-nobody")])
        finally:
            await store.close()
    except HoldfastError as error:
        return error.code
    return "written"


async def create_until_refused(contender: Contender, path: Path, most_bytes: int) -> tuple[list[str], str, bool]:
    """Create runs while no file may grow past a size; return those acknowledged, and the error's code.

    Then try to read what was acknowledged, with the same store, and print whether it was there.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    acknowledged: list[str] = []
    async with opened(path) as store:
        while True:
            run_id = f"run-{len(acknowledged):04}"
            try:
                (answer,) = await store.create([new_run(run_id, value="x" * 2_000)])
            except HoldfastError as error:
                loaded = await store.load(acknowledged)
                return acknowledged, error.code, all(run is not None for run in loaded)
            assert isinstance(answer, Created)
            acknowledged.append(run_id)
