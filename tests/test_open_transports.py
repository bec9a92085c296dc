"""What a test leaves open is found at its end, so that the test itself fails and not a later one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SCRIPT = """
import asyncio
from tests import open_transports

async def connect():
    server = await asyncio.start_server(lambda reader, writer: held.append(writer), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    server.close()
    return writer

async def start():
    return await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)

async def close():
    writer = await connect()
    writer.close()
    await writer.wait_closed()
    for other in held:
        other.close()
    await asyncio.sleep(0)

held = []
open_transports.watch()
loop = asyncio.new_event_loop()
held.append(loop.run_until_complete({make}()))
print(len(open_transports.left_open()))
loop.close()
print(*open_transports.left_open())
print(len(open_transports.left_open()))
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("make", "found"),
    [("connect", "_SelectorSocketTransport"), ("start", "_UnixSubprocessTransport"), ("close", "")],
)
def test_a_transport_that_outlives_its_loop_is_found_once_and_one_that_is_closed_is_not(make: str, found: str) -> None:
    """In a process of its own, because what it leaves open would fail another test."""
    script = SCRIPT.replace("{make}", make)
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    before, at_the_end, again = done.stdout.splitlines()
    assert (before, again) == ("0", "0"), "an open loop may be shared, and nothing is named twice"
    assert found in at_the_end
    assert bool(at_the_end) == bool(found)
