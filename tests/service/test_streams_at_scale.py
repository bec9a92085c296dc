"""Streams at scale: nothing is lost or doubled however often writers and readers are cut off, and memory stays bounded.

`make soak` plays them long: TEST_STREAM_CHUNKS, TEST_STREAM_KILLS, TEST_STREAM_READERS.
"""

import asyncio
import os
import random
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest

import holdfast as hf
from holdfast.client import Client
from tests.service.server_process import Server

CHUNKS = int(os.environ.get("TEST_STREAM_CHUNKS", "20000"))
KILLS = int(os.environ.get("TEST_STREAM_KILLS", "2"))
READERS = int(os.environ.get("TEST_STREAM_READERS", "40"))
PATIENCE_S = 60 + CHUNKS / 500 + READERS
GROWTH_MB = 150
"""How much more memory a process may need at most than before its readers came, however long the stream is."""

SHOP = """
import asyncio, sys
import holdfast as hf
from holdfast.service.options import ServiceOptions
from holdfast.service.context import make_service
from holdfast.service.http.server import listening

app = hf.App("shop", limits=hf.Limits(stream_bytes=1 << 30))

@app.activity(retry=hf.Retry(max_attempts=1_000, initial_ms=1))
async def count(most: int) -> None:
    out = hf.stream("numbers")
    for number in range(await out.resume(), most):
        await out.write(number)

@app.workflow
async def counting(most: int, waits: bool) -> None:
    if waits:
        await hf.wait_signal("go")
    await count(most)

async def main(options):
    async with app.node("sqlite:///shop.db", name="only", options=hf.NodeOptions(lease_ms=60_000)):
        async with listening(make_service(app, options)):
            await asyncio.Event().wait()

if __name__ == "__main__":
    options = ServiceOptions(port=int(sys.argv[1]), is_open=True, streams=2_000, connections=3_000)
    asyncio.run(main(options))
"""


def free_port() -> int:
    """Return a port that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def count_chunks(port: int, run_id: str, draw: random.Random, breaks: int) -> tuple[int, int]:
    """Read the stream of numbers to its end, breaking off so often; return how many chunks came, and reconnections."""
    retry = hf.Retry(max_attempts=0, initial_ms=20, most_ms=500)
    last, broken = 0, 0
    async with Client(f"http://127.0.0.1:{port}", retry=retry) as client:
        while True:
            until = last + draw.randrange(1, max(2, 2 * CHUNKS // (breaks + 1))) if broken < breaks else None
            chunks = client.streams.follow(run_id, "numbers", after=last)
            async for chunk in chunks:
                assert (chunk.seq, chunk.value) == (last + 1, last)
                last = chunk.seq
                if last == until:
                    break
            else:
                return last, broken
            await chunks.aclose()  # type: ignore[attr-defined]
            broken += 1


def memory_mb(pid: int) -> float:
    """Return how much memory a process had at most."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


@pytest.mark.contract("STR-1", "API-3")
@pytest.mark.process
@pytest.mark.slow
async def test_nothing_is_lost_or_doubled_by_kills_and_reconnections(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    seed = int(os.environ.get("TEST_SEED", random.randrange(10**6)))
    print(f"TEST_SEED={seed}")
    port, draw = free_port(), random.Random(seed)
    began = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        async with Server(tmp_path, port) as server:
            run_id = await server.start_run("counting", most=CHUNKS, waits=False)
            readers = [asyncio.create_task(count_chunks(port, run_id, draw, breaks=5)) for _ in range(3)]
            await _reach(port, run_id, CHUNKS // (KILLS + 2))
            server.signal(signal.SIGKILL)
        for number in range(1, KILLS + 1):
            async with Server(tmp_path, port) as server:
                if number < KILLS:
                    await _reach(port, run_id, (number + 1) * CHUNKS // (KILLS + 2))
                    server.signal(signal.SIGKILL)
                    continue
                counted = await asyncio.gather(*readers)
                grown = memory_mb(server.pid)
    assert [seen for seen, _ in counted] == [CHUNKS] * 3
    print(f"{CHUNKS} chunks, {KILLS} kills, {counted}: {time.monotonic() - began:.1f} s, {grown:.0f} MB")
    assert grown < 100 + GROWTH_MB


async def _readers_come(port: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        while f"event_streams {READERS}.0" not in (await http.get("/metrics")).text:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def _reach(port: int, run_id: str, seq: int) -> None:
    async with Client(f"http://127.0.0.1:{port}") as client:
        while True:
            found = (await client.streams.list(run_id)).items
            if found and found[0].last_seq >= seq:
                return
            await asyncio.sleep(0.01)


@pytest.mark.contract("STR-1", "API-4")
@pytest.mark.process
@pytest.mark.slow
async def test_many_readers_at_once_get_everything_in_bounded_memory(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    port, most = free_port(), 2_000
    async with asyncio.timeout(PATIENCE_S), Server(tmp_path, port) as server:
        run_id = await server.start_run("counting", most=most, waits=True)
        readers = [asyncio.create_task(count_chunks(port, run_id, random.Random(1), 0)) for _ in range(READERS)]
        await _readers_come(port)
        before = memory_mb(server.pid)
        began = time.monotonic()
        await server.send(run_id, "go")
        counted = await asyncio.gather(*readers)
        print(f"{READERS} readers, {most} chunks each: {time.monotonic() - began:.1f} s")
        assert [seen for seen, _ in counted] == [most] * READERS
        assert memory_mb(server.pid) - before < GROWTH_MB
