"""The installation: its health, its nodes and queues, and what operators should know."""

import asyncio
from datetime import datetime
from importlib.metadata import version
from typing import Annotated, Literal

from msgspec import Meta, Struct

from holdfast.clock import SystemClock
from holdfast.core.snapshot import Alert, AlertCode
from holdfast.engine.abilities import abilities_of
from holdfast.engine.observe.doctor import examine
from holdfast.engine.observe.metrics import observer_of
from holdfast.engine.observe.samples import find_samples
from holdfast.engine.observe.takeovers import find_takeovers
from holdfast.service.context import RequestContext
from holdfast.service.paging import PageSize
from holdfast.service.registry import Request, operation
from holdfast.service.views import instant_of, moment, shown
from holdfast.store.decisions import is_free, lease_end, name_of
from holdfast.store.health import Bounds

VERSION = version("holdfast")
BOUNDS_HERE = Bounds(sample_runs=0)
"""The bounds of an examination for a page that polls: suspects, without a sample of other runs."""


class Nothing(Request, frozen=True, kw_only=True):
    """A request without fields."""


class Health(Struct, frozen=True, kw_only=True):
    """The service answers, and so does its store. `time` is the store's."""

    status: Literal["ok"]
    app: str
    version: str
    node: str
    time: datetime


@operation("system.health", "GET /v1/health", scope=None)
async def health(context: RequestContext, request: Nothing) -> Health:
    """Return whether the service and its store work; if not, this answers 503."""
    runtime = context.runtime
    if runtime.failure is not None:
        raise runtime.failure
    return Health(
        status="ok",
        app=context.service.app.name,
        version=VERSION,
        node=name_of(runtime.node_name),
        time=moment(await runtime.store.now()),
    )


class StatsView(Struct, frozen=True, kw_only=True):
    """Counts: runs by status, what is ready, leased or waiting, and dead letters.

    Of 100,000 runs and more in a SQL store, the number of completed ones is an estimate, and `completed_is_estimated`.
    """

    runs: dict[str, int]
    completed_is_estimated: bool = False
    ready: int
    leased: int
    messages: int
    signals: int
    open_tasks: int
    jobs: int
    dead_letters: int
    nodes: int
    alerts: dict[str, int]
    oldest_ready_at: datetime | None = None
    queued: int = 0
    """How many runs are queued for admission by the limits of their workflow."""
    writes_over_budget: int = 0
    """How many writes of this process took longer than `write_latency_budget_ms`."""
    slowest_write_ms: int = 0
    """How long the slowest of them took."""


@operation("system.stats", "GET /v1/stats", scope="system:read", reads_much=True)
async def stats(context: RequestContext, request: Nothing) -> StatsView:
    """Return counts over all tenants."""
    await raise_node_alerts(context)
    late = observer_of(context.runtime.store).write_latency
    return shown(
        StatsView,
        await context.store.stats(),
        alerts=dict(context.service.alerts.counts),
        writes_over_budget=late.over_budget.total(),
        slowest_write_ms=round(late.slowest_s * 1_000),
    )


class FindingView(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that was examined. `search` is what to type on the page to find all of the runs."""

    level: Literal["fine", "note", "wrong"]
    subject: str
    sentence: str
    advice: str = ""
    run_ids: tuple[str, ...] = ()
    search: str = ""


class DoctorReport(Struct, frozen=True):
    """What was found, and whether nothing of it is wrong."""

    is_fine: bool
    items: list[FindingView]


@operation("system.doctor", "GET /v1/doctor", scope="system:read", reads_much=True)
async def doctor(context: RequestContext, request: Nothing) -> DoctorReport:
    """Examine the installation as `holdfast doctor` does, over all nodes, without reading a sample of runs in full."""
    found = await examine(context.runtime.store, SystemClock(), bounds=BOUNDS_HERE)
    return DoctorReport(found.is_fine, [shown(FindingView, finding) for finding in found.findings])


class QueueView(Struct, frozen=True):
    """A queue of activities, and how many wait in it or are being carried out from it."""

    name: str
    jobs: int


class QueueList(Struct, frozen=True):
    """The queues that hold something."""

    items: list[QueueView]


@operation("system.queues", "GET /v1/queues", scope="system:read", reads_much=True)
async def queues(context: RequestContext, request: Nothing) -> QueueList:
    """Return the queues that hold jobs, with their numbers."""
    counted = await context.store.stats()
    return QueueList([QueueView(name, jobs) for name, jobs in sorted(counted.queues.items())])


class NodeView(Struct, frozen=True):
    """A node, and until when it has its lease. `is_here` is the one of the process that answers."""

    name: str
    lease_until: datetime
    is_here: bool
    version: str = ""
    """The version of Holdfast; empty if the node is older than this field, or has not published it yet."""
    workflows: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()
    runs: int | None = None
    """How many it owns; None if the node is older than this field."""
    activities: int | None = None
    """How many activities are running on it."""


class NodeList(Struct, frozen=True):
    """The nodes whose leases are current."""

    items: list[NodeView]


@operation("system.nodes", "GET /v1/nodes", scope="system:read", reads_much=True)
async def nodes(context: RequestContext, request: Nothing) -> NodeList:
    """Return the live nodes."""
    counted, here = await context.store.stats(), context.runtime.node_name
    leases = sorted(counted.leases.items())
    able = {each.node: each.abilities for each in abilities_of(await context.store.find_nodes())}
    return NodeList(
        [
            NodeView(
                name_of(node),
                moment(until),
                node == here,
                able[node].version if node in able else "",
                tuple(sorted({name for name, _ in able[node].named_workflows})) if node in able else (),
                tuple(sorted(able[node].queues)) if node in able else (),
                *(able[node].load or () if node in able else ()),
            )
            for node, until in leases
        ]
    )


class LockView(Struct, frozen=True):
    """A host lock: what only one node does at a time, and which node that is. `epoch` counts its holders."""

    name: str
    node: str
    epoch: int
    acquired_at: datetime
    lease_until: datetime
    is_expired: bool


class LockList(Struct, frozen=True):
    """The host locks that have a holder."""

    items: list[LockView]


@operation("system.locks", "GET /v1/locks", scope="system:read")
async def locks(context: RequestContext, request: Nothing) -> LockList:
    """Return the host locks: which node does what only one may do at a time, and when its lease ends."""
    held, now = await context.store.find_locks(), await context.store.now()
    return LockList(
        [
            LockView(
                lock.name,
                name_of(lock.owner),
                lock.epoch,
                moment(lock.acquired_at),
                moment(lease_end(lock.lease_until, now)),
                is_free(lock, now),
            )
            for lock in held
        ]
    )


class Since(Request, frozen=True, kw_only=True):
    """The earliest time to list, inclusive."""

    since: datetime | None = None
    limit: PageSize = 500


class LoadView(Struct, frozen=True):
    """How many runs a node owned, and how many activities were under way on it."""

    runs: int
    activities: int


class SampleView(Struct, frozen=True, kw_only=True):
    """The installation at one time, over all nodes and tenants.

    `completed` and `failed` are runs that have ended within `every_s` before it; of both, and of runs that are tried
    again, 20,000 are looked at. `lag_ms` is for how long the run that had waited longest was due.
    """

    at: datetime
    every_s: float
    runs: dict[str, int]
    completed: int
    failed: int
    retrying: int
    overdue: int
    ready: int
    queued: int
    lag_ms: int
    jobs: int
    queues: dict[str, int]
    open_tasks: int
    dead_letters: int
    nodes: int
    load: dict[str, LoadView]


class SampleList(Struct, frozen=True):
    """Samples, the oldest first. There are more behind a list that has as many as it may have."""

    items: list[SampleView]


@operation("system.samples", "GET /v1/samples", scope="system:read", reads_much=True)
async def samples(context: RequestContext, request: Since) -> SampleList:
    """Return the stored samples of the installation, for charts: one a minute, for a day."""
    found = await find_samples(context.runtime.store, _instant(request.since), request.limit)
    return SampleList(
        [
            shown(
                SampleView,
                each.sample,
                at=moment(each.at),
                every_s=each.every_s,
                load={name: LoadView(load.runs, load.activities) for name, load in each.sample.load.items()},
            )
            for each in found
        ]
    )


class TakeoverView(Struct, frozen=True):
    """A node that has gone on with runs of another one; of itself, if its process was started again."""

    at: datetime
    node: str
    taken_from: str
    runs: int


class TakeoverList(Struct, frozen=True):
    """Takeovers, the oldest first."""

    items: list[TakeoverView]


@operation("system.takeovers", "GET /v1/takeovers", scope="system:read")
async def takeovers(context: RequestContext, request: Since) -> TakeoverList:
    """Return which nodes have taken over runs of lost nodes in the last week."""
    found = await find_takeovers(context.runtime.store, _instant(request.since), request.limit)
    return TakeoverList([shown(TakeoverView, each.takeover, at=moment(each.at)) for each in found])


def _instant(since: datetime | None) -> int:
    return instant_of(since) or 0


async def raise_node_alerts(context: RequestContext) -> None:
    """Raise the alerts that the node of this process has noted, about writes over the budget and stale items."""
    stale = context.runtime.retention.alerts
    while stale:
        raised_at, found = stale.popleft()
        context.service.alerts.add([found], raised_at)
    noted = observer_of(context.runtime.store).write_latency.alerts
    if noted:
        now, now_s = await context.store.now(), asyncio.get_running_loop().time()
        while noted:
            alert = noted.popleft()
            raised_at = now - round((now_s - alert.at_s) * 1_000_000)
            context.service.alerts.add([Alert("WRITE_LATENCY_HIGH", 2, "", alert.detail)], raised_at)


class ListAlerts(Request, frozen=True, kw_only=True):
    """From where to list alerts."""

    after: Annotated[int, Meta(ge=0, lt=2**53, description="The number behind which to begin.")] = 0
    limit: PageSize = 100


class AlertView(Struct, frozen=True, kw_only=True):
    """Something that an operator should know. Priority 1 is the most urgent; `number` counts up in this process."""

    number: int
    code: AlertCode
    priority: int
    run_id: str
    detail: str
    raised_at: datetime


class AlertList(Struct, frozen=True):
    """Alerts that were raised in this process, in order."""

    items: list[AlertView]


@operation("system.alerts", "GET /v1/alerts", scope="system:read")
async def alerts(context: RequestContext, request: ListAlerts) -> AlertList:
    """Return what operators should know: alerts of this process, such as PROJECTOR_GAP_DETECTED, in order."""
    await raise_node_alerts(context)
    found = context.service.alerts.after(request.after, request.limit)
    return AlertList(
        [shown(AlertView, raised.alert, number=raised.number, raised_at=moment(raised.raised_at)) for raised in found]
    )
