"""Options of a service."""

import re

from msgspec import Struct

from holdfast.errors import InvalidInput
from holdfast.limits import check_types

ASYMMETRIC = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"})
DAY_S = 86_400.0
TOKEN_S = 90 * DAY_S
"""The default lifetime of a token."""

LONGEST_TOKEN_S = 366 * DAY_S
"""The maximum lifetime of a token, unless the service sets another one."""


class OidcOptions(Struct, frozen=True, kw_only=True):
    """Which OpenID provider authenticates callers, and what its claims mean."""

    issuer: str
    """The provider, as its tokens name it, such as https://login.example.com/realms/ours."""

    audience: str
    """The audience of tokens for the API: this service, as the provider knows it."""

    client_id: str = ""
    """The client with which the page signs people in. Empty if it does not."""

    client_secret: str = ""
    """The secret of that client, if it has one."""

    scope: str = "openid profile email"
    """The scopes that the page requests from the provider."""

    name_claim: str = "sub"
    """The claim with the caller's name."""

    roles_claim: str = "roles"
    """The claim with the caller's roles, such as `groups` or `realm_access.roles`. They also count for tasks."""

    role_map: tuple[tuple[str, str], ...] = ()
    """Which value of that claim means which role. If empty, a value that is the name of a role counts."""

    tenant_claim: str = ""
    """The claim with the tenant. A token without it is refused."""

    tenant: str = ""
    """The tenant of all callers if there is no such claim. Empty: callers see all tenants."""

    algorithms: tuple[str, ...] = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA")
    """The algorithms with which tokens may be signed. All use a key pair."""

    leeway_s: float = 30.0
    """How much the provider's clock may differ from this one."""

    keys_s: float = 300.0
    """How long the provider's keys are used before they are read again."""

    def __post_init__(self) -> None:
        check_types(self)
        if not self.issuer or not self.audience:
            raise InvalidInput("an OpenID provider has an issuer, and its tokens an audience", field="issuer")
        unknown = set(self.algorithms) - ASYMMETRIC
        if unknown or not self.algorithms:
            raise InvalidInput(f"algorithms: of {', '.join(sorted(ASYMMETRIC))}", field="algorithms")


class ServiceOptions(Struct, frozen=True, kw_only=True):
    """How a service behaves. Durations end in `_s`."""

    host: str = "127.0.0.1"
    """The address to listen on. The default is for this machine only."""

    port: int = 8321
    """The port to listen on. 0 takes a free port."""

    public_url: str = ""
    """The address of the service in browsers, such as https://holdfast.example.com, if it is behind a proxy."""

    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks of proxies whose `Forwarded` and `X-Forwarded-*` headers are trusted."""

    tls_certificate: str = ""
    """The file with the certificate and its chain, to serve HTTPS."""

    tls_key: str = ""
    """The file with the key of the certificate, if it is another file."""

    tls_min_version: str = "1.2"
    """The oldest accepted version of TLS: 1.2 or 1.3."""

    oidc: OidcOptions | None = None
    """The OpenID provider that authenticates callers, in addition to tokens of the store."""

    is_open: bool = False
    """Admit every caller. Without it, a service without authentication does not start (API-4)."""

    tokens_s: float = 2.0
    """How long a token that another process has revoked may still be accepted. In this process it ends at once."""

    token_s: float = TOKEN_S
    """The default lifetime of a token that is made over the API."""

    longest_token_s: float = LONGEST_TOKEN_S
    """The longest lifetime of a token that is made over the API."""

    session_s: float = 12 * 3_600.0
    """How long a session of a browser lasts: a working day."""

    refusals_per_minute: int = 30
    """How many refusals a caller may get before all their requests to runs are rate limited. The engine records
    refusals in the run's history, and a caller without permission must not fill it."""

    body_bytes: int = 2 * 1024 * 1024
    """The largest body of a request: a few batches of the largest signals."""

    body_s: float = 10.0
    """How long the body of a request may take to arrive; also the head of a connection's first request."""

    request_s: float = 30.0
    """How long an operation may take, in addition to the time that the caller asks it to wait."""

    wait_s: float = 60.0
    """The longest time that a caller may ask an operation to wait."""

    answer_bytes: int = 8 * 1024 * 1024
    """The largest response, also of a batch. Pages end before they reach it and have a cursor for the next one."""

    search_rows: int = 50_000
    """How many rows one request for a search in text reads. If the search has not ended, the response has a cursor."""

    search_s: float = 1.0
    """About how long one request for a search in text takes."""

    reads_per_minute: int = 6_000
    """How much a token may list and search in a minute: a list counts 1, a search in text 20."""

    tenant_reads_per_minute: int = 30_000
    """How much all tokens of a tenant together may list and search in a minute."""

    lists_at_once: int = 2
    """The largest number of concurrent lists and searches of one tenant, or of a token of all tenants. Others wait."""

    batch_calls: int = 100
    """The largest number of calls in one batch of JSON-RPC."""

    connections: int = 2_000
    """The largest number of connections. Callers beyond it must retry later. A few more are reserved for
    `/v1/health`."""

    connections_per_address: int = 1_000
    """The largest number of connections from one address. Behind a proxy, set it to `connections`."""

    sending_bytes: int = 256 * 1024 * 1024
    """The largest total size of responses that callers have not read yet. Callers beyond it must retry later."""

    receiving_bytes: int = 256 * 1024 * 1024
    """The largest total size of large bodies that are being received. One caller, and all unauthenticated callers
    together, may use an eighth of it. Callers beyond it must retry later."""

    idle_s: float = 30.0
    """How long an idle connection is kept."""

    drain_s: float = 10.0
    """How long running requests may continue after the service is asked to stop."""

    compress_bytes: int = 16 * 1024
    """Larger responses are compressed, if the caller accepts that."""

    streams: int = 1_000
    """The largest number of event streams. Callers beyond it must retry later."""

    streams_per_token: int = 100
    """The largest number of event streams of one token."""

    streams_per_tenant: int = 500
    """The largest number of event streams of all tokens of one tenant."""

    heartbeat_s: float = 15.0
    """The longest silence of an event stream. Then, and before it sends anything, its reader is checked."""

    stall_s: float = 30.0
    """How long a reader of an event stream may read nothing before it is disconnected."""

    watch_poll_s: float = 0.5
    """How often changes are polled without a notification, while there are subscribers."""

    watch_rest_s: float = 0.02
    """The least time between two polls for changes. Changes in between are read together."""

    loop_s: float = 0.5
    """How long the event loop, which API, node and leases share, may be blocked before it is logged. 0: never."""

    list_rest_s: float = 0.1
    """The least time between two messages to a subscriber of lists."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.public_url and not re.fullmatch(r"https?://[^/?#@\s]+/?", self.public_url):
            raise InvalidInput("public_url is an address such as https://holdfast.example.com", field="public_url")
        if self.tls_min_version not in ("1.2", "1.3"):
            raise InvalidInput("tls_min_version is 1.2 or 1.3", field="tls_min_version")
        if self.tls_key and not self.tls_certificate:
            raise InvalidInput("a key for TLS needs its certificate", field="tls_certificate")
        if self.oidc is not None and self.is_open:
            raise InvalidInput("access is either open, or an OpenID provider says who may call", field="oidc")
        if self.oidc is not None and self.oidc.client_id and not self.public_url:
            raise InvalidInput("to sign people in, the service must know its public_url", field="public_url")
        for field in (
            "port",
            "refusals_per_minute",
            "body_bytes",
            "answer_bytes",
            "search_rows",
            "reads_per_minute",
            "tenant_reads_per_minute",
            "lists_at_once",
            "batch_calls",
            "connections",
            "connections_per_address",
            "sending_bytes",
            "receiving_bytes",
            "streams_per_token",
            "streams_per_tenant",
            "compress_bytes",
            "streams",
        ):
            value = getattr(self, field)
            if type(value) is not int or value < (0 if field == "port" else 1):
                raise InvalidInput(f"{field} is a whole number from 1, not {value!r}", field=field)
        for field in (name for name in self.__struct_fields__ if name.endswith("_s")):
            value = getattr(self, field)
            if not isinstance(value, int | float) or not value >= 0:
                raise InvalidInput(f"{field} is a number of seconds, not {value!r}", field=field)
