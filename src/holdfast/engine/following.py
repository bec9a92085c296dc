"""What has become of signals, and who waits for them."""

from collections.abc import AsyncIterator
from typing import Any, Literal

from msgspec import Struct

from holdfast.core import codec
from holdfast.core.instants import Instant
from holdfast.core.messages import RESERVED_PREFIX, Signal
from holdfast.core.records import Wait
from holdfast.core.state import TERMINAL
from holdfast.errors import NotFound
from holdfast.store import port
from holdfast.store.guards import no_such_run


class Receipt(Struct, frozen=True, kw_only=True):
    """What has become of a signal that was accepted. `consumed_at_event` is the run_seq of the event that took it."""

    status: Literal["accepted", "consumed", "expired", "dead-lettered"]
    accepted_at: Instant
    consumed_at_event: int | None = None
    reason: str | None = None


class Unconsumed(Struct, frozen=True, kw_only=True):
    """A signal that waits in a run's mailbox, and for how long it has."""

    name: str
    signal_id: str
    accepted_at: Instant
    age_ms: int
    payload: Any = None
    step_id: str | None = None


async def receipt_of(store: port.Store, run_id: str, name: str, signal_id: str) -> Receipt:
    """Return what has become of the last signal with this name and id."""
    head = await _head(store, run_id)  # before the mailbox: of a run that has ended, what is left there stays there
    last = None
    query = port.MailboxQuery(run_id=run_id, name=name, signal_id=signal_id, consumed=True)
    async for signal in _mailbox(store, query):
        last = signal
    if last is None:
        raise NotFound(f"run {run_id!r} has accepted no signal {name!r} with this signal_id", run_id=run_id)
    if last.consumed_seq is not None:
        return Receipt(status="consumed", accepted_at=last.accepted_at, consumed_at_event=last.consumed_seq)
    if head.status in TERMINAL:
        reason = f"the run was {head.status} before a wait took it"
        return Receipt(status="expired", accepted_at=last.accepted_at, reason=reason)
    return Receipt(status="accepted", accepted_at=last.accepted_at)


async def mailbox_of(store: port.Store, run_id: str) -> list[Unconsumed]:
    """Return the signals that no wait has taken, oldest first."""
    await _head(store, run_id)
    found = [signal async for signal in _mailbox(store, port.MailboxQuery(run_id=run_id))]
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
    """Go through the open waits of a run, or for a name, or all there are, ordered by run and step."""
    query = port.WaitQuery(run_id=run_id, name=name, limit=PAGE)
    while page := await store.find_waits(query):
        for wait in page:
            yield wait
        query = port.WaitQuery(run_id=run_id, name=name, limit=PAGE, after=(page[-1].run_id, page[-1].step_id))


PAGE = 1_000
"""How many rows are asked for at a time."""


async def _mailbox(store: port.Store, query: port.MailboxQuery) -> AsyncIterator[Signal]:
    while page := await store.find_mailbox(query):
        for signal in page:
            yield signal
        query = port.MailboxQuery(
            run_id=query.run_id,
            name=query.name,
            signal_id=query.signal_id,
            consumed=query.consumed,
            after=page[-1].inbox_seq,
        )


async def _head(store: port.Store, run_id: str) -> port.RunHead:
    [run] = await store.load([run_id])
    if run is None:
        raise no_such_run(run_id)
    return run.head
