"""Runs that belong to a node: as they were loaded, and what came in since."""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.decide import Input
from holdfast.core.instants import Instant
from holdfast.core.messages import ActivityDetached, ActivityErrored, ActivityOutcome, Message
from holdfast.core.state import OpenStep, RunState
from holdfast.engine.turns.draft import TurnDraft
from holdfast.engine.turns.execute import CachedRun
from holdfast.errors import InvalidInput, RunError, TurnRefused
from holdfast.store.port import LoadedRun


class Drafted(Struct, frozen=True):
    """A turn that a run has taken and that is not committed yet; with the reason if its program cannot go on."""

    cached: CachedRun
    draft: TurnDraft
    problem: RunError | None


class OwnedRun:
    """A run that belongs to this node. It is fresh until it has taken a turn as it was loaded."""

    __slots__ = (
        "deferred_with",
        "drafted",
        "inputs",
        "is_fresh",
        "is_tried",
        "loaded",
        "losses_after",
        "refused",
        "taken",
    )

    def __init__(self, loaded: LoadedRun) -> None:
        self.loaded = loaded
        self.inputs: list[Input] = []
        self.taken: Sequence[Input] = ()  # the inputs of the turn that is being committed
        self.is_fresh = True
        self.drafted: Drafted | None = None  # what it did before it was created
        self.deferred_with: object = None  # what the turn was given whose end waits for updates
        self.is_tried = False  # whether it is durable that it takes its turn alone
        self.losses_after = 0  # how often it counts as lost after its present turn
        self.refused: TurnRefused | None = None  # why its present turn is no more than a pause

    def lost_steps(self, state: RunState, now: Instant) -> list[OpenStep]:
        """Return local activities that no message is about: their node is gone, and took them along.

        Only a run that was just loaded shows it: then a step whose next attempt is due has its message beside it,
        unless a node took the message and was lost with it.
        """
        if not self.is_fresh or not state.local_activities:
            return []
        reported = {getattr(given, "step_id", None) for given in self.inputs}
        reported |= {
            message.step_id
            for message in self.loaded.messages
            if message.type == "ActivityCompleted" and _is_of_present_attempt(message, state)
        }
        tokens = {message.waiting_token for message in self.loaded.messages}
        return [
            step
            for step in state.open_steps.values()
            if is_local(step)
            and (step.due_at is None or step.due_at <= now)
            and step.step_id not in reported
            and (step.token is None or step.token not in tokens)
        ]

    def load_again(self, loaded: LoadedRun, state: RunState) -> None:
        """Take the run as it was loaded once more, without ownership being claimed again.

        Such a load takes no lock: it may miss a signal that was accepted in time and is about to be durable. So it
        brings no time-outs of waits; they are handed out again with the next claim.
        """
        known = {message.signal_id for message in self.loaded.messages}
        waits = {step_id for waits in state.waits.values() for step_id in waits}
        messages = [
            m for m in loaded.messages if m.signal_id in known or m.type != "TimerDue" or m.step_id not in waits
        ]
        self.loaded = replace(loaded, messages=tuple(messages))

    def take_drafted(self, cached: CachedRun) -> Drafted | None:
        """Return the turn that was taken before, if it was by what is live now; whatever came in since waits."""
        drafted, self.drafted = self.drafted, None
        return drafted if drafted is not None and drafted.cached is cached else None

    def is_as_before(self, loaded: LoadedRun) -> bool:
        """Return whether a later load brings nothing that was not there before."""
        was, now = self.loaded.head, loaded.head
        if (was.lease_epoch, was.version) != (now.lease_epoch, now.version) or loaded.signals:
            return False
        return {message.signal_id for message in loaded.messages} <= {
            message.signal_id for message in self.loaded.messages
        }

    def advance(self, draft: TurnDraft, losses: int = 0) -> None:
        """Take note of a turn that was committed."""
        self.taken = ()
        state, signals, details = draft.state, self.loaded.signals, self.loaded.details
        self.is_tried = False
        if draft.received:
            consumed = {inbox_seq for inbox_seq, _ in draft.received}
            signals = tuple(signal for signal in signals if signal.inbox_seq not in consumed)
        if details:
            details = {step_id: said for step_id, said in details.items() if step_id in state.open_steps}
        head = replace(self.loaded.head, version=state.version, losses=losses)
        self.loaded = LoadedRun(head=head, signals=signals, details=details, is_whole=self.loaded.is_whole)


def _is_of_present_attempt(message: Message, state: RunState) -> bool:
    """Return whether the outcome in a message ends the attempt that its step is at: an earlier failure does not."""
    step = state.open_steps.get(message.step_id or "")
    try:
        outcome = codec.decode(message.payload, ActivityOutcome)
    except InvalidInput:  # it becomes a dead letter
        return False
    if step is None or outcome.logical_attempt_id != step.logical_attempt_id:
        return False
    is_success = outcome.error is None and not outcome.is_detached
    return is_success or outcome.engine_attempt_id >= step.engine_attempt_id


def unsuccessful(batch: Sequence[OwnedRun]) -> list[tuple[str, str]]:
    """Return the steps whose attempts have ended without a result."""
    ended = [(owned.loaded.head.run_id, given) for owned in batch for given in owned.inputs]
    return [(run_id, o.step_id) for run_id, o in ended if isinstance(o, ActivityErrored | ActivityDetached)]


def is_local(step: OpenStep) -> bool:
    """Return whether a step's activity is carried out by the node that owns the run."""
    return isinstance(step.body, e.StepStarted) and step.body.queue == "" and not step.is_detached
