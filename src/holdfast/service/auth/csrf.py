"""What the head of a request says about who sends it, and from where."""

import re
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

from holdfast.core.access import PREFIX, read_token
from holdfast.errors import MalformedRequest, NotPermitted

SESSION_COOKIE = b"holdfast_session"
SECURE_SESSION_COOKIE = b"__Host-holdfast_session"
"""What the cookie is called over https: browsers take this name only from this very host, and only by TLS."""

OWN_HEADER = b"x-holdfast-request"
"""A header that a page of another origin cannot send, because nothing here lets browsers do that."""

MOST_BYTES = 200
"""A longer text is no token, whatever it says."""

_BEARER = re.compile(rb"bearer +([^\s,]+)", re.IGNORECASE)
_IN_QUERY = re.compile(rb"(?:hf|holdfast)_[0-9a-f]{16}_|(?:^|&)(?:access_)?token=", re.IGNORECASE)
_ONCE = frozenset({b"authorization", b"cookie", b"origin", b"host"})


HEAD_BYTES = 64 * 1024
"""How large the head of a request may be. Addresses, tokens and cookies are much smaller."""


def check_framing(headers: Sequence[tuple[bytes, bytes]], address_bytes: int) -> None:
    """Refuse a head that is too large, and a body whose end different readers would see in different places.

    A parser counts only what it has to wait for, so that a head which arrives at once may be as large as it likes.
    """
    names = [name for name, _ in headers]
    if b"transfer-encoding" in names and b"content-length" in names:
        raise MalformedRequest("a request has a Content-Length or a Transfer-Encoding, not both")
    size = address_bytes + sum(len(name) + len(value) + 4 for name, value in headers)
    if size > HEAD_BYTES:
        raise MalformedRequest(f"the head of a request has at most {HEAD_BYTES} bytes")


def check_head(headers: Sequence[tuple[bytes, bytes]], query: bytes) -> None:
    """Refuse what different readers would read differently, and tokens where logs would keep them."""
    said = [name for name, _ in headers if name in _ONCE]
    if len(said) != len(set(said)):
        raise MalformedRequest("a header that says who asks, or from where, is there more than once")
    if query and _IN_QUERY.search(query):
        raise MalformedRequest(
            "a token goes into the Authorization header; logs keep addresses, so revoke the one in this address"
        )


def given_token(headers: Mapping[bytes, bytes]) -> tuple[str, bool] | None:
    """Return what is given as a token, and whether by the cookie of a session; None if nothing is.

    The Authorization header counts before the cookie. What can be no token is an empty one.
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


def shown(headers: Mapping[bytes, bytes]) -> str:
    """Return who these headers say that asks, as it may be shown: never more of a token than names it."""
    given = given_token(headers)
    if given is None:
        return "a caller without a token"
    found = read_token(given[0])
    return "a caller with something that is no token" if found is None else f"{PREFIX}{found[0]}"


def check_origin(headers: Mapping[bytes, bytes]) -> None:
    """Refuse what a session is to change, unless it comes from a page of this service."""
    if not _is_own_page(headers):
        raise NotPermitted("a session changes something only from a page of this service", header=OWN_HEADER.decode())


def _is_own_page(headers: Mapping[bytes, bytes]) -> bool:
    origin, host = headers.get(b"origin", b""), headers.get(b"host", b"")
    return OWN_HEADER in headers or (host != b"" and origin.partition(b"://")[2].lower() == host.lower())


def check_site(headers: Mapping[bytes, bytes]) -> None:
    """Refuse what a page of another site makes a browser ask, also where it names no origin: a picture, a link.

    Browsers say it of every request. Other programs do not, and a page of this service may ask with its own header.
    """
    if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin") and OWN_HEADER not in headers:
        raise NotPermitted("pages of other sites may ask nothing of this service", field="sec-fetch-site")


def check_open(headers: Mapping[bytes, bytes], is_local: bool) -> None:
    """Refuse requests from pages of other sites to a service with open access.

    A browser says where a page comes from. Where the service is for this machine only, it is called by a name of this
    machine: another name is one that points here so that a foreign page seems to be of this service.
    """
    host = headers.get(b"host", b"")
    check_site(headers)
    if b"origin" in headers and not _is_own_page(headers):
        raise NotPermitted("open access is not for pages of other sites", field="origin")
    if is_local and host and not _is_own_name(host.decode("latin-1")):
        raise NotPermitted(
            "open access is for this machine: call the service by an address, or as localhost", field="host"
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches what listens there."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _is_own_name(host: str) -> bool:
    """Return whether a host, with or without a port, is an address or `localhost`, which no DNS server can redirect."""
    name = host.lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    return name == "localhost" or name.endswith(".localhost") or _address(name) is not None


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


def _text(value: bytes) -> str:
    return value.decode("ascii", errors="replace") if len(value) <= MOST_BYTES else ""
