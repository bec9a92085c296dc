"""Payloads on their way to the store and back: the only module that seals and opens values.

A *payload* is a user's value: an input, a result, an answer, the payload of a signal, progress details, the text of an
error or a comment. `SealingStore` wraps another store. It passes every payload through its codecs before it is stored,
and opens it again when it is read. The wrapper exists only if there is a codec; without one no payload passes here.

**Sealed values** are JSON like any other: `{"$holdfast":["aes-gcm"],"data":"…"}` names the codecs that produced it, in
order, and holds the output of the last one, in base64. Text is sealed as the text of such an object. `null` is never
sealed: whether there is a value is no secret. Values that were stored without a codec are read unchanged.

**Bound to a run.** A codec gets each payload with its *scope*, the id of the run, and cannot be tricked into opening it
in another run. A value that goes from one run to another is sealed for the receiving run. Signals that come with a
start are bound to the request instead (`"of":"request"`): which run they reach is known only afterwards.

**What cannot be opened stays sealed.** A missing key or a missing object affects no other value: lists continue. Where
the content is needed, `codec.decode` raises `PayloadUnreadable`, and a node defers the run (`refuse_sealed`).

**Originals are compared.** The store never compares sealed values: a start and a signal have the fingerprint of the
original, which the codecs may key.
"""

import logging
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar, get_args, get_type_hints, runtime_checkable

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.admission import RunLimit
from holdfast.core.audit import AuditEntry
from holdfast.core.call_limits import CallLimit
from holdfast.core.dead_letters import DeadLetter
from holdfast.core.events import Body, ErrorInfo, Event
from holdfast.core.instants import Instant
from holdfast.core.keyed_steps import EndedAttempt
from holdfast.core.messages import Message, Original, Signal, SignalRequest, TaskRequest, payload_type
from holdfast.core.schedules import Schedule
from holdfast.core.state import OPENED_BY, CarriedFailure, CarriedStep, CarriedUpdate
from holdfast.core.streams import Appended, StreamAppend, StreamPage, StreamRead
from holdfast.errors import InvalidInput, PayloadsSealed, PayloadUnreadable
from holdfast.store import port
from holdfast.store.joined import JoinedStore
from holdfast.store.proxy import StoreProxy
from holdfast.store.types import BULLETINS_WITH_PAYLOADS
from holdfast.store.validation import check_names, check_plan_body, check_stored_schedule

T = TypeVar("T")
Row = TypeVar("Row")
Visit = Callable[[str, bytes], bytes]
"""Takes a scope and a payload, and returns the replacement."""

SEALED_MARK = "payload-codecs"
"""The name of the store's key which records that payloads are sealed in this store."""

LAST_CODEC = "offload"
"""The name of the codec that stores large values elsewhere. It comes last, so that it stores the others' output."""

REPORTED = 1_000
"""How many runs with unreadable values are logged."""

logger = logging.getLogger("holdfast.store")


class Payload(NamedTuple):
    """A value and the scope to which it is bound."""

    scope: str
    """The run to which the value belongs. Requests and plans have their own scopes."""
    data: bytes
    """The bytes of the value."""

    @property
    def is_of_run(self) -> bool:
        """Whether the scope is the id of a run."""
        return not self.scope.startswith(f"{_OF_REQUEST}\0")


class PayloadCodec(Protocol):
    """Encodes payloads on their way to the store, and decodes them on their way back. It may do I/O.

    `name` is part of every encoded value. Values come in batches: all those of a commit or of a read.
    """

    @property
    def name(self) -> str:
        """The name of the codec. It must not change while stored values contain it."""
        ...

    async def open(self, store: port.Store) -> None:
        """Prepare for writing to this store. It is called once, before the first payload is encoded."""
        ...

    async def encode(self, payloads: Sequence[Payload]) -> Sequence[bytes | None]:
        """Return what to store instead of each payload. None leaves a payload as it is."""
        ...

    async def decode(self, payloads: Sequence[Payload]) -> Sequence[bytes | str]:
        """Return each decoded payload, or the reason why it cannot be decoded, which must not reveal it."""
        ...

    def fingerprint(self, scope: str, sha256: str) -> str:
        """Return what to store instead of the SHA256 of a value, to recognise the same value: 64 hex digits."""
        ...


@runtime_checkable
class StreamCodec(Protocol):
    """A codec that also encodes artifacts, as streams. A `PayloadCodec` may be one.

    The codec's `name` becomes part of the artifact's address. `of` is the artifact's key, to which the bytes are bound.
    """

    @property
    def name(self) -> str:
        """The name of the codec. It must not change while stored artifacts contain it."""
        ...

    def encode_stream(self, of: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes] | None:
        """Return what to store instead of an artifact. None leaves it as it is."""
        ...

    def decode_stream(self, of: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield a decoded artifact. Raise `ArtifactCorrupt`, or `PayloadUnreadable` without its key."""
        ...


class Seal(Struct, frozen=True, omit_defaults=True, rename={"codecs": codec.SEAL}):
    """A sealed value, as it is stored."""

    codecs: list[str]
    data: str
    of: str = ""
    size: int = 0
    """The size of the value, if it is stored elsewhere."""


_seals = msgspec.json.Decoder(Seal)


async def sealed(store: port.Store, codecs: Sequence[PayloadCodec], *, takes_runs: bool) -> port.Store:
    """Return the store as a process uses it: with its codecs, or unchanged if it needs none.

    On a store where others seal payloads, a process without codecs can read everything else, and is refused where it
    would store an unsealed payload. If it `takes_runs`, it is refused immediately.
    """
    if codecs and isinstance(store, SealingStore):  # from the settings; an app's own replace them, by name
        named = {each.name: each for each in (*store.codecs, *codecs)}
        return SealingStore(store.inner, sorted(named.values(), key=lambda each: each.name == LAST_CODEC))
    if codecs:
        return SealingStore(store, codecs)
    if isinstance(store, SealingStore) or await store.get_key(SEALED_MARK) is None:
        return store
    if takes_runs:
        raise PayloadsSealed(
            "the payloads of this store are encrypted or kept elsewhere: give the node the keys and the artifact store "
            "that the other nodes have (see docs/payload-encryption.md)"
        )
    return SealingStore(store, ())


def refuse_sealed(events: Iterable[Event]) -> None:
    """Raise `PayloadUnreadable` if one of the events has a value that could not be opened."""
    for event in events:
        body = event.data
        for field in _values_of(type(body)):
            value = getattr(body, field)
            if type(value) is Raw and codec.holds_sealed(value):
                raise codec.unreadable_payload()
            if type(value) is ErrorInfo and _is_sealed_error(value):
                raise codec.unreadable_payload()


def _is_sealed_error(error: ErrorInfo | None) -> bool:
    while error is not None:
        if error.message.startswith(_SEALED_TEXT):
            return True
        error = error.cause
    return False


def concealed(item: T) -> T:
    """Return a record as it may be shown: a value that is still sealed shows only that fact."""

    return _rewrite(item, "", _conceal)  # type: ignore[no-any-return]


def concealed_text(text: str) -> str:
    """Return text as it may be shown: a text that is still sealed shows only that fact."""
    return _conceal("", text.encode()).decode() if text.startswith(_SEALED_TEXT) else text


_SEALED_TEXT = codec.SEALED.decode()


def _conceal(_: str, data: bytes) -> bytes:
    seal = _seal_of(data)
    if seal is None:
        return data
    return msgspec.json.encode({codec.SEAL: "encrypted" if "aes-gcm" in seal.codecs else "kept elsewhere"})


# --- where payloads are ------------------------------------------------------------------------------------------

_TEXTS: dict[type, tuple[str, ...]] = {
    ErrorInfo: ("message", "traceback"),
    EndedAttempt: ("error",),
    e.TaskCommented: ("text",),
    TaskRequest: ("text",),
}
"""Text fields written by a person or an error."""

_OWN = frozenset({"options", "streams"})
"""Fields with the engine's JSON, and a turn's appends to streams, which `commit` seals separately."""

_readers: dict[type, "msgspec.json.Decoder[Any]"] = {}


@cache
def _values_of(kind: type) -> tuple[str, ...]:
    """Return the fields of a record that may hold payloads."""
    if not issubclass(kind, Struct) or kind is e.UnknownBody:
        return ()
    texts = _TEXTS.get(kind, ())
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name in kind.__struct_fields__}
    return tuple(name for name, hint in hints.items() if name in texts or (name not in _OWN and _may_hold(hint, kind)))


def _may_hold(hint: Any, inside: type) -> bool:
    if hint is Raw or hint is Body or hint is inside:
        return True
    if isinstance(hint, type) and issubclass(hint, Struct):
        return bool(_values_of(hint)) or hint is DeadLetter
    return any(_may_hold(part, inside) for part in get_args(hint))


@cache
def _is_owner(kind: type) -> bool:
    """Return whether the payloads of such a record are bound to the run that it names."""
    return not issubclass(kind, Body) and "run_id" in getattr(kind, "__struct_fields__", ())


def _rewrite(item: Any, scope: str, visit: Visit) -> Any:
    """Return a record with its payloads replaced; the record itself, if nothing changes."""
    kind: Any = type(item)
    if kind is Raw:
        data = bytes(item)
        given = data if data == b"null" else visit(scope, data)
        return item if given is data else Raw(given)
    if kind is tuple:
        items = [_rewrite(each, scope, visit) for each in item]
        return item if all(new is old for new, old in zip(items, item, strict=True)) else tuple(items)
    if kind is dict:
        return {key: _rewrite(value, scope, visit) for key, value in item.items()} if item else item
    if kind is DeadLetter:
        return _rewrite_letter(item, visit)
    if kind is CarriedStep:
        item = _with_rewritten_body(item, scope, visit)
    fields = _values_of(kind)
    if not fields:
        return item
    if _is_owner(kind):
        scope = item.run_id
    elif kind is port.LoadedRun:
        scope = item.head.run_id
    elif kind is port.Bulletin:
        scope = "\0".join(("bulletin", item.kind, item.bulletin_id))
    elif kind is Schedule:
        scope = "\0".join(("schedule", *item.place))
    texts, changes = _TEXTS.get(kind, ()), {}
    for field in fields:
        value = getattr(item, field)
        if field in texts:
            text = value.encode()
            given = visit(scope, text) if text else text
            changed = value if given is text else given.decode()
        elif field == "payload" and kind in _WITH_PAYLOADS:
            changed = _rewrite_payload(item, scope, visit)
        elif field == "body" and kind is CarriedStep:
            continue
        elif field == "carried":
            changed = _rewrite_carried(value, scope, visit)
        elif field == "signals" and kind is port.NewRun:
            changed = _rewrite_first(item, visit)
        else:
            changed = _rewrite(value, scope, visit)
        if changed is not value:
            changes[field] = changed
    return replace(item, **changes) if changes else item


_WITH_PAYLOADS = frozenset({Message, Signal, SignalRequest})


def _rewrite_payload(item: Any, scope: str, visit: Visit) -> Raw:
    """Return the payload of a message or signal; if the engine reads it, replace only the values inside."""
    kind = payload_type(item)
    if kind is None or item.payload == e.NULL:
        return _rewrite(item.payload, scope, visit)  # type: ignore[no-any-return]
    try:
        inside = codec.decode_with(_reader(kind), item.payload)
    except (InvalidInput, PayloadUnreadable):  # the store refuses it, or it becomes a dead letter
        return _rewrite(item.payload, scope, visit)  # type: ignore[no-any-return]
    changed = _rewrite(inside, scope, visit)
    return item.payload if changed is inside else Raw(msgspec.json.encode(changed))


class _Carried(Struct, frozen=True):
    """The payloads in the data that a rotation carries over. The engine reads the rest in every fold."""

    last_error: ErrorInfo | None = None
    context: Raw | UnsetType = UNSET
    updates: tuple[CarriedUpdate, ...] = ()
    steps: tuple[CarriedStep, ...] | UnsetType = UNSET
    failed: tuple[CarriedFailure, ...] | UnsetType = UNSET


def _rewrite_carried(raw: Raw, scope: str, visit: Visit) -> Raw:
    try:
        whole = msgspec.json.decode(raw, type=dict[str, Raw])
        inside = msgspec.json.decode(raw, type=_Carried)
    except msgspec.MsgspecError:
        return _rewrite(raw, scope, visit)  # type: ignore[no-any-return]
    changed = _rewrite(inside, scope, visit)
    if changed is inside:
        return raw
    payloads = {field: getattr(changed, field) for field in _Carried.__struct_fields__}
    return Raw(msgspec.json.encode({**whole, **{field: of for field, of in payloads.items() if of is not UNSET}}))


def _with_rewritten_body(step: CarriedStep, scope: str, visit: Visit) -> CarriedStep:
    """Return a step that a rotation carries over, with the payloads in the body of its opening event replaced."""
    opening = OPENED_BY.get(step.kind)
    if opening is None:
        return step
    body = codec.decode_body(opening.__name__, step.schema_version, bytes(step.body))
    changed = _rewrite(body, scope, visit)
    if changed is body:
        return step
    present = codec.SCHEMA_VERSIONS.get(opening.__name__, 1)
    return replace(step, body=Raw(codec.encode_body(changed).encode()), schema_version=present)


def _rewrite_first(new: port.NewRun, visit: Visit) -> tuple[SignalRequest, ...]:
    """Return the signals that come with a start, bound to its request."""
    scope = _request_scope(new)
    payloads = [_rewrite_payload(signal, scope, visit) for signal in new.signals]
    return tuple(
        signal if payload is signal.payload else replace(signal, payload=payload)
        for signal, payload in zip(new.signals, payloads, strict=True)
    )


def _rewrite_letter(letter: DeadLetter, visit: Visit) -> DeadLetter:
    """Return a dead letter with the payloads of its message replaced: those of the run that it was for."""
    for kind in (Message, SignalRequest):
        try:
            inside = codec.decode_with(_reader(kind), letter.envelope)
        except InvalidInput:
            continue
        changed = _rewrite(inside, letter.run_id, visit)
        return letter if changed is inside else replace(letter, envelope=msgspec.json.encode(changed))
    return letter


def _reader(kind: type) -> "msgspec.json.Decoder[Any]":
    reader = _readers.get(kind)
    if reader is None:
        reader = _readers[kind] = msgspec.json.Decoder(kind)
    return reader


_OF_REQUEST = "request"
_OF_PLAN = "plan"


def _plan_scope(tenant: str, sha256: str) -> str:
    return "\0".join((_OF_PLAN, tenant, sha256))


class _OfRequest(Protocol):
    @property
    def run_id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def project(self) -> str: ...
    @property
    def environment(self) -> str: ...
    @property
    def plan_id(self) -> str: ...
    @property
    def run_request_id(self) -> str: ...


def _request_scope(run: _OfRequest) -> str:
    place = (run.tenant, run.project, run.environment, run.plan_id, run.run_request_id)
    return "\0".join((_OF_REQUEST, *place))


def _seal_of(data: bytes) -> Seal | None:
    if not data.startswith(codec.SEALED):
        return None
    try:
        return _seals.decode(data)
    except msgspec.MsgspecError:
        return None


# --- the store ---------------------------------------------------------------------------------------------------


class _SealingJoined:
    """A caller's transaction whose payloads pass through codecs on the way in."""

    def __init__(self, joined: JoinedStore, seal: Callable[[Any], Awaitable[Any]]) -> None:
        self._joined = joined
        self._seal = seal

    async def create(self, runs: Sequence[port.NewRun]) -> list[port.Created | port.Existing | port.Refused]:
        return await self._joined.create(await self._seal(runs))

    async def deliver(self, items: Sequence[SignalRequest | Message]) -> list[port.Delivered]:
        return await self._joined.deliver(await self._seal(items))


class SealingStore(StoreProxy):
    """A store whose payloads pass through codecs: in their order on the way in, in reverse on the way back."""

    def __init__(self, store: port.Store, codecs: Sequence[PayloadCodec]) -> None:
        """Without `codecs` nothing can be sealed or opened: payloads stay sealed, and none can be stored."""
        super().__init__(store)
        self.codecs = self._codecs = tuple(codecs)
        self._is_open = False
        self._reported: set[str] = set()

    # --- on the way in

    async def create(
        self, runs: Sequence[port.NewRun], claim_for: str | None = None
    ) -> list[port.Created | port.Existing | port.Refused]:
        return await self._store.create(await self._sealed(runs), claim_for)

    async def deliver(self, items: Sequence[SignalRequest | Message]) -> list[port.Delivered]:
        return await self._store.deliver(await self._sealed(items))

    def joined(self, connection: Any) -> JoinedStore:
        return _SealingJoined(self._store.joined(connection), self._sealed)

    async def commit(self, turns: Sequence[port.Turn]) -> list[port.Committed | port.CommitConflict]:
        sealed = await self._sealed(turns)
        if any(turn.streams for turn in turns):
            sealed = [await self._with_streams(turn) if turn.streams else turn for turn in sealed]
        return await self._opened(await self._store.commit(sealed))

    async def _with_streams(self, turn: port.Turn) -> port.Turn:
        """Return a turn with its chunks sealed and bound to its run. Chunks are never stored elsewhere."""
        given = [
            StreamAppend(run_id=turn.run_id, name=each.name, step_id="", attempt=0, node="", body=each.body)
            for each in turn.streams
        ]
        made = zip(turn.streams, await self._sealed_appends(given), strict=True)
        return replace(turn, streams=tuple(replace(each, body=sealed.body) for each, sealed in made))

    async def append_streams(self, items: Sequence[StreamAppend]) -> list[Appended | port.Refused]:
        return await self._store.append_streams(await self._sealed_appends(items))

    async def _sealed_appends(self, items: Sequence[StreamAppend]) -> Sequence[StreamAppend]:
        """Return chunks sealed segment by segment and bound to their run. They are never stored elsewhere."""
        if not self._codecs:
            raise PayloadsSealed("the payloads of this store are encrypted; this process has no keys to store chunks")
        codecs = [each for each in self._codecs if each.name != LAST_CODEC]
        return await SealingStore(self._store, codecs)._sealed(items) if codecs else items

    async def heartbeat(self, node: str, beats: Sequence[port.Heartbeat], visible_ms: int) -> list[bool]:
        return await self._store.heartbeat(node, await self._sealed(beats), visible_ms)

    async def release_jobs(self, node: str, jobs: Sequence[port.Job]) -> int:
        given: Sequence[Any] = jobs
        bare = [replace(job, input=e.NULL, details=e.NULL) if type(job) is port.Job else job for job in given]
        return await self._store.release_jobs(node, bare)

    async def put_plan(self, tenant: str, sha256: str, body: bytes) -> None:
        """Store the body of a plan sealed, bound to the tenant and the hash. It is never stored elsewhere."""
        check_plan_body(tenant, sha256, body)
        if not self._codecs:
            raise PayloadsSealed("the payloads of this store are encrypted; this process has no keys to store plans")
        await self._sealed(())
        data, names = body, list[str]()
        for each in self._codecs:
            if each.name == LAST_CODEC:
                continue
            [made] = await each.encode([Payload(_plan_scope(tenant, sha256), data)])
            if made is not None:
                data = made
                names.append(each.name)
        sealed = body if not names else msgspec.json.encode(Seal(names, b64encode(data).decode(), _OF_PLAN))
        await self._store.put_plan(tenant, sha256, sealed)

    async def commit_schedule(
        self,
        schedule: Schedule,
        expected_revision: int,
        starts: Sequence[port.NewRun] = (),
        audit: AuditEntry | None = None,
    ) -> tuple[Schedule, list[port.Created | port.Existing | port.Refused]]:
        """Store a schedule with its input and context sealed, bound to its key. They are never stored elsewhere."""
        given = schedule
        check_stored_schedule(schedule)
        values = schedule.input, schedule.context
        if any(value != e.NULL and not codec.holds_sealed(value) for value in values):
            if not self._codecs:
                raise PayloadsSealed("the payloads of this store are encrypted; this process has no keys to store them")
            codecs = [each for each in self._codecs if each.name != LAST_CODEC]
            if codecs:
                [given] = await SealingStore(self._store, codecs)._sealed([schedule])
        stored, answers = await self._store.commit_schedule(given, expected_revision, await self._sealed(starts), audit)
        return replace(stored, input=schedule.input, context=schedule.context), answers

    async def put_bulletins(self, kind: str, bodies: Mapping[str, Raw], keep_ms: int) -> list[bool]:
        """Put bulletins. Kinds that hold payloads are sealed, bound to their ids, and never stored elsewhere."""
        if kind not in BULLETINS_WITH_PAYLOADS:
            return await self._store.put_bulletins(kind, bodies, keep_ms)
        check_names("bulletin_id", list(bodies))
        if not self._codecs:
            raise PayloadsSealed("the payloads of this store are encrypted; this process has no keys to send them")
        given = [
            port.Bulletin(kind=kind, bulletin_id=each, at=0, expires_at=0, body=body) for each, body in bodies.items()
        ]
        codecs = [each for each in self._codecs if each.name != LAST_CODEC]
        made = await SealingStore(self._store, codecs)._sealed(given) if codecs else given
        return await self._store.put_bulletins(kind, {each.bulletin_id: each.body for each in made}, keep_ms)

    # --- on the way back

    async def read_streams(self, items: Sequence[StreamRead]) -> list[StreamPage | None]:
        pages = await self._store.read_streams(items)
        opened = iter(await self._opened([page for page in pages if page is not None]))
        return [None if page is None else next(opened) for page in pages]

    async def find_bulletins(self, query: port.BulletinQuery) -> port.Found[port.Bulletin]:
        found = await self._store.find_bulletins(query)
        return port.Found(await self._opened(found), found.cursor, found.unreadable)

    async def get_plan(self, tenant: str, sha256: str) -> bytes | None:
        body = await self._store.get_plan(tenant, sha256)
        seal = None if body is None else _seal_of(body)
        if body is None or seal is None or seal.of != _OF_PLAN:
            return body
        data, left = b64decode(seal.data), [*seal.codecs]
        problem = f"there is no codec {left[-1]!r} here"
        for each in reversed(self._codecs):
            if left and left[-1] == each.name:
                [opened] = await each.decode([Payload(_plan_scope(tenant, sha256), data)])
                if isinstance(opened, str):
                    problem = opened
                    break
                data = opened
                left.pop()
        if left:
            raise PayloadUnreadable(f"the body of plan {sha256} cannot be opened: {problem}")
        return data

    async def load(self, run_ids: Sequence[str]) -> list[port.LoadedRun | None]:
        return await self._opened(await self._store.load(run_ids))

    async def read_events(
        self, run_id: str, after: int = 0, limit: int | None = None, most_bytes: int | None = None
    ) -> list[Event]:
        events = await self._store.read_events(run_id, after, limit, most_bytes)
        return await self._opened(_within(events, most_bytes))

    async def claim(self, node: str, limit: int, plans: Sequence[port.Plan] | None = None) -> list[port.LoadedRun]:
        return await self._opened(await self._store.claim(node, limit, plans))

    async def acquire_jobs(
        self, node: str, queues: Sequence[str], activities: Sequence[str], limit: int, visible_ms: int
    ) -> list[port.Job]:
        return await self._opened(await self._store.acquire_jobs(node, queues, activities, limit, visible_ms))

    async def acquire_limited_jobs(
        self,
        node: str,
        queues: Sequence[str],
        activities: Sequence[str],
        limits: Mapping[str, CallLimit],
        limit: int,
        visible_ms: int,
    ) -> tuple[list[port.Job], Instant | None]:
        jobs, again_at = await self._store.acquire_limited_jobs(node, queues, activities, limits, limit, visible_ms)
        return await self._opened(jobs), again_at

    async def admit(
        self, limits: Mapping[str, RunLimit], limit: int, claim_for: str | None = None
    ) -> tuple[list[port.Admitted], Instant | None]:
        admitted, again_at = await self._store.admit(limits, limit, claim_for)
        return await self._opened(admitted), again_at

    async def find(self, query: port.Query[Row]) -> port.Found[Row]:
        found = await self._store.find(query)
        rows = _within(found, getattr(query, "most_bytes", None))
        cursor = found.cursor if len(rows) == len(found) else None  # otherwise the next page begins after the last row
        return port.Found(await self._opened(rows), cursor, found.unreadable, found.as_of, found.missing)

    async def fetched(self, events: Sequence[Event]) -> list[Event]:
        """Return events as stored, with values that are stored elsewhere fetched; sealed values stay sealed.

        For the archive: values that are stored elsewhere are deleted with their run.
        """
        elsewhere = [each for each in self._codecs if each.name == LAST_CODEC]
        found: list[tuple[Payload, Seal]] = []

        def collect(scope: str, data: bytes) -> bytes:
            seal = _seal_of(data)
            if seal is not None and seal.codecs[-1:] == [LAST_CODEC]:
                found.append((Payload(scope, data), seal))
            return data

        for event in events:
            _rewrite(event, "", collect)
        if not found or not elsewhere:
            return list(events)
        values = await elsewhere[0].decode([Payload(p.scope, b64decode(seal.data)) for p, seal in found])
        made: dict[tuple[str, bytes], bytes] = {}
        for (payload, seal), value in zip(found, values, strict=True):
            if isinstance(value, str):
                self._report(payload.scope, value)
            else:
                left = seal.codecs[:-1]
                made[payload] = msgspec.json.encode(Seal(left, b64encode(value).decode(), seal.of)) if left else value
        return [_rewrite(event, "", lambda scope, data: made.get((scope, data), data)) for event in events]

    async def opened_events(self, events: Sequence[Event], of: "_OfRequest") -> list[Event]:
        """Return events of a run that the store does not have, with their payloads opened."""
        return await self._opened(events, {of.run_id: _request_scope(of)})

    # --- implementation

    async def _sealed(self, items: Sequence[T]) -> list[T]:
        """Return records with sealed payloads, and with fingerprints of the originals."""
        if self._codecs and not self._is_open:
            for each in self._codecs:
                await each.open(self._store)
            await self._store.put_key(SEALED_MARK, codec.digest(SEALED_MARK.encode()))
            self._is_open = True
        payloads: list[Payload] = []
        malformed: set[int] = set()
        for place, item in enumerate(items):
            found = _unsealed_in(item)
            if found is None:
                malformed.add(place)  # the store refuses it, with the reason
            else:
                payloads += found
        if not self._codecs and payloads:
            raise PayloadsSealed(
                "the payloads of this store are encrypted or kept elsewhere; this process has no keys to store others"
            )
        if not self._codecs:
            return list(items)
        results = iter(await self._seal(payloads))

        def exchange(_: str, data: bytes) -> bytes:
            return data if data.startswith(codec.SEALED) else next(results)

        return [
            item if place in malformed else _rewrite(self._fingerprinted(item), "", exchange)
            for place, item in enumerate(items)
        ]

    async def _seal(self, payloads: Sequence[Payload]) -> list[bytes]:
        data = [payload.data for payload in payloads]
        names: list[list[str]] = [[] for _ in payloads]
        for each in self._codecs:
            given = [Payload(payload.scope, now) for payload, now in zip(payloads, data, strict=True)]
            for place, made in enumerate(await each.encode(given)):
                if made is not None:
                    data[place] = made
                    names[place].append(each.name)
        return [
            now if not by else _sealed_value(by, now, payload)
            for payload, now, by in zip(payloads, data, names, strict=True)
        ]

    def _fingerprinted(self, item: Any) -> Any:
        """Return a record with the fingerprint by which the store recognises what the sender sent."""
        if isinstance(item, port.NewRun):
            digest = self._fingerprint(item.request_key, item.input_sha256)
            signals = tuple(self._fingerprinted(signal) for signal in item.signals)
            return replace(item, input_sha256=digest, signals=signals)
        if isinstance(item, SignalRequest):
            scope = f"{item.name}|{item.signal_id}"
            size = len(item.payload)
            digest = self._fingerprint(scope, item.payload_sha256)
            return replace(item, original=Original(digest, size)) if item.original is None else item
        if isinstance(item, port.Turn) and (item.starts or item.sends):
            starts = tuple(self._fingerprinted(new) for new in item.starts)
            return replace(item, starts=starts, sends=tuple(self._fingerprinted(sent) for sent in item.sends))
        return item

    def _fingerprint(self, scope: str, sha256: str) -> str:
        for each in self._codecs:
            sha256 = each.fingerprint(scope, sha256)
        return sha256

    async def _opened(self, items: Sequence[T], requests: Mapping[str, str] | None = None) -> list[T]:
        """Return records with their payloads opened; payloads that cannot be opened stay sealed."""
        found: list[Payload] = []

        def collect(scope: str, data: bytes) -> bytes:
            if data.startswith(codec.SEALED):
                found.append(Payload(scope, data))
            return data

        for item in items:
            _rewrite(item, "", collect)
        if not found or not self._codecs:
            return list(items)
        results = iter(await self._open(found, requests))

        def exchange(_: str, data: bytes) -> bytes:
            return next(results) if data.startswith(codec.SEALED) else data

        return [_rewrite(item, "", exchange) for item in items]

    async def _open(self, found: Sequence[Payload], requests: Mapping[str, str] | None = None) -> list[bytes]:
        seals = [_seal_of(payload.data) for payload in found]
        scopes = await self._scopes(found, seals, requests)
        data = [b64decode(seal.data) if seal is not None else b"" for seal in seals]
        left = [[*seal.codecs] if seal is not None else ["?"] for seal in seals]
        problems: dict[int, str] = {}
        for each in reversed(self._codecs):
            mine = [place for place, names in enumerate(left) if names and names[-1] == each.name]
            if not mine:
                continue
            made = await each.decode([Payload(scopes[place], data[place]) for place in mine])
            for place, result in zip(mine, made, strict=True):
                if isinstance(result, str):
                    problems[place] = result
                else:
                    data[place] = result
                    left[place].pop()
        for place, names in enumerate(left):
            if names:
                self._report(found[place].scope, problems.get(place, f"there is no codec {names[-1]!r} here"))
        return [payload.data if names else now for payload, now, names in zip(found, data, left, strict=True)]

    async def _scopes(
        self, found: Sequence[Payload], seals: Sequence[Seal | None], requests: Mapping[str, str] | None = None
    ) -> list[str]:
        """Return the scope of each payload: its run, or the request that started the run."""
        runs = sorted({p.scope for p, seal in zip(found, seals, strict=True) if seal is not None and seal.of})
        if not runs:
            return [payload.scope for payload in found]
        if requests is None:
            loaded = [run for run in await self._store.load(runs) if run is not None]
            requests = {run.head.run_id: _request_scope(run.head) for run in loaded}
        return [
            requests.get(payload.scope, "") if seal is not None and seal.of else payload.scope
            for payload, seal in zip(found, seals, strict=True)
        ]

    def _report(self, run_id: str, problem: str) -> None:
        if run_id not in self._reported and len(self._reported) < REPORTED:
            self._reported.add(run_id)
            logger.error("run %s: a value cannot be decrypted or fetched: %s", run_id, problem)


def _unsealed_in(item: Any) -> list[Payload] | None:
    """Return the payloads of a record that must be sealed; None if the record cannot be stored."""
    found: list[Payload] = []

    def collect(scope: str, data: bytes) -> bytes:
        if not data.startswith(codec.SEALED):  # otherwise it could not be opened, and is put back unchanged
            scope.encode()
            found.append(Payload(scope, data))
        return data

    try:
        _rewrite(item, "", collect)
        if isinstance(item, SignalRequest):
            f"{item.name}|{item.signal_id}".encode()
            is_sound = codec.check(item.payload, "payload") is None and not codec.holds_sealed(item.payload)
            return found if is_sound else None
        if isinstance(item, StreamAppend):
            return None if codec.check(item.body, "body") else found
        if isinstance(item, port.Heartbeat) and item.details is not UNSET:
            return None if codec.check(item.details, "details") else found
    except (TypeError, AttributeError, ValueError, msgspec.MsgspecError):
        return None
    return found


def _sealed_value(names: Sequence[str], data: bytes, payload: Payload) -> bytes:
    size = len(payload.data) if names[-1] == LAST_CODEC else 0
    return msgspec.json.encode(Seal([*names], b64encode(data).decode(), "" if payload.is_of_run else _OF_REQUEST, size))


def _within(items: Sequence[T], most_bytes: int | None) -> Sequence[T]:
    """Return records up to the one at which values stored elsewhere reach this total size."""
    if most_bytes is None:
        return items
    size = 0

    def add(_: str, data: bytes) -> bytes:
        nonlocal size
        seal = _seal_of(data)
        size += 0 if seal is None else seal.size
        return data

    for place, item in enumerate(items):
        _rewrite(item, "", add)
        if size >= most_bytes:
            return items[: place + 1]
    return items
