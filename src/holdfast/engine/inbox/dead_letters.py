"""Dead letters: listing them for operators, and settling them."""

from holdfast.core import codec
from holdfast.core.audit import AuditEntry
from holdfast.core.dead_letters import DeadLetter, Settlement
from holdfast.core.messages import Message
from holdfast.errors import InvalidInput
from holdfast.store.port import Found, Refused, Store
from holdfast.store.queries import DeadLetterQuery


class DeadLetterHandle:
    """One dead letter, and the operations on it: requeue the message, or drop it."""

    __slots__ = ("_store", "record")

    def __init__(self, store: Store, record: DeadLetter) -> None:
        self._store = store
        self.record = record

    def message(self) -> Message | None:
        """Return the message, or None if it cannot be read."""
        try:
            return codec.decode(self.record.envelope, Message)
        except InvalidInput:
            return None

    async def requeue(self, *, actor: str = "") -> None:
        """Put the message back into its run's inbox, due now. Raise `InvalidInput` if the message cannot be read."""
        await settle_dead_letter(self._store, self.record.letter_id, "requeue", actor)

    async def drop(self, *, actor: str = "") -> None:
        """Record that the message will never be handled."""
        await settle_dead_letter(self._store, self.record.letter_id, "drop", actor)


async def settle_dead_letter(
    store: Store, letter_id: str, action: Settlement, actor: str = "", audit: AuditEntry | None = None
) -> None:
    """Requeue or drop one dead letter."""
    [answer] = await store.settle_dead_letters([letter_id], action, actor, audit)
    if isinstance(answer, Refused):
        raise answer.error


async def find_dead_letters(store: Store, query: DeadLetterQuery) -> list[DeadLetterHandle]:
    """Return the dead letters that match the query."""
    found = await store.find(query)
    found.log("dead letters")
    return Found((DeadLetterHandle(store, record) for record in found), found.cursor, found.unreadable)
