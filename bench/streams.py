"""What event streams cost the runs of their node: many are open, read by another process, and most say nothing."""

import asyncio
import multiprocessing
import resource
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

from bench.effort import Effort
from bench.engine import app, parked, run_all_here
from bench.report import Row, Rows, progress, ratios
from bench.stores import as_the_command, opened
from holdfast.service.context import make_service
from holdfast.service.http.server import listening
from holdfast.service.options import ServiceOptions

LISTS = 10
OPENED_AT_ONCE = 100


async def measure(effort: Effort, folder: Path) -> Rows:
    """Measure with streams of runs that wait, and with some that are told of every run that goes on."""
    _allow_files(4 * effort.streams)
    rows: Rows = {}
    for lists, label in ((0, "of waiting runs"), (LISTS, f"{LISTS} of them of lists")):
        progress(f"streams: {effort.streams:,} {label}")
        name = f"{effort.streams:,} {label}" if not lists else f"{effort.streams:,}, {label}"
        rows[name] = await _measure(folder, effort, lists)
    return rows


async def _measure(folder: Path, effort: Effort, lists: int) -> Row:
    streams, runs = effort.streams, effort.stream_runs
    path = folder / "streams.db"
    options = ServiceOptions(port=0, is_open=True, streams=streams, connections=2 * streams + 100)
    rates: list[float] = []
    bare: list[float] = []
    cpu: list[float] = []
    bare_cpu: list[float] = []
    async with opened(path) as store, app.node(store, options=as_the_command()):
        waiting = [(await app.start(parked)).run_id for _ in range(streams - lists)]
        paths = [f"/v1/runs/{run_id}/stream" for run_id in waiting] + ["/v1/stream"] * lists
        for _ in range(effort.stream_rounds):
            await _round(runs, bare, bare_cpu)
            service = make_service(app, options)
            async with listening(service) as port:
                ours, theirs = multiprocessing.Pipe()
                reader = multiprocessing.get_context("spawn").Process(target=_read, args=(port, paths, theirs))
                reader.start()
                await asyncio.to_thread(ours.recv)
                assert service.change_feeds.subscribers == streams
                await _round(runs, rates, cpu)
                ours.send("enough")
                await asyncio.to_thread(reader.join)
    path.unlink()
    return {
        "runs/s": statistics.median(rates),
        "without": statistics.median(bare),
        "CPU µs/run": statistics.median(cpu),
        "CPU without": statistics.median(bare_cpu),
        **ratios(rates, bare),
    }


async def _round(runs: int, rates: list[float], cpu: list[float]) -> None:
    """Measure runs by the clock, and by what the process has used: others may be busy on the machine."""
    began = time.process_time()
    rates.append(runs / await run_all_here(runs))
    cpu.append((time.process_time() - began) / runs * 1e6)


def _allow_files(count: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(count + 200, most), most))


# --- in another process


def _read(port: int, paths: list[str], told: Connection) -> None:
    asyncio.run(_read_all(port, paths, told))


async def _read_all(port: int, paths: list[str], told: Connection) -> None:
    _allow_files(2 * len(paths))
    readers: list[asyncio.Task[None]] = []
    for start in range(0, len(paths), OPENED_AT_ONCE):
        opening = [_open(port, path) for path in paths[start : start + OPENED_AT_ONCE]]
        readers += [asyncio.create_task(_read_on(reader)) for reader in await asyncio.gather(*opening)]
    told.send("open")
    await asyncio.to_thread(told.recv)
    for task in readers:
        task.cancel()


async def _open(port: int, path: str) -> asyncio.StreamReader:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: bench\r\n\r\n".encode())
    await reader.readuntil(b"retry: ")
    reader._writer = writer  # type: ignore[attr-defined]  # so that it is not closed
    return reader


async def _read_on(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass
