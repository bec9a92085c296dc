"""The processes that a command starts: they are restarted after a crash, and end with the command."""

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from holdfast.cli.exit_codes import BAD_INPUT, CODES, FAILED, INTERRUPTED, OK
from holdfast.cli.output import note
from holdfast.termination import LIFE

EXPLAINED = frozenset({OK, FAILED, BAD_INPUT, *CODES.values(), INTERRUPTED, 143})
"""A process that exits with one of these codes has reported the reason. Any other code means a crash, caused by the
app.
"""

PAUSE_S = 0.5
CRASHES = 12
CRASHES_S = 60.0


@contextmanager
def lifeline() -> Iterator[int]:
    """Yield the reading end of a pipe that is never written to. It reaches its end when this process ends, even by
    SIGKILL.
    """
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


async def start_python(
    *arguments: str, life: int, environment: Mapping[str, str], descriptors: tuple[int, ...] = ()
) -> asyncio.subprocess.Process:
    """Start a process that ends with `life`. Ctrl-C does not reach it: this process receives and forwards it."""
    return await asyncio.create_subprocess_exec(
        *[sys.executable, *arguments],
        env={**os.environ, **environment, LIFE: str(life)},
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=(*descriptors, life),
        process_group=0,
    )


async def keep_alive(
    name: str,
    start: Callable[[], Awaitable[asyncio.subprocess.Process]],
    asked: "asyncio.Future[str]",
    *,
    patience_s: float | None,
    reload: int | None = None,
) -> int:
    """Keep a process running until `asked` is done, or until it has ended by itself and has reported the reason.

    A process that crashes, cannot be started, or exits with the code `reload`, is restarted. Return its exit code,
    which is never OK if it was not asked to end. A process that was asked to end is killed after `patience_s`; None
    waits for it.
    """
    crashes = _Crashes(name)
    while not asked.done():
        try:
            process = await start()
        except OSError as problem:  # a temporary lack of processes or memory
            note(f"{name} could not be started: {problem}")
            if crashes.is_too_often():
                return FAILED
            await asyncio.wait([asked], timeout=PAUSE_S)
            continue
        ended = asyncio.ensure_future(process.wait())
        awaited: set[asyncio.Future[Any]] = {asked, ended}
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            await _end(process, ended, patience_s)
            code = ended.result()
            if code >= 0 or code == -signal.SIGTERM:  # it had just started, and did not handle the signal yet
                return max(code, OK)
            note(f"{name} has ended {_by(code)}, while it was stopping")
            return FAILED
        code = ended.result()
        if code == reload:
            continue
        is_over = code in EXPLAINED or crashes.is_too_often()
        if not is_over:
            note(f"{name} has ended {_by(code)}, without stopping: starting it again")
        await asyncio.wait([asked], timeout=PAUSE_S)  # a service manager may have asked both processes to end
        if is_over:
            return max(code, OK if asked.done() else FAILED)
    return OK


class _Crashes:
    """Counts the recent crashes of a process. The limit is higher than the number of tries of a run that crashes it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._at: deque[float] = deque(maxlen=CRASHES)

    def is_too_often(self) -> bool:
        """Note a crash, and return whether the process has crashed too often to be restarted."""
        self._at.append(asyncio.get_running_loop().time())
        is_full = len(self._at) == CRASHES and self._at[-1] - self._at[0] < CRASHES_S
        if is_full:
            note(f"{self._name} has ended {CRASHES} times within {CRASHES_S:.0f} s: fix the cause, and start again")
        return is_full


def _by(code: int) -> str:
    if code >= 0:
        return f"with {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"


async def _end(process: asyncio.subprocess.Process, ended: "asyncio.Future[int]", patience_s: float | None) -> None:
    with suppress(ProcessLookupError):  # it has just ended by itself
        process.terminate()
    await asyncio.wait([ended], timeout=patience_s)
    if not ended.done():
        with suppress(ProcessLookupError):
            process.kill()
        await ended
