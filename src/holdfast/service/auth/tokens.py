"""Authentication of callers by tokens that are kept in the store.

A request costs no query, because tokens are cached briefly. Unknown tokens are looked up together, with a pause between
two queries, so that made-up tokens do not load the store. Tokens that are unknown, revoked or expired get the same
response.
"""

import asyncio
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from holdfast.app import App
from holdfast.clock import Secrets, SystemSecrets
from holdfast.core.access import FORMER_PREFIX, PREFIX, AccessToken, digest_of, is_secret_of, read_token, write_token
from holdfast.core.audit import DETAIL_CHARS, AuditEntry
from holdfast.core.instants import Instant
from holdfast.errors import EngineError, HoldfastError, InvalidInput, NotAuthenticated, StoreError
from holdfast.limits import DURATION_MS, check_types
from holdfast.service.auth.roles import ADMIN, ROLES, SCOPES, scopes_of
from holdfast.service.context import Headers, Principal
from holdfast.service.options import LONGEST_TOKEN_S, TOKEN_S
from holdfast.store.port import Store
from holdfast.store.queries import TokenQuery

logger = logging.getLogger("holdfast.access")

HOW_TO_BEGIN = "`holdfast token create NAME --role admin --store ADDRESS` makes one on the store, without a server"
LAST_USED_S = 600
"""The precision of `last_used_at`: each process writes it once per token in this time."""

PAUSE_S = 0.01
"""The pause between two queries for tokens. Callers that arrive in between share the next one."""

LOOK_UP = 500
KEPT = 10_000

SESSION_COOKIE = b"holdfast_session"
SECURE_SESSION_COOKIE = b"__Host-holdfast_session"
"""The name of the cookie over https. Browsers accept this name only from this very host, and only over TLS."""

MOST_BYTES = 200
"""A longer text is never accepted as a token."""

_BEARER = re.compile(rb"bearer +([^\s,]+)", re.IGNORECASE)
PLACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
OIDC = "oidc:"
"""The prefix of the ids of callers whom an OpenID provider has authenticated. Such an id has no stored token."""


class _Asked(Struct, frozen=True, kw_only=True):
    """The requested properties of a token, for validation."""

    role: str
    scopes: tuple[str, ...]
    roles: tuple[str, ...]
    tenant: str | None
    project: str | None
    environment: str | None
    expires_in_s: float
    longest_s: float
    is_granted: bool


def _texts(given: Any) -> Any:
    """Return a value that should be texts as a tuple, if that is possible."""
    is_many = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
    return tuple(given) if is_many else given


async def make_token(
    store: Store,
    name: str,
    *,
    role: str = "",
    scopes: Iterable[str] = (),
    roles: Iterable[str] = (),
    tenant: str | None = None,
    project: str | None = None,
    environment: str | None = None,
    expires_in_s: float = TOKEN_S,
    longest_s: float = LONGEST_TOKEN_S,
    created_by: str = "",
    session_of: str | None = None,
    secrets: Secrets | None = None,
    audit: AuditEntry | None = None,
    is_granted: bool = False,
) -> tuple[str, AccessToken]:
    """Create a token: return its text, for its bearer only, and the record that the store keeps.

    `role` and `scopes` are its rights, and `roles` are its bearer's roles for tasks. It expires after `expires_in_s`,
    at most `longest_s`. It needs no server, so you can create the first token with it. `is_granted` means that its
    rights are already decided, even if it has none.
    """
    asked = _Asked(
        role=role,
        scopes=_texts(scopes),
        roles=_texts(roles),
        tenant=tenant,
        project=project,
        environment=environment,
        expires_in_s=expires_in_s,
        longest_s=longest_s,
        is_granted=is_granted,
    )
    check_types(asked)
    scopes = tuple(dict.fromkeys(asked.scopes))
    if not is_granted:
        _check_grant(role, scopes)
    _check_places(tenant, project, environment)
    now = await store.now()
    fresh = secrets or SystemSecrets()
    token_id, secret = fresh.new_secret()[:16], fresh.new_secret()
    token = AccessToken(
        token_id=token_id,
        digest=digest_of(secret),
        name=name,
        role=role,
        scopes=scopes,
        roles=tuple(dict.fromkeys(asked.roles)),
        tenant=tenant,
        project=project,
        environment=environment,
        created_at=now,
        created_by=created_by,
        expires_at=now + _microseconds(expires_in_s, longest_s),
        session_of=session_of,
    )
    [kept] = await store.put_tokens([token], _about(audit, token))
    if kept.digest != token.digest:
        raise EngineError("a token with this id exists already; create another one")
    return write_token(token_id, secret), kept


def _check_grant(role: str, scopes: tuple[str, ...]) -> None:
    if role and role not in ROLES:
        raise InvalidInput(f"there is no role {role!r}; the roles are {', '.join(ROLES)}", field="role")
    unknown = sorted(set(scopes) - SCOPES)
    if unknown:
        raise InvalidInput(
            f"there is no scope {unknown[0]!r}; the scopes are {', '.join(sorted(SCOPES))}", field="scopes"
        )
    if not role and not scopes:
        raise InvalidInput(f"a token needs a role ({', '.join(ROLES)}), or scopes", field="role")


def _check_places(tenant: str | None, project: str | None, environment: str | None) -> None:
    for field, place in (("tenant", tenant), ("project", project), ("environment", environment)):
        if place is not None and not PLACE.fullmatch(place):
            raise InvalidInput(f"{field}: 1 to 64 letters, digits, dots, dashes and underscores", field=field)
    if tenant is None and (project is not None or environment is not None):
        raise InvalidInput("a project or an environment is a tenant's: name the tenant too", field="tenant")


def _microseconds(seconds: float, longest_s: float) -> int:
    if not longest_s > 0:
        raise InvalidInput(f"longest_s is a number of seconds above 0, not {longest_s!r}", field="longest_s")
    if not 0 < seconds <= min(longest_s, DURATION_MS / 1_000):
        problem = f"expires_in_s: a number of seconds above 0, at most {longest_s:.0f}: no token lives for longer here"
        raise InvalidInput(problem, field="expires_in_s", longest_s=int(longest_s))
    return int(seconds * 1_000_000)


def _about(entry: AuditEntry | None, token: AccessToken) -> list[AuditEntry]:
    """Return the audit log's entry about a token, if there is one, under the token's tenant."""
    if entry is None:
        return []
    place = {"tenant": token.tenant, "project": token.project, "environment": token.environment}
    rights = " ".join((token.role, *token.scopes)).strip()
    detail = f"{token.name}: {rights}" if token.session_of is None else f"session of {token.session_of}"
    return [replace(entry, subject=token.token_id, detail=detail[:DETAIL_CHARS], **place)]


async def revoke_token(store: Store, token: AccessToken, by: str, audit: AuditEntry | None = None) -> AccessToken:
    """Revoke a token permanently. Repeating that is harmless, and the first time of revocation is kept."""
    revoked = replace(token, revoked_at=await store.now(), revoked_by=by)
    [kept] = await store.put_tokens([revoked], _about(audit, token))
    return kept


class _Known(Struct, frozen=True):
    """A token as it was read, when by the loop's clock, the store's time then, and the bearer."""

    token: AccessToken
    read_at: float
    now: Instant
    principal: Principal


def given_token(headers: Mapping[bytes, bytes]) -> tuple[str, bool] | None:
    """Return the token of a request, and whether it is the cookie of a session; None without a token.

    The Authorization header takes precedence over the cookie. A text that cannot be a token counts as an empty token.
    """
    said = headers.get(b"authorization")
    if said is not None:
        found = _BEARER.fullmatch(said.strip()) if len(said) <= MOST_BYTES else None
        return _text(found[1] if found else b""), False
    parts = [part.strip().partition(b"=") for part in headers.get(b"cookie", b"").split(b";")]
    for wanted in (SECURE_SESSION_COOKIE, SESSION_COOKIE):
        for name, separator, value in parts:
            if name == wanted and separator:
                return _text(value), True
    return None


def shown_caller(headers: Mapping[bytes, bytes]) -> str:
    """Return the caller that these headers claim, for logs: never more of a token than its id."""
    given = given_token(headers)
    if given is None:
        return "a caller without a token"
    found = read_token(given[0])
    return "a caller with something that is no token" if found is None else f"{PREFIX}{found[0]}"


def _text(value: bytes) -> str:
    return value.decode("ascii", errors="replace") if len(value) <= MOST_BYTES else ""


class TokenAccess:
    """Identifies callers by the tokens in an app's store."""

    def __init__(self, app: App, most_age_s: float) -> None:
        self._app = app
        self._most_age_s = most_age_s
        self._known: dict[str, _Known] = {}
        self._wanted: set[str] = set()
        self._next: asyncio.Task[dict[str, _Known]] | None = None
        self._last_read = float("-inf")
        self._changes = 0

    @property
    def store(self) -> Store:
        """The store that the app has open."""
        try:
            return self._app.runtime().store
        except InvalidInput as problem:
            raise EngineError("the service has no store at the moment") from problem

    async def __call__(self, headers: Headers) -> Principal:
        """Return the caller, or raise `NotAuthenticated`."""
        given = given_token(headers)
        if given is None:
            raise NotAuthenticated(f"this needs a token, as `Authorization: Bearer holdfast_…`; {HOW_TO_BEGIN}")
        text, is_session = given
        found = read_token(text)
        if found is None:
            raise _unreadable(text)
        return await self._bearer(*found, is_session=is_session)

    async def bearer(self, text: str) -> Principal:
        """Return the bearer of a token that is not a session."""
        found = read_token(text)
        if found is None:
            raise _unreadable(text)
        return await self._bearer(*found, is_session=False)

    async def has_any(self) -> bool:
        """Note that a token has changed, so that it is looked up again at its next use."""
        return bool(await self.store.find_tokens(TokenQuery(limit=1)))

    def forget(self, token_id: str) -> None:
        """Look a token up again when it comes next: something has happened to it."""
        self._changes += 1
        self._known.pop(token_id, None)

    async def _bearer(self, token_id: str, secret: str, *, is_session: bool) -> Principal:
        known = await self._look_up(token_id)
        token = None if known is None else known.token
        if not is_secret_of(token, secret) or known is None or token is None or not _is_valid(known):
            raise _refusal()
        if (token.session_of is not None) != is_session:
            raise _refusal()
        if token.session_of is not None and token.session_of.startswith(OIDC):
            return replace(known.principal, token_id=token.session_of, is_session=True)
        if token.session_of is not None:
            known = await self._look_up(token.session_of)
            if known is None or not _is_valid(known):
                raise _refusal()
        await self._note_use(known)
        return replace(known.principal, is_session=True) if is_session else known.principal

    async def _note_use(self, known: _Known) -> None:
        """Store when a token was last used, at intervals."""
        token, now = known.token, _present(known)
        if token.last_used_at is not None and now - token.last_used_at < LAST_USED_S * 1_000_000:
            return
        used = replace(token, last_used_at=now)
        if self._known.get(token.token_id) is known:
            self._known[token.token_id] = replace(known, token=used)  # before the write: no other request repeats it
        try:
            await self.store.put_tokens([used])
        except StoreError as problem:
            logger.warning("the last use of token %s could not be stored: %s", token.token_id, problem)

    # --- looking tokens up, many at a time

    async def _look_up(self, token_id: str) -> _Known | None:
        known = self._known.get(token_id)
        if known is not None and asyncio.get_running_loop().time() - known.read_at < self._most_age_s:
            return known
        self._wanted.add(token_id)
        if self._next is None:
            self._next = asyncio.create_task(self._read(), name="tokens")
        return (await asyncio.shield(self._next)).get(token_id)

    async def _read(self) -> dict[str, _Known]:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._last_read + PAUSE_S - loop.time()))
        wanted, self._wanted, self._next = sorted(self._wanted), set(), None  # later callers wait for the next query
        self._last_read = loop.time()
        try:
            return await self._read_tokens(wanted)
        except HoldfastError as problem:
            raise EngineError("tokens cannot be looked up at the moment") from problem

    async def _read_tokens(self, wanted: list[str]) -> dict[str, _Known]:
        changes, read_at, now = self._changes, asyncio.get_running_loop().time(), await self.store.now()
        found: dict[str, _Known] = {}
        for first in range(0, len(wanted), LOOK_UP):
            ids = tuple(wanted[first : first + LOOK_UP])
            while ids and (
                page := await self.store.find_tokens(TokenQuery(token_ids=ids, sessions=True, limit=LOOK_UP))
            ):
                found |= {token.token_id: _Known(token, read_at, now, principal_of(token)) for token in page}
                ids = tuple(id_ for id_ in ids if id_ not in found)
        for token_id in wanted:
            self._known.pop(token_id, None)
        if len(self._known) + len(found) > KEPT:
            self._known.clear()
        if changes == self._changes:  # otherwise the rows may be older than what is known here
            self._known |= found
        return found


def principal_of(token: AccessToken) -> Principal:
    """Return the bearer of a token, and the bearer's permissions."""
    scopes = scopes_of(token.role, token.scopes)
    return Principal(
        name=token.name,
        tenant=token.tenant,
        project=token.project,
        environment=token.environment,
        roles=token.roles,
        scopes=scopes,
        is_admin=ADMIN in scopes,
        token_id=token.token_id,
    )


def _present(known: _Known) -> Instant:
    """Return the store's current time, computed from its time when the token was read."""
    return known.now + int((asyncio.get_running_loop().time() - known.read_at) * 1_000_000)


def _is_valid(known: _Known) -> bool:
    return known.token.is_valid(_present(known))


def _unreadable(text: str) -> NotAuthenticated:
    if text.startswith(FORMER_PREFIX):
        return NotAuthenticated(f"this token is not valid: tokens begin with {PREFIX!r}, make another one")
    return _refusal()


def _refusal() -> NotAuthenticated:
    return NotAuthenticated("this token is not valid: it is unknown, revoked or expired")
