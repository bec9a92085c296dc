"""Tasks for humans, from inside a workflow.

The type of the answer becomes a form: its JSON Schema, which is stored with the task for user interfaces. The program
that created the task checks answers against the type itself: whenever it creates a task, its definition keeps the type
by the schema of the form.
"""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Literal, TypeVar, overload

import msgspec
from msgspec import Raw, Struct

from holdfast.core import codec
from holdfast.core import commands as c
from holdfast.core.events import EscalationRule
from holdfast.core.instants import Instant
from holdfast.core.keys import check_name, require_step_name
from holdfast.core.tasks import Check
from holdfast.errors import InvalidInput
from holdfast.program.coroutine import require_program
from holdfast.program.definitions import WorkflowDefinition, milliseconds
from holdfast.program.port import Program

T = TypeVar("T")

Due = datetime | timedelta | None

MOST_PEOPLE = 1_000
"""The limit on the people of one task, exclusive."""


class Escalation(Struct, frozen=True, kw_only=True):
    """Where the engine moves a task that is still open after this time. Without roles the task keeps its own."""

    after: timedelta
    """How long after the task was created."""
    roles: Sequence[str] = ()
    """The roles that may answer from then on. If empty, the task keeps its own."""
    assignee: str | None = None
    """The person who gets it; if None, the roles alone decide."""


@overload
async def task(
    name: str,
    form: type[T],
    *,
    payload: Any = None,
    roles: Sequence[str] = (),
    assignee: str | None = None,
    due: Due = None,
    route: str = "",
    task_type: str = "",
    remind: timedelta | None = None,
    escalate: Escalation | None = None,
    approvals: Literal[1] = 1,
    of: None = None,
) -> T: ...
@overload
async def task(
    name: str,
    form: type[T],
    *,
    payload: Any = None,
    roles: Sequence[str] = (),
    assignee: str | None = None,
    due: Due = None,
    route: str = "",
    task_type: str = "",
    remind: timedelta | None = None,
    escalate: Escalation | None = None,
    approvals: int = 1,
    of: int | None = None,
) -> list[T]: ...


async def task(
    name: str,
    form: Any,
    *,
    payload: Any = None,
    roles: Sequence[str] = (),
    assignee: str | None = None,
    due: Due = None,
    route: str = "",
    task_type: str = "",
    remind: timedelta | None = None,
    escalate: Escalation | None = None,
    approvals: int = 1,
    of: int | None = None,
) -> Any:
    """Create a task for a person and wait for the answer, however long it takes. Cancelling the wait cancels the task.

    With `approvals` or `of`, that many different people answer, and the result is the list of their answers. After
    `due` the task is overdue and stays open. If an operator skips the task, this returns None.
    """
    program = require_program("task")
    details = TaskDetails(
        roles=roles,
        assignee=assignee,
        due=due,
        route=route,
        task_type=task_type,
        remind=remind,
        escalate=escalate,
        approvals=approvals,
        of=of,
    )
    details.check(name)
    schema, decoder = known_form(program.definition, name, form)
    encoded = program.bounded(program.definition.values.encode(payload), f"the payload of task {name!r}")
    command = details.command(program.name_step(name), name, schema, encoded, program.now())
    answer = await program.step(command)
    if answer is None:
        program.skipped += (command.step_id,)
        return None
    return details.answer_of(answer, decoder)


class TaskDetails(Struct, frozen=True, kw_only=True):
    """What a task is created with, in addition to its name, its form and its payload."""

    roles: Sequence[str] = ()
    assignee: str | None = None
    due: Due = None
    route: str = ""
    task_type: str = ""
    remind: timedelta | None = None
    escalate: Escalation | None = None
    approvals: int = 1
    of: int | None = None

    def check(self, name: str) -> None:
        """Raise `InvalidInput` if a task of this name cannot be created with these details."""
        _check_names(name, self.roles, self.assignee)
        for field, text in (("route", self.route), ("task_type", self.task_type)):
            problem = None if text == "" else check_name(field, text)
            if problem is not None:
                raise problem
        least, most = self.approvals, self.approvals if self.of is None else self.of
        if any(type(count) is not int or count >= MOST_PEOPLE for count in (least, most)) or not 1 <= least <= most:
            problem_text = f"task {name!r}: {self.approvals!r} approvals of {self.of!r} cannot be given"
            raise InvalidInput(problem_text, field="approvals")
        _due_at(0, self.due)
        milliseconds(self.remind)
        _escalated(name, self.escalate)

    def command(self, step_id: str, name: str, form: Raw, payload: Raw, now: Instant) -> c.AskHuman:
        """Return the command that creates the task."""
        return c.AskHuman(
            step_id=step_id,
            name=name,
            task_type=self.task_type,
            route=self.route,
            payload=payload,
            form=form,
            roles=tuple(self.roles),
            assignee=self.assignee,
            due_at=_due_at(now, self.due),
            remind_ms=milliseconds(self.remind),
            escalation=_escalated(name, self.escalate),
            approvals=self.approvals,
            of=self.of,
        )

    def answer_of(self, answer: Raw, decoder: "msgspec.json.Decoder[Any]") -> Any:
        """Return the answer, or the list of all answers if several people are asked."""
        if self.approvals == 1 and self.of is None:
            return codec.decode_with(decoder, answer)
        return [codec.decode_with(decoder, one) for one in codec.decode(answer, list[Raw])]


def known_form(definition: WorkflowDefinition, name: str, form: Any) -> "tuple[Raw, msgspec.json.Decoder[Any]]":
    """Return the JSON Schema of a form and its decoder. The definition keeps the decoder to check answers."""
    schema, decoder = definition.form(name, form)
    definition.forms[_form_key(bytes(schema))] = decoder
    return schema, decoder


def answer_check(program: Program | None) -> Check | None:
    """Return the check of answers for a program; None without a program."""
    return None if program is None else check_with(program.definition.forms)


@lru_cache(maxsize=1_024)
def _form_key(form: bytes) -> str:
    """Return the key of a form: the same for any JSON text of it, from any release."""
    return codec.value_digest(Raw(form))


def check_with(forms: dict[str, "msgspec.json.Decoder[Any]"]) -> Callable[[Raw, Raw], None]:
    """Return a check that raises for answers that do not fit; a form that is not among these accepts anything."""

    def check(form: Raw, answer: Raw) -> None:
        decoder = forms.get(_form_key(bytes(form)))
        if decoder is not None:
            codec.decode_with(decoder, answer)

    return check


def _check_names(name: str, roles: Sequence[str], assignee: str | None) -> None:
    given_roles: Any = roles
    if not isinstance(given_roles, Sequence) or isinstance(given_roles, str):
        raise InvalidInput(f"task {name!r}: roles are a list of names, not {roles!r}", field="roles")
    require_step_name("task name", name)
    given = [("role", role) for role in roles]
    given += [("assignee", assignee)] if assignee is not None else []
    for field, value in given:
        problem = check_name(field, value)
        if problem is not None:
            raise problem


def _due_at(now: Instant, due: Due) -> Instant | None:
    if isinstance(due, datetime):
        if due.tzinfo is None:
            raise InvalidInput(f"due: {due!r} has no time zone", field="due")
        return round(due.timestamp() * 1_000_000)
    after_ms = milliseconds(due)
    return None if after_ms is None else now + after_ms * 1_000


def _escalated(name: str, escalate: Escalation | None) -> EscalationRule | None:
    if escalate is None:
        return None
    if not isinstance(escalate, Escalation):
        raise InvalidInput(f"task {name!r}: escalate is an Escalation, not {escalate!r}", field="escalate")
    _check_names(name, escalate.roles, escalate.assignee)
    after_ms = milliseconds(escalate.after)
    if after_ms is None or (not escalate.roles and escalate.assignee is None):
        raise InvalidInput(f"task {name!r}: an escalation needs a time, and roles or an assignee", field="escalate")
    return EscalationRule(after_ms, tuple(escalate.roles), escalate.assignee)
