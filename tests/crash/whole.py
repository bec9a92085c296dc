"""Nothing is half there: every row of a run agrees with its history."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from holdfast.core.events import Event, SignalReceived
from holdfast.core.messages import Signal
from holdfast.core.snapshot import project_run, runtime_snapshot
from holdfast.core.state import PENDING, RunState, state_of
from holdfast.store.port import LoadedRun, MailboxQuery, RunQuery, TaskQuery, WaitQuery
from holdfast.store.sqlite import SqliteStore
from tests.races.builders import GENEROUS, history, load


class EndOfTime:
    """A clock by which every message is due, so that `load` shows all of them."""

    def now(self) -> int:
        """Return an instant after every other."""
        return 2**60


async def check_file(path: Path) -> int:
    """Check the file, and every run in it; return how many there are."""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    store = await SqliteStore.open(path, clock=EndOfTime(), limits=GENEROUS)
    try:
        count = 0
        after = ""
        while heads := await store.find_runs(RunQuery(after=after)):
            for head in heads:
                await check_run(store, head.run_id)
            count += len(heads)
            after = heads[-1].run_id
        return count
    finally:
        await store.close()


async def check_run(store: SqliteStore, run_id: str) -> None:
    """Check one run. The store's clock must be at the end of time."""
    loaded = await load(store, run_id)
    events = await history(store, run_id)
    assert [event.run_seq for event in events] == list(range(1, loaded.head.version + 1))
    state = state_of(run_id, events)
    assert loaded.head.snapshot == runtime_snapshot(state)
    assert loaded.head.status == state.status == project_run(run_id, events).status
    assert (loaded.head.finished_at is not None) == state.is_finished
    _check_inbox(loaded, state)
    _check_signals(loaded, await store.find_mailbox(MailboxQuery(run_id=run_id, consumed=True, limit=1_000)), events)
    await _check_waits_and_tasks(store, state)


def _check_inbox(loaded: LoadedRun, state: RunState) -> None:
    """What the run waits for has its message; a finished run has none, and nobody waits for it."""
    ids = {message.signal_id for message in loaded.messages}
    if state.is_finished:
        assert not ids
        assert loaded.head.ready_at is None
        assert loaded.head.lease_owner is None
        return
    expected = {f"TimerDue:{step.token}" for step in state.open_steps.values() if step.due_at is not None}
    if state.status is PENDING:
        expected.add("start")
    assert expected <= ids
    if loaded.messages:
        assert loaded.head.ready_at is not None, "a run with a message is ready when it is due"
    assert loaded.head.lease_owner or loaded.head.ready_at or state.open_steps, "an unfinished run nobody will wake"


def _check_signals(loaded: LoadedRun, signals: list[Signal], events: list[Event]) -> None:
    """Signals are numbered without gaps, and each that was consumed has its event."""
    assert [signal.inbox_seq for signal in signals] == list(range(1, loaded.head.inbox_seq + 1))
    consumed = {signal.consumed_seq: signal.signal_id for signal in signals if signal.consumed_seq is not None}
    received = {event.run_seq: event.data.signal_id for event in events if isinstance(event.data, SignalReceived)}
    assert consumed == received
    assert [signal for signal in signals if signal.consumed_seq is None] == list(loaded.signals)


async def _check_waits_and_tasks(store: SqliteStore, state: RunState) -> None:
    waits = await store.find_waits(WaitQuery(run_id=state.run_id))
    open_waits = {(step.step_id, step.token) for step in state.open_steps.values() if step.kind == "signal"}
    assert {(wait.step_id, wait.token) for wait in waits} == open_waits
    tasks = await store.find_tasks(TaskQuery(run_id=state.run_id, status="OPEN"))
    open_tasks = sorted(step.step_id for step in state.open_steps.values() if step.kind == "task")
    assert sorted(task.step_id for task in tasks) == open_tasks
