"""Poison runs: runs whose turns crash the node, and runs whose turns the store rejects.

**Lost turns.** Why a node was lost is not known: the machine may have failed, or another run may be at fault. A run
that was lost twice in a row is a suspect. Its turn is tried separately from the turns of other runs, and the try is
counted, durably, before it begins. After an outage all runs of a fleet may be suspects, and trying them one by one
would take long. So suspects are first tried together, a few at once, and alone only if they are lost once more. A
committed turn clears its run. A node that stops in an orderly way takes back the tries that it has counted but not
finished. A run that was lost `lost_turns` times is paused by a turn that executes none of its code, and so are its next
turns, until an operator resumes it. That counts as one more try.

An activity that ends its process is not poison: its attempts are counted. To distinguish the two, the outcomes of
activities of a run that was lost before are made durable before the run takes them.

**Refused turns.** The store rejects some turns, and would reject them again. The run is then paused by its next turn,
without its inputs. If that turn is rejected as well, nothing can be recorded for the run. It is deferred, with a
message to itself by which it is paused later, on any node. The message is redelivered a limited number of times. Then
it becomes a dead letter, which an operator can inspect and requeue.
"""

from msgspec.structs import replace

from holdfast.core.index_rows import RuntimeSnapshot
from holdfast.core.instants import Instant
from holdfast.core.messages import Message, controls_of
from holdfast.core.state import PAUSED
from holdfast.engine.turns.draft import aside_turn
from holdfast.errors import Conflict, HistoryTooNew, HoldfastError, PayloadUnreadable, PoisonTurn, RunError, TurnRefused
from holdfast.limits import SUSPECT_LOSSES, Limits
from holdfast.store.port import LoadedRun, RunHead, Turn

UNFIT = frozenset({"event exists", "task is open", "cannot be stored"})
"""Conflicts that do not depend on which node came first: the same turn would be refused again, forever."""

TRY_LATER = "unreadable"
"""The id of the message that lets a run with undecryptable values be tried again."""

TRIED_TOGETHER = 32
"""How many suspects are tried together."""

PAUSE_LATER = "refused"
"""The id of the message by which a run is paused later."""


def is_suspect(head: RunHead) -> bool:
    """Return whether a run takes its turns separately from others."""
    return head.losses >= SUSPECT_LOSSES


def is_first_try(loaded: LoadedRun, limits: Limits) -> bool:
    """Return whether a suspect is tried together with others: if they are lost, each is still tried alone."""
    is_first = loaded.head.losses == SUSPECT_LOSSES
    return is_first and limits.lost_turns > SUSPECT_LOSSES + 1 and poison_of(loaded, limits) is None


def poison_of(loaded: LoadedRun, limits: Limits) -> PoisonTurn | None:
    """Return why none of the run's code is executed, or None if its turn is tried."""
    losses = loaded.head.losses
    if losses < limits.lost_turns and not is_set_aside(loaded.head):
        return None
    if losses <= limits.lost_turns and _is_resumed(loaded):
        return None
    return PoisonTurn(
        f"{losses} nodes in a row were lost during the run's turn, so it is paused: find the cause in their logs, fix "
        "it, and resume the run to try it once more"
    )


def is_set_aside(head: RunHead) -> bool:
    """Return whether it was paused as poison, maybe by a node with another limit."""
    code = None if head.snapshot is None else head.snapshot.last_error_code
    return head.status is PAUSED and code == PoisonTurn.code


def _is_resumed(loaded: LoadedRun) -> bool:
    return any(control.name == "RESUME" and control.is_allowed for control in controls_of(loaded.signals))


def counting_turn(head: RunHead, losses: int) -> Turn:
    """Return a turn that only records how often a run counts as lost. The snapshot still matches the events."""
    return Turn(
        run_id=head.run_id,
        expected_version=head.version,
        epoch=head.lease_epoch,
        snapshot=head.snapshot or RuntimeSnapshot(status=head.status, state_version=head.version),
        seen_inbox_seq=head.inbox_seq,
        losses=losses,
    )


def tried(loaded: LoadedRun) -> LoadedRun:
    """Return a run after its try was recorded."""
    return replace(loaded, head=replace(loaded.head, losses=loaded.head.losses + 1))


def losses_after(head: RunHead, problem: RunError | None, limits: Limits, *, has_lost: bool) -> int:
    """Return how often a run counts as lost after a turn.

    A run that only has activities repeated that were lost with their node has proved nothing: it counts as lost once,
    so that their outcomes are made durable before it takes them.
    """
    if isinstance(problem, PoisonTurn):
        return limits.lost_turns
    return min(head.losses, 1) if has_lost else 0


def refuse_suspect(head: RunHead) -> None:
    """Refuse to run a suspect's code for a query: it could end this process, too."""
    if is_suspect(head):
        problem = f"{head.losses} nodes in a row were lost with run {head.run_id}: its code is not executed for a query"
        raise Conflict(problem, run_id=head.run_id)


class Refusals:
    """The runs whose last turn was refused. The next turn pauses each of them, if this node takes that one too."""

    def __init__(self) -> None:
        self.problems: dict[str, tuple[TurnRefused, int]] = {}
        """The runs to pause, each with the last epoch for which that holds."""

    def note(self, head: RunHead, reason: str) -> None:
        """Note that the turn of a run was refused for this reason."""
        problem = TurnRefused(f"the run's turn was refused by the store: {reason}")
        self.problems[head.run_id] = problem, head.lease_epoch + 2  # its release, and its claim by this node

    def take(self, loaded: LoadedRun) -> TurnRefused | None:
        """Return why the run's turn must be a pause. What was noted before other nodes owned the run does not count."""
        head = loaded.head
        problem, last_epoch = self.problems.pop(head.run_id, (None, 0))
        if problem is not None and head.lease_epoch <= last_epoch:
            return problem
        if any(message.signal_id == PAUSE_LATER for message in loaded.messages):
            return TurnRefused("a turn of the run was refused by the store, and so was the pause that followed")
        return None


def _with_message(loaded: LoadedRun, signal_id: str, now: Instant) -> LoadedRun:
    """Return a run with a message to itself, if it has none with this id."""
    if any(message.signal_id == signal_id for message in loaded.messages):
        return loaded
    later = Message(
        signal_id=signal_id,
        run_id=loaded.head.run_id,
        type="InternalContinue",
        occurred_at=now,
        expected_version=1,
    )
    return replace(loaded, messages=(*loaded.messages, later))


def deferring_turn(loaded: LoadedRun, now: Instant, node: str, problem: HoldfastError, limits: Limits) -> Turn:
    """Return a turn that records nothing and defers a run, with all its messages."""
    if isinstance(problem, PayloadUnreadable | HistoryTooNew):  # a signal alone would not make the run ready again
        return aside_turn(_with_message(loaded, TRY_LATER, now), now, node, problem, limits, "retries exhausted")
    if not isinstance(problem, TurnRefused):
        return aside_turn(loaded, now, node, problem, limits)
    loaded = _with_message(loaded, PAUSE_LATER, now)
    return aside_turn(loaded, now, node, problem, limits, "retries exhausted")
