"""The address of a store on a PostgreSQL server: the driver's part, and our options."""

import re
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from msgspec import Struct

from holdfast.errors import InvalidInput

_SCHEMA = re.compile("[a-z_][a-z0-9_]{0,39}")
_OURS = frozenset({"schema", "connections", "pooler", "allow_unsafe"})


class Address(Struct, frozen=True, kw_only=True):
    """Where the store is, and how to connect.

    `dsn` is for the driver, and may contain a password. With `has_pooler` there is a pooler in between, which may give
    every transaction another session: then nothing is kept in sessions, and there is no LISTEN.
    """

    dsn: str
    schema: str = "holdfast"
    connections: int = 4
    has_pooler: bool = False
    allow_unsafe: bool = False

    @property
    def shown(self) -> str:
        """The address for messages: without a password."""
        place = self.dsn.partition("?")[0].partition("://")[2].rpartition("@")[2]
        return f"postgresql://{place} schema {self.schema}"


def parse_address(text: str) -> Address:
    """Return the address in a text such as `postgresql://ann@host/db?schema=orders&connections=8`.

    `pooler=transaction` is for poolers in transaction mode, `allow_unsafe=true` for servers that may lose what they
    have acknowledged. Everything else in the query is for the driver.
    """
    try:
        parts = urlsplit(text)
    except ValueError:  # which may quote the password
        raise InvalidInput("the address of the PostgreSQL store cannot be read", field="store") from None
    if parts.scheme not in ("postgres", "postgresql"):
        raise InvalidInput("the address of a PostgreSQL store begins with postgresql://", field="store")
    given = parse_qsl(parts.query, keep_blank_values=True)
    ours = {key: value for key, value in given if key in _OURS}
    rest = urlencode([(key, value) for key, value in given if key not in _OURS])
    schema, connections = ours.get("schema", "holdfast"), ours.get("connections", "4")
    if not _SCHEMA.fullmatch(schema):
        raise InvalidInput("schema is a name of small letters, digits and _, at most 40", field="store")
    if not connections.isascii() or not connections.isdecimal() or not 1 <= int(connections) <= 100:
        raise InvalidInput("connections is a number from 1 to 100", field="store")
    if ours.get("pooler", "none") not in ("none", "transaction"):
        raise InvalidInput("pooler is none or transaction", field="store")
    if ours.get("allow_unsafe", "false") not in ("false", "true"):
        raise InvalidInput("allow_unsafe is true or false", field="store")
    return Address(
        dsn=urlunsplit(parts._replace(query=rest)),
        schema=schema,
        connections=int(connections),
        has_pooler=ours.get("pooler") == "transaction",
        allow_unsafe=ours.get("allow_unsafe") == "true",
    )
