"""Runs started over HTTP, each acknowledged when it is durable: `python -m bench.http --connections 32 --seconds 5`.

A service in a process of its own, with its node or without, on a new SQLite file; and callers in this one, each of
which asks again as soon as it is answered. Both share the machine, so the figure is less than the service can do.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from asyncio.subprocess import PIPE

SERVED = """
import asyncio, logging, sys
import holdfast as hf
from holdfast.service.options import ServiceOptions
from holdfast.service.http.server import serve

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
app = hf.App("bench")

@app.workflow
async def trivial(n: int) -> int:
    return n

node = hf.NodeOptions(takes_runs=sys.argv[2] == "works", tune_gc=True)
asyncio.run(serve(app, sys.argv[1], options=ServiceOptions(port=0, is_open=True), node=node))
"""
BODY = b'{"workflow":"trivial","input":{"n":7}}'
REQUEST = b"POST /v1/runs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)


async def call(port: int, until: float, times: list[float]) -> None:
    """Ask on one connection until the time is up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while (begun := time.perf_counter()) < until:
        writer.write(REQUEST)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 201 "), head
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(size)
        times.append(time.perf_counter() - begun)
    writer.close()


async def measure(role: str, connections: int, seconds: float) -> str:
    """Return a line with what one kind of service can do."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", SERVED, f"sqlite:///{folder}/bench.db", role]
        served = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
        assert served.stdout is not None
        try:
            while b"is served at" not in (line := await served.stdout.readline()):
                assert line, "it ended before it served"
            port = int(line.rpartition(b":")[2])
            times: list[float] = []
            await asyncio.gather(*(call(port, time.perf_counter() + seconds, times) for _ in range(connections)))
        finally:
            served.terminate()
            await served.communicate()
    times.sort()
    p50, p99 = (times[int(len(times) * part)] * 1_000 for part in (0.5, 0.99))
    return f"{role:<9} {len(times) / seconds:>8,.0f} runs started/s   p50 {p50:.1f} ms   p99 {p99:.1f} ms"


def main() -> None:
    """Measure as the command line asks."""
    parser = argparse.ArgumentParser(prog="python -m bench.http", description=__doc__)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    for role in ("works", "connects"):
        print(asyncio.run(measure(role, arguments.connections, arguments.seconds)))


if __name__ == "__main__":
    main()
