"""Checks and refusals that are the same words in every store."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, TypeVar, get_args

from msgspec import UNSET, Struct
from msgspec.structs import asdict, replace

from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.access import AccessToken
from holdfast.core.admission import RunLimit, check_admission_request, check_limit
from holdfast.core.audit import AuditEntry
from holdfast.core.dead_letters import DeadLetter, Reason, Settlement
from holdfast.core.declarations import check_declaration
from holdfast.core.events import Event
from holdfast.core.index_rows import Wait
from holdfast.core.instants import Instant
from holdfast.core.messages import INTEGER_LIMIT, Message, SignalRequest, check_integer, check_message, check_signal
from holdfast.core.names import check_name
from holdfast.core.state import TERMINAL, RunStatus
from holdfast.errors import (
    CallerError,
    CheckpointOwnershipCapabilityError,
    Conflict,
    CorruptHistory,
    InvalidInput,
    LeaseExpired,
    NodeSuperseded,
    NotFound,
    NotWaiting,
    RateLimited,
    RunTerminal,
    SignalAcceptanceIndeterminate,
)
from holdfast.limits import LEASE_MS, NAME_BYTES, NODE_NAME_BYTES, SEARCH_CHARS, SEARCH_WORDS, Limits, check_types
from holdfast.settings import Ownership
from holdfast.store.port import RunStore
from holdfast.store.types import Heartbeat, Job, NewRun, PurgePolicy, PurgeReport, Turn

F = TypeVar("F")

MINUTE = 60_000_000
LEASE_BELIEVED = 2 * LEASE_MS * 1_000
"""How far ahead, in microseconds, a lease may end: the longest one, given by a clock that is a little ahead."""

LIFE = "#"
"""Stands in a node's identity between its name and what tells this life of it from others; in no name."""

_SHA256 = re.compile("[0-9a-f]{64}")


def check_ownership(store: RunStore, mode: Ownership) -> None:
    """Refuse a store that cannot guard commits as `mode` demands. Call before claiming anything."""
    if mode == "cas-required":
        require_conditional_batch(store, f"checkpoint_ownership={mode!r}")


def require_conditional_batch(store: RunStore, feature: str) -> None:
    """Refuse `feature` on a store without conditional_batch, instead of falling back to read-then-write."""
    if not store.capabilities.conditional_batch:
        name = type(store).__name__
        raise CheckpointOwnershipCapabilityError(
            f"{feature} needs the store capability conditional_batch, and {name} does not have it",
            capability="conditional_batch",
            feature=feature,
            store=name,
        )


def require_for_signals(store: RunStore, requests: Iterable[Any]) -> None:
    """Refuse signals with an id on a store that could not tell a retry from a second signal."""
    if store.capabilities.conditional_batch:
        return
    if any(getattr(request, "signal_id", None) is not None for request in requests):
        require_conditional_batch(store, "idempotent signal delivery")


def require_for_records(store: RunStore, turns: Iterable[Turn]) -> None:
    """Refuse turns with activity records on a store that could not keep them once."""
    if not store.capabilities.conditional_batch and any(turn.records for turn in turns):
        require_conditional_batch(store, "activity reconciliation")


def check_batch(items: Sequence[Any], limits: Limits) -> None:
    """Refuse a batch that would hold the store for too long."""
    if len(items) > limits.batch_items:
        raise InvalidInput(f"a batch has at most {limits.batch_items} items, this one has {len(items)}")


def check_page(limit: int) -> int:
    """Return the limit, or refuse it."""
    if type(limit) is not int or not 1 <= limit < 2**31:
        raise InvalidInput(f"a limit is a whole number from 1 to 2^31, not {limit!r}", field="limit")
    return limit


def check_values(**values: Any) -> None:
    """Refuse what no store can look up: text that is not Unicode, numbers past 2^62, and anything else."""
    for field, value in values.items():
        if isinstance(value, str):
            problem = _check_unicode(field, value)
        elif isinstance(value, tuple):
            check_values(**{f"{field}[{index}]": item for index, item in enumerate(value)})
            problem = None
        elif isinstance(value, bool):
            problem = None
        else:
            problem = check_integer(field, value, optional=True)
        if problem is not None:
            raise problem


TOO_SLOW = "the list took too long to read; ask for less, such as by workflow, status or time"


def check_query(query: Struct) -> None:
    """Refuse a query or a policy with a field that no store can look up."""
    check_values(**{field: getattr(query, field) for field in query.__struct_fields__})
    for field in ("look", "most_bytes"):
        check_bound(field, getattr(query, field, None))
    text = getattr(query, "text", None)
    if text is not None and (len(text) > SEARCH_CHARS or len(text.split()) > SEARCH_WORDS):
        raise InvalidInput(
            f"text: a search has at most {SEARCH_WORDS} words and {SEARCH_CHARS} characters", field="text"
        )


def finder_of(finders: Mapping[type, F], query: Struct) -> F:
    """Return the function that answers such a query; refuse a query that has none, or that no store can answer."""
    finder = finders.get(type(query))
    if finder is None:
        raise InvalidInput(f"a store cannot look for a {type(query).__qualname__}", field="query")
    check_query(query)
    return finder


def check_bound(field: str, most: int | None) -> None:
    """Refuse a bound that is malformed."""
    if most is not None and (type(most) is not int or not 1 <= most < 2**53):
        raise InvalidInput(f"{field} is a whole number from 1, not {most!r}", field=field)


def check_ids(ids: Sequence[Any], limits: Limits | None = None) -> None:
    """Refuse a list of ids that no store can look up."""
    if limits is not None:
        check_batch(ids, limits)
    for run_id in ids:
        if not isinstance(run_id, str):
            raise InvalidInput(f"an id is a string, not {run_id!r}", field="run_id")
        check_values(run_id=run_id)


def _check_unicode(field: str, value: str) -> InvalidInput | None:
    try:
        value.encode()
    except UnicodeEncodeError:
        return InvalidInput(f"{field} is not valid Unicode: {value!r}", field=field)
    return None


def check_plans(plans: Sequence[Any] | None) -> None:
    """Refuse a list of definitions that no store can look up."""
    for plan in plans or ():
        if not isinstance(plan, tuple) or len(plan) != 2 or not all(isinstance(part, str) for part in plan):
            raise InvalidInput(f"a definition is a pair of a plan's id and its version, not {plan!r}", field="plans")
        check_values(plans=plan)


def check_late(late_ms: int) -> None:
    """Refuse a time to be late by that is malformed."""
    if type(late_ms) is not int or not 0 <= late_ms < 2**40:
        raise InvalidInput(f"late_ms is a whole number from 0 to some years, not {late_ms!r}", field="late_ms")


def check_lease(node: str, lease_ms: int, plans: Sequence[Any] | None = None) -> None:
    """Refuse a lease that is malformed."""
    check_names("node", [node])
    check_plans(plans)
    if type(lease_ms) is not int or not 1 <= lease_ms <= LEASE_MS:
        raise InvalidInput(f"a lease lasts from 1 to {LEASE_MS} ms, not {lease_ms!r}", field="lease_ms")


def lease_end(lease_until: Instant, now: Instant) -> Instant:
    """Return when a lease ends: at once, if it was given by a clock that was so far ahead that nobody can mean it."""
    return lease_until if lease_until <= now + LEASE_BELIEVED else now


def check_names(field: str, names: Sequence[Any], limits: Limits | None = None) -> None:
    """Refuse a list in which something cannot be a name."""
    if limits is not None:
        check_batch(names, limits)
    for name in names:
        problem = check_name(field, name)
        if problem is not None:
            raise problem


def check_visible(visible_ms: int) -> None:
    """Refuse a time to be invisible that is malformed."""
    if type(visible_ms) is not int or not 1 <= visible_ms < 2**40:
        raise InvalidInput(f"a job is taken for 1 ms to some years, not {visible_ms!r}", field="visible_ms")


def check_take(
    node: str, queues: Sequence[str], activities: Sequence[str], limit: int, visible_ms: int, limits: Limits
) -> None:
    """Refuse to take jobs in a way that is malformed."""
    check_names("node", [node])
    check_names("queues", queues, limits)
    check_names("activities", activities, limits)
    check_page(limit)
    check_visible(visible_ms)


def check_beats(node: str, beats: Sequence[Heartbeat], visible_ms: int, limits: Limits) -> None:
    """Refuse beats of which one is malformed."""
    check_names("node", [node])
    check_visible(visible_ms)
    check_batch(beats, limits)
    for beat in beats:
        problem = _check_beat(beat)
        if problem is not None:
            raise problem


def _check_beat(beat: Any) -> InvalidInput | None:
    if not isinstance(beat, Heartbeat):
        return InvalidInput(f"a beat is a Beat, not {type(beat).__qualname__}")
    problem = check_name("run_id", beat.run_id) or check_name("step_id", beat.step_id)
    if problem is None and beat.queue != "":
        problem = check_name("queue", beat.queue)
    problem = problem or check_integer("engine_attempt_id", beat.engine_attempt_id)
    if problem is None and beat.details is not UNSET:
        problem = codec.check(beat.details, "details")
    return problem


def check_release(node: str, jobs: Sequence[Any], limits: Limits) -> None:
    """Refuse to give back jobs in a way that is malformed."""
    check_names("node", [node])
    check_batch(jobs, limits)
    for job in jobs:
        run_id = getattr(job, "run_id", "")
        problem = check_name("run_id", run_id) or _check_job(job, run_id)
        if problem is not None:
            raise problem


_FILLED_BY_CALLERS: frozenset[type] = frozenset(
    {
        e.RunQueued,
        e.ChildStarted,
        e.SignalSent,
        e.SignalAccepted,
        e.SignalRejected,
        e.TaskCreated,
        e.TaskAssigned,
        e.TaskAnswered,
        e.TaskCommented,
        e.TaskCompleted,
        e.TaskRefused,
    }
)
"""Bodies with fields, beside names and JSON, that come from callers' code."""


def can_be_read(events: Iterable[Event]) -> bool:
    """Return whether what is written of these events can be read again. What cannot is refused, never stored."""
    for event in events:
        if type(event.data) in _FILLED_BY_CALLERS:
            try:
                codec.decode_body(event.event_type, event.schema_version, codec.encode_body(event.data))
            except (CorruptHistory, TypeError, ValueError, OverflowError):
                return False
    return True


def can_be_kept(turn: Turn) -> bool:
    """Return whether what a turn writes can be read again, by whoever is to read it."""
    if (turn.jobs and not can_be_queued(turn)) or (turn.dead and not can_be_buried(turn)):
        return False
    for event in turn.events:
        if type(event.data) in _FILLED_BY_CALLERS:
            return can_be_read(turn.events)
    return True


def can_be_queued(turn: Turn) -> bool:
    """Say whether the turn's jobs are the run's own and can be read again by whoever takes them."""
    return all(_check_job(job, turn.run_id) is None for job in turn.jobs)


def _check_job(job: Any, run_id: str) -> InvalidInput | None:
    if not isinstance(job, Job) or job.run_id != run_id:
        return InvalidInput("what a turn puts into a queue is a Job of its own run", field="jobs")
    problem: InvalidInput | None = None
    for field in ("step_id", "queue", "activity"):
        problem = problem or check_name(field, getattr(job, field))
    for field in ("logical_attempt_id", "engine_attempt_id", "first_engine_attempt_id", "scheduled_at", "due_at"):
        problem = problem or check_integer(field, getattr(job, field), optional=field == "due_at")
    for field in ("input", "options", "details"):
        problem = problem or codec.check(getattr(job, field), field)
    return problem


def without_rate(limits: Limits) -> Limits:
    """Return the limits for what runs send: how many in a minute does not matter."""
    return replace(limits, signals_per_run_per_minute=INTEGER_LIMIT)


def never_rejected(starts: Iterable[NewRun]) -> list[NewRun]:
    """Return the runs that a turn starts so that they queue where others would be refused."""
    return [
        replace(new, admission=replace(new.admission, limit=replace(new.admission.limit, overload="queue")))
        if new.admission is not None and new.admission.limit.overload == "reject"
        else new
        for new in starts
    ]


def check_admit(run_limits: Mapping[str, RunLimit], limit: int, node: str | None, limits: Limits) -> None:
    """Refuse to let runs in in a way that is malformed."""
    check_names("limits", list(run_limits), limits)
    check_page(limit)
    check_values(node=node)
    for run_limit in run_limits.values():
        problem = check_limit(run_limit)
        if problem is not None:
            raise problem


def first_signals(new: NewRun, run_id: str) -> list[SignalRequest]:
    """Return the signals that come with a request, addressed to the run that the request has led to."""
    return [replace(request, run_id=run_id) for request in new.signals]


def check_first_signals(new: NewRun, limits: Limits) -> CallerError | None:
    """Return why a new run cannot take the signals that come with it, or None: then it takes every one of them."""
    for request in first_signals(new, new.run_id):
        problem = check_signal(request, limits)
        if request.expected_version is not None or request.accept_before is not None:
            return InvalidInput("the signals that come with a run have no conditions", field="signals")
        if problem is not None or request.require_waiting:
            return problem or not_waiting(request)
    scopes = [(request.name, request.signal_id) for request in new.signals if request.signal_id is not None]
    if len(set(scopes)) != len(scopes):
        return InvalidInput("two signals that come with a run have the same id", field="signals")
    if len(new.signals) > limits.signals_per_run_per_minute:
        return InvalidInput(f"a run begins with at most {limits.signals_per_run_per_minute} signals", field="signals")
    return None


def finds_wait(waits: Sequence[Wait], ahead: Sequence[str | None], step_id: str | None) -> bool:
    """Say whether a signal would be taken, after those ahead of it, of the same name, have taken their waits.

    `ahead` and `step_id` say which wait a signal is addressed to; one without an address takes the oldest.
    """
    free = [wait.step_id for wait in sorted(waits, key=_opened)]
    for address in (*ahead, step_id):
        taken = address if address is not None else next(iter(free), None)
        is_taken = taken in free
        if taken is not None and is_taken:
            free.remove(taken)
    return is_taken


def _opened(wait: Wait) -> tuple[Instant, int, str]:
    """Return when a wait was opened: its token ends with the number of the event that did."""
    number = wait.token.rpartition("@")[2]
    return wait.since, int(number) if number.isdecimal() else 0, wait.step_id


def can_be_buried(turn: Turn) -> bool:
    """Say whether the turn's dead letters are the run's own and can be read again."""
    return all(_check_letter(letter, turn.run_id) is None for letter in turn.dead)


def _check_letter(letter: Any, run_id: str) -> InvalidInput | None:
    if not isinstance(letter, DeadLetter) or letter.run_id != run_id:
        return InvalidInput("what a turn gives up is a DeadLetter of its own run", field="dead")
    if type(letter.envelope) is not bytes or letter.reason not in get_args(Reason):
        return InvalidInput("a dead letter has bytes and a known reason", field="dead")
    problem = check_name("letter_id", letter.letter_id) or check_name("node", letter.node)
    problem = problem or check_integer("died_at", letter.died_at)
    return problem or _check_unicode("detail", letter.detail)


def check_settlement(ids: Sequence[Any], action: Any, actor: Any, limits: Limits) -> None:
    """Refuse to settle dead letters in a way that is malformed."""
    check_ids(ids, limits)
    if action not in get_args(Settlement):
        raise InvalidInput(f"a dead letter is settled by requeue or drop, not {action!r}", field="action")
    if not isinstance(actor, str):
        raise InvalidInput(f"actor is text, not {actor!r}", field="actor")
    check_values(actor=actor)


def settled_message(letter: DeadLetter, action: Settlement, status: RunStatus) -> Message | CallerError | None:
    """Return the message to put back, None if it is to be dropped, or why it cannot be settled so."""
    if letter.settled is not None:
        return Conflict(f"letter {letter.letter_id!r} was settled before: {letter.settled}", letter_id=letter.letter_id)
    if action == "drop":
        return None
    if letter.reason == "refused":
        problem = "was refused by the run that it was for: send it again yourself, or drop the letter"
        return InvalidInput(f"what letter {letter.letter_id!r} holds {problem}")
    if status in TERMINAL:
        return run_terminal(letter.run_id, status)
    try:
        return replace(codec.decode(letter.envelope, Message), due_at=None, attempts=0)
    except InvalidInput:
        return InvalidInput(f"letter {letter.letter_id!r} cannot be read, so it cannot be handled again")


def check_definitions(definitions: Sequence[Any], limits: Limits) -> None:
    """Refuse definitions that could not be kept, or not be read again."""
    check_batch(definitions, limits)
    for definition in definitions:
        problem = check_declaration(definition)
        if problem is not None:
            raise problem


def no_such_letter(letter_id: str) -> NotFound:
    """Make the refusal to settle a dead letter that does not exist."""
    return NotFound(f"there is no dead letter {letter_id!r}", letter_id=letter_id)


def unreadable_letter(letter_id: str) -> Conflict:
    """Make the refusal to settle a dead letter whose row is damaged."""
    return Conflict(f"the row of dead letter {letter_id!r} is damaged: repair or delete it", letter_id=letter_id)


def check_tokens(tokens: Sequence[Any], limits: Limits) -> None:
    """Refuse tokens that could not be kept, or not be found again."""
    check_batch(tokens, limits)
    for token in tokens:
        if not isinstance(token, AccessToken):
            raise InvalidInput(f"a token to keep is an AccessToken, not {type(token).__qualname__}")
        check_types(token)
        digest: Any = token.digest
        if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise InvalidInput("the digest of a token is 64 hex digits", field="digest")
        places = [place for place in (token.tenant, token.project, token.environment) if place is not None]
        check_names("token", [token.token_id, token.name, *token.scopes, *token.roles, *places])
        check_query(token)


def check_audit(entries: Sequence[Any], limits: Limits) -> None:
    """Refuse entries of the audit log that could not be kept, or not be found again."""
    check_batch(entries, limits)
    for entry in entries:
        problem = unfit_entry(entry)
        if problem is not None:
            raise problem


def unfit_entry(entry: Any) -> InvalidInput | None:
    """Return why an entry of the audit log cannot be kept, or None."""
    if not isinstance(entry, AuditEntry):
        return InvalidInput(f"an entry of the audit log is an AuditEntry, not {type(entry).__qualname__}")
    for field in ("entry_id", "operation"):
        problem = check_name(field, getattr(entry, field))
        if problem is not None:
            return problem
    for field in ("actor", "subject", "detail", "outcome", "correlation_id"):
        value: Any = getattr(entry, field)
        problem = _check_unicode(field, value) if isinstance(value, str) else InvalidInput(f"{field} is text")
        if problem is not None:
            return problem
    for field in ("tenant", "project", "environment", "run_id"):
        value = getattr(entry, field)
        problem = None if value is None else check_name(field, value)
        if problem is not None:
            return problem
    if entry.by is not None:
        return check_name("by.token_id", entry.by.token_id) or _check_unicode("by.name", entry.by.name)
    return None


def audited(entry: AuditEntry, run_id: str, place: tuple[str, str, str], now: Instant) -> AuditEntry:
    """Return an entry about a run, with whose run it is."""
    tenant, project, environment = place
    return replace(entry, run_id=run_id, tenant=tenant, project=project, environment=environment, at=now)


def letter_entry(entry: AuditEntry, letter_id: str) -> AuditEntry:
    """Return the entry about one of the dead letters that are settled together."""
    return replace(entry, entry_id=f"{entry.entry_id}:{letter_id}"[:NAME_BYTES], subject=letter_id)


def migration_entry(present: int, latest: int, now: Instant) -> AuditEntry:
    """Return the entry about a migration of the schema, which the store itself does."""
    detail = f"schema {present} to {latest}"
    return AuditEntry(entry_id=f"migrate-{latest}", operation="store.migrate", actor="holdfast", detail=detail, at=now)


def check_purge(policy: PurgePolicy, audit: AuditEntry | None, limits: Limits) -> None:
    """Refuse to purge in a way that is malformed."""
    check_query(policy)
    check_page(policy.limit)
    check_audit(() if audit is None else (audit,), limits)
    if policy.run_ids is not None:
        check_ids(policy.run_ids, limits)
    if policy.tokens and policy.tenant is None:
        raise InvalidInput("tokens are deleted of one tenant: name it", field="tenant")


def purge_entry(entry: AuditEntry, report: PurgeReport, now: Instant) -> AuditEntry:
    """Return the entry about a purge, with what was deleted."""
    counts = asdict(report)
    said = ", ".join(f"{name} {count}" for name, count in counts.items() if count and name != "has_more")
    return replace(entry, detail=said or "nothing", at=now)


def check_key(name: Any, key: Any) -> None:
    """Refuse a key that could not be kept."""
    check_names("name", [name])
    if not isinstance(key, str) or not _SHA256.fullmatch(key):
        raise InvalidInput("a key is 64 hex digits", field="key")


def check_new_run(new: Any) -> CallerError | None:
    """Return why the run cannot be created whatever is in the store, or None."""
    if not isinstance(new, NewRun):
        return InvalidInput(f"a run to create is a NewRun, not {type(new).__qualname__}")
    problem = (
        check_name("run_id", new.run_id)
        or _unfit_place(new.tenant, new.project, new.environment, new.plan_id, new.plan_version)
        or check_name("run_request_id", new.run_request_id)
    )
    if problem is not None:
        return problem
    for field, value in (("parent_run_id", new.parent_run_id), ("reference_key", new.reference_key)):
        problem = None if value is None else check_name(field, value)
        if problem is not None:
            return problem
    tags: Any = new.tags
    if not isinstance(tags, tuple):
        return InvalidInput("tags are a tuple of strings", field="tags")
    for tag in tags:
        problem = check_name("tags", tag)
        if problem is not None:
            return problem
    for field in ("request_key", "input_sha256"):
        value = getattr(new, field)
        if not isinstance(value, str) or not _SHA256.fullmatch(value):
            return InvalidInput(f"{field} must be 64 hex digits", field=field)
    if not new.events:
        return InvalidInput("a run begins with at least one event", field="events")
    if not can_be_read(new.events):
        return InvalidInput("a field of the run has a wrong type: it could not be read again", field="events")
    if len({event.idempotency_key for event in new.events}) != len(new.events):
        return InvalidInput("a run cannot begin with the same event twice", field="events")
    for message in new.messages:
        unfit = check_message(message)
        if unfit is not None:
            return unfit
    if len({message.signal_id for message in new.messages}) != len(new.messages):
        return InvalidInput("two messages have the same id", field="messages")
    open_steps = [task.step_id for task in new.tasks if task.status == "OPEN"]
    if len(set(open_steps)) != len(open_steps):
        return InvalidInput("a step has at most one open task", field="tasks")
    unfit = None if new.audit is None else unfit_entry(new.audit)
    if unfit is not None:
        return unfit
    signals: Any = new.signals
    if not isinstance(signals, tuple) or not all(isinstance(request, SignalRequest) for request in signals):
        return InvalidInput("the signals that come with a run are a tuple of SignalRequests", field="signals")
    if new.snapshot.status in TERMINAL:
        return InvalidInput("a run cannot begin finished", field="snapshot")
    return None if new.admission is None else check_admission_request(new.admission)


def _unfit_place(*names: Any) -> InvalidInput | None:
    try:
        return _unfit_names(names)
    except TypeError:  # one that cannot be hashed is none
        return _unfit_names.__wrapped__(names)


@lru_cache(maxsize=1_024, typed=True)
def _unfit_names(names: tuple[Any, ...]) -> InvalidInput | None:
    """Return why a run cannot have this place and definition, or None. There are few different ones, and many runs."""
    for field, name in zip(("tenant", "project", "environment", "plan_id", "plan_version"), names, strict=True):
        problem = check_name(field, name)
        if problem is not None:
            return problem
    return None


def check_item(item: Any, limits: Limits) -> CallerError | None:
    """Return why the item cannot be delivered whatever is in the store, or None."""
    if isinstance(item, Message):
        return check_message(item)
    if isinstance(item, SignalRequest):
        return check_signal(item, limits) or (None if item.audit is None else unfit_entry(item.audit))
    return InvalidInput(f"what is delivered is a SignalRequest or a Message, not {type(item).__qualname__}")


def lease_expired(node: str) -> LeaseExpired:
    """Make the error of a node that claims without a current lease."""
    return LeaseExpired(f"node {node} has no current lease; renew it before claiming", node=node)


def check_node_name(name: Any) -> InvalidInput | None:
    """Return what is wrong with the name of a node, which has room for what tells its lives apart."""
    problem = check_name("name", name)
    if problem is None and len(name.encode()) > NODE_NAME_BYTES:
        problem = InvalidInput(f"the name of a node has at most {NODE_NAME_BYTES} UTF-8 bytes: {name!r}", field="name")
    if problem is None and LIFE in name:
        problem = InvalidInput(f"the name of a node has no {LIFE!r} in it: {name!r}", field="name")
    return problem


def name_of(node: str) -> str:
    """Return the name under which a node is known to people, without what tells its lives apart."""
    return node.partition(LIFE)[0]


def lives_of(node: str) -> tuple[str, str] | None:
    """Return the range of text, without its ends, in which all lives of the node's name are; None: it has one life."""
    name, mark, _ = node.partition(LIFE)
    return (name + mark, name + chr(ord(LIFE) + 1)) if mark else None


def is_another_life(node: str, other: str) -> bool:
    """Return whether this is another life of the same node."""
    lives = lives_of(node)
    return lives is not None and other != node and lives[0] < other < lives[1]


def superseded(node: str) -> NodeSuperseded:
    """Make the error of a node whose name has another life by now."""
    name = name_of(node)
    return NodeSuperseded(
        f"node {name}: another process has started under this name and took over; give each process its own name",
        node=name,
    )


def no_such_run(run_id: str) -> NotFound:
    """Make the refusal of something sent to a run that does not exist."""
    return NotFound(f"there is no run {run_id!r}", run_id=run_id)


def run_terminal(run_id: str, status: RunStatus) -> RunTerminal:
    """Make the refusal of something sent to a run that has finished."""
    return RunTerminal(f"run {run_id!r} is {status}", run_id=run_id, status=str(status))


def request_conflict(run_id: str) -> Conflict:
    """Make the refusal of a request id that was used with another input."""
    return Conflict("this request was made before with another input", run_id=run_id)


def run_id_taken(run_id: str) -> Conflict:
    """Make the refusal of a run id that another request has used."""
    return Conflict(f"there is another run with the id {run_id!r}", run_id=run_id)


def payload_conflict(request: SignalRequest) -> Conflict:
    """Make the refusal of a signal id that was used with another payload."""
    return Conflict(
        f"signal {request.name!r} with this signal_id was accepted before with another payload",
        workflow_id=request.run_id,
        signal_name=request.name,
        signal_id=request.signal_id,
    )


def version_moved(request: SignalRequest, version: int) -> Conflict:
    """Make the refusal of a signal for a version of its run that is not the present one."""
    return Conflict(
        f"signal {request.name!r} was meant for version {request.expected_version} of run {request.run_id!r}, "
        f"which is at {version}",
        workflow_id=request.run_id,
        expected_version=request.expected_version,
        version=version,
    )


def not_accepted_any_more(request: SignalRequest) -> Conflict:
    """Make the refusal of a signal that comes at or after the instant before which it was to be accepted."""
    return Conflict(f"the time for signal {request.name!r} is over", workflow_id=request.run_id)


def step_is_taken(request: SignalRequest) -> Conflict:
    """Make the refusal of a conditional signal whose step another one, not yet recorded, is for."""
    problem = f"another signal {request.name!r} was accepted for step {request.step_id!r} before"
    return Conflict(problem, workflow_id=request.run_id, step_id=request.step_id)


def check_conditions(request: SignalRequest, version: int, now: Instant, is_step_taken: bool) -> Conflict | None:
    """Return why a signal that comes with conditions is not accepted, or None."""
    if request.accept_before is not None and now >= request.accept_before:
        return not_accepted_any_more(request)
    if request.expected_version is not None and is_step_taken:
        return step_is_taken(request)
    if request.expected_version is not None and request.expected_version != version:
        return version_moved(request, version)
    return None


def indeterminate(request: SignalRequest, now: Instant) -> SignalAcceptanceIndeterminate:
    """Make the refusal of a signal whose payload is stored and whose acceptance record is missing."""
    seed = f"{request.run_id}|{request.name}|{request.signal_id}|{now}"
    return SignalAcceptanceIndeterminate(
        f"signal {request.name!r} with this signal_id may have been delivered; its acceptance record is missing",
        workflow_id=request.run_id,
        signal_name=request.name,
        signal_id=request.signal_id,
        correlation_id=sha256(seed.encode()).hexdigest()[:16],
    )


def not_waiting(request: SignalRequest) -> NotWaiting:
    """Make the refusal of a signal that must find a wait and finds none."""
    return NotWaiting(
        f"no open wait of run {request.run_id!r} would take signal {request.name!r}",
        workflow_id=request.run_id,
        signal_name=request.name,
    )


def rate_limited(request: SignalRequest, limits: Limits, free_at: Instant, now: Instant) -> RateLimited:
    """Make the refusal of a signal that comes too soon after too many others."""
    return RateLimited(
        f"run {request.run_id!r} takes {limits.signals_per_run_per_minute} signals a minute",
        workflow_id=request.run_id,
        retry_after_ms=-(-(free_at - now) // 1_000),
    )
