"""Which transports of asyncio a test has left open on its event loop.

What is left open is closed when the garbage collector comes by, with a warning, which fails whatever test runs then.
So it is looked for at the end of each test: every transport is known from its making, and none may be open once its
loop is closed. Loops that several tests share are still open at that time, and are not looked at.
"""

from __future__ import annotations

import functools
import weakref
from asyncio import base_subprocess, selector_events, unix_events
from collections.abc import Callable
from typing import Any

MADE: weakref.WeakSet[Any] = weakref.WeakSet()

# By class, what is not None or not true while a transport is open: the same that it looks at when it is collected.
IS_OPEN: dict[type[Any], Callable[[Any], bool]] = {
    vars(selector_events)["_SelectorTransport"]: lambda transport: transport._sock is not None,
    vars(unix_events)["_UnixReadPipeTransport"]: lambda transport: transport._pipe is not None,
    vars(unix_events)["_UnixWritePipeTransport"]: lambda transport: transport._pipe is not None,
    base_subprocess.BaseSubprocessTransport: lambda transport: not transport._closed,
}


def watch() -> None:
    """Know every transport that is made from now on."""
    for made in IS_OPEN:
        made.__init__ = _noted(made.__init__)


def left_open() -> list[str]:
    """Return the transports that are open though their loop is closed, each of them once."""
    ended = [transport for transport in MADE if transport._loop is None or transport._loop.is_closed()]
    for transport in ended:
        MADE.discard(transport)  # also those that are closed: nothing opens them again
    return sorted(repr(transport) for transport in ended if _is_open(transport))


def _noted(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        MADE.add(self)

    return noted


def _is_open(transport: Any) -> bool:
    return any(is_open(transport) for made, is_open in IS_OPEN.items() if isinstance(transport, made))
