"""What the event bus costs runs: `python -m bench.bus` measures them without a sink, with one, and with a relay.

Each round takes all of them once, each in a new process and on a new store, so that what else the machine does concerns
all alike. CPU is that of the process, the relay's included, and on PostgreSQL that of the server too. The sink is a
function that does nothing: what is measured is the outbox and the relay, not a network. `--store postgres` starts a
server, and counts its transactions.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

import holdfast as hf
from bench import engine, postgres
from bench.engine import elsewhere, run_all_here
from bench.report import Rows, progress, table
from bench.stores import as_the_command, opened

KINDS = ("no bus", "no sink", "a sink, relayed elsewhere", "a sink, relayed here")


class Cost(Struct, frozen=True):
    """What some runs took: seconds, of the processor too, and transactions of the server."""

    took_s: float
    used_s: float
    transactions: int = 0


async def on_file(folder: Path, kind: str, count: int) -> Cost:
    """Measure on a new file."""
    async with opened(folder / "bus.db") as store:
        return await timed(store, kind, count, _no_server)


async def on_server(dsn: str, kind: str, count: int) -> Cost:
    """Measure in a new schema of a server."""
    async with postgres.opened(dsn) as (store, connection):
        (pid,) = await connection.fetchrow("SELECT pg_backend_pid()")
        parent = int(_stat(f"/proc/{pid}/stat")[1])

        async def server() -> tuple[float, int]:
            await connection.execute("SELECT pg_stat_clear_snapshot()")
            (done,) = await connection.fetchrow(
                "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
            )
            return _used_by_children(parent), done

        return await timed(store, kind, count, server)


async def _no_server() -> tuple[float, int]:
    return 0.0, 0


def _stat(path: str | Path) -> list[str]:
    return Path(path).read_text().rpartition(")")[2].split()


def _used_by_children(parent: int) -> float:
    """Return the seconds that the processes of a server have used."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = _stat(stat)
            ticks += int(fields[11]) + int(fields[12]) if int(fields[1]) == parent else 0
    return ticks / os.sysconf("SC_CLK_TCK")


async def timed(store: Any, kind: str, count: int, server: Callable[[], Awaitable[tuple[float, int]]]) -> Cost:
    """Return what runs cost on a node that is new."""
    if kind in KINDS[2:]:
        await store.put_sink(hf.Sink(name="nothing", kind="projection"))
        engine.app.projection("nothing")(lambda events: None)
    options = replace(as_the_command(), relays=kind in (KINDS[1], KINDS[3]))
    async with engine.app.node(store, options=options):
        await run_all_here(200)
        (server_s, done), began = await server(), time.process_time()
        took_s = await run_all_here(count)
        used_s = time.process_time() - began
        after_s, now_done = await server()
    return Cost(took_s, used_s + after_s - server_s, now_done - done)


def measure(folder: Path, count: int, rounds: int, dsn: str | None = None) -> Rows:
    """Return the figures of each kind: medians over the rounds."""
    found: dict[str, list[Cost]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        for kind in KINDS:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                work = (on_file, Path(place)) if dsn is None else (on_server, dsn)
                found[kind].append(elsewhere(*work, kind, count))
    bare = found[KINDS[0]]
    return {kind: _row(each, bare, count) for kind, each in found.items()}


def _row(found: Sequence[Cost], bare: Sequence[Cost], count: int) -> dict[str, Any]:
    pairs = list(zip(found, bare, strict=True))
    return {
        "runs/s": statistics.median(count / each.took_s for each in found),
        "of no bus": statistics.median(without.took_s / each.took_s for each, without in pairs),
        "CPU ms/run": statistics.median(1_000 * each.used_s / count for each in found),
        "CPU of no bus": statistics.median(each.used_s / without.used_s for each, without in pairs),
        "transactions/run": statistics.median(each.transactions / count for each in found),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--store", choices=["sqlite", "postgres"], default="sqlite")
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as place,
        postgres.server() if asked.store == "postgres" else nullcontext() as at,
    ):
        rows = measure(Path(place), asked.runs, asked.rounds, at)
        print(table(f"Runs of three steps, beside the event bus, on {asked.store}", rows))
