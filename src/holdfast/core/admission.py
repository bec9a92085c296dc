"""Admission: how many runs of a workflow may be under way, and what happens to further starts.

Every workflow (a `plan_id`, whatever its versions) has one *admission queue*. A store keeps it as follows.

**Room.** A run that is created with an `AdmissionRequest` is *admitted* when there is room: fewer than `at_once` runs
are inside, fewer than `per_key` of them have its tenant and key, and fewer than `starts` runs have started within the
last `period_ms` or are admitted and have yet to start. It is *inside* until the commit that finishes it. Until it is
admitted it is *queued*: its messages are held back, so it is not ready and has no owner. Signals make it ready, like
any run, and may cancel it: then it leaves the queue with that commit.

**Order.** Tenants take turns among the queued runs that have room, round robin in the order of their names by code
points, beginning after the tenant of the run that was admitted last. Among the runs of one tenant, the one with the
lowest `rank` is next, then the one that was created first. `create` enqueues a new run behind those, admits the next
run, if there is one, and returns whether it was the new one.

**Held runs**, which require an approval or start at a later instant, are not in the queue and take no place. When such
a run is released, the turn that would start it queues it instead (`Turn.admission`), with the current limits, as if it
were created then; the message that starts it is held back until the run is admitted. It was acknowledged long ago, so
the policy `reject` queues it. (If one run is released and another created in the same microsecond, either may be
first.)

**Limits** are not stored. The caller passes the limits that its code has now, so a change applies to queued runs too.

**Starts.** The rate bounds the commits by which runs start (RunStarted), not the moments of admission: the node that
starts an admitted run may be late or gone. So a run that was admitted under a rate is *starting*: it uses one of the
`starts` without an instant until it has started; then the instant of that commit counts. (A run that ends without
having started counts as started at its end.) Whatever is late or crashes, no window of one period holds more than
`starts`: when the last of its runs was admitted, the others were starting or had started within that window.

**Policies.** `queue` is the above. `reject` refuses a run that would be queued. `delay` is `queue` for a workflow
that has a rate and no other limit.

**Atomicity.** A whole queue fits one row or one object: the counts inside by tenant and key, the queued runs, the
last tenant, the starting runs, and the last `starts` instants of the limit that was used last. A store whose
atomicity is one object reserves the place in the queue first and creates the run after it. A place whose run does
not exist or has finished (after a crash, or by a node of an older version) is freed when `admit` finds queued runs
and can admit none. So there may be fewer runs inside than allowed for a while, but never more. Finding the next run
must cost no more for a thousand queued runs, or for a thousand full keys, than for one.

**Implementation.** `decide_admission` and `rejection` are the rule. The memory and SQLite stores apply them to the
results of two small queries, and write the decision in the same transaction. PostgreSQL implements the same rule in
SQL functions; `store/postgres/admission.py` explains why. A test compares each store with this file.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Generic, Literal, TypeVar, get_args

from msgspec import Struct

from holdfast.core.codec import INTEGER_LIMIT, check_integer
from holdfast.core.instants import Instant
from holdfast.core.keys import check_name
from holdfast.errors import InvalidInput, Overloaded
from holdfast.limits import DURATION_MS, OVERLOAD_RETRY_MS, PRIORITY, PRIORITY_AGE_MS

Overload = Literal["queue", "delay", "reject"]
Id = TypeVar("Id")


class RunLimit(Struct, frozen=True, kw_only=True):
    """What a workflow allows: runs inside, runs inside for one key of one tenant, and starts within any period.

    Further starts are queued (`queue`, and `delay` for a rate alone) or rejected.
    """

    at_once: int | None = None
    per_key: int | None = None
    starts: int | None = None
    period_ms: int = 1_000
    overload: Overload = "queue"


NO_LIMIT = RunLimit()
NEVER = INTEGER_LIMIT
"""An instant that is never reached."""


class AdmissionRequest(Struct, frozen=True, kw_only=True):
    """The terms on which a run is admitted: the limit that its caller knows, its key, and its priority."""

    limit: RunLimit
    key: str = ""
    priority: int = 0


def rank(priority: int, now: Instant) -> Instant:
    """Return a queued run's rank; the lowest is admitted first. A higher priority counts as having been queued earlier.

    So every run eventually becomes first if it waits long enough, whatever the priorities of the others are.
    """
    return now - priority * PRIORITY_AGE_MS * 1_000


def nth_last_start(last_starts: Sequence[Instant], limit: RunLimit, starting: int = 0) -> Instant | None:
    """Return the start that must be a period ago before another run may start, or None if there were too few starts.

    `last_starts` are in order. `starting` is the number of admitted runs that have yet to start.
    """
    back = (limit.starts or 0) - starting
    return last_starts[-back] if 0 < back <= len(last_starts) else None


def free_slot(limit: RunLimit, now: Instant, nth_last: Instant | None = None, starting: int = 0) -> Instant:
    """Return the first instant, from now on, at which the rate allows another start.

    `nth_last` is what `nth_last_start` returns. If the starting runs use up the rate, the result is `NEVER`.
    """
    if limit.starts is None:
        return now
    if starting >= limit.starts:
        return NEVER
    return now if nth_last is None else max(now, nth_last + limit.period_ms * 1_000)


class QueueState(Struct, frozen=True, kw_only=True):
    """What a store keeps about an admission queue besides its runs."""

    inside: int = 0
    last_tenant: str = ""
    starting: int = 0
    nth_last_start: Instant | None = None


class QueuedRun(Struct, Generic[Id], frozen=True, kw_only=True):
    """A queued run. `of_key` is how many runs of its tenant and key are inside."""

    id: Id
    tenant: str
    rank: Instant
    of_key: int


class AdmissionDecision(Struct, Generic[Id], frozen=True):
    """The next run, if one has room apart from the rate, and the instant from which the rate allows it."""

    run: QueuedRun[Id] | None
    free_at: Instant

    def next_at(self, now: Instant) -> Instant | None:
        """Return when to call again even if no run leaves, or None if that would be useless."""
        return None if self.run is None or self.free_at == NEVER else max(self.free_at, now)


def decide_admission(
    state: QueueState, queued: Iterable[QueuedRun[Id]], limit: RunLimit, now: Instant
) -> AdmissionDecision[Id]:
    """Decide which run is admitted next. All stores follow this rule; the header of this file states it in words.

    `queued` are in order of creation. A store may omit runs that cannot be next: for each tenant, all but the first
    with room; among tenants, all but the first by name and the first after `last_tenant`.
    """
    is_full = limit.at_once is not None and state.inside >= limit.at_once
    with_room = [] if is_full else [run for run in queued if limit.per_key is None or run.of_key < limit.per_key]
    first = min(with_room, key=lambda run: (run.tenant <= state.last_tenant, run.tenant, run.rank), default=None)
    return AdmissionDecision(first, free_slot(limit, now, state.nth_last_start, state.starting))


def rejection(
    plan_id: str, state: QueueState, queued: Iterable[QueuedRun[Id]], new: QueuedRun[Id], limit: RunLimit, now: Instant
) -> Overloaded | None:
    """Return why a new run is rejected, or None. The policy `reject` rejects what would not be admitted at once."""
    if limit.overload != "reject":
        return None
    own = decide_admission(state, [new], limit, now)
    if own.run is not None and own.free_at <= now and decide_admission(state, queued, limit, now).run is None:
        return None
    return overloaded(plan_id, own.free_at, now, limit)


def overloaded(plan_id: str, free_at: Instant, now: Instant, limit: RunLimit = NO_LIMIT) -> Overloaded:
    """Return the refusal of a start. Only a rate predicts when there is room; otherwise the hint is a constant."""
    if free_at == NEVER:  # a run that starts now makes room after a period
        free_at = now + limit.period_ms * 1_000
    retry_after_ms = -(-(free_at - now) // 1_000) or OVERLOAD_RETRY_MS
    return Overloaded(
        f"workflow {plan_id!r} has reached its limit on runs", plan_id=plan_id, retry_after_ms=retry_after_ms
    )


def check_admission_request(request: Any) -> InvalidInput | None:
    """Return why a run cannot be created with this, or None."""
    if not isinstance(request, AdmissionRequest):
        return InvalidInput(f"`admission` is an AdmissionRequest, not {type(request).__qualname__}")
    problem = None if request.key == "" else check_name("key", request.key)
    problem = problem or check_integer("priority", request.priority)
    if problem is None and abs(request.priority) > PRIORITY:
        problem = InvalidInput(
            f"a priority is from -{PRIORITY} to {PRIORITY}, not {request.priority}", field="priority"
        )
    return problem or check_limit(request.limit)


def check_limit(limit: Any) -> InvalidInput | None:
    """Return why this cannot be the limit of a workflow, or None."""
    if not isinstance(limit, RunLimit) or limit.overload not in get_args(Overload):
        return InvalidInput(f"a limit is a RunLimit with one of {', '.join(get_args(Overload))}, not {limit!r}")
    for field in ("at_once", "per_key", "starts"):
        value = getattr(limit, field)
        if value is not None and (type(value) is not int or not 1 <= value < 2**31):
            return InvalidInput(f"{field} is a whole number from 1, not {value!r}", field=field)
    if type(limit.period_ms) is not int or not 1 <= limit.period_ms <= DURATION_MS:
        return InvalidInput(f"a period is from 1 ms to a thousand years, not {limit.period_ms!r}", field="period_ms")
    if limit.overload == "delay" and (limit.starts is None or limit.at_once or limit.per_key):
        return InvalidInput("'delay' spreads starts by a rate, and by nothing else; 'queue' knows all limits")
    return None
