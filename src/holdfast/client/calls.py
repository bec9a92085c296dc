"""A call of the client: ids for requests that change something, and retries of calls that were not answered."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from holdfast.client.transports import Transport, Unreachable
from holdfast.clock import Ids, Rng
from holdfast.core.timing import Retry, full_delay_ms
from holdfast.errors import EngineError, HoldfastError, InternalError, RateLimited, StoreCorrupt
from holdfast.service.live.sse import Parser, Piece
from holdfast.service.registry import Operation

IDS = ("request_id", "signal_id", "update_id", "operation_id")
"""The fields by which a service recognises a repeated request."""

ONCE = frozenset({"tokens.create"})
"""Operations without an id, so that repeating the request would repeat its effect."""

REFUSED = (InternalError, StoreCorrupt)
"""Errors of a service that a retry cannot resolve."""

LONGEST_WAIT_S = 60.0


class Calls:
    """Calls operations over a transport."""

    def __init__(self, transport: Transport, retry: Retry, ids: Ids, rng: Rng) -> None:
        self._transport = transport
        self._retry = retry
        self._ids = ids
        self._rng = rng

    async def call(self, operation: Operation, fields: dict[str, Any], kind: Any = None) -> Any:
        """Return the answer, as its own type or another; raise the refusal, or the error that prevented the request."""
        asked = self._with_ids(operation, fields)
        attempt = 1
        while True:
            try:
                return _decoded(await self._transport.call(operation, asked), kind or operation.response_type)
            except HoldfastError as error:
                if operation.name in ONCE and not isinstance(error, RateLimited):
                    raise
                seconds = self._pause_s(error, attempt)
                if seconds is None:
                    raise
            await asyncio.sleep(seconds)
            attempt += 1

    async def stream(self, operation: Operation, fields: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """Yield the typed events of an event stream. If the connection breaks, continue where it broke.

        For a run these are its events, up to its end. For lists they are pairs: the subject and its current state.
        """
        is_of_run = "after" in operation.request_type.__struct_fields__
        asked, attempt = dict(fields), 1
        while True:
            try:
                parser = Parser()
                async with aclosing(self._transport.stream(operation, asked)) as chunks:
                    async for chunk in chunks:
                        attempt = 1
                        for piece in parser.feed(chunk):
                            if piece.event == "end":
                                return
                            if is_of_run and piece.data and not piece.event:
                                asked["after"] = int(piece.id)
                                yield _decoded(piece.data, operation.response_type)
                            elif not is_of_run and piece.data and piece.event != "stopped":
                                yield piece.event, _typed(operation, piece)
                problem: HoldfastError = Unreachable("the event stream was ended")
            except HoldfastError as error:
                problem = error
            seconds = self._pause_s(problem, attempt)
            if seconds is None:
                raise problem
            await asyncio.sleep(seconds)
            attempt += 1

    async def download(self, operation: Operation, fields: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """Return bytes as they arrive. The caller has to restart a download that breaks: nothing of it is kept."""
        async with aclosing(self._transport.stream(operation, fields)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def close(self) -> None:
        """Close connections."""
        await self._transport.close()

    def _with_ids(self, operation: Operation, fields: dict[str, Any]) -> dict[str, Any]:
        known = operation.request_type.__struct_fields__
        fresh = {name: self._ids.new_id() for name in IDS if name in known and operation.verb == "POST"}
        if fields.get("run_id") and not fields.get(
            "reuse"
        ):  # the run id recognises a repeated start as well, also from another process
            fresh.pop("request_id", None)
        asked = {**fresh, **fields}
        if operation.name == "signals.send_many":
            asked["signals"] = [_with_id(signal, self._ids) for signal in asked.get("signals", ())]
        return asked

    def _pause_s(self, error: HoldfastError, attempt: int) -> float | None:
        """Return the delay before the next attempt, or None if there is none."""
        if not isinstance(error, EngineError | RateLimited) or isinstance(error, REFUSED):
            return None
        if self._retry.max_attempts and attempt >= self._retry.max_attempts:
            return None
        seconds = full_delay_ms(self._retry, attempt) / 1_000 * (1 - self._retry.jitter * self._rng.fraction())
        if isinstance(error, RateLimited):
            seconds = max(seconds, error.details.get("retry_after_ms", 0) / 1_000)
            return seconds if seconds <= LONGEST_WAIT_S else None
        return seconds


def _with_id(signal: Any, ids: Ids) -> Any:
    return {"signal_id": ids.new_id(), **signal} if isinstance(signal, dict) else signal


def _decoded(text: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeError) as problem:
        raise Unreachable(f"what answers is no Holdfast server, or one of another version: {problem}") from problem


def _typed(operation: Operation, piece: Piece) -> Any:
    return _decoded(piece.data, operation.response_type if piece.event == "run" else Any)
