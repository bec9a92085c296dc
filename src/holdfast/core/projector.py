"""A reader of a run's history that keeps up with it, and says so when it cannot.

`catch_up` applies the events that are new (EVT-6, PRJ-3). At a gap it stops there, marks the projection STALE and
raises an alert; it goes on by itself when it is given the missing events. A projector that crashed starts again from
the snapshot that it stored last: `last_event_seq` is its watermark, and events below it change nothing.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from holdfast.core.events import Event
from holdfast.core.instants import Instant
from holdfast.core.snapshot import RunSnapshot, detect_gaps, incremental_project
from holdfast.limits import PROJECTOR_LAG_MS

AlertCode = Literal["PROJECTOR_LAG_HIGH", "PROJECTOR_GAP_DETECTED"]


class Alert(Struct, frozen=True):
    """Something that an operator should know. `priority` 1 is the most urgent."""

    code: AlertCode
    priority: int
    run_id: str
    detail: str


class Projection(Struct, frozen=True):
    """A snapshot, and whether it is known to be behind."""

    snapshot: RunSnapshot
    is_stale: bool = False


def catch_up(projection: Projection, events: Sequence[Event], now: Instant) -> tuple[Projection, tuple[Alert, ...]]:
    """Apply the events that are new, as far as there is no gap, and return what operators should know."""
    run_id, watermark = projection.snapshot.run_id, projection.snapshot.last_event_seq
    alerts: list[Alert] = []
    usable: list[Event] = []
    gap: Event | None = None
    for event in events:
        if detect_gaps(watermark, event.run_seq):
            gap = event
            break
        if event.run_seq > watermark:
            usable.append(event)
            watermark = event.run_seq
    lag_ms = max(((now - event.persisted_at) // 1_000 for event in usable), default=0)
    if lag_ms > PROJECTOR_LAG_MS:
        alerts.append(Alert("PROJECTOR_LAG_HIGH", 2, run_id, f"{lag_ms} ms behind"))
    if gap is not None:
        detail = f"event {gap.run_seq} follows event {watermark}"
        alerts.append(Alert("PROJECTOR_GAP_DETECTED", 1, run_id, detail))
    return Projection(incremental_project(projection.snapshot, usable), gap is not None), tuple(alerts)
