"""Waiting for something to be recorded in a run's history, wherever the run goes on."""

from collections.abc import Callable

from holdfast.core.events import Event
from holdfast.core.state import TERMINAL
from holdfast.errors import RunTerminal
from holdfast.store.port import RunHead, Store
from holdfast.store.validation import no_such_run


async def head_of(store: Store, run_id: str) -> RunHead:
    """Return a run without its history."""
    [run] = await store.load([run_id])
    if run is None:
        raise no_such_run(run_id)
    return run.head


async def recorded(store: Store, run_id: str, after: int, is_it: Callable[[Event], bool]) -> Event:
    """Wait for the first such event after this one; raise `RunTerminal` if the run ends without."""
    listener = store.wakeups.listen()
    try:
        while True:
            head = await head_of(store, run_id)
            while page := await store.read_events(run_id, after):
                after = page[-1].run_seq
                for event in page:
                    if is_it(event):
                        return event
            if head.status in TERMINAL:
                raise RunTerminal(f"run {run_id} ended before it had answered", run_id=run_id)
            await listener.wait(1.0)
    finally:
        listener.close()
