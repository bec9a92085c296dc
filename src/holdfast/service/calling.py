"""A call: who asks, of which app, and what they can see of its store.

An operation gets everything through its call, and sees the store as the caller's tenant does. So there is one place
where tenants are kept apart, and no operation can forget to.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from msgspec import Struct

from holdfast.core.messages import Actor
from holdfast.engine.app import App
from holdfast.engine.handle import RunHandle
from holdfast.engine.opened import Opened
from holdfast.engine.recording import head_of
from holdfast.engine.tasks import Tasks
from holdfast.errors import EngineError, InvalidInput, NotPermitted
from holdfast.ports import Ids, SystemIds
from holdfast.service.alerts import Alerts
from holdfast.service.options import ServiceOptions
from holdfast.service.projections import Projections
from holdfast.service.tenancy import seen_by
from holdfast.service.watching import Watchers
from holdfast.store.port import Store

T = TypeVar("T")

DEFAULT_TENANT = "default"
ANONYMOUS = "anonymous"


class Principal(Struct, frozen=True, kw_only=True):
    """Who asks. Without a tenant they see all of them; `scopes` of None are all scopes.

    With `is_open` nobody has been asked who they are: a request may say it itself.
    """

    name: str
    tenant: str | None = None
    roles: tuple[str, ...] = ()
    scopes: frozenset[str] | None = None
    is_admin: bool = False
    is_open: bool = False

    def require(self, scope: str | None) -> None:
        """Raise `NotPermitted` unless this scope is granted. None is what everybody may do."""
        if scope is not None and self.scopes is not None and scope not in self.scopes:
            raise NotPermitted(f"this needs the scope {scope!r}", scope=scope)


OPEN = Principal(name=ANONYMOUS, is_admin=True, is_open=True)
"""Whoever comes, where access is open."""

Headers = Mapping[bytes, bytes]
Authenticate = Callable[[Headers], Awaitable[Principal]]
"""Says who asks, from the headers of a request; raises if it is nobody who may."""


async def let_in(headers: Headers) -> Principal:
    """Let in whoever comes."""
    return OPEN


class Service(Struct, frozen=True, kw_only=True):
    """What calls share: the app, who may call, and how the service behaves."""

    app: App
    options: ServiceOptions = ServiceOptions()
    authenticate: Authenticate = let_in
    ids: Ids = SystemIds()
    alerts: Alerts
    projections: Projections
    stopping: asyncio.Event
    watchers: Watchers
    requests: Counter[tuple[str, int]]

    def call(self, principal: Principal, correlation_id: str) -> "Call":
        """Return a call of this principal."""
        try:
            opened = self.app.opened()
        except InvalidInput as problem:
            raise EngineError("the service has no store at the moment") from problem
        return Call(self, opened, principal, correlation_id)


def make_service(
    app: App, options: ServiceOptions | None = None, authenticate: Authenticate = let_in, ids: Ids | None = None
) -> Service:
    """Return a service for an app. It answers while the app has a node or a connection open."""
    alerts, stopping, options = Alerts(), asyncio.Event(), options or ServiceOptions()
    return Service(
        app=app,
        options=options,
        authenticate=authenticate,
        ids=ids or SystemIds(),
        alerts=alerts,
        projections=Projections(alerts),
        stopping=stopping,
        watchers=Watchers(app, alerts, options, stopping),
        requests=Counter(),
    )


class Call:
    """One operation being asked for."""

    __slots__ = ("correlation_id", "opened", "principal", "service")

    def __init__(self, service: Service, opened: Opened, principal: Principal, correlation_id: str) -> None:
        self.service = service
        self.opened = opened
        self.principal = principal
        self.correlation_id = correlation_id

    @property
    def tenant(self) -> str:
        """The tenant in whose name runs are started."""
        return self.principal.tenant or DEFAULT_TENANT

    @property
    def store(self) -> Store:
        """The store as the caller's tenant sees it."""
        return seen_by(self.principal.tenant, self.opened.store)

    @property
    def tasks(self) -> Tasks:
        """The tasks that the caller's tenant has."""
        return Tasks(self.store, self.opened.workflows.values())

    async def run(self, run_id: str) -> RunHandle[Any]:
        """Return the handle of a run; to other tenants than its own it is not there."""
        if self.principal.tenant is not None:
            await head_of(self.store, run_id)
        return self.opened.run(run_id)

    def name(self, given: str = "") -> str:
        """Return who does this. Only where access is open, and for admins, may the request say so itself."""
        principal = self.principal
        if not given or given == principal.name:
            return principal.name
        if not principal.is_open and not principal.is_admin:
            raise NotPermitted(f"{principal.name!r} cannot act for somebody else", field="actor")
        return given

    def actor(self, given: str = "") -> Actor:
        """Return who does something to a task."""
        name = self.name(given)
        roles = self.principal.roles if name == self.principal.name else ()
        return Actor(name, roles, self.principal.is_admin)

    async def wait_for(self, awaited: Awaitable[T], seconds: float) -> T | None:
        """Wait for something for so long; None if it does not come, or if the service stops before."""
        if self.service.stopping.is_set():
            seconds = 0
        task = asyncio.ensure_future(awaited)
        stopping = asyncio.ensure_future(self.service.stopping.wait())
        try:
            most = min(seconds, self.service.options.wait_s)
            await asyncio.wait([task, stopping], timeout=most, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            stopping.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
