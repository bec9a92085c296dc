"""Dead letters: written with a turn or for an unreadable row, searched, and settled."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from holdfast.core.audit import AuditEntry, letter_entry, run_entry
from holdfast.core.codec import encode_text
from holdfast.core.dead_letters import DeadLetter, Settled, Settlement, letter_id, unreadable_payload
from holdfast.core.instants import Instant
from holdfast.core.keys import inbox_uuid
from holdfast.core.messages import Message
from holdfast.core.state import RunStatus
from holdfast.errors import CallerError, StoreCorrupt
from holdfast.store import decisions, port, sql
from holdfast.store.postgres import audit
from holdfast.store.postgres.columns import More, askable
from holdfast.store.postgres.pool import Db, Transaction
from holdfast.store.postgres.queries import most_rows, read_page
from holdfast.store.queries import DeadLetterQuery
from holdfast.store.sql import LETTER, letter_of


async def find(db: Db, query: DeadLetterQuery, limit: int) -> port.Found[DeadLetter]:
    """Return the dead letters that match the query."""
    where = sql.letter_conditions(query, "holdfast.runs")
    letters, order = "holdfast.dead_letters JOIN holdfast.runs USING (run_no)", "died_at, letter_id"
    limit = await most_rows(db, f"octet_length(envelope) FROM {letters}", where, order, limit, query.most_bytes)
    found = await read_page(db, f"SELECT {LETTER} FROM {letters}", where, order, limit)
    return sql.found_of(found, letter_of, itemgetter(0), itemgetter(6, 0))


async def settle(
    transaction: Transaction,
    ids: Sequence[str],
    action: Settlement,
    actor: str,
    now: Instant | None,
    entry: AuditEntry | None = None,
) -> list[Settled | port.Refused]:
    """Settle each letter, or return why it cannot be settled."""
    await transaction.fetch(
        "SELECT 1 FROM holdfast.runs WHERE run_no IN (SELECT run_no FROM holdfast.dead_letters "
        "WHERE letter_id = ANY ($1)) ORDER BY run_id FOR UPDATE",
        list(map(askable, ids)),
    )
    [[settled_at]] = await transaction.fetch("SELECT holdfast.time_1($1)", now)
    return [await _settle(transaction, id_, action, actor, settled_at, entry) for id_ in ids]


async def _settle(
    transaction: Transaction, id_: str, action: Settlement, actor: str, now: Instant, entry: AuditEntry | None
) -> Settled | port.Refused:
    found = await transaction.fetch(
        f"SELECT {LETTER}, run_no, status, tenant, project, environment "
        "FROM holdfast.dead_letters JOIN holdfast.runs USING (run_no) WHERE letter_id = $1",
        askable(id_),
    )
    if not found:
        return port.Refused(decisions.no_such_letter(id_))
    try:
        letter, run_no, status = letter_of(tuple(found[0])[:10]), found[0][10], found[0][11]
    except StoreCorrupt:
        return port.Refused(decisions.unreadable_letter(id_))
    if letter.settled == action:
        return Settled(id_, action)
    message = decisions.settled_message(letter, action, RunStatus(status))
    if isinstance(message, CallerError):
        return port.Refused(message)
    if message is not None:
        await _requeue(transaction, run_no, message, now)
    await transaction.fetch(
        "UPDATE holdfast.dead_letters SET settled = $2, settled_by = $3, settled_at = $4 WHERE letter_id = $1",
        id_,
        action,
        actor.encode(),
        now,
    )
    if entry is not None:
        place = (found[0][12], found[0][13], found[0][14])
        await audit.append(transaction, [run_entry(letter_entry(entry, id_), letter.run_id, place, now)])
    return Settled(id_, action)


async def _requeue(transaction: Transaction, run_no: int, message: Message, now: Instant) -> None:
    """Put a message back, due now, unless there is another one with its id by now."""
    await transaction.fetch(
        "INSERT INTO holdfast.messages (run_no, signal_id, due_at, message) VALUES ($1, $2, $3, $4) "
        "ON CONFLICT DO NOTHING",
        run_no,
        message.signal_id,
        now,
        encode_text(message),
    )
    await transaction.fetch("UPDATE holdfast.runs SET ready_at = least(ready_at, $2) WHERE run_no = $1", run_no, now)
    await transaction.fetch("SELECT holdfast.enter_1(ARRAY[$1::bigint], $2)", run_no, now)


async def unreadable_to_dead_letters(transaction: Transaction, run_no: int, node: str, now: Instant) -> None:
    """Turn unreadable messages and signals of a run into dead letters, with the text that is stored."""
    [[run_id]] = await transaction.fetch("SELECT run_id FROM holdfast.runs WHERE run_no = $1", run_no)
    more = More()
    messages = await transaction.fetch("SELECT signal_id, message FROM holdfast.messages WHERE run_no = $1", run_no)
    for signal_id, text in messages:
        if not _can_be_read(sql.message_of, text):
            id_ = letter_id(run_id, signal_id, now)
            more.add_dead(1, [_unreadable(id_, run_id, text, f"message {signal_id!r} cannot be read", node, now)])
            await transaction.fetch(
                "DELETE FROM holdfast.messages WHERE run_no = $1 AND signal_id = $2", run_no, signal_id
            )
    signals = await transaction.fetch(
        "SELECT inbox_seq, name, signal_id, payload FROM holdfast.signals WHERE run_no = $1 AND consumed_seq IS NULL",
        run_no,
    )
    for inbox_seq, name, signal_id, text in signals:
        if not _can_be_read(sql.payload_of, text):
            id_ = letter_id(run_id, inbox_uuid(run_id, inbox_seq))
            more.add_dead(1, [_unreadable(id_, run_id, text, unreadable_payload(name, signal_id), node, now)])
            await transaction.fetch(
                "DELETE FROM holdfast.signals WHERE run_no = $1 AND inbox_seq = $2", run_no, inbox_seq
            )
    if more.text() is not None:
        await transaction.fetch("SELECT holdfast.commit_more_1($1, ARRAY[$2::bigint], $3)", more.text(), run_no, now)


def _can_be_read(read: Any, text: str) -> bool:
    try:
        read(text)
        return True
    except StoreCorrupt:
        return False


def _unreadable(id_: str, run_id: str, found: str, detail: str, node: str, now: Instant) -> DeadLetter:
    return DeadLetter(
        letter_id=id_,
        run_id=run_id,
        envelope=found.encode(),
        reason="undecodable",
        detail=detail,
        node=node,
        died_at=now,
    )
