"""The end of the write-ahead log is missing, as after a power cut: whole turns are missing, never half of one."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from holdfast.store.sqlite import SqliteStore
from holdfast.testing.samples import SampleNode, marker, read_history, signal, timer, wait
from tests.crash.file_check import check_file
from tests.races.stores import HOUR_MS, opened

pytestmark = pytest.mark.slow

TURNS = 20


async def write_log(path: Path) -> tuple[bytes, bytes, list[int]]:
    """Write turns; return the file, its log, and how long the log was before them and as each was acknowledged."""
    store = await SqliteStore.open(path)
    await store.migrate()
    node = SampleNode(store, "node-a", HOUR_MS)
    await node.start("run-1", wait(step_id="wait#0"))
    shutil.copyfile(path, path.with_name("copy"))
    log = path.with_name(path.name + "-wal")
    lengths = [log.stat().st_size]
    for number in range(1, TURNS + 1):
        await store.deliver([signal("run-1", value="x" * 3_000, signal_id=f"click-{number}")])
        await node.step("run-1", wait(step_id=f"wait#{number}"), timer(1, f"sleep#{number}"), marker(f"at#{number}"))
        lengths.append(log.stat().st_size)
    file, log_bytes = path.read_bytes(), log.read_bytes()
    assert file == path.with_name("copy").read_bytes(), "the log was moved into the file; write less"
    await store.close()
    return file, log_bytes, lengths


@pytest.mark.contract("STO-1", "EVT-1", "SIG-4")
async def test_a_torn_log_loses_whole_turns_from_the_end_and_nothing_before_the_tear(tmp_path: Path) -> None:
    (tmp_path / "original").mkdir()
    file, log, lengths = await write_log(tmp_path / "original" / "store.db")
    chance = random.Random(7)
    for number in range(40):
        length = chance.choice(lengths[1:])
        length = chance.choice((chance.randrange(lengths[0], len(log)), length, length - 1))
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / "store.db"
        path.write_bytes(file)
        path.with_name("store.db-wal").write_bytes(log[:length])
        if chance.random() < 0.5:  # the file system made the log longer before it wrote what belongs there
            with path.with_name("store.db-wal").open("ab") as torn:
                torn.write(bytes(chance.randrange(1, 10_000)))

        kept = sum(acknowledged <= length for acknowledged in lengths[1:])
        assert await check_file(path) == 1
        async with opened(path) as store:
            events = await read_history(store, "run-1")
        marks = [event.step_id for event in events if event.event_type == "MarkerRecorded"]
        assert marks[:kept] == [f"at#{turn}" for turn in range(1, kept + 1)]
        assert len(marks) <= kept + 1
