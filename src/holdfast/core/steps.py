"""Steps as a run's state holds them: open or failed, and how far an open task has come."""

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.core import events as e
from holdfast.core.events import NULL, ErrorInfo, Event
from holdfast.core.instants import Instant


class GivenAnswer(Struct, frozen=True, gc=False):
    """An answer to a task: by whom, when and what. `token_id` is that of the caller, who may act for the actor."""

    actor: str
    at: Instant
    answer: Raw = NULL
    token_id: str = ""


class TaskProgress(Struct, frozen=True, gc=False):
    """What has happened to an open task, apart from assignments."""

    answers: tuple[GivenAnswer, ...] = ()
    reminders: int = 0
    reminded_at: Instant | None = None
    is_escalated: bool = False


NO_PROGRESS = TaskProgress()


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
    """The error of the last attempt that failed, within the logical attempt."""
    is_unbegun: bool = False
    """The attempt waits for a node that has the activity: no node has begun it."""

    @property
    def attempt(self) -> int:
        """The number of the present attempt within the logical one, from 1; attempts that never began do not count."""
        return self.engine_attempt_id - self.first_engine_attempt_id + 1

    @property
    def queue(self) -> str:
        """The queue of the step's activity; empty if the node that owns the run executes it."""
        return getattr(self.body, "queue", "")

    @property
    def name(self) -> str:
        """The name of what is done or waited for: of the activity, signal, task, marker or plan."""
        return getattr(self.body, "name", "") or getattr(self.body, "plan_id", "")


class FailedStep(Struct, frozen=True, gc=False):
    """A step that failed for good. Until the program gets the failure, an operator can retry or skip the step.

    `delivered_by` is the event that delivered it: 0 for the failure itself, else the number of the resumption.
    """

    started: OpenStep
    error: ErrorInfo
    delivered_by: int | None = 0

    @property
    def is_delivered(self) -> bool:
        """Whether the program has got the failure."""
        return self.delivered_by is not None


def apply_to_task(task: e.TaskCreated, progress: TaskProgress, event: Event) -> tuple[e.TaskCreated, TaskProgress]:
    """Return a task, with its present assignee and roles, and its progress after one more event."""
    body = event.data
    if isinstance(body, e.TaskAssigned):
        roles = task.roles if body.roles is None else body.roles
        is_escalated = progress.is_escalated or body.action == "escalate"
        return replace(task, assignee=body.assignee, roles=roles), replace(progress, is_escalated=is_escalated)
    if isinstance(body, e.TaskAnswered):
        token_id = "" if body.by is None else body.by.token_id
        given = GivenAnswer(body.actor, event.emitted_at, body.answer, token_id)
        return replace(task, assignee=None), replace(progress, answers=(*progress.answers, given))  # others may answer
    if isinstance(body, e.TaskReminded):
        return task, replace(progress, reminders=body.count, reminded_at=event.emitted_at)
    return task, progress
