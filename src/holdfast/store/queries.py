"""What can be looked for in a store. None means any; answers are in a fixed order, from after a place in it.

A query has bounds beside its `limit`. `look` is how many rows are looked at, whether they fit or not: an answer that
ends there is a `Found` with the `place` from where to go on, even if it is empty. `most_bytes` is how large the rows
are together, about: an answer ends with the row that reaches it, so that it has at least one if there is any.
"""

from typing import Literal

from msgspec import Struct

from holdfast.core.instants import Instant
from holdfast.core.state import RunStatus


class RunQuery(Struct, frozen=True, kw_only=True):
    """Which runs to find; None means any. Answers are ordered by run id, from after `after`.

    With `newest` they are in the reverse order of creation, from before `before`: (created_at, run id) of the last that
    was seen. `run_ids` are the only ones among which to look. Each word of `text` is a part of the run's id, workflow,
    reference, a tag, or of what it last failed with; small and capital letters from A to Z are the same.
    """

    tenant: str | None = None
    plan_id: str | None = None
    status: RunStatus | None = None
    reference_key: str | None = None
    tag: str | None = None
    parent_run_id: str | None = None
    run_ids: tuple[str, ...] | None = None
    created_from: Instant | None = None
    created_until: Instant | None = None
    text: str | None = None
    newest: bool = False
    before: tuple[Instant, str] = (2**62 - 1, "")
    after: str = ""
    limit: int = 100
    look: int | None = None
    most_bytes: int | None = None


class WaitQuery(Struct, frozen=True, kw_only=True):
    """Which open waits to find: of a run, for a signal's name, or both. Ordered by (run id, step id)."""

    tenant: str | None = None
    run_id: str | None = None
    name: str | None = None
    after: tuple[str, str] = ("", "")
    limit: int = 100


class MailboxQuery(Struct, frozen=True, kw_only=True):
    """Which signals of a run to find, in order of acceptance. Consumed ones too if `consumed`.

    Without a `run_id` those of all runs, in the order of the runs' creation, from behind number `after` of `after_run`;
    if that has gone meanwhile, from behind the one whose id comes before. With `unfinished` not of finished runs.
    """

    run_id: str | None = None
    tenant: str | None = None
    name: str | None = None
    signal_id: str | None = None
    consumed: bool = False
    unfinished: bool = False
    after_run: str = ""
    after: int = 0
    limit: int = 100
    most_bytes: int | None = None


class TaskQuery(Struct, frozen=True, kw_only=True):
    """Which tasks to find. `role` matches tasks that list it; `due_before` those that have an instant before it.

    `actor` matches tasks that concern somebody of this name and with `actor_roles`: that are assigned to them, list
    one of the roles, or list none and are nobody's. `step_ids` are the only steps of which to look for tasks. Each
    word of `text` is a part of the name or, as JSON, of the payload; small and capital letters from A to Z are the
    same. Ordered by task id.
    """

    tenant: str | None = None
    run_id: str | None = None
    task_id: str | None = None
    step_ids: tuple[str, ...] | None = None
    status: Literal["OPEN", "COMPLETED", "CANCELLED"] | None = None
    assignee: str | None = None
    role: str | None = None
    plan_id: str | None = None
    due_before: Instant | None = None
    actor: str | None = None
    actor_roles: tuple[str, ...] = ()
    text: str | None = None
    after: str = ""
    limit: int = 100
    look: int | None = None
    most_bytes: int | None = None
