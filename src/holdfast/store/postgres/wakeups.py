"""Wake-ups by LISTEN and NOTIFY, on a separate connection.

NOTIFY takes a server-wide lock when its transaction commits, so it is never part of other work: `notify` sets a flag,
and a task sends one NOTIFY for all calls since the last one. If LISTEN does not work (the server restarts, a pooler is
in between), that costs only latency: meanwhile listeners are woken once a second to poll, and once more when it works
again.
"""

import asyncio
from contextlib import suppress
from typing import Any

from holdfast.store.postgres.address import Address
from holdfast.store.postgres.faults import fault_of
from holdfast.store.postgres.pool import connect
from holdfast.store.wakeups import Ended, Interest, LocalListener, LocalWakeups, Pending, Topic, decoded, encoded

DEAF_S = 1.0
"""How often listeners poll while LISTEN does not work, and how often LISTEN is retried."""

PAUSE_S = 0.002
"""The minimum time between two NOTIFYs: all calls in between are merged into one."""


def channel_of(schema: str) -> str:
    """Return the channel on which the nodes of a schema are notified."""
    return f"holdfast_{schema}"


class NotifyWakeups:
    """The notifications of one schema."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._channel = channel_of(address.schema)
        self._local = LocalWakeups()
        self._connection: Any = None
        self._task: asyncio.Task[None] | None = None
        self._notified = asyncio.Event()
        self._sent = asyncio.Event()
        self._sent.set()
        self._is_closed = False
        self._pending = Pending()

    def notify(self, topic: Topic = "runs", ended: Ended = None) -> None:
        self._local.notify(topic, ended)
        if not self._is_closed:
            self._pending.add(topic, ended)
            self._sent.clear()
            self._notified.set()
            self._begin()

    def listen(self, interest: Interest = "changes") -> LocalListener:
        self._begin()
        return self._local.listen(interest)

    def close(self) -> None:
        self._is_closed = True
        self._local.close()
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    async def flush(self, timeout_s: float) -> None:
        """Wait until pending notifications have been sent, but not for long: they are only hints."""
        if self._task is not None and not self._address.has_pooler:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._sent.wait()

    def _begin(self) -> None:
        if self._task is None and not self._is_closed:
            with suppress(RuntimeError):  # no loop is running any more: there are no listeners
                self._task = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        while not self._is_closed:
            try:
                if not self._address.has_pooler:
                    await self._connect()
                    self._local.notify()  # a notification may have been missed before
                    await self._send_and_hear()
            except Exception as problem:
                if fault_of(problem, self._address.shown) is None:
                    raise
            self._drop()
            await asyncio.sleep(DEAF_S)
            self._local.notify()

    async def _connect(self) -> None:
        self._connection = await connect(self._address, synchronous_commit="off")
        self._connection.add_termination_listener(lambda _: self._notified.set())
        await self._connection.add_listener(self._channel, self._heard)

    async def _send_and_hear(self) -> None:
        """Send the notifications of this process until the connection breaks; meanwhile receive those of others."""
        while True:
            await self._notified.wait()
            if self._connection.is_closed():
                return
            self._notified.clear()
            messages = [message.decode() for message in encoded(*self._pending.take())]
            await self._connection.execute("; ".join(f"NOTIFY {self._channel}, '{message}'" for message in messages))
            if not self._notified.is_set():
                self._sent.set()
            await asyncio.sleep(PAUSE_S)

    def _heard(self, connection: Any, pid: int, channel: str, payload: str) -> None:
        if pid != connection.get_server_pid():
            self._local.notify(*decoded(payload.encode()))

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and not connection.is_closed():
            connection.terminate()
