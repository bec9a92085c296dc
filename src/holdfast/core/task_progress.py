"""How far an open task has come: who has answered, how often it was reminded of, whether it was escalated."""

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.core import events as e
from holdfast.core.events import NULL, Event
from holdfast.core.instants import Instant


class GivenAnswer(Struct, frozen=True, gc=False):
    """Who has answered, when and what. `token_id` is the caller's, who may act for the actor."""

    actor: str
    at: Instant
    answer: Raw = NULL
    token_id: str = ""


class TaskProgress(Struct, frozen=True, gc=False):
    """What has happened to an open task beside changing hands."""

    answers: tuple[GivenAnswer, ...] = ()
    reminders: int = 0
    reminded_at: Instant | None = None
    is_escalated: bool = False


NO_PROGRESS = TaskProgress()


def progressed(task: e.TaskCreated, progress: TaskProgress, event: Event) -> tuple[e.TaskCreated, TaskProgress]:
    """Return a task, with whose it is by now, and how far it has come after one more event."""
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
