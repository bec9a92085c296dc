"""A simulated world in one thread: an event loop with virtual time, a seed, and processes that can be stopped or
killed.

`SimLoop` runs plain asyncio code. Nothing ever waits for real time: when nothing is ready the clock jumps to the next
timer. The seed decides the order of what is ready at the same moment, so a seed is one interleaving, the same every
time. When nothing is ready and no timer is left, nothing can ever happen again: `Deadlock`.

A `SimProcess` stands for one process of a machine. What it starts, and whatever that starts, belongs to it. It can be
stopped (SIGSTOP: nothing of it runs, time goes on, its timers are late) and killed (SIGKILL: nothing of it ever runs
again, not even its clean-up). With a *fuse* it dies after a given number of callbacks, that is, at any await.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from random import Random
from typing import Any, NoReturn, TypeVar
from warnings import catch_warnings

from holdfast.core.instants import Instant
from holdfast.testing.clock import START

T = TypeVar("T")

MOST_ROUNDS = 1_000_000
"""The maximum number of callback rounds in a simulation. A long one takes some ten thousand."""

MOST_TICK_S = 0.000_05
"""The maximum duration of a round of callbacks. Some time passes even if no task sleeps."""

CLOSING_ATTEMPTS = 1_000
"""How often a coroutine is closed that keeps awaiting while it cleans up."""

_process: ContextVar["SimProcess | None"] = ContextVar("holdfast_sim_process", default=None)


class Deadlock(Exception):
    """Nothing is ready, no timer is running, and a task is still waiting."""


class Livelock(Exception):
    """Callbacks never end: a task polls instead of waiting."""


class SimProcess:
    """One process of the simulated machine."""

    def __init__(self, loop: "SimLoop", name: str) -> None:
        self.name = name
        self.is_alive = True
        self.is_stopped = False
        self.fuse: int | None = None
        self.death: asyncio.Future[None] = loop.create_future()
        self.tasks: list[asyncio.Task[Any]] = []
        self._loop = loop
        self._late: list[asyncio.Handle] = []

    def spawn(self, coro: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """Run a coroutine in this process."""
        context = copy_context()
        context.run(_process.set, self)
        return self._loop.create_task(coro, name=name, context=context)

    def stop(self) -> None:
        """Let nothing of it run until `go_on`."""
        self.is_stopped = True

    def go_on(self) -> None:
        """Let it run again; what arrived meanwhile is handled now."""
        self.is_stopped = False
        self._loop.put_back(self._late)
        self._late = []

    def kill(self) -> None:
        """Let nothing of it run ever again."""
        self.is_alive = False
        self._late = []
        if not self.death.done():
            self.death.set_result(None)

    def may_run(self, handle: asyncio.Handle) -> bool:
        """Return whether a callback of this process may run now; otherwise keep it for later. Burns the fuse."""
        if not self.is_alive:
            return False
        if self.is_stopped:
            self._late.append(handle)
            return False
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                self.kill()
        return self.is_alive


def current_process() -> SimProcess | None:
    """Return the process that the running code belongs to, or None outside of all processes."""
    return _process.get()


class SimTask(asyncio.Task[T]):
    """A task with a creation number: the order of what is ready may not depend on addresses."""

    number = 0


class SimLoop(asyncio.BaseEventLoop):
    """An event loop with virtual time and a seed. It has no sockets and no threads.

    The loop itself executes what is submitted to a thread, a moment later, in the process that submitted it.
    """

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _timer_cancelled_count: int

    def __init__(self, seed: int | str) -> None:
        super().__init__()
        self._rng = Random(f"loop {seed}")
        self._elapsed_s = 0.0
        self._tasks: list[SimTask[Any]] = []
        self._is_abandoned = False
        self.rounds = 0
        self.network_call = ""
        """The first call that needed a network, such as `create_connection`."""
        self.set_exception_handler(lambda loop, context: None)

    def time(self) -> float:
        """Return the virtual seconds since the start."""
        return self._elapsed_s

    def put_back(self, handles: list[asyncio.Handle]) -> None:
        """Make callbacks ready that were held back."""
        self._ready.extend(handles)

    def create_task(  # type: ignore[override]
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        """Create a task, and remember its process."""
        task: SimTask[T] = SimTask(coro, loop=self, name=name, context=context)
        task.number = len(self._tasks)
        self._tasks.append(task)
        process = context.get(_process) if context is not None else _process.get()
        if process is not None:
            process.tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Execute a call a moment later, and return the future of its result."""

        async def call() -> Any:
            return func(*args)

        return self.create_task(call())

    async def getaddrinfo(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse it: there is no network."""
        self._refuse_network("getaddrinfo")

    async def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse it: there is no network."""
        self._refuse_network("create_connection")

    async def create_unix_connection(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse it: there is no network."""
        self._refuse_network("create_unix_connection")

    async def sock_connect(self, sock: Any, address: Any) -> None:
        """Refuse it: there is no network."""
        self._refuse_network("sock_connect")

    def _refuse_network(self, call: str) -> NoReturn:
        self.network_call = self.network_call or call
        raise ConnectionError(f"{call}: there is no network in virtual time")

    def simulate(self, main: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine to its end, and leave nothing behind."""
        try:
            return self.run_until_complete(main)
        finally:
            self._abandon()
            self.close()

    def _abandon(self) -> None:
        """Close what never finished, so that asyncio does not warn about it later.

        Code that cleans up may start tasks: they belong to this loop too, and are closed with the others.
        """
        self._is_abandoned = True
        self._ready.clear()
        self._scheduled.clear()
        asyncio._set_running_loop(self)
        try:
            for task in self._tasks:
                self._close_task(task)
        finally:
            asyncio._set_running_loop(None)
        self._ready.clear()

    def _close_task(self, task: "SimTask[Any]") -> None:
        if task.done():
            if not task.cancelled():
                task.exception()  # marks it as retrieved
            return
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        coro = task.get_coro()
        assert coro is not None
        with catch_warnings(action="ignore", category=RuntimeWarning):
            for _ in range(CLOSING_ATTEMPTS):
                try:
                    coro.close()
                except RuntimeError:  # it awaits something while it cleans up, and is closed there too
                    continue
                return

    # --- methods that BaseEventLoop leaves to its subclasses

    def _asyncgen_finalizer_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        """Close a generator that was dropped half-way, unless nothing runs any more: nothing would await its end."""
        if not self._is_abandoned:
            super()._asyncgen_finalizer_hook(agen)  # type: ignore[misc]

    def _run_once(self) -> None:
        self.rounds += 1
        if self.rounds > MOST_ROUNDS:
            raise Livelock(f"no end after {MOST_ROUNDS} rounds")
        self._pass_time()
        ready = [*self._ready]
        self._ready.clear()
        if len(ready) > 1:
            ready.sort(key=_number)  # they may have arrived in the order of a set
            self._rng.shuffle(ready)
        for handle in ready:
            if handle.cancelled():
                continue
            process = handle._context.get(_process)  # type: ignore[attr-defined]
            if process is None or process.may_run(handle):
                handle._run()

    def get_debug(self) -> bool:
        """Return False: this is called with every callback."""
        return False

    def _pass_time(self) -> None:
        self._drop_cancelled()
        if self._ready or self._stopping:  # type: ignore[attr-defined]
            self._elapsed_s += self._rng.random() * MOST_TICK_S
        elif self._scheduled:
            self._elapsed_s = max(self._elapsed_s, self._scheduled[0].when())
        else:
            raise Deadlock("nothing is ready and no timer is running")
        while self._scheduled and self._scheduled[0].when() <= self._elapsed_s:
            timer = heapq.heappop(self._scheduled)
            timer._scheduled = False  # type: ignore[attr-defined]
            self._ready.append(timer)

    def _drop_cancelled(self) -> None:
        while self._scheduled and self._scheduled[0].cancelled():
            heapq.heappop(self._scheduled)._scheduled = False  # type: ignore[attr-defined]
            self._timer_cancelled_count -= 1

    def _process_events(self, event_list: list[Any]) -> None:
        """Do nothing: there are no files."""

    def _write_to_self(self) -> None:
        """Do nothing: there is no other thread."""


def _number(handle: asyncio.Handle) -> int:
    task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    return task.number if isinstance(task, SimTask) else -1


class LoopClock:
    """The time of a loop, as a store's clock."""

    def __init__(self, loop: asyncio.AbstractEventLoop, at: Instant = START) -> None:
        self._loop = loop
        self._start = at

    def now(self) -> Instant:
        """Return the current instant."""
        return self._start + int(self._loop.time() * 1_000_000)
