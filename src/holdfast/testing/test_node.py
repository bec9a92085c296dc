"""`TestNode`: an app's workflows on the real engine, in virtual time, for tests.

The store is in memory. Its clock moves only when the test moves it (`advance`), or when the test waits for the result
of a run and nothing can happen before the next timer: then time jumps to that timer. So days take milliseconds, and a
run that waits for something that never arrives raises `NothingDue` instead of blocking the test.

Activities are called in real time, as in production. Time stands still while one is running: use fakes for those that
take long or need external systems.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from msgspec import Raw

from holdfast.activity import Activity
from holdfast.app import App
from holdfast.core.events import Event
from holdfast.core.instants import Instant
from holdfast.core.state import TERMINAL
from holdfast.engine.node import Node
from holdfast.engine.options import NodeOptions
from holdfast.errors import InvalidInput
from holdfast.limits import LEASE_MS
from holdfast.store.memory import MemoryStore
from holdfast.store.port import RunQuery, ScheduleQuery
from holdfast.testing.awaited import awaited_by
from holdfast.testing.clock import START, VirtualClock
from holdfast.testing.fakes import MISSING, ActivityCalls, Call, Fake

T = TypeVar("T")

REST_ROUNDS = 12
"""For how many rounds of the loop nothing may happen before the node counts as idle: its parts notify each other."""

PATIENCE_S = 30.0
"""How long an activity may run, or an update be unanswered, in real time, until an error names what blocks the test."""


FOREVER_US = 10 * 366 * 86_400 * 1_000_000
"""The maximum time that passes while a test waits for a run, because schedules never end."""


class NothingDue(AssertionError):
    """A test waits for the end of a run, and nothing more can happen: the run waits for the test."""


class TestNode:
    """Runs an app's workflows while its context is open: `async with TestNode(app) as node`.

    `app.start`, `app.run`, `run.signal`, `run.result` and everything else work as on any node.
    """

    __test__ = False  # pytest collects classes of this name

    def __init__(self, app: App, *, at: datetime | None = None) -> None:
        """`at` is the start time of the test, with its time zone; the default is always the same instant."""
        if at is not None and at.tzinfo is None:
            raise InvalidInput("at is a datetime with a time zone", field="at")
        if not isinstance(app, App):
            raise InvalidInput(f"TestNode takes the App whose workflows are tested, not {app!r}", field="app")
        self.app = app
        self._clock = VirtualClock(START if at is None else int(at.timestamp() * 1_000_000))
        # Forks are cut between commits, which differ by their instants.
        self.store = MemoryStore(clock=self._clock, limits=app.registry.limits, distinct_commits=True)
        """The store, for assertions about what is stored."""
        self._calls = ActivityCalls(app.registry)
        self._stack = AsyncExitStack()
        self._moving = asyncio.Lock()
        self._node: Node | None = None
        self._queues: tuple[str, ...] = ()

    async def __aenter__(self) -> "TestNode":
        registry = self.app.registry
        self._queues = tuple(sorted({each.options.queue for each in registry.activities.values()} - {""}))
        options = NodeOptions(lease_ms=LEASE_MS, visible_ms=LEASE_MS, drain_s=0.0, queues=self._queues, sample_s=None)
        self.app.runtimes.check_store(self.store)
        self._calls.install()
        self._stack.callback(self._calls.remove)
        self._node = await self._stack.enter_async_context(self.app.node(self.store, name="test", options=options))
        self.app.runtimes.tested = self.store
        self._stack.callback(setattr, self.app.runtimes, "tested", None)
        runtime = self.app.runtime()
        wait_finished = runtime.wait_finished

        async def wait_and_move_time(run_id: str, *, is_known: bool = False) -> Event:
            return await self._move_until_done(wait_finished(run_id, is_known=is_known), run_id)

        update = runtime.update

        async def answer_in_time(run_id: str, name: str, *arguments: Any) -> Raw:
            try:
                async with asyncio.timeout(PATIENCE_S) as patience:
                    return await update(run_id, name, *arguments)
            except TimeoutError:
                if not patience.expired():
                    raise
                text = f"run {run_id} has not answered the update {name!r}, and time stands still meanwhile"
                raise NothingDue(f"{text}: move it with `advance`, beside the update") from None

        runtime.wait_finished = wait_and_move_time  # type: ignore[method-assign]
        runtime.update = answer_in_time  # type: ignore[method-assign,assignment]
        return self

    async def __aexit__(self, *problem: Any) -> None:
        await self._stack.aclose()

    async def describe(self) -> str:
        """Return every run with its history as text, one event per line: what you need when a test fails."""
        lines = []
        for head in await self.store.find(RunQuery(limit=50)):
            lines.append(f"run {head.run_id} ({head.plan_id}) is {head.status}")
            events = await self.store.read_events(head.run_id)
            lines += [f"  {event.run_seq:4}  {event.event_type}  {event.step_id or ''}".rstrip() for event in events]
        return "\n".join(lines)

    # --- activities

    def fake(
        self,
        activity: Activity[..., Any] | str,
        *,
        returns: Any = MISSING,
        raises: BaseException | type[BaseException] | None = None,
        side_effect: Any = None,
    ) -> None:
        """Replace an activity by a fake from now on: `fake(charge, returns="receipt")`. By default it returns None.

        `side_effect` is a function with the activity's parameters, async or not; or a list with an entry for each call,
        which is returned, or raised if it is an exception. The last entry stands for all later calls.
        """
        self._calls.fake(activity, Fake(returns, raises, side_effect))

    def calls(self, activity: Activity[..., Any] | str | None = None) -> list[Call]:
        """Return the calls of an activity's function, or of all activities, in order, including retries."""
        return list(self._calls.made) if activity is None else self._calls.of(activity)

    # --- time

    @property
    def now(self) -> datetime:
        """The virtual time."""
        return datetime.fromtimestamp(self._clock.now() / 1_000_000, UTC)

    async def advance(
        self, by: timedelta | None = None, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0
    ) -> None:
        """Advance the time. Each timer on the way fires at its time, and what follows happens before the next one."""
        if by is not None and not isinstance(by, timedelta):
            raise InvalidInput(f"time advances by a timedelta, or by days=, hours=, seconds=, not {by!r}", field="by")
        span = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds) + (by or timedelta())
        if span < timedelta():
            raise InvalidInput("time passes forwards", field="by")
        async with self._moving:
            until = self._clock.now() + span // timedelta(microseconds=1)
            while True:
                await self._rest()
                due = await self._next_due()
                await self._jump(until if due is None else min(due, until))
                if self._clock.now() >= until:
                    break
            await self._rest()

    async def settle(self) -> None:
        """Wait until nothing more can happen without time passing: turns, activities, and what they start."""
        async with self._moving:
            await self._rest()

    async def _move_until_done(self, work: Coroutine[Any, Any, T], run_id: str) -> T:
        """Wait for the end of a run, and advance time whenever nothing else can happen."""
        waiting = asyncio.ensure_future(work)
        begun = self._clock.now()
        try:
            while not waiting.done():
                async with self._moving:
                    await self._rest(waiting)
                    if waiting.done():
                        break
                    due = await self._next_due()
                    is_stuck = await self._next_turn() is None or self._clock.now() > begun + FOREVER_US
                    if is_stuck and not await self.app.dequeue_and_start():
                        raise NothingDue(await self._why_not(run_id))
                    if due is not None:
                        await self._jump(due)
            return await waiting
        finally:
            if not waiting.done():
                waiting.cancel()

    async def _rest(self, waiting: "asyncio.Future[Any] | None" = None) -> None:
        """Wait until the node is idle and nothing is due, or the future is done."""
        loop = asyncio.get_running_loop()
        node, patience, rounds = self._open(), loop.time() + PATIENCE_S, 0
        while rounds < REST_ROUNDS and not (waiting is not None and waiting.done()):
            if node.failure is not None:
                raise node.failure
            await asyncio.sleep(0 if not node.activities_running else 0.001)
            if node.is_at_rest and not await self._is_due():
                rounds += 1
            else:
                rounds = 0
            if loop.time() > patience:
                raise TimeoutError(f"the node has not come to rest for {PATIENCE_S} s: fake {self._under_way()}")

    def _under_way(self) -> str:
        steps = self._open().owned_runs.executor.attempts
        names = sorted({attempt.work.definition.name for each in steps.values() for attempt in each.values()})
        return f"the activities that take long: {', '.join(names)}" if names else "the activities that take long"

    async def _is_due(self) -> bool:
        due = await self._next_due()
        return due is not None and due <= self._clock.now()

    async def _next_due(self) -> Instant | None:
        """Return when something happens next without the test: to a run, or because a schedule has a tick."""
        found = await self.store.find(ScheduleQuery(by_due=True, limit=1))
        ticks = [schedule.next_due for schedule in found]
        return min((due for due in (await self._next_turn(), *ticks) if due is not None), default=None)

    async def _next_turn(self) -> Instant | None:
        node = self._open()
        return await self.store.next_due(node.name, node.definition_filter.registered, self._queues)

    async def _jump(self, at: Instant) -> None:
        """Advance the clock, and the end of the node's lease with it."""
        self._clock.advance(us=max(0, at - self._clock.now()))
        await self.store.renew(self._open().name, LEASE_MS)
        self.store.wakeups.notify()
        self.app.runtime().schedules.look()
        await asyncio.sleep(0)

    async def _why_not(self, run_id: str) -> str:
        """Return why a run has not finished, with what each unfinished run waits for."""
        lines = []
        for head in await self.store.find(RunQuery(limit=50)):
            if head.status not in TERMINAL:
                awaited = await awaited_by(self.store, head.run_id)
                error = None if head.snapshot is None else head.snapshot.last_error
                state = f"waits for {awaited}" if awaited else f"is {head.status}"
                lines.append(f"  run {head.run_id} ({head.plan_id}) {state}" + (f": {error.message}" if error else ""))
        text = f"run {run_id} has not finished, and nothing that is due will end it:"
        return "\n".join([text, *lines])

    def _open(self) -> Node:
        if self._node is None:
            raise InvalidInput("the node is not open: use `async with TestNode(app) as node`")
        return self._node
