"""A run as one object: its head. Replacing the head is the commit.

A head holds the whole run as the reference model has it (`memory/run.py` decides what may happen to it), except for
older events: those are in *segments*, immutable objects that are written before the head that names them. A head also
holds what a database would have in other tables: what the run sends to other runs, until it is delivered (`Outgoing`),
how much the run has received from each sender (`seen`), and audit entries about the run.

Marks: each writer adds one to the head, and a head keeps the last ones. A writer that does not know whether its write
arrived looks for its mark.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Raw, Struct

from holdfast import errors
from holdfast.core import codec
from holdfast.core.admission import AdmissionRequest
from holdfast.core.attributes import Attributes
from holdfast.core.audit import AuditEntry
from holdfast.core.codec import INTEGER_LIMIT
from holdfast.core.dead_letters import DeadLetter
from holdfast.core.events import EngineRunRef, Event
from holdfast.core.index_rows import ActivityRecord, RuntimeSnapshot, Task, Wait
from holdfast.core.instants import Instant
from holdfast.core.keys import storage_key
from holdfast.core.messages import AcceptanceRecord, Message, Signal, SignalRequest
from holdfast.errors import CallerError, InvalidInput, StoreCorrupt, StoreTooNew
from holdfast.limits import Limits
from holdfast.store import port, validation
from holdfast.store.memory.jobs import Work
from holdfast.store.memory.run import NEVER, Run
from holdfast.store.outgoing import Left, left_of
from holdfast.store.s3.streams import StoredStreams, StreamRecord

FORMAT = 2
"""The format of heads. A reader refuses a newer one."""

WITHOUT_STREAMS = 1
"""The format of a head whose run has written no stream: code that does not know streams can continue the run."""

MARKS = 32
"""How many writers' marks a head keeps: this many others may write between a write and the search for its mark."""

TAIL_EVENTS = 128
TAIL_BYTES = 64 * 1024
"""How many events a head holds, and of what size, before the older ones are moved into a segment."""

RECEIVED = 10_000
"""How many acceptance times a head keeps, for the limit of signals per minute."""

SENDERS = 1_000
"""For how many other runs a run records what it received from them last."""

KEY_BYTES = 8
"""How many bytes of an event's idempotency key a head keeps when the event is moved into a segment."""


class EventRecord(Struct, frozen=True, array_like=True, gc=False):
    """An event in its stored form."""

    run_seq: int
    event_id: str
    event_type: str
    step_id: str | None
    engine_attempt_id: int | None
    logical_attempt_id: int | None
    data: Raw
    idempotency_key: str
    emitted_at: Instant
    persisted_at: Instant
    adapter_version: str
    engine_run_ref: EngineRunRef
    caused_by_signal_id: str | None
    parent_event_id: str | None
    schema_version: int


def to_record(event: Event) -> EventRecord:
    """Return an event in its stored form."""
    values = {name: getattr(event, name) for name in EventRecord.__struct_fields__}
    return EventRecord(**values | {"data": Raw(codec.encode_body(event.data).encode())})


def from_record(run_id: str, record: EventRecord) -> Event:
    """Return an event from its stored form."""
    values = {name: getattr(record, name) for name in EventRecord.__struct_fields__}
    body = codec.decode_body(record.event_type, record.schema_version, bytes(record.data))
    return Event(run_id=run_id, **values | {"data": body})


class Segment(Struct, frozen=True, gc=False):
    """Older events in a separate object: which ones, and the beginnings of their keys."""

    first: int
    last: int
    key: str
    event_keys: bytes


class Refusal(Struct, frozen=True):
    """A caller's error in its stored form: the reason why the first signals of a run are unfit."""

    code: str
    message: str
    details: Raw


class StartRecord(Struct, frozen=True, kw_only=True):
    """A run that a turn starts, in its stored form until it is created."""

    run_id: str
    tenant: str
    project: str
    environment: str
    plan_id: str
    plan_version: str
    run_request_id: str
    request_key: str
    input_sha256: str
    snapshot: RuntimeSnapshot
    events: tuple[EventRecord, ...]
    messages: tuple[Message, ...]
    waits_opened: tuple[Wait, ...]
    tasks: tuple[Task, ...]
    records: tuple[ActivityRecord, ...]
    parent_run_id: str | None
    reference_key: str | None
    tags: tuple[str, ...]
    signals: tuple[SignalRequest, ...]
    audit: AuditEntry | None
    admission: AdmissionRequest | None = None
    unfit: Refusal | None = None


def start_record(new: port.NewRun) -> StartRecord:
    """Return a run that a turn starts in its stored form."""
    values = {name: getattr(new, name) for name in StartRecord.__struct_fields__}
    unfit = new.unfit
    kept = None if unfit is None else Refusal(unfit.code, unfit.message, codec.encode(unfit.details))
    return StartRecord(**values | {"events": tuple(map(to_record, new.events)), "unfit": kept})


def start_of(record: StartRecord) -> port.NewRun:
    """Return a run that a turn starts from its stored form."""
    values = {name: getattr(record, name) for name in StartRecord.__struct_fields__}
    events = tuple(from_record(record.run_id, event) for event in record.events)
    return port.NewRun(**values | {"events": events, "unfit": _error_of(record.unfit)})


def _error_of(kept: Refusal | None) -> CallerError | None:
    if kept is None:
        return None
    kind = getattr(errors, kept.code, None)
    if not (isinstance(kind, type) and issubclass(kind, CallerError)):
        kind = errors.InvalidInput
    return kind(kept.message, **codec.decode(kept.details, dict[str, Any]))


class WorkRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step's activity in its stored form. `details` is JSON text."""

    job: port.Job | None = None
    visible_at: Instant | None = 0
    taken_by: str | None = None
    details: str | None = None


def _work_record(work: Work) -> WorkRecord:
    details = None if work.details is None else bytes(work.details).decode()
    return WorkRecord(job=work.job, visible_at=work.visible_at, taken_by=work.taken_by, details=details)


def _work_of(record: WorkRecord) -> Work:
    details = None if record.details is None else Raw(record.details.encode())
    return Work(job=record.job, visible_at=record.visible_at, taken_by=record.taken_by, details=details)


class Outgoing(Struct, frozen=True, kw_only=True):
    """What a turn sends to other runs, until all of it is delivered. `number` counts such turns of the run."""

    number: int
    expected_version: int
    events: int
    starts: tuple[tuple[int, StartRecord], ...] = ()
    messages: tuple[tuple[int, Message], ...] = ()
    signals: tuple[tuple[int, SignalRequest], ...] = ()
    started: int = 0
    sent: int = 0
    """How many starts and sends the turn has. Those that could not be stored were refused with its commit."""
    crosses_tenants: bool = False
    at: Instant = 0

    @property
    def new_runs(self) -> dict[int, port.NewRun]:
        """The runs to be created, by their positions in the turn."""
        return {place: start_of(record) for place, record in self.starts}

    @property
    def sends(self) -> dict[int, Message | SignalRequest]:
        """The messages and signals, by their positions in the turn."""
        both: list[tuple[int, Message | SignalRequest]] = [*self.messages, *self.signals]
        return dict(sorted(both, key=lambda entry: entry[0]))


class HeadRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run in its stored form."""

    format: int
    marks: tuple[str, ...]
    writes: int
    order: int
    request_key: str
    input_sha256: str
    plan_sha256: str | None = None
    head: port.RunHead
    segments: tuple[Segment, ...] = ()
    events: tuple[EventRecord, ...] = ()
    messages: tuple[tuple[Instant, Message], ...] = ()
    signals: tuple[Signal, ...] = ()
    acceptances: tuple[AcceptanceRecord, ...] = ()
    last_accepted_at: Instant = 0
    received: tuple[Instant, ...] = ()
    waits: tuple[Wait, ...] = ()
    tasks: tuple[Task, ...] = ()
    records: tuple[ActivityRecord, ...] = ()
    work: dict[str, WorkRecord] = {}
    letters: tuple[DeadLetter, ...] = ()
    outgoing: tuple[Outgoing, ...] = ()
    sent: int = 0
    seen: dict[str, int] = {}
    started_by: tuple[str, int] | None = None
    audit: tuple[AuditEntry, ...] = ()
    admission: AdmissionRequest | None = None
    attributes: Attributes = {}
    streams: dict[str, StreamRecord] = {}


def segment_key(run_id: str, first: int, mark: str) -> str:
    """Return the key of older events of a run: the longest of a run's keys."""
    return storage_key("events", run_id, f"{first:012d}-{mark}")


class OlderEventsNeeded(Exception):
    """A decision depends on events in segments that are not loaded."""


class StoredRun(Run):
    """A run of the reference model that can be read from a head and stored as one."""

    order: int
    """The position of the run in listings: they are in order of creation."""
    segments: tuple[Segment, ...]
    older: list[Event] | None
    """The events of the segments, if they are loaded."""
    outgoing: tuple[Outgoing, ...]
    sent: int
    seen: dict[str, int]
    started_by: tuple[str, int] | None
    audit: tuple[AuditEntry, ...]
    admission: AdmissionRequest | None
    marks: tuple[str, ...]
    writes: int
    """How many times the head was written."""
    _streams: StoredStreams

    def __init__(self, new: port.NewRun, owner: str | None, now: Instant, order: int) -> None:
        self.order = order
        self.segments = ()
        self.older = None
        self.outgoing = ()
        self.sent = 0
        self.seen = {}
        self.started_by = None
        self.audit = ()
        self.admission = new.admission
        self.marks = ()
        self.writes = 0
        is_queued = new.admission is not None
        super().__init__(new, None if is_queued else owner, now, NEVER if is_queued else None)
        self._streams = StoredStreams()

    def copy(self) -> "StoredRun":
        """Return a run that can be changed while this one stays as it is."""
        made = StoredRun.__new__(StoredRun)
        for name, value in vars(self).items():
            setattr(made, name, value.copy() if isinstance(value, dict | list | StoredStreams) else value)
        return made

    @property
    def streams(self) -> StoredStreams:
        """The streams of the run."""
        return self._streams

    @property
    def identity(self) -> str:
        """What distinguishes this run from all others, including earlier ones with the same id."""
        return f"{self.order}:{self.head.run_id}"

    # --- events in segments

    @property
    def first_in_tail(self) -> int:
        """The number of the first event in the head itself."""
        return self.segments[-1].last + 1 if self.segments else 1

    def _already_there(self, turn: port.Turn) -> port.Committed | None:
        before = self.first_in_tail - 1
        if turn.expected_version >= before:
            return self._same(turn, self.events[turn.expected_version - before :])
        if self.older is None:
            raise OlderEventsNeeded
        return self._same(turn, [*self.older, *self.events][max(turn.expected_version, 0) :])

    @staticmethod
    def _same(turn: port.Turn, there: list[Event]) -> port.Committed | None:
        there = there[: len(turn.events)]
        mine = [(event.idempotency_key, event.engine_run_ref) for event in turn.events]
        theirs = [(event.idempotency_key, event.engine_run_ref) for event in there]
        end = turn.expected_version + len(turn.events)
        return port.Committed(end, there[0].persisted_at) if mine and mine == theirs else None

    def _existing_event(self, turn: port.Turn) -> Event | None:
        if self.segments and turn.events:
            wanted = {_short(event.idempotency_key) for event in turn.events}
            if self.older is None and any(not wanted.isdisjoint(_cut(each.event_keys)) for each in self.segments):
                raise OlderEventsNeeded
            for event in self.older or ():
                if any(event.idempotency_key == mine.idempotency_key for mine in turn.events):
                    return event
        return super()._existing_event(turn)

    def with_segment(self, make_key: str) -> tuple[Segment, bytes] | None:
        """Move the older half of a long tail into a segment: return it and its object's content; None if short.

        Events to which `outgoing` refers stay.
        """
        size = sum(len(codec.encode_body(event.data)) for event in self.events)
        if len(self.events) <= TAIL_EVENTS and (size <= TAIL_BYTES or len(self.events) < 2):
            return None
        last = self.first_in_tail + len(self.events) // 2 - 1
        last = min([last, *(each.expected_version for each in self.outgoing)])
        count = last - self.first_in_tail + 1
        if count <= 0:
            return None
        moved, kept = self.events[:count], self.events[count:]
        keys = b"".join(_short(event.idempotency_key) for event in moved)
        key = segment_key(self.head.run_id, self.first_in_tail, make_key)
        segment = Segment(self.first_in_tail, last, key, keys)
        self.events = kept
        self._by_key = {event.idempotency_key: event for event in kept}
        self.older = None
        self.segments = (*self.segments, segment)
        return segment, msgspec.json.encode(tuple(map(to_record, moved)))

    # --- what goes to other runs

    def keep_outgoing(self, turn: port.Turn, now: Instant) -> None:
        """Note what a turn sends, in the same commit. Items that cannot be stored are refused with it."""
        if not turn.starts and not turn.sends:
            return
        starts = {place: _kept_start(new) for place, new in enumerate(turn.starts)}
        sends = {place: _kept_send(item) for place, item in enumerate(turn.sends)}
        self._refuse(turn, starts, sends, now)
        self.sent += 1
        entry = Outgoing(
            number=self.sent,
            expected_version=turn.expected_version,
            events=len(turn.events),
            starts=tuple((place, new) for place, new in starts.items() if isinstance(new, StartRecord)),
            messages=tuple((place, item) for place, item in sends.items() if isinstance(item, Message)),
            signals=tuple((place, item) for place, item in sends.items() if isinstance(item, SignalRequest)),
            started=len(starts),
            sent=len(sends),
            crosses_tenants=turn.crosses_tenants,
            at=now,
        )
        self.outgoing = (*self.outgoing, entry)

    def _refuse(self, turn: port.Turn, starts: dict[int, Any], sends: dict[int, Any], now: Instant) -> None:
        problems = [each for each in (*starts.values(), *sends.values()) if isinstance(each, port.Refused)]
        if problems:
            created, accepted = port.Created(""), port.Accepted()
            started = [each if isinstance(each, port.Refused) else created for each in starts.values()]
            sent = [each if isinstance(each, port.Refused) else accepted for each in sends.values()]
            self.take_back(left_of(turn, started, sent, now), now)

    def take_back(self, left: Left, now: Instant) -> None:
        """Store the messages and dead letters that result from refusals by other runs."""
        for message in left.messages:
            self.deliver_message(message, now)
        self.letters.update({letter.letter_id: letter for letter in left.letters})

    def turn_of(self, entry: Outgoing) -> port.Turn:
        """Return the part of a turn that is needed to decide on what it sends."""
        first = entry.expected_version - self.first_in_tail + 1
        new_runs, sends = entry.new_runs, entry.sends
        refused: Any = None  # it was refused before, and is not read again
        return port.Turn(
            run_id=self.head.run_id,
            expected_version=entry.expected_version,
            epoch=0,
            snapshot=self.head.snapshot or RuntimeSnapshot(status=self.head.status, state_version=self.head.version),
            events=tuple(self.events[first : first + entry.events]),
            starts=tuple(new_runs.get(place, refused) for place in range(entry.started)),
            sends=tuple(sends.get(place, refused) for place in range(entry.sent)),
            crosses_tenants=entry.crosses_tenants,
        )

    def take(self, sender: str, place: int, message: Message, now: Instant) -> port.Delivered:
        """Accept a message from another run, once, however often it is relayed."""
        if place <= self.seen.get(sender, -1):
            return port.Duplicate()
        answer = self.deliver_message(message, now)
        if not isinstance(answer, port.Refused):
            self.seen.pop(sender, None)
            self.seen[sender] = place
            while len(self.seen) > SENDERS:
                del self.seen[next(iter(self.seen))]
        return answer


def _kept_start(new: Any) -> StartRecord | port.Refused:
    problem = validation.check_new_run(new)
    if problem is not None:
        return port.Refused(problem)
    record = start_record(new)
    msgspec.json.decode(msgspec.json.encode(record), type=StartRecord)
    return record


def _kept_send(item: Any) -> Message | SignalRequest | port.Refused:
    try:
        kind = Message if isinstance(item, Message) else SignalRequest
        msgspec.json.decode(msgspec.json.encode(item), type=kind)
        return item  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError):
        unlimited = Limits(signals_per_run_per_minute=INTEGER_LIMIT)
        return port.Refused(validation.check_item(item, unlimited) or InvalidInput("this cannot be sent"))


def _short(key: str) -> bytes:
    return bytes.fromhex(key[: 2 * KEY_BYTES])


def _cut(keys: bytes) -> list[bytes]:
    return [keys[place : place + KEY_BYTES] for place in range(0, len(keys), KEY_BYTES)]


_encoder = msgspec.json.Encoder()
_head_decoder = msgspec.json.Decoder(HeadRecord)
_segment_decoder = msgspec.json.Decoder(tuple[EventRecord, ...])


class _Format(Struct):
    format: int


def encode_run(run: StoredRun, mark: str) -> bytes:
    """Return the head of a run, with the mark of its writer."""
    run.marks = (*run.marks[-MARKS + 1 :], mark)
    run.writes += 1
    run.received = (run.received or [])[-RECEIVED:]
    record = HeadRecord(
        format=FORMAT if run.streams else WITHOUT_STREAMS,
        marks=run.marks,
        writes=run.writes,
        order=run.order,
        request_key=run.request_key,
        input_sha256=run.input_sha256,
        plan_sha256=run.plan_sha256,
        head=run.head,
        segments=run.segments,
        events=tuple(map(to_record, run.events)),
        messages=tuple(run.messages.values()),
        signals=tuple(run.signals),
        acceptances=tuple(run.acceptances.values()),
        last_accepted_at=run.last_accepted_at,
        received=tuple(run.received),
        waits=tuple(run.waits.values()),
        tasks=tuple(run.tasks.values()),
        records=tuple(run.records.values()),
        work={step_id: _work_record(work) for step_id, work in run.work.items()},
        letters=tuple(run.letters.values()),
        outgoing=run.outgoing,
        sent=run.sent,
        seen=run.seen,
        started_by=run.started_by,
        audit=run.audit,
        admission=run.admission,
        attributes=run.attributes,
        streams=run.streams.records(),
    )
    return _encoder.encode(record)


def decode_run(data: bytes, key: str) -> StoredRun:
    """Return the run that a head holds."""
    try:
        record = _head_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeError) as problem:
        raise _unreadable(data, key) from problem
    if record.format > FORMAT:
        raise _unreadable(data, key)
    run = StoredRun.__new__(StoredRun)
    run.order, run.segments, run.older = record.order, record.segments, None
    run.marks, run.writes = record.marks, record.writes
    run.outgoing, run.sent, run.seen = record.outgoing, record.sent, record.seen
    run.started_by, run.audit, run.admission = record.started_by, record.audit, record.admission
    run.request_key, run.input_sha256, run.plan_sha256 = record.request_key, record.input_sha256, record.plan_sha256
    run.head, run.attributes = record.head, record.attributes
    run.events = [from_record(record.head.run_id, event) for event in record.events]
    run._by_key = {event.idempotency_key: event for event in run.events}
    run.messages = {message.signal_id: (due_at, message) for due_at, message in record.messages}
    run.signals = list(record.signals)
    run.acceptances = {(each.signal_name, each.signal_id): each for each in record.acceptances}
    run.last_accepted_at, run.received = record.last_accepted_at, list(record.received)
    run.waits = {wait.step_id: wait for wait in record.waits}
    run.tasks = {task.task_id: task for task in record.tasks}
    run.records = {(each.activity_name, each.step_id, each.idempotency_key): each for each in record.records}
    run.work = {step_id: _work_of(work) for step_id, work in record.work.items()}
    run.letters = {letter.letter_id: letter for letter in record.letters}
    run._streams = StoredStreams()
    for name, stream in record.streams.items():
        run.streams.add(record.head.run_id, name, stream)
    return run


def decode_segment(run_id: str, data: bytes, key: str) -> list[Event]:
    """Return the events that a segment holds."""
    try:
        return [from_record(run_id, record) for record in _segment_decoder.decode(data)]
    except (msgspec.MsgspecError, UnicodeError) as problem:
        raise StoreCorrupt(f"the segment {key} cannot be read", key=key) from problem


def _unreadable(data: bytes, key: str) -> errors.StoreError:
    try:
        found = msgspec.json.decode(data, type=_Format).format
    except (msgspec.MsgspecError, UnicodeError):
        found = 0
    if found > FORMAT:
        return StoreTooNew(
            f"the head {key} is of format {found}; this Holdfast knows {FORMAT}. Upgrade Holdfast.",
            found=found,
            known=FORMAT,
        )
    return StoreCorrupt(f"the head {key} cannot be read", key=key)


def note_audit(run: StoredRun, entries: Iterable[AuditEntry]) -> None:
    """Add entries of the audit log to a run, each once."""
    known = {entry.entry_id for entry in run.audit}
    run.audit = (*run.audit, *(entry for entry in entries if entry.entry_id not in known))
