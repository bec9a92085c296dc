"""Holdfast in a Django project: its app and store from the settings, a client for views, API and page next to the site.

::

    INSTALLED_APPS = [..., "holdfast.django"]
    HOLDFAST = {"APP": "shop.workflows:app", "STORE": "postgresql://localhost/shop"}

`client()` is for views and scripts, in every process of a server that forks. `asgi_application` serves API and page
below a prefix, for the project's own staff. `manage.py holdfast node` runs workflows. May not: touch the settings, the
database or the middleware of the project.
"""

import threading
from collections.abc import Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from asgiref.sync import sync_to_async
from django.conf import settings
from django.contrib.auth import get_user
from django.core.exceptions import ImproperlyConfigured
from django.http.cookie import parse_cookie
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.app import App
from holdfast.cli.app_loader import load_app
from holdfast.client import SyncClient
from holdfast.engine.options import NodeOptions
from holdfast.errors import HoldfastError, NotAuthenticated, NotPermitted
from holdfast.service.auth.roles import ADMIN, ROLES
from holdfast.service.auth.tokens import TokenAccess, given_token
from holdfast.service.context import Authenticate, Headers, Principal
from holdfast.service.http.asgi import AsgiService, asgi
from holdfast.service.options import ServiceOptions

SETTING = "HOLDFAST"
KNOWN = frozenset({"APP", "STORE", "PREFIX", "NODE", "OPTIONS", "GROUPS"})
PREFIX = "/holdfast"
GROUPS: Mapping[str, str] = {f"holdfast-{role}": role for role in ROLES}
"""The role of each Django group, unless the settings say otherwise."""

_lock = threading.Lock()
_clients: list[SyncClient] = []


def configuration() -> dict[str, Any]:
    """Return the setting `HOLDFAST`; raise `ImproperlyConfigured` if it is missing or contains unknown keys."""
    given = getattr(settings, SETTING, None)
    if not isinstance(given, dict) or not isinstance(given.get("APP"), str):
        raise ImproperlyConfigured(f'{SETTING} names the app: {SETTING} = {{"APP": "shop.workflows:app"}}')
    if unknown := sorted(set(given) - KNOWN):
        raise ImproperlyConfigured(
            f"{SETTING}: {', '.join(unknown)} is not known; known are {', '.join(sorted(KNOWN))}"
        )
    return given


def app() -> App:
    """Return the app that the settings name."""
    name = configuration()["APP"]
    try:
        return load_app(name)
    except HoldfastError as problem:
        raise ImproperlyConfigured(f"{SETTING}: {problem}") from problem


def client() -> SyncClient:
    """Return the client of this project, for views and scripts. Its first call opens it, once in each process."""
    with _lock:
        if not _clients:
            _clients.append(SyncClient(app(), configuration().get("STORE")))
        return _clients[0]


async def authenticate_staff(headers: Headers) -> Principal:
    """Return the staff member who is signed in to Django; raise if there is none, or if none of their roles is known.

    A superuser may do everything. Others have the roles of their groups (`holdfast-viewer`, `holdfast-operator`,
    `holdfast-engineer`, `holdfast-admin`, or as `GROUPS` in the settings says); tasks know them by all their groups.
    """
    principal: Principal = await sync_to_async(_member)(headers)
    return principal


def _member(headers: Headers) -> Principal:
    cookies = parse_cookie(headers.get(b"cookie", b"").decode("latin-1"))
    key = cookies.get(settings.SESSION_COOKIE_NAME)
    session = import_module(settings.SESSION_ENGINE).SessionStore(key)
    user = get_user(SimpleNamespace(session=session))
    if not (key and user.is_authenticated and user.is_active and user.is_staff):
        raise NotAuthenticated("sign in to the admin site as a member of the staff")
    groups = tuple(user.groups.values_list("name", flat=True))
    roles = configuration().get("GROUPS", GROUPS)
    scopes = frozenset[str]().union(*(ROLES.get(roles.get(group, ""), frozenset()) for group in groups))
    if user.is_superuser:
        scopes = ROLES["admin"]
    if not scopes:
        raise NotPermitted(f"{user.get_username()!r} is in no group that has a role here")
    return Principal(
        name=user.get_username(),
        token_id=f"django:{user.pk}",
        scopes=scopes,
        roles=groups,
        is_admin=ADMIN in scopes,
        is_session=True,
    )


def _staff_or_tokens(known: App, options: ServiceOptions) -> Authenticate:
    tokens = TokenAccess(known, options.tokens_s)

    async def authenticate(headers: Headers) -> Principal:
        return await (tokens(headers) if given_token(headers) is not None else authenticate_staff(headers))

    return authenticate


class _BesideSite:
    """API and page below a prefix, and the site everywhere else. The node lives as long as the server's lifespan."""

    def __init__(self, site: ASGIApp, service: AsgiService, prefix: str) -> None:
        self._site = site
        self._service = service
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root = scope.get("root_path", "") + self._prefix
        path = scope.get("path", "")
        if scope["type"] == "lifespan" or path.startswith(f"{root}/"):
            await self._service({**scope, "root_path": root}, receive, send)
        elif scope["type"] == "http" and path == root:
            await RedirectResponse(f"{root}/")(scope, receive, send)
        else:
            await self._site(scope, receive, send)


def asgi_application(site: ASGIApp) -> ASGIApp:
    """Return the project's ASGI application with API and page below the prefix of the settings: for `asgi.py`.

    Callers are signed-in Django staff (`authenticate_staff`), or use tokens. The process starts runs and shows them;
    with `NODE` in the settings, a `NodeOptions` or True, it runs workflows too.
    """
    given, known = configuration(), app()
    prefix = given.get("PREFIX", PREFIX)
    if not isinstance(prefix, str) or not prefix.startswith("/") or prefix.endswith("/"):
        raise ImproperlyConfigured(f"{SETTING}: PREFIX begins with a slash and does not end with one, as {PREFIX} does")
    options = given.get("OPTIONS", ServiceOptions())
    node = given.get("NODE") or NodeOptions(takes_runs=False, relays=False)
    service = asgi(
        known,
        given.get("STORE"),
        options=options,
        node=NodeOptions() if node is True else node,
        authenticate=None if options.is_open else _staff_or_tokens(known, options),
    )
    return _BesideSite(site, service, prefix)


__all__ = ["app", "asgi_application", "authenticate_staff", "client", "configuration"]
