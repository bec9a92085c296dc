"""How a service behaves."""

import re

from msgspec import Struct

from holdfast.errors import InvalidInput
from holdfast.limits import check_types

ASYMMETRIC = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"})
DAY_S = 86_400.0
TOKEN_S = 90 * DAY_S
"""How long a token is good for that is made without saying."""

LONGEST_TOKEN_S = 366 * DAY_S
"""How long a token is good for at most, unless the service says otherwise."""


class OidcOptions(Struct, frozen=True, kw_only=True):
    """Which OpenID provider says who callers are, and what its claims mean here."""

    issuer: str
    """The provider, as its tokens name it, such as https://login.example.com/realms/ours."""

    audience: str
    """Whom tokens at the API are for: this service, as the provider knows it."""

    client_id: str = ""
    """As whom the page signs people in; empty if it does not."""

    client_secret: str = ""
    """The secret of that client, if it has one."""

    scope: str = "openid profile email"
    """What the page asks the provider for."""

    name_claim: str = "sub"
    """Which claim is the caller's name."""

    roles_claim: str = "roles"
    """Which claim holds the caller's roles, such as `groups` or `realm_access.roles`. They count for tasks too."""

    role_map: tuple[tuple[str, str], ...] = ()
    """Which value of that claim is which role here. Without any, a value counts that is the name of a role."""

    tenant_claim: str = ""
    """Which claim names the tenant. A token without it is refused."""

    tenant: str = ""
    """Whose all callers are, where no claim says it; empty for callers who see all tenants."""

    algorithms: tuple[str, ...] = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA")
    """How tokens may be signed: always with a key pair."""

    leeway_s: float = 30.0
    """By how much the provider's clock may differ from this one."""

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
    """Where to listen. The default is for this machine only."""

    port: int = 8321
    """Where to listen; 0 takes a port that is free."""

    public_url: str = ""
    """Where browsers find the service, such as https://holdfast.example.com, if a proxy stands before it."""

    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks of proxies whose `Forwarded` and `X-Forwarded-*` headers are trusted."""

    tls_certificate: str = ""
    """The file with the certificate and its chain, to be served by https."""

    tls_key: str = ""
    """The file with the key of the certificate, if it is another."""

    tls_min_version: str = "1.2"
    """The oldest version of TLS that is spoken: 1.2 or 1.3."""

    oidc: OidcOptions | None = None
    """The OpenID provider that says who callers are, beside tokens of our own."""

    is_open: bool = False
    """Admit every caller. Without this a service that has no authentication does not start (API-4)."""

    tokens_s: float = 2.0
    """For how long a token that another process has revoked may still be taken. In this process it ends at once."""

    token_s: float = TOKEN_S
    """How long a token is good for that is made over the API without saying."""

    longest_token_s: float = LONGEST_TOKEN_S
    """How long a token that is made over the API may be good for."""

    session_s: float = 12 * 3_600.0
    """How long a session of a browser lasts: a working day."""

    refusals_per_minute: int = 30
    """How often a caller may be refused before everything that they send to runs is rate limited.

    The engine records its refusals in the run's history, which a caller without permission must not fill.
    """

    body_bytes: int = 2 * 1024 * 1024
    """The largest body of a request: some batches of the largest signals."""

    body_s: float = 10.0
    """How long the body of a request may take to arrive, and the head of the first one of a connection."""

    request_s: float = 30.0
    """How long an operation may take, beside what the caller asks it to wait."""

    wait_s: float = 60.0
    """The longest that a caller may ask to wait for something."""

    answer_bytes: int = 8 * 1024 * 1024
    """The largest answer, of a batch too. Pages end before they reach it, and say where to go on."""

    search_rows: int = 50_000
    """How many rows one request looks at for words; a search that has not ended by then says where to go on."""

    search_s: float = 1.0
    """For how long one request looks for words, about."""

    reads_per_minute: int = 6_000
    """How much a token may list and search within a minute: a list counts 1, a search for words 20."""

    tenant_reads_per_minute: int = 30_000
    """How much all tokens of a tenant may list and search within a minute, together."""

    lists_at_once: int = 2
    """How many lists and searches of one tenant, or of a token of all tenants, are read at once; others wait."""

    batch_calls: int = 100
    """The most calls in one batch of JSON-RPC."""

    connections: int = 2_000
    """How many connections are served at once; more have to retry later. A few more are for `/v1/health`."""

    connections_per_address: int = 1_000
    """How many of them one address may have. Behind a proxy all are of one: give it as many as `connections` then."""

    sending_bytes: int = 256 * 1024 * 1024
    """How large the answers are together that callers have not taken yet; more have to retry later."""

    receiving_bytes: int = 256 * 1024 * 1024
    """How large the large bodies are together that are being received; an eighth of it for one caller, and for all who
    are not known yet. More have to retry later."""

    idle_s: float = 30.0
    """How long a connection is kept that asks nothing."""

    drain_s: float = 10.0
    """How long requests that are under way may go on once the service is asked to stop."""

    compress_bytes: int = 16 * 1024
    """From what size on answers are compressed for callers that take it."""

    streams: int = 1_000
    """How many event streams are open at once; more have to retry later."""

    streams_per_token: int = 100
    """How many of them are of one token."""

    streams_per_tenant: int = 500
    """How many of them are of all tokens of one tenant."""

    heartbeat_s: float = 15.0
    """How long an event stream is silent at most. Then, and when it has something to send, its reader is checked."""

    stall_s: float = 30.0
    """How long a reader of an event stream may take nothing before it is dropped."""

    watch_poll_s: float = 0.5
    """How often changes are polled without a notification, while there are subscribers."""

    watch_rest_s: float = 0.02
    """How long to wait at least between two looks for changes: what comes in between is looked at together."""

    loop_s: float = 0.5
    """How long the event loop, which API, node and leases share, may be held up before it is logged; 0 for ever."""

    list_rest_s: float = 0.1
    """How long to wait at least between two answers to one who watches lists."""

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
