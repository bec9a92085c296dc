"""Tasks: requests of runs to people, and the operations on them."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypedDict

from msgspec import UNSET, Meta, Struct, UnsetType

from holdfast.core.messages import Actor
from holdfast.errors import Conflict, HoldfastError, NotFound, NotPermitted, PayloadTooLarge, RateLimited
from holdfast.limits import COMMENT_CHARS, SEARCH_CHARS, SEARCH_WORDS
from holdfast.service.context import RequestContext
from holdfast.service.paging import Cursor, PageSize, decode_cursor, encode_cursor, read_page, time_of
from holdfast.service.registry import (
    ActorName,
    ActorRoles,
    Handler,
    Name,
    Operation,
    Request,
    SignalId,
    given,
    operation,
)
from holdfast.service.views import EventView, Moment, TaskItem, event_view, instant_of, listed_task, task_item
from holdfast.store.port import TaskQuery

OF_A_TASK: tuple[type[HoldfastError], ...] = (NotFound, Conflict, NotPermitted, RateLimited, PayloadTooLarge)


_WORDS = f"Up to {SEARCH_WORDS} words, each a part of the name or of the payload."


class ListTasks(Request, frozen=True, kw_only=True):
    """Which tasks to list. A field that is omitted matches everything. `mine` selects those that concern the caller.

    `overdue` leaves open tasks whose time is over by the store's clock.
    """

    mine: bool = False
    actor: ActorName = ""
    actor_roles: ActorRoles = ()
    role: str | None = None
    assignee: str | None = None
    due_before: Moment | None = None
    overdue: bool = False
    workflow: str | None = None
    status: Literal["OPEN", "COMPLETED", "CANCELLED"] | None = None
    text: Annotated[str, Meta(min_length=1, max_length=SEARCH_CHARS, description=_WORDS)] | None = None
    run_id: str | None = None
    cursor: Cursor = ""
    limit: PageSize = 100


class TaskPage(Struct, frozen=True):
    """Some tasks. `next` is the cursor of the page behind it, if there is more.

    `unreadable` names tasks whose rows are damaged: they are left out.
    """

    items: list[TaskItem]
    next: str | None = None
    unreadable: tuple[str, ...] = ()
    as_of: str | None = None
    """The time of the list, by the store's clock, if the store's lists may be outdated (S3)."""


@operation("tasks.list", "GET /v1/tasks", scope="tasks:read")
async def list_(context: RequestContext, request: ListTasks) -> TaskPage:
    """List tasks in the order of their ids. Callers who are not admins see those that concern them.

    Payload and form are left out where they are large (`payload_bytes`); the task by itself has them. A search looks at
    so many tasks at a time: an answer with `next` may have few items, or none.
    """
    is_own = request.mine or not context.principal.is_admin
    actor = context.actor(request.actor, request.actor_roles) if is_own else None
    due_before, status = instant_of(request.due_before), request.status
    if request.overdue:
        now = await context.store.now()
        due_before, status = min(now, now if due_before is None else due_before), status or "OPEN"
    query = TaskQuery(
        run_id=request.run_id,
        status=status,
        assignee=request.assignee,
        role=request.role,
        workflow=request.workflow,
        due_before=due_before,
        actor=None if actor is None else actor.name,
        actor_roles=() if actor is None else tuple(actor.roles),
        text=request.text,
    )
    found, following = await read_page(
        context,
        "tasks",
        context.tasks.find,
        query,
        lambda task: task.task_id,
        cursor=request.cursor,
        limit=request.limit,
        size_of=lambda task: len(task.payload) + len(task.form),
    )
    return TaskPage([listed_task(task) for task in found], following, found.unreadable, time_of(found))


class OfTask(Request, frozen=True, kw_only=True):
    """Which task is meant."""

    task_id: Name


@operation("tasks.get", "GET /v1/tasks/{task_id}", scope="tasks:read", errors=(NotFound,))
async def get(context: RequestContext, request: OfTask) -> TaskItem:
    """Return one task; a caller whom it does not concern gets `NotFound`."""
    return task_item(await context.tasks.get(request.task_id, actor=context.actor()))


class ReadTaskHistory(OfTask, frozen=True, kw_only=True):
    """From where to read what happened to a task."""

    cursor: Cursor = ""
    limit: PageSize = 500


class TaskHistory(Struct, frozen=True):
    """What happened to a task, and what was refused, in order. `next` is the cursor of what may be behind it."""

    items: list[EventView]
    next: str | None = None


@operation("tasks.history", "GET /v1/tasks/{task_id}/history", scope="tasks:read", errors=(NotFound,), reads_much=True)
async def history(context: RequestContext, request: ReadTaskHistory) -> TaskHistory:
    """Return what happened to a task, and what was refused, a page of the run's history at a time."""
    after = decode_cursor("task history", request.cursor, int) if request.cursor else 0
    found, following = await context.tasks.history_page(
        request.task_id, actor=context.actor(), after=after, limit=request.limit, most_bytes=context.page_bytes
    )
    items = [event_view(event, (), context.item_bytes) for event in found]
    return TaskHistory(items, None if following is None else encode_cursor("task history", following))


class DoTask(OfTask, frozen=True, kw_only=True):
    """Something done to a task. With an `operation_id` a retry is answered as the first time."""

    actor: ActorName = ""
    actor_roles: ActorRoles = ()
    operation_id: SignalId | UnsetType = UNSET


class _By(TypedDict):
    actor: Actor
    operation_id: str | None


def _by(context: RequestContext, request: DoTask) -> _By:
    """Return the actor of an operation on a task, and the id by which a retry is recognised."""
    actor = context.actor(request.actor, request.actor_roles)
    return _By(actor=actor, operation_id=given(request.operation_id))


def _task_operation(name: str, address: str) -> Callable[[Handler], Operation]:
    """Declare an operation on a task."""
    return operation(name, address, scope="tasks:write", errors=OF_A_TASK, audit="its commit", is_answered_by_run=True)


class AssignTask(DoTask, frozen=True, kw_only=True):
    """To whom a task is given."""

    to: Name


@_task_operation("tasks.assign", "POST /v1/tasks/{task_id}/assign")
async def assign(context: RequestContext, request: AssignTask) -> TaskItem:
    """Assign a task that has no assignee."""
    return task_item(await context.tasks.assign(request.task_id, request.to, **_by(context, request)))


@_task_operation("tasks.claim", "POST /v1/tasks/{task_id}/claim")
async def claim(context: RequestContext, request: DoTask) -> TaskItem:
    """Take a task that has no assignee."""
    return task_item(await context.tasks.claim(request.task_id, **_by(context, request)))


@_task_operation("tasks.release", "POST /v1/tasks/{task_id}/release")
async def release(context: RequestContext, request: DoTask) -> TaskItem:
    """Release a task that you have claimed."""
    return task_item(await context.tasks.release(request.task_id, **_by(context, request)))


class ReassignTask(DoTask, frozen=True, kw_only=True):
    """The new assignee of a task, or none; and its roles, if they change."""

    to: Name | None = None
    roles: Annotated[tuple[Name, ...], Meta(max_length=100)] | None = None


@_task_operation("tasks.reassign", "POST /v1/tasks/{task_id}/reassign")
async def reassign(context: RequestContext, request: ReassignTask) -> TaskItem:
    """Give a task to another assignee or to none, and optionally to other roles."""
    by = _by(context, request)
    return task_item(await context.tasks.reassign(request.task_id, request.to, roles=request.roles, **by))


class CompleteTask(DoTask, frozen=True, kw_only=True):
    """The answer to a task, which fits its form."""

    answer: Any = None


@_task_operation("tasks.complete", "POST /v1/tasks/{task_id}/complete")
async def complete(context: RequestContext, request: CompleteTask) -> TaskItem:
    """Answer a task. The first answer stands; later ones get `Conflict` with `completed_by` and `completed_at`."""
    return task_item(await context.tasks.complete(request.task_id, request.answer, **_by(context, request)))


class CommentTask(DoTask, frozen=True, kw_only=True):
    """What is said about a task."""

    text: Annotated[str, Meta(min_length=1, max_length=COMMENT_CHARS)]


@_task_operation("tasks.comment", "POST /v1/tasks/{task_id}/comments")
async def comment(context: RequestContext, request: CommentTask) -> TaskItem:
    """Comment on a task. It is kept in the task's history."""
    return task_item(await context.tasks.comment(request.task_id, request.text, **_by(context, request)))
