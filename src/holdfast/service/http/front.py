"""The ASGI application: every request passes through it, and every response gets the same headers.

`/v1/` is REST and `/rpc` is JSON-RPC; everything else, such as the description, sessions, metrics, the page and the
routes that an embedder adds, goes through Starlette's router. Errors that a transport raises become problems here. All
of it may be mounted below a prefix (`root_path`) of another application.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route, Router
from starlette.types import Message, Receive, Scope, Send

from holdfast.core.run_context import TRACE_KEY, is_traceparent
from holdfast.engine.run_context import bind_context
from holdfast.errors import EngineError, HoldfastError, MalformedRequest, MethodNotAllowed, NotFound
from holdfast.service.auth.oidc import oidc_routes
from holdfast.service.auth.sessions import Sessions
from holdfast.service.context import Headers, Service
from holdfast.service.http.exchange import (
    CORRELATION_HEADER,
    JSON,
    SECURITY_HEADERS,
    ClientGone,
    Exchange,
    check_framing,
    correlation_of,
)
from holdfast.service.http.jsonrpc import JsonRpc
from holdfast.service.http.openapi import describe
from holdfast.service.http.problems import stopping
from holdfast.service.http.prometheus import Metrics
from holdfast.service.http.protocol import IS_SPARE
from holdfast.service.http.proxies import Proxies
from holdfast.service.http.rest import Rest
from holdfast.service.http.static import nothing_here, page_routes
from holdfast.service.operations import DOWNLOADS, OPERATIONS, STREAMS

SHOWN_PATH = 200
"""How much of an address is logged."""


class Front:
    """The whole service as one ASGI application. `routes` are served in addition to the operations."""

    def __init__(self, service: Service, routes: Sequence[BaseRoute] = ()) -> None:
        self._service = service
        self._proxies = Proxies(service.options)
        self._rest = Rest(service, {**OPERATIONS, **STREAMS, **DOWNLOADS})
        self._rpc = JsonRpc(service, OPERATIONS)
        own = [
            Route("/openapi.json", _Description(service), methods=["GET"]),
            Route("/session", Sessions(service), methods=["GET", "POST", "DELETE"]),
            Route("/metrics", Metrics(service), methods=["GET"]),
            *oidc_routes(service),
        ]
        self._others = Router([*own, *routes, *page_routes()], redirect_slashes=False, default=nothing_here)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._others(scope, receive, send)
            return
        scope["holdfast.mount"], scope["holdfast.route"] = "", scope["path"]
        scope["holdfast.path"] = scope.get("raw_path") or quote(scope["path"]).encode()
        if root := scope.get("root_path", "").rstrip("/"):
            _mount(scope, root)
        headers = scope["holdfast.headers"] = dict(scope["headers"])
        if self._proxies.are_trusted or b"cookie" in headers:
            self._proxies.settle(scope, headers)
        correlation_id = correlation_of(headers, self._service.ids)
        scope["holdfast.correlation_id"] = correlation_id
        common = [*SECURITY_HEADERS, (CORRELATION_HEADER, correlation_id.encode())]
        has_begun = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                is_kept = any(name == b"cache-control" for name, _ in message["headers"])  # it comes first in `common`
                message["headers"] = [*message["headers"], *common[is_kept:]]
            await send(message)

        exchange = Exchange(self._service, scope, receive, send_with_headers)
        is_spare = scope.get("state", {}).get(IS_SPARE, False)
        if is_spare:
            common.append((b"connection", b"close"))
        try:
            self._check_connection(scope, is_spare)
        except HoldfastError as problem:
            if not is_spare:
                common.append((b"connection", b"close"))
            await exchange.refuse(problem)
            return
        try:
            with (
                self._service.in_flight.doing(f"{scope['method']} {exchange.path[:SHOWN_PATH]!r}"),
                _caused_by(headers),
            ):
                await self._dispatch(exchange, scope, receive, send_with_headers)
        except ClientGone:
            return
        except asyncio.CancelledError:
            if has_begun or not self._service.stopping.is_set():
                raise
            await exchange.refuse(stopping(is_begun=True))  # otherwise the server answers 500
        except Exception as problem:
            if has_begun:
                raise
            await exchange.refuse(_error_of(problem, exchange))

    def _check_connection(self, scope: Scope, is_spare: bool) -> None:
        """Refuse requests that end the connection: one connection too many, or a head with an ambiguous end of the
        body.
        """
        if is_spare and scope["holdfast.route"] != "/v1/health":
            busy = "there are as many connections, from this address or from all, as are served; retry later"
            raise EngineError(busy, retry_after_ms=1_000)
        check_framing(scope["headers"], len(scope["holdfast.path"]) + len(scope["query_string"]))

    async def _dispatch(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["holdfast.route"]
        if path.startswith("/v1/"):
            await self._rest.answer(exchange)
        elif path == "/rpc":
            await self._rpc.answer(exchange)
        else:
            scope["app"] = self  # so that routes raise errors that they do not handle
            await self._others(scope, receive, send)


def _caused_by(headers: Headers) -> AbstractContextManager[None]:
    """Link the runs that a request starts to the span of its caller, if the request names one."""
    if b"traceparent" not in headers:
        return nullcontext()
    given = headers[b"traceparent"].decode("latin-1")
    return bind_context(**{TRACE_KEY: given}) if is_traceparent(given) else nullcontext()


def _mount(scope: Scope, root: str) -> None:
    """Store in a request the prefix below which the service is mounted, and the path without it.

    Servers and frameworks leave the prefix in the path, as the standard requires. A path without it stays as it is.
    """
    scope["holdfast.mount"] = quote(root)
    if scope["path"].startswith(f"{root}/"):
        segments = scope["holdfast.path"].split(b"/")  # undecoded: an encoded slash is not a separator
        scope["holdfast.path"] = b"/" + b"/".join(segments[root.count("/") + 1 :])
        scope["holdfast.route"] = scope["path"][len(root) :]


def _error_of(problem: Exception, exchange: Exchange) -> HoldfastError:
    if isinstance(problem, HoldfastError):
        return problem
    if not isinstance(problem, HTTPException):
        return exchange.unexpected(problem)
    allow = (problem.headers or {}).get("Allow")
    if allow is not None:
        return MethodNotAllowed(f"{exchange.method} is not for this address", allow=allow)
    if problem.status_code == 404:
        return NotFound("there is nothing at this address")
    return MalformedRequest(problem.detail)


class _Description:
    """Responds with the OpenAPI description, which is generated at the first request."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @cached_property
    def _description(self) -> dict[str, Any]:
        return describe({**OPERATIONS, **STREAMS, **DOWNLOADS}, self._service.app.name)

    @cached_property
    def _text(self) -> bytes:
        return msgspec.json.encode(self._description)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(self._service, scope, receive, send)
        await exchange.principal()
        text = self._text
        if exchange.mount:
            text = msgspec.json.encode({**self._description, "servers": [{"url": exchange.mount}]})
        await exchange.send(200, text, JSON)
