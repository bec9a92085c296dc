"""A webhook: signed requests to an address that a user has chosen and that is not trusted.

Requests are signed according to Standard Webhooks: `webhook-id`, `webhook-timestamp`, and `webhook-signature` with
HMAC-SHA256 over both and the body. The receiver rejects unsigned or old requests, and recognises duplicates by the id.

The address may lead anywhere, and its name may resolve to a different address each time. So the name is resolved here,
every address is checked, and the connection goes to an address that was checked. Addresses that are private, local, or
otherwise not public are refused, unless the sink allows them. Redirects are not followed. Time and size are bounded,
and only the status of the response counts.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import socket
import ssl
from contextlib import suppress
from urllib.parse import urlsplit

import h11
from msgspec import Struct

ANSWER_BYTES = 64 * 1024
"""How much of a response is read. A larger response ends the connection."""

IDLE_CONNECTIONS = 8
REJECTED = frozenset({400, 413, 415, 422})
"""Statuses by which the receiver rejects this event, whenever it is sent."""

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_KEY_PREFIX = "whsec_"


class SendFailed(Exception):
    """Not all events were sent. `is_rejected`: the receiver rejects the next event itself, whenever it is sent."""

    def __init__(self, detail: str, sent: int = 0, *, is_rejected: bool = False) -> None:
        super().__init__(detail)
        self.detail = detail
        self.sent = sent
        self.is_rejected = is_rejected


class Answer(Struct, frozen=True):
    """The result of a request."""

    is_success: bool
    detail: str = ""
    is_rejected: bool = False


class _Connection(Struct):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    protocol: h11.Connection


class _NotPublic(Exception):
    """A name resolves to an address that a webhook may not reach."""


class Webhook:
    """One address, and the connections to it."""

    def __init__(self, address: str, timeout_s: float, *, allow_private: bool = False) -> None:
        parts = urlsplit(address)
        self._host = parts.hostname or ""
        self._is_tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_tls else 80)
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._host_header = parts.netloc
        self._timeout_s = timeout_s
        self._allow_private = allow_private
        self._idle: list[_Connection] = []

    async def post(self, event_id: str, body: bytes, secret: str, timestamp: int) -> Answer:
        """Send one event, and return the result. It never raises because of what the other side does."""
        headers = {
            "host": self._host_header,
            "content-type": "application/cloudevents+json; charset=utf-8",
            "content-length": str(len(body)),
            "user-agent": "holdfast",
            "webhook-id": event_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signature(secret, event_id, timestamp, body),
        }
        try:
            async with asyncio.timeout(self._timeout_s):
                status = await self._exchange(headers, body)
        except TimeoutError:
            return Answer(is_success=False, detail=f"no answer within {self._timeout_s:g} s")
        except _NotPublic as problem:
            return Answer(is_success=False, detail=str(problem))
        except (OSError, EOFError, ValueError, h11.ProtocolError) as problem:  # invalid names raise ValueError
            return Answer(is_success=False, detail=f"{type(problem).__name__}: {problem}"[:300])
        if 200 <= status < 300:
            return Answer(is_success=True)
        if 300 <= status < 400:
            return Answer(is_success=False, detail=f"the answer is {status}, and redirects are not followed")
        return Answer(is_success=False, detail=f"the answer is {status}", is_rejected=status in REJECTED)

    def close(self) -> None:
        """Close the open connections."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.writer.transport.abort()

    async def _exchange(self, headers: dict[str, str], body: bytes) -> int:
        """Send a request and return the status, on an open connection or, if that was closed, on a new one."""
        while self._idle:
            kept = self._idle.pop()
            with suppress(OSError, EOFError, h11.RemoteProtocolError):  # it was closed meanwhile
                return await self._on(kept, headers, body)
        return await self._on(await self._connect(), headers, body)

    async def _on(self, connection: _Connection, headers: dict[str, str], body: bytes) -> int:
        protocol, is_whole = connection.protocol, False
        try:
            request = h11.Request(method="POST", target=self._path, headers=list(headers.items()))
            sent = [protocol.send(request), protocol.send(h11.Data(data=body)), protocol.send(h11.EndOfMessage())]
            connection.writer.write(b"".join(part or b"" for part in sent))
            await connection.writer.drain()
            status, is_whole = await self._read(connection)
            if (
                is_whole
                and protocol.our_state is protocol.their_state is h11.DONE
                and len(self._idle) < IDLE_CONNECTIONS
            ):
                protocol.start_next_cycle()
                self._idle.append(connection)
            else:
                is_whole = False
            return status
        finally:
            if not is_whole:
                connection.writer.transport.abort()

    async def _read(self, connection: _Connection) -> tuple[int, bool]:
        """Return the status of the response, and whether the response was read completely."""
        status, size = 0, 0
        while True:
            event = connection.protocol.next_event()
            if event is h11.NEED_DATA:
                data = await connection.reader.read(16_384)
                size += len(data)
                if not data and not status:
                    raise EOFError("the connection was closed without an answer")
                if size > ANSWER_BYTES:
                    return status or 502, False
                connection.protocol.receive_data(data)
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                return status, isinstance(event, h11.EndOfMessage)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        for address in addresses:
            if not self._allow_private and not is_public(address):
                raise _NotPublic(f"{self._host} leads to {address}, which is not a public address")
        tls = ssl.create_default_context() if self._is_tls else None
        problem: OSError | None = None
        for address in addresses:
            try:
                reader, writer = await asyncio.open_connection(
                    address, self._port, ssl=tls, server_hostname=self._host if tls else None
                )
            except OSError as failure:
                problem = failure
            else:
                return _Connection(reader, writer, h11.Connection(h11.CLIENT, ANSWER_BYTES))
        raise problem or OSError(f"{self._host} has no address")


def is_public(address: str) -> bool:
    """Return whether an address is on the public internet. An address that embeds another is judged by both."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
        if inner is not None and not is_public(str(inner)):
            return False
        if ip.ipv4_mapped is not None:
            return True
        if ip.is_site_local:
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def signature(secret: str, event_id: str, timestamp: int, body: bytes) -> str:
    """Return the signature of a request. A key with the prefix whsec_ is base64; any other is used as bytes."""
    key = secret.encode()
    if secret.startswith(_KEY_PREFIX):
        with suppress(binascii.Error, ValueError):
            key = base64.b64decode(secret.removeprefix(_KEY_PREFIX), validate=True)
    signed = b"%s.%d.%s" % (event_id.encode(), timestamp, body)
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
