"""The service: every operation declared once, and the transports that are derived from them.

`operations/` declares what callers can do, typed and without a transport. `http/rest` and `http/jsonrpc` derive their
transports from it, `http/openapi` describes it, `http/problems` turns errors into responses, `http/front` is the ASGI
application, and `http/server` runs it under uvicorn.

The names below are public. They are imported when they are first used: a command that only calls a service does not
load a web server.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.service.auth.tokens import make_token
    from holdfast.service.context import Authenticate, Headers, Principal
    from holdfast.service.http.asgi import AsgiService, asgi
    from holdfast.service.http.server import serve
    from holdfast.service.options import OidcOptions, ServiceOptions

_LAZY = {
    "AsgiService": "holdfast.service.http.asgi",
    "Authenticate": "holdfast.service.context",
    "Headers": "holdfast.service.context",
    "OidcOptions": "holdfast.service.options",
    "Principal": "holdfast.service.context",
    "ServiceOptions": "holdfast.service.options",
    "asgi": "holdfast.service.http.asgi",
    "make_token": "holdfast.service.auth.tokens",
    "serve": "holdfast.service.http.server",
}

__all__ = [
    "AsgiService",
    "Authenticate",
    "Headers",
    "OidcOptions",
    "Principal",
    "ServiceOptions",
    "asgi",
    "make_token",
    "serve",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value
