"""Server-sent events: what goes over an event stream, piece by piece, and how a reader takes it apart."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from holdfast.core.events import Event
from holdfast.service.views import TASK_CONTENTS, event_view

HEARTBEAT = b": still here\n\n"
OPENING = b"retry: 1000\n\n"
"""Comes first, so that a reader knows at once that the stream is open: try again after a second, if it breaks."""

_encode = msgspec.json.Encoder().encode


class Frame(Struct, frozen=True, gc=False):
    """One event of a run as it goes over the wire; `is_last` if nothing follows it in the history.

    One that holds the contents of a task has the step of it, and goes as `redacted` to whom the task does not concern.
    """

    seq: int
    text: bytes
    is_last: bool = False
    task_step_id: str | None = None
    redacted: bytes = b""


def frame(data: Any, *, event: str = "", id: str = "") -> bytes:
    """Return a piece of an event stream."""
    head = (f"id: {id}\n" if id else "") + (f"event: {event}\n" if event else "")
    # JSON breaks lines only between its parts, where a space will do.
    return head.encode() + b"data: " + _encode(data).replace(b"\n", b" ").replace(b"\r", b" ") + b"\n\n"


EVENT_BYTES = 4 * 1024 * 1024
"""How large the data of an event may be to go over a stream; of larger ones it is said how large they are."""


def event_frame(event: Event, is_last: bool = False) -> Frame:
    """Return an event of a run. Its id is its number, which a reader gives back as `Last-Event-ID`."""
    id = str(event.run_seq)
    text = frame(event_view(event, (), EVENT_BYTES), id=id)
    if not isinstance(event.data, TASK_CONTENTS) or event.step_id is None:
        return Frame(event.run_seq, text, is_last)
    return Frame(
        event.run_seq, text, is_last, event.step_id, frame(event_view(event, (event.step_id,), EVENT_BYTES), id=id)
    )


class Piece(Struct, frozen=True):
    """What a reader has got: a comment has no data."""

    event: str = ""
    data: bytes = b""
    id: str = ""


class Parser:
    """Takes an event stream apart, however it is cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[Piece]:
        """Return the pieces that are whole by now."""
        *whole, self._rest = (self._rest + chunk).split(b"\n\n")
        for text in whole:
            fields = dict(line.partition(b": ")[::2] for line in text.split(b"\n"))
            yield Piece(fields.get(b"event", b"").decode(), fields.get(b"data", b""), fields.get(b"id", b"").decode())
