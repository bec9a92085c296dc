"""Activities: functions with side effects, carried out on this node.

An activity is dispatched only after the commit that scheduled it is durable. Async functions run on the loop, others
in threads of the node's own; how many run at once is bounded. How it ended is handed to whoever asked for it: nothing
here writes to a store.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import Future
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from threading import get_ident
from typing import Any, NoReturn

from msgspec import UNSET, Raw, Struct, UnsetType

from holdfast.clock import Rng
from holdfast.core import codec
from holdfast.core.events import NULL, StepStarted
from holdfast.core.instants import Instant
from holdfast.core.keys import ActivityToken, write_activity_token
from holdfast.core.messages import ActivityDetached, ActivityErrored, ActivitySucceeded
from holdfast.core.state import OpenStep
from holdfast.core.timing import too_late
from holdfast.engine.activities.slots import Slots
from holdfast.engine.activities.task_pool import TaskPool
from holdfast.errors import HoldfastError, InvalidInput, NotDurable, PayloadTooLarge
from holdfast.limits import Limits
from holdfast.program.definitions import ActivityDefinition, ActivityOptions
from holdfast.program.outcomes import error_info

Outcome = ActivitySucceeded | ActivityErrored | ActivityDetached
Details = Raw | UnsetType
"""What an activity says of its progress, or UNSET where it says only that it goes on."""


class NonRetryable(HoldfastError):
    """Raise this, or a subclass, in an activity whose failure no retry can mend."""


class CompleteLater(BaseException):
    """Raised by `complete_later` to end an activity without an outcome."""


def is_mendable(problem: BaseException) -> bool:
    """Say whether trying again may help, as far as the error itself tells."""
    return not isinstance(problem, NonRetryable | InvalidInput | PayloadTooLarge)


class Work(Struct, frozen=True, gc=False):
    """One attempt of one step, to be carried out. `details` is what the attempts before have said of their progress."""

    run_id: str
    step: OpenStep
    definition: ActivityDefinition
    options: ActivityOptions
    details: Raw = NULL


Report = Callable[[Work, Outcome], None]
OnHeartbeat = Callable[[Work, Details], None]


class ActivityContext:
    """What an activity may know of itself, and say while it works."""

    __slots__ = (
        "_extend",
        "_is_announced",
        "_is_over",
        "_key",
        "_loop",
        "_most_bytes",
        "_on_heartbeat",
        "_said",
        "_thread_id",
        "_work",
        "details",
    )

    def __init__(
        self, work: Work, on_heartbeat: OnHeartbeat, key: str = "", most_bytes: int = Limits().value_bytes
    ) -> None:
        self.details: Any = None if work.details is NULL else codec.decode(work.details, Any)
        self._work = work
        self._on_heartbeat = on_heartbeat
        self._key = key
        self._most_bytes = most_bytes
        self._loop = asyncio.get_running_loop()
        self._thread_id = get_ident()
        self._extend: Callable[[], None] | None = None
        self._said: Details = UNSET
        self._is_announced = False
        self._is_over = False

    @property
    def run_id(self) -> str:
        """The run that called the activity."""
        return self._work.run_id

    @property
    def step_id(self) -> str:
        """The step in which it was called: together with `run_id` a key that is the same for every attempt."""
        return self._work.step.step_id

    @property
    def attempt(self) -> int:
        """How often the step has been tried, counted from 1."""
        return self._work.step.attempt

    def heartbeat(self, details: Any = UNSET) -> None:
        """Say that the work goes on, from the loop or from a thread; details are kept for a next attempt, anywhere.

        Raises `asyncio.CancelledError` once the attempt is over: that is how a function in a thread hears of it.
        """
        if self._is_over:
            raise asyncio.CancelledError(f"attempt {self.attempt} of step {self.step_id} is over")
        if details is not UNSET:
            what = f"the progress of activity {self._work.definition.name!r}"
            self._said = codec.bounded(codec.encode(details), self._most_bytes, what)
            self.details = details
        if self._thread_id == get_ident():
            self._go_on()  # at once: the attempt may end before the loop comes round again
        elif not self._is_announced:  # however often a thread calls this, the loop hears of it once at a time
            self._is_announced = True
            self._loop.call_soon_threadsafe(self._go_on)

    @property
    def token(self) -> str:
        """The right to report the outcome of this attempt from outside, as text for a link or a message.

        Who has it may report one outcome, and nothing else; nobody can make it up. Treat it as a secret.
        """
        step = self._work.step
        of = ActivityToken(self.run_id, step.step_id, step.logical_attempt_id, step.engine_attempt_id)
        return write_activity_token(of, self._key)

    def complete_later(self) -> NoReturn:
        """End the activity without an outcome: whoever has its `token` reports it with `App.complete_activity`."""
        raise CompleteLater

    def close(self) -> None:
        """Note that the attempt is over."""
        self._is_over = True

    def _go_on(self) -> None:
        self._is_announced = False
        details, self._said = self._said, UNSET
        if self._extend is not None:
            self._extend()
        self._on_heartbeat(self._work, details)

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
            self._extend = None


_context: ContextVar[ActivityContext] = ContextVar("holdfast_activity")


def activity_context() -> ActivityContext:
    """Return the context of the activity that is running."""
    try:
        return _context.get()
    except LookupError:
        raise NotDurable("activity_context can only be used inside an activity that a workflow called") from None


def current_activity() -> ActivityContext | None:
    """Return the context of the activity that is running, or None outside of one."""
    return _context.get(None)


class ActivityExecutor:
    """Carries out activities in a node's slots, and reports how they ended."""

    def __init__(self, slots: Slots, report: Report, on_heartbeat: OnHeartbeat, rng: Rng, limits: Limits) -> None:
        self._slots = slots
        self._report = report
        self._on_heartbeat = on_heartbeat
        self._rng = rng
        self._attempts: dict[str, dict[str, _Attempt]] = {}
        self._pool = TaskPool(self.carry_out)
        self._most_bytes = limits.value_bytes
        self.key = ""
        """The store's key for tokens."""

    @property
    def busy(self) -> int:
        """How many activities are under way or waiting for a place."""
        return sum(len(steps) for steps in self._attempts.values())

    def steps_of(self, run_id: str) -> Collection[str]:
        """Return the steps of a run that are carried out here."""
        return self._attempts.get(run_id, ())

    def is_working_on(self, run_id: str, step_id: str) -> bool:
        """Say whether the step is carried out here."""
        return step_id in self._attempts.get(run_id, ())

    def start(self, work: Work, now: Instant) -> None:
        """Carry out a step as soon as there is a place, instead of an attempt of it that is still under way."""
        run_id, step_id = work.run_id, work.step.step_id
        if run_id in self._attempts:
            self.cancel(run_id, step_id)
        attempt = _Attempt(self._pool, work, now)
        self._attempts.setdefault(run_id, {})[step_id] = attempt
        self._slots.ask(attempt)

    def cancel(self, run_id: str, step_id: str | None = None) -> None:
        """Cancel the activity of a step, or all of a run."""
        steps = self._attempts.get(run_id)
        if steps:
            for of_step in [step_id] if step_id is not None else list(steps):
                attempt = self._forget(run_id, of_step)
                if attempt is not None:
                    attempt.cancel(self._slots)

    def withdraw(self) -> list[Work]:
        """Give up and return what has not begun: it waits for a place, or was just given one."""
        attempts = [attempt for steps in self._attempts.values() for attempt in steps.values() if not attempt.has_begun]
        for attempt in attempts:
            attempt.is_given_up = True  # first, so that no place that becomes free goes to one of them
        for attempt in attempts:
            self.cancel(attempt.work.run_id, attempt.work.step.step_id)
        return [attempt.work for attempt in attempts]

    def cancel_all(self) -> None:
        """Cancel everything that is under way."""
        for run_id in list(self._attempts):
            self.cancel(run_id)

    def _forget(self, run_id: str, step_id: str) -> "_Attempt | None":
        steps = self._attempts.get(run_id)
        attempt = steps.pop(step_id, None) if steps else None
        if not steps:
            self._attempts.pop(run_id, None)
        return attempt

    async def carry_out(self, attempt: "_Attempt") -> None:
        """Carry out an attempt, in the place that it was given, and report how it ended."""
        attempt.has_begun = True
        work = attempt.work
        is_without_limits = work.options.is_without_limits
        now, deadline = 0, None
        if not is_without_limits:
            now = attempt.started_at()
            deadline = _deadline(work, now)
        context = ActivityContext(work, self._on_heartbeat, self.key, self._most_bytes)
        before = _context.set(context)
        outcome: Outcome
        try:
            assert isinstance(work.step.body, StepStarted)
            arguments = work.definition.signature.unpack(work.step.body.input)
            if is_without_limits and work.definition.is_async:
                result = await work.definition.function(**arguments)
            else:
                result = await self._call_within_limits(attempt, context, arguments, deadline)
            step_id, logical_attempt_id = work.step.step_id, work.step.logical_attempt_id
            outcome = ActivitySucceeded(step_id, logical_attempt_id, self._encoded(work, result))
        except BaseException as problem:  # every failure of an activity is recorded in its run
            if _is_the_engines(problem, attempt):
                raise
            outcome = self._unsuccessful(work, problem, now, deadline)
        finally:
            context.close()
            self._slots.leave(attempt.thread, work.definition.name)
        try:
            _context.reset(before)
        except ValueError:  # whoever closes a coroutine half-way does it in a context of its own
            return
        steps = self._attempts.get(work.run_id)
        if steps is not None and steps.get(work.step.step_id) is attempt:
            self._forget(work.run_id, work.step.step_id)
        if not attempt.is_given_up:  # else nobody waits for it, and its run may be in the middle of a commit
            self._report(work, outcome)

    def _unsuccessful(self, work: Work, problem: BaseException, now: Instant, deadline: float | None) -> Outcome:
        step = work.step
        if _is_left_for_later(problem):
            until = _until(work, now)
            return ActivityDetached(step.step_id, step.logical_attempt_id, step.engine_attempt_id, until)
        retryable = is_mendable(problem) and _has_time_left(deadline)
        return ActivityErrored(
            step.step_id,
            step.logical_attempt_id,
            step.engine_attempt_id,
            error_info(problem, retryable=retryable),
            work.options.retry,
            self._rng.fraction(),
        )

    async def _call_within_limits(
        self, attempt: "_Attempt", context: ActivityContext, arguments: dict[str, Any], deadline: float | None
    ) -> Any:
        work = attempt.work
        limit_ms = work.options.timeout_ms
        if not _has_time_left(deadline):
            raise TimeoutError(too_late(work.step, work.options.schedule_to_close_ms))
        until = None if limit_ms is None else asyncio.get_running_loop().time() + limit_ms / 1_000
        if deadline is not None:
            until = deadline if until is None else min(until, deadline)
        limit = asyncio.timeout_at(until)
        try:
            async with limit, context.watched(work.options.heartbeat_timeout_ms):
                if work.definition.is_async:
                    return await work.definition.function(**arguments)
                attempt.thread = self._slots.run(partial(work.definition.function, **arguments))
                return await asyncio.wrap_future(attempt.thread)
        except TimeoutError:
            if limit.expired():
                took = f"activity {work.definition.name!r} took longer than {limit_ms} ms"
                late = too_late(work.step, work.options.schedule_to_close_ms)
                raise TimeoutError(late if until == deadline else took) from None
            raise

    def _encoded(self, work: Work, result: Any) -> Raw:
        try:
            raw = codec.encode(result)
            if len(raw) > self._most_bytes:
                codec.bounded(raw, self._most_bytes, f"the result of activity {work.definition.name!r}")
            work.definition.signature.result_of(raw)
            return raw
        except InvalidInput as problem:
            raise InvalidInput(f"the result of activity {work.definition.name!r}: {problem}") from problem


def unfit_options(step: OpenStep, problem: InvalidInput) -> ActivityErrored:
    """Return the outcome of a step whose recorded options nobody can read."""
    attempts = step.logical_attempt_id, step.engine_attempt_id
    return ActivityErrored(step.step_id, *attempts, error_info(problem), ActivityOptions().retry)


class _Attempt:
    """One attempt, from when it is asked for until it is over."""

    __slots__ = ("_asked_at", "_now", "_pool", "has_begun", "is_given_up", "is_placed", "task", "thread", "work")

    def __init__(self, pool: "TaskPool[_Attempt]", work: Work, now: Instant) -> None:
        self.work = work
        self.thread: Future[Any] | None = None
        self.task: asyncio.Task[None] | None = None
        self.is_placed = False
        self.has_begun = False
        self.is_given_up = False
        self._pool = pool
        self._now = now
        self._asked_at = 0.0 if work.options.is_without_limits else asyncio.get_running_loop().time()

    @property
    def name(self) -> str:
        """The step's id."""
        return self.work.step.step_id

    def begin(self) -> None:
        """Begin, now that there is a place."""
        self.is_placed = True
        self._pool.add(self)

    def started_at(self) -> Instant:
        """Return the store's time, as far as it is known here."""
        waited_s = asyncio.get_running_loop().time() - self._asked_at
        return self._now + round(waited_s * 1_000_000)

    def cancel(self, slots: Slots) -> None:
        """Give it up, whether it has begun or not."""
        self.is_given_up = True
        if self.task is not None:
            self.task.cancel()
        elif self.is_placed and not self.has_begun:  # nothing of it will ever run, not even what gives back its place
            slots.give_back()


def _is_left_for_later(problem: BaseException) -> bool:
    """Say whether an activity has ended by `complete_later`, also in one of its tasks."""
    try:
        if isinstance(problem, BaseExceptionGroup):
            return problem.subgroup(CompleteLater) is not None
    except RecursionError:  # a group that deep is a mistake
        return False
    return isinstance(problem, CompleteLater)


def _is_the_engines(problem: BaseException, attempt: "_Attempt") -> bool:
    """Say whether it was not the activity that raised this, but who carries it out."""
    return isinstance(problem, asyncio.CancelledError | GeneratorExit) and attempt.is_given_up


def _has_time_left(deadline: float | None) -> bool:
    return deadline is None or asyncio.get_running_loop().time() < deadline


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
