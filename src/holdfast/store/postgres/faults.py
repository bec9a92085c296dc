"""Translates errors of the server and the connection into ours. The server's own text may quote stored data."""

from typing import Any

import asyncpg
import msgspec
from asyncpg.exceptions import _base as driver
from msgspec import Struct

from holdfast.errors import (
    StoreBusy,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreNotMigrated,
    StoreReadOnly,
    StoreUnavailable,
)

UNSTORABLE = (
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.DataError,
    asyncpg.ProgramLimitExceededError,
    asyncpg.CardinalityViolationError,
    driver.DataError,
    msgspec.MsgspecError,
    ValueError,  # text that is not Unicode, among others
    TypeError,
    OverflowError,
    RecursionError,
)
"""Errors caused by the data to be stored."""

_LOST = (
    OSError,
    EOFError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
)

# By SQLSTATE: the error, its text, and whether a retry may help.
_BY_CODE: dict[str, tuple[type[StoreError], str, bool]] = {
    "25006": (StoreReadOnly, "the server is a replica, or takes no writes", True),
    "25P03": (StoreBusy, "the server has ended a transaction that took too long", True),
    "28000": (StoreUnavailable, "the server does not let this user in", False),
    "28P01": (StoreUnavailable, "the server does not accept the password", False),
    "3D000": (StoreUnavailable, "there is no such database; make it with CREATE DATABASE", False),
    "3F000": (StoreNotMigrated, "the schema is missing or old; call migrate() first", False),
    "40001": (StoreBusy, "others were in the way", True),
    "40P01": (StoreBusy, "others were in the way", True),
    "42501": (StoreUnavailable, "this user has not the rights that a store needs", False),
    "42883": (StoreNotMigrated, "the schema is missing or old; call migrate() first", False),
    "42P01": (StoreNotMigrated, "the schema is missing or old; call migrate() first", False),
    "53100": (StoreFull, "there is no room left on the server; nothing was written", False),
    "53200": (StoreBusy, "the server is short of memory", True),
    "53300": (StoreBusy, "the server takes no more connections", True),
    "55P03": (StoreBusy, "others held a lock for too long", True),
    "57014": (StoreBusy, "the server has given up a statement that took too long", True),
    "57P01": (StoreUnavailable, "the server is shutting down", True),
    "57P02": (StoreUnavailable, "the server has crashed", True),
    "57P03": (StoreUnavailable, "the server is starting up or shutting down", True),
    "57P05": (StoreUnavailable, "the server has ended an idle connection", True),
    "XX001": (StoreCorrupt, "the store is damaged; restore it from a backup", False),
    "XX002": (StoreCorrupt, "an index of the store is damaged; rebuild it", False),
}
_ENDS_CONNECTION = frozenset({"25006", "57P01", "57P02", "57P03", "57P05", "25P03"})


class Fault(Struct, frozen=True):
    """An error. `is_passing`: a retry may help. `is_lost`: the connection is lost, and with it the answer."""

    error: StoreError
    is_passing: bool
    is_lost: bool


def fault_of(problem: BaseException, shown: str) -> Fault | None:
    """Return what is wrong with the server or the connection; None if the error has another cause."""
    if isinstance(problem, Refusal):
        return Fault(problem.error, problem.is_passing, is_lost=True)
    if isinstance(problem, UNSTORABLE) and not isinstance(problem, OSError):
        return None
    code: Any = getattr(problem, "sqlstate", None)
    if code in _BY_CODE:
        kind, text, is_passing = _BY_CODE[code]
        return Fault(_made(kind, shown, text, code), is_passing, code in _ENDS_CONNECTION)
    if isinstance(problem, _LOST):
        name = type(problem).__name__
        return Fault(
            _made(StoreUnavailable, shown, "the server cannot be reached", name), is_passing=True, is_lost=True
        )
    if isinstance(problem, asyncpg.PostgresError):
        error = _made(StoreUnavailable, shown, "the server has failed", code or type(problem).__name__)
        return Fault(error, is_passing=False, is_lost=not code)
    return None


def _made(kind: type[StoreError], shown: str, text: str, code: str) -> StoreError:
    return kind(f"{shown}: {text} ({code})", store=shown)


class Refusal(Exception):
    """A connection that was established but cannot be used."""

    def __init__(self, error: StoreError, *, is_passing: bool) -> None:
        super().__init__(error.message)
        self.error = error
        self.is_passing = is_passing
