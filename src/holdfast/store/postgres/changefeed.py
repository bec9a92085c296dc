"""`changes`: which histories have grown, read from the record that each transaction leaves.

A trigger records, once for all turns that are committed together, the transaction and the runs. Transactions become
visible in a different order than they are numbered, so a cursor is a snapshot: everything before a number has been
seen, except the transactions that were in progress, whose numbers the cursor holds. However long one of them takes, its
changes are found by its number after it has ended, without waiting for it. Records are kept for about a minute.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

from holdfast.store import port
from holdfast.store.postgres.pool import Db

_NUMBER = "[0-9]{1,18}"
_CURSOR = re.compile(f"({_NUMBER}):((?:{_NUMBER}(?:,{_NUMBER})*)?)")

_HERE = "SELECT pg_current_snapshot()::text"
_NOTED = """
SELECT pg_current_snapshot()::text, k.lost_before, g.xid, g.runs, g.with_tasks FROM holdfast.growth_kept k
LEFT JOIN LATERAL (
    SELECT xid, runs, with_tasks FROM holdfast.growth WHERE xid = ANY ($2)
    UNION ALL (
        SELECT xid, runs, with_tasks FROM holdfast.growth
        WHERE xid >= $1 AND xid < pg_snapshot_xmax(pg_current_snapshot())::text::bigint
        ORDER BY xid FETCH FIRST $3 ROWS WITH TIES
    )
) g ON true
ORDER BY g.xid
"""
_VERSIONS = "SELECT run_no, run_id, version FROM holdfast.runs WHERE run_no = ANY ($1) ORDER BY run_id"


class Cursor(Struct, frozen=True):
    """What has been seen: every transaction before `end` except those in `open`."""

    end: int
    open: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.end}:{','.join(map(str, self.open))}"

    @property
    def first_unseen(self) -> int:
        """The first transaction that has not been seen."""
        return min(self.open, default=self.end)

    def after(self, last: int, here: "Cursor") -> "Cursor":
        """Return the cursor after everything up to the transaction `last` that is visible from `here` has been seen."""
        left = (xid for xid in self.open if xid > last or xid in here.open)
        new = (xid for xid in here.open if self.end <= xid <= last)
        return Cursor(max(self.end, last + 1), (*left, *new))


async def changes(db: Db, text: str, limit: int) -> port.Changes:
    """Return the runs whose histories have grown since a cursor."""
    cursor = _cursor_of(text)
    if cursor is None:
        [[snapshot]] = await db.fetch(_HERE)
        return port.Changes(str(_of_snapshot(snapshot)), is_lost=bool(text))
    found = await db.fetch(_NOTED, cursor.end, cursor.open, limit)
    here, lost_before = _of_snapshot(found[0][0]), found[0][1]
    if cursor.end > here.end or cursor.first_unseen < lost_before <= here.end:
        return port.Changes(str(here), is_lost=True)
    noted = [row for row in found if row[2] is not None]
    if not noted:
        return port.Changes(str(here))
    taken = _first(noted, limit)
    has_more = len(taken) < len(noted) or len(noted) >= limit
    runs = await _grown(db, taken)
    return port.Changes(str(cursor.after(taken[-1][2], here) if has_more else here), runs, has_more)


def _first(noted: Sequence[Any], limit: int) -> Sequence[Any]:
    """Return the records of the first transactions, up to `limit` events; for each transaction all or none."""
    count = 0
    for number, row in enumerate(noted):
        if count >= limit and row[2] != noted[number - 1][2]:
            return noted[:number]
        count += len(row[3])
    return noted


async def _grown(db: Db, noted: Iterable[Any]) -> tuple[port.Change, ...]:
    runs: set[int] = set()
    with_tasks: set[int] = set()
    for _, _, _, grown, concerned in noted:
        runs.update(grown)
        with_tasks.update(concerned or ())
    found = await db.fetch(_VERSIONS, list(runs))
    return tuple(port.Change(run_id, version, run_no in with_tasks) for run_no, run_id, version in found)


def _cursor_of(text: str) -> Cursor | None:
    found = _CURSOR.fullmatch(text)
    return None if found is None else Cursor(int(found[1]), _numbers(found[2]))


def _of_snapshot(text: str) -> Cursor:
    _, end, under_way = text.split(":")
    return Cursor(int(end), _numbers(under_way))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, text.split(","))))
