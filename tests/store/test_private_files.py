"""Files of a store are for its user alone, and addresses are shown without passwords."""

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.client import Client
from holdfast.client.transports import Unreachable
from holdfast.core.audit import AuditEntry
from holdfast.errors import HoldfastError, InvalidInput
from holdfast.service.auth.tokens import make_token
from holdfast.settings import Settings, without_password
from holdfast.store.health import Bounds
from holdfast.store.nats_wakeups import read_address
from holdfast.store.open import open_store
from holdfast.store.postgres.address import parse_address
from holdfast.store.queries import AuditQuery, TokenQuery
from holdfast.store.sqlite import SqliteStore
from holdfast.store.sqlite.backup import copy_store, restore_store
from holdfast.store.sqlite.connection import APPLICATION_ID
from holdfast.testing import START, VirtualClock


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o777])
def mask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode) for path in folder.rglob("*")}


@pytest.mark.contract("API-4")
async def test_store_log_sockets_and_backups_are_for_their_user_alone(tmp_path: Path, mask: int) -> None:
    store = await SqliteStore.open(tmp_path / "orders.db")
    try:
        await store.migrate()
        store.wakeups.listen()
        copy_store(tmp_path / "orders.db", tmp_path / "copy.db")
        found = modes(tmp_path)
        assert {"orders.db", "orders.db-wal", "orders.db-shm", "orders.db-wake", "copy.db"} < set(found)
        for name, mode in found.items():
            assert mode & 0o077 == 0, (name, oct(mode))
        assert found["orders.db"] == found["orders.db-wal"] == found["copy.db"] == 0o600
    finally:
        await store.close()


@pytest.mark.contract("API-4")
async def test_a_file_is_private_from_its_first_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens it between its creation and a change of its mode has it for ever."""
    seen: list[int] = []
    connect = sqlite3.connect

    def watched(path: Path | str, *args: object, **kwargs: object) -> sqlite3.Connection:
        if not str(path).startswith("file:"):
            seen.append(stat.S_IMODE(Path(path).stat().st_mode))
        return connect(path, *args, **kwargs)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(sqlite3, "connect", watched)
    store = await SqliteStore.open(tmp_path / "orders.db")
    await store.migrate()
    await store.close()
    copy_store(tmp_path / "orders.db", tmp_path / "copy.db")
    assert seen == [0o600, 0o600]


@pytest.mark.contract("API-4")
async def test_the_doctor_tells_of_wider_rights(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "orders.db")
    try:
        await store.migrate()

        async def level() -> str:
            facts = await store.health(Bounds())
            return next(finding.level for finding in facts.findings if finding.subject == "rights")

        assert await level() == "fine"
        (tmp_path / "orders.db-wal").chmod(0o640)
        assert await level() == "note"
    finally:
        await store.close()


# --- passwords

SECRET = "tiger"
ADDRESSES = (
    f"mysql://scott:{SECRET}@db/orders",
    f"s3://key:{SECRET}@bucket/x",
    f"postgresql:///orders?password={SECRET}",
    f"postgres://scott:{SECRET}@h1,h2/orders?sslmode=require",
    f"scott:{SECRET}@db/orders",
    f"host=db password={SECRET}",
    f"sqlite:///orders.db?key={SECRET}",
    f"nats://{SECRET}@queue:4222/orders",
    f"redis://:{SECRET}@cache",
    f"postgresql://scott:{SECRET}\u2100@db/orders",
)


@pytest.mark.contract("API-4")
@pytest.mark.parametrize("address", ADDRESSES)
async def test_no_error_about_an_address_shows_its_password(address: str) -> None:
    assert SECRET not in without_password(address)
    said: list[BaseException] = []
    for attempt in (
        lambda: open_store(Settings(store=address, busy_ms=0)),
        lambda: asyncio.to_thread(parse_address, address),
        lambda: asyncio.to_thread(read_address, address),
        lambda: asyncio.to_thread(Client, address),
    ):
        try:
            await attempt()
        except HoldfastError as problem:
            said.append(problem)
    assert said
    for told in said:
        assert SECRET not in f"{told} {getattr(told, 'details', '')}"


@pytest.mark.contract("API-4")
async def test_a_server_that_cannot_be_reached_is_named_without_the_password() -> None:
    async with Client(f"http://scott:{SECRET}@127.0.0.1:1", retry=hf.Retry(max_attempts=1)) as client:
        with pytest.raises(Unreachable) as told:
            await client.system.health()
    assert SECRET not in f"{told.value} {told.value.details}"


@pytest.mark.contract("API-4")
def test_an_address_is_shown_as_far_as_it_may_be() -> None:
    assert without_password("sqlite:///a@b:c.db") == "sqlite:///a@b:c.db"
    assert without_password("postgresql://ann:x@db:5432/orders?a=b") == "postgresql://ann@db:5432/orders"
    assert without_password("memory://") == "memory://"
    assert without_password("orders.db") == "orders.db"


@pytest.mark.process
@pytest.mark.contract("API-4")
def test_no_process_of_dev_has_the_password_on_its_command_line(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("import holdfast as hf\n\napp = hf.App('shop')\n")
    words = [sys.executable, "-m", "holdfast", "dev", "shop.py", "--port", "0"]
    environment = {**os.environ, "HOLDFAST_STORE": f"postgresql://scott:{SECRET}@127.0.0.1:1/orders"}
    with subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE) as process:
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            until = time.monotonic() + 20
            while not (found := children.read_text().split()) and time.monotonic() < until:
                assert process.poll() is None, process.stderr.read() if process.stderr else ""
            assert found
            for pid in found:
                assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        finally:
            process.terminate()
            said = process.stderr.read() if process.stderr else b""
    assert SECRET.encode() not in said


# --- restoring


@pytest.mark.contract("API-4")
@pytest.mark.parametrize("keep_tokens", [False, True])
async def test_restoring_revokes_tokens_and_sessions_unless_told_otherwise(tmp_path: Path, keep_tokens: bool) -> None:
    store = await SqliteStore.open(tmp_path / "orders.db", clock=VirtualClock())
    await store.migrate()
    _, token = await make_token(store, "ann", role="admin")
    await make_token(store, "ann", role="admin", session_of=token.token_id, expires_in_s=60)
    await store.close()
    copy_store(tmp_path / "orders.db", tmp_path / "copy.db")
    entry = AuditEntry(entry_id="r", operation="store.restore", actor="root", at=START + 7)
    restored = restore_store(tmp_path / "copy.db", tmp_path / "back.db", entry, keep_tokens=keep_tokens)
    assert restored.tokens_revoked == (0 if keep_tokens else 2)
    back = await SqliteStore.open(tmp_path / "back.db", clock=VirtualClock())
    try:
        found = await back.find_tokens(TokenQuery(sessions=True))
        assert [kept.is_valid(START + 8) for kept in found] == [keep_tokens] * 2
        [said] = await back.find(AuditQuery(operation="store.restore"))
        assert (said.actor, said.at) == ("root", START + 7)
    finally:
        await back.close()
    with closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
        assert copy.execute("SELECT count(*) FROM access_tokens WHERE revoked_at IS NULL").fetchone() == (2,)


@pytest.mark.contract("FMT-1")
def test_a_copy_that_an_earlier_build_made_is_restored_too(tmp_path: Path) -> None:
    formats = Path(__file__).parent / "formats"
    versions = sorted(int(path.stem) for path in formats.glob("*.sql"))
    assert versions
    for version in versions:
        with closing(sqlite3.connect(tmp_path / f"{version}.db")) as db:
            db.executescript((formats / f"{version}.sql").read_text())
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        entry = AuditEntry(entry_id="r", operation="store.restore", at=START)
        restored = restore_store(tmp_path / f"{version}.db", tmp_path / f"back-{version}.db", entry)
        assert restored.schema_version == version


@pytest.mark.contract("API-2")
def test_a_restore_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "copy.db").write_bytes(b"x" * 5_000)
    entry = AuditEntry(entry_id="r", operation="store.restore", at=START)
    with pytest.raises((HoldfastError, InvalidInput)):
        restore_store(tmp_path / "copy.db", tmp_path / "back.db", entry)
    assert [path.name for path in tmp_path.iterdir()] == ["copy.db"]
