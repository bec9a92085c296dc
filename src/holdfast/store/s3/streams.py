"""Streams: a bucket keeps none yet, so a writer and a reader are refused."""

from collections.abc import Awaitable, Callable, Sequence

from holdfast.core.instants import Instant
from holdfast.core.streams import Appended, StreamAppend, StreamPage, StreamRead
from holdfast.limits import Limits
from holdfast.store import port, validation
from holdfast.store.types import STREAMS


class WithoutStreams:
    """The verbs of streams on a store that has none."""

    capabilities: port.Capabilities
    _limits: Limits
    _now: Callable[[], Awaitable[Instant]]

    async def append_streams(self, items: Sequence[StreamAppend]) -> list[Appended | port.Refused]:
        validation.check_batch(items, self._limits)
        await self._now()
        raise validation.lacks(self, STREAMS, "a stream")

    async def read_streams(self, items: Sequence[StreamRead]) -> list[StreamPage | None]:
        validation.check_stream_reads(items, self._limits)
        await self._now()
        raise validation.lacks(self, STREAMS, "a stream")
