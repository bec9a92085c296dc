"""Sign-in with a browser: the caller presents a token once, and from then on a cookie identifies the caller.

A session is a token of its own that is valid only as a cookie, expires, and is valid for no longer than the token that
it was made from. The page cannot see it: scripts cannot read the cookie, and other sites cannot send it.
"""

from typing import Any

import msgspec
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from holdfast.core.access import PREFIX, read_token
from holdfast.core.audit import AuditEntry
from holdfast.errors import NotAuthenticated, NotFound, RateLimited
from holdfast.service.auth.csrf import check_origin
from holdfast.service.auth.throttle import Meter, client_of
from holdfast.service.auth.tokens import TokenAccess, given_token, make_token, revoke_token
from holdfast.service.context import Principal, Service
from holdfast.service.http.exchange import Exchange, check_head
from holdfast.service.http.proxies import Proxies, cookie_name
from holdfast.service.registry import refusal
from holdfast.store.queries import TokenQuery

SIGN_IN_BYTES = 1_024
"""The maximum size of a sign-in request. It comes from unauthenticated callers, and contains one token."""

SIGN_INS_PER_MINUTE = 30
"""How often per minute one token may be used to sign in. Each time a record is stored."""

FAILED_SIGN_INS = 10
ALL_FAILED_SIGN_INS = 300
"""How many failed sign-ins the audit log keeps per minute: for one address, and in total."""

EVERYBODY = ""

_COOKIE = "; Path=/; HttpOnly; SameSite=Strict"


class SignIn(Struct, frozen=True, forbid_unknown_fields=True):
    """The token to sign in with."""

    token: str


class SessionView(Struct, frozen=True, kw_only=True):
    """The caller who is signed in, and the caller's permissions. With `is_open` every caller may do everything."""

    name: str
    scopes: list[str] | None
    roles: tuple[str, ...]
    tenant: str | None = None
    project: str | None = None
    environment: str | None = None
    is_admin: bool = False
    is_open: bool = False


class Sessions:
    """Signs in (POST), returns the caller (GET), and signs out (DELETE)."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._meter = Meter()
        self._proxies = Proxies(service.options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        exchange = Exchange(self._service, scope, receive, send)
        if exchange.method == "POST":
            await self._sign_in(exchange, scope)
        elif exchange.method == "DELETE":
            await self._sign_out(exchange, scope)
        else:
            await exchange.answer(200, _view(await exchange.principal()))

    def _access(self) -> TokenAccess:
        if not isinstance(self._service.authenticate, TokenAccess):
            raise NotFound("there is nothing to sign in to: this service does not ask for tokens of its own")
        return self._service.authenticate

    async def _sign_in(self, exchange: Exchange, scope: Scope) -> None:
        access = self._access()
        check_head(scope["headers"], exchange.query)
        check_origin(exchange.headers)
        try:
            given = msgspec.json.decode(await exchange.body(SIGN_IN_BYTES), type=SignIn)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as problem:
            raise refusal(problem) from problem
        try:
            principal = await access.bearer(given.token)
        except NotAuthenticated as problem:
            found = read_token(given.token)
            who = "a caller with something that is no token" if found is None else f"{PREFIX}{found[0]}"
            self._service.refusals.log(who, "sign in", problem.message, exchange.correlation_id, client_of(scope))
            await note_failure(access, who, exchange, scope)
            raise
        text = await self._begin(access, principal, exchange.correlation_id)
        await exchange.answer(
            200,
            _view(principal),
            [cookie_of(self._proxies.is_secure(scope), text, f"; Max-Age={int(self._service.options.session_s)}")],
        )

    async def _begin(self, access: TokenAccess, principal: Principal, correlation_id: str) -> str:
        left_ms = self._meter.left_ms(principal.token_id, SIGN_INS_PER_MINUTE)
        if left_ms:
            raise RateLimited("this token is being signed in with too often", retry_after_ms=left_ms)
        self._meter.count(principal.token_id)
        text, _ = await make_token(
            access.store,
            principal.name,
            scopes=sorted(principal.scopes or ()),
            tenant=principal.tenant,
            project=principal.project,
            environment=principal.environment,
            expires_in_s=self._service.options.session_s,
            created_by=principal.token_id,
            session_of=principal.token_id,
            audit=self._entry("session.sign_in", principal, correlation_id),
        )
        return text

    def _entry(self, operation: str, principal: Principal, correlation_id: str) -> AuditEntry:
        return AuditEntry(
            entry_id=self._service.ids.new_id(),
            operation=operation,
            actor=principal.name,
            by=principal.ref,
            correlation_id=correlation_id,
        )

    async def _sign_out(self, exchange: Exchange, scope: Scope) -> None:
        access = self._access()
        principal = await exchange.principal()
        given = given_token(exchange.headers)
        found = read_token(given[0]) if given is not None and given[1] else None
        if found is not None:
            for token in await access.store.find_tokens(TokenQuery(token_ids=(found[0],), sessions=True)):
                entry = self._entry("session.sign_out", principal, exchange.correlation_id)
                await revoke_token(access.store, token, principal.name, entry)
            access.forget(found[0])
        await exchange.send_nothing(204, [cookie_of(self._proxies.is_secure(scope), "", "; Max-Age=0")])


async def note_failure(access: TokenAccess, who: str, exchange: Exchange, scope: Scope) -> None:
    """Append a failed sign-in to the audit log, up to a limit per minute for each address and in total."""
    service, client = exchange.service, client_of(scope)
    failures = service.refusals.failed_sign_ins
    if failures.count(client) > FAILED_SIGN_INS or failures.count(EVERYBODY) > ALL_FAILED_SIGN_INS:
        return
    entry = AuditEntry(
        entry_id=service.ids.new_id(),
        operation="session.sign_in",
        actor=who,
        detail=f"from {client}",
        outcome="refused",
        correlation_id=exchange.correlation_id,
    )
    await access.store.append_audit([entry])


def cookie_of(is_secure: bool, value: str, age: str) -> tuple[bytes, bytes]:
    """Return the header that sets a session cookie."""
    secure = "; Secure" if is_secure else ""
    return b"set-cookie", f"{cookie_name(is_secure)}={value}{_COOKIE}{secure}{age}".encode()


def _view(principal: Principal) -> SessionView:
    shown: dict[str, Any] = {field: getattr(principal, field) for field in ("tenant", "project", "environment")}
    return SessionView(
        name=principal.name,
        scopes=None if principal.scopes is None else sorted(principal.scopes),
        roles=principal.task_roles,
        is_admin=principal.is_admin,
        is_open=principal.is_open,
        **shown,
    )
