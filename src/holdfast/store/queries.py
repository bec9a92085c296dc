"""Searches of a store and their answers: a `Query[Row]` returns a `Found[Row]`, page by page.

The arguments and results of the other verbs are in `types.py`; `port.py` re-exports both.
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
    """What to search for; the answer to a `Query[Row]` is a `Found[Row]`, in a fixed order.

    A field that is None matches everything. Besides `limit`, a query may have two bounds. `look` is how many rows are
    examined, whether they match or not: an answer that ends there has a `cursor` to continue from, even if it is empty.
    `most_bytes` bounds the total size of the rows: an answer ends with the row that reaches it, so it has at least one
    row if there is any.
    """

    limit: int = 100


class RunQuery(Query[RunHead], frozen=True, kw_only=True):
    """Which runs to find; None means any. Answers are ordered by run id, starting after `after`.

    With `newest` they are in reverse order of creation, starting before `before`: (created_at, run id) of the last run
    seen. `run_ids` restricts the search to these runs. Each word of `text` must be part of the run's id, workflow,
    reference, a tag, or its last error; case is ignored for A to Z. All conditions of `where` must hold. `roots` leaves
    out runs that have a parent; `retrying` leaves out runs without an activity that is being retried.

    With `order` they are sorted by it, without runs that lack that value, starting behind `behind`: (value, created_at,
    run id) of the last run seen. Among runs with the same value the one created first comes first, or last if the order
    is descending. An answer may be cut short, and then has a cursor.
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
    """Which events of several runs to find: those above each run's number in `after`: (run id, run_seq).

    Ordered by run id and run_seq. An answer that reaches `limit` events or `most_bytes` may lack the last events of its
    last run, and all of the runs after it. A damaged event is named by its run. With `only_ends` the answer is the last
    event of each of these runs that has finished, and `missing` names the runs that do not exist, however long the
    answer may be.
    """

    after: tuple[tuple[str, int], ...]
    only_ends: bool = False
    most_bytes: int | None = None


class FinishedRunQuery(Query[RunHead], frozen=True, kw_only=True):
    """Which finished runs could be deleted: those that ended by `until` and whose family has ended.

    Ordered by (finished_at, run id), starting after `after`. `look` bounds how many finished runs are examined.
    `held_after` leaves out runs with events that were put into the outbox after it and that a sink has not received.
    """

    until: Instant
    tenant: str | None = None
    workflow: str | None = None
    status: RunStatus | None = None
    held_after: Instant | None = None
    after: tuple[Instant, str] = (0, "")
    look: int | None = None


class ArchivedRunQuery(Query[ArchivedRun], frozen=True, kw_only=True):
    """Which archived runs to find; None means any. The last to end come first, starting before `before`."""

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
    """How many runs match a query, by workflow and status, in this order.

    The order, bounds and cursors of `runs` are ignored. At most `look` uncompleted runs and at most `look` completed
    ones, the newest, are examined; more, if an index narrows them to few. If there are more, the answer has a `cursor`:
    True.
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
    """Which streams of a run to find, ordered by name, starting after `after`."""

    run_id: str
    after: str = ""


PLACES_COUNTED = 1_000
"""Up to how many places and calls are counted for a row of `PlaceQuery`."""


class PlaceInLine(Struct, frozen=True, kw_only=True, gc=False):
    """What waits for a place in a run: the run itself, to be admitted, or the first of its calls that have a limit.

    Its line is that of its tenant and key; `core/admission.py` and `core/call_limits.py` decide whose line is next.
    """

    run_id: str
    step_id: str = ""
    """The step of the call; empty: the run itself waits, and `limit` is its workflow."""
    limit: str
    key: str = ""
    taken: int | None = None
    """How many places are taken; None: the caller may not know."""
    taken_of_key: int = 0
    before: int = 0
    """How many are ahead of it in its line."""
    waiting: int = 1
    """How many calls of the run wait."""


class PlaceQuery(Query[PlaceInLine], frozen=True, kw_only=True):
    """What waits for a place in these runs, ordered by run id: one row for each run that has something waiting."""

    run_ids: tuple[str, ...]


class MailboxQuery(Query[Signal], frozen=True, kw_only=True):
    """Which signals of a run to find, in order of acceptance; with `consumed`, consumed ones too.

    Without a `run_id`, those of all runs, in the runs' order of creation, starting after number `after` of `after_run`;
    if that run was deleted meanwhile, after the run created before it. `unfinished` leaves out finished runs.
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
    """Which tasks to find. `role` matches tasks that list it; `due_before` those due before this instant.

    `actor` matches tasks that concern an actor of this name with `actor_roles`: tasks that are assigned to the actor,
    list one of the roles, or list no role and are unassigned. `step_ids` restricts the search to these steps. Each
    word of `text` must be part of the name or, as JSON, of the payload; case is ignored for A to Z. Ordered by task id.
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
    """Which entries of the audit log to find, ordered by (at, entry_id), or with `newest` in reverse.

    `after` is (at, entry_id) of the last entry seen, in that order.
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
    """Which bulletins of a kind to find, by (at, bulletin_id), starting after `after`; expired ones are not found."""

    kind: str
    bulletin_ids: tuple[str, ...] | None = None
    since: Instant | None = None
    after: tuple[Instant, str] = (-1, "")


class TokenQuery(Query[AccessToken], frozen=True, kw_only=True):
    """Which tokens to find; None means any. Sessions are found only with `sessions`. Ordered by token id."""

    token_ids: tuple[str, ...] | None = None
    tenant: str | None = None
    sessions: bool = False
    after: str = ""


class PlanQuery(Query[RegisteredPlan], frozen=True, kw_only=True):
    """Which registered versions of plans to find; None means any. Ordered by tenant, plan id and version.

    With `newest_first` they are ordered by when they were registered, last first, and at the same instant by version.
    """

    tenant: str | None = None
    plan_id: str | None = None
    plan_version: str | None = None
    newest_first: bool = False
    after: tuple[str, str, str] = ("", "", "")


class SinkQuery(Query[SinkStatus], frozen=True, kw_only=True):
    """Which sinks to find; None means any. Ordered by name. `counted` adds backlogs and dead letters."""

    tenant: str | None = None
    name: str | None = None
    counted: bool = False
    after: str = ""


class OutboxQuery(Query[OutboxEntry], frozen=True, kw_only=True):
    """Which entries of a sink to find, ordered by the runs' numbers and `from_seq`: those above `after`."""

    sink: str
    after: tuple[int, int] = (-1, 0)


class AlertQuery(Query[BusAlert], frozen=True, kw_only=True):
    """Which alerts to find: those with numbers above `after`, in order."""

    after: int = 0


class BusDeadLetterQuery(Query[BusDeadLetter], frozen=True, kw_only=True):
    """Which dead letters of the bus to find. Ordered by (died_at, letter_id). `tenant` is the sink's tenant."""

    tenant: str | None = None
    sink: str | None = None
    run_id: str | None = None
    letter_id: str | None = None
    after: tuple[Instant, str] = (0, "")


COUNTED_ENTRIES = 10_000
"""Up to how many entries of a backlog are counted."""


class ScheduleQuery(Query[Schedule], frozen=True, kw_only=True):
    """Which schedules to find; None means any. Ordered by tenant, project, environment and id.

    With `by_due`, those that have a due time, earliest first, ignoring `after`. With `waiting`, only those with queued
    ticks.
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

    `unreadable` names damaged rows. They are left out; the other rows are still found. `as_of` is the store's time for
    which the rows are valid, where `scan_consistency` is "eventual": changes by others shortly before may be missing.
    `missing` names requested runs that do not exist, where a query promises that.
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
        """Log which rows were left out, if any."""
        if self.unreadable:
            logger.error("%s that cannot be read are left out of a list: %s", what, ", ".join(self.unreadable))


async def pages(
    find: Callable[[Q], Awaitable[Found[Row]]], query: Q, cursor_of: Callable[[Row], Any]
) -> AsyncGenerator[Found[Row], None]:
    """Yield page after page. A page without a readable row does not end the iteration."""
    while True:
        page = await find(query)
        yield page
        if page.cursor is None and not page:
            return
        query = replace(query, after=cursor_of(page[-1]) if page.cursor is None else page.cursor)


def within(rows: Iterable[T], most_bytes: int | None, size_of: Callable[[T], int]) -> Iterator[T]:
    """Yield rows up to the one at which they reach this total size."""
    size = 0
    for row in rows:
        yield row
        if most_bytes is not None:
            size += size_of(row)
            if size >= most_bytes:
                return
