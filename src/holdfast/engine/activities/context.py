"""The context of an activity: the attempt, the errors that it may raise, and what it reports.

Through its context an activity sends heartbeats and progress, and declares that its outcome is reported later. Nothing
here writes to a store.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar, Token
from datetime import timedelta
from functools import partial
from threading import get_ident
from typing import Any, NoReturn

from msgspec import UNSET, Raw, Struct, UnsetType, field

from holdfast.core import codec
from holdfast.core.events import NULL, ArtifactRef
from holdfast.core.instants import Instant
from holdfast.core.keys import ActivityToken, require_step_name, write_activity_token
from holdfast.core.messages import ActivityDetached, ActivityErrored, ActivitySucceeded
from holdfast.core.run_context import texts_of
from holdfast.core.state import OpenStep
from holdfast.core.streams import StreamAppend
from holdfast.engine.activities.streams import ActivityStream, StreamAccess
from holdfast.errors import (
    CheckpointOwnershipCapabilityError,
    Conflict,
    HoldfastError,
    InvalidInput,
    NotDurable,
    PayloadTooLarge,
    SecretNotFound,
)
from holdfast.limits import STREAMS_PER_WRITER, Limits
from holdfast.program.callbacks import CallbackRef
from holdfast.program.coroutine import current_program
from holdfast.program.definitions import ActivityDefinition, ActivityOptions
from holdfast.program.secrets import ResolvedSecrets, enter_secrets, leave_secrets
from holdfast.program.streams import Stream, WorkflowStream, bounded_chunk
from holdfast.store.artifacts import Artifacts, Source

Outcome = ActivitySucceeded | ActivityErrored | ActivityDetached
Details = Raw | UnsetType
"""The progress that an activity reports, or UNSET if it only reports that it is still running."""


class NonRetryable(HoldfastError):
    """Raise this, or a subclass, in an activity if no retry can fix the failure."""


class RetryAfter(HoldfastError):
    """Raise this, or a subclass, in an activity to set when it is retried: `raise RetryAfter(30) from error`.

    The delay, in seconds or as a timedelta, replaces the one of the policy; its attempts count as usual. The text of an
    HTTP header with seconds is such a delay too. Any other exception with such a `retry_after` does the same.
    """

    def __init__(self, retry_after: timedelta | float | str, message: str = "") -> None:
        super().__init__(message or f"try again after {retry_after}")
        self.retry_after = retry_after


class CompleteLater(BaseException):
    """Raised by `complete_later` to end an activity without an outcome."""


def is_mendable(problem: BaseException) -> bool:
    """Return whether a retry may help, as far as the error itself shows."""
    if isinstance(problem, SecretNotFound):
        return problem.retryable
    return not isinstance(problem, NonRetryable | InvalidInput | PayloadTooLarge | CheckpointOwnershipCapabilityError)


class Work(Struct, frozen=True):  # the garbage collector tracks it: through its function it can reach its own node
    """One attempt of one step, to be executed. `details` is the progress that earlier attempts have reported."""

    run_id: str
    step: OpenStep
    definition: ActivityDefinition
    options: ActivityOptions
    details: Raw = NULL
    tenant: str = ""
    environment: str = ""
    context: Raw = NULL
    """The context of the run."""

    @property
    def needs_secrets(self) -> bool:
        """Whether secrets must be resolved before the function is called."""
        return self.definition.takes_secrets or self.options.secrets != ()


class ArtifactAccess(Struct, frozen=True):
    """Where activities keep artifacts, and the store's time."""

    artifacts: Artifacts
    place: str
    now: Callable[[], Awaitable[Instant]]


OnHeartbeat = Callable[[Work, Details], None]


class ActivityContext(Struct, eq=False):
    """What an activity can read about itself, and report while it runs."""

    _work: Work
    _loop: asyncio.AbstractEventLoop
    _on_heartbeat: OnHeartbeat
    _key: str = ""
    _most_bytes: int = Limits().value_bytes
    _artifact_access: ArtifactAccess | None = None
    _stream_access: "StreamAccess | None" = None
    details: Any = None
    """The progress that earlier attempts, or this one, reported last."""
    artifacts: list[ArtifactRef] = []
    """The artifacts that this attempt has stored: those of the step, if it succeeds."""
    _thread_id: int = field(default_factory=get_ident)
    _extend: Callable[[], None] | None = None
    _reported: Details = UNSET
    _is_announced: bool = False
    _is_over: bool = False
    _writes_no_more: bool = False
    _entered: Token[ResolvedSecrets | None] | None = None
    secrets: ResolvedSecrets | None = None
    """The values of the secrets that the attempt was given, with tokens; None if it has none."""
    streams: "dict[str, ActivityStream] | None" = None
    """The streams that this attempt writes to; None if it writes to none."""

    @property
    def run_id(self) -> str:
        """The run that called the activity."""
        return self._work.run_id

    @property
    def step_id(self) -> str:
        """The step that called it. Together with `run_id` it is a key that is the same for every attempt."""
        return self._work.step.step_id

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self._work.step.attempt

    @property
    def idempotency_key(self) -> str | None:
        """The idempotency key of the call, to pass to the outside system. None if it has none."""
        return self._work.step.key

    @property
    def logical_attempt_id(self) -> int:
        """How often operators have retried the step, from 1. Retries by the policy do not change it."""
        return self._work.step.logical_attempt_id

    @property
    def engine_attempt_id(self) -> int:
        """The number of this dispatch of the step. It grows with each one, whatever the reason."""
        return self._work.step.engine_attempt_id

    @property
    def tenant(self) -> str:
        """The tenant of the run."""
        return self._work.tenant

    @property
    def environment(self) -> str:
        """The environment of the run."""
        return self._work.environment

    @property
    def run_context(self) -> dict[str, str]:
        """The context of the run, as its starter set it."""
        return texts_of(self._work.context)

    def heartbeat(self, details: Any = UNSET) -> None:
        """Report that the activity is still running, from the loop or a thread. The next attempt gets the details.

        Raises `asyncio.CancelledError` once the attempt is over, so that a function in a thread notices it.
        """
        if self._is_over:
            raise asyncio.CancelledError(f"attempt {self.attempt} of step {self.step_id} is over")
        if details is not UNSET:
            what = f"the progress of activity {self._work.definition.name!r}"
            encoded = self._work.definition.values.encode(details)
            if self.secrets is not None:
                encoded = self.secrets.redactor.json(encoded)
            self._reported = codec.bounded(encoded, self._most_bytes, what)
            self.details = details
        if self._thread_id == get_ident():
            self._go_on()  # immediately: the attempt may end before the next iteration of the loop
        elif not self._is_announced:  # however often a thread calls this, only one call is scheduled on the loop
            self._is_announced = True
            self._loop.call_soon_threadsafe(self._go_on)

    @property
    def token(self) -> str:
        """The right to report the outcome of this attempt from outside, as text for a link or a message.

        Its holder may report one outcome, and nothing else. It cannot be guessed. Treat it as a secret: it is redacted
        from what the activity returns, raises and reports.
        """
        step = self._work.step
        of = ActivityToken(self.run_id, step.step_id, step.logical_attempt_id, step.engine_attempt_id, step.opened_at)
        return self._secret_token(of, "token")

    def callback_token(self, ref: CallbackRef) -> str:
        """Return the right to report one outcome of a callback of this run. Treat it as a secret, like `token`.

        For a callback of another run it makes a token that no run accepts.
        """
        return self._secret_token(ActivityToken(self.run_id, ref.step_id, 0, 0, ref.opened_at), "callback token")

    def _secret_token(self, of: ActivityToken, name: str) -> str:
        """Return a token that is redacted from now on in what the attempt returns, raises and reports."""
        token = write_activity_token(of, self._key)
        if self.secrets is None:
            self.secrets = ResolvedSecrets({})
        self.secrets.redactor.add({name: token})
        return token

    async def put_artifact(self, source: Source, kind: str) -> ArtifactRef:
        """Store bytes with the run as they arrive, and return the reference to them."""
        access = self._artifact_store()
        artifact = await access.artifacts.put(access.place, self.run_id, source, kind, await access.now())
        self.artifacts.append(artifact)
        return artifact

    def open_artifact(self, artifact: ArtifactRef) -> AsyncIterator[bytes]:
        """Yield the bytes of an artifact. They are verified at the end."""
        return self._artifact_store().artifacts.open(artifact)

    def _artifact_store(self) -> ArtifactAccess:
        if self._artifact_access is None:
            raise InvalidInput("there is no artifact store: give the app one, or name it in HOLDFAST_ARTIFACTS__STORE")
        return self._artifact_access

    def stream(self, name: str) -> ActivityStream:
        """Return a stream of the run, to write to."""
        require_step_name("name", name)
        if self._is_over or self._writes_no_more:
            raise asyncio.CancelledError(f"attempt {self.attempt} of step {self.step_id} is over")
        access = self._stream_access
        if access is None:
            raise NotDurable("there is no store for streams here: they are written by activities of a node")
        access.sender.check()
        if self.streams is None:
            self.streams = {}
        if name not in self.streams:
            if len(self.streams) >= STREAMS_PER_WRITER:
                raise InvalidInput(f"an activity writes to at most {STREAMS_PER_WRITER} streams")
            epoch = None if access.epoch_of is None else access.epoch_of(self.run_id)
            if access.epoch_of is not None and epoch is None:
                raise asyncio.CancelledError(f"run {self.run_id} is not this node's any more")
            template = StreamAppend(
                run_id=self.run_id,
                name=name,
                step_id=self.step_id,
                attempt=self.engine_attempt_id,
                node=access.sender.node,
                epoch=epoch,
            )
            self.streams[name] = ActivityStream(access.sender, template, self._loop, partial(self._chunk, name))
        return self.streams[name]

    def _chunk(self, name: str, value: Any) -> Raw:
        if self._is_over or self._writes_no_more:
            raise asyncio.CancelledError(f"attempt {self.attempt} of step {self.step_id} is over")
        encoded = self._work.definition.values.encode(value)
        if self.secrets is not None:
            encoded = self.secrets.redactor.json(encoded)
        return bounded_chunk(encoded, self._stream_access.sender.most_bytes, name)  # type: ignore[union-attr]

    async def flush_streams(self) -> None:
        """Wait until everything that was written to streams is durable, or cannot become so."""
        for stream in (self.streams or {}).values():
            await stream.flush()

    def close_streams(self) -> None:
        """Store nothing more of what this attempt writes: it was abandoned, and another attempt may have the step by
        now.
        """
        self._writes_no_more = True
        for stream in (self.streams or {}).values():
            stream.fail(Conflict(f"attempt {self.attempt} of step {self.step_id} is over", step_id=self.step_id))

    def complete_later(self) -> NoReturn:
        """End the activity without an outcome: the holder of its `token` reports it with `App.complete_activity`."""
        raise CompleteLater

    def enter(self, secrets: ResolvedSecrets) -> None:
        """Let the activity reveal these secrets, and redact them from what it reports."""
        self.secrets = secrets
        self._entered = enter_secrets(secrets)

    def redact(self, text: str) -> str:
        """Return a text in which the values of the attempt's secrets are replaced by their names."""
        return text if self.secrets is None else self.secrets.redactor.text(text)

    def leave(self) -> None:
        """Undo `enter`, in the same context."""
        if self._entered is not None:
            leave_secrets(self._entered)

    def close(self) -> None:
        """Note that the attempt is over."""
        self._is_over = True
        if self.secrets is not None:
            self.secrets.close()

    def _go_on(self) -> None:
        self._is_announced = False
        details, self._reported = self._reported, UNSET
        if self._extend is not None:
            self._extend()
        self._on_heartbeat(self._work, details)

    @asynccontextmanager
    async def watched(self, timeout_ms: int | None) -> AsyncIterator[None]:
        """End the work with `TimeoutError` if it sends no heartbeat for that long."""
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


CONTEXT: ContextVar[ActivityContext] = ContextVar("holdfast_activity")


def activity_context() -> ActivityContext:
    """Return the context of the running activity."""
    try:
        return CONTEXT.get()
    except LookupError:
        raise NotDurable("activity_context can only be used inside an activity that a workflow called") from None


def stream(name: str) -> Stream:
    """Return a stream of the run to write to, in an activity or a workflow: `await hf.stream("tokens").write(x)`.

    Chunks are ordered and durable. Read them with `RunHandle.stream`. Chunks of a workflow are durable with its turn,
    those of an activity soon after they are written, and all of them before its outcome.
    """
    program = current_program()
    if program is not None:
        require_step_name("name", name)
        return WorkflowStream(program, name)
    context = current_activity()
    if context is None:
        raise NotDurable("stream can only be used inside a workflow, or an activity that a workflow called")
    return context.stream(name)


async def put_artifact(source: Source, *, kind: str = "file") -> ArtifactRef:
    """Store bytes with the run, inside an activity: bytes, chunks of bytes, or the file at a `Path`.

    Chunks are stored as they arrive, never whole in memory. You can return, pass on and keep the reference.
    """
    return await activity_context().put_artifact(source, kind)


def open_artifact(artifact: ArtifactRef) -> AsyncIterator[bytes]:
    """Iterate over the bytes of an artifact, inside an activity.

    If it does not exist, it raises `ArtifactMissing`. At the end it raises `ArtifactCorrupt` if the bytes are not those
    that were stored.
    """
    return activity_context().open_artifact(artifact)


def current_activity() -> ActivityContext | None:
    """Return the context of the activity that is running, or None outside of one."""
    return CONTEXT.get(None)
