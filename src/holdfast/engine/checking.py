"""Reads the histories of a store, so that new code can be checked against them before it is deployed."""

from collections.abc import AsyncIterator

from holdfast.core.events import Event
from holdfast.core.state import TERMINAL
from holdfast.program.check import Definitions, Problem, check_histories
from holdfast.store.port import RunHead, RunQuery, Store


async def check_store(definitions: Definitions, store: Store, *, finished: bool = False) -> list[Problem]:
    """Return the problems that the runs of a store would have with these definitions; finished runs only if asked."""
    problems: list[Problem] = []
    async for head in _heads(store):
        if finished or head.status not in TERMINAL:
            problems += check_histories(definitions, [await _history(store, head)])
    return problems


async def _heads(store: Store) -> AsyncIterator[RunHead]:
    after = ""
    while page := await store.find_runs(RunQuery(after=after)):
        for head in page:
            yield head
        after = page[-1].run_id


async def _history(store: Store, head: RunHead) -> list[Event]:
    after = head.snapshot.resume_pointer - 1 if head.snapshot is not None else 0
    events: list[Event] = []
    while page := await store.read_events(head.run_id, after):
        events += page
        after = page[-1].run_seq
    return events
