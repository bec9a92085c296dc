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
"""Creates and revokes tokens, sees all tasks, and may act for others. With this scope one can create any token."""

OF_ALL_TENANTS = frozenset({"system:read"})
"""Scopes of operations that count or show data of all tenants. They only take effect for callers without a tenant."""

_VIEWER = frozenset(scope for scope in SCOPES if scope.endswith(":read")) - {"audit:read"}
_OPERATOR = _VIEWER | {"runs:control", "tasks:write", "letters:write"}
_ENGINEER = _OPERATOR | {"runs:write", "signals:write"}

ROLES: dict[str, frozenset[str]] = {"viewer": _VIEWER, "operator": _OPERATOR, "engineer": _ENGINEER, "admin": SCOPES}
"""The scopes of each role. Each role includes those of the previous one."""


def scopes_of(role: str, scopes: tuple[str, ...] = ()) -> frozenset[str]:
    """Return the scopes granted by a role and these scopes. An unknown role grants nothing."""
    return ROLES.get(role, frozenset()) | frozenset(scopes)
