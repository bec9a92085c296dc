"""`python -m bench.bucket`: turns in a bucket, as a ratio to the conditional writes that its server takes.

The server is SeaweedFS on this machine. Each round measures all three, one after the other: what the server takes from
`WRITERS` writers at once, each of which replaces an object of its own under the condition that it has not changed; runs
of `STEPS` steps that one process starts and one node executes; and the same with four nodes. The ratio of a round does
not depend on what else the machine does, as long as it does it all the time.
"""

import asyncio
import os
import statistics
import sys
import time

from bench.engine import app, steps
from bench.fleet import node_processes
from bench.report import Rows, progress, table
from bench.stores import as_the_command
from holdfast.store.port import RunQuery
from holdfast.store.s3.bucket import Bucket
from tests.seaweed_server import SeaweedServer

ROUNDS = 3
WRITERS = 32
WRITES_S = 3.0
RUNS = 30
STEPS = 10
HEAD_BYTES = 4_000
"""As large as the head of such a run."""


def main() -> int:
    """Measure, and print the medians."""
    server = SeaweedServer()
    server.start()
    os.environ.update(server.environment())
    try:
        rows = asyncio.run(_measure(server))
    finally:
        server.remove()
    sys.stdout.write(table("Turns in a bucket, beside conditional writes of its server", rows) + "\n")
    return 0


async def _measure(server: SeaweedServer) -> Rows:
    writes, turns = list[float](), dict[int, list[float]]({1: [], 4: []})
    for number in range(ROUNDS):
        progress(f"bucket: round {number + 1} of {ROUNDS}")
        writes.append(await _writes(f"s3://{server.make_bucket()}/raw"))
        for nodes, rates in turns.items():
            rates.append(await _turns(f"s3://{server.make_bucket()}/bench", nodes))
    rows: Rows = {f"conditional writes, {WRITERS} at once": {"per s": statistics.median(writes)}}
    for nodes, rates in turns.items():
        ratio = statistics.median(rate / write for rate, write in zip(rates, writes, strict=True))
        rows[f"turns, {nodes} node{'s' if nodes > 1 else ''}"] = {"per s": statistics.median(rates), "ratio": ratio}
    return rows


async def _writes(address: str) -> float:
    """Return how many conditional writes the server takes in a second."""
    bucket, count = Bucket.at(address), 0
    end = time.perf_counter() + WRITES_S

    async def write(number: int) -> None:
        nonlocal count
        data = b"x" * HEAD_BYTES
        etag = await bucket.put(f"heads/{number}", data)
        while time.perf_counter() < end:
            written = await bucket.replace(f"heads/{number}", data, etag, b"no other writer")
            assert written is not None
            etag = written.etag
            count += 1

    await asyncio.gather(*map(write, range(WRITERS)))
    return count / WRITES_S


async def _turns(address: str, nodes: int) -> float:
    """Return how many turns the nodes make in a second, from the first start to the last result."""
    async with app.node(address, options=as_the_command(takes_runs=False)), node_processes(address, nodes):
        await _finished(nodes)
        began = time.perf_counter()
        run_ids = await _finished(RUNS)
        took_s = time.perf_counter() - began
        store = app.runtime().store
        turns = 0
        for head in await store.find(RunQuery(run_ids=tuple(run_ids), limit=RUNS)):
            events = await store.read_events(head.run_id, limit=1_000)
            turns += len({event.persisted_at for event in events})
    return turns / took_s


async def _finished(count: int) -> list[str]:
    """Take so many runs to their end; return their ids."""
    runs = await asyncio.gather(*(app.start(steps, STEPS) for _ in range(count)))
    for run in runs:
        assert await run.result() == STEPS
    return [run.run_id for run in runs]


if __name__ == "__main__":
    sys.exit(main())
