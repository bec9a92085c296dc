"""An answer is given only after the disk has confirmed: no kill can show that, but the system's own record can."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STRACE = shutil.which("strace")

WRITER = """
import asyncio, os, sys
from holdfast.store.sqlite import SqliteStore
from holdfast.testing.samples import SampleNode, new_run, signal, timer

async def answered(verb):
    os.write(2, b"ASK")
    answer = await verb
    os.write(2, b"ACK")
    return answer

async def main():
    store = await SqliteStore.open(sys.argv[1])
    await answered(store.migrate())
    node = SampleNode(store)
    for number in range(5):
        await answered(node.renew())
        await answered(store.create([new_run(f"run-{number}")]))
        await answered(store.deliver([signal(f"run-{number}", signal_id="click")]))
        (run,) = await answered(store.claim(node.name, 1))
        await answered(store.commit([await node.turn(run, timer(1))]))
        await answered(store.release(node.name, [run.head.run_id]))
    await store.close()

asyncio.run(main())
"""


@pytest.mark.contract("STO-1")
def test_every_answer_comes_after_the_last_write_was_synchronised(tmp_path: Path) -> None:
    record = tmp_path / "strace.txt"
    assert STRACE is not None, "this test needs strace: make commands"
    tracing = [STRACE, "-f", "-qq", "-e", "trace=write,pwrite64,fsync,fdatasync", "-o", str(record)]
    command = [*tracing, sys.executable, "-c", WRITER, str(tmp_path / "store.db")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    if not record.exists() or "PTRACE" in done.stderr or "not permitted" in done.stderr:
        pytest.skip(f"strace may not trace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr

    calls = re.findall(r"ASK|ACK|pwrite64|f(?:data)?sync\(", record.read_text(encoding="utf-8", errors="replace"))
    answers = re.findall(r"ASK ((?:\S+ )*?)ACK", " ".join("sync" if "sync" in call else call for call in calls))

    assert len(answers) == 31
    for calls_of_one in answers:
        assert "pwrite64" in calls_of_one, "nothing was written"
        assert calls_of_one.split()[-1] == "sync", f"answered before the disk had confirmed: {calls_of_one}"
