"""Dead letters as operators see them."""

from holdfast.core import codec
from holdfast.core.audit import AuditEntry
from holdfast.core.dead_letters import DeadLetter, DeadLetterQuery, Settlement
from holdfast.core.messages import Message
from holdfast.errors import InvalidInput
from holdfast.store.port import Found, Refused, Store


class Letter:
    """A dead letter that can be settled: handled once more, or dropped."""

    __slots__ = ("_audit", "_store", "record")

    def __init__(self, store: Store, record: DeadLetter, audit: AuditEntry | None = None) -> None:
        self._store = store
        self._audit = audit
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
        [answer] = await self._store.settle_dead_letters([self.record.letter_id], action, actor, self._audit)
        if isinstance(answer, Refused):
            raise answer.error


async def find_letters(store: Store, query: DeadLetterQuery) -> list[Letter]:
    """Return the letters that the query names."""
    found = await store.find_dead_letters(query)
    if not isinstance(found, Found):
        return [Letter(store, record) for record in found]
    found.log("dead letters")
    return Found((Letter(store, record) for record in found), found.cursor, found.unreadable)
