"""Traces: a run as spans of OpenTelemetry, made from its history when it has finished. Needs `holdfast[otel]`.

A run's trace and spans have ids that follow from the run's own, so the trace follows from the run's id, nothing is
carried along, and steps that were carried out by many nodes come together. The node that records a run's end hands
its whole trace to the exporter. Inside an activity the step's span is the current one: what is called from there, and
knows of traces, goes on with it. A verifier has a span of its own below the step's, because no history shows when it
was asked; the node that asks it exports that span at once.
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import wraps
from typing import Any, Protocol, cast

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SpanEvent
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags
from opentelemetry.util.types import Attributes, AttributeValue

from holdfast.clock import SystemClock, SystemIds
from holdfast.core import events as e
from holdfast.core.events import Event
from holdfast.core.redaction import Redactor
from holdfast.core.state import TERMINAL
from holdfast.engine.activities.context import current_activity
from holdfast.engine.history import read_history
from holdfast.engine.observe.metrics import observer_of
from holdfast.engine.start.runtime import Runtime
from holdfast.program.secrets import current_redactor
from holdfast.registry import Registry
from holdfast.store.port import Store, Turn

logger = logging.getLogger("holdfast.traces")

_MARK = "__holdfast_traced__"
MOST_BEHIND = 10_000
"""How many finished runs wait for the exporter before traces are lost."""

FAILED = (e.StepFailed, e.ChildFailed, e.RunFailed)


def span_context(run_id: str, step_id: str = "") -> SpanContext:
    """Return the span of a run, or of one of its steps. Children are in the trace of the run above them all."""
    root = run_id.partition("/")[0]
    return SpanContext(
        trace_id=int.from_bytes(_digest(root)[:16]),
        span_id=int.from_bytes(_digest(f"{run_id}|{step_id}")[16:24]),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def spans_of(history: Sequence[Event], resource: Resource) -> Iterator[ReadableSpan]:
    """Return the spans of a run: one for itself, and one for each of its steps, waits, timers, tasks and children."""
    first, last = history[0], history[-1]
    queued = first.data
    assert isinstance(queued, e.RunQueued)
    above = span_context(queued.parent_run_id, queued.parent_step_id or "") if queued.parent_run_id else None
    about = {"holdfast.run_id": first.run_id, "holdfast.workflow": queued.plan_id}
    yield _span(f"run {queued.plan_id}", span_context(first.run_id), above, first, last, about, resource)
    opened: dict[str, Event] = {}
    for event in history:
        if type(event.data) in e.OPENING:
            opened[event.step_id or ""] = event
        elif type(event.data) in e.CLOSING and (event.step_id or "") in opened:
            yield _step(opened.pop(event.step_id or ""), event, about, resource)
    for event in opened.values():  # what was still open when the run ended
        yield _step(event, last, about, resource)


def _step(begun: Event, ended: Event, about: dict[str, str], resource: Resource) -> ReadableSpan:
    step_id = begun.step_id or ""
    name = f"{begun.event_type.removesuffix('Started').lower()} {step_id}"
    more = {"holdfast.step_id": step_id, "holdfast.node": ended.engine_run_ref.node}
    if ended.caused_by_signal_id is not None:
        more["holdfast.signal_id"] = ended.caused_by_signal_id
    return _span(
        name, span_context(begun.run_id, step_id), span_context(begun.run_id), begun, ended, {**about, **more}, resource
    )


def _span(
    name: str,
    context: SpanContext,
    above: SpanContext | None,
    begun: Event,
    ended: Event,
    about: dict[str, str],
    resource: Resource,
) -> ReadableSpan:
    failed = isinstance(ended.data, FAILED)
    error = getattr(ended.data, "error", None)
    description = f"{error.code}: {error.message}" if failed and error is not None else None
    return ReadableSpan(
        name=name,
        context=context,
        parent=above,
        resource=resource,
        attributes={**about, "holdfast.ended_by": ended.event_type},
        status=Status(StatusCode.ERROR, description) if failed else Status(StatusCode.UNSET),
        start_time=begun.emitted_at * 1_000,
        end_time=max(ended.emitted_at, begun.emitted_at) * 1_000,
    )


class Tracing:
    """Hands the traces of runs that finish here to an exporter, in the background. Losing one loses no run."""

    def __init__(self, store: Store, exporter: SpanExporter, resource: Resource | None = None) -> None:
        self._store = store
        self._exporter = exporter
        self.resource = resource or Resource.create()
        self._finished: asyncio.Queue[str | ReadableSpan] = asyncio.Queue(MOST_BEHIND)
        self._loop = asyncio.get_running_loop()
        self.lost = 0
        """How many runs have finished while the exporter was too far behind."""
        self._unsubscribe = observer_of(store).subscribe(self._note)
        self._task = asyncio.create_task(self._work(), name="traces")

    def _note(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            if turn.snapshot.status in TERMINAL and turn.events:
                self._put(turn.run_id)

    def note_span(self, span: ReadableSpan) -> None:
        """Export a span that has ended, in whatever thread."""
        with suppress(RuntimeError):  # the loop is closed: the node is gone
            self._loop.call_soon_threadsafe(self._put, span)

    def _put(self, ended: str | ReadableSpan) -> None:
        try:
            self._finished.put_nowait(ended)
        except asyncio.QueueFull:
            self.lost += 1
            if self.lost & (self.lost - 1) == 0:  # the first, and each time that it has doubled
                logger.warning("the exporter is too far behind; %d traces are lost so far", self.lost)

    async def _work(self) -> None:
        while True:
            ended = await self._finished.get()
            try:
                await self._export(ended)
            except Exception:  # an exporter is not ours, and may raise anything
                name = ended if isinstance(ended, str) else ended.name
                logger.warning("the trace of run %s is lost", name, exc_info=True)
            finally:
                self._finished.task_done()

    async def _export(self, ended: str | ReadableSpan) -> None:
        if isinstance(ended, str):
            history = await read_history(self._store, ended)
            spans = list(spans_of(history, self.resource)) if history else []
        else:
            spans = [ended]
        if spans:
            await asyncio.to_thread(self._exporter.export, spans)

    async def stop(self) -> None:
        """Hand out what has finished so far, and stop."""
        self._unsubscribe()
        await self._finished.join()
        self._task.cancel()


class RedactingSpanProcessor(SpanProcessor):
    """Hands spans on to another processor, redacted of the secrets of the activity in which they end.

    For the spans that activities, and what they call, make by a tracer of their own. Put it around the processor that
    exports them: `provider.add_span_processor(hf.RedactingSpanProcessor(BatchSpanProcessor(exporter)))`.
    """

    def __init__(self, inner: SpanProcessor) -> None:
        self._inner = inner

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Note that a span begins."""
        self._inner.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        """Hand on a span that has ended."""
        redactor = current_redactor()
        self._inner.on_end(span if redactor is None else _redacted(span, redactor))

    def shutdown(self) -> None:
        """Shut the other one down."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Flush the other one."""
        return self._inner.force_flush(timeout_millis)


def _redacted(span: ReadableSpan, redactor: Redactor) -> ReadableSpan:
    def clean(attributes: Attributes) -> dict[str, AttributeValue]:
        return {redactor.text(key): _redacted_attribute(value, redactor) for key, value in (attributes or {}).items()}

    said = span.status.description
    return ReadableSpan(
        name=redactor.text(span.name),
        context=span.context,
        parent=span.parent,
        resource=span.resource,
        attributes=clean(span.attributes),
        events=[SpanEvent(redactor.text(each.name), clean(each.attributes), each.timestamp) for each in span.events],
        links=[Link(each.context, clean(each.attributes)) for each in span.links],
        kind=span.kind,
        instrumentation_scope=span.instrumentation_scope,
        status=Status(span.status.status_code, redactor.text(said)) if said else span.status,
        start_time=span.start_time,
        end_time=span.end_time,
    )


def _redacted_attribute(value: AttributeValue, redactor: Redactor) -> AttributeValue:
    if isinstance(value, str):
        return redactor.text(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return cast(AttributeValue, [redactor.text(one) if isinstance(one, str) else one for one in value])
    return value


@contextmanager
def _in_step() -> Iterator[None]:
    activity = current_activity()
    if activity is None:
        yield
        return
    span = NonRecordingSpan(span_context(activity.run_id, activity.step_id))
    with trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
        yield


class TracedApp(Protocol):
    """What tracing needs of an app."""

    registry: Registry

    def runtime(self) -> Runtime:
        """Return what it has open."""


@asynccontextmanager
async def traced(app: TracedApp, exporter: SpanExporter, resource: Resource | None = None) -> AsyncIterator[None]:
    """Trace the runs that finish on the node that an app has open, and let activities know their step's span."""
    for definition in app.registry.activities.values():
        if not hasattr(definition.function, _MARK):
            definition.function = _within_step(definition.function, definition.is_async)
    tracing = Tracing(app.runtime().store, exporter, resource)
    verifiers = [each.verifier for each in app.registry.activities.values() if each.verifier is not None]
    functions = [verifier.function for verifier in verifiers]
    for verifier in verifiers:
        verifier.function = _traced_verifier(verifier.function, verifier.is_async, tracing)
    try:
        yield
    finally:
        for verifier, function in zip(verifiers, functions, strict=True):
            verifier.function = function
        await tracing.stop()


def _traced_verifier(function: Callable[..., Any], is_async: bool, tracing: Tracing) -> Callable[..., Any]:
    """Return a verifier that is current as a span below its step's while it looks, and exports it."""

    @contextmanager
    def verification() -> Iterator[Callable[[Any], Any]]:
        activity = current_activity()
        assert activity is not None, "a verifier has the context of its activity"
        step = span_context(activity.run_id, activity.step_id)
        span_id = int.from_bytes(_digest(f"{activity.run_id}|{activity.step_id}|{SystemIds().new_id()}")[16:24])
        context = SpanContext(step.trace_id, span_id, True, step.trace_flags)
        about: dict[str, AttributeValue] = {
            "holdfast.run_id": activity.run_id,
            "holdfast.step_id": activity.step_id,
            "holdfast.attempt": activity.engine_attempt_id,
        }
        clock = SystemClock()
        began, status = clock.now(), Status(StatusCode.UNSET)

        def keep(verdict: Any) -> Any:
            about["holdfast.verdict"] = type(verdict).__name__
            return verdict

        try:
            with trace.use_span(NonRecordingSpan(context), record_exception=False, set_status_on_exception=False):
                yield keep
        except BaseException as problem:
            status = Status(StatusCode.ERROR, f"{type(problem).__name__}: {problem}")
            raise
        finally:
            span = ReadableSpan(
                name=f"verify {activity.step_id}",
                context=context,
                parent=step,
                resource=tracing.resource,
                attributes=about,
                status=status,
                start_time=began * 1_000,
                end_time=max(clock.now(), began) * 1_000,
            )
            redactor = current_redactor()
            tracing.note_span(span if redactor is None else _redacted(span, redactor))

    if is_async:

        @wraps(function)
        async def ask(*args: Any, **kwargs: Any) -> Any:
            with verification() as keep:
                return keep(await function(*args, **kwargs))

        return ask

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with verification() as keep:
            return keep(function(*args, **kwargs))

    return call


def _within_step(function: Callable[..., Any], is_async: bool) -> Callable[..., Any]:
    if is_async:

        @wraps(function)
        async def run(*args: Any, **kwargs: Any) -> Any:
            with _in_step():
                result: Coroutine[Any, Any, Any] = function(*args, **kwargs)
                return await result

        setattr(run, _MARK, True)
        return run

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _in_step():
            return function(*args, **kwargs)

    setattr(call, _MARK, True)
    return call
