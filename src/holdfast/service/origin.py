"""What the head of a request says about who sends it, and from where."""

import re
from collections.abc import Mapping, Sequence

from holdfast.core.access import PREFIX, read_token
from holdfast.errors import MalformedRequest, NotPermitted

SESSION_COOKIE = b"holdfast_session"
OWN_HEADER = b"x-holdfast-request"
"""A header that a page of another origin cannot send, because nothing here lets browsers do that."""

MOST_BYTES = 200
"""A longer text is no token, whatever it says."""

_BEARER = re.compile(rb"bearer +([^\s,]+)", re.IGNORECASE)
_IN_QUERY = re.compile(rb"hf_[0-9a-f]{16}_|(?:^|&)(?:access_)?token=", re.IGNORECASE)
_ONCE = frozenset({b"authorization", b"cookie", b"origin", b"host"})


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
    for part in headers.get(b"cookie", b"").split(b";"):
        name, separator, value = part.strip().partition(b"=")
        if name == SESSION_COOKIE and separator:
            return _text(value), True
    return None


def shown(headers: Mapping[bytes, bytes]) -> str:
    """Return who these headers say that asks, as it may be shown: never more of a token than names it."""
    given = given_token(headers)
    if given is None:
        return "nobody"
    found = read_token(given[0])
    return "somebody with what is no token" if found is None else f"{PREFIX}{found[0]}"


def check_origin(headers: Mapping[bytes, bytes]) -> None:
    """Refuse what a session is to change, unless it comes from a page of this service."""
    if OWN_HEADER in headers:
        return
    origin, host = headers.get(b"origin", b""), headers.get(b"host", b"")
    if not host or origin.partition(b"://")[2].lower() != host.lower():
        raise NotPermitted("a session changes something only from a page of this service", header=OWN_HEADER.decode())


def _text(value: bytes) -> str:
    return value.decode("ascii", errors="replace") if len(value) <= MOST_BYTES else ""
