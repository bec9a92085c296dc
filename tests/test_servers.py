"""The servers of the tests are real ones, and nothing of them stays behind."""

from __future__ import annotations

import asyncio
import ctypes
import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import pytest

from tests.postgres_server import (
    RUNNING,
    WHEEL,
    Databases,
    Installation,
    NoServer,
    Pair,
    find_binaries,
    free_port,
    free_ports,
    sql,
    version_of,
)
from tests.seaweed_server import SeaweedServer
from tests.server_folder import ELSEWHERE, ServerFolder, processes_of

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
IPC_STAT = 2


def test_ports_that_are_asked_for_together_are_different() -> None:
    assert len(set(free_ports(500))) == 500


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is true that nobody tells us about."""
    async with asyncio.timeout(30):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


def segment_of(data: Path) -> int:
    """Return the id of the shared memory that a running server holds."""
    return int((data / "postmaster.pid").read_text().splitlines()[6].split()[1])


def is_there(segment: int) -> bool:
    """Return whether there is such shared memory."""
    return bool(ctypes.CDLL(None).shmctl(segment, IPC_STAT, ctypes.create_string_buffer(1_000)) == 0)


def test_a_server_synchronises_and_does_not_run_as_root(postgres: Installation) -> None:
    server = postgres.server()
    assert server.sql("SHOW fsync") == [("on",)]
    assert server.sql("SHOW synchronous_commit") == [("on",)]
    user = Path(f"/proc/{server.pid}").stat().st_uid
    assert user == (pwd.getpwnam(postgres.user.pw_name).pw_uid if postgres.user else os.geteuid())
    assert user != 0
    assert len(processes_of(server.data)) > 3


def test_what_was_committed_survives_every_way_to_end(postgres: Installation) -> None:
    server = postgres.server()
    server.sql("CREATE TABLE kept (number int)")
    ends: list[Callable[[], None]] = [server.kill, server.stop, lambda: server.stop("immediate")]
    for number, end in enumerate(ends):
        server.sql(f"INSERT INTO kept VALUES ({number})")
        end()
        assert not processes_of(server.data)
        with pytest.raises(ConnectionRefusedError):
            server.sql("SELECT")
        server.start()
        assert server.sql("SELECT count(*) FROM kept") == [(number + 1,)]
    server.restart()
    assert server.sql("SELECT count(*) FROM kept") == [(3,)]


async def test_a_frozen_server_keeps_its_connections_and_answers_nobody(postgres: Installation) -> None:
    server = postgres.server()
    connection = await asyncpg.connect(server.dsn)
    server.freeze()
    asked = asyncio.create_task(connection.fetchval("SELECT 7"))
    done, _ = await asyncio.wait([asked], timeout=0.3)
    assert not done
    server.unfreeze()
    assert await asked == 7
    await connection.close()


def test_a_replica_has_what_was_answered_and_takes_over(postgres: Installation) -> None:
    pair = Pair(postgres)
    sql(pair.dsn, "CREATE TABLE kept (number int)")
    for number in range(3):
        sql(pair.dsn, f"INSERT INTO kept VALUES ({number})")
        assert pair.standby is not None
        assert pair.standby.sql("SELECT count(*) FROM kept") == [(number + 1,)]
        with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
            pair.standby.sql("DELETE FROM kept")
        pair.fail_over()
        assert sql(pair.dsn, "SELECT count(*) FROM kept") == [(number + 1,)]
        pair.rebuild()


async def test_a_commit_waits_for_the_synchronous_replica(postgres: Installation) -> None:
    pair = Pair(postgres)
    assert pair.standby is not None
    connection = await asyncpg.connect(pair.dsn)
    await connection.execute("CREATE TABLE kept (number int)")
    pair.standby.freeze()
    asked = asyncio.create_task(connection.execute("INSERT INTO kept VALUES (1)"))
    done, _ = await asyncio.wait([asked], timeout=0.3)
    assert not done
    pair.standby.unfreeze()
    await asked
    await connection.close()


def test_a_replica_that_is_not_synchronous_holds_nobody_up(postgres: Installation) -> None:
    server = postgres.server()
    replica = server.replica(synchronous=False)
    replica.kill()
    server.sql("CREATE TABLE kept (number int)")
    replica.start()
    replica._wait_for("SELECT FROM pg_tables WHERE tablename = 'kept'")


# --- Nothing stays behind

SESSION = """
import sys
from pathlib import Path
from tests.postgres_server import Databases
databases = Databases.shared(Path(sys.argv[1]))
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def user(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Return a process that has begun to share a server in this folder."""
    environment = {name: value for name, value in os.environ.items() if name != RUNNING}
    process = subprocess.Popen(
        [sys.executable, "-c", SESSION, str(tmp_path)],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_nothing_is_left_of_a_session_that_was_killed(
    tmp_path: Path, user: subprocess.Popen[str], number: signal.Signals
) -> None:
    folder = Path((tmp_path / "postgres").read_text().split()[0])
    [lock] = folder.glob("*/postmaster.pid")
    segment = segment_of(lock.parent)
    assert is_there(segment)
    assert processes_of(folder)
    user.send_signal(number)
    user.wait()
    await until(lambda: not folder.exists() and not processes_of(folder))
    assert not is_there(segment)


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "frozen"])
def test_nothing_is_left_of_a_server_in_any_condition(is_stopped: bool) -> None:
    installation = Installation()
    servers = [installation.server(), installation.server()]
    segments = [segment_of(server.data) for server in servers]
    servers[0].kill()
    if is_stopped:
        servers[1].freeze()
    installation.remove()
    assert not installation.folder.path.exists()
    assert not processes_of(installation.folder.path)
    assert not any(map(is_there, segments))


def test_nothing_is_left_of_an_object_storage_that_was_killed() -> None:
    server = SeaweedServer()
    server.start()
    outside = [Path(name) for name in (server.folder.path / ELSEWHERE).read_text().splitlines()]
    assert any(path.exists() for path in outside)
    server.kill()
    server.remove()
    assert not any(path.exists() for path in outside)
    assert not server.folder.path.exists()


async def test_the_last_one_who_shares_a_server_ends_it(
    tmp_path: Path, user: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RUNNING, raising=False)
    folder = Path((tmp_path / "postgres").read_text().split()[0])
    databases = Databases.shared(tmp_path)
    user.kill()
    user.wait()
    with databases.database() as one, databases.database() as other:
        sql(one, "CREATE TABLE mine (number int)")
        assert sql(other, "SELECT count(*) FROM pg_tables WHERE tablename = 'mine'") == [(0,)]
    assert folder.exists()
    databases.leave()
    await until(lambda: not folder.exists())
    assert ServerFolder.join(folder) is None
    again = Databases.shared(tmp_path)
    with again.database() as url:
        assert sql(url, "SELECT 1") == [(1,)]
    again.leave()


async def test_a_database_is_dropped_although_somebody_is_connected(databases: Databases) -> None:
    with databases.database() as url:
        connection = await asyncpg.connect(url)
    with pytest.raises(asyncpg.InvalidCatalogNameError):
        sql(url, "SELECT")
    connection.terminate()
    await asyncio.sleep(0)


# --- Where the server comes from


def test_the_wheel_has_a_server_that_works() -> None:
    installation = Installation(find_binaries("wheel"))
    try:
        server = installation.server()
        assert server.sql("SELECT 1") == [(1,)]
        assert version_of(installation.binaries) >= 16
        assert WHEEL in installation.binaries.parts
    finally:
        installation.remove()


def test_programs_that_the_user_cannot_reach_are_copied(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    real = find_binaries("wheel")
    package = real.parents[1]
    for name in (package.name, f"{package.name}.libs"):
        (tmp_path / name).symlink_to(package.with_name(name))
    binaries = tmp_path / package.name / real.parent.name / "bin"
    installation = Installation(binaries)
    try:
        assert (installation.binaries == binaries) == (installation.user is None)
        assert installation.server().sql("SELECT 1") == [(1,)]
    finally:
        installation.remove()


def test_a_running_server_is_used_if_it_is_named(
    postgres: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = postgres.server()
    monkeypatch.setenv(RUNNING, server.dsn)
    databases = Databases.shared(tmp_path)
    with databases.database() as url:
        assert f":{server.port}/test_" in url
        assert sql(url, "SELECT 1") == [(1,)]
    databases.leave()
    assert not list(tmp_path.iterdir())
    assert server.sql("SELECT 1") == [(1,)]


def test_without_any_server_it_fails_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.postgres_server._installed", lambda: iter(()))
    monkeypatch.setattr("tests.postgres_server._in_wheel", lambda: iter(()))
    with pytest.raises(NoServer, match="make dev"):
        find_binaries()
    with pytest.raises(NoServer, match="asked for: /nowhere"):
        find_binaries("/nowhere")


def test_a_port_is_one_that_nobody_is_given_by_chance() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert 10_000 <= free_port() < lowest
