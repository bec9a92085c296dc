"""When a process is asked to end: the signals of the operating system, which are no signals of a run.

Only a process that is nothing but a node takes them over; a node inside somebody else's program leaves them alone.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from holdfast.errors import InvalidInput

ENDING = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def asked_to_end() -> Iterator["asyncio.Future[str]"]:
    """Give a future that gets the name of the first SIGTERM or SIGINT. A second one ends the process at once.

    At once means even if the event loop is stuck: what was acknowledged is durable, and the rest is taken up elsewhere
    when the lease has ended. Afterwards the signals do what they did before.
    """
    if threading.current_thread() is not threading.main_thread():
        raise InvalidInput("only the main thread can be told of SIGTERM: elsewhere use `async with app.node(...)`")
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

    before = {ending: signal.signal(ending, ask) for ending in ENDING}
    try:
        yield asked
    finally:
        for ending, handler in before.items():
            signal.signal(ending, handler if handler is not None else signal.SIG_DFL)
