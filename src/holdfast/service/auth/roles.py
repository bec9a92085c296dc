"""The permissions of tokens: scopes, which operations require, and roles, which are sets of scopes."""

from typing import Literal, get_args

Scope = Literal[
    "runs:read",
    "runs:write",
    "runs:control",
    "runs:override",
    "signals:read",
    "signals:write",
    "tasks:read",
    "tasks:write",
    "letters:read",
    "letters:write",
    "workflows:read",
    "system:read",
    "audit:read",
    "admin",
]
Role = Literal["viewer", "operator", "engineer", "admin"]

SCOPES: frozenset[str] = frozenset(get_args(Scope))
ADMIN = "admin"
"""Makes and revokes tokens, sees all tasks, and may act for others. Who has it can make a token for anything."""

OF_ALL_TENANTS = frozenset({"system:read"})
"""Scopes of operations that count or show what all tenants have. They are of use only without a tenant."""

_VIEWER = frozenset(scope for scope in SCOPES if scope.endswith(":read")) - {"audit:read"}
_OPERATOR = _VIEWER | {"runs:control", "tasks:write", "letters:write"}
_ENGINEER = _OPERATOR | {"runs:write", "signals:write"}

ROLES: dict[str, frozenset[str]] = {"viewer": _VIEWER, "operator": _OPERATOR, "engineer": _ENGINEER, "admin": SCOPES}
"""What each role may do. Each has all that the one before it has."""


def scopes_of(role: str, scopes: tuple[str, ...] = ()) -> frozenset[str]:
    """Return what a token with this role and these scopes is good for. A role that is not known is good for nothing."""
    return ROLES.get(role, frozenset()) | frozenset(scopes)
