"""Executes activities on this node.

An activity is dispatched only after the commit that scheduled it is durable. Async functions run on the event loop,
others in threads of the node; the number of concurrent activities is bounded. The outcome is passed to the caller that
requested it: nothing here writes to a store.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.clock import Rng
from holdfast.core import codec
from holdfast.core.events import NULL, StepStarted
from holdfast.core.instants import Instant
from holdfast.core.keyed_steps import NOT_COMPLETED
from holdfast.core.keys import CALLBACK
from holdfast.core.messages import ActivityDetached, ActivityErrored, ActivitySucceeded
from holdfast.core.reconciliation import indeterminate, not_completed
from holdfast.core.state import OpenStep
from holdfast.core.timing import overdue_text
from holdfast.engine.activities.context import (
    CONTEXT,
    ActivityContext,
    ArtifactAccess,
    CompleteLater,
    OnHeartbeat,
    Outcome,
    Work,
    is_mendable,
)
from holdfast.engine.activities.secrets import resolve_secrets
from holdfast.engine.activities.slots import Slots
from holdfast.engine.activities.streams import StreamAccess
from holdfast.engine.activities.task_pool import TaskPool
from holdfast.engine.activities.verification import CALL, Found, ask, before_asking, delay_before_asking_again_ms
from holdfast.errors import InvalidInput
from holdfast.limits import RESULT_SCHEMA_BYTES, Limits
from holdfast.program.definitions import ActivityDefinition, ActivityOptions
from holdfast.program.middleware import ActivityCall, Middleware, call_through
from holdfast.program.outcomes import attempt_error, error_info
from holdfast.program.secrets import ResolvedSecrets, SecretProvider, SecretScope, references_in

logger = logging.getLogger("holdfast.activities")

Report = Callable[[Work, Outcome], None]


class ActivityExecutor:
    """Executes activities in a node's slots, and reports how they ended."""

    def __init__(
        self,
        slots: Slots,
        report: Report,
        on_heartbeat: OnHeartbeat,
        rng: Rng,
        limits: Limits,
        provider: SecretProvider | None = None,
        middleware: Sequence[Middleware[ActivityCall]] = (),
    ) -> None:
        self._slots = slots
        self._report = report
        self._on_heartbeat = on_heartbeat
        self._rng = rng
        self.attempts: dict[str, dict[str, _Attempt]] = {}
        """The attempts that are running here, by run and step."""
        self._pool = TaskPool(self.carry_out)
        self._most_bytes = limits.value_bytes
        self._provider = provider
        self._middleware = middleware
        self.key = ""
        """The store's key for tokens."""
        self.artifacts: ArtifactAccess | None = None
        """Where activities keep artifacts, if there is artifact storage."""
        self.streams: StreamAccess | None = None
        """How activities reach the streams of their runs."""

    @property
    def busy(self) -> int:
        """How many activities are running or waiting for a slot."""
        return sum(len(steps) for steps in self.attempts.values())

    def is_working_on(self, run_id: str, step_id: str) -> bool:
        """Return whether the step is being executed here."""
        return step_id in self.attempts.get(run_id, ())

    def start(self, work: Work, now: Instant) -> None:
        """Execute a step as soon as there is a slot. This replaces an attempt of it that is still running."""
        run_id, step_id = work.run_id, work.step.step_id
        if run_id in self.attempts:
            self.cancel(run_id, step_id)
        has_limits = not work.options.is_without_limits
        attempt = _Attempt(work, step_id, self._pool, now, has_limits)
        if has_limits:
            attempt._asked_at = asyncio.get_running_loop().time()
        self.attempts.setdefault(run_id, {})[step_id] = attempt
        if work.definition.takes_slot:
            self._slots.ask(attempt)
        else:
            self._pool.add(attempt)

    def cancel(self, run_id: str, step_id: str | None = None) -> None:
        """Cancel the activity of a step, or all activities of a run."""
        steps = self.attempts.get(run_id)
        if steps:
            for of_step in [step_id] if step_id is not None else list(steps):
                attempt = self._forget(run_id, of_step)
                if attempt is not None:
                    attempt.cancel(self._slots)

    def withdraw(self) -> list[Work]:
        """Withdraw and return the attempts that have not begun: they wait for a slot, or were just given one."""
        attempts = [attempt for steps in self.attempts.values() for attempt in steps.values() if not attempt.has_begun]
        for attempt in attempts:
            attempt.is_given_up = True  # first, so that no slot that becomes free is given to one of them
        for attempt in attempts:
            self.cancel(attempt.work.run_id, attempt.work.step.step_id)
        return [attempt.work for attempt in attempts]

    def cancel_all(self) -> None:
        """Cancel everything that is running."""
        for run_id in list(self.attempts):
            self.cancel(run_id)

    async def end(self, timeout_s: float) -> int:
        """Wait up to this time for cancelled activities; return how many have ignored their cancellation."""
        return await self._pool.end(timeout_s)

    def _forget(self, run_id: str, step_id: str) -> "_Attempt | None":
        steps = self.attempts.get(run_id)
        attempt = steps.pop(step_id, None) if steps else None
        if not steps:
            self.attempts.pop(run_id, None)
        return attempt

    async def carry_out(self, attempt: "_Attempt") -> None:
        """Execute an attempt in its slot, and report the outcome."""
        attempt.has_begun = True
        work = attempt.work
        step = work.step
        definition = work.definition
        now, deadline = 0, None
        if attempt.has_limits:
            now = attempt.started_at()
            deadline = _deadline(work, now)
        assert attempt.task is not None
        loop = attempt.task.get_loop()
        details = None if work.details is NULL else codec.decode(work.details, Any)
        context = ActivityContext(
            work, loop, self._on_heartbeat, self.key, self._most_bytes, self.artifacts, self.streams, details
        )
        attempt.context = context
        before = CONTEXT.set(context)
        outcome: Outcome
        try:
            body = step.body
            assert type(body) is StepStarted
            verified = None if step.effect is None else await self._verify(attempt, context, deadline)
            if verified is None:
                arguments = definition.signature.unpack(body.input)
                if not attempt.has_limits and definition.is_async and not work.needs_secrets and not self._middleware:
                    result = await definition.function(**arguments)
                else:
                    result = await self._call_within_limits(attempt, context, arguments, deadline)
                raw, artifacts = self._encoded(work, result, context.secrets), tuple(context.artifacts)
                outcome = ActivitySucceeded(step.step_id, step.logical_attempt_id, raw, artifacts=artifacts)
            else:
                outcome = verified
        except BaseException as problem:  # every failure of an activity is recorded in its run
            if _is_the_engines(problem, attempt):
                raise
            outcome = self._unsuccessful(work, problem, now, deadline, context.secrets)
        finally:
            context.close()
            if attempt.has_slot:
                self._slots.leave(attempt.thread, definition.name)
        try:
            if context.secrets is not None:
                context.leave()
            CONTEXT.reset(before)
        except ValueError:  # the coroutine was closed halfway, in another context
            return
        if context.streams is not None and not attempt.is_given_up:
            await context.flush_streams()
        if not attempt.is_given_up:  # otherwise no turn waits for it, and its run may be in the middle of a commit
            self._forget(work.run_id, step.step_id)
            self._report(work, outcome)

    async def _verify(self, attempt: "_Attempt", context: ActivityContext, deadline: float | None) -> Outcome | None:
        """Ask the verifier of a keyed step with an unknown effect; return None if the function must be called.

        Until the verifier has answered, the attempt counts as not begun.
        """
        work = attempt.work
        assert work.step.effect is not None
        if not work.step.effect.must_verify:
            return None

        def in_thread(call: Callable[[], Any]) -> "Future[Any]":
            attempt.thread = self._slots.run(call)
            return attempt.thread

        async def enter(arguments: dict[str, Any]) -> None:
            if work.needs_secrets and context.secrets is None:  # otherwise they were resolved for the verifier before
                context.enter(await secrets_of(work, arguments, self._provider))

        def encode(work: Work, result: Any) -> Raw:
            return self._encoded(work, result, context.secrets)

        attempt.has_begun = False
        try:
            found = before_asking(work) or await ask(work, enter, in_thread, encode, context.redact)
            asked = 1
            while (delay_ms := delay_before_asking_again_ms(work, found, asked, self._rng.fraction())) is not None:
                if not _has_time_left(deadline, delay_ms / 1_000):
                    break
                logger.warning(
                    "run %s: the verifier of step %s failed, and is retried in %d ms: %s",
                    *(work.run_id, work.step.step_id, delay_ms, found.error and found.error.message),
                )
                await self._wait_outside(attempt, delay_ms / 1_000)
                found = await ask(work, enter, in_thread, encode, context.redact)
                asked += 1
        except asyncio.CancelledError:
            if attempt.is_given_up:
                raise
            found = Found(error=indeterminate("the verifier was cancelled"))
        finally:
            attempt.has_begun = True
        if found is CALL:
            if _has_time_left(deadline):
                return None
            overdue = TimeoutError(overdue_text(work.step, work.options.schedule_to_close_ms))
            found = Found(error=not_completed(error_info(overdue)))
        return _verified(work, found)

    async def _wait_outside(self, attempt: "_Attempt", seconds: float) -> None:
        """Wait without a slot, then get one again."""
        self._slots.leave(attempt.thread, attempt.work.definition.name)
        attempt.thread, attempt.has_slot = None, False
        await asyncio.sleep(seconds)
        back = _ComingBack(asyncio.get_running_loop().create_future())
        self._slots.ask(back)
        try:
            await back.slot
        except asyncio.CancelledError:
            back.is_given_up = True
            if back.has_slot:
                self._slots.give_back()
            raise
        attempt.has_slot = True

    def _unsuccessful(
        self,
        work: Work,
        problem: BaseException,
        now: Instant,
        deadline: float | None,
        secrets: ResolvedSecrets | None,
    ) -> Outcome:
        step = work.step
        if _is_left_for_later(problem):
            until, schema = _until(work, now), _result_schema(work.definition)
            return ActivityDetached(step.step_id, step.logical_attempt_id, step.engine_attempt_id, until, schema)
        retryable = is_mendable(problem) and _has_time_left(deadline) and work.definition.is_retried(problem)
        error = attempt_error(problem, retryable=retryable, redact=None if secrets is None else secrets.redactor.text)
        if secrets is None and work.needs_secrets and step.key is not None:
            error = replace(error, category=NOT_COMPLETED)  # the function was not called
        return ActivityErrored(
            step.step_id,
            step.logical_attempt_id,
            step.engine_attempt_id,
            error,
            work.options.retry,
            self._rng.fraction(),
        )

    async def _call_within_limits(
        self, attempt: "_Attempt", context: ActivityContext, arguments: dict[str, Any], deadline: float | None
    ) -> Any:
        work = attempt.work
        limit_ms = work.options.timeout_ms
        if not _has_time_left(deadline):
            raise TimeoutError(overdue_text(work.step, work.options.schedule_to_close_ms))
        until = None if limit_ms is None else asyncio.get_running_loop().time() + limit_ms / 1_000
        if deadline is not None:
            until = deadline if until is None else min(until, deadline)
        limit = asyncio.timeout_at(until)
        try:
            async with limit:
                if work.needs_secrets and context.secrets is None:  # otherwise its verifier has resolved them
                    context.enter(await secrets_of(work, arguments, self._provider))
                async with context.watched(work.options.heartbeat_timeout_ms):
                    if self._middleware:
                        return await self._call_through_middleware(attempt, arguments)
                    return await self._call(attempt, arguments)
        except TimeoutError:
            if limit.expired():
                took = f"activity {work.definition.name!r} took longer than {limit_ms} ms"
                late = overdue_text(work.step, work.options.schedule_to_close_ms)
                raise TimeoutError(late if until == deadline else took) from None
            raise

    async def _call(self, attempt: "_Attempt", arguments: dict[str, Any]) -> Any:
        function = attempt.work.definition.function
        if attempt.work.definition.is_async:
            return await function(**arguments)
        attempt.thread = self._slots.run(partial(function, **arguments))
        return await asyncio.wrap_future(attempt.thread)

    async def _call_through_middleware(self, attempt: "_Attempt", arguments: dict[str, Any]) -> Any:
        work = attempt.work
        call = ActivityCall(
            activity=work.definition.name,
            run_id=work.run_id,
            step_id=work.step.step_id,
            attempt=work.step.attempt,
            arguments=arguments,
        )
        return await call_through(self._middleware, call, lambda call: self._call(attempt, call.arguments))

    def _encoded(self, work: Work, result: Any, secrets: ResolvedSecrets | None) -> Raw:
        try:
            raw = work.definition.values.encode(result)
            if secrets is not None:
                raw = secrets.redactor.json(raw)  # a value that no longer fits its type fails the step
            if len(raw) > self._most_bytes:
                codec.bounded(raw, self._most_bytes, f"the result of activity {work.definition.name!r}")
            if secrets is not None or type(result) is not work.definition.signature.plain_result:
                work.definition.signature.result_of(raw)
            return raw
        except InvalidInput as problem:
            what = f"the result of activity {work.definition.name!r}"
            if problem.message.startswith(what):
                raise
            raise InvalidInput(f"{what}: {problem}") from problem


def _verified(work: Work, found: Found) -> Outcome:
    """Return the outcome of an attempt that did not call the function, from what its verifier has found."""
    step = work.step
    if found.error is None:
        return ActivitySucceeded(step.step_id, step.logical_attempt_id, found.result or NULL, confirmed_by="verifier")
    attempts = step.logical_attempt_id, step.engine_attempt_id
    return ActivityErrored(step.step_id, *attempts, found.error, work.options.retry)


async def secrets_of(work: Work, arguments: dict[str, Any], provider: SecretProvider | None) -> ResolvedSecrets:
    """Return the resolved secrets of an attempt: those among its arguments, and those that its options name."""
    references = (*references_in(arguments), *work.options.secrets)
    return await resolve_secrets(provider, references, SecretScope(work.tenant, work.environment))


def unfit_options(step: OpenStep, problem: InvalidInput) -> ActivityErrored:
    """Return the outcome of a step whose recorded options cannot be read."""
    attempts = step.logical_attempt_id, step.engine_attempt_id
    return ActivityErrored(step.step_id, *attempts, error_info(problem), ActivityOptions().retry)


class _Attempt(Struct, eq=False):
    """One attempt, from the request for it until it is over."""

    work: Work
    name: str
    """The step's id."""
    _pool: "TaskPool[_Attempt]"
    _now: Instant
    has_limits: bool
    _asked_at: float = 0.0
    thread: "Future[Any] | None" = None
    task: "asyncio.Task[None] | None" = None
    has_slot: bool = False
    has_begun: bool = False
    is_given_up: bool = False
    context: ActivityContext | None = None

    def begin(self) -> None:
        """Begin, with the slot that it was given."""
        self.has_slot = True
        self._pool.add(self)

    def started_at(self) -> Instant:
        """Return the store's time, as far as it is known here."""
        waited_s = asyncio.get_running_loop().time() - self._asked_at
        return self._now + round(waited_s * 1_000_000)

    def cancel(self, slots: Slots) -> None:
        """Abandon it, whether it has begun or not."""
        self.is_given_up = True
        if self.context is not None:
            self.context.close_streams()
        if self.task is not None:
            self.task.cancel()
        elif self.has_slot and not self.has_begun:  # none of its code will ever run, not even to free its slot
            slots.give_back()


class _ComingBack:
    """An attempt that waits for a slot again."""

    def __init__(self, slot: "asyncio.Future[None]") -> None:
        self.slot = slot
        self.is_given_up = False
        self.has_slot = False

    def begin(self) -> None:
        """Continue, with the slot that it was given."""
        self.has_slot = True
        if not self.slot.done():
            self.slot.set_result(None)


def _is_left_for_later(problem: BaseException) -> bool:
    """Return whether an activity has ended by `complete_later`, also in one of its tasks."""
    try:
        if isinstance(problem, BaseExceptionGroup):
            return problem.subgroup(CompleteLater) is not None
    except RecursionError:  # a group nested that deeply is a mistake
        return False
    return isinstance(problem, CompleteLater)


def _is_the_engines(problem: BaseException, attempt: "_Attempt") -> bool:
    """Return whether the engine raised this by cancelling the activity, and not the activity itself."""
    return isinstance(problem, asyncio.CancelledError | GeneratorExit) and attempt.is_given_up


def _has_time_left(deadline: float | None, after_s: float = 0.0) -> bool:
    return deadline is None or asyncio.get_running_loop().time() + after_s < deadline


def _deadline(work: Work, now: Instant) -> float | None:
    """Return the time, by the loop's clock, at which the step must be done, whatever the attempt; or None."""
    limit_ms = work.options.schedule_to_close_ms
    if limit_ms is None:
        return None
    left_us = work.step.opened_at + limit_ms * 1_000 - now
    return asyncio.get_running_loop().time() + left_us / 1_000_000


def _result_schema(definition: ActivityDefinition) -> dict[str, Any] | None:
    """Return the recorded type of a result that is reported later; None if it may be anything."""
    if definition.name == CALLBACK or definition.signature.result_type is Any:
        return None
    _, schema = definition.signature.schemas()
    return schema if len(codec.encode(schema)) <= RESULT_SCHEMA_BYTES else None


def _until(work: Work, now: Instant) -> Instant | None:
    """Return when an attempt that began now must be done, or None."""
    limits = []
    if work.options.timeout_ms is not None:
        limits.append(now + work.options.timeout_ms * 1_000)
    if work.options.schedule_to_close_ms is not None:
        limits.append(work.step.opened_at + work.options.schedule_to_close_ms * 1_000)
    return min(limits, default=None)
