"""The change feed: one poll of the store for all subscribers of runs and lists.

While there are subscribers, one task in the process asks the store which histories have grown (`Store.changes`): after
a commit here, when the store notifies, and periodically. The new events are read once for all subscribers. Polling
takes a small part of the time, whatever the load: changes that arrive in between are read together.

No subscriber has a buffer that could grow. A subscriber that follows a run asks for the events after the last one that
it has, and gets them from the last read, or from the store; a subscriber to lists reads them again when too much has
changed at once.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from holdfast.app import App
from holdfast.core.dead_letters import DeadLetter
from holdfast.core.events import Event, RunCancelled, RunCompleted, RunFailed
from holdfast.core.instants import Instant
from holdfast.core.snapshot import Alert
from holdfast.engine.observe.metrics import observer_of
from holdfast.engine.runtime import Runtime
from holdfast.errors import EngineError, RateLimited, StoreError
from holdfast.limits import PROJECTOR_LAG_MS
from holdfast.service.live.projections import Alerts
from holdfast.service.live.sse import Frame, event_frame
from holdfast.service.live.subscriptions import Kind, ListChange, ListSubscription
from holdfast.service.options import ServiceOptions
from holdfast.store.port import Change, LoadedRun, RunHead, Store, TaskQuery
from holdfast.store.queries import DeadLetterQuery
from holdfast.store.types import load_each
from holdfast.store.wakeups import Listener

PAGE_EVENTS = 100
"""How many events are read at a time, and how many of a run are kept for its followers."""

PAGE_BYTES = 1024 * 1024
"""The approximate total size of the events that are read at a time."""

TASKS_BYTES = 4 * 1024 * 1024
"""The maximum total size of a run's tasks that are sent individually to subscribers."""

KEPT_BYTES = 256 * 1024
"""How much of a run is kept for its followers at most."""

MOST_RUNS = 500
"""How many runs may have changed at once before subscribers to lists read them again."""

LONGEST_WAIT_US = 5_000_000
"""How much later than others a dead letter may be stored and still be found."""

REST = 20
"""The pause before the next poll, as a multiple of the time that the last one took."""

LAST = (RunCompleted, RunFailed, RunCancelled)
"""The events that end a history."""

IsOpen = Callable[[], bool]

logger = logging.getLogger("holdfast.service")


class FollowedRun:
    """A run that is followed, and the last part of its history in wire format."""

    def __init__(self, store: Store, alerts: Alerts, head: RunHead) -> None:
        self.run_id = head.run_id
        self.version = head.version
        self.is_stale = False
        self.followers: set[asyncio.Event] = set()
        self._store = store
        self._alerts = alerts
        self._kept: list[Frame] = []
        self._read_to = head.version
        self._is_late = False
        self._reading = asyncio.Lock()

    def grow(self, version: int) -> None:
        """Note the length of the history, and wake up its followers."""
        if version > self.version or self.is_stale:
            self.version = max(version, self.version)
            for wake in self.followers:
                wake.set()

    async def after(self, seq: int) -> Sequence[Frame]:
        """Return the events after a `run_seq`: none at the end or at a gap, which makes the run stale (EVT-6)."""
        if seq >= self.version:
            return ()
        async with self._reading:
            if self._kept and self._kept[0].seq <= seq + 1 <= self._kept[-1].seq:
                return self._kept[seq + 1 - self._kept[0].seq :]
            page = await self._store.read_events(self.run_id, seq, PAGE_EVENTS, PAGE_BYTES)
            usable = [event for number, event in enumerate(page, seq + 1) if event.run_seq == number]
            if not usable:
                await self._note_gap(seq, page)
                return ()
            self.is_stale = False
            frames = [event_frame(event, isinstance(event.data, LAST)) for event in usable]
            if seq == self._read_to:  # otherwise a follower is catching up, which is not a lag
                await self._note_lag(usable)
            if frames[-1].seq > self._read_to:
                self._read_to = frames[-1].seq
                self._keep(seq, frames)
            return frames

    def _keep(self, seq: int, frames: list[Frame]) -> None:
        """Keep what was read for other followers of the run, up to a limit."""
        before = self._kept if self._kept and self._kept[-1].seq == seq else []
        kept = [*before, *frames][-PAGE_EVENTS:] if len(self.followers) > 1 else []
        size = sum(len(frame.text) for frame in kept)
        while kept and size > KEPT_BYTES:
            size -= len(kept.pop(0).text)
        self._kept = kept

    async def _note_gap(self, seq: int, page: Sequence[Event]) -> None:
        if not self.is_stale:
            self.is_stale = True
            found = f"event {page[0].run_seq}" if page else "nothing"
            detail = f"{found} follows event {seq}, and there are {self.version}"
            self._alerts.add([Alert("PROJECTOR_GAP_DETECTED", 1, self.run_id, detail)], await self._store.now())

    async def _note_lag(self, page: Sequence[Event]) -> None:
        now = await self._store.now()
        lag_ms = (now - page[0].persisted_at) // 1_000
        if lag_ms > PROJECTOR_LAG_MS and not self._is_late:
            self._alerts.add([Alert("PROJECTOR_LAG_HIGH", 2, self.run_id, f"{lag_ms} ms behind")], now)
        self._is_late = lag_ms > PROJECTOR_LAG_MS


class ChangeFeed:
    """Polls one store for all subscribers, as long as there are any."""

    def __init__(
        self, runtime: Runtime, alerts: Alerts, options: ServiceOptions, stopping: asyncio.Event, is_open: IsOpen
    ) -> None:
        self.is_over = False
        self.polls = 0
        self._store = runtime.store
        self._tasks = runtime.tasks()
        self._alerts = alerts
        self._options = options
        self._is_open = is_open
        self._stopping = stopping
        self._followed: dict[str, FollowedRun] = {}
        self._subscriptions: set[ListSubscription] = set()
        self._notified = asyncio.Event()
        self._place = ""
        self._letters_from: Instant = 0
        self._letters: set[str] = set()
        self._begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="change feed")

    @property
    def subscribers(self) -> int:
        """How many subscribers there are."""
        return len(self._subscriptions) + sum(len(followed.followers) for followed in self._followed.values())

    async def begun(self) -> None:
        """Wait until the feed has a cursor, so that no change is missed."""
        await asyncio.shield(self._begun)

    def follow(self, head: RunHead, wake: asyncio.Event) -> FollowedRun:
        """From now on, set an event whenever a run's history has grown."""
        followed = self._followed.get(head.run_id)
        if followed is None:
            followed = self._followed[head.run_id] = FollowedRun(self._store, self._alerts, head)
        followed.version = max(followed.version, head.version)
        followed.followers.add(wake)
        return followed

    def unfollow(self, followed: FollowedRun, wake: asyncio.Event) -> None:
        """Remove a follower of a run."""
        followed.followers.discard(wake)
        if not followed.followers:
            self._followed.pop(followed.run_id, None)
        self._close_if_unused()

    def subscribe(self, subscription: ListSubscription) -> None:
        """Publish changes of lists to a subscription from now on."""
        self._subscriptions.add(subscription)

    def unsubscribe(self, subscription: ListSubscription) -> None:
        """Remove a subscription."""
        self._subscriptions.discard(subscription)
        self._close_if_unused()

    async def publish_dead_letter(self, letter: DeadLetter) -> None:
        """Publish the present state of a dead letter."""
        heads = await self._heads([letter.run_id])
        self._publish(ListChange("letters", head, letter) for head in heads.values())

    def close(self) -> None:
        """End the feed for all subscribers."""
        self.is_over = True
        self._task.cancel()
        if not self._begun.done():
            self._begun.set_exception(EngineError("the service stops"))
            self._begun.exception()  # mark the exception as retrieved: there may be no waiter
        self._wake_all()

    def _wake_all(self) -> None:
        for followed in self._followed.values():
            for wake in followed.followers:
                wake.set()
        for subscription in self._subscriptions:
            subscription.wake.set()

    def _close_if_unused(self) -> None:
        if not self._followed and not self._subscriptions:
            self.close()

    # --- polling

    async def _run(self) -> None:
        listener = self._store.wakeups.listen()
        end_observing = observer_of(self._store).subscribe(lambda turns: self._notified.set())
        helpers = [asyncio.create_task(self._listen(listener)), asyncio.create_task(self._end_with_service())]
        loop = asyncio.get_running_loop()
        try:
            while self._is_open():
                began = loop.time()
                try:
                    await self._poll()
                except StoreError:
                    logger.warning("changes could not be read; retrying", exc_info=True)
                    self._notified.clear()
                rest_s = max(self._options.watch_rest_s, REST * (loop.time() - began))
                await asyncio.sleep(min(rest_s, max(self._options.watch_poll_s, self._options.watch_rest_s)))
                await self._notified.wait()
                self._notified.clear()
        finally:
            for helper in helpers:
                helper.cancel()
            end_observing()
            listener.close()
            self.close()

    async def _listen(self, listener: Listener) -> None:
        while True:
            await listener.wait(self._options.watch_poll_s)
            self._notified.set()

    async def _end_with_service(self) -> None:
        await self._stopping.wait()
        self.close()

    async def _poll(self) -> None:
        """Read the changes since the last poll, and publish them."""
        self.polls += 1
        if not self._place:
            self._place = (await self._store.changes()).cursor
            self._letters_from = await self._store.now()
            self._begun.set_result(None)
            return
        grown: dict[str, Change] = {}
        has_more = True
        while has_more:
            found = await self._store.changes(self._place, MOST_RUNS)
            self._place, has_more = found.cursor, found.has_more
            if found.is_lost:
                await self._resync()
                return
            for change in found.runs:
                followed = self._followed.get(change.run_id)
                if followed is not None:
                    followed.grow(change.version)
                grown[change.run_id] = change
        for followed in self._followed.values():
            if followed.is_stale:
                followed.grow(followed.version)
        if self._subscriptions:
            await self._publish_changes(grown)

    async def _resync(self) -> None:
        """Check every followed run: the store cannot name the changes."""
        for subscription in self._subscriptions:
            subscription.reset()
        for head in (await self._heads(list(self._followed))).values():
            followed = self._followed.get(head.run_id)
            if followed is not None:
                followed.grow(head.version)

    async def _heads(self, run_ids: Sequence[str]) -> dict[str, RunHead]:
        heads: dict[str, RunHead] = {}
        for start in range(0, len(run_ids), MOST_RUNS):
            for run in await load_each(self._store.load, run_ids[start : start + MOST_RUNS]):
                if isinstance(run, LoadedRun):
                    heads[run.head.run_id] = run.head
        return heads

    async def _publish_changes(self, grown: dict[str, Change]) -> None:
        letters = (
            await self._new_letters()
            if any(subscription.wants("letters") for subscription in self._subscriptions)
            else []
        )
        run_ids = list(dict.fromkeys([*grown, *(letter.run_id for letter in letters)]))
        if len(run_ids) > MOST_RUNS:
            for subscription in self._subscriptions:
                subscription.reset()
            return
        if not run_ids:
            return
        heads = await self._heads(run_ids)
        changes = [ListChange("runs", heads[run_id], heads[run_id]) for run_id in grown if run_id in heads]
        if any(subscription.wants("tasks") for subscription in self._subscriptions):
            for change in grown.values():
                if change.has_tasks and change.run_id in heads:
                    tasks = await self._tasks.find(
                        TaskQuery(run_id=change.run_id, limit=MOST_RUNS, most_bytes=TASKS_BYTES)
                    )
                    if sum(len(task.payload) + len(task.form) for task in tasks) >= TASKS_BYTES:
                        self._reset("tasks")  # there may be more than was read
                    changes += [ListChange("tasks", heads[change.run_id], task) for task in tasks]
        changes += [ListChange("letters", heads[letter.run_id], letter) for letter in letters if letter.run_id in heads]
        self._publish(changes)

    def _reset(self, kind: Kind) -> None:
        for subscription in self._subscriptions:
            if subscription.wants(kind):
                subscription.reset()

    def _publish(self, changes: Iterable[ListChange]) -> None:
        for each in changes:
            for subscription in self._subscriptions:
                subscription.offer(each)

    async def _new_letters(self) -> list[DeadLetter]:
        """Return the dead letters that were not published. Those of the last seconds are read again."""
        query = DeadLetterQuery(after=(self._letters_from, ""), limit=MOST_RUNS)
        found = await self._store.find(query)
        new = [letter for letter in found if letter.letter_id not in self._letters]
        now = await self._store.now()
        self._letters_from = max(self._letters_from, now - LONGEST_WAIT_US)
        self._letters = {letter.letter_id for letter in found if letter.died_at >= self._letters_from}
        return new


class ChangeFeeds:
    """The change feed of the app's runtime, while there are subscribers."""

    def __init__(self, app: App, alerts: Alerts, options: ServiceOptions, stopping: asyncio.Event) -> None:
        self._app = app
        self._alerts = alerts
        self._options = options
        self._stopping = stopping
        self._feed: ChangeFeed | None = None

    @property
    def subscribers(self) -> int:
        """How many subscribers there are."""
        return 0 if self._feed is None else self._feed.subscribers

    async def publish_dead_letter(self, letter: DeadLetter) -> None:
        """Publish the present state of a dead letter, if there are subscribers."""
        if self._feed is not None and not self._feed.is_over:
            await self._feed.publish_dead_letter(letter)

    def of(self, runtime: Runtime) -> ChangeFeed:
        """Return the feed of a runtime, creating it if needed; raise `RateLimited` at the limit of subscribers."""
        if self.subscribers >= self._options.streams:
            raise RateLimited(
                f"{self._options.streams} event streams are open, and no more are served", retry_after_ms=5_000
            )
        if self._feed is None or self._feed.is_over:
            self._feed = ChangeFeed(
                runtime, self._alerts, self._options, self._stopping, lambda: self._app.runtimes.has(runtime)
            )
        return self._feed
