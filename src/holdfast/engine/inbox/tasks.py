"""`app.tasks`: the tasks that runs give to people, and the operations on them.

An operation is a message to the run, and is durable before anything else happens. The run's next turn decides it by the
rules in `holdfast.core.tasks`, and records the decision and its consequences in one commit. The caller waits for that
decision. With an `operation_id`, which is unique within the run, a retry returns the first decision.
"""

from collections.abc import Iterable
from typing import Any, Literal

from msgspec import UnsetType
from msgspec.structs import asdict, replace

from holdfast.clock import Ids
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.audit import Caller, audit_entry
from holdfast.core.events import Event
from holdfast.core.index_rows import Task
from holdfast.core.instants import Instant
from holdfast.core.keyed_steps import is_of_engine
from holdfast.core.keys import check_name, signal_uuid
from holdfast.core.messages import TASK_SIGNAL, Actor, SignalRequest, TaskAction, TaskRequest
from holdfast.core.reconciliation import AboutStep, read_answer
from holdfast.core.tasks import DECISIONS, is_effective
from holdfast.engine.history import head_of, wait_for_event
from holdfast.engine.inbox.authorization import Permissions
from holdfast.errors import CallerError, Conflict, InvalidInput, NotFound, NotPermitted, RunTerminal, StoreCorrupt
from holdfast.limits import COMMENT_CHARS
from holdfast.program.tasks import check_with
from holdfast.registry import Registry
from holdfast.store.port import Accepted, Found, Refused, Store, TaskQuery
from holdfast.store.validation import check_page, id_of_request

PAGE_EVENTS = 500
PAGE_BYTES = 4 * 1024 * 1024
"""How many bytes of a history are read at a time."""

LOOK_EVENTS = 10_000
"""How many events of a run are examined for one page of a task's history."""

LOOK_TASKS = 2_000
"""How many tasks are searched for text in one call."""

_ERRORS: dict[str, type[CallerError]] = {error.code: error for error in (Conflict, InvalidInput, NotPermitted)}


class TaskView(Task, frozen=True, kw_only=True):
    """The current state of a task. It is overdue if it is open after its due date."""

    is_overdue: bool = False


Views = list[TaskView]
Rows = list[Task]
Events = list[Event]


class Tasks:
    """The tasks of all runs in one store."""

    def __init__(
        self,
        store: Store,
        registry: Registry,
        permissions: Permissions,
        ids: Ids,
        caller: Caller | None = None,
    ) -> None:
        self._store = store
        self._registry = registry
        self._permissions = permissions
        self._ids = ids
        self._caller = caller

    # --- looking

    async def list(
        self,
        *,
        actor: Actor | None = None,
        role: str | None = None,
        assignee: str | None = None,
        due_before: Instant | None = None,
        workflow: str | None = None,
        status: Literal["OPEN", "COMPLETED", "CANCELLED"] | None = None,
        text: str | None = None,
        run_id: str | None = None,
        after: str = "",
        limit: int = 100,
    ) -> Views:
        """Return tasks ordered by id, from behind `after`; with an actor, only those that concern them.

        Each word of `text` is searched in names and payloads; it is the only filter without an index.
        """
        query = TaskQuery(
            run_id=run_id,
            status=status,
            assignee=assignee,
            role=role,
            workflow=workflow,
            due_before=due_before,
            actor=None if actor is None else actor.name,
            actor_roles=() if actor is None else tuple(actor.roles),
            text=text,
            after=after,
            limit=check_page(limit),
            look=None if text is None else LOOK_TASKS,
        )
        found = await self.find(query)
        while found.cursor is not None and len(found) < limit:
            more = await self.find(replace(query, after=found.cursor, limit=limit - len(found)))
            found = Found([*found, *more], more.cursor, found.unreadable + more.unreadable, more.as_of)
        found.log("tasks")
        return found

    async def find(self, query: TaskQuery) -> Found[TaskView]:
        """Return a page of the tasks that match a query."""
        found = await self._store.find(query)
        now = await self._store.now()
        return Found((_view(task, now) for task in found), found.cursor, found.unreadable, found.as_of)

    async def get(self, task_id: str, *, actor: Actor | None = None) -> TaskView:
        """Return one task. Raise `NotFound` if there is none, or it does not concern the actor."""
        task = await self._task(task_id)
        if actor is not None and not actor.is_admin and not is_effective(task.assignee, task.roles, actor):
            raise _no_such_task(task_id)
        return _view(task, await self._store.now())

    async def history(self, task_id: str, *, actor: Actor | None = None) -> Events:
        """Return the events of a task's step, in order, including refused requests."""
        found: list[Event] = []
        following: int | None = 0
        while following is not None:
            page, following = await self.history_page(task_id, actor=actor, after=following)
            found += page
        return found

    async def history_page(
        self,
        task_id: str,
        *,
        actor: Actor | None = None,
        after: int = 0,
        limit: int = PAGE_EVENTS,
        most_bytes: int = PAGE_BYTES,
    ) -> tuple[Events, int | None]:
        """Return a page of the history after an event of the run, and the cursor of the next page, if there is one."""
        task = await self.get(task_id, actor=actor)
        found: list[Event] = []
        size, looked = 0, 0
        while page := await self._store.read_events(task.run_id, after, PAGE_EVENTS, most_bytes):
            looked += len(page)
            for event in page:
                if task.step_id in (event.step_id, _target_of(event)):
                    found.append(event)
                    size += len(codec.encode_body(event.data))
                after = event.run_seq
                if len(found) >= limit or size >= most_bytes:
                    return found, after
            if looked >= LOOK_EVENTS:
                return found, after
        return found, None

    # --- doing

    async def assign(self, task_id: str, to: str, *, actor: Actor, operation_id: str | None = None) -> TaskView:
        """Assign a task that has no assignee."""
        return await self._do(task_id, "assign", actor, operation_id, assignee=_person(to))

    async def claim(self, task_id: str, *, actor: Actor, operation_id: str | None = None) -> TaskView:
        """Claim a task that has no assignee."""
        return await self._do(task_id, "claim", actor, operation_id)

    async def release(self, task_id: str, *, actor: Actor, operation_id: str | None = None) -> TaskView:
        """Release a task that the actor has claimed or was assigned."""
        return await self._do(task_id, "release", actor, operation_id)

    async def reassign(
        self,
        task_id: str,
        to: str | None = None,
        *,
        roles: Iterable[str] | None = None,
        actor: Actor,
        operation_id: str | None = None,
    ) -> TaskView:
        """Change the assignee of a task, to another one or to none; with `roles`, change its roles too."""
        changed = None if roles is None else _roles(roles)
        assignee = None if to is None else _person(to)
        return await self._do(task_id, "reassign", actor, operation_id, assignee=assignee, roles=changed)

    async def complete(
        self, task_id: str, answer: Any = None, *, actor: Actor, operation_id: str | None = None
    ) -> TaskView:
        """Answer a task. The first answer counts; later ones get `Conflict` with `completed_by` and `completed_at`."""
        return await self._do(task_id, "complete", actor, operation_id, answer=self._registry.values.encode(answer))

    async def comment(self, task_id: str, text: str, *, actor: Actor, operation_id: str | None = None) -> TaskView:
        """Comment on a task. The comment is kept in the task's history."""
        given: Any = text
        if not isinstance(given, str) or not 0 < len(text) <= COMMENT_CHARS:
            raise InvalidInput(f"a comment is a text of 1 to {COMMENT_CHARS} characters", field="text")
        return await self._do(task_id, "comment", actor, operation_id, text=text)

    async def _do(
        self, task_id: str, action: TaskAction, actor: Actor, operation_id: str | None, **what: Any
    ) -> TaskView:
        given: Any = actor
        if not isinstance(given, Actor) or not isinstance(given.is_admin, bool):
            raise InvalidInput(f"actor is an Actor: a name, a tuple of roles, is_admin; not {actor!r}", field="actor")
        roles = tuple(sorted(set(_roles(actor.roles))))  # a retry may give them in another order
        task = await self._task(task_id)
        by = Actor(_person(actor.name), roles, actor.is_admin)
        request = TaskRequest(task_id=task_id, step_id=task.step_id, action=action, actor=by, **what)
        if action == "complete" and task.status == "OPEN":
            self._check_answer(task, request)
        payload = codec.encode(request)
        signal = SignalRequest(
            run_id=task.run_id,
            name=TASK_SIGNAL,
            payload=payload,
            signal_id=id_of_request(self._store, operation_id, self._ids),
            audit=audit_entry(self._caller, self._ids.new_id, actor=by.name, subject=task_id),
        )
        if self._permissions.is_needed:
            await self._permissions.check_signal(signal, self._caller)
        decision = await self._decided(task, signal)
        if decision is None:
            raise _closed(await self._task(task_id))
        if isinstance(decision, e.TaskRefused):
            raise _refused(decision, await self._task(task_id))
        return await self.get(task_id)

    def _check_answer(self, task: Task, request: TaskRequest) -> None:
        """Refuse an answer that does not match before anything is stored, if its form was requested in this process."""
        if is_of_engine(task.step_id):
            given = read_answer(request.answer)
            if given.answer == "happened":
                about = e.StepStarted(codec.decode(task.payload, AboutStep).activity)
                self._registry.check_result(about, e.NULL if isinstance(given.result, UnsetType) else given.result)
            return
        for definition in self._registry.workflows.values():
            if definition.name == task.workflow:
                check_with(definition.forms)(task.form, request.answer)

    async def _decided(self, task: Task, signal: SignalRequest) -> e.Body | None:
        """Send the operation and return what the run decided, or None if the run ended without a decision."""
        head = await head_of(self._store, task.run_id)
        [answer] = await self._store.deliver([signal])
        if isinstance(answer, Refused):
            if isinstance(answer.error, RunTerminal):
                return None
            if isinstance(answer.error, Conflict):
                problem = f"the operation id {signal.signal_id!r} was used before, for something else"
                raise Conflict(problem, task_id=task.task_id, operation_id=signal.signal_id)
            raise answer.error
        assert answer.result is not None
        seen = head.version if isinstance(answer, Accepted) else 0
        return await self._decision(task.run_id, signal_uuid(answer.result.signal_storage_key), seen)

    async def _decision(self, run_id: str, cause: str, seen: int) -> e.Body | None:
        def is_decision(event: Event) -> bool:
            return event.caused_by_signal_id == cause and isinstance(event.data, DECISIONS)

        try:
            return (await wait_for_event(self._store, run_id, seen, is_decision)).data
        except (RunTerminal, NotFound):
            return None

    async def _task(self, task_id: str) -> Task:
        found = await self._store.find(TaskQuery(task_id=task_id))
        if found.unreadable:
            raise StoreCorrupt(f"the row of task {task_id!r} cannot be read", task_id=task_id)
        if not found:
            raise _no_such_task(task_id)
        return found[0]


def _target_of(event: Event) -> str | None:
    """Return the step that a refused request addressed."""
    return event.data.target_step_id if isinstance(event.data, e.SignalRejected) else None


def _view(task: Task, now: Instant) -> TaskView:
    is_overdue = task.status == "OPEN" and task.due_at is not None and task.due_at < now
    return TaskView(**asdict(task), is_overdue=is_overdue)


def _roles(roles: Iterable[str]) -> tuple[str, ...]:
    given: Any = roles
    if isinstance(given, str | dict) or not isinstance(given, Iterable):
        raise InvalidInput(f"roles are a list of names, not {roles!r}", field="roles")
    return tuple(_person(role) for role in roles)


def _person(name: str) -> str:
    problem = check_name("name", name)
    if problem is not None:
        raise problem
    return name


def _refused(decision: e.TaskRefused, task: Task) -> CallerError:
    if decision.error.code == Conflict.code and task.status != "OPEN" and decision.stands_by is None:
        return _closed(task)
    known = {"by": decision.stands_by, "at": decision.stands_at}
    details = {field: value for field, value in known.items() if value is not None}
    return _ERRORS[decision.error.code](decision.error.message, task_id=task.task_id, **details)


def _closed(task: Task) -> Conflict:
    if task.status == "COMPLETED":
        problem = f"the task was completed by {task.completed_by!r}"
        return Conflict(problem, task_id=task.task_id, completed_by=task.completed_by, completed_at=task.completed_at)
    return Conflict("the task was cancelled", task_id=task.task_id, cancelled_at=task.completed_at)


def _no_such_task(task_id: str) -> NotFound:
    return NotFound(f"there is no task {task_id!r}", task_id=task_id)
