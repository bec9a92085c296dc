"""`changes`: which histories have grown, read from the end of the table of events.

Events are appended, and SQLite gives each row a number above that of the last one. So the rows above a number are the
newer ones: this needs no index, and costs turns nothing. Only retention deletes events, after which a number at the
very end may be reused: a cursor names its event too, and is lost if that event is no longer there.
"""

import re
import sqlite3

from holdfast.store import port

_CURSOR = re.compile(r"([0-9]{1,18}):.{0,255}", re.DOTALL)

_GROWN = """
SELECT run_id, grown.version, has_tasks FROM (
    SELECT run_no, max(run_seq) AS version, max(event_type >= 'Task' AND event_type < 'Tasl') AS has_tasks
    FROM events NOT INDEXED WHERE rowid > ? AND rowid <= ? GROUP BY run_no
) AS grown CROSS JOIN runs USING (run_no)
"""
_LAST_OF = """
SELECT max(number), count(*)
FROM (SELECT rowid AS number FROM events NOT INDEXED WHERE rowid > ? ORDER BY rowid LIMIT ?)
"""


def changes(db: sqlite3.Connection, cursor: str, limit: int) -> port.Changes:
    """Return the runs whose histories have grown since a cursor."""
    found = _CURSOR.fullmatch(cursor)
    number = int(found[1]) if found else 0
    if found is None or (number and _cursor(db, number) != cursor):
        (here,) = db.execute("SELECT coalesce(max(rowid), 0) FROM events").fetchone()
        return port.Changes(_cursor(db, here), is_lost=bool(cursor))
    end, count = db.execute(_LAST_OF, (number, limit)).fetchone()
    if not count:
        return port.Changes(cursor)
    runs = tuple(port.Change(row[0], row[1], bool(row[2])) for row in db.execute(_GROWN, (number, end)))
    return port.Changes(_cursor(db, end), runs, has_more=count == limit)


def _cursor(db: sqlite3.Connection, number: int) -> str:
    row = db.execute("SELECT event_id FROM events WHERE rowid = ?", (number,)).fetchone()
    return f"{number}:{'' if row is None else row[0]}"
