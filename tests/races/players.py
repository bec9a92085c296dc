"""Who plays on the stage. Each function is one player's part; it opens its own store."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

from holdfast.core import codec
from holdfast.core.commands import CompleteRun, RecordMarker, StartTimer, WaitSignal
from holdfast.core.messages import SignalRequest
from holdfast.store import port
from holdfast.store.sqlite import SqliteStore
from tests.races.builders import HOUR_MS, draft, load, new_run, opened
from tests.races.stage import Seat

Answer = port.Accepted | port.Duplicate | port.Refused


async def migrate(seat: Seat, path: Path) -> int:
    """Open a file that nobody has migrated, all at once."""
    seat.meet()
    store = await SqliteStore.open(path)
    try:
        version = await store.migrate()
        await store.create([new_run(f"run-{seat.number}")])
        return version
    finally:
        await store.close()


async def send_signal(seat: Seat, path: Path, run_id: str, times: int, payloads: int = 1) -> list[tuple[int, Answer]]:
    """Send one signal again and again; players differ in the payload if there is more than one."""
    payload = seat.number % payloads
    request = SignalRequest(run_id=run_id, name="approval", signal_id="click", payload=codec.encode(payload))
    answers: list[tuple[int, Answer]] = []
    async with opened(path) as store:
        seat.meet()
        for _ in range(times):
            answers += [(payload, answer) for answer in await store.deliver([request])]
    return answers


async def start_same_request(seat: Seat, path: Path, times: int) -> list[port.Created | port.Existing | port.Refused]:
    """Ask for the same run, each time under another run id."""
    async with opened(path) as store:
        seat.meet()
        return [
            answer
            for time_ in range(times)
            for answer in await store.create([new_run(f"run-{seat.number}-{time_}", "request-1")])
        ]


async def commit_same_version(
    seat: Seat, path: Path, run_id: str, versions: int
) -> list[port.Committed | port.CommitConflict]:
    """Commit a turn from the version that everybody has just read, and see who wins; again and again."""
    answers: list[port.Committed | port.CommitConflict] = []
    async with opened(path) as store:
        for _ in range(versions):
            loaded = await load(store, run_id)
            marker = RecordMarker(step_id=f"at#{loaded.head.version}", name="winner", value=codec.encode(seat.number))
            turn = (await draft(store, loaded, f"node-{seat.number}", marker)).finish()
            seat.meet()
            answers += await store.commit([turn])
            seat.meet()
    return answers


async def claim_everything(seat: Seat, path: Path, batch: int) -> list[tuple[str, int]]:
    """Claim until nothing is left; return what was claimed, and under which epoch."""
    node = f"node-{seat.number}"
    claimed: dict[str, int] = {}
    async with opened(path) as store:
        await store.renew(node, HOUR_MS)
        seat.meet()
        while True:
            loaded = await store.claim(node, batch)
            fresh = {run.head.run_id: run.head.lease_epoch for run in loaded if run.head.run_id not in claimed}
            assert all(run.head.lease_owner == node for run in loaded)
            claimed |= fresh
            if not fresh:
                return list(claimed.items())
            turns = [(await draft(store, run, node, WaitSignal(step_id="wait", name="go"))).finish() for run in loaded]
            answers = await store.commit(turns)
            assert all(isinstance(answer, port.Committed) for answer in answers), answers


async def stall_or_take_over(seat: Seat, path: Path, run_id: str) -> dict[str, Any]:
    """Seat 0 claims, stalls until its lease has run out and seat 1 has taken over, and then commits."""
    node = f"node-{seat.number}"
    async with opened(path) as store:
        if seat.number == 0:
            await store.renew(node, 100)
            (loaded,) = await store.claim(node, 1)
            turn = (await draft(store, loaded, node, StartTimer(step_id="late", due_at=1))).finish()
            seat.meet()
            seat.meet()
        else:
            await store.renew(node, HOUR_MS)
            seat.meet()
            loaded = await claim_when_due(store, node)
            turn = (await draft(store, loaded, node, StartTimer(step_id="in time", due_at=1))).finish()
            seat.meet()
        (answer,) = await store.commit([turn])
        return {"epoch": loaded.head.lease_epoch, "answer": answer}


async def claim_when_due(store: SqliteStore, node: str) -> port.LoadedRun:
    """Claim the first run that can be had, waiting as a node waits."""
    listener = store.wakeups.listen()
    try:
        while True:
            claimed = await store.claim(node, 1)
            if claimed:
                return claimed[0]
            due_at = await store.next_due(node)
            now = await store.now()
            await listener.wait(None if due_at is None else max(due_at - now, 0) / 1e6)
    finally:
        listener.close()


async def write_hard(seat: Seat, path: Path, seconds: float) -> dict[str, int]:
    """Do everything that writes, as fast as it goes. Any error ends the play."""
    node = f"node-{seat.number}"
    counts = dict.fromkeys(("runs", "signals", "events", "finished"), 0)
    async with opened(path) as store:
        await store.renew(node, HOUR_MS)
        seat.meet()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            run_ids = [f"run-{seat.number}-{counts['runs'] + index}" for index in range(3)]
            await store.create([new_run(run_id) for run_id in run_ids])
            counts["runs"] += len(run_ids)
            counts["events"] += len(run_ids)
            answers = await store.deliver(
                [SignalRequest(run_id=id_, name="go", signal_id=f"{id_}-{n}") for id_ in run_ids for n in range(2)]
            )
            assert all(isinstance(answer, port.Accepted) for answer in answers), answers
            counts["signals"] += len(answers)
            await store.renew(node, HOUR_MS)
            loaded = await store.claim(node, 5)
            turns = [await _turn_of_hard_work(store, run, node) for run in loaded]
            committed = await store.commit(turns)
            assert all(isinstance(answer, port.Committed) for answer in committed), committed
            counts["events"] += sum(len(turn.events) for turn in turns)
            counts["finished"] += sum(turn.snapshot.status == "COMPLETED" for turn in turns)
    return counts


async def _turn_of_hard_work(store: SqliteStore, loaded: port.LoadedRun, node: str) -> port.Turn:
    """Wait for a signal in the first turn, take it in the second and finish."""
    if loaded.head.version == 1:
        return (await draft(store, loaded, node, WaitSignal(step_id="wait", name="go"))).finish(release=True)
    return (await draft(store, loaded, node, CompleteRun())).finish()


async def ring_or_listen(seat: Seat, path: Path, run_id: str, times: int) -> dict[str, list[float]]:
    """Seat 0 waits for the bell, seat 1 delivers. Both note the time, which is the same for all processes."""
    moments: list[float] = []
    async with opened(path) as store:
        listener = store.wakeups.listen()
        for number in range(times):
            seat.meet()
            if seat.number == 1:
                moments.append(time.monotonic())
                await store.deliver([SignalRequest(run_id=run_id, name="go", signal_id=f"signal-{number}")])
            else:
                assert await listener.wait(10), "the bell was not heard"
                moments.append(time.monotonic())
                assert len((await load(store, run_id)).signals) == number + 1
        listener.close()
    return {"moments": moments}


async def listen_in_silence(seat: Seat, path: Path, seconds: float) -> int:
    """Listen while nothing happens; return how often the process woke up to look."""
    async with opened(path) as store:
        listener = store.wakeups.listen()
        while await listener.wait(0.05):
            pass
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        assert not await listener.wait(seconds)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        listener.close()
    return after - before
