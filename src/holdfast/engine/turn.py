"""A turn: handle messages, let the program go as far as it can, append events, commit once.

`TurnDraft` collects what one turn of one run does and makes the `Turn` that a store commits. It keeps the state
current, so each decision sees what the ones before it did.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core.commands import Command
from holdfast.core.decide import Decision, Input, Refusal, decide, enact, queue_run
from holdfast.core.events import EngineRunRef, Event, RunQueued
from holdfast.core.idempotency import request_key
from holdfast.core.instants import Instant
from holdfast.core.messages import Message, Signal
from holdfast.core.records import ActivityRecord, index_changes
from holdfast.core.snapshot import runtime_snapshot
from holdfast.core.state import RunState, fold
from holdfast.store.port import LoadedRun, NewRun, Turn

ASIDE = 60_000_000
"""How long a message that is refused waits before it is handled again."""


class TurnDraft:
    """What one turn of one run does, while it is being decided."""

    def __init__(self, state: RunState, loaded: LoadedRun, now: Instant, node: str) -> None:
        self.state = state
        self.dispatch: list[str] = []
        self._before = state
        self._loaded = loaded
        self._now = now
        self._by = EngineRunRef(node, loaded.head.lease_epoch)
        self._events: list[Event] = []
        self._messages: list[Message] = []
        self._consumed: list[str] = []
        self._received: list[tuple[int, int]] = []
        self._records: list[ActivityRecord] = []

    def handle(self, message: Input) -> Decision | Refusal:
        """Decide what the world tells the run, and note that it has been handled."""
        answer = decide(self.state, message, self._now, self._by)
        if isinstance(message, Message):
            self._consumed.append(message.signal_id)
            if isinstance(answer, Refusal):  # kept, and tried again later: what was accepted is not dropped
                self._messages.append(replace(message, due_at=self._now + ASIDE))
        elif isinstance(message, Signal) and isinstance(answer, Decision) and answer.events:
            self._received.append((message.inbox_seq, len(self._events)))
        return self._take(answer)

    def enact(self, commands: Iterable[Command]) -> Decision | Refusal:
        """Decide what the program asks for."""
        return self._take(enact(self.state, commands, self._now, self._by))

    def record(self, record: ActivityRecord) -> None:
        """Keep what is known about an activity's effect, in the same commit."""
        self._records.append(record)

    def finish(self, *, release: bool = False) -> Turn:
        """Return the turn to commit. `release` lets go of the run with the same commit."""
        self.dispatch = [step_id for step_id in self.dispatch if step_id in self.state.open_steps]
        changes = index_changes(self._before, self.state, self._events)
        head = self._loaded.head
        return Turn(
            run_id=head.run_id,
            expected_version=self._before.version,
            epoch=head.lease_epoch,
            snapshot=runtime_snapshot(self.state),
            events=tuple(self._events),
            consumed=tuple(self._consumed),
            received=tuple(self._received),
            messages=tuple(self._messages),
            waits_opened=changes.waits_opened,
            waits_closed=changes.waits_closed,
            tasks=changes.tasks,
            records=tuple(self._records),
            seen_inbox_seq=head.inbox_seq,
            release=release,
        )

    def _take(self, answer: Decision | Refusal) -> Decision | Refusal:
        if isinstance(answer, Decision):
            self.state = fold(self.state, answer.events)
            self._events.extend(answer.events)
            self._messages.extend(answer.messages)
            self.dispatch.extend(answer.dispatch)
        return answer


def start_run(
    run_id: str,
    queued: RunQueued,
    now: Instant,
    node: str,
    *,
    reference_key: str | None = None,
    tags: tuple[str, ...] = (),
) -> NewRun:
    """Return the run to create. Without a request id, the run's own id stands in: nothing can be a retry of it."""
    problem = codec.check(queued.input, "input")
    if problem is not None:
        raise problem
    request_id = queued.run_request_id or run_id
    decision = queue_run(run_id, queued, now, EngineRunRef(node))
    state = fold(RunState(run_id=run_id), decision.events)
    return NewRun(
        run_id=run_id,
        tenant=queued.tenant,
        project=queued.project,
        environment=queued.environment,
        plan_id=queued.plan_id,
        plan_version=queued.plan_version,
        run_request_id=request_id,
        request_key=request_key(
            queued.tenant, queued.project, queued.environment, queued.plan_id, queued.plan_version, request_id
        ),
        input_sha256=codec.digest(queued.input),
        snapshot=runtime_snapshot(state),
        events=decision.events,
        messages=decision.messages,
        parent_run_id=queued.parent_run_id,
        reference_key=reference_key,
        tags=tags,
    )
