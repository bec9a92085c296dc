"""`hf.stream`: what activities and workflows write while they work, for readers outside."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.events import StepCompleted
from holdfast.errors import InvalidInput, NotDurable, NotFound, PayloadTooLarge
from holdfast.run import RunHandle
from holdfast.store.memory import MemoryStore
from holdfast.store.port import Capabilities
from tests.engine.harness import MOST_SECONDS, EngineVariant, wait_for_event

pytestmark = pytest.mark.contract("STR-1")


async def read(run: RunHandle[Any], name: str = "tokens", after: int = 0) -> list[hf.StreamChunk]:
    """Read a stream to its end."""
    async with asyncio.timeout(MOST_SECONDS):
        return [chunk async for chunk in run.stream(name, after=after)]


def values(chunks: list[hf.StreamChunk]) -> list[Any]:
    """Return the values of chunks, whose numbers have no gaps."""
    assert [chunk.seq for chunk in chunks] == list(range(1, len(chunks) + 1))
    return [chunk.value for chunk in chunks]


async def test_reader_gets_chunks_while_the_activity_goes_on(variant: EngineVariant) -> None:
    app, goes_on = hf.App("streams"), asyncio.Event()

    @app.activity
    async def ask(question: str) -> str:
        out = hf.stream("tokens")
        await out.write("one")
        await out.write({"two": 2})
        await goes_on.wait()
        await out.write("three")
        return "done"

    @app.workflow
    async def agent(question: str) -> str:
        return await ask(question)

    async with variant.node(app):
        run = await app.start(agent, "why")
        seen = []
        async for chunk in run.stream("tokens"):
            seen.append(chunk)
            if chunk.seq == 2:
                goes_on.set()
        assert values(seen) == ["one", {"two": 2}, "three"]
        assert {(chunk.step_id, chunk.attempt) for chunk in seen} == {(seen[0].step_id, 1)}
        assert await run.result() == "done"
        assert [chunk.value for chunk in await read(run, after=2)] == ["three"]
        assert await read(run, "other") == []
        with pytest.raises(NotFound):
            await read(app.run("none"))
        with pytest.raises(InvalidInput):
            run.stream("tokens", after=-1)


async def test_workflow_writes_once_with_its_turns_over_replays_and_rotations(variant: EngineVariant) -> None:
    app = hf.App("streams")

    @app.workflow
    async def talk(rounds: int) -> str:
        out = hf.stream("tokens")
        await out.write(f"begin {rounds}")
        await hf.wait_signal("go")
        await out.write(f"went {rounds}")
        if rounds:
            hf.continue_as_new(rounds - 1)
        out.close()
        await hf.wait_signal("end")
        return "done"

    async with variant.node(app):
        run = await app.start(talk, 1)
        for _ in range(2):
            await run.signal("go")
        assert values(await read(run)) == ["begin 1", "went 1", "begin 0", "went 0"]
        assert {chunk.step_id for chunk in await read(run)} == {""}
        await run.signal("end")
        assert await run.result() == "done"
        assert len(await read(run)) == 4


async def test_attempt_after_a_failure_begins_anew_or_resumes(variant: EngineVariant) -> None:
    app = hf.App("streams")

    @app.activity(retry=hf.Retry(max_attempts=3, initial_ms=1))
    async def anew() -> None:
        out = hf.stream("anew")
        for number in range(3):
            if number == 2 and hf.activity_context().attempt == 1:
                raise OSError("cut off")
            await out.write(number)

    @app.activity(retry=hf.Retry(max_attempts=3, initial_ms=1))
    async def resuming() -> None:
        out = hf.stream("resuming")
        for number in range(await out.resume(), 5):
            if number == 3 and hf.activity_context().attempt == 1:
                raise OSError("cut off")
            await out.write(number)

    @app.workflow
    async def both() -> None:
        await anew()
        await resuming()

    async with variant.node(app):
        run = await app.start(both)
        await run.result()
        chunks = await read(run, "anew")
        assert values(chunks) == [0, 1, 0, 1, 2]
        assert [chunk.restarted_from for chunk in chunks] == [None, None, 1, None, None]
        chunks = await read(run, "resuming")
        assert values(chunks) == [0, 1, 2, 3, 4]
        assert {chunk.restarted_from for chunk in chunks} == {None}


async def test_job_from_a_queue_and_a_thread_write_too(variant: EngineVariant) -> None:
    app = hf.App("streams")

    @app.activity
    async def queued() -> None:
        for number in range(100):
            await hf.stream("tokens").write(number)

    @app.activity
    def in_thread() -> None:
        for number in range(100, 200):
            hf.stream("tokens").write_blocking(number)

    @app.workflow
    async def both() -> None:
        await queued.options(queue="models")()
        await in_thread()

    async with variant.node(app, queues=("models",)):
        run = await app.start(both)
        assert values(await read(run)) == list(range(200))
        await run.result()


async def test_chunks_are_durable_before_the_outcome_and_bounded(variant: EngineVariant) -> None:
    app = hf.App("streams", limits=hf.Limits(stream_chunk_bytes=1_000, stream_bytes=5_000))

    @app.activity
    async def much() -> str:
        out = hf.stream("tokens")
        with pytest.raises(PayloadTooLarge):
            await out.write("x" * 1_000)
        for _ in range(20):
            await out.write("x" * 900)
        out.close()
        with pytest.raises(InvalidInput):
            await out.write("y")
        return "done"

    @app.workflow
    async def work() -> str:
        return await much()

    async with variant.node(app):
        run = await app.start(work)
        event = await wait_for_event(run, "StepCompleted")
        assert isinstance(event.data, StepCompleted)
        reader = run.stream("tokens")
        seen = [chunk async for chunk in reader]
        assert reader.dropped + len(seen) == 20
        assert reader.dropped > 0
        await run.result()


async def test_read_only_code_and_other_code_do_not_write(variant: EngineVariant) -> None:
    app = hf.App("streams")
    with pytest.raises(NotDurable):
        hf.stream("tokens")

    @app.workflow
    async def asked() -> None:
        out = hf.stream("tokens")
        hf.on_query("write", lambda: out.write_blocking(1))
        hf.on_query("open", lambda: hf.stream("tokens").name)
        await hf.wait_signal("end")

    async with variant.node(app):
        run = await app.start(asked)
        await wait_for_event(run, "SignalWaiting")
        for name in ("write", "open"):
            with pytest.raises(NotDurable):
                await run.query(name)
        await run.signal("end")
        await run.result()
        assert await read(run) == []


async def test_store_without_streams_refuses(variant: EngineVariant) -> None:
    can = {"conditional_batch": True, "atomic_batch": True, "read_after_write": True, "scan_consistency": "snapshot"}
    store = MemoryStore(capabilities=Capabilities(**can, lacking=frozenset({"streams"})))  # type: ignore[arg-type]
    app = hf.App("streams")

    @app.activity
    async def ask() -> None:
        hf.stream("tokens")

    @app.workflow
    async def agent() -> None:
        await ask()

    @app.workflow
    async def talk() -> None:
        await hf.stream("tokens").write(1)

    async with variant.node(app, store):
        with pytest.raises(hf.errors.RunFailed, match="capability streams"):
            await (await app.start(agent)).result()
        run = await app.start(talk)
        event = await wait_for_event(run, "RunPaused")
        assert "keeps none" in str(event.data)


NODE = """
import asyncio, sys
import holdfast as hf

path, ledger, resumes, stops_after = sys.argv[1:]
app = hf.App("streams")

@app.activity(retry=hf.Retry(max_attempts=1_000, initial_ms=1))
async def count(most: int) -> None:
    out = hf.stream("tokens")
    with open(ledger, "a") as file:
        first = await out.resume() if resumes == "resumes" else 0
        for number in range(first, most):
            if number == first + int(stops_after):
                await asyncio.Event().wait()  # for who kills this process, however late they look
            await out.write(number)
            file.write(f"{number}\\n")
            file.flush()
            if number % 10 == 0:
                await asyncio.sleep(0.002)

@app.workflow
async def counting(most: int) -> str:
    await count(most)
    return "done"

async def main() -> None:
    options = hf.NodeOptions(lease_ms=60_000)
    async with app.node(f"sqlite:///{path}", name="only", options=options):
        run = await app.start(counting, 1_000, run_id="run")
        await run.result()

asyncio.run(main())
"""
MOST = 1_000
KILLS = 3


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("how", ["resumes", "begins anew"])
async def test_nothing_is_lost_or_doubled_when_the_process_is_killed(how: str, tmp_path: Path) -> None:
    """The node is killed again and again. Outside, a ledger has what was written, and what is read agrees with it."""
    path, ledger = tmp_path / "runs.db", tmp_path / "ledger"
    kills, code = 0, None
    while code is None:
        before = stored(path)
        words = [sys.executable, "-c", NODE, str(path), str(ledger), how, "300" if kills < KILLS else "-1"]
        process = subprocess.Popen(words, stderr=subprocess.PIPE)
        async with asyncio.timeout(MOST_SECONDS):
            while (code := process.poll()) is None and (kills == KILLS or stored(path) < before + 200):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        if code is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        _, errors = process.communicate()
        assert code in (None, 0), errors.decode()
    assert kills == KILLS
    app = hf.App("reader")
    async with app.node(f"sqlite:///{path}", options=hf.NodeOptions(takes_runs=False)):
        chunks = await read(app.run("run"))
    found, marks = values(chunks), [place for place, chunk in enumerate(chunks) if chunk.restarted_from is not None]
    written = [int(line) for line in ledger.read_text().split()]
    if how == "resumes":
        assert marks == []
        assert found == list(range(MOST))
        assert set(written) == set(range(MOST))
        return
    parts = [found[first:end] for first, end in zip([0, *marks], [*marks, len(found)], strict=True)]
    assert len(parts) == KILLS + 1
    assert [len(part) for part in parts[:-1]] >= [200] * KILLS
    assert all(part == list(range(len(part))) for part in parts)
    assert parts[-1] == list(range(MOST))
    assert [chunks[mark].restarted_from for mark in marks] == [1 + first for first in [0, *marks[:-1]]]
    starts = [place for place, number in enumerate(written) if number == 0]
    lives = [written[first:end] for first, end in zip(starts, [*starts[1:], len(written)], strict=True)]
    assert all(
        len(life) + 1 >= len(part) for life, part in zip(lives, parts, strict=True)
    )  # nothing that was not written


def stored(path: Path) -> int:
    """Return how many chunks the file has."""
    if not path.exists():
        return 0
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        found = db.execute("SELECT max(last_seq) FROM streams").fetchone()
        return found[0] or 0
    except sqlite3.OperationalError:
        return 0
    finally:
        db.close()
