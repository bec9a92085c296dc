"""How a command ends: its exit code, and one line on stderr with the reason and what to do about it.

====  ===================================================== code  meaning ====
===================================================== 0     fine 1     it failed: the run that was waited for, or a
check 2     bad usage or input: the same again fails again 3     there is no such run, task, workflow … 4     conflict:
the present state does not allow it 5     refused: not permitted, too large, or rate limited 6     the store or the
server is unavailable or unusable 7     it has not finished within the given time 70    an internal error, shown in full
130   interrupted (143: terminated by a second signal) ====  =====================================================
"""

import errno
import os
import sys
import traceback
from collections.abc import Callable

from cyclopts import CycloptsError

from holdfast import errors as e
from holdfast.cli.output import clean, json_line, show_traceback
from holdfast.client.transports import Unreachable
from holdfast.errors import HoldfastError

OK = 0
FAILED = 1
BAD_INPUT = 2
NOT_FOUND = 3
CONFLICT = 4
REFUSED = 5
UNAVAILABLE = 6
TIMED_OUT = 7
INTERNAL_ERROR = 70
INTERRUPTED = 130

CODES: dict[type[HoldfastError], int] = {
    e.HoldfastError: INTERNAL_ERROR,
    e.CallerError: BAD_INPUT,
    e.NotFound: NOT_FOUND,
    e.Conflict: CONFLICT,
    e.RunTerminal: CONFLICT,
    e.NotWaiting: CONFLICT,
    e.SignalAcceptanceIndeterminate: CONFLICT,
    e.NotAuthenticated: REFUSED,
    e.NotPermitted: REFUSED,
    e.PayloadTooLarge: REFUSED,
    e.AnswerTooLarge: REFUSED,
    e.RateLimited: REFUSED,
    e.Overloaded: REFUSED,
    e.RunError: FAILED,
    e.EngineError: UNAVAILABLE,
    e.InternalError: INTERNAL_ERROR,
}
"""The exit code of each error. An error that is not listed has the code of its parent."""

CANNOT_WRITE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""The operating system's errors when output goes to a disk that is full or failing."""

HINTS: dict[type[HoldfastError], str] = {
    e.StoreNotMigrated: "bring it up to date with `holdfast store migrate`",
    e.StoreBusy: "try again; if it stays so, see which process holds it",
    e.RateLimited: "wait, and try again",
    e.VersionMismatch: "name the app that has it with --app",
    e.NotAuthenticated: "give yours with HOLDFAST_TOKEN or --token",
    Unreachable: "start one with `holdfast dev`, or name another with --server, or a store with --store",
}
"""What to do about an error, if its own message does not say it."""


def run_command(command: Callable[[], int | None], *, as_json: bool = False) -> int:
    """Execute a command, and return the exit code. An error that it raises is reported in one line."""
    try:
        code = command()
        sys.stdout.flush()
        return code or OK
    except CycloptsError as problem:
        line = f"{problem} (see {' '.join(['holdfast', *(problem.command_chain or ())])} --help)"
        if as_json:
            print(json_line(e.InvalidInput(line).as_dict()), file=sys.stderr)
            return BAD_INPUT
        return _say(line, BAD_INPUT)
    except HoldfastError as problem:
        if as_json:
            print(json_line(problem.as_dict()), file=sys.stderr)
            return code_of(type(problem))
        _say(_sentence(problem), code_of(type(problem)))
        show_traceback(problem)
        return code_of(type(problem))
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of the output has seen enough, such as `head`
        _drop_output()
        return INTERRUPTED
    except Exception as problem:
        if isinstance(problem, OSError) and problem.errno in CANNOT_WRITE:
            _drop_output()
            return _say(f"the output cannot be written: {problem.strerror}", UNAVAILABLE)
        for line in traceback.format_exc().splitlines():  # an unexpected error is shown in full
            print(clean(line), file=sys.stderr)
        raise SystemExit(INTERNAL_ERROR) from problem


def _drop_output() -> None:
    """Discard the output: buffered data would fail once more at the end of the process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def code_of(kind: type[HoldfastError]) -> int:
    """Return the exit code of an error."""
    return next(CODES[ancestor] for ancestor in kind.__mro__ if ancestor in CODES)


def _sentence(problem: HoldfastError) -> str:
    if isinstance(problem, e.NotFound) and "workflow" in problem.details and "version" not in problem.details:
        return f"{problem.message} (`holdfast workflow list` lists them; without a server, name the app with --app)"
    hint = next((HINTS[ancestor] for ancestor in type(problem).__mro__ if ancestor in HINTS), "")
    return f"{problem.message} ({hint})" if hint else problem.message


def _say(line: str, code: int) -> int:
    print(f"holdfast: {clean(line)}", file=sys.stderr)
    return code
