"""A run is signalled, and its process killed before each statement that reaches the file: a signal counts once.

`python -m tests.crash.kill_at_statement SCENARIO FOLDER` forks a victim for each statement in turn, until one gets to
the end, and after each a survivor, which plays the same scenario on the same file. It prints how many were killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any

from msgspec import Raw

import holdfast as hf
from holdfast.app import App
from holdfast.core.events import SignalReceived
from holdfast.core.messages import AcceptedSignalResult
from holdfast.store.port import MailboxQuery, WaitQuery
from holdfast.store.sqlite import SqliteStore
from holdfast.testing.samples import read_history
from tests.crash.interrupted_nodes import LEASE_MS, SkippingClock

RUN_ID = "run-1"


def shop(calls: Path) -> tuple[App, Any]:
    """Return an app with a workflow that waits; what its handler is given is noted in a file."""
    app = hf.App("shop")

    def note(word: str) -> str:
        with calls.open("a", encoding="utf-8") as file:
            file.write(f"{word}\n")
        return word.upper()

    @app.workflow
    async def order() -> str:
        return str(await hf.wait_signal("go", str, handler=note))

    return app, order


async def play_scenario(
    scenario: str, path: Path, name: str, dies_at: int, is_later: bool
) -> tuple[AcceptedSignalResult, str]:
    """Start the run and signal it, or both at once; be killed at a statement. Return the acceptance and the result."""
    app, order = shop(path.with_suffix(".calls"))
    clock = SkippingClock()
    clock.skip(LEASE_MS + 1 if is_later else 0)
    store = await SqliteStore.open(path, clock=clock)
    await store.migrate()
    async with app.node(store, name=name, options=hf.NodeOptions(lease_ms=LEASE_MS)):
        if scenario == "start":
            count_down(store, dies_at)
            first: Any = {"name": "go", "payload": "x", "signal_id": "click-1"}
            run = await app.start(order, run_id=RUN_ID, with_signal=first)
        else:
            run = await app.start(order, run_id=RUN_ID)
            while dies_at and not await store.find(WaitQuery()):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            count_down(store, dies_at)
        accepted = await run.signal("go", "x", signal_id="click-1")
        if dies_at:
            path.with_suffix(".accepted").write_text(accepted.signal_storage_key, encoding="utf-8")
        result = await run.result()
    await store.close()
    return accepted, result


def count_down(store: SqliteStore, dies_at: int) -> None:
    """Kill this process before the statement of this number, counted from now."""
    numbers = count(1)

    def strike(statement: str) -> None:
        if next(numbers) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    if dies_at:
        store._database.connection.set_trace_callback(strike)


async def survive(scenario: str, path: Path) -> None:
    """Check what the victim left behind, and finish what it began."""
    store = await SqliteStore.open(path)
    await store.migrate()
    [loaded] = await store.load([RUN_ID])
    kept = await store.find(MailboxQuery(run_id=RUN_ID, consumed=True))
    await store.close()
    assert loaded is not None or scenario == "start", "an acknowledged run is lost"
    assert len(kept) == 1 or scenario == "signal" or loaded is None, "a run without the signal that it came with"
    promised = path.with_suffix(".accepted")
    accepted, result = await play_scenario(scenario, path, "survivor", 0, is_later=True)
    assert result == "X"
    assert not promised.exists() or promised.read_text(encoding="utf-8") == accepted.signal_storage_key
    store = await SqliteStore.open(path)
    history = await read_history(store, RUN_ID)
    kept = await store.find(MailboxQuery(run_id=RUN_ID, consumed=True))
    await store.close()
    [(run_seq, body)] = [(event.run_seq, event.data) for event in history if isinstance(event.data, SignalReceived)]
    assert [found.consumed_seq for found in kept] == [run_seq]
    assert body.state_after == Raw(b'"X"')
    calls = path.with_suffix(".calls").read_text(encoding="utf-8").split()
    assert calls in (["x"], ["x", "x"]), "once for each turn that was begun"


def in_a_fork(work: Any) -> int:
    """Do something in a process of its own, and return how it ended."""
    pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(work)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    work.close()
    return os.waitpid(pid, 0)[1]


def main(scenario: str, folder: Path) -> None:
    """Kill at each statement in turn."""
    for number in count(1):
        path = folder / f"{number}.db"
        status = in_a_fork(play_scenario(scenario, path, "victim", number, is_later=False))
        if status == 0:
            print(number - 1)
            return
        assert os.WIFSIGNALED(status), "a victim failed before it was killed"
        assert in_a_fork(survive(scenario, path)) == 0, f"killed before statement {number}"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
