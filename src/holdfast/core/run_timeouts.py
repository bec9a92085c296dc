"""Time-outs of runs: how long a run may take as a whole, and how long one stretch of it.

The **execution time-out** counts from the creation of a run, or from its later start, across rotations, pauses, waits
and retries. The **run time-out** counts from its start, and again from each rotation.

When its time is over a run is cancelled, so that its program may clean up: sagas compensate what was done. It ends as
FAILED with `RunTimedOut`, unless the program returns after all, or was already being cancelled. The clean-up has a time
limit too; after it the run is ended in its current state, whether or not a node has its code. A run that has not
started never starts.

Each time-out is a message that the run leaves itself, due at that time by the store's clock. It has no step, and its
token names the time-out. A message from an earlier stretch is stale.
"""

from msgspec.structs import replace

from holdfast.core import events as e
from holdfast.core import messages as m
from holdfast.core.event_writer import NOTHING, Decision, EventWriter
from holdfast.core.instants import Instant
from holdfast.core.operator_commands import go_on_for
from holdfast.core.state import APPROVED, PAUSED, PENDING, RUNNING, RunState

EXECUTION = "execution"
RUN = "run"
CLEANUP_MARK = "!cleanup"
"""Follows the name of a time-out in the token of the message that ends the clean-up."""

CODE = "RunTimedOut"


def schedule_execution(state: RunState, writer: EventWriter) -> None:
    """Leave a new run the message for its execution time-out, if it has one."""
    if state.execution_deadline is not None:
        _schedule(EXECUTION, state.execution_deadline, writer)


def schedule_stretch(state: RunState, writer: EventWriter) -> None:
    """Leave a run that begins or rotates with the last written event the message for its run time-out."""
    if state.timeouts is not None and state.timeouts.run_ms is not None and not state.timed_out:
        has_rotated = isinstance(writer.events[-1].data, e.ContinuedAsNew)
        _schedule(_stretch(_rotations(state) + has_rotated), writer.now + state.timeouts.run_ms * 1_000, writer)


def schedule_again(state: RunState, writer: EventWriter) -> None:
    """Leave a fork the messages for its time-outs."""
    schedule_execution(state, writer)
    if state.timeouts is None or state.status not in (RUNNING, PAUSED):
        return
    if state.timed_out:
        _schedule(f"{state.timed_out}{CLEANUP_MARK}", writer.now + state.timeouts.cleanup_ms * 1_000, writer)
    elif state.timeouts.run_ms is not None:
        due_at = state.stretch_began_at + state.timeouts.run_ms * 1_000
        _schedule(_stretch(_rotations(state)), due_at, writer)


def start(state: RunState, writer: EventWriter) -> None:
    """Start a run with time-outs, unless its time is already over."""
    if state.execution_deadline is not None and writer.now >= state.execution_deadline:
        _time_out(state, EXECUTION, writer)
        return
    writer.write(e.RunStarted())
    schedule_stretch(state, writer)


def on_due(state: RunState, message: m.Message, writer: EventWriter) -> Decision:
    """Time the run out, or end its clean-up; never early."""
    token = message.waiting_token or ""
    if token.endswith(CLEANUP_MARK):
        if message.due_at is not None and writer.now < message.due_at:
            return Decision(messages=(message,))
        writer.write(failure(state, token.removesuffix(CLEANUP_MARK), is_cut=True))
        return writer.decision()
    deadline = _deadline(state, token)
    if deadline is None or state.timed_out:
        return NOTHING
    if writer.now < deadline:  # the current deadline: a debounced start postpones it
        return Decision(messages=(replace(message, due_at=deadline),))
    _time_out(state, token.partition("@")[0], writer)
    return writer.decision()


def failure(state: RunState, timeout: str, *, is_cut: bool = False) -> e.RunFailed:
    """Return the event that ends a run because of a time-out."""
    text = _text(state, timeout)
    if is_cut and state.timeouts is not None:
        text += f", and had not cleaned up {state.timeouts.cleanup_ms / 1_000:g} s later"
    return e.RunFailed(e.ErrorInfo(CODE, text), timeout)


def _deadline(state: RunState, token: str) -> Instant | None:
    """Return the instant of a time-out; None if it belongs to an earlier stretch."""
    if state.timeouts is None:
        return None
    if token == EXECUTION:
        return state.execution_deadline
    is_present = state.timeouts.run_ms is not None and token == _stretch(_rotations(state))
    return state.stretch_began_at + (state.timeouts.run_ms or 0) * 1_000 if is_present else None


def _stretch(number: int) -> str:
    return f"{RUN}@{number}"


def _rotations(state: RunState) -> int:
    """Return how often the run has rotated."""
    return state.occurrences.get(e.ContinuedAsNew.__name__, 0)


def _time_out(state: RunState, timeout: str, writer: EventWriter) -> None:
    assert state.timeouts is not None
    writer.write(e.RunTimedOut(timeout, _limit_ms(state, timeout)))
    if state.status in (PENDING, APPROVED):
        writer.write(failure(state, timeout))
        return
    reason = _text(state, timeout)
    if not state.is_cancelling:
        writer.write(e.RunCancelRequested(reason))
    if state.status is PAUSED:
        go_on_for(state, reason, None, writer)
    _schedule(f"{timeout}{CLEANUP_MARK}", writer.now + state.timeouts.cleanup_ms * 1_000, writer)


def _limit_ms(state: RunState, timeout: str) -> int:
    assert state.timeouts is not None
    limit_ms = state.timeouts.execution_ms if timeout == EXECUTION else state.timeouts.run_ms
    return limit_ms or 0


def _text(state: RunState, timeout: str) -> str:
    what = "the run" if timeout == EXECUTION else "this stretch of the run"
    return f"{what} took longer than {_limit_ms(state, timeout) / 1_000:g} s, its {timeout} time-out"


def _schedule(token: str, due_at: Instant, writer: EventWriter) -> None:
    writer.messages.append(
        m.Message(
            signal_id=f"timeout:{token}",
            run_id=writer.state.run_id,
            type="TimerDue",
            occurred_at=writer.now,
            due_at=due_at,
            waiting_token=token,
        )
    )


def put_off(message: m.Message, start_at: Instant) -> m.Message:
    """Return a message of a run that starts later: its execution time-out counts from then."""
    if not is_timeout(message) or message.due_at is None:
        return message
    return replace(message, due_at=message.due_at + max(0, start_at - message.occurred_at))


def is_timeout(message: m.Message) -> bool:
    """Return whether a message is about a time-out of the run itself."""
    return message.type == "TimerDue" and message.step_id is None
