"""Names and output of the operations on the command line.

An operation that is not listed here still has a command: its resource and its verb, with required fields as arguments
and all other fields as options.
"""

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from holdfast.cli.run_words import now_of
from holdfast.service.registry import Operation


class CommandSpec(Struct, frozen=True, kw_only=True):
    """One command: its words, the fields that are arguments in their order, and the field that takes all further words.

    `columns` are the columns of each item in a list, and `shown` is the field of the answer that is shown by itself.
    `tables` are the columns of fields that are lists, `text` is the field that is a text of several lines, and `hidden`
    are fields that are only shown as JSON. `secret` is shown by itself too, unformatted for use in a shell, with the
    remark that this is the only time. `stdin` is the field that is read from the standard input if it is given as `-`,
    because others can see the arguments of a command. `file` is the field that is the text of a file, whose name is
    given instead. `defaults` are values for omitted fields, and `adds` returns what people are shown of an item in
    addition to its fields. `nothing` is the text for an empty list.
    """

    words: str
    arguments: tuple[str, ...] = ()
    rest: str | None = None
    columns: tuple[str, ...] = ()
    shown: str | None = None
    tables: dict[str, tuple[str, ...]] = {}
    text: str | None = None
    hidden: tuple[str, ...] = ()
    secret: str | None = None
    stdin: str | None = None
    file: str | None = None
    defaults: dict[str, str] = {}
    adds: Callable[[dict[str, Any]], dict[str, str]] | None = None
    nothing: str = "there are none"


_OF_DIFF = {"changed": ("step_id", "field", "before", "after"), "fields": ("field", "before", "after")}

NO_TASKS = "there are none that concern you; those of other roles are seen by an admin"

GROUPS = {
    "runs": "run",
    "signals": "signal",
    "tasks": "task",
    "activities": "activity",
    "letters": "dead-letter",
    "sinks": "sink",
    "workflows": "workflow",
    "plans": "plan",
    "schedules": "schedule",
    "tokens": "token",
    "tenants": "tenant",
    "system": "system",
}
"""The command group of each resource of the operations; one that is not listed has its own name."""

HELP = {
    "run": "Start runs, look at them, and control them.",
    "signal": "Find who waits for signals, and what has become of those that were sent.",
    "activity": "Report outcomes of activities by their completion tokens.",
    "task": "List, assign and answer the tasks that workflows give to people.",
    "dead-letter": "List messages that could not be handled; requeue or drop them.",
    "sink": "Manage the sinks: the places to which the event bus sends events of runs.",
    "bus": "Send events to sinks again, and settle events that a sink did not take.",
    "workflow": "List the workflows that can be started.",
    "plan": "Check, register, compare and start plans: workflows that are documents.",
    "schedule": "Create, pause, resume and trigger schedules, which start runs at planned times.",
    "flow": "Show flows: workflows that are written as a tree of steps.",
    "queue": "List the queues of activities.",
    "system": "Show the health, the nodes and the alerts of the installation.",
    "token": "Create, list and revoke the access tokens of callers.",
    "tenant": "Delete the data of a tenant.",
    "artifact": "Download artifacts: files that activities have stored.",
    "retention": "Show how long finished runs are kept, and what is deleted next; delete it now.",
    "archive": "Read finished runs that retention has archived and deleted.",
    "audit": "Read and export the audit log: who changed what, and when.",
    "store": "Make, migrate, copy, back up and restore stores.",
}

RUN = ("run_id",)
TASK = ("task_id",)
STEP = ("run_id", "step_id")
LETTER = ("letter_id",)
EVENTS = ("run_seq", "persisted_at", "event_type", "step_id", "data")
WAITS = ("run_id", "workflow", "step_id", "name", "since", "until")

COMMAND_SPECS: dict[str, CommandSpec] = {
    "runs.start": CommandSpec(words="run start", arguments=("workflow",), rest="input"),
    "runs.list": CommandSpec(
        words="run list",
        columns=("run_id", "workflow", "status", "created_at", "now"),
        defaults={"order": "newest"},
        adds=lambda run: {"now": now_of(run)},
    ),
    "runs.count": CommandSpec(words="run count"),
    "runs.get": CommandSpec(words="run get", arguments=RUN),
    "runs.snapshot": CommandSpec(words="run snapshot", arguments=RUN),
    "runs.graph": CommandSpec(
        words="run graph",
        arguments=RUN,
        tables={"nodes": ("id", "kind", "status", "parent", "depends_on", "attempts", "started_at", "completed_at")},
    ),
    "runs.events": CommandSpec(words="run events", arguments=RUN, columns=EVENTS),
    "runs.query": CommandSpec(words="run query", arguments=("run_id", "name"), rest="input", shown="result"),
    "runs.update": CommandSpec(words="run update", arguments=("run_id", "name"), rest="input", shown="result"),
    "runs.cancel": CommandSpec(words="run cancel", arguments=RUN),
    "runs.pause": CommandSpec(words="run pause", arguments=RUN),
    "runs.resume": CommandSpec(words="run resume", arguments=RUN),
    "runs.approve": CommandSpec(words="run approve", arguments=RUN),
    "runs.terminate": CommandSpec(words="run terminate", arguments=RUN),
    "runs.retry": CommandSpec(words="run retry", arguments=RUN),
    "runs.fork": CommandSpec(words="run fork", arguments=RUN, rest="input"),
    "runs.fork_many": CommandSpec(words="run fork-many", columns=("forked_from", "run_id", "run_seq", "error")),
    "runs.command_many": CommandSpec(
        words="run command-many",
        arguments=("command", "request_id"),
        columns=("run_id", "made", "not_concerned", "error"),
    ),
    "runs.diff": CommandSpec(words="run diff", arguments=("run_id", "other_run_id")),
    "runs.retry_step": CommandSpec(words="run retry-step", arguments=STEP),
    "runs.skip_step": CommandSpec(words="run skip", arguments=STEP, rest="result"),
    "streams.list": CommandSpec(
        words="run streams", arguments=RUN, columns=("name", "last_seq", "size", "dropped", "is_closed")
    ),
    "streams.read": CommandSpec(
        words="run chunks", arguments=("run_id", "name"), columns=("seq", "at", "step_id", "attempt", "value")
    ),
    "signals.send": CommandSpec(words="run signal", arguments=("run_id", "name"), rest="payload"),
    "signals.waits": CommandSpec(words="run waits", arguments=RUN, columns=WAITS),
    "signals.send_many": CommandSpec(words="signal send-many", rest="signals"),
    "signals.start_with": CommandSpec(words="signal start-with", arguments=("workflow", "signal_name"), rest="input"),
    "signals.waiting": CommandSpec(words="signal waiting", columns=WAITS),
    "signals.mailbox": CommandSpec(
        words="signal mailbox", arguments=RUN, columns=("name", "signal_id", "accepted_at", "payload")
    ),
    "signals.unconsumed": CommandSpec(words="signal unconsumed", columns=("run_id", "workflow", "name", "accepted_at")),
    "signals.receipt": CommandSpec(words="signal receipt", arguments=("run_id", "name", "signal_id")),
    "tasks.list": CommandSpec(
        words="task list",
        columns=("task_id", "run_id", "name", "status", "assignee", "roles", "due_at"),
        nothing=NO_TASKS,
    ),
    "tasks.get": CommandSpec(words="task show", arguments=TASK),
    "tasks.history": CommandSpec(words="task history", arguments=TASK, columns=EVENTS),
    "tasks.claim": CommandSpec(words="task claim", arguments=TASK),
    "tasks.release": CommandSpec(words="task release", arguments=TASK),
    "tasks.assign": CommandSpec(words="task assign", arguments=("task_id", "to")),
    "tasks.reassign": CommandSpec(words="task reassign", arguments=("task_id", "to")),
    "activities.complete": CommandSpec(words="activity complete", arguments=("completion_token",), rest="result"),
    "activities.fail": CommandSpec(words="activity fail", arguments=("completion_token",)),
    "activities.heartbeat": CommandSpec(words="activity heartbeat", arguments=("completion_token",)),
    "tasks.complete": CommandSpec(words="task complete", arguments=TASK, rest="answer"),
    "tasks.comment": CommandSpec(words="task comment", arguments=("task_id", "text")),
    "letters.list": CommandSpec(
        words="dead-letter list", columns=("letter_id", "run_id", "reason", "died_at", "settled")
    ),
    "letters.get": CommandSpec(words="dead-letter show", arguments=LETTER),
    "letters.requeue": CommandSpec(words="dead-letter requeue", arguments=LETTER),
    "letters.drop": CommandSpec(words="dead-letter drop", arguments=LETTER),
    "sinks.list": CommandSpec(
        words="sink list", columns=("name", "kind", "server", "backlog", "failures", "dead_letters", "is_paused")
    ),
    "sinks.put": CommandSpec(words="sink put", arguments=("name", "address")),
    "sinks.pause": CommandSpec(words="sink pause", arguments=("sink",)),
    "sinks.resume": CommandSpec(words="sink resume", arguments=("sink",)),
    "sinks.remove": CommandSpec(words="sink remove", arguments=("sink",)),
    "bus.replay": CommandSpec(words="bus replay", arguments=("sink",)),
    "bus.letters": CommandSpec(
        words="bus letters", columns=("letter_id", "sink", "run_id", "from_seq", "to_seq", "attempts", "detail")
    ),
    "bus.requeue": CommandSpec(words="bus requeue", arguments=LETTER),
    "bus.drop": CommandSpec(words="bus drop", arguments=LETTER),
    "workflows.list": CommandSpec(words="workflow list", columns=("name", "version", "doc")),
    "workflows.get": CommandSpec(words="workflow show", arguments=("name",)),
    "schedules.create": CommandSpec(words="schedule create", arguments=("schedule_id", "workflow"), rest="input"),
    "schedules.update": CommandSpec(words="schedule update", arguments=("schedule_id",), rest="input"),
    "schedules.list": CommandSpec(
        words="schedule list", columns=("schedule_id", "workflow", "cron", "every_s", "tz", "is_paused", "last_run_id")
    ),
    "schedules.trigger": CommandSpec(words="schedule trigger", arguments=("schedule_id",)),
    "plans.validate": CommandSpec(words="plan validate", arguments=("document",), file="document"),
    "plans.register": CommandSpec(words="plan register", arguments=("document",), file="document"),
    "plans.list": CommandSpec(
        words="plan list", columns=("plan_id", "plan_version", "sha256", "registered_by", "registered_at")
    ),
    "plans.get": CommandSpec(
        words="plan show",
        arguments=("plan_id",),
        tables={"problems": ("place", "line", "message")},
        text="document",
        hidden=("graph",),
    ),
    "plans.start": CommandSpec(words="plan start", arguments=("plan_id",), rest="inputs"),
    "plans.diff": CommandSpec(words="plan diff", arguments=("plan_id", "from_version", "to_version"), tables=_OF_DIFF),
    "plans.graph": CommandSpec(
        words="plan graph",
        arguments=("plan_id",),
        tables={"nodes": ("id", "kind", "depends_on", "change", "detail")},
    ),
    "plans.schema": CommandSpec(words="plan schema", shown="schema"),
    "tokens.create": CommandSpec(words="token create", arguments=("name",), secret="token"),
    "tokens.list": CommandSpec(
        words="token list", columns=("prefix", "name", "role", "tenant", "expires_at", "is_valid")
    ),
    "tokens.revoke": CommandSpec(words="token revoke", arguments=("token_id",)),
    "tokens.revoke_leaked": CommandSpec(words="token revoke-leaked", arguments=("token",), stdin="token"),
    "runs.delete": CommandSpec(words="run delete", arguments=RUN),
    "tenants.delete": CommandSpec(words="tenant delete", arguments=("tenant",)),
    "audit.list": CommandSpec(
        words="audit list", columns=("at", "actor", "by", "operation", "run_id", "subject", "outcome")
    ),
    "retention.show": CommandSpec(words="retention show"),
    "retention.preview": CommandSpec(words="retention preview"),
    "retention.run": CommandSpec(words="retention run"),
    "archive.list": CommandSpec(
        words="archive list", columns=("run_id", "workflow", "status", "finished_at", "archived_at", "events")
    ),
    "archive.get": CommandSpec(words="archive show", arguments=RUN),
    "archive.events": CommandSpec(words="archive events", arguments=RUN, columns=EVENTS),
    "system.queues": CommandSpec(words="queue list", columns=("name", "jobs")),
    "system.doctor": CommandSpec(words="system doctor", columns=("level", "subject", "sentence", "advice")),
    "system.nodes": CommandSpec(
        words="system nodes",
        columns=("name", "version", "lease_until", "is_here", "runs", "activities", "workflows", "queues"),
    ),
    "system.samples": CommandSpec(
        words="system samples",
        columns=(
            "at",
            "nodes",
            "completed",
            "failed",
            "retrying",
            "overdue",
            "ready",
            "lag_ms",
            "jobs",
            "dead_letters",
        ),
    ),
    "system.takeovers": CommandSpec(words="system takeovers", columns=("at", "node", "taken_from", "runs")),
    "system.locks": CommandSpec(words="system locks", columns=("name", "node", "epoch", "lease_until", "is_expired")),
    "system.alerts": CommandSpec(words="system alerts", columns=("number", "code", "priority", "run_id", "detail")),
}
"""By the operation's name."""


def spec_of(operation: Operation) -> CommandSpec:
    """Return the command of an operation."""
    found = COMMAND_SPECS.get(operation.name)
    if found is not None:
        return found
    resource, _, verb = operation.name.partition(".")
    return CommandSpec(words=f"{GROUPS.get(resource, resource)} {verb.replace('_', '-')}")
