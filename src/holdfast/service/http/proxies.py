"""Proxies in front of the service: the client that they report, and the address at which the service was reached.

`Forwarded` and `X-Forwarded-*` are trusted only from a proxy that the options name. Of several addresses the last one
that is not such a proxy counts: those before it may be forged.
"""

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from starlette.types import Scope

from holdfast.errors import InvalidInput
from holdfast.service.auth.tokens import SECURE_SESSION_COOKIE, SESSION_COOKIE
from holdfast.service.options import ServiceOptions

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_BY_RFC = b"forwarded"
_BY_CUSTOM = (b"x-forwarded-for", b"x-forwarded-proto")
_SCHEMES = ("http", "https")


class Proxies:
    """Reads what trusted proxies report about a request."""

    def __init__(self, options: ServiceOptions) -> None:
        self._networks = networks_of(options.trusted_proxies)
        self._public = urlsplit(options.public_url) if options.public_url else None
        self.are_trusted = bool(self._networks)
        """Whether any proxy is trusted. Otherwise only the cookies of a request matter."""

    def settle(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Set the client, the scheme and the host of a request as trusted proxies report them; drop what may be forged.

        A cookie without the prefix `__Host-` may have been set by a sibling domain, or without TLS. With TLS it is
        ignored.
        """
        client = scope.get("client")
        if client is not None and self._is_trusted(client[0]):
            self._read(scope)
            if self._public is not None:
                headers[b"host"] = self._public.netloc.encode("ascii", errors="replace")
        if self.is_secure(scope) and b"cookie" in headers:
            headers[b"cookie"] = _without_plain(headers[b"cookie"])

    def is_secure(self, scope: Scope) -> bool:
        """Return whether the browser used https."""
        return scope.get("scheme") == "https" or (self._public is not None and self._public.scheme == "https")

    def _read(self, scope: Scope) -> None:
        """Apply what proxies report. A proxy that writes one kind of header may forward the other kind as the caller
        wrote it: if the two name different clients, or different schemes, neither counts.
        """
        kinds = (
            [pair for pair in scope["headers"] if pair[0] == _BY_RFC],
            [pair for pair in scope["headers"] if pair[0] in _BY_CUSTOM],
        )
        ends = [self._end_of(forwarded(said)) for said in kinds if said]
        clients, schemes = {client for client, _ in ends if client}, {scheme for _, scheme in ends if scheme}
        if len(clients) == 1:
            scope["client"] = (clients.pop(), 0)
        if len(schemes) == 1:
            scope["scheme"] = schemes.pop()

    def _end_of(self, way: Sequence[tuple[str, str]]) -> tuple[str, str]:
        """Return the first address, seen from here, that is not a proxy's, and the scheme by which it reached the
        proxies.
        """
        client, by = "", ""
        for address, scheme in reversed(way):
            by = scheme if scheme in _SCHEMES else by
            found = _address(address)
            if found is None:
                break
            client = str(found)
            if not self._is_trusted(client):
                break
        return client, by

    def _is_trusted(self, text: str) -> bool:
        address = _address(text)
        return address is not None and any(address in network for network in self._networks)


def networks_of(texts: Iterable[str]) -> tuple[Network, ...]:
    """Return the networks that texts such as 10.0.0.0/8 or ::1 name."""
    try:
        return tuple(ip_network(text, strict=False) for text in texts)
    except ValueError as problem:
        raise InvalidInput(
            "trusted_proxies are addresses or networks, such as 10.0.0.7 or 10.0.0.0/8", field="trusted_proxies"
        ) from problem


def forwarded(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Return the addresses that proxies have named, each with its scheme, in the order of the hops."""
    said: dict[bytes, list[str]] = {}
    for name, value in headers:
        said.setdefault(name, []).append(value.decode("latin-1"))
    joined = {name: ",".join(filter(None, values)) for name, values in said.items()}
    if _BY_RFC in joined:
        return [_for_and_proto(element) for element in joined[_BY_RFC].split(",")[-20:]]
    addresses = joined.get(b"x-forwarded-for", "").split(",")[-20:]
    schemes = [scheme.strip().lower() for scheme in joined.get(b"x-forwarded-proto", "").split(",")][-20:]
    if len(schemes) != len(addresses):  # most proxies write one scheme, that of the last hop
        schemes = [""] * (len(addresses) - 1) + schemes[-1:]
    return list(zip(addresses, schemes, strict=True))


def _for_and_proto(element: str) -> tuple[str, str]:
    pairs: dict[str, str] = {}
    for pair in element.split(";"):
        name, _, value = pair.partition("=")
        pairs[name.strip().lower()] = value.strip().strip('"')
    return pairs.get("for", ""), pairs.get("proto", "").lower()


def _address(text: str) -> Address | None:
    text = text.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        found = ip_address(text)
    except ValueError:
        return None
    return found.ipv4_mapped or found if isinstance(found, IPv6Address) else found


def _without_plain(cookies: bytes) -> bytes:
    parts = [part.strip() for part in cookies.split(b";")]
    return b"; ".join(part for part in parts if part.partition(b"=")[0] != SESSION_COOKIE)


def cookie_name(is_secure: bool) -> str:
    """Return the name of the session cookie."""
    return (SECURE_SESSION_COOKIE if is_secure else SESSION_COOKIE).decode()
