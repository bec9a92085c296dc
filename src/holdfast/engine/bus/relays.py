"""The relays of one node: one for each stored sink, under the sink's host lock.

The sinks are read from the store when the node starts, when it is notified, and every `safety_poll_s`. Without sinks a
node does nothing else here. A relay is woken up by commits of its own node and by the store's notifications. If other
nodes relay a node's commits, it notifies them, at most a few times per second.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from holdfast.clock import Rng
from holdfast.core.bus import Sink, SinkStatus
from holdfast.core.keys import prefixed
from holdfast.engine.activities.secrets import resolve_secrets
from holdfast.engine.bus.relay import BusCounts, Relay
from holdfast.engine.bus.targets import Target, open_target
from holdfast.engine.host_locks import HostDuty
from holdfast.engine.observe.metrics import observer_of
from holdfast.engine.options import NodeOptions
from holdfast.errors import Conflict, HoldfastError, StoreError
from holdfast.program.secrets import Secret, SecretScope
from holdfast.registry import Registry
from holdfast.store.payloads import SealingStore
from holdfast.store.port import Store, Turn
from holdfast.store.queries import SinkQuery, pages

LOOK_S = 0.5
"""The shortest time between two looks for new sinks after notifications."""

NUDGE_S = 0.2
"""The shortest time between two notifications of others about commits."""

LOCK_PREFIX = "bus/"

logger = logging.getLogger("holdfast.bus")


class Relays:
    """Keeps the relays of a node running."""

    def __init__(
        self,
        node: str,
        store: Store,
        registry: Registry,
        rng: Rng,
        options: NodeOptions,
        is_at_rest: Callable[[], bool],
    ) -> None:
        self.counts = BusCounts()
        self._node = node
        self._store = store
        self._concealing = _under_the_seal(store)
        self._registry = registry
        self._rng = rng
        self._options = options
        self._is_at_rest = is_at_rest
        self._running: dict[str, tuple[Relay, HostDuty, asyncio.Task[None]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._nudge: asyncio.TimerHandle | None = None
        self._end_observing: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin, with the stored sinks."""
        self._task = asyncio.create_task(self._run(), name="relays")

    def cancel(self) -> None:
        """Let every relay end."""
        for task in self._tasks():
            task.cancel()
        if self._nudge is not None:
            self._nudge.cancel()

    async def stop(self) -> None:
        """End every relay, and wait until it has released its lock."""
        self.cancel()
        await asyncio.gather(*self._tasks(), return_exceptions=True)

    def _tasks(self) -> list[asyncio.Task[None]]:
        tasks = [task for _, _, task in self._running.values()]
        return tasks if self._task is None else [self._task, *tasks]

    async def declare(self, sinks: Sequence[Sink]) -> None:
        """Store sinks of the app's code that are not stored as declared. Paused sinks stay paused."""
        stored = {status.sink.name: status.sink for status in await find_sinks(self._store)} if sinks else {}
        for sink in sinks:
            known = stored.get(sink.name)
            if known is not None:
                sink = replace(
                    sink, is_paused=known.is_paused, created_at=known.created_at, created_by=known.created_by
                )
            if sink != known:
                try:
                    await self._store.put_sink(sink)
                except Conflict:
                    logger.exception("the sink %s of this app cannot be stored", sink.name)

    async def _run(self) -> None:
        listener = self._store.wakeups.listen()
        loop = asyncio.get_running_loop()
        try:
            while True:
                began = loop.time()
                try:
                    self._keep(await find_sinks(self._store))
                except StoreError:
                    logger.warning("node %s: sinks cannot be read; retrying", self._node, exc_info=True)
                await listener.wait(self._options.safety_poll_s)
                self._wake()
                await asyncio.sleep(max(0.0, LOOK_S - (loop.time() - began)))
                self._wake()
        finally:
            self._observe(is_wanted=False)
            listener.close()

    def _observe(self, *, is_wanted: bool) -> None:
        """Start or stop observing commits here: without a relay, a commit costs nothing."""
        if is_wanted and self._end_observing is None:
            self._end_observing = observer_of(self._store).subscribe(self._committed)
        elif not is_wanted and self._end_observing is not None:
            self._end_observing()
            self._end_observing = None

    def _keep(self, sinks: Sequence[SinkStatus]) -> None:
        """Run a relay for each sink that can be served here, and none for others."""
        for name in [name for name, (_, _, task) in self._running.items() if task.done()]:
            del self._running[name]
        wanted = {status.sink.name: status.sink for status in sinks if not status.sink.is_paused}
        for name, (_, _, task) in self._running.items():
            if name not in wanted:
                task.cancel()
        for name, sink in wanted.items():
            if name in self._running or (sink.kind == "projection" and name not in self._registry.projections):
                continue
            relay = Relay(
                name,
                self._store,
                self._concealing,
                self._target_of,
                self._rng,
                self.counts,
                self._options.safety_poll_s,
                self._pace,
            )
            lease_ms, safety_poll_s = self._options.lease_ms, self._options.safety_poll_s
            duty = HostDuty(prefixed(LOCK_PREFIX, name), self._node, self._store, relay.work, lease_ms, safety_poll_s)
            task = asyncio.create_task(self._serve(name, duty), name=f"relay {name}")
            self._running[name] = relay, duty, task
        self._observe(is_wanted=bool(self._running))

    async def _serve(self, name: str, duty: HostDuty) -> None:
        try:
            await duty.run()
        except HoldfastError:  # the next look at the sinks starts it again
            logger.exception("the relay of sink %s failed and is restarted", name)

    def _target_of(self, sink: Sink) -> Target:
        async def secret() -> str:
            scope = SecretScope(sink.tenant or "default", "default")
            resolved = await resolve_secrets(self._registry.secrets, [Secret(sink.secret)], scope)
            return resolved.value_of(Secret(sink.secret))

        return open_target(sink, secret, self._store.now, self._registry.projections)

    def _pace(self, events: int) -> float:
        """Return how long a relay pauses after this many events; 0 while the node has nothing else to do."""
        return 0.0 if self._is_at_rest() else events / self._options.relay_events_s

    def _committed(self, turns: Sequence[Turn]) -> None:
        self._wake()
        if self._nudge is None and not all(duty.is_held for _, duty, _ in self._running.values()):
            self._nudge = asyncio.get_running_loop().call_later(NUDGE_S, self._notify_others)

    def _notify_others(self) -> None:
        self._nudge = None
        self._store.wakeups.notify()

    def _wake(self) -> None:
        for relay, _, _ in self._running.values():
            relay.wake.set()


async def find_sinks(store: Store, query: SinkQuery | None = None) -> list[SinkStatus]:
    """Return all sinks."""
    found: list[SinkStatus] = []
    async for page in pages(store.find, query or SinkQuery(), lambda status: status.sink.name):
        found += page
        page.log("sinks")
    return found


def _under_the_seal(store: Store) -> Store:
    """Return the store that returns values as they are stored, with encrypted values unopened."""
    inner: Store | None = store
    while inner is not None:
        if isinstance(inner, SealingStore):
            return inner.inner
        inner = getattr(inner, "inner", None)
    return store
