"""A damaged or foreign file is refused in our own words, and is left as it was found."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import CorruptHistory, HoldfastError, StoreCorrupt, StoreNotMigrated
from holdfast.store.sqlite import SqliteStore
from holdfast.testing.samples import new_run
from tests.crash.sample_file import make_file, read_file

pytestmark = pytest.mark.slow

PAGE = 4_096


@pytest.fixture(scope="module")
def _made(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, dict[str, Any]]:
    path = tmp_path_factory.mktemp("sound") / "store.db"
    picture = asyncio.run(make_file(path))
    return path.read_bytes(), picture


@pytest.fixture
def sound(_made: tuple[bytes, dict[str, Any]]) -> bytes:
    """The bytes of a file in which nothing is wrong."""
    return _made[0]


@pytest.fixture
def picture(_made: tuple[bytes, dict[str, Any]]) -> dict[str, Any]:
    """Everything that is in that file."""
    return _made[1]


async def attempt(path: Path) -> dict[str, Any] | HoldfastError:
    """Open the file and read everything; return it, or the error if it was one of ours. Any other is a failure."""
    found = path.read_bytes()
    try:
        return await read_file(path)
    except HoldfastError as error:
        refused = type(error)(error.message, **error.details)  # without the traceback, which keeps the file open
    assert path.read_bytes() == found, "a file that cannot be used was changed"
    assert [file.name for file in path.parent.iterdir()] == [path.name], "something was left beside the file"
    return refused


async def test_a_sound_file_is_read_as_it_was_written(tmp_path: Path, sound: bytes, picture: dict[str, Any]) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(sound)

    assert await read_file(path) == picture
    assert path.read_bytes() == sound


@pytest.mark.contract("STO-1")
@pytest.mark.parametrize(
    "length", [1, 99, 100, 511, PAGE - 1, PAGE, PAGE + 1, 20 * PAGE, 20 * PAGE + 7, -PAGE, -1], ids=str
)
async def test_a_file_that_was_cut_short_is_refused(tmp_path: Path, sound: bytes, length: int) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(sound[:length])

    assert isinstance(await attempt(path), StoreCorrupt)


@pytest.mark.contract("STO-1")
@pytest.mark.parametrize("filling", [b"\x00", b"\xff", b"x"])
@pytest.mark.parametrize("start", [0, 16, 100])
async def test_a_file_with_a_damaged_beginning_is_refused(
    tmp_path: Path, sound: bytes, start: int, filling: bytes
) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(sound[:start] + filling * 100 + sound[start + 100 :])

    assert isinstance(await attempt(path), StoreCorrupt)


@pytest.mark.contract("STO-1")
async def test_no_byte_of_the_header_can_be_wrong_without_either_a_refusal_or_all_the_data(
    tmp_path: Path, sound: bytes, picture: dict[str, Any]
) -> None:
    path = tmp_path / "store.db"
    problems = []
    for place in range(100):
        for value in {0x00, 0x03, 0xFF} - {sound[place]}:
            path.write_bytes(sound[:place] + bytes([value]) + sound[place + 1 :])
            found = await attempt(path)
            if isinstance(found, dict) and found != picture:
                problems.append(f"byte {place} = {value}: silently wrong")
            elif isinstance(found, HoldfastError) and not isinstance(found, StoreCorrupt):
                problems.append(f"byte {place} = {value}: {found!r}")
    assert not problems, "\n".join(problems)


@pytest.mark.contract("STO-1", "EVT-1")
@pytest.mark.parametrize("filling", ["noise", "text", "zeros", "another page"])
async def test_a_page_that_is_lost_is_noticed_by_whoever_reads_it(
    tmp_path: Path, sound: bytes, picture: dict[str, Any], filling: str
) -> None:
    """SQLite keeps no checksums: in the middle of a long value only noise can be told from what was there."""
    path = tmp_path / "store.db"
    chance = random.Random(7)
    problems = []
    refused = 0
    for page in chance.sample(range(1, len(sound) // PAGE), 30):
        fillings = {"noise": chance.randbytes(PAGE), "text": b"~" * PAGE, "zeros": bytes(PAGE)}
        fillings["another page"] = sound[PAGE * 2 : PAGE * 3]
        path.write_bytes(sound[: page * PAGE] + fillings[filling] + sound[(page + 1) * PAGE :])
        found = await attempt(path)
        if isinstance(found, dict):
            if filling == "noise" and found != picture:
                problems.append(f"page {page + 1}: silently wrong")
            continue
        refused += 1
        if not isinstance(found, StoreCorrupt | CorruptHistory):
            problems.append(f"page {page + 1}: {found!r:.200}")
        if any(letter * 10 in str(found) for letter in "xyz"):
            problems.append(f"page {page + 1}: the error shows a payload")
    assert not problems, "\n".join(problems)
    assert refused > 10


@pytest.mark.contract("STO-1")
@pytest.mark.parametrize(
    "content",
    [
        b"not a database\n",
        b"# notes\n" * 10_000,
        b"SQLite format 3\x00",
        bytes(PAGE),
        random.Random(7).randbytes(10_000),
    ],
    ids=["a line", "a text", "a magic word", "zeros", "noise"],
)
async def test_a_file_that_is_no_database_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(content)

    assert isinstance(await attempt(path), StoreCorrupt)


@pytest.mark.contract("STO-1")
@pytest.mark.parametrize("mode", ["delete", "wal"])
@pytest.mark.parametrize("mark", [0, 0x0BADF00D])
async def test_the_file_of_another_program_is_refused(tmp_path: Path, mode: str, mark: int) -> None:
    path = tmp_path / "store.db"
    with closing(sqlite3.connect(path)) as other:
        other.execute(f"PRAGMA journal_mode = {mode}")
        other.execute(f"PRAGMA application_id = {mark}")
        other.execute("CREATE TABLE runs (id INTEGER)")
        other.execute("INSERT INTO runs VALUES (1)")
        other.commit()

    assert isinstance(await attempt(path), StoreCorrupt)


@pytest.mark.contract("STO-1")
async def test_an_empty_file_is_a_store_that_has_not_been_migrated(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.touch()
    store = await SqliteStore.open(path)
    with pytest.raises(StoreNotMigrated):
        await store.create([new_run()])
    await store.migrate()
    await store.create([new_run()])
    await store.close()


@pytest.mark.contract("STO-1")
@pytest.mark.parametrize("is_missing", [False, True], ids=["emptied", "deleted"])
async def test_a_log_without_its_file_is_not_thrown_away(tmp_path: Path, is_missing: bool) -> None:
    """SQLite would take the file for a new one and delete the log, with everything in it."""
    path = tmp_path / "store.db"
    store = await SqliteStore.open(path)
    await store.migrate()
    log = path.with_name("store.db-wal")
    written = log.read_bytes()
    await store.close()
    log.write_bytes(written)
    if is_missing:
        path.unlink()
    else:
        path.write_bytes(b"")

    with pytest.raises(StoreCorrupt):
        await SqliteStore.open(path)

    assert log.read_bytes() == written
