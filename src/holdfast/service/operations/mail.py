"""The mailboxes of all runs together: signals that no wait has taken."""

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.messages import Signal
from holdfast.core.names import RESERVED_PREFIX
from holdfast.core.state import RunStatus
from holdfast.service.auth.tenancy import heads_of
from holdfast.service.context import RequestContext
from holdfast.service.operations.signals import MailView, mail_view
from holdfast.service.paging import Cursor, PageSize, read_page
from holdfast.service.registry import Request, operation
from holdfast.store.port import MailboxQuery


class ListUnconsumed(Request, frozen=True, kw_only=True):
    """Which signals to list; with `finished` also those of runs that have finished, which no wait will ever take."""

    name: str | None = None
    finished: bool = False
    cursor: Cursor = ""
    limit: PageSize = 100


class UnconsumedView(MailView, frozen=True, kw_only=True):
    """A signal that no wait has taken, and the run in whose mailbox it is."""

    run_id: str
    workflow: str
    run_status: RunStatus
    reference_key: str | None = None


class UnconsumedPage(Struct, frozen=True):
    """Some signals that no wait has taken. `next` is the cursor of the page behind it, if there is more."""

    items: list[UnconsumedView]
    next: str | None = None


class _Place(Struct, frozen=True):
    """The query with its place in one field, as pages have it."""

    query: MailboxQuery
    limit: int = 1
    after: tuple[str, int] = ("", 0)


@operation("signals.unconsumed", "GET /v1/signals", scope="signals:read")
async def unconsumed(context: RequestContext, request: ListUnconsumed) -> UnconsumedPage:
    """Find the signals that no wait has taken, of all runs, in the order of the runs' creation."""

    async def find(place: _Place) -> list[Signal]:
        run_id, inbox_seq = place.after
        query = replace(
            place.query, after_run=run_id, after=inbox_seq, limit=place.limit, most_bytes=context.page_bytes
        )
        return await context.store.find(query)

    rows, following = await read_page(
        context,
        "unconsumed signals",
        find,
        _Place(MailboxQuery(name=request.name, unfinished=not request.finished)),
        lambda signal: (signal.run_id, signal.inbox_seq),
        cursor=request.cursor,
        limit=request.limit,
        size_of=lambda signal: len(signal.payload),
    )
    heads = await heads_of(context.store, (signal.run_id for signal in rows))
    now = await context.store.now()
    items = [
        mail_view(
            UnconsumedView,
            signal,
            now,
            context.item_bytes,
            run_id=signal.run_id,
            workflow=heads[signal.run_id].plan_id,
            run_status=heads[signal.run_id].status,
            reference_key=heads[signal.run_id].reference_key,
        )
        for signal in rows
        if signal.run_id in heads and not signal.name.startswith(RESERVED_PREFIX)
    ]
    return UnconsumedPage(items, following)
