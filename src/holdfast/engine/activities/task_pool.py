"""A pool of tasks that execute activities one after the other, as long as none of them has to wait.

A task executes the next activity when it has finished the previous one. An activity that waits keeps its task, and the
activities behind it get other tasks: a few at first, then twice as many each time that all of them are busy.

This is a special path, and `TaskPool.add` is its only entry. A task for each activity would cost a run of three steps 5
% more instructions; `python -m bench --only paths` measures it again.

Activities do not notice each other. If an activity has changed its task (it has set a context variable, or ignored a
cancellation of the task), that task ends, and the next activity gets a new one.
"""

import asyncio
from asyncio.tasks import _unregister_task
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any, Generic, Protocol, TypeVar

FEW = 4
"""How many tasks there are at first. This many activities run concurrently, even if each waits only for a moment."""

IN_A_ROW = 100
"""How many activities one task executes before it yields to the loop."""


class PooledWork(Protocol):
    """Work for a task of the pool. `task` is set from the start of the work until it is over."""

    is_given_up: bool
    task: "asyncio.Task[None] | None"

    @property
    def name(self) -> str:
        """The name of the task meanwhile."""
        ...


P = TypeVar("P", bound=PooledWork)


class TaskPool(Generic[P]):
    """Executes what is added. Each item starts as soon as those before it have started."""

    def __init__(self, carry_out: Callable[[P], Coroutine[Any, Any, None]]) -> None:
        self._carry_out = carry_out
        self._waiting: deque[P] = deque()
        self._context = copy_context()
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds only weak references to tasks that wait
        self._opened = 0  # tasks since the last look; while work waits there are some, and another look follows

    def add(self, work: P) -> None:
        """Execute this soon. None of it runs before the caller yields to the loop."""
        self._waiting.append(work)
        if self._opened < FEW:
            self._open(1)

    async def end(self, timeout_s: float) -> int:
        """Wait up to this time for cancelled activities; return how many have ignored their cancellation.

        Those are abandoned, like threads: the loop does not wait for them when it ends.
        """
        tasks = [task for task in self._tasks if not task.done()]
        if not tasks:
            return 0
        _, stubborn = await asyncio.wait(tasks, timeout=timeout_s)
        for task in stubborn:
            _unregister_task(task)
        return len(stubborn)

    def _open(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(number):
            task = loop.create_task(self._work_on(), context=self._context.copy())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if not self._opened:
            loop.call_soon(self._look, context=self._context.copy())
        self._opened += number

    def _look(self) -> None:
        """Open more tasks if all existing ones are busy."""
        opened, self._opened = self._opened, 0
        if self._waiting:
            self._open(min(2 * opened, len(self._waiting)))

    async def _work_on(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        before = copy_context()
        for _ in range(IN_A_ROW):
            if not self._waiting:
                return
            work = self._waiting.popleft()
            if work.is_given_up:
                continue
            work.task = task
            task.set_name(work.name)
            try:
                await self._carry_out(work)
            finally:
                work.task = None
            if task.cancelling() or copy_context() != before:
                return
