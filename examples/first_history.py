"""A first history: orders that survive SIGKILL, on the embedded store.

A worker process takes orders through three steps (reserve, charge, ship) and is killed in the middle. A second one
finds everything where the first one left it, and finishes. Then the history of one order is shown.
"""

import asyncio
import signal
import sys
import tempfile
from pathlib import Path

from holdfast import SqliteStore
from holdfast.core import codec
from holdfast.core.commands import Command, CompleteRun, RunActivity
from holdfast.core.events import RunQueued
from holdfast.core.instants import format_instant
from holdfast.core.messages import ActivitySucceeded, NodeLost
from holdfast.core.state import RunState, state_of
from holdfast.engine.turn import TurnDraft, start_run
from holdfast.store.port import Committed, LoadedRun, RunQuery

STEPS = ("reserve", "charge", "ship")
ORDERS, LEASE_MS = 200, 500


def program(state: RunState) -> list[Command]:
    """Say what an order does next: its three steps, one after the other."""
    if state.open_steps or state.is_finished:
        return []
    if state.steps_since_rotation == len(STEPS):
        return [CompleteRun(result=codec.encode("shipped"))]
    name = STEPS[state.steps_since_rotation]
    return [RunActivity(step_id=name, name=name)]


async def advance(store: SqliteStore, node: str, run: LoadedRun, ledger: Path) -> None:
    """Take one order to its end: a turn, its effects in the world, the next turn."""
    events = await store.read_events(run.head.run_id)
    state, lost = state_of(run.head.run_id, events), True
    while not state.is_finished:
        draft = TurnDraft(state, run, await store.now(), node)
        for message in run.messages:
            draft.handle(message)
        for step in state.open_steps.values():  # open before this turn: done by us, or by a node that is gone
            done = ActivitySucceeded(step.step_id, step.logical_attempt_id)
            draft.handle(NodeLost(step.step_id) if lost else done)
        draft.enact(program(draft.state))
        [answer] = await store.commit([draft.finish()])
        if not isinstance(answer, Committed):
            return  # somebody else has taken the order over
        with ledger.open("a") as world:  # only after the commit is durable: the effects
            world.writelines(f"{run.head.run_id} {step_id}\n" for step_id in draft.dispatch)
        state, run, lost = draft.state, LoadedRun(head=run.head), False
        print(run.head.run_id, state.status, flush=True)


async def work(folder: Path, node: str) -> None:
    """Be a worker: create the orders, unless they are there, and finish every one that can be claimed."""
    store = await SqliteStore.open(folder / "orders.db")
    await store.migrate()
    for number in range(ORDERS):
        order = RunQueued("order", "1", run_request_id=f"order-{number}")
        await store.create([start_run(f"order-{number:03}", order, await store.now(), node)])
    while (await store.stats()).runs.get("COMPLETED", 0) < ORDERS:
        await store.renew(node, LEASE_MS)
        claimed = await store.claim(node, 20)
        await asyncio.gather(*(advance(store, node, run, folder / "effects.log") for run in claimed))
        await asyncio.sleep(0.01)
    await store.close()


async def main(folder: Path) -> None:
    """Start a worker, kill it, start another, and look at what is there."""
    first = await asyncio.create_subprocess_exec(
        sys.executable, __file__, str(folder), "first", stdout=asyncio.subprocess.PIPE
    )
    assert first.stdout is not None
    lines = [(await first.stdout.readline()).decode().split() for _ in range(ORDERS)]
    first.send_signal(signal.SIGKILL)
    await first.wait()
    acknowledged = {run_id for run_id, status in lines if status == "COMPLETED"}
    print(f"worker 'first' was killed with SIGKILL after it had finished {len(acknowledged)} of {ORDERS} orders")
    second = await asyncio.create_subprocess_exec(
        sys.executable, __file__, str(folder), "second", stdout=asyncio.subprocess.DEVNULL
    )
    await second.wait()

    store = await SqliteStore.open(folder / "orders.db")
    runs = await store.find_runs(RunQuery(limit=ORDERS))
    histories = {run.run_id: await store.read_events(run.run_id) for run in runs}
    rescued = next(
        (id_ for id_, h in histories.items() if any(e.event_type == "StepRetried" for e in h)), runs[-1].run_id
    )
    print(f"\nthe history of {rescued}, as it is stored:")
    for event in histories[rescued]:
        when, step_id, node = format_instant(event.persisted_at), event.step_id or "", event.engine_run_ref.node
        print(f"  {event.run_seq:2} {when} {event.event_type:13} {step_id:8} by {node}")
    recorded = sum(event.event_type == "StepCompleted" for history in histories.values() for event in history)
    effects = len((folder / "effects.log").read_text().splitlines())
    print(
        f"\n{sum(run.status == 'COMPLETED' for run in runs)} of {ORDERS} orders completed; {recorded} results recorded,"
    )
    print(f"each once; {effects} effects executed (at least once: a crash between effect and record repeats one).")
    await store.close()
    assert {run.run_id for run in runs if run.status == "COMPLETED"} >= acknowledged
    assert recorded == ORDERS * len(STEPS) <= effects


if __name__ == "__main__":
    if len(sys.argv) == 3:
        asyncio.run(work(Path(sys.argv[1]), sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            asyncio.run(main(Path(temporary)))
