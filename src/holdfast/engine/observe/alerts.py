"""Alerts of one process, on their way to the event bus (PRJ-3, LAT-1).

Code that notices a problem cannot wait for the store. It adds the alert here, and a task writes it to the bus. An alert
that the store does not accept is logged, and remains visible in the metrics and on the page.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from holdfast.core.bus import BusAlert, alert_of
from holdfast.errors import HoldfastError

MOST_WAITING = 1_000
"""The maximum number of waiting alerts. Beyond it, the oldest are dropped."""

logger = logging.getLogger("holdfast.bus")


class AlertForwarder:
    """Puts alerts on the bus, batch by batch."""

    def __init__(self, raise_alerts: Callable[[Sequence[BusAlert]], Awaitable[int]]) -> None:
        self._raise_alerts = raise_alerts
        self._waiting: deque[BusAlert] = deque(maxlen=MOST_WAITING)
        self._task: asyncio.Task[None] | None = None
        self._noted = 0

    def note(self, code: str, priority: int, detail: str, run_id: str = "") -> None:
        """Put an alert on the bus soon."""
        loop = asyncio.get_running_loop()
        self._noted += 1
        self._waiting.append(
            alert_of(code, priority, detail, run_id=run_id, of=f"{id(self)} {loop.time()} {self._noted}")
        )
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._forward(), name="alerts")

    async def _forward(self) -> None:
        while self._waiting:
            batch = list(self._waiting)
            self._waiting.clear()
            try:
                await self._raise_alerts(batch)
            except HoldfastError:
                logger.warning("%d alerts could not be put on the bus", len(batch), exc_info=True)
