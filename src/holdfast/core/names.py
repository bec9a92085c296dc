"""Names and ids: the one check of each, for every layer.

Names are compared byte by byte and never normalised. `check_name` holds for every name and id that is stored;
`check_step_name` for the names from which the engine makes step ids; `check_signal_name` for signals that people send.
"""

import re
from functools import lru_cache
from typing import Any

from holdfast.core.codec import digest
from holdfast.errors import CallerError, InvalidInput
from holdfast.limits import ACTIVITY_NAME_BYTES, NAME_BYTES, SIGNAL_ID_BYTES

RESERVED_PREFIX = "holdfast."
"""The engine's own signals begin with it. They do not count against a run's rate limit."""

_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")
_LIKE_A_STEP_ID = re.compile(r"#[0-9]+$|^[0-9]+(?:/|$)|^(?:update|patched|cut):|:(?:taken|skipped)$")
"""Step ids that the engine makes: the second `act`, `act` after a rotation, updates, and markers of a program."""


def check_name(field: str, value: Any) -> InvalidInput | None:
    """Return why `value` cannot be a name or an id, or None. Names are never normalised."""
    if type(value) is str and value.isascii() and value.isprintable() and 0 < len(value) <= NAME_BYTES:
        return None  # the usual name, on a short path
    if not isinstance(value, str) or value == "":
        return InvalidInput(f"{field} must be a string that is not empty, not {value!r}", field=field)
    problem = _check_text(field, value, NAME_BYTES)
    if problem is not None:
        return problem
    if _CONTROL_CHARACTER.search(value):
        return InvalidInput(f"{field} may not contain control characters: {value!r}", field=field)
    return None


def check_step_name(field: str, name: Any) -> CallerError | None:
    """Return why `name` cannot be a name that step ids are made from, or None.

    The one rule for names of activities, workflows, tasks, signals, queries, updates, patches and queues. The engine
    makes step ids from them (`act#2`, `1/act`), so none of them may look like one, and each leaves room for that.
    """
    problem = check_name(field, name)
    if problem is not None:
        return problem
    if _LIKE_A_STEP_ID.search(name):
        return InvalidInput(
            f"{field} {name!r} looks like a step id of the engine's own: it may not end in # and a number, :taken or "
            ":skipped, nor be a number, nor begin with a number and /, update:, patched: or cut:",
            field=field,
        )
    size = len(name.encode())
    if size > ACTIVITY_NAME_BYTES:
        return InvalidInput(f"{field} has {size} UTF-8 bytes; the most is {ACTIVITY_NAME_BYTES}", field=field)
    return None


def require_step_name(field: str, name: Any) -> None:
    """Raise `InvalidInput` if `check_step_name` finds a problem."""
    problem = check_step_name(field, name)
    if problem is not None:
        raise problem


def check_signal_name(name: Any) -> None:
    """Raise `InvalidInput` if this cannot be the name of a signal that people send and wait for."""
    if type(name) is str:
        _check_known_signal_name(name)
    else:
        _check_known_signal_name.__wrapped__(name)


@lru_cache(maxsize=1_024)
def _check_known_signal_name(name: Any) -> None:
    """Check the name of a signal, once while it is in use: there are few different ones, and many signals."""
    require_step_name("signal name", name)
    if name.startswith(RESERVED_PREFIX):
        raise InvalidInput(
            f"signal {name!r}: names that begin with {RESERVED_PREFIX!r} are the engine's own", field="signal_name"
        )


def check_signal_id(value: Any) -> InvalidInput | None:
    """Return why `value` cannot be a signal id, or None: 1 to 128 UTF-8 bytes, case-sensitive, never normalised."""
    if not isinstance(value, str) or value == "":
        return InvalidInput(f"signal_id must be a string that is not empty, not {value!r}", field="signal_id")
    return _check_text("signal_id", value, SIGNAL_ID_BYTES)


def fitting_id(id: str, most: int) -> str:
    """Return an id as it is if it fits, else its digest."""
    return id if len(id.encode()) <= most else digest(id.encode())


def _check_text(field: str, value: str, most_bytes: int) -> InvalidInput | None:
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        return InvalidInput(f"{field} is not valid Unicode: {value!r}", field=field)
    if size > most_bytes:
        return InvalidInput(f"{field} has {size} UTF-8 bytes; the most is {most_bytes}", field=field)
    if "\x00" in value:
        return InvalidInput(f"{field} may not contain a NUL character", field=field)
    return None
