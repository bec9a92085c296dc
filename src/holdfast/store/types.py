"""What the store's verbs answer. They are used as `port.…`, where the verbs are."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.core.events import Event
from holdfast.core.index_rows import ActivityRecord
from holdfast.core.instants import Instant
from holdfast.core.messages import AcceptedSignalResult, Message, Signal
from holdfast.core.snapshot import RuntimeSnapshot
from holdfast.core.state import RunStatus
from holdfast.errors import CallerError, StoreCorrupt

T = TypeVar("T")
Query = TypeVar("Query", bound=Struct)

logger = logging.getLogger("holdfast.store")


class Found(list[T]):
    """Rows that a query names. `cursor` is set if a bound of it ended the look: there may be more behind that.

    `unreadable` names the rows that are damaged. They are left out, and the others are found all the same.
    """

    def __init__(self, rows: Iterable[T] = (), cursor: Any = None, unreadable: tuple[str, ...] = ()) -> None:
        super().__init__(rows)
        self.cursor = cursor
        self.unreadable = unreadable

    def log(self, what: str) -> None:
        """Log which rows were left out, if any were."""
        if self.unreadable:
            logger.error("%s that cannot be read are left out of a list: %s", what, ", ".join(self.unreadable))


async def load_each(
    load: Callable[[Sequence[str]], Awaitable[list[T]]], run_ids: Sequence[str]
) -> list[T | StoreCorrupt]:
    """Load runs; a damaged one is answered by its error, and the others are loaded all the same."""
    try:
        return [*await load(run_ids)]
    except StoreCorrupt as damage:
        if len(run_ids) == 1:
            return [damage]
    half = len(run_ids) // 2
    return [*await load_each(load, run_ids[:half]), *await load_each(load, run_ids[half:])]


def log_unreadable(what: str, page: list[Any]) -> None:
    """Log which rows were left out of a page, if any were."""
    if isinstance(page, Found):
        page.log(what)


async def pages(
    find: Callable[[Query], Awaitable[list[T]]], query: Query, place_of: Callable[[T], Any]
) -> AsyncIterator[list[T]]:
    """Give one page after the other. One of which no row can be read does not end them."""
    while True:
        page = await find(query)
        yield page
        place = page.cursor if isinstance(page, Found) else None
        if place is None:
            if not page:
                return
            place = place_of(page[-1])
        query = replace(query, after=place)


class Created(Struct, frozen=True, gc=False):
    """The run is there, by this call. `epoch` is 1 if it was claimed as it was written; one that waits is not."""

    run_id: str
    epoch: int = 0
    signals: "tuple[Delivered, ...]" = ()


class Existing(Struct, frozen=True, gc=False):
    """The same request was made before; this is its run. Signals that came with the request were delivered to it."""

    run_id: str
    signals: "tuple[Delivered, ...]" = ()


class Refused(Struct, frozen=True):
    """Nothing was stored. The error says why, and whose fault it is."""

    error: CallerError


class Accepted(Struct, frozen=True, gc=False):
    """The message or signal is in the run's inbox. `result` is None for messages."""

    result: AcceptedSignalResult | None = None


class Duplicate(Struct, frozen=True, gc=False):
    """The same id was accepted before; for a signal, `result` is what its first sender was told."""

    result: AcceptedSignalResult | None = None


Delivered = Accepted | Duplicate | Refused
"""How one signal or message was answered."""


Plan = tuple[str, str]
"""A definition: the id of a plan, and its version."""


class NodePlans(Struct, frozen=True):
    """What a node has said with its lease: the definitions that it can run, and more that is for other nodes."""

    node: str
    plans: frozenset[Plan]


class OrphanedDefinition(Struct, frozen=True):
    """A definition that no node alive has, though a run of it has been waiting to go on since then."""

    plan: Plan
    since: Instant


class Committed(Struct, frozen=True, gc=False):
    """The turn is part of the history. `version` is the run's version after it."""

    version: int
    persisted_at: Instant


class CommitConflict(Struct, frozen=True):
    """The deterministic conflict: the turn lost and left no trace.

    `existing` is the event that is already there, when the reason is that the turn would append it again. `unseen`: the
    outcome of an activity was accepted that the turn does not know of; take the turn again with what `load` returns.
    """

    reason: Literal[
        "no such run", "version", "epoch", "finished", "event exists", "task is open", "cannot be stored", "unseen"
    ]
    version: int = 0
    epoch: int = 0
    existing: Event | None = None


class RunHead(Struct, frozen=True, kw_only=True, gc=False):
    """A run without its history."""

    run_id: str
    tenant: str
    project: str
    environment: str
    plan_id: str
    plan_version: str
    run_request_id: str
    parent_run_id: str | None
    reference_key: str | None
    tags: tuple[str, ...]
    status: RunStatus
    version: int
    snapshot: RuntimeSnapshot | None
    created_at: Instant
    updated_at: Instant
    finished_at: Instant | None
    inbox_seq: int
    ready_at: Instant | None
    lease_owner: str | None
    lease_epoch: int
    queued_at: Instant | None = None
    """Since when it is queued for admission; None: it is not."""
    losses: int = 0
    """How many nodes went away while they had it, since a turn of it was last committed. See `Turn.losses`."""


class LoadedRun(Struct, frozen=True, kw_only=True, gc=False):
    """A run with what waits for it: due messages, unconsumed signals in order, activity records not completed.

    `details` holds, by step, what activities have last said of their progress. If there are more unconsumed signals
    than `MAILBOX_SIGNALS` it is not whole: of each name that an open wait is for, and of the engine's own names, the
    oldest so many are here, without those that are addressed to steps which do not wait.
    """

    head: RunHead
    messages: tuple[Message, ...] = ()
    signals: tuple[Signal, ...] = ()
    records: tuple[ActivityRecord, ...] = ()
    details: dict[str, Raw] = {}
    is_whole: bool = True


class Admitted(Struct, frozen=True, gc=False):
    """A run that was let in. STARTED: with the run if it was claimed, else it is ready for whoever claims.

    SKIPPED: somebody has it in hand, and finds that it was let in. FAILED: it makes no sense, and is left for a while.
    """

    run_id: str
    status: Literal["STARTED", "FAILED", "SKIPPED"]
    run: LoadedRun | None = None


class PurgeReport(Struct, frozen=True, kw_only=True):
    """What a purge deleted, or would delete. `has_more` says that the limit cut it short."""

    runs: int = 0
    events: int = 0
    signals: int = 0
    tasks: int = 0
    runtime_states: int = 0
    acceptance_records: int = 0
    dead_letters: int = 0
    audit_entries: int = 0
    tokens: int = 0
    stale_runs: int = 0
    has_more: bool = False


class Stats(Struct, frozen=True, kw_only=True):
    """Counts for operators."""

    runs: dict[str, int]
    ready: int
    leased: int
    messages: int
    signals: int
    open_tasks: int
    jobs: int
    dead_letters: int
    nodes: int
    oldest_ready_at: Instant | None
    queued: int = 0
    """How many runs wait for a place."""
    queues: dict[str, int] = {}
    """How many jobs each queue holds."""
    leases: dict[str, Instant] = {}
    """Until when each node that is there has its lease."""


class Change(Struct, frozen=True, gc=False):
    """A run whose history has grown to this version. `has_tasks`: some of what is new may be about a task."""

    run_id: str
    version: int
    has_tasks: bool = True


class Changes(Struct, frozen=True):
    """Runs whose histories have grown behind a cursor, and the cursor behind them. `has_more` is behind that one.

    `is_lost`: the cursor is not known here, or no longer; what has changed since cannot be said.
    """

    cursor: str
    runs: tuple[Change, ...] = ()
    has_more: bool = False
    is_lost: bool = False
