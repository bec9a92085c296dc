"""Restarts: what happens to a start when its run id is taken.

A finished run never runs again, and its history stays until retention deletes it. So a restart of `cart-17` is another
run, with the id `cart-17~000002`; the next one is `cart-17~000003`. The *latest* run of an id is its last restart, or
the run with that id itself. The number has six digits, so that ids sort in the order of restarts.
"""

import re

from holdfast.errors import Conflict, InvalidInput
from holdfast.limits import NAME_BYTES

RESTART_MARK = "~"
MOST_RESTARTS = 999_999
FIRST_CHARACTER = " "
"""The smallest character that a name can have."""
_DIGITS = 6
_RESTART = re.compile(rf"{RESTART_MARK}([0-9]{{{_DIGITS}}})$")


def check_reused_id(run_id: str, *, is_reused: bool = True) -> InvalidInput | None:
    """Return why a start cannot ask for this id; with `is_reused`, for an id that may be restarted."""
    if _RESTART.search(run_id):
        problem = f"ends in {RESTART_MARK} and {_DIGITS} digits, which is for restarts: name the id that was restarted"
    elif is_reused and len(run_id.encode()) + 1 + _DIGITS > NAME_BYTES:
        problem = f"leaves no room for the number of a restart: at most {NAME_BYTES - 1 - _DIGITS} bytes"
    else:
        return None
    return InvalidInput(f"run_id {problem}", field="run_id")


def restart_number(run_id: str, other: str) -> int | None:
    """Return the number of a run of `run_id`: 1 for the run itself, from 2 for its restarts, None for another run."""
    if other == run_id:
        return 1
    found = _RESTART.fullmatch(other, len(run_id)) if other.startswith(run_id) else None
    return None if found is None else int(found[1])


def number_of_id(run_id: str) -> int:
    """Return the number of this run among those of its id: 1, unless it is a restart."""
    found = _RESTART.search(run_id)
    return 1 if found is None else int(found[1])


def is_restart_of(run_id: str, other: str) -> bool:
    """Return whether the first run is a later run of the same id as the other."""
    found = _RESTART.search(run_id)
    number = None if found is None else restart_number(run_id[: found.start()], other)
    return found is not None and number is not None and number < int(found[1])


def restart_bounds(run_id: str) -> tuple[str, str]:
    """Return the open range of texts that contains all restarts of a run, among others."""
    return run_id + RESTART_MARK, f"{run_id}{RESTART_MARK}:"


def below(run_id: str, found: str) -> str:
    """Return the bound below which to continue the search for the last restart, given an id in its range that is none.

    The id may be a descendant of a restart; then this restart is examined next, if it is not deleted.
    """
    restart = found[: len(run_id) + 1 + _DIGITS]
    return found if restart_number(run_id, restart) is None else restart + FIRST_CHARACTER


def next_restart(run_id: str, latest: str) -> str:
    """Return the id of the run after the latest one. Raise `Conflict` if there is none left."""
    number = (restart_number(run_id, latest) or 1) + 1
    if number > MOST_RESTARTS:
        raise Conflict(f"run {run_id!r} was restarted {MOST_RESTARTS} times: use another id", run_id=run_id)
    return f"{run_id}{RESTART_MARK}{number:0{_DIGITS}d}"
