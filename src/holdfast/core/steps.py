"""Steps as a run's state knows them: open, or failed."""

from msgspec import Struct

from holdfast.core import events as e
from holdfast.core.events import ErrorInfo
from holdfast.core.instants import Instant
from holdfast.core.task_progress import TaskProgress


class OpenStep(Struct, frozen=True, gc=False):
    """A step that has been opened and not yet closed: what the run waits for."""

    step_id: str
    kind: str
    body: e.Body
    opened_event_id: str
    opened_at: Instant
    logical_attempt_id: int = 1
    engine_attempt_id: int = 1
    token: str | None = None
    due_at: Instant | None = None
    first_engine_attempt_id: int = 1
    is_detached: bool = False
    task: TaskProgress | None = None
    error: ErrorInfo | None = None
    """Of the last attempt that has failed, within the logical attempt."""
    is_unbegun: bool = False
    """The attempt waits for a node that has the activity: no node has begun it."""

    @property
    def attempt(self) -> int:
        """The number of the present attempt within the logical one, counted from 1; what never began is not counted."""
        return self.engine_attempt_id - self.first_engine_attempt_id + 1

    @property
    def queue(self) -> str:
        """The queue from which the step's activity is taken; empty where the run's owner carries it out."""
        return getattr(self.body, "queue", "")

    @property
    def name(self) -> str:
        """The name of what is done or waited for: of the activity, signal, task, marker or plan."""
        return getattr(self.body, "name", "") or getattr(self.body, "plan_id", "")


class FailedStep(Struct, frozen=True, gc=False):
    """A step that failed for good. While the program has not been told, an operator can have it tried again.

    `told_by` is the event by which the program was told: 0 for the failure itself, else that of the resumption.
    """

    started: OpenStep
    error: ErrorInfo
    told_by: int | None = 0

    @property
    def is_told(self) -> bool:
        """Say whether the program knows, and has gone on from there."""
        return self.told_by is not None
