"""What can be looked for in a store, and how it is answered: a `Query[Row]` finds a `Found[Row]`, page by page.

What the other verbs take and answer is in `types.py`; `port.py` re-exports both.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from typing import Any, Generic, Literal, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.access import AccessToken
from holdfast.core.audit import AuditEntry
from holdfast.core.bus import BusAlert, BusDeadLetter, OutboxEntry, SinkStatus
from holdfast.core.dead_letters import DeadLetter, Reason
from holdfast.core.events import Event
from holdfast.core.index_rows import Task, Wait
from holdfast.core.instants import Instant
from holdfast.core.messages import Signal
from holdfast.core.plans import RegisteredPlan
from holdfast.core.schedules import Schedule
from holdfast.core.search import Condition, Order
from holdfast.core.state import RunStatus
from holdfast.core.streams import NamedStream
from holdfast.store.types import ArchivedRun, Bulletin, RunHead

T = TypeVar("T")
Row = TypeVar("Row")
Q = TypeVar("Q", bound="Query[Any]")

logger = logging.getLogger("holdfast.store")


class Query(Struct, Generic[Row], frozen=True, kw_only=True):
    """What to look for; the answer to a `Query[Row]` is a `Found[Row]`, in a fixed order.

    A field that is None matches everything. Beside `limit` a query may have two bounds. `look` is how many rows are
    examined, whether they match or not: an answer that ends there has a `cursor` to continue from, even if it is empty.
    `most_bytes` is about how large the rows are together: an answer ends with the row that reaches it, so that it has
    at least one row if there is any.
    """

    limit: int = 100


class RunQuery(Query[RunHead], frozen=True, kw_only=True):
    """Which runs to find; None means any. Answers are ordered by run id, from after `after`.

    With `newest` they are in the reverse order of creation, from before `before`: (created_at, run id) of the last that
    was seen. `run_ids` restricts the search to these runs. Each word of `text` is a part of the run's id, workflow,
    reference, a tag, or of what it last failed with; case is ignored for A to Z. All conditions of `where` hold.
    With `roots` runs that have a parent are left out; with `retrying`, runs of which no activity is tried again.

    With `order` they are in that order, without those that lack what it is about, from behind `behind`: (value,
    created_at, run id) of the last that was seen. Of two with the same value the one that was created first is first,
    or last if the order is descending. An answer may be cut short, and then has a cursor.
    """

    tenant: str | None = None
    workflow: str | None = None
    status: RunStatus | None = None
    reference_key: str | None = None
    tag: str | None = None
    parent_run_id: str | None = None
    roots: bool = False
    retrying: bool = False
    run_ids: tuple[str, ...] | None = None
    created_from: Instant | None = None
    created_until: Instant | None = None
    finished_from: Instant | None = None
    finished_until: Instant | None = None
    where: tuple[Condition, ...] = ()
    text: str | None = None
    newest: bool = False
    before: tuple[Instant, str] = (2**62 - 1, "")
    order: Order | None = None
    behind: tuple[str | float, Instant, str] | None = None
    after: str = ""
    look: int | None = None
    most_bytes: int | None = None


class EventQuery(Query[Event], frozen=True, kw_only=True):
    """Which events of several runs to find: of each run those above its number in `after`: (run id, run_seq).

    Ordered by run id and run_seq. An answer that ends with `limit` events may have left out the last events of its last
    run, and all of the runs behind it; so may one that is as large as `most_bytes`. The name of a damaged event is that
    of its run. With `only_ends` these are the last events of those of the runs that have finished, and `missing` names
    those that are not there, however long the answer may be.
    """

    after: tuple[tuple[str, int], ...]
    only_ends: bool = False
    most_bytes: int | None = None


class FinishedRunQuery(Query[RunHead], frozen=True, kw_only=True):
    """Which finished runs could be deleted: those that ended by `until`, and whose family has ended.

    Ordered by (finished_at, run id), from after `after`. `look` bounds how many finished runs are examined. With
    `held_after` runs are left out of which a sink has yet to get events that were put into the outbox after it.
    """

    until: Instant
    tenant: str | None = None
    workflow: str | None = None
    status: RunStatus | None = None
    held_after: Instant | None = None
    after: tuple[Instant, str] = (0, "")
    look: int | None = None


class ArchivedRunQuery(Query[ArchivedRun], frozen=True, kw_only=True):
    """Which archived runs to find; None means any. The last that ended are first, from before `before`."""

    tenant: str | None = None
    run_id: str | None = None
    workflow: str | None = None
    status: RunStatus | None = None
    before: tuple[Instant, str] = (2**62 - 1, "")


class RunCount(Struct, frozen=True):
    """How many runs of a workflow have a status."""

    workflow: str
    status: RunStatus
    count: int


class RunCountQuery(Query[RunCount], frozen=True, kw_only=True):
    """How many runs match a query, by workflow and status, in this order; its order, bounds and cursors do not count.

    At most `look` runs are examined of those that are not completed, and as many of those that are, the newest ones; or
    more, if an index leads to few. If there are more, the answer has a `cursor`: True.
    """

    runs: RunQuery
    look: int = 100_000


class WaitQuery(Query[Wait], frozen=True, kw_only=True):
    """Which open waits to find: of a run, for a signal's name, or both. Ordered by (run id, step id)."""

    tenant: str | None = None
    run_id: str | None = None
    name: str | None = None
    after: tuple[str, str] = ("", "")


class StreamQuery(Query[NamedStream], frozen=True, kw_only=True):
    """Which streams a run has, in the order of their names, from after `after`."""

    run_id: str
    after: str = ""


PLACES_COUNTED = 1_000
"""Up to how many places and calls are counted for a row of `PlaceQuery`."""


class PlaceInLine(Struct, frozen=True, kw_only=True, gc=False):
    """What of a run waits for a place: the run itself, to be admitted, or the first of its calls that have a limit.

    The line is that of its tenant and key; whose line is next, `core/admission.py` and `core/call_limits.py` say.
    """

    run_id: str
    step_id: str = ""
    """The call's; empty: the run itself waits, and `limit` is its workflow."""
    limit: str
    key: str = ""
    taken: int | None = None
    """How many places are taken; None: the caller may not know."""
    taken_of_key: int = 0
    before: int = 0
    """How many are before it in its line."""
    waiting: int = 1
    """How many calls of the run wait."""


class PlaceQuery(Query[PlaceInLine], frozen=True, kw_only=True):
    """What waits for a place of these runs, in the order of their ids: a row for each run of which something does."""

    run_ids: tuple[str, ...]


class MailboxQuery(Query[Signal], frozen=True, kw_only=True):
    """Which signals of a run to find, in order of acceptance. Consumed ones too if `consumed`.

    Without a `run_id` those of all runs, in the order of the runs' creation, after number `after` of `after_run`; if
    that run was deleted meanwhile, after the run whose id comes before. With `unfinished`, finished runs are left out.
    """

    run_id: str | None = None
    tenant: str | None = None
    name: str | None = None
    signal_id: str | None = None
    consumed: bool = False
    unfinished: bool = False
    after_run: str = ""
    after: int = 0
    most_bytes: int | None = None


class TaskQuery(Query[Task], frozen=True, kw_only=True):
    """Which tasks to find. `role` matches tasks that list it; `due_before` those that have an instant before it.

    `actor` matches tasks that concern an actor of this name with `actor_roles`: tasks that are assigned to the actor,
    list one of the roles, or list no role and are unassigned. `step_ids` restricts the search to these steps. Each
    word of `text` is a part of the name or, as JSON, of the payload; case is ignored for A to Z. Ordered by task id.
    """

    tenant: str | None = None
    run_id: str | None = None
    task_id: str | None = None
    step_ids: tuple[str, ...] | None = None
    status: Literal["OPEN", "COMPLETED", "CANCELLED"] | None = None
    assignee: str | None = None
    role: str | None = None
    workflow: str | None = None
    due_before: Instant | None = None
    actor: str | None = None
    actor_roles: tuple[str, ...] = ()
    text: str | None = None
    after: str = ""
    look: int | None = None
    most_bytes: int | None = None


class DeadLetterQuery(Query[DeadLetter], frozen=True, kw_only=True):
    """Which dead letters to find: by default those that are not settled. Ordered by (died_at, letter_id)."""

    tenant: str | None = None
    run_id: str | None = None
    letter_id: str | None = None
    reason: Reason | None = None
    settled: bool = False
    after: tuple[Instant, str] = (0, "")
    most_bytes: int | None = None


class AuditQuery(Query[AuditEntry], frozen=True, kw_only=True):
    """Which entries of the audit log to find, by (at, entry_id), or with `newest` in reverse order.

    `after` is (at, entry_id) of the last entry that was seen, in that order.
    """

    tenant: str | None = None
    run_id: str | None = None
    actor: str | None = None
    token_id: str | None = None
    operation: str | None = None
    since: Instant | None = None
    until: Instant | None = None
    newest: bool = False
    after: tuple[Instant, str] | None = None


class BulletinQuery(Query[Bulletin], frozen=True, kw_only=True):
    """Which bulletins of a kind to find, by (at, bulletin_id), from after `after`; expired ones are not found."""

    kind: str
    bulletin_ids: tuple[str, ...] | None = None
    since: Instant | None = None
    after: tuple[Instant, str] = (-1, "")


class TokenQuery(Query[AccessToken], frozen=True, kw_only=True):
    """Which tokens to find; None means any. Sessions only with `sessions`. Ordered by token id."""

    token_ids: tuple[str, ...] | None = None
    tenant: str | None = None
    sessions: bool = False
    after: str = ""


class PlanQuery(Query[RegisteredPlan], frozen=True, kw_only=True):
    """Which registered versions of plans to find; None means any. Ordered by tenant, plan id and version.

    `newest_first` orders them by when they were registered instead, and those of one moment by version: the last first.
    """

    tenant: str | None = None
    plan_id: str | None = None
    plan_version: str | None = None
    newest_first: bool = False
    after: tuple[str, str, str] = ("", "", "")


class SinkQuery(Query[SinkStatus], frozen=True, kw_only=True):
    """Which sinks to find; None means any. Ordered by name. With `counted` they have backlogs and dead letters."""

    tenant: str | None = None
    name: str | None = None
    counted: bool = False
    after: str = ""


class OutboxQuery(Query[OutboxEntry], frozen=True, kw_only=True):
    """Which entries of a sink to find, in order of their runs' numbers and of `from_seq`: those above `after`."""

    sink: str
    after: tuple[int, int] = (-1, 0)


class AlertQuery(Query[BusAlert], frozen=True, kw_only=True):
    """Which alerts to find: those with numbers above `after`, in order."""

    after: int = 0


class BusDeadLetterQuery(Query[BusDeadLetter], frozen=True, kw_only=True):
    """Which dead letters of the bus to find. Ordered by (died_at, letter_id). `tenant` is the sink's."""

    tenant: str | None = None
    sink: str | None = None
    run_id: str | None = None
    letter_id: str | None = None
    after: tuple[Instant, str] = (0, "")


COUNTED_ENTRIES = 10_000
"""How many entries of a backlog are counted at most."""


class ScheduleQuery(Query[Schedule], frozen=True, kw_only=True):
    """Which schedules to find; None means any. Ordered by tenant, project, environment and id.

    With `by_due` those that are due at some time, the one that is due first at the head, and not from `after` on. With
    `waiting` only those that have ticks in their queue.
    """

    tenant: str | None = None
    project: str | None = None
    environment: str | None = None
    schedule_id: str | None = None
    app: str | None = None
    workflow: str | None = None
    waiting: bool = False
    by_due: bool = False
    after: tuple[str, str, str, str] = ("", "", "", "")


class Found(list[Row]):
    """The rows that match a query. `cursor` is set if a bound ended the search: there may be more after it.

    `unreadable` names damaged rows. They are left out, and the others are found all the same. `as_of` is the store's
    time at which the rows were so, where `scan_consistency` is "eventual": what others did shortly before may be
    missing. `missing` names runs that were asked for and are not there, where a query promises that.
    """

    def __init__(
        self,
        rows: Iterable[Row] = (),
        cursor: Any = None,
        unreadable: tuple[str, ...] = (),
        as_of: Instant | None = None,
        missing: tuple[str, ...] = (),
    ) -> None:
        super().__init__(rows)
        self.cursor = cursor
        self.unreadable = unreadable
        self.as_of = as_of
        self.missing = missing

    def log(self, what: str) -> None:
        """Log which rows were left out, if any were."""
        if self.unreadable:
            logger.error("%s that cannot be read are left out of a list: %s", what, ", ".join(self.unreadable))


async def pages(
    find: Callable[[Q], Awaitable[Found[Row]]], query: Q, cursor_of: Callable[[Row], Any]
) -> AsyncGenerator[Found[Row], None]:
    """Yield one page after the other. A page of which no row can be read does not end them."""
    while True:
        page = await find(query)
        yield page
        if page.cursor is None and not page:
            return
        query = replace(query, after=cursor_of(page[-1]) if page.cursor is None else page.cursor)


def within(rows: Iterable[T], most_bytes: int | None, size_of: Callable[[T], int]) -> Iterator[T]:
    """Yield rows up to the one with which they reach this size together."""
    size = 0
    for row in rows:
        yield row
        if most_bytes is not None:
            size += size_of(row)
            if size >= most_bytes:
                return
