"""Which transitions can be reached by telling and asking, and that each one in the table was taken.

The other tests may go where they like; this one walks the whole graph of statuses with every input and every
command, and collects the transitions that it saw.
"""

from collections.abc import Iterator
from typing import get_args

import pytest

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core.event_writer import Decision
from holdfast.core.messages import ControlName
from holdfast.core.state import APPROVED, PAUSED, PENDING, TERMINAL, TRANSITIONS, RunState, RunStatus, evolve
from tests.core.driver import Driver, made
from tests.core.event_bodies import ERROR, run_in

Seen = set[tuple[RunStatus, type[e.Body]]]

# What only the shell can decide, because it needs to know more than the run: a definition that is missing, a
# history that cannot be read, retries that are exhausted.
LEFT_TO_THE_SHELL: Seen = {(PENDING, e.RunFailed), (APPROVED, e.RunFailed), (PAUSED, e.RunFailed)}


def table() -> Seen:
    """Return every entry of the table."""
    return {(status, body) for status, row in TRANSITIONS.items() for body in row}


def attempts(status: RunStatus) -> Iterator[Driver]:
    """Yield a run in this status for each thing that can be told or asked, after it was."""
    run = run_in(status)
    if "start" in run.inbox:
        run.try_tell(run.inbox["start"])
        yield run
    for name in get_args(ControlName):
        run = run_in(status)
        run.control(name, "activity")
        yield run
    for command in (c.CompleteRun(), c.FailRun(error=ERROR), c.CancelRun(), c.ContinueAsNew()):
        run = run_in(status)
        run.try_ask(command)
        yield run


def taken(run: Driver) -> Iterator[tuple[RunStatus, type[e.Body], RunStatus]]:
    """Yield the transitions that a history went through."""
    state = RunState(run_id=run.run_id)
    for event in run.events:
        following = evolve(state, event)
        if following.status is not state.status:
            yield state.status, type(event.data), following.status
        state = following


@pytest.mark.contract("WF-7", "EVT-5")
def test_every_transition_of_the_table_is_exercised() -> None:
    seen: Seen = set()
    for status in RunStatus:
        for run in attempts(status):
            for before, body, after in taken(run):
                assert TRANSITIONS[before][body] is after
                seen.add((before, body))
    assert seen == table() - LEFT_TO_THE_SHELL
    for status, body in LEFT_TO_THE_SHELL:
        state = run_in(status).state
        assert evolve(state, made(state, e.RunFailed(ERROR))).status is TRANSITIONS[status][body]
        seen.add((status, body))
    assert seen == table()


@pytest.mark.contract("WF-7")
@pytest.mark.parametrize("status", sorted(TERMINAL))
def test_nothing_leads_out_of_a_terminal_status(status: RunStatus) -> None:
    tried = list(attempts(status))
    assert tried
    for run in tried:
        assert run.state.status is status
        assert run.state.version == run_in(status).state.version


def test_the_walk_begins_where_a_run_begins() -> None:
    assert Driver().state.status is PENDING
    assert isinstance(run_in(PENDING).control("APPROVE"), Decision)
