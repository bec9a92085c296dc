"""Pages of long lists: in a fixed order, each starting after an opaque cursor."""

import asyncio
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from holdfast.core.codec import format_instant
from holdfast.errors import InvalidInput
from holdfast.service.context import RequestContext
from holdfast.store import port

Row = TypeVar("Row")
Query = TypeVar("Query", bound=Struct)

PageSize = Annotated[int, Meta(ge=1, le=500, description="The most items to answer with.")]
Cursor = Annotated[str, Meta(max_length=2_000, description="What the page before gave as `next`; empty for the first.")]

Found = tuple[port.Found[Row], str | None]

LOOK_ROWS = 2_000
"""How many rows one search for text examines at a time, so that other searches get their turn."""


def encode_cursor(kind: str, place: Any) -> str:
    """Encode a position in the list of this kind as a cursor for the caller."""
    return urlsafe_b64encode(msgspec.json.encode([kind, place])).decode().rstrip("=")


def decode_cursor(kind: str, cursor: str, place_type: Any) -> Any:
    """Return the position in a cursor; refuse a cursor that was not issued for this kind of list."""
    try:
        padded = cursor.encode() + b"=" * (-len(cursor) % 4)
        found, place = msgspec.json.decode(urlsafe_b64decode(padded), type=tuple[str, place_type])
    except (ValueError, msgspec.MsgspecError) as problem:
        raise InvalidInput("cursor: it was not issued by this service", field="cursor") from problem
    if found != kind:
        raise InvalidInput("cursor: it belongs to another list", field="cursor")
    return place


def time_of(rows: port.Found[Any]) -> str | None:
    """Return the time of a list's rows, or None if they are current."""
    return None if rows.as_of is None else format_instant(rows.as_of)


async def read_page(
    context: RequestContext,
    kind: str,
    find: Callable[[Query], Awaitable[list[Row]]],
    query: Query,
    place_of: Callable[[Row], Any],
    *,
    cursor: str,
    limit: int,
    place: str = "after",
    size_of: Callable[[Row], int] = lambda row: 0,
) -> Found[Row]:
    """Return a page of the query's results, and the cursor of the next page if there may be more.

    A page ends early if its rows are large enough together, and a text search ends early if it has examined enough:
    then it has a cursor and may have no rows. A store may return fewer rows than requested, so only an empty result
    without a cursor means that there are no more. `place` is the field of the query that holds a row's position.
    """
    behind = getattr(query, place)
    behind = decode_cursor(kind, cursor, get_type_hints(type(query))[place]) if cursor else behind
    most, bounds = context.page_bytes, query.__struct_fields__
    if "most_bytes" in bounds:
        query = replace(query, most_bytes=most)
    search = _Search(context) if getattr(query, "text", None) is not None or getattr(query, "where", None) else None
    if search is not None:
        query = replace(query, look=min(LOOK_ROWS, search.rows_left))
    rows: port.Found[Row] = port.Found()
    size = 0
    while len(rows) <= limit:
        more = await find(replace(query, **{place: behind}, limit=limit + 1 - len(rows)))
        looked_to = getattr(more, "cursor", None)
        rows += more
        rows.as_of = rows.as_of or getattr(more, "as_of", None)
        if isinstance(more, port.Found) and more.unreadable:
            rows.unreadable += more.unreadable
            more.log(kind)
        size += sum(map(size_of, more))
        if looked_to is None and not more:
            return rows, None
        behind = place_of(more[-1]) if looked_to is None else looked_to
        is_enough = size >= most or (search is not None and search.is_enough())
        if is_enough and len(rows) <= limit:
            return rows, encode_cursor(kind, behind)
    page = port.Found(rows[:limit], None, rows.unreadable, rows.as_of)
    return page, encode_cursor(kind, place_of(rows[limit - 1]))


async def read_ordered(
    context: RequestContext, query: port.RunQuery, order_by: str, *, cursor: str, limit: int
) -> Found[port.RunHead]:
    """Return a page of runs in an order, and the cursor of the next one, which the store's results contain."""
    kind = f"runs by {order_by}"
    behind = decode_cursor(kind, cursor, tuple[str | float, int, str]) if cursor else None
    search = _Search(context)
    rows: port.Found[port.RunHead] = port.Found()
    while len(rows) < limit:
        asked = replace(query, behind=behind, limit=limit - len(rows), most_bytes=context.page_bytes)
        more = await context.store.find(asked)
        rows += more
        rows.as_of = rows.as_of or more.as_of
        rows.unreadable += more.unreadable
        more.log(kind)
        behind = more.cursor
        if behind is None:
            return rows, None
        if search.is_enough():
            break
    return rows, encode_cursor(kind, behind)


class _Search:
    """How much one request has examined."""

    def __init__(self, context: RequestContext) -> None:
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + context.service.options.search_s
        self.rows_left = context.service.options.search_rows

    def is_enough(self) -> bool:
        self.rows_left -= LOOK_ROWS
        return self.rows_left <= 0 or self._loop.time() >= self._until
