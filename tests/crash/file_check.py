"""Nothing is half there: the file is sound, and every row of a run agrees with its history."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from holdfast.core.invariants import RunView, check
from holdfast.core.messages import AcceptedSignalResult
from holdfast.core.state import PENDING, state_of
from holdfast.store.sqlite import SqliteStore
from holdfast.testing import system_view
from tests.races.stores import GENEROUS, opened


class EndOfTime:
    """A clock by which every message is due, so that all of them can be seen."""

    def now(self) -> int:
        """Return an instant after every other."""
        return 2**60


async def check_file(path: Path, acknowledged: Iterable[AcceptedSignalResult] = ()) -> int:
    """Check the file and every run in it; return how many there are."""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    async with opened(path) as store:
        problems = check(await system_view(store, acknowledged))
        assert problems == [], problems
    store = await SqliteStore.open(path, clock=EndOfTime(), limits=GENEROUS)
    try:
        view = await system_view(store)
    finally:
        await store.close()
    for run in view.runs:
        _check_inbox(run)
    return len(view.runs)


def _check_inbox(run: RunView) -> None:
    """Check the number of signals, and that what the run waits for has its message."""
    assert [signal.inbox_seq for signal in run.signals] == list(range(1, len(run.signals) + 1))
    state = state_of(run.run_id, run.events)
    expected = {f"TimerDue:{step.token}" for step in state.open_steps.values() if step.due_at is not None}
    if state.status is PENDING:
        expected.add("start")
    assert expected <= {message.signal_id for message in run.messages}
    assert not run.messages or run.ready_at is not None, "a run with a message is ready when it is due"
