"""Exceptions as they are kept in a history: bounded, as plain text, with their causes."""

import traceback

from holdfast.core.events import ErrorInfo
from holdfast.limits import ERROR_CAUSES, ERROR_TEXT_CHARS


def error_info(problem: BaseException, *, retryable: bool = False, causes: int = ERROR_CAUSES) -> ErrorInfo:
    """Return an exception as it is kept in a history: bounded, with its cause. That of a group is its first member."""
    if isinstance(problem, BaseExceptionGroup):
        inner = problem.__cause__ or problem.exceptions[0]
    else:
        inner = problem.__cause__ or (None if problem.__suppress_context__ else problem.__context__)
    cause = _attribute(problem, "info")
    if not isinstance(cause, ErrorInfo):
        cause = error_info(inner, causes=causes - 1) if inner is not None and causes > 0 else None
    code = None if isinstance(problem, SystemExit) else _attribute(problem, "code")  # what it has is for the shell
    return ErrorInfo(
        code=_plain_text(code)[:ERROR_TEXT_CHARS] if isinstance(code, str) and code else type(problem).__name__,
        message=_message(problem)[:ERROR_TEXT_CHARS],
        retryable=retryable,
        traceback=_traceback(problem)[-ERROR_TEXT_CHARS:],
        cause=cause,
    )


def error_bytes(error: ErrorInfo | None) -> int:
    """Return about how much an error takes in a history."""
    size = 0
    while error is not None:
        size += len(error.message) + len(error.traceback)
        error = error.cause
    return size


def _message(problem: BaseException) -> str:
    """Return what an exception says, whatever it is made of; a group says what all of its members say."""
    try:
        text = _plain_text(str(problem))
        if isinstance(problem, BaseExceptionGroup):
            members = "; ".join(f"{type(member).__name__}: {_message(member)}" for member in problem.exceptions)
            return f"{text}: {members}"
        return text
    except Exception:  # an exception that cannot even be shown must not stop its run from being recorded
        return f"a {type(problem).__name__} that cannot be shown"


def _traceback(problem: BaseException) -> str:
    try:
        return _plain_text("".join(traceback.format_exception(problem, chain=False)))
    except Exception:
        return ""


def _attribute(problem: BaseException, name: str) -> object:
    """Return what the exception's own code says it has, or None if that fails too."""
    try:
        return getattr(problem, name, None)
    except Exception:
        return None


def _plain_text(text: str) -> str:
    """Return text that can be stored: without halves of surrogate pairs."""
    return text.encode(errors="replace").decode()
