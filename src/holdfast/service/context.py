"""The context of a request: its caller, the app, and the store as visible to the caller's tenant.

An operation gets everything through its context, so tenants are separated in one place, and no operation can forget to.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from holdfast.app import App
from holdfast.clock import Ids, SystemIds
from holdfast.core.audit import AuditEntry, Caller
from holdfast.core.messages import Actor
from holdfast.core.reconciliation import OPERATOR
from holdfast.core.tasks import is_effective
from holdfast.engine.history import head_of
from holdfast.engine.inbox.tasks import Tasks
from holdfast.engine.observe.metrics import observer_of
from holdfast.engine.runtime import Runtime
from holdfast.errors import AnswerTooLarge, EngineError, HoldfastError, NotPermitted
from holdfast.service.auth.roles import OF_ALL_TENANTS
from holdfast.service.auth.tenancy import seen_by
from holdfast.service.auth.throttle import ConcurrencyLimit, ReadLimiter, RefusalLog
from holdfast.service.http.loop_watchdog import LoopWatchdog
from holdfast.service.http.problems import stopping
from holdfast.service.live.changefeed import ChangeFeeds
from holdfast.service.live.projections import Alerts, GraphFolds, Projections
from holdfast.service.options import ServiceOptions
from holdfast.store.port import Store, TaskQuery

T = TypeVar("T")

DEFAULT_TENANT = "default"
ANONYMOUS = "anonymous"
SHARE = 8
"""The divisor for the share of all bodies being received that one caller may have."""


class Principal(Caller, frozen=True, kw_only=True):
    """The caller, and its boundary: a tenant, or only a project or an environment of it.

    With `is_open` the caller is not authenticated: a request may name the actor itself. With `is_session` it was
    authenticated by a browser cookie, and the origin of the request is checked.
    """

    is_open: bool = False
    is_session: bool = False

    def require(self, scope: str | None) -> None:
        """Raise `NotPermitted` unless this scope is granted. None requires no scope."""
        if scope is None:
            return
        if not self.permits(scope):
            raise NotPermitted(f"this needs the scope {scope!r}", scope=scope)
        if self.tenant is not None and scope in OF_ALL_TENANTS:
            raise NotPermitted("this concerns all tenants; it needs a token without a tenant", scope=scope)

    @property
    def task_roles(self) -> tuple[str, ...]:
        """The roles of the caller for tasks: callers who may control runs are operators too."""
        is_operator = self.permits("runs:control") and OPERATOR not in self.roles
        return (*self.roles, OPERATOR) if is_operator else self.roles

    def permits(self, scope: str) -> bool:
        """Return whether this scope is granted."""
        return self.scopes is None or scope in self.scopes


UNAUTHENTICATED = Principal(name="", scopes=frozenset())
"""The caller of an operation that needs no scope."""

OPEN = Principal(name=ANONYMOUS, is_admin=True, is_open=True)
"""Every caller, if access is open."""

Headers = Mapping[bytes, bytes]
"""The headers of a request, with names in lower case."""

Authenticate = Callable[[Headers], Awaitable[Principal]]
"""Returns the caller, from the headers of a request; raises `NotAuthenticated` if there is none."""


async def open_access(headers: Headers) -> Principal:
    """Admit every caller."""
    return OPEN


class SendBudget:
    """The bytes of all responses that callers have not received yet."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.bytes = 0

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Count a response until it is sent; raise `EngineError` if that would exceed the limit."""
        if self.bytes and self.bytes + size > self._most:
            raise EngineError("too many large responses are being sent; retry later", retry_after_ms=1_000)
        self.bytes += size
        try:
            yield
        finally:
            self.bytes -= size


class ReceiveBudget:
    """The bytes of all large bodies that are being received, in total and for each caller."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_caller: Counter[str] = Counter()

    @property
    def bytes(self) -> int:
        """Their total size."""
        return self._by_caller.total()

    @contextmanager
    def hold(self, caller: str, size: int) -> Iterator[None]:
        """Count a body until it is received. Unauthenticated callers count as one, ''."""
        own, total = self._by_caller[caller], self.bytes
        if (own and own + size > self._most // SHARE) or (total and total + size > self._most):
            raise EngineError("too many large requests are being received; retry later", retry_after_ms=1_000)
        self._by_caller[caller] += size
        try:
            yield
        finally:
            self._by_caller[caller] -= size
            if self._by_caller[caller] <= 0:
                del self._by_caller[caller]


class InFlight:
    """The operation that each task executes, for the log of a blocked loop."""

    def __init__(self) -> None:
        self._by_task: dict[asyncio.Task[Any], str] = {}

    @contextmanager
    def doing(self, operation: str) -> Iterator[None]:
        """Note what the current task executes, for the log."""
        task = asyncio.current_task()
        if task is None:
            yield
            return
        before = self._by_task.get(task)
        self._by_task[task] = operation
        try:
            yield
        finally:
            if before is None:
                self._by_task.pop(task, None)
            else:
                self._by_task[task] = before

    def name_of(self, task: "asyncio.Task[Any] | None") -> str:
        """Return what a task executes."""
        if task is None:
            return "no task"
        return self._by_task.get(task) or f"task {task.get_name()}"


class Service(Struct, frozen=True, kw_only=True):
    """The state that requests share: the app, authentication, options, and counters."""

    app: App
    options: ServiceOptions = ServiceOptions()
    authenticate: Authenticate = open_access
    ids: Ids = SystemIds()
    alerts: Alerts
    projections: Projections
    graph_folds: GraphFolds
    refusals: RefusalLog
    stopping: asyncio.Event
    change_feeds: ChangeFeeds
    requests: Counter[tuple[str, int]]
    in_flight: InFlight
    watchdog: LoopWatchdog
    read_limiter: ReadLimiter
    streams: ConcurrencyLimit
    sending: SendBudget
    receiving: ReceiveBudget

    def context(self, principal: Principal, correlation_id: str) -> "RequestContext":
        """Return the context of a request of this caller. A service that is stopping accepts none."""
        if self.stopping.is_set():
            raise stopping(is_begun=False)
        runtime = self.app.runtimes.current()
        if runtime is None:
            raise EngineError("the service has no store at the moment")
        return RequestContext(self, runtime, principal, correlation_id)


def make_service(
    app: App, options: ServiceOptions | None = None, authenticate: Authenticate = open_access, ids: Ids | None = None
) -> Service:
    """Return a service for an app. It answers while the app has a node or a connection open."""
    alerts, stops, in_flight, options = Alerts(), asyncio.Event(), InFlight(), options or ServiceOptions()
    alerts.forward = lambda alert: observer_of(app.runtime().store).alerts.note(
        alert.code, alert.priority, alert.detail, alert.run_id
    )
    return Service(
        app=app,
        options=options,
        authenticate=authenticate,
        ids=ids or SystemIds(),
        alerts=alerts,
        projections=Projections(alerts),
        graph_folds=GraphFolds(),
        refusals=RefusalLog(options.refusals_per_minute),
        stopping=stops,
        change_feeds=ChangeFeeds(app, alerts, options, stops),
        requests=Counter(),
        in_flight=in_flight,
        watchdog=LoopWatchdog(in_flight.name_of),
        streams=ConcurrencyLimit("event streams"),
        sending=SendBudget(options.sending_bytes),
        receiving=ReceiveBudget(options.receiving_bytes),
        read_limiter=ReadLimiter(options.reads_per_minute, options.tenant_reads_per_minute, options.lists_at_once),
    )


def _bound(field: str, bound: str | None, asked: str) -> str:
    if bound is not None and asked not in (bound, DEFAULT_TENANT):
        raise NotPermitted(f"{field}: this token is for {bound!r}", field=field)
    return asked if bound is None else bound


class ResponseBudget:
    """How many bytes a response may still use."""

    def __init__(self, most: int) -> None:
        self.bytes = most
        self._most = most

    def take(self, size: int) -> None:
        """Use a part of it, or raise `AnswerTooLarge`."""
        if size > self.bytes or self.bytes <= 0:
            raise AnswerTooLarge(
                f"an answer has at most {self._most} bytes: ask for fewer items, or for fewer things at once",
                limit_bytes=self._most,
            )
        self.bytes -= size


class RequestContext:
    """One request for an operation."""

    __slots__ = ("budget", "correlation_id", "disconnected", "list_turn", "principal", "runtime", "service")

    def __init__(self, service: Service, runtime: Runtime, principal: Principal, correlation_id: str) -> None:
        self.service = service
        self.runtime = runtime
        self.principal = principal
        self.correlation_id = correlation_id
        self.disconnected: Callable[[], Awaitable[None]] | None = None
        """Completes when the caller disconnects, if the transport notices."""
        self.budget = ResponseBudget(service.options.answer_bytes)
        """The remaining size of the response; in a batch, of all calls that are not answered yet."""
        self.list_turn: AbstractAsyncContextManager[Any] = nullcontext()
        """The lists of one batch are read one by one: each has the space that the previous ones have left."""

    @property
    def page_bytes(self) -> int:
        """The maximum size of the rows of a page: for each row, a response contains more than the store does."""
        return max(1, self.budget.bytes // 2)

    @property
    def item_bytes(self) -> int:
        """The maximum size of one item in a list."""
        return max(1, self.service.options.answer_bytes // 2)

    def check_budget(self) -> None:
        """Raise `AnswerTooLarge` if the previous answers have left no space."""
        self.budget.take(0)

    @property
    def store(self) -> Store:
        """The store as visible to the caller's tenant."""
        principal = self.principal
        return seen_by(principal.tenant, self.runtime.store, principal.project, principal.environment)

    @property
    def tasks(self) -> Tasks:
        """The tasks of the caller's tenant."""
        return self.runtime.tasks(self.principal, self.store)

    def audit(self, *, actor: str = "", subject: str = "", detail: str = "") -> AuditEntry | None:
        """Return the audit log's entry for this call."""
        return self.runtime.audit(self.principal, actor=actor, subject=subject, detail=detail)

    async def require_run(self, run_id: str) -> None:
        """Raise `NotFound` if the caller's tenant has no such run. For callers without a tenant the verbs themselves
        answer.
        """
        if self.principal.tenant is not None:
            await head_of(self.store, run_id)

    async def redacted_steps(self, run_id: str, step_ids: Iterable[str | None]) -> frozenset[str]:
        """Return which of a run's steps are tasks that do not concern the caller."""
        asked = tuple({step_id for step_id in step_ids if step_id is not None})
        if not asked or self.principal.is_admin:
            return frozenset()
        actor, query, redacted = self.actor(), TaskQuery(run_id=run_id, step_ids=asked, limit=len(asked)), set[str]()
        while page := await self.store.find(query):
            if page.unreadable:  # it is not known whom it concerns
                return frozenset(asked)
            redacted |= {task.step_id for task in page if not is_effective(task.assignee, task.roles, actor)}
            query = replace(query, after=page[-1].task_id)
        return frozenset(asked) if page.unreadable else frozenset(redacted)

    def within(self, tenant: str, project: str, environment: str) -> tuple[str, str, str]:
        """Return the tenant, project and environment of what the caller creates: as requested, or as bound."""
        principal = self.principal
        return (
            _bound("tenant", principal.tenant, tenant),
            _bound("project", principal.project, project),
            _bound("environment", principal.environment, environment),
        )

    def name(self, given: str = "") -> str:
        """Return the name of the actor. Only with open access, and for admins, may the request name another one."""
        if not given or given == self.principal.name:
            return self.principal.name
        self._require_trust()
        return given

    def actor(self, given: str = "", roles: tuple[str, ...] = ()) -> Actor:
        """Return the actor of an operation on a task, with their roles: the caller, or one that the request names."""
        name = self.name(given)
        if roles:
            self._require_trust()
        elif name == self.principal.name:
            roles = self.principal.task_roles
        return Actor(name, roles, self.principal.is_admin)

    def _require_trust(self) -> None:
        if not self.principal.is_open and not self.principal.is_admin:
            raise NotPermitted(f"{self.principal.name!r} cannot act for another", field="actor")

    def log_refusal(self, what: str, refusal: HoldfastError, *, is_counted: bool) -> None:
        """Log that the caller may not do something, and count it if a run may have recorded it."""
        principal = self.principal
        key = principal.token_id or principal.name
        if is_counted:
            self.service.refusals.count(key)
        self.service.refusals.log_error(key, principal.name, what, refusal, self.correlation_id)

    @contextmanager
    def logging_refusals(self, what: str) -> Iterator[None]:
        """Log a refusal that is raised inside the context."""
        try:
            yield
        except NotPermitted as refusal:
            self.log_refusal(what, refusal, is_counted=False)
            raise

    async def wait_for(self, awaited: Awaitable[T], seconds: float) -> T | None:
        """Wait for something up to a time; None if it does not come, the service stops, or the caller disconnects."""
        most = 0.0 if self.service.stopping.is_set() else min(seconds, self.service.options.wait_s)
        task = asyncio.ensure_future(awaited)
        others: list[asyncio.Future[Any]] = [asyncio.ensure_future(self.service.stopping.wait())]
        if self.disconnected is not None:
            others.append(asyncio.ensure_future(self.disconnected()))
        try:
            await asyncio.wait([task, *others], timeout=most, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            unfinished = [waiter for waiter in (task, *others) if not waiter.done()]
            for waiter in unfinished:
                waiter.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
