"""Wake-ups through a NATS server, for nodes whose database cannot notify: no LISTEN, or a pooler in between.

A notification is a short message on one subject, to which every listener subscribes. Neither the server nor a sender
stores notifications: during an outage a notification reaches only this process, other processes poll, and the
connection is retried with growing pauses. A process that reconnects wakes its listeners immediately, because it may
have missed a notification.
"""

import asyncio
import logging
import re
from contextlib import suppress
from urllib.parse import urlsplit

from nats.aio.client import Client
from nats.aio.msg import Msg

from holdfast.clock import Rng, SystemRng
from holdfast.errors import InvalidInput
from holdfast.settings import without_password
from holdfast.store.wakeups import Ended, Interest, LocalListener, LocalWakeups, Pending, Topic, decoded, encoded

SCHEMES = ("nats", "tls")
CONNECT_S = 2
PING_S = 10
FIRST_PAUSE_S = 0.1
MOST_PAUSE_S = 5.0

logger = logging.getLogger("holdfast.wakeups")


class NatsWakeups:
    """The notifications of all processes with the same server and subject: `nats://host:4222/orders`.

    Several servers are separated by commas. The last part is the subject, below `holdfast.`.
    """

    def __init__(self, address: str, *, rng: Rng | None = None) -> None:
        self._servers, self._subject = read_address(address)
        self._rng = rng or SystemRng()
        self._local = LocalWakeups()
        self._notified = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        self._closing = asyncio.Event()
        self._pending = Pending()

    def notify(self, topic: Topic = "runs", ended: Ended = None) -> None:
        self._local.notify(topic, ended)
        self._pending.add(topic, ended)
        self._notified.set()
        self._connect()

    def listen(self, interest: Interest = "changes") -> LocalListener:
        self._connect()
        return self._local.listen(interest)

    def close(self) -> None:
        self._local.close()
        self._closing.set()
        self._notified.set()  # the connection closes itself after a last notification

    def _connect(self) -> None:
        """Start to keep a connection, when it is first needed."""
        if self._task is None and not self._closing.is_set():
            self._task = asyncio.create_task(self._keep_connected(), name="nats wake-ups")

    async def _keep_connected(self) -> None:
        while not self._closing.is_set():
            try:
                await self._serve()
            except Exception as problem:
                self._failures += 1
                if self._failures == 1:  # once for each outage
                    logger.warning("no wake-ups from other nodes at the moment: NATS does not respond (%r)", problem)
            pause_s = min(FIRST_PAUSE_S * 2 ** min(self._failures, 10), MOST_PAUSE_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s * (1.0 - self._rng.fraction() / 2)):
                    await self._closing.wait()

    async def _serve(self) -> None:
        """Listen and publish until the connection is lost."""
        connection = Client()
        try:
            async with asyncio.timeout(2 * CONNECT_S):
                await self._open(connection)
            self._failures = 0
            self._local.notify()
            while connection.is_connected and not self._closing.is_set():
                await self._notified.wait()
                await self._publish(connection)
        finally:
            async with asyncio.timeout(CONNECT_S):
                await self._publish(connection)
                await connection.close()

    async def _publish(self, connection: Client) -> None:
        if self._notified.is_set() and connection.is_connected:
            self._notified.clear()
            for message in encoded(*self._pending.take()):
                await connection.publish(self._subject, message)

    async def _open(self, connection: Client) -> None:
        async def lost() -> None:
            self._notified.set()

        async def pass_over(problem: Exception) -> None:
            logger.debug("NATS: %r", problem)

        await connection.connect(
            list(self._servers),
            name="holdfast",
            no_echo=True,  # local listeners are notified directly
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=CONNECT_S,
            ping_interval=PING_S,
            closed_cb=lost,
            error_cb=pass_over,
        )
        await connection.subscribe(self._subject, cb=self._heard)
        for _ in range(2):  # the client may send the first ping before the subscription, which is still buffered
            await connection.flush(CONNECT_S)

    async def _heard(self, message: Msg) -> None:
        self._local.notify(*decoded(message.data))


def read_address(address: str) -> tuple[tuple[str, ...], str]:
    """Return the servers and the subject in an address, or raise `InvalidInput`."""
    try:
        parts = urlsplit(address)
    except ValueError:  # which may quote the password
        raise InvalidInput("the address of the wakeups cannot be read", field="wakeups") from None
    name = parts.path.strip("/") or "wake"
    if parts.scheme not in SCHEMES or not parts.netloc or parts.query or not re.fullmatch(r"[\w-]+", name):
        raise InvalidInput(
            f"wakeups is an address such as nats://localhost:4222/orders, not {without_password(address)!r}",
            field="wakeups",
        )
    return tuple(f"{parts.scheme}://{server}" for server in parts.netloc.split(",")), f"holdfast.{name}"
