"""Checks of arguments, the same in every store: they refuse what no store can store or look up, before any access."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import isfinite
from operator import attrgetter
from typing import Any, TypeVar, get_args

from msgspec import UNSET, Raw, Struct
from msgspec.structs import replace

from holdfast.clock import Ids
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.access import AccessToken
from holdfast.core.admission import RunLimit, check_admission_request, check_limit
from holdfast.core.attributes import Attributes, rows_of
from holdfast.core.audit import AuditEntry
from holdfast.core.bus import (
    BusAlert,
    BusDeadLetter,
    OutboxEntry,
    OutboxReplay,
    OutboxSettlement,
    SinkProgress,
    check_sink,
)
from holdfast.core.call_limits import LIMITED, CallLimit, check_call_limit, is_limited
from holdfast.core.codec import check_integer
from holdfast.core.dead_letters import DeadLetter, Reason, Settlement
from holdfast.core.declarations import check_declaration
from holdfast.core.events import Event
from holdfast.core.keys import check_name, check_unicode
from holdfast.core.messages import (
    CONTROL_SIGNAL,
    INPUT_STEP,
    OUTCOME_SIGNAL,
    PAYLOADS,
    Message,
    MessageType,
    SignalRequest,
    check_signal,
)
from holdfast.core.plans import PLAN_PREFIX, RegisteredPlan
from holdfast.core.restarts import check_reused_id, is_restart_of, restart_number
from holdfast.core.schedules import Schedule, check_schedule
from holdfast.core.search import Condition, Order
from holdfast.core.state import TERMINAL
from holdfast.core.streams import StreamAppend, StreamChunks, StreamRead
from holdfast.errors import (
    CallerError,
    CheckpointOwnershipCapabilityError,
    CorruptHistory,
    InvalidInput,
    PayloadTooLarge,
)
from holdfast.limits import (
    DURATION_MS,
    LEASE_MS,
    NODE_NAME_BYTES,
    PLAN_BYTES,
    SEARCH_CHARS,
    SEARCH_CONDITIONS,
    SEARCH_WORDS,
    Limits,
    check_types,
)
from holdfast.settings import Ownership, unknown_ownership
from holdfast.store.decisions import LIFE, first_signals, not_waiting
from holdfast.store.port import RunStore
from holdfast.store.queries import EventQuery, RunCountQuery, RunQuery
from holdfast.store.types import (
    ArchivedRun,
    Existing,
    Heartbeat,
    Job,
    NewRun,
    PurgePolicy,
    Refused,
    Reuse,
    ReusePolicy,
    Turn,
)

F = TypeVar("F")


_SHA256 = re.compile("[0-9a-f]{64}")


RECONCILIATION = "activity reconciliation"
"""The feature that a step with an idempotency key requires, as named in errors."""


def check_ownership(store: RunStore, mode: Ownership) -> None:
    """Refuse a store that cannot guard commits as `mode` demands. Call this before claiming anything."""
    if mode == "cas-required":
        require_conditional_batch(store, f"checkpoint_ownership={mode!r}")
    elif mode != "single-owner":
        raise unknown_ownership(mode)


def require_conditional_batch(store: RunStore, feature: str) -> None:
    """Refuse `feature` on a store without conditional_batch, instead of falling back to read-then-write."""
    if not store.capabilities.conditional_batch:
        name = _class_of(store)
        raise CheckpointOwnershipCapabilityError(
            f"{feature} needs the store capability conditional_batch, and {name} does not have it",
            capability="conditional_batch",
            feature=feature,
            store=name,
        )


def lacks(store: object, capability: str, feature: str) -> CheckpointOwnershipCapabilityError:
    """Return the error of a feature that a store refuses because it lacks a capability."""
    name = _class_of(store)
    return CheckpointOwnershipCapabilityError(
        f"{feature} needs the store capability {capability}, and {name} does not have it: use another store for it",
        capability=capability,
        feature=feature,
        store=name,
    )


def _class_of(store: object) -> str:
    """Return the name of the class that declares a store's capabilities, through any number of wrappers."""
    declared = getattr(store, "capabilities", None)
    while (inner := getattr(store, "inner", None)) is not None and inner.capabilities == declared:
        store = inner
    return type(store).__name__


def require_for_signals(store: RunStore, requests: Iterable[Any]) -> None:
    """Refuse signals with an id on a store that could not distinguish a retry from a second signal."""
    if store.capabilities.conditional_batch:
        return
    if any(getattr(request, "signal_id", None) is not None for request in requests):
        require_conditional_batch(store, "idempotent signal delivery")


def id_of_request(store: RunStore, given: str | None, ids: Ids) -> str | None:
    """Return the id of a request: the sender's, or a new one that lets the engine repeat the request.

    If the store could not recognise the repetition, there is no new id, and the request is sent once.
    """
    return ids.new_id() if given is None and store.capabilities.conditional_batch else given


def require_for_records(store: RunStore, items: Iterable[Turn | NewRun]) -> None:
    """Refuse turns and new runs with activity records on a store that could not store each exactly once."""
    if not store.capabilities.conditional_batch and any(getattr(item, "records", ()) for item in items):
        require_conditional_batch(store, RECONCILIATION)


def check_batch(items: Sequence[Any], limits: Limits) -> None:
    """Refuse a batch that would occupy the store for too long."""
    if len(items) > limits.batch_items:
        raise InvalidInput(f"a batch has at most {limits.batch_items} items, this one has {len(items)}")


def check_page(limit: int) -> int:
    """Return the limit, or refuse it."""
    if type(limit) is not int or not 1 <= limit < 2**31:
        raise InvalidInput(f"a limit is a whole number from 1 to 2^31, not {limit!r}", field="limit")
    return limit


def check_values(**values: Any) -> None:
    """Refuse what no store can look up: text that is not Unicode, numbers above 2^62, and other types."""
    for field, value in values.items():
        if value is None or (type(value) is str and value.isascii()):
            continue
        if isinstance(value, str):
            problem = check_unicode(field, value)
        elif isinstance(value, tuple):
            check_values(**{f"{field}[{index}]": item for index, item in enumerate(value)})
            problem = None
        elif isinstance(value, bool):
            problem = None
        else:
            problem = check_integer(field, value, optional=True)
        if problem is not None:
            raise problem


def check_query(query: Struct) -> None:
    """Refuse a query or a policy with a field that no store can look up."""
    if isinstance(query, RunCountQuery):
        check_bound("look", query.look)
        query = query.runs
    structs = ("where", "order", "behind") if isinstance(query, RunQuery) else ()
    check_values(**{field: getattr(query, field) for field in query.__struct_fields__ if field not in structs})
    if isinstance(query, RunQuery):
        _check_conditions(query)
    if isinstance(query, EventQuery):
        places: tuple[Any, ...] = query.after
        for each in places:
            if not (isinstance(each, tuple) and [type(part) for part in each] == [str, int]):
                raise InvalidInput(f"after: a place in a history is (run id, run_seq), not {each!r}", field="after")
    for field in ("look", "most_bytes"):
        check_bound(field, getattr(query, field, None))
    text = getattr(query, "text", None)
    if text is not None and (len(text) > SEARCH_CHARS or len(text.split()) > SEARCH_WORDS):
        raise InvalidInput(
            f"text: a search has at most {SEARCH_WORDS} words and {SEARCH_CHARS} characters", field="text"
        )


def _check_conditions(query: RunQuery) -> None:
    """Refuse conditions on attributes, or an order, that no store can look up."""
    for each in (*query.where, *(() if query.order is None else (query.order,))):
        if not isinstance(each, Condition | Order):
            raise InvalidInput(f"where: a condition is a Condition, not {each!r}", field="where")
        value = getattr(each, "value", None)
        if isinstance(value, float) and not isfinite(value):
            raise InvalidInput("where: a number is finite", field="where")
        check_values(name=each.name, value=value if isinstance(value, str) else None)
    if len(query.where) > SEARCH_CONDITIONS:
        raise InvalidInput(f"where: a search has at most {SEARCH_CONDITIONS} conditions", field="where")
    if query.behind is not None:
        _check_behind(query.order, *query.behind)


def _check_behind(order: Order | None, value: Any, created_at: Any, run_id: Any) -> None:
    """Refuse a position in an order whose value has another type than the order: cursors come back from callers."""
    kind = None if order is None else order.kind
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if (not isinstance(value, str)) if kind == "s" else not is_number:
        raise InvalidInput(f"behind: runs are not ordered by values such as {value!r}", field="behind")
    check_values(behind=(created_at, run_id), value=int(value) if kind is None else value if kind == "s" else None)


def _can_be_indexed(attributes: Attributes) -> bool:
    """Return whether every store can index these attributes."""
    return all(kind != "s" or "\0" not in str(value) for _, kind, value in rows_of(attributes))


def finder_of(finders: Mapping[type, F], query: Struct) -> F:
    """Return the function that answers such a query; refuse a query that no store can answer, or that has none."""
    finder = finders.get(type(query))
    if finder is None:
        raise InvalidInput(f"a store cannot look for a {type(query).__qualname__}", field="query")
    check_query(query)
    return finder


def check_bound(field: str, most: int | None) -> None:
    """Refuse a malformed bound."""
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


def check_plans(plans: Sequence[Any] | None) -> None:
    """Refuse a list of definitions that no store can look up."""
    for plan in plans or ():
        is_pair = type(plan) is tuple and len(plan) == 2
        if is_pair and type(plan[0]) is str and type(plan[1]) is str and "".join(plan).isascii():
            continue  # nearly every definition of nearly every claim
        if not isinstance(plan, tuple) or len(plan) != 2 or not all(isinstance(part, str) for part in plan):
            raise InvalidInput(f"a definition is a pair of a plan's id and its version, not {plan!r}", field="plans")
        check_values(plans=plan)


def check_late(late_ms: int) -> None:
    """Refuse a malformed `late_ms`."""
    if type(late_ms) is not int or not 0 <= late_ms < 2**40:
        raise InvalidInput(f"late_ms is a whole number from 0 to some years, not {late_ms!r}", field="late_ms")


def check_lease(node: str, lease_ms: int, plans: Sequence[Any] | None = None) -> None:
    """Refuse a malformed lease."""
    check_names("node", [node])
    check_plans(plans)
    if type(lease_ms) is not int or not 1 <= lease_ms <= LEASE_MS:
        raise InvalidInput(f"a lease lasts from 1 to {LEASE_MS} ms, not {lease_ms!r}", field="lease_ms")


def check_names(field: str, names: Sequence[Any], limits: Limits | None = None) -> None:
    """Refuse a list that contains anything but names."""
    if limits is not None:
        check_batch(names, limits)
    for name in names:
        problem = check_name(field, name)
        if problem is not None:
            raise problem


def check_visible(visible_ms: int) -> None:
    """Refuse a malformed visibility time-out."""
    if type(visible_ms) is not int or not 1 <= visible_ms < 2**40:
        raise InvalidInput(f"a job is taken for 1 ms to some years, not {visible_ms!r}", field="visible_ms")


def check_acquire(
    node: str, queues: Sequence[str], activities: Sequence[str], limit: int, visible_ms: int, limits: Limits
) -> None:
    """Refuse malformed arguments of `acquire_jobs`."""
    check_names("node", [node])
    check_names("queues", queues, limits)
    check_names("activities", activities, limits)
    check_page(limit)
    check_visible(visible_ms)


def check_acquire_limited(
    node: str,
    queues: Sequence[str],
    activities: Sequence[str],
    call_limits: Mapping[str, CallLimit],
    limit: int,
    visible_ms: int,
    limits: Limits,
) -> None:
    """Refuse malformed arguments of `acquire_limited_jobs`."""
    check_acquire(node, queues, activities, limit, visible_ms, limits)
    check_names("limits", list(call_limits), limits)
    if not all(map(is_limited, queues)):
        raise InvalidInput(f"jobs with limits are in queues whose names begin with {LIMITED!r}", field="queues")
    for call_limit in call_limits.values():
        problem = check_call_limit(call_limit)
        if problem is not None:
            raise problem


def check_heartbeats(node: str, beats: Sequence[Heartbeat], visible_ms: int, limits: Limits) -> None:
    """Refuse a batch with a malformed heartbeat."""
    check_names("node", [node])
    check_visible(visible_ms)
    check_batch(beats, limits)
    for beat in beats:
        problem = _check_heartbeat(beat)
        if problem is not None:
            raise problem


def _check_heartbeat(beat: Any) -> InvalidInput | None:
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
    """Refuse malformed arguments of `release_jobs`."""
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
"""Bodies that contain more from callers' code than names and JSON."""


def can_be_read(events: Iterable[Event]) -> bool:
    """Return whether these events can be read back once written. Others are refused, never stored."""
    for event in events:
        if type(event.data) in _FILLED_BY_CALLERS:
            try:
                codec.decode_body(event.event_type, event.schema_version, codec.encode_body(event.data))
            except (CorruptHistory, TypeError, ValueError, OverflowError):
                return False
    return True


def can_be_kept(turn: Turn) -> bool:
    """Return whether everything that a turn writes can be read back."""
    if turn.attributes is not None and not _can_be_indexed(turn.attributes):
        return False
    if turn.admission is not None and (check_admission_request(turn.admission) is not None or not turn.release):
        return False
    if turn.streams and not can_be_streamed(turn):
        return False
    if (turn.jobs and not can_be_queued(turn)) or (turn.dead and not can_be_dead_lettered(turn)):
        return False
    for event in turn.events:
        if type(event.data) in _FILLED_BY_CALLERS:
            return can_be_read(turn.events)
    return True


def can_be_streamed(turn: Turn) -> bool:
    """Return whether what the turn appends to streams can be read back."""
    return all(_check_chunks(given) is None for given in turn.streams)


def _check_chunks(given: Any) -> InvalidInput | None:
    if not isinstance(given, StreamChunks):
        return InvalidInput(f"what a turn appends to a stream is StreamChunks, not {type(given).__qualname__}")
    problem = check_name("name", given.name) or check_integer("count", given.count) or codec.check(given.body, "body")
    if problem is None and given.count < 0:
        problem = InvalidInput(f"count is a whole number from 0, not {given.count!r}", field="count")
    return problem


def check_append(given: Any) -> InvalidInput | None:
    """Return why this cannot be appended to a stream, or None."""
    if not isinstance(given, StreamAppend):
        return InvalidInput(f"what is appended to a stream is a StreamAppend, not {type(given).__qualname__}")
    for field in ("run_id", "name", "step_id", "node"):
        problem = check_name(field, getattr(given, field))
        if problem is not None:
            return problem
    for field in ("attempt", "position", "count"):
        problem = check_integer(field, getattr(given, field))
        if problem is None and getattr(given, field) < 0:
            problem = InvalidInput(f"{field} is a whole number from 0, not {getattr(given, field)!r}", field=field)
        if problem is not None:
            return problem
    if given.epoch is not None and (problem := check_integer("epoch", given.epoch)) is not None:
        return problem
    if given.resumes and (given.count or given.closes):
        return InvalidInput("what resumes a stream appends nothing by itself", field="resumes")
    return codec.check(given.body, "body")


def check_stream_reads(items: Sequence[Any], limits: Limits) -> None:
    """Refuse a batch with a malformed read of a stream."""
    check_batch(items, limits)
    for item in items:
        if not isinstance(item, StreamRead):
            raise InvalidInput(f"a stream is read by a StreamRead, not {type(item).__qualname__}")
        check_names("name", [item.run_id, item.name])
        check_bound("most_bytes", item.most_bytes)
        problem = check_integer("after", item.after)
        if problem is not None:
            raise problem


def can_be_queued(turn: Turn) -> bool:
    """Return whether the turn's jobs belong to its run and can be read back."""
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


def check_admit(run_limits: Mapping[str, RunLimit], limit: int, node: str | None, limits: Limits) -> None:
    """Refuse malformed arguments of `admit`."""
    check_names("limits", list(run_limits), limits)
    check_page(limit)
    check_values(node=node)
    for run_limit in run_limits.values():
        problem = check_limit(run_limit)
        if problem is not None:
            raise problem


def check_first_signals(new: NewRun, limits: Limits) -> CallerError | None:
    """Return why a new run cannot accept the signals that come with it, or None if it accepts all of them."""
    if new.unfit is not None:
        return new.unfit
    for request in first_signals(new, new.run_id, new.plan_version):
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


def can_be_dead_lettered(turn: Turn) -> bool:
    """Return whether the turn's dead letters belong to its run and can be read back."""
    return all(_check_letter(letter, turn.run_id) is None for letter in turn.dead)


def _check_letter(letter: Any, run_id: str) -> InvalidInput | None:
    if not isinstance(letter, DeadLetter) or letter.run_id != run_id:
        return InvalidInput("what a turn gives up is a DeadLetter of its own run", field="dead")
    if type(letter.envelope) is not bytes or letter.reason not in get_args(Reason):
        return InvalidInput("a dead letter has bytes and a known reason", field="dead")
    problem = check_name("letter_id", letter.letter_id) or check_name("node", letter.node)
    problem = problem or check_integer("died_at", letter.died_at)
    return problem or check_unicode("detail", letter.detail)


def check_settlement(ids: Sequence[Any], action: Any, actor: Any, limits: Limits) -> None:
    """Refuse malformed arguments of `settle_dead_letters`."""
    check_ids(ids, limits)
    if action not in get_args(Settlement):
        raise InvalidInput(f"a dead letter is settled by requeue or drop, not {action!r}", field="action")
    if not isinstance(actor, str):
        raise InvalidInput(f"actor is text, not {actor!r}", field="actor")
    check_values(actor=actor)


def check_definitions(definitions: Sequence[Any], limits: Limits) -> None:
    """Refuse definitions that could not be stored or read back."""
    check_batch(definitions, limits)
    for definition in definitions:
        problem = check_declaration(definition)
        if problem is not None:
            raise problem


def check_tokens(tokens: Sequence[Any], limits: Limits) -> None:
    """Refuse tokens that could not be stored or found again."""
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
    """Refuse entries of the audit log that could not be stored or found again."""
    check_batch(entries, limits)
    for entry in entries:
        problem = unfit_entry(entry)
        if problem is not None:
            raise problem


def unfit_entry(entry: Any) -> InvalidInput | None:
    """Return why an entry of the audit log cannot be stored, or None."""
    if not isinstance(entry, AuditEntry):
        return InvalidInput(f"an entry of the audit log is an AuditEntry, not {type(entry).__qualname__}")
    for field in ("entry_id", "operation"):
        problem = check_name(field, getattr(entry, field))
        if problem is not None:
            return problem
    for field in ("actor", "subject", "detail", "outcome", "correlation_id"):
        value: Any = getattr(entry, field)
        problem = check_unicode(field, value) if isinstance(value, str) else InvalidInput(f"{field} is text")
        if problem is not None:
            return problem
    for field in ("tenant", "project", "environment", "run_id"):
        value = getattr(entry, field)
        problem = None if value is None else check_name(field, value)
        if problem is not None:
            return problem
    if entry.by is not None:
        return check_name("by.token_id", entry.by.token_id) or check_unicode("by.name", entry.by.name)
    return None


def check_purge(policy: PurgePolicy, audit: AuditEntry | None, limits: Limits) -> None:
    """Refuse malformed arguments of `purge`."""
    check_archived(policy)
    check_query(replace(policy, archived=()))
    check_page(policy.limit)
    check_audit(() if audit is None else (audit,), limits)
    if policy.run_ids is not None:
        check_ids(policy.run_ids, limits)
    if (policy.tokens or policy.plans or policy.sinks) and policy.tenant is None:
        raise InvalidInput("tokens, plans and sinks are deleted of one tenant: name it", field="tenant")


def check_archived(policy: PurgePolicy) -> None:
    """Refuse archive locations that could not be stored, or that are not of the runs that the purge deletes."""
    if policy.archived and policy.run_ids is None:
        raise InvalidInput("archived runs are deleted by their ids: give run_ids", field="archived")
    given: Sequence[Any] = policy.archived
    for run in given:
        if not isinstance(run, ArchivedRun):
            raise InvalidInput(f"what is archived is an ArchivedRun, not {type(run).__qualname__}", field="archived")
        names = {field: getattr(run, field) for field in ("run_id", "tenant", "plan_id", "plan_version", "object_key")}
        check_values(**names, created_at=run.created_at, finished_at=run.finished_at, offset=run.offset)


def check_lock(name: Any, owner: Any, lease_ms: Any = 1, epoch: Any = 1) -> None:
    """Refuse malformed arguments of `acquire_lock` and `release_lock`."""
    check_names("name", [name])
    check_lease(owner, lease_ms)
    check_values(epoch=epoch)


def started_before(new: NewRun, find: Callable[[str], str | None]) -> Existing | Refused:
    """Return the answer about a run of a repeated commit: `find` looks it up by the key of its request.

    Nothing is created: a run that does not exist was deleted since.
    """
    problem = check_new_run(new)
    return Existing(find(new.request_key) or new.run_id) if problem is None else Refused(problem)


def check_committed_schedule(
    schedule: Any, expected: Any, starts: Sequence[Any], audit: AuditEntry | None, limits: Limits
) -> None:
    """Refuse malformed arguments of `commit_schedule`."""
    check_stored_schedule(schedule)
    check_values(revision=expected)
    check_batch(starts, limits)
    check_audit(() if audit is None else (audit,), limits)


def check_stored_schedule(schedule: Any) -> None:
    """Refuse a schedule that could not be stored or read back."""
    if not isinstance(schedule, Schedule):
        raise InvalidInput(f"what is stored is a Schedule, not {type(schedule).__qualname__}", field="schedule")
    check_types(replace(schedule, input=e.NULL, context=e.NULL))
    problem = check_schedule(schedule) or codec.check(schedule.input, "input")
    problem = problem or codec.check(schedule.context, "context")
    if problem is not None:
        raise problem
    check_values(note=schedule.note, last_error=schedule.last_error)


def check_plan_body(tenant: Any, sha256: Any, body: Any = b"") -> None:
    """Refuse the body of a plan that could not be stored, or a malformed hash."""
    check_names("tenant", [tenant])
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise InvalidInput("sha256 must be 64 hex digits", field="sha256")
    if not isinstance(body, bytes):
        raise InvalidInput(f"the body of a plan is bytes, not {type(body).__qualname__}", field="body")
    if len(body) > PLAN_BODY_BYTES:
        raise PayloadTooLarge(
            f"the body of a plan has {len(body)} bytes; the limit is {PLAN_BODY_BYTES}",
            size_bytes=len(body),
            limit_bytes=PLAN_BODY_BYTES,
        )


PLAN_BODY_BYTES = 2 * PLAN_BYTES
"""The maximum size of a plan's body in a store: sealed bodies are larger."""


def check_registered_plan(plan: Any) -> None:
    """Refuse a version of a plan that could not be stored."""
    if not isinstance(plan, RegisteredPlan):
        raise InvalidInput(f"what is registered is a RegisteredPlan, not {type(plan).__qualname__}")
    check_plan_body(plan.tenant, plan.sha256)
    check_names("plan_id", [plan.plan_id])
    check_names("plan_version", [plan.plan_version])
    for field in ("uri", "registered_by"):
        text: Any = getattr(plan, field)
        if not isinstance(text, str) or len(text) > URI_CHARS or "\x00" in text or not _is_unicode(text):
            raise InvalidInput(f"{field} is text of at most {URI_CHARS} characters", field=field)


URI_CHARS = 2_000
"""The maximum length of a plan's address."""


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_put_sink(sink: Any, audit: AuditEntry | None, limits: Limits) -> None:
    """Refuse a sink that could not be stored."""
    check_sink(sink)
    check_audit(() if audit is None else (audit,), limits)


def check_sink_name(name: Any, audit: AuditEntry | None, limits: Limits) -> None:
    """Refuse a malformed name of a sink."""
    check_names("sink", [name])
    check_audit(() if audit is None else (audit,), limits)


def check_settle_outbox(sink: Any, items: Sequence[Any], progress: Any, limits: Limits) -> None:
    """Refuse settlements of entries that could not be stored."""
    check_names("sink", [sink])
    check_batch(items, limits)
    if not isinstance(progress, SinkProgress):
        raise InvalidInput("progress is a SinkProgress", field="progress")
    check_values(failures=progress.failures, due_at=progress.due_at, delivered=progress.delivered)
    _check_texts(error=progress.error)
    for item in items:
        if not isinstance(item, OutboxSettlement) or (item.rest is not None and item.letter is not None):
            raise InvalidInput("an entry is settled by an OutboxSettlement: a rest, a dead letter, or neither")
        for entry in (item.entry, *([] if item.rest is None else [item.rest])):
            if not isinstance(entry, OutboxEntry):
                raise InvalidInput("what is settled is an OutboxEntry", field="entry")
            fields = ("number", "from_seq", "to_seq", "at", "attempts", "due_at")
            check_values(**{field: getattr(entry, field) for field in fields})
        if item.letter is not None:
            if not isinstance(item.letter, BusDeadLetter):
                raise InvalidInput("an entry that is given up is a BusDeadLetter", field="letter")
            check_names("letter_id", [item.letter.letter_id])
            _check_texts(detail=item.letter.detail)


def check_alerts(alerts: Sequence[Any], limits: Limits) -> None:
    """Refuse alerts that could not be stored."""
    check_batch(alerts, limits)
    for alert in alerts:
        if not isinstance(alert, BusAlert):
            raise InvalidInput("an alert is a BusAlert", field="alerts")
        check_names("alert_id", [alert.alert_id])
        check_names("code", [alert.code])
        check_values(priority=alert.priority)
        _check_texts(detail=alert.detail, run_id=alert.run_id, sink=alert.sink)


def check_replay(asked: OutboxReplay, audit: AuditEntry | None, limits: Limits) -> None:
    """Refuse malformed arguments of `replay_outbox`."""
    check_sink_name(asked.sink, audit, limits)
    check_values(since=asked.since, from_seq=asked.from_seq, after=asked.after)
    check_page(asked.limit)
    check_bound("look", asked.look)
    if asked.run_id is not None:
        check_ids([asked.run_id])


def _check_texts(**texts: Any) -> None:
    for field, text in texts.items():
        if not isinstance(text, str) or "\x00" in text or not _is_unicode(text):
            raise InvalidInput(f"{field} is text", field=field)


def check_key(name: Any, key: Any) -> None:
    """Refuse a key that could not be stored."""
    check_names("name", [name])
    if not isinstance(key, str) or not _SHA256.fullmatch(key):
        raise InvalidInput("a key is 64 hex digits", field="key")


def check_bulletins(kind: Any, bodies: Mapping[str, Any], keep_ms: Any, limits: Limits) -> None:
    """Refuse bulletins that could not be stored or found again."""
    check_names("kind", [kind])
    check_names("bulletin_id", list(bodies), limits)
    if type(keep_ms) is not int or not 1 <= keep_ms <= DURATION_MS:
        raise InvalidInput(f"keep_ms is a whole number from 1 to {DURATION_MS}, not {keep_ms!r}", field="keep_ms")
    for body in bodies.values():
        if not isinstance(body, Raw):
            raise InvalidInput(f"the body of a bulletin is JSON (msgspec.Raw), not {body!r}", field="body")
        problem = codec.check(body, "body")
        if problem is not None:
            raise problem
        codec.bounded(body, limits.value_bytes, "the body of a bulletin")


_KEY_OF = attrgetter("idempotency_key")


def check_new_run(new: Any) -> CallerError | None:
    """Return why the run cannot be created in any state of the store, or None."""
    if not isinstance(new, NewRun):
        return InvalidInput(f"a run to create is a NewRun, not {type(new).__qualname__}")
    problem = (
        check_name("run_id", new.run_id)
        or _unfit_place(new.tenant, new.project, new.environment, new.plan_id, new.plan_version)
        or check_name("run_request_id", new.run_request_id)
    )
    if problem is None and new.parent_run_id is not None:
        problem = check_name("parent_run_id", new.parent_run_id)
    if problem is None and new.reference_key is not None:
        problem = check_name("reference_key", new.reference_key)
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
    if new.snapshot.attributes and not _can_be_indexed(new.snapshot.attributes):
        return InvalidInput("attributes: a text holds no NUL", field="attributes")
    if len(set(map(_KEY_OF, new.events))) != len(new.events):
        return InvalidInput("a run cannot begin with the same event twice", field="events")
    for message in new.messages:
        unfit = check_message(message)
        if unfit is not None:
            return unfit
    if new.messages and len({message.signal_id for message in new.messages}) != len(new.messages):
        return InvalidInput("two messages have the same id", field="messages")
    open_steps = [task.step_id for task in new.tasks if task.status == "OPEN"] if new.tasks else []
    if len(set(open_steps)) != len(open_steps):
        return InvalidInput("a step has at most one open task", field="tasks")
    unfit = None if new.audit is None else unfit_entry(new.audit)
    if unfit is not None:
        return unfit
    signals: Any = new.signals
    if not isinstance(signals, tuple) or (signals and not all(isinstance(each, SignalRequest) for each in signals)):
        return InvalidInput("the signals that come with a run are a tuple of SignalRequests", field="signals")
    if new.snapshot.status in TERMINAL:
        return InvalidInput("a run cannot begin finished", field="snapshot")
    if new.reuse is not None:
        unfit = _check_reuse(new, new.reuse)
        if unfit is not None:
            return unfit
    if new.plan_id.startswith(PLAN_PREFIX) and not _SHA256.fullmatch(new.plan_sha256 or ""):
        return InvalidInput("a run of a plan names the body of the plan by its hash", field="plan")
    return None if new.admission is None else check_admission_request(new.admission)


def _check_reuse(new: NewRun, reuse: Any) -> CallerError | None:
    """Return why this reuse of a taken id is invalid, or None."""
    run_id = new.run_id
    if not isinstance(reuse, Reuse) or reuse.policy not in (*get_args(ReusePolicy), "debounce"):
        return InvalidInput(f"reuse is one of {', '.join(get_args(ReusePolicy))}", field="reuse")
    problem = check_name("run_id", reuse.run_id) or check_reused_id(reuse.run_id)
    if problem is None and restart_number(reuse.run_id, run_id) is None:
        problem = InvalidInput(f"{run_id!r} is no run of the id {reuse.run_id!r}", field="run_id")
    if problem is None and reuse.policy == "debounce" and not _is_later_input(new.signals):
        return InvalidInput("a debounced start has one signal, with its input and an id", field="signals")
    stop: Any = reuse.stop
    if problem is None and stop is not None:
        if reuse.policy != "terminate-and-restart" or not isinstance(stop, SignalRequest):
            return InvalidInput("only a run that is to be replaced is stopped, by a signal", field="reuse")
        if stop.name != CONTROL_SIGNAL or stop.signal_id is None or not is_restart_of(run_id, stop.run_id):
            return InvalidInput("what stops a run that is replaced is a command with an id, to that run", field="reuse")
    return problem


def _is_later_input(signals: Sequence[SignalRequest]) -> bool:
    """Return whether this signal replaces the input of a debounced run."""
    parts = [(each.name, each.step_id, each.signal_id is None, each.expected_version) for each in signals]
    return parts == [(OUTCOME_SIGNAL, INPUT_STEP, False, None)]


def _unfit_place(*names: Any) -> InvalidInput | None:
    try:
        return _unfit_names(names)
    except TypeError:  # a name that cannot be hashed is invalid
        return _unfit_names.__wrapped__(names)


@lru_cache(maxsize=1_024, typed=True)
def _unfit_names(names: tuple[Any, ...]) -> InvalidInput | None:
    """Return why a run cannot have these names, or None. Cached: many runs share few names."""
    for field, name in zip(("tenant", "project", "environment", "plan_id", "plan_version"), names, strict=True):
        problem = check_name(field, name)
        if problem is not None:
            return problem
    return None


def check_item(item: Any, limits: Limits) -> CallerError | None:
    """Return why the item cannot be delivered in any state of the store, or None."""
    if isinstance(item, Message):
        return check_message(item)
    if isinstance(item, SignalRequest):
        return check_signal(item, limits) or (None if item.audit is None else unfit_entry(item.audit))
    return InvalidInput(f"what is delivered is a SignalRequest or a Message, not {type(item).__qualname__}")


_DELIVERABLE = frozenset(get_args(MessageType)) - {"ExternalSignal"}  # signals are delivered as SignalRequests


def check_message(message: Message) -> CallerError | None:
    """Return why the message cannot be delivered in any state of the run, or None."""
    problem = check_name("run_id", message.run_id) or check_name("signal_id", message.signal_id)
    if problem is None and message.type not in _DELIVERABLE:
        problem = InvalidInput(f"a message of type {message.type!r} cannot be delivered", field="type")
    problem = (
        problem
        or check_integer("occurred_at", message.occurred_at)
        or (None if message.due_at is None else check_integer("due_at", message.due_at))
        or (None if message.expected_version is None else check_integer("expected_version", message.expected_version))
        or (None if message.waiting_token is None else check_name("waiting_token", message.waiting_token))
        or (None if message.step_id is None else check_name("step_id", message.step_id))
        or check_integer("attempts", message.attempts)
        or check_integer("opened_at", message.opened_at)
        or codec.check(message.payload, "payload")
    )
    kind = PAYLOADS.get(message.type)
    return problem or (None if kind is None else codec.check_as(message.payload, kind))


def check_node_name(name: Any) -> InvalidInput | None:
    """Return what is wrong with the name of a node. A name leaves room for the suffix that distinguishes its lives."""
    problem = check_name("name", name)
    if problem is None and len(name.encode()) > NODE_NAME_BYTES:
        problem = InvalidInput(f"the name of a node has at most {NODE_NAME_BYTES} UTF-8 bytes: {name!r}", field="name")
    if problem is None and LIFE in name:
        problem = InvalidInput(f"the name of a node has no {LIFE!r} in it: {name!r}", field="name")
    return problem
