"""Which histories have grown, in the reference model."""

from collections.abc import Container, Sequence

from msgspec.structs import replace

from holdfast.core.events import Event
from holdfast.store import port


class Grown:
    """What has grown, in the order of the commits."""

    def __init__(self) -> None:
        self._changes: list[port.Change] = []

    def note(self, run_id: str, new: Sequence[Event]) -> None:
        """Note that a run's history has grown by these events, if there are any."""
        if new:
            has_tasks = any(event.event_type.startswith("Task") for event in new)
            self._changes.append(port.Change(run_id, new[-1].run_seq, has_tasks))

    def behind(self, cursor: str, most: int, known: Container[str]) -> port.Changes:
        """Return what has grown behind a cursor, of the runs that are known."""
        here = len(self._changes)
        if not cursor:
            return port.Changes(str(here))
        if not (cursor.isascii() and cursor.isdecimal() and int(cursor) <= here):
            return port.Changes(str(here), is_lost=True)
        end = min(here, int(cursor) + most)
        grown = [change for change in self._changes[int(cursor) : end] if change.run_id in known]
        last = {change.run_id: change for change in grown}
        tasks = {change.run_id for change in grown if change.has_tasks}
        runs = tuple(replace(change, has_tasks=run_id in tasks) for run_id, change in sorted(last.items()))
        return port.Changes(str(end), runs, has_more=end < here)
