"""SIGTERM and SIGINT for a process that is nothing but a node. A node inside another program leaves them alone."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from holdfast.engine.activities.slots import DaemonExecutor
from holdfast.errors import InvalidInput

ENDING = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def termination_signal() -> Iterator["asyncio.Future[str]"]:
    """Yield a future that gets the name of the first SIGTERM or SIGINT. A second one ends the process at once.

    Nor does the end of the process wait for threads: those that `asyncio.to_thread` makes are daemons from now on.

    At once means even if the event loop is stuck: what was acknowledged is durable, and other nodes take over the rest
    when the lease has expired. Afterwards the former handlers are back. Only a process that is nothing but a node uses
    this; a node inside another program leaves the signals of the operating system alone.
    """
    if threading.current_thread() is not threading.main_thread():
        raise InvalidInput("only the main thread receives SIGTERM: elsewhere use `async with app.node(...)`")
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[str] = loop.create_future()
    is_asked = False

    # Handlers of the interpreter and not of the loop: they are called while a callback of the loop does not return.
    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        if is_asked:
            os._exit(128 + number)
        is_asked = True
        loop.call_soon_threadsafe(asked.set_result, signal.Signals(number).name)

    loop.set_default_executor(DaemonExecutor())
    before = {ending: signal.signal(ending, ask) for ending in ENDING}
    try:
        yield asked
    finally:
        for ending, handler in before.items():
            signal.signal(ending, handler if handler is not None else signal.SIG_DFL)
