"""Traces: a run as OpenTelemetry spans, made from its history. Needs `holdfast[otel]`.

The ids of a run's trace and spans are derived from the run's ids. So the trace can be found from the run's id, no
context is propagated, and steps that were executed by many nodes are in one trace. The root links to the span of the
starter, which is named in the context of the run. The node that records the end of a run exports the rest of its trace.
For a long run, spans of finished steps are exported earlier, with a span of zero duration named `started` for the run
and for each open step. After a crash spans may be exported again, with the same ids.

Inside an activity the span of the step is current, so calls to traced libraries continue it. A verifier has its own
span below that of the step. The node that calls the verifier exports it immediately, because no history shows when the
verifier was called.
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import wraps
from typing import Any, NamedTuple, Protocol, cast

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SpanEvent
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags
from opentelemetry.util.types import Attributes, AttributeValue

from holdfast.clock import SystemClock, SystemIds
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.events import Event
from holdfast.core.redaction import Redactor
from holdfast.core.run_context import TRACE_KEY, is_traceparent, texts_of
from holdfast.core.state import TERMINAL
from holdfast.engine.activities.context import current_activity
from holdfast.engine.observe.metrics import observer_of
from holdfast.engine.runtime import Runtime
from holdfast.program.middleware import CallNext, ClientCall
from holdfast.program.secrets import current_redactor
from holdfast.registry import Registry
from holdfast.store.port import Store, Turn

logger = logging.getLogger("holdfast.traces")

_MARK = "__holdfast_traced__"
MOST_BEHIND = 10_000
"""How many finished runs may wait for the exporter before traces are lost."""

FAILED = (e.StepFailed, e.ChildFailed, e.RunFailed)
ATTEMPTS = {e.StepRetried: "retried", e.StepDetached: "detached", e.StepUnresolved: "unresolved"}
"""The events of an attempt after which its step continues, and their names in a span."""

LONG_S = 10.0
"""How long a run lasts before its first spans are exported, and the interval of later exports."""


def span_context(run_id: str, step_id: str = "") -> SpanContext:
    """Return the span context of a run, or of one of its steps. Children are in the trace of the topmost run."""
    root = run_id.partition("/")[0]
    return SpanContext(
        trace_id=int.from_bytes(_digest(root)[:16]),
        span_id=int.from_bytes(_digest(f"{run_id}|{step_id}")[16:24]),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def traceparent_of(span: SpanContext) -> str:
    """Return a span in the format of W3C Trace Context."""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags):02x}"


def span_of(traceparent: str) -> SpanContext | None:
    """Return the span that a W3C Trace Context text names, or None if it names none."""
    if not is_traceparent(traceparent):
        return None
    _, trace_id, span_id, flags = traceparent.split("-")
    span = SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16)))
    return span if span.is_valid else None


class RunSpans:
    """The spans of one run: one for itself, and one for each of its steps, waits, timers, tasks and children.

    It receives the history in parts, and keeps only what is still open.
    """

    def __init__(self, first: Event, resource: Resource) -> None:
        queued = first.data
        assert isinstance(queued, e.RunQueued)
        self.seq = 0
        """The last event that it has received."""
        self._resource = resource
        self._first = self._last = first
        self._name = f"run {queued.plan_id}"
        self._about = {"holdfast.run_id": first.run_id, "holdfast.workflow": queued.plan_id}
        self._above = span_context(queued.parent_run_id, queued.parent_step_id or "") if queued.parent_run_id else None
        starter = None if self._above or codec.holds_sealed(queued.context) else _starter(queued)
        self._links = () if starter is None else (Link(starter),)
        self._opened: dict[str, Event] = {}
        self._attempts: dict[str, list[SpanEvent]] = {}
        self._shown: set[str] = set()

    def take(self, events: Sequence[Event]) -> Iterator[ReadableSpan]:
        """Yield the spans of the steps that end with these events."""
        for event in events:
            self.seq, self._last, step_id = event.run_seq, event, event.step_id or ""
            if type(event.data) in e.OPENING:
                self._opened[step_id] = event
            elif type(event.data) in ATTEMPTS and step_id in self._opened:
                self._attempts.setdefault(step_id, []).append(_attempt(event))
            elif type(event.data) in e.CLOSING and step_id in self._opened:
                yield self._step(self._opened.pop(step_id), event)

    def so_far(self) -> Iterator[ReadableSpan]:
        """Yield spans of zero duration for everything open that was not exported before, the run itself first."""
        root = span_context(self._first.run_id)
        for step_id, begun in {"": self._first, **self._opened}.items():
            if step_id not in self._shown:
                self._shown.add(step_id)
                name, above = (self._step_name(begun), root) if step_id else (self._name, root)
                own = int.from_bytes(_digest(f"{begun.run_id}|{step_id}|started")[16:24])
                context = SpanContext(root.trace_id, own, True, root.trace_flags)
                about = {**self._about, "holdfast.step_id": step_id} if step_id else self._about
                yield self._span(f"{name} started", context, above, begun, begun, about, self._links)

    def end(self) -> Iterator[ReadableSpan]:
        """Yield the span of the finished run, and the spans of the steps that were still open."""
        root = span_context(self._first.run_id)
        yield self._span(self._name, root, self._above, self._first, self._last, self._about, self._links)
        for begun in self._opened.values():
            yield self._step(begun, self._last)

    def _step_name(self, begun: Event) -> str:
        return f"{begun.event_type.removesuffix('Started').lower()} {begun.step_id}"

    def _step(self, begun: Event, ended: Event) -> ReadableSpan:
        step_id = begun.step_id or ""
        more = {"holdfast.step_id": step_id, "holdfast.node": ended.engine_run_ref.node}
        if ended.caused_by_signal_id is not None:
            more["holdfast.signal_id"] = ended.caused_by_signal_id
        own, above = span_context(begun.run_id, step_id), span_context(begun.run_id)
        attempts = self._attempts.pop(step_id, ())
        return self._span(self._step_name(begun), own, above, begun, ended, {**self._about, **more}, (), attempts)

    def _span(
        self,
        name: str,
        context: SpanContext,
        above: SpanContext | None,
        begun: Event,
        ended: Event,
        about: dict[str, str],
        links: Sequence[Link] = (),
        attempts: Sequence[SpanEvent] = (),
    ) -> ReadableSpan:
        return _span(name, context, above, begun, ended, about, self._resource, links, attempts)


def _starter(queued: e.RunQueued) -> SpanContext | None:
    return span_of(texts_of(queued.context).get(TRACE_KEY, ""))


def _attempt(event: Event) -> SpanEvent:
    """Return the result of an attempt after which the step continued, as an event of the step's span."""
    about: dict[str, AttributeValue] = {"holdfast.node": event.engine_run_ref.node}
    if event.engine_attempt_id is not None:
        about["holdfast.attempt"] = event.engine_attempt_id
    if reason := getattr(event.data, "reason", ""):
        about["holdfast.reason"] = reason
    error = getattr(event.data, "error", None)
    if error is not None:
        about |= {"exception.type": error.code, "exception.message": error.message}
    return SpanEvent(ATTEMPTS[type(event.data)], about, event.emitted_at * 1_000)


def _span(
    name: str,
    context: SpanContext,
    above: SpanContext | None,
    begun: Event,
    ended: Event,
    about: dict[str, str],
    resource: Resource,
    links: Sequence[Link],
    attempts: Sequence[SpanEvent],
) -> ReadableSpan:
    failed = isinstance(ended.data, FAILED)
    error = getattr(ended.data, "error", None)
    description = f"{error}" if failed and error is not None else None
    return ReadableSpan(
        name=name,
        context=context,
        parent=above,
        resource=resource,
        attributes={**about, "holdfast.ended_by": ended.event_type} if ended is not begun else about,
        links=links,
        events=attempts,
        status=Status(StatusCode.ERROR, description) if failed else Status(StatusCode.UNSET),
        start_time=begun.emitted_at * 1_000,
        end_time=max(ended.emitted_at, begun.emitted_at) * 1_000,
    )


class _SoFar(NamedTuple):
    """An unfinished run with spans that were already exported."""

    run_id: str


class Tracing:
    """Sends the traces of runs that finish here to an exporter, in the background. Losing a trace loses no run."""

    def __init__(
        self, store: Store, exporter: SpanExporter, resource: Resource | None = None, long_s: float = LONG_S
    ) -> None:
        self._store = store
        self._exporter = exporter
        self.resource = resource or Resource.create()
        self._finished: asyncio.Queue[str | ReadableSpan | _SoFar] = asyncio.Queue(MOST_BEHIND)
        self._loop = asyncio.get_running_loop()
        self.lost = 0
        """How many runs have finished while the exporter was too far behind."""
        self._long_s = long_s
        self._unfinished: set[str] = set()
        self._has_unfinished = asyncio.Event()
        self._known: dict[str, RunSpans] = {}
        """The runs with spans that were exported before their end."""
        self._unsubscribe = observer_of(store).subscribe(self._note)
        self._tasks = [
            asyncio.create_task(self._work(), name="traces"),
            asyncio.create_task(self._show_long_runs(), name="traces of long runs"),
        ]

    def _note(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            if not turn.events:
                continue
            if turn.snapshot.status in TERMINAL:
                self._unfinished.discard(turn.run_id)
                self._put(turn.run_id)
            elif len(self._unfinished) < MOST_BEHIND:
                self._unfinished.add(turn.run_id)
                self._has_unfinished.set()

    async def _show_long_runs(self) -> None:
        """Export, periodically, what has happened in runs that were unfinished the last time."""
        before: set[str] = set()
        while True:
            await self._has_unfinished.wait()
            await asyncio.sleep(self._long_s)
            for run_id in before & self._unfinished:
                self._unfinished.discard(run_id)  # until it has another turn
                self._put(_SoFar(run_id))
            before = set(self._unfinished)
            if not before:
                self._has_unfinished.clear()

    def note_span(self, span: ReadableSpan) -> None:
        """Export a span that has ended, from any thread."""
        with suppress(RuntimeError):  # the loop is closed: the node has ended
            self._loop.call_soon_threadsafe(self._put, span)

    def _put(self, ended: "str | ReadableSpan | _SoFar") -> None:
        try:
            self._finished.put_nowait(ended)
        except asyncio.QueueFull:
            self.lost += 1
            if self.lost & (self.lost - 1) == 0:  # the first one, and each time that the number has doubled
                logger.warning("the exporter is too far behind; %d traces are lost so far", self.lost)

    async def _work(self) -> None:
        while True:
            ended = await self._finished.get()
            try:
                await self._export(ended)
            except Exception:  # an exporter is foreign code, and may raise anything
                name = ended if isinstance(ended, str) else getattr(ended, "name", "") or getattr(ended, "run_id", "")
                logger.warning("the trace of run %s is lost", name, exc_info=True)
            finally:
                self._finished.task_done()

    async def _export(self, ended: "str | ReadableSpan | _SoFar") -> None:
        if isinstance(ended, ReadableSpan):
            spans = [ended]
        else:
            spans = await self._read(ended) if isinstance(ended, str) else await self._read(ended.run_id, is_over=False)
        if spans:
            await asyncio.to_thread(self._exporter.export, spans)

    async def _read(self, run_id: str, *, is_over: bool = True) -> list[ReadableSpan]:
        """Return the spans of a run that were not exported yet."""
        known, spans = self._known.pop(run_id, None), list[ReadableSpan]()
        after = 0 if known is None else known.seq
        while page := await self._store.read_events(run_id, after):
            known = known or RunSpans(page[0], self.resource)
            spans += known.take(page)
            after = page[-1].run_seq
        if known is None:
            return []
        if is_over:
            return [*spans, *known.end()]
        if len(self._known) < MOST_BEHIND:
            self._known[run_id] = known
            spans += known.so_far()
        return spans

    async def stop(self) -> None:
        """Export what has finished so far, and stop."""
        self._unsubscribe()
        await self._finished.join()
        for task in self._tasks:
            task.cancel()


class RedactingSpanProcessor(SpanProcessor):
    """Passes spans to another processor, without the secrets of the activity in which they end.

    Use it for spans that activities make with tracers of their own. Put it around the processor that exports them:
    `provider.add_span_processor(hf.RedactingSpanProcessor(BatchSpanProcessor(exporter)))`.
    """

    def __init__(self, inner: SpanProcessor) -> None:
        self._inner = inner

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Report the start of a span to the other processor."""
        self._inner.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        """Pass a span that has ended on, redacted."""
        redactor = current_redactor()
        self._inner.on_end(span if redactor is None else _redacted(span, redactor))

    def shutdown(self) -> None:
        """Shut down the other processor."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Flush the other processor."""
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


async def carry_trace(call: ClientCall, call_next: CallNext[ClientCall]) -> Any:
    """Client middleware: the context of a run that is started names the current span, so that they are linked.

    `traced` adds it. In processes that only start runs: `app.middleware("client")(hf.carry_trace)`.
    """
    if call.verb == "start" and TRACE_KEY not in call.context:
        activity, span = current_activity(), trace.get_current_span().get_span_context()
        if not span.is_valid and activity is not None:  # the engine's own activity, by which a workflow starts others
            span = span_context(activity.run_id, activity.step_id)
        if span.is_valid:
            call = call.with_context(**{TRACE_KEY: traceparent_of(span)})
    return await call_next(call)


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
    """The part of an app that tracing needs."""

    registry: Registry

    def runtime(self) -> Runtime:
        """Return the app's runtime."""


@asynccontextmanager
async def traced(
    app: TracedApp, exporter: SpanExporter, resource: Resource | None = None, *, long_s: float = LONG_S
) -> AsyncIterator[None]:
    """Trace the runs of the app's open node, and make the step's span the current one inside activities.

    Started runs are linked to the current span. For a run that takes longer than `long_s`, spans are exported before it
    ends. See docs/observing.md.
    """
    starts = app.registry.middleware.client
    if carry_trace not in starts:
        starts.append(carry_trace)
    for definition in app.registry.activities.values():
        if not hasattr(definition.function, _MARK):
            definition.function = _within_step(definition.function, definition.is_async)
    tracing = Tracing(app.runtime().store, exporter, resource, long_s)
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
    """Return a verifier that runs in a span of its own below its step's, and exports that span."""

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
