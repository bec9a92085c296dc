"""Dead letters: messages that could not be handled, for operators to settle."""

from typing import Any

import msgspec
from msgspec import Raw, Struct

from holdfast.core.dead_letters import DeadLetter, Reason, Settlement
from holdfast.errors import Conflict, NotFound, RunTerminal, StoreCorrupt
from holdfast.service.context import RequestContext
from holdfast.service.paging import Cursor, PageSize, read_page, time_of
from holdfast.service.registry import ActorName, Name, Request, operation
from holdfast.service.views import LetterView, letter_view
from holdfast.store.payloads import concealed
from holdfast.store.queries import DeadLetterQuery


class ListLetters(Request, frozen=True, kw_only=True):
    """Which dead letters to list; with `settled` also those that an operator has settled."""

    run_id: str | None = None
    reason: Reason | None = None
    settled: bool = False
    cursor: Cursor = ""
    limit: PageSize = 100


class LetterPage(Struct, frozen=True):
    """Some dead letters. `next` is the cursor of the page behind it, if there is more."""

    items: list[LetterView]
    next: str | None = None
    as_of: str | None = None
    """The time of the list, by the store's clock, if the store's lists may be outdated (S3)."""


@operation("letters.list", "GET /v1/dead-letters", scope="letters:read")
async def list_(context: RequestContext, request: ListLetters) -> LetterPage:
    """Find messages that could not be handled, the oldest first."""
    rows, following = await read_page(
        context,
        "letters",
        context.store.find,
        DeadLetterQuery(run_id=request.run_id, reason=request.reason, settled=request.settled),
        lambda letter: (letter.died_at, letter.letter_id),
        cursor=request.cursor,
        limit=request.limit,
        size_of=lambda letter: len(letter.envelope),
    )
    return LetterPage([letter_view(letter) for letter in rows], following, time_of(rows))


class OfLetter(Request, frozen=True, kw_only=True):
    """Which dead letter is meant."""

    letter_id: Name


class OpenedLetter(Struct, frozen=True):
    """A dead letter with what is in it: `message` if it can be read, else `text`, as far as it is text."""

    letter: LetterView
    message: Any = None
    text: str | None = None


async def _letter(context: RequestContext, letter_id: str) -> DeadLetter:
    found = await context.store.find(DeadLetterQuery(letter_id=letter_id, settled=True))
    if found.unreadable:
        raise StoreCorrupt(f"the row of dead letter {letter_id!r} cannot be read", letter_id=letter_id)
    if not found:
        raise NotFound(f"there is no dead letter {letter_id!r}", letter_id=letter_id)
    return found[0]


@operation("letters.get", "GET /v1/dead-letters/{letter_id}", scope="letters:read", errors=(NotFound,))
async def get(context: RequestContext, request: OfLetter) -> OpenedLetter:
    """Return a dead letter with the message in it."""
    letter = concealed(await _letter(context, request.letter_id))
    try:
        msgspec.json.decode(letter.envelope)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return OpenedLetter(letter_view(letter), text=letter.envelope.decode(errors="replace"))
    return OpenedLetter(letter_view(letter), message=Raw(letter.envelope))


async def _settle(context: RequestContext, request: "SettleLetter", action: Settlement) -> "SettledLetter":
    """Settle a dead letter, and notify the subscribers of dead letters here, because no history grows by it."""
    await _letter(context, request.letter_id)
    await context.runtime.settle_dead_letter(
        request.letter_id, action, actor=context.name(request.actor), caller=context.principal
    )
    if context.service.change_feeds.subscribers:
        await context.service.change_feeds.publish_dead_letter(await _letter(context, request.letter_id))
    return SettledLetter(request.letter_id, action)


class SettleLetter(OfLetter, frozen=True, kw_only=True):
    """Who settles which dead letter."""

    actor: ActorName = ""


class SettledLetter(Struct, frozen=True):
    """The letter is settled, by this request or by an earlier one that asked for the same."""

    letter_id: str
    settled: Settlement


@operation(
    "letters.requeue",
    "POST /v1/dead-letters/{letter_id}/requeue",
    scope="letters:write",
    errors=(NotFound, Conflict, RunTerminal),
    audit="its commit",
)
async def requeue(context: RequestContext, request: SettleLetter) -> SettledLetter:
    """Put a message back into its run's inbox, due now."""
    return await _settle(context, request, "requeue")


@operation(
    "letters.drop",
    "POST /v1/dead-letters/{letter_id}/drop",
    scope="letters:write",
    errors=(NotFound, Conflict),
    audit="its commit",
)
async def drop(context: RequestContext, request: SettleLetter) -> SettledLetter:
    """Settle a dead letter without handling its message."""
    return await _settle(context, request, "drop")
