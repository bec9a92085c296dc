"""The deterministic loop: plain asyncio, without a clock, a socket or a thread behind it.

A workflow's coroutines run on this loop, synchronously, until nothing is ready. The engine then delivers what they wait
for. Everything that could differ between two executions is removed:

* time stands still while the loop runs; it is the instant of the outcome that is being handled;
* `call_later` and `call_at`, and with them `asyncio.sleep` and `asyncio.timeout`, become durable timers of the host;
* tasks and futures hash by a counter, those of `gather` too. `asyncio.wait`, `as_completed` and `TaskGroup` keep them
  in sets, which would otherwise iterate by address, and one history would replay to several outcomes;
* async generators that are dropped half-way are closed immediately by this loop, not by the outer one;
  those that only the garbage collector finds, at an uncertain time, are not closed: they end with the run;
* `asyncio.all_tasks` raises `NotDurable`: its order is that of a set of all tasks of the process;
* sockets, subprocesses, threads and signals raise `NotDurable`, which names what to use instead.

A program that does not become idle is stopped: by the number of its callbacks, and by the watchdog.

A loop can be disposed of half-way. `ProgramClosed` is raised where coroutines wait, in each task's own context. Their
`finally` blocks run; so from then on every call to the loop raises it too, and no coroutine gets any further.

Sets of strings in user code still iterate differently between processes; replay notices it as a divergence.
"""

import asyncio
import gc
import math
import sys
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from contextvars import Context, copy_context
from math import ceil
from threading import get_ident
from types import FrameType, MappingProxyType
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from holdfast.core.instants import Instant
from holdfast.errors import InvalidInput, NotDurable, RunawayWorkflow
from holdfast.program.watchdog import WATCHDOG, Overdue, Watchdog

T = TypeVar("T")


CLOSING_ATTEMPTS = 10
"""How often `ProgramClosed` is raised in a coroutine that does not end because of it."""

_NO_CALLBACKS: frozenset[int] = frozenset()
_NO_TASKS: Mapping[int, "asyncio.Task[Any]"] = MappingProxyType({})

FEW_TASKS = 8
"""Up to this many tasks are kept before those that have ended are removed."""

MOST_CLOSED_ERRORS = 1_000
"""How often a disposed loop raises `ProgramClosed`."""


class ProgramClosed(BaseException):
    """Raised in code whose program is closed: its run continues elsewhere, or later, from its history."""


class TimerHost(Protocol):
    """Keeps the loop's timers durably, and fires them when they are due."""

    def start_timer(self, timer: "Timer", due_at: Instant) -> None:
        """Keep a timer that was started; run it with `DeterministicLoop.fire` when it is due."""
        ...

    def cancel_timer(self, timer: "Timer") -> None:
        """Note that a timer was cancelled before it was due."""
        ...


class Timer(asyncio.TimerHandle):
    """A timer of the loop. `step_id` and `asked_at` belong to the host."""

    step_id: str = ""
    asked_at: object = None
    _scheduled: bool


class _Numbered:
    """Hashes by the order in which it was first put into a set, not by its address; a task, by order of creation."""

    __slots__ = ()
    number: int

    def __hash__(self) -> int:
        try:
            return self.number
        except AttributeError:
            self.number = self.get_loop().next_number()  # type: ignore[attr-defined,misc]
            return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class NumberedFuture(_Numbered, asyncio.Future[T]):
    """A future of the deterministic loop."""

    __slots__ = ("number",)


class _Ready(asyncio.Handle):
    """A callback that is ready. It does not check whether the loop is in debug mode, which it never is."""

    __slots__ = ()

    def __init__(
        self, callback: Callable[..., Any], args: Any, loop: "DeterministicLoop", context: Context | None
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None


class StepFuture(NumberedFuture[Any]):
    """The outcome of a step that is awaited. Cancelling the wait closes the step."""

    __slots__ = ("_give_up", "_step_id", "is_work")

    def __init__(
        self, loop: "DeterministicLoop", give_up: Callable[[str], None], step_id: str, is_work: bool = False
    ) -> None:
        super().__init__(loop=loop)
        self._give_up = give_up
        self._step_id = step_id
        self.is_work = is_work
        """Whether the step is an activity."""

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the step."""
        is_cancelled = super().cancel(msg)
        if is_cancelled:
            self._give_up(self._step_id)
        return is_cancelled


class NumberedTask(_Numbered, asyncio.Task[T]):
    """A task of the deterministic loop."""

    __slots__ = ("context", "number")

    def __init__(
        self, coro: Any, loop: "DeterministicLoop", name: str | None = None, context: Context | None = None
    ) -> None:
        self.number = loop.next_number()  # before asyncio adds the task to its set of all tasks
        self.context = copy_context() if context is None else context  # a task of Python 3.11 does not expose it
        super().__init__(coro, loop=loop, name=name, context=self.context)

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop. `asyncio.all_tasks` calls this for each task, and is refused inside a workflow."""
        loop = super().get_loop()
        if _is_listing_tasks() and asyncio._get_running_loop() is loop:
            raise NotDurable("all_tasks: its order differs between replays; keep your tasks in a list or a TaskGroup")
        return loop


class NumberedGathering(_Numbered, asyncio.tasks._GatheringFuture):  # type: ignore[name-defined,misc]
    """What `asyncio.gather` returns on the deterministic loop."""


def _is_unretrieved(task: asyncio.Task[Any]) -> bool:
    return task.done() and bool(task._log_traceback)


class Watch(Struct, gc=False, eq=False):
    """Runs pieces of one program, each for at most `turn_s`; None or 0 sets no bound.

    `watchdog.py` explains why leaving a piece takes three attempts.
    """

    turn_s: float | None
    run_id: str
    workflow: str
    watchdog: Watchdog = WATCHDOG
    ticks: int = 0
    where: str = ""
    most_ticks: int = 0

    def __post_init__(self) -> None:
        self.most_ticks = ceil(self.turn_s / self.watchdog.tick_s) if self.turn_s else 0

    def run(self, piece: Callable[[], T]) -> T:
        """Return the result of the piece; raise `RunawayWorkflow` if it was struck, even if it caught that."""
        if not self.most_ticks:
            return piece()
        watchdog, thread_id = self.watchdog, get_ident()
        self.ticks, self.where = 0, ""
        try:
            try:
                try:
                    watchdog.watched[thread_id] = self
                    if watchdog.is_asleep and not watchdog.bell.is_set():  # otherwise it is about to wake up
                        if watchdog.thread is None:
                            watchdog.start()
                        watchdog.bell.set()
                    result = piece()
                finally:
                    watchdog.watched.pop(thread_id, None)
                    self.settle(thread_id)
            except Overdue:
                self.settle(thread_id)
        except Overdue:
            self.settle(thread_id)
        finally:
            if self.where:
                raise RunawayWorkflow(
                    f"the workflow did not become idle within {self.turn_s} s{self.where}; "
                    "move what blocks or takes long into an activity"
                )
        return result

    def settle(self, thread_id: int) -> None:
        """Make sure that nothing more is raised in this thread, which is no longer watched."""
        taken: list[bool] = []
        try:
            # A single call acquires the lock and records that: `with` would not release it if something is raised in
            # between.
            taken.extend(map(self.watchdog.lock.acquire, (True,)))
            if self.where:
                try:
                    self.watchdog.strike(thread_id)  # in place of the pending one, and raised by this call
                    while True:
                        pass
                except Overdue:
                    pass
        finally:
            if taken:
                self.watchdog.lock.release()


UNWATCHED = Watch(None, "", "")
"""Sets no bound."""


class DeterministicLoop(asyncio.AbstractEventLoop):
    """Runs coroutines of one run until nothing is ready."""

    sleeps_forever = False
    """Whether a timer was set that never fires."""

    def __init__(self, host: TimerHost, most_callbacks: int, seed: int, watch: Watch = UNWATCHED) -> None:
        self.now: Instant = 0
        self.host = host
        self.watch = watch
        self._most_callbacks = most_callbacks
        self._ready: deque[asyncio.Handle] | list[asyncio.Handle] | None = None
        """A deque only while the program runs: it takes more memory than anything else in a parked run."""
        self._number = seed  # not 0: asyncio keeps the tasks of all runs in one set
        self._is_closed = False
        self._closed_errors = 0
        self._name = 0
        self._tasks: list[NumberedTask[Any]] = []
        self._completing: Mapping[int, asyncio.Task[Any]] = _NO_TASKS
        self._most_tasks = FEW_TASKS
        self._collected: list[AsyncGenerator[Any, Any]] | None = None
        self._callbacks = 0
        self._deferred: asyncio.Handle | None = None
        self.deferred_callback: int | None = None
        """The number of the callback that waits for `run_deferred`."""
        self.to_defer = _NO_CALLBACKS
        """The callbacks, by number, that run after `run_deferred` instead of in their turn."""
        self.after_each: Callable[[int], None] | None = None
        """Called after each callback, with its number."""

    def next_number(self) -> int:
        """Return the number of the next task or future."""
        self._number += 1
        return self._number

    @property
    def is_stirred(self) -> bool:
        """Whether something has become ready."""
        return bool(self._ready)

    def run_until_idle(self) -> None:
        """Run everything that is ready, and what becomes ready as a result."""
        if not self._ready:
            return
        here = _here
        if not here.is_outside or here.loop is not None:
            with running(self):
                self.watch.run(self._run_ready)
            return
        # Like `running`, but without its calls: every turn of a node takes this path.
        sys.set_asyncgen_hooks(None, self.finalize)
        asyncio._set_running_loop(self)
        here.loop = self
        try:
            self.watch.run(self._run_ready)
        finally:
            here.loop = None
            asyncio._set_running_loop(None)

    def _run_ready(self) -> None:
        self._ready = ready = deque(self._ready or ())
        number, after_each, to_defer = self._callbacks, self.after_each, self.to_defer
        last = number + self._most_callbacks
        while ready:
            handle = ready.popleft()
            number += 1
            if number > last:
                raise RunawayWorkflow(
                    f"the workflow did not become idle within {self._most_callbacks} callbacks; "
                    "let its loop wait for a step, a timer or a signal"
                )
            if to_defer and number in to_defer:
                self._deferred, self.deferred_callback = handle, number
                continue
            if not handle._cancelled:
                try:
                    handle._context.run(handle._callback, *handle._args)  # type: ignore[attr-defined]
                except Overdue:
                    raise
                except BaseException:  # the task keeps it as its exception: it ends the run, not the process
                    pass
            if after_each is not None:
                after_each(number)
        self._ready = None
        self._callbacks = number

    def _add(self, handle: asyncio.Handle) -> None:
        if self._ready is None:
            self._ready = [handle]
        else:
            self._ready.append(handle)

    def run_deferred(self) -> None:
        """Run the deferred callback, after what is already ready."""
        if self._deferred is not None:
            self._add(self._deferred)
            self._deferred = self.deferred_callback = None

    def fire(self, timer: Timer) -> None:
        """Run a timer that is due."""
        timer._scheduled = False  # it can no longer be cancelled
        self._add(timer)

    # --- called by asyncio

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Run the callback after those that are ready."""
        if self._is_closed:
            self.check_open()
        handle = _Ready(callback, args, self, context)
        if self._ready is None:
            self._ready = [handle]
        else:
            self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Timer:
        """Run the callback after a delay, by a durable timer."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Timer:
        """Call it at that time, by a durable timer; immediately if the time is past, and never if it is infinity."""
        self.check_open()
        if math.isnan(when):
            raise InvalidInput("a timer is set for a number of seconds, and NaN is not a number")
        timer = Timer(when, callback, args, self, context)
        if when <= self.time():
            self._add(timer)
        elif when != math.inf:
            timer._scheduled = True  # so that its cancellation is reported to _timer_handle_cancelled
            self.host.start_timer(timer, round(when * 1_000_000))
        else:
            self.sleeps_forever = True
        return timer

    def _timer_handle_cancelled(self, timer: Timer) -> None:
        if not self._is_closed:
            self.host.cancel_timer(timer)

    def time(self) -> float:
        """Return the time, which does not change while the loop runs."""
        return self.now / 1_000_000

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future that hashes by its number."""
        self.check_open()
        future: asyncio.Future[Any] = NumberedFuture(loop=self)
        return future

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        """Create a task that hashes by its number; without a name it gets one that is the same on every replay."""
        if self._is_closed:
            coro.close()
            raise ProgramClosed
        if (given := _given_to_as_completed()) is not None:
            return self._task_of(coro, given)
        task: NumberedTask[T] = NumberedTask(coro, loop=self, name=name or self._next_name(), context=context)
        self._tasks.append(task)
        if len(self._tasks) > self._most_tasks:
            self._tasks = [task for task in self._tasks if not task.done() or _is_unretrieved(task)]
            self._most_tasks = max(FEW_TASKS, 2 * len(self._tasks))
        return task

    def _task_of(self, coro: Any, given: Any) -> asyncio.Task[Any]:
        """Return the task of one of the coroutines that `as_completed` was given; tasks are created in argument order.

        `as_completed` iterates over them by address, so all are created when it requests the first.
        """
        if id(coro) not in self._completing:
            is_ordered = isinstance(given, list | tuple) and coro in given
            if not is_ordered:
                coro.close()
                raise NotDurable(
                    "as_completed: coroutines in a set or a generator have no order; give it a list of them, or tasks "
                    "made by create_task"
                )
            for each in dict.fromkeys(given):
                if asyncio.iscoroutine(each):
                    made: NumberedTask[Any] = NumberedTask(each, loop=self, name=self._next_name())
                    self._tasks.append(made)
                    self._completing = {**self._completing, id(each): made}
        task = self._completing[id(coro)]
        self._completing = {key: other for key, other in self._completing.items() if key != id(coro)}
        return task

    def _next_name(self) -> str:
        self._name += 1
        return f"task {self._name}"

    def get_debug(self) -> bool:
        """Return False: there is no debug mode. Every future calls this, even one that `gather` creates."""
        maker = sys._getframe(1)
        if maker.f_code is _GATHERING:
            future = maker.f_locals["self"]
            future.__class__ = NumberedGathering
            future.number = self.next_number()
        return False

    def get_task_factory(self) -> None:
        """Return None: the loop itself creates tasks."""

    def get_exception_handler(self) -> None:
        """Return None: exceptions are part of a run's outcome, and are not reported otherwise."""

    def is_running(self) -> bool:
        """Return whether coroutines can wait on this loop."""
        return not self._is_closed

    def is_closed(self) -> bool:
        """Return whether the loop was disposed of."""
        return self._is_closed

    def unretrieved(self) -> list[asyncio.Task[Any]]:
        """Return the failed tasks whose exception was never retrieved."""
        return [task for task in self._tasks if _is_unretrieved(task)]

    def has_tasks_beside(self, main: asyncio.Task[Any] | None) -> bool:
        """Return whether there are unfinished tasks other than this one."""
        return any(task is not main and not task.done() for task in self._tasks)

    def dispose(self) -> None:
        """Close all coroutines; code that still runs because of that can no longer use the loop."""
        if self._is_closed:
            return
        self._is_closed = True
        self._ready = None
        self._deferred = None
        if not all(task.done() for task in self._tasks):
            with running(self):
                for task in reversed(self._tasks):
                    if not task.done():
                        _dispose_of(task, self)
        _untie(self._tasks)
        self._tasks = []
        self._collected = None

    def check_open(self) -> None:
        """Raise `ProgramClosed` if the loop was disposed of."""
        if self._is_closed:
            self._closed_errors += 1
            if self._closed_errors <= MOST_CLOSED_ERRORS:  # code that catches it in a loop is left waiting
                raise ProgramClosed

    def finalize(self, generator: AsyncGenerator[Any, Any]) -> None:
        """Close an async generator that was dropped half-way, as asyncio does. The interpreter calls this.

        The garbage collector runs at an uncertain time: a generator that it finds is kept as it is, to end with the
        run.
        """
        if self._is_closed:
            return
        if _here.is_collecting:
            self._collected = [*(self._collected or ()), generator]
        elif asyncio._get_running_loop() is self:
            self.create_task(generator.aclose())

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Ignore it: an exception that was not retrieved is in the run's outcome, or was meant to be ignored."""

    async def shutdown_asyncgens(self) -> None:
        """Do nothing: generators end with the run."""


class outside_loop:  # noqa: N801 - used like a function
    """Leave the running loop and task of this thread, once for many programs that run one after the other."""

    __slots__ = ("_hooks", "_inner", "_loop", "_task", "_was_outside")

    def __enter__(self) -> None:
        self._loop = loop = asyncio._get_running_loop()
        self._task = task = asyncio.current_task(loop) if loop is not None else None
        if loop is not None and task is not None:
            asyncio.tasks._leave_task(loop, task)
        asyncio._set_running_loop(None)
        self._hooks = sys.get_asyncgen_hooks()
        self._was_outside, _here.is_outside = _here.is_outside, True
        self._inner, _here.loop = _here.loop, None
        if not self._was_outside:
            _here.is_collecting = False
            gc.callbacks.append(_note_collection)

    def __exit__(self, *problem: object) -> None:
        _here.is_outside, _here.loop = self._was_outside, self._inner
        if not self._was_outside:
            gc.callbacks.remove(_note_collection)
        sys.set_asyncgen_hooks(*self._hooks)
        asyncio._set_running_loop(self._loop)
        if self._loop is not None and self._task is not None:
            asyncio.tasks._enter_task(self._loop, self._task)


class running:  # noqa: N801 - used like a function
    """Make this loop the running one of its thread, nested inside any that runs there."""

    __slots__ = ("_loop", "_outside")

    def __init__(self, loop: DeterministicLoop) -> None:
        self._loop = loop
        self._outside: outside_loop | None = None

    def __enter__(self) -> None:
        if not _here.is_outside or _here.loop is not None:
            self._outside = outside_loop()
            self._outside.__enter__()
        sys.set_asyncgen_hooks(None, self._loop.finalize)
        asyncio._set_running_loop(self._loop)
        _here.loop = self._loop

    def __exit__(self, *problem: object) -> None:
        if self._outside is None:
            _here.loop = None
            asyncio._set_running_loop(None)
        else:
            self._outside.__exit__()


class _Here(threading.local):
    """Whether this thread is outside of its running loop, and whether the garbage collector runs in it.

    The latter is known only while programs run, because a callback listens only then. `loop` is the one whose program
    runs: Python 3.11 asks the system for the process id whenever it is asked for its running loop.
    """

    loop: DeterministicLoop | None = None
    is_outside = False
    is_collecting = False


_here = _Here()


def current_loop() -> DeterministicLoop | None:
    """Return the loop whose program is running in this thread, or None."""
    return _here.loop


def _note_collection(phase: str, info: object) -> None:
    _here.is_collecting = phase == "start"


def _dispose_of(task: NumberedTask[Any], loop: DeterministicLoop) -> None:
    """Raise `ProgramClosed` in a task, as the current one and in its context: libraries restore it when code leaves.

    It is raised a few more times in code that continues, which is then left alone. `close` would remove a coroutine
    from those that await it: the rest of it would be closed in an arbitrary place at an arbitrary time.
    """
    coro: Any = task.get_coro()
    asyncio.tasks._enter_task(loop, task)
    try:
        for _ in range(CLOSING_ATTEMPTS):
            loop.watch.run(lambda: task.context.run(coro.throw, ProgramClosed()))
    except RunawayWorkflow:  # it blocks
        pass
    except BaseException:  # it has ended; what it raises changes nothing for its run
        return
    finally:
        asyncio.tasks._leave_task(loop, task)
    _stubborn.append(coro)


def _untie(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Break the cycles between tasks and the futures they await, so that no garbage collection is needed."""
    tied = {id(future): future for task in tasks for future in (task, task._fut_waiter)}  # type: ignore[attr-defined]
    for future in tied.values():
        callbacks = (isinstance(future, asyncio.Future) and future._callbacks) or ()
        if len(callbacks) <= FEW_TASKS:  # each is searched for: with many of them the collector is faster
            for callback, _ in callbacks:
                future.remove_done_callback(callback)


_stubborn: list[Any] = []
"""Coroutines that did not end when closed. If collected, they would continue outside of any run, so they are kept."""


_GATHERING = asyncio.tasks._GatheringFuture.__init__.__code__  # type: ignore[attr-defined]
_AS_COMPLETED = asyncio.as_completed.__code__


def _given_to_as_completed() -> Any:
    """Return what `as_completed` was given if it creates this task from a coroutine, in order of addresses; or None."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == asyncio.tasks.__file__:
        if frame.f_code is _AS_COMPLETED:
            return frame.f_locals.get("fs", frame.f_locals.get("aws", ()))
        frame = frame.f_back
    return None


def _is_listing_tasks() -> bool:
    """Return whether `asyncio.all_tasks` is the caller; up to Python 3.11 it calls from its own comprehension.

    From Python 3.14 on it is written in C and has no frame. Then the frame here is that of its caller: code outside of
    asyncio and of this module in which the name of `get_loop` does not occur.
    """
    frame: FrameType | None = sys._getframe(2)
    if frame is None:
        return False
    if _ALL_TASKS is None:
        module = frame.f_globals.get("__name__", "")
        return module.partition(".")[0] != "asyncio" and module != __name__ and _ASKS not in frame.f_code.co_names
    if frame.f_code is not _GET_LOOP or frame.f_back is None:
        return False
    asking = frame.f_back
    return asking.f_code is _ALL_TASKS or (asking.f_back is not None and asking.f_back.f_code is _ALL_TASKS)


_ALL_TASKS = getattr(asyncio.all_tasks, "__code__", None)
_ASKS = "get_loop"
_GET_LOOP = asyncio.futures._get_loop.__code__  # type: ignore[attr-defined]

_NETWORK = "the network is not durable in a workflow; make the call an activity"
_FILES = "files and sockets are not durable in a workflow; make the call an activity"
_THREADS = "threads are not durable in a workflow; make the call an activity"
_HOSTED = "the loop belongs to the engine; leave it as it is, and await what you are waiting for"

_INSTEAD = {
    **dict.fromkeys(["run_in_executor", "set_default_executor", "shutdown_default_executor"], _THREADS),
    "call_soon_threadsafe": "threads are not durable in a workflow; send the run a signal",
    **dict.fromkeys(["getaddrinfo", "getnameinfo", "create_connection", "create_unix_connection"], _NETWORK),
    **dict.fromkeys(["create_datagram_endpoint", "connect_accepted_socket", "start_tls"], _NETWORK),
    **dict.fromkeys(["sock_connect", "sock_recv", "sock_recv_into", "sock_recvfrom", "sock_recvfrom_into"], _NETWORK),
    **dict.fromkeys(["sock_sendall", "sock_sendto", "sock_sendfile", "sendfile"], _NETWORK),
    "sock_accept": "the network is not durable in a workflow; wait for a signal instead",
    "create_server": "the network is not durable in a workflow; wait for a signal instead",
    "create_unix_server": "the network is not durable in a workflow; wait for a signal instead",
    **dict.fromkeys(["subprocess_exec", "subprocess_shell"], "a subprocess is not durable; start it in an activity"),
    **dict.fromkeys(["add_reader", "add_writer", "remove_reader", "remove_writer"], _FILES),
    **dict.fromkeys(["connect_read_pipe", "connect_write_pipe"], _FILES),
    "add_signal_handler": "operating system signals do not reach a workflow; send the run a signal",
    "remove_signal_handler": "operating system signals do not reach a workflow; send the run a signal",
    "run_until_complete": "the loop is running already; await the coroutine",
    "run_forever": "the loop is running already; await what you are waiting for",
    **dict.fromkeys(["close", "stop", "set_task_factory", "set_exception_handler", "set_debug"], _HOSTED),
    "default_exception_handler": _HOSTED,
}


def _refusing(name: str, instead: str) -> Callable[..., Any]:
    def refuse(self: DeterministicLoop, *args: Any, **kwargs: Any) -> Any:
        raise NotDurable(f"{name}: {instead}")

    refuse.__name__ = name
    return refuse


for _name, _text in _INSTEAD.items():
    setattr(DeterministicLoop, _name, _refusing(_name, _text))


def settle(waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]]) -> None:
    """Resolve the futures whose condition holds. An exception of a condition is raised where it is awaited."""
    for condition, future in waiting:
        try:
            holds = condition()
        except Exception as problem:
            if not future.done():
                future.set_exception(problem)
        else:
            if holds and not future.done():  # a condition that is not read-only may have cancelled it
                future.set_result(None)
