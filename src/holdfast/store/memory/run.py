"""One run in the reference model: what is delivered to it, and what a turn changes.

Written to be read as the specification of `port`: no indexes, no cleverness. Every method is one atomic step.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from msgspec import UNSET
from msgspec.structs import replace

from holdfast.core.call_limits import is_limited
from holdfast.core.codec import INTEGER_LIMIT
from holdfast.core.dead_letters import DeadLetter, Settled, Settlement
from holdfast.core.events import Event
from holdfast.core.index_rows import ActivityRecord, Task, Wait
from holdfast.core.instants import Instant
from holdfast.core.keys import RESERVED_PREFIX, inbox_uuid, signal_storage_key, signal_suffix
from holdfast.core.messages import (
    CONTROL_SIGNAL,
    ENGINE_SIGNALS,
    OUTCOME_SIGNAL,
    AcceptanceRecord,
    AcceptedSignalResult,
    Message,
    Signal,
    SignalRequest,
    came_at_of,
)
from holdfast.core.state import APPROVED, PENDING, TERMINAL
from holdfast.errors import CallerError
from holdfast.limits import MAILBOX_SIGNALS, Limits
from holdfast.store import decisions, port, validation
from holdfast.store.memory.jobs import Work, put
from holdfast.store.memory.streams import Streams
from holdfast.store.types import new_head

NEVER = INTEGER_LIMIT
"""The due time of a message that is held back: later than every instant."""


class Run:
    """One run and everything that belongs to it."""

    def __init__(self, new: port.NewRun, owner: str | None, now: Instant, starts_at: Instant | None = None) -> None:
        self.request_key = new.request_key
        self.input_sha256 = new.input_sha256
        self.plan_sha256 = new.plan_sha256
        self.events: list[Event] = []
        self._by_key: dict[str, Event] = {}
        self.messages: dict[str, tuple[Instant, Message]] = {}
        self.signals: list[Signal] = []
        self.acceptances: dict[tuple[str, str], AcceptanceRecord] = {}
        self.last_accepted_at = 0
        self.received: list[Instant] | None = None  # most runs get no signal
        self.waits: dict[str, Wait] = {}
        self.tasks: dict[str, Task] = {}
        self.records: dict[tuple[str, str, str], ActivityRecord] = {}
        self.work: dict[str, Work] = {}
        self.letters: dict[str, DeadLetter] = {}
        self._streams: Streams | None = None  # most runs write none
        self.attributes = new.snapshot.attributes
        self.head = new_head(new, owner, now)
        self._append(new.events, 0, now)
        self._index(new.messages, new.waits_opened, new.tasks, now)
        self._keep_records(new.records)
        if starts_at is not None:
            self.messages = {signal_id: (starts_at, message) for signal_id, (_, message) in self.messages.items()}
        self.head = replace(self.head, ready_at=self._ready_at(0, now), queued_at=now if starts_at == NEVER else None)

    @property
    def streams(self) -> Streams:
        """The streams of the run."""
        if self._streams is None:
            self._streams = Streams()
        return self._streams

    @property
    def has_begun(self) -> bool:
        """Return whether the run has started, or has finished without a start."""
        return self.head.status not in (PENDING, APPROVED)

    @property
    def is_finished(self) -> bool:
        """Return whether the run has finished."""
        return self.head.status in TERMINAL

    @property
    def taken(self) -> decisions.Taken:
        """Return what the verdict on an id needs to know about the run."""
        commands = (s.payload for s in self.signals if s.consumed_seq is None and s.name == CONTROL_SIGNAL)
        return decisions.taken_by(self.head, is_decided=any(decisions.decides(payload) for payload in commands))

    def loaded(self, now: Instant) -> port.LoadedRun:
        """Return the run with its pending work."""
        due = sorted((due_at, signal_id) for signal_id, (due_at, _) in self.messages.items() if due_at <= now)
        unconsumed = [signal for signal in self.signals if signal.consumed_seq is None]
        is_whole = len(unconsumed) <= MAILBOX_SIGNALS
        return port.LoadedRun(
            head=self.head,
            messages=tuple(self.messages[signal_id][1] for _, signal_id in due),
            signals=tuple(unconsumed if is_whole else self._wanted(unconsumed)),
            records=tuple(self.records[key] for key in sorted(self.records) if self.records[key].status != "completed"),
            details={step_id: work.details for step_id, work in self.work.items() if work.details is not None},
            is_whole=is_whole,
        )

    def _wanted(self, unconsumed: Iterable[Signal]) -> Iterator[Signal]:
        """Return the signals that open waits can take, and the engine's own: the oldest of each name, all outcomes."""
        names = {wait.name for wait in self.waits.values()} | ENGINE_SIGNALS
        waits = {(wait.name, wait.step_id) for wait in self.waits.values()}
        counts: Counter[str] = Counter()
        for signal in unconsumed:
            is_wanted = signal.name in names if signal.step_id is None else (signal.name, signal.step_id) in waits
            if signal.name == OUTCOME_SIGNAL:
                yield signal
            elif is_wanted and counts[signal.name] < MAILBOX_SIGNALS:
                counts[signal.name] += 1
                yield signal

    def wake(self, at: Instant) -> None:
        """Make the run ready at this instant, unless it is ready earlier."""
        ready_at = at if self.head.ready_at is None else min(at, self.head.ready_at)
        self.head = replace(self.head, ready_at=ready_at)

    def admit(self, now: Instant) -> None:
        """Release the messages that were held back while the run was queued."""
        for signal_id, (due_at, message) in self.messages.items():
            if due_at == NEVER:
                self.messages[signal_id] = (now, message)
        self.head = replace(self.head, queued_at=None)
        self.wake(now)

    def _hold_back(self, messages: Iterable[Message], now: Instant) -> None:
        """Hold messages back until the run is admitted."""
        self.messages |= {message.signal_id: (NEVER, message) for message in messages}
        self.head = replace(self.head, queued_at=now if self.head.queued_at is None else self.head.queued_at)

    # --- delivering

    def deliver_message(self, message: Message, now: Instant) -> port.Accepted | port.Duplicate | port.Refused:
        """Accept a message, once by its id."""
        if message.signal_id in self.messages:
            return port.Duplicate()
        if self.is_finished:
            return port.Refused(decisions.run_terminal(self.head.run_id, self.head.status))
        work = self.work.get(message.step_id or "")
        if work is not None:
            if work.is_of_another_run(message):
                return port.Refused(decisions.of_another_run(message))
            ended = work.ended(message)
            if ended is None:
                return port.Refused(decisions.taken_again(message))
            self.work[message.step_id or ""] = ended
        self._index((message,), (), (), now)
        self.wake(now if message.due_at is None else message.due_at)
        return port.Accepted()

    def deliver_signal(
        self, request: SignalRequest, limits: Limits, now: Instant
    ) -> port.Accepted | port.Duplicate | port.Refused:
        """Accept a signal, once by its id."""
        known = self._known_signal(request, limits, now)
        if known is not None:
            return known
        problem = self._signal_problem(request, limits, now)
        if problem is not None:
            return port.Refused(problem)
        return port.Accepted(self._accept(request, limits, now))

    def _known_signal(
        self, request: SignalRequest, limits: Limits, now: Instant
    ) -> port.Duplicate | port.Refused | None:
        if request.signal_id is None:
            return None
        record = self.acceptances.get((request.name, request.signal_id))
        if record is not None and record.expires_at <= now:
            return None
        if record is not None:
            if record.payload_sha256 == request.payload_sha256:
                return port.Duplicate(record.response)
            return port.Refused(decisions.payload_conflict(request))
        for signal in self.signals:
            is_same = (signal.name, signal.signal_id) == (request.name, request.signal_id)
            if is_same and signal.accepted_at + limits.acceptance_retention_ms * 1_000 > now:
                return port.Refused(decisions.indeterminate(request, now))
        return None

    def _signal_problem(self, request: SignalRequest, limits: Limits, now: Instant) -> CallerError | None:
        if self.is_finished:
            return decisions.run_terminal(self.head.run_id, self.head.status)
        unconsumed = [signal for signal in self.signals if signal.consumed_seq is None]
        is_taken = (request.name, request.step_id) in {(signal.name, signal.step_id) for signal in unconsumed}
        problem = decisions.check_conditions(request, self.head.version, now, is_taken)
        if problem is not None:
            return problem
        if request.require_waiting:
            waits = [wait for wait in self.waits.values() if wait.name == request.name]
            earlier = [signal for signal in unconsumed if signal.name == request.name]
            ahead = [(each.step_id, came_at_of(each.accepted_at, each.received_at)) for each in earlier]
            came_at = came_at_of(max(now, self.last_accepted_at + 1), now)
            if not decisions.finds_wait(waits, ahead, request.step_id, came_at):
                return decisions.not_waiting(request)
        most = limits.signals_per_run_per_minute
        received_at = self.received[-most] if self.received is not None and len(self.received) >= most else None
        is_counted = not (request.is_unlimited or request.name.startswith(RESERVED_PREFIX))
        if is_counted and received_at is not None and now - decisions.MINUTE < received_at <= now:
            return decisions.rate_limited(request, limits, received_at + decisions.MINUTE, now)
        return None

    def _accept(self, request: SignalRequest, limits: Limits, now: Instant) -> AcceptedSignalResult:
        self.last_accepted_at = accepted_at = max(now, self.last_accepted_at + 1)
        inbox_seq = self.head.inbox_seq + 1
        uuid = inbox_uuid(request.run_id, inbox_seq)
        signal = Signal(
            id=uuid,
            run_id=request.run_id,
            name=request.name,
            signal_id=request.signal_id if request.signal_id is not None else uuid,
            inbox_seq=inbox_seq,
            suffix=signal_suffix(accepted_at, uuid),
            accepted_at=accepted_at,
            payload=request.payload,
            step_id=request.step_id,
            received_at=now,
            by=None if request.audit is None else request.audit.by,
        )
        result = AcceptedSignalResult(
            workflow_id=signal.run_id,
            signal_name=signal.name,
            signal_id=signal.signal_id,
            accepted_at=accepted_at,
            signal_storage_key=signal_storage_key(signal.run_id, signal.name, signal.suffix),
        )
        self.signals.append(signal)
        if not signal.name.startswith(RESERVED_PREFIX):
            self.received = self.received or []
            self.received.append(now)
        self.acceptances[signal.name, signal.signal_id] = AcceptanceRecord(
            workflow_id=signal.run_id,
            signal_name=signal.name,
            signal_id=signal.signal_id,
            signal_storage_key=result.signal_storage_key,
            payload_sha256=request.payload_sha256,
            response=result,
            accepted_at=accepted_at,
            expires_at=accepted_at + limits.acceptance_retention_ms * 1_000,
        )
        self.head = replace(self.head, inbox_seq=inbox_seq)
        self.wake(now)
        return result

    # --- dead letters

    def settle(self, letter: DeadLetter, action: Settlement, actor: str, now: Instant) -> Settled | port.Refused:
        """Settle a letter of this run, or return why it cannot be settled."""
        if letter.settled == action:
            return Settled(letter.letter_id, action)
        message = decisions.settled_message(letter, action, self.head.status)
        if isinstance(message, CallerError):
            return port.Refused(message)
        if message is not None:
            self.messages.setdefault(message.signal_id, (now, message))
            self.wake(now)
        self.letters[letter.letter_id] = replace(letter, settled=action, settled_by=actor, settled_at=now)
        return Settled(letter.letter_id, action)

    # --- jobs and heartbeats
    def beat(self, node: str, beat: port.Heartbeat, visible_until: Instant, now: Instant = 0) -> bool:
        """Extend a step's job if the node has it, and store the details of its progress."""
        work = self.work.get(beat.step_id)
        if beat.queue:
            if work is None or not work.is_taken_by(node, beat.engine_attempt_id):
                return False
            if is_limited(beat.queue) and work.is_visible(now):  # it has lost its place
                return False
            self.work[beat.step_id] = work.kept_until(visible_until, beat.details)
            return True
        if self.head.lease_owner != node or (work is not None and work.job is not None):
            return False
        if beat.details is not UNSET:
            self.work[beat.step_id] = Work(details=beat.details)
        return True

    def fence_of(self, step_id: str) -> decisions.StreamFence:
        """Return what an append to a stream by this step is checked against."""
        work, head = self.work.get(step_id), self.head
        job = () if work is None or work.job is None else (work.taken_by, work.job.engine_attempt_id)
        return decisions.StreamFence(head.status, self.is_finished, head.lease_epoch, *job)

    # --- committing

    def commit(
        self, turn: port.Turn, now: Instant, persisted_at: Instant | None = None
    ) -> port.Committed | port.CommitConflict:
        """Append a turn to the history, if its version and epoch are still those of the run."""
        head = self.head
        if head.version != turn.expected_version:
            return self._already_there(turn) or port.CommitConflict("version", head.version, head.lease_epoch)
        if head.lease_epoch != turn.epoch:
            return port.CommitConflict("epoch", head.version, head.lease_epoch)
        if self.is_finished and (turn.events or turn.snapshot.status not in TERMINAL):
            return port.CommitConflict("finished", head.version, head.lease_epoch)
        if self._has_unseen_outcome(turn):
            return port.CommitConflict("unseen", head.version, head.lease_epoch)
        if not validation.can_be_kept(turn):
            return port.CommitConflict("cannot be stored", head.version, head.lease_epoch)
        existing = self._existing_event(turn)
        if existing is not None:
            return port.CommitConflict("event exists", head.version, head.lease_epoch, existing)
        if self._opens_second_task(turn):
            return port.CommitConflict("task is open", head.version, head.lease_epoch)
        at = now if persisted_at is None else persisted_at
        self._append(turn.events, turn.expected_version, at)
        self._consume(turn)
        self._index(turn.messages, turn.waits_opened, turn.tasks, now)
        if turn.admission is not None:
            self._hold_back(turn.messages, now)
        self._keep_records(turn.records)
        self.letters.update({letter.letter_id: letter for letter in turn.dead})
        for step_id in turn.jobs_closed:
            self.work.pop(step_id, None)
        for job in turn.jobs:
            self.work[job.step_id] = put(job, self.work.get(job.step_id), now)
        if turn.attributes is not None:
            self.attributes = turn.attributes
        self._end_turn(turn, now)
        return port.Committed(self.head.version, at)

    def _already_there(self, turn: port.Turn) -> port.Committed | None:
        """Recognise a turn that was committed before: the events after its version are its own."""
        end = turn.expected_version + len(turn.events)
        there = self.events[max(turn.expected_version, 0) : max(end, 0)]
        mine = [(event.idempotency_key, event.engine_run_ref) for event in turn.events]
        theirs = [(event.idempotency_key, event.engine_run_ref) for event in there]
        return port.Committed(end, there[0].persisted_at) if mine and mine == theirs else None

    def _has_unseen_outcome(self, turn: port.Turn) -> bool:
        return any(
            signal.name == OUTCOME_SIGNAL and signal.consumed_seq is None and signal.inbox_seq > turn.seen_inbox_seq
            for signal in self.signals
        )

    def _existing_event(self, turn: port.Turn) -> Event | None:
        new: dict[str, Event] = {}
        for event in turn.events:
            existing = self._by_key.get(event.idempotency_key) or new.get(event.idempotency_key)
            if existing is not None:
                return existing
            new[event.idempotency_key] = event
        return None

    def _opens_second_task(self, turn: port.Turn) -> bool:
        tasks = self.tasks | {task.task_id: task for task in turn.tasks}
        waits = [task.step_id for task in tasks.values() if task.status == "OPEN"]
        return len(waits) != len(set(waits))

    def _append(self, events: Iterable[Event], version: int, now: Instant) -> None:
        for run_seq, event in enumerate(events, version + 1):
            kept = replace(event, run_seq=run_seq, persisted_at=now)
            self.events.append(kept)
            self._by_key[event.idempotency_key] = kept

    def _consume(self, turn: port.Turn) -> None:
        for signal_id in turn.consumed:
            self.messages.pop(signal_id, None)
        for step_id in turn.waits_closed:
            self.waits.pop(step_id, None)
        consumed = {inbox_seq: turn.expected_version + 1 + index for inbox_seq, index in turn.received}
        self.signals = [
            replace(s, consumed_seq=consumed[s.inbox_seq]) if s.inbox_seq in consumed and s.consumed_seq is None else s
            for s in self.signals
        ]

    def _index(self, messages: Iterable[Message], waits: Iterable[Wait], tasks: Iterable[Task], now: Instant) -> None:
        for message in messages:
            due_at = now if message.due_at is None else message.due_at
            self.messages[message.signal_id] = (due_at, message)
        self.waits.update({wait.step_id: wait for wait in waits})
        self.tasks.update({task.task_id: task for task in tasks})

    def _keep_records(self, records: Iterable[ActivityRecord]) -> None:
        for record in records:
            self.records[record.activity_name, record.step_id, record.idempotency_key] = record

    def _end_turn(self, turn: port.Turn, now: Instant) -> None:
        is_finished = turn.snapshot.status in TERMINAL
        if is_finished:
            self.messages.clear()
            self.waits.clear()
            self.work.clear()
        self.head = replace(
            self.head,
            status=turn.snapshot.status,
            version=turn.expected_version + len(turn.events),
            snapshot=turn.snapshot,
            updated_at=now,
            finished_at=self.head.finished_at or now if is_finished else None,
            lease_owner=None if is_finished or turn.release else self.head.lease_owner,
            ready_at=None if is_finished else self._ready_at(turn.seen_inbox_seq, now),
            queued_at=None if is_finished else self.head.queued_at,
            losses=turn.losses,
        )

    def _ready_at(self, seen_inbox_seq: int, now: Instant) -> Instant | None:
        due = [due_at for due_at, _ in self.messages.values() if due_at != NEVER]
        if self.head.inbox_seq > seen_inbox_seq:
            due.append(now)
        return min(due, default=None)
