"""`holdfast server`: the API of an app, with or without a node in the same process."""

import asyncio
import logging
import os
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Group, Parameter, validators

from holdfast.cli.app_loader import load_app, node_options, settings_at
from holdfast.cli.exit_codes import OK
from holdfast.engine.observe.logs import JsonFormatter, PlainFormatter
from holdfast.errors import InvalidInput
from holdfast.service.auth.roles import ROLES
from holdfast.service.options import OidcOptions, ServiceOptions
from holdfast.settings import OIDC_CLIENT_SECRET

HOST, PORT = ServiceOptions().host, ServiceOptions().port
Port = Annotated[int, Parameter(validator=validators.Number(gte=0, lte=65_535))]


def _said(help: str) -> Any:
    return Parameter(show_default=False, negative=(), help=help)


@Parameter(name="*", group=Group("TLS and proxies", sort_key=50))
@dataclass(frozen=True)
class Front:
    """How callers reach the service."""

    public_url: Annotated[str, _said("The address for browsers, if the server is behind a proxy.")] = ""
    trusted_proxy: Annotated[
        tuple[str, ...],
        _said("The proxy, or its network, whose Forwarded and X-Forwarded-* are trusted; may be repeated."),
    ] = ()
    tls_certificate: Annotated[str, _said("The file with a certificate and its chain, to serve by https.")] = ""
    tls_key: Annotated[str, _said("The file with its private key, if that is another file.")] = ""
    tls_min_version: Annotated[str, Parameter(help="The oldest version of TLS: 1.2 or 1.3.")] = "1.2"


@Parameter(name="*", group=Group("OpenID Connect", sort_key=51))
@dataclass(frozen=True)
class Oidc:
    """The OpenID provider that authenticates callers, in addition to tokens."""

    oidc_issuer: Annotated[str, _said("The provider, such as https://login.example.com.")] = ""
    oidc_audience: Annotated[str, _said("The audience that the provider's tokens must name.")] = ""
    oidc_client_id: Annotated[
        str, _said(f"The client id for sign-in on the page; its secret is read from {OIDC_CLIENT_SECRET}.")
    ] = ""
    oidc_name_claim: Annotated[str, Parameter(help="The claim with the caller's name.")] = "sub"
    oidc_roles_claim: Annotated[str, Parameter(help="The claim with the caller's roles or groups.")] = "roles"
    oidc_role: Annotated[
        tuple[str, ...], _said("A value of that claim and its role, such as ops=operator; may be repeated.")
    ] = ()
    oidc_tenant_claim: Annotated[str, _said("The claim with the tenant; a token without it is refused.")] = ""
    oidc_tenant: Annotated[str, _said("The tenant of all callers, if there is no such claim.")] = ""

    def options(self) -> OidcOptions | None:
        """Return the options of the provider, or None."""
        if not self.oidc_issuer:
            return None
        return OidcOptions(
            issuer=self.oidc_issuer,
            audience=self.oidc_audience,
            client_id=self.oidc_client_id,
            client_secret=os.environ.get(OIDC_CLIENT_SECRET, ""),
            name_claim=self.oidc_name_claim,
            roles_claim=self.oidc_roles_claim,
            role_map=tuple(_pair(given) for given in self.oidc_role),
            tenant_claim=self.oidc_tenant_claim,
            tenant=self.oidc_tenant,
        )


def _pair(given: str) -> tuple[str, str]:
    value, separator, role = given.rpartition("=")
    if not separator or role not in ROLES:
        raise InvalidInput(f"--oidc-role is VALUE=ROLE, with a role of {', '.join(ROLES)}", field="oidc_role")
    return value, role


def server(
    target: str,
    /,
    *,
    store: str | None = None,
    host: str = HOST,
    port: Port = PORT,
    node: bool = True,
    queue: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = (),
    open_access: Annotated[bool, Parameter(name="--open", negative="", show_default=False)] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False,
    front: Front | None = None,
    oidc: Oidc | None = None,
) -> int:
    """Serve the API and the page of an app until SIGTERM or Ctrl-C; run its workflows too, unless --no-node is given.

    Parameters
    ----------
    target: str
        The app: shop.py, shop.py:app or pkg.module:app.
    store: str
        The address of the store, such as sqlite:///orders.db; otherwise HOLDFAST_STORE, then sqlite:///holdfast.db.
        A store that does not exist is created.
    host: str
        The address to listen on; the default is reachable from this machine only.
    port: int
        The port to listen on; 0 takes a free one.
    node: bool
        Whether to run workflows in this process; with --no-node other nodes run them.
    queue: str
        A queue whose activities this process executes; may be repeated.
    open_access: bool
        Accept every caller, without a token.
    as_json: bool
        Write the log as lines of JSON, with run and step.
    """
    from holdfast.service.http.server import serve  # imported here, so that other commands start faster

    app = load_app(target)
    set_up_logging(as_json)
    front = front or Front()
    options = ServiceOptions(
        host=host,
        port=port,
        is_open=open_access,
        public_url=front.public_url,
        trusted_proxies=front.trusted_proxy,
        tls_certificate=front.tls_certificate,
        tls_key=front.tls_key,
        tls_min_version=front.tls_min_version,
        oidc=None if oidc is None else oidc.options(),
    )
    of_node = node_options(store, takes_runs=node, queues=queue)
    asyncio.run(serve(app, settings_at(store).store, options=options, node=of_node))
    return OK


def set_up_logging(as_json: bool = False) -> None:
    """Log to stderr, with times, as servers do. Uvicorn only logs problems."""
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else PlainFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
