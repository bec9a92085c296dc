"""Dead letters as operators see them, and what became of a signal that was accepted."""

from typing import Literal

from msgspec import Struct

from holdfast.core import codec
from holdfast.core.idempotency import signal_uuid
from holdfast.core.letters import DeadLetter, DeadLetterQuery, Settlement, letter_id
from holdfast.core.messages import AcceptedSignalResult, Message
from holdfast.core.state import TERMINAL
from holdfast.engine.recording import head_of
from holdfast.errors import InvalidInput, NotFound
from holdfast.store.port import MailboxQuery, Refused, Store


class Letter:
    """A dead letter that can be settled: handled once more, or dropped."""

    __slots__ = ("_store", "record")

    def __init__(self, store: Store, record: DeadLetter) -> None:
        self._store = store
        self.record = record

    def message(self) -> Message | None:
        """Return the message that died, or None if nobody can read it."""
        try:
            return codec.decode(self.record.envelope, Message)
        except InvalidInput:
            return None

    async def requeue(self, *, actor: str = "") -> None:
        """Put the message back into its run's inbox, due now. What cannot be read: `InvalidInput`."""
        await self._settle("requeue", actor)

    async def drop(self, *, actor: str = "") -> None:
        """Say that nobody will ever handle it."""
        await self._settle("drop", actor)

    async def _settle(self, action: Settlement, actor: str) -> None:
        [answer] = await self._store.settle_dead_letters([self.record.letter_id], action, actor)
        if isinstance(answer, Refused):
            raise answer.error


async def find_letters(store: Store, query: DeadLetterQuery) -> list[Letter]:
    """Return the letters that the query names."""
    return [Letter(store, record) for record in await store.find_dead_letters(query)]


class Fate(Struct, frozen=True, kw_only=True):
    """What became of a signal: it waits, or was consumed by event `run_seq`, or came to nothing, and why."""

    status: Literal["accepted", "consumed", "expired", "dead-lettered"]
    run_seq: int | None = None
    reason: str = ""


async def fate_of(store: Store, receipt: AcceptedSignalResult) -> Fate:
    """Follow a receipt. A run that is gone, or never took this signal: `NotFound`."""
    run_id, id_ = receipt.workflow_id, signal_uuid(receipt.signal_storage_key)
    head = await head_of(store, run_id)
    query = MailboxQuery(run_id=run_id, name=receipt.signal_name, signal_id=receipt.signal_id, consumed=True)
    for signal in await store.find_mailbox(query):
        if signal.id == id_:
            if signal.consumed_seq is not None:
                return Fate(status="consumed", run_seq=signal.consumed_seq)
            if head.status in TERMINAL:
                return Fate(status="expired", reason=f"the run was {head.status} before anything wanted the signal")
            return Fate(status="accepted")
    for letter in await store.find_dead_letters(DeadLetterQuery(letter_id=letter_id(run_id, id_), settled=True)):
        return Fate(status="dead-lettered", reason=f"{letter.reason}: {letter.detail}")
    raise NotFound(f"run {run_id} has not taken this signal", run_id=run_id, signal_id=receipt.signal_id)
