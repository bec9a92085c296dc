"""Long lists, a page at a time: in a fixed order, from behind an opaque place in it."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from holdfast.errors import InvalidInput

Row = TypeVar("Row")
Query = TypeVar("Query", bound=Struct)

PageSize = Annotated[int, Meta(ge=1, le=500, description="The most items to answer with.")]
Cursor = Annotated[str, Meta(max_length=2_000, description="What the page before gave as `next`; empty for the first.")]

Found = tuple[list[Row], str | None]


def encode_cursor(kind: str, place: Any) -> str:
    """Return a place in the list of this kind, for the caller to give back."""
    return urlsafe_b64encode(msgspec.json.encode([kind, place])).decode().rstrip("=")


def decode_cursor(kind: str, cursor: str, place_type: Any) -> Any:
    """Return the place that a cursor stands for; refuse one that was not given out for this kind of list."""
    try:
        padded = cursor.encode() + b"=" * (-len(cursor) % 4)
        found, place = msgspec.json.decode(urlsafe_b64decode(padded), type=tuple[str, place_type])
    except (ValueError, msgspec.MsgspecError) as problem:
        raise InvalidInput("cursor: this was not given out by this service", field="cursor") from problem
    if found != kind:
        raise InvalidInput("cursor: this was given out for another list", field="cursor")
    return place


async def read_page(
    kind: str,
    find: Callable[[Query], Awaitable[list[Row]]],
    query: Query,
    place_of: Callable[[Row], Any],
    *,
    cursor: str,
    limit: int,
    place: str = "after",
) -> Found[Row]:
    """Return a page of what the query finds, and the cursor of the next one if there is more.

    A store may answer with less than it was asked for, so only an empty answer says that there is no more. `place` is
    the field of the query that holds a row's place.
    """
    first = getattr(query, place)
    first = decode_cursor(kind, cursor, get_type_hints(type(query))[place]) if cursor else first
    rows: list[Row] = []
    while len(rows) <= limit:
        behind = {place: place_of(rows[-1]) if rows else first}
        more = await find(replace(query, **behind, limit=limit + 1 - len(rows)))
        if not more:
            break
        rows += more
    return rows[:limit], encode_cursor(kind, place_of(rows[limit - 1])) if len(rows) > limit else None
