"""Activities: functions with side effects, carried out on this node.

An activity is dispatched only after the commit that scheduled it is durable. Async functions run on the loop, others
in threads; how many run at once is bounded. How it ended is handed back as an input of the run's next turn: nothing
here writes to a store.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

from msgspec import Raw, Struct

from holdfast.core import codec
from holdfast.core.events import ErrorInfo, StepStarted
from holdfast.core.instants import Instant
from holdfast.core.messages import ActivityErrored, ActivitySucceeded
from holdfast.core.state import OpenStep
from holdfast.errors import HoldfastError, InvalidInput, NotDurable
from holdfast.ports import Rng
from holdfast.program.definitions import ActivityDefinition, ActivityOptions
from holdfast.program.failures import error_info

Outcome = ActivitySucceeded | ActivityErrored
Report = Callable[[str, Outcome], None]


class NonRetryable(HoldfastError):
    """Raise this, or a subclass, in an activity whose failure no retry can mend."""


class ActivityContext:
    """What an activity may know of itself, and say while it works."""

    def __init__(self, run_id: str, step: OpenStep) -> None:
        self.run_id = run_id
        self.step_id = step.step_id
        self.attempt = step.attempt
        self.details: Any = None
        self._loop = asyncio.get_running_loop()
        self._beat: Callable[[], None] = lambda: None

    def heartbeat(self, details: Any = None) -> None:
        """Say that the work goes on, from the loop or from a thread. The details are there for a next attempt here."""
        self.details = details
        self._loop.call_soon_threadsafe(self._beat)

    @asynccontextmanager
    async def watched(self, timeout_ms: int | None) -> AsyncIterator[None]:
        """End the work with `TimeoutError` if it does not say for so long that it goes on."""
        if timeout_ms is None:
            yield
            return
        silence_s = timeout_ms / 1_000
        try:
            async with asyncio.timeout(silence_s) as limit:
                self._beat = lambda: limit.reschedule(self._loop.time() + silence_s)
                yield
        except TimeoutError:
            if limit.expired():
                raise TimeoutError(f"no heartbeat within {timeout_ms} ms") from None
            raise
        finally:
            self._beat = lambda: None


_context: ContextVar[ActivityContext] = ContextVar("holdfast_activity")


def activity_context() -> ActivityContext:
    """Return the context of the activity that is running."""
    try:
        return _context.get()
    except LookupError:
        raise NotDurable("activity_context can only be used inside an activity that a workflow called") from None


class Job(Struct, frozen=True, gc=False):
    """One dispatch of one step."""

    run_id: str
    step: OpenStep
    definition: ActivityDefinition
    options: ActivityOptions


class Workers:
    """Carries out the activities of one node."""

    def __init__(self, most_at_once: int, report: Report, rng: Rng) -> None:
        self._slots = asyncio.Semaphore(most_at_once)
        self._report = report
        self._rng = rng
        self._tasks: dict[str, dict[str, asyncio.Task[None]]] = {}
        self._details: dict[tuple[str, str], Any] = {}

    @property
    def busy(self) -> int:
        """How many activities are under way or waiting for a slot."""
        return sum(len(steps) for steps in self._tasks.values())

    def steps_of(self, run_id: str) -> list[str]:
        """Return the steps of a run that this node carries out."""
        return list(self._tasks.get(run_id, ()))

    def is_working_on(self, run_id: str, step_id: str) -> bool:
        """Say whether this node carries out the step."""
        return step_id in self._tasks.get(run_id, ())

    def start(self, job: Job, now: Instant) -> None:
        """Begin to carry out a step."""
        run_id, step_id = job.run_id, job.step.step_id
        task = asyncio.create_task(self._work(job, now), name=f"activity {step_id}")
        self._tasks.setdefault(run_id, {})[step_id] = task

    def cancel(self, run_id: str, step_id: str | None = None) -> None:
        """Cancel the activity of a step, or all of a run."""
        for of_step in [step_id] if step_id is not None else list(self._tasks.get(run_id, ())):
            task = self._forget(run_id, of_step)
            if task is not None:
                task.cancel()

    def _forget(self, run_id: str, step_id: str) -> "asyncio.Task[None] | None":
        steps = self._tasks.get(run_id)
        task = steps.pop(step_id, None) if steps else None
        if not steps:
            self._tasks.pop(run_id, None)
        return task

    async def _work(self, job: Job, now: Instant) -> None:
        async with self._slots:
            outcome = await self._attempt(job, now)
        if self._tasks.get(job.run_id, {}).get(job.step.step_id) is asyncio.current_task():
            self._forget(job.run_id, job.step.step_id)
        self._report(job.run_id, outcome)

    async def _attempt(self, job: Job, now: Instant) -> Outcome:
        step, body = job.step, job.step.body
        assert isinstance(body, StepStarted)
        deadline = _deadline(job, now)
        try:
            arguments = job.definition.signature.unpack(body.input)
            result = await self._call(job, arguments, deadline)
            return ActivitySucceeded(step.step_id, step.logical_attempt_id, self._encoded(job, result))
        except InvalidInput as problem:
            return self._errored(job, error_info(problem))
        except NonRetryable as problem:
            return self._errored(job, error_info(problem))
        except (Exception, SystemExit) as problem:  # every failure of an activity is recorded in its run
            return self._errored(job, error_info(problem, retryable=self._has_time_left(deadline)))
        except asyncio.CancelledError as problem:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return self._errored(job, error_info(problem, retryable=self._has_time_left(deadline)))

    def _has_time_left(self, deadline: float | None) -> bool:
        return deadline is None or asyncio.get_running_loop().time() < deadline

    async def _call(self, job: Job, arguments: dict[str, Any], deadline: float | None) -> Any:
        key = (job.run_id, job.step.step_id)
        context = ActivityContext(job.run_id, job.step)
        context.details = self._details.pop(key, None)
        _context.set(context)
        if not self._has_time_left(deadline):
            raise TimeoutError(f"the step was not done within {job.options.schedule_to_close_ms} ms of being scheduled")
        limit_ms = job.options.timeout_ms
        until = None if limit_ms is None else asyncio.get_running_loop().time() + limit_ms / 1_000
        if deadline is not None:
            until = deadline if until is None else min(until, deadline)
        try:
            if until is None and job.options.heartbeat_timeout_ms is None and job.definition.is_async:
                return await job.definition.function(**arguments)
            async with asyncio.timeout_at(until), context.watched(job.options.heartbeat_timeout_ms):
                if job.definition.is_async:
                    return await job.definition.function(**arguments)
                return await asyncio.to_thread(job.definition.function, **arguments)
        except Exception:
            if context.details is not None:
                self._details[key] = context.details
            raise

    def _encoded(self, job: Job, result: Any) -> Raw:
        try:
            return codec.encode(result)
        except InvalidInput as problem:
            raise InvalidInput(f"the result of activity {job.definition.name!r}: {problem}") from problem

    def _errored(self, job: Job, error: ErrorInfo) -> ActivityErrored:
        step = job.step
        return ActivityErrored(
            step.step_id,
            step.logical_attempt_id,
            step.engine_attempt_id,
            error,
            job.options.retry,
            self._rng.fraction(),
        )


def _deadline(job: Job, now: Instant) -> float | None:
    """Return when, by the loop's clock, the step is to be done whatever the attempt, or None."""
    limit_ms = job.options.schedule_to_close_ms
    if limit_ms is None:
        return None
    left_us = job.step.opened_at + limit_ms * 1_000 - now
    return asyncio.get_running_loop().time() + left_us / 1_000_000
