"""Lanes: tasks in which activities are carried out one after the other, for as long as none of them has to wait.

A task of its own for each would cost more than all the rest of a short activity. So a task takes the next one when it
is done with the one before. An activity that waits for something keeps its lane, and those behind it get others: a
few at first, then twice as many each time that all of them are taken.

No activity notices another: a lane that is not as it was (somebody has set a context variable, or cancelled the task
without heeding it) is left, and the next one begins in a new task.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any, Generic, Protocol, TypeVar

FEW = 4
"""How many lanes there are at first: so many activities go on side by side, even if each waits only for a moment."""

IN_A_ROW = 100
"""How many are carried out in one lane before others that want the loop have their turn."""


class Passenger(Protocol):
    """What is carried out in a lane. `lane` says in which, from when it begins until it is over."""

    is_given_up: bool
    lane: "asyncio.Task[None] | None"

    @property
    def name(self) -> str:
        """What the task is called meanwhile."""
        ...


P = TypeVar("P", bound=Passenger)


class Lanes(Generic[P]):
    """Carries out what is added, each as soon as those before it have begun."""

    def __init__(self, carry_out: Callable[[P], Coroutine[Any, Any, None]]) -> None:
        self._carry_out = carry_out
        self._waiting: deque[P] = deque()
        self._context = copy_context()
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself would let go of those that wait
        self._opened = 0  # lanes since the last look; while anybody waits there are some, and another look comes

    def add(self, passenger: P) -> None:
        """Carry this out soon. Nothing of it runs before the caller gives way to the loop."""
        self._waiting.append(passenger)
        if self._opened < FEW:
            self._open(1)

    def _open(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(number):
            lane = loop.create_task(self._lane(), context=self._context.copy())
            self._tasks.add(lane)
            lane.add_done_callback(self._tasks.discard)
        if not self._opened:
            loop.call_soon(self._look, context=self._context.copy())
        self._opened += number

    def _look(self) -> None:
        """Open more lanes if those that there are have all been taken."""
        opened, self._opened = self._opened, 0
        if self._waiting:
            self._open(min(2 * opened, len(self._waiting)))

    async def _lane(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        before = copy_context()
        for _ in range(IN_A_ROW):
            if not self._waiting:
                return
            passenger = self._waiting.popleft()
            if passenger.is_given_up:
                continue
            passenger.lane = task
            task.set_name(passenger.name)
            try:
                await self._carry_out(passenger)
            finally:
                passenger.lane = None
            if task.cancelling() or copy_context() != before:
                return
