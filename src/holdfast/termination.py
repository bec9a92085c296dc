"""SIGTERM and SIGINT for a process that only runs a node. A node inside another program does not handle them."""

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

LIFE = "_HOLDFAST_LIFE"
"""The variable that `holdfast` sets for the processes it starts: a file descriptor at its end once the command ends."""


@contextmanager
def termination_signal() -> Iterator["asyncio.Future[str]"]:
    """Yield a future that gets the name of the first SIGTERM or SIGINT. A second one ends the process immediately.

    In a process that the `holdfast` command has started, the end of the command counts as the signal, and further
    signals do not: a service manager may signal both processes, and the command forwards its own signals.

    The end of the process does not wait for threads either: threads of `asyncio.to_thread` are daemons from now on.

    Immediately means even if the event loop is stuck: acknowledged work is durable, and other nodes take over the rest
    when the lease has expired. On exit the previous handlers are restored. Only a process that just runs a node uses
    this; a node inside another program does not touch the signals of the operating system.
    """
    if threading.current_thread() is not threading.main_thread():
        raise InvalidInput("only the main thread receives SIGTERM: elsewhere use `async with app.node(...)`")
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[str] = loop.create_future()
    is_asked = False
    life = os.environ.pop(LIFE, None)

    # Handlers of the interpreter and not of the loop: they are called even while a callback of the loop is blocked.
    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        if not is_asked:
            is_asked = True
            loop.call_soon_threadsafe(asked.set_result, signal.Signals(number).name)
        elif life is None:
            os._exit(128 + number)

    def end_with_command(life: int) -> None:
        os.read(life, 1)
        if is_asked:
            os._exit(128 + signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    if life is not None:  # in a thread, which runs even if the event loop is stuck
        threading.Thread(target=end_with_command, args=[int(life)], name="end with command", daemon=True).start()
    loop.set_default_executor(DaemonExecutor())
    before = {ending: signal.signal(ending, ask) for ending in ENDING}
    try:
        yield asked
    finally:
        for ending, handler in before.items():
            signal.signal(ending, handler if handler is not None else signal.SIG_DFL)
