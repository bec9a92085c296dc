"""Callers that an OpenID provider authenticates: JWT at the API, and sign-in with a browser.

A token is valid if it was signed with a key that the provider publishes, by an algorithm that is allowed here (never
`none`, never a shared secret), for this issuer and audience, and within its period of validity. Its claims are mapped
to roles and to a tenant; a claim that is not mapped grants nothing.

A browser signs in by authorization code with PKCE. The data needed when it returns (state, nonce, verifier) is in a
separate cookie; then a session is created, as for a token of Holdfast.
"""

import asyncio
import base64
import logging
import re
from collections.abc import Mapping
from hashlib import sha256
from hmac import compare_digest
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.app import App
from holdfast.clock import Secrets, SystemSecrets
from holdfast.core.audit import AuditEntry
from holdfast.errors import EngineError, InvalidInput, MalformedRequest, NotAuthenticated, NotFound, RateLimited
from holdfast.service.auth.csrf import is_loopback
from holdfast.service.auth.roles import ADMIN, ROLES, scopes_of
from holdfast.service.auth.sessions import SIGN_INS_PER_MINUTE, cookie_of, note_failure
from holdfast.service.auth.throttle import Meter, client_of
from holdfast.service.auth.tokens import OIDC, PLACE, TokenAccess, make_token
from holdfast.service.context import Headers, Principal, Service
from holdfast.service.http.exchange import Exchange
from holdfast.service.http.proxies import Proxies
from holdfast.service.options import OidcOptions

logger = logging.getLogger("holdfast.access")

LONGEST_TOKEN = 16_384
"""A longer text is never accepted as a token."""

FETCH_S = 5.0
FETCH_BYTES = 1_000_000
REST_S = 10.0
"""The minimum pause before the provider is asked again: for its keys because a token names an unknown one, or for its
description because it could not be fetched.
"""

KEPT_S = 60.0
KEPT = 10_000
"""How many valid tokens are cached, and for how long: checking a signature takes a while."""

LOGIN_S = 600
LOGIN_COOKIE = "holdfast_login"
START_PATH, BACK_PATH = "/session/oidc", "/session/oidc/callback"

_JWT = re.compile(rb"bearer +([A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+)", re.IGNORECASE)
_KINDS = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}


class Login(Struct, frozen=True):
    """The data that is needed when a browser returns from the provider."""

    state: str
    nonce: str
    verifier: str


class Provider:
    """The description and keys that an OpenID provider publishes."""

    def __init__(self, options: OidcOptions) -> None:
        self.options = options
        self._about: dict[str, Any] | None = None
        self._keys: dict[str, Any] = {}
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()
        self._describing = asyncio.Lock()
        self._described_at = float("-inf")

    async def about(self) -> dict[str, Any]:
        """Return the provider's description of itself."""
        async with self._describing:
            return self._about or await self._describe()

    async def _describe(self) -> dict[str, Any]:
        now = asyncio.get_running_loop().time()
        if now - self._described_at < REST_S:  # the caller may be unauthenticated
            raise EngineError(f"the OpenID provider {self.options.issuer} cannot be reached", retry_after_ms=1_000)
        self._described_at = now
        place = f"{self.options.issuer.rstrip('/')}/.well-known/openid-configuration"
        about = await self._fetch(place)
        if about.get("issuer") != self.options.issuer:
            raise EngineError(f"the OpenID provider at {place} says that it is another issuer")
        self._about = about
        return about

    async def key(self, kid: str | None, algorithm: str) -> Any:
        """Return the provider's key with this id for this algorithm; None if there is none. Keys may have changed."""
        loop = asyncio.get_running_loop()
        for _ in range(2):
            asked_at = self._read_at
            found = self._found(kid, algorithm)
            is_old = loop.time() - asked_at > self.options.keys_s
            may_read = loop.time() - asked_at > REST_S
            if found is not None and not is_old:
                return found
            if not may_read:
                return found
            async with self._reading:
                if self._read_at == asked_at:
                    await self._read_keys()
        return self._found(kid, algorithm)

    def _found(self, kid: str | None, algorithm: str) -> Any:
        kind = _KINDS[algorithm[:2]]
        fitting = [key for key in self._keys.values() if key.key_type == kind]
        if kid is not None:
            return next((key for key in fitting if key.key_id == kid), None)
        return fitting[0] if len(fitting) == 1 else None

    async def _read_keys(self) -> None:
        import jwt

        try:
            listed = await self._fetch((await self.about())["jwks_uri"])
        finally:
            self._read_at = asyncio.get_running_loop().time()
        found: dict[str, Any] = {}
        for number, described in enumerate(listed.get("keys", [])):
            if described.get("use", "sig") != "sig" or described.get("kty") not in set(_KINDS.values()):
                continue
            try:
                found[str(described.get("kid", number))] = jwt.PyJWK(described)
            except jwt.PyJWTError:
                logger.warning("a key of the OpenID provider %s cannot be read", self.options.issuer)
        self._keys = found

    async def exchange(self, code: str, verifier: str, redirect_uri: str) -> str:
        """Exchange a code for the ID token of the provider."""
        options = self.options
        fields = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "client_id": options.client_id,
            "code_verifier": verifier,
        }
        if options.client_secret:
            fields["client_secret"] = options.client_secret
        answer = await self._fetch((await self.about())["token_endpoint"], fields)
        token = answer.get("id_token")
        if not isinstance(token, str):
            raise NotAuthenticated("the OpenID provider does not say who this is")
        return token

    async def _fetch(self, address: str, form: Mapping[str, str] | None = None) -> dict[str, Any]:
        import httpx

        check_provider_address(address)
        try:
            async with asyncio.timeout(FETCH_S), httpx.AsyncClient(follow_redirects=False) as http:
                answer = await (http.get(address) if form is None else http.post(address, data=dict(form)))
        except (httpx.HTTPError, TimeoutError) as problem:
            raise EngineError(f"the OpenID provider {self.options.issuer} cannot be reached") from problem
        if form is not None and 400 <= answer.status_code < 500:
            raise NotAuthenticated("the OpenID provider does not accept this sign-in; start again")
        if answer.status_code != 200 or len(answer.content) > FETCH_BYTES:
            raise EngineError(f"the OpenID provider {self.options.issuer} answers with {answer.status_code}")
        try:
            return msgspec.json.decode(answer.content, type=dict[str, Any])
        except msgspec.MsgspecError as problem:
            raise EngineError(
                f"the response of the OpenID provider {self.options.issuer} cannot be parsed"
            ) from problem


def check_provider_address(address: str) -> None:
    """Refuse a provider address where others could answer: without TLS, only this machine is allowed."""
    parts = urlsplit(address)
    if parts.scheme == "https" and parts.hostname:
        return
    if parts.scheme != "http" or not parts.hostname or not is_loopback(parts.hostname):
        raise InvalidInput("an OpenID provider is asked by https", field="issuer")


class OidcAccess(TokenAccess):
    """Identifies callers by tokens of an OpenID provider, and by tokens of Holdfast."""

    def __init__(self, app: App, most_age_s: float, options: OidcOptions, secrets: Secrets | None = None) -> None:
        super().__init__(app, most_age_s)
        self.options = options
        self.provider = Provider(options)
        self._secrets = secrets or SystemSecrets()
        self._valid: dict[bytes, tuple[float, Principal]] = {}

    async def __call__(self, headers: Headers) -> Principal:
        """Return the caller, or raise `NotAuthenticated`."""
        said = headers.get(b"authorization", b"").strip()
        found = _JWT.fullmatch(said) if len(said) <= LONGEST_TOKEN else None
        if found is None:
            return await super().__call__(headers)
        return await self._of_jwt(found[1])

    async def _of_jwt(self, text: bytes) -> Principal:
        loop, key = asyncio.get_running_loop(), sha256(text).digest()
        known = self._valid.get(key)
        if known is not None and loop.time() < known[0]:
            return known[1]
        claims = await self.claims_of(text.decode(), self.options.audience)
        principal = self.principal_of(claims)
        if len(self._valid) >= KEPT:
            self._valid.clear()
        left_s = float(claims["exp"]) + self.options.leeway_s - _seconds(await self.store.now())
        self._valid[key] = (loop.time() + min(KEPT_S, left_s), principal)
        return principal

    async def claims_of(self, text: str, audience: str, nonce: str | None = None) -> dict[str, Any]:
        """Return the claims of a token that is valid for this audience; raise `NotAuthenticated` if it is not."""
        import jwt

        options = self.options
        try:
            header = jwt.get_unverified_header(text)
            algorithm, kid = header.get("alg"), header.get("kid")
            if algorithm not in options.algorithms or "crit" in header:
                raise jwt.InvalidAlgorithmError("an algorithm that is not allowed")
            key = await self.provider.key(kid if isinstance(kid, str) else None, algorithm)
            if key is None:
                raise jwt.InvalidKeyError("a key that the provider does not have")
            claims: dict[str, Any] = jwt.decode(
                text,
                key.key,
                algorithms=[algorithm],
                audience=audience,
                issuer=options.issuer,
                leeway=options.leeway_s,
                options={"require": ["exp", "iat", "iss", "aud", "sub"]},
            )
        except jwt.PyJWTError as problem:
            logger.debug("a token of %s was refused: %s", options.issuer, type(problem).__name__)
            raise NotAuthenticated(
                "this token is not valid: it was not issued by the provider or not for this service, or it has expired"
            ) from None
        if nonce is not None:
            _check_id_token(claims, audience, nonce)
        return claims

    def principal_of(self, claims: Mapping[str, Any]) -> Principal:
        """Return the bearer of a token, and what they may do here."""
        options = self.options
        values = _texts(_claim(claims, options.roles_claim))
        mapped = [dict(options.role_map).get(value, "") if options.role_map else value for value in values]
        granted = [role for role in mapped if role in ROLES]
        scopes = frozenset().union(*(scopes_of(role) for role in granted)) if granted else frozenset[str]()
        name = _claim(claims, options.name_claim)
        subject = str(claims["sub"])
        return Principal(
            name=name if isinstance(name, str) and name else subject,
            tenant=self._tenant(claims),
            roles=tuple(dict.fromkeys(values)),
            scopes=scopes,
            is_admin=ADMIN in scopes,
            token_id=f"{OIDC}{sha256(f'{options.issuer}|{subject}'.encode()).hexdigest()[:32]}",
        )

    def _tenant(self, claims: Mapping[str, Any]) -> str | None:
        if not self.options.tenant_claim:
            return self.options.tenant or None
        tenant = _claim(claims, self.options.tenant_claim)
        if not isinstance(tenant, str) or not PLACE.fullmatch(tenant):
            raise NotAuthenticated("this token names no tenant")
        return tenant

    # --- signing in with a browser

    def begin(self) -> Login:
        """Begin a sign-in, and return the data that the browser has to bring back."""
        return Login(*(self._secrets.new_secret() for _ in range(3)))

    async def address_of(self, login: Login, redirect_uri: str) -> str:
        """Return the address at which a browser signs in."""
        challenge = base64.urlsafe_b64encode(sha256(login.verifier.encode()).digest()).rstrip(b"=").decode()
        asked = {
            "response_type": "code",
            "client_id": self.options.client_id,
            "redirect_uri": redirect_uri,
            "scope": self.options.scope,
            "state": login.state,
            "nonce": login.nonce,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        endpoint = (await self.provider.about())["authorization_endpoint"]
        check_provider_address(endpoint)
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(asked)}"

    async def finish(self, query: bytes, login: Login, redirect_uri: str) -> Principal:
        """Finish a sign-in, and return the caller."""
        fields = parse_qs(query.decode("ascii", errors="replace"), max_num_fields=20)
        given = {name: values[0] for name, values in fields.items() if len(values) == 1}
        if not compare_digest(given.get("state", "").encode(), login.state.encode()):
            raise NotAuthenticated("this sign-in was not started here; start again")
        if "code" not in given:
            raise NotAuthenticated("the OpenID provider has not signed the user in")
        token = await self.provider.exchange(given["code"], login.verifier, redirect_uri)
        if len(token) > LONGEST_TOKEN:
            raise MalformedRequest("the provider's token is too long")
        return self.principal_of(await self.claims_of(token, self.options.client_id, login.nonce))

    async def make_session(self, principal: Principal, seconds: float, entry: AuditEntry) -> str:
        """Create and return a session of a user who has signed in at the provider."""
        text, _ = await make_token(
            self.store,
            principal.name,
            scopes=sorted(principal.scopes or ()),
            roles=principal.roles,
            tenant=principal.tenant,
            expires_in_s=seconds,
            created_by=principal.token_id,
            session_of=principal.token_id,
            audit=replace(entry, by=principal.ref),
            is_granted=True,
        )
        return text


def _check_id_token(claims: Mapping[str, Any], client_id: str, nonce: str) -> None:
    """Refuse an ID token that was made for another sign-in, or for another client (OpenID Connect Core 3.1.3.7).

    A token with several audiences names the one to which it was issued (`azp`). An access token does so too, but there
    any client may be named.
    """
    if not compare_digest(str(claims.get("nonce", "")), nonce):
        raise NotAuthenticated("this sign-in was not started here; start again")
    audiences = claims["aud"]
    has_several = isinstance(audiences, list) and len(audiences) > 1
    if ("azp" in claims or has_several) and claims.get("azp") != client_id:
        raise NotAuthenticated("this token is not valid: it was issued to another client of the provider (azp)")


def _claim(claims: Mapping[str, Any], path: str) -> Any:
    """Return a claim by its path: `realm_access.roles` is nested in another claim."""
    if path in claims:
        return claims[path]
    found: Any = claims
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return value.split()
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _seconds(now: int) -> float:
    return now / 1_000_000


# --- the addresses at which browsers sign in


class SignInWays(Struct, frozen=True):
    """The ways to sign in: with a token, and with an OpenID provider."""

    oidc: bool


class _Browser:
    """Redirects browsers to the provider, and handles their return."""

    def __init__(self, service: Service, access: OidcAccess | None) -> None:
        self._service = service
        self._access = access
        self._proxies = Proxies(service.options)
        self._redirect_uri = service.options.public_url.rstrip("/") + BACK_PATH
        self._attempts = Meter()

    @property
    def can_sign_in(self) -> bool:
        return self._access is not None and bool(self._access.options.client_id)

    async def ways(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond with the ways to sign in. No authentication is needed."""
        await Exchange(self._service, scope, receive, send).answer(200, SignInWays(self.can_sign_in))

    async def begin(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Redirect a browser to the provider."""
        access, exchange = self._opened(), Exchange(self._service, scope, receive, send)
        login = access.begin()
        place = await access.address_of(login, self._redirect_uri)
        cookie = self._cookie(scope, _packed(login), LOGIN_S)
        await exchange.send_nothing(303, [(b"location", place.encode()), cookie])

    async def back(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle the return of a browser, and give it a session."""
        access, exchange = self._opened(), Exchange(self._service, scope, receive, send)
        login = _unpacked(exchange.headers, self._name(scope))
        if login is None:
            raise NotAuthenticated("this sign-in was not started here, or took too long; start again")
        entry = AuditEntry(
            entry_id=self._service.ids.new_id(),
            operation="session.sign_in",
            correlation_id=exchange.correlation_id,
        )
        client = client_of(scope)
        left_ms = self._attempts.left_ms(client, SIGN_INS_PER_MINUTE)
        if left_ms:  # each attempt causes work at the provider, and the caller is not known yet
            raise RateLimited("too many sign-ins from this address have failed", retry_after_ms=left_ms)
        self._attempts.count(client)
        try:
            principal = await access.finish(exchange.query, login, self._redirect_uri)
        except NotAuthenticated as refusal:
            who = "a caller by OpenID"
            self._service.refusals.log(who, "sign in", refusal.message, exchange.correlation_id, client)
            await note_failure(access, who, exchange, scope)
            raise
        self._attempts.count(client, -1)
        text = await access.make_session(
            principal, self._service.options.session_s, replace(entry, actor=principal.name)
        )
        age = f"; Max-Age={int(self._service.options.session_s)}"
        session = cookie_of(self._proxies.is_secure(scope), text, age)
        home = (b"location", f"{exchange.mount}/".encode())
        await exchange.send_nothing(303, [home, session, self._cookie(scope, "", 0)])

    def _opened(self) -> OidcAccess:
        if self._access is None or not self.can_sign_in:
            raise NotFound("this service has no OpenID provider to sign in with")
        return self._access

    def _name(self, scope: Scope) -> str:
        return f"__Host-{LOGIN_COOKIE}" if self._proxies.is_secure(scope) else LOGIN_COOKIE

    def _cookie(self, scope: Scope, value: str, age_s: int) -> tuple[bytes, bytes]:
        # Lax: the browser sends it when the provider redirects back.
        secure = "; Secure" if self._proxies.is_secure(scope) else ""
        text = f"{self._name(scope)}={value}; Path=/; HttpOnly; SameSite=Lax{secure}; Max-Age={age_s}"
        return b"set-cookie", text.encode()


def _packed(login: Login) -> str:
    return ".".join((login.state, login.nonce, login.verifier))


def _unpacked(headers: Headers, wanted: str) -> Login | None:
    for part in headers.get(b"cookie", b"").split(b";"):
        name, _, value = part.strip().partition(b"=")
        parts = value.decode("ascii", errors="replace").split(".")
        if name == wanted.encode() and len(parts) == 3 and all(len(each) >= 32 for each in parts):
            return Login(*parts)
    return None


def oidc_routes(service: Service) -> list[Route]:
    """Return the routes at which browsers sign in."""
    access = service.authenticate if isinstance(service.authenticate, OidcAccess) else None
    browser = _Browser(service, access)
    return [
        Route("/session/ways", _Asgi(browser.ways), methods=["GET"]),
        Route(START_PATH, _Asgi(browser.begin), methods=["GET"]),
        Route(BACK_PATH, _Asgi(browser.back), methods=["GET"]),
    ]


class _Asgi:
    """A method as an ASGI application."""

    def __init__(self, answer: ASGIApp) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send)
