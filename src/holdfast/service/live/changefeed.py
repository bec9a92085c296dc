"""Who watches runs and lists, and the one look at the store for all of them.

While anybody watches, one task in the process asks the store which histories have grown (`Store.changes`): when
something is committed here, when the store rings, and now and then. What has grown is read once, whoever watches it.
Looking takes a small part of the time, however much happens: what comes in between is looked at together.

Nobody has a buffer of their own that could grow. Who follows a run asks for what is behind the number that they have,
and gets it from what was read last, or from the store; who watches lists is told to read them again when too much has
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
from holdfast.engine.start.runtime import Runtime
from holdfast.errors import EngineError, RateLimited, StoreError
from holdfast.limits import PROJECTOR_LAG_MS
from holdfast.service.live.projections import Alerts
from holdfast.service.live.sse import Frame, event_frame
from holdfast.service.live.subscriptions import Kind, ListChange, ListSubscription
from holdfast.service.options import ServiceOptions
from holdfast.store.port import Change, LoadedRun, RunHead, Store, TaskQuery
from holdfast.store.types import DeadLetterQuery, load_each
from holdfast.store.wakeups import Listener

PAGE_EVENTS = 100
"""How many events are read at a time, and how many of a run are kept for those who follow it."""

PAGE_BYTES = 1024 * 1024
"""How large the events are together, about, that are read at a time."""

TASKS_BYTES = 4 * 1024 * 1024
"""How large the tasks of a run may be together for those who watch them to be told of each."""

KEPT_BYTES = 256 * 1024
"""How much of a run is kept at most, for those who follow it."""

MOST_RUNS = 500
"""How many runs may have changed at once before those who watch lists are told to read them again."""

LONGEST_WAIT_US = 5_000_000
"""How much later than others a letter may be stored and still be found."""

REST = 20
"""How many times as long as a look took to wait before the next."""

LAST = (RunCompleted, RunFailed, RunCancelled)
"""What ends a history."""

IsOpen = Callable[[], bool]

logger = logging.getLogger("holdfast.service")


class FollowedRun:
    """A run that somebody follows, and the last part of its history as it goes over the wire."""

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
        """Note how far the history goes, and wake those who follow it."""
        if version > self.version or self.is_stale:
            self.version = max(version, self.version)
            for wake in self.followers:
                wake.set()

    async def after(self, seq: int) -> Sequence[Frame]:
        """Return what comes behind a number: nothing at the end, and at a gap, which makes the run stale (EVT-6)."""
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
            if seq == self._read_to:  # else somebody catches up, who is not late
                await self._note_lag(usable)
            if frames[-1].seq > self._read_to:
                self._read_to = frames[-1].seq
                self._keep(seq, frames)
            return frames

    def _keep(self, seq: int, frames: list[Frame]) -> None:
        """Keep what was read for others who follow the run, as far as it is not too much."""
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
    """Looks at one store for everybody who watches, as long as somebody does."""

    def __init__(
        self, runtime: Runtime, alerts: Alerts, options: ServiceOptions, stopping: asyncio.Event, is_open: IsOpen
    ) -> None:
        self.is_over = False
        self.looks = 0
        self._store = runtime.store
        self._tasks = runtime.tasks()
        self._alerts = alerts
        self._options = options
        self._is_open = is_open
        self._stopping = stopping
        self._followed: dict[str, FollowedRun] = {}
        self._listings: set[ListSubscription] = set()
        self._bell = asyncio.Event()
        self._place = ""
        self._letters_from: Instant = 0
        self._letters: set[str] = set()
        self._begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._watch(), name="watcher")

    @property
    def watching(self) -> int:
        """How many watch something."""
        return len(self._listings) + sum(len(followed.followers) for followed in self._followed.values())

    async def begun(self) -> None:
        """Wait until nothing is missed any more."""
        await asyncio.shield(self._begun)

    def follow(self, head: RunHead, wake: asyncio.Event) -> FollowedRun:
        """Wake somebody from now on whenever a run's history has grown."""
        followed = self._followed.get(head.run_id)
        if followed is None:
            followed = self._followed[head.run_id] = FollowedRun(self._store, self._alerts, head)
        followed.version = max(followed.version, head.version)
        followed.followers.add(wake)
        return followed

    def unfollow(self, followed: FollowedRun, wake: asyncio.Event) -> None:
        """Forget somebody who follows a run."""
        followed.followers.discard(wake)
        if not followed.followers:
            self._followed.pop(followed.run_id, None)
        self._end_if_alone()

    def subscribe(self, listing: ListSubscription) -> None:
        """Tell somebody from now on what changes in lists."""
        self._listings.add(listing)

    def unsubscribe(self, listing: ListSubscription) -> None:
        """Forget somebody who watches lists."""
        self._listings.discard(listing)
        self._end_if_alone()

    async def publish_dead_letter(self, letter: DeadLetter) -> None:
        """Tell who watches the letters how one of them is now."""
        heads = await self._heads([letter.run_id])
        self._hand_out(ListChange("letters", head, letter) for head in heads.values())

    def close(self) -> None:
        """End it for everybody."""
        self.is_over = True
        self._task.cancel()
        if not self._begun.done():
            self._begun.set_exception(EngineError("the service stops"))
            self._begun.exception()  # somebody may wait for it, or nobody
        self._wake_all()

    def _wake_all(self) -> None:
        for followed in self._followed.values():
            for wake in followed.followers:
                wake.set()
        for listing in self._listings:
            listing.wake.set()

    def _end_if_alone(self) -> None:
        if not self._followed and not self._listings:
            self.close()

    # --- looking

    async def _watch(self) -> None:
        listener = self._store.wakeups.listen()
        end_telling = observer_of(self._store).tell(lambda turns: self._bell.set())
        helpers = [asyncio.create_task(self._hear(listener)), asyncio.create_task(self._end_with_service())]
        loop = asyncio.get_running_loop()
        try:
            while self._is_open():
                began = loop.time()
                try:
                    await self._look()
                except StoreError:
                    logger.warning("changes could not be looked for; trying again", exc_info=True)
                    self._bell.clear()
                rest_s = max(self._options.watch_rest_s, REST * (loop.time() - began))
                await asyncio.sleep(min(rest_s, max(self._options.watch_poll_s, self._options.watch_rest_s)))
                await self._bell.wait()
                self._bell.clear()
        finally:
            for helper in helpers:
                helper.cancel()
            end_telling()
            listener.close()
            self.close()

    async def _hear(self, listener: Listener) -> None:
        while True:
            await listener.wait(self._options.watch_poll_s)
            self._bell.set()

    async def _end_with_service(self) -> None:
        await self._stopping.wait()
        self.close()

    async def _look(self) -> None:
        """Find out what has grown since the last look, and tell who watches it."""
        self.looks += 1
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
                await self._look_at_all()
                return
            for change in found.runs:
                followed = self._followed.get(change.run_id)
                if followed is not None:
                    followed.grow(change.version)
                grown[change.run_id] = change
        for followed in self._followed.values():
            if followed.is_stale:
                followed.grow(followed.version)
        if self._listings:
            await self._tell_listings(grown)

    async def _look_at_all(self) -> None:
        """Look at every run that somebody follows: what has grown cannot be said."""
        for listing in self._listings:
            listing.reset()
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

    async def _tell_listings(self, grown: dict[str, Change]) -> None:
        letters = await self._new_letters() if any(listing.wants("letters") for listing in self._listings) else []
        run_ids = list(dict.fromkeys([*grown, *(letter.run_id for letter in letters)]))
        if len(run_ids) > MOST_RUNS:
            for listing in self._listings:
                listing.reset()
            return
        if not run_ids:
            return
        heads = await self._heads(run_ids)
        told = [ListChange("runs", heads[run_id], heads[run_id]) for run_id in grown if run_id in heads]
        if any(listing.wants("tasks") for listing in self._listings):
            for change in grown.values():
                if change.has_tasks and change.run_id in heads:
                    tasks = await self._tasks.find(
                        TaskQuery(run_id=change.run_id, limit=MOST_RUNS, most_bytes=TASKS_BYTES)
                    )
                    if sum(len(task.payload) + len(task.form) for task in tasks) >= TASKS_BYTES:
                        self._reset_watching("tasks")  # there may be more than was read
                    told += [ListChange("tasks", heads[change.run_id], task) for task in tasks]
        told += [ListChange("letters", heads[letter.run_id], letter) for letter in letters if letter.run_id in heads]
        self._hand_out(told)

    def _reset_watching(self, kind: Kind) -> None:
        for listing in self._listings:
            if listing.wants(kind):
                listing.reset()

    def _hand_out(self, told: Iterable[ListChange]) -> None:
        for each in told:
            for listing in self._listings:
                listing.offer(each)

    async def _new_letters(self) -> list[DeadLetter]:
        """Return the dead letters that nobody was told of. Those of the last seconds are looked at again."""
        query = DeadLetterQuery(after=(self._letters_from, ""), limit=MOST_RUNS)
        found = await self._store.find(query)
        new = [letter for letter in found if letter.letter_id not in self._letters]
        now = await self._store.now()
        self._letters_from = max(self._letters_from, now - LONGEST_WAIT_US)
        self._letters = {letter.letter_id for letter in found if letter.died_at >= self._letters_from}
        return new


class ChangeFeeds:
    """The watcher of what an app has open, while somebody watches."""

    def __init__(self, app: App, alerts: Alerts, options: ServiceOptions, stopping: asyncio.Event) -> None:
        self._app = app
        self._alerts = alerts
        self._options = options
        self._stopping = stopping
        self._watcher: ChangeFeed | None = None

    @property
    def watching(self) -> int:
        """How many watch something."""
        return 0 if self._watcher is None else self._watcher.watching

    async def publish_dead_letter(self, letter: DeadLetter) -> None:
        """Tell who watches the letters, if anybody does, how one of them is now."""
        if self._watcher is not None and not self._watcher.is_over:
            await self._watcher.publish_dead_letter(letter)

    def of(self, runtime: Runtime) -> ChangeFeed:
        """Return the watcher of what is open, a new one if there is none. So many may watch, and no more."""
        if self.watching >= self._options.streams:
            raise RateLimited(
                f"{self._options.streams} event streams are open, and no more are served", retry_after_ms=5_000
            )
        if self._watcher is None or self._watcher.is_over:
            self._watcher = ChangeFeed(
                runtime, self._alerts, self._options, self._stopping, lambda: self._app.is_open_with(runtime)
            )
        return self._watcher
