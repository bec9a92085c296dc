"""An outside payment service, in a process and with a database of its own: `python -m tests.payments.service FOLDER`.

Its ledger is the truth about what was charged. It does not recognise a key that it has charged before, as many
services do not, so a payment that is asked for twice is charged twice. What goes wrong is ordered beforehand, for one
key and one request of a kind: `order_fault`. The service dies for real, with `os._exit`; a supervisor starts it again.

A request is one line of JSON on a connection of its own, and so is the answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

Fault = Literal[
    "refuse",  # no charge, and an answer that says so
    "drop-before",  # no charge, and the connection breaks
    "die-before",  # no charge, and the service dies
    "drop-after",  # charged, and the connection breaks before the answer
    "die-after",  # charged, and the service dies before the answer
    "silent",  # charged (or known), and no answer ever comes
    "hold",  # charged once a later request for the key was refused, as one that was long on its way
    "late",  # charged, and the answer comes after the caller has given up
    "kill-caller",  # charged and answered; the caller's process dies before it can record the answer
    "kill-caller-before",  # no charge, and the caller's process dies
    "forget",  # a lookup that does not find what was charged
    "no-details",  # a lookup that knows that it was charged, and nothing else
    "unsure",  # a lookup that does not know
    "error",  # a lookup that fails
    "another",  # a lookup that answers with another charge than the one that was made
]
DIED = 11
LATE_S = 6.0
"""Longer than the limit of an attempt."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS charges (
    number INTEGER PRIMARY KEY, key TEXT NOT NULL, cents INTEGER NOT NULL, sent_at REAL NOT NULL, made_at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS faults (key TEXT, verb TEXT, nth INTEGER, fault TEXT, PRIMARY KEY (key, verb, nth));
CREATE TABLE IF NOT EXISTS requests (key TEXT, verb TEXT, pid INTEGER, came_at REAL NOT NULL);
"""


def database(folder: Path) -> sqlite3.Connection:
    """Open the ledger."""
    connection = sqlite3.connect(folder / "ledger.db", isolation_level=None, timeout=60)
    connection.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;" + _SCHEMA)
    return connection


def order_fault(folder: Path, key: str, verb: str, *faults: Fault | None) -> None:
    """Order what goes wrong with the first, second, … request of a kind for this key. None: nothing."""
    with closing(database(folder)) as db:
        rows = [(key, verb, nth, fault) for nth, fault in enumerate(faults, 1) if fault]
        db.executemany("INSERT OR REPLACE INTO faults VALUES (?, ?, ?, ?)", rows)


def charges(folder: Path, key: str | None = None) -> dict[str, list[int]]:
    """Return the numbers of the charges that were made, by key."""
    found: dict[str, list[int]] = {}
    with closing(database(folder)) as db:
        for number, of in db.execute("SELECT number, key FROM charges WHERE ?1 IS NULL OR key = ?1", (key,)):
            found.setdefault(of, []).append(number)
    return found


def is_overtaken(folder: Path, key: str) -> bool:
    """Return whether a charge was on its way when the last lookup was answered: no verifier could know of it."""
    with closing(database(folder)) as db:
        asked = db.execute("SELECT max(came_at) FROM requests WHERE key = ? AND verb = 'find'", (key,))
        between = (key, *asked.fetchone())
        found = db.execute("SELECT 1 FROM charges WHERE key = ?1 AND sent_at < ?2 AND ?2 < made_at", between)
        return found.fetchone() is not None


def requests(folder: Path, key: str, verb: str) -> int:
    """Return how many requests of a kind were made for a key."""
    with closing(database(folder)) as db:
        (count,) = db.execute("SELECT count(*) FROM requests WHERE key = ? AND verb = ?", (key, verb)).fetchone()
    return int(count)


class Declined(Exception):
    """The card was refused: nothing was charged."""


async def ask(folder: Path, verb: str, key: str, cents: int = 0) -> Any:
    """Send one request to the service, and return its answer. End this process if the fault is to do so."""
    reader, writer = await _connect(folder)
    try:
        request = {"verb": verb, "key": key, "cents": cents, "sent_at": time.time()}
        writer.write(json.dumps(request).encode() + b"\n")
        await writer.drain()
        line = await reader.readline()
    finally:
        writer.close()
    if not line:
        raise ConnectionError("the payment service closed the connection")
    answer = json.loads(line)
    if answer.get("die"):
        os._exit(DIED)
    if "declined" in answer:
        raise Declined(answer["declined"])
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer


async def _connect(folder: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the service; one that has died is started again, on another port."""
    while True:
        try:
            port = int((folder / "port").read_text(encoding="ascii"))
            return await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.02)


class Service:
    """Charges, looks up, and fails as ordered."""

    def __init__(self, folder: Path) -> None:
        self._db = database(folder)
        self._held: dict[str, asyncio.Event] = {}

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the request of one connection, or break it."""
        try:
            request = json.loads(await reader.readline())
            answer = await (self._charge if request["verb"] == "charge" else self._find)(request)
            if answer is not None:
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (ConnectionError, json.JSONDecodeError):
            pass  # the caller is gone
        finally:
            writer.close()

    async def _charge(self, request: dict[str, Any]) -> dict[str, Any] | None:
        fault = self._fault(request)
        if fault == "refuse":
            if request["key"] in self._held:
                self._held.pop(request["key"]).set()
                await asyncio.sleep(0)  # the other request goes on
            return {"declined": "the card was refused"}
        if fault == "hold":
            self._held[request["key"]] = asyncio.Event()
            await self._held[request["key"]].wait()
        if fault == "drop-before":
            return None
        if fault == "kill-caller-before":
            return {"die": True}
        if fault == "die-before":
            os._exit(DIED)
        row = (request["key"], request["cents"], request["sent_at"], time.time())
        made = self._db.execute("INSERT INTO charges (key, cents, sent_at, made_at) VALUES (?, ?, ?, ?)", row)
        number = made.lastrowid
        if fault == "die-after":
            os._exit(DIED)
        if fault == "drop-after":
            return None
        if fault == "silent":
            await asyncio.Event().wait()
        if fault == "late":
            await asyncio.sleep(LATE_S)
        return {"charge": number, "die": fault == "kill-caller"}

    async def _find(self, request: dict[str, Any]) -> dict[str, Any] | None:
        fault = self._fault(request)
        if fault == "silent":
            await asyncio.Event().wait()
        if fault in ("drop-before", "drop-after"):
            return None
        if fault == "kill-caller":
            return {"die": True}
        if fault == "error":
            return {"error": "the lookup failed"}
        if fault == "unsure":
            return {"state": "unsure"}
        rows = self._db.execute("SELECT number FROM charges WHERE key = ? ORDER BY number", (request["key"],))
        numbers = [number for (number,) in rows]
        if fault == "another":
            return {"state": "charged", "charge": numbers[0] + 1_000_000 if numbers else 1_000_000}
        if not numbers or fault == "forget":
            return {"state": "none"}
        return {"state": "no-details"} if fault == "no-details" else {"state": "charged", "charge": numbers[0]}

    def _fault(self, request: dict[str, Any]) -> str | None:
        key, verb = request["key"], request["verb"]
        self._db.execute("INSERT INTO requests VALUES (?, ?, ?, ?)", (key, verb, os.getpid(), time.time()))
        (nth,) = self._db.execute("SELECT count(*) FROM requests WHERE key = ? AND verb = ?", (key, verb)).fetchone()
        found = self._db.execute("SELECT fault FROM faults WHERE key = ? AND verb = ? AND nth = ?", (key, verb, nth))
        row = found.fetchone()
        return None if row is None else row[0]


async def main(folder: Path) -> None:
    """Serve until the process is killed."""
    server = await asyncio.start_server(Service(folder).answer, "127.0.0.1", 0)
    draft = folder / "port.new"
    draft.write_text(str(server.sockets[0].getsockname()[1]), encoding="ascii")
    draft.replace(folder / "port")
    (folder / "service.up").write_text(str(os.getpid()), encoding="ascii")
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
