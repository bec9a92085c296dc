"""Reads the history of a run, whole or since its last rotation; finds events in it, and waits for them."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from holdfast.core.events import ContinuedAsNew, Event
from holdfast.core.index_rows import RuntimeSnapshot, runtime_snapshot
from holdfast.core.state import TERMINAL, state_of
from holdfast.errors import HistoryGap, RunError, RunTerminal, StoreCorrupt
from holdfast.store.decisions import no_such_run
from holdfast.store.payloads import refuse_sealed
from holdfast.store.port import EventQuery, Index, RunHead, RunStore

PAGE_EVENTS = 50_000
"""How many events are read by one call for a replay."""

READ_AHEAD_EVENTS = 1_000
"""How many events are read by one call for the histories of several runs."""

FOLDED_EVENTS = 1_000
"""How many events are read by one call to fold the missing snapshot of a run."""

POLL_S = 1.0
"""How often a waiting caller looks without a notification from the store."""


async def head_of(store: RunStore, run_id: str) -> RunHead:
    """Return a run without its history; raise `NotFound` if there is none.

    If its snapshot was deleted by retention, it is folded from the events: it is only a cache of them (PRJ-4).
    """
    [run] = await store.load([run_id])
    if run is None:
        raise no_such_run(run_id)
    if run.head.snapshot is not None:
        return run.head
    try:
        return replace(run.head, snapshot=await _folded(store, run.head))
    except (RunError, StoreCorrupt):  # what is known without its history is returned anyway
        return run.head


async def _folded(store: RunStore, head: RunHead) -> RuntimeSnapshot:
    """Return the snapshot of a run, folded from its events. At most the events since a rotation are in memory."""
    after = 0
    stretch: list[Event] = []
    while after < head.version and (page := await store.read_events(head.run_id, after, FOLDED_EVENTS)):
        page = page[: head.version - after]
        after = page[-1].run_seq
        for event in page:
            if isinstance(event.data, ContinuedAsNew):
                stretch.clear()
            stretch.append(event)
    refuse_sealed(stretch)
    return runtime_snapshot(state_of(head.run_id, stretch))


async def read_history(store: RunStore, run_id: str, version: int = 0) -> list[Event]:
    """Return the whole history; it is empty if there is no such run.

    Raise `HistoryGap` if it is being deleted, that is, events are missing or it ends before this version of the run.
    """
    events: list[Event] = []
    while page := await store.read_events(run_id, len(events)):
        if page[0].run_seq != len(events) + 1:
            raise _deleted(run_id, len(events) + 1)
        events += page
    if len(events) < version:
        raise _deleted(run_id, len(events) + 1)
    return events


def _deleted(run_id: str, missing: int) -> HistoryGap:
    problem = f"run {run_id}: event {missing} is missing, because retention deletes the run"
    return HistoryGap(problem, run_id=run_id, run_seq=missing)


async def find_event(
    store: RunStore, run_id: str, after: int, is_it: Callable[[Event], bool]
) -> tuple[Event | None, int]:
    """Return the first matching event after this one, or None; and the number of the last event that was read."""
    while page := await store.read_events(run_id, after):
        after = page[-1].run_seq
        for event in page:
            if is_it(event):
                return event, event.run_seq
    return None, after


async def read_since_rotation(store: RunStore, head: RunHead) -> list[Event]:
    """Return the events to replay: those since the last rotation, up to the run's version or beyond if it has
    continued.

    Raise `HistoryGap` if the history ends before that version, `PayloadUnreadable` if a value cannot be opened here.
    """
    after = _place_of(head)
    events: list[Event] = []
    while page := await store.read_events(head.run_id, after, PAGE_EVENTS):
        events += page
        after = page[-1].run_seq
        if len(page) < PAGE_EVENTS:
            break
    if after < head.version:
        problem = f"the history ends at event {after}, not {head.version}"
        raise HistoryGap(problem, run_id=head.run_id, run_seq=after + 1)
    refuse_sealed(events)
    return events


async def read_histories(store: Index, heads: Sequence[RunHead]) -> dict[str, list[Event]]:
    """Return the histories of several runs since their last rotations, as many as fit into one query.

    Histories that are longer, damaged or have gaps are left out: they are read one by one (`read_since_rotation`).
    """
    places, room = list[tuple[str, int]](), READ_AHEAD_EVENTS
    for head in heads:
        after = _place_of(head)
        room -= head.version - after
        if room >= 0:
            places.append((head.run_id, after))
    found = await store.find(EventQuery(after=tuple(places), limit=READ_AHEAD_EVENTS)) if len(places) > 1 else ()
    histories: dict[str, list[Event]] = {}
    for event in found:
        histories.setdefault(event.run_id, []).append(event)
    places_of = dict(places)
    return {
        head.run_id: history
        for head in heads
        if (history := histories.get(head.run_id)) is not None
        and history[-1].run_seq - places_of[head.run_id] == len(history)
        and history[-1].run_seq >= head.version
    }


def _place_of(head: RunHead) -> int:
    """Return the number of the event after which the replay of a history starts."""
    return head.snapshot.resume_pointer - 1 if head.snapshot is not None else 0


class Ends(NamedTuple):
    """The last events of finished runs, the runs whose last event is damaged, and the runs that no longer exist."""

    found: dict[str, Event]
    damaged: list[str]
    missing: set[str]


async def find_ends(store: Index, run_ids: Iterable[str]) -> Ends:
    """Return how the finished ones among the runs have ended, and which runs do not exist."""
    ends: dict[str, Event] = {}
    damaged: list[str] = []
    missing: set[str] = set()
    left = sorted(set(run_ids))
    while left:
        places = tuple((run_id, 0) for run_id in left)
        found = await store.find(EventQuery(after=places, only_ends=True, limit=len(places)))
        ends.update((event.run_id, event) for event in found)
        damaged += found.unreadable
        missing.update(found.missing)
        if not found or len(found) + len(found.unreadable) >= len(places):
            break
        left = [run_id for run_id in left if run_id > found[-1].run_id]  # the store's pages may be shorter
    return Ends(ends, damaged, missing)


def since_rotation(history: Sequence[Event]) -> Sequence[Event]:
    """Return the part of a whole history that is replayed: from the last rotation, or all of it."""
    for position in range(len(history) - 1, -1, -1):
        if isinstance(history[position].data, ContinuedAsNew):
            return history[position:]
    return history


async def wait_for_event(store: RunStore, run_id: str, after: int, is_it: Callable[[Event], bool]) -> Event:
    """Wait for the first matching event after this one, on whichever node the run continues.

    Raise `RunTerminal` if the run ends without it, and `NotFound` if the run was deleted.
    """
    listener = store.wakeups.listen()
    try:
        while True:
            head = await head_of(store, run_id)  # before the events: if the run has ended, all its events are there
            found, after = await find_event(store, run_id, after, is_it)
            if found is not None:
                return found
            if head.status in TERMINAL:
                raise RunTerminal(f"run {run_id} ended before it had answered", run_id=run_id)
            await listener.wait(POLL_S)
    finally:
        listener.close()
