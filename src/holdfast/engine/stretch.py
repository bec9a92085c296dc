"""A run's history since its last rotation: what is replayed, and what its state is folded from."""

from holdfast.core.events import Event
from holdfast.errors import HistoryGap
from holdfast.store.port import RunHead, Store

PAGE_EVENTS = 50_000


async def read_stretch(store: Store, head: RunHead) -> list[Event]:
    """Return the events since the last rotation, up to the version that the run had, or more if it has gone on."""
    after = head.snapshot.resume_pointer - 1 if head.snapshot is not None else 0
    events: list[Event] = []
    while page := await store.read_events(head.run_id, after, PAGE_EVENTS):
        events += page
        after = page[-1].run_seq
        if len(page) < PAGE_EVENTS:
            break
    if after < head.version:
        raise HistoryGap(f"the history ends at event {after}, not {head.version}", run_id=head.run_id)
    return events
