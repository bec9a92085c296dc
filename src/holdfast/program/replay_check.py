"""Does new code still lead to the histories that old code wrote? To be asked before it is deployed.

`check_histories` replays each history with the definitions as they are now, and returns what would pause a run: a
divergence, a version that is no longer there, arguments that no longer fit. Nothing is carried out and nothing is
written: replaying gives a program its recorded outcomes, and compares what it asks for.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from msgspec import Raw, Struct

from holdfast.core import events as e
from holdfast.core.events import Event
from holdfast.core.state import RunState, state_of
from holdfast.errors import HoldfastError, RunError
from holdfast.program.port import Program
from holdfast.program.replay import Begin, Replay


class Problem(Struct, frozen=True, kw_only=True):
    """What would pause a run. `run_seq` is the first event that differs; 0 if it never comes to that."""

    run_id: str
    plan_id: str = ""
    plan_version: str = ""
    code: str
    message: str
    run_seq: int = 0
    expected: str = ""
    """What the history has."""

    found: str = ""
    """What the code asks for."""

    source: str = ""
    """The line of the code, as `file:line`."""


class Definitions(Protocol):
    """Knows how programs are made."""

    def begin(self, state: RunState, input: Raw, rotation: int) -> Program:
        """Make the program of a run; raise `VersionMismatch` if the version that it was started with is not known."""
        ...


def check_histories(definitions: Definitions, histories: Iterable[Sequence[Event]]) -> list[Problem]:
    """Return the problems that these runs would have, at most one for each. A history is whole, or since a rotation."""
    problems = (check_history(definitions, history) for history in histories)
    return [problem for problem in problems if problem is not None]


def check_history(definitions: Definitions, history: Sequence[Event]) -> Problem | None:
    """Return the first problem that this run would have. A run without a history has none."""
    if not history:
        return None
    run_id = history[0].run_id
    state, replay = RunState(run_id=run_id), None
    try:
        history = since_rotation(history)
        state = state_of(run_id, history)
        replay = Replay(_beginning(definitions, state, history[0]))
        replay.replay(history)
    except RunError as problem:
        return problem_of(problem, run_id, state.plan_id, state.plan_version)
    finally:
        if replay is not None:
            replay.close()
    return None


def problem_of(error: HoldfastError, run_id: str, plan_id: str, plan_version: str) -> Problem:
    """Return an error as the problem of a run."""
    details = error.details
    return Problem(
        run_id=run_id,
        plan_id=plan_id,
        plan_version=plan_version,
        code=error.code,
        message=error.message,
        run_seq=details.get("run_seq", 0),
        expected=str(details.get("expected", "")),
        found=str(details.get("found", "")),
        source=str(details.get("source", "")),
    )


def since_rotation(history: Sequence[Event]) -> Sequence[Event]:
    """Return the part of a history that a node replays: from the last rotation on, or all of it."""
    for position in range(len(history) - 1, -1, -1):
        if isinstance(history[position].data, e.ContinuedAsNew):
            return history[position:]
    return history


def _beginning(definitions: Definitions, state: RunState, first: Event) -> Begin:
    body = first.data
    given = body.input if isinstance(body, e.RunQueued | e.ContinuedAsNew) else e.NULL
    return lambda event: definitions.begin(state, given, state.occurrences.get("ContinuedAsNew", 0))
