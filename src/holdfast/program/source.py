"""Finds the line of a workflow's source that issued a command, for errors about code that does not match its history.

It costs next to nothing at run time: the line of a step is where the task that awaits it is suspended.
"""

import asyncio
import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import sep
from pathlib import Path
from traceback import FrameSummary, extract_tb
from types import AsyncGeneratorType, CodeType, CoroutineType, FrameType
from typing import Any

_PACKAGE = Path(__file__).parents[1]
_BOTTOM = str(_PACKAGE / "program" / "replay.py")
_NOT_THE_AUTHORS = (f"{_PACKAGE}{sep}", f"{Path(asyncio.__file__).parent}{sep}", contextlib.__file__)
_SUSPENDED = (CoroutineType, AsyncGeneratorType)


class Line:
    """A line of source, by a code object and an offset into it."""

    __slots__ = ("_code", "_offset")

    def __init__(self, frame: FrameType, offset: int | None = None) -> None:
        self._code: CodeType = frame.f_code
        self._offset = frame.f_lasti if offset is None else offset

    def __str__(self) -> str:
        spans = ((start, end, line) for start, end, line in self._code.co_lines() if line is not None)
        found = (line for start, end, line in spans if start <= self._offset < end)
        return f"{self._code.co_filename}:{next(found, self._code.co_firstlineno)}"


def calling_line() -> Line | str | None:
    """Return the author's line that is running, or the one that created the task; only while a history is replayed."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != _BOTTOM:
        if _is_the_authors(frame.f_code.co_filename):
            return Line(frame)
        frame = frame.f_back
    return _origin(asyncio.current_task())


def awaiting_line(future: asyncio.Future[Any]) -> Line | str | None:
    """Return the author's line in which a future is awaited, or the one that created the task that awaits it."""
    for callback, _ in getattr(future, "_callbacks", None) or ():
        task = getattr(callback, "__self__", None)
        if isinstance(task, asyncio.Task):
            return waiting_line(task) or _origin(task)
    return None


def waiting_line(task: asyncio.Task[Any] | None) -> Line | None:
    """Return the author's innermost line in which a task is waiting, or None if it has ended."""
    line = None
    awaited: Any = task.get_coro() if task is not None else None
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
        if frame is not None and _is_the_authors(frame.f_code.co_filename):
            line = Line(frame)
        awaited = _awaited_by(awaited)
    return line


def _awaited_by(awaitable: Any) -> Any:
    if isinstance(awaitable, CoroutineType):
        return awaitable.cr_await
    if isinstance(awaitable, AsyncGeneratorType):
        return awaitable.ag_await
    # `async for` awaits a wrapper without a reference to its generator; the garbage collector knows it.
    return next((inner for inner in gc.get_referents(awaitable) if isinstance(inner, _SUSPENDED)), None)


def raising_line(problem: BaseException) -> Line | None:
    """Return the author's innermost line in an exception's traceback; for a group, that of its first member.

    A line of an installed library counts only if there is no other.
    """
    found = list(_raising_frames(problem))
    own = (frame for frame in found if not _is_installed(frame[0].f_code.co_filename))
    innermost = next(own, found[0] if found else None)
    return None if innermost is None else Line(*innermost)


def _raising_frames(problem: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the author's frames and their offsets, the innermost first; of a group, first those of its first member."""
    if isinstance(problem, BaseExceptionGroup):
        yield from _raising_frames(problem.exceptions[0])
    frames, trace = [], problem.__traceback__
    while trace is not None:
        if _is_the_authors(trace.tb_frame.f_code.co_filename):
            frames.append((trace.tb_frame, trace.tb_lasti))
        trace = trace.tb_next
    yield from reversed(frames)


def authors_frames(problem: BaseException) -> list[FrameSummary]:
    """Return the author's frames of an exception's traceback."""
    return [frame for frame in extract_tb(problem.__traceback__) if _is_the_authors(frame.filename)]


def first_line(function: Callable[..., Any]) -> str:
    """Return the line in which a function begins."""
    code: CodeType = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


@contextmanager
def origins() -> Iterator[None]:
    """Let coroutines keep the line that created them: gathered ones have no other line of the author."""
    before = sys.get_coroutine_origin_tracking_depth()
    sys.set_coroutine_origin_tracking_depth(max(2, before))  # the call of an activity adds one frame of ours
    try:
        yield
    finally:
        sys.set_coroutine_origin_tracking_depth(before)


def _origin(task: asyncio.Task[Any] | None) -> str | None:
    made_in = getattr(task.get_coro(), "cr_origin", None) if task is not None else None
    return next((f"{file}:{line}" for file, line, _ in made_in or () if _is_the_authors(file)), None)


def _is_the_authors(file: str) -> bool:
    return not file.startswith(_NOT_THE_AUTHORS)


def _is_installed(file: str) -> bool:
    """Return whether a file belongs to an installed package, which may also be the author's."""
    return f"{sep}site-packages{sep}" in file or f"{sep}dist-packages{sep}" in file
