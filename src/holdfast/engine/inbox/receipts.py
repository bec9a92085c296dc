"""Receipts of signals, mailboxes, and open waits."""

from collections.abc import AsyncIterator
from typing import Any, Literal

from msgspec import Struct

from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.dead_letters import letter_id, unreadable_payload
from holdfast.core.index_rows import Wait
from holdfast.core.instants import Instant
from holdfast.core.keys import RESERVED_PREFIX, signal_uuid
from holdfast.core.messages import Signal
from holdfast.core.state import TERMINAL
from holdfast.engine.history import find_event, head_of
from holdfast.errors import NotFound
from holdfast.store import port
from holdfast.store.decisions import no_such_run
from holdfast.store.payloads import concealed
from holdfast.store.queries import DeadLetterQuery, pages


class Receipt(Struct, frozen=True, kw_only=True):
    """What happened to an accepted signal. `consumed_at_event` is the run_seq of the event that consumed it.

    A signal that could not be read became a dead letter; its `accepted_at` is no longer known.
    """

    status: Literal["accepted", "consumed", "expired", "dead-lettered"]
    accepted_at: Instant | None = None
    consumed_at_event: int | None = None
    reason: str | None = None


class Unconsumed(Struct, frozen=True, kw_only=True):
    """A signal in a run's mailbox, and how long it has waited there."""

    name: str
    signal_id: str
    accepted_at: Instant
    age_ms: int
    payload: Any = None
    step_id: str | None = None


async def receipt_of(
    store: port.Store, run_id: str, name: str, signal_id: str, storage_key: str | None = None
) -> Receipt:
    """Return the receipt of a signal: the one with this storage key, otherwise the last with this name and id."""
    head = await head_of(store, run_id)  # before the mailbox, which no longer changes once the run has ended
    wanted = None if storage_key is None else signal_uuid(storage_key)
    found = None
    query = port.MailboxQuery(run_id=run_id, name=name, signal_id=signal_id, consumed=True)
    async for signal in _mailbox(store, query):
        if wanted is None or signal.id == wanted:
            found = signal
    if found is None:
        return await _dead(store, run_id, name, signal_id, wanted)
    if found.consumed_seq is not None:
        return await _consumed(store, found, found.consumed_seq, is_finished=head.status in TERMINAL)
    if head.status in TERMINAL:
        reason = f"the run was {head.status} before a wait took it"
        return Receipt(status="expired", accepted_at=found.accepted_at, reason=reason)
    return Receipt(status="accepted", accepted_at=found.accepted_at)


async def _consumed(store: port.Store, signal: Signal, run_seq: int, *, is_finished: bool) -> Receipt:
    """Return the receipt of a signal that a turn has taken, for a wait or because it matched none."""
    events = await store.read_events(signal.run_id, after=run_seq - 1, limit=1)
    body = events[0].data if events else None
    if not isinstance(body, e.SignalDeadLettered):
        return Receipt(status="consumed", accepted_at=signal.accepted_at, consumed_at_event=run_seq)
    query = DeadLetterQuery(letter_id=letter_id(signal.run_id, signal.id), settled=True)
    letters = await store.find(query)
    if letters and letters[0].settled == "requeue":
        received, _ = await find_event(store, signal.run_id, run_seq, lambda event: _is_receipt(event, signal))
        if received is not None:
            return Receipt(status="consumed", accepted_at=signal.accepted_at, consumed_at_event=received.run_seq)
        return Receipt(status="expired" if is_finished else "accepted", accepted_at=signal.accepted_at)
    reason = f"{letters[0].reason}: {letters[0].detail}" if letters else f"payload does not fit: {body.reason}"
    return Receipt(status="dead-lettered", accepted_at=signal.accepted_at, reason=reason)


def _is_receipt(event: e.Event, signal: Signal) -> bool:
    return isinstance(event.data, e.SignalReceived) and event.caused_by_signal_id == signal.id


async def _dead(store: port.Store, run_id: str, name: str, signal_id: str, id_: str | None) -> Receipt:
    """Return the receipt of a signal that is not in the mailbox: it could not be read, or was never accepted."""
    query = DeadLetterQuery(run_id=run_id, reason="undecodable", settled=True)
    if id_ is not None:
        query = DeadLetterQuery(letter_id=letter_id(run_id, id_), settled=True)
    detail = unreadable_payload(name, signal_id)
    async for page in pages(store.find, query, lambda letter: (letter.died_at, letter.letter_id)):
        for letter in page:
            if id_ is not None or letter.detail == detail:
                return Receipt(status="dead-lettered", reason=f"{letter.reason}: {letter.detail}")
    raise NotFound(f"run {run_id!r} has accepted no signal {name!r} with this signal_id", run_id=run_id)


async def mailbox_of(store: port.Store, run_id: str) -> list[Unconsumed]:
    """Return the signals that no wait has taken, oldest first."""
    heads = await store.find(port.RunQuery(run_ids=(run_id,), limit=1))
    if not heads and not heads.unreadable:  # a damaged mailbox can keep a run from being loaded
        raise no_such_run(run_id)
    found = [concealed(signal) async for signal in _mailbox(store, port.MailboxQuery(run_id=run_id))]
    now = await store.now()
    return [
        Unconsumed(
            name=signal.name,
            signal_id=signal.signal_id,
            accepted_at=signal.accepted_at,
            age_ms=max(0, now - signal.accepted_at) // 1_000,
            payload=codec.decode(signal.payload, Any),
            step_id=signal.step_id,
        )
        for signal in found
        if not signal.name.startswith(RESERVED_PREFIX)
    ]


async def open_waits(store: port.Store, run_id: str | None, name: str | None) -> AsyncIterator[Wait]:
    """Iterate over the open waits of a run or of all, with a name or any, ordered by run and step."""
    query = port.WaitQuery(run_id=run_id, name=name, limit=PAGE)
    async for page in pages(store.find, query, lambda wait: (wait.run_id, wait.step_id)):
        page.log("waits")
        for wait in page:
            yield wait


PAGE = 1_000
"""How many rows are read at a time."""


async def _mailbox(store: port.Store, query: port.MailboxQuery) -> AsyncIterator[Signal]:
    async for page in pages(store.find, query, lambda signal: signal.inbox_seq):
        page.log("signals")
        for signal in page:
            yield signal
