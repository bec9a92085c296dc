"""Heartbeats: they report to the store that activities are still running, and their progress.

All heartbeats of a node are sent together, in at most one call per second. A job from a queue gets one every third of
its visibility time-out, until the store answers that this node has lost it: its step is closed, or another node has
acquired it. Finished jobs get heartbeats as well, so that no node executes them again before their run has recorded the
outcome.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from holdfast.engine.activities.context import Details
from holdfast.errors import StoreError
from holdfast.store.port import Heartbeat, JobQueue

Key = tuple[str, str]
"""A run and a step of it."""

REST_S = 1.0
BATCH = 1_000

logger = logging.getLogger("holdfast.heartbeats")


class Heartbeats:
    """The heartbeats of the activities that one node executes."""

    def __init__(self, node: str, store: JobQueue, visible_ms: int, on_lost: Callable[[str, str], None]) -> None:
        self._node = node
        self._store = store
        self._visible_ms = visible_ms
        self._on_lost = on_lost
        self.kept: dict[Key, Heartbeat] = {}
        """The jobs that are kept invisible to other nodes."""
        self.unsent: dict[Key, Heartbeat] = {}
        """The progress that the store does not have yet."""
        self._round_at = 0.0
        self._something = asyncio.Event()

    @property
    def _period_s(self) -> float:
        return self._visible_ms / 3_000

    def keep(self, beat: Heartbeat) -> None:
        """Keep a job that was acquired, from now on."""
        if not self.kept:
            self._round_at = asyncio.get_running_loop().time() + self._period_s
            self._something.set()
        self.kept[beat.run_id, beat.step_id] = beat

    def let_go(self, run_id: str, step_id: str) -> None:
        """Send no more heartbeats for a step."""
        self.kept.pop((run_id, step_id), None)
        self.unsent.pop((run_id, step_id), None)

    def send(self, beat: Heartbeat) -> None:
        """Send a heartbeat soon. Unsent details are kept unless there are new ones."""
        key = (beat.run_id, beat.step_id)
        before = self.unsent.get(key)
        details: Details = before.details if before is not None and beat.details is UNSET else beat.details
        self.unsent[key] = replace(beat, details=details)
        self._something.set()

    async def flush(self, keys: Iterable[Key] | None = None) -> None:
        """Send the current details of these steps, or of all."""
        if self.unsent:
            chosen = [self.unsent.get(key) for key in (keys if keys is not None else self.unsent)]
            await self._send_now([beat for beat in chosen if beat is not None and beat.details is not UNSET])

    async def catch_up(self) -> None:
        """Send overdue heartbeats of kept jobs immediately, before another node acquires the jobs."""
        loop = asyncio.get_running_loop()
        if self.kept and loop.time() > self._round_at + self._period_s:
            await self._send_now(list(self.kept.values()))
            self._round_at = loop.time() + self._period_s

    async def run(self) -> None:
        """Send heartbeats for as long as the node lives."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wait()
            is_round = loop.time() >= self._round_at
            batch = self.kept | self.unsent if is_round else dict(self.unsent)
            try:
                await self._send_now(list(batch.values()))
            except StoreError:
                logger.warning("node %s could not send its heartbeats", self._node, exc_info=True)
            else:
                self._round_at = loop.time() + self._period_s if is_round else self._round_at
            await asyncio.sleep(min(REST_S, self._period_s / 2))

    async def _wait(self) -> None:
        """Wait until there is a heartbeat to send, or until those of kept jobs are due."""
        while not self.unsent:
            self._something.clear()
            left_s = self._round_at - asyncio.get_running_loop().time()
            if self.kept and left_s <= 0:
                return
            try:
                async with asyncio.timeout(left_s if self.kept else None):
                    await self._something.wait()
            except TimeoutError:
                return

    async def _send_now(self, beats: Sequence[Heartbeat]) -> None:
        for first in range(0, len(beats), BATCH):
            batch = beats[first : first + BATCH]
            answers = await self._store.heartbeat(self._node, batch, self._visible_ms)
            for beat, is_ours in zip(batch, answers, strict=True):
                key = (beat.run_id, beat.step_id)
                if self.unsent.get(key) == beat:
                    del self.unsent[key]
                kept = self.kept.get(key)
                if not is_ours and kept is not None and kept.engine_attempt_id == beat.engine_attempt_id:
                    self.let_go(*key)
                    self._on_lost(*key)
