"""The service as an ASGI application: mounted in FastAPI, Starlette or Django, or run by any ASGI server.

Below a prefix everything works as at the root: links, cookies, event streams and the OpenAPI description include the
prefix. The lifespan decides who owns the node: the host application enters `lifespan`, which opens the store and runs
the node; a server that runs the application alone does the same through the protocol. Without a lifespan the
application serves what the app has already opened. This module must not bind sockets, handle the signals of the
process, or read settings of a server: these belong to the host.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.routing import BaseRoute, Router
from starlette.types import Receive, Scope, Send

from holdfast.app import App
from holdfast.engine.options import NodeOptions
from holdfast.engine.runtime import Runtime
from holdfast.errors import InvalidInput
from holdfast.service.auth.tokens import TokenAccess
from holdfast.service.context import Authenticate, Service, make_service
from holdfast.service.http.front import Front
from holdfast.service.http.server import access_of, check_access, how_to_begin
from holdfast.service.options import ServiceOptions
from holdfast.store.port import Store


class AsgiService:
    """API and page of an app as one ASGI application. `asgi` returns it."""

    def __init__(
        self,
        app: App,
        store: str | Store | None,
        options: ServiceOptions,
        node: NodeOptions | None,
        access: Authenticate,
        routes: Sequence[BaseRoute],
    ) -> None:
        self._app = app
        self._store = store
        self._options = options
        self._node = node
        self._access = access
        self._routes = routes
        self._made: tuple[Runtime | None, Service, Front] | None = None
        self._lifespans = Router(lifespan=self.lifespan)

    @asynccontextmanager
    async def lifespan(self, host: Any = None) -> AsyncIterator[None]:
        """Open the store and run the node while the context is open: `FastAPI(lifespan=service.lifespan)`.

        `host` is the served application. Frameworks pass it; it is not used.
        """
        async with self._app.node(self._store, options=self._node):
            service = self.service
            access = self._access
            if type(access) is TokenAccess and not await access.has_any():
                raise InvalidInput(f"there is no token yet: {how_to_begin(self._store)}; or choose open access")
            try:
                with service.watchdog.watching(self._options.loop_s):
                    yield
            finally:
                service.stopping.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or run the lifespan for a server."""
        if scope["type"] == "lifespan":
            await self._lifespans.lifespan(scope, receive, send)
            return
        await self._current()[1](scope, receive, send)

    @property
    def service(self) -> Service:
        """The current state that requests share. It belongs to one lifespan of the node, and to its event loop."""
        return self._current()[0]

    def _current(self) -> tuple[Service, Front]:
        runtime = self._app.runtimes.current()  # without one, requests get an error: there is no store
        if self._made is None or self._made[0] is not runtime:
            service = make_service(self._app, self._options, self._access)
            self._made = (runtime, service, Front(service, self._routes))
        return self._made[1:]


def asgi(
    app: App,
    store: str | Store | None = None,
    *,
    options: ServiceOptions | None = None,
    node: NodeOptions | None = None,
    authenticate: Authenticate | None = None,
    routes: Sequence[BaseRoute] = (),
) -> AsgiService:
    """Return API and page of an app as an ASGI application, to mount in another one or to run in a server.

    Its `lifespan` opens the store and runs a node, which executes workflows unless `node` has `takes_runs=False`. A
    framework does not enter the lifespan of a mounted application: pass it to the host. If the app has an open node, it
    is served without the lifespan. Callers are authenticated as in `serve`: by tokens of the store, by `authenticate`,
    or access is open. See docs/frameworks.md.
    """
    options = options or ServiceOptions()
    if authenticate is None and not options.is_open:
        authenticate = access_of(app, options)
    return AsgiService(app, store, options, node, check_access(options, authenticate), routes)
