"""Runs whose turns end the processes that take them: which are suspected, how they are tried, and when that ends.

Nobody knows why a node went away with a run: the machine may have failed, another run may have been at fault. So a run
that was lost twice in a row is a suspect: it takes its turn alone, and the try is counted, durably, before it begins. A
turn that is committed clears it. One that was lost `lost_turns` times is set aside: paused by a turn that runs none of
its code, as are all that follow, until an operator resumes it. That is one more try.

An activity that ends its process is no poison: its attempts are counted. To tell the two apart, outcomes of activities
are made durable before a run takes them that was lost before.
"""

from msgspec.structs import replace

from holdfast.core.snapshot import RuntimeSnapshot
from holdfast.core.state import PAUSED
from holdfast.engine.turns.execute import controls_of
from holdfast.errors import Conflict, PoisonTurn, RunError
from holdfast.limits import SUSPECT_LOSSES, Limits
from holdfast.store.port import LoadedRun, RunHead, Turn


def is_suspect(head: RunHead) -> bool:
    """Return whether a run takes its turns alone."""
    return head.losses >= SUSPECT_LOSSES


def poison_of(loaded: LoadedRun, limits: Limits) -> PoisonTurn | None:
    """Return why none of the run's code is run, or None if its turn is tried."""
    losses = loaded.head.losses
    if losses < limits.lost_turns and not _is_set_aside(loaded.head):
        return None
    if losses <= limits.lost_turns and _is_resumed(loaded):
        return None
    return PoisonTurn(
        f"{losses} nodes in a row went away while they took the run's turn, so it is set aside: see in their logs why "
        "they ended, mend it, and resume the run to try it once more"
    )


def _is_set_aside(head: RunHead) -> bool:
    """Return whether it was paused for this, maybe by a node with another limit."""
    code = None if head.snapshot is None else head.snapshot.last_error_code
    return head.status is PAUSED and code == PoisonTurn.code


def _is_resumed(loaded: LoadedRun) -> bool:
    return any(control.name == "RESUME" and control.is_allowed for control in controls_of(loaded.signals))


def trial_turn(head: RunHead) -> Turn:
    """Return a turn that records nothing but that the run is about to be tried."""
    return Turn(
        run_id=head.run_id,
        expected_version=head.version,
        epoch=head.lease_epoch,
        snapshot=head.snapshot or RuntimeSnapshot(status=head.status, state_version=head.version),
        seen_inbox_seq=head.inbox_seq,
        losses=head.losses + 1,
    )


def tried(loaded: LoadedRun) -> LoadedRun:
    """Return a run as it is once it was noted that it is about to be tried."""
    return replace(loaded, head=replace(loaded.head, losses=loaded.head.losses + 1))


def losses_after(head: RunHead, problem: RunError | None, limits: Limits, *, has_lost: bool) -> int:
    """Return how often a run counts as lost after a turn.

    One that only has activities carried out again which were lost with their node has shown nothing: it counts as lost
    once, so that their outcomes are made durable before it takes them.
    """
    if isinstance(problem, PoisonTurn):
        return limits.lost_turns
    return min(head.losses, 1) if has_lost else 0


def refuse_suspect(head: RunHead) -> None:
    """Refuse to run a suspect's code for a question: it could end this process, too."""
    if is_suspect(head):
        problem = f"{head.losses} nodes in a row went away with run {head.run_id}: its code is run for no question"
        raise Conflict(problem, run_id=head.run_id)
