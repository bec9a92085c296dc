"""Refusals as callers see them: problem+json (RFC 9457), and errors of JSON-RPC, from one table.

`code` is the name of the error's class, and programs should use it. A problem never contains a payload: if a value does
not fit its type, the message is made from the type alone.
"""

import logging
import re
from typing import Any

import msgspec
from msgspec import Struct

from holdfast import errors as e
from holdfast.core.codec import explain_unfit
from holdfast.errors import HoldfastError

logger = logging.getLogger("holdfast.service")

STATUS: dict[type[HoldfastError], int] = {
    e.CallerError: 400,
    e.MalformedRequest: 400,
    e.NotAuthenticated: 401,
    e.NotPermitted: 403,
    e.NotFound: 404,
    e.MethodNotAllowed: 405,
    e.NotAcceptable: 406,
    e.SlowRequest: 408,
    e.Conflict: 409,
    e.RunTerminal: 409,
    e.NotWaiting: 409,
    e.SignalAcceptanceIndeterminate: 409,
    e.PayloadTooLarge: 413,
    e.AnswerTooLarge: 413,
    e.UnsupportedMediaType: 415,
    e.InvalidInput: 422,
    e.RateLimited: 429,
    e.Overloaded: 429,
    # One run is at fault: its state does not allow the request, or the run has refused it.
    e.RunError: 409,
    e.ArtifactMissing: 404,
    e.HistoryGap: 503,
    e.CorruptHistory: 500,
    e.HistoryTooNew: 503,
    # The installation is at fault. A retry later may help, except where something is damaged or missing.
    e.EngineError: 503,
    e.InternalError: 500,
    e.StoreCorrupt: 500,
    e.CheckpointOwnershipCapabilityError: 501,
    e.RequestTimedOut: 504,
    e.StoreFull: 507,
}
"""The HTTP status of each error. An error that is not listed has the status of its parent."""

PARSE_ERROR = -32_700
INVALID_REQUEST = -32_600
METHOD_NOT_FOUND = -32_601
INVALID_PARAMS = -32_602
INTERNAL_ERROR = -32_603
_RPC = {422: INVALID_PARAMS, 500: INTERNAL_ERROR}

CONTENT_TYPE = b"application/problem+json"


class Problem(Struct, frozen=True, kw_only=True):
    """A refusal, as RFC 9457 has it. `details` are for programs, and differ by code."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    correlation_id: str
    details: dict[str, Any] = {}


def status_of(kind: type[HoldfastError]) -> int:
    """Return the HTTP status of an error."""
    return next(STATUS[ancestor] for ancestor in kind.__mro__ if ancestor in STATUS)


def rpc_code_of(kind: type[HoldfastError]) -> int:
    """Return the JSON-RPC code of an error: the standard's code, otherwise -32000 minus the status above 400.

    So 409, every conflict, is -32009. Errors of the installation are numbered from -32050.
    """
    status = status_of(kind)
    return _RPC.get(status) or -32_000 - status % 100 - (50 if status >= 500 else 0)


def title_of(kind: type[HoldfastError]) -> str:
    """Return the common title of all errors of this kind."""
    first = (kind.__doc__ or kind.__name__).strip().split("\n\n", 1)[0]
    return re.sub(r"\s+", " ", first).rstrip(".")


def problem_of(error: HoldfastError, correlation_id: str) -> Problem:
    """Return an error as callers see it."""
    kind = type(error)
    return Problem(
        type=f"urn:holdfast:error:{kind.code}",
        title=title_of(kind),
        status=status_of(kind),
        detail=_detail(error),
        code=kind.code,
        correlation_id=correlation_id,
        details=msgspec.to_builtins(error.details, enc_hook=str),
    )


def unexpected(problem: Exception, correlation_id: str, is_stopping: bool = False) -> HoldfastError:
    """Log an unexpected error, and return the error for the caller, which only says where to look.

    While the service is stopping, parts that a request still needs may be closed: that is not logged as a fault.
    """
    if is_stopping:
        logger.warning("request %s was aborted because the service is stopping: %r", correlation_id, problem)
        return stopping(is_begun=True)
    logger.error("request %s failed", correlation_id, exc_info=problem)
    return e.InternalError("something went wrong here; the log has it, under this correlation id")


def stopping(*, is_begun: bool) -> e.ServiceStopping:
    """Return the error for a caller that a stopping service does not serve any more."""
    if not is_begun:
        return e.ServiceStopping("the service is being stopped; nothing was done: ask again", outcome="not-done")
    return e.ServiceStopping(
        "the service was stopped before it had an answer; what was asked may be done: ask again with the same id",
        outcome="unknown",
    )


def retry_after(problem: Problem) -> int | None:
    """Return the seconds after which a retry is worthwhile, or None if it is not known to help."""
    wait_ms = problem.details.get("retry_after_ms")
    if isinstance(wait_ms, int):
        return max(1, -(-wait_ms // 1_000))
    return 1 if problem.status in (429, 503) else None


def _detail(error: HoldfastError) -> str:
    """Return the error's message, without the values that a decoder has quoted in it."""
    text, cause = error.message, error.__cause__
    while cause is not None:
        if isinstance(cause, msgspec.ValidationError):
            field, reason = explain_unfit(cause)
            return text.replace(str(cause), f"{field}: {reason}" if field else reason)
        cause = cause.__cause__
    return text
