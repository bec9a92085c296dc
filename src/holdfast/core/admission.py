"""How many runs of a workflow may be under way, and what becomes of a start beyond that.

Every workflow (a `plan_id`, whatever its versions) has a *gate*. What a store does at a gate:

**Room.** A run that comes with a ticket is *let in* when there is room: fewer than `at_once` runs are inside, fewer
than `per_key` of them of its tenant and key, and fewer than `starts` have started within the `period_ms` before or are
let in and have yet to start. It is *inside* until it has finished, and leaves with that commit. Until it is let in it
*waits*: its messages are held back, so that it is not ready, and it has no owner. Signals make it ready as they do any
run, and by one it may be cancelled: then it leaves with that commit.

**Who is next.** Of those who wait and have room, first by tenant: the one that follows, in order of the code points
of names and round again, the tenant of whom a run was let in last. Of its runs the one with the least
`place_in_line`, then in order of creation. Whoever comes stands behind all who wait and could be let in: `create`
puts the run in line, lets in the one who is next, if there is one, and answers whether it was this one.

**Limits** are not kept at gates. Who asks brings them, as its code has them now: a change holds for those who wait.

**Starts.** The rate bounds the commits by which runs start (RunStarted), not the moments at which they are let in: a
node may be late with it, or gone, and nobody knows for how long. So a run that was let in under a rate is *starting*,
and takes up one of the `starts` without an instant, until it has started; the instant of that commit then counts.
(One that ends without having started counts as started then.) Whatever is late or crashes, no window of a period holds
more than `starts`: when the last of its runs was let in, the others were starting, or had started within that window.

**Policies.** `queue` is the above. `reject` refuses the run if it would wait. `delay` is `queue` for a workflow that
has a rate and no other limit.

**Atomicity.** Everything about one gate fits one row or one object: the counts inside by tenant and key, who waits,
the tenant that was last, who is starting, and the last `starts` instants of the limit that was last used. A store
whose atomicity is one object takes the place at the gate first and creates the run after it. A place whose run is not
there or has finished (a crash, or a node of an older version, left it) is given up when `admit` finds that somebody
waits and nobody can be let in. So there may be fewer inside than allowed for a while, and never more. Finding who is
next must cost no more for a thousand who wait, or for a thousand full keys, than for one.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

from msgspec import Struct

from holdfast.core.instants import Instant
from holdfast.core.messages import INTEGER_LIMIT, check_integer
from holdfast.core.names import check_name
from holdfast.errors import InvalidInput, Overloaded
from holdfast.limits import DURATION_MS, OVERLOAD_RETRY_MS, PRIORITY, PRIORITY_AGE_MS

Overload = Literal["queue", "delay", "reject"]


class RunLimit(Struct, frozen=True, kw_only=True):
    """What a workflow allows: runs inside, runs inside for one key of one tenant, and starts within any period.

    Beyond it a start waits its turn (`queue`, and `delay` for a rate alone), or is refused.
    """

    at_once: int | None = None
    per_key: int | None = None
    starts: int | None = None
    period_ms: int = 1_000
    overload: Overload = "queue"


NO_LIMIT = RunLimit()
NEVER = INTEGER_LIMIT
"""An instant that does not come."""


class Ticket(Struct, frozen=True, kw_only=True):
    """What a run comes to the gate of its workflow with."""

    limit: RunLimit
    key: str = ""
    priority: int = 0


def place_in_line(priority: int, now: Instant) -> Instant:
    """Return the instant by which a run stands in line: a higher priority counts as having come earlier.

    So whoever has waited for long enough comes first at last, whatever the others' priorities are.
    """
    return now - priority * PRIORITY_AGE_MS * 1_000


def free_slot(last_starts: Sequence[Instant], limit: RunLimit, now: Instant, starting: int = 0) -> Instant:
    """Return the first instant, from now on, at which the rate allows another start after these, in order.

    `starting` is how many more are let in and have yet to start. If these are all that it allows, it is `NEVER`.
    """
    if limit.starts is None or len(last_starts) + starting < limit.starts:
        return now
    if starting >= limit.starts:
        return NEVER
    return max(now, last_starts[starting - limit.starts] + limit.period_ms * 1_000)


def overloaded(plan_id: str, free_at: Instant, now: Instant, limit: RunLimit = NO_LIMIT) -> Overloaded:
    """Make the refusal of a start; if it is not the rate that forbids it, nobody knows for how long."""
    if free_at == NEVER:  # one that starts now makes room after a period
        free_at = now + limit.period_ms * 1_000
    retry_after_ms = -(-(free_at - now) // 1_000) or OVERLOAD_RETRY_MS
    return Overloaded(
        f"workflow {plan_id!r} has as many runs as it allows", plan_id=plan_id, retry_after_ms=retry_after_ms
    )


def check_ticket(ticket: Any) -> InvalidInput | None:
    """Return why a run cannot come to a gate with this, or None."""
    if not isinstance(ticket, Ticket):
        return InvalidInput(f"what a run comes to a gate with is a Ticket, not {type(ticket).__qualname__}")
    problem = None if ticket.key == "" else check_name("key", ticket.key)
    problem = problem or check_integer("priority", ticket.priority)
    if problem is None and abs(ticket.priority) > PRIORITY:
        problem = InvalidInput(f"a priority is from -{PRIORITY} to {PRIORITY}, not {ticket.priority}", field="priority")
    return problem or check_limit(ticket.limit)


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
