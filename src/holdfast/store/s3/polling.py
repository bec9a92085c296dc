"""Wake-ups for a bucket, which notifies no process: while there are listeners, look for changes periodically.

Within a process, and through NATS if it is configured, notifications arrive immediately. Changes by other processes are
found by the next look, which is one listing. All heads are compared much less often.
"""

import asyncio
import logging
from asyncio import sleep
from collections.abc import Awaitable, Callable

from holdfast.errors import HoldfastError
from holdfast.store.wakeups import Ended, Interest, Listener, LocalWakeups, Topic, Wakeups

FIRST_LOOK_S = 1.0
LOOK_S = 5.0
"""How often to look for changes: at first, and after some looks without news. This bounds how late they are found."""

NOTIFIED_LOOK_S = 30.0
"""The same where other processes notify this one."""

SWEEP_S = 300.0
SWEEP_MS = round(1_000 * SWEEP_S)
"""How often all heads are compared, by the process that holds the lock for that time."""

REQUESTS_PER_LOOK = 2
"""A listing of changes, and one of signals that were put into the bucket."""

REQUESTS_PER_SWEEP = 5
"""The lock is read and written; heads, nodes and changes are listed. Listing heads takes one more for each thousand."""

REQUESTS_FOR_TIME = 240
"""Per hour: a probe of the server's time is two requests, twice a minute."""

logger = logging.getLogger("holdfast.wakeups")


class PollingWakeups:
    """Notifies its listeners of other processes' changes, some time later."""

    def __init__(self, look: Callable[[bool], Awaitable[bool]], others: Wakeups | None = None) -> None:
        self._look = look
        self._wakeups: Wakeups = others or LocalWakeups()
        self.most_s = LOOK_S if others is None else NOTIFIED_LOOK_S
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def notify(self, topic: Topic = "runs", ended: Ended = None) -> None:
        self._wakeups.notify(topic, ended)

    def listen(self, interest: Interest = "changes") -> Listener:
        if self._task is None and not self._is_closed:
            self._task = asyncio.create_task(self._poll(), name="look for changes in the bucket")
        return self._wakeups.listen(interest)

    def close(self) -> None:
        self._is_closed = True
        self._wakeups.close()
        if self._task is not None:
            self._task.cancel()

    def requests_per_hour(self, runs: int) -> int:
        """Return how many requests per hour a sweeping process sends if nothing happens."""
        looks, sweeps = 3_600 / self.most_s * REQUESTS_PER_LOOK, 3_600 / SWEEP_S * (REQUESTS_PER_SWEEP + runs // 1_000)
        return round(looks + sweeps) + REQUESTS_FOR_TIME

    async def _poll(self) -> None:
        pause_s, waited_s = FIRST_LOOK_S, 0.0
        while True:
            await sleep(pause_s)
            waited_s += pause_s
            is_sweep = waited_s >= SWEEP_S
            try:
                has_news = await self._look(is_sweep)
            except HoldfastError as problem:
                logger.warning("the changes of the bucket could not be read: %s", problem)
                continue
            waited_s = 0.0 if is_sweep else waited_s
            pause_s = FIRST_LOOK_S if has_news else min(1.5 * pause_s, self.most_s)
            if has_news:
                self._wakeups.notify()
