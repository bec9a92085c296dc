"""`commit`: turns appended to histories, many at a time.

The write lock is held, so what is read here stays true until the commit. One statement reads all runs of the batch;
conflicts are answered from that; the other turns are written table by table with `executemany`. A run that has two
turns in one batch is written in two waves, so that the second turn finds what the first one wrote.

**A special path: the short cut.** Most turns have no conflict. So only the numbers of their runs are read, each run is
updated on condition that it is as its turn expects, and the updates are counted. If one is missing, everything is
rolled back and repeated as above, which finds the reason. Without the short cut a run of three steps takes 6 % more
instructions; `python -m bench --only paths` measures it again. `ShortCut.numbers_of` is its only entry.

The unique indexes detect an event or an open task that exists already: only if one is violated is a wave rolled back
and written again turn by turn, to find the turn at fault.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from holdfast.core.attributes import Attributes
from holdfast.core.codec import encode_text
from holdfast.core.events import Event, RunStarted
from holdfast.core.instants import Instant
from holdfast.core.messages import OUTCOME_SIGNAL, Message, SignalRequest
from holdfast.core.state import TERMINAL
from holdfast.errors import StoreCorrupt
from holdfast.limits import Limits
from holdfast.store import decisions, outgoing, port, sql, validation
from holdfast.store.sqlite import dead_letters, queries, streams
from holdfast.store.sqlite.admission import LEAVE, STARTED, enqueue_again, record_start
from holdfast.store.sqlite.create import create
from holdfast.store.sqlite.inbox import deliver

NEVER = 2**62
"""Later than every due instant. Means "nothing is due" in a minimum of several instants."""

NUMBERS_KEPT = 20_000
"""How many run numbers are cached at most: some megabytes."""

BATCHES_AROUND = 20
"""How many batches skip the short cut after one that had to be rolled back."""

_AS_EXPECTED = "WHERE run_no = ? AND run_id = ? AND version = ? AND lease_epoch = ?"

_UPDATE_RUN = f"""
UPDATE runs SET status = ?, version = ?, snapshot = ?, updated_at = ?, losses = 0,
    finished_at = coalesce(finished_at, ?), lease_owner = CASE WHEN ? THEN lease_owner END,
    ready_at = nullif(min(
        CASE WHEN inbox_seq > ? THEN ? ELSE {NEVER} END,
        coalesce((SELECT min(due_at) FROM messages WHERE run_no = ?), {NEVER})
    ), {NEVER})
{_AS_EXPECTED} AND (finished_at IS NULL OR ?) AND (inbox_seq <= ? OR NOT EXISTS (
    SELECT 1 FROM signals INDEXED BY signals_unconsumed
    WHERE signals.run_no = runs.run_no AND consumed_seq IS NULL AND name = '{OUTCOME_SIGNAL}' AND signals.inbox_seq > ?
))
"""

_UPDATE_STATE = f"""
UPDATE runs SET version = ?, snapshot = ?, updated_at = ?, losses = 0
{_AS_EXPECTED} AND finished_at IS NULL AND ready_at IS NULL AND inbox_seq <= ? AND status = ?
"""
"""For a turn that does not change its run's status, readiness and owner: no index has to be changed.

SQLite rewrites the index entry for each column that is set, even to the value that it already has.
"""

_NUMBERS = "SELECT run_id, run_no FROM runs WHERE run_id IN (SELECT value FROM json_each(?))"

_UNSEEN_OUTCOME = """
SELECT 1 FROM signals INDEXED BY signals_unconsumed
WHERE run_no = ? AND consumed_seq IS NULL AND name = ? AND inbox_seq > ?
"""

_UNSTORABLE = (
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    sqlite3.DataError,  # a value that is too long for the file
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
    status: str


class ShortCut:
    """The cached numbers of runs that were committed here, and whether the next batch may rely on them."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._batches_around = 0

    def numbers_of(self, db: sqlite3.Connection, turns: Sequence[port.Turn]) -> list[int] | None:
        """Return the numbers of the turns' runs, or None if the short cut cannot be taken.

        Numbers of runs that finish are dropped; if a number belongs to another run by now, the update detects it.
        """
        if self._batches_around:
            self._batches_around -= 1
            return None
        numbers = [self._numbers.get(turn.run_id, 0) for turn in turns]
        if 0 in numbers:
            unknown = [turn.run_id for turn, number in zip(turns, numbers, strict=True) if not number]
            if len(self._numbers) > NUMBERS_KEPT:
                self._numbers.clear()
            self._numbers.update(db.execute(_NUMBERS, (queries.listing(unknown),)).fetchall())
            numbers = [number or self._numbers.get(turn.run_id, 0) for turn, number in zip(turns, numbers, strict=True)]
        for turn in turns:
            if turn.snapshot.status in TERMINAL:
                self._numbers.pop(turn.run_id, None)
        if 0 in numbers or len(set(numbers)) < len(numbers) or any(turn.jobs or turn.dead for turn in turns):
            return None
        return numbers

    def avoid(self) -> None:
        """Suspend the short cut for a while."""
        self._numbers.clear()
        self._batches_around = BATCHES_AROUND


def commit(
    db: sqlite3.Connection, turns: Sequence[port.Turn], limits: Limits, now: Instant, short_cut: ShortCut
) -> list[Answer]:
    """Commit each turn whose version and epoch are still those of its run."""
    numbers = short_cut.numbers_of(db, turns)
    if numbers is not None:
        if all(map(validation.can_be_kept, turns)) and _is_written(
            db, [(run_no, turn, _may_be_light(turn)) for run_no, turn in zip(numbers, turns, strict=True)], now
        ):
            _send_out(db, list(zip(numbers, turns, strict=True)), limits, now)
            return [port.Committed(turn.expected_version + len(turn.events), now) for turn in turns]
        short_cut.avoid()
    heads = _heads(db, turns)
    answers: list[Answer | None] = [None] * len(turns)
    wave: dict[str, int] = {}
    written: set[int] = set()  # without those that were committed before, along with what they send to others
    for index, turn in enumerate(turns):
        if turn.run_id in wave:
            _write_wave(db, turns, wave, heads, answers, now)
            wave = {}
        head = heads.get(turn.run_id)
        answers[index] = _conflict(db, turn, head)
        if answers[index] is None:
            wave[turn.run_id] = index
            written.add(index)
    _write_wave(db, turns, wave, heads, answers, now)
    committed = [
        (heads[turn.run_id].run_no, turn)
        for index, (turn, answer) in enumerate(zip(turns, answers, strict=True))
        if index in written and isinstance(answer, port.Committed)
    ]
    _send_out(db, committed, limits, now)
    return [answer for answer in answers if answer is not None]


def _is_written(db: sqlite3.Connection, turns: list[tuple[int, port.Turn, bool]], now: Instant) -> bool:
    """Write turns of different runs, or nothing if one of the runs is not as its turn expects."""
    db.execute("SAVEPOINT all_turns")
    try:
        is_written = _write(db, turns, now)
    except _UNSTORABLE:
        is_written = False
    if not is_written:
        db.execute("ROLLBACK TO all_turns")
    db.execute("RELEASE all_turns")
    return is_written


def _send_out(db: sqlite3.Connection, all_turns: list[tuple[int, port.Turn]], limits: Limits, now: Instant) -> None:
    """Queue and start runs, deliver what turns send, and append to streams, in the same transaction.

    Store the messages and dead letters that result from refusals.
    """
    for run_no, turn in all_turns:
        if turn.admission is not None:
            enqueue_again(db, run_no, turn, turn.admission, now)
        if turn.streams:
            streams.write(db, [(run_no, turn)], limits, now)
    numbered = [(run_no, turn) for run_no, turn in all_turns if turn.starts or turn.sends]
    if not numbered:
        return
    turns = [turn for _, turn in numbered]
    starts = [new for turn in turns for new in turn.starts]
    created = create(db, decisions.never_rejected(starts), None, limits, now) if starts else []
    sent = _send(db, [(turn, item) for turn in turns for item in turn.sends], limits, now)
    answers = zip(outgoing.by_turn(turns, "starts", created), outgoing.by_turn(turns, "sends", sent), strict=True)
    for (run_no, turn), (of_starts, of_sends) in zip(numbered, answers, strict=True):
        left = outgoing.left_of(turn, of_starts, of_sends, now)
        if left.messages:
            deliver(db, left.messages, limits, now)
        if left.letters:
            db.executemany(dead_letters.INSERT, [dead_letters.letter_row(run_no, letter) for letter in left.letters])


def _send(
    db: sqlite3.Connection,
    sends: list[tuple[port.Turn, SignalRequest | Message]],
    limits: Limits,
    now: Instant,
) -> list[port.Delivered]:
    """Deliver what turns send to other runs, if they may reach them."""
    if not sends:
        return []
    runs = _whose(db, sends)
    answers = [outgoing.unreachable(turn, item, runs) if runs else None for turn, item in sends]
    near = [item for (_, item), answer in zip(sends, answers, strict=True) if answer is None]
    delivered = iter(deliver(db, near, decisions.without_rate(limits), now))
    return [next(delivered) if answer is None else answer for answer in answers]


def _whose(db: sqlite3.Connection, sends: list[tuple[port.Turn, SignalRequest | Message]]) -> dict[str, outgoing.Whose]:
    """Return the tenants of runs that send or receive signals; none if all items are between parent and child."""
    run_ids = {run_id for turn, item in sends for run_id in outgoing.concerned(turn, item)}
    if not run_ids:
        return {}
    found = db.execute(
        "SELECT run_id, tenant, project, environment, parent_run_id FROM runs "
        "WHERE run_id IN (SELECT value FROM json_each(?))",
        (queries.listing(run_ids),),
    )
    return {run_id: outgoing.Whose(*row) for run_id, *row in found}


def _heads(db: sqlite3.Connection, turns: Sequence[port.Turn]) -> dict[str, _Head]:
    found = db.execute(
        "SELECT run_id, run_no, version, lease_owner, lease_epoch, inbox_seq, finished_at IS NOT NULL, "
        "ready_at IS NOT NULL, status FROM runs WHERE run_id IN (SELECT value FROM json_each(?))",
        (queries.listing({turn.run_id for turn in turns}),),
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
    if head.inbox_seq > turn.seen_inbox_seq and _has_unseen_outcome(db, head, turn):
        return port.CommitConflict("unseen", head.version, head.lease_epoch)
    if not validation.can_be_kept(turn):
        return port.CommitConflict("cannot be stored", head.version, head.lease_epoch)
    return None


def _has_unseen_outcome(db: sqlite3.Connection, head: _Head, turn: port.Turn) -> bool:
    found = db.execute(_UNSEEN_OUTCOME, (head.run_no, OUTCOME_SIGNAL, turn.seen_inbox_seq)).fetchone()
    return found is not None


def _already_there(db: sqlite3.Connection, turn: port.Turn, head: _Head) -> port.Committed | None:
    """Recognise a turn that was committed before: the events after its version are its own."""
    end = turn.expected_version + len(turn.events)
    found = db.execute(
        f"SELECT {sql.EVENT} FROM events WHERE run_no = ? AND run_seq > ? AND run_seq <= ? ORDER BY run_seq",
        (head.run_no, turn.expected_version, end),
    )
    there = sql.events_of(turn.run_id, found)
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
    winners = [_winner(heads[run_id], turns[index]) for run_id, index in wave.items()]
    if not winners:
        return
    if not _is_written(db, winners, now):
        for run_id, index in wave.items():
            answers[index] = _write_alone(db, heads[run_id], turns[index], now)
    for run_id, index in wave.items():
        if answers[index] is None:
            turn = turns[index]
            answers[index] = port.Committed(turn.expected_version + len(turn.events), now)
            if len(heads) < len(turns):  # some run has another turn
                _advance(heads[run_id], turn)


def _advance(head: _Head, turn: port.Turn) -> None:
    head.version += len(turn.events)
    head.lease_owner = _owner_after(head, turn)
    head.is_finished = head.is_finished or turn.snapshot.status in TERMINAL
    head.is_ready = head.is_ready or not _is_as_ready(head, turn)
    head.status = str(turn.snapshot.status)


def _write_alone(db: sqlite3.Connection, head: _Head, turn: port.Turn, now: Instant) -> port.CommitConflict | None:
    db.execute("SAVEPOINT alone")
    try:
        if not _write(db, [_winner(head, turn)], now):
            raise StoreCorrupt(f"run {turn.run_id} is not as it was a moment ago")
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
            f"SELECT {sql.EVENT} FROM events WHERE run_no = ? AND idempotency_key = ?",
            (run_no, bytes.fromhex(event.idempotency_key)),
        )
        for existing in sql.events_of(turn.run_id, found):
            return existing
        if event.idempotency_key in seen:
            return seen[event.idempotency_key]
        seen[event.idempotency_key] = event
    return None


def _write(db: sqlite3.Connection, winners: list[tuple[int, port.Turn, bool]], now: Instant) -> bool:
    """Write turns of different runs, table by table; return whether all their runs were as expected."""
    events: list[tuple[Any, ...]] = []
    consumed: list[tuple[int, str]] = []
    messages: list[tuple[Any, ...]] = []
    finished: list[int] = []
    started: list[int] = []
    runs: list[tuple[Any, ...]] = []
    states: list[tuple[Any, ...]] = []
    jobs_closed: list[tuple[int, str]] = []
    jobs: list[tuple[Any, ...]] = []
    others = []
    attributes: list[tuple[int, Attributes]] = []
    for run_no, turn, is_light in winners:
        is_finished = turn.snapshot.status in TERMINAL
        events += queries.event_rows(run_no, turn.events, turn.expected_version, now)
        if turn.consumed:
            consumed += [(run_no, signal_id) for signal_id in turn.consumed]
        if turn.messages:
            messages += [queries.message_row(run_no, message, now) for message in turn.messages]
        if is_finished:
            finished.append(run_no)
        if is_finished or has_started(turn.events):
            started.append(run_no)
        if turn.jobs or turn.jobs_closed:
            jobs_closed += [(run_no, step_id) for step_id in turn.jobs_closed]
            jobs += [queries.job_row(run_no, job, now) for job in turn.jobs]
        if turn.received or turn.waits_opened or turn.waits_closed or turn.tasks or turn.records or turn.dead:
            others.append((run_no, turn))
        if turn.attributes is not None:
            attributes.append((run_no, turn.attributes))
        status = str(turn.snapshot.status)
        state = turn.expected_version + len(turn.events), encode_text(turn.snapshot), now
        expected, seen = (run_no, turn.run_id, turn.expected_version, turn.epoch), turn.seen_inbox_seq
        if is_light:
            states.append((*state, *expected, seen, status))
        elif is_finished:
            has_no_events = 0 if turn.events else 1
            runs.append((status, *state, now, 0, NEVER, now, run_no, *expected, has_no_events, seen, seen))
        else:
            keeps_owner = 0 if turn.release else 1
            runs.append((status, *state, queries.NULL_VALUE, keeps_owner, seen, now, run_no, *expected, 0, seen, seen))
    queries.insert_events(db, events)
    if consumed:
        db.executemany("DELETE FROM messages WHERE run_no = ? AND signal_id = ?", consumed)
    if messages:
        db.executemany(queries.INSERT_MESSAGE, messages)
    _write_others(db, others)
    for run_no, values in attributes:
        db.execute("DELETE FROM run_attributes WHERE run_no = ?", (run_no,))
        db.executemany(queries.INSERT_ATTRIBUTE, queries.attribute_rows(run_no, values))
    if jobs_closed:
        db.executemany("DELETE FROM jobs WHERE run_no = ? AND step_id = ?", jobs_closed)
    if jobs:
        db.executemany(queries.INSERT_JOB, jobs)
    if started:
        for (plan_id,) in db.execute(STARTED, (queries.listing(started),)).fetchall():
            record_start(db, plan_id, now)
    if finished:
        numbers = queries.listing(finished)
        for table in ("messages", "waits", "jobs"):
            db.execute(f"DELETE FROM {table} WHERE run_no IN (SELECT value FROM json_each(?))", (numbers,))
        db.execute(LEAVE, (numbers,))
    updated = db.executemany(_UPDATE_RUN, runs).rowcount if runs else 0
    updated += db.executemany(_UPDATE_STATE, states).rowcount if states else 0
    losses = [(turn.losses, run_no) for run_no, turn, _ in winners if turn.losses]
    if losses:
        db.executemany("UPDATE runs SET losses = ? WHERE run_no = ?", losses)
    return updated == len(winners)


def has_started(events: Iterable[Event]) -> bool:
    """Return whether a run starts with these events."""
    for event in events:  # noqa: SIM110 - a generator would take longer than the loop
        if type(event.data) is RunStarted:
            return True
    return False


def _write_others(db: sqlite3.Connection, turns: list[tuple[int, port.Turn]]) -> None:
    """Write what only some turns have: signals consumed, waits, tasks, records and dead letters."""
    received = [
        (turn.expected_version + 1 + index, run_no, inbox_seq)
        for run_no, turn in turns
        for inbox_seq, index in turn.received
    ]
    closed = [(run_no, step_id) for run_no, turn in turns for step_id in turn.waits_closed]
    opened = [queries.wait_row(run_no, wait) for run_no, turn in turns for wait in turn.waits_opened]
    if received:
        db.executemany(
            "UPDATE signals SET consumed_seq = ? WHERE run_no = ? AND inbox_seq = ? AND consumed_seq IS NULL", received
        )
    if closed:
        db.executemany("DELETE FROM waits WHERE run_no = ? AND step_id = ?", closed)
    if opened:
        db.executemany(queries.INSERT_WAIT, opened)
    for run_no, turn in turns:
        if turn.tasks or turn.records or turn.dead:
            closed_first = sorted(turn.tasks, key=lambda task: task.status == "OPEN")
            db.executemany(queries.INSERT_TASK, [queries.task_row(run_no, task) for task in closed_first])
            db.executemany(queries.INSERT_RECORD, [queries.record_row(run_no, record) for record in turn.records])
            db.executemany(dead_letters.INSERT, [dead_letters.letter_row(run_no, letter) for letter in turn.dead])


def _owner_after(head: _Head, turn: port.Turn) -> str | None:
    return None if turn.release or turn.snapshot.status in TERMINAL else head.lease_owner


def _winner(head: _Head, turn: port.Turn) -> tuple[int, port.Turn, bool]:
    return head.run_no, turn, _is_as_ready(head, turn)


def _may_be_light(turn: port.Turn) -> bool:
    """Return whether the turn keeps its run's status and readiness, unless something is delivered."""
    if turn.consumed or turn.messages or turn.release or turn.snapshot.status in TERMINAL:
        return False
    for event in turn.events:  # noqa: SIM110 - a generator would take longer than the loop
        if event.data.LEADS_TO is not None:
            return False
    return True


def _is_as_ready(head: _Head, turn: port.Turn) -> bool:
    """Return whether nothing is due for the run before and after the turn, and its status and owner do not change."""
    is_same = _may_be_light(turn) and head.status == turn.snapshot.status
    return is_same and not head.is_ready and head.inbox_seq <= turn.seen_inbox_seq
