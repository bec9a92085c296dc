"""Runs as operators see them, kept up to date where somebody looks (EVT-6, PRJ-3).

A projection is a cache: it goes on from its watermark, and when it is lost it is made from the events again. It is
brought up to date when it is asked for, so it cannot lag; whoever follows a run over time reports lag to the alerts.
"""

import asyncio

from holdfast.core.snapshot import Projection, RunSnapshot, catch_up
from holdfast.engine.history import head_of
from holdfast.service.live.alerts import Alerts
from holdfast.store.port import Store

KEPT = 1_000
"""How many runs' projections are kept; what was looked at longest ago goes first."""


PAGE_EVENTS = 500
PAGE_BYTES = 1024 * 1024
"""How much of a history is read at a time, beside what else the store does."""


class Projections:
    """The projections of one process."""

    def __init__(self, alerts: Alerts) -> None:
        self._alerts = alerts
        self._kept: dict[str, RunSnapshot] = {}

    async def of(self, store: Store, run_id: str) -> Projection:
        """Return the run as it is now. At a gap it stops there, says that it is stale, and raises an alert."""
        head = await head_of(store, run_id)
        snapshot = self._kept.pop(run_id, None)
        if snapshot is None or snapshot.last_event_seq > head.version:
            snapshot = RunSnapshot(run_id=run_id)
        projection = Projection(snapshot)
        while not projection.is_stale:
            page = await store.read_events(run_id, projection.snapshot.last_event_seq, PAGE_EVENTS, PAGE_BYTES)
            if not page:
                break
            await asyncio.sleep(0)  # a history may be long, and others wait meanwhile
            now = await store.now()
            projection, alerts = catch_up(projection, page, now)
            self._alerts.add([alert for alert in alerts if alert.code != "PROJECTOR_LAG_HIGH"], now)
        if not projection.is_stale:
            self._kept[run_id] = projection.snapshot
            if len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
        return projection
