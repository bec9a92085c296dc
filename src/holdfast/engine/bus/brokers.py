"""Brokers: NATS JetStream and Redis Streams. Both store what they acknowledge.

NATS: the event is published to the subject `SUBJECT.EVENT_TYPE`, with its id as `Nats-Msg-Id`, so that a stream drops
duplicates within its window. The operator creates the stream: if no stream has the subject, nothing is acknowledged.

Redis: the event is appended to the stream with the fields `id`, `type`, `subject`, `sequence` and `event`.

The password, or the token, is the sink's secret; it is not part of the address.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from holdfast.core.bus import OutgoingEvent, Sink
from holdfast.engine.bus.webhook import SendFailed
from holdfast.errors import InvalidInput

CONTENT_TYPE = "application/cloudevents+json"

GetSecret = Callable[[], Awaitable[str]]


class NatsTarget:
    """A subject of a NATS server that a stream stores."""

    def __init__(self, sink: Sink, get_secret: GetSecret) -> None:
        try:
            from nats.aio.client import Client
            from nats.errors import MaxPayloadError
        except ImportError:
            raise InvalidInput("a sink of NATS needs the extra: pip install 'holdfast[nats]'", field="kind") from None
        parts = urlsplit(sink.address)
        self._make = Client
        self._too_large = MaxPayloadError
        self._server = f"{parts.scheme}://{parts.hostname}:{parts.port or 4222}"
        self._user = parts.username
        self._subject = parts.path.strip("/")
        self._timeout_s = sink.timeout_ms / 1_000
        self._get_secret = get_secret if sink.secret else None
        self._client: Any = None
        self._opening = asyncio.Lock()

    async def send(self, events: Sequence[OutgoingEvent]) -> None:
        """Publish the events one by one, each after the previous one is stored."""
        for sent, event in enumerate(events):
            headers = {"Nats-Msg-Id": event.event_id, "Content-Type": CONTENT_TYPE}
            try:
                async with asyncio.timeout(self._timeout_s):
                    stream = (await self._connected()).jetstream()
                    subject = f"{self._subject}.{event.event_type}"
                    await stream.publish(subject, event.body, timeout=self._timeout_s, headers=headers)
            except TimeoutError:
                raise SendFailed(f"NATS has not stored it within {self._timeout_s:g} s", sent) from None
            except Exception as problem:
                is_rejected = isinstance(problem, self._too_large)
                detail = f"NATS: {type(problem).__name__}: {problem}"[:300]
                raise SendFailed(detail, sent, is_rejected=is_rejected) from problem

    async def _connected(self) -> Any:
        async with self._opening:
            if self._client is None or not self._client.is_connected:
                await self.close()
                await self._open()
            return self._client

    async def _open(self) -> None:
        async def pass_over(problem: Exception) -> None:
            """Ignore the problem: a failure is noticed by the call that sends."""

        options: dict[str, Any] = {}
        if self._get_secret is not None:
            secret = await self._get_secret()
            options = {"user": self._user, "password": secret} if self._user else {"token": secret}
        client = self._make()
        await client.connect(
            [self._server],
            name="holdfast bus",
            allow_reconnect=False,
            connect_timeout=max(1, int(self._timeout_s)),
            error_cb=pass_over,
            **options,
        )
        self._client = client

    async def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None and not client.is_closed:
            await client.close()


class RedisTarget:
    """A stream of a Redis server."""

    def __init__(self, sink: Sink, get_secret: GetSecret) -> None:
        try:
            from redis import asyncio as redis
        except ImportError:
            raise InvalidInput("a sink of Redis needs the extra: pip install 'holdfast[redis]'", field="kind") from None
        parts = urlsplit(sink.address)
        self._redis = redis
        self._place: dict[str, Any] = {
            "host": parts.hostname,
            "port": parts.port or 6379,
            "ssl": parts.scheme == "rediss",
        }
        self._user = parts.username
        self._stream = parts.path.strip("/")
        self._timeout_s = sink.timeout_ms / 1_000
        self._get_secret = get_secret if sink.secret else None
        self._client: Any = None

    async def send(self, events: Sequence[OutgoingEvent]) -> None:
        """Append the events in one round trip. After an error it is unknown which arrived: all are sent again."""
        try:
            async with asyncio.timeout(self._timeout_s):
                pipeline = (await self._connected()).pipeline(transaction=True)
                for event in events:
                    fields = {
                        "id": event.event_id,
                        "type": event.event_type,
                        "subject": event.run_id,
                        "sequence": event.sequence,
                        "event": event.body,
                    }
                    pipeline.xadd(self._stream, fields)
                await pipeline.execute()
        except TimeoutError:
            raise SendFailed(f"Redis has not answered within {self._timeout_s:g} s") from None
        except Exception as problem:
            raise SendFailed(f"Redis: {type(problem).__name__}: {problem}"[:300]) from problem

    async def _connected(self) -> Any:
        if self._client is None:
            secret = None if self._get_secret is None else await self._get_secret()
            self._client = self._redis.Redis(**self._place, username=self._user, password=secret)
        return self._client

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()
