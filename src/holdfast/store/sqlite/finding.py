"""`find_runs`: by what runs are, and by words, with a limit to how much is looked at in one go.

The newest runs that fit a question may be far down. Where no bound is given they are looked for in windows of so many
runs, each of which is one reading: none keeps a thread of `readers.py` from others for long.
"""

import sqlite3
from operator import itemgetter
from typing import Any

from holdfast.core.instants import Instant
from holdfast.store import port
from holdfast.store.searching import in_json, words_of
from holdfast.store.sqlite import rows
from holdfast.store.where import Where, text_bytes, within

WINDOW = 20_000
"""How many runs are looked at in one go: about ten milliseconds, if none of them fits."""

# The number of a run; if that has gone meanwhile, the one behind those that were created by its time.
_PLACE = (
    "SELECT coalesce((SELECT run_no FROM runs WHERE run_id = ?), "
    "(SELECT run_no + 1 FROM runs WHERE created_at <= ? ORDER BY run_no DESC LIMIT 1), 0)"
)

# LIKE takes A to Z for a to z, and no other letters. What may be in an array or in an error is looked for in its JSON
# first, because reading that takes longer.
_SAYS = (
    "(run_id LIKE ? ESCAPE '|' OR plan_id LIKE ? ESCAPE '|' OR reference_key LIKE ? ESCAPE '|' "
    "OR (tags LIKE ? ESCAPE '|' AND EXISTS (SELECT 1 FROM json_each(tags) WHERE value LIKE ? ESCAPE '|')) "
    "OR (snapshot LIKE ? ESCAPE '|' AND instr(snapshot, '\"last_error\":') AND json_valid(snapshot) "
    "AND (json_extract(snapshot, '$.last_error.code') LIKE ? ESCAPE '|' "
    "OR json_extract(snapshot, '$.last_error.message') LIKE ? ESCAPE '|')))"
)
_LITERAL = str.maketrans({"|": "||", "%": "|%", "_": "|_"})


def find_runs(db: sqlite3.Connection, query: port.RunQuery, limit: int) -> port.Found[port.RunHead]:
    """Return the runs that the query names, by their ids."""
    where = _where(query)
    where.add("run_id > ?", query.after)
    place = None
    if query.look is not None:
        last = "SELECT run_id FROM runs WHERE run_id > ? ORDER BY run_id LIMIT 1 OFFSET ?"
        place = next((run_id for (run_id,) in db.execute(last, (query.after, query.look - 1))), None)
        where.add_given("run_id <= ?", place)
    return _heads(db, where, "run_id", query, limit, place)


def look_at_newest(db: sqlite3.Connection, query: port.RunQuery, limit: int) -> port.Found[port.RunHead]:
    """Return those of the next so many runs that the query names, the newest first."""
    before = place_of_newest(db, query)
    where = _where(query)
    where.add("run_no < ?", before)
    last = "SELECT created_at, run_id, run_no FROM runs WHERE run_no < ? ORDER BY run_no DESC LIMIT 1 OFFSET ?"
    found = db.execute(last, (before, (query.look or 1) - 1)).fetchone()
    where.add_given("run_no >= ?", found and found[2])
    return _heads(db, where, "run_no DESC", query, limit, found and found[:2])


def place_of_newest(db: sqlite3.Connection, query: port.RunQuery) -> int:
    """Return the number before which to look for the newest runs."""
    created_at, run_id = query.before
    return int(db.execute(_PLACE, (run_id, created_at)).fetchone()[0])


def newest_runs(
    query: port.RunQuery, before: int, down_to: int, db: sqlite3.Connection, _now: Instant
) -> port.Found[port.RunHead]:
    """Return the runs that the query names with numbers from `down_to` on and before `before`, the newest first."""
    where = _where(query)
    where.add("run_no < ? AND run_no >= ?", before, down_to)
    return _heads(db, where, "run_no DESC", query, query.limit)


def is_looked_up(query: port.RunQuery) -> bool:
    """Say whether an index leads to the few runs that the query names, wherever they are."""
    return any(given is not None for given in (query.run_ids, query.reference_key, query.parent_run_id))


def _heads(
    db: sqlite3.Connection, where: Where, order: str, query: port.RunQuery, limit: int, place: Any = None
) -> port.Found[port.RunHead]:
    found = db.execute(f"SELECT {rows.HEAD} FROM runs {where.text} ORDER BY {order} LIMIT ?", where.values(limit))
    taken = list(within(found, query.most_bytes, text_bytes))
    is_whole = len(taken) < limit and next(found, None) is None
    place_of = itemgetter(14, 1) if query.newest else itemgetter(1)
    return rows.found_of(taken, rows.head_of, itemgetter(1), place_of, place if is_whole else None)


def _where(query: port.RunQuery) -> Where:
    where = Where()
    where.add_given("tenant = ?", query.tenant)
    where.add_given("plan_id = ?", query.plan_id)
    where.add_given("status = ?", None if query.status is None else str(query.status))
    where.add_given("reference_key = ?", query.reference_key)
    where.add_given("parent_run_id = ?", query.parent_run_id)
    where.add_given("EXISTS (SELECT 1 FROM json_each(tags) WHERE value = ?)", query.tag)
    where.add_given("created_at >= ?", query.created_from)
    where.add_given("created_at < ?", query.created_until)
    if query.run_ids is not None:
        where.add("run_id IN (SELECT value FROM json_each(?))", rows.listing(query.run_ids))
    for word in words_of(query.text):
        _add_word(where, word)
    return where


def patterns_of(word: str) -> tuple[str, str]:
    """Return what LIKE takes to find a word in a text, and in a text of JSON."""
    return f"%{word.translate(_LITERAL)}%", f"%{in_json(word).translate(_LITERAL)}%"


def _add_word(where: Where, word: str) -> None:
    plain, quoted = patterns_of(word)
    if "\0" in word:
        where.add("FALSE")  # SQLite reads no such pattern, and nothing that is stored holds it
    else:
        where.add(_SAYS, plain, plain, plain, quoted, plain, quoted, plain, plain)
