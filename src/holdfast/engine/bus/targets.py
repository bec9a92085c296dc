"""Targets of a relay: a webhook, a broker, or a function of the app.

A target sends the events of one run, in order, and returns when the other side has stored or handled them. If it fails
it raises `SendFailed` with the number of events that have certainly arrived. It never follows instructions of the other
side.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from holdfast.core.bus import OutgoingEvent, Sink
from holdfast.core.instants import Instant
from holdfast.engine.bus.brokers import NatsTarget, RedisTarget
from holdfast.engine.bus.webhook import SendFailed, Webhook

GetSecret = Callable[[], Awaitable[str]]
Now = Callable[[], Awaitable[Instant]]
Projection = Callable[[list[dict[str, Any]]], Any]
"""A function that receives the events of one run, as CloudEvents, in order."""


class Target(Protocol):
    """The receiving side of a sink."""

    async def send(self, events: Sequence[OutgoingEvent]) -> None:
        """Send events of one run, in order; raise `SendFailed` unless all have arrived."""
        ...

    async def close(self) -> None:
        """Close its connections."""
        ...


class ProjectionTarget:
    """A function of the app."""

    def __init__(self, function: Projection, timeout_s: float) -> None:
        self._function = function
        self._timeout_s = timeout_s

    async def send(self, events: Sequence[OutgoingEvent]) -> None:
        """Call the function with the events. A call that takes too long is cancelled."""
        bound = asyncio.timeout(self._timeout_s)
        try:
            async with bound:
                done = self._function([msgspec.json.decode(event.body) for event in events])
                if inspect.isawaitable(done):
                    await done
        except TimeoutError as problem:
            detail = f"has not returned within {self._timeout_s:g} s" if bound.expired() else "failed: TimeoutError"
            raise SendFailed(f"the projection {detail}") from problem
        except Exception as problem:
            raise SendFailed(f"the projection failed: {type(problem).__name__}: {problem}") from problem

    async def close(self) -> None:
        """Do nothing: there are no connections."""


class WebhookTarget:
    """A webhook: one request for each event."""

    def __init__(self, sink: Sink, get_secret: GetSecret, now: Now) -> None:
        self._webhook = Webhook(sink.address, sink.timeout_ms / 1_000, allow_private=sink.allow_private)
        self._get_secret = get_secret
        self._now = now

    async def send(self, events: Sequence[OutgoingEvent]) -> None:
        """Post one event after the other."""
        secret = await self._get_secret()
        for sent, event in enumerate(events):
            answer = await self._webhook.post(event.event_id, event.body, secret, await self._now() // 1_000_000)
            if not answer.is_success:
                raise SendFailed(answer.detail, sent, is_rejected=answer.is_rejected)

    async def close(self) -> None:
        """Close its connections."""
        self._webhook.close()


def open_target(sink: Sink, get_secret: GetSecret, now: Now, projections: dict[str, Projection]) -> Target:
    """Return the target of a sink. It connects when it sends."""
    if sink.kind == "webhook":
        return WebhookTarget(sink, get_secret, now)
    if sink.kind == "projection":
        return ProjectionTarget(projections[sink.name], sink.timeout_ms / 1_000)
    return NatsTarget(sink, get_secret) if sink.kind == "nats" else RedisTarget(sink, get_secret)
