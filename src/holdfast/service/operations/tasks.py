"""Tasks: what humans are asked by runs, and what they do with it."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from holdfast.errors import Conflict, HoldfastError, NotFound, NotPermitted, PayloadTooLarge, RateLimited
from holdfast.limits import COMMENT_CHARS
from holdfast.service.calling import Call
from holdfast.service.catalogue import Ask, operation
from holdfast.service.operations.fields import ActorName, ActorRoles, Name, SignalId, given
from holdfast.service.paging import Cursor, PageSize, decode_cursor, encode_cursor
from holdfast.service.views import EventView, Moment, TaskItem, event_view, instant_of, task_item

OF_A_TASK: tuple[type[HoldfastError], ...] = (NotFound, Conflict, NotPermitted, RateLimited, PayloadTooLarge)


class ListTasks(Ask, frozen=True, kw_only=True):
    """Which tasks to list; what is left out may be anything. `mine` leaves those that concern who asks."""

    mine: bool = False
    actor: ActorName = ""
    actor_roles: ActorRoles = ()
    role: str | None = None
    assignee: str | None = None
    due_before: Moment | None = None
    workflow: str | None = None
    status: Literal["OPEN", "COMPLETED", "CANCELLED"] | None = None
    text: Annotated[str, Meta(min_length=1, description="What names or payloads mention.")] | None = None
    run_id: str | None = None
    cursor: Cursor = ""
    limit: PageSize = 100


class TaskPage(Struct, frozen=True):
    """Some tasks. `next` is the cursor of the page behind it, if there is more."""

    items: list[TaskItem]
    next: str | None = None


@operation("tasks.list", "GET /v1/tasks", scope="tasks:read")
async def list_(call: Call, ask: ListTasks) -> TaskPage:
    """Find tasks, in the order of their ids. Who is no admin sees those that concern them."""
    is_own = ask.mine or not call.principal.is_admin
    after = decode_cursor("tasks", ask.cursor, str) if ask.cursor else ""
    found = await call.tasks.list(
        actor=call.actor(ask.actor, ask.actor_roles) if is_own else None,
        role=ask.role,
        assignee=ask.assignee,
        due_before=instant_of(ask.due_before),
        workflow=ask.workflow,
        status=ask.status,
        text=ask.text,
        run_id=ask.run_id,
        after=after,
        limit=ask.limit + 1,
    )
    items = [task_item(task) for task in found[: ask.limit]]
    return TaskPage(items, encode_cursor("tasks", items[-1].task_id) if len(found) > ask.limit else None)


class OfTask(Ask, frozen=True, kw_only=True):
    """Which task is meant."""

    task_id: Name


@operation("tasks.get", "GET /v1/tasks/{task_id}", scope="tasks:read", errors=(NotFound,))
async def get(call: Call, ask: OfTask) -> TaskItem:
    """Return one task; to somebody whom it does not concern it is not there."""
    return task_item(await call.tasks.get(ask.task_id, actor=call.actor()))


class TaskHistory(Struct, frozen=True):
    """Everything that happened to a task, and what was refused, in order."""

    items: list[EventView]


@operation("tasks.history", "GET /v1/tasks/{task_id}/history", scope="tasks:read", errors=(NotFound,))
async def history(call: Call, ask: OfTask) -> TaskHistory:
    """Return everything that happened to a task, and what was refused."""
    return TaskHistory([event_view(event) for event in await call.tasks.history(ask.task_id, actor=call.actor())])


class DoTask(OfTask, frozen=True, kw_only=True):
    """Something done to a task. With an `operation_id` a retry is answered as the first time."""

    actor: ActorName = ""
    actor_roles: ActorRoles = ()
    operation_id: SignalId | UnsetType = UNSET


class AssignTask(DoTask, frozen=True, kw_only=True):
    """To whom a task is given."""

    to: Name


@operation("tasks.assign", "POST /v1/tasks/{task_id}/assign", scope="tasks:write", errors=OF_A_TASK, audit="its commit")
async def assign(call: Call, ask: AssignTask) -> TaskItem:
    """Give a task that is nobody's to somebody."""
    return task_item(
        await call.tasks.assign(
            ask.task_id, ask.to, actor=call.actor(ask.actor, ask.actor_roles), operation_id=given(ask.operation_id)
        )
    )


@operation("tasks.claim", "POST /v1/tasks/{task_id}/claim", scope="tasks:write", errors=OF_A_TASK, audit="its commit")
async def claim(call: Call, ask: DoTask) -> TaskItem:
    """Take a task that is nobody's."""
    return task_item(
        await call.tasks.claim(
            ask.task_id, actor=call.actor(ask.actor, ask.actor_roles), operation_id=given(ask.operation_id)
        )
    )


@operation(
    "tasks.release", "POST /v1/tasks/{task_id}/release", scope="tasks:write", errors=OF_A_TASK, audit="its commit"
)
async def release(call: Call, ask: DoTask) -> TaskItem:
    """Give one's task back."""
    return task_item(
        await call.tasks.release(
            ask.task_id, actor=call.actor(ask.actor, ask.actor_roles), operation_id=given(ask.operation_id)
        )
    )


class ReassignTask(DoTask, frozen=True, kw_only=True):
    """To whom a task is given, or to nobody; and to which roles, if they change."""

    to: Name | None = None
    roles: Annotated[tuple[Name, ...], Meta(max_length=100)] | None = None


@operation(
    "tasks.reassign", "POST /v1/tasks/{task_id}/reassign", scope="tasks:write", errors=OF_A_TASK, audit="its commit"
)
async def reassign(call: Call, ask: ReassignTask) -> TaskItem:
    """Give a task to somebody else, or to nobody, whoever has it; and to other roles, if some are given."""
    return task_item(
        await call.tasks.reassign(
            ask.task_id,
            ask.to,
            roles=ask.roles,
            actor=call.actor(ask.actor, ask.actor_roles),
            operation_id=given(ask.operation_id),
        )
    )


class CompleteTask(DoTask, frozen=True, kw_only=True):
    """The answer to a task, which fits its form."""

    answer: Any = None


@operation(
    "tasks.complete", "POST /v1/tasks/{task_id}/complete", scope="tasks:write", errors=OF_A_TASK, audit="its commit"
)
async def complete(call: Call, ask: CompleteTask) -> TaskItem:
    """Answer a task. The first answer stands; later ones get `Conflict` with `completed_by` and `completed_at`."""
    return task_item(
        await call.tasks.complete(
            ask.task_id, ask.answer, actor=call.actor(ask.actor, ask.actor_roles), operation_id=given(ask.operation_id)
        )
    )


class CommentTask(DoTask, frozen=True, kw_only=True):
    """What is said about a task."""

    text: Annotated[str, Meta(min_length=1, max_length=COMMENT_CHARS)]


@operation(
    "tasks.comment", "POST /v1/tasks/{task_id}/comments", scope="tasks:write", errors=OF_A_TASK, audit="its commit"
)
async def comment(call: Call, ask: CommentTask) -> TaskItem:
    """Say something about a task. It is kept in the task's history."""
    return task_item(
        await call.tasks.comment(
            ask.task_id, ask.text, actor=call.actor(ask.actor, ask.actor_roles), operation_id=given(ask.operation_id)
        )
    )
