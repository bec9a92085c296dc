"""Runs as operators see them, updated on demand, and the alerts that this raises (EVT-6, PRJ-3).

Also the graphs of flows and plans, folded once for all their runs.

A projection is a cache: it continues from its watermark, and a lost one is rebuilt from the events. It is updated when
it is read, so it cannot lag; the change feed, which follows runs over time, reports lag as an alert.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary

from msgspec import Struct

from holdfast.core.graph import Graph
from holdfast.core.instants import Instant
from holdfast.core.run_graph import GraphFold, RunGraph
from holdfast.core.snapshot import Alert, Projection, RunSnapshot, catch_up
from holdfast.engine.history import head_of
from holdfast.store.port import Store

P = ParamSpec("P")
T = TypeVar("T")

KEPT = 1_000
"""How many projections are kept; the least recently read one is dropped first."""

PAGE_EVENTS = 500
PAGE_BYTES = 1024 * 1024
"""How many bytes of a history are read at a time."""

LARGE_NODES = 500
"""The number of nodes from which a graph takes too long for the event loop."""

MOST_ALERTS = 1_000
"""How many alerts a process keeps. Counters count all of them."""

PUT_BY_NODES = ("WRITE_LATENCY_HIGH", "STALE_RUNS", "STALE_TASKS")
"""Alerts that the node that raised them has put on the event bus."""


class RaisedAlert(Struct, frozen=True, kw_only=True):
    """An alert, with its number in this process and when it was raised."""

    number: int
    raised_at: Instant
    alert: Alert


class Alerts:
    """The alerts of one process; the latest are kept in full, for operators."""

    def __init__(self) -> None:
        self._latest: deque[RaisedAlert] = deque(maxlen=MOST_ALERTS)
        self._number = 0
        self.counts: dict[str, int] = {}
        self.forward: Callable[[Alert], None] = lambda alert: None
        """Puts an alert on the event bus."""

    def add(self, alerts: Iterable[Alert], now: Instant) -> None:
        """Keep alerts, and count them by code."""
        for alert in alerts:
            self._number += 1
            self.counts[alert.code] = self.counts.get(alert.code, 0) + 1
            self._latest.append(RaisedAlert(number=self._number, raised_at=now, alert=alert))
            if alert.code not in PUT_BY_NODES:
                self.forward(alert)

    def after(self, number: int, limit: int) -> list[RaisedAlert]:
        """Return alerts in the order they were raised, those after a number."""
        return [raised for raised in self._latest if raised.number > number][:limit]


class Projections:
    """The projections of one process."""

    def __init__(self, alerts: Alerts) -> None:
        self._alerts = alerts
        self._kept: dict[str, RunSnapshot] = {}

    async def of(self, store: Store, run_id: str) -> Projection:
        """Return the current state of a run. At a gap the projection stops, is marked stale, and an alert is raised."""
        head = await head_of(store, run_id)
        snapshot = self._kept.pop(run_id, None)
        if snapshot is None or snapshot.last_event_seq > head.version:
            snapshot = RunSnapshot(run_id=run_id)
        projection = Projection(snapshot)
        while not projection.is_stale:
            page = await store.read_events(run_id, projection.snapshot.last_event_seq, PAGE_EVENTS, PAGE_BYTES)
            if not page:
                break
            await asyncio.sleep(0)  # a history may be long, and other requests must not wait for it
            now = await store.now()
            projection, alerts = catch_up(projection, page, now)
            self._alerts.add([alert for alert in alerts if alert.code != "PROJECTOR_LAG_HIGH"], now)
        if not projection.is_stale:
            self._kept[run_id] = projection.snapshot
            if len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
        return projection


class Drawable(Protocol):
    """A definition that may have a graph."""

    def graph(self) -> Graph | None:
        """Return its graph; None if it has none."""
        ...


class GraphFolds:
    """The folded graphs of definitions, for as long as the definitions exist."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Drawable, GraphFold] = WeakKeyDictionary()

    async def of_run(
        self, definition: Drawable, snapshot: RunSnapshot, expand: Collection[str], collapse: Collection[str]
    ) -> RunGraph | None:
        """Return the graph of a run; None if its definition has none. Large graphs are folded in a thread."""
        fold = self._kept.get(definition)
        if fold is None:
            graph = definition.graph()
            if graph is None:
                return None
            fold = self._kept[definition] = await _aside(len(graph.nodes), GraphFold, graph)
        return await _aside(fold.size + len(snapshot.steps), fold.of_run, snapshot, expand, collapse)


async def _aside(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await asyncio.to_thread(work, *args, **kwargs) if size > LARGE_NODES else work(*args, **kwargs)
