"""What contends in a race. Each function is what one contender does; it opens its own store."""

from __future__ import annotations

import asyncio
import random
import resource
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core.admission import AdmissionRequest, RunLimit
from holdfast.core.messages import OUTCOME_SIGNAL, ActivityOutcome, SignalRequest
from holdfast.core.state import CANCELLED
from holdfast.errors import LeaseExpired, RunTerminal
from holdfast.store import port
from holdfast.testing.samples import SampleNode, complete, marker, new_run, signal, timer, wait
from tests.races.parallel import Contender
from tests.races.stores import HOUR_MS, open_anywhere, opened_anywhere

Delivered = port.Accepted | port.Duplicate | port.Refused


async def migrate(contender: Contender, path: Path | str) -> int:
    """Open a file that nobody has migrated, all at once."""
    contender.meet()
    async with opened_anywhere(path) as store:
        version = await store.migrate()
        await store.create([new_run(f"run-{contender.number}")])
        return version


# --- one is first


async def send_signal(
    contender: Contender, path: Path | str, run_id: str, times: int, payloads: int = 1
) -> list[tuple[int, Delivered]]:
    """Send one signal again and again; contenders differ in the payload if there is more than one."""
    payload = contender.number % payloads
    request = signal(run_id, "approval", payload, signal_id="click")
    answers: list[tuple[int, Delivered]] = []
    async with opened_anywhere(path) as store:
        contender.meet()
        for _ in range(times):
            answers += [(payload, answer) for answer in await store.deliver([request])]
    return answers


async def report_outcome(contender: Contender, path: Path | str, run_id: str, steps: int) -> list[Delivered]:
    """Report the outcome of each step, with a result that only this contender has, at the version that is read."""
    answers: list[Delivered] = []
    async with opened_anywhere(path) as store:
        for step in range(steps):
            [run] = await store.load([run_id])
            assert run is not None
            outcome = ActivityOutcome(logical_attempt_id=1, engine_attempt_id=1, result=codec.encode(contender.number))
            request = SignalRequest(
                run_id=run_id,
                name=OUTCOME_SIGNAL,
                payload=codec.encode(outcome),
                signal_id=f"outcome {step} of attempt {contender.number % 2}",
                step_id=f"step-{step}",
                expected_version=run.head.version,
            )
            contender.meet()
            answers += await store.deliver([request])
    return answers


async def start_same_request(
    contender: Contender, path: Path | str, times: int
) -> list[port.Created | port.Existing | port.Refused]:
    """Ask for the same run, each time under another run id."""
    answers: list[port.Created | port.Existing | port.Refused] = []
    async with opened_anywhere(path) as store:
        contender.meet()
        for number in range(times):
            answers += await store.create([new_run(f"run-{contender.number}-{number}", request_id="request-1")])
    return answers


async def commit_same_version(
    contender: Contender, path: Path | str, run_id: str, versions: int
) -> list[port.Committed | port.CommitConflict]:
    """Commit a turn from the version that everybody has just read, and see who wins; again and again."""
    answers: list[port.Committed | port.CommitConflict] = []
    async with opened_anywhere(path) as store:
        node = SampleNode(store, f"node-{contender.number}", HOUR_MS)
        for _ in range(versions):
            loaded = await node.load(run_id)
            turn = await node.turn(loaded, marker(f"at#{loaded.head.version}", contender.number))
            contender.meet()
            answers.append(await node.commit(turn))
            contender.meet()
    return answers


# --- owners


async def claim_everything(contender: Contender, path: Path | str, batch: int) -> list[tuple[str, int]]:
    """Claim until nothing is left; return what was claimed, and under which epoch."""
    claimed: list[tuple[str, int]] = []
    async with opened_anywhere(path) as store:
        node = SampleNode(store, f"node-{contender.number}", HOUR_MS)
        await node.renew()
        contender.meet()
        while loaded := await store.claim(node.name, batch):
            assert all(run.head.lease_owner == node.name for run in loaded)
            claimed += [(run.head.run_id, run.head.lease_epoch) for run in loaded]
            answers = await store.commit([await node.turn(run, wait()) for run in loaded])
            assert all(isinstance(answer, port.Committed) for answer in answers), answers
    return claimed


async def stall_or_take_over(contender: Contender, path: Path | str) -> dict[str, Any]:
    """Contender 0 claims, stalls until its lease has run out and contender 1 has taken over, and then commits."""
    async with opened_anywhere(path) as store:
        node = SampleNode(store, f"node-{contender.number}", lease_ms=200 if contender.number == 0 else HOUR_MS)
        if contender.number == 0:
            loaded = await _claim_in_time(node)
            turn = await node.turn(loaded, timer(1, "too late"))
            contender.meet()
            contender.meet()
        else:
            contender.meet()
            loaded = await _claim_when_due(node)
            turn = await node.turn(loaded, timer(1, "in time"))
            contender.meet()
        return {"epoch": loaded.head.lease_epoch, "answer": await node.commit(turn)}


async def _claim_in_time(node: SampleNode) -> port.LoadedRun:
    """Claim a run under a lease so short that a busy machine may take it away before the claim."""
    while True:
        try:
            (loaded,) = await node.claim()
            return loaded
        except LeaseExpired:
            continue


async def _claim_when_due(node: SampleNode) -> port.LoadedRun:
    """Claim the first run that can be had, waiting as a node waits."""
    listener = node.store.wakeups.listen()
    try:
        while not (claimed := await node.claim(1)):
            due_at = await node.store.next_due(node.name)
            now = await node.store.now()
            await listener.wait(None if due_at is None else max(due_at - now, 0) / 1e6)
        return claimed[0]
    finally:
        listener.close()


# --- admission


async def pass_admission(contender: Contender, path: Path | str, runs: int, limit: RunLimit) -> list[int]:
    """Start runs, admit and finish them until none is left; return how many were found inside.

    A run is inside from its first turn to its last. They are counted by an index of runs, not by the admission queue.
    """
    counts: list[int] = []
    async with opened_anywhere(path) as store:
        node = SampleNode(store, f"node-{contender.number}", HOUR_MS)
        await node.renew()
        contender.meet()
        request = AdmissionRequest(limit=limit, key=str(contender.number))
        for number in range(runs):
            await store.create([replace(new_run(f"run-{contender.number}-{number}"), admission=request)])
        while (await store.stats()).runs.keys() - {"COMPLETED"}:
            await store.admit({"order": limit}, 2, node.name)
            claimed = await store.claim(node.name, 2)
            await store.commit([await node.turn(run, wait()) for run in claimed])
            counts.append((await store.stats()).runs.get("RUNNING", 0))
            await store.commit([await node.turn(await node.load(run.head.run_id), complete()) for run in claimed])
    return counts


async def crowd_admission(contender: Contender, path: Path | str, rounds: int, limits: dict[str, RunLimit]) -> int:
    """Queue and finish runs of several plans, and signal and finish queued ones, in another order at each contender.

    Nothing is retried: a deadlock ends the play. Return how many runs were created.
    """
    chance = random.Random(contender.number)
    came = 0
    async with opened_anywhere(path, busy_ms=0) as store:
        node = SampleNode(store, f"node-{contender.number}", HOUR_MS)
        await node.renew()
        contender.meet()
        for number in range(rounds):
            new = [_limited_run(f"{plan}-{contender.number}-{number}", plan, limits, contender) for plan in limits]
            new[0] = replace(new[0], signals=(signal(new[0].run_id, "first"),))
            came += len(await store.create(chance.sample(new, len(new))))
            others = [f"{plan}-{chance.randrange(contender.count)}-{number}" for plan in limits]
            await store.deliver([signal(run_id) for run_id in chance.sample(others, len(others))])
            turns = [await _turn_under_limit(node, run, chance) for run in await node.claim(6)]
            if turns:
                children = [
                    _limited_run(f"{plan}-{contender.number}-{number}-child", plan, limits, contender)
                    for plan in limits
                ]
                sends = tuple(signal(run_id) for run_id in others)
                turns[0] = replace(turns[0], starts=tuple(chance.sample(children, len(children))), sends=sends)
                committed = await store.commit(chance.sample(turns, len(turns)))
                assert all(isinstance(answer, port.Committed) for answer in committed), committed
                came += len(children)
            await store.admit(limits, 3, node.name)
        while (await store.stats()).runs.keys() - {"COMPLETED", "CANCELLED"}:
            await store.admit(limits, 3, node.name)
            await store.commit([await _turn_under_limit(node, run, chance) for run in await node.claim(6)])
    return came


def _limited_run(run_id: str, plan_id: str, limits: dict[str, RunLimit], contender: Contender) -> port.NewRun:
    request = AdmissionRequest(limit=limits[plan_id], key=str(contender.number % 2))
    return replace(new_run(run_id, plan_id=plan_id, tenant=f"tenant-{contender.number % 3}"), admission=request)


async def _turn_under_limit(node: SampleNode, loaded: port.LoadedRun, chance: random.Random) -> port.Turn:
    """Finish, or let go of it for another. A run that waits cannot complete, but be cancelled."""
    is_last = chance.random() < 0.5
    if loaded.head.queued_at is None:
        step = complete() if is_last else timer(1, f"sleep#{loaded.head.version}")
        return await node.turn(loaded, step, release=True)
    turn = await node.turn(loaded, release=True)
    return replace(turn, snapshot=replace(turn.snapshot, status=CANCELLED)) if is_last else turn


# --- many at work


async def write_hard(contender: Contender, path: Path | str, seconds: float) -> dict[str, int]:
    """Do everything that writes, as fast as it goes. Any error ends the play."""
    counts = {"runs": 0, "signals": 0, "events": 0, "finished": 0, "longest_ms": 0}
    async with opened_anywhere(path) as store:
        node = SampleNode(store, f"node-{contender.number}", HOUR_MS)
        contender.meet()
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            turn_began = time.monotonic()
            run_ids = [f"run-{contender.number}-{counts['runs'] + index}" for index in range(3)]
            await store.create([new_run(run_id) for run_id in run_ids])
            sent = [signal(run_id, signal_id=f"{run_id}-{number}") for run_id in run_ids for number in range(2)]
            accepted = [answer for answer in await store.deliver(sent) if _is_accepted(answer)]
            turns = [await _turn_of_hard_work(node, run) for run in await node.claim(5)]
            committed = await store.commit(turns)
            assert all(isinstance(answer, port.Committed) for answer in committed), committed
            counts["runs"] += len(run_ids)
            counts["signals"] += len(accepted)
            counts["events"] += len(run_ids) + sum(len(turn.events) for turn in turns)
            counts["finished"] += sum(turn.snapshot.status == "COMPLETED" for turn in turns)
            counts["longest_ms"] = max(counts["longest_ms"], int((time.monotonic() - turn_began) * 1_000))
    return counts


def _is_accepted(answer: Delivered) -> bool:
    """Return whether a signal was accepted. If not, then because another contender has finished the run already."""
    is_too_late = isinstance(answer, port.Refused) and isinstance(answer.error, RunTerminal)
    assert isinstance(answer, port.Accepted) or is_too_late, answer
    return not is_too_late


async def _turn_of_hard_work(node: SampleNode, loaded: port.LoadedRun) -> port.Turn:
    """Take one of two signals in the first turn, go to sleep and let go of the run; finish in the second turn."""
    if loaded.head.version == 1:
        return await node.turn(loaded, wait(), timer(1), release=True)
    return await node.turn(loaded, complete())


async def turn_or_look(contender: Contender, path: Path | str, run_id: str, turns: int) -> int:
    """Contender 0 commits turns, each of which takes the run's one message and leaves another; the others look.

    A look that shows the run of one moment with the messages of another would fail. Return how many looks there were.
    """
    looks = 0
    async with opened_anywhere(path) as store:
        node = SampleNode(store, "node-0", HOUR_MS)
        contender.meet()
        if contender.number == 0:
            for number in range(turns):
                await node.step(run_id, timer(1, f"sleep#{number}"))
            await node.step(run_id, complete())
        while True:
            loaded = await node.load(run_id)
            if loaded.head.finished_at is not None:
                return looks
            assert loaded.head.snapshot is not None
            tokens = [message.waiting_token for message in loaded.messages]
            assert tokens == [loaded.head.snapshot.waiting_token], f"half a turn at version {loaded.head.version}"
            looks += 1


# --- wake-ups


async def ring_or_listen(contender: Contender, path: Path | str, run_id: str, times: int, closes: bool) -> list[float]:
    """Contender 0 waits for the bell, contender 1 delivers. Both note the time, which is the same for all processes."""
    moments: list[float] = []
    if contender.number == 1:
        for number in range(times):
            store = await open_anywhere(path)
            await asyncio.to_thread(contender.meet)
            moments.append(time.monotonic())
            await store.deliver([signal(run_id, signal_id=f"signal-{number}")])
            if not closes:
                await asyncio.to_thread(contender.meet)
            await store.close()
            if closes:
                contender.meet()
        return moments
    async with opened_anywhere(path) as store:
        listener = store.wakeups.listen()
        for number in range(times):
            await asyncio.to_thread(contender.meet)
            signals = 0
            while signals <= number:  # a false ring costs a look
                assert await listener.wait(10), "the bell was not heard"
                heard_at = time.monotonic()
                (loaded,) = await store.load([run_id])
                assert loaded is not None
                signals = len(loaded.signals)
            moments.append(heard_at)
            await asyncio.to_thread(contender.meet)
        listener.close()
    return moments


async def listen_in_silence(contender: Contender, path: Path | str, seconds: float) -> int:
    """Listen while nothing happens; return how often the process woke up to look."""
    async with opened_anywhere(path) as store:
        listener = store.wakeups.listen()
        while await listener.wait(1.0):  # one that has just begun to hear rings once by itself
            pass
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        assert not await listener.wait(seconds)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        listener.close()
    return after - before
