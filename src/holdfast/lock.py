"""Locks between runs: one run at a time holds a key, and the others wait in a queue.

A lock is built from existing parts. A run that enters starts a child, which is a run of the lock's own workflow, and
waits for the signal that the child has started. The limit of that workflow admits one run for each key, in order, on
any node, in every store. The child ends when it gets a signal, or with its parent, however the parent ends. There is no
table of locks and no polling, and operators see holders and waiters among the runs: as running and as pending.
"""

import asyncio
from contextvars import ContextVar, Token
from datetime import timedelta
from typing import Any, NoReturn, Self

from holdfast.core.keys import check_name, check_tag
from holdfast.errors import InvalidInput, WorkflowFailed
from holdfast.program.api import run_info
from holdfast.program.coroutine import require_program
from holdfast.program.signals import granted, send_granted, wait_granted, wait_signal
from holdfast.workflow import ChildRun, Workflow

_held: ContextVar[frozenset[tuple[str, str]]] = ContextVar("held locks", default=frozenset())
"""The locks that the current task holds or waits for, including those of the tasks that created it."""


async def hold(place: str, key: str, granted_to: str) -> None:
    """Hold a lock: the workflow of every lock. It runs once it is admitted."""
    parent = run_info().parent_run_id
    if parent is None:
        raise WorkflowFailed("a lock is held for the run that has asked for it: enter it inside a workflow")
    send_granted(require_program("lock"), parent, granted_to)
    await wait_signal("release")


def limit_key(place: str, key: str, granted_to: str) -> str:
    """Return the key by which runs of a lock are counted."""
    return f"{place}|{key}"


class Lock:
    """A lock between runs, by key: `async with accounts("17"): …` inside a workflow. See `App.lock`."""

    def __init__(self, name: str, workflow: Workflow[[str, str, str], None]) -> None:
        self.name = name
        self._workflow = workflow

    def __call__(self, key: str = "", *, timeout: timedelta | float | None = None) -> "LockEntry":
        """Return a context that holds the lock of this key. Enter it once; after `timeout` it raises `TimeoutError`."""
        problem = check_name("key", key) if key != "" else None
        if problem is not None:
            raise problem
        return LockEntry(self.name, key, timeout, self._workflow)

    async def __aenter__(self) -> NoReturn:
        raise InvalidInput(f"lock {self.name!r} is entered by a call: `async with lock(key):`, or `lock()` for all")

    async def __aexit__(self, *_: object) -> None: ...


class LockEntry:
    """One acquisition of a lock by a run: waiting, then holding."""

    def __init__(
        self, name: str, key: str, timeout: timedelta | float | None, workflow: Workflow[[str, str, str], None]
    ) -> None:
        self._lock = (name, key)
        self._timeout = timeout
        self._workflow = workflow
        self._child: ChildRun[None] | None = None
        self._before: Token[frozenset[tuple[str, str]]] | None = None

    async def __aenter__(self) -> Self:
        program = require_program("a lock")
        if self._child is not None:
            raise InvalidInput("a lock is entered once: call it again for the next time")
        name, key = self._lock
        if self._lock in _held.get():
            raise InvalidInput(f"lock {name!r} of key {key!r} is held by this task already: it would wait for itself")
        about = run_info()
        place = "|".join((about.tenant, about.project, about.environment))
        workflow = self._workflow.definition.name
        step_id = program.name_step(granted(workflow))
        tags = (key,) if check_tag(key) is None else ()  # it may be empty, and some tags are reserved for the engine
        called = self._workflow.options(close_policy="cancel", tags=tags)
        self._child = called.child(place, key, step_id)
        entry = asyncio.ensure_future(wait_granted(program, step_id, workflow, self._timeout))
        ended: Any = self._child._waiting
        try:
            await asyncio.wait({entry, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not entry.done():
                await ended
                raise WorkflowFailed(f"lock {name!r} of key {key!r} was not given: its run has ended")
            if not await entry:
                self._child.cancel("an operator lets its parent in without the lock")
        except BaseException as problem:
            entry.cancel()
            if not ended.done():
                self._child.cancel(f"not waited for any more: {type(problem).__name__}")
            if isinstance(problem, TimeoutError):
                raise TimeoutError(f"lock {name!r} of key {key!r} was not free in time") from None
            raise
        self._before = _held.set(_held.get() | {self._lock})
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._child is not None
        if self._before is not None:
            _held.reset(self._before)
        if not self._child.done():
            await self._child.signal("release")
