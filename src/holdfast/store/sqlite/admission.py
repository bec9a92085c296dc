"""`admit`, and how runs come to the gates of their plans. They leave with their commits (`commit.py`).

`core/admission.py` says what gates do. Counts and the first in each line are kept by triggers (`0006_gates.sql`),
whoever changes `gate_runs`; so finding who is next is one look into an index, however many wait.
"""

import sqlite3
from collections.abc import Mapping

from holdfast.core.admission import NEVER, AdmissionRequest, RunLimit, free_slot, overloaded, rank
from holdfast.core.instants import Instant
from holdfast.errors import Overloaded
from holdfast.store import port
from holdfast.store.sqlite import rows
from holdfast.store.sqlite.leases import check_node, take_over

FIRST = """
SELECT tenant, run_no FROM gate_lines INDEXED BY gate_lines_open
WHERE plan_id = ? AND tenant > ? AND place IS NOT NULL AND inside < per_key
ORDER BY tenant, place, run_no LIMIT 1
"""
ROOM = """
SELECT gates.inside, coalesce(gate_lines.inside, 0) FROM gates LEFT JOIN gate_lines
ON gate_lines.plan_id = gates.plan_id AND tenant = ? AND key = ? WHERE gates.plan_id = ?
"""
LEFT_BEHIND = """
DELETE FROM gate_runs WHERE run_no IN (
    SELECT run_no FROM gate_runs AS there WHERE plan_id = ? AND is_inside
        AND (SELECT finished_at FROM runs WHERE runs.run_no = there.run_no) IS NOT NULL
)
"""
# A run in line that a node has finished which does not know of gates.
ENDED = """
DELETE FROM gate_runs WHERE run_no = ?1 AND (SELECT finished_at FROM runs WHERE run_no = ?1) IS NOT NULL
"""
STARTED = """
UPDATE gate_runs SET is_starting = 0 WHERE is_starting AND run_no IN (SELECT value FROM json_each(?)) RETURNING plan_id
"""
LEAVE = "DELETE FROM gate_runs WHERE run_no IN (SELECT value FROM json_each(?))"


def admit(
    db: sqlite3.Connection, limits: Mapping[str, RunLimit], most: int, node: str | None, now: Instant
) -> tuple[list[port.Admitted], Instant | None]:
    """Let in up to so many runs of these plans, in order of the plans' names."""
    if node is not None:
        check_node(db, node, now)
    run_nos: list[int] = []
    instants: list[Instant] = []
    for plan_id in sorted(limits.keys() & _awaited(db)):
        admitted, next_at = _admit(db, plan_id, limits[plan_id], most - len(run_nos), now)
        if not admitted and next_at is None and db.execute(LEFT_BEHIND, (plan_id,)).rowcount:
            admitted, next_at = _admit(db, plan_id, limits[plan_id], most - len(run_nos), now)
        run_nos += admitted
        instants += [] if next_at is None else [next_at]
    return _admitted(db, run_nos, node, now), min(instants, default=None)


def _awaited(db: sqlite3.Connection) -> set[str]:
    """Return the plans at whose gates somebody waits."""
    return {
        plan_id
        for (plan_id,) in db.execute(
            "SELECT plan_id FROM gates WHERE EXISTS "
            "(SELECT 1 FROM gate_runs WHERE gate_runs.plan_id = gates.plan_id AND NOT is_inside)"
        )
    }


def is_awaited(db: sqlite3.Connection, node: str | None, now: Instant) -> bool:
    """Say whether anybody waits at any gate; refuse a node without a current lease."""
    if node is not None:
        check_node(db, node, now)
    return bool(_awaited(db))


def check(db: sqlite3.Connection, new: port.NewRun, request: AdmissionRequest, now: Instant) -> Overloaded | None:
    """Bring a run to its gate before it is created. Return why it is refused there, or None: it is put in line."""
    limit, plan_id = request.limit, new.plan_id
    db.execute("INSERT OR IGNORE INTO gates (plan_id, per_key) VALUES (?, ?)", (plan_id, NEVER))
    _use(db, plan_id, limit)
    free_at = _free_at(db, plan_id, limit, now)
    if limit.overload == "reject" and (free_at > now or not _has_room(db, new, request)):
        return overloaded(plan_id, free_at, now, limit)
    return None


def enqueue(
    db: sqlite3.Connection, run_no: int, new: port.NewRun, request: AdmissionRequest, owner: str | None, now: Instant
) -> bool:
    """Put a run that was just created in line, and let in who is next. Say whether it was this one."""
    place = rank(request.priority, now)
    db.execute(
        "INSERT INTO gate_runs (run_no, plan_id, tenant, key, place) VALUES (?, ?, ?, ?, ?)",
        (run_no, new.plan_id, new.tenant, request.key, place),
    )
    admitted, _ = _admit(db, new.plan_id, request.limit, 1, now)
    if run_no not in admitted:
        db.execute("UPDATE runs SET queued_at = ? WHERE run_no = ?", (now, run_no))
        return False
    if owner is not None:
        db.execute("UPDATE runs SET lease_owner = ?, lease_epoch = 1 WHERE run_no = ?", (owner, run_no))
    return True


def _has_room(db: sqlite3.Connection, new: port.NewRun, request: AdmissionRequest) -> bool:
    """Say whether a run that comes now could be let in, and nobody else."""
    inside, of_key = db.execute(ROOM, (new.tenant, request.key, new.plan_id)).fetchone()
    limit = request.limit
    if limit.at_once is not None and inside >= limit.at_once:
        return False
    if limit.per_key is not None and of_key >= limit.per_key:
        return False
    return db.execute(FIRST, (new.plan_id, "")).fetchone() is None


def _use(db: sqlite3.Connection, plan_id: str, limit: RunLimit) -> None:
    """Let the lines of a gate be open by this limit, if it was another one."""
    per_key = NEVER if limit.per_key is None else limit.per_key
    changed = db.execute("UPDATE gates SET per_key = ?1 WHERE plan_id = ?2 AND per_key <> ?1", (per_key, plan_id))
    if changed.rowcount:
        db.execute("UPDATE gate_lines SET per_key = ? WHERE plan_id = ?", (per_key, plan_id))


def _admit(
    db: sqlite3.Connection, plan_id: str, limit: RunLimit, most: int, now: Instant
) -> tuple[list[int], Instant | None]:
    """Let in up to so many at one gate; and when to ask again although nobody leaves."""
    _use(db, plan_id, limit)
    if limit.starts is not None:  # forget instants that no longer matter
        db.execute(
            "DELETE FROM gate_starts WHERE plan_id = ?1 "
            "AND number <= (SELECT last_start FROM gates WHERE plan_id = ?1) - ?2",
            (plan_id, limit.starts),
        )
    inside, tenant = db.execute("SELECT inside, last_tenant FROM gates WHERE plan_id = ?", (plan_id,)).fetchone()
    admitted: list[int] = []
    while limit.at_once is None or inside + len(admitted) < limit.at_once:
        first = db.execute(FIRST, (plan_id, tenant)).fetchone() or db.execute(FIRST, (plan_id, "")).fetchone()
        if first is None:
            break
        free_at = _free_at(db, plan_id, limit, now)
        if free_at > now or len(admitted) == most:
            return admitted, None if free_at == NEVER else free_at
        if db.execute(ENDED, (first[1],)).rowcount:
            continue
        tenant, run_no = first
        is_starting = limit.starts is not None
        db.execute("UPDATE gate_runs SET is_inside = 1, is_starting = ? WHERE run_no = ?", (is_starting, run_no))
        db.execute("UPDATE gates SET last_tenant = ? WHERE plan_id = ?", (tenant, plan_id))
        db.execute("UPDATE messages SET due_at = ? WHERE run_no = ? AND due_at = ?", (now, run_no, NEVER))
        db.execute(
            "UPDATE runs SET queued_at = NULL, ready_at = min(?1, coalesce(ready_at, ?1)) WHERE run_no = ?2",
            (now, run_no),
        )
        admitted.append(run_no)
    return admitted, None


def _free_at(db: sqlite3.Connection, plan_id: str, limit: RunLimit, now: Instant) -> Instant:
    if limit.starts is None:
        return now
    starting, starts_at = db.execute(
        "SELECT starting, (SELECT starts_at FROM gate_starts WHERE gate_starts.plan_id = gates.plan_id "
        "AND number = last_start - (?2 - starting) + 1) FROM gates WHERE plan_id = ?1",
        (plan_id, limit.starts),
    ).fetchone()
    last_starts = [] if starts_at is None else [starts_at] * (limit.starts - starting)
    return free_slot(last_starts, limit, now, starting)


def note_starts(db: sqlite3.Connection, run_nos: list[int], now: Instant) -> None:
    """Take note that runs have started, or ended without that: for those that were let in under a rate, it counts."""
    for (plan_id,) in db.execute(STARTED, (rows.listing(run_nos),)).fetchall():
        (number,) = db.execute(
            "UPDATE gates SET last_start = last_start + 1 WHERE plan_id = ? RETURNING last_start", (plan_id,)
        ).fetchone()
        db.execute("INSERT INTO gate_starts VALUES (?, ?, ?)", (plan_id, number, now))


def _admitted(db: sqlite3.Connection, run_nos: list[int], node: str | None, now: Instant) -> list[port.Admitted]:
    """Claim those that are free for the node, if there is one, and answer for each."""
    heads = [
        db.execute("SELECT run_id, lease_owner IS NULL FROM runs WHERE run_no = ?", (run_no,)).fetchone()
        for run_no in run_nos
    ]
    free = [run_no for run_no, (_, is_free) in zip(run_nos, heads, strict=True) if is_free]
    loaded = take_over(db, free, node, now) if node is not None else {}
    admitted = []
    for run_no, (run_id, is_free) in zip(run_nos, heads, strict=True):
        if not is_free:
            admitted.append(port.Admitted(run_id, "SKIPPED"))
        elif node is not None and run_no not in loaded:
            admitted.append(port.Admitted(run_id, "FAILED"))
        else:
            admitted.append(port.Admitted(run_id, "STARTED", loaded.get(run_no)))
    return admitted
