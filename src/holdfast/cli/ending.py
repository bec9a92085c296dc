"""How a command ends: its exit code, and one line on stderr that says why.

====  =====================================================
code  meaning
====  =====================================================
0     fine
1     problems were found
2     bad usage or input: the same again fails again
3     the store or the engine is at fault
130   interrupted (143: told twice to end)
====  =====================================================
"""

import os
import sys
import traceback
from collections.abc import Callable

from cyclopts import CycloptsError

from holdfast.errors import CallerError, HoldfastError, RunError

FINE = 0
PROBLEMS = 1
BAD_INPUT = 2
AT_FAULT = 3
INTERRUPTED = 130


def end_of(command: Callable[[], int | None]) -> int:
    """Carry out a command, and return the exit code. What it raises is told in one line."""
    try:
        code = command()
        sys.stdout.flush()
        return code or FINE
    except CycloptsError as problem:
        return _say(f"{problem} (see {' '.join(['holdfast', *(problem.command_chain or ())])} --help)", BAD_INPUT)
    except HoldfastError as problem:
        return _say(problem.message, _code_of(problem))
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:  # who reads the output has seen enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERRUPTED
    except Exception as problem:
        traceback.print_exc()  # nobody expected this one, so all of it is told
        raise SystemExit(AT_FAULT) from problem


def _code_of(problem: HoldfastError) -> int:
    if isinstance(problem, CallerError):
        return BAD_INPUT
    return PROBLEMS if isinstance(problem, RunError) else AT_FAULT


def _say(line: str, code: int) -> int:
    print(f"holdfast: {line}", file=sys.stderr)
    return code
