"""Protection from cross-site request forgery, based on the headers that browsers send with each request."""

from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address

from holdfast.errors import NotPermitted

OWN_HEADER = b"x-holdfast-request"
"""A header that a page of another origin cannot send, because this service sends no CORS headers that allow it."""


def check_origin(headers: Mapping[bytes, bytes]) -> None:
    """Refuse a change made with a session, unless it comes from a page of this service."""
    if not _is_own_page(headers):
        raise NotPermitted("a session changes something only from a page of this service", header=OWN_HEADER.decode())


def _is_own_page(headers: Mapping[bytes, bytes]) -> bool:
    origin, host = headers.get(b"origin", b""), headers.get(b"host", b"")
    return OWN_HEADER in headers or (host != b"" and origin.partition(b"://")[2].lower() == host.lower())


def check_site(headers: Mapping[bytes, bytes]) -> None:
    """Refuse requests that a page of another site causes, even those without an origin, such as images and links.

    Browsers send this header with every request. Other programs do not, and a page of this service may add its own
    header.
    """
    if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin") and OWN_HEADER not in headers:
        raise NotPermitted("pages of other sites may ask nothing of this service", field="sec-fetch-site")


def check_open(headers: Mapping[bytes, bytes], is_local: bool) -> None:
    """Refuse requests from pages of other sites to a service with open access.

    A browser sends the origin of a page. A service for this machine only is addressed by a name of this machine. Any
    other name has been pointed at this machine so that a foreign page seems to belong to this service.
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
    """Return whether a server that listens on this host can only be reached from this machine."""
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
