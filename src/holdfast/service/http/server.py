"""The service behind a socket: TLS, uvicorn, admission of connections, and a graceful stop at SIGTERM."""

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.routing import BaseRoute

from holdfast.app import App
from holdfast.engine.options import NodeOptions
from holdfast.errors import InvalidInput
from holdfast.service.auth.csrf import check_open, is_loopback
from holdfast.service.auth.oidc import OidcAccess, check_provider_address
from holdfast.service.auth.tokens import HOW_TO_BEGIN, TokenAccess
from holdfast.service.context import Authenticate, Headers, Principal, Service, make_service, open_access
from holdfast.service.http.exchange import HEAD_BYTES
from holdfast.service.http.front import Front
from holdfast.service.http.protocol import ConnectionLimits, connection_class
from holdfast.service.options import ServiceOptions
from holdfast.settings import without_password
from holdfast.store.port import Store
from holdfast.termination import termination_signal

logger = logging.getLogger("holdfast.service")


class _Server(uvicorn.Server):
    """Uvicorn without its signal handling, which the process does itself, and with a notification at its start."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_begun = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.has_begun.set()


def check_access(options: ServiceOptions, authenticate: Authenticate | None) -> Authenticate:
    """Return the authentication of a service. Access is open only if that was configured, and then it is logged
    (API-4).
    """
    if authenticate is not None and options.is_open:
        raise InvalidInput("access is either open or authenticated, not both", field="is_open")
    if authenticate is not None:
        return authenticate
    if not options.is_open:
        raise InvalidInput("this service has no authentication; name one, or choose open access")
    logger.warning("access is open: every caller that can reach %s:%d may do everything", options.host, options.port)
    is_local = is_loopback(options.host)

    async def admit_here(headers: Headers) -> Principal:
        check_open(headers, is_local)
        return await open_access(headers)

    return admit_here


def access_of(app: App, options: ServiceOptions) -> TokenAccess:
    """Return the authentication of callers: tokens of Holdfast, and an OpenID provider if there is one."""
    if options.oidc is None:
        return TokenAccess(app, options.tokens_s)
    check_provider_address(options.oidc.issuer)
    try:
        import jwt  # noqa: F401
    except ImportError as problem:
        raise InvalidInput(
            "an OpenID provider needs a package: pip install 'holdfast[oidc]'", field="oidc"
        ) from problem
    return OidcAccess(app, options.tokens_s, options.oidc)


@asynccontextmanager
async def listening(
    service: Service, routes: Sequence[BaseRoute] = (), listener: socket.socket | None = None
) -> AsyncIterator[int]:
    """Serve while the context is open; yields the port. At the end, running requests may finish for a limited time.

    A `listener` is an already bound socket; it is closed here, like one that is created here.
    """
    options = service.options
    config = uvicorn.Config(
        Front(service, routes),
        http=connection_class(
            options.body_s, limits=ConnectionLimits(options.connections, options.connections_per_address)
        ),
        host=options.host,
        port=options.port,
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="error",  # errors of callers are not worth a log line each
        server_header=False,
        ws="none",
        proxy_headers=False,  # `Proxies` decides which proxies are trusted
        ssl_certfile=options.tls_certificate or None,
        ssl_keyfile=options.tls_key or None,
        timeout_keep_alive=int(options.idle_s),
        timeout_graceful_shutdown=int(options.drain_s),
        h11_max_incomplete_event_size=HEAD_BYTES,
    )
    _prepare_tls(config, options)
    listener = listener or bind(options)
    server = _Server(config)
    serving = asyncio.create_task(server.serve([listener]), name="http")
    try:
        with service.watchdog.watching(options.loop_s):
            await server.has_begun.wait()
            yield listener.getsockname()[1]
    finally:
        service.stopping.set()
        server.should_exit = True
        await serving


def _prepare_tls(config: uvicorn.Config, options: ServiceOptions) -> None:
    """Read certificate and key before anything is bound, and refuse old versions of TLS."""
    try:
        config.load()
    except (OSError, ssl.SSLError) as problem:
        raise InvalidInput(f"the certificate for TLS cannot be used: {problem}", field="tls_certificate") from problem
    if config.ssl is not None:
        config.ssl.minimum_version = (
            ssl.TLSVersion.TLSv1_3 if options.tls_min_version == "1.3" else ssl.TLSVersion.TLSv1_2
        )


def bind(options: ServiceOptions) -> socket.socket:
    """Return a socket bound to the address of a service."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # The protocol is explicit because asyncio disables Nagle's algorithm only then: it would cost 40 ms per response.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # otherwise data that a client does not read is kept
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(options.stall_s * 1_000))
        listener.bind((options.host, options.port))
        return listener
    except (OSError, OverflowError) as problem:
        listener.close()
        place = f"{options.host}:{options.port}"
        raise InvalidInput(f"cannot listen on {place}: {problem}", field="port") from problem


def how_to_begin(store: str | Store | None) -> str:
    """Return the instruction for creating the first token of a store."""
    return HOW_TO_BEGIN.replace("ADDRESS", without_password(store)) if isinstance(store, str) else HOW_TO_BEGIN


async def serve(
    app: App,
    store: str | Store | None = None,
    *,
    options: ServiceOptions | None = None,
    node: NodeOptions | None = None,
    authenticate: Authenticate | None = None,
    routes: Sequence[BaseRoute] = (),
    listener: socket.socket | None = None,
) -> None:
    """Serve an app until SIGTERM or SIGINT. Its node executes workflows unless `node` has `takes_runs=False`.

    Callers need a token of the store, unless `authenticate` returns who they are, or access is open. At the end it
    accepts no more connections, then finishes running requests, then stops the node. A second signal ends the process
    at once.
    """
    options = options or ServiceOptions()
    if authenticate is None and not options.is_open:
        authenticate = access_of(app, options)
    access = check_access(options, authenticate)
    with termination_signal() as asked:
        async with app.node(store, options=node) as opened:
            service = make_service(app, options, access)
            if type(access) is TokenAccess and not await access.has_any():
                raise InvalidInput(f"there is no token yet: {how_to_begin(store)}; or choose open access (--open)")
            async with listening(service, routes, listener) as port:
                scheme = "https" if options.tls_certificate else "http"
                logger.info("app %s is served at %s://%s:%d", app.name, scheme, options.host, port)
                await opened.run_until(asked)
                logger.info("the service stops because of %s; once more ends it at once", asked.result())
    logger.info("the service has stopped")
