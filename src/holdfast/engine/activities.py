"""Activities: functions with side effects, carried out on this node.

An activity is dispatched only after the commit that scheduled it is durable. Async functions run on the loop, others
in threads of the node's own; how many run at once is bounded. How it ended is handed to whoever asked for it: nothing
here writes to a store.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from threading import get_ident
from typing import Any, NoReturn

from msgspec import UNSET, Raw, Struct, UnsetType

from holdfast.core import codec
from holdfast.core.events import NULL, ErrorInfo, StepStarted
from holdfast.core.instants import Instant
from holdfast.core.messages import ActivityDetached, ActivityErrored, ActivitySucceeded
from holdfast.core.state import OpenStep
from holdfast.core.tokens import ActivityToken, write_token
from holdfast.errors import HoldfastError, InvalidInput, NotDurable
from holdfast.ports import Rng
from holdfast.program.definitions import ActivityDefinition, ActivityOptions
from holdfast.program.failures import error_info

THREADS = "holdfast-activity"
"""What the names of threads begin with that carry out activities."""

logger = logging.getLogger("holdfast.activities")

Outcome = ActivitySucceeded | ActivityErrored | ActivityDetached
Details = Raw | UnsetType
"""What an activity says of its progress, or UNSET where it says only that it goes on."""


class NonRetryable(HoldfastError):
    """Raise this, or a subclass, in an activity whose failure no retry can mend."""


class CompleteLater(BaseException):
    """Raised by `complete_later` to end an activity without an outcome."""


def is_mendable(problem: BaseException) -> bool:
    """Say whether trying again may help, as far as the error itself tells."""
    return not isinstance(problem, NonRetryable | InvalidInput)


class Work(Struct, frozen=True):
    """One attempt of one step, to be carried out. `details` is what the attempts before have said of their progress."""

    run_id: str
    step: OpenStep
    definition: ActivityDefinition
    options: ActivityOptions
    details: Raw = NULL


Report = Callable[[Work, Outcome], None]
Beat = Callable[[Work, Details], None]


class ActivityContext:
    """What an activity may know of itself, and say while it works."""

    def __init__(self, work: Work, beat: Beat) -> None:
        step = work.step
        self.run_id = work.run_id
        self.step_id = step.step_id
        self.attempt = step.attempt
        self.details: Any = None if work.details is NULL else codec.decode(work.details, Any)
        self._work = work
        self._beat = beat
        self._loop = asyncio.get_running_loop()
        self._thread_id = get_ident()
        self._extend: Callable[[], None] = lambda: None
        self._said: Details = UNSET
        self._is_announced = False
        self._is_over = False

    def heartbeat(self, details: Any = UNSET) -> None:
        """Say that the work goes on, from the loop or from a thread; details are kept for a next attempt, anywhere.

        Raises `asyncio.CancelledError` once the attempt is over: that is how a function in a thread hears of it.
        """
        if self._is_over:
            raise asyncio.CancelledError(f"attempt {self.attempt} of step {self.step_id} is over")
        if details is not UNSET:
            self._said, self.details = codec.encode(details), details
        if self._thread_id == get_ident():
            self._go_on()  # at once: the attempt may end before the loop comes round again
        elif not self._is_announced:  # however often a thread calls this, the loop hears of it once at a time
            self._is_announced = True
            self._loop.call_soon_threadsafe(self._go_on)

    @property
    def token(self) -> str:
        """The name of this attempt, with which its outcome can be reported from outside."""
        step = self._work.step
        return write_token(ActivityToken(self.run_id, step.step_id, step.logical_attempt_id, step.engine_attempt_id))

    def complete_later(self) -> NoReturn:
        """End the activity without an outcome: whoever has its `token` reports it with `App.complete_activity`."""
        raise CompleteLater

    def close(self) -> None:
        """Note that the attempt is over."""
        self._is_over = True

    def _go_on(self) -> None:
        self._is_announced = False
        details, self._said = self._said, UNSET
        self._extend()
        self._beat(self._work, details)

    @asynccontextmanager
    async def watched(self, timeout_ms: int | None) -> AsyncIterator[None]:
        """End the work with `TimeoutError` if it does not say for so long that it goes on."""
        if timeout_ms is None:
            yield
            return
        silence_s = timeout_ms / 1_000
        try:
            async with asyncio.timeout(silence_s) as limit:
                self._extend = lambda: limit.reschedule(self._loop.time() + silence_s)
                yield
        except TimeoutError:
            if limit.expired():
                raise TimeoutError(f"no heartbeat within {timeout_ms} ms") from None
            raise
        finally:
            self._extend = lambda: None


_context: ContextVar[ActivityContext] = ContextVar("holdfast_activity")


def activity_context() -> ActivityContext:
    """Return the context of the activity that is running."""
    try:
        return _context.get()
    except LookupError:
        raise NotDurable("activity_context can only be used inside an activity that a workflow called") from None


class Slots:
    """The places in which a node carries out activities, and the threads for those that are not async.

    A function in a thread cannot be stopped. One that is no longer waited for keeps its place until it returns.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._places = asyncio.Semaphore(most)
        self._wanted = 0
        self._threads: ThreadPoolExecutor | None = None
        self.on_free: Callable[[], None] = lambda: None

    @property
    def free(self) -> int:
        """How many more activities could begin at once."""
        return max(0, self._most - self._wanted)

    def want(self) -> None:
        """Say that somebody is about to wait for a place."""
        self._wanted += 1

    async def wait(self) -> None:
        """Wait for a place; it is given back with `give_back`."""
        await self._places.acquire()

    def give_back(self, *, had_place: bool) -> None:
        """Give back a place, or stop to wait for one."""
        self._wanted -= 1
        if had_place:
            self._places.release()
        self.on_free()

    def run(self, call: Callable[[], Any]) -> "Future[Any]":
        """Begin to carry out a call in a thread."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._most, THREADS)
        return self._threads.submit(copy_context().run, _called, call)

    def close(self) -> None:
        """Let go of the threads, without waiting for what they do."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


class Workers:
    """Carries out activities in a node's slots, and reports how they ended."""

    def __init__(self, slots: Slots, report: Report, beat: Beat, rng: Rng) -> None:
        self._slots = slots
        self._report = report
        self._beat = beat
        self._rng = rng
        self._tasks: dict[str, dict[str, asyncio.Task[None]]] = {}

    @property
    def busy(self) -> int:
        """How many activities are under way or waiting for a slot."""
        return sum(len(steps) for steps in self._tasks.values())

    def steps_of(self, run_id: str) -> list[str]:
        """Return the steps of a run that are carried out here."""
        return list(self._tasks.get(run_id, ()))

    def is_working_on(self, run_id: str, step_id: str) -> bool:
        """Say whether the step is carried out here."""
        return step_id in self._tasks.get(run_id, ())

    def start(self, work: Work, now: Instant) -> None:
        """Begin to carry out a step, in place of an attempt of it that is still under way."""
        run_id, step_id = work.run_id, work.step.step_id
        steps = self._tasks.setdefault(run_id, {})
        if step_id in steps:
            steps.pop(step_id).cancel()
        self._slots.want()
        began = asyncio.get_running_loop().time()
        task = asyncio.create_task(self._work(work, now, began), name=f"activity {step_id}")
        steps[step_id] = task

    def cancel(self, run_id: str, step_id: str | None = None) -> None:
        """Cancel the activity of a step, or all of a run."""
        for of_step in [step_id] if step_id is not None else list(self._tasks.get(run_id, ())):
            task = self._forget(run_id, of_step)
            if task is not None:
                task.cancel()

    def cancel_all(self) -> None:
        """Cancel everything that is under way."""
        for run_id in list(self._tasks):
            self.cancel(run_id)

    def _forget(self, run_id: str, step_id: str) -> "asyncio.Task[None] | None":
        steps = self._tasks.get(run_id)
        task = steps.pop(step_id, None) if steps else None
        if not steps:
            self._tasks.pop(run_id, None)
        return task

    async def _work(self, work: Work, now: Instant, began: float) -> None:
        place = _Place(self._slots, work)
        try:
            await place.wait()
            elapsed_s = asyncio.get_running_loop().time() - began
            outcome = await self._attempt(work, place, now + round(elapsed_s * 1_000_000))
        finally:
            place.leave()
        if self._tasks.get(work.run_id, {}).get(work.step.step_id) is asyncio.current_task():
            self._forget(work.run_id, work.step.step_id)
        self._report(work, outcome)

    async def _attempt(self, work: Work, place: "_Place", now: Instant) -> Outcome:
        step, body = work.step, work.step.body
        assert isinstance(body, StepStarted)
        deadline = _deadline(work, now)
        try:
            arguments = work.definition.signature.unpack(body.input)
            result = await self._call(work, place, arguments, deadline)
            return ActivitySucceeded(step.step_id, step.logical_attempt_id, self._encoded(work, result))
        except BaseException as problem:  # every failure of an activity is recorded in its run
            if _is_left_for_later(problem):
                until = _until(work, now)
                return ActivityDetached(step.step_id, step.logical_attempt_id, step.engine_attempt_id, until)
            if _is_the_engines(problem):
                raise
            retryable = is_mendable(problem) and self._has_time_left(deadline)
            return self._errored(work, error_info(problem, retryable=retryable))

    def _has_time_left(self, deadline: float | None) -> bool:
        return deadline is None or asyncio.get_running_loop().time() < deadline

    async def _call(self, work: Work, place: "_Place", arguments: dict[str, Any], deadline: float | None) -> Any:
        context = ActivityContext(work, self._beat)
        _context.set(context)
        limit_ms = work.options.timeout_ms
        if not self._has_time_left(deadline):
            raise TimeoutError(_too_late(work))
        until = None if limit_ms is None else asyncio.get_running_loop().time() + limit_ms / 1_000
        if deadline is not None:
            until = deadline if until is None else min(until, deadline)
        limit = asyncio.timeout_at(until)
        try:
            if until is None and work.options.heartbeat_timeout_ms is None and work.definition.is_async:
                return await work.definition.function(**arguments)  # the usual call, without the detour
            async with limit, context.watched(work.options.heartbeat_timeout_ms):
                if work.definition.is_async:
                    return await work.definition.function(**arguments)
                return await place.run(partial(work.definition.function, **arguments))
        except TimeoutError:
            if limit.expired():
                took = f"activity {work.definition.name!r} took longer than {limit_ms} ms"
                raise TimeoutError(_too_late(work) if until == deadline else took) from None
            raise
        finally:
            context.close()

    def _encoded(self, work: Work, result: Any) -> Raw:
        try:
            return codec.encode(result)
        except InvalidInput as problem:
            raise InvalidInput(f"the result of activity {work.definition.name!r}: {problem}") from problem

    def _errored(self, work: Work, error: ErrorInfo) -> ActivityErrored:
        step = work.step
        return ActivityErrored(
            step.step_id,
            step.logical_attempt_id,
            step.engine_attempt_id,
            error,
            work.options.retry,
            self._rng.fraction(),
        )


class _Place:
    """The place of one attempt, from when it is wanted until it is given back."""

    __slots__ = ("_has_place", "_slots", "_thread", "_work")

    def __init__(self, slots: Slots, work: Work) -> None:
        self._slots = slots
        self._work = work
        self._has_place = False
        self._thread: Future[Any] | None = None

    async def wait(self) -> None:
        await self._slots.wait()
        self._has_place = True

    async def run(self, call: Callable[[], Any]) -> Any:
        """Carry out a call in a thread."""
        self._thread = self._slots.run(call)
        return await asyncio.wrap_future(self._thread)

    def leave(self) -> None:
        """Give the place back; if a thread still works, when it is done."""
        if self._thread is None or self._thread.done():
            self._slots.give_back(had_place=self._has_place)
            return
        name, run_id = self._work.definition.name, self._work.run_id
        logger.warning("run %s: activity %r is over and its function goes on; it keeps its thread", run_id, name)
        loop = asyncio.get_running_loop()
        self._thread.add_done_callback(lambda _: self._leave_at_last(loop))

    def _leave_at_last(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.call_soon_threadsafe(partial(self._slots.give_back, had_place=True))
        except RuntimeError:  # the loop is closed: the node is gone, and its places with it
            return


def _called(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except StopIteration as problem:  # no future can carry it; from a coroutine it comes like this too
        raise RuntimeError("an activity raised StopIteration") from problem


def _is_left_for_later(problem: BaseException) -> bool:
    """Say whether an activity has ended by `complete_later`, also in one of its tasks."""
    if isinstance(problem, BaseExceptionGroup):
        return problem.subgroup(CompleteLater) is not None
    return isinstance(problem, CompleteLater)


def _is_the_engines(problem: BaseException) -> bool:
    """Say whether it was not the activity that raised this, but who carries it out."""
    task = asyncio.current_task()
    if isinstance(problem, asyncio.CancelledError):
        return task is None or task.cancelling() > 0
    return isinstance(problem, KeyboardInterrupt | GeneratorExit)


def _too_late(work: Work) -> str:
    limit_ms = work.options.schedule_to_close_ms
    return f"activity {work.definition.name!r} was not done within {limit_ms} ms of being scheduled"


def _deadline(work: Work, now: Instant) -> float | None:
    """Return when, by the loop's clock, the step is to be done whatever the attempt, or None."""
    limit_ms = work.options.schedule_to_close_ms
    if limit_ms is None:
        return None
    left_us = work.step.opened_at + limit_ms * 1_000 - now
    return asyncio.get_running_loop().time() + left_us / 1_000_000


def _until(work: Work, now: Instant) -> Instant | None:
    """Return when an attempt that began now is to be done, or None."""
    limits = []
    if work.options.timeout_ms is not None:
        limits.append(now + work.options.timeout_ms * 1_000)
    if work.options.schedule_to_close_ms is not None:
        limits.append(work.step.opened_at + work.options.schedule_to_close_ms * 1_000)
    return min(limits, default=None)
