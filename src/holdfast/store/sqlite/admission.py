"""`admit`, and how new runs enter the admission queues of their plans. They leave with their commits (`commit.py`).

`core/admission.py` decides; this module has the two queries whose results it needs, and writes the decision. Triggers
of the schema keep the counts and the first run of each line (the queued runs of one tenant and key) whenever
`gate_runs` changes. So each query is an index lookup, however many runs are queued.
"""

import sqlite3
from collections.abc import Mapping

from holdfast.core.admission import (
    NEVER,
    AdmissionDecision,
    AdmissionRequest,
    QueuedRun,
    QueueState,
    RunLimit,
    decide_admission,
    rank,
    rejection,
)
from holdfast.core.instants import Instant
from holdfast.errors import Overloaded
from holdfast.store import port
from holdfast.store.sqlite import queries
from holdfast.store.sqlite.leases import take_over

STATE = """
SELECT inside, last_tenant, starting, (
    SELECT starts_at FROM gate_starts
    WHERE gate_starts.plan_id = gates.plan_id AND starting < ?2 AND number = last_start - (?2 - starting) + 1
) FROM gates WHERE plan_id = ?1
"""
# The candidates for the next run: the first with room after a tenant, and the first with room of all.
FIRST = """
SELECT run_no, tenant, place, inside FROM gate_lines INDEXED BY gate_lines_open
WHERE plan_id = ? AND tenant > ? AND place IS NOT NULL AND inside < per_key
ORDER BY tenant, place, run_no LIMIT 1
"""
OF_KEY = "SELECT inside FROM gate_lines WHERE plan_id = ? AND tenant = ? AND key = ?"
LEFT_BEHIND = """
DELETE FROM gate_runs WHERE run_no IN (
    SELECT run_no FROM gate_runs AS there WHERE plan_id = ? AND is_inside
        AND (SELECT finished_at FROM runs WHERE runs.run_no = there.run_no) IS NOT NULL
)
"""
# Deletes a queued run that was finished without leaving the queue.
ENDED = """
DELETE FROM gate_runs WHERE run_no = ?1 AND (SELECT finished_at FROM runs WHERE run_no = ?1) IS NOT NULL
"""
STARTED = """
UPDATE gate_runs SET is_starting = 0 WHERE is_starting AND run_no IN (SELECT value FROM json_each(?)) RETURNING plan_id
"""
FORGET_STARTS = """
DELETE FROM gate_starts WHERE plan_id = ?1 AND number <= (SELECT last_start FROM gates WHERE plan_id = ?1) - ?2
"""
HOLD_BACK = "UPDATE messages SET due_at = ? WHERE run_no = ? AND signal_id = ?"
# Signals that the turn has not seen, and messages that are not held back, make the run ready as usual.
WAIT = """
UPDATE runs SET queued_at = coalesce(queued_at, ?1), ready_at = nullif(min(
    CASE WHEN inbox_seq > ?2 THEN ?1 ELSE ?3 END,
    coalesce((SELECT min(due_at) FROM messages WHERE messages.run_no = runs.run_no), ?3)
), ?3) WHERE run_no = ?4
"""
LEAVE = "DELETE FROM gate_runs WHERE run_no IN (SELECT value FROM json_each(?))"


def admit(
    db: sqlite3.Connection, limits: Mapping[str, RunLimit], most: int, node: str | None, now: Instant
) -> tuple[list[port.Admitted], Instant | None]:
    """Admit up to `most` runs of these plans, ordered by plan name."""
    if node is not None:
        queries.check_node(db, node, now)
    run_nos: list[int] = []
    instants: list[Instant] = []
    for plan_id in sorted(limits.keys() & _plans_with_queued_runs(db)):
        admitted, next_at = _admit(db, plan_id, limits[plan_id], most - len(run_nos), now)
        if not admitted and next_at is None and db.execute(LEFT_BEHIND, (plan_id,)).rowcount:
            admitted, next_at = _admit(db, plan_id, limits[plan_id], most - len(run_nos), now)
        run_nos += admitted
        instants += [] if next_at is None else [next_at]
    return _admitted(db, run_nos, node, now), min(instants, default=None)


def _plans_with_queued_runs(db: sqlite3.Connection) -> set[str]:
    return {
        plan_id
        for (plan_id,) in db.execute(
            "SELECT plan_id FROM gates WHERE EXISTS "
            "(SELECT 1 FROM gate_runs WHERE gate_runs.plan_id = gates.plan_id AND NOT is_inside)"
        )
    }


def has_queued_runs(db: sqlite3.Connection, node: str | None, now: Instant) -> bool:
    """Return whether any run is queued; raise `LeaseExpired` for a node without a current lease."""
    if node is not None:
        queries.check_node(db, node, now)
    return bool(_plans_with_queued_runs(db))


def check(db: sqlite3.Connection, new: port.NewRun, request: AdmissionRequest, now: Instant) -> Overloaded | None:
    """Return why a run that is about to be created is rejected, or None."""
    limit, plan_id = request.limit, new.plan_id
    db.execute("INSERT OR IGNORE INTO gates (plan_id, per_key) VALUES (?, ?)", (plan_id, NEVER))
    _use(db, plan_id, limit)
    if limit.overload != "reject":
        return None
    state, of_key = _state(db, plan_id, limit), db.execute(OF_KEY, (plan_id, new.tenant, request.key)).fetchone()
    own = QueuedRun(id=0, tenant=new.tenant, rank=rank(request.priority, now), of_key=of_key[0] if of_key else 0)
    return rejection(plan_id, state, _first(db, plan_id, state), own, limit, now)


def enqueue(
    db: sqlite3.Connection, run_no: int, new: port.NewRun, request: AdmissionRequest, owner: str | None, now: Instant
) -> bool:
    """Put a new run into the queue, and admit the next run. Return whether it was this one."""
    db.execute(
        "INSERT INTO gate_runs (run_no, plan_id, tenant, key, place) VALUES (?, ?, ?, ?, ?)",
        (run_no, new.plan_id, new.tenant, request.key, rank(request.priority, now)),
    )
    admitted, _ = _admit(db, new.plan_id, request.limit, 1, now)
    if run_no not in admitted:
        db.execute("UPDATE runs SET queued_at = ? WHERE run_no = ?", (now, run_no))
        return False
    if owner is not None:
        db.execute("UPDATE runs SET lease_owner = ?, lease_epoch = 1 WHERE run_no = ?", (owner, run_no))
    return True


def enqueue_again(
    db: sqlite3.Connection, run_no: int, turn: port.Turn, request: AdmissionRequest, now: Instant
) -> None:
    """Put an existing run into its queue, unless it is there already, and admit the next run."""
    plan_id, tenant = db.execute("SELECT plan_id, tenant FROM runs WHERE run_no = ?", (run_no,)).fetchone()
    place = db.execute("SELECT is_inside FROM gate_runs WHERE run_no = ?", (run_no,)).fetchone()
    if place is None:
        db.execute("INSERT OR IGNORE INTO gates (plan_id, per_key) VALUES (?, ?)", (plan_id, NEVER))
        _use(db, plan_id, request.limit)
        db.execute(
            "INSERT INTO gate_runs (run_no, plan_id, tenant, key, place) VALUES (?, ?, ?, ?, ?)",
            (run_no, plan_id, tenant, request.key, rank(request.priority, now)),
        )
    if place is None or not place[0]:  # queued, now or before
        db.executemany(HOLD_BACK, [(NEVER, run_no, message.signal_id) for message in turn.messages])
        db.execute(WAIT, (now, turn.seen_inbox_seq, NEVER, run_no))
    if place is None:
        _admit(db, plan_id, request.limit, 1, now)


def _use(db: sqlite3.Connection, plan_id: str, limit: RunLimit) -> None:
    """Index the lines of a queue by this limit, if it has changed: which of them have room."""
    per_key = NEVER if limit.per_key is None else limit.per_key
    changed = db.execute("UPDATE gates SET per_key = ?1 WHERE plan_id = ?2 AND per_key <> ?1", (per_key, plan_id))
    if changed.rowcount:
        db.execute("UPDATE gate_lines SET per_key = ? WHERE plan_id = ?", (per_key, plan_id))


def _state(db: sqlite3.Connection, plan_id: str, limit: RunLimit) -> QueueState:
    inside, last_tenant, starting, start = db.execute(STATE, (plan_id, limit.starts)).fetchone()
    return QueueState(inside=inside, last_tenant=last_tenant, starting=starting, nth_last_start=start)


def _first(db: sqlite3.Connection, plan_id: str, state: QueueState) -> list[QueuedRun[int]]:
    """Return the queued runs that are candidates for the next one, if any."""
    found = db.execute(FIRST, (plan_id, state.last_tenant)).fetchall()
    if not found and state.last_tenant:
        found = db.execute(FIRST, (plan_id, "")).fetchall()
    return [QueuedRun(id=run_no, tenant=tenant, rank=place, of_key=of_key) for run_no, tenant, place, of_key in found]


def _decide(db: sqlite3.Connection, plan_id: str, limit: RunLimit, now: Instant) -> AdmissionDecision[int]:
    state = _state(db, plan_id, limit)
    return decide_admission(state, _first(db, plan_id, state), limit, now)


def _admit(
    db: sqlite3.Connection, plan_id: str, limit: RunLimit, most: int, now: Instant
) -> tuple[list[int], Instant | None]:
    """Admit up to `most` runs of one plan. Also return when to call again even if no run leaves."""
    _use(db, plan_id, limit)
    admitted: list[int] = []
    while (decision := _decide(db, plan_id, limit, now)).run is not None:
        if decision.free_at > now or len(admitted) == most:
            return admitted, decision.next_at(now)
        run_no = decision.run.id
        if db.execute(ENDED, (run_no,)).rowcount:
            continue
        is_starting = limit.starts is not None
        db.execute("UPDATE gate_runs SET is_inside = 1, is_starting = ? WHERE run_no = ?", (is_starting, run_no))
        db.execute("UPDATE gates SET last_tenant = ? WHERE plan_id = ?", (decision.run.tenant, plan_id))
        db.execute("UPDATE messages SET due_at = ? WHERE run_no = ? AND due_at = ?", (now, run_no, NEVER))
        db.execute(
            "UPDATE runs SET queued_at = NULL, ready_at = min(?1, coalesce(ready_at, ?1)) WHERE run_no = ?2",
            (now, run_no),
        )
        admitted.append(run_no)
        if limit.starts is not None:  # instants that no longer matter
            db.execute(FORGET_STARTS, (plan_id, limit.starts))
    return admitted, None


def record_start(db: sqlite3.Connection, plan_id: str, now: Instant) -> None:
    """Count a run that has started, or ended without starting, and was admitted under a rate."""
    (number,) = db.execute(
        "UPDATE gates SET last_start = last_start + 1 WHERE plan_id = ? RETURNING last_start", (plan_id,)
    ).fetchone()
    db.execute("INSERT INTO gate_starts VALUES (?, ?, ?)", (plan_id, number, now))


def _admitted(db: sqlite3.Connection, run_nos: list[int], node: str | None, now: Instant) -> list[port.Admitted]:
    """Claim the runs without an owner for the node, if there is one, and return the answers."""
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
