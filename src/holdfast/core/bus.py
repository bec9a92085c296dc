"""The event bus: which events are pushed from the store, to which sinks, and in which form (BUS-1).

The store comes first. A commit that appends events to a history writes one outbox *entry* for each *sink* that
subscribes to them: a run and a range of `run_seq`. A relay reads the entries of a sink, sends the events, and settles
the entries. So the outbox holds exactly the events that a sink has yet to receive. This is the sink's watermark: it
survives any crash, and an unavailable sink costs a run nothing.

* Delivery is at least once. Consumers recognise a duplicate by its id, which is the id of the event.
* Events of one run arrive in order, each for the first time after the one before it. Between runs there is no order.
* An entry that cannot be delivered is retried with increasing delays, and the later events of its run wait behind it.
  After `max_attempts` it becomes a dead letter of the bus, and the later events of the run are delivered without it.
* If a sink does not answer, all of its deliveries pause. If it rejects one entry, those of other runs continue.

*Alerts* are sent as the events of a run without an id, in order of their numbers, to sinks that ask for them.

An event leaves as a CloudEvent (version 1.0, structured JSON).
"""

import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Literal, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from holdfast.core import codec
from holdfast.core.codec import format_instant
from holdfast.core.events import Event
from holdfast.core.instants import Instant
from holdfast.core.keys import check_name, event_id
from holdfast.errors import InvalidInput

SinkKind = Literal["webhook", "nats", "redis", "projection"]

ALERTS = ""
"""The run id that stands for the alerts."""

SPEC_VERSION = "1.0"
TYPE_PREFIX = "holdfast."
ALERT_TYPE = "holdfast.Alert"

ADDRESS_CHARS = 2_000
FILTERS = 100
"""The most workflows, and the most event types, that a sink may name."""

DETAIL_CHARS = 500
REJECTIONS = 3
"""How often a sink may reject an entry itself before it becomes a dead letter: more attempts would change nothing."""

_SCHEMES = {"webhook": ("http", "https"), "nats": ("nats", "tls"), "redis": ("redis", "rediss"), "projection": ("",)}
_SUBJECT = re.compile(r"[\w.-]{1,200}")


class Sink(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A destination of events: which events it gets, where they are sent, and how often delivery is retried.

    - `address`: a URL for a webhook, `nats://host:4222/SUBJECT` or `redis://host:6379/STREAM`. A projection is a
      function of the app and has none. It contains no password.
    - `secret`: the name of the secret with the password; for a webhook, the key of its signatures.
    - `tenant`: only events of that tenant's runs.
    - `workflows`, `event_types`: only these. Empty: all.
    - `alerts`: also alerts. Only for sinks without a tenant.
    - `payloads`: encrypted values are left out, unless it is "opened".
    - `allow_private`: a webhook may call addresses that are not public.

    See docs/bus.md.
    """

    name: str
    """Its name, which is unique in the store."""
    kind: SinkKind
    """What it is: a webhook, NATS, Redis, or a projection."""
    address: str = ""
    secret: str = ""
    tenant: str | None = None
    workflows: tuple[str, ...] = ()
    event_types: tuple[str, ...] = ()
    alerts: bool = False
    payloads: Literal["concealed", "opened"] = "concealed"
    allow_private: bool = False
    timeout_ms: int = 10_000
    """How long one delivery may take."""
    max_attempts: int = 25
    """After this many failures an event becomes a dead letter."""
    first_ms: int = 1_000
    """The delay after the first failure; it doubles with each further one."""
    most_ms: int = 300_000
    """The longest delay."""
    is_paused: bool = False
    """Whether an operator has paused it."""
    created_by: str = ""
    """Who added it."""
    created_at: Instant = 0
    """When it was added."""

    def wants(self, tenant: str | None, workflow: str) -> bool:
        """Return whether it gets events of runs with this tenant and workflow."""
        return self.tenant in (None, tenant) and (not self.workflows or workflow in self.workflows)

    def wants_event(self, event_type: str) -> bool:
        """Return whether it gets events of this type."""
        return not self.event_types or event_type in self.event_types


class OutboxEntry(Struct, frozen=True, kw_only=True, gc=False):
    """Events of one run that a sink has yet to receive: those from one `run_seq` to another.

    `number` is the store's own number of the run; entries are returned in this order. `at` is when it was written.
    """

    number: int
    run_id: str
    from_seq: int
    to_seq: int
    at: Instant
    attempts: int = 0
    due_at: Instant = 0
    tenant: str | None = None
    project: str | None = None
    environment: str | None = None
    workflow: str = ""
    workflow_version: str = ""


class BusDeadLetter(Struct, frozen=True, kw_only=True, gc=False):
    """An outbox entry whose delivery was abandoned. `detail` never holds a payload."""

    letter_id: str
    sink: str
    run_id: str
    from_seq: int
    to_seq: int
    attempts: int
    detail: str
    died_at: Instant
    tenant: str | None = None


class OutboxSettlement(Struct, frozen=True, kw_only=True):
    """The result of an entry: it is removed, except for the `rest` of it, or it becomes a dead letter."""

    entry: OutboxEntry
    rest: OutboxEntry | None = None
    letter: BusDeadLetter | None = None


class SinkProgress(Struct, frozen=True, kw_only=True):
    """The progress of a sink: consecutive failures, until when it is paused, and how many events it has just received.

    `number` identifies the sink. If another sink was created under the same name since, nothing is settled there.
    """

    number: int | None = None
    failures: int = 0
    due_at: Instant = 0
    error: str = ""
    delivered: int = 0


class SinkStatus(Struct, frozen=True, kw_only=True):
    """A sink and its status. `backlog` counts entries, up to a bound; `oldest_at` is that of the oldest one counted.

    `number` is never reused, not even for a later sink with the same name.
    """

    sink: Sink
    number: int = 0
    failures: int = 0
    due_at: Instant = 0
    error: str = ""
    failed_at: Instant | None = None
    delivered_at: Instant | None = None
    delivered: int = 0
    backlog: int = 0
    oldest_at: Instant | None = None
    dead_letters: int = 0


class BusAlert(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An alert on the bus. `number` is its `run_seq` there. The same `alert_id` is raised once."""

    alert_id: str
    code: str
    priority: int
    detail: str
    run_id: str = ""
    sink: str = ""
    """The sink that the alert is about. It does not get the alert."""
    raised_at: Instant = 0
    number: int = 0


class OutboxReplay(Struct, frozen=True):
    """Which events a sink gets again: all from an instant on, or those of one run from a `run_seq` on.

    Runs are replayed in order of their numbers, starting after `after`: at most `limit`, of at most `look` examined.
    """

    sink: str
    since: Instant = 0
    run_id: str | None = None
    from_seq: int = 1
    after: int = -1
    limit: int = 1_000
    look: int = 5_000


class Replayed(Struct, frozen=True):
    """How many runs' events a sink will get again, and where to continue if a limit was reached."""

    runs: int
    after: int | None = None


# --- checks ---------------------------------------------------------------------------------------------------------


def check_sink(sink: object) -> Sink:
    """Return the sink, or raise `InvalidInput` if it could not be stored or used."""
    if not isinstance(sink, Sink):
        raise InvalidInput(f"a sink is a Sink, not {type(sink).__qualname__}", field="sink")
    try:
        msgspec.convert(msgspec.to_builtins(sink), Sink)
    except (msgspec.MsgspecError, TypeError, ValueError) as problem:
        raise InvalidInput(f"the sink has a field of another type: {problem}", field="sink") from None
    for field in ("name", *(["secret"] if sink.secret else []), *(["tenant"] if sink.tenant is not None else [])):
        _check_name(field, getattr(sink, field))
    for field in ("workflows", "event_types"):
        names = getattr(sink, field)
        if len(names) > FILTERS:
            raise InvalidInput(f"{field}: a sink names at most {FILTERS}, this one {len(names)}", field=field)
        for name in names:
            _check_name(field, name)
    if sink.kind not in get_args(SinkKind):
        raise InvalidInput(f"kind is one of {', '.join(get_args(SinkKind))}, not {sink.kind!r}", field="kind")
    if sink.alerts and sink.tenant is not None:
        raise InvalidInput("alerts belong to no tenant: a sink for alerts cannot have one", field="alerts")
    for field, least, most in (
        ("timeout_ms", 1, 300_000),
        ("max_attempts", 1, 10_000),
        ("first_ms", 1, 86_400_000),
        ("most_ms", sink.first_ms, 7 * 86_400_000),
    ):
        if not least <= getattr(sink, field) <= most:
            raise InvalidInput(f"{field} is from {least} to {most}, not {getattr(sink, field)}", field=field)
    _check_address(sink)
    return sink


def _check_name(field: str, name: str) -> None:
    problem = check_name(field, name)
    if problem is not None:
        raise problem


def _check_address(sink: Sink) -> None:
    if sink.kind == "projection":
        if sink.address:
            raise InvalidInput("a projection is a function of the app, and has no address", field="address")
        return
    schemes = _SCHEMES[sink.kind]
    try:
        parts = urlsplit(sink.address)
        is_fit = parts.scheme in schemes and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        (parts.hostname or "").encode("idna")
    except ValueError:  # its text may contain a password
        is_fit = False
    if not is_fit or len(sink.address) > ADDRESS_CHARS or not sink.address.isascii() or not sink.address.isprintable():
        raise InvalidInput(f"the address of a {sink.kind} begins with {schemes[-1]}:// and a host", field="address")
    if parts.password is not None or (sink.kind == "webhook" and parts.username is not None):
        raise InvalidInput("an address holds no password: name a secret instead", field="address")
    if sink.kind == "webhook" and not sink.secret:
        raise InvalidInput("a webhook needs the name of a secret, by which it is signed", field="secret")
    if sink.kind in ("nats", "redis") and not _SUBJECT.fullmatch(parts.path.strip("/")):
        what = "subject" if sink.kind == "nats" else "stream"
        raise InvalidInput(f"the address of a {sink.kind} ends with the name of a {what}", field="address")


# --- what a relay decides -------------------------------------------------------------------------------------------


def pause_ms(sink: Sink, failures: int, fraction: float) -> int:
    """Return the delay after this many consecutive failures: it doubles each time, and jitter takes up to half off."""
    full = min(sink.first_ms << min(failures - 1, 40), sink.most_ms)
    return max(1, int(full * (1.0 - fraction / 2)))


def by_run(entries: Iterable[OutboxEntry]) -> list[list[OutboxEntry]]:
    """Return the entries grouped by run, in the order in which they are sent."""
    runs: dict[int, list[OutboxEntry]] = {}
    for entry in entries:
        runs.setdefault(entry.number, []).append(entry)
    return [sorted(each, key=lambda entry: entry.from_seq) for each in runs.values()]


def letter_of(sink: Sink, entry: OutboxEntry, detail: str, now: Instant) -> BusDeadLetter:
    """Return an entry as a dead letter."""
    parts = (sink.name, entry.run_id, entry.from_seq, entry.to_seq, now)
    return BusDeadLetter(
        letter_id=event_id(sha256("|".join(map(str, ("bus", *parts))).encode()).hexdigest()),
        sink=sink.name,
        run_id=entry.run_id,
        from_seq=entry.from_seq,
        to_seq=entry.to_seq,
        attempts=entry.attempts,
        detail=detail[:DETAIL_CHARS],
        died_at=now,
        tenant=sink.tenant,
    )


def alert_of(code: str, priority: int, detail: str, *, run_id: str = "", sink: str = "", of: object = "") -> BusAlert:
    """Return an alert. Raising it again about the same thing (`of`) gives the same alert."""
    digest = sha256("|".join(map(str, ("alert", code, run_id, sink, of))).encode()).hexdigest()
    return BusAlert(
        alert_id=event_id(digest), code=code, priority=priority, detail=detail[:DETAIL_CHARS], run_id=run_id, sink=sink
    )


# --- CloudEvents ----------------------------------------------------------------------------------------------------


class CloudEvent(Struct, frozen=True, kw_only=True):
    """An event as it leaves: CloudEvents 1.0. The attributes after `data` are extensions."""

    specversion: str = SPEC_VERSION
    id: str
    source: str
    type: str
    subject: str
    time: str
    datacontenttype: str = "application/json"
    data: Raw
    sequence: str
    tenant: str | UnsetType = UNSET
    workflow: str | UnsetType = UNSET
    workflowversion: str | UnsetType = UNSET


class OutgoingEvent(Struct, frozen=True):
    """An event to send: its id and number, its run, and the CloudEvent as JSON."""

    event_id: str
    sequence: int
    run_id: str
    event_type: str
    body: bytes


class _EventData(Struct, frozen=True, kw_only=True):
    run_id: str
    run_seq: int
    event_type: str
    step_id: str | None
    engine_attempt_id: int | None
    logical_attempt_id: int | None
    idempotency_key: str
    emitted_at: str
    caused_by_signal_id: str | None
    parent_event_id: str | None
    schema_version: int
    data: Raw


_encoder = msgspec.json.Encoder()


def outgoing_event(event: Event, entry: OutboxEntry) -> OutgoingEvent:
    """Return an event of a run in the form in which it is sent."""
    data = _EventData(
        run_id=event.run_id,
        run_seq=event.run_seq,
        event_type=event.event_type,
        step_id=event.step_id,
        engine_attempt_id=event.engine_attempt_id,
        logical_attempt_id=event.logical_attempt_id,
        idempotency_key=event.idempotency_key,
        emitted_at=format_instant(event.emitted_at),
        caused_by_signal_id=event.caused_by_signal_id,
        parent_event_id=event.parent_event_id,
        schema_version=event.schema_version,
        data=Raw(codec.encode_body(event.data).encode()),
    )
    body = CloudEvent(
        id=event.event_id,
        source=f"/holdfast/{entry.tenant}/{entry.project}/{entry.environment}",
        type=TYPE_PREFIX + event.event_type,
        subject=event.run_id,
        time=format_instant(event.persisted_at),
        data=Raw(_encoder.encode(data)),
        sequence=str(event.run_seq),
        tenant=entry.tenant or UNSET,
        workflow=entry.workflow,
        workflowversion=entry.workflow_version,
    )
    return OutgoingEvent(event.event_id, event.run_seq, event.run_id, event.event_type, _encoder.encode(body))


def outgoing_alert(alert: BusAlert) -> OutgoingEvent:
    """Return an alert in the form in which it is sent."""
    body = CloudEvent(
        id=alert.alert_id,
        source="/holdfast",
        type=ALERT_TYPE,
        subject=alert.run_id or alert.sink or alert.code,
        time=format_instant(alert.raised_at),
        data=Raw(_encoder.encode(alert)),
        sequence=str(alert.number),
    )
    return OutgoingEvent(alert.alert_id, alert.number, ALERTS, ALERT_TYPE, _encoder.encode(body))


def first_missing(events: Sequence[Event], from_seq: int) -> int | None:
    """Return the first missing `run_seq` among events that should be consecutive, or None if there is no gap."""
    for expected, event in enumerate(events, from_seq):
        if event.run_seq != expected:
            return expected
    return None
