"""`commit`: turns appended to histories, many at a time.

The write lock is held, so what is read here stays true until the commit. All runs of the batch are read by one
statement; the turns that lose are answered from that; the winners are written table by table with `executemany`.
A run that has two turns in one batch is written in two waves, so that the second finds what the first did.

Whether an event or an open task is there already is left to the unique indexes: only if one objects is a wave undone
and written again turn by turn, to find out whose fault it was.
"""

import sqlite3
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from holdfast.core.events import Event
from holdfast.core.instants import Instant
from holdfast.core.state import TERMINAL
from holdfast.limits import Limits
from holdfast.store import guards, port
from holdfast.store.sqlite import letters, rows
from holdfast.store.sqlite.creating import create
from holdfast.store.sqlite.delivering import deliver
from holdfast.store.sqlite.gates import LEAVE

NEVER = 2**62
"""Later than every due instant. Stands for "nothing in sight" while the earliest of several is looked for."""

_UPDATE_RUN = f"""
UPDATE runs SET status = ?, version = ?, snapshot = ?, updated_at = ?, finished_at = coalesce(finished_at, ?),
    lease_owner = ?,
    ready_at = nullif(min(?, coalesce((SELECT min(due_at) FROM messages WHERE run_no = ?), {NEVER})), {NEVER})
WHERE run_no = ?
"""

_UPDATE_STATE = "UPDATE runs SET status = ?, version = ?, snapshot = ?, updated_at = ? WHERE run_no = ?"
"""For a turn after which its run is as ready as before, and its node's: no index has to be touched."""

_UNSTORABLE = (
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    msgspec.MsgspecError,
    ValueError,  # text that is not Unicode, among others
    TypeError,
    OverflowError,
    RecursionError,
)

Answer = port.Committed | port.CommitConflict


class _Head(Struct, gc=False):
    """What a turn is checked against."""

    run_no: int
    version: int
    lease_owner: str | None
    lease_epoch: int
    inbox_seq: int
    is_finished: int
    is_ready: int


def commit(db: sqlite3.Connection, turns: Sequence[port.Turn], limits: Limits, now: Instant) -> list[Answer]:
    """Commit each turn whose version and epoch are still its run's."""
    heads = _heads(db, turns)
    answers: list[Answer | None] = [None] * len(turns)
    wave: dict[str, int] = {}
    for index, turn in enumerate(turns):
        if turn.run_id in wave:
            _write_wave(db, turns, wave, heads, answers, now)
            wave = {}
        head = heads.get(turn.run_id)
        answers[index] = _conflict(db, turn, head)
        if answers[index] is None:
            wave[turn.run_id] = index
    _write_wave(db, turns, wave, heads, answers, now)
    committed = [turn for turn, answer in zip(turns, answers, strict=True) if isinstance(answer, port.Committed)]
    _tell_others(db, committed, limits, now)
    return [answer for answer in answers if answer is not None]


def _tell_others(db: sqlite3.Connection, turns: list[port.Turn], limits: Limits, now: Instant) -> None:
    """Start and tell other runs what the turns have for them: here, in the same transaction."""
    starts = [new for turn in turns for new in turn.starts]
    sends = [item for turn in turns for item in turn.sends]
    if starts:
        create(db, guards.never_rejected(starts), None, limits, now)
    if sends:
        deliver(db, sends, guards.without_rate(limits), now)


def _heads(db: sqlite3.Connection, turns: Sequence[port.Turn]) -> dict[str, _Head]:
    found = db.execute(
        "SELECT run_id, run_no, version, lease_owner, lease_epoch, inbox_seq, finished_at IS NOT NULL, "
        "ready_at IS NOT NULL FROM runs WHERE run_id IN (SELECT value FROM json_each(?))",
        (rows.listing({turn.run_id for turn in turns}),),
    )
    return {row[0]: _Head(*row[1:]) for row in found}


def _conflict(db: sqlite3.Connection, turn: port.Turn, head: _Head | None) -> Answer | None:
    if head is None:
        return port.CommitConflict("no such run")
    if head.version != turn.expected_version:
        return _already_there(db, turn, head) or port.CommitConflict("version", head.version, head.lease_epoch)
    if head.lease_epoch != turn.epoch:
        return port.CommitConflict("epoch", head.version, head.lease_epoch)
    if head.is_finished and (turn.events or turn.snapshot.status not in TERMINAL):
        return port.CommitConflict("finished", head.version, head.lease_epoch)
    if turn.jobs and not guards.can_be_queued(turn):
        return port.CommitConflict("cannot be stored", head.version, head.lease_epoch)
    if turn.dead and not guards.can_be_buried(turn):
        return port.CommitConflict("cannot be stored", head.version, head.lease_epoch)
    return None


def _already_there(db: sqlite3.Connection, turn: port.Turn, head: _Head) -> port.Committed | None:
    """Recognise a turn that was committed before: the events after its version are its own."""
    end = turn.expected_version + len(turn.events)
    found = db.execute(
        f"SELECT {rows.EVENT} FROM events WHERE run_no = ? AND run_seq > ? AND run_seq <= ? ORDER BY run_seq",
        (head.run_no, turn.expected_version, end),
    )
    there = rows.events_of(turn.run_id, found)
    mine = [(event.idempotency_key, event.engine_run_ref) for event in turn.events]
    theirs = [(event.idempotency_key, event.engine_run_ref) for event in there]
    return port.Committed(end, there[0].persisted_at) if mine and mine == theirs else None


def _write_wave(
    db: sqlite3.Connection,
    turns: Sequence[port.Turn],
    wave: dict[str, int],
    heads: dict[str, _Head],
    answers: list[Answer | None],
    now: Instant,
) -> None:
    """Write the turns of a wave, which are of different runs, and answer them."""
    winners = [(heads[run_id], turns[index]) for run_id, index in wave.items()]
    if not winners:
        return
    db.execute("SAVEPOINT wave")
    try:
        _write(db, winners, now)
    except _UNSTORABLE:
        db.execute("ROLLBACK TO wave")
        for run_id, index in wave.items():
            answers[index] = _write_alone(db, heads[run_id], turns[index], now)
    db.execute("RELEASE wave")
    for run_id, index in wave.items():
        if answers[index] is None:
            turn, head = turns[index], heads[run_id]
            head.version += len(turn.events)
            head.lease_owner = _owner_after(head, turn)
            head.is_finished = head.is_finished or turn.snapshot.status in TERMINAL
            head.is_ready = head.is_ready or not _is_as_ready(head, turn)
            answers[index] = port.Committed(head.version, now)


def _write_alone(db: sqlite3.Connection, head: _Head, turn: port.Turn, now: Instant) -> port.CommitConflict | None:
    db.execute("SAVEPOINT alone")
    try:
        _write(db, [(head, turn)], now)
        return None
    except _UNSTORABLE as problem:
        db.execute("ROLLBACK TO alone")
        existing = _existing_event(db, head.run_no, turn) if isinstance(problem, sqlite3.IntegrityError) else None
        if existing is not None:
            return port.CommitConflict("event exists", head.version, head.lease_epoch, existing)
        is_task = "tasks" in str(problem)
        return port.CommitConflict("task is open" if is_task else "cannot be stored", head.version, head.lease_epoch)
    finally:
        db.execute("RELEASE alone")


def _existing_event(db: sqlite3.Connection, run_no: int, turn: port.Turn) -> Event | None:
    seen: dict[str, Event] = {}
    for event in turn.events:
        found = db.execute(
            f"SELECT {rows.EVENT} FROM events WHERE run_no = ? AND idempotency_key = ?",
            (run_no, bytes.fromhex(event.idempotency_key)),
        )
        for existing in rows.events_of(turn.run_id, found):
            return existing
        if event.idempotency_key in seen:
            return seen[event.idempotency_key]
        seen[event.idempotency_key] = event
    return None


def _write(db: sqlite3.Connection, winners: list[tuple[_Head, port.Turn]], now: Instant) -> None:
    """Write turns of different runs, table by table."""
    events: list[tuple[Any, ...]] = []
    consumed: list[tuple[int, str]] = []
    messages: list[tuple[Any, ...]] = []
    finished: list[int] = []
    runs: list[tuple[Any, ...]] = []
    states: list[tuple[Any, ...]] = []
    jobs_closed: list[tuple[int, str]] = []
    jobs: list[tuple[Any, ...]] = []
    others = []
    for head, turn in winners:
        run_no, is_finished = head.run_no, turn.snapshot.status in TERMINAL
        events += rows.event_rows(run_no, turn.events, turn.expected_version, now)
        if turn.consumed:
            consumed += [(run_no, signal_id) for signal_id in turn.consumed]
        if turn.messages:
            messages += [rows.message_row(run_no, message, now) for message in turn.messages]
        if is_finished:
            finished.append(run_no)
        if turn.jobs or turn.jobs_closed:
            jobs_closed += [(run_no, step_id) for step_id in turn.jobs_closed]
            jobs += [rows.job_row(run_no, job, now) for job in turn.jobs]
        if turn.received or turn.waits_opened or turn.waits_closed or turn.tasks or turn.records or turn.dead:
            others.append((run_no, turn))
        state = str(turn.snapshot.status), turn.expected_version + len(turn.events), rows.encode(turn.snapshot), now
        if _is_as_ready(head, turn):
            states.append((*state, run_no))
        else:
            finished_at = now if is_finished else None
            at_once = now if head.inbox_seq > turn.seen_inbox_seq and not is_finished else NEVER
            runs.append((*state, finished_at, _owner_after(head, turn), at_once, run_no, run_no))
    db.executemany(rows.INSERT_EVENT, events)
    db.executemany("DELETE FROM messages WHERE run_no = ? AND signal_id = ?", consumed)
    db.executemany(rows.INSERT_MESSAGE, messages)
    _write_others(db, others)
    if jobs_closed:
        db.executemany("DELETE FROM jobs WHERE run_no = ? AND step_id = ?", jobs_closed)
    if jobs:
        db.executemany(rows.INSERT_JOB, jobs)
    if finished:
        numbers = rows.listing(finished)
        for table in ("messages", "waits", "jobs"):
            db.execute(f"DELETE FROM {table} WHERE run_no IN (SELECT value FROM json_each(?))", (numbers,))
        db.execute(LEAVE, (numbers,))
    db.executemany(_UPDATE_RUN, runs)
    db.executemany(_UPDATE_STATE, states)


def _write_others(db: sqlite3.Connection, turns: list[tuple[int, port.Turn]]) -> None:
    """Write what only some turns have: signals consumed, waits, tasks, records and dead letters."""
    received = [
        (turn.expected_version + 1 + index, run_no, inbox_seq)
        for run_no, turn in turns
        for inbox_seq, index in turn.received
    ]
    closed = [(run_no, step_id) for run_no, turn in turns for step_id in turn.waits_closed]
    opened = [rows.wait_row(run_no, wait) for run_no, turn in turns for wait in turn.waits_opened]
    if received:
        db.executemany(
            "UPDATE signals SET consumed_seq = ? WHERE run_no = ? AND inbox_seq = ? AND consumed_seq IS NULL", received
        )
    if closed:
        db.executemany("DELETE FROM waits WHERE run_no = ? AND step_id = ?", closed)
    if opened:
        db.executemany(rows.INSERT_WAIT, opened)
    for run_no, turn in turns:
        if turn.tasks or turn.records or turn.dead:
            closed_first = sorted(turn.tasks, key=lambda task: task.status == "OPEN")
            db.executemany(rows.INSERT_TASK, [rows.task_row(run_no, task) for task in closed_first])
            db.executemany(rows.INSERT_RECORD, [rows.record_row(run_no, record) for record in turn.records])
            db.executemany(letters.INSERT, [letters.letter_row(run_no, letter) for letter in turn.dead])


def _owner_after(head: _Head, turn: port.Turn) -> str | None:
    return None if turn.release or turn.snapshot.status in TERMINAL else head.lease_owner


def _is_as_ready(head: _Head, turn: port.Turn) -> bool:
    """Say whether the run has nothing in sight, before the turn and after it, and stays where it is."""
    if turn.consumed or turn.messages or turn.release or turn.snapshot.status in TERMINAL:
        return False
    return not head.is_ready and head.inbox_seq <= turn.seen_inbox_seq
