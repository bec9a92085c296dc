"""Where the runs of a chaos are kept, and what can be done to it. A store with a server is one class here."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Protocol

from tests.fault_proxy import FaultProxy, Weather
from tests.postgres_server import Installation, Pair
from tests.seaweed_server import SeaweedServer

Harm = tuple[str, Callable[[], None]]

ONE_IN_FIVE = Weather(faults=0.2)


class HarmedStore(Protocol):
    """A store, and the ways to harm its server; each returns when the server works again."""

    url: str
    harms: Sequence[Harm]
    slack_s: float
    """How long after the end of a lease others have gone on with its runs, at most."""
    counts: Mapping[str, int]
    """What there is to be counted of the server once it is closed."""

    def is_held(self) -> bool:
        """Return whether a process that was frozen in the middle of a write holds up all the others."""
        ...

    def close(self) -> None:
        """Give it up."""
        ...


class Address:
    """A store that is left alone: somebody else's."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.harms: Sequence[Harm] = ()
        self.slack_s = 2.0
        self.counts: Mapping[str, int] = {}

    def is_held(self) -> bool:
        """Say no: what is held in a server is let go by the server."""
        return False

    def close(self) -> None:
        """Leave it where it is."""


class File(Address):
    """A SQLite file. It has no server to harm, but whoever writes holds its lock, even if frozen meanwhile."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"sqlite:///{path}")
        self._path = path

    def is_held(self) -> bool:
        """Return whether no process can write for a while."""
        with closing(sqlite3.connect(self._path, timeout=1.0, isolation_level=None)) as database:
            try:
                database.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return True
            database.execute("ROLLBACK")
            return False


class Postgres(Address):
    """A PostgreSQL server that is killed, stopped, restarted and frozen."""

    def __init__(self) -> None:
        self._installation = Installation()
        self._server = server = self._installation.server()
        super().__init__(server.dsn)
        self.harms = (
            ("killed", self._kill),
            ("restarted", server.restart),
            ("stopped at once", self._stop_at_once),
            ("frozen", self._freeze),
        )

    def _kill(self) -> None:
        self._server.kill()
        self._server.start()

    def _stop_at_once(self) -> None:
        self._server.stop("immediate")
        self._server.start()

    def _freeze(self) -> None:
        self._server.freeze()
        Event().wait(2.0)  # nobody answers for so long
        self._server.unfreeze()

    def close(self) -> None:
        """Remove it."""
        self._installation.remove()


class Failover(Address):
    """A PostgreSQL server with a synchronous replica. It is killed and the replica promoted, over and over."""

    def __init__(self) -> None:
        self._installation = Installation()
        self._pair = Pair(self._installation)
        super().__init__(self._pair.dsn)
        self.harms = (("failed over", self._fail_over),)

    def _fail_over(self) -> None:
        self._pair.fail_over()
        self._pair.rebuild()

    def close(self) -> None:
        """Remove both."""
        self._installation.remove()


class Bucket(Address):
    """A bucket of a real object storage that fails one request in five, before or after it is done, and is frozen."""

    def __init__(self, weather: Weather = ONE_IN_FIVE) -> None:
        self._server = SeaweedServer()
        self._server.start()
        self._proxy = FaultProxy(self._server, weather)
        self._before = {name: os.environ.get(name) for name in self._proxy.environment()}
        os.environ.update(self._proxy.environment())
        super().__init__(f"s3://{self._proxy.make_bucket()}/chaos")
        self.harms = (("frozen", self._freeze),)
        self.slack_s = 20.0  # nodes look every 5 seconds, and one request in a hundred takes the patience of its caller

    def _freeze(self) -> None:
        self._server.freeze()
        Event().wait(1.0)
        self._server.thaw()

    def close(self) -> None:
        """Remove it."""
        self.counts = {f"requests {what}": count for what, count in self._proxy.kill().items()}
        self._server.remove()
        for name, value in self._before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def store_named(name: str, folder: Path) -> HarmedStore:
    """Return a place by its name (sqlite, postgres, failover, s3, s3-dropping), or by the address of a store."""
    if name == "sqlite":
        return File(folder / "chaos.db")
    if name == "postgres":
        return Postgres()
    if name == "failover":
        return Failover()
    if name == "s3":
        return Bucket()
    if name == "s3-dropping":
        return Bucket(Weather(faults=0.05, drop_one_in=1_000))
    return Address(name)
