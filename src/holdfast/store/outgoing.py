"""What a turn has for other runs: whom it reaches, and what is left of what is refused there.

Nothing is dropped without a word. A child that cannot be created is reported to its parent as one that has failed. If
the parent does not wait for it any more, and for a signal that the other run does not take, a dead letter stays with
the run that wanted it. Only what a family has to say to runs that have ended is for nobody.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.dead_letters import DETAIL_CHARS, DeadLetter, letter_id
from holdfast.core.instants import Instant
from holdfast.core.messages import ChildOutcome, Message, SignalRequest, child_outcome
from holdfast.core.names import RESERVED_PREFIX, check_name
from holdfast.errors import CallerError, HoldfastError, NotFound, RunTerminal
from holdfast.store.port import NewRun, RunHead, Turn
from holdfast.store.types import Created, Delivered, Existing, Refused
from holdfast.store.validation import no_such_run, run_id_taken


class Whose(NamedTuple):
    """Whose a run is, and whose child."""

    tenant: str
    project: str
    environment: str
    parent_run_id: str | None


def whose(run: NewRun | RunHead) -> Whose:
    """Return whose a run is."""
    return Whose(run.tenant, run.project, run.environment, run.parent_run_id)


def concerned(turn: Turn, item: Any) -> tuple[str, ...]:
    """Return the runs of which it matters whose they are, for something to be sent: none for messages in families."""
    is_signal = isinstance(item, SignalRequest) and check_name("run_id", item.run_id) is None
    return (turn.run_id, item.run_id) if is_signal else ()


def unreachable(turn: Turn, item: Any, runs: Mapping[str, Whose]) -> Refused | None:
    """Return the refusal of what a run may not send to another: as if that were not there.

    What the engine itself sends goes to the children of a run. What a workflow sends stays inside its tenant, project
    and environment, unless its app allows more. `runs` holds those that are concerned, and are there. One that has come
    since they were looked at is not: nobody knows whose it is.
    """
    concerns = concerned(turn, item)
    if not concerns:
        return None
    sender, target = (runs.get(run_id) for run_id in concerns)
    if sender is None or target is None:
        return Refused(no_such_run(item.run_id))
    if item.name.startswith(RESERVED_PREFIX):
        is_near = target.parent_run_id == turn.run_id
    else:
        is_near = turn.crosses_tenants or target[:3] == sender[:3]
    return None if is_near else Refused(no_such_run(item.run_id))


class Left(Struct, frozen=True):
    """What is left of what a turn had for others: messages and dead letters for its own run."""

    messages: tuple[Message, ...] = ()
    letters: tuple[DeadLetter, ...] = ()


NOTHING_LEFT = Left()


def left_of(
    turn: Turn, started: Sequence[Created | Existing | Refused], sent: Sequence[Delivered], now: Instant
) -> Left:
    """Return what is left of a turn whose `starts` and `sends` were answered so, when it was committed first."""
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
            letters.append(refused_letter(turn, f"send {place}", what, item, taken.error, now))
    return Left(tuple(messages), tuple(letters)) if messages or letters else NOTHING_LEFT


def by_turn(turns: Iterable[Turn], field: str, answers: Iterable[Any]) -> Iterator[list[Any]]:
    """Return answers that were given to the `starts` or `sends` of several turns, for each turn."""
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
        if event.step_id == step_id or type(event.data) in e.CLOSING_ALL:
            is_open = isinstance(event.data, e.ChildStarted)
    return is_open


def _is_expected(item: Any, problem: CallerError) -> bool:
    """Return whether a refusal is what becomes of such a thing: a family need not be told when it has ended."""
    is_own = isinstance(item, Message) or getattr(item, "name", "").startswith(RESERVED_PREFIX)
    return is_own and isinstance(problem, NotFound | RunTerminal)


def refused_letter(turn: Turn, place: str, what: str, item: Any, problem: CallerError, now: Instant) -> DeadLetter:
    """Return what is left with a run of something that it had for another one."""
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
