"""`commit`: turns appended to histories, many at a time, in one round trip.

The function `commit_1` checks all turns of a call and writes those without a conflict. If a turn cannot be stored (an
event that exists, a second open task, invalid text), the server refuses the whole call; then the turns are committed
one by one, and the one at fault gets its conflict. A run that has two turns in one batch is written in two calls, so
that the second turn finds what the first one wrote. Turns that send something to other runs, or append to streams, take
a transaction of several statements, which first locks every run that it will touch.
"""

from collections.abc import Sequence
from typing import Any

import asyncpg
from msgspec import Struct

from holdfast.core.codec import encode_text
from holdfast.core.events import Event
from holdfast.core.instants import Instant
from holdfast.core.messages import Message, SignalRequest
from holdfast.core.state import TERMINAL
from holdfast.limits import Limits
from holdfast.store import decisions, outgoing, port, sql, validation
from holdfast.store.postgres import admission, streams
from holdfast.store.postgres.columns import (
    EVENT_KINDS,
    MESSAGE_KINDS,
    More,
    bytes_of,
    event_rows,
    is_too_much,
    literals,
    message_rows,
    places,
)
from holdfast.store.postgres.create import create
from holdfast.store.postgres.faults import UNSTORABLE
from holdfast.store.postgres.inbox import deliver
from holdfast.store.postgres.pool import Db, Pool, Transaction

Answer = port.Committed | port.CommitConflict

TURN_KINDS = (
    *("text", "bigint", "bigint", "bigint", "text", "text"),
    *("boolean", "bigint", "boolean", "boolean"),
)
CONSUMED_KINDS = ("int", "text")
KINDS = (*TURN_KINDS, *EVENT_KINDS, *CONSUMED_KINDS, *MESSAGE_KINDS)
COMMIT = f"""
SELECT o_now, o_verdicts, o_versions, o_epochs FROM holdfast.commit_1($1, {places(2, KINDS)}, ${len(KINDS) + 2})
"""
LOCK = """
SELECT run_id, run_no, tenant, project, environment, parent_run_id FROM holdfast.runs
WHERE run_id = ANY ($1) ORDER BY run_id FOR UPDATE
"""
KEEP = "SELECT holdfast.commit_more_1($1, $2, $3)"
FOLLOWING = f"""
SELECT {sql.EVENT} FROM holdfast.events
WHERE run_no = (SELECT run_no FROM holdfast.runs WHERE run_id = $1) AND run_seq > $2 AND run_seq <= $3 ORDER BY run_seq
"""
BY_KEY = f"""
SELECT {sql.EVENT} FROM holdfast.events
WHERE run_no = (SELECT run_no FROM holdfast.runs WHERE run_id = $1) AND idempotency_key = $2
"""

TURN_BYTES = 256 * 1024 * 1024
"""The largest turn, in bytes: the server accepts 1 GB in one array, where a byte may take two to three."""

_REASONS: dict[int, Any] = {
    1: "no such run",
    2: "version",
    3: "epoch",
    4: "finished",
    5: "cannot be stored",
    6: "unseen",
}


class Judged(Struct, frozen=True):
    """The server's verdicts on the turns of a call. A verdict of 0 means that the turn was committed."""

    now: Instant
    verdicts: Sequence[int]
    versions: Sequence[int]
    epochs: Sequence[int]


class Committing:
    """One call of `commit`."""

    def __init__(self, pool: Pool, turns: Sequence[port.Turn], limits: Limits, now: Instant | None) -> None:
        self._pool = pool
        self._turns = turns
        self._limits = limits
        self._now = now
        self._answers: dict[int, Answer] = {}
        self.heard: Instant | None = None

    async def run(self) -> list[Answer]:
        """Commit each turn whose version and epoch are still those of its run."""
        for wave in _waves(self._turns):
            await self._commit(wave)
        return [self._answers[index] for index in range(len(self._turns))]

    async def _commit(self, wave: Sequence[int]) -> None:
        turns = [self._turns[index] for index in wave]
        if is_too_much(turn.events for turn in turns):
            await self._commit(wave[: len(wave) // 2])
            await self._commit(wave[len(wave) // 2 :])
            return
        try:
            judged = await self._judge(turns)
        except UNSTORABLE as problem:
            if len(wave) == 1:
                self._answers[wave[0]] = await self._explain(turns[0], problem)
                return
            for index in wave:
                await self._commit([index])
            return
        self.heard = judged.now
        for place, index in enumerate(wave):
            self._answers[index] = await self._answer(turns[place], judged, place)

    async def _judge(self, turns: Sequence[port.Turn]) -> Judged:
        if len(turns) == 1 and bytes_of(turns[0].events) > TURN_BYTES:
            raise ValueError("a turn is larger than the server takes")
        arguments = commit_arguments(self._now, turns)
        if any(turn.starts or turn.sends or turn.streams or turn.admission is not None for turn in turns):
            return await self._pool.transact(lambda transaction: self._judge_and_send(transaction, turns, arguments))
        return await _judged(self._pool, arguments)

    async def _judge_and_send(
        self, transaction: Transaction, turns: Sequence[port.Turn], arguments: list[Any]
    ) -> Judged:
        """Commit, queue runs, start runs, and deliver what the turns send, in one transaction."""
        locked = await _lock(transaction, turns)
        judged = await _judged(transaction, arguments)
        committed = [turn for turn, verdict in zip(turns, judged.verdicts, strict=True) if verdict == 0]
        for turn in committed:
            if turn.admission is not None:
                await admission.enqueue_again(transaction, turn, turn.admission, judged.now)
        numbers = {run_id: row[1] for run_id, row in locked.items()}
        await streams.write(transaction, committed, numbers, self._limits, judged.now)
        await self._send_out(transaction, [turn for turn in committed if turn.starts or turn.sends], locked, judged.now)
        return judged

    async def _send_out(
        self, transaction: Transaction, turns: list[port.Turn], locked: dict[str, Any], now: Instant
    ) -> None:
        """Start runs and deliver what the turns send, and store the messages and letters that result from refusals."""
        starts = [new for turn in turns for new in turn.starts]
        created = (
            await create(transaction, decisions.never_rejected(starts), None, self._limits, self._now) if starts else []
        )
        runs = {run_id: outgoing.Whose(*tuple(row)[2:]) for run_id, row in locked.items()}
        runs |= {
            new.run_id: outgoing.whose(new)
            for new, answer in zip(starts, created, strict=True)
            if isinstance(answer, port.Created)
        }
        sent = await self._send(transaction, [(turn, item) for turn in turns for item in turn.sends], runs)
        answers = zip(outgoing.by_turn(turns, "starts", created), outgoing.by_turn(turns, "sends", sent), strict=True)
        more, messages = More(), list[Message]()
        numbers = [locked[turn.run_id][1] for turn in turns]
        for number, (turn, (of_starts, of_sends)) in enumerate(zip(turns, answers, strict=True), 1):
            left = outgoing.left_of(turn, of_starts, of_sends, now)
            more.add_dead(number, left.letters)
            messages += left.messages
        if messages:
            await deliver(transaction, messages, self._limits, self._now)
        if (text := more.text()) is not None:
            await transaction.fetch(KEEP, text, numbers, now)

    async def _send(
        self,
        transaction: Transaction,
        sends: list[tuple[port.Turn, SignalRequest | Message]],
        runs: dict[str, outgoing.Whose],
    ) -> list[port.Delivered]:
        """Deliver what turns send to other runs, if they may reach them."""
        answers = [outgoing.unreachable(turn, item, runs) for turn, item in sends]
        near = [item for (_, item), answer in zip(sends, answers, strict=True) if answer is None]
        delivered = iter(
            await deliver(transaction, near, decisions.without_rate(self._limits), self._now) if near else ()
        )
        return [next(delivered) if answer is None else answer for answer in answers]

    async def _answer(self, turn: port.Turn, judged: Judged, place: int) -> Answer:
        verdict, version, epoch = judged.verdicts[place], judged.versions[place], judged.epochs[place]
        if verdict == 0:
            return port.Committed(turn.expected_version + len(turn.events), judged.now)
        if verdict == 2:
            there = await self._already_there(turn)  # along with what it sends to others
            if there is not None:
                return there
        return port.CommitConflict(_REASONS[verdict], version, epoch)

    async def _already_there(self, turn: port.Turn) -> port.Committed | None:
        """Recognise a turn that was committed before: the events after its version are its own."""
        end = turn.expected_version + len(turn.events)
        if not turn.events:
            return None
        found = await self._pool.fetch(FOLLOWING, turn.run_id, turn.expected_version, end)
        there = sql.events_of(turn.run_id, found)
        mine = [(event.idempotency_key, event.engine_run_ref) for event in turn.events]
        theirs = [(event.idempotency_key, event.engine_run_ref) for event in there]
        return port.Committed(end, there[0].persisted_at) if mine == theirs else None

    async def _explain(self, turn: port.Turn, problem: BaseException) -> Answer:
        """Answer a turn that could not be stored. There may be another conflict: no run, or another version."""
        try:
            judged = await _judged(self._pool, _unfit_arguments(self._now, turn))
        except UNSTORABLE:
            return port.CommitConflict("no such run")
        if judged.verdicts[0] != 5:
            return await self._answer(turn, judged, 0)
        version, epoch = judged.versions[0], judged.epochs[0]
        if isinstance(problem, asyncpg.UniqueViolationError):
            existing = await self._existing_event(turn)
            if existing is not None:
                return port.CommitConflict("event exists", version, epoch, existing)
            if problem.constraint_name == "tasks_open":
                return port.CommitConflict("task is open", version, epoch)
        return port.CommitConflict("cannot be stored", version, epoch)

    async def _existing_event(self, turn: port.Turn) -> Event | None:
        seen: dict[str, Event] = {}
        for event in turn.events:
            found = await self._pool.fetch(BY_KEY, turn.run_id, bytes.fromhex(event.idempotency_key))
            for existing in sql.events_of(turn.run_id, found):
                return existing
            if event.idempotency_key in seen:
                return seen[event.idempotency_key]
            seen[event.idempotency_key] = event
        return None


def _waves(turns: Sequence[port.Turn]) -> list[list[int]]:
    """Return the turns in groups to commit one after the other: the fewest that keep their effects in order.

    A turn begins a new group if the current group has a turn of its run, or one that starts its run or sends to it.
    """
    groups: list[list[int]] = []
    touched: set[Any] = set()
    for index, turn in enumerate(turns):
        if not groups or turn.run_id in touched:
            groups.append([])
            touched = set()
        groups[-1].append(index)
        touched.add(turn.run_id)
        if turn.starts or turn.sends:
            touched.update(getattr(item, "run_id", None) for item in (*turn.starts, *turn.sends))
    return groups


async def _lock(transaction: Transaction, turns: Sequence[port.Turn]) -> dict[str, Any]:
    """Lock what turns, and the items they send, will touch; return the runs by their ids."""
    await admission.lock(transaction, [new for turn in turns for new in turn.starts], turns)
    others = {item.run_id for turn in turns for item in turn.sends if isinstance(getattr(item, "run_id", 0), str)}
    found = await transaction.fetch(LOCK, sorted({turn.run_id for turn in turns} | others))
    return {row[0]: row for row in found}


async def _judged(db: Db, arguments: list[Any]) -> Judged:
    [row] = await db.fetch(COMMIT, *arguments)
    return Judged(row[0], row[1], row[2], row[3])


def commit_arguments(now: Instant | None, turns: Sequence[port.Turn]) -> list[Any]:
    """Return the arguments of `commit_1`."""
    runs: list[tuple[Any, ...]] = []
    events: list[tuple[Any, ...]] = []
    consumed: list[tuple[int, str]] = []
    messages: list[tuple[Any, ...]] = []
    more = More()
    for number, turn in enumerate(turns, 1):
        is_unfit = not validation.can_be_kept(turn)
        runs.append(_run_row(turn, is_unfit))
        if is_unfit:
            continue
        events += event_rows(number, turn.expected_version, turn.events)
        if turn.consumed:
            consumed += [(number, signal_id) for signal_id in turn.consumed]
        if turn.messages:
            messages += message_rows(number, turn.messages)
        if turn.received or turn.waits_opened or turn.waits_closed or turn.tasks or turn.records:
            _add_more(more, number, turn)
        if turn.attributes is not None:
            more.add_attributes(number, turn.attributes)
        if turn.losses:
            more.add("losses", number, [{"losses": turn.losses}])
        if turn.jobs or turn.jobs_closed or turn.dead:
            more.add_jobs(number, turn.jobs, turn.jobs_closed)
            more.add_dead(number, turn.dead)
    return [
        now,
        *literals(runs, TURN_KINDS),
        *literals(events, EVENT_KINDS),
        *literals(consumed, CONSUMED_KINDS),
        *literals(messages, MESSAGE_KINDS),
        more.text(),
    ]


def _unfit_arguments(now: Instant | None, turn: port.Turn) -> list[Any]:
    """Return arguments that have a turn checked but never written."""
    row = list(_run_row(turn, is_unfit=True))
    row[5] = "{}"
    return [now, *literals([tuple(row)], TURN_KINDS), *literals([], KINDS[len(TURN_KINDS) :]), None]


def _run_row(turn: port.Turn, is_unfit: bool) -> tuple[Any, ...]:
    snapshot = turn.snapshot
    return (
        turn.run_id,
        turn.expected_version,
        turn.epoch,
        len(turn.events),
        str(snapshot.status),
        encode_text(snapshot) if not is_unfit else "{}",
        snapshot.status in TERMINAL,
        turn.seen_inbox_seq,
        turn.release,
        is_unfit,
    )


def _add_more(more: More, number: int, turn: port.Turn) -> None:
    received = dict(turn.received)
    first = turn.expected_version + 1
    more.add("received", number, ({"inbox_seq": seq, "run_seq": first + index} for seq, index in received.items()))
    more.add_waits(number, turn.waits_opened, turn.waits_closed)
    more.add_tasks(number, turn.tasks)
    more.add_records(number, turn.records)
