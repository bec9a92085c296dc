"""What a turn sends to other runs: which runs it can reach, and what happens if they refuse it.

Nothing is dropped silently. A child that cannot be created is reported to its parent as failed. If the parent no longer
waits for it, or if another run refuses a signal, the sending run gets a dead letter. Only messages between parents and
children that have finished are dropped.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.dead_letters import DETAIL_CHARS, DeadLetter, letter_id
from holdfast.core.instants import Instant
from holdfast.core.keys import RESERVED_PREFIX, check_name
from holdfast.core.messages import ChildOutcome, Message, SignalRequest, child_outcome
from holdfast.core.restarts import is_restart_of
from holdfast.core.state import kept_open
from holdfast.errors import CallerError, HoldfastError, NotFound, RunTerminal
from holdfast.store.decisions import no_such_run, run_id_taken
from holdfast.store.port import NewRun, RunHead, Turn
from holdfast.store.types import Created, Delivered, Existing, Refused

_runs = logging.getLogger("holdfast.runs")


class Whose(NamedTuple):
    """The tenant, project and environment of a run, and its parent."""

    tenant: str
    project: str
    environment: str
    parent_run_id: str | None


def whose(run: NewRun | RunHead) -> Whose:
    """Return the tenant, project and environment of a run, and its parent."""
    return Whose(run.tenant, run.project, run.environment, run.parent_run_id)


def concerned(turn: Turn, item: Any) -> tuple[str, ...]:
    """Return the runs whose tenants decide whether an item may be sent: none for messages between parent and child."""
    is_signal = isinstance(item, SignalRequest) and check_name("run_id", item.run_id) is None
    return (turn.run_id, item.run_id) if is_signal else ()


def unreachable(turn: Turn, item: Any, runs: Mapping[str, Whose]) -> Refused | None:
    """Return the refusal of an item that a run may not send to another run, as if that run did not exist.

    The engine itself sends to children, to the parent, and to the run that is replaced. What a workflow sends stays
    inside its tenant, project and environment, unless its app allows more. `runs` holds the concerned runs that exist.
    A run that was created after they were read is missing there, and counts as non-existent.
    """
    concerns = concerned(turn, item)
    if not concerns:
        return None
    sender, target = (runs.get(run_id) for run_id in concerns)
    if sender is None or target is None:
        return Refused(no_such_run(item.run_id))
    if item.name.startswith(RESERVED_PREFIX):
        is_near = item.run_id == sender.parent_run_id or target.parent_run_id == turn.run_id
        is_near = is_near or (is_restart_of(turn.run_id, item.run_id) and target[:3] == sender[:3])
    else:
        is_near = turn.crosses_tenants or target[:3] == sender[:3]
    return None if is_near else Refused(no_such_run(item.run_id))


class Left(Struct, frozen=True):
    """What a turn's refused deliveries leave for its own run: messages and dead letters."""

    messages: tuple[Message, ...] = ()
    letters: tuple[DeadLetter, ...] = ()


NOTHING_LEFT = Left()


def left_of(
    turn: Turn, started: Sequence[Created | Existing | Refused], sent: Sequence[Delivered], now: Instant
) -> Left:
    """Return what these answers to a turn's `starts` and `sends` leave, at the turn's first commit."""
    messages: list[Message] = []
    letters: list[DeadLetter] = []
    for place, (new, answer) in enumerate(zip(turn.starts, started, strict=True)):
        problem = _not_created(turn, new, answer)
        if problem is None:
            continue
        message = _to_parent(turn, new, problem, now)
        if message is not None and _is_awaited(turn, message.step_id):
            messages.append(message)
        else:
            what = f"child {getattr(new, 'run_id', '?')!r}"
            letters.append(refused_letter(turn, f"start {place}", what, message or new, problem, now))
    for place, (item, taken) in enumerate(zip(turn.sends, sent, strict=True)):
        if isinstance(taken, Refused) and not _is_expected(item, taken.error):
            what = f"{getattr(item, 'name', 'message')!r} to run {getattr(item, 'run_id', '?')!r}"
            letter = refused_letter(turn, f"send {place}", what, item, taken.error, now)
            _runs.warning("run %s: what it sent was not delivered: %s", turn.run_id, letter.detail)
            letters.append(letter)
    return Left(tuple(messages), tuple(letters)) if messages or letters else NOTHING_LEFT


def by_turn(turns: Iterable[Turn], field: str, answers: Iterable[Any]) -> Iterator[list[Any]]:
    """Return the answers to the `starts` or `sends` of several turns, grouped by turn."""
    given = iter(answers)
    for turn in turns:
        yield [next(given) for _ in getattr(turn, field)]


def _not_created(turn: Turn, new: NewRun, answer: Created | Existing | Refused) -> CallerError | None:
    if isinstance(answer, Refused):
        return answer.error
    if isinstance(answer, Created) or (not turn.events and answer.run_id == new.run_id):  # perhaps by the same turn
        return None
    return run_id_taken(new.run_id)


def _to_parent(turn: Turn, new: Any, problem: CallerError, now: Instant) -> Message | None:
    queued = new.events[0].data if isinstance(new, NewRun) and new.events else None
    if not isinstance(queued, e.RunQueued) or queued.parent_run_id != turn.run_id or queued.parent_step_id is None:
        return None
    error = e.ErrorInfo(problem.code, f"child {new.run_id!r} was not started: {problem.message}")
    return child_outcome(
        new.run_id, turn.run_id, queued.parent_step_id, queued.parent_token, ChildOutcome(error=error), now
    )


def _is_awaited(turn: Turn, step_id: str | None) -> bool:
    """Return whether the step that started a child is still open after the turn."""
    is_open = True
    for event in turn.events:
        if isinstance(event.data, e.ContinuedAsNew):
            is_open = is_open and step_id in kept_open(event.data)
        elif event.step_id == step_id or type(event.data) in e.CLOSING_ALL:
            is_open = isinstance(event.data, e.ChildStarted)
    return is_open


def _is_expected(item: Any, problem: CallerError) -> bool:
    """Return whether a refusal is expected: parents and children need no messages after they have finished."""
    is_own = isinstance(item, Message) or getattr(item, "name", "").startswith(RESERVED_PREFIX)
    return is_own and isinstance(problem, NotFound | RunTerminal)


def refused_letter(turn: Turn, place: str, what: str, item: Any, problem: CallerError, now: Instant) -> DeadLetter:
    """Return the dead letter for an item that another run refused."""
    try:
        envelope = bytes(codec.encode(item))
    except HoldfastError:
        envelope = repr(item).encode(errors="replace")
    return DeadLetter(
        letter_id=letter_id(turn.run_id, turn.expected_version, place, now),
        run_id=turn.run_id,
        envelope=envelope,
        reason="refused",
        detail=f"{what}: {problem.code}: {problem.message}"[:DETAIL_CHARS],
        node=turn.events[0].engine_run_ref.node if turn.events else "store",
        died_at=now,
    )
