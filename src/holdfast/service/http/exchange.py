"""One HTTP request and its response, with the limits that apply to all of them."""

import asyncio
import gzip
import re
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.types import Message, Receive, Scope, Send

from holdfast.clock import Ids
from holdfast.core import codec
from holdfast.errors import (
    HoldfastError,
    MalformedRequest,
    NotAcceptable,
    NotAuthenticated,
    NotPermitted,
    PayloadTooLarge,
    SlowRequest,
    UnsupportedMediaType,
)
from holdfast.limits import JSON_DEPTH
from holdfast.service.auth.csrf import check_origin, check_site
from holdfast.service.auth.throttle import client_of
from holdfast.service.auth.tokens import shown_caller
from holdfast.service.context import Headers, Principal, ResponseBudget, Service
from holdfast.service.http.problems import CONTENT_TYPE, Problem, problem_of, retry_after, unexpected

JSON = b"application/json"
BODY_DEPTH = JSON_DEPTH + 10
"""The maximum nesting of a body: the levels around a value take some, and the value has its own limit."""

SMALL_BYTES = 64 * 1024
"""The size up to which bodies are not counted while they are received: a connection may buffer as much anyway."""

LARGE = 256 * 1024
"""The size from which compression runs in a thread, because it would delay other requests."""

PIECE_BYTES = 256 * 1024
"""How much of a response is sent at a time: bytes that are written and not received are in memory twice."""

HEAD_BYTES = 64 * 1024
"""The maximum size of a request's head. Addresses, tokens and cookies are much smaller."""

HeaderList = Iterable[tuple[bytes, bytes]]

_CORRELATION = re.compile(rb"[\x21-\x7e]{1,128}")
_IN_QUERY = re.compile(rb"(?:hf|holdfast)_[0-9a-f]{16}_|(?:^|&)(?:access_)?token=", re.IGNORECASE)
_ONCE = frozenset({b"authorization", b"cookie", b"origin", b"host"})
_encoder = msgspec.json.Encoder()

CORRELATION_HEADER = b"x-correlation-id"
SECURITY_HEADERS = (
    (b"cache-control", b"no-store"),
    (
        b"content-security-policy",
        b"default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    ),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), display-capture=(), geolocation=(), microphone=(), payment=(), usb=()"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)
"""The headers of every response for browsers. A page may run scripts from files, and no others."""


class ClientGone(Exception):
    """The caller has disconnected."""


def correlation_of(headers: Headers, ids: Ids) -> str:
    """Return the id that identifies a request in logs: the caller's if it is valid, otherwise a new one."""
    given = headers.get(CORRELATION_HEADER, b"")
    return given.decode() if _CORRELATION.fullmatch(given) else ids.new_id()


def check_framing(headers: Sequence[tuple[bytes, bytes]], address_bytes: int) -> None:
    """Refuse a head that is too large, and a body whose length is ambiguous (request smuggling).

    A parser counts only bytes that it has to wait for, so a head that arrives in one piece may have any size.
    """
    names = [name for name, _ in headers]
    if b"transfer-encoding" in names and b"content-length" in names:
        raise MalformedRequest("a request has a Content-Length or a Transfer-Encoding, not both")
    size = address_bytes + sum(len(name) + len(value) + 4 for name, value in headers)
    if size > HEAD_BYTES:
        raise MalformedRequest(f"the head of a request has at most {HEAD_BYTES} bytes")


def check_head(headers: Sequence[tuple[bytes, bytes]], query: bytes) -> None:
    """Refuse heads that readers could interpret differently, and tokens in places where logs would keep them."""
    said = [name for name, _ in headers if name in _ONCE]
    if len(said) != len(set(said)):
        raise MalformedRequest("a header that identifies the caller, its origin or the host is there more than once")
    if query and _IN_QUERY.search(query):
        raise MalformedRequest(
            "a token goes into the Authorization header; logs keep addresses, so revoke the one in this address"
        )


class Exchange:
    """One request and its response."""

    __slots__ = (
        "_caller",
        "_receive",
        "_scope",
        "_send",
        "correlation_id",
        "headers",
        "method",
        "mount",
        "operation",
        "path",
        "query",
        "service",
    )

    def __init__(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        self.service = service
        self.headers: Headers = scope["holdfast.headers"]
        self.method: str = scope["method"]
        self.mount: str = scope["holdfast.mount"]
        """The prefix below which the service is mounted, encoded as in an address; empty at the root."""
        self.path: bytes = scope["holdfast.path"]
        """The path below that prefix, as it was received."""
        self.query: bytes = scope["query_string"]
        self.correlation_id: str = scope["holdfast.correlation_id"]
        self._scope = scope
        self.operation = ""
        self._caller = ""
        self._receive = receive
        self._send = send

    async def principal(self) -> Principal:
        """Authenticate the caller. Every endpoint calls this, or checks by itself what a session may do."""
        try:
            check_head(self._scope["headers"], self.query)
            principal = await self.service.authenticate(self.headers)
            if not principal.token_id and not principal.is_open:  # otherwise one caller could be several people
                principal = replace(principal, token_id=principal.name)
            if principal.is_session:
                check_site(self.headers)
                if self.method not in ("GET", "HEAD"):
                    check_origin(self.headers)
            self._caller = principal.token_id or principal.name
            return principal
        except (NotAuthenticated, NotPermitted) as refusal:
            client = client_of(self._scope)
            what = f"{self.method} {self.path[:200].decode('latin-1')}"
            who = f"{shown_caller(self.headers)} at {client}"
            self.service.refusals.log(who, what, refusal.message, self.correlation_id, client)
            raise

    async def body(self, most: int | None = None) -> bytes:
        """Return the body. It must be JSON according to the caller, and neither too large nor too slow nor too deep.

        `most` is the maximum number of bytes, if that is less than usual.
        """
        options = self.service.options
        most = options.body_bytes if most is None else min(most, options.body_bytes)
        said = self.headers.get(b"content-length", b"0")
        if said.isdigit() and (len(said) > 18 or int(said) > most):
            raise _too_large(most)
        message = await self._receive()
        body = _part(message)
        if message.get("more_body", False):
            expected = int(said) if b"content-length" in self.headers and said.isdigit() else most
            held = self.service.receiving.hold(self._caller, expected) if expected > SMALL_BYTES else nullcontext()
            try:
                with held:
                    async with asyncio.timeout(options.body_s):
                        body = await self._rest_of(body, most)
            except TimeoutError as problem:
                raise SlowRequest(f"the body did not arrive within {options.body_s:g} seconds") from problem
        if len(body) > most:
            raise _too_large(most)
        if body:
            self._check_json(body)
        return body

    async def disconnected(self) -> None:
        """Wait until the caller disconnects. Call it after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _rest_of(self, body: bytes, most: int) -> bytes:
        parts, size, has_more = [body], len(body), True
        while has_more:
            message = await self._receive()
            parts.append(_part(message))
            size += len(parts[-1])
            has_more = message.get("more_body", False)
            if size > most:
                raise _too_large(most)
        return b"".join(parts)

    def _check_json(self, body: bytes) -> None:
        kind = self.headers.get(b"content-type", b"")
        if kind.partition(b";")[0].strip().lower() != JSON:
            raise UnsupportedMediaType("the body of a request is application/json")
        if codec.is_deeper(body, BODY_DEPTH):
            raise MalformedRequest(f"the body is nested more than {BODY_DEPTH} deep")

    def check_accept(self) -> None:
        """Refuse a caller who does not accept JSON."""
        accept = self.headers.get(b"accept", b"*/*").lower()
        if accept == b"*/*" or JSON in accept or not accept.strip():
            return
        for part in accept.split(b","):
            kind, _, parameters = part.partition(b";")
            if kind.strip() in (b"*/*", b"application/*") and b"q=0" not in parameters.replace(b" ", b"").split(b";"):
                return
        raise NotAcceptable("answers are application/json")

    async def answer(self, status: int, value: Any, headers: HeaderList = ()) -> None:
        """Respond with a value as JSON."""
        text = _encoder.encode(value)
        ResponseBudget(self.service.options.answer_bytes).take(len(text))
        await self.send(status, text, JSON, headers)

    def unexpected(self, problem: Exception) -> HoldfastError:
        """Log an unexpected error, and return the error for the caller."""
        return unexpected(problem, self.correlation_id, self.service.stopping.is_set())

    async def refuse(self, error: HoldfastError) -> None:
        """Respond with a problem."""
        problem = problem_of(error, self.correlation_id)
        headers = [(b"allow", error.details["allow"].encode())] if problem.status == 405 else []
        if problem.status == 401:
            headers.append((b"www-authenticate", b'Bearer realm="holdfast"'))
        seconds = retry_after(problem)
        if seconds is not None:
            headers.append((b"retry-after", b"%d" % seconds))
        await self.send(problem.status, encode_problem(problem), CONTENT_TYPE, headers)

    async def send(self, status: int, body: bytes, kind: bytes, headers: HeaderList = ()) -> None:
        """Respond with bytes, compressed if there are many and the caller accepts that."""
        listed = [(b"content-type", kind), *headers]
        if len(body) >= self.service.options.compress_bytes and b"gzip" in self.headers.get(b"accept-encoding", b""):
            body = await asyncio.to_thread(gzip.compress, body, 1) if len(body) > LARGE else gzip.compress(body, 1)
            listed += [(b"content-encoding", b"gzip"), (b"vary", b"accept-encoding")]
        listed.append((b"content-length", b"%d" % len(body)))
        body, size = (b"", 0) if self.method == "HEAD" else (body, len(body))
        if size <= PIECE_BYTES:
            self.service.requests[self.operation, status] += 1
            await self._send({"type": "http.response.start", "status": status, "headers": listed})
            await self._send({"type": "http.response.body", "body": body})
            return
        with self.service.sending.hold(size):
            self.service.requests[self.operation, status] += 1
            await self._send({"type": "http.response.start", "status": status, "headers": listed})
            await self._send_pieces(body)

    async def _send_pieces(self, body: bytes) -> None:
        """Send a large body as fast as the client reads it. A client that does not read for a while is disconnected."""
        for start in range(0, len(body), PIECE_BYTES):
            try:
                async with asyncio.timeout(self.service.options.stall_s):
                    await self.send_piece(body[start : start + PIECE_BYTES])
            except TimeoutError as problem:
                raise ClientGone from problem
        await self.end_stream()

    async def start_stream(self, kind: bytes, headers: HeaderList = ()) -> None:
        """Begin a response of unknown length."""
        self.service.requests[self.operation, 200] += 1
        listed = [(b"content-type", kind), *headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": listed})

    async def send_piece(self, piece: bytes) -> None:
        """Send a part of the response."""
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end_stream(self) -> None:
        """End the response."""
        await self._send({"type": "http.response.body", "body": b""})

    async def send_nothing(self, status: int, headers: HeaderList = ()) -> None:
        """Respond without a body."""
        self.service.requests[self.operation, status] += 1
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers]})
        await self._send({"type": "http.response.body", "body": b""})


def encode_problem(problem: Problem) -> bytes:
    """Return a problem as JSON."""
    return _encoder.encode(problem)


def _part(message: Message) -> bytes:
    if message["type"] == "http.disconnect":
        raise ClientGone
    body: bytes = message.get("body", b"")
    return body


def _too_large(most: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body of a request has at most {most} bytes", limit_bytes=most)
