"""Responses with the bytes of artifacts, streamed: only a small part of an artifact is in memory.

The last piece is sent once all bytes have been verified. So a response is complete only if it is what was stored;
otherwise the connection is closed early, which the client detects by the announced length.
"""

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError
from holdfast.service.live.sse import stream_bounds
from holdfast.service.operations.artifacts import MEDIA_TYPE, Download

if TYPE_CHECKING:
    from holdfast.service.context import Service
    from holdfast.service.http.exchange import Exchange
    from holdfast.service.http.rest import Endpoint

logger = logging.getLogger("holdfast.service")


class Downloads:
    """Answers requests with artifacts. The limit of event streams applies to both together for each caller."""

    def __init__(self, service: "Service") -> None:
        self._service = service

    async def answer(self, exchange: "Exchange", endpoint: "Endpoint", values: dict[str, str]) -> None:
        """Handle one request, for as long as the client reads."""
        context = self._service.context(await exchange.principal(), exchange.correlation_id)
        endpoint.operation.check_caller(context)
        request = endpoint.binder.from_query(values, exchange.query)
        with self._service.streams.hold(stream_bounds(context)):
            download: Download = await endpoint.operation.execute(context, request)
            async with aclosing(download.chunks) as chunks:  # type: ignore[type-var]
                piece = await anext(chunks, b"")  # read first, so that a missing artifact is answered with a problem
                kind, artifact_id = download.artifact.uri.split("/")[-2:]
                name = f"{kind}-{artifact_id.partition('.')[0]}"
                headers = [
                    (b"content-length", b"%d" % (download.artifact.size_bytes or 0)),
                    (b"content-disposition", f'attachment; filename="{name}"'.encode()),
                ]
                await exchange.start_stream(MEDIA_TYPE.encode(), headers)
                try:
                    async for following in chunks:
                        await self._send(exchange, piece)
                        piece = following
                    await self._send(exchange, piece)
                    await exchange.end_stream()
                except TimeoutError:
                    return  # the client does not read
                except HoldfastError as problem:
                    logger.error("the download of %s was cut short: %s", download.artifact.uri, problem)  # noqa: TRY400

    async def _send(self, exchange: "Exchange", piece: bytes) -> None:
        async with asyncio.timeout(self._service.options.stall_s):
            await exchange.send_piece(piece)
